"""
Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), --objective=dpo: the model
learns to prefer the chosen answer to the rejected one, beside a frozen reference, the model that
the run starts from. With the log-probability of a whole answer, in nats,

    reward = beta (log p(answer | prompt) - log p_reference(answer | prompt))
    loss   = -log sigmoid(reward of the chosen - reward of the rejected)          equation 7

The reference's log-probabilities are computed once, before the first step, and stored in every
checkpoint with the optimizer's state, so that resuming does not need the first model.
"""

from itertools import islice

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

from common.errors import UserError
from parts import moe
from tokens.pairs import Pairs, Preferences
from training import parallel
from weights.checkpoint import REFERENCE


def log_probabilities(model, x, y):
    """(rows,) the log-probability in nats of the targets y (rows, T) of each row, after x."""
    logits = model(x)[0].float()  # (rows, T, V)
    losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none")
    return -losses.view_as(y).sum(1)


class PreferenceLoss(torch.nn.Module):
    """The mean loss of the preferences in a batch, whose rows are chosen, rejected, chosen, ...

    With `measured`, a (3,) tensor of the loss, the number of preferences whose chosen answer has
    the greater reward, and the sum of the differences of the rewards."""

    def __init__(self, model, beta):
        super().__init__()
        self.model, self.beta = model, beta

    def forward(self, x, y, reference, measured=False):
        rewards = self.beta * (log_probabilities(self.model, x, y) - reference)  # (rows,)
        margins = rewards[::2] - rewards[1::2]  # (rows / 2,)
        real = (y >= 0).any(1)[::2]  # an evaluation's last batch is filled up
        loss = torch.where(real, -F.logsigmoid(margins), 0.0).sum() / real.sum()
        if not measured:
            return loss
        right = ((margins > 0) & real).sum().type_as(loss)
        return torch.stack([loss, right, torch.where(real, margins, 0.0).sum()])


def check_objective(config, model, sources):
    """Raise UserError unless the objective, the datasets and the model go together."""
    dpo, name = config.objective == "dpo", config.dataset
    if any(isinstance(source.splits["train"], Preferences) != dpo for source in sources):
        if dpo:
            fix = "prepare lines with prompt, chosen and rejected"
            raise UserError(f"{name} holds no preferences", "objective=dpo", fix)
        raise UserError(f"{name} holds preferences", f"dataset={name}", "add --objective=dpo")
    if dpo and moe.layers_of(model):
        what = "dpo does not balance the loads of experts"
        raise UserError(what, "objective=dpo", "choose a model without experts")


def set_references(run, stored):
    """Give each split its reference: what a checkpoint's tensors hold, or, at a new start, the
    log-probabilities by the run's model. Raises UserError if they do not fit the data. Other data
    need none."""
    if run.config.objective != "dpo":
        return
    for name, split in run.sources[0].splits.items():
        if run.saved is None:
            split.reference = compute_reference(run, split, name)
            continue
        known = stored.get(f"{REFERENCE}{name}")
        if known is None or len(known) != len(split.starts):
            what = "this checkpoint has no reference for these preferences"
            fix = f"start another run with --init_from={run.config.out_dir}"
            raise UserError(what, f"out_dir={run.config.out_dir}", fix)
        split.reference = known.numpy()


@torch.no_grad()
def compute_reference(run, split, name):
    """The reference of a split. The ranks divide the batches among them; a batch holds the same
    rows however many ranks there are."""
    config, runtime, model = run.config, run.runtime, run.model
    reference = torch.zeros(len(split.starts), device=runtime.device)
    batches = enumerate(Pairs.eval_batches(split, config.batch_size))
    bar = dict(unit=" rows", unit_scale=True, disable=None if runtime.main else True, leave=False)

    model.eval()
    with tqdm(total=len(reference), desc=f"reference, {name}", **bar) as progress:
        while group := list(islice(batches, runtime.world_size)):
            has_batch = runtime.rank < len(group)  # with fsdp every rank has to run the model
            number, (x, y) = group[runtime.rank if has_batch else 0]
            x, y = (parallel.to_device(part, runtime.device) for part in (x, y))
            with runtime.autocast():
                values = log_probabilities(model, x, y)
            if has_batch:
                place = reference[number * config.batch_size :][: len(values)]
                place.copy_(values[: len(place)])
            progress.update(len(group) * config.batch_size)
    model.train()
    return parallel.all_reduce_sum(reference, runtime).cpu().numpy().astype(np.float32)


def references(sources):
    """{name: tensor} to be saved with the optimizer's state; empty without preferences."""
    return {
        f"{REFERENCE}{name}": torch.from_numpy(split.reference)
        for source in sources
        for name, split in source.splits.items()
        if isinstance(split, Preferences)
    }
