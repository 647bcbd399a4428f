"""What an evaluation's batches add up to: losses, and the measures of answers; and yardsticks."""

import torch

from tokens import ngrams
from tokens.pairs import Preferences

EVAL_BLOCKS = 64  # parts of the validation text whose losses a log row holds


def count_targets(split, y):
    """(number of targets, number of rows that have one) of a batch's y (rows, T), -1 where none is.
    For preferences both are the number of preferences, over which the loss is a mean."""
    is_target = y >= 0
    rows = int(is_target.any(1).sum())
    if isinstance(split, Preferences):
        return rows // 2, rows // 2
    return int(is_target.sum()), rows


def batch_sums(values, counts):
    """(n, 3) or (n, 5) float64 of an evaluation's n batches: the sum of the losses in nats, the
    number of targets, the number of rows, and, if the split has measures, the sum of each: right
    targets and right rows, or for preferences right preferences and margins.

    values: for each batch the mean loss (), or what parallel.Loss gives `measured`, (3,). counts:
    its `count_targets`, or zeros if another rank has scored it; then its sums are 0."""
    values = torch.stack(values).cpu().double().reshape(len(counts), -1)
    counts = torch.tensor(counts).double()
    sums = torch.cat([values[:, :1] * counts[:, :1], counts, values[:, 1:]], 1)
    return torch.where(counts[:, :1] > 0, sums, 0.0)  # without targets, no mean loss


def mean_loss(sums):
    """Mean loss in nats per token of the batches that `batch_sums` returns."""
    total, targets = sums.sum(0)[:2]
    return (total / targets).item()


def measures(all_sums, weights, names):
    """{"val_" + name: value} of the measures beside the loss. Of each dataset it takes the batches
    of `batch_sums`, its weight, and the names of its measures, none for running text. A measure of
    several datasets is the mean over those that have it."""
    shares = {}  # {name: [(weight, value) of each dataset]}
    for sums, weight, own_names in zip(all_sums, weights, names, strict=True):
        totals = sums.sum(0).tolist()
        for name, count, of in zip(own_names, totals[3:], totals[1:3], strict=False):
            shares.setdefault(name, []).append((weight, count / of))
    return {
        f"val_{name}": sum(weight * value for weight, value in parts) / sum(w for w, _ in parts)
        for name, parts in shares.items()
    }


def weighted_mean(all_sums, weights):
    """The mean loss of several datasets, of which each has a weight; all sum to 1."""
    return sum(weight * mean_loss(sums) for weight, sums in zip(weights, all_sums, strict=True))


def halves(all_sums, weights, names=None):
    """The two halves of the validation text, for a sweep: on the first it chooses learning rates,
    on the second it reports.

    Takes what `measures` takes, and returns the columns of a log row: the loss on each half, the
    losses of up to EVAL_BLOCKS consecutive blocks of the second half, and its measures. Without two
    batches of each dataset there are no halves."""
    if min(len(sums) for sums in all_sums) < 2:
        return {}
    firsts = [sums[: len(sums) // 2] for sums in all_sums]
    seconds = [sums[len(sums) // 2 :] for sums in all_sums]
    count = min(EVAL_BLOCKS, *(len(sums) for sums in seconds))
    blocks = zip(*(sums.tensor_split(count) for sums in seconds), strict=True)
    return {
        "val_tune": weighted_mean(firsts, weights),
        "val_report": weighted_mean(seconds, weights),
        "val_blocks": [round(weighted_mean(block, weights), 6) for block in blocks],
    } | {
        key.replace("val", "report"): value
        for key, value in measures(seconds, weights, names or [()] * len(weights)).items()
    }


def evaluation_row(sources, train_sums, val_sums, whole_sums=()):
    """The columns of a log row, from the batches of both splits of each dataset; at the end of a
    run from those of the whole validation split, too, if the others were of a part.

    With several datasets, losses and bits per byte are means weighted by the datasets' shares, and
    the row also holds the values of each."""
    weights = [source.weight for source in sources]
    names = [source.splits["val"].measures for source in sources]
    losses = {source.name: mean_loss(sums) for source, sums in zip(sources, val_sums, strict=True)}
    bits = {source.name: losses[source.name] * source.bits_per_byte for source in sources}
    row = {
        "train_loss": weighted_mean(train_sums, weights),
        "val_loss": weighted_mean(val_sums, weights),
        "bits_per_byte": sum(source.weight * bits[source.name] for source in sources),
    }
    row |= measures(val_sums, weights, names)
    if "val_reward_margin" in row:
        row["bits_per_byte"] = None  # this loss is not one of tokens
    if len(sources) > 1:
        row |= {"val_losses": losses, "val_bits_per_byte": bits}
    if whole_sums:
        row["whole_val_loss"] = weighted_mean(whole_sums, weights)
    return row | halves(whole_sums or val_sums, weights, names)


def yardsticks(run):
    """{"5-grams": loss, "trigrams": loss}: what counting gives on as much of the text as a run has
    seen, in its windows (tokens/ngrams.py). {} for pairs, mixtures, and texts not counted."""
    stored = run.sources[0].meta.get("ngrams") if len(run.sources) == 1 else None
    if stored is None:
        return {}
    known = ngrams.yardsticks(stored, run.step * run.step_tokens, run.model.config.block_size)
    n, loss = known["best"]
    return {ngrams.NAMES[n - 1]: loss, "trigrams": known["trigrams"]}
