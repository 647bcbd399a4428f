"""What a run prints before its first step, and the peak speed of its devices, of which the model
FLOPs utilisation (MFU) is a share."""

import re
from dataclasses import asdict

import torch

from common import files
from common.errors import folded
from parts.architectures import ARCH, configure
from parts.costs import training_flops_per_token, used_parameters
from parts.slots import SLOTS
from parts.variant import VariantConfig

EPOCHS = 10  # without dropout, more give a warning

# Dense TFLOP/s in bfloat16 and float16, summed in float32, from NVIDIA's data sheets (which list
# twice as much "with sparsity"), of GPUs whose name has all of these words; the first that fits.
PEAKS = {
    "B200": 2250,
    "H200 NVL": 835,
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
NOT_THESE_CHIPS = {"Laptop", "MIG", "Ti", "D"}  # with such a word, a name is of another chip


def variant_config(run):
    """The model's configuration as a VariantConfig, which parts/costs.py reads."""
    return configure(asdict(run.model.config) | {"model": run.config.model}, as_variant=True)


def peak_flops(runtime):
    """The FLOP/s that a runtime's device could do in its dtype, by the maker's figure, or None
    where there is none: for a CPU, an unknown GPU, and float32."""
    if not runtime.device.startswith("cuda") or runtime.dtype == "float32":
        return None
    words = set(re.split("[^A-Za-z0-9]", torch.cuda.get_device_name(runtime.device)))
    fitting = [peak for name, peak in PEAKS.items() if words.issuperset(name.split())]
    return fitting[0] * 1e12 if fitting and not words & NOT_THESE_CHIPS else None


def peak_speed(run):
    """Print the peak FLOP/s of all devices; return the tokens/s of a run at that peak, or None. The
    share of it that a run reaches is the MFU, the model FLOPs utilisation (Chowdhery et al. 2022,
    arXiv:2204.02311)."""
    peak = peak_flops(run.runtime)
    if peak is None:
        return None
    peak *= run.runtime.world_size
    print(f"100 % MFU is {peak / 1e12:,.0f} TFLOP/s, of the data sheet, dense")
    return peak / training_flops_per_token(variant_config(run), run.model.config.block_size)


# ---------------------------------------------------------------- before the first step


def describe(run):
    """Print the machine, the data, the parts of the model and the optimizers of a run."""
    print("\n".join(run.runtime.reasons.values()))
    if run.saved is not None:
        print(f"resumed after step {run.step} of {run.config.max_iters}")
    for line in run.data.description():
        print(folded(line, 4))

    count = sum(p.numel() for p in run.model.parameters())
    used = used_parameters(run.model)
    active = f", of which a token uses {used:,}" if used < count else ""
    print(f"model {model_name(run)}: {count:,} parameters{active}")
    for part, number in parameters_by_part(run.model).items():
        print(f"  {part:<22}{number:>12,}")
    if not run.config.eval_only:
        describe_training(run)


def describe_training(run):
    """Print the optimizers of a run, its steps, and how often it reads its text."""
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            number = sum(p.numel() for p in group["params"])
            tensors = f"{len(group['params'])} tensors, weight decay {group['weight_decay']}"
            print(f"{type(optimizer).__name__}: {number:,} parameters in {tensors}")

    steps = f"{run.config.max_iters} steps of {run.step_tokens:,} tokens"
    epochs = run.data.epochs(run.config.max_iters * run.step_samples)
    print(folded(f"{steps}: {epochs}", 2))
    warn_of_epochs(run)


def warn_of_epochs(run):
    """Warn of a run that reads its text so often that it memorizes it."""
    epochs = run.data.times_read(run.config.max_iters * run.step_samples)
    modules = run.model.modules()
    has_dropout = any(isinstance(module, torch.nn.Dropout) and module.p for module in modules)
    if epochs > EPOCHS and not has_dropout:
        what = f"{epochs:,.0f} epochs without dropout: the model memorizes its text"
        files.warn_once(f"{what}; take fewer --max_iters, or --dropout=0.2")


def model_name(run):
    """The named model and the words that replace its parts: "gpt2 with mlp=relu2"."""
    name = run.config.arch or run.config.model
    config = run.model.config
    if not isinstance(config, VariantConfig):
        return name
    swapped = []
    for slot in SLOTS:
        usual = ARCH[name].get(slot, getattr(VariantConfig, slot))
        if callable(usual):
            usual = usual(vars(config))
        word = getattr(config, slot)
        if word != usual:
            swapped.append(f"{slot}={word}")
    return f"{name} with {' '.join(swapped)}" if swapped else name


def parameters_by_part(model):
    """{part: number of parameters}. A part of the blocks is summed over all blocks."""
    counts = {}
    for name, p in model.named_parameters():
        words = name.split(".")
        part = words[0]
        if part == "blocks":
            part = f"{words[2]} (in {model.config.n_layer} blocks)"
        counts[part] = counts.get(part, 0) + p.numel()
    return counts
