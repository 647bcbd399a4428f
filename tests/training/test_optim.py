"""The optimizers and the schedules of the learning rate."""

import pytest
import torch

import train
from common.runtime import Runtime
from helpers.runs import ready
from parts.architectures import CORNERS, configure, make
from training import optim
from training.optim import learning_rate, make_optimizers
from training.settings import TrainConfig


@pytest.mark.parametrize("word", CORNERS)
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(word):
    """All matrices decay, and nothing else."""
    model = make(configure({"model": word, "n_layer": 2, "n_head": 2, "n_embd": 16}))
    config = TrainConfig(optimizer="muon", beta1=0.8, beta2=0.7, weight_decay=0.3)
    muon, adamw = make_optimizers(model, config, Runtime("cpu", "float32", 0, 1))
    assert muon.param_groups[0]["momentum"] == 0.8
    assert adamw.param_groups[0]["betas"] == (0.8, 0.7)
    names = [
        {name for group in optimizer.param_groups for name in group["param_names"]}
        for optimizer in (muon, adamw)
    ]
    parameters = {name: p.dim() for name, p in model.named_parameters()}
    matrices = {name for name in parameters if name[:7] == "blocks." and parameters[name] == 2}
    assert names == [matrices, parameters.keys() - matrices]
    for group in muon.param_groups + adamw.param_groups:
        assert all((p.dim() >= 2) == (group["weight_decay"] == 0.3) for p in group["params"])


MUON = dict(lr=0.1, weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw")


def our_muon(parameters, dtype="float32"):
    """Our Muon with the settings of MUON."""
    config = TrainConfig(learning_rate=0.1, beta1=0.9)
    group = {"params": parameters, "weight_decay": 0.2}
    return optim.Muon([group], config, Runtime("cpu", dtype, 0, 1))


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
    config.schedule, config.min_lr, config.lr_decay_iters = "linear", None, 60
    rates = [learning_rate(step, config) for step in (35, 60, 110)]
    assert rates == pytest.approx([0.55, 0.1, 0.1])  # a tenth of learning_rate, from step 60 on


def test_adamw_beside_muon_has_a_rate_of_its_own(data_dir, tmp_path):
    run = ready(data_dir, tmp_path, "--optimizer=muon", "--adam_rate=0.5")
    train.train_step(run)
    matrices, others = ({g["lr"] for g in o.param_groups} for o in run.optimizers)
    assert matrices == {learning_rate(0, run.config)} and others == {0.5 * max(matrices)}
