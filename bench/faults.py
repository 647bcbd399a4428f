"""
Break small runs from outside, through the command line, and check that nothing is lost:

    python bench/faults.py                        # a hundred kills and every other fault
    python bench/faults.py --short                # the part that the tests run, within a minute
    python bench/faults.py --only=kills,damage    # some of them, by name

Runs have dropout and two micro-batches per step, and use each optimizer and schedule in turn. A run
that was broken and resumed must end like the undisturbed one: the same logged losses, the same
sha256 of its weights and optimizer state. The command ends with `N passed, N failed` and exits 1 if
one failed. Without --short and --only it writes bench/results/faults.md.
"""

import itertools
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import repo_root  # noqa: F401

from bench.faultlab import lab as runs
from bench.faultlab.kills import kills, ranks, second_signal, signals
from bench.faultlab.lab import Lab, Process, Wrong, newest, same, tree, unchanged
from common.configurator import build, load
from common.errors import UserError, run
from common.files import ROOT, write
from common.runtime import versions


@dataclass
class FaultsConfig:
    kills: int = 100  # number of kill -9; half of them aim at the writing of a checkpoint
    short: bool = False  # fewer kills, and only the quick ones of the other faults
    only: str | None = None  # names of faults, separated by commas
    seed: int = 0  # for the moments of kills and the damaged bytes


# ---------------------------------------------------------------- disks


def full_disk(lab):
    """A limit on the size of files and, where user namespaces are allowed, a file system without
    room for a third checkpoint and a file system that is full."""
    out = lab.part_way()
    before = tree(out / "ckpt")
    size = sum(path.stat().st_size for path in (out / "ckpt").rglob("*") if path.is_file()) // 2
    words = rf"error: cannot save step {lab.steps}.*{out}.*continues from step {lab.save_every * 2}"
    with lab.trial("no more room for a file (RLIMIT_FSIZE)"):
        lab.start(out, limits={resource.RLIMIT_FSIZE: size * 2 // 5}).expect(1, words)
        unchanged(before, out / "ckpt")
        if not lab.short:
            lab.to_the_end(out)

    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if lab.short or shutil.which("unshare") is None:
        return
    probe = [*mount, f"mount -t tmpfs none {lab.scratch}/data"]
    if subprocess.run(probe, capture_output=True).returncode:
        return
    room = rf"{lab.steps}: [\d,]+ bytes are needed, [\d,]+ are free"
    full_file_system(lab, mount, size * 3, "false", f"error: cannot save step {room}")
    fill = f"cat /dev/zero > {lab.scratch}/disk/ballast 2>/dev/null"
    full_file_system(lab, mount, size * 3, fill, "error: cannot write: No space left")


def full_file_system(lab, mount, size, fill, words):
    """Run on a file system of `size` bytes that a shell command fills; `words` match the error."""
    out, disk = lab.part_way(), lab.scratch / "disk"
    disk.mkdir(exist_ok=True)
    before = tree(out / "ckpt")
    script = (
        f"mount -t tmpfs -o size={size} none {disk} && cp -r {out} {disk}/out && {fill}; "
        f'"$0" "$@"; status=$?; rm -r {out}/ckpt; cp -r {disk}/out/ckpt {out}/; exit $status'
    )
    with lab.trial("a full disk (tmpfs)"):
        process = lab.start(out, f"--out_dir={disk}/out", prefix=[*mount, script])
        process.expect(1, rf"{words}.*{disk}/out")
        unchanged(before, out / "ckpt")
        lab.to_the_end(out)


def read_only(lab):
    """Folders that are read-only before the start or become so while the run trains."""
    prefix = []
    if os.geteuid() == 0:  # root may write everywhere, unless this capability is dropped
        prefix = ["setpriv", "--bounding-set=-dac_override"]
        if shutil.which("setpriv") is None:
            return
    out = lab.part_way()
    before = tree(out)
    with lab.trial("a read-only folder"):
        out.chmod(0o555)
        try:
            words = rf"error: cannot write here \(out_dir={out}\)"
            lab.start(out, prefix=prefix).expect(2, words)
        finally:
            out.chmod(0o755)
        unchanged(before, out)
    if lab.short:
        return

    before = tree(out / "ckpt")
    words = rf"error: cannot save step {lab.steps}: Permission denied .*{out}.*writable"
    with lab.trial("a folder that becomes read-only"):
        (out / "ckpt").chmod(0o555)
        try:
            lab.start(out, prefix=prefix).expect(1, rf"{words}.*step {lab.save_every * 2}")
        finally:
            (out / "ckpt").chmod(0o755)
        unchanged(before, out / "ckpt")
        lab.to_the_end(out)


def damage(lab):
    """A file of the latest checkpoint is damaged: the error names it, and its advice works."""

    def flip(path):
        data = bytearray(path.read_bytes())
        data[lab.random.randrange(len(data))] ^= 1 << lab.random.randrange(8)
        path.write_bytes(data)

    ways = {
        "a flipped bit": flip,
        "a truncated file": lambda path: os.truncate(path, path.stat().st_size // 2),
        "an empty file": lambda path: os.truncate(path, 0),
        "a missing file": Path.unlink,
    }
    tries = itertools.product(ways, runs.FILES)
    if lab.short:
        tries = [("a flipped bit", "model.safetensors"), ("a missing file", "config.json")]
    for name, file in tries:
        out = lab.part_way()
        folder = out / "ckpt" / f"{newest(out):06d}"
        ways[name](folder / file)
        before = tree(out)
        advice = f"go back to step {lab.save_every}: remove this folder"
        words = rf"error: the checkpoint is (corrupt|not whole).*\({folder}.*{advice}"
        with lab.trial(f"{name} in the latest checkpoint"):
            lab.start(out).expect(2, words)
            if name == "a flipped bit" and not lab.short:
                Process(["sample.py", f"--out_dir={out}", "--device=cpu"]).expect(2, words)
            unchanged(before, out)
            if not (lab.short and file == "config.json"):
                shutil.rmtree(folder)  # as the message says
                lab.to_the_end(out)


# ---------------------------------------------------------------- folders, logs, plugins, losses


def two_trainers(lab):
    """The second is refused by the first's process number; a dead process's lock is ignored."""
    out, endless = lab.folder(), ["--max_iters=100000", "--lr_decay_iters=100000"]
    first = lab.start(out, *endless)
    first.until(lambda: newest(out))
    words = rf"error: process {first.popen.pid} is training here \(out_dir={out}\)"
    with lab.trial("a second trainer in one folder"):
        lab.start(out, *endless).expect(2, words)
        if not first.kill():
            raise Wrong("the first one ended")
    if lab.short:
        return
    before = newest(out)
    third = lab.start(out, *endless)
    with lab.trial("the lock of a dead process"):
        if not third.until(lambda: newest(out) > before):
            third.expect(0)
    third.kill()


def used_folder(lab):
    """Start from scratch in a used folder, or resume with another architecture, with other data, or
    a finished run: nothing may change."""
    out = lab.part_way()
    before = tree(out)

    def refused(row, words, *more):
        with lab.trial(row):
            lab.start(out, *more).expect(2, f"error: {words}")
            unchanged(before, out)

    used = "there is a run here already.*resume.*--overwrite"
    refused("from scratch into a used folder", used, "--init_from=scratch")
    sizes = "the checkpoint has another architecture: n_layer 2 -> 3, n_embd 32 -> 64"
    refused("another architecture on resuming", sizes, "--n_layer=3", "--n_embd=64")
    if lab.short:
        return
    data = "the data in words are not those this run began with"
    refused("other data on resuming", data, f"--data_dir={lab.scratch}/other")

    finished = lab.reference()
    before = tree(finished)
    with lab.trial("a finished run resumed"):
        lab.start(finished).expect(0, "nothing to do")
        unchanged(before, finished)
    with lab.trial("--overwrite keeps the old run aside"):
        lab.start(out, "--init_from=scratch", "--overwrite").expect(0)
        same(out, finished)
        aside = out.with_name(out.name + ".old1")
        runs.whole(aside)
        if newest(aside) != lab.save_every * 2:
            raise Wrong("the old run is gone")


def torn_log(lab):
    """A log with a last line cut short by a crash and a row after the checkpoint: resuming drops
    both, and no step is logged twice."""
    out = lab.part_way()
    step = lab.save_every * 2
    with open(out / "log.jsonl", "a") as file:
        file.write(f'{{"step": {step + 1}, "loss": 9.9}}\n{{"step": {step + 2}, "lo')
    with lab.trial("a torn last line of the log"):
        lab.to_the_end(out)


NO_NETWORK = "raise OSError('no network')"
RUN = f"class Run:\n    id = 'x'\n    def log(self, *a, **k): {NO_NETWORK}\n"
PLUGINS = (  # module to replace, its new code
    ("wandb", "raise ImportError('broken')"),
    ("wandb", f"def init(**more): {NO_NETWORK}"),
    ("wandb", f"{RUN}\ndef init(**more): return Run()"),
    ("matplotlib", "raise ImportError('broken')"),
)


def plugins(lab):
    """Weights & Biases fails on import, at its start or at every row, or drawing fails: the run
    prints one warning and ends the same."""
    for number, (module, code) in enumerate(PLUGINS):
        folder, out = lab.scratch / f"plugin{number}", lab.folder()
        folder.mkdir()
        (folder / f"{module}.py").write_text(code)
        more = ["--wandb_log"] if module == "wandb" else []
        process = lab.start(out, *more, environment={"PYTHONPATH": str(folder)})
        with lab.trial("Weights & Biases fails" if more else "drawing fails"):
            process.expect(0, "warning: ")
            if process.printed()[1].count("warning:") != 1:
                raise Wrong("more than one warning")
            same(out, lab.reference())


def not_finite(lab):
    """A learning rate at which the weights explode: the run stops before the update and names the
    checkpoint to go back to."""
    out = lab.part_way()
    good, before = out / "ckpt" / f"{newest(out):06d}", tree(out / "ckpt")
    rates = ["--learning_rate=1e30", "--min_lr=1e30", "--grad_clip=0"]
    words = r"error: loss .* at step \d+, learning rate 1e\+30"
    with lab.trial("a loss that is not finite"):
        process = lab.start(out, *rates, "--max_iters=1000", "--eval_interval=1000")
        process.expect(1, rf"{words} \(last good checkpoint: {good}\)")
        unchanged(before, out / "ckpt")
        if not all(value.isfinite().all() for value in runs.tensors(good).values()):
            raise Wrong("weights that are not finite")
        lab.to_the_end(out)


# ---------------------------------------------------------------- the command


QUICK = (kills, signals, full_disk, read_only, damage, two_trainers, used_folder)
FAULTS = {
    fault.__name__: fault for fault in (*QUICK, second_signal, torn_log, plugins, not_finite, ranks)
}


def main(argv):
    values, words = load(argv, [FaultsConfig], __doc__)
    config = build(FaultsConfig, values)
    chosen = [name for name, fault in FAULTS.items() if fault in QUICK or not config.short]
    if config.only:
        chosen = config.only.split(",")
    unknown = [*words, *(name for name in chosen if name not in FAULTS)]
    if unknown:
        raise UserError(f"unknown fault {unknown[0]}", "only", "choose from " + ", ".join(FAULTS))

    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(Path(scratch).resolve(), config.kills, config.short, config.seed)
        try:
            for name in chosen:
                try_fault(lab, name)
        finally:
            for process in Process.started:
                process.kill()

    passed, tries = (sum(numbers) for numbers in zip(*lab.score.values(), strict=True))
    summary = f"{passed} passed, {tries - passed} failed"
    table = ["| fault | passed | of | |", "|---|---|---|---|"]
    for row, (good, of) in lab.score.items():
        table.append(f"| {row} | {good} | {of} | {lab.notes.get(row, '')} |")
    print("\n".join([*table, summary]))
    if not config.short and not config.only:
        write_results(argv, summary, table)
    return 1 if tries > passed else 0


def try_fault(lab, name):
    began = time.time()
    try:
        FAULTS[name](lab)
    except Exception as error:  # an unexpected error counts as a failed try
        with lab.trial(name):
            raise Wrong(f"{type(error).__name__}: {error}") from error
    print(f"{name}: {time.time() - began:.0f} s", flush=True)


def write_results(argv, summary, table):
    facts = versions()
    machine = f"{facts['hardware']}, {facts['cpus']} cores, torch {facts['torch']}"
    lines = [
        "# Faults, caused from outside",
        "",
        f"{machine}, Python {facts['python']}, {platform.system()}; commit {facts['git_commit']}.",
        f"`{' '.join(['python bench/faults.py', *argv])}`: {summary}.",
        "",
        "A try passes if the run prints what it must and, resumed, ends with the losses, weights "
        "and optimizer state of an undisturbed run.",
        "",
        *table,
    ]
    write(ROOT / "bench/results/faults.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    run(main)
