"""The checks of the arms before anything runs: each must be valid, change what the model computes
or how it trains, and cost what the base costs."""

import contextlib
import math
import sys
from dataclasses import asdict

import torch

import train
from bench.ablation.arms import BASE
from bench.ablation.settings import OWNED
from common.configurator import build, check, find, keys
from common.errors import UserError
from common.runtime import Runtime
from parts import costs
from parts.architectures import ARCH, configure, without_effect
from parts.variant import Variant, VariantConfig
from tokens.batches import Text
from training.ranks import check_layout
from training.settings import RENAMED, TrainConfig, read_config

# Keys that are the same for all arms.
SHARED = ["dataset", "data_dir", "eval_tokens", "eval_interval"]
SHARED += ["vocab_size", "device", "dtype", "compile", "parallel"]
SHARED += ["log_interval", "log", "out_dir", "match", "model"]
TRAINING_ONLY = {"dropout", "block_size"}  # keys of the model that only training depends on


def with_changes(base, changes):
    """The base's values with an arm's changes. If the arm changes the architecture, the base's
    values for the architecture's slots are dropped."""
    slots = ARCH.get(changes.get("arch"), {})
    return {key: value for key, value in base.items() if key not in slots} | changes


def check_arm(arm, base):
    """Set arm.values. Raises UserError unless each change is a key of train.py with a valid value,
    and the values are compatible."""
    known = keys(TrainConfig, VariantConfig)
    try:
        for key, value in arm.changes.items():
            if key in OWNED or key in SHARED:
                raise UserError(f"an arm cannot set {key}", f"{key}={value}", "leave it out")
            arm.changes[key] = check(key, value, find(key, known, RENAMED, key), f"{key}={value}")
        arm.values = with_changes(base, arm.changes)
        values = arm.values | {"device": "cpu"}  # the machine that plans may lack the device
        argv = [f"--{key}={value}" for key, value in values.items()]
        settings = read_config([*argv, "--seed=0", "--out_dir=out"], "")
        check_layout(settings.config, Runtime("cpu", "float32"))
    except UserError as error:
        what, where, fix = error.parts
        raise UserError(f"arm {arm.name}: {what}", where, fix) from None


def check_changes_output(arm, other, vocab_size):
    """Raise UserError that names the arm if its model computes the same as the arm `other` that it
    is compared with. A difference that shows in training alone (optimizer, schedule, dropout)
    counts as a change."""
    vocabulary = {"vocab_size": vocab_size}
    new = configure(vocabulary | arm.values, as_variant=True)
    old = configure(vocabulary | other.values, as_variant=True)
    changed = {key for key, value in asdict(new).items() if value != getattr(old, key)}
    unread = [key for key in without_effect(asdict(new)) if key in arm.changes]
    if unread:
        why = f"{', '.join(unread)} has no effect with the chosen parts"
    elif trains_differently(arm, other) or changed & TRAINING_ONLY:
        return
    elif not changed:
        why = f"it is {other.name} already"
    elif same_logits(old, new):
        why = f"it gives the same logits as {other.name}"
    else:
        return
    changes = ", ".join(f"{key}={value}" for key, value in arm.changes.items())
    raise UserError(f"arm {arm.name}: {why}", changes, "correct the arm or leave it out")


def trains_differently(arm, other):
    """Whether two arms differ in the keys of training, with each None replaced by its meaning."""

    def settings(values):
        given = asdict(build(TrainConfig, values)) | {"arch": None}
        meant = {"lr_decay_iters": given["max_iters"], "min_lr": given["learning_rate"] / 10}
        return given | {key: value for key, value in meant.items() if given[key] is None}

    return settings(arm.values) != settings(other.values)


def random_variant(config):
    """A Variant in float64 with random parameters and buffers: every part affects the logits."""
    torch.manual_seed(0)
    model = Variant(config).eval().double()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "slopes" not in name and tensor.is_floating_point():
            std = 1.5 / math.sqrt(tensor.size(1)) if tensor.dim() == 2 else 0.4
            torch.nn.init.normal_(tensor.detach(), 0.0, std)
            if "running_var" in name:
                tensor.abs_().add_(0.5)
    return model


@torch.no_grad()
def same_logits(old, new):
    """Whether two configurations give the same logits, to 1e-12 of the largest, when all weights
    with the same name and shape are shared."""
    old_model = random_variant(old)
    new_model = random_variant(new)
    shared = dict(old_model.named_parameters())
    for name, p in new_model.named_parameters():
        if name in shared and shared[name].shape == p.shape:
            p.copy_(shared[name])
    length = min(old.block_size, new.block_size)
    x = torch.randint(old.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
    old_logits = old_model(x)[0]
    new_logits = new_model(x)[0]
    return (old_logits - new_logits).abs().max() <= 1e-12 * old_logits.abs().max()


def match_arm(arm, base, kind, vocab_size):
    """Match an arm to the parameters or FLOPs of the base, by its MLP's width. Sets arm.match and
    arm.values if another width is needed. Raises UserError if no width matches."""
    is_base = arm.name == BASE or arm.replicate or arm.curve
    if is_base or kind == "none" or "mlp_width" in arm.changes:
        return
    vocabulary = {"vocab_size": vocab_size}
    ours = configure(vocabulary | arm.values, as_variant=True)
    theirs = configure(vocabulary | base.values, as_variant=True)
    _, excess = costs.match(ours, theirs, "none")
    if kind == "flops":
        our_flops = costs.flops_per_token(ours, ours.block_size)
        excess = our_flops - costs.flops_per_token(theirs, theirs.block_size)
    if not excess:
        return
    try:
        width, _ = costs.match(ours, theirs, kind)
    except ValueError as error:
        fix = "leave the arm out, or give match=none"
        raise UserError(f"arm {arm.name}: {error}", f"match={kind}", fix) from None
    if width != costs.mlp_width(ours):
        arm.values = arm.values | {"mlp_width": width}
        arm.match = {"mlp_width": width, "adjusted": True}


def open_data(base):
    """(facts of the data, the tokenizer, the stored losses of n-gram models or None). Prepares a
    missing dataset if it is a small one."""
    config = build(TrainConfig, base)
    with contextlib.redirect_stdout(sys.stderr):  # what it prepares
        data = train.open_data(config, Runtime("cpu", "float32"))
    data.open(base["block_size"], config.order_seed)
    val = data.splits["val"]
    kind = "text" if isinstance(val, Text) else "pairs"
    facts = {
        "dataset": base["dataset"],
        "kind": kind,
        "fingerprint": data.fingerprint,
        "train_tokens": data.meta["splits"]["train"]["tokens"],
        "scored_tokens": val.scored()[0],
        "vocab_size": data.vocab_size,
        "bits_per_byte": data.bits_per_byte if kind == "text" else None,
    }
    counted = data.meta.get("ngrams") if kind == "text" else None
    return facts, data.tokenizer, counted
