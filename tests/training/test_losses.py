"""The means over the batches of an evaluation."""

import pytest
import torch
from torch.nn import functional as F

from training import losses
from training.losses import EVAL_BLOCKS, halves, mean_loss, measures
from training.parallel import Loss


def batch_sums(means, counts):
    """(n, 3) sums, as train.evaluate returns them: one target in a row."""
    return losses.batch_sums(list(map(torch.tensor, means)), [(count, count) for count in counts])


def test_the_halves_are_the_first_and_the_last_batches():
    sums = batch_sums([1.0, 2.0, 4.0, 8.0], [10, 30, 10, 30])
    row = halves([sums], [1.0])
    assert row["val_tune"] == pytest.approx((10 + 60) / 40)
    assert row["val_report"] == pytest.approx((40 + 240) / 40)
    assert row["val_blocks"] == [4.0, 8.0]
    assert halves([sums[:1]], [1.0]) == {}  # one batch has none


def test_blocks_cover_the_second_half_in_order():
    losses = [float(n) for n in range(200)]
    row = halves([batch_sums(losses, [7] * 200)], [1.0])
    assert len(row["val_blocks"]) == EVAL_BLOCKS
    assert row["val_blocks"] == sorted(row["val_blocks"]) and row["val_blocks"][0] >= 100


def test_datasets_are_weighted():
    a, b = batch_sums([1.0, 1.0], [5, 5]), batch_sums([3.0, 5.0, 3.0, 5.0], [5, 5, 5, 5])
    row = halves([a, b], [0.75, 0.25])
    assert row["val_tune"] == row["val_report"] == pytest.approx(0.75 + 0.25 * 4)
    assert row["val_blocks"] == [1.75]


NAMES = ("accuracy", "exact")


def test_a_batch_of_another_rank_or_without_targets_counts_nothing():
    found = [torch.tensor([2.0, 3, 1]), torch.tensor([9.0, 9, 9]), torch.tensor([torch.nan, 0, 0])]
    sums = losses.batch_sums(found, [(4, 2), (0, 0), (0, 0)])
    assert sums.tolist() == [[8, 4, 2, 3, 1], [0] * 5, [0] * 5]
    assert mean_loss(sums) == 2
    assert measures([sums], [1.0], [NAMES]) == {"val_accuracy": 3 / 4, "val_exact": 1 / 2}


def test_measures_are_means_over_the_datasets_that_have_them():
    text = losses.batch_sums([torch.tensor(1.0)], [(7, 1)])
    a = losses.batch_sums([torch.tensor([1.0, 2, 1])], [(4, 2)])
    b = losses.batch_sums([torch.tensor([1.0, 9, 3])], [(10, 4)])
    found = measures([text, a, b], [0.5, 0.3, 0.2], [(), NAMES, NAMES])
    assert found["val_accuracy"] == pytest.approx((0.3 * 0.5 + 0.2 * 0.9) / 0.5)
    assert found["val_exact"] == pytest.approx((0.3 * 0.5 + 0.2 * 0.75) / 0.5)
    assert measures([text], [1.0], [()]) == {}


def test_the_reported_half_has_measures_of_its_own():
    found = [torch.tensor([1.0, right, 0]) for right in (0, 1, 2, 3)]
    row = halves([losses.batch_sums(found, [(4, 2)] * 4)], [1.0], [NAMES])
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
