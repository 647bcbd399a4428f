"""
Layouts of GGUF: how several of its tensors hold one of Hugging Face's. Other than in layouts.py,
`split` leads from Hugging Face's to GGUF's, and takes Hugging Face's config.json c.

Shapes: H heads, C = hidden_size, D the width of a value, L = kv_lora_rank, N and P the widths of a
key and of a value with a state.
"""

import torch

from weights.layouts import Layout, halves, interleaved, single


def rotated(heads_key):
    """Rope turns the features (i, i + D/2) of a head in Hugging Face's form, (2i, 2i + 1) in GGUF's
    llama. A reader that ignores this gets a model that works, but badly."""
    return single(lambda t, c: interleaved(t, c[heads_key]), lambda t, c: halves(t, c[heads_key]))


def log_rates(rates):
    """The logarithms whose exponentials are these rates (fp32), to the bit where there is such a
    logarithm: the nearest fp32 number or a neighbour of it."""
    found = rates.double().log().float()
    for towards in (-torch.inf, torch.inf):
        near = torch.nextafter(found, torch.full_like(found, towards))
        found = torch.where((found.exp() != rates) & (near.exp() == rates), near, found)
    return found


# The decay as -exp(A_log), one number per head, in rows of their own for Mamba-2.
decays = single(lambda t, c: -t.exp(), lambda t, c: log_rates(-t.flatten()))
decay_rows = single(lambda t, c: -t.exp()[:, None], lambda t, c: log_rates(-t.flatten()))
rows = single(lambda t, c: t[:, None], lambda t, c: t.flatten())
flat = single(lambda t, c: t, lambda t, c: t.flatten())
single_row = single(lambda t, c: t.flatten(), lambda t, c: t.reshape(1, -1))
# A norm's weight, theirs less 1. Float64 keeps every bit of a weight above 2e-9.
from_zero = single(lambda t, c: t.double() + 1, lambda t, c: t.double() - 1)


def split_latent(t, n, c):
    keys, values = t.unflatten(0, (c["num_attention_heads"], 2, -1)).unbind(1)  # (H, D, L) each
    return keys.mT, values


def join_latent(parts, c):
    keys, values = parts
    return torch.stack((keys.mT, values), 1).flatten(0, 2)


def split_delta(t, n, c):
    heads = c["linear_num_value_heads"]
    N, P = c["linear_key_head_dim"], c["linear_value_head_dim"]
    parts = t.unflatten(0, (heads, -1)).split((N, N, P, P), 1)  # (H, N or P, C), of q, k, v and z
    q, k, v, z = (part.flatten(0, 1) for part in parts)
    return torch.cat((q, k, v)), z


def join_delta(parts, c):
    heads = c["linear_num_value_heads"]
    N, P = c["linear_key_head_dim"], c["linear_value_head_dim"]
    q, k, v = parts[0].split((heads * N, heads * N, heads * P))
    each = [part.unflatten(0, (heads, -1)) for part in (q, k, v, parts[1])]
    return torch.cat(each, 1).flatten(0, 1)


latent_maps = Layout(split_latent, join_latent)
delta_maps = Layout(split_delta, join_delta)
