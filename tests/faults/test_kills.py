"""Runs that a signal kills or stops, with one process and with two ranks: resumed, each ends with
the losses, weights and optimizer state of an undisturbed run. All are slow:

    python -m pytest -n 2 -m slow tests/faults
"""

import os
import random
import signal
import subprocess
import time

import pytest
from faults.outside import SAVE_EVERY, Process, assert_complete, newest, result, rows

from training.optim import OPTIMIZER, SCHEDULE

TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
KILLS = 12  # of each arm
ARMS = [  # each optimizer and each schedule at least once
    (
        f"--model={('llama', 'gpt2')[i % 2]}",
        f"--optimizer={list(OPTIMIZER)[i % len(OPTIMIZER)]}",
        f"--schedule={list(SCHEDULE)[i % len(SCHEDULE)]}",
    )
    for i in range(max(len(OPTIMIZER), len(SCHEDULE)))
]


def stamp(out):
    """The time of the last change of the folder of checkpoints, 0 if there is none."""
    return (out / "ckpt").stat().st_mtime_ns if (out / "ckpt").exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS, ids=" ".join)
def test_kills_at_random_moments_and_within_a_save(lab, arm):
    """Half of the kills come while the run writes a checkpoint. Then it ends."""
    draw, out = random.Random(1), lab.folder()
    for number in range(KILLS):
        process, before, known_rows = lab.start(out, *arm), stamp(out), len(rows(out))
        if number % 2 == 0:
            process.until(lambda: stamp(out) != before, 0.0002)  # noqa: B023
            time.sleep(draw.uniform(0, 0.02))
        else:
            process.until(lambda: len(rows(out)) != known_rows)  # noqa: B023
            time.sleep(draw.uniform(0, 0.5))
        if not process.kill():  # it ended first: the next one
            out = lab.folder()
            continue
        assert_complete(out)
        lost = max((row["step"] for row in rows(out)), default=0) - newest(out)
        assert lost <= SAVE_EVERY
    lab.start(out, *arm).expect(0)
    assert result(out) == result(lab.reference(*arm))


@pytest.mark.slow
@pytest.mark.parametrize("rank, number", [(0, "SIGKILL"), (1, "SIGKILL"), (1, "SIGTERM")])
def test_a_signal_to_one_rank_ends_both(lab, rank, number):
    out, keys = lab.folder(), ("--max_iters=300", "--lr_decay_iters=300", "--eval_interval=100")
    process = Process([*TWO_RANKS, *lab.argv(out, *keys)])
    process.until(lambda: newest(out) and any(row["step"] == 104 for row in rows(out)))
    ranks = processes("-P", str(process.popen.pid), "-f", "train.py")
    os.kill(ranks[rank], getattr(signal, number))
    assert process.popen.wait(timeout=60)
    assert not processes("-f", f"out_dir={out} ")
    assert_complete(out)
    assert newest(out) > (100 if number == "SIGTERM" else 0)
    assert (rank, number) != (1, "SIGKILL") or "lost another rank" in process.printed()[1]

    lab.start(out, *keys).expect(0)
    ended, expected = result(out), result(lab.reference(*keys))
    for key in expected:
        if "loss of" in key:  # one process sums in another order than two
            assert ended[key] == pytest.approx(expected[key], abs=1e-4)


def processes(*pattern):
    """The process numbers that pgrep gives for a pattern."""
    listed = subprocess.run(["pgrep", *pattern], capture_output=True, text=True)
    return [int(number) for number in listed.stdout.split()]
