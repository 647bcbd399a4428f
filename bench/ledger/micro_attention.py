"""Claims on attention that one small computation decides. Shapes as in micro.py."""

import math

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from bench.ledger import guide
from bench.ledger.micro import largest, model_of, normal
from parts.cache import KVCache


def formula(q, k, v, causal=True):
    """softmax(q kᵀ / sqrt(D)) v, as it is written; all (B, H, T, D)."""
    scores = q @ k.transpose(2, 3) / math.sqrt(q.size(-1))
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v


def attention_difference(dtype):
    """The largest difference between torch's attention kernel in this dtype and the formula in
    float32."""
    q, k, v = normal(3, 1, 4, 128, 32)
    kind = getattr(torch, dtype)
    fast = F.scaled_dot_product_attention(*(x.to(kind) for x in (q, k, v)), is_causal=True)
    return largest(fast.float() - formula(q, k, v))


@torch.no_grad()
def leak(name, *changes):
    """How much the logits before a token change when the token does."""
    model, idx = model_of(name, *changes)
    other, at = idx.clone(), idx.size(1) // 2
    other[0, at] = (other[0, at] + 1) % model.config.vocab_size
    return largest((model(idx)[0] - model(other)[0])[:, :at])


def printed_leak(n_kv_head):
    """How much the output at token 2 of the guide's attention changes when token 5 does."""
    n_kv_head, x = int(n_kv_head), normal(1, 8, 48)
    weights = [normal(rows, 48, seed=rows) / 7 for rows in (48, 4 * n_kv_head, 4 * n_kv_head)]
    other = x.clone()
    other[0, 5] += 1
    before, after = (guide.shared_attention(each, *weights, n_head=12) for each in (x, other))
    return largest((after - before)[:, 2])


def masked_row_sum():
    """The least sum of a query's weights when masked ones are set to 0 after the softmax."""
    weights = normal(16, 16).softmax(-1)
    return weights.tril().sum(-1).min().item()


def embedding_gradient(name, *changes):
    """The norm [T] of the gradient of the last token's logits by each token's embedding."""
    model, idx = model_of(name, *changes)
    seen = []
    hook = model.wte.register_forward_hook(lambda module, args, out: seen.append(out))
    model(idx)[0][0, -1].square().sum().backward(inputs=seen[:1])
    hook.remove()
    return seen[0].grad[0].norm(dim=-1)


def first_token_gradient(name, *changes):
    """The norm of the gradient of the last token's logits by the first token's embedding."""
    return embedding_gradient(name, *changes)[0].item()


def reach(name, *changes):
    """How many tokens back the last token's logits still depend on."""
    gradient = embedding_gradient(name, *changes)
    return len(gradient) - 1 - int(gradient.nonzero()[0])


def score_flops(n_head, n_kv_head, T=100, D=64):
    """The FLOPs of scores and weighted values, q kᵀ and P v, by torch's counter."""
    n_head, n_kv_head = int(n_head), int(n_kv_head)
    q, k, v = normal(1, n_head, T, D), normal(1, n_kv_head, T, D), normal(1, n_kv_head, T, D)
    with FlopCounterMode(display=False) as counter:
        k, v = (x.repeat_interleave(n_head // n_kv_head, 1) for x in (k, v))
        formula(q, k, v, causal=False)
    return counter.get_total_flops()


def group_difference(order):
    """The difference between torch's grouped-query attention and one whose key heads are repeated
    each (interleave) or as a whole (tile)."""
    q, k, v = normal(1, 8, 16, 8), *normal(2, 1, 2, 16, 8, seed=1)
    grouped = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    repeat = {
        "interleave": lambda x: x.repeat_interleave(4, 1),
        "tile": lambda x: x.repeat(1, 4, 1, 1),
    }
    return largest(grouped - formula(q, repeat[order](k), repeat[order](v), causal=False))


@torch.no_grad()
def cache_difference(name, *changes):
    """The difference between the logits of one forward pass and those of one token at a time with a
    cache."""
    model, idx = model_of(name, *changes)
    cache = KVCache()
    single = [model(token, cache=cache)[0] for token in idx.split(1, dim=1)]
    return largest(torch.cat(single, 1) - model(idx)[0])


def saved_bytes(kind, T, n_head="4", D="32"):
    """The bytes that attention keeps for its backward pass: `formula` or torch's `kernel`."""
    sizes = {}
    attend = {
        "formula": formula,
        "kernel": lambda *parts: F.scaled_dot_product_attention(*parts, is_causal=True),
    }[kind]

    def pack(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    shape = 1, int(n_head), int(T), int(D)
    q, k, v = (normal(*shape, seed=seed).requires_grad_() for seed in range(3))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attend(q, k, v).sum()
    return sum(sizes.values())


def softmax_gradient(D):
    """The gradient through a softmax over 64 keys without the division by sqrt(D), over that with
    it: mean norms over 256 queries."""
    D = int(D)
    scores = normal(256, D) @ normal(64, D, seed=1).t()  # (256, 64)

    def norm(x):
        x = x.clone().requires_grad_()
        (x.softmax(-1) * normal(256, 64, seed=2)).sum().backward()
        return x.grad.norm(dim=-1).mean().item()

    return norm(scores) / norm(scores / math.sqrt(D))
