"""A training step does not wait for the device, and the batches come from a thread."""

import threading

import numpy as np
import pytest
import torch

import train
from common.errors import Failure
from tests.helpers.runs import arguments, losses, ready
from training.feeder import Feeder

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


def test_a_loss_that_is_not_finite_is_named_and_never_saved(data_dir, tmp_path, monkeypatch):
    """It is noticed when the steps are read, and again before a save."""
    run = ready(data_dir, tmp_path, "--log_interval=1000")
    weight = run.learner.model.wte.weight
    hooks = []
    for step in range(5):
        if step == 2:
            hooks.append(weight.register_hook(lambda gradient: gradient * torch.nan))
        train.train_step(run)
    monkeypatch.setattr(train.checkpoint, "save", lambda *args: pytest.fail("this was saved"))
    with pytest.raises(FloatingPointError, match="gradient norm nan at step 3, learning rate"):
        train.save(run)


def test_steps_are_read_in_any_groups_with_the_same_results(data_dir, tmp_path):
    for interval in (1, 7):
        argv = arguments(data_dir, tmp_path / str(interval), "--max_iters=14", "--eval_interval=5")
        assert not train.main([*argv, f"--log_interval={interval}"])
    every, some = (dict(losses(tmp_path / name)) for name in ("1", "7"))
    assert list(some) == [7, 14] and all(every[step] == loss for step, loss in some.items())
    assert losses(tmp_path / "1", "val_loss") == losses(tmp_path / "7", "val_loss")


class Counted:
    """Batches whose sample k holds the number k. Notes the thread and the place of each reading."""

    masked = True

    def __init__(self):
        self.seen, self.threads, self.end = [], set(), 100

    def get(self, first, count):
        self.seen.append(first)
        self.threads.add(threading.current_thread().name)
        if first >= self.end:
            raise Failure("the file has become shorter", "train.bin", "prepare it again")
        x = np.repeat(np.arange(first, first + count)[:, None], 3, axis=1)
        return x, np.where(x % 2, x, -1)


def test_the_feeder_reads_ahead_and_returns_what_was_asked():
    batches = Counted()
    feeder = Feeder(batches)
    for step in (0, 1, 2, 7, 3):  # step 7 was not foreseen, nor is the return to 3
        places = [(4 * step, 2), (4 * step + 2, 2)]
        made = feeder.take(places, [(4 * step + 4, 2), (4 * step + 6, 2)], "cpu")
        assert [x[:, 0].tolist() for x, _, _ in made] == [[k, k + 1] for k, _ in places]
        assert all(count == 3 == int((y >= 0).sum()) for _, y, count in made)
    assert len(batches.threads) == 1 and threading.current_thread().name not in batches.threads


def test_an_error_of_the_feeder_comes_with_its_own_step():
    batches = Counted()
    feeder, batches.end = Feeder(batches), 4
    assert feeder.take([(0, 2)], [(4, 2)], "cpu")
    with pytest.raises(Failure, match="shorter"):
        feeder.take([(4, 2)], [(8, 2)], "cpu")
