"""
What sample.py reads and prints besides samples: the texts that the user gives, the surprise of each
token of a text, the alternatives at each step, and the texts of several models side by side.
"""

import itertools
import json
import math
import os
import shutil
import sys

import torch
from torch.nn import functional as F

from common.errors import UserError, folded, printable
from sampling.decoding import Reader, pieces

LEVELS = [  # (surprise below so many nats, colour of the token on a terminal)
    (0.5, ""),
    (1, "38;5;16;48;5;230"),
    (2, "38;5;16;48;5;222"),
    (4, "38;5;16;48;5;208"),
    (8, "97;48;5;160"),
    (math.inf, "97;48;5;53"),
]
SHOWN = 4000  # coloured tokens at most; the numbers count all
NARROWEST = 35  # cells of a column of text and its margin


def note(text):
    print(folded(text, 2, sys.stderr), file=sys.stderr, flush=True)


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
    """`text` as the tokenizer can encode it: with skip_unknown, without unknown characters, which a
    note lists. Otherwise raises UserError, which names the first of them and `where`."""

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


def report_score(opened, text, config):
    """Print how well each model of `opened` predicts a text."""
    rows = []
    for o in opened:
        readable = fit(o.tokenizer, text, config.score, config.skip_unknown)
        score = score_text(o.model, o.tokenizer, readable, config.context, config.score)
        rows.append({"model": o.name, "score": config.score} | score)
    if config.jsonl:
        print("\n".join(map(json.dumps, rows)))
        return

    width = max(len(printable(row["model"])) for row in rows)
    print(f"{'':{width}}    tokens  nats/token  perplexity  bits/byte")
    for row in rows:
        numbers = f"{row['tokens']:>10,}{row['nats_per_token']:>12.4f}{row['perplexity']:>12.4g}"
        print(f"{printable(row['model']):{width}}{numbers}{row['bits_per_byte']:>11.4f}")
    if len({json.dumps(o.tokenizer.to_json(), sort_keys=True) for o in opened}) > 1:
        print("the tokenizers differ: compare only bits per byte")
    for row in rows:
        print(f"\n{printable(row['model'])}, the most surprising of {row['tokens']:,} tokens:")
        show_cut(surprising(row["pieces"], row["surprise"]))
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            print("\nthe text, coloured by the surprise of its tokens:")
            print(coloured(row["pieces"], row["surprise"]))
    print("\n--jsonl prints the surprise of every token\n")


def surprising(texts, nats, count=20):
    """Lines for the most surprising tokens: nats, the line, and the token within its context."""
    text, ends = "".join(texts), list(itertools.accumulate(map(len, texts)))
    lines = [f"{'nats':>6}{'line':>7}"]
    for i in sorted(range(len(nats)), key=lambda i: -nats[i])[:count]:
        start, end = ends[i] - len(texts[i]), ends[i]
        around = text[max(0, start - 24) : start], texts[i], text[end : end + 24]
        before, token, after = (clean(part.replace("\n", "↵")) for part in around)
        number = text.count("\n", 0, start) + 1
        lines.append(f"{nats[i]:6.2f}{number:>7}  {before:>24}[{token}]{after}")
    return lines


def coloured(texts, nats):
    """The texts of tokens, each coloured by its surprise, with a legend."""

    def paint(text, colour):
        lines = text.split("\n") if colour else []
        return "\n".join(line and f"\033[{colour}m{line}\033[0m" for line in lines) or text

    text, legend = "", "nats:"
    for piece, value in zip(texts[:SHOWN], nats, strict=False):
        colour = next(colour for limit, colour in LEVELS if value < limit or limit == math.inf)
        text += paint(clean(piece.replace("\n", "↵\n")), colour)
    for (low, _), (high, colour) in itertools.pairwise([(0, ""), *LEVELS]):
        to = f"to {high:g}" if high < math.inf else "or more"
        legend += " " + paint(f" {low:g} {to} ", colour)
    left_out = f"\nthe first {SHOWN:,} of {len(texts):,} tokens" if len(texts) > SHOWN else ""
    return text.rstrip("\n") + "\n" + legend + left_out


# ---------------------------------------------------------------- samples


def alternatives(tokenizer, sample):
    """A line for each token of a Sample: its probability, and the likeliest, at temperature 1."""
    lines = ["step  drawn           p  likeliest"]
    steps = zip(sample.tokens, sample.logprobs, sample.top, strict=True)
    for step, (token, logprob, top) in enumerate(steps, 1):
        drawn, p = repr(tokenizer.decode([token])), math.exp(logprob)
        likeliest = "  ".join(f"{tokenizer.decode([other])!r} {p:.3f}" for other, p in top)
        lines.append(f"{step:4}  {drawn:10}  {p:.3f}  {likeliest}")
    return lines


def show_cut(lines):
    """Print lines that end where the terminal does."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(line[:width] for line in lines))


def show_columns(titles, texts):
    """Print texts side by side on a terminal that is wide enough, else one after another."""
    titles, width = [printable(title) for title in titles], shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or width < len(texts) * NARROWEST:
        sections = zip(titles, texts, strict=True)
        print("\n\n".join(f"{title}:\n{text}" for title, text in sections))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.MINIMAL, width=width, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(Text(title), ratio=1, overflow="fold")
    table.add_row(*(Text(clean(text)) for text in texts))
    Console(width=width).print(table)


def clean(text):
    """A text of a model as a terminal can show it: without tabs and control characters."""
    return printable(text.replace("\t", "    "), keep="\n")
