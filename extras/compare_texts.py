"""
python -m extras.compare_texts RUN RUN [--start="ROMEO:"] [--num_samples=1]

Several models continue the same prompts, and their texts stand side by side. RUN is a run folder,
or pretrained weights as in sample.py --init_from. It takes the keys of sample.py.
"""

import shutil
import sys

from common import early
from common.errors import UserError, printable, run

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("extras.compare_texts")

from common.configurator import load
from sample import build_config, choose_device, numbered, open_model, report, write_samples
from sampling.prompts import read_prompts, shown
from sampling.settings import NAMING, SampleConfig, refuse_idle

NARROWEST = 35  # cells of a column of text and its margin


def show_columns(titles, texts):
    """Print texts side by side on a terminal that is wide enough, else one after another."""
    titles = [printable(title) for title in titles]
    width = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or width < len(texts) * NARROWEST:
        sections = zip(titles, texts, strict=True)
        print("\n\n".join(f"{title}:\n{shown(text)}" for title, text in sections))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.MINIMAL, width=width, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(Text(title), ratio=1, overflow="fold")
    cells = [printable(text.replace("\t", "    "), keep="\n") for text in texts]
    table.add_row(*map(Text, cells))
    Console(width=width).print(table)


def write_side_by_side(opened, config):
    """Write every sample of every prompt with each of the opened models, and print them."""
    titles = [one.name for one in opened]
    wanted = [numbered(one.prompts, config.num_samples) for one in opened]
    for group in zip(*wanted, strict=True):
        samples = []
        for one, prompt_and_number in zip(opened, group, strict=True):
            samples += write_samples(one.model, one.tokenizer, [prompt_and_number], config)
        if config.jsonl:
            for title, sample in zip(titles, samples, strict=True):
                report(title, sample, config, streamed=False)
        else:
            show_columns(titles, [s.text if config.chat else s.prompt + s.text for s in samples])
            print("---------------", flush=True)


def read(argv):
    """(SampleConfig, names of the models) of a command line."""
    given = load(argv, [SampleConfig], __doc__)
    values = given.values
    names = given.words
    if len(names) < 2:
        fix = "python -m extras.compare_texts RUN RUN"
        raise UserError("name two models or more", "command line", fix)
    refuse_idle(given.typed, NAMING)
    if values.get("show_probs") and not values.get("jsonl"):
        fix = "show the alternatives of one model with sample.py"
        raise UserError("columns have no room for them", "--show_probs", fix)
    return build_config(values), names


def main(argv):
    config, names = read(argv)
    texts = read_prompts(config.start, config.prompts)
    device, dtype = choose_device(config)
    opened = [open_model(name, texts, config, device, dtype) for name in names]
    write_side_by_side(opened, config)


if __name__ == "__main__":
    run(main)
