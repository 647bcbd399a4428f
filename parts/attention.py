"""
The parts that fill the slots of a decoder block, slot by slot: positions, norms, MLPs, attention.

A component is one class (or function) and one word in the dictionary of its slot: choices, --help, tests and
ablation arms are made from the dictionaries. Parts that belong to a corner are that corner's, imported.
Shapes: B batch, T tokens, C = n_embd, H = n_head, K = n_kv_head, D = C / H, S keys (past and present).
"""
import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from parts.cache import visible
from model import LayerNorm, gelu
from model_llama import RMSNorm, rotary, rotate

# ---------------------------------------------------------------- slot: position


class Position(nn.Module):
    """none: the causal mask alone tells the order (Kazemnejad et al. 2023, arXiv:2305.19466).

    A scheme overrides the one place where it acts."""

    limit = None  # tokens it has positions for, None: any number

    def __init__(self, config):
        super().__init__()

    def embed(self, x, pos):
        """x (B, T, C) at the bottom, once."""
        return x

    def angles(self, pos):
        """What `rotate` needs, made once per forward."""

    def rotate(self, q, k, angles):
        """q (B, H, T, D) and k (B, K, T, D), in every layer."""
        return q, k

    def bias(self, q, qpos, kpos):
        """What is added to the scores, (B or 1, H, T, S), or None."""


class Learned(Position):
    """x + wpe[pos] (GPT-2, Radford et al. 2019)."""

    def __init__(self, config):
        super().__init__(config)
        self.limit = config.block_size
        self.weight = nn.Embedding(config.block_size, config.n_embd).weight

    def embed(self, x, pos):
        return x + F.embedding(pos, self.weight)


class Sinusoidal(Position):
    """sqrt(C) x + [sin(pos w_i), cos(pos w_i)], w_i = 10000^(-2i/C), interleaved (Vaswani et al. 2017, arXiv:1706.03762)."""

    def embed(self, x, pos):
        cos, sin = rotary(pos, 10000.0, x.size(-1))  # (B or 1, 1, T, C/2), C rounded up to even
        table = torch.stack((sin, cos), dim=-1).flatten(-2)[:, 0, :, : x.size(-1)]  # (B or 1, T, C)
        return x * math.sqrt(x.size(-1)) + table.type_as(x)


class Rope(Position):
    """q and k turned by pos * theta^(-2i/D) (RoFormer, Su et al. 2021, arXiv:2104.09864), perhaps scaled for
    longer texts, on the first rope_fraction of each head (GPT-NeoX, Black et al. 2022, arXiv:2204.06745)."""

    def __init__(self, config):
        super().__init__(config)
        self.config = config
        self.width = 2 * int(config.rope_fraction * (config.n_embd // config.n_head) / 2)  # of a head, even

    def angles(self, pos):
        return ROPE_SCALING[self.config.rope_scaling](pos, self.width, self.config)

    def rotate(self, q, k, angles):
        return self.turn(q, angles), self.turn(k, angles)

    def turn(self, x, angles):
        if self.width == x.size(-1):
            return rotate(x, *angles)
        return torch.cat((rotate(x[..., : self.width], *angles), x[..., self.width :]), dim=-1)


class Alibi(Position):
    """scores + slope_h (kpos - qpos) (Press et al. 2021, arXiv:2108.12409)."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("slopes", torch.tensor(alibi_slopes(config.n_head)), persistent=False)

    def bias(self, q, qpos, kpos):
        distance = kpos[:, None, None, :] - qpos[:, None, :, None]  # (B or 1, 1, T, S), 0 or less where it is seen
        return (distance * self.slopes[:, None, None]).type_as(q)


def alibi_slopes(n):
    """The authors' slopes of n heads: 2^(-8i/n), i = 1..n; where n is no power of two, those of the power
    below, then every other one of the power above."""
    power = 2 ** math.floor(math.log2(n))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes if power == n else slopes + alibi_slopes(2 * power)[0::2][: n - power]


class Relative(Position):
    """scores + q · a[distance] / sqrt(D), a key vector per distance, clipped (Shaw et al. 2018,
    arXiv:1803.02155); one table for all layers and heads."""

    def __init__(self, config):
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.relative_clip + 1, config.n_embd // config.n_head))

    def bias(self, q, qpos, kpos):
        distance = (qpos[:, None, :, None] - kpos[:, None, None, :]).clamp(0, len(self.weight) - 1)  # (B or 1, 1, T, S)
        scores = q @ self.weight.t() / math.sqrt(q.size(-1))  # (B, H, T, clip + 1)
        return scores.gather(-1, distance.expand(q.size(0), q.size(1), -1, -1))  # (B, H, T, S)


POSITION = dict(none=Position, learned=Learned, sinusoidal=Sinusoidal, rope=Rope, alibi=Alibi, relative=Relative)

# ---------------------------------------------------------------- slot: rope_scaling (owner: rope)


def turned(pos, freq, temperature=1.0):
    angle = pos[:, None, :, None] * freq  # (B or 1, 1, T, D/2)
    return angle.cos() * temperature, angle.sin() * temperature


def frequencies(pos, D, theta):
    return 1.0 / theta ** (torch.arange(0, D, 2, device=pos.device, dtype=torch.float32) / D)  # (D/2)


def rope_plain(pos, D, config):
    """none: theta^(-2i/D)"""
    return rotary(pos, config.rope_theta, D)


def rope_linear(pos, D, config):
    """linear: positions divided by s = rope_factor (position interpolation, Chen et al. 2023, arXiv:2306.15595)"""
    return turned(pos, frequencies(pos, D, config.rope_theta) / config.rope_factor)


def rope_ntk(pos, D, config):
    """ntk: theta multiplied by s^(D/(D-2)), so that the slowest pair is stretched s times and the fastest not
    at all (bloc97 2023, "NTK-aware scaled RoPE"; YaRN section 3.1)"""
    return turned(pos, frequencies(pos, D, config.rope_theta * config.rope_factor ** (D / max(1, D - 2))))


def rope_yarn(pos, D, config, fast=32, slow=1):
    """yarn: pairs that turn more than `fast` times over rope_original tokens stay, those that turn less than
    `slow` times are divided by s, a ramp between; both q and k times 0.1 ln s + 1 (Peng et al. 2023, arXiv:2309.00071)"""
    freq, s = frequencies(pos, D, config.rope_theta), config.rope_factor
    low, high = (D * math.log(config.rope_original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta)) for turns in (fast, slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), D - 1)
    ramp = ((torch.arange(D // 2, device=pos.device, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return turned(pos, freq / s * ramp + freq * (1 - ramp), 0.1 * math.log(s) + 1.0 if s > 1 else 1.0)


def rope_llama3(pos, D, config, low=1.0, high=4.0):
    """llama3: wavelengths above rope_original / low are divided by s, those below rope_original / high stay,
    a linear blend between (LLaMA 3.1, arXiv:2407.21783)"""
    freq = frequencies(pos, D, config.rope_theta)
    smooth = ((config.rope_original * freq / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return turned(pos, (1 - smooth) * freq / config.rope_factor + smooth * freq)


ROPE_SCALING = dict(none=rope_plain, linear=rope_linear, ntk=rope_ntk, yarn=rope_yarn, llama3=rope_llama3)

# ---------------------------------------------------------------- slot: norm


class BatchNorm(nn.BatchNorm1d):
    """(x - mean) / sqrt(var + eps) * weight + bias per feature, mean and var over batch and time while training,
    running ones afterwards (Ioffe & Szegedy 2015, arXiv:1502.03167). While training it leaks: the statistics of
    later tokens reach earlier ones."""

    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


class DyT(nn.Module):
    """weight * tanh(alpha x) + bias (dynamic tanh, Zhu et al. 2025, arXiv:2503.10622)."""

    def __init__(self, width, bias):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor([0.5]))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        x = torch.tanh(self.alpha * x) * self.weight
        return x if self.bias is None else x + self.bias


NORM = dict(  # of a width and a configuration
    layernorm=lambda width, config: LayerNorm(width, config.bias != "none"),
    rmsnorm=lambda width, config: RMSNorm(width, config.norm_eps),
    batchnorm=lambda width, config: BatchNorm(width),
    dyt=lambda width, config: DyT(width, config.bias != "none"),
    none=lambda width, config: nn.Identity(),
)

# ---------------------------------------------------------------- slot: mlp


class LowRank(nn.Module):
    """x U V in place of x W, of rank r = low_rank (what a widespread note takes LLaMA to do; it does not)."""

    def __init__(self, n_in, n_out, rank, bias):
        super().__init__()
        self.u = nn.Linear(n_in, rank, bias=False)
        self.v = nn.Linear(rank, n_out, bias=bias)

    def forward(self, x):
        return self.v(self.u(x))


def linear(n_in, n_out, config):
    bias = config.bias == "all"
    return LowRank(n_in, n_out, config.low_rank, bias) if config.low_rank else nn.Linear(n_in, n_out, bias=bias)


class PlainMLP(nn.Module):
    """down(act(up(x))), 4C wide (Vaswani et al. 2017, arXiv:1706.03762)."""

    gated = False

    def __init__(self, act, config):
        super().__init__()
        width = config.mlp_width or 4 * config.n_embd
        self.act = act
        self.up = linear(config.n_embd, width, config)
        self.down = linear(width, config.n_embd, config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.down(self.act(self.up(x))))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), two thirds of 4C wide, so that three matrices cost what two did (Shazeer 2020,
    arXiv:2002.05202)."""

    gated = True

    def __init__(self, act, config):
        super().__init__()
        width = int((config.ffn_dim_multiplier or 1) * int(2 * 4 * config.n_embd / 3))
        width = config.mlp_width or config.multiple_of * math.ceil(width / config.multiple_of)
        self.act = act
        self.gate = linear(config.n_embd, width, config)
        self.up = linear(config.n_embd, width, config)
        self.down = linear(width, config.n_embd, config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.down(self.act(self.gate(x)) * self.up(x)))


MLP = dict(
    relu=partial(PlainMLP, F.relu),
    gelu=partial(PlainMLP, gelu),  # GPT-2's tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415)
    gelu_erf=partial(PlainMLP, F.gelu),  # the exact form, as in Falcon and GPT-NeoX (arXiv:1606.08415)
    silu=partial(PlainMLP, F.silu),  # also called Swish (Elfwing et al. 2017, arXiv:1702.03118)
    relu2=partial(PlainMLP, lambda x: F.relu(x).square()),  # (So et al. 2021, arXiv:2109.08668)
    glu=partial(GatedMLP, F.sigmoid),  # (Dauphin et al. 2016, arXiv:1612.08083)
    bilinear=partial(GatedMLP, lambda x: x),
    reglu=partial(GatedMLP, F.relu),
    geglu=partial(GatedMLP, gelu),
    swiglu=partial(GatedMLP, F.silu),
)

# ---------------------------------------------------------------- attention, with its numbers


class Where(NamedTuple):
    """What attention needs to know of the tokens in this forward pass."""

    scheme: Position
    pos: torch.Tensor  # (B or 1, T)
    angles: tuple | None


def compiled_on_gpu(x):
    return x.is_cuda and torch.compiler.is_compiling()


class Attention(nn.Module):
    """softmax(q kᵀ / sqrt(D) + bias) v over the keys that a query may see. H / K neighbouring query heads share a
    key and value head: H multi-head, 1 multi-query (Shazeer 2019, arXiv:1911.02150), between grouped-query
    (Ainslie et al. 2023, arXiv:2305.13245). window: the last so many tokens (Mistral, Jiang et al. 2023,
    arXiv:2310.06825); block_local: groups of so many that see themselves only. qk_norm: RMSNorm on each head's q
    and k (Qwen 3, arXiv:2505.09388), or on all heads' at once (OLMo 2, arXiv:2501.00656). attn_softcap:
    c tanh(scores / c) (Gemma 2, arXiv:2408.00118)."""

    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.window = 0 if config.full_every and (layer + 1) % config.full_every == 0 else config.window
        self.group, self.softcap, self.qk_norm = config.block_local, config.attn_softcap, config.qk_norm
        D = config.n_embd // config.n_head
        self.wq = linear(config.n_embd, config.n_embd, config)
        self.wk = linear(config.n_embd, D * config.n_kv_head, config)
        self.wv = linear(config.n_embd, D * config.n_kv_head, config)
        self.wo = linear(config.n_embd, config.n_embd, config)
        self.dropout = nn.Dropout(config.dropout)
        if config.qk_norm != "none":
            heads = (1, 1) if config.qk_norm == "head" else (config.n_head, config.n_kv_head)
            self.q_norm, self.k_norm = (RMSNorm(D * n, config.norm_eps) for n in heads)

    def forward(self, x, where, cache=None):
        B, T, C = x.size()
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        v = v.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = where.scheme.rotate(q, k, where.angles)
        if cache is None and compiled_on_gpu(x) and self.flexible(q, where.scheme):
            return self.dropout(self.wo(self.flex(q, k, v, where.scheme).transpose(1, 2).reshape(B, T, C)))
        if cache is None:
            kpos, mask = where.pos, None if T <= self.window or not self.window else visible(where.pos, where.pos, self.window)
        else:
            k, v, mask = cache.update(k, v, self.window)  # past ones too: (B, K, S, D)
            kpos = cache.kpos
        if self.group:
            mask = visible(where.pos, kpos, group=self.group)
        bias = where.scheme.bias(q, where.pos, kpos)  # (B or 1, H, T, S) or None
        y = self.attend(q, k, v, where.pos, kpos, mask, bias)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side
        return self.dropout(self.wo(y))

    def attend(self, q, k, v, qpos, kpos, mask, bias):
        """q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D)."""
        T, p = q.size(2), self.dropout.p if self.training else 0.0
        if bias is None and not self.softcap:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1, dropout_p=p, enable_gqa=True)
        mask = visible(qpos, kpos) if mask is None else mask  # (B or 1, 1, T, S)
        if not self.softcap:
            bias = bias.masked_fill(~mask, -torch.inf)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p, enable_gqa=True)
        k, v = (a.repeat_interleave(self.n_head // self.n_kv_head, dim=1) for a in (k, v))  # (B, H, S, D)
        scores = self.softcap * torch.tanh(q @ k.transpose(2, 3) / math.sqrt(q.size(-1)) / self.softcap)  # (B, H, T, S)
        scores = (scores if bias is None else scores + bias).masked_fill(~mask, -torch.inf)
        return F.dropout(scores.softmax(-1), p) @ v

    def flexible(self, q, scheme):
        """Whether `flex` can and should do what `attend` does here: more than plain causal attention, no dropout, no
        bias but ALiBi's, which it can make from the positions alone, and heads of 16 or more, as its kernels need."""
        biased = type(scheme).bias is not Position.bias
        more = self.window or self.group or self.softcap or biased
        return bool(more) and not (self.training and self.dropout.p) and (not biased or isinstance(scheme, Alibi)) and q.size(-1) >= 16

    def flex(self, q, k, v, scheme):
        """`attend` without the (T, T) matrix and without the blocks that nobody sees: FlexAttention (Dong et al. 2024,
        arXiv:2412.05496), which is fast on a GPU and where the model is compiled."""
        def seen(b, h, i, j):  # what `visible` says, of one query and one key
            near = (j > i - self.window) if self.window else True
            return (j <= i) & near & (j // self.group == i // self.group if self.group else True)

        def score(s, b, h, i, j):
            s = self.softcap * torch.tanh(s / self.softcap) if self.softcap else s
            return s + scheme.slopes[h] * (j - i) if isinstance(scheme, Alibi) else s

        T = q.size(2)
        blocks = create_block_mask(seen, None, None, T, T, device=q.device)
        return flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True)
