"""
Draw the pictures of docs/gallery.md, and write the page:

    python bench/gallery.py
    python bench/gallery.py --gpt2=RUN --llama=RUN

RUN is a run folder of train.py. The second command also draws what the heads of these two models
look at; without it, the pictures of them that are there stay. Each picture is drawn from numbers
that the model's own code computes, by a function whose docstring is the picture's text on the page.

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
NARROW = "-narrow"  # ends the name of a picture for narrow screens
RAW = {"interpolation": "none"}  # the cells themselves


# --- positions


@styled
def rope():
    """RoPE turns each pair of features of a query or key by an angle that grows with the token's
    position, from purple to yellow, fast in the first pairs and slowly in the last. The product of
    a turned query and a turned key then depends on their distance alone, so that each diagonal of
    the square has one shade of blue."""
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
    """ALiBi subtracts from each score the distance to the key times a slope, which differs from
    head to head. Where all keys fit a query equally well, the steepest head, in purple, then looks
    at the last few tokens, and the flattest, in yellow, at all of them."""
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


# --- what a token may see

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
    """One function makes every mask from positions: a row is a token, and the blue cells of its row
    are the tokens that it sees. While sampling, only the new tokens have rows, and in a batch of
    texts of several lengths no token sees the padding before its text."""
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


# --- attention maps


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


# --- the page

PICTURES = {  # name of the files: (title, function that draws it)
    "rope": ("How RoPE turns queries and keys", rope),
    "alibi": ("ALiBi's slopes", alibi),
    "masks": ("What a token may see", masks),
}
MAPS = {  # a model of two: (title, explanation)
    "gpt2": (
        "What the heads of a trained GPT-2 look at",
        "A panel is a head, a row of it a token, and the darker the blue of a cell, the more of "
        "that earlier token the head takes; the weights of a row sum to 1. The number says how "
        "many tokens back a head looks on average: one that always looks at the token before would "
        "have nearly 1.",
    ),
    "llama": (
        "What the heads of a trained LLaMA look at",
        "The same prompt in the model whose queries and keys are turned by their positions. A line "
        "beside the diagonal is a head that has learned a fixed distance; a column that many rows "
        "share is a token that gets the weight which a head has no use for.",
    ),
}
INTRO = """# A gallery that explains

Each picture is drawn from the numbers of the model's own code, by `bench/gallery.py`. The first
command draws all but the attention maps, for which the second needs two trained models:
```sh
python bench/gallery.py
python bench/gallery.py --gpt2=out-gpt2-shakespeare --llama=out-llama-shakespeare
```
"""


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


def page(folder):
    """docs/gallery.md: the pictures that are in the folder, each with its explanation. A narrow
    screen gets the narrow picture where there is one."""
    texts = {name: (title, draw.__doc__) for name, (title, draw) in PICTURES.items()}
    texts |= {f"attention-{word}": text for word, text in MAPS.items()}
    sections = [INTRO]
    for name, (title, text) in texts.items():
        if (folder / f"{name}.png").is_file():
            picture = f"![{title}](gallery/{name}.png)"
            if (folder / f"{name}{NARROW}.png").is_file():
                narrow = f'<source media="(max-width: 600px)" srcset="gallery/{name}{NARROW}.png">'
                wide = f'<img src="gallery/{name}.png" alt="{title}">'
                picture = f"<picture>\n{narrow}\n{wide}\n</picture>"
            sections.append(f"## {title}\n\n{' '.join(text.split())}\n\n{picture}\n")
    return "\n".join(sections)


def draw_all(config, folder):
    """Draw the pictures into the folder, and write the page beside it."""
    runs = {word: getattr(config, word) for word in MAPS}
    figures = {  # the runs first: a mistake in the command shows before anything is written
        f"attention-{word}{suffix}": map_of(word, out_dir, config.prompt, across)
        for word, out_dir in runs.items()
        for suffix, across in (("", None), (NARROW, 2))
        if out_dir
    }
    figures |= {name: draw() for name, (_, draw) in PICTURES.items()}

    folder.mkdir(exist_ok=True)
    for name, figure in figures.items():
        (folder / f"{name}.png").write_bytes(saved(figure, "png", dpi=DPI))
        print(f"{folder / name}.png")
    files.write(folder.with_suffix(".md"), page(folder))


def main(argv):
    values, words = load(argv, [GalleryConfig], __doc__)
    if words:
        raise UserError(f"{words[0]} is not a key", "command line", "write --gpt2=RUN --llama=RUN")
    draw_all(build(GalleryConfig, values), FOLDER)


if __name__ == "__main__":
    run(main)
