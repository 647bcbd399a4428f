"""
Attention maps: how much each token of a prompt looks at each one before it, in every head of a layer.

Attention is linear in its values: with unit vectors in their place, what comes out are the weights. So they are read
off the model itself, whatever its positions, masks, caps and shared heads; nothing of it is computed a second time.
Shapes: T tokens, H heads, K heads of keys and values, D the size of a head.
"""

import io
import math
import warnings

import torch

from common.errors import UserError
from common.files import write


@torch.inference_mode()
def attention_weights(model, idx, layer):
    """The weights (H, T, T) with which each of the tokens idx (1, T) attends to each, in the layer `layer`."""
    attn, T = model.blocks[layer].attn, idx.size(1)
    H, K, D = (
        attn.n_head,
        getattr(attn, "n_kv_head", attn.n_head),
        model.config.n_embd // attn.n_head,
    )
    found = []

    def unit_vectors(module, inputs, v):  # (1, T, K D), of which D tokens have a one at a time
        first = len(found) * D
        eye = torch.eye(T, device=v.device, dtype=v.dtype)[
            :, first : first + D
        ]  # (T, D or what is left)
        return torch.nn.functional.pad(eye, (0, D - eye.size(1))).repeat(1, K)[None]

    def keep(module, inputs):
        found.append(inputs[0].view(T, H, D))

    hooks = [attn.wv.register_forward_hook(unit_vectors), attn.wo.register_forward_pre_hook(keep)]
    try:
        for _ in range(math.ceil(T / D)):
            model(idx, last_only=True)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(found, dim=-1)[..., :T].transpose(0, 1).float().cpu()


def picture(weights, labels, title):
    """A PNG (bytes) of weights (H, T, T), a panel per head; labels: the texts of the T tokens."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    H, T = weights.shape[:2]
    across = math.ceil(math.sqrt(H))
    down = math.ceil(H / across)
    inches = min(12, max(2.4, 0.13 * T))  # of a panel
    size = min(8, max(3, 60 * inches / T))  # of a label, points
    step = math.ceil(T * size / (60 * inches))  # every so many tokens have one
    figure = Figure(
        figsize=(across * (inches + 0.7) + 0.8, down * (inches + 0.9)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    where, shown = range(0, T, step), [label.replace("$", r"\$") for label in labels[::step]]
    with matplotlib.rc_context({"font.family": ["DejaVu Sans"]}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a script that the font lacks shows as boxes
        for head in range(H):
            axes = figure.add_subplot(down, across, head + 1)
            image = axes.imshow(
                weights[head].numpy(), vmin=0, vmax=1, cmap="Blues", interpolation="nearest"
            )
            axes.set_title(f"head {head}", fontsize=9)
            axes.set_xticks(where, shown, rotation=90, fontsize=size, family="monospace")
            axes.set_yticks(where, shown, fontsize=size, family="monospace")
            axes.tick_params(length=1, pad=1)
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
        figure.supylabel("the token that looks", fontsize=9)
        figure.supxlabel("the token it looks at", fontsize=9)
        figure.suptitle(title, fontsize=10)
        figure.colorbar(image, ax=figure.axes, aspect=40, label="weight")
        file = io.BytesIO()
        figure.savefig(
            file, format="png", dpi=max(60, min(130, 8000 / max(figure.get_size_inches())))
        )
    return file.getvalue()


def write_map(path, name, model, tokenizer, prompt, layer, context=None):
    """Write the attention of a layer over the last `context` tokens of a prompt (None: block_size) as a PNG."""
    model = getattr(model, "model", model)  # without what makes it fast
    if layer >= len(model.blocks):
        raise UserError(
            f"there is no layer {layer}",
            f"layer={layer}",
            f"the layers are 0 to {len(model.blocks) - 1}",
        )
    ids = list(tokenizer.encode(prompt))[-(context or model.config.block_size) :] or [
        tokenizer.start
    ]
    weights = attention_weights(
        model, torch.tensor([ids], device=next(model.parameters()).device), layer
    )
    labels = [repr(tokenizer.decode([token]))[1:-1].replace(" ", "␣") for token in ids]
    write(path, picture(weights, labels, f"{name}, layer {layer}"))
