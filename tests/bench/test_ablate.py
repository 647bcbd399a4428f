"""The ablation driver: its designs, what it refuses, and what it does when runs crash, hang, are stopped or killed. Most
sweeps here train with a stub of train.py; one trains for real."""

import ast
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ablate
import train
from bench.ablation import (
    arms,
    designs,
    launch,
    measure,
    outcome,
    report,
    settings,
    source,
    stats,
    sweep,
)
from bench.ablation.terminal import Progress
from common import runtime
from common.configurator import build
from common.errors import UserError
from common.files import ROOT
from common.runtime import set_up
from parts import costs, mlp
from parts.architectures import ARCH, configure, make
from parts.variant import POSITION
from prepare import prepare
from training.run_folder import hold, read_rows

# What train.py shows from the outside. The words of an arm say what happens: rope is better by 0.05, dyt crashes, alibi
# hangs; the rest is noise of the seeds. It saves on SIGTERM, and notes every step that it takes.
STUB = """
import fcntl, json, os, random, signal, sys, time
from pathlib import Path

given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
out = Path(given["out_dir"])
lock = open(out / "lock", "a+")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
if given.get("init_from") == "resume":
    given = json.loads((out / "config.json").read_text())
    step = max(int(path.name) for path in (out / "ckpt").iterdir())
else:
    (out / "config.json").write_text(json.dumps(given | {"versions": {"git_commit": "abc", "hardware": "stub"}}))
    (out / "log.jsonl").write_text("")
    step = 0
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
if given.get("norm") == "dyt":
    sys.exit("some warning\\nerror: loss nan at step 1 (no checkpoint yet): try a lower learning_rate")
while given.get("position") == "alibi":
    time.sleep(0.05)
noise = random.Random(given["seed"]).gauss(0, 0.01) + random.Random(given["data_seed"]).gauss(0, 0.02)
rate = float(given["learning_rate"])
best = {"rope": 2e-3}.get(given.get("position"), 1e-3)
end = int(given["max_iters"])
while step < end and not stopped:
    time.sleep(float(os.environ.get("STUB_SLEEP", 0)))
    step += 1
    loss = 3 - 0.1 * step + noise - 0.05 * (given.get("position") == "rope") + (rate / best - 1) ** 2
    with open(out / "steps.txt", "a") as file:
        file.write(f"{step}\\n")
    with open(out / "log.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "train_loss": loss, "val_loss": loss, "bits_per_byte": loss, "seconds": 0.1 * step}) + "\\n")
if not os.environ.get("STUB_FORGETS"):
    (out / "ckpt" / f"{step:06d}").mkdir(parents=True, exist_ok=True)
(out / "latest").write_text(str(step))
sys.exit(143 if stopped else 0)
"""
# A driver in a process of its own, on the stub.
DRIVER = """
import sys
from types import SimpleNamespace
sys.path[:0] = [{root!r}, {root!r} + "/bench"]
import ablate, bench.ablation
from bench.ablation import launch, measure, outcome
from common.errors import run
measure.ROUNDS, launch.POLL = 1, 0.02
outcome.measure_trained = lambda job: {{"extrapolation": {{}}, "sample": None}}
bench.ablation.report = SimpleNamespace(write=lambda outs: None, table=lambda out: "the table")
run(lambda argv: ablate.main(argv, {stub!r}))
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    words = ["the", "king", "of", "rome", "shall", "speak", "no", "more"]
    (folder / "words.txt").write_text(
        "".join(rng.choice(words) + rng.choice("    \n") for _ in range(1200)), encoding="utf-8"
    )
    prepare("words", input=str(folder / "words.txt"), tokenizer="char", data_dir=str(folder))
    return folder


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    path = tmp_path_factory.mktemp("stub") / "train.py"
    path.write_text(STUB)
    return str(path)


@pytest.fixture
def quick(monkeypatch):
    """A report that is not looked at here, and short measurements."""

    def write(outs):
        (Path(outs[0]) / "report.md").write_text("report")

    monkeypatch.setattr(report, "write", write)
    monkeypatch.setattr(report, "table", lambda out: "the table")
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(
        outcome, "measure_trained", lambda job: {"extrapolation": {}, "sample": None}
    )
    monkeypatch.setattr(launch, "POLL", 0.02)


def arguments(data_dir, out, *more):
    return [
        "--dataset=words",
        f"--data_dir={data_dir}",
        f"--out_dir={out}",
        "--n_layer=2",
        "--n_head=2",
        "--n_embd=32",
        "--block_size=16",
        "--batch_size=4",
        "--max_iters=4",
        "--eval_interval=2",
        "--warmup_iters=0",
        "--learning_rate=1e-3",
        "--device=cpu",
        "--workers=2",
        *more,
    ]


def arm(**named):
    return f"--arms={named!r}"


def rows_of(out):
    """{(arm, seed, lr, purpose): the last row}"""
    return {
        (row["arm"], row["seed"], row["lr"], row["purpose"]): row
        for row in read_rows(Path(out) / "rows.jsonl")
    }


def losses(out):
    return {
        name: (row["final_val_loss"], row["best_val_loss"], row["curve"])
        for name, row in rows_of(out).items()
        if row["status"] == "done"
    }


# ---------------------------------------------------------------- designs


def names(base={}, **config):
    return {
        found.name: found
        for found in designs.enumerate_arms(
            build(settings.AblateConfig, config), {"model": "gpt2"} | base
        )
    }


def test_designs_come_from_the_dictionaries():
    differ = {key for key in ARCH["gpt2"] if ARCH["gpt2"][key] != ARCH["llama"][key]}
    for design, corner, other in (
        ("leave_one_in", "gpt2", "llama"),
        ("leave_one_out", "llama", "gpt2"),
    ):
        found = names({"model": corner}, design=design)
        assert list(found)[0] == "base" and list(found)[-1] == "base again"
        assert {key for name in found for key in found[name].changes} == differ
        assert all(
            ARCH[other][key] == value
            for each in found.values()
            for key, value in each.changes.items()
        )
    assert "bias=none" not in names(
        {"bias": False}, design="leave_one_in"
    )  # the base has that already
    assert {
        each.changes["position"] for each in names(axis="position").values() if each.changes
    } == set(POSITION) - {"learned"}
    assert set(names(design="archs")) - {"base", "base again"} == set(ARCH) - {"gpt2"}
    assert set(names(design="archs", archs=["mistral"], again=False)) == {"base", "mistral"}
    pairs = [each for each in names(design="pairs").values() if each.pair]
    assert (
        len(pairs) == len(differ) * (len(differ) - 1) // 2
        and pairs[0].pair == ["rope", "rmsnorm"]
        and pairs[0].changes.keys() == {"position", "norm"}
    )
    mixed = names(design="leave_one_in,axis", axis="block", arms={"wide": dict(mlp_width=64)})
    assert {"rope", "sandwich", "wide"} <= set(mixed)


def test_ladder_goes_from_one_corner_to_the_other():
    found = list(
        names(
            design="ladder",
            order=["norm", "position", "mlp", "tie_embeddings", "bias", "gqa"],
            arms={"gqa": dict(n_kv_head=1)},
            again=False,
        ).values()
    )
    assert [each.name for each in found] == [
        "base",
        "+rmsnorm",
        "+rope",
        "+swiglu",
        "+tie_embeddings=False",
        "+bias=none",
        "+gqa",
    ]
    assert [each.against for each in found[1:]] == [each.name for each in found[:-1]]
    sizes = {"model": "gpt2", "n_head": 2, "n_embd": 32}
    assert settings.variant_config(
        arms.with_changes(sizes, found[-2].changes)
    ) == settings.variant_config(sizes | {"model": "llama"})
    assert found[-1].changes == found[-2].changes | {"n_kv_head": 1}


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted((ROOT / "config").glob("*.py"))
        if "bench/ablate.py" in path.read_text()
    ],
    ids=lambda path: path.stem,
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_shipped_sweep_is_valid(path, device):
    """Its arms are accepted and matched, on a CPU and for a GPU (read as on a login node, which has none)."""
    config, base = settings.read([str(path), f"--device={device}", "--emit=slurm"], "")
    found = {each.name: each for each in designs.enumerate_arms(config, base)}
    for each in found.values():
        arms.check_arm(each, base | {"device": "cpu"})
        arms.match_arm(each, found["base"], config.match, 65)
    assert (
        len(found) > 6
        and config.question != settings.AblateConfig.question
        and config.out_dir != settings.AblateConfig.out_dir
    )


# ---------------------------------------------------------------- what is found before the first run


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
        (["--design=leave_one_in", "--budget=soon"], r"budget=soon is no time"),
        (["--design=leave_one_in", "--budget=1s"], r"3 seeds of each arm take about"),
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
    """A rotation that is skipped, as in a published "NoPE = RoPE" result: matched in parameters or not."""
    monkeypatch.setitem(slot, word, slot[like])
    key = "position" if slot is POSITION else "mlp"
    base = [f"--{key}={like}"]
    with pytest.raises(
        UserError, match=f"the arm dead changes nothing: its logits are those of base .{key}={word}"
    ):
        ablate.main(
            arguments(
                data_dir, tmp_path / "out", *base, arm(fine=dict(norm="rmsnorm"), dead={key: word})
            ),
            stub,
        )
    assert not (tmp_path / "out").exists()


def test_every_word_bites_and_so_do_keys_of_training(data_dir, tmp_path):
    """No arm that the dictionaries offer is refused; optimizer, dropout and rate bite in training alone."""
    base = settings.read(arguments(data_dir, tmp_path, "--axis=norm"), "")[1]
    for config in (
        *(dict(axis=axis) for axis in ("position", "norm", "mlp", "block", "qk_norm")),
        dict(design="archs"),
        dict(
            arms=dict(
                muon=dict(optimizer="muon"), drop=dict(dropout=0.1), slow=dict(learning_rate=5e-4)
            )
        ),
    ):
        found = names(base, **config)
        for each in found.values():
            arms.check_arm(each, base)
            if each.changes:
                arms.check_bite(each, found[each.against], 29)


@pytest.mark.parametrize("config", [dict(design="leave_one_in"), dict(design="archs")], ids=str)
@pytest.mark.parametrize("kind", ["params", "flops"])
def test_matched_arms_cost_what_the_base_does(data_dir, tmp_path, config, kind):
    base = settings.read(
        arguments(data_dir, tmp_path, "--axis=norm", "--n_embd=64", "--n_head=4"), ""
    )[1]
    found = names(base, **config)
    cost = {"params": costs.parameters, "flops": lambda c: costs.flops_per_token(c, 16)}[kind]
    for each in found.values():
        arms.check_arm(each, base)
        arms.match_arm(each, found["base"], kind, 29)
        c, b = (
            settings.variant_config(values | {"vocab_size": 29}) for values in (each.values, base)
        )
        assert abs(cost(c) / cost(b) - 1) <= 0.005, each.name
        assert (each.match is None) == (each.name in ("base", "base again"))
        if each.match:
            assert each.match["residual_percent"] == pytest.approx(
                100 * (cost(c) / cost(b) - 1)
            ) and each.match["mlp_width"] == costs.mlp_width(c)


def test_matched_in_time_is_matched_in_steps(data_dir, tmp_path):
    base = settings.read(arguments(data_dir, tmp_path, "--axis=norm", "--max_iters=100"), "")[1]
    found = names(base, arms=dict(slow=dict(norm="rmsnorm")))
    for each in found.values():
        arms.check_arm(each, base)
        arms.match_arm(each, found["base"], "time", 29, {"base": 2.0, "slow": 3.0})
    assert found["slow"].values["max_iters"] == 67 and found["slow"].match[
        "residual_percent"
    ] == pytest.approx(0.5)
    assert found["base"].values["max_iters"] == 100


def test_the_hash_of_the_code_ignores_comments_alone():
    def of(text):
        return source.digest(source.without_docstrings(ast.parse(text)))

    plain = of("def f(x):\n    return x + 1\n")
    assert plain == of(
        '"""Doc."""\ndef f(x):  # why\n    """What."""\n    return (x +\n        1)\n'
    )
    assert (
        plain != of("def f(x):\n    return x + 2\n")
        and plain != of("def f(x):\n    return x - 1\n")
        and plain != of("def f(y):\n    return y + 1\n")
    )
    assert of("x = 'a'") != of("x = 'b'")


def test_the_hash_of_the_code_covers_all_rooms_that_train_reaches():
    found = source.sources()
    code = "import sys, train; print(*(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = {Path(file).relative_to(ROOT) for file in done.stdout.split() if str(ROOT) in file}
    loaded = {file.as_posix() for file in loaded if ".venv" not in file.parts}
    assert len(loaded) > 25 and loaded <= found.keys()
    assert {
        "train.py",
        "model.py",
        "model_llama.py",
        "training/__init__.py",
        "training/optim.py",
        "tokens/batches.py",
        "parts/attention.py",
    } <= found.keys()
    assert not any(file.startswith(("bench/", "tests/")) for file in found)


def test_the_hash_of_the_code_follows_dotted_and_lazy_imports(tmp_path, monkeypatch):
    files = {
        "train.py": "from room import part\n\ndef late():\n    import other.lazy\n    import numpy\n",
        "room/__init__.py": "",
        "room/part.py": "RATE = 1  # a comment\n",
        "other/__init__.py": "",
        "other/lazy.py": "X = 1\n",
        "alone.py": "X = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(source, "ROOT", tmp_path)
    assert source.sources().keys() == files.keys() - {"alone.py"}
    plain = source.code_hash()

    def changed(name, text):
        (tmp_path / name).write_text(text)
        found = source.code_hash() != plain
        (tmp_path / name).write_text(files[name])
        return found

    for name in ("room/part.py", "other/lazy.py", "room/__init__.py", "train.py"):
        assert changed(name, files[name] + "Y = 2\n"), name
    assert changed("room/part.py", "RATE = 2\n")
    assert not changed("room/part.py", '"""A docstring."""\nRATE = 1  # another comment\n')
    assert not changed("alone.py", "X = 2\n")


def test_a_constant_of_the_optimizer_changes_the_hash_and_a_comment_does_not(tmp_path, monkeypatch):
    for file in source.sources():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text(encoding="utf-8"), encoding="utf-8")
    before = source.code_hash()
    monkeypatch.setattr(source, "ROOT", tmp_path)
    assert source.code_hash() == before
    optim = tmp_path / "training" / "optim.py"
    text = optim.read_text(encoding="utf-8")
    optim.write_text(text + "# a comment\n", encoding="utf-8")
    assert source.code_hash() == before
    assert "0.5 * (1 + math.cos" in text
    optim.write_text(text.replace("0.5 * (1 + math.cos", "0.6 * (1 + math.cos"), encoding="utf-8")
    assert source.code_hash() != before


# ---------------------------------------------------------------- compiling and timing


def test_compile_is_settled_once_by_the_whole_work_of_the_base(data_dir, tmp_path, monkeypatch):
    """All arms get what train.py would choose for the base, of which gradient accumulation is a part."""
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
    assert train.main(
        [*(f"--{key}={value}" for key, value in values.items()), f"--out_dir={out}"]
    ) in (0, None)
    assert [row["loss"] for row in read_rows(out / "log.jsonl") if "loss" in row] == losses
    assert not (tmp_path / "sweep").exists()


# ---------------------------------------------------------------- sweeps with the stub


def test_crash_and_hang_are_failed_rows_and_the_others_run(data_dir, tmp_path, quick, stub, capsys):
    out = tmp_path / "out"
    status = ablate.main(
        arguments(
            data_dir,
            out,
            arm(crash=dict(norm="dyt"), hang=dict(position="alibi"), rope=dict(position="rope")),
            "--seeds=2",
            "--limit=1s",
        ),
        stub,
    )
    rows = rows_of(out)
    assert status == 1 and (out / "report.md").exists() and len(rows) == 10
    assert {name[0] for name, row in rows.items() if row["status"] == "failed"} == {"crash", "hang"}
    assert (
        rows["crash", 0, 1, "report"]["reason"]
        == "loss nan at step 1 (no checkpoint yet): try a lower learning_rate"
    )
    assert rows["hang", 1, 1, "report"]["reason"] == "over the limit of 1 s"
    assert "the table" in capsys.readouterr().out
    done = [row for row in rows.values() if row["status"] == "done"]
    commands = [
        dict(word[2:].split("=", 1) for word in row["command"].split() if word.startswith("--"))
        for row in done
    ]
    assert all(
        command["data_seed"] == str(row["seed"]) for command, row in zip(commands, done)
    )  # pairs share the data
    assert len({command["seed"] for command in commands}) == len(
        done
    )  # and no two share an initialisation
    assert all(
        row["curve"][-1] == [4, row["final_val_loss"]]
        and row["git_commit"] == "abc"
        and row["hardware"] == "stub"
        for row in done
    )
    sweep = json.loads((out / "sweep.json").read_text())
    assert (
        list(sweep["arms"]) == ["base", "crash", "hang", "rope", "base again"]
        and sweep["arms"]["base again"]["again"]
    )
    assert all(
        row["config_hash"] == sweep["arms"][row["arm"]]["config_hash"]
        and row["code_hash"] == sweep["code_hash"]
        for row in rows.values()
    )
    assert (
        len({each["config_hash"] for each in sweep["arms"].values()}) == 4
    )  # the base again is the base
    assert {row["arm"] for row in read_rows(out / "costs.jsonl")} == set(sweep["arms"])
    steps = (Path(rows["rope", 0, 1, "report"]["out_dir"]) / "steps.txt").read_text()
    ablate.main(
        arguments(
            data_dir, out, arm(crash=dict(norm="dyt"), rope=dict(position="rope")), "--seeds=2"
        ),
        stub,
    )
    assert (
        Path(rows["rope", 0, 1, "report"]["out_dir"]) / "steps.txt"
    ).read_text() == steps and len(
        read_rows(out / "rows.jsonl")
    ) == 12  # the two that failed are tried again


def test_each_arm_gets_its_own_learning_rate_on_seeds_that_are_not_reported(
    data_dir, tmp_path, quick, stub
):
    out = tmp_path / "out"
    assert (
        ablate.main(
            arguments(
                data_dir,
                out,
                arm(rope=dict(position="rope")),
                "--seeds=2",
                "--tune_seeds=1",
                "--lr_grid=[0.5,1,2]",
                "--min_lr=1e-4",
            ),
            stub,
        )
        == 0
    )
    rows, sweep = rows_of(out), json.loads((out / "sweep.json").read_text())
    assert sweep["chosen_lr"] == {"base": 1, "rope": 2, "base again": 1}
    tuned, reported = (
        {name[1] for name in rows if name[3] == purpose} for purpose in ("tune", "report")
    )
    assert tuned == {1000} and reported == {0, 1} and len(rows) == 2 * 3 + 3 * 2
    assert {name[2] for name in rows if name[0] == "rope" and name[3] == "report"} == {2}
    assert (
        "--learning_rate=0.002 " in rows["rope", 0, 2, "report"]["command"]
        and "--min_lr=0.0002 " in rows["rope", 0, 2, "report"]["command"]
    )


def test_a_budget_goes_to_the_arms_that_are_undecided(
    data_dir, tmp_path, quick, stub, monkeypatch, capsys
):
    out, asked = tmp_path / "out", []

    def undecided(sweep, rows):
        asked.append(max(row["seed"] for row in rows) + 1)
        return {"gelu_erf": 3} if asked[-1] < 4 else {}

    monkeypatch.setattr(stats, "undecided", undecided)
    assert (
        ablate.main(
            arguments(
                data_dir,
                out,
                arm(gelu_erf=dict(mlp="gelu_erf"), rope=dict(position="rope")),
                "--seeds=2",
                "--budget=1h",
            ),
            stub,
        )
        == 0
    )
    counts = {
        name: sum(row[0] == name for row in rows_of(out))
        for name in ("base", "gelu_erf", "rope", "base again")
    }
    assert counts == {"base": 4, "gelu_erf": 4, "rope": 2, "base again": 4} and asked == [2, 4]
    assert json.loads((out / "sweep.json").read_text())["looks"] == [2, 4, 8]
    printed = capsys.readouterr().out
    assert (
        printed.index("about ") < printed.index("[1/8]") and "nothing is undecided" in printed
    )  # the cost is told first


def test_the_budget_is_kept(data_dir, tmp_path, quick, stub, monkeypatch, capsys):
    def undecided(sweep, rows):
        for row in rows:
            row["wall_seconds"] = (
                1000.0  # six runs, two at a time: 3000 s are gone, however slow the machine that foretold them
            )
        return [("rope", None)]

    monkeypatch.setattr(stats, "undecided", undecided)
    assert (
        ablate.main(
            arguments(
                data_dir,
                tmp_path / "out",
                arm(rope=dict(position="rope")),
                "--seeds=2",
                "--budget=2000s",
            ),
            stub,
        )
        == 0
    )
    assert (
        len(rows_of(tmp_path / "out")) == 6
        and "do not pay for 2 more seeds of rope" in capsys.readouterr().out
    )


def test_stale_rows_are_not_mixed_in(data_dir, tmp_path, quick, stub, monkeypatch, capsys):
    out, what = tmp_path / "out", [arm(rope=dict(position="rope")), "--seeds=1", "--again=False"]
    ablate.main(arguments(data_dir, out, *what), stub)
    first = rows_of(out)
    monkeypatch.setattr(sweep, "code_hash", lambda: "another")
    assert ablate.main(arguments(data_dir, out, *what), stub) == 0
    assert "2 rows here are of other code or another configuration" in capsys.readouterr().out
    assert {row["code_hash"] for row in rows_of(out).values()} == {"another"} and len(
        read_rows(out / "rows.jsonl")
    ) == 4
    assert (out / "runs" / "rope-s0-lr1.old1" / "steps.txt").exists()  # kept aside
    ablate.main(arguments(data_dir, out, *what, "--max_iters=3"), stub)
    assert {row["curve"][-1][0] for row in rows_of(out).values()} == {3} and first[
        "rope", 0, 1, "report"
    ]["curve"][-1][0] == 4


def test_a_second_driver_on_a_folder_is_refused(data_dir, tmp_path, quick, stub, capsys):
    out = tmp_path / "out"
    out.mkdir()
    with hold(out) as held:
        held.write("1234")
        held.flush()
        with pytest.raises(UserError, match="process 1234 is training here"):
            ablate.main(arguments(data_dir, out, arm(rope=dict(position="rope"))), stub)
    assert not (out / "sweep.json").exists() and "timing" not in capsys.readouterr().out


def test_a_dry_run_tells_and_writes_nothing(data_dir, tmp_path, quick, stub, capsys):
    out = tmp_path / "out"
    assert ablate.main(arguments(data_dir, out, "--design=leave_one_in", "--dry_run"), stub) == 0
    printed = capsys.readouterr().out
    assert (
        not out.exists()
        and "7 arms, 0 runs to choose learning rates, 21 to report; 2 at a time: about" in printed
    )
    assert (
        sum(line.startswith("python ") and "--data_seed=" in line for line in printed.splitlines())
        == 21
    )
    assert (
        ablate.main(
            arguments(data_dir, out, "--design=leave_one_in", "--dry_run", "--emit=slurm"), stub
        )
        == 0
        and not out.exists()
    )


def test_a_slurm_array_is_written_and_gathered(data_dir, tmp_path, quick, stub, capsys):
    out, what = tmp_path / "out", [arm(rope=dict(position="rope")), "--seeds=1", "--again=False"]
    assert ablate.main(arguments(data_dir, out, *what, "--emit=slurm"), stub) == 0
    script = (out / "slurm.sh").read_text()
    assert (
        "#SBATCH --array=0-1\n" in script
        and "--gres" not in script
        and len((out / "commands.txt").read_text().splitlines()) == 2
    )
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for task in ("0", "1", "1"):  # the last one once more, as after a requeue
        subprocess.run(
            ["bash", out / "slurm.sh"],
            env=environment | {"SLURM_ARRAY_TASK_ID": task},
            check=True,
            timeout=60,
        )
    assert (
        ablate.main(arguments(data_dir, out, *what), "no/trainer.py") == 0
    )  # nothing is left to train
    assert {row["status"] for row in rows_of(out).values()} == {"done"} and len(rows_of(out)) == 2
    assert (Path(out) / "runs" / "rope-s0-lr1" / "steps.txt").read_text().split() == [
        "1",
        "2",
        "3",
        "4",
    ]


def alive(out):
    """Processes that still train in a sweep's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [entry.parent.name] if f"--out_dir={out}/runs" in entry.read_text() else []
        except OSError:
            pass
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for orphans in /proc")
def test_stopped_and_killed_it_goes_on_and_ends_alike(data_dir, tmp_path, quick, stub):
    """Ctrl-C, then kill -9, then to the end: the rows are those of a sweep that nobody disturbed, no step is taken twice."""
    driver, out = tmp_path / "driver.py", tmp_path / "out"
    driver.write_text(DRIVER.format(root=str(ROOT), stub=stub))
    what = [arm(rope=dict(position="rope")), "--seeds=2"]
    command, environment = (
        [sys.executable, driver, *arguments(data_dir, out, *what)],
        os.environ | {"OMP_NUM_THREADS": "1", "STUB_SLEEP": "0.15"},
    )
    for number, rows in ((signal.SIGINT, 1), (signal.SIGKILL, 3)):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        limit = time.monotonic() + 60
        while (
            len(read_rows(out / "rows.jsonl")) < rows
            and process.poll() is None
            and time.monotonic() < limit
        ):
            time.sleep(0.02)
        time.sleep(0.25)  # into the next runs
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGINT else -9)
        limit = time.monotonic() + (0 if number == signal.SIGINT else 10)
        while alive(out) and time.monotonic() < limit:
            time.sleep(0.02)
        assert not alive(out)  # no orphans
        begun = [
            folder
            for folder in (out / "runs").iterdir()
            if not (folder / "steps.txt").exists()
            or len((folder / "steps.txt").read_text().split()) < 4
        ]
        assert len(rows_of(out)) < 6 and begun  # the runs stopped with their driver
    with open(out / "rows.jsonl", "a") as file:
        file.write('{"arm": "ro')  # a row that a power cut tore
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0 and "the table" in process.stdout
    assert ablate.main(arguments(data_dir, tmp_path / "straight", *what), stub) == 0
    assert losses(out) == losses(tmp_path / "straight") and len(losses(out)) == 6
    for row in rows_of(out).values():
        assert (Path(row["out_dir"]) / "steps.txt").read_text().split() == ["1", "2", "3", "4"]


def test_the_table_on_a_terminal_is_redrawn(capsys):
    jobs = [launch.Job("rope", seed, 1, "report", "out", {}, "c", "h", "d") for seed in range(2)]
    row = {
        "arm": "rope",
        "status": "done",
        "final_val_loss": 1.5,
        "best_val_loss": 1.25,
        "wall_seconds": 20.0,
    }
    sweep = SimpleNamespace(
        rows={},
        arms={"rope": None},
        predicted={"rope": 10.0},
        slots=[(None, 1)],
        config=SimpleNamespace(metric="final_val_loss"),
    )
    with Progress(sweep, jobs, terminal=True) as progress:
        sweep.rows[jobs[0].key] = row
        capsys.readouterr()
        progress.show(jobs[0], row)
        first = capsys.readouterr().out
        # 20 s: what the first run took, and not the 10 s that were predicted
        for words in ("1/2", "1.5000", "1.2500", "20 s"):
            assert words in first
        progress.show(jobs[0], row)
        lines_up = capsys.readouterr().out.count("\x1b[1A")
        assert lines_up == len(first.splitlines()) - 1 == 2


def test_workers_share_cores_and_gpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert launch.worker_slots(4, "cpu") == [(None, 2)] * 4 and launch.worker_slots(
        None, "cpu"
    ) == [(None, 8)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert launch.worker_slots(4, "cuda") == [
        ("2", 2),
        ("5", 2),
        ("2", 2),
        ("5", 2),
    ] and launch.worker_slots(None, "cuda:1") == [("5", 8)]


def test_ray_runs_a_sweep_on_two_nodes(data_dir, tmp_path, quick, stub, monkeypatch):
    monkeypatch.setenv("STUB_FORGETS", "1")  # the nodes would measure a model that is none
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        out, what = (
            tmp_path / "out",
            [arm(rope=dict(position="rope"), crash=dict(norm="dyt")), "--seeds=2", "--again=False"],
        )
        assert ablate.main(arguments(data_dir, out, *what, "--engine=ray"), stub) == 1
        rows = rows_of(out)
        assert len(rows) == 6 and {
            name[0] for name, row in rows.items() if row["status"] == "failed"
        } == {"crash"}
        assert len({row["node"] for row in rows.values()}) == 2
        ablate.main(
            arguments(data_dir, out, *what, "--engine=ray"), stub
        )  # again: what is done is done
        assert (
            Path(rows["rope", 0, 1, "report"]["out_dir"]) / "steps.txt"
        ).read_text().split() == ["1", "2", "3", "4"]
    finally:
        ray.shutdown()
        cluster.shutdown()


# ---------------------------------------------------------------- for real


def test_a_real_sweep(data_dir, tmp_path):
    """Two arms, two seeds, trained by train.py, reported; and gone on with, which changes nothing."""
    out = tmp_path / "out"
    what = arguments(
        data_dir,
        out,
        arm(rope=dict(position="rope")),
        "--seeds=2",
        "--again=False",
        "--max_iters=12",
        "--eval_interval=6",
        "--prompt=the",
    )
    assert ablate.main(what) == 0
    rows = rows_of(out)
    assert len(rows) == 4 and all(
        row["status"] == "done"
        and row["best_val_loss"] <= row["final_val_loss"] < row["curve"][0][1]
        for row in rows.values()
    )
    base, rope = rows["base", 0, 1, "report"], rows["rope", 0, 1, "report"]
    assert (
        [point[0] for point in base["curve"]] == [0, 6, 12]
        and base["sample"].startswith("the")
        and len(base["sample"]) == 203
    )
    assert (
        base["extrapolation"]["1"] > 0
        and base["extrapolation"]["2"] is None
        and all(value > 0 for value in rope["extrapolation"].values())
    )
    cost = {row["arm"]: row for row in read_rows(out / "costs.jsonl")}
    assert (
        cost["base"]["milliseconds_per_step"]["median"] > 0
        and cost["rope"]["decode_ms_per_token"]["median"] > 0
        and cost["base"]["threads"] == 1
    )
    assert (
        (out / "report.md").exists()
        and (out / "runs/base-s0-lr1/ckpt").exists()
        and not (out / "runs/base-s1-lr1/ckpt").exists()
    )
    before = (out / "rows.jsonl").read_text()
    assert ablate.main(what) == 0 and (out / "rows.jsonl").read_text() == before


def test_extrapolation_scores_the_same_tokens_with_more_before_them():
    torch.manual_seed(0)
    values = dict(
        model="llama", n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=11, multiple_of=8
    )
    tokens, runtime = np.random.default_rng(0).integers(0, 11, 400), set_up("cpu", "float32")
    model = make(configure(values)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.5)
    found = outcome.extrapolation(model, tokens, runtime, most=64 * 8)  # 8 windows
    ends = np.unique(np.linspace(64, 399, 8).astype(int))
    for n in (1, 4):
        each = [
            torch.nn.functional.cross_entropy(
                model(torch.tensor(tokens[end - 8 * n : end])[None])[0][0, -2:],
                torch.tensor(tokens[end - 1 : end + 1]),
            ).item()
            for end in ends
        ]
        assert found[str(n)] == pytest.approx(sum(each) / len(each), abs=1e-5)
    del values["multiple_of"]
    learned = make(configure(values | {"model": "gpt2"})).eval()
    assert [
        value is None for value in outcome.extrapolation(learned, tokens, runtime).values()
    ] == [False, True, True, True]
    assert (
        outcome.extrapolation(model, tokens[:20], runtime)["8"] is None
    )  # a text too short for it
