"""The interface every part implements, and the linear maps and short convolutions that parts are
made of.

Shapes: B batch, T tokens, C = n_embd. Costs are counted per token, in numbers (not bytes).
"""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from parts.cache import State

STD = 0.02  # of every matrix at the start, as in model.py


class Part(nn.Module):
    """The interface every part implements. A part overrides what differs from these defaults:

    - paper: its source, with a year or an arXiv number, or "unpublished"
    - reads: the keys of the configuration that have no effect without this part
    - muon: the names of its own parameters that Muon may take, besides its linear maps
    - undecayed: the names of its own matrices that weight decay leaves out
    - check(config): refuses a configuration that it cannot be made with
    - reset(): gives its own parameters their initial values; its linear maps set theirs
    - flops(T), held(T), unused(): its costs, not counting its linear maps and short convolutions

    What else a slot asks of its parts stands in the first class of its file: Norm,
    Token (the slot embed), Position, Block, Plain (the slot residual), FeedForward, Extra, and
    Mixer below.
    """

    paper = ""
    reads = ()
    muon = ()
    undecayed = ()

    @classmethod
    def check(cls, config):
        """Raise ValueError if it cannot be made with this VariantConfig. Called for mixers,
        MLPs and residuals."""

    def flops(self, T):
        """FLOPs per token in a context of T, as torch counts them, without the linear maps and
        short convolutions."""
        return 0

    def held(self, T):
        """The count of numbers that the cache holds for it after T tokens of one sequence, without
        the inputs of its short convolutions."""
        return 0

    def unused(self):
        """The number of parameters that one token does not use."""
        return 0


class Mixer(Part):
    """Moves information from one token to later ones. Made with a configuration and the number of
    its layer.

    forward(x, where, cache=None): x (B, T, C) -> (B, T, C). where: a position.Where. cache: this
    layer's state of what was read before, or None.
    """

    acted_on = ("embedding",)  # where a position scheme can reach it
    state = State  # the class of its state
    normed = False  # whether it has an RMSNorm of its own, which reads norm_eps

    def new_state(self, cache):
        """The state of this layer in a new KVCache."""
        return self.state(cache)


def refuse(wrong, why):
    """Raise ValueError(why) if `wrong` is true; why: "what is wrong: what to do"."""
    if wrong:
        raise ValueError(why)


def layer_mixers(config):
    """The mixer's word in each layer: mixer="attention,mamba2" repeats over the depth."""
    words = config.mixer.split(",")
    return [words[layer % len(words)] for layer in range(config.n_layer)]


def layers_reading(config, key):
    """The layers whose mixer reads a key, as kv_shared_by: attention, and what derives from it."""
    from parts.slots import MIXER  # here, since slots.py imports this file

    return [i for i, word in enumerate(layer_mixers(config)) if key in MIXER[word].reads]


def kv_layer(config, layer):
    """The layer that makes the keys and values which attention in this layer reads: itself, or the
    first of kv_shared_by layers of attention."""
    layers = layers_reading(config, "kv_shared_by")
    if not config.kv_shared_by or layer not in layers:
        return layer
    place = layers.index(layer)
    return layers[place - place % config.kv_shared_by]


def head_width(config):
    """D, the width of a head of attention."""
    return config.head_dim or config.n_embd // config.n_head


class Linear(nn.Linear):
    """A linear map that starts at N(0, std), its bias at 0."""

    muon = ("weight",)

    def __init__(self, n_in, n_out, bias, std=STD):
        super().__init__(n_in, n_out, bias=bias)
        self.std = std

    def reset(self):
        nn.init.normal_(self.weight, 0.0, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class LowRank(nn.Module):
    """x U V in place of x W, of rank r = low_rank. U V starts with the same std as W would."""

    def __init__(self, n_in, n_out, rank, bias, std):
        super().__init__()
        std = math.sqrt(std / math.sqrt(rank))
        self.u = Linear(n_in, rank, False, std)
        self.v = Linear(rank, n_out, bias, std)

    def forward(self, x):
        return self.v(self.u(x))


def linear(n_in, n_out, config, residual=False, qkv=False):
    """The linear map of a part, of full or low rank, with a bias if bias=all.

    qkv: whether it makes the queries, keys or values of attention, which bias=qkv gives a bias too.

    residual: whether its output is added to the residual stream. Such a map starts smaller, at
    0.02 / sqrt(2 n_layer), so that the sum over all layers stays of order 1.
    """
    std = STD / math.sqrt(2 * config.n_layer) if residual else STD
    bias = config.bias == "all" or (qkv and config.bias == "qkv")
    if config.low_rank:
        return LowRank(n_in, n_out, config.low_rank, bias, std)
    return Linear(n_in, n_out, bias, std)


def weight_dropout(config):
    """The dropout of the attention weights."""
    return nn.Dropout(config.dropout if config.attn_dropout is None else config.attn_dropout)


def reset(part):
    """Give every parameter in a part its initial value: each module sets its own, and those in its
    ParameterLists and ParameterDicts."""
    lists = (nn.ParameterList, nn.ParameterDict)
    for module in part.modules():
        if isinstance(module, lists):
            continue  # the module that holds it sets its parameters
        parameters = list(module.parameters(recurse=False))
        for child in module.children():
            if isinstance(child, lists):
                parameters += child.parameters(recurse=False)
        if not parameters:
            continue
        if not hasattr(module, "reset"):
            raise TypeError(
                f"{type(module).__name__} does not say how its parameters start: use `linear`, or "
                "derive it from Part and give it a reset()"
            )
        module.reset()


# ---------------------------------------------------------------- short convolutions


class ShortConv(Part):
    """sum_j weight_(width - 1 - j) x_(t - j) + bias, j = 0 to width - 1, in each channel.

    name: its key in the cache, which holds its last width - 1 inputs; unique in a layer.
    """

    def __init__(self, channels, width, bias, name="state"):
        super().__init__()
        self.channels = channels
        self.width = width
        self.name = name
        self.weight = nn.Parameter(torch.empty(channels, width))  # the last is of the newest token
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def reset(self):  # as torch starts a convolution
        for p in self.parameters():
            nn.init.uniform_(p, -(self.width**-0.5), self.width**-0.5)

    def forward(self, x, cache=None):
        """x (B, T, channels), after the inputs before it that the cache holds."""
        past = self.width - 1
        if cache is None:
            x = F.pad(x, (0, 0, past, 0))
        else:
            x = cache.with_past(cache.without_padding(x), past, self.name)
        # As a picture one pixel high: conv1d would copy x, whose channels are innermost.
        x = x.mT[:, :, None]  # (B, channels, 1, past + T)
        y = F.conv2d(x, self.weight[:, None, None], self.bias, groups=self.channels)
        return y[:, :, 0].mT

    def flops(self, T):
        return 2 * self.channels * self.width

    def held(self, T):
        return (self.width - 1) * self.channels


class SiteConv(ShortConv):
    """x + conv(x) at one site of conv_sites, without bias."""

    def forward(self, x, cache=None):
        return x + super().forward(x, cache)


class NoConv(Part):
    """x, at a site without a convolution."""

    def forward(self, x, cache=None):
        return x


def conv_at(site, channels, config, name=None):
    """The convolution at a site of attention or of the MLP. Where the configuration names no sites,
    `conv` alone means attention's input. name: its key in the cache (None: the site)."""
    sites = config.conv_sites.split(",")
    if config.conv_sites == "none":
        sites = ["input"] if config.conv else []
    if site not in sites:
        return NoConv()
    return SiteConv(channels, config.conv or 4, bias=False, name=name or site)


def short_convs(model):
    """All short convolutions of a model or part."""
    return [module for module in model.modules() if isinstance(module, ShortConv)]
