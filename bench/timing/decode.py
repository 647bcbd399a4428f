"""
How fast a trained model writes, one token after another:

    python bench/speed.py decode --nanogpt=../nanoGPT --llama2c=../llama2.c  # beside the peers
    python bench/speed.py decode --out_dir=RUN --text=FILE  # a trained LLaMA, and its loss by mode

All take turns, so that a busy machine slows all alike; a speed is that of the median round. Every
LLaMA here has the same weights, and its greedy text is compared. Writes
bench/results/speed_decode.md.
"""

import copy
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.timing import peers
from bench.timing.llama2c import compile_program, find_source, program_arm, write_llama2c
from bench.timing.results import command_text, threads_text, write
from common.configurator import PositiveInt, build, load
from common.errors import UserError
from common.runtime import versions
from model_llama import Llama, LlamaConfig
from parts.cache import KVCache
from sampling.fast import prepare
from weights.checkpoint import open_run
from weights.export import to_hf

SIZES = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")
OURS = "the model itself, cached"  # what all other modes are compared with
PEER, TRANSFORMERS = "llama2.c", "transformers, cached"
MODES = (  # of sampling/fast.py: dtype, compiled
    ("float32", False),
    ("float16", False),
    ("bfloat16", False),
    ("int8", False),
    ("float32", True),
    ("int8", True),
)


@dataclass
class DecodeConfig:
    nanogpt: str = ""  # a checkout of nanoGPT
    llama2c: str = ""  # the folder of llama2.c, or its run.c
    out_dir: str = ""  # a run folder of a LLaMA to take in place of a random one
    text: str = ""  # a file to take the loss on, where out_dir is given
    n_layer: PositiveInt = 6
    n_head: PositiveInt = 6
    n_embd: PositiveInt = 384
    vocab_size: PositiveInt = 65
    block_size: PositiveInt = 512
    tokens: PositiveInt = 256  # written by each in a round (nanoGPT: in one round)
    rounds: PositiveInt = 5
    threads: PositiveInt | None = None  # None: 1, then 2


# ---------------------------------------------------------------- the sides


def open_llama(config):
    """(the trained model of config.out_dir, the ids (N,) of config.text or None)."""
    model, tokenizer, _, _ = open_run(config.out_dir)
    if type(model) is not Llama:
        what = f"it holds a {type(model).__name__}"
        raise UserError(what, f"out_dir={config.out_dir}", "give a LLaMA's run folder")
    if not config.text:
        return model, None
    ids = tokenizer.encode(Path(config.text).read_text(encoding="utf-8"))
    return model, torch.from_numpy(ids).long()


@torch.no_grad()
def random_llama(config):
    """A LLaMA whose text depends on what came before, which at its initial size it hardly would."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**{key: getattr(config, key) for key in SIZES})).eval()
    for p in model.parameters():
        if p.dim() == 2:
            p.mul_(3.0)
    model.lm_head.weight[1] = 0.0  # never the likeliest token: llama2.c stops at token 1
    return model


def transformers_arm(model):
    """A function that writes n tokens with transformers' LLaMA, with our weights."""
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    config, tensors = to_hf("llama", vars(model.config), model.state_dict(), ("llama",))
    del config["architectures"]
    theirs = LlamaForCausalLM(TheirConfig(**config)).eval()
    tensors = {key: value.clone() for key, value in tensors.items()}
    theirs.load_state_dict(tensors, strict=not model.config.tie_embeddings)

    def write_tokens(n):
        options = dict(max_new_tokens=n, min_new_tokens=n, do_sample=False, use_cache=True)
        return theirs.generate(torch.tensor([[1]]), pad_token_id=0, **options)[0, 1:].tolist()

    return write_tokens


def nanogpt_arm(path, c):
    """A function that writes n tokens with nanoGPT's GPT-2, which has no cache."""
    model, _ = peers.nanogpt(path, c)
    model.eval()
    return lambda n: model.generate(torch.tensor([[1]]), n, top_k=1)[0, 1:].tolist()


def our_modes(model):
    """({name: the model as the mode prepares it}, {name: how long that took, where compiled})."""
    models, notes = {OURS: copy.deepcopy(model)}, {}
    for dtype, compiled in MODES:
        name = f"inference.py, {dtype}, {'compiled' if compiled else 'eager'}"
        began = time.perf_counter()
        models[name], reasons = prepare(copy.deepcopy(model), dtype, compile=compiled)
        if compiled:
            notes[name] = f"ready in {time.perf_counter() - began:.1f} s: {reasons[-1]}"
    return models, notes


# ---------------------------------------------------------------- measuring


@torch.inference_mode()
def greedy(model, n, given=None):
    """n greedy tokens after token 1, or the log-probabilities (n, V) along the tokens `given`."""
    cache, new, out = KVCache(), torch.tensor([[1]]), []
    for i in range(n):
        logits = model(new, cache=cache, last_only=True)[0][:, -1]  # (1, V)
        if given is None:
            new = logits.argmax(-1, keepdim=True)
            out.append(new.item())
        else:
            new = torch.tensor([[given[i]]])
            out.append(logits.double().log_softmax(-1)[0])
    return out if given is None else torch.stack(out)


@torch.inference_mode()
def text_loss(model, text, T):
    """Mean cross-entropy in nats per token over windows of T, at most 20,000 tokens."""
    n = min(20_000, len(text) - 1) // T
    x, y = text[: n * T].view(n, T), text[1 : n * T + 1].view(n, T)
    return statistics.mean(model(a[None], b[None])[1].item() for a, b in zip(x, y, strict=True))


def bandwidth():
    """GB/s of reading 256 MB in sequence, the best of ten."""
    x, best = torch.ones(64 * 2**20), float("inf")
    for _ in range(10):
        began = time.perf_counter()
        x.sum()
        best = min(best, time.perf_counter() - began)
    return x.numel() * 4 / best / 1e9


def timed(arm, n):
    """(tokens, tokens per second). An arm may return both by itself."""
    began = time.perf_counter()
    tokens = arm(n)
    if isinstance(tokens, tuple):
        return tokens
    return tokens, n / (time.perf_counter() - began)


def race(config, model, models, n):
    """({name: tokens per second of each round}, {name: the tokens})."""
    arms = {name: partial(greedy, made) for name, made in models.items()}
    arms[TRANSFORMERS] = transformers_arm(model)
    with tempfile.TemporaryDirectory() as folder:
        if config.llama2c:
            compile_program(find_source(config.llama2c), Path(folder))
            write_llama2c(model, Path(folder))
            arms[PEER] = program_arm(Path(folder))
        speeds, texts = {name: [] for name in arms}, {}
        for arm in arms.values():
            arm(16)
        for i in range(config.rounds):
            for name in arms if i % 2 else reversed(arms):
                texts[name], speed = timed(arms[name], n)
                speeds[name].append(speed)
    if config.nanogpt:
        _, speed = timed(nanogpt_arm(config.nanogpt, model.config), n)
        speeds["nanoGPT (GPT-2), no cache"] = [speed]
    return speeds, texts


# ---------------------------------------------------------------- the page


def number_bytes(name):
    """Bytes of a weight in a mode."""
    if "int8" in name:
        return 1
    return 2 if "16" in name else 4


def equal_tokens(one, two):
    """How many tokens two texts have in common before the first other one."""
    pairs = zip(one, two, strict=False)  # an arm may write fewer tokens
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(one))


def divergence(truth, model, text):
    """KL of a model's predictions along a text from the log-probabilities `truth`, nats per
    token."""
    found = greedy(model, len(text), text)
    return max(0.0, (truth.exp() * (truth - found)).sum(-1).mean().item())


def table(config, model, text, n, threads):
    """The lines of the table for a number of threads."""
    torch.set_num_threads(threads)
    reads = bandwidth()
    models, notes = our_modes(model)
    speeds, texts = race(config, model, models, n)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    peer = PEER if config.llama2c else TRANSFORMERS
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name != "wte.weight"]
    read_per_token = sum(p.numel() for p in matrices)
    truth = greedy(models[OURS], n, texts[OURS])
    loss_head, loss_line = (" loss |", "---|") if text is not None else ("", "")
    lines = [
        f"## {threads_text(threads)}: {reads:.1f} GB/s",
        "",
        f"| | tokens/s | times {peer.split(',')[0]} | share | same text | KL |{loss_head} |",
        f"|---|---|---|---|---|---|---|{loss_line}",
    ]
    for name in sorted(medians, key=medians.get):
        speed = medians[name]
        share = 100 * speed * read_per_token * number_bytes(name) / 1e9 / reads
        same = equal_tokens(texts[name], texts[OURS]) if name in texts else ""
        kl = loss = ""
        if name in models:
            kl = f"{divergence(truth, models[name], texts[OURS]):.1e}"
        if text is not None:
            if name in models:
                loss = f"{text_loss(models[name], text, model.config.block_size):.4f}"
            loss = f"{loss} | "
        numbers = f"{speed:.0f} ({max(speeds[name]):.0f}) | {speed / medians[peer]:.2f}"
        note = notes.get(name, "")
        lines.append(f"| {name} | {numbers} | {share:.0f} % | {same} | {kl} | {loss}{note} |")
    print("\n".join(lines), "\n", flush=True)
    return [*lines, ""]


def report(config, argv):
    """Measure, and write the page."""
    if config.llama2c:
        find_source(config.llama2c)
    peers.check_nanogpt(config.nanogpt)
    model, text = open_llama(config) if config.out_dir else (random_llama(config), None)
    c, facts = model.config, versions()
    n = min(config.tokens, c.block_size - 1)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    about = [
        f"A LLaMA of {size:.2f} M parameters ({c.n_layer} layers, {c.n_head} heads, "
        f"{c.n_embd} wide, vocabulary {c.vocab_size}), {n} tokens after one; median of "
        f"{config.rounds} alternating rounds, the fastest in brackets.",
        "Share: bytes of weights read per second over what this machine reads in sequence from "
        "memory (what stays in its caches may exceed it).",
        "Same text: tokens equal to the model's own greedy text before the first other one.",
        "KL: of the mode's predictions from the model's, nats per token, along that text.",
    ]
    lines = [
        "# Writing, one token after another: batch 1, greedy",
        "",
        f"{facts['hardware']}, {facts['cpus']} CPUs, torch {facts['torch']}; "
        f"commit {facts['git_commit']}. {command_text(argv)}",
        "",
        " ".join(about),
        "",
    ]
    head = list(lines)
    for threads in [config.threads] if config.threads else [1, 2]:
        lines += table(config, model, text, n, threads)
    write(lines, "speed_decode")
    print("\n".join(head))


def main(argv):
    values, words = load(argv, [DecodeConfig], __doc__)
    if words != ["decode"]:
        fix = "python bench/speed.py decode, and --key=value"
        raise UserError("one thing at a time, please", "command line", fix)
    report(build(DecodeConfig, values), argv)
