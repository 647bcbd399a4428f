"""
Prompt/answer pairs, for supervised fine-tuning: JSONL in, token files with a mask out, and their
batches. A line is {"prompt": "...", "answer": "..."}. As tokens a pair is

    prompt   the same tokens as for --start in sample.py: the start token if it is empty      mask 0
    answer   encoded separately, so that the prompt has the same tokens as in sampling        mask 1
    end      the start token again: <|endoftext|>, or a newline for characters and bytes      mask 1

Only tokens with mask 1 are learned, since the loss of a prompt teaches nothing about answering
(Ouyang et al. 2022, arXiv:2203.02155; Zhou et al. 2023, arXiv:2305.11206). A pair begins wherever
the mask goes from 1 to 0.
"""

import functools
from itertools import islice

import numpy as np

from common.errors import UserError
from common.files import parse_json, sha256_of
from tokens.batches import visits
from tokens.token_files import TokenFile, check_length

FORM = 'a line is {"prompt": "...", "answer": "..."}'


# ---------------------------------------------------------------- writing


def read_pairs(path):
    """Yield (line number, prompt, answer) of a JSONL file. Raises UserError at the first line that
    is not a pair."""
    number = 0
    with open(path, encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, *parse_pair(line, f"{path}:{number}")
        except UnicodeDecodeError:
            where = f"{path}, after line {number}"
            raise UserError("the pairs are not utf-8", where, "save them as utf-8") from None


def parse_pair(line, where):
    """(prompt, answer) of a line of JSON. Raises UserError if it is not a pair."""
    try:
        pair = parse_json(line)
    except ValueError as error:
        raise UserError(f"no JSON: {getattr(error, 'msg', error)}", where, FORM) from None

    texts = []
    for key in ("prompt", "answer"):
        text = pair.get(key) if isinstance(pair, dict) else None
        if not isinstance(text, str):
            raise UserError(f"no {key} that is a text", where, FORM)
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            what = f"the {key} holds half a character, \\ud800 to \\udfff"
            raise UserError(what, where, "write it whole")
        texts.append(text)
    if not texts[1].strip():
        raise UserError("the answer is empty", where, "leave the pair out, or answer")
    return texts


def write_pairs(path, make_tokenizer, folder):
    """Write the token files and masks of a JSONL file. The first pass counts its pairs and
    characters; the second writes tokens with the tokenizer make_tokenizer(characters). The first
    90 % of the pairs are for training. Returns (tokenizer, {split: entry in meta.json}, sha256 of
    the file)."""
    count, chars = 0, {"\n"}
    for count, (_, prompt, answer) in enumerate(read_pairs(path), 1):  # noqa: B007 (used after it)
        chars.update(prompt, answer)
    if count < 2:
        raise UserError("pairs to train on and to validate are two or more", path, "add some")

    tokenizer = make_tokenizer(chars)
    if tokenizer.decode([tokenizer.start]) not in ("\n", "<|endoftext|>"):
        raise UserError(
            "this tokenizer has no <|endoftext|> to end an answer with",
            "--tokenizer",
            "use --tokenizer=gpt2, or that of another model",
        )
    pairs, train = read_pairs(path), max(1, int(0.9 * count))
    entries = {}
    for split, n in ("train", train), ("val", count - train):
        file = TokenFile(folder / f"{split}.bin", tokenizer, masked=True)
        longest = max(write_pair(file, path, *pair) for pair in islice(pairs, n))
        entries[split] = file.close() | {"pairs": n, "longest": longest}
    return tokenizer, entries, sha256_of(path)


def write_pair(file, path, number, prompt, answer):
    """Write a pair to a TokenFile. Returns its number of tokens."""
    tokenizer = file.tokenizer
    if "\n" in answer and tokenizer.decode([tokenizer.start]) == "\n":
        raise UserError(
            "the answer has several lines, but a newline ends an answer",
            f"{path}:{number}",
            "use --tokenizer=gpt2",
        )
    prompt_ids = tokenizer.encode(prompt) if prompt else [tokenizer.start]
    answer_ids = [*tokenizer.encode(answer), tokenizer.start]
    mask = bytes(len(prompt_ids)) + b"\1" * len(answer_ids)
    file.add([*prompt_ids, *answer_ids], len((prompt + answer).encode()), mask)
    return len(mask)


# ---------------------------------------------------------------- reading


class Pairs:
    """The pairs of a split, each in a row of its own: its first tokens, up to block_size targets,
    then padding.

    Several pairs in a row would waste less, but an answer would then attend to other pairs, which
    are absent when the model is used. A block_size near the longest pair keeps the padding small.
    Pairs whose answer begins past block_size have no target and are left out."""

    def __init__(self, tokens, mask, block_size):
        # -1 where a pair begins, and at the very end; 1 where an answer begins
        change = np.diff(mask.astype(np.int8), prepend=np.int8(1), append=np.int8(0))
        bounds, answers = np.flatnonzero(change == -1), np.flatnonzero(change == 1)
        starts, ends = bounds[:-1], bounds[1:]

        fits = answers - starts <= block_size  # the first token of the answer is a target
        self.starts, self.answers, self.ends = starts[fits], answers[fits], ends[fits]  # (P,) each
        self.left_out = int((~fits).sum())
        self.cut = int((self.ends - self.starts > block_size + 1).sum())  # pairs that end past it
        self.tokens, self.mask, self.block_size = tokens, mask, block_size

    def __len__(self):
        return len(self.tokens)

    @property
    def learned(self):
        """The ids whose loss counts if they are targets: the answers. Prompts are excluded, since
        many begin alike."""
        return self.tokens[self.mask == 1]

    def batches(self, seed):
        """The samples of the split in their endless order."""
        return PairBatches(self, seed)

    def rows(self, pairs):
        """x and its successors y, both (count, block_size) int64, of the pairs with these numbers,
        (count,). y is -1 in the prompt, where the loss does not count, and past the pair's end,
        where x is 0. Raises Failure if the token file has become shorter."""
        check_length(self.tokens)
        at = self.starts[pairs][:, None] + np.arange(self.block_size + 1)  # (count, block_size + 1)
        inside = at < self.ends[pairs][:, None]
        at = np.minimum(at, len(self.tokens) - 1)
        tokens = np.where(inside, self.tokens[at], 0).astype(np.int64)
        targets = np.where(inside & (self.mask[at] == 1), tokens, -1)
        return tokens[:, :-1], targets[:, 1:]

    def within(self, limit):
        """The number of pairs that begin within the first `limit` tokens (None or 0: all), at least
        one."""
        return max(1, int((self.starts < limit).sum())) if limit else len(self.starts)

    def eval_batches(self, batch_size, limit=None):
        """Yield (x, y), (batch_size, block_size) int64: the pairs within the limit in their order,
        so that each token of an answer that is within block_size is a target exactly once. Rows
        after the last pair are x = 0, y = -1."""
        count = self.within(limit)
        for first in range(0, count, batch_size):
            x, y = self.rows(np.arange(first, min(first + batch_size, count)))
            missing = ((0, batch_size - len(x)), (0, 0))
            yield np.pad(x, missing), np.pad(y, missing, constant_values=-1)

    def scored(self, limit=None):
        """(number of targets, ids of the answers without their end tokens) of what eval_batches
        yields."""
        chosen = slice(self.within(limit))
        starts, answers, ends = self.starts[chosen], self.answers[chosen], self.ends[chosen]
        last = np.minimum(ends, starts + self.block_size + 1)
        spans = zip(answers, np.minimum(last, ends - 1), strict=True)
        ids = np.concatenate([self.tokens[first:end] for first, end in spans])
        return int((last - answers).sum()), ids


class PairBatches:
    """The pairs in one endless global order, a pure function of (pairs, seed), as batches.Batches
    orders windows."""

    masked = True  # the loss of some targets does not count

    def __init__(self, pairs, seed):
        if not len(pairs.starts):
            raise ValueError("no pair's answer begins within block_size")
        self.pairs, self.seed, self.windows_per_epoch = pairs, seed, len(pairs.starts)
        self.order = functools.lru_cache(2)(self.shuffled)

    def shuffled(self, epoch):
        """(P,) the numbers of the pairs in the order of an epoch."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.windows_per_epoch)

    def get(self, first, count):
        """Samples first .. first + count - 1, as Pairs.rows gives them. Every row has a target."""
        return self.pairs.rows(visits(self.order, self.windows_per_epoch, first, count))
