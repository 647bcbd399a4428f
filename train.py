"""
Train a model:

    python train.py config/llama_shakespeare.py
    python train.py config/gpt2_shakespeare.py --batch_size=32 --compile=False
    python train.py config/llama_shakespeare.py --init_from=resume
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py

The run folder (weights/checkpoint.py) holds all that sampling needs; resuming also reads the
dataset. The settings of a run to resume are read from its checkpoint (training/settings.py). On a
CPU, a run that is interrupted and resumed ends with the same bits as an uninterrupted one, because
the batch and the dropout of a step depend on (seed, step) alone. (A compiled run does so on one
thread only: several sum the embedding's gradient in any order.) From Python: `train.main([...])`.
"""

from common import early, errors

if __name__ == "__main__":  # before the other imports, which take seconds
    early.start("train.py")

import math
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from common.runtime import Runtime, StopRequest, seed_for, set_up, versions, with_number
from parts import moe
from parts.architectures import make
from tokens import token_files
from tokens.batches import Loader, to_device
from tokens.data import Dataset
from training import description, evaluation, net, ranks, run_folder, terminal
from training.optim import learning_rate, make_optimizers
from training.settings import TrainConfig, check_order, first_state, read_config, say
from weights import checkpoint
from weights.checks import check_size

EVAL_TRAIN_TOKENS = 32768  # an evaluation scores at most this many tokens of the train split

# What a seed is for: the second number of seed_for(seed, ...).
INITIAL_WEIGHTS = 0
DROPOUT = 1

# ---------------------------------------------------------------- the data


def open_data(config, runtime):
    """The Dataset of a TrainConfig. Prepares a small one that is missing."""
    token_files.check_name(config.data_dir, config.dataset)
    folder = Path(config.data_dir) / config.dataset
    ranks.main_first(lambda: prepare_missing(folder), runtime)
    return Dataset(config.data_dir, config.dataset)


def prepare_missing(folder):
    """Prepare a dataset that is not there, if its name stands for a small text."""
    if token_files.is_prepared(folder):
        return
    from prepare import SMALL, prepare  # here, since it is rarely needed

    if folder.name in SMALL:
        print(errors.printable(f"no dataset in {folder} yet: running `prepare.py {folder.name}`"))
        prepare(folder.name, data_dir=str(folder.parent))


# ---------------------------------------------------------------- the model


def make_model(settings, tokenizer, vocab_size):
    """The model to train, on the CPU: from a checkpoint, from pretrained weights, or new."""
    if settings.folder:
        fix = "leave out the keys that change the architecture, or restore the code of its parts"
        return checkpoint.load_model(settings.folder, settings.model, fix=fix)
    if settings.config.init_from == "scratch":
        return new_model(settings, vocab_size)

    from weights import hf  # here, since it is rarely needed

    settings, weights = net.import_weights(settings, tokenizer)
    model = new_model(settings, vocab_size)
    hf.load_weights(model, weights)
    return model


def new_model(settings, vocab_size):
    """A model with initial weights, which depend on the seed alone."""
    config = net.new_model_config(settings, vocab_size)
    check_size(config, settings.config.device, not settings.config.eval_only)
    torch.manual_seed(seed_for(settings.config.seed, INITIAL_WEIGHTS))
    return make(config)


# ---------------------------------------------------------------- the run


@dataclass
class Run:
    """A run that is ready for the step after `step`."""

    config: TrainConfig  # each `auto` is resolved
    runtime: Runtime
    data: Dataset
    samples: object  # for training, in order: each block_size tokens x and their successors y
    model: torch.nn.Module  # for saving and sampling
    loss_module: torch.nn.Module  # (x, y) -> the model's loss
    net: torch.nn.Module  # loss_module, compiled and in DDP: what train_step calls
    optimizers: list
    scaler: torch.amp.GradScaler  # of a float16 loss; otherwise it does nothing
    step: int  # the number of steps taken
    state: dict  # saved beside the weights: best loss, tokens, seconds, data fingerprint, order
    saved_config: dict  # the configuration of training and model, saved too
    score: Callable  # score(run, stop) makes the log row of an evaluation
    program: str = "train.py"  # the command that resumes it
    partial: bool = False  # whether to score eval_tokens and no more, as eval_only was told to
    saved: int | None = None  # the step of the newest checkpoint
    unread: list = field(default_factory=list)  # (step, loss, norm, skipped) still on the device
    changing: bool = False  # whether a step is half done, so that nothing may be saved
    hold: run_folder.Hold | None = None  # of its folder, on rank 0 while it trains
    progress: Callable = lambda *counted: None  # (name of a split, batches scored, all batches)

    def __post_init__(self):
        size = self.config.batch_size
        count = self.config.gradient_accumulation_steps
        self.loader = Loader(self.samples, size, count, self.runtime)
        self.step_samples = size * count
        self.step_tokens = self.step_samples * self.model.config.block_size  # in the global batch
        self.ask_every = 1 if count > self.runtime.world_size else 10  # steps: StopRequest.agreed
        self.state.setdefault("tokens", self.step * self.step_tokens)  # older checkpoints lack it
        self.has_running_means = any(hasattr(m, "running_mean") for m in self.model.modules())


def make_run(settings, runtime, open_data=open_data, make_loss=net.Loss, scoring=None):
    """The Run of some Settings. Raises UserError if data, model and checkpoint do not fit.

    A script with other samples, another loss or another evaluation passes its own open_data(config,
    runtime), make_loss(model) or scoring(run, stop), which takes the place of `score`."""
    config = settings.config

    # The data and the model. If weights are missing, end before a text is tokenized.
    net.check_weights_exist(settings)
    data = open_data(config, runtime)
    net.check_tokens(settings, data.tokenizer)
    state = first_state(settings, data.fingerprint)
    model = make_model(settings, data.tokenizer, data.vocab_size)
    data.open(model.config.block_size, config.order_seed, config.eval_tokens)
    if not config.eval_only:
        check_order(state, data.batches.windows_per_epoch, settings.folder)

    # Resolve each `auto` here and save the result, so that a resumed run makes the same choice.
    runtime.choose_compile(config.compile, net.flops_left(model, config, state["step"]))
    device = with_number(config.device)
    config = replace(config, device=device, dtype=runtime.dtype, compile=runtime.compile)

    if config.activation_checkpointing:
        net.recompute_blocks(model, runtime)
    ranks.place(model, config.parallel, runtime)
    # AdamW updates all parameters; if Muon is chosen, it takes over the matrices of the blocks.
    optimizers = make_optimizers(model, config, runtime)
    loss_module = make_loss(model)
    compiled = net.compiled(loss_module, model, runtime)
    accumulates = config.gradient_accumulation_steps > runtime.world_size  # in each rank
    saved_config = asdict(config) | asdict(model.config) | settings.own
    if settings.own:
        saved_config["own_keys"] = [*settings.own]  # which keys are no part of the model
    run = Run(
        config=config,
        runtime=runtime,
        data=data,
        samples=data.batches,
        model=model,
        loss_module=loss_module,
        net=ranks.with_ddp(compiled, model, runtime, accumulates),
        optimizers=optimizers,
        scaler=torch.amp.GradScaler(runtime.device_kind, enabled=runtime.dtype == "float16"),
        step=state["step"],
        state=state,
        saved_config=saved_config | {"versions": versions(runtime.device)},
        score=scoring or score,
        program=settings.program,
        partial=config.eval_only and "eval_tokens" in settings.command_line.typed,
    )
    if settings.state is not None:
        load_state(run, settings.folder)
    return run


def load_state(run, folder):
    """Load what a checkpoint holds besides the weights: the state of the optimizers and the scaler,
    and the tensors of the loss, whose names begin with REFERENCE (our loss has none)."""
    moments = checkpoint.optimizer_tensors(folder)
    references = [name for name in moments if name.startswith(checkpoint.REFERENCE)]
    for name in references:
        run.loss_module.stored[name.removeprefix(checkpoint.REFERENCE)] = moments.pop(name)
    ranks.scatter(run.model, run.optimizers, moments)
    run.scaler.load_state_dict(run.state.get("scaler", {}))
    run.saved = run.step


# ---------------------------------------------------------------- the step


def train_step(run):
    """Take one optimizer step on the global batch number run.step (from 0), and count it.

    Returns (mean loss, with the loss of the experts' balance; gradient norm before clipping) as
    scalar tensors. They stay on the device, in run.unread, and `read_steps` fetches them later, so
    that a step does not wait for the GPU (it does with float16 and with experts)."""
    config = run.config
    runtime = run.runtime

    # The micro-batches of this rank, and the number of targets in the global batch. All have the
    # same number, except where a mask takes the tokens of prompts out of the loss.
    micro_batches = run.loader.get(run.step)
    all_targets = config.gradient_accumulation_steps * micro_batches[0].n_targets
    if run.samples.masked:
        own_targets = sum(micro_batch.n_targets for micro_batch in micro_batches)
        all_targets = ranks.all_reduce_sum(own_targets, runtime)

    # Forward and backward: gradients accumulate, and ddp or fsdp takes their mean over the ranks
    # after the last micro-batch. So the mean loss of a micro-batch is divided by `divisor`, which
    # is a whole number without masks: the micro-batches of a rank.
    loss_sum = torch.zeros((), device=runtime.device)
    run.changing = run.has_running_means  # a forward pass changes the means of batchnorm
    for number, inputs, n_targets in micro_batches:
        torch.manual_seed(seed_for(config.seed, DROPOUT, run.step, number))
        is_last = number == micro_batches[-1].number
        divisor = all_targets / (n_targets * runtime.world_size)
        with ranks.accumulating(run.net, run.model, is_last), runtime.autocast():
            loss = run.net(*inputs) / divisor
        run.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    loss = ranks.all_reduce_sum(loss_sum, runtime) / runtime.world_size

    # Update the weights, and count the step.
    run.changing = True
    lr = learning_rate(run.step, config)  # linear warm-up, then config.schedule down to min_lr
    norm, skipped = update_weights(run, lr)
    if not skipped:  # balance the loads of experts, if there are any, counted on all ranks
        moe.after_step(run.model, lambda counts: ranks.all_reduce_sum(counts, runtime))
    run.step += 1
    run.state["tokens"] += run.step_tokens
    run.changing = False
    run.unread.append((run.step, loss, norm, skipped))
    return loss, norm


def update_weights(run, lr):
    """Clip the gradients, and update the weights. Returns (gradient norm before clipping, skipped).

    If a float16 loss was scaled too much, its gradients overflow. Then every optimizer skips the
    step, even one whose own gradients are finite, and the scale is halved. Only float16 waits here
    for the device."""
    scaler = run.scaler
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    parameters = [p for group in groups for p in group["params"]]
    for optimizer in run.optimizers:
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(parameters, run.config.grad_clip or math.inf)
    if hasattr(norm, "full_tensor"):  # sharded by fsdp
        norm = norm.full_tensor()

    # At a scale of 1 there is nothing left to halve: the step counts, and read_steps ends the run.
    skipped = scaler.is_enabled() and not norm.isfinite().item() and scaler.get_scale() > 1
    for group in groups:
        group["lr"] = lr * group.get("rate", 1.0)  # adam_rate, for AdamW beside Muon
    for optimizer in run.optimizers:
        if not skipped:
            scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()  # halves the scale after an overflow, doubles it after 2000 good steps
    return norm, skipped


def read_steps(run):
    """Wait for the steps since the last reading, at least one. Returns (loss, gradient norm) of the
    newest. Raises FloatingPointError if one is not finite."""
    numbers = torch.stack([torch.stack([loss, norm]) for _, loss, norm, _ in run.unread]).tolist()
    for (step, _, _, skipped), (loss, norm) in zip(run.unread, numbers, strict=True):
        if not (math.isfinite(loss) and (skipped or math.isfinite(norm))):
            where = f"at step {step}, learning rate {learning_rate(step - 1, run.config):.3g}"
            raise FloatingPointError(f"loss {loss:.4g}, gradient norm {norm:.4g} {where}")
    run.unread.clear()
    return numbers[-1]


# ---------------------------------------------------------------- the evaluation


@torch.no_grad()
def evaluate(run, split, limit, stop=None, name=""):
    """Score `limit` tokens of a split (0: all), each exactly once, with dropout off. The ranks
    divide the batches among them. Returns a row for each batch: sum of losses, number of targets,
    ... (evaluation.batch_sums), or None if a stop signal arrives midway in a single process.
    run.progress is told the split's name."""
    runtime = run.runtime
    scored = net.evaluation_net(run.net, runtime)
    batches = split.eval_batches(run.config.batch_size, limit)
    total = math.ceil(split.eval_rows(limit) / run.config.batch_size)
    values = []  # for each batch: its mean loss, with pairs also its measures (net.Loss)
    counts = []  # for each batch: its numbers of targets and rows

    run.model.eval()
    while group := list(islice(batches, runtime.world_size)):  # a batch for each rank
        if stop is not None and stop.status and runtime.world_size == 1:
            run.model.train()
            return None
        # FSDP needs a forward pass on every rank, so a rank without a batch repeats one.
        arrays = group[runtime.rank % len(group)]
        inputs = [to_device(array, runtime.device) for array in arrays]
        with runtime.autocast():
            value = scored(*inputs, measured=bool(split.measures))
        # Of a batch that another rank scores, the counts are 0 here, and so is its row.
        for rank, (_, y, *_) in enumerate(group):
            values.append(value)
            counts.append(split.counts(y) if rank == runtime.rank else (0, 0))
        run.progress(name, len(counts), total)
    run.model.train()
    return ranks.all_reduce_sum(evaluation.batch_sums(values, counts), runtime)


def score_splits(run, data, stop):
    """{"train", "val"} with the batch sums of both splits of a Dataset; None if a stop signal
    arrives midway. The last evaluation of a run with eval_tokens also has "whole", the whole
    validation split: "val" itself, where eval_tokens cover it."""
    limit = run.config.eval_tokens
    val_split = data.splits["val"]
    train_limit = min(EVAL_TRAIN_TOKENS, limit or len(val_split))
    sums = {
        "train": evaluate(run, data.splits["train"], train_limit, stop, "train"),
        "val": evaluate(run, val_split, limit, stop, "val"),
    }
    if limit and run.step == run.config.max_iters and not run.partial:
        sums["whole"] = sums["val"]
        if limit < len(val_split):
            sums["whole"] = evaluate(run, val_split, 0, stop, "all of val")
    if any(values is None for values in sums.values()):
        return None
    return sums


def score(run, stop=None):
    """The log row of an evaluation, None if a stop signal arrives midway."""
    sums = score_splits(run, run.data, stop)
    if sums is None:
        return None
    row = {"step": run.step} | evaluation.evaluation_row(run.data, sums)
    return row | {"seconds": run.state["seconds"]}


# ---------------------------------------------------------------- the loop


def train(run, log, stop):
    """Take all steps, and evaluate and save whenever that is due. Returns (exit status of a signal
    that stopped it or None, median tokens/s)."""
    clock = terminal.Clock(run)
    run.progress = log.progress
    while True:
        # Evaluate and save. An evaluation that a signal interrupts is repeated on resuming.
        if evaluation_due(run):
            evaluate_and_save(run, log, stop)
        # After a signal to any rank, all of them stop at the same step.
        if stop.agreed(run.runtime, run.step, run.ask_every) or run.step >= run.config.max_iters:
            break

        # Take a step.
        if run.runtime.compile and clock.is_new:
            log.phase("compiling, which takes up to a minute")
        clock.start()
        train_step(run)
        log.advance()

        # Wait for the device only where the results are needed.
        report_due = run.step % run.config.log_interval == 0
        if report_due or clock.is_new or stop.status or evaluation_due(run):
            count = len(run.unread)
            loss, norm = read_steps(run)
            step_seconds = clock.read(count)
            if report_due:
                lr = learning_rate(run.step - 1, run.config)
                log.report(run_folder.step_row(run, loss, norm, lr, step_seconds))
            log.end_phase()
        if log.broken and not stop.status:  # nothing takes our output any more (`| head`): stop
            stop.status = errors.BROKEN_PIPE

    # A resumed run that is stopped before its first step saves too: its keys may have changed.
    unsaved = run.saved != run.step or clock.is_new  # the same on all ranks, which save together
    if unsaved and stop.agreed(run.runtime):
        save(run)
    complete = run.step >= run.config.max_iters and not evaluation_due(run)
    status = None if complete else stop.status
    return status, clock.median_speed()


def evaluation_due(run):
    """Whether the weights of this step are to be evaluated and saved, and have not been yet."""
    due = run.step % run.config.eval_interval == 0 or run.step == run.config.max_iters
    return due and run.state.get("evaluated") != run.step


def evaluate_and_save(run, log, stop):
    """Evaluate, record the best loss, and save a checkpoint, unless a stop signal interrupts the
    evaluation. Raises FloatingPointError, and saves nothing, if the loss is not finite."""
    log.phase("evaluating")
    row = run.score(run, stop)
    if row is None:
        return
    if not math.isfinite(row["val_loss"]):
        raise FloatingPointError(f"validation loss {row['val_loss']:.4g} at step {run.step}")
    log.evaluation(row)

    state = run.state
    state["evaluated"] = run.step
    is_best = state["best_val_loss"] is None or row["val_loss"] < state["best_val_loss"]
    if is_best:
        state["best_val_loss"] = row["val_loss"]
        state["best_bits_per_byte"] = row["bits_per_byte"]
        state["best_step"] = run.step
    if run.step or not run.config.max_iters:  # step 0 is not worth saving, unless it is all
        log.phase("saving")
        save(run, is_best)
    log.end_phase()


def save(run, is_best=False):
    """Save a checkpoint of this step, and write its number to the file `latest` in out_dir, and
    with is_best also to `best`. Every rank must call it. Raises FloatingPointError, and saves
    nothing, if a loss or gradient norm since the last reading is not finite."""
    if run.unread:
        read_steps(run)
    weights, moments = ranks.gather(run.model, run.optimizers, run.runtime)
    for name, tensor in run.loss_module.stored.items():
        moments[f"{checkpoint.REFERENCE}{name}"] = tensor
    if run.runtime.main:
        run.state |= {"step": run.step, "scaler": run.scaler.state_dict()}
        checkpoint.save(
            out_dir=run_folder.own_folder(run),
            step=run.step,
            weights=weights,
            moments=moments,
            state=run.state,
            config=run.saved_config,
            tokenizer=run.data.tokenizer.to_json(),
            best=is_best,
        )
    run.saved = run.step


# ---------------------------------------------------------------- main


class Result(NamedTuple):
    """What `main` returns."""

    status: int  # 0; 143, 130, 129: a signal
    folder: Path | None = None  # the newest checkpoint
    rows: list = ()  # of log.jsonl: {"step", "loss", ...}, {"step", "val_loss", ...}


def main(argv):
    """Train, or with --eval_only evaluate, as argv says. Returns a Result."""
    return train_or_evaluate(read_config(argv, __doc__), make_run)


def train_or_evaluate(settings, build_run):
    """Build the run of some Settings by build_run(settings, runtime), and train or evaluate it.
    Every mistake is found before anything is written to out_dir. Returns a Result."""
    config = settings.config
    asked = {"resuming": settings.state is not None, "overwrite": config.overwrite}
    runtime = start_runtime(settings)
    if not config.eval_only:
        ranks.main_first(lambda: run_folder.check_out_dir(config.out_dir, **asked), runtime)
    run = build_run(settings, runtime)
    if runtime.main:
        description.describe(run)

    if config.eval_only:
        return evaluate_only(run, settings)
    if run.step >= config.max_iters and (run.step > config.max_iters or not evaluation_due(run)):
        say(f"step {run.step} of {config.max_iters}: nothing to do (--max_iters=N continues)")
        rows = run_folder.read_log(Path(config.out_dir) / "log.jsonl", run.step)
        return Result(0, settings.folder, rows)

    # Train. Rank 0 holds the lock of the run folder until the end; elsewhere it is None.
    run.hold = ranks.main_first(lambda: run_folder.open_out_dir(config.out_dir, **asked), runtime)
    hold = closing(run.hold) if run.hold else nullcontext()
    with hold, closing(StopRequest()) as stop:
        log = terminal.RunLog(run) if runtime.main else terminal.NoLog()
        with closing(log), terminal.explained(run, save):  # after an error: save, then explain
            status, speed = train(run, log, stop)
        if runtime.main and status:
            terminal.print_how_to_continue(run, log.broken)
        elif runtime.main and not log.broken:
            finish(run, settings, speed)
        if runtime.world_size > 1:
            torch.distributed.barrier()  # rank 0 may still be writing its sample
            torch.distributed.destroy_process_group()
    if log.broken and status in (None, errors.BROKEN_PIPE):
        raise log.broken  # errors.run exits with 141, or names the full disk
    folder = checkpoint.find(run.config.out_dir) if runtime.main else None
    return Result(status or 0, folder, log.rows)


def start_runtime(settings):
    """Print the command, and return the Runtime of some Settings. Raises UserError if they do not
    allow this number of processes."""
    runtime = set_up(settings.config.device, settings.config.dtype)
    words = settings.command_line.arguments
    command = terminal.command(settings.program, *words, launcher=terminal.launcher(runtime))
    say(f"this run:\n{command}")
    ranks.check_layout(settings.config, runtime)
    return runtime


def evaluate_only(run, settings):
    """Print the losses, or the loss of another split that --split names. Returns a Result."""
    config = run.config
    if not settings.folder and config.init_from == "scratch" and checkpoint.steps(config.out_dir):
        say("note: these weights are new; --init_from=resume evaluates the run in out_dir")
    with terminal.explained(run), terminal.counting(run):
        if config.split == "val":
            text = terminal.evaluation_lines(run.score(run))
        else:
            split = run.data.open_split(config.split, run.model.config.block_size)
            sums = evaluate(run, split, config.eval_tokens, name=config.split)
            text = terminal.split_line(run, split, sums)
    say(text)
    return Result(0)


def finish(run, settings, speed):
    """Print the results of the run, a sample of its text, and the commands to run next."""
    from sample import SampleConfig, write_sample  # here, so that training starts without it

    terminal.print_results(run, speed)
    folder = checkpoint.find(run.config.out_dir)  # with fsdp no rank holds the whole model
    model = checkpoint.load_model(folder, run.saved_config, run.runtime.device).eval()
    prompt, stop = terminal.closing_prompt(run.data.splits["val"], run.data.tokenizer)
    sampling = SampleConfig(max_new_tokens=300, stop=stop)
    write_sample(model, run.data.tokenizer, prompt, run.runtime, sampling)
    terminal.print_next_commands(folder, run.config, settings.command_line, run.program)


if __name__ == "__main__":
    errors.run(lambda argv: main(argv).status)
