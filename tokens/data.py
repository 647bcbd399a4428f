"""The data of a run: one dataset, its tokenizer, and its splits."""

import math
from pathlib import Path

import numpy as np

from common.errors import UserError
from tokens import token_files
from tokens.batches import Text
from tokens.pairs import Pairs


class Dataset:
    """A dataset of a run. Its splits are opened when the model's block_size is known.

    splits: {"train", "val": Text or Pairs}. batches: the training samples in their order.
    bits_per_byte: the factor from nats per token of the validation split to bits per byte."""

    def __init__(self, data_dir, name):
        self.name = name
        self.folder = Path(data_dir) / name
        self.meta = token_files.load_meta(self.folder)
        self.tokenizer = token_files.load_tokenizer(self.folder, self.meta)
        self.vocab_size = self.meta["vocab_size"]
        self.fingerprint = token_files.fingerprint(self.meta)

    def open(self, block_size, seed, eval_tokens=0):
        """Open the splits. `seed` is of the order of the samples, `eval_tokens` the number of
        tokens that an evaluation scores (0: all). Raises UserError for files that are incomplete
        or too short."""
        self.splits = {name: self.open_split(name, block_size) for name in ("train", "val")}
        self.batches = self.splits["train"].batches(seed)
        self.bits_per_byte = bits_per_byte(self.splits["val"], self.tokenizer, eval_tokens)

    def open_split(self, split, block_size):
        """The Text or Pairs of a split."""
        return open_split(self.folder, split, block_size)

    def description(self):
        """The sizes of the dataset, as lines of text."""
        train = self.splits["train"]
        val = self.splits["val"]
        counts = f"{len(train):,} tokens to train on, {len(val):,} to validate"
        lines = [f"data {self.name}: {counts}, vocabulary {self.vocab_size}"]
        if isinstance(train, Pairs):
            lines.append(pairs_text(train, val))
        return lines

    def times_read(self, samples):
        """How often a number of samples go through the training split."""
        return samples / self.batches.windows_per_epoch

    def epochs(self, samples):
        """times_read as text: "1.66 epochs"."""
        return f"{self.times_read(samples):.2f} epochs"


def open_split(folder, split, block_size):
    """The Text or Pairs of a split. Raises UserError if it holds nothing to learn within
    block_size, or preferences."""
    meta = token_files.load_meta(folder)
    if "mask_sha256" not in meta["splits"].get(split, {}):
        least = 1 if split == "test" else block_size  # a test split is scored, not trained on
        return Text(token_files.load_split(folder, split, least), block_size)
    if "preferences" in meta["splits"][split]:
        what = "this dataset holds preferences"
        fix = "give the same arguments to python -m extras.preferences"
        raise UserError(what, folder, fix)
    return open_pairs(folder, split, block_size, Pairs)


def open_pairs(folder, split, block_size, kind):
    """The pairs of a split as a `kind`: Pairs, or a class that is made from the same."""
    mask = token_files.load_mask(folder, split)
    pairs = kind(token_files.load_split(folder, split, 0), mask, block_size)
    if not len(pairs.starts):
        what = f"all answers of the {split} split begin beyond block_size={block_size:,}"
        raise UserError(what, folder, "choose a larger block_size, or shorter prompts")
    return pairs


def pairs_text(train, val):
    """The numbers of pairs, or preferences, of two splits, and of those that block_size leaves out
    or cuts."""
    each = train.answers_each
    counts = f"{len(train.starts) // each:,} {train.unit} to train on"
    text = f"  {counts}, {len(val.starts) // each:,} to validate"
    left_out = (train.left_out + val.left_out) // each
    if left_out:
        text += f"; {left_out:,} more left out: their answers begin beyond block_size"
    cut = train.cut + val.cut
    if cut:
        text += f"; {cut:,} answers cut there"
    return text


def bits_per_byte(split, tokenizer, limit):
    """The factor from nats per scored token to bits per byte, over the `limit` tokens of a
    split that an evaluation scores (0: all). For pairs, only the bytes of the answers count. If
    none does, 1 is taken, since JSON has no infinity."""
    targets, ids = split.scored(limit)
    piece = token_files.PIECE
    parts = (ids[start : start + piece] for start in range(0, len(ids), piece))
    n_bytes = sum(text_bytes(tokenizer, part) for part in parts)
    return targets / max(1, n_bytes) / math.log(2)


def same_tokens(a, b):
    """Whether each id means the same for two tokenizers. One may be stored in another form."""
    if a.to_json() == b.to_json():
        return True
    return a.vocab_size == b.vocab_size and decode_alike(a, b, a.vocab_size)


def decode_alike(a, b, count):
    """Whether two tokenizers decode each of the first `count` ids to the same text."""
    return all(a.decode([i]) == b.decode([i]) for i in range(count))


def text_bytes(tokenizer, ids):
    """The bytes of the text of token ids (N,), without those that begin or end a document."""
    return len(tokenizer.decode_bytes(ids[~np.isin(ids, tokenizer.marks)]))
