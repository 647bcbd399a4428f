"""
Train a model:

    python train.py config/llama_shakespeare.py
    python train.py config/gpt2_shakespeare.py --batch_size=32 --compile=False
    python train.py config/llama_shakespeare.py --init_from=resume
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py

The run folder (weights/checkpoint.py) holds all that sampling needs; resuming also reads the
dataset. On a CPU, a run that is interrupted and resumed ends with the same bits as an uninterrupted
one, because the batch and the dropout of a step depend on (seed, step) alone. (A compiled run does
so on one thread: several sum the embedding's gradient in any order.) From Python:
`train.main([...])`.
"""

import math
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from common import errors, files

if __name__ == "__main__":
    errors.starting("train.py")

import torch

from common.runtime import Runtime, StopRequest, seed_for, set_up, versions
from parts import moe
from parts.architectures import make
from tokens import mixture, token_files
from training import losses, parallel, preferences, report, run_folder, settings
from training.optim import learning_rate, make_optimizers
from training.settings import TrainConfig, read_config
from weights import checkpoint

EVAL_TRAIN_TOKENS = 32768  # an evaluation scores at most so many tokens of the train split


@dataclass
class Run:
    """A run that is ready for the step after `step`."""

    config: TrainConfig  # each `auto` is resolved
    runtime: Runtime
    sources: list  # tokens.mixture.Source, one for each dataset
    batches: object  # the training samples in their order; the loader makes micro-batches of them
    tokenizer: object
    model: torch.nn.Module  # for saving and sampling
    net: torch.nn.Module  # its loss, for training and evaluating: compiled, in DDP
    optimizers: list
    scaler: torch.amp.GradScaler  # of a float16 loss; otherwise it does nothing
    step: int  # the number of steps taken
    state: dict  # saved beside the weights: best loss, seconds, data fingerprint, samples drawn
    saved_config: dict  # the configuration of training and model, saved too
    saved: int | None = None  # the step of the newest checkpoint
    unread: list = field(default_factory=list)  # (step, loss, norm, skipped) still on the device

    def __post_init__(self):
        self.loader = parallel.Loader(self.batches, self.config, self.runtime)
        self.step_samples = self.config.batch_size * self.config.gradient_accumulation_steps
        self.step_tokens = self.step_samples * self.model.config.block_size  # in the global batch
        self.has_experts = bool(moe.layers_of(self.model))


class Result(NamedTuple):
    """What `main` returns."""

    status: int  # 0; 1: a check failed; 143, 130: a signal; 141: stdout was closed
    folder: Path | None = None  # the newest checkpoint
    rows: list = ()  # those of log.jsonl: {"step", "loss", ...}, {"step", "val_loss", ...}


# ---------------------------------------------------------------- data, model, optimizers


def find_data(config, runtime):
    """({name: meta.json}, tokenizer) of the datasets. Prepares the small ones that are missing."""
    folders = {name: Path(config.data_dir) / name for name in config.datasets}

    def prepare_missing():
        for name in [name for name in folders if not token_files.is_prepared(folders[name])]:
            from prepare import SMALL, prepare  # here, since it is rarely needed

            if name in SMALL:
                print(f"no dataset in {folders[name]} yet: running `prepare.py {name}`")
                prepare(name, data_dir=config.data_dir)

    parallel.main_first(prepare_missing, runtime)
    metas = {name: token_files.load_meta(folder) for name, folder in folders.items()}
    tokenizers = {name: token_files.load_tokenizer(folders[name], metas[name]) for name in folders}
    return metas, mixture.common_tokenizer(tokenizers, config)


def make_model(given, tokenizer, vocab_size):
    """The model to train, on the CPU: from a checkpoint, from pretrained weights, or new. `given`
    are the Settings: config, the model's keys, and the checkpoint's folder and state."""
    if given.folder:
        model = checkpoint.load_model(given.folder, given.model)
        settings.check_vocabulary(model.config.vocab_size, vocab_size, given.config)
        return model

    weights = None
    if given.config.init_from != "scratch":
        from weights import hf  # here, since it is rarely needed

        given, weights = settings.import_weights(given, hf, tokenizer)
    config = settings.new_model_config(given, vocab_size)
    torch.manual_seed(seed_for(given.config.seed, 0))
    model = make(config)
    if weights is not None:
        hf.load_weights(model, weights)
    return model


def make_run(given, runtime):
    """The Run of some Settings. Raises UserError if data, model and checkpoint do not fit."""
    config = given.config

    # The data and the model.
    metas, tokenizer = find_data(config, runtime)
    state = settings.first_state(given, mixture.mixed_fingerprint(metas.values()))
    vocab_size = metas[config.datasets[0]]["vocab_size"]
    model = make_model(given, tokenizer, vocab_size).to(runtime.device)
    sources = mixture.open_sources(config, metas, tokenizer, model.config.block_size)
    batches = sources[0].batches
    if len(sources) > 1:
        batches = mixture.Mixture(sources, mixture.data_seed(config))
    preferences.check_objective(config, model, sources)

    # Resolve each `auto` here and save the result, so that a resumed run makes the same choice.
    samples = config.batch_size * config.gradient_accumulation_steps
    tokens = samples * model.config.block_size * (config.max_iters - state["step"])
    runtime.auto_dtype &= not config.check  # the golden curves are of float32
    flops = 6 * report.used_parameters(model) * tokens
    why = "as asked" if given.state is None else "as set for this run"
    runtime.choose_compile(config.compile, flops, why)
    kind = runtime.device.split(":")[0]
    device = kind if config.device == "auto" else config.device
    config = replace(config, device=device, dtype=runtime.dtype, compile=runtime.compile)

    # The model as it is trained, and its optimizers.
    if config.activation_checkpointing:
        for block in model.blocks:
            block.forward = parallel.recomputed(block.forward, runtime)
    parallel.shard(model, config.parallel, runtime)
    optimizers = make_optimizers(model, config, runtime)
    scaler = torch.amp.GradScaler(kind, enabled=runtime.dtype == "float16")
    accumulates = config.gradient_accumulation_steps > runtime.world_size
    loss = parallel.Loss(model)
    if config.objective == "dpo":
        loss = preferences.PreferenceLoss(model, config.dpo_beta)
    net = parallel.training_net(loss, runtime, config.compile, accumulates)

    saved_config = asdict(config) | asdict(model.config) | {"versions": versions()}
    data, learner = (sources, batches, tokenizer), (model, net, optimizers, scaler)
    run = Run(config, runtime, *data, *learner, state["step"], state, saved_config)

    # Go on where the checkpoint of a resumed run was saved.
    stored = {} if given.state is None else checkpoint.optimizer_tensors(given.folder)
    if given.state is not None:
        parallel.scatter(model, optimizers, stored)
        scaler.load_state_dict(state.get("scaler", {}))
        run.saved = run.step
    preferences.set_references(run, stored)  # of objective=dpo: the losses before training
    return run


# ---------------------------------------------------------------- the step


def train_step(run):
    """Take one optimizer step on the global batch number run.step (from 0), and count it.

    Returns (mean loss, with that of the experts' balance; gradient norm before clipping), ()
    tensors on the device, and keeps them in run.unread, so that a GPU is waited for in `read_steps`
    alone (with float16 and with experts also here)."""
    config, runtime = run.config, run.runtime
    micro_batches, all_targets = run.loader.get(run.step)

    # Forward and backward: gradients accumulate, and the ranks average them after the last
    # micro-batch. The net gives the mean over a micro-batch's targets, which is weighted by their
    # share of all targets (masks leave some micro-batches fewer).
    loss_sum = torch.zeros((), device=runtime.device)
    for number, inputs, targets in micro_batches:
        torch.manual_seed(seed_for(config.seed, 1, run.step, number))  # for dropout
        is_last = number == micro_batches[-1].number
        with parallel.accumulating(run.net, run.model, is_last), runtime.autocast():
            loss = run.net(*inputs) / (all_targets / (targets * runtime.world_size))
        run.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    loss = parallel.all_reduce_sum(loss_sum, runtime) / runtime.world_size

    # Update the weights.
    lr = learning_rate(run.step, config)
    norm, skipped = update_weights(run, lr)
    if run.has_experts and not skipped:
        moe.after_step(run.model, lambda tally: parallel.all_reduce_sum(tally, runtime))

    # Count the samples of each dataset, and the step.
    if len(run.sources) > 1:
        counted = run.state.get("samples", {})
        drawn = run.batches.drawn(run.step * run.step_samples, run.step_samples)
        run.state["samples"] = {name: counted.get(name, 0) + n for name, n in drawn.items()}
    run.step += 1
    run.unread.append((run.step, loss, norm, skipped))
    return loss, norm


def update_weights(run, lr):
    """Clip the gradients, and let the optimizers update the weights. Returns (gradient norm before
    clipping, whether the step was skipped).

    If a float16 loss was scaled too much, its gradients overflow. Then every optimizer skips the
    step, even one whose own gradients are finite, and the scale is halved. Only float16 waits here
    for the device."""
    optimizers, scaler = run.optimizers, run.scaler
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = [p for group in groups for p in group["params"]]
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(parameters, run.config.grad_clip or math.inf)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded by fsdp

    overflow = scaler.is_enabled() and not norm.isfinite().item() and scaler.get_scale() > 1
    for group in groups:
        group["lr"] = lr * group.get("rate", 1.0)
    for optimizer in optimizers:
        if not overflow:
            scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()  # halves the scale after an overflow, doubles it after 2000 good steps
    return norm, overflow


def read_steps(run):
    """Wait for the steps since the last reading, at least one. Returns (loss, gradient norm) of the
    newest. Raises FloatingPointError if one is not finite."""
    numbers = torch.stack([torch.stack([loss, norm]) for _, loss, norm, _ in run.unread]).tolist()
    for (step, _, _, skipped), (loss, norm) in zip(run.unread, numbers, strict=True):
        if not math.isfinite(loss) or not (math.isfinite(norm) or skipped):
            where = f"at step {step}, learning rate {learning_rate(step - 1, run.config):.3g}"
            raise FloatingPointError(f"loss {loss:.4g}, gradient norm {norm:.4g} {where}")
    run.unread.clear()
    return numbers[-1]


# ---------------------------------------------------------------- the evaluation


@torch.no_grad()
def evaluate(run, split, limit, stop=None):
    """The losses and measures of `limit` tokens of a split (0: all), each scored once, batch by
    batch, dropout off, as losses.batch_sums gives them. The ranks divide the batches among them.
    Returns None if a stop signal arrives midway, but only in a single process."""
    runtime, values, counts = run.runtime, [], []  # the last two of each batch
    net = parallel.evaluation_net(run.net, runtime.device)
    batches = split.eval_batches(run.config.batch_size, limit)
    measured = {"measured": True} if split.measures else {}  # pairs and tasks: are answers right?

    run.model.eval()
    while group := list(islice(batches, runtime.world_size)):
        if stop is not None and stop.status and runtime.world_size == 1:
            run.model.train()
            return None
        # FSDP needs a forward pass on every rank, so a rank without a batch repeats one.
        inputs = group[runtime.rank % len(group)]
        inputs = [parallel.to_device(part, runtime.device) for part in inputs]
        with runtime.autocast():
            value = net(*inputs, **measured)
        for rank, (_, y, *_) in enumerate(group):  # one entry for each batch, 0 for other ranks'
            values.append(value)
            counts.append(losses.count_targets(split, y) if rank == runtime.rank else (0, 0))
    run.model.train()
    return parallel.all_reduce_sum(losses.batch_sums(values, counts), runtime)


def score(run, stop=None):
    """The log row of an evaluation of both splits; None if a stop signal arrives midway. The last
    one of a run also scores the whole validation split, where eval_tokens are fewer. With several
    datasets the row also holds the number of samples of each drawn so far."""
    limit, sums = run.config.eval_tokens, {"train": [], "val": [], "whole": []}
    for source in run.sources:
        train_split, val_split = source.splits["train"], source.splits["val"]
        train_limit = min(EVAL_TRAIN_TOKENS, limit or len(val_split))
        sums["train"].append(evaluate(run, train_split, train_limit, stop))
        sums["val"].append(evaluate(run, val_split, limit, stop))
        if limit and run.step == run.config.max_iters:
            sums["whole"].append(evaluate(run, val_split, 0, stop))
        if any(batches[-1] is None for batches in sums.values() if batches):
            return None
    row = {"step": run.step} | losses.evaluation_row(run.sources, *sums.values())
    if len(run.sources) > 1:
        row["samples"] = run.state.get("samples", {})
    return row | {"seconds": run.state["seconds"]}


# ---------------------------------------------------------------- the loop


def train(run, log):
    """Take all steps, and evaluate and save whenever that is due. Returns (exit status of a stop
    signal or None, median tokens/s)."""
    config, speeds, stop = run.config, [], StopRequest()
    while True:
        # Evaluate and save. An evaluation that a signal interrupts is repeated on resuming.
        if evaluation_due(run):
            evaluate_and_save(run, log, stop)
        if stop.agreed(run.runtime, run.step) or run.step >= config.max_iters:
            break

        # Take a step. The first one compiles the model.
        if run.runtime.compile and not speeds:
            log.phase("compiling, which takes about a minute")
        if not run.unread:
            began = time.perf_counter()
        train_step(run)
        log.advance()

        # Wait for the device only where the results are needed.
        report_due = run.step % config.log_interval == 0
        if report_due or log.estimate_due() or stop.status or evaluation_due(run) or not speeds:
            count = len(run.unread)
            loss, norm = read_steps(run)
            seconds = time.perf_counter() - began
            run.state["seconds"] += seconds
            speeds += [count * run.step_tokens / seconds] * count
            log.estimate(run.step, seconds / count)
            if report_due:
                lr = learning_rate(run.step - 1, config)
                log.report(run_folder.step_row(run, loss, norm, lr, seconds / count))
            log.phase("")
        if log.broken:  # nothing reads our output any more (`| head`): stop
            stop.status = errors.BROKEN_PIPE

    if stop.status and run.saved != run.step:
        save(run)
    return stop.status, statistics.median(speeds or [0])


def evaluation_due(run):
    """Whether the weights of this step are to be evaluated and saved, and have not been yet."""
    due = run.step % run.config.eval_interval == 0 or run.step == run.config.max_iters
    return due and run.state.get("evaluated") != run.step


def evaluate_and_save(run, log, stop):
    """Evaluate, record the best loss, and save a checkpoint, unless a stop signal interrupts the
    evaluation. Raises FloatingPointError, and saves nothing, if the loss is not finite."""
    log.phase("evaluating")
    row, state = score(run, stop), run.state
    if row is None:
        return
    if not math.isfinite(row["val_loss"]):
        raise FloatingPointError(f"validation loss {row['val_loss']:.4g} at step {run.step}")
    log.evaluation(row)

    state["evaluated"] = run.step
    is_best = state["best_val_loss"] is None or row["val_loss"] < state["best_val_loss"]
    if is_best:
        state["best_val_loss"], state["best_bits_per_byte"] = row["val_loss"], row["bits_per_byte"]
        state["best_step"] = run.step
    if run.step or not run.config.max_iters:  # step 0 costs nothing to repeat
        log.phase("saving")
        save(run, is_best)
    log.phase("")


def save(run, is_best=False):
    """Save a checkpoint of this step. Every rank must call it. Raises FloatingPointError, and saves
    nothing, if a loss or gradient norm since the last reading is not finite."""
    if run.unread:
        read_steps(run)
    weights, moments = parallel.gather(run.model, run.optimizers, run.runtime)
    moments |= preferences.references(run.sources)
    if run.runtime.main:
        run.state |= {"step": run.step, "scaler": run.scaler.state_dict()}
        tokenizer, out_dir = run.tokenizer.to_json(), run.config.out_dir
        content = (weights, moments, run.state, run.saved_config, tokenizer)
        checkpoint.save(out_dir, run.step, *content, is_best)
    run.saved = run.step


# ---------------------------------------------------------------- main


def main(argv):
    """Train, or check the run without training, as argv says. Returns a Result."""
    given = read_config(argv, __doc__)
    config, resuming = given.config, given.state is not None
    runtime = set_up(config.device, config.dtype)
    report.print_once(runtime, f"this run:\n{files.command('train.py', *argv)}")

    # Find every mistake before anything is written to out_dir.
    parallel.check_layout(config, runtime)
    folder = (config.out_dir, resuming, config.overwrite)
    if config.trains:
        parallel.main_first(lambda: run_folder.check_out_dir(*folder), runtime)
    run = make_run(given, runtime)
    if runtime.main:
        report.describe(run)
    if not config.trains:
        return Result(check_only(run, argv))
    if run.step > config.max_iters or run.step == run.state.get("evaluated") == config.max_iters:
        done = f"step {run.step} of {config.max_iters}: nothing to do (--max_iters=N continues)"
        report.print_once(runtime, done)
        return Result(0, given.folder)

    # Train. Rank 0 holds the lock of the run folder until the end.
    lock = parallel.main_first(lambda: run_folder.open_out_dir(*folder), runtime)
    with lock or nullcontext():
        log = run_folder.RunLog(run, report.peak_speed(run)) if lock else run_folder.NoLog()
        with report.explained(run, save):  # after an error: save, then explain
            status, speed = train(run, log)
        log.close()
        if runtime.main and status != errors.BROKEN_PIPE:
            finish(run, given.command_line, status, speed)
        if runtime.world_size > 1:
            torch.distributed.barrier()  # rank 0 may still be writing its sample
            torch.distributed.destroy_process_group()
    return Result(status or 0, checkpoint.find(config.out_dir), log.rows)


def check_only(run, argv):
    """Do what --eval_only, --dry_run, --doctor or --check asks for. Returns the exit status."""
    from training import check, doctor, dry_run  # here, since it is rarely needed

    with report.explained(run):
        if run.config.dry_run:
            return dry_run.dry_run(run, train_step, score, EVAL_TRAIN_TOKENS)
        if run.config.doctor:
            return doctor.doctor(run, train_step)
        if run.config.check:
            return check.check(run, argv, train_step)
        return report.print_evaluation(run, score, evaluate)


def finish(run, command_line, status, speed):
    """Print the results of the run, a sample of its text, and the commands to run next."""
    from sample import SampleConfig, write_sample  # here, so that training starts without it

    if status:
        return report.print_how_to_continue(run)
    report.print_results(run, speed)
    folder = checkpoint.find(run.config.out_dir)  # with fsdp no rank holds the whole model
    model = checkpoint.load_model(folder, run.saved_config, run.runtime.device).eval()
    prompt, stop = report.closing_prompt(run.sources[0].splits["val"], run.tokenizer)
    sampling = SampleConfig(max_new_tokens=300, stop=stop)
    write_sample(model, run.tokenizer, prompt, run.runtime, sampling)
    report.print_next_commands(folder, run.config, command_line)


if __name__ == "__main__":
    errors.run(lambda argv: main(argv).status)
