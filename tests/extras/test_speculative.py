"""Speculative decoding: the same greedy text, the same distribution of drawn text, fewer reads."""

import re
from collections import Counter

import pytest
import torch
from scipy import stats

import sample
from common.errors import UserError
from extras.speculative import Lookup, accept, main, speculate
from helpers.progression import progression, trained
from helpers.variants import close, name
from model_llama import Llama, LlamaConfig
from sample import probabilities, steps

HOW = dict(temperature=0.7, top_k=4, top_p=0.97)
N = 24  # tokens of a greedy text: twice the context
ENOUGH = 1e-3  # a p-value below this refutes


def tiny(seed, V=5, scale=1.0):
    torch.manual_seed(seed)
    sizes = dict(n_layer=1, n_head=1, n_embd=8, vocab_size=V, block_size=8, multiple_of=8)
    model = Llama(LlamaConfig(**sizes)).eval()
    torch.nn.init.normal_(model.lm_head.weight, 0.0, scale)
    return model


def text(written):
    return torch.cat([step.token for step in written], dim=1)[0].tolist()


ARMS = [{}, dict(window=5), dict(window=5, full_every=2, position="alibi")]
ARMS += [dict(position="learned"), dict(block_local=6)]
ARMS += [dict(mixer=word, position="none") for word in ("mamba2", "gated_delta")]
REWOUND = [ARMS[2], ARMS[-1]]  # with a model as the draft, the others are slow


@pytest.mark.parametrize(
    "draft, arm",
    [
        pytest.param(
            draft,
            arm,
            id=f"{draft}-{name(arm)}",
            marks=[] if draft == "lookup" or arm in REWOUND else pytest.mark.slow,
        )
        for draft in ("lookup", "model")
        for arm in ARMS
    ],
)
def test_greedy_text_is_the_models_own(arm, draft):
    """Beyond the window and the context, for a text that the draft sometimes gets right. It takes
    fewer reads than tokens."""
    model = trained(tuple(arm.items()))
    drafter, tally = trained((("low_rank", 3),)) if draft == "model" else draft, Counter()
    longer = None if model.wpe.limit else 30
    for prompt, most, more in (
        (progression(2, 1, 5), 1, {}),
        (progression(1, 3, 17), 4, dict(context=longer)),
        (progression(4, 2, 3), 4, dict(repetition_penalty=1.5)),
    ):
        settings = dict(temperature=0, **more)
        alone = list(steps(model, prompt[None], N, **settings))
        drafted = list(
            speculate(model, prompt[None], N, draft=drafter, most=most, tally=tally, **settings)
        )
        assert text(drafted) == text(alone)
        for a, b in zip(drafted, alone, strict=True):
            assert close(a.logits, b.logits)
    assert tally["reads"] + tally["accepted"] == 3 * N > tally["reads"]
    if draft == "model":
        assert tally["accepted"] < tally["drafted"], "a draft that is never wrong tests little"


@torch.inference_mode()
def joint(model, idx, n=2):
    """The exact probabilities (V^n,) of the next n tokens after idx (1, T)."""
    p = probabilities(model(idx)[0][:, -1], **HOW)[0]
    if n == 1:
        return p
    longer = [torch.cat((idx, torch.tensor([[x]])), 1) for x in range(len(p))]
    return torch.cat([p[x] * joint(model, more, n - 1) for x, more in enumerate(longer)])


def p_value(counts, expected):
    """The p-value of the chi-square test that counts (N,) were drawn with probabilities expected
    (N,); 0 if one is impossible."""
    seen = expected > 0
    if counts[~seen].sum():
        return 0.0
    expected = expected[seen].double()
    expected *= counts.sum() / expected.sum()
    return stats.chisquare(counts[seen].numpy(), expected.numpy()).pvalue


@pytest.mark.parametrize(
    "draft", [pytest.param("lookup", marks=pytest.mark.slow), tiny(1)], ids=["lookup", "model"]
)
def test_drawn_text_has_the_models_distribution(draft):
    """Chi-square of 800 pairs of tokens against the exact product of probabilities."""
    model, idx = tiny(0), torch.tensor([[1, 2, 3, 1, 2]])
    pairs = [text(speculate(model, idx, 2, [seed], draft, 2, **HOW)) for seed in range(800)]
    counts = torch.bincount(torch.tensor([5 * a + b for a, b in pairs]), minlength=25).double()
    assert p_value(counts, joint(model, idx)) > ENOUGH


def test_rule_of_acceptance_by_itself():
    """The first token that it keeps has the distribution p, whatever q is, and it accepts with
    probability sum(min(p, q))."""
    p, q = torch.tensor([[0.5, 0.3, 0.2, 0.0]] * 2), torch.tensor([[0.1, 0.3, 0.4, 0.2]])
    generator = torch.Generator().manual_seed(0)
    drafts = [torch.multinomial(q[0], 1, generator=generator) for _ in range(4000)]
    kept = [accept(draft, q, p, generator) for draft in drafts]
    counts = torch.bincount(torch.tensor([tokens[0] for tokens in kept]), minlength=4)
    assert p_value(counts, p[0]) > ENOUGH
    rate = sum(len(tokens) == 2 for tokens in kept) / len(kept)
    assert abs(rate - torch.minimum(p[0], q[0]).sum().item()) < 4 * (0.6 * 0.4 / 4000) ** 0.5
    same = torch.tensor([[0.5, 0.5]])  # p = q: never rejected
    assert len(accept(torch.tensor([0]), same, same.repeat(2, 1), generator)) == 2


def test_look_up_finds_the_latest_longest_match():
    def proposed(*tokens, most=3):
        return Lookup().propose(torch.tensor([tokens]), most)[0].tolist()

    assert proposed(1, 2, 3, 4, 1, 2) == [3, 4, 1]
    assert proposed(1, 2, 3, 1, 2, 4, 1, 2) == [4, 1, 2], "the latest of two"
    assert proposed(5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2) == [3, 6, 1], "the longer of two"
    assert proposed(1, 2, 3, 4, 5) == proposed(1) == proposed(1, 2) == []
    assert proposed(1, 2, 3, 4, 1, 2, most=0) == []


def test_the_command_writes_what_sample_py_writes(runs, capsys, monkeypatch):
    """Also if the draft's tokenizer is stored in another form, as with --chat."""
    run, other = runs
    options = ["--start=the king of Zoë the k", "--max_new_tokens=40", "--temperature=0"]
    sample.main([f"--out_dir={run}", "--device=cpu", *options])
    alone = capsys.readouterr().out
    monkeypatch.setattr("tokens.tokenizer.CharTokenizer.to_json", lambda self: id(self))
    tally = r"draft .*: \d+% accepted, [1-5]\.\d+ tokens for each read"
    for draft in ("lookup", run):
        main([run, f"--draft={draft}", "--device=cpu", *options])
        shown = capsys.readouterr()
        assert shown.out == alone and re.search(tally, shown.err)
    for draft, words in ((other, f"draft={other}"), ("none", "no checkpoint here .draft=none.:")):
        with pytest.raises(UserError, match=words):
            main([run, f"--draft={draft}", "--device=cpu", *options])
