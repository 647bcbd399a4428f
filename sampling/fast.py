"""
Makes a trained model generate text fast, without changes to the readable models.

    model = make_fast(model, dtype="int8")   # is called as before

When a model generates one token at a time, it spends nearly all time on reading every weight once
per token. This code reads fewer bytes (16 bits, int8), in a contiguous order, in few large
operations, and for a long text with one compiled function that is kept on disk. Prompts, batches,
losses and Variants use the model's own forward pass.
Shapes: C = n_embd, H = n_head, K = n_kv_head, D = C / H, L layers, F width of the MLP, S keys,
V vocabulary.
"""

import hashlib
import inspect
import os
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

from common.errors import one_line
from common.runtime import cpu_name
from model import GPT, gelu
from model_llama import Llama, rotary
from sampling.prompts import note

# The compiled step saves about 2 ms per token at 6 layers of width 384, and takes up to a minute to
# compile, so it pays from this number of tokens on. The choice does not depend on whether a
# compiled step is on disk already, so that the same command always writes the same text.
COMPILE_PAYS = 20_000
POSITIONS = 1 << 17  # of LLaMA's angles in one table; a token after them is read the slower way

# ---------------------------------------------------------------- fewer bytes: int8


def quantized(weight):
    """(int8 (N, M), scale (N)) of weight (N, M): each row is divided by its scale, which is its
    largest absolute value / 127, and rounded."""
    scale = weight.float().abs().amax(1).clamp(min=1e-30) / 127  # (N)
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def int8_linear(x, weight, scale):
    """x (..., M) times weight (N, M) in int8, times scale (N).

    For few rows of x this is torch's packed kernel, which reads the weights as int8 and x as
    bfloat16. That kernel reads past the end of a row whose length is not a multiple of its step, so
    other lengths are excluded. For many rows the weights are converted to the format of x once."""
    few_rows = x.numel() <= 8 * x.size(-1)
    if x.device.type == "cpu" and few_rows and x.size(-1) % 64 == 0:
        ones = torch.ones_like(scale, dtype=torch.bfloat16)
        rows = torch._weight_int8pack_mm(x.flatten(0, -2).bfloat16(), weight, ones)
        return rows.view(*x.shape[:-1], -1).type_as(x) * scale
    return F.linear(x, weight.type_as(x)) * scale.type_as(x)


class Int8Linear(nn.Module):
    """nn.Linear with its weight in int8 and a scale per row. Its input stays floating point."""

    def __init__(self, linear):
        super().__init__()
        weight, scale = quantized(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x):
        y = int8_linear(x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias


def quantize(module):
    """Replace every nn.Linear in `module` by an Int8Linear. Embeddings and norms stay unchanged, so
    a tied head is quantized separately."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Int8Linear(child))
        else:
            quantize(child)


# ---------------------------------------------------------------- in a contiguous order


def stack(w, name, groups, columns):
    """Store in w[name] (L, N, M) the weights of each group of layers, one below the other, and in
    w[name.scale] and w[name.bias] their scales and biases, if they have them. The layers become
    views of these tensors, so that no weight is in memory twice. columns: whether the columns of a
    matrix are contiguous, which a CPU's matrix library reads up to 1.6 times as fast."""
    for part in ("weight", "scale", "bias"):
        if getattr(groups[0][0], part, None) is None:
            continue
        rows = [torch.cat([getattr(layer, part).detach() for layer in group]) for group in groups]
        stacked = torch.stack(rows)
        if columns and part == "weight":
            stacked = stacked.transpose(-2, -1).contiguous().transpose(-2, -1)
        w[name if part == "weight" else f"{name}.{part}"] = stacked
        for group, tensor in zip(groups, stacked, strict=True):
            sizes = [len(getattr(layer, part)) for layer in group]
            for layer, piece in zip(group, tensor.split(sizes), strict=True):
                getattr(layer, part).data = piece


def gather(model, columns):
    """{name: a tensor that `read_token` reads} of a GPT or Llama, stacked over the layers."""
    w = {}
    blocks = model.blocks
    config = model.config
    gated = hasattr(blocks[0].mlp, "gate")
    ups = [[b.mlp.gate, b.mlp.up] if gated else [b.mlp.up] for b in blocks]
    norms = [[norm] for b in blocks for norm in (b.norm1, b.norm2)] + [[model.norm_f]]
    stack(w, "qkv", [[b.attn.wq, b.attn.wk, b.attn.wv] for b in blocks], columns)
    stack(w, "wo", [[b.attn.wo] for b in blocks], columns)
    stack(w, "up", ups, columns)
    stack(w, "down", [[b.mlp.down] for b in blocks], columns)
    stack(w, "norm", norms, False)  # (2L + 1, C)
    stack(w, "head", [[model.lm_head]], columns)

    w["wte"] = model.wte.weight.detach()
    if isinstance(model, GPT):
        w["wpe"] = model.wpe.weight.detach()
    else:
        pos = torch.arange(min(config.block_size, POSITIONS), device=w["wte"].device)[None]
        cos, sin = rotary(pos, config.rope_theta, config.n_embd // config.n_head)
        pair = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
        w["rope"] = torch.stack(pair, 3)[0, 0]  # (positions, 2, D)
    return w


class Eager:
    """The operations of `read_token` as they are fastest in eager torch."""

    @staticmethod
    def linear(x, weight, scale):
        return F.linear(x, weight) if scale is None else int8_linear(x, weight, scale)

    @staticmethod
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.size(1) != k.size(1))

    @staticmethod
    def kept(x):
        return x


class Compiled:
    """The operations of `read_token` as plain loops over the weights. torch.compile would compute a
    value again in each loop that reads it, unless it is `kept`."""

    @staticmethod
    def kept(x):
        return x.as_strided(x.shape, x.stride())

    @staticmethod
    def linear(x, weight, scale):
        y = (weight.float() * x).sum(-1)  # (N)
        return Compiled.kept(y if scale is None else y * scale)[None]

    @staticmethod
    def attend(q, k, v):
        q = Compiled.kept(q * q.size(-1) ** -0.5).unflatten(1, (k.size(1), -1))  # (1, K, H/K, 1, D)
        scores = Compiled.kept((q * k[:, :, None]).sum(-1))  # (1, K, H/K, S)
        p = Compiled.kept((scores - scores.amax(-1, keepdim=True)).exp())
        y = (p[..., None] * v[:, :, None]).sum(-2) / p.sum(-1, keepdim=True)  # (1, K, H/K, D)
        return Compiled.kept(y)


def read_token(token, kpos, w, ks, vs, config, ops):
    """Logits (1, V) after one token (1) of a GPT or Llama: `forward`, written for a single token.
    kpos (S) are the positions up to the token's own. The caches ks, vs, a (1, K, capacity, D) per
    layer, get its key and value."""
    H = config.n_head
    C = config.n_embd
    S = kpos.size(0)
    pos = kpos[-1:]
    K = getattr(config, "n_kv_head", H)
    D = C // H
    is_llama = "rope" in w

    def linear(x, name, i):
        y = ops.linear(x, w[name][i], w[f"{name}.scale"][i] if f"{name}.scale" in w else None)
        return y + w[f"{name}.bias"][i] if f"{name}.bias" in w else y

    def norm(x, i):
        if is_llama:
            return ops.kept(F.rms_norm(x, (C,), w["norm"][i], config.norm_eps))
        bias = w["norm.bias"][i] if "norm.bias" in w else None
        return ops.kept(F.layer_norm(x, (C,), w["norm"][i], bias, 1e-5))

    x = w["wte"][token]  # (1, C)
    if is_llama:
        cos, sin = w["rope"][pos].unbind(1)  # (1, D) each
    else:
        x = x + w["wpe"][pos]
    for i in range(config.n_layer):
        qkv = linear(norm(x, 2 * i), "qkv", i).view(1, H + 2 * K, 1, D)
        qk, v = qkv.split((H + K, K), 1)
        if is_llama:
            qk = (qk * cos + qk.roll(D // 2, -1) * sin).type_as(qk)  # `rotate`: sin has the signs
        q, k = qk.split((H, K), 1)
        ks[i].index_copy_(2, pos, k)
        vs[i].index_copy_(2, pos, v)
        y = ops.attend(q, ks[i].narrow(2, 0, S), vs[i].narrow(2, 0, S))
        x = ops.kept(x + linear(y.reshape(1, C), "wo", i))

        u = linear(norm(x, 2 * i + 1), "up", i)  # (1, F or 2F)
        if is_llama:
            gate, up = u.chunk(2, -1)
            u = F.silu(gate) * up  # (1, F)
        else:
            u = gelu(u)  # (1, F)
        x = ops.kept(x + linear(ops.kept(u), "down", i))
    return linear(norm(x, -1), "head", 0)


# ---------------------------------------------------------------- compiled, and kept on disk


def artefact(model, dtype):
    """The path of the compiled step of a model of this shape. It contains no weights, so that all
    checkpoints of the shape share it. Raises RuntimeError if there is no home folder for it."""
    source = Path(__file__).read_text(encoding="utf-8")
    machine = (torch.__version__, cpu_name(), torch.get_num_threads())
    identity = repr((model.config, dtype, *machine)) + source + inspect.getsource(gelu)
    name = f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.pt2"
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path.home() / ".cache" / "torchinductor"
    return Path(folder) / "decode" / name


def compile_step(config, w, path):
    """Compile `read_token` ahead of time for a CPU, for any number of keys, into `path`. A product
    and a sum become one instruction."""
    K = getattr(config, "n_kv_head", config.n_head)
    D = config.n_embd // config.n_head
    ks = [torch.zeros(1, K, 64, D) for _ in range(config.n_layer)]
    vs = [torch.zeros(1, K, 64, D) for _ in range(config.n_layer)]

    class Step(nn.Module):
        def forward(self, token, kpos, w, ks, vs):
            torch._check(ks[0].size(2) >= kpos.size(0))
            return read_token(token, kpos, w, ks, vs, config, Compiled)

    auto = torch.export.Dim.AUTO
    capacities = [{2: auto} for _ in range(config.n_layer)]
    shapes = (None, {0: auto}, dict.fromkeys(w), capacities, capacities)
    example = (torch.zeros(1, dtype=torch.long), torch.arange(11), w, ks, vs)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.pt2")
    with warnings.catch_warnings(action="ignore"):
        program = torch.export.export(Step(), example, dynamic_shapes=shapes)
        options = {"cpp.enable_floating_point_contract_flag": "fast"}
        package = torch._inductor.aoti_compile_and_package
        package(program, package_path=str(temporary), inductor_configs=options)
    os.replace(temporary, path)


class Fast(nn.Module):
    """A GPT or Llama that reads single tokens by `read_token` and everything else by its own
    forward pass. It is called like the model and has the same config. columns: as in `stack`."""

    def __init__(self, model, columns):
        super().__init__()
        self.model = model
        self.config = model.config
        self.w = gather(model, columns)
        tables = ("wte", "wpe", "rope")  # the others are lists over the layers
        layers = {name: t if name in tables else t.unbind() for name, t in self.w.items()}
        self.run = partial(read_token, w=layers, config=self.config, ops=Eager)

    def load(self, path):
        """Use the compiled step in `path` from now on. Its inputs are passed one by one: a call of
        the package itself reads their structure from JSON for each token."""
        loader = torch._inductor.aoti_load_package(str(path)).loader
        w = list(self.w.values())

        def run(token, kpos, ks, vs):
            return loader.boxed_run([token, kpos, *w, *ks, *vs])[0]

        self.run = run

    def forward(self, idx, targets=None, cache=None, last_only=False):
        # `read_token` reads a token after a prompt, without padding, while there are positions.
        single = idx.shape == (1, 1) and targets is None and cache is not None
        positions = min(self.config.block_size, POSITIONS)
        single = single and cache.pad is None and 0 < cache.length < positions
        if not single:
            return self.model(idx, targets, cache=cache, last_only=last_only)

        cache.advance(idx)
        if cache[0].k.size(2) < cache.length:
            for layer in cache.layers.values():
                layer.make_room(layer.k[:, :, :1], layer.v[:, :, :1])
        ks = [layer.k for layer in cache.layers.values()]
        vs = [layer.v for layer in cache.layers.values()]
        return self.run(idx[0], cache.kpos[0], ks=ks, vs=vs)[None], None


def can_compile(model, dtype):
    """Whether the step of a model can be compiled: of a GPT or Llama on a CPU, float32 or int8."""
    plain = type(model) in (GPT, Llama) and model.wte.weight.is_cpu
    return plain and dtype in ("float32", "int8")


def prepare(model, dtype="float32", compile=False):
    """(a model that generates fast, how it decodes), from a model that is changed in place.

    dtype: float32, bfloat16, float16 or int8. compile: for a CPU, in float32 and int8."""
    model.eval()
    if dtype == "int8":
        quantize(model)
    else:
        model.to(getattr(torch, dtype))
    if type(model) not in (GPT, Llama):
        return model, "decoding by its own forward pass: the fast one knows GPT-2 and LLaMA only"

    on_cpu = model.wte.weight.is_cpu
    how = "decoding eager"
    if compile and not can_compile(model, dtype):
        compile = False
        how += " (compiled for a CPU only, in float32 and int8)"
    fast = Fast(model, columns=on_cpu and dtype == "float32" and not compile)
    if compile:
        try:
            path = artefact(model, dtype)
            if not path.exists():
                compile_step(model.config, fast.w, path)
            fast.load(path)
            how = "decoding compiled"
        except Exception as error:  # no working compiler, a full disk, no home folder: stay eager
            how += f" (compiling failed: {type(error).__name__} {one_line(error)[:100]})"
    return fast, how


def make_fast(model, dtype="float32", compile="auto", tokens=0):
    """A model that generates fast, from a model that is changed in place. With compile="auto" it is
    compiled if `tokens` tokens repay that."""
    if compile == "auto":
        compile = tokens >= COMPILE_PAYS and can_compile(model, dtype)
    if compile and can_compile(model, dtype):
        note("compiling, which takes up to a minute the first time")
    model, how = prepare(model, dtype, compile)
    if compile:
        note(how)
    return model
