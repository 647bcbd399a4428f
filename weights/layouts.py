"""Layouts: how one tensor of another format holds several of ours, for reading and writing."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """How one tensor of theirs holds n of ours. v is our configuration; a tensor is a matrix
    (out, in) or a bias (out,), and split may return views."""

    split: Callable  # (theirs, n, v) -> n of ours
    join: Callable  # (n of ours, v) -> theirs


def split_by_head(t, n, v):
    heads = t.view(v["n_head"], n, v["n_embd"] // v["n_head"], *t.shape[1:])  # (H, 3, D, ...)
    return [part.flatten(0, 1) for part in heads.unbind(1)]


def join_by_head(parts, v):
    heads = [part.view(v["n_head"], -1, *part.shape[1:]) for part in parts]
    return torch.stack(heads, 1).flatten(0, 2)


def split_multi_query(t, n, v):
    D = v["n_embd"] // v["n_head"]
    return t.split([v["n_embd"], D, D])


# The tensors are concatenated along the first dimension.
plain = Layout(lambda t, n, v: t.chunk(n), lambda parts, v: torch.cat(parts))
# The same, for matrices stored as (in, out); a bias is unchanged.
transposed = Layout(lambda t, n, v: t.t().chunk(n), lambda parts, v: torch.cat(parts).t())
# The query, key and value of each head follow one another.
by_head = Layout(split_by_head, join_by_head)
# All queries, then the single key, then the single value.
multi_query = Layout(split_multi_query, plain.join)
