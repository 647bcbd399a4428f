"""The ablation driver before its runs: designs, what it refuses, matching, the hash of the code,
and the timing of arms."""

import ast

import pytest

import ablate
import train
from bench.ablation import arms, designs, measure, settings, source, sweep
from common import files, runtime
from common.configurator import build
from common.errors import UserError
from common.files import ROOT
from helpers.ablation import arguments, arm
from parts import costs, mlp
from parts.architectures import ARCH
from parts.variant import POSITION
from training.run_folder import read_rows

SWEEPS = [path for path in (ROOT / "config").glob("*.py") if "bench/ablate.py" in path.read_text()]


# ---------------------------------------------------------------- designs


def names(base=None, **config):
    """{name: Arm} of a configuration of the sweep."""
    base = {"model": "gpt2"} | (base or {})
    found = designs.enumerate_arms(build(settings.AblateConfig, config), base)
    return {each.name: each for each in found}


@pytest.mark.parametrize(
    "design, corner, other", [("leave_one_in", "gpt2", "llama"), ("leave_one_out", "llama", "gpt2")]
)
def test_leaving_one_out_takes_every_part_in_which_the_corners_differ(design, corner, other):
    differ = {key for key in ARCH["gpt2"] if ARCH["gpt2"][key] != ARCH["llama"][key]}
    found = names({"model": corner}, design=design)
    assert list(found)[0] == "base" and list(found)[-1] == "base again"
    changes = [change for each in found.values() for change in each.changes.items()]
    assert {key for key, _ in changes} == differ
    assert all(ARCH[other][key] == value for key, value in changes)


def test_designs_come_from_the_dictionaries():
    # The base has that already.
    assert "bias=none" not in names({"bias": False}, design="leave_one_in")
    words = {each.changes["position"] for each in names(axis="position").values() if each.changes}
    assert words == set(POSITION) - {"learned"}
    sparse = {"mixtral", "gpt-oss", "deepseek-v3", "qwen3-next", "mamba2"}
    assert set(names(design="archs")) - {"base", "base again"} == set(ARCH) - {"gpt2"} - sparse
    assert "mixtral" in names(design="archs", archs=["mixtral"])
    assert not any("none" in name for name in names(axis="mlp"))
    assert set(names(design="archs", archs=["mistral"], again=False)) == {"base", "mistral"}
    mixed = names(design="leave_one_in,axis", axis="block", arms={"wide": dict(mlp_width=64)})
    assert {"rope", "sandwich", "wide"} <= set(mixed)


def test_pairs_combine_all_single_changes():
    differ = {key for key in ARCH["gpt2"] if ARCH["gpt2"][key] != ARCH["llama"][key]}
    pairs = [each for each in names(design="pairs").values() if each.interaction_of]
    assert len(pairs) == len(differ) * (len(differ) - 1) // 2
    assert pairs[0].interaction_of == ["rope", "rmsnorm"]
    assert pairs[0].changes.keys() == {"position", "norm"}


def test_ladder_goes_from_one_corner_to_the_other():
    order = ["norm", "position", "mlp", "tie_embeddings", "bias", "gqa"]
    by_hand = {"gqa": dict(n_kv_head=1)}
    found = list(names(design="ladder", order=order, arms=by_hand, again=False).values())
    assert [each.name for each in found] == [
        *("base", "+rmsnorm", "+rope", "+swiglu", "+tie_embeddings=False", "+bias=none", "+gqa")
    ]
    assert [each.against for each in found[1:]] == [each.name for each in found[:-1]]
    sizes = {"model": "gpt2", "n_head": 2, "n_embd": 32}
    llama = settings.variant_config(sizes | {"model": "llama"})
    assert settings.variant_config(arms.with_changes(sizes, found[-2].changes)) == llama
    assert found[-1].changes == found[-2].changes | {"n_kv_head": 1}


@pytest.mark.parametrize("path", sorted(SWEEPS), ids=lambda path: path.stem)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_shipped_sweep_is_valid(path, device):
    """Its arms are accepted and matched, on a CPU and for a GPU (read as on a login node, which has
    none)."""
    config, base = settings.read([str(path), f"--device={device}", "--emit=slurm"], "")
    found = {each.name: each for each in designs.enumerate_arms(config, base)}
    for each in found.values():
        arms.check_arm(each, base | {"device": "cpu"})
        arms.match_arm(each, found["base"], config.match, 65)
    assert len(found) >= 5
    assert config.question != settings.AblateConfig.question
    assert config.out_dir != settings.AblateConfig.out_dir


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "what, wanted",
    [
        ([arm(odd=dict(n_kv_head=3))], r"arm odd: n_head=2 is not divisible by n_kv_head=3"),
        (
            [arm(typo=dict(positon="rope"))],
            r"arm typo: unknown key positon .*did you mean position",
        ),
        ([arm(word=dict(mlp="gelo"))], r"arm word: mlp cannot be 'gelo'"),
        ([arm(same=dict(norm="layernorm"))], r"the arm same changes nothing: it is base already"),
        (
            [arm(idle=dict(mlp="relu", norm_eps=1e-3))],
            r"the arm idle changes nothing: norm_eps has no effect",
        ),
        ([arm(mine=dict(seed=3))], r"arm mine: seed is the same for all arms"),
        ([arm(rate=dict(learning_rate=1e-3))], r"the arm rate changes nothing"),
        ([arm(big=dict(n_layer=24))], r"arm big: no MLP width matches the base in params"),
        (["--design=leave_one_out", "--model=gpt2"], r"leave_one_out starts from llama"),
        (["--design=ladder", "--order=['nom']"], r"no rung nom .*choose from position, norm"),
        (["--design=best"], r"unknown design best"),
        (["--axis=n_layer"], r"no axis n_layer"),
        ([], r"no arms"),
        (["--design=leave_one_in", "--seed=3"], r"the sweep gives each run its own seed"),
        (["--design=leave_one_in", "--budget=soon"], r"budget=soon is not a duration"),
        (["--design=leave_one_in", "--budget=1s"], r"8 seeds of each arm take about"),
        (["--design=leave_one_in", "--prompt=é"], r"is not in the vocabulary"),
        (["--design=leave_one_in", "--lr_grid=[0]"], r"lr_grid=\[0\]"),
        (
            ["--design=leave_one_in", "--match=time", "--emit=slurm"],
            r"match=time needs the arms timed",
        ),
        ([arm(end=dict(lr_decay_iters=4)), "--max_iters=4"], r"the arm end changes nothing"),
        ([arm(alpha=dict(data_alpha=0.5))], r"arm alpha: data_alpha is the same for all arms"),
        (["--design=leave_one_in", "--doctor"], r"the sweep gives each run its own doctor"),
        (
            ["--design=leave_one_in", "--multiple_of=8"],
            r"arm base: multiple_of means nothing to model=gpt2",
        ),
    ],
)
def test_a_mistake_is_found_before_anything_is_written(
    data_dir, tmp_path, quick, stub, what, wanted
):
    with pytest.raises(UserError, match=wanted) as found:
        ablate.main(arguments(data_dir, tmp_path / "out", *what), stub)
    assert found.value.status == 2 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "slot, word, like", [(POSITION, "rope", "none"), (mlp.MLP, "swiglu", "geglu")]
)
def test_a_dead_switch_stops_the_sweep_by_name(
    data_dir, tmp_path, quick, stub, monkeypatch, slot, word, like
):
    """A rotation that is skipped, as in a published "NoPE = RoPE" result, and a dead MLP."""
    monkeypatch.setitem(slot, word, slot[like])
    key = "position" if slot is POSITION else "mlp"
    two = arm(fine=dict(norm="rmsnorm"), dead={key: word})
    wanted = f"the arm dead changes nothing: its logits are those of base .{key}={word}"
    with pytest.raises(UserError, match=wanted):
        ablate.main(arguments(data_dir, tmp_path / "out", f"--{key}={like}", two), stub)
    assert not (tmp_path / "out").exists()


def test_every_word_bites_and_so_do_keys_of_training(data_dir, tmp_path):
    """No arm that the dictionaries offer is refused. Optimizer, dropout and learning rate show in
    training alone."""
    _, base = settings.read(arguments(data_dir, tmp_path, "--axis=norm"), "")
    of_training = {
        "muon": dict(optimizer="muon"),
        "drop": dict(dropout=0.1),
        "slow": dict(learning_rate=5e-4),
    }
    axes = [dict(axis=axis) for axis in ("position", "norm", "mlp", "block", "qk_norm")]
    for config in (*axes, dict(design="archs"), dict(arms=of_training)):
        found = names(base, **config)
        for each in found.values():
            arms.check_arm(each, base)
            if each.changes:
                arms.check_bite(each, found[each.against], 29)


# ---------------------------------------------------------------- matching


def test_a_shrunken_sweep_warms_up_for_a_tenth_of_its_steps(capsys):
    """The shipped sweep of 1,500 steps, 100 of them warm-up, at 60 steps."""
    files.warned.clear()
    path = str(ROOT / "config" / "ablate_shakespeare.py")
    _, base = settings.read([path, "--device=cpu", "--max_iters=60"], "")
    settings.read([path, "--device=cpu", "--max_iters=60"], "")
    assert base["warmup_iters"] == 6 and capsys.readouterr().err.count("shortened to 6") == 1
    _, base = settings.read([path, "--device=cpu", "--max_iters=60", "--warmup_iters=70"], "")
    assert base["warmup_iters"] == 70  # which TrainConfig refuses


@pytest.mark.parametrize("config", [dict(design="leave_one_in"), dict(design="archs")], ids=str)
@pytest.mark.parametrize("kind", ["params", "flops"])
def test_matched_arms_cost_what_the_base_does(data_dir, tmp_path, config, kind):
    sizes = ["--axis=norm", "--n_embd=64", "--n_head=4"]
    _, base = settings.read(arguments(data_dir, tmp_path, *sizes), "")
    found = names(base, **config)
    cost = {"params": costs.parameters, "flops": lambda c: costs.flops_per_token(c, 16)}[kind]
    for each in found.values():
        arms.check_arm(each, base)
        arms.match_arm(each, found["base"], kind, 29)
        c = settings.variant_config(each.values, 29)
        excess = cost(c) / cost(settings.variant_config(base, 29)) - 1
        assert abs(excess) <= 0.005, each.name
        assert (each.match is None) == (each.name in ("base", "base again"))
        if each.match:
            assert each.match["residual_percent"] == pytest.approx(100 * excess)
            assert each.match["mlp_width"] == costs.mlp_width(c)


def test_matched_in_time_is_matched_in_steps(data_dir, tmp_path):
    _, base = settings.read(arguments(data_dir, tmp_path, "--axis=norm", "--max_iters=100"), "")
    found = names(base, arms=dict(slow=dict(norm="rmsnorm")))
    for each in found.values():
        arms.check_arm(each, base)
        arms.match_arm(each, found["base"], "time", 29, {"base": 2.0, "slow": 3.0})
    assert found["slow"].values["max_iters"] == 67
    assert found["slow"].match["residual_percent"] == pytest.approx(0.5)
    assert found["base"].values["max_iters"] == 100


# ---------------------------------------------------------------- the hash of the code


def plain(text):
    return source.digest([source.plain(node) for node in ast.parse(text).body])


def test_comments_docstrings_and_messages_do_not_count():
    code = plain("def f(x):\n    if x:\n        raise ValueError('no')\n    return x + 1\n")
    other = (
        'def f(x):  # why\n    """What."""\n    print("hello", x)\n    if x:\n'
        "        raise ValueError(f'not {x}')\n    return (x +\n        1)\n"
    )
    assert code == plain(other)
    assert code != plain(other.replace("1)", "2)"))
    assert code != plain(other.replace("if x", "if not x"))
    assert plain("x = 'a'") != plain("x = 'b'")


@pytest.fixture(scope="module")
def code(data_dir, tmp_path_factory):
    """A function changed(file, old, new): the names of the arms whose code_hash changes if a file
    of a copy of ours does."""
    config = dict(
        rope=dict(position="rope"), swiglu=dict(mlp="swiglu"), muon=dict(optimizer="muon")
    )
    found = sweep.Sweep(arguments(data_dir, "out", arm(**config), "--match=none"), "")
    root, cases = tmp_path_factory.mktemp("code"), {}
    for each in found.arms.values():
        values = found.run_values(each)
        cases[each.name] = *source.reached(values), source.words_of(values)
        assert source.digest(source.sources(*cases[each.name])) == each.code_hash
    files = {file for functions, classes, _ in cases.values() for file, _ in functions | classes}
    rooms = ("", "common/", "parts/", "tokens/", "training/", "weights/", "sampling/")
    for file in [path.relative_to(ROOT) for room in rooms for path in ROOT.glob(f"{room}*.py")]:
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text((ROOT / file).read_text(encoding="utf-8"), encoding="utf-8")

    def changed(file, old, new):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, (file, old)
        (root / file).write_text(text.replace(old, new), encoding="utf-8")
        source.read_module.cache_clear()
        hashes = {name: source.digest(source.sources(*case, root)) for name, case in cases.items()}
        (root / file).write_text(text, encoding="utf-8")
        return {name for name, value in hashes.items() if value != found.arms[name].code_hash}

    changed.files = files
    changed.arms = set(found.arms)
    return changed


def test_the_code_of_a_run_is_what_it_reaches(code):
    assert {"train.py", "model.py", "training/optim.py", "tokens/batches.py"} <= code.files
    assert {"parts/attention.py", "training/losses.py", "parts/variant.py"} <= code.files
    assert not any(file.startswith(("bench/", "tests/", "weights/")) for file in code.files)
    assert "training/run_folder.py" not in code.files and "sample.py" not in code.files


def test_a_message_or_a_new_word_leaves_all_rows_fresh(code):
    assert not code("training/start.py", "steps of {run", "steps, each of {run")
    assert not code(
        "training/last_words.py", "validation loss {best:.4f}", "loss on validation {best:.4f}"
    )
    assert not code(
        "parts/mlp.py",
        '"relu": Plain',
        '"mine": PlainMLP.of(SO, relu, relu, 2),\n    "relu": Plain',
    )
    assert not code("parts/norm.py", '"dyt": DyT,', '"dyt": DyT,\n    "mine": DyT,')
    last, added = '"none": NoMLP,\n}', 'MLP["{}"] = PlainMLP.of(SO, relu, relu)'
    assert not code("parts/mlp.py", last, f"{last}\n{added.format('mine')}")
    assert code("parts/mlp.py", last, f"{last}\n{added.format('swiglu')}") == {"swiglu"}
    assert not code(
        "parts/architectures.py", '"balanced": LLAMA', '"mine": LLAMA,\n    "balanced": LLAMA'
    )
    assert not code("training/optim.py", '"constant": lambda t: 1.0,', '"constant": lambda t: 2.0,')


def test_a_constant_makes_those_rows_stale_that_reach_it(code):
    """In the schedule, the optimizer, the order of the data, the evaluation, the first weights."""
    assert code("training/optim.py", "0.5 * (1 + math.cos", "0.4 * (1 + math.cos") == code.arms
    assert code("training/optim.py", '-group["lr"] * 0.2', '-group["lr"] * 0.3') == {"muon"}
    assert code("training/optim.py", "if p.dim() >= 2]", "if p.dim() >= 1]") == code.arms
    assert code("train.py", "EVAL_TRAIN_TOKENS = 32768", "EVAL_TRAIN_TOKENS = 1") == code.arms
    assert code("training/losses.py", "EVAL_BLOCKS = 32", "EVAL_BLOCKS = 16") == code.arms
    assert (
        code("tokens/batches.py", "default_rng([self.seed, epoch])", "default_rng(epoch)")
        == code.arms
    )
    assert code("parts/part.py", "STD = 0.02", "STD = 0.03") == {"rope", "swiglu"}
    swiglu = '"swiglu": GatedMLP.of(SHAZEER, F.silu'
    assert code("parts/mlp.py", swiglu, swiglu.replace("silu", "relu")) == {"swiglu"}
    assert code("parts/mlp.py", "self.act(self.gate(x)) *", "self.act(self.gate(x)) +") == {
        "swiglu"
    }
    assert code("parts/mlp.py", "int(2 * 4 * config", "int(2 * 5 * config") == {"swiglu"}


def test_the_machine_is_part_of_the_configuration(data_dir, monkeypatch):
    def hashes(*more):
        what = arguments(data_dir, "out", "--axis=norm", "--match=none", *more)
        monkeypatch.setattr(sweep, "code_hash", lambda values: "code")
        return sweep.Sweep(what, "").arms["base"].config_hash

    assert hashes() == hashes("--dtype=float32") == hashes("--log_interval=7")
    assert hashes() != hashes("--dtype=bfloat16")
    assert hashes("--workers=1") != hashes("--workers=64")  # threads of each
    assert hashes() != hashes("--min_lr=0") != hashes("--min_lr=1e-4")
    before = hashes()
    monkeypatch.setattr(sweep, "versions", lambda: {"torch": "9.9.1+cpu", "hardware": "x"})
    assert before != hashes()
    other = hashes()
    monkeypatch.setattr(sweep, "versions", lambda: {"torch": "9.9.1+cu130", "hardware": "y"})
    assert other == hashes()


# ---------------------------------------------------------------- compiling and timing


def test_compile_is_settled_once_by_the_whole_work_of_the_base(data_dir, tmp_path, monkeypatch):
    """All arms get what train.py would choose for the base; gradient accumulation counts."""
    rope = arm(rope=dict(position="rope", n_layer=4))

    def settled(*more):
        found = sweep.Sweep(arguments(data_dir, tmp_path, rope, "--match=none", *more), "")
        return {each.values["compile"] for each in found.arms.values()}

    work = 6 * 27e3 * 4 * 16 * 4  # operations: parameters, batch, context, steps
    monkeypatch.setattr(runtime, "COMPILE_PAYS", 2 * work)
    monkeypatch.setattr(runtime.shutil, "which", lambda name: name)
    assert settled() == {False}
    assert settled("--gradient_accumulation_steps=8") == {True}
    assert settled("--gradient_accumulation_steps=8", "--compile=False") == {False}


def test_an_arm_is_timed_by_steps_of_a_real_run(data_dir, tmp_path, monkeypatch):
    """The probe's losses are those that train.py logs for the same values: its data, its seeds, its
    learning rates."""
    what = arguments(data_dir, tmp_path / "sweep", "--axis=norm", "--gradient_accumulation_steps=2")
    found = sweep.Sweep([*what, "--compile=False", "--dropout=0.1"], "")
    values = found.run_values(found.arms["base"]) | {"seed": 5, "data_seed": 7, "log_interval": 1}
    losses, train_step = [], train.train_step

    def step(run):
        losses.append(train_step(run)[0])
        return losses[-1], 0.0

    monkeypatch.setattr(train, "train_step", step)
    probe = measure.Probe(values)
    assert all(probe.step() > 0 for _ in range(4))
    assert probe.evaluate() > 0 and len(probe.decode()) == 7
    out = tmp_path / "run"
    monkeypatch.setattr(train, "train_step", train_step)
    argv = [f"--{key}={value}" for key, value in values.items()]
    assert not train.main([*argv, f"--out_dir={out}"])
    assert [row["loss"] for row in read_rows(out / "log.jsonl") if "loss" in row] == losses
    assert not (tmp_path / "sweep").exists()
