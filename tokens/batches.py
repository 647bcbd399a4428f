"""
Token files, and the order of the batches.

A data set is a folder that prepare.py makes:

    train.bin val.bin   token ids, raw little-endian uint16 (uint32 if the vocabulary needs it)
    train.mask.bin val.mask.bin   of prompt/answer pairs (pairs.py) only: uint8, 1 where the loss of a token counts
    meta.json           vocab_size, dtype, tokens and bytes of each split, sha256 of the source
    tokenizer.json      the tokenizer in full: whoever has it needs no network and no cache
"""
import hashlib
import json
from pathlib import Path

import numpy as np

from common.errors import UserError
from tokens.tokenizer import tokenizer_from_json

KNOWN = ("shakespeare_char", "shakespeare", "openwebtext")  # the sets that prepare.py makes without --input
FULL_SCAN = 100_000_000  # tokens; beyond, ids are checked at the ends and in a sample


def prepare_command(folder):
    """What to type to make the data set in this folder."""
    where = "" if folder.parent == Path("data") else f" --data_dir={folder.parent}"
    return f"run `python prepare.py {folder.name}{'' if folder.name in KNOWN else ' --input=TEXTFILE'}{where}`"


def load_meta(folder):
    """meta.json of a data set as a dictionary; UserError if it is not there or not whole. A meta.pkl, as
    other programs leave it, is never read."""
    folder = Path(folder)
    path = folder / "meta.json"
    if not path.is_file():
        what = "no data set here" if not folder.is_dir() else "the data set has no meta.json"
        raise UserError(what, folder, prepare_command(folder))
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        counts = [meta["vocab_size"], *(meta["splits"][split][key] for split in ("train", "val") for key in ("tokens", "bytes"))]
        if not all(type(count) is int and count > 0 for count in counts) or meta["dtype"] not in ("uint16", "uint32"):
            raise ValueError("a count or the dtype makes no sense")
        fingerprint(meta)
    except (ValueError, KeyError, TypeError) as error:  # not JSON, not utf-8, an entry missing or of another kind
        raise UserError(f"meta.json is garbled: {type(error).__name__} {error}", path, prepare_command(folder)) from None
    return meta


def load_tokenizer(folder, meta):
    """The tokenizer of a data set; UserError if it is not there or not that of meta.json."""
    path = Path(folder) / "tokenizer.json"
    try:
        tokenizer = tokenizer_from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise UserError("the tokenizer is missing or garbled", path, prepare_command(Path(folder))) from None
    if tokenizer.vocab_size != meta["vocab_size"]:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} tokens where meta.json says {meta['vocab_size']}", path, prepare_command(Path(folder)))
    return tokenizer


def load_split(folder, split, block_size):
    """The token ids of a split, (N,) and read-only, left on disk; UserError unless they are whole, fit
    the vocabulary and are more than block_size."""
    folder = Path(folder)
    meta = load_meta(folder)
    path, fix, expected = folder / f"{split}.bin", prepare_command(folder), meta["splits"][split]["tokens"]
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    if not path.is_file():
        raise UserError(f"the {split} split is missing", path, fix)
    size = path.stat().st_size
    if size == 0:
        raise UserError("the token file is empty", path, fix)
    if size % dtype.itemsize:
        raise UserError(f"the token file's {size:,} bytes are no whole number of {meta['dtype']} tokens", path, fix)
    if size // dtype.itemsize != expected:
        raise UserError(f"the token file holds {size // dtype.itemsize:,} tokens where meta.json says {expected:,}", path, fix)
    if expected <= block_size:
        raise UserError(f"the {split} split has {expected:,} tokens and block_size={block_size:,} needs more", path, "choose a smaller block_size or a longer text")
    tokens, piece = np.memmap(path, dtype, "r"), 1 << 20
    for start in range(0, expected, piece) if expected <= FULL_SCAN else np.linspace(0, expected - piece, 100, dtype=int):
        wrong = tokens[start : start + piece] >= meta["vocab_size"]
        if wrong.any():
            at = int(start + wrong.argmax())
            raise UserError(f"token id {tokens[at]} at position {at:,} is beyond vocab_size={meta['vocab_size']:,}", path, fix)
    if expected <= FULL_SCAN and hashlib.sha256(tokens).hexdigest() != meta["splits"][split]["sha256"]:
        raise UserError("the tokens are not those that were prepared: their sha256 differs from meta.json's", path, fix)
    return tokens


def load_mask(folder, split):
    """(N,) uint8, 1 where the loss of a token counts when it is a target; None for a set without a mask: there all count."""
    folder = Path(folder)
    expected = load_meta(folder)["splits"][split].get("mask_sha256")
    if expected is None:
        return None
    path = folder / f"{split}.mask.bin"
    if not path.is_file() or sha256_of(path) != expected:
        raise UserError("the mask is missing, or not the one that was prepared", path, prepare_command(folder))
    return np.fromfile(path, np.uint8)


def fingerprint(meta):
    """A short text that changes when the tokens or their meaning do: checkpoints keep it."""
    told = [meta["tokenizer"], meta["vocab_size"], meta["source_sha256"], meta["splits"]["train"]["sha256"], meta["splits"]["val"]["sha256"]]
    told += [meta["splits"][split]["mask_sha256"] for split in ("train", "val") if "mask_sha256" in meta["splits"][split]]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def visits(order, size, first, count):
    """Entries first .. first + count - 1 of order(0), order(1), ... written one after the other, each of `size` entries."""
    found = []
    while count > 0:
        epoch, k = divmod(first, size)
        found.append(order(epoch)[k : k + count])
        first, count = first + len(found[-1]), count - len(found[-1])
    return np.concatenate(found)


class Batches:
    """The training samples in one endless global order, a pure function of (tokens, block_size, seed).

    An epoch cuts the N tokens into (N - block_size) // block_size windows from a fresh offset, so that
    a token's position in its window is no fixed property of the text, and visits each once in a fresh
    order. Steps, micro-batches and ranks take slices of the order: nothing has to be stored to resume."""

    def __init__(self, tokens, block_size, seed):
        if len(tokens) <= block_size:
            raise ValueError(f"{len(tokens)} tokens are too few for block_size={block_size}")
        # every window of block_size + 1 tokens, as a view: (N - block_size, block_size + 1)
        self.windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), block_size + 1)
        self.block_size, self.seed = block_size, seed
        self.masked = False  # whether the loss of some targets does not count
        self.windows_per_epoch = max(1, (len(tokens) - block_size) // block_size)
        self.epochs = {}  # the window starts of the last two epochs asked for

    def starts(self, epoch):
        """(windows_per_epoch,) where the windows of an epoch start, in the order of the visits."""
        if epoch not in self.epochs:
            random = np.random.default_rng([self.seed, epoch])
            offset = random.integers(len(self.windows) - (self.windows_per_epoch - 1) * self.block_size)
            starts = offset + self.block_size * random.permutation(self.windows_per_epoch)
            self.epochs = dict([*self.epochs.items()][-1:]) | {epoch: starts}
        return self.epochs[epoch]

    def get(self, first, count):
        """Samples first .. first + count - 1: x and its successors y, both (count, block_size) int64."""
        windows = self.windows[visits(self.starts, self.windows_per_epoch, first, count)]  # (count, block_size + 1)
        return windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)


class Text:
    """A split of running text: N token ids, read in windows of block_size."""

    def __init__(self, tokens, block_size):
        self.tokens, self.block_size = tokens, block_size

    def __len__(self):
        return len(self.tokens)

    @property
    def learned(self):
        """The ids whose loss counts, as targets."""
        return self.tokens

    def batches(self, seed):
        """The samples of the split in their endless order."""
        return Batches(self.tokens, self.block_size, seed)

    def eval_batches(self, batch_size, limit=None):
        """Yield (x, y), (batch_size, block_size) int64, such that each of the first `limit` tokens (None or
        0: all) after the very first is a target exactly once. Windows do not overlap; all batches have the
        same shape, so that a compiled model sees one: beyond the end x is 0 and y is -1."""
        last, size = min(limit or len(self.tokens), len(self.tokens)) - 1, batch_size * self.block_size  # the number of targets
        for start in range(0, last, size):
            part = np.asarray(self.tokens[start : min(start + size, last) + 1]).astype(np.int64)
            x, y = np.zeros(size, np.int64), np.full(size, -1)
            x[: len(part) - 1], y[: len(part) - 1] = part[:-1], part[1:]
            yield x.reshape(batch_size, self.block_size), y.reshape(batch_size, self.block_size)

    def scored(self, limit=None):
        """(number of targets, their ids) of what eval_batches yields."""
        told = self.tokens[1 : limit or None]
        return len(told), told
