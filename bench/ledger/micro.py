"""
Claims that one small computation decides: no training, one operation or one forward pass. Models
are named as in algebra.py, are small, and have random weights from a fixed seed. Here: whole
models, norms, activations; micro_attention.py and micro_position.py have the rest.

Shapes: B batch, T tokens, C width, H heads, K key heads, D = C / H, V vocabulary.
"""

import math

import torch
from torch.nn import functional as F

from bench.ledger import guide
from bench.ledger.algebra import config_of
from parts.architectures import make
from parts.mlp import MLP
from parts.norm import NORM


def normal(*shape, seed=0):
    """Standard normal numbers, the same at each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model_of(name, *changes):
    """(model, token ids (1, block_size)); its matrices are large enough that details show."""
    torch.manual_seed(0)
    model = make(config_of(name, *changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.2)
    return model, torch.randint(0, model.config.vocab_size, (1, model.config.block_size))


def largest(x):
    return x.abs().max().item()


# ---------------------------------------------------------------- whole models


def least_rank(name):
    """The least rank of a matrix of the blocks, over the rank that it could have."""
    model, _ = model_of(name)
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    return min(int(torch.linalg.matrix_rank(p)) / min(p.shape) for p in matrices)


def bias_parameters(name):
    """The number of biases in a model."""
    model, _ = model_of(name)
    return sum(p.numel() for key, p in model.named_parameters() if key.endswith("bias"))


@torch.no_grad()
def initial_loss(name):
    """The loss of a fresh model minus that of a uniform guess, ln V."""
    torch.manual_seed(0)
    model = make(config_of(name)).eval()
    x, y = torch.randint(0, model.config.vocab_size, (2, 8, model.config.block_size))
    return model(x, y)[1].item() - math.log(model.config.vocab_size)


def recovered_gradient(method):
    """What float16 leaves of a gradient of 1e-8, over what it should be: as it is (plain), with the
    loss multiplied by 2^16 (scaled), or divided by its own size as the notes print (printed),
    which should leave 1."""
    w, scale = torch.ones((), dtype=torch.float16, requires_grad=True), 2.0**16
    loss = (w * 1e-4).float() * 1e-4 * (scale if method == "scaled" else 1)
    loss.backward()
    gradient = w.grad.float() / (scale if method == "scaled" else 1)
    if method == "printed":
        return (gradient / max(gradient.abs().item(), 1e-12)).item()
    return gradient.item() / 1e-8


# ---------------------------------------------------------------- norms and activations


def reference_difference(word):
    """The difference between a norm and its formula as the paper has it."""
    torch.manual_seed(0)
    norm = NORM[word](64, config_of("gpt2@tiny"))
    x = normal(4, 16, 64) * 3 + 1
    with torch.no_grad():
        return largest(norm(x) - norm.reference(x))


def rms(x, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def eps_outside(scale):
    """RMSNorm with eps added to the root over that with eps inside, for inputs of this size."""
    x = normal(64, 64) * float(scale)
    outside = x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6)
    return (outside.norm() / rms(x).norm()).item()


def invariance(norm, change):
    """How much the output of a norm changes when its input is scaled, shifted or centred; `centred`
    compares RMSNorm with LayerNorm on inputs of mean 0."""
    x = normal(16, 64)
    apply = {"rms": rms, "layer": lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-6)}[norm]
    if change == "centred":
        x = x - x.mean(-1, keepdim=True)
        return largest(rms(x) - F.layer_norm(x, x.shape[-1:], eps=1e-6))
    return largest(apply(10 * x if change == "scaled" else x + 3) - apply(x))


def unbiased_difference(n):
    """The difference between the guide's LayerNorm and torch's at width n."""
    x = normal(256, int(n))
    return largest(guide.layer_norm(x) - F.layer_norm(x, (int(n),)))


def gelu_difference():
    """The largest difference between GELU's tanh form and the exact one."""
    x = torch.linspace(-6, 6, 20001)
    return largest(F.gelu(x, approximate="tanh") - F.gelu(x))


def activation_of(name, x):
    """The activation of a model's MLP at one number."""
    return float(MLP[config_of(name).mlp].act(torch.tensor(float(x))))


def least_activation(word):
    """The least value of an activation."""
    return MLP[word].act(torch.linspace(-10, 10, 20001)).min().item()


def flat_share(word):
    """The share of standard normal inputs at which an activation has derivative 0."""
    x = normal(100_000).requires_grad_()
    MLP[word].act(x).sum().backward()
    return (x.grad == 0).float().mean().item()


def gate_difference(chunks):
    """The difference between a gated unit with two projections of its input and one that splits in
    two a wide projection (projection) or the input itself (input)."""
    x, w, v = normal(8, 64), normal(32, 64, seed=1), normal(32, 64, seed=2)
    own = F.silu(x @ w.t()) * (x @ v.t())
    if chunks == "projection":
        first, second = (x @ torch.cat((w, v)).t()).chunk(2, -1)
    else:
        first, second = x.chunk(2, -1)
    return largest(own - F.silu(first) * second)
