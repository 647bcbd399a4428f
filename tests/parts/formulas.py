"""All reference formulas, by slot and word."""

import mixer_references
import references

FORMULAS = dict(
    embed=references.EMBED,
    position=references.POSITION,
    norm=references.NORM,
    block=references.BLOCK,
    mlp=references.MLP,
    residual=references.RESIDUAL,
    rope_scaling=references.ROPE_SCALING,
    mixer=mixer_references.MIXER,
    attn_extra=mixer_references.ATTN_EXTRA,
)


def reference(slot, word):
    """The formula of a word. LookupError where none is written."""
    formulas = FORMULAS[slot]
    name = f"{slot.upper()}[{word!r}]"
    file = "mixer_references" if slot in ("mixer", "attn_extra") else "references"
    if word not in formulas:
        raise LookupError(f"no reference for {name}: add one to tests/parts/{file}.py")
    return formulas[word]
