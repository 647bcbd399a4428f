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

BASES = ("gpt2", "llama")
SETTINGS = files.ROOT / "bench/results/answer/settings"


def predict(measured):
    """{part: the fields of its Prediction} from some measured settings, without an end that is
    open. The interval contains the error of a run as it is known now: the median over settings."""
    columns = effects.columns_of(worths.table(measured)[0])
    predictions = {}
    for part, model in effects.posteriors(columns).items():
        if len(model.rows["se"]) < effects.LEAST_SETTINGS:
            continue
        low, high = model.interval(se=float(np.median(model.rows["se"])))
        chances = {"p_helps": 1 - model.below(0), "p_within": model.inside(effects.WITHIN)}
        ends = {"low": low, "high": high}
        predictions[part] = {key: end for key, end in ends.items() if math.isfinite(end)} | chances
    return predictions


def scored(folder):
    """{"predictions", "gpt2", "llama": [Prediction]} of the parts in the settings of the test, as
    they were written before: from all settings, and from those of one base. {} before the test."""
    path = Path(folder) / PREDICTIONS
    measured = worths.load(folder)
    if not (path.exists() and worths.table(measured, held_out=True)[1]):
        return {}
    content = files.read_json(path, "restore it: it was written before the test")
    found = {"predictions": scored_by(content["predictions"], measured)}
    for base in BASES:
        found[base] = scored_by(content[base], worths.of_base(measured, base))
    return found


def scored_by(predicted, measured):
    """The [Prediction] of some Measured settings of the test: predicted as `predict` returns it."""
    _, found = worths.table(measured, held_out=True)
    predictions = []
    for worth in found:
        if worth.part in predicted:
            model = {"low": -math.inf, "high": math.inf} | predicted[worth.part]
            model |= {"log_worth": worth.log_worth, "censored": worth.censored}
            predictions.append(Prediction(worth.part, worth.setting, **model))
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
    content = {"settings": [each.name for each in admitted], "predictions": predict(admitted)}
    for base in BASES:
        content[base] = predict(worths.of_base(admitted, base))
    if not content["predictions"]:
        fix = f"measure {effects.LEAST_SETTINGS} of config/answer/settings.py first"
        raise UserError("too few settings have run for a prediction", folder, fix)
    files.write(folder / PREDICTIONS, json.dumps(content, indent=1) + "\n")
    print(folder / PREDICTIONS)


if __name__ == "__main__":
    run(main)
