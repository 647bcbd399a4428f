"""The word `mla` of the slot `mixer`: multi-head latent attention.

Shapes: B batch, T tokens, C = n_embd, H = n_head, D = head_dim or C / H, S keys,
L = latent_rank, R = rope_head_dim.
"""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from parts.cache import LayerCache
from parts.norm import RMSNorm
from parts.part import Linear, Mixer, head_width, linear, refuse, weight_dropout


def key_width(config):
    """R, the width of the key that all heads share."""
    return config.rope_head_dim or 2 * max(1, head_width(config) // 4)


class LatentAttention(Mixer):
    """Attention whose keys and values are made of one short vector per token, c = norm(x W_d), the
    latent: k_h = [c W_k,h ; r] and v_h = c W_v,h, q_h = x W_q,h. r = x W_r is a key that all heads
    share, R wide, and only r and that part of q are rotated. The cache holds c and r.

    For one token the products are taken in the other order, q (W_k c) = (q W_k) c, so that no key
    or value of the past is made again. As in DeepSeek-V2-Lite, queries have no latent.
    """

    paper = "DeepSeek-V2, arXiv:2405.04434"
    acted_on = ("embedding", "q and k")
    reads = ("latent_rank", "rope_head_dim", "head_dim", "attn_dropout")
    normed = True
    state = LayerCache

    @classmethod
    def check(cls, config):
        R = key_width(config)
        pairs = int(config.rope_fraction * R / 2)
        refuse(
            config.position == "rope" and (R % 2 or pairs == 0),
            f"rope rotates pairs, and rope_head_dim={R} with rope_fraction={config.rope_fraction} "
            "leaves an odd number of features, or none: make it even, or rope_fraction larger",
        )

    def __init__(self, config, layer):
        super().__init__()
        C = config.n_embd
        H = config.n_head
        D = head_width(config)
        self.n_head = H
        self.width = D
        self.rank = config.latent_rank or max(1, C // 4)
        self.key_width = key_width(config)
        self.wq = linear(C, H * (D + self.key_width), config)
        self.wd = linear(C, self.rank + self.key_width, config)
        self.latent_norm = RMSNorm(self.rank, config)
        self.wu = linear(self.rank, 2 * H * D, config)
        self.wo = linear(H * D, C, config, residual=True)
        self.dropout = nn.Dropout(config.dropout)
        self.attn_dropout = weight_dropout(config)

    def forward(self, x, where, cache=None):
        B, T, _ = x.size()
        q, latents = self.compressed(x, where)  # latents (B, 1, T, L + R)
        mask = None
        if cache is not None:
            no_values = latents[..., :0]  # the latent stands for keys and values
            latents, _, mask = cache.update(latents, no_values)  # (B, 1, S, L + R)

        if cache is not None and T == 1 and type(self.wu) is Linear:  # not in int8, nor low_rank
            y = self.absorbed(q, latents, mask)
        else:
            k, v = self.expanded(latents)
            v = F.pad(v, (0, self.key_width))  # the fast kernels want v as wide as q and k
            y = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=self.attn_dropout.p if self.training else 0.0,
                is_causal=mask is None and T > 1,
            )
            y = y[..., : self.width]
        return self.dropout(self.wo(y.transpose(1, 2).reshape(B, T, -1)))  # heads side by side

    def compressed(self, x, where):
        """q (B, H, T, D + R) of x (B, T, C), and the latents [c ; r], (B, 1, T, L + R)."""
        q = self.wq(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        q, q_turned = q.split((self.width, self.key_width), -1)
        latent, shared_key = self.wd(x)[:, None].split((self.rank, self.key_width), -1)
        angles = where.scheme.angles(where.pos, self.key_width)
        q_turned = where.scheme.turn(q_turned, angles)
        shared_key = where.scheme.turn(shared_key, angles)
        latents = torch.cat((self.latent_norm(latent), shared_key), -1)
        return torch.cat((q, q_turned), -1), latents

    def expanded(self, latents):
        """k (B, H, S, D + R) and v (B, H, S, D) of all heads."""
        latent, shared_key = latents.split((self.rank, self.key_width), -1)
        k_and_v = self.wu(latent[:, 0]).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        k, v = k_and_v.chunk(2, -1)  # (B, H, S, D)
        return torch.cat((k, shared_key.expand(-1, self.n_head, -1, -1)), -1), v

    def absorbed(self, q, latents, mask):
        """The values (B, H, 1, D) of one query, without keys and values of the heads. A bias of the
        keys adds the same to all scores, which changes nothing."""
        to_k, to_v = self.wu.weight.unflatten(0, (self.n_head, 2, -1)).unbind(1)  # (H, D, L)
        q, q_turned = q.split((self.width, self.key_width), -1)
        q = torch.cat((q @ to_k, q_turned), -1)  # (B, H, 1, L + R)
        scale = 1 / math.sqrt(self.width + self.key_width)
        y = F.scaled_dot_product_attention(
            q, latents, latents[..., : self.rank], mask, scale=scale, enable_gqa=True
        )  # (B, H, 1, L)
        y = y @ to_v.mT
        if self.wu.bias is None:
            return y
        return y + self.wu.bias.unflatten(0, (self.n_head, 2, 1, -1))[:, 1]

    def held(self, T):
        return (self.rank + self.key_width) * T

    def flops(self, T):
        return 4 * T * self.n_head * (self.width + self.key_width)
