"""
What the table in families.py consists of: Family and Key, and for each tensor of theirs the layout
in which it holds some of ours, for reading and writing.

Shapes: C = n_embd, H = n_head, D = C / H, N = state_size, P = expand C / H.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Key(NamedTuple):
    """A key of theirs that has one of ours."""

    name: str
    default: object = int  # if the key is absent. A type: it must be there. None: ours
    words: dict | None = None  # {our word: their words, the first is the one we write}


class Family(NamedTuple):
    architecture: str  # the name of their class
    prefix: str  # of their tensor names; files without the head omit it
    slots: dict  # the values of VariantConfig that all its models share
    keys: dict  # {our key: Key}
    fixed: dict  # {their key: the value we can express, a tuple of several, or c -> them}
    names: list  # the `row` of each linear map and norm
    tensors: list = []  # the `row` of each other tensor, with its complete name; * is each expert
    absent: dict = {}  # {their key in `fixed`: what its absence means, if not that value}
    older: dict = {}  # other names of the same keys: {older: newer}
    in_rope: dict = {}  # names within rope_parameters: {name there: name in this table}


# ---------------------------------------------------------------- layouts


class Layout(NamedTuple):
    """How one tensor of theirs holds n of ours. v is our configuration; a tensor is a matrix
    (out, in) or a bias (out,), and split may return views."""

    split: Callable  # (theirs, n, v) -> n of ours
    join: Callable  # (n of ours, v) -> theirs


def single(split, join):
    """The layout of a tensor that holds one of ours. Both functions: (tensor, v) -> tensor."""
    return Layout(lambda t, n, v: [split(t, v)], lambda parts, v: join(parts[0], v))


def concatenate(parts, v):
    return torch.cat(parts)


def split_by_head(t, n, v):
    heads = t.view(v["n_head"], n, v["n_embd"] // v["n_head"], *t.shape[1:])  # (H, 3, D, ...)
    return [part.flatten(0, 1) for part in heads.unbind(1)]


def join_by_head(parts, v):
    heads = [part.view(v["n_head"], -1, *part.shape[1:]) for part in parts]
    return torch.stack(heads, 1).flatten(0, 2)


def split_multi_query(t, n, v):
    D = v["n_embd"] // v["n_head"]
    return t.split([v["n_embd"], D, D])


def swap_halves(t, v):
    """Exchange the halves of each head."""
    D = v["head_dim"] or v["n_embd"] // v["n_head"]
    return t.unflatten(0, (-1, 2, D // 2)).flip(1).flatten(0, 2)


def split_mamba_maps(t, n, v):
    N = v["state_size"]
    HP = v["expand"] * v["n_embd"]
    return t.split([HP, HP, N, N, v["n_head"]])


def our_channels(t, v):
    """Reorder channels from v, k, q to q, k, v."""
    N = v["state_size"]
    HP = v["expand"] * v["n_embd"]
    values, keys, queries = t.split([HP, N, N])
    return torch.cat([queries, keys, values])


def their_channels(t, v):
    N = v["state_size"]
    HP = v["expand"] * v["n_embd"]
    queries, keys, values = t.split([N, N, HP])
    return torch.cat([values, keys, queries])


# Theirs are ours, concatenated along the first dimension.
plain = Layout(lambda t, n, v: t.chunk(n), concatenate)
# The same, for matrices stored as (in, out); a bias is unchanged.
transposed = Layout(lambda t, n, v: t.t().chunk(n), lambda parts, v: torch.cat(parts).t())
# The query, key and value of each head follow one another.
by_head = Layout(split_by_head, join_by_head)
# All queries, then the single key, then the single value.
multi_query = Layout(split_multi_query, concatenate)
# nanochat turns queries and keys by the negative angle: as if the halves of a head were exchanged.
swapped_halves = single(swap_halves, swap_halves)

# Mamba-2: z, v, k, q and the decay's numbers; in the convolution (channels, 1, tokens) v, k, q.
mamba_maps = Layout(split_mamba_maps, concatenate)
mamba_channels = single(our_channels, their_channels)
mamba_filters = single(
    lambda t, v: our_channels(t.squeeze(1), v), lambda t, v: their_channels(t, v).unsqueeze(1)
)


# ---------------------------------------------------------------- rows of the table


def row(theirs, ours, layout=plain):
    """(theirs, [ours], layout): how one tensor of theirs holds some of ours, whose names have
    spaces between them. {} is the number of the layer; our names then are those within a block."""
    block = "blocks.{}." if "{}" in theirs else ""
    return theirs, [block + name for name in ours.split()], layout


def layer(theirs, ours, layout=plain):
    """The `row` of a tensor in a layer, whose name begins as in LLaMA."""
    return row(f"model.layers.{{}}.{theirs}", ours, layout)
