"""The sentences of the answer page, each computed from what the page claims. A sentence for which
there are no figures is left out. Each number in them leads to its rows and its command, or to the
table that counts it, as a link of Markdown to a place of the page."""

import math
from dataclasses import dataclass

import numpy as np

from bench.ablation.answer import (
    has_own_rates,
    name_of,
    noise_of,
    of_interactions,
    of_slopes,
    shown_name,
)
from bench.ablation.answer_figures import BASES, noise_worth
from bench.ablation.answer_tables import LEDGER_WORDS
from bench.ablation.sentences import signed
from bench.ablation.stats import counted, listed
from bench.ablation.tables import contexts_of, short
from bench.ablation.worth import two_digits

MOST = 4  # parts that a sentence names as worth most
LISTED = 4  # parts of one word that the last sentence names
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
    """{base: [sentence]}: what is worth most at the best learning rate of each arm, and at one rate
    for all, and what is worth nothing or less."""
    lines = {}
    for base, name in BASES.items():
        found = [part for part in facts.parts if part.base == base and part.claim.subject.worth]
        known = [part for part in found if not part.elsewhere]
        open_to = [cited(part.name, ESTIMATES) for part in found if part.elsewhere]
        rates = (True, "the best learning rate for each arm"), (False, "one rate for all arms")
        sentences = [gains(found, f"With {text}, {name}", own) for own, text in rates]
        groups = [("no difference that counts", "tie"), ("worse", "worse")]
        rest = [
            f"{words}: {listed(map(of_part, by_word(known, word)), LISTED)}"
            for words, word in groups
            if by_word(known, word)
        ]
        rest += [f"it depends on the experiment: {listed(open_to, LISTED)}"] if open_to else []
        sentences += [sentence(f"{'; '.join(rest)}.")] if rest else []
        lines |= {base: list(filter(None, sentences))} if any(sentences) else {}
    return lines or {"": ["No part is decided yet."]}


def gains(parts, start, own_rate):
    """The sentence on the parts that are worth most, with or without a rate for each arm."""
    found = (part.estimate(own_rate) for part in parts)
    better = [claim for claim in found if claim and claim.subject.word == "better"]
    most = sorted(better, key=lambda claim: (-claim.subject.worth.k, claim.subject.mean))[:MOST]
    if not most:
        return ""
    texts = []
    for claim in most:
        worth = str(claim.subject.worth).replace(" (", ", ").rstrip(")")
        texts.append(f"{name_of(claim)} ({of_claim(claim, worth)})")
    sizes = sizes_of([claim.section for claim in most])
    return f"{start} of {sizes} gains most from {listed(texts)}."


def of_part(part):
    """A part that is worth nothing or less, with its worth."""
    worth = part.claim.subject.worth
    return of_claim(part.claim, f"{part.name} ({worth.words(worth.k)})")


def noise(facts):
    """What one seed more or less changes."""
    known = [one for one in facts.sections if math.isfinite(noise_of(one)[0])]
    if not known:
        return "No base has run twice yet."
    most = max(known, key=lambda one: (noise_worth(one) is not None, noise_of(one)[1]))
    sd, runs = noise_of(most)
    first = f"{sd:.4f} nats ({most.label}, {runs} runs)"
    apart = f"{2 * math.sqrt(2) * sd:.3f} in 95 of 100 pairs"
    text = (
        f"A run's standard deviation over seeds is {facts.at(most, first)}, so two runs of one"
        f" model differ by less than {facts.at(most, apart)}"
    )
    worth = noise_worth(most)
    if worth:
        ends = f"{worth[0]:.2f} to {worth[1]:.2f}"
        text += f"; two standard deviations are worth {facts.at(most, ends)} times the tokens"
    return text + "."


def sizes_of(sections):
    """The numbers of parameters of the bases, in words."""
    bases = [section.costs.get(section.sweep["base"]) or {} for section in sections]
    found = {cost["parameters"] for cost in bases if cost.get("parameters")}
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
    """The surest interaction that is decided."""
    found = of_interactions(facts.claims)
    decided = [claim for claim in found if claim.subject.word in ("better", "worse")]
    if not decided:
        return ""
    surest, one = decided[0], decided[0].subject
    names, more = name_of(surest).replace(" × ", " and "), "more" if one.mean < 0 else "less"
    gain = of_claim(surest, f"{abs(one.mean):.3f} nats {more}")
    ends = of_claim(surest, f"{signed(one.low, 3)} to {signed(one.high, 3)}")
    count = f"{counted(len(decided), 'interaction')} of {len(found)}"
    return sentence(
        f"{names} do not add up: on {surest.section.sweep['data']['dataset']} they gain {gain}"
        f" together than the sum of their effects ({ends}); {cited(count, 'interactions')} are"
        " decided."
    )


def of_slope(facts):
    """The surest slope against scale, and the experiment that contradicts it."""
    found = of_slopes(facts.claims)
    decided = [claim for claim in found if claim.subject.word not in ("holds", "cannot tell")]
    if not decided:
        return ""
    surest, *others = sorted(decided, key=lambda claim: claim.p)
    name, word = name_of(surest), surest.subject.word
    text = f"The effect of {name} {word} from the smallest size to the largest, {ends_of(surest)}"
    same = [claim for claim in others if name_of(claim) == name and claim.subject.word != word]
    for contrary in same[:1]:
        steps = f"{steps_of(contrary)} steps at the largest, not {steps_of(surest)}"
        text += f"; in an experiment of {steps}, it {contrary.subject.word}, {ends_of(contrary)}"
    return f"{text}."


def steps_of(claim):
    """The steps of the largest size of a scale."""
    return of_claim(claim, f"{claim.experiment.sections[-1].sweep['max_iters']:,}")


def ends_of(claim):
    """The effects at the smallest and at the largest size of a scale."""
    effects = claim.subject.effects
    first, last = (of_claim(claim, signed(each.mean, 3)) for each in (effects[0], effects[-1]))
    return f"from {first} nats to {last}"


def of_time(facts):
    """A part whose worth in time is most unlike its worth in tokens."""
    timed = [part for part in by_word(facts.parts, "better", "worse") if part.worth_time]
    known = [part for part in timed if 0 < part.worth_time.k < math.inf]
    if not known:
        return ""
    part = max(known, key=lambda part: abs(math.log(part.time[0])))
    ends = part.claim.subject.worth.k, part.worth_time.k
    tokens, time = (of_claim(part.claim, f"{two_digits(k)} ×") for k in ends)
    step = of_claim(part.priced, f"{part.time[0]:.2f} times")
    return (
        f"In {BASES.get(part.base, part.base)}, {part.name} is worth {tokens} the tokens and {time}"
        f" the time, since its step takes {step} as long."
    )


def of_contexts(facts):
    """How much the loss rises at eight times the training context, by position scheme."""
    found, shown = {}, None
    for section in facts.sections:
        rises, own = {}, section.sweep["base_values"].get("position")
        for arm, each in section.sweep["arms"].items():
            losses, of_base = contexts_of(section, arm), arm == section.sweep["base"]
            if 8 in losses and (of_base or set(each["changes"]) == {"position"}):
                name = shown_name({"position": own}, own) if of_base and own else section.named(arm)
                rises[name] = losses[8][0] - losses[1][0]
        if len(rises) > len(found):
            found, shown = rises, section
    if len(found) < 2:
        return ""
    best, worst = (end(found, key=found.get) for end in (min, max))
    change, other = (facts.at(shown, signed(found[arm], 3)) for arm in (best, worst))
    base, length = shown.named(shown.sweep["base"]), shown.sweep["block_size"]
    lengths = facts.at(shown, f"Trained on {length} tokens and scored on {8 * length}")
    changes = f"changes by {change} nats with {best}, and by {other} with {worst}"
    return f"{lengths}, {base}'s loss {changes}."


def of_rates(facts):
    """The parts whose effects change most when each arm has its own learning rate."""
    found, tuning = [], {id(section): section.tuning() for section in facts.sections}
    for claim in facts.claims:
        losses = tuning[id(claim.section)]
        arms = claim.subject.arm, claim.section.sweep["base"]
        own, base = (np.mean(losses.get(arm, {}).get(1, math.nan)) for arm in arms)
        if claim.subject.word in ("better", "worse") and math.isfinite(own - base):
            shared = float(own - base)
            found.append((abs(claim.subject.mean - shared), claim, shared))
    if not found:
        return ""
    found = sorted(found, key=lambda each: -each[0])
    section = found[0][1].section
    changes = [
        f"by {of_claim(claim, signed(claim.subject.mean, 3))} nats with {name_of(claim)}"
        f" (not {of_claim(claim, signed(shared, 3))})"
        for _, claim, shared in found
        if claim.section is section
    ]
    base = section.named(section.sweep["base"])
    best = facts.at(section, f"{section.sweep['chosen_lr'].get('base', 1):g} × the shared one")
    return (
        f"{base}'s own best learning rate is {best}; at each arm's own its loss changes"
        f" {listed(changes[:2])}."
    )


# ---------------------------------------------------------------- what is open, and how it was made


def unknown(facts):
    """[sentence]: what the page does not know."""
    datasets = dict.fromkeys(one.sweep["data"]["dataset"] for one in facts.sections)
    names = listed(name for name in datasets if not name.startswith("task:"))
    lines = [f"Models beyond {sizes_of(facts.sections)}, and other text than {names}."]
    open_words = ("undecided", "not seen", "cannot tell", "no verdict")
    left = [claim for claim in facts.claims if claim.subject.word in open_words]
    if left:
        count = f"{len(left)} of the page's {len(facts.claims)} comparisons"
        lines.append(f"{cited(count, CLAIMS)}: undecided.")
    untuned = [one for one in facts.ran if not has_own_rates(one.sections[0])]
    if untuned:
        count = cited(f"{len(untuned)} of {counted(len(facts.ran), 'experiment')}", ROWS)
        lines.append(f"Each part at its own best learning rate: {count} train all arms at one.")
    waiting = sum(not one.sections for one in facts.experiments)
    if waiting:
        planned = waiting + sum(one.planned for one in facts.ran)
        lines.append(f"{cited(f'{waiting} of {planned} planned experiments', ROWS)}: not run yet.")
    open_claims = [row for row in facts.ledger if row.get("verdict") not in LEDGER_WORDS]
    if open_claims:
        count = cited(f"{len(open_claims)} of {len(facts.ledger)} published claims", LEDGER)
        lines.append(f"{count}: undecided, or not measured.")
    return lines


def method(facts, alpha):
    """How the page corrects, in sentences."""
    sweeps = [one for one in facts.sections if not one.sweep["screening"]]
    tested = cited(counted(len(facts.claims), "comparison"), CLAIMS)
    ran = cited(f"{facts.runs:,} runs in {counted(len(facts.ran), 'experiment')}", ROWS)
    deciding = cited(f"{len(sweeps)} sweeps", ROWS)
    return (
        f"{ran}. {deciding} decide, a size of a scale counted as one; a screening only ranks. Each"
        " sweep is read by itself, since sweeps were made by different versions of the code, and"
        " each compares arms with a base of the same code. Holm's method corrects twice: within"
        f" each sweep (p, its sweep), and over all {tested} on this page together (p, this page). A"
        f" word stands here only if the second is at most {alpha:g}. So the probability that chance"
        " alone decides even one difference on this page is at most 5 %, and as much again for the"
        " ties. That does not cover what runs share, such as a text or a learning rate."
        " Intervals are 95 % intervals, each by itself. A worth is read off the base's own losses"
        " with fewer and more tokens, and never extrapolated. A tie is a difference smaller than"
        " what 5 % of the tokens are worth, by two one-sided tests, corrected in the same way."
    )
