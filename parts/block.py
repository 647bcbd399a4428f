"""The slot `block`: where the norms stand, and whether the two sublayers run one after the other.

A block is two sublayers, the mixer and the MLP, and some norms, added to the residual stream x.
"""

from parts.mixer import MIXER, layer_mixers
from parts.mlp import MLP
from parts.norm import NORM
from parts.part import Part
from parts.residual import RESIDUAL


class Block(Part):
    """A word is a subclass: its `forward`, and the norms it has."""

    norms = ("norm1", "norm2")
    reads_per_block = 2  # how often it reads the residual stream
    last_norm = True  # whether the model has a norm before the head

    def __init__(self, config, layer):
        super().__init__()
        norm = NORM[config.norm]
        self.norm1 = norm(config.n_embd, config)
        # The name `attn` is that of the stored weights, whatever the mixer.
        self.attn = MIXER[layer_mixers(config)[layer]](config, layer)
        if "norm2" in self.norms:
            self.norm2 = norm(config.n_embd, config)
        self.mlp = MLP[config.mlp](config)
        for name in self.norms:
            if not hasattr(self, name):
                setattr(self, name, norm(config.n_embd, config))
        self.residual = RESIDUAL[config.residual](config, layer, self.reads_per_block)


class Pre(Block):
    """The norm before each sublayer."""

    paper = "GPT-2, Radford et al. 2019"

    def forward(self, x, where, cache=None):
        h, kept = self.residual.read(x, 0, where)
        x = self.residual.add(kept, self.attn(self.norm1(h), where, cache))
        h, kept = self.residual.read(x, 1, where)
        return self.residual.add(kept, self.mlp(self.norm2(h), where))

    @staticmethod
    def reference(x, mix, mlp, norm1, norm2):
        y = mix(norm1(x)) + x
        return mlp(norm2(y)) + y


class Post(Block):
    """The norm after each sum, and none at the end."""

    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    last_norm = False

    def forward(self, x, where, cache=None):
        h, kept = self.residual.read(x, 0, where)
        x = self.norm1(self.residual.add(kept, self.attn(h, where, cache)))
        h, kept = self.residual.read(x, 1, where)
        return self.norm2(self.residual.add(kept, self.mlp(h, where)))

    @staticmethod
    def reference(x, mix, mlp, norm1, norm2):
        y = norm1(mix(x) + x)
        return norm2(mlp(y) + y)


class Output(Block):
    """A norm on the output of each sublayer."""

    paper = "OLMo 2, arXiv:2501.00656"

    def forward(self, x, where, cache=None):
        h, kept = self.residual.read(x, 0, where)
        x = self.residual.add(kept, self.norm1(self.attn(h, where, cache)))
        h, kept = self.residual.read(x, 1, where)
        return self.residual.add(kept, self.norm2(self.mlp(h, where)))

    @staticmethod
    def reference(x, mix, mlp, norm1, norm2):
        y = norm1(mix(x)) + x
        return norm2(mlp(y)) + y


class Sandwich(Block):
    """Norms before and after each sublayer (Peri-LN)."""

    paper = "Kim et al. 2025, arXiv:2502.02732"
    norms = ("norm1", "norm2", "norm1_out", "norm2_out")

    def forward(self, x, where, cache=None):
        h, kept = self.residual.read(x, 0, where)
        x = self.residual.add(kept, self.norm1_out(self.attn(self.norm1(h), where, cache)))
        h, kept = self.residual.read(x, 1, where)
        return self.residual.add(kept, self.norm2_out(self.mlp(self.norm2(h), where)))

    @staticmethod
    def reference(x, mix, mlp, norm1, norm2, norm1_out, norm2_out):
        y = norm1_out(mix(norm1(x))) + x
        return norm2_out(mlp(norm2(y))) + y


class Parallel(Block):
    """Both sublayers read the same norm of x."""

    paper = "GPT-J; PaLM, arXiv:2204.02311; Falcon 7B"
    norms = ("norm1",)
    reads_per_block = 1

    def forward(self, x, where, cache=None):
        h, kept = self.residual.read(x, 0, where)
        h = self.norm1(h)
        return self.residual.add(kept, self.attn(h, where, cache), self.mlp(h, where))

    @staticmethod
    def reference(x, mix, mlp, norm1):
        return mlp(norm1(x)) + mix(norm1(x)) + x


class Parallel2(Block):
    """Both sublayers read the same x, each through its own norm."""

    paper = "GPT-NeoX, arXiv:2204.06745"
    reads_per_block = 1

    def forward(self, x, where, cache=None):
        h, kept = self.residual.read(x, 0, where)
        y = self.attn(self.norm1(h), where, cache)
        return self.residual.add(kept, y, self.mlp(self.norm2(h), where))

    @staticmethod
    def reference(x, mix, mlp, norm1, norm2):
        return mlp(norm2(x)) + mix(norm1(x)) + x


BLOCK = {
    "pre": Pre,
    "post": Post,
    "output": Output,
    "sandwich": Sandwich,
    "parallel": Parallel,
    "parallel2": Parallel2,
}
