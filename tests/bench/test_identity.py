"""The identity of a row: what makes the code of an arm another one, and what leaves it the same."""

import copy
import importlib
import json
import math
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import train
from bench.ablation import fingerprint, identity, plans, sweep
from common.commands import ROOT
from common.errors import UserError
from tokens import batches
from training import evaluation, optim

SHELVES = ROOT / "bench" / "results" / "answer"
FOLDERS = sorted(path.parent for path in SHELVES.rglob("sweep.json"))
# An arm trained by Muon and AdamW, and one by AdamW alone.
ARMS = {"muon": ("llama/small", "base"), "adamw": ("llama/small", "adamw")}


def line_of(folder, arm):
    return next(line for line in identity.stored(SHELVES / folder) if line["arm"] == arm)


def changed(folder, arm):
    """How today's code of an arm differs from the stored one."""
    fingerprint.after_steps.cache_clear()
    try:
        return fingerprint.check(line_of(folder, arm), with_form=False)
    finally:
        fingerprint.after_steps.cache_clear()


@pytest.mark.parametrize("folder, arm", ARMS.values())
def test_the_code_of_stored_rows_is_the_same(folder, arm):
    assert changed(folder, arm) == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(SHELVES)))
def test_the_code_of_all_stored_rows_is_the_same(folder, capsys):
    assert fingerprint.main([str(folder)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(SHELVES)))
def test_the_configurations_of_stored_rows_are_the_same(folder):
    plan, lines = plans.plan(folder), identity.stored(folder)
    assert {line["arm"] for line in lines} >= plan["arms"].keys()
    machine = {"torch": plan["versions"]["torch"].partition("+")[0]}
    if plan["base_values"]["device"] == "cpu":
        machine["threads"] = json.loads((folder / "costs.jsonl").open().readline())["threads"]
    for line in lines:
        hashed = identity.configuration(line["values"]) | machine
        facts = plan["arms"][line["arm"]]
        assert identity.digest([hashed, plan["data"]["fingerprint"]]) == facts["config_hash"]
        assert line["id"] == facts["code_hash"]


def other_decay(monkeypatch):
    real = optim.parameter_groups
    other = lambda model, decay, *taken: real(model, 0.8 * decay, *taken)
    monkeypatch.setattr(optim, "parameter_groups", other)


def no_clipping(monkeypatch):
    real = torch.nn.utils.clip_grad_norm_
    unbound = lambda parameters, bound: real(parameters, math.inf)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", unbound)


def other_config(**changes):
    """Make the optimizers with values that the run does not have."""

    def change(monkeypatch):
        real = train.make_optimizers
        make = lambda model, config, runtime: real(model, replace(config, **changes), runtime)
        monkeypatch.setattr(train, "make_optimizers", make)

    return change


def other_weights(monkeypatch):
    real = train.make

    def make(config):
        model = real(config)
        with torch.no_grad():
            model.lm_head.weight *= 1.01
        return model

    monkeypatch.setattr(train, "make", make)


def other_order(monkeypatch):
    real = batches.Batches.epoch_starts
    backwards = lambda self, epoch: real(self, epoch)[::-1]
    monkeypatch.setattr(batches.Batches, "epoch_starts", backwards)


def other_end(monkeypatch):
    """The schedule ends a step later, in runs of more steps than the fingerprint takes."""
    real = optim.learning_rate
    steps = lambda config: config.max_iters + (config.max_iters > 100)
    later = lambda step, config: real(step, replace(config, max_iters=steps(config)))
    for module in (optim, train, fingerprint):
        monkeypatch.setattr(module, "learning_rate", later)


def other_mean(monkeypatch):
    """An evaluation weights its batches and not its targets equally."""
    of_batches = lambda sums: (sums[:, 0] / sums[:, 1]).mean().item()
    monkeypatch.setattr(evaluation, "mean_loss", of_batches)


def other_windows(monkeypatch):
    """An evaluation takes the first windows of a split."""
    real = batches.Text.eval_windows

    def first(self, limit=None):
        starts, targets = real(self, limit)
        return self.block_size * np.arange(len(starts)), targets

    monkeypatch.setattr(batches.Text, "eval_windows", first)


@pytest.mark.parametrize(
    "change, arm, shown",
    [
        pytest.param(other_decay, "muon", {"norms"}, marks=pytest.mark.slow),
        (other_decay, "adamw", {"norms"}),
        (no_clipping, "muon", {"clipped"}),
        pytest.param(other_config(beta1=0.91), "muon", {"norms", "loss"}, marks=pytest.mark.slow),
        pytest.param(other_config(beta2=0.951), "adamw", {"norms"}, marks=pytest.mark.slow),
        (other_weights, "muon", {"norms", "gradient"}),
        (other_order, "adamw", {"loss", "samples"}),
        (other_end, "adamw", {"learning"}),
        (other_mean, "muon", {"evaluation"}),
        pytest.param(other_windows, "adamw", {"evaluation", "scored"}, marks=pytest.mark.slow),
    ],
)
def test_changed_code_makes_rows_stale(monkeypatch, change, arm, shown):
    change(monkeypatch)
    assert {text.split()[0] for text in changed(*ARMS[arm])} >= shown


@pytest.fixture
def imported_anew():
    """What is imported in the test is forgotten after it, and our modules before it."""
    before = dict(sys.modules)
    for name, module in before.items():
        path = str(getattr(module, "__file__", ""))
        if path.startswith(str(ROOT)) and "site-packages" not in path:  # .venv lies in the repo
            del sys.modules[name]
    yield
    sys.modules.clear()
    sys.modules.update(before)


def test_renamed_and_rewritten_code_leaves_rows_fresh(tmp_path, monkeypatch, capsys, imported_anew):
    """In a copy of the code, whose arm's stored fingerprint is checked by the command."""
    for room in ("bench/ablation", "common", "parts", "tokens", "training"):
        shutil.copytree(ROOT / room, tmp_path / room)
    shutil.copytree(ROOT / "weights", tmp_path / "weights")
    for path in [*ROOT.glob("*.py"), *ROOT.glob("bench/*.py")]:
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    for file, old, new in (
        ("train.py", "update_weights", "with_new_weights"),  # a function
        ("training/optim.py", "orthogonal", "made_orthogonal"),
        ("train.py", "gradient norm {norm:.4g} {where}", "its norm {norm:.4g} {where}"),
        ("tokens/token_files.py", "the token file holds", "this file holds"),
    ):
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new), encoding="utf-8")
    (tmp_path / "out").mkdir()
    line = line_of(*ARMS["muon"])
    identity.store(tmp_path / "out", [line])

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    copied = importlib.import_module("bench.ablation.fingerprint")
    assert copied.__file__ == str(tmp_path / "bench/ablation/fingerprint.py")
    assert copied.main(["out"]) == 0 and capsys.readouterr().out == "out: base: fresh\n"
    assert hasattr(sys.modules["train"], "with_new_weights")


def test_rounding_and_other_names_are_no_difference():
    old = line_of("gpt2/small", "base")["numbers"]
    new = copy.deepcopy(old)
    new["norms"] = {
        f"net.{name}": [x * (1 + 5e-5) for x in norms] for name, norms in old["norms"].items()
    }
    new["loss"] = [x + 5e-5 for x in old["loss"]]
    assert identity.differences(old, new) == []
    new["loss"][7] += 1e-3
    new["norms"].popitem()
    assert [text.split()[0] for text in identity.differences(old, new)] == ["loss", "norms"]
    new = copy.deepcopy(old) | {"loss": [*old["loss"][:7], "nan"]}
    assert len(identity.differences(old, new)) == 1 and not identity.differences(new, new)
    # The bias of the keys has no effect, so that its gradient is rounding.
    new = copy.deepcopy(old)
    new["norms"]["blocks.0.attn.wk.bias"] = [1.0, 1e-9, 1e-18]
    assert identity.differences(old, new) == []


def test_a_moment_differs_more_between_two_kinds_of_cpu():
    old = line_of("gpt2/small", "base")["numbers"]
    new = copy.deepcopy(old)
    new["norms"]["wte.weight"][1] *= 1.002
    assert identity.differences(old, new) == []
    new["norms"]["wte.weight"][1] *= 1.02
    (text,) = identity.differences(old, new)
    assert text.startswith("norms wte.weight, moment 1")
    new = copy.deepcopy(old)
    new["norms"]["wte.weight"][0] *= 1.002  # the weights themselves do not
    assert len(identity.differences(old, new)) == 1


def test_a_number_may_differ_as_far_as_rounding_moves_it():
    old = line_of("llama/small", "adamw")["numbers"]
    new = copy.deepcopy(old)
    new["gradient norm"][6] *= 1.0006
    twin = copy.deepcopy(new)
    twin["gradient norm"][6] *= 1.0002
    assert identity.differences(old, new, twins=[new, new]) == identity.differences(old, new) != []
    assert identity.differences(old, new, twins=[new, twin]) == []
    new["gradient norm"][5] *= 1.0006  # where the twins agree
    twin["gradient norm"][5] = new["gradient norm"][5]
    assert identity.differences(old, new, twins=[twin])[0].startswith("gradient norm of step 5")
    new = copy.deepcopy(old)
    new["gradient norm"][6] *= 1.006  # too far for any twins
    assert len(identity.differences(old, new, twins=[twin | {"gradient norm": [9.0] * 8}])) == 1


def test_twins_start_from_weights_that_differ_in_the_last_bit():
    values = line_of(*ARMS["adamw"])["values"] | {"n_layer": 1, "n_embd": 16, "n_head": 1}
    numbers = fingerprint.compute(values)
    twins = fingerprint.twins(values)
    assert len({json.dumps(twin["loss"] + twin["gradient norm"]) for twin in twins}) > 1
    for twin in twins:
        assert twin["norms"] != numbers["norms"]
        assert identity.differences(twin, numbers) == []
    # They excuse a difference of the size of rounding when rows are recognised, and no other.
    line = identity.line_of("base", values, "text", numbers)
    known = identity.by_configuration([line])
    for factor, same in ((1.0003, True), (1.01, False)):
        new = copy.deepcopy(line)
        new["numbers"]["gradient norm"][3] *= factor
        other = copy.deepcopy(new["numbers"])
        other["gradient norm"][3] *= 1.0001
        _, changed = identity.recognise(known, new, lambda *_: [other])
        assert (changed == []) == same
        assert identity.recognise(known, new)[1]


def test_an_arm_takes_the_id_of_the_fingerprint_that_agrees(planned, monkeypatch, capsys):
    monkeypatch.setattr(fingerprint, "compute", lambda values, kind: {"loss": [number]})
    ids = []
    for number in (1.0, 1.00001, 2.0, 1.0):
        made = planned("--axis=norm", "--match=none")
        ids.append([arm.code_hash for arm in made.arms.values()])
        made.open([])
        made.lock.close()
        assert ("code of rmsnorm" in capsys.readouterr().out) == (number == 2.0)
    first, again, other, back = ids
    assert first == again == back and not {*first} & {*other}
    assert first[0] == first[-1] != first[1]  # the base again is the base
    assert len(identity.stored(made.out)) == 2 * len(first)


def test_pairs_have_fingerprints():
    values = line_of("gpt2/small", "base")["values"] | {"n_layer": 1, "n_embd": 16, "n_head": 1}
    of_pairs = fingerprint.compute(values, "pairs")
    assert of_pairs["scored"] != fingerprint.compute(values)["scored"]
    assert fingerprint.compute(values, "pairs") == of_pairs


def test_a_check_of_the_form_compares_and_stores_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fingerprint, "compute", lambda values, kind: {"loss": [1.0]})
    monkeypatch.setattr(fingerprint, "compute_in_form", lambda values, kind: {"loss": [2.0]})
    values = line_of(*ARMS["muon"])["values"] | {"compile": True}
    lines = []
    for number, form in enumerate((None, 2.0, 3.0)):
        own = values | {"max_iters": 900 + number}
        line = identity.line_of(f"arm {number}", own, "text", {"loss": [1.0]})
        lines.append(line | ({"form": {"loss": [form]}} if form else {}))
    identity.store(tmp_path, lines)
    before = (tmp_path / identity.NAME).read_bytes()
    assert fingerprint.main([str(tmp_path), "--form"]) == 1
    assert [": fresh" in line for line in capsys.readouterr().out.splitlines()] == [
        True,
        True,
        False,
    ]
    assert (tmp_path / identity.NAME).read_bytes() == before


def test_a_check_of_no_folder_or_of_one_without_fingerprints_is_a_mistake(tmp_path):
    for argv, words in ((["--form"], "name folders"), ([str(tmp_path)], "fingerprints")):
        with pytest.raises(UserError, match=words):
            fingerprint.main(argv)


def test_the_machine_is_part_of_the_configuration(planned, monkeypatch):
    hashes = lambda *more: planned("--axis=norm", "--match=none", *more).arms["base"].config_hash
    assert hashes() == hashes("--dtype=float32") == hashes("--log_interval=7")
    assert hashes() != hashes("--dtype=bfloat16")
    assert hashes("--workers=1") != hashes("--workers=64")  # threads of each
    assert hashes() != hashes("--min_lr=0") != hashes("--min_lr=1e-4")
    before = hashes()
    monkeypatch.setattr(sweep, "versions", lambda _: {"torch": "9.9.1+cpu", "hardware": "x"})
    other = hashes()
    monkeypatch.setattr(sweep, "versions", lambda _: {"torch": "9.9.1+cu130", "hardware": "y"})
    assert before != other == hashes()
