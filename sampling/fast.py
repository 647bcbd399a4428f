"""
Makes a trained model fast at writing, and leaves the readable models as they are.

    model, reasons = prepare(model, dtype="int8", tokens=500)   # is called as before

One token after another, the time goes into reading every weight once per token. So: read fewer bytes (16 bits,
int8), in an order that streams, in few large operations, and where a generation is long enough for it, from one
compiled function whose artefact stays on disk. Prompts, batches, losses and Variants go through the model itself.
Shapes: C = n_embd, H = n_head, K = n_kv_head, D = C / H, L layers, F width of the MLP, S keys, V vocabulary.
"""

import hashlib
import os
import shutil
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

from common.runtime import cpu_name
from model import GPT, gelu
from model_llama import Llama, rotary
from parts.cache import grown

# Tokens from which the compiled step repays its start: at 6 layers of width 384 it saves about 2 ms per token, and takes
# half a minute to compile. What is on disk already does not count: the same command writes the same text each time.
COMPILE_PAYS = 20_000

# ---------------------------------------------------------------- fewer bytes: int8


def quantized(weight):
    """(int8 (N, K), scale (N)): each row is divided by its largest absolute value / 127 and rounded."""
    scale = weight.float().abs().amax(1).clamp(min=1e-30) / 127  # (N)
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def int8_linear(x, weight, scale):
    """x (..., K) times weight (N, K) in int8, times scale (N). Few rows of x take torch's packed kernel, which reads
    the weights as int8 and x as bfloat16 (and past the end of a row that is no multiple of its step); for many rows
    the weights are widened once."""
    if x.device.type == "cpu" and x.numel() <= 8 * x.size(-1) and x.size(-1) % 64 == 0:
        rows = torch._weight_int8pack_mm(
            x.flatten(0, -2).bfloat16(), weight, torch.ones_like(scale, dtype=torch.bfloat16)
        )
        return rows.view(*x.shape[:-1], -1).type_as(x) * scale
    return F.linear(x, weight.type_as(x)) * scale.type_as(x)


class Int8Linear(nn.Module):
    """nn.Linear with its weight in int8, a scale per row (weight-only: what is multiplied stays floating)."""

    def __init__(self, linear):
        super().__init__()
        for name, tensor in zip(("weight", "scale"), quantized(linear.weight.detach())):
            self.register_buffer(name, tensor)
        self.bias = linear.bias

    def forward(self, x):
        return int8_linear(x, self.weight, self.scale) + (0 if self.bias is None else self.bias)


def quantize(module):
    """Every nn.Linear inside becomes an Int8Linear; embeddings and norms stay (a tied head is quantised by itself)."""
    for name, child in module.named_children():
        setattr(module, name, Int8Linear(child)) if isinstance(child, nn.Linear) else quantize(child)


# ---------------------------------------------------------------- in an order that streams, few and large


def by_columns(weight):
    """The same (..., N, K) with its columns contiguous: a CPU's matrix library reads it up to 1.6 times as fast then."""
    return weight.transpose(-2, -1).contiguous().transpose(-2, -1)


def stacked(w, name, groups, columns):
    """w[name] (L, N, K): the weights of each group of layers, one below the other; also their scales and biases.
    The layers themselves go on as views of it: no weight is held twice."""
    for part in ("weight", "scale", "bias"):
        if getattr(groups[0][0], part, None) is not None:
            whole = torch.stack(
                [torch.cat([getattr(layer, part).detach() for layer in group]) for group in groups]
            )
            whole = by_columns(whole) if columns and part == "weight" else whole
            w[name if part == "weight" else f"{name}.{part}"] = whole
            for group, rows in zip(groups, whole):
                for layer, piece in zip(
                    group, rows.split([len(getattr(layer, part)) for layer in group])
                ):
                    getattr(layer, part).data = piece


def gather(model, columns):
    """{name: what `step` reads of a GPT or Llama}, stacked over the layers."""
    w, blocks, config = {}, model.blocks, model.config
    stacked(w, "qkv", [[b.attn.wq, b.attn.wk, b.attn.wv] for b in blocks], columns)
    stacked(w, "wo", [[b.attn.wo] for b in blocks], columns)
    stacked(
        w,
        "up",
        [[b.mlp.gate, b.mlp.up] if hasattr(b.mlp, "gate") else [b.mlp.up] for b in blocks],
        columns,
    )
    stacked(w, "down", [[b.mlp.down] for b in blocks], columns)
    stacked(
        w, "norm", [[norm] for b in blocks for norm in (b.norm1, b.norm2)] + [[model.norm_f]], False
    )  # (2L + 1, C)
    stacked(w, "head", [[model.lm_head]], columns)
    w["wte"] = model.wte.weight.detach()
    if isinstance(model, GPT):
        w["wpe"] = model.wpe.weight.detach()
    else:
        cos, sin = rotary(
            torch.arange(config.block_size, device=w["wte"].device)[None],
            config.rope_theta,
            config.n_embd // config.n_head,
        )
        w["rope"] = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 3)[
            0, 0
        ]  # (block_size, 2, D)
    return w


class Eager:
    """How torch's own operations do it best, one at a time."""

    def linear(x, weight, scale):
        return F.linear(x, weight) if scale is None else int8_linear(x, weight, scale)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.size(1) != k.size(1))

    kept = staticmethod(lambda x: x)


class Compiled:
    """What a compiler turns into plain loops over the weights. `kept` marks what is computed once and stored, as
    torch.compile would else compute it anew inside each loop that reads it."""

    def kept(x):
        return x.as_strided(x.shape, x.stride())

    def linear(x, weight, scale):
        y = (weight.float() * x).sum(-1)  # (N)
        return Compiled.kept(y if scale is None else y * scale)[None]

    def attend(q, k, v):
        q = q.unflatten(1, (k.size(1), -1))  # (1, K, H/K, 1, D)
        scores = Compiled.kept((q * k[:, :, None]).sum(-1)) * q.size(-1) ** -0.5  # (1, K, H/K, S)
        p = Compiled.kept((scores - scores.amax(-1, keepdim=True)).exp())
        return Compiled.kept(
            (p[..., None] * v[:, :, None]).sum(-2) / p.sum(-1, keepdim=True)
        )  # (1, K, H/K, D)


def step(token, kpos, w, ks, vs, config, ops):
    """Logits (1, V) after one token (1), of a GPT or Llama: `forward`, written for a single token. kpos (S) are the
    positions up to the token's own; the caches ks, vs, a (1, K, capacity, D) per layer, get its key and value."""
    H, C, S, pos = config.n_head, config.n_embd, kpos.size(0), kpos[-1:]
    K, D, half = getattr(config, "n_kv_head", H), C // H, C // H // 2
    torch._check(ks[0].size(2) >= S)

    def linear(x, name, i):
        y = ops.linear(x, w[name][i], w[f"{name}.scale"][i] if f"{name}.scale" in w else None)
        return y + w[f"{name}.bias"][i] if f"{name}.bias" in w else y

    def norm(x, i):
        if "rope" in w:
            return ops.kept(F.rms_norm(x, (C,), w["norm"][i], config.norm_eps))
        return ops.kept(
            F.layer_norm(
                x, (C,), w["norm"][i], w["norm.bias"][i] if "norm.bias" in w else None, 1e-5
            )
        )

    x = w["wte"][token] if "rope" in w else w["wte"][token] + w["wpe"][pos]  # (1, C)
    cos, sin = w["rope"][pos].unbind(1) if "rope" in w else (None, None)  # (1, D) each
    for i in range(config.n_layer):
        qkv = linear(norm(x, 2 * i), "qkv", i).view(1, H + 2 * K, 1, D)
        qk, v = qkv.split((H + K, K), 1)
        if "rope" in w:
            qk = (qk * cos + qk.roll(half, -1) * sin).type_as(qk)
        q, k = qk.split((H, K), 1)
        ks[i].index_copy_(2, pos, k), vs[i].index_copy_(2, pos, v)
        y = ops.attend(q, ks[i].narrow(2, 0, S), vs[i].narrow(2, 0, S))
        x = ops.kept(x + linear(y.reshape(1, C), "wo", i))
        u = linear(norm(x, 2 * i + 1), "up", i)  # (1, F or 2F)
        u = F.silu(u.chunk(2, -1)[0]) * u.chunk(2, -1)[1] if "rope" in w else gelu(u)  # (1, F)
        x = ops.kept(x + linear(ops.kept(u), "down", i))
    return linear(norm(x, -1), "head", 0)


# ---------------------------------------------------------------- compiled, and kept on disk


def artefact(model, dtype):
    """Where the compiled step of such a model is kept. It holds no weights: any checkpoint of this shape uses it."""
    what = repr(
        (model.config, dtype, torch.__version__, cpu_name(), torch.get_num_threads())
    ) + Path(__file__).read_text(encoding="utf-8")
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path.home() / ".cache" / "torchinductor"
    return Path(folder) / "decode" / f"{hashlib.sha256(what.encode()).hexdigest()[:24]}.pt2"


def compile_step(config, w, path):
    """Compile `step` ahead of time for a CPU, for any number of keys, into `path`."""
    auto, K, D = (
        torch.export.Dim.AUTO,
        getattr(config, "n_kv_head", config.n_head),
        config.n_embd // config.n_head,
    )
    ks, vs = ([torch.zeros(1, K, 64, D) for _ in range(config.n_layer)] for _ in range(2))

    class Step(nn.Module):
        def forward(self, token, kpos, w, ks, vs):
            return step(token, kpos, w, ks, vs, config, Compiled)

    shapes = (
        None,
        {0: auto},
        dict.fromkeys(w),
        [{2: auto}] * config.n_layer,
        [{2: auto}] * config.n_layer,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.pt2")
    with warnings.catch_warnings(action="ignore"):
        program = torch.export.export(
            Step(),
            (torch.zeros(1, dtype=torch.long), torch.arange(11), w, ks, vs),
            dynamic_shapes=shapes,
        )
        torch._inductor.aoti_compile_and_package(program, package_path=str(temporary))
    os.replace(temporary, path)


class Fast(nn.Module):
    """A GPT or Llama that writes single tokens by `step`, and does all else by itself: called as a model is, with the
    same config. columns: the order of the weights in memory, see by_columns."""

    def __init__(self, model, columns):
        super().__init__()
        self.model, self.config = model, model.config
        self.w = gather(model, columns)
        layers = {
            name: t if name in ("wte", "wpe", "rope") else t.unbind() for name, t in self.w.items()
        }
        self.run = partial(step, w=layers, config=self.config, ops=Eager)

    def load(self, path):
        """From now on by the compiled step in `path`."""
        compiled = torch._inductor.aoti_load_package(str(path))
        self.run = lambda token, kpos, ks, vs: compiled(token, kpos, self.w, ks, vs)

    def forward(self, idx, targets=None, cache=None, last_only=False):
        if (
            idx.shape != (1, 1)
            or targets is not None
            or cache is None
            or cache.pad is not None
            or not 0 < cache.length < self.config.block_size
        ):
            return self.model(idx, targets, cache=cache, last_only=last_only)
        cache.advance(idx)
        if cache[0].k.size(2) < cache.length:
            for layer in cache.layers:
                layer.k, layer.v = (
                    grown(old, old[:, :, :1], cache.length - 1) for old in (layer.k, layer.v)
                )
        return self.run(
            idx[0],
            cache.kpos[0],
            ks=[layer.k for layer in cache.layers],
            vs=[layer.v for layer in cache.layers],
        )[None], None


@torch.no_grad()
def prepare(model, dtype="float32", tokens=0, compile="auto"):
    """(a model that writes `tokens` tokens fast, what was chosen and why). dtype: float32, bfloat16, float16 or int8;
    compile: True, False, or auto: where so many tokens repay it. The model given is changed in place."""
    model.eval()
    reasons = ["weights int8"] if dtype == "int8" else []
    quantize(model) if dtype == "int8" else model.to(getattr(torch, dtype))
    if type(model) not in (GPT, Llama):
        return model, reasons + [
            "decoding by its own forward pass: the fast one knows the two corners only"
        ]
    path, on_cpu = artefact(model, dtype), model.wte.weight.is_cpu
    if (
        not on_cpu
        or dtype in ("bfloat16", "float16")
        or not shutil.which(os.environ.get("CXX", "g++"))
    ):
        compile, why = False, "compiled for a CPU only, with a C++ compiler, in float32 and int8"
    elif compile == "auto":
        compile = tokens >= COMPILE_PAYS
        why = f"{tokens} tokens " + ("repay it" if compile else "would not repay it")
    else:
        why = "as asked"
    fast = Fast(model, columns=on_cpu and dtype == "float32" and not compile)
    if compile:
        began = time.perf_counter()
        try:
            if not path.exists():
                compile_step(model.config, fast.w, path)
                why += f"; {time.perf_counter() - began:.0f} s, once for this shape"
            fast.load(path)
        except Exception as error:  # a compiler, a full disk, a home that cannot be written: slower is better than nothing
            compile, why = (
                False,
                f"compiling failed: {type(error).__name__} {' '.join(str(error).split())[:100]}",
            )
    return fast, reasons + [f"decoding {'compiled' if compile else 'eager'} ({why})"]
