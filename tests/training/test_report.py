"""What a run says and returns: estimates, reasons, its result; and what it refuses to train on."""

import itertools

import pytest
import torch

import train
from common import runtime
from common.errors import UserError
from helpers.runs import arguments, losses, made, ready
from parts.architectures import configure, make
from training import report, run_folder
from training.optim import parameter_groups
from weights import checkpoint


def test_main_returns_what_the_run_gave(data_dir, tmp_path):
    result = train.main(arguments(data_dir, tmp_path / "run", "--max_iters=3"))
    assert result.status == 0 and result.folder == checkpoint.find(tmp_path / "run")
    assert [row["step"] for row in result.rows if "val_loss" in row] == [0, 3]
    assert [row["loss"] for row in result.rows if "loss" in row][-1] == losses(tmp_path / "run")[
        -1
    ][1]
    again = train.main(["--init_from=resume", f"--out_dir={tmp_path / 'run'}"])
    assert again.status == 0 and again.folder == result.folder


def test_a_resumed_run_says_where_it_begins_and_that_nobody_asked(data_dir, tmp_path, capsys):
    train.main(arguments(data_dir, tmp_path / "run", "--max_iters=2"))
    assert "as asked" not in capsys.readouterr().out
    train.main(["--init_from=resume", f"--out_dir={tmp_path / 'run'}", "--max_iters=4"])
    printed = capsys.readouterr().out
    assert "resumed after step 2 of 4\n" in printed and "as asked" not in printed


@pytest.mark.parametrize("pays, dtype", [(0, "bfloat16"), (1e30, "float32")])
def test_the_length_of_the_run_explains_the_number_format(
    data_dir, tmp_path, capsys, monkeypatch, pays, dtype
):
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(runtime, "BFLOAT16_PAYS", pays)
    run = ready(data_dir, tmp_path)
    train.report.describe(run)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dtype")]
    assert line.startswith(f"dtype {dtype} (") and "run" in line


def test_the_time_left_is_said_within_seconds(data_dir, tmp_path, capsys, monkeypatch):
    """Of slow steps, long before the first report; it is said once and adds no row to the log."""
    clock = itertools.count(0, 2.0)
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(run_folder.time, "perf_counter", lambda: next(clock))
    train.main(arguments(data_dir, tmp_path / "run", "--max_iters=12", "--log_interval=12"))
    printed = capsys.readouterr().out
    assert printed.count(" steps left\n") == 1 and printed.index("steps left") < printed.index(
        "iter 12"
    )
    assert [step for step, _ in losses(tmp_path / "run")] == [12]


def test_epochs_are_told_as_people_do():
    assert (
        report.epochs_text(0.031) == "3.1 % of an epoch" and report.epochs_text(1) == "1.0 epochs"
    )
    assert report.epochs_text(0.9999) == "1 epoch"


def test_the_default_dataset_offers_a_small_one(tmp_path):
    with pytest.raises(UserError, match="gpt2_shakespeare.py.*18 GB.*prepare.py openwebtext"):
        train.main([f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'run'}", "--device=cpu"])


def test_biases_of_experts_do_not_decay():
    """They have two dimensions, (experts, width)."""
    model = make(configure({"arch": "gpt-oss", "n_layer": 1, "n_head": 8, "n_embd": 32}))
    decaying, others = parameter_groups(model, 0.1)
    stacked = {
        name for name, p in model.named_parameters() if name.endswith("bias") and p.dim() == 2
    }
    assert stacked and stacked <= set(others["names"]) and others["weight_decay"] == 0


def pretrained_folder(folder, positions=16):
    """A small LLaMA as transformers writes it, with a tokenizer of its own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=300, hidden_size=24, intermediate_size=40, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=2, max_position_embeddings=positions)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


def test_weights_are_not_trained_past_their_positions(data_dir, tmp_path, capsys):
    run = arguments(data_dir, tmp_path / "run", "--block_size=64")
    sizes = ("--n_layer", "--n_head", "--n_embd")
    run = [arg for arg in run if not arg.startswith(sizes)]
    made([*run, f"--init_from={pretrained_folder(tmp_path / 'hf')}"])
    assert "note: block_size 64 -> 16, the longest of these weights" in capsys.readouterr().out


def test_data_of_another_tokenizer_are_refused(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("weights.hf.same_tokens", lambda name, tokenizer: False)
    run = [arg for arg in arguments(data_dir, tmp_path / "run") if "--n_" not in arg]
    with pytest.raises(
        UserError, match="not prepared with the tokenizer of these weights.*prepare.py NAME"
    ):
        train.main([*run, f"--init_from={pretrained_folder(tmp_path / 'hf')}"])
    assert not (tmp_path / "run").exists()
