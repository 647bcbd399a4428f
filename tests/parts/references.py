"""The formula of each word of each slot, written naively by its paper: one number, one token or one
pair of tokens at a time. A new word needs an entry in the dictionary of the same name here, which
test_formulas.py then runs. Mixers and the words of attn_extra stand in mixer_references.py.

Shapes: B batch, T tokens, C = n_embd, H = n_head, K = n_kv_head, D the width of a head.
"""

import cmath
import itertools
import math
from types import SimpleNamespace

import torch

# ---------------------------------------------------------------- mlp: of x (B, T, C)


def relu(x):
    return max(x, 0)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gelu_tanh(x):
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def clamped_swiglu(gate, up):
    """gpt-oss."""
    gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
    return (up + 1) * gate / (1 + math.exp(-1.702 * gate))


def plain(formula):
    """An MLP around an activation of one number."""
    return lambda mlp, x: mlp.down(mlp.up(x).detach().apply_(formula))


def gated(formula):
    return lambda mlp, x: mlp.down(mlp.gate(x).detach().apply_(formula) * mlp.up(x))


def experts(formula):
    """A mixture, one token and one expert at a time; `formula` of gate and up."""

    def moe(mlp, x):
        y = torch.zeros_like(x) if mlp.shared is None else MLP["swiglu"](mlp.shared, x)
        if mlp.shared_gate is not None:
            y = y / (1 + (-(x @ mlp.shared_gate.weight.mT)).exp())
        for place in itertools.product(*map(range, x.shape[:-1])):
            token, scores = x[place], [0.0]
            if mlp.router is not None:
                scores = mlp.router(token).tolist()
            gates, ranks = [math.exp(score) for score in scores], scores
            if mlp.balance == "bias":
                gates = [sigmoid(score) for score in scores]
                ranks = [g + float(b) for g, b in zip(gates, mlp.bias, strict=True)]
            best = sorted(range(len(ranks)), key=lambda i: -ranks[i])[: mlp.top_k]
            for i in best:
                gate, up = mlp.gate[i] @ token, mlp.up[i] @ token
                if mlp.gate_bias is not None:
                    gate, up = gate + mlp.gate_bias[i], up + mlp.up_bias[i]
                out = mlp.down[i] @ gate.detach().map_(up.detach(), formula)
                out = out if mlp.down_bias is None else out + mlp.down_bias[i]
                y[place] += gates[i] / sum(gates[j] for j in best) * out
        return y

    return moe


MLP = {
    "relu": plain(relu),
    "gelu": plain(gelu_tanh),
    "gelu_erf": plain(lambda x: x / 2 * (1 + math.erf(x / 2**0.5))),
    "silu": plain(silu),
    "relu2": plain(lambda x: relu(x) ** 2),
    "glu": gated(sigmoid),
    "bilinear": gated(lambda x: x),
    "reglu": gated(relu),
    "geglu": gated(gelu_tanh),
    "swiglu": gated(silu),
    "none": lambda mlp, x: 0 * x,
    "moe": experts(lambda gate, up: silu(gate) * up),
    "moe_clamped": experts(clamped_swiglu),
}

# ---------------------------------------------------------------- norm: of x (B, T, C)


def layernorm(norm, x):
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return normed * norm.weight + (0 if norm.bias is None else norm.bias)


def rmsnorm_bare(norm, x):
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


def rmsnorm(norm, x):
    return rmsnorm_bare(norm, x) * norm.weight


def batchnorm(norm, x):
    mean, var = norm.running_mean, norm.running_var
    if norm.training:
        mean, var = x.mean((0, 1)), x.var((0, 1), unbiased=False)
    return (x - mean) / (var + 1e-5).sqrt() * norm.weight + norm.bias


def dyt(norm, x):
    grown, shrunk = (norm.alpha * x).exp(), (-norm.alpha * x).exp()
    x = (grown - shrunk) / (grown + shrunk) * norm.weight
    return x if norm.bias is None else x + norm.bias


NORM = {
    "layernorm": layernorm,
    "rmsnorm": rmsnorm,
    "rmsnorm_bare": rmsnorm_bare,
    "batchnorm": batchnorm,
    "dyt": dyt,
    "none": lambda norm, x: x,
}

# ---------------------------------------------------------------- block and residual


def in_turn(step):
    """The two sublayers one after the other, where step(x, sublayer, norm, norm_out) adds one."""

    def formula(block, x, mix, mlp, norm1, norm2, *out):
        outs = out or (None, None)
        return step(step(x, mix, norm1, outs[0]), mlp, norm2, outs[1])

    return formula


BLOCK = {  # of x (B, T, C), the two sublayers, and the norms that the block has
    "pre": in_turn(lambda x, sublayer, norm, _: x + sublayer(norm(x))),
    "post": in_turn(lambda x, sublayer, norm, _: norm(x + sublayer(x))),
    "output": in_turn(lambda x, sublayer, norm, _: x + norm(sublayer(x))),
    "sandwich": in_turn(lambda x, sublayer, norm, out: x + out(sublayer(norm(x)))),
    "parallel": lambda block, x, mix, mlp, norm1: mlp(norm1(x)) + mix(norm1(x)) + x,
    "parallel2": lambda block, x, mix, mlp, norm1, norm2: mlp(norm2(x)) + mix(norm1(x)) + x,
}


def scaled(residual, x, number, first, sublayer):
    if number == 0:
        x = residual.keep * x + residual.again * first
    return x + sublayer(x)


def hyper(residual, x, number, first, sublayer):
    """With numbers, one pair of streams at a time; x (n, C)."""
    own = residual.connections[number]
    n, learned = own.n, own.mix.view(own.n, -1)
    a, A, b = torch.zeros(n).to(x), torch.zeros(n, n).to(x), torch.zeros(n).to(x)
    for i in range(n):
        normed = x[i] / x[i].square().mean().sqrt()
        up, down = ((sign * own.by_token @ normed).exp() for sign in (1, -1))
        tanh = (up - down) / (up + down)
        a[i] = (i == own.own) + learned[i, 0] + own.strength[0] * tanh[0]
        b[i] = 1 + own.write[i] + own.strength[1] * tanh[n + 1]
        for j in range(n):
            A[i, j] = (i == j) + learned[i, 1 + j] + own.strength[0] * tanh[1 + j]
    y = sublayer(sum(a[i] * x[i] for i in range(n)))
    return torch.stack([sum(A[i, j] * x[i] for i in range(n)) + b[j] * y for j in range(n)])


def mhc(residual, x, number, first, sublayer):
    """Equations 7 to 9 with numbers; x (n, C)."""
    own, n = residual.connections[number], len(x)
    normed = x.flatten() / x.square().mean().sqrt()
    raw = [
        own.strength[min(i // n, 2)] * (own.by_token[i] @ normed) + own.fixed[i]
        for i in range(n * (n + 2))
    ]
    pre, post = [sigmoid(r) for r in raw[:n]], [2 * sigmoid(r) for r in raw[n : 2 * n]]
    A = [[math.exp(r) for r in raw[(2 + i) * n : (3 + i) * n]] for i in range(n)]
    for _ in range(20):
        columns = [sum(A[i][j] for i in range(n)) for j in range(n)]
        A = [[A[i][j] / columns[j] for j in range(n)] for i in range(n)]
        A = [[a / sum(row) for a in row] for row in A]
    y = sublayer(sum(pre[j] * x[j] for j in range(n)))
    return torch.stack([sum(A[i][j] * x[j] for j in range(n)) + post[i] * y for i in range(n)])


def depth_mix(mix, sources):
    """What a layer reads, equations 2 to 4; sources: [h_0, h_1, ...], each (C)."""
    if len(sources) == 1:
        return sources[0]
    phi = [math.exp(mix.query @ h / h.square().mean().sqrt()) for h in sources]
    return sum(p / sum(phi) * h for p, h in zip(phi, sources, strict=True))


def attn_res(residual, x, number, first, sublayer):
    """x: [h_0, h_1, ...]."""
    return [*x, sublayer(depth_mix(residual.mixes[number], x))]


RESIDUAL = {  # the stream after a sublayer, for one token: x, and `first` the embedding, (C)
    "plain": lambda residual, x, number, first, sublayer: x + sublayer(x),
    "scaled": scaled,
    "hyper": hyper,
    "mhc": mhc,
    "attn_res": attn_res,
}

# ---------------------------------------------------------------- embed: the vector of a token


def ngram(embed, x, tokens):
    """x (C): the vector of the last of the tokens, which are all that have been read."""
    C = len(x)
    W = embed.width
    for n in range(2, embed.past + 2):
        number = 0  # of the n-gram, in base MULTIPLIER, the oldest token first
        for token in ([None] * n + tokens)[-n:]:
            digit = 0 if token is None else token + 1
            number = (number * 742938285 + digit) % 2147483647
        row = embed.tables[(n - 2) * embed.rows + number % embed.rows]
        if embed.up is not None:
            matrix = embed.up.weight[:, (n - 2) * W : (n - 1) * W]  # (C, W)
            row = torch.stack([matrix[c] @ row for c in range(C)])
        x = x + row
    return x


EMBED = {"token": lambda embed, x, tokens: x, "ngram": ngram}

# ---------------------------------------------------------------- position and rope_scaling


def dot(scheme, q, k, i, j):
    return q @ k / math.sqrt(len(q))


def acting(embed=lambda scheme, x, i: x, score=dot, bias=lambda scheme, q, head, i, j: 0):
    """A scheme by what it does to the embedding x (C) of a token at position i, the score of a
    query q (D) at i for a key k (D) at j, and what it adds to that score in the head `head`."""
    return SimpleNamespace(embed=embed, score=score, bias=bias)


def sinusoidal(scheme, x, i):
    C = len(x)
    angles = [i / 10000 ** (2 * (c // 2) / C) for c in range(C)]
    waves = [math.cos(a) if c % 2 else math.sin(a) for c, a in enumerate(angles)]
    return C**0.5 * x + torch.tensor(waves, dtype=x.dtype)


def rope(scheme, q, k, i, j):
    """Each pair as a complex number: q e^(i a i) times the conjugate of k e^(i a j)."""
    width = scheme.width
    half, score = width // 2, q[width:] @ k[width:]
    for n in range(half):
        turn = cmath.exp(1j * (i - j) * scheme.config.rope_theta ** (-2 * n / width))
        pair = complex(q[n], q[n + half]) * complex(k[n], -k[n + half])
        score = score + (pair * turn).real
    return score / math.sqrt(len(q))


def alibi(scheme, q, head, i, j):
    H = len(scheme.slopes)
    power = 2 ** math.floor(math.log2(H))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    slopes += [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)]
    return -slopes[head] * (i - j)


def relative(scheme, q, head, i, j):
    return q @ scheme.weight[min(i - j, len(scheme.weight) - 1)] / math.sqrt(len(q))


def t5(scheme, q, head, i, j):
    distance, exact = i - j, 16
    ends = [exact * (128 / exact) ** (n / exact) for n in range(exact)]
    bucket = distance if distance < exact else exact - 1 + sum(distance >= e for e in ends)
    return scheme.weight[bucket, head]


POSITION = {
    "none": acting(),
    "learned": acting(embed=lambda scheme, x, i: x + scheme.weight[i]),
    "sinusoidal": acting(embed=sinusoidal),
    "rope": acting(score=rope),
    "alibi": acting(bias=alibi),
    "relative": acting(bias=relative),
    "t5": acting(bias=t5),
}


def ntk(i, D, theta, s, original):
    return (theta * s ** (D / (D - 2))) ** (-2 * i / D), 1


def yarn(i, D, theta, s, original, rounded=True):
    """By the number of turns that a pair makes: at least 32 stay, at most 1 are divided by s."""
    pair_of = {
        n: D * math.log(original / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in (1, 32)
    }
    low, high = max(pair_of[32], 0), min(pair_of[1], D - 1)
    if rounded:
        low, high = max(math.floor(pair_of[32]), 0), min(math.ceil(pair_of[1]), D - 1)
    share, freq = min(1, max(0, (i - low) / max(high - low, 1e-3))), theta ** (-2 * i / D)
    return freq / s * share + freq * (1 - share), 0.1 * math.log(s) + 1


def llama3(i, D, theta, s, original):
    freq = theta ** (-2 * i / D)
    wavelength = 2 * math.pi / freq
    if wavelength > original:
        return freq / s, 1
    if wavelength < original / 4:
        return freq, 1
    blend = (original / wavelength - 1) / (4 - 1)
    return (1 - blend) * freq / s + blend * freq, 1


ROPE_SCALING = {  # (the frequency of the pair i of D / 2, the factor of q and k)
    "none": lambda i, D, theta, s, original: (theta ** (-2 * i / D), 1),
    "linear": lambda i, D, theta, s, original: (theta ** (-2 * i / D) / s, 1),
    "ntk": ntk,
    "yarn": yarn,
    "yarn_exact": lambda *args: yarn(*args, rounded=False),
    "llama3": llama3,
}
