"""
Write text with a trained model:

    python sample.py --out_dir=RUN --start="ROMEO:" --num_samples=3
    python sample.py --out_dir=RUN --start=FILE:prompt.txt --temperature=0
    python sample.py --out_dir=RUN --prompts=lines.txt --jsonl > texts.jsonl
    python sample.py --init_from=gpt2 --start="The capital is" --show_probs
    python sample.py --compare=RUN,OTHER --start="ROMEO:" --score=play.txt
    python sample.py --out_dir=RUN --start="ROMEO:" --attention=map.png
    python sample.py --out_dir=RUN --draft=SMALL --start="ROMEO:"
    python sample.py --out_dir=RUN --knn=DATASTORE --start="ROMEO:"
    python sample.py --compare=RUN,OTHER --serve

RUN is a run folder, such as out-llama-shakespeare. Nothing else is needed, since
the checkpoint includes the tokenizer. The same command writes the same text
again. From Python, call

    load(name)                              a model and its tokenizer
    write_text(model, tokenizer, prompt)    the text that follows a prompt
    generate(model, idx, n)                 the same in tokens, one after another
    score_text(model, tokenizer, text)      how well the model predicts a text
"""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError, run, starting

if __name__ == "__main__":
    starting("sample.py")

import torch

from common import configurator
from common.runtime import seed_for, set_up
from sampling import look
from sampling.decoding import Sample, generate, ragged, steps  # noqa: F401 (for Python)
from sampling.look import fit, note, score_text  # noqa: F401 (for Python)
from sampling.settings import SampleConfig
from weights import checkpoint

ROWS = 64  # samples in one batch


# ---------------------------------------------------------------- texts


def write_samples(model, tokenizer, rows, config, draft=None, tally=None, show=lambda piece: None):
    """Generate one Sample for each of `rows`, [(prompt, sample number), ...], in one batch. The
    random draws of a row depend on its own prompt and number alone. draft: that of `speculate`, for
    a single row only. show: called with each piece of text as it is generated."""
    explain = config.jsonl or config.show_probs
    samples = [Sample(prompt, tokenizer, config.stop, explain) for prompt, _ in rows]
    ids = [tokenizer.prompt(prompt) for prompt, _ in rows]
    numbers = [number for _, number in rows]
    seeds = [seed_for(config.seed, n, *row) for n, row in zip(numbers, ids, strict=True)]
    idx, pad = ragged(ids, next(model.parameters()).device)  # (B, T)
    settings = dict(context=config.context, vocab_size=tokenizer.vocab_size, **config.settings())
    if draft is None:
        written = steps(model, idx, config.max_new_tokens, seeds, pad=pad, **settings)
    else:
        from sampling.speculative import speculate

        settings |= dict(draft=draft, seed=seeds[0], tally=tally)
        written = speculate(model, idx, config.max_new_tokens, **settings)

    for step in written:
        tokens = step.token.flatten().tolist()
        for sample, token, logits in zip(samples, tokens, step.logits, strict=True):
            if not sample.done:
                show(sample.add(token, logits))
        if all(sample.done for sample in samples):
            break
    for sample in samples:
        show(sample.end())
    return samples


def write_sample(model, tokenizer, prompt, runtime, config):
    """Print a prompt and the text that follows it, as it is generated."""
    show = partial(print, end="", flush=True)
    show(prompt)
    with runtime.autocast():
        write_samples(model, tokenizer, [(prompt, 0)], config, show=show)
    print(flush=True)


def load(name, checkpoint="latest", device="cpu"):
    """(model in evaluation mode, tokenizer) of a run folder, of the checkpoint `latest`, `best` or
    a step; or of pretrained weights: gpt2, a folder or hub name of Hugging Face."""
    return open_weights(name, checkpoint, device, not Path(name, "ckpt").is_dir())[:2]


def write_text(model, tokenizer, prompt, **keys):
    """Return the text that a model writes after a prompt: the first sample of `python sample.py`.
    keys: fields of SampleConfig, such as temperature=0 or max_new_tokens=100."""
    unknown = keys.keys() - SampleConfig.__dataclass_fields__.keys()
    if unknown:
        raise UserError(f"unknown key {min(unknown)}", "write_text", "give keys of SampleConfig")
    config = configurator.build(SampleConfig, keys)
    prompt = fit(tokenizer, prompt, "", config.skip_unknown)
    (sample,) = write_samples(model, tokenizer, [(prompt, 0)], config)
    return sample.text


# ---------------------------------------------------------------- models


class Opened(NamedTuple):
    name: str
    model: torch.nn.Module
    tokenizer: object
    prompts: list  # texts, as this tokenizer can read them


def open_weights(name, step, device, pretrained):
    """(model in evaluation mode, tokenizer, description) of a run or of pretrained weights."""
    if pretrained:
        from weights.hf import open_pretrained

        model, tokenizer = open_pretrained(name)
        return model.to(device).eval(), tokenizer, name
    model, tokenizer, trained, state = checkpoint.open_run(name, step, device)
    return model, tokenizer, f"{trained['model']} after {state['step']} steps, from {name}"


def open_model(name, config, runtime, texts, kind):
    """Open the model of a run folder or of pretrained weights, convert its weights to the number
    format `kind`, and fit the prompts to its tokenizer."""
    pretrained = config.init_from != "resume"
    model, tokenizer, what = open_weights(name, config.checkpoint, runtime.device, pretrained)
    note(what)
    prompts = []
    for i, text in enumerate(texts, 1):
        place = f"line {i} of {config.prompts}" if config.prompts else ""
        prompts.append(fit(tokenizer, text, place, config.skip_unknown))
    check_context(model, tokenizer, prompts, config)
    if not all(prompts) and (config.writes() or config.attention):
        note("the prompt is empty: starting from " + repr(tokenizer.decode([tokenizer.start])))
    if config.knn:
        from sampling.knn import Datastore, WithNeighbours, identity

        weights = identity(checkpoint.find(name, config.checkpoint))
        store = Datastore(config.knn, weights, model.config)
        size, share = len(store.tokens), store.weight
        note(f"{size:,} keys of {config.knn}, weight {share:g}; decoding in float32")
        return Opened(name, WithNeighbours(model, store), tokenizer, prompts)

    from sampling.fast import COMPILE_PAYS, can_compile, prepare

    # Batches use the model's own forward pass, which is not compiled.
    alone = config.writes() and not config.prompts
    tokens = config.num_samples * config.max_new_tokens if alone else 0
    pays = tokens >= COMPILE_PAYS and can_compile(model, kind)
    compiles = pays if config.compile == "auto" else config.compile
    if compiles:
        note("compiling, which takes half a minute the first time")
    model, how = prepare(model, kind, compiles)
    if compiles:
        note(how)
    return Opened(name, model, tokenizer, prompts)


def check_context(model, tokenizer, prompts, config):
    """Raise UserError for a context that the model has no positions for. Print a note if the texts
    will be longer than the context."""
    limit = model.config.block_size
    context = config.context or limit
    learned = hasattr(model, "wpe") and getattr(model.config, "position", "learned") == "learned"
    if learned and context > limit:
        what = f"this model has positions for {limit} tokens only"
        raise UserError(what, f"context={context}", "leave it out")

    if config.num_samples and config.writes():
        longest = max(len(tokenizer.prompt(prompt)) for prompt in prompts) + config.max_new_tokens
        why = f"it has positions for {limit} only" if learned else "--context looks further back"
        if longest > context:
            shown = f"the model sees only the last {context - context // 2} to {context}"
            note(f"after {context} tokens {shown} ({why})")


# ---------------------------------------------------------------- the script


def report(opened, samples, config, streamed):
    """Print one sample of each model; streamed: its text has been printed already."""
    if config.jsonl:
        for o, sample in zip(opened, samples, strict=True):
            line = {"model": o.name, "seconds": round(sample.seconds, 4)}
            keys = ("prompt", "text", "tokens", "logprobs", *["top"] * config.show_probs)
            line |= {key: getattr(sample, key) for key in keys}
            print(json.dumps(line), flush=True)
        return

    texts = [sample.prompt + sample.text for sample in samples]
    if config.compare:
        look.show_columns([o.name for o in opened], texts)
    elif not streamed:
        print(texts[0])
    if config.show_probs:
        look.show_cut(look.alternatives(opened[0].tokenizer, samples[0]))
    print("---------------", flush=True)


def write_all(opened, config, draft, tally):
    """Generate and print every sample of every prompt, a batch at a time."""
    count = len(opened[0].prompts)
    rows = [(i, number) for i in range(count) for number in range(config.num_samples)]
    size = ROWS if config.prompts and not config.draft else 1
    streamed = size == 1 and not config.jsonl and not config.compare
    show = partial(print, end="", flush=True) if streamed else lambda piece: None
    for first in range(0, len(rows), size):
        written = []
        for _, model, tokenizer, prompts in opened:
            inputs = [(prompts[i], number) for i, number in rows[first : first + size]]
            show(inputs[0][0])
            written.append(write_samples(model, tokenizer, inputs, config, draft, tally, show))
            show("\n")
        for samples in zip(*written, strict=True):
            report(opened, samples, config, streamed)


def main(argv):
    given = configurator.load(argv, [SampleConfig], __doc__)
    if given.words:
        raise UserError(f"cannot read {given.words[0]}", "command line", "write --key=value")
    config = configurator.build(SampleConfig, given.values)
    if config.temperature == 0 and config.num_samples > 1:
        note(f"temperature 0 always writes the same: one sample, not {config.num_samples}")
        config.num_samples = 1

    # Read the user's files before loading a model, so that a mistake shows at once.
    texts = look.read_prompts(config.start, config.prompts)
    if config.score:
        scored = look.read_text(config.score, "text", "check the path after --score=")
    if config.attention:
        from sampling import attention_map

        attention_map.check_path(config.attention)
    if config.serve:
        from sampling import server

        listener = server.listen(config.port)

    is_int8 = config.dtype == "int8"
    runtime = set_up(config.device, "float32" if is_int8 else config.dtype)
    for reason in runtime.reasons + ["weights int8"] * is_int8:
        note(reason)
    kind = "int8" if is_int8 else runtime.dtype
    runtime.dtype = "float32"  # the weights are converted to `kind` instead of autocast

    name = config.out_dir if config.init_from == "resume" else config.init_from
    names = config.compare.split(",") if config.compare else [name]
    opened = [open_model(name, config, runtime, texts, kind) for name in names]
    if config.serve:
        server.serve(opened, config, listener)
        return
    draft, tally = None, Counter()
    if config.draft:
        from sampling.speculative import open_draft

        draft = open_draft(config.draft, opened[0].tokenizer, runtime.device, kind)
    if config.score:
        look.report_score(opened, scored, config)
    if config.attention:
        path, layer = config.attention, config.layer
        attention_map.write_map(path, *opened[0][:3], opened[0].prompts[0], layer, config.context)
        note(f"attention of layer {layer}: {path}")
    if config.writes():
        write_all(opened, config, draft, tally)
        if tally["drafted"]:
            accepted = tally["accepted"] / tally["drafted"]
            each = 1 + tally["accepted"] / tally["reads"]
            note(f"draft {config.draft}: {accepted:.0%} accepted, {each:.2f} tokens for each read")


if __name__ == "__main__":
    run(main)
