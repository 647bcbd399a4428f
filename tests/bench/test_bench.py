"""bench/: that the sides of a comparison are the same size and do the same work. No times are asserted."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.timing import train

TINY = SimpleNamespace(**dict(zip(train.FIELDS, (2, 2, 64, 16, 3, 65, 8))))


def sides():
    config = SimpleNamespace(nanogpt=None, litgpt=None, dtype="float32")
    return train.make_sides(config, TINY, "cpu")


def test_sides_are_of_one_size_and_take_the_same_step():
    found = sides()
    assert {"our GPT-2", "our LLaMA", "transformers GPT-2", "transformers LLaMA"} <= found.keys()
    sizes = {name: sum(p.numel() for p in side.model.parameters()) for name, side in found.items()}
    assert sizes["our LLaMA"] == sizes["transformers LLaMA"]
    biases = sum(
        p.numel()
        for name, p in found["transformers GPT-2"].model.named_parameters()
        if name.endswith("bias")
    )
    assert sizes["our GPT-2"] == sizes["transformers GPT-2"] - biases
    for side in found.values():
        before = side.loss(side.x, side.y)
        side.step(side.loss)
        after = side.loss(side.x, side.y)
        assert (
            after < before and abs(before.item() - np.log(65)) < 0.5
        )  # the mean over the tokens, in nats; one step learns
        assert all(p.grad is None for p in side.model.parameters())


@pytest.mark.parametrize("shape", train.SHAPES)
def test_flops_are_six_per_weight_and_attention(shape):
    c = SimpleNamespace(**dict(zip(train.FIELDS, train.SHAPES[shape])))
    weights = 12 * c.n_layer * c.n_embd**2 + c.vocab_size * c.n_embd
    flops = train.training_flops_per_token(train.costs_config("gpt2", c), c.block_size)
    assert flops == 6 * weights + 12 * c.n_layer * c.block_size * c.n_embd


def test_interval_holds_the_median_and_narrows():
    rng = np.random.default_rng(0)
    few, many = (train.interval(1.2 + 0.1 * rng.standard_normal(n)) for n in (8, 400))
    assert (
        few[1] < few[0] < few[2] and many[2] - many[1] < few[2] - few[1] and many[1] < 1.2 < many[2]
    )


def test_report_names_each_ratio(monkeypatch, capsys):
    """Seconds made up, so that the ratio and its direction are known: ours takes half of theirs, compiled."""
    written = []
    monkeypatch.setitem(train.SHAPES, "S", tuple(vars(TINY).values()))
    monkeypatch.setattr(
        train, "write", lambda lines, name: written.append((name, "\n".join(lines)))
    )
    made = {
        "our": {"eager": 0.4, "compiled": 0.1},
        "transformers": {"eager": 0.3, "compiled": 0.2},
        "litgpt": {"eager": 0.3, "compiled": 0.2},
    }
    monkeypatch.setattr(
        train,
        "race",
        lambda sides, config: (
            {
                (name, mode): np.full(5, seconds)
                for name in sides
                for mode, seconds in made[name.split()[0]].items()
            },
            {},
        ),
    )
    threads = torch.get_num_threads()
    try:
        train.main(["train", "--device=cpu"])
    finally:
        torch.set_num_threads(threads)
    name, text = written[0]
    assert name == "speed_train_S"
    assert (
        "| our LLaMA (compiled) / transformers LLaMA (compiled) | 2.000 | 2.000 to 2.000 |" in text
    )
    assert (
        f"| our GPT-2 | {sum(p.numel() for p in sides()['our GPT-2'].model.parameters()) / 1e6:.2f} M | compiled | 100.0 | 480 |"
        in text
    )


def test_optimizers_are_timed_at_both_shapes(monkeypatch):
    from bench.timing import optimizer

    written = []
    monkeypatch.setattr(optimizer, "SHAPES", dict.fromkeys("SM", tuple(vars(TINY).values())))
    monkeypatch.setattr(optimizer, "write", lambda lines, name: written.append((name, lines)))
    threads = torch.get_num_threads()
    try:
        optimizer.main(["optimizer", "--device=cpu", "--steps=3"])
    finally:
        torch.set_num_threads(threads)
    name, lines = written[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines[-2:]]
    assert name == "speed_optimizer" and [row[1] for row in rows] == ["S", "M"]
    assert all(float(cell) > 0 for row in rows for cell in row[2:6])
