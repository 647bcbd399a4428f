"""The page of all measured speeds, speed.md, from the lines of speed.jsonl."""

from bench.timing.results import folder, threads_text
from training.run_folder import read_rows

HEAD = """# Speed

Each section is the newest measurement of its kind on its hardware. The sides take turns; a ratio is
the median over the rounds, with its 95 % bootstrap interval. `python bench/speed.py page` writes
this page from [speed.jsonl](speed.jsonl). `bash bench/gpu.sh` measures what needs a GPU, in 45
minutes. Training runs beside nanoGPT's, from a cold start: [cpu_race.md](cpu_race.md).
"""
ON_GPU = {"train 124m": "train", "flash": "flash"}  # {section: its step of bench/gpu.sh}


def key(line):
    return tuple(line[name] for name in ("name", "hardware", "device", "threads", "dtype"))


def stored():
    """The newest line of each measurement, in the order in which they were first made."""
    return list({key(line): line for line in read_rows(folder() / "speed.jsonl")}.values())


def table(rows):
    """The lines of a table."""
    lines = ["| | measured | ratio | 95 % interval |", "|---|---|---|---|"]
    for row in rows:
        ratio = span = ""
        if row["low"] is not None:
            ratio, span = f"{row['ratio']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}"
        elif row["ratio"] is not None:  # measured once
            ratio, span = f"{row['ratio']:.2f}", "none"
        lines.append(f"| {row['what']} | {row['value']} | {ratio} | {span} |")
    return lines


def section(line):
    """The lines of a measurement that was made."""
    threads = line["threads"] and threads_text(line["threads"])
    where = [line["hardware"], line["device"], threads, line["dtype"], f"torch {line['torch']}"]
    facts = ", ".join(word for word in where if word)
    return [
        f"## {line['name']}",
        "",
        f"{facts}; commit {line['commit']}, {line['date']}. {line['command']}",
        f"{line['about']} Ratio: {line['unit']}.",
        "",
        *table(line["rows"]),
        "",
    ]


def page():
    """The text of speed.md."""
    lines, measured = HEAD.splitlines(), stored()
    on_gpu = [line for line in measured if line["device"] == "cuda"]

    lines += ["", "# On a GPU", ""]
    for line in on_gpu:
        lines += section(line)
    for name in [name for name in ON_GPU if name not in {line["name"] for line in on_gpu}]:
        lines += [f"## {name}", "", f"Not measured: `bash bench/gpu.sh {ON_GPU[name]}`.", ""]
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
