"""The page of all measured speeds, speed.md, from the lines of speed.jsonl."""

from bench.timing.attention import KINDS, LENGTHS
from bench.timing.results import folder, threads_text
from bench.timing.train import RATIOS
from training.run_folder import read_rows

HEAD = """# Speed

Each section is the newest measurement of its kind on its hardware. The sides take turns; a ratio is
the median over the rounds, with its 95 % bootstrap interval. `python bench/speed.py page` writes
this page from [speed.jsonl](speed.jsonl). `bash bench/gpu.sh` measures what needs a GPU, in 45
minutes. Training runs beside nanoGPT's, from a cold start: [cpu_race.md](cpu_race.md).
"""
# What only a GPU can tell: {name of a section: (step of bench/gpu.sh, its rows)}.
ON_GPU = {
    "train 124m": ("train", [f"{side} / {other}" for side in RATIOS for other in RATIOS[side]]),
    "flash": ("flash", [f"T = {T}" for T in LENGTHS]),
    "flex": ("flex", [f"{kind}, T = {T}" for kind in KINDS for T in LENGTHS]),
    "shakespeare": ("shakespeare", ["gpt2_shakespeare", "llama_shakespeare"]),
    "memory": ("memory", ["gpt2_124m", "llama_124m"]),
    "ranks": ("ranks", ["ddp", "fsdp"]),
}


def key(line):
    return tuple(line[name] for name in ("name", "hardware", "device", "threads", "dtype"))


def stored():
    """The newest line of each measurement, in the order in which they were first made."""
    return list({key(line): line for line in read_rows(folder() / "speed.jsonl")}.values())


def table(rows, missing=()):
    """The lines of a table; rows that are missing are there, as not measured."""
    lines = ["| | measured | ratio | 95 % interval |", "|---|---|---|---|"]
    for row in rows:
        ratio = span = ""
        if row["low"] is not None:
            ratio, span = f"{row['ratio']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}"
        elif row["ratio"] is not None:  # measured once
            ratio, span = f"{row['ratio']:.2f}", "none"
        lines.append(f"| {row['what']} | {row['value']} | {ratio} | {span} |")
    return lines + [f"| {what} | not measured | | |" for what in missing]


def section(line):
    """The lines of a measurement that was made."""
    threads = line["threads"] and threads_text(line["threads"])
    where = [line["hardware"], line["device"], threads, line["dtype"], f"torch {line['torch']}"]
    facts = ", ".join(word for word in where if word)
    expected = ON_GPU.get(line["name"], ("", []))[1] if line["device"] == "cuda" else []
    measured = {row["what"] for row in line["rows"]}
    return [
        f"## {line['name']}",
        "",
        f"{facts}; commit {line['commit']}, {line['date']}. {line['command']}",
        f"{line['about']} Ratio: {line['unit']}.",
        "",
        *table(line["rows"], [what for what in expected if what not in measured]),
        "",
    ]


def page():
    """The text of speed.md."""
    lines, measured = HEAD.splitlines(), stored()
    on_gpu = [line for line in measured if line["device"] == "cuda"]

    lines += ["", "# On a GPU", ""]
    for name, (step, rows) in ON_GPU.items():
        lines_of_name = [line for line in on_gpu if line["name"] == name]
        for line in lines_of_name:
            lines += section(line)
        if not lines_of_name:
            lines += [f"## {name}", "", f"Not measured: `bash bench/gpu.sh {step}`.", ""]
            lines += [*table([], rows or [name]), ""]
    for line in on_gpu:
        lines += section(line) if line["name"] not in ON_GPU else []

    lines += ["# On a CPU", ""]
    for line in measured:
        lines += section(line) if line["device"] != "cuda" else []
    decode = folder() / "speed_decode.md"
    if decode.exists():  # a page of its own, with what it measures besides
        text = decode.read_text(encoding="utf-8").replace("\n## ", "\n### ")
        lines += ["#" + text.strip(), ""]
    return "\n".join(lines)


def main():
    (folder() / "speed.md").write_text(page(), encoding="utf-8")
    print(f"wrote {folder() / 'speed.md'}")
