"""What a run prints: names, peaks, warnings, progress, and the commands to type next."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import train
from common import commands, errors
from common.commands import ROOT
from helpers.runs import new_run, ready
from parts import costs
from parts.architectures import configure
from training import description, terminal
from training.description import model_name, warn_of_epochs
from training.settings import TrainConfig, read_config

LLAMA, GPT2 = "config/llama_shakespeare.py", "config/gpt2_shakespeare.py"


@pytest.mark.parametrize("argv", [[LLAMA], [LLAMA, "--n_layer=2"], ["config/best_plays.py"], []])
def test_the_other_model_is_suggested_after_a_config_that_has_a_twin(argv, capsys):
    """Unless the user typed more: the other model may not take the same keys."""
    settings = read_config(argv, "")
    terminal.print_next_commands("ckpt", settings.config, settings.command_line, "train.py")
    twin = f"compare with GPT-2:\n{commands.command('train.py', GPT2)}\n"
    assert (twin in capsys.readouterr().out) == (argv == [LLAMA])


@pytest.mark.parametrize(
    "keys, name",
    [
        ({}, "gpt2"),
        (dict(mlp="relu2"), "gpt2 with mlp=relu2"),
        (dict(arch="qwen3-next", n_layer=5), "qwen3-next"),
        (dict(arch="falcon", norm="dyt", position="alibi"), "falcon with position=alibi norm=dyt"),
    ],
    ids=str,
)
def test_a_run_names_the_parts_that_are_swapped(keys, name):
    values = dict(model="gpt2", arch=None) | keys
    run = SimpleNamespace(config=SimpleNamespace(**values))
    run.model = SimpleNamespace(config=configure(values))
    assert model_name(run) == name


def test_a_long_command_is_wrapped_and_can_be_pasted():
    words = [LLAMA, "--out_dir=my run", *(f"--learning_rate=1e-{n}" for n in range(7))]
    text = commands.command("train.py", *words)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 < len(" ".join(words)) and len(lines) < len(words)
    shell = ["sh", "-c", f"python() {{ printf '%s\\n' \"$@\"; }}\n{text}"]
    pasted = subprocess.run(shell, capture_output=True, text=True).stdout
    assert pasted.splitlines() == [commands.script("train.py"), *words]
    assert commands.command("train.py", "x" * 200).splitlines()[-1] == "  " + "x" * 200


def test_long_lines_are_folded_on_a_terminal_only(monkeypatch):
    line = "disk          ok      " + "many words of advice " * 8
    assert errors.folded(line, 22) == line
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    first, *others = errors.folded(line, 22).splitlines()
    assert first.startswith("disk") and others and max(map(len, [first, *others])) <= 80
    assert all(other.startswith(" " * 22) for other in others)
    assert " ".join([first, *others]).split() == line.split()
    assert "--key=value " * 20 in errors.folded("`--key=value " + "--key=value " * 20 + "`")


def test_configs_of_the_repo_are_found_from_another_directory(tmp_path, monkeypatch, capsys):
    """And data are written where data_dir says. A config of the same name here comes first."""
    monkeypatch.chdir(tmp_path)
    config = read_config([LLAMA, "--device=cpu"], "").config
    assert (config.model, config.max_iters, config.data_dir) == ("llama", 1080, "data")
    assert f"reading {ROOT / LLAMA}" in capsys.readouterr().err
    (tmp_path / "config").mkdir()
    (tmp_path / LLAMA).write_text("max_iters = 3000")
    assert read_config([LLAMA], "").config.max_iters == 3000
    with pytest.raises(errors.UserError, match="cannot read the config file"):
        read_config(["config/nowhere.py"], "")


@pytest.mark.parametrize(
    "name, tflops",
    {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA GeForce RTX 4090": 165,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    }.items(),
)
def test_a_known_gpu_has_its_makers_peak(monkeypatch, name, tflops):
    monkeypatch.setattr(description.torch.cuda, "get_device_name", lambda device: name)
    peak = description.peak_flops(SimpleNamespace(device="cuda:0", dtype="bfloat16"))
    assert peak == (tflops and tflops * 1e12)
    for device, dtype in (("cpu", "bfloat16"), ("cuda:0", "float32")):
        assert description.peak_flops(SimpleNamespace(device=device, dtype=dtype)) is None


def test_the_peak_speed_is_of_all_devices(data_dir, tmp_path, monkeypatch):
    run = ready(data_dir, tmp_path)
    run.runtime.world_size = 2
    monkeypatch.setattr(description, "peak_flops", lambda runtime: 1e12)
    flops = costs.training_flops_per_token(description.variant_config(run), 16)
    assert description.peak_speed(run) == pytest.approx(2e12 / flops)


def test_an_evaluation_counts_its_batches(data_dir, tmp_path, monkeypatch):
    """Of each split that it scores, up to all of them; of train fewer, if that is many."""
    monkeypatch.setattr(train, "EVAL_TRAIN_TOKENS", 65)
    run = ready(data_dir, tmp_path, "--eval_tokens=130")
    counted = []
    run.progress = lambda *progress: counted.append(progress)
    run.step = run.config.max_iters
    train.score(run)
    last = {split: (done, total) for split, done, total in counted}
    assert last.keys() == {"train", "val", "all of val"} and last["val"] == (3, 3)
    assert last["train"] == (1, 1)
    assert all(done == total for done, total in last.values()) and last["all of val"][0] > 3
    assert len(counted) == sum(done for done, _ in last.values())


@pytest.mark.parametrize("on_a_terminal", [True, False])
def test_the_batches_are_on_the_bar_or_now_and_then_on_a_line(
    tmp_path, capsys, monkeypatch, on_a_terminal
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_a_terminal)
    monkeypatch.setattr(terminal, "SILENCE", 0.3)
    config = TrainConfig(out_dir=str(tmp_path), max_iters=50, warmup_iters=0)
    log = terminal.RunLog(new_run(config))
    capsys.readouterr()
    log.phase("evaluating")
    log.progress("val", 2, 7)  # too early
    log.counted_at -= 0.4
    log.progress("val", 3, 7)
    shown = capsys.readouterr().out
    assert "2 of 7" not in shown and "evaluating val: 3 of 7 batches" in shown
    assert ("(step 0 of 50)" in shown) == on_a_terminal
    log.close()


@pytest.mark.parametrize("steps, dropout, warned", [(21, 0.0, 1), (20, 0.0, 0), (21, 0.1, 0)])
def test_many_epochs_without_dropout_are_warned_of(capsys, steps, dropout, warned):
    model = torch.nn.Sequential(torch.nn.Dropout(dropout))
    data = SimpleNamespace(times_read=lambda samples: samples / 2)
    config = SimpleNamespace(max_iters=steps)
    warn_of_epochs(SimpleNamespace(config=config, step_samples=1, data=data, model=model))
    assert capsys.readouterr().err.count("--max_iters") == warned
