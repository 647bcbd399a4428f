"""How much a run computes, and how much its devices could: the model FLOPs utilisation, MFU."""

import re
from dataclasses import asdict

import torch

from parts import moe
from parts.architectures import configure
from parts.costs import training_flops_per_token
from parts.variant import VariantConfig

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
OTHER_CHIPS = {"Laptop", "MIG"}  # slower chips, or parts of one, with these names


def variant(run):
    """The model's configuration as a VariantConfig, which parts/costs.py reads."""
    c = run.model.config
    if isinstance(c, VariantConfig):
        return c
    return configure(asdict(c) | {"model": run.config.model}, as_variant=True)


def used_parameters(model):
    """The number of a model's parameters that one token uses: not all experts."""
    count = sum(p.numel() for p in model.parameters())
    return count - sum(layer.unused() for layer in moe.layers_of(model))


def peak_flops(runtime):
    """The FLOP/s that a runtime's device could do in its dtype, by the maker's figure, or None
    where there is none: for a CPU, an unknown GPU, and float32."""
    if not runtime.device.startswith("cuda") or runtime.dtype == "float32":
        return None
    words = set(re.split("[^A-Za-z0-9]", torch.cuda.get_device_name(runtime.device)))
    fitting = [peak for name, peak in PEAKS.items() if words.issuperset(name.split())]
    return fitting[0] * 1e12 if fitting and not words & OTHER_CHIPS else None


def peak_speed(run):
    """The tokens/s at which the devices would compute nothing else and never wait, or None. The
    MFU, the model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311), is the share of it
    that a run reaches."""
    peak = peak_flops(run.runtime)
    if peak is None:
        return None
    peak *= run.runtime.world_size
    print(f"100 % MFU is {peak / 1e12:,.0f} TFLOP/s, of the data sheet, dense")
    return peak / training_flops_per_token(variant(run), run.model.config.block_size)
