"""The word `moe` of the slot `mlp`: several MLPs, the experts, of which each token uses a few.

Shapes: B batch, T tokens, N = B T, C = n_embd, E = n_experts, k = top_k, W the width of an expert.
"""

import copy
import math
from typing import NamedTuple

import torch
import torch.nn as nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F

from parts.mlp import FeedForward, GatedMLP, SwiGLU
from parts.part import STD, Linear, refuse

LOSS_SHARE = 0.01  # of each layer's balance loss in the training loss (Switch, arXiv:2101.03961)
BIAS_STEP = 0.001  # by which a balance bias moves per optimizer step (arXiv:2408.15664)
SLOPE = 1.702  # of the gate in the experts of gpt-oss
LIMIT = 7.0  # of gate and up there


class Routing(NamedTuple):
    """What the router of one layer did with the tokens of one training pass."""

    loss: torch.Tensor | float  # what it adds to the training loss
    tally: torch.Tensor  # (E + 2): tokens per expert; sums over the tokens: entropy, balance loss


class MoE(FeedForward):
    """Σ g_i E_i(x) over the k experts with the largest scores, + E_s(x), a shared expert.

    Each expert is a SwiGLU MLP; bias=all gives it and the router biases. There is no capacity
    limit: the output of a token depends on that token alone, but for the last bits, since an
    expert's product may round otherwise with another number of tokens. shared_gate: E_s is
    multiplied by σ(x w), one number per token (Qwen2-MoE, arXiv:2407.10671).

    moe_balance=loss: g is the softmax over the k scores (Mixtral), and a loss that grows with
    uneven loads is added while training. moe_balance=bias: g are the sigmoids of the scores,
    divided by their sum (DeepSeek-V3, arXiv:2412.19437); a bias, which only enters the choice, is
    raised after each step for experts with less than the mean load, and lowered for those with more
    (Wang et al. 2024, arXiv:2408.15664).
    """

    paper = "Mixtral, arXiv:2401.04088"
    reads = (
        "mlp_width",
        "multiple_of",
        "ffn_dim_multiplier",
        "n_experts",
        "top_k",
        "shared_experts",
        "shared_gate",
        "moe_balance",
    )
    muon = ("gate", "up", "down")

    @classmethod
    def width_of(cls, config):
        """The width of one expert: mlp_width, or the width of a dense MLP divided by the number of
        experts that a token uses, so that a token costs about the same."""
        used = config.top_k + config.shared_experts
        width = GatedMLP.width_of(config)
        return width if config.mlp_width or used == 1 else 8 * math.ceil(width / used / 8)

    @classmethod
    def check(cls, config):
        E = config.n_experts
        k = config.top_k
        refuse(k > E, f"top_k={k} is above n_experts={E}")
        refuse(k == 1 and E > 1, "with top_k=1 a router learns nothing: choose top_k=2 or more")
        refuse(config.low_rank, f"low_rank cannot be applied to mlp={config.mlp}: remove it")
        refuse(
            "mlp_inner" in config.conv_sites.split(","),
            f"mlp_inner of conv_sites is within a dense MLP, which mlp={config.mlp} is not: choose "
            "mlp_input or mlp_output",
        )

    def __init__(self, config):
        super().__init__(config)
        C = config.n_embd
        E = config.n_experts
        width = self.width_of(config)
        self.n_embd = C
        self.n_experts = E
        self.width = width
        self.top_k = config.top_k
        self.balance = config.moe_balance
        self.adds_loss = self.balance == "loss" and E > 1
        self.down_std = STD / math.sqrt(2 * config.n_layer)
        self.gate = nn.Parameter(torch.empty(E, width, C))
        self.up = nn.Parameter(torch.empty(E, width, C))
        self.down = nn.Parameter(torch.empty(E, C, width))
        biased = config.bias == "all"
        self.gate_bias = nn.Parameter(torch.empty(E, width)) if biased else None
        self.up_bias = nn.Parameter(torch.empty(E, width)) if biased else None
        self.down_bias = nn.Parameter(torch.empty(E, C)) if biased else None
        self.router = Linear(C, E, bias=biased) if E > 1 else None
        self.shared = None
        self.shared_gate = None
        if config.shared_experts:
            dense = copy.copy(config)
            dense.mlp_width = config.shared_experts * width
            dense.dropout = 0.0
            dense.conv_sites = "none"
            self.shared = SwiGLU(dense)
        if config.shared_gate:
            self.shared_gate = Linear(C, 1, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("tally", torch.zeros(E + 2), persistent=False)  # since the last step
        self.last = None  # the tally of the last step
        if self.balance == "bias":
            self.register_buffer("bias", torch.zeros(E))

    def reset(self):
        nn.init.normal_(self.gate, 0.0, STD)
        nn.init.normal_(self.up, 0.0, STD)
        nn.init.normal_(self.down, 0.0, self.down_std)
        for bias in (self.gate_bias, self.up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def transform(self, x, where, cache):
        tokens = x.flatten(0, 1)  # (N, C)
        scores = self.scores(tokens)  # (N, E)
        chosen, shares = self.choose(scores)  # (N, k) each
        chosen = chosen.flatten()  # (N k)
        counts = scores.new_zeros(scores.size(1), dtype=torch.long)  # (E) choices of each expert
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        if self.training and where is not None:
            where.shared.routings.append(self.routing(scores, counts))

        # `grouped` needs the rows of one expert next to each other.
        order = chosen.argsort(stable=True)  # (N k) the choices, expert by expert
        expert = chosen[order]  # (N k)
        token = order // self.top_k  # (N k) whose choice it is: token t made t k .. t k + k - 1

        def mapped(rows, matrices, biases):
            y = grouped(rows, matrices, counts)
            return y if biases is None else y + biases[expert].type_as(y)

        rows = tokens[token]  # (N k, C)
        rows = self.act(  # (N k, W)
            mapped(rows, self.gate, self.gate_bias), mapped(rows, self.up, self.up_bias)
        )
        rows = mapped(rows, self.down, self.down_bias)  # (N k, C)
        y = rows[order.argsort()].view(*shares.shape, -1)  # (N, k, C), token by token
        y = (y * shares[..., None]).sum(1).to(y.dtype).view_as(x)
        if self.shared is not None:
            share = 1 if self.shared_gate is None else self.shared_gate(x).sigmoid()  # (B, T, 1)
            y = y + share * self.shared(x)
        return self.dropout(y)

    @staticmethod
    def act(gate, up):
        return F.silu(gate) * up

    def scores(self, tokens):
        """The router's scores (N, E), in float32 at least."""
        if self.router is None:
            return tokens.new_zeros(len(tokens), 1)
        scores = self.router(tokens)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def choose(self, scores):
        """(the k experts of each token (N, k), their shares (N, k), of sum 1)."""
        if self.balance == "loss":
            best, chosen = scores.topk(self.top_k)
            return chosen, best.softmax(-1)
        gates = scores.sigmoid()
        chosen = (gates + self.bias).topk(self.top_k).indices
        best = gates.gather(-1, chosen)
        return chosen, best / (best.sum(-1, keepdim=True) + 1e-20)

    def routing(self, scores, counts):
        """The Routing of these scores (N, E) and tokens per expert (E). The balance loss is
        E Σ_i (share of the choices that expert i got) (its mean probability), 1 where both are
        even."""
        p = scores.softmax(-1)
        if self.balance == "bias":
            p = scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)
        entropy = torch.special.entr(p.detach()).sum()
        loss = len(counts) * (counts / counts.sum() * p.mean(0)).sum()

        sums = torch.stack((entropy, loss.detach() * len(p)))
        added = LOSS_SHARE * loss if self.adds_loss else 0.0
        return Routing(added, torch.cat((counts.to(sums.dtype), sums)))

    def flops(self, T):
        return 2 * self.top_k * 3 * self.n_embd * self.width

    def unused(self):
        matrices = 3 * self.n_embd * self.width
        biases = 0 if self.gate_bias is None else 2 * self.width + self.n_embd
        return (self.n_experts - self.top_k) * (matrices + biases)


class ClampedMoE(MoE):
    """The experts of gpt-oss: (up + 1) gate σ(1.702 gate), where gate is at most 7 and up between
    -7 and 7. A shared expert is a plain SwiGLU."""

    paper = "gpt-oss, arXiv:2508.10925"

    @staticmethod
    def act(gate, up):
        gate = gate.clamp(max=LIMIT)
        up = up.clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(SLOPE * gate)


def grouped(rows, matrices, counts):
    """rows (n, in) times matrices (E, out, in): the first counts[0] rows with the first one, and so
    on. On a GPU in bfloat16 this is one kernel."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows = rows.to(dtype)
        matrices = matrices.to(dtype)
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return in_one_kernel(rows, matrices, counts)
    return expert_by_expert(rows, matrices, counts)


def in_one_kernel(rows, matrices, counts):
    """`grouped` in torch's kernel, which wants widths that are multiples of 8."""
    out, width = matrices.shape[1:]
    if out % 8 or width % 8:
        rows = F.pad(rows, (0, -width % 8))
        matrices = F.pad(matrices, (0, -width % 8, 0, -out % 8))
    return F.grouped_mm(rows, matrices.mT, offs=counts.cumsum(0).int())[:, :out]


@_disable_dynamo  # as torch.compiler.disable, but it loads the compiler at the first call only
def expert_by_expert(rows, matrices, counts):
    """`grouped`, expert by expert."""
    groups = zip(rows.split(counts.tolist()), matrices.unbind(), strict=True)
    return torch.cat([F.linear(group, matrix) for group, matrix in groups if len(group)])


# ---------------------------------------------------------------- while training


def layers_of(model):
    """The MoE of each layer, bottom first; none in a model of other parts."""
    return [block.mlp for block in model.blocks if isinstance(getattr(block, "mlp", None), MoE)]


def collect(model, routings):
    """Count the tallies of the layers' routings; return what these add to the training loss. Called
    outside of the blocks, whose forward pass runs twice where activations are recomputed."""
    for layer, routing in zip(layers_of(model), routings, strict=True):
        layer.tally += routing.tally
    return sum(routing.loss for routing in routings)


@torch.no_grad()
def after_step(model, all_reduce_sum=lambda tally: tally):
    """Finish an optimizer step: keep what its micro-batches counted, for `statistics`, and move the
    balance biases. all_reduce_sum: sums a tensor over the ranks."""
    layers = layers_of(model)
    tallies = all_reduce_sum(torch.stack([layer.tally for layer in layers])) if layers else []
    for layer, tally in zip(layers, tallies, strict=True):
        layer.last = tally
        layer.tally.zero_()
        if layer.balance == "bias":
            counts = tally[:-2]
            layer.bias += BIAS_STEP * (counts.mean() - counts).sign()


def statistics(model):
    """The columns of the log about the last step, {} without experts: what the balance added to the
    loss, and per layer the router's mean entropy in nats and each expert's share of the choices."""
    layers = [layer for layer in layers_of(model) if layer.last is not None]
    if not layers:
        return {}
    added = 0.0
    entropies = []
    loads = []
    for layer in layers:
        *counts, entropy, loss = layer.last.tolist()
        tokens = sum(counts) / layer.top_k
        entropies.append(entropy / tokens)
        loads.append([count / sum(counts) for count in counts])
        if layer.adds_loss:
            added += LOSS_SHARE * loss / tokens
    return {"balance_loss": added, "router_entropy": entropies, "expert_load": loads}
