"""
Predict what the parts are worth in the settings of the test, before these settings run.

    python -m bench.settings.held_out        # writes bench/results/answer/settings/predictions.json

bench/ablate.py runs --settings=held_out only where this file exists, and the page of the answer
scores it. A prediction is made once: where a setting of the test has run, none is written.
"""

from common import early

if __name__ == "__main__":
    early.need(*early.ABLATE)

import json
import math
from pathlib import Path

import numpy as np

from bench.ablation import effects
from bench.ablation.predictions import Prediction
from bench.settings import worths
from bench.settings.plan import PREDICTIONS
from common import files
from common.configurator import print_help
from common.errors import UserError, run

SETTINGS = files.ROOT / "bench/results/answer/settings"


def predict(measured):
    """The predictions from some measured settings, as the content of the file. The interval of a
    part contains the error of a run as it is known now: the median over the settings."""
    columns = effects.columns_of(worths.table(measured)[0])
    predictions = {}
    for part, model in effects.posteriors(columns).items():
        if len(model.rows["se"]) < effects.LEAST_SETTINGS:
            continue
        low, high = model.interval(se=float(np.median(model.rows["se"])))
        predictions[part] = {
            "low": low if math.isfinite(low) else None,
            "high": high if math.isfinite(high) else None,
            "p_helps": 1 - model.below(0),
            "p_within": model.inside(effects.WITHIN),
        }
    return {"settings": [each.name for each in measured], "predictions": predictions}


def scored(folder):
    """[Prediction] of the parts in the settings of the test that have run, as they were written
    before; [] where nothing was predicted."""
    path = Path(folder) / PREDICTIONS
    if not path.exists():
        return []
    predicted = files.read_json(path, "restore it: it was written before the test")["predictions"]
    _, found = worths.table(worths.load(folder), held_out=True)
    predictions = []
    for worth in found:
        if worth.part in predicted:
            model = predicted[worth.part]
            predictions.append(
                Prediction(
                    part=worth.part,
                    setting=worth.setting,
                    low=-math.inf if model["low"] is None else model["low"],
                    high=math.inf if model["high"] is None else model["high"],
                    p_helps=model["p_helps"],
                    p_within=model["p_within"],
                    log_worth=worth.log_worth,
                    censored=worth.censored,
                )
            )
    return predictions


def main(argv):
    """Write the predictions of the planned settings that have run."""
    print_help(argv, __doc__, [])
    folder = Path(argv[0]) if argv else SETTINGS
    measured = worths.load(folder)
    test = [each.name for each in measured if each.facts["held_out"]]
    if test:
        fix = f"keep {PREDICTIONS} as it is"
        raise UserError("the test has run, and nothing is predicted after it", ", ".join(test), fix)
    admitted = [each for each in measured if each.admitted]
    content = predict(admitted)
    if not content["predictions"]:
        fix = f"measure {effects.LEAST_SETTINGS} of config/answer/settings.py first"
        raise UserError("too few settings have run for a prediction", folder, fix)
    files.write(folder / PREDICTIONS, json.dumps(content, indent=1) + "\n")
    print(folder / PREDICTIONS)


if __name__ == "__main__":
    run(main)
