"""
One step of writing: what a model is shown of a text that grows, and how the next token is drawn from what it says.
Shapes: B rows, T tokens, V vocabulary.
"""

import codecs
import time
from typing import NamedTuple

import torch
from torch.nn import functional as F

from parts.cache import KVCache


class Step(NamedTuple):
    token: torch.Tensor  # (B, 1) the next token of every row
    logits: torch.Tensor  # (B, V) what the model said of it, before any setting


class Reader:
    """A model reading the rows of idx (B, T) as they grow; no token is read twice while there is room.

    context: how many tokens the model looks back on at most (None: its block_size, since few models write well
    beyond what they were trained on). Where they are used up the last half of them is read anew, so that the cost of
    that is spread over many tokens. vocab_size: the tokens there are, of a model that was padded to more. pad: how
    many tokens before each row are padding. spare: tokens that rewind may drop."""

    def __init__(self, model, context=None, vocab_size=None, use_cache=True, pad=None, spare=0):
        self.model, self.vocab_size, self.use_cache, self.spare = (
            model,
            vocab_size,
            use_cache,
            spare,
        )
        self.context = context or model.config.block_size
        self.pad = pad or [0]  # without padding all rows are alike
        self.cache = self.starts = None
        self.known = 0  # tokens of idx that are in the cache or before it

    def start(self, length):
        """The first token shown of a text of `length`: 0 up to `context` tokens, then in steps of half of it."""
        half = max(1, self.context // 2)
        return half * max(0, -((self.context - length) // half))

    def room(self, length):
        """How many more tokens can be read before the start moves."""
        return self.start(length) + self.context - length

    def read(self, idx, last=1):
        """The logits (B, last, V) after each of the last tokens of idx (B, T)."""
        T = idx.size(1)
        starts = [self.start(T - pad) for pad in self.pad]
        if self.cache is None or starts != self.starts or not self.use_cache:
            shown = [T - pad - start for pad, start in zip(self.pad, starts)]
            hidden = [max(shown) - count for count in shown]
            self.cache = KVCache(torch.tensor(hidden) if any(hidden) else None, self.spare)
            self.starts, self.known = starts, T - max(shown)
        new, self.known = idx[:, self.known :], T
        return self.model(new, cache=self.cache, last_only=last == 1)[0][
            :, -last:, : self.vocab_size
        ]

    def rewind(self, length):
        """Forget the tokens of idx after the first `length`."""
        drop, self.known = max(0, self.known - length), min(self.known, length)
        if drop and self.cache.length > drop:
            self.cache.rewind(self.cache.length - drop)
        elif drop:
            self.cache = None


def penalised(logits, seen, penalty):
    """logits (B, V) with those of the tokens in seen (B, T) divided by penalty where they are positive, multiplied
    where negative (CTRL, Keskar et al. 2019, arXiv:1909.05858, as transformers has it): above 1 repeats less."""
    old, penalty = logits.gather(1, seen), min(max(penalty, 1e-30), 1e30)
    new = torch.where(old > 0, old / penalty, old * penalty).clamp(-1e30, 1e30)
    return logits.scatter(1, seen, new)


def probabilities(
    logits, temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0, seen=None
):
    """Probabilities (B, V) to draw the next token from, given logits (B, V) and the text so far, seen (B, T). In this
    order: the repetition penalty, the temperature (0: all on the likeliest), top-k, top-p (nucleus, Holtzman et al.
    2019, arXiv:1904.09751): the smallest set of the likeliest tokens that together reach probability top_p, and
    min-p (Nguyen et al. 2024, arXiv:2407.01082): those at least min_p times as likely as the likeliest."""
    logits = logits.float()  # (B, V)
    if repetition_penalty != 1 and seen is not None:
        logits = penalised(logits, seen, repetition_penalty)
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.size(-1)).float()
    logits = (logits - logits.amax(-1, keepdim=True)) / max(
        temperature, 1e-30
    )  # the largest is 0, however cold
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k).values[:, -1:]  # (B, 1) the k-th largest
        logits = logits.masked_fill(logits < least, -torch.inf)
    p = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = p.sort(descending=True, stable=True)  # (B, V)
        before = ordered.cumsum(-1) - ordered  # probability of all likelier tokens
        p = p.masked_fill(
            torch.zeros_like(p, dtype=torch.bool).scatter(1, order, before >= top_p), 0.0
        )
    if min_p:
        p = p.masked_fill(p < min_p * p.amax(-1, keepdim=True), 0.0)
    return p / p.sum(-1, keepdim=True)


def draw(p, generators):
    """A token (B, 1) of every row of p (B, V), each from its own random generator."""
    return torch.stack(
        [torch.multinomial(row, 1, generator=generator) for row, generator in zip(p, generators)]
    )


def ragged(rows, device="cpu"):
    """idx (B, T) and pad, a number per row or None, of rows of token ids (T_r,) of several lengths. The padding stands
    before the prompts and repeats their own first token, which no setting takes for a new one."""
    longest = max(len(row) for row in rows)
    pad = [longest - len(row) for row in rows]
    idx = torch.tensor(
        [[int(row[0])] * n + [int(token) for token in row] for n, row in zip(pad, rows)],
        device=device,
    )
    return idx, pad if any(pad) else None


def likeliest(logits, n=5):
    """[(token, probability)] of the n likeliest by the model alone, given its logits (V,)."""
    p, order = logits.float().softmax(-1).topk(min(n, len(logits)))
    return list(zip(order.tolist(), p.tolist()))


class Sample:
    """What is written after a prompt, as its tokens come, cut where `stop` first appears."""

    def __init__(self, prompt, tokenizer, stop="", explain=False):
        self.explain, self.prompt, self.tokenizer, self.stop, self.text, self.shown, self.done = (
            explain,
            prompt,
            tokenizer,
            stop,
            "",
            0,
            False,
        )
        self.tokens, self.logprobs, self.top = (
            [],
            [],
            [],
        )  # by the model alone, whatever the settings
        self.decoder = codecs.getincrementaldecoder("utf-8")(
            errors="replace"
        )  # a character may span tokens
        self.began, self.seconds = time.perf_counter(), 0.0

    def add(self, token, logits):
        """Take a token and its logits (V,); returns the text to show, without what may become `stop`."""
        self.tokens.append(token)
        if self.explain:
            self.logprobs.append(logits.float().log_softmax(-1)[token].item())
            self.top.append(likeliest(logits))
        self.text += self.decoder.decode(self.tokenizer.decode_bytes([token]))
        self.seconds = time.perf_counter() - self.began
        at = self.text.find(self.stop, self.shown) if self.stop else -1
        if at >= 0:
            self.text, self.done = self.text[:at], True
        begun = (
            n
            for n in range(len(self.stop) - 1, 0, -1)
            if self.text.endswith(self.stop[:n]) and not self.done
        )
        return self.upto(len(self.text) - next(begun, 0))

    def end(self):
        """The rest of the text, when no token will come any more."""
        if not self.done:
            self.text, self.done = self.text + self.decoder.decode(b"", final=True), True
        return self.upto(len(self.text))

    def upto(self, end):
        piece, self.shown = self.text[self.shown : end], end
        return piece
