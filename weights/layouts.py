"""
Layouts: how one tensor of another format holds several of ours, for reading and writing.

Shapes: C = n_embd, H = n_head, D = C / H, N = state_size, P = expand C / H.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """How one tensor of theirs holds n of ours. v is our configuration; a tensor is a matrix
    (out, in) or a bias (out,), and split may return views."""

    split: Callable  # (theirs, n, v) -> n of ours
    join: Callable  # (n of ours, v) -> theirs


def single(split, join):
    """The layout of a tensor that holds one of ours. Both functions: (tensor, v) -> tensor."""
    return Layout(lambda t, n, v: [split(t, v)], lambda parts, v: join(parts[0], v))


def split_by_head(t, n, v):
    heads = t.view(v["n_head"], n, v["n_embd"] // v["n_head"], *t.shape[1:])  # (H, 3, D, ...)
    return [part.flatten(0, 1) for part in heads.unbind(1)]


def join_by_head(parts, v):
    heads = [part.view(v["n_head"], -1, *part.shape[1:]) for part in parts]
    return torch.stack(heads, 1).flatten(0, 2)


def interleaved(t, heads):
    """Reorder the rows of each head from our order (2, D/2) to (D/2, 2), where the features that
    rope turns together are neighbours."""
    return t.view(heads, 2, -1, *t.shape[1:]).transpose(1, 2).reshape(t.shape)


def swap_halves(t, v):
    """Exchange the halves of each head."""
    D = v["head_dim"] or v["n_embd"] // v["n_head"]
    return t.unflatten(0, (-1, 2, D // 2)).flip(1).flatten(0, 2)


def split_mamba_maps(t, n, v):
    N, HP = v["state_size"], v["expand"] * v["n_embd"]
    return t.split([HP, HP, N, N, v["n_head"]])


def our_channels(t, v):
    """Reorder channels from v, k, q to q, k, v."""
    N, HP = v["state_size"], v["expand"] * v["n_embd"]
    return torch.cat(t.split([HP, N, N])[::-1])


def their_channels(t, v):
    N, HP = v["state_size"], v["expand"] * v["n_embd"]
    return torch.cat(t.split([N, N, HP])[::-1])


# The tensors are concatenated along the first dimension.
plain = Layout(lambda t, n, v: t.chunk(n), lambda parts, v: torch.cat(parts))
# The same, for matrices stored as (in, out); a bias is unchanged.
transposed = Layout(lambda t, n, v: t.t().chunk(n), lambda parts, v: torch.cat(parts).t())
# The query, key and value of each head follow one another.
by_head = Layout(split_by_head, join_by_head)
# All queries, then the single key, then the single value.
multi_query = Layout(
    lambda t, n, v: t.split([v["n_embd"], *[v["n_embd"] // v["n_head"]] * 2]), plain.join
)
# nanochat turns queries and keys by the negative angle: as if the halves of a head were exchanged.
swapped_halves = single(swap_halves, swap_halves)

# Mamba-2: z, v, k, q and the decay's numbers; in the convolution (channels, 1, tokens) v, k, q.
mamba_maps = Layout(split_mamba_maps, plain.join)
mamba_channels = single(our_channels, their_channels)
mamba_filters = single(
    lambda t, v: our_channels(t.squeeze(1), v), lambda t, v: their_channels(t, v).unsqueeze(1)
)
