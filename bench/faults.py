"""
Break small runs from outside, over the command line, and see that nothing is lost:

    python bench/faults.py                        # a hundred kills and every other fault
    python bench/faults.py --short                # what the tests run, within a minute
    python bench/faults.py --only=kills,damage    # some of them: the functions below

Runs have dropout, two micro-batches a step, and each optimizer and schedule in turn. A run that was broken and resumed
must end as the undisturbed one: every logged loss, the sha256 of its weights and optimizer state. Ends with
`N passed, N failed`, and exits 1 if one failed. Without --short and --only it writes bench/results/faults.md.
"""

import itertools
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import repo_root  # noqa: F401

from bench.timing.outside import (
    FILES,
    Lab,
    Process,
    broken,
    changed,
    differs,
    digest,
    logged,
    newest,
    rows,
    tensors,
    tree,
)
from common.configurator import build, load
from common.errors import UserError, run
from common.files import ROOT
from common.runtime import versions
from training.optim import OPTIMIZER, SCHEDULE

ARMS = [
    (
        f"--model={('llama', 'gpt2')[i % 2]}",
        f"--optimizer={OPTIMIZER[i % len(OPTIMIZER)]}",
        f"--schedule={list(SCHEDULE)[i % len(SCHEDULE)]}",
    )
    for i in range(max(len(OPTIMIZER), len(SCHEDULE)))
]


@dataclass
class FaultsConfig:
    kills: int = 100  # of kill -9; half of them are aimed at the writing of a checkpoint
    short: bool = False  # fewer kills, and of the other faults those that are quickly tried
    only: str | None = None  # names of faults, separated by commas
    seed: int = 0  # of the moments and the bytes


def kills(lab):
    """kill -9 at random moments, and within the writing of a checkpoint; each time the same command goes on."""
    aimed, width, inside, late = "kill -9 aimed at the writing of a checkpoint", 0.02, 0, 0
    todo = (
        [(ARMS[0], [False, True])] if lab.short else [(arm, []) for arm in ARMS]
    )  # whether each kill is aimed; the last comes first
    for n in range(0 if lab.short else lab.kills):
        todo[n % len(ARMS)][1].append(n // len(ARMS) % 2 == 1)
    while todo:
        (arm, plan), out = todo[0], lab.folder()
        last = rows(lab.reference(arm))[-1]
        interval = last["seconds"] / last["step"] * lab.every  # seconds between two checkpoints
        while True:
            known, before = len(rows(out)), stamp(out)
            process = lab.start(out, arm=arm)
            if plan and plan[-1]:
                if process.until(lambda: stamp(out) != before, 0.0002):  # a save has begun
                    time.sleep(lab.random.uniform(0, width))
            elif plan:
                if lab.short or lab.random.random() < 0.8:  # the others fall into the start
                    process.until(
                        lambda: len(rows(out)) != known and (newest(out) or not lab.short)
                    )
                time.sleep(
                    lab.random.uniform(0, interval if lab.short else 1.5 * max(interval, 0.5))
                )
            if not plan or not process.kill():
                break
            if plan.pop():
                half = [
                    *out.glob("ckpt/*.tmp"),
                    *out.glob("ckpt/*.old"),
                    *out.glob("latest.tmp"),
                    *out.glob("best.tmp"),
                ]
                landed = (
                    bool(half)
                    or newest(out)
                    and (
                        not (out / "latest").exists()
                        or int((out / "latest").read_text()) != newest(out)
                    )
                )
                inside, width = (
                    inside + bool(landed),
                    min(0.2, max(0.002, width * (1.1 if landed else 0.8))),
                )
                lab.notes[aimed] = f"{inside} within it"
                row = aimed
            else:
                row = "kill -9 at a random moment"
            behind = max((row["step"] for row in rows(out)), default=0) - newest(out)
            lab.check(row, broken(out) or (f"{behind} steps lost" if behind > lab.every else ""))
        lab.check(
            "runs killed and resumed until they end",
            process.ended(0) or differs(out, lab.reference(arm)),
        )
        if not plan:
            todo.pop(0)
        late += bool(plan)
        if late > 10 + lab.kills:
            raise RuntimeError(f"{len(plan)} kills never came in time")


def stamp(out):
    """When the folder of the checkpoints changed last, 0 if there is none."""
    try:
        return (out / "ckpt").stat().st_mtime_ns
    except OSError:
        return 0


def signals(lab):
    """SIGTERM and Ctrl-C within a step and within an evaluation: saved, and the printed command goes on."""
    for (number, status), moment in itertools.product(
        ((signal.SIGTERM, 143), (signal.SIGINT, 130)), ("a step", "an evaluation")
    ):
        if lab.short and (status == 143) != (moment == "a step"):
            continue
        for _ in range(6):  # until the signal comes where it should, and not after the evaluation
            out = lab.folder()
            process, step = (
                lab.start(out),
                lab.every
                + (0 if moment == "an evaluation" else lab.random.randrange(1, lab.every - 2)),
            )
            process.until(lambda: logged(out, step, "loss"))
            began = time.time()
            process.popen.send_signal(number)
            problem = process.ended(
                status, "go on with: python train.py --init_from=resume", 60
            ) or broken(out)
            seconds = time.time() - began
            if problem or moment == "a step" or not logged(out, step, "val_loss"):
                break
        else:
            problem = "six signals missed the evaluation"
        problem = problem or (f"{seconds:.0f} s until the end" if seconds > 20 else "")
        command = re.search(r"go on with: python (train\.py .*)", process.said()[0])
        skip = lab.short and moment == "an evaluation"
        lab.check(
            f"{number.name} within {moment}",
            problem or ("" if skip else lab.to_the_end(out, shlex.split(command[1]))),
        )


def second_signal(lab):
    """A step of a minute, SIGTERM, then Ctrl-C: it ends at once, and the checkpoints are as they were."""
    out = lab.part_way()
    before, log = tree(out / "ckpt"), (out / "log.jsonl").stat().st_ino
    process = lab.start(out, "--gradient_accumulation_steps=20000")
    process.until(lambda: (out / "log.jsonl").stat().st_ino != log)
    time.sleep(1)
    process.popen.send_signal(signal.SIGTERM)
    process.until(lambda: "stopping" in process.said()[1])
    process.popen.send_signal(signal.SIGINT)
    lab.check(
        "a second signal",
        process.ended(130, "stopping", 5) or changed(before, out / "ckpt") or lab.to_the_end(out),
    )


def full_disk(lab):
    """A limit on the size of files; where user namespaces are allowed, also a file system without room for a third
    checkpoint, and one without room at all."""
    out = lab.part_way()
    before, size = (
        tree(out / "ckpt"),
        sum(path.stat().st_size for path in (out / "ckpt").rglob("*") if path.is_file()) // 2,
    )
    problem = lab.start(out, limits={resource.RLIMIT_FSIZE: size * 2 // 5}).ended(
        1, rf"error: cannot save step {lab.steps}.*{out}.*goes on from step {lab.every * 2}"
    )
    lab.check(
        "no more room for a file (RLIMIT_FSIZE)",
        problem or changed(before, out / "ckpt") or ("" if lab.short else lab.to_the_end(out)),
    )
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if (
        lab.short
        or shutil.which("unshare") is None
        or subprocess.run(
            [*mount, f"mount -t tmpfs none {lab.scratch}/data"], capture_output=True
        ).returncode
    ):
        return
    for ballast, words in (
        (False, rf"error: cannot save step {lab.steps}: [\d,]+ bytes are needed, [\d,]+ are free"),
        (True, "error: cannot write: No space left"),
    ):
        out, disk = lab.part_way(), lab.scratch / "disk"
        disk.mkdir(exist_ok=True)
        script = (
            f"mount -t tmpfs -o size={size * 3} none {disk} && cp -r {out} {disk}/out && {f'cat /dev/zero > {disk}/ballast 2>/dev/null' if ballast else 'false'}; "
            f'"$0" "$@"; status=$?; rm -r {out}/ckpt; cp -r {disk}/out/ckpt {out}/; exit $status'
        )
        problem = lab.start(out, f"--out_dir={disk}/out", prefix=[*mount, script]).ended(
            1, words + rf".*{disk}/out"
        )
        lab.check(
            "a full disk (tmpfs)", problem or changed(before, out / "ckpt") or lab.to_the_end(out)
        )


def read_only(lab):
    """Folders that are read-only before the start, or become it while the run goes on."""
    prefix = (
        ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    )  # root may write everywhere, unless told not to
    if prefix and shutil.which("setpriv") is None:
        return
    out = lab.part_way()
    before = tree(out)
    out.chmod(0o555)
    problem = lab.start(out, prefix=prefix).ended(2, rf"error: cannot write here \(out_dir={out}\)")
    out.chmod(0o755)
    lab.check("a read-only folder", problem or changed(before, out))
    if lab.short:
        return
    before = tree(out / "ckpt")
    (out / "ckpt").chmod(0o555)
    problem = lab.start(out, prefix=prefix).ended(
        1,
        rf"error: cannot save step {lab.steps}: Permission denied .*{out}.*writable.*step {lab.every * 2}",
    )
    (out / "ckpt").chmod(0o755)
    lab.check(
        "a folder that becomes read-only",
        problem or changed(before, out / "ckpt") or lab.to_the_end(out),
    )


def damage(lab):
    """A file of the latest checkpoint is not what was written: it is named, and following the advice leads to the same end."""

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
    for (name, spoil), file in itertools.product(ways.items(), FILES):
        if lab.short and (name, file) not in (
            ("a flipped bit", "model.safetensors"),
            ("a missing file", "config.json"),
        ):
            continue
        out = lab.part_way()
        folder = out / "ckpt" / f"{newest(out):06d}"
        spoil(folder / file)
        before, words = (
            tree(out),
            rf"error: the checkpoint is (corrupt|not whole).*\({folder}.*go back to step {lab.every}: remove this folder",
        )
        problem = lab.start(out).ended(2, words)
        if name == "a flipped bit" and not lab.short:
            problem = problem or Process(["sample.py", f"--out_dir={out}", "--device=cpu"]).ended(
                2, words
            )
        problem = problem or changed(before, out)
        if not problem and not (lab.short and file == "config.json"):
            shutil.rmtree(folder)  # as the message says
            problem = lab.to_the_end(out)
        lab.check(f"{name} in the latest checkpoint", problem)


def two_trainers(lab):
    """The second is refused with the process number of the first; the lock of a dead one is none."""
    out, endless = lab.folder(), ["--max_iters=100000", "--lr_decay_iters=100000"]
    first = lab.start(out, *endless)
    first.until(lambda: newest(out))
    problem = lab.start(out, *endless).ended(
        2, rf"error: process {first.popen.pid} is training here \(out_dir={out}\)"
    )
    lab.check(
        "a second trainer in one folder", problem or ("" if first.kill() else "the first one ended")
    )
    if not lab.short:
        after = lab.start(out, *endless)
        before = newest(out)
        lab.check(
            "the lock of a dead process",
            "" if after.until(lambda: newest(out) > before) else after.ended(0),
        )
        after.kill()


def used_folder(lab):
    """From scratch into a used folder; another architecture; other data; a finished run: nothing may change."""
    out = lab.part_way()
    plan = [
        (
            "from scratch into a used folder",
            out,
            2,
            r"error: there is a run here already.*resume.*--overwrite",
            ["--init_from=scratch"],
        ),
        (
            "another architecture on resuming",
            out,
            2,
            "error: the checkpoint has another architecture: n_layer 2 -> 3, n_embd 32 -> 64",
            ["--n_layer=3", "--n_embd=64"],
        ),
        (
            "other data on resuming",
            out,
            2,
            "error: the data in words are not those this run began with",
            [f"--data_dir={lab.scratch}/other"],
        ),
        ("a finished run resumed", lab.reference(), 0, "nothing to do", []),
    ]
    for row, where, status, words, more in plan[:2] if lab.short else plan:
        before = tree(where)
        lab.check(row, lab.start(where, *more).ended(status, words) or changed(before, where))
    if not lab.short:
        problem = lab.start(out, "--init_from=scratch", "--overwrite").ended(0) or differs(
            out, lab.reference()
        )
        aside = out.with_name(out.name + ".old1")
        lab.check(
            "--overwrite keeps the old run aside",
            problem
            or broken(aside)
            or ("" if newest(aside) == lab.every * 2 else "the old run is gone"),
        )


def torn_log(lab):
    """A log whose last line a crash tore, with a row beyond the checkpoint: neither is left, and no step comes twice."""
    out = lab.part_way()
    with open(out / "log.jsonl", "a") as file:
        file.write(
            f'{{"step": {lab.every * 2 + 1}, "loss": 9.9}}\n{{"step": {lab.every * 2 + 2}, "lo'
        )
    lab.check("a torn last line of the log", lab.to_the_end(out))


def plugins(lab):
    """Weights & Biases that fails on import, at its start or at every row, and drawing that fails: one warning, and the same run."""
    ready = "class Run:\n    id = 'x'\n    def log(self, *a, **k): raise OSError('no network')\n\ndef init(**more): return Run()"
    ways = {
        "import": ("wandb", "raise ImportError('broken')"),
        "start": ("wandb", "def init(**more): raise OSError('no network')"),
        "log": ("wandb", ready),
        "drawing": ("matplotlib", "raise ImportError('broken')"),
    }
    for name, (module, code) in ways.items():
        folder, out = lab.scratch / name, lab.folder()
        folder.mkdir()
        (folder / f"{module}.py").write_text(code)
        process = lab.start(
            out, *["--wandb_log"] * (module == "wandb"), environment={"PYTHONPATH": str(folder)}
        )
        problem = process.ended(0, "warning: ") or (
            "" if process.said()[1].count("warning:") == 1 else "more than one warning"
        )
        lab.check(
            {"wandb": "Weights & Biases fails", "matplotlib": "drawing fails"}[module],
            problem or differs(out, lab.reference()),
        )


def not_finite(lab):
    """A learning rate that blows the weights up: stopped before the update, with the checkpoint to go back to."""
    out = lab.part_way()
    good, before = out / "ckpt" / f"{newest(out):06d}", tree(out / "ckpt")
    process = lab.start(
        out,
        "--learning_rate=1e30",
        "--min_lr=1e30",
        "--grad_clip=0",
        "--max_iters=1000",
        "--eval_interval=1000",
    )
    problem = process.ended(
        1, rf"error: loss .* at step \d+, learning rate 1e\+30 \(last good checkpoint: {good}\)"
    ) or changed(before, out / "ckpt")
    problem = problem or (
        ""
        if all(value.isfinite().all() for value in tensors(good).values())
        else "weights that are not finite"
    )
    lab.check("a loss that is not finite", problem or lab.to_the_end(out))


def ranks(lab):
    """Two ranks of torchrun, of which one is killed, or asked to stop; and mistakes: all end, with a whole checkpoint."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for rank, number in ((0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGTERM)):
        out = lab.folder()
        process = Process([*launch, *lab.argv(out)])
        process.until(lambda: newest(out) and logged(out, lab.every + 4, "loss"))
        found = subprocess.run(
            ["pgrep", "-P", str(process.popen.pid), "-f", "train.py"],
            capture_output=True,
            text=True,
        ).stdout.split()
        began = time.time()
        os.kill(int(found[rank]), number)
        status = process.popen.wait(timeout=120)
        seconds = time.time() - began
        left = subprocess.run(
            ["pgrep", "-f", f"out_dir={out} "], capture_output=True, text=True
        ).stdout.split()
        problem = (
            broken(out)
            if status and seconds < 60 and not left
            else f"exit {status} after {seconds:.0f} s, processes left: {left}"
        )
        if number == signal.SIGTERM and newest(out) == lab.every:
            problem = problem or "nothing was saved"
        problem = problem or Process(lab.argv(out)).ended(0)  # by one process
        if not problem:
            ours, theirs = digest(out), digest(lab.reference())
            far = max(
                abs(ours.get(key, 1e9) - value) for key, value in theirs.items() if "loss of" in key
            )
            problem = f"losses {far} away" if far > 1e-4 else ""
        lab.check(f"one rank of two gets {number.name}", problem)
    before = tree(out)
    process = Process([*launch, *lab.argv(out, "--init_from=scratch")])
    told = (
        process.popen.wait(timeout=60),
        process.said()[1].count("error: there is a run here already"),
    )
    lab.check(
        "two ranks in a used folder",
        changed(before, out)
        or ("" if told[0] and told[1] == 1 else f"exit {told[0]}, told {told[1]} times"),
    )
    out = lab.folder()
    process = Process([*launch, *lab.argv(out, "--gradient_accumulation_steps=3")])
    fine = (
        process.popen.wait(timeout=60)
        and "is not divisible by 2 ranks" in process.said()[1]
        and not out.exists()
    )
    lab.check("micro-batches that two ranks cannot share", "" if fine else process.said()[1][-300:])


QUICK = (kills, signals, full_disk, read_only, damage, two_trainers, used_folder)
FAULTS = {
    fault.__name__: fault for fault in (*QUICK, second_signal, torn_log, plugins, not_finite, ranks)
}


def main(argv):
    values, words = load(argv, [FaultsConfig], __doc__)
    config = build(FaultsConfig, values)
    chosen = (
        config.only.split(",")
        if config.only
        else [name for name, fault in FAULTS.items() if fault in QUICK or not config.short]
    )
    unknown = [*words, *(name for name in chosen if name not in FAULTS)]
    if unknown:
        raise UserError(f"unknown fault {unknown[0]}", "only", "choose from " + ", ".join(FAULTS))
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(Path(scratch).resolve(), config.kills, config.short, config.seed)
        try:
            for name in chosen:
                began = time.time()
                try:
                    FAULTS[name](lab)
                except Exception as error:  # what was seen was nothing foreseen
                    lab.check(name, f"{type(error).__name__}: {error}")
                print(f"{name}: {time.time() - began:.0f} s", flush=True)
        finally:
            for process in Process.started:
                process.kill()
    passed, tries = (sum(numbers) for numbers in zip(*lab.score.values()))
    table = [
        "| fault | passed | of | |",
        "|---|---|---|---|",
        *(
            f"| {row} | {good} | {of} | {lab.notes.get(row, '')} |"
            for row, (good, of) in lab.score.items()
        ),
    ]
    print("\n".join(table))
    print(f"{passed} passed, {tries - passed} failed")
    if not config.short and not config.only:
        facts = versions()
        head = [
            "# Faults, from outside",
            "",
            f"{facts['hardware']}, {facts['cpus']} cores, torch {facts['torch']}, Python {facts['python']}, {platform.system()}; commit {facts['git_commit']}.",
            f"`{' '.join(['python bench/faults.py', *argv])}`: {passed} passed, {tries - passed} failed.",
            "",
            "A try passes if the run says what is owed and, resumed, ends with the losses, weights and optimizer state of an undisturbed run.",
            "",
        ]
        (ROOT / "bench" / "results" / "faults.md").write_text(
            "\n".join(head + table) + "\n", encoding="utf-8"
        )
    return 1 if tries > passed else 0


if __name__ == "__main__":
    run(main)
