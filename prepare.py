"""
Turn text into token files:

    python prepare.py shakespeare_char     tiny-shakespeare, in characters
    python prepare.py shakespeare          tiny-shakespeare, in GPT-2's tokens
    python prepare.py openwebtext          8 million web pages, in GPT-2's tokens
    python prepare.py --list               all that have a name (tokens/sources.py)
    python prepare.py mybook --input=book.txt --tokenizer=gpt2
    python prepare.py mybook --input=book.txt --tokenizer=FOLDER
                   in the tokens of a pretrained model, to fine-tune that model
    python prepare.py mycode --input=src
    python prepare.py mydocs --input='notes/*.md,articles.jsonl.gz' --field=body
                   documents: files, folders, rows of tables (tokens/documents.py)
    python prepare.py mypairs --input=pairs.jsonl
                   prompt/answer pairs or conversations, to fine-tune on (tokens/pairs.py)
    python prepare.py task:recall          a task that tells mixers apart (tokens/tasks.py)

Without --tokenizer, one text of your own is prepared in characters, documents and pairs in GPT-2's
tokens, or, below a megabyte, in those of a small BPE that is trained on them. 1 % is for a test at
the very end, the rest for training and validation (tokens/writing.py). The dataset is written under
a temporary name and renamed when it is complete. Memory use does not grow with the text.
"""

import contextlib
import errno
import math
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np

from common import files
from common.configurator import NonNegativeInt, PositiveInt, build, load
from common.errors import Failure, UserError, printable, run
from tokens import downloads, ngrams, sources, token_files
from tokens.documents import find_files, open_input
from tokens.sources import NAMED, SHAKESPEARE
from tokens.tasks import TASKS, write_task
from tokens.tokenizer import ByteTokenizer, CharTokenizer, train_bpe
from tokens.writing import Corpus, PairRows, write_corpus, write_pairs

SMALL = [name for name in NAMED if NAMED[name].small]  # train.py prepares them if missing
VOCAB_SIZE = 8192  # of --tokenizer=bpe
FEW_BYTES, FEW_TOKENS = 1_000_000, 1024  # own documents of fewer bytes get a smaller BPE
LISTED = 8  # left-out files that are named
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class PrepareConfig:
    input: str | None = None  # a file, several (a,b), a glob or a folder: see tokens/documents.py
    field: str | None = None  # the column of .jsonl, .csv and .parquet (None: text)
    tokenizer: str = "auto"  # char, byte, gpt2, bpe, or a model's: FOLDER, OWNER/NAME
    vocab_size: PositiveInt | None = None  # of --tokenizer=bpe (None: 8192)
    seed: NonNegativeInt | None = None  # of task:NAME (None: 0)
    data_dir: str = "data"  # the folder of the datasets
    list: bool = False  # print the datasets that are known and prepared, and stop


# ---------------------------------------------------------------- text and tokenizer


def tokenizer_maker(kind, vocab_size=None):
    """Return the function make_tokenizer(chars, texts, documents) of writing.write_corpus that
    makes the tokenizer --tokenizer=kind. Raises UserError at once if there is no such tokenizer."""
    if kind == "char":
        return lambda chars, texts, documents: CharTokenizer("".join(sorted(chars())))
    if kind in ("bpe", "small bpe"):
        few = kind == "small bpe"
        size = FEW_TOKENS if few else vocab_size or VOCAB_SIZE
        return lambda chars, texts, documents: train_bpe(texts(), size, documents, fewer=few)
    if kind == "byte":
        tokenizer = ByteTokenizer()
    elif kind == "gpt2":
        tokenizer = downloads.gpt2_tokenizer()
    else:
        from weights import hf  # imported here, since torch takes seconds

        tokenizer = hf.load_tokenizer(kind, "--tokenizer")
    return lambda chars, texts, documents: tokenizer


def open_text(name, config, folder):
    """What the dataset is made of: a Corpus, {split: Corpus} or PairRows. The text is --input, or
    else input.txt in the dataset's folder, where tiny-shakespeare is saved."""
    path, fetched = Path(config.input or folder / "input.txt"), None
    if name in SHAKESPEARE and not config.input and not path.is_file():
        fetched = sources.fetch_shakespeare(path)
    elif name in NAMED and name not in SHAKESPEARE and not config.input:
        return NAMED[name].open(folder)

    text = open_input(str(path), config.field)
    text.source = fetched or text.source
    print(printable(f"  text: {text.source}"))
    if name in SHAKESPEARE and isinstance(text, Corpus) and not text.documents:
        is_tiny = path.is_file() and files.sha256_of(path) == sources.CANONICAL
        return sources.shakespeare_splits(text, is_tiny or fetched)
    return text


def chosen_tokenizer(name, kind, text):
    """The word of --tokenizer that `auto` stands for."""
    if kind != "auto":
        return kind
    if name in NAMED:
        return NAMED[name].tokenizer
    kind, what = "char", "characters"
    if not isinstance(text, Corpus) or text.documents:
        if text.size >= FEW_BYTES:
            kind, what = "gpt2", "tokens of GPT-2"
        elif find_spec("tokenizers"):
            kind, what = "small bpe", "tokens of a small BPE, trained on it"
    print(f"  the text is prepared in {what}; --tokenizer=char, byte, bpe or gpt2 chooses")
    return kind


# ---------------------------------------------------------------- the dataset


def check_request(name, config, folder):
    """Raise UserError if the dataset cannot be prepared, before anything is written."""
    if config.input is not None:
        find_files(config.input)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError("this is not a folder", folder, "move it, or choose another name")
    if name not in NAMED and config.input is None and not os.path.isfile(folder / "input.txt"):
        fix = f"add --input=TEXTFILE, or choose from {', '.join(NAMED)}"
        raise UserError(f"{name} is not a known dataset", "--input", fix)
    if config.vocab_size is not None and config.tokenizer != "bpe":
        raise UserError("only bpe has a size to choose", "--vocab_size", "add --tokenizer=bpe")
    if config.seed is not None and name not in TASKS:
        raise UserError("only a task is random", "--seed", "leave it out")
    if name in TASKS and (config.input is not None or config.tokenizer not in ("auto", "char")):
        raise UserError("a task has its own text", name, "leave --input and --tokenizer out")


def make_dataset(name, config, folder, new):
    """Write all files of the dataset into the folder `new`, and describe it. Returns meta.json."""
    if name in TASKS:
        seed, kind, skipped = config.seed or 0, "char", {}
        source = f"{name}, seed {seed}"
        tokenizer, splits, sha256 = write_task(name, seed, new)
    else:
        text = open_text(name, config, folder)
        kind = chosen_tokenizer(name, config.tokenizer, text)
        size = config.vocab_size or (NAMED[name].vocab_size if name in NAMED else None)
        write = write_pairs if isinstance(text, PairRows) else write_corpus
        tokenizer, splits, sha256 = write(text, tokenizer_maker(kind, size), new)
        first = text["train"] if isinstance(text, dict) else text
        source, skipped = first.source, first.skipped
    if name in NAMED and not NAMED[name].checked:
        print(f"  sha256 of the text, not on record yet to compare with: {sha256}")

    meta = {
        "name": name,
        "tokenizer": "gpt2" if kind == "gpt2" else tokenizer.to_json()["kind"],
        "vocab_size": tokenizer.vocab_size,
        "dtype": token_files.dtype_name(tokenizer.vocab_size),
        "splits": splits,
        "source": source,
        "source_sha256": sha256,
    }
    if name in SHAKESPEARE:
        meta["canonical"] = sha256 == sources.CANONICAL
    if "mask_sha256" not in splits["train"]:  # of running text, not of pairs and tasks
        paths = [new / f"{split}.bin" for split in token_files.SPLITS]
        train, val = (np.memmap(path, token_files.on_disk(meta["dtype"]), "r") for path in paths)
        meta["ngrams"] = ngrams.measure(train, val, meta["vocab_size"])
    token_files.write_meta(new, meta, tokenizer)
    describe(meta, skipped)
    return meta


def describe(meta, skipped):
    """Print what was left out, the vocabulary, the sizes, and the loss of the best n-grams."""
    for path, why in islice(skipped.items(), LISTED):
        print(printable(f"  left out {path}: {why}"))
    if len(skipped) > LISTED:
        print(f"  left out {len(skipped) - LISTED:,} more files")
    if not meta.get("canonical", True):
        print("  NOTE: not the canonical tiny-shakespeare: compare losses only roughly")

    words = {"char": "characters", "byte": "bytes", "gpt2": "GPT-2 tokens"}
    print(f"  vocabulary: {meta['vocab_size']:,} {words.get(meta['tokenizer'], 'tokens')}")

    for split, entry in meta["splits"].items():
        counts = f"{entry['tokens']:,} tokens of {entry['bytes']:,} bytes"
        print(f"  {split}.bin  {counts}, sha256 {entry['sha256'][:12]}")
        for unit in {"documents", "pairs"} & entry.keys():
            print(f"    {entry[unit]:,} {unit if entry[unit] != 1 else unit[:-1]}")
        if "longest" in entry:
            print(f"    the longest has {entry['longest']:,} tokens")
    if meta.get("ngrams"):
        losses, counted = meta["ngrams"]["losses"][-1], meta["ngrams"]["tokens"][-1]
        loss, val = min(losses), meta["splits"]["val"]
        bits = loss * val["tokens"] / val["bytes"] / math.log(2)
        bits = f", {bits:.2f} bits per byte" * (meta["tokenizer"] != "char")
        part = f" (its first {counted:,} tokens)" * (counted < meta["splits"]["train"]["tokens"])
        name = ngrams.NAMES[losses.index(loss)]
        print(f"  {name} of this text{part}: {loss:.2f} nats a token{bits}")


def prepare(name, input=None, tokenizer="auto", data_dir="data", **more):
    """Make the dataset data_dir/name and return its meta.json. The other arguments are the keys of
    PrepareConfig."""
    config = PrepareConfig(input=input, tokenizer=tokenizer, data_dir=data_dir, **more)
    if name not in TASKS and not re.fullmatch(r"\w[\w-]*", name) or len(name.encode()) > 200:
        fix = "use letters, digits, - and _, at most 200 bytes"
        raise UserError(f"{name!r} is not a valid dataset name", "name", fix)
    folder = Path(data_dir, name)
    if os.path.islink(folder):
        folder = folder.resolve()  # the user keeps this dataset on another disk

    if not os.path.isdir(data_dir):
        check_request(name, config, folder)  # before only_process makes the folder
    with token_files.only_process(folder):
        token_files.recover(folder)
        check_request(name, config, folder)
        print(f"preparing {folder.absolute()}", flush=True)
        before = None
        with contextlib.suppress(UserError):  # none yet, or a damaged one
            before = token_files.load_meta(folder)["splits"]
        new = files.partial(folder)
        try:
            new.mkdir()
            meta = make_dataset(name, config, folder, new)
            token_files.publish(new, folder)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise Failure(f"cannot write: {error.strerror}", folder, "free the disk") from None
        finally:  # after Ctrl-C too
            token_files.recover(folder)
    if before not in (None, meta["splits"]):
        print("  NOTE: the dataset that had this name had other tokens:")
        print("  runs that trained on it resume only with --allow_data_change.")
    return meta


def print_training(meta, data_dir):
    """Print a command that trains on a dataset, with a block_size that it allows."""
    name, splits = meta["name"], [meta["splits"][split] for split in ("train", "val")]
    config = "task_recall" if name in TASKS else "llama_shakespeare"
    config = "llama_124m" if name == "openwebtext" else config
    config = "dpo_example" if "preferences" in splits[0] else config
    words = [f"config/{config}.py", f"--dataset={name}"]
    words += [f"--data_dir={data_dir}"] * (data_dir != "data")
    fewest = min(entry["tokens"] for entry in splits)
    if "longest" in splits[0]:
        words.append(f"--block_size={max(entry['longest'] for entry in splits) - 1}")
    elif fewest <= 256:  # the block_size of the config on a GPU
        words += [f"--block_size={max(1, min(64, fewest - 1))}", "--max_iters=200"]
    words.append(f"--out_dir=out-{name.replace(':', '-')}")
    print(f"  train on it:\n{files.command('train.py', *words)}")


def print_list(data_dir):
    """Print the datasets that are known by name, and those in data_dir, a line each: name, text,
    and the tokens of train, val and test."""
    folders = sorted(Path(data_dir).glob("*"))
    folders = [path for path in folders if not path.name.startswith(".")]  # unfinished
    prepared = [path.name for path in folders if token_files.is_prepared(path)]
    for name in dict.fromkeys([*NAMED, *prepared]):
        about, state = NAMED[name].about if name in NAMED else "", "not prepared"
        if name in prepared:
            try:
                meta = token_files.load_meta(Path(data_dir, name))
                about = about or os.path.basename(str(meta.get("source", "")))
                counts = "/".join(f"{entry['tokens']:,}" for entry in meta["splits"].values())
                state = f"{meta['tokenizer']} {meta['vocab_size']:,}: {counts}"
            except UserError:
                state = "damaged"
        print(printable(f"{name:<17} {about:<20} {state}"))
    print("prepare one with `python prepare.py NAME`, yours with --input=TEXT")


def main(argv):
    given = load(argv, [PrepareConfig], __doc__)
    words = given.words
    config = build(PrepareConfig, given.values)
    if config.list:
        return print_list(config.data_dir)
    if len(words) != 1:
        fix = "run `python prepare.py NAME`; --list prints the names that are known"
        raise UserError("prepare.py takes the name of one dataset", "command line", fix)
    print_training(prepare(words[0], **vars(config)), config.data_dir)


if __name__ == "__main__":
    run(main)
