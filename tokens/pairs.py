"""
Prompt/answer pairs, for supervised fine-tuning: JSONL in, token files with a mask out, and their batches.

A line is {"prompt": "...", "answer": "..."}. As tokens a pair is

    prompt   what sample.py makes of --start: its tokens, or the tokenizer's start token where it is empty     mask 0
    answer   encoded by itself, so that the tokens before it are those the model meets when it is asked        mask 1
    end      the tokenizer's start token again: <|endoftext|> of GPT-2, a newline of characters and bytes       mask 1

and only what has mask 1 is learned: the loss of a prompt says nothing about answering (Ouyang et al. 2022,
arXiv:2203.02155; Zhou et al. 2023, arXiv:2305.11206). A pair begins wherever the mask goes from 1 to 0.
"""

import functools
import json

import numpy as np

from common.errors import UserError
from common.files import sha256_of
from tokens.batches import visits
from tokens.token_files import TokenFile, check_length


def read_pairs(path):
    """Yield (line number, prompt, answer) of a JSONL file; UserError at the first line that holds no pair."""
    with open(path, encoding="utf-8-sig") as file:
        number = 0
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    pair = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"no JSON: {getattr(error, 'msg', 'too deep')}",
                        where,
                        'a line is {"prompt": "...", "answer": "..."}',
                    ) from None
                texts = [
                    pair.get(key) if isinstance(pair, dict) else None
                    for key in ("prompt", "answer")
                ]
                for key, text in zip(("prompt", "answer"), texts):
                    if not isinstance(text, str):
                        raise UserError(
                            f"no {key} that is a text",
                            where,
                            'a line is {"prompt": "...", "answer": "..."}',
                        )
                    if any("\ud800" <= letter <= "\udfff" for letter in text):
                        raise UserError(
                            f"the {key} holds half a character, \\ud800 to \\udfff",
                            where,
                            "write it whole",
                        )
                if not texts[1].strip():
                    raise UserError("the answer is empty", where, "leave the pair out, or answer")
                yield number, *texts
        except UnicodeDecodeError:
            raise UserError(
                "the pairs are not utf-8", f"{path}, after line {number}", "save them as utf-8"
            ) from None


def write_pairs(path, make_tokenizer, folder):
    """Token files and masks of a JSONL file: one pass to count its pairs and characters, one to write, with the tokenizer
    that is make_tokenizer(characters); the first 90 % of the pairs are for training. Returns (tokenizer, the splits'
    entries in meta.json, sha256 of the file)."""
    count, chars = 0, {"\n"}
    for count, (_, prompt, answer) in enumerate(read_pairs(path), 1):
        chars |= {*prompt, *answer}
    if count < 2:
        raise UserError("pairs to train on and to validate are two or more", path, "add some")
    tokenizer, pairs, entries = make_tokenizer(chars), read_pairs(path), {}
    by_line = tokenizer.decode([tokenizer.start]) == "\n"  # a newline ends an answer
    if not by_line and tokenizer.decode([tokenizer.start]) != "<|endoftext|>":
        raise UserError(
            "this tokenizer has no <|endoftext|> to end an answer with",
            "--tokenizer",
            "use --tokenizer=gpt2, or that of another model",
        )
    for split, n in ("train", max(1, int(0.9 * count))), ("val", count - max(1, int(0.9 * count))):
        file, longest = TokenFile(folder / f"{split}.bin", tokenizer), 0
        with open(folder / f"{split}.mask.bin", "wb") as mask:
            for _, (number, prompt, answer) in zip(range(n), pairs):
                if by_line and "\n" in answer:
                    raise UserError(
                        "the answer has several lines, and a newline is what ends it",
                        f"{path}:{number}",
                        "use --tokenizer=gpt2",
                    )
                asked = tokenizer.encode(prompt) if prompt else [tokenizer.start]
                told = [*tokenizer.encode(answer), tokenizer.start]
                file.add([*asked, *told], len((prompt + answer).encode()))
                mask.write(bytes(len(asked)) + b"\1" * len(told))
                longest = max(longest, len(asked) + len(told))
        entries[split] = file.close() | {
            "pairs": n,
            "longest": longest,
            "mask_sha256": sha256_of(folder / f"{split}.mask.bin"),
        }
    return tokenizer, entries, sha256_of(path)


class Pairs:
    """The pairs of a split, each a row of its own: from the row's start to at most block_size targets, padded to that.

    A row of several pairs would waste less, but its answers would see the pairs before them: what is learned would
    depend on the neighbours, and rarely be what is asked for later, where a prompt stands alone. A block_size near the
    longest pair is what saves work. Pairs whose answer begins beyond block_size have no target, and are left out."""

    def __init__(self, tokens, mask, block_size):
        if len(mask) != len(tokens) or mask[0] or not mask[-1]:
            raise ValueError("the mask does not fit the tokens")
        change = np.diff(
            mask.astype(np.int8), prepend=np.int8(1), append=np.int8(0)
        )  # -1 where a pair begins, and at the very end
        bounds, answers = np.flatnonzero(change == -1), np.flatnonzero(change == 1)
        fits = answers - bounds[:-1] <= block_size  # the first token of the answer is a target
        self.starts, self.answers, self.ends = (
            bounds[:-1][fits],
            answers[fits],
            bounds[1:][fits],
        )  # (P,) each
        self.left_out = int((~fits).sum())
        self.cut = int(
            (self.ends - self.starts > block_size + 1).sum()
        )  # pairs whose last tokens are beyond it
        self.tokens, self.mask, self.block_size = tokens, mask, block_size

    def __len__(self):
        return len(self.tokens)

    @property
    def learned(self):
        """The ids whose loss counts, as targets: prompts may well begin alike."""
        return self.tokens[self.mask == 1]

    def batches(self, seed):
        """The samples of the split in their endless order."""
        return PairBatches(self, seed)

    def rows(self, which):
        """x and its successors y, both (count, block_size) int64, of the pairs `which`. y is -1 where the loss does not count
        (the prompt) and beyond the pair's end, where x is 0."""
        check_length(self.tokens)
        at = self.starts[which][:, None] + np.arange(self.block_size + 1)  # (count, block_size + 1)
        inside = at < self.ends[which][:, None]
        at = np.minimum(at, len(self.tokens) - 1)
        tokens = np.where(inside, self.tokens[at], 0).astype(np.int64)
        return tokens[:, :-1], np.where(inside & (self.mask[at] == 1), tokens, -1)[:, 1:]

    def within(self, limit):
        """The number of pairs that begin within the first `limit` tokens (None or 0: all), one at least."""
        return max(1, int((self.starts < limit).sum())) if limit else len(self.starts)

    def eval_batches(self, batch_size, limit=None):
        """Yield (x, y), (batch_size, block_size) int64: the pairs within the limit in their order, each once, so that each token
        of an answer that is within block_size is a target exactly once. Rows beyond the last pair are x = 0, y = -1."""
        for first in range(0, self.within(limit), batch_size):
            x, y = self.rows(np.arange(first, min(first + batch_size, self.within(limit))))
            more = ((0, batch_size - len(x)), (0, 0))
            yield np.pad(x, more), np.pad(y, more, constant_values=-1)

    def scored(self, limit=None):
        """(number of targets, ids of the answers without their end tokens) of what eval_batches yields."""
        last = np.minimum(self.ends, self.starts + self.block_size + 1)
        spans = [slice(*span) for span in zip(self.answers, np.minimum(last, self.ends - 1))][
            : self.within(limit)
        ]
        return int((last - self.answers)[: self.within(limit)].sum()), np.concatenate(
            [self.tokens[span] for span in spans]
        )


class PairBatches:
    """The pairs in one endless global order, a pure function of (pairs, seed): as corpus.Batches, with a pair for a window."""

    masked = True

    def __init__(self, pairs, seed):
        if not len(pairs.starts):
            raise ValueError("no pair's answer begins within block_size")
        self.pairs, self.seed, self.windows_per_epoch = pairs, seed, len(pairs.starts)
        self.order = functools.lru_cache(2)(
            lambda epoch: np.random.default_rng([seed, epoch]).permutation(self.windows_per_epoch)
        )

    def get(self, first, count):
        """Samples first .. first + count - 1, as Pairs.rows gives them. Every row has a target."""
        return self.pairs.rows(visits(self.order, self.windows_per_epoch, first, count))
