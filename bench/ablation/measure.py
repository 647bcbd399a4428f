"""Measure what each arm costs: time its steps, the arms in turn, on an otherwise idle machine."""

import contextlib
import io
import math
import time

import numpy as np
import torch

import sample
import train
from bench.ablation.settings import variant_config
from common.configurator import build
from common.errors import UserError, one_line
from common.runtime import set_up
from parts import costs
from training.settings import TrainConfig, read_config
from training.start import make_run

WARM_UP = 3  # rounds that are not timed
ROUNDS = 50  # of all arms in turn; fewer if they take long
EVALUATED = 5  # rounds that also time an evaluation, and rounds of decoding
SECONDS = 15  # per arm, for all its rounds of training
DECODED = 32  # tokens written in a round of decoding


def quartiles(times):
    """{"q25", "median", "q75"} in milliseconds of times in seconds."""
    found = 1000 * np.quantile(times, (0.25, 0.5, 0.75))
    return dict(zip(("q25", "median", "q75"), found.round(4).tolist(), strict=True))


def start_run(values):
    """The run that train.py makes from these values, which hold every key that a sweep sets. It
    writes nothing, and its printed description is discarded."""
    argv = [f"--{key}={value}" for key, value in values.items()]
    settings = read_config([*argv, "--dry_run"], "")
    runtime = set_up(settings.config.device, settings.config.dtype)
    with contextlib.redirect_stdout(io.StringIO()):
        metas, tokenizer = train.find_data(settings.config, runtime)
        return make_run(settings, metas, tokenizer, runtime)


class Probe:
    """A run of an arm that takes train.py's own steps, is evaluated, and writes tokens. Times are
    in seconds."""

    def __init__(self, values):
        self.run = start_run(values)

    def synchronize(self):
        if self.run.runtime.device.startswith("cuda"):
            torch.cuda.synchronize(self.run.runtime.device)

    def step(self):
        """The time of one training step."""
        began = time.perf_counter()
        train.train_step(self.run)
        self.synchronize()
        return time.perf_counter() - began

    def evaluate(self):
        """The time of one batch of an evaluation."""
        split = self.run.data.sources[0].splits["val"]
        one_batch = 1 + self.run.config.batch_size * self.run.learner.model.config.block_size
        began = time.perf_counter()
        train.evaluate(self.run, split, one_batch)
        return time.perf_counter() - began

    def decode(self):
        """Times of single tokens after a prompt of half the context, batch 1, with a cache."""
        model, runtime, times = self.run.learner.model, self.run.runtime, []
        half = max(1, model.config.block_size // 2)
        x, _ = self.run.data.batches.get(0, 1)
        prompt = torch.from_numpy(x[:, :half]).to(runtime.device)  # (1, block_size // 2)
        model.eval()
        with runtime.autocast():
            began = time.perf_counter()
            for _ in sample.generate(model, prompt, min(DECODED, half)):
                self.synchronize()
                times.append(time.perf_counter() - began)
                began = time.perf_counter()
        model.train()
        return times[1:] or times  # the first one reads the prompt


def peak_memory(values):
    """Bytes that an arm's training allocates at its peak on CUDA, the arm alone."""
    device = set_up(values["device"], values.get("dtype", "auto")).device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    Probe(values).step()
    return torch.cuda.max_memory_allocated(device) - held


class Timings:
    """The probes of some arms, the times that they take, and why some of them failed."""

    def __init__(self, arms, cuda):
        self.arms, self.cuda = arms, cuda
        self.probes, self.peaks, self.failed = {}, {}, {}
        self.times = {name: {"train": [], "evaluate": [], "decode": []} for name in arms}

    def run(self, rounds):
        """Make the probes and take all times."""
        for name, values in self.arms.items():
            if self.cuda:
                self.peaks[name] = self.call(name, peak_memory, values)
            self.probes[name] = self.call(name, Probe, values)
        self.time_training(rounds)
        self.time_decoding(min(rounds, EVALUATED))

    def call(self, name, function, *args):
        """Call a function for an arm. Returns None if it fails, or if the arm has failed before."""
        if name in self.failed:
            return None
        try:
            return function(*args)
        except (RuntimeError, FloatingPointError, UserError) as error:
            # Usually it is out of memory; the run will then report that, too.
            self.failed[name] = one_line(error)
            self.probes.pop(name, None)
            return None

    def time_training(self, rounds):
        """Let the arms take steps in turn, so that other work slows all of them equally."""
        began = time.perf_counter()
        for number in range(-WARM_UP, rounds):
            if number >= EVALUATED and time.perf_counter() - began > SECONDS * len(self.arms):
                break
            forward = list(self.arms)
            for name in forward if number % 2 else reversed(forward):  # the order alternates
                self.take(name, "train", Probe.step, number)
                if number < EVALUATED:
                    self.take(name, "evaluate", Probe.evaluate, number)

    def take(self, name, what, method, number):
        """Take one time of an arm. A negative number is a round that warms up."""
        seconds = self.call(name, lambda: method(self.probes[name]))
        if seconds is not None and number >= 0:
            self.times[name][what].append(seconds)

    def time_decoding(self, rounds):
        for number in range(-1, rounds):
            for name in self.arms:
                times = self.call(name, lambda name=name: self.probes[name].decode())
                if times and number >= 0:
                    self.times[name]["decode"] += times

    def row(self, name):
        """The measured columns of costs.jsonl, and the closed forms beside them."""
        values, times = self.arms[name], self.times[name]
        config, c = build(TrainConfig, values), variant_config(values)
        runtime = self.probes[name].run.runtime
        table, step = costs.parameter_table(c), quartiles(times["train"])
        tokens = config.batch_size * config.gradient_accumulation_steps * c.block_size
        peak = self.peaks.get(name)
        return {
            "arm": name,
            "parameters": sum(table.values()),
            "non_embedding_parameters": table["attention"] + table["mlp"] + table["norms"],
            "flops_per_token": costs.flops_per_token(c, c.block_size),
            "kv_bytes_per_token": costs.kv_bytes_per_token(
                c, 4 if runtime.dtype == "float32" else 2
            ),
            "milliseconds_per_step": step,
            "tokens_per_second": round(1000 * tokens / step["median"], 1),
            "steps_timed": len(times["train"]),
            "evaluation_ms_per_batch": quartiles(times["evaluate"])["median"],
            "decode_ms_per_token": quartiles(times["decode"]),
            "peak_memory_bytes": peak or costs.memory_bytes(c, config.batch_size, c.block_size),
            "peak_memory": "measured" if peak else "closed form",
            "threads": torch.get_num_threads(),
            "compile": values["compile"],
            "device": runtime.device,
            "dtype": runtime.dtype,
        }


def arm_costs(arms, threads, facts, rounds=None):
    """([row of costs.jsonl], {name: reason} of the arms that failed) for arms {name: values of a
    run}. `facts` are added to each row. Peak memory is measured on CUDA, and elsewhere the closed
    form at the end of a forward pass."""
    if any(values["compile"] for values in arms.values()):
        # All arms share one forward method, and torch counts its compiled forms together.
        torch._dynamo.config.recompile_limit = max(64, 2 * len(arms))
    cuda = any(values["device"].startswith("cuda") for values in arms.values())
    timings, threads_before = Timings(arms, cuda), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        timings.run(ROUNDS if rounds is None else rounds)
        rows = [timings.row(name) | facts for name in arms if name not in timings.failed]
    finally:
        torch.set_num_threads(threads_before)
    return rows, timings.failed


def run_seconds(row, values, val_tokens):
    """The predicted seconds of a run: start, steps, evaluations, train.py's sample and ours."""
    batch = values["batch_size"] * values["block_size"]
    limit = values.get("eval_tokens") or val_tokens
    train_tokens = min(train.EVAL_TRAIN_TOKENS, limit)
    batches = math.ceil(limit / batch) + math.ceil(train_tokens / batch)
    evaluations = 1 + math.ceil(values["max_iters"] / values["eval_interval"])
    milliseconds = (
        values["max_iters"] * row["milliseconds_per_step"]["median"]
        + evaluations * (batches * row["evaluation_ms_per_batch"] + 400)
        + 500 * row["decode_ms_per_token"]["median"]
    )
    return 5 + milliseconds / 1000
