"""The formula of each mixer and of each word of attn_extra, written naively by its paper: one
token or one pair of tokens at a time. test_formulas.py runs them.

Shapes: B batch, T tokens, C = n_embd, H = n_head, K = n_kv_head, D the width of a head.
"""

import cmath
import itertools
import math
from types import SimpleNamespace

import torch
from references import POSITION, rmsnorm, rmsnorm_bare

# ---------------------------------------------------------------- mixer: of x (B, T, C) and `where`


def convolved(conv, x):
    """A short convolution of x (B, T, channels), with nothing before it."""
    y = torch.zeros_like(x) + (0 if conv.bias is None else conv.bias)
    for t in range(x.size(1)):
        for j in range(min(conv.width, t + 1)):
            y[:, t] += conv.weight[:, conv.width - 1 - j] * x[:, t - j]
    return y


def decayed(decay, a):
    """dt and alpha of a (B, T, H)."""
    dt = (1 + (a + decay.bias).exp()).log()
    return dt, (-decay.log_rate.exp() * dt).exp()


def with_conv(conv, y):
    """y + conv(y) where a site has a convolution, else y."""
    return y + convolved(conv, y) if hasattr(conv, "weight") else y


def in_heads(mixer, y, norm=None):
    """Queries, keys or values y (B, T, heads D) as (B, heads, T, D), normed if there is a norm."""
    scale = getattr(norm, "weight", 1)
    if norm is not None and mixer.qk_norm == "full":
        y = rmsnorm_bare(norm, y) * scale
    heads = torch.stack(y.split(mixer.head_dim, -1), 1)
    if norm is not None and mixer.qk_norm == "head":
        heads = rmsnorm_bare(norm, heads) * scale
    return heads


def attention(mixer, x, where):
    """One query, one head and one key at a time. A layer that makes no keys and values reads those
    of the last layer that has made some."""
    x = with_conv(mixer.conv, x)
    q = in_heads(mixer, with_conv(mixer.conv_q, mixer.wq(x)), mixer.q_norm)
    scheme, extras = POSITION[mixer.config.position], [ATTN_EXTRA[word] for word in mixer.extras]
    if hasattr(mixer, "wk"):
        k = in_heads(mixer, with_conv(mixer.conv_k, mixer.wk(x)), mixer.k_norm)
        v = in_heads(mixer, with_conv(mixer.conv_v, mixer.wv(x)))
        for extra, b, i in itertools.product(extras, range(x.size(0)), range(x.size(1))):
            v[b, :, i] = extra.value(mixer, v[b, :, i], x[b, i], where, b, i)
        where.shared.by_name["naive"] = k, v
    k, v = where.shared.by_name["naive"]
    y = torch.zeros_like(q)  # (B, H, T, D)
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        shared = h * mixer.n_kv_head // mixer.n_head  # the key and value head of this query head
        first = max(0, i - mixer.window + 1) if mixer.window else 0
        if mixer.group:
            first = i // mixer.group * mixer.group
        scores = []
        for j in range(first, i + 1):
            places = (i, j) if mixer.turns else (0, 0)
            score = scheme.score(where.scheme, q[b, h, i], k[b, shared, j], *places)
            if mixer.softcap:
                score = mixer.softcap * torch.tanh(score / mixer.softcap)
            scores.append(score + scheme.bias(where.scheme, q[b, h, i], h, i, j))
        weights = torch.stack(scores).exp()
        weight_sum = weights.sum() + sum(extra.weight(mixer, h) for extra in extras)
        seen = v[b, shared, first : i + 1]  # (keys, D)
        y[b, h, i] = (weights[:, None] * seen).sum(0) / weight_sum
        for extra in extras:
            y[b, h, i] = extra.output(mixer, y[b, h, i], x[b, i], v[b, shared, i], h)
    return with_conv(mixer.conv_out, mixer.wo(y.transpose(1, 2).flatten(2)))


# ---------------------------------------------------------------- attn_extra


def adding(
    value=lambda mixer, v, x, where, b, i: v,
    weight=lambda mixer, h: 0,
    output=lambda mixer, y, x, own, h: y,
):
    """A word by what it makes of the values v (K, D) of the token i of sequence b, with the input
    x (C); the weight that it adds to the sum of the head h; and what it makes of the head's output
    y (D) for the token x (C) with the value `own` (D)."""
    return SimpleNamespace(value=value, weight=weight, output=output)


def value_residual(mixer, v, x, where, b, i):
    if not hasattr(mixer, "share"):
        return v
    return v + mixer.share * (where.shared.by_name["values"][b, :, i] - v)


def value_embed(mixer, v, x, where, b, i):
    if not hasattr(mixer, "value_table"):
        return v
    scale = 2 / (1 + mixer.value_gate(x[:32]).neg().exp())  # (K)
    return v + scale[:, None] * mixer.value_table[where.idx[b, i]].view_as(v)


def gate(mixer, y, x, own, h):
    return y * mixer.gate(x).neg().exp().add(1).reciprocal().view(mixer.n_head, -1)[h]


ATTN_EXTRA = {
    "none": adding(),
    "sink": adding(weight=lambda mixer, h: mixer.sinks[h].exp()),
    "value_residual": adding(value=value_residual),
    "value_embed": adding(value=value_embed),
    "xsa": adding(output=lambda mixer, y, x, own, h: y - (y @ own) / (own @ own) * own),
    "gate_head": adding(output=gate),
    "gate_element": adding(output=gate),
}

# ---------------------------------------------------------------- other mixers


def differential(mixer, x, where):
    """One query, one pair of heads and one key at a time."""
    q = in_heads(mixer, mixer.wq(x), mixer.q_norm)
    k = in_heads(mixer, mixer.wk(x), mixer.k_norm)
    v = in_heads(mixer, mixer.wv(x))
    scheme = POSITION[mixer.config.position]
    pairs, shared_by = mixer.n_head // 2, mixer.n_head // mixer.n_kv_head
    q1, k1, q2, k2 = mixer.vectors()
    strength = math.exp(q1 @ k1) - math.exp(q2 @ k2) + mixer.start
    y = x.new_zeros(*x.shape[:2], pairs, 2 * q.size(-1))
    for b, h, i in itertools.product(range(len(x)), range(pairs), range(x.size(1))):
        first = max(0, i - mixer.window + 1) if mixer.window else 0
        weights = []
        for head in (h, h + pairs):
            key = k[b, head // shared_by]
            scores = [
                scheme.score(where.scheme, q[b, head, i], key[j], i, j)
                + scheme.bias(where.scheme, q[b, head, i], head, i, j)
                for j in range(first, i + 1)
            ]
            weights.append(torch.stack(scores).softmax(0))
        low = h // shared_by
        seen = torch.cat((v[b, low], v[b, low + mixer.n_kv_head // 2]), -1)[first : i + 1]
        mixed = (weights[0] - strength * weights[1]) @ seen
        y[b, i, h] = (1 - mixer.start) * rmsnorm(mixer.pair_norm, mixed)
    return mixer.wo(y.flatten(2))


def mla(mixer, x, where):
    """One query, one head and one key at a time."""
    (B, T), D, R = x.shape[:2], mixer.width, mixer.key_width
    y = x.new_zeros(B, T, mixer.n_head, D)
    width = int(R * where.scheme.config.rope_fraction) if hasattr(where.scheme, "config") else 0
    frequencies = [where.scheme.config.rope_theta ** (-2 * n / width) for n in range(width // 2)]
    for b, h, i in itertools.product(range(B), range(mixer.n_head), range(T)):
        q = mixer.wq(x[b, i])[h * (D + R) : (h + 1) * (D + R)]
        scores, seen = [], []
        for j in range(i + 1):
            down = mixer.wd(x[b, j])
            latent, shared = rmsnorm(mixer.latent_norm, down[: mixer.rank]), down[mixer.rank :]
            up = mixer.wu(latent)[2 * h * D : 2 * (h + 1) * D]
            score = q[:D] @ up[:D] + q[D + width :] @ shared[width:]
            for n, frequency in enumerate(frequencies):
                pair = complex(q[D + n], q[D + n + width // 2])
                pair *= complex(shared[n], -shared[n + width // 2])
                score = score + (pair * cmath.exp(1j * (i - j) * frequency)).real
            scores.append(score / math.sqrt(D + R))
            seen.append(up[D:])
        y[b, i, h] = torch.stack(scores).softmax(0) @ torch.stack(seen)
    return mixer.wo(y.flatten(2))


def gated_delta(mixer, x, where):
    """One sequence, head and token at a time."""
    H, N, P = mixer.shape
    qkv = convolved(mixer.conv, torch.cat((mixer.wq(x), mixer.wk(x), mixer.wv(x)), dim=-1))
    qkv = qkv / (1 + (-qkv).exp())
    q, k, v = (a.unflatten(-1, (H, -1)) for a in qkv.split((H * N, H * N, H * P), dim=-1))
    beta, (_, alpha) = 1 / (1 + (-mixer.wb(x)).exp()), decayed(mixer.decay, mixer.wa(x))
    y = torch.zeros_like(v)
    for b, h in itertools.product(range(len(x)), range(H)):
        S = x.new_zeros(P, N)
        for t in range(x.size(1)):
            query, key = (a / (a @ a + 1e-6).sqrt() for a in (q[b, t, h], k[b, t, h]))
            erase = torch.eye(N).to(x) - beta[b, t, h] * torch.outer(key, key)
            write = beta[b, t, h] * torch.outer(v[b, t, h], key)
            S = alpha[b, t, h] * S @ erase + write
            y[b, t, h] = S @ query / N**0.5
    z = mixer.wz(x).unflatten(-1, (H, P))
    return mixer.wo((rmsnorm(mixer.norm, y) * z / (1 + (-z).exp())).flatten(2))


def mamba2(mixer, x, where):
    """One sequence, head and token at a time."""
    N, H, P = mixer.shape
    qkv = convolved(mixer.conv, torch.cat((mixer.wq(x), mixer.wk(x), mixer.wv(x)), dim=-1))
    q, k, v = (qkv / (1 + (-qkv).exp())).split((N, N, H * P), dim=-1)
    v, (dt, alpha) = v.unflatten(-1, (H, P)), decayed(mixer.decay, mixer.wa(x))
    y = torch.zeros_like(v)
    for b, h in itertools.product(range(len(x)), range(H)):
        S = x.new_zeros(P, N)
        for t in range(x.size(1)):
            S = alpha[b, t, h] * S + dt[b, t, h] * torch.outer(v[b, t, h], k[b, t])
            y[b, t, h] = S @ q[b, t] + mixer.skip[h] * v[b, t, h]
    z = mixer.wz(x)
    return mixer.wo(rmsnorm(mixer.norm, y.flatten(2) * z / (1 + (-z).exp())))


MIXER = {
    "attention": attention,
    "differential": differential,
    "gated_delta": gated_delta,
    "mamba2": mamba2,
    "mla": mla,
}
