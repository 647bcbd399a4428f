"""
Writing a split of a data set: text or ids in, a token file as corpus.py reads it out, without holding the text.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from common.errors import Failure, UserError
from common.files import sha256_of
from tokens.tokenizer import BPETokenizer, tokenizer_from_json


def safe_cut(text):
    """The last place where BPE gives the same tokens for the two sides as for the whole: before white space that
    follows a letter or digit, or between a line's end and a letter. No piece of GPT-2's pattern, or of those after it,
    reaches across, and none is told apart by what comes after. 0 if there is none."""
    for at in range(len(text) - 1, 1, -1):
        before, last, first = text[at - 2 : at + 1]
        if (
            first.isspace()
            and last.isalnum()
            or first.isalpha()
            and last == "\n"
            and not before.isspace()
        ):
            return at
    return 0


class TokenFile:
    """A split being written: text or ids go in, and are counted and hashed on the way."""

    def __init__(self, path, tokenizer):
        self.file, self.tokenizer, self.rest = open(path, "wb"), tokenizer, ""
        self.dtype = "uint16" if tokenizer.vocab_size <= 65535 else "uint32"
        self.tokens, self.bytes, self.sha256 = 0, 0, hashlib.sha256()

    def add_text(self, text, last=False):
        text = self.rest + text
        cut = safe_cut(text) if isinstance(self.tokenizer, BPETokenizer) and not last else len(text)
        self.rest, text = text[cut:], text[:cut]
        self.add(self.tokenizer.encode(text), len(text.encode()))

    def add(self, ids, n_bytes):
        data = np.asarray(ids).astype(np.dtype(self.dtype).newbyteorder("<")).tobytes()
        self.file.write(data)
        self.sha256.update(data)
        self.tokens, self.bytes = self.tokens + len(ids), self.bytes + n_bytes

    def close(self):
        """What meta.json says of the split."""
        self.add_text("", last=True)
        self.file.close()
        return {"tokens": self.tokens, "bytes": self.bytes, "sha256": self.sha256.hexdigest()}


KNOWN = (
    "shakespeare_char",
    "shakespeare",
    "openwebtext",
)  # the sets that prepare.py makes without --input
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
        counts = [
            meta["vocab_size"],
            *(
                meta["splits"][split][key]
                for split in ("train", "val")
                for key in ("tokens", "bytes")
            ),
        ]
        if not all(type(count) is int and count > 0 for count in counts) or meta["dtype"] not in (
            "uint16",
            "uint32",
        ):
            raise ValueError("a count or the dtype makes no sense")
        fingerprint(meta)
    except (
        ValueError,
        KeyError,
        TypeError,
    ) as error:  # not JSON, not utf-8, an entry missing or of another kind
        raise UserError(
            f"meta.json is garbled: {type(error).__name__} {error}", path, prepare_command(folder)
        ) from None
    return meta


def load_tokenizer(folder, meta):
    """The tokenizer of a data set; UserError if it is not there or not that of meta.json."""
    path = Path(folder) / "tokenizer.json"
    try:
        tokenizer = tokenizer_from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise UserError(
            "the tokenizer is missing or garbled", path, prepare_command(Path(folder))
        ) from None
    if tokenizer.vocab_size != meta["vocab_size"]:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens where meta.json says {meta['vocab_size']}",
            path,
            prepare_command(Path(folder)),
        )
    return tokenizer


def load_split(folder, split, block_size):
    """The token ids of a split, (N,) and read-only, left on disk; UserError unless they are whole, fit
    the vocabulary and are more than block_size."""
    folder = Path(folder)
    meta = load_meta(folder)
    path, fix, expected = (
        folder / f"{split}.bin",
        prepare_command(folder),
        meta["splits"][split]["tokens"],
    )
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    if not path.is_file():
        raise UserError(f"the {split} split is missing", path, fix)
    size = path.stat().st_size
    if size == 0:
        raise UserError("the token file is empty", path, fix)
    if size % dtype.itemsize:
        raise UserError(
            f"the token file's {size:,} bytes are no whole number of {meta['dtype']} tokens",
            path,
            fix,
        )
    if size // dtype.itemsize != expected:
        raise UserError(
            f"the token file holds {size // dtype.itemsize:,} tokens where meta.json says {expected:,}",
            path,
            fix,
        )
    if expected <= block_size:
        raise UserError(
            f"the {split} split has {expected:,} tokens and block_size={block_size:,} needs more",
            path,
            "choose a smaller block_size or a longer text",
        )
    tokens, piece = np.memmap(path, dtype, "r"), 1 << 20
    for start in (
        range(0, expected, piece)
        if expected <= FULL_SCAN
        else np.linspace(0, expected - piece, 100, dtype=int)
    ):
        wrong = tokens[start : start + piece] >= meta["vocab_size"]
        if wrong.any():
            at = int(start + wrong.argmax())
            raise UserError(
                f"token id {tokens[at]} at position {at:,} is beyond vocab_size={meta['vocab_size']:,}",
                path,
                fix,
            )
    if (
        expected <= FULL_SCAN
        and hashlib.sha256(tokens).hexdigest() != meta["splits"][split]["sha256"]
    ):
        raise UserError(
            "the tokens are not those that were prepared: their sha256 differs from meta.json's",
            path,
            fix,
        )
    return tokens


def check_length(tokens):
    """Raise Failure if the file behind the token ids of `load_split` is shorter than when it was opened.
    Reading ids that are no longer in the file would end the process by SIGBUS, without a message.

    The file is asked, not its path: preparing the data again replaces the folder and disturbs no run."""
    if not isinstance(tokens, np.memmap):
        return  # in memory
    size = tokens.base.size()  # bytes in the open file now
    if size < tokens.nbytes:
        raise Failure(
            f"the token file shrank from {tokens.nbytes:,} to {size:,} bytes while it was read",
            tokens.filename,
            "prepare the data again, then go on from the last checkpoint with --init_from=resume",
        )


def load_mask(folder, split):
    """(N,) uint8, 1 where the loss of a token counts when it is a target; None for a set without a mask: there all count."""
    folder = Path(folder)
    expected = load_meta(folder)["splits"][split].get("mask_sha256")
    if expected is None:
        return None
    path = folder / f"{split}.mask.bin"
    if not path.is_file() or sha256_of(path) != expected:
        raise UserError(
            "the mask is missing, or not the one that was prepared", path, prepare_command(folder)
        )
    return np.fromfile(path, np.uint8)


def fingerprint(meta):
    """A short text that changes when the tokens or their meaning do: checkpoints keep it."""
    told = [
        meta["tokenizer"],
        meta["vocab_size"],
        meta["source_sha256"],
        meta["splits"]["train"]["sha256"],
        meta["splits"]["val"]["sha256"],
    ]
    told += [
        meta["splits"][split]["mask_sha256"]
        for split in ("train", "val")
        if "mask_sha256" in meta["splits"][split]
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
