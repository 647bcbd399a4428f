"""The slot `block`: where the norms stand, and whether the two sublayers run one after the other.

A block is two sublayers, the mixer and the MLP, and some norms, added to the residual stream x.
Shapes: B batch, T tokens, C = n_embd.
"""

from parts.part import Part


class Block(Part):
    """Two sublayers, attn and mlp, with norms. Each subclass has a forward, as in model.py.

    make: makes the parts of this layer (variant.LayerParts). Stored weights are named `attn`
    whatever the mixer is.
    """

    reads_per_block = 2  # how often it reads the residual stream
    last_norm = True  # whether the model has a norm before the head

    def __init__(self, make):
        super().__init__()
        self.norm1 = make.norm()
        self.attn = make.mixer()
        self.norm2 = make.norm()
        self.mlp = make.mlp()
        self.residual = make.residual(self.reads_per_block)


class Pre(Block):
    """The norm before each sublayer."""

    paper = "GPT-2, Radford et al. 2019"

    def forward(self, x, where, cache=None):
        h, x = self.residual.read(x, 0, where)
        x = self.residual.add(x, self.attn(self.norm1(h), where, cache))
        h, x = self.residual.read(x, 1, where)
        return self.residual.add(x, self.mlp(self.norm2(h), where, cache))


class Post(Block):
    """The norm after each sum, and none at the end."""

    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    last_norm = False

    def forward(self, x, where, cache=None):
        h, x = self.residual.read(x, 0, where)
        x = self.norm1(self.residual.add(x, self.attn(h, where, cache)))
        h, x = self.residual.read(x, 1, where)
        return self.norm2(self.residual.add(x, self.mlp(h, where, cache)))


class Output(Block):
    """A norm on the output of each sublayer."""

    paper = "OLMo 2, arXiv:2501.00656"

    def forward(self, x, where, cache=None):
        h, x = self.residual.read(x, 0, where)
        x = self.residual.add(x, self.norm1(self.attn(h, where, cache)))
        h, x = self.residual.read(x, 1, where)
        return self.residual.add(x, self.norm2(self.mlp(h, where, cache)))


class Sandwich(Block):
    """Norms before and after each sublayer (Peri-LN)."""

    paper = "Kim et al. 2025, arXiv:2502.02732"

    def __init__(self, make):
        super().__init__(make)
        self.norm1_out = make.norm()
        self.norm2_out = make.norm()

    def forward(self, x, where, cache=None):
        h, x = self.residual.read(x, 0, where)
        x = self.residual.add(x, self.norm1_out(self.attn(self.norm1(h), where, cache)))
        h, x = self.residual.read(x, 1, where)
        return self.residual.add(x, self.norm2_out(self.mlp(self.norm2(h), where, cache)))


class Parallel(Block):
    """Both sublayers read the same norm of x."""

    paper = "GPT-J; PaLM, arXiv:2204.02311; Falcon 7B"
    reads_per_block = 1

    def __init__(self, make):
        Part.__init__(self)
        self.norm1 = make.norm()
        self.attn = make.mixer()
        self.mlp = make.mlp()
        self.residual = make.residual(self.reads_per_block)

    def forward(self, x, where, cache=None):
        h, x = self.residual.read(x, 0, where)
        h = self.norm1(h)
        return self.residual.add(x, self.attn(h, where, cache), self.mlp(h, where, cache))


class Parallel2(Block):
    """Both sublayers read the same x, each through its own norm."""

    paper = "GPT-NeoX, arXiv:2204.06745"
    reads_per_block = 1

    def forward(self, x, where, cache=None):
        h, x = self.residual.read(x, 0, where)
        y = self.attn(self.norm1(h), where, cache)
        return self.residual.add(x, y, self.mlp(self.norm2(h), where, cache))
