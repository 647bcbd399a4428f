"""The sentences of the answer page, each computed from what the page claims. A sentence for which
there are no figures is left out."""

import math
from dataclasses import dataclass

from bench.ablation.answer import of_interactions, of_slopes
from bench.ablation.answer_figures import BASES, noise_worth
from bench.ablation.sentences import signed
from bench.ablation.stats import counted, listed
from bench.ablation.tables import contexts_of, short

SURPRISES = 5
# What model_llama.py has and model.py has not, by the names of arms and of factors.
OF_LLAMA = {
    "rope": "rotary positions",
    "position": "rotary positions",
    "rmsnorm": "RMSNorm",
    "norm": "RMSNorm",
    "swiglu": "SwiGLU",
    "mlp": "SwiGLU",
    "bias": "no biases",
    "bias=none": "no biases",
    "untied": "an untied head",
    "tie_embeddings=False": "an untied head",
}


@dataclass
class Facts:
    """What the sentences are about."""

    experiments: list
    claims: list
    parts: list  # of Part
    ledger: list

    @property
    def sections(self):
        return [section for one in self.experiments for section in one.sections]

    @property
    def ran(self):
        return [one for one in self.experiments if one.sections]

    @property
    def runs(self):
        return sum(one.runs for one in self.ran)


def spoken(part):
    """The name of a part in a sentence."""
    return OF_LLAMA.get(part.name, part.name) if part.base == "gpt2" else part.name


def with_base(part):
    return f"{spoken(part)} in {BASES.get(part.base, part.base)}"


def by_word(parts, *words):
    return [part for part in parts if part.claim.subject.word in words]


def worth_of(part):
    return f"{part.claim.subject.worth} the tokens"


def sentence(text):
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------- the top


def answer(facts):
    """[sentence]: what is worth most, and what is worth nothing that can be seen."""
    known = [part for part in facts.parts if part.claim.subject.worth]
    better, worse = by_word(known, "better"), by_word(known, "worse")
    ties = by_word(known, "tie")
    lines = []
    if better:
        found = [f"{with_base(part)} is worth {worth_of(part)}" for part in better[:3]]
        lines.append(sentence(f"{listed(found)}."))
    rest = []
    if ties:
        several = "tie" if len(ties) > 1 else "ties"
        rest.append(f"{listed(map(with_base, ties), 4)} {several} with what they replace")
    if worse:
        several = "are" if len(worse) > 1 else "is"
        rest.append(f"{listed(map(with_base, worse[::-1]), 4)} {several} worse")
    if rest:
        lines.append(sentence(f"{'; '.join(rest)}."))
    return lines or ["No part is decided yet."]


def noise(facts):
    """What one seed more or less changes."""
    known = [one for one in facts.sections if math.isfinite(one.main.base_sd)]
    if not known:
        return "No base has run twice yet."
    most = max(known, key=lambda one: one.main.base_n)
    text = (
        f"{counted(most.main.base_n, 'run')} of one and the same model ({most.label}) have a"
        f" standard deviation of {most.main.base_sd:.4f} nats"
    )
    worth = noise_worth(most)
    if worth:
        text += f"; two of these are worth {worth[0]:.2f} to {worth[1]:.2f} times the tokens"
    return text + ". A difference of two single runs that is smaller says nothing."


def sizes_of(facts):
    """(smallest, largest) number of parameters of the bases."""
    found = [
        cost["parameters"]
        for section in facts.sections
        for arm, cost in section.costs.items()
        if arm == section.sweep["base"] and cost.get("parameters")
    ]
    return (min(found), max(found)) if found else None


# ---------------------------------------------------------------- surprises


def surprises(facts):
    """Up to SURPRISES sentences, the most telling kind first."""
    kinds = (
        *(of_losers, of_interaction, of_slope, of_time, of_contexts, of_nothing, of_ledger),
        *(of_correction, of_single_runs),
    )
    found = [kind(facts) for kind in kinds]
    return [text for text in found if text][:SURPRISES]


def of_losers(facts):
    """A part of LLaMA that makes GPT-2 worse."""
    parts = [part for part in facts.parts if part.base == "gpt2" and part.name in OF_LLAMA]
    worse = by_word(parts, "worse")
    if not worse:
        return ""
    part = worse[-1]
    numbers = part.claim.subject
    return sentence(
        f"{spoken(part)}, which LLaMA has, makes GPT-2 worse on average, by"
        f" {signed(numbers.mean)} nats ({signed(numbers.low)} to {signed(numbers.high)})."
    )


def of_interaction(facts):
    """The largest decided interaction."""
    decided = [
        claim
        for claim in of_interactions(facts.claims)
        if claim.subject.word in ("better", "worse")
    ]
    if not decided:
        return ""
    one = max((claim.subject for claim in decided), key=lambda subject: abs(subject.mean))
    names = " and ".join(OF_LLAMA.get(name, name) for name in one.arm.split(":"))
    more = "more" if one.mean < 0 else "less"
    return sentence(
        f"{names} do not add up: together they are {abs(one.mean):.3f} nats {more} than the sum of"
        f" their effects ({signed(one.low, 3)} to {signed(one.high, 3)});"
        f" {counted(len(decided), 'interaction')} of {len(of_interactions(facts.claims))} are"
        " decided."
    )


def of_slope(facts):
    """The surest slope against scale."""
    decided = [
        claim
        for claim in of_slopes(facts.claims)
        if claim.subject.word in ("fades", "grows", "changes sign")
    ]
    if not decided:
        return ""
    one = min(decided, key=lambda claim: claim.p).subject
    others = [claim.subject.arm for claim in decided if claim.subject is not one]
    text = (
        f"the effect of {one.arm} {one.word} with scale: {signed(one.line[0], 3)} nats at the"
        f" smallest size, {signed(one.line[1], 3)} at the largest"
    )
    return sentence(text + (f"; so it is with {listed(others)}." if others else "."))


def of_time(facts):
    """A part whose worth in time is most unlike its worth in tokens."""
    known = []
    for part in by_word(facts.parts, "better", "worse"):
        one = part.claim.subject
        ends = [worth and worth.k for worth in (one.worth, one.worth_time)]
        if all(ends) and all(map(math.isfinite, ends)):
            known.append((abs(math.log(ends[0] / ends[1])), with_base(part), *ends))
    if not known:
        return ""
    _, name, tokens, time = max(known)
    return sentence(
        f"{name} is worth {tokens:.2g} × the tokens, and {time:.2g} × the time: its step"
        f" takes {tokens / time:.2f} times as long."
    )


def of_contexts(facts):
    """How much the loss rises at eight times the training context, by position scheme."""
    found = {}
    for section in facts.sections:
        changed = [
            arm
            for arm, each in section.sweep["arms"].items()
            if "position" in each["changes"] or arm == section.sweep["base"]
        ]
        rises = {}
        for arm in changed:
            losses = contexts_of(section, arm)
            if 1 in losses and 8 in losses:
                base = section.sweep["base_values"].get("position") or "base"
                name = base if arm == section.sweep["base"] else arm
                rises[name] = losses[8][0] - losses[1][0]
        if len(rises) > len(found):
            found = rises
    if len(found) < 2:
        return ""
    best, worst = (end(found, key=found.get) for end in (min, max))
    return (
        f"With eight times the training context the loss of {best} changes by"
        f" {signed(found[best], 3)} nats, and that of {worst} by {signed(found[worst], 3)}."
    )


def of_nothing(facts):
    """Parts of LLaMA that make no difference."""
    parts = [part for part in facts.parts if part.base == "gpt2" and part.name in OF_LLAMA]
    ties = by_word(parts, "tie")
    if not ties:
        return ""
    names = listed(dict.fromkeys(map(spoken, ties)))
    largest = max(abs(part.claim.subject.mean) for part in ties)
    return sentence(
        f"{names} make{'s' if len(ties) == 1 else ''} no difference that counts: at most"
        f" {largest:.4f} nats on average."
    )


def of_ledger(facts):
    """Published claims that our measurements contradict."""
    words = [row.get("verdict") for row in facts.ledger]
    if "contradicted" not in words:
        return ""
    against = [row for row in facts.ledger if row.get("verdict") == "contradicted"]
    names = listed([str(row.get("id")) for row in against])
    return (
        f"Of {len(words)} published claims {words.count('confirmed')} are confirmed and"
        f" {len(against)} contradicted ({names})."
    )


def of_correction(facts):
    """What the page's correction takes back."""
    back = [claim for claim in facts.claims if claim.taken_back]
    if not back:
        return ""
    names = listed([f"{claim.subject.arm} in {claim.section.label}" for claim in back], 4)
    return (
        f"{counted(len(back), 'comparison')} that a sweep by itself decides, the page with all its"
        f" {len(facts.claims)} comparisons does not: {names}."
    )


def of_single_runs(facts):
    """How often a single pair of runs would have been too little."""
    known = [part for part in facts.parts if math.isfinite(part.claim.section.main.base_sd)]
    small = [
        part
        for part in known
        if abs(part.claim.subject.mean) < 2 * math.sqrt(2) * part.claim.section.main.base_sd
    ]
    if not small:
        return ""
    return (
        f"The effects of {len(small)} of {len(known)} parts are smaller than two standard"
        " deviations of the difference of two single runs."
    )


# ---------------------------------------------------------------- what is open, and how it was made


def unknown(facts):
    """[sentence]: what the page does not know."""
    lines, sizes = [], sizes_of(facts)
    if sizes:
        names = listed(dict.fromkeys(one.sweep["data"]["dataset"] for one in facts.sections))
        lines.append(f"Anything above {short(sizes[1])} parameters, or on other text than {names}.")
    open_words = ("undecided", "not seen", "cannot tell", "no verdict")
    left = [claim for claim in facts.claims if claim.subject.word in open_words]
    if left:
        lines.append(f"{len(left)} of {len(facts.claims)} comparisons, which are undecided.")
    untuned = [one for one in facts.ran if len(one.sections[0].sweep["lr_grid"]) < 2]
    if untuned:
        lines.append(
            f"Whether each part has its own best learning rate: {len(untuned)} of"
            f" {counted(len(facts.ran), 'experiment')} train all arms at the base's."
        )
    waiting = [one.question for one in facts.experiments if not one.sections and one.question]
    lines += [f"Not run yet: {question}" for question in waiting]
    open_claims = [row for row in facts.ledger if row.get("verdict") not in DECIDED]
    if open_claims:
        lines.append(f"{len(open_claims)} of {len(facts.ledger)} published claims.")
    return lines


DECIDED = ("confirmed", "contradicted")


def method(facts, alpha):
    """How the page corrects, in sentences."""
    sweeps = [one for one in facts.sections if not one.sweep["screening"]]
    tested = (
        f"{counted(len(facts.claims), 'comparison')} of {counted(len(facts.ran), 'experiment')}"
    )
    return (
        f"{facts.runs:,} runs in {counted(len(facts.ran), 'experiment')}, {len(sweeps)} sweeps of"
        f" which decide; a screening only ranks. Each sweep is read by itself, since sweeps were"
        f" made by different versions of the code, and each compares arms with a base of the same"
        f" code. Holm's method corrects twice: within each sweep (p, its sweep), and over all"
        f" {tested} on this page together (p, this page). A word stands here only if the second is"
        f" at most {alpha:g}. So with 95 % probability nothing that the page calls decided is due"
        f" to chance. Intervals are 95 % intervals, each by itself. A worth is read off the base's"
        " own losses with fewer and more tokens, and never extrapolated. A tie is a difference"
        " smaller than what 5 % of the tokens are worth, by two one-sided tests, corrected in the"
        " same way."
    )
