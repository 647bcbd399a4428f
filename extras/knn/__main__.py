"""
python -m extras.knn build|score|write RUN --store=FOLDER [--dataset=NAME]

A text as a memory beside the weights (kNN-LM, datastore.py). `build` reads the training split of a
dataset that has the model's tokens. `score` chooses weight and temperature on the first half of the
validation text and reports the loss on the second. `write` then writes with them, and takes the
keys of sample.py that apply. Memory holds SHARD keys at a time, whatever the length of the text.
"""

import json
import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from common import early

if __name__ == "__main__":  # before the import of torch, which takes seconds
    early.start("extras.knn")

import numpy as np
import torch
from tqdm import tqdm

from common import files
from common.configurator import NonNegativeInt, PathName, PositiveInt, build, load
from common.errors import UserError, printable, run
from common.runtime import set_up
from extras.knn import datastore
from sample import Opened, build_config, fit_prompts, write_all
from sampling.prompts import note, read_prompts
from sampling.settings import NAMING, SampleConfig, refuse_idle
from tokens.data import open_split, same_tokens
from tokens.token_files import load_meta, load_tokenizer
from weights import checkpoint

SHARD = 1 << 19  # keys
SAMPLE = 64  # keys for each list, from which faiss learns its centre
WEIGHTS = torch.tensor([0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
TEMPERATURES = (0.3, 1, 3, 10, 30, 100)


@dataclass
class WriteConfig:
    store: PathName = "datastore"  # the folder of the datastore


@dataclass
class KnnConfig:
    store: PathName = "datastore"  # the folder of the datastore
    checkpoint: str = "latest"  # latest, best, or a step
    data_dir: PathName = "data"
    dataset: str | None = None  # None: what the run was trained on
    tokens: NonNegativeInt = 0  # of the split to read; 0 = all
    batch_size: PositiveInt = 16
    device: str = "auto"

    def __post_init__(self):
        if self.tokens == 1:
            raise ValueError("tokens=1 reads nothing: give 0 for all, or 2 or more")


def open_both(name, config):
    """(model, its identity, dataset folder, runtime). Raises UserError if the dataset has other
    tokens than the model."""
    runtime = set_up(config.device, "float32")
    model, tokenizer, trained, state = checkpoint.open_run(name, config.checkpoint, runtime.device)
    data = Path(config.data_dir) / (config.dataset or trained["dataset"])
    if not same_tokens(load_tokenizer(data, load_meta(data)), tokenizer):
        fix = f"prepare it with --tokenizer={name}"
        raise UserError("this dataset has other tokens than the model", data, fix)
    weights = datastore.identity(checkpoint.find(name, state["step"]))
    return model, weights, data, runtime


@torch.no_grad()
def states_of(model, batches, runtime):
    """Yield (states (n, C), logits (n, V), targets (n,)) for each batch, of the targets that
    count."""
    with datastore.watched(model) as seen:
        for x, y in batches:
            x = torch.from_numpy(x).to(runtime.device)
            y = torch.from_numpy(y).to(runtime.device)
            logits = model(x)[0]
            yield seen[0][y >= 0], logits[y >= 0], y[y >= 0]


def arrays(states, targets):
    return states.cpu().numpy().astype(np.float32), targets.cpu().numpy().astype(np.uint32)


def make(name, config):
    """Write the datastore under a temporary name and rename it. Raises UserError if something else
    is there."""
    import faiss

    store = Path(config.store)
    model, weights, data, runtime = open_both(name, config)
    if store.exists():
        raise UserError("there is something already", store, "choose another --store")
    split = open_split(data, "train", model.config.block_size)
    count = split.scored(config.tokens)[0]

    store.parent.mkdir(parents=True, exist_ok=True)
    new = files.partial(store)
    try:
        new.mkdir()
        empty = trained_index(faiss, model, split, count, config, runtime)
        shards, tokens = write_shards(faiss, empty, model, split, count, config, runtime, new)
        np.save(new / "tokens.npy", np.concatenate(tokens))
        facts = {"weights": weights, "dataset": str(data), "shards": shards}
        facts |= {"weight": datastore.WEIGHT, "temperature": datastore.TEMPERATURE}
        files.write(new / "datastore.json", json.dumps(facts, indent=1))
        new.rename(store)
    finally:
        files.remove(new)
    size = sum(path.stat().st_size for path in store.iterdir())
    print(printable(f"{store}: keys of {data} ({count:,}), {size / 1e6:,.1f} MB"))


def trained_index(faiss, model, split, count, config, runtime):
    """An empty index whose lists have their centres: about sqrt(count) of them, learned from states
    all over the text."""
    lists = 2 ** max(0, round(math.log2(max(1, count)) / 2))
    batches = -(-count // (config.batch_size * model.config.block_size))
    wanted = -(-SAMPLE * lists // (config.batch_size * model.config.block_size))
    step = max(1, batches // max(1, wanted))
    some = islice(split.eval_batches(config.batch_size, config.tokens), 0, None, step)
    sample = [arrays(states, y)[0] for states, _, y in states_of(model, some, runtime)]

    index = faiss.index_factory(sample[0].shape[1], f"IVF{lists},SQfp16")
    index.cp.min_points_per_centroid = 1  # no warning of few points
    index.train(np.concatenate(sample))
    return index


def write_shards(faiss, empty, model, split, count, config, runtime, folder):
    """Write the keys of a split, SHARD at a time, in copies of the empty index. Returns (the number
    of these, arrays of the tokens)."""
    tokens = []
    shard = faiss.clone_index(empty)
    shards = 0
    at = 0
    batches = split.eval_batches(config.batch_size, config.tokens)
    with tqdm(total=count, desc="keys", unit_scale=True, disable=None) as bar:
        for states, _, y in states_of(model, batches, runtime):
            keys, targets = arrays(states, y)
            shard.add_with_ids(keys, np.arange(at, at + len(keys)))
            tokens.append(targets)
            at += len(keys)
            bar.update(len(keys))
            if shard.ntotal >= SHARD or at == count:
                faiss.write_index(shard, str(folder / f"{shards}.index"))
                shard = faiss.clone_index(empty)
                shards += 1
    return shards, tokens


def measure(name, config):
    """Choose weight and temperature on the first half of the validation text, print the loss on the
    second, and store the choice."""
    model, weights, data, runtime = open_both(name, config)
    store = datastore.Datastore(config.store, weights, model.config)
    split = open_split(data, "val", model.config.block_size)
    batches = list(split.eval_batches(config.batch_size, config.tokens))
    if len(batches) < 2:
        what = "the validation tokens fit in one batch, so they cannot be split in two"
        raise UserError(what, data, "choose a smaller --batch_size, or more --tokens")

    sums = torch.zeros(2, len(TEMPERATURES), len(WEIGHTS)).double()
    targets = [0, 0]
    scored = states_of(model, tqdm(batches, "scoring", disable=None), runtime)
    for number, (states, logits, y) in enumerate(scored):
        half = int(number >= len(batches) // 2)
        sums[half] += losses(store, states, logits, y).cpu()
        targets[half] += len(y)

    t, w = divmod(int(sums[0].argmin()), len(WEIGHTS))
    weight = round(WEIGHTS[w].item(), 2)
    temperature = float(TEMPERATURES[t])
    alone = sums[1, t, 0].item() / targets[1]
    mixed = sums[1, t, w].item() / targets[1]
    facts = store.facts | {"weight": weight, "temperature": temperature}
    files.write(Path(config.store) / "datastore.json", json.dumps(facts, indent=1))
    print(f"chosen on {targets[0]:,} tokens: weight {weight}, temperature {temperature:g}")
    print(f"on {targets[1]:,} others: loss {mixed:.4f}, the model alone {alone:.4f}")


def losses(store, states, logits, y):
    """(temperatures, weights) float64: the sum of the losses of targets y (n,) in nats."""
    distances, tokens = store.search(states)
    alone = logits.float().softmax(-1).gather(1, y[:, None])  # (n, 1)
    weights = WEIGHTS.to(y.device)
    sums = []
    for temperature in TEMPERATURES:
        near = torch.softmax(-distances / temperature, -1)
        p_knn = (near * (tokens == y[:, None])).sum(1, keepdim=True)  # (n, 1)
        p = weights * p_knn + (1 - weights) * alone  # (n, weights)
        sums.append(-p.cpu().double().log().sum(0))
    return torch.stack(sums)


def write(name, config, store):
    """Write texts as sample.py does, with the datastore in the folder `store`."""
    texts = read_prompts(config.start, config.prompts)
    runtime = set_up(config.device, "float32")
    model, tokenizer, _, state = checkpoint.open_run(name, config.checkpoint, runtime.device)
    note(f"step {state['step']} of {name}, in float32")
    prompts = fit_prompts(model, tokenizer, texts, config)
    weights = datastore.identity(checkpoint.find(name, state["step"]))
    memory = datastore.Datastore(store, weights, model.config)
    note(f"keys of {store} ({len(memory.tokens):,}), weight {memory.weight:g}")
    write_all(Opened(name, datastore.WithNeighbours(model, memory), tokenizer, prompts), config)


def read(argv):
    """(command, name of the run, its settings) of a command line."""
    command = next((word for word in argv if not word.startswith("--")), "")
    kinds = [WriteConfig, SampleConfig] if command == "write" else [KnnConfig]
    given = load(argv, kinds, __doc__)
    values = given.values
    words = given.words
    if len(words) != 2 or command not in ("write", "build", "score"):
        fix = "python -m extras.knn write RUN, or build RUN, or score RUN"
        raise UserError("give a command and a run", "command line", fix)
    if command != "write":
        return command, words[1], build(KnnConfig, values)
    refuse_idle(given.typed, [*NAMING, "compile"])
    config = build_config(values)
    if config.dtype not in ("auto", "float32"):
        what = f"neighbours are found in float32, not {config.dtype}"
        raise UserError(what, f"dtype={config.dtype}", "leave it out")
    return command, words[1], (config, build(WriteConfig, values).store)


def main(argv):
    command, name, settings = read(argv)
    if command == "build":
        make(name, settings)
    elif command == "score":
        measure(name, settings)
    else:
        write(name, *settings)


if __name__ == "__main__":
    run(main)
