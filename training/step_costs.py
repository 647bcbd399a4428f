"""What a step of a run costs: the bytes that it keeps, the bytes of a checkpoint, its seconds."""

import math
import shutil
import time
from pathlib import Path

import torch


def kept_bytes(run, net):
    """The bytes that the forward pass of one micro-batch keeps for the backward pass, besides the
    parameters: each tensor once, as it is stored. Under autocast the residual stream, the norms and
    the loss stay in float32, and matrix products keep 16-bit inputs, copies of weights among them.
    Weights that fsdp gathers are gone again: their storage is empty."""
    arrays = run.samples.get(0, run.config.batch_size)
    inputs = [torch.from_numpy(array).to(run.runtime.device) for array in arrays]
    unsharded = [p for p in net.parameters() if not hasattr(p, "full_tensor")]
    weights = {p.untyped_storage().data_ptr() for p in unsharded}
    kept = {}  # {place in memory: the storage there}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor.detach()  # or an output holds the step that made it, and is never freed

    keeping = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with run.runtime.autocast(), keeping:
        out = net(*inputs)  # noqa: F841, alive until the end, so that no place is used twice
    return sum(storage.nbytes() for storage in kept.values())


def checkpoint_bytes(run):
    """Bytes of one checkpoint: weights and moments; AdamW has two moments per weight, Muon one."""
    tensors = [*run.model.parameters(), *run.model.buffers()]
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            for _ in range(optimizer.moments):
                tensors += group["params"]
    return sum(tensor.nbytes for tensor in tensors)


def room(run):
    """(out_dir or the nearest folder above it that exists, bytes free in it, bytes that the run's
    checkpoints need: the last two, the best, and the one being written)."""
    out_dir = Path(run.config.out_dir).absolute()
    folder = next(path for path in [out_dir, *out_dir.parents] if path.exists())
    return folder, shutil.disk_usage(folder).free, 4 * checkpoint_bytes(run)


def size(count):
    """Bytes as text, such as 1.2 GB."""
    units = ("bytes", "kB", "MB", "GB", "TB")
    power = min(4, int(math.log(max(count, 1), 1000)))
    digits = 1 if power else 0
    return f"{count / 1000**power:.{digits}f} {units[power]}"


def timed(work, run):
    """The seconds that work(run) takes, until a GPU has finished too."""
    device = run.runtime.device
    began = time.perf_counter()
    work(run)
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device.startswith("mps"):
        torch.mps.synchronize()
    return time.perf_counter() - began
