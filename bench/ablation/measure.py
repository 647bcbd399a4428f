"""Measure what each arm costs: time its steps, eager and compiled, the arms in turn, and notice
whether other work disturbs the times."""

import contextlib
import io
import itertools
import math
import time

import numpy as np
import torch

import sample
import train
from bench.ablation import quiet
from bench.ablation.sentences import NOT_TIMED
from bench.ablation.settings import variant_config
from bench.ablation.terminal import say
from bench.timing.results import interval, turns
from common.errors import UserError, one_line
from common.runtime import Runtime, set_up
from parts import costs
from training import parallel
from training.dry_run import kept_bytes
from training.settings import read_config
from training.start import make_run

FORMS = ("eager", "compiled")
WARM_UP = 3  # steps of each form that are not timed; the first one compiles
ROUNDS = 50  # of all arms in turn; fewer if they take long
EVALUATED = 5  # rounds of evaluation and decoding
SECONDS = 15  # per arm, for all its rounds of training
DECODED = 32  # tokens written in a round of decoding
COMPILES = 25  # seconds that an arm takes to compile on a CPU, about

SAME = 0.05  # by which the step times of two arms that are the same may differ
TRIES = 3  # how often the rounds are timed until the machine was quiet
PATIENCE = 30  # seconds to wait, before each try, for the machine to become quiet


def quartiles(times):
    """{"q25", "median", "q75"} in milliseconds of times in seconds."""
    found = 1000 * np.quantile(times, (0.25, 0.5, 0.75))
    return dict(zip(("q25", "median", "q75"), found.round(4).tolist(), strict=True))


# ---------------------------------------------------------------- one arm


def start_run(values):
    """The run that train.py makes from these values. It writes and prints nothing."""
    argv = [f"--{key}={value}" for key, value in values.items()]
    settings = read_config([*argv, "--dry_run"], "")
    runtime = set_up(settings.config.device, settings.config.dtype)
    with contextlib.redirect_stdout(io.StringIO()):
        metas, tokenizer = train.find_data(settings.config, runtime)
        return make_run(settings, metas, tokenizer, runtime)


def own_form(values):
    """The form in which an arm's runs train."""
    return "compiled" if values["compile"] else "eager"


def has_forms(row, both):
    """Whether a row of costs.jsonl has both forms, where they are wanted, or says why not."""
    found = row.get("forms") or {}
    why = [(found.get(form) or {"why": NOT_TIMED}).get("why") for form in FORMS]
    return bool(found) and not (both and NOT_TIMED in why)


def why_no_compiling(device):
    """Why nothing is compiled on a device; "" if it can be."""
    if device.startswith("mps"):
        return "eager is safer on Metal"
    try:
        Runtime(device, "float32", 0, 1, []).choose_compile(True, 0)
    except UserError as error:
        return one_line(error.parts[0])
    return ""


class Probe:
    """A run of an arm that takes train.py's steps, is evaluated and decodes. Times in seconds."""

    def __init__(self, values):
        self.run = start_run(values)
        self.nets = {own_form(values): self.run.learner.net}

    def synchronize(self):
        if self.run.runtime.device.startswith("cuda"):
            torch.cuda.synchronize(self.run.runtime.device)

    def step(self, form=None):
        """The time of one training step, by default in the form in which the run trains."""
        learner = self.run.learner
        if form and form not in self.nets:
            self.nets[form] = parallel.trained(learner.model, form == "compiled", self.run.runtime)
        learner.net = self.nets[form] if form else learner.net
        began = time.perf_counter()
        train.train_step(self.run)
        self.synchronize()
        return time.perf_counter() - began

    def held_bytes(self):
        """Bytes that training holds at the end of a forward pass in the form of the last step:
        four numbers per parameter (weight, gradient, two moments), and each tensor that the
        backward pass will read. Backward's temporaries come on top."""
        weights = self.run.learner.model.parameters()
        return 4 * sum(p.nbytes for p in weights) + kept_bytes(self.run, self.run.learner.net)

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


# ---------------------------------------------------------------- all arms


class Timings:
    """The probes of some arms, the times that they take, and why some of them failed."""

    def __init__(self, arms, why_not):
        self.arms, self.why_not = arms, why_not  # why_not: why only the own form is timed, or ""
        self.device = arms["base"]["device"]
        self.cuda = self.device.startswith("cuda")
        more = [] if why_not else FORMS
        self.forms = {name: dict.fromkeys([own_form(arms[name]), *more]) for name in arms}
        self.probes, self.failed = {}, {}
        self.memory = {}  # (arm, form): bytes
        self.steps = {}  # (arm, form): seconds [rounds]
        self.times = {name: {"evaluate": [], "decode": []} for name in arms}
        self.why = {}  # (arm, form): why this form cannot be timed
        self.disturbed = ""  # why the times cannot be believed

    def run(self, rounds, tries):
        """Make the probes and take all times."""
        for number, name in enumerate(self.arms):
            say(f"{name}: arm {number + 1} of {len(self.arms)}, its model and data")
            held = torch.cuda.memory_allocated(self.device) if self.cuda else 0
            self.probes[name] = self.call(name, None, Probe, self.arms[name])
            for form in self.forms[name]:
                say(f"{name}: arm {number + 1} of {len(self.arms)}, first steps, {form}")
                self.call(name, form, self.warm_up, name, form, held)
        for number in range(tries):
            if tries > 1:
                quiet.wait_until_quiet(PATIENCE)
            work = quiet.OtherWork()
            self.time_training(rounds, f", try {number + 1}" if number else "")
            self.disturbed = why_disturbed(self, work.share())
            if not self.disturbed:
                break
        self.time_the_rest(min(rounds, EVALUATED))

    def call(self, name, form, function, *args):
        """Call a function for a form of an arm. Returns None if it fails, or has failed before. An
        arm has failed if the form in which it trains has."""
        if name in self.failed or (name, form) in self.why:
            return None
        try:
            return function(*args)
        except (RuntimeError, FloatingPointError, UserError) as error:
            # Usually it is out of memory; the run will then report that, too.
            self.why[name, form] = one_line(error)
            if form in (None, own_form(self.arms[name])):
                self.failed[name] = one_line(error)
                self.probes.pop(name, None)
            return None

    def warm_up(self, name, form, held):
        """Take the first steps of a form, and measure its memory: on CUDA the peak of the last step
        beyond the `held` bytes of the arms before."""
        probe = self.probes[name]
        for number in range(WARM_UP):
            if self.cuda and number == WARM_UP - 1:
                torch.cuda.reset_peak_memory_stats(self.device)
            probe.step(form)
        if self.cuda:
            self.memory[name, form] = torch.cuda.max_memory_allocated(self.device) - held
        else:
            self.memory[name, form] = probe.held_bytes()

    def time_training(self, rounds, suffix):
        """Let the forms of all arms take steps in turn. A form that fails has NaN in its place."""
        sides = [side for name in self.arms for side in self.sides(name)]
        times = {side: [] for side in sides}
        end = time.perf_counter() + SECONDS * len(self.arms)
        for place, (number, (name, form)) in enumerate(turns(sides, rounds)):
            begins = place % len(sides) == 0
            if begins and number > EVALUATED and time.perf_counter() > end:
                break
            say(f"{name}, {form}: step {number + 1} of {rounds}{suffix}")
            seconds = self.call(name, form, Probe.step, self.probes.get(name), form)
            times[name, form].append(math.nan if seconds is None else seconds)
        self.steps = {side: np.array(seconds) for side, seconds in times.items()}

    def time_the_rest(self, rounds):
        """Time evaluations and decoding, of which the first round does not count."""
        for number, name in turns(self.arms, rounds + 1):
            say(f"{name}: evaluation and decoding, round {number} of {rounds}")
            evaluation = self.call(name, None, Probe.evaluate, self.probes.get(name))
            decoding = self.call(name, None, Probe.decode, self.probes.get(name))
            if number and decoding:
                self.times[name]["evaluate"].append(evaluation)
                self.times[name]["decode"] += decoding

    def sides(self, name):
        """[(arm, form)] of the forms of an arm that have not failed."""
        if name in self.failed:
            return []
        return [(name, form) for form in self.forms[name] if (name, form) not in self.why]

    # ------------------------------------------------------------ the rows

    def faster(self, name):
        """(arm, form) of the faster form of an arm."""
        return min(self.sides(name), key=lambda side: np.median(self.steps[side]))

    def step_ratio(self, name):
        """{"ratio", "low", "high", "form", "base_form"}: the time of a step in this arm's faster
        form over that of the base in its own, the median over the rounds with its 95 % interval.
        None if the times cannot be believed, or for the base."""
        if self.disturbed or name == "base":
            return None
        arm, base = self.faster(name), self.faster("base")
        ratios = self.steps[arm] / self.steps[base]
        if len(ratios) < 2:
            return None
        ratio, low, high = (round(number, 4) for number in interval(ratios))
        found = {"ratio": ratio, "low": low, "high": high}
        return found | {"form": arm[1], "base_form": base[1]}

    def form_row(self, name, form):
        """What is known of one form of an arm: its times and memory, or {"why"} it has none."""
        if (name, form) not in self.steps or (name, form) in self.why:
            return {"why": self.why.get((name, form), self.why_not)}
        step, run = quartiles(self.steps[name, form]), self.probes[name].run
        return {
            "milliseconds_per_step": step,
            "tokens_per_second": round(1000 * run.step_tokens / step["median"], 1),
            "peak_memory_bytes": self.memory[name, form],
            "peak_memory": "measured" if self.cuda else "held after a forward pass",
        }

    def row(self, name):
        """The columns of costs.jsonl; those beside `forms` are of the form that the runs have."""
        values, times = self.arms[name], self.times[name]
        c, runtime = variant_config(values), self.probes[name].run.runtime
        table, number_bytes = costs.parameter_table(c), 4 if runtime.dtype == "float32" else 2
        return {
            "arm": name,
            "parameters": sum(table.values()),
            "non_embedding_parameters": table["attention"] + table["mlp"] + table["norms"],
            "flops_per_token": costs.flops_per_token(c, c.block_size),
            "kv_bytes_per_token": costs.kv_bytes_per_token(c, number_bytes),
            **self.form_row(name, own_form(values)),
            "steps_timed": len(self.steps[name, own_form(values)]),
            "forms": {form: self.form_row(name, form) for form in FORMS},
            "step_ratio": self.step_ratio(name),
            "quiet": not self.disturbed,
            "disturbed": self.disturbed,
            "evaluation_ms_per_batch": quartiles(times["evaluate"])["median"],
            "decode_ms_per_token": quartiles(times["decode"]),
            "threads": torch.get_num_threads(),
            "compile": values["compile"],
            "device": runtime.device,
            "dtype": runtime.dtype,
        }


def why_disturbed(timings, share):
    """Why some times cannot be believed: other work took this share of the cores, or an arm that is
    the base again differs from it. "" if they can."""
    if share > quiet.BUSY:
        return f"other work kept {share:.0%} of the cores busy"
    if "base" in timings.failed:
        return "the base could not be timed"
    base, steps = timings.arms["base"], timings.steps
    copies = [name for name, values in timings.arms.items() if values == base and name != "base"]
    for name, form in itertools.chain(*map(timings.sides, copies)):
        times = np.median(steps[name, form] / steps.get(("base", form), math.nan))
        if abs(times - 1) > SAME:
            return f"the base again took {times:.2f} of the base's time, {form}"
    return ""


def arm_costs(arms, threads, facts, rounds=None, both=False, tries=1):
    """([row of costs.jsonl], {name: reason} of the arms that failed) for arms {name: values of a
    run}, among them "base". `facts` are added to each row. If not `both` forms are timed, eager and
    compiled, it is the one in which the runs train. The rounds are timed up to `tries` times, until
    no other work disturbs them."""
    device = arms["base"]["device"]
    why_not = why_no_compiling(device) if both else NOT_TIMED
    if both or any(values["compile"] for values in arms.values()):
        # All arms share one forward method, and torch counts its compiled forms together.
        torch._dynamo.config.recompile_limit = max(64, 2 * len(arms))
    timings, threads_before = Timings(arms, why_not), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        timings.run(ROUNDS if rounds is None else rounds, tries)
        rows = [timings.row(name) | facts for name in arms if name not in timings.failed]
    finally:
        torch.set_num_threads(threads_before)
    return rows, timings.failed


def of_one_process(row, processes):
    """A row of costs.jsonl where each run is several processes. Its steps were timed in one, which
    predicts how long a run takes but is not what a step costs, so the row keeps no cost of them."""
    why = {"why": f"not timed: a run is {processes} processes"}
    kept = {"processes": processes, "step_ratio": None, "forms": dict.fromkeys(FORMS, why)}
    return row | kept | {"tokens_per_second": None, "peak_memory_bytes": None}


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
