"""Preferences and DPO: files, order, the loss beside the paper's formula, the frozen reference."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch

import train
from common.errors import UserError
from extras import preferences
from helpers import runs
from helpers.runs import arguments, losses, stop_after, two_ranks, weights
from helpers.texts import message
from parts.architectures import configure, make
from prepare import prepare
from tokens.data import open_pairs
from tokens.token_files import load_meta
from training.terminal import explain
from weights.checkpoint import open_run

BETA = 0.3
WORDS = ["shall", "speak", "more", "king", "rome", "the", "of", "no"]
ROWS = [
    {
        "prompt": f"the king {WORDS[n % 8]} {WORDS[(n + n // 8) % 8]} ",
        "chosen": "of rome" * (1 + n % 2),  # the longer ones end beyond block_size
        "rejected": f"no {WORDS[n % 7]}",
    }
    for n in range(32)
]
DPO = [
    *("--dataset=tastes", f"--dpo_beta={BETA}", "--eval_interval=2"),
    *("--max_iters=4", "--learning_rate=1e-2", "--batch_size=8"),
]


@pytest.fixture(scope="session")
def tastes_dir(data_dir, tmp_path_factory):
    """data_dir with a trained run in it, `base`, and preferences in that run's tokens."""
    more = ["--block_size=32", "--max_iters=3", "--eval_interval=3", "--model=llama"]
    train.main(arguments(data_dir, data_dir / "base", *more))
    path = tmp_path_factory.mktemp("rows") / "tastes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    prepare("tastes", str(path), str(data_dir / "base"), str(data_dir))
    return data_dir


def dpo(tastes_dir, out_dir, *more):
    """The command line of a run that learns the preferences, from `base`."""
    sizes = ("--n_", "--block_size", "--batch_size")
    argv = [arg for arg in arguments(tastes_dir, out_dir) if not arg.startswith(sizes)]
    return [*argv, *DPO, f"--init_from={tastes_dir / 'base'}", *more]


def made(argv):
    """The Run of a command line, as preferences.main makes it."""
    return preferences.make_run(preferences.read(argv), train.set_up("cpu"))


def naive(model, coder, row, answer):
    """The log-probability of an answer and its end, token by token, in float64."""
    ids = [*coder.encode(row["prompt"]), *coder.encode(row[answer]), coder.start]
    ids = ids[: model.config.block_size + 1]
    scores = model(torch.tensor(ids)[None, :-1])[0][0].double().log_softmax(-1)
    first = len(row["prompt"])
    return sum(scores[i - 1, ids[i]] for i in range(first, len(ids)))


def formula(model, reference, coder, rows):
    """(losses, margins) by equation 7 of the paper, one preference after the other."""
    margins = []
    for row in rows:
        chosen, rejected = (
            naive(model, coder, row, answer) - naive(reference, coder, row, answer)
            for answer in ("chosen", "rejected")
        )
        margins.append(BETA * (chosen - rejected).item())
    return [math.log1p(math.exp(-margin)) for margin in margins], margins


@torch.no_grad()
def test_the_loss_is_the_papers(tastes_dir, tmp_path):
    """Of a step and of an evaluation, with weights that are not the reference's."""
    run = made(dpo(tastes_dir, tmp_path / "run"))
    reference, coder, _, _ = open_run(tastes_dir / "base")
    torch.manual_seed(0)
    for p in run.model.parameters():
        p.add_(0.2 * torch.randn_like(p))

    splits = load_meta(tastes_dir / "tastes")["splits"]
    assert [entry["preferences"] for entry in splits.values()] == [27, 4, 1]
    expected, margins = formula(run.model, reference, coder, ROWS[27:31])
    row = run.score(run)
    assert row["val_loss"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert row["val_reward_margin"] == pytest.approx(np.mean(margins), abs=1e-4)
    assert row["val_reward_accuracy"] == np.mean(np.array(margins) > 0)
    assert row["bits_per_byte"] is None and max(map(abs, margins)) > 0.1

    x, y, _ = run.samples.get(0, 8)
    texts = [coder.decode(line) for line in x]
    batch = [next(r for r in ROWS[:27] if text.startswith(r["prompt"])) for text in texts[::2]]
    expected, _ = formula(run.model, reference, coder, batch)
    with torch.enable_grad():
        assert train.train_step(run)[0].item() == pytest.approx(np.mean(expected), abs=1e-5)


def test_a_run_starts_at_ln_2_and_learns_what_is_preferred(tastes_dir, tmp_path, capsys):
    preferences.main(dpo(tastes_dir, tmp_path / "run", "--max_iters=12", "--eval_interval=12"))
    assert dict(losses(tmp_path / "run", "val_loss"))[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses(tmp_path / "run", "val_reward_accuracy") == [(0, 0.0), (12, 1.0)]
    assert dict(losses(tmp_path / "run", "val_reward_margin"))[12] > 0.1
    printed = capsys.readouterr().out
    assert "27 preferences to train on, 4 to validate" in printed
    words = r"step 12: .*, 100.0% of the chosen answers preferred, by \d\.\d+$"
    assert re.search(words, printed, re.M)
    assert re.search(r"^best validation loss 0\.\d+$", printed, re.M)
    preferences.main(["--init_from=resume", f"--out_dir={tmp_path / 'run'}", "--eval_only"])
    assert "100.0% of the chosen answers preferred" in capsys.readouterr().out


def test_interrupted_and_resumed_is_uninterrupted(tastes_dir, tmp_path):
    """Although the reference's run folder is gone."""
    shutil.copytree(tastes_dir / "base", tmp_path / "reference")
    more = f"--init_from={tmp_path / 'reference'}"
    preferences.main(dpo(tastes_dir, tmp_path / "straight", more))
    stop_after(3)
    assert preferences.main(dpo(tastes_dir, tmp_path / "stopped", more)).status == 143
    shutil.rmtree(tmp_path / "reference")
    preferences.main(["--init_from=resume", f"--out_dir={tmp_path / 'stopped'}"])
    measures = ("val_reward_accuracy", "val_reward_margin")
    runs.same_runs(tmp_path / "straight", tmp_path / "stopped", measures)
    assert "reference/train" in weights(tmp_path / "straight")


def test_micro_batches_are_one_batch(tastes_dir, tmp_path):
    """A smaller one, as the advice when memory ends, has both answers of each preference."""
    seen = []
    for size in (8, 4, 2):
        sizes = f"--batch_size={size}", f"--gradient_accumulation_steps={8 // size}"
        run = made(dpo(tastes_dir, tmp_path / "run", *sizes))
        seen.append([value.item() for _ in range(3) for value in train.train_step(run)])
        fix = explain(torch.OutOfMemoryError("CUDA out of memory."), run).parts[2]
        assert ("smaller block_size" if size == 2 else f"--batch_size={size // 2} ") in fix
    assert seen[1] == pytest.approx(seen[0], abs=1e-5)
    assert seen[2] == pytest.approx(seen[0], abs=1e-5)


@pytest.mark.slow
def test_two_ranks_are_one_process(tastes_dir, tmp_path):
    more = ["--gradient_accumulation_steps=2", "--batch_size=4"]
    preferences.main(dpo(tastes_dir, tmp_path / "one", *more))
    argv = dpo(tastes_dir, tmp_path / "two", *more)
    done = two_ranks(*argv, program=("-m", "extras.preferences"))
    assert done.returncode == 0, done.stderr
    keys = ("loss", "val_loss", "val_reward_margin", "val_reward_accuracy")
    runs.nearly_same_losses(tmp_path / "one", tmp_path / "two", keys)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert torch.equal(one["reference/train"], two["reference/train"])


def test_each_preference_once_in_an_epoch_and_its_answers_together(tastes_dir, tmp_path):
    run = made(dpo(tastes_dir, tmp_path / "run"))
    batches = run.samples
    count = batches.windows_per_epoch
    x, y, reference = batches.get(0, 2 * count)
    pieces = [batches.get(first, 6) for first in range(0, 2 * count, 6)]
    for whole, parts in zip((x, y, reference), zip(*pieces, strict=True), strict=True):
        assert (np.concatenate(parts)[: 2 * count] == whole).all()
    rows = open_pairs(tastes_dir / "tastes", "train", 32, preferences.Preferences).rows(
        np.arange(count)
    )[0]
    number = {rows[i].tobytes() + rows[i + 1].tobytes(): i for i in range(0, count, 2)}
    for half in (x[:count], x[count:]):
        seen = [number[half[i].tobytes() + half[i + 1].tobytes()] for i in range(0, count, 2)]
        assert len(number) == len({*seen}) == count // 2
    assert x[:count].tolist() != x[count:].tolist()


@pytest.mark.parametrize(
    "more, words",
    [
        (["--init_from=scratch"], "starts from a trained model .init_from=scratch."),
        (["--batch_size=7"], "batch_size=7"),
        (["--dataset=words"], "words holds no preferences .dataset=words."),
        (["--dataset=words,tastes"], "dataset=words,tastes"),
        (["--eval_only", "--split=test"], "split=test"),
        (["--n_layer=3"], "the weights do not fit the model"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(tastes_dir, tmp_path, more, words):
    said = message(preferences.main, dpo(tastes_dir, tmp_path / "run", *more))
    assert re.search(words, said) and not (tmp_path / "run").exists()


def test_train_names_this_command(tastes_dir, tmp_path):
    """For the keys that it had, and for a dataset of preferences."""
    argv = dpo(tastes_dir, tmp_path / "run")
    said = message(train.main, [*argv, "--objective=dpo"])
    assert f"run python -m extras.preferences {' '.join(argv)}" in said
    words = [word for word in argv if "dpo_beta" not in word]
    assert "python -m extras.preferences" in message(train.main, words)


@pytest.mark.parametrize("word", ["moe", "moe_clamped"])
def test_preferences_refuse_experts_whose_loads_nobody_balances(word):
    sizes = dict(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=11)
    model = make(configure({"model": "llama", "mlp": word} | sizes))
    with pytest.raises(UserError, match="dpo does not balance the loads of experts"):
        preferences.check_model(model)


def test_the_example_can_be_prepared(tmp_path):
    meta = prepare("exclaim", "docs/examples/preferences.jsonl", "byte", str(tmp_path))
    assert [entry["preferences"] for entry in meta["splits"].values()] == [41, 5, 2]
