"""
Claims on trained models, read from the stored rows of the sweeps on Shakespeare's plays in
bench/results, by the ablation's own loaders. A difference is in nats per token, and negative is
better.

A claim names a base (gpt2 or llama) and changes to it, such as "mlp=swiglu" or "mixer=mamba2
position=none". An arm is found by the values that it has, whatever its name and its sweep's base.
Of several sweeps that have all arms, the one with the most runs of the rarest counts, then that of
the widest model, then that of the most steps; a screening counts if no other has them. All losses
are at the sweep's own learning rates, on the half of the validation text that chose nothing.
"""

import math
from functools import lru_cache
from itertools import combinations

import numpy as np

from bench.ablation.answer import folders_of
from bench.ablation.effects import Model, cells_of, high_level
from bench.ablation.significance import contrast, pooled_variance
from bench.ablation.sweeps import gather
from bench.ledger.algebra import changes_of
from bench.ledger.table import Measurement, NotMeasured, error_of
from common.files import ROOT
from parts.architectures import ARCH

RESULTS = ROOT / "bench" / "results"
DATASET = "plays"


# ---------------------------------------------------------------- where the rows are


@lru_cache
def sections(results):
    """[Section] of the sweeps below a folder, each size of a scale by itself."""
    found = [section for folder in folders_of(results) for section in gather([folder])]
    return [section for section in found if section.sweep["data"]["dataset"] == DATASET]


def best(found, wanted):
    """What follows the number of runs in the best of [(runs, Section, ...)]. Raises NotMeasured."""
    if not found:
        raise NotMeasured(f"no sweep on {DATASET} in bench/results has two runs with {wanted}")

    def rank(each):
        sweep = each[1].sweep
        values = sweep["base_values"]
        sizes = each[0], values["n_embd"], values["max_iters"], -len(sweep["arms"])
        return not sweep.get("screening"), *sizes

    return max(found, key=rank)[1:]


def filled(values, arch, changes):
    """The keys `values` of a run with the parts of an architecture, and with changes to these."""
    parts = {**ARCH.get(arch, {}), **ARCH.get(changes.get("arch"), {})}
    parts = {key: part(values) if callable(part) else part for key, part in parts.items()}
    return values | parts | changes | {"arch": None, "model": None}


def arms_with(sweep, base, text):
    """The arms of a sweep that are a base with these changes, its curve of tokens left out."""
    values, arms = sweep["base_values"], sweep["arms"].items()
    wanted = filled(values, base, changes_of(text.split()))
    arms = [(arm, facts["changes"]) for arm, facts in arms if not facts.get("curve")]
    return [arm for arm, changes in arms if filled(values, None, changes) == wanted]


def find(base, *texts, needs=lambda section, groups: True):
    """(Section, [the arms with the changes of each text]) of the best sweep that has two runs of
    each and what the claim `needs`. Raises NotMeasured."""
    found = []
    for section in sections(RESULTS):
        groups = [arms_with(section.sweep, base, text) for text in texts]
        runs = min(sum(len(section.runs.ended(arm)) for arm in arms) for arms in groups)
        # With 2 heads, 2 key heads change nothing: the base is not compared with itself.
        apart = len(set().union(*groups)) == sum(map(len, groups))
        if runs > 1 and apart and needs(section, groups):
            found.append((runs, section, groups))
    return best(found, " and ".join(f"{base} {text}".strip() for text in texts))


def measured(section, what, value, se=0.0, df=math.inf, runs=0, log=False, is_time=False):
    """The Measurement of a number of a sweep, whose note says `what` was measured. A screening
    decides nothing but times."""
    screening = bool(section.sweep.get("screening"))
    note = f"{section.folders[0].relative_to(RESULTS)}: {'a screening, ' * screening}{what}"
    numbers = map(float, (value, se, df))
    return Measurement(*numbers, runs, note, log, screening and not is_time)


# ---------------------------------------------------------------- arms


def rows_of(section, arms):
    """The rows of all runs of some arms that did not diverge."""
    return [row for arm in arms for row in section.runs.done[arm].values()]


def swap(base, changes, against=""):
    """The loss with some changes to a base minus that with others (default: none). A screening
    pools the variances of all its arms."""
    section, groups = find(base, changes, against)
    if any(section.runs.diverged[arm] for arms in groups for arm in arms):
        raise NotMeasured("runs diverged, and have no mean")

    def losses(arms):
        return np.array([row["final_report"] for row in rows_of(section, arms)])

    every = [losses([arm]) for arm in section.runs.done]
    pooled = pooled_variance(every) if section.sweep.get("screening") else None
    groups = list(map(losses, groups))
    found, sizes = contrast(groups, pooled=pooled), list(map(len, groups))
    what = "{} against {} runs".format(*sizes)
    return measured(section, what, found.mean, found.se, found.df, min(sizes))


def rows_beyond(base, changes, times):
    """(Section, [what each run with some changes measured beyond its training context, up to so
    many times])."""

    def reaches(section, groups):
        return all(times in row["extrapolation"] for row in rows_of(section, groups[0]))

    section, (arms,) = find(base, changes, needs=reaches)
    return section, [row["extrapolation"] for row in rows_of(section, arms)]


def longer(base, changes, times):
    """The perplexity with some changes to a base at so many times the training context over that at
    the context, on the same tokens."""
    section, rows = rows_beyond(base, changes, times)
    if any("why" in row[times] for row in rows):
        raise NotMeasured("it cannot read more tokens than its training context")
    logs = [row[times]["loss"] - row["1"]["loss"] for row in rows]
    se, runs = np.std(logs, ddof=1) / math.sqrt(len(logs)), len(logs)
    what = f"{runs} runs, {int(times) * section.sweep['block_size']} tokens"
    return measured(section, what, math.exp(np.mean(logs)), se, runs - 1, runs, log=True)


def refusals(base, changes):
    """The share of runs with some changes that cannot read twice their training context."""
    section, rows = rows_beyond(base, changes, "2")
    return measured(section, f"{len(rows)} runs", np.mean(["why" in row["2"] for row in rows]))


def diverged(base):
    """The share of a base's runs that diverged, in all sweeps."""
    found = [
        (len(section.runs.diverged[arm]), len(section.runs.ended(arm)))
        for section in sections(RESULTS)
        for arm in arms_with(section.sweep, base, "")
    ]
    bad, runs = np.sum(found, axis=0) if found else (0, 0)
    if not runs:
        raise NotMeasured(f"no sweep on {DATASET} in bench/results has {base}")
    return Measurement(float(bad / runs), note=f"{runs} runs of {len(found)} arms of all sweeps")


# ---------------------------------------------------------------- costs


def timed(section, groups):
    """The rows of costs.jsonl of an arm and of its sweep's base; [] unless a quiet machine timed
    both."""
    rows = [section.costs.get(arms[0], {}) for arms in groups]
    with_base = section.sweep["base"] in groups[-1]
    return rows if with_base and all(row.get("quiet") for row in rows) else []


def step_ratio(base, changes):
    """The time of a training step with some changes over the base's."""
    section, groups = find(base, changes, "", needs=timed)
    row, _ = timed(section, groups)
    found, steps = row["step_ratio"], row["steps_timed"]
    se, what = error_of(found["low"], found["high"]), f"{steps} steps, {found['form']}"
    return measured(section, what, found["ratio"], se, runs=steps, log=True, is_time=True)


def decode_ratio(base, changes):
    """The time of one more token with a cache, over the base's. Its error is taken from the
    quartiles of single tokens, which is wider than that of the medians."""
    section, groups = find(base, changes, "", needs=timed)
    arm, of_base = (row["decode_ms_per_token"] for row in timed(section, groups))
    se = math.hypot(*(math.log(time["q75"] / time["q25"]) / 1.35 for time in (arm, of_base)))
    value, what = arm["median"] / of_base["median"], "one more token, on a quiet machine"
    return measured(section, what, value, se, log=True, is_time=True)


# ---------------------------------------------------------------- a factorial


def term_of(section, text):
    """The term of a factorial's model that stands for a factor, given by the changes of its high
    level, or for an interaction "mlp=swiglu:position=rope"; None if there is none."""
    wanted, model = [changes_of(part.split()) for part in text.split(":")], section.effects.model
    term = tuple(name for name in model.factors if high_level(section.sweep, name) in wanted)
    return term if len(term) == len(wanted) and term in model.terms else None


def factorial(base, *texts):
    """(Section, [term of each text]) of the best factorial on a base that has all these terms.
    Raises NotMeasured."""
    found = []
    for section in sections(RESULTS):
        of_base = section.sweep["base_values"]["model"] == base
        if of_base and section.effects and section.effects.model:
            terms = [term_of(section, text) for text in texts]
            if None not in terms:
                found.append((len(section.effects.model.losses), section, terms))
    return best(found, f"{base} {' and '.join(texts)} as factors")


def of_model(section, model, weights):
    """The Measurement of a sum of the coefficients of a factorial's model."""
    found, runs = model.contrast(weights), len(model.losses)
    what = f"{runs} runs, averaged over the other parts"
    return measured(section, what, found.mean, found.se, found.df, runs)


def effect(base, text, minus=None):
    """The main effect of a factor, or an interaction; `minus` another one."""
    section, terms = factorial(base, *filter(None, (text, minus)))
    model = section.effects.model
    first, *second = [model.effect_of(term) for term in terms]
    return of_model(section, model, first - sum(second))


def effect_on(base, text, when, what="difference"):
    """The effect of a factor early in training (difference), or how much it changes from there to
    the end (later). when: a share of the steps, or a number of them."""
    section, (term,) = factorial(base, text)

    def number(row):
        points = np.array(row["curve"], float)  # [points, 4]: step, all, the two halves of the text
        step = float(when) * (points[-1, 0] if float(when) < 1 else 1)
        early = float(np.interp(step, points[:, 0], points[:, 3]))
        return early if what == "difference" else row["final_report"] - early

    cells = cells_of(section.sweep)
    model = Model(cells, {arm: [*map(number, rows_of(section, [arm]))] for arm in cells})
    return of_model(section, model, model.effect_of(term))


def effect_worth(base, text):
    """How many times the training tokens a factor is worth."""
    section, (term,) = factorial(base, text)
    found = next(each for each in section.effects.verdicts if each.arm == term[0]).worth
    if not found or not 0 < found.low <= found.high < math.inf:
        raise NotMeasured("the base's curve of tokens does not reach it")
    runs, se = len(section.effects.model.losses), error_of(found.low, found.high)
    return measured(section, f"{runs} runs", found.k, se, runs=runs, log=True)


def largest_interaction(base, *texts):
    """The interaction of two of these factors that is farthest from 0, in standard errors."""
    section, terms = factorial(base, *map(":".join, combinations(texts, 2)))
    model = section.effects.model
    found = {term: of_model(section, model, model.effect_of(term)) for term in terms}
    term = max(found, key=lambda term: abs(found[term].value / found[term].se))
    found[term].note += f"; {' and '.join(term)}, the largest of {len(terms)}"
    return found[term]


def noise(base, text):
    """The standard deviation of a run's loss, from all runs that differ by chance alone of the
    factorial that has this factor."""
    section, _ = factorial(base, text)
    fit, runs = section.effects.model.fit, len(section.effects.model.losses)
    se, df = 1 / math.sqrt(2 * fit.df_resid), fit.df_resid
    return measured(section, f"{runs} runs", math.sqrt(fit.scale), se, df, runs, log=True)


# ---------------------------------------------------------------- a scale


def slope(base, changes):
    """The change of the effect of some changes to a base per factor of ten of training compute."""
    found = []
    for section in sections(RESULTS):
        of_base = section.scale and section.sweep["base_values"]["model"] == base
        arms = arms_with(section.sweep, base, changes) if of_base else []
        if arms:
            found.append((len(section.scale.names), section, arms[0]))
    section, arm = best(found, f"{base} {changes} at several sizes")

    test = next(each for each in section.scale.slopes if each.arm == arm).test
    if not test:
        raise NotMeasured("runs of its sizes are missing, or diverged")
    sizes, runs = len(section.scale.names), section.verdicts[arm].n
    what = f"and {sizes - 1} larger sizes, {section.main.base_n} runs of each base"
    return measured(section, what, test.mean, test.se, test.df, runs)
