"""The ablation driver before its runs: designs, what it refuses, matching."""

import pytest

from bench.ablation import checks
from bench.ablation.arms import described, list_arms
from common import files
from common.commands import ROOT
from common.errors import UserError
from helpers.ablation import arguments, arm, names, read_sweep
from parts import costs
from parts.architectures import configure
from parts.variant import POSITION

SHAKESPEARE = str(ROOT / "config/ablate_shakespeare.py")
MINE = arm(mine=dict(norm="rmsnorm"))
QK_NORMS = ["qk_norm=head", "qk_norm=full"]
NAMED = read_sweep([str(ROOT / "config/archs.py"), "--device=cpu"])[0].arms  # architectures


@pytest.mark.parametrize(
    "what, wanted",
    [
        ([arm(odd=dict(n_kv_head=3))], r"arm odd: n_head=2 is not divisible by n_kv_head=3"),
        ([arm(t=dict(positon="rope"))], r"arm t: unknown key positon .*did you mean position"),
        ([arm(same=dict(norm="layernorm"))], r"arm same: it is base already"),
        ([arm(idle=dict(mlp="relu", norm_eps=1e-3))], "arm idle: norm_eps has no"),
        ([arm(big=dict(n_layer=8))], r"arm big: no MLP width matches the base in params"),
        (["--design=leave_one_out", "--model=gpt2"], r"leave_one_out starts from llama"),
        (["--design=axis"], r"no axis is named .*: add --axis=SLOT"),
        (["--axis=positions"], r"no axis positions .*: did you mean position?"),
        (["--curve=[2]"], r"no arms"),
        ([arm(rope=dict(position="rope")), "--screening", "--controls=4"], "controls=4 is not for"),
        (["--curve=[2]", "--arms={'base x2': {'n_layer': 4}}"], r"two arms would write to base-x2"),
        (["--design=leave_one_in", "--seed=3"], r"the sweep gives each run its own seed"),
        (["--design=leave_one_in", "--curve=[1]"], r"curve holds 1, which is the base itself"),
        (["--design=leave_one_in", "--lr_grid=[2]"], r"lr_grid=\[2.0\] lacks 1, the given rate"),
        (["--arms={'a*b': {'n_layer': 4}}"], r"cannot name an arm .*use letters"),
        (["--design=leave_one_in", "--prompt=é"], r"is not in the vocabulary"),
        (["--axis=norm", "--multiple_of=8"], r"arm base: multiple_of"),
    ],
)
def test_a_mistake_is_found_before_anything_is_written(drive, out, what, wanted):
    with pytest.raises(UserError, match=wanted) as found:
        drive(*what)
    assert found.value.status == 2 and not out.exists()


def test_a_dead_switch_stops_the_sweep_by_name(drive, out, monkeypatch):
    """A rotation that is skipped, as in a published "NoPE = RoPE" result."""
    monkeypatch.setitem(POSITION, "rope", POSITION["none"])
    two = arm(fine=dict(norm="rmsnorm"), dead=dict(position="rope"))
    wanted = "arm dead: it gives the same logits as base .position=rope"
    with pytest.raises(UserError, match=wanted):
        drive("--position=none", two)
    assert not out.exists()


def test_every_word_bites_and_so_do_keys_of_training(data_dir, tmp_path):
    """No arm that the dictionaries offer is refused. Optimizer, dropout and learning rate show in
    training alone."""
    _, base = read_sweep(arguments(data_dir, tmp_path, "--axis=norm"))
    of_training = {"muon": dict(optimizer="muon"), "drop": dict(dropout=0.1)}
    of_training["slow"] = dict(learning_rate=5e-4)
    axes = [dict(axis=axis) for axis in ("position", "norm", "mlp", "block", "qk_norm")]
    for config in (*axes, dict(arms=NAMED), dict(arms=of_training)):
        found = names(base, **config)
        for each in found.values():
            checks.check_arm(each, base)
            if each.changes:
                checks.check_changes_output(each, found[each.against], 29)


def test_a_shrunken_sweep_warms_up_for_a_tenth_of_its_steps(capsys):
    """The shipped sweep at 60 steps."""
    files.warned.clear()
    _, base = read_sweep([SHAKESPEARE, "--device=cpu", "--max_iters=60"])
    read_sweep([SHAKESPEARE, "--device=cpu", "--max_iters=60"])
    assert base["warmup_iters"] == 6 and capsys.readouterr().err.count("warmup_iters") == 1
    _, base = read_sweep([SHAKESPEARE, "--device=cpu", "--max_iters=60", "--warmup_iters=70"])
    assert base["warmup_iters"] == 70  # which TrainConfig refuses


@pytest.mark.parametrize("config", [dict(design="leave_one_in"), dict(arms=NAMED)], ids=str)
@pytest.mark.parametrize("kind", ["params", "flops"])
def test_matched_arms_cost_what_the_base_does(data_dir, tmp_path, config, kind):
    sizes = ["--axis=norm", "--n_embd=64", "--n_head=4"]
    _, base = read_sweep(arguments(data_dir, tmp_path, *sizes))
    found = names(base, **config)
    cost = {"params": costs.parameters, "flops": lambda c: costs.flops_per_token(c, 16)}[kind]
    for each in found.values():
        checks.check_arm(each, base)
        checks.match_arm(each, found["base"], kind, 29)
        c = configure({"vocab_size": 29} | each.values, as_variant=True)
        excess = cost(c) / cost(configure({"vocab_size": 29} | base, as_variant=True)) - 1
        assert abs(excess) <= 0.005, each.name
        set_by_matching = each.values.get("mlp_width") != (base | each.changes).get("mlp_width")
        assert ("mlp_width=" in described(each.changes, each.match)) == set_by_matching
    wide = names(base, arms=dict(wide=dict(mlp_width=512)))["wide"]  # which sets it itself
    checks.check_arm(wide, base)
    checks.match_arm(wide, found["base"], "flops", 29)
    assert wide.match is None and wide.values["mlp_width"] == 512


def test_a_text_of_ones_own_gets_neither_the_question_nor_the_prompt_of_a_config_file():
    config, _ = read_sweep([SHAKESPEARE])
    assert config.prompt == "ROMEO:" and "Shakespeare" in config.question
    config, _ = read_sweep([SHAKESPEARE, "--dataset=mine"])
    assert config.prompt == "" and "Shakespeare" not in config.question
    config, _ = read_sweep([SHAKESPEARE, "--dataset=mine", "--prompt=Dear", "--question=Why?"])
    assert config.prompt == "Dear" and config.question == "Why?"
    config, _ = read_sweep([SHAKESPEARE, "--axis=norm"])
    assert config.prompt == "ROMEO:" and "Shakespeare" not in config.question


@pytest.mark.parametrize(
    ("name", "given", "arms"),
    [
        ("ablate_shakespeare", [MINE], ["mine"]),
        ("ablate_positions", [MINE, "--model=gpt2"], ["mine"]),
        ("ablate_positions", [MINE, "--design=arms"], ["mine"]),
        ("ablate_positions", [MINE, "--axis=qk_norm"], [*QK_NORMS, "mine"]),
        ("ladder_gpt2_to_llama", ["--axis=qk_norm"], QK_NORMS),
    ],
)
def test_what_is_typed_wins_over_the_arms_of_a_config_file(name, given, arms):
    config, base = read_sweep([str(ROOT / "config" / f"{name}.py"), "--device=cpu", *given])
    assert [each.name for each in list_arms(config, base) if not each.curve][1:-1] == arms
