"""The ledger of claims: its table, its one rule for verdicts, and that a verdict follows the
measurement."""

import inspect
import json
import math
from collections import Counter
from functools import partial

import claims as command
import pytest
import torch
from torch.nn import functional as F

from bench.ablation.scale import FILE
from bench.ledger import guide, page, table, timing, trained
from bench.ledger.functions import FUNCTIONS
from bench.ledger.table import (
    CONFIRMED,
    CONTRADICTED,
    NOT_HERE,
    NOT_YET,
    UNDECIDED,
    Claim,
    Finding,
    Measurement,
)
from common.errors import UserError
from common.files import ROOT
from helpers.sweeps import SWEEP, make_sweep
from parts.architectures import GPT2

CLAIMS = table.read()
BY_ID = {claim.id: claim for claim in CLAIMS}
LEVELS = table.levels(CLAIMS)
# The numbers that python bench/claims.py stored.
STORED = json.loads((ROOT / "bench/results/claims.json").read_text(encoding="utf-8"))["claims"]
QUICK = ["E2.qkv", "D24", "C24.70b", "D52", "M.flip5", "A1", "A9", "B4", "D13", "D14.6", "D34"]


def claim_of(measure="x", holds="< 0", kind="trained"):
    return Claim("X", kind, "a claim", "a paper", measure, "a number", holds)


def stored_measurement(row):
    keys = ("value", "se", "df", "runs", "log", "screening")
    values = {key: row[key] for key in keys}
    return Measurement(**values | {"df": math.inf if row["df"] is None else row["df"]})


def found_in(row):
    measurement = None if row["value"] is None else stored_measurement(row)
    return Finding(BY_ID[row["id"]], row["verdict"], measurement, row["level"], row["note"])


# ---------------------------------------------------------------- the table


def test_each_row_names_a_function_that_takes_its_arguments():
    assert len(CLAIMS) > 200
    for claim in CLAIMS:
        for name, arguments in claim.calls:
            inspect.signature(FUNCTIONS[name]).bind(*arguments)
            assert FUNCTIONS[name].__doc__, name
        assert claim.claim and claim.source and claim.quantity


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("= 12", 12, 12.001),
        ("= 0.33 ± 0.01", 0.335, 0.3401),
        ("< 1e-5", 9e-6, 1e-5),
        ("> 0", 1e-9, 0),
        ("-0.1 to 0.1", -0.1, -0.11),
    ],
)
def test_bounds(text, inside, outside):
    least, greatest = table.parse_bounds(text)
    assert least <= inside <= greatest
    assert not least <= outside <= greatest


@pytest.mark.parametrize("text", ["", "better", "2 to 1", "= x", "> 0 and < 1"])
def test_other_bounds_are_refused(text):
    with pytest.raises(ValueError, match="no bound"):
        table.parse_bounds(text)


def test_a_row_that_means_nothing_is_refused_with_its_line(tmp_path):
    path = tmp_path / "claims.csv"
    rows = [",".join(table.COLUMNS), "A,algebra,c,s,pairs 4,q,= 10", "A,algebra,c,s,pairs 4,q,= 10"]
    path.write_text("\n".join(rows))
    with pytest.raises(UserError, match="one id"):
        table.read(path)
    path.write_text("\n".join(rows[:2]).replace("= 10", "about ten"))
    with pytest.raises(UserError, match="no bound") as error:
        table.read(path)
    assert error.value.parts[1] == f"{path}:2"


# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_each_verdict_flips_with_its_measurement(claim):
    least, greatest = claim.bounds
    ends = [end for end in (least, greatest) if math.isfinite(end)]
    assert ends
    inside = ends[0] if len(ends) == 1 else (least + greatest) / 2
    beyond = [max(1e-9, abs(end)) for end in ends]
    outside = [
        end - step if end == least else end + step for end, step in zip(ends, beyond, strict=True)
    ]
    level = LEVELS[claim.kind]
    assert table.verdict(claim, Measurement(inside), level) == CONFIRMED
    for value, end in zip(outside, ends, strict=True):
        assert table.verdict(claim, Measurement(value), level) == CONTRADICTED
        wide = Measurement(end, se=max(1e-9, abs(end)), df=5, runs=3)
        assert table.verdict(claim, wide, level) == UNDECIDED


def test_an_interval_of_a_logarithm_and_one_that_is_unknown():
    m = Measurement(2.0, se=math.log(2), log=True)
    low, high = m.interval(0.05)
    assert low * high == pytest.approx(4) and high / 2 == pytest.approx(2**1.96, rel=1e-3)
    assert table.verdict(claim_of(), Measurement(math.nan), 0.05) == UNDECIDED


def test_more_runs_decide_sooner_where_the_distance_is_larger():
    claim = claim_of(holds="< 0")
    near, far = (Measurement(v, se=0.01, df=4, runs=3) for v in (-0.005, -0.02))
    assert table.verdict(claim, near, 0.001) == table.verdict(claim, far, 0.001) == UNDECIDED
    assert 3 < table.runs_to_decide(claim, far, 0.001) < table.runs_to_decide(claim, near, 0.001)
    assert table.runs_to_decide(claim, Measurement(0.0, se=0.01, df=4, runs=3), 0.001) is None


# ---------------------------------------------------------------- what was stored


def test_the_stored_page_is_of_this_table_and_has_enough_verdicts():
    assert [row["id"] for row in STORED] == [claim.id for claim in CLAIMS]
    assert all(row["holds"] == BY_ID[row["id"]].holds for row in STORED)
    decided = Counter(row["kind"] for row in STORED if row["verdict"] in (CONFIRMED, CONTRADICTED))
    assert decided["algebra"] + decided["micro"] >= 60
    assert decided["trained"] >= 12
    with_effect = [row for row in STORED if row["kind"] == "trained" and row["value"] is not None]
    assert len(with_effect) >= 25


def test_no_stored_verdict_is_typed_in():
    """Each follows from the measurement stored beside it, and another measurement flips it."""
    checked = 0
    for row in STORED:
        claim, level = BY_ID[row["id"]], LEVELS[row["kind"]]
        if row["value"] is None:
            assert row["verdict"] in (NOT_HERE, NOT_YET) and row["note"]
            continue
        m = stored_measurement(row)
        assert table.verdict(claim, m, level) == row["verdict"], row["id"]
        assert found_in(row).more == row["runs_to_decide"], row["id"]
        least, greatest = claim.bounds
        inside = least if math.isfinite(least) else greatest
        far = least - 10 if math.isfinite(least) else greatest + 10
        m.value, m.se, m.log = (inside if row["verdict"] == CONTRADICTED else far), 0.0, False
        m.screening = False
        assert table.verdict(claim, m, level) != row["verdict"], row["id"]
        checked += 1
    assert checked > 150


@pytest.mark.parametrize("name", QUICK)
def test_a_measurement_now_gives_the_stored_verdict(name):
    found = table.examine(BY_ID[name], FUNCTIONS, LEVELS[BY_ID[name].kind])
    assert found.word == next(row["verdict"] for row in STORED if row["id"] == name)


# ---------------------------------------------------------------- the code decides


def verdict_of(name):
    return table.examine(BY_ID[name], FUNCTIONS, 0.01).word


def test_a_model_that_looks_ahead_loses_its_verdict(monkeypatch):
    assert verdict_of("A3.llama") == CONFIRMED
    attend = F.scaled_dot_product_attention

    def without_mask(*args, is_causal=False, **keys):
        return attend(*args, **keys)

    monkeypatch.setattr(F, "scaled_dot_product_attention", without_mask)
    assert verdict_of("A3.llama") == CONTRADICTED


def test_the_guides_code_would_be_confirmed_if_it_were_right(monkeypatch):
    assert verdict_of("D34") == verdict_of("D14.6") == CONTRADICTED
    monkeypatch.setattr(guide, "layer_norm", lambda x: F.layer_norm(x, x.shape[-1:]))
    monkeypatch.setattr(guide, "slopes", lambda n: [0.5**i for i in range(n)])
    assert verdict_of("D34") == verdict_of("D14.6") == CONFIRMED


def test_the_guides_attention_is_right_but_for_its_mask():
    torch.manual_seed(0)
    x, wq, wk, wv = torch.randn(1, 6, 8), *torch.randn(3, 8, 8)
    q, k, v = ((x @ w.t()).view(1, 6, 2, 4).transpose(1, 2) for w in (wq, wk, wv))
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, 6, 8)
    torch.testing.assert_close(guide.shared_attention(x, wq, wk, wv, n_head=2), expected)


# ---------------------------------------------------------------- the rows of a sweep decide

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "vocab_size": 65}
SIZES |= {"batch_size": 8, "gradient_accumulation_steps": 1, "max_iters": 200}
ROPE, SWIGLU = {"position": "rope"}, {"mlp": "swiglu"}
LLAMA = "position=rope norm=rmsnorm mlp=swiglu bias=none tie_embeddings=False"


def make(folder, effects, changes, **keys):
    """A made-up sweep on the plays: {arm: its effect}, {arm: what it changes}."""
    arms = {arm: {"changes": changed, "against": "base"} for arm, changed in changes.items()}
    for arm, cell in keys.pop("cells", {}).items():
        arms.setdefault(arm, {})["cell"] = cell
    values = {"model": "gpt2"} | GPT2 | SIZES | keys.pop("sizes", {})
    given = {"seeds": 6, "lr_grid": [1], "chosen_lr": {}, "diverged": (), "stale": False}
    given |= {"base_values": values, "data": SWEEP["data"] | {"dataset": "plays"}}
    make_sweep(folder, effects={"base": 0.0} | effects, arms=arms, **given | keys)


def make_arms(folder, effect, **keys):
    """One part, and all of them by the name of an architecture; names say nothing."""
    effects = {"base-again": 0.0, "rope": effect, "everything": effect}
    make(folder / "sweep", effects, {"rope": ROPE, "everything": {"arch": "llama"}}, **keys)


def make_factorial(folder, effect):
    """Two factors and their interaction, each worth `effect`; the cells are arms, too."""
    effects = {"turned": effect, "gated": 0.0, "both": 2 * effect}
    changes = {"turned": ROPE, "gated": SWIGLU, "both": ROPE | SWIGLU}
    levels = {"base": (0, 0), "turned": (1, 0), "gated": (0, 1), "both": (1, 1)}
    cells = {arm: dict(zip(("turns", "gates"), each, strict=True)) for arm, each in levels.items()}
    make(folder / "sweep", effects, changes, cells=cells)


def make_scale(folder, effect):
    """Three sizes, at which a part is worth nothing, once and twice the effect."""
    for place, width in enumerate((32, 64, 128)):
        sizes = {"n_embd": width, "max_iters": 4 * width}
        effects = {"base-again": 0.0, "turned": place * effect}
        make(folder / f"scale/w{width}", effects, {"turned": ROPE}, sizes=sizes)
    (folder / "scale" / FILE).write_text(json.dumps({"sizes": ["w32", "w64", "w128"]}))


def examined(measure, folder, monkeypatch, holds="< 0"):
    """The Finding of a claim where the sweeps below `folder` are the only ones."""
    monkeypatch.setattr(trained, "RESULTS", folder)
    return table.examine(claim_of(measure, holds), FUNCTIONS, 0.01)


@pytest.mark.parametrize(
    ("design", "measure"),
    [
        (make_arms, "swap gpt2 position=rope"),
        (make_arms, f"swap gpt2 '{LLAMA}'"),
        (make_arms, "swap llama '' 'position=learned norm=layernorm mlp=gelu bias=all "
         "tie_embeddings=True'"),
        (make_factorial, "swap gpt2 position=rope"),
        (make_factorial, "effect gpt2 position=rope"),
        (make_factorial, "effect gpt2 position=rope mlp=swiglu"),
        (make_factorial, "effect gpt2 mlp=swiglu:position=rope"),
        (make_factorial, "largest_interaction gpt2 position=rope mlp=swiglu"),
        (make_factorial, "effect_on gpt2 position=rope 0.5"),
        (make_scale, "slope gpt2 position=rope"),
    ],
)  # fmt: skip
def test_a_verdict_flips_with_the_rows_of_each_design(design, measure, tmp_path, monkeypatch):
    words = []
    for place, effect in enumerate((-0.08, 0.0, 0.08)):
        design(tmp_path / str(place), effect)
        words.append(examined(measure, tmp_path / str(place), monkeypatch).word)
    assert words == [CONFIRMED, UNDECIDED, CONTRADICTED]


def test_effects_are_those_of_their_factors(tmp_path, monkeypatch):
    make_factorial(tmp_path, -0.08)
    for measure, wanted in (
        ("effect gpt2 position=rope", -0.12),  # half of the interaction is in each main effect
        ("effect gpt2 mlp=swiglu", -0.04),
        ("effect gpt2 mlp=swiglu:position=rope", -0.08),
        ("effect gpt2 position=rope mlp=swiglu", -0.08),
    ):
        value = examined(measure, tmp_path, monkeypatch).measurement.value
        assert value == pytest.approx(wanted, abs=0.015), measure


def test_worth_noise_and_divergence_follow_the_rows(tmp_path, monkeypatch):
    for name, effect in (("good", -0.03), ("bad", 0.03)):
        make_factorial(tmp_path / name, effect)
    good, bad = (partial(examined, folder=tmp_path / name) for name in ("good", "bad"))
    worth = "effect_worth gpt2 position=rope"
    assert good(worth, monkeypatch=monkeypatch, holds="> 1").word == CONFIRMED
    assert bad(worth, monkeypatch=monkeypatch, holds="> 1").word == CONTRADICTED

    noise = "noise gpt2 position=rope"
    assert good(noise, monkeypatch=monkeypatch, holds="0.004 to 0.016").word == CONFIRMED
    assert good(noise, monkeypatch=monkeypatch, holds="> 0.02").word == CONTRADICTED

    make_arms(tmp_path / "wild", 0.0, diverged=("everything",))
    for folder, word in (("good", NOT_YET), ("wild", CONTRADICTED)):
        found = examined("diverged llama", tmp_path / folder, monkeypatch, "= 0")
        assert found.word == word, found.reason
    assert examined("swap gpt2 arch=llama", tmp_path / "wild", monkeypatch).word == NOT_YET


def test_the_rows_beyond_the_context_decide(tmp_path, monkeypatch):
    make_arms(tmp_path, 0.0)
    for measure, holds, word in (
        ("longer gpt2 position=rope 4", "1.2 to 1.3", CONFIRMED),  # exp(0.25) by make_sweep
        ("longer gpt2 position=rope 8", "1.2 to 1.3", CONTRADICTED),
        ("longer gpt2 position=learned 4", "> 0", NOT_YET),
        ("refusals gpt2 position=learned", "= 0", CONTRADICTED),
        ("refusals gpt2 position=rope", "= 0", CONFIRMED),
    ):
        assert examined(measure, tmp_path, monkeypatch, holds).word == word, measure


@pytest.mark.parametrize("measure", ["step_ratio", "decode_ratio"])
def test_costs_count_if_a_quiet_machine_measured_them(measure, tmp_path, monkeypatch):
    found = {}
    for quiet in (True, False):
        make_arms(tmp_path / str(quiet), 0.0)
        path = tmp_path / str(quiet) / "sweep/costs.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        times = {"median": 2.0, "q25": 1.98, "q75": 2.02}
        for row in rows:
            twice = {key: 2 * time for key, time in times.items()}
            row |= {"quiet": quiet, "steps_timed": 50, "decode_ms_per_token": times}
            if row["arm"] == "rope":
                row |= {"decode_ms_per_token": twice}
                row["step_ratio"] |= {"ratio": 2.0, "low": 1.98, "high": 2.02}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for holds in ("1.8 to 2.2", "< 1.5"):
            name = f"{measure} gpt2 position=rope"
            found[quiet, holds] = examined(name, tmp_path / str(quiet), monkeypatch, holds).word
    assert list(found.values()) == [CONFIRMED, CONTRADICTED, NOT_YET, NOT_YET]


def test_a_screening_decides_nothing_and_counts_last(tmp_path, monkeypatch):
    make_arms(tmp_path, -0.08, screening=True, seeds=3)
    found = examined("swap gpt2 position=rope", tmp_path, monkeypatch)
    assert found.word == UNDECIDED and found.measurement.interval(0.01)[1] < 0
    assert found.measurement.note == "sweep: a screening, 3 against 5 runs"

    make_arms(tmp_path / "later", 0.08, seeds=2)
    trained.sections.cache_clear()
    found = examined("swap gpt2 position=rope", tmp_path, monkeypatch)
    assert found.measurement.note == "later/sweep: 2 against 4 runs"


def test_what_no_sweep_has_is_not_measured(tmp_path, monkeypatch):
    make_arms(tmp_path, 0.0)
    for measure in (
        *("swap gpt2 position=alibi", "swap llama mlp=moe", "slope gpt2 position=rope"),
        *("effect gpt2 position=rope", "step_ratio gpt2 position=alibi", "diverged mistral"),
        "swap gpt2 position=learned",  # what the base has already
    ):
        found = examined(measure, tmp_path, monkeypatch)
        assert found.word == NOT_YET and "no sweep on plays" in found.reason, measure
    gpu = table.examine(claim_of("gpu_row flash nothing", kind="gpu"), FUNCTIONS, 0.01)
    assert gpu.word == NOT_YET and "GPU" in gpu.reason


@pytest.mark.parametrize(
    "measure",
    [
        "norm_time 8 16 forward 2",
        "norm_time 8 16 both 2",
        "attention_time 16 2 8 forward 2",
        "attention_time 16 2 8 both 2",
        "step_time llama@tiny llama@tiny n_kv_head=1",
        "token_time llama@tiny llama@tiny 1 8 n_kv_head=1",
    ],
)
def test_a_ratio_of_times_needs_a_quiet_machine(measure, monkeypatch):
    claim = claim_of(measure, "> 0", "micro")
    monkeypatch.setattr(timing.OtherWork, "share", lambda self: 0.5)
    refused = table.examine(claim, FUNCTIONS, 0.01)
    assert refused.word == NOT_YET and "50%" in refused.reason

    monkeypatch.setattr(timing.OtherWork, "share", lambda self: 0.0)
    m = table.examine(claim, FUNCTIONS, 0.01).measurement
    assert 0.001 < m.value < 1000 and m.se > 0 and m.log and "rounds" in m.note


# ---------------------------------------------------------------- the command and the page


def test_some_claims_are_printed_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BENCH_RESULTS", str(tmp_path))
    command.main(["M.flip5", "D24"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [
        *["D24", "D24.qkv", "D24.block", "D24.total", "D24.gqa"],
        "M.flip5",
    ]
    assert all(len(line) < 80 for line in lines)
    assert lines[-1].startswith("2 confirmed, 4 contradicted; ")
    assert not list(tmp_path.iterdir())


def test_an_id_that_does_not_exist():
    with pytest.raises(UserError, match="no claim D999"):
        command.main(["D999"])


def test_the_page_shows_every_claim_and_the_guides_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCH_RESULTS", str(tmp_path))
    page.write([found_in(row) for row in STORED])
    text = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert all(f"| {claim.id} |" in text for claim in CLAIMS)
    assert "| @" not in text
    for name in ("D17", "D18", "D21", "D30", "D37", "D42", "D44", "D46", "D49", "D56", "D57"):
        assert f"### {name}. " in text
    again = json.loads((tmp_path / "claims.json").read_text(encoding="utf-8"))["claims"]
    assert [row["verdict"] for row in again] == [row["verdict"] for row in STORED]
