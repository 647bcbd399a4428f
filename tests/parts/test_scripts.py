"""The parts through train.py and sample.py, and compiled."""

import math
from types import SimpleNamespace

import pytest
import torch

import sample
import train
from helpers.checkpoints import edit_json, reseal
from helpers.runs import arguments, equal, losses, weights
from helpers.variants import close, config, name, tokens
from parts.variant import Variant
from training.net import Loss, compiled
from weights.checkpoint import find


@pytest.mark.parametrize(
    "keys, sampled",
    [
        (
            "--mixer=gated_delta,attention --residual=hyper --conv_sites=keys,mlp_output",
            "--top_k=5",
        ),
        ("--mixer=mamba2 --position=none", "--temperature=0"),
        ("--mixer=mla,differential --mlp=moe --n_experts=4 --shared_experts=1", "--dtype=int8"),
    ],
)
def test_they_train_and_write(keys, sampled, data_dir, tmp_path, capsys):
    out = tmp_path / "out"
    more = ["--model=llama", "--optimizer=muon", "--max_iters=16", "--learning_rate=1e-2"]
    assert not train.main(arguments(data_dir, out, *more, *keys.split())).status
    curve = [loss for _, loss in losses(out)]
    assert curve[-1] < curve[0] - 0.2 and all(map(math.isfinite, curve))
    capsys.readouterr()
    sample.main([f"--out_dir={out}", "--device=cpu", "--max_new_tokens=40", sampled])
    assert len(capsys.readouterr().out) > 40


def test_a_checkpoint_with_keys_of_an_earlier_version_resumes_with_the_same_bits(
    data_dir, tmp_path
):
    more = ["--model=llama", "--attn_extra=sink,xsa", "--lr_decay_iters=6"]
    train.main(arguments(data_dir, tmp_path / "straight", "--max_iters=6", *more))
    train.main(arguments(data_dir, tmp_path / "old", "--max_iters=3", *more))

    def as_it_was(config):
        kept = {key: config[key] for key in config if key not in ("attn_extra", "head_dim")}
        return kept | dict(attn_gate="none", attn_sink=True, xsa=True, value_residual=False)

    folder = find(tmp_path / "old")
    edit_json("config", as_it_was)(folder)
    reseal(folder)
    train.main(["--init_from=resume", f"--out_dir={tmp_path / 'old'}", "--max_iters=6"])
    assert equal(weights(tmp_path / "straight"), weights(tmp_path / "old"))


ARMS = [
    dict(mixer="mla"),
    dict(mixer="differential"),
    dict(mixer="gated_delta", position="none"),
    dict(mixer="mamba2", position="none"),
    dict(conv=4),
    dict(kv_shared_by=2, conv_sites="keys,values,output,mlp_inner"),
    dict(position="t5"),
    dict(residual="hyper", block="parallel"),
]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("arm", ARMS, ids=name)
def test_they_compile(arm, device):
    """Block by block and as a whole, as train.py compiles them for a CPU and for a GPU."""
    results = []
    for compile in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Variant(config("llama", arm, n_embd=32, block_size=150))
        loss = compiled(Loss(model), model, SimpleNamespace(compile=compile, device=device))
        value = loss(tokens(model.config), tokens(model.config, seed=2))
        value.backward()
        results.append([value, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert close(a, b, 1e-5)
