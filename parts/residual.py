"""The slot `residual`: how a sublayer reads the residual stream, and how its output is added.

Shapes: B batch, T tokens, C = n_embd, n = streams.
"""

import torch
import torch.nn as nn
from torch.nn import functional as F

from parts.part import Part


class Plain(Part):
    """Each sublayer reads the stream as it is, and its output is added to it."""

    paper = "He et al. 2015, arXiv:1512.03385"

    def __init__(self, config, layer, reads_per_block):
        """A block reads the stream twice, or once where its two sublayers are parallel."""
        super().__init__()

    def spread(self, x):
        """The residual stream below the first block, of the embedding x (B, T, C)."""
        return x

    def read(self, x, number, where):
        """(what the block's sublayer of this number reads (B, T, C), what `add` needs)."""
        return x, x

    def add(self, kept, *outputs):
        """The stream after a sublayer, or several that read the same; outputs (B, T, C)."""
        for y in outputs:
            kept = kept + y
        return kept

    def gathered(self, x):
        """(B, T, C) of the residual stream above the last block."""
        return x

    def reference(self, x, number, first, sublayer):
        """The stream after a sublayer, a function of (C), for one token; x and `first`, the
        embedding, (C)."""
        return x + sublayer(x)


class Scaled(Plain):
    """Each block reads keep x + again first, with two numbers of its own, at first 1 and 0."""

    paper = "nanochat, Karpathy 2025"

    def __init__(self, config, layer, reads_per_block):
        super().__init__(config, layer, reads_per_block)
        self.keep = nn.Parameter(torch.ones(1))
        self.again = nn.Parameter(torch.zeros(1))

    def reset(self):
        nn.init.ones_(self.keep)
        nn.init.zeros_(self.again)

    def read(self, x, number, where):
        if number == 0:
            x = self.keep * x + self.again * where.first
        return x, x

    def reference(self, x, number, first, sublayer):
        if number == 0:
            x = self.keep * x + self.again * first
        return x + sublayer(x)


class Connection(Part):
    """What one sublayer F, the k-th of the model, does to the n streams X (n, C) of a token:

        X'_j = sum_i A_ij X_i + b_j F(sum_i a_i X_i)

    a (n), A (n, n) and b (n) are a one at k mod n, the identity and ones, plus learned numbers,
    plus s tanh(norm(X_i) W), which the token decides. W is (C, n + 2), and there is one s for a and
    A and one for b. norm is RMSNorm without a weight, which W could take over.
    """

    def __init__(self, config, k):
        super().__init__()
        C, n = config.n_embd, config.streams
        self.n, self.own = n, k % n
        self.mix = nn.Parameter(torch.empty(n * (n + 1)))  # of a and A, row i: a_i, A_i1 .. A_in
        self.write = nn.Parameter(torch.empty(n))  # of b
        self.by_token = nn.Parameter(torch.empty(n + 2, C))  # W, transposed
        self.strength = nn.Parameter(torch.empty(2))  # s

    def reset(self):
        """As in the paper, whose code also starts s at 0.01."""
        for p in (self.mix, self.write, self.by_token):
            nn.init.zeros_(p)
        nn.init.constant_(self.strength, 0.01)

    def read(self, x):
        """x (B, T, n, C) -> what F reads (B, T, C), and A x (B, T, n, C) with b (B, T, n, 1)."""
        decided = torch.tanh(F.linear(F.rms_norm(x, x.shape[-1:]), self.by_token))
        mix, write = decided.split((self.n + 1, 1), -1)  # (B, T, n, n + 1), (B, T, n, 1)
        mix = self.mix.view(self.n, -1) + self.strength[0] * mix
        write = 1 + self.write[:, None] + self.strength[1] * write

        # What differs from the plain stream is small, and may be rounded to 16 bits.
        added = mix.mT @ x  # (B, T, n + 1, C)
        return x[..., self.own, :] + added[..., 0, :], (x + added[..., 1:, :], write)

    def reference(self, x, sublayer):
        """The formula with numbers, one pair of streams at a time; x (n, C)."""
        n, learned = self.n, self.mix.view(self.n, -1)
        a, A, b = torch.zeros(n).to(x), torch.zeros(n, n).to(x), torch.zeros(n).to(x)
        for i in range(n):
            normed = x[i] / x[i].square().mean().sqrt()
            up, down = ((sign * self.by_token @ normed).exp() for sign in (1, -1))
            tanh = (up - down) / (up + down)
            a[i] = (i == self.own) + learned[i, 0] + self.strength[0] * tanh[0]
            b[i] = 1 + self.write[i] + self.strength[1] * tanh[n + 1]
            for j in range(n):
                A[i, j] = (i == j) + learned[i, 1 + j] + self.strength[0] * tanh[1 + j]

        y = sublayer(sum(a[i] * x[i] for i in range(n)))
        return torch.stack([sum(A[i, j] * x[i] for i in range(n)) + b[j] * y for j in range(n)])


class Hyper(Plain):
    """Hyper-connections: n streams, of which a sublayer reads a mix, writes to each, and mixes them
    with one another; the mixes depend on the token. At first all is as in `plain`, to the last bit
    with 2 or 4 streams: they start equal and stay so, and the model ends with their mean.

    The paper's dynamic form. Its successor mHC (arXiv:2512.24880) keeps the mix of the streams
    doubly stochastic, which makes it stable at 27 billion parameters, but cannot start as `plain`.
    """

    paper = "Zhu et al. 2024, arXiv:2409.19606"
    reads = ("streams",)

    def __init__(self, config, layer, reads_per_block):
        super().__init__(config, layer, reads_per_block)
        self.n = config.streams
        self.width = config.n_embd
        first = layer * reads_per_block
        numbers = range(first, first + reads_per_block)
        self.connections = nn.ModuleList(Connection(config, k) for k in numbers)

    def spread(self, x):
        return x[..., None, :].expand(-1, -1, self.n, -1)  # (B, T, n, C)

    def read(self, x, number, where):
        return self.connections[number].read(x)

    def add(self, kept, *outputs):
        x, write = kept
        for y in outputs:
            x = x + write * y[..., None, :]
        return x

    def gathered(self, x):
        return x.mean(-2)

    def reference(self, x, number, first, sublayer):
        return self.connections[number].reference(x, sublayer)

    def flops(self, T):
        """Per sublayer, what the token decides, and the n + 1 mixes."""
        n, C = self.n, self.width
        return len(self.connections) * (2 * n * C * (n + 2) + 2 * n * C * (n + 1))


RESIDUAL = {"plain": Plain, "scaled": Scaled, "hyper": Hyper}
