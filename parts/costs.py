"""
What a configuration costs, in closed form: parameters, FLOPs, bytes of the cache and of training; and the MLP
width at which two configurations cost the same.

c is any object with the fields of VariantConfig. C = n_embd, H = n_head, K = n_kv_head, D = C / H, F width of
the MLP, L = n_layer, V = vocab_size, T tokens of context, B sequences.
"""

import math
from dataclasses import replace

# The words with numbers of their own. A word that is not here costs what the default at its `get` says: a part
# with other costs needs a line here, and tests/test_costs.py, which counts every word, says so.
GATED = (
    "glu",
    "bilinear",
    "reglu",
    "geglu",
    "swiglu",
)  # MLPs of three matrices; the others have two
NORM_VECTORS = {
    "rmsnorm": lambda c: 1,
    "batchnorm": lambda c: 2,
    "none": lambda c: 0,
}  # default: weight, bias if there are biases
NORM_SCALARS = {"dyt": 1}  # its alpha
BLOCK_NORMS = {"sandwich": 4, "parallel": 1}  # default 2
# What backward needs (activation_bytes), in eager mode on a CPU:
MLP_KEPT = {
    "relu": 1,
    "gelu": 6,
    "glu": 3,
    "bilinear": 3,
    "reglu": 3,
    "geglu": 8,
}  # tensors F wide; default 2, gated 4
NORM_KEPT = {
    "rmsnorm": 1,
    "dyt": 1,
}  # tensors C wide beside input and output: x / rms, tanh; default 0
BLOCK_INPUTS = {
    "sandwich": (2, 4),
    "parallel": (1, 1),
    "parallel2": (2, 1),
}  # tensors that matrices and norms read; default (2, 2)


def mlp_width(c):
    """F: as given, or 4C, or where gated 8C/3 rounded up to multiple_of: three matrices of 2/3 of 4C cost what
    two of 4C do."""
    if c.mlp_width or c.mlp not in GATED:
        return c.mlp_width or 4 * c.n_embd
    width = int((c.ffn_dim_multiplier or 1) * int(2 * 4 * c.n_embd / 3))
    return c.multiple_of * math.ceil(width / c.multiple_of)


def matrices(c):
    """{part: [(inputs, outputs)]} of one layer."""
    C, KD, F = c.n_embd, c.n_kv_head * (c.n_embd // c.n_head), mlp_width(c)
    into = 2 if c.mlp in GATED else 1
    return {"attention": [(C, C), (C, KD), (C, KD), (C, C)], "mlp": [(C, F)] * into + [(F, C)]}


def weights(shapes, rank):
    """Numbers in matrices of these shapes, or in their factors (inputs, r) and (r, outputs)."""
    return sum(rank * (n_in + n_out) if rank else n_in * n_out for n_in, n_out in shapes)


def parameter_table(c):
    """{part: parameters}, exact. In order: V C; a vector per place in the context (learned) or per distance
    (relative); matrices and biases; one vector or two per norm; V C again if it is not the embedding's."""
    C, D, biased = c.n_embd, c.n_embd // c.n_head, c.bias == "all"
    layer = {
        part: weights(shapes, c.low_rank) + biased * sum(n_out for _, n_out in shapes)
        for part, shapes in matrices(c).items()
    }
    heads = {"head": 2, "full": c.n_head + c.n_kv_head}.get(
        c.qk_norm, 0
    )  # how many heads' widths q_norm and k_norm have
    vectors = NORM_VECTORS.get(c.norm, lambda c: 1 + (c.bias != "none"))(c)
    norms = (
        c.n_layer * BLOCK_NORMS.get(c.block, 2) + (c.block != "post") + bool(c.embed_norm)
    )  # norm_f, norm_e
    return {
        "embedding": c.vocab_size * C,
        "position": {"learned": c.block_size * C, "relative": (c.relative_clip + 1) * D}.get(
            c.position, 0
        ),
        "attention": c.n_layer * (layer["attention"] + heads * D),
        "mlp": c.n_layer * layer["mlp"],
        "norms": norms * (vectors * C + NORM_SCALARS.get(c.norm, 0)),
        "head": 0 if c.tie_embeddings else c.vocab_size * C,
    }


def parameters(c):
    return sum(parameter_table(c).values())


def flops_per_token(c, T):
    """FLOPs of one token's forward pass in a context of T, a multiply-add being 2, as torch's counter has them:
    matrices and attention, not norms and activations. A matrix of n weights costs 2n. A query costs 2TC for its
    scores and 2TC for the sum of values, whether or not it sees all T: the counter has masked scores too, of
    which a good kernel skips most (a causal one does about half of these 4TC)."""
    layer = (
        sum(2 * weights(shapes, c.low_rank) for shapes in matrices(c).values()) + 4 * T * c.n_embd
    )
    if c.position == "relative":
        layer += 2 * c.n_embd * (c.relative_clip + 1)  # q · a[distance], H heads of 2D each
    return c.n_layer * layer + 2 * c.n_embd * c.vocab_size


def training_flops_per_token(c, T):
    """Three times the forward pass: backward multiplies twice, for the inputs and for the weights."""
    return 3 * flops_per_token(c, T)


def windows(c):
    """The window of each layer, 0 where it sees all."""
    return [
        0 if c.full_every and (layer + 1) % c.full_every == 0 else c.window
        for layer in range(c.n_layer)
    ]


def kv_bytes(c, T, bytes=4):
    """Bytes of keys and values held after T tokens of one sequence: 2 K D numbers per token and layer, of the
    last `window` tokens where a layer has a window (cache.py's ring). Query heads do not enter."""
    D = c.n_embd // c.n_head
    return sum(2 * c.n_kv_head * D * min(T, window or T) * bytes for window in windows(c))


def kv_bytes_per_token(c, bytes=4):
    """Bytes per token of a full context: 2 K D L numbers, fewer with windows."""
    return kv_bytes(c, c.block_size, bytes) / c.block_size


def activation_bytes(c, B, T, bytes=4):
    """Bytes that autograd keeps from forward to backward, eager on a CPU, without the parameters: within 1 % of
    what is counted for the named architectures and for each word: norms' means, angles and ids are left out. RMSNorm and GELU keep much: eager mode takes them for several operators."""
    C, H, KD, F, n = (
        c.n_embd,
        c.n_head,
        c.n_kv_head * (c.n_embd // c.n_head),
        mlp_width(c),
        c.n_layer,
    )
    normed, kept = c.norm != "none", NORM_KEPT.get(c.norm, 0)
    # What the matrices read and what the norms read, (B, T, C) each, and what norms keep besides.
    reads, norm_reads = BLOCK_INPUTS.get(c.block, (2, 2))
    stream = reads * C + normed * (norm_reads + kept * BLOCK_NORMS.get(c.block, 2)) * C
    shared = 0  # by all sequences
    if c.dropout or c.attn_softcap or c.position == "relative":
        # Not fused: q, k, v and output, keys and values repeated for each query head, and (B, H, T, T) tensors:
        # the softmax, what comes before it (tanh; scores with their bias), and dropout's mask and result.
        attention = 4 * C + H * T * (
            1 + bool(c.attn_softcap) + (c.position == "relative") + 2 * bool(c.dropout)
        )
    else:
        # Fused: q, k, v, output and H log-sums; the output once more, heads side by side, where q was rearranged.
        attention = 2 * C + 2 * KD + H + C * (c.position == "rope" or c.qk_norm == "head")
        shared = (
            n * T * T * (H if c.position == "alibi" else bool(c.window or c.block_local))
        )  # bias, or mask
    attention += 2 * (C + KD) * (c.qk_norm != "none")  # what these norms read, and x / rms
    mlp = MLP_KEPT.get(c.mlp, 4 if c.mlp in GATED else 2) * F
    factors = c.low_rank * sum(
        map(len, matrices(c).values())
    )  # what the second of two factors reads
    masks = (2 * n + 1) * C * bool(c.dropout)  # after the embedding and after each sublayer
    ends = (
        C + normed * ((c.block != "post") + bool(c.embed_norm)) * (1 + kept) * C
    )  # the head's input, norm_f, norm_e
    ends += c.vocab_size * (2 if c.logit_softcap else 1)  # log-probabilities, tanh
    return bytes * (B * T * (n * (stream + attention + mlp + factors) + masks + ends) + shared)


def memory_bytes(c, B, T, bytes=4):
    """Bytes that training holds at the end of a forward pass: weights, gradients and Adam's two moments, four
    numbers per parameter, and the activations. Backward's own temporaries come on top."""
    return 4 * parameters(c) * bytes + activation_bytes(c, B, T, bytes)


def match(c, base, what="params"):
    """(mlp_width, residual in percent): the width of the MLP at which c costs what base does, in parameters
    ("params") or in FLOPs of a full context ("flops"); a multiple of 8, or of 1 where 8 is too coarse for 0.5 %.
    "none": the width as it is, and the difference in parameters. ValueError where no sensible width does it."""
    cost = {
        "params": parameters,
        "none": parameters,
        "flops": lambda c: flops_per_token(c, base.block_size),
    }[what]
    goal = cost(base)

    def residual(width):
        return 100 * (cost(replace(c, mlp_width=width)) / goal - 1)

    if what == "none":
        return mlp_width(c), residual(mlp_width(c))
    # Both costs are straight lines in the width: two points give where the line meets the goal.
    slope = cost(replace(c, mlp_width=2)) - cost(replace(c, mlp_width=1))
    exact = 1 + (goal - cost(replace(c, mlp_width=1))) / slope
    for step in (8, 1):
        width = max(step, step * round(exact / step))
        if abs(residual(width)) <= 0.5 and width <= 8 * mlp_width(base):
            return width, residual(width)
    raise ValueError(
        f"no MLP width matches the base in {what} (it would be {exact:.0f}, the base has {mlp_width(base)}): "
        "choose match=none, or parts that cost less or more"
    )
