"""
What the rows of a sweep say: a verdict for each arm with its uncertainty, and the caveats that follow from the data.

One measure decides (`metric` of sweep.json, lower is better). An arm and the arm it is compared with are paired by seed: they
saw the same batches in the same order. The tests are SciPy's and statsmodels'; what is ours is which of them decides what:

- the noise floor first: the base, the base again, how far they differ, and how far their pairs go together;
- paired t: the mean difference, its 95 % interval (not corrected for the number of arms), its p;
- looks: a sweep that may stop at n1, n2, ... seeds has that many chances, so a p is L x the smallest at the looks reached (Bonferroni
  over the L planned looks). That holds however the arms to go on with are chosen (Wald's union bound), and takes no model;
- Holm over the family of all planned comparisons, those that failed or have not run included at p = 1: the p that decides;
- equivalence (two one-sided t tests against the margin, Schuirmann 1987), corrected for the looks, not over the family: a tie is a result;
- beside them, deciding nothing: the sign-flip p, whose floor is 2/2^n, and from ten seeds on the BCa bootstrap (at five it covers some 84 %).
"""

import math
import warnings
from dataclasses import dataclass, field

import numpy as np
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import ttost_paired

ALPHA, POWER = 0.05, 0.8
BOOTSTRAP_FROM = 10  # seeds
MOST_SEEDS = (
    300  # more than these would be needed: nobody will run them, and the estimate is worthless
)
MEASURES = {
    "final_val_loss": "final validation loss",
    "best_val_loss": "best validation loss",
    "equal_time": "validation loss at equal time",
}


@dataclass
class Runs:
    """The rows of a sweep, sorted: what may be used, and what is shown beside it."""

    done: dict  # arm -> {seed: row}, at the arm's learning rate, of the sweep's code and configuration
    failed: list = field(default_factory=list)
    stale: list = field(
        default_factory=list
    )  # of other code, another configuration or another learning rate
    tuning: list = field(default_factory=list)


@dataclass
class Verdict:
    """One comparison. Differences are arm minus reference, in nats per token: negative is better."""

    arm: str
    against: str
    word: str  # better | worse | tie | undecided | failed | not run | noise (the base again: it makes no claim)
    seeds: list = field(default_factory=list)  # the pairs
    loss: float = math.nan  # mean of the arm over its own seeds, and its sd
    loss_sd: float = math.nan
    mean: float = math.nan
    low: float = math.nan  # 95 % t interval
    high: float = math.nan
    sd: float = math.nan  # of the differences
    correlation: float = math.nan  # of the pairs
    p: float = math.nan  # paired t, this comparison alone
    p_holm: float = math.nan  # corrected for the looks and the family: the one that decides
    p_tie: float = math.nan  # equivalence, corrected for the looks
    p_flip: float = math.nan  # sign flips
    bootstrap: tuple = None  # (low, high), BCa
    more: int = None  # seeds that might decide it, None if no number that anybody would run
    why: str = ""
    interaction: bool = False

    def __str__(self):
        if self.word != "undecided":
            return self.word
        return f"undecided ({f'about {self.more} more seed' + 's' * (self.more > 1) if self.more else f'over {MOST_SEEDS} seeds'})"


@dataclass
class Analysis:
    """All that is said about one sweep by one measure."""

    measure: str
    margin: float
    base_mean: float
    base_sd: float
    verdicts: list  # of Verdict, in the sweep's order, interactions last
    floor: Verdict = None  # the base again, if the sweep has it
    visible: float = None  # the smallest difference that so many seeds find 80 times in 100


def sort_rows(sweep, rows):
    """Runs from the rows of a sweep: the last row of a run counts."""
    last = {
        (
            row["arm"],
            row["seed"],
            row["lr"],
            row["purpose"],
            row["code_hash"],
            row["config_hash"],
        ): row
        for row in rows
    }
    runs = Runs({arm: {} for arm in sweep["arms"]})
    for (arm, seed, lr, purpose, *_), row in sorted(last.items()):
        planned = sweep["arms"].get(arm)
        changed = (
            planned is None
            or row["code_hash"] != sweep["code_hash"]
            or row["config_hash"] != planned.get("config_hash", row["config_hash"])
        )
        if changed or purpose == "report" and lr != sweep["chosen_lr"].get(arm, 1):
            runs.stale.append(row)
        elif row["status"] != "done" or not np.isfinite(row.get("final_val_loss") or math.nan):
            runs.failed.append(row)
        elif purpose == "tune":
            runs.tuning.append(row)
        else:
            runs.done[arm][seed] = row
    return runs


def pairs(runs, arm, against, measure, costs):
    """(seeds, x [n], reference [n]) over the seeds that both have. Equal time: the loss at the time at which the first of the two
    ends, on its curve by linear interpolation, steps turned into seconds by what a step of each costs when measured alone."""
    seeds = sorted(runs.done[arm].keys() & runs.done[against].keys())
    if measure != "equal_time":
        return seeds, *(
            np.array([runs.done[name][seed][measure] for seed in seeds], float)
            for name in (arm, against)
        )
    milliseconds = [(costs.get(name) or {}).get("milliseconds_per_step") for name in (arm, against)]
    if None in milliseconds:
        return [], np.empty(0), np.empty(0)
    both = []
    for seed in seeds:
        curves = [
            np.array(runs.done[name][seed]["curve"], float).T * [[step["median"]], [1]]
            for name, step in zip((arm, against), milliseconds)
        ]
        end = min(curve[0, -1] for curve in curves)
        both.append([np.interp(end, *curve) for curve in curves])
    return seeds, *np.array(both, float).reshape(-1, 2).T


def quietly(function, *args, **keys):
    """Differences that are all alike make SciPy warn; their p is 0, or nan where they are all 0."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return function(*args, **keys)


def compare(x, reference, margin, counts, looks):
    """x, reference [n, ...] paired along the first axis, margin a number or [...] -> dict of [...]: mean, low, high, sd, p of all n
    pairs; p_differ and p_tie at the looks: `counts` pairs at each look reached, of `looks` looks planned."""
    x, reference = np.asarray(x, float), np.asarray(reference, float)
    differences = x - reference
    flat = (
        x.reshape(len(x), -1),
        reference.reshape(len(x), -1),
    )  # statsmodels knows columns, and no third axis
    bound = np.broadcast_to(margin, differences.shape[1:]).ravel()
    whole = quietly(scipy_stats.ttest_1samp, differences, 0)
    low, high = quietly(whole.confidence_interval, 1 - ALPHA)
    p_differ, p_tie = np.ones(differences.shape[1:]), np.ones(differences.shape[1:])
    for count in counts:
        if count >= 2:  # one pair has no variance
            p = quietly(scipy_stats.ttest_1samp, differences[:count], 0).pvalue
            p_differ = np.fmin(
                p_differ, looks * p
            )  # fmin: a nan (no difference at all) is no evidence of one
            p_tie = np.fmin(
                p_tie,
                looks
                * quietly(ttost_paired, flat[0][:count], flat[1][:count], -bound, bound)[0].reshape(
                    p_tie.shape
                ),
            )
    return {
        "mean": differences.mean(0),
        "low": low,
        "high": high,
        "sd": quietly(differences.std, axis=0, ddof=1),
        "p": np.nan_to_num(whole.pvalue, nan=1),
        "p_differ": p_differ,
        "p_tie": p_tie,
    }


def judge(p_differ, p_tie, mean):
    """[family] each -> (words, p_holm): Holm over the family, then the words. What differs and is within the margin still differs."""
    reject, p_holm = multipletests(p_differ, ALPHA, "holm")[:2]
    words = np.where(
        reject,
        np.where(np.asarray(mean) < 0, "better", "worse"),
        np.where(np.asarray(p_tie) <= ALPHA, "tie", "undecided"),
    )
    return words.tolist(), p_holm


def sign_flip(differences):
    """Two-sided p of the mean when the signs of the differences [n] are a coin's; every flip up to 13 pairs, 9999 beyond."""
    n = len(differences)
    return float(
        scipy_stats.permutation_test(
            (differences,),
            np.mean,
            permutation_type="samples",
            vectorized=True,
            axis=-1,
            n_resamples=np.inf if n <= 13 else 9999,
            rng=np.random.default_rng(0),
        ).pvalue
    )


def bca(differences):
    """95 % BCa bootstrap interval of the mean of [n] differences; None where they are all alike."""
    interval = quietly(
        scipy_stats.bootstrap,
        (differences,),
        np.mean,
        confidence_level=1 - ALPHA,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return tuple(map(float, interval)) if np.isfinite(interval).all() else None


def more_seeds(mean, sd, margin, n, family, looks):
    """About how many more pairs would decide: 80 % power at the observed mean and sd, at the level of Holm's first step, or for
    equivalence, whichever is sooner. None beyond MOST_SEEDS. The observed effect is itself uncertain: a hint, no plan."""
    if not sd > 0:
        return 1
    numbers, power = np.arange(3, MOST_SEEDS + 1), TTestPower().power
    level = ALPHA / looks
    differ = quietly(power, min(abs(mean) / sd, 10), numbers, level / family) >= POWER
    room = (margin - abs(mean)) / sd if margin else 0
    # both one-sided tests must pass: each at 90 % makes 80 % of both
    tie = (
        quietly(power, min(room, 10), numbers, level, alternative="larger") >= (1 + POWER) / 2
        if room > 0
        else np.zeros_like(differ)
    )
    found = numbers[differ | tie]
    return max(int(found[0]) - n, 1) if len(found) else None


def smallest_visible(sd, n, family, looks):
    """The difference that n pairs with this sd find 80 times in 100, at the level of Holm's first step; None below two pairs."""
    effects = np.geomspace(0.05, 200, 2000)
    power = (
        quietly(TTestPower().power, effects, n, ALPHA / looks / family) if n >= 2 else np.zeros(1)
    )
    return (
        float(effects[np.argmax(power >= POWER)] * sd)
        if (power >= POWER).any() and sd > 0
        else None
    )


def analyse(sweep, runs, costs=None, measure=None):
    """The Analysis of a sweep by one measure (default: the sweep's metric)."""
    costs, measure, base, looks = (
        costs or {},
        measure or sweep["metric"],
        sweep["base"],
        sorted(sweep["looks"]),
    )
    own = {
        arm: np.array(
            [row["final_val_loss" if measure == "equal_time" else measure] for row in done.values()]
        )
        for arm, done in runs.done.items()
    }
    base_sd = float(own[base].std(ddof=1)) if len(own[base]) > 1 else math.nan
    margin = sweep["margin"] if sweep["margin"] is not None else base_sd
    attempted = {
        arm: set(done)
        | {row["seed"] for row in runs.failed if row["arm"] == arm and row["purpose"] == "report"}
        for arm, done in runs.done.items()
    }
    entries = []  # verdict, x, reference, seeds attempted
    for arm, facts in sweep["arms"].items():
        if arm != base:
            seeds, x, reference = pairs(runs, arm, facts["against"], measure, costs)
            entries.append(
                (
                    Verdict(arm, facts["against"], "noise" if facts.get("again") else "", seeds),
                    x,
                    reference,
                    sorted(attempted[arm] & attempted[facts["against"]]),
                )
            )
    for pair, facts in sweep["arms"].items():
        if facts.get(
            "interaction_of"
        ):  # (pair - a) - (b - base): what the two do together beyond what each does alone
            a, b = facts["interaction_of"]
            (s1, x1, r1), (s2, x2, r2) = (
                pairs(runs, pair, a, measure, costs),
                pairs(runs, b, base, measure, costs),
            )
            seeds = sorted(set(s1) & set(s2))
            x, reference = (
                np.array([x1[s1.index(s)] - r1[s1.index(s)] for s in seeds]),
                np.array([x2[s2.index(s)] - r2[s2.index(s)] for s in seeds]),
            )
            entries.append(
                (
                    Verdict(pair, f"{a} + {b}", "", seeds, interaction=True),
                    x,
                    reference,
                    sorted(set.intersection(*(attempted[n] for n in (pair, a, b, base)))),
                )
            )
    judged = [entry for entry in entries if entry[0].word != "noise"]
    tests = []
    for verdict, x, reference, tried in entries:
        n, arm = len(x), verdict.arm
        if len(own[arm]) and not verdict.interaction:
            verdict.loss, verdict.loss_sd = (
                float(own[arm].mean()),
                float(own[arm].std(ddof=1)) if len(own[arm]) > 1 else math.nan,
            )
        reached = [
            sum(seed in tried[:look] for seed in verdict.seeds)
            for look in looks
            if look <= len(tried)
        ]
        test = (
            compare(x, reference, margin, reached, len(looks))
            if n
            else {"p_differ": 1.0, "p_tie": 1.0, "mean": math.nan}
        )
        tests.append(test)
        for key in set(test) & {"mean", "low", "high", "sd", "p", "p_tie"}:
            setattr(verdict, key, float(test[key]))
        if n > 1:
            verdict.correlation = float(quietly(np.corrcoef, x, reference)[0, 1])
            verdict.p_flip = sign_flip(x - reference)
            verdict.bootstrap = bca(x - reference) if n >= BOOTSTRAP_FROM else None
        verdict.why = explain(verdict, n, tried, looks, runs, margin)
    if judged:
        chosen = [test for entry, test in zip(entries, tests) if entry[0].word != "noise"]
        words, p_holm = judge(
            *([test[key] for test in chosen] for key in ("p_differ", "p_tie", "mean"))
        )
        for (verdict, x, _, tried), word, p in zip(judged, words, p_holm):
            verdict.word, verdict.p_holm = word, float(p)
            if not len(x):
                verdict.word = (
                    "failed" if any(row["arm"] == verdict.arm for row in runs.failed) else "not run"
                )
            elif word == "undecided":
                missing = next((look - len(tried) for look in looks if look > len(tried)), 0)
                more = (
                    more_seeds(verdict.mean, verdict.sd, margin, len(x), len(judged), len(looks))
                    if len(x) > 1
                    else 1
                )
                verdict.more = more and max(more, missing)
            elif word in ("better", "worse") and verdict.p_tie <= ALPHA:
                verdict.why = (
                    verdict.why + "; " if verdict.why else ""
                ) + "smaller than the margin"
    every = [verdict.sd for verdict, *_ in judged if verdict.sd > 0]
    numbers = [len(verdict.seeds) for verdict, *_ in judged if verdict.seeds]
    visible = (
        smallest_visible(float(np.median(every)), int(np.median(numbers)), len(judged), len(looks))
        if every
        else None
    )
    return Analysis(
        measure,
        margin,
        float(own[base].mean()) if len(own[base]) else math.nan,
        base_sd,
        [entry[0] for entry in entries],
        next((entry[0] for entry in entries if entry[0].word == "noise"), None),
        visible,
    )


def explain(verdict, n, tried, looks, runs, margin):
    """What the word alone does not say, in a few words."""
    failures = [
        row for row in runs.failed if row["arm"] == verdict.arm and row["purpose"] == "report"
    ]
    parts = [
        f"{len(failures)} failed: {row.get('reason') or 'no reason given'}" for row in failures[-1:]
    ]
    if n == 1:
        parts.append("one seed says nothing about chance")
    elif n and len(tried) < looks[0]:
        parts.append(f"{len(tried)} of the {looks[0]} planned seeds")
    if n > 1 and not margin > 0:
        parts.append("no margin, so no tie")
    return "; ".join(parts)


def undecided(sweep, rows, costs=None):
    """[(arm, about how many more seeds, None if over MOST_SEEDS), ...] of the arms that more seeds could decide, for a driver that
    has time left. A pair is among them while the pair itself or its interaction is open."""
    found = {}
    for verdict in analyse(sweep, sort_rows(sweep, rows), costs).verdicts:
        if verdict.word == "undecided":
            found.setdefault(verdict.arm, []).append(verdict.more)
    return [(arm, None if None in more else max(more)) for arm, more in found.items()]


def listed(words, most=6):
    """Words for a sentence, at most so many."""
    words = list(words)
    if len(words) > most:
        words[most - 1 :] = [f"{len(words) - most + 1} more"]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def caveats(sweep, runs, costs, analysis):
    """Sentences that the data themselves demand, most weighty first."""
    said, arms, base = [], sweep["arms"], sweep["base"]
    compared = [verdict for verdict in analysis.verdicts if verdict.word != "noise"]
    n = max((len(verdict.seeds) for verdict in compared), default=0)
    rows = [row for done in runs.done.values() for row in done.values()]

    def say(sentence, found=True):
        if found:
            said.append(sentence)

    failures = {}
    for row in runs.failed:
        failures.setdefault((row["arm"], row.get("reason") or "no reason given"), []).append(
            str(row["seed"])
        )
    say(
        f"{len(runs.failed)} failed run{'s' * (len(runs.failed) > 1)}: "
        + listed(
            f"{arm} seed {' '.join(seeds)} ({reason})" for (arm, reason), seeds in failures.items()
        )
        + ". They are in no mean; where bad runs fail, the seeds that are left flatter the arm.",
        failures,
    )
    say(
        f"{len(runs.stale)} stale row{'s' * (len(runs.stale) > 1)} (other code, configuration or learning rate than the sweep's), left out: "
        + listed(f"{row['arm']} seed {row['seed']}" for row in runs.stale)
        + ".",
        runs.stale,
    )
    say("One seed: no interval, no verdict.", n == 1)
    say(
        f"Too few seeds: with {n} and a spread of the differences as measured, only an effect of about {analysis.visible or 0:.3f} nats would be found 80 times in 100.",
        analysis.visible and (n < 5 or analysis.visible > 3 * (analysis.margin or 0)),
    )
    say(
        f"The sign-flip p cannot be below {2 / 2 ** max(n, 1):.3g} with {n} seeds, so it cannot reach {ALPHA}; the verdicts rest on the t test, which assumes near-normal differences.",
        1 < n < 6,
    )
    floor = analysis.floor
    say("No noise arm: nothing here shows what the base differs from itself by.", floor is None)
    if floor is not None and floor.seeds:
        say(
            f"The base differs from itself by {floor.mean:+.4f} (p = {floor.p:.3f}): chance does that once in twenty sweeps, a fault of the set-up more often.",
            floor.p <= ALPHA,
        )
        say(
            f"The shared order of the data makes no closer pairs here (correlation {floor.correlation:+.2f}): pairing gains nothing.",
            len(floor.seeds) > 2 and floor.correlation < 0.1,
        )
    wide = [
        verdict
        for verdict in compared
        if len(verdict.seeds) > 2 and verdict.loss_sd > 2 * analysis.base_sd
    ]
    say(
        "More than twice the base's spread over seeds: "
        + listed(f"{v.arm} (sd {v.loss_sd:.4f} to {analysis.base_sd:.4f})" for v in wide)
        + ".",
        wide,
    )
    over = {}
    for arm, done in runs.done.items():
        gap, share = (
            np.mean([facts(row) for row in done.values()]) if done else 0
            for facts in (
                lambda row: row["final_val_loss"] - row["best_val_loss"],
                lambda row: row["best_step"] / (row["curve"][-1][0] or 1),
            )
        )
        if gap > 0.01 and share < 0.8:
            over[arm] = gap, share
    say(
        "Overfitting, the best loss long before the end: "
        + listed(
            f"{arm} (at {share:.0%} of its steps, the final loss {gap:.3f} above it)"
            for arm, (gap, share) in over.items()
        )
        + ". The final loss then ranks arms by how much they overfit: read the best loss beside it.",
        over,
    )
    say(
        "The best loss is chosen on the split that it is reported on: a little flattering to every arm.",
        analysis.measure == "best_val_loss",
    )
    grid, chosen = sweep["lr_grid"], sweep["chosen_lr"]
    say(
        "Learning rates were not re-tuned: every arm trains at the base's, which favours arms that like it.",
        len(grid) < 2,
    )
    edge = [
        f"{arm} ({lr:g} x)"
        for arm, lr in chosen.items()
        if len(grid) > 1 and lr in (min(grid), max(grid))
    ]
    say(
        "The best learning rate is at the edge of the grid, so a better one may lie outside: "
        + listed(edge)
        + ".",
        edge,
    )
    say(
        "No learning rate was chosen yet; the rows are at the base's.", len(grid) > 1 and not chosen
    )
    off = [
        f"{arm} ({facts['match']['residual_percent']:+.2f} %)"
        for arm, facts in arms.items()
        if facts.get("match")
        and abs(facts["match"]["residual_percent"]) > 0.5
        and sweep["match"] != "none"
    ]
    say(f"Not matched in {sweep['match']} within 0.5 %: " + listed(off) + ".", off)
    say("Nothing was matched: arms differ in parameters and in compute.", sweep["match"] == "none")
    machines = sorted({row["hardware"] for row in rows})
    say("The rows are from different hardware: " + listed(machines) + ".", len(machines) > 1)
    broken = [
        f"{v.arm} seed {seed}"
        for v in compared
        if not v.interaction
        for seed in v.seeds
        if runs.done[v.arm][seed]["hardware"] != runs.done[v.against][seed]["hardware"]
    ]
    say("Pairs whose two runs were on different hardware: " + listed(broken) + ".", broken)
    old = [arm for arm in arms if arm in costs and costs[arm]["code_hash"] != sweep["code_hash"]]
    say("Costs measured on other code than the sweep's, left out: " + listed(old) + ".", old)
    missing = [arm for arm in arms if arm not in costs and arm in runs.done and runs.done[arm]]
    say("Costs not measured: " + listed(missing) + ".", missing)
    elsewhere = {cost["hardware"] for arm, cost in costs.items() if arm in arms}
    say(
        "The costs are from different hardware and do not compare: "
        + listed(sorted(elsewhere))
        + ".",
        len(elsewhere) > 1,
    )
    say(
        "Peak memory is computed in closed form on this device, not measured.",
        any(cost.get("peak_memory") == "closed form" for arm, cost in costs.items() if arm in arms),
    )
    step = {
        arm: costs[arm]["milliseconds_per_step"]["median"]
        for arm in arms
        if (costs.get(arm) or {}).get("milliseconds_per_step")
    }
    for again in (arm for arm in arms if arms[arm].get("again") and arm in step and base in step):
        off = step[again] / step[base] - 1
        say(
            f"Base and base again, the same model, were timed {off:+.0%} apart per step: times are no more certain than that, and neither are verdicts at equal time, which take them as exact.",
            abs(off) > 0.01,
        )
    busy = [
        arm
        for arm in arms
        if arm in costs and costs[arm].get("load_average", 0) > 0.5 * costs[arm].get("threads", 1)
    ]
    say(
        "Costs were timed on a busy machine, so speeds and verdicts at equal time are unsure: "
        + listed(busy)
        + ".",
        busy,
    )
    odd = [
        arm
        for arm, facts in arms.items()
        if {"batch_size", "block_size", "gradient_accumulation_steps"} & facts["changes"].keys()
    ]
    say(
        "Not paired batch by batch, and perhaps not of the same number of tokens: "
        + listed(odd)
        + ".",
        odd,
    )
    say(
        f"The margin of a tie ({analysis.margin:.4f} nats) is one sd of the base's runs, itself uncertain with {len(runs.done[base])} of them.",
        sweep["margin"] is None and analysis.margin > 0,
    )
    say(
        f"The sweep may stop early: it decides at {listed(map(str, sorted(sweep['looks'])))} seeds, each p multiplied by {len(sweep['looks'])} (Bonferroni over the planned looks).",
        len(sweep["looks"]) > 1,
    )
    return said
