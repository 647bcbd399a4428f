"""
Train a model:

    python train.py config/llama_shakespeare.py
    python train.py config/gpt2_shakespeare.py --batch_size=32 --compile=False
    python train.py config/llama_shakespeare.py --init_from=resume
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py

A missing data set that is small and known is prepared first. The run folder (checkpoint.py) holds
all that resuming and sampling need. On a CPU a run that was interrupted and resumed gives the same
bits as one that was not: the batch and the dropout of a step are functions of (seed, step).
"""

import json
import math
import shlex
import statistics
import time
from pathlib import Path

from common import errors, files
from common.errors import Failure, UserError

if __name__ == "__main__":
    errors.starting("train.py")

import torch

from common.runtime import StopRequest, seed_for, set_up
from prepare import SMALL, prepare
from sample import SampleConfig, write_sample
from tokens.token_files import load_meta, load_tokenizer
from training import check, parallel
from training.doctor import doctor
from training.dry_run import dry_run
from training.optim import learning_rate
from training.run_folder import RunLog, evaluation_lines, open_out_dir, start_wandb
from training.settings import read_config
from training.start import make_run
from weights import checkpoint
from weights.checkpoint import find, load_model

BROKEN_PIPE = 141  # the exit status of a process that SIGPIPE ends
EVAL_TRAIN_TOKENS = 32768  # of the train split, scored beside the validation split


# ---------------------------------------------------------------- before the first step


def find_data(config, runtime):
    """({name: meta.json}, tokenizer) of the data sets. One that is small, known and missing is prepared first."""
    folders = {name: Path(config.data_dir) / name for name in config.datasets}

    def prepare_if_missing():
        for name, folder in folders.items():
            if name in SMALL and not (folder / "meta.json").exists():
                print(
                    f"{folder} is not there yet: preparing it, as `python prepare.py {name}` does"
                )
                prepare(name, data_dir=config.data_dir)

    parallel.main_first(
        prepare_if_missing, runtime
    )  # the others wait for rank 0, whatever they see
    metas = {name: load_meta(folder) for name, folder in folders.items()}
    tokenizers = {name: load_tokenizer(folder, metas[name]) for name, folder in folders.items()}
    first, *others = tokenizers
    for other in others:
        if tokenizers[other].to_json() != tokenizers[first].to_json():
            raise UserError(
                f"{first} and {other} have different tokenizers",
                f"dataset={config.dataset}",
                "prepare both with the same one, and not with char: characters depend on the text",
            )
    return metas, tokenizers[first]


# ---------------------------------------------------------------- training


@torch.no_grad()
def evaluate(model, split, config, runtime, limit, stop=None):
    """Mean loss in nats per token over the first `limit` tokens of a split (0: all), dropout off, each
    token scored once, of pairs those of the answers. The ranks share the batches. None if a stop is asked for
    meanwhile, of one process; several go through with it, as all must do the same."""
    total = torch.zeros(2, dtype=torch.float64)  # sum of losses, number of tokens
    batches = list(split.eval_batches(config.batch_size, limit))
    model.eval()
    for first in range(0, len(batches), runtime.world_size):
        if stop is not None and stop.status and runtime.world_size == 1:
            return None
        mine = first + runtime.rank < len(batches)
        x, y = batches[
            first + runtime.rank if mine else first
        ]  # with fsdp a forward needs every rank
        x, y = torch.from_numpy(x).to(runtime.device), torch.from_numpy(y).to(runtime.device)
        with runtime.autocast():
            loss = model(x, y)[1]
        count = (y >= 0).sum().item()
        if mine and count:
            total += torch.tensor([loss.item() * count, count])
    model.train()
    total = parallel.total(total, runtime)
    return (total[0] / total[1]).item()


def score(run, stop=None):
    """The row of an evaluation, None if a stop is asked for meanwhile. Of several data sets the losses and bits per byte are
    the means by the sets' weights; those of each are in val_losses and val_bits_per_byte, and samples is what was drawn."""
    config, names = run.config, [source.name for source in run.sources]
    train_losses, val_losses = [], []
    for source in run.sources:
        train, val = source.splits["train"], source.splits["val"]
        train_losses.append(
            evaluate(
                run.model,
                train,
                config,
                run.runtime,
                min(EVAL_TRAIN_TOKENS, config.eval_tokens or len(val)),
                stop,
            )
        )
        val_losses.append(evaluate(run.model, val, config, run.runtime, config.eval_tokens, stop))
    if None in train_losses + val_losses:
        return None
    bits = [loss * source.bits_per_byte for loss, source in zip(val_losses, run.sources)]
    means = [
        sum(source.weight * value for source, value in zip(run.sources, values))
        for values in (train_losses, val_losses, bits)
    ]
    row = dict(zip(("train_loss", "val_loss", "bits_per_byte"), means))
    if len(names) > 1:
        row |= {
            "val_losses": dict(zip(names, val_losses)),
            "val_bits_per_byte": dict(zip(names, bits)),
            "samples": run.state.get("samples", {}),
        }
    return {"step": run.step, **row, "seconds": run.state["seconds"]}


def train_step(run):
    """One step of the optimizers on the global batch of run.step (from 0), which then goes up by one. Returns (loss,
    gradient norm); FloatingPointError, before anything is updated, if they are not finite."""
    config, runtime, step = run.config, run.runtime, run.step
    lr = learning_rate(step, config)
    parts = config.gradient_accumulation_steps
    mine = range(runtime.rank, parts, runtime.world_size)
    samples = [
        run.batches.get((step * parts + part) * config.batch_size, config.batch_size)
        for part in mine
    ]  # x, y: (batch_size, block_size)
    # A micro-batch weighs as much as the targets it has, so that k of them are one large batch, whatever is masked.
    counts = [int((y >= 0).sum()) for _, y in samples]
    every = (
        parallel.total(torch.tensor(sum(counts)), runtime).item()
        if run.batches.masked
        else run.step_tokens
    )
    loss_sum = torch.zeros((), device=runtime.device)
    for part, (x, y), count in zip(mine, samples, counts):
        x, y = torch.from_numpy(x).to(runtime.device), torch.from_numpy(y).to(runtime.device)
        torch.manual_seed(
            seed_for(config.seed, 1, step, part)
        )  # dropout, too, is a function of (seed, step)
        with parallel.accumulating(run.net, run.model, last=part == mine[-1]):
            with runtime.autocast():
                loss = run.net(x, y)[1] / (
                    every / (count * runtime.world_size)
                )  # ranks average their gradients
            run.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    loss = parallel.total(loss_sum, runtime).item() / runtime.world_size
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)
    norm = parallel.whole(
        torch.nn.utils.clip_grad_norm_(
            [p for group in groups for p in group["params"]], config.grad_clip or math.inf
        )
    ).item()
    overflow = (
        run.scaler.is_enabled() and not math.isfinite(norm) and run.scaler.get_scale() > 1
    )  # too large a scale, not too bad a loss
    if not math.isfinite(loss) or not math.isfinite(norm) and not overflow:
        raise FloatingPointError(
            f"loss {loss:.4g}, gradient norm {norm:.4g} at step {step + 1}, learning rate {lr:.3g}"
        )
    for group in groups:
        group["lr"] = lr
    for optimizer in run.optimizers:
        if (
            not overflow
        ):  # else no optimizer takes the step, also not one whose own gradients are finite
            run.scaler.step(optimizer)
        optimizer.zero_grad()
    run.scaler.update()  # half as large after an overflow, twice as large after 2000 steps without one
    if len(run.sources) > 1:
        drawn = run.batches.drawn(step * run.step_samples, run.step_samples)
        run.state["samples"] = {
            name: run.state.get("samples", {}).get(name, 0) + n for name, n in drawn.items()
        }
    run.step += 1
    return loss, norm


def save(run, best=False):
    """Save a checkpoint of this step. Every rank must call it."""
    weights, moments = parallel.gather(run.model, run.optimizers, run.runtime)
    if run.runtime.main:
        run.state |= {"step": run.step, "scaler": run.scaler.state_dict()}
        checkpoint.save(
            run.config.out_dir,
            run.step,
            weights,
            moments,
            run.state,
            run.everything,
            run.tokenizer.to_json(),
            best,
        )


def train(run, log):
    """Take all steps, with the evaluations and checkpoints between them. Returns the exit status of a stop that was
    asked for, else None, and the median speed in tokens per second. `log` is a RunLog on rank 0, None elsewhere."""
    config, state = run.config, run.state
    speeds, saved = [], run.step if run.folder is not None else None
    stop = StopRequest()
    while True:
        due = run.step % config.eval_interval == 0 or run.step == config.max_iters
        if (
            due and state.get("evaluated") != run.step
        ):  # a run that was stopped within an evaluation does it now
            row = score(run, stop)
            if row is not None:
                if not math.isfinite(row["val_loss"]):
                    raise FloatingPointError(
                        f"validation loss {row['val_loss']:.4g} at step {run.step}"
                    )
                state["evaluated"] = run.step
                best = state["best_val_loss"] is None or row["val_loss"] < state["best_val_loss"]
                if best:
                    state |= {
                        "best_val_loss": row["val_loss"],
                        "best_bits_per_byte": row["bits_per_byte"],
                        "best_step": run.step,
                    }
                if log:
                    log.evaluation(row)
                if run.step or not config.max_iters:
                    save(run, best)
                    saved = run.step
        if stop.agreed(run.runtime) or run.step >= config.max_iters:
            break
        began = time.perf_counter()
        loss, norm = train_step(run)
        seconds = time.perf_counter() - began
        state["seconds"] += seconds
        speeds.append(run.step_tokens / seconds)
        if log:
            log.bar.update()
            if log.broken:  # whoever read our output has gone: stop as for a signal
                stop.status = BROKEN_PIPE
            if run.step % config.log_interval == 0:
                log.report(
                    {
                        "step": run.step,
                        "loss": loss,
                        "lr": learning_rate(run.step - 1, config),
                        "grad_norm": norm,
                        "tokens": run.step * run.step_tokens,
                        "seconds": state["seconds"],
                        "milliseconds": seconds * 1000,
                        "tokens_per_second": run.step_tokens / seconds,
                    }
                )
    if stop.status and saved != run.step:
        save(run)
    return stop.status, statistics.median(speeds or [0])


def explain(error, run):
    """The Failure that tells in one line what ended a run; None if `error` is nothing that was foreseen."""
    config, text = run.config, str(error)
    there = checkpoint.steps(config.out_dir)
    good = (
        f"last good checkpoint: {Path(config.out_dir) / 'ckpt' / f'{there[-1]:06d}'}"
        if there
        else "no checkpoint yet"
    )
    if isinstance(error, FloatingPointError):
        return Failure(text, good, "nothing of this step was kept; try a lower learning_rate")
    if isinstance(error, torch.OutOfMemoryError) or "alloc_cpu" in text:
        half = max(1, config.batch_size // 2)
        fix = f"--batch_size={half} --gradient_accumulation_steps={config.gradient_accumulation_steps * config.batch_size // half} takes the same steps in less memory"
        return Failure(
            "out of memory",
            f"batch_size={config.batch_size}, block_size={run.model.config.block_size}",
            fix
            if config.batch_size > 1
            else "choose a smaller block_size or model, or --activation_checkpointing",
        )
    if (
        run.runtime.world_size > 1
        and isinstance(error, RuntimeError)
        and any(word in text for word in ("onnection", "peer", "NCCL"))
    ):
        return Failure(
            f"rank {run.runtime.rank} lost another rank", good, "go on with --init_from=resume"
        )
    return None


def finish(run, argv, speed):
    """The last words of a run: what it reached, a sample, and what to type next."""
    out, state = shlex.quote(run.config.out_dir), run.state
    print(
        f"\nbest validation loss {state['best_val_loss']:.4f} nats per token, {state['best_bits_per_byte']:.4f} bits per byte, at step {state['best_step']}; "
        f"{state['seconds']:.0f} s of training, {speed:,.0f} tokens/s\n"
    )
    if len(run.sources) > 1:
        drawn = [state.get("samples", {}).get(source.name, 0) for source in run.sources]
        print(
            "samples drawn: "
            + "; ".join(
                f"{n:,} of {source.name}, {n / max(1, sum(drawn)):.2%} (asked for: {source.weight:.2%}), {n / source.batches.windows_per_epoch:.2f} "
                "times through it"
                for n, source in zip(drawn, run.sources)
            )
            + "\n"
        )
    folder = find(run.config.out_dir)
    model = load_model(
        folder, run.everything, run.runtime.device
    ).eval()  # whole, also where the ranks share the weights out
    write_sample(
        model,
        run.tokenizer,
        run.tokenizer.decode([run.tokenizer.start]),
        run.runtime,
        SampleConfig(max_new_tokens=300),
    )
    print(f"\ncheckpoint: {folder}   curves: {Path(run.config.out_dir) / 'loss.png'}")
    print(f"sample more:        python sample.py --out_dir={out}")
    for path in argv:
        other = path.replace("llama", "gpt2") if "llama" in path else path.replace("gpt2", "llama")
        if path.endswith(".py") and other != path and Path(other).exists():
            print(
                f"compare with {'GPT-2' if 'gpt2' in other else 'LLaMA'}: python train.py {other}"
            )


def main(argv):
    config, given, (folder, state) = read_config(argv, __doc__)
    runtime = set_up(config.device, config.dtype)
    if config.check is True:
        check.read(argv)  # it may not be there: say so before data are prepared
    if runtime.main:
        print(f"this run: {shlex.join(['python', 'train.py', *argv])}")
    run = make_run(config, given, folder, state, runtime, find_data)
    if config.eval_only:
        row = score(run)
        if runtime.main:
            print(evaluation_lines(row))
        return 0
    if not config.trains:
        try:
            if config.dry_run:
                return dry_run(run, train_step, score, EVAL_TRAIN_TOKENS)
            return doctor(run, train_step) if config.doctor else check.check(run, argv, train_step)
        except (FloatingPointError, RuntimeError) as error:
            raise explain(error, run) or error
    if folder is not None and (
        run.step > config.max_iters or run.step == config.max_iters == run.state.get("evaluated")
    ):
        if runtime.main:
            print(f"step {run.step} of {config.max_iters}: nothing to do (--max_iters=N trains on)")
        return 0

    held = parallel.main_first(
        lambda: open_out_dir(config.out_dir, folder is not None, config.overwrite), runtime
    )  # noqa: F841, the lock
    log = None
    if runtime.main:
        files.write(Path(config.out_dir) / "config.json", json.dumps(run.everything, indent=1))
        to_wandb = (
            start_wandb(
                config.wandb_project,
                config.wandb_run_name or config.out_dir,
                run.everything,
                run.state,
            )
            if config.wandb_log
            else None
        )
        log = RunLog(
            config.out_dir, run.step if folder is not None else None, config.max_iters, to_wandb
        )
    try:
        status, speed = train(run, log)
    except (FloatingPointError, RuntimeError) as error:
        raise explain(error, run) or error
    if runtime.main:
        log.close()
        if status is None:
            finish(run, argv, speed)
        elif status != BROKEN_PIPE:
            print(
                f"stopped after step {run.step}, saved; go on with: python train.py --init_from=resume --out_dir={shlex.quote(config.out_dir)}"
            )
    if runtime.world_size > 1:
        torch.distributed.barrier()  # rank 0 may still be writing its sample
        torch.distributed.destroy_process_group()
    return status


if __name__ == "__main__":
    errors.run(main)
