"""What an evaluation's batches add up to: losses, and the measures of answers."""

import torch

from tokens.pairs import Preferences

EVAL_BLOCKS = 64  # parts of the validation text whose losses a log row holds


def weight(split, y):
    """(number of targets, number of rows that have one) of a batch's y (rows, T), -1 where none is.
    Of preferences both are their number, since the loss is a mean over them."""
    asked = y >= 0
    rows = int(asked.any(1).sum())
    return (rows // 2, rows // 2) if isinstance(split, Preferences) else (int(asked.sum()), rows)


def batch_sums(found, weights):
    """(n, 3) or (n, 5) float64 of an evaluation's n batches: the sum of the losses in nats, the
    number of targets, that of rows, and with measures the numbers of right targets and right rows.

    found: for each batch the mean loss (), or what parallel.Loss gives `measured`, (3,). weights:
    its `weight`, or zeros if another rank has scored it; then its sums are 0."""
    found = torch.stack(found).cpu().double().reshape(len(weights), -1)
    weights = torch.tensor(weights).double()
    sums = torch.cat([found[:, :1] * weights[:, :1], weights, found[:, 1:]], 1)
    return torch.where(weights[:, :1] > 0, sums, 0.0)  # without targets, no mean loss


def mean_loss(sums):
    """Mean loss in nats per token of the batches that `batch_sums` returns."""
    total, targets = sums.sum(0)[:2]
    return (total / targets).item()


def measures(all_sums, weights, names):
    """{"val_" + name: value} of the measures beside the loss. Of each dataset it takes the batches
    of `batch_sums`, its weight, and the names of its measures, none for running text. A measure of
    several datasets is the mean over those that have it."""
    found = {}
    for sums, share, own in zip(all_sums, weights, names, strict=True):
        totals = sums.sum(0).tolist()
        for name, count, of in zip(own, totals[3:], totals[1:3], strict=False):
            found.setdefault(name, []).append((share, count / of))
    return {
        f"val_{name}": sum(share * value for share, value in values) / sum(s for s, _ in values)
        for name, values in found.items()
    }


def halves(all_sums, weights, names=None):
    """The two halves of the validation text, for a sweep (bench/ablation): on the first it chooses
    learning rates, on the second it reports.

    all_sums: for each dataset the batches of `batch_sums`; losses of several datasets are means
    with these weights; names: those of `measures`. Returns the columns of a log row: the loss on
    each half, the losses of up to EVAL_BLOCKS consecutive blocks of the second half, and its
    measures. Without two batches of each dataset there are no halves."""
    if min(len(sums) for sums in all_sums) < 2:
        return {}

    def mean(losses):
        return sum(weight * loss for weight, loss in zip(weights, losses, strict=True))

    firsts = [sums[: len(sums) // 2] for sums in all_sums]
    seconds = [sums[len(sums) // 2 :] for sums in all_sums]
    count = min(EVAL_BLOCKS, *(len(sums) for sums in seconds))
    blocks = zip(*(sums.tensor_split(count) for sums in seconds), strict=True)
    reported = measures(seconds, weights, names or [()] * len(weights))
    return {
        "val_tune": mean(map(mean_loss, firsts)),
        "val_report": mean(map(mean_loss, seconds)),
        "val_blocks": [round(mean(map(mean_loss, parts)), 6) for parts in blocks],
    } | {key.replace("val", "report"): value for key, value in reported.items()}


def evaluation_row(sources, train_sums, val_sums):
    """The columns of a log row, from the batches of both splits of each dataset.

    With several datasets, losses and bits per byte are means weighted by the datasets' shares, and
    the row also holds the values of each."""
    weights = [source.weight for source in sources]
    losses = [mean_loss(sums) for sums in val_sums]
    bits = [loss * source.bits_per_byte for loss, source in zip(losses, sources, strict=True)]

    def mean(values):
        return sum(weight * value for weight, value in zip(weights, values, strict=True))

    row = {
        "train_loss": mean(map(mean_loss, train_sums)),
        "val_loss": mean(losses),
        "bits_per_byte": mean(bits),
    }
    names = [source.splits["val"].measures for source in sources]
    row |= measures(val_sums, weights, names)
    if "val_reward_margin" in row:
        row["bits_per_byte"] = None  # this loss is not one of tokens
    if len(sources) > 1:
        labels = [source.name for source in sources]
        row["val_losses"] = dict(zip(labels, losses, strict=True))
        row["val_bits_per_byte"] = dict(zip(labels, bits, strict=True))
    return row | halves(val_sums, weights, names)
