"""
The runs of one setting, in their order. What is to run next is a function of the rows alone, so a
measurement that was stopped goes on where it was.

1. The base at 0.5, 0.7, 1, 1.4 and 2 times a guess of its learning rate; two rates more where the
   best one is at an end. A quadratic gives the best rate r*.
2. The base at r*, four runs, and at r* with 1/4, 1/2 (two runs each), 1.4 and 2 times its tokens.
3. Admission. The base must end below the trigrams of the tokens that it saw, and its loss must fall
   less from 1 to 2 times the tokens than from 1/2 to 1. Otherwise the setting trains twice as long
   and begins anew, at most twice; then it stays in the table as not admitted.
4. First pass: each arm at r*. Second pass: each arm at 0.7 and 1.4 times r*.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.ablation.arms import BASE, Arm
from bench.ablation.checks import check_arm, check_changes_output, open_data
from bench.ablation.identity import config_hash, digest, release
from bench.settings import rates
from bench.settings.plan import tokens_of
from common import files
from common.errors import UserError
from common.runtime import seed_for
from tokens import ngrams
from training.run_folder import read_rows

RATES = (0.5, 0.7, 1.0, 1.4, 2.0)  # multiples of the guess
BELOW = (0.25, 0.35)  # two rates more, if the best one is at an end
ABOVE = (2.8, 4.0)
BASE_RUNS = 4  # at r*
CURVE_RUNS = {0.25: 2, 0.5: 2, 1.4: 1, 2: 1}
PASSES = {1: (1.0,), 2: (1.0, 0.7, 1.4)}  # multiples of r* at which an arm runs
DOUBLINGS = 2
FIRST_SEED = {"rate": 0, "base": 100, "curve": 200, "arm": 0}  # of the data; weights differ too
KEY = ("arm", "code_hash", "config_hash", "purpose", "learning_rate", "seed")  # of a row


@dataclass
class Job:
    """One run."""

    folder: Path  # of the setting
    setting: str
    arm: str
    purpose: str  # rate, base, curve or arm
    multiple: float  # of the guess, of the base's tokens, or of r*, by its purpose
    learning_rate: float
    values: dict  # keys of train.py
    seed: int
    code_hash: str
    config_hash: str

    @property
    def name(self):
        text = f"{self.setting} {self.arm}"
        if self.purpose in ("rate", "arm"):
            text += f", rate x{self.multiple:g}"
        return text

    @property
    def key(self):
        """What identifies its row."""
        return key_of(vars(self))

    @property
    def out_dir(self):
        """Where its checkpoint is until it has a row."""
        return str(self.folder / "runs" / self.key)

    def row(self, result, machine):
        """Its row of rows.jsonl, from the result of run.run_once and the facts of the machine."""
        facts = {name: getattr(self, name) for name in (*KEY, "multiple")}
        return facts | {"tokens": tokens_of(self.values)} | result | machine


def key_of(row):
    """What identifies a row: its arm, code, configuration, rate and seed."""
    return digest([row[name] for name in KEY])


def longer(values, multiple):
    """The values of a run with so many times the tokens, and the same share of warm-up."""
    steps = max(1, round(multiple * values["max_iters"]))
    warmup = round(values["warmup_iters"] * steps / values["max_iters"])
    return values | {"max_iters": steps, "warmup_iters": warmup}


class Course:
    """The course of one setting: its rows so far, and the runs that come next."""

    def __init__(self, plan, setting, machine):
        self.setting = setting
        self.parts = [part for part in plan.parts if part.fits(setting.values)]
        self.passes = plan.config.passes
        self.folder = plan.out / setting.name
        self.machine = machine  # facts for each row: hardware, torch, git_commit
        self.stored = stored_settings(self.folder)
        same = self.stored.get("factors") == setting.factors
        self.doublings = self.stored["doublings"] if same else 0
        self.rows = {}  # {key: row} of the current code and configuration
        self.best_rate = None
        self.admission = None  # until next_jobs finds it

    # ------------------------------------------------------------ its arms

    def check(self):
        """List the arms at the present length. Raises UserError for one that is not valid, and for
        stored rows of another version of torch, since they would not count."""
        rows = read_rows(self.folder / "rows.jsonl", is_row)
        stored = {release(row["torch"]) for row in rows}
        own = release(self.machine["torch"])
        if rows and own not in stored:
            fix = "install that version, or give another --out_dir"
            what = f"its rows are of torch {', '.join(sorted(stored))}, and this is {own}"
            raise UserError(what, self.folder / "rows.jsonl", fix)
        base = longer(self.setting.values, 2**self.doublings)
        arms = {BASE: Arm(BASE, {})}
        for part in self.parts:
            arms[part.name] = part.arm(base)
        for multiple in CURVE_RUNS:
            changes = longer(base, multiple)
            steps = {key: changes[key] for key in ("max_iters", "warmup_iters")}
            arms[f"base x{multiple:g}"] = Arm(f"base x{multiple:g}", steps, curve=multiple)
        for arm in arms.values():
            check_arm(arm, base)
        self.data, _, counted = open_data(base)
        for part in self.parts:
            check_changes_output(arms[part.name], arms[BASE], self.data["vocab_size"])
        self.arms = arms
        self.yardsticks = ngrams.yardsticks(counted, tokens_of(base), base["block_size"])
        if "trigrams" not in self.yardsticks:
            fix = "choose running text, not a very short one, and prepare it again if it is old"
            raise UserError("no n-gram losses", f"dataset={base['dataset']}", fix)

    def recognise(self):
        """Compute the config_hash of the arms, which have a code_hash, and read their rows."""
        for arm in self.arms.values():
            version = self.machine["torch"]
            arm.config_hash = config_hash(arm.values, self.data, version, threads=1)
        facts = {name: vars(arm) for name, arm in self.arms.items()}
        self.rows = current_rows(self.folder, facts)

    def keep_row(self, job, result):
        """Write the row of a run that has ended."""
        row = job.row(result, self.machine)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.stored:
            self.write()  # from its first row on, one can see whether it is of the test
        files.append(self.folder / "rows.jsonl", row)
        if row["status"] != "failed":
            self.rows[job.key] = row
            files.remove(Path(job.out_dir))

    # ------------------------------------------------------------ its runs

    def job(self, arm, purpose, multiple, rate, seed):
        """A run of an arm at a learning rate."""
        arm = self.arms[arm]
        seed += FIRST_SEED[purpose]
        first = int(digest([arm.name, purpose])[:8], 16)
        values = arm.values | {
            "learning_rate": rate,
            "seed": seed_for(first, seed) % 10**9,
            "data_seed": seed,
        }
        return Job(
            folder=self.folder,
            setting=self.setting.name,
            arm=arm.name,
            purpose=purpose,
            multiple=multiple,
            learning_rate=rate,
            values=values,
            seed=seed,
            code_hash=arm.code_hash,
            config_hash=arm.config_hash,
        )

    def rate_jobs(self, multiples):
        """The base at multiples of the guess of its rate."""
        jobs = []
        for multiple in multiples:
            seed = (*RATES, *BELOW, *ABOVE).index(multiple)
            jobs.append(self.job(BASE, "rate", multiple, rounded(multiple * self.guess), seed))
        return jobs

    def base_jobs(self):
        """The base at r*, at its own and other numbers of tokens."""
        jobs = [self.job(BASE, "base", 1.0, self.best_rate, seed) for seed in range(BASE_RUNS)]
        for multiple, count in CURVE_RUNS.items():
            for seed in range(count):
                name = f"base x{multiple:g}"
                jobs.append(self.job(name, "curve", multiple, self.best_rate, seed))
        return jobs

    def arm_jobs(self):
        """The arms at the rates of the passes."""
        jobs = []
        for seed, multiple in enumerate(PASSES[self.passes]):
            for part in self.parts:
                rate = rounded(multiple * self.best_rate)
                jobs.append(self.job(part.name, "arm", multiple, rate, seed))
        return jobs

    def next_jobs(self):
        """The runs that can start now; [] if the setting is done. The next ones may depend on their
        rows. Sets best_rate and admission on the way."""
        self.best_rate = None
        self.admission = None
        tried = list(RATES)
        pending = self.pending(self.rate_jobs(tried))
        if not pending:
            tried += self.beyond(tried)
            pending = self.pending(self.rate_jobs(tried))
        if pending:
            return pending
        self.best_rate = self.choose_rate(tried)
        if self.best_rate is None:
            self.admission = {"admitted": False, "why": "the base diverged at every rate"}
            return []
        pending = self.pending(self.base_jobs())
        if pending:
            return pending
        self.admission = admission(self.base_losses(), self.yardsticks["trigrams"])
        return self.pending(self.arm_jobs()) if self.is_admitted else []

    def left(self):
        """(runs of the base, runs of the arms) that are left; until r* is known, at the guess."""
        jobs = self.next_jobs()
        if not jobs:
            return [], []
        of_rate = [job for job in jobs if job.purpose == "rate"]
        self.best_rate = self.best_rate or self.guess
        return of_rate + self.pending(self.base_jobs()), self.pending(self.arm_jobs())

    def pending(self, jobs):
        """The jobs that have no row."""
        return [job for job in jobs if job.key not in self.rows]

    @property
    def is_admitted(self):
        return self.admission is not None and self.admission["admitted"]

    @property
    def needs_more_tokens(self):
        """Whether the setting is to begin anew with twice the tokens."""
        refused = self.admission is not None and not self.is_admitted
        return refused and self.doublings < DOUBLINGS

    # ------------------------------------------------------------ its losses

    def points(self, multiples):
        """[(log of a multiple of the guess, loss on the choosing half)] of the runs at them."""
        points = []
        for job in self.rate_jobs(multiples):
            points.append((math.log(job.multiple), loss_of(self.rows[job.key], rates.CHOOSING)))
        return points

    def beyond(self, tried):
        """Two rates more, if the best one is at an end of those that were tried."""
        points = self.points(tried)
        place = rates.best_place(points, rates.common_curvature([points]), -math.inf, math.inf)
        if place is None or place <= math.log(min(tried)):
            return list(BELOW)
        if place >= max(x for x, _ in points):
            return list(ABOVE)
        return []

    def choose_rate(self, tried):
        """r*: the rate at which the quadratic is least, within the rates that were tried."""
        points = self.points(tried)
        ends = math.log(min(tried)), math.log(max(tried))
        place = rates.best_place(points, rates.common_curvature([points]), *ends)
        return None if place is None else rounded(self.guess * math.exp(place))

    @property
    def guess(self):
        return self.setting.values["learning_rate"]

    def base_losses(self):
        """{multiple of the tokens: [loss on the whole scored text]} of the base at r*."""
        losses = {}
        for job in self.base_jobs():
            losses.setdefault(job.multiple, []).append(loss_of(self.rows[job.key], "val_loss"))
        return losses

    def write(self):
        """Write settings.json: what was planned, chosen and admitted."""
        arms = {}
        for name, arm in self.arms.items():
            part = next((part for part in self.parts if part.name == name), None)
            arms[name] = {
                "part": part is not None,
                "taken_out": part is not None and part.is_in(self.arms[BASE].values),
                "changes": arm.changes,
                "code_hash": arm.code_hash,
                "config_hash": arm.config_hash,
            }
        stored = self.stored.get("arms", {})
        if stored.get(BASE) == arms[BASE]:
            # Keep the arms that this command leaves out, and those whose new code has not run.
            measured = {row["arm"] for row in self.rows.values()}
            measured_arms = {name: arm for name, arm in arms.items() if name in measured}
            arms = arms | stored | measured_arms
        base = self.arms[BASE].values
        content = {
            "setting": self.setting.name,
            "held_out": self.setting.held_out,
            "factors": self.setting.factors,
            "base_values": base,
            "tokens": tokens_of(base),
            "doublings": self.doublings,
            "best_rate": self.best_rate,
            "admission": self.admission,
            "ngrams": self.yardsticks,
            "data": self.data,
            "arms": arms,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write(self.folder / "settings.json", json.dumps(content, indent=1) + "\n")
        self.stored = content


def rounded(rate):
    """A learning rate to three digits, the same on every machine."""
    return float(f"{rate:.3g}")


def loss_of(row, key):
    """A loss of a row: inf if the run diverged."""
    return math.inf if row["status"] == "diverged" else row[key]


def admission(losses, trigrams):
    """Whether a base has learned enough, from its {multiple of the tokens: [losses]} and the loss
    of trigrams on the tokens that it saw: {"admitted", "why", "loss", "trigrams", "falls"}. A fall
    is the nats that the loss falls by when the tokens double. Without losses, if a run diverged."""
    mean = {multiple: fmean(values) for multiple, values in losses.items()}
    if not all(math.isfinite(mean[multiple]) for multiple in (0.5, 1, 2)):
        return {"admitted": False, "why": "a run of the base diverged at its best rate"}
    falls = [mean[0.5] - mean[1], mean[1] - mean[2]]
    why = ""
    if not mean[1] < trigrams:
        why = f"the base ends at {mean[1]:.4g} nats, trigrams at {trigrams:.4g}"
    elif not falls[1] < falls[0]:
        why = f"the loss falls faster and faster: by {falls[0]:.3g}, then by {falls[1]:.3g} nats"
    return {
        "admitted": not why,
        "why": why,
        "loss": mean[1],
        "trigrams": trigrams,
        "falls": falls,
    }


def current_rows(folder, arms):
    """{key: row} of the rows that hold for these arms, {name: its hashes and other facts}; without
    runs that failed, which are tried again."""
    rows = {}
    for row in read_rows(folder / "rows.jsonl", is_row):
        arm = arms.get(row["arm"], {})
        current = all(arm.get(key) == row[key] for key in ("code_hash", "config_hash"))
        if current and row["status"] != "failed":
            rows[key_of(row)] = row
    return rows


def is_row(line):
    """Whether a line of rows.jsonl is a row of this file."""
    texts = ("arm", "purpose", "status", "code_hash", "config_hash", "torch")
    numbers = ["multiple", "learning_rate", "tokens", "seed"]
    if line.get("status") == "done":
        numbers += ["val_loss", "val_loss_tune", "val_loss_report"]
    has_texts = all(isinstance(line.get(key), str) for key in texts)
    values = [line.get(key) for key in numbers]
    return has_texts and all(type(x) in (int, float) and math.isfinite(x) for x in values)


def stored_settings(folder):
    """The content of FOLDER/settings.json; {} if there is none."""
    path = folder / "settings.json"
    return files.read_json(path, "move it away") if path.exists() else {}
