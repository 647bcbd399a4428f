"""The word `attention` of the slot `mixer`.

Shapes: B batch, T tokens, C = n_embd, H = n_head, K = n_kv_head, D = head_dim or C / H, S keys
(past and new).
"""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from parts.cache import LayerCache, Ring, visible
from parts.norm import BareRMSNorm, RMSNorm
from parts.part import MIXER, STD, Mixer, head_width, layer_mixers, linear, weight_dropout
from parts.position import POSITION, Alibi
from parts.recurrence import ShortConv

GATED = 32  # features that the gate of a value embedding reads
LONG = 512  # tokens; from here on a window of a quarter or less is faster in blocks

# The words of the key attn_extra, which takes several, and their papers.
EXTRA = {
    "none": "",
    "sink": "gpt-oss, arXiv:2508.10925",
    "gate_head": "Qiu et al. 2025, arXiv:2505.06708",
    "gate_element": "Qiu et al. 2025, arXiv:2505.06708",
    "value_residual": "Zhou et al. 2024, arXiv:2410.17897",
    "value_embed": "nanochat, Karpathy 2025",
    "xsa": "arXiv:2603.09078",
}


def compiled_on_gpu(x):
    return x.is_cuda and torch.compiler.is_compiling()


class Attention(Mixer):
    """softmax(q kᵀ / sqrt(D) + bias) v over the keys that a query may see.

    H / K neighbouring query heads share a key and value head: H multi-head, 1 multi-query (Shazeer
    2019, arXiv:1911.02150), between grouped-query (Ainslie et al. 2023, arXiv:2305.13245).
    window: a query sees the last so many tokens (Mistral, Jiang et al. 2023, arXiv:2310.06825);
    block_local: it sees its own group of so many. qk_norm: RMSNorm on each head's q and k (Qwen 3,
    arXiv:2505.09388), or on those of all heads at once (OLMo 2, arXiv:2501.00656).
    attn_softcap: scores become c tanh(scores / c) (Gemma 2, arXiv:2408.00118).
    nope_every: every so many layers the positions do not enter (Yang et al. 2025,
    arXiv:2501.18795).
    conv: x becomes x + conv(x) before all of this, a causal convolution over so many tokens in each
    channel, without bias or activation (Canon-A of Allen-Zhu 2025, arXiv:2512.17351).

    attn_extra, whose papers stand in EXTRA:
    sink: each head adds exp(b) to the sum of its weights, so that they may sum to less than 1.
    value_residual: v becomes (1 - λ) v + λ v_1, the values of the first layer.
    value_embed: every other layer, the last one included, adds a vector of the token's own to its
    value, times 2 σ(x W) of its first 32 features.
    xsa: the head's output loses its component along the token's own value.
    gate_head, gate_element: the head's output is multiplied by σ(x W), one number per head or per
    element.
    """

    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    acted_on = ("embedding", "q and k", "scores")
    reads = (
        *("n_kv_head", "head_dim", "window", "full_every", "block_local", "qk_norm"),
        *("attn_softcap", "conv", "nope_every", "attn_extra", "attn_dropout"),
    )

    def __init__(self, config, layer):
        super().__init__()
        C, H, K, D = config.n_embd, config.n_head, config.n_kv_head, head_width(config)
        sees_all = config.full_every and (layer + 1) % config.full_every == 0
        self.config, self.extra = config, set(config.attn_extra.split(","))
        self.n_head, self.n_kv_head, self.head_dim = H, K, D
        self.window = 0 if sees_all else config.window
        self.group, self.softcap = config.block_local, config.attn_softcap
        self.qk_norm = config.qk_norm

        self.conv = ShortConv(C, config.conv, bias=False) if config.conv else None
        self.wq = linear(C, D * H, config, qkv=True)
        self.wk = linear(C, D * K, config, qkv=True)
        self.wv = linear(C, D * K, config, qkv=True)
        self.wo = linear(D * H, C, config, residual=True)
        self.dropout = nn.Dropout(config.dropout)
        self.attn_dropout = weight_dropout(config)
        if self.qk_norm != "none":
            heads = (1, 1) if self.qk_norm == "head" else (H, K)
            norm = BareRMSNorm if config.norm == "rmsnorm_bare" else RMSNorm
            self.q_norm, self.k_norm = (norm(D * n, config) for n in heads)

        self.turns = not config.nope_every or (layer + 1) % config.nope_every != 0
        self.sinks = nn.Parameter(torch.zeros(H)) if "sink" in self.extra else None
        self.share = None  # λ, of the first attention layer's values
        if "value_residual" in self.extra and layer > layer_mixers(config).index("attention"):
            self.share = nn.Parameter(torch.tensor([0.5]))
        self.value_table = None  # (V, K D)
        if "value_embed" in self.extra and (config.n_layer - 1 - layer) % 2 == 0:
            self.value_table = nn.Parameter(torch.empty(config.vocab_size, D * K))
            self.value_gate = linear(min(C, GATED), K, config)
        self.gate = None
        if self.extra & {"gate_head", "gate_element"}:
            self.gate = linear(C, H if "gate_head" in self.extra else D * H, config)

    def reset(self):
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        if self.share is not None:
            nn.init.constant_(self.share, 0.5)
        if self.value_table is not None:
            nn.init.normal_(self.value_table, 0.0, STD)

    def forward(self, x, where, cache=None):
        T = x.size(1)
        if self.conv is not None:
            x = x + self.conv(x, cache)
        q, k, v = self.heads(x)
        own = v = self.values(x, v, where)  # before the past joins: (B, K, T, D)
        if self.turns:
            q, k = where.scheme.rotate(q, k, where.angles)
        if cache is None and compiled_on_gpu(x) and self.flexible(q, where.scheme):
            return self.output(x, self.flex(q, k, v, where), own)
        if cache is None and self.skips(x, where.scheme):
            return self.output(x, self.blocked(q, k, v), own)

        kpos, mask = where.pos, None
        if cache is not None:
            k, v, mask = cache.update(k, v)  # past ones too: (B, K, S, D)
            kpos = cache.kpos
        elif 0 < self.window < T:
            mask = visible(where.pos, kpos, self.window)
        if self.group:
            mask = visible(where.pos, kpos, group=self.group)
        bias = where.scheme.bias(q, where.pos, kpos)  # (B or 1, H, T, S) or None
        return self.output(x, self.attend(q, k, v, where.pos, kpos, mask, bias), own)

    def heads(self, x):
        """q (B, H, T, D), k and v (B, K, T, D) of x (B, T, C)."""
        B, T, _ = x.size()
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        v = v.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, K, T, D)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def values(self, x, v, where):
        """The values v (B, K, T, D) of the tokens x (B, T, C), mixed with those of the first layer
        and with a vector of the token's own."""
        if "value_residual" in self.extra:
            first = where.shared.setdefault("values", v)  # (B, K, T, D)
        if self.share is not None:
            v = (1 - self.share) * v + self.share * first
        if self.value_table is not None:
            added = F.embedding(where.idx, self.value_table).view(*x.shape[:2], self.n_kv_head, -1)
            scale = 2 * torch.sigmoid(self.value_gate(x[..., :GATED]))  # (B, T, K)
            v = v + (scale[..., None] * added).transpose(1, 2)
        return v

    def output(self, x, y, own):
        """What the block adds, (B, T, C), from the heads' outputs y (B, H, T, D), their input x
        (B, T, C) and the tokens' own values (B, K, T, D)."""
        B, T, _ = x.size()
        if "xsa" in self.extra:
            along = F.normalize(own, dim=-1).repeat_interleave(self.n_head // self.n_kv_head, 1)
            y = y - (y * along).sum(-1, keepdim=True) * along
        y = y.transpose(1, 2)  # (B, T, H, D)
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x)).view(B, T, self.n_head, -1)
        return self.dropout(self.wo(y.reshape(B, T, -1)))  # heads side by side

    def attend(self, q, k, v, qpos, kpos, mask, bias):
        """q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D)."""
        T, p = q.size(2), self.attn_dropout.p if self.training else 0.0
        sdpa = F.scaled_dot_product_attention
        if bias is None and not self.softcap and self.sinks is None:
            causal = mask is None and T > 1
            return sdpa(q, k, v, attn_mask=mask, is_causal=causal, dropout_p=p, enable_gqa=True)

        mask = visible(qpos, kpos) if mask is None else mask  # (B or 1, 1, T, S)
        if self.sinks is not None:
            k, v, mask, bias = self.with_sink(k, v, mask, bias)
        if not self.softcap:
            bias = bias.masked_fill(~mask, -torch.inf)
            return sdpa(q, k, v, attn_mask=bias, dropout_p=p, enable_gqa=True)

        shared_by = self.n_head // self.n_kv_head
        k, v = (a.repeat_interleave(shared_by, dim=1) for a in (k, v))  # (B, H, S, D)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.size(-1))  # (B, H, T, S)
        scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = (scores if bias is None else scores + bias).masked_fill(~mask, -torch.inf)
        return F.dropout(scores.softmax(-1), p) @ v

    def with_sink(self, k, v, mask, bias):
        """k, v, mask and bias with one more key in front, which every query sees: its score is the
        head's number b, its value 0."""
        B, K, S, D = k.shape
        nothing = k.new_zeros(B, K, 1, D)
        k, v = torch.cat((nothing, k), 2), torch.cat((nothing, v), 2)  # (B, K, 1 + S, D)
        if bias is None:
            bias = k.new_zeros(1, self.n_head, mask.size(2), S)
        b = self.sinks.type_as(bias)[None, :, None, None].expand(*bias.shape[:3], 1)
        return k, v, F.pad(mask, (1, 0), value=True), torch.cat((b, bias), 3)

    def skips(self, x, scheme):
        """Whether `blocked` does here what `attend` does, and faster: on a CPU, where a text
        x (B, T, C) is LONG and at least four blocks, without a bias or dropout of the scores."""
        block, drops = self.window or self.group, self.training and self.attn_dropout.p
        long = 0 < 4 * block <= x.size(1) and x.size(1) >= LONG
        return bool(long and x.device.type == "cpu" and scheme.acts_on != "scores" and not drops)

    def blocked(self, q, k, v):
        """`attend` without most of what the mask hides: the tokens in blocks as long as the window,
        each of which attends to itself and to the block before. Groups are such blocks, which
        attend to themselves alone."""
        T, block = q.size(2), self.window or self.group
        filled = (F.pad(x, (0, 0, 0, -T % block)) for x in (q, k, v))  # the last block, with zeros
        q, k, v = (x.unflatten(2, (-1, block)).transpose(1, 2) for x in filled)
        # q, k and v (B, n, H or K, block, D)
        pos = torch.arange(2 * block, device=q.device)[None]  # (1, 2 block)
        before, own = pos[:, :block], pos[:, block:]
        if self.group:
            y = self.attend(*(x.flatten(0, 1) for x in (q, k, v)), own, own, None, None)
            return y.unflatten(0, q.shape[:2]).transpose(1, 2).flatten(2, 3)[:, :, :T]

        first = self.attend(q[:, 0], k[:, 0], v[:, 0], before, before, None, None)
        pairs = (torch.cat((x[:, :-1], x[:, 1:]), 3).flatten(0, 1) for x in (k, v))
        mask = visible(own, pos, self.window)  # (1, 1, block, 2 block), the same for all blocks
        rest = self.attend(q[:, 1:].flatten(0, 1), *pairs, own, pos, mask, None)
        rest = rest.unflatten(0, (len(q), -1))  # (B, n - 1, H, block, D)
        y = torch.cat((first[:, None], rest), 1)
        return y.transpose(1, 2).flatten(2, 3)[:, :, :T]

    def flexible(self, q, scheme):
        """Whether `flex` can and should do what `attend` does here: more than plain causal
        attention, no dropout, no sink, no bias but ALiBi's, and heads of 16 or more, as its kernels
        need."""
        biased = scheme.acts_on == "scores"
        more = self.window or self.group or self.softcap or biased
        drops = self.training and self.attn_dropout.p
        expressible = not biased or isinstance(scheme, Alibi)
        return bool(more) and not drops and expressible and q.size(-1) >= 16 and self.sinks is None

    def flex(self, q, k, v, where):
        """`attend` without the (T, T) matrix and without the blocks that nobody sees:
        FlexAttention (Dong et al. 2024, arXiv:2412.05496), which is fast on a GPU and where the
        model is compiled."""

        def seen(b, h, i, j):  # what `visible` says, of one query and one key
            near = (j > i - self.window) if self.window else True
            return (j <= i) & near & (j // self.group == i // self.group if self.group else True)

        def score(s, b, h, i, j):
            s = self.softcap * torch.tanh(s / self.softcap) if self.softcap else s
            return s + scheme.slopes[h] * (j - i) if isinstance(scheme, Alibi) else s

        T, scheme, sight = q.size(2), where.scheme, (self.window, self.group)
        if sight not in where.shared:
            where.shared[sight] = create_block_mask(seen, None, None, T, T, device=q.device)
        blocks = where.shared[sight]
        return flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True)

    def new_state(self, cache):
        return Ring(cache, self.window) if self.window else LayerCache(cache)

    def held(self, T):
        keys_and_values = 2 * self.n_kv_head * self.head_dim * min(T, self.window or T)
        return keys_and_values + (self.conv.held() if self.conv else 0)

    def flops(self, T):
        """2 T H D for the scores and as much for the sum of values, whether or not a query sees all
        T: torch's counter has masked scores too, of which a good kernel skips most (a causal one
        does about half of these)."""
        products = 4 * (T + (self.sinks is not None)) * self.n_head * self.head_dim
        scores = POSITION[self.config.position].score_flops(self.config)
        return products + scores + (self.conv.flops(T) if self.conv else 0)


MIXER["attention"] = Attention
