"""Files that survive a crash: only what is ours is removed, and what cannot be read is one line."""

import errno
import os
import sys
from unittest.mock import Mock

import pytest

from common import files
from common.errors import Failure
from helpers.texts import message


def refuse(number):
    return Mock(side_effect=OSError(number, os.strerror(number)))


def test_leftovers_are_ours_alone(tmp_path):
    path = tmp_path / "data"
    ours = [files.partial(path), files.partial(path)]
    others = [".data.partial", "data.old", ".data.partial-0123", ".datas.partial-" + "0" * 16]
    for other in [*ours, *(tmp_path / name for name in others)]:
        other.mkdir()
    assert set(files.leftovers(path)) == set(ours)
    assert files.leftovers(tmp_path / "nowhere" / "data") == []
    path.parent.joinpath("rows").write_text('{"a": 1}\n{"a"')  # a kill cut the last line short
    files.append(tmp_path / "rows", {"b": 2})
    assert (tmp_path / "rows").read_text() == '{"a": 1}\n{"a"\n{"b": 2}\n'


@pytest.mark.parametrize("operation", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, operation):
    path = tmp_path / "a.json"
    files.write(path, "old")
    monkeypatch.setattr(files.os, operation, refuse(errno.ENOSPC))
    with pytest.raises(Failure, match=r"cannot write: No space left on device .*free the disk"):
        files.write(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_removing_warns_once_and_leaves_what_a_link_points_to(tmp_path, monkeypatch, capsys):
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    files.remove(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    monkeypatch.setattr(files.shutil, "rmtree", refuse(errno.EBUSY))
    files.remove(tmp_path)
    files.remove(tmp_path)
    assert capsys.readouterr().err.count("warning: cannot remove") == 1


def test_a_file_system_that_cannot_flush_folders(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(files.os, "fsync", refuse(errno.EINVAL))
    files.sync(tmp_path)
    assert "cannot flush folders" in capsys.readouterr().err
    with pytest.raises(OSError):  # a file that cannot be flushed is not safe
        files.sync(tmp_path / "file")


@pytest.mark.parametrize(
    "content, words",
    [
        (b"{", "not JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": {"b": 1e999}}', "1e999 is not a JSON number"),
        (b"[" * 200_000 + b"]" * 200_000, "nested too deep"),
        (b"[1]", "this JSON is a list, not a dict"),
        (None, "cannot read: No such file"),
    ],
)
def test_json_that_cannot_be_read_is_one_line(tmp_path, content, words):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    said = message(files.read_json, path, "do this")
    assert words in said and said.endswith(f"({path}): do this")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_warning_takes_the_place_of_a_bar(capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    files.warn_once("the disk is slow")
    begin = "\r\033[K" if is_terminal else ""
    assert capsys.readouterr().err == f"{begin}warning: the disk is slow\n"
