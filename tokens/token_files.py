"""
Writing and reading a dataset on disk. It is a folder that prepare.py makes:

    train.bin, val.bin, test.bin   token ids, little-endian uint16, or uint32 if that is too small;
                                   not every dataset has a test split (docs/data.md)
    train.mask.bin, ...            only of prompts with answers (pairs.py): uint8, 1 for a target
    meta.json                      vocab_size, dtype; tokens, bytes and sha256 of each split
    tokenizer.json                 the whole tokenizer, so that no network and no cache is needed
"""

import contextlib
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import numpy as np

from common import files
from common.commands import quoted
from common.errors import Failure, StopSignals, UserError, folded, nearest
from tokens.tokenizer import refuse_old_form, tokenizer_from_json

SPLITS = ("train", "val")  # of every dataset; most have a split named test too
# Ours only beside a meta.json: other programs write some of these names too.
FILES = ("train.bin", "val.bin", "tokenizer.json", "meta.json", "train.mask.bin", "val.mask.bin")
TEST_FILES = ("test.bin", "test.mask.bin")  # ours only if meta.json describes a test split
NEEDED = ("tokens", "bytes")  # of a split
COUNTS = (*NEEDED, "documents", "pairs", "longest", "preferences")
FULL_SCAN = 100_000_000  # tokens; a longer split is checked only at its ends and in a sample
PIECE = 1 << 20  # tokens checked at a time
TASK = "task:"  # how the name of a dataset of extras/tasks.py begins


# ---------------------------------------------------------------- writing


def dtype_name(vocab_size):
    """The smallest of uint16 and uint32 that holds the ids of a vocabulary."""
    return "uint16" if vocab_size <= 65536 else "uint32"


def stored_dtype(name):
    """The numpy dtype of a token file, little-endian on every machine."""
    return np.dtype(name).newbyteorder("<")


class TokenFile:
    """A split that is being written. masked: its mask is, too."""

    def __init__(self, path, vocab_size, masked=False):
        self.file = open(path, "wb")  # noqa: SIM115 (closed by close)
        self.mask = None
        if masked:
            self.mask = open(path.with_suffix(".mask.bin"), "wb")  # noqa: SIM115
        self.dtype = stored_dtype(dtype_name(vocab_size))
        self.sha256 = hashlib.sha256()
        self.mask_sha256 = hashlib.sha256()
        self.tokens = 0
        self.bytes = 0
        self.pieces = 0  # calls of `add`: documents, pairs, or parts of one text
        self.longest = 0  # tokens of the longest piece

    def add(self, ids, n_bytes, mask=b""):
        """Write the ids of a piece of text of `n_bytes` bytes. With `masked`, the piece is a whole
        pair, and `mask` has one byte per id."""
        data = np.asarray(ids).astype(self.dtype).tobytes()
        self.file.write(data)
        self.sha256.update(data)
        self.tokens += len(ids)
        self.bytes += n_bytes
        self.pieces += 1
        self.longest = max(self.longest, len(ids))
        if self.mask:
            self.mask.write(mask)
            self.mask_sha256.update(mask)

    def close(self):
        """Finish the files and return the entry of the split in meta.json."""
        self.file.close()
        entry = {"tokens": self.tokens, "bytes": self.bytes, "sha256": self.sha256.hexdigest()}
        if self.mask:
            self.mask.close()
            entry["mask_sha256"] = self.mask_sha256.hexdigest()
            entry["pairs"] = self.pieces
            entry["longest"] = self.longest
        return entry


def make_meta(name, kind, tokenizer, splits, source, sha256):
    """meta.json as a dictionary. kind: the kind of the tokenizer. splits: {split: what
    TokenFile.close returns}. source: where the text comes from. sha256: of the text."""
    return {
        "name": name,
        "tokenizer": kind,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype_name(tokenizer.vocab_size),
        "splits": splits,
        "source": source,
        "source_sha256": sha256,
    }


def write_meta(folder, meta, tokenizer):
    """Write meta.json and tokenizer.json."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_json()), encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- the folder as a whole


def folder_of(data_dir, name):
    """The folder of a dataset; behind a link, if the user keeps it on another disk."""
    folder = Path(data_dir, name)
    return folder.resolve() if os.path.islink(folder) else folder


@contextlib.contextmanager
def replaced(folder):
    """`with replaced(folder) as new:` gives an empty folder to write a dataset into. It takes the
    place of `folder` at the end, or is removed if anything is raised. Raises Failure if the disk is
    full, and after a signal, with the exit status 128 + its number."""
    with StopSignals() as stops:
        complete = False
        try:
            with only_process(folder):
                yield from replacing(folder, stops)
                complete = True
        except BaseException:  # KeyboardInterrupt, or what a library makes of it
            if stops.number is None:
                raise
        if stops.number is not None:
            fix = "the dataset is complete" if complete else "run the same command again"
            stopped = Failure(f"stopped by {signal.Signals(stops.number).name}", folder, fix)
            stopped.status = 128 + stops.number
            raise stopped


def replacing(folder, stops):
    """Do what `replaced` does, for the only process that prepares this dataset."""
    stops.wait()
    recover(folder)
    before = known_meta(folder)
    new = files.partial(folder)
    try:
        stops.at_once()
        new.mkdir()
        yield new
        stops.wait()
        publish(new, folder)
    except OSError as error:
        if error.errno not in files.NO_SPACE:
            raise
        raise Failure(f"cannot write: {error.strerror}", folder, "free the disk") from None
    finally:
        stops.wait()
        recover(folder)
    if before and fingerprint(before) != fingerprint(load_meta(folder)):
        what = f"this replaced the dataset made from {before.get('source')}, which had other tokens"
        more = "its runs resume with --allow_data_change, if token ids still mean the same"
        print(folded(f"  NOTE: {what}: {more}; another name keeps both"))


def known_meta(folder):
    """The content of meta.json, {} if there is no dataset, or a damaged one."""
    try:
        return load_meta(folder)
    except UserError:
        return {}


@contextlib.contextmanager
def only_process(folder):
    """Wait until no other process prepares this dataset, then keep the others waiting. The holder
    removes the lock file when it is done, so a lock on a removed file is taken anew."""
    path = folder.with_name(f".{folder.name}.lock")
    lock = None
    while lock is None or not os.fstat(lock.fileno()).st_nlink:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = files.lock(path)
        except BlockingIOError:
            files.warn_once(f"another process prepares this dataset: waiting ({path})")
            time.sleep(0.1)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            what = f"the data cannot be written: {getattr(error, 'strerror', None) or error}"
            raise UserError(what, path, "choose another --data_dir") from None
    try:
        yield
    finally:
        files.remove(path)
        lock.close()


def publish(new, folder):
    """Replace `folder` by the complete dataset `new`. If this is killed at any moment, one of the
    two is complete. `recover` must be called afterwards."""
    for path in [*new.iterdir(), new]:
        files.sync(path)
    if folder.exists():
        folder.rename(files.partial(f"{folder}.old"))
    new.rename(folder)
    files.sync(folder.parent)


def recover(folder):
    """Finish or undo what a killed call began. If the new dataset is not in place yet, restore the
    old one. If it is, move the user's other files into it. Then remove unfinished datasets, whose
    names only files.partial can have made."""
    datasets_first = sorted(files.leftovers(f"{folder}.old"), key=is_prepared, reverse=True)
    for old in datasets_first:
        if not folder.exists():
            old.rename(folder)
            continue
        ours = FILES if is_prepared(old) else ()
        if "test" in known_meta(old).get("splits", {}):
            ours += TEST_FILES
        # If a kill interrupts this, the meta.json that is left still says what is ours.
        meta_last = sorted(old.iterdir(), key=lambda path: path.name == "meta.json")
        for path in meta_last:
            if path.name in ours and not path.is_dir():
                path.unlink()
                continue
            target = folder / path.name
            while os.path.lexists(target):
                target = target.with_name(f"{target.name}.old")
            path.rename(target)
        with contextlib.suppress(OSError):  # NFS may hold a file that a training still reads
            old.rmdir()
    for new in files.leftovers(folder):
        files.remove(new)


# ---------------------------------------------------------------- meta.json and tokenizer.json


def prepare_command(folder):
    """The advice to prepare the dataset in this folder, with the command."""
    from tokens.sources import NAMED  # here, since sources imports this file

    name = folder.name
    if name.startswith(TASK):
        command = f"python -m extras.tasks {name.removeprefix(TASK)}"
    elif name in NAMED:
        command = f"python prepare.py {name}"
    else:
        command = f"python prepare.py {name} --input=TEXTFILE"
    if folder.parent != Path("data"):
        command += f" {quoted(f'--data_dir={folder.parent}')}"
    if name == "openwebtext":
        start = "begin with `python train.py config/gpt2_shakespeare.py`, or, for 18 GB,"
        return f"{start} run `{command}`"
    return f"run `{command}`"


def similar_dataset(folder):
    """A question with the named or prepared dataset that a missing one resembles most, or ""."""
    from tokens.sources import NAMED  # here, since sources imports this file

    if folder.name in NAMED or os.path.exists(folder):  # False for a name that is too long
        return ""
    beside = [path.parent.name for path in folder.parent.glob("*/meta.json")]
    return nearest(folder.name, [*NAMED, *beside])


def check_name(data_dir, name):
    """Raise UserError if a path is given where the name of a dataset belongs."""
    folder, name_in_it = os.path.split(name.rstrip("/"))
    is_text = os.path.isfile(name)
    if (folder or is_text) and not is_prepared(Path(data_dir, name)):
        fix = f"give --data_dir={folder} --dataset={name_in_it}"
        if is_text:
            fix = f"run `python prepare.py NAME --input={quoted(name)}`, and give --dataset=NAME"
        raise UserError("dataset is a name, not a path", f"dataset={name}", fix)


def is_prepared(folder):
    """Whether the folder holds a dataset. False for an impossible path (too long, with NUL)."""
    return os.path.isfile(os.path.join(folder, "meta.json"))


def load_meta(folder):
    """meta.json of a dataset as a dictionary. Raises UserError if it is missing or malformed. A
    meta.pkl, as other programs leave it, is never read."""
    folder = Path(folder)
    if not is_prepared(folder):
        what = "the dataset has no meta.json" if os.path.isdir(folder) else "no dataset here"
        raise UserError(what, folder, similar_dataset(folder) or prepare_command(folder))
    path = folder / "meta.json"
    meta = files.read_json(path, prepare_command(folder))
    if flaw := meta_flaw(meta):
        raise UserError(f"meta.json is garbled: {flaw}", path, prepare_command(folder))
    return meta


def meta_flaw(meta):
    """What is wrong with the content of a meta.json, None if nothing is."""
    splits = meta.get("splits")
    if not isinstance(splits, dict) or not all(isinstance(splits.get(s), dict) for s in SPLITS):
        return "splits does not describe train and val"

    texts = {key: meta.get(key) for key in ("dtype", "tokenizer", "source_sha256")}
    counts = {"vocab_size": meta.get("vocab_size")}
    for split in (*SPLITS, "test"):
        if split not in splits:
            continue
        entry = splits[split] if isinstance(splits[split], dict) else {}
        texts[f"splits.{split}.sha256"] = entry.get("sha256")
        if "mask_sha256" in entry:
            texts[f"splits.{split}.mask_sha256"] = entry["mask_sha256"]
        for key in COUNTS:
            if key in entry or key in NEEDED:
                counts[f"splits.{split}.{key}"] = entry.get(key)

    wrong = [key for key, value in texts.items() if not isinstance(value, str)]
    wrong += [key for key, value in counts.items() if type(value) is not int or value <= 0]
    if not wrong and meta["dtype"] not in ("uint16", "uint32"):
        wrong = ["dtype"]
    return f"{wrong[0]} is missing, or of the wrong kind" if wrong else None


def load_tokenizer(folder, meta):
    """The tokenizer of a dataset. Raises UserError if it is missing, malformed, or has another size
    than in meta.json."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    fix = prepare_command(folder)
    data = files.read_json(path, fix)
    tokenizer = tokenizer_from_json(data, path, fix)
    refuse_old_form(data, path, fix)
    if tokenizer.vocab_size != meta["vocab_size"]:
        sizes = f"{tokenizer.vocab_size} tokens where meta.json says {meta['vocab_size']}"
        raise UserError(f"the tokenizer has {sizes}", path, fix)
    return tokenizer


def fingerprint(meta):
    """A short text that checkpoints store. It changes when the tokens of train or val do, or their
    meaning."""
    splits = [meta["splits"][split] for split in SPLITS]
    identity = [meta["tokenizer"], meta["vocab_size"], meta["source_sha256"]]
    identity += [entry["sha256"] for entry in splits]
    identity += [entry["mask_sha256"] for entry in splits if "mask_sha256" in entry]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- token ids and masks


def load_split(folder, split, block_size):
    """The token ids of a split, (N,), read-only and left on disk. Raises UserError unless the file
    is complete, its ids are within the vocabulary, and there are more than block_size of them; also
    if a dataset without a test split is asked for it."""
    folder = Path(folder)
    meta = load_meta(folder)
    path = folder / f"{split}.bin"
    if split not in meta["splits"]:
        fix = "leave out --split=test; docs/data.md says which datasets have one"
        raise UserError(f"the dataset has no {split} split", folder, fix)
    entry = meta["splits"][split]
    dtype = stored_dtype(meta["dtype"])
    size = path.stat().st_size if path.is_file() else 0
    if size != entry["tokens"] * dtype.itemsize:
        tokens = f"{entry['tokens']:,} tokens of {meta['dtype']}"
        what = f"the token file holds {size:,} bytes where meta.json says {tokens}"
        raise UserError(what, path, prepare_command(folder))
    if entry["tokens"] <= block_size:
        what = f"block_size={block_size:,} needs more than the split's {entry['tokens']:,} tokens"
        raise UserError(what, path, "choose a smaller block_size or a longer text")
    try:
        tokens = np.memmap(path, dtype, "r")
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", path, "make it readable") from None
    if flaw := content_flaw(tokens, meta["vocab_size"], entry["sha256"]):
        raise UserError(flaw, path, prepare_command(folder))
    return tokens


def content_flaw(tokens, vocab_size, sha256):
    """What is wrong with the ids of a split, None if nothing is found. A split of more than
    FULL_SCAN tokens is checked at its ends and in a sample."""
    scanned = len(tokens) <= FULL_SCAN
    starts = range(0, len(tokens), PIECE)
    if not scanned:
        starts = np.linspace(0, len(tokens) - PIECE, 100, dtype=int)

    for start in starts:
        wrong = tokens[start : start + PIECE] >= vocab_size
        if wrong.any():
            at = int(start + wrong.argmax())
            return f"token id {tokens[at]} at position {at:,} is beyond vocab_size={vocab_size:,}"
    if scanned and hashlib.sha256(tokens).hexdigest() != sha256:
        return "the tokens are not those that were prepared: their sha256 differs from meta.json's"
    return None


def load_mask(folder, split):
    """The mask of a split of pairs, (N,) uint8, left on disk: 1 where the loss of a token counts
    when it is a target, 2 for a token that is given after the first of these, else 0. Raises
    UserError if the file is missing, changed or not readable."""
    folder = Path(folder)
    path = folder / f"{split}.mask.bin"
    sha256 = load_meta(folder)["splits"][split]["mask_sha256"]
    try:
        intact = path.is_file() and files.sha256_of(path) == sha256
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", path, "make it readable") from None
    if not intact:
        what = "the mask is missing, or not the one that was prepared"
        raise UserError(what, path, prepare_command(folder))
    return np.memmap(path, np.uint8, "r")
