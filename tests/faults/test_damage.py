"""Full disks, read-only folders, damaged files, used folders: each is said in one line, nothing is
lost, and the run that follows the advice ends like an undisturbed one."""

import os
import resource
import shutil
import subprocess

import pytest
from faults.outside import FILES, SAVE_EVERY, STEPS, Process, assert_complete, newest, tree
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


def checkpoint_bytes(out):
    return sum(path.stat().st_size for path in (out / "ckpt").rglob("*") if path.is_file()) // 2


def test_no_room_for_a_file(lab):
    out = lab.part_way()
    before, size = tree(out / "ckpt"), checkpoint_bytes(out)
    pattern = rf"error: cannot save step {STEPS}.*{out}.*continues from step {SAVE_EVERY * 2}"
    lab.start(out, limits={resource.RLIMIT_FSIZE: size * 2 // 5}).expect(1, pattern)
    assert tree(out / "ckpt") == before
    lab.to_the_end(out)


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


@pytest.mark.parametrize("place", ["the run folder", "its checkpoints"])
def test_a_read_only_folder(lab, place):
    prefix = []
    if os.geteuid() == 0:  # root may write everywhere, unless this capability is dropped
        prefix = ["setpriv", "--bounding-set=-dac_override"]
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv here")
    out = lab.part_way()
    before = tree(out / "ckpt")
    folder = out if place == "the run folder" else out / "ckpt"
    folder.chmod(0o555)
    try:
        if folder == out:
            pattern = rf"error: cannot write here \(out_dir={out}\)"
            lab.start(out, prefix=prefix).expect(2, pattern)
        else:
            pattern = rf"error: cannot save step {STEPS}: Permission denied .*{out}.*writable"
            lab.start(out, prefix=prefix).expect(1, pattern)
    finally:
        folder.chmod(0o755)
    assert tree(out / "ckpt") == before
    lab.to_the_end(out)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped bit": flip,
    "a truncated file": lambda path: os.truncate(path, path.stat().st_size // 2),
    "an empty file": lambda path: os.truncate(path, 0),
    "a missing file": lambda path: path.unlink(),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_the_latest_checkpoint_is_named(lab, damage, file):
    out = lab.part_way()
    folder = out / "ckpt" / f"{newest(out):06d}"
    DAMAGE[damage](folder / file)
    before = tree(out)
    advice = f"go back to step {SAVE_EVERY}: remove this folder"
    pattern = rf"error: the checkpoint is (corrupt|not whole|incomplete).*\({folder}.*{advice}"
    lab.start(out).expect(2, pattern)
    if damage == "a flipped bit":
        Process(["sample.py", f"--out_dir={out}", "--device=cpu"]).expect(2, pattern)
    assert tree(out) == before
    shutil.rmtree(folder)  # as the message says
    lab.to_the_end(out)


def test_a_second_trainer_is_refused_and_the_lock_of_a_dead_one_ignored(lab):
    out, endless = lab.folder(), ["--max_iters=100000", "--lr_decay_iters=100000"]
    first = lab.start(out, *endless)
    first.until(lambda: newest(out))
    pattern = rf"error: process {first.popen.pid} is training here \(out_dir={out}\)"
    lab.start(out, *endless).expect(2, pattern)
    assert first.kill()
    before = newest(out)
    third = lab.start(out, *endless)
    assert third.until(lambda: newest(out) > before)
    third.kill()


@pytest.mark.parametrize(
    "pattern, keys",
    [
        ("there is a run here already.*resume.*--overwrite", ["--init_from=scratch"]),
        ("the checkpoint has another architecture: n_layer 2 -> 3", ["--n_layer=3"]),
        ("the data in words are not those this run began with", ["--data_dir={scratch}/other"]),
    ],
)
def test_a_used_folder_is_not_changed(lab, pattern, keys):
    out = lab.part_way()
    before = tree(out)
    lab.start(out, *(key.format(scratch=lab.scratch) for key in keys)).expect(2, pattern)
    assert tree(out) == before


def test_a_finished_run_has_nothing_to_do_and_overwrite_keeps_the_old_one(lab):
    out = lab.folder(lab.reference())
    before = tree(out)
    lab.start(out).expect(0, "nothing to do")
    assert tree(out) == before

    lab.start(out, "--init_from=scratch", "--overwrite").expect(0)
    aside = out.with_name(out.name + ".old1")
    assert_complete(aside)
    assert newest(aside) == STEPS


def test_a_torn_log_is_mended(lab):
    """A last line cut short by a crash, and a row after the checkpoint: no step is logged twice."""
    out = lab.part_way()
    step = SAVE_EVERY * 2
    with open(out / "log.jsonl", "a") as file:
        file.write(f'{{"step": {step + 1}, "loss": 9.9}}\n{{"step": {step + 2}, "lo')
    lab.to_the_end(out)


NO_NETWORK = "raise OSError('no network')"
RUN = f"class Run:\n    id = 'x'\n    def log(self, *a, **k): {NO_NETWORK}\n"


@pytest.mark.parametrize(
    "module, code",
    [
        ("wandb", "raise ImportError('broken')"),
        ("wandb", f"def init(**more): {NO_NETWORK}"),
        ("wandb", f"{RUN}\ndef init(**more): return Run()"),
        ("matplotlib", "raise ImportError('broken')"),
    ],
)
def test_a_logger_that_fails_costs_one_warning(lab, tmp_path, module, code):
    (tmp_path / f"{module}.py").write_text(code)
    more = ["--log=wandb"] if module == "wandb" else []
    out = lab.folder()
    process = lab.start(out, *more, environment={"PYTHONPATH": str(tmp_path)})
    process.expect(0, "warning: ")
    assert process.printed()[1].count("warning:") == 1


def test_a_loss_that_is_not_finite_is_not_saved(lab):
    out = lab.part_way()
    good, before = out / "ckpt" / f"{newest(out):06d}", tree(out / "ckpt")
    rates = ["--learning_rate=1e30", "--min_lr=1e30", "--grad_clip=0"]
    process = lab.start(out, *rates, "--max_iters=1000", "--eval_interval=1000")
    pattern = r"error: loss .* at step \d+, learning rate 1e\+30"
    process.expect(1, rf"{pattern} \(last good checkpoint: {good}\)")
    assert tree(out / "ckpt") == before
    assert all(value.isfinite().all() for value in load_file(good / FILES[0]).values())
    lab.to_the_end(out)
