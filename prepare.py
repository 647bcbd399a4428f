"""
Text in, token files out:

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
    python prepare.py stories --input=hf:roneneldan/TinyStories
                   documents: a set of the Hugging Face hub, hf:OWNER/NAME or hf:OWNER/NAME:CONFIG
    python prepare.py mypairs --input=pairs.jsonl
                   prompt/answer pairs or conversations, to fine-tune on (tokens/answers.py)

Without --tokenizer, one text of your own is prepared in characters, documents and pairs in GPT-2's
tokens, or, below a megabyte and not of the hub, in a small BPE that is trained on them. 1 to 5 %
are for a test at the very end, the rest for training and validation (tokens/writing.py). The
dataset appears when it is complete. A long text is streamed; memory grows only with the longest
document or a .json file, and for a BPE with the number of different words.
"""

import math
import os
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from common import early

if __name__ == "__main__":
    early.end_at_once()
    early.need("numpy", "tqdm")

import numpy as np

from common import files
from common.commands import command
from common.configurator import PathName, PositiveInt, build, load
from common.errors import UserError, folded, nearest, printable, run
from tokens import downloads, ngrams, sources, token_files
from tokens.documents import find_files, open_input
from tokens.sources import HUB, NAMED, SHAKESPEARE
from tokens.tokenizer import ByteTokenizer, CharTokenizer, train_bpe
from tokens.writing import Corpus, PairRows, write_corpus, write_pairs

SMALL = [name for name in NAMED if NAMED[name].small]  # train.py prepares them if missing
VOCAB_SIZE = 8192  # of --tokenizer=bpe
SMALL_BPE = "small bpe"  # what --tokenizer=auto chooses for documents of fewer than FEW_BYTES
FEW_BYTES = 1_000_000
FEW_TOKENS = 1024  # in the small BPE, at most
LISTED = 8  # left-out files to name
RENAMED = {"seed": "only tasks are random: use `python -m extras.tasks NAME --seed=N`"}

OWN_TOKENIZERS = ("char", "byte", "bpe")  # not of a trained model
LARGEST_BLOCK = 1024  # the largest block_size of a config
MOST_EPOCHS = 10  # of the printed command, without dropout


class Recipe(NamedTuple):
    """A config for a dataset, and the numbers that it has on a CPU."""

    config: str
    steps: int
    rows: int  # in a step; two rows of a preference count as one
    most_rows: int  # on a GPU, or without dropout: read in all, by fewer steps if need be
    size: str  # the argument that gives the rows
    block_size: int = 128


SCRATCH = Recipe(
    config="llama_shakespeare", steps=1080, rows=12, most_rows=12_960, size="--batch_size=12"
)
FINETUNING = Recipe(
    config="finetune_shakespeare",
    steps=20,
    rows=4,
    most_rows=640,
    size="--gradient_accumulation_steps=4",
    block_size=512,
)
PREFERENCES = Recipe(config="dpo_example", steps=40, rows=8, most_rows=320, size="--batch_size=16")


@dataclass
class PrepareConfig:
    input: PathName | None = None  # a file, several (a,b), a glob, a folder, or hf:OWNER/NAME
    field: str | None = None  # the column of .jsonl, .csv, .parquet, hf: (None: text)
    tokenizer: PathName = "auto"  # char, byte, gpt2, bpe, or a model's: FOLDER, OWNER/NAME
    vocab_size: PositiveInt | None = None  # of --tokenizer=bpe (None: 8192, or the name's own)
    data_dir: PathName = "data"  # the folder of the datasets
    list: bool = False  # print the datasets that are known and prepared, and stop


def prepare(name, input=None, tokenizer="auto", data_dir="data", **more):
    """Make the dataset data_dir/name and return its meta.json. The other arguments are the keys of
    PrepareConfig."""
    given = PrepareConfig(input=input, tokenizer=tokenizer, data_dir=data_dir, **more)
    config = build(PrepareConfig, vars(given))
    check_name(name)
    folder = token_files.folder_of(config.data_dir, name)
    if not os.path.isdir(config.data_dir):
        check_request(name, config, folder)  # so that a mistake does not make data_dir

    with token_files.replaced(folder) as new:
        check_request(name, config, folder)  # again: what a kill left is restored now
        print(printable(f"preparing {folder.absolute()}"), flush=True)
        text = open_text(name, config, folder)
        train_text = text["train"] if isinstance(text, dict) else text
        print(printable(f"  text: {train_text.source}"))
        kind = chosen_tokenizer(name, config.tokenizer, text)
        make_tokenizer = tokenizer_maker(name, kind, config.vocab_size)

        write = write_pairs if isinstance(text, PairRows) else write_corpus
        tokenizer, splits, sha256 = write(text, make_tokenizer, new)

        kind = "gpt2" if kind == "gpt2" else tokenizer.to_json()["kind"]
        meta = token_files.make_meta(name, kind, tokenizer, splits, train_text.source, sha256)
        if name in SHAKESPEARE:
            meta["canonical"] = sha256 == sources.CANONICAL
        if not isinstance(text, PairRows):
            dtype = token_files.stored_dtype(meta["dtype"])
            train = np.memmap(new / "train.bin", dtype, "r")
            val = np.memmap(new / "val.bin", dtype, "r")
            meta["ngrams"] = ngrams.measure(train, val, meta["vocab_size"])
        token_files.write_meta(new, meta, tokenizer)
        describe(meta, train_text.skipped)
    return meta


# ---------------------------------------------------------------- what is asked for


def check_name(name):
    """Raise UserError if no dataset can have this name."""
    if name.startswith(token_files.TASK):
        fix = f"run `python -m extras.tasks {name.removeprefix(token_files.TASK)}`"
        raise UserError("tasks have a command of their own", name, fix)
    if not re.fullmatch(r"\w[\w-]*", name) or len(name.encode()) > 200:
        fix = "use letters, digits, - and _, at most 200 bytes; name a text with --input=FILE"
        raise UserError(f"{name!r} is not a valid dataset name", "name", fix)


def check_request(name, config, folder):
    """Raise UserError if the dataset cannot be prepared, before anything is written."""
    if config.input is not None and not config.input.startswith(HUB):
        find_files(config.input)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError("this is not a folder", folder, "move it, or choose another name")
    if config.vocab_size is not None and config.tokenizer != "bpe":
        what = "--vocab_size works only with --tokenizer=bpe"
        raise UserError(what, f"--vocab_size={config.vocab_size}", "add --tokenizer=bpe")
    if config.input is not None:
        return

    if config.field is not None:
        raise UserError("there is no table with fields", "--field", "add --input=TABLE")
    if name in NAMED or os.path.isfile(folder / "input.txt"):
        return
    near = nearest(name, NAMED) or f"choose from {', '.join(NAMED)}"
    fix = f"add --input=TEXTFILE, or --input=hf:OWNER/NAME for a set of the hub; {near}"
    raise UserError(f"{name} is not a known dataset", "--input", fix)


def open_text(name, config, folder):
    """What the dataset is made of: a Corpus, {split: Corpus} or PairRows. It is --input, else the
    text that has this name, else input.txt in the dataset's folder."""
    if config.input is None and name in NAMED:
        return NAMED[name].open(folder)
    if config.input is not None and config.input.startswith(HUB):
        return sources.open_hub(config.input, config.field)
    path = Path(config.input or folder / "input.txt")
    text = open_input(str(path), config.field)
    if name in SHAKESPEARE and isinstance(text, Corpus) and not text.documents:
        return sources.shakespeare_splits(text, sources.is_tiny(path), folder)
    return text


# ---------------------------------------------------------------- its tokenizer


def chosen_tokenizer(name, kind, text):
    """`kind`, or in place of `auto` the one that suits this text."""
    if kind != "auto":
        return kind
    if name in NAMED:
        return NAMED[name].tokenizer
    if isinstance(text, Corpus) and not text.documents:
        kind = "char"
        what = "characters"
    elif isinstance(text, dict) or text.size is None or text.size >= FEW_BYTES:
        kind = "gpt2"
        what = "tokens of GPT-2"
    else:
        kind = SMALL_BPE
        what = "tokens of a small BPE, trained on it"
    print(f"  the text is prepared in {what}; to choose, give --tokenizer=char, byte, bpe or gpt2")
    return kind


def tokenizer_maker(name, kind, vocab_size=None):
    """The function make_tokenizer(chars, texts, documents) of writing.write_corpus that makes the
    tokenizer of this kind. Raises UserError at once if there is none."""
    if kind == "char":
        return lambda chars, texts, documents: CharTokenizer("".join(sorted(chars())))
    if kind == "bpe":
        named = NAMED[name].vocab_size if name in NAMED else None
        size = vocab_size or named or VOCAB_SIZE
        return lambda chars, texts, documents: train_bpe(texts(), size, documents)
    if kind == SMALL_BPE:
        return lambda chars, texts, documents: train_bpe(texts(), FEW_TOKENS, documents, fewer=True)

    if kind == "byte":
        tokenizer = ByteTokenizer()
    elif kind == "gpt2":
        tokenizer = downloads.gpt2_tokenizer()
    else:
        from weights import hf  # imported here, since torch takes seconds

        tokenizer = hf.load_tokenizer(kind, "--tokenizer")
        changes = ", ".join(tokenizer.changes())
        if changes:
            print(folded(f"  NOTE: as in the model's training, its tokenizer changes {changes}"))
    return lambda chars, texts, documents: tokenizer


# ---------------------------------------------------------------- what is printed


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
        for unit in ("documents", "pairs", "preferences"):
            if unit in entry:
                print(f"    {unit}: {entry[unit]:,}")
        if "longest" in entry:
            print(f"    the longest has {entry['longest']:,} tokens")
    if meta.get("ngrams"):
        print(f"  {best_ngrams(meta)}")


def best_ngrams(meta):
    """A line with the n-grams that have the lowest validation loss."""
    losses = meta["ngrams"]["losses"][-1]
    counted = meta["ngrams"]["tokens"][-1]
    loss = min(losses)
    text = f"{ngrams.NAMES[losses.index(loss)]} of this text"
    if counted < meta["splits"]["train"]["tokens"]:
        text += f" (its first {counted:,} tokens)"
    text += f": {loss:.2f} nats a token"
    if meta["tokenizer"] != "char":
        val = meta["splits"]["val"]
        bits = loss / math.log(2) * val["tokens"] / val["bytes"]
        text += f", {bits:.2f} bits per byte"
    return text


def print_training(meta, data_dir, tokenizer="auto"):
    """Print a command that suits a dataset. With the tokenizer of a trained model it fine-tunes
    this model; a small dataset has few steps. tokenizer: the key of PrepareConfig."""
    name = meta["name"]
    trained = tokenizer not in ("auto", *OWN_TOKENIZERS)
    recipe = FINETUNING if trained else SCRATCH
    script = "train.py"
    if "preferences" in meta["splits"]["train"]:
        if not trained:
            print("  a trained model learns preferences: add --tokenizer=RUN (docs/finetuning.md)")
            return
        recipe = PREFERENCES
        script = "extras.preferences"

    size_words = []
    if name == "openwebtext" and not trained:
        config = "config/llama_124m.py"
    elif name.startswith(token_files.TASK):
        longest = max(entry["longest"] for entry in meta["splits"].values())
        config = "config/task_recall.py"
        size_words = [f"--block_size={longest - 1}"]
    else:
        context = context_of(tokenizer) if trained else math.inf
        config = f"config/{recipe.config}.py"
        size_words = sizes(meta, recipe, context)

    words = [config]
    if trained:
        words.append(f"--init_from={tokenizer}")
    words += [f"--dataset={name}", *size_words]
    if data_dir != "data":
        words.append(f"--data_dir={data_dir}")
    words.append(f"--out_dir=out-{name.replace(':', '-')}")
    print(f"  train on it:\n{command(script, *words)}")


def sizes(meta, recipe, context):
    """The arguments that a recipe needs for a dataset: a block_size that the splits and a trained
    model's context allow; for a small dataset few steps, or dropout, which a note explains."""
    train = meta["splits"]["train"]
    val = meta["splits"]["val"]
    largest = min(context, train["tokens"] - 1, val["tokens"] - 1)  # block_size of running text
    has_pairs = "longest" in train
    if has_pairs:
        longest = max(train["longest"], val["longest"])
        block_size = min(longest - 1, context, LARGEST_BLOCK)
        samples = train.get("preferences", train["pairs"])
    else:
        block_size = max(1, min(recipe.block_size, largest))
        samples = max(1, train["tokens"] // block_size)

    small = MOST_EPOCHS * samples < recipe.most_rows
    words = []
    if small or has_pairs or largest < LARGEST_BLOCK:
        words.append(f"--block_size={block_size}")
    if small:
        few = max(MOST_EPOCHS * samples // recipe.rows, recipe.steps // 12)
        steps = min(few, recipe.steps)
        words += [f"--max_iters={steps}", recipe.size]
        epochs = steps * recipe.rows / samples
        if epochs > MOST_EPOCHS and recipe is SCRATCH:
            words.append("--dropout=0.1")
            read = f"{steps} steps read the text {epochs:,.0f} times"
            print(f"  NOTE: {read}; a model will soon memorize it")
    return words


def context_of(folder):
    """The context of a run in tokens; infinite for weights of other programs."""
    try:
        config = files.read_json(Path(folder, "config.json"), "")
    except UserError:
        config = {}
    return config.get("block_size", math.inf)


def print_list(data_dir):
    """Print the datasets that are known by name, and those in data_dir, a line each: name, text,
    and the tokens of train, val and test."""
    folders = sorted(Path(data_dir).glob("*"))
    folders = [path for path in folders if not path.name.startswith(".")]  # unfinished
    prepared = [path.name for path in folders if token_files.is_prepared(path)]
    for name in dict.fromkeys([*NAMED, *prepared]):
        about = NAMED[name].about if name in NAMED else ""
        state = "not prepared"
        if name in prepared:
            try:
                meta = token_files.load_meta(Path(data_dir, name))
                about = about or os.path.basename(str(meta.get("source", "")))
                counts = "/".join(f"{entry['tokens']:,}" for entry in meta["splits"].values())
                state = f"{meta['tokenizer']} {meta['vocab_size']:,}: {counts}"
            except UserError:
                state = "damaged"
        print(printable(f"{name:<17} {about:<20} {state}"))
    print("prepare one, or with --input=TEXT your own:")
    print(command("prepare.py", "NAME"))


def main(argv):
    given = load(argv, [PrepareConfig], __doc__, renamed=RENAMED)
    words = given.words
    config = build(PrepareConfig, given.values)
    if config.list:
        return print_list(config.data_dir)
    if len(words) != 1:
        fix = "run `python prepare.py NAME`, with --input=FILE for your own text; see --list"
        raise UserError("prepare.py takes the name of one dataset", "command line", fix)
    meta = prepare(words[0], **vars(config))
    tokenizer = config.tokenizer
    if tokenizer == "auto" and words[0] == "shakespeare":
        tokenizer = NAMED["shakespeare"].tokenizer  # this text is for fine-tuning GPT-2
    print_training(meta, config.data_dir, tokenizer)


if __name__ == "__main__":
    run(main)
