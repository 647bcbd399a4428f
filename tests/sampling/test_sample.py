"""Sampling: cached = uncached, the arithmetic of the draw, and what is done with odd input."""

import json
import random
import re
import shutil
import subprocess
import sys

import pytest
import torch

import sample
import train
from common.errors import UserError
from common.files import ROOT, sha256_of
from model import GPT, GPTConfig
from model_llama import Llama, LlamaConfig
from parts.cache import LayerCache
from prepare import prepare
from sample import generate
from sampling.decoding import probabilities
from weights.checkpoint import open_run


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def out_dir(request, tmp_path_factory):
    """A run folder whose text depends on its prompt: words that are spelled again and again. The
    data it was trained on are gone."""
    folder = tmp_path_factory.mktemp(request.param)
    rng = random.Random(0)
    text = "".join(rng.choice(["the king of rome ", "shall speak no more\n"]) for _ in range(600))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare("words", input=str(folder / "text.txt"), tokenizer="char", data_dir=str(folder))
    train.main(
        [
            "--n_layer=2",
            "--n_head=4",
            "--n_embd=32",
            "--block_size=16",
            "--batch_size=16",
            "--max_iters=150",
            "--learning_rate=1e-2",
            "--warmup_iters=10",
            "--eval_interval=150",
            "--device=cpu",
            "--dataset=words",
            f"--model={request.param}",
            f"--data_dir={folder}",
            f"--out_dir={folder / 'run'}",
        ]
    )
    shutil.rmtree(folder / "words")
    return folder / "run"


def run(out_dir, *more):
    sample.main([f"--out_dir={out_dir}", "--device=cpu", *more])


def continuation(model, idx, n, **more):
    return torch.cat(list(generate(model, idx, n, **more)), dim=1)


def test_greedy_text_is_the_language(out_dir, capsys):
    run(out_dir, "--start=shall sp", "--temperature=0", "--num_samples=1", "--max_new_tokens=10")
    assert capsys.readouterr().out.startswith("shall speak no mor")
    run(out_dir, "--start=of r", "--temperature=0.0", "--num_samples=1", "--max_new_tokens=4")
    assert capsys.readouterr().out.startswith("of rome ")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_writing_does_not_load_the_compiler(out_dir, dtype):
    """Its modules take about as long to import as the rest of torch."""
    program = "import sys, sample; sample.main(sys.argv[1:]); print('modules:', *sys.modules)"
    options = ["--device=cpu", "--max_new_tokens=3", "--num_samples=1", f"--dtype={dtype}"]
    command = [sys.executable, "-c", program, f"--out_dir={out_dir}", *options]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    imported = set(done.stdout.rsplit("modules:", 1)[1].split())
    assert "torch" in imported
    assert not imported & {"torch._dynamo", "torch._inductor", "sympy"}


def test_cached_text_is_uncached_text_also_past_block_size(out_dir):
    model, tokenizer, _, _ = open_run(out_dir)
    for prompt in ("the k", "shall speak no more\nthe king of rome shall "):  # 16 is the context
        idx = torch.from_numpy(tokenizer.encode(prompt))[None]
        cached = continuation(model, idx, 60, temperature=0)
        assert torch.equal(cached, continuation(model, idx, 60, temperature=0, use_cache=False))
        assert cached.shape == (1, 60)
        draws = dict(temperature=1.0, top_k=5, seeds=[3])
        assert torch.equal(
            continuation(model, idx, 60, **draws),
            continuation(model, idx, 60, use_cache=False, **draws),
        )


def test_context_is_the_last_half_to_whole_of_block_size(out_dir):
    """How many tokens the model reads, step by step, beyond its context of 16. Only LLaMA has a
    longer one."""
    model, tokenizer, trained, _ = open_run(out_dir)
    shown, forward = [], model.forward
    model.forward = lambda idx, cache, last_only: (
        shown.append(cache.length + idx.size(1)),
        forward(idx, cache=cache, last_only=last_only),
    )[1]
    idx = torch.from_numpy(tokenizer.encode("the king of rome"))[None]
    continuation(model, idx, 18, temperature=0)
    assert shown == [16, 9, 10, 11, 12, 13, 14, 15, 16] + [9, 10, 11, 12, 13, 14, 15, 16] + [9]
    if trained["model"] == "llama":
        shown.clear()
        continuation(model, idx, 18, temperature=0, context=40)
        assert shown == [*range(16, 34)]
    else:
        with pytest.raises(UserError, match="positions for 16 tokens only"):
            run(out_dir, "--context=17")


def test_padded_vocabulary_is_never_drawn(out_dir):
    model, tokenizer, _, _ = open_run(out_dir)
    idx = torch.from_numpy(tokenizer.encode("the"))[None]
    assert continuation(model, idx.repeat(50, 1), 5, temperature=100.0, vocab_size=4).max() < 4


def test_a_cache_that_is_wrong_would_be_seen(out_dir, monkeypatch):
    """The test above has teeth: a cache that forgets changes the text."""
    model, tokenizer, _, _ = open_run(out_dir)
    idx = torch.from_numpy(tokenizer.encode("of rom"))[None]
    right = continuation(model, idx, 10, temperature=0)
    monkeypatch.setattr(LayerCache, "update", lambda self, k, v: (k, v, None))
    assert not torch.equal(continuation(model, idx, 10, temperature=0), right)


def test_same_seed_same_text_and_each_row_its_own_draws(out_dir, capsys):
    texts = []
    for seed in (1, 1, 2):
        run(
            out_dir,
            "--start=the ",
            "--num_samples=2",
            "--max_new_tokens=120",
            f"--seed={seed}",
            "--temperature=1.5",
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    first, second = texts[0].split("---------------\n")[:2]
    assert first != second
    model, tokenizer, _, _ = open_run(out_dir)
    idx = torch.from_numpy(tokenizer.encode("the "))[None]
    pair = continuation(model, idx.repeat(2, 1), 20, temperature=1.5, seeds=[7, 8])
    alone = continuation(model, idx, 20, temperature=1.5, seeds=[8])
    assert torch.equal(pair[1:], alone)


def test_temperature_top_k_and_top_p():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    assert torch.allclose(probabilities(logits), torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    squared = torch.tensor([[0.01, 0.16, 0.04, 0.09]])
    assert torch.allclose(probabilities(logits, temperature=0.5), squared / squared.sum())
    top = torch.tensor([[0.0, 0.4, 0.0, 0.3]])
    assert torch.allclose(probabilities(logits, top_k=2), top / top.sum())
    assert torch.allclose(
        probabilities(logits, top_k=9), probabilities(logits)
    )  # above the vocabulary: all of it
    for p, kept in (
        (0.3, [0, 1, 0, 0]),
        (0.6, [0, 1, 0, 1]),
        (0.7001, [0, 1, 1, 1]),
        (1.0, [1, 1, 1, 1]),
    ):
        assert (probabilities(logits, top_p=p) > 0).int().tolist() == [kept], p


def test_a_top_p_below_float32_keeps_the_likeliest():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    for p in (1e-300, 1e-45, 1e-7):
        assert probabilities(logits, top_p=p).tolist() == [[0, 1, 0, 0]]


def test_draws_follow_the_probabilities():
    """Chi-square of 4,000 draws of the first token against the model's own softmax."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=5, block_size=8)).eval()
    torch.nn.init.normal_(model.lm_head.weight, 0.0, 1.0)
    idx = torch.tensor([[1, 2, 3]]).repeat(4000, 1)
    counts = torch.bincount(next(generate(model, idx, 1, seeds=range(4000))).flatten(), minlength=5)
    expected = model(idx[:1], last_only=True)[0].softmax(-1).flatten() * 4000
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 18.5  # 0.999 quantile at 4 degrees of freedom


def test_from_python_it_takes_three_lines(out_dir, capsys):
    """The lines of README write what the script prints."""
    from sample import load, write_text

    model, tokenizer = load(out_dir)
    text = write_text(model, tokenizer, "the k", max_new_tokens=30, temperature=1.0)

    run(out_dir, "--start=the k", "--num_samples=1", "--max_new_tokens=30", "--temperature=1.0")
    assert capsys.readouterr().out == f"the k{text}\n---------------\n"
    assert write_text(model, tokenizer, "the k", temperature=0, stop="ro") == "ing of "
    for keys, words in (
        (dict(temprature=1), "unknown key temprature"),
        (dict(top_k=0), "top_k=0 is below 1"),
    ):
        with pytest.raises(UserError, match=words):
            write_text(model, tokenizer, "the k", **keys)
    with pytest.raises(UserError, match="'9' is not in the vocabulary"):
        write_text(model, tokenizer, "the 9")


def test_prompt_from_a_file_and_utf8(out_dir, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("shall speak", encoding="utf-8")
    run(
        out_dir,
        f"--start=FILE:{tmp_path / 'prompt.txt'}",
        "--num_samples=1",
        "--max_new_tokens=3",
        "--temperature=0",
    )
    assert capsys.readouterr().out.startswith("shall speak no")


def test_odd_but_allowed(out_dir, capsys):
    run(out_dir, "--start=", "--num_samples=1", "--max_new_tokens=5", "--top_k=100000")
    assert "the prompt is empty: starting from '\\n'" in capsys.readouterr().err
    run(out_dir, "--start=the", "--num_samples=1", "--max_new_tokens=0")
    assert capsys.readouterr().out == "the\n---------------\n"
    run(out_dir, "--num_samples=0")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "more, words",
    [
        (["--start=the 9"], "'9' is not in the vocabulary.*character 5"),
        (["--start=FILE:nowhere.txt"], "cannot read the prompt.*nowhere.txt"),
        (["--start=FILE:"], r"cannot read the prompt.*\(no path is given\): .*after FILE:"),
        (["--temperature=-1"], "temperature=-1.0 is negative"),
        (["--top_k=0"], "top_k=0 is below 1.*give 1 or more"),
        (["--top_p=0"], "top_p=0.0 is not above 0.*above 0, at most 1"),
        (["--top_p=1.5"], "top_p=1.5 is above 1.*above 0, at most 1"),
        (["--context=0"], "context=0 is below 1.*give 1 or more"),
        (["--num_samples=-1"], "num_samples=-1 is negative.*give 0 or more"),
        (["--max_new_tokens=-1"], "max_new_tokens=-1 is negative.*give 0 or more"),
        (["--min_p=1.5"], "min_p=1.5 is above 1.*0 or more, at most 1"),
        (["--min_p=-0.1"], "min_p=-0.1 is negative.*0 or more, at most 1"),
        (["--repetition_penalty=0"], "repetition_penalty=0.0 is not above 0"),
        (["--repetition_penalty=-2"], "repetition_penalty=-2.0 is not above 0"),
        (["--seed=-1"], "seed=-1 is negative.*give 0 or more"),
        (["--layer=-1"], "layer=-1 is negative.*give 0 or more"),
        (["--start=a", "--prompts=b"], "prompts does not go with start"),
        (["--prompts=nowhere.txt"], "cannot read the prompts.*nowhere.txt"),
        (["--score=nowhere.txt"], "cannot read the text.*nowhere.txt"),
        (["--draft=nowhere"], "no checkpoint here.*nowhere"),
        (["--compare=nowhere,else"], "no checkpoint here.*nowhere"),
        (["--compare=a,b", "--draft=lookup"], "compare does not go with draft"),
        (["--attention=no/such/map.png"], "no such folder.*no/such/map.png"),
        (["--attention=/dev/full"], "not a file.*/dev/full"),
        (["--attention=map.png", "--layer=2"], "no layer 2.*0 to 1"),
        (["--attention=map.png", "--prompts=b"], "prompts does not go with attention"),
        (["--checkpoint=77"], r"no checkpoint of step 77.*\[150\]"),
        (["--out_dir=nowhere"], "no checkpoint here.*nowhere"),
    ],
)
def test_mistakes(out_dir, more, words, capsys):
    with pytest.raises(UserError) as caught:
        run(out_dir, *more)
    assert re.search(words, str(caught.value)) and "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_gpt2_refuses_what_it_has_no_position_for_and_llama_goes_on():
    gpt = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=5, block_size=4))
    with pytest.raises(ValueError, match="5 tokens: block_size is 4"):
        gpt(torch.zeros(1, 5, dtype=torch.long))
    llama = Llama(LlamaConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=5, block_size=4))
    assert llama(torch.zeros(1, 50, dtype=torch.long))[0].shape == (1, 50, 5)


# ---------------------------------------------------------------- many prompts, programs, stop


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_prompts_are_written_as_if_alone(out_dir, tmp_path, capsys):
    """In a ragged batch, past the context, each text is that of its prompt alone."""
    prompts, alone = ["the king of rome shall ", "shall", "", "the king"], []
    for prompt in prompts:
        run(
            out_dir,
            f"--start={prompt}",
            "--num_samples=2",
            "--max_new_tokens=20",
            "--jsonl",
            "--temperature=1.5",
        )
        alone += lines(capsys)
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    run(
        out_dir,
        f"--prompts={tmp_path / 'prompts.txt'}",
        "--num_samples=2",
        "--max_new_tokens=20",
        "--jsonl",
        "--temperature=1.5",
    )
    batch = lines(capsys)
    assert [line["prompt"] for line in batch] == [prompt for prompt in prompts for _ in range(2)]
    assert len({line["text"] for line in batch}) > 5
    for one, two in zip(alone, batch, strict=True):
        assert (one["text"], one["tokens"]) == (two["text"], two["tokens"])
        assert (
            one["logprobs"] == pytest.approx(two["logprobs"], abs=1e-5)
            and max(one["logprobs"]) <= 0 < one["seconds"]
        )
    run(
        out_dir,
        f"--prompts={tmp_path / 'prompts.txt'}",
        "--num_samples=2",
        "--max_new_tokens=20",
        "--temperature=1.5",
    )
    assert capsys.readouterr().out == "".join(
        f"{line['prompt']}{line['text']}\n---------------\n" for line in batch
    )


def test_stop_and_show_probs(out_dir, capsys):
    run(out_dir, "--start=the k", "--stop=ro", "--temperature=0", "--num_samples=1")
    assert capsys.readouterr().out == "the king of \n---------------\n"
    run(
        out_dir,
        "--start=the k",
        "--stop=ro",
        "--temperature=0",
        "--num_samples=1",
        "--jsonl",
        "--show_probs",
    )
    (line,) = lines(capsys)
    assert (
        line["text"] == "ing of "
        and len(line["tokens"]) == len(line["logprobs"]) == len(line["top"]) == 9
    )
    assert all(
        top[0][0] == token and top == sorted(top, key=lambda pair: -pair[1])
        for token, top in zip(line["tokens"], line["top"], strict=True)
    )
    run(
        out_dir,
        "--start=the k",
        "--temperature=0",
        "--num_samples=1",
        "--max_new_tokens=2",
        "--show_probs",
    )
    assert re.fullmatch(
        r"the kin\nstep  drawn .*\n   1  'i' .*\n   2  'n' .*\n-+\n", capsys.readouterr().out
    )


def test_unknown_characters_are_named_or_skipped(out_dir, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("the\nsh€all 9\n", encoding="utf-8")
    with pytest.raises(
        UserError,
        match="'€' is not in the vocabulary .character 3 of the text, line 2 of .*skip_unknown",
    ):
        run(out_dir, f"--prompts={tmp_path / 'prompts.txt'}")
    run(
        out_dir,
        f"--prompts={tmp_path / 'prompts.txt'}",
        "--skip_unknown",
        "--num_samples=1",
        "--max_new_tokens=0",
    )
    shown = capsys.readouterr()
    assert (
        shown.out == "the\n---------------\nshall \n---------------\n"
        and "2 characters are not in the vocabulary and left out: '9' '€'" in shown.err
    )


def test_end_of_the_context_is_said_once(out_dir, capsys):
    run(out_dir, "--start=the king", "--num_samples=2", "--max_new_tokens=9")
    assert capsys.readouterr().err.count("beyond 16 tokens the model reads the last 8 to 16") == 1
    run(out_dir, "--start=the king", "--num_samples=2", "--max_new_tokens=8")
    assert "beyond" not in capsys.readouterr().err


# ---------------------------------------------------------------- several models, other views


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory):
    """A run folder with another tokenizer, barely trained."""
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "text.txt").write_text("the king of rome\n" * 200, encoding="utf-8")
    prepare("words", input=str(folder / "text.txt"), tokenizer="byte", data_dir=str(folder))
    train.main(
        [
            "--n_layer=1",
            "--n_head=1",
            "--n_embd=8",
            "--block_size=16",
            "--batch_size=4",
            "--max_iters=2",
            "--warmup_iters=1",
            "--eval_interval=2",
            "--device=cpu",
            "--dataset=words",
            f"--data_dir={folder}",
            f"--out_dir={folder / 'run'}",
        ]
    )
    return folder / "run"


def test_compare_and_score(out_dir, byte_run, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the king of rome shall speak no more\n", encoding="utf-8")
    both = [f"--compare={out_dir},{byte_run}", f"--score={tmp_path / 'text.txt'}"]
    run(out_dir, *both)
    shown = capsys.readouterr()
    assert (
        "compare only bits per byte" in shown.out
        and "[k]" in shown.out
        and "\033" not in shown.out
        and "empty" not in shown.err
    )
    run(
        out_dir,
        *both,
        "--start=the k",
        "--temperature=0",
        "--num_samples=1",
        "--max_new_tokens=4",
        "--jsonl",
    )
    one, two, first, second = lines(capsys)
    assert one["bits_per_byte"] < 2 < 7 < two["bits_per_byte"] and one["bytes"] == two[
        "bytes"
    ] == 37 == len(one["surprise"])
    assert (
        one["model"] == first["model"] == str(out_dir)
        and first["text"] == "ing "
        and second["model"] == str(byte_run)
    )
    run(
        out_dir,
        both[0],
        "--start=the k",
        "--temperature=0",
        "--num_samples=1",
        "--max_new_tokens=4",
    )
    assert capsys.readouterr().out.startswith(f"{out_dir}:\nthe king \n\n{byte_run}:\nthe k")
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(UserError, match="nothing to score .*text.txt"):
        run(out_dir, *both)


def test_a_scored_text_is_summed_up(out_dir, tmp_path, capsys):
    """The mean, and the 20 most surprising tokens."""
    text = "the king of rome shall Xspeak no more\n".replace("X", "") * 3
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    run(out_dir, f"--score={tmp_path / 'text.txt'}")
    short = capsys.readouterr().out
    assert f"the most surprising of {len(text)} tokens:" in short
    assert len(short.splitlines()) == 2 + 3 + 20 + 3 and "--jsonl prints" in short
    values = [float(line.split()[0]) for line in short.splitlines()[5:25]]
    model, tokenizer = sample.load(out_dir)
    found = sample.score_text(model, tokenizer, text)
    assert values == [round(value, 2) for value in sorted(found["surprise"])[::-1][:20]]
    assert found["nats_per_token"] == pytest.approx(sum(found["surprise"]) / len(text))
    assert "".join(found["pieces"]) == text


def test_temperature_0_writes_one_sample_and_says_so(out_dir, capsys):
    greedy = ["--start=the k", "--temperature=0", "--max_new_tokens=4"]
    run(out_dir, *greedy)
    printed = capsys.readouterr()
    assert printed.out == "the king \n---------------\n"
    assert printed.err.count("always writes the same: one sample, not 10") == 1
    run(out_dir, *greedy, "--num_samples=1")
    assert "one sample" not in capsys.readouterr().err


def test_what_nobody_needs_is_not_said(out_dir, capsys, monkeypatch):
    """How the tokens are decoded, unless it was asked for; and no line exceeds 80 columns."""
    short = ["--start=the", "--num_samples=1", "--max_new_tokens=2"]
    run(out_dir, *short)
    err = capsys.readouterr().err
    assert "decoding" not in err and "compiling" not in err
    assert "device cpu\ndtype float32" in err and max(map(len, err.splitlines())) <= 80
    monkeypatch.setattr(
        "sampling.fast.prepare", lambda model, *more: (model, ["decoding eager (why)"])
    )
    run(out_dir, *short, "--compile")
    err = capsys.readouterr().err
    assert err.index("compiling, which takes half a minute") < err.index("decoding eager (why)")


def test_what_int8_loses_is_told_beside_the_whole(out_dir, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the king of rome shall speak no more\n", encoding="utf-8")
    run(out_dir, f"--score={tmp_path / 'text.txt'}", "--dtype=int8", "--jsonl")
    small, whole = lines(capsys)
    assert (small["model"], whole["model"]) == (str(out_dir), f"{out_dir} in float32")
    assert 0 < abs(small["nats_per_token"] - whole["nats_per_token"]) < 0.1


def test_draft(out_dir, byte_run, capsys):
    common = [
        "--start=the king of rome the k",
        "--temperature=0",
        "--num_samples=1",
        "--max_new_tokens=40",
    ]
    run(out_dir, *common)
    alone = capsys.readouterr().out
    for draft in ("lookup", str(out_dir)):
        run(out_dir, *common, f"--draft={draft}")
        shown = capsys.readouterr()
        assert shown.out == alone and re.search(
            r"draft .*: \d+ % of \d+ drafted tokens accepted; [1-5]\.\d+ tokens each time",
            shown.err,
        )
    with pytest.raises(UserError, match="the draft has another vocabulary"):
        run(out_dir, *common, f"--draft={byte_run}")


def test_attention_is_written_as_a_picture(out_dir, tmp_path, capsys):
    run(
        out_dir,
        "--start=the king of rome shall",
        f"--attention={tmp_path / 'map.png'}",
        "--layer=1",
    )
    shown = capsys.readouterr()
    assert (
        (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
        and shown.out == ""
        and "layer 1" in shown.err
    )


@pytest.mark.parametrize("key", ["out_dir", "draft", "compare"])
@pytest.mark.parametrize(
    "harm, words",
    [
        (
            lambda folder: (folder / "model.safetensors").write_bytes(
                (folder / "model.safetensors").read_bytes()[:-9]
            ),
            "corrupt",
        ),
        (lambda folder: (folder / "state.json").unlink(), "not whole"),
        (lambda folder: newer(folder), "has format 99"),
    ],
)
def test_harmed_checkpoints_are_refused(out_dir, tmp_path, capsys, key, harm, words):
    shutil.copytree(out_dir, tmp_path / "run")
    harm(tmp_path / "run" / "ckpt" / "000150")
    with pytest.raises(UserError, match=words) as caught:
        run(
            out_dir,
            f"--{key}={out_dir},{tmp_path / 'run'}"
            if key == "compare"
            else f"--{key}={tmp_path / 'run'}",
        )
    assert caught.value.status == 2 and capsys.readouterr().out == ""


def newer(folder):
    state, sums = folder / "state.json", folder / "checksums.json"
    state.write_text(state.read_text().replace('"format": 1', '"format": 99'))
    sums.write_text(json.dumps(json.loads(sums.read_text()) | {"state.json": sha256_of(state)}))
