"""What people bring: files, folders and tables."""

import csv
import gzip
import json
import os
import random
import sys
from pathlib import Path

import pytest

import prepare
from helpers.tables import ROWS, TEXTS, jsonl, write
from helpers.texts import message
from tokens.documents import find_files, open_input

pytestmark = pytest.mark.usefixtures("elsewhere")


def texts_in(spec, field=None):
    return list(open_input(spec, field).pieces())


# ---------------------------------------------------------------- files


@pytest.fixture
def tree():
    write("a,b[1].txt", "a name with a comma and brackets\n")
    for name in ("src/b.py", "src/a.py", "src/sub/c.md", "src/.git/d", "src/.hidden", "notes.txt"):
        write(name, f"text of {name}\n")


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("notes.txt", ["notes.txt"]),
        ("src", ["src/a.py", "src/b.py", "src/sub/c.md"]),
        ("src/*.py", ["src/a.py", "src/b.py"]),
        ("src/**/*.md", ["src/sub/c.md"]),
        ("src/b.py,src", ["src/b.py", "src/a.py", "src/sub/c.md"]),
        ("s*", ["src/a.py", "src/b.py", "src/sub/c.md"]),
        ("a,b[1].txt", ["a,b[1].txt"]),
    ],
)
def test_which_files_are_read(tree, spec, expected):
    assert [str(path) for path in find_files(spec)] == expected


def test_a_prepared_dataset_inside_the_folder_is_not_read(tree):
    prepare.prepare("x", input="notes.txt", tokenizer="gpt2")
    write("data/mine.txt", "mine")
    assert [str(path) for path in find_files("data,notes.txt")] == ["data/mine.txt", "notes.txt"]
    write("data/x/mine.txt", "mine")
    assert "".join(texts_in("data/x")) == "mine"


def test_a_folder_behind_a_link_is_read_once(tree):
    os.symlink("..", "src/sub/up")
    os.symlink("src", "link")
    assert [str(path) for path in find_files("link")] == ["link/a.py", "link/b.py", "link/sub/c.md"]
    os.mkdir("docs"), os.symlink("../src", "docs/src")
    assert "docs/src/sub/c.md" in [str(path) for path in find_files("docs")]
    assert "--input=hf:me/texts" in message(find_files, "me/texts")
    assert "download it" in message(find_files, "https://me.org/a.txt")


def test_a_pattern_without_a_file_is_named_and_a_pipe_is_not_waited_for():
    write("src/a.txt", "a text")
    assert "no file matches (--input=src/*.md)" in message(find_files, "src/a.txt,src/*.md,src")
    os.mkfifo("pipe"), os.mkfifo("src/pipe")
    assert "no file here (--input=pipe)" in message(find_files, "pipe")
    assert "no file here (--input=pi*)" in message(find_files, "pi*")
    assert [*find_files("src,*")] == [Path("src/a.txt")]


# ---------------------------------------------------------------- formats


def write_table(kind):
    """A file of ROWS."""
    name = f"rows.{kind}"
    if kind.startswith("jsonl"):
        data = jsonl(ROWS).encode()
        if kind.endswith("zst"):
            pa = pytest.importorskip("pyarrow")
            half = data.index(b"\n", len(data) // 2) - 5  # two frames, as a parallel packer writes
            parts = [data[:half], data[half:]]
            data = b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in parts)
        return write(name, data)
    if kind == "json":
        return write(name, json.dumps(ROWS, indent=1))
    if kind == "parquet":
        pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), name)
        return name
    with open(name, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter="\t" if kind == "tsv" else ",")
        table.writerows([ROWS[0], *(row.values() for row in ROWS)])
    return name


@pytest.mark.parametrize("kind", ["json", "jsonl", "jsonl.zst", "csv", "tsv", "parquet"])
def test_a_table_gives_a_document_for_each_row(kind):
    name = write_table(kind)
    assert texts_in(name) == TEXTS
    assert texts_in(name, "body") == [f"body {i}" for i in range(400)]
    times = 3 if kind in ("jsonl.zst", "parquet") else 1  # they are compressed
    assert open_input(name).size == times * os.path.getsize(name)
    text = message(open_input, name, "nody")
    assert "there is no field nody among: id, text, body" in text and name in text
    assert "--field=NAME" in text


def test_csv_stays_as_it_is_written():
    write("a.csv", 'id,text\n1,1.10\n2,NA\n3,\n4,"a ""b"",\nc"\n5,007\n')
    corpus = open_input("a.csv")
    assert list(corpus.pieces()) == ["1.10", "NA", 'a "b",\nc', "007"]
    assert corpus.skipped == {"a.csv": "1 of its rows, which have no text"}


def test_packed_text_is_one_text_with_its_newlines():
    write("a.txt.gz", gzip.compress(b"one\r\ntwo\n\n", mtime=0))
    assert texts_in("a.txt.gz") == ["one\ntwo\n\n", ""] and not open_input("a.txt.gz").documents


def test_text_needs_no_package(tree, monkeypatch):
    for package in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, package, None)
    write("rows.jsonl", jsonl(ROWS))
    assert len(texts_in("src,rows.jsonl")) == 403
    for name in ("a.parquet", "a.jsonl.zst"):
        write(name, "text\nabc\n")
        with pytest.raises(ModuleNotFoundError, match="pyarrow"):
            open_input(name)


def test_what_the_rows_hold_decides(capsys):
    rows = [{"text": "a", "prompt": "b", "answer": "c"}]
    write("a.jsonl", jsonl(rows))
    assert texts_in("a.jsonl", "text") == ["a"] and not capsys.readouterr().err
    assert texts_in("a.jsonl") == ["a"] and "answers beside it are not" in capsys.readouterr().err
    write("a.jsonl", jsonl([rows[0] | {"text": None}]))
    assert [pairs for _, pairs in open_input("a.jsonl").rows()] == [[("b", "c")]]
    write("a.csv", "\ufefftext\na\n")  # as Excel writes it
    assert texts_in("a.csv") == ["a"]


LABELLED = [{"text": "one", "label": 1, "score": 0.5}, {"text": "two", "label": 0, "score": 2.0}]


@pytest.mark.parametrize(
    "content",
    [
        jsonl(LABELLED),  # as Dataset.to_json of the hub writes it
        jsonl(LABELLED).replace("\n", "\n \n"),
        "\n \n" + jsonl(LABELLED),
        "\ufeff" + jsonl(LABELLED),
        json.dumps(LABELLED),
        json.dumps({"version": "1", "data": LABELLED}, indent=1),
        '\n ["one", "two"]',
        '{"text": ["one", "two"]}',
    ],
)
def test_json_is_read_as_rows_whatever_its_form(content):
    write("a.json", content)
    assert texts_in("a.json") == ["one", "two"] and open_input("a.json").documents


def test_an_object_with_an_empty_array_is_one_row():
    write("a.json", '{"text": "one", "tags": []}')
    assert texts_in("a.json") == ["one"]


@pytest.mark.parametrize(
    "content",
    [
        '{"text": {"0": "one", "1": "two"}}',  # columns, as DataFrame.to_json writes them
        '{"name": "a package", "keywords": ["one", "two"]}',
        '[["one", 1], ["two", 0]]',
        '"one"',
        '{"name": "one",\n "files": []}\n{"name": "two"}',
        '{"messages": "[{\\"role\\": \\"user\\"}]"}',
    ],
)
def test_other_json_is_refused_and_left_out_of_a_folder(content):
    write("src/a.json", content)
    write("src/b.txt", "a text")
    assert "src/a.json" in message(lambda: texts_in("src/a.json"))
    corpus = open_input("src")
    assert "".join(corpus.pieces()) == "a text" and "src/a.json" in corpus.skipped


@pytest.mark.parametrize("kind", ["csv", "tsv"])
@pytest.mark.parametrize("cells", [["3", "b", "more"], ["3"]])
def test_a_row_whose_cells_do_not_fit_the_header_is_refused_by_its_line(kind, cells):
    """Such as one with a comma in a text that is not quoted."""
    separator = "\t" if kind == "tsv" else ","
    rows = [["id", "text"], ["1", '"two\nlines"'], [], ["2", "a"], cells, ["4", "c"]]
    write(f"a.{kind}", "".join(separator.join(row) + "\n" for row in rows))
    assert f"a.{kind}:6)" in message(lambda: texts_in(f"a.{kind}"))


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_line_ends_and_byte_order_marks_of_cells_are_those_of_text_files(kind):
    row = {"id": 1, "text": "\ufeffa\r\nb\rc\n"}
    if kind == "csv":
        write("a.csv", 'id,text\n1,"{text}"\n'.format(**row))
    else:
        write(f"a.{kind}", jsonl([row]) if kind == "jsonl" else json.dumps([row]))
    write("a.txt", row["text"])
    assert texts_in(f"a.{kind}") == ["a\nb\nc\n"] == ["".join(texts_in("a.txt"))]


def test_rows_left_out_are_counted_in_the_whole_file(capsys):
    """Also those after the last row that is written."""
    row = {"prompt": "a", "answer": "b"}
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "ai", "content": "b"}]}
    silent = {"messages": chat["messages"][:1]}
    write("a.jsonl", jsonl([silent, *[chat] * 20, *[silent] * 5]))
    prepare.prepare("x", input="a.jsonl", tokenizer="byte")
    assert "6 of its rows" in capsys.readouterr().out
    assert open_input(write("b.jsonl", jsonl([row]))).skipped == {}


# ---------------------------------------------------------------- bad input


# Without the time of its making, so that the names of the tests are always the same.
CUT = gzip.compress(random.Random(0).randbytes(999), mtime=0)[:500]


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.txt", "wide".encode("utf-16"), "binary, UTF-16 or UTF-32, not utf-8 text (a.txt)"),
        ("a.txt", "ä".encode() * 9 + b"\xc3", "the text is not utf-8: byte 18 (a.txt)"),
        ("a.jsonl", "\n\n", "the table is empty (a.jsonl)"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "as jsonl: a list, not an object (a.jsonl:2)"),
        ("a.jsonl", '{"text": "a"}\n{"text": 5}\n', "text is missing or not a text (a.jsonl:2)"),
        ("a.jsonl", '{"text": null}\n{"text": ""}\n{"id": 1}\n', "the text is empty"),
        ("a.txt", " \n\n", "blank, or one character alone (a.txt)"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}\n', "too few rows"),
        ("a.json", '[\n{"text": "a"},\n{"text":', "Expecting value (a.json)"),
        ("a.csv", 'text\n"never closed\n' * 3, "a row cannot be read"),
        ("a.csv", 'id,text\n1,"a\nb"\n2,"c" d\n', "expected after '\"' (a.csv:4)"),
        ("a.csv", b"text\n" + b"fine\r" * 9 + b"caf\xe9\rfine\r", "is not utf-8 (a.csv:11)"),
        ("a.csv", "text,text\na,b\n", "two columns are called text (a.csv:1)"),
        ("a.parquet", b"PAR1 no parquet", "cannot be read as parquet"),
        ("a.jsonl.zst", b"no zstd", "(a.jsonl.zst)"),
        ("a.txt.gz", CUT, "the file is damaged: Compressed file"),
    ],
)
def test_bad_file(name, content, words):
    write(name, content)
    assert words in message(lambda: prepare.prepare("x", input=name))
    assert os.listdir("data") == []


def test_text_pairs_and_preferences_are_three_datasets(tree):
    write("src/chat.jsonl", jsonl([{"prompt": "a", "answer": "b"}]))
    text = message(open_input, "src")
    assert "src/chat.jsonl holds pairs" in text and "src/sub/c.md holds text" in text
    write("tastes.jsonl", jsonl([{"prompt": "a", "chosen": "b", "rejected": "c"}]))
    text = message(open_input, "tastes.jsonl,src/chat.jsonl")
    assert "tastes.jsonl holds preferences" in text and "src/chat.jsonl holds pairs" in text


def test_what_a_folder_holds_besides_text_is_left_out_by_name(tree, capsys):
    write("src/logo.png", b"\x89PNG\0\1")
    write("src/old.txt", "caf\xe9".encode("latin-1"))
    write("src/wide.txt", "wide".encode("utf-16"))
    write("src/empty.py", "\n")
    write("src/other.jsonl", '{"id": 1}\n')
    write("src/__pycache__/a.pyc", b"\0")  # in silence
    prepare.prepare("x", input="src", tokenizer="byte")
    names = ("a.py", "b.py", "sub/c.md")
    assert texts_in("src") == [f"text of src/{name}\n" for name in names]
    out = capsys.readouterr().out
    assert "pycache" not in out
    for name, why in {
        "logo.png": "the file is binary",
        "old.txt": "the text is not utf-8: byte 3",
        "wide.txt": "the file is binary, UTF-16 or UTF-32",
        "empty.py": "the file is empty",
        "other.jsonl": "there is no field text among: id",
    }.items():
        assert f"left out src/{name}: {why}" in out
