"""
Write text with a trained model:

    python sample.py --out_dir=out-llama-shakespeare --start="ROMEO:" --num_samples=3
    python sample.py --out_dir=out-llama-shakespeare --start=FILE:prompt.txt --temperature=0
    python sample.py --out_dir=out-llama-shakespeare --prompts=lines.txt --jsonl > texts.jsonl
    python sample.py --init_from=gpt2 --start="The capital of France is" --show_probs
    python sample.py --compare=out-gpt2-shakespeare,out-llama-shakespeare --start="ROMEO:" --score=play.txt
    python sample.py --out_dir=out-llama-shakespeare --start="ROMEO:" --attention=map.png --layer=2
    python sample.py --out_dir=out-big --draft=out-small --start="ROMEO:"

The run folder is all it needs: the tokenizer travels in the checkpoint. The same command writes the same text.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from common.configurator import build, load
from common.errors import UserError, run
from common.runtime import seed_for, set_up
from sampling import terminal
from sampling.attention_map import write_map
from sampling.decoding import Reader, Sample, Step, draw, probabilities, ragged
from sampling.fast import prepare
from sampling.prompts import fit, read_prompts, read_text
from sampling.speculative import Tally, open_draft, speculate
from weights.checkpoint import open_run
from weights.pretrained import open_pretrained

ROWS = 64  # of a batch


@dataclass
class SampleConfig:
    init_from: str = "resume"  # resume: the run in out_dir; or gpt2[-medium|-large|-xl], a folder or hub name of Hugging Face weights, FILE.gguf
    out_dir: str = "out"  # the run folder
    checkpoint: str = "latest"  # latest, best, or a step
    compare: str = (
        ""  # run folders with commas between: the same prompts continued by each, side by side
    )
    start: str = (
        ""  # the prompt; FILE:path reads it from a file; empty: a newline, or the end of a text
    )
    prompts: str = ""  # a file with a prompt on each line, continued together
    skip_unknown: bool = False  # drop characters that are not in the vocabulary
    num_samples: int = 10  # of each prompt
    max_new_tokens: int = 500  # per sample
    stop: str = ""  # end where this text first appears, and leave it out
    temperature: float = (
        0.8  # 1 = as the model says, below 1 bolder, 0 = always the likeliest token
    )
    top_k: int | None = 200  # draw from the k likeliest tokens only
    top_p: float | None = None  # draw from the likeliest tokens that together have probability p
    min_p: float | None = None  # draw from the tokens at least this part as likely as the likeliest
    repetition_penalty: float = 1.0  # above 1: what was said before is less likely
    context: int | None = None  # tokens the model looks back on at most; None: its block_size
    seed: int = 1337
    draft: str = ""  # speculative decoding: the run folder of a smaller model with the same tokenizer, or lookup
    draft_tokens: int = 4  # drafted at a time
    jsonl: bool = False  # for programs: a line of JSON per sample
    show_probs: bool = False  # a table of the likeliest tokens at each step
    score: str = ""  # a text file: its loss, and how much each token surprises; samples only if there is a prompt
    attention: str = ""  # a PNG to write: the attention of a layer over the prompt, and no samples
    layer: int = 0  # of attention, from 0
    device: str = "auto"  # cpu, cuda, cuda:N, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = (
        "auto"  # of the weights; int8: a quarter of the memory, the fastest on a CPU
    )
    compile: bool | Literal["auto"] = (
        "auto"  # on a CPU: half a minute once for each shape of a model, then a faster token; auto: for 20,000 tokens or more
    )

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(
                f"temperature={self.temperature} is negative: 0 is greedy, 1 is the model's own"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} leaves no token: give 1 or more, or None for all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p={self.top_p} is no probability: give a number above 0, at most 1"
            )
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(
                f"min_p={self.min_p} is no part of a probability: give a number from 0 to 1"
            )
        if self.repetition_penalty <= 0:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} is not above 0: 1 is none, 1.2 a usual one"
            )
        if self.context is not None and self.context < 1:
            raise ValueError(f"context={self.context} shows the model nothing: give 1 or more")
        if min(self.num_samples, self.max_new_tokens, self.seed, self.layer) < 0:
            raise ValueError(
                "num_samples, max_new_tokens, seed and layer cannot be negative: give 0 or more"
            )
        if self.draft_tokens < 1:
            raise ValueError(
                f"draft_tokens={self.draft_tokens} drafts nothing: give 1 or more, or leave draft out"
            )
        if self.start and self.prompts:
            raise ValueError("start and prompts both give the prompt: choose one")
        if self.prompts and self.attention:
            raise ValueError("attention shows one prompt: give start, not prompts")
        if self.compare and (
            self.draft or self.attention or self.show_probs or self.init_from != "resume"
        ):
            raise ValueError(
                "compare shows the texts of run folders: leave init_from, draft, attention and show_probs out"
            )

    def writes(self):
        """Whether samples are asked for, or only what models say of a text that is there."""
        return not self.attention and bool(self.start or self.prompts or not self.score)

    def how(self):
        """The settings of decoding.probabilities."""
        return {
            key: getattr(self, key)
            for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        }


# ---------------------------------------------------------------- writing


@torch.inference_mode()
def steps(
    model,
    idx,
    max_new_tokens,
    seeds=None,
    context=None,
    vocab_size=None,
    use_cache=True,
    pad=None,
    **how,
):
    """Continue idx (B, T), yielding a Step, max_new_tokens times. seeds: a number per row; a row's draws depend on its
    own alone. how: the settings of decoding.probabilities; the rest: those of decoding.Reader."""
    reader = Reader(model, context, vocab_size, use_cache, pad)
    draws = [torch.Generator(idx.device).manual_seed(seed) for seed in seeds or range(idx.size(0))]
    for _ in range(max_new_tokens):
        logits = reader.read(idx)[:, -1]  # (B, V)
        p = probabilities(logits, **how, seen=idx)
        new = (
            p.argmax(-1, keepdim=True) if how.get("temperature") == 0 else draw(p, draws)
        )  # (B, 1)
        yield Step(new, logits)
        idx = torch.cat((idx, new), dim=1)


def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, **more):
    """Continue idx (B, T), yielding the next token of every row (B, 1), max_new_tokens times; more: as of steps."""
    for step in steps(
        model, idx, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, **more
    ):
        yield step.token


def write_samples(
    model, tokenizer, rows, runtime, config, draft=None, tally=None, show=lambda piece: None
):
    """The Samples of rows (prompt, number of the sample), written in one batch; show takes each piece of text. A row's
    draws depend on its own prompt and number alone. draft: as of speculate, for a single row."""
    samples = [
        Sample(prompt, tokenizer, config.stop, config.jsonl or config.show_probs)
        for prompt, _ in rows
    ]
    ids = [list(tokenizer.encode(prompt)) or [tokenizer.start] for prompt, _ in rows]
    seeds = [seed_for(config.seed, number, *map(int, row)) for (_, number), row in zip(rows, ids)]
    idx, pad = ragged(ids, runtime.device)
    settings = dict(context=config.context, vocab_size=tokenizer.vocab_size, **config.how())
    with runtime.autocast():
        if draft is None:
            written = steps(model, idx, config.max_new_tokens, seeds, pad=pad, **settings)
        else:
            written = speculate(
                model,
                idx,
                config.max_new_tokens,
                draft,
                config.draft_tokens,
                seeds[0],
                tally=tally,
                **settings,
            )
        for step in written:
            for sample, token, logits in zip(samples, step.token[:, 0].tolist(), step.logits):
                if not sample.done:
                    show(sample.add(token, logits))
            if all(sample.done for sample in samples):
                break
    for sample in samples:
        show(sample.end())
    return samples


def write_sample(model, tokenizer, prompt, runtime, config, number=0, draft=None, tally=None):
    """The Sample of a prompt, printed after it as it comes."""

    def show(piece):
        sys.stdout.write(piece)
        sys.stdout.flush()

    show(terminal.paint(prompt, "1") if terminal.colours(sys.stdout) else prompt)
    (sample,) = write_samples(
        model, tokenizer, [(prompt, number)], runtime, config, draft, tally, show
    )
    show("\n")
    return sample


class Opened(NamedTuple):
    name: str
    model: torch.nn.Module
    tokenizer: object
    prompts: list  # texts, of the characters that it has


def note(text):
    print(text, file=sys.stderr, flush=True)


def open_model(name, config, runtime, texts, kind):
    """The model of a run folder, or of other formats, with weights of the kind `kind`, and the prompts as it can read them."""
    if config.init_from == "resume":
        model, tokenizer, trained, state = open_run(name, config.checkpoint, runtime.device)
        note(f"{trained['model']} after {state['step']} steps, from {name}")
    else:
        model, tokenizer = open_pretrained(name)
        note(name)
        model = model.to(runtime.device).eval()
    prompts = [
        fit(
            tokenizer,
            text,
            f"line {i} of {config.prompts}" if config.prompts else "",
            config.skip_unknown,
        )
        for i, text in enumerate(texts, 1)
    ]
    limit, context = model.config.block_size, config.context or model.config.block_size
    learned = getattr(model.config, "position", "learned") == "learned" and hasattr(model, "wpe")
    if learned and context > limit:
        raise UserError(
            f"this model has positions for {limit} tokens only",
            f"context={context}",
            "leave it out",
        )
    if (
        config.num_samples
        and config.writes()
        and max(len(tokenizer.encode(text)) for text in prompts) + config.max_new_tokens > context
    ):
        note(
            f"beyond {context} tokens the last {context - context // 2} to {context} are what is read ({f'it has positions for {limit} only' if learned else '--context looks further back'})"
        )
    model, chosen = prepare(
        model,
        kind,
        config.num_samples * config.max_new_tokens if config.writes() and not config.prompts else 0,
        config.compile,
    )
    note(", ".join(chosen))
    if not all(prompts) and (config.writes() or config.attention):
        note("the prompt is empty: starting from " + repr(tokenizer.decode([tokenizer.start])))
    return Opened(name, model, tokenizer, prompts)


def report(opened, samples, config, streamed=False):
    """Print one sample of each model; streamed: its text is there already."""
    for o, sample in zip(opened, samples) if config.jsonl else []:
        told = {
            "model": o.name,
            "prompt": sample.prompt,
            "text": sample.text,
            "tokens": sample.tokens,
            "logprobs": sample.logprobs,
        }
        print(
            json.dumps(
                told
                | {"seconds": round(sample.seconds, 4)}
                | ({"top": sample.top} if config.show_probs else {})
            ),
            flush=True,
        )
    if config.jsonl:
        return
    if not streamed:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        texts = [sample.prompt + sample.text for sample in samples]
        print(
            terminal.columns([o.name for o in opened], texts, width) if config.compare else texts[0]
        )
    if config.show_probs:
        print(
            terminal.alternatives_table(
                opened[0].tokenizer, samples[0].tokens, samples[0].logprobs, samples[0].top
            )
        )
    print("---------------", flush=True)


def main(argv):
    values, words = load(argv, [SampleConfig], __doc__, renamed={"eval_iters": "leave it out"})
    if words:
        raise UserError(f"cannot read {words[0]}", "command line", "write --key=value")
    config = build(SampleConfig, values)
    texts = read_prompts(config.start, config.prompts)
    scored = (
        read_text(config.score, "text", "check the path after --score=") if config.score else ""
    )
    if not Path(config.attention).parent.is_dir():
        raise UserError(
            "there is no such folder", f"attention={config.attention}", "make it, or choose another"
        )
    runtime = set_up(config.device, "float32" if config.dtype == "int8" else config.dtype)
    note(", ".join(runtime.reasons))
    kind, runtime.dtype = (
        "int8" if config.dtype == "int8" else runtime.dtype,
        "float32",
    )  # the weights carry it: no autocast
    names = (
        config.compare.split(",")
        if config.compare
        else [config.out_dir if config.init_from == "resume" else config.init_from]
    )
    opened = [open_model(name, config, runtime, texts, kind) for name in names]
    draft, tally = open_draft(config.draft, opened[0].tokenizer, runtime.device, kind), Tally()
    if config.score:
        whole = [
            open_model(name, config, runtime, texts, "float32")._replace(name=f"{name} in float32")
            for name in names
            if kind == "int8"
        ]
        readable = [
            fit(o.tokenizer, scored, config.score, config.skip_unknown) for o in opened + whole
        ]
        terminal.report_score(opened + whole, readable, config.score, config.context, config.jsonl)
    if config.attention:
        write_map(
            config.attention, *opened[0][:3], opened[0].prompts[0], config.layer, config.context
        )
        note(f"attention of layer {config.layer}: {config.attention}")
    rows = [
        (i, number)
        for i in range(len(texts))
        for number in range(config.num_samples if config.writes() else 0)
    ]
    batch = ROWS if config.prompts and not config.draft else 1
    streamed = batch == 1 and not config.jsonl and not config.compare
    for first in range(0, len(rows), batch):
        asked = [
            [(o.prompts[i], number) for i, number in rows[first : first + batch]] for o in opened
        ]
        if streamed:
            written = [
                [
                    write_sample(
                        *opened[0][1:3],
                        asked[0][0][0],
                        runtime,
                        config,
                        asked[0][0][1],
                        draft,
                        tally,
                    )
                ]
            ]
        else:
            written = [
                write_samples(o.model, o.tokenizer, part, runtime, config, draft, tally)
                for o, part in zip(opened, asked)
            ]
        for samples in zip(*written):
            report(opened, samples, config, streamed)
    if tally.reads:
        note(f"draft {config.draft}: {tally}")


if __name__ == "__main__":
    run(main)
