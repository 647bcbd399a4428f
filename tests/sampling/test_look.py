"""What is shown of a model: loss on a text, surprise in colours, columns, attention maps."""

import io
import math

import pytest
import torch
from matplotlib.image import imread
from test_decoding import CONTEXT, progression, trained
from test_variants import ARMS, config, name, randomised, tokens

from model import GPT, GPTConfig
from model_llama import Llama, LlamaConfig
from sample import steps
from sampling import terminal
from sampling.attention_map import attention_weights, picture
from sampling.decoding import Sample
from tokens.tokenizer import ByteTokenizer


def test_surprise_is_the_loss_and_what_sampling_says_of_its_own_text():
    """Within the context the mean is the model's own loss; beyond it each token's is the one of writing it."""
    model = trained(())
    idx = progression(3, 2, CONTEXT + 1)[None]
    got = terminal.surprise(model, idx[0, 1:].tolist(), int(idx[0, 0]))
    assert abs(got.mean() - model(idx[:, :-1], idx[:, 1:])[1]) < 1e-6
    found = list(steps(model, torch.tensor([[1]]), 40, temperature=1.0, seeds=[3]))
    ids, said = (
        [step.token.item() for step in found],
        [-step.logits.log_softmax(-1)[0, step.token.item()].item() for step in found],
    )
    assert torch.allclose(terminal.surprise(model, ids, 1), torch.tensor(said).double(), atol=1e-5)


def test_summary():
    found = terminal.summary(
        torch.tensor([math.log(2), math.log(8)], dtype=torch.double), n_bytes=4
    )
    assert found == pytest.approx(
        {
            "tokens": 2,
            "bytes": 4,
            "nats_per_token": math.log(4),
            "bits_per_byte": 1.0,
            "perplexity": 4.0,
        }
    )
    table = terminal.score_table(["a", "bb"], [found, found], alike=False)
    assert (
        "only bits per byte compares" in table
        and len({len(line) for line in table.splitlines()[:3]}) == 1
    )
    assert "only" not in terminal.score_table(["a"], [found], alike=True)


def test_colours_follow_the_surprise_and_the_text_is_whole():
    nats = torch.tensor([0.1, 0.7, 3.0, 9.0, 100.0])
    painted = terminal.coloured(["a", "b\n", "\x1b[2J", "é", "z"], nats)
    text, legend = painted.rsplit("\n", 1)
    assert (
        text
        == "a\033[38;5;16;48;5;230mb↵\033[0m\n\033[38;5;16;48;5;208m�[2J\033[0m\033[97;48;5;53mé\033[0m\033[97;48;5;53mz\033[0m"
    )
    assert (
        all(f"\033[{colour}m" in legend for _, colour in terminal.LEVELS if colour)
        and "8 or more" in legend
    )
    assert terminal.plain(["a", "\n"], nats[:2]).split("\n") == ["  0.1000  'a'", "  0.7000  '\\n'"]
    assert terminal.pieces(ByteTokenizer(), "aé".encode()) == ["a", "", "é"]


def test_columns():
    texts = ["one two three " * 8, "中文字" * 30 + "\nend\x07"]
    wide = [line.ljust(43) for line in terminal.columns(["first", "second"], texts, 83).split("\n")]
    assert all(terminal.cells(line) <= 83 and line[40:43] == " | " for line in wide)
    assert wide[0].split() == ["first", "|", "second"] and wide[1] == "-" * 40 + " | " + "-" * 40
    assert " ".join(" ".join(line[:40] for line in wide[2:]).split()) == texts[0].strip(), (
        "words are not broken"
    )
    assert "".join(line[43:].strip() for line in wide[2:]) == "中文字" * 30 + "end�"
    assert (
        terminal.columns(["first", "second"], texts, 60)
        == f"first:\n{texts[0]}\n\nsecond:\n{texts[1]}"
    )
    assert terminal.wrap("x" * 70, 32) == ["x" * 32, "x" * 32, "x" * 6] and terminal.wrap(
        "", 5
    ) == [""]


def test_alternatives():
    sample, logits = Sample("", ByteTokenizer(), explain=True), torch.full((256,), -20.0)
    logits[ord("a")], logits[ord("b")] = math.log(0.75), math.log(0.25)
    sample.add(ord("b"), logits)
    assert [token for token, _ in sample.top[0][:2]] == [
        ord("a"),
        ord("b"),
    ] and sample.logprobs == [pytest.approx(math.log(0.25), abs=1e-5)]
    row = (
        terminal.alternatives_table(ByteTokenizer(), sample.tokens, sample.logprobs, sample.top)
        .split("\n")[1]
        .split()
    )
    assert row[:7] == ["1", "'b'", "0.250", "'a'", "0.750", "'b'", "0.250"]


# ---------------------------------------------------------------- attention maps


def outputs(model, idx, layer):
    """What wv and wo of a layer were given and gave, in a plain forward pass."""
    attn, seen = model.blocks[layer].attn, {}
    hooks = [
        attn.wv.register_forward_hook(lambda m, i, o: seen.update(v=o)),
        attn.wo.register_forward_pre_hook(lambda m, i: seen.update(y=i[0])),
    ]
    model(idx)
    for hook in hooks:
        hook.remove()
    return seen["v"], seen["y"]


def check_map(model, idx, layer):
    attn = model.blocks[layer].attn
    weights, T, K = (
        attention_weights(model, idx, layer).double(),
        idx.size(1),
        getattr(attn, "n_kv_head", attn.n_head),
    )
    v, y = outputs(model, idx, layer)
    v = (
        v.double().view(T, K, -1).transpose(0, 1).repeat_interleave(attn.n_head // K, dim=0)
    )  # (H, T, D)
    assert torch.allclose((weights @ v).transpose(0, 1).reshape(T, -1), y[0].double(), atol=1e-5)
    assert (
        torch.allclose(weights.sum(-1), torch.ones(attn.n_head, T).double(), atol=1e-5)
        and weights.triu(1).abs().max() == 0
    )


@torch.no_grad()
@pytest.mark.parametrize("arm", ARMS, ids=name)
def test_attention_map_explains_the_models_attention(arm):
    """Weights times values is what the layer hands to wo: more tokens than a head has features, and fewer."""
    model = randomised(config("llama", arm)).float()
    check_map(model, tokens(model.config, 1, 11), 1)


@torch.no_grad()
@pytest.mark.parametrize(
    "model",
    [
        GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=9, block_size=24)),
        Llama(LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, vocab_size=9)),
    ],
)
def test_attention_map_of_the_readable_models(model):
    for T in (1, 8, 21):
        check_map(model.eval(), tokens(model.config, 1, T), 1)
    assert (
        not model.blocks[1].attn.wv._forward_hooks
        and not model.blocks[1].attn.wo._forward_pre_hooks
    )


def test_picture_is_a_png_with_a_panel_per_head():
    png = picture(torch.eye(30).repeat(3, 1, 1), ["$a_b", "␣", "中"] * 10, "a title")
    pixels = imread(io.BytesIO(png))
    assert png.startswith(b"\x89PNG") and pixels.shape[0] > 500 < pixels.shape[1]
