"""Sweeps whose runs are not on one text: mixtures, pairs."""

import json

import pytest

import ablate
from helpers.ablation import arguments, arm, rows_of
from prepare import prepare

ROPE = arm(rope=dict(position="rope"))


@pytest.fixture(scope="module")
def two_kinds(data_dir):
    """Beside words: more words, and pairs, with the same tokens."""
    text = (data_dir / "words.txt").read_text()
    (data_dir / "more.txt").write_text(text[::-1], encoding="utf-8")
    words = text.split()
    pairs = [{"prompt": f"{a} ", "answer": b} for a, b in zip(words, words[1:], strict=False)]
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs[:300])
    (data_dir / "answers.jsonl").write_text(lines, encoding="utf-8")
    prepare("more", input=str(data_dir / "more.txt"), tokenizer="byte", data_dir=str(data_dir))
    prepare("bytes", input=str(data_dir / "words.txt"), tokenizer="byte", data_dir=str(data_dir))
    path = str(data_dir / "answers.jsonl")
    prepare("answers", input=path, tokenizer="byte", data_dir=str(data_dir))
    return data_dir


@pytest.mark.slow
@pytest.mark.parametrize("dataset, kind", [("bytes,more", "mixture"), ("answers", "pairs")])
def test_a_mixture_and_pairs_are_measured_for_what_they_are(two_kinds, tmp_path, dataset, kind):
    out = tmp_path / "out"
    what = [ROPE, f"--dataset={dataset}", "--seeds=1", "--screening"]
    assert ablate.main(arguments(two_kinds, out, *what)) == 0
    content, rows = json.loads((out / "sweep.json").read_text()), rows_of(out)
    assert content["data"]["kind"] == kind and len(rows) == 3
    for row in rows.values():
        assert row["status"] == "done" and row["final_val_loss"] < row["first_val_loss"]
        assert row["extrapolation"] == {}
        # Nats per answer's token are no bits per byte of the pairs.
        assert (row["bits_per_byte"] is None) == (kind == "pairs")
