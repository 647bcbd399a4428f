"""
Claims on trained models, read from the stored rows of the sweeps in bench/results by the ablation's
own loaders. A difference is in nats per token, and negative is better.

`swap` and what follows name a base (gpt2 or llama) and changes to it, such as "mlp=swiglu" or
"mixer=mamba2 position=none", or an arm, such as llama; and take the sweep with the most runs of that arm, a screening last;
so that rows which are added later are found. The functions of a factorial and of a scale name their
sweep. All losses are at the sweep's own learning rate and on the half of the validation text that
chose nothing.
"""

import math
from functools import lru_cache

import numpy as np

from bench.ablation.effects import Model, cells_of
from bench.ablation.history import control_group
from bench.ablation.losses import Losses
from bench.ablation.significance import contrast, pooled_variance
from bench.ablation.sweeps import gather
from bench.ledger.algebra import literal
from bench.ledger.table import Measurement, NotMeasured
from common import files
from common.files import ROOT

RESULTS = ROOT / "bench" / "results"


# ---------------------------------------------------------------- where the rows are


@lru_cache
def sections_of(folder):
    """[Section] of a sweep's folder, or of that of a scale."""
    return gather([folder])


def section_of(sweep):
    """The Section of a sweep, such as factorial_shakespeare or scale_shakespeare/large."""
    folder = RESULTS / sweep
    if not (folder / "rows.jsonl").exists():
        raise NotMeasured(f"bench/results/{sweep} has no rows")
    return sections_of(folder)[0]


def changes_of(text):
    """{key: value} of "mlp=swiglu position=none"."""
    return {key: literal(value) for key, value in (word.split("=", 1) for word in text.split())}


def arm_with(sweep, text):
    """The arm of a sweep that makes just these changes to its base, or has this name; or None."""
    for arm, facts in sweep["arms"].items():
        if facts.get("curve") or facts.get("again"):
            continue
        if arm == text or "=" in (text or "=") and facts["changes"] == changes_of(text):
            return arm
    return None


def find(base, *texts):
    """(Section, [arm for each text]) of the sweep on this base that has all these arms and the most
    runs of the rarest, of these the one with the widest model; a screening only if no other has
    them. Raises NotMeasured."""
    found = []
    for path in sorted(RESULTS.rglob("sweep.json")):
        sweep = files.read_json(path, "run the sweep again")
        if sweep["base_values"]["model"] != base or str(sweep["data"]["dataset"]).startswith("task:"):
            continue
        arms = [arm_with(sweep, text) for text in texts]
        if None in arms or not (path.parent / "rows.jsonl").exists():
            continue
        section = section_of(path.parent.relative_to(RESULTS))
        runs = min(len(section.runs.ended(arm)) for arm in arms)
        if runs > 1:
            size = sweep["base_values"]["n_embd"]
            found.append((not sweep.get("screening"), runs, size, section, arms))
    if not found:
        changes = " and ".join(filter(None, texts))
        raise NotMeasured(f"no sweep on {base} in bench/results has two runs with {changes}")
    return max(found, key=lambda each: each[:3])[3:]


def setting(section, runs):
    """A few words on a sweep, for the page."""
    folder = section.folders[0].relative_to(RESULTS)
    kind = "a screening, " if section.sweep.get("screening") else ""
    return f"{folder}: {kind}{runs}"


def grouped(section, groups, pooled_from):
    """The Measurement of the difference of two groups of numbers, one for each run. A screening
    pools the variances of all arms (`pooled_from`)."""
    if not all(len(group) > 1 for group in groups):
        raise NotMeasured(f"fewer than two runs in {section.folders[0].name}")
    if not np.isfinite(np.concatenate(groups)).all():
        raise NotMeasured("runs diverged, and have no mean")
    screening = bool(section.sweep.get("screening"))
    found = contrast(groups, pooled=pooled_variance(pooled_from) if screening else None)
    sizes = [len(group) for group in groups]
    note = setting(section, "{} against {} runs".format(*sizes))
    numbers = map(float, (found.mean, found.se, found.df))
    return Measurement(*numbers, min(sizes), note, screening=screening)


def arms_of(section, arm):
    """The arms whose runs count as those of `arm`: for the base, the control group."""
    return control_group(section.sweep) if arm == section.sweep["base"] else [arm]


def difference(section, arms, number):
    """The Measurement of the difference between two arms in `number`(a row)."""
    runs = section.runs
    if any(runs.diverged.get(arm) for arm in arms):
        raise NotMeasured("runs diverged, and have no mean")

    def numbers(names):
        return np.array([number(row) for name in names for row in runs.done[name].values()])

    everything = [numbers([name]) for name in runs.done if runs.done[name]]
    groups = [numbers(arms_of(section, arm)) for arm in arms]
    return grouped(section, groups, everything)


def loss(row):
    """A run's loss at its end."""
    return row["final_report"]


def loss_at(row, share):
    """A run's loss after this share of its steps."""
    points = np.array(row["curve"], float)  # [points, 4]: step, all, the two halves of the text
    return float(np.interp(share * points[-1, 0], points[:, 0], points[:, 3]))


# ---------------------------------------------------------------- one change to a base


def swap(base, changes, against=""):
    """The loss with some changes to a base minus that with others (default: none)."""
    section, arms = find(base, changes, against)
    return difference(section, arms, loss)


def as_multiple(section, found, runs):
    """The Measurement of a Worth; its 95 % interval gives the error of its logarithm."""
    if not found or not 0 < found.low <= found.high < math.inf:
        raise NotMeasured("the base's curve of tokens does not reach it")
    se = math.log(found.high / found.low) / (2 * 1.96)
    return Measurement(found.k, se, runs=runs, note=setting(section, f"{runs} runs"), log=True)


def step_ratio(base, changes):
    """The time of a training step with some changes, over the base's, as a sweep measured it on a
    quiet machine."""
    section, (arm, _) = find(base, changes, "")
    row = section.costs.get(arm) or {}
    found = row.get("step_ratio")
    if not found or not row.get("quiet"):
        raise NotMeasured(f"{section.folders[0].name} timed no step of it on a quiet machine")
    se = math.log(found["high"] / found["low"]) / (2 * 1.96)
    note = setting(section, f"{row['steps_timed']} steps, {found['form']}")
    return Measurement(found["ratio"], se, runs=row["steps_timed"], note=note, log=True)


def decode_ratio(base, changes):
    """The time of one more token with a cache, over the base's. Its error is taken from the
    quartiles of single tokens, which is wider than that of the medians."""
    section, arms = find(base, changes, "")
    rows = [section.costs.get(arm) or {} for arm in arms]
    if not all(row.get("quiet") for row in rows):
        raise NotMeasured(f"{section.folders[0].name} timed no token of it on a quiet machine")
    times = [row["decode_ms_per_token"] for row in rows]
    spread = [math.log(time["q75"] / time["q25"]) / 1.35 for time in times]
    value = times[0]["median"] / times[1]["median"]
    note = setting(section, "one more token, on a quiet machine")
    return Measurement(value, math.hypot(*spread), note=note, log=True)


# ---------------------------------------------------------------- beyond the training context


def with_changes(section, changes):
    """The arms of a sweep that have these values, whatever else they change."""
    wanted, base = changes_of(changes), section.sweep["base_values"]
    values = {arm: base | section.sweep["arms"][arm]["changes"] for arm in section.runs.done}
    return [arm for arm in values if all(values[arm].get(k) == v for k, v in wanted.items())]


def rows_beyond(section, arms):
    """[what the runs of some arms measured at multiples of their training context]"""
    return [row["extrapolation"] for arm in arms for row in section.runs.done[arm].values()]


def perplexity_ratio(section, arms, times):
    """The perplexity of some arms at so many times the training context over that at the context,
    on the same tokens."""
    found = rows_beyond(section, arms)
    if len(found) < 2:
        raise NotMeasured(f"{section.folders[0].name} has no two such runs")
    if any("why" in each[times] for each in found):
        raise NotMeasured("it cannot read more tokens than its training context")
    logs = [each[times]["loss"] - each["1"]["loss"] for each in found]
    se = float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    note = setting(section, f"{len(logs)} runs, {int(times) * section.sweep['block_size']} tokens")
    found = Measurement(math.exp(np.mean(logs)), se, len(logs) - 1, len(logs), note, log=True)
    found.screening = bool(section.sweep.get("screening"))
    return found


def longer(sweep, changes, times):
    """That ratio of all runs of a sweep that have these values."""
    section = section_of(sweep)
    return perplexity_ratio(section, with_changes(section, changes), times)


def longer_on(base, changes, times):
    """That ratio of the arm that makes just these changes to a base."""
    section, arms = find(base, changes)
    return perplexity_ratio(section, arms, times)


def refusals(sweep, changes):
    """The share of a sweep's runs with these values that cannot read twice their context."""
    section = section_of(sweep)
    found = rows_beyond(section, with_changes(section, changes))
    note = setting(section, f"{len(found)} runs")
    return Measurement(float(np.mean(["why" in each["2"] for each in found])), note=note)


# ---------------------------------------------------------------- a factorial, a scale


def of_model(section, model, weights):
    """The Measurement of a sum of the coefficients of a factorial's model."""
    found = model.contrast(weights)
    runs = len(model.losses)
    note = setting(section, f"{runs} runs, averaged over the other parts")
    return Measurement(*map(float, (found.mean, found.se, found.df)), runs, note)


def weights_of(model, name):
    """The weights of the coefficients of a factor's effect, or of an interaction a:b."""
    term = tuple(name.split(":"))
    if term not in model.terms:
        raise NotMeasured(f"the factorial cannot tell {name} from the others")
    return model.effect_of(term)


def effect(sweep, factor, minus=None):
    """The main effect of a factor, or an interaction a:b; `minus` another one."""
    section = section_of(sweep)
    model = section.effects.model
    weights = weights_of(model, factor)
    if minus:
        weights = weights - weights_of(model, minus)
    return of_model(section, model, weights)


def effect_on(sweep, factor, share, what="difference"):
    """The effect of a factor after this share of the steps (difference), or how much it changes
    from there to the end (later)."""
    section = section_of(sweep)

    def number(row):
        early = loss_at(row, float(share))
        return early if what == "difference" else loss(row) - early

    cells = cells_of(section.sweep)
    numbers = {arm: [number(row) for row in section.runs.done[arm].values()] for arm in cells}
    model = Model(cells, numbers)
    return of_model(section, model, weights_of(model, factor))


def effect_worth(sweep, factor):
    """How many times the training tokens a factor is worth."""
    section = section_of(sweep)
    found = next(v for v in section.effects.verdicts if v.arm == factor)
    return as_multiple(section, found.worth, len(section.effects.model.losses))


def largest_interaction(sweep):
    """The interaction that is farthest from 0, in standard errors."""
    section = section_of(sweep)
    model = section.effects.model
    pairs = [term for term in model.terms if len(term) == 2]
    tests = {term: model.contrast(model.effect_of(term)) for term in pairs}
    term = max(pairs, key=lambda term: abs(tests[term].mean / tests[term].se))
    found = of_model(section, model, model.effect_of(term))
    found.note += f"; {' and '.join(term)}, the largest of {len(pairs)}"
    return found


def slope(scale, arm):
    """The change of an arm's effect per factor of ten of training compute."""
    if not (RESULTS / scale / "scale.json").exists():
        raise NotMeasured(f"bench/results/{scale} has no rows")
    section = sections_of(RESULTS / scale)[0]
    found = next(each for each in section.scale.slopes if each.arm == arm)
    if not found.test:
        raise NotMeasured(found.why)
    numbers = map(float, (found.test.mean, found.test.se, found.test.df))
    note = f"{scale}: {len(section.scale.names)} sizes, {section.main.base_n} runs of each base"
    return Measurement(*numbers, section.verdicts[arm].n, note)


# ---------------------------------------------------------------- the noise


def noise(sweep):
    """The standard deviation of a run's loss, from all runs of a factorial that differ by chance
    alone."""
    section = section_of(sweep)
    fit = section.effects.model.fit
    se = 1 / math.sqrt(2 * fit.df_resid)
    runs = len(section.effects.model.losses)
    note = setting(section, f"{runs} runs")
    return Measurement(math.sqrt(fit.scale), se, fit.df_resid, runs, note, log=True)


def diverged(sweep):
    """The share of a sweep's runs that diverged."""
    section = section_of(sweep)
    bad = sum(map(len, section.runs.diverged.values()))
    runs = bad + sum(map(len, section.runs.done.values()))
    return Measurement(bad / runs, note=setting(section, f"{runs} runs"))
