"""
Is my loss right? The first steps of a run beside those on record:

    python train.py config/llama_shakespeare.py --check          trains them and answers; nothing is written
    python train.py config/llama_shakespeare.py --check=record   puts them on record, in bench/results/golden/

A golden curve belongs to a config file, its settings and its data. What it tolerates is measured when it is made: far
more than rounding changes, far less than a mistake does. Of what comes after its last step it says nothing.
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from common import files
from common.errors import UserError
from common.files import ROOT
from parts.variant import VariantConfig
from training.doctor import like, rounding, without_dropout
from training.dry_run import variant
from training.settings import COURSE, TrainConfig

GOLDEN = ROOT / "bench" / "results" / "golden"
STEPS = 100


def find(argv):
    """(the config files of a command line, where their golden curves are); UserError if there is no config file."""
    names = [arg for arg in argv if arg.endswith(".py")]
    if not names:
        raise UserError(
            "golden curves belong to config files",
            "check",
            "name one: python train.py config/llama_shakespeare.py --check",
        )
    return " ".join(names), GOLDEN / ("+".join(Path(name).stem for name in names) + ".json")


def read(argv):
    """The golden curves of a command line's config file; UserError if there are none."""
    names, path = find(argv)
    if not path.is_file():
        raise UserError(
            f"no golden curve of {names} yet",
            path,
            "--check=record makes one, from code that you trust",
        )
    return json.loads(path.read_text(encoding="utf-8"))


def course(run):
    """{key: value} of all that decides the losses, except the data."""
    tf32 = run.runtime.dtype == "float32" and run.runtime.device.startswith("cuda")
    config = asdict(run.config) | {"dtype": "tf32" if tf32 else run.runtime.dtype}
    return (
        {key: config[key] for key in ("init_from", *COURSE)}
        | asdict(variant(run))
        | {"dropout": 0.0}
    )


def default(key):
    """What a key that is newer than a golden curve was when it was made."""
    return getattr(TrainConfig, key, getattr(VariantConfig, key, None))


def check(run, argv, train_step):
    """Train the first steps, without dropout, which every device draws otherwise, and compare their losses with those
    on record, or put them there. Returns 1 if one is off by more than the tolerance, else 0."""
    names, path = find(argv)
    settings, data = course(run), run.state["data"]
    without_dropout(run.model)
    if run.config.check == "record":
        return record(run, path, settings, names, train_step)
    curves = read(argv)
    differing = [
        [
            f"{key} {theirs} -> {ours}"
            for key, ours in settings.items()
            if ours != (theirs := curve["settings"].get(key, default(key)))
        ]
        for curve in curves
    ]
    if min(map(len, differing)):
        raise UserError(
            "the golden curve is of other settings: " + ", ".join(min(differing, key=len)),
            path,
            "leave out what you gave of these (the shipped curves are of a CPU: --device=cpu), or put your own on record with --check=record",
        )
    curve = next(
        (curve for curve, other in zip(curves, differing) if not other and curve["data"] == data),
        None,
    )
    if curve is None:
        raise UserError(
            f"the golden curves are of other data than {run.config.dataset}, {data}",
            path,
            "prepare the text anew, or put your own on record with --check=record",
        )
    losses = [train_step(run)[0] for _ in curve["losses"]]
    off = [abs(ours - theirs) for ours, theirs in zip(losses, curve["losses"])]
    worst, allowed = max(off), curve["tolerance"]
    if not run.runtime.main:
        return int(worst > allowed)
    if worst <= allowed:
        print(
            f"\nyes, the loss is right: over {len(off)} steps the largest difference is {worst:.1e}, of {allowed} allowed"
        )
        return 0
    first = next(i for i, value in enumerate(off) if value > allowed)
    print(
        f"\nno: the loss of step {first + 1} is {losses[first]:.4f}, not {curve['losses'][first]:.4f}: {off[first]:.4f} off, of {allowed} allowed; the largest difference is {worst:.4f}"
    )
    # Rounding does not show in the first loss, so that a far smaller difference tells there than later.
    print(
        f"The first loss is {off[0]:.0e} off already: look at the initial weights, the forward pass (mask, positions, norms), the loss and the first batch"
        if off[0] > min(allowed, 20 * rounding(run.runtime))
        else "The first loss is right: look at the gradients, the optimizer, its learning rate, weight decay and clipping, and the batches that follow"
    )
    return 1


def record(run, path, settings, names, train_step):
    """Write a golden curve. What it tolerates is ten times what rounding does to it: two more runs begin from weights
    that are changed by eight roundings each."""
    if not run.config.max_iters:
        raise UserError("no step to put on record", "max_iters=0", "give 1 or more")
    if run.runtime.world_size > 1:
        raise UserError(
            "a golden curve is put on record by one process",
            "check=record",
            "start it with python, not with torchrun",
        )
    curves = []
    for k in range(3):
        again, random = like(run), torch.Generator().manual_seed(k)
        for p in again.model.parameters() if k else ():
            p.data.mul_(
                1 + 8 * rounding(run.runtime) * torch.randn(p.shape, generator=random).to(p.device)
            )
        curves.append(
            [round(train_step(again)[0], 7) for _ in range(min(STEPS, run.config.max_iters))]
        )
    noise = max(abs(a - b) for other in curves[1:] for a, b in zip(curves[0], other))
    # At least 0.001: of the shipped configs' losses two threads, compiling and accumulation change 3e-5 at most, no weight decay 4e-3.
    tolerance = float(f"{max(1e-3, 10 * noise):.1g}")
    curve = {
        "config": names,
        "dataset": run.config.dataset,
        "data": run.state["data"],
        "tolerance": tolerance,
        "why": f"10 times {noise:.1e}, to which changes of all weights by 8 roundings grow over these steps, and at least 0.001",
        "versions": run.everything["versions"]
        | {"device": run.runtime.device, "threads": torch.get_num_threads()},
        "settings": settings,
        "losses": curves[0],
    }
    others = [
        other
        for other in (json.loads(path.read_text()) if path.is_file() else [])
        if (other["settings"], other["data"]) != (settings, curve["data"])
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, "[\n" + ",\n".join(json.dumps(curve) for curve in [*others, curve]) + "\n]\n")
    print(f"\n{len(curves[0])} steps are on record in {path}, with a tolerance of {tolerance}")
    return 0
