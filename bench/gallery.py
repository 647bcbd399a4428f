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

from bench.ablation.figures import FAINT, MUTED, STYLE
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
RAW = {"interpolation": "none"}  # the cells themselves


# --- positions


@styled
def rope():
    """RoPE turns each pair of features of a query or key by an angle that grows with the token's
    position, fast in the first pairs and slowly in the last. The product of a turned query and a
    turned key then depends on their distance alone, so that each diagonal on the right has one
    colour."""
    T, D, pairs = 24, 16, (0, 2, 5)
    cos, sin = rotary(torch.arange(T)[None], 10000.0, D)  # (1, 1, T, D/2)
    unit = torch.cat((torch.ones(D // 2), torch.zeros(D // 2)))  # each pair is (1, 0)
    turned = rotate(unit.expand(1, 1, T, D), cos, sin)[0, 0]  # (T, D)
    same = rotate(torch.ones(1, 1, T, D), cos, sin)[0, 0]  # one query and key, at all positions

    figure = Figure(figsize=(10, 2.7))
    *circles, last = figure.subplots(1, len(pairs) + 1)
    for axes, pair in zip(circles, pairs, strict=True):
        axes.add_patch(Circle((0, 0), 1, fill=False, edgecolor=FAINT, linewidth=1))
        places = turned[:, pair], turned[:, pair + D // 2]
        dots = axes.scatter(*places, c=range(T), cmap="viridis", s=22, zorder=2)
        axes.set(title=f"pair {pair} of {D // 2}", xlim=(-1.25, 1.25), ylim=(-1.25, 1.25))
        axes.set(aspect="equal", xticks=(-1, 0, 1), yticks=(-1, 0, 1))
    figure.colorbar(dots, ax=circles, label="position of the token", aspect=30)

    image = last.imshow((same @ same.T).numpy(), cmap="Blues", **RAW)
    last.set(title="query times key", xlabel="position of the key", ylabel="of the query")
    last.grid(False)
    figure.colorbar(image, ax=last)
    return figure


@styled
def alibi():
    """ALiBi subtracts from each score the distance to the key times a slope, which differs from
    head to head. Where all keys fit a query equally well, the steepest head then looks at the last
    few tokens, and the flattest at all of them."""
    H, T = 8, 48
    pos = torch.arange(T)[None]
    scheme = Alibi(VariantConfig(n_head=H, n_embd=H, position="alibi"))
    bias = scheme.bias(torch.zeros(1, H, 1, 1), pos[:, -1:], pos)[0, :, 0]  # (H, T), a query's

    figure = Figure(figsize=(8.4, 3.2))
    left, right = figure.subplots(1, 2)
    colors = matplotlib.colormaps["viridis"](torch.linspace(0, 0.9, H).numpy())
    for slope, added, color in zip(scheme.slopes.tolist(), bias, colors, strict=True):
        name = str(Fraction(slope).limit_denominator(1 << H))
        left.plot(pos[0].flip(0), added, color=color)
        right.plot(pos[0].flip(0), added.softmax(-1), color=color, label=name)
    left.set(ylabel="added to the score", ylim=(-8, 0.3))
    right.set(ylabel="weight, if all keys fit equally", xlim=(-0.5, 24))
    for axes in (left, right):
        axes.set(xlabel="distance to the key, tokens")
    right.legend(title="slope of the head", ncols=2)
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
    """What `new` tokens see when `read` tokens are in the cache, (new, all). The first `pad` of the
    new ones are padding, and have no row."""
    cache = KVCache(torch.tensor([pad]) if pad else None)
    for n in (read, new):
        if n:
            cache.advance(torch.zeros(1, n, dtype=torch.long))
    return cache.mask[0, 0, pad:]


@styled
def masks():
    """One function makes every mask from positions: a row is a token, and the blue cells of its row
    are the tokens that it sees. While sampling, only the new tokens have rows, and in a batch of
    texts of several lengths no token sees the padding before its text."""
    T = 16
    drawn = {title: mask(keys, T) for title, keys in MASKS.items()}
    drawn["6 new tokens, 10 in the cache"] = cached_mask(10, 6)
    drawn["10 tokens after 6 of padding"] = cached_mask(0, T, pad=6)

    figure = Figure(figsize=(9, 6.2))
    for place, (title, seen) in enumerate(drawn.items(), 1):
        axes = figure.add_subplot(2, 3, place)
        first = T - len(seen) - 0.5
        extent = (-0.5, T - 0.5, T - 0.5, first)
        axes.imshow(seen.numpy(), cmap="Blues", vmin=0, vmax=1.3, extent=extent, **RAW)
        axes.set(title=title, xlabel="the token that it sees", ylabel="the token that looks")
        axes.set(xticks=range(0, T, 5), yticks=range(-(-(T - len(seen)) // 5) * 5, T, 5))
        axes.grid(False)
        for line in torch.arange(0.5, T - 1).tolist():
            axes.axvline(line, color="white", linewidth=0.5)
            if line > first:
                axes.axhline(line, color="white", linewidth=0.5)
    return figure


# --- attention maps


@styled
def attention(model, tokenizer, prompt, title):
    """Draw the attention of all heads of all layers over a prompt. Raises UserError if a layer has
    none to draw."""
    for layer in range(len(model.blocks)):
        check_layer(model, layer)
    idx, labels = read(model, tokenizer, prompt)
    layers = [attention_weights(model, idx, layer) for layer in range(len(model.blocks))]
    H, T = layers[0].shape[:2]
    size = min(8, 130 / T)  # of a label, in points
    back = torch.arange(T)[:, None] - torch.arange(T)  # (T, T) tokens from query to key

    figure = Figure(figsize=(2.1 * H + 0.8, 2.2 * len(layers) + 0.5))
    panels = figure.subplots(len(layers), H, squeeze=False)
    for layer, (row, weights) in enumerate(zip(panels, layers, strict=True)):
        for head, (axes, seen) in enumerate(zip(row, weights, strict=True)):
            image = panel(axes, seen, labels, size)
            mean = (seen * back).sum(-1).mean()
            axes.set_title(f"{layer}.{head}: {mean:.1f} back", fontsize=9)
            axes.grid(False)
            if head:
                axes.set_yticks([])
            if layer < len(layers) - 1:
                axes.set_xticks([])
    figure.suptitle(title, fontsize=11)
    figure.supylabel("the token that attends", fontsize=9, color=MUTED)
    figure.supxlabel("the token it attends to", fontsize=9, color=MUTED)
    figure.colorbar(image, ax=panels, aspect=50, label="weight")
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
        "A panel is a head, a row of it a token, and the darker a cell, the more of that earlier "
        "token the head takes; the weights of a row sum to 1. The number says how many tokens back "
        "a head looks on average: one that always looks at the token before would have nearly 1.",
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


def map_of(word, out_dir, prompt):
    """The Figure of the attention in the run at `out_dir`. Raises UserError if its model is not
    that of `word`, or cannot read the prompt."""
    model, tokenizer, trained, state = open_run(out_dir)
    if trained["model"] != word:
        what = f"this is a run of {trained['model']}"
        raise UserError(what, f"{word}={out_dir}", f"give a run of train.py --model={word}")
    title = f"{word} after {state['step']} steps on {trained['dataset']}: layer.head"
    return attention(model, tokenizer, prompt, title)


def page(folder):
    """docs/gallery.md: the pictures that are in the folder, each with its explanation."""
    texts = {name: (title, draw.__doc__) for name, (title, draw) in PICTURES.items()}
    texts |= {f"attention-{word}": text for word, text in MAPS.items()}
    sections = [INTRO]
    for name, (title, text) in texts.items():
        if (folder / f"{name}.png").is_file():
            picture = f"![{title}](gallery/{name}.png)"
            sections.append(f"## {title}\n\n{' '.join(text.split())}\n\n{picture}\n")
    return "\n".join(sections)


def draw_all(config, folder):
    """Draw the pictures into the folder, and write the page beside it."""
    runs = {word: getattr(config, word) for word in MAPS}
    figures = {  # the runs first: a mistake in the command shows before anything is written
        f"attention-{word}": map_of(word, out_dir, config.prompt)
        for word, out_dir in runs.items()
        if out_dir
    }
    figures |= {name: draw() for name, (_, draw) in PICTURES.items()}

    folder.mkdir(exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})
        print(f"{folder / name}.png")
    files.write(folder.with_suffix(".md"), page(folder))
    for word, out_dir in runs.items():
        if not out_dir:
            make = f"python train.py config/{word}_shakespeare.py, then --{word}=its out_dir"
            print(f"attention-{word} is not drawn: {make}")


def main(argv):
    values, words = load(argv, [GalleryConfig], __doc__)
    if words:
        fix = "write --gpt2=RUN --llama=RUN"
        raise UserError(f"{words[0]} is not a key", "command line", fix)
    draw_all(build(GalleryConfig, values), FOLDER)


if __name__ == "__main__":
    run(main)
