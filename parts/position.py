"""The slot `position`: where a scheme acts, its classes, and rope's scalings."""

import math
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.nn import functional as F

from model_llama import rotary, rotate

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
        self.width = 2 * int(
            config.rope_fraction * (config.n_embd // config.n_head) / 2
        )  # of a head, even

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
        distance = (
            kpos[:, None, None, :] - qpos[:, None, :, None]
        )  # (B or 1, 1, T, S), 0 or less where it is seen
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
        self.weight = nn.Parameter(
            torch.empty(config.relative_clip + 1, config.n_embd // config.n_head)
        )

    def bias(self, q, qpos, kpos):
        distance = (qpos[:, None, :, None] - kpos[:, None, None, :]).clamp(
            0, len(self.weight) - 1
        )  # (B or 1, 1, T, S)
        scores = q @ self.weight.t() / math.sqrt(q.size(-1))  # (B, H, T, clip + 1)
        return scores.gather(-1, distance.expand(q.size(0), q.size(1), -1, -1))  # (B, H, T, S)


POSITION = dict(
    none=Position, learned=Learned, sinusoidal=Sinusoidal, rope=Rope, alibi=Alibi, relative=Relative
)

# ---------------------------------------------------------------- slot: rope_scaling (owner: rope)


def turned(pos, freq, temperature=1.0):
    angle = pos[:, None, :, None] * freq  # (B or 1, 1, T, D/2)
    return angle.cos() * temperature, angle.sin() * temperature


def frequencies(pos, D, theta):
    return 1.0 / theta ** (
        torch.arange(0, D, 2, device=pos.device, dtype=torch.float32) / D
    )  # (D/2)


def rope_plain(pos, D, config):
    """none: theta^(-2i/D)"""
    return rotary(pos, config.rope_theta, D)


def rope_linear(pos, D, config):
    """linear: positions divided by s = rope_factor (position interpolation, Chen et al. 2023, arXiv:2306.15595)"""
    return turned(pos, frequencies(pos, D, config.rope_theta) / config.rope_factor)


def rope_ntk(pos, D, config):
    """ntk: theta multiplied by s^(D/(D-2)), so that the slowest pair is stretched s times and the fastest not
    at all (bloc97 2023, "NTK-aware scaled RoPE"; YaRN section 3.1)"""
    return turned(
        pos, frequencies(pos, D, config.rope_theta * config.rope_factor ** (D / max(1, D - 2)))
    )


def rope_yarn(pos, D, config, fast=32, slow=1):
    """yarn: pairs that turn more than `fast` times over rope_original tokens stay, those that turn less than
    `slow` times are divided by s, a ramp between; both q and k times 0.1 ln s + 1 (Peng et al. 2023, arXiv:2309.00071)"""
    freq, s = frequencies(pos, D, config.rope_theta), config.rope_factor
    low, high = (
        D
        * math.log(config.rope_original / (turns * 2 * math.pi))
        / (2 * math.log(config.rope_theta))
        for turns in (fast, slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), D - 1)
    ramp = (
        (torch.arange(D // 2, device=pos.device, dtype=torch.float32) - low) / max(high - low, 1e-3)
    ).clamp(0, 1)
    return turned(
        pos, freq / s * ramp + freq * (1 - ramp), 0.1 * math.log(s) + 1.0 if s > 1 else 1.0
    )


def rope_llama3(pos, D, config, low=1.0, high=4.0):
    """llama3: wavelengths above rope_original / low are divided by s, those below rope_original / high stay,
    a linear blend between (LLaMA 3.1, arXiv:2407.21783)"""
    freq = frequencies(pos, D, config.rope_theta)
    smooth = ((config.rope_original * freq / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return turned(pos, (1 - smooth) * freq / config.rope_factor + smooth * freq)


ROPE_SCALING = dict(
    none=rope_plain, linear=rope_linear, ntk=rope_ntk, yarn=rope_yarn, llama3=rope_llama3
)

# ---------------------------------------------------------------- attention, with its numbers


class Where(NamedTuple):
    """What attention needs to know of the tokens in this forward pass."""

    scheme: Position
    pos: torch.Tensor  # (B or 1, T)
    angles: tuple | None
