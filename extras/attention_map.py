"""
python -m extras.attention_map RUN --start="First Citizen:" [--layer=0] [--out=map.png]

Draw how much each token of a prompt attends to each earlier one, in every head of a layer. RUN is a
run folder, or pretrained weights as in sample.py --init_from. A file at OUT that this command did
not write is never replaced.

Attention is linear in its values: with unit vectors as values, its output is the weights. They are
therefore read from the model itself, with its positions, masks, caps and shared heads; no second
implementation computes them.
Shapes: T tokens, H heads, K heads of keys and values, D the size of a head.
"""

import io
import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from common import early
from common.errors import UserError, printable, run

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("extras.attention_map")

import torch
from torch.nn import functional as F

from common.configurator import NonNegativeInt, PathName, build, load
from common.files import write
from parts.attn_extra import Extra, ValueEmbed, ValueResidual
from parts.part import ShortConv
from sample import check_context, choose_device, open_weights
from sampling.fast import make_fast
from sampling.prompts import fit, note, read_prompts
from sampling.settings import DRAWN, NAMING, SampleConfig, refuse_idle

WRITER = "extras/attention_map.py"  # in our pictures: who drew them


@dataclass
class MapConfig:
    layer: NonNegativeInt = 0  # from 0
    out: PathName = "map.png"  # the picture


def has_map(attn):
    """Whether a mixer's output is a mean of the values that its matrix wv makes."""
    plain = hasattr(attn, "n_head") and hasattr(attn, "wv") and not getattr(attn, "normed", False)
    plain = plain and not isinstance(getattr(attn, "conv_v", None), ShortConv)
    return plain and not any(changes(extra) for extra in getattr(attn, "extras", {}).values())


def changes(extra):
    """Whether an addition to attention changes its values, scores or output in its layer."""
    if type(extra) is ValueResidual:
        return not extra.first
    if type(extra) is ValueEmbed:
        return extra.adds
    hooks = ("values", "scores", "output")
    return any(getattr(type(extra), hook) is not getattr(Extra, hook) for hook in hooks)


@torch.inference_mode()
def attention_weights(model, idx, layer):
    """The weights (H, T, T) with which each token of idx (1, T) attends to each other in a
    layer."""
    attn = model.blocks[layer].attn
    T = idx.size(1)
    H = attn.n_head
    K = getattr(attn, "n_kv_head", H)
    outputs = []  # (T, H, D) each, the output of the attention for D of the tokens

    def unit_vectors(module, inputs, v):  # values (1, T, K D) that are 1 for D tokens at a time
        D = v.size(-1) // K
        first = len(outputs) * D
        eye = torch.eye(T, device=v.device, dtype=v.dtype)[:, first : first + D]  # (T, D or less)
        return F.pad(eye, (0, D - eye.size(1))).repeat(1, K)[None]

    def keep(module, inputs):
        outputs.append(inputs[0].view(T, H, -1))

    hooks = [attn.wv.register_forward_hook(unit_vectors), attn.wo.register_forward_pre_hook(keep)]
    try:
        while sum(y.size(-1) for y in outputs) < T:
            model(idx, last_only=True)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(outputs, dim=-1)[..., :T].transpose(0, 1).float().cpu()


def panel(axes, weights, labels, size, step=1):
    """Draw the weights (T, T) of one head, with every `step`-th of the T labels, `size` points
    high. Returns the image."""
    style = dict(vmin=0, vmax=1, cmap="Blues", interpolation="none")
    image = axes.imshow(weights.numpy(), **style)
    ticks = range(0, len(weights), step)
    shown = [printable(label, figure=True) for label in labels[::step]]
    upright = all(len(label) == 1 for label in labels)
    font = dict(fontsize=size, family="monospace")
    axes.set_xticks(ticks, shown, rotation=0 if upright else 90, **font)
    axes.set_yticks(ticks, shown, **font)
    axes.tick_params(length=1, pad=1)
    return image


def check_picture(path, writer):
    """Raise UserError unless `path` can take a PNG, over no file but one that `writer` drew."""
    path = Path(path)
    if path.suffix != ".png" or not path.parent.is_dir():
        raise UserError("out must be a .png in a folder that exists", f"out={path}", "change it")
    head = path.read_bytes()[:4096] if path.is_file() else b""
    if os.path.lexists(path) and writer.encode() not in head:
        fix = "move it away, or choose another name with --out=NAME.png"
        raise UserError(f"this file was not written by {writer}", f"out={path}", fix)


def check_layer(model, layer):
    """Raise UserError if there is no such layer, or no attention in it that can be drawn."""
    if layer >= len(model.blocks):
        fix = f"the layers are 0 to {len(model.blocks) - 1}"
        raise UserError(f"there is no layer {layer}", f"layer={layer}", fix)

    if not has_map(model.blocks[layer].attn):
        fix = "choose a layer of attention with values of its own, and a model without attn_extra"
        raise UserError(f"layer {layer} has no attention to draw", f"layer={layer}", fix)


def prompt_of(model, tokenizer, prompt, context=None):
    """(the last `context` tokens of a prompt (1, T), their texts); context None: block_size."""
    ids = tokenizer.prompt(prompt)[-(context or model.config.block_size) :]
    labels = [repr(tokenizer.decode([token]))[1:-1].replace(" ", "␣") for token in ids]
    return torch.tensor([ids], device=next(model.parameters()).device), labels


def picture(weights, labels, title):
    """A PNG (bytes) of weights (H, T, T), a panel per head; labels: the texts of the T tokens."""
    import matplotlib
    from matplotlib.figure import Figure

    H, T, _ = weights.shape
    across = math.ceil(math.sqrt(H))
    down = math.ceil(H / across)
    inches = min(12, max(2.4, 0.13 * T))  # of a panel
    size = min(8, max(3, 60 * inches / T))  # of a label, in points
    step = math.ceil(T * size / (60 * inches))  # tokens from one label to the next

    shape = (across * (inches + 0.3) + 0.2, down * (inches + 0.4) + 1.1)
    figure = Figure(figsize=shape, layout="constrained")
    with matplotlib.rc_context({"font.family": ["DejaVu Sans"]}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font lacks are drawn as boxes
        for head, values in enumerate(weights):
            axes = figure.add_subplot(down, across, head + 1)
            image = panel(axes, values, labels, size, step)
            axes.set_title(f"head {head}", fontsize=9)

        figure.get_layout_engine().set(w_pad=0.04, h_pad=0.04)
        figure.supylabel("the token that attends", fontsize=9)
        figure.supxlabel("the token it attends to", fontsize=9)
        figure.suptitle(printable(title, figure=True), fontsize=10)
        figure.colorbar(image, ax=figure.axes, location="top", aspect=40, label="weight")
        dpi = max(60, min(130, 8000 / max(figure.get_size_inches())))
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=dpi, metadata={"Software": WRITER})
    return file.getvalue()


def read(argv):
    """(MapConfig, SampleConfig, name of the model) of a command line."""
    given = load(argv, [MapConfig, SampleConfig], __doc__)
    names = given.words
    if len(names) != 1:
        fix = 'python -m extras.attention_map RUN --start="First Citizen:"'
        raise UserError("name one model", "command line", fix)
    others = ["chat", "num_samples", "jsonl", "show_probs", "compile"]
    refuse_idle(given.typed, NAMING + DRAWN + others)
    return build(MapConfig, given.values), build(SampleConfig, given.values), names[0]


def main(argv):
    settings, config, name = read(argv)
    text, *others = read_prompts(config.start, config.prompts)
    if others:
        raise UserError("one prompt is drawn", f"prompts={config.prompts}", "give it with --start")
    check_picture(settings.out, WRITER)
    device, dtype = choose_device(config)
    model, tokenizer, what = open_weights(name, config.checkpoint, device)
    note(what)
    check_context(model, config.context)
    check_layer(model, settings.layer)
    prompt = fit(tokenizer, text, "", config.skip_unknown)
    idx, labels = prompt_of(model, tokenizer, prompt, config.context)
    model = make_fast(model, dtype)
    model = getattr(model, "model", model)  # without the Fast one around it
    weights = attention_weights(model, idx, settings.layer)
    write(settings.out, picture(weights, labels, f"{name}, layer {settings.layer}"))
    note(f"attention of layer {settings.layer}: {settings.out}")


if __name__ == "__main__":
    run(main)
