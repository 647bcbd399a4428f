"""
Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192): something cheap drafts a few tokens, and the model reads
them all at once. Accepting them by the paper's rule, the text is distributed as if the model had written it alone;
greedy text is the same text. What drafts: a smaller model with the same tokenizer, or the text so far.
"""

import torch

from common.errors import UserError
from sampling.decoding import Reader, Step, draw, probabilities
from sampling.fast import prepare
from weights.checkpoint import open_run


class Lookup:
    """Drafts what followed the last few tokens where they stood before (prompt look-up, Saxena 2023)."""

    longest, shortest = 8, 2  # tokens that must be the same

    def propose(self, idx, most):
        """At most `most` tokens (n,) that may follow idx (1, T), and None: they are certain of themselves."""
        text = idx[0]
        for n in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            same = (
                (text[:-1].unfold(0, n, 1) == text[-n:]).all(-1).nonzero()
            )  # where these n tokens stood before
            if len(same):
                after = int(same[-1]) + n
                return text[after : after + most], None
        return text[:0], None

    def rewind(self, length):
        pass


class Draft:
    """Drafts with a smaller model, drawing as the model's own tokens are drawn."""

    def __init__(self, model, vocab_size, most, generator, how):
        self.reader, self.generator, self.how = (
            Reader(model, None, vocab_size, spare=most),
            generator,
            how,
        )

    def propose(self, idx, most):
        """`most` tokens (n,) after idx (1, T), and the probabilities q (n, V) that each was drawn from."""
        T, q = idx.size(1), []
        for _ in range(most):
            q.append(probabilities(self.reader.read(idx)[:, 0], **self.how, seen=idx))
            idx = torch.cat((idx, draw(q[-1], [self.generator])), dim=1)
        return idx[0, T:], torch.cat(q) if q else None

    def rewind(self, length):
        self.reader.rewind(length)


def accept(drafted, q, p, generator):
    """The tokens to keep: those drafted (n,) up to the first rejected, and one more, which the model draws.

    p (n + 1, V): the model's probabilities of each of them and of one after; q (n, V): those they were drawn from. Token
    x is kept with probability min(1, p(x) / q(x)). In the place of a rejected one stands a draw from max(0, p - q): the
    two ways to a token add up to p."""
    kept = []
    for x, q_x, p_x in zip(drafted.tolist(), q, p):
        u = torch.rand((), generator=generator, device=p.device)
        if u * q_x[x] < p_x[x]:
            kept.append(x)
            continue
        rest = (p_x - q_x).clamp(min=0)
        rest = rest if rest.sum() > 0 else p_x  # p = q but for rounding
        return [*kept, int(draw(rest[None], [generator]))]
    return [*kept, int(draw(p[-1:], [generator]))]


class Tally:
    """How well the drafts did."""

    drafted = accepted = reads = written = 0

    def __str__(self):
        rate = (
            f"{100 * self.accepted / self.drafted:.0f} % of {self.drafted:,} drafted tokens accepted"
            if self.drafted
            else "nothing could be drafted"
        )
        return f"{rate}; {self.written / max(1, self.reads):.2f} tokens each time the model reads"


@torch.inference_mode()
def speculate(
    model,
    idx,
    max_new_tokens,
    draft="lookup",
    draft_tokens=4,
    seed=0,
    context=None,
    vocab_size=None,
    tally=None,
    **how,
):
    """As sample.steps, of one row idx (1, T): yield a Step per token, max_new_tokens of them.

    draft: a model with the same tokens, or "lookup"; draft_tokens: how many are drafted at a time; how: the settings of
    decoding.probabilities. The same seed gives the same text, though not the one that a model draws alone."""
    generator = torch.Generator(idx.device).manual_seed(seed)
    proposer = (
        Lookup() if draft == "lookup" else Draft(draft, vocab_size, draft_tokens, generator, how)
    )
    reader, tally, left = (
        Reader(model, context, vocab_size, spare=draft_tokens),
        tally or Tally(),
        max_new_tokens,
    )
    while left > 0:
        T = idx.size(1)
        drafted, q = proposer.propose(idx, min(draft_tokens, left - 1, reader.room(T)))
        idx = torch.cat((idx, drafted[None]), dim=1)  # (1, T + n)
        logits = reader.read(idx, last=len(drafted) + 1)[0]  # (n + 1, V)
        p = torch.cat(
            [probabilities(row[None], **how, seen=idx[:, : T + i]) for i, row in enumerate(logits)]
        )  # (n + 1, V)
        q = torch.nn.functional.one_hot(drafted, p.size(-1)).float() if q is None else q
        kept = accept(drafted, q, p, generator)
        tally.drafted, tally.accepted = tally.drafted + len(drafted), tally.accepted + len(kept) - 1
        tally.reads, tally.written, left = (
            tally.reads + 1,
            tally.written + len(kept),
            left - len(kept),
        )
        idx = torch.cat((idx[:, :T], torch.tensor([kept], device=idx.device)), dim=1)
        reader.rewind(T + len(kept) - 1), proposer.rewind(T + len(kept) - 1)
        for token, row in zip(kept, logits):
            yield Step(torch.tensor([[token]], device=idx.device), row[None])


def open_draft(name, tokenizer, device, kind="float32"):
    """What `speculate` takes as its draft: "lookup", None for none, or the model of a run folder with weights of the kind
    `kind`; UserError unless its tokenizer is the same."""
    if name in ("", "lookup"):
        return name or None
    model, other, _, _ = open_run(name, "latest", device)
    if other.to_json() != tokenizer.to_json():
        raise UserError(
            "the draft has another vocabulary",
            f"draft={name}",
            "train one on the same data set, or use --draft=lookup",
        )
    return prepare(model, kind)[0]
