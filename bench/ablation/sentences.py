"""The sentences of a report: the question, the answer, the noise floor, the method, the facts."""

import itertools
import math

from bench.ablation import history
from bench.ablation.significance import MOST_SEEDS, POWER
from bench.ablation.stats import MEASURES, counted, listed

DASH = "\u2013"  # stands for a missing number
NOT_TIMED = "not timed: --time_forms=True does"  # of a compiled form, in costs.jsonl
AT_BASE_RATE = " at the base's rate"
PAIRED = ("the order of the data", "the initial weights", "both")  # what two runs may share
NOT_YET = "not yet"  # the word of each comparison while a sweep is running


def signed(value, digits=4):
    """A number with its sign, with a typographic minus."""
    return f"{value:+.{digits}f}".replace("-", "\u2212") if math.isfinite(value) else DASH


# --- arms and their verdicts


def arms_of(section):
    """The names of the arms, without the runs of the base at other numbers of tokens."""
    return [arm for arm, facts in section.sweep["arms"].items() if not facts.get("curve")]


def comparisons(section):
    """[Verdict] of a section: the noise floor first, then the arms, then the interactions."""
    floor = section.main.floor
    others = [verdict for verdict in section.main.verdicts if verdict is not floor]
    return [*filter(None, [floor]), *others]


def arm_name(verdict):
    if verdict.interaction and verdict.arm == verdict.against.replace(" + ", ":"):
        return verdict.against.replace(" + ", " × ")  # of a factorial
    return verdict.name


def effect(verdict):
    if verdict.diverged:
        return f"{arm_name(verdict)} ({verdict.diverged} of {counted(verdict.n, 'run')} diverged)"
    numbers = signed(verdict.mean, 3), signed(verdict.low, 3), signed(verdict.high, 3)
    worth = f"; worth {verdict.worth} the tokens" if verdict.worth else ""
    return "{} ({}, {} to {}{})".format(arm_name(verdict), *numbers, worth)


def rate_note(section, verdict):
    """What follows a word where no learning rate was tuned."""
    tuned = len(section.sweep["lr_grid"]) > 1 or section.sweep["screening"]
    return AT_BASE_RATE if verdict.word in ("better", "worse", "tie") and not tuned else ""


# --- runs that are missing


def missing_runs(section):
    """({arm: number of its runs that have not ended}, number of planned runs)."""
    sweep, runs = section.sweep, section.runs
    planned = dict(history.planned_runs(sweep, sweep["seeds"]))
    ended = {arm: len(runs.ended(arm)) for arm in planned}
    for arm, facts in sweep["arms"].items():
        if facts.get("curve"):
            planned[arm], ended[arm] = sweep["curve_seeds"], len(runs.curve.get(facts["curve"], ()))
    if len(sweep["lr_grid"]) > 1:
        tuned = [
            arm
            for arm in arms_of(section)
            if not {"again", "replicate"} & sweep["arms"][arm].keys()
        ]
        grids = [sweep.get("lr_grids", {}).get(arm, sweep["lr_grid"]) for arm in tuned]
        planned["tuning"] = sum(map(len, grids)) * sweep["tune_seeds"]
        ended["tuning"] = len(runs.tuning)
    missing = {arm: number - ended[arm] for arm, number in planned.items()}
    return {arm: left for arm, left in missing.items() if left > 0}, sum(planned.values())


def unfinished(sections):
    """The first line of a page with missing runs, or an empty text."""
    missing, planned = {}, 0
    for section in sections:
        ours, all_of_it = missing_runs(section)
        planned += all_of_it
        for arm, left in ours.items():
            missing[arm] = missing.get(arm, 0) + left
    if not missing:
        return ""
    arms = ", ".join(f"{arm} {left}" for arm, left in missing.items())
    return f"UNFINISHED: {sum(missing.values())} of {planned} runs are missing: {arms}"


# --- the top of the page


def headline(section):
    """The question, which stands at the top of a section."""
    return ("Screening: " if section.sweep["screening"] else "") + section.sweep["question"]


def screening(section):
    """What a screening cannot show; empty if the sweep is no screening."""
    if not section.sweep["screening"]:
        return ""
    visible = section.main.visible
    about = f" (here about {visible:.3f} nats)" if visible else ""
    return (
        f"This is a screening with {counted(section.sweep['seeds'], 'run')} per arm. It ranks the"
        f" arms, sees only large effects{about}, and decides nothing."
    )


def answer(section):
    """The answer in two sentences: what is decided, and what is not."""
    words = {verdict.word for verdict in section.main.verdicts}
    if NOT_YET in words:
        return "The sweep is running. It gives its verdicts when all runs have ended."
    return " ".join(filter(None, [decided(section), not_decided(section), next_step(section)]))


def by_word(section, *words):
    """[verdict] of the arms with one of these words, the largest difference first."""
    found = [one for one in section.main.verdicts if one.word in words and not one.interaction]
    return sorted(found, key=lambda verdict: -abs(verdict.mean))


def reference(section):
    """What the arms are compared with."""
    arms = [verdict for verdict in section.main.verdicts if not verdict.interaction]
    if section.effects:
        return "its low level"
    if any(verdict.against != section.sweep["base"] for verdict in arms):
        return "what each arm is compared with"
    return f"the base ({section.sweep['base_values'].get('model', section.sweep['base'])})"


def decided(section):
    measure, other, clear = MEASURES[section.main.measure], reference(section), []
    if any(rate_note(section, verdict) for verdict in section.main.verdicts):
        measure += AT_BASE_RATE
    more = "by more than the noise"
    clauses = {  # word: of one arm, of several
        "better": ("does better", "do better"),
        "worse": ("does worse", "do worse"),
        "larger than the noise": (f"differs {more}", f"differ {more}"),
    }
    for word, (one, several) in clauses.items():
        found = by_word(section, word)
        if found:
            clear.append(f"{listed(map(effect, found), 4)} {one if len(found) == 1 else several}")
    if not clear:
        return f"By {measure}, no arm is shown to differ from {other}."
    return (
        f"By {measure} (difference in nats per token, 95 % interval), against {other}: "
        f"{', while '.join(clear)}."
    )


def not_decided(section):
    margin = section.main.margin or 0
    within = f"by less than {margin:.3f}"
    words = ("better", "worse")
    conflicts = [v for v in section.main.verdicts if v.interaction and v.word in words]
    groups = (  # verdicts, the words for one arm, for several
        (by_word(section, "tie"), f"ties (differs {within})", f"tie (differ {within})"),
        (by_word(section, "undecided"), "is undecided", "are undecided"),
        (by_word(section, "not seen"), "is not seen", "are not seen"),
        (by_word(section, "no verdict"), "has no verdict", "have no verdict"),
        (conflicts, "does not add up", "do not add up"),
        (by_word(section, "diverged"), "diverged", "diverged"),
        (by_word(section, "failed"), "failed", "failed"),
        (by_word(section, "not run"), "has not run", "have not run"),
    )
    parts = [
        f"{listed(map(arm_name, verdicts))} {one if len(verdicts) == 1 else several}"
        for verdicts, one, several in groups
        if verdicts
    ]
    return f"{'; '.join(parts) or 'Every arm is decided'}."


def next_step(section):
    """What a screening says to run next."""
    if not section.sweep["screening"]:
        return ""
    large = [verdict.arm for verdict in by_word(section, "larger than the noise")]
    arms = f" with {listed(large)}" if large else ""
    return f"Next: run the sweep{arms} without --screening, with eight runs per arm."


def noise_floor(section):
    """How much the base varies, and the smallest difference that the sweep can detect."""
    analysis, floor = section.main, section.main.floor
    if not math.isfinite(analysis.base_mean):
        return "No run of the base is done."
    sd = f", sd {analysis.base_sd:.4f}" if math.isfinite(analysis.base_sd) else ""
    runs = counted(analysis.base_n, "run")
    sentences = [f"Over {runs} the base ends at {analysis.base_mean:.4f}{sd}."]
    if floor and math.isfinite(floor.low):
        sentences.append(
            f"Its second copy, the same model with other initialisations, differs by"
            f" {signed(floor.mean)} ({signed(floor.low)} to {signed(floor.high)})."
        )
    if analysis.visible:
        sentences.append(
            f"The sweep finds an effect of {analysis.visible:.3f} or more in 80 of 100 cases."
        )
    if analysis.tie_power is not None and not section.sweep["screening"]:
        reach = f"{analysis.tie_seeds or MOST_SEEDS} seeds"
        seeds = f"{reach} {'make it 80' if analysis.tie_seeds else 'do not make it 80'}"
        sentences.append(
            f"An arm that equals the base ties in {100 * analysis.tie_power:.0f} of 100"
            + (f"; {seeds}." if analysis.tie_power < POWER else ".")
        )
    return " ".join(sentences)


def history_lines(section):
    """What changed between the reports of a sweep, from its history."""
    lines = []
    for before, after in itertools.pairwise(section.records):
        for key in ("metric", "margin", "arms", "looks"):
            if before[key] != after[key]:
                when = before["when"][:16].replace("T", " ")
                changed = f"{key} was {in_words(before[key])}, then {in_words(after[key])}"
                lines.append(f"After the report of {when}: {changed}.")
    return lines


def in_words(value):
    """A value of history.jsonl in a sentence."""
    if isinstance(value, list):
        return listed(map(str, value), 12)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def pairing(folder):
    """What the pages of bench/pairing.py in a folder say, as a clause; empty if there are none."""
    texts = []
    for path in sorted(folder.glob("pairing_*.md")):
        cells = [line.strip("| ").split(" | ") for line in path.read_text("utf-8").splitlines()]
        ratios = {row[0]: row[-1] for row in cells if len(row) == 4 and row[0] in PAIRED}
        found = listed(f"{ratios[shared]} times where they share {shared}" for shared in PAIRED)
        texts.append(f"{found}, by bench/results/{path.name}")
    if not texts:
        return ""
    return (
        ": the variance of a difference between two runs is, against that of runs that share"
        f" nothing, {'; '.join(texts)} (95 % intervals). With five runs of an arm and eleven of"
        " the base, a paired test has the shorter interval only where that ratio is below a half"
    )


# --- facts to reproduce the sweep


def facts_of(section):
    """[(label, text)] of the facts needed to reproduce the sweep."""
    sweep, data = section.sweep, section.sweep["data"]
    rates = " ".join(f"{rate:g}" for rate in sweep["lr_grid"])
    costs = [next(iter(costs.values())) for costs in section.machines.values()]
    priced = ("device", "dtype", "threads", "compile", "hardware")
    costs = [", ".join(f"{key} {cost[key]}" for key in priced if key in cost) for cost in costs]
    apart = ("git_commit", "hardware")
    versions = [f"{key} {text}" for key, text in sweep["versions"].items() if key not in apart]
    return [
        ("command", sweep["command"]),
        (
            "design",
            f"{sweep['design']}, matched in {sweep['match']}; {sweep['seeds']} seeds,"
            f" learning rates {rates} times the base's",
        ),
        ("commit", distinct(section, "git_commit")),
        ("code", str(sweep["code_hash"])),
        ("hardware", distinct(section, "hardware")),
        ("versions", ", ".join(versions)),
        (
            "data",
            f"{data['dataset']}, fingerprint {data['fingerprint']},"
            f" {data['train_tokens']:,} tokens to train on and {data['val_tokens']:,} to validate",
        ),
        ("costs", "; ".join(costs) or "not measured"),
        ("base", ", ".join(f"{key}={value}" for key, value in sweep["base_values"].items())),
        ("started", sweep["started"]),
        ("rows from", ", ".join(folder.name for folder in section.folders)),
    ]


def distinct(section, key):
    """The different values of a key in the sweep and its rows."""
    rows = [row for done in section.runs.done.values() for row in done.values()]
    values = {str(each[key]) for each in (section.sweep, *rows) if each[key]}
    return ", ".join(sorted(values))


def samples_of(section):
    """{arm: text} of each arm's first seed that has a sample."""
    samples = {}
    for arm, done in section.runs.done.items():
        texts = [row["sample"] for _, row in sorted(done.items()) if row.get("sample")]
        if texts:
            samples[arm] = texts[0].rstrip()
    return samples


def commands_of(section):
    """The command of each run, one per line."""
    runs = [row for done in section.runs.done.values() for _, row in sorted(done.items())]
    return "\n".join(row["command"] for row in runs)
