"""The slot `mixer`: how information moves from one token to later ones. Attention is one word.

`mixer="attention,ema"` repeats over the depth: layers 0, 2, 4 ... have the first word.
"""

from parts.cache import State
from parts.part import Part


class Mixer(Part):
    """A mixer is made with a configuration and the number of its layer.

    forward(x, where, cache=None): x (B, T, C) -> (B, T, C). where: a position.Where. cache: this
    layer's state of what was read before, or None.
    """

    acted_on = ("embedding",)  # where a position scheme can reach it
    state = State  # the class of its state
    normed = False  # whether it has an RMSNorm of its own, which reads norm_eps

    @classmethod
    def period(cls, config):
        """Layers so many apart cost the same; 1 if all do."""
        return 1

    def new_state(self, cache):
        """The state of this layer in a new KVCache."""
        return self.state(cache)

    def held(self, T):
        """Numbers that the state holds after T tokens of one sequence."""
        raise TypeError(
            f"{type(self).__name__} does not say how much its state holds: give it a held(T)"
        )

    def shared(self, T):
        """Numbers that backward needs once for all sequences of T tokens."""
        return 0


MIXER = {}


def layer_mixers(config):
    """The mixer's word in each layer."""
    words = config.mixer.split(",")
    return [words[layer % len(words)] for layer in range(config.n_layer)]
