"""The optimizers, the parameters that each of them updates, and the learning rate at each step."""

import math

import torch

# The learning rate at time t, which goes from 0 (the end of the warm-up) to 1 (lr_decay_iters). A
# value of 1 means learning_rate, 0 means min_lr.
SCHEDULE = {
    # Loshchilov & Hutter 2016, arXiv:1608.03983
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "linear": lambda t: 1 - t,
    # warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395); linear, over the last fifth
    "wsd": lambda t: min(1.0, (1 - t) / 0.2),
    "constant": lambda t: 1.0,
}


def learning_rate(step, config):
    """The learning rate of a step (from 0): linear warm-up over warmup_iters, then config.schedule
    from learning_rate to min_lr (None: a tenth of it) at lr_decay_iters (None: max_iters)."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    end = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    t = min(1.0, (step - config.warmup_iters) / max(1, end - config.warmup_iters))
    low = 0.1 * config.learning_rate if config.min_lr is None else config.min_lr
    return low + SCHEDULE[config.schedule](t) * (config.learning_rate - low)


# ---------------------------------------------------------------- the optimizers


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101), fused into one kernel except on Metal."""

    moments = 2  # tensors of its state that are as large as the parameter
    takes_matrices_only = False

    def __init__(self, groups, config, runtime):
        fused = runtime.device.startswith(("cuda", "cpu"))
        betas = (config.beta1, config.beta2)
        super().__init__(groups, lr=config.learning_rate, betas=betas, fused=fused)


def orthogonal(x):
    """Bring the singular values of each matrix of x (n, rows, columns), except the smallest, to
    between 0.7 and 1.2, by five steps of a quintic Newton-Schulz iteration (Jordan et al. 2024)."""
    a = 3.4445
    b = -4.775
    c = 2.0315
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x  # (n, short, long)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT  # (n, short, short)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram²
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a x + (b gram + c gram²) x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024): momentum beta1, whose direction is orthogonalized. Its steps have
    the size of AdamW's, so that both use one learning_rate (Liu et al. 2025, arXiv:2502.16982).

    It is torch.optim.Muon (match_rms_adamw), but orthogonalizes in bfloat16 only if the run's
    matrix products are, else in float32; torch's uses bfloat16 always. So nothing in a float32 run
    is rounded to bfloat16. Matrices of one shape are orthogonalized in one batch, which makes up
    for the slower float32 if they are small: 0.86 of torch's time at a width of 128, 1.6 at 384, on
    a CPU with bfloat16 instructions (python -m extras.speed optimizer)."""

    moments = 1
    takes_matrices_only = True
    entries = 2**24  # of the matrices in one batch: 64 MB; batching larger ones saves no time

    def __init__(self, groups, config, runtime):
        super().__init__(groups, dict(lr=config.learning_rate, momentum=config.beta1))
        self.dtype = torch.bfloat16 if runtime.dtype == "bfloat16" else torch.float32

    @torch.no_grad()
    def step(self, closure=None):  # torch.distributed.checkpoint passes None
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, matrices in by_shape.items():
                count = max(1, self.entries // shape.numel())
                for first in range(0, len(matrices), count):
                    self.update(matrices[first : first + count], group)

    def update(self, matrices, group):
        """Update some matrices of one shape."""
        directions = []  # Nesterov momentum: as if this gradient came once more
        for p in matrices:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momentum = self.state[p]["momentum_buffer"]
            momentum.lerp_(p.grad, 1 - group["momentum"])
            directions.append(p.grad.lerp(momentum, group["momentum"]).to(self.dtype))

        stack = torch.stack(directions)  # (n, rows, columns), or of experts (n, E, rows, columns)
        updates = orthogonal(stack.flatten(0, -3))  # (n or n E, rows, columns)
        for p, update in zip(matrices, updates.view_as(stack), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            # Scale the entries to the usual size of AdamW's steps.
            p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape[-2:])))


# An optimizer is a class with `moments` and `takes_matrices_only`: whether it takes the matrices of
# the blocks alone, each as a whole, and leaves embeddings, head, norms and biases to AdamW.
OPTIMIZER = {"adamw": AdamW, "muon": Muon}


def make_optimizers(model, config, runtime):
    """The optimizers of a TrainConfig. Each trainable parameter belongs to exactly one."""
    optimizer = OPTIMIZER[config.optimizer]
    decay = config.weight_decay
    if not optimizer.takes_matrices_only:
        return [optimizer(parameter_groups(model, decay), config, runtime)]
    names = muon_names(model)
    matrices = parameter_groups(model, decay, lambda name: name in names)
    others = parameter_groups(model, decay, lambda name: name not in names)
    for group in others:
        group["rate"] = config.adam_rate  # times the learning rate of the step
    return [optimizer(matrices, config, runtime), AdamW(others, config, runtime)]


# ---------------------------------------------------------------- the parameters


def parameter_groups(model, weight_decay, taken=lambda name: True):
    """[{"params": [(name, parameter), ...], "weight_decay"}, ...], as torch's optimizers take them.
    Each trainable parameter whose name is `taken` is in one group. Matrices and embeddings decay.
    Norm weights and biases do not, not even the biases of experts, (E, width), nor what a part
    lists in its attribute `undecayed`."""
    left_out = names_of(model, "undecayed")
    decaying = []
    others = []
    for name, p in model.named_parameters():
        if not (p.requires_grad and taken(name)):
            continue
        if p.dim() >= 2 and not name.endswith("bias") and name not in left_out:
            decaying.append((name, p))
        else:
            others.append((name, p))
    groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def names_of(model, attribute, of_linear=()):
    """The names of the parameters that the modules of a model list in an attribute. of_linear: what
    a linear map without this attribute lists."""
    names = set()
    for prefix, module in model.named_modules():
        usual = of_linear if isinstance(module, torch.nn.Linear) else ()
        names |= {f"{prefix}.{name}" for name in getattr(module, attribute, usual)}
    return names


def muon_names(model):
    """The names of the matrices in the blocks: the weights of their linear maps.

    A part overrides this with an attribute `muon`: the names of its own parameters to take."""
    names = names_of(model, "muon", of_linear=("weight",))
    return {name for name in names if name.startswith("blocks.")}
