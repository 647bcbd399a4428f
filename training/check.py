"""
Is my loss right? Compare the first steps of a run with a golden curve:

    python train.py config/llama_shakespeare.py --check          compares; nothing is written
    python train.py config/llama_shakespeare.py --check=record   records bench/results/golden/

A golden curve belongs to a config file, its settings and its data. Its tolerance is measured when
it is recorded: far above the effect of rounding, far below that of a mistake. A golden curve says
nothing about the steps after its last.
"""

import json
import math
from dataclasses import asdict
from pathlib import Path

import torch

from common import files
from common.errors import UserError
from common.files import ROOT
from parts.variant import VariantConfig
from training.doctor import like, rounding, without_dropout
from training.report import variant
from training.settings import COURSE, TrainConfig

GOLDEN = ROOT / "bench" / "results" / "golden"
STEPS = 100


def find(argv):
    """(the config files of a command line, the file of their golden curves). Raises UserError if
    there is no config file."""
    names = [arg for arg in argv if arg.endswith(".py")]
    if not names:
        fix = "name one: python train.py config/llama_shakespeare.py --check --device=cpu"
        raise UserError("golden curves belong to config files", "check", fix)
    return " ".join(names), GOLDEN / ("+".join(Path(name).stem for name in names) + ".json")


def read(path):
    """The golden curves in a file. Raises UserError if there are none."""
    if not path.is_file():
        fix = "--check=record makes one, from code that you trust"
        raise UserError("no golden curve yet", path, fix)
    return files.read_json(path, "restore it from git, or remove it", list)


def course(run):
    """{key: value} of everything that determines the losses, except the data."""
    config = asdict(run.config)
    settings = {key: config[key] for key in ("init_from", *COURSE)}
    if run.runtime.dtype == "float32" and run.runtime.device.startswith("cuda"):
        settings["dtype"] = "tf32"
    return settings | asdict(variant(run)) | {"dropout": 0.0}


def check(run, argv, train_step):
    """Compare the losses of the first steps with the golden curve, or record one. Dropout is off,
    since its random numbers depend on the device. Returns 1 if a loss is off by more than the
    tolerance, else 0."""
    names, path = find(argv)
    settings = course(run)
    without_dropout(run.model)
    if run.config.check == "record":
        return record(run, path, settings, names, train_step)

    curve = matching_curve(read(path), settings, run, path)
    losses = [train_step(run)[0].item() for _ in curve["losses"]]
    differences = [
        abs(a - b) if math.isfinite(a) else math.inf
        for a, b in zip(losses, curve["losses"], strict=True)
    ]
    if run.runtime.main:
        print(f"\n{answer(losses, curve, differences, rounding(run.runtime))}")
    return int(max(differences) > curve["tolerance"])


def matching_curve(curves, settings, run, path):
    """The golden curve with these settings and the data of this run. If there is none, raises
    UserError, which names the settings in which the nearest curve differs."""
    asked, differing = settings | {"data": run.state["data"]}, []
    for curve in curves:
        recorded = asdict(VariantConfig()) | asdict(TrainConfig()) | curve["settings"]
        recorded["data"] = curve["data"]
        changed = [key for key in asked if asked[key] != recorded[key]]
        if not changed:
            return curve
        differing.append([f"{key} {recorded[key]} -> {asked[key]}" for key in changed])

    nearest = min(differing, key=len)
    what = f"the golden curve is of other settings: {', '.join(nearest)}"
    fix = "leave out the keys that you gave; the golden curves of this repo need --device=cpu"
    if nearest[0].startswith("data "):
        fix = "prepare the text again"
    raise UserError(what, path, f"{fix}, or --check=record yours")


def answer(losses, curve, differences, smallest):
    """Whether the losses are right and, if not, where to look. `smallest` is the relative rounding
    error of a matrix product."""
    tolerance, worst = curve["tolerance"], max(differences)
    most = f"the largest difference is {worst:.1e}, of {tolerance} allowed"
    if worst <= tolerance:
        return f"yes, the loss is right: over {len(losses)} steps {most}"
    i = next(i for i, value in enumerate(differences) if value > tolerance)
    no = f"no: the loss of step {i + 1} is {losses[i]:.4f}, not {curve['losses'][i]:.4f}; {most}\n"

    # Rounding hardly changes the first loss, so even a small difference there means a mistake.
    if differences[0] > min(tolerance, 20 * smallest):
        places = "initial weights, the forward pass (mask, positions, norms), the first batch"
        return f"{no}The first loss is {differences[0]:.0e} off already: look at the {places}"
    places = "optimizer, its learning rate, weight decay and clipping, the batches that follow"
    return f"{no}The first loss is right: look at the gradients, the {places}"


def record(run, path, settings, names, train_step):
    """Write a golden curve. Its tolerance is ten times the effect of rounding, which is measured by
    two more runs that start from weights perturbed by eight rounding errors."""
    steps = min(STEPS, run.config.max_iters)
    if run.runtime.world_size > 1:
        fix = "start it with python, not with torchrun"
        raise UserError("a golden curve is recorded by a single process", "check=record", fix)

    losses, *others = (train_perturbed(run, seed, steps, train_step) for seed in range(3))
    if not math.isfinite(sum(losses)):
        raise UserError("a loss is not finite", "check=record", "try a lower learning_rate")
    noise = max(abs(a - b) for other in others for a, b in zip(losses, other, strict=True))
    # At least 0.001: in the shipped configs two threads, compiling and gradient accumulation change
    # losses by 3e-5 at most, and a forgotten weight decay by 4e-3.
    tolerance = float(f"{max(1e-3, 10 * noise):.1g}")
    machine = {"device": run.runtime.device, "threads": torch.get_num_threads()}
    curve = {
        "config": names,
        "dataset": run.config.dataset,
        "data": run.state["data"],
        "tolerance": tolerance,
        "versions": run.saved_config["versions"] | machine,
        "settings": settings,
        "losses": losses,
    }

    curves = read(path) if path.is_file() else []
    same = settings, curve["data"]
    curves = [other for other in curves if (other["settings"], other["data"]) != same] + [curve]
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, "[\n" + ",\n".join(json.dumps(curve) for curve in curves) + "\n]\n")
    print(f"\nrecorded {steps} steps in {path}, with a tolerance of {tolerance}")
    return 0


def train_perturbed(run, seed, steps, train_step):
    """The losses of a copy of the run; with a seed above 0, from perturbed weights."""
    copy, random = like(run), torch.Generator().manual_seed(seed)
    if seed:
        for p in copy.model.parameters():
            change = 8 * rounding(run.runtime) * torch.randn(p.shape, generator=random)
            p.data.mul_(1 + change.to(p.device))
    return [round(train_step(copy)[0].item(), 7) for _ in range(steps)]
