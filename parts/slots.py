"""The slots of a model, such as `norm`, and the words that fill them, such as `rmsnorm`, each with
its formula. A new part is a class and a line here.

x: the input (B, T, C); q, k, v: of width D. Each class explains its symbols and names its paper.
"""

from torch.nn import functional as F

from model import gelu
from parts import attn_extra, block, embed, moe, norm, position, residual
from parts.attention import Attention
from parts.differential import Differential
from parts.gated_delta import GatedDelta
from parts.mamba2 import Mamba2
from parts.mla import LatentAttention
from parts.mlp import GatedMLP, NoMLP, PlainMLP, SwiGLU, relu2

EMBED = {  # of the token a_t
    "token": embed.Token,  # e[a_t]
    "ngram": embed.NGram,  # e[a_t] + Σ_n e_n[hash(a_(t-n+1) .. a_t)], n = 2 .. ngram_max
}

POSITION = {  # of a query at position i and a key at position j
    "none": position.Position,  # the causal mask alone: softmax(q·k / sqrt(D)) over j <= i
    "learned": position.Learned,  # x_i + wpe_i
    "sinusoidal": position.Sinusoidal,  # sqrt(C) x_i + [sin(i w_n), cos(i w_n)], w_n = 1e4^(-2n/C)
    "rope": position.Rope,  # pairs of q and k turned by i theta^(-2n/D), j theta^(-2n/D)
    "alibi": position.Alibi,  # score - slope_h (i - j)
    "relative": position.Relative,  # score + q·a[min(i - j, clip)] / sqrt(D)
    "t5": position.T5,  # score + b_h[bucket of i - j]
}

NORM = {
    "layernorm": norm.LayerNorm,  # (x - mean) / sqrt(var + 1e-5) weight + bias
    "rmsnorm": norm.RMSNorm,  # x / sqrt(mean(x²) + eps) weight
    "rmsnorm_bare": norm.BareRMSNorm,  # x / sqrt(mean(x²) + eps)
    "batchnorm": norm.BatchNorm,  # as layernorm, mean and var over batch and time
    "dyt": norm.DyT,  # weight tanh(alpha x) + bias
    "none": norm.NoNorm,  # x
}

BLOCK = {
    "pre": block.Pre,  # x + mixer(norm(x)), then x + mlp(norm(x))
    "post": block.Post,  # norm(x + mixer(x)), then norm(x + mlp(x))
    "output": block.Output,  # x + norm(mixer(x)), then x + norm(mlp(x))
    "sandwich": block.Sandwich,  # x + norm(mixer(norm(x))), then x + norm(mlp(norm(x)))
    "parallel": block.Parallel,  # x + mixer(norm(x)) + mlp(norm(x)), one norm
    "parallel2": block.Parallel2,  # x + mixer(norm1(x)) + mlp(norm2(x))
}

HENDRYCKS = "Hendrycks & Gimpel 2016, arXiv:1606.08415"
SHAZEER = "Shazeer 2020, arXiv:2002.05202"
# PlainMLP computes down(act(up(x))), GatedMLP down(act(gate(x)) up(x)). `.of(paper, act)` makes the
# class of one word; the formula beside it is act(x).
MLP = {
    "relu": PlainMLP.of("Vaswani et al. 2017, arXiv:1706.03762", F.relu),  # max(x, 0)
    "gelu": PlainMLP.of(HENDRYCKS, gelu),  # x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))
    "gelu_erf": PlainMLP.of(HENDRYCKS, F.gelu),  # x/2 (1 + erf(x / sqrt(2)))
    "silu": PlainMLP.of("Elfwing et al. 2017, arXiv:1702.03118", F.silu),  # x σ(x), also Swish
    "relu2": PlainMLP.of("So et al. 2021, arXiv:2109.08668", relu2),  # max(x, 0)²
    "glu": GatedMLP.of("Dauphin et al. 2016, arXiv:1612.08083", F.sigmoid),  # σ(x)
    "bilinear": GatedMLP.of(SHAZEER, lambda x: x),  # x
    "reglu": GatedMLP.of(SHAZEER, F.relu),  # max(x, 0)
    "geglu": GatedMLP.of(SHAZEER, gelu),  # x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))
    "swiglu": SwiGLU,  # x σ(x); it has a class of its own, of which moe makes its shared expert
    "none": NoMLP,  # 0
    "moe": moe.MoE,  # Σ g_i swiglu_i(x) over the top_k experts i of largest score
    "moe_clamped": moe.ClampedMoE,  # as moe, down((up + 1) gate σ(1.702 gate)); gate, |up| <= 7
}

MIXER = {
    "attention": Attention,  # y_t = Σ_s softmax_s(q_t·k_s / sqrt(D)) v_s over s <= t
    "differential": Differential,  # (1 - a) norm((A_1 - l A_2) V); A_i softmax, l learned, a fixed
    "gated_delta": GatedDelta,  # S_t = alpha_t S_(t-1) (I - beta_t k_t k_tᵀ) + beta_t v_t k_tᵀ
    "mamba2": Mamba2,  # S_t = alpha_t S_(t-1) + dt_t v_t k_tᵀ, y_t = S_t q_t + skip v_t
    "mla": LatentAttention,  # attention with k = [c W_k ; x W_r], v = c W_v, c = norm(x W_d)
}

RESIDUAL = {  # of a sublayer F
    "plain": residual.Plain,  # x + F(x)
    "scaled": residual.Scaled,  # x + F(x); a block begins with x = c x + d x_0, x_0 the embedding
    "hyper": residual.Hyper,  # streams X: X_j becomes Σ_i A_ij X_i + b_j F(Σ_i a_i X_i)
    "mhc": residual.Constrained,  # as hyper; a and b positive, each row and column of A sums to 1
    "attn_res": residual.AttnRes,  # h_k = F_k(Σ_j softmax_j(w_k·norm(h_j)) h_j), j < k; h_0 = x_0
}

ATTN_EXTRA = {  # of a head of attention; of several words, the upper one acts first
    "none": attn_extra.Extra,  # nothing is added
    "sink": attn_extra.Sink,  # softmax weights exp(s_j) / (exp(b) + Σ_j exp(s_j))
    "value_residual": attn_extra.ValueResidual,  # (1 - λ) v + λ v of the first layer
    "value_embed": attn_extra.ValueEmbed,  # v + 2 σ(x W) e[token], in every other layer
    "xsa": attn_extra.XSA,  # y - (y·u) u, u = v / |v| of the token itself
    "gate_head": attn_extra.GateHead,  # σ(x w) y, one number per head
    "gate_element": attn_extra.GateElement,  # σ(x W) * y, one number per element
}

CANON = "Canon, Allen-Zhu 2025, arXiv:2512.17351"
INKLING = "Inkling 2026, transformers #47347"
CONV_SITES = {  # of conv_sites: where y becomes y + conv(y), and the source
    "none": "",  # nowhere, or attention's input where `conv` is given
    "input": CANON,  # y = x, of which attention makes q, k and v (Canon-A)
    "queries": CANON,  # y = x W_q, before norms and rope; with keys and values Canon-B
    "keys": INKLING,  # y = x W_k, before norms and rope
    "values": INKLING,  # y = x W_v
    "output": INKLING,  # y = what attention adds to the stream
    "mlp_input": CANON,  # y = x, of which the MLP makes up and gate (Canon-C)
    "mlp_inner": CANON,  # y = up(x), and y = gate(x), before the activation (Canon-D)
    "mlp_output": INKLING,  # y = what the MLP adds to the stream
}

ROPE_SCALING = {  # of the frequencies f_n = theta^(-2n/D); s = rope_factor
    "none": position.Scaling,  # f_n
    "linear": position.LinearScaling,  # f_n / s
    "ntk": position.NTK,  # (theta s^(D/(D-2)))^(-2n/D)
    "yarn": position.YaRN,  # f_n / s for slow pairs, f_n for fast ones; q and k times 0.1 ln s + 1
    "yarn_exact": position.YaRNExact,  # as yarn, the ramp between them not rounded to whole pairs
    "llama3": position.Llama3Scaling,  # f_n / s for slow pairs, f_n for fast ones, a blend between
}

SLOTS = {
    "embed": EMBED,
    "position": POSITION,
    "norm": NORM,
    "block": BLOCK,
    "mlp": MLP,
    "mixer": MIXER,
    "residual": RESIDUAL,
    "attn_extra": ATTN_EXTRA,
    "rope_scaling": ROPE_SCALING,
}
