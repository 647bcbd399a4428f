"""
Train a model:

    python train.py config/llama_shakespeare.py
    python train.py config/gpt2_shakespeare.py --batch_size=32 --compile=False
    python train.py config/llama_shakespeare.py --init_from=resume
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py

If tiny-shakespeare has not been prepared, that is done first. The run folder
(weights/checkpoint.py) holds everything that resuming and sampling need. On a CPU, a run that is
interrupted and resumed ends with the same bits as an uninterrupted one, because the batch and the
dropout of a step depend on (seed, step) alone.
"""

import math
import statistics
import time
from itertools import islice
from pathlib import Path

from common import errors

if __name__ == "__main__":
    errors.starting("train.py")

import torch

from common.runtime import StopRequest, seed_for, set_up
from parts import moe
from sample import SampleConfig, write_sample
from tokens.mixture import bits_per_byte, common_tokenizer, open_split
from tokens.token_files import is_prepared, load_meta, load_tokenizer
from training import check, last_words, parallel
from training.doctor import doctor
from training.dry_run import dry_run
from training.failures import explained, no_step_lost
from training.feeder import to_device
from training.losses import batch_sums, evaluation_row, mean_loss, measures, weight
from training.optim import learning_rate
from training.preferences import references
from training.run_folder import evaluation_lines, measures_words, step_row
from training.settings import read_config
from training.start import check_start, make_run, open_folder, open_log
from weights import checkpoint

BROKEN_PIPE = 141  # the exit status of a process that SIGPIPE ends
EVAL_TRAIN_TOKENS = 32768  # tokens of the train split that an evaluation scores


# ---------------------------------------------------------------- the step


def train_step(run):
    """Take one optimizer step on the global batch number run.step (from 0), and count it.

    Returns (mean loss in nats per token, gradient norm before clipping), () tensors on the device,
    and keeps them in run.unread. Nothing here waits for a GPU: `read_steps` does."""
    config, runtime, learner, data = run.config, run.runtime, run.learner, run.data

    # This rank's micro-batches: (x, y, number of targets), x and y (batch_size, block_size). Those
    # of preferences hold their reference, too (training/preferences.py).
    numbers = range(runtime.rank, config.gradient_accumulation_steps, runtime.world_size)
    places, following = (places_of(run, step, numbers) for step in (run.step, run.step + 1))
    micro_batches = data.feeder.take(places, following, runtime.device)

    # Every target has the same weight in the loss, even if masks leave some micro-batches fewer.
    all_targets = run.step_tokens
    if data.batches.masked:
        all_targets = parallel.total(sum(count for *_, count in micro_batches), runtime)

    # Forward and backward: gradients accumulate, and the ranks average them after the last
    # micro-batch.
    loss_sum = torch.zeros((), device=runtime.device)
    for n, (*inputs, count) in zip(numbers, micro_batches, strict=True):
        torch.manual_seed(seed_for(config.seed, 1, run.step, n))  # for dropout
        with parallel.accumulating(learner.net, learner.model, last=n == numbers[-1]):
            with runtime.autocast():
                loss = learner.net(*inputs) / (all_targets / (count * runtime.world_size))
            learner.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    loss = parallel.total(loss_sum, runtime) / runtime.world_size

    # Update the weights.
    norm, skipped = update(run, learning_rate(run.step, config))

    # Count the samples of each dataset, and the step.
    if len(data.sources) > 1:
        counted = run.state.get("samples", {})
        drawn = data.batches.drawn(run.step * run.step_samples, run.step_samples)
        run.state["samples"] = {name: counted.get(name, 0) + n for name, n in drawn.items()}
    run.step += 1
    run.unread.append((run.step, loss, norm, skipped))
    return loss, norm


def places_of(run, step, numbers):
    """[(first sample, number of samples), ...] of the micro-batches with these numbers."""
    first, size = step * run.step_samples, run.config.batch_size
    return [(first + n * size, size) for n in numbers]


def update(run, lr):
    """Clip the gradients and let the optimizers update the weights. Returns (gradient norm, whether
    the step was skipped).

    If a float16 loss was scaled too much, its gradients overflow. Then every optimizer skips the
    step, even one whose own gradients are finite, and the scale is halved. Only float16 waits here
    for the device."""
    learner, scaler = run.learner, run.learner.scaler
    groups = [group for optimizer in learner.optimizers for group in optimizer.param_groups]
    parameters = [p for group in groups for p in group["params"]]

    for optimizer in learner.optimizers:
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(parameters, run.config.grad_clip or math.inf)
    norm = parallel.whole(norm)

    overflow = scaler.is_enabled() and not norm.isfinite().item() and scaler.get_scale() > 1
    for group in groups:
        group["lr"] = lr
    for optimizer in learner.optimizers:
        if not overflow:
            scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()  # halves the scale after an overflow, doubles it after 2000 good steps
    if not overflow:
        moe.after_step(learner.model, lambda tally: parallel.total(tally, run.runtime))
    return norm, overflow


def read_steps(run):
    """Wait for the device to finish the steps since the last reading, at least one. Returns (loss,
    gradient norm) of the newest. Raises FloatingPointError if one of theirs is not finite; what was
    saved before is good, since `save` reads first."""
    steps, losses, norms, skipped = zip(*run.unread, strict=True)
    run.unread.clear()
    losses, norms = torch.stack([torch.stack(losses), torch.stack(norms)]).tolist()

    for step, loss, norm, was_skipped in zip(steps, losses, norms, skipped, strict=True):
        if not math.isfinite(loss) or not (math.isfinite(norm) or was_skipped):
            where = f"at step {step}, learning rate {learning_rate(step - 1, run.config):.3g}"
            raise FloatingPointError(f"loss {loss:.4g}, gradient norm {norm:.4g} {where}")
    return losses[-1], norms[-1]


# ---------------------------------------------------------------- the evaluation


@torch.no_grad()
def evaluate(run, split, limit, stop=None):
    """The losses and measures of the first `limit` tokens of a split (0: all), batch by batch,
    dropout off, as losses.batch_sums gives them.

    Each token is scored once; prompt tokens are not scored. The ranks divide the batches among
    them. Returns None if a stop signal arrives midway, but only in a single process: several ranks
    always finish the evaluation."""
    runtime, learner = run.runtime, run.learner
    net, found, weights = parallel.local(learner.net, runtime.device), [], []
    batches = split.eval_batches(run.config.batch_size, limit)

    learner.model.eval()
    while group := list(islice(batches, runtime.world_size)):
        if stop is not None and stop.status and runtime.world_size == 1:
            learner.model.train()
            return None
        for rank, (_, y, *_) in enumerate(group):
            weights.append(weight(split, y) if rank == runtime.rank else (0, 0))
        # FSDP needs a forward pass on every rank, so a rank without a batch repeats one.
        inputs = [to_device(part, runtime.device) for part in group[runtime.rank % len(group)]]
        with runtime.autocast():
            found += [net(*inputs, **({"measured": True} if split.measures else {}))] * len(group)
    learner.model.train()
    return parallel.total(batch_sums(found, weights), runtime)


def score(run, stop=None):
    """The log row of an evaluation of both splits; None if a stop signal arrives midway. With
    several datasets it also holds the number of samples of each drawn so far."""
    config, sources = run.config, run.data.sources
    all_train_sums, all_val_sums = [], []
    for source in sources:
        train_split, val_split = source.splits["train"], source.splits["val"]
        train_limit = min(EVAL_TRAIN_TOKENS, config.eval_tokens or len(val_split))
        train_sums = evaluate(run, train_split, train_limit, stop)
        val_sums = evaluate(run, val_split, config.eval_tokens, stop)
        if train_sums is None or val_sums is None:
            return None
        all_train_sums.append(train_sums)
        all_val_sums.append(val_sums)

    row = {"step": run.step} | evaluation_row(sources, all_train_sums, all_val_sums)
    if len(sources) > 1:
        row["samples"] = run.state.get("samples", {})
    return row | {"seconds": run.state["seconds"]}


def score_split(run):
    """The lines that --eval_only --split prints: the loss of each dataset's split. Raises UserError
    if a dataset has no such split."""
    config, tokenizer, lines = run.config, run.data.tokenizer, []
    for source in run.data.sources:
        folder = Path(config.data_dir) / source.name
        split = open_split(folder, config.split, run.learner.model.config.block_size)
        sums = evaluate(run, split, config.eval_tokens)
        loss = mean_loss(sums)
        row = {"bits_per_byte": loss * bits_per_byte(split, tokenizer, config.eval_tokens)}
        row |= measures([sums], [1.0], [split.measures])
        what = f"{config.split} loss {loss:.4f}{measures_words(row)}"
        lines.append(f"step {run.step}: {source.name}: {what}")
    return "\n".join(lines)


# ---------------------------------------------------------------- the loop


def train(run, log):
    """Take all steps, and evaluate and save whenever that is due. `log` is a RunLog on rank 0, None
    elsewhere. Returns (exit status of a stop signal or None, median tokens/s)."""
    config, speeds, stop = run.config, [], StopRequest()
    while True:
        # Evaluate and save. An evaluation that a signal interrupts is repeated on resuming.
        if evaluation_due(run):
            evaluate_and_save(run, log, stop)

        if stop.agreed(run.runtime, run.step) or run.step >= config.max_iters:
            break

        # Take a step. The first one compiles the model.
        if log and run.runtime.compile and not speeds:
            log.phase("compiling, which takes about a minute")
        if not run.unread:
            began = time.perf_counter()
        train_step(run)
        if log:
            log.bar.update()

        # Wait for the device only where the results are needed.
        logged = run.step % config.log_interval == 0
        if logged or stop.status or evaluation_due(run) or not speeds:
            count = len(run.unread)
            loss, norm = read_steps(run)
            seconds = time.perf_counter() - began
            run.state["seconds"] += seconds
            speeds += [count * run.step_tokens / seconds] * count
            if log and logged:
                lr = learning_rate(run.step - 1, config)
                log.report(step_row(run, loss, norm, lr, seconds / count))
            if log:
                log.phase("")
        if log and log.broken:  # nothing reads our output any more (`| head`): stop
            stop.status = BROKEN_PIPE

    if stop.status and run.saved != run.step:
        save(run)
    return stop.status, statistics.median(speeds or [0])


def evaluation_due(run):
    """Whether the weights of this step are to be evaluated and saved, and have not been yet."""
    config = run.config
    due = run.step % config.eval_interval == 0 or run.step == config.max_iters
    return due and run.state.get("evaluated") != run.step


def evaluate_and_save(run, log, stop):
    """Evaluate, record the best loss, and save a checkpoint. Does neither of the last two if a stop
    signal interrupts the evaluation. Raises FloatingPointError if the loss is not finite, so that
    such weights are never saved."""
    if log:
        log.phase("evaluating")
    row = score(run, stop)
    if row is None:
        return
    val_loss, state = row["val_loss"], run.state
    if not math.isfinite(val_loss):
        raise FloatingPointError(f"validation loss {val_loss:.4g} at step {run.step}")

    if log:
        log.evaluation(row)
    state["evaluated"] = run.step
    best = state["best_val_loss"] is None or val_loss < state["best_val_loss"]
    if best:
        state["best_val_loss"] = val_loss
        state["best_bits_per_byte"] = row["bits_per_byte"]
        state["best_step"] = run.step
    if run.step or not run.config.max_iters:
        if log:
            log.phase("saving")
        save(run, best)
    if log:
        log.phase("")


def save(run, best=False):
    """Save a checkpoint of this step. Every rank must call it. Raises FloatingPointError, and saves
    nothing, if a loss or gradient norm since the last reading is not finite."""
    if run.unread:
        read_steps(run)
    learner = run.learner
    weights, moments = parallel.gather(learner.model, learner.optimizers, run.runtime)
    moments |= references(run.data.sources)
    if run.runtime.main:
        run.state |= {"step": run.step, "scaler": learner.scaler.state_dict()}
        tokenizer = run.data.tokenizer.to_json()
        state, config, out_dir = run.state, run.saved_config, run.config.out_dir
        checkpoint.save(out_dir, run.step, weights, moments, state, config, tokenizer, best)
    run.saved = run.step


# ---------------------------------------------------------------- main


def find_data(config, runtime):
    """({name: meta.json}, tokenizer) of the datasets. Prepares those of SMALL that are missing."""
    folders = {name: Path(config.data_dir) / name for name in config.datasets}

    def prepare_missing():
        for name, folder in folders.items():
            if is_prepared(folder):
                continue
            from prepare import SMALL, prepare  # here, since it is rarely needed

            if name in SMALL:
                print(f"no dataset in {folder} yet: running `prepare.py {name}`")
                prepare(name, data_dir=config.data_dir)

    parallel.main_first(prepare_missing, runtime)
    metas = {name: load_meta(folder) for name, folder in folders.items()}
    tokenizers = {name: load_tokenizer(folder, metas[name]) for name, folder in folders.items()}

    return metas, common_tokenizer(tokenizers, config)


def answer(run, argv):
    """Run --eval_only, --dry_run, --doctor or --check instead of training; returns the exit
    status."""
    config = run.config
    if config.eval_only:
        text = evaluation_lines(score(run)) if config.split == "val" else score_split(run)
        if run.runtime.main:
            print(text)
        return 0
    if config.dry_run:
        return dry_run(run, train_step, score, EVAL_TRAIN_TOKENS)
    if config.doctor:
        return doctor(run, train_step)
    return check.check(run, argv, train_step)


def finish(run, argv, status, speed):
    """Print the results of the run, a sample of its text, and the commands to run next."""
    if status == BROKEN_PIPE:
        return
    if status:
        last_words.print_how_to_continue(run)
        return

    last_words.print_results(run, speed)
    folder = checkpoint.find(run.config.out_dir)  # with fsdp no rank holds the whole model
    model = checkpoint.load_model(folder, run.saved_config, run.runtime.device).eval()
    prompt, stop = last_words.closing_prompt(run.data)
    config = SampleConfig(max_new_tokens=300, stop=stop)
    write_sample(model, run.data.tokenizer, prompt, run.runtime, config)

    last_words.print_next_commands(folder, run.config, argv)


def main(argv):
    """Train, or check the run without training, as argv says; returns the exit status."""
    settings = read_config(argv, __doc__)
    config = settings.config
    runtime = set_up(config.device, config.dtype)
    if runtime.main:
        print(f"this run:\n{last_words.command('train.py', *argv)}")

    # Find every mistake before anything is written.
    if config.check is True:
        check.read(argv)
    check_start(settings, runtime)
    metas, tokenizer = find_data(config, runtime)
    run = make_run(settings, metas, tokenizer, runtime)
    if not config.trains:
        with explained(run):
            return answer(run, argv)
    if run.finished:
        if runtime.main:
            print(f"step {run.step} of {config.max_iters}: nothing to do (--max_iters=N continues)")
        return 0

    # Train. Rank 0 holds the lock of the run folder until the end.
    with open_folder(run):
        log = open_log(run) if runtime.main else None
        with explained(run), no_step_lost(run, save):
            status, speed = train(run, log)
        if runtime.main:
            log.close()
            finish(run, argv, status, speed)
        if runtime.world_size > 1:
            torch.distributed.barrier()  # rank 0 may still be writing its sample
            torch.distributed.destroy_process_group()
    return status


if __name__ == "__main__":
    errors.run(main)
