"""
What attention remembers while sampling: the keys and values of the tokens read so far, so that each
new token costs one token's work. The cache owns positions and padding; the models ask it.

    cache = KVCache()
    model(prompt, cache=cache); model(next_token, cache=cache); ...
"""

import torch


def visible(qpos, kpos, window=0, group=0):
    """The one mask of this repo, made from positions: which keys each query sees, (B or 1, 1, T, S).

    qpos (B or 1, T), kpos (B or 1, S), below 0 where there is no token. A query sees itself and what
    came before: of that the last `window` tokens, or its own group of `group` tokens (0: all)."""
    qpos, kpos = qpos[:, None, :, None], kpos[:, None, None, :]
    seen = (kpos <= qpos) & (kpos >= 0)
    if window:
        seen = seen & (kpos > qpos - window)
    if group:
        seen = seen & (kpos // group == qpos // group)
    return seen


class LayerCache:
    """Keys and values of one layer, (B, n_kv_head, capacity, D). The capacity doubles when it is full,
    or is the window, of which the oldest token makes room for the newest (a ring)."""

    def __init__(self, cache):
        self.cache = cache
        self.k = self.v = self.kpos = None

    def update(self, k, v, window=0):
        """Append k and v (B, n_kv_head, T, D) of the tokens last announced. Returns the keys and values to
        attend to (B, n_kv_head, S, D) and their mask (B or 1, 1, T, S), None where plain causal attention
        is right; self.kpos (B or 1, S) are then the positions of these keys."""
        if window:
            return self.update_ring(k, v, window)
        end = self.cache.length
        start = end - k.size(2)
        if self.k is None or self.k.size(2) < end:
            self.k, self.v = grown(self.k, k, start), grown(self.v, v, start)
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        self.kpos = self.cache.kpos
        return self.k[:, :, :end], self.v[:, :, :end], self.cache.mask

    def update_ring(self, k, v, window):
        pos, T, size = (
            self.cache.kpos[:, -k.size(2) :],
            k.size(2),
            window + self.cache.spare,
        )  # pos (B or 1, T)
        if self.k is None:
            self.k, self.v = (
                k.new_zeros(*k.shape[:2], size, k.size(3)),
                v.new_zeros(*v.shape[:2], size, v.size(3)),
            )
            self.ring = pos.new_full(
                (pos.size(0), size), -1
            )  # the position in each place of the ring, -1 where none is
        slots = (
            torch.arange(self.cache.length - T, self.cache.length, device=k.device)[-size:] % size
        )  # (T or size)
        if T > 1:  # earlier queries of a piece still see keys that its later tokens push out
            k_all, v_all, self.kpos = (
                torch.cat((self.k, k), 2),
                torch.cat((self.v, v), 2),
                torch.cat((self.ring, pos), 1),
            )
        self.k[:, :, slots], self.v[:, :, slots], self.ring[:, slots] = (
            k[:, :, -size:],
            v[:, :, -size:],
            pos[:, -size:],
        )
        if T == 1:
            k_all, v_all, self.kpos = self.k, self.v, self.ring
        return k_all, v_all, visible(self.cache.pos, self.kpos, window)


def grown(old, new, used):
    """A buffer for twice what is needed now, with the `used` tokens of the old one."""
    B, H, T, D = new.shape
    buffer = new.new_empty(B, H, max(64, 2 * (used + T)), D)
    if used:
        buffer[:, :, :used] = old[:, :, :used]
    return buffer


class KVCache:
    """The caches of all layers and the positions of the tokens in them.

    pad (B,): how many padding tokens stand before each prompt of a ragged batch, None for none. spare: slots
    that a window's ring keeps beyond its window, so that rewind can drop as many tokens."""

    def __init__(self, pad=None, spare=0):
        self.pad, self.spare = pad, spare
        self.layers = []
        self.length = self.peak = (
            0  # tokens read so far, padding included, and the most there ever were
        )
        self.pos = self.kpos = self.mask = self.slots = None

    def __getitem__(self, i):
        while len(self.layers) <= i:
            self.layers.append(LayerCache(self))
        return self.layers[i]

    def advance(self, idx):
        """Announce the tokens idx (B, T); returns their positions (B or 1, T)."""
        start, self.length = self.length, self.length + idx.size(1)
        self.peak = max(self.peak, self.length)
        if self.slots is None or self.slots.size(1) < self.length:
            self.slots = torch.arange(max(64, 2 * self.length), device=idx.device)[
                None
            ]  # (1, capacity)
            if self.pad is not None:
                self.slots = self.slots - self.pad.to(idx.device)[:, None]  # (B, capacity)
        self.kpos = self.slots[:, : self.length]  # (B or 1, S), below 0 is padding
        self.pos = self.kpos[:, start:].clamp(
            min=0
        )  # padding reads as position 0; nobody attends to it
        # A whole prompt is plainly causal, and a single token sees everything: no mask.
        plain = self.pad is None and (start == 0 or idx.size(1) == 1)
        self.mask = None if plain else visible(self.pos, self.kpos)
        return self.pos

    def rewind(self, length):
        """Forget the tokens read after the first `length`; ValueError if a ring no longer has what came before them."""
        for layer in self.layers:
            ring = getattr(layer, "ring", None)
            if ring is not None:
                if self.peak - length > self.spare and self.peak > ring.size(1):
                    raise ValueError(
                        f"cannot go back from {self.peak} tokens to {length}: the ring has {self.spare} spare slots"
                    )
                ring[
                    ring
                    >= (length if self.pad is None else length - self.pad.to(ring.device)[:, None])
                ] = -1
        self.length = length

    def size(self):
        """Bytes held: keys and values of all layers."""
        return sum(
            t.numel() * t.element_size()
            for layer in self.layers
            for t in (layer.k, layer.v)
            if t is not None
        )
