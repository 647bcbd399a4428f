"""A stand-in for train.py that a sweep runs in milliseconds, and the fixtures that drive it."""

from pathlib import Path

import pytest

import ablate
from bench.ablation import arms, fingerprint, report, runs, settings, step_times, sweep
from common.configurator import build
from common.runtime import versions
from parts import costs
from parts.architectures import configure
from training.run_folder import read_rows

# What train.py shows from the outside. The words of an arm say what happens: rope is better by
# 0.05, dyt crashes, batchnorm diverges, alibi hangs; the rest is noise of the seeds. It saves on
# SIGTERM, and notes every step that it takes.
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
    config = given | {"versions": {"git_commit": "abc", "hardware": HARDWARE}}
    (out / "config.json").write_text(json.dumps(config))
    (out / "log.jsonl").write_text("")
    step = 0
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
position = given.get("position")
if given.get("norm") == "dyt":
    sys.exit("some warning\\nerror: out of memory (batch_size=4): choose a smaller one")
if given.get("norm") == "batchnorm":
    (out / "diverged.json").write_text(json.dumps({"step": 1, "reason": "loss nan at step 1"}))
    sys.exit("error: loss nan at step 1 (no checkpoint yet): try a lower learning_rate")
while position == "alibi":
    time.sleep(0.05)
noise = random.Random(given["seed"]).gauss(0, 0.01)
noise += random.Random(given["data_seed"]).gauss(0, 0.02)
rate, best = float(given["learning_rate"]), 2e-3 if position == "rope" else 1e-3
offset = noise - 0.05 * (position == "rope") + (rate / best - 1) ** 2
while step < int(given["max_iters"]) and not stopped:
    time.sleep(float(os.environ.get("STUB_SLEEP", 0)))
    step += 1
    loss = 3 - 0.1 * step + offset
    row = {"step": step, "train_loss": loss, "val_loss": loss, "bits_per_byte": loss}
    more = 0.1 - 3 * (rate / 1e-3 - 1) ** 2  # so that the reported half would choose another rate
    row |= {"val_loss_tune": loss - 0.1, "val_loss_report": loss + more}
    row |= {"val_blocks": [loss, loss + 0.2]}
    with open(out / "steps.txt", "a") as file:
        file.write(f"{step}\\n")
    with open(out / "log.jsonl", "a") as file:
        file.write(json.dumps(row | {"seconds": 0.1 * step}) + "\\n")
if not os.environ.get("STUB_FORGETS"):
    (out / "ckpt" / f"{step:06d}").mkdir(parents=True, exist_ok=True)
(out / "latest").write_text(str(step))
sys.exit(143 if stopped else 0)
""".replace("HARDWARE", repr(versions("cpu")["hardware"]))


def read_sweep(argv):
    """(AblateConfig, {key of train.py: value}) of the command line of one sweep."""
    (made,) = settings.read(argv, "")
    return made.config, made.base


# A driver in a process of its own, on the stub.
DRIVER = """
import sys
from types import SimpleNamespace
sys.path[:0] = [{root!r}, {root!r} + "/bench"]
import ablate, bench.ablation
from bench.ablation import runs, step_times
from common.errors import run
step_times.ROUNDS, runs.POLL = 1, 0.02
step_times.why_disturbed = lambda *args: ""
step_times.wait_until_quiet = lambda *args: True
runs.measure_trained = lambda job, device: {{"extrapolation": {{}}, "sample": None}}
bench.ablation.report = SimpleNamespace(
    judge=lambda folders: folders, write=lambda _: "page", terminal=lambda _: "the table"
)
run(lambda argv: ablate.main(argv, {stub!r}))
"""


def arguments(data_dir, out, *more):
    """The command line of a small sweep."""
    return [
        *("--dataset=words", f"--data_dir={data_dir}", f"--out_dir={out}"),
        *("--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=4"),
        *("--max_iters=4", "--eval_interval=2", "--warmup_iters=0", "--learning_rate=1e-3"),
        *("--device=cpu", "--workers=2", "--lr_grid=[1]", "--curve=[]"),
        *more,
    ]


def arm(**named):
    return f"--arms={named!r}"


def names(base=None, **config):
    """{name: Arm} of a configuration of the sweep."""
    base = {"model": "gpt2"} | (base or {})
    made = arms.list_arms(build(settings.AblateConfig, {"curve": []} | config), base)
    return {each.name: each for each in made}


def rows_of(out):
    """{(arm, seed, lr, purpose): the last row}"""
    rows = read_rows(Path(out) / "rows.jsonl")
    return {(row["arm"], row["seed"], row["lr"], row["purpose"]): row for row in rows}


def steps_of(row_or_folder):
    """The steps that the stub took in a run's folder, in their order."""
    folder = row_or_folder["out_dir"] if isinstance(row_or_folder, dict) else row_or_folder
    return (Path(folder) / "steps.txt").read_text().split()


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    path = tmp_path_factory.mktemp("stub") / "train.py"
    path.write_text(STUB)
    return str(path)


@pytest.fixture
def out(tmp_path):
    """The folder of the sweep, which is not there yet."""
    return tmp_path / "out"


@pytest.fixture
def same_code(monkeypatch):
    """All arms compute the same, so that no fingerprint takes time."""
    monkeypatch.setattr(fingerprint, "compute", lambda values, kind: {"loss": [1.0]})


def made_up_times(arms, threads, rounds=None, tries=1):
    """The rows of time_arms, without training steps."""
    rows = []
    for name, values in arms.items():
        model = configure(values, as_variant=True)
        row = {"arm": name, "parameters": costs.parameters(model), "threads": threads}
        row["kv_bytes_per_token"] = costs.kv_bytes_per_token(model)
        row |= {"milliseconds_per_step": {"median": 1.0}, "step_ratio": None}
        rows.append(row | {"quiet": True, "disturbed": ""})
    return rows, {}


@pytest.fixture
def quick(monkeypatch, same_code):
    """A report that these tests do not read, and short measurements."""

    def write(outs):
        (Path(outs[0]) / "report.md").write_text("report")
        return Path(outs[0]) / "report.md"

    monkeypatch.setattr(report, "judge", lambda outs: outs)
    monkeypatch.setattr(report, "write", write)
    monkeypatch.setattr(report, "terminal", lambda outs: "the table")
    monkeypatch.setattr(step_times, "time_arms", made_up_times)
    monkeypatch.setattr(runs, "measure_trained", lambda *_: {"extrapolation": {}, "sample": None})
    monkeypatch.setattr(runs, "POLL", 0.02)


@pytest.fixture
def planned(data_dir, out, same_code, monkeypatch):
    """planned(*options): a small sweep that is ready to run in `out`. Its arms are believed to
    change something: `drive` checks that."""
    monkeypatch.setattr(sweep, "check_changes_output", lambda *_: None)
    return lambda *options: ablate.make_sweeps(arguments(data_dir, out, *options))[0]


@pytest.fixture
def drive(data_dir, out, quick, stub):
    """drive(*options): the exit status of a small sweep in `out`, whose runs are the stand-in's."""
    return lambda *options, trainer=stub: ablate.main(arguments(data_dir, out, *options), trainer)
