"""One side of a comparison of training steps: a model, ours or another library's, its optimizer and
a batch. A step is forward, backward, clipping at 1.0 and fused AdamW, the same for all sides."""

import time

import torch

from common.runtime import Runtime
from parts.architectures import configure, make
from training.optim import parameter_groups


def our_model(values):
    """(model, its loss function of x and y, both (B, T)) for the keys of a model."""
    model = make(configure(values))
    return model, lambda x, y: model(x, y)[1]


class Side:
    """A model that is ready to take training steps, eager or compiled.

    `make()` returns (model, its loss function); `c` has vocab_size, batch_size and block_size. Ours
    computes attention on a CPU as train.py does, a peer as it does by itself."""

    def __init__(self, make, c, device, dtype="float32", ours=True):
        torch.manual_seed(0)
        self.model, self.loss = make()
        self.model.to(device).train()
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, 0.1), lr=1e-4, fused=True)
        shape = (2, c.batch_size, c.block_size)
        self.x, self.y = torch.randint(c.vocab_size, shape, device=device)  # (B, T) each
        self.device, self.dtype = device, dtype
        self.ours = ours

    def step(self, loss, dtype=None):
        """Take one training step with a loss function, self.loss or its compiled form. dtype: of
        its matrix products, None: the side's. Returns its seconds."""
        began = time.perf_counter()
        kind, dtype = self.device.split(":")[0], dtype or self.dtype
        if self.ours:
            context = Runtime(self.device, dtype, 0, 1, []).autocast()
        else:
            context = torch.autocast(kind, getattr(torch, dtype), enabled=dtype != "float32")
        with context:
            value = loss(self.x, self.y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        value.item()  # waits for a GPU, too
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def gpu_bytes(self, loss):
        """The most bytes that a step holds: weights, moments, and what it allocates besides."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step(loss)
        moments = [t for state in self.optimizer.state.values() for t in state.values()]
        held = sum(t.nbytes for t in [*self.model.parameters(), *moments])
        return torch.cuda.max_memory_allocated() - before + held
