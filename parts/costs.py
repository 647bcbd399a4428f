"""
What a configuration costs: parameters, FLOPs, bytes of the cache; the MLP width at which two
configurations cost the same; and the catalogue, every word of every slot with its cost and paper:

    python -m parts.costs      # LLaMA at the size of the Shakespeare configs, one slot changed
    python -m parts.costs --model=gpt2 --n_layer=12 --n_head=12 --n_embd=768 --block_size=1024
    python -m parts.costs --diff=gpt2,llama      # the steps between two named architectures
    python -m parts.costs --table                # slots and words, the table in docs/parts.md
"""

# Costs are sums over the parts' own flops(T), held(T) and unused(). The parts are made without
# numbers, on torch's meta device, where their parameters are counted.
# c is any object with the fields of VariantConfig. T: tokens of context.

import textwrap
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Literal

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("parts.costs")

import torch
from torch.overrides import TorchFunctionMode

from common.configurator import PositiveInt, allowed, build, keys, load
from common.errors import UserError, run
from parts.architectures import ARCH, CORNERS, configure, differences, readers, without_effect
from parts.part import Linear, Part, short_convs
from parts.slots import CONV_SITES, MIXER, MLP, POSITION, SLOTS
from parts.variant import Variant, VariantConfig

WIDTH = 120  # columns of the catalogue
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout")

# ---------------------------------------------------------------- a model without numbers


class NoInitialValues(TorchFunctionMode):
    """Skips the initialisers: on the meta device they do nothing, but normal_ loads 800 modules."""

    names = ("normal_", "uniform_", "kaiming_uniform_", "constant_", "ones_", "zeros_")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in self.names:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def meta_model(c):
    """The model of a configuration on the meta device: with shapes but without memory."""
    return made_once(tuple(vars(c).items()))


@lru_cache(maxsize=256)
def made_once(items):
    with torch.device("meta"), NoInitialValues():
        return Variant(SimpleNamespace(**dict(items))).eval()


# ---------------------------------------------------------------- parameters and FLOPs


def mlp_width(c):
    """The number of features inside the MLP."""
    return MLP[c.mlp].width_of(c)


def parameters(c):
    """The number of parameters of a configuration's model."""
    return sum(p.numel() for p in meta_model(c).parameters())


def used_parameters(model):
    """The number of a model's parameters that one token uses: without the experts that are not
    chosen, and without the n-grams that are not there."""
    count = sum(p.numel() for p in model.parameters())
    return count - sum(part.unused() for part in model.modules() if isinstance(part, Part))


def active_parameters(c):
    """As used_parameters, of a configuration."""
    return used_parameters(meta_model(c))


def flops_per_token(c, T):
    """FLOPs of one token's forward pass in a context of T, a multiply-add being 2, as torch's
    counter has them: matrices and mixers, not norms and activations. A matrix of n weights: 2n."""
    model = meta_model(c)
    matrices = [module.weight for module in model.modules() if isinstance(module, Linear)]
    flops = 2 * sum(matrix.numel() for matrix in matrices)
    flops += sum(conv.flops(T) for conv in short_convs(model))
    for block in model.blocks:
        flops += block.attn.flops(T) + block.mlp.flops(T) + block.residual.flops(T)
        if "scores" in block.attn.acted_on:
            flops += model.wpe.flops(T)
    return flops


def training_flops_per_token(c, T):
    """Three times the forward pass: backward multiplies twice, for inputs and for weights."""
    return 3 * flops_per_token(c, T)


def kv_bytes(c, T):
    """Bytes of keys and values, or of other states, after T tokens of one sequence, in float32."""
    model = meta_model(c)
    held = model.embed.held(T)
    held += sum(conv.held(T) for conv in short_convs(model))
    return 4 * (held + sum(block.attn.held(T) for block in model.blocks))


def kv_bytes_per_token(c):
    """Bytes per token of a full context: fewer with windows and with states of a fixed size."""
    return kv_bytes(c, c.block_size) / c.block_size


def match(c, base, what="params"):
    """(mlp_width, residual in percent): the width of the MLP at which c costs as much as base.

    what: "params", the parameters that a token uses; "flops", of a full context; or "none": the
    width as it is, and the difference in parameters. The width is a multiple of 8, or of 1 where 8
    is too coarse for 0.5 %. Raises ValueError where no sensible width does it.
    """

    def cost(c):
        return flops_per_token(c, base.block_size) if what == "flops" else active_parameters(c)

    def at(width):
        return cost(replace(c, mlp_width=width))

    def residual(width):
        return 100 * (at(width) / cost(base) - 1)

    if what == "none":
        return mlp_width(c), residual(mlp_width(c))
    # Both costs are straight lines in the width: two points give where the line meets the base.
    if at(1) == at(2):
        raise ValueError(f"mlp={c.mlp}: no MLP width could match the base")
    exact = 1 + (cost(base) - at(1)) / (at(2) - at(1))
    for step in (8, 1):
        width = max(step, step * round(exact / step))
        if abs(residual(width)) <= 0.5 and width <= 8 * mlp_width(base):
            return width, residual(width)
    raise ValueError(
        f"no MLP width matches the base in {what} (it would be {exact:.0f}, the base has "
        f"{mlp_width(base)})"
    )


# ---------------------------------------------------------------- the catalogue

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
    table: bool = False  # print the slots and their words as a table; other keys do not count
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


def needed(key, word, base):
    """The change to the base that a word needs: position=none for a mixer that has no place for the
    position of the base, block=parallel for mlp=none, position=rope for rope_scaling."""
    if (key, word) == ("mlp", "none"):
        return {"block": "parallel"}
    if key == "mixer" and POSITION[base.position].acts_on not in (None, *MIXER[word].acted_on):
        return {"position": "none"}
    if key in without_effect(asdict(base)):
        slot, first = readers()[key][0]
        return {slot: first}
    return {}


def catalogue(values):
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
    step = SimpleNamespace(**asdict(a))
    for key, old, new in differences(a, b):
        before = summary(step)
        setattr(step, key, new)
        added = [f"{y - x:+,.0f}" for x, y in zip(before, summary(step), strict=True)]
        print(line(key, str(old), str(new), *added))
    for word, c in zip(pair, (a, b), strict=True):
        n_params, flops, kv = summary(c)
        print(f"{word:<54}{n_params:>16,.0f}{flops:>16,.0f}{kv:>14,.0f}")


def table():
    """The slots and their words as a Markdown table; each other key stands at the slot that reads
    it."""
    read_by = readers()
    lines = ["| slot | words | further keys |", "|---|---|---|"]
    for slot, words in SLOTS.items():
        own = [f"`{key}`" for key in read_by if read_by[key][0][0] == slot and key not in SLOTS]
        lines.append(f"| `{slot}` | `{' '.join(words)}` | {', '.join(own)} |")
    rest = [f"`{key}`" for key in keys(VariantConfig) if key not in {*SIZES, *SLOTS, *read_by}]
    lines.append(f"| other keys | {', '.join(rest)} | |")
    lines.append(f"| `arch` | `{' '.join(ARCH)}` | |")
    return "\n".join(lines)


def main(argv):
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
