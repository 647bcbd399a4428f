"""
The fingerprint of an arm: what its code computes, in numbers. identity.py compares and keeps them.

    python -m bench.ablation.fingerprint bench/results/answer/gpt2 ...   # do the rows still hold?

prints for each arm of some sweeps whether its code still computes what it computed when its runs
were measured; --form checks the form of the runs, too, where it is stored: half a minute for each
compiled arm.

train.py's own code runs on a synthetic text of the arm's vocabulary: eight steps of the arm's
model, with a schedule that is shortened to them, with dropout, and with gradients that are clipped;
an evaluation; and of the arm's whole run the learning rates and the order of the samples. This is
in float32, eager, on one thread of the CPU. For arms that are measured in another form, compiled or
in 16 bits, the eight steps are also taken in that form.
"""

import contextlib
import functools
import hashlib
import io
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import torch

import train
from bench.ablation import identity
from common.configurator import print_help
from common.errors import UserError, printable, run
from common.runtime import set_up
from tokens.token_files import TokenFile, make_meta, write_meta
from tokens.tokenizer import CharTokenizer
from training.optim import learning_rate
from training.settings import read_config

TOKENS = 65536  # of the synthetic text
STEPS = 8
BATCH = 2  # samples in a micro-batch, and the most micro-batches in a step
SEEDS = {"seed": 1, "data_seed": 2}
FORM = {"device": "cpu", "dtype": "float32", "compile": False}
# Keys of the eight steps. The arm sets all other keys.
SHORT = {
    "max_iters": STEPS,
    "warmup_iters": 2,
    "lr_decay_iters": None,
    "batch_size": BATCH,
    "dropout": 0.1,
    "grad_clip": 0.1,
}
VAL_SAMPLES = 12.5  # of the validation split; the last one is cut short
SCORED_SAMPLES = 8
PROMPT = 5  # tokens of the prompt of a synthetic pair
ANSWER = 3  # tokens of its answer


# ---------------------------------------------------------------- the synthetic text


def write_text(folder, vocab_size, block_size, kind):
    """Write a dataset of seeded random tokens, the small ids more often than the large ones, as
    running text or as pairs. Returns the number of its training samples."""
    random = np.random.default_rng(0)
    sample = PROMPT + ANSWER if kind == "pairs" else block_size
    sizes = {"train": max(TOKENS, 8 * block_size), "val": int(VAL_SAMPLES * sample)}
    folder.mkdir(parents=True)
    splits = {}
    for split, size in sizes.items():
        file = TokenFile(folder / f"{split}.bin", vocab_size, masked=kind == "pairs")
        ids = (random.random(size) ** 3 * vocab_size).astype(np.int64)
        if kind == "pairs":
            mask = bytes(PROMPT) + bytes([1]) * ANSWER
            for pair in ids[: size // sample * sample].reshape(-1, sample):
                file.add(pair, sample, mask)
        else:
            file.add(ids, size)
        splits[split] = file.close()
    codes = [code for code in range(32, vocab_size + 4096) if not 0xD800 <= code < 0xE000]
    tokenizer = CharTokenizer("".join(map(chr, codes[:vocab_size])))
    meta = make_meta(folder.name, "char", tokenizer, splits, source="", sha256="")
    write_meta(folder, meta, tokenizer)
    if kind == "pairs":
        return sizes["train"] // sample
    return (sizes["train"] - 1) // block_size  # the last target is one token further


@contextlib.contextmanager
def synthetic_text(values, kind):
    """The values of a run on a synthetic text that takes the place of its dataset, and the number
    of its training samples."""
    block_size = values["block_size"]
    with tempfile.TemporaryDirectory() as folder:
        samples = write_text(Path(folder) / "text0", values["vocab_size"], block_size, kind)
        paths = {"data_dir": folder, "dataset": "text0", "out_dir": f"{folder}/out"}
        sample = PROMPT + ANSWER if kind == "pairs" else block_size
        yield values | SEEDS | paths | {"eval_tokens": SCORED_SAMPLES * sample}, samples


@contextlib.contextmanager
def one_thread():
    """Compute on one thread, so that sums have one order, and hide what is printed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        torch.set_num_threads(threads)


def start_run(values):
    """The run that train.py makes from these values. It writes no file and prints no line."""
    argv = [f"--{key}={value}" for key, value in values.items()]
    settings = read_config(argv, "")
    runtime = set_up(settings.config.device, settings.config.dtype)
    with contextlib.redirect_stdout(io.StringIO()):
        return train.make_run(settings, runtime)


# ---------------------------------------------------------------- the numbers


def compute(values, kind="text"):
    """The fingerprint of a run, {quantity: its numbers}. values: its keys of train.py, without
    seeds and paths, with vocab_size and block_size. kind: "pairs", or "text"."""
    return after_steps(shortened(values | FORM), kind) | planned(values | FORM, kind)


def compute_in_form(values, kind):
    """{quantity: its numbers} of the eight steps on the device, in the number format, and compiled
    or not, as these values say."""
    return steps_in_form(shortened(values), kind)


def has_form(values):
    """Whether a run with these values is in another form than the fingerprint."""
    return any(values[key] != value for key, value in FORM.items() if key != "device")


def shortened(values):
    """The values of the eight steps of a run as JSON, so that arms that differ in the length of
    their runs alone share the numbers."""
    accumulated = min(BATCH, values.get("gradient_accumulation_steps", 1))
    short = values | SHORT | {"gradient_accumulation_steps": accumulated}
    return json.dumps(short, sort_keys=True)


def twins(values, kind="text"):
    """What the eight steps give from first weights that differ in the last bit: three of them."""
    return [after_steps(shortened(values | FORM), kind, seed) for seed in (1, 2, 3)]


def change_last_bits(model, seed):
    """Multiply each weight of a model by 1, or by the float32 next to it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p *= 1 + 2**-24 * torch.randn(p.shape, generator=generator)


@functools.cache
def after_steps(short, kind, twin=0):
    """The numbers of the eight steps, of the weights after them, and of their evaluation. twin: the
    seed of a change of the first weights in their last bits; 0: none."""
    with synthetic_text(json.loads(short), kind) as (values, _), one_thread():
        run = start_run(values)
        if twin:
            change_last_bits(run.model, twin)
        numbers = take_steps(run)
        return numbers | norms(run) | evaluate(run)


@functools.cache
def steps_in_form(short, kind):
    """The numbers of the eight steps."""
    with synthetic_text(json.loads(short), kind) as (values, _), one_thread():
        torch._dynamo.reset()  # or torch counts the compiled forms of all arms together
        return take_steps(start_run(values))


def take_steps(run):
    """The losses, and the gradient norms before and after clipping, of the steps of a run."""
    clipped = []  # squared gradient norms of the optimizers, each before it updates its weights

    def note(optimizer, *_):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        clipped.append(sum(float(g.double().square().sum()) for g in grads if g is not None))

    for optimizer in run.optimizers:
        optimizer.register_step_pre_hook(note)
    losses = []
    gradient_norms = []
    for _ in range(STEPS):
        loss, norm = train.train_step(run)
        losses.append(float(loss))
        gradient_norms.append(float(norm))
    of_steps = np.reshape(clipped, (STEPS, len(run.optimizers))).sum(1)
    return {
        "loss": rounded(losses),
        "gradient norm": rounded(gradient_norms),
        "clipped gradient norm": rounded(math.sqrt(square) for square in of_steps),
    }


def norms(run):
    """{parameter: [its 2-norm, and the 2-norms of the moments that its optimizer keeps]}."""
    found = {}
    for name, p in run.model.named_parameters():
        tensors = [p.detach()]
        for optimizer in run.optimizers:
            state = optimizer.state.get(p, {})
            tensors += [state[key] for key in sorted(state) if state[key].shape == p.shape]
        found[name] = rounded(float(tensor.double().norm()) for tensor in tensors)
    return {"norms": found}


def evaluate(run):
    """The losses of an evaluation, and a digest of the tokens that the model scored."""
    seen = hashlib.sha256()

    def note(module, inputs):
        for part in inputs:
            seen.update(part.numpy().tobytes())

    hook = run.model.register_forward_pre_hook(note)
    row = train.score(run)
    hook.remove()
    losses = {}
    for name in ("train_loss", "val_loss", "val_loss_tune", "val_loss_report"):
        (losses[name],) = rounded([row[name]])
    return {"evaluation": losses, "scored": seen.hexdigest()[:16]}


def planned(values, kind):
    """The learning rates of all steps of a run, and digests of the samples of four steps: the
    first, the middle, the last, and the one in which an epoch ends."""
    with synthetic_text(values, kind) as (values, samples), one_thread():
        run = start_run(values)
        steps = run.config.max_iters
        rates = [learning_rate(step, run.config) for step in range(steps)]
        named = {
            "first": 0,
            "middle": steps // 2,
            "last": steps - 1,
            "end of an epoch": samples // run.step_samples,
        }
        order = {}
        for name, step in named.items():
            seen = hashlib.sha256()
            for micro_batch in run.loader.get(step):
                for part in micro_batch.inputs:
                    seen.update(part.numpy().tobytes())
            order[name] = seen.hexdigest()[:16]
    # Ten digits: the last ones differ between libraries of mathematics.
    content = ",".join(f"{rate:.9e}" for rate in rates)
    return {
        "learning rates": {
            "sha256": hashlib.sha256(content.encode()).hexdigest()[:16],
            "mean": f"{math.fsum(rates) / steps:.6g}",
            "last": f"{rates[-1]:.6g}",
        },
        "samples": order,
    }


def rounded(numbers):
    """Numbers with 7 digits; those that are not finite as texts, which JSON has."""
    return [float(f"{x:.6e}") if math.isfinite(x) else str(x) for x in numbers]


def check(line, with_form):
    """[text] of the quantities that today's code computes otherwise than a stored fingerprint.
    with_form: also in the form of its runs, if its numbers are stored."""
    known = identity.by_configuration([line])
    new = line | {"numbers": compute(line["values"], line["kind"])}
    _, changed = identity.recognise(known, new, twins)
    if with_form and "form" in line:
        found = compute_in_form(line["values"], line["kind"])
        changed += identity.differences(line["form"], found, identity.OF_A_FORM)
    return changed


def main(argv):
    print_help(argv, __doc__, [])
    folders = [word for word in argv if word != "--form"]
    if not folders:
        raise UserError("no folders", "command line", "name folders of bench/ablate.py")
    stale = 0
    for folder in folders:
        lines = identity.stored(folder)
        if not lines:
            fix = "name a folder of bench/ablate.py"
            raise UserError("no fingerprints here", Path(folder) / identity.NAME, fix)
        for line in lines:
            changed = check(line, "--form" in argv)
            if changed:
                stale += 1
            outcome = "; ".join(changed) or "fresh"
            print(printable(f"{folder}: {line['arm']}: {outcome}"), flush=True)
    return int(stale > 0)


if __name__ == "__main__":
    run(main)
