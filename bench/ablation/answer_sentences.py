"""The sentences of the answer page, each computed from what the page claims. A sentence for which
there are no figures is left out. Each number in them leads to its rows and its command, or to the
table that counts it, as a link of Markdown to a place of the page."""

import math
from dataclasses import dataclass

import numpy as np

from bench.ablation.answer import (
    name_of,
    noise_of,
    of_interactions,
    of_slopes,
    shown_name,
)
from bench.ablation.answer_figures import BASES, noise_worth
from bench.ablation.sentences import signed
from bench.ablation.stats import counted, listed
from bench.ablation.tables import contexts_of, short
from bench.ablation.worth import two_digits

MOST = 3  # parts that the first sentence names
LISTED = 5  # parts of one word that the second sentence names
ROWS, CLAIMS, LEDGER, ESTIMATES = "rows", "claims", "ledger", "estimates"  # places of the page


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

    def at(self, section, text):
        """A text that leads to the rows and the command of a section."""
        places = {id(each): at(one) for one in self.ran for each in one.sections}
        return cited(text, places[id(section)])


def cited(text, place):
    """A text that leads to a place of the page."""
    return f"[{text}](#{place})"


def at(experiment):
    """The place of an experiment's rows and command."""
    return f"at-{experiment.name}"


def of_claim(claim, text):
    """A text that leads to the rows and the command of a claim."""
    return cited(text, at(claim.experiment))


def by_word(parts, *words):
    return [part for part in parts if part.claim.subject.word in words]


def sentence(text):
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------- the top


def answer(facts):
    """{base: [sentence]}, two for each base: what is worth most, and what is worth nothing or
    less."""
    lines = {}
    for base, name in BASES.items():
        found = [part for part in facts.parts if part.base == base and part.claim.subject.worth]
        known = [part for part in found if not part.depends]
        open_to = [cited(part.name, ESTIMATES) for part in found if part.depends]
        better = by_word(known, "better")[:MOST]
        sentences = []
        if better:
            found = listed([f"by {part.name}, worth {worth_of(part)}" for part in better])
            gained = f"most is gained, counted in training tokens, {found}"
            sentences.append(f"In {name} of {sizes_of(facts, base)}, {gained}.")
        groups = [("no difference that counts", "tie"), ("worse", "worse")]
        rest = [
            f"{words}: {listed([of_claim(part.claim, part.name) for part in found], LISTED)}"
            for words, found in ((words, by_word(known, word)) for words, word in groups)
            if found
        ]
        rest += [f"it depends on the experiment: {listed(open_to, LISTED)}"] if open_to else []
        sentences += [sentence(f"{'; '.join(rest)}.")] if rest else []
        lines |= {base: sentences} if sentences else {}
    return lines or {"": ["No part is decided yet."]}


def worth_of(part):
    """What a part is worth, and what at its own learning rate, if another experiment chose it."""
    text, own = of_claim(part.claim, part.claim.subject.worth), part.at_own_rate
    return f"{text} ({of_claim(own, own.subject.worth)} at its own learning rate)" if own else text


def noise(facts):
    """What one seed more or less changes."""
    known = [one for one in facts.sections if math.isfinite(noise_of(one)[0])]
    if not known:
        return "No base has run twice yet."
    most = max(known, key=lambda one: (noise_worth(one) is not None, noise_of(one)[1]))
    sd, runs = noise_of(most)
    first, apart = f"{sd:.4f} nats ({most.label}, {runs} runs)", f"{2 * math.sqrt(2) * sd:.3f}"
    text = (
        f"The standard deviation of a run over seeds is {facts.at(most, first)}, so two single runs"
        f" of one and the same model differ by up to {facts.at(most, apart)}"
    )
    worth = noise_worth(most)
    if worth:
        ends = f"{worth[0]:.2f} to {worth[1]:.2f}"
        text += f"; a run is uncertain by {facts.at(most, ends)} times its tokens"
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
    return cited(f"{' to '.join(ends)} parameters", ROWS)


# ---------------------------------------------------------------- surprises


def surprises(facts):
    """Up to five sentences, the most telling kind first."""
    kinds = of_rates, of_interaction, of_slope, of_time, of_contexts
    found = [kind(facts) for kind in kinds]
    return [text for text in found if text]


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
    gain = of_claim(largest, f"{abs(one.mean):.3f} nats {more}")
    ends = of_claim(largest, f"{signed(one.low, 3)} to {signed(one.high, 3)}")
    count = f"{counted(len(decided), 'interaction')} of {len(of_interactions(facts.claims))}"
    return sentence(
        f"{names} do not add up: together they gain {gain} than the sum of their effects ({ends});"
        f" {cited(count, 'interactions')} are decided."
    )


def of_slope(facts):
    """The surest slope against scale, the experiment that contradicts it, and other parts."""
    words = ("fades", "grows", "changes sign")
    decided = [claim for claim in of_slopes(facts.claims) if claim.subject.word in words]
    if not decided:
        return ""
    surest, *others = sorted(decided, key=lambda claim: claim.p)
    name, word = name_of(surest), surest.subject.word
    text = f"the effect of {name} {word} with scale, {ends_of(surest)}"
    same = [claim for claim in others if name_of(claim) == name]
    contrary = next((claim for claim in same if claim.subject.word != word), None)
    if contrary:
        first, last = (of_claim(contrary, signed(end, 3)) for end in contrary.subject.line)
        steps = f"{steps_of(contrary)} steps at the largest, not {steps_of(surest)}"
        text += f"; in an experiment of {steps}, it {contrary.subject.word}: {first} to {last}"
    also = {name_of(claim): claim.subject.word for claim in others if claim not in same}
    more = [f"that of {other} {word}" for other, word in also.items()]
    return sentence("; ".join(filter(None, [text, listed(more, LISTED)])) + ".")


def steps_of(claim):
    """The steps of the largest size of a scale."""
    return of_claim(claim, f"{claim.experiment.sections[-1].sweep['max_iters']:,}")


def ends_of(claim):
    """The effects that a slope leads from and to."""
    first, last = (signed(end, 3) for end in claim.subject.line)
    smallest, largest = of_claim(claim, f"{first} nats"), of_claim(claim, last)
    return f"from {smallest} at the smallest size to {largest} at the largest"


def of_time(facts):
    """A part whose worth in time is most unlike its worth in tokens."""
    known = []
    for part in by_word(facts.parts, "better", "worse"):
        one = part.claim.subject
        ends = [worth and worth.k for worth in (one.worth, one.worth_time)]
        if all(ends) and all(map(math.isfinite, ends)):
            known.append((abs(math.log(ends[0] / ends[1])), part, *ends))
    if not known:
        return ""
    _, part, tokens, time = max(known, key=lambda each: each[0])
    texts = (
        f"{two_digits(tokens)} × the tokens",
        f"{two_digits(time)} × the time",
        f"{tokens / time:.2f} times",
    )
    tokens, time, step = (of_claim(part.claim, text) for text in texts)
    return f"With {part.name} a run is worth {tokens}, and {time}: a step takes {step} as long."


def of_contexts(facts):
    """How much the loss rises at eight times the training context, by position scheme."""
    found, shown = {}, None
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
                own = section.sweep["base_values"].get("position")
                of_base = arm == section.sweep["base"] and own
                name = shown_name({"position": own}, own) if of_base else section.named(arm)
                rises[name] = losses[8][0] - losses[1][0]
        if len(rises) > len(found):
            found, shown = rises, section
    if len(found) < 2:
        return ""
    best, worst = (end(found, key=found.get) for end in (min, max))
    change = facts.at(shown, f"{signed(found[best], 3)} nats")
    return (
        f"With eight times the training context the loss changes by {change} with {best}, and by"
        f" {facts.at(shown, signed(found[worst], 3))} with {worst}."
    )


def of_rates(facts):
    """The parts whose effects change most when each arm has its own learning rate."""
    found = []
    for claim in facts.claims:
        losses, arm, base = claim.section.tuning(), claim.subject.arm, claim.section.sweep["base"]
        ends = [np.mean(losses.get(each, {}).get(1, math.nan)) for each in (arm, base)]
        shared = float(ends[0] - ends[1])
        if claim.subject.word in ("better", "worse") and math.isfinite(shared):
            found.append((abs(claim.subject.mean - shared), claim, shared))
    if not found:
        return ""
    found = sorted(found, key=lambda each: -each[0])
    section = found[0][1].section
    texts = [
        f"by {of_claim(claim, f'{signed(claim.subject.mean, 3)} nats')} with {name_of(claim)}"
        f" ({of_claim(claim, signed(shared, 3))} at one shared rate)"
        for _, claim, shared in found
        if claim.section is section
    ]
    base = section.named(section.sweep["base"])
    best = facts.at(section, f"{section.sweep['chosen_lr'].get('base', 1):g} × the shared one")
    return (
        f"With each arm at its own best learning rate, {base}'s loss changes {listed(texts[:2])};"
        f" {base}'s own best is {best}."
    )


# ---------------------------------------------------------------- what is open, and how it was made


def unknown(facts):
    """[sentence]: what the page does not know."""
    names = listed(dict.fromkeys(one.sweep["data"]["dataset"] for one in facts.sections))
    lines = [f"Models beyond {sizes_of(facts)}, and other text than {names}."]
    open_words = ("undecided", "not seen", "cannot tell", "no verdict")
    left = [claim for claim in facts.claims if claim.subject.word in open_words]
    if left:
        count = f"{len(left)} of the page's {len(facts.claims)} comparisons"
        lines.append(f"{cited(count, CLAIMS)}: undecided.")
    untuned = [one for one in facts.ran if len(one.sections[0].sweep["lr_grid"]) < 2]
    if untuned:
        count = cited(f"{len(untuned)} of {counted(len(facts.ran), 'experiment')}", ROWS)
        lines.append(
            f"What each part is worth at its own best learning rate: {count} train all arms at the"
            " base's."
        )
    waiting = sum(not one.sections for one in facts.experiments)
    if waiting:
        planned = waiting + sum(one.planned for one in facts.ran)
        lines.append(f"{cited(f'{waiting} of {planned} planned experiments', ROWS)}: not run yet.")
    open_claims = [row for row in facts.ledger if row.get("verdict") not in DECIDED]
    if open_claims:
        count = cited(f"{len(open_claims)} of {len(facts.ledger)} published claims", LEDGER)
        lines.append(f"{count}: undecided, or not measured.")
    return lines


DECIDED = ("confirmed", "contradicted")


def method(facts, alpha):
    """How the page corrects, in sentences."""
    sweeps = [one for one in facts.sections if not one.sweep["screening"]]
    tested = cited(counted(len(facts.claims), "comparison"), CLAIMS)
    ran = cited(f"{facts.runs:,} runs in {counted(len(facts.ran), 'experiment')}", ROWS)
    deciding = cited(f"{len(sweeps)} sweeps", ROWS)
    return (
        f"{ran}, {deciding} of which decide; a screening only ranks. Each sweep is read by itself,"
        " since sweeps were made by different versions of the code, and each compares arms with a"
        " base of the same code. Holm's method corrects twice: within each sweep (p, its sweep),"
        f" and over all {tested} on this page together (p, this page). A word stands here only if"
        f" the second is at most {alpha:g}. So with 95 % probability nothing that the page calls"
        " decided is due to chance. Intervals are 95 % intervals, each by itself. A worth is read"
        " off the base's own losses with fewer and more tokens, and never extrapolated. A tie is a"
        " difference smaller than what 5 % of the tokens are worth, by two one-sided tests,"
        " corrected in the same way."
    )
