"""Which parameters decay, the optimizer, and the learning rate at each step."""
import math

import torch


def parameter_groups(model, weight_decay):
    """AdamW's two groups: matrices (embeddings too) decay, biases and norm weights do not.

    Returns [{"params", "names", "weight_decay"}, ...]; every trainable parameter is in exactly one."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]  # tied weights come once
    matrices = [(name, p) for name, p in named if p.dim() >= 2]
    vectors = [(name, p) for name, p in named if p.dim() < 2]
    return [
        {"params": [p for _, p in group], "names": [name for name, _ in group], "weight_decay": decay}
        for group, decay in ((matrices, weight_decay), (vectors, 0.0)) if group
    ]


def make_optimizer(model, config, device):
    """AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101), fused: one kernel over all parameters."""
    groups = parameter_groups(model, config.weight_decay)
    fused = device.startswith(("cuda", "cpu"))
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused)


def learning_rate(step, config):
    """The rate of step `step` (from 0): linear warm-up over warmup_iters, then half a cosine from
    learning_rate down to min_lr at lr_decay_iters (None: max_iters) (Loshchilov & Hutter 2016, arXiv:1608.03983)."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    end = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    progress = min(1.0, (step - config.warmup_iters) / max(1, end - config.warmup_iters))
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (config.learning_rate - config.min_lr)
