"""
The datasets that prepare.py knows by name: where their texts come from, and how many there are.

Files of a hub are kept in the dataset's folder, under their names there. A preparation that is
interrupted continues with the file that it was fetching, and files that the user puts there are
used, so that no network is needed. The number of rows is checked before they are believed.
"""

import codecs
import hashlib
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from common.errors import UserError, one_line
from common.files import write
from tokens import sources
from tokens.documents import needed, open_input
from tokens.plays import open_plays
from tokens.python_source import open_python_source
from tokens.tasks import Task
from tokens.writing import Corpus

ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
ENWIK8_ZIP = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"  # its sha256
ENWIK8_MD5 = "a1fa5ffddb56f4953e226637dabbb36a"  # of the 100,000,000 bytes in it
ENWIK8_ENDS = {"train": 90_000_000, "val": 95_000_000, "test": 100_000_000}  # bytes


@dataclass(frozen=True)
class Named:
    """A dataset with a name. `open` takes the dataset's folder and returns a Corpus, or {split:
    Corpus} where the source has splits of its own, or a Task."""

    about: str  # for --list
    open: Callable[[Path], Corpus | dict]
    tokenizer: str = "gpt2"  # of --tokenizer=auto
    vocab_size: int | None = None  # of --tokenizer=bpe, if it is not given
    checked: bool = True  # whether `open` compares the text with a hash on record


# ---------------------------------------------------------------- hubs


@dataclass(frozen=True)
class Hub:
    """Parquet files of a dataset hub: {split: (pattern of their names, rows in all)}."""

    repo: str
    files: dict
    field: str = "text"
    documents: bool = True  # False: the rows are the lines of one text, without the blank ones


def open_hub(hub, folder):
    """{split: Corpus} of the files in `folder`; those that are missing are fetched first."""
    if any(flaws_of(hub, folder)):
        try:
            fetch(hub, folder)
        except UserError:
            raise
        except Exception as error:  # of many kinds: network, hub, disk
            patterns = ", ".join(pattern for pattern, _ in hub.files.values())
            what = f"the files of {hub.repo} cannot be fetched: {one_line(error)}"
            fix = f"connect, or save its {patterns} there, with the folders in their names"
            raise UserError(what, folder, fix) from None
    for flaw in flaws_of(hub, folder):
        fix = f"fetch them again; if that does not help, {hub.repo} has changed"
        raise UserError(flaw, folder, fix)

    splits = {}
    for split, (pattern, _) in hub.files.items():
        corpus = open_input(str(folder / pattern), hub.field)
        splits[split] = replace(corpus, source=hub.repo, documents=hub.documents)
    return splits


def flaws_of(hub, folder):
    """Yield what is wrong with the files in `folder`: rows that are missing, or too many."""
    pyarrow = needed("pyarrow.parquet", folder)
    for split, (pattern, expected) in hub.files.items():
        paths = sorted(folder.glob(pattern))
        try:
            rows = sum(pyarrow.parquet.read_metadata(path).num_rows for path in paths)
        except (OSError, pyarrow.ArrowException) as error:
            yield f"a file of {pattern} is damaged: {one_line(error)}"
            continue
        if rows != expected:
            yield f"{pattern} holds {rows:,} rows where {expected:,} are expected for {split}"


def fetch(hub, folder):
    """Download the files of `hub` that are missing into `folder`, one after the other."""
    sources.give_hub_a_home()
    sources.go_offline_if_unreachable()
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise OSError("the hub cannot be reached")
    import huggingface_hub

    names = huggingface_hub.HfApi().list_repo_files(hub.repo, repo_type="dataset")
    patterns = [pattern for pattern, _ in hub.files.values()]
    wanted = sorted(name for name in names if any(map(Path(name).match, patterns)))
    for number, name in enumerate(wanted, 1):
        if not (folder / name).is_file():
            print(f"  fetching file {number} of {len(wanted)}: {name}", flush=True)
            huggingface_hub.hf_hub_download(
                hub.repo, name, repo_type="dataset", local_dir=str(folder)
            )


TINYSTORIES = Hub(
    "roneneldan/TinyStories",
    {"train": ("data/train-*.parquet", 2_119_719), "val": ("data/validation-*.parquet", 21_990)},
)
FINEWEB_EDU = Hub("HuggingFaceFW/fineweb-edu", {"all": ("sample/10BT/*.parquet", 9_672_101)})
WIKITEXT = Hub(
    "Salesforce/wikitext",
    {
        "train": ("wikitext-103-raw-v1/train-*.parquet", 1_801_350),
        "val": ("wikitext-103-raw-v1/validation-*.parquet", 3_760),
        "test": ("wikitext-103-raw-v1/test-*.parquet", 4_358),
    },
    documents=False,
)


def open_tinystories(folder):
    """{split: Corpus}: the published validation stories are halved, by a hash of their content,
    into val and test."""
    splits = open_hub(TINYSTORIES, folder)
    stories = splits["val"].pieces

    def half(odd):
        for text in stories():
            if hashlib.sha256(text.encode()).digest()[0] % 2 == odd:
                yield text

    for odd, split in enumerate(("val", "test")):
        splits[split] = replace(splits["val"], pieces=partial(half, odd), size=None)
    return splits


# ---------------------------------------------------------------- enwik8


def open_enwik8(folder):
    """{split: Corpus} of the first 100,000,000 bytes of a Wikipedia: 90, 5 and 5 million. A cut
    within a character is moved to its first byte."""
    data, path = None, folder / "enwik8.zip"
    if not path.is_file() and not (folder / "enwik8").is_file():
        try:
            data = sources.download(ENWIK8_URL, ENWIK8_ZIP)
        except OSError as error:
            fix = f"save {ENWIK8_URL} as {path}"
            raise UserError(f"enwik8 cannot be fetched: {error}", "enwik8", fix) from None
        folder.mkdir(parents=True, exist_ok=True)
        write(path, data)

    path = folder / "enwik8" if (folder / "enwik8").is_file() else path
    try:
        data = path.read_bytes()
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                data = archive.read("enwik8")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read: {one_line(error)}", path, "move it away") from None
    if hashlib.md5(data).hexdigest() != ENWIK8_MD5:
        raise UserError("this is not enwik8: its md5 is another", path, "move it away")

    splits, start = {}, 0
    for split, end in ENWIK8_ENDS.items():
        text = codecs.getincrementaldecoder("utf-8")().decode(data[start:end])
        start += len(text.encode())
        splits[split] = Corpus("enwik8", partial(iter, [text]), size=len(text))
    return splits


# ---------------------------------------------------------------- all


NAMED = {
    "plays": Named("38 plays, 4.7 MB", open_plays, "char"),
    "python_source": Named("Python files, 58 MB", open_python_source, "bpe", 2048),
    "tinystories": Named("stories, 1.9 GB", open_tinystories, checked=False),
    "fineweb-edu": Named(
        "web pages, 10B", lambda folder: open_hub(FINEWEB_EDU, folder)["all"], checked=False
    ),
    "wikitext-103": Named("Wikipedia, 540 MB", partial(open_hub, WIKITEXT), checked=False),
    "enwik8": Named("Wikipedia, 100 MB", open_enwik8, "byte"),
    "task:copy": Named("say it again", lambda folder: Task("task:copy"), "char"),
    "task:recall": Named("values of many keys", lambda folder: Task("task:recall"), "char"),
    "task:induction": Named("what followed?", lambda folder: Task("task:induction"), "char"),
    "task:needle": Named("digits in a haystack", lambda folder: Task("task:needle"), "char"),
}
