"""The arms that a design enumerates from the dictionaries, and the columns of a sweep."""

from collections import Counter

import pytest

import ablate
from bench.ablation import checks, plans, schedule, settings
from bench.ablation.arms import list_arms
from common.commands import ROOT
from common.configurator import from_text, keys
from common.errors import UserError
from helpers.ablation import arguments, names, read_sweep, rows_of
from parts.architectures import ARCH, configure
from parts.variant import POSITION

SWEEPS = [path for path in (ROOT / "config").rglob("*.py") if "bench/ablate.py" in path.read_text()]
ONE_SETTING = [path for path in sorted(SWEEPS) if path.name != "settings.py"]
DIFFER = {key for key in ARCH["gpt2"] if ARCH["gpt2"][key] != ARCH["llama"][key]}


@pytest.mark.parametrize(
    "design, corner, other", [("leave_one_in", "gpt2", "llama"), ("leave_one_out", "llama", "gpt2")]
)
def test_leaving_one_out_takes_every_part_in_which_the_corners_differ(design, corner, other):
    made = names({"model": corner}, design=design)
    assert list(made)[0] == "base" and list(made)[-1] == "base again"
    changes = [change for arm in made.values() for change in arm.changes.items()]
    assert {key for key, _ in changes} == DIFFER
    assert all(ARCH[other][key] == value for key, value in changes)


def test_designs_come_from_the_dictionaries():
    for chosen in (dict(design="leave_one_in"), dict(axis="bias")):  # the base has that already
        assert "bias=none" not in names({"bias": False}, **chosen)
    stretched = ARCH["llama"] | dict(model="llama", rope_scaling="linear", rope_factor=8.0)
    stretchings = names(stretched, axis="rope_scaling")
    configure(stretched | stretchings.pop("rope_scaling=none").changes)
    values = [stretched | arm.changes for arm in stretchings.values()]
    assert {configure(v, as_variant=True).rope_factor for v in values} == {8.0}
    words = {arm.changes["position"] for arm in names(axis="position").values() if arm.changes}
    assert words == set(POSITION) - {"learned"}
    assert not any("none" in name for name in names(axis="mlp"))
    assert set(names(axis="optimizer")) == {"base", "optimizer=muon", "base again"}
    mixed = names(design="leave_one_in,axis", axis="block", arms={"wide": dict(mlp_width=64)})
    assert {"rope", "sandwich", "wide"} <= set(mixed)


def test_the_curve_has_its_own_whole_schedule():
    base = {"max_iters": 100, "lr_decay_iters": 80, "warmup_iters": 50}
    half = names(base, axis="norm", curve=[0.5])["base x0.5"].changes
    assert half == {"max_iters": 50, "lr_decay_iters": 40, "warmup_iters": 25}


def test_a_control_group_is_never_smaller_than_its_rule():
    asked = (None, 3, 21)  # of 4 arms with 8 seeds: 16, and 10 at least
    assert [plans.control_runs(4, 8, both) for both in asked] == [(8, 8), (5, 5), (11, 10)]


def test_ladder_goes_from_one_corner_to_the_other():
    *rungs, _ = names(design="ladder").values()
    assert [arm.against for arm in rungs[1:]] == [arm.name for arm in rungs[:-1]]
    sizes = {"n_head": 2, "n_embd": 32}
    last = checks.with_changes({"model": "gpt2"} | sizes, rungs[-1].changes)
    llama = configure({"model": "llama"} | sizes, as_variant=True)
    assert configure(last, as_variant=True) == llama


def test_the_rungs_of_a_ladder_are_the_arms_given():
    steps = {"rms": dict(norm="rmsnorm"), "rope": dict(position="rope"), "gqa": dict(n_kv_head=1)}
    *rungs, _ = names(design="ladder", arms=steps).values()
    against = [("+rms", "base"), ("+rope", "+rms"), ("+gqa", "+rope")]
    assert [(arm.name, arm.against) for arm in rungs[1:]] == against
    assert rungs[-1].changes == {"norm": "rmsnorm", "position": "rope", "n_kv_head": 1}


@pytest.mark.parametrize("path", ONE_SETTING, ids=lambda path: path.stem)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_shipped_sweep_is_valid(path, device):
    """Its arms are accepted and matched, in each column, on a CPU and (a login node) for a GPU."""
    shelf = {"tune": "gpt2.py", "recipe": "llama.py"}.get(path.stem.split("_")[0], path.name)
    argv = [str(path.with_name(shelf)), str(path), f"--device={device}"]
    for column in ["", *(read_sweep(argv)[0].also or {})]:
        config, base = read_sweep([*argv, f"--also={column}"])
        made = {arm.name: arm for arm in list_arms(config, base)}
        for arm in made.values():
            checks.check_arm(arm, base)
            checks.match_arm(arm, made["base"], config.match, 65)
        assert len(made) >= (3 if column.startswith("confirm") else 4 + (not column))
        assert config.question != settings.AblateConfig.question
        assert config.out_dir != settings.AblateConfig.out_dir


ARMS = {"rope": {"position": "rope"}, "rms": {"norm": "rmsnorm"}}


def shelf(data_dir, folder, **also):
    """The command line of a sweep whose config file states everything, also these columns."""
    lines = [arg.removeprefix("--").partition("=") for arg in arguments(data_dir, folder / "out")]
    given = {key: from_text(text, keys(*settings.ALL)[key]) for key, _, text in lines}
    given |= {"arms": ARMS, "also": also, "seeds": 2, "lr_grid": [1, 2], "learning_rate": 5e-4}
    (folder / "shelf.py").write_text("".join(f"{key} = {given[key]!r}\n" for key in given))
    return [str(folder / "shelf.py")]


def test_a_column_has_the_same_arms_elsewhere_at_the_rates_of_its_sweep(
    data_dir, tmp_path, out, quick, stub, monkeypatch
):
    monkeypatch.setattr(schedule, "TUNE_SEEDS", 1)
    small = dict(n_embd=16, seeds=3, arms=["rope"], lr_grid=[1])
    argv = shelf(data_dir, tmp_path, small=small, deep=dict(n_layer=3))
    with pytest.raises(UserError, match="no rate .* for base, rope, .*run the sweep without"):
        ablate.main([*argv, "--also=small"], stub)
    assert ablate.main(argv, stub) == 0 and not (out / "small").exists()
    assert ablate.main([*argv, "--also=small"], stub) == 0

    columns = settings.read([*argv, "--also=small,deep"], "")
    assert [made.config.out_dir for made in columns] == [str(out / "small"), str(out / "deep")]
    assert [made.arguments[-1] for made in columns] == ["--also=small", "--also=deep"]
    assert columns[1].base["n_layer"] == 3

    plan = plans.plan(out / "small")
    assert plan["also"] == "small" and plan["base_values"]["n_embd"] == 16
    assert plan["chosen_lr"] == {"base": 2, "rope": 4, "base again": 2}
    assert "--also=small" in plan["command"]
    runs = [(arm, lr) for arm, _, lr, _ in rows_of(out / "small")]
    assert Counter(runs) == {("rope", 4): 3, ("base", 2): 3, ("base again", 2): 2}
    # The command line wins over the column.
    config, base = read_sweep([*argv, "--also=small", "--seeds=7", "--n_embd=64"])
    assert (config.seeds, base["n_embd"], base["n_layer"]) == (7, 64, 2)


def test_a_column_on_another_text_drops_the_prompt(data_dir, tmp_path):
    own = dict(prompt="so", question="Why?", arms={"alibi": {"position": "alibi"}})
    argv = shelf(data_dir, tmp_path, b={"dataset": "b"}, c={"dataset": "c"} | own)
    config, base = read_sweep([*argv, "--prompt=the", "--also=b"])
    assert (config.prompt, base["dataset"]) == ("", "b") and config.question.endswith("? (b)")
    config, base = read_sweep([*argv, "--also=c"])
    assert {key: getattr(config, key) for key in own} == own


@pytest.mark.parametrize(
    "column, wanted",
    [
        (None, r"no column x .also=x.: choose from y"),
        (dict(n_emd=16), r"unknown key n_emd .also: x.: did you mean n_embd"),
        (dict(n_embd="wide"), r"n_embd must be int"),
        (dict(arms=["swiglu"]), r"no arm swiglu .also: x.: choose from rope, rms"),
    ],
)
def test_a_column_that_cannot_be_is_refused(data_dir, tmp_path, column, wanted):
    argv = shelf(data_dir, tmp_path, y={}, **({} if column is None else {"x": column}))
    with pytest.raises(UserError, match=wanted):
        read_sweep([*argv, "--also=x"])
