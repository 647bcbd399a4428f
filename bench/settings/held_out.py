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

from bench.ablation import effects
from bench.ablation.predictions import Prediction, share_that_helped
from bench.ablation.worth import Z
from bench.settings import worths
from bench.settings.plan import PREDICTIONS
from common import files
from common.configurator import print_help
from common.errors import UserError, run

SETTINGS = files.ROOT / "bench/results/answer/settings"


def predict(measured):
    """The predictions from some measured settings, as the content of the file: of each part the
    median of its log worth in a new setting and the 95 % interval, both without the error of a run,
    which is not known yet; an end that is open is left out."""
    columns = effects.columns_of(worths.table(measured)[0])
    predictions = {}
    for part, model in effects.posteriors(columns).items():
        if len(model.rows["se"]) < effects.LEAST_SETTINGS:
            continue
        low, high = model.interval()
        ends = {"low": low, "high": high}
        predictions[part] = {key: end for key, end in ends.items() if math.isfinite(end)} | {
            "median": model.quantile(0.5),
            "p_helps": 1 - model.below(0),
            "p_within": model.inside(effects.WITHIN),
            "share": share_that_helped(model.rows),
        }
    return {"settings": [each.name for each in measured], "predictions": predictions}


def scored(folder):
    """[Prediction] of the parts in the settings of the test that have run, as they were written
    before; [] where nothing was predicted. The error of a run widens each half of an interval as
    if both were normal."""
    path = Path(folder) / PREDICTIONS
    if not path.exists():
        return []
    predicted = files.read_json(path, "restore it: it was written before the test")["predictions"]
    _, found = worths.table(worths.load(folder), held_out=True)
    predictions = []
    for worth in found:
        if worth.part in predicted:
            unknown = {"low": -math.inf, "high": math.inf, "share": math.nan}
            model = unknown | predicted[worth.part]
            median = model.pop("median")
            error = Z * worth.se
            model["low"] = median - math.hypot(median - model["low"], error)
            model["high"] = median + math.hypot(model["high"] - median, error)
            model |= {"log_worth": worth.log_worth, "censored": worth.censored}
            predictions.append(Prediction(worth.part, worth.setting, **model))
    return predictions


def main(argv):
    """Write the predictions of the planned settings that have run."""
    print_help(argv, __doc__, [])
    folder = Path(argv[0]) if argv else SETTINGS
    measured = worths.load(folder)
    if (folder / PREDICTIONS).exists() or any(each.facts["held_out"] for each in measured):
        what = "the predictions are written once, before the test runs"
        raise UserError(what, folder / PREDICTIONS, "keep them as they are")
    admitted = [each for each in measured if each.admitted]
    content = predict(admitted)
    if not content["predictions"]:
        fix = f"measure {effects.LEAST_SETTINGS} of config/answer/settings.py first"
        raise UserError("too few settings have run for a prediction", folder, fix)
    files.write(folder / PREDICTIONS, json.dumps(content, indent=1) + "\n")
    print(folder / PREDICTIONS)


if __name__ == "__main__":
    run(main)
