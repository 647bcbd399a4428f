"""The model as it is trained: its loss alone, compiled, its activations computed again."""

import functools

import torch
from torch.utils.checkpoint import checkpoint as checkpoint_activations

from training import ranks


class Loss(torch.nn.Module):
    """The loss of a model and nothing else. If a compiled forward pass returned the logits as well,
    the backward pass would be given their gradient: (batch, block_size, vocabulary) zeros.

    With `measured`, for an evaluation, a (3,) tensor of the loss, the number of targets y that are
    the most probable token, and the number of rows that have targets and in which every one is."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        # {name: tensor} that a loss needs again after resuming. Checkpoints hold it; this has none.
        self.stored = {}

    def forward(self, x, y, measured=False):
        logits, loss = self.model(x, y)
        if not measured:
            return loss
        right = logits.argmax(-1) == y  # (B, T); False where y is -1
        masked = y < 0
        right_rows = (right | masked).all(1) & ~masked.all(1)  # (B,)
        return torch.stack([loss, right.sum().type_as(loss), right_rows.sum().type_as(loss)])


def recompute_blocks(model, runtime):
    """Let each block keep its input alone and compute the rest again in the backward pass (Chen et
    al. 2016, arXiv:1604.06174)."""
    for block in model.blocks:
        block.forward = recomputed(block.forward, runtime)


def recomputed(forward, runtime):
    """A block's forward pass that is computed again in the backward pass, with the same
    attention."""

    def compute(*args):
        with runtime.attention():
            return forward(*args)

    return functools.partial(checkpoint_activations, compute, use_reentrant=False)


def compiled(loss, runtime):
    """The loss module, compiled if the runtime compiles."""
    if not runtime.compile:
        return loss
    options = None
    if runtime.device.startswith("cpu"):
        options = {"fallback_random": True}  # the compiler's own dropout triples a step on a CPU
    return torch.compile(loss, dynamic=False, options=options)


def evaluation_net(net, device):
    """The module of a run, as an evaluation uses it: without DDP, and on a CPU not compiled, since
    compiling it takes as long as thirty evaluations would save."""
    net = ranks.without_ddp(net)
    if device.startswith("cpu"):
        return getattr(net, "_orig_mod", net)
    return net
