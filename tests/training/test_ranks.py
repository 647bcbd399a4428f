"""A training step waits for no device, batches come from a thread, each rank has its own GPU."""

import threading

import numpy as np
import pytest
import torch

import train
from common.runtime import Runtime
from helpers.runs import arguments, losses, ready, two_ranks
from tokens.batches import Loader

READS = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")


@pytest.fixture
def reads(monkeypatch):
    """The names of the methods that read a tensor's values, as they are called."""
    called = []
    for name in READS:
        real = getattr(torch.Tensor, name)

        def read(tensor, *args, name=name, real=real, **more):
            called.append(name)
            return real(tensor, *args, **more)

        monkeypatch.setattr(torch.Tensor, name, read)
    return called


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_steady_step_reads_no_tensor(data_dir, tmp_path, reads, optimizer, model):
    more = [f"--optimizer={optimizer}", f"--model={model}", "--gradient_accumulation_steps=2"]
    run = ready(data_dir, tmp_path, *more, "--dropout=0.1")
    assert run.ask_every == 1  # or torchrun's 30 s may end before the ranks know of a SIGTERM
    train.train_step(run)
    reads.clear()
    for _ in range(3):
        train.train_step(run)
    assert reads == [] and len(run.unread) == 4
    loss, norm = train.read_steps(run)
    assert loss > 0 and norm > 0 and "tolist" in reads and run.unread == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compile", [False, True])
def test_a_steady_step_does_not_synchronize_a_gpu(data_dir, tmp_path, compile):
    more = ["--device=cuda", "--gradient_accumulation_steps=2", f"--compile={compile}"]
    run = ready(data_dir, tmp_path, *more)
    for _ in range(3):
        train.train_step(run)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            train.train_step(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert train.read_steps(run)[0] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_run_resumes_on_a_gpu(data_dir, tmp_path, dtype):
    """With the moments of the fused AdamW, and the scale of a float16 loss."""
    more = ["--device=cuda", f"--dtype={dtype}", "--compile=False", "--lr_decay_iters=6"]
    assert not train.main(arguments(data_dir, tmp_path / "whole", *more, "--max_iters=6")).status
    assert not train.main(arguments(data_dir, tmp_path / "parts", *more, "--max_iters=3")).status
    again = ["--init_from=resume", f"--out_dir={tmp_path / 'parts'}", "--max_iters=6"]
    assert not train.main(again).status
    whole = [loss for _, loss in losses(tmp_path / "whole")]
    assert [loss for _, loss in losses(tmp_path / "parts")] == pytest.approx(whole, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_on_two_gpus_are_one_process(data_dir, tmp_path):
    more = ["--device=cuda", "--dtype=float32", "--compile=False", "--max_iters=5"]
    more.append("--gradient_accumulation_steps=2")
    assert not train.main(arguments(data_dir, tmp_path / "one", *more)).status
    done = two_ranks(*arguments(data_dir, tmp_path / "two", *more))
    assert not done.returncode, done.stderr
    one = [loss for _, loss in losses(tmp_path / "one")]
    assert [loss for _, loss in losses(tmp_path / "two")] == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("dtype, factor", [("float32", torch.nan), ("float16", torch.inf)])
def test_a_norm_that_is_not_finite_is_named_and_never_saved(
    data_dir, tmp_path, monkeypatch, dtype, factor
):
    """When the steps are read, and before a save. float16 cannot halve its scale any more."""
    run = ready(data_dir, tmp_path, "--log_interval=1000", f"--dtype={dtype}")
    run.scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=dtype == "float16")
    for step in range(5):
        if step == 2:
            run.model.wte.weight.register_hook(lambda gradient: gradient * factor)
        train.train_step(run)
    monkeypatch.setattr(train.checkpoint, "save", lambda **args: pytest.fail("this was saved"))
    for read in (train.read_steps, train.save):
        with pytest.raises(FloatingPointError, match=f"norm {factor} at step 3, learning rate"):
            read(run)


def test_steps_are_read_in_any_groups_with_the_same_results(data_dir, tmp_path):
    for interval in (1, 7):
        argv = arguments(data_dir, tmp_path / str(interval), "--max_iters=14", "--eval_interval=5")
        assert not train.main([*argv, f"--log_interval={interval}"]).status
    every, some = (dict(losses(tmp_path / name)) for name in ("1", "7"))
    assert list(some) == [7, 14] and all(every[step] == loss for step, loss in some.items())
    assert losses(tmp_path / "1", "val_loss") == losses(tmp_path / "7", "val_loss")


class Counted:
    """Batches whose sample k holds the number k. Notes the thread of each reading."""

    masked = True

    def __init__(self):
        self.threads = set()

    def get(self, first, count):
        self.threads.add(threading.current_thread().name)
        x = np.repeat(np.arange(first, first + count)[:, None], 3, axis=1)
        return x, np.where(x % 2, x, -1)


def test_the_loader_reads_ahead_and_returns_what_was_asked():
    batches = Counted()
    loader = Loader(batches, 2, 2, Runtime("cpu", "float32", 0, 1))
    for step in (0, 1, 2, 7, 3):  # step 7 was not foreseen, nor is the return to 3
        micro_batches = loader.get(step)
        samples = [inputs[0][:, 0].tolist() for _, inputs, _ in micro_batches]
        assert samples == [[4 * step, 4 * step + 1], [4 * step + 2, 4 * step + 3]]
        assert [micro_batch.n_targets for micro_batch in micro_batches] == [3, 3]
    assert len(batches.threads) == 1 and threading.current_thread().name not in batches.threads
