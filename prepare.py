"""
Text in, token files out:

    python prepare.py shakespeare_char                    tiny-shakespeare, a token is a character
    python prepare.py shakespeare                         tiny-shakespeare, GPT-2's tokens
    python prepare.py openwebtext                         8 million web pages, GPT-2's tokens
    python prepare.py mybook --input=book.txt --tokenizer=gpt2
    python prepare.py mybook --input=book.txt --tokenizer=SmolLM2.gguf      the tokens of a pretrained model, to fine-tune it
    python prepare.py mypairs --input=pairs.jsonl --tokenizer=gpt2     prompt/answer pairs, to fine-tune on (pairs.py)

The first 90 % of the characters, or pairs, are for training, the rest for validation, as in nanoGPT. The set is
written beside its place and renamed when it is whole. Memory does not grow with the text.
"""

import codecs
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from common.configurator import build, load
from common.errors import UserError, run
from common.files import sha256_of
from tokens import sources
from tokens.pairs import write_pairs
from tokens.token_files import KNOWN, TokenFile
from tokens.tokenizer import ByteTokenizer, CharTokenizer

SMALL = (
    "shakespeare_char",
    "shakespeare",
)  # made in seconds: train.py makes them when they are missing
FILES = (
    "train.bin",
    "val.bin",
    "tokenizer.json",
    "meta.json",
)  # what a set is made of; other files in its folder are the user's
MASKS = ("train.mask.bin", "val.mask.bin")  # and a set of pairs has these
CHUNK = 1 << 20  # bytes of text read at a time


@dataclass
class PrepareConfig:
    input: str | None = (
        None  # the text, a utf-8 file, or prompt/answer pairs in a .jsonl; the known sets find theirs
    )
    tokenizer: str = "auto"  # char, byte, gpt2, or whose it is: a folder or hub name of Hugging Face weights, or FILE.gguf; auto: what the set is known for, char for a new one
    data_dir: str = "data"  # where the sets are


# text to tokens


def read_text(path):
    """The text of a utf-8 file in pieces, newlines as \\n; UserError naming the first byte that is no utf-8."""
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8-sig")(), translate=True
    )
    read, data = 0, b"-"
    with open(path, "rb") as file:
        while data:
            data = file.read(CHUNK)
            read += len(data)
            try:
                yield decoder.decode(data, final=not data)
            except (
                UnicodeDecodeError
            ) as error:  # its object is what was read last, with what was left over before
                raise UserError(
                    f"the text is not utf-8: byte {read - len(error.object) + error.start:,}",
                    path,
                    "save it as utf-8",
                ) from None


def tokenizer_of(kind):
    """A function of the characters of a text that is the tokenizer which --tokenizer=kind names; what can be wrong is found now."""
    if kind == "char":
        return lambda chars: CharTokenizer("".join(sorted(chars)))
    if kind in ("byte", "gpt2"):
        found = ByteTokenizer() if kind == "byte" else sources.gpt2_tokenizer()
    else:
        from weights import pretrained  # it needs torch, which takes seconds to load

        found = pretrained.load_tokenizer(kind, "--tokenizer")
    return lambda chars: found


def write_text(path, make_tokenizer, folder):
    """Token files of a text file: one pass to count its characters, one to write, with the tokenizer that is
    make_tokenizer(characters). Returns (tokenizer, the splits' entries in meta.json, sha256 of the file)."""
    count, chars, pieces = 0, set(), path.stat().st_size // CHUNK + 1
    for text in tqdm(read_text(path), "reading", pieces, disable=None, leave=False, unit="MB"):
        count, chars = count + len(text), chars | set(text)
    if count < 2 or len(chars) < 2:
        raise UserError(
            "the text is empty" if not count else "the text is one character and nothing else",
            path,
            "choose a longer text",
        )
    tokenizer = make_tokenizer(chars)
    train, val = (
        TokenFile(folder / "train.bin", tokenizer),
        TokenFile(folder / "val.bin", tokenizer),
    )
    left = int(0.9 * count)  # characters still to go to train
    for text in tqdm(
        read_text(path), "writing tokens", pieces, disable=None, leave=False, unit="MB"
    ):
        train.add_text(text[:left])
        val.add_text(text[left:])
        left = max(left - len(text), 0)
    return tokenizer, {"train": train.close(), "val": val.close()}, sha256_of(path)


def write_documents(path, folder):
    """Token files of many documents, <|endoftext|> after each, split as nanoGPT does. Returns as write_text."""
    tokenizer, documents = sources.gpt2_tokenizer(), sources.load_documents(path)
    if "text" not in documents.column_names or len(documents) < 2:
        raise UserError("these are no documents", path, "give two or more, in a column named text")
    parts = documents.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    splits, source = {}, hashlib.sha256()
    for split, part in (("train", "train"), ("val", "test")):
        out = TokenFile(folder / f"{split}.bin", tokenizer)
        with tqdm(
            total=len(parts[part]), desc=f"writing {split}", disable=None, unit=" documents"
        ) as bar:
            for batch in parts[part].iter(batch_size=1024):
                texts = [text.encode() for text in batch["text"]]
                for text, ids in zip(
                    texts,
                    tokenizer.encoding.encode_ordinary_batch(
                        batch["text"], num_threads=os.cpu_count()
                    ),
                ):
                    source.update(text)
                    out.add(ids + [tokenizer.start], len(text))
                bar.update(len(texts))
        splits[split] = out.close()
    return tokenizer, splits, source.hexdigest()


# the folder of the set


def hold(folder):
    """Wait until no other process prepares a set here; the handle returned keeps others waiting."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(
            folder.parent, os.O_RDONLY
        )  # the folder is the lock: no file is left behind
    except OSError as error:
        raise UserError(
            f"the data cannot be written: {error.strerror}", folder, "choose another --data_dir"
        ) from None
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def settle(folder):
    """End what a killed call began: bring back the old set if the new one had not taken its place, move
    the user's other files over to it if it had, and drop what is left."""
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    elif old.exists():
        for path in old.iterdir():
            path.unlink() if path.name in FILES + MASKS else path.rename(folder / path.name)
        old.rmdir()
    if new.exists():
        shutil.rmtree(new)


def publish(new, folder):
    """Put the whole set `new` in the place of `folder`. Killed at any moment, one of them is whole; settle follows."""
    for path in [*new.iterdir(), new]:
        if path.is_file() or os.name == "posix":  # only there can a folder be synced
            handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
            os.fsync(handle)
            os.close(handle)
    if folder.exists():
        folder.rename(folder.with_name(folder.name + ".old"))
    new.rename(folder)


def check_request(name, kind, input, kept):
    """UserError if prepare cannot do what it was asked for; nothing is written yet."""
    if input is not None and not Path(input).is_file():
        raise UserError("no such file", f"--input={input}", "check the path")
    if name not in KNOWN and input is None and not kept.is_file():
        raise UserError(
            f"{name} is not a set known here",
            "--input",
            f"name its text, `python prepare.py {name} --input=TEXTFILE`, or choose from {', '.join(KNOWN)}",
        )
    if name == "openwebtext" and kind != "gpt2":
        raise UserError(
            "openwebtext needs GPT-2's <|endoftext|> between its documents",
            f"--tokenizer={kind}",
            "leave it out",
        )


def describe(meta, tokenizer, folder):
    """Print what was made."""
    if not meta.get("canonical", True):
        print(
            "  NOTE: this is not the canonical tiny-shakespeare file: losses on it compare only roughly with published ones."
        )
    chars = (
        f": {''.join(tokenizer.chars)!r}"
        if meta["tokenizer"] == "char" and meta["vocab_size"] <= 100
        else ""
    )
    print(
        f"  vocabulary: {meta['vocab_size']:,} {dict(char='characters', byte='bytes', gpt2='GPT-2 tokens', bpe='tokens')[meta['tokenizer']]}{chars}"
    )
    for split, entry in meta["splits"].items():
        print(
            f"  {str(folder / split) + '.bin'}  {entry['tokens']:,} tokens of {entry['bytes']:,} bytes, sha256 {entry['sha256'][:12]}"
        )
        if "pairs" in entry:
            print(
                f"    {entry['pairs']:,} pairs, the longest of {entry['longest']:,} tokens: a block_size of {entry['longest'] - 1:,} holds it"
            )


def prepare(name, input=None, tokenizer="auto", data_dir="data"):
    """Make the data set data_dir/name and return its meta.json; see PrepareConfig for the arguments."""
    if not re.fullmatch(r"\w[\w-]*", name):
        raise UserError(
            f"{name!r} is no name for a data set", "name", "use letters, digits, - and _"
        )
    folder = Path(data_dir, name)
    kept, new = folder / "input.txt", folder.with_name(name + ".new")
    kind = (
        tokenizer
        if tokenizer != "auto"
        else "gpt2"
        if name in ("shakespeare", "openwebtext")
        else "char"
    )
    if not folder.parent.is_dir():  # a mistake makes no folder
        check_request(name, kind, input, kept)
    held = hold(folder)
    settle(folder)
    check_request(name, kind, input, kept)
    print(f"preparing {folder}")
    try:
        new.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"the data cannot be written: {error.strerror}", new, "choose another --data_dir"
        ) from None
    try:
        if name == "openwebtext":
            source = input or "Skylion007/openwebtext"
            if not input:
                print(
                    "  8 million documents, 9 billion tokens. Needs about 70 GB for the cache of `datasets` and 18 GB for the tokens"
                )
                print(
                    f"  ({shutil.disk_usage(new).free / 1e9:.0f} GB are free here), some 2 GB of memory, and an hour or more besides the download."
                )
            coder, splits, sha256 = write_documents(input, new)
        else:
            path, source = (Path(input), input) if input else (kept, str(kept))
            if name in SMALL and not input and not kept.is_file():
                text, source = sources.find_shakespeare(kept)
                path = new / "input.txt"
                path.write_bytes(text)
            print(f"  text: {source}, {path.stat().st_size:,} bytes, sha256 {sha256_of(path)[:12]}")
            if name not in KNOWN and tokenizer == "auto":
                print("  a token is a character; --tokenizer=gpt2, byte or a model's for others")
            coder, splits, sha256 = (write_pairs if path.suffix == ".jsonl" else write_text)(
                path, tokenizer_of(kind), new
            )
        dtype = "uint16" if coder.vocab_size <= 65535 else "uint32"
        meta = {
            "name": name,
            "tokenizer": "gpt2" if kind == "gpt2" else coder.to_json()["kind"],
            "vocab_size": coder.vocab_size,
            "dtype": dtype,
            "splits": splits,
            "source": str(source),
            "source_sha256": sha256,
        }
        if name in SMALL:
            meta["canonical"] = sha256 == sources.CANONICAL
        (new / "tokenizer.json").write_text(json.dumps(coder.to_json()), encoding="utf-8")
        (new / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        publish(new, folder)
    finally:  # after Ctrl-C too
        settle(folder)
        os.close(held)
    describe(meta, coder, folder)
    return meta


def main(argv):
    values, words = load(argv, [PrepareConfig], __doc__)
    if len(words) != 1:
        raise UserError(
            "one data set at a time, please",
            "command line",
            f"`python prepare.py NAME`, where NAME is {', '.join(KNOWN)} or one of yours with --input=TEXTFILE",
        )
    config = build(PrepareConfig, values)
    prepare(words[0], config.input, config.tokenizer, config.data_dir)


if __name__ == "__main__":
    run(main)
