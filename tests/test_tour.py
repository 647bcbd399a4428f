"""docs/tour.ipynb: stored with its outputs, and it runs from the first cell to the last."""

import json
import os
from pathlib import Path

import pytest

from common.files import ROOT

PATH = ROOT / "docs/tour.ipynb"
PICTURES = 6


def pictures_of(cells):
    """The figures, PNG in base64, that cells of a notebook show."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]
    return [
        output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})
    ]


def test_it_is_stored_with_its_outputs():
    cells = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
    assert all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code")
    assert len(pictures_of(cells)) == PICTURES and PATH.stat().st_size < 400_000


@pytest.mark.parametrize("begins", ["import ast", "from bench.ablation import page_figures"])
def test_the_cells_that_train_nothing_print_what_is_stored(begins, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    cells = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
    (cell,) = [cell for cell in cells if "".join(cell["source"]).startswith(begins)]
    exec("".join(cell["source"]), {"Path": Path, "show": lambda figure: None})
    stored = ["".join(output["text"]) for output in cell["outputs"] if "text" in output]
    assert capsys.readouterr().out == "".join(stored), "jupyter execute --inplace docs/tour.ipynb"


@pytest.mark.slow
def test_it_runs_from_its_own_folder(tmp_path, monkeypatch):
    """With ten steps of training. Each figure is there, and the text is the model's."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tour = nbformat.read(PATH, as_version=4)
    nbformat.validate(tour)
    settings = [cell for cell in tour.cells if cell.source.startswith("steps = 300")]
    settings[0].source = "steps = 10"
    before = sorted(os.listdir(ROOT))
    client = nbclient.NotebookClient(
        tour, timeout=600, kernel_name="python3", resources={"metadata": {"path": PATH.parent}}
    )
    client.execute()

    outputs = [output for cell in tour.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    pictures = pictures_of(tour.cells)
    assert len(pictures) == PICTURES and all(len(picture) > 5000 for picture in pictures)
    for words in (
        "attention: Attention -> Attention",
        "python train.py --model=llama",
        "best validation loss",
        "nats per character",
    ):
        assert words in printed
    assert sorted(os.listdir(ROOT)) == before and os.listdir(tmp_path)
