"""The means over the batches of an evaluation."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from helpers.variants import config, tokens
from parts.variant import Variant
from training import evaluation
from training.evaluation import EVAL_BLOCKS, halves, mean_loss, measures
from training.net import Loss, evaluation_net


def batch_sums(means, counts):
    """(n, 3) sums, as train.evaluate returns them: one target in a row."""
    return evaluation.batch_sums(
        list(map(torch.tensor, means)), [(count, count) for count in counts]
    )


def test_the_halves_are_the_first_and_the_last_batches():
    sums = batch_sums([1.0, 2.0, 4.0, 8.0, 8.0], [10, 30, 10, 15, 15])
    row = halves(sums)
    assert row["val_loss_tune"] == pytest.approx((10 + 60) / 40)
    assert row["val_loss_report"] == pytest.approx((40 + 240) / 40)
    assert row["val_blocks"] == [4.0, 8.0, 8.0]
    assert halves(sums[:1]) == {} != halves(sums[:2])  # one batch has none


def test_blocks_cover_the_second_half_in_order():
    row = halves(batch_sums([float(n) for n in range(200)], [7] * 200))
    wanted = [block.mean() for block in np.array_split(np.arange(100, 200), EVAL_BLOCKS)]
    assert row["val_blocks"] == pytest.approx(wanted)


NAMES = ("accuracy", "exact")


def test_a_batch_of_another_rank_or_without_targets_counts_nothing():
    found = [torch.tensor([2.0, 3, 1]), torch.tensor([9.0, 9, 9]), torch.tensor([torch.nan, 0, 0])]
    sums = evaluation.batch_sums(found, [(4, 2), (0, 0), (0, 0)])
    assert sums.tolist() == [[8, 4, 2, 3, 1], [0] * 5, [0] * 5]
    assert mean_loss(sums) == 2
    assert measures(sums, NAMES) == {"val_accuracy": 3 / 4, "val_exact": 1 / 2}


def test_the_reported_half_has_measures_of_its_own():
    found = [torch.tensor([1.0, right, 0]) for right in (0, 1, 2, 3)]
    row = halves(evaluation.batch_sums(found, [(4, 2)] * 4), NAMES)
    assert row["report_accuracy"] == 5 / 8 and row["report_exact"] == 0


def test_a_row_is_right_if_all_its_targets_are():
    def model(x, y):
        """Its most probable tokens are those that it is given."""
        logits = 5 * F.one_hot(x, 7).float()
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)

    y = torch.tensor([[-1, 3, 4], [-1, 3, 4], [-1, -1, 2], [-1, -1, -1]])
    x = torch.tensor([[1, 3, 4], [1, 3, 5], [0, 0, 2], [1, 1, 1]])
    loss, tokens, rows = Loss(model)(x, y, measured=True).tolist()
    assert (tokens, rows) == (4, 2)  # a row without targets is not right
    assert loss == Loss(model)(x, y).item()


@pytest.mark.parametrize("device, compiles", [("cpu", False), ("cuda", True)])
def test_an_evaluation_is_not_compiled_on_a_cpu(device, compiles):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    model = Variant(config("llama", {}))
    for block in model.blocks:
        block.compile(backend=backend)
    loss = Loss(model)
    net = evaluation_net(loss, SimpleNamespace(compile=True, device=device))
    x = tokens(model.config)
    with torch.no_grad():
        net(x, x)
    assert bool(graphs) == compiles
    loss(x, x)  # a step of training, after the evaluation, is compiled on both
    assert graphs
