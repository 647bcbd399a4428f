"""
Train a model to prefer one of two answers to a prompt:

    python -m extras.preferences config/dpo_example.py
    python -m extras.preferences config/dpo_example.py --dpo_beta=0.5 --max_iters=80
    python -m extras.preferences --init_from=resume --out_dir=out-exclaim

All else is train.py's. Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290): the
model learns to prefer the chosen answer to the rejected one, beside a frozen reference, the model
that the run starts from. With the log-probability of a whole answer, in nats,

    reward = beta (log p(answer | prompt) - log p_reference(answer | prompt))
    loss   = -log sigmoid(reward of the chosen - reward of the rejected)          equation 7

The reference's log-probabilities are computed once, before the first step, and stored in every
checkpoint with the optimizer's state, so that resuming does not need the first model.

A preference is two answers to a prompt, of which one was chosen. It is stored as two pairs
(tokens/pairs.py), the chosen answer first, and the splits in meta.json hold their number.
"""

import functools
from dataclasses import dataclass
from itertools import islice

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("extras.preferences")

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

import train
from common import errors
from common.configurator import PositiveFloat
from common.errors import UserError
from parts import moe
from tokens.batches import to_device
from tokens.data import Dataset, open_pairs
from tokens.pairs import Pairs
from training import ranks
from training.settings import read_config


@dataclass
class PreferenceConfig:
    # the objective
    dpo_beta: PositiveFloat = 0.1  # holds the model near the one it starts from


def main(argv):
    """Train on preferences, as argv says. Returns train.py's Result."""
    return train.train_or_evaluate(read(argv), make_run)


def read(argv):
    """The Settings of a command line."""
    return read_config(argv, __doc__, own=PreferenceConfig, program="extras.preferences")


def make_run(settings, runtime):
    """The Run of some Settings, whose data are preferences and whose loss is a PreferenceLoss.
    Raises UserError if they do not go together."""
    check(settings.config)
    beta = PreferenceConfig(**settings.own).dpo_beta
    make_loss = functools.partial(PreferenceLoss, beta=beta)
    run = train.make_run(
        settings, runtime, open_data=open_preferences, make_loss=make_loss, scoring=score
    )
    check_model(run.model)
    set_references(run)
    return run


def check(config):
    """Raise UserError for values of a TrainConfig that do not go with preferences."""
    if config.init_from == "scratch":
        what = "learning from preferences starts from a trained model"
        raise UserError(what, "init_from=scratch", "give --init_from=RUN")
    if config.batch_size % 2:
        fix = "make it even, two rows for each preference"
        raise UserError("batch_size is odd", f"batch_size={config.batch_size}", fix)
    if config.allow_data_change:
        what = "the reference belongs to the data"
        raise UserError(what, "allow_data_change", "leave it out")
    if config.split != "val":
        what = "preferences score their validation split alone"
        raise UserError(what, f"split={config.split}", "leave it out")


def check_model(model):
    """Raise UserError for a model whose own loss is more than the loss of tokens."""
    if moe.layers_of(model):
        what = "dpo does not balance the loads of experts"
        raise UserError(what, "model", "choose a model without experts")


# ---------------------------------------------------------------- the data


class PreferenceData(Dataset):
    """A dataset of preferences."""

    def open_split(self, split, block_size):
        """The Preferences of a split."""
        if "preferences" not in self.meta["splits"][split]:
            what = f"{self.name} holds no preferences"
            fix = "prepare lines with prompt, chosen and rejected"
            raise UserError(what, f"dataset={self.name}", fix)
        return open_pairs(self.folder, split, block_size, Preferences)


def open_preferences(config, runtime):
    """The PreferenceData of a TrainConfig."""
    return PreferenceData(config.data_dir, config.dataset)


class Preferences(Pairs):
    """The preferences of a split: rows 2i and 2i + 1 are the pairs of one, chosen and rejected.

    `reference` (rows,) float32 holds the log-probability in nats of each answer by the reference
    model, as far as block_size. It is set when a run starts; from then on all batches are
    (x, y, reference)."""

    measures = ("reward_accuracy", "reward_margin")
    unit = "preferences"
    answers_each = 2
    masked = False  # preferences count the same, however long their answers

    def __init__(self, tokens, mask, block_size):
        super().__init__(tokens, mask, block_size)
        prompts = self.answers - self.starts
        if len(prompts) % 2 or (prompts[::2] != prompts[1::2]).any():
            raise UserError("the pairs are not two for each prompt", "data", "prepare them again")
        self.reference = None

    def rows(self, pairs):
        """x and y of Pairs.rows, and the reference of each row as soon as there is one."""
        x, y = super().rows(pairs)
        if self.reference is None:
            return x, y
        return x, y, self.reference[pairs]

    def counts(self, y):
        """The number of preferences of a batch's y, twice: their loss and measures are means over
        it."""
        preferences = int((y >= 0).any(1).sum()) // 2
        return preferences, preferences


# ---------------------------------------------------------------- the loss


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
        self.model = model
        self.beta = beta
        self.stored = {}  # {split: its reference}, saved with the run

    def forward(self, x, y, reference, measured=False):
        rewards = self.beta * (log_probabilities(self.model, x, y) - reference)  # (rows,)
        margins = rewards[::2] - rewards[1::2]  # (rows / 2,)
        real = (y >= 0).any(1)[::2]  # an evaluation's last batch is filled up
        loss = torch.where(real, -F.logsigmoid(margins), 0.0).sum() / real.sum()
        if not measured:
            return loss
        right = ((margins > 0) & real).sum().type_as(loss)
        return torch.stack([loss, right, torch.where(real, margins, 0.0).sum()])


def set_references(run):
    """Give each split its reference: of the checkpoint, or, at a new start, the log-probabilities
    by the run's model. Raises UserError if they do not fit the data."""
    for name, split in run.data.splits.items():
        if run.saved is None:
            run.loss_module.stored[name] = torch.from_numpy(compute_reference(run, split, name))
        known = run.loss_module.stored.get(name)
        if known is None or len(known) != len(split.starts):
            what = "this checkpoint has no reference for these preferences"
            fix = f"start another run with --init_from={run.config.out_dir}"
            raise UserError(what, f"out_dir={run.config.out_dir}", fix)
    for name, split in run.data.splits.items():
        split.reference = run.loss_module.stored[name].numpy()


@torch.no_grad()
def compute_reference(run, split, name):
    """(rows,) the reference of a split. The ranks divide the batches among them; a batch holds the
    same rows however many ranks there are."""
    size = run.config.batch_size
    runtime = run.runtime
    reference = torch.zeros(len(split.starts), device=runtime.device)
    batches = enumerate(split.eval_batches(size))

    run.model.eval()
    progress = tqdm(
        total=len(reference) // 2,
        desc=f"reference, {name}",
        unit=" preferences",
        unit_scale=True,
        disable=None if runtime.main else True,
        leave=False,
    )
    with progress:
        while group := list(islice(batches, runtime.world_size)):
            has_batch = runtime.rank < len(group)  # with fsdp every rank has to run the model
            number, arrays = group[runtime.rank if has_batch else 0]
            x, y = [to_device(array, runtime.device) for array in arrays]
            with runtime.autocast():
                values = log_probabilities(run.model, x, y)
            if has_batch:
                place = reference[number * size :][: len(values)]
                place.copy_(values[: len(place)])
            progress.update(len(group) * size // 2)
    run.model.train()
    return ranks.all_reduce_sum(reference, runtime).cpu().numpy().astype(np.float32)


# ---------------------------------------------------------------- the evaluation


def score(run, stop=None):
    """The log row of an evaluation, None if a stop signal arrives midway. Its loss is not one of
    tokens, so it has no bits per byte."""
    row = train.score(run, stop)
    if row is None:
        return None
    return row | {"bits_per_byte": None}


if __name__ == "__main__":
    errors.run(lambda argv: main(argv).status)
