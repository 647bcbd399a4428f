"""The slot `position`: how the model knows the order of the tokens; and the slot `rope_scaling`.

Shapes: B batch, T tokens, C = n_embd, H heads of queries, K heads of keys, D = head_dim or C / H,
S keys.
"""

import math
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.nn import functional as F

from model_llama import rotary, rotate
from parts.part import STD, Part, head_width

# ---------------------------------------------------------------- slot: position


class Position(Part):
    """none: the causal mask alone tells the order.

    A scheme overrides the one method of the place where it acts, and names that place in `acts_on`.
    A mixer that does not have that place refuses the scheme. flops(T): per token, for each layer
    whose scores it acts on.
    """

    paper = "Kazemnejad et al. 2023, arXiv:2305.19466"
    acts_on = None  # "embedding", "q and k" or "scores"
    limit = None  # tokens it has positions for; None: any number

    def __init__(self, config):
        super().__init__()

    def embed(self, x, pos):
        """Add positions to the embedding x (B, T, C)."""
        return x

    def angles(self, pos, D=None):
        """(cos, sin) for `turn`, of heads D wide (None: attention's); None if it turns nothing."""

    def turn(self, x, angles):
        """Rotate queries or keys x (B, heads, T, D), in every layer."""
        return x

    def bias(self, q, qpos, kpos):
        """The numbers to add to the scores, (B or 1, H, T, S), or None."""


class Learned(Position):
    """x + wpe[pos]"""

    paper = "GPT-2, Radford et al. 2019"
    acts_on = "embedding"

    def __init__(self, config):
        super().__init__(config)
        self.limit = config.block_size
        self.weight = nn.Embedding(config.block_size, config.n_embd).weight

    def reset(self):
        nn.init.normal_(self.weight, 0.0, STD)

    def embed(self, x, pos):
        return x + F.embedding(pos, self.weight)


class Sinusoidal(Position):
    """sqrt(C) x + [sin(pos w_i), cos(pos w_i)], w_i = 10000^(-2i/C), interleaved."""

    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    acts_on = "embedding"

    def embed(self, x, pos):
        cos, sin = rotary(pos, 10000.0, x.size(-1))  # (B or 1, 1, T, C/2), C rounded up to even
        table = torch.stack((sin, cos), dim=-1).flatten(-2)[:, 0, :, : x.size(-1)]  # (B or 1, T, C)
        return x * math.sqrt(x.size(-1)) + table.type_as(x)


class Rope(Position):
    """q and k turned by pos * theta^(-2i/D), on the first rope_fraction of each head (GPT-NeoX,
    Black et al. 2022, arXiv:2204.06745). D is the width of the part that is turned. Variant
    sets `scaling`, the Scaling that rope_scaling names."""

    paper = "Su et al. 2021, arXiv:2104.09864"
    acts_on = "q and k"
    reads = ("rope_theta", "rope_fraction", "rope_scaling", "rope_factor", "rope_original")

    def __init__(self, config):
        super().__init__(config)
        self.config = config
        self.width = self.turned_width(head_width(config))

    def turned_width(self, D):
        """The width of the turned part of a head, even."""
        return 2 * int(self.config.rope_fraction * D / 2)

    def angles(self, pos, D=None):
        width = self.turned_width(D) if D else self.width
        exponent = torch.arange(0, width, 2, device=pos.device, dtype=torch.float32) / width
        freq, temperature = self.scaling(exponent)
        angle = pos[:, None, :, None] * freq  # (B or 1, 1, T, width / 2), in fp32
        cos = angle.cos()
        sin = angle.sin()
        if temperature != 1:  # else these are two operations more than in model_llama.py
            cos = cos * temperature
            sin = sin * temperature
        return cos, sin

    def turn(self, x, angles):
        width = 2 * angles[0].size(-1)
        if width == x.size(-1):
            return rotate(x, *angles)
        turned = rotate(x[..., :width], *angles)
        return torch.cat((turned, x[..., width:]), dim=-1)


class Alibi(Position):
    """scores + slope_h (kpos - qpos)"""

    paper = "Press et al. 2021, arXiv:2108.12409"
    acts_on = "scores"

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("slopes", torch.tensor(alibi_slopes(config.n_head)), persistent=False)

    def bias(self, q, qpos, kpos):
        # (B or 1, 1, T, S), 0 or less where the key is seen
        distance = kpos[:, None, None, :] - qpos[:, None, :, None]
        return (distance * self.slopes[:, None, None]).type_as(q)


def alibi_slopes(n):
    """The authors' slopes of n heads: 2^(-8i/n), i = 1..n. Where n is no power of two, the slopes
    of the power below, then every other slope of the power above."""
    power = 2 ** math.floor(math.log2(n))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    if power < n:
        slopes += alibi_slopes(2 * power)[0::2][: n - power]
    return slopes


class Relative(Position):
    """scores + q · a[distance] / sqrt(D), a key vector per distance up to relative_clip; one table
    for all layers and heads."""

    paper = "Shaw et al. 2018, arXiv:1803.02155"
    acts_on = "scores"
    reads = ("relative_clip",)

    def __init__(self, config):
        super().__init__(config)
        self.n_head = config.n_head
        self.weight = nn.Parameter(torch.empty(config.relative_clip + 1, head_width(config)))

    def reset(self):
        nn.init.normal_(self.weight, 0.0, STD)

    def flops(self, T):
        """q · a for every distance and head."""
        return 2 * self.n_head * self.weight.numel()

    def bias(self, q, qpos, kpos):
        distance = qpos[:, None, :, None] - kpos[:, None, None, :]
        distance = distance.clamp(0, len(self.weight) - 1)  # (B or 1, 1, T, S)
        scores = q @ self.weight.t() / math.sqrt(q.size(-1))  # (B, H, T, clip + 1)
        return scores.gather(-1, distance.expand(q.size(0), q.size(1), -1, -1))  # (B, H, T, S)


class T5(Position):
    """scores + b[bucket of the distance], a number per bucket and head; one table for all layers.

    The distances 0 .. 15 have a bucket each, the distances up to 128 share 16 more, on a
    logarithmic scale, and the last has all that are farther. As in T5's decoder; T5 does not divide
    q · k by sqrt(D).
    """

    paper = "Raffel et al. 2019, arXiv:1910.10683"
    acts_on = "scores"
    buckets = 32
    farthest = 128

    def __init__(self, config):
        super().__init__(config)
        self.std = config.n_embd**-0.5  # as transformers starts it
        self.weight = nn.Parameter(torch.empty(self.buckets, config.n_head))

    def reset(self):
        nn.init.normal_(self.weight, 0.0, self.std)

    def bias(self, q, qpos, kpos):
        distance = (qpos[:, :, None] - kpos[:, None, :]).clamp(min=0)  # (B or 1, T, S)
        exact = self.buckets // 2
        share = torch.log(distance / exact) / math.log(self.farthest / exact)  # of the way there
        far = exact + (share.clamp(0, 1) * exact).long().clamp(max=exact - 1)
        bucket = torch.where(distance < exact, distance, far)
        return F.embedding(bucket, self.weight).permute(0, 3, 1, 2).type_as(q)  # (B or 1, H, T, S)


# ---------------------------------------------------------------- slot: rope_scaling


class Scaling:
    """none: the frequencies theta^(-2i/D).

    Called with the exponents 2i/D (D/2), it returns the frequencies (D/2) of the pairs, and the
    factor by which q and k are both multiplied. s = rope_factor.
    """

    paper = ""

    def __init__(self, config):
        self.config = config

    def unscaled(self, exponent):
        return 1.0 / self.config.rope_theta**exponent

    def __call__(self, exponent):
        return self.unscaled(exponent), 1.0


class LinearScaling(Scaling):
    """Position interpolation: positions divided by s."""

    paper = "Chen et al. 2023, arXiv:2306.15595"

    def __call__(self, exponent):
        return self.unscaled(exponent) / self.config.rope_factor, 1.0


class NTK(Scaling):
    """theta multiplied by s^(D/(D-2)), so that the slowest pair is stretched s times and the
    fastest not at all. Also in YaRN, section 3.1."""

    paper = 'bloc97 2023, "NTK-aware scaled RoPE"'

    def __call__(self, exponent):
        D = 2 * len(exponent)
        theta = self.config.rope_theta * self.config.rope_factor ** (D / max(1, D - 2))
        return 1.0 / theta**exponent, 1.0


class YaRN(Scaling):
    """Pairs that turn more than `fast` times over rope_original tokens stay, the frequencies of
    pairs that turn less than `slow` times are divided by s, with a ramp between; q and k are both
    multiplied by 0.1 ln s + 1. The ramp begins and ends at whole pairs if `rounded`."""

    paper = "Peng et al. 2023, arXiv:2309.00071"
    fast = 32
    slow = 1
    rounded = True

    def pair_with(self, turns, D):
        """The index of the pair that turns so often over rope_original tokens, not rounded."""
        wavelength = self.config.rope_original / (turns * 2 * math.pi)
        return D * math.log(wavelength) / (2 * math.log(self.config.rope_theta))

    def __call__(self, exponent):
        D = 2 * len(exponent)
        s = self.config.rope_factor
        low = self.pair_with(self.fast, D)
        high = self.pair_with(self.slow, D)
        if self.rounded:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, D - 1)
        pairs = torch.arange(D // 2, device=exponent.device, dtype=torch.float32)
        ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
        freq = self.unscaled(exponent)
        temperature = 0.1 * math.log(s) + 1.0
        return freq / s * ramp + freq * (1 - ramp), temperature


class YaRNExact(YaRN):
    """As yarn, but the ramp may begin and end between two pairs."""

    paper = "gpt-oss, arXiv:2508.10925"
    rounded = False


class Llama3Scaling(Scaling):
    """Pairs with wavelengths above rope_original / low have their frequency divided by s, pairs
    below rope_original / high keep it, with a linear blend between."""

    paper = "LLaMA 3.1, arXiv:2407.21783"
    low = 1.0
    high = 4.0

    def __call__(self, exponent):
        freq = self.unscaled(exponent)
        turns = self.config.rope_original * freq / (2 * math.pi)
        smooth = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - smooth) * freq / self.config.rope_factor + smooth * freq, 1.0


# ---------------------------------------------------------------- for the parts of a forward pass


class Shared:  # a class, because fsdp gives each block copies of the dicts and lists it reads
    """What layers leave for the later layers of one forward pass, and for the model."""

    def __init__(self):
        self.by_name = {}
        self.routings = []  # of layers with experts; what recomputed blocks add later is not read


class Where(NamedTuple):
    """What every layer gets as `where`, beside its input x: the tokens of a forward pass, their
    positions, and what earlier layers left."""

    scheme: Position  # of the slot `position`
    pos: torch.Tensor  # (B or 1, T)
    angles: tuple | None  # scheme.angles(pos)
    idx: torch.Tensor  # (B, T) the tokens' ids
    shared: Shared
    first: torch.Tensor | None = None  # (B, T, C) the residual stream below the first block
