"""What the batches of an evaluation add up to: losses, and the measures of answers; yardsticks."""

import torch

from tokens import ngrams

EVAL_BLOCKS = 64  # blocks of the reported half whose losses a log row holds


def batch_sums(values, counts):
    """(n, 3) or (n, 5) float64 of an evaluation's n batches: the sum of the losses in nats, the
    number of targets, the number of rows, and, if the split has measures (tokens/pairs.py), the
    sum of each: right targets and right rows.

    values: the mean loss () of each batch, or the (3,) that a loss gives `measured`. counts: the
    `counts` of each batch, or zeros if another rank has scored it; then it adds nothing."""
    values = torch.stack(values).cpu().double().reshape(len(counts), -1)  # (n, 1 or 3)
    counts = torch.tensor(counts).double()  # (n, 2): targets, rows
    sums = torch.cat([values[:, :1] * counts[:, :1], counts, values[:, 1:]], 1)
    return torch.where(counts[:, :1] > 0, sums, 0.0)  # without targets, no mean loss


def mean_loss(sums):
    """Mean loss in nats per token of the batches that `batch_sums` returns."""
    total, targets, *_ = sums.sum(0)
    return (total / targets).item()


def measures(sums, names, prefix="val"):
    """{"val_" + name: share} of the measures beside the loss, from `batch_sums`. names: of the
    split's measures, none for running text."""
    _, targets, rows, *totals = sums.sum(0).tolist()
    counts = (targets, rows)  # the first measure is a share of targets, the second of rows
    shares = {}
    for name, total, count in zip(names, totals, counts, strict=False):  # none for running text
        shares[f"{prefix}_{name}"] = total / count
    return shares


def split_in_half(sums):
    """The batches of the first half of a validation text, and of the second. A sweep chooses
    learning rates on the first and reports on the second."""
    middle = len(sums) // 2
    return sums[:middle], sums[middle:]


def halves(sums, names=()):
    """The columns of a log row about the halves of the validation text: the loss on each, the
    losses of up to EVAL_BLOCKS consecutive blocks of the second, and its measures. A single batch
    has no halves."""
    if len(sums) < 2:
        return {}
    first, second = split_in_half(sums)
    blocks = second.tensor_split(min(EVAL_BLOCKS, len(second)))
    row = {
        "val_loss_tune": mean_loss(first),
        "val_loss_report": mean_loss(second),
        "val_blocks": [round(mean_loss(block), 6) for block in blocks],
    }
    return row | measures(second, names, prefix="report")


def evaluation_row(data, sums):
    """The columns of a log row, from the `batch_sums` of the splits of a Dataset: {"train", "val"},
    and at the end of a run "whole", the whole validation split, if "val" is a part of it."""
    names = data.splits["val"].measures
    val_loss = mean_loss(sums["val"])
    row = {
        "train_loss": mean_loss(sums["train"]),
        "val_loss": val_loss,
        "bits_per_byte": val_loss * data.bits_per_byte,
    }
    row |= measures(sums["val"], names)
    if "whole" in sums:
        row["whole_val_loss"] = mean_loss(sums["whole"])
    return row | halves(sums.get("whole", sums["val"]), names)


def yardsticks(run):
    """{"5-grams of 16,384 tokens": loss, "trigrams of ...": loss} of n-grams counted on as much of
    the text as a run has seen, in windows of its block_size (tokens/ngrams.py). {} for pairs, and
    for texts that are not counted."""
    counted = run.data.meta.get("ngrams")
    tokens = run.state["tokens"]
    return ngrams.named(ngrams.yardsticks(counted, tokens, run.model.config.block_size))
