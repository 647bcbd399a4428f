"""The identity of a run's code: what makes rows stale, and what leaves them fresh."""

import shutil

import pytest

from bench.ablation import checks, identity, settings, sweep
from common.files import ROOT
from helpers.ablation import arguments, names


@pytest.fixture(scope="module")
def changed(data_dir, tmp_path_factory):
    """A function of (file, old text, new text): the names of the arms whose hash changes if a file
    of a copy of ours does."""
    _, base = settings.read(arguments(data_dir, "out", "--axis=norm"), "")
    changes = {"rope": dict(position="rope"), "swiglu": dict(mlp="swiglu")}
    found = names(base, arms=changes | {"muon": dict(optimizer="muon")})
    for arm in found.values():
        checks.check_arm(arm, base)
    root = tmp_path_factory.mktemp("code")
    for room in ("common", "parts", "tokens", "training"):
        shutil.copytree(ROOT / room, root / room, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.py"):
        shutil.copy(path, root / path.name)

    def hashes():
        identity.definitions_below.cache_clear()
        identity.hash_of_words.cache_clear()
        hash_of = lambda arm: identity.code_hash(arm.values | {"vocab_size": 29}, root)
        return {name: hash_of(arm) for name, arm in found.items()}

    def change(file, old, new):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, (file, old)
        (root / file).write_text(text.replace(old, new), encoding="utf-8")
        after = hashes()
        (root / file).write_text(text, encoding="utf-8")
        return {name for name in before if before[name] != after[name]}

    before = hashes()
    change.arms = found.keys()
    change.same = before["base"] == before["base again"]
    return change


def test_a_message_a_comment_or_a_new_word_leaves_all_rows_fresh(changed):
    assert changed.same
    for file, old, new in (
        ("train.py", '    """Take one optimizer step', '    """Take an optimizer step'),
        ("train.py", "gradient norm {norm:.4g} {where}", "its norm {norm:.4g} {where}"),
        ("tokens/token_files.py", "process prepares this dataset: w", "dataset: w"),
        ("parts/norm.py", '"dyt": DyT,', '"dyt": DyT,\n    "mine": DyT,'),
        # A word that only other runs name.
        ("training/optim.py", '"constant": lambda t: 1.0', '"constant": lambda t: 2.0'),
    ):
        assert not changed(file, old, new), new
    last, added = '"none": NoMLP,\n}', 'MLP["{}"] = PlainMLP.of(SO, relu, relu)'
    mish = added.format("mish") + "\n\n\nclass Mish(PlainMLP):\n    pass\n"
    assert not changed("parts/mlp.py", last, f"{last}\n{mish}")
    assert changed("parts/mlp.py", last, f"{last}\n{added.format('swiglu')}") == {"swiglu"}


@pytest.mark.parametrize(
    "file, old, new, stale",
    [
        ("training/optim.py", "0.5 * (1 + math.cos", "0.4 * (1 + math.cos", None),
        ("train.py", "EVAL_TRAIN_TOKENS = 32768", "EVAL_TRAIN_TOKENS = 1", None),
        ("tokens/batches.py", "default_rng([self.seed, epoch])", "default_rng(epoch)", None),
        ("parts/part.py", "STD = 0.02", "STD = 0.03", None),
        ("model.py", "F.layer_norm(x", "F.layer_norm(2 * x", None),
        ("training/optim.py", 'alpha=-group["lr"] * 0.2', 'alpha=-group["lr"] * 0.3', {"muon"}),
        ("parts/position.py", "turned_width(D) if D", "turned_width(2 * D) if D", {"rope"}),
    ],
)
def test_a_formula_makes_those_rows_stale_that_reach_it(changed, file, old, new, stale):
    """In the schedule, the evaluation, the order of the data, the first weights, a part."""
    assert changed(file, old, new) >= (stale or changed.arms)
    if stale:
        assert "base" not in changed(file, old, new)


def test_the_machine_is_part_of_the_configuration(planned, monkeypatch):
    hashes = lambda *more: planned("--axis=norm", "--match=none", *more).arms["base"].config_hash
    monkeypatch.setattr(sweep, "check_changes_output", lambda *args: None)
    assert hashes() == hashes("--dtype=float32") == hashes("--log_interval=7")
    assert hashes() != hashes("--dtype=bfloat16")
    assert hashes("--workers=1") != hashes("--workers=64")  # threads of each
    assert hashes() != hashes("--min_lr=0") != hashes("--min_lr=1e-4")
    before = hashes()
    monkeypatch.setattr(sweep, "versions", lambda: {"torch": "9.9.1+cpu", "hardware": "x"})
    other = hashes()
    monkeypatch.setattr(sweep, "versions", lambda: {"torch": "9.9.1+cu130", "hardware": "y"})
    assert before != other == hashes()
