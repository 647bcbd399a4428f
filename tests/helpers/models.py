"""Small models with random weights."""

import torch


@torch.no_grad()
def random_weights(module, std):
    for p in module.parameters():
        p.normal_(0, std)
    return module


def tokens(*shape, vocab=99):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(1))
