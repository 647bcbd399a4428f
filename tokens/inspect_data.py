"""
Looking at datasets: `prepare.py --list`, and `--inspect NAME`, which prints counts, the first
documents, the most frequent tokens, and how much of one split occurs in another.

Overlap is measured by 50 tokens in a row, which are hashed. Memory is bounded: of a split that is
looked for, at most SOUGHT such rows are taken, from blocks all over it; of one that is searched, at
most SEARCHED tokens are read, and the share that is found is then a lower bound.
"""

import os
import textwrap
from pathlib import Path

import numpy as np

from common.errors import UserError
from tokens.named import NAMED
from tokens.token_files import KNOWN, is_prepared, load_meta, load_split, load_tokenizer

LENGTH = 50  # tokens in a row
BLOCK = 1 << 17  # tokens read at a time
SOUGHT = 8 * BLOCK
SEARCHED = 1000 * BLOCK
COUNTED = 20_000_000  # tokens whose frequencies are counted
SHOWN = 300  # characters of a document that are printed
ABOUT = {
    "shakespeare_char": "Shakespeare, 1.1 MB",
    "shakespeare": "Shakespeare, 1.1 MB",
    "openwebtext": "web pages, 38 GB",
}
WIDTH = 80  # cells


# ---------------------------------------------------------------- the list


def short(count):
    """A count in at most four characters, such as 4.3M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            number = count / size
            return f"{number:.0f}{unit}" if number >= 9.95 else f"{number:.1f}{unit}"
    return str(count)


def on_disk(folder):
    """The bytes of all files in a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def list_row(name, folder):
    """(name, text, tokenizer, tokens of the splits, size on disk) of a dataset."""
    about = NAMED[name].about if name in NAMED else ABOUT.get(name, "")
    if not is_prepared(folder):
        return name, about, "", "not prepared", ""
    try:
        meta = load_meta(folder)
    except UserError:
        return name, about, "", "damaged", short(on_disk(folder))
    tokens = "/".join(short(entry["tokens"]) for entry in meta["splits"].values())
    about = about or os.path.basename(str(meta.get("source", "")))
    tokenizer = f"{meta['tokenizer']} {meta['vocab_size']:,}"
    return name, about, tokenizer, tokens, short(on_disk(folder))


def print_list(data_dir):
    """Print the datasets that are known by name, and those in data_dir."""
    folder = Path(data_dir)
    prepared = [path.name for path in sorted(folder.glob("*")) if is_prepared(path)]
    names = [*KNOWN, *(name for name in prepared if name not in KNOWN)]
    rows = [list_row(name, folder / name) for name in names]
    print_table(("dataset", "text", "tokenizer", "train/val/test", "bytes"), rows)
    print("prepare one with `python prepare.py NAME`, yours with --input=TEXT")


def print_table(titles, rows, numbers=()):
    """Print a table within WIDTH cells; the columns in `numbers` are aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, title in enumerate(titles):
        table.add_column(title, justify="right" if at in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(highlight=False)
    console.width = min(console.width, WIDTH)
    console.print(table)


# ---------------------------------------------------------------- one dataset


def print_inspection(folder):
    """Print what is in a dataset. Raises UserError if it is not prepared."""
    folder = Path(folder)
    meta = load_meta(folder)
    tokenizer = load_tokenizer(folder, meta)
    splits = {split: load_split(folder, split, 1) for split in meta["splits"]}

    print(f"{folder}: {meta['vocab_size']:,} tokens ({meta['tokenizer']}), {meta.get('source')}")
    rows = []
    for split, entry in meta["splits"].items():
        units = entry.get("documents", entry.get("pairs"))
        counts = ("" if units is None else f"{units:,}", f"{entry['tokens']:,}")
        each = f"{entry['bytes'] / entry['tokens']:.3f}"
        rows.append((split, *counts, f"{entry['bytes']:,}", each))
    titles = ("split", "documents", "tokens", "bytes", "bytes per token")
    print_table(titles, rows, numbers=(1, 2, 3, 4))

    for text in first_documents(splits["train"], tokenizer):
        indents = dict(initial_indent="- ", subsequent_indent="  ")
        print(textwrap.fill(repr(text), WIDTH, **indents))
    total, counts = frequencies(splits["train"], meta["vocab_size"])
    sampled = "" if total == len(splits["train"]) else f" in {total:,} tokens of it"
    print(f"the most frequent tokens of train{sampled}:")
    print_table(("token", "share") * 4, frequent_rows(counts, total, tokenizer), (1, 3, 5, 7))
    print_overlaps(splits, meta["vocab_size"])


def first_documents(tokens, tokenizer, count=3):
    """The beginnings of the first documents, if the vocabulary has a token that ends them; else
    the beginning of the text."""
    head = np.asarray(tokens[: 50 * SHOWN])
    ends = getattr(tokenizer, "encoding", None)
    end = ends._special_tokens.get("<|endoftext|>") if ends else None
    starts = [0]
    if end is not None:
        starts += (np.flatnonzero(head == end)[: count - 1] + 1).tolist()
    stops = [start - 1 for start in starts[1:]] + [len(head)]
    texts = [tokenizer.decode(head[a:b][:SHOWN]) for a, b in zip(starts, stops, strict=True)]
    return [text[:SHOWN] for text in texts if text]


def frequencies(tokens, vocab_size):
    """(tokens counted, (vocab_size,) counts) of at most about COUNTED tokens from all over."""
    total, counts = 0, np.zeros(vocab_size, np.int64)
    for block in blocks(tokens, COUNTED, 0):
        counts += np.bincount(block, minlength=vocab_size)
        total += len(block)
    return total, counts


def frequent_rows(counts, total, tokenizer, lines=5, columns=4):
    """Rows of (token, share) pairs of the most frequent tokens, which go down the columns."""
    order = np.argsort(-counts, kind="stable")[: lines * columns]
    cells = [(repr(tokenizer.decode([i])), f"{counts[i] / total:.2%}") for i in order if counts[i]]
    cells += [("", "")] * (lines * columns - len(cells))
    pairs = [[cells[at] for at in range(line, len(cells), lines)] for line in range(lines)]
    return [[word for cell in row for word in cell] for row in pairs]


# ---------------------------------------------------------------- overlap


def blocks(tokens, limit, overlap):
    """Yield blocks of about BLOCK tokens from all over a split, at most about `limit` in all, as
    int64. A block begins with the last `overlap` tokens of the one before it."""
    count = -(-len(tokens) // BLOCK)
    chosen = min(count, max(1, limit // BLOCK))
    for number in np.unique(np.linspace(0, count - 1, chosen).astype(int)):
        start = max(number * BLOCK - overlap, 0)
        yield np.asarray(tokens[start : (number + 1) * BLOCK]).astype(np.int64)


def hashes(block, codes):
    """(N - LENGTH + 1,) uint64 hashes of all rows of LENGTH tokens in a block (N,).

    A polynomial modulo 2^64 in an odd number, so that the hash of a row is a difference of two
    prefix sums, divided by a power. `codes` gives each token 64 random bits."""
    if len(block) < LENGTH:
        return np.zeros(0, np.uint64)
    base = 0x9E3779B97F4A7C15
    inverse = np.uint64(pow(base, -1, 2**64))
    powers = np.full(len(block), np.uint64(base))
    powers[0] = 1
    powers = np.cumprod(powers, dtype=np.uint64)
    down = np.full(len(block) - LENGTH + 1, inverse)
    down[0] = 1
    sums = np.zeros(len(block) + 1, np.uint64)
    np.cumsum(codes[block] * powers, dtype=np.uint64, out=sums[1:])
    return (sums[LENGTH:] - sums[:-LENGTH]) * np.cumprod(down, dtype=np.uint64)


def overlap(sought, searched, vocab_size):
    """(share of the rows of LENGTH tokens of `sought` that occur in `searched`, number of rows
    looked for, whether all of `searched` was read)."""
    codes = np.random.default_rng(0).integers(0, 2**64, vocab_size, np.uint64)
    rows = np.concatenate([hashes(block, codes) for block in blocks(sought, SOUGHT, LENGTH - 1)])
    known = np.unique(rows)
    if not len(known):
        return 0.0, 0, True

    found, read = np.zeros(len(known), bool), 0
    shift = np.uint64(64 - 24)
    possible = np.zeros(1 << 24, bool)  # by the first 24 bits, since most rows are not found
    possible[known >> shift] = True
    for block in blocks(searched, SEARCHED, LENGTH - 1):
        read += 1
        seen = hashes(block, codes)
        seen = seen[possible[seen >> shift]]
        at = np.searchsorted(known, seen).clip(max=len(known) - 1)
        found[at[known[at] == seen]] = True
    share = found[np.searchsorted(known, rows)].mean()
    return float(share), len(rows), read == -(-len(searched) // BLOCK)


def print_overlaps(splits, vocab_size):
    """Print how much of each split that is held out occurs in another."""
    print(f"overlap, by {LENGTH} tokens in a row:")
    for sought, searched in (("val", "train"), ("test", "train"), ("test", "val")):
        if sought not in splits:
            continue
        share, rows, whole = overlap(splits[sought], splits[searched], vocab_size)
        at_least = "" if whole else f"at least (a sample of {SEARCHED:,} tokens was read) "
        print(f"  {sought} in {searched}: {at_least}{share:.3%} of {rows:,} places")
