"""What the losses of an evaluation's batches add up to."""

EVAL_BLOCKS = 32  # parts of the validation text whose losses a log row holds


def mean_loss(sums):
    """Mean loss in nats per token of the batches (n, 2) that `evaluate` returns."""
    total, targets = sums.sum(0)
    return (total / targets).item()


def halves(all_sums, weights):
    """The two halves of the validation text, for a sweep (bench/ablation): on the first it chooses
    learning rates, on the second it reports.

    all_sums: for each dataset the batches (n, 2) of `evaluate`; losses of several datasets are
    means with these weights. Returns the columns of a log row: the loss on each half, and the
    losses of up to EVAL_BLOCKS consecutive blocks of the second half. Without two batches of each
    dataset there are no halves."""
    if min(len(sums) for sums in all_sums) < 2:
        return {}

    def mean(losses):
        return sum(weight * loss for weight, loss in zip(weights, losses, strict=True))

    firsts = [sums[: len(sums) // 2] for sums in all_sums]
    seconds = [sums[len(sums) // 2 :] for sums in all_sums]
    count = min(EVAL_BLOCKS, *(len(sums) for sums in seconds))
    blocks = zip(*(sums.tensor_split(count) for sums in seconds), strict=True)
    return {
        "val_tune": mean(map(mean_loss, firsts)),
        "val_report": mean(map(mean_loss, seconds)),
        "val_blocks": [round(mean(map(mean_loss, parts)), 6) for parts in blocks],
    }
