"""
Is my change real? Judge the losses of runs, whatever trained them.

    python bench/verdict.py runs.csv --base=baseline
    python bench/verdict.py results.tsv --arm_column=description --loss_column=val_bpb
    python bench/verdict.py out-base-{1,2,3} out-mine-{1,2,3} --base=out-base

Reads .csv, .tsv and .jsonl files with a row for each run, and run folders of train.py, several
together. In a folder's name, the seed at the end is not part of the arm. A lower loss is better. An
empty loss is missing; nan and inf mean that the run diverged. Of several rows of one arm, seed and
setting the last one counts, so a log with a row for each evaluation can be read too.

An arm is better or worse if both Welch's and Student's t test find a difference, after Holm's
correction for all arms. With a column of settings (texts, sizes, optimizers ...), each arm is
compared with the base of its setting, and a new setting is predicted. docs/is_my_change_real.md
shows three examples.
"""

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from common import files
from common.configurator import Range, build, load
from common.errors import UserError, one_line, run

ERROR = 0.05  # of all verdicts together
LEAST_RUNS = 3  # of an arm and of the base, for a verdict
MOST_SEEDS = 300  # more are not worth predicting
POWER = 0.8  # the chance to decide, with the seeds that are said to decide
DELIMITERS = {".csv": ",", ".tsv": "\t"}
SEED = re.compile(r"[-_.](?:seed|s)?[-_]?(\d+)$")  # at the end of the name of a run folder


@dataclass
class VerdictConfig:
    # what to compare
    base: str = "baseline"  # the arm that all others are compared with
    arm_column: str = "arm"  # what was changed
    loss_column: str = "loss"  # what is compared; lower is better
    seed_column: str = "seed"  # without this column, each row is a run
    setting_column: str = "setting"  # without it, all runs are of one setting
    #: the largest difference that counts as none, in the unit of the loss; without it nothing ties
    margin: Annotated[float, Range(above=0)] | None = None


class Run(NamedTuple):
    """A run: its loss is None where it is missing and infinite where the run diverged."""

    arm: str
    setting: str
    seed: str  # "" where it is unknown
    loss: float | None


# ---------------------------------------------------------------- reading


def read(paths, config, typed):
    """[Run] of files and run folders. typed: the keys that the user typed."""
    runs = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            runs.append(run_of_folder(path))
        elif path.suffix in DELIMITERS or path.suffix == ".jsonl":
            runs += runs_of_table(path, config, typed)
        else:
            fix = "name .csv, .tsv or .jsonl files, or run folders of train.py"
            raise UserError("cannot tell what this is", name, fix)
    return runs


def runs_of_table(path, config, typed):
    """[Run] of the rows of a .csv, .tsv or .jsonl file."""
    names = {key: getattr(config, f"{key}_column") for key in ("arm", "loss", "seed", "setting")}
    rows = list(rows_of(path))
    columns = list(dict.fromkeys(key for _, row in rows for key in row))
    for key, name in names.items():
        needed = key in ("arm", "loss") or f"{key}_column" in typed
        if needed and name not in columns:
            fix = f"--{key}_column= names one of: {', '.join(columns) or 'nothing, it is empty'}"
            raise UserError(f"no column {name}", path, fix)

    runs = []
    for line, row in rows:
        found = Run(
            arm=text_of(row.get(names["arm"])),
            setting=text_of(row.get(names["setting"])),
            seed=text_of(row.get(names["seed"])),
            loss=loss_of(row.get(names["loss"]), f"{path}:{line}"),
        )
        runs.append(found)
    return runs


def rows_of(path):
    """(number of its line, {column: value}) of each row of a file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read: {one_line(error)}", path, "check the path") from None
    lines = text.splitlines()
    if path.suffix == ".jsonl":
        for number, line, row in files.json_lines(lines):
            if isinstance(row, dict):
                yield number, row
            elif line.strip():
                raise UserError("not a JSON object", f"{path}:{number}", "correct this line")
        return
    reader = csv.DictReader(lines, delimiter=DELIMITERS[path.suffix])
    for row in reader:
        yield reader.line_num, {key: row[key] for key in row if key is not None}


def text_of(value):
    return "" if value is None else str(value).strip()


def loss_of(value, where):
    """The loss that a cell states: None if it is empty, infinite if it is not a finite number."""
    text = text_of(value)
    if not text:
        return None
    try:
        loss = float(text)
    except ValueError:
        fix = "write a number, nothing (missing), or nan (diverged)"
        raise UserError(f"the loss is {text}", where, fix) from None
    return loss if math.isfinite(loss) else math.inf


def run_of_folder(path):
    """The Run of a run folder of train.py: its last validation loss. It is missing where the run
    has not ended, and infinite where it diverged."""
    config = files.read_json(path / "config.json", "name the run folders of train.py")
    arm = path.resolve().name
    found = SEED.search(arm)
    if found and int(found.group(1)) == config.get("seed"):
        arm = arm[: found.start()]
    loss = None
    if (path / "diverged.json").exists():
        loss = math.inf
    elif (path / "log.jsonl").exists():
        lines = (path / "log.jsonl").read_bytes().split(b"\n")
        for _, _, row in files.json_lines(lines):  # a kill may cut a line short
            if isinstance(row, dict) and row.get("step", 0) >= config.get("max_iters", math.inf):
                loss = row.get("whole_val_loss") or row.get("val_loss") or loss
    return Run(arm, "", text_of(config.get("seed")), loss)


def last_of_each(runs):
    """(the runs that count, [note]): of several rows of one run the last, without missing ones."""
    last = {}
    for number, each in enumerate(runs):
        key = each[:3] if each.seed else number
        last[key] = each
    known = [each for each in last.values() if each.loss is not None and each.arm]
    notes = []
    replaced = len(runs) - len(last)
    missing = len(last) - len(known)
    if replaced:
        notes.append(f"Rows that a later row of the same arm and seed replaces: {replaced}.")
    if missing:
        notes.append(f"Runs left out, without a loss or an arm: {missing}.")
    return known, notes


# ---------------------------------------------------------------- judging


def judge(groups, margin):
    """[row] of the arms of one setting, {arm: losses}, the base first: a dictionary of n, mean,
    difference with its interval, p corrected for all arms, verdict, and more: the seeds that would
    decide."""
    import numpy as np

    from bench.ablation.contrasts import compare, contrast, finite, holm

    base, *others = (np.array(losses) for losses in groups.values())
    tests = []
    rows = []
    for arm, losses in zip(list(groups)[1:], others, strict=True):
        pair = [losses, base]
        p_values = (1, 1, 0)
        if min(map(len, pair)) >= LEAST_RUNS and not any(map(all_equal, pair)):
            p_values = compare(pair, margin or 0)
        tests.append(p_values)
        mean = finite(losses).mean() if len(finite(losses)) else math.inf
        rows.append({"arm": arm, "mean": float(mean), "pair": pair} | contrast(pair).columns())

    p, p_tie, direction = np.array(tests, float).T
    for row, *of_row in zip(rows, holm(p), holm(p_tie), direction, strict=True):
        row["p"] = float(of_row[0])
        row["verdict"] = word_of(row["pair"], *of_row)
        row["more"] = ""
        if row["verdict"] == "undecided" and all(map(math.isfinite, [*row["pair"][0], *base])):
            row["more"] = more_seeds(row, margin, len(rows))
    return rows


def all_equal(losses):
    return min(losses) == max(losses) < math.inf


def word_of(pair, p, p_tie, direction):
    """The verdict on the losses of an arm and of the base, from their corrected p-values."""
    losses, base = pair
    if min(len(losses), len(base)) == 1:
        return "none: one run cannot show chance"
    if min(len(losses), len(base)) < LEAST_RUNS:
        return f"none: fewer than {LEAST_RUNS} runs"
    if all_equal(losses) or all_equal(base):
        return "none: all runs are equal, so the seed changes nothing"
    if p <= ERROR and direction < 0:
        return "better"
    if p <= ERROR:
        return "diverges" if math.inf in losses else "worse"
    return "tie" if p_tie <= ERROR else "undecided"


def more_seeds(row, margin, family):
    """About how many more seeds, of the arm and of the base, decide with a chance of POWER, if the
    difference is the one seen: as a text."""
    import numpy as np
    from scipy.special import nctdtr, stdtr, stdtrit

    from bench.ablation.contrasts import moments

    (n, _, variance), (m, _, of_base) = (moments(losses) for losses in row["pair"])
    more = np.arange(1, MOST_SEEDS + 1)
    se = np.sqrt(variance / (n + more) + of_base / (m + more))
    df = n + m + 2 * more - 2
    size = abs(row["difference"])
    decides = nctdtr(df, size / se, stdtrit(df, 1 - ERROR / family / 2)) <= 1 - POWER
    if margin:
        reach = stdtrit(df, 1 - ERROR / family)
        inside = stdtr(df, (margin - size) / se - reach) + stdtr(df, (margin + size) / se - reach)
        decides |= inside - 1 >= POWER
    return str(more[decides.argmax()]) if decides.any() else f">{MOST_SEEDS}"


def across_settings(runs, config):
    """([Effect] of the arms over settings, in losses below the base; [note])."""
    import numpy as np

    from bench.ablation import effects
    from bench.ablation.contrasts import pooled_variance

    cells = {}
    for each in runs:
        cells.setdefault((each.arm, each.setting), []).append(each.loss)
    variance, df = pooled_variance([np.array(losses) for losses in cells.values()])
    notes = [
        f"Standard deviation of the runs of an arm in a setting: {float(variance) ** 0.5:.4g}."
    ]
    if not df:
        notes = ["One run in each setting: chance and setting cannot be told apart."]

    columns = {key: [] for key in ("part", "setting", "log_worth", "se", "censored")}
    without = set()  # a base that learned
    for (arm, setting), losses in cells.items():
        base = cells.get((config.base, setting), [math.inf])
        if not all(map(math.isfinite, base)):
            without.add(setting)
        if arm == config.base or setting in without:
            continue
        columns["part"].append(arm)
        columns["setting"].append(setting)
        columns["log_worth"].append(np.mean(base) - np.mean(losses))
        columns["se"].append(float(np.sqrt(variance * (1 / len(losses) + 1 / len(base)))))
        columns["censored"].append(-int(not all(map(math.isfinite, losses))))
    if without:
        notes.append(
            f"Settings left out, without a loss of the base: {', '.join(sorted(without))}."
        )
    if not columns["part"]:
        raise UserError("no setting has a base and another arm", "setting", "add their runs")
    gains = np.array(columns["log_worth"])
    lowest = gains[np.isfinite(gains)].min(initial=0)  # a run that diverged is below all others
    columns["log_worth"] = np.maximum(gains, lowest)
    return effects.fit(columns, config.margin or math.nan), notes


# ---------------------------------------------------------------- printing


def main(argv):
    """Print the verdicts on the runs of a command line."""
    given = load(argv, [VerdictConfig], __doc__)
    config = build(VerdictConfig, given.values)
    if not given.words:
        raise UserError(
            "no runs", "command line", "name .csv, .tsv or .jsonl files, or run folders"
        )
    runs, notes = last_of_each(read(given.words, config, given.typed))
    groups = {}
    for each in runs:
        groups.setdefault(each.arm, []).append(each.loss)
    if config.base not in groups or len(groups) < 2:
        what = f"{config.base} and another arm are needed"
        raise UserError(what, "base", f"--base= names one of: {', '.join(groups) or 'no arm'}")
    groups = {config.base: groups.pop(config.base)} | groups
    if len({each.setting for each in runs}) > 1:
        notes += print_settings(runs, config)
    else:
        notes += print_arms(groups, config)
    for note in notes:
        print(note)


def print_arms(groups, config):
    """Print a line for each arm. Returns [note]."""
    lines = [["arm", "runs", "mean", "difference [95 %]", "p", "verdict", "more seeds"]]
    base = groups[config.base]
    known = [loss for loss in base if math.isfinite(loss)]
    mean = sum(known) / len(known) if known else math.inf
    lines.append([config.base, str(len(base)), f"{mean:.4f}", "", "", "base", ""])
    for row in judge(groups, config.margin):
        interval = f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
        if math.isnan(row["low"]):
            interval = f"{row['difference']:+.4f}"
        p = "" if row["verdict"].startswith("none") else f"{row['p']:.2g}"
        runs = str(len(row["pair"][0]))
        lines.append(
            [row["arm"], runs, f"{row['mean']:.4f}", interval, p, row["verdict"], row["more"]]
        )
    print_table(lines)
    notes = ["A negative difference is better."]
    if len(groups) > 2:
        notes = [f"{notes[0]} p is corrected for {len(groups) - 1} arms (Holm)."]
    if any(len(losses) < LEAST_RUNS for losses in groups.values()):
        notes.append(f"A verdict needs {LEAST_RUNS} runs of the arm and of the base; 5 are better.")
    for arm, losses in groups.items():
        learned = [loss for loss in losses if math.isfinite(loss)]
        if len(set(learned)) < len(learned):
            notes.append(
                f"{arm}: its {len(learned)} runs have {len(set(learned))} different losses."
            )
        if len(learned) < len(losses):
            notes.append(f"{arm}: {len(losses) - len(learned)} of {len(losses)} runs diverged.")
    if any(line[-1] for line in lines[2:]):
        notes.append("More seeds: of the arm and of the base each, to decide in 80 of 100 cases.")
    if not config.margin:
        notes.append("No arm can tie without --margin, the largest difference that counts as none.")
    return notes


def print_settings(runs, config):
    """Print a line for each arm over settings. Returns [note]."""
    lines = [["arm", "better in", "mean [95 %]", "new setting [95 %]", "P(better)", "word"]]
    found, notes = across_settings(runs, config)
    for effect in found:
        better = f"{effect.n_helps} of {effect.n_settings}"
        numbers = ["", "", ""]
        if math.isfinite(effect.mean):
            mean = f"{-effect.mean:+.4f} [{-effect.mean_high:+.4f}, {-effect.mean_low:+.4f}]"
            new = f"[{-effect.new_high:+.4f}, {-effect.new_low:+.4f}]"
            numbers = [mean, new, f"{effect.p_helps:.2f}"]
        lines.append([effect.part, better, *numbers, effect.word])
    print_table(lines)
    notes.append("Differences of the loss: negative is better. No p: a prediction needs none.")
    if any(math.isnan(effect.mean) for effect in found):
        notes.append("With fewer than 4 settings nothing is known of the next one.")
    return notes


def print_table(lines):
    """Print lines of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    run(main)
