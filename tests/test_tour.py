"""docs/tour.ipynb: committed without outputs, and it runs from the first cell to the last."""

import json
import os

import pytest

from common.files import ROOT

PATH = ROOT / "docs/tour.ipynb"


def test_it_is_committed_without_outputs():
    cells = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert PATH.stat().st_size < 20_000


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
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert len(pictures) == 6 and all(len(output.data["image/png"]) > 5000 for output in pictures)
    for words in (
        "attention: Attention -> Attention",
        "best validation loss",
        "nats per character",
    ):
        assert words in printed
    assert sorted(os.listdir(ROOT)) == before and os.listdir(tmp_path)
