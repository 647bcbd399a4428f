"""
The catalogue of parts: every word of every slot, what it costs and where it comes from.

    python -m parts.catalogue                                  # on LLaMA's other slots, at Shakespeare's size
    python -m parts.catalogue --model=gpt2 --n_layer=12 --n_head=12 --n_embd=768 --block_size=1024 --vocab_size=50257
    python -m parts.catalogue --diff=gpt2,llama                # what changes from one named architecture to another
"""

import inspect
import re
import textwrap
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Literal

from common.configurator import allowed, build, keys, load
from common.errors import UserError, run
from parts import attention, mlp, norm, position, variant
from parts.architectures import ARCH, CORNERS, OWNER, choose
from parts.costs import flops_per_token, kv_bytes_per_token, parameters
from parts.variant import VariantConfig

WIDTH = 100  # columns
SLOTS = {
    key: allowed(kind)[1] for key, kind in keys(VariantConfig).items() if allowed(kind)[1]
}  # {slot: words}


@dataclass
class CatalogueConfig:
    model: Literal[*CORNERS] = "llama"  # the base: what fills the other slots
    diff: str | None = None  # two named architectures to compare instead, as in gpt2,llama
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384  # width of the model
    block_size: int = 256  # context length, tokens
    vocab_size: int = 65


def numbers(c):
    """{key: the values to show on a base c} of what is no word."""
    part, heads = max(1, c.block_size // 4), [n for n in range(1, c.n_head) if c.n_head % n == 0]
    return {
        "n_kv_head": heads,
        "window": [part],
        "block_local": [part],
        "attn_softcap": [50.0],
        "logit_softcap": [30.0],
        "low_rank": [max(1, c.n_embd // 4)],
        "tie_embeddings": [not c.tie_embeddings],
        "embed_norm": [not c.embed_norm],
    }


def papers(text):
    """The parentheses of a text that hold an arXiv id or a year, else those that begin with a name."""
    text = " ".join((text or "").split())
    return re.findall(r"\(([^()]*(?:arXiv:|\b20\d\d\b)[^()]*)\)", text) or re.findall(
        r"\(([A-Z][^()]*)\)", text
    )


def paper(slot, word):
    """The paper of a word, from the comment beside it in its dictionary, else from the docstring of its part."""
    module = {"position": position, "rope_scaling": position, "norm": norm, "mlp": mlp}.get(
        slot, variant
    )
    part = vars(module).get(slot.upper(), {}).get(word)
    if part:
        comment = re.search(rf"^    {word}=.*#(.*)", inspect.getsource(module), re.MULTILINE)
        made = getattr(
            part, "func", part
        )  # a partial is described by its class, and a lambda by what it makes
        found = papers(comment and comment[1]) or papers(
            made.__doc__ or type(made(8, VariantConfig())).__doc__
        )
        return found[0] if found else ""
    # A number of attention: its clause in that docstring, else the comment at its field. Words stand there in order.
    clause = re.search(
        rf"\b{slot}: (.*?)(?=\b\w+: |$)", " ".join(attention.Attention.__doc__.split())
    )
    comment = re.search(rf"^    {slot}: .*#(.*)", inspect.getsource(VariantConfig), re.MULTILINE)
    found = papers(clause and clause[1]) or papers(comment and comment[1])
    place = SLOTS[slot].index(word) - 1 if slot in SLOTS else 0  # "none" comes first and has none
    return found[place] if 0 <= place < len(found) else ""


def make(values):
    return build(VariantConfig, choose({"arch": values["model"]} | values)[2])


def costs(c):
    return parameters(c), flops_per_token(c, c.block_size), kv_bytes_per_token(c)


def row(word, c, base, note):
    count, flops, kv = costs(c)
    left = f"  {word:<15}{count:>14,}{100 * (count / parameters(base) - 1):>+7.1f}%{flops / 1e6:>9,.1f}{kv:>9,.0f}  "
    while len(left + note) > WIDTH and "arXiv:" in note.partition(", ")[2]:
        note = note.partition(", ")[2]
    return left + textwrap.shorten(note, WIDTH - len(left), placeholder=" …")


def catalogue(values):
    base = make(values)
    print(
        f"{values['model']}: {base.n_layer} layers, {base.n_head} heads, {base.n_embd} wide, context {base.block_size}, "
        f"vocabulary {base.vocab_size}; one slot changed at a time\n"
    )
    print(
        "slot, word           parameters           MFLOP KV bytes  paper\n"
        + " " * 39
        + "per token of a full context, float32"
    )
    for slot, words in (SLOTS | numbers(base)).items():
        print(slot)
        owner, users = OWNER.get(
            slot, (slot, ())
        )  # a slot that belongs to a part is shown with that part
        needed = {owner: users[0]} if users and getattr(base, owner) not in users else {}
        for word in words:
            try:
                c = make(values | needed | {slot: word})
                print(
                    row(
                        f"{word}{' *' if getattr(base, slot) == word else ''}",
                        c,
                        base,
                        paper(slot, word),
                    )
                )
            except UserError as refused:
                print(
                    f"  {word:<15}"
                    + textwrap.shorten(f"refused: {refused}", WIDTH - 17, placeholder=" …")
                )
    print(f"* the base\n\n{'named architectures':<59}what changes")
    for word in ARCH:
        c = make(values | {"arch": word})
        print(row(word, c, base, " ".join(key for key, *_ in changes(base, c))))


def changes(a, b):
    """[(key, value in a, value in b)] where two configurations differ."""
    return [
        (key, value, getattr(b, key))
        for key, value in asdict(a).items()
        if value != getattr(b, key)
    ]


def difference(values, pair):
    """Slot by slot from one architecture to the other: what each change, after those above it, adds."""
    a, b = (make(values | {"arch": word}) for word in pair)
    line = "{:<20}{:>15} -> {:<15}{:>16}{:>16}{:>14}".format
    print(line("slot", *pair, "parameters", "FLOP / token", "KV B / token"))
    step = SimpleNamespace(**asdict(a))
    for key, old, new in changes(a, b):
        before, _ = costs(step), setattr(step, key, new)
        print(
            line(
                key,
                *(f"{value:g}" if type(value) is float else str(value) for value in (old, new)),
                *(f"{y - x:+,.0f}" for x, y in zip(before, costs(step))),
            )
        )
    for word, c in zip(pair, (a, b)):
        print(f"{word:<54}{{:>16,.0f}}{{:>16,.0f}}{{:>14,.0f}}".format(*costs(c)))


def main(argv):
    given, words = load(argv, [CatalogueConfig], __doc__)
    config = asdict(build(CatalogueConfig, given))
    diff = config.pop("diff")
    wrong = next(
        (f"{key}={value}" for key, value in config.items() if type(value) is int and value < 1),
        None,
    )
    if words or wrong:
        raise UserError(
            f"cannot use {wrong or words[0]}",
            "command line",
            "give 1 or more" if wrong else "write --key=value",
        )
    pair = diff and diff.split(",")
    if pair and (len(pair) != 2 or not set(pair) <= set(ARCH)):
        raise UserError(
            "two named architectures are needed", f"diff={diff}", "choose from " + ", ".join(ARCH)
        )
    return difference(config, pair) if pair else catalogue(config)


if __name__ == "__main__":
    run(main)
