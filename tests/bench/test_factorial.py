"""Factorial designs: their cells, and what they mix."""

from itertools import combinations

import numpy as np
import pytest

import ablate
from bench.ablation import arms, designs, factorial, settings
from common.configurator import build
from common.errors import UserError
from helpers.ablation import arguments
from parts import costs

FACTORS = ["position", "norm", "mlp", "bias", "tie_embeddings"]


def cells(resolution=5, base=None, **given):
    config = build(
        settings.AblateConfig,
        {"design": "factorial", "factors": FACTORS, "resolution": resolution} | given,
    )
    return designs.enumerate_arms(config, {"model": "gpt2"} | (base or {}))


# ---------------------------------------------------------------- cells


@pytest.mark.parametrize("factors", range(2, 9))
@pytest.mark.parametrize("resolution", [3, 4, 5, "full"])
def test_a_fraction_is_balanced_and_has_the_resolution_and_the_base(factors, resolution):
    design = factorial.fraction(factors, resolution)
    assert (design[0] == -1).all()
    assert len(np.unique(design, axis=0)) == len(design)
    assert (design.sum(0) == 0).all()
    assert factorial.resolution_of(design) >= min(
        factors + 1, 99 if resolution == "full" else resolution
    )
    # The smallest of Box, Hunter and Hunter's table, except for 7 factors at resolution 3: 8 there.
    known = {
        3: (4, 4, 8, 8, 8, 16, 16),
        4: (4, 8, 8, 16, 16, 16, 16),
        5: (4, 8, 16, 16, 32, 64, 64),
    }
    assert len(design) == known.get(resolution, 2 ** np.arange(2, 9))[factors - 2]


def test_the_resolution_is_that_of_the_relation():
    """The library's own fraction of 7 factors, asked for at resolution 5, has 4: it is checked."""
    full = np.array(np.meshgrid(*[[-1, 1]] * 4)).reshape(4, -1).T
    assert factorial.resolution_of(full) == 5
    assert factorial.resolution_of(np.c_[full, full[:, :3].prod(1)]) == 4
    assert factorial.resolution_of(np.c_[full, -full[:, :2].prod(1)]) == 3
    assert factorial.resolution_of(factorial.pyDOE3.fracfact_by_res(7, 5)) == 4


def test_cells_are_arms_whose_changes_are_their_high_levels():
    found = cells()
    assert len(found) == 16 and found[0].name == "base" and not found[0].changes
    assert {arm.against for arm in found[1:]} == {None} and found[0].against == "base"
    llama = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": "none"}
    llama["tie_embeddings"] = False
    for arm in found:
        assert arm.changes == {name: llama[name] for name, level in arm.cell.items() if level}
    assert "rope+rmsnorm+swiglu+no bias" in {arm.name for arm in found}
    assert len({arm.name for arm in found}) == 16


def test_every_cell_is_a_valid_model_of_the_base_s_size(data_dir, tmp_path):
    _, base = settings.read(arguments(data_dir, tmp_path, "--n_embd=64", "--n_head=4"), "")
    found = cells("full", base)
    assert len(found) == 32
    for arm in found:
        arms.check_arm(arm, base)
        arms.match_arm(arm, found[0], "params", 29)
        excess = costs.parameters(settings.variant_config(arm.values, 29)) / costs.parameters(
            settings.variant_config(base, 29)
        )
        assert abs(excess - 1) <= 0.005, arm.name


def test_anything_can_be_a_factor():
    muon = {"muon": [dict(optimizer="adamw"), dict(optimizer="muon", learning_rate=1e-2)]}
    found = cells(factors=["norm", muon], base={"learning_rate": 3e-3})
    assert [arm.name for arm in found] == ["base", "muon", "rmsnorm", "rmsnorm+muon"]
    both = {"norm": "rmsnorm", "optimizer": "muon", "learning_rate": 1e-2}
    assert found[-1].changes == both and found[-1].cell == {"norm": 1, "muon": 1}
    # From LLaMA's corner the low level is LLaMA's word.
    assert cells(factors=["norm", "mlp"], base={"model": "llama"})[1].changes == {"mlp": "gelu"}


@pytest.mark.parametrize(
    "given, wanted",
    [
        (dict(factors=["norm"]), "1 factors"),
        (dict(factors=["norm", "block"]), "block has no level of GPT-2 and of LLaMA"),
        (dict(factors=["norm", "width"]), "width has no level"),
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


# ---------------------------------------------------------------- what is mixed


def test_every_alias_is_a_contrast_that_equals_another():
    """Against products of columns, with their signs, at resolutions 3 to 5."""
    muon = {"muon": [{}, dict(optimizer="muon")]}
    for resolution, factors in ((3, FACTORS), (4, [*FACTORS, muon]), (5, FACTORS)):
        made = [arm.cell for arm in cells(resolution, factors=factors)]
        columns = {name: np.array([2 * cell[name] - 1 for cell in made]) for name in made[0]}

        def contrast(term, columns=columns):
            sign = -1 if term.startswith("-") else 1
            return sign * np.prod([columns[name] for name in term.strip("-").split(":")], axis=0)

        found = factorial.aliases(made)
        mixed = set()
        for line in found:
            first, *others = line.split(" = ")
            assert others
            for other in others:
                assert (contrast(first) == contrast(other)).all(), line
            mixed |= {first, *(other.strip("-") for other in others)}
        effects = [*columns, *(":".join(pair) for pair in combinations(columns, 2))]
        short = {
            a for a, b in combinations(effects, 2) if abs(contrast(a) @ contrast(b)) == len(made)
        }
        assert short <= mixed
        assert bool(short) == (resolution < 5)


def test_the_plan_says_what_is_mixed():
    text = factorial.describe([arm.cell for arm in cells(3)])
    assert "8 of 32 cells of 5 factors, resolution 3" in text
    assert "norm = -position:bias" in text
    full = factorial.describe([arm.cell for arm in cells("full")])
    assert full == "32 of 32 cells of 5 factors, so that no effect is mixed with another."


def test_a_factorial_runs_each_cell_with_every_seed(data_dir, tmp_path, quick, stub, capsys):
    """Without a second copy of the base, and with an equal number of runs of each cell."""
    from helpers.ablation import rows_of

    given = [
        "--design=factorial",
        "--factors=['position','norm','mlp']",
        "--resolution=3",
        "--lr_grid=[1]",
    ]
    out = tmp_path / "out"
    ablate.main(arguments(data_dir, out, *given, "--seeds=2"), stub)
    runs = [(arm, seed) for arm, seed, *_ in rows_of(out)]
    names = ["base", "rmsnorm+swiglu", "rope+swiglu", "rope+rmsnorm"]
    assert sorted(runs) == sorted((name, seed) for name in names for seed in range(2))
    printed = capsys.readouterr().out
    assert "4 of 8 cells of 3 factors, resolution 3." in printed
    assert "position = -norm:mlp" in printed
