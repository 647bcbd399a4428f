"""
Turn text into token files:

    python prepare.py shakespeare_char     tiny-shakespeare, in characters
    python prepare.py shakespeare          tiny-shakespeare, in GPT-2's tokens
    python prepare.py openwebtext          8 million web pages, in GPT-2's tokens
    python prepare.py --list               all that have a name (tokens/named.py)
    python prepare.py --inspect mybook     what is in a dataset
    python prepare.py mybook --input=book.txt --tokenizer=gpt2
    python prepare.py mybook --input=book.txt --tokenizer=FOLDER
                   in the tokens of a pretrained model, to fine-tune that model
    python prepare.py mycode --input=src
    python prepare.py mydocs --input='notes/*.md,articles.jsonl.gz' --field=body
                   many documents: files, folders, rows of tables (tokens/documents.py)
    python prepare.py mypairs --input=pairs.jsonl
                   prompt/answer pairs or conversations, to fine-tune on (tokens/pairs.py)
    python prepare.py task:recall          a task that tells mixers apart (tokens/tasks.py)

Without --tokenizer, one text of your own is prepared in characters, documents and pairs in GPT-2's
tokens. About 1 % is for a test at the very end, 90 % of the rest for training, the others for
validation (tokens/writing.py). The dataset is written under a temporary name and renamed when it is
complete. Memory use does not grow with the text.
"""

import contextlib
import errno
import os
import re
import shutil
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from common import files
from common.configurator import NonNegativeInt, PositiveInt, build, load
from common.errors import Failure, UserError, run
from tokens import sources
from tokens.documents import find_files, open_input
from tokens.inspect_data import print_inspection, print_list
from tokens.named import NAMED
from tokens.pairs import PairRows, write_pairs
from tokens.plays import canonical_test
from tokens.tasks import TASKS, Task, write_task
from tokens.token_files import (
    KNOWN,
    dtype_name,
    load_meta,
    only_process,
    publish,
    recover,
    write_meta,
)
from tokens.tokenizer import ByteTokenizer, CharTokenizer, train_bpe
from tokens.writing import Corpus, end_of_text, nanogpt_splits, write_corpus

SHAKESPEARE = ("shakespeare_char", "shakespeare")  # nanoGPT's datasets, with its two splits
SMALL = (*SHAKESPEARE, "plays", *TASKS)  # ready in seconds: train.py prepares them if missing
VOCAB_SIZE = 8192  # of --tokenizer=bpe
LINE = 76  # columns of the characters that are listed
LISTED = 8  # files that are left out and named
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
    inspect: bool = False  # print what is in a prepared dataset, and stop


# ---------------------------------------------------------------- text and tokenizer


def tokenizer_maker(kind, vocab_size=None):
    """Return the function make_tokenizer(chars, texts, documents) of writing.write_corpus that
    makes the tokenizer --tokenizer=kind. Raises UserError at once if there is no such tokenizer."""
    if kind == "char":
        return lambda chars, texts, documents: CharTokenizer("".join(sorted(chars())))
    if kind == "bpe":
        size = vocab_size or VOCAB_SIZE
        return lambda chars, texts, documents: train_bpe(texts(), size, documents)
    if kind == "byte":
        tokenizer = ByteTokenizer()
    elif kind == "gpt2":
        tokenizer = sources.gpt2_tokenizer()
    else:
        from weights import hf  # imported here, since torch takes seconds

        tokenizer = hf.load_tokenizer(kind, "--tokenizer")
    return lambda chars, texts, documents: tokenizer


def open_web_pages(path, new):
    """OpenWebText, or the documents at `path`, as {"train", "val": Corpus} with nanoGPT's split."""
    if not path:
        free = shutil.disk_usage(new).free / 1e9
        print("  8 million documents, 9 billion tokens. This takes 70 GB for the cache of")
        print(f"  `datasets` and 18 GB for the tokens ({free:.0f} GB are free here), 2 GB of")
        print("  memory, and an hour or more besides the download.")
    documents = sources.load_documents(path)
    if "text" not in documents.column_names or len(documents) < 2:
        raise UserError("these are not documents", path, "give two or more, in a column named text")
    parts = documents.train_test_split(test_size=0.0005, seed=2357, shuffle=True)

    def texts(part):
        for batch in part.iter(batch_size=1024):
            yield from batch["text"]

    source = path or "Skylion007/openwebtext"
    return {
        "train": Corpus(source, lambda: texts(parts["train"]), documents=True),
        "val": Corpus(source, lambda: texts(parts["test"]), documents=True),
    }


def open_text(name, config, folder, new):
    """What the dataset is made of: a Corpus, {split: Corpus} or PairRows. The text is --input, or
    else input.txt in the dataset's folder. If tiny-shakespeare has no input.txt yet, it is fetched
    into the folder `new`."""
    if name == "openwebtext":
        return open_web_pages(config.input, new)
    if name in NAMED and not config.input:
        text = NAMED[name].open(folder)
        return replace(text, seed=config.seed or 0) if isinstance(text, Task) else text
    path, source = folder / "input.txt", None
    if not config.input and not path.is_file():
        text, source = sources.find_shakespeare(path)
        path = new / "input.txt"
        path.write_bytes(text)

    path = Path(config.input) if config.input else path
    text = open_input(str(path), config.field)
    text.source = source or text.source
    print(f"  text: {text.source}")
    if name in SHAKESPEARE and isinstance(text, Corpus) and not text.documents:
        splits = nanogpt_splits(text)
        if source or path.is_file() and files.sha256_of(path) == sources.CANONICAL:
            add_canonical_test(splits)
        return splits
    return text


def add_canonical_test(splits):
    """Add a test split to tiny-shakespeare's: two plays that are not in it, if they can be had."""
    print(f"  the test split: two plays from {sources.WHEEL[0]}", flush=True)
    try:
        text = canonical_test()
    except OSError as error:
        print(f"  NOTE: there will be no test split: {error}")
        return
    splits["test"] = Corpus(sources.WHEEL[0], lambda: iter([text]), size=len(text))


def chosen_tokenizer(name, kind, text):
    """The word of --tokenizer that `auto` stands for."""
    if kind != "auto" or name == "shakespeare_char":
        return "char" if kind == "auto" else kind
    if name in KNOWN:
        return NAMED[name].tokenizer if name in NAMED else "gpt2"
    if isinstance(text, Corpus) and not text.documents:
        print("  each token is a character; --tokenizer=byte, bpe or gpt2 makes others")
        return "char"
    print("  the tokens are GPT-2's; --tokenizer=char, byte or bpe makes others")
    return "gpt2"


# ---------------------------------------------------------------- the dataset


def check_request(name, config, folder):
    """Raise UserError if the dataset cannot be prepared, before anything is written."""
    if config.input is not None:
        find_files(config.input)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError("this is not a folder", folder, "move it, or choose another name")
    if name not in KNOWN and config.input is None and not os.path.isfile(folder / "input.txt"):
        command = f"`python prepare.py {name} --input=TEXTFILE`"
        fix = f"name its text, {command}, or choose from {', '.join(KNOWN)}"
        raise UserError(f"{name} is not a known dataset", "--input", fix)
    if name == "openwebtext" and config.tokenizer not in ("auto", "gpt2"):
        what = "openwebtext needs GPT-2's <|endoftext|> between its documents"
        raise UserError(what, f"--tokenizer={config.tokenizer}", "leave it out")
    if config.vocab_size is not None and config.tokenizer != "bpe":
        what = "only a tokenizer that is trained here has a size to choose"
        raise UserError(what, f"--vocab_size={config.vocab_size}", "add --tokenizer=bpe")
    if config.seed is not None and name not in TASKS:
        raise UserError("only a task is random", f"--seed={config.seed}", "leave it out")
    if name in TASKS and (config.input is not None or config.tokenizer not in ("auto", "char")):
        what = "a task has its own text, in characters"
        raise UserError(what, name, "leave --input and --tokenizer out")


def make_dataset(name, config, folder, new):
    """Write all files of the dataset into the folder `new`. Returns (meta.json, tokenizer, {file:
    why it was left out})."""
    text = open_text(name, config, folder, new)
    kind = chosen_tokenizer(name, config.tokenizer, text)
    size = config.vocab_size or (NAMED[name].vocab_size if name in NAMED else None)
    write = {PairRows: write_pairs, Task: write_task}.get(type(text), write_corpus)
    tokenizer, splits, sha256 = write(text, tokenizer_maker(kind, size), new)
    if name in NAMED and not NAMED[name].checked:
        print(f"  sha256 of the text, not on record yet to compare with: {sha256}")

    first = text["train"] if isinstance(text, dict) else text
    meta = {
        "name": name,
        "tokenizer": "gpt2" if kind == "gpt2" else tokenizer.to_json()["kind"],
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype_name(tokenizer.vocab_size),
        "splits": splits,
        "source": first.source,
        "source_sha256": sha256,
    }
    if name in SHAKESPEARE:
        meta["canonical"] = sha256 == sources.CANONICAL
    write_meta(new, meta, tokenizer)
    return meta, tokenizer, first.skipped


def describe(meta, tokenizer, skipped):
    """Print what was left out, the vocabulary, and the sizes of a dataset."""
    for path, why in islice(skipped.items(), LISTED):
        print(f"  left out {path}: {why}")
    if len(skipped) > LISTED:
        print(f"  left out {len(skipped) - LISTED:,} more files")
    if not meta.get("canonical", True):
        print("  NOTE: this is not the canonical tiny-shakespeare file:")
        print("  losses on it compare only roughly with published ones.")

    kind, size = meta["tokenizer"], meta["vocab_size"]
    words = {"char": "characters", "byte": "bytes", "gpt2": "GPT-2 tokens", "bpe": "tokens"}[kind]
    print(f"  vocabulary: {size:,} {words}")
    if kind == "char" and size <= 100:
        text = repr("".join(tokenizer.chars))
        for start in range(0, len(text), LINE):
            print(f"    {text[start : start + LINE]}")
    if "documents" in meta["splits"]["train"]:
        end = "a blank line" if end_of_text(tokenizer) is None else "<|endoftext|>"
        print(f"  after each document comes {end}")

    for split, entry in meta["splits"].items():
        counts = f"{entry['tokens']:,} tokens of {entry['bytes']:,} bytes"
        print(f"  {split}.bin  {counts}, sha256 {entry['sha256'][:12]}")
        if "documents" in entry:
            print(f"    {entry['documents']:,} document{'s' * (entry['documents'] != 1)}")
        if "pairs" in entry:
            longest = f"the longest of {entry['longest']:,} tokens"
            fits = f"a block_size of {entry['longest'] - 1:,} holds it"
            plural = "s" * (entry["pairs"] != 1)
            print(f"    {entry['pairs']:,} pair{plural}, {longest}: {fits}")


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
    with only_process(folder):
        recover(folder)
        check_request(name, config, folder)
        print(f"preparing {folder.absolute()}", flush=True)
        before = None
        with contextlib.suppress(UserError):  # none yet, or a damaged one
            before = load_meta(folder)["splits"]
        new = files.partial(folder)
        try:
            new.mkdir()
            meta, made, skipped = make_dataset(name, config, folder, new)
            publish(new, folder)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise Failure(f"cannot write: {error.strerror}", folder, "free the disk") from None
        finally:  # after Ctrl-C too
            recover(folder)
    describe(meta, made, skipped)
    if before not in (None, meta["splits"]):
        print("  NOTE: the dataset that had this name had other tokens:")
        print("  runs that trained on it resume only with --allow_data_change.")
    return meta


def main(argv):
    values, words = load(argv, [PrepareConfig], __doc__)
    config = build(PrepareConfig, values)
    if config.list and not words:
        return print_list(config.data_dir)
    if len(words) != 1:
        names = f"NAME is {', '.join(KNOWN)} or one of yours with --input=TEXTFILE"
        fix = f"`python prepare.py NAME`, where {names}"
        raise UserError("prepare.py takes the name of one dataset", "command line", fix)
    if config.inspect:
        return print_inspection(Path(config.data_dir, words[0]))
    prepare(words[0], **vars(config))


if __name__ == "__main__":
    run(main)
