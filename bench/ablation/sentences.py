"""The sentences of a report: the question, the answer, the noise floor, the method, the facts."""

import math

from bench.ablation.significance import ALPHA
from bench.ablation.stats import MEASURES, listed

DASH = "\u2013"  # stands for a missing number


def signed(value, digits=4):
    """A number with its sign, with a typographic minus."""
    return f"{value:+.{digits}f}".replace("-", "\u2212") if math.isfinite(value) else DASH


def arm_name(verdict):
    return f"{verdict.arm}: beyond {verdict.against}" if verdict.interaction else verdict.arm


def effect(verdict):
    numbers = signed(verdict.mean, 3), signed(verdict.low, 3), signed(verdict.high, 3)
    return "{} ({}, {} to {})".format(arm_name(verdict), *numbers)


def headline(section):
    """The first line of the report."""
    return ("Screening: " if section.sweep["screening"] else "") + section.sweep["question"]


def screening(section):
    """What a screening cannot show; empty if the sweep is no screening."""
    if not section.sweep["screening"]:
        return ""
    n, visible = section.sweep["seeds"], section.main.visible
    about = f" (here about {visible:.3f} nats)" if visible else ""
    seeds = f"{n} seeds" if n > 1 else "1 seed"
    return (
        f"This is a screening on a small setting with {seeds} per arm: it can only detect large"
        f" effects{about}, and they need not hold at another size."
    )


def answer(section):
    """The answer in two sentences: what is decided, and what is not."""
    return f"{decided(section)} {not_decided(section)}."


def by_word(section, *words):
    """[verdict] of the arms with one of these words, the largest difference first."""
    found = [one for one in section.main.verdicts if one.word in words and not one.interaction]
    return sorted(found, key=lambda verdict: -abs(verdict.mean))


def decided(section):
    arms = [verdict for verdict in section.main.verdicts if not verdict.interaction]
    if any(verdict.against != section.sweep["base"] for verdict in arms):
        other = "what each arm is compared with"
    else:
        base = section.sweep["base_values"].get("model", section.sweep["base"])
        other = f"the base ({base})"

    measure, clear = MEASURES[section.main.measure], []
    for word in ("better", "worse"):
        found = by_word(section, word)
        if found:
            verb = "does" if len(found) == 1 else "do"
            clear.append(f"{listed(map(effect, found), 4)} {verb} {word}")
    if not clear:
        return f"By {measure}, no arm is shown to differ from {other}."
    return (
        f"By {measure} (difference in nats per token, 95 % interval), against {other}: "
        f"{', while '.join(clear)}."
    )


def not_decided(section):
    within = f"by less than {section.main.margin:.3f}"
    conflicts = [
        verdict
        for verdict in section.main.verdicts
        if verdict.interaction and verdict.word in ("better", "worse")
    ]
    groups = (  # verdicts, the words for one arm, for several
        (by_word(section, "tie"), f"ties (differs {within})", f"tie (differ {within})"),
        (by_word(section, "undecided"), "is undecided", "are undecided"),
        (conflicts, "does not add up", "do not add up"),
        (by_word(section, "failed"), "failed", "failed"),
        (by_word(section, "not run"), "has not run", "have not run"),
    )
    parts = [
        f"{listed(map(arm_name, verdicts))} {one if len(verdicts) == 1 else several}"
        for verdicts, one, several in groups
        if verdicts
    ]
    return "; ".join(parts) or "Every arm is decided"


def noise_floor(section):
    """How much the base varies, and the smallest difference that the sweep can detect."""
    analysis, floor = section.main, section.main.floor
    n = len(section.runs.done[section.sweep["base"]])
    if not n:
        return "No run of the base is done."

    sd = f", sd {analysis.base_sd:.4f}" if n > 1 else ""
    seeds = f"{n} seeds" if n > 1 else "1 seed"
    sentences = [f"Over {seeds} the base ends at {analysis.base_mean:.4f}{sd}."]
    if floor and math.isfinite(floor.low):
        sentences.append(
            f"A second copy of the base, with other initialisations and another order of the data,"
            f" differs by {signed(floor.mean)} ({signed(floor.low)} to"
            f" {signed(floor.high)})."
        )
    if analysis.visible:
        sentences.append(
            f"A sweep like this finds an effect of {analysis.visible:.3f} or more in 80 of 100"
            f" cases (sd of the median arm, Holm's first step)."
        )
    return " ".join(sentences)


def method(section):
    """How the verdicts are reached."""
    sweep, analysis = section.sweep, section.main
    judged = [verdict for verdict in analysis.verdicts if verdict.word != "noise"]
    if len(sweep["looks"]) == 1:
        looks = "The verdicts are read once, as planned."
    else:
        looks = (
            f"The verdicts are read {len(sweep['looks'])} times, at"
            f" {listed(map(str, sorted(sweep['looks'])))} seeds, as planned; each p-value is"
            f" divided by the look's share of the error, which is valid"
            " however the arms to continue with are chosen."
        )
    margin = "not known yet"
    if analysis.margin > 0:
        margin = f"{analysis.margin:.4f} nats ({analysis.margin_source})"
    return (
        f"Verdicts are by {MEASURES[analysis.measure]}. Each is Welch's t test of an arm's runs"
        f" against those of the base and its second copy together. {looks} Holm's method"
        f" corrects p over {len(judged)} comparisons, at {ALPHA}. A tie is two one-sided t tests"
        f" within a margin of {margin}, at {ALPHA}, corrected in the same way. Intervals are 95 %"
        f" t intervals, each by itself: an interval may exclude zero while its arm is undecided."
        f" Matching: {sweep['match']}. \u201cAbout k more seeds\u201d is a hint: the number that"
        f" gives 80 % power at the observed effect. At"
        f" equal time, two arms are compared at the moment at which the first of them ends; the"
        f" slower one's learning rate has not decayed by then, which counts against it."
    )


# --- facts to reproduce the sweep


def facts_of(section):
    """[(label, text)] of the facts needed to reproduce the sweep."""
    sweep, data = section.sweep, section.sweep["data"]
    rates = " ".join(f"{rate:g}" for rate in sweep["lr_grid"])
    cost = next(iter(section.costs.values()), {})
    priced = [key for key in ("device", "dtype", "threads", "compile", "hardware") if key in cost]
    versions = {
        key: value
        for key, value in sweep["versions"].items()
        if key not in ("git_commit", "hardware")
    }
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
        ("versions", ", ".join(f"{key} {value}" for key, value in versions.items())),
        (
            "data",
            f"{data['dataset']}, fingerprint {data['fingerprint']},"
            f" {data['train_tokens']:,} tokens to train on and {data['val_tokens']:,} to validate",
        ),
        ("costs", ", ".join(f"{key} {cost[key]}" for key in priced) or "not measured"),
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
