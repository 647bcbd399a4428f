"""extras/compare_texts.py: the columns, and the texts in them."""

import json
import re
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

import sample
from common.errors import UserError
from extras import compare_texts


def test_columns(capsys, monkeypatch):
    """On a terminal of 83 columns."""
    stdout = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(compare_texts, "sys", SimpleNamespace(stdout=stdout))
    for key, value in (("TERM", "xterm-256color"), ("COLUMNS", "83")):
        monkeypatch.setenv(key, value)
    texts = ["one two three " * 8, "中文字" * 30 + "\nend\x07[bold]"]
    compare_texts.show_columns(["first", "[second]"], texts)
    shown = re.sub("\033.*?m", "", capsys.readouterr().out)
    lines = [line.split("│") for line in shown.splitlines() if "│" in line]
    assert all(cell_len(line) <= 83 for line in shown.splitlines())
    assert [cell.strip() for cell in lines[0]] == ["first", "[second]"]
    left, right = zip(*lines[1:], strict=True)
    assert " ".join(" ".join(left).split()) == texts[0].strip(), "words are not broken"
    assert "".join(cell.strip() for cell in right) == "中文字" * 30 + "end\\x07[bold]"
    monkeypatch.setenv("COLUMNS", "60")  # too narrow
    compare_texts.show_columns(["first", "second"], ["one", "two"])
    assert capsys.readouterr().out == "first:\none\n\nsecond:\ntwo\n"


def test_each_model_writes_what_sample_py_writes(runs, capsys):
    options = ["--start=the k", "--max_new_tokens=9", "--num_samples=2", "--device=cpu"]
    texts = []
    for run in runs:
        sample.main([f"--out_dir={run}", *options, "--jsonl"])
        texts.append([json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()])
    compare_texts.main([*runs, *options])
    expected = ""
    for pair in zip(*texts, strict=True):
        columns = [f"{run}:\nthe k{text}" for run, text in zip(runs, pair, strict=True)]
        expected += "\n\n".join(columns) + "\n---------------\n"
    assert capsys.readouterr().out == expected
    compare_texts.main([*runs, *options, "--jsonl"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["model"] for row in rows] == runs * 2
    one = sample.Opened("one", *sample.load(runs[0]), ["the king"])
    config = sample.build_config({"chat": True, "start": "a message", "max_new_tokens": 0})
    compare_texts.write_side_by_side([one], config)
    assert capsys.readouterr().out == "one:\n\n---------------\n"  # without its template
    with pytest.raises(UserError, match="two models"):
        compare_texts.main([runs[0]])
