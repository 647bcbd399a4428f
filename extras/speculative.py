"""
python -m extras.speculative RUN --draft=SMALL|lookup [--start="ROMEO:"]

Write as sample.py does, with fewer reads of the model: speculative decoding (Leviathan et al. 2023,
arXiv:2211.17192). A cheap draft proposes a few tokens, and the model reads them all at once. With
the paper's acceptance rule, the text has the same distribution as without a draft. Greedy text is
the same in float32; in bfloat16 and int8 several tokens read at once are rounded differently.
The draft is the run folder of a smaller model with the same tokenizer, or `lookup`: a look-up in
the text so far. It takes the keys of sample.py.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial

from common import early
from common.errors import UserError, run

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("extras.speculative")

import torch
from torch.nn import functional as F

import sample
from common.configurator import PathName, build, load
from sampling.fast import make_fast
from sampling.prompts import note, read_prompts
from sampling.reader import Reader
from sampling.settings import NAMING, SampleConfig, refuse_idle
from tokens.data import same_tokens
from weights.checkpoint import open_run


@dataclass
class SpeculativeConfig:
    draft: PathName = "lookup"  # run folder of a smaller model, or lookup


class Lookup:
    """Proposes the tokens that followed an earlier occurrence of the last few tokens (prompt
    look-up, Saxena 2023)."""

    longest = 8  # tokens that must match
    shortest = 2

    def propose(self, idx, most):
        """At most `most` tokens (n,) that may follow idx (1, T), and None instead of their
        probabilities: each is proposed with probability 1."""
        text = idx[0]
        for n in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            windows = text[:-1].unfold(0, n, 1)  # (T - n, n)
            places = (windows == text[-n:]).all(-1).nonzero()  # where these n tokens occurred
            if len(places):
                next_token = int(places[-1]) + n
                return text[next_token : next_token + most], None
        return text[:0], None

    def rewind(self, length):
        pass


class Draft:
    """Proposes tokens that a smaller model draws, with the sampling settings of the large one."""

    def __init__(self, model, vocab_size, most, generator, drawing):
        self.reader = Reader(model, None, vocab_size, spare=most)
        self.generator = generator
        self.drawing = drawing

    def propose(self, idx, most):
        """`most` tokens (n,) after idx (1, T), and the probabilities q (n, V) they were drawn
        from."""
        T = idx.size(1)
        q = []
        for _ in range(most):
            logits = self.reader.read(idx)[:, 0]  # (1, V)
            q.append(sample.probabilities(logits, **self.drawing, seen=idx))
            idx = torch.cat((idx, sample.draw(q[-1], [self.generator])), dim=1)
        return idx[0, T:], torch.cat(q) if q else None

    def rewind(self, length):
        self.reader.rewind(length)


def accept(drafted, q, p, generator):
    """The tokens to keep: drafted (n,) up to the first rejected one, and one more that
    the model draws.

    p (n + 1, V): the model's probabilities for each drafted token and the one after them. q (n, V):
    the draft's. Token x is kept with probability min(1, p(x) / q(x)); a rejected one is replaced by
    a draw from max(0, p - q). Accepted and replaced, the probabilities of a token sum to p."""
    kept = []
    for x, q_x, p_x in zip(drafted.tolist(), q, p[:-1], strict=True):
        u = torch.rand((), generator=generator, device=p.device)
        if u * q_x[x] < p_x[x]:
            kept.append(x)
            continue
        rest = (p_x - q_x).clamp(min=0)
        rest = rest if rest.sum() > 0 else p_x  # p = q up to rounding
        return [*kept, int(sample.draw(rest[None], [generator]))]
    return [*kept, int(sample.draw(p[-1:], [generator]))]


@torch.inference_mode()
def speculate(
    model,
    idx,
    max_new_tokens,
    seeds=(0,),
    draft="lookup",
    most=4,
    tally=None,
    context=None,
    vocab_size=None,
    pad=None,
    **drawing,
):
    """Like sample.steps, for one row idx (1, T): yields a Step per token, max_new_tokens of them.

    draft: a model with the same tokens, or "lookup". most: how many tokens are drafted at a time.
    tally: a Counter, to which the tokens drafted and accepted and the reads are added. drawing: the
    arguments of sample.probabilities. The same seed gives the same text, but another text than
    without a draft."""
    generator = torch.Generator(idx.device).manual_seed(seeds[0])
    proposer = Lookup()
    if draft != "lookup":
        proposer = Draft(draft, vocab_size, most, generator, drawing)
    reader = Reader(model, context, vocab_size, pad=pad, spare=most)
    tally = Counter() if tally is None else tally
    left = max_new_tokens

    while left > 0:
        T = idx.size(1)
        drafted, q = proposer.propose(idx, min(most, left - 1, reader.room(T)))  # (n,)
        idx = torch.cat((idx, drafted[None]), dim=1)  # (1, T + n)
        logits = reader.read(idx, last=len(drafted) + 1)[0]  # (n + 1, V)
        p = [
            sample.probabilities(row[None], **drawing, seen=idx[:, : T + i])
            for i, row in enumerate(logits)
        ]
        p = torch.cat(p)  # (n + 1, V)
        if q is None:
            q = F.one_hot(drafted, p.size(-1)).float()  # (n, V)

        kept = accept(drafted, q, p, generator)
        idx = torch.cat((idx[:, :T], torch.tensor([kept], device=idx.device)), dim=1)
        reader.rewind(T + len(kept) - 1)
        proposer.rewind(T + len(kept) - 1)

        tally.update(drafted=len(drafted), accepted=len(kept) - 1, reads=1)
        left -= len(kept)
        for token, row in zip(kept, logits[: len(kept)], strict=True):
            yield sample.Step(torch.tensor([[token]], device=idx.device), row[None])


def open_draft(name, tokenizer, device, dtype):
    """The draft that `speculate` takes: "lookup", or the model of a run folder with weights in the
    number format `dtype`. Raises UserError if its tokenizer differs."""
    if name == "lookup":
        return name
    model, other, *_ = open_run(name, "latest", device, key="draft")
    if not same_tokens(other, tokenizer):
        fix = "train one on the same dataset, or use --draft=lookup"
        raise UserError("the draft has another vocabulary", f"draft={name}", fix)
    return make_fast(model, dtype)


def read(argv):
    """(SpeculativeConfig, SampleConfig, name of the model) of a command line."""
    given = load(argv, [SpeculativeConfig, SampleConfig], __doc__)
    names = given.words
    if len(names) != 1:
        fix = "python -m extras.speculative RUN --draft=SMALL"
        raise UserError("name one model", "command line", fix)
    refuse_idle(given.typed, NAMING)
    return build(SpeculativeConfig, given.values), sample.build_config(given.values), names[0]


def main(argv):
    settings, config, name = read(argv)
    texts = read_prompts(config.start, config.prompts)
    device, dtype = sample.choose_device(config)
    opened = sample.open_model(name, texts, config, device, dtype)
    draft = open_draft(settings.draft, opened.tokenizer, device, dtype)
    tally = Counter()
    sampler = partial(speculate, draft=draft, tally=tally)
    sample.write_all(opened, config, batch_size=1, sampler=sampler)
    if tally["drafted"]:
        accepted = tally["accepted"] / tally["drafted"]
        each = 1 + tally["accepted"] / tally["reads"]
        note(f"draft {settings.draft}: {accepted:.0%} accepted, {each:.2f} tokens for each read")


if __name__ == "__main__":
    run(main)
