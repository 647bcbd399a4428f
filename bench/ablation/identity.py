"""
The identity of a row: the numbers that its arm computes, however the code is written.

A row is valid for its configuration, its data, torch's version, and the fingerprint of its arm, the
numbers that fingerprint.py computes. OUT/fingerprints.jsonl stores a fingerprint for each arm, with
an id, which rows carry as their code_hash (docs/ablation.md, Stale rows). A line holds

    id, arm     as in rows.jsonl                        values   the arm's keys of train.py
    kind        of the data, which the numbers need     numbers  what fingerprint.compute returns
    form        the numbers of the steps in the form of the runs, where it is not eager float32
    torch, date of the numbers
"""

import contextlib
import hashlib
import json
import math
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path

import torch

from bench.ablation.settings import OWNED
from common import files
from common.configurator import build
from common.errors import UserError
from parts.architectures import configure
from parts.variant import VariantConfig
from training.run_folder import read_rows
from training.settings import TrainConfig

NAME = "fingerprints.jsonl"
KEYS = {"id": str, "arm": str, "values": dict, "kind": str, "numbers": dict}
TOLERANCE = 1e-4  # of a loss, in nats, and of a norm, as a share of it
OF_A_MOMENT = 5e-3  # of the norm of an optimizer's moment, which two kinds of CPU gave 1e-3 apart
OF_TWINS = 10  # times as far as the twins of a fingerprint are from it
AT_MOST = 50  # times the tolerances, however far the twins are: they moved a norm by 5e-3
OF_A_FORM = 5e-3  # of everything, of the steps in another form
LOSSES = ("loss", "evaluation")  # quantities in nats
NOISE = 1e-5  # a gradient this small beside the others is rounding: a bias that softmax cancels
# Keys that change no result and are left out of a configuration.
NOT_HASHED = (*OWNED, "out_dir", "data_dir", "log_interval", "log", "match")
FORMER = {"data_alpha": 1.0}  # a key of train.py when the stored rows were measured
OFF = (None, False, 0, "", "none")
# Keys that came after the stored rows: at their default they are left out, like those that are off.
NEWER = ("embed", "ngram_max", "ngram_rows")
DEFAULTS = {
    field.name: field.default for kind in (TrainConfig, VariantConfig) for field in fields(kind)
}


def digest(content):
    """16 hexadecimal digits of the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def configuration(values):
    """The resolved keys of a run, which its result depends on besides code, data, seeds, machine.
    A key that is off by default is left out, like a key that does not exist yet."""
    resolved = asdict(build(TrainConfig, values)) | asdict(configure(values, as_variant=True))
    resolved |= FORMER
    kept = {}
    for key, value in resolved.items():
        may_be_absent = value in OFF or key in NEWER
        if key not in NOT_HASHED and not (may_be_absent and value == DEFAULTS.get(key)):
            kept[key] = value
    return kept


def config_hash(values, data, version, threads):
    """The digest of all that changes a result besides code: the keys of train.py, torch's version,
    the threads of a CPU (None: of no CPU), and the data."""
    hashed = configuration({"vocab_size": data["vocab_size"]} | values)
    hashed["torch"] = release(version)
    if threads is not None:
        hashed["threads"] = threads
    return digest([hashed, data["fingerprint"]])


def release(version):
    """A version of torch without its build, such as +cpu."""
    return version.partition("+")[0]


# ---------------------------------------------------------------- two fingerprints


def differences(old, new, tolerance=TOLERANCE, twins=()):
    """A text for each quantity of two fingerprints that differs by more than the tolerance, with
    the place where it differs most. twins: fingerprints of the new code whose first weights differ
    in the last bit. A number that is far from theirs may be far from the old one."""
    found = []
    for quantity in old:
        before = flat(old[quantity])
        after = flat(new.get(quantity, {}))
        if quantity == "norms":
            noise = noise_of(old["norms"]) | noise_of(new["norms"])
            before = without(before, noise)
            after = without(after, noise)
        relative = quantity not in LOSSES
        flat_twins = [flat(twin.get(quantity, {})) for twin in twins]
        worst = 0.0  # of all places, the largest difference as a multiple of what is allowed
        text = ""
        for place, a, b in pairs(before, after):
            allowed = tolerance
            if ", moment " in place:
                allowed = max(tolerance, OF_A_MOMENT)
            to_twins = [distance(b, twin.get(place, b), relative) for twin in flat_twins]
            widened = OF_TWINS * max(to_twins, default=0.0)
            allowed = max(allowed, min(widened, AT_MOST * allowed))
            excess = distance(a, b, relative) / allowed
            if excess > worst:
                worst = excess
                text = f"{quantity} {place} {a} -> {b}"
        if worst > 1:
            found.append(" ".join(text.split()))
    return found


def flat(quantity):
    """{place: number or text} of a quantity, which is one text, a list over the steps, or a
    dictionary of numbers or of lists."""
    if isinstance(quantity, str):
        return {"": quantity}
    if isinstance(quantity, list):
        return {f"of step {step}": number for step, number in enumerate(quantity)}
    places = {}
    for name, value in quantity.items():
        for i, number in enumerate(value if isinstance(value, list) else [value]):
            places[f"{name}, moment {i}" if i else name] = number
    return places


def without(places, names):
    """The numbers at some places, without the places of these parameters."""
    return {place: x for place, x in places.items() if place.partition(",")[0] not in names}


def noise_of(norms):
    """The names of the parameters whose gradients are rounding errors: their first moments are tiny
    beside the largest one."""
    firsts = {}
    for name, values in norms.items():
        if len(values) > 1 and not isinstance(values[1], str):
            firsts[name] = values[1]
    return {name for name, first in firsts.items() if first < NOISE * max(firsts.values())}


def pairs(before, after):
    """Yield (place, number before, number after). Places that only one of them has, since
    parameters were renamed, are paired in the order of their numbers."""
    for place in before:
        if place in after:
            yield place, before[place], after[place]
    gone = [before[place] for place in before if place not in after]
    come = [after[place] for place in after if place not in before]
    if len(gone) != len(come):
        yield "count", len(before), len(after)
        return
    for a, b in zip(sorted(gone, key=float), sorted(come, key=float), strict=True):
        yield "renamed", a, b


def distance(a, b, relative):
    """How far two numbers are apart; texts are equal or infinitely far."""
    if isinstance(a, str) or isinstance(b, str):
        return 0.0 if a == b else math.inf
    scale = max(abs(a), abs(b)) if relative else 1.0
    return abs(a - b) / scale if a != b else 0.0


# ---------------------------------------------------------------- the fingerprints of a sweep


def stored(folder):
    """The lines of a sweep's stored fingerprints."""
    return read_rows(Path(folder) / NAME, lambda line: files.fits(line, KEYS))


def by_configuration(lines):
    """{digest of a configuration: its lines}; without those whose values no longer exist."""
    found = {}
    for line in lines:
        with contextlib.suppress(UserError):
            key = digest([configuration(line["values"]), line["kind"]])
            found.setdefault(key, []).append(line)
    return found


def line_of(arm, values, kind, numbers):
    """The line of a new fingerprint."""
    return {
        "id": digest([configuration(values), numbers]),
        "arm": arm,
        "values": {key: value for key, value in values.items() if key not in NOT_HASHED},
        "kind": kind,
        "numbers": numbers,
        "torch": torch.__version__,
        "date": datetime.now().astimezone().date().isoformat(),
    }


def recognise(known, new, twins_of=None):
    """(the line of an arm, [text] of the quantities that changed). The line is the stored one of
    this configuration that agrees with the new one, the arm's own before another arm's; or the new
    one. known: by_configuration of the stored lines. twins_of: fingerprint.twins, where this code
    can be run."""
    lines = known.get(digest([configuration(new["values"]), new["kind"]]), [])
    changed = []
    for line in sorted(lines, key=lambda line: line["arm"] != new["arm"]):
        changed = differences(line["numbers"], new["numbers"])
        if changed and twins_of:
            twins = twins_of(new["values"], new["kind"])
            changed = differences(line["numbers"], new["numbers"], twins=twins)
        if not changed:
            if line["arm"] == new["arm"]:
                return line, []
            return new | {"id": line["id"]}, []
    return new, changed


def store(folder, lines):
    """Write the lines of a sweep's fingerprints."""
    files.write(Path(folder) / NAME, "".join(json.dumps(line) + "\n" for line in lines))
