"""
Prompt/answer pairs, for supervised fine-tuning: rows in, token files with a mask out, and their
batches. A row is {"prompt": "...", "answer": "..."}, or a conversation (`chat_pairs`). As tokens a
pair is

    prompt   the same tokens as for --start in sample.py: the start token if it is empty      mask 0
    answer   encoded separately, so that the prompt has the same tokens as in sampling        mask 1
    end      the start token again: <|endoftext|>, or a newline for characters and bytes      mask 1

Only tokens with mask 1 are learned, since the loss of a prompt teaches nothing about answering
(Ouyang et al. 2022, arXiv:2203.02155; Zhou et al. 2023, arXiv:2305.11206). A pair begins where the
mask returns to 0. Mask 2, which tasks.py writes, is for what is given after the first answer, such
as the next question: it is not learned, and begins no pair.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from tqdm import tqdm

from common.errors import UserError
from tokens.batches import RELEASE, release, shuffled, visits
from tokens.token_files import PIECE, TokenFile, check_length
from tokens.tokenizer import encode_batches
from tokens.writing import BAR, MOST, SAMPLE, estimated_tokens, share_of_test

FORM = 'a line is {"prompt": "...", "answer": "..."}, or {"messages": [...]}'
MESSAGE = 'a message is {"role": "user", "content": "..."}'
SHAREGPT = {"human": "user", "gpt": "assistant"}  # its names of the two roles


# ---------------------------------------------------------------- writing


@dataclass
class PairRows:
    """Pairs on their way into token files, as corpus.Corpus is of texts. `rows()` starts a new pass
    and yields (where it is, [(prompt, answer), ...]) for each row of a file. The pairs of a row, a
    conversation, go into one split."""

    source: str
    rows: Callable[[], Iterator[tuple[str, list]]]
    skipped: dict = field(default_factory=dict)  # {file: why it is left out}, complete after a pass
    preferences: bool = False  # the two pairs of a row are a chosen and a rejected answer


def text_of(row, key, where, fix=FORM):
    """row[key], which must be a text of whole characters; else a UserError."""
    text = row.get(key)
    if not isinstance(text, str):
        raise UserError(f"no {key} that is a text", where, fix)
    try:
        text.encode()
    except UnicodeEncodeError:
        what = f"the {key} holds a lone surrogate, \\ud800 to \\udfff"
        raise UserError(what, where, "remove it") from None
    return text


def plain_pair(row, where):
    """[(prompt, answer)] of a row with these two columns. Raises UserError if it is not a pair."""
    prompt, answer = text_of(row, "prompt", where), text_of(row, "answer", where)
    if not answer.strip():
        raise UserError("the answer is empty", where, "leave the pair out, or answer")
    return [(prompt, answer)]


def chat_pairs(messages, where):
    """[(prompt, answer), ...] of a conversation, one for each message of the assistant. The prompt
    is the conversation before it, and ends with the words after which the model has to answer:

        User: What is the capital of France?
        Assistant:

    A message without content, such as the call of a tool, is left out. ShareGPT's names `from` and
    `value` do as well. Raises UserError if the conversation is malformed."""
    if not isinstance(messages, list):
        raise UserError("no messages that are a list", where, FORM)
    pairs, before = [], ""
    for message in messages:
        if not isinstance(message, dict):
            raise UserError("a message is not an object", where, MESSAGE)
        if "role" not in message and "from" in message:
            role = text_of(message, "from", where, MESSAGE)
            message = {"role": SHAREGPT.get(role, role), "content": message.get("value")}
        role = text_of(message, "role", where, MESSAGE).capitalize()
        if message.get("content") is None:
            continue
        content = content_of(message, where)
        if role == "Assistant" and content.strip():
            pairs.append((f"{before}{role}:", f" {content}"))
        before += f"{role}: {content}\n"
    return pairs


def content_of(message, where):
    """The text of a message; if its content is a list of parts, of those that are text."""
    content = message["content"]
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and "text" in part]
        if len(parts) < len(content):
            what = "the content has parts without text, such as images"
            raise UserError(what, where, "leave the conversation out")
        return "".join(text_of(part, "text", where, MESSAGE) for part in parts)
    return text_of(message, "content", where, MESSAGE)


def write_pairs(pairs, make_tokenizer, folder):
    """Write the token files and masks of PairRows. The last rows are for the test split, by the
    rule in writing.py; the first 90 % of the others are for training. Returns and raises the same
    as writing.write_corpus."""
    count, characters, chars, sample, sha256 = 0, 0, {"\n"}, "", hashlib.sha256()
    for _, row in tqdm(pairs.rows(), "reading", unit=" rows", **BAR):
        count += 1
        for texts in row:
            text = "\0".join(texts)
            sha256.update(f"{text}\0".encode())
            chars.update(*texts)
            characters += len(text)
            if len(sample) < SAMPLE:
                sample += text
    if count < 2:
        what = f"training and validation need two rows with an answer or more, here: {count}"
        raise UserError(what, pairs.source, "add some")

    tokenizer = make_tokenizer(lambda: chars, lambda: texts_of(pairs, count // 2), True)
    if tokenizer.decode([tokenizer.start]) not in ("\n", "<|endoftext|>"):
        raise UserError(
            "this tokenizer has no <|endoftext|> to end an answer with",
            "--tokenizer",
            "use --tokenizer=gpt2, or that of another model",
        )

    share = share_of_test(estimated_tokens(tokenizer, sample.replace("\0", "\n"), characters))
    test = min(math.ceil(share * count), int(MOST * count))
    train = max(1, int(0.9 * (count - test)))
    rows = iter(tqdm(pairs.rows(), "writing tokens", count, unit=" rows", **BAR))
    entries = {}
    for split, n in {"train": train, "val": count - test - train, "test": test}.items():
        if n:
            entries[split] = write_split(folder / f"{split}.bin", islice(rows, n), tokenizer)
            entries[split] |= {"preferences": n} if pairs.preferences else {}
    return tokenizer, entries, sha256.hexdigest()


def texts_of(pairs, n):
    """Yield the text of each pair in the first n rows, which are in train in any case."""
    for _, row in islice(pairs.rows(), n):
        yield from (prompt + answer for prompt, answer in row)


def write_split(path, rows, tokenizer):
    """Write the pairs of some rows. Returns the entry of the split in meta.json."""
    ends_line = tokenizer.decode([tokenizer.start]) == "\n"

    def texts():
        for where, pairs in rows:
            for prompt, answer in pairs:
                if ends_line and "\n" in answer:
                    what = "the answer has several lines, but a newline ends an answer"
                    raise UserError(what, where, "use --tokenizer=gpt2")
                yield prompt
                yield answer

    file = TokenFile(path, tokenizer.vocab_size, masked=True)
    count, longest = 0, 0
    results = encode_batches(tokenizer, texts(), documents=True)
    for (prompt, prompt_bytes), (answer, answer_bytes) in zip(results, results, strict=True):
        prompt = prompt if len(prompt) else [tokenizer.start]
        mask = bytes(len(prompt)) + b"\1" * (len(answer) + 1)
        file.add([*prompt, *answer, tokenizer.start], prompt_bytes + answer_bytes, mask)
        count, longest = count + 1, max(longest, len(mask))
    return file.close() | {"pairs": count, "longest": longest}


# ---------------------------------------------------------------- reading


class Pairs:
    """The pairs of a split, each in a row of its own: its first tokens, up to block_size targets,
    then padding.

    Several pairs in a row would waste less, but an answer would then attend to other pairs, which
    are absent when the model is used. A block_size near the longest pair keeps the padding small.
    Pairs whose answer begins past block_size have no target and are left out."""

    measures = ("accuracy", "exact")  # shares of right tokens, and of rows without a wrong one

    def __init__(self, tokens, mask, block_size):
        bounds, answers = joints(mask)
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
        check_length(self.mask)
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
        lasts, targets, ids = np.minimum(ends, starts + self.block_size + 1), 0, []
        for first, last, end in zip(answers, lasts, ends, strict=True):
            learned = self.mask[first:last] == 1
            targets += int(learned.sum())
            ids.append(self.tokens[first:last][learned & (np.arange(first, last) < end - 1)])
        return targets, np.concatenate(ids)


def joints(mask):
    """(where pairs begin, and the end; where answers begin) of a mask, which is read in parts, so
    that memory grows with the pairs alone."""
    bounds, answers, before = [], [], np.int8(1)
    for at in range(0, len(mask), PIECE):
        part = (mask[at : at + PIECE] > 0).astype(np.int8)
        change = np.diff(part, prepend=before)  # -1 where a pair begins, 1 where an answer does
        bounds.append(at + np.flatnonzero(change == -1))
        answers.append(at + np.flatnonzero(change == 1))
        before = part[-1]
        release(mask)
    return np.concatenate([*bounds, [len(mask)]]), np.concatenate(answers)


class PairBatches:
    """The pairs in one endless global order, a pure function of (pairs, seed), as batches.Batches
    orders windows."""

    masked = True  # the loss of some targets does not count

    def __init__(self, pairs, seed):
        if not len(pairs.starts):
            raise ValueError("no pair's answer begins within block_size")
        self.pairs, self.seed, self.windows_per_epoch = pairs, seed, len(pairs.starts)
        self.unreleased = 0  # pairs read
        self.order = functools.lru_cache(2)(self.shuffled)

    def shuffled(self, epoch):
        """The numbers of the P pairs in the order of an epoch, to be sliced."""
        return shuffled(np.random.default_rng([self.seed, epoch]), self.windows_per_epoch)

    def get(self, first, count):
        """Samples first .. first + count - 1, as Pairs.rows gives them. Every row has a target."""
        self.unreleased += count
        if self.unreleased >= RELEASE:
            release(self.pairs.tokens)
            release(self.pairs.mask)
            self.unreleased = 0
        return self.pairs.rows(visits(self.order, self.windows_per_epoch, first, count))


# ---------------------------------------------------------------- preferences

PREFERENCE = 'a line is {"prompt": "...", "chosen": "...", "rejected": "..."}'


def preference(row, where):
    """[(prompt, chosen), (prompt, rejected)] of a row. Raises UserError if it is no preference."""
    prompt, *answers = (
        text_of(row, key, where, PREFERENCE) for key in ("prompt", "chosen", "rejected")
    )
    for answer in answers:
        if not answer.strip():
            raise UserError("an answer is empty", where, "leave the preference out")
    if answers[0] == answers[1]:
        raise UserError("both answers are the same", where, "leave the preference out")
    return [(prompt, answer) for answer in answers]


class Preferences(Pairs):
    """The preferences of a split: rows 2i and 2i + 1 are the pairs of one, chosen and rejected.

    `reference` (rows,) float32 holds the log-probability in nats of each answer by the reference
    model, as far as block_size; it is set when a run starts (training/preferences.py)."""

    measures = ("reward_accuracy", "reward_margin")

    def __init__(self, tokens, mask, block_size):
        super().__init__(tokens, mask, block_size)
        prompts = self.answers - self.starts
        if len(prompts) % 2 or (prompts[::2] != prompts[1::2]).any():
            raise ValueError("the pairs are not two for each prompt")
        self.reference = None

    def batches(self, seed):
        return PreferenceBatches(self, seed)

    def within(self, limit):
        """The number of rows of the preferences that begin within the first `limit` tokens."""
        rows = super().within(limit)
        return rows + rows % 2

    def eval_batches(self, batch_size, limit=None):
        """Yield (x, y, reference) as `Pairs` yields x and y, with an even batch_size; reference
        (batch_size,) is 0 in rows after the last pair."""
        for number, (x, y) in enumerate(super().eval_batches(batch_size, limit)):
            known = self.reference[number * batch_size : (number + 1) * batch_size]
            yield x, y, np.pad(known, (0, batch_size - len(known)))


class PreferenceBatches(PairBatches):
    """The preferences in one endless global order, a pure function of (preferences, seed). A sample
    is a row, so a preference is two samples, the first of an even number."""

    masked = False  # each preference counts the same, however long its answers are

    def shuffled(self, epoch):
        random = np.random.default_rng([self.seed, epoch])
        return shuffled(random, self.windows_per_epoch // 2)

    def get(self, first, count):
        """Samples first .. first + count - 1, both even: x, y (count, block_size), as Pairs.rows
        gives them, and the reference (count,)."""
        chosen = visits(self.order, self.windows_per_epoch // 2, first // 2, count // 2)
        rows = (2 * chosen[:, None] + [0, 1]).ravel()
        return *self.pairs.rows(rows), self.pairs.reference[rows]
