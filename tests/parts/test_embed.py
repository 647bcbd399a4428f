"""N-gram embeddings: the hash, what they are at first, dropout, and what trains the tables."""

import pytest
import torch

from common.runtime import Runtime
from helpers.variants import config, tokens
from parts.variant import Variant
from training.optim import make_optimizers
from training.settings import TrainConfig


def embedding(**keys):
    """The embedding of a model with n-grams, and the ids of the model's tokens."""
    torch.manual_seed(0)
    model = Variant(config("llama", dict(embed="ngram") | keys))
    return model.embed, tokens(model.config)


def test_the_hash_of_the_largest_ids_does_not_overflow():
    embed, _ = embedding()
    largest = 2**31 - 3
    places = embed.places(torch.full((1, 5), largest))
    assert places.dtype == torch.int64
    for n in (2, 3, 4):
        number = 0
        for _ in range(n):
            number = (number * 742938285 + largest + 1) % (2**31 - 1)
        assert places[0, 4, n - 2] == 8192 * (n - 2) + number % 8192


def test_each_token_of_an_ngram_counts():
    """Also where the vocabulary and the rows are powers of two, and for tokens that are near each
    other: the n-grams fill the rows like balls that are thrown at random."""
    embed, _ = embedding(vocab_size=256)
    idx = torch.randint(256, (1, 8192), generator=torch.Generator().manual_seed(1))
    for table, places in enumerate(embed.places(idx)[0].unbind(-1)):
        assert places.min() >= 8192 * table and places.max() < 8192 * (table + 1)
        assert len(places.unique()) == pytest.approx(8192 * (1 - 1 / 2.718), rel=0.03)
    for n in (2, 3, 4):
        changed = idx.clone()
        changed[0, 100 - n + 1] = (changed[0, 100 - n + 1] + 128) % 256
        differs = embed.places(changed)[0, 100] != embed.places(idx)[0, 100]
        assert differs.tolist() == [size >= n for size in (2, 3, 4)]


@torch.no_grad()
@pytest.mark.parametrize("width", [None, 5])
def test_at_first_it_is_token_to_the_last_bit(width):
    plain = Variant(config("gpt2"))
    model = Variant(config("gpt2", dict(embed="ngram", ngram_width=width)))
    model.load_state_dict(plain.state_dict(), strict=False)
    x = tokens(plain.config)
    assert torch.equal(model(x)[0], plain(x)[0])


@torch.no_grad()
def test_dropout_drops_whole_rows():
    embed, idx = embedding(dropout=0.5)
    torch.nn.init.ones_(embed.tables)
    found = embed.train()(torch.zeros(*idx.shape, 16), idx)  # each row kept counts 2
    assert torch.equal(found, found[..., :1].expand_as(found))
    assert found.unique().tolist() == [0, 2, 4, 6]
    assert torch.equal(embed.eval()(torch.zeros(*idx.shape, 16), idx), torch.full_like(found, 3))
    assert embedding(dropout=0.5, ngram_dropout=0.0)[0].dropout.p == 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_tables_are_adamws_and_do_not_decay(optimizer):
    model = Variant(config("llama", dict(embed="ngram", ngram_width=5)))
    settings = TrainConfig(optimizer=optimizer, weight_decay=0.1)
    made = make_optimizers(model, settings, Runtime("cpu", "float32", 0, 1))
    groups = {
        name: (type(each).__name__, group["weight_decay"])
        for each in made
        for group in each.param_groups
        for name in group["param_names"]
    }
    assert groups["embed.tables"] == ("AdamW", 0.0)
    assert groups["embed.up.weight"] == groups["wte.weight"] == ("AdamW", 0.1)
