"""
Write text with a trained model:

    python sample.py --out_dir=RUN --start="ROMEO:" --num_samples=3
    python sample.py --out_dir=RUN --start=FILE:prompt.txt --temperature=0
    python sample.py --out_dir=RUN --prompts=lines.txt --jsonl > texts.jsonl
    python sample.py --init_from=gpt2 --start="The capital is" --show_probs
    python sample.py --init_from=FOLDER --chat

RUN is a run folder, such as out-llama-shakespeare. Nothing else is needed, since
the checkpoint includes the tokenizer. The same command writes the same text
again. From Python, call

    load(name)                              a model and its tokenizer
    write_text(model, tokenizer, prompt)    the text that follows a prompt, or each
                                            of a list of prompts
    generate(model, idx, n)                 the same in tokens, one after another

Shapes: B rows, T tokens, V vocabulary.
"""

from common import early
from common.errors import UserError, run

if __name__ == "__main__":  # before the other imports, which take seconds
    early.start("sample.py")

import json
import os
import shlex
from collections import Counter
from typing import NamedTuple

import torch
from torch.nn import functional as F

from common import configurator
from common.runtime import find_device, seed_for, set_up
from sampling.prompts import chat_prompt, fit, note, read_prompts, show, show_cut, shown
from sampling.reader import Reader, most_positions, note_context, ragged
from sampling.settings import OF_TEXT, RENAMED, SampleConfig, refuse_idle
from sampling.text import Sample
from weights.checkpoint import find, open_run

BATCH_SIZE = 64  # samples that are written at once, if there is a file of prompts


# ---------------------------------------------------------------- how a token is drawn


class Step(NamedTuple):
    """One sampled token of each row."""

    token: torch.Tensor  # (B, 1)
    logits: torch.Tensor  # (B, V) of the model, before any sampling setting


@torch.inference_mode()
def steps(
    model, idx, max_new_tokens, seeds=None, context=None, vocab_size=None, pad=None, **drawing
):
    """Continue idx (B, T): yields a Step max_new_tokens times.

    seeds: one per row (None: 0, 1, ...); the random draws of a row depend on its own seed alone.
    drawing: keyword arguments of `probabilities`. Reader explains the other arguments."""
    reader = Reader(model, context, vocab_size, pad)
    seeds = range(idx.size(0)) if seeds is None else seeds
    generators = [torch.Generator(idx.device).manual_seed(seed) for seed in seeds]
    for _ in range(max_new_tokens):
        # The model reads only the tokens that are new or, when the context is full, the last half
        # of it again.
        logits = reader.read(idx)[:, -1]  # (B, V) after the last token of the text so far
        p = probabilities(logits, **drawing, seen=idx)  # (B, V)
        token = draw(p, generators)  # (B, 1)
        yield Step(token, logits)
        idx = torch.cat((idx, token), dim=1)  # (B, T + 1)


def generate(model, idx, max_new_tokens, **more):
    """Continue idx (B, T): yields the next token of every row, (B, 1), max_new_tokens times. more:
    further arguments of `steps`, such as temperature=0.8."""
    for step in steps(model, idx, max_new_tokens, **more):
        yield step.token


def probabilities(
    logits, temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0, seen=None
):
    """Probabilities (B, V) of the next token, given logits (B, V) and the text so far, seen (B, T).
    By default they are the model's own; sample.py uses the defaults of SampleConfig, temperature
    0.8 and top_k 200. The settings are applied in this order:

    repetition_penalty: divides the logits of seen tokens that are positive and multiplies those
        that are negative (CTRL, Keskar et al. 2019, arXiv:1909.05858, as in transformers)
    temperature: divides the logits; 0 puts all probability on the likeliest token
    top_k: keeps the k likeliest tokens, and those as likely as the k-th
    top_p: keeps the smallest set of the likeliest tokens that together reach probability top_p
        (nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751)
    min_p: keeps tokens at least min_p times as likely as the likeliest
        (Nguyen et al. 2024, arXiv:2407.01082)
    """
    logits = logits.float()  # (B, V)
    # 1e-30 and 1e30 below: in float32 a setting beyond them would become 0 or infinite.
    if repetition_penalty != 1 and seen is not None:
        penalty = min(max(repetition_penalty, 1e-30), 1e30)
        old = logits.gather(1, seen)  # (B, T)
        new = torch.where(old > 0, old / penalty, old * penalty).clamp(-1e30, 1e30)
        logits = logits.scatter(1, seen, new)
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.size(-1)).float()

    logits = logits - logits.amax(-1, keepdim=True)  # the largest is 0, so none becomes +inf
    logits = logits / max(temperature, 1e-30)
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k).values[:, -1:]  # (B, 1) the k-th largest
        logits = logits.masked_fill(logits < least, -torch.inf)

    p = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = p.sort(descending=True, stable=True)  # (B, V)
        before = ordered.cumsum(-1) - ordered  # probability of all likelier tokens
        dropped = before >= max(top_p, 1e-30)  # by likelihood; the likeliest always stays
        dropped = torch.zeros_like(dropped).scatter(1, order, dropped)  # by token
        p = p.masked_fill(dropped, 0.0)
    if min_p:
        p = p.masked_fill(p < min_p * p.amax(-1, keepdim=True), 0.0)
    return p / p.sum(-1, keepdim=True)


def draw(p, generators):
    """A token (B, 1) for each row of p (B, V), each drawn by its own random generator."""
    pairs = zip(p, generators, strict=True)
    return torch.stack([torch.multinomial(row, 1, generator=generator) for row, generator in pairs])


# ---------------------------------------------------------------- texts


def write_samples(model, tokenizer, wanted, config, on_text=lambda piece: None, sampler=None):
    """Write one Sample for each of `wanted`, [(prompt, sample number), ...], in one batch. The
    random draws of a sample depend on the seed, its prompt and its number alone. on_text: called
    with each piece of text as it is written. sampler: a function to call in place of `steps`."""
    explain = config.jsonl or config.show_probs
    ids = [tokenizer.prompt(prompt) for prompt, _ in wanted]
    samples = []
    seeds = []
    for (prompt, number), prompt_ids in zip(wanted, ids, strict=True):
        samples.append(Sample(prompt, prompt_ids, tokenizer, config.stop, explain))
        seeds.append(seed_for(config.seed, number, *prompt_ids))
    idx, pad = ragged(ids, next(model.parameters()).device)  # (B, T)
    reading = {"context": config.context, "vocab_size": tokenizer.vocab_size, "pad": pad}
    sampler = sampler or steps
    written = sampler(model, idx, config.max_new_tokens, seeds, **reading, **config.drawing())
    for step in written:
        tokens = step.token.flatten().tolist()
        for sample, token, logits in zip(samples, tokens, step.logits, strict=True):
            if not sample.done:
                on_text(sample.add(token, logits))
        if all(sample.done for sample in samples):
            break
    for sample in samples:
        on_text(sample.end())
    return samples


def write_text(model, tokenizer, prompt, **keys):
    """Return the text that a model writes after a prompt: the first sample of `python sample.py`. A
    list of prompts is continued in batches, and gives a list of texts. keys: fields of SampleConfig
    that are about the text (OF_TEXT), such as temperature=0 or max_new_tokens=100."""
    for key in keys:
        configurator.find(key, configurator.keys(SampleConfig), {}, "write_text")
        if key not in OF_TEXT:
            what = f"{key} changes nothing in this text"
            raise UserError(what, "write_text", f"choose from {', '.join(OF_TEXT)}")
    config = configurator.build(SampleConfig, keys)
    check_context(model, config.context)
    prompts = [prompt] if isinstance(prompt, str) else prompt
    fitted = []
    for i, text in enumerate(prompts, 1):
        fitted.append(fit(tokenizer, text, f"prompt {i}", config.skip_unknown))
    wanted = numbered(fitted, 1)
    texts = []
    for first in range(0, len(wanted), BATCH_SIZE):
        batch = wanted[first : first + BATCH_SIZE]
        texts += [sample.text for sample in write_samples(model, tokenizer, batch, config)]
    return texts[0] if isinstance(prompt, str) else texts


def write_sample(model, tokenizer, prompt, runtime, config):
    """Print a prompt and the text that follows it, as it is written."""
    show(prompt)
    with runtime.autocast():
        write_samples(model, tokenizer, [(prompt, 0)], config, show)
    print(flush=True)


# ---------------------------------------------------------------- models


class Opened(NamedTuple):
    name: str
    model: torch.nn.Module
    tokenizer: object
    prompts: list  # texts, as this tokenizer can read them


def is_run(name):
    """Whether a folder has checkpoints of a run. False for a name that is too long."""
    return os.path.isdir(os.path.join(name, "ckpt"))


def open_weights(name, checkpoint, device):
    """(model in evaluation mode, tokenizer, description) of a run or of pretrained weights."""
    if is_run(name):
        model, tokenizer, trained, state = open_run(name, checkpoint, device)
        return model, tokenizer, f"{trained['model']} after {state['step']} steps, from {name}"
    from weights.hf import open_pretrained

    model, tokenizer = open_pretrained(name)
    return model.to(device).eval(), tokenizer, name


def load(name, checkpoint="latest", device="cpu"):
    """(model in evaluation mode, tokenizer) of a run folder, of the checkpoint `latest`, `best` or
    a step; or of pretrained weights: gpt2, a folder or hub name of Hugging Face."""
    name = os.path.expanduser(name)
    device = str(device)
    if not device.startswith("cuda"):
        device = device.partition(":")[0]  # the others have no numbers
    model, tokenizer, _ = open_weights(name, checkpoint, torch.device(find_device(device)))
    return model, tokenizer


def choose_device(config):
    """(device, number format of the weights) that a SampleConfig asks for."""
    is_int8 = config.dtype == "int8"
    runtime = set_up(config.device, "float32" if is_int8 else config.dtype)
    for reason in runtime.reasons.values():
        note(reason)
    if not is_int8:
        return runtime.device, runtime.dtype
    note("weights int8")
    return runtime.device, "int8"


def open_model(name, texts, config, device, dtype):
    """Open a model to write with: fit the prompts to its tokenizer, and convert its weights to the
    number format `dtype` and to the memory layout in which single tokens are fastest."""
    from sampling.fast import make_fast  # here, since train.py and load do without

    model, tokenizer, what = open_weights(name, config.checkpoint, device)
    note(what)
    prompts = fit_prompts(model, tokenizer, texts, config)
    # Only a sample that is written alone uses compiled code: batches do not repay compiling it.
    tokens = 0 if config.prompts else config.num_samples * config.max_new_tokens
    model = make_fast(model, dtype, config.compile, tokens)
    return Opened(name, model, tokenizer, prompts)


def fit_prompts(model, tokenizer, texts, config):
    """The prompts as the tokenizer can encode them. Notes say what a user may not expect."""
    check_context(model, config.context)
    if config.chat:
        tokenizer.bos = None  # the template writes what stands first
        texts = [chat_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    prompts = []
    for i, text in enumerate(texts, 1):
        place = f"line {i} of {config.prompts}" if config.prompts else ""
        prompts.append(fit(tokenizer, text, place, config.skip_unknown))

    found = []  # special tokens
    for prompt in prompts:
        ids = tokenizer.encode_prompt(prompt).tolist()
        found += [tokenizer.special[i] for i in ids if i in tokenizer.special]
    if found and not config.chat:
        note(f"special tokens in the prompt ({len(found)}): {' '.join(dict.fromkeys(found))}")
    if not config.converses():  # then the messages count
        note_context(model, tokenizer, prompts, config)
    if not all(prompts):
        note("the prompt is empty: starting from " + repr(tokenizer.decode([tokenizer.start])))
    return prompts


def check_context(model, context):
    """Raise UserError for a context that the model has no positions for."""
    most = most_positions(model)
    if most and context and context > most:
        what = f"this model has positions for {most} tokens only"
        raise UserError(what, f"context={context}", "leave it out")


# ---------------------------------------------------------------- the script


def report(name, sample, config, streamed):
    """Print a sample. streamed: its text has been printed already."""
    if config.jsonl:
        line = {"model": name, "seconds": round(sample.seconds, 4), "prompt": sample.prompt}
        line |= {"text": sample.text, "tokens": sample.tokens, "logprobs": sample.logprobs}
        if config.show_probs:
            line["top"] = sample.top
        print(json.dumps(line), flush=True)
        return
    if not streamed:
        print(shown(sample.text if config.chat else sample.prompt + sample.text))
    if config.show_probs:
        show_cut(sample.table())
    print("---------------", flush=True)


def numbered(prompts, count):
    """[(prompt, sample number), ...]: `count` samples of each prompt. The numbers go on where a
    prompt is repeated, so that its samples differ."""
    used = Counter()
    wanted = []
    for prompt in prompts:
        for _ in range(count):
            wanted.append((prompt, used[prompt]))
            used[prompt] += 1
    return wanted


def write_all(opened, config, batch_size=BATCH_SIZE, sampler=None):
    """Write and print every sample of every prompt, at most batch_size at a time. Without a file of
    prompts they are written one at a time, so that each can be read while it grows. Returns the
    last batch."""
    name, model, tokenizer, prompts = opened
    wanted = numbered(prompts, config.num_samples)
    samples = []
    batch_size = batch_size if config.prompts else 1
    streamed = batch_size == 1 and not config.jsonl
    show_piece = show if streamed else lambda piece: None
    for first in range(0, len(wanted), batch_size):
        batch = wanted[first : first + batch_size]
        if not config.chat:
            show_piece(batch[0][0])
        samples = write_samples(model, tokenizer, batch, config, show_piece, sampler)
        show_piece("\n")
        for sample in samples:
            report(name, sample, config, streamed)
    return samples


def converse(opened, config):
    """Talk with a model on the terminal, a message a line, until the input ends (Ctrl-D)."""
    messages = []
    noted = False
    while True:
        try:
            text = input("" if config.jsonl else "> ")
        except EOFError:
            return
        except UnicodeDecodeError:
            raise UserError("this message is not utf-8", "stdin", "write it as utf-8") from None
        text = fit(opened.tokenizer, text, "", config.skip_unknown)
        messages.append({"role": "user", "content": text})
        prompt = chat_prompt(opened.tokenizer, messages)
        noted = noted or note_context(opened.model, opened.tokenizer, [prompt], config)
        (sample,) = write_all(opened._replace(prompts=[prompt]), config)
        messages.append({"role": "assistant", "content": sample.text})


def build_config(values, may_converse=False):
    """The SampleConfig with these values: one sample at temperature 0, where all are the same; one
    answer in a chat. may_converse: whether the command holds conversations."""
    if values.get("chat"):
        values = {"num_samples": 1} | values
    config = configurator.build(SampleConfig, values)
    if config.converses() and not may_converse:
        raise UserError("this command holds no conversation", "--chat", "give --start=TEXT")
    if config.temperature == 0 and config.num_samples > 1:
        note(f"temperature 0 always writes the same: one sample, not {config.num_samples}")
        config.num_samples = 1
    return config


def main(argv):
    given = configurator.load(argv, [SampleConfig], __doc__, renamed=RENAMED)
    if given.words:
        word = given.words[0]
        fix = "write --start=TEXT" if " " in word else "write --key=value"
        if is_run(word):
            words = ["python", "sample.py", *given.texts.values(), f"--out_dir={word}"]
            fix = f"run `{shlex.join(words)}`"
        raise UserError(f"cannot read {word}", "command line", fix)
    config = build_config(given.values, may_converse=True)
    if config.converses():
        refuse_idle(given.typed, ["num_samples"])
    if config.prompts:  # their batches use no compiled code
        refuse_idle(given.typed, ["compile"])
    texts = read_prompts(config.start, config.prompts)  # first, so that a mistake shows at once
    device, dtype = choose_device(config)
    name = config.init_from
    if name == "resume":
        name = config.out_dir
        find(name, config.checkpoint)  # raises UserError if this is no run
    else:
        refuse_idle(given.typed, ["out_dir"])
        if "checkpoint" in given.typed and not is_run(name):
            fix = "leave it out, or name a run"
            raise UserError(f"{name} is not a run, which has checkpoints", "checkpoint", fix)
    opened = open_model(name, texts, config, device, dtype)
    if config.converses():
        config.num_samples = 1
        converse(opened, config)
    else:
        write_all(opened, config)


if __name__ == "__main__":
    run(main)
