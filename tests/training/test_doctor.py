"""--doctor and --check: each mistake they look for is found, and nothing is written."""

import dataclasses
import inspect
import json
import math
import re
import shutil
from collections import namedtuple

import pytest
import torch

import model_llama
import train
from common.errors import UserError
from common.files import ROOT
from helpers.runs import arguments, equal, ready
from helpers.texts import message
from prepare import prepare
from training import check as golden
from training import doctor, dry_run, parallel
from training.optim import OPTIMIZER, SCHEDULE


def mutated(function, old, new):
    """A function with another line in its source: a mistake that somebody could make."""
    source = inspect.cleandoc("\n" + inspect.getsource(function))
    assert source.count(old) == 1
    names = dict(vars(inspect.getmodule(function)))
    exec(source.replace(old, new), names)
    return names[function.__name__]


# ---------------------------------------------------------------- --doctor


@pytest.mark.parametrize(
    "more",
    [
        "--model=gpt2 --dropout=0.1 --gradient_accumulation_steps=2",
        *(f"--model=llama --optimizer={word}" for word in OPTIMIZER),
        *(f"--schedule={word}" for word in SCHEDULE),
        "--norm=batchnorm",
        "--dtype=bfloat16 --model=llama",
    ],
)
def test_doctor_finds_a_healthy_run_healthy_and_writes_nothing(start, tmp_path, capsys, more):
    assert start("run", f"--learning_rate=1e-2 --max_iters=50 --doctor {more}") == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(\S.*?)  +ok  ", out, re.MULTILINE) == [*doctor.CHECKS], out
    assert not list(tmp_path.iterdir())


def test_doctor_after_training(start, resume, capsys):
    start("run", "--learning_rate=1e-2 --max_iters=30")
    assert resume("run", "--max_iters=60 --doctor") == 0
    assert "(weights are trained)" in capsys.readouterr().out


WEIGHT = "(all_targets / (targets * runtime.world_size))"


def wrong_dtype(run, monkeypatch):
    run.runtime.autocast = lambda: torch.autocast("cpu", torch.bfloat16)


def compiler_fails(run, monkeypatch):
    def net(x, y):
        raise RuntimeError("the compiler is broken\nin many lines")

    run.runtime.compile, run.net = True, net


def compiled_otherwise(run, monkeypatch):
    run.runtime.compile, run.net = True, lambda x, y: run.model(x, y)[1] * 1.05


def disk_full(run, monkeypatch):
    usage = namedtuple("usage", "free")(100_000)
    monkeypatch.setattr(dry_run.shutil, "disk_usage", lambda path: usage)


def overlap(run, monkeypatch):
    splits = run.sources[0].splits
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
    seeding = "torch.manual_seed(seed_for(config.seed, 1, run.step, number))"
    return mutated(train.train_step, seeding, "pass")


def lost_moments(run, monkeypatch):
    monkeypatch.setattr(parallel, "scatter", lambda *args: None)


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
    assert doctor.doctor(run, train.train_step) == 0
    assert equal(run.model.state_dict(), before) and run.model.training and run.step == 0
    capsys.readouterr()
    step = spoil(run, monkeypatch) or train.train_step
    assert doctor.doctor(run, step) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^{check} +FAILED  .*{words}", out, re.MULTILINE), out


# ---------------------------------------------------------------- --check

LINES = "model = 'llama'\nlearning_rate, max_iters, warmup_iters = 1e-2, 60, 5\ndropout = 0.1\n"


@pytest.fixture(scope="module")
def recorded(data_dir, tmp_path_factory):
    """A folder with a config file and, in `results`, its golden curve."""
    folder = tmp_path_factory.mktemp("golden")
    (folder / "tiny.py").write_text(LINES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(golden, "GOLDEN", folder / "results")
        patch.setattr(golden, "STEPS", 40)
        assert train.main(question(data_dir, folder, "--check=record")).status == 0
    return folder


def question(data_dir, folder, *more):
    sizes = [word for word in arguments(data_dir, folder / "run") if "warmup" not in word]
    return [str(folder / "tiny.py"), *sizes, *more]


@pytest.fixture
def ask(data_dir, recorded, monkeypatch, capsys):
    """ask(*more): the exit status and the output of --check."""
    monkeypatch.setattr(golden, "GOLDEN", recorded / "results")

    def ask(*more):
        capsys.readouterr()
        status = train.main(question(data_dir, recorded, "--check", *more)).status
        return status, capsys.readouterr().out

    return ask


def curves_of(folder):
    return json.loads((folder / "results" / "tiny.json").read_text())


def test_a_golden_curve_holds_what_it_depends_on(recorded):
    [curve] = curves_of(recorded)
    assert len(curve["losses"]) == 40 and curve["losses"][-1] < curve["losses"][0]
    known = {"learning_rate": 1e-2, "position": "rope", "dropout": 0}
    assert curve["settings"] | known == curve["settings"]
    assert {"torch", "hardware", "git_commit", "device", "threads"} <= curve["versions"].keys()
    assert 1e-3 <= curve["tolerance"] < 0.1
    assert not (recorded / "run").exists()


@pytest.mark.parametrize(
    "more", ["", "--activation_checkpointing", "--dropout=0.2 --eval_interval=1 --position=rope"]
)
def test_the_right_loss_is_right(ask, recorded, more):
    status, out = ask(*more.split())
    assert status == 0 and "\nyes, the loss is right: over 40 steps" in out, out
    assert not (recorded / "run").exists()


def no_decay(monkeypatch):
    def make(model, config, runtime, real=train.make_optimizers):
        return real(model, dataclasses.replace(config, weight_decay=0.0), runtime)

    monkeypatch.setattr(train, "make_optimizers", make)


def with_future(monkeypatch):
    """Attention that sees what comes next."""
    real = model_llama.F.scaled_dot_product_attention
    sees_all = lambda *args, **more: real(*args, **(more | {"is_causal": False}))
    monkeypatch.setattr(model_llama.F, "scaled_dot_product_attention", sees_all)


def not_a_number(monkeypatch):
    monkeypatch.setattr(train, "train_step", lambda run: (torch.tensor(math.nan), None))


@pytest.mark.parametrize(
    "spoil, words",
    [
        (not_a_number, r"\nno: the loss of step 1 is nan, not "),
        (no_decay, r"\nno: the loss of step \d+ is .*\nThe first loss is right"),
        (with_future, "The first loss is .* off already"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_in_the_code_is_found(ask, monkeypatch, spoil, words):
    spoil(monkeypatch)
    status, out = ask()
    assert status == 1 and re.search(words, out), out
    assert spoil is not not_a_number or "not finite" in message(ask, "--check=record")


def test_another_run_has_another_curve(ask):
    words = r"of other settings: learning_rate 0\.01 -> 0\.02, dtype float32 -> bfloat16 \(.*tiny"
    with pytest.raises(UserError, match=rf"{words}\.json\): leave out") as caught:
        ask("--learning_rate=2e-2", "--dtype=bfloat16")
    assert caught.value.status == 2


def test_no_golden_curve(data_dir, recorded, ask, monkeypatch, tmp_path):
    """Of this config file, of these data, or no config file: the error says what to do."""
    argv = arguments(data_dir, tmp_path / "run", "--check")
    (tmp_path / "other.py").write_text(LINES)
    with pytest.raises(UserError, match=r"no golden curve yet .*other.json.*=record"):
        train.main([str(tmp_path / "other.py"), *argv])
    assert "golden curves belong to config files" in message(train.main, argv)
    [curve] = curves_of(recorded)
    monkeypatch.setattr(golden, "read", lambda path: [curve | {"data": "other"}])
    assert "of other settings: data other -> " in message(ask)


def test_a_second_record_replaces_the_same_and_keeps_the_others(
    data_dir, recorded, tmp_path, monkeypatch
):
    folder = shutil.copytree(recorded, tmp_path / "golden")
    monkeypatch.setattr(golden, "GOLDEN", folder / "results")
    monkeypatch.setattr(golden, "STEPS", 2)
    for _ in range(2):
        train.main(question(data_dir, folder, "--check=record", "--n_layer=1"))
    curves = curves_of(folder)
    assert len(curves) == 2 and curves[:1] == curves_of(recorded)
    assert curves[1]["settings"]["n_layer"] == 1


def compare_shipped(names, dataset, steps, monkeypatch, tmp_path):
    """The curves of some shipped configs, after --check has compared their first steps."""
    configs = [f"config/{name}.py" for name in names]
    curves = golden.read(golden.find(configs)[1])
    try:
        meta = prepare(dataset, data_dir=str(tmp_path))
    except UserError as error:
        pytest.skip(str(error))
    if len(curves) == 1 and not meta["canonical"]:
        pytest.skip("not the canonical text")
    firsts = [curve | {"losses": curve["losses"][:steps]} for curve in curves]
    monkeypatch.setattr(golden, "read", lambda path: firsts)
    folders = [f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'run'}"]
    argv = [str(ROOT / config) for config in configs]
    assert train.main([*argv, "--device=cpu", "--check", *folders]).status == 0
    return curves


@pytest.mark.parametrize("name", ["llama_shakespeare", "gpt2_shakespeare"])
def test_shipped_golden_curves_are_those_of_the_shipped_configs(name, monkeypatch, tmp_path):
    """On tiny-shakespeare and on the text that stands in for it, whichever is here."""
    curves = compare_shipped([name], "shakespeare_char", 12, monkeypatch, tmp_path)
    assert [len(curve["losses"]) for curve in curves] == [100, 100]
    assert len({curve["data"] for curve in curves}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_124m", "gpt2_124m"])
def test_golden_curves_of_large_models(name, monkeypatch, tmp_path):
    """On tiny-shakespeare alone, in GPT-2's tokens: four steps of 124 M parameters."""
    names = [name, "first_steps"]
    (curve,) = compare_shipped(names, "shakespeare", 4, monkeypatch, tmp_path)
    assert len(curve["losses"]) == 10 and abs(curve["losses"][0] - math.log(50304)) < 0.3
