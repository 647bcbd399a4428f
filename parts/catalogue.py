"""
The catalogue: every word of every slot with its cost and its paper.

    python -m parts.catalogue      # LLaMA at the size of the Shakespeare configs, one slot changed
    python -m parts.catalogue --model=gpt2 --n_layer=12 --n_head=12 --n_embd=768 --block_size=1024
    python -m parts.catalogue --diff=gpt2,llama     # the steps between two named architectures
    python -m parts.catalogue --table               # slots and words, the table in docs/parts.md
"""

import textwrap
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Literal

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("parts.catalogue")

from common.configurator import PositiveInt, allowed, build, keys, load
from common.errors import UserError, run
from parts.architectures import ARCH, CORNERS, configure, differences, needed, readers
from parts.costs import active_parameters, flops_per_token, kv_bytes_per_token, parameters
from parts.slots import CONV_SITES, SLOTS
from parts.variant import VariantConfig

WIDTH = 120  # columns of the catalogue
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout")

# The papers of words that have no class.
PAPERS = {
    "conv_sites": CONV_SITES,
    "qk_norm": {"head": "Qwen 3, arXiv:2505.09388", "full": "OLMo 2, arXiv:2501.00656"},
    "moe_balance": {"loss": "Switch, arXiv:2101.03961", "bias": "DeepSeek, arXiv:2408.15664"},
}


@dataclass
class CatalogueConfig:
    model: Literal[*CORNERS] = "llama"  # the base: what fills the other slots
    diff: str | None = None  # compare two named architectures, not `model`: gpt2,llama
    table: bool = False  # print the slots and their words as a table; other keys are ignored
    n_layer: PositiveInt = 6
    n_head: PositiveInt = 6
    n_embd: PositiveInt = 384  # width of the model
    block_size: PositiveInt = 256  # context length, tokens
    vocab_size: PositiveInt = 65


def choices():
    """{key: its words} of all keys whose value is a word."""
    words_of = {key: allowed(kind)[1] for key, kind in keys(VariantConfig).items()}
    return {key: words for key, words in words_of.items() if words}


def paper(key, word):
    """The paper of the value `word` of a key, or "" where there is none."""
    part = SLOTS.get(key, {}).get(word)
    return getattr(part, "paper", "") or PAPERS.get(key, {}).get(word, "")


def summary(c):
    """(parameters, FLOPs and cache bytes per token of a full context)"""
    return parameters(c), flops_per_token(c, c.block_size), kv_bytes_per_token(c)


def row(word, c, base, note):
    """One line: a word, the costs of the configuration c with it, and a note."""
    n_params, flops, kv = summary(c)
    percent = 100 * (n_params / parameters(base) - 1)
    if active_parameters(c) != n_params:
        note = f"{active_parameters(c) / 1e6:.1f} M active; {note}"
    return f"  {word:<15}{n_params:>14,}{percent:>+7.1f}%{flops / 1e6:>9,.1f}{kv:>9,.0f}  {note}"


def catalogue(values):
    """Print every word of every slot with its costs, then the named architectures."""
    values = values | {"arch": values["model"]}
    base = configure(values)
    print(
        f"{values['model']}: {base.n_layer} layers, {base.n_head} heads, {base.n_embd} wide, "
        f"context {base.block_size}, vocabulary {base.vocab_size}; one slot changed at a time\n"
    )
    print("key, word            parameters  change    MFLOP KV bytes  per token of a full context")
    for key, words in choices().items():
        print(key)
        for word in words:
            more = needed(key, word, base)
            name = f"{word} *" if getattr(base, key) == word and not more else word
            notes = [*(f"with {other}={value}" for other, value in more.items()), paper(key, word)]
            try:
                c = configure(values | more | {key: word})
                print(row(name, c, base, "; ".join(filter(None, notes))))
            except UserError as refused:
                print(f"  {name:<15}" + textwrap.shorten(f"refused: {refused}", WIDTH - 17))

    print(f"* the base\n\n{'named architectures':<59}what changes")
    for word in ARCH:
        try:
            c = configure(values | {"arch": word})
            changed = " ".join(key for key, *_ in differences(base, c))
            print(row(word, c, base, textwrap.shorten(changed, WIDTH - 76, placeholder=" …")))
        except UserError as refused:
            print(f"  {word:<15}" + textwrap.shorten(f"refused: {refused}", WIDTH - 17))


def difference(values, pair):
    """Print the changes that lead from one architecture to the other, and the costs that each adds
    to the changes above it."""
    a, b = (configure(values | {"arch": word}) for word in pair)
    line = "{:<20}{:>15} -> {:<15}{:>16}{:>16}{:>14}".format
    print(line("slot", *pair, "parameters", "FLOP / token", "KV B / token"))
    changed = SimpleNamespace(**asdict(a))  # becomes b, one key after the other
    for key, old, new in differences(a, b):
        before = summary(changed)
        setattr(changed, key, new)
        after = summary(changed)
        added = [f"{y - x:+,.0f}" for x, y in zip(before, after, strict=True)]
        print(line(key, str(old), str(new), *added))
    for word, c in zip(pair, (a, b), strict=True):
        n_params, flops, kv = summary(c)
        print(f"{word:<54}{n_params:>16,.0f}{flops:>16,.0f}{kv:>14,.0f}")


def table():
    """The slots and their words as a Markdown table; every other key is listed with the slot that
    reads it."""
    slot_of = {key: read_by[0][0] for key, read_by in readers().items()}  # the first that reads it
    lines = ["| slot | words | further keys |", "|---|---|---|"]
    for slot, words in SLOTS.items():
        further = [f"`{key}`" for key in slot_of if slot_of[key] == slot and key not in SLOTS]
        lines.append(f"| `{slot}` | `{' '.join(words)}` | {', '.join(further)} |")
    other = [f"`{key}`" for key in keys(VariantConfig) if key not in {*SIZES, *SLOTS, *slot_of}]
    lines.append(f"| other keys | {', '.join(other)} | |")
    lines.append(f"| `arch` | `{' '.join(ARCH)}` | |")
    return "\n".join(lines)


def main(argv):
    """Print what a command line asks for."""
    given = load(argv, [CatalogueConfig], __doc__)
    config = asdict(build(CatalogueConfig, given.values))
    diff = config.pop("diff")
    if given.words:
        raise UserError(f"cannot use {given.words[0]}", "command line", "write --key=value")
    if config.pop("table"):
        print(table())
    elif diff is None:
        catalogue(config)
    else:
        pair = diff.split(",")
        if len(pair) != 2 or not set(pair) <= set(ARCH):
            fix = "choose from " + ", ".join(ARCH)
            raise UserError("two named architectures are needed", f"diff={diff}", fix)
        difference(config, pair)


if __name__ == "__main__":
    run(main)
