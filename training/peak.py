"""The most operations per second that a device can do: what the MFU is a share of. MFU, the model
FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311), is tokens/s * FLOPs per token over
it."""

import re
import time

import torch

# Dense TFLOP/s in bfloat16 and float16, summed in float32, from NVIDIA's data sheets (which list
# twice as much "with sparsity"), of GPUs whose name has all of these words; the first that fits.
PEAKS = {
    "B200": 2250,
    "H200": 989,
    "GH200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "5090": 210,
    "4090": 165,
    "3090": 71,
}
OTHERS = {"Laptop", "MIG"}  # slower chips, or parts of one, with these names
SIZE = {"cuda": 8192, "cpu": 512}  # of the matrices that are multiplied


def peak_flops(runtime):
    """(FLOP/s of a runtime's device in its dtype, where that is from): the maker's figure for a
    known GPU, otherwise the fastest of a few large matrix products."""
    kind = runtime.device.split(":")[0]
    if kind == "cuda" and runtime.dtype != "float32":
        name = torch.cuda.get_device_name(runtime.device)
        words = set(re.split("[^A-Za-z0-9]", name))
        for known, peak in PEAKS.items():
            if words.issuperset(known.split()) and not words & OTHERS:
                return peak * 1e12, f"the data sheet of {known}, dense"

    n = SIZE.get(kind, 2048)
    a = torch.randn(n, n, device=runtime.device, dtype=getattr(torch, runtime.dtype))
    best = float("inf")
    for _ in range(6):  # the first warms up
        began = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for a GPU, too
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best, f"the fastest product of {runtime.dtype} matrices of {n}"
