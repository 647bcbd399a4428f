"""python -m extras.compare RUN [RUN ...]

Compare runs: a table of their losses and costs, what differs in their configurations, and their
loss curves against steps, tokens and seconds.

    python -m extras.compare out-a out-b
    python -m extras.compare out-* --out=figures/sizes.png

Prints the table and draws the curves into compare.png, or OUT. A file of that name that this
command did not write is never replaced. The run folders are only read.
"""

import io
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.need(*early.ABLATE)
    early.start("extras.compare")

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.ablation.tables import number
from common import files
from common.configurator import PathName, build, load
from common.errors import UserError, printable, run
from extras.attention_map import check_picture
from parts.architectures import configure, without_effect
from parts.costs import parameters
from training.run_folder import read_log
from training.settings import ONE_START, RENAMED
from weights import checkpoint

WRITER = "extras/compare.py"  # in our pictures: who drew them
NOT_COMPARED = {*ONE_START, "arch", "data_dir", "log", *RENAMED}
AXES = {"step": "steps", "tokens": "training tokens", "seconds": "seconds of training steps"}
MEASURES = {"val_loss": "validation loss, nats per token", "bits_per_byte": "bits per byte"}
COLUMNS = ["step", "seconds", "tokens_per_second", "whole_val_loss", *MEASURES]  # of log.jsonl
EARLY = 0.2  # the share of a run whose losses may lie above the picture


@dataclass
class CompareConfig:
    out: PathName = "compare.png"  # the picture


@dataclass
class Run:
    """A run folder: its configuration, its evaluations, and the sentences to print about it."""

    name: str
    config: dict
    evaluations: pd.DataFrame  # step, tokens, seconds, val_loss, bits_per_byte
    tokens_per_second: float  # median over the log
    parameters: float  # nan if they are unknown
    data: str  # fingerprint of the data
    remarks: list


def read_run(folder, name):
    """The Run in a folder. Raises UserError if there is none."""
    folder = Path(folder)
    fix = "leave it out, or train there first"
    if not (folder / "config.json").exists() or not (folder / "ckpt").is_dir():
        if runs := checkpoint.runs_beside(folder):
            fix = f"name {runs}"
        raise UserError("no run here", folder, fix)
    config = files.read_json(folder / "config.json", fix)
    try:
        config = checkpoint.with_todays_keys(config)
        variant = configure(config, as_variant=True)
        count = parameters(variant)
        config |= asdict(variant)
        for key in without_effect(asdict(variant)):
            del config[key]
        samples = config["batch_size"] * config["gradient_accumulation_steps"]
        step_tokens = samples * config["block_size"]
        log = pd.DataFrame(read_log(folder / "log.jsonl"))
        data = files.read_json(checkpoint.find(folder) / "state.json", fix)["data"]
    except (UserError, KeyError, TypeError) as error:
        raise UserError(f"this run cannot be read: {error}", folder, fix) from None

    log = log.reindex(columns=COLUMNS).apply(pd.to_numeric, errors="coerce")
    evaluations = log.dropna(subset=["val_loss"]).drop_duplicates("step", keep="last")
    evaluations = evaluations.sort_values("step")
    evaluations["tokens"] = evaluations["step"] * step_tokens
    evaluations["final"] = evaluations["whole_val_loss"].fillna(evaluations["val_loss"])
    last_step = 0 if log.empty else int(log["step"].max())
    remarks = []
    if (folder / "diverged.json").exists():
        remarks.append(f"{name} diverged after step {last_step:,}.")
    elif last_step < config["max_iters"]:
        remarks.append(f"{name} is at step {last_step:,} of {config['max_iters']:,}.")
    return Run(
        name=name,
        config=config,
        evaluations=evaluations,
        tokens_per_second=log["tokens_per_second"].median(),
        parameters=count,
        data=data,
        remarks=remarks,
    )


def read_runs(folders):
    """([Run], remarks) of run folders, each once. A folder that is no run is left out with a
    remark. Raises UserError if none is left."""
    unique = list({os.path.realpath(folder): Path(folder) for folder in folders}.values())
    lasts = [folder.resolve().name for folder in unique]
    runs = []
    remarks = []
    for folder, last in zip(unique, lasts, strict=True):
        name = last if lasts.count(last) == 1 else str(folder)
        try:
            runs.append(read_run(folder, name))
        except UserError as error:
            if len(unique) == 1:
                raise
            remarks.append(f"{folder} is left out: {error.parts[0]}.")
    if not runs:
        fix = "name the out_dir of two or more runs"
        raise UserError(f"no run in {len(unique)} folders: {remarks[0]}", "command line", fix)
    return runs, remarks + [remark for made in runs for remark in made.remarks]


def differing(runs):
    """DataFrame of the keys that differ: a row for each key, a column for each run."""
    configs = pd.DataFrame({made.name: pd.Series(made.config, dtype=object) for made in runs})
    configs = configs.drop(index=[key for key in configs.index if key in NOT_COMPARED])
    texts = configs.map(lambda value: json.dumps(value, sort_keys=True, default=str))
    return configs[texts.nunique(axis=1) > 1].sort_index()


def measure_of(runs):
    """(column to draw, sentences): losses, or bits per byte where the tokens differ."""
    if len({made.data for made in runs}) == 1:
        return "val_loss", []
    sentence = "The runs have different data: bits per byte are compared, losses cannot be."
    return "bits_per_byte", [sentence]


def texts_of_losses(runs):
    """[a sentence about the text of each loss in the table], [] if all are of one text."""
    if all((made.evaluations["final"] == made.evaluations["val_loss"]).all() for made in runs):
        return []
    whole = "final is of the whole validation split where a run ended by scoring it"
    return [f"{whole}, best and bits/byte of the tokens that each of its evaluations scored."]


def safe(text):
    """A text of a run as a cell of a table: without markup and control characters."""
    return Text(printable(text))


def tables(runs):
    """The rich tables of losses and costs, and of what differs."""
    heads = ("run", "final", "best", "bits/byte", "params", "seconds", "tokens/s")
    costs = Table(*heads, box=None)
    for made in runs:
        last = made.evaluations.iloc[-1] if len(made.evaluations) else {}
        cells = [
            number(last.get("final"), ".4f"),
            number(made.evaluations["val_loss"].min(), ".4f"),
            number(last.get("bits_per_byte"), ".4f"),
            number(made.parameters / 1e6, ".2f") + " M",
            number(last.get("seconds"), ",.0f"),
            number(made.tokens_per_second, ",.0f"),
        ]
        costs.add_row(safe(made.name), *cells)

    keys = differing(runs)
    differences = Table("what differs", box=None)
    for name in keys.columns:
        differences.add_column(safe(name))
    for key, values in keys.iterrows():
        cells = ["" if value != value else str(value) for value in values]  # NaN: no such key
        differences.add_row(safe(key), *map(safe, cells))
    return [costs, differences] if len(keys) else [costs]


def figure_of(runs, measure):
    """The Figure of the loss curves: a panel against steps, tokens and seconds each."""
    figure = Figure(figsize=(15, 4), layout="constrained")
    curves = [made.evaluations for made in runs]
    late = [curve[curve["step"] >= EARLY * curve["step"].max()] for curve in curves]
    top = pd.concat(late)[measure].max()
    for axes, (column, label) in zip(figure.subplots(1, len(AXES)), AXES.items(), strict=True):
        for curve in curves:
            axes.plot(curve[column], curve[measure], ".-")
        axes.set(xlabel=label, ylabel=MEASURES[measure])
        axes.grid(alpha=0.3)
        if math.isfinite(top):
            axes.set_ylim(top=top * 1.02)
    names = [printable(made.name, figure=True) for made in runs]
    axes.legend(axes.lines, names, loc="upper right")  # a label of a line may not begin with _
    return figure


def read(argv):
    """(CompareConfig, the run folders) of a command line."""
    given = load(argv, [CompareConfig], __doc__)
    folders = given.words
    if not folders:
        raise UserError("no run folders", "command line", "type python -m extras.compare RUN RUN")
    return build(CompareConfig, given.values), folders


def main(argv):
    config, folders = read(argv)
    runs, remarks = read_runs(folders)
    measure, sentences = measure_of(runs)
    check_picture(config.out, WRITER)
    picture = io.BytesIO()
    figure_of(runs, measure).savefig(picture, format="png", dpi=110, metadata={"Software": WRITER})
    files.write(config.out, picture.getvalue())

    console = Console(width=None if os.isatty(1) else 80, highlight=False)
    for table in tables(runs):
        console.print(table)
    sentences += texts_of_losses(runs)
    for line in [*sentences, *remarks, config.out]:
        console.print(safe(line))


if __name__ == "__main__":
    run(main)
