"""What a run prints while it trains, after its last step, on failure."""

import json
import os
import re
import statistics
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from tqdm import tqdm

from common import commands, files
from common.commands import command
from common.configurator import find_file
from common.errors import Failure, is_out_of_memory, one_line, printable, tell
from tokens.data import bits_per_byte
from tokens.pairs import Pairs
from training import run_folder
from training.description import peak_speed
from training.evaluation import mean_loss, measures, yardsticks
from training.run_folder import DIVERGED, LogFile, duration, own_folder
from weights import checkpoint

# These begin as nanoGPT's do, so that scripts that parse its logs can parse ours.
REPORT = (
    "iter {step}: loss {loss:.4f}, time {milliseconds:.2f}ms, {tokens_per_second:,.0f} tok/s, "
    "lr {lr:.2e}, norm {grad_norm:.2f}{more}"
)
EVALUATION = "step {step}: train loss {train_loss:.4f}, val loss {val_loss:.4f}"
MEASURES = {  # key of an evaluation's row: how it is printed
    "bits_per_byte": "{:.4f} bits per byte",
    "whole_val_loss": "{:.4f} on the whole split",
    "val_exact": "{:.1%} of the answers right",
    "val_accuracy": "{:.1%} of their tokens",
    "val_reward_accuracy": "{:.1%} of the chosen answers preferred",
    "val_reward_margin": "by {:.3f}",
}
# The progress bar: while steps are taken, and while something else is done. Both fit 80 columns.
STEPPING = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
WAITING = "{desc} (step {n_fmt} of {total_fmt})"
SILENCE = 30  # seconds of an evaluation after which, off a terminal, a line shows that it goes on
OTHER = {"gpt2": ("llama", "LLaMA"), "llama": ("gpt2", "GPT-2")}  # the word, the name


def launcher(runtime):
    """What starts the processes of a run: this interpreter, or torchrun."""
    if runtime.world_size == 1:
        return commands.python()
    size = int(os.environ.get("LOCAL_WORLD_SIZE", runtime.world_size))
    machines = "--standalone"
    if size < runtime.world_size:
        count = runtime.world_size // size
        machines = f"--nnodes={count} --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT"
    return f"{commands.torchrun()} {machines} --nproc_per_node={size}"


# ---------------------------------------------------------------- while it trains


def evaluation_lines(row):
    """The printed form of an evaluation's row: one line, and one more for each of several
    datasets."""
    lines = [EVALUATION.format(**row) + measures_text(row)]
    for name, loss in row.get("val_losses", {}).items():
        bits = row["val_bits_per_byte"][name]
        lines.append(f"  {name}: val loss {loss:.4f}, {bits:.4f} bits per byte")
    return "\n".join(lines)


def measures_text(row):
    """What an evaluation's row holds beside the losses, as the end of a line."""
    present = {key: row[key] for key in MEASURES if row.get(key) is not None}
    return "".join(f", {MEASURES[key].format(value)}" for key, value in present.items())


def part_text(limit, split):
    """Which part of a split is scored, if not all: " on 16,384 tokens"."""
    return f" on {limit:,} tokens" if 0 < limit < len(split) else ""


def split_line(run, split, sums):
    """The losses of the split that --split names, from its batch sums, as a line."""
    config = run.config
    loss = mean_loss(sums)
    row = {"bits_per_byte": loss * bits_per_byte(split, run.data.tokenizer, config.eval_tokens)}
    row |= measures(sums, split.measures)
    part = part_text(config.eval_tokens, split)
    text = f"{config.split} loss {loss:.4f}{measures_text(row)}{part}"
    return f"step {run.step}: {run.data.name}: {text}"


class Clock:
    """Times the steps of a run. On a GPU only a reading of their results tells when they are done,
    so a time is the mean over the steps since the last reading."""

    def __init__(self, run):
        self.run = run
        self.began = None
        self.speeds = []  # tokens/s of each step

    @property
    def is_new(self):
        """Whether no step has been timed yet. The first one compiles the model."""
        return not self.speeds

    def start(self):
        """Note that a step begins."""
        if not self.run.unread:
            self.began = time.perf_counter()

    def read(self, count):
        """The mean seconds of the `count` steps that were read. Adds their sum to the run's."""
        seconds = time.perf_counter() - self.began
        self.run.state["seconds"] += seconds
        self.speeds += [count * self.run.step_tokens / seconds] * count
        return seconds / count

    def median_speed(self):
        """The median speed in tokens/s, 0 before the first step."""
        return statistics.median(self.speeds or [0])


class RunLog:
    """What a run reports while it trains: rows in the run folder, and a bar or lines on stdout."""

    def __init__(self, run):
        self.run = run
        self.file = LogFile(run)
        self.rows = self.file.rows
        self.peak_speed = peak_speed(run)  # tokens/s at an MFU of 1, None if it is not known
        self.broken = None  # the error of stdout, once it refuses a line, as in `| head`
        self.bar = tqdm(
            total=run.config.max_iters,
            initial=run.step,
            unit="step",
            dynamic_ncols=True,
            bar_format=STEPPING,
            file=sys.stdout,
            disable=not sys.stdout.isatty(),
        )
        self.phases = set()  # the phases that were printed
        self.counted_at = 0.0  # when the batches of an evaluation were shown

    def advance(self):
        """Note that a step was taken."""
        self.bar.update()

    def report(self, row):
        """Log the row of a step; show it on the bar or, without a terminal, as a line."""
        utilisation = ""
        if self.peak_speed:
            row = row | {"mfu": row["tokens_per_second"] / self.peak_speed}
            utilisation = f", MFU {row['mfu']:.1%}"
        self.file.keep(row)
        speed = f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tok/s"
        self.bar.set_postfix_str(speed + utilisation, refresh=False)
        if self.bar.disable:
            seconds = (self.bar.total - row["step"]) * row["milliseconds"] / 1000
            left = f", {duration(seconds)} left" if seconds else ""
            self.show(REPORT.format(**row, more=utilisation + left))

    def evaluation(self, row):
        """Log the row of an evaluation, print it, and redraw the curves."""
        self.file.keep(row)
        self.bar.clear()
        self.show(evaluation_lines(row))
        self.bar.set_description_str("drawing loss.png")
        run_folder.draw(self.rows, own_folder(self.run) / "loss.png", yardsticks(self.run))

    def phase(self, what):
        """Print what the run is doing while it takes no steps, until `end_phase`. Without a
        terminal each phase is printed once."""
        self.counted_at = time.perf_counter()
        self.bar.bar_format = WAITING
        self.bar.set_description_str(what)
        if self.bar.disable and what not in self.phases:
            self.phases.add(what)
            self.show(what)

    def progress(self, split, done, total):
        """Show how many batches of a split an evaluation has scored: on the bar, else as a line now
        and then."""
        now = time.perf_counter()
        if now < self.counted_at + (SILENCE if self.bar.disable else 0.1):
            return
        self.counted_at = now
        text = f"evaluating {split}: {done:,} of {total:,} batches"
        self.bar.set_description_str(text)
        if self.bar.disable:
            self.show(text)

    def end_phase(self):
        """Show the bar of the steps again."""
        self.bar.bar_format = STEPPING
        self.bar.set_description_str("")

    def show(self, line):
        self.broken = tell(line, sys.stdout) or self.broken

    def close(self):
        self.bar.close()
        self.file.close()


@contextmanager
def counting(run):
    """Show the batches of an --eval_only evaluation on a bar, if stdout is a terminal."""
    disable = None if run.runtime.main else True
    with tqdm(unit=" batches", leave=False, file=sys.stdout, disable=disable) as bar:

        def progress(split, done, total):
            bar.desc = f"evaluating {split}: "
            bar.total = total
            bar.update(done - bar.n)

        run.progress = progress
        yield


class NoLog:
    """The log of the ranks other than 0: it keeps nothing."""

    broken = None
    rows = ()

    def nothing(self, *arguments):
        """Stands for every method of RunLog."""

    advance = report = evaluation = phase = progress = end_phase = close = nothing


# ---------------------------------------------------------------- after the last step


def print_results(run, speed):
    """The best loss, the time, and the median speed in tokens/s."""
    best = run.state["best_val_loss"]
    bits = run.state.get("best_bits_per_byte")
    units = "" if bits is None else f" nats per token, {bits:.4f} bits per byte"
    part = part_text(run.config.eval_tokens, run.data.splits["val"])
    print(f"\nbest validation loss {best:.4f}{units}{part}")
    seconds = run.state["seconds"]
    speeds = f", {speed:,.0f} tokens/s" if speed else ""  # none if it only evaluated
    print(f"at step {run.state['best_step']}; {seconds:.0f} s of training{speeds}")
    for name, loss in list(yardsticks(run).items())[:1]:
        bits = loss * run.data.bits_per_byte
        print(f"{name} of the same text: {loss:.4f}, {bits:.4f} bits per byte")
    print()


def print_how_to_continue(run, broken):
    """The command that continues a run that was stopped, on stderr if stdout is broken."""
    words = ("--init_from=resume", f"--out_dir={run.config.out_dir}")
    text = f"stopped after step {run.step}, saved; continue with:\n"
    text += command(run.program, *words, launcher=launcher(run.runtime))
    if broken or tell(text, sys.stdout):
        tell(text)


def closing_prompt(split, tokenizer):
    """(prompt, where to stop) of the sample at the end: the first prompt of the validation split if
    the data are prompts and answers, else a newline, which begins a text, or nothing if
    the tokenizer has special tokens."""
    newline = "" if tokenizer.marks else tokenizer.decode([tokenizer.end])
    if not isinstance(split, Pairs):
        return newline, ""
    answer_start = split.answers[0]
    ids = split.tokens[split.starts[0] : answer_start].tolist()
    prompt = [i for i in ids if i not in tokenizer.marks]
    answer = tokenizer.decode(split.tokens[answer_start : split.ends[0] - 1].tolist())
    print(f"a prompt that it has not seen, whose answer in the data is {answer!r}:")
    return tokenizer.decode(prompt), newline


def print_next_commands(folder, config, given, program):
    """The checkpoint's folder, and commands that sample from it and, if the user gave a config file
    alone, that train the other model in the same way. given: configurator.Given."""
    out_dir = Path(config.out_dir)
    print(printable(f"\ncheckpoint: {folder}\ncurves:     {out_dir / 'loss.png'}", keep="\n"))
    print(f"sample more:\n{command('sample.py', f'--out_dir={out_dir}')}")
    word, name = OTHER[config.model]
    twin = [path.replace(config.model, word) for path in given.files]
    is_there = all(os.path.isfile(find_file(path)) for path in twin)
    if is_there and twin != given.files and not given.texts:
        print(f"compare with {name}:\n{command(program, *twin)}")


# ---------------------------------------------------------------- a run that fails


@contextmanager
def explained(run, save=None):
    """Turn an expected kind of error into a Failure of one line. With save(run), a single process
    saves its steps, unless the error came in the middle of one; a loss that is not finite leaves a
    note in the run folder instead, which a sweep counts as a result."""
    try:
        yield
    except Exception as error:
        diverged = isinstance(error, FloatingPointError)
        if diverged and save and run.runtime.main:
            with suppress(Failure):  # a full disk
                files.write(own_folder(run) / DIVERGED, json.dumps({"reason": str(error)}))
        may_save = run.runtime.world_size == 1 and not run.changing and not diverged
        is_unsaved = run.step > (run.saved or 0)
        if save and may_save and is_unsaved:
            with suppress(Exception):  # the save may fail, or a step before it
                save(run)
                tell(f"saved step {run.step}: --init_from=resume continues from it")
        if isinstance(error, Failure):  # it is one line already
            raise
        failure = explain(error, run)
        if failure is None:
            raise
        raise failure from error


def explain(error, run):
    """The Failure that describes what ended a run; None if `error` is of an unexpected kind."""
    config = run.config
    text = str(error)
    saved = checkpoint.steps(config.out_dir)
    good = "no checkpoint yet"
    if saved:
        good = f"last good checkpoint: {Path(config.out_dir) / 'ckpt' / f'{saved[-1]:06d}'}"
    if isinstance(error, FloatingPointError):
        return Failure(text, good, "nothing of this step was kept; try a lower learning_rate")

    if is_out_of_memory(error):
        each = run.data.splits["train"].answers_each
        smaller = [n for n in range(each, config.batch_size, each) if config.batch_size % n == 0]
        fix = "choose a smaller block_size or model, or --activation_checkpointing"
        if smaller:
            steps = config.gradient_accumulation_steps * config.batch_size // smaller[-1]
            fix = f"--batch_size={smaller[-1]} --gradient_accumulation_steps={steps}"
            fix += " takes the same steps in less memory"
        sizes = f"batch_size={config.batch_size}, block_size={run.model.config.block_size}"
        return Failure("out of memory", sizes, fix)

    # The class from which torch.compile's errors derive: importing it would take seconds.
    if any(kind.__name__ == "ShortenTraceback" for kind in type(error).__mro__):
        what = f"torch.compile fails: {one_line(error)}"
        fix = "--compile=False trains without it; --debug shows the whole error"
        return Failure(what, "compile=True", fix)
    if run.runtime.world_size > 1 and re.search("[Cc]onnection|peer|NCCL", text):
        lost = f"rank {run.runtime.rank} lost another rank"
        return Failure(lost, good, "continue with --init_from=resume")
    return None
