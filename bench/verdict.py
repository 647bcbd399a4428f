"""
Is my change real? Judge the losses of runs, whatever trained them.

    python bench/verdict.py runs.csv --base=baseline
    python bench/verdict.py results.tsv --arm_column=description --loss_column=val_bpb
    python bench/verdict.py out-base-{1,2,3} out-mine-{1,2,3} --base=out-base

Reads .csv, .tsv and .jsonl files with a row for each run, and run folders of train.py, several
together. In a folder's name, the seed at the end is not part of the arm. A lower loss is better. An
empty loss, NA or N/A is missing; nan and inf mean that the run diverged. Of several rows of one
arm, seed and setting the last one with a loss counts, so that logs can be read too.

An arm is better or worse if both Welch's and Student's t test find a difference, after Holm's
correction for all arms that can be tested. With a column of settings (texts, sizes, optimizers
...), each arm is compared with the base of its setting, and a new setting is predicted.
docs/is_my_change_real.md shows three examples.
"""

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

import math
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from bench.verdict_rows import KNOWN, last_of_each, read
from common.configurator import Range, build, load
from common.errors import UserError, folded, nearest, printable, run

ERROR = 0.05  # of all verdicts together
LEAST_RUNS = 3  # of an arm and of the base, for a verdict
MOST_SEEDS = 300  # more are not worth predicting
POWER = 0.8  # the chance to decide, with the seeds that are said to decide


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


# ---------------------------------------------------------------- judging


class Test(NamedTuple):
    """A test of an arm against the base, not corrected for other arms."""

    p: float
    p_tie: float
    direction: float  # a positive one is worse
    diverges: bool  # whether p is of the number of runs that diverged
    why: str  # why the runs that learned decide nothing, or ""


def judge(groups, margin):
    """[row] of the arms of one setting, {arm: losses}, the base first: a dictionary of mean,
    difference with its interval, verdict, more (the seeds that would decide), and, where the arm
    can be tested, its Test and p, corrected for all such arms."""
    import numpy as np

    from bench.ablation.contrasts import contrast, finite, holm

    base_name, *arms = groups
    rows = []
    for arm in arms:
        pair = [np.array(groups[arm]), np.array(groups[base_name])]
        learned = finite(pair[0])
        row = {
            "arm": arm,
            "pair": pair,
            "mean": float(learned.mean()) if len(learned) else math.inf,
            "verdict": untested(pair, base_name),
            "more": "",
        }
        rows.append(contrast(pair).columns() | row)

    tested = [row for row in rows if not row["verdict"]]
    tests = [compare_runs(row["pair"], margin or 0) for row in tested]
    p_values = holm([test.p for test in tests])
    p_ties = holm([test.p_tie for test in tests])
    for row, test, p, p_tie in zip(tested, tests, p_values, p_ties, strict=True):
        row["test"] = test
        row["p"] = float(p)
        row["verdict"] = word_of(test, p, p_tie)
        if row["verdict"] == "undecided" and np.isfinite(np.concatenate(row["pair"])).all():
            row["more"] = more_seeds(row, margin, len(tested))
    return rows


def untested(pair, base_name):
    """Why an arm cannot be tested, or ""."""
    losses, base = pair
    if min(len(losses), len(base)) == 1:
        return "none: one run cannot show chance"
    if min(len(losses), len(base)) < LEAST_RUNS:
        return f"none: fewer than {LEAST_RUNS} runs"
    if all_equal(losses):
        return f"none: its {len(losses)} runs are equal"
    if all_equal(base):
        return f"none: the {len(base)} runs of {base_name} are equal"
    return ""


def all_equal(losses):
    return min(losses) == max(losses) < math.inf


def compare_runs(pair, margin):
    """The Test of the losses of an arm and of the base, infinite where a run diverged.

    An arm with such runs is neither better nor a tie. It is worse if its other runs are, unless
    more of the base's runs diverged. It diverges if more of its runs did by Fisher's test. A
    useless change has two ways to be called worse then, but none to be called better."""
    from bench.ablation.contrasts import compare, failures, finite, fisher

    learned = [finite(losses) for losses in pair]
    p = 1.0
    p_tie = 1.0
    direction = 0.0
    why = ""
    if min(map(len, learned)) < LEAST_RUNS:
        why = f"fewer than {LEAST_RUNS} runs did not diverge"
    elif any(map(all_equal, learned)):
        why = "the runs that did not diverge are equal"
    else:
        p, p_tie, direction = map(float, compare(learned, margin))

    k, n, c, m = failures(pair)
    if direction < 0 and k:
        why = "an arm is never better while a run of it diverged"
    elif direction > 0 and k * m < c * n:
        why = "more runs of the base diverged"
    if why:
        p = 1.0
    if k or c:
        p_tie = 1.0
    p_diverges = float(fisher(k, n, c, m))
    if p_diverges < p:
        return Test(p_diverges, p_tie, direction=1.0, diverges=True, why=why)
    return Test(p, p_tie, direction, diverges=False, why=why)


def word_of(test, p, p_tie):
    """The verdict of a Test whose p-values are corrected for other arms."""
    if p <= ERROR and test.direction < 0:
        return "better"
    if p <= ERROR:
        return "diverges" if test.diverges else "worse"
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
    return f"{more[decides.argmax()]} each" if decides.any() else f">{MOST_SEEDS} each"


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
        what = "Settings left out, where the base has no run or diverged"
        notes.append(f"{what}: {', '.join(sorted(without))}.")
    if not columns["part"]:
        raise UserError("no setting has a base and another arm", "setting", "add their runs")
    gains = np.array(columns["log_worth"])
    lowest = gains[np.isfinite(gains)].min(initial=0)  # a run that diverged is below all others
    columns["log_worth"] = np.maximum(gains, lowest)
    found = effects.fit(columns, config.margin or math.nan)
    few = []
    for effect in found:
        own = gains[np.array(columns["part"]) == effect.part]
        if effect.n_settings < effects.LEAST_SETTINGS:
            few.append(f"{effect.part} ({effect.n_settings})")
            if np.isfinite(own).all():
                effect.mean = float(own.mean())
    if few:
        least = effects.LEAST_SETTINGS
        notes.append(
            f"Fewer than {least} settings, so no interval and no prediction: {', '.join(few)}."
        )
    return found, notes


# ---------------------------------------------------------------- printing


def main(argv):
    """Print the verdicts on the runs of a command line."""
    given = load(argv, [VerdictConfig], __doc__)
    config = build(VerdictConfig, given.values)
    if not given.words:
        raise UserError("no runs", "command line", KNOWN)
    rows = read(given, config)
    runs, warnings, notes = last_of_each(rows, config)
    groups = {}
    for each in runs:
        groups.setdefault(each.arm, []).append(each.loss)
    check_arms(groups, config, without_loss={each.arm for each in rows} - {*groups, ""})
    for warning in warnings:
        print(folded(f"warning: {warning}"))
    groups = {config.base: groups.pop(config.base)} | groups
    if len({each.setting for each in runs}) > 1:
        notes += print_settings(runs, config)
    else:
        notes += print_arms(groups, config)
    counts = Counter(arm.casefold() for arm in groups)
    alike = [arm for arm in groups if counts[arm.casefold()] > 1]
    if alike:
        notes.append(f"These arms differ only in case: {', '.join(alike)}.")
    for note in notes:
        print(folded(note))


def check_arms(groups, config, without_loss):
    """Raise UserError unless there are the base and another arm. without_loss: the arms of which no
    run has ended."""
    if len(groups) == 1 and without_loss:
        what = f"{next(iter(groups))} is the only arm with a loss"
        raise UserError(what, "runs", f"let a run of {', '.join(sorted(without_loss))} end")
    if len(groups) == 1:
        fix = f"add the runs of another arm, or is --arm_column={config.arm_column} right?"
        raise UserError(f"{next(iter(groups))} is the only arm", "runs", fix)
    if config.base not in groups:
        fix = nearest(config.base, groups) or f"--base= names one of: {', '.join(groups)}"
        raise UserError(f"no arm {config.base}", "base", fix)


def print_arms(groups, config):
    """Print a line for each arm. Returns [note]."""
    lines = [["arm", "runs", "mean", "difference [95 %]", "p", "verdict", "more seeds"]]
    base = groups[config.base]
    known = [loss for loss in base if math.isfinite(loss)]
    mean = sum(known) / len(known) if known else math.inf
    lines.append([config.base, str(len(base)), f"{mean:.4f}", "", "", "base", ""])
    rows = judge(groups, config.margin)
    for row in rows:
        interval = f"{row['difference']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}]"
        if math.isnan(row["difference"]):
            interval = ""
        elif math.isnan(row["low"]):
            interval = f"{row['difference']:+.4f}"
        p = "" if row["verdict"].startswith("none") else f"{row['p']:.2g}"
        runs = str(len(row["pair"][0]))
        lines.append(
            [row["arm"], runs, f"{row['mean']:.4f}", interval, p, row["verdict"], row["more"]]
        )
    print_table(lines)

    tested = [row for row in rows if not row["verdict"].startswith("none")]
    notes = ["A negative difference is better."]
    if len(tested) > 1:
        notes = [f"{notes[0]} p is corrected for the {len(tested)} arms that are tested (Holm)."]
    if any(len(losses) < LEAST_RUNS for losses in groups.values()):
        notes.append(f"A verdict needs {LEAST_RUNS} runs of the arm and of the base; 5 are better.")
    for row in tested:
        notes += why_undecided(row, len(tested))
    for arm, losses in groups.items():
        notes += notes_on_runs(arm, losses)
    if any(row["more"] for row in rows):
        notes.append("More seeds: of the arm and of the base each, to decide in 80 of 100 cases.")
    if not config.margin:
        notes.append("No arm can tie without --margin, the largest difference that counts as none.")
    return notes


def why_undecided(row, family):
    """[note] on an arm that is undecided though its interval excludes 0."""
    if row["verdict"] != "undecided" or not row["low"] * row["high"] > 0:
        return []
    why = row["test"].why or "the p of Student's t test is larger"
    if row["test"].p <= ERROR:
        why = f"p counts all {family} arms"
    return [f"{row['arm']}: undecided, though its interval alone excludes 0: {why}."]


def notes_on_runs(arm, losses):
    """[note] on the runs of an arm that are equal or that diverged."""
    notes = []
    learned = [loss for loss in losses if math.isfinite(loss)]
    if len(learned) > 1 and len(set(learned)) == 1:
        what = f"all {len(learned)} runs have the same loss"
        notes.append(f"{arm}: {what}. Did the seed reach the training?")
    elif len(set(learned)) < len(learned):
        notes.append(f"{arm}: its {len(learned)} runs have {len(set(learned))} different losses.")
    if len(learned) < len(losses):
        what = f"{len(losses) - len(learned)} of {len(losses)} runs diverged (nan or inf)."
        if learned:
            what += f" Mean and interval are of the other {len(learned)}."
        notes.append(f"{arm}: {what} If nan meant 'missing', leave the cell empty.")
    return notes


def print_settings(runs, config):
    """Print a line for each arm over settings. Returns [note]."""
    lines = [["arm", "better in", "mean [95 %]", "new setting [95 %]", "P(better)", "verdict"]]
    found, notes = across_settings(runs, config)
    for effect in found:
        better = f"{effect.n_helps} of {effect.n_settings}"
        numbers = ["", "", ""]
        if math.isfinite(effect.mean):
            numbers[0] = f"{-effect.mean:+.4f}"
        if not math.isnan(effect.mean_low):
            numbers[0] += f" [{-effect.mean_high:+.4f}, {-effect.mean_low:+.4f}]"
            numbers[1] = f"[{-effect.new_high:+.4f}, {-effect.new_low:+.4f}]"
            numbers[2] = f"{effect.p_helps:.2f}"
        lines.append([effect.part, better, *numbers, effect.word])
    print_table(lines)
    what = "Differences of the loss: negative is better."
    notes.append(f"{what} There is no p here: P(better) takes its place.")
    if len(found) > 1:
        notes.append(
            "The spread between settings is estimated from all arms together, so another arm moves "
            "these intervals; nothing is corrected for the number of arms."
        )
    return notes + diverged_in_settings(runs)


def diverged_in_settings(runs):
    """[note] on the runs that diverged, of each arm and setting."""
    cells = {}
    for each in runs:
        cells.setdefault((each.arm, each.setting), []).append(each.loss)
    notes = []
    for (arm, setting), losses in cells.items():
        diverged = losses.count(math.inf)
        if diverged:
            notes.append(
                f"{arm}: {diverged} of {len(losses)} runs diverged in {setting or '(none)'}."
            )
    if notes:
        notes.append(
            "A setting in which a run of an arm diverged counts as its worst. If nan meant "
            "'missing', leave the cell empty."
        )
    return notes


def print_table(lines):
    """Print lines of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print(printable("  ".join(cells).rstrip()))


if __name__ == "__main__":
    run(main)
