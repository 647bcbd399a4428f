"""The gates that every part passes. `check` builds a model once and runs all of them on it."""

import itertools
import math
import re
from functools import cache

import torch

from helpers.variants import close, config, randomise, tokens
from parts.architectures import make
from parts.cache import KVCache
from parts.variant import VariantConfig
from sampling.reader import most_positions
from training.optim import muon_names, parameter_groups


def check(base, arm):
    """All gates, on one model of this arm."""
    c = config(base, arm)
    torch.manual_seed(0)
    model = make(c)
    sets_each_initial_value_once(model)
    learns(model)
    randomise(model)
    reads_zeros(model)
    with torch.no_grad():
        causality(model)
        cached(model)
        ragged(model)
        rewinds(model)
        if type(c) is VariantConfig and c != config(base):
            changes_logits(base_model(base), model, arm)


@cache
def base_model(base):
    """The corner as a Variant, with the random weights that all its arms are compared with."""
    return randomise(make(config(base)))


def sets_each_initial_value_once(model):
    """Each parameter is written once: torch counts the writes. What is not written stays NaN."""
    for p in model.parameters():
        p.data.fill_(math.nan)
    before = {key: p._version for key, p in model.named_parameters()}
    model.init_weights()
    for key, p in model.named_parameters():
        assert p.isfinite().all(), f"{key} has no initial value: set it in reset()"
        assert p._version == before[key] + 1, f"{key} is initialised twice: set it in reset() alone"


def learns(model):
    """The first loss is right, a gradient reaches every parameter, every parameter is in one group
    of the optimizers, one batch can be overfitted, and what is saved then is what was trained."""
    c = model.config
    x = tokens(c, 8)
    y = tokens(c, 8, seed=2)
    logits, loss = model(x, y)
    if getattr(c, "norm", "") != "none":  # without norms nothing holds the size of the logits
        expected = math.log(c.vocab_size) + logits.var(-1).mean().item() / 2
        assert abs(loss.item() - expected) < 0.1, "the first loss is not the loss of a guess"
    loss.backward()
    named = dict(model.named_parameters())
    for key, p in named.items():
        assert p.grad is not None, f"no gradient reaches {key}: forward does not use it"

    blocks = model.blocks.named_modules(prefix="blocks")
    maps = {f"{key}.weight" for key, module in blocks if isinstance(module, torch.nn.Linear)}
    matrices = maps | {key for key, p in named.items() if p.squeeze().dim() >= 2}
    taken = muon_names(model)
    assert maps <= taken, f"Muon leaves out {maps - taken}: name them in `muon`"
    shapes = {key: named[key].shape for key in taken - maps}
    flat = [key for key, shape in shapes.items() if len(shape) < 2 or min(shape[-2:]) == 1]
    assert not flat, f"`muon` names {flat}, which are no matrices"
    groups = parameter_groups(model, 0.1)
    grouped = sorted(key for group in groups for key, _ in group["params"])
    assert grouped == sorted(named), "the optimizer misses a parameter, or has one twice"
    decaying = {key: p for group in groups if group["weight_decay"] for key, p in group["params"]}
    for key, p in decaying.items():
        fits = key in matrices and not key.endswith("bias")
        assert fits, f"weight decay shrinks {key}, {tuple(p.shape)}: make it one-dimensional"

    still = set(named)  # what has had no gradient but 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, fused=True)
    for _ in range(12):
        still = {key for key in still if named[key].grad.abs().max() == 0}
        optimizer.zero_grad()
        after = model(x[:1], y[:1])[1]
        after.backward()
        if after < loss - 0.5 and not still:
            break
        optimizer.step()
    assert not still, f"the gradient of {sorted(still)} is 0 at each of 12 steps"
    assert after < loss - 0.5, f"12 steps on one batch lead from {loss:.2f} to {after:.2f} only"
    loaded = make(c)
    loaded.load_state_dict(model.state_dict())
    same = torch.equal(loaded.eval()(x)[0], model.eval()(x)[0])
    assert same, "a saved model computes something else: keep its state in register_buffer"


# ---------------------------------------------------------------- with random weights


def reads_zeros(model):
    """A norm gives a token whose features are all 0 a finite output and gradient."""
    norm = model.blocks[0].norm1
    x = torch.zeros(1, 3, model.config.n_embd, dtype=torch.float64, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert y.isfinite().all(), "the norm of a token of zeros is not finite: add an eps"
    grads = [x.grad, *(p.grad for p in norm.parameters())]
    finite = all(grad.isfinite().all() for grad in grads)
    assert finite, "the gradient of the norm at a token of zeros is not finite: add an eps"
    model.zero_grad()


def causality(model):
    """To the last bit, but for a mixture of experts: another token in the future may send another
    number of rows through an expert, whose product then rounds otherwise, by 1e-14 in float64."""
    c = model.config
    x = tokens(c)
    changed = x.clone()
    t = c.block_size // 2
    changed[:, t] = (changed[:, t] + 1) % c.vocab_size
    before = model(x)[0]
    after = model(changed)[0]
    tolerance = 1e-14 if getattr(c, "mlp", "").startswith("moe") else 0.0
    assert close(before[:, :t], after[:, :t], tolerance), "a token sees the future"
    assert not torch.equal(before[:, t:], after[:, t:]), "a token does not change its own logits"


def cached(model, cuts=None):
    """Prefill, single tokens and chunks give the logits of the full forward pass, also past
    block_size where the model has positions for it."""
    c = model.config
    if cuts is None:
        T = most_positions(model) or c.block_size + 9
        cuts = sorted({0, 7, 8, 9, 10, 17, *range(18, T + 1, 2 if T % 2 else 1), T})
    x = tokens(c, T=cuts[-1])
    full = model(x)[0]
    cache = KVCache()
    pieces = [model(x[:, a:b], cache=cache)[0] for a, b in itertools.pairwise(cuts)]
    assert close(torch.cat(pieces, 1), full), "the logits with a cache differ from those without"
    last = model(x[:, :9], cache=KVCache(), last_only=True)[0]
    assert close(last, full[:, 8:9]), "last_only=True gives other logits"


def ragged(model):
    """Two prompts of different lengths in one batch give the logits of each alone."""
    x = tokens(model.config)
    padded = torch.cat((x[0, :4], x[1, :6]))  # the second row has 4 tokens of padding
    cache = KVCache(pad=torch.tensor([0, 4]))
    prompts = torch.stack((x[0, :10], padded)).split((3, 7), dim=1)  # at first padding alone
    first = torch.cat([model(part, cache=cache)[0] for part in prompts], 1)
    then = model(torch.stack((x[0, 10:12], x[1, 6:8])), cache=cache)[0]
    for row, pad in ((0, 0), (1, 4)):
        alone = model(x[row : row + 1, : 12 - pad])[0][0]
        together = torch.cat((first[row, pad:], then[row]))
        assert close(together, alone), "padding changes the logits: see cache.without_padding"


def rewinds(model):
    """Reading, going back and reading something else is the same as having read that at once."""
    x = tokens(model.config)
    for pad in (None, torch.tensor([0, 3])):
        cache = KVCache(pad, spare=4)
        model(x[:, :9], cache=cache)
        for wrong in (x[:, 12:16], x[:, 20:21]):
            model(wrong, cache=cache)
            cache.rewind(9)
        got = model(x[:, 9:14], cache=cache)[0]
        expected = model(x[:, :14], cache=KVCache(pad))[0]
        assert close(got, expected[:, 9:]), "cache.rewind leaves something of what it takes back"


# Which parameters a key may add, drop or reshape: a pattern that their names hold.
OF_ATTENTION = ("mixer", "head_dim", "qk_norm", "n_kv_head", "attn_extra", "kv_shared_by")
WHERE = dict.fromkeys(OF_ATTENTION, "attn") | dict(conv="conv", conv_sites="conv")
WHERE |= dict(mlp="mlp", mlp_width="mlp", ffn_dim_multiplier="mlp")
WHERE |= dict(position="wpe", relative_clip="wpe", norm="norm", embed_norm="norm_e")
WHERE |= dict(tie_embeddings="lm_head", residual="residual", bias="", low_rank="")
WHERE |= dict(embed="embed", block=r"norm|blocks\.\d+\.(?!attn|mlp|residual)")


def changes_logits(before, after, arm):
    """Switching the part on changes the logits, and of the parameters only what it should. Gives
    `after` the weights of `before`."""
    old = dict(before.named_parameters())
    new = dict(after.named_parameters())
    shared = old.keys() & new.keys()
    reshaped = {key for key in shared if old[key].shape != new[key].shape}
    for key in old.keys() ^ new.keys() | reshaped:
        fits = any(slot in WHERE and re.search(WHERE[slot], key) for slot in arm)
        assert fits, f"{key} changed: add it to WHERE in tests/helpers/gates.py if {arm} may do so"
    for key in shared - reshaped:
        new[key].data.copy_(old[key].data)
    x = tokens(before.config)
    same = torch.allclose(before(x)[0], after(x)[0], atol=1e-6)
    assert not same, f"the logits with {arm} are those without"
