"""The words of `attn_extra`: additions to each head of the mixer `attention`. The key takes several
words; they act in the order in which parts/slots.py lists them.

Shapes: B batch, T tokens, C = n_embd, H heads of queries, K heads of keys and values, D the width
of a head, S keys, V vocabulary.
"""

import torch
import torch.nn as nn
from torch.nn import functional as F

from parts.part import STD, layers_reading, linear

GATED = 32  # features that the gate of a value embedding reads


class Extra:
    """none: nothing is added. A subclass overrides one or more hooks: values, scores, output.

    It is made once for each attention layer. Its parameters are attributes of that attention, so
    that their names in a checkpoint are `attn.sinks`, `attn.gate`; every hook is given the
    attention.
    """

    paper = ""

    def __init__(self, attention, config, layer):
        """Create its parameters as attributes of the attention of this layer."""

    def reset(self, attention):
        """Give its parameters their initial values; linear maps set theirs."""

    def values(self, attention, x, v, where):
        """The values (B, K, T, D) to use for v (B, K, T, D), of the layer's input x (B, T, C)."""
        return v

    def scores(self, attention, k, v, mask, bias):
        """The k and v (B, K, S, D), mask (B or 1, 1, T, S) and bias of the scores
        (B or 1, H, T, S) to use instead."""
        return k, v, mask, bias

    def output(self, attention, x, y, own):
        """The heads' outputs (B, H, T, D) to use for y (B, H, T, D), of the layer's input x
        (B, T, C); own: the values (B, K, T, D) of the tokens themselves."""
        return y

    def flops(self, attention, T):
        """FLOPs per token in a context of T, not counting its linear maps."""
        return 0


def check_parameters(extra):
    """Refuse parameters that would not train."""
    name = type(extra).__name__
    for key, value in vars(extra).items():
        if isinstance(value, (nn.Parameter, nn.Module)):
            raise TypeError(
                f"{name} holds {key} itself, so it trains nothing: put it on `attention`"
            )


class Sink(Extra):
    """Each head adds exp(b) to the sum of its weights, so that they may sum to less than 1."""

    paper = "gpt-oss, arXiv:2508.10925"

    def __init__(self, attention, config, layer):
        attention.sinks = nn.Parameter(torch.zeros(attention.n_head))  # b

    def reset(self, attention):
        nn.init.zeros_(attention.sinks)

    def scores(self, attention, k, v, mask, bias):
        """One more key in front, which every query sees: its score is b, its value 0."""
        B, K, _, D = k.shape
        nothing = k.new_zeros(B, K, 1, D)
        k = torch.cat((nothing, k), 2)  # (B, K, 1 + S, D)
        v = torch.cat((nothing, v), 2)
        b = attention.sinks.type_as(bias)[None, :, None, None].expand(*bias.shape[:3], 1)
        return k, v, F.pad(mask, (1, 0), value=True), torch.cat((b, bias), 3)

    def flops(self, attention, T):
        return 4 * attention.n_head * attention.head_dim  # of one more key


class ValueResidual(Extra):
    """v becomes (1 - λ) v + λ v_1, the values of the first attention layer."""

    paper = "Zhou et al. 2024, arXiv:2410.17897"

    def __init__(self, attention, config, layer):
        self.first = layer == layers_reading(config, "attn_extra")[0]
        if not self.first:
            attention.share = nn.Parameter(torch.tensor([0.5]))  # λ

    def reset(self, attention):
        if not self.first:
            nn.init.constant_(attention.share, 0.5)

    def values(self, attention, x, v, where):
        if self.first:
            where.shared.by_name.setdefault("values", v)  # a recomputed block comes here again
            return v
        return (1 - attention.share) * v + attention.share * where.shared.by_name["values"]


class ValueEmbed(Extra):
    """Every other layer, the last one included, adds 2 σ(x W) e[token] to the value; here x are the
    first 32 features of the layer's input."""

    paper = "nanochat, Karpathy 2025"

    def __init__(self, attention, config, layer):
        self.adds = (config.n_layer - 1 - layer) % 2 == 0
        if self.adds:
            K = attention.n_kv_head
            width = K * attention.head_dim
            attention.value_table = nn.Parameter(torch.empty(config.vocab_size, width))
            attention.value_gate = linear(min(config.n_embd, GATED), K, config)

    def reset(self, attention):
        if self.adds:
            nn.init.normal_(attention.value_table, 0.0, STD)

    def values(self, attention, x, v, where):
        if not self.adds:
            return v
        B, K, T, _ = v.size()
        added = F.embedding(where.idx, attention.value_table).view(B, T, K, -1)
        scale = 2 * torch.sigmoid(attention.value_gate(x[..., :GATED]))  # (B, T, K)
        return v + (scale[..., None] * added).transpose(1, 2)


class XSA(Extra):
    """The head's output loses its component along the token's own value."""

    paper = "arXiv:2603.09078"

    def output(self, attention, x, y, own):
        shared_by = y.size(1) // own.size(1)
        along = F.normalize(own, dim=-1).repeat_interleave(shared_by, 1)  # (B, H, T, D)
        return y - (y * along).sum(-1, keepdim=True) * along


class GateElement(Extra):
    """The head's output is multiplied by σ(x W), one number per element."""

    paper = "Qiu et al. 2025, arXiv:2505.06708"

    def __init__(self, attention, config, layer):
        attention.gate = linear(config.n_embd, self.width(attention), config)

    def width(self, attention):
        return attention.n_head * attention.head_dim

    def output(self, attention, x, y, own):
        B, T, _ = x.size()
        gate = torch.sigmoid(attention.gate(x)).view(B, T, attention.n_head, -1)
        return (y.transpose(1, 2) * gate).transpose(1, 2)


class GateHead(GateElement):
    """The head's output is multiplied by σ(x W), one number per head."""

    def width(self, attention):
        return attention.n_head
