"""The parameter groups, the optimizers, and the learning rate at each step."""

import math

import torch

OPTIMIZER = ("adamw", "muon")

# The learning rate at time t, from 0 after the warm-up to 1 at lr_decay_iters. 1 stands for
# learning_rate, 0 for min_lr.
SCHEDULE = {
    # Loshchilov & Hutter 2016, arXiv:1608.03983
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "linear": lambda t: 1 - t,
    # warm-up, stable, decay over the last fifth (Hu et al. 2024, arXiv:2404.06395)
    "wsd": lambda t: min(1.0, (1 - t) / 0.2),
    "constant": lambda t: 1.0,
}

# Entries of the matrices that Muon orthogonalizes in one batch, 64 MB in float32. Batching larger
# matrices saves no time.
STACK = 2**24


def learning_rate(step, config):
    """The learning rate of a step (from 0): linear warm-up over warmup_iters, then config.schedule
    from learning_rate to min_lr (None: a tenth of it) at lr_decay_iters (None: max_iters)."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    end = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    t = min(1.0, (step - config.warmup_iters) / max(1, end - config.warmup_iters))
    low = 0.1 * config.learning_rate if config.min_lr is None else config.min_lr
    return low + SCHEDULE[config.schedule](t) * (config.learning_rate - low)


def group_of(named, weight_decay):
    """A torch parameter group from [(name, parameter), ...]."""
    names, params = [name for name, _ in named], [p for _, p in named]
    return {"params": params, "names": names, "weight_decay": weight_decay}


def parameter_groups(model, weight_decay):
    """AdamW's two groups: matrices (embeddings too) decay, biases and norm weights do not.

    Returns [{"params", "names", "weight_decay"}, ...]. Each trainable parameter is in one group."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [(name, p) for name, p in named if p.dim() >= 2]
    vectors = [(name, p) for name, p in named if p.dim() < 2]
    groups = [group_of(matrices, weight_decay), group_of(vectors, 0.0)]
    return [group for group in groups if group["params"]]


def orthogonal(x, steps, coefficients, eps):
    """Bring the singular values of each matrix of x (n, rows, columns), except the smallest, to
    between 0.7 and 1.2, by a quintic Newton-Schulz iteration (Jordan et al. 2024)."""
    a, b, c = coefficients
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x  # (n, short, long)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT  # (n, short, short)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram²
        x = torch.baddbmm(x, polynomial, x, beta=a)  # a x + (b gram + c gram²) x
    return x.mT if tall else x


class Muon(torch.optim.Muon):
    """torch.optim.Muon (match_rms_adamw), which orthogonalizes in `dtype`, that of the run's matrix
    products; torch's uses bfloat16 always. In float32 a run has the same losses on every CPU.
    Matrices of one shape are orthogonalized in one batch, which makes up for the slower float32 if
    they are small: 0.86 of torch's time at a width of 128, 1.6 at 384, on a CPU with bfloat16
    instructions (bench/speed.py optimizer)."""

    def __init__(self, params, dtype=torch.float32, **settings):
        super().__init__(params, **settings)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, matrices in by_shape.items():
                count = max(1, STACK // shape.numel())
                for first in range(0, len(matrices), count):
                    self.update(matrices[first : first + count], group)
        return loss

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
        updates = stack.flatten(0, -3)  # (n or n E, rows, columns)
        updates = orthogonal(updates, group["ns_steps"], group["ns_coefficients"], group["eps"])
        for p, update in zip(matrices, updates.view_as(stack), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            # Scale the entries to the usual size of AdamW's steps.
            p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape[-2:])))


def make_optimizers(model, config, runtime):
    """The optimizers, each with its own parameters.

    adamw: AdamW for all (Loshchilov & Hutter 2017, arXiv:1711.05101), fused into one kernel.
    muon: Muon (Jordan et al. 2024) for the matrices of the blocks, whose momentum it
    orthogonalizes, and AdamW for embeddings, head, norms and biases. Muon's steps are scaled to the
    size of AdamW's, so that both use one learning_rate (Liu et al. 2025, arXiv:2502.16982). Its
    momentum is beta1, and its matrix products are in bfloat16 where the run's are."""
    lr, optimizers = config.learning_rate, []
    groups = parameter_groups(model, config.weight_decay)
    if config.optimizer == "muon":
        matrices, groups = split_groups(groups, muon_names(model))
        stacked = [(name, p) for name, p in matrices if p.dim() == 3]  # the experts
        plain = [(name, p) for name, p in matrices if p.dim() == 2]
        muon = Muon(
            [group_of(plain, config.weight_decay)],
            torch.bfloat16 if runtime.dtype == "bfloat16" else torch.float32,
            lr=lr,
            momentum=config.beta1,
            adjust_lr_fn="match_rms_adamw",
        )
        if stacked:  # torch's constructor refuses what is not 2-d, `Muon.update` does not
            muon.add_param_group(group_of(stacked, config.weight_decay))
        optimizers.append(muon)
    fused = runtime.device.startswith(("cuda", "cpu"))
    betas = (config.beta1, config.beta2)
    optimizers.append(torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused))
    return optimizers


def muon_names(model):
    """The names of the parameters that Muon may take: the weights of the linear maps in the blocks.

    A part overrides this with an attribute `muon`: the names of its own parameters to take."""
    taken = set()
    for prefix, module in model.named_modules():
        linear = ("weight",) if isinstance(module, torch.nn.Linear) else ()
        if prefix.startswith("blocks."):
            taken |= {f"{prefix}.{name}" for name in getattr(module, "muon", linear)}
    return taken


def split_groups(groups, names):
    """([(name, parameter), ...] of the parameters with these names, the groups without them)."""
    named, others = [], []
    for group in groups:
        rest = []
        for name, p in zip(group["names"], group["params"], strict=True):
            (named if name in names else rest).append((name, p))
        others.append(group_of(rest, group["weight_decay"]))
    return named, others
