"""
What ablate.py measures apart from the losses: what each arm costs, arms in turn on a machine that does nothing else,
and what a trained model does beyond its context, with a sample of its text.
"""

import functools
import json
import math
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint as recompute

import sample
from common.configurator import build
from common.errors import UserError, one_line
from common.runtime import seed_for, set_up
from parts import costs
from parts.architectures import choose
from parts.variant import VariantConfig
from tokens.token_files import load_split
from training.optim import make_optimizers
from training.run_folder import read_log
from training.settings import TrainConfig
from weights import checkpoint

ROUNDS = 50  # of all arms in turn, fewer where they take long
SECONDS = 15  # per arm, for all its rounds of training
DECODED = 32  # tokens written in a round of decoding
CONTEXTS = (1, 2, 4, 8)  # times the training context


def variant_config(values):
    """The configuration of a run's model with every slot named, also where the run uses a readable model."""
    return build(
        VariantConfig,
        choose(
            {"arch": values["model"]}
            | {key: value for key, value in values.items() if value is not None or key != "arch"}
        )[2],
    )


def make_model(values):
    config_class, model_class, filled = choose(values)
    torch.manual_seed(0)
    return model_class(build(config_class, filled))


def quartiles(times):
    """{"median", "q25", "q75"} in milliseconds of times in seconds."""
    return dict(
        zip(
            ("q25", "median", "q75"),
            (1000 * np.quantile(times, (0.25, 0.5, 0.75))).round(4).tolist(),
        )
    )


def wait(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


class Probe:
    """An arm that takes steps as a run of it would, is evaluated, and writes tokens. Times are in seconds."""

    def __init__(self, values, runtime):
        self.runtime, self.config = runtime, build(TrainConfig, values)
        self.model = make_model(values).to(runtime.device)
        if self.config.activation_checkpointing:  # as train.py does
            for block in self.model.blocks:
                block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
        self.net = torch.compile(self.model, dynamic=False) if values["compile"] else self.model
        self.optimizers = make_optimizers(self.model, self.config, runtime.device)
        c = self.model.config
        self.x, self.y = torch.randint(
            c.vocab_size, (2, self.config.batch_size, c.block_size), device=runtime.device
        )

    def step(self):
        began = time.perf_counter()
        for _ in range(self.config.gradient_accumulation_steps):
            with self.runtime.autocast():
                loss = self.net(self.x, self.y)[1] / self.config.gradient_accumulation_steps
            loss.backward()
        torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.grad_clip or math.inf
        ).item()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        wait(self.runtime.device)
        return time.perf_counter() - began

    @torch.no_grad()
    def evaluate(self):
        """One batch of an evaluation."""
        began = time.perf_counter()
        with self.runtime.autocast():
            self.model.eval()(self.x, self.y)[1].item()
        self.model.train()
        return time.perf_counter() - began

    def decode(self):
        """Times of single tokens after a prompt of half the context, batch 1, cached."""
        half, times = max(1, self.model.config.block_size // 2), []
        self.model.eval()
        with self.runtime.autocast():
            began = time.perf_counter()
            for _ in sample.generate(self.model, self.x[:1, :half], min(DECODED, half)):
                wait(self.runtime.device)
                times.append(time.perf_counter() - began)
                began = time.perf_counter()
        self.model.train()
        return times[1:] or times  # the first one reads the prompt

    def peak_memory(self):
        """Bytes at the peak of training steps, or None where it cannot be asked (then costs.memory_bytes says it)."""
        if not self.runtime.device.startswith("cuda"):
            return None
        self.step()
        return torch.cuda.max_memory_allocated(self.runtime.device)


def arm_costs(arms, runtime, threads, facts, rounds=ROUNDS):
    """The rows of costs.jsonl for arms {name: values of a run}, and {name: reason} of those that failed. The arms take
    their steps in turn, so that what slows the machine slows all alike. Peak memory on a CPU is closed form (at the end
    of a forward pass); on CUDA it is measured, each arm alone."""
    before = torch.get_num_threads()
    if any(values["compile"] for values in arms.values()):
        torch._dynamo.config.recompile_limit = max(
            64, 2 * len(arms)
        )  # one forward for all arms: its compiled forms are counted together
    probes, times, failed, peaks = (
        {},
        {name: {"train": [], "evaluate": [], "decode": []} for name in arms},
        {},
        {},
    )

    def attempt(name, what):
        if name not in failed:
            try:
                return what()
            except (
                RuntimeError,
                UserError,
            ) as error:  # it is out of memory, most often: the run will say so, too
                failed[name] = one_line(error)
                probes.pop(name, None)
        return None

    try:
        torch.set_num_threads(threads)
        for name, values in arms.items():
            if runtime.device.startswith("cuda"):
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(runtime.device)
                held = torch.cuda.memory_allocated(runtime.device)
                peak = attempt(name, lambda: Probe(values, runtime).peak_memory())
                peaks[name] = peak and peak - held
            probes[name] = attempt(name, lambda: Probe(values, runtime))
        began = time.perf_counter()
        for number in range(-3, rounds):
            if number >= 5 and time.perf_counter() - began > SECONDS * len(arms):
                break
            order = list(arms) if number % 2 else list(arms)[::-1]  # who goes first alternates
            for name in order:
                seconds = attempt(name, lambda: probes[name].step())
                more = attempt(name, lambda: probes[name].evaluate()) if number < 5 else None
                if number >= 0 and seconds is not None:
                    times[name]["train"].append(seconds)
                    times[name]["evaluate"] += [more] if more is not None else []
        for number in range(-1, min(rounds, 5)):
            for name in arms:
                found = attempt(name, lambda: probes[name].decode())
                times[name]["decode"] += found if found and number >= 0 else []
    finally:
        torch.set_num_threads(before)
    rows = []
    for name, values in arms.items():
        if name in failed:
            continue
        c, config, size = (
            variant_config(values),
            probes[name].config,
            2 if runtime.dtype in ("bfloat16", "float16") else 4,
        )
        table, step = costs.parameter_table(c), quartiles(times[name]["train"])
        tokens = config.batch_size * config.gradient_accumulation_steps * c.block_size
        rows.append(
            {
                "arm": name,
                "parameters": sum(table.values()),
                "non_embedding_parameters": table["attention"] + table["mlp"] + table["norms"],
                "flops_per_token": costs.flops_per_token(c, c.block_size),
                "kv_bytes_per_token": costs.kv_bytes_per_token(c, size),
                "milliseconds_per_step": step,
                "tokens_per_second": round(1000 * tokens / step["median"], 1),
                "steps_timed": len(times[name]["train"]),
                "evaluation_ms_per_batch": quartiles(times[name]["evaluate"])["median"],
                "decode_ms_per_token": quartiles(times[name]["decode"]),
                "peak_memory_bytes": peaks.get(name)
                or costs.memory_bytes(c, config.batch_size, c.block_size),
                "peak_memory": "measured" if peaks.get(name) else "closed form",
                "threads": threads,
                "compile": values["compile"],
                "device": runtime.device,
                "dtype": runtime.dtype,
            }
            | facts
        )
    return rows, failed


def run_seconds(row, values, val_tokens, train_tokens=32768):
    """A prediction of what a run takes, in seconds: start, steps, evaluations, the sample of train.py and ours."""
    batch = values["batch_size"] * values["block_size"]
    limit = values.get("eval_tokens") or val_tokens
    batches = math.ceil(limit / batch) + math.ceil(min(train_tokens, limit) / batch)
    evaluations = 1 + math.ceil(values["max_iters"] / values["eval_interval"])
    ms = (
        values["max_iters"] * row["milliseconds_per_step"]["median"]
        + evaluations * (batches * row["evaluation_ms_per_batch"] + 400)
        + 500 * row["decode_ms_per_token"]["median"]
    )
    return 5 + ms / 1000


# ---------------------------------------------------------------- a trained model


@torch.no_grad()
def extrapolation(model, tokens, runtime, times=CONTEXTS, most=1 << 18):
    """{"1": loss, "2": ..}: nats per token of the same target tokens with 1, 2, 4, 8 times the training context before
    them: the last quarter of a training context each, at the ends of windows that are spread over tokens (N,). None
    where the model has no positions for it or the text is too short."""
    T = model.config.block_size
    longest = max((n for n in times if n * T < len(tokens)), default=1)
    targets, count = max(1, T // 4), max(4, min(64, most // (longest * T)))
    ends = np.unique(
        np.linspace(longest * T, len(tokens) - 1, count).astype(int)
    )  # index of the last target
    found = {}
    for n in times:
        if n > longest:
            found[str(n)] = None
            continue
        total, step = 0.0, max(1, (1 << 14) // (n * T))
        try:
            for part in (ends[i : i + step] for i in range(0, len(ends), step)):
                windows = np.stack(
                    [np.asarray(tokens[end - n * T : end + 1]).astype(np.int64) for end in part]
                )  # (B, nT + 1)
                x, y = (
                    torch.from_numpy(windows[:, :-1].copy()),
                    torch.from_numpy(windows[:, 1:].copy()),
                )
                y[:, :-targets] = -1
                with runtime.autocast():
                    total += model(x.to(runtime.device), y.to(runtime.device))[1].item() * len(part)
            found[str(n)] = total / len(ends)
        except ValueError:  # learned positions end with the context
            found[str(n)] = None
    return found


def after(out_dir, data_dir, dataset, prompt, runtime):
    """{"extrapolation", "sample"} of the trained model in a run folder; {} and None where there is no checkpoint."""
    if not checkpoint.steps(out_dir):
        return {"extrapolation": {}, "sample": None}
    model, tokenizer, _, _ = checkpoint.open_run(out_dir, "latest", runtime.device)
    tokens = load_split(Path(data_dir) / dataset, "val", model.config.block_size)
    ids = tokenizer.encode(prompt) if prompt else [tokenizer.start]
    idx = torch.tensor(np.asarray(ids), dtype=torch.long, device=runtime.device)[None]
    with runtime.autocast():
        written = [
            token.item()
            for token in sample.generate(
                model, idx, 200, 0.8, 200, seeds=[seed_for(0)], vocab_size=tokenizer.vocab_size
            )
        ]
    return {
        "extrapolation": extrapolation(model, tokens, runtime),
        "sample": prompt + tokenizer.decode_bytes(written).decode("utf-8", "replace"),
    }


# ---------------------------------------------------------------- a run that has ended


def finished(job):
    """Whether the run's folder holds it whole already: the driver was killed before it wrote the row, or an array job ran."""
    rows = [
        row for row in read_log(Path(job.out_dir) / "log.jsonl") if row.get("val_loss") is not None
    ]
    try:
        same = json.loads((Path(job.out_dir) / "run.json").read_text()) == job.identity()
    except (OSError, ValueError):
        return False
    steps = checkpoint.steps(job.out_dir)
    return (
        same and bool(rows and steps) and rows[-1]["step"] == steps[-1] == job.values["max_iters"]
    )


def row_of(job, reason, seconds):
    """The row of a run that ended, from its folder: failed for a reason, or if it lacks its last evaluation."""
    folder = Path(job.out_dir)
    row = {
        name: getattr(job, name)
        for name in ("arm", "seed", "lr", "purpose", "config_hash", "code_hash", "out_dir")
    }
    evaluations = [row for row in read_log(folder / "log.jsonl") if row.get("val_loss") is not None]
    if reason is None and (not evaluations or evaluations[-1]["step"] != job.values["max_iters"]):
        reason = f"it ended without the evaluation of step {job.values['max_iters']}"
    if reason is None:
        try:
            row |= beyond(job)
        except Exception as error:  # the row of a run must not end the sweep
            reason = f"measuring the trained model: {type(error).__name__}: {one_line(error)}"
    row |= {
        "status": "failed" if reason else "done",
        "reason": reason,
        "wall_seconds": round(seconds, 2),
        "command": job.command,
    }
    try:
        versions = json.loads((folder / "config.json").read_text())["versions"]
        row |= {
            "git_commit": versions["git_commit"],
            "hardware": versions["hardware"],
            "versions": versions,
        }
    except (OSError, ValueError, KeyError):
        row |= {"git_commit": None, "hardware": None}
    if evaluations:
        best, last = min(evaluations, key=lambda row: row["val_loss"]), evaluations[-1]
        row |= {
            "best_val_loss": best["val_loss"],
            "best_step": best["step"],
            "final_val_loss": last["val_loss"],
            "train_loss": last.get("train_loss"),
            "bits_per_byte": last.get("bits_per_byte"),
            "seconds": last.get("seconds"),
            "curve": [[row["step"], row["val_loss"]] for row in evaluations],
        }
    return row


def beyond(job):
    """The extrapolation losses and the sample of a run to be reported."""
    if job.purpose != "report":
        return {"extrapolation": {}, "sample": None}
    runtime = set_up(job.values["device"], job.values.get("dtype", "auto"))
    return after(
        job.out_dir, job.values.get("data_dir", "data"), job.values["dataset"], job.prompt, runtime
    )


def tidy(job):
    """Drop the checkpoints of a run whose row is written: of each arm the first reported run keeps its own, to sample from."""
    if job.purpose != "report" or job.seed != 0:
        shutil.rmtree(Path(job.out_dir) / "ckpt", ignore_errors=True)
        for name in ("latest", "best"):
            (Path(job.out_dir) / name).unlink(missing_ok=True)
