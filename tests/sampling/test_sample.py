"""sample.py from outside: its texts, views and mistakes."""

import json
import random
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import sample
import train
from common import configurator
from common.commands import ROOT
from common.errors import UserError
from helpers.runs import arguments
from prepare import prepare
from sample import generate
from sampling import prompts
from sampling.fast import Int8Linear
from sampling.settings import SampleConfig
from weights.checkpoint import open_run


@pytest.fixture(scope="session", params=["llama"])
def out_dir(request, tmp_path_factory):
    """A run folder, whose data are gone, and whose text depends on its prompt: words that are
    spelled again and again."""
    folder = tmp_path_factory.mktemp(request.param)
    rng = random.Random(0)
    text = "".join(rng.choice(["the king of rome ", "shall speak no more\n"]) for _ in range(600))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare("words", input=str(folder / "text.txt"), tokenizer="char", data_dir=str(folder))
    schedule = ["--batch_size=16", "--max_iters=150", "--learning_rate=1e-2", "--warmup_iters=10"]
    more = [f"--model={request.param}", "--n_head=4", "--eval_interval=150", *schedule]
    train.main(arguments(folder, folder / "run", *more))
    shutil.rmtree(folder / "words")
    return folder / "run"


both_models = pytest.mark.parametrize("out_dir", ["llama", "gpt2"], indirect=True)


def run(out_dir, *flags, **keys):
    options = [f"--{key}={value}" for key, value in keys.items()]
    sample.main([f"--out_dir={out_dir}", "--device=cpu", *flags, *options])


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def continuation(model, idx, n, **more):
    return torch.cat(list(generate(model, idx, n, **more)), dim=1)


GREEDY = dict(temperature=0, num_samples=1)
RULE = "---------------\n"


# ---------------------------------------------------------------- the text


@both_models
def test_greedy_text_is_the_language(out_dir, tmp_path, capsys):
    run(out_dir, start="shall sp", max_new_tokens=10, **GREEDY)
    assert capsys.readouterr().out.startswith("shall speak no mor")
    (tmp_path / "prompt.txt").write_text("of r", encoding="utf-8-sig")
    run(out_dir, start=f"FILE:{tmp_path / 'prompt.txt'}", max_new_tokens=4, **GREEDY)
    assert capsys.readouterr().out.startswith("of rome ")


def test_writing_imports_little(out_dir):
    """The compiler's modules take about as long to import as the rest of torch."""
    program = "import sys, sample; sample.main(sys.argv[1:]); print('modules:', *sys.modules)"
    options = ["--device=cpu", "--max_new_tokens=3", "--num_samples=1", "--dtype=int8"]
    command = [sys.executable, "-c", program, f"--out_dir={out_dir}", *options]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    imported = set(done.stdout.rsplit("modules:", 1)[1].split())
    assert "sampling.reader" in imported
    assert not imported & {"torch._inductor", "sympy", "matplotlib", "rich", "extras"}


@both_models
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
    assert shown == [16, *range(9, 17), *range(9, 17), 9]
    if trained["model"] == "llama":
        shown.clear()
        continuation(model, idx, 18, temperature=0, context=40)
        assert shown == [*range(16, 34)]
    else:
        with pytest.raises(UserError, match="positions for 16 tokens only"):
            run(out_dir, context=17)
        with pytest.raises(UserError, match="positions for 16 tokens only"):
            sample.write_text(model, tokenizer, "the", context=17)


def test_same_seed_same_text_and_each_sample_another(out_dir, capsys):
    texts = []
    for seed in (1, 1, 2):
        options = dict(num_samples=2, max_new_tokens=120, temperature=1.5)
        run(out_dir, start="the ", seed=seed, **options)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    first, second = texts[0].split(RULE)[:2]
    assert first != second
    model, tokenizer, _, _ = open_run(out_dir)
    idx = torch.from_numpy(tokenizer.encode("the "))[None]
    padded = continuation(model, idx.repeat(50, 1), 5, temperature=100.0, vocab_size=4)
    assert padded.max() < 4, "a padded vocabulary is never drawn"
    seeds = []
    keep = lambda model, idx, n, given, **more: seeds.extend(given) or ()
    wanted = [("the ", 0), ("the ", 1), ("the k", 0)]
    sample.write_samples(model, tokenizer, wanted, SampleConfig(), sampler=keep)
    assert len(set(seeds)) == 3  # of each prompt and number


def test_from_python_it_takes_three_lines(out_dir, capsys):
    """The lines of README write what the script prints."""
    from sample import load, write_text

    model, tokenizer = load(out_dir)
    text = write_text(model, tokenizer, "the k", max_new_tokens=30, temperature=1.0)
    run(out_dir, start="the k", num_samples=1, max_new_tokens=30, temperature=1.0)
    assert capsys.readouterr().out == f"the k{text}\n{RULE}"
    assert write_text(model, tokenizer, "the k", temperature=0, stop="ro") == "ing of "
    for keys, words in (
        ({"temprature": 1}, "unknown key temprature"),
        ({"top_k": 0}, "top_k=0 is"),
        ({"num_samples": 3}, "num_samples changes nothing.*choose from max_new_tokens"),
        ({"device": "cuda"}, "device changes nothing"),
    ):
        with pytest.raises(UserError, match=words):
            write_text(model, tokenizer, "the k", **keys)


def test_a_list_of_prompts_is_written_in_batches(out_dir, monkeypatch):
    """Each text is the one that its prompt gets alone. A repeated prompt gets another."""
    monkeypatch.setattr(sample, "BATCH_SIZE", 2)
    model, tokenizer = sample.load(out_dir, device=torch.device("cpu", 0))
    with pytest.raises(UserError, match="no CUDA device 99"):
        sample.load(out_dir, device="cuda:99")
    with pytest.raises(UserError, match="unknown device gpu"):
        sample.load(out_dir, device="gpu")
    prompts = ["the k", "shall speak", "the k"]
    keys = dict(max_new_tokens=40, temperature=1.5)
    texts = sample.write_text(model, tokenizer, prompts, **keys)
    alone = [sample.write_text(model, tokenizer, prompt, **keys) for prompt in prompts]
    assert texts[:2] == alone[:2] and texts[2] != alone[2] and len(texts) == 3
    assert sample.write_text(model, tokenizer, []) == []
    with pytest.raises(UserError, match="prompt 2"):
        sample.write_text(model, tokenizer, ["the", "9"])


def test_odd_but_allowed(out_dir, capsys):
    sample.main([f"--init_from={out_dir}", "--start=the", "--num_samples=1", "--max_new_tokens=0"])
    assert capsys.readouterr().out == f"the\n{RULE}"
    run(out_dir, start="", num_samples=1, max_new_tokens=5, top_k=100000)
    assert "the prompt is empty: starting from '\\n'" in capsys.readouterr().err
    drawing = dict(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.5)
    config = SampleConfig(dtype="int8", context=9, **drawing)
    opened = sample.open_model(out_dir, ["the"], config, *sample.choose_device(config))
    assert any(isinstance(module, Int8Linear) for module in opened.model.modules())
    given = {}
    sampler = lambda *args, **more: given.update(more) or iter(())
    sample.write_samples(opened.model, opened.tokenizer, [("the", 0)], config, sampler=sampler)
    vocab_size = opened.tokenizer.vocab_size  # below that of a padded model
    assert given == dict(drawing, context=9, vocab_size=vocab_size, pad=None)
    assert sample.most_positions(opened.model) == sample.most_positions(sample.load(out_dir)[0])


@pytest.mark.parametrize(
    "more, words",
    [
        (["--start=the 9"], "'9' is not in the vocabulary.*in 'the 9'"),
        (["--start=FILE:"], r"cannot read the prompt.*\(no path is given\): .*after FILE:"),
        (["--top_p=1.5"], "top_p=1.5 is out of range.*above 0, at most 1"),
        (["--start=a", "--prompts=b"], "prompts does not go with start"),
        (["--prompts=nowhere.txt"], "cannot read the prompts.*nowhere.txt"),
        (["--checkpoint=77"], r"no checkpoint of step 77 .checkpoint=77 of .*\[150\]"),
        (["run", "--start=a b"], "run `python sample.py .*'--start=a b' --out_dir=run`"),
        (["--out_dir=nowhere"], "no checkpoint here.*nowhere.*name run$"),
        (["--out_dir=run/ckpt/000150"], "name its run, run; this is its step 000150"),
        (["--prompt=a"], "prompt is not a key here.*use --start"),
        (["--prompts=a", "--compile=True"], "compile changes nothing here"),
        (["--init_from=nowhere"], "no such folder.*nowhere.*runs: run"),
        (["--init_from=run/ckpt/000150"], "a checkpoint of a run .*name its run, run"),
        (["--seed=1", "--init_from=gpt2"], "out_dir changes nothing here"),
        (["--init_from=gpt2", "--checkpoint=best"], "gpt2 is not a run, .*leave it out"),
        (["Once upon a time " * 20], "cannot read Once .*write --start=TEXT"),
    ],
    ids=str,
)
def test_mistakes(out_dir, more, words, capsys, monkeypatch):
    monkeypatch.chdir(out_dir.parent)  # so that the run folder stands beside the missing one
    (out_dir.parent / "unfinished/ckpt").mkdir(parents=True, exist_ok=True)  # is no run
    with pytest.raises(UserError) as caught:
        if more[0].startswith("--init_from"):
            sample.main(more)
        else:
            run(out_dir, *more)
    assert re.search(words, str(caught.value)) and "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- many prompts, programs, stop


@both_models
def test_prompts_are_written_as_if_alone(out_dir, tmp_path, capsys):
    """In a ragged batch, past the context, each text is that of its prompt alone."""
    starts, alone = ["the king of rome shall ", "shall", "", "the king"], []
    options = dict(num_samples=2, max_new_tokens=20, temperature=1.5)
    for prompt in starts:
        run(out_dir, "--jsonl", start=prompt, **options)
        alone += lines(capsys)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(starts) + "\n", encoding="utf-8")
    run(out_dir, "--jsonl", prompts=file, **options)
    batch = lines(capsys)
    assert [line["prompt"] for line in batch] == [prompt for prompt in starts for _ in range(2)]
    assert len({line["text"] for line in batch}) > 5
    for single, row in zip(alone, batch, strict=True):
        assert (single["text"], single["tokens"]) == (row["text"], row["tokens"])
        assert single["logprobs"] == pytest.approx(row["logprobs"], abs=1e-5)
        assert max(single["logprobs"]) <= 0 < single["seconds"]
    run(out_dir, prompts=file, **options)
    texts = [f"{line['prompt']}{line['text']}\n{RULE}" for line in batch]
    assert capsys.readouterr().out == "".join(texts)


def test_a_terminal_obeys_nothing_in_a_text(monkeypatch):
    """A program gets the text as it is."""
    text = "a\x1b[2J\tb\n"
    assert prompts.shown(text) == text
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert prompts.shown(text) == "a\\x1b[2J\tb\n"


def test_the_home_folder_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    argv = ["--out_dir=~/run", "--start=~/x", "~/run"]
    given = configurator.load(argv, [SampleConfig], "")
    run_folder = str(tmp_path / "run")
    assert given.typed == {"out_dir": run_folder, "start": "~/x"}
    assert given.words == [run_folder]
    assert configurator.check("a", "~/run", configurator.PathName | None, "") == run_folder
    (tmp_path / "run/ckpt").mkdir(parents=True)
    with pytest.raises(UserError, match=f"no checkpoint here .out_dir={run_folder}"):
        sample.load("~/run")
    with pytest.raises(UserError, match=f"cannot read the prompt.*{tmp_path}/no.txt"):
        prompts.read_prompts("FILE:~/no.txt")


def test_stop_and_show_probs(out_dir, capsys):
    run(out_dir, start="the k", stop="ro", **GREEDY)
    assert capsys.readouterr().out == f"the king of \n{RULE}"
    run(out_dir, "--jsonl", "--show_probs", start="the k", stop="ro", **GREEDY)
    (line,) = lines(capsys)
    assert line["text"] == "ing of "
    assert len(line["tokens"]) == len(line["logprobs"]) == len(line["top"]) == 9
    for token, top in zip(line["tokens"], line["top"], strict=True):
        assert top[0][0] == token and top == sorted(top, key=lambda pair: -pair[1])
    run(out_dir, "--show_probs", start="the k", max_new_tokens=2, **GREEDY)
    printed = capsys.readouterr().out
    assert re.fullmatch(r"the kin\nstep  drawn .*\n   1  'i' .*\n   2  'n' .*\n-+\n", printed)


def test_unknown_characters_are_named_or_skipped(out_dir, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("the\nsh€all 9\n", encoding="utf-8")
    words = "'€' is not in the vocabulary .in 'sh€all 9', line 2 of .*skip_unknown"
    with pytest.raises(UserError, match=words):
        run(out_dir, prompts=file)
    run(out_dir, "--skip_unknown", prompts=file, num_samples=1, max_new_tokens=0)
    shown = capsys.readouterr()
    assert shown.out == f"the\n{RULE}shall \n{RULE}"
    assert "not in the vocabulary and left out (2): '9' '€'" in shown.err


def test_notes_say_what_matters(out_dir, capsys):
    """The end of the context once; nothing about decoding; one sample at temperature 0."""
    run(out_dir, start="the king", num_samples=2, max_new_tokens=9)
    seen = "may outgrow the context: beyond 16 tokens the model sees only the last 9 to 16"
    assert capsys.readouterr().err.count(seen) == 1
    run(out_dir, start="the king", temperature=0, max_new_tokens=8)
    printed = capsys.readouterr()
    assert printed.out == f"the king of rome\n{RULE}" and "tokens the model sees" not in printed.err
    assert printed.err.count("always writes the same: one sample, not 10") == 1
    assert "decoding" not in printed.err and "compiling" not in printed.err
