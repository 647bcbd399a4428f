"""The arms that a design enumerates: from the dictionaries, as cells of a factorial, at sizes."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import ablate
from bench.ablation import arms, designs, settings
from common.configurator import build
from common.errors import UserError
from common.files import ROOT
from helpers.ablation import arguments, rows_of
from helpers.ablation import arm as arms_key
from parts import costs
from parts.architectures import ARCH
from parts.variant import POSITION

SWEEPS = [path for path in (ROOT / "config").rglob("*.py") if "bench/ablate.py" in path.read_text()]
DIFFER = {key for key in ARCH["gpt2"] if ARCH["gpt2"][key] != ARCH["llama"][key]}
FACTORS = ["position", "norm", "mlp", "bias", "tie_embeddings"]
SIZES = "--sizes={'a':{'n_embd':16},'b':{'n_embd':32},'c':{'n_embd':64,'learning_rate':5e-4}}"


def names(base=None, **config):
    """{name: Arm} of a configuration of the sweep."""
    base = {"model": "gpt2"} | (base or {})
    made = designs.enumerate_arms(build(settings.AblateConfig, config), base)
    return {arm.name: arm for arm in made}


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
    # The base has that already.
    assert "bias=none" not in names({"bias": False}, design="leave_one_in")
    words = {arm.changes["position"] for arm in names(axis="position").values() if arm.changes}
    assert words == set(POSITION) - {"learned"}
    sparse = {"mixtral", "gpt-oss", "deepseek-v3", "qwen3-next", "mamba2"}
    assert set(names(design="archs")) - {"base", "base again"} == set(ARCH) - {"gpt2"} - sparse
    assert not any("none" in name for name in names(axis="mlp"))
    assert set(names(axis="optimizer")) == {"base", "optimizer=muon", "base again"}
    mixed = names(design="leave_one_in,axis", axis="block", arms={"wide": dict(mlp_width=64)})
    assert {"rope", "sandwich", "wide"} <= set(mixed)


def test_ladder_goes_from_one_corner_to_the_other():
    order = ["norm", "position", "mlp", "tie_embeddings", "bias", "gqa"]
    by_hand = {"gqa": dict(n_kv_head=1)}
    *rungs, _ = names(design="ladder", order=order, arms=by_hand).values()
    assert [arm.name for arm in rungs] == [
        *("base", "+rmsnorm", "+rope", "+swiglu", "+tie_embeddings=False", "+bias=none", "+gqa")
    ]
    assert [arm.against for arm in rungs[1:]] == [arm.name for arm in rungs[:-1]]
    sizes = {"model": "gpt2", "n_head": 2, "n_embd": 32}
    llama = settings.variant_config(sizes | {"model": "llama"})
    assert settings.variant_config(arms.with_changes(sizes, rungs[-2].changes)) == llama
    assert rungs[-1].changes == rungs[-2].changes | {"n_kv_head": 1}


@pytest.mark.parametrize("path", sorted(SWEEPS), ids=lambda path: path.stem)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_shipped_sweep_is_valid(path, device):
    """Its arms are accepted and matched, on a CPU and for a GPU (read as on a login node, which has
    none)."""
    config, base = settings.read([str(path), f"--device={device}", "--emit=slurm"], "")
    made = {arm.name: arm for arm in designs.enumerate_arms(config, base)}
    for arm in made.values():
        arms.check_arm(arm, base)
        arms.match_arm(arm, made["base"], config.match, 65)
    assert len(made) >= 5
    assert config.question != settings.AblateConfig.question
    assert config.out_dir != settings.AblateConfig.out_dir


# ---------------------------------------------------------------- factorial


def cells(base=None, **given):
    return list(names(base, **{"design": "factorial", "factors": FACTORS} | given).values())


@pytest.mark.parametrize("factors, size", enumerate((4, 8, 16, 16, 32, 64, 64, 128, 128), 2))
def test_a_fraction_is_balanced_and_has_resolution_five_and_the_base(factors, size):
    """Sizes by Box, Hunter and Hunter's table. Each product of up to four columns is balanced."""
    design = designs.fraction(factors)
    assert (design[0] == -1).all() and len(np.unique(design, axis=0)) == len(design) == size
    for number in range(1, min(4, factors) + 1):
        for columns in itertools.combinations(range(factors), number):
            assert design[:, columns].prod(1).sum() == 0


def test_cells_are_arms_whose_changes_are_their_high_levels():
    made = cells()
    assert len(made) == 16 and made[0].name == "base" and not made[0].changes
    assert {arm.against for arm in made[1:]} == {None} and made[0].against == "base"
    llama = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": "none"}
    llama["tie_embeddings"] = False
    for arm in made:
        assert arm.changes == {name: llama[name] for name, level in arm.cell.items() if level}
    assert "rope+rmsnorm+swiglu+no bias" in {arm.name for arm in made}
    assert len({arm.name for arm in made}) == 16


def test_anything_can_be_a_factor():
    muon = {"muon": [dict(optimizer="adamw"), dict(optimizer="muon", learning_rate=1e-2)]}
    made = cells({"learning_rate": 3e-3}, factors=["norm", muon])
    assert [arm.name for arm in made] == ["base", "muon", "rmsnorm", "rmsnorm+muon"]
    both = {"norm": "rmsnorm", "optimizer": "muon", "learning_rate": 1e-2}
    assert made[-1].changes == both and made[-1].cell == {"norm": 1, "muon": 1}
    # From LLaMA's corner the low level is LLaMA's word.
    assert cells({"model": "llama"}, factors=["norm", "mlp"])[1].changes == {"mlp": "gelu"}


@pytest.mark.parametrize(
    "given, wanted",
    [
        (dict(factors=["norm"]), "1 factors"),
        (dict(factors=["norm", "block"]), "block has no level of GPT-2 and of LLaMA"),
        (dict(factors={"a": dict(norm="rmsnorm"), "b": []}), "two levels .factors: 'a'"),
        (
            dict(factors=["norm", {"muon": [dict(optimizer="muon"), dict(optimizer="adamw")]}]),
            "low level optimizer=muon of muon is not the base's adamw",
        ),
        (
            dict(factors=["norm", {"other": [{}, dict(norm="none")]}]),
            "norm and other both change norm",
        ),
        (dict(design="factorial,axis", axis="norm"), "factorial stands alone"),
        (dict(arms={"x": dict(n_layer=1)}), "factorial makes all arms itself"),
    ],
)
def test_a_factorial_that_cannot_be_is_refused(given, wanted):
    with pytest.raises(UserError, match=wanted):
        cells(**given)


def test_a_factorial_runs_each_cell_with_every_seed(data_dir, tmp_path, quick, stub):
    """Without a second copy of the base, and with an equal number of runs of each cell."""
    given = ["--design=factorial", "--factors=['norm','mlp']", "--seeds=2"]
    out = tmp_path / "out"
    ablate.main(arguments(data_dir, out, *given), stub)
    runs = sorted((arm, seed) for arm, seed, *_ in rows_of(out))
    cells = ["base", "rmsnorm", "rmsnorm+swiglu", "swiglu"]
    assert runs == [(name, seed) for name in cells for seed in range(2)]


# ---------------------------------------------------------------- scale


def sizes_of(*argv):
    return designs.sizes_of([*argv], "", lambda base: 17)


def test_tokens_are_in_proportion_to_parameters(data_dir, tmp_path):
    rms = arms_key(rms={"norm": "rmsnorm"})
    argv = arguments(data_dir, tmp_path / "out", rms, SIZES, "--max_iters=40", "--design=scale")
    commands = sizes_of(*argv)
    assert list(commands) == ["a", "b", "c"]
    sweeps = {name: ablate.Sweep(words, "") for name, words in commands.items()}
    bases = {name: sweep.arms["base"].values for name, sweep in sweeps.items()}
    parameters = {
        name: costs.parameters(settings.variant_config(base, 17)) for name, base in bases.items()
    }
    for name, base in bases.items():
        assert base["max_iters"] == round(40 * parameters[name] / parameters["a"])
        assert sweeps[name].arms["rms"].values["n_embd"] == base["n_embd"]
        assert sweeps[name].out == tmp_path / "out" / name
    assert bases["c"]["learning_rate"] == 5e-4
    words = sizes_of(*argv, SIZES.replace("'n_embd':32", "'n_embd':32,'max_iters':7"))["b"]
    assert ablate.Sweep(words, "").arms["base"].values["max_iters"] == 7


@pytest.mark.parametrize(
    "words, wanted",
    [
        (["--sizes={'a':{'n_embd':16}}"], "scale needs sizes"),
        (["--sizes={'a':1,'b':2,'c':3}"], "scale needs sizes"),
        ([SIZES, "--budget=1h"], "neither budget nor emit"),
    ],
)
def test_a_scale_that_cannot_be_is_refused(data_dir, tmp_path, words, wanted):
    with pytest.raises(UserError, match=wanted):
        sizes_of(*arguments(data_dir, tmp_path, "--axis=norm", "--design=scale", *words))


def test_a_scale_runs_the_sweep_of_each_size(data_dir, tmp_path, quick, stub):
    out = tmp_path / "out"
    rms = arms_key(rms={"norm": "rmsnorm"})
    given = [rms, SIZES, "--design=scale", "--seeds=1", "--screening"]
    assert ablate.main(arguments(data_dir, out, *given), stub) == 0
    for size in "abc":
        assert {name[0] for name in rows_of(Path(out) / size)} == {"base", "rms", "base again"}
    assert json.loads((out / "scale.json").read_text()) == {"sizes": ["a", "b", "c"]}
