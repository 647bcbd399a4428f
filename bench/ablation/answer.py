"""
What the answer page claims: the sweeps below a folder of results, the comparisons of all of them,
and one correction over these (bench/answer.py).

Each sweep is read by itself, because sweeps were made by different versions of the code. Holm's
method then corrects the p-values of all their comparisons together, those of differences as one
family and those of ties as another: the probability that chance alone decides even one difference
is at most 5 %, and as much again for the ties. The check of a base against its second copy claims
nothing and is left out.
"""

import math
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from statsmodels.stats.multitest import multipletests

from bench.ablation import scale
from bench.ablation.effects import cells_of, high_level, levels
from bench.ablation.scale import Slope
from bench.ablation.sentences import arm_name
from bench.ablation.settings import part_name
from bench.ablation.significance import ALPHA
from bench.ablation.sweeps import gather
from common.files import ROOT
from parts.architectures import ARCH

RESULTS = ROOT / "bench/results"
# The experiments in the order of the page, by the names of their configs; all others follow.
ORDER = (
    *("base", "factorial_plays", "factorial_python", "factorial_optimizer", "scale", "positions"),
    *("gate_optimizer", "contested_scale", "rates", "activations", "key_heads", "depth_norm"),
    *("low_rank_windows", "value_moe", "recent_parts", "mixers", "recipes", "ablate_recall"),
    "ladder_shakespeare",
)
OF_DIFFERENCE = {  # a word that says that something differs, and the word that says nothing
    **dict.fromkeys(("better", "worse"), "undecided"),
    "larger than the noise": "not seen",
    **dict.fromkeys(("grows", "fades", "changes sign"), "cannot tell"),
}
OF_EQUALITY = {"tie": "undecided", "holds": "cannot tell"}
NAMES = {  # of changes, for readers; an arm that is not here has its own name
    "llama": "all of LLaMA",
    "bloom": "all of BLOOM",
    "falcon": "all of Falcon",
    "rope": "RoPE",
    "alibi": "ALiBi",
    "t5": "T5's position bias",
    "learned": "learned positions",
    "relative": "relative positions",
    "sinusoidal": "sinusoidal positions",
    "position=none": "no positions",
    "nope_every=4": "no positions in every 4th layer",
    "rmsnorm": "RMSNorm",
    "post": "norms after the sublayer",
    "parallel": "parallel sublayers",
    "qk_norm=head": "QK norm",
    "relu": "ReLU",
    "relu2": "ReLU squared",
    "silu": "SiLU",
    "gelu_erf": "exact GELU",
    "bilinear": "bilinear gate",
    "reglu": "ReGLU",
    "geglu": "GEGLU",
    "swiglu": "SwiGLU",
    "moe": "mixture of experts",
    "bias=none": "no biases",
    "tie_embeddings=False": "untied head",
    "tie_embeddings=True": "tied head",
    "gated_delta": "Gated DeltaNet",
    "mamba2": "Mamba-2",
    "hybrid": "Gated DeltaNet in 3 of 4 layers",
    "mla": "MLA",
    "differential": "differential attention",
    "n_kv_head=1": "1 key head",
    "n_kv_head=2": "2 key heads",
    "attn_extra=gate_head": "attention gate per head",
    "attn_extra=gate_element": "attention gate per element",
    "attn_extra=sink": "attention sink",
    "attn_extra=xsa": "attention without the own value",
    "conv=4": "convolution over 4 tokens",
    "residual=scaled": "x0 skip",
    "residual=hyper": "hyper-connections",
    "attn_extra=value_residual": "value residual",
    "attn_extra=value_embed": "value embeddings",
    "optimizer=muon": "Muon",
    "deep": "deeper and narrower",
}
COSTS = "peak_memory_bytes", "kv_bytes_per_token", "tokens_per_second"


@dataclass
class Experiment:
    """A sweep, the sizes of a scale, or a config that has not run yet."""

    name: str  # of its config or folder; its place in the page
    question: str
    command: str
    folder: Path = None  # None: not run yet
    sections: list = field(default_factory=list)  # of sweeps.Section
    planned: bool = True

    @property
    def screening(self):
        return bool(self.sections) and self.sections[0].sweep["screening"]

    @property
    def runs(self):
        """The number of runs that ended, those of the curve of tokens and of tuning included."""
        groups = [
            group
            for one in self.sections
            for kind in (one.runs.done, one.runs.diverged, one.runs.curve)
            for group in kind.values()
        ]
        return sum(map(len, groups)) + sum(len(one.runs.tuning) for one in self.sections)


@dataclass
class Claim:
    """One comparison of the page: an arm, an effect, an interaction or a slope."""

    experiment: Experiment
    section: object
    subject: object  # a Verdict or a Slope, whose word and p_page are those of the page
    own: str  # the word of its sweep
    p: float  # corrected for the looks alone
    p_tie: float

    @property
    def taken_back(self):
        """Whether its sweep decides it and the page does not."""
        return self.own in OF_DIFFERENCE | OF_EQUALITY and self.subject.word != self.own


@dataclass
class Part:
    """A change to a base, and the estimates of its worth from all experiments."""

    name: str
    base: str  # gpt2 or llama
    claims: list  # of Claim, the best estimate first
    priced: Claim  # the one that its costs come from
    time: tuple = None  # (ratio, low, high) of a step, to the base's; no ends if it was disturbed
    memory: float = None  # of training, times the base's
    cache: float = None  # of keys and values per token, times the base's

    @property
    def claim(self):
        return self.claims[0]

    def estimate(self, own_rate):
        """The best estimate that has a worth, with a learning rate for each arm or one for all."""
        found = (claim for claim in self.claims if claim.subject.worth)
        return next((claim for claim in found if has_own_rates(claim.section) == own_rate), None)

    @property
    def worth_time(self):
        """What it is worth in time; None where it could not be timed."""
        worth = self.claim.subject.worth
        return worth.in_time(self.time[0]) if worth and was_timed(self.priced) else None

    @property
    def elsewhere(self):
        """The verdicts of its other experiments that differ from the first."""
        words = {claim.subject.word for claim in self.claims} & {"better", "worse", "tie"}
        return sorted(words - {self.claim.subject.word})


def has_own_rates(section):
    """Whether each arm of a section trained at its own best learning rate."""
    return len(section.sweep["lr_grid"]) > 1


# ---------------------------------------------------------------- experiments


def experiments(results=RESULTS, configs=ROOT / "config"):
    """[Experiment] of the sweeps below a folder, and of the planned ones that have no rows yet."""
    found = [read_experiment(folder, results) for folder in folders_of(results)]
    names = {one.name for one in found}
    planned = [*sorted((configs / "answer").glob("*.py")), configs / "ablate_recall.py"]
    found += [not_run(path) for path in planned if path.exists() and path.stem not in names]
    places = {name: place for place, name in enumerate(ORDER)}
    return sorted(found, key=lambda one: (places.get(one.name, len(ORDER)), one.name))


def folders_of(results):
    """The folders below `results` that hold a sweep or a scale; not those of a scale's sizes."""
    scales = {path.parent for path in results.rglob(scale.FILE)}
    sweeps = {path.parent for path in results.rglob("sweep.json")}
    sizes = {size for folder in scales for size in scale.folders_of(folder)}
    return sorted(scales | (sweeps - sizes))


def read_experiment(folder, results):
    """The Experiment of a folder. It has the name of the config that its command names, if that is
    a planned one, and otherwise its folder's."""
    sections = gather([folder])
    words = shlex.split(sections[0].sweep["command"])
    question = sections[0].sweep["question"]
    if sections[0].scale:  # the command of a size repeats that of the scale and adds its own keys
        place = next((i for i, word in enumerate(words) if word.startswith("--question=")), None)
        words, question = words[:place], question.rpartition(" (")[0] or question
    config = next((Path(word) for word in words[2:] if word.endswith(".py")), Path())
    planned = config.stem in ORDER or config.parent.name == "answer"
    name = config.stem if planned else "-".join(folder.relative_to(results).parts)
    return Experiment(name, question, shlex.join(words), folder, sections, planned)


def not_run(path):
    """The Experiment of a config without rows."""
    text = path.read_text(encoding="utf-8")
    question = re.search(r'^question = "(.*)"$', text, re.MULTILINE)
    command = re.search(r"^# +(python bench/ablate.py .*)$", text, re.MULTILINE)
    return Experiment(path.stem, *(found[1] if found else "" for found in (question, command)))


# ---------------------------------------------------------------- claims


def claims_of(found):
    """[Claim] of some experiments, corrected together."""
    claims = []
    for experiment in found:
        for section in experiment.sections:
            for verdict in section.main.verdicts:
                p = verdict.p if section.sweep["screening"] else verdict.p_looks
                if verdict is not section.main.floor and math.isfinite(p):
                    tie = verdict.p_tie_looks if math.isfinite(verdict.p_tie_looks) else 1.0
                    claims.append(Claim(experiment, section, verdict, verdict.word, p, tie))
            for slope in section.scale.slopes if section.scale else ():
                if math.isfinite(slope.p_looks):
                    values = slope.word, slope.p_looks, slope.p_tie_looks
                    claims.append(Claim(experiment, section, slope, *values))
    correct(claims)
    return claims


def correct(claims):
    """Correct claims for all of them together: set p_page of their subjects, and take back the
    words that this leaves undecided."""
    if not claims:
        return
    ps, ties = (
        multipletests([getattr(claim, key) for claim in claims], ALPHA, "holm")[1]
        for key in ("p", "p_tie")
    )
    for claim, p, p_tie in zip(claims, ps, ties, strict=True):
        subject = claim.subject
        subject.p_page = float(p_tie if subject.word in OF_EQUALITY else p)
        if subject.p_page > ALPHA:
            subject.word = (OF_DIFFERENCE | OF_EQUALITY).get(subject.word, subject.word)
        if claim.taken_back:
            reason = f"{claim.own} by its own sweep, not by the correction for the whole page"
            subject.why = "; ".join(filter(None, [subject.why, reason]))


def name_of(claim):
    """What a claim is about, in words for readers."""
    section, subject = claim.section, claim.subject
    if getattr(subject, "interaction", False) and section.effects:
        return " × ".join(name_in(section, factor) for factor in subject.arm.split(":"))
    return subject.arm if ":" in subject.arm else name_in(section, subject.arm, subject)


def name_in(section, arm, subject=None):
    """The name of an arm or of a factor's high level in a section."""
    if getattr(subject, "interaction", False):
        return arm_name(subject)
    sweep = section.sweep
    return shown_name(high_level(sweep, arm) if section.effects else changed_by(sweep, arm), arm)


def shown_name(changes, arm):
    """The name of a change for readers: the label of its word or of its arm, or else an arm's name
    of several words, a part's word, an arm's name, and keys last."""
    word = part_name(*next(iter(changes.items()))) if len(changes) == 1 else arm
    first, second = (arm, word) if " " in arm else (word, arm)
    plain = next((name for name in (first, second) if "=" not in name), word)
    return NAMES.get(word) or NAMES.get(arm) or plain.replace("_", " ").replace("=", " ")


def changed_by(sweep, arm):
    return sweep["arms"].get(arm, {}).get("changes") or {}


def keys_of(claim):
    """The keys that a claim is about, as the command line has them."""
    section, arm = claim.section, claim.subject.arm
    if section.effects:
        return levels(section.sweep, arm)
    return ", ".join(f"{key}={value}" for key, value in changed_by(section.sweep, arm).items())


def noise_of(section):
    """(sd of a run, runs that it is known from): of the base, in a factorial of all cells."""
    effects = section.effects
    if effects and effects.model and effects.model.fit.df_resid:
        return math.sqrt(effects.model.fit.scale), len(effects.model.losses)
    return section.main.base_sd, section.main.base_n


def of_slopes(claims):
    return [claim for claim in claims if isinstance(claim.subject, Slope)]


def of_interactions(claims):
    """The claims about interactions, the surest first."""
    found = [claim for claim in claims if getattr(claim.subject, "interaction", False)]
    return sorted(found, key=lambda claim: (claim.p, claim.subject.arm))


# ---------------------------------------------------------------- parts


def parts_of(claims):
    """[Part] of all changes to a base, the one that is worth most first. Of several sweeps that
    measured a part the best estimate counts: one of a sweep that decides before one of a screening,
    with a curve of tokens before without, then the one with the least standard error. What it shows
    plays no role in that."""
    groups = {}
    for claim in filter(is_part, claims):
        groups.setdefault(identity(claim), []).append(claim)
    parts = [part_of(sorted(group, key=quality, reverse=True)) for group in groups.values()]
    return sorted(parts, key=rank)


def is_part(claim):
    """Whether a claim is about one change to the base on a text, at the largest size of a scale."""
    subject, sections = claim.subject, claim.experiment.sections
    if isinstance(subject, Slope) or subject.interaction or not math.isfinite(subject.mean):
        return False
    if claim.section.sweep["data"]["dataset"].startswith("task:"):
        return False
    to_base = claim.section.effects or subject.against == claim.section.sweep["base"]
    largest = not sections[0].scale or claim.section is sections[-1]
    return bool(to_base) and largest


def changes_of(claim):
    """{key: value} of the change that a claim is about."""
    section, arm = claim.section, claim.subject.arm
    found = high_level(section.sweep, arm) if section.effects else None
    return found or section.sweep["arms"][arm]["changes"]


def identity(claim):
    """What makes two changes the same: the base's architecture and the changed keys."""
    base, changes = claim.section.sweep["base_values"], dict(changes_of(claim))
    changes |= ARCH.get(changes.pop("arch", None), {})
    had = base.items() if base.get("n_embd") else {}.items()
    changed = {item for item in changes.items() if item not in had}
    return base.get("model", "gpt2"), frozenset(map(str, changed))


def quality(claim):
    subject = claim.subject
    se = subject.se if math.isfinite(subject.se) else math.inf
    return not claim.experiment.screening, subject.worth is not None, -se


def rank(part):
    """Sorts parts: by worth, those without one after them, by their difference."""
    worth, mean = part.claim.subject.worth, part.claim.subject.mean
    return (0, -worth.k, mean) if worth else (1, 0.0, mean)


def part_of(claims):
    """The Part of its estimates, the best one first. Its costs are from the newest experiment that
    could time it: older code had other costs."""
    priced = max(claims, key=lambda claim: (was_timed(claim), claim.section.sweep["started"]))
    section, arm = priced.section, priced.subject.arm
    base = section.sweep["base_values"].get("model", "gpt2")
    memory, cache, speed = (cost_ratio(section, arm, key) for key in COSTS)
    time = step_ratio(section, arm) or (speed and (1 / speed, math.nan, math.nan))
    return Part(name_of(claims[0]), base, claims, priced, time, memory, cache)


def was_timed(claim):
    """Whether the steps of a claim's arm were timed without disturbance."""
    time = step_ratio(claim.section, claim.subject.arm)
    return bool(time) and math.isfinite(time[1])


def step_ratio(section, arm):
    """(ratio, low, high) of a step's time to the base's; None if other work disturbed the times."""
    if section.effects:
        return section.effects.step_ratios.get(arm)
    measured = (section.costs.get(arm) or {}).get("step_ratio")
    return measured and tuple(measured[key] for key in ("ratio", "low", "high"))


def cost_ratio(section, arm, key):
    """A cost of a change over that of the base; None if one of them is not known."""
    if section.effects:
        return level_ratio(section, arm, key)
    arms = arm, section.sweep["base"]
    own, theirs = ((section.costs.get(each) or {}).get(key) for each in arms)
    return own / theirs if own is not None and theirs else None


def level_ratio(section, factor, key):
    """A cost at a factor's high level over that at its low level: a ratio of geometric means over
    the cells. None unless all cells have one above zero."""
    cells = cells_of(section.sweep)
    values = [(section.costs.get(arm) or {}).get(key) for arm in cells]
    if not all(values):
        return None
    logs, high = np.log(values), np.array([bool(cell[factor]) for cell in cells.values()])
    return float(np.exp(logs[high].mean() - logs[~high].mean()))
