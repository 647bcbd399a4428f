"""Hyper-connections: equal to `plain` at first in every block, and with any numbers to lucidrains'
package, which follows the algorithm in the paper's appendix."""

import pytest
import torch

from helpers.variants import config, randomised, tokens
from parts.block import Connection
from parts.slots import BLOCK
from parts.variant import Variant


def twins(block, streams):
    """(a model with hyper-connections at their initial values, `plain` with the same weights)."""
    torch.manual_seed(0)
    arm = dict(residual="hyper", streams=streams, block=block)
    hyper = Variant(config("llama", arm)).eval()
    plain = Variant(config("llama", dict(block=block))).eval()
    for name, p in plain.named_parameters():
        p.data = torch.nn.init.normal_(torch.empty_like(p), 0.0, 0.3)
        hyper.get_parameter(name).data = p.data
    return hyper, plain


@pytest.mark.parametrize("block", BLOCK)
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_at_first_it_is_plain_to_the_last_bit(block, streams):
    """The logits, also in 16 bits, and after a backward pass the gradients of what both have, to
    rounding."""
    hyper, plain = twins(block, streams)
    x, y = tokens(plain.config), tokens(plain.config, seed=2)
    for low in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            assert torch.equal(hyper(x)[0], plain(x)[0])
    hyper(x, y)[1].backward(), plain(x, y)[1].backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(hyper.get_parameter(name).grad, p.grad, atol=1e-6, rtol=1e-4)


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
