"""
The memory of a model while sampling, so that each new token costs one token's work.

    cache = KVCache()
    model(prompt, cache=cache); model(next_token, cache=cache); ...

The cache owns the positions and the padding of the tokens read so far; each layer has a state in
it, which the mixer of that layer chooses: keys and values, a ring of them, or a recurrent state.
"""

import torch


def visible(qpos, kpos, window=0, group=0):
    """The one mask of this repo, made from positions: the keys each query sees, (B or 1, 1, T, S).

    qpos (B or 1, T), kpos (B or 1, S), below 0 where there is no token. A query sees itself and the
    tokens before it: `window` in all, or those of its own group of `group` tokens (0: no limit).
    """
    qpos = qpos[:, None, :, None]
    kpos = kpos[:, None, None, :]
    seen = (kpos <= qpos) & (kpos >= 0)
    if window:
        seen = seen & (kpos > qpos - window)
    if group:
        seen = seen & (kpos // group == qpos // group)
    return seen


def capacity(needed):
    """How many tokens to make room for where `needed` have come: twice as many, 64 at least."""
    return max(64, 2 * needed)


def grown(old, new, used, room=None):
    """A buffer like `new` (B, H, T, D), with room to grow and the `used` tokens of the old one.
    Zeros, as a masked key has weight 0, but 0 times a NaN in memory would be NaN."""
    B, H, T, D = new.shape
    buffer = new.new_zeros(B, H, room or capacity(used + T), D)
    if used:
        buffer[:, :, :used] = old[:, :, :used]
    return buffer


class State:
    """The memory of one layer. A mixer chooses the subclass, and calls its `update`, if it has one.

    `update` takes tensors of the tokens last announced, by KVCache.advance: one token or several.
    """

    def __init__(self, cache):
        self.cache = cache
        self.past = {}  # {name of a convolution: how many inputs it sees before each token}
        # {name of a convolution: its last inputs (B, past + n, channels)}, so that n can be dropped
        self.inputs = {}

    def without_padding(self, x):
        """x (B, T, C) of the tokens last announced, with zeros where a token is padding."""
        if self.cache.pad is None:
            return x
        return x * (self.cache.kpos[:, -x.size(1) :, None] >= 0)

    def with_past(self, x, past, name):
        """x (B, T, channels) of the tokens last announced, after the `past` inputs before them of
        the convolution `name`, zeros before the first token: (B, past + T, channels)."""
        if name not in self.inputs:
            self.past[name] = past
            self.inputs[name] = x.new_zeros(x.size(0), past, x.size(2))
        longer = torch.cat((self.inputs[name], x), 1)
        end = longer.size(1)
        kept = min(past + self.cache.spare, end)
        self.inputs[name] = longer[:, end - kept :].clone()  # not -kept, which may be 0
        return longer[:, end - x.size(1) - past :]

    def earliest(self):
        """The smallest number of tokens it can be rewound to."""
        droppable = [inputs.size(1) - self.past[name] for name, inputs in self.inputs.items()]
        if not droppable:
            return 0
        return self.cache.length - droppable[0]  # the same for all

    def rewind(self, length):
        """Forget the tokens after the first `length`, which is not below `earliest`."""
        if length < self.cache.length:
            for name, inputs in self.inputs.items():
                self.inputs[name] = inputs[:, : length - self.cache.length]

    def tensors(self):
        """The tensors it holds, not counting the last inputs of short convolutions."""
        return ()

    def size(self):
        """Bytes held."""
        held = [*self.tensors(), *self.inputs.values()]
        return sum(t.numel() * t.element_size() for t in held if t is not None)


class LayerCache(State):
    """Keys and values of one layer, (B, K, capacity, D) each; the capacity doubles when full."""

    def __init__(self, cache):
        super().__init__(cache)
        self.k = None
        self.v = None
        self.kpos = None  # (B or 1, S) positions of the keys that `update` last returned

    def update(self, k, v):
        """Append k and v (B, K, T, D) of the tokens last announced.

        Returns the keys and values to attend to (B, K, S, D) and their mask
        (B or 1, 1, T, S), None where plain causal attention is right; self.kpos (B or 1, S) are
        then the positions of these keys.
        """
        end = self.cache.length
        start = end - k.size(2)
        self.make_room(k, v)
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        self.kpos = self.cache.kpos
        return self.k[:, :, :end], self.v[:, :, :end], self.cache.mask

    def make_room(self, k, v):
        """Grow to hold the tokens read so far; k and v (B, K, T, D) of the last of them."""
        if self.k is None or self.k.size(2) < self.cache.length:
            used = self.cache.length - k.size(2)
            self.k = grown(self.k, k, used)
            self.v = grown(self.v, v, used)

    def tensors(self):
        return self.k, self.v


class Ring(LayerCache):
    """Keys and values of the last `window` tokens. The capacity doubles until it is the
    window plus the cache's `spare`; from then on each new token replaces the oldest."""

    def __init__(self, cache, window):
        super().__init__(cache)
        self.window = window
        self.stored_pos = None  # (B or 1, capacity) the position of each key, -1 where none is

    def update(self, k, v):
        T = k.size(2)
        end = self.cache.length
        pos = self.cache.kpos[:, -T:]  # (B or 1, T)
        self.make_room(k, v)
        room = self.k.size(2)
        places = torch.arange(end - T, end, device=k.device)  # (T)
        places = places[-room:] % room  # (T or capacity) where the last tokens go
        count = len(places)

        # Before they are written: earlier queries of a chunk see keys that later tokens push out.
        if T > 1:
            k_all = torch.cat((self.k, k), 2)
            v_all = torch.cat((self.v, v), 2)
            self.kpos = torch.cat((self.stored_pos, pos), 1)
        self.k[:, :, places] = k[:, :, -count:]
        self.v[:, :, places] = v[:, :, -count:]
        self.stored_pos[:, places] = pos[:, -count:]
        if T == 1:  # after they are written: a single token sees itself
            k_all = self.k
            v_all = self.v
            self.kpos = self.stored_pos
        return k_all, v_all, visible(self.cache.pos, self.kpos, self.window)

    def make_room(self, k, v):
        """Grow to hold the tokens read so far, until it has all places it ever needs."""
        full = self.window + self.cache.spare
        needed = self.cache.length
        old = 0 if self.k is None else self.k.size(2)
        if old == full or old >= needed:
            return
        room = min(full, capacity(needed))
        self.k = grown(self.k, k, old, room)
        self.v = grown(self.v, v, old, room)
        stored_pos = self.cache.pos.new_full((self.cache.pos.size(0), room), -1)
        if old:
            stored_pos[:, :old] = self.stored_pos
        self.stored_pos = stored_pos

    def earliest(self):
        earliest = super().earliest()
        if self.k is not None and self.cache.peak > self.k.size(2):  # keys have been pushed out
            earliest = max(earliest, self.cache.peak - self.cache.spare)
        return earliest

    def rewind(self, length):
        super().rewind(length)
        if self.stored_pos is not None:
            pad = self.cache.pad
            from_pos = length if pad is None else length - pad.to(self.stored_pos.device)[:, None]
            self.stored_pos[self.stored_pos >= from_pos] = -1


class Recurrent(State):
    """A state of fixed size, replaced at each token. The newest is kept, and the one before each
    of the last `spare` tokens, so that `rewind` can drop these."""

    def __init__(self, cache):
        super().__init__(cache)
        self.states = None  # (B, n, ...) before the last n - 1 tokens, and after each of them

    def update(self, states):
        """Remember states (B, T, ...): after each of the tokens last announced, or after the last
        few of them alone."""
        if self.states is None:
            self.states = torch.zeros_like(states[:, :1])
        kept = torch.cat((self.states, states), 1)[:, -1 - self.cache.spare :]
        self.states = kept.clone()  # a slice would keep the whole tensor in memory

    def last(self):
        """The newest state (B, ...), or 0 before the first token."""
        return 0 if self.states is None else self.states[:, -1]

    def tensors(self):
        return (self.states,)

    def earliest(self):
        held = 0 if self.states is None else self.states.size(1) - 1
        return self.cache.length - held

    def rewind(self, length):
        super().rewind(length)
        if self.states is not None and length < self.cache.length:
            self.states = self.states[:, : length - self.cache.length]


class KVCache:
    """The states of all layers and the positions of the tokens in them.

    pad (B,): how many padding tokens stand before each prompt of a ragged batch, None for none.
    spare: how many of the last tokens `rewind` can drop where a state forgets its past (a ring, a
    recurrent state, a short convolution, n-grams); all other states can drop any number.
    """

    def __init__(self, pad=None, spare=0):
        self.pad = pad
        self.spare = spare
        self.layers = {}  # {number of a layer, or "embed": its state}
        self.length = 0  # tokens read so far, padding included
        self.peak = 0  # the largest length so far
        self.positions = None  # (B or 1, capacity) positions of all tokens there is room for
        self.pos = None  # (B or 1, T) positions of the tokens last announced
        self.kpos = None  # (B or 1, S) positions of all tokens read so far
        self.needs_mask = False
        self.made = None  # the mask, once made

    def __getitem__(self, i):
        """The state of layer i: keys and values, unless `layer` made another."""
        return self.layer(i, LayerCache)

    def layer(self, i, make):
        """The state of layer i, or of the embedding (i: "embed"), which make(cache) makes the
        first time."""
        if i not in self.layers:
            self.layers[i] = make(self)
        return self.layers[i]

    def advance(self, idx):
        """Announce the tokens idx (B, T); returns their positions (B or 1, T)."""
        start = self.length
        self.length += idx.size(1)
        self.peak = max(self.peak, self.length)
        if self.positions is None or self.positions.size(1) < self.length:
            most = capacity(self.length)
            self.positions = torch.arange(most, device=idx.device)[None]  # (1, capacity)
            if self.pad is not None:
                self.positions = self.positions - self.pad.to(idx.device)[:, None]  # (B, capacity)
        self.kpos = self.positions[:, : self.length]  # (B or 1, S), below 0 is padding
        # Padding has position 0 as a query; as a key it is masked.
        self.pos = self.kpos[:, start:].clamp(min=0)

        # A whole prompt is plainly causal, and a single token sees everything: no mask.
        self.needs_mask = self.pad is not None or (start != 0 and idx.size(1) != 1)
        self.made = None
        return self.pos

    @property
    def mask(self):
        """The mask of all tokens read so far, (B or 1, 1, T, S), or None for no mask. Made when the
        first layer asks for it: rings and recurrent states do not."""
        if self.made is None and self.needs_mask:
            self.made = visible(self.pos, self.kpos)
        return self.made

    def rewind(self, length):
        """Forget the tokens read after the first `length`; ValueError if a state cannot."""
        if length < max((layer.earliest() for layer in self.layers.values()), default=0):
            raise ValueError(
                f"cannot go back from {self.peak} tokens to {length}: spare={self.spare}"
            )
        for layer in self.layers.values():
            layer.rewind(length)
        self.length = length

    def size(self):
        """Bytes held by all layers."""
        return sum(layer.size() for layer in self.layers.values())
