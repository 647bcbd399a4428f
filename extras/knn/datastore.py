"""
A text as a memory beside the weights: kNN-LM (Khandelwal et al. 2020, arXiv:1911.00172). A
datastore holds, for each token of a text, the hidden state before it as a key: what the last
block's MLP reads, after its norm (the paper's choice), (C,). The next token is then drawn from

    p(y) = weight * p_knn(y) + (1 - weight) * p_model(y)
    p_knn(y) ~ sum of exp(-d / temperature) over the nearest keys whose token is y

with squared Euclidean distances d. Another datastore changes what a model knows without training.

    FOLDER/0.index, 1.index, ...    faiss: inverted lists of 16-bit keys, which stay on disk
    FOLDER/tokens.npy               the token of each key
    FOLDER/datastore.json           the model and the text it was made of, weight, temperature

python -m extras.knn builds datastores, and chooses weight and temperature. Needs faiss
(pip install faiss-cpu).
"""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from common import files
from common.errors import UserError

NEIGHBOURS = 64  # nearest keys that count
LISTS = 16  # inverted lists that a search reads, those with the nearest centres
FIX = "build it again: python -m extras.knn build"
WEIGHT = 0.25  # until `python -m extras.knn score` has chosen
TEMPERATURE = 10.0


def identity(checkpoint_folder):
    """The sha256 of a checkpoint's weights: keys of other weights are no neighbours."""
    return files.sha256_of(Path(checkpoint_folder) / "model.safetensors")


@contextmanager
def watched(model):
    """A list that always holds the last states that the last block's MLP has read, (B, T, C)."""
    seen = [None]

    def keep(mlp, inputs):
        seen[0] = inputs[0]

    handle = model.blocks[-1].mlp.register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


class Datastore:
    """An open datastore for a model with these weights and this configuration. Raises UserError if
    it is missing, damaged, or of another model."""

    def __init__(self, folder, weights, config):
        import faiss

        folder = Path(folder)
        self.folder = folder
        self.facts = files.read_json(folder / "datastore.json", FIX)
        if self.facts.get("weights") != weights:
            raise UserError("this datastore belongs to other weights", folder, FIX)
        try:
            paths = (str(folder / f"{n}.index") for n in range(self.facts["shards"]))
            self.shards = [faiss.read_index(path, faiss.IO_FLAG_MMAP) for path in paths]
            path = files.regular(folder / "tokens.npy")
            self.tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            self.weight = float(self.facts["weight"])
            self.temperature = float(self.facts["temperature"])
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            what = f"the datastore is damaged: {type(error).__name__}"
            raise UserError(what, folder, FIX) from None
        keys = sum(shard.ntotal for shard in self.shards)
        tokens = self.tokens
        fits = [isinstance(shard, faiss.IndexIVF) for shard in self.shards]
        fits += [shard.d == config.n_embd for shard in self.shards]
        fits += [shard.metric_type == faiss.METRIC_L2 for shard in self.shards]
        fits += [tokens.dtype.kind in "iu", tokens.shape == (keys,)]
        fits += [keys > 0, 0 <= self.weight < 1, 1e-6 <= self.temperature <= 1e6]
        if not all(fits) or not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
            raise UserError("the datastore is damaged: it does not fit the model", folder, FIX)
        for shard in self.shards:
            shard.nprobe = LISTS

    def search(self, states):
        """(squared distances, tokens), (n, NEIGHBOURS) each, of the keys nearest to states (n, C).
        Where fewer are found, the distance is infinite."""
        keys = np.ascontiguousarray(states.float().cpu().numpy())
        results = [shard.search(keys, NEIGHBOURS) for shard in self.shards]
        distances, places = (np.concatenate(part, 1) for part in zip(*results, strict=True))
        distances = np.where(places < 0, np.inf, distances)

        lost = places.max() >= len(self.tokens) or np.isnan(distances).any()
        if lost or np.isinf(distances.min(1)).any():
            what = "the datastore is damaged: it holds keys without a token"
            raise UserError(what, self.folder, FIX)
        nearest = np.argsort(distances, 1, kind="stable")[:, :NEIGHBOURS]
        distances, places = (np.take_along_axis(a, nearest, 1) for a in (distances, places))
        tokens = self.tokens[np.maximum(places, 0)].astype(np.int64)
        return tuple(torch.from_numpy(part).to(states.device) for part in (distances, tokens))

    def mix(self, logits, states):
        """The logarithm of p(y), (n, V), from the model's logits (n, V) and its states (n, C)."""
        distances, tokens = self.search(states)
        near = torch.softmax(-distances / self.temperature, -1).float()  # (n, NEIGHBOURS)
        p = (1 - self.weight) * logits.float().softmax(-1)
        return p.scatter_add(1, tokens, self.weight * near).log()


class WithNeighbours(torch.nn.Module):
    """A model that gives the logits of the mixture. It is called as a model for sampling is."""

    def __init__(self, model, store):
        super().__init__()
        self.model = model
        self.store = store
        self.config = model.config

    def forward(self, idx, targets=None, cache=None, last_only=False):
        with watched(self.model) as seen:
            logits, _ = self.model(idx, cache=cache, last_only=last_only)
        states = seen[0][:, -logits.size(1) :]  # (B, T or 1, C)
        mixed = self.store.mix(logits.flatten(0, 1), states.flatten(0, 1)).view_as(logits)
        return mixed, None
