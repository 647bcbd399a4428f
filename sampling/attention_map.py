"""
Attention maps: how much each token of a prompt attends to each earlier one, in every head.

Attention is linear in its values: with unit vectors as values, its output is the weights. They are
therefore read from the model itself, with its positions, masks, caps and shared heads; no second
implementation computes them.
Shapes: T tokens, H heads, K heads of keys and values, D the size of a head.
"""

import torch
from torch.nn import functional as F

from common.errors import UserError


def has_map(attn):
    """Whether a mixer's output is a mean of the values that its matrix wv makes."""
    changed = ("sinks", "share", "value_table", "gate")
    plain = hasattr(attn, "n_head") and not getattr(attn, "normed", False)
    plain = plain and "xsa" not in getattr(attn, "extra", ())
    return plain and all(getattr(attn, name, None) is None for name in changed)


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
    shown = [label.replace("$", r"\$") for label in labels[::step]]
    upright = all(len(label) == 1 for label in labels)
    font = dict(fontsize=size, family="monospace")
    axes.set_xticks(ticks, shown, rotation=0 if upright else 90, **font)
    axes.set_yticks(ticks, shown, **font)
    axes.tick_params(length=1, pad=1)
    return image


def check_layer(model, layer):
    """Raise UserError if there is no such layer, or no attention in it that can be drawn."""
    if layer >= len(model.blocks):
        fix = f"the layers are 0 to {len(model.blocks) - 1}"
        raise UserError(f"there is no layer {layer}", f"layer={layer}", fix)

    if not has_map(model.blocks[layer].attn):
        fix = "choose a layer whose mixer is attention, without gate, sink, or changed values"
        raise UserError(f"layer {layer} has no attention to draw", f"layer={layer}", fix)


def read(model, tokenizer, prompt, context=None):
    """(the last `context` tokens of a prompt (1, T), their texts); context None: block_size."""
    ids = tokenizer.prompt(prompt)[-(context or model.config.block_size) :]
    labels = [repr(tokenizer.decode([token]))[1:-1].replace(" ", "␣") for token in ids]
    return torch.tensor([ids], device=next(model.parameters()).device), labels
