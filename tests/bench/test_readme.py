"""README's first screen: each of its numbers is the one that the stored rows give."""

import math
import re

import pytest

from bench.ablation import rows, worth
from common.files import ROOT

ANSWER = ROOT / "bench/results/answer"
SETTINGS = ("llama", "llama/small", "llama/python", "llama/large", "llama/adamw")
CHANGES = {  # row of the table: the arm that makes it in GPT-2, and the one that undoes it in LLaMA
    "learned positions → RoPE": ("rope", "learned positions"),
    "GELU → SwiGLU": ("swiglu", "gelu"),
    "LayerNorm → RMSNorm": ("rmsnorm", "layernorm"),
    "biases → none": ("no biases", "biases"),
    "tied → untied output matrix": ("untied head", "tied head"),
    "all five": ("all of llama", None),
}


def worths(folder):
    """{arm: its worth in tokens} of a stored sweep."""
    runs = rows.load(ANSWER / folder)
    curve = worth.curve_of(runs)
    means = runs.query("current and purpose == 'report' and status == 'done' and not stuck")
    means = means.groupby("arm").val_loss_report.mean()
    return {arm: curve.worth(loss, math.nan, 1)[0] for arm, loss in means.items()}


@pytest.fixture(scope="module")
def text():
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_the_five_changes(text):
    gpt2 = worths("gpt2")
    settings = [worths(folder) for folder in SETTINGS]
    for change, (made, undone) in CHANGES.items():
        (row,) = re.findall(rf"^\| {re.escape(change)} \| (.*)$", text, re.MULTILINE)
        in_gpt2, in_llama, across, *_ = row.split(" | ")
        assert in_gpt2 == f"{gpt2[made]:.2f} ×", change
        if undone:
            found = [1 / setting[undone] for setting in settings]
            assert in_llama == f"{found[0]:.2f} ×", change
            assert across == f"{min(found):.2f} to {max(found):.2f}", change
    assert f"plain GPT-2 needs {gpt2['rope']:.2f} times the training text" in text


def test_the_optimizer(text):
    found = [worths(base)["adamw"] for base in ("gpt2", "llama")]
    assert f"GPT-2 drops to {found[0]:.2f} × and LLaMA to {found[1]:.2f} ×" in text


def test_the_lines_of_the_two_models(text):
    for name in ("model.py", "model_llama.py"):
        lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        assert re.search(rf"`{name}` is [\w-]+ in {lines}\b", text), (name, lines)
