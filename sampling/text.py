"""
How tokens become text: characters that span several tokens, the end of a text, and the likeliest
tokens at each step. Shapes: V vocabulary.
"""

import math
import time


def likeliest(logits, n=5):
    """[(token, probability)] of the n likeliest tokens at temperature 1, given logits (V,)."""
    p, order = logits.float().softmax(-1).topk(min(n, len(logits)))
    return list(zip(order.tolist(), p.tolist(), strict=True))


class Sample:
    """The text that follows a prompt, whose tokens are `ids`. It grows token by token until one of
    the tokenizer's `stops`, and is cut where `stop` first appears. With `explain` it keeps each
    token's log probability and the likeliest tokens, at temperature 1."""

    def __init__(self, prompt, ids, tokenizer, stop="", explain=False):
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.stop = stop
        self.explain = explain
        self.text = ""
        self.done = False
        self.shown = 0  # characters returned so far by add and end
        self.tokens = []
        self.logprobs = []
        self.top = []
        self.stream = tokenizer.stream(ids)  # a character may span several tokens
        self.began = time.perf_counter()
        self.seconds = 0.0

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
        self.text += self.stream.step(token)

        at = self.text.find(self.stop, self.shown) if self.stop else -1
        if at >= 0:
            self.text = self.text[:at]
            self.done = True
            return self.show_until(at)
        ends = [n for n in range(len(self.stop)) if self.text.endswith(self.stop[:n])]
        return self.show_until(len(self.text) - max(ends, default=0))  # `stop` may begin there

    def end(self):
        """Decode what is left after the last token. Returns the rest of the text to show."""
        if not self.done:
            self.text += self.stream.end()
            self.done = True
        return self.show_until(len(self.text))

    def show_until(self, end):
        piece = self.text[self.shown : end]
        self.shown = end
        return piece

    def table(self):
        """A line for each token: its probability, and the likeliest tokens, at temperature 1."""
        lines = ["step  drawn           p  likeliest"]
        steps = zip(self.tokens, self.logprobs, self.top, strict=True)
        for step, (token, logprob, top) in enumerate(steps, 1):
            drawn = repr(self.tokenizer.decode([token]))
            others = [f"{self.tokenizer.decode([other])!r} {p:.3f}" for other, p in top]
            lines.append(f"{step:4}  {drawn:10}  {math.exp(logprob):.3f}  {'  '.join(others)}")
        return lines


def texts_of(tokenizer, ids):
    """The text of each token. A character that spans several tokens belongs to the last of them."""
    stream = tokenizer.stream()
    return [stream.step(token) for token in ids]
