"""Runs written for Hugging Face: folders that transformers opens."""

import random
import re
from unittest.mock import Mock

import pytest
import torch

import train
from common.errors import Failure, UserError
from common.files import UMASK, partial
from helpers.bpe import WORDS
from helpers.families import ours
from prepare import prepare
from sample import generate
from weights import export
from weights.card import model_card
from weights.checkpoint import open_run
from weights.export import main
from weights.hf import load_pretrained

transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")

RUNS = {
    "gpt2": ["--model=gpt2", "--dataset=chars"],
    "llama": ["--model=llama", "--n_kv_head=1", "--dataset=bytes"],
    "mistral": ["--arch=mistral", "--dataset=chars", "--window=5"],
}
SIZE = ["--n_layer=2", "--n_head=4", "--n_embd=32", "--block_size=64", "--batch_size=4"]
CPU = ["--device=cpu", "--compile=False", "--warmup_iters=0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs of two large steps, so that the greedy text is no single token."""
    root = tmp_path_factory.mktemp("runs")
    rng = random.Random(0)
    text = "".join(rng.choice(WORDS) + rng.choice("    \n") for _ in range(800))
    (root / "words.txt").write_text(text, encoding="utf-8")
    prepare("chars", input=str(root / "words.txt"), tokenizer="char", data_dir=str(root))
    prepare("bytes", input=str(root / "words.txt"), tokenizer="byte", data_dir=str(root))
    for name, more in RUNS.items():
        where = [f"--data_dir={root}", f"--out_dir={root / name}"]
        train.main([*SIZE, *CPU, *where, "--max_iters=2", "--learning_rate=0.05", *more])
    return root


@pytest.mark.parametrize("name", RUNS)
def test_hugging_face_writes_the_same_text(runs, name, tmp_path, capsys):
    dest = tmp_path / "hf"
    assert main([f"--out_dir={runs / name}", f"--dest={dest}"]) is None
    said = capsys.readouterr().out
    assert "after 2 steps" in said and f"--init_from={dest}\n" in said  # to write with it
    model, tokenizer, _, _ = open_run(runs / name)
    reference, info = transformers.AutoModelForCausalLM.from_pretrained(
        dest, output_loading_info=True
    )
    assert reference.config.model_type == name and not any(info.values())
    assert reference.generation_config.eos_token_id is None, "or it would stop at a character"
    theirs = transformers.AutoTokenizer.from_pretrained(dest)
    prompt = "the king of rome "
    ids = torch.tensor(tokenizer.encode(prompt))[None]
    assert theirs(prompt)["input_ids"] == ids[0].tolist()
    text = reference.generate(ids, max_new_tokens=30, do_sample=False)[0]
    own = torch.cat([ids, *generate(model, ids, 30, temperature=0)], dim=1)[0]
    assert text.tolist() == own.tolist() and len(set(own.tolist())) > 5
    assert theirs.decode(text) == tokenizer.decode(own.numpy())
    if name != "llama":  # characters: one that is not there is left out, as with --skip_unknown
        assert theirs("the€ k")["input_ids"] == tokenizer.encode("the k").tolist()
    back = ours(*load_pretrained(str(dest)), dtype=torch.float32)
    assert (back(own[None])[0] - model(own[None])[0]).abs().max() < 1e-5


def test_what_the_command_refuses(runs, tmp_path):
    (tmp_path / "there").mkdir()
    for words, argv in {
        "dest is missing": [],
        "it exists already": [f"--dest={tmp_path / 'there'}"],
        "its parent folder does not exist": [f"--dest={tmp_path}/no/hf"],
    }.items():
        with pytest.raises(UserError, match=words):
            main(argv)
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "nothing is left behind"


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_unfinished_stays(runs, fails, tmp_path, monkeypatch):
    """What a killed or failed export left is removed; colleagues may read what is written."""
    dest = tmp_path / "model"
    (tmp_path / "model.partial").write_text("not ours")
    partial(dest).mkdir()
    argv = [f"--out_dir={runs / 'llama'}", f"--dest={dest}"]
    if fails:
        full = OSError(28, "No space left on device")
        monkeypatch.setattr(export, "save_file", Mock(side_effect=full))
        with pytest.raises(Failure, match="No space left on device .*model.*free the disk"):
            main(argv)
    else:
        main(argv)
        for path in dest.glob("*"):
            assert path.stat().st_mode & 0o777 == 0o666 & ~UMASK
    expected = ["model.partial"] if fails else ["model", "model.partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected


def test_a_dest_that_appears_meanwhile_stays(tmp_path):
    def write(path):
        path.write_text("ours")
        (tmp_path / "model").write_text("not ours")

    with pytest.raises(Failure, match="it exists already"):
        export.write_atomically(tmp_path / "model", write)
    assert (tmp_path / "model").read_text() == "not ours" and len([*tmp_path.iterdir()]) == 1


def test_the_card_says_what_the_checkpoint_knows(runs, tmp_path, monkeypatch):
    """It is read by Hugging Face's own library, which refuses a card without its first block."""
    model, tokenizer, trained, state = open_run(runs / "gpt2")
    padded = trained | {"vocab_size": 999}  # the model's, which may have no token for some ids
    monkeypatch.setattr(export, "open_run", lambda *_: (model, tokenizer, padded, state))
    main([f"--out_dir={runs / 'gpt2'}", f"--dest={tmp_path / 'hf'}"])
    card = huggingface_hub.ModelCard.load(tmp_path / "hf/README.md")
    assert f"chars, in a vocabulary of {tokenizer.vocab_size} tokens" in card.text
    assert card.data.license == "unknown" and card.data.base_model is None
    for words in ("GPT2LMHeadModel", "chars", "scratch", f"{state['best_val_loss']:.4f}", "icence"):
        assert words in card.text, words
    assert "| 64 tokens |" in card.text and "sample.py --init_from=hf`" in card.text
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1], {})
    trained_on = state | {"step": state["step"] + 1}
    later = model_card("x", "GPT2LMHeadModel", 1, 9, trained, trained_on)
    assert "not known at this step" in later and "--checkpoint=best" in later

    for start, base in {
        "gpt2": "openai-community/gpt2",
        "owner/name": "owner/name",
        str(tmp_path): None,
        "resume": None,
    }.items():
        state["best_val_loss"] = None
        text = model_card("x", "GPT2LMHeadModel", 1, 9, trained | {"init_from": start}, state)
        assert huggingface_hub.ModelCard(text).data.base_model == base
        assert "scratch" not in text and str(tmp_path.parent) not in text
