"""The slot `residual`: how a sublayer reads the residual stream, and how its output is added.

Shapes: B batch, T tokens, C = n_embd, n = streams.
"""

import torch
import torch.nn as nn
from torch.nn import functional as F

from parts.part import STD, Part, refuse


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
        """(the input (B, T, C) of the sublayer `number` of the block, the stream for `add`)."""
        return x, x

    def add(self, x, *outputs):
        """The stream after a sublayer, or after several that read the same; outputs (B, T, C)."""
        for y in outputs:
            x = x + y
        return x

    def gathered(self, x):
        """(B, T, C) of the residual stream above the last block."""
        return x


class Scaled(Plain):
    """Each block begins with x = keep x + again x_0, where x_0 is the embedding. keep starts at 1,
    again at 0."""

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


class Connection(Part):
    """What one sublayer F, the k-th of the model, does to the n streams X (n, C) of a token:

        X'_j = sum_i A_ij X_i + b_j F(sum_i a_i X_i)

    Each of a (n), A (n, n) and b (n) is a constant (a one at k mod n; the identity; ones), plus
    learned numbers, plus s tanh(norm(X_i) W), which depends on the token. W is (C, n + 2); a and A
    share one s, b has another. norm is RMSNorm without a weight, which W could take over.
    """

    def __init__(self, config, k):
        super().__init__()
        C = config.n_embd
        n = config.streams
        self.n = n
        self.own = k % n  # the stream that it reads, but for what is learned
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
        """x (B, T, n, C) -> the input of F (B, T, C), A^T x (B, T, n, C) and b (B, T, n, 1)."""
        decided = torch.tanh(F.linear(F.rms_norm(x, x.shape[-1:]), self.by_token))
        token_mix, token_write = decided.split((self.n + 1, 1), -1)
        # a and A but for their constants (B, T, n, n + 1), and b (B, T, n, 1)
        mix = self.mix.view(self.n, -1) + self.strength[0] * token_mix
        write = 1 + self.write[:, None] + self.strength[1] * token_write

        # Under autocast only this small difference to the plain stream is rounded to 16 bits.
        added = mix.mT @ x  # (B, T, n + 1, C)
        h = x[..., self.own, :] + added[..., 0, :]
        kept = x + added[..., 1:, :]
        return h, (kept, write)

    def flops(self, T):
        """The product of each stream with W, and the n + 1 mixes."""
        n = self.n
        C = self.by_token.size(1)
        return 2 * n * C * (n + 2) + 2 * n * C * (n + 1)


class Hyper(Plain):
    """Hyper-connections, the paper's dynamic form: n streams, of which a sublayer reads a mix,
    writes to each, and mixes them with one another. Before training it computes what `plain` does,
    to the last bit with 2 or 4 streams: they start as copies of the embedding and get equal
    outputs; the head reads their mean."""

    paper = "Zhu et al. 2024, arXiv:2409.19606"
    reads = ("streams",)
    connection = Connection

    def __init__(self, config, layer, reads_per_block):
        super().__init__(config, layer, reads_per_block)
        self.n = config.streams
        first = layer * reads_per_block
        self.connections = nn.ModuleList(
            self.connection(config, first + k) for k in range(reads_per_block)
        )

    def spread(self, x):
        return x[..., None, :].expand(-1, -1, self.n, -1)  # (B, T, n, C)

    def read(self, x, number, where):
        return self.connections[number].read(x)

    def add(self, stream, *outputs):
        x, write = stream  # as `read` returned them: (B, T, n, C), (B, T, n, 1)
        for y in outputs:
            x = x + write * y[..., None, :]
        return x

    def gathered(self, x):
        return x.mean(-2)

    def flops(self, T):
        return sum(connection.flops(T) for connection in self.connections)


def doubly_stochastic(x):
    """exp(x), n by n along the first two dimensions, whose columns and rows are divided by their
    sums in turn, 20 times (Sinkhorn & Knopp 1967). In logarithms, which cannot overflow."""
    for _ in range(20):
        x = x.log_softmax(0)
        x = x.log_softmax(1)
    return x.exp()


class ConstrainedConnection(Part):
    """What one sublayer F does to the n streams X (n, C) of a token:

        X'_i = sum_j A_ij X_j + b_i F(sum_j a_j X_j)

    As in the paper, A_ij is what stream i takes from j; in Connection it is what j takes from i.
    a = sigmoid(a~), b = 2 sigmoid(b~), and A is exp(A~) made doubly stochastic. Each of a~, b~ and
    A~ is s W norm(X) + c. W (n (n + 2), n C) reads all streams at once, the c are learned numbers,
    and there is one s for each of the three. norm is RMSNorm over the n C numbers. As in the paper,
    its weight is part of W, and its division follows the product.
    """

    def __init__(self, config, k=0):
        super().__init__()
        n = config.streams
        self.n = n
        self.fixed = nn.Parameter(torch.empty(n * (n + 2)))  # c: of a~, b~, and of A~ row by row
        self.by_token = nn.Parameter(torch.empty(n * (n + 2), n * config.n_embd))  # W
        self.strength = nn.Parameter(torch.empty(3))  # s: of a~, b~, A~

    def reset(self):
        """s starts at 0.01, as in the paper, which does not say how c and W start. Here they start
        as in the published code (transformers' DeepSeek-V4, Megatron-LM): c at 0 and W at random,
        like any matrix. Were W 0, the streams would start equal, get equal gradients, and so stay
        equal."""
        nn.init.zeros_(self.fixed)
        nn.init.normal_(self.by_token, 0.0, STD)
        nn.init.constant_(self.strength, 0.01)

    def read(self, x):
        """x (B, T, n, C) -> the input of F (B, T, C), and A x (B, T, n, C) with b (B, T, n, 1)."""
        n = self.n
        flat = x.flatten(-2)  # (B, T, n C)
        rms = torch.linalg.vector_norm(flat, dim=-1, keepdim=True) / flat.size(-1) ** 0.5
        decided = F.linear(flat, self.by_token) / rms.clamp(min=1e-6)  # W norm(X)
        decided = decided.movedim(-1, 0)  # (n (n + 2), B, T): Sinkhorn is fastest that way round
        token_a, token_b, token_A = decided.split((n, n, n * n))
        fixed_a, fixed_b, fixed_A = self.fixed[:, None, None].split((n, n, n * n))
        a = torch.sigmoid(self.strength[0] * token_a + fixed_a)  # (n, B, T)
        b = 2 * torch.sigmoid(self.strength[1] * token_b + fixed_b)  # (n, B, T)
        log_A = self.strength[2] * token_A + fixed_A  # A~, row by row
        A = doubly_stochastic(log_A.unflatten(0, (n, n)))  # (n, n, B, T)

        mix = torch.cat((a[None], A))  # (n + 1, n, B, T)
        mix = mix.permute(2, 3, 0, 1).contiguous()  # (B, T, n + 1, n)
        with torch.autocast(x.device.type, enabled=False):  # the streams keep their precision
            mixed = mix @ x  # (B, T, n + 1, C)
        h, kept = mixed.split((1, n), -2)
        b = b.movedim(0, -1)[..., None]  # (B, T, n, 1)
        return h.squeeze(-2), (kept, b)

    def flops(self, T):
        """The product of all streams with W, and the n + 1 mixes."""
        n = self.n
        width = self.by_token.size(1)
        return 2 * width * n * (n + 2) + 2 * width * (n + 1)


class Constrained(Hyper):
    """mHC, manifold-constrained hyper-connections: streams are read and written with positive
    weights, and their mix A is doubly stochastic, so that it keeps their mean and amplifies
    nothing, in however many layers.

    Before training, a is 1/2, b is 1 and A is 1/n, each but for about 0.005 that the token decides.
    Without that the model would compute what `plain` does, but for the scale n/2 of what a sublayer
    reads, which a norm ignores. As in `hyper`, the streams start as copies of the embedding, and
    the head reads their mean (the paper does not say what it reads).
    """

    paper = "Xie et al. 2025, arXiv:2512.24880"
    connection = ConstrainedConnection


class DepthMix(Part):
    """sum_j softmax_j(w · RMSNorm(h_j)) h_j, where w (C) is learned, h_0 is the embedding of a
    token and h_1, h_2, ... are what sublayers have written.

    As in the paper, w starts at 0, so that the mix starts as the mean. The RMSNorm of the paper has
    a weight, which w takes over here.
    """

    def __init__(self, config, count):
        """count: the number of h_j. The embedding alone needs no w."""
        super().__init__()
        self.count = count
        self.query = nn.Parameter(torch.empty(config.n_embd)) if count > 1 else None

    def reset(self):
        nn.init.zeros_(self.query)

    def forward(self, sources):
        """sources: [(h_j, RMSNorm(h_j)), ...], each (B, T, C). Returns (B, T, C)."""
        if self.query is None:
            return sources[0][0]
        scores = [F.linear(key, self.query[None]) for _, key in sources]  # each (B, T, 1)
        weights = torch.cat(scores, -1).softmax(-1).split(1, -1)
        return sum(weight * h for weight, (h, _) in zip(weights, sources, strict=True))

    def flops(self, T):
        """The scores. The weighted sum is not computed as a matrix product, and so not counted."""
        return 0 if self.query is None else 2 * self.count * self.query.numel()


class AttnRes(Plain):
    """Attention residuals, in the paper's full form: a sublayer reads a mix of the embedding and of
    what each sublayer before it wrote, and the head reads a mix of all. Sublayers that read
    together (block=parallel) write one h, their sum.

    Before training each reads the mean of the h, where with `plain` it would read their sum. A norm
    removes that difference, except that its eps weighs more against the smaller mean. The stream is
    the list of all (h, RMSNorm(h)); a training step keeps both.
    """

    paper = "Kimi Team 2026, arXiv:2603.15031"

    @classmethod
    def check(cls, config):
        refuse(
            config.block == "post",
            "residual=attn_res has no sum that block=post could normalize: choose another block",
        )

    def __init__(self, config, layer, reads_per_block):
        super().__init__(config, layer, reads_per_block)
        before = 1 + layer * reads_per_block
        after = before + reads_per_block
        self.mixes = nn.ModuleList(DepthMix(config, count) for count in range(before, after))
        if layer == config.n_layer - 1:
            self.mixes.append(DepthMix(config, after))  # of the head

    def spread(self, x):
        return self.add([], x)

    def read(self, x, number, where):
        return self.mixes[number](x), x

    def add(self, x, *outputs):
        y = sum(outputs)
        return [*x, (y, F.rms_norm(y, y.shape[-1:]))]

    def gathered(self, x):
        return self.mixes[-1](x)

    def flops(self, T):
        return sum(mix.flops(T) for mix in self.mixes)
