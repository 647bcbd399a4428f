"""The notebooks of docs/: stored with their outputs, and they run from first to last cell."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.commands import ROOT

PICTURES = {"tour": 6, "gpt2_to_llama": 7}
PRINTED = "attention: Attention -> Attention|best validation loss|nats per character"


def cells_of(name):
    return json.loads((ROOT / f"docs/{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def pictures_of(cells):
    """The figures, PNG in base64, that cells of a notebook show."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]
    return [
        output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})
    ]


def printed_by(cell):
    return "".join("".join(output["text"]) for output in cell["outputs"] if "text" in output)


LESSON = {
    cell["id"]: "".join(cell["source"])
    for cell in cells_of("gpt2_to_llama")
    if cell["cell_type"] == "code"
}


@pytest.mark.parametrize("name", PICTURES)
def test_it_is_stored_with_its_outputs(name):
    cells = cells_of(name)
    assert all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code")
    assert len(pictures_of(cells)) == PICTURES[name]
    assert (ROOT / f"docs/{name}.ipynb").stat().st_size < 400_000


def test_an_exercise_has_room_for_an_answer_and_a_folded_solution():
    cells = cells_of("gpt2_to_llama")
    names = [cell["id"] for cell in cells]
    exercises = [name for name in names if name.startswith("exercise-")]
    solutions = [cell for cell in cells if "# @title Solution" in "".join(cell["source"])]
    assert len(exercises) == len(solutions) == 5
    for name in exercises:
        answer = cells[names.index(name) + 1]
        assert answer["cell_type"] == "code" and answer["source"] == ["# your answer"]
    for cell in solutions:
        folded = {"source_hidden": True, "outputs_hidden": True}
        assert cell["metadata"]["jupyter"] == folded and cell["metadata"]["cellView"] == "form"


@pytest.mark.parametrize("begins", ["import ast", "from bench.ablation import page_figures"])
def test_the_cells_that_train_nothing_print_what_is_stored(begins, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (cell,) = [cell for cell in cells_of("tour") if "".join(cell["source"]).startswith(begins)]
    exec("".join(cell["source"]), {"Path": Path, "show": lambda figure: None})
    assert capsys.readouterr().out == printed_by(cell), "jupyter execute --inplace docs/tour.ipynb"


def test_the_lesson_runs(monkeypatch, capsys):
    """In this process, with one step of training, and with figures that are not written. What no
    training decides is what is stored."""
    pytest.importorskip("IPython.display")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)
    stored = {cell["id"]: cell for cell in cells_of("gpt2_to_llama")}
    shown = []
    names = {}
    for name, source in LESSON.items():
        if name == "verdict":
            continue
        source = source.replace("steps = 200", "steps = 1").replace("65, 128)", "65, 4096)")
        exec(source, names)
        names["show"] = shown.append
        out = capsys.readouterr().out
        assert name == "train" or out == printed_by(stored[name]), "execute the notebook again"
    assert len(shown) == PICTURES["gpt2_to_llama"]


def test_the_lesson_on_another_machine(monkeypatch, tmp_path):
    """Its first cell clones the repo, and refuses a torch that the project does not allow."""
    texts = [(ROOT / f"docs/gpt2_to_llama.{kind}").read_text() for kind in ("md", "ipynb")]
    (address,) = re.findall(r'REPOSITORY = "https://(github)\.com/(.*)"', LESSON["check"])
    badge = f"research.google.com/{'/'.join(address)}/blob/main/docs/gpt2_to_llama.ipynb"
    assert all(badge in text for text in texts)
    (needed,) = re.findall(r"NEEDED = \((\d+), (\d+)\)", LESSON["check"])
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={".".join(needed)}"' in project and 'requires-python = ">=3.11"' in project

    commands = []
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(subprocess, "run", lambda words, check: commands.append(words))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nanoparts").mkdir()
    exec(LESSON["check"], {})
    assert commands[0][:2] == ["git", "clone"] and Path.cwd() == tmp_path / "nanoparts"
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu126")
    with pytest.raises(SystemExit, match="pip install"):
        exec(LESSON["check"], {})


@pytest.mark.slow
def test_the_tour_runs_from_its_own_folder(tmp_path, monkeypatch):
    """With ten steps of training. Each figure is there, and the text is the model's."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(ROOT / "docs/tour.ipynb", as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        cell.source = cell.source.replace("steps = 300", "steps = 10")
    before = sorted(os.listdir(ROOT))
    place = {"metadata": {"path": ROOT / "docs"}}
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place)
    client.execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    pictures = pictures_of(notebook.cells)
    assert len(pictures) == PICTURES["tour"] and all(len(picture) > 5000 for picture in pictures)
    assert all(words in printed for words in PRINTED.split("|"))
    assert sorted(os.listdir(ROOT)) == before
