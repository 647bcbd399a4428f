"""The machine a run uses: device, number format, compiling, ranks, signals, versions."""

import contextlib
import ctypes
import os
import platform
import re
import shutil
import signal
import subprocess
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.commands import ROOT
from common.errors import TORCHRUN, UserError, ranks_of_torchrun

# On a CPU, compiling and bfloat16 save time only in runs of more floating-point operations.
COMPILE_PAYS = 2e13  # a few hundred seconds on two cores
BFLOAT16_PAYS = 1e12  # some ten seconds; smaller models are no faster in bfloat16


@dataclass
class Runtime:
    """The choices made for this process, and the reasons for them."""

    device: str
    dtype: str
    rank: int = 0
    world_size: int = 1
    reasons: dict = field(default_factory=dict)  # {what was chosen: a line that tells why}
    compile: bool = False
    auto_dtype: bool = False  # whether dtype was auto

    @property
    def main(self):
        return self.rank == 0

    @property
    def device_kind(self):
        """cpu, cuda or mps: the device without its number."""
        return self.device.split(":")[0]

    @contextlib.contextmanager
    def autocast(self):
        """A context that computes matrix products in self.dtype; an empty one for float32."""
        if self.dtype == "float32":
            yield
            return
        with torch.autocast(self.device_kind, getattr(torch, self.dtype)), self.attention():
            yield

    def attention(self):
        """The part of `autocast` that activation checkpointing enters again in the backward pass.

        On a CPU in 16 bits F.scaled_dot_product_attention runs as two matrix products and a softmax
        of 16 bits: forward and backward, torch's fused kernel takes two to five times as long at 64
        and 128 tokens (torch 2.13)."""
        if self.dtype == "float32" or not self.device.startswith("cpu"):
            return contextlib.nullcontext()
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # or it computes in float32
        return sdpa_kernel(SDPBackend.MATH)

    def choose_compile(self, asked, flops):
        """Choose whether to compile a run of `flops` operations, and if dtype is auto, whether a
        CPU with bfloat16 instructions uses them. On a CPU, compiling takes half a minute and then
        saves a quarter of the time. asked: True, False or auto."""
        variable, usual = compiler_names(self.device_kind)
        compiler = shutil.which(os.environ.get(variable, usual))
        if asked is True and self.device_kind != "mps" and not compiler:
            what = f"torch.compile needs a compiler such as {usual}, and none was found"
            fix = f"install it, name yours in {variable}, or give --compile=False"
            raise UserError(what, "compile=True", fix)

        self.compile = asked
        why = "as given or stored"
        if asked == "auto":
            self.compile, why = compile_pays(self.device, flops, compiler)
        if self.device_kind == "cpu" and self.auto_dtype and multiplies_bfloat16():
            if self.compile or flops > BFLOAT16_PAYS:
                self.dtype = "bfloat16"
                self.reasons["dtype"] = "dtype bfloat16 (faster on this CPU)"
            else:
                self.dtype = "float32"
                self.reasons["dtype"] = "dtype float32 (too short to gain from bfloat16)"
        self.reasons["compile"] = f"compile {self.compile} ({why})"


def compiler_names(kind):
    """(the environment variable that names the compiler which torch.compile calls, its usual name):
    of C on CUDA, where Triton tries two, and of C++ elsewhere."""
    if kind == "cuda":
        return "CC", "gcc" if shutil.which("gcc") or not shutil.which("clang") else "clang"
    return "CXX", "clang++" if platform.system() == "Darwin" else "g++"


def compile_pays(device, flops, compiler):
    """(whether compiling saves time, the reason). compiler: its path, or None."""
    if device == "mps":
        return False, "not tried on Metal"
    if not compiler:
        return False, "no compiler found"
    if device.startswith("cuda"):
        if torch.cuda.get_device_capability(device) < (7, 0):
            return False, "this GPU is too old for Triton"
        return True, "it pays on CUDA"
    if flops > COMPILE_PAYS:
        return True, "long enough to earn back the compile time"
    return False, "too short to earn back the compile time"


def find_device(device="auto"):
    """`device`, or for auto a CUDA device or the CPU. Raises UserError if it is not available."""
    gpus = torch.cuda.device_count()
    if device == "auto":
        return "cuda" if gpus else "cpu"

    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]+)?", device):
        fix = "choose auto, cpu, cuda, cuda:N or mps"
        raise UserError(f"unknown device {device}", "device", fix)
    kind, _, number = device.partition(":")
    fix = "use --device=cpu, or a build of torch for this device"
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("no Metal device is visible", f"device={device}", fix)
    if kind == "cuda" and int(number or 0) >= gpus:
        what = f"no CUDA device {number}".rstrip()
        if gpus:
            fix = f"choose a number below {gpus}, or --device=cpu"
        raise UserError(f"{what} is visible", f"device={device}", fix)
    return device


def memory_of(device):
    """The memory of a CUDA device in GB (10^9 bytes); 0 for other devices."""
    if not device.startswith("cuda"):
        return 0.0
    return torch.cuda.get_device_properties(device).total_memory / 1e9


def memory_here():
    """The memory of this machine in bytes, or of this container if that is less."""
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no such file, or the word max
        here = min(here, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return here


def find_ranks():
    """(rank, number of ranks) of this process, from the environment that torchrun sets. Raises
    UserError if only some of the variables are set, as a cluster may leave them."""
    found = {name: os.environ[name] for name in TORCHRUN if name in os.environ}
    if not found:
        return 0, 1
    ranks = ranks_of_torchrun()
    if ranks is None:
        what = f"{', '.join(TORCHRUN)} contradict each other"
        where = "environment: " + " ".join(f"{name}={value}" for name, value in found.items())
        raise UserError(what, where, "start with torchrun, or unset them")
    return ranks


def with_number(device):
    """The device, or for auto the one of find_device, as cuda:0 in place of cuda: a thread chooses
    it by number. With torchrun it has none, since each rank chooses its own."""
    device = find_device(device)
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return device
    return "cuda" if find_ranks()[1] > 1 else f"cuda:{number or 0}"


def choose_dtype(kind):
    """(number format, reason) for a kind of device."""
    if kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16", "this GPU has it"
    if kind == "cuda":
        return "float32", "this GPU has no bfloat16"
    if kind == "mps":
        return "float32", "16 bits were not tried on Metal"
    return "float32", "most CPUs are no faster in bfloat16"


def multiplies_bfloat16():
    """Whether this CPU has instructions for matrix products in bfloat16: AMX or AVX512-BF16."""
    features = torch.cpu.get_capabilities()
    return bool(features.get("amx_bf16") or features.get("avx512_bf16"))


def own_gpu():
    """The number of the GPU of this rank. Raises UserError if it is not known, and on every rank if
    this machine has more ranks than GPUs."""
    if "LOCAL_RANK" not in os.environ:
        what = "LOCAL_RANK, the number of this rank's GPU, is not set"
        raise UserError(what, "environment", "start with torchrun")
    number = int(os.environ["LOCAL_RANK"])
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", number + 1))  # torchrun sets it
    gpus = torch.cuda.device_count()
    if ranks > gpus:
        fix = f"give --nproc_per_node={gpus}, or --device=cpu"
        raise UserError(f"{ranks} ranks need {ranks} GPUs, not {gpus}", "torchrun", fix)
    return number


def set_up(device, dtype="auto"):
    """Choose the device and dtype of this process, join the other ranks if torchrun started it, and
    return its Runtime."""
    rank, world_size = find_ranks()
    chosen = " (the best one here)" if device == "auto" else ""
    device = with_number(device)
    if chosen and device == "cpu" and torch.backends.mps.is_available():
        chosen = " (--device=mps chooses this Mac's GPU, which we have not tried)"
    device_reason = f"device {device}{chosen}"
    kind = device.split(":")[0]
    if world_size > 1:
        if device == "cuda":
            device = f"cuda:{own_gpu()}"
            torch.cuda.set_device(device)
            torch.distributed.init_process_group("nccl", device_id=torch.device(device))
        else:
            torch.distributed.init_process_group("gloo")

    auto_dtype = dtype == "auto"
    if auto_dtype:
        dtype, why = choose_dtype(kind)
        dtype_reason = f"dtype {dtype} ({why})"
    else:
        dtype_reason = f"dtype {dtype}"
    if kind == "cpu":
        keep_freed_memory()
        # torch warns that bfloat16 queries and keys are normed on a slower path: nothing to mend.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    if kind == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for products that stay in float32
    return Runtime(
        device=device,
        dtype=dtype,
        rank=rank,
        world_size=world_size,
        reasons={"device": device_reason, "dtype": dtype_reason},
        auto_dtype=auto_dtype,
    )


def keep_freed_memory():
    """Tell the C library to keep freed memory for the next step. By default glibc returns large
    pieces to the system, which clears each page before the next use. An eager step at a width of
    128 then takes 0.94 of the time."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: the largest that it takes
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def seed_for(*numbers):
    """One 63-bit seed from several numbers, such as (seed, 1, step, micro-batch)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


class StopRequest:
    """Remembers SIGTERM, Ctrl-C, or SIGHUP of a terminal that closes, until the run can stop.
    `status` is 143, 130 or 129, or None before any signal. A second SIGTERM or Ctrl-C ends the
    process at once, unless it comes within TWICE seconds: `timeout` and shells send two."""

    TWICE = 1

    def __init__(self):
        self.status = None
        self.noted_at = None  # when the first signal came
        self.handlers = {}  # those that Python had
        if threading.current_thread() is not threading.main_thread():  # no other can have handlers
            return
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN:  # ignored, as by nohup or in a script's background
                self.handlers[number] = handler
                signal.signal(number, self.note)

    def close(self):
        """Give the signals back: the caller may be a notebook."""
        for number, handler in self.handlers.items():
            if handler is not None:  # None: it was not set from Python
                signal.signal(number, handler)

    def note(self, number, frame):
        """The handler. It prints nothing: if stdout is a closed pipe (Ctrl-C also ends `tee`), a
        print in here would raise in the middle of a step."""
        now = time.monotonic()
        if self.noted_at is None:
            self.noted_at = now
            self.status = 128 + number
        elif number != signal.SIGHUP and now > self.noted_at + self.TWICE:
            os._exit(128 + number)

    def agreed(self, runtime, step=0, every=1):
        """Whether any rank has received a signal: the same answer on every rank. Several ranks ask
        each other where `step` is a multiple of `every`. Not at each one, since the answer waits
        for the GPU; but soon, since torchrun kills them 30 s after a signal."""
        if runtime.world_size > 1:
            if step % every:
                return False
            status = torch.tensor(self.status or 0, device=runtime.device)
            torch.distributed.all_reduce(status, torch.distributed.ReduceOp.MAX)
            if not status.item():
                return False  # a signal that arrives now is seen when they ask again
            self.status = status.item()
        return self.status is not None


def cpu_name():
    """The processor's name, such as "AMD EPYC 7763"."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:  # Linux
        for line in file:
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def versions(device):
    """The versions and the hardware that the results of a run on this device depend on."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # no git here
        done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, timeout=10)
        commit = done.stdout.strip()
    on_gpu = device.startswith("cuda") and torch.cuda.is_available()  # not on a login node
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "git_commit": commit or None,
        "hardware": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "cpus": os.cpu_count(),
    }
