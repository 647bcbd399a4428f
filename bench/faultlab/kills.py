"""Runs that a signal kills or stops, with one process and with two ranks."""

import itertools
import os
import re
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass

from bench.faultlab.lab import (
    Process,
    Wrong,
    digest,
    logged,
    newest,
    rows,
    same,
    tree,
    unchanged,
    whole,
)
from training.optim import OPTIMIZER, SCHEDULE

ARMS = [  # each optimizer and each schedule at least once
    (
        f"--model={('llama', 'gpt2')[i % 2]}",
        f"--optimizer={OPTIMIZER[i % len(OPTIMIZER)]}",
        f"--schedule={list(SCHEDULE)[i % len(SCHEDULE)]}",
    )
    for i in range(max(len(OPTIMIZER), len(SCHEDULE)))
]


# ---------------------------------------------------------------- kill -9


AT_RANDOM = "kill -9 at a random moment"
AIMED = "kill -9 aimed at the writing of a checkpoint"


@dataclass
class Aim:
    """How aimed kills find the writing of a checkpoint: at most `width` seconds after its start."""

    width: float = 0.02
    inside: int = 0  # kills that came within the writing

    def learn(self, out):
        """Check whether a kill came within the writing, and aim the next one later or sooner."""
        latest = out / "latest"
        unfinished = [*out.glob("ckpt/.*"), *out.glob(".*.partial-*")]
        pointer = int(latest.read_text()) if latest.exists() else 0
        landed = bool(unfinished) or pointer != newest(out)
        self.inside += landed
        self.width = min(0.2, max(0.002, self.width * (1.1 if landed else 0.8)))


def kills(lab):
    """kill -9 at random moments and while a checkpoint is written; each time the run resumes."""
    plans = {arm: [] for arm in ARMS}  # for each kill whether it is aimed; used from the end
    for n in range(lab.kills):
        plans[ARMS[n % len(ARMS)]].append(n // len(ARMS) % 2 == 1)
    if lab.short:
        plans = {ARMS[0]: [False, True]}
    aim = Aim()
    for arm, plan in plans.items():
        killed_run(lab, arm, plan, aim)
        for _ in range(10 + lab.kills):
            if plan:  # the run ended before all its kills
                killed_run(lab, arm, plan, aim)
        if plan:
            raise RuntimeError(f"{len(plan)} kills never came in time")


def killed_run(lab, arm, plan, aim):
    """Kill and resume a run until it ends. Removes each kill that hit the run from the plan."""
    out = lab.folder()
    last = rows(lab.reference(arm=arm))[-1]
    interval = last["seconds"] / last["step"] * lab.save_every  # seconds between two checkpoints
    while True:
        process = lab.start(out, arm=arm)
        if plan and plan[-1]:
            wait_for_a_save(lab, process, out, aim)
        elif plan:
            wait_at_random(lab, process, out, interval)
        if not plan or not process.kill():
            break
        row = AIMED if plan.pop() else AT_RANDOM
        if row == AIMED:
            aim.learn(out)
            lab.notes[AIMED] = f"{aim.inside} within it"
        with lab.trial(row):
            whole(out)
            lost = max((row["step"] for row in rows(out)), default=0) - newest(out)
            if lost > lab.save_every:
                raise Wrong(f"{lost} steps lost")
    with lab.trial("runs killed and resumed until they end"):
        process.expect(0)
        same(out, lab.reference(arm=arm))


def wait_for_a_save(lab, process, out, aim):
    """Wait until the writing of a checkpoint has begun, and a random time longer."""
    before = stamp(out)
    if process.until(lambda: stamp(out) != before, 0.0002):
        time.sleep(lab.random.uniform(0, aim.width))


def wait_at_random(lab, process, out, interval):
    """Wait for a random moment of the training or, in one of five cases, of the start."""
    known_rows = len(rows(out))

    def training():
        return len(rows(out)) != known_rows and (newest(out) or not lab.short)

    if lab.short or lab.random.random() < 0.8:
        process.until(training)
    longest = interval if lab.short else 1.5 * max(interval, 0.5)
    time.sleep(lab.random.uniform(0, longest))


def stamp(out):
    """The time of the last change of the folder of checkpoints, 0 if there is none."""
    try:
        return (out / "ckpt").stat().st_mtime_ns
    except OSError:
        return 0


# ---------------------------------------------------------------- signals


def signals(lab):
    """SIGTERM and Ctrl-C within a step and within an evaluation: the run saves, and the command
    that it prints resumes it."""
    exits, moments = {signal.SIGTERM: 143, signal.SIGINT: 130}, ("a step", "an evaluation")
    for (number, status), moment in itertools.product(exits.items(), moments):
        if lab.short and (number == signal.SIGTERM) != (moment == "a step"):
            continue
        with lab.trial(f"{number.name} within {moment}"):
            out, process = stopped_run(lab, number, status, moment)
            if lab.short and moment == "an evaluation":
                continue
            printed = process.printed()[0].replace("\\\n", "")
            command = re.search(r"continue with:\npython (train\.py .*)", printed)
            lab.to_the_end(out, shlex.split(command[1]))


def stopped_run(lab, number, status, moment):
    """(run folder, process) of a run that a signal stopped."""
    for _ in range(6):  # until the signal comes within the evaluation, and not after it
        out = lab.folder()
        step = lab.save_every
        if moment == "a step":
            step += lab.random.randrange(1, lab.save_every - 2)
        process = lab.start(out)
        process.until(lambda: logged(out, step, "loss"))  # noqa: B023
        began = time.time()
        process.popen.send_signal(number)
        process.expect(status, "continue with:\npython train.py", 60)
        whole(out)
        seconds = time.time() - began
        if seconds > 20:
            raise Wrong(f"{seconds:.0f} s until the end")
        if moment == "a step" or not logged(out, step, "val_loss"):
            return out, process
    raise Wrong("six signals missed the evaluation")


def second_signal(lab):
    """SIGTERM, then Ctrl-C, within a step of a minute: the run ends; its checkpoints are whole."""
    out = lab.part_way()
    before, log = tree(out / "ckpt"), (out / "log.jsonl").stat().st_ino
    process = lab.start(out, "--gradient_accumulation_steps=20000")
    process.until(lambda: (out / "log.jsonl").stat().st_ino != log)
    time.sleep(1)
    process.popen.send_signal(signal.SIGTERM)
    process.until(lambda: "stopping" in process.printed()[1])
    process.popen.send_signal(signal.SIGINT)
    with lab.trial("a second signal"):
        process.expect(130, "stopping", 5)
        unchanged(before, out / "ckpt")
        lab.to_the_end(out)


# ---------------------------------------------------------------- ranks


TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def ranks(lab):
    """Two ranks of torchrun: one is killed or gets a signal, or the user makes a mistake. Both must
    end, with complete checkpoints."""
    for rank, number in ((0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGTERM)):
        with lab.trial(f"one rank of two gets {number.name}"):
            one_rank_of_two(lab, rank, number)

    out = lab.reference()
    before = tree(out)
    process = Process([*TWO_RANKS, *lab.argv(out, "--init_from=scratch")])
    with lab.trial("two ranks in a used folder"):
        status = process.popen.wait(timeout=60)
        times = process.printed()[1].count("error: there is a run here already")
        if not status or times != 1:
            raise Wrong(f"exit {status}, printed {times} times")
        unchanged(before, out)

    out = lab.folder()
    process = Process([*TWO_RANKS, *lab.argv(out, "--gradient_accumulation_steps=3")])
    with lab.trial("micro-batches that two ranks cannot share"):
        status = process.popen.wait(timeout=60)
        printed = process.printed()[1]
        if not status or "is not divisible by 2 ranks" not in printed or out.exists():
            raise Wrong(printed[-300:])


def one_rank_of_two(lab, rank, number):
    """Send a signal to one of two ranks, and finish the run with one process."""
    out = lab.folder()
    process = Process([*TWO_RANKS, *lab.argv(out)])
    process.until(lambda: newest(out) and logged(out, lab.save_every + 4, "loss"))
    began = time.time()
    os.kill(found_processes("-P", str(process.popen.pid), "-f", "train.py")[rank], number)
    status = process.popen.wait(timeout=120)
    seconds = time.time() - began
    left = found_processes("-f", f"out_dir={out} ")
    if not status or seconds >= 60 or left:
        raise Wrong(f"exit {status} after {seconds:.0f} s, processes left: {left}")
    whole(out)
    if number == signal.SIGTERM and newest(out) == lab.save_every:
        raise Wrong("nothing was saved")

    Process(lab.argv(out)).expect(0)
    found, expected = digest(out), digest(lab.reference())
    losses = [key for key in expected if "loss of" in key]
    distance = max(abs(found.get(key, 1e9) - expected[key]) for key in losses)
    if distance > 1e-4:
        raise Wrong(f"losses {distance} away")


def found_processes(*pattern):
    found = subprocess.run(["pgrep", *pattern], capture_output=True, text=True)
    return [int(number) for number in found.stdout.split()]
