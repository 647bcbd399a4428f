"""Experts: against transformers and the dense MLP, their balance, and training with them."""

import functools
import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from common.runtime import Runtime
from helpers.variants import close, config, randomised, tokens
from parts import costs, moe
from parts.moe import MoE, after_step, expert_by_expert, in_one_kernel, statistics
from parts.part import short_convs
from parts.variant import Variant
from training.optim import Muon, make_optimizers
from training.settings import TrainConfig

BALANCES = pytest.mark.parametrize("balance", ["loss", "bias"])


def trainable(balance="loss", **more):
    """A small model as it starts, and a batch."""
    c = config("llama", dict(mlp="moe", moe_balance=balance) | more)
    torch.manual_seed(0)
    return Variant(c), tokens(c, 4), tokens(c, 4, seed=2)


# ---------------------------------------------------------------- against others


@torch.no_grad()
def check_deepseek(monkeypatch):
    theirs_of = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    arm = dict(mlp="moe", n_experts=6, top_k=3, shared_experts=2, moe_balance="bias")
    mlp = randomised(config("llama", arm)).blocks[0].mlp
    sizes = dict(hidden_size=16, moe_intermediate_size=mlp.width, routed_scaling_factor=1.0)
    experts = dict(n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=2)
    groups = dict(n_group=1, topk_group=1, norm_topk_prob=True)
    their_config = theirs_of.DeepseekV3Config(**sizes | experts | groups)
    theirs = theirs_of.DeepseekV3MoE(their_config).double()
    theirs.experts.gate_up_proj.copy_(torch.cat((mlp.gate, mlp.up), 1))
    theirs.experts.down_proj.copy_(mlp.down)
    theirs.gate.weight.copy_(mlp.router.weight)
    theirs.gate.e_score_correction_bias.copy_(mlp.bias)
    for name in ("gate", "up", "down"):
        ours = getattr(mlp.shared, name).weight
        getattr(theirs.shared_experts, f"{name}_proj").weight.copy_(ours)
    # Transformers' routers compute in float32: here they stay in float64.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.Tensor, "type", lambda tensor, dtype: tensor)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    assert close(mlp(x), theirs(x), 1e-9)


def test_it_is_theirs_and_wrong_shares_would_be_seen(monkeypatch):
    """DeepSeek-V3's; test_families.py has Mixtral's."""

    def shares_with_the_bias(self, scores):
        """The bias enters the shares, not only the choice."""
        best, chosen = (scores.sigmoid() + self.bias).topk(self.top_k)
        return chosen, best / best.sum(-1, keepdim=True)

    with monkeypatch.context() as patch:
        check_deepseek(patch)
    monkeypatch.setattr(MoE, "choose", shares_with_the_bias)
    with pytest.raises(AssertionError):
        check_deepseek(monkeypatch)


def test_the_balance_loss_is_mixtrals():
    """Theirs is top_k times as large: it counts tokens per expert, ours shares of the choices."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    mlp = randomised(config("llama", dict(mlp="moe", top_k=3))).float().blocks[0].mlp
    scores = mlp.scores(torch.randn(50, 16))
    counts = mlp.choose(scores)[0].flatten().bincount(minlength=8)
    losses = mlp.routing(scores, counts).loss, mixtral.load_balancing_loss_func((scores,), 8, 3)
    assert losses[0].item() == pytest.approx(0.01 * losses[1].item() / 3)
    ours, theirs = (torch.autograd.grad(loss, scores, retain_graph=True)[0] for loss in losses)
    torch.testing.assert_close(ours, 0.01 * theirs / 3, rtol=1e-3, atol=1e-9)


@BALANCES
@pytest.mark.parametrize("base", ["gpt2", "llama"])
def test_one_expert_is_the_dense_mlp_to_the_last_bit(balance, base):
    single = dict(mlp="moe", n_experts=1, top_k=1, moe_balance=balance, bias="none")
    experts = Variant(config(base, single))
    dense = Variant(config(base, dict(mlp="swiglu", bias="none")))
    with torch.no_grad():
        for p, q in zip(experts.parameters(), dense.parameters(), strict=True):
            p.copy_(q.normal_(0, 0.3).view_as(p))
    x, y = tokens(dense.config), tokens(dense.config, seed=2)
    assert torch.equal(experts(x)[0], dense(x)[0])
    losses = experts(x, y)[1], dense(x, y)[1]
    assert torch.equal(*losses)  # there is nothing to balance
    sum(losses).backward()
    for (name, p), q in zip(experts.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(p.grad.view_as(q), q.grad), name
    assert costs.parameters(experts.config) == costs.parameters(dense.config)


# ---------------------------------------------------------------- the grouped products


CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = [("cpu", torch.float32, 1e-6), pytest.param("cuda", torch.bfloat16, 0.02, marks=CUDA)]


@pytest.mark.parametrize("device, dtype, most", DEVICES)
@pytest.mark.parametrize("width, out", [(16, 24), (5, 7), (8, 3)])
def test_the_one_kernel_of_a_gpu_gives_the_same(width, out, device, dtype, most):
    """Also where some experts have no token, and with widths that the kernel cannot take."""
    torch.manual_seed(0)
    counts = torch.tensor([4, 0, 7, 1, 0], device=device)
    rows = torch.randn(12, width, device=device, dtype=dtype)
    matrices = torch.randn(5, out, width, device=device, dtype=dtype)
    results = []
    for product in (in_one_kernel, expert_by_expert):
        leaves = [tensor.clone().requires_grad_() for tensor in (rows, matrices)]
        y = product(*leaves, counts)
        results.append([y, *torch.autograd.grad((y * y.detach().cos()).sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert close(a, b, most)
    assert results[0][2][1].abs().max() == 0 < results[0][2][0].abs().min()


def test_bfloat16_reaches_the_experts(monkeypatch):
    model, x, _ = trainable()
    seen, real = [], expert_by_expert
    spy = lambda *args: seen.append(args[0].dtype) or real(*args)
    monkeypatch.setattr(moe, "expert_by_expert", spy)
    with torch.autocast("cpu", torch.bfloat16):
        low = model.eval()(x)[0]
    assert set(seen) == {torch.bfloat16} and len(seen) == 3 * model.config.n_layer
    assert close(low.float(), model(x)[0], 0.002)


def passed(balance, recomputed, compiled=False, **more):
    """The loss, tallies and gradients of two micro-batches. With `recomputed`, the blocks run again
    on the way back, as by activation_checkpointing in training/net.py."""
    model, x, y = trainable(balance, **more)
    for block in model.blocks if recomputed else ():
        block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
    net = torch.compile(model, dynamic=False) if compiled else model
    torch.manual_seed(1)
    for half in (slice(0, 2), slice(2, 4)):
        loss = net(x[half], y[half])[1]
        loss.backward()
    tallies = [block.mlp.tally for block in model.blocks]
    assert all(tally[:-2].sum() == 2 * x.numel() for tally in tallies)
    return [loss, *tallies, *(p.grad for p in model.parameters())]


@BALANCES
@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
def test_it_compiles(balance, recomputed):
    torch._dynamo.reset()
    results = [passed(balance, recomputed, compiled, n_embd=32) for compiled in (False, True)]
    for a, b in zip(*results, strict=True):
        assert close(a, b, 1e-5)


@BALANCES
def test_recomputing_activations_changes_no_bit_and_counts_once(balance):
    results = [passed(balance, recomputed, dropout=0.1) for recomputed in (False, True)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- the balance, while training


def test_the_balance_is_added_while_training_only():
    model, x, y = trainable()
    plain = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten()).item()
    assert model.eval()(x, y)[1].item() == pytest.approx(plain, abs=1e-6)
    added = model.train()(x, y)[1].item() - plain
    after_step(model)
    row = statistics(model)
    assert row["balance_loss"] == pytest.approx(added, abs=1e-6)
    assert 0.02 <= added < 0.03  # at least 0.01 per layer, which are two

    other, _, _ = trainable("bias")
    assert other(x, y)[1].item() == pytest.approx(plain, abs=0.01)
    after_step(other)
    assert statistics(other)["balance_loss"] == 0


def test_statistics():
    model, x, y = trainable(n_experts=6, top_k=2)
    stds = {name: getattr(model.blocks[0].mlp, name).std().item() for name in MoE.muon}
    assert stds == pytest.approx({"gate": 0.02, "up": 0.02, "down": 0.01}, rel=0.1)  # two layers
    assert statistics(model) == {}  # before the first step
    model(x, y), after_step(model)
    row = statistics(model)
    mlp = model.blocks[0].mlp
    seen = []
    mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.eval()(x)
    scores = mlp.scores(seen[0].flatten(0, 1))
    chosen = scores.topk(2).indices.flatten()
    p = scores.softmax(-1)
    assert row["expert_load"][0] == pytest.approx((chosen.bincount(minlength=6) / 192).tolist())
    assert row["router_entropy"][0] == pytest.approx(-(p * p.log()).sum(-1).mean().item(), abs=1e-5)
    assert row["router_entropy"][1] == pytest.approx(math.log(6), abs=0.05)  # nearly even at first
    dense = Variant(config("llama"))
    after_step(dense)
    assert statistics(dense) == {}


def test_the_bias_moves_against_the_load():
    model, x, y = trainable("bias")
    mlp = model.blocks[0].mlp
    model(x, y)
    counts = mlp.tally[:-2].clone()
    after_step(model)
    expected = 0.001 * (counts.mean() - counts).sign()  # 0 where it has just the mean load
    assert mlp.bias.tolist() == pytest.approx(expected.tolist()) and len(mlp.bias.unique()) > 1
    assert mlp.tally.abs().sum() == 0
    before = mlp.bias.clone()
    model.eval()(x, y)  # an evaluation counts nothing
    assert mlp.tally.abs().sum() == 0 and torch.equal(mlp.bias, before)


def test_one_rank_or_several_move_the_bias_alike():
    """Two ranks that read half the batch each, against one that reads two micro-batches."""
    alone, x, y = trainable("bias")
    ranks = [trainable("bias")[0] for _ in range(2)]
    for _ in range(3):
        for rank, half in zip(ranks, (slice(0, 2), slice(2, 4)), strict=True):
            alone(x[half], y[half]), rank(x[half], y[half])
        tallies = [torch.stack([block.mlp.tally for block in rank.blocks]) for rank in ranks]
        after_step(alone)
        both = sum(tallies)
        for rank in ranks:
            after_step(rank, lambda tally, both=both: both)
    for rank in ranks:
        for expected, block in zip(alone.blocks, rank.blocks, strict=True):
            assert torch.equal(expected.mlp.bias, block.mlp.bias) and block.mlp.bias.any()
        assert statistics(rank) == statistics(alone)


def test_total_and_active_parameters():
    """test_costs.py counts all of them."""
    sizes = dict(n_layer=3, n_embd=64, n_head=4, vocab_size=50, multiple_of=16, dropout=0.1)
    arm = dict(mlp="moe", n_experts=10, top_k=3, shared_experts=1, mlp_width=24, bias="all")
    c, dense = config("llama", sizes | arm, conv_sites="mlp_input"), config("llama", sizes)
    assert costs.parameters(c) - costs.active_parameters(c) == 3 * 7 * (3 * 64 * 24 + 2 * 24 + 64)
    assert costs.active_parameters(dense) == costs.parameters(dense)
    ngrams = config("llama", dict(embed="ngram", ngram_rows=50, ngram_width=5))
    assert costs.parameters(ngrams) - costs.active_parameters(ngrams) == 3 * 49 * 5
    shared = Variant(c).blocks[0].mlp.shared
    assert shared.dropout.p == 0 and not short_convs(shared)  # the layer has them once
    # As wide as a dense MLP divided by the experts that a token uses: 176 / 4, up to 8.
    assert costs.mlp_width(config("llama", sizes | arm | dict(mlp_width=None))) == 48


def test_muon_takes_each_expert_as_a_matrix():
    model, x, y = trainable(n_experts=40)  # more experts than the width of one
    settings = TrainConfig(optimizer="muon"), Runtime("cpu", "float32", 0, 1)
    muon, _ = make_optimizers(model, *settings)
    model(x, y)[1].backward()
    stacked = model.blocks[0].mlp.gate
    alone = [torch.nn.Parameter(matrix.detach().clone()) for matrix in stacked]
    for p, grad in zip(alone, stacked.grad, strict=True):
        p.grad = grad.clone()
    before = stacked.detach().clone()
    Muon([{"params": alone, "weight_decay": 0.1}], *settings).step()
    muon.step()
    assert close(stacked, torch.stack(alone), 1e-6) and (stacked - before).abs().min() > 0
