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
...), each arm is compared with the base of its setting; from four settings on, the table is of all
of them together and predicts a new one. docs/is_my_change_real.md shows four examples.
"""

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

import math
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

from bench.verdict_rows import KNOWN, last_of_each, read
from common.configurator import Range, build, load
from common.errors import UserError, folded, nearest, printable, run

LEAST_RUNS = 3  # of an arm and of the base, for a verdict


@dataclass
class VerdictConfig:
    # what to compare
    base: str = "baseline"  # the arm that all others are compared with
    arm_column: str = "arm"  # what was changed
    loss_column: str = "loss"  # what is compared; lower is better
    seed_column: str = "seed"  # without this column, each row is a run
    setting_column: str = "setting"  # without it, a table is of one setting
    #: the largest difference that counts as none, in the unit of the loss; without it nothing ties
    margin: Annotated[float, Range(above=0)] | None = None


# ---------------------------------------------------------------- judging


def judge(tables, margin):
    """[row] for each arm of each table {arm: losses}, which begins with the base. A row is a
    dictionary: the columns of its Contrast, mean, verdict, p (corrected for all arms that can be
    tested, in all tables; nan of an arm that cannot), and seeds (a text: as many would decide)."""
    import numpy as np

    from bench.ablation import contrasts

    rows = []
    for groups in tables:
        base_name = next(iter(groups))
        for arm in groups:
            pair = [np.array(groups[arm]), np.array(groups[base_name])]
            learned = contrasts.finite(pair[0])
            row = {
                "arm": arm,
                "pair": pair,
                "n": len(pair[0]),
                "n_control": len(pair[1]),
                "mean": float(learned.mean()) if len(learned) else math.inf,
                "verdict": "base" if arm == base_name else untested(pair, base_name),
                "p": math.nan,
                "seeds": "",
            }
            rows.append(contrasts.contrast(pair).columns() | row)

    tested = [row for row in rows if not row["verdict"]]
    if not tested:
        return rows
    tests = [contrasts.compare(row["pair"], margin or 0, LEAST_RUNS) for row in tested]
    p, p_tie, direction = np.array(tests).T
    found = contrasts.family_verdicts(p, p_tie, direction)
    for place, row in enumerate(tested):
        row["p"] = float(found["p_holm"][place])
        row["verdict"] = str(found["verdict"][place])
        if row["verdict"] == "worse" and diverges(row["pair"]):
            row["verdict"] = "diverges"
        if row["verdict"] == "undecided" and np.isfinite(np.concatenate(row["pair"])).all():
            row["seeds"] = seeds_to_decide(row, margin, len(tested))
    return rows


def diverges(pair):
    """Whether more runs of the arm diverged than of the base, by Fisher's test."""
    from bench.ablation import contrasts

    return contrasts.fisher(*contrasts.failures(pair)) <= contrasts.ALPHA


def seeds_to_decide(row, margin, family):
    """How many seeds of an arm would decide it, as a text. The base grows with the arm."""
    from bench.ablation import power

    def noise_of(seeds):
        return row["se"] * (row["n"] / seeds) ** 0.5, row["df"] * seeds / row["n"]

    seeds = power.seeds_to_decide(row["difference"], noise_of, margin or 0, family)
    return f"{seeds:.0f}" if math.isfinite(seeds) else f">{power.MOST_SEEDS}"


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


def across_settings(settings, config):
    """([Effect] of the arms over {setting: {arm: losses}}, in losses below the base; [note])."""
    from bench.ablation import effects

    variance, notes = noise_of_runs(settings)
    gains, without = gains_of(settings, config.base, variance)
    if without:
        what = "Settings left out, where the base has no run or diverged"
        notes.append(f"{what}: {', '.join(sorted(without))}.")
    if not gains:
        raise UserError("no setting has a base and another arm", "setting", "add their runs")
    columns = {key: [row[key] for row in gains] for key in gains[0]}
    found = effects.fit(columns, config.margin or math.nan)

    few = [effect for effect in found if effect.n_settings < effects.LEAST_SETTINGS]
    for effect in few:
        own = [row for row in gains if row["part"] == effect.part]
        if not any(row["censored"] for row in own):
            effect.mean = sum(row["log_worth"] for row in own) / len(own)
    if few:
        names = ", ".join(f"{effect.part} ({effect.n_settings})" for effect in few)
        what = f"Fewer than {effects.LEAST_SETTINGS} settings"
        notes.append(f"{what}, so no interval and no prediction: {names}.")
    return found, notes


def noise_of_runs(settings):
    """(The variance of the runs of an arm in a setting, pooled over all; [note])."""
    import numpy as np

    from bench.ablation.contrasts import pooled_variance

    cells = [losses for groups in settings.values() for losses in groups.values()]
    variance, df = pooled_variance([np.array(losses) for losses in cells])
    if df:
        sd = float(variance) ** 0.5
        notes = [f"Standard deviation of the runs of an arm in a setting: {sd:.4g}."]
    else:
        notes = ["One run in each setting: chance and setting cannot be told apart."]
    several = [losses for losses in cells if len(losses) > 1]
    equal = sum(map(all_equal, several))
    if equal:
        what = f"Arms in a setting whose runs all have the same loss: {equal} of {len(several)}"
        notes.append(f"{what}. Did the seed reach the training?")
    return variance, notes


def gains_of(settings, base_name, variance):
    """(One row for `effects.fit` for each arm in each setting: how far its mean loss is below the
    base's; [the settings without a base that learned]). A run that diverged is below all others."""
    import numpy as np

    gains = []
    without = []
    for setting, groups in settings.items():
        if base_name not in groups or math.inf in groups[base_name]:
            without.append(setting)
            continue
        base = groups[base_name]
        for arm, losses in groups.items():
            if arm != base_name:
                row = {
                    "part": arm,
                    "setting": setting,
                    "log_worth": float(np.mean(base) - np.mean(losses)),
                    "se": float(np.sqrt(variance * (1 / len(losses) + 1 / len(base)))),
                    "censored": -1 if math.inf in losses else 0,
                }
                gains.append(row)

    lowest = min((row["log_worth"] for row in gains if not row["censored"]), default=0)
    for row in gains:
        if row["censored"]:
            row["log_worth"] = min(lowest, 0)
    return gains, without


# ---------------------------------------------------------------- printing


def main(argv):
    """Print the verdicts on the runs of a command line."""
    given = load(argv, [VerdictConfig], __doc__)
    config = build(VerdictConfig, given.values)
    if not given.words:
        raise UserError("no runs", "command line", KNOWN)
    rows = read(given, config)
    runs, warnings, notes = last_of_each(rows, config)
    settings = {}
    for each in runs:
        settings.setdefault(each.setting, {}).setdefault(each.arm, []).append(each.loss)
    arms = list(dict.fromkeys(each.arm for each in runs))
    check_arms(arms, config, without_loss={each.arm for each in rows} - {*arms, ""})
    for warning in warnings:
        print(folded(f"warning: {warning}"))
    notes += print_verdicts(settings, config)
    for note in notes:
        print(folded(note))


def check_arms(arms, config, without_loss):
    """Raise UserError unless there are the base and another arm. without_loss: the arms of which no
    run has ended."""
    if len(arms) == 1:
        fix = f"add the runs of another arm, or is --arm_column={config.arm_column} right?"
        if without_loss:
            fix = f"let a run of {', '.join(sorted(without_loss))} end"
        raise UserError(f"{arms[0]} is the only arm with a loss", "runs", fix)
    if config.base not in arms:
        fix = nearest(config.base, arms) or f"choose --base= from {', '.join(arms)}"
        raise UserError(f"no arm {config.base}", "base", fix)


def print_verdicts(settings, config):
    """Print the verdicts on {setting: {arm: losses}}: of all settings together if there are enough
    to predict a new one, else of each. Returns [note]."""
    from bench.ablation.effects import LEAST_SETTINGS

    tables = []
    notes = []
    counts = Counter()  # {arm: the settings in which it ran and all runs of the base learned}
    for setting, groups in settings.items():
        where = f" in {setting or '(none)'}" if len(settings) > 1 else ""
        if config.base in groups and len(groups) > 1:
            groups = {config.base: groups[config.base]} | groups
            tables.append({arm + where: losses for arm, losses in groups.items()})
            if math.inf not in groups[config.base]:
                counts.update(groups.keys() - {config.base})
        else:
            notes.append(f"Left out, with nothing to compare: {', '.join(groups)}{where}.")
    if not tables or max(counts.values(), default=0) >= LEAST_SETTINGS:
        return print_settings(settings, config)
    if len(settings) > 1:
        notes.append(f"With {LEAST_SETTINGS} settings or more, a new one is predicted too.")
    return print_arms(tables, config) + notes


def print_arms(tables, config):
    """Print a line for each arm of each setting. Returns [note]."""
    rows = judge(tables, config.margin)
    lines = [["arm", "runs", "mean", "difference [95 %]", "p", "verdict", "seeds to decide"]]
    places = places_of(tables)
    form = f"+.{places}f"
    for row in rows:
        interval = f"{row['difference']:{form}} [{row['low']:{form}}, {row['high']:{form}}]"
        if row["verdict"] == "base" or math.isnan(row["difference"]):
            interval = ""
        elif math.isnan(row["low"]) or row["low"] == row["high"]:  # of runs that are equal
            interval = f"{row['difference']:{form}}"
        p = "" if math.isnan(row["p"]) else f"{row['p']:.2g}"
        numbers = [str(row["n"]), f"{row['mean']:.{places}f}", interval, p]
        lines.append([row["arm"], *numbers, row["verdict"], row["seeds"]])
    print_table(lines)

    notes = []
    tested = [row for row in rows if not math.isnan(row["p"])]
    if any(math.isfinite(row["difference"]) for row in rows if row["verdict"] != "base"):
        notes.append("A negative difference is better. Runs of one seed are not paired.")
    if len(tested) > 1:
        notes.append(f"p is corrected for the {len(tested)} arms that are tested (Holm).")
    if any(row["n"] < LEAST_RUNS for row in rows):
        notes.append(f"A verdict needs {LEAST_RUNS} runs of the arm and of the base; 5 are better.")
    undecided = [row for row in rows if row["verdict"] == "undecided"]
    if any(row["low"] * row["high"] > 0 for row in undecided):
        notes.append(
            "An arm can be undecided though its interval excludes 0: p counts all arms and is"
            " the larger of two tests, and an arm with a run that diverged is never better."
        )
    for row in rows:
        notes += notes_on_runs(row["arm"], row["pair"][0])
    if any(row["seeds"] for row in rows):
        notes.append(
            "Seeds to decide: how many the arm needs in all, and the base in proportion, to be"
            " decided in 80 of 100 cases."
        )
    if not config.margin and undecided:
        notes.append("No arm can tie without --margin, the largest difference that counts as none.")
    return notes


def notes_on_runs(arm, losses):
    """[note] on the runs of an arm that are equal or that diverged."""
    notes = []
    learned = [loss for loss in losses if math.isfinite(loss)]
    if len(learned) > 1 and len(set(learned)) == 1:
        what = f"all {len(learned)} runs have the same loss"
        notes.append(f"{arm}: {what}. Did the seed reach the training?")
    if len(learned) < len(losses):
        what = f"{len(losses) - len(learned)} of {len(losses)} runs diverged (nan or inf)."
        if learned:
            what += f" Mean and interval are of the other {len(learned)}."
        notes.append(f"{arm}: {what} If nan meant 'missing', leave the cell empty.")
    return notes


def print_settings(settings, config):
    """Print a line for each arm over settings. Returns [note]."""
    lines = [["arm", "better in", "mean [95 %]", "new setting [95 %]", "P(better)", "verdict"]]
    found, notes = across_settings(settings, config)
    form = f"+.{places_of(settings.values())}f"
    for effect in found:
        better = f"{effect.n_helps} of {effect.n_settings}"
        numbers = ["", "", ""]
        if math.isfinite(effect.mean):
            numbers[0] = f"{-effect.mean:{form}}"
        if not math.isnan(effect.mean_low):
            numbers[0] += f" [{-effect.mean_high:{form}}, {-effect.mean_low:{form}}]"
            numbers[1] = f"[{-effect.new_high:{form}}, {-effect.new_low:{form}}]"
            numbers[2] = effect.chance
        lines.append([effect.part, better, *numbers, effect.word])
    print_table(lines)
    known = [effect for effect in found if not math.isnan(effect.mean_low)]
    if known:
        what = "Differences of the loss: negative is better."
        notes.append(f"{what} There is no p here: P(better) takes its place.")
    if known and len(found) > 1:
        notes.append(
            "The spread between settings is estimated from all arms together, so another arm moves "
            "these intervals; nothing is corrected for the number of arms."
        )
    diverged = [
        f"{arm}: {losses.count(math.inf)} of {len(losses)} runs diverged in {setting or '(none)'}."
        for setting, groups in settings.items()
        for arm, losses in groups.items()
        if math.inf in losses
    ]
    if diverged:
        diverged.append(
            "Where a run of an arm diverged, its difference counts as the worst of all arms and "
            "settings, or as worse still; where a run of the base did, the setting is left out. "
            "If nan meant 'missing', leave the cell empty."
        )
    return notes + diverged


def places_of(tables):
    """The decimal places of the losses in some {arm: losses}: 4, more if all losses are small."""
    losses = [loss for groups in tables for each in groups.values() for loss in each]
    largest = max((abs(loss) for loss in losses if math.isfinite(loss) and loss), default=1.0)
    return max(4, 3 - math.floor(math.log10(largest)))


def print_table(lines):
    """Print lines of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print(printable("  ".join(cells).rstrip()))


if __name__ == "__main__":
    run(main)
