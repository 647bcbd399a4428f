"""
The catalogue of parts: every word of every slot, what it costs and where it comes from.

    python -m parts.catalogue                        # on LLaMA's other slots, at Shakespeare's size
    python -m parts.catalogue --model=gpt2 --n_layer=12 --n_head=12 --n_embd=768 --block_size=1024
    python -m parts.catalogue --diff=gpt2,llama      # the steps between two named architectures
    python -m parts.catalogue --table                # slots and words as a table for the README
"""

import textwrap
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Literal

from common.configurator import PositiveInt, allowed, build, keys, load
from common.errors import UserError, run
from parts.architectures import ARCH, CORNERS, configure, owners
from parts.costs import active_parameters, flops_per_token, kv_bytes_per_token, parameters
from parts.mixer import MIXER
from parts.position import POSITION
from parts.variant import SLOTS, VariantConfig

WIDTH = 100  # columns
# The papers of what is no part of its own: {key: {word: paper}}, or {key: paper}.
PAPERS = {
    "qk_norm": {"head": "Qwen 3, arXiv:2505.09388", "full": "OLMo 2, arXiv:2501.00656"},
    "n_kv_head": "Ainslie et al. 2023, arXiv:2305.13245",
    "window": "Jiang et al. 2023, arXiv:2310.06825",
    "attn_softcap": "Gemma 2, arXiv:2408.00118",
    "logit_softcap": "Gemma 2, arXiv:2408.00118",
    "embed_norm": "BLOOM, arXiv:2211.05100",
    "attn_gate": dict.fromkeys(("head", "element"), "Qiu et al. 2025, arXiv:2505.06708"),
    "attn_sink": "gpt-oss, arXiv:2508.10925",
    "nope_every": "Yang et al. 2025, arXiv:2501.18795",
    "value_residual": "Zhou et al. 2024, arXiv:2410.17897",
    "value_embed": "nanochat, Karpathy 2025",
    "xsa": "arXiv:2603.09078",
    "conv": "Allen-Zhu 2025, arXiv:2512.17351",
    "moe_balance": {
        "loss": "Switch, arXiv:2101.03961",
        "bias": "DeepSeek, arXiv:2408.15664",
    },
}


@dataclass
class CatalogueConfig:
    model: Literal[*CORNERS] = "llama"  # the base: what fills the other slots
    diff: str | None = None  # two named architectures to compare instead, as in gpt2,llama
    table: bool = False  # print the slots and their words as a table instead
    n_layer: PositiveInt = 6
    n_head: PositiveInt = 6
    n_embd: PositiveInt = 384  # width of the model
    block_size: PositiveInt = 256  # context length, tokens
    vocab_size: PositiveInt = 65


def choices():
    """{key: its words} of all keys whose value is a word."""
    words = {key: allowed(kind)[1] for key, kind in keys(VariantConfig).items()}
    return {key: found for key, found in words.items() if found}


def numbers(c):
    """{key: the values to show on a base c} of the keys whose value is a number or a switch."""
    quarter = max(1, c.block_size // 4)
    return {
        "n_kv_head": [n for n in range(1, c.n_head) if c.n_head % n == 0],
        "window": [quarter],
        "block_local": [quarter],
        "attn_softcap": [50.0],
        "logit_softcap": [30.0],
        "low_rank": [max(1, c.n_embd // 4)],
        "tie_embeddings": [not c.tie_embeddings],
        "embed_norm": [not c.embed_norm],
        "attn_sink": [True],
        "nope_every": [4],
        "value_residual": [True],
        "value_embed": [True],
        "xsa": [True],
        "conv": [4],
    }


def paper(key, word):
    """Where the value `word` of a key comes from; "" where nobody needs to be named."""
    if key in SLOTS:
        return SLOTS[key][word].paper
    found = PAPERS.get(key, "")
    return found.get(word, "") if isinstance(found, dict) else found


# ---------------------------------------------------------------- every word


def costs(c):
    return parameters(c), flops_per_token(c, c.block_size), kv_bytes_per_token(c)


def row(word, c, base, note):
    """One line: a word, the costs of the configuration c with it, and a note."""
    total, flops, kv = costs(c)
    percent = 100 * (total / parameters(base) - 1)
    if active_parameters(c) != total:
        note = f"{active_parameters(c) / 1e6:.1f} M active; {note}"
    left = f"  {word:<15}{total:>14,}{percent:>+7.1f}%{flops / 1e6:>9,.1f}{kv:>9,.0f}  "
    return left + textwrap.shorten(note, WIDTH - len(left), placeholder=" …")


def needed(key, word, base):
    """The change to the base without which a key means nothing, such as position=rope, or without
    which a word cannot be used: position=none for a mixer that has no place for those of the base,
    block=parallel for mlp=none."""
    if (key, word) == ("mlp", "none"):
        return {"block": "parallel"}
    if key == "mixer" and POSITION[base.position].acts_on not in (None, *MIXER[word].acted_on):
        return {"position": "none"}
    slot, words = owners().get(key, (None, ()))
    if slot is None or set(getattr(base, slot).split(",")) & set(words):
        return {}
    return {slot: words[0]}


def catalogue(values):
    values = values | {"arch": values["model"]}
    base = configure(values)
    print(
        f"{values['model']}: {base.n_layer} layers, {base.n_head} heads, {base.n_embd} wide, "
        f"context {base.block_size}, vocabulary {base.vocab_size}; one slot changed at a time\n"
    )
    print("slot, word           parameters           MFLOP KV bytes  paper")
    print(" " * 39 + "per token of a full context, float32")
    for key, words in (choices() | numbers(base)).items():
        print(key)
        for word in words:
            name = f"{word} *" if getattr(base, key) == word else f"{word}"
            more = needed(key, word, base)
            try:
                c = configure(values | more | {key: word})
            except UserError as refused:
                why = textwrap.shorten(f"refused: {refused}", WIDTH - 17, placeholder=" …")
                print(f"  {name:<15}{why}")
            else:
                beside = [f"with {other}={value}" for other, value in more.items()]
                print(row(name, c, base, ", ".join(filter(None, [paper(key, word), *beside]))))

    print(f"* the base\n\n{'named architectures':<59}what changes")
    for word in ARCH:
        c = configure(values | {"arch": word})
        print(row(word, c, base, " ".join(key for key, *_ in changes(base, c))))


# ---------------------------------------------------------------- two architectures


def changes(a, b):
    """[(key, value in a, value in b)] where two configurations differ."""
    a, b = asdict(a), asdict(b)
    return [(key, a[key], b[key]) for key in a if a[key] != b[key]]


def shown(value):
    return f"{value:g}" if isinstance(value, float) else str(value)


def difference(values, pair):
    """Print the changes that lead from one architecture to the other, and what each adds to those
    above it."""
    a, b = (configure(values | {"arch": word}) for word in pair)
    line = "{:<20}{:>15} -> {:<15}{:>16}{:>16}{:>14}".format
    print(line("slot", *pair, "parameters", "FLOP / token", "KV B / token"))
    step = SimpleNamespace(**asdict(a))
    for key, old, new in changes(a, b):
        before = costs(step)
        setattr(step, key, new)
        added = [f"{y - x:+,.0f}" for x, y in zip(before, costs(step), strict=True)]
        print(line(key, shown(old), shown(new), *added))
    for word, c in zip(pair, (a, b), strict=True):
        total, flops, kv = costs(c)
        print(f"{word:<54}{total:>16,.0f}{flops:>16,.0f}{kv:>14,.0f}")


# ---------------------------------------------------------------- the README's table


def table():
    """The slots and their words as a Markdown table; the other keys stand at what reads them."""
    readers = owners()
    lines = ["| slot | words | further keys |", "|---|---|---|"]
    for slot, words in SLOTS.items():
        own = [f"`{key}`" for key, (owner, _) in readers.items() if owner == slot]
        own = [key for key in own if key.strip("`") not in SLOTS]
        lines.append(f"| `{slot}` | `{' '.join(words)}` | {', '.join(own)} |")

    elsewhere = {*SLOTS, *readers}
    rest = [key for key in [*choices(), *numbers(VariantConfig())] if key not in elsewhere]
    lines.append(f"| other keys | {', '.join(f'`{key}`' for key in [*rest, 'mlp_width'])} | |")
    lines.append(f"| `arch` | `{' '.join(ARCH)}` | |")
    return "\n".join(lines)


def main(argv):
    given, words = load(argv, [CatalogueConfig], __doc__)
    config = asdict(build(CatalogueConfig, given))
    diff, wants_table = config.pop("diff"), config.pop("table")
    if words:
        raise UserError(f"cannot use {words[0]}", "command line", "write --key=value")
    if wants_table:
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
