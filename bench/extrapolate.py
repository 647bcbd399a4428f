"""
How a model fares with a longer context than in training, and what a longer context costs:

    python bench/extrapolate.py OUT [OUT2 ...]  # run folders; best some that differ in position
    python bench/extrapolate.py --costs         # a training step at 1k to 64k tokens

The first scores the same tokens of the validation text with 1/4 to 8 times the training context
before them. A run with rope is scored with each rope scaling as well, for texts 8 times as long and
without further training. The baseline slides the training context along: the model sees nothing
before it, and so never reads more than in training.

The second times attention that sees all, a window, or its own group, and the two mixers with a
state, on one text. Both write a table, its numbers, and a picture to --out_dir.
"""

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import repo_root  # noqa: F401 (puts the repo's root on the path)

from common import files
from common.configurator import PositiveInt, build, load
from common.errors import UserError, run

POSITIONS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8)  # times the training context
TOKENS = 1 << 18  # read at each position, by each model
SIZE = (6.4, 7.6)  # inches


@dataclass
class ExtrapolateConfig:
    out_dir: str | None = None  # for what is written; None: bench/results/extrapolate
    checkpoint: str = "latest"  # latest, best, or a step
    data_dir: str = "data"
    device: str = "auto"
    costs: bool = False  # time and memory; no runs are needed
    contexts: list | None = None  # of costs, in tokens; None: [1024, 2048, ..., 65536]
    window: PositiveInt = 256  # of costs: tokens in a window or group
    n_layer: PositiveInt = 1  # of costs, and so are the following
    n_head: PositiveInt = 2
    n_embd: PositiveInt = 64
    vocab_size: PositiveInt = 65
    steps: PositiveInt = 3  # rounds that are timed
    threads: PositiveInt = 1


# ---------------------------------------------------------------- losses


def opened(outs, config, runtime):
    """[(run folder, model, checkpoint folder, its keys, VariantConfig)] of the runs, and the
    validation tokens (N,) that they share. Raises UserError if they do not share them."""
    from parts.architectures import configure
    from weights import checkpoint

    runs, shared = [], {}
    for out in outs:
        folder = checkpoint.find(out, config.checkpoint)
        step = checkpoint.step_of(folder)
        model, tokenizer, keys, _ = checkpoint.open_run(out, step, runtime.device)
        whole = configure(keys | {"arch": keys.get("arch") or keys["model"]})
        runs.append((out, model, folder, keys, whole))

        data, T = Path(config.data_dir) / keys["dataset"], model.config.block_size
        if not shared:
            tokens = tokens_of(data, tokenizer, T)
        shared[keys["dataset"], T] = out
        if len(shared) > 1:
            texts = [f"{name} at block_size={size} ({out})" for (name, size), out in shared.items()]
            fix = "compare runs of one dataset and block_size"
            raise UserError(f"these runs differ: {' and '.join(texts)}", "command line", fix)
    return runs, tokens


def tokens_of(data, tokenizer, block_size):
    """The validation tokens (N,) of a dataset that is one text, in the model's own tokens."""
    from tokens.batches import Text
    from tokens.mixture import open_split
    from tokens.token_files import load_meta, load_tokenizer

    split = None if "," in data.name else open_split(data, "val", block_size)
    if not isinstance(split, Text):
        raise UserError("this is no single text", data, "give runs of one text")
    if load_tokenizer(data, load_meta(data)).to_json() != tokenizer.to_json():
        raise UserError("this dataset has other tokens than the model", data, "prepare it again")
    return split.tokens


def names_of(runs):
    """A name for each run: its positions and mixer if these tell the runs apart, else its folder,
    else the folder's whole path."""
    outs, models = [out for out, *_ in runs], [c for *_, c in runs]
    words = [c.position + f", {c.mixer}" * (c.mixer != "attention") for c in models]
    choices = words, [Path(out).name for out in outs], outs
    return next((names for names in choices if len({*names}) == len(names)), outs)


def lines_of(outs, config, runtime):
    """(context of training, [line]) of the runs and their scalings. A line is {"name", "scaling",
    "losses": as `extrapolation` gives them}."""
    from bench.ablation.contexts import extrapolation
    from parts.position import ROPE_SCALING
    from weights import checkpoint

    runs, tokens = opened(outs, config, runtime)
    T, lines = runs[0][1].config.block_size, []
    for name, (_, model, folder, keys, c) in zip(names_of(runs), runs, strict=True):
        models = {c.rope_scaling: model}
        if c.position == "rope" and c.rope_scaling == "none":
            factor = float(max(POSITIONS))
            for scaling in [word for word in ROPE_SCALING if word != "none"]:
                longer = dict(rope_scaling=scaling, rope_factor=factor, rope_original=T)
                scaled = checkpoint.load_model(folder, keys | longer, runtime.device)
                models[scaling] = scaled.eval()
        for scaling, one in models.items():
            losses = extrapolation(one, tokens, runtime, POSITIONS, TOKENS)
            lines.append({"name": name, "scaling": scaling, "losses": losses})
            print(f"{title(lines[-1])}: {text_of(losses[f'{max(POSITIONS):g}'])}", flush=True)
    return T, lines


def title(line):
    """The name of a line, with its scaling."""
    return line["name"] + ("" if line["scaling"] == "none" else f", {line['scaling']}")


def text_of(entry):
    """A loss as text, with half the width of its interval; or why there is none."""
    if "why" in entry:
        return entry["why"]
    half = "" if entry["low"] is None else f" ± {(entry['high'] - entry['low']) / 2:.3f}"
    return f"{entry['loss']:.3f}{half}"


def loss_table(T, lines):
    """Markdown: a row for each line, a column for each position."""
    heads = [f"{int(n * T)} ({n:g}×)" for n in POSITIONS]
    rows = [f"| | {' | '.join(heads)} | baseline |", f"|---|{'---|' * (len(heads) + 1)}"]
    why = {}
    for line in lines:
        entries = [line["losses"][f"{n:g}"] for n in POSITIONS]
        cells = [text_of(entry) if "loss" in entry else "none" for entry in entries]
        rows.append(f"| {title(line)} | {' | '.join(cells)} | {text_of(entries[0]['window'])} |")
        why |= {title(line): entry["why"] for entry in entries if "why" in entry}
    return rows + [""] + [f"No loss for {name}: {reason}." for name, reason in why.items()]


# ---------------------------------------------------------------- pictures


def label_ends(axes, ends):
    """Write [(x, y, text, color)] beside the ends of lines, those at the right edge in one column
    and moved apart where they would overlap."""
    last = max(end[0] for end in ends)
    for x, y, text, color in ends:
        if x < last:
            axes.annotate(text, (x, y), (4, 3), textcoords="offset points", color=color, size=9)
    column = [end for end in ends if end[0] == last]
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [to_axes.transform((x, y))[1] for x, y, _, _ in column]
    order, gap, places = np.argsort(heights), 0.065, {}
    for place in order:
        below = max(places.values(), default=-gap)
        places[place] = max(heights[place], below + gap)
    over = max(0.0, max(places.values()) - 1)
    for place, height in places.items():
        _, _, text, color = column[place]
        axes.text(1.02, height - over, text, transform=axes.transAxes, color=color, va="center")


def styles():
    """Endless colours, marks and dashes, as in the figures of a report."""
    from bench.ablation.figures import ARM_COLORS, ARM_MARKERS, DASHES

    number = 0
    while True:
        yield {
            "color": ARM_COLORS[number % len(ARM_COLORS)],
            "marker": ARM_MARKERS[number % len(ARM_MARKERS)],
            "linestyle": DASHES[number // len(ARM_COLORS) % len(DASHES)],
        }
        number += 1


def loss_panel(axes, T, lines):
    """The losses of some lines against the tokens before the last target; a dotted line shows the
    baseline."""
    ends = []
    for line, style in zip(lines, styles(), strict=False):
        known = [n for n in POSITIONS if "loss" in line["losses"][f"{n:g}"]]
        entries = [line["losses"][f"{n:g}"] for n in known]
        places, losses = np.array(known) * T, [entry["loss"] for entry in entries]
        axes.plot(places, losses, **style, markersize=4)
        axes.axhline(entries[0]["window"]["loss"], ls=":", lw=0.9, color=style["color"])
        ends.append((places[-1], losses[-1], title(line), style["color"]))
    axes.set_xscale("log", base=2)
    axes.set_xticks([n * T for n in POSITIONS], [f"{n * T:g}" for n in POSITIONS], fontsize=8)
    axes.minorticks_off()
    axes.axvline(T, lw=0.8, color="#6e7781")
    axes.set(xlabel="context, tokens", ylabel="loss, nats per token")
    return ends


def loss_figure(T, lines):
    """A panel of the runs as they are, and one of rope and its scalings, if there are any."""
    from matplotlib.figure import Figure

    counts = Counter(line["name"] for line in lines)
    panels = [[line for line in lines if line["scaling"] == "none" or counts[line["name"]] == 1]]
    if len(lines) > len(panels[0]):
        panels.append([line for line in lines if counts[line["name"]] > 1])
    figure = Figure(figsize=(SIZE[0], SIZE[1] * len(panels) / 2))
    drawn = np.atleast_1d(figure.subplots(len(panels)))
    ends = [loss_panel(axes, T, lines) for axes, lines in zip(drawn, panels, strict=True)]
    figure.draw_without_rendering()  # the scales are known from here on
    for axes, labels in zip(drawn, ends, strict=True):
        label_ends(axes, labels)
    return figure


def cost_figure(lines, device):
    """Time and memory against context, on logarithmic axes."""
    from matplotlib.figure import Figure

    from bench.timing.growth import exponents

    kind = "peak of a step" if device.startswith("cuda") else "kept for the backward pass"
    labels = "seconds of a training step", f"MB, {kind}"
    figure = Figure(figsize=SIZE)
    panels, ends = figure.subplots(2), ([], [])
    for (name, line), style in zip(lines.items(), styles(), strict=False):
        known = [point for point in line if "bytes" in point]
        contexts = [point["context"] for point in known]
        costs = [np.median(p["seconds"]) for p in known], [p["bytes"] / 1e6 for p in known]
        for axes, own, cost, power in zip(panels, ends, costs, exponents(line), strict=True):
            if known:
                axes.plot(contexts, cost, **style, markersize=4)
                text = name if power is None else f"{name}, $T^{{{power:.2f}}}$"
                own.append((contexts[-1], cost[-1], text, style["color"]))
    ticks = sorted({point["context"] for line in lines.values() for point in line})
    for axes, label in zip(panels, labels, strict=True):
        axes.set(xscale="log", yscale="log", xlabel="context T, tokens", ylabel=label)
        axes.set_xticks(ticks, [f"{T / 1024:g}k" for T in ticks])
        axes.minorticks_off()
    figure.draw_without_rendering()
    for axes, own in zip(panels, ends, strict=True):
        label_ends(axes, own)
    return figure


def cost_table(lines):
    """Markdown: a row for each context, a column for each line, and the exponents below."""
    from bench.timing.growth import FITTED, exponents, text_of

    rows = [f"| context | {' | '.join(lines)} |", f"|---|{'---|' * len(lines)}"]
    for points in zip(*lines.values(), strict=True):
        rows.append(f"| {points[0]['context']:,} | {' | '.join(map(text_of, points))} |")
    powers = [exponents(line) for line in lines.values()]
    for what, values in zip(("time", "memory"), zip(*powers, strict=True), strict=True):
        cells = ["" if power is None else f"{power:.2f}" for power in values]
        rows.append(f"| exponent of {what}, last {FITTED} contexts | {' | '.join(cells)} |")
    return rows


# ---------------------------------------------------------------- the command


def write(config, name, heading, about, table, numbers, draw, argv):
    """Write a page <name>.md, its numbers <name>.json, and what draw() draws as PNG and SVG."""
    import matplotlib

    from bench.ablation.plots import STYLE, saved
    from common.runtime import versions

    facts = versions()
    command = " ".join(["python bench/extrapolate.py", *argv])
    made = f"{facts['hardware']}, torch {facts['torch']}, commit {facts['git_commit']}"
    page = [f"# {heading}", "", f"`{command}`", f"{made}, {time.strftime('%Y-%m-%d')}. {about}"]
    page += ["", f"![{heading}]({name}.png)", "", *table]
    folder = Path(config.out_dir or files.ROOT / "bench/results/extrapolate")
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = draw()
        files.write(folder / f"{name}.png", saved(figure, "png", dpi=150))
        files.write(folder / f"{name}.svg", saved(figure, "svg"))
    files.write(folder / f"{name}.json", json.dumps(numbers, indent=1) + "\n")
    files.write(folder / f"{name}.md", "\n".join(page).rstrip() + "\n")
    print(folder / f"{name}.md")


def losses(outs, config, argv):
    """Score the runs and write the page of their losses."""
    from common.runtime import set_up

    T, lines = lines_of(outs, config, set_up(config.device, "float32"))
    about = (
        f"Trained with {T} tokens. Nats per token on the same targets, with 95 % intervals over"
        " windows of the text. Baseline, and dotted: only the last"
        f" {T} tokens are in sight. Scalings of rope are for texts {max(POSITIONS)} times as long,"
        " without further training."
    )
    numbers = {"context": T, "lines": lines}
    heading, table = "Loss beyond the training context", loss_table(T, lines)
    write(config, "losses", heading, about, table, numbers, lambda: loss_figure(T, lines), argv)


def costs(config, argv):
    """Time the mixers and write the page of their costs."""
    import torch

    from bench.timing.growth import measure
    from common.runtime import find_device

    device = find_device(config.device)
    torch.set_num_threads(config.threads)
    lines = measure(config, device)
    about = (
        f"A training step on one text, in LLaMAs with n_layer={config.n_layer},"
        f" n_embd={config.n_embd} and n_head={config.n_head}, eager, on {device}, threads:"
        f" {config.threads}. Windows and groups have {config.window} tokens. Medians of"
        f" {config.steps} rounds, in which the mixers take turns."
    )
    numbers = {"device": device, "lines": lines}
    heading, table = "Cost of context", cost_table(lines)
    write(config, "costs", heading, about, table, numbers, lambda: cost_figure(lines, device), argv)


def main(argv):
    values, outs = load(argv, [ExtrapolateConfig], __doc__)
    config = build(ExtrapolateConfig, values)
    if config.costs == bool(outs):
        what = "give run folders, or --costs, and not both"
        raise UserError(what, "command line", "python bench/extrapolate.py out-alibi out-rope")
    return costs(config, argv) if config.costs else losses(outs, config, argv)


if __name__ == "__main__":
    run(main)
