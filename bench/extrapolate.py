"""
Score models with a longer context than in training:

    python bench/extrapolate.py OUT [OUT2 ...]  # run folders, best with different --position

The same tokens of the validation text are scored with 1/4 to 8 times the training context before
them. A run with rope is scored with each rope scaling as well, for texts 8 times as long and
without further training. The baseline slides the training context along: the model sees nothing
before it, and so never reads more than in training. Prints a table.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

from bench.ablation.measure import extrapolation
from common.configurator import build, load
from common.errors import UserError, run
from common.runtime import set_up
from parts.architectures import configure
from parts.position import ROPE_SCALING
from tokens.batches import Text
from tokens.mixture import open_split
from tokens.token_files import load_meta, load_tokenizer
from weights import checkpoint

CONTEXTS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8)  # times the training context
TOKENS = 1 << 18  # read at each context, by each model


@dataclass
class ExtrapolateConfig:
    checkpoint: str = "latest"  # latest, best, or a step
    data_dir: str = "data"
    device: str = "auto"


def opened(outs, config, runtime):
    """[(run folder, model, checkpoint folder, its keys, VariantConfig)] of the runs, and the
    validation tokens (N,) that they share. Raises UserError if they do not share them."""
    runs, shared = [], {}
    for out in outs:
        folder = checkpoint.find(out, config.checkpoint)
        step = checkpoint.step_of(folder)
        model, tokenizer, keys, _ = checkpoint.open_run(out, step, runtime.device)
        variant_config = configure(keys | {"arch": keys.get("arch") or keys["model"]})
        runs.append((out, model, folder, keys, variant_config))

        data, T = Path(config.data_dir) / keys["dataset"], model.config.block_size
        shared[keys["dataset"], T] = out
        if len(shared) > 1:
            texts = [f"{name} at block_size={size} ({out})" for (name, size), out in shared.items()]
            fix = "compare runs of one dataset and block_size"
            raise UserError(f"these runs differ: {' and '.join(texts)}", "command line", fix)
        tokens = tokens_of(data, tokenizer, T)
    return runs, tokens


def tokens_of(data, tokenizer, block_size):
    """The validation tokens (N,) of a dataset that is one text, in the model's own tokens."""
    split = None if "," in data.name else open_split(data, "val", block_size)
    if not isinstance(split, Text):
        raise UserError("this is no single text", data, "give runs of one text")
    if load_tokenizer(data, load_meta(data)).to_json() != tokenizer.to_json():
        raise UserError("this dataset has other tokens than the model", data, "prepare it again")
    return split.tokens


def lines_of(outs, config, runtime):
    """(context of training, {title: losses as `extrapolation` gives them}) of the runs and their
    scalings."""
    runs, tokens = opened(outs, config, runtime)
    T, lines = runs[0][1].config.block_size, {}
    for name, model, folder, keys, c in runs:
        models = {c.rope_scaling: model}
        if c.position == "rope" and c.rope_scaling == "none":
            factor = float(max(CONTEXTS))
            for scaling in [word for word in ROPE_SCALING if word != "none"]:
                longer = dict(rope_scaling=scaling, rope_factor=factor, rope_original=T)
                scaled = checkpoint.load_model(folder, keys | longer, runtime.device)
                models[scaling] = scaled.eval()
        for scaling, scored in models.items():
            title = name + (f", {scaling}" if scaling != "none" else "")
            lines[title] = extrapolation(scored, tokens, runtime, CONTEXTS, TOKENS)
            print(f"{title}: {text_of(lines[title][f'{max(CONTEXTS):g}'])}", flush=True)
    return T, lines


def text_of(entry):
    """A loss as text, with half the width of its interval; or why there is none."""
    if "why" in entry:
        return entry["why"]
    half = "" if entry["low"] is None else f" ± {(entry['high'] - entry['low']) / 2:.3f}"
    return f"{entry['loss']:.3f}{half}"


def loss_table(T, lines):
    """A row of text for each context, a column for each line."""
    columns, why = {}, []
    for title, losses in lines.items():
        entries = {f"{int(n * T)} ({n:g}×)": losses[f"{n:g}"] for n in CONTEXTS}
        entries["baseline"] = losses["1"]["window"]
        columns[title] = {n: text_of(e) if "loss" in e else "none" for n, e in entries.items()}
        why += {f"No loss for {title}: {e['why']}." for e in entries.values() if "why" in e}
    return [pd.DataFrame(columns).to_string(), *why]


def main(argv):
    values, outs = load(argv, [ExtrapolateConfig], __doc__)
    config = build(ExtrapolateConfig, values)
    if not outs:
        raise UserError("no run folders", "command line", "bench/extrapolate.py out-alibi out-rope")
    T, lines = lines_of(outs, config, set_up(config.device, "float32"))
    print(f"\nnats per token on the same targets; trained with {T} tokens")
    print(*loss_table(T, lines), sep="\n")


if __name__ == "__main__":
    run(main)
