"""A sweep folder that nothing trained: losses drawn from a fixed seed around planted effects, in
the form that bench/ablate.py writes, as far as reports read it. An arm's loss at k times the tokens
follows a power law, so what an effect is worth in tokens is known, too."""

import json
from pathlib import Path

import numpy as np

from bench.ablation import plans, rows, verdicts

EFFECTS = {  # arm -> planted effect on the final loss
    "base": 0.0,
    "base-again": 0.0,
    "rope": -0.062,
    "alibi": -0.041,
    "swiglu": -0.012,
    "untied": 0.034,
    "gqa": 0.009,
    "post": 0.2,
}
CHANGES = {
    "base": {},
    "base-again": {},
    "rope": {"position": "rope"},
    "alibi": {"position": "alibi"},
    "untied": {"tie_embeddings": False},
    "gqa": {"n_kv_head": 2},
    "post": {"block": "post"},
}
BLOCKS = 64  # of the validation text, each with its own difficulty
SAMPLE = """ROMEO:
What say you, sir? the {arm} hath not the means
To hold a line of <such> & heavy breath,
And yet the king is come: be still, my lord.

DUKE VINCENTIO:
I know you well; and therefore hold your peace.
"""
TRAIN = "python train.py config/ablate_shakespeare.py"
OF_THE_CODE = {"code_hash": "code1", "git_commit": "0123456789ab"}
SWEEP = {
    "name": "a sweep",
    "also": "",
    "ngrams": {},
    "screening": False,
    "controls": None,
    "question": "Which piece of LLaMA helps a character-level GPT-2 at 0.8 M parameters?",
    "design": "leave_one_in",
    "match": "params",
    "base": "base",
    "base_values": {
        **{"model": "gpt2", "n_layer": 4, "n_embd": 128, "block_size": 64, "match": "none"},
        **{"optimizer": "muon", "learning_rate": 1e-3, "max_iters": 2000, "batch_size": 4},
    },
    "lr_grid": [0.5, 1, 2],
    "curve": [0.25, 0.5, 2],  # multiples of the tokens
    "margin": 0.0052,
    "margin_source": "5 % of the tokens at 1 x on the curve of tokens",
    "max_iters": 2000,
    "command": "python bench/ablate.py config/ablate_shakespeare.py",
    "hardware": "Xeon 2.1 GHz, 2 cores",
    "data": {
        **{"dataset": "shakespeare_char", "fingerprint": "5f2b8c81aa01"},
        **{"train_tokens": 1003854, "vocab_size": 65, "bits_per_byte": 1.4427},
    },
    "versions": {"python": "3.12.3", "torch": "2.13.0", "numpy": "2.4.6"},
    "started": "2026-01-02T03:04:05",
    **OF_THE_CODE,
}
DIVERGED = {
    **dict.fromkeys(("final_val_loss", "final_tune", "final_report", "test_loss", "blocks")),
    **{"status": "diverged", "reason": "the loss is not finite at step 412"},
    **{"extrapolation": {}, "sample": ""},
}
KILLED = DIVERGED | {"status": "failed", "reason": "killed by signal 9 (out of memory?)"}


def loss_of_tokens(multiple):
    """The base's loss at a multiple of the tokens: 1.75 at 1, 0.0052 lower at 1.05."""
    return 1.45 + 0.3 * multiple**-0.35


def make_sweep(
    out,
    seeds=5,
    effects=EFFECTS,
    arms=None,
    noise=0.008,
    diverged=("post",),
    killed=(),
    stale=True,
    costs=True,
    curve_points=21,
    test_split=False,
    **changed,
):
    """Writes OUT and returns (sweep, rows, costs by arm). `changed` overrides keys of sweep.json;
    `arms` adds to its arms; all runs of the arms in `diverged` and `killed` end like that."""
    planned = {name: plan_of(name) for name in effects}
    planned |= {name: planned.get(name, {}) | facts for name, facts in (arms or {}).items()}
    chosen_lr = {name: 2 if name == "untied" else 1 for name in effects}
    sweep = SWEEP | {"chosen_lr": chosen_lr, "seeds": seeds} | changed
    planned |= {f"base x{k:g}": plan_of(f"base x{k:g}", k) for k in sweep["curve"]}
    sweep["arms"] = planned

    row = row_maker(sweep, effects, noise, curve_points, test_split)
    control = plans.control_runs(len(effects.keys() - {"base", "base-again"}), seeds)
    base, again = control if "base-again" in effects else (sum(control), 0)
    runs = dict.fromkeys(effects, seeds) | {"base": base, "base-again": again}
    own = sweep["chosen_lr"].get("base", 1)
    rows = []
    for k in sweep["curve"]:
        rows += [row(f"base x{k:g}", seed, own, "curve", tokens=k) for seed in range(3)]
    for name in effects:
        chosen = sweep["chosen_lr"].get(name, 1)
        for lr in sweep["lr_grid"] if len(sweep["lr_grid"]) > 1 else ():
            if name != "base-again":
                rows.append(row(name, 1000, lr, "tune", penalty=0.03 * abs(np.log2(lr / chosen))))
        ends = DIVERGED if name in diverged else KILLED if name in killed else {}
        rows += [row(name, seed, chosen, "report") | ends for seed in range(runs[name])]
    if stale:
        better = dict.fromkeys(("final_report", "final_val_loss"), 0.5)
        rows.append(row("gqa", seeds, 1, "report") | {"code_hash": "older code"} | better)

    priced = [cost_of(name, i, sweep["hardware"]) for i, name in enumerate(effects) if costs]
    Path(out).mkdir(parents=True, exist_ok=True)
    (Path(out) / "sweep.json").write_text(json.dumps(sweep))
    write_lines(out, rows)
    write_lines(out, priced, "costs.jsonl")
    return sweep, rows, {line["arm"]: line for line in priced}


def write_lines(out, lines, name="rows.jsonl"):
    """Write a file of lines of JSON. Returns its path."""
    path = Path(out) / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def plan_of(name, curve=None):
    """What sweep.json says about an arm; `curve`: the base at that multiple of the tokens."""
    residual = {"untied": -0.8, "gqa": 0.8}.get(name, 0.02)
    match = {"kind": "params", "mlp_width": 512, "residual_percent": residual}
    match["adjusted"] = name == "untied"
    return {
        "changes": {} if curve else CHANGES.get(name, {"mlp": name}),
        "against": "base",
        "replicate": name == "base-again",
        "config_hash": f"c-{name}",
        "code_hash": OF_THE_CODE["code_hash"],
        "match": None if curve or name in ("base", "base-again") else match,
        "curve": curve,
    }


def row_maker(sweep, effects, noise, curve_points, test_split):
    """Returns row(name, seed, lr, purpose, penalty, tokens): each call draws the next run's losses
    with sd `noise`, five times that for the arm untied."""
    random, text = np.random.default_rng(7), np.random.default_rng(8)
    difficulty = text.normal(0, 0.1, BLOCKS)  # of the blocks, the same for all runs
    difficulty -= difficulty.mean()

    def losses(end, steps):
        """The curve [steps] of a run that ends at a loss, on the whole validation text."""
        fall = (4.17 - end) * np.exp(-steps / (0.13 * steps[-1]))
        jitter = random.normal(0, 0.004, len(steps)) * (steps < steps[-1])
        return end + fall + jitter

    def row(name, seed, lr, purpose, penalty=0.0, tokens=1):
        own_noise = random.normal(0, noise * (5 if name == "untied" else 1))
        end = loss_of_tokens(tokens) + effects.get(name, 0.0) + own_noise + penalty
        steps = np.linspace(0, sweep["max_iters"] * tokens, curve_points).round().astype(int)
        curve = losses(end, steps) if curve_points > 1 else np.array([end])
        tune, reported = curve + 0.02, curve - 0.02  # the halves of the text differ by 0.04
        points = np.column_stack([steps, curve, tune, reported]).tolist()
        of_blocks = difficulty + text.normal(0, 0.01, BLOCKS)
        return {
            "arm": name,
            "seed": seed,
            "lr": lr,
            "purpose": purpose,
            "status": "done",
            "reason": None,
            "final_val_loss": float(curve[-1]),
            "final_tune": float(tune[-1]),
            "final_report": float(reported[-1]),
            "train_loss": float(curve[-1] - 0.2),
            "seconds": 180.0 * tokens,
            "curve": [[int(step), *losses] for step, *losses in points],
            "blocks": (reported[-1] + of_blocks - of_blocks.mean()).tolist(),
            "test_loss": float(curve[-1] + 0.1) if test_split else None,
            "extrapolation": extrapolation(name, end),
            "sample": SAMPLE.format(arm=name),
            "config_hash": sweep["arms"][name].get("config_hash"),
            "hardware": sweep["hardware"],
            "command": f"{TRAIN} --out_dir=runs/{name}-s{seed}",
            "out_dir": f"runs/{name}-s{seed}-lr{lr:g}",
            **OF_THE_CODE,
        }

    return row


def extrapolation(name, end):
    """Losses at multiples of the training context: learned positions end there, ALiBi goes on."""
    interval = lambda loss: {"loss": loss, "low": loss - 0.02, "high": loss + 0.02}
    rises = {"rope": (0.0, 0.03, 0.25, 0.7), "alibi": (0.0, 0.03, 0.02, 0.03)}.get(name, (0.0,))
    entries = [interval(end + rise) for rise in rises]
    entries += [{"why": "64 learned positions"}] * (4 - len(rises))
    window = {"window": interval(end + 0.01)}
    return {times: entry | window for times, entry in zip("1248", entries, strict=True)}


def cost_of(name, i, hardware):
    """A line of costs.jsonl; arms cost more the later they come."""
    ratio = {"ratio": 1 + i / 24, "low": 0.98 + i / 24, "high": 1.02 + i / 24}
    return {
        "arm": name,
        "parameters": 800_000 + 1000 * i,
        "flops_per_token": 5.1e6,
        "kv_bytes_per_token": 2048 if name == "gqa" else 4096,
        "milliseconds_per_step": {"median": 36.0 + 1.5 * i},
        "step_ratio": None if name == "base" else ratio,
        "peak_memory_bytes": 210_000_000 + 4_000_000 * i,
        "threads": 2,
        "compile": False,
        "device": "cpu",
        "dtype": "float32",
        "hardware": hardware,
        "code_hash": "code1",
    }


CALM = {"diverged": (), "stale": False}
ROPE = {"base": 0.0, "base-again": 0.0, "rope": -0.1}


def judge(sweep, lines, prices=(), **given):
    """(table, {name: row}, facts) of a sweep's verdicts."""
    table, facts = verdicts.judge(rows.table(lines, sweep, list(prices)), sweep, **given)
    return table, table.set_index("name").to_dict("index"), facts


def judged(folder, **keys):
    """(table, {name: row}, facts) of the verdicts of a sweep with these settings."""
    sweep, lines, _ = make_sweep(folder, **keys)
    return judge(sweep, lines)


def reported(lines, *arms, key="final_report"):
    runs = [line for line in lines if line["arm"] in arms and line["purpose"] == "report"]
    return np.array([run[key] for run in runs], float)


def with_runs(lines, arm, change):
    """The lines, with what `change` says of the seed of each reported run of an arm."""
    is_run = lambda line: line["arm"] == arm and line["purpose"] == "report"
    return [line | (change(line["seed"]) if is_run(line) else {}) for line in lines]
