"""Two faster ways to compute Attention.attend without a cache: in blocks of a window on a CPU, and
by FlexAttention in a compiled model on a GPU. Both give the same values, to rounding.

Shapes: B batch, T tokens, H heads of queries, K heads of keys and values, D the width of a head,
n blocks.
"""

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from parts.cache import visible
from parts.position import Alibi

LONG = 512  # tokens; from here on a window of a quarter or less is faster in blocks


def choose(attention, q, scheme):
    """`flex` or `blocked` where one of them can and should do what `attention.attend` does with the
    queries q (B, H, T, D), else None."""
    if compiled_on_gpu(q) and suits_flex(attention, q, scheme):
        return flex
    if suits_blocked(attention, q, scheme):
        return blocked
    return None


def compiled_on_gpu(q):
    """Whether torch.compile traces a forward pass on a GPU."""
    return q.is_cuda and torch.compiler.is_compiling()


def drops_weights(attention):
    """Whether attention weights are dropped out in this forward pass."""
    return attention.training and attention.attn_dropout.p > 0


# ---------------------------------------------------------------- blocks of a window


def suits_blocked(attention, q, scheme):
    """Whether `blocked` fits and is faster: on a CPU, where the text is LONG and at least four
    blocks, without a bias or dropout of the scores."""
    T = q.size(2)
    block = attention.window or attention.group
    if block == 0 or max(LONG, 4 * block) > T:
        return False
    return q.device.type == "cpu" and scheme.acts_on != "scores" and not drops_weights(attention)


def blocked(attention, q, k, v, where):
    """attend() without most of the scores that the mask hides. The text is cut into blocks as long
    as the window; each attends to itself and to the block before it. A group is a block that
    attends to itself alone."""
    T = q.size(2)
    block = attention.window or attention.group
    q = in_blocks(q, block)  # (B, n, H, block, D)
    k = in_blocks(k, block)  # (B, n, K, block, D)
    v = in_blocks(v, block)
    # The same positions serve for every block, since each begins at a multiple of `block`.
    both = torch.arange(2 * block, device=q.device)[None]  # (1, 2 block), with the block before
    this = both[:, block:]
    if attention.group:
        y = attention.attend(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), this, this, mask=None, bias=None
        )
        y = y.unflatten(0, q.shape[:2])  # (B, n, H, block, D)
    else:
        first = attention.attend(q[:, 0], k[:, 0], v[:, 0], this, this, mask=None, bias=None)
        k = with_previous(k)  # (B (n - 1), K, 2 block, D)
        v = with_previous(v)
        mask = visible(this, both, attention.window)  # (1, 1, block, 2 block)
        rest = attention.attend(q[:, 1:].flatten(0, 1), k, v, this, both, mask=mask, bias=None)
        rest = rest.unflatten(0, (len(q), -1))  # (B, n - 1, H, block, D)
        y = torch.cat((first[:, None], rest), 1)
    return y.transpose(1, 2).flatten(2, 3)[:, :, :T]


def in_blocks(x, block):
    """x (B, heads, T, D) -> (B, n, heads, block, D), the last block filled up with zeros."""
    x = F.pad(x, (0, 0, 0, -x.size(2) % block))
    return x.unflatten(2, (-1, block)).transpose(1, 2)


def with_previous(x):
    """x (B, n, heads, block, D) -> (B (n - 1), heads, 2 block, D): each block after the first, with
    the one before it."""
    return torch.cat((x[:, :-1], x[:, 1:]), 3).flatten(0, 1)


# ---------------------------------------------------------------- FlexAttention


def suits_flex(attention, q, scheme):
    """Whether `flex` can and should do it: more than plain causal attention, no `attend` of a
    subclass, no dropout, no addition to the scores but ALiBi's bias, and heads of 16 or more, as
    its kernels need."""
    biased = scheme.acts_on == "scores"
    if biased and not isinstance(scheme, Alibi):
        return False
    if not (attention.window or attention.group or attention.softcap or biased):
        return False
    if attention.changes_scores or not attention.attends_plainly or drops_weights(attention):
        return False
    return q.size(-1) >= 16


def flex(attention, q, k, v, where):
    """attend() without the (T, T) matrix and without the blocks that nobody sees: FlexAttention
    (Dong et al. 2024, arXiv:2412.05496)."""
    window = attention.window
    group = attention.group
    softcap = attention.softcap
    scheme = where.scheme

    def seen(b, h, i, j):  # `visible`, of query i and key j
        sees = j <= i
        if window:
            sees = sees & (j > i - window)
        if group:
            sees = sees & (j // group == i // group)
        return sees

    def score(s, b, h, i, j):  # the score s of query i and key j in head h, as `attend` changes it
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        if isinstance(scheme, Alibi):
            s = s + scheme.slopes[h] * (j - i)
        return s

    T = q.size(2)
    if (window, group) not in where.shared.by_name:
        blocks = create_block_mask(seen, None, None, T, T, device=q.device)
        where.shared.by_name[window, group] = blocks
    blocks = where.shared.by_name[window, group]
    return flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True)
