"""Whether this machine is quiet enough for its times to be believed."""

import os
import time

from bench.ablation.terminal import say

BUSY = 0.1  # of this machine's cores kept busy by other work: more disturbs the times


def cores():
    """The numbers of the CPU cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())


def busy_seconds():
    """Seconds that all processes have kept these cores busy since the machine started, with the
    time that a hypervisor took away; None on a system without /proc/stat."""
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            lines = [line.split() for line in file if line.startswith("cpu")]
    except OSError:
        return None
    wanted = {f"cpu{number}" for number in cores()}
    # user, nice, system, idle, iowait, irq, softirq, steal
    ticks = [[int(word) for word in line[1:9]] for line in lines if line[0] in wanted]
    busy = sum(sum(each) - each[3] - each[4] for each in ticks)
    return busy / os.sysconf("SC_CLK_TCK")


class OtherWork:
    """How much CPU time other processes take, from when this is made."""

    def __init__(self):
        self.began, self.all_before = time.perf_counter(), busy_seconds()
        self.own_before = time.process_time()

    def share(self):
        """The share of the cores that other work has kept busy on average. Without /proc/stat: by
        the load average, of which one is ours."""
        if self.all_before is None:
            return max(0.0, os.getloadavg()[0] - 1) / len(cores())
        elapsed = max(0.01, time.perf_counter() - self.began)
        others = busy_seconds() - self.all_before - (time.process_time() - self.own_before)
        return max(0.0, others) / elapsed / len(cores())


def is_quiet(seconds=1):
    """Whether other work leaves the cores alone while this process sleeps for some seconds."""
    work = OtherWork()
    time.sleep(seconds)
    share = work.share()
    if share > BUSY:
        say(f"waiting for a quiet machine: other work keeps {share:.0%} of the cores busy")
    return share <= BUSY


def wait_until_quiet(patience):
    """Wait until the machine is quiet, at most `patience` seconds."""
    end = time.perf_counter() + patience
    while time.perf_counter() < end and not is_quiet():
        pass
