"""The word `gated_delta` of the slot `mixer`.

Shapes: B batch, T tokens, C = n_embd, H = n_head, N = state_size, P = expand C / H, n chunks of c
tokens.
"""

import torch
from torch.nn import functional as F

from parts.recurrence import (
    StateMixer,
    chunk_size,
    decay_between,
    in_chunks,
    out_of_chunks,
    precise,
)


class GatedDelta(StateMixer):
    """S_t = alpha_t S_(t-1) (I - beta_t k_t k_tᵀ) + beta_t v_t k_tᵀ,  y_t = S_t q_t.

    The state forgets a share 1 - alpha of all it holds, and what it holds under the key k moves
    towards v by the share beta. q, k and v come out of a short convolution, and q and k have length
    1. y is normed per head and gated with silu(z). All this is as in Qwen3-Next, whose code also
    divides q by sqrt(N). state_size: of a key, None: half a head. With that and expand=1 the
    matrices have the 4 C² numbers of attention, and 2 C H for alpha and beta.
    """

    paper = "Yang et al. 2024, arXiv:2412.06464"

    def __init__(self, config, layer):
        C = config.n_embd
        H = config.n_head
        N = config.state_size or max(1, C // H // 2)
        P = config.expand * C // H
        shape = (H, N, P)  # the transpose of S
        super().__init__(config, shape, keys=H * N, norm_width=P, conv_bias=False, writes=True)

    def forward(self, x, where, cache=None):
        H, N, P = self.shape
        q, k, v = self.convolved(x, cache)
        q = unit(precise(q).unflatten(-1, (H, N)))  # (B, T, H, N)
        k = unit(precise(k).unflatten(-1, (H, N)))  # (B, T, H, N)
        v = v.unflatten(-1, (H, P))  # (B, T, H, P)
        beta = self.wb(x).sigmoid()  # (B, T, H)
        _, log_alpha = self.decay(self.wa(x))  # (B, T, H)

        # Padding writes nothing: its v is 0, since the convolution has no bias.
        y = self.scan(cache, q, k, v, log_alpha, beta).type_as(self.norm.weight)  # (B, T, H, P)
        y = self.norm(y) * F.silu(self.wz(x)).unflatten(-1, (H, P))
        return self.dropout(self.wo(y.flatten(2)))

    @staticmethod
    def step(S, q, k, v, log_alpha, beta):
        """q, k (B, H, N), v (B, H, P), log_alpha, beta (B, H), S (B, H, N, P)."""
        q = q[..., None, :] * q.size(-1) ** -0.5  # (B, H, 1, N)
        k = k[..., None, :]  # (B, H, 1, N)
        v = v[..., None, :]  # (B, H, 1, P)
        S = log_alpha.exp()[..., None, None] * S
        held = k @ S  # (B, H, 1, P), what the state holds under k
        S = S + k.mT @ (beta[..., None, None] * (v - held))
        return (q @ S).squeeze(-2), S

    @staticmethod
    def chunked(S, q, k, v, log_alpha, beta):
        """q, k (B, T, H, N), v (B, T, H, P), log_alpha, beta (B, T, H), S (B, H, N, P).

        What a token writes depends on what earlier tokens wrote under keys like its own. Within a
        chunk these are c linear equations for what the tokens write, W: (I + A) W = beta (v -
        from_start k S), where A_ij = beta_i k_i · k_j left_ij for j < i. All chunks are solved at
        once, for beta v and for beta from_start k. Then only S goes from chunk to chunk.
        """
        T = q.size(1)
        N = q.size(-1)
        P = v.size(-1)
        q = q * N**-0.5
        q = in_chunks(q).transpose(2, 3).contiguous()  # (n, B, H, c, N)
        k = in_chunks(k).transpose(2, 3).contiguous()  # (n, B, H, c, N)
        v = in_chunks(v).transpose(2, 3).contiguous()  # (n, B, H, c, P)
        log_alpha = in_chunks(log_alpha).transpose(2, 3).contiguous()  # (n, B, H, c)
        beta = in_chunks(beta).transpose(2, 3).contiguous()  # (n, B, H, c)
        log_decay = log_alpha.cumsum(-1)  # since the chunk began
        left = decay_between(log_decay)  # (n, B, H, c, c)
        from_start = log_decay.exp()[..., None]  # (n, B, H, c, 1), the decay since the chunk began
        to_end = (log_decay[..., -1:] - log_decay).exp()[..., None]  # the decay until it ends

        k_beta = beta[..., None] * k
        A = (k_beta @ k.mT) * left
        right = torch.cat((beta[..., None] * v, from_start * k_beta), dim=-1)
        # unitriangular: takes the diagonal of A as ones, which is I + A.
        solved = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
        W_v, W_k = solved.split((P, N), dim=-1)  # W = W_v - W_k S

        reads = (q @ k.mT) * left  # (n, B, H, c, c), what token i reads of what token j writes
        q_old = from_start * q
        k_end = to_end * k
        alpha = from_start[..., -1:, :]  # the decay of a whole chunk
        outputs = []
        for w_v, w_k, read, q_n, k_n, alpha_n in zip(
            W_v, W_k, reads, q_old, k_end, alpha, strict=True
        ):
            W = w_v - w_k @ S  # (B, H, c, P)
            outputs.append(q_n @ S + read @ W)
            S = alpha_n * S + k_n.mT @ W
        return out_of_chunks(torch.stack(outputs).transpose(2, 3), T), S

    def flops(self, T):
        """In a chunk, per head: k kᵀ and q kᵀ (2cN each), what q reads of W (2cP) and three
        products with the state (2NP each). Torch does not count the equations, c (N + P) more."""
        H, N, P = self.shape
        c, filled = chunk_size(T)
        return filled * H * (4 * c * N + 2 * c * P + 6 * N * P)


def unit(x, eps=1e-6):
    """x of length 1 over its last axis."""
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()
