"""Where a run runs: device, number format, compiling, ranks, signals, and the status line."""

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import UserError

COMPILE_PAYS = 3e13  # operations; a few hundred seconds of two cores


@dataclass
class Runtime:
    """What was chosen for this process, and why."""

    device: str
    dtype: str
    rank: int
    world_size: int
    reasons: list
    compile: bool = False

    @property
    def main(self):
        return self.rank == 0

    def autocast(self):
        """The context that runs matrix products in self.dtype; nothing at all for float32."""
        kind = self.device.split(":")[0]
        if self.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(kind, dtype=getattr(torch, self.dtype))

    def choose_compile(self, asked, flops):
        """Settle whether to compile a run of so many operations. On a CPU compiling takes about half a
        minute and then saves a sixth of the time, so that it pays from about five minutes on."""
        kind = self.device.split(":")[0]
        compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
        if asked is True and kind == "cpu" and not compiler:
            raise UserError(
                "torch.compile needs a C++ compiler on a CPU, and there is none",
                "compile=True",
                "install g++, or leave compile out",
            )
        if asked != "auto":
            self.compile, why = asked, "as asked"
        elif kind != "cpu":
            self.compile, why = (
                kind == "cuda",
                "it pays on CUDA" if kind == "cuda" else "eager is safer on Metal",
            )
        elif not compiler:
            self.compile, why = False, "no C++ compiler here"
        else:
            self.compile = flops > COMPILE_PAYS
            why = (
                "a run this long repays it"
                if self.compile
                else "a run this short would not repay it"
            )
        self.reasons.append(f"compile {self.compile} ({why})")


def find_device(device="auto"):
    """`device`, or with auto the best there is; UserError if it is not there. Asks CUDA nothing else."""
    kind = device.split(":")[0]
    if device == "auto":
        return (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise UserError(
            f"unknown device {device}", "device", "choose auto, cpu, cuda, cuda:N or mps"
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "no CUDA device is visible",
            f"device={device}",
            "use --device=cpu, or install a CUDA build of torch",
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("no Metal device is visible", f"device={device}", "use --device=cpu")
    if kind == "cuda" and ":" in device and int(device.split(":")[1]) >= torch.cuda.device_count():
        raise UserError(
            f"only {torch.cuda.device_count()} CUDA devices are visible",
            f"device={device}",
            "choose a smaller number",
        )
    return device


def set_up(device="auto", dtype="auto"):
    """Settle device and dtype, and join the other ranks if torchrun started us."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device, asked = find_device(device), device
    kind = device.split(":")[0]
    if world_size > 1:
        if device == "cuda":
            device = f"cuda:{int(os.environ['LOCAL_RANK'])}"
            torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    reasons = [f"device {device}" + (" (the best one here)" if asked == "auto" else "")]
    if dtype == "auto":
        dtype, why = (
            "float32",
            {"cpu": "most CPUs are no faster in bfloat16", "mps": "the safe choice on Metal"}.get(
                kind
            ),
        )
        if kind == "cuda":
            modern = torch.cuda.is_bf16_supported(including_emulation=False)
            dtype, why = (
                ("bfloat16", "this GPU has it")
                if modern
                else ("float32", "this GPU has no bfloat16")
            )
        reasons.append(f"dtype {dtype} ({why})")
    else:
        reasons.append(f"dtype {dtype}")
    if kind == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what stays in float32
    return Runtime(device, dtype, rank, world_size, reasons)


def seed_for(*numbers):
    """One 63-bit seed from several numbers, such as (seed, step, micro-step, rank)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


class StopRequest:
    """SIGTERM and Ctrl-C, remembered until the step is done: `status` is 143, 130 or None. A second one
    stops at once."""

    def __init__(self):
        self.status = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.note)

    def note(self, number, frame):
        if self.status is not None:
            os._exit(128 + number)
        self.status = 128 + number
        print("\nstopping after this step (again: at once)", file=sys.stderr, flush=True)

    def agreed(self, runtime):
        """Whether any rank was asked to stop; every rank gets the same answer."""
        if runtime.world_size > 1:
            status = torch.tensor(self.status or 0, device=runtime.device)
            torch.distributed.all_reduce(status, torch.distributed.ReduceOp.MAX)
            if not status.item():
                return False  # a signal that came meanwhile waits for the next step
            self.status = status.item()
        return self.status is not None


def cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(
                line.split(":")[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):  # not Linux, or a processor without a name there
        return platform.processor() or platform.machine()


def versions():
    """What the numbers of a run depend on besides its configuration."""
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "git_commit": commit or None,
        "hardware": hardware,
        "cpus": os.cpu_count(),
    }
