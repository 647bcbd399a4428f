"""A sweep folder that nothing trained: losses drawn from a fixed seed around planted effects, in
the form that bench/ablate.py writes."""

import json
from pathlib import Path

import numpy as np

EFFECTS = {  # arm -> planted effect on the final loss
    "base": 0.0,
    "base-again": 0.0,
    "rope": -0.062,
    "alibi": -0.041,
    "rmsnorm": 0.001,
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
    "rmsnorm": {"norm": "rmsnorm"},
    "swiglu": {"mlp": "swiglu"},
    "untied": {"tie_embeddings": False},
    "gqa": {"n_kv_head": 2},
    "post": {"block": "post"},
}
SAMPLE = """ROMEO:
What say you, sir? the {arm} hath not the means
To hold a line of <such> & heavy breath,
And yet the king is come: be still, my lord.

DUKE VINCENTIO:
I know you well; and therefore hold your peace.
"""
TRAIN = "python train.py config/ablate_shakespeare.py"
HARDWARE = "Xeon 2.1 GHz, 2 cores"
OF_THE_CODE = {"code_hash": "code1", "git_commit": "0123456789ab"}
SWEEP = {
    "question": "Which piece of LLaMA helps a character-level GPT-2 at 0.8 M parameters?",
    "design": "leave_one_in",
    "match": "params",
    "base": "base",
    "base_values": {
        "model": "gpt2",
        "n_layer": 4,
        "n_embd": 128,
        "block_size": 64,
        "learning_rate": 1e-3,
        "max_iters": 2000,
    },
    "lr_grid": [0.5, 1, 2],
    "budget_seconds": None,
    "margin": None,
    "metric": "final_val_loss",
    "max_iters": 2000,
    "block_size": 64,
    "command": "python bench/ablate.py config/ablate_shakespeare.py",
    "data": {
        "dataset": "shakespeare_char",
        "fingerprint": "5f2b8c81aa01",
        "train_tokens": 1003854,
        "val_tokens": 111540,
        "bits_per_byte": 1.4427,
    },
    "versions": {"python": "3.12.3", "torch": "2.13.0", "numpy": "2.4.6"},
    "screening": False,
    "started": "2026-01-02T03:04:05",
    **OF_THE_CODE,
}
FAILURE = {
    "status": "failed",
    "reason": "the loss is not finite at step 412",
    "final_val_loss": None,
    "best_val_loss": None,
    "curve": [],
    "sample": "",
}


def make_sweep(
    out,
    seeds=5,
    effects=EFFECTS,
    arms=None,
    noise=0.008,
    failed=("post",),
    stale=True,
    costs=True,
    hardware=HARDWARE,
    curve_points=21,
    **changed,
):
    """Writes OUT and returns (sweep, rows, costs by arm). `changed` overrides keys of sweep.json;
    `arms` adds to its arms."""
    planned = {name: plan_of(name) for name in effects}
    planned |= {name: planned.get(name, {}) | facts for name, facts in (arms or {}).items()}
    sweep = SWEEP | {
        "arms": planned,
        "chosen_lr": {name: 2 if name == "untied" else 1 for name in effects},
        "seeds": seeds,
        "looks": [seeds],
        "hardware": hardware,
    }
    sweep |= changed

    row = row_maker(sweep, effects, noise, curve_points)
    rows = []
    for name in effects:
        chosen = sweep["chosen_lr"].get(name, 1)
        for lr in sweep["lr_grid"] if len(sweep["lr_grid"]) > 1 else ():
            rows.append(row(name, 101, lr, "tune", penalty=0.03 * abs(np.log2(lr / chosen))))
        for seed in range(1, seeds + 1):
            made = row(name, seed, chosen, "report")
            rows.append(made | FAILURE if name in failed else made)
    if stale:
        better = {"final_val_loss": 0.5, "best_val_loss": 0.5}
        other_code = {"code_hash": "older code", "seed": seeds + 1}
        rows.append(row("gqa", 1, 1, "report") | other_code | better)

    priced = [cost_of(name, i, hardware) for i, name in enumerate(effects)] if costs else []
    write(Path(out), sweep, rows, priced)
    return sweep, rows, {line["arm"]: line for line in priced}


def plan_of(name):
    """What sweep.json says about an arm."""
    residual = 0.8 if name == "untied" else 0.02
    match = {"kind": "params", "mlp_width": 512, "residual_percent": residual}
    return {
        "changes": CHANGES.get(name, {"mlp": name}),
        "against": "base",
        "again": name == "base-again",
        "interaction_of": None,
        "config_hash": f"c-{name}",
        "match": None if name in ("base", "base-again") else match,
    }


def row_maker(sweep, effects, noise, curve_points):
    """Returns row(name, seed, lr, purpose, penalty): each call draws the next run's losses."""
    random = np.random.default_rng(7)
    steps = np.linspace(0, sweep["max_iters"], curve_points).round().astype(int)
    # What the order of the data does to every arm of a seed.
    weather = {seed: random.normal(0, noise) for seed in range(1, sweep["seeds"] + 1)}

    def losses(name, seed, penalty):
        """(the planted final loss, the curve [steps])"""
        own_noise = random.normal(0, noise * (5 if name == "untied" else 1))
        end = 1.75 + effects[name] + weather.get(seed, 0) + own_noise + penalty
        fall = (4.17 - end) * np.exp(-steps / 260)
        second_half = np.clip(steps / sweep["max_iters"] - 0.5, 0, 1) * 2
        overfit = (0.06 if name == "untied" else 0.0) * (second_half - 1)
        jitter = random.normal(0, 0.004, len(steps)) * (steps < steps[-1])
        return end, end + fall + overfit + jitter

    def row(name, seed, lr, purpose, penalty=0.0):
        end, curve = losses(name, seed, penalty)
        best = int(curve.argmin())
        return {
            "arm": name,
            "seed": seed,
            "lr": lr,
            "purpose": purpose,
            "status": "done",
            "reason": None,
            "best_val_loss": float(curve[best]),
            "best_step": int(steps[best]),
            "final_val_loss": float(curve[-1]),
            "train_loss": float(curve[-1] - 0.2),
            "bits_per_byte": float(curve[-1] * 1.4427),
            "seconds": 180.0,
            "curve": [[int(x), float(y)] for x, y in zip(steps, curve, strict=True)],
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
    if name not in ("rope", "alibi"):
        return {"1": end, "2": None, "4": None, "8": None}
    alibi = name == "alibi"
    return {
        "1": end,
        "2": end + 0.03,
        "4": end + (0.02 if alibi else 0.25),
        "8": end + (0.03 if alibi else 0.7),
    }


def cost_of(name, i, hardware):
    """A line of costs.jsonl; arms cost more the later they come."""
    return {
        "arm": name,
        "parameters": 800_000 + 1000 * i,
        "non_embedding_parameters": 790_000,
        "flops_per_token": 5.1e6,
        "kv_bytes_per_token": 2048 if name == "gqa" else 4096,
        "tokens_per_second": 21000.0 - 700 * i,
        "milliseconds_per_step": {"median": 36.0 + 1.5 * i, "q25": 35.0 + i, "q75": 38.0 + 2 * i},
        "peak_memory_bytes": 210_000_000 + 4_000_000 * i,
        "decode_ms_per_token": {"median": 1.9 + 0.11 * i, "q25": 1.8, "q75": 2.4},
        "threads": 2,
        "compile": False,
        "device": "cpu",
        "dtype": "float32",
        "hardware": hardware,
        "code_hash": "code1",
    }


def write(out, sweep, rows, priced):
    out.mkdir(parents=True, exist_ok=True)
    (out / "sweep.json").write_text(json.dumps(sweep))
    for name, lines in (("rows.jsonl", rows), ("costs.jsonl", priced)):
        (out / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
