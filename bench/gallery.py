"""
Draw the pictures of docs/gallery.md:

    python bench/gallery.py
    python bench/gallery.py --gpt2=RUN --llama=RUN

RUN is a run folder of train.py. The second command also draws what the heads of these two models
look at; without it, the pictures of them that are there stay. Each picture is drawn from numbers
that the model's own code computes; the page explains it.

Shapes: T tokens, H heads, D the size of a head.
"""

from dataclasses import dataclass
from fractions import Fraction

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

from bench.ablation.figures import FAINT, MUTED, STYLE, saved
from common import files
from common.configurator import build, load
from common.errors import UserError, run
from model_llama import rotary, rotate
from parts.cache import KVCache, visible
from parts.position import Alibi
from parts.variant import VariantConfig
from sampling.attention_map import attention_weights, check_layer, panel, read
from weights.checkpoint import open_run

FOLDER = files.ROOT / "docs/gallery"
styled = matplotlib.rc_context(STYLE)
WIDTH = 5.2  # inches of a picture: its letters are read on a phone, too
DPI = 120
RAW = {"interpolation": "none"}  # the cells themselves


@styled
def rope():
    """Draw how RoPE turns pairs of features, and what that makes of a query times a key."""
    T, D, pairs = 24, 16, (0, 2, 4)
    cos, sin = rotary(torch.arange(T)[None], 10000.0, D)  # (1, 1, T, D/2)
    unit = torch.cat((torch.ones(D // 2), torch.zeros(D // 2)))  # each pair is (1, 0)
    turned = rotate(unit.expand(1, 1, T, D), cos, sin)[0, 0]  # (T, D)
    same = rotate(torch.ones(1, 1, T, D), cos, sin)[0, 0]  # one query and key, at all positions

    figure = Figure(figsize=(WIDTH, 6.4))
    *circles, last = figure.subplots(2, 2).flat
    for axes, pair in zip(circles, pairs, strict=True):
        axes.add_patch(Circle((0, 0), 1, fill=False, edgecolor=FAINT, linewidth=1))
        places = turned[:, pair], turned[:, pair + D // 2]
        dots = axes.scatter(*places, c=range(T), cmap="viridis", s=22, zorder=2)
        axes.set(title=f"pair {pair} of {D // 2}", xlim=(-1.25, 1.25), ylim=(-1.25, 1.25))
        axes.set(aspect="equal", xticks=(-1, 0, 1), yticks=(-1, 0, 1))

    image = last.imshow((same @ same.T).numpy(), cmap="Blues", **RAW)
    last.set(title="query times key", xlabel="position of the key", ylabel="position of the query")
    last.grid(False)
    for drawn, name in ((image, "query times key"), (dots, "position of the token")):
        figure.colorbar(drawn, ax=[*circles, last], location="bottom", aspect=50, label=name)
    return figure


@styled
def alibi():
    """Draw what ALiBi adds to the scores of each head, and the weights that follow."""
    H, T = 8, 48
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
    for layer in range(len(model.blocks)):
        check_layer(model, layer)
    idx, labels = read(model, tokenizer, prompt)
    layers = [attention_weights(model, idx, layer) for layer in range(len(model.blocks))]
    H, T = layers[0].shape[:2]
    across = across or H
    down = -(-H * len(layers) // across)
    back = torch.arange(T)[:, None] - torch.arange(T)  # (T, T) tokens from query to key

    figure = Figure(figsize=(2.5 * across + 0.2, 2.6 * down + 0.9))
    for i, seen in enumerate(torch.cat(layers)):  # (T, T) of a head
        axes = figure.add_subplot(down, across, i + 1)
        image = panel(axes, seen, labels, min(8, 150 / T))
        mean = (seen * back).sum(-1).mean()
        axes.set_title(f"{i // H}.{i % H}: {mean:.1f} back", fontsize=9)
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
    gpt2: str = ""  # the run folder of a GPT-2; empty: its attention is not drawn
    llama: str = ""  # the run folder of a LLaMA
    prompt: str = "To be, or not to be"  # over which their attention is drawn


def map_of(word, out_dir, prompt, across=None):
    """The Figure of the attention in the run at `out_dir`. Raises UserError if its model is not
    that of `word`, or cannot read the prompt."""
    model, tokenizer, trained, state = open_run(out_dir)
    if trained["model"] != word:
        what = f"this is a run of {trained['model']}"
        raise UserError(what, f"{word}={out_dir}", f"give a run of train.py --model={word}")
    title = f"{word} after {state['step']} steps on {trained['dataset']}: layer.head"
    return attention(model, tokenizer, prompt, title, across)


def draw_all(config, folder):
    """Draw the pictures into the folder; of attention a wide one, and one for narrow screens."""
    runs = {"gpt2": config.gpt2, "llama": config.llama}
    figures = {  # the runs first: a mistake in the command shows before anything is written
        f"attention-{word}{suffix}": map_of(word, out_dir, config.prompt, across)
        for word, out_dir in runs.items()
        for suffix, across in (("", None), ("-narrow", 2))
        if out_dir
    }
    figures |= {name: draw() for name, draw in PICTURES.items()}

    folder.mkdir(exist_ok=True)
    for name, figure in figures.items():
        (folder / f"{name}.png").write_bytes(saved(figure, "png", dpi=DPI))
        print(f"{folder / name}.png")


def main(argv):
    given = load(argv, [GalleryConfig], __doc__)
    if given.words:
        raise UserError(
            f"{given.words[0]} is not a key", "command line", "write --gpt2=RUN --llama=RUN"
        )
    draw_all(build(GalleryConfig, given.values), FOLDER)


if __name__ == "__main__":
    run(main)
