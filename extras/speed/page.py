"""The page of all measured speeds: page.txt, with the tables of the lines of speed.jsonl."""

import statistics
from pathlib import Path

from bench.ablation.rows import threads_text
from common import files
from extras.speed.results import folder
from training.run_folder import read_rows

COLUMNS = {  # in their order, with the form of their numbers; other columns follow, in four digits
    "what": "",
    "M parameters": ".2f",
    "tokens/s": ",.0f",
    "fastest": ",.0f",
    "times nanoGPT": ".2f",
    "times transformers": ".2f",
    "times llama.cpp": ".2f",
    "same text": ".0f",
    "MFU": ".1%",
    "GB": ".2f",
    "wall s": ".0f",
    "wall / nanoGPT": ".2f",
    "CPU s": ".0f",
    "CPU / nanoGPT": ".2f",
    "validation loss": ".4f",
    "test loss": ".4f",
    "when nanoGPT ended": ".4f",
}

# {kind: {device: the command that measures it there}}
COMMANDS = {
    "train": {"cuda": "bash bench/gpu.sh train"},
    "optimizer": {"cuda": "python -m extras.speed optimizer --device=cuda"},
    "attention": {"cuda": "bash bench/gpu.sh attention"},
    "decode": {
        "cpu": "python -m extras.speed decode --nanogpt=PATH --llamacpp=PATH",
        "cuda": "bash bench/gpu.sh decode",
    },
    "race": {
        "cpu": "python -m extras.speed race --nanogpt=PATH",
        "cuda": "bash bench/gpu.sh gpt2",
    },
}


def newest(lines):
    """{kind: [line]}: of each measurement the newest on each machine with as many threads, in the
    order of their names. A measurement is a kind and a name, such as train and the shape M."""
    kept = {}
    for line in lines:
        threads = line["threads"] or 0  # None on a GPU
        kept[line["kind"], line["name"], line["hardware"], threads] = line
    kinds = {}
    for (kind, *_), line in sorted(kept.items()):
        kinds.setdefault(kind, []).append(line)
    return kinds


def cell(column, value):
    """The text of a value; of a list the median, and then each."""
    form = COLUMNS.get(column, ".4g")
    if value is None:
        return "not measured"
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        each = ", ".join(f"{number:{form}}" for number in value)
        return f"{statistics.median(value):{form}} ({each})"
    if isinstance(value, dict):
        interval = ""
        if "low" in value:
            interval = f" ({value['low']:.2f} to {value['high']:.2f})"
        return f"{value['ratio']:.2f}{interval}"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:{form}}"


def title(line):
    """The name, the threads and the machine of a measurement."""
    parts = [line["name"]]
    if line["threads"]:
        parts.append(threads_text(line["threads"]))
    how = ", ".join(dict.fromkeys(part for part in parts if part))
    return f"{how} on {line['hardware']}" if how else line["hardware"]


def table(lines):
    """The table of measurements of one kind, a group of rows for each."""
    used = dict.fromkeys(column for line in lines for row in line["rows"] for column in row)
    columns = [column for column in COLUMNS | used if column in used]
    heads = ["" if column == "what" else column for column in columns]
    printed = [f"| {' | '.join(heads)} |", "|---" * len(columns) + "|"]
    for line in lines:
        printed.append(f"| **{title(line)}** |" + " |" * (len(columns) - 1))
        for row in line["rows"]:
            cells = [cell(column, row[column]) if column in row else "" for column in columns]
            printed.append(f"| {' | '.join(cells)} |")
    return "\n".join(printed)


def source(line):
    """The command that measured a line, and its date."""
    facts = f"commit {line['commit']}, {line['date']}, torch {line['torch']}"
    return f"- {title(line)}: {facts}, `{line['command']}`. {line['about']}"


def section_text(kind, lines):
    """Where a kind has not been measured, its table, and the source of each measurement."""
    paragraphs = []
    for device, command in COMMANDS[kind].items():
        if not any(line["device"] == device for line in lines):
            name = "GPU" if device == "cuda" else "CPU"
            paragraphs.append(f"On a {name}: not measured (`{command}`).")
    if lines:
        paragraphs += [table(lines), "\n".join(source(line) for line in lines)]
    if kind == "race" and (folder() / "cpu_race.png").exists():
        paragraphs.append("![validation loss against seconds](cpu_race.png)")
    return "\n\n".join(paragraphs)


def page():
    """The text of speed.md."""
    kinds = newest(read_rows(folder() / "speed.jsonl"))
    texts = {kind: section_text(kind, kinds.get(kind, [])) for kind in COMMANDS}
    return Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").format(**texts)


def main():
    files.write(folder() / "speed.md", page())
    print(f"wrote {folder() / 'speed.md'}")
