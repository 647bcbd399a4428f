"""python -m extras.extrapolate RUN [RUN ...]

Score models with a longer context than in training. Compare runs that differ in --position alone.

The same tokens of the validation text, a quarter of the training context, are scored at the end of
windows of 1/4 to 8 times the training context. A run with rope is scored with each rope scaling as
well, for texts 8 times as long and without further training. The baseline slides the training
context along: the model sees nothing before it, and so never reads more than in training. Prints a
table.
"""

from dataclasses import dataclass
from pathlib import Path

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.need(*early.ABLATE)
    early.start("extras.extrapolate")

import pandas as pd
import torch

from bench.ablation.measure import extrapolation
from common.configurator import PathName, build, load
from common.errors import UserError, printable, run
from common.runtime import set_up
from parts.architectures import configure
from parts.slots import ROPE_SCALING
from tokens.batches import Text
from tokens.data import open_split, same_tokens
from tokens.token_files import load_meta, load_tokenizer
from weights import checkpoint

CONTEXTS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8)  # times the training context
TOKENS = 1 << 18  # read at each context, by each model


@dataclass
class ExtrapolateConfig:
    checkpoint: str = "latest"  # latest, best, or a step
    data_dir: PathName = "data"
    device: str = "auto"


@dataclass
class Scored:
    """A run whose model is scored."""

    name: str  # the run folder, as it was given
    folder: Path  # of its checkpoint
    keys: dict  # of the checkpoint's configuration
    model: torch.nn.Module


def opened(outs, config, runtime):
    """([Scored], the validation tokens (N,) that they share) of run folders. Raises UserError if
    they do not share them."""
    runs = []
    texts = {}  # {(dataset, block_size): a run folder}
    for out in outs:
        model, tokenizer, keys, state = checkpoint.open_run(out, config.checkpoint, runtime.device)
        folder = checkpoint.find(out, state["step"])
        runs.append(Scored(printable(out), folder, keys, model))

        block_size = model.config.block_size
        texts[keys["dataset"], block_size] = out
        if len(texts) > 1:
            named = [f"{name} at block_size={size} ({run})" for (name, size), run in texts.items()]
            fix = "compare runs of one dataset and block_size"
            raise UserError(f"these runs differ: {' and '.join(named)}", "command line", fix)
        tokens = tokens_of(Path(config.data_dir) / keys["dataset"], tokenizer, block_size)
    return runs, tokens


def tokens_of(data, tokenizer, block_size):
    """The validation tokens (N,) of a dataset that is one text, in the model's own tokens."""
    split = None if "," in data.name else open_split(data, "val", block_size)
    if not isinstance(split, Text):
        raise UserError("this is no single text", data, "give runs of one text")
    if not same_tokens(load_tokenizer(data, load_meta(data)), tokenizer):
        raise UserError("this dataset has other tokens than the model", data, "prepare it again")
    return split.tokens


def scalings(scored, device):
    """{rope scaling: model} of a run: its own, and if it has rope without scaling, each scaling for
    texts as long as the longest context."""
    keys = scored.keys
    c = configure(keys, as_variant=True)  # names every slot
    models = {c.rope_scaling: scored.model}
    if c.position == "rope" and c.rope_scaling == "none":
        for word in ROPE_SCALING:
            if word != "none":
                longer = {
                    "rope_scaling": word,
                    "rope_factor": float(max(CONTEXTS)),
                    "rope_original": c.block_size,
                }
                models[word] = checkpoint.load_model(scored.folder, keys | longer, device).eval()
    return models


def lines_of(outs, config, runtime):
    """(context of training, {title: losses as `extrapolation` gives them}) of the runs and their
    scalings."""
    runs, tokens = opened(outs, config, runtime)
    lines = {}
    for scored in runs:
        for scaling, model in scalings(scored, runtime.device).items():
            title = scored.name if scaling == "none" else f"{scored.name}, {scaling}"
            lines[title] = extrapolation(model, tokens, runtime, CONTEXTS, TOKENS)
            longest = f"{max(CONTEXTS):g}"
            print(f"{title}, {longest}×: {text_of(lines[title][longest])}", flush=True)
    return runs[0].model.config.block_size, lines


def text_of(entry):
    """A loss as text, with half the width of its interval; or why there is none."""
    if "why" in entry:
        return entry["why"]
    if entry["low"] is None:
        return f"{entry['loss']:.3f}"
    return f"{entry['loss']:.3f} ± {(entry['high'] - entry['low']) / 2:.3f}"


def loss_table(T, lines):
    """A row of text for each context, a column for each line."""
    columns = {}
    why = []
    for title, losses in lines.items():
        entries = {f"{int(n * T)} ({n:g}×)": losses[f"{n:g}"] for n in CONTEXTS}
        entries["baseline"] = losses["1"]["window"]
        columns[title] = {n: text_of(e) if "loss" in e else "none" for n, e in entries.items()}
        reasons = [f"No loss for {title}: {e['why']}." for e in entries.values() if "why" in e]
        why += dict.fromkeys(reasons)
    return [pd.DataFrame(columns).to_string(), *why]


def read(argv):
    """(ExtrapolateConfig, the run folders) of a command line."""
    given = load(argv, [ExtrapolateConfig], __doc__)
    outs = given.words
    if not outs:
        fix = "type python -m extras.extrapolate out-alibi out-rope"
        raise UserError("no run folders", "command line", fix)
    return build(ExtrapolateConfig, given.values), outs


def main(argv):
    config, outs = read(argv)
    T, lines = lines_of(outs, config, set_up(config.device, "float32"))
    print(f"\nnats per token on the same targets; trained with {T} tokens")
    print(*loss_table(T, lines), sep="\n")


if __name__ == "__main__":
    run(main)
