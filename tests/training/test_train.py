"""The training loop: exactness, and what a run leaves behind. Runs are tiny, on one thread."""

import functools
import json
import math
import os
import re
import shutil
import signal

import numpy as np
import pytest
import torch

import sample
import train
from common.errors import TORCHRUN, UserError
from common.files import sha256_of
from common.runtime import Runtime, StopRequest
from helpers.runs import arguments, losses, ready, same_runs, stop_after, two_ranks, weights
from helpers.texts import message
from training import evaluation, optim, ranks
from training.step_costs import kept_bytes
from weights import checkpoint


@pytest.mark.parametrize(
    "more",
    [
        *(f"--model=llama --schedule={word}" for word in optim.SCHEDULE),
        *(f"--schedule=wsd --optimizer={word}" for word in optim.OPTIMIZER if word != "adamw"),
        "--model=gpt2 --data_seed=7",
        "--norm=batchnorm",
        "--arch=gpt-neox --n_embd=32",
        "--model=llama --mlp=moe --moe_balance=bias",
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
    best = [checkpoint.best_of(tmp_path / name) for name in ("stopped", "straight")]
    assert best[0] == best[1]


def test_a_resume_that_is_stopped_before_its_first_step_keeps_its_keys(start, resume, tmp_path):
    def stop(run):
        os.kill(os.getpid(), signal.SIGTERM)

    start("run", "--max_iters=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "evaluation_due", stop)
        assert resume("run", "--max_iters=4") == 143
    assert not resume("run") and checkpoint.steps(tmp_path / "run") == [2, 4]


def test_looking_changes_no_training_loss(start, tmp_path):
    start("a", "--max_iters=6 --dropout=0.1 --eval_interval=6")
    start("b", "--max_iters=6 --dropout=0.1 --eval_interval=1 --eval_tokens=100")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.parametrize("clip", [0, 1e-3])
def test_gradients_are_clipped_to_grad_clip(data_dir, tmp_path, monkeypatch, clip):
    run = ready(data_dir, tmp_path, f"--grad_clip={clip}")
    sizes = []

    def zero_grad(optimizer):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        sizes.append(torch.nn.utils.get_total_norm(grads).item())

    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", zero_grad)
    norm = train.train_step(run)[1].item()
    assert norm > 1 and sizes == [pytest.approx(clip or norm, rel=1e-3)]


def test_an_evaluation_is_without_dropout(data_dir, tmp_path):
    run = ready(data_dir, tmp_path, "--dropout=0.5", "--gradient_accumulation_steps=2")
    val = run.data.splits["val"]
    first, second = (evaluation.mean_loss(train.evaluate(run, val, 256)) for _ in range(2))
    assert first == second, "call run.model.eval() before the forward passes"
    assert run.model.training, "call run.model.train() after them"
    masks = []
    see = lambda module, args, out: masks.append(str((out == 0).tolist()))
    run.model.dropout.register_forward_hook(see)
    train.train_step(run), train.train_step(run)
    assert len(set(masks)) == 4, "each micro-batch of each step drops other features"


@pytest.mark.parametrize(
    "first,then,model",
    [
        ("one", "fsdp", "llama --residual=attn_res"),  # whose head reads the last block
        ("ddp", "one", "gpt2 --mlp=moe --moe_balance=bias"),
        ("fsdp", "ddp", "gpt2"),
    ],
)
@pytest.mark.slow
def test_a_run_moves_between_one_process_ddp_and_fsdp(data_dir, tmp_path, first, then, model):
    """Half in one layout, half in another: losses, weights and moments are as in one process."""
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
        done = two_ranks(*run, *more, f"--parallel={layout}")
        assert done.returncode == 0, done.stderr
        assert "best validation loss" in done.stdout
    for key in ("loss", "val_loss", "grad_norm"):
        a, b = (dict(losses(tmp_path / name, key)) for name in ("one", "moved"))
        assert b == pytest.approx(a, abs=1e-5, rel=1e-5) and len(a) >= 3
    a, b = weights(tmp_path / "one"), weights(tmp_path / "moved")
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_a_mistake_found_by_rank_0_ends_all(start, data_dir, tmp_path):
    """The other rank does not wait when rank 0 finds it; if both find it, it is printed once."""
    start("run", "--max_iters=1")
    more = ("--max_iters=1", "--gradient_accumulation_steps=2")
    done = two_ranks(*arguments(data_dir, tmp_path / "run", *more))
    assert done.returncode != 0 and "Connection closed" not in done.stderr
    assert done.stderr.count("error: out_dir already contains a run") == 1


@pytest.mark.parametrize("rank, words", [(0, "no data"), (1, "rank 0 cannot continue")])
def test_a_mistake_of_rank_0_reaches_each_rank(monkeypatch, rank, words):
    """With its exit status, which is all that rank 0 sends."""
    sent = []

    def broadcast(status, source):
        sent.append(status.item())
        status.fill_(2)

    def work():
        raise UserError("no data", "data_dir", "prepare them")

    monkeypatch.setattr(ranks.dist, "broadcast", broadcast)
    with pytest.raises(UserError, match=words) as found:
        ranks.main_first(work, Runtime("cpu", "float32", rank, 2))
    assert found.value.status == 2 and sent == [0 if rank else 2]


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
        ("--norm=batchnorm", "norm=batchnorm"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(data_dir, tmp_path, monkeypatch, more, words):
    for name in TORCHRUN:
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "0")
    layout = ["--parallel=fsdp", "--gradient_accumulation_steps=2"]
    with pytest.raises(UserError, match=words):
        settings = train.read_config(arguments(data_dir, tmp_path / "run", *layout, more), "")
        ranks.check_layout(settings.config, Runtime("cpu", "float32", 0, 2))


def test_float16_halves_its_scale_on_overflow_skips_the_step_and_grows_again(data_dir, tmp_path):
    run = ready(data_dir, tmp_path, "--dtype=float16", "--mlp=moe", "--moe_balance=bias")
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    before = {name: p.clone() for name, p in run.model.state_dict().items()}
    skipped = 0
    while not math.isfinite(train.train_step(run)[1]):
        skipped += 1
        assert run.scaler.get_scale() == 2.0 ** (40 - skipped)
        assert all(torch.equal(before[name], p) for name, p in run.model.state_dict().items())
        assert not any(optimizer.state for optimizer in run.optimizers)
    assert skipped > 3 and run.step == skipped + 1
    assert not all(torch.equal(before[name], p) for name, p in run.model.state_dict().items())
    run.scaler.update(2.0**10)  # far from an overflow
    for _ in range(2):
        train.train_step(run)
    assert run.scaler.get_scale() == 2.0**11  # three steps without an overflow


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


def test_data_seed_sets_the_order_apart_from_the_initialisation(data_dir, tmp_path):
    """Runs of one data_seed see the same batches, whatever their seed."""
    seeds = {"a": "--seed=1 --data_seed=5", "b": "--seed=2 --data_seed=5", "d": "--seed=5"}
    seeds["c"] = "--seed=1 --data_seed=6"
    runs = {name: ready(data_dir, tmp_path, *text.split()) for name, text in seeds.items()}
    seen = {name: run.samples.get(0, 8)[0].tolist() for name, run in runs.items()}
    assert seen["a"] == seen["b"] == seen["d"] != seen["c"]
    assert train.train_step(runs["a"])[0] != train.train_step(runs["b"])[0]


def test_run_folder_and_last_words(start, tmp_path, whole_end, capsys):
    out = tmp_path / "run"
    options = "--max_iters=60 --eval_interval=20 --warmup_iters=5 --model=llama"
    start("run", f"{options} --learning_rate=1e-2 --min_lr=1e-3")
    files = ["best", "ckpt", "config.json", "latest", "lock", "log.jsonl", "loss.png"]
    assert sorted(path.name for path in out.iterdir()) == files
    assert checkpoint.steps(out)[-2:] == [40, 60]
    best, scored = checkpoint.best_of(out), dict(losses(out, "val_loss"))
    assert scored[best] == min(scored.values()) < scored[0] - 1  # it learns
    vocab_size = json.loads((out / "config.json").read_text())["vocab_size"]
    assert abs(scored[0] - math.log(vocab_size)) < 0.1
    bits = dict(losses(out, "bits_per_byte"))
    assert bits[60] == pytest.approx(scored[60] / math.log(2))  # ASCII: a character is a byte
    printed = capsys.readouterr().out.replace("\\\n  ", "")
    assert f"best validation loss {scored[best]:.4f}" in printed and "bits per byte" in printed
    assert "60 steps of 64 tokens: 0.82 epochs" in printed  # 240 of 293 windows
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
    best = checkpoint.best_of(out)
    assert best == min(scored, key=scored.get) == 16
    assert checkpoint.steps(out) == [best, 32, 40] and (out / "latest").read_text() == "40\n"
    chosen, newest = (sample.load(out, which)[0].wte.weight for which in ("best", "latest"))
    assert not torch.equal(chosen, newest)
    bits = dict(losses(out, "bits_per_byte"))[best]
    assert checkpoint.read(checkpoint.find(out))[0]["best_bits_per_byte"] == bits


def test_eval_only_scores_the_split_that_is_asked_for(data_dir, tmp_path, resume, capsys):
    """A dataset whose test split is the validation split of another: the same loss."""
    folder, out = tmp_path / "data" / "words", tmp_path / "run"
    shutil.copytree(data_dir / "words", folder)
    shutil.copy(folder / "val.bin", folder / "test.bin")
    meta = json.loads((folder / "meta.json").read_text())
    splits = meta["splits"] | {"test": meta["splits"]["val"]}
    (folder / "meta.json").write_text(json.dumps(meta | {"splits": splits}))
    handler = signal.getsignal(signal.SIGINT)
    train.main(arguments(tmp_path / "data", out, "--max_iters=3"))
    assert signal.getsignal(signal.SIGINT) == handler
    logged = f"{losses(out, 'val_loss')[-1][1]:.4f}, "
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    capsys.readouterr()
    expected = {"val": "val loss " + logged, "test": "words: test loss " + logged}
    for split, text in (expected | {"train": "words: train loss "}).items():
        resume("run", f"--eval_only --split={split} --seed=5")  # which trains nothing
        printed = capsys.readouterr().out
        assert text in printed and (logged in printed) == (split != "train")
        assert "warning" not in printed and "note" not in printed
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before

    train.main(arguments(tmp_path / "data", out, "--eval_only"))
    assert "note: these weights are new; --init_from=resume" in capsys.readouterr().out
    resume("run", "--eval_only --eval_tokens=100")
    part = re.search("val (loss [0-9.]+)", capsys.readouterr().out)[1]
    resume("run", "--eval_only --split=test --eval_tokens=100")
    assert f"test {part}" in capsys.readouterr().out and part[5:] not in logged
    said = message(resume, "run", "--split=test")
    assert re.search("split=test is scored by eval_only.*--eval_only", said)
    ids = np.fromfile(folder / "val.bin", "uint16")[:9]  # fewer than block_size
    ids.tofile(folder / "test.bin")
    splits["test"] = {"tokens": 9, "bytes": 9, "sha256": sha256_of(folder / "test.bin")}
    (folder / "meta.json").write_text(json.dumps(meta | {"splits": splits}))
    resume("run", "--eval_only --split=test")
    assert "words: test loss " in capsys.readouterr().out
    del splits["test"]
    (folder / "meta.json").write_text(json.dumps(meta | {"splits": splits}))
    assert "has no test split" in message(resume, "run", "--eval_only --split=test")


@pytest.mark.parametrize(
    "more",
    [
        "--position=t5 --block_size=9",
        "--model=llama --n_kv_head=None",
        "--arch=mistral --n_embd=32",
    ],
)
def test_the_same_command_resumes(start, tmp_path, more):
    start("run", f"{more} --max_iters=2")
    start("run", f"{more} --max_iters=3 --init_from=resume")
    assert checkpoint.steps(tmp_path / "run") == [2, 3]


def test_a_run_goes_on_from_the_weights_of_another_with_fewer_positions(start, tmp_path):
    start("run", "--model=gpt2 --max_iters=2")
    weights = f"--model=gpt2 --max_iters=2 --init_from={tmp_path / 'run'}"
    assert not start("shorter", f"{weights} --block_size=8")
    for size in ("--block_size=64", "--n_layer=3"):
        assert "keys that change the architecture" in message(start, "other", f"{weights} {size}")
    assert "another n_head" in message(start, "other", f"{weights} --n_head=4")
    assert not start("same", weights)
    before, after = (losses(tmp_path / name, "val_loss") for name in ("run", "same"))
    assert after[0] == (0, pytest.approx(before[-1][1], abs=1e-5))


def test_the_last_evaluation_scores_the_whole_split(data_dir, tmp_path, capsys):
    run = arguments(data_dir, tmp_path / "run", "--max_iters=4", "--eval_interval=2")
    parts = [row for row in train.main([*run, "--eval_tokens=100"]).rows if "val_loss" in row]
    (tmp_path / "own.py").write_text("eval_tokens = 100\n")
    cases = ([], True), ([str(tmp_path / "own.py")], True), (["--eval_tokens=50"], False)
    for more, is_whole in cases:
        capsys.readouterr()
        resume = ["--init_from=resume", f"--out_dir={tmp_path / 'run'}", "--eval_only", *more]
        assert not train.main(resume).status
        assert ("on the whole split" in capsys.readouterr().out) == is_whole
    later = train.main([*run, "--init_from=resume", "--eval_tokens=0"])  # a best loss of its own
    run.append(f"--out_dir={tmp_path / 'all'}")
    whole = [row for row in train.main(run).rows if "val_loss" in row]
    assert [row.get("whole_val_loss") for row in parts] == [None, None, whole[-1]["val_loss"]]
    for key in ("val_loss_tune", "val_loss_report", "val_blocks"):
        assert parts[-1][key] == whole[-1][key] and parts[1][key] != whole[1][key]
    assert checkpoint.read(later.folder)[0]["best_val_loss"] == whole[-1]["val_loss"]


def test_main_returns_what_the_run_gave(data_dir, tmp_path, capsys):
    result = train.main(arguments(data_dir, tmp_path / "run", "--max_iters=3"))
    assert result.status == 0 and result.folder == checkpoint.find(tmp_path / "run")
    assert [row["step"] for row in result.rows if "val_loss" in row] == [0, 3]
    steps = [row["loss"] for row in result.rows if "loss" in row]
    assert steps == [loss for _, loss in losses(tmp_path / "run")]
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    done = train.main(["--init_from=resume", f"--out_dir={tmp_path / 'run'}"])
    assert done.status == 0 and done.folder == result.folder and done.rows == result.rows
    assert "nothing to do" in capsys.readouterr().out
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before

    more = ["--init_from=resume", "--batch_size=2", "--max_iters=4"]
    rows = train.main([*more, f"--out_dir={tmp_path / 'run'}"]).rows
    tokens = [row["tokens"] for row in rows if "tokens" in row]
    assert tokens == [64, 128, 192, 192 + 32]  # the first batches were of four samples
