"""The word `mamba2` of the slot `mixer`.

Shapes: B batch, T tokens, C = n_embd, H = n_head, N = state_size, P = expand C / H, n chunks of c
tokens.
"""

import torch
import torch.nn as nn
from torch.nn import functional as F

from parts.recurrence import (
    StateMixer,
    chunk_size,
    decay_between,
    in_chunks,
    out_of_chunks,
)


class Mamba2(StateMixer):
    """S_t = alpha_t S_(t-1) + dt_t v_t k_tᵀ,  y_t = S_t q_t + skip v_t, the selective state space.

    The paper writes C, B and x for q, k and v, and D for skip. All heads share q and k (its
    ngroups=1). q, k and v come out of a short convolution. y is gated with silu(z), then normed.
    state_size: None is half of n_embd. With that and expand=1 the matrices have the 4 C² numbers of
    attention, and C H for dt; the paper's sizes are expand=2 and state_size=128.
    """

    paper = "Dao & Gu 2024, arXiv:2405.21060"

    def __init__(self, config, layer):
        C = config.n_embd
        H = config.n_head
        N = config.state_size or max(1, C // 2)
        P = config.expand * C // H
        shape = (N, H, P)  # the transposes of S
        super().__init__(config, shape, keys=N, norm_width=H * P, conv_bias=True)
        self.skip = nn.Parameter(torch.empty(H))

    def reset(self):
        nn.init.ones_(self.skip)

    def forward(self, x, where, cache=None):
        _, H, P = self.shape
        q, k, v = self.convolved(x, cache)
        v = v.unflatten(-1, (H, P))
        dt, log_alpha = self.decay(self.wa(x))  # (B, T, H)
        if cache is not None:
            dt = cache.without_padding(dt)  # where it is 0 nothing is written

        y = self.scan(cache, q, k, dt[..., None] * v, log_alpha)  # (B, T, H, P)
        y = (y.type_as(self.norm.weight) + self.skip[:, None] * v).flatten(2)
        return self.dropout(self.wo(self.norm(y * F.silu(self.wz(x)))))

    @staticmethod
    def step(S, q, k, v, log_alpha):
        """q, k (B, N), v (B, H, P) with dt in it, log_alpha (B, H), S (B, N, H, P)."""
        S = log_alpha.exp()[:, None, :, None] * S + k[:, :, None, None] * v[:, None]
        y = q[:, None] @ S.flatten(2)  # (B, 1, H P)
        return y.view_as(v), S

    @staticmethod
    def chunked(S, q, k, v, log_alpha):
        """q, k (B, T, N), v (B, T, H, P) with dt in it, log_alpha (B, T, H), S (B, N, H, P).

        Within a chunk this is attention without a softmax, times the decay between key and query;
        what earlier chunks wrote is read from S. Only S goes from chunk to chunk.
        """
        T = q.size(1)
        H, P = v.shape[2:]
        q = in_chunks(q).contiguous()  # (n, B, c, N)
        k = in_chunks(k).contiguous()  # (n, B, c, N)
        v = in_chunks(v).contiguous()  # (n, B, c, H, P)
        log_decay = in_chunks(log_alpha).cumsum(2)  # (n, B, c, H)
        from_start = log_decay.exp()[..., None]  # (n, B, c, H, 1), the decay since the chunk began
        to_end = (log_decay[:, :, -1:] - log_decay).exp()[..., None]  # the decay until it ends

        reads = (q @ k.mT)[:, :, None] * decay_between(log_decay.mT)  # (n, B, H, c, c)
        y = (reads @ v.transpose(2, 3)).transpose(2, 3)  # (n, B, c, H, P), from its own chunk
        written = k.mT @ (to_end * v).flatten(3)  # (n, B, N, H P), what is left at the end

        before = []
        for new, alpha in zip(written.unflatten(-1, (H, P)), from_start[:, :, -1], strict=True):
            before.append(S)
            S = alpha[:, None] * S + new
        old = q @ torch.stack(before).flatten(3)  # (n, B, c, H P), from earlier chunks
        return out_of_chunks(y + from_start * old.unflatten(-1, (H, P)), T), S

    def flops(self, T):
        """In a chunk q kᵀ (2cN), what q reads of v (2cHP) and two products with the state (2NHP
        each)."""
        N, H, P = self.shape
        c, filled = chunk_size(T)
        return filled * (2 * c * N + 2 * c * H * P + 4 * N * H * P)
