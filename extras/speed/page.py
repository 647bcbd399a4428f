"""The page of all measured speeds, speed.md, from the lines of speed.jsonl."""

import statistics
from dataclasses import dataclass

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


INTRODUCTION = (
    "Our GPT-2 and LLaMA are timed beside nanoGPT's GPT-2 and the models of transformers "
    "(training, decoding), llama.cpp (decoding), and torch's Muon, at equal sizes on one machine. "
    "Each side runs in the forms it has, eager or compiled, in float32, bfloat16 or int8; a ratio "
    "of training compares the fastest measured form of both, a ratio of decoding forms with "
    "equally many bytes per weight.",
    "All sides take turns, so that other work slows all of them equally; a time or speed is the "
    "median over the rounds, and a ratio is the median of the rounds' ratios, with its 95 % "
    "bootstrap interval. Each row is the newest on its kind of machine. "
    "`python -m extras.speed page` writes this page from [speed.jsonl](speed.jsonl).",
)


@dataclass
class Section:
    """A kind of measurement on the page. `command` measures it on `device`, if nobody has."""

    kind: str
    title: str
    text: str
    command: str
    device: str = "cuda"


SECTIONS = [
    Section(
        kind="train",
        title="Training steps",
        text="A step is forward, backward, clipping at 1.0 and fused AdamW, always on the same "
        "batch; in shape A it is a step of the runs of `config/answer`, with Muon. Tokens/s, and "
        "the ratio to the tokens/s of another library, each side in its fastest form. MFU: the "
        "share of the GPU's peak in bfloat16 by its data sheet.",
        command="bash bench/gpu.sh train",
    ),
    Section(
        kind="optimizer",
        title="Steps of the optimizer",
        text="A step of AdamW, of our Muon and of torch's, with the same gradients of our LLaMA; "
        "Muon's includes AdamW for the parameters that are no matrices. Ratios of time.",
        command="python -m extras.speed optimizer --device=cuda",
    ),
    Section(
        kind="decode",
        title="Decoding",
        text="One sequence, greedy, token by token: tokens/s of the median and of the fastest "
        "round, and the ratio to the tokens/s of the other engine with as many bytes per weight. "
        "Same text: tokens equal to the model's own greedy text before the first difference. "
        "llama.cpp times itself and leaves out the choice of the token.",
        command="python -m extras.speed decode --nanogpt=PATH --llamacpp=PATH",
        device="cpu",
    ),
    Section(
        kind="race",
        title="Whole runs beside nanoGPT's",
        text="A run of train.py from the command to its end, on a CPU, cold: with an empty "
        "compiler cache, all start-up counted. The median of the rounds, then each round. "
        "Validation loss: at the end, ours over the whole split, nanoGPT's by its own estimate. "
        "Our settings were chosen by this loss, so the table also has the loss on the test split, "
        "which no choice has used.",
        command="python -m extras.speed race --nanogpt=PATH",
        device="cpu",
    ),
]


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


def section_text(section, lines):
    """The text of a section, its table, and the source of each measurement."""
    paragraphs = [f"## {section.title}", section.text]
    if not any(line["device"] == section.device for line in lines):
        device = "GPU" if section.device == "cuda" else "CPU"
        paragraphs.append(f"On a {device}: not measured (`{section.command}`).")
    if lines:
        paragraphs += [table(lines), "\n".join(source(line) for line in lines)]
    if section.kind == "race" and lines:
        paragraphs.append("![validation loss against seconds](cpu_race.png)")
    return "\n\n".join(paragraphs)


def page():
    """The text of speed.md."""
    kinds = newest(read_rows(folder() / "speed.jsonl"))
    texts = [section_text(section, kinds.get(section.kind, [])) for section in SECTIONS]
    return "\n\n".join(["# Speed", *INTRODUCTION, *texts]) + "\n"


def main():
    files.write(folder() / "speed.md", page())
    print(f"wrote {folder() / 'speed.md'}")
