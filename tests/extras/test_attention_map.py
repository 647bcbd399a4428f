"""extras/attention_map.py: the picture, and its mistakes."""

import io

import pytest
import torch
from matplotlib.image import imread

from common.errors import UserError
from extras.attention_map import main, picture, read_settings
from helpers.commands import documented
from helpers.two_runs import two_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return two_runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("argv", documented("extras.attention_map"), ids=" ".join)
def test_the_commands_of_the_docs_are_read(argv):
    read_settings(argv)


def test_picture_is_a_png_with_a_panel_per_head():
    png = picture(torch.eye(30).repeat(3, 1, 1), ["$a_b", "␣", "中"] * 10, "a title")
    pixels = imread(io.BytesIO(png))
    assert png.startswith(b"\x89PNG") and pixels.shape[0] > 500 < pixels.shape[1]


def test_attention_is_written_as_a_picture(runs, tmp_path, capsys):
    out = tmp_path / "map.png"
    main([runs[0], "--start=the king", f"--out={out}", "--layer=1", "--device=cpu"])
    shown = capsys.readouterr()
    assert out.read_bytes().startswith(b"\x89PNG")
    assert shown.out == "" and "layer 1" in shown.err


@pytest.mark.parametrize(
    "number, more, words",
    [
        (0, ["--out=no/such/map.png"], "out=no/such/map.png"),
        (0, ["--out=notes.txt"], "out=notes.txt"),
        (0, ["--out=/dev/full"], "out=/dev/full"),
        (0, ["--layer=2"], "layer=2"),
        (1, ["--context=17"], "context=17"),  # GPT-2 has positions for 16
        (0, ["second"], "name one model"),
    ],
)
def test_mistakes(runs, number, more, words):
    with pytest.raises(UserError, match=words):
        main([runs[number], "--start=the", "--device=cpu", *more])
