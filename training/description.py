"""What a run prints before its first step: its machine, data, model, optimizers and length."""

import torch

from common import files
from common.errors import folded
from parts.architectures import ARCH
from parts.slots import SLOTS
from parts.variant import VariantConfig
from training.flops import used_parameters

EPOCHS = 10  # more without dropout are warned of


def describe(run):
    """Print the machine, the data, the parts of the model and the optimizers of a run."""
    print("\n".join(run.runtime.reasons))
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
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            number = sum(p.numel() for p in group["params"])
            print(
                f"{type(optimizer).__name__}: {number:,} parameters in {len(group['params'])} "
                f"tensors, weight decay {group['weight_decay']}"
            )

    steps = f"{run.config.max_iters} steps of {run.step_tokens:,} tokens"
    epochs = run.data.epochs(run.config.max_iters * run.step_samples)
    print(folded(f"{steps}: {epochs}", 2))
    warn_of_epochs(run)


def warn_of_epochs(run):
    """Warn of a run that reads its text so often that it learns it by heart."""
    samples = run.config.max_iters * run.step_samples
    epochs = samples / run.samples.windows_per_epoch
    modules = run.model.modules()
    has_dropout = any(isinstance(module, torch.nn.Dropout) and module.p for module in modules)
    if epochs > EPOCHS and not has_dropout:
        what = f"{epochs:,.0f} epochs without dropout: the model learns its text by heart"
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
