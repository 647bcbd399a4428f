"""
Yardsticks of a text: the losses of n-gram models, which count and learn nothing else. A model that
has learned is below them. Interpolated as by Witten and Bell 1991 (IEEE Trans. Inf. Theory 37(4),
method C), from the n - 1 tokens of context h to the n - 2 of h':

    P(w|h) = (c(h,w) + t(h) P(w|h')) / (c(h) + t(h))

c counts in the training text, t(h) is the number of distinct tokens after h, and below unigrams
every token of the vocabulary is equally probable. prepare.py stores the losses in meta.json:

    "ngrams": {"tokens": [16384, 23170, ...], "losses": [[order 1, ..., order 6], ...]}

a row for each amount of text: the first `tokens` tokens of train are counted, and validation tokens
are scored, in nats per token.
"""

import math

import numpy as np

NAMES = ("unigrams", "bigrams", "trigrams", "4-grams", "5-grams", "6-grams")
ORDERS = len(NAMES)
FEWEST = 1 << 14  # tokens that are counted, unless the text is shorter
# Tokens that are read, for a bounded memory:
COUNTED = 1 << 23  # of train
SCORED = 1 << 20  # of val


def measure(train, val, vocab_size):
    """The entry "ngrams" of meta.json, None if val is too short to score. train, (N,), and val are
    ids, on disk or not: the first COUNTED and SCORED of them are read."""
    if len(val) < ORDERS:
        return None
    most = min(len(train), COUNTED)
    steps_down = int(2 * math.log2(max(most / FEWEST, 1)))  # each divides the amount by sqrt(2)
    amounts = [int(most / 2 ** (k / 2)) for k in range(steps_down, -1, -1)]
    losses = losses_of(train[: amounts[-1]], val[:SCORED], vocab_size, amounts)
    return {"tokens": amounts, "losses": losses.round(5).tolist()}


def losses_of(train, val, vocab_size, amounts):
    """(amounts, ORDERS) losses in nats per token of val from its ORDERS-th token on, whose context
    is in val. The first `amount` tokens of train are counted.

    Grams of one order are numbered 0, 1, ...; a gram of the next order is the number of its context
    and a token."""
    tokens = np.concatenate([train, val]).astype(np.int64)  # (T,)
    scored = len(train) + ORDERS - 1  # the first position that is scored
    grams = np.zeros(len(tokens) + 1, np.int64)  # of order 0: before each position, and at the end
    p = np.full((len(amounts), len(tokens) - scored), 1 / vocab_size)  # of the scored tokens
    losses = []
    for order in range(1, ORDERS + 1):
        # grams[i] will be of the tokens i to i + order - 1, and contexts[i] of all but the last.
        contexts = grams[:-1]  # (T - order + 1,)
        n_contexts = contexts.max() + 1
        codes = contexts * vocab_size + tokens[order - 1 :]
        unique_codes, grams = np.unique(codes, return_inverse=True)
        context_of = unique_codes // vocab_size  # each gram's
        scored_grams = grams[scored - order + 1 :]
        scored_contexts = contexts[scored - order + 1 :]
        for row, amount in zip(p, amounts, strict=True):
            inside = max(0, amount - order + 1)  # the grams that lie in the amount
            gram_counts = np.bincount(grams[:inside], minlength=len(unique_codes))
            c_hw = gram_counts[scored_grams]
            c_h = np.bincount(contexts[:inside], minlength=n_contexts)[scored_contexts]
            followed = context_of[gram_counts > 0]  # once for each token that followed
            t_h = np.bincount(followed, minlength=n_contexts)[scored_contexts]
            total = np.maximum(c_h + t_h, 1)  # no 0/0 where h was not seen
            row[:] = np.where(c_h, (c_hw + t_h * row) / total, row)  # row was P(w|h')
        losses.append(-np.log(p).mean(1))
    return np.stack(losses, 1)


def losses_at(stored, tokens, block_size):
    """(ORDERS,) losses in nats per token after `tokens` tokens of training, with as little context
    as a model in windows of block_size tokens. At position j = 1, 2, ... the model sees j tokens,
    so it is compared with order min(n, j + 1). Between stored amounts the losses are linear in
    log(tokens), beyond them constant: epochs repeat the text."""
    at = np.log(max(tokens, 1))
    amounts = np.log(stored["tokens"])
    columns = np.transpose(stored["losses"])  # (ORDERS, amounts)
    losses = np.array([np.interp(at, amounts, column) for column in columns])  # in full context
    orders = np.arange(1, len(losses) + 1)  # n
    positions = np.arange(1, block_size + 1)[:, None]  # j
    return losses[np.minimum(orders, positions + 1) - 1].mean(0)


def yardsticks(stored, tokens, block_size):
    """{"best": [order, loss], "trigrams": loss, "tokens": counted} of losses_at: the best order,
    and trigrams. stored: "ngrams" of meta.json. {} if it is None: the dataset has none."""
    if stored is None:
        return {}
    losses = losses_at(stored, tokens, block_size).tolist()
    fewest = stored["tokens"][0]
    most = stored["tokens"][-1]
    return {
        "best": [losses.index(min(losses)) + 1, min(losses)],
        "trigrams": losses[2],
        "tokens": min(max(tokens, fewest), most),
    }


def named(known):
    """{"5-grams of 16,384 tokens": loss, "trigrams of ...": loss}; {} if `known` lacks "tokens"."""
    if "tokens" not in known:
        return {}
    n, loss = known["best"]
    amount = f"of {known['tokens']:,} tokens"
    return {f"{NAMES[n - 1]} {amount}": loss, f"trigrams {amount}": known["trigrams"]}
