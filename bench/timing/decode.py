"""
How fast a trained model writes, one token after another:

    python bench/speed.py decode --nanogpt=../nanoGPT --llama2c=../llama2.c/run.c    # beside the peers
    python bench/speed.py decode --out_dir=RUN --text=FILE                           # a trained LLaMA's size, and its loss in each mode
    python bench/speed.py gqa                                                        # what sharing keys and values buys

All take turns, so that a busy machine slows all alike; a speed is that of the median round. Every LLaMA here has the
same weights, and its greedy text is compared. Writes bench/results/speed_decode.md or speed_gqa.md.
"""

import copy
import importlib.util
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from common.configurator import build, load
from common.errors import UserError
from common.files import ROOT
from common.runtime import find_device, versions
from model_llama import Llama, LlamaConfig
from parts.cache import KVCache
from sampling.fast import prepare
from weights.checkpoint import open_run
from weights.export import to_hf

GCC = ["gcc", "-Ofast", "-march=native", "-fopenmp"]


@dataclass
class DecodeConfig:
    nanogpt: str = ""  # a checkout of nanoGPT
    llama2c: str = ""  # run.c of llama2.c
    out_dir: str = ""  # a run folder of a LLaMA to take in place of a random one
    text: str = ""  # a file to take the loss on, where out_dir is given
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384
    vocab_size: int = 65
    block_size: int = 512
    tokens: int = 256  # written by each in a round (nanoGPT: in one round)
    rounds: int = 5
    threads: int | None = None  # None: 1, then 2


@dataclass
class GqaConfig:
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384
    vocab_size: int = 65
    rounds: int = 7  # tokens that are timed
    threads: int = 1
    device: str = "auto"


def sync(device):
    if str(device).startswith("cuda"):
        torch.cuda.synchronize()


# ---------------------------------------------------------------- decode


def build_llama(config):
    """(the model in evaluation mode, tokens to take its loss on or None)."""
    if config.out_dir:
        model, tokenizer, _, _ = open_run(config.out_dir)
        if type(model) is not Llama:
            raise UserError(
                f"it holds a {type(model).__name__}",
                f"out_dir={config.out_dir}",
                "give a LLaMA's run folder",
            )
        text = (
            config.text
            and torch.from_numpy(
                tokenizer.encode(Path(config.text).read_text(encoding="utf-8"))
            ).long()
        )
        return model, text if config.text else None
    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(
            **{
                key: getattr(config, key)
                for key in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")
            }
        )
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(
                3.0 if p.dim() == 2 else 1.0
            )  # at their initial size the text would hardly depend on what came before
        model.lm_head.weight[1] = 0.0  # never the likeliest: llama2.c stops at token 1
    return model, None


@torch.inference_mode()
def greedy(model, n, given=None):
    """n greedy tokens after token 1, or the log-probabilities (n, V) along the tokens `given`."""
    cache, new, out = KVCache(), torch.tensor([[1]]), []
    for i in range(n):
        logits = model(new, cache=cache, last_only=True)[0][:, -1]  # (1, V)
        new = logits.argmax(-1, keepdim=True) if given is None else torch.tensor([[given[i]]])
        out.append(logits.double().log_softmax(-1)[0] if given is not None else new)
    return torch.stack(out) if given is not None else torch.cat(out, 1)[0].tolist()


@torch.inference_mode()
def loss(model, text, T):
    """Mean cross-entropy in nats per token over windows of T, at most 20,000 tokens."""
    n = min(20_000, len(text) - 1) // T
    x, y = text[: n * T].view(n, T), text[1 : n * T + 1].view(n, T)
    return statistics.mean(model(a[None], b[None])[1].item() for a, b in zip(x, y))


def transformers_arm(model):
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    config, tensors = to_hf("llama", vars(model.config), model.state_dict(), ("llama",))
    theirs = LlamaForCausalLM(
        TheirConfig(**{key: value for key, value in config.items() if key != "architectures"})
    ).eval()
    theirs.load_state_dict(
        {key: value.clone() for key, value in tensors.items()},
        strict=not model.config.tie_embeddings,
    )
    return lambda n: theirs.generate(
        torch.tensor([[1]]),
        max_new_tokens=n,
        min_new_tokens=n,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )[0, 1:].tolist()


def nanogpt_arm(path, c):
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path, "model.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    model = module.GPT(
        module.GPTConfig(
            block_size=c.block_size,
            vocab_size=c.vocab_size,
            n_layer=c.n_layer,
            n_head=c.n_head,
            n_embd=c.n_embd,
            dropout=0.0,
            bias=False,
        )
    ).eval()
    return lambda n: model.generate(torch.tensor([[1]]), n, top_k=1)[0, 1:].tolist()


def write_llama2c(model, folder):
    """Our weights in the older format that run.c reads: seven integers, then fp32 matrices, all layers of one kind
    together; its RoPE turns neighbouring pairs, so the rows of wq and wk change places. And words to print: the ids."""
    c, state = model.config, model.state_dict()

    def all_layers(name, heads=0):
        for i in range(c.n_layer):
            w = state[f"blocks.{i}.{name}.weight"]
            yield w.view(heads, 2, -1, c.n_embd).transpose(1, 2).reshape_as(w) if heads else w

    kinds = [
        ("norm1",),
        ("attn.wq", c.n_head),
        ("attn.wk", c.n_kv_head),
        ("attn.wv",),
        ("attn.wo",),
        ("norm2",),
        ("mlp.gate",),
        ("mlp.down",),
        ("mlp.up",),
    ]
    tables = torch.zeros(c.block_size * c.n_embd // c.n_head)  # of angles, which it skips
    parts = [
        state["wte.weight"],
        *(w for kind in kinds for w in all_layers(*kind)),
        state["norm_f.weight"],
        tables,
        state["lm_head.weight"],
    ]
    with open(folder / "model.bin", "wb") as file:
        width = model.blocks[0].mlp.gate.out_features
        file.write(
            struct.pack(
                "7i", c.n_embd, width, c.n_layer, c.n_head, c.n_kv_head, -c.vocab_size, c.block_size
            )
        )
        file.writelines(part.contiguous().float().numpy().tobytes() for part in parts)
    words = [f"{i:05d} ".encode() for i in range(c.vocab_size)]
    with open(folder / "tokenizer.bin", "wb") as file:
        file.write(
            struct.pack("i", 6)
            + b"".join(struct.pack("fi", 0.0, len(word)) + word for word in words)
        )


def llama2c_arm(source, model, folder):
    """A function that returns (its tokens, its own tokens/s)."""
    write_llama2c(model, folder)
    subprocess.run(
        [*GCC, "-o", folder / "run", source, "-lm"], check=True, stderr=subprocess.DEVNULL
    )

    def write(n):
        command = [
            folder / "run",
            folder / "model.bin",
            "-z",
            folder / "tokenizer.bin",
            "-t",
            "0",
            "-n",
            str(n),
        ]
        out = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        )
        return [int(word) for word in out.stdout.split()], float(out.stderr.split()[-1])

    return write


def bandwidth():
    """GB/s of reading 256 MB in sequence, the best of ten."""
    x, best = torch.ones(64 * 2**20), float("inf")
    for _ in range(10):
        began = time.perf_counter()
        x.sum()
        best = min(best, time.perf_counter() - began)
    return x.numel() * 4 / best / 1e9


def timed(arm, n):
    """(tokens, tokens per second)."""
    began = time.perf_counter()
    tokens = arm(n)
    return tokens if isinstance(tokens, tuple) else (tokens, n / (time.perf_counter() - began))


def typed(argv):
    """The command line without this machine's paths."""
    return " ".join(f"{arg.partition('=')[0]}=PATH" if "/" in arg else arg for arg in argv)


def decode(argv, values):
    config = build(DecodeConfig, values)
    model, text = build_llama(config)
    n, c = min(config.tokens, model.config.block_size - 1), model.config
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if p.dim() == 2 and name != "wte.weight"
    )  # read for each token
    facts = versions()
    lines = [
        "# Writing, one token after another: batch 1, greedy",
        "",
        f"{facts['hardware']}, {facts['cpus']} CPUs, torch {facts['torch']}; commit {facts['git_commit']}. `python bench/speed.py {typed(argv)}`",
        "",
        f"A LLaMA of {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters ({c.n_layer} layers, {c.n_head} heads, {c.n_embd} wide, vocabulary {c.vocab_size}), "
        f"{n} tokens after one; median of {config.rounds} alternating rounds, the fastest in brackets. Share: bytes of weights read per second over what this machine "
        "reads in sequence from memory (what stays in its caches may exceed it). Same text: tokens equal to the model's own greedy text before the first other one. "
        "KL: of the mode's predictions from the model's, nats per token, along that text.",
        "",
    ]
    for threads in [config.threads] if config.threads else [1, 2]:
        lines += table(config, model, text, n, matrices, threads)
    (ROOT / "bench" / "results").mkdir(exist_ok=True)
    (ROOT / "bench" / "results" / "speed_decode.md").write_text(
        "\n".join(lines) + "\n", encoding="utf-8"
    )
    print("\n".join(lines[:5]))


def table(config, model, text, n, matrices, threads):
    torch.set_num_threads(threads)
    reads, arms, notes, ours = (
        bandwidth(),
        {},
        {},
        {"the model itself, cached": copy.deepcopy(model)},
    )
    for dtype, compile in (
        ("float32", False),
        ("float16", False),
        ("bfloat16", False),
        ("int8", False),
        ("float32", True),
        ("int8", True),
    ):
        began = time.perf_counter()
        name = f"inference.py, {dtype}, {'compiled' if compile else 'eager'}"
        ours[name], reasons = prepare(copy.deepcopy(model), dtype, compile=compile)
        notes[name] = (
            f"ready in {time.perf_counter() - began:.1f} s: {reasons[-1]}" if compile else ""
        )
    arms |= {name: partial(greedy, made) for name, made in ours.items()}
    arms["transformers, cached"] = transformers_arm(model)
    with tempfile.TemporaryDirectory() as folder:
        if config.llama2c:
            arms["llama2.c"] = llama2c_arm(config.llama2c, model, Path(folder))
        speeds, texts = {name: [] for name in arms}, {}
        for arm in arms.values():
            arm(16)
        for i in range(config.rounds):
            for name, arm in list(arms.items())[:: 1 if i % 2 else -1]:
                texts[name], speed = timed(arm, n)
                speeds[name].append(speed)
        if config.nanogpt:
            speeds["nanoGPT (GPT-2), no cache"] = [
                timed(nanogpt_arm(config.nanogpt, model.config), n)[1]
            ]
    text_of_model = texts["the model itself, cached"]
    truth = greedy(ours["the model itself, cached"], n, text_of_model)
    peer = statistics.median(speeds.get("llama2.c") or speeds["transformers, cached"])
    lines = [
        f"## {threads} thread{'s' * (threads > 1)}: {reads:.1f} GB/s",
        "",
        f"| | tokens/s | times {'llama2.c' if config.llama2c else 'transformers'} | share | same text | KL |{' loss |' if text is not None else ''} |",
        f"|---|---|---|---|---|---|---|{'---|' if text is not None else ''}",
    ]
    for name, values in sorted(speeds.items(), key=lambda item: statistics.median(item[1])):
        speed, size = statistics.median(values), 1 if "int8" in name else 2 if "16" in name else 4
        row = f"| {name} | {speed:.0f} ({max(values):.0f}) | {speed / peer:.2f} | {100 * speed * matrices * size / 1e9 / reads:.0f} % | "
        if name in texts:
            row += str(
                next(
                    (i for i, (a, b) in enumerate(zip(texts[name], text_of_model)) if a != b),
                    len(texts[name]),
                )
            )
        kl = (
            (truth.exp() * (truth - greedy(ours[name], n, text_of_model))).sum(-1).mean().item()
            if name in ours
            else None
        )
        row += " | " + ("" if kl is None else f"{max(0.0, kl):.1e}") + " | "
        if text is not None:
            row += (
                f"{loss(ours[name], text, model.config.block_size):.4f} | "
                if name in ours
                else " | "
            )
        lines.append(row + notes.get(name, "") + " |")
    print("\n".join(lines), "\n", flush=True)
    return lines + [""]


# ---------------------------------------------------------------- gqa


def filled(model, B, context, device):
    """A cache of `context` random tokens, with room for one more."""
    c, cache = model.config, KVCache()
    cache.advance(torch.zeros(B, context, dtype=torch.long, device=device))
    for i in range(c.n_layer):
        cache[i].k, cache[i].v = (
            torch.randn(B, c.n_kv_head, context + 64, c.n_embd // c.n_head, device=device)
            for _ in range(2)
        )
    return cache


@torch.inference_mode()
def gqa(argv, values):
    """The time of one more token, for heads of their own, shared by some, and one for all, at the same width."""
    config = build(GqaConfig, values)
    device = find_device(config.device)
    torch.set_num_threads(config.threads)
    H, facts, full = config.n_head, versions(), device.startswith("cuda")
    kinds = {
        "MHA": H,
        "GQA": min(
            (k for k in range(2, H + 1) if H % k == 0), key=lambda k: abs(k - H / 4), default=1
        ),
        "MQA": 1,
    }
    lines = [
        "# What sharing keys and values buys",
        "",
        f"{facts['hardware']}, {device}, {config.threads} thread{'s' * (config.threads > 1)}, torch {facts['torch']}; commit {facts['git_commit']}. `python bench/speed.py {typed(argv)}`",
        "",
        f"A random LLaMA, {config.n_layer} layers, {config.n_embd} wide, {H} heads, fp32, eager; ms for one more token of every row, the median of {config.rounds} in turn.",
        "",
        "| context | batch | "
        + " | ".join(f"{kind} ({k}): ms" for kind, k in kinds.items())
        + " | tokens/s | GQA / MHA | MQA / MHA | cache MB |",
        "|---|---|" + "---|" * len(kinds) + "---|---|---|---|",
    ]
    models, cost = {}, {}
    for kind, k in kinds.items():
        c = LlamaConfig(
            n_layer=config.n_layer,
            n_head=H,
            n_kv_head=k,
            n_embd=config.n_embd,
            vocab_size=config.vocab_size,
            block_size=16384,
        )
        models[kind], _ = prepare(Llama(c).to(device), compile=False)
        cost[kind] = 2 * 4 * c.n_layer * k * c.n_embd // H  # a key and a value, fp32
    print("\n".join(lines), flush=True)
    for context in (256, 1024, 2048, 8192):
        for B in (1, 8, 64):
            if not full and cost["MHA"] * context * B > 2**30:
                lines.append(
                    f"| {context} | {B} |"
                    + " |" * (len(kinds) + 3)
                    + f" {cost['MHA'] * context * B / 1e6:.0f}: left out on this device |"
                )
                print(lines[-1], flush=True)
                continue
            caches = {kind: filled(model, B, context, device) for kind, model in models.items()}
            token, times = (
                torch.zeros(B, 1, dtype=torch.long, device=device),
                {kind: [] for kind in kinds},
            )
            for _ in range(config.rounds + 1):
                for kind, model in models.items():
                    began = time.perf_counter()
                    model(token, cache=caches[kind], last_only=True)
                    sync(device)
                    times[kind].append(time.perf_counter() - began)
                    caches[kind].rewind(context)
            ms = {kind: statistics.median(seconds[1:]) * 1000 for kind, seconds in times.items()}
            lines.append(
                f"| {context} | {B} | "
                + " | ".join(f"{ms[kind]:.2f}" for kind in kinds)
                + " | "
                + " / ".join(f"{B / ms[kind] * 1000:.0f}" for kind in kinds)
                + f" | {ms['GQA'] / ms['MHA']:.2f} | {ms['MQA'] / ms['MHA']:.2f} | "
                + " / ".join(f"{cost[kind] * context * B / 1e6:.0f}" for kind in kinds)
                + " |"
            )
            print(lines[-1], flush=True)
    lines += [
        "",
        "Cache bytes per token: " + ", ".join(f"{kind} {cost[kind]:,}" for kind in kinds) + ".",
    ]
    (ROOT / "bench" / "results").mkdir(exist_ok=True)
    (ROOT / "bench" / "results" / "speed_gqa.md").write_text(
        "\n".join(lines) + "\n", encoding="utf-8"
    )


def main(argv):
    word = "decode" if "decode" in argv else "gqa"
    values, words = load(argv, [DecodeConfig if word == "decode" else GqaConfig], __doc__)
    if words != [word]:
        raise UserError(
            "one thing at a time, please",
            "command line",
            f"python bench/speed.py {word}, and --key=value",
        )
    (decode if word == "decode" else gqa)(argv, values)
