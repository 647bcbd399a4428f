"""
What attention remembers while sampling: the keys and values of the tokens read so far, so that each
new token costs one token's work. The cache owns positions and padding; the models ask it.

    cache = KVCache()
    model(prompt, cache=cache); model(next_token, cache=cache); ...
"""
import torch


class LayerCache:
    """Keys and values of one layer (B, n_kv_head, capacity, D); the capacity doubles when it is full."""

    def __init__(self, cache):
        self.cache = cache
        self.k = self.v = None

    def update(self, k, v):
        """Append k and v (B, n_kv_head, T, D). Returns all keys and values so far (B, n_kv_head, S, D)
        and the mask (B or 1, 1, T, S), None where plain causal attention is right."""
        end = self.cache.length
        start = end - k.size(2)
        if self.k is None or self.k.size(2) < end:
            self.k, self.v = self.grown(self.k, k, start), self.grown(self.v, v, start)
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        return self.k[:, :, :end], self.v[:, :, :end], self.cache.mask

    def grown(self, old, new, used):
        B, H, T, D = new.shape
        buffer = new.new_empty(B, H, max(64, 2 * (used + T)), D)
        if used:
            buffer[:, :, :used] = old[:, :, :used]
        return buffer


class KVCache:
    """The caches of all layers and the positions of the tokens in them.

    pad (B,): how many padding tokens stand before each prompt of a ragged batch, None for none."""

    def __init__(self, pad=None):
        self.pad = pad
        self.layers = []
        self.length = 0  # tokens read so far, padding included
        self.mask = None

    def __getitem__(self, i):
        while len(self.layers) <= i:
            self.layers.append(LayerCache(self))
        return self.layers[i]

    def advance(self, idx):
        """Make room for the tokens idx (B, T); returns their positions (B or 1, T)."""
        start, self.length = self.length, self.length + idx.size(1)
        slots = torch.arange(self.length, device=idx.device)[None]  # (1, S)
        positions = slots if self.pad is None else slots - self.pad.to(idx.device)[:, None]  # (B or 1, S), < 0 is padding
        new = positions[:, start:].clamp(min=0)  # padding reads as position 0; nobody attends to it
        if self.pad is None and (start == 0 or idx.size(1) == 1):
            self.mask = None  # a whole prompt is plainly causal, and one token sees everything
        else:
            seen = (positions[:, None, :] <= new[:, :, None]) & (positions[:, None, :] >= 0)  # (B or 1, T, S)
            self.mask = seen[:, None]
        return new
