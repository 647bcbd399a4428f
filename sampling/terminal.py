"""
What sample.py prints besides samples: the surprise of each token of a text, the alternatives at
each step, and the texts of several models side by side.

On a terminal, rich prints these in colours and columns; elsewhere they are plain text. rich is
imported where it is used, since most commands do not need it.
"""

import codecs
import itertools
import json
import math
import sys

import torch
from torch.nn import functional as F

from common.errors import UserError
from sampling.decoding import Reader

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


# ---------------------------------------------------------------- surprise


@torch.inference_mode()
def surprise(model, ids, first, context=None, vocab_size=None):
    """-ln p (N,) in nats of each token of ids (N,), which follow the token `first`. Before each
    token the model reads as much context as in sampling."""
    reader, device = Reader(model, context), next(model.parameters()).device
    text = torch.tensor([first, *ids], device=device)  # (N + 1,)
    done, found = 0, [torch.zeros(0, device=device)]
    while done < len(ids):
        start = reader.start(done + 1)
        end = min(len(ids), start + reader.context)
        logits = model(text[None, start:end])[0][0, done - start :, :vocab_size]
        found.append(F.cross_entropy(logits.float(), text[done + 1 : end + 1], reduction="none"))
        done = end
    return torch.cat(found).double()


def summary(nats, n_bytes):
    """{name: number} of a text, from the surprise of its tokens (N,) and its size in bytes."""
    mean = nats.mean().item()
    return {
        "tokens": len(nats),
        "bytes": n_bytes,
        "nats_per_token": mean,
        "bits_per_byte": nats.sum().item() / math.log(2) / n_bytes,
        "perplexity": math.exp(min(mean, 700)),
    }


def pieces(tokenizer, ids):
    """The text of each token. A character that spans several tokens belongs to the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [decoder.decode(tokenizer.decode_bytes([token])) for token in ids]


def score_text(model, tokenizer, text, context=None, where="text"):
    """How well a model predicts a text: a dictionary with `tokens`, `bytes`, `nats_per_token`,
    `bits_per_byte` and `perplexity`, and for each token its text (`pieces`) and its surprise in
    nats (`surprise`). Raises UserError, which names `where`, for an empty text."""
    ids = tokenizer.encode(text).tolist()
    if not ids:
        raise UserError("there is nothing to score", where, "give a text that is not empty")
    nats = surprise(model, ids, tokenizer.start, context, tokenizer.vocab_size)
    numbers = summary(nats, len(tokenizer.decode_bytes(ids)))
    return numbers | {"pieces": pieces(tokenizer, ids), "surprise": nats.tolist()}


def report_score(opened, texts, config):
    """Print how well each model of `opened` predicts a text, given as each of them can read it."""
    rows = []
    for o, text in zip(opened, texts, strict=True):
        found = score_text(o.model, o.tokenizer, text, config.context, config.score)
        rows.append({"model": o.name, "score": config.score} | found)
    if config.jsonl:
        print("\n".join(map(json.dumps, rows)))
        return

    show(score_table(rows))
    if len({json.dumps(o.tokenizer.to_json(), sort_keys=True) for o in opened}) > 1:
        print("the tokenizers differ: compare only bits per byte")
    for row in rows:
        texts, nats = row["pieces"], row["surprise"]
        print(f"\n{row['model']}, the most surprising of {len(nats):,} tokens:")
        show(surprising(texts, nats))
        if has_colours():
            print("\nthe text, coloured by the surprise of its tokens:")
            show(coloured(texts, nats))
        if config.score_all:
            print("\nall tokens:")
            print(plain(texts, nats))
    if not config.score_all:
        print("\n--score_all prints the surprise of every token")
    print()


def surprising(texts, nats, count=20):
    """A table of the most surprising tokens of a text, given the texts of its tokens and their
    surprise: nats, the line, and the token in brackets with what is around it."""
    text, ends = "".join(texts), list(itertools.accumulate(map(len, texts)))
    table = table_of("nats", "line", "")
    table.columns[2].justify, table.columns[2].no_wrap = "left", True
    for i in sorted(range(len(nats)), key=lambda i: -nats[i])[:count]:
        start, end = ends[i] - len(texts[i]), ends[i]
        line = str(text.count("\n", 0, start) + 1)
        before, token, after = text[max(0, start - 24) : start], texts[i], text[end : end + 24]
        before, token, after = (
            printable(part.replace("\n", "↵")) for part in (before, token, after)
        )
        place = literal(f"{before:>24}[").append(token, style_of(nats[i])).append(f"]{after}")
        table.add_row(f"{nats[i]:.2f}", line, place)
    return table


def score_table(rows):
    """A table with a line for each model, given its name (`model`) and summary."""
    table = table_of("", "tokens", "nats/token", "perplexity", "bits/byte")
    for numbers in rows:
        table.add_row(
            literal(numbers["model"]),
            f"{numbers['tokens']:,}",
            f"{numbers['nats_per_token']:.4f}",
            f"{numbers['perplexity']:.4g}",
            f"{numbers['bits_per_byte']:.4f}",
        )
    return table


def style_of(nats):
    """The style of a token with this surprise."""
    return next(style for limit, style in LEVELS if nats < limit or limit == math.inf)


def coloured(texts, nats):
    """The texts of tokens, each coloured by its surprise, with a legend."""
    text = literal("")
    for piece, value in zip(texts[:SHOWN], nats, strict=False):
        style = style_of(value)
        for i, line in enumerate(printable(piece.replace("\n", "↵\n")).split("\n")):
            if i > 0:
                text.append("\n")
            text.append(line, style)
    if text.plain.endswith("\n"):
        text.right_crop(1)

    text.append("\nnats: ")
    low = 0
    for high, style in LEVELS:
        text.append(f" {low:g} or more " if high == math.inf else f" {low:g} to {high:g} ", style)
        text.append(" ")
        low = high
    text.rstrip()
    if len(texts) > SHOWN:
        text.append(f"\nthe first {SHOWN:,} of {len(texts):,} tokens")
    return text


def plain(texts, nats):
    """A line for each token: its surprise in nats, and its text as Python writes it."""
    rows = zip(texts, nats, strict=True)
    return "\n".join(f"{value:8.4f}  {text!r}" for text, value in rows)


# ---------------------------------------------------------------- samples


def alternatives_table(tokenizer, sample):
    """A table with a line for each token of a Sample: its probability, and the likeliest tokens
    with theirs, by the model alone (temperature 1): five, or as many as the terminal has room
    for."""

    def written(token):
        return literal(repr(tokenizer.decode([token])))

    def table_with(count):
        table = table_of("step", "drawn", "p", "likeliest")
        table.columns[1].justify = table.columns[3].justify = "left"
        steps = zip(sample.tokens, sample.logprobs, sample.top, strict=True)
        for step, (token, logprob, top) in enumerate(steps, 1):
            likeliest = [written(other) + f" {p:.3f}" for other, p in top[:count]]
            table.add_row(str(step), written(token), f"{math.exp(logprob):.3f}", *likeliest)
        return table

    screen = console()
    for count in (5, 4, 3, 2, 1):
        table = table_with(count)
        options = screen.options.update(width=UNLIMITED)
        if screen.measure(table, options=options).maximum <= screen.width:
            break
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
        table.add_column(literal(title), ratio=1, overflow="fold")
    table.add_row(*(literal(printable(text)) for text in texts))
    return table


def show_columns(titles, texts):
    """Print texts side by side on a terminal that is wide enough, else one after another."""
    table = columns(titles, texts, console().width) if sys.stdout.isatty() else None
    if table is not None:
        show(table)
    else:
        sections = zip(titles, texts, strict=True)
        print("\n\n".join(f"{title}:\n{text}" for title, text in sections))


def show_prompt(prompt):
    """Print a prompt, which its continuation follows; on a terminal it is bold."""
    if sys.stdout.isatty():
        text = literal(prompt)
        text.stylize("bold")
        console().print(text, end="", soft_wrap=True)
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


def has_colours():
    """Whether stdout is a terminal with colours, and NO_COLOR is not set."""
    if not sys.stdout.isatty():
        return False
    return console().color_system is not None and not console().no_color


def table_of(first, *others):
    """An empty table without lines. Columns are aligned right, but the first one left if it has no
    title."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(first, justify="right" if first else "left")
    for title in others:
        table.add_column(title, justify="right")
    return table


def literal(text):
    """A text that rich prints as it is, without interpreting markup."""
    from rich.text import Text

    return Text(text)


def printable(text):
    """`text` without control characters, which a terminal would interpret."""
    text = text.replace("\t", "    ")
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
