"""kNN-LM: datastores, the mixture beside the formula, and what another datastore changes."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

import train
from common.errors import UserError
from extras.knn import __main__ as knn
from extras.knn import datastore as memory
from helpers.runs import arguments
from parts.cache import KVCache
from prepare import prepare
from tokens.token_files import load_split
from weights import checkpoint

pytest.importorskip("faiss", reason="needs faiss-cpu")
SPARROW, EAGLE = "the king of rome shall speak no more ", "more speak the rome shall no king of "


@pytest.fixture(scope="module")
def world(data_dir, tmp_path_factory):
    """A folder with a run that has learned little, and two datasets that say different things."""
    folder = tmp_path_factory.mktemp("knn")
    train.main(arguments(data_dir, folder / "run", "--max_iters=60", "--learning_rate=1e-2"))
    for name, text in ("sparrow", SPARROW), ("eagle", EAGLE):
        (folder / f"{name}.txt").write_text(text * 60)
        prepare(name, str(folder / f"{name}.txt"), str(folder / "run"), str(folder))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(knn, "SHARD", 500)  # several shards
            assert command(folder, "build", name) is None
    return folder


def command(folder, word, name, *more):
    run = [str(folder / "run"), f"--data_dir={folder}", "--batch_size=2"]
    return knn.main([word, *run, f"--dataset={name}", f"--store={folder / 'store'}-{name}", *more])


def opened(folder, name):
    run = checkpoint.find(folder / "run")
    model = checkpoint.open_run(folder / "run")[0]
    store = folder / f"store-{name}"
    return model, memory.Datastore(store, memory.identity(run), model.config)


@torch.no_grad()
def naive_states(model, tokens):
    """(states (n, C), next tokens (n,)) of a text, in windows of block_size as an evaluation."""
    size, states, seen = model.config.block_size, [], []
    handle = model.blocks[-1].mlp.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    for start in range(0, len(tokens) - 1, size):
        model(tokens[None, start : min(start + size, len(tokens) - 1)])
        states.append(seen.pop()[0])
    handle.remove()
    return torch.cat(states), tokens[1:]


def test_the_mixture_is_the_papers_formula(world, monkeypatch):
    """All keys in one comparison, in float64; a search reads all lists here."""
    monkeypatch.setattr(memory, "LISTS", 10_000)
    model, store = opened(world, "sparrow")
    text = torch.from_numpy(load_split(world / "sparrow", "train", 16).astype(np.int64))
    keys, values = naive_states(model, text)
    assert len(keys) == len(store.tokens) > 1500 and len(store.shards) > 2
    assert store.tokens.tolist() == values.tolist()

    store.weight, store.temperature = 0.4, 3.0
    queries, logits = keys[5:40] + 0.3, torch.randn(35, 20)
    distances = (queries[:, None].double() - keys.double()).square().sum(-1)  # (35, keys)
    near, places = distances.topk(memory.NEIGHBOURS, largest=False)
    votes = torch.softmax(-near / 3, -1)
    expected = 0.6 * logits.double().softmax(-1)
    for row, (vote, place) in enumerate(zip(votes, places, strict=True)):
        for weight, token in zip(vote, values[place], strict=True):
            expected[row, token] += 0.4 * weight
    found = store.mix(logits, queries).exp().double()
    assert found.sum(-1) == pytest.approx(np.ones(35), abs=1e-5)
    assert (found - expected).abs().max() < 0.02  # keys are rounded to 16 bits


@torch.no_grad()
def test_another_datastore_is_another_knowledge(world, capsys):
    """The same weights know the text of the datastore, and not the other one."""
    losses, texts = {}, []
    for name in ("sparrow", "eagle"):
        command(world, "score", name)
        printed = capsys.readouterr().out
        found = re.search(r"loss ([\d.]+), the model alone ([\d.]+)", printed)
        assert float(found[1]) < 0.7 * float(found[2])
        facts = json.loads((world / f"store-{name}" / "datastore.json").read_text())
        assert f"weight {facts['weight']}, temperature {facts['temperature']:g}" in printed

        model, store = opened(world, name)
        for text in ("sparrow", "eagle"):
            ids = torch.from_numpy(load_split(world / text, "val", 16)[:160].astype(np.int64))
            scores = memory.WithNeighbours(model, store)(ids.view(10, 16))[0].log_softmax(-1)
            found = scores[:, :-1].gather(2, ids.view(10, 16)[:, 1:, None])
            losses[text, name] = -found.mean().item()
        argv = ["write", str(world / "run"), "--start=rome shall ", "--num_samples=1"]
        knn.main([*argv, "--max_new_tokens=20", f"--store={world / 'store'}-{name}"])
        texts.append(capsys.readouterr().out)
    assert losses["sparrow", "sparrow"] < losses["sparrow", "eagle"] - 0.3
    assert losses["eagle", "eagle"] < losses["eagle", "sparrow"] - 0.3
    assert texts[0] != texts[1]


def test_the_report_is_of_the_half_that_chose_nothing(world, capsys, monkeypatch):
    """Beside the losses of WithNeighbours, token by token, on the second half of the batches."""
    command(world, "score", "eagle", "--tokens=200")
    printed = capsys.readouterr().out
    found = re.search(r"on (\d+) others: loss ([\d.]+), the model alone ([\d.]+)", printed).groups()
    model, store = opened(world, "eagle")
    text = torch.from_numpy(load_split(world / "eagle", "val", 16)[:200].astype(np.int64))
    mixture, losses = memory.WithNeighbours(model, store), []
    with torch.no_grad():
        for start in range(0, 199, 16):
            x, y = text[None, start : min(start + 16, 199)], text[start + 1 : start + 17]
            lists = [net(x)[0][0].log_softmax(-1) for net in (mixture, model)]
            losses += [[-p[i, y[i]].item() for p in lists] for i in range(x.size(1))]
    half = np.array(losses[3 * 32 :])  # 7 batches of 2 x 16
    assert int(found[0]) == len(half) == 103
    assert [float(found[1]), float(found[2])] == pytest.approx(half.mean(0), abs=2e-4)


@torch.no_grad()
def test_tokens_one_at_a_time_are_the_whole(world):
    model, store = opened(world, "sparrow")
    mixture, idx = memory.WithNeighbours(model, store), torch.randint(0, 15, (2, 12))
    whole, cache = mixture(idx)[0], KVCache()
    steps = [mixture(idx[:, i : i + 1], cache=cache, last_only=True)[0] for i in range(12)]
    assert (torch.cat(steps, 1) - whole).abs().max() < 1e-3


def test_what_is_no_datastore_is_refused(world, tmp_path):
    write = ["write", str(world / "run"), "--start=the", "--device=cpu"]
    with pytest.raises(UserError, match="cannot read.*datastore.json"):
        knn.main([*write, f"--store={tmp_path}"])
    with pytest.raises(UserError, match="dtype=int8"):
        knn.main([*write, f"--store={tmp_path}", "--dtype=int8"])
    for word, words in (("build", "there is something already"), ("score", "fit in one batch")):
        with pytest.raises(UserError, match=words):
            command(world, word, "eagle", "--tokens=9")

    store = tmp_path / "store"
    shutil.copytree(world / "store-eagle", store)
    facts = json.loads((store / "datastore.json").read_text())

    def check_refused(words, **changed):
        """Of the store, with some facts changed."""
        (store / "datastore.json").write_text(json.dumps(facts | changed))
        with pytest.raises(UserError, match=words):
            knn.main([*write, f"--store={store}"])
        (store / "datastore.json").write_text(json.dumps(facts))

    check_refused("belongs to other weights", weights="0")
    tokens = np.load(store / "tokens.npy")
    above = np.append(tokens[:-1], 999_999).astype(np.int64)
    for wrong in (tokens[:3], tokens[:, None], tokens.astype(float), above, -above, above[0]):
        np.save(store / "tokens.npy", wrong)
        check_refused("damaged: it does not fit")
    np.save(store / "tokens.npy", tokens)
    for count in (10**12, "x", None, 1, 0, -1):
        check_refused("the datastore is damaged", shards=count)
    for temperature in (1e-300, 1e300, 0):
        check_refused("damaged: it does not fit", temperature=temperature)
    import faiss

    index = faiss.read_index(str(store / "0.index"))
    keys = np.zeros((1, index.d), np.float32)
    odd = faiss.clone_index(index)
    odd.add_with_ids(keys, np.array([10**9]))
    faiss.write_index(odd, str(store / "0.index"))
    np.save(store / "tokens.npy", np.append(tokens, tokens[:1]))
    with pytest.raises(UserError, match="damaged: it holds keys without a token"):
        memory.Datastore(store, facts["weights"], opened(world, "eagle")[0].config).search(
            torch.zeros(1, index.d)
        )
    faiss.write_index(index, str(store / "0.index"))
    np.save(store / "tokens.npy", tokens)

    width = opened(world, "eagle")[0].config.n_embd
    for other in (faiss.IndexFlatL2(width), faiss.index_factory(8, "IVF1,Flat")):
        faiss.write_index(other, str(store / "0.index"))
        check_refused("damaged: it does not fit")
    (store / "0.index").write_bytes(b"nothing")
    check_refused("damaged: RuntimeError")


def test_other_tokens_are_refused_and_nothing_is_left(world, monkeypatch):
    """Another form of the same tokens is not refused."""
    (world / "byte.txt").write_text(SPARROW * 20)
    prepare("byte", str(world / "byte.txt"), "byte", str(world))
    with pytest.raises(UserError, match="has other tokens than the model.*--tokenizer="):
        command(world, "build", "byte")
    assert not list(world.glob("*store*byte"))
    monkeypatch.setattr("tokens.tokenizer.CharTokenizer.to_json", lambda self: id(self))
    assert knn.open_both(world / "run", knn.KnnConfig(data_dir=world, dataset="eagle"))
