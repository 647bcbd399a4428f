"""A measured planned setting that nothing trained: its base falls by 0.2 nats for each e-fold of
tokens."""

import json
import math

import numpy as np

MULTIPLES = {"base": 1.0} | {f"base x{k:g}": k for k in (0.25, 0.5, 1.4, 2.0)}
OF_CODE = {"code_hash": "code", "torch": "2.13.0", "tokens": 1000, "status": "done"}


def write_setting(folder, name, means, test=False, factors=None, gain=0.0):
    """Write a setting in which each part is worth about exp of its mean. From LLaMA, RoPE is taken
    out. gain: the nats that each arm gains at its best rate, 1.4 times the base's."""
    random = np.random.default_rng(int.from_bytes(name.encode()))
    lines = []
    arms = {}

    def add(arm, multiple, loss, purpose, seed, taken_out=False):
        arms[arm] = {"part": purpose == "arm", "taken_out": taken_out, "changes": {"conv": 4}}
        arms[arm] |= {"code_hash": "code", "config_hash": arm}
        ends = dict.fromkeys(("val_loss", "val_loss_tune", "val_loss_report"), loss)
        keys = {"arm": arm, "purpose": purpose, "multiple": multiple, "seed": seed}
        keys["learning_rate"] = 0.01 * (multiple if purpose == "arm" else 1)
        lines.append(keys | {"config_hash": arm} | OF_CODE | ends)

    for arm, multiple in MULTIPLES.items():
        for seed in (1, 2):
            loss = 2 - 0.2 * math.log(multiple) + 0.002 * (-1) ** seed
            add(arm, multiple, loss, "base" if arm == "base" else "curve", seed)
    for part, mean in means.items():
        taken_out = part == "RoPE" and (factors or {}).get("base") == "llama"
        worth = (mean + random.normal(0, 0.03)) * (-1 if taken_out else 1)
        add(part, 1.0, 2 - 0.2 * worth, "arm", 1, taken_out)
        for multiple in (0.7, 1.4) if gain else ():
            beside_best = math.log(multiple / 1.4) / math.log(1.4)
            add(part, multiple, 2 - 0.2 * worth + gain * (beside_best**2 - 1), "arm", 2, taken_out)
    facts = {"setting": name, "held_out": test, "factors": factors or {}, "best_rate": 0.01}
    facts |= {"tokens": 1_000_000, "base_values": {}, "arms": arms}
    facts["admission"] = {"admitted": True, "trigrams": 2.1}
    (folder / name).mkdir(parents=True)
    (folder / name / "settings.json").write_text(json.dumps(facts))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / name / "rows.jsonl").write_text(text)
