"""
Predict what the parts are worth in the settings of the test, before these settings run.

    python -m bench.settings.held_out        # writes bench/results/answer/settings/predictions.json

bench/ablate.py runs --settings=held_out only where this file exists, and the page of the answer
scores it. A part is predicted once, before it runs in a setting of the test; a part that is
measured later is added to the file.
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
    """{part: its prediction} from some measured settings: the median of its log worth in a new
    setting and the 95 % interval, both without the error of a run, which is not known yet; an end
    that is open is left out."""
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
            "settings": model.rows["setting"].tolist(),
        }
    return predictions


def read(path):
    """{part: its prediction} of a file that `main` wrote."""
    return files.read_json(path, "restore it: it was written before the test")


def scored(folder):
    """[Prediction] of the parts in the settings of the test that have run, as they were written
    before; [] where nothing was predicted. The error of a run widens each half of an interval as
    if both were normal."""
    path = Path(folder) / PREDICTIONS
    if not path.exists():
        return []
    predicted = read(path)
    _, found = worths.table(worths.load(folder), held_out=True)
    predictions = []
    for worth in found:
        if worth.part in predicted:
            unknown = {"low": -math.inf, "high": math.inf, "share": math.nan}
            model = unknown | predicted[worth.part]
            median = model.pop("median")
            del model["settings"]
            error = Z * worth.se
            model["low"] = median - math.hypot(median - model["low"], error)
            model["high"] = median + math.hypot(model["high"] - median, error)
            model |= {"log_worth": worth.log_worth, "censored": worth.censored}
            predictions.append(Prediction(worth.part, worth.setting, **model))
    return predictions


def main(argv):
    """Add to the file what the planned settings predict of the parts that are not in it, and that
    have not run in a setting of the test. Prints its path and these parts."""
    print_help(argv, __doc__, [])
    folder = Path(argv[0]) if argv else SETTINGS
    path = folder / PREDICTIONS
    predicted = read(path) if path.exists() else {}
    measured = worths.load(folder)
    seen = set(predicted)
    for each in measured:
        if each.facts["held_out"]:
            seen |= {row["arm"] for row in each.rows}
    found = predict(measured)
    new = {part: prediction for part, prediction in found.items() if part not in seen}
    if not found:
        fix = f"measure {effects.LEAST_SETTINGS} of config/answer/settings.py first"
        raise UserError("too few settings have run for a prediction", folder, fix)
    if not new:
        what = "a part is predicted once, before it runs in the test, and no other part is measured"
        raise UserError(what, path, "keep the file as it is")
    files.write(path, json.dumps(predicted | new, indent=1) + "\n")
    print(f"{path}: {', '.join(new)}")


if __name__ == "__main__":
    run(main)
