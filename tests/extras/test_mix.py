"""Several datasets as one: shares, order, evaluation, resuming."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from common.errors import UserError
from extras import mix
from extras.mix import BLOCK, MixedBatches, powers, read_weights, shares_of_block
from helpers import runs
from helpers.runs import arguments, losses, stop_after, two_ranks
from helpers.texts import message
from prepare import prepare
from tokens.batches import Batches
from training.evaluation import batch_sums
from weights import checkpoint


def mixed(weights=(0.5, 0.3, 0.2), seed=1, sizes=(5000, 700, 90), block_size=8):
    """MixedBatches whose source i has the tokens 100,000 i, 100,000 i + 1, ..."""
    own = enumerate(sizes[: len(weights)])
    orders = [Batches(100_000 * i + np.arange(n), block_size, seed + i) for i, n in own]
    return MixedBatches(orders, shares_of_block(weights), seed)


@pytest.mark.parametrize(
    "alpha, expected",
    [(1.0, [0.1, 0.2, 0.7]), (0.0, [1 / 3] * 3), (0.5, [0.31623, 0.44721, 0.83666])],
)
def test_shares_by_the_rule(alpha, expected):
    expected = np.array(expected) / sum(expected)
    found = powers([10**6, 2 * 10**6, 7 * 10**6], alpha)
    assert found / found.sum() == pytest.approx(expected, abs=1e-5)
    assert read_weights("1,2,7", ["a", "b", "c"]).tolist() == [1, 2, 7]


def test_shares_of_a_block_by_largest_remainder():
    assert shares_of_block([0.57, 0.29, 0.14]).tolist() == [5700, 2900, 1400]
    assert shares_of_block([1 / 3] * 3).tolist() == [3334, 3333, 3333]
    assert shares_of_block([0.10004, 0.89996]).tolist() == [1000, 9000]


def test_each_block_has_exactly_its_shares_in_an_order_of_its_own():
    batches = mixed()
    seen = [batches.get(BLOCK * block, BLOCK)[0][:, 0] // 100_000 for block in range(3)]
    assert [np.bincount(block).tolist() for block in seen] == [[5000, 3000, 2000]] * 3
    assert (seen[0] != seen[1]).any() and (seen[0][:5000] != 0).any()
    # Neighbours differ as often as in a shuffle: 1 - (0.25 + 0.09 + 0.04).
    assert 0.55 < (np.diff(seen[0]) != 0).mean() < 0.69
    assert (mixed(seed=2).get(0, BLOCK)[0] // 100_000 != batches.get(0, BLOCK)[0] // 100_000).any()


def test_order_is_a_pure_function():
    x, y = mixed().get(0, 2 * BLOCK + 50)
    assert x.shape == y.shape == (2 * BLOCK + 50, 8) and x.dtype == y.dtype == np.int64
    assert (y == x + 1).all()
    wandering = mixed()
    places = [(2 * BLOCK - 7, 20), (0, 3), (BLOCK - 1, 2), (123, 12), (9000, BLOCK + 1050), (5, 1)]
    for first, count in places:  # back and forth, over the ends of blocks
        for a, b in zip(wandering.get(first, count), (x, y), strict=True):
            assert (a == b[first : first + count]).all()
        drawn = np.bincount(x[first : first + count, 0] // 100_000, minlength=3)
        assert (wandering.counts(first + count) - wandering.counts(first) == drawn).all()


def test_the_samples_of_a_source_are_its_own_order_without_replacement():
    """So a source is seen as it would be alone, also across blocks."""
    x = mixed().get(0, 2 * BLOCK)[0]
    for i, (size, n) in enumerate(zip((5000, 700, 90), (BLOCK, 6000, 4000), strict=True)):
        own = x[x[:, 0] // 100_000 == i]
        alone = Batches(100_000 * i + np.arange(size), 8, 1 + i)
        assert len(own) == n and (own == alone.get(0, n)[0]).all()
        epoch = own[: alone.windows_per_epoch, 0]
        assert len(set(epoch.tolist())) == len(epoch)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Three sets in bytes, of different lengths, and one in characters."""
    folder = tmp_path_factory.mktemp("sets")
    for name, text, kind in [
        ("a", "the king of rome shall speak no more\n" * 60, "byte"),
        ("b", "0123456789 é\n" * 40, "byte"),
        ("c", "x y z\n" * 40, "byte"),
        ("chars", "x y z\n" * 40, "char"),
    ]:
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        prepare(name, input=str(folder / f"{name}.txt"), tokenizer=kind, data_dir=str(folder))
    return folder


@pytest.mark.parametrize(
    "more", [["--data_weights=0.5,0.3,0.2"], ["--data_alpha=0.3", "--optimizer=muon"]], ids=" ".join
)
def test_interrupted_and_resumed_is_uninterrupted(sets, tmp_path, more, monkeypatch):
    monkeypatch.setattr(mix, "BLOCK", 30)  # 9 steps of 8 samples go over the ends of blocks
    run = ["--dataset=a,b,c", "--max_iters=9", "--eval_interval=4", "--dropout=0.2"]
    run += ["--gradient_accumulation_steps=2", *more]
    mix.main(arguments(sets, tmp_path / "straight", *run))
    stopped = arguments(sets, tmp_path / "stopped", *run)
    for step in (2, 5):
        stop_after(step)
        assert mix.main(stopped).status == 143
        stopped = ["--init_from=resume", f"--out_dir={tmp_path / 'stopped'}"]
    assert not mix.main(stopped).status
    runs.same_runs(tmp_path / "stopped", tmp_path / "straight", ("val_losses",))


def test_evaluation_of_each_set_and_the_mean_by_weight(sets, tmp_path):
    run = ["--max_iters=3", "--eval_interval=3", "--eval_tokens=100"]
    mix.main(arguments(sets, tmp_path / "mix", *run, "--dataset=a,b", "--data_weights=3,1"))
    rows = [json.loads(line) for line in (tmp_path / "mix" / "log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "val_loss" in row]
    for row in rows:
        for mean, each in ("val_loss", "val_losses"), ("bits_per_byte", "val_bits_per_byte"):
            assert list(row[each]) == ["a", "b"]
            assert row[mean] == pytest.approx(0.75 * row[each]["a"] + 0.25 * row[each]["b"])
    for name in ("a", "b"):  # the first evaluation is that of the same model on the set alone
        train.main(arguments(sets, tmp_path / name, *run, f"--dataset={name}"))
        assert losses(tmp_path / name, "val_loss")[0][1] == rows[0]["val_losses"][name]
        assert losses(tmp_path / name, "bits_per_byte")[0][1] == rows[0]["val_bits_per_byte"][name]
        assert not losses(tmp_path / name, "val_losses")
    assert "samples" not in rows[-1]  # which a resume with other weights made wrong


def test_a_changed_mixture_is_named_when_resuming(sets, tmp_path, capsys):
    run = ("--dataset=a,b", "--data_weights=3,1", "--max_iters=2")
    mix.main(arguments(sets, tmp_path / "run", *run))
    resume = ["--init_from=resume", f"--out_dir={tmp_path / 'run'}", "--max_iters=3"]
    for other in ("a", "b,a", "a,b,c"):
        with pytest.raises(UserError, match="has changed since"):
            mix.main([*resume, f"--dataset={other}", "--data_weights=None"])
    capsys.readouterr()
    mix.main([*resume, "--data_weights=1,1"])
    words = "warning: max_iters 2 -> 3, data_weights 3,1 -> 1,1: the run will differ"
    assert words in capsys.readouterr().out


def test_the_best_loss_is_of_the_data_that_are_trained_on(sets, tmp_path):
    run = arguments(sets, tmp_path / "run", "--dataset=a,b", "--max_iters=2", "--eval_interval=2")
    mix.main(run)
    more = ("--dataset=c", "--init_from=resume", "--allow_data_change", "--max_iters=3")
    mix.main([*run, *more, "--learning_rate=1e-9", "--min_lr=1e-9"])
    state = checkpoint.read(checkpoint.find(tmp_path / "run"))[0]
    best = (state["best_step"], state["best_val_loss"])
    assert best in losses(tmp_path / "run", "val_loss")[2:]


@pytest.mark.parametrize(
    "more, words",
    [
        (["--dataset=a,chars"], "different tokenizers .*dataset=a,chars.*same one"),
        (["--dataset=a,b", "--data_weights=1,0"], "not a number above 0 for each"),
        (["--dataset=a,b", "--data_weights=1,2", "--data_alpha=0.5"], "both set the shares"),
        (["--dataset=a,b", "--data_alpha=-1"], "data_alpha=-1.0 is out of range"),
        (["--dataset=a,a"], "a dataset is empty or repeated"),
        (["--dataset=a,nowhere"], "prepare.py nowhere"),
        (["--dataset=a,b", "--data_weights=1,0.00001"], "at least one in 10,000"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(sets, tmp_path, more, words):
    said = message(mix.main, arguments(sets, tmp_path / "run", "--max_iters=1", *more))
    assert re.search(words, said) and not (tmp_path / "run").exists()


def test_a_known_set_that_is_missing_is_prepared(sets, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("prepare.prepare", lambda name, data_dir: asked.append((name, data_dir)))
    names = "--dataset=a,shakespeare_char, shakespeare"
    said = message(mix.main, arguments(sets, tmp_path / "run", names))
    assert "prepare.py shakespeare_char" in said  # nothing was prepared
    assert asked == [("shakespeare_char", str(sets)), ("shakespeare", str(sets))]


def test_train_names_this_command(sets, tmp_path):
    """For several datasets, for the keys that it had, and for a run that began with several."""
    run = arguments(sets, tmp_path / "run", "--dataset=a,b", "--max_iters=1")
    assert f"run python -m extras.mix {' '.join(run)}" in message(train.main, run)
    assert "run python -m extras.mix --data_alpha=0.3" in message(train.main, ["--data_alpha=0.3"])
    mix.main(run)
    resume = ["--init_from=resume", f"--out_dir={tmp_path / 'run'}"]
    assert f"run python -m extras.mix {' '.join(resume)}" in message(train.main, resume)


def test_the_epochs_of_a_source_are_of_its_own_samples():
    of = lambda name, size: SimpleNamespace(name=name, times_read=lambda n: n / size, epochs=str)
    mixture = SimpleNamespace(sources=[of("a", 1000), of("b", 10)], weights=[0.75, 0.25])
    assert mix.Mixture.epochs(mixture, 100) == "75.0 of a, 25.0 of b"
    assert mix.Mixture.times_read(mixture, 100) == 2.5  # of b


def test_columns_are_means_by_weight():
    """A measure is a mean over the datasets that have it."""
    text = batch_sums(list(map(torch.tensor, [1.0, 1.0])), [(5, 5)] * 2)
    a = batch_sums([torch.tensor([3.0, 2, 1]), torch.tensor([5.0, 2, 1])] * 2, [(4, 2)] * 4)
    b = batch_sums([torch.tensor([2.0, 9, 3])] * 3, [(10, 4)] * 3)
    measures = ("accuracy", "exact")
    sources = [
        SimpleNamespace(name=name, bits_per_byte=2.0, splits={"val": SimpleNamespace(measures=of)})
        for name, of in (("text", ()), ("a", measures), ("b", measures))
    ]
    found = [{"train": sums, "val": sums} for sums in (text, a, b)]
    row = mix.mixed_row(sources, [0.5, 0.3, 0.2], found)
    loss = 0.5 * 1 + 0.3 * 4 + 0.2 * 2
    assert row["val_loss"] == row["val_loss_tune"] == row["val_loss_report"] == pytest.approx(loss)
    assert row["bits_per_byte"] == pytest.approx(2 * loss) and row["val_blocks"] == [loss]
    assert row["val_losses"] == {"text": 1, "a": 4, "b": 2}
    assert row["val_accuracy"] == pytest.approx((0.3 * 0.5 + 0.2 * 0.9) / 0.5)
    assert row["report_exact"] == pytest.approx((0.3 * 0.5 + 0.2 * 0.75) / 0.5)


@pytest.fixture(scope="module")
def with_pairs(sets):
    """The sets, and pairs in bytes with short and long answers."""
    rows = [{"prompt": f"{n} is ", "answer": "ab" * (1 + n % 6)} for n in range(60)]
    (sets / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare("p", input=str(sets / "p.jsonl"), tokenizer="byte", data_dir=str(sets))
    return sets


def test_micro_batches_of_pairs_and_text_are_one_batch(with_pairs, tmp_path):
    def make(*keys):
        argv = arguments(with_pairs, tmp_path / "run", *keys, "--dataset=p,a", "--max_iters=50")
        return mix.make_run(mix.read(argv), train.set_up("cpu", "float32"))

    runs.micro_batches_agree(make)


@pytest.mark.slow
def test_two_ranks_are_one_process(with_pairs, tmp_path):
    keys = ("--dataset=p,a", "--data_weights=2,1", "--max_iters=4", "--eval_interval=2")
    keys += ("--gradient_accumulation_steps=4", "--batch_size=2")
    run = arguments(with_pairs, tmp_path / "one", *keys)
    mix.main(run)
    done = two_ranks(*run, f"--out_dir={tmp_path / 'two'}", program=("-m", "extras.mix"))
    assert done.returncode == 0, done.stderr
    runs.nearly_same_losses(tmp_path / "one", tmp_path / "two")
