"""
python -m extras.score RUN [RUN ...] --text=FILE

How well models predict a text: its loss, its most surprising tokens, and on a terminal the text,
each token coloured by its surprise (-ln p). RUN is a run folder, or pretrained weights as in
sample.py --init_from.
"""

import itertools
import json
import math
import os
import sys
from dataclasses import dataclass

from common import early
from common.errors import UserError, printable, run

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("extras.score")

import numpy as np
import torch
from torch.nn import functional as F

from common.configurator import PathName, build, load
from sample import check_context, choose_device, open_weights
from sampling.fast import make_fast
from sampling.prompts import fit, note, read_text, show_cut
from sampling.reader import Reader
from sampling.settings import DRAWN, NAMING, SampleConfig, refuse_idle
from sampling.text import texts_of
from tokens.data import text_bytes

LEVELS = [  # (surprise below so many nats, colour of the token on a terminal)
    (0.5, ""),
    (1, "38;5;16;48;5;230"),
    (2, "38;5;16;48;5;222"),
    (4, "38;5;16;48;5;208"),
    (8, "97;48;5;160"),
    (math.inf, "97;48;5;53"),
]
SHOWN = 4000  # coloured tokens at most; the numbers count all


@dataclass
class ScoreConfig:
    text: PathName = ""  # a text file


@torch.inference_mode()
def surprise(model, ids, first, context=None, vocab_size=None):
    """-ln p (N,) in nats of each token of ids (N,), which follow the token `first`. Before each
    token the model reads as much context as in sampling."""
    reader = Reader(model, context)
    device = next(model.parameters()).device
    text = torch.tensor([first, *ids], device=device)  # (N + 1,)
    nats = [torch.zeros(0, device=device)]
    done = 0
    while done < len(ids):
        start = reader.start(done + 1)
        end = min(len(ids), start + reader.context)
        logits = model(text[None, start:end])[0][0, done - start :, :vocab_size]
        nats.append(F.cross_entropy(logits.float(), text[done + 1 : end + 1], reduction="none"))
        done = end
    return torch.cat(nats).cpu().double()  # Metal has no float64


def score_text(model, tokenizer, text, context=None, where="text"):
    """How well a model predicts a text: a dictionary with `tokens`, `bytes`, `nats_per_token`,
    `bits_per_byte` and `perplexity`, and for each token its text (`pieces`) and its surprise in
    nats (`surprise`). Raises UserError, which names `where`, for an empty text."""
    ids = tokenizer.encode(text).tolist()
    if not ids:
        raise UserError("there is nothing to score", where, "give a text that is not empty")
    nats = surprise(model, ids, tokenizer.start, context, tokenizer.vocab_size)
    mean = nats.mean().item()
    n_bytes = text_bytes(tokenizer, np.array(ids))
    return {
        "tokens": len(ids),
        "bytes": n_bytes,
        "nats_per_token": mean,
        "bits_per_byte": nats.sum().item() / math.log(2) / n_bytes,
        "perplexity": math.exp(min(mean, 700)),
        "pieces": texts_of(tokenizer, ids),
        "surprise": nats.tolist(),
    }


def print_scores(rows, same_tokenizer=True, same_text=True):
    """Print the scores of a text, one for each model."""
    width = max(len(printable(row["model"])) for row in rows)
    print(f"{'':{width}}    tokens  nats/token  perplexity  bits/byte")
    for row in rows:
        numbers = f"{row['tokens']:>10,}{row['nats_per_token']:>12.4f}{row['perplexity']:>12.4g}"
        print(f"{printable(row['model']):{width}}{numbers}{row['bits_per_byte']:>11.4f}")
    if not same_text:
        print("the models read different texts: no number here can be compared")
    elif not same_tokenizer:
        print("the tokenizers differ: compare only bits per byte")
    for row in rows:
        print(f"\n{printable(row['model'])}, the most surprising tokens (of {row['tokens']:,}):")
        show_cut(surprising(row["pieces"], row["surprise"]))
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            print("\nthe text, coloured by the surprise of its tokens:")
            print(coloured(row["pieces"], row["surprise"]))
    print("\n--jsonl prints the surprise of every token\n")


def surprising(texts, nats, count=20):
    """Lines for the most surprising tokens: nats, the line, and the token within its context."""
    text = "".join(texts)
    ends = list(itertools.accumulate(map(len, texts)))
    lines = [f"{'nats':>6}{'line':>7}"]
    for i in sorted(range(len(nats)), key=lambda i: -nats[i])[:count]:
        end = ends[i]
        start = end - len(texts[i])
        before = clean(text[max(0, start - 24) : start])
        token = clean(texts[i])
        after = clean(text[end : end + 24])
        number = text.count("\n", 0, start) + 1
        lines.append(f"{nats[i]:6.2f}{number:>7}  {before:>24}[{token}]{after}")
    return lines


def paint(text, colour):
    """Each line of a text in a colour of LEVELS."""
    if not colour:
        return text
    return "\n".join(line and f"\033[{colour}m{line}\033[0m" for line in text.split("\n"))


def coloured(texts, nats):
    """The texts of tokens, each coloured by its surprise, with a legend."""
    text = ""
    for piece, value in zip(texts[:SHOWN], nats, strict=False):
        colour = next(colour for limit, colour in LEVELS if value < limit or limit == math.inf)
        shown = printable(piece.replace("\t", "    ").replace("\n", "↵\n"), keep="\n")
        text += paint(shown, colour)
    legend = "nats:"
    for (low, _), (high, colour) in itertools.pairwise([(0, ""), *LEVELS]):
        to = f"to {high:g}" if high < math.inf else "or more"
        legend += " " + paint(f" {low:g} {to} ", colour)
    left_out = f"\nthe first {SHOWN:,} of {len(texts):,} tokens" if len(texts) > SHOWN else ""
    return text.rstrip("\n") + "\n" + legend + left_out


def clean(text):
    """A text of a model on one line of a terminal."""
    return printable(text.replace("\t", "    ").replace("\n", "↵"))


def read(argv):
    """(ScoreConfig, SampleConfig, names of the models) of a command line."""
    given = load(argv, [ScoreConfig, SampleConfig], __doc__)
    names = given.words
    if not names:
        raise UserError("name a model", "command line", "python -m extras.score RUN --text=FILE")
    others = ["start", "prompts", "chat", "num_samples", "show_probs", "compile"]
    refuse_idle(given.typed, NAMING + DRAWN + others)
    return build(ScoreConfig, given.values), build(SampleConfig, given.values), names


def main(argv):
    settings, config, names = read(argv)
    text = read_text(settings.text, "text", "check the path after --text=")
    device, dtype = choose_device(config)
    rows = []
    tokenizers = set()
    texts = set()  # as each model can read the text
    for name in names:
        model, tokenizer, what = open_weights(name, config.checkpoint, device)
        note(what)
        check_context(model, config.context)
        model = make_fast(model, dtype)
        readable = fit(tokenizer, text, settings.text, config.skip_unknown)
        score = score_text(model, tokenizer, readable, config.context, settings.text)
        rows.append({"model": name, "text": settings.text} | score)
        texts.add(readable)
        tokenizers.add(json.dumps(tokenizer.to_json(), sort_keys=True))
    if config.jsonl:
        print("\n".join(map(json.dumps, rows)))
    else:
        print_scores(rows, len(tokenizers) == 1, len(texts) == 1)


if __name__ == "__main__":
    run(main)
