"""--dry_run, --doctor and --check: what they say is true, each mistake they look for is found, and
nothing is written."""

import dataclasses
import inspect
import json
import math
import re
from collections import namedtuple
from pathlib import Path

import pytest
import torch

import model_llama
import train
from common.errors import UserError
from helpers.runs import arguments, losses, ready
from tokens import batches, token_files
from training import check as golden
from training import doctor, dry_run, parallel
from training.optim import OPTIMIZER, SCHEDULE
from weights import checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent


def mutated(function, old, new):
    """A function with another line in its source: a mistake that somebody could make."""
    source = inspect.getsource(function)
    assert source.count(old) == 1
    names = dict(vars(inspect.getmodule(function)))
    exec(source.replace(old, new), names)
    return names[function.__name__]


# ---------------------------------------------------------------- --dry_run


@pytest.mark.parametrize(
    "more",
    [
        *(["--model=llama", f"--optimizer={word}"] for word in OPTIMIZER),
        *([f"--schedule={word}"] for word in SCHEDULE),
        ["--arch=falcon", "--activation_checkpointing"],
    ],
    ids=" ".join,
)
def test_dry_run_predicts_the_run_and_writes_nothing(data_dir, tmp_path, capsys, more):
    run = arguments(
        data_dir,
        tmp_path / "run",
        "--max_iters=7",
        "--eval_interval=3",
        "--gradient_accumulation_steps=2",
        *more,
    )
    assert train.main([*run, "--dry_run"]).status == 0
    assert not (tmp_path / "run").exists()
    rows = dict(
        re.findall(
            r"^  (\w+) +(.*)", capsys.readouterr().out.partition("would cost")[2], re.MULTILINE
        )
    )
    train.main(run)
    count = sum(p.numel() for p in ready(data_dir, tmp_path, *more).model.parameters())
    tokens = len(token_files.load_split(data_dir / "words", "train", 16))
    assert rows["parameters"] == f"{count:,}"
    assert rows["tokens"] == f"896 in 7 steps: {896 / tokens:.2f} epochs"
    assert "an estimate: weights and moments " in rows["memory"]
    assert f"gradients {dry_run.size(4 * count)}, activations " in rows["memory"]
    assert (
        "7 steps of " in rows["time"]
        and f"{len(losses(tmp_path / 'run', 'val_loss'))} evaluations of " in rows["time"]
    )
    folder = checkpoint.find(tmp_path / "run")
    real = sum(
        (folder / name).stat().st_size for name in ("model.safetensors", "optimizer.safetensors")
    )
    each = rows["checkpoints"].split(" each")[0]
    assert abs(float(each.split()[0]) * 1000 / real - 1) < 0.15 and each.endswith(
        " kB"
    )  # file headers come on top
    # Of a run that goes on: what is left. It is there as it was.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert (
        train.main(
            ["--init_from=resume", f"--out_dir={tmp_path / 'run'}", "--max_iters=10", "--dry_run"]
        ).status
        == 0
    )
    assert "3 steps of " in (out := capsys.readouterr().out) and "2 evaluations of " in out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_dry_run_measures_its_seconds(data_dir, tmp_path, capsys, monkeypatch):
    """With a clock of our own: a step takes 2 s, the first 7 s, a token that is scored 1 ms."""
    clock = [0.0]
    monkeypatch.setattr(dry_run.time, "perf_counter", lambda: clock[0])
    steps = []

    def step(run):
        clock[0] += 2 if steps else 7
        steps.append(0)

    def score(run):
        clock[0] += 0.001 * (run.config.eval_tokens + min(run.config.eval_tokens, 100))

    run = ready(
        data_dir, tmp_path, "--eval_interval=20", "--eval_tokens=400"
    )  # 50 steps: evaluations at 0, 20, 40 and 50
    dry_run.dry_run(run, step, score, 100)
    assert len(steps) == 21
    assert re.search(r"time +1\.\d+ min: ", out := capsys.readouterr().out) is None
    assert (
        "50 steps of 2000.0 ms, 4 evaluations of 0.5 s, the first step 5.0 s more" in out
        and f"time         {100 + 4 * 0.5 + 5:.1f} s: " in out
    )


# ---------------------------------------------------------------- --doctor


@pytest.mark.parametrize(
    "more",
    [
        ["--model=gpt2", "--dropout=0.1", "--gradient_accumulation_steps=2"],
        *(["--model=llama", f"--optimizer={word}"] for word in OPTIMIZER),
        ["--norm=batchnorm"],
        ["--dtype=bfloat16", "--model=llama"],
    ],
    ids=" ".join,
)
def test_doctor_finds_a_healthy_run_healthy_and_writes_nothing(data_dir, tmp_path, capsys, more):
    argv = arguments(data_dir, tmp_path / "run", "--learning_rate=1e-2", "--max_iters=50", *more)
    before = sorted(tmp_path.rglob("*"))
    status = train.main([*argv, "--doctor"]).status
    out = capsys.readouterr().out
    assert status == 0 and "all 9 checks passed" in out, out
    assert [line.split("  ")[0] for line in out.splitlines() if re.search(r" ok  ", line)] == [
        *doctor.CHECKS
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_doctor_leaves_the_run_as_it_was(data_dir, tmp_path):
    run = ready(data_dir, tmp_path, "--learning_rate=1e-2", "--dropout=0.1")
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    assert doctor.doctor(run, train.train_step) == 0
    assert (
        run.step == 0
        and run.model.training
        and all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    )


def test_doctor_after_training(data_dir, tmp_path, capsys):
    train.main(arguments(data_dir, tmp_path / "run", "--learning_rate=1e-2", "--max_iters=30"))
    assert (
        train.main(
            ["--init_from=resume", f"--out_dir={tmp_path / 'run'}", "--max_iters=60", "--doctor"]
        ).status
        == 0
    )
    assert "(weights are trained)" in capsys.readouterr().out


def wrong_dtype(run, monkeypatch):
    run.runtime.autocast = lambda: torch.autocast("cpu", torch.bfloat16)


def compiler_fails(run, monkeypatch):
    def net(x, y):
        raise RuntimeError("the compiler is broken\nin many lines")

    run.runtime.compile, run.net = True, net


def compiled_otherwise(run, monkeypatch):
    run.runtime.compile, run.net = (True, lambda x, y: run.model(x, y)[1] * 1.05)


def disk_full(run, monkeypatch):
    monkeypatch.setattr(
        dry_run.shutil, "disk_usage", lambda path: namedtuple("usage", "free")(100_000)
    )


def disk_refuses(run, monkeypatch):
    def fsync(number):
        raise OSError("Input/output error")

    monkeypatch.setattr(doctor.os, "fsync", fsync)


def overlap(run, monkeypatch):
    splits = run.sources[0].splits
    splits["val"].learned = splits["train"].learned[1000:1600]


def loud_head(run, monkeypatch):
    with torch.no_grad():
        run.model.lm_head.weight *= 30


def half_the_loss(run, monkeypatch):
    forward = run.model.forward
    run.model.forward = lambda *args: (lambda logits, loss: (logits, loss / 2))(*forward(*args))


def leak(run, monkeypatch):
    """The logits know the target, as with a mask that is off by one."""
    forward = run.model.forward

    def leaking(x, y):
        logits = forward(x, y)[0] + 0.5 * torch.nn.functional.one_hot(
            y, run.model.config.vocab_size
        )
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    run.model.forward = leaking


def too_slow(run, monkeypatch):
    run.config.learning_rate = 1e-9


def blocks_learn_nothing(run, monkeypatch):
    for name, p in run.model.named_parameters():
        p.requires_grad_("norm" in name)


def equal_micro_batches(run, monkeypatch):
    return mutated(
        train.train_step,
        "(all_targets / (targets * runtime.world_size))",
        "config.gradient_accumulation_steps",
    )


def forgotten_division(run, monkeypatch):
    return mutated(train.train_step, " / (all_targets / (targets * runtime.world_size))", "")


def unseeded_dropout(run, monkeypatch):
    return mutated(
        train.train_step, "torch.manual_seed(seed_for(config.seed, 1, run.step, number))", "pass"
    )


def lost_moments(run, monkeypatch):
    monkeypatch.setattr(parallel, "scatter", lambda *args: None)


def lost_buffer(run, monkeypatch):
    """A part of one's own whose state no checkpoint holds."""

    class Counting(torch.nn.Module):
        steps = 0

        def forward(self, x):
            self.steps += self.training
            return x * (1 + 0.1 * self.steps)

    run.model.norm_f = torch.nn.Sequential(run.model.norm_f, Counting())


@pytest.mark.parametrize(
    "check, spoil, words",
    [
        ("device", wrong_dtype, r"a matrix product is \de-03 off"),
        (
            "compile",
            compiler_fails,
            "RuntimeError: the compiler is broken in many lines: .*--compile=False",
        ),
        ("compile", compiled_otherwise, "compiled, .* eager: .*--compile=False"),
        ("disk", disk_full, r"100\.0 kB free in .*, .* needed .*: free space"),
        ("disk", disk_refuses, "OSError: Input/output error: .*--out_dir"),
        (
            "data",
            overlap,
            r"\d+ of \d+ pieces of 64 validation tokens are in the train split: .*prepare again",
        ),
        ("initial loss", loud_head, "the logits' spread adds .*: see init_weights"),
        ("initial loss", half_the_loss, "loss .*, ln V"),
        ("initial loss", leak, "targets leak"),
        ("one batch", too_slow, "in 200 steps at learning_rate=1e-09 .*: change --learning_rate"),
        ("one batch", blocks_learn_nothing, "a gradient does not reach the weights"),
        (
            "accumulation",
            equal_micro_batches,
            "gradients .* apart: weigh each micro-batch by its number of targets",
        ),
        ("accumulation", forgotten_division, "gradients .* apart"),
        ("determinism", unseeded_dropout, "something draws random numbers"),
        ("resume", lost_moments, "state is missing from the checkpoint"),
        ("resume", lost_buffer, "state is missing from the checkpoint"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_doctor_finds_what_is_wrong(data_dir, tmp_path, monkeypatch, capsys, check, spoil, words):
    """In that check, with its fix in the line; the rest may fail with it."""
    run = ready(data_dir, tmp_path, "--model=llama", "--learning_rate=1e-2", "--dropout=0.1")
    monkeypatch.setattr(doctor, "CHECKS", {check: doctor.CHECKS[check]})
    assert doctor.doctor(run, train.train_step) == 0
    capsys.readouterr()
    step = spoil(run, monkeypatch) or train.train_step
    assert doctor.doctor(run, step) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^{check} +FAILED  .*{words}", out, re.MULTILINE), out
    assert "1 of 1 checks failed" in out and "Traceback" not in out


# ---------------------------------------------------------------- --check


@pytest.fixture(scope="module")
def recorded(data_dir, tmp_path_factory):
    """(a folder with a config file, the folder of its golden curve)."""
    folder = tmp_path_factory.mktemp("golden")
    (folder / "tiny.py").write_text(
        "model = 'llama'\nlearning_rate, max_iters, warmup_iters = 1e-2, 60, 5\ndropout = 0.1\n"
    )
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
        return train.main(
            question(data_dir, recorded, "--check", *more)
        ).status, capsys.readouterr().out

    return ask


def test_a_golden_curve_holds_what_it_depends_on(recorded):
    [curve] = json.loads((recorded / "results" / "tiny.json").read_text())
    assert len(curve["losses"]) == 40 and curve["losses"][-1] < curve["losses"][0]
    assert (
        curve["settings"]["learning_rate"] == 1e-2
        and curve["settings"]["position"] == "rope"
        and curve["settings"]["dropout"] == 0
    )
    assert (
        curve["versions"]["torch"] == torch.__version__
        and {"hardware", "git_commit", "device", "threads"} <= curve["versions"].keys()
    )
    assert 1e-3 <= curve["tolerance"] < 0.1 and "rounding" in curve["why"]
    assert not (recorded / "run").exists()


@pytest.mark.parametrize(
    "more",
    [[], ["--activation_checkpointing"], ["--dropout=0.2", "--eval_interval=1", "--position=rope"]],
    ids=" ".join,
)
def test_the_right_loss_is_right(ask, recorded, more):
    status, out = ask(*more)
    assert status == 0 and re.search(
        r"^yes, the loss is right: over 40 steps the largest difference is \S+, of 0\.\d+ allowed",
        out,
        re.MULTILINE,
    ), out
    assert not (recorded / "run").exists()


def test_a_curve_that_is_older_than_a_key(ask, recorded, monkeypatch):
    """Its run had the key's default."""
    [curve] = json.loads((recorded / "results" / "tiny.json").read_text())
    settings = {
        key: value
        for key, value in curve["settings"].items()
        if key not in ("grad_clip", "norm_eps")
    }
    monkeypatch.setattr(golden, "read", lambda argv: [curve | {"settings": settings}])
    assert ask()[0] == 0
    with pytest.raises(UserError, match="other settings: grad_clip 1.0 -> 0.5 "):
        ask("--grad_clip=0.5")


def double_rate(monkeypatch):
    monkeypatch.setattr(
        train, "learning_rate", mutated(train.learning_rate, "return low +", "return 2 * low + 2 *")
    )


def no_warmup(monkeypatch):
    monkeypatch.setattr(
        train,
        "learning_rate",
        mutated(train.learning_rate, "if step < config.warmup_iters:", "if False:"),
    )


def double_init(monkeypatch):
    monkeypatch.setattr(model_llama.Llama, "init_weights", double(model_llama.Llama.init_weights))


def double(init):
    def wide(model):
        init(model)
        with torch.no_grad():
            for p in model.parameters():
                p *= 2 if p.dim() == 2 else 1

    return wide


def no_positions(monkeypatch):
    monkeypatch.setattr(model_llama, "rotate", lambda x, cos, sin: x)


def no_decay(monkeypatch):
    real = train.make_optimizers
    monkeypatch.setattr(
        train,
        "make_optimizers",
        lambda model, config, runtime: real(
            model, dataclasses.replace(config, weight_decay=0.0), runtime
        ),
    )


def another_order(monkeypatch):
    monkeypatch.setattr(
        batches.Batches,
        "starts",
        mutated_method(batches.Batches.starts, "[self.seed, epoch]", "[self.seed + 1, epoch]"),
    )


def with_future(monkeypatch):
    """Attention that sees what comes next."""
    real = model_llama.F.scaled_dot_product_attention
    monkeypatch.setattr(
        model_llama.F,
        "scaled_dot_product_attention",
        lambda *args, **more: real(*args, **(more | {"is_causal": False})),
    )


def mutated_method(function, old, new):
    source = inspect.cleandoc("\n" + inspect.getsource(function))
    assert source.count(old) == 1
    names = dict(vars(inspect.getmodule(function)))
    exec(source.replace(old, new), names)
    return names[function.__name__]


@pytest.mark.parametrize(
    "spoil, words",
    [
        (double_rate, "off, of .*\nThe first loss is right: look at the gradients, the optimizer"),
        (no_warmup, "The first loss is right"),
        (no_decay, "The first loss is right"),
        (
            double_init,
            "the loss of step 1 is .*\n"
            "The first loss is .* off already: look at the initial weights",
        ),
        (no_positions, "off already: .*positions"),
        (with_future, "off already: .*mask"),
        (another_order, "the loss of step 1 is .*\n.*and the first batch"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_in_the_code_is_found(ask, monkeypatch, spoil, words):
    spoil(monkeypatch)
    status, out = ask()
    assert status == 1 and re.search(words, out) and "yes" not in out.splitlines(), out


@pytest.mark.parametrize(
    "more, words",
    [
        (
            ["--learning_rate=2e-2"],
            r"other settings: learning_rate 0\.01 -> 0\.02 \(.*tiny\.json\): leave out those",
        ),
        (
            ["--position=none", "--n_layer=1"],
            "of other settings: n_layer 2 -> 1, position rope -> none",
        ),
        (["--dtype=bfloat16"], "dtype float32 -> bfloat16"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_another_run_has_another_curve(ask, more, words):
    with pytest.raises(UserError, match=words) as caught:
        ask(*more)
    assert caught.value.status == 2


def test_no_golden_curve(data_dir, recorded, ask, monkeypatch, tmp_path):
    """Of this config file, of these data, or no config file: the error says what to do."""
    argv = arguments(data_dir, tmp_path / "run", "--check")
    with pytest.raises(UserError, match=r"no golden curve of config/dpo.*\.py yet .*=record"):
        train.main(
            ["config/dpo_example.py", *argv, "--objective=next_token", "--init_from=scratch"]
        )
    with pytest.raises(UserError, match="golden curves belong to config files"):
        train.main(argv)
    path = recorded / "results" / "tiny.json"
    curves = json.loads(path.read_text())
    monkeypatch.setattr(golden, "read", lambda argv: [curves[0] | {"data": "other"}])
    with pytest.raises(UserError, match="of other data than words"):
        ask()


def test_a_second_record_replaces_the_same_and_keeps_the_others(data_dir, recorded, monkeypatch):
    monkeypatch.setattr(golden, "GOLDEN", recorded / "results")
    monkeypatch.setattr(golden, "STEPS", 2)
    path = recorded / "results" / "tiny.json"
    before = path.read_bytes()
    [first] = json.loads(before)
    try:
        train.main(question(data_dir, recorded, "--check=record", "--n_layer=1"))
        train.main(question(data_dir, recorded, "--check=record", "--n_layer=1"))
        curves = json.loads(path.read_text())
        assert len(curves) == 2 and curves[0] == first and curves[1]["settings"]["n_layer"] == 1
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", ["llama_shakespeare", "gpt2_shakespeare"])
def test_shipped_golden_curves_are_those_of_the_shipped_configs(name, monkeypatch, tmp_path):
    """On tiny-shakespeare and on the text that stands in for it, whichever is here."""
    from prepare import prepare

    curves = golden.read([f"config/{name}.py"])
    assert [len(curve["losses"]) for curve in curves] == [100, 100] and len(
        {curve["data"] for curve in curves}
    ) == 2
    try:
        prepare("shakespeare_char", data_dir=str(tmp_path))
    except UserError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(
        golden, "read", lambda argv: [curve | {"losses": curve["losses"][:12]} for curve in curves]
    )
    assert (
        train.main(
            [
                str(ROOT / "config" / f"{name}.py"),
                "--device=cpu",
                "--check",
                f"--data_dir={tmp_path}",
                f"--out_dir={tmp_path / 'run'}",
            ]
        ).status
        == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_124m", "gpt2_124m"])
def test_golden_curves_of_large_models(name, monkeypatch, tmp_path):
    """On tiny-shakespeare alone, in GPT-2's tokens: four steps of 124 M parameters."""
    from prepare import prepare

    files = [f"config/{name}.py", "config/first_steps.py"]
    (curve,) = golden.read(files)
    assert len(curve["losses"]) == 10 and abs(curve["losses"][0] - math.log(50304)) < 0.3
    try:
        if not prepare("shakespeare", data_dir=str(tmp_path))["canonical"]:
            pytest.skip("not the canonical text")
    except UserError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(golden, "read", lambda argv: [curve | {"losses": curve["losses"][:4]}])
    assert (
        train.main(
            [
                *(str(ROOT / file) for file in files),
                "--device=cpu",
                "--check",
                f"--data_dir={tmp_path}",
                f"--out_dir={tmp_path / 'run'}",
            ]
        ).status
        == 0
    )
