"""
What sample.py reads and prints besides samples: the texts that the user gives, the surprise of each
token of a text, the alternatives at each step, and the texts of several models side by side.

On a terminal, rich prints these in colours and columns; elsewhere they are plain text. rich is
imported where it is used, since most commands do not need it.
"""

import itertools
import json
import math
import sys

import torch
from torch.nn import functional as F

from common.errors import UserError, printable
from sampling.decoding import Reader, pieces

LEVELS = [  # (surprise below so many nats, style of the token)
    (0.5, ""),
    (1, "color(16) on color(230)"),
    (2, "color(16) on color(222)"),
    (4, "color(16) on color(208)"),
    (8, "color(15) on color(160)"),
    (math.inf, "color(15) on color(53)"),
]
SHOWN = 4000  # coloured tokens at most; the numbers count all
NARROWEST = 32  # cells of a column of text
UNLIMITED = 10_000  # cells of a line that is not shown on a terminal


def note(text):
    print(printable(text, keep="\n"), file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the user's texts


def read_text(path, what, fix):
    """The text of a utf-8 file. Raises UserError, which calls it `what`, if it cannot be read."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        where = path or "no path is given"
        raise UserError(f"cannot read the {what}: {error.strerror}", where, fix) from None
    except UnicodeDecodeError as error:
        what = f"the {what} is not utf-8: byte {error.start}"
        raise UserError(what, path, "save it as utf-8") from None


def read_prompts(start, path=""):
    """The prompts, a list of texts: the lines of the file at `path`, where an empty line is an
    empty prompt; else `start`, or the content of the file that FILE:name names."""
    if path:
        text = read_text(path, "prompts", "check the path after --prompts=")
        if not text:
            raise UserError("the file of prompts is empty", path, "write a prompt on each line")
        return text.removesuffix("\n").split("\n")
    if start.startswith("FILE:"):
        return [read_text(start.removeprefix("FILE:"), "prompt", "check the path after FILE:")]
    return [start]


def fit(tokenizer, text, where, skip_unknown=False):
    """`text`, if the tokenizer has all its characters. Otherwise, with skip_unknown, the text
    without the unknown characters, which a printed note lists; without it, raises UserError, which
    names the first of them, its position and `where`."""

    def mistake(text):
        try:
            tokenizer.encode(text)
        except UserError as error:
            return error

    error = mistake(text)
    if error is None:
        return text
    if not skip_unknown:
        what, place, fix = error.parts
        place = f"{place}, {where}" if where else place
        raise UserError(what, place, f"{fix}; or drop it with --skip_unknown") from None

    unknown = sorted(c for c in set(text) if mistake(c))
    count = sum(text.count(c) for c in unknown)
    named = " ".join(repr(c) for c in unknown[:10])
    left_out = f"{count} characters are not in the vocabulary and left out: {named}"
    note(f"{where or 'the prompt'}: {left_out}")
    return "".join(c for c in text if c not in unknown)


# ---------------------------------------------------------------- surprise


@torch.inference_mode()
def surprise(model, ids, first, context=None, vocab_size=None):
    """-ln p (N,) in nats of each token of ids (N,), which follow the token `first`. Before each
    token the model reads as much context as in sampling."""
    reader, device = Reader(model, context), next(model.parameters()).device
    text = torch.tensor([first, *ids], device=device)  # (N + 1,)
    done, nats = 0, [torch.zeros(0, device=device)]
    while done < len(ids):
        start = reader.start(done + 1)
        end = min(len(ids), start + reader.context)
        logits = model(text[None, start:end])[0][0, done - start :, :vocab_size]
        nats.append(F.cross_entropy(logits.float(), text[done + 1 : end + 1], reduction="none"))
        done = end
    return torch.cat(nats).double()


def score_text(model, tokenizer, text, context=None, where="text"):
    """How well a model predicts a text: a dictionary with `tokens`, `bytes`, `nats_per_token`,
    `bits_per_byte` and `perplexity`, and for each token its text (`pieces`) and its surprise in
    nats (`surprise`). Raises UserError, which names `where`, for an empty text."""
    ids = tokenizer.encode(text).tolist()
    if not ids:
        raise UserError("there is nothing to score", where, "give a text that is not empty")
    nats = surprise(model, ids, tokenizer.start, context, tokenizer.vocab_size)
    mean, n_bytes = nats.mean().item(), len(tokenizer.decode_bytes(ids))
    return {
        "tokens": len(ids),
        "bytes": n_bytes,
        "nats_per_token": mean,
        "bits_per_byte": nats.sum().item() / math.log(2) / n_bytes,
        "perplexity": math.exp(min(mean, 700)),
        "pieces": pieces(tokenizer, ids),
        "surprise": nats.tolist(),
    }


def report_score(opened, texts, config):
    """Print how well each model of `opened` predicts a text, given as each of them can read it."""
    rows = []
    for o, text in zip(opened, texts, strict=True):
        score = score_text(o.model, o.tokenizer, text, config.context, config.score)
        rows.append({"model": o.name, "score": config.score} | score)
    if config.jsonl:
        print("\n".join(map(json.dumps, rows)))
        return

    show(score_table(rows))
    if len({json.dumps(o.tokenizer.to_json(), sort_keys=True) for o in opened}) > 1:
        print("the tokenizers differ: compare only bits per byte")
    for row in rows:
        print(f"\n{printable(row['model'])}, the most surprising of {row['tokens']:,} tokens:")
        show(surprising(row["pieces"], row["surprise"]))
        screen = console()
        if screen.color_system is not None and not screen.no_color:
            print("\nthe text, coloured by the surprise of its tokens:")
            show(coloured(row["pieces"], row["surprise"]))
    print("\n--jsonl prints the surprise of every token\n")


def surprising(texts, nats, count=20):
    """A table of the most surprising tokens of a text, given the texts of its tokens and their
    surprise: nats, the line, and the token in brackets with what is around it."""
    text, ends = "".join(texts), list(itertools.accumulate(map(len, texts)))
    table = table_of("nats", "line", "")
    table.columns[2].justify, table.columns[2].no_wrap = "left", True
    for i in sorted(range(len(nats)), key=lambda i: -nats[i])[:count]:
        start, end = ends[i] - len(texts[i]), ends[i]
        around = text[max(0, start - 24) : start], texts[i], text[end : end + 24]
        before, token, after = (clean(part.replace("\n", "↵")) for part in around)
        place = literal(f"{before:>24}[").append(token, style_of(nats[i])).append(f"]{after}")
        table.add_row(f"{nats[i]:.2f}", str(text.count("\n", 0, start) + 1), place)
    return table


def score_table(rows):
    """A table with a line for each model, given its name (`model`) and score."""
    table = table_of("", "tokens", "nats/token", "perplexity", "bits/byte")
    for row in rows:
        table.add_row(
            literal(printable(row["model"])),
            f"{row['tokens']:,}",
            f"{row['nats_per_token']:.4f}",
            f"{row['perplexity']:.4g}",
            f"{row['bits_per_byte']:.4f}",
        )
    return table


def style_of(nats):
    """The style of a token with this surprise."""
    return next(style for limit, style in LEVELS if nats < limit or limit == math.inf)


def coloured(texts, nats):
    """The texts of tokens, each coloured by its surprise, with a legend."""
    text = literal("")
    for piece, value in zip(texts[:SHOWN], nats, strict=False):
        for i, line in enumerate(clean(piece.replace("\n", "↵\n")).split("\n")):
            text.append("\n" * (i > 0)).append(line, style_of(value))
    text.rstrip()

    text.append("\nnats: ")
    for (low, _), (high, style) in itertools.pairwise([(0, ""), *LEVELS]):
        text.append(f" {low:g} or more " if high == math.inf else f" {low:g} to {high:g} ", style)
        text.append(" " * (high < math.inf))
    if len(texts) > SHOWN:
        text.append(f"\nthe first {SHOWN:,} of {len(texts):,} tokens")
    return text


# ---------------------------------------------------------------- samples


def alternatives_table(tokenizer, sample):
    """A table with a line for each token of a Sample: its probability, and the likeliest tokens
    with theirs, as many as the terminal has room for, by the model alone (temperature 1)."""
    table = table_of("step", "drawn", "p", "likeliest")
    table.columns[1].justify = table.columns[3].justify = "left"
    for column in table.columns[:3]:
        column.no_wrap = True  # the fourth is cut where the terminal ends
    steps = zip(sample.tokens, sample.logprobs, sample.top, strict=True)
    for step, (token, logprob, top) in enumerate(steps, 1):
        likeliest = literal("  ".join(f"{tokenizer.decode([other])!r} {p:.3f}" for other, p in top))
        likeliest.no_wrap, likeliest.overflow = True, "ellipsis"
        drawn = literal(repr(tokenizer.decode([token])))
        table.add_row(str(step), drawn, f"{math.exp(logprob):.3f}", likeliest)
    return table


def columns(titles, texts, width):
    """The texts side by side under their titles, as a table `width` cells wide. None where a column
    would be too narrow to read."""
    from rich import box
    from rich.table import Table

    if (width - 3 * (len(texts) - 1)) // len(texts) < NARROWEST:
        return None
    table = Table(box=box.MINIMAL, width=width, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(literal(printable(title)), ratio=1, overflow="fold")
    table.add_row(*(literal(clean(text)) for text in texts))
    return table


def show_columns(titles, texts):
    """Print texts side by side on a terminal that is wide enough, else one after another."""
    table = columns(titles, texts, console().width) if sys.stdout.isatty() else None
    if table is not None:
        show(table)
    else:
        sections = zip(titles, texts, strict=True)
        print("\n\n".join(f"{printable(title)}:\n{text}" for title, text in sections))


def show_prompt(prompt):
    """Print a prompt, which its continuation follows; on a terminal it is bold."""
    if sys.stdout.isatty():
        console().print(literal(prompt, "bold"), end="", soft_wrap=True)
    else:
        print(prompt, end="", flush=True)


# ---------------------------------------------------------------- rich


def console(**settings):
    """A rich Console. If stdout is not a terminal, its lines are unlimited, so that no row
    wraps."""
    from rich.console import Console

    if not sys.stdout.isatty():
        settings = {"width": UNLIMITED} | settings
    return Console(highlight=False, **settings)


def show(drawing):
    console().print(drawing, soft_wrap=not hasattr(drawing, "columns"))


def table_of(first, *others):
    """An empty table without lines. Columns are aligned right, but the first one left if it has no
    title."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(first, justify="right" if first else "left")
    for title in others:
        table.add_column(title, justify="right")
    return table


def literal(text, style=""):
    """A text that rich prints as it is, without interpreting markup."""
    from rich.text import Text

    return Text(text, style)


def clean(text):
    """A text of a model as a terminal can show it: without tabs and control characters."""
    return printable(text.replace("\t", "    "), keep="\n")
