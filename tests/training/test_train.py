"""The training loop: exactness, run folders, faults. Every run is tiny and on one thread."""

import functools
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from common import files, runtime
from common.errors import Failure, UserError
from common.runtime import Runtime, StopRequest
from helpers.checkpoints import edit_json, reseal
from helpers.runs import ROOT, arguments, equal, losses, made, ready, stop_after, two_ranks, weights
from helpers.texts import message
from parts.architectures import CORNERS, configure, make
from prepare import prepare
from tokens import batches
from tokens.token_files import load_split
from training import optim, ranks, run_folder, settings
from training.optim import learning_rate, make_optimizers
from training.settings import TrainConfig
from training.step_costs import kept_bytes
from weights import checkpoint

# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize(
    "more",
    [
        "--model=gpt2",
        *(f"--model=llama --optimizer={word}" for word in optim.OPTIMIZER),
        *(f"--schedule={word}" for word in optim.SCHEDULE),
        "--model=llama --data_seed=7",
        "--norm=batchnorm",
        "--arch=gpt-neox --n_embd=32",
    ],
)
def test_interrupted_and_resumed_is_uninterrupted(start, resume, tmp_path, more):
    """Bit for bit, in every loss, weight and moment: dropout on, two forward passes per step."""
    options = "--max_iters=9 --eval_interval=20 --dropout=0.2 --warmup_iters=3"
    options = f"{options} --gradient_accumulation_steps=2 {more}"
    start("straight", options)
    for step in (2, 5, 6):  # more than once
        stop_after(step)
        assert (start("stopped", options) if step == 2 else resume("stopped")) == 143
        folder = checkpoint.find(tmp_path / "stopped")
        assert checkpoint.read(folder)[0]["step"] == step == int(folder.name)
    assert not resume("stopped")
    assert len(losses(tmp_path / "straight")) == 9
    same_runs(tmp_path / "stopped", tmp_path / "straight")


def same_runs(a, b):
    """Check that two runs have the same losses, weights and moments."""
    for key in ("loss", "val_loss", "grad_norm"):
        assert losses(a, key) == losses(b, key)
    assert equal(weights(a), weights(b))


def test_no_steps_at_all_is_a_run_folder(start, tmp_path, capsys):
    """As to convert pretrained weights."""
    assert not start("run", "--max_iters=0") and checkpoint.steps(tmp_path / "run") == [0]
    assert "best validation loss" in capsys.readouterr().out


@pytest.mark.parametrize("when", [1, 3, 4, 6])
def test_an_evaluation_that_was_cut_short_is_made_up_for(start, resume, tmp_path, when):
    """After a signal during an evaluation the step is saved, and evaluated after the resume. Before
    the first step an optimizer has no state, and none is made up for the checkpoint."""
    options = "--max_iters=6 --eval_interval=3 --dropout=0.1"
    start("straight", options)
    real, calls = train.evaluate, []

    def cut(*args):
        calls.append(0)
        if len(calls) == when:  # two calls an evaluation: train and validation, at steps 0, 3 and 6
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "evaluate", cut)
        assert start("stopped", options) == 143
    assert checkpoint.steps(tmp_path / "stopped")[-1] == (when - 1) // 2 * 3
    assert not resume("stopped")
    same_runs(tmp_path / "stopped", tmp_path / "straight")
    best = [checkpoint.pointer(tmp_path / name, "best") for name in ("stopped", "straight")]
    assert best[0] == best[1]


def test_looking_changes_no_training_loss(start, tmp_path):
    start("a", "--max_iters=6 --dropout=0.1 --eval_interval=6")
    start("b", "--max_iters=6 --dropout=0.1 --eval_interval=1 --eval_tokens=100")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.parametrize(
    "first,then,model", [("one", "fsdp", "llama"), ("ddp", "one", "gpt2"), ("fsdp", "ddp", "gpt2")]
)
@pytest.mark.slow
def test_a_run_moves_between_one_process_ddp_and_fsdp(data_dir, tmp_path, first, then, model):
    """Half in one layout, half in another: losses, weights and moments are those of one process."""
    sizes = "--max_iters=6 --gradient_accumulation_steps=4 --batch_size=2 --eval_interval=3"
    more = f"{sizes} --eval_tokens=450 --model={model}"  # 15 batches: two ranks share them unevenly
    run = arguments(data_dir, tmp_path / "moved", *more.split())
    train.main([*run, f"--out_dir={tmp_path / 'one'}"])
    for layout, more in (
        (first, ["--max_iters=3", "--lr_decay_iters=6"]),
        (then, ["--init_from=resume", "--max_iters=6"]),
    ):
        if layout == "one":
            assert not train.main([*run, *more]).status
            continue
        process = two_ranks(*run, *more, f"--parallel={layout}")
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "best validation loss" in out
    for key in ("loss", "val_loss", "grad_norm"):
        a, b = (dict(losses(tmp_path / name, key)) for name in ("one", "moved"))
        assert b == pytest.approx(a, abs=1e-5, rel=1e-5) and len(a) >= 3
    a, b = weights(tmp_path / "one"), weights(tmp_path / "moved")
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], atol=1e-4, rtol=1e-3)


def test_a_mistake_found_by_rank_0_ends_all(start, data_dir, tmp_path):
    """Only rank 0 looks at the run folder; the other must not wait for it."""
    start("run", "--max_iters=1")
    more = ("--max_iters=1", "--gradient_accumulation_steps=2")
    process = two_ranks(*arguments(data_dir, tmp_path / "run", *more))
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert err.count("error: there is a run here already") == 1 and "Connection closed" not in err


def test_ranks_go_through_with_an_evaluation(data_dir, tmp_path, monkeypatch):
    """A signal reaches the ranks at different moments. If one left and the other stayed to save,
    both would wait for ever."""
    run = ready(data_dir, tmp_path)
    stop = StopRequest()
    stop.status = 143
    assert train.score(run, stop) is None
    run.runtime.world_size = 2
    monkeypatch.setattr(ranks.dist, "all_reduce", lambda tensor: None)
    assert train.score(run, stop)["val_loss"] > 0


@pytest.mark.parametrize(
    "more, words",
    [
        ("--optimizer=muon", "parallel=fsdp"),
        ("--dtype=float16", "parallel=fsdp"),
        ("--gradient_accumulation_steps=3", "=3 is not divisible by 2 ranks"),
    ],
)
def test_what_fsdp_cannot_do_is_refused(data_dir, tmp_path, more, words):
    layout = ["--parallel=fsdp", "--gradient_accumulation_steps=2"]
    settings = train.read_config(arguments(data_dir, tmp_path / "run", *layout, more), "")
    with pytest.raises(UserError, match=words):
        ranks.check_layout(settings.config, Runtime("cpu", "float32", 0, 2, []))


def test_float16_halves_its_scale_on_overflow_skips_the_step_and_grows_again(data_dir, tmp_path):
    run = ready(data_dir, tmp_path, "--dtype=float16")
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    skipped = 0
    while not math.isfinite(train.train_step(run)[1]):
        skipped += 1
        assert run.scaler.get_scale() == 2.0 ** (40 - skipped)
        assert all(torch.equal(before[name], p) for name, p in run.model.named_parameters())
        assert not any(optimizer.state for optimizer in run.optimizers)
    assert skipped > 3 and run.step == skipped + 1
    assert not all(torch.equal(before[name], p) for name, p in run.model.named_parameters())
    scale = run.scaler.get_scale()
    for _ in range(2):
        train.train_step(run)
    assert run.scaler.get_scale() == 2 * scale  # three steps without an overflow


def test_float16_resumed_is_uninterrupted(start, resume, tmp_path, monkeypatch):
    """The scale and its counter are in the checkpoint. An overflow is null in the log."""
    options = "--max_iters=8 --eval_interval=20 --dtype=float16"
    fast = functools.partial(torch.amp.GradScaler, init_scale=2.0**30, growth_interval=2)
    monkeypatch.setattr(torch.amp, "GradScaler", fast)  # grows and overflows within these few steps
    start("straight", options)
    stop_after(5)
    assert start("stopped", options) == 143
    state = checkpoint.read(checkpoint.find(tmp_path / "stopped"))[0]
    assert state["scaler"]["scale"] != 2.0**30
    resume("stopped")
    assert None in dict(losses(tmp_path / "straight", "grad_norm")).values()
    same_runs(tmp_path / "stopped", tmp_path / "straight")


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_activation_checkpointing_changes_no_bit_and_keeps_less(start, data_dir, tmp_path, model):
    kept = []
    for name, more in (("a", "False"), ("b", "True")):
        more = f"--model={model} --activation_checkpointing={more}"
        start(name, f"--max_iters=4 --dropout=0.2 {more}")
        run = ready(data_dir, tmp_path, *more.split())
        kept.append(kept_bytes(run, run.model))
    same_runs(tmp_path / "a", tmp_path / "b")
    assert kept[1] < 0.6 * kept[0]


@pytest.mark.parametrize("word", CORNERS)
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(word):
    """All matrices decay, and nothing else."""
    model = make(configure({"model": word, "n_layer": 2, "n_head": 2, "n_embd": 16}))
    config, cpu = TrainConfig(optimizer="muon", beta1=0.8), Runtime("cpu", "float32", 0, 1, [])
    muon, adamw = make_optimizers(model, config, cpu)
    assert muon.param_groups[0]["momentum"] == adamw.param_groups[0]["betas"][0] == 0.8
    names = [
        {name for group in optimizer.param_groups for name in group["names"]}
        for optimizer in (muon, adamw)
    ]
    parameters = {name: p.dim() for name, p in model.named_parameters()}
    matrices = {name for name in parameters if name[:7] == "blocks." and parameters[name] == 2}
    assert names == [matrices, parameters.keys() - matrices]
    for group in muon.param_groups + adamw.param_groups:
        assert all((p.dim() >= 2) == (group["weight_decay"] == 0.1) for p in group["params"])


MUON = dict(lr=0.1, weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw")


def our_muon(parameters, dtype="float32"):
    """Our Muon with the settings of MUON."""
    config = TrainConfig(learning_rate=0.1, beta1=0.9)
    group = {"params": parameters, "weight_decay": 0.2}
    return optim.Muon([group], config, Runtime("cpu", dtype, 0, 1, []))


def test_muon_takes_the_steps_of_torchs(monkeypatch):
    # torch's rounds there; ours does not on a CPU
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    monkeypatch.setattr(optim.Muon, "entries", 3 * 8 * 24)  # two stacks of the five
    torch.manual_seed(0)
    shapes = [(8, 24)] * 5 + [(24, 8), (16, 16), (16, 16), (4, 4)]
    ours, theirs = (
        [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in shapes] for _ in range(2)
    )
    steppers = our_muon(ours), torch.optim.Muon(theirs, **MUON)
    for step in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = b.grad = torch.randn(a.shape) * (1e-8 if a.shape == (4, 4) else 1)
            if step == 2 and a.shape == (16, 16):
                a.grad = b.grad = None
        for stepper in steppers:
            stepper.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        momenta = steppers[0].state[a], steppers[1].state[b]
        assert torch.equal(*(state["momentum_buffer"] for state in momenta))


def test_muon_in_bfloat16_takes_torchs_steps_to_its_rounding():
    torch.manual_seed(0)
    start_at = torch.randn(8, 24)

    def step(make, *more, **keys):
        p = torch.nn.Parameter(start_at.clone())
        p.grad = start_at.sin()
        make([p], *more, **keys).step()
        return p.detach() - start_at

    in_bfloat16, in_float32 = step(our_muon, "bfloat16"), step(our_muon)
    torchs = step(torch.optim.Muon, **MUON)
    size = in_float32.norm()
    assert (in_bfloat16 - torchs).norm() / size < 0.02
    assert 1e-4 < (in_bfloat16 - in_float32).norm() / size < 0.1


def test_data_seed_sets_the_order_apart_from_the_initialisation(data_dir, tmp_path):
    """Runs of one data_seed see the same batches, whatever their seed."""
    seeds = {"a": "--seed=1 --data_seed=5", "b": "--seed=2 --data_seed=5", "d": "--seed=5"}
    seeds["c"] = "--seed=1 --data_seed=6"
    runs = {name: ready(data_dir, tmp_path, *text.split()) for name, text in seeds.items()}
    seen = {name: run.samples.get(0, 8)[0].tolist() for name, run in runs.items()}
    assert seen["a"] == seen["b"] == seen["d"] != seen["c"]
    assert train.train_step(runs["a"])[0] != train.train_step(runs["b"])[0]


def test_each_schedule_warms_up_and_has_its_form():
    config = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=10, max_iters=110)
    for schedule, expected in dict(
        cosine=[1 / 11, 1, 0.55, 0.122, 0.1, 0.1],
        linear=[1 / 11, 1, 0.55, 0.19, 0.1, 0.1],
        wsd=[1 / 11, 1, 1, 0.55, 0.1, 0.1],
        constant=[1 / 11, 1, 1, 1, 1, 1],
    ).items():
        config.schedule = schedule
        rates = [learning_rate(step, config) for step in (0, 10, 60, 100, 110, 10**6)]
        assert rates == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["gpt2_124m", "llama_124m"])
def test_a_larger_gpu_takes_the_same_tokens_in_fewer_passes(name, monkeypatch):
    passes = []
    for memory in (24e9, 40e9, 80e9):
        monkeypatch.setattr(settings, "find_device", lambda device: "cuda")
        monkeypatch.setattr(runtime, "find_device", lambda device: "cuda")
        monkeypatch.setattr(settings, "memory_of", lambda device, memory=memory: memory / 1e9)
        config = train.read_config([str(ROOT / f"config/{name}.py")], "").config
        assert config.batch_size * config.gradient_accumulation_steps == 480
        assert config.gradient_accumulation_steps % 8 == 0  # each of 8 GPUs does as many
        passes.append(config.gradient_accumulation_steps)
        assert torch.device(config.device).index == 0  # without one, torch.cuda.set_device fails
    assert passes == [40, 16, 8]
    for key, value in dict(RANK=0, WORLD_SIZE=2, MASTER_ADDR="", MASTER_PORT=1).items():
        monkeypatch.setenv(key, str(value))
    assert runtime.with_number("cuda:0") == "cuda"  # stored by one process: each rank has its own


# ---------------------------------------------------------------- what `auto` stands for


@pytest.fixture
def compiled(monkeypatch):
    """The list of the models that were compiled, where compiling pays from about three steps on."""
    models = []

    def compile(model, **more):
        models.append(model)
        return model

    step_flops = 6 * 27_000 * 4 * 16  # of a model of SIZE
    monkeypatch.setattr(runtime, "COMPILE_PAYS", 3 * step_flops)
    monkeypatch.setattr(runtime.shutil, "which", lambda name: "g++")
    monkeypatch.setattr(torch, "compile", compile)
    return models


@pytest.mark.parametrize("has_bfloat16, dtype", [(False, "float32"), (True, "bfloat16")])
def test_resuming_does_not_choose_again_unless_asked(
    data_dir, tmp_path, compiled, monkeypatch, capsys, has_bfloat16, dtype
):
    """A run that repays compiling is resumed so near its end that the rest would not."""
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda: has_bfloat16)
    run = arguments(data_dir, tmp_path / "run", "--max_iters=6", "--eval_interval=20")
    stop_after(5)
    assert train.main(run).status == 143 and len(compiled) == 1
    stored = checkpoint.read(checkpoint.find(tmp_path / "run"))[1]
    assert (stored["compile"], stored["dtype"], stored["device"]) == (True, dtype, "cpu")

    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda: not has_bfloat16)
    resume = ["--init_from=resume", f"--out_dir={tmp_path / 'run'}"]
    for choices in ([], ["--compile=auto", "--dtype=auto", "--device=auto"]):
        resumed = made([*resume, *choices]).runtime
        assert (resumed.compile, resumed.dtype, resumed.device) == (True, dtype, "cpu")
    assert len(compiled) == 3 and "will differ" not in capsys.readouterr().out

    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    resumed = made([*resume, "--compile=False", f"--dtype={other}"]).runtime
    assert (resumed.compile, resumed.dtype) == (False, other)
    words = f"warning: dtype {dtype} -> {other}, compile True -> False: the run will differ"
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("has_bfloat16, dtype", [(False, "float32"), (True, "bfloat16")])
def test_a_run_of_some_length_uses_bfloat16(data_dir, tmp_path, monkeypatch, has_bfloat16, dtype):
    """Eager, where the CPU multiplies bfloat16; Muon follows. A dtype that was asked for stays."""
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda: has_bfloat16)
    run = arguments(data_dir, tmp_path / "run", "--max_iters=6", "--optimizer=muon")
    assert made(run).runtime.dtype == "float32"  # too short
    monkeypatch.setattr(runtime, "BFLOAT16_PAYS", 3 * 6 * 27_000 * 4 * 16)
    short = made(run)
    assert (short.runtime.dtype, short.runtime.compile) == (dtype, False)
    assert short.optimizers[0].dtype == getattr(torch, dtype)
    assert made([*run, "--dtype=float32"]).runtime.dtype == "float32"


def test_a_run_of_another_machine_goes_on_with_the_device_there_is(
    data_dir, tmp_path, monkeypatch, capsys
):
    """Its checkpoint names a device that is not here; whether to compile is chosen anew."""
    train.main(arguments(data_dir, tmp_path / "run", "--max_iters=1"))
    stored = checkpoint.read(checkpoint.find(tmp_path / "run"))
    there = stored[0], stored[1] | {"device": "mps", "compile": True}, stored[2]
    monkeypatch.setattr(checkpoint, "read", lambda folder: there)
    resume = ["--init_from=resume", f"--out_dir={tmp_path / 'run'}"]
    config = train.read_config(resume, "").config
    assert (config.device, config.compile) == ("cpu", "auto")
    assert "warning: device mps -> cpu, compile True -> auto: the run" in capsys.readouterr().out
    assert "no Metal device" in message(train.read_config, [*resume, "--device=mps"], "")


# ---------------------------------------------------------------- what a run leaves behind


def test_run_folder_and_last_words(start, tmp_path, capsys):
    out = tmp_path / "run"
    options = "--max_iters=60 --eval_interval=20 --warmup_iters=5 --model=llama"
    start("run", f"{options} --learning_rate=1e-2 --min_lr=1e-3")
    files = ["best", "ckpt", "config.json", "latest", "lock", "log.jsonl", "loss.png"]
    assert sorted(path.name for path in out.iterdir()) == files
    assert checkpoint.steps(out)[-2:] == [40, 60]
    best, scored = checkpoint.pointer(out, "best"), dict(losses(out, "val_loss"))
    assert scored[best] == min(scored.values()) < scored[0] - 1  # it learns
    vocab_size = json.loads((out / "config.json").read_text())["vocab_size"]
    assert abs(scored[0] - math.log(vocab_size)) < 0.1
    bits = dict(losses(out, "bits_per_byte"))
    assert bits[60] == pytest.approx(scored[60] / math.log(2))  # ASCII: a character is a byte
    printed = capsys.readouterr().out.replace("\\\n  ", "")
    assert f"best validation loss {scored[best]:.4f}" in printed and "bits per byte" in printed
    step = r"^iter 10: loss \d\.\d{4}, time [\d.]+ms.*, [\d.]+ s left$"  # nanoGPT's form
    assert re.search(step, printed, re.MULTILINE)
    assert re.search(r"^step 20: train loss \d\.\d{4}, val loss \d\.\d{4}", printed, re.MULTILINE)
    assert f"python sample.py --out_dir={out}" in printed and "loss.png" in printed
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_best_survives_worse_ones_and_two_more_are_kept(start, resume, tmp_path):
    out = tmp_path / "run"
    start("run", "--max_iters=16 --eval_interval=8 --learning_rate=1e-2 --warmup_iters=5")
    resume("run", "--learning_rate=3 --min_lr=3 --warmup_iters=0 --max_iters=40")
    scored = {step: loss for step, loss in losses(out, "val_loss") if step}
    best = checkpoint.pointer(out, "best")
    assert best == min(scored, key=scored.get) == 16
    assert checkpoint.steps(out) == [best, 32, 40] and checkpoint.pointer(out, "latest") == 40


def test_eval_only_scores_the_split_that_is_asked_for(data_dir, tmp_path, resume, capsys):
    """A dataset whose test split is the validation split of another: the same loss."""
    folder, out = tmp_path / "data" / "words", tmp_path / "run"
    shutil.copytree(data_dir / "words", folder)
    shutil.copy(folder / "val.bin", folder / "test.bin")
    meta = json.loads((folder / "meta.json").read_text())
    splits = meta["splits"] | {"test": meta["splits"]["val"]}
    (folder / "meta.json").write_text(json.dumps(meta | {"splits": splits}))
    train.main(arguments(tmp_path / "data", out, "--max_iters=3"))
    logged = f"{losses(out, 'val_loss')[-1][1]:.4f}, "
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    capsys.readouterr()
    for split, text in (("val", "val loss " + logged), ("test", "words: test loss " + logged)):
        resume("run", f"--eval_only --split={split}")
        assert text in capsys.readouterr().out
    resume("run", "--eval_only --split=train")
    assert "words: train loss " in capsys.readouterr().out
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before

    said = message(resume, "run", "--split=test")
    assert re.search("split=test is scored by eval_only.*--eval_only", said)
    del splits["test"]
    (folder / "meta.json").write_text(json.dumps(meta | {"splits": splits}))
    assert "has no test split" in message(resume, "run", "--eval_only --split=test")


def test_resume_drops_what_the_log_says_beyond_the_checkpoint(start, resume, tmp_path):
    start("run", "--max_iters=4 --eval_interval=2")
    with open(tmp_path / "run" / "log.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 9.9}\n{"step": 6, "lo')
    resume("run", "--max_iters=6")
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path / "run")[4][1] < 9


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "interval, words",
    [(1, "validation loss nan at step 1"), (2, r"gradient norm nan at step 2, learning rate .*")],
)
def test_a_loss_that_is_not_finite_saves_nothing(start, tmp_path, interval, words):
    """Of an evaluation or of a step. A folder without a checkpoint is free."""
    wreck = "--learning_rate=1e30 --min_lr=1e30 --grad_clip=0"
    with pytest.raises(Failure, match=rf"{words} \(no checkpoint yet\): nothing of this step"):
        start("run", f"--eval_interval={interval} {wreck}")
    assert not checkpoint.steps(tmp_path / "run")
    start("run", "--max_iters=2")
    assert [step for step, _ in losses(tmp_path / "run", "val_loss")] == [0, 2]


@pytest.mark.parametrize(
    "method, at_call, step",
    [((batches.Batches, "get"), 6, 5), ((batches.Text, "eval_batches"), 5, 6)],
    ids=["in a step", "in an evaluation"],
)
def test_data_that_fail_lose_no_step(
    start, resume, tmp_path, monkeypatch, capsys, method, at_call, step
):
    """The steps since the last checkpoint are saved before the run ends."""
    options = "--max_iters=7 --eval_interval=3 --dropout=0.1"
    start("straight", options)
    real, calls = getattr(*method), []

    def read(*args):
        calls.append(0)
        if len(calls) == at_call:
            raise Failure("the token file shrank", "train.bin", "prepare the data again")
        return real(*args)

    monkeypatch.setattr(*method, read)
    with pytest.raises(Failure, match="the token file shrank") as caught:
        start("cut", options)
    assert f"saved step {step}: --init_from=resume continues from it" in capsys.readouterr().out
    assert caught.value.status == 1 and checkpoint.steps(tmp_path / "cut")[-1] == step
    assert not resume("cut")
    same_runs(tmp_path / "cut", tmp_path / "straight")


@pytest.mark.parametrize(
    "more", ["--position=alibi", "--model=llama --n_kv_head=None", "--arch=mistral --n_embd=32"]
)
def test_the_same_command_resumes(start, tmp_path, more):
    start("run", f"{more} --max_iters=2")
    start("run", f"{more} --max_iters=3 --init_from=resume")
    assert checkpoint.steps(tmp_path / "run") == [2, 3]


def test_match_sets_the_width_of_the_mlp(start, tmp_path, capsys):
    """To one that tests/parts/test_costs.py finds right; the same command resumes the run."""
    options = "--max_iters=1 --model=llama --multiple_of=8 --mlp=gelu --n_kv_head=1 --match=params"
    start("run", options)
    said = re.search(r"match params: mlp_width (\d+), [+-]0\.\d\d %", capsys.readouterr().out)
    assert checkpoint.open_run(tmp_path / "run")[0].config.mlp_width == int(said[1])
    start("run", f"{options} --init_from=resume --max_iters=2")


def test_a_signal_during_the_agreement_of_the_ranks_is_not_lost(monkeypatch):
    stop = StopRequest()

    def all_reduce(tensor, op):  # Python runs the handler as soon as the call returns
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    two = Runtime("cpu", "float32", 0, 2, [])
    stop.agreed(two, 10)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op: None)
    assert stop.agreed(two, 10) and stop.status == 143


def test_a_used_folder_is_refused_or_moved_aside(start, tmp_path):
    start("run", "--max_iters=2")
    old = weights(tmp_path / "run")
    words = "there is a run here already.*resume.*overwrite"
    assert re.search(words, message(start, "run", "--max_iters=2"))
    start("run", "--max_iters=2 --overwrite --seed=5")
    assert equal(weights(tmp_path / "run.old1"), old) and not equal(weights(tmp_path / "run"), old)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/log.jsonl").write_text("mine")
    assert re.search("would replace this file.*mine/log.jsonl", message(start, "mine", ""))
    (tmp_path / "run/config.json").unlink()  # a folder with checkpoints is a run without it, too
    start("run", "--init_from=resume --max_iters=3")
    assert (tmp_path / "run/config.json").exists()


def test_second_trainer_is_refused_and_a_dead_one_is_no_obstacle(data_dir, tmp_path):
    out = tmp_path / "run"
    held = run_folder.open_out_dir(out)
    assert f"process {os.getpid()} is training here" in message(run_folder.open_out_dir, out)
    held.close()  # as the system does for a process that dies
    run_folder.open_out_dir(out).close()


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (0, 141)])
def test_signals_finish_the_step_and_save(data_dir, tmp_path, number, status):
    """As does a reader of the output that leaves, such as `| head`."""
    out = tmp_path / "run"
    argv = arguments(data_dir, out, "--max_iters=100000", "--eval_interval=50000")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-u", "train.py", *argv], cwd=ROOT, **pipes)
    next(line for line in process.stdout if line.startswith("iter 5:"))
    if number:
        process.send_signal(number)
        assert "--init_from=resume" in process.communicate(timeout=30)[0]
    else:
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.wait(timeout=30) == status
    step = checkpoint.steps(out)[-1]
    assert checkpoint.read(checkpoint.find(out))[0]["step"] == step >= 5


def test_killed_inside_a_save_leaves_the_last_checkpoint(start, resume, tmp_path, monkeypatch):
    """At whatever file the write stops: what was there is whole, leftovers go at the next save."""
    out = tmp_path / "run"
    start("run", "--max_iters=2")
    real, calls = files.sync, []

    def die(path):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(path)

    monkeypatch.setattr(files, "sync", die)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *args, **more: None)  # as after kill -9
    with pytest.raises(KeyboardInterrupt):
        resume("run", "--max_iters=4")
    monkeypatch.undo()
    assert checkpoint.steps(out) == [2] and list(out.glob("ckpt/.*.partial-*"))
    resume("run", "--max_iters=4")
    assert checkpoint.steps(out) == [2, 4] and len(list(out.glob("ckpt/*"))) == 2


def test_full_disk_is_one_line_and_the_last_checkpoint_stays(start, resume, tmp_path, monkeypatch):
    out = tmp_path / "run"
    start("run", "--max_iters=2")
    before = weights(out)

    def full(tensors, path, **more):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.safetensors.torch, "save_file", full)
    words = r"cannot save step 4: No space left on device \(.*000004\): free the disk.*step 2"
    with pytest.raises(Failure, match=words) as caught:
        resume("run", "--max_iters=4")
    assert caught.value.status == 1
    monkeypatch.undo()
    assert equal(weights(out), before) and [path.name for path in out.glob("ckpt/*")] == ["000002"]


@pytest.mark.parametrize(
    "batch, fix",
    [
        (4, "--batch_size=2 --gradient_accumulation_steps=2"),
        (9, "--batch_size=3 --gradient_accumulation_steps=3"),
        (1, "choose a smaller block_size"),
    ],
)
def test_out_of_memory_names_what_would_fit(start, monkeypatch, batch, fix):
    def step(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    monkeypatch.setattr(train, "train_step", step)
    with pytest.raises(Failure, match=f"out of memory .*batch_size={batch}.*: {fix}"):
        start("run", f"--max_iters=2 --batch_size={batch}")


def test_killed_while_a_step_is_saved_again(start, resume, tmp_path, monkeypatch):
    """The only checkpoint was renamed for its successor, and is found under that name."""
    out = tmp_path / "run"
    start("run", "--max_iters=2")
    before, real = weights(out), os.rename

    def die(source, target):
        if ".partial-" in str(source):
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(checkpoint.os, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(out, 2, {}, {}, {}, {}, {}, False)
    monkeypatch.undo()
    assert equal(weights(out), before)
    resume("run", "--max_iters=3")
    assert checkpoint.steps(out) == [2, 3] and len(list(out.glob("ckpt/*"))) == 2


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def flip(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


BROKEN = {  # (file, what becomes of its bytes)
    "flipped bit": ("model.safetensors", flip),
    "truncated": ("optimizer.safetensors", lambda data: data[:100]),
    "pickle": ("model.safetensors", lambda data: pickle.dumps(Bomb())),
    "missing file": ("config.json", None),
    "garbage checksums": ("checksums.json", lambda data: b"{"),
    "no checksums": ("checksums.json", lambda data: b"{}"),
    "empty state": ("state.json", lambda data: b""),
}


@pytest.mark.parametrize("name, spoil", BROKEN.values(), ids=BROKEN)
def test_corrupt_checkpoint_is_named_with_the_one_before(
    start, resume, tmp_path, name, spoil, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    start("run", "--max_iters=4 --eval_interval=2")
    folder = checkpoint.find(tmp_path / "run")
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    if spoil:
        (folder / name).write_bytes(spoil(data))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"(corrupt|not whole).*000004.*go back to step 2"):
        resume("run", "--max_iters=6")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    shutil.rmtree(folder)  # as the message says
    resume("run", "--max_iters=4")
    assert checkpoint.steps(tmp_path / "run") == [2, 4]


def test_weights_only_samples_but_does_not_resume(start, resume, tmp_path):
    start("run", "--max_iters=2")
    folder = checkpoint.find(tmp_path / "run")
    (folder / "optimizer.safetensors").unlink()
    reseal(folder)
    checkpoint.open_run(tmp_path / "run")
    assert "weights only" in message(resume, "run", "--max_iters=6")


def test_resume_refuses_another_architecture_and_other_data(start, resume, tmp_path):
    start("run", "--max_iters=2")
    start("llama", "--model=llama --max_iters=2")
    for name, more, words in (
        ("run", "--n_layer=3", "n_layer 2 -> 3"),
        ("llama", "--window=4", "window 0 -> 4"),  # a key that the readable model does not have
        ("llama", "--arch=olmo2", "block pre -> output"),
    ):
        said = message(resume, name, f"--max_iters=6 {more}")
        assert re.search(f"architecture.*{words}", said)
    assert "dtype=float16" in message(resume, "run", "--max_iters=6 --dtype=float16")
    other = f"--max_iters=6 --data_dir={tmp_path}"
    text = tmp_path / "other.txt"
    text.write_text("the king of rome shall speak no more\n" * 100)
    prepare("words", input=str(text), tokenizer="char", data_dir=str(tmp_path))
    assert "has changed since" in message(resume, "run", other)
    assert not resume("run", f"{other} --allow_data_change")
    assert checkpoint.steps(tmp_path / "run") == [2, 6]
    text.write_text("abcdefghijklmnopqrstuvwxyz 0123456789\n" * 100)
    prepare("words", input=str(text), tokenizer="char", data_dir=str(tmp_path))
    said = message(resume, "run", f"{other} --allow_data_change")
    assert "the model's vocab_size=17 is below the data's 38" in said


@pytest.mark.parametrize(
    "more, words",
    [
        (["--n_head=3"], "n_embd=32 is not divisible by n_head=3"),
        (["--rope_theta=5.0"], "rope_theta"),
        (["--mlp=foo"], "mlp cannot be 'foo'.*relu, gelu.*swiglu"),
        (["--log=csv,paper"], "log cannot be 'csv,paper'.*tensorboard, wandb, csv"),
        (["--min_lr=1"], "min_lr=1.0 is above learning_rate"),
        (["--warmup_iters=10", "--max_iters=10"], "warmup_iters=10 is not below max_iters=10"),
        (["--warmup_iters=9", "--lr_decay_iters=9"], "=9 is not below lr_decay_iters=9"),
        (["--eval_tokens=1"], "eval_tokens=1 scores nothing"),
        (["--out_dir="], "out_dir is empty"),
        (["--device=cuda"], "no CUDA device is visible.*--device=cpu"),
        (["--device=tpu"], "unknown device tpu"),
        (["--dataset=nowhere"], "prepare.py nowhere"),
        (["--vocab_size=5"], "vocab_size=5 is below the data's"),
        (["--eval_iters=5"], "eval_tokens"),
        (["--init_from=nowhere/at-all"], "nowhere/at-all"),
        (["--init_from=resume"], "no checkpoint here"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(data_dir, tmp_path, more, words):
    if more == ["--device=cuda"] and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert re.search(words, message(train.main, arguments(data_dir, tmp_path / "run", *more)))
    assert not (tmp_path / "run").exists()


def test_a_warm_up_that_nobody_typed_is_shortened_for_a_short_run(data_dir, tmp_path, capsys):
    """A run of 20 steps with a config of 100 steps of warm-up warms up for two, also when the same
    command resumes it. The default of 2,000 steps is treated alike; what was typed is refused."""
    (tmp_path / "long.py").write_text("max_iters, warmup_iters, learning_rate = 750, 100, 1e-2\n")
    words = arguments(data_dir, tmp_path / "run", "--max_iters=20", "--eval_interval=10")
    words = [word for word in words if "warmup" not in word]
    argv = [str(tmp_path / "long.py"), *words]
    stop_after(5)
    assert train.main(argv).status == 143 and not train.main([*argv, "--init_from=resume"]).status
    printed = capsys.readouterr()
    note = "note: warmup_iters shortened from 100 to 2 (a tenth of max_iters=20)\n"
    assert printed.err.count(note) == 1 and len(note) <= 80 and "will differ" not in printed.out
    rates = dict(losses(tmp_path / "run", "lr"))
    assert rates[1] < rates[2] and max(rates, key=rates.get) == 3
    assert json.loads((tmp_path / "run" / "config.json").read_text())["warmup_iters"] == 2

    assert train.read_config([*words, "--max_iters=9"], "").config.warmup_iters == 0
    assert train.read_config([argv[0], "--max_iters=101"], "").config.warmup_iters == 100
    with pytest.raises(UserError, match="warmup_iters=100 is not below max_iters=20"):
        train.read_config([*argv, "--warmup_iters=100"], "")


@pytest.mark.parametrize(
    "words, log", [("=True", "wandb"), ("", "wandb"), ("=False", "none"), (" --log=csv", "csv")]
)
def test_nanogpts_wandb_log_means_log_wandb(words, log):
    assert train.read_config(f"--wandb_log{words}".split(), "").config.log == log


@pytest.fixture
def pretrained(data_dir, tmp_path):
    """A small LLaMA of transformers, and the command line of a run that starts from its folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=20, hidden_size=24, intermediate_size=40, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=16)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "hf")
    run = arguments(data_dir, tmp_path / "run", f"--init_from={tmp_path / 'hf'}")
    return model, [arg for arg in run if not arg.startswith(("--n_", "--block"))]


def test_pretrained_weights_go_on_training(pretrained, data_dir, tmp_path, resume):
    """The first evaluation is transformers' own loss."""
    (reference, run), out = pretrained, tmp_path / "run"
    train.main([*run, "--max_iters=2", "--eval_interval=2", "--eval_tokens=17"])
    tokens = torch.from_numpy(load_split(data_dir / "words", "val", 16)[:17].astype("int64"))[None]
    scores = reference(tokens[:, :-1]).logits.log_softmax(-1)
    expected = -scores.gather(2, tokens[:, 1:, None]).mean().item()
    scored = dict(losses(out, "val_loss"))
    assert abs(scored[0] - expected) < 1e-5 and scored[2] != scored[0]
    assert json.loads((out / "config.json").read_text())["model"] == "llama"
    assert not resume("run")  # it knows its width without the folder
    assert checkpoint.open_run(out)[0].blocks[0].mlp.gate.weight.shape == (40, 24)


def test_the_last_evaluation_scores_the_whole_split(data_dir, tmp_path):
    run = arguments(data_dir, tmp_path / "run", "--max_iters=4", "--eval_interval=2")
    parts = [row for row in train.main([*run, "--eval_tokens=100"]).rows if "val_loss" in row]
    run.append(f"--out_dir={tmp_path / 'all'}")
    whole = [row for row in train.main(run).rows if "val_loss" in row]
    assert [row.get("whole_val_loss") for row in parts] == [None, None, whole[-1]["val_loss"]]
    for key in ("val_loss_tune", "val_loss_report", "val_blocks"):
        assert parts[-1][key] == whole[-1][key] and parts[1][key] != whole[1][key]


def test_adamw_beside_muon_has_a_rate_of_its_own(data_dir, tmp_path):
    run = ready(data_dir, tmp_path, "--optimizer=muon", "--adam_rate=0.5")
    train.train_step(run)
    matrices, others = ({g["lr"] for g in o.param_groups} for o in run.optimizers)
    assert matrices == {learning_rate(0, run.config)} and others == {0.5 * max(matrices)}


def test_main_returns_what_the_run_gave(data_dir, tmp_path, capsys):
    result = train.main(arguments(data_dir, tmp_path / "run", "--max_iters=3"))
    assert result.status == 0 and result.folder == checkpoint.find(tmp_path / "run")
    assert [row["step"] for row in result.rows if "val_loss" in row] == [0, 3]
    steps = [row["loss"] for row in result.rows if "loss" in row]
    assert steps == [loss for _, loss in losses(tmp_path / "run")]
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    done = train.main(["--init_from=resume", f"--out_dir={tmp_path / 'run'}"])
    assert done.status == 0 and done.folder == result.folder
    assert "nothing to do" in capsys.readouterr().out
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before


def test_what_does_not_fit_pretrained_weights_is_said(pretrained, tmp_path, monkeypatch, capsys):
    run = pretrained[1]
    made([*run, "--block_size=64"])
    assert "note: block_size shortened from 64 to 16" in capsys.readouterr().out
    assert "weights of a llama model" in message(train.main, [*run, "--model=gpt2"])
    words = message(train.main, [*run, "--vocab_size=30"])
    assert "vocab_size=20 is below" in words or "leave out the keys" in words
    monkeypatch.setattr("weights.hf.same_tokens", lambda name, tokenizer: False)
    words = "not prepared with the tokenizer of these weights.*prepare.py NAME"
    assert re.search(words, message(train.main, run)) and not (tmp_path / "run").exists()


def test_a_run_in_an_order_that_is_not_made_any_more_names_the_last_commit(
    start, resume, tmp_path, monkeypatch
):
    """A run of more samples than LARGE that was saved before its order was stored."""
    start("run", "--max_iters=2")
    monkeypatch.setattr(settings, "LARGE", 1)
    assert resume("run", "--max_iters=3") == 0
    folder = checkpoint.find(tmp_path / "run")
    edit_json("state", lambda state: {key: state[key] for key in state if key != "order"})(folder)
    reseal(folder)
    assert "5aa2740" in message(resume, "run", "--max_iters=4")
    monkeypatch.undo()
    assert resume("run", "--max_iters=4") == 0
