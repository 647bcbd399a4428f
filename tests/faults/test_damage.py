"""Full disks, read-only folders, damaged files: each is said in one line, nothing is lost, and the
run that follows the advice ends like an undisturbed one."""

import os
import shutil
import subprocess

import pytest
from faults.outside import STEPS, tree

pytestmark = pytest.mark.slow


def checkpoint_bytes(out):
    return sum(path.stat().st_size for path in (out / "ckpt").rglob("*") if path.is_file()) // 2


@pytest.mark.parametrize("how", ["no room for a third checkpoint", "full"])
def test_a_full_file_system(lab, how):
    """A file system in memory, where user namespaces are allowed."""
    out, disk = lab.part_way(), lab.scratch / "disk"
    disk.mkdir(exist_ok=True)
    before, size = tree(out / "ckpt"), checkpoint_bytes(out)
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    probe = [*mount, f"mount -t tmpfs none {disk}"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("no user namespaces here")

    fill = f"cat /dev/zero > {disk}/ballast 2>/dev/null" if how == "full" else "false"
    needed = rf"cannot save step {STEPS}: [\d,]+ bytes are needed, [\d,]+ are free"
    pattern = "cannot write: No space left" if how == "full" else needed
    script = (
        f"mount -t tmpfs -o size={size * 3} none {disk} && cp -r {out} {disk}/out && {fill}; "
        f'"$0" "$@"; status=$?; rm -r {out}/ckpt; cp -r {disk}/out/ckpt {out}/; exit $status'
    )
    process = lab.start(out, f"--out_dir={disk}/out", prefix=[*mount, script])
    process.expect(1, rf"error: {pattern}.*{disk}/out")
    assert tree(out / "ckpt") == before
    lab.to_the_end(out)


@pytest.mark.parametrize(
    "name, status, pattern",
    [
        (".", 2, r"cannot write here \(out_dir={out}\)"),
        ("ckpt", 1, f"cannot save step {STEPS}: Permission denied .*{{out}}.*writable"),
    ],
)
def test_a_read_only_folder(lab, name, status, pattern):
    prefix = []
    if os.geteuid() == 0:  # root may write everywhere, unless this capability is dropped
        prefix = ["setpriv", "--bounding-set=-dac_override"]
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv here")
    out = lab.part_way()
    before = tree(out / "ckpt")
    (out / name).chmod(0o555)
    try:
        lab.start(out, prefix=prefix).expect(status, "error: " + pattern.format(out=out))
    finally:
        (out / name).chmod(0o755)
    assert tree(out / "ckpt") == before
    lab.to_the_end(out)
