"""The page of all measured speeds, speed.md, from the lines of speed.jsonl."""

import statistics

from bench.ablation.report import render
from bench.timing.results import folder, threads_text
from common import files
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


def newest(lines):
    """{kind: [line]}: of each measurement the newest on each machine, in the order of their names.
    A measurement is a kind and a name, such as train and the shape M."""
    kept = {(line["kind"], line["name"], line["hardware"]): line for line in lines}
    kinds = {}
    for (kind, *_), line in sorted(kept.items()):
        kinds.setdefault(kind, []).append(line)
    return kinds


def cell(column, value):
    """The text of a value; of a list the median, and then each."""
    form = COLUMNS.get(column, ".4g")
    if value is None or isinstance(value, str):
        return "not measured" if value is None else value
    if isinstance(value, list):
        each = ", ".join(f"{number:{form}}" for number in value)
        return f"{statistics.median(value):{form}} ({each})"
    if isinstance(value, dict):
        span = f" ({value['low']:.2f} to {value['high']:.2f})" if "low" in value else ""
        return f"{value['ratio']:.2f}{span}"
    return f"{value:{',.0f' if value >= 1000 else form}}"


def title(line):
    """What was measured, and where."""
    threads = line["threads"] and threads_text(line["threads"])
    how = ", ".join(dict.fromkeys(word for word in (line["name"], threads) if word))
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
    """Which command measured it, and when."""
    known = f"commit {line['commit']}, {line['date']}, torch {line['torch']}"
    return f"- {title(line)}: {known}, `{line['command']}`. {line['about']}"


def page():
    """The text of speed.md."""
    kinds = newest(read_rows(folder() / "speed.jsonl"))
    return render("speed.md.j2", kinds=kinds, table=table, source=source)


def main():
    files.write(folder() / "speed.md", page())
    print(f"wrote {folder() / 'speed.md'}")
