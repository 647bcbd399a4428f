"""The means over the batches of an evaluation."""

import pytest
import torch

from training.losses import EVAL_BLOCKS, halves, mean_loss


def batch_sums(losses, counts):
    """(n, 2) sums of losses and numbers of targets, as train.evaluate returns them."""
    losses, counts = torch.tensor(losses).double(), torch.tensor(counts).double()
    return torch.stack([losses * counts, counts], 1)


def test_each_target_has_the_same_weight():
    sums = batch_sums([1.0, 2.0, 4.0], [10, 10, 5])
    assert mean_loss(sums) == pytest.approx((10 + 20 + 20) / 25)


def test_the_halves_are_the_first_and_the_last_batches():
    sums = batch_sums([1.0, 2.0, 4.0, 8.0], [10, 30, 10, 30])
    row = halves([sums], [1.0])
    assert row["val_tune"] == pytest.approx((10 + 60) / 40)
    assert row["val_report"] == pytest.approx((40 + 240) / 40)
    assert row["val_blocks"] == [4.0, 8.0]


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


def test_one_batch_has_no_halves():
    assert halves([batch_sums([1.0], [5])], [1.0]) == {}
