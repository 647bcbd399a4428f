"""The doctor: each mistake that it looks for is found, and nothing is written."""

import inspect
import json
import random
import re
from collections import namedtuple

import pytest
import torch

import train
from extras import doctor
from helpers.runs import arguments, equal, ready
from prepare import prepare
from training import ranks, step_costs
from training.optim import OPTIMIZER


def mutated(function, old, new):
    """A function with another line in its source: a mistake that somebody could make."""
    source = inspect.cleandoc("\n" + inspect.getsource(function))
    assert source.count(old) == 1
    names = dict(vars(inspect.getmodule(function)))
    exec(source.replace(old, new), names)
    return names[function.__name__]


@pytest.mark.parametrize(
    "more",
    [
        "--model=gpt2 --dropout=0.1 --gradient_accumulation_steps=2",
        *(f"--model=llama --optimizer={word}" for word in OPTIMIZER),
        "--norm=batchnorm",
        "--model=llama --activation_checkpointing=True",
        "--dtype=bfloat16 --model=llama",
    ],
)
def test_doctor_finds_a_healthy_run_healthy_and_writes_nothing(data_dir, tmp_path, capsys, more):
    options = f"--learning_rate=1e-2 --max_iters=50 {more}"
    assert doctor.main(arguments(data_dir, tmp_path / "run", *options.split())) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(\S.*?)  +ok  ", out, re.MULTILINE) == [*doctor.CHECKS], out
    assert not list(tmp_path.iterdir())


def test_without_a_config_the_doctor_checks_what_readme_begins_with():
    chosen = {"": "shakespeare_char", "--device=cpu": "shakespeare_char", "--dataset=mine": "mine"}
    chosen["--rope_theta=500000"] = "shakespeare_char"  # a key of LLaMA
    for words, dataset in chosen.items():
        assert doctor.read(words.split()).config.dataset == dataset


def test_doctor_after_training(data_dir, tmp_path, capsys):
    run = arguments(data_dir, tmp_path / "run", "--learning_rate=1e-2", "--max_iters=30")
    train.main(run)
    assert doctor.main([*run, "--init_from=resume", "--max_iters=60"]) == 0
    assert "(weights are trained)" in capsys.readouterr().out


def test_the_doctor_looks_at_the_answers_of_pairs(tmp_path, capsys):
    """Prompts that all begin alike, as instructions do, are no overlap of the splits."""
    rng = random.Random(1)
    prompt = "Below is an instruction that describes a task. Write a response that completes it. "
    answers = ["".join(rng.choice("abcdefgh ") for _ in range(90)) for _ in range(40)]
    rows = [{"prompt": f"{prompt}Add: ", "answer": answer} for answer in answers]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare("pairs", str(tmp_path / "pairs.jsonl"), "byte", str(tmp_path))
    keys = ("--max_iters=4", "--dataset=pairs", "--block_size=180", "--learning_rate=1e-2")
    status = doctor.main(arguments(tmp_path, tmp_path / "run", *keys))
    assert status == 0, capsys.readouterr().out


WEIGHT = "all_targets / (n_targets * runtime.world_size)"


def wrong_dtype(run, monkeypatch):
    run.runtime.autocast = lambda: torch.autocast("cpu", torch.bfloat16)


def compiler_fails(run, monkeypatch):
    def net(x, y):
        raise RuntimeError("the compiler is broken\nin many lines")

    run.runtime.compile, run.net = True, net


def compiled_otherwise(run, monkeypatch):
    """In place, as on a CPU."""
    run.runtime.compile = True
    block = run.model.blocks[0]
    block._compiled_call_impl = lambda *args: torch.nan * block.forward(*args)


def disk_full(run, monkeypatch):
    usage = namedtuple("usage", "free")(100_000)
    monkeypatch.setattr(step_costs.shutil, "disk_usage", lambda path: usage)


def overlap(run, monkeypatch):
    splits = run.data.splits
    splits["val"].learned = splits["train"].learned[1000:1600]


def loud_head(run, monkeypatch):
    with torch.no_grad():
        run.model.lm_head.weight *= 30


def leak(run, monkeypatch):
    """The logits know the target, as with a mask that is off by one."""
    forward = run.model.forward

    def leaking(x, y):
        known = torch.nn.functional.one_hot(y, run.model.config.vocab_size)
        logits = forward(x, y)[0] + 0.5 * known
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    run.model.forward = leaking


def too_slow(run, monkeypatch):
    run.config.learning_rate = 1e-9


def equal_micro_batches(run, monkeypatch):
    return mutated(train.train_step, WEIGHT, "config.gradient_accumulation_steps")


def unseeded_dropout(run, monkeypatch):
    seeding = "torch.manual_seed(seed_for(config.seed, DROPOUT, run.step, number))"
    return mutated(train.train_step, seeding, "pass")


def lost_moments(run, monkeypatch):
    monkeypatch.setattr(ranks, "scatter", lambda *args: None)


@pytest.mark.parametrize(
    "check, spoil, words",
    [
        ("device", wrong_dtype, r"a matrix product is \de-03 off"),
        ("compile", compiler_fails, "RuntimeError: the compiler is broken in many lines: .*=False"),
        ("compile", compiled_otherwise, "compiled, .* eager"),
        ("disk", disk_full, r"100\.0 kB free in .*, .* needed: free space"),
        ("data", overlap, r"\d+ of \d+ pieces of validation text are in the train split"),
        ("initial loss", loud_head, "the logits' spread adds"),
        ("initial loss", leak, "targets leak"),
        ("one batch", too_slow, "in 200 steps at learning_rate=1e-09 .*: change --learning_rate"),
        ("accumulation", equal_micro_batches, "gradients .* apart"),
        ("determinism", unseeded_dropout, "random numbers"),
        ("resume", lost_moments, "state is missing from the checkpoint"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_doctor_finds_what_is_wrong(data_dir, tmp_path, monkeypatch, capsys, check, spoil, words):
    """In that check, with its fix in the line. Each check leaves the run as it was."""
    run = ready(data_dir, tmp_path, "--model=llama", "--learning_rate=1e-2", "--dropout=0.1")
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    monkeypatch.setattr(doctor, "CHECKS", {check: doctor.CHECKS[check]})
    assert doctor.doctor(run) == 0
    assert equal(run.model.state_dict(), before) and run.model.training and run.step == 0
    capsys.readouterr()
    step = spoil(run, monkeypatch) or train.train_step
    monkeypatch.setattr(train, "train_step", step)
    assert doctor.doctor(run) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^{check} +FAILED  .*{words}", out, re.MULTILINE), out
