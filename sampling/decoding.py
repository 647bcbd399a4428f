"""
Sampling, one token of each row after another: which tokens of a growing text a model reads, how the
next token is drawn from its logits, and how the text is made of tokens.
Shapes: B rows, T tokens, V vocabulary.
"""

import codecs
import time
from typing import NamedTuple

import torch
from torch.nn import functional as F

from parts.cache import KVCache


class Step(NamedTuple):
    """One sampled token of each row."""

    token: torch.Tensor  # (B, 1)
    logits: torch.Tensor  # (B, V) of the model, before any sampling setting


class Reader:
    """A model that reads the rows of idx (B, T) as they grow. Until the context is full, it reads
    each token once.

    context: the largest number of tokens the model looks back on (None: its block_size, since few
    models write well beyond the length they were trained at). When the context is full, the model
    reads its last half again, which spreads the cost over many tokens. vocab_size: the number of
    real tokens, if the model's vocabulary is padded. pad: the number of padding tokens before each
    row. spare: how many tokens `rewind` may drop."""

    def __init__(self, model, context=None, vocab_size=None, use_cache=True, pad=None, spare=0):
        self.model, self.vocab_size = model, vocab_size
        self.use_cache, self.spare = use_cache, spare
        self.context = context or model.config.block_size
        self.pad = pad or [0]  # without padding, one entry serves all rows
        self.cache = self.starts = None
        self.known = 0  # tokens of idx that are in the cache, or no longer in it

    def start(self, length):
        """The first token that the model reads of a text of `length` tokens: 0 while the context
        has room, then in steps of half the context."""
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
            counts = [T - pad - start for pad, start in zip(self.pad, starts, strict=True)]
            longest = max(counts)
            hidden = [longest - count for count in counts]  # tokens of each row to mask
            self.cache = KVCache(torch.tensor(hidden) if any(hidden) else None, self.spare)
            self.starts, self.known = starts, T - longest

        new, self.known = idx[:, self.known :], T
        logits, _ = self.model(new, cache=self.cache, last_only=last == 1)
        return logits[:, -last:, : self.vocab_size]

    def rewind(self, length):
        """Forget the tokens of idx after the first `length`."""
        drop, self.known = max(0, self.known - length), min(self.known, length)
        if drop and self.cache.length > drop:
            self.cache.rewind(self.cache.length - drop)
        elif drop:
            self.cache = None


@torch.inference_mode()
def steps(
    model,
    idx,
    max_new_tokens,
    seeds=None,
    context=None,
    vocab_size=None,
    use_cache=True,
    pad=None,
    **settings,
):
    """Continue idx (B, T): yields a Step max_new_tokens times.

    seeds: one per row; the random draws of a row depend on its own seed alone. settings: keyword
    arguments of `probabilities`. The other arguments are those of Reader."""
    reader = Reader(model, context, vocab_size, use_cache, pad)
    seeds = range(idx.size(0)) if seeds is None else seeds
    generators = [torch.Generator(idx.device).manual_seed(seed) for seed in seeds]
    for _ in range(max_new_tokens):
        logits = reader.read(idx)[:, -1]  # (B, V)
        p = probabilities(logits, **settings, seen=idx)
        token = draw(p, generators)  # (B, 1)
        yield Step(token, logits)
        idx = torch.cat((idx, token), dim=1)


def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, **more):
    """Continue idx (B, T): yields the next token of every row, (B, 1), max_new_tokens times. more:
    further arguments of `steps`."""
    settings = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    for step in steps(model, idx, max_new_tokens, **settings, **more):
        yield step.token


# ---------------------------------------------------------------- the draw


def probabilities(
    logits, temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0, seen=None
):
    """Probabilities (B, V) of the next token, given logits (B, V) and the text so far, seen (B, T).
    The settings are applied in this order:

    repetition_penalty: divides the logits of seen tokens that are positive and multiplies those
        that are negative (CTRL, Keskar et al. 2019, arXiv:1909.05858, as in transformers)
    temperature: divides the logits; 0 puts all probability on the likeliest token
    top_k: keeps the k likeliest tokens
    top_p: keeps the smallest set of the likeliest tokens that together reach probability top_p
        (nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751)
    min_p: keeps tokens at least min_p times as likely as the likeliest
        (Nguyen et al. 2024, arXiv:2407.01082)
    """
    logits = logits.float()  # (B, V)
    if repetition_penalty != 1 and seen is not None:
        penalty = min(max(repetition_penalty, 1e-30), 1e30)
        old = logits.gather(1, seen)  # (B, T)
        new = torch.where(old > 0, old / penalty, old * penalty).clamp(-1e30, 1e30)
        logits = logits.scatter(1, seen, new)
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.size(-1)).float()

    logits = logits - logits.amax(-1, keepdim=True)  # at most 0: safe at any temperature
    logits = logits / max(temperature, 1e-30)
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k).values[:, -1:]  # (B, 1) the k-th largest
        logits = logits.masked_fill(logits < least, -torch.inf)

    p = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = p.sort(descending=True, stable=True)  # (B, V)
        before = ordered.cumsum(-1) - ordered  # probability of all likelier tokens
        dropped = before >= max(top_p, 1e-30)  # in float32 a smaller one is 0: it drops all tokens
        p = p.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), 0.0)
    if min_p:
        p = p.masked_fill(p < min_p * p.amax(-1, keepdim=True), 0.0)
    return p / p.sum(-1, keepdim=True)


def draw(p, generators):
    """A token (B, 1) for each row of p (B, V), each drawn by its own random generator."""
    rows = zip(p, generators, strict=True)
    return torch.stack([torch.multinomial(row, 1, generator=generator) for row, generator in rows])


def ragged(rows, device="cpu"):
    """(idx (B, T), pad): rows of token ids (T_r,) of different lengths as one batch. pad is the
    number of padding tokens of each row, or None. The padding precedes the row and repeats its
    first token, so that the repetition penalty affects no other tokens."""
    longest = max(len(row) for row in rows)
    pad = [longest - len(row) for row in rows]
    padded = [[row[0]] * n + list(row) for n, row in zip(pad, rows, strict=True)]
    idx = torch.tensor([[int(token) for token in row] for row in padded], device=device)
    return idx, pad if any(pad) else None


def likeliest(logits, n=5):
    """[(token, probability)] of the n likeliest tokens at temperature 1, given logits (V,)."""
    p, order = logits.float().softmax(-1).topk(min(n, len(logits)))
    return list(zip(order.tolist(), p.tolist(), strict=True))


# ---------------------------------------------------------------- the text


def pieces(tokenizer, ids):
    """The text of each token. A character that spans several tokens belongs to the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [decoder.decode(tokenizer.decode_bytes([token])) for token in ids]


class Sample:
    """The text that follows a prompt. It grows token by token until the tokenizer's end token, and
    is cut where `stop` first appears. With `explain` it keeps each token's log probability and the
    likeliest tokens, at temperature 1."""

    def __init__(self, prompt, tokenizer, stop="", explain=False):
        self.prompt, self.tokenizer, self.stop, self.explain = prompt, tokenizer, stop, explain
        self.text, self.done = "", False
        self.shown = 0  # characters returned so far by add and end
        self.tokens, self.logprobs, self.top = [], [], []
        # a character may span several tokens
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.began, self.seconds = time.perf_counter(), 0.0

    def add(self, token, logits):
        """Append a token with its logits (V,). Returns the text to show now, without an ending that
        may be the beginning of `stop`."""
        self.tokens.append(token)
        if self.explain:
            self.logprobs.append(logits.float().log_softmax(-1)[token].item())
            self.top.append(likeliest(logits))
        self.seconds = time.perf_counter() - self.began
        if token in self.tokenizer.stops:
            return self.end()
        self.text += self.decoder.decode(self.tokenizer.decode_bytes([token]))

        at = self.text.find(self.stop, self.shown) if self.stop else -1
        if at >= 0:
            self.text, self.done = self.text[:at], True
            return self.show_until(at)
        ends = [n for n in range(len(self.stop)) if self.text.endswith(self.stop[:n])]
        return self.show_until(len(self.text) - max(ends, default=0))  # `stop` may begin there

    def end(self):
        """Decode what is left after the last token. Returns the rest of the text to show."""
        if not self.done:
            self.text, self.done = self.text + self.decoder.decode(b"", final=True), True
        return self.show_until(len(self.text))

    def show_until(self, end):
        piece, self.shown = self.text[self.shown : end], end
        return piece
