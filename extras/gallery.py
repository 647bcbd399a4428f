"""python -m extras.gallery [--gpt2=RUN] [--llama=RUN]

Draw the pictures of docs/gallery.md. RUN is a run folder of train.py: the attention of its heads is
drawn too. Without a run, its earlier pictures stay. Each picture is drawn from numbers that the
model's own code computes; the page explains it.

Shapes: T tokens, H heads, D the size of a head.
"""

from dataclasses import dataclass
from fractions import Fraction

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.need(*early.ABLATE)
    early.start("extras.gallery")

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from bench.ablation.figures import FAINT, MUTED, STYLE, saved
from common.commands import ROOT
from common.configurator import PathName, build, load
from common.errors import UserError, run
from model_llama import rotary, rotate
from parts.cache import KVCache, visible
from parts.position import Alibi
from parts.variant import VariantConfig
from weights.checkpoint import open_run

FOLDER = ROOT / "docs/gallery"
styled = matplotlib.rc_context(STYLE)
WIDTH = 5.2  # inches of a picture: its letters are read on a phone, too
DPI = 120


@styled
def rope():
    """Draw how RoPE turns pairs of features, and what that makes of a query times a key."""
    T = 24
    D = 16
    pairs = (0, 2, 4)
    cos, sin = rotary(torch.arange(T)[None], 10000.0, D)  # (1, 1, T, D/2)
    unit = torch.cat((torch.ones(D // 2), torch.zeros(D // 2)))  # each pair is (1, 0)
    turned = rotate(unit.expand(1, 1, T, D), cos, sin)[0, 0]  # (T, D)
    same = rotate(torch.ones(1, 1, T, D), cos, sin)[0, 0]  # one query and key, at all positions

    figure = Figure(figsize=(WIDTH, 6.4))
    *circles, last = figure.subplots(2, 2).flat
    for axes, pair in zip(circles, pairs, strict=True):
        axes.add_patch(Circle((0, 0), 1, fill=False, edgecolor=FAINT, linewidth=1))
        x = turned[:, pair]
        y = turned[:, pair + D // 2]
        dots = axes.scatter(x, y, c=range(T), cmap="viridis", s=22, zorder=2)
        axes.set(title=f"pair {pair} of {D // 2}", xlim=(-1.25, 1.25), ylim=(-1.25, 1.25))
        axes.set(aspect="equal", xticks=(-1, 0, 1), yticks=(-1, 0, 1))

    image = last.imshow((same @ same.T).numpy(), cmap="Blues", interpolation="none")
    last.set(title="query times key", xlabel="position of the key", ylabel="position of the query")
    last.grid(False)
    bar = dict(ax=[*circles, last], location="bottom", aspect=50)
    figure.colorbar(image, label="query times key", **bar)
    figure.colorbar(dots, label="position of the token", **bar)
    return figure


@styled
def alibi():
    """Draw what ALiBi adds to the scores of each head, and the weights that follow."""
    H = 8
    T = 48
    pos = torch.arange(T)[None]
    scheme = Alibi(VariantConfig(n_head=H, n_embd=H, position="alibi"))
    bias = scheme.bias(torch.zeros(1, H, 1, 1), pos[:, -1:], pos)[0, :, 0]  # (H, T), a query's

    figure = Figure(figsize=(WIDTH, 5.6))
    upper, lower = figure.subplots(2, 1)
    colors = matplotlib.colormaps["viridis"](torch.linspace(0, 0.95, H).numpy())
    for slope, added, color in zip(scheme.slopes.tolist(), bias, colors, strict=True):
        name = str(Fraction(slope).limit_denominator(1 << H))
        upper.plot(pos[0].flip(0), added, color=color)
        lower.plot(pos[0].flip(0), added.softmax(-1), color=color, label=name)
    upper.set(ylabel="added to the score", ylim=(-8, 0.3))
    lower.set(ylabel="weight, if all keys fit equally", xlabel="distance to the key, tokens")
    lower.legend(title="slope of the head", ncols=2)
    return figure


MASKS = {  # title: keys of the model
    "attention": {},
    "--window=5": {"window": 5},
    "--block_local=5": {"block_local": 5},
}


def mask(keys, T):
    """What each of T tokens sees in a layer of attention with these keys, (T, T)."""
    pos = torch.arange(T)[None]
    return visible(pos, pos, keys.get("window", 0), keys.get("block_local", 0))[0, 0]


def cached_mask(read, new, pad=0):
    """What `new` tokens see when `read` tokens are in the cache, (new, all). The first `pad` of all
    are padding, and have no row."""
    cache = KVCache(torch.tensor([pad]) if pad else None)
    for n in (read, new):
        if n:
            cache.advance(torch.zeros(1, n, dtype=torch.long))
    return cache.mask[0, 0, max(0, pad - read) :]


@styled
def masks():
    """Draw what a token may see, in training and while sampling: a row is a token."""
    T = 16
    drawn = {title: mask(keys, T) for title, keys in MASKS.items()}
    drawn["10 new, 6 padding"] = cached_mask(0, T, pad=6)
    drawn["6 new, 10 cached"] = cached_mask(10, 6)
    drawn["6 new, 4 cached, 6 padding"] = cached_mask(10, 6, pad=6)

    figure = Figure(figsize=(WIDTH, 6.2))
    places = figure.subplots(3, 2, height_ratios=(16, 16, 6)).flat
    for axes, (title, seen) in zip(places, drawn.items(), strict=True):
        rows = range(T - len(seen), T)
        cells = dict(cmap="Blues", vmin=0, vmax=1.3, edgecolors="white", linewidth=0.5)
        axes.pcolormesh(range(T), rows, seen.numpy(), **cells)
        axes.set(aspect="equal", xticks=range(0, T, 5), yticks=[i for i in rows if i % 5 == 0])
        axes.set_title(title, fontsize=9)
        axes.invert_yaxis()
        axes.grid(False)
    figure.supylabel("position of the token that looks", fontsize=9, color=MUTED)
    figure.supxlabel("position of the token that it sees", fontsize=9, color=MUTED)
    return figure


@styled
def attention(model, tokenizer, prompt, title, across=None):
    """Draw the attention of all heads of all layers over a prompt, `across` heads in a row, or a
    layer in a row. Raises UserError if a layer has none to draw."""
    from extras import attention_map  # here: the other pictures do not need it

    layers = range(len(model.blocks))
    for layer in layers:
        attention_map.check_layer(model, layer)
    idx, labels = attention_map.prompt_of(model, tokenizer, prompt)
    weights = torch.stack([attention_map.attention_weights(model, idx, i) for i in layers])
    _, H, T, _ = weights.shape  # (layers, H, T, T)
    across = across or H
    down = -(-H * len(layers) // across)
    back = torch.arange(T)[:, None] - torch.arange(T)  # (T, T) tokens from query to key

    figure = Figure(figsize=(2.5 * across + 0.2, 2.6 * down + 0.9))
    for layer in layers:
        for head, seen in enumerate(weights[layer]):  # (T, T)
            axes = figure.add_subplot(down, across, layer * H + head + 1)
            image = attention_map.panel(axes, seen, labels, min(8, 150 / T))
            mean = (seen * back).sum(-1).mean()
            axes.set_title(f"{layer}.{head}: {mean:.1f} back", fontsize=9)
            axes.grid(False)
    figure.suptitle(title, fontsize=10)
    figure.supylabel("the token that attends", fontsize=9, color=MUTED)
    figure.supxlabel("the token it attends to", fontsize=9, color=MUTED)
    bar = dict(location="top", fraction=0.3 / down / 2.6, aspect=60, pad=0.1 / down)
    figure.colorbar(image, ax=figure.axes, label="weight", **bar)
    return figure


PICTURES = {"rope": rope, "alibi": alibi, "masks": masks}  # by the name of the file


@dataclass
class GalleryConfig:
    gpt2: PathName = ""  # the run folder of a GPT-2; empty: its attention is not drawn
    llama: PathName = ""  # the run folder of a LLaMA
    prompt: str = "To be, or not to be"  # over which their attention is drawn


def map_of(word, out_dir, prompt, across=None):
    """The Figure of the attention in the run at `out_dir`. Raises UserError if its model has
    another word than `word`, or cannot read the prompt."""
    model, tokenizer, trained, state = open_run(out_dir)
    if trained["model"] != word:
        what = f"this is a run of {trained['model']}"
        raise UserError(what, f"{word}={out_dir}", f"give a run of train.py --model={word}")
    title = f"{word} after {state['step']} steps on {trained['dataset']}: layer.head"
    return attention(model, tokenizer, prompt, title, across)


def draw_all(config, folder):
    """Draw the pictures into the folder. Attention is drawn twice, for wide and narrow screens."""
    figures = {}  # the runs first: a mistake in the command shows before anything is written
    for word in ("gpt2", "llama"):
        out_dir = getattr(config, word)
        if out_dir:
            figures[f"attention-{word}"] = map_of(word, out_dir, config.prompt)
            figures[f"attention-{word}-narrow"] = map_of(word, out_dir, config.prompt, across=2)
    for name, draw in PICTURES.items():
        figures[name] = draw()

    folder.mkdir(exist_ok=True)
    for name, figure in figures.items():
        (folder / f"{name}.png").write_bytes(saved(figure, "png", dpi=DPI))
        print(f"{folder / name}.png")


def read(argv):
    """The GalleryConfig of a command line."""
    given = load(argv, [GalleryConfig], __doc__)
    words = given.words
    if words:
        raise UserError(f"{words[0]} is not a key", "command line", "write --gpt2=RUN --llama=RUN")
    return build(GalleryConfig, given.values)


def main(argv):
    draw_all(read(argv), FOLDER)


if __name__ == "__main__":
    run(main)
