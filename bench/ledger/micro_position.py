"""Claims on positions that one small computation decides. Shapes as in micro.py."""

import torch

from bench.ledger import guide
from bench.ledger.micro import largest, model_of, normal
from model_llama import rotary, rotate
from parts.position import alibi_slopes


def turned(x, pos, D=64, theta=10000.0):
    """x (D) rotated as LLaMA rotates a query or key at this position."""
    return rotate(x.view(1, 1, 1, D), *rotary(torch.tensor([[pos]]), theta, D)).flatten()


def rope_shift(by):
    """How much the score of a query at 3 and a key at 1 changes when both move, relative to the
    lengths of the two."""
    q, k = normal(2, 64)
    near, far = (turned(q, 3 + n) @ turned(k, 1 + n) for n in (0, int(by)))
    return (near - far).abs().item() / (q.norm() * k.norm()).item()


def rope_length(pos):
    """How much the length of a vector changes when it is rotated, relatively."""
    x = normal(64)
    return abs(turned(x, int(pos)).norm() / x.norm() - 1).item()


def rope_frequencies(D):
    """The number of different frequencies in a head of D."""
    _, sin = rotary(torch.tensor([[1]]), 10000.0, int(D))
    return sin.unique().numel()


def rope_decay(distance):
    """The score of two equal vectors of ones at this distance, over that at distance 0."""
    ones = torch.ones(64)
    return (turned(ones, int(distance)) @ ones).item() / 64


def rope_rises(farthest):
    """At how many distances that score is larger than at the distance before."""
    scores = torch.tensor([rope_decay(n) for n in range(int(farthest))])
    return int((scores.diff() > 1e-4).sum())


def random_decay(distance):
    """The mean absolute score of random queries and keys at this distance, over that at 0."""
    q, k = normal(2, 2000, 1, 1, 64)
    far = rotate(q, *rotary(torch.tensor([[int(distance)]]), 10000.0, 64))
    return ((far * k).sum(-1).abs().mean() / (q * k).sum(-1).abs().mean()).item()


def angle_grows():
    """The share of steps from one distance to the next, up to 100, at which the angle between the
    two vectors of the fastest pair grows."""
    angle = torch.acos(torch.cos(torch.arange(100.0)))
    return (angle.diff() > 0).float().mean().item()


def angle_error(dtype, pos):
    """The largest error of a cosine whose angle was rounded to this dtype."""
    freq = 1.0 / 10000 ** (torch.arange(0, 64, 2).double() / 64)
    exact = int(pos) * freq
    return largest(exact.to(getattr(torch, dtype)).double().cos() - exact.cos())


def layout_difference(permuted):
    """The difference between scores with neighbouring pairs and with halves, when the weights of
    the second are permuted to fit (yes) or are not (no), relative to the largest score."""
    D, x = 64, normal(1, 16, 64)
    wq, wk = normal(2, D, 64, seed=1) / 8
    order = torch.cat((torch.arange(0, D, 2), torch.arange(1, D, 2)))
    cos, sin = rotary(torch.arange(16)[None], 10000.0, D)  # (1, 1, T, D/2)

    def neighbours(x):
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)

    def scores(turn, wq, wk):
        q, k = (turn((x @ w.t())[:, None]) for w in (wq, wk))
        return q @ k.transpose(2, 3)

    own = scores(neighbours, wq, wk)
    if permuted == "yes":
        wq, wk = wq[order], wk[order]
    other = scores(lambda x: rotate(x, cos, sin), wq, wk)
    return largest(own - other) / largest(own)


def reads(name, times):
    """1 if a model reads so many times its training context, 0 if it refuses."""
    model, idx = model_of(name)
    try:
        model(idx.repeat(1, int(times)))
    except (ValueError, RuntimeError, IndexError):
        return 0
    return 1


def printed_rope_reads(times):
    """The same of the guide's RoPE, whose table has as many rows as the training context."""
    try:
        guide.rope(normal(1, 1, int(times) * 32, 16), *guide.rope_table(32, 16))
    except RuntimeError:
        return 0
    return 1


def unused_position_gradient():
    """The gradient of the learned positions beyond the tokens that a batch has."""
    model, idx = model_of("gpt2@tiny")
    half = idx.size(1) // 2
    model(idx[:, :half], idx[:, :half])[1].backward()
    return largest(model.wpe.weight.grad[half:])


def stored_buffers(name):
    """The number of tensors in a model's state that are no parameters."""
    model, _ = model_of(name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return len(model.state_dict().keys() - parameters.keys())


def duplicate_slopes(whose, n):
    """How many of n ALiBi slopes repeat another: `authors` or `guide`."""
    slopes = {"authors": alibi_slopes, "guide": guide.slopes}[whose](int(n))
    return len(slopes) - len({round(slope, 9) for slope in slopes})


def mean_distance(sign):
    """The mean distance that the last of 64 queries looks back with a bias of `sign` 0.25 per token
    of distance, minus that without a bias."""
    distance = torch.arange(63, -1, -1.0)
    biased = (float(sign + "1") * 0.25 * distance).softmax(0)
    return (biased @ distance - distance.mean()).item()
