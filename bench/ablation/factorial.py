"""
Design `factorial`: every run serves every effect. Each factor has two levels, and each cell of the
design, an arm, sets all of them. pyDOE3 makes the fraction.

A fraction of resolution R mixes no effect of p factors with another of fewer than R - p (Box,
Hunter and Hunter, Statistics for Experimenters, chapter 12). At resolution V, which is the default,
main effects and two-factor interactions are free of each other.
"""

from contextlib import suppress
from itertools import combinations

import numpy as np
import pyDOE3

from bench.ablation.settings import part_name, variant_config
from common.configurator import build
from common.errors import UserError
from parts.architectures import ARCH
from training.settings import TrainConfig

MOST_FACTORS = 10  # a fraction of resolution V then has 512 cells
TRIES = 100  # generators that pyDOE3 tries: it tries the longest first
SHORT = {"bias=none": "no bias", "tie_embeddings=False": "untied", "tie_embeddings=True": "tied"}


# ---------------------------------------------------------------- factors


def factors_of(config, base):
    """{factor: (changes at its low level, changes at its high level)}. The low level is what the
    base has. A slot's name stands for GPT-2's and LLaMA's word. Raises UserError."""
    here = vars(variant_config({"model": "gpt2"} | base))
    has = vars(build(TrainConfig, base)) | here | base
    factors, changed = {}, {}
    for given in [config.factors] if isinstance(config.factors, dict) else config.factors or ():
        pairs = given if isinstance(given, dict) else {given: corner_levels(given, here)}
        for name, levels in pairs.items():
            low, high = checked(name, levels, has)
            for key in high:
                if key in changed:
                    what = f"{changed[key]} and {name} both change {key}"
                    raise UserError(what, "factors", "let each key belong to one factor")
                changed[key] = name
            factors[name] = (low, high)
    if not 2 <= len(factors) <= MOST_FACTORS:
        fix = f"name 2 to {MOST_FACTORS}: factors = ['position', 'norm', 'mlp']"
        raise UserError(f"{len(factors)} factors", "factors", fix)
    return factors


def corner_levels(slot, here):
    """The base's word of a slot, and that of the other of GPT-2 and LLaMA."""
    words = [ARCH[corner][slot] for corner in ("gpt2", "llama") if slot in ARCH[corner]]
    own = here.get(slot)
    if own not in words or words[0] == words[1]:
        slots = [key for key, word in ARCH["gpt2"].items() if ARCH["llama"][key] != word]
        fix = f"choose from {', '.join(slots)}, or write {{{slot!r}: [dict(...), dict(...)]}}"
        raise UserError(f"{slot} has no level of GPT-2 and of LLaMA", "factors", fix)
    return [{slot: own}, {slot: words[1 - words.index(own)]}]


def checked(name, levels, has):
    """The two levels of a factor. Raises UserError unless they are two dictionaries of changes, the
    first of which holds what the base has."""
    fix = 'write {"optimizer": [dict(optimizer="adamw"), dict(optimizer="muon")]}'
    pair = isinstance(levels, list | tuple) and len(levels) == 2
    if not pair or not all(isinstance(level, dict) for level in levels) or not levels[1]:
        raise UserError("a factor is a name and two levels", f"factors: {name!r}", fix)
    for key, value in levels[0].items():
        if has.get(key) != value:
            what = f"the low level {key}={value} of {name} is not the base's {has.get(key)}"
            raise UserError(what, "factors", f"give --{key}={value}, or exchange the levels")
    return levels


# ---------------------------------------------------------------- cells


def resolution_of(design):
    """The fewest columns of a design [cells, factors] whose product is constant; else one more."""
    factors = design.shape[1]
    for size in range(1, factors + 1):
        for columns in combinations(range(factors), size):
            if abs(design[:, columns].prod(1).sum()) == len(design):
                return size
    return factors + 1


def fraction(factors, resolution):
    """The smallest two-level design [cells, factors] of pyDOE3 with at least this resolution, its
    first cell low in every factor. resolution="full" or above `factors`: all combinations."""
    makers = [
        lambda: pyDOE3.fracfact_by_res(factors, resolution),
        lambda: pyDOE3.fracfact(pyDOE3.fracfact_opt(factors, 2, TRIES)[0]),
        lambda: pyDOE3.fracfact(pyDOE3.fracfact_opt(factors, 1, TRIES)[0]),
    ]
    found = [pyDOE3.ff2n(factors)]
    for maker in makers if resolution != "full" else ():
        with suppress(ValueError):  # "design not possible"
            design = maker()
            # fracfact_by_res(7, 5) has resolution IV: what it promises is checked.
            if resolution_of(design) >= resolution:
                found.append(design)
    smallest = min(found, key=lambda design: (len(design), -resolution_of(design)))
    folded = smallest * -smallest[0]  # other signs, the same resolution
    return folded[np.lexsort(folded.T[::-1])]


def cells_of(config, base):
    """[(name, changes, {factor: 0 or 1})] of the arms; the first is the base."""
    factors = factors_of(config, base)
    cells = []
    for row in fraction(len(factors), config.resolution):
        cell = {name: int(level > 0) for name, level in zip(factors, row, strict=True)}
        high = {name: factors[name][1] for name, level in cell.items() if level}
        changes = {key: value for change in high.values() for key, value in change.items()}
        name = "+".join(level_name(name, change) for name, change in high.items())
        cells.append((name or "base", changes, cell))
    return cells


def level_name(factor, change):
    """The name of a factor's high level: rope for position=rope, otherwise the factor's."""
    (key, value), *more = change.items()
    if more or key != factor:
        return factor
    name = part_name(key, value)
    return SHORT.get(name, name)


def describe(cells):
    """A sentence on the design of cells [{factor: 0 or 1}], and what it mixes."""
    factors, found = len(cells[0]), aliases(cells)
    text = f"{len(cells)} of {2**factors} cells of {factors} factors, "
    if not found:
        return text + "so that no effect is mixed with another."
    resolution = resolution_of(design_of(cells))
    return text + f"resolution {resolution}. Mixed effects: {'; '.join(found)}."


def design_of(cells):
    """The design [cells, factors] of -1 and 1 of cells [{factor: 0 or 1}]."""
    return np.array([[2.0 * level - 1 for level in cell.values()] for cell in cells])


def aliases(cells):
    """["position = -norm:mlp:bias"]: the effects of one and two factors of cells [{factor: 0 or 1}]
    that the design mixes with others, each with the shortest of them."""
    names, design = list(cells[0]), design_of(cells)
    # With every sign turned the all-low cell is all-high, and all signs in the relations are plus.
    found = []
    for line in pyDOE3.fracfact_aliasing(-design)[0]:
        first, *others = line.split(" = ")
        if others and len(first) <= 2:
            mixed = [other for other in others if len(other) == len(others[0])]
            terms = [signed_term(other, len(first), names) for other in mixed]
            found.append(f"{signed_term(first, len(first), names)} = {' = '.join(terms)}")
    return found


def signed_term(letters, length, names):
    """position:norm for ab; with a minus if its sign is not that of a term of so many factors."""
    sign = "" if (len(letters) - length) % 2 == 0 else "-"
    return sign + ":".join(names[ord(letter) - ord("a")] for letter in letters)
