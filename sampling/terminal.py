"""
Looking at what models say, in a terminal: how much each token of a text surprises one, what else could have come, and
the texts of several side by side.
"""

import codecs
import json
import math
import os
import re
import sys
import unicodedata

import torch
from torch.nn import functional as F

from common.errors import UserError
from sampling.decoding import Reader

LEVELS = [
    (0.5, ""),
    (1, "38;5;16;48;5;230"),
    (2, "38;5;16;48;5;222"),
    (4, "38;5;16;48;5;208"),
    (8, "97;48;5;160"),
    (math.inf, "97;48;5;53"),
]  # nats below, colour
SHOWN = 4000  # tokens that are painted at most; all are counted


# ---------------------------------------------------------------- surprise


@torch.inference_mode()
def surprise(model, ids, first, context=None, vocab_size=None):
    """-ln p (N,) in nats of each token of ids (N,), read after the token `first`. Each is told from as many tokens
    before it as sampling would show the model there."""
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
    """{name: number} of a text from the surprise of its tokens (N,) and its size in bytes."""
    mean = nats.mean().item()
    return {
        "tokens": len(nats),
        "bytes": n_bytes,
        "nats_per_token": mean,
        "bits_per_byte": nats.sum().item() / math.log(2) / n_bytes,
        "perplexity": math.exp(min(mean, 700)),
    }


def score_table(names, summaries, alike):
    """A row per model; alike: whether their tokenizers are the same."""
    width = max(map(len, names))
    lines = [f"{'':{width}}    tokens  nats/token  perplexity  bits/byte"]
    lines += [
        f"{name:{width}}  {s['tokens']:8,}  {s['nats_per_token']:10.4f}  {s['perplexity']:10.4g}  {s['bits_per_byte']:9.4f}"
        for name, s in zip(names, summaries)
    ]
    return "\n".join(lines + ["the tokenizers differ: only bits per byte compares"] * (not alike))


def pieces(tokenizer, ids):
    """The text of each token; a character that spans several stands at the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [decoder.decode(tokenizer.decode_bytes([token])) for token in ids]


def colours(file):
    """Whether to paint: on a terminal whose owner has not set NO_COLOR."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text, colour):
    return f"\033[{colour}m{text}\033[0m" if colour and text else text


def shade(text, nats):
    """A token's text on the colour of its surprise; a line end shows as a mark."""
    colour = next(colour for below, colour in LEVELS if nats < below or below == math.inf)
    return "\n".join(paint(line, colour) for line in clean(text.replace("\n", "↵\n")).split("\n"))


def legend():
    edges = [0] + [below for below, _ in LEVELS]
    return "nats: " + " ".join(
        paint(f" {low:g} to {high:g} " if high < math.inf else f" {low:g} or more ", colour)
        for low, high, (_, colour) in zip(edges, edges[1:], LEVELS)
    )


def coloured(texts, nats):
    """The texts of the tokens, each on the colour of its surprise, with a legend."""
    more = f"\nthe first {SHOWN:,} of {len(texts):,} tokens" if len(texts) > SHOWN else ""
    return "".join(map(shade, texts[:SHOWN], nats.tolist())).rstrip("\n") + "\n" + legend() + more


def plain(texts, nats):
    """A line per token: its surprise in nats, and its text as Python writes it."""
    return "\n".join(f"{n:8.4f}  {text!r}" for text, n in zip(texts, nats.tolist()))


def report_score(opened, texts, path, context, as_json):
    """Print how well models foretell a text: opened [(name, model, tokenizer, ...)], the text as each can read it."""
    names, models, tokenizers = ([o[i] for o in opened] for i in range(3))
    ids = [tokenizer.encode(text).tolist() for tokenizer, text in zip(tokenizers, texts)]
    if not all(ids):
        raise UserError("there is nothing to score", path, "give a text that is not empty")
    nats = [
        surprise(model, tokens, t.start, context, t.vocab_size)
        for model, t, tokens in zip(models, tokenizers, ids)
    ]
    found = [summary(n, len(t.decode_bytes(tokens))) for n, t, tokens in zip(nats, tokenizers, ids)]
    if not as_json:
        print(
            score_table(
                names, found, all(t.to_json() == tokenizers[0].to_json() for t in tokenizers)
            )
        )
    for name, t, tokens, n, numbers in zip(names, tokenizers, ids, nats, found):
        parts = pieces(t, tokens)
        if as_json:
            print(
                json.dumps(
                    {
                        "model": name,
                        "score": path,
                        **numbers,
                        "pieces": parts,
                        "surprise": n.tolist(),
                    }
                )
            )
        else:
            print(
                f"\n{name}, nats per token:\n"
                + (coloured(parts, n) if colours(sys.stdout) else plain(parts, n))
                + "\n"
            )


# ---------------------------------------------------------------- alternatives


def alternatives_table(tokenizer, tokens, logprobs, tops):
    """A row per step: the token drawn with its probability, and the likeliest ones, by the model alone."""

    def said(token):
        return repr(tokenizer.decode([token]))

    width = max([5, *(len(said(token)) for row in tops for token, _ in row)])
    lines = [f"step  {'drawn':{width}}      p   the likeliest, with their p at temperature 1"]
    for i, (token, logprob, top) in enumerate(zip(tokens, logprobs, tops), 1):
        lines.append(
            f"{i:4}  {said(token):{width}} {math.exp(logprob):6.3f}   "
            + "  ".join(f"{said(other):{width}} {p:5.3f}" for other, p in top)
        )
    return "\n".join(line.rstrip() for line in lines)


# ---------------------------------------------------------------- side by side


def clean(text):
    """text without the characters that would steer a terminal."""
    return "".join(
        c if c.isprintable() or c == "\n" else "    " if c == "\t" else "�" for c in text
    )


def cells(text):
    """How many cells a terminal takes for it."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def wrap(text, width):
    """Lines of at most `width` cells, broken between words where there is a place."""
    lines = []
    for paragraph in clean(text).split("\n"):
        lines.append("")
        for word in re.findall(r"\S+\s*|\s+", paragraph):
            if lines[-1] and cells(lines[-1] + word.rstrip()) > width:
                lines.append("")
            for c in word:
                if cells(lines[-1] + c) > width:
                    if c.isspace():
                        continue  # at the edge a space is not seen
                    lines.append("")
                lines[-1] += c
    return lines


def columns(titles, texts, width):
    """The texts side by side under their titles, on a terminal `width` cells wide, or one after another where a column
    would have fewer than 32."""
    each = (width - 3 * (len(texts) - 1)) // len(texts)
    if each < 32:
        return "\n\n".join(f"{title}:\n{text}" for title, text in zip(titles, texts))
    parts = [
        wrap(title, each) + ["-" * each] + wrap(text, each) for title, text in zip(titles, texts)
    ]
    rows = [
        [part[i] if i < len(part) else "" for part in parts] for i in range(max(map(len, parts)))
    ]
    return "\n".join(
        " | ".join(cell + " " * (each - cells(cell)) for cell in row).rstrip() for row in rows
    )
