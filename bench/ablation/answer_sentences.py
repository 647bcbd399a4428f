"""The sentences of the answer page, each computed from what the page claims. A sentence for which
there are no figures is left out."""

import math
from dataclasses import dataclass

from bench.ablation.answer import NAMES, ORDER, name_of, noise_of, of_interactions, of_slopes
from bench.ablation.answer_figures import BASES, noise_worth
from bench.ablation.sentences import signed
from bench.ablation.stats import counted, listed
from bench.ablation.tables import contexts_of, short

SURPRISES = 5
MOST = 3  # parts that the first sentence names
OF_LLAMA = ("RoPE", "RMSNorm", "SwiGLU", "no biases", "untied head")  # and not of GPT-2


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


def by_word(parts, *words):
    return [part for part in parts if part.claim.subject.word in words]


def sentence(text):
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------- the top


def answer(facts):
    """[sentence], two for each base: what is worth most, and what is worth nothing or less."""
    lines = []
    for base, name in BASES.items():
        known = [part for part in facts.parts if part.base == base and part.claim.subject.worth]
        better = by_word(known, "better")[:MOST]
        if better:
            first, *others = [f"{part.name} is worth {part.claim.subject.worth}" for part in better]
            first += " the training tokens"
            found = listed([first, *(text.replace(" is worth", "") for text in others)])
            lines.append(f"In {name} of {sizes_of(facts, base)}, {found}.")
        groups = [("no difference that counts", "tie"), ("worse", "worse")]
        rest = [
            f"{words}: {listed([part.name for part in by_word(known, word)])}"
            for words, word in groups
            if by_word(known, word)
        ]
        lines += [sentence(f"{'; '.join(rest)}.")] if rest else []
    return lines or ["No part is decided yet."]


def noise(facts):
    """What one seed more or less changes."""
    known = [one for one in facts.sections if math.isfinite(noise_of(one)[0])]
    if not known:
        return "No base has run twice yet."
    most = max(known, key=lambda one: (noise_worth(one) is not None, noise_of(one)[1]))
    sd, runs = noise_of(most)
    text = (
        f"The standard deviation of a run over seeds is {sd:.4f} nats ({most.label}, {runs} runs),"
        f" so two single runs of one and the same model differ by up to {2 * math.sqrt(2) * sd:.3f}"
    )
    worth = noise_worth(most)
    if worth:
        text += f"; a run is uncertain by {worth[0]:.2f} to {worth[1]:.2f} times its tokens"
    return text + "."


def sizes_of(facts, base=None):
    """The numbers of parameters of the bases, in words: of one architecture, or of all."""
    found = {
        cost["parameters"]
        for section in facts.sections
        for arm, cost in section.costs.items()
        if arm == section.sweep["base"] and cost.get("parameters")
        if base in (None, section.sweep["base_values"].get("model", "gpt2"))
    }
    if not found:
        return "unknown size"
    ends = dict.fromkeys(map(short, (min(found), max(found))))
    return f"{' to '.join(ends)} parameters"


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
        f"{part.name}, as in LLaMA, cost GPT-2 {signed(numbers.mean)} nats"
        f" ({signed(numbers.low)} to {signed(numbers.high)})."
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
    largest = max(decided, key=lambda claim: abs(claim.subject.mean))
    one, names = largest.subject, name_of(largest).replace(" × ", " and ")
    more = "more" if one.mean < 0 else "less"
    return sentence(
        f"{names} do not add up: together they gain {abs(one.mean):.3f} nats {more} than the sum"
        f" of their effects ({signed(one.low, 3)} to {signed(one.high, 3)});"
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
    surest = min(decided, key=lambda claim: claim.p)
    one, name = surest.subject, name_of(surest)
    others = [name_of(claim) for claim in decided if claim is not surest]
    text = (
        f"the effect of {name} {one.word} with scale: {signed(one.line[0], 3)} nats at the"
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
            known.append((abs(math.log(ends[0] / ends[1])), part.name, *ends))
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
            if set(each["changes"]) == {"position"} or arm == section.sweep["base"]
        ]
        rises = {}
        for arm in changed:
            losses = contexts_of(section, arm)
            if 1 in losses and 8 in losses:
                base = section.sweep["base_values"].get("position") or "base"
                name = base if arm == section.sweep["base"] else arm
                name = NAMES.get(name, name)
                rises[name] = losses[8][0] - losses[1][0]
        if len(rises) > len(found):
            found = rises
    if len(found) < 2:
        return ""
    best, worst = (end(found, key=found.get) for end in (min, max))
    return (
        f"With eight times the training context the loss changes by {signed(found[best], 3)} nats"
        f" with {best}, and by {signed(found[worst], 3)} with {worst}."
    )


def of_nothing(facts):
    """Parts of LLaMA that make no difference."""
    parts = [part for part in facts.parts if part.base == "gpt2" and part.name in OF_LLAMA]
    ties = by_word(parts, "tie")
    if not ties:
        return ""
    names = listed(dict.fromkeys(part.name for part in ties))
    largest = max(abs(part.claim.subject.mean) for part in ties)
    return sentence(
        f"{names} make{'s' if len(ties) == 1 else ''} no difference that counts in GPT-2: at most"
        f" {largest:.4f} nats on average, and a tie is decided."
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
    names = listed([f"{name_of(claim)} in {claim.section.label}" for claim in back], 4)
    return (
        f"{counted(len(back), 'comparison')} that a sweep by itself decides, the page with all its"
        f" {len(facts.claims)} comparisons does not: {names}."
    )


def of_single_runs(facts):
    """How often a single pair of runs would have been too little."""
    known = [part for part in facts.parts if math.isfinite(noise_of(part.claim.section)[0])]
    small = [
        part
        for part in known
        if abs(part.claim.subject.mean) < 2 * math.sqrt(2) * noise_of(part.claim.section)[0]
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
    names = listed(dict.fromkeys(one.sweep["data"]["dataset"] for one in facts.sections))
    lines = [f"Models beyond {sizes_of(facts)}, and other text than {names}."]
    open_words = ("undecided", "not seen", "cannot tell", "no verdict")
    left = [claim for claim in facts.claims if claim.subject.word in open_words]
    if left:
        lines.append(f"{len(left)} of the page's {len(facts.claims)} comparisons: undecided.")
    untuned = [one for one in facts.ran if len(one.sections[0].sweep["lr_grid"]) < 2]
    if untuned:
        lines.append(
            f"What each part is worth at its own best learning rate: {len(untuned)} of"
            f" {counted(len(facts.ran), 'experiment')} train all arms at the base's."
        )
    waiting = [one.name.replace("_", " ") for one in facts.experiments if not one.sections]
    if waiting:
        planned = len(waiting) + sum(one.name in ORDER for one in facts.ran)
        names = listed(waiting, len(waiting))
        lines.append(f"{len(waiting)} of {planned} planned experiments, not run yet: {names}.")
    open_claims = [row for row in facts.ledger if row.get("verdict") not in DECIDED]
    if open_claims:
        count = f"{len(open_claims)} of {len(facts.ledger)}"
        lines.append(f"{count} published claims: undecided, or not measured.")
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
