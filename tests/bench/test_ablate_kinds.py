"""Sweeps whose runs are not one process on one text: several processes, mixtures, pairs."""

import json

import pytest

import ablate
from bench.ablation import launch, sweep
from common.errors import UserError
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
@pytest.mark.parametrize(
    "dataset, kind, why",
    [("bytes,more", "mixture", "several datasets"), ("answers", "pairs", "prompts and answers")],
)
def test_a_mixture_and_pairs_are_measured_for_what_they_are(
    two_kinds, tmp_path, dataset, kind, why
):
    out = tmp_path / "out"
    what = [ROPE, f"--dataset={dataset}", "--seeds=1", "--screening", "--time_forms=False"]
    assert ablate.main(arguments(two_kinds, out, *what)) == 0
    content, rows = json.loads((out / "sweep.json").read_text()), rows_of(out)
    assert content["data"]["kind"] == kind and len(rows) == 3
    for row in rows.values():
        assert row["status"] == "done" and row["final_val_loss"] < row["first_val_loss"]
        assert {entry["why"] for entry in row["extrapolation"].values()} == {
            f"not measured on {why}"
        }
        # Nats per answer's token are no bits per byte of the pairs.
        assert (row["bits_per_byte"] is None) == (kind == "pairs")


def test_a_run_of_several_processes_is_started_by_torchrun():
    job = launch.Job("a", 0, 1, "report", "out", {"seed": 3}, "c", "h", "d", processes=2)
    wanted = "torchrun --standalone --nproc_per_node=2 train.py --seed=3 --out_dir=out"
    assert job.command.replace(launch.TRAINER, "train.py") == wanted
    assert launch.argument_list(job)[1:4] == ["-m", "torch.distributed.run", "--standalone"]


def test_processes_share_the_cores_and_the_gpus(monkeypatch):
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert launch.worker_slots(2, "cpu", 2) == [(None, 2)] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,6,7")
    assert launch.worker_slots(None, "cuda", 2) == [("2,5", 2), ("6,7", 2)]
    with pytest.raises(UserError, match="4 GPUs are visible .processes=8.: choose fewer"):
        launch.worker_slots(None, "cuda", 8)


@pytest.mark.parametrize(
    "what, wanted",
    [
        (["--processes=2"], "gradient_accumulation_steps=1 is not divisible by 2 ranks"),
        (["--processes=2", "--match=time"], "match=time times one process"),
        (["--curve=[1]"], "curve holds 1, which is the base itself"),
        (["--curve=[-1]"], "not a positive number"),
        (["--dataset=bytes,words"], "different tokenizers"),
    ],
)
def test_what_no_sweep_can_do_is_refused(two_kinds, tmp_path, what, wanted):
    with pytest.raises(UserError, match=wanted):
        sweep.Sweep(arguments(two_kinds, tmp_path / "out", ROPE, *what), "")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_runs_of_two_processes(data_dir, tmp_path):
    out = tmp_path / "out"
    what = [ROPE, "--processes=2", "--gradient_accumulation_steps=2", "--seeds=1", "--screening"]
    what += ["--workers=1", "--time_forms=False", "--again=False"]
    assert ablate.main(arguments(data_dir, out, *what)) == 0
    rows = rows_of(out)
    assert [row["status"] for row in rows.values()] == ["done", "done"]
    assert rows["base", 0, 1, "report"]["command"].startswith("torchrun --standalone ")
    costs = [json.loads(line) for line in (out / "costs.jsonl").read_text().splitlines()]
    assert all(row["processes"] == 2 and row["step_ratio"] is None for row in costs)
