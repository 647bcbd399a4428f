"""The numbers that the first pages printed, computed again from their rows alone.

On purpose another rule: the page took back verdicts by a correction over all its sweeps, and gave
intervals over fewer than 50 blocks of text; the replicate had the interval of its own runs; p of
arms with diverged runs came from random permutations; power from a shifted t distribution."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from bench.ablation import factorial, rows, verdicts
from common.files import ROOT

RESULTS = ROOT / "bench" / "results"
FACTORS = {"rope": "position", "rmsnorm": "norm", "swiglu": "mlp", "no bias": "bias"}


def plan_of(folder, cells=False):
    """(runs, plan) of a folder that has lost its sweep.json."""
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    arms, rates = {}, {}
    for line in lines:
        arm, facts = line["arm"], {}
        if line["purpose"] == "curve":
            facts["curve"] = float(arm.removeprefix("base x"))
        elif cells:
            high = {FACTORS.get(part, part) for part in arm.split("+")}
            names = [*FACTORS.values(), "untied"]
            facts["cell"] = {factor: int(factor in high) for factor in names}
        if line["purpose"] == "report":
            rates[arm] = line["lr"]
        arms[arm] = facts | {"replicate": arm == "base again"}
    command = next(line["command"] for line in lines if line["arm"] == "base")
    values = {key: int(value) for key, value in re.findall(r"--(\w+)=(\d+)\b(?!\.)", command)}
    reported = Counter(line["arm"] for line in lines if line["purpose"] == "report")
    seeds = min(reported.values())
    plan = rows.complete(
        {
            **{
                "base": "base",
                "arms": arms,
                "chosen_lr": rates,
                "seeds": seeds,
                "name": folder.name,
            },
            "screening": folder.name == "screen_parts",
            "base_values": {"model": "gpt2", "vocab_size": 65, "gradient_accumulation_steps": 1}
            | {
                key: values[key]
                for key in values
                if key not in ("seed", "data_seed", "eval_tokens")
            },
        }
    )
    return rows.table(lines, plan), plan


def printed(row):
    """Difference, low, high, p (Holm), worth, low, high, as the pages printed them."""
    digits = [f"{row[key]:+.4f}" for key in ("difference", "low", "high")]
    worths = [row[f"worth{end}"] for end in ("", "_low", "_high")]
    worth = [f"{k:#.2g}".rstrip(".") for k in worths if not np.isnan(k)]
    return " ".join([*digits, f"{row['p_holm']:.2g}", *worth])


PAGES = {  # 0.0 and inf: below and above the curve
    "answer/positions": """
        none       | worse     | +0.3490 +0.3372 +0.3608 2.1e-13 0.0 0.0 0.0
        learned    | worse     | +0.2466 +0.2271 +0.2661 2e-06 0.0 0.0 0.0
        sinusoidal | worse     | +0.2153 +0.1895 +0.2411 6.1e-05 0.0 0.0 0.0
        alibi      | worse     | +0.0355 +0.0194 +0.0517 0.0035 0.86 0.79 0.94
        relative   | undecided | -0.0078 -0.0289 +0.0133 0.42 1.0 0.93 1.2
        t5         | worse     | +0.1032 +0.0804 +0.1261 0.00042 0.65 0.58 0.72""",
    "answer/mixers": """
        differential | worse  | +0.1050 +0.0831 +0.1269 0.00018 0.64 0.58 0.72
        mla          | worse  | +0.0902 +0.0322 +0.1482 0.016 0.68 0.55 0.89
        mamba2       | better | -0.1257 -0.1347 -0.1167 2.2e-09 1.9 1.7 inf
        gated_delta  | better | -0.1376 -0.1570 -0.1181 2.3e-05 2.0 1.7 inf
        hybrid       | better | -0.1290 -0.1453 -0.1127 4.2e-06 1.9 1.7 inf""",
    "answer/factorial_plays": """
        position        | better    | -0.2721 -0.2808 -0.2634 {} inf inf inf
        norm            | undecided | -0.0036 -0.0123 +0.0051 {} 1.0 0.93 1.1
        mlp             | better    | -0.0603 -0.0690 -0.0516 {} 1.2 1.1 1.3
        bias            | undecided | +0.0090 +0.0003 +0.0177 {} 0.97 0.88 1.1
        untied          | better    | -0.0183 -0.0270 -0.0096 {} 1.1 0.98 1.2
        position:untied | worse     | +0.0335 +0.0161 +0.0509 {}
        norm:mlp        | undecided | -0.0190 -0.0364 -0.0016 {}""",
}


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_of_sweeps(page):
    is_factorial = "factorial" in page
    runs, plan = plan_of(RESULTS / page, is_factorial)
    frame = (factorial.effects if is_factorial else verdicts.judge)(runs, plan)
    found = frame.set_index("name").to_dict("index")
    for line in PAGES[page].strip().splitlines():
        name, verdict, numbers = (cell.strip() for cell in line.split("|"))
        p = f"{found[name]['p_holm']:.2g}"  # the page of a factorial did not print it
        assert printed(found[name]) == numbers.format(p), name
        assert found[name]["verdict"] == verdict, name


def test_the_effects_of_a_factorial_in_the_base_alone():
    frame = factorial.effects(*plan_of(RESULTS / "answer/factorial_plays", cells=True))
    alone = frame.set_index("name")[factorial.ALONE].round(4).loc[["position", "norm", "mlp"]]
    assert alone.to_numpy().tolist() == [
        [-0.2716, -0.2911, -0.2522],
        [0.0282, 0.0088, 0.0477],
        [-0.0095, -0.0290, 0.0099],
    ]
