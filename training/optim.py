"""Which parameters decay, the optimizers, and the learning rate at each step."""

import math

import torch

TOGETHER = (
    2**24
)  # numbers in the matrices that Muon makes orthogonal at once, 64 MB of them: large ones gain nothing
# How much of learning_rate is left (above min_lr) at t, from 0 after the warm-up to 1 at lr_decay_iters.
SCHEDULE = {
    "cosine": lambda t: (
        0.5 * (1 + math.cos(math.pi * t))
    ),  # Loshchilov & Hutter 2016, arXiv:1608.03983
    "linear": lambda t: 1 - t,
    "wsd": lambda t: min(
        1.0, (1 - t) / 0.2
    ),  # warm-up, stable, decay over the last fifth (Hu et al. 2024, arXiv:2404.06395)
    "constant": lambda t: 1.0,
}
OPTIMIZER = ("adamw", "muon")


def learning_rate(step, config):
    """The rate of step `step` (from 0): linear warm-up over warmup_iters, then config.schedule from
    learning_rate to min_lr (None: a tenth of it) at lr_decay_iters (None: max_iters)."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    end = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    t = min(1.0, (step - config.warmup_iters) / max(1, end - config.warmup_iters))
    low = 0.1 * config.learning_rate if config.min_lr is None else config.min_lr
    return low + SCHEDULE[config.schedule](t) * (config.learning_rate - low)


def parameter_groups(model, weight_decay):
    """AdamW's two groups: matrices (embeddings too) decay, biases and norm weights do not.

    Returns [{"params", "names", "weight_decay"}, ...]; every trainable parameter is in exactly one."""
    named = [
        (name, p) for name, p in model.named_parameters() if p.requires_grad
    ]  # tied weights come once
    matrices = [(name, p) for name, p in named if p.dim() >= 2]
    vectors = [(name, p) for name, p in named if p.dim() < 2]
    return [
        {
            "params": [p for _, p in group],
            "names": [name for name, _ in group],
            "weight_decay": decay,
        }
        for group, decay in ((matrices, weight_decay), (vectors, 0.0))
        if group
    ]


def orthogonal(x, steps, coefficients, eps):
    """Each matrix of x (n, rows, columns) with its singular values brought near 1, between 0.7 and 1.2 for all but
    the smallest: a quintic Newton-Schulz iteration (Jordan et al. 2024)."""
    a, b, c = coefficients
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x  # (n, short, long)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT  # (n, short, short)
        x = torch.baddbmm(
            x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a
        )  # a x + (b gram + c gram²) x
    return x.mT if tall else x


class Muon(torch.optim.Muon):
    """torch.optim.Muon (match_rms_adamw) in float32, but on a GPU that has bfloat16: rounded to that, the losses of one run drift
    apart from CPU to CPU. The matrices of one shape are made orthogonal together, which pays for it where they are small
    (0.86 of torch's time at a width of 128, 1.6 at 384, on a CPU with bfloat16 instructions: bench/speed_optimizer.py)."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, same in shapes.items():
                together = max(1, TOGETHER // shape.numel())
                for first in range(0, len(same), together):
                    self.update(same[first : first + together], group)
        return loss

    def update(self, matrices, group):
        """Take the step of some matrices of one shape."""
        dtype = (
            torch.bfloat16
            if matrices[0].is_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float32
        )
        looking_ahead = []  # Nesterov's: the momentum as the next gradient, if it is like this one, will make it
        for p in matrices:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momentum = self.state[p]["momentum_buffer"]
            momentum.lerp_(p.grad, 1 - group["momentum"])
            looking_ahead.append(p.grad.lerp(momentum, group["momentum"]).to(dtype))
        updates = orthogonal(
            torch.stack(looking_ahead), group["ns_steps"], group["ns_coefficients"], group["eps"]
        )
        for p, update in zip(matrices, updates):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(
                update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape))
            )  # entries as large as AdamW's steps usually are


def muon_names(model):
    """The names of the parameters that Muon may take: the weights of the linear maps in the blocks.

    A part that says otherwise has an attribute `muon`: the names of its own parameters to take.
    """
    taken = set()
    for prefix, module in model.named_modules():
        linear = ("weight",) if isinstance(module, torch.nn.Linear) else ()
        if prefix.startswith("blocks."):
            taken |= {f"{prefix}.{name}" for name in getattr(module, "muon", linear)}
    return taken


def make_optimizers(model, config, device):
    """The optimizers, each of its own parameters.

    adamw: AdamW for all (Loshchilov & Hutter 2017, arXiv:1711.05101), fused: one kernel over all of them.
    muon: Muon (Jordan et al. 2024) for the matrices of the blocks, whose momentum it makes orthogonal, with
    steps as large as AdamW's so that one learning_rate serves both (Liu et al. 2025, arXiv:2502.16982) and
    beta1 as its momentum; AdamW for embeddings, head, norms and biases."""
    groups = parameter_groups(model, config.weight_decay)
    optimizers = []
    if config.optimizer == "muon":
        taken = muon_names(model)
        matrices = [
            (name, p)
            for group in groups
            for name, p in zip(group["names"], group["params"], strict=True)
            if name in taken
        ]
        ours = {"params": [p for _, p in matrices], "names": [name for name, _ in matrices]}
        optimizers.append(
            Muon(
                [ours],
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                momentum=config.beta1,
                adjust_lr_fn="match_rms_adamw",
            )
        )
        for group in groups:
            rest = [
                (name, p)
                for name, p in zip(group["names"], group["params"])
                if name not in ours["names"]
            ]
            group["names"], group["params"] = [name for name, _ in rest], [p for _, p in rest]
    fused = device.startswith(("cuda", "cpu"))
    optimizers.append(
        torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused
        )
    )
    return optimizers
