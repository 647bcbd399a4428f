"""
Predict what the parts are worth in the settings of the test, before these settings run.

    python -m bench.settings.held_out [OUT]  # writes bench/results/answer/settings/predictions.json

A part is predicted once, from its first pass in the planned settings, before it runs in a setting
of the test: bench/ablate.py refuses to run a part there that can be predicted and is not. A part
that is measured later is added to the file. The page of the answer scores the predictions.
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
from bench.settings.setting import is_row, stored_settings
from common import files
from common.commands import ROOT
from common.configurator import print_help
from common.errors import UserError, run
from training.run_folder import read_rows

SETTINGS = ROOT / "bench/results/answer/settings"


def predict(measured):
    """{part: its prediction} from the first pass of some measured settings: the median of its log
    worth in a new setting and the 95 % interval, both without the error of a run, which is not
    known yet; an end that is open is left out."""
    measured = [worths.first_pass(each) for each in measured]
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


def read(folder):
    """{part: its prediction} of the file below a folder of settings; {} if there is none."""
    path = Path(folder) / PREDICTIONS
    if not path.exists():
        return {}
    return files.read_json(path, "restore it: it was written before the test")


def unpredicted(folder):
    """{part: its prediction} of the parts that can be predicted and are not in the file, save those
    that have run in the test. A folder without settings.json counts as one of the test."""
    seen = set(read(folder))
    for path in Path(folder).glob("*/rows.jsonl"):
        if stored_settings(path.parent).get("held_out", True):
            seen |= {row["arm"] for row in read_rows(path, is_row)}
    found = predict(worths.load(folder))
    return {part: prediction for part, prediction in found.items() if part not in seen}


def scored(folder):
    """[Prediction] of the parts in the settings of the test that have run, as they were written
    before, beside the first pass there; [] where nothing was predicted. The error of a run widens
    each half of an interval as if both were normal."""
    predicted = read(folder)
    measured = [worths.first_pass(each) for each in worths.load(folder)]
    _, found = worths.table(measured, held_out=True)
    predictions = []
    for worth in found:
        if worth.part not in predicted:
            continue
        stated = predicted[worth.part]
        median = stated["median"]
        below = median - stated.get("low", -math.inf)
        above = stated.get("high", math.inf) - median
        error = Z * worth.se
        predictions.append(
            Prediction(
                part=worth.part,
                setting=worth.setting,
                low=median - math.hypot(below, error),
                high=median + math.hypot(above, error),
                p_helps=stated["p_helps"],
                p_within=stated["p_within"],
                share=stated.get("share", math.nan),
                log_worth=worth.log_worth,
                censored=worth.censored,
            )
        )
    return predictions


def main(argv):
    """Add to the file what the planned settings predict of the parts that are not in it, and that
    have not run in a setting of the test. Prints its path and these parts."""
    print_help(argv, __doc__, [])
    if len(argv) > 1:
        raise UserError("more than one folder", " ".join(argv), "name the folder of one plan")
    folder = Path(argv[0]) if argv else SETTINGS
    new = unpredicted(folder)
    if not new:
        least = effects.LEAST_SETTINGS
        what = f"every part of {least} planned settings is predicted or has run in the test"
        raise UserError(what, folder / PREDICTIONS, "measure the part in more settings first")
    files.write(folder / PREDICTIONS, json.dumps(read(folder) | new, indent=1) + "\n")
    print(f"added to {folder / PREDICTIONS}: {', '.join(new)}")


if __name__ == "__main__":
    run(main)
