"""
Turn a text into token files:

    python prepare.py shakespeare_char     tiny-shakespeare, in characters
    python prepare.py shakespeare          tiny-shakespeare, in GPT-2's tokens
    python prepare.py openwebtext          8 million web pages, in GPT-2's tokens
    python prepare.py mybook --input=book.txt --tokenizer=gpt2
    python prepare.py mybook --input=book.txt --tokenizer=SmolLM2.gguf
                   in the tokens of a pretrained model, to fine-tune that model
    python prepare.py mypairs --input=pairs.jsonl --tokenizer=gpt2
                   prompt/answer pairs, to fine-tune on (tokens/pairs.py)

Without --tokenizer, a text of your own is prepared in characters. As in
nanoGPT, the first 90 % of the characters (or of the pairs) are for training,
the rest for validation. The dataset is written under a temporary name and
renamed when it is complete. Memory use does not grow with the text.
"""

import codecs
import hashlib
import io
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from common import files
from common.configurator import build, load
from common.errors import UserError, run
from tokens import sources
from tokens.pairs import write_pairs
from tokens.token_files import (
    KNOWN,
    TokenFile,
    dtype_name,
    only_process,
    publish,
    recover,
    write_meta,
)
from tokens.tokenizer import ByteTokenizer, CharTokenizer

SMALL = ("shakespeare_char", "shakespeare")  # ready in seconds: train.py prepares them if missing
CHUNK = 1 << 20  # bytes of text read at a time
BAR = dict(disable=None, leave=False)  # a progress bar on terminals only, removed at the end


@dataclass
class PrepareConfig:
    input: str | None = None  # a text in utf-8, or prompt/answer pairs as .jsonl
    tokenizer: str = "auto"  # char, byte, gpt2, or a model's: FOLDER, OWNER/NAME or FILE.gguf
    data_dir: str = "data"  # the folder of the datasets


# ---------------------------------------------------------------- text to tokens


def read_text(path):
    """Yield the text of a utf-8 file in pieces, with every line end as \\n. Raises UserError, which
    names the first byte that is not utf-8."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    position, data = 0, b"-"
    with open(path, "rb") as file:
        while data:
            data = file.read(CHUNK)
            position += len(data)
            try:
                yield decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                # error.object holds the bytes just read, after those left over from earlier.
                byte = position - len(error.object) + error.start
                what = f"the text is not utf-8: byte {byte:,}"
                raise UserError(what, path, "save it as utf-8") from None


def tokenizer_maker(kind):
    """Return a function that takes the set of a text's characters and returns the tokenizer that
    --tokenizer=kind names. Raises UserError at once if there is no such tokenizer."""
    if kind == "char":
        return lambda chars: CharTokenizer("".join(sorted(chars)))
    if kind == "byte":
        tokenizer = ByteTokenizer()
    elif kind == "gpt2":
        tokenizer = sources.gpt2_tokenizer()
    else:
        from weights import pretrained  # imported here, since torch takes seconds

        tokenizer = pretrained.load_tokenizer(kind, "--tokenizer")
    return lambda chars: tokenizer


def write_text(path, make_tokenizer, folder):
    """Write the token files of a text file. The first pass counts its characters; the second writes
    tokens with the tokenizer make_tokenizer(characters). Returns (tokenizer, {split: entry in
    meta.json}, sha256 of the file)."""
    count, chars, pieces = 0, set(), path.stat().st_size // CHUNK + 1
    for text in tqdm(read_text(path), "reading", pieces, unit="MB", **BAR):
        count += len(text)
        chars.update(text)
    if count < 2 or len(chars) < 2:
        what = "the text has only one character" if count else "the text is empty"
        raise UserError(what, path, "choose a longer text")

    tokenizer = make_tokenizer(chars)
    train = TokenFile(folder / "train.bin", tokenizer)
    val = TokenFile(folder / "val.bin", tokenizer)
    to_train = int(0.9 * count)  # characters still to be written to train
    for text in tqdm(read_text(path), "writing tokens", pieces, unit="MB", **BAR):
        train.add_text(text[:to_train])
        val.add_text(text[to_train:])
        to_train = max(to_train - len(text), 0)
    return tokenizer, {"train": train.close(), "val": val.close()}, files.sha256_of(path)


def write_documents(path, folder):
    """Write the token files of many documents, with <|endoftext|> after each and nanoGPT's split.
    Returns the same as write_text."""
    tokenizer, documents = sources.gpt2_tokenizer(), sources.load_documents(path)
    if "text" not in documents.column_names or len(documents) < 2:
        raise UserError("these are not documents", path, "give two or more, in a column named text")
    parts = documents.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    parts = {"train": parts["train"], "val": parts["test"]}

    encode, threads = tokenizer.encoding.encode_ordinary_batch, os.cpu_count()
    entries, sha256 = {}, hashlib.sha256()
    for split, part in parts.items():
        file = TokenFile(folder / f"{split}.bin", tokenizer)
        bar = tqdm(total=len(part), desc=f"writing {split}", disable=None, unit=" documents")
        for batch in part.iter(batch_size=1024):
            texts = batch["text"]
            for text, ids in zip(texts, encode(texts, num_threads=threads), strict=True):
                data = text.encode()
                sha256.update(data)
                file.add(ids + [tokenizer.start], len(data))
            bar.update(len(texts))
        bar.close()
        entries[split] = file.close()
    return tokenizer, entries, sha256.hexdigest()


# ---------------------------------------------------------------- the dataset


def check_request(name, kind, input, folder):
    """Raise UserError if the dataset cannot be prepared, before anything is written."""
    if input is not None and not os.path.isfile(input):
        raise UserError("no such file", f"--input={input}", "check the path")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError("this is not a folder", folder, "move it, or choose another name")
    if name not in KNOWN and input is None and not os.path.isfile(folder / "input.txt"):
        command = f"`python prepare.py {name} --input=TEXTFILE`"
        fix = f"name its text, {command}, or choose from {', '.join(KNOWN)}"
        raise UserError(f"{name} is not a known dataset", "--input", fix)
    if name == "openwebtext" and kind != "gpt2":
        what = "openwebtext needs GPT-2's <|endoftext|> between its documents"
        raise UserError(what, f"--tokenizer={kind}", "leave it out")


def find_text(name, input, folder, new):
    """(path of the text, where it comes from). The text is --input, or else input.txt in the
    dataset's folder. If tiny-shakespeare has no input.txt yet, it is fetched into `new`."""
    path = Path(input) if input else folder / "input.txt"
    if input or path.is_file():
        return path, str(path)
    text, source = sources.find_shakespeare(path)
    (new / "input.txt").write_bytes(text)
    return new / "input.txt", source


def make_dataset(name, input, kind, folder, new):
    """Write all files of the dataset into the folder `new`. Returns (meta.json, tokenizer)."""
    if name == "openwebtext":
        source = input or "Skylion007/openwebtext"
        if not input:
            free = shutil.disk_usage(new).free / 1e9
            print("  8 million documents, 9 billion tokens. This takes 70 GB for the cache of")
            print(f"  `datasets` and 18 GB for the tokens ({free:.0f} GB are free here), 2 GB of")
            print("  memory, and an hour or more besides the download.")
        tokenizer, splits, sha256 = write_documents(input, new)
    else:
        path, source = find_text(name, input, folder, new)
        size, sha256 = path.stat().st_size, files.sha256_of(path)
        print(f"  text: {source}, {size:,} bytes, sha256 {sha256[:12]}")
        write = write_pairs if path.suffix == ".jsonl" else write_text
        tokenizer, splits, sha256 = write(path, tokenizer_maker(kind), new)

    meta = {
        "name": name,
        "tokenizer": "gpt2" if kind == "gpt2" else tokenizer.to_json()["kind"],
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype_name(tokenizer.vocab_size),
        "splits": splits,
        "source": source,
        "source_sha256": sha256,
    }
    if name in SMALL:
        meta["canonical"] = sha256 == sources.CANONICAL
    write_meta(new, meta, tokenizer)
    return meta, tokenizer


def describe(meta, tokenizer, folder):
    """Print the vocabulary and the sizes of a dataset."""
    if not meta.get("canonical", True):
        print("  NOTE: this is not the canonical tiny-shakespeare file:")
        print("  losses on it compare only roughly with published ones.")

    kind, size = meta["tokenizer"], meta["vocab_size"]
    words = {"char": "characters", "byte": "bytes", "gpt2": "GPT-2 tokens", "bpe": "tokens"}[kind]
    listed = f": {''.join(tokenizer.chars)!r}" if kind == "char" and size <= 100 else ""
    print(f"  vocabulary: {size:,} {words}{listed}")

    for split, entry in meta["splits"].items():
        counts = f"{entry['tokens']:,} tokens of {entry['bytes']:,} bytes"
        print(f"  {folder / split}.bin  {counts}, sha256 {entry['sha256'][:12]}")
        if "pairs" in entry:
            longest = f"the longest of {entry['longest']:,} tokens"
            fits = f"a block_size of {entry['longest'] - 1:,} holds it"
            print(f"    {entry['pairs']:,} pairs, {longest}: {fits}")


def prepare(name, input=None, tokenizer="auto", data_dir="data"):
    """Make the dataset data_dir/name and return its meta.json. The other arguments are the keys of
    PrepareConfig."""
    if not re.fullmatch(r"\w[\w-]*", name) or len(name.encode()) > 200:
        fix = "use letters, digits, - and _, at most 200 bytes"
        raise UserError(f"{name!r} is not a valid dataset name", "name", fix)
    folder = Path(data_dir, name)
    if os.path.islink(folder):
        folder = folder.resolve()  # the user keeps this dataset on another disk
    kind = tokenizer
    if tokenizer == "auto":
        kind = "gpt2" if name in ("shakespeare", "openwebtext") else "char"

    if not os.path.isdir(data_dir):
        check_request(name, kind, input, folder)  # before only_process makes the folder
    with only_process(folder):
        recover(folder)
        check_request(name, kind, input, folder)
        print(f"preparing {folder}")
        if name not in KNOWN and tokenizer == "auto":
            print("  a token is a character; --tokenizer=gpt2, byte or a model's chooses others")
        new = files.partial(folder)
        try:
            new.mkdir()
            meta, made = make_dataset(name, input, kind, folder, new)
            publish(new, folder)
        finally:  # after Ctrl-C too
            recover(folder)
    describe(meta, made, folder)
    return meta


def main(argv):
    values, words = load(argv, [PrepareConfig], __doc__)
    if len(words) != 1:
        names = f"NAME is {', '.join(KNOWN)} or one of yours with --input=TEXTFILE"
        fix = f"`python prepare.py NAME`, where {names}"
        raise UserError("prepare.py takes the name of one dataset", "command line", fix)
    config = build(PrepareConfig, values)
    prepare(words[0], config.input, config.tokenizer, config.data_dir)


if __name__ == "__main__":
    run(main)
