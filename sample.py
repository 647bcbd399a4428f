"""
Write text with a trained model:

    python sample.py --out_dir=out-llama-shakespeare --start="ROMEO:" --num_samples=3
    python sample.py --out_dir=out-llama-shakespeare --start=FILE:prompt.txt --temperature=0
    python sample.py --init_from=gpt2 --start="The capital of France is"

The run folder is all it needs: the tokenizer travels in the checkpoint.
"""
import codecs
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from cache import KVCache
from checkpoint import open_run
from configurator import build, load
from errors import UserError, run
from formats import open_pretrained
from inference import prepare
from runtime import seed_for, set_up


@dataclass
class SampleConfig:
    init_from: str = "resume"  # resume: the run in out_dir; or gpt2[-medium|-large|-xl], a folder or hub name of Hugging Face weights, FILE.gguf
    out_dir: str = "out"  # the run folder
    checkpoint: str = "latest"  # latest, best, or a step
    start: str = ""  # the prompt; FILE:path reads it from a file; empty: a newline, or the end of a text
    num_samples: int = 10
    max_new_tokens: int = 500  # per sample
    temperature: float = 0.8  # 1 = as the model says, below 1 bolder, 0 = always the likeliest token
    top_k: int | None = 200  # draw from the k likeliest tokens only
    top_p: float | None = None  # draw from the likeliest tokens that together have probability p
    context: int | None = None  # tokens the model looks back on at most; None: its block_size
    seed: int = 1337
    device: str = "auto"  # cpu, cuda, cuda:N, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"  # of the weights; int8: a quarter of the memory, the fastest on a CPU

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} is negative: 0 is greedy, 1 is the model's own")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} leaves no token: give 1 or more, or None for all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is no probability: give a number above 0, at most 1")
        if self.context is not None and self.context < 1:
            raise ValueError(f"context={self.context} shows the model nothing: give 1 or more")
        if self.num_samples < 0 or self.max_new_tokens < 0 or self.seed < 0:
            raise ValueError("num_samples, max_new_tokens and seed cannot be negative: give 0 or more")


def probabilities(logits, temperature=1.0, top_k=None, top_p=None):
    """Probabilities (B, V) to draw the next token from, given logits (B, V). First the temperature,
    then top-k, then top-p (nucleus, Holtzman et al. 2019, arXiv:1904.09751): the smallest set of the
    likeliest tokens that together reach probability top_p."""
    logits = logits.float()  # (B, V)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # the largest is 0, however cold
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k).values[:, -1:]  # (B, 1) the k-th largest
        logits = logits.masked_fill(logits < least, -torch.inf)
    p = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = p.sort(descending=True, stable=True)  # (B, V)
        before = ordered.cumsum(-1) - ordered  # probability of all likelier tokens
        p = p.masked_fill(torch.zeros_like(p, dtype=torch.bool).scatter(1, order, before >= top_p), 0.0)
    return p


@torch.inference_mode()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, seeds=None, context=None, vocab_size=None, use_cache=True):
    """Continue idx (B, T), yielding the next token of every row (B, 1), max_new_tokens times.

    seeds: a number per row; a row's draws depend on its own alone. context: how many tokens the model
    looks back on at most (None: its block_size, since few models write well beyond what they were
    trained on). Where they are used up the last half of them is read anew, so that the cost of that is
    spread over many tokens. vocab_size: the tokens there are, of a model that was padded to more."""
    context = context or model.config.block_size
    half = max(1, context // 2)
    draws = [torch.Generator(idx.device).manual_seed(seed) for seed in seeds or range(idx.size(0))]
    cache, start = None, 0
    for _ in range(max_new_tokens):
        moved = half * max(0, -((context - idx.size(1)) // half))  # 0 up to context tokens, then in steps of half
        if cache is None or moved != start or not use_cache:
            cache, start, new = KVCache(), moved, idx[:, moved:]
        logits = model(new, cache=cache, last_only=True)[0][:, -1, :vocab_size]  # (B, V)
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)  # (B, 1)
        else:
            p = probabilities(logits, temperature, top_k, top_p)
            new = torch.stack([torch.multinomial(row, 1, generator=draw) for row, draw in zip(p, draws)])
        yield new
        idx = torch.cat((idx, new), dim=1)


def read_prompt(start):
    """The prompt's text: `start` itself, or what is in the file that FILE:path names."""
    if not start.startswith("FILE:"):
        return start
    path = start.removeprefix("FILE:")
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise UserError(f"cannot read the prompt: {error.strerror}", path, "check the path after FILE:") from None
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt is not utf-8: byte {error.start}", path, "save it as utf-8") from None


def write_sample(model, tokenizer, prompt, runtime, config, number=0):
    """Print the prompt and its continuation as it comes."""
    out = sys.stdout
    ids = tokenizer.encode(prompt) if prompt else [tokenizer.start]
    idx = torch.tensor(ids, dtype=torch.long, device=runtime.device)[None]  # (1, T)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may span tokens
    out.write(prompt)
    draw = dict(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, seeds=[seed_for(config.seed, number)])
    with runtime.autocast():
        for token in generate(model, idx, config.max_new_tokens, context=config.context, vocab_size=tokenizer.vocab_size, **draw):
            out.write(decoder.decode(tokenizer.decode_bytes(token[0].tolist())))
            out.flush()
    out.write(decoder.decode(b"", final=True) + "\n")


def main(argv):
    values, words = load(argv, [SampleConfig], __doc__, renamed={"compile": "leave it out: sampling is eager", "eval_iters": "leave it out"})
    if words:
        raise UserError(f"cannot read {words[0]}", "command line", "write --key=value")
    config = build(SampleConfig, values)
    prompt = read_prompt(config.start)
    runtime = set_up(config.device, "float32" if config.dtype == "int8" else config.dtype)
    if config.init_from == "resume":
        model, tokenizer, trained, state = open_run(config.out_dir, config.checkpoint, runtime.device)
        origin = f"{trained['model']} after {state['step']} steps, from {config.out_dir}"
    else:
        model, tokenizer = open_pretrained(config.init_from)
        model, origin = model.to(runtime.device).eval(), config.init_from
    tokenizer.encode(prompt)
    learned = getattr(model.config, "position", "learned") == "learned" and hasattr(model, "wpe")
    if learned and (config.context or 0) > model.config.block_size:
        raise UserError(f"this model has positions for {model.config.block_size} tokens only", f"context={config.context}", "leave it out")
    model, chosen = prepare(model, "int8" if config.dtype == "int8" else runtime.dtype, config.num_samples * config.max_new_tokens)
    runtime.dtype = "float32"  # the weights carry it now: no autocast
    print(f"{origin}; {', '.join(runtime.reasons + chosen)}", file=sys.stderr, flush=True)
    if not prompt:
        print("the prompt is empty: starting from " + repr(tokenizer.decode([tokenizer.start])), file=sys.stderr, flush=True)
    for number in range(config.num_samples):
        write_sample(model, tokenizer, prompt, runtime, config, number)
        print("---------------")


if __name__ == "__main__":
    run(main)
