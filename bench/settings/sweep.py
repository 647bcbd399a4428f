"""
Measure parts in many settings. The settings share the workers: a worker that is free takes the next
run of the first setting that has one, so no core waits for the last run of a phase.
"""

import contextlib
from collections import Counter

from rich.console import Console
from rich.table import Table

import train
from bench.ablation import identity, step_times
from bench.ablation.arms import BASE
from bench.ablation.fingerprint import one_thread, start_run
from bench.ablation.progress import doing, say
from bench.ablation.step_times import PATIENCE, cores, wait_until_quiet
from bench.ablation.sweep import identify
from bench.settings import held_out, worths
from bench.settings import plan as plans
from bench.settings.plan import tokens_of
from bench.settings.run import Worker, ended
from bench.settings.setting import Course
from bench.settings.table import show as show_table
from common import files
from common.commands import WIDTH
from common.errors import UserError
from common.runtime import StopRequest, find_device, versions
from training.run_folder import lock_run
from training.step_costs import timed

POLL = 1  # seconds
TIMED = 8  # steps of a dry run, whose first ones warm up
FACTS = ("torch", "git_commit", "hardware")


def main(argv, usage):
    """Measure what a command line asks for. Returns the exit status."""
    plan = plans.read(argv, usage)
    courses = []
    for setting in plan.settings:
        facts = versions(find_device(setting.values["device"]))
        courses.append(Course(plan, setting, {key: facts[key] for key in FACTS}))
    with doing("checking the settings") as show:
        for course in courses:
            show(course.setting.name)
            course.check()
    if plan.config.dry_run:
        print_plan(plan, courses)
        return 0

    check_predicted(plan)
    plan.out.mkdir(parents=True, exist_ok=True)
    lock = lock_run(plan.out, write_id=True)
    with contextlib.closing(lock), contextlib.closing(StopRequest()) as stop:
        failed = measure(plan, courses, stop)
        if not stop.status:
            time_parts(plan, courses)
    show_table(plan.out, plan.parts)
    if stop.status:
        print("stopped; the same command continues. A long run goes on from its checkpoint.")
        return stop.status
    return 1 if failed else 0


def check_predicted(plan):
    """Raise UserError if a setting of the test would run before its parts are predicted."""
    test = [setting.name for setting in plan.settings if setting.held_out]
    if not test:
        return
    fix = f"run `python -m bench.settings.held_out {plan.out}`, and commit what it writes"
    if not (plan.out / plans.PREDICTIONS).exists():
        raise UserError("settings of the test are not predicted yet", ", ".join(test), fix)
    unpredicted = held_out.unpredicted(plan.out)
    parts = [part.name for part in plan.parts if part.name in unpredicted]
    if parts:
        raise UserError("parts are not predicted yet", ", ".join(parts), fix)


def recognise(course, plan):
    """Recognise the rows of a setting that hold for this code."""
    with doing(f"{course.setting.name}: computing the fingerprints of its arms") as show:
        lines = identify(course.arms, course.data, plan.out, show)
        if not plan.config.dry_run:
            identity.store(plan.out, lines)
        course.recognise()
    course.next_jobs()


def lengthen(course, plan):
    """Let a setting begin anew with twice the tokens."""
    say(f"{course.setting.name}: {course.admission['why']}: twice the tokens")
    course.doublings += 1
    course.check()
    recognise(course, plan)


# ---------------------------------------------------------------- the runs


def measure(plan, courses, stop):
    """Run all that is to run. Returns the number of runs that failed."""
    workers = [Worker() for _ in range(plan.config.workers or len(cores()))]
    waiting = list(courses)  # settings that nothing has looked at yet
    active = []  # settings that have runs
    running = set()  # the keys of the runs in progress
    failures = set()  # the keys of the runs that failed
    try:
        while not stop.status:
            for worker in workers:
                if worker.job is None:
                    job = next_job(plan, waiting, active, running | failures)
                    if job:
                        running.add(job.key)
                        worker.start(job)
            if not running:
                break
            for worker in ended(workers, POLL):
                job, result = worker.result()
                running.discard(job.key)
                if stop.status and result["status"] == "failed":
                    continue  # the signal has reached the worker, too
                course = next(c for c in active if c.setting.name == job.setting)
                course.keep_row(job, result)
                report(course, job, result)
                if result["status"] == "failed":
                    failures.add(job.key)
        for course in active:  # the runs that are left have failed, or a stop was asked for
            if course.is_admitted:
                course.write()
    finally:
        for worker in workers:
            worker.process.terminate()
    return len(failures)


def next_job(plan, waiting, active, taken):
    """The next run that no worker has, of the first setting that has one; None if all have ended
    or wait for others. A setting is opened when the ones before it leave a worker free."""
    while True:
        for course in list(active):
            jobs = course.next_jobs()
            if not jobs and course.needs_more_tokens:
                course.write()
                lengthen(course, plan)
                jobs = course.next_jobs()
            if not jobs:
                course.write()
                active.remove(course)
                say_end(course)
            for job in jobs:
                if job.key not in taken:
                    return job
        if not waiting:
            return None
        course = waiting.pop(0)
        recognise(course, plan)
        active.append(course)


def time_parts(plan, courses):
    """Time the steps of the parts that no setting has timed, each part in the first admitted
    setting that it fits, if the machine becomes quiet."""
    timed = set().union(*(measured.costs for measured in worths.load(plan.out)))
    untimed = []  # (course, names of its arms)
    for course in [each for each in courses if each.is_admitted]:
        names = [part.name for part in course.parts if part.name not in timed]
        if names:
            untimed.append((course, names))
            timed.update(names)
    if not untimed:
        return
    with doing("waiting for a quiet machine, to time the steps") as show:
        is_quiet = wait_until_quiet(PATIENCE, show)
    if not is_quiet:
        say("other work keeps this machine busy: the same command times the steps when it is quiet")
        return
    for course, names in untimed:
        time_arms(course, names)


def time_arms(course, names):
    """Time the steps of a setting's base and of some of its arms in turn, and keep those that
    nothing disturbed."""
    vocabulary = {"vocab_size": course.data["vocab_size"]}
    values = {name: vocabulary | course.arms[name].values for name in (BASE, *names)}
    rows, _ = step_times.time_arms(values, threads=1)
    for row in rows:
        if row["quiet"]:
            facts = {"hardware": course.machine["hardware"]}
            facts["code_hash"] = course.arms[row["arm"]].code_hash
            files.append(course.folder / "costs.jsonl", row | facts)


def report(course, job, result):
    """Print a line about a run that has ended."""
    done = len(course.rows)
    if result["status"] == "done":
        outcome = f"{result['val_loss_report']:.4f} nats, {result['seconds']:.0f} s"
    else:
        outcome = f"{result['status'].upper()}: {result['reason']}"
    print(f"{job.name}: {outcome} ({done} runs)", flush=True)


def say_end(course):
    """Print that a setting is done, or why it is not admitted."""
    if course.is_admitted:
        say(f"{course.setting.name}: done, {len(course.rows)} runs at r* = {course.best_rate:g}")
    else:
        say(f"{course.setting.name}: not admitted: {course.admission['why']}")


# ---------------------------------------------------------------- the plan


def print_plan(plan, courses):
    """Print each setting, the runs that are left, and the hours that they take on this machine."""
    table = Table(box=None, padding=(0, 1, 0, 0), width=WIDTH)
    headings = ("setting", "text", "tokens", "optimizer", "base", "size", "M\ntokens", "context")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for heading in ("base\nruns", "part\nruns", "hours"):
        table.add_column(heading, justify="right")
    workers = plan.config.workers or len(cores())
    totals = Counter()  # runs of bases, runs of parts, and hours, over all settings
    for number, course in enumerate(courses, 1):
        recognise(course, plan)
        while course.needs_more_tokens:
            lengthen(course, plan)
        of_base, of_parts = course.left()
        hours = 0.0
        if of_base or of_parts:
            with doing(f"{course.setting.name}: timing its step ({number} of {len(courses)})"):
                hours = hours_of(of_base + of_parts) / workers
        totals.update(base=len(of_base), parts=len(of_parts), hours=hours)
        factors = course.setting.factors
        table.add_row(
            course.setting.name,
            *(factors[key] for key in ("text", "tokens", "optimizer", "base")),
            f"{factors['layers']}x{factors['width']}",
            f"{tokens_of(course.arms[BASE].values) / 1e6:.1f}",
            str(factors["context"]),
            str(len(of_base)),
            str(len(of_parts)),
            f"{hours:.1f}",
        )
    Console(width=WIDTH, highlight=False).print(table)
    left = totals["base"] + totals["parts"]
    planned = left + sum(len(course.rows) for course in courses)
    hours = totals["hours"]
    print(f"{left} of {planned} runs are left, about {hours:.1f} hours, {workers} at a time:")
    print(f"{totals['parts']} are of parts, and {totals['base']} of bases that are not stored yet")


def hours_of(jobs):
    """The CPU hours of runs of one setting, by a few steps of the first of them."""
    values = jobs[0].values
    with one_thread():
        run = start_run(values)
        seconds = min(timed(train.train_step, run) for _ in range(TIMED))
    scored = len(jobs) * values["eval_tokens"] / 3  # a forward pass is a third of a step
    tokens = sum(tokens_of(job.values) for job in jobs) + scored
    step_tokens = tokens_of(values) / values["max_iters"]
    return tokens / step_tokens * seconds / 3600
