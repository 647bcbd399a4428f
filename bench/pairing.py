"""
Does pairing pay? Train a base and one arm many times, and compare the variance of a difference
between them when their runs share the order of the data, their initial weights, both or nothing.

    python bench/pairing.py config/ablate_shakespeare.py --arm=rmsnorm --pairs=24

Run i of the base starts from weights i and reads the data in order i. The arm is trained from
weights i in order i, and from weights i + 1 in order i: together with the base these 3 x 24 runs
make all four kinds of pairs. Weights that both models have, by name and shape, start from the
base's numbers. Each run is a line of bench/results/pairing/ARM.jsonl, and the page is
bench/results/pairing_ARM.md (--out=FOLDER for bench/results). The same command continues, and a
second process with --start=36 helps. All other words are a sweep's.
"""

from pathlib import Path

import numpy as np

import repo_root  # noqa: F401 (puts the repo's root on the path)

import train
from bench.ablation.measure import start_run
from bench.ablation.source import digest
from bench.ablation.sweep import Sweep
from common.errors import UserError, run
from common.files import ROOT, append, write
from training.run_folder import read_rows

MODES = ("nothing", "the order of the data", "the initial weights", "both")
DRAWS = 9999  # of the bootstrap


def trained_loss(sweep, arm, init, order):
    """The loss of a run on the reported half of the validation text. Its model starts from weights
    number `init`: an arm's, where the base has the same ones, from the base's numbers."""
    seeds = {"seed": init, "data_seed": order}
    made = start_run(sweep.run_values(sweep.arms[arm]) | seeds)
    if arm != "base":
        base = start_run(sweep.run_values(sweep.arms["base"]) | seeds)
        numbers = dict(base.learner.model.named_parameters())
        for name, p in made.learner.model.named_parameters():
            if name in numbers and numbers[name].shape == p.shape:
                p.data.copy_(numbers[name].data)
    while made.step < made.config.max_iters:
        train.train_step(made)
    return train.score(made)["val_report"]


def missing(path, jobs, identity):
    """Those of the jobs (arm, init, order) without a row, in their order."""
    rows = [row for row in read_rows(path) if row["identity"] == identity]
    done = {(row["arm"], row["init"], row["order"]) for row in rows}
    return [job for job in jobs if job not in done], rows


def differences(rows, arm, pairs):
    """{mode: differences arm - base [pairs]}."""
    loss = {(row["arm"], row["init"], row["order"]): row["loss"] for row in rows}
    base = np.array([loss["base", i, i] for i in range(pairs)])
    same = np.array([loss[arm, i, i] for i in range(pairs)])
    moved = np.array([loss[arm, (i + 1) % pairs, i] for i in range(pairs)])
    partners = np.roll(same, -1), moved, np.roll(moved, 1), same
    return {mode: partner - base for mode, partner in zip(MODES, partners, strict=True)}


def page(found, arm, pairs, command):
    """The Markdown page of the differences of all modes."""
    lines = [
        "# Does pairing pay?",
        f"`{command}`: {pairs} pairs of the base and of {arm} for each line. The ratio is to the"
        " variance with nothing shared, with its 95 % bootstrap interval over pairs.",
        "| shared | mean difference | sd of a difference | ratio of variances |\n|---|---|---|---|",
    ]
    draws = np.random.default_rng(0).integers(pairs, size=(DRAWS, pairs))
    alone = found[MODES[0]]
    for mode, values in found.items():
        with np.errstate(invalid="ignore"):  # few pairs: a draw may hold one pair alone
            ratios = values[draws].var(1) / alone[draws].var(1)
        low, high = np.nanquantile(ratios, (0.025, 0.975))
        ratio = values.var() / alone.var()
        text = f"{ratio:.2f} ({low:.2f} to {high:.2f})" if mode != MODES[0] else "1"
        lines.append(f"| {mode} | {values.mean():+.4f} | {values.std(ddof=1):.4f} | {text} |")
    return "\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:]) + "\n"


def main(argv):
    own = {"--arm": "rmsnorm", "--pairs": "24", "--start": "0", "--out": ""}
    own |= dict(word.split("=", 1) for word in argv if word.partition("=")[0] in own)
    sweep = Sweep([word for word in argv if word.partition("=")[0] not in own], __doc__)
    arm, pairs, out = (
        own["--arm"],
        int(own["--pairs"]),
        Path(own["--out"] or ROOT / "bench/results"),
    )
    if arm not in sweep.arms or pairs < 4:
        fix = f"choose 4 or more pairs, and from {', '.join(sweep.arms)}"
        raise UserError("no such arm, or too few pairs", f"arm={arm}, pairs={pairs}", fix)

    path = out / "pairing" / f"{arm}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    both = sweep.arms["base"], sweep.arms[arm]
    identity = digest([(one.config_hash, one.code_hash) for one in both])
    kinds = (("base", 0), (arm, 0), (arm, 1))
    jobs = [(name, (i + shift) % pairs, i) for i in range(pairs) for name, shift in kinds]
    jobs = jobs[int(own["--start"]) :] + jobs[: int(own["--start"])]
    while (left := missing(path, jobs, identity))[0]:
        name, init, order = left[0][0]
        row = {"arm": name, "init": init, "order": order, "identity": identity}
        append(path, row | {"loss": trained_loss(sweep, name, init, order)})
        print(f"{name}, weights {init}, order {order}; {len(left[0]) - 1} left", flush=True)
    asked = [word for word in argv if word.partition("=")[0] not in ("--start", "--out")]
    command = " ".join(["python bench/pairing.py", *asked])
    found = out / f"pairing_{arm}.md"
    write(found, page(differences(left[1], arm, pairs), arm, pairs, command))
    print(found)


if __name__ == "__main__":
    run(main)
