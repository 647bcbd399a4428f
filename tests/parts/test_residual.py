"""What the residuals with streams or with attention compute at first, beside `plain`; and with any
numbers: hyper-connections are lucidrains' package, which follows the algorithm in the paper's
appendix, and mHC is DeepSeek-V4 in transformers. x-transformers has other forms of mHC and of
attention residuals than their papers: it decides the mix for each stream alone, and its queries
depend on the token."""

import pytest
import references
import torch

from helpers.variants import close, config, randomised, tokens
from parts.residual import Connection, ConstrainedConnection, doubly_stochastic
from parts.slots import BLOCK
from parts.variant import Variant


def twins(block, **keys):
    """(a model with the slot residual at its initial values, `plain` with the same weights)."""
    torch.manual_seed(0)
    # Nearly without an eps, the norms ignore the scale of what they read.
    sizes = dict(block=block, norm_eps=1e-12)
    other = Variant(config("llama", keys | sizes)).eval()
    plain = Variant(config("llama", sizes)).eval()
    for name, p in plain.named_parameters():
        p.data = torch.nn.init.normal_(torch.empty_like(p), 0.0, 0.3)
        other.get_parameter(name).data = p.data
    return other, plain


@pytest.mark.parametrize("block", BLOCK)
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_at_first_it_is_plain_to_the_last_bit(block, streams):
    """The logits, also in 16 bits, and after a backward pass the gradients of what both have, to
    rounding."""
    hyper, plain = twins(block, residual="hyper", streams=streams)
    x, y = tokens(plain.config), tokens(plain.config, seed=2)
    for low in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            assert torch.equal(hyper(x)[0], plain(x)[0])
    hyper(x, y)[1].backward(), plain(x, y)[1].backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(hyper.get_parameter(name).grad, p.grad, atol=1e-6, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("block", ["pre", "sandwich", "parallel", "parallel2"])
def test_at_first_only_the_scale_of_what_norms_read_differs(block):
    """Attention residuals; and mHC where the token decides nothing, and nearly so where it does.
    With two streams mHC has the scale, too, and computes what `plain` does in every block."""
    attn_res, plain = twins(block, residual="attn_res")
    x = tokens(plain.config)
    assert close(attn_res(x)[0], plain(x)[0])
    mhc, plain = twins(block, residual="mhc")
    assert close(mhc(x)[0], plain(x)[0], 0.05) and not close(mhc(x)[0], plain(x)[0], 1e-4)
    for block in mhc.blocks:
        for connection in block.residual.connections:
            connection.strength.zero_()
    assert close(mhc(x)[0], plain(x)[0])


@pytest.mark.parametrize("at_random", [True, False])
def test_streams_of_mhc_come_apart(at_random):
    """Each of the equal streams gets a gradient of its own, but would not if W started at 0."""
    torch.manual_seed(0)
    model = Variant(config("llama", dict(residual="mhc"))).double()
    connections = [each for block in model.blocks for each in block.residual.connections]
    for connection in connections:
        connection.by_token.data *= at_random
    x = tokens(model.config)
    model(x, x)[1].backward()
    of_writes = connections[0].fixed.grad[4:8]
    assert torch.allclose(of_writes, of_writes[0], rtol=1e-9, atol=0) != at_random


def test_a_doubly_stochastic_matrix():
    """Every row and every column sums to 1, also where exp(x) would overflow; and the identity is
    among them."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, 3, 5, dtype=torch.float64) + 1000
    made = doubly_stochastic(x)
    assert close(made.sum(1), torch.ones(4, 3, 5), 1e-12)
    assert close(made.sum(0), torch.ones(4, 3, 5), 1e-6) and made.min() > 0
    assert close(doubly_stochastic(50 * torch.eye(4)), torch.eye(4))


@torch.no_grad()
@pytest.mark.parametrize("block", ["pre", "parallel"])
def test_the_head_reads_a_mix_too(block):
    """Of as many as were written, and the first sublayer reads the embedding, without a query."""
    model = randomised(config("llama", dict(residual="attn_res", block=block)))
    writes = 2 if block == "parallel" else 4
    counts = [mix.count for each in model.blocks for mix in each.residual.mixes]
    assert counts == list(range(1, writes + 2))
    queries = [key for key, _ in model.named_parameters() if key.endswith(".query")]
    assert len(queries) == writes
    residual = model.blocks[-1].residual
    stream = []
    for h in torch.randn(writes + 1, 1, 3, 16, dtype=torch.float64):
        stream = residual.add(stream, h)
    read = residual.gathered(stream)
    for t in range(3):
        sources = [h[0, t] for h, _ in stream]
        assert close(read[0, t], references.depth_mix(residual.mixes[-1], sources), 1e-9)


def test_connections_are_counted_over_the_depth():
    """Sublayer k reads stream k mod n."""
    for block, per_block in (("pre", 2), ("parallel", 1)):
        model = Variant(config("llama", dict(residual="hyper", streams=3, block=block, n_layer=4)))
        own = [c.own for b in model.blocks for c in b.residual.connections]
        assert own == [k % 3 for k in range(4 * per_block)]


def check_package(k, n, detail=None):
    """The streams after one sublayer, in float64; detail(connection) breaks ours."""
    package = pytest.importorskip("hyper_connections")
    model = randomised(config("llama", dict(residual="hyper", streams=n)))
    ours = Connection(model.config, k).double()
    theirs = package.HyperConnections(n, dim=16, layer_index=k).double()
    for p in ours.parameters():
        torch.nn.init.normal_(p, 0.0, 0.4)
    theirs.static_alpha.add_(ours.mix.view(n, n + 1))
    theirs.static_beta.add_(ours.write)
    theirs.dynamic_alpha_fn.copy_(ours.by_token[:-1].T)
    theirs.dynamic_beta_fn.copy_(ours.by_token[-1])
    theirs.dynamic_alpha_scale.copy_(ours.strength[0])
    theirs.dynamic_beta_scale.copy_(ours.strength[1])
    if detail:
        detail(ours)

    x = torch.randn(2, 5, n, 16, dtype=torch.float64)
    h, kept = ours.read(x)
    after = model.blocks[0].residual.add(kept, torch.sin(h))
    expected = theirs(x.movedim(2, 1).flatten(0, 1))  # (B n, T, C)
    expected = expected[1](torch.sin(expected[0])).unflatten(0, (2, n)).movedim(1, 2)
    return (after - expected).abs().max() < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("k, n", [(0, 4), (5, 4), (1, 2), (2, 3), (3, 1)])
def test_it_is_the_package(k, n):
    torch.manual_seed(k)
    assert check_package(k, n)


@torch.no_grad()
def test_a_wrong_detail_is_not_the_package():
    for detail in (
        lambda ours: setattr(ours, "own", 0),  # another stream
        lambda ours: ours.mix.view(4, 5)[:, 1:].copy_(ours.mix.view(4, 5)[:, 1:].T.clone()),
        lambda ours: ours.strength[1].copy_(ours.strength[0]),
    ):
        assert not check_package(5, 4, detail)


def check_deepseek(n, detail=None):
    """mHC after one sublayer is DeepSeek-V4's, whose maps are the transposes; detail(connection)
    breaks ours."""
    v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    sizes = dict(hc_mult=n, hidden_size=16, hc_sinkhorn_iters=20, hc_eps=0.0, rms_norm_eps=1e-7)
    theirs = v4.DeepseekV4HyperConnection(v4.DeepseekV4Config(**sizes))
    model = Variant(config("llama", dict(residual="mhc", streams=n)))
    ours = ConstrainedConnection(model.config)
    for p in ours.parameters():
        torch.nn.init.normal_(p, 0.0, 0.4)
    places = torch.arange(n * n).view(n, n).T.flatten() + 2 * n
    order = torch.cat((torch.arange(2 * n), places))
    theirs.fn.copy_(ours.by_token[order])
    theirs.base.copy_(ours.fixed[order])
    theirs.scale.copy_(ours.strength)
    if detail:
        detail(ours)

    x = torch.randn(2, 5, n, 16)
    h, kept = ours.read(x)
    after = model.blocks[0].residual.add(kept, torch.sin(h))
    write, mix, read = theirs(x)
    expected = write[..., None] * torch.sin(read)[..., None, :] + mix.mT @ x
    return close(after, expected)


@torch.no_grad()
@pytest.mark.slow
def test_mhc_is_deepseek_v4():
    """And a wrong detail is not."""
    torch.manual_seed(0)
    assert check_deepseek(4) and check_deepseek(3) and check_deepseek(1)
    for detail in (
        lambda ours: ours.strength[2].copy_(ours.strength[1]),
        lambda ours: ours.fixed[8:].view(4, 4).copy_(ours.fixed[8:].view(4, 4).T.clone()),
        lambda ours: ours.fixed[:4].zero_(),
    ):
        assert not check_deepseek(4, detail)
