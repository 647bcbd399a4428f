"""A pretrained model's tokenizer is its tokenizer.json, read by the library: in data, pairs,
samples and exports. Its special tokens mean what the model's files tell."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import sample
import train
from common.errors import UserError
from helpers.bpe import bpe
from helpers.checkpoints import copy_run, edit_json, reseal
from helpers.pretrained import MAKERS, TEXT, random_texts, write_model
from helpers.runs import arguments
from helpers.tables import jsonl, write
from helpers.texts import message
from prepare import prepare
from tokens.data import open_split
from tokens.token_files import load_mask, load_meta, load_split, load_tokenizer
from tokens.tokenizer import END, encode_batches, tokenizer_from_json
from training.terminal import closing_prompt
from weights import export, hf

TEXTS = random_texts()
LONG = " ".join([*TEXTS[:30], TEXT.replace("</s>", "") * 25])
ANSWERS = [(f"king {i}?\n", f" he is\nking {i}") for i in range(8)]
DOCUMENTS = [{"text": f"king {i} of Rome"} for i in range(40)]
MARKS = {  # {kind: (bos, names of the stops)}
    "llama2": ("<s>", ["</s>"]),
    "llama3": ("<|begin_of_text|>", ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]),
    "mistral": ("<s>", ["</s>"]),
    "qwen": (None, ["<|im_end|>"]),
    "bloom": (None, ["</s>"]),
    "unigram": (None, ["</s>"]),
    "wordpiece": (None, ["[SEP]"]),
}
CHANGES = {  # {kind: what it does not give back}
    "mistral": {"blanks at the beginning"},
    "roberta": {"blanks at the beginning", "the beginning, by a blank"},
    "unigram": {"ligatures", "runs of blanks", "line ends", "capital letters"},
    "wordpiece": {"accents", "capital letters", "runs of blanks", "letters of other scripts"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{kind: its folder}, with stored truncation and padding, which must not count."""
    root = tmp_path_factory.mktemp("models")
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    return {kind: write_model(root / kind, kind, truncation=cut, padding=pad) for kind in MAKERS}


def opened(folder):
    """The library's tokenizer of a folder, and ours, with the ids of its bos and its stops."""
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    bos, stops = MARKS.get(folder.name, (None, [END]))
    stops = [library.token_to_id(name) for name in stops]
    bos = None if bos is None else library.token_to_id(bos)
    ours = hf.load_tokenizer(str(folder))
    return SimpleNamespace(folder=folder, library=library, ours=ours, bos=bos, stops=stops)


@pytest.fixture(params=MAKERS)
def each(request, made):
    return opened(made[request.param])


@pytest.fixture(params=["llama2", "llama3", "mistral", "codeparrot", "unigram"])
def model(request, made):
    return opened(made[request.param])


def streamed(tokenizer, ids, before=()):
    stream = tokenizer.stream(before)
    return "".join(stream.step(token) for token in ids) + stream.end()


def test_ids_and_texts_are_those_of_the_library(each, tmp_path, monkeypatch):
    """Whole, token by token, in pieces, stored, and exported; special tokens count in prompts."""
    library, ours = each.library, each.ours
    assert (ours.bos, [*ours.stops]) == (each.bos, each.stops)
    assert {*ours.changes()} >= CHANGES.get(each.folder.name, set())
    assert bool(ours.changes()) == (each.folder.name in CHANGES)
    first = [] if each.bos is None else [each.bos]
    for text in TEXTS[:99]:
        ids = library.encode(text, add_special_tokens=False).ids
        assert ours.prompt(text) == first + ids or not first + ids
    asked = library.encode(f"a{END}<|eot_id|>", add_special_tokens=False).ids
    assert ours.prompt(f"a{END}<|eot_id|>") == first + asked

    config = {"model_type": "llama", "max_position_embeddings": 8}
    export.write_folder(tmp_path / "out", config, {"x": torch.zeros(1)}, ours)
    exported = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    stored = tokenizer_from_json(json.loads(json.dumps(ours.to_json())))
    assert stored.to_json() == ours.to_json()
    library.encode_special_tokens = exported.encode_special_tokens = True
    for text in TEXTS:
        ids = library.encode(text, add_special_tokens=False).ids
        assert stored.encode(text).tolist() == ids
        assert exported.encode(text, add_special_tokens=False).ids == ids
        whole = library.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids) == streamed(ours, ids) == whole
        half = len(ids) // 2
        begun = ours.decode(ids[:half])  # which may end within a character
        assert begun[-1:] == "\ufffd" or begun + streamed(ours, ids[half:], ids[:half]) == whole
    monkeypatch.setattr("tokens.tokenizer.PIECE", 300)  # a long text in pieces as in one
    parts = [ids for ids, _ in encode_batches(ours, iter([LONG]), False)]
    whole = library.encode(LONG, add_special_tokens=False).ids
    assert len(parts) > 5 and np.concatenate(parts).tolist() == whole


def test_a_text_that_spells_a_special_token_is_text(each):
    """Also in the models that would take it for one."""
    ids = each.ours.encode(f"{TEXT} a</s>no {END} <|eot_id|> [SEP]<s>")
    assert not {each.bos, *each.stops} & {*ids.tolist()}
    if each.folder.name != "wordpiece":
        assert "</s>no" in each.ours.decode(ids).replace(" ", "")
    if each.folder.name == "qwen":
        assert each.library.token_to_id("<think>") in each.ours.encode("so <think>")


def test_tokens_that_are_no_character(made):
    """A model may write any ids. The library's stream cannot take back a character that it has
    shown."""
    ours = opened(made["llama2"]).ours
    names = ["<0xC3>", "<0xA9>", "<0xFF>", "\u2581", "k", "\u2581", "k"]
    ids = [ours.library.token_to_id(name) for name in names]
    assert streamed(ours, ids) == "é\ufffd k k"
    for ids in np.random.default_rng(0).integers(ours.vocab_size, size=(50, 40)).tolist():
        assert len(streamed(ours, ids)) > 9


def test_an_answer_may_begin_with_a_line_end(made):
    """Where two line ends are one token, and a text begins with a blank."""
    content = json.loads((made["mistral"] / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab |= {"\n": len(vocab), "\n\n": len(vocab) + 1}
    content["model"]["merges"].append(["\n", "\n"])
    ours = tokenizer_from_json({"kind": "model", "tokenizer": content})
    assert ours.decode([*ours.encode("king"), *ours.encode_rest("\nRome")]) == "king\nRome"


def test_a_test_split_without_tokens_is_left_out(made, tmp_path):
    path = write(tmp_path / "a.txt", "the king of Rome " * 50 + "\n" * 60)
    prepare("x", path, str(made["wordpiece"]), str(tmp_path))
    assert [*load_meta(tmp_path / "x")["splits"]] == ["train", "val"]
    assert not (tmp_path / "x" / "test.bin").exists()


def test_documents_pairs_and_preferences_end_with_it(model, tmp_path, capsys):
    bos = [] if model.bos is None else [model.bos]
    end = model.stops[0]
    write(tmp_path / "a.jsonl", jsonl(DOCUMENTS))
    prepare("docs", str(tmp_path / "a.jsonl"), str(model.folder), str(tmp_path))
    assert ("NOTE" in capsys.readouterr().out) == (model.folder.name in CHANGES)
    tokenizer = load_tokenizer(tmp_path / "docs", load_meta(tmp_path / "docs"))
    ids = np.asarray(load_split(tmp_path / "docs", "train", 0))
    texts = np.split(ids, np.flatnonzero(ids == end) + 1)[:-1]
    assert len(texts) > 20 and sum(map(len, texts)) == len(ids)
    for text in texts:
        words = tokenizer.decode(text[len(bos) : -1]).strip()
        assert text[: len(bos)].tolist() == bos and text[-1] == end and words.startswith("king ")

    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in [*ANSWERS, ("", "x")]]
    tastes = [{"prompt": p, "chosen": a, "rejected": a[::-1]} for p, a in ANSWERS]
    for name, lines in {"pairs": rows, "tastes": tastes}.items():
        path = write(tmp_path / f"{name}.jsonl", jsonl(lines))
        prepare(name, path, str(model.folder), str(tmp_path))
        ids, mask = load_split(tmp_path / name, "train", 0), load_mask(tmp_path / name, "train")
        starts = np.flatnonzero(np.diff(mask.astype(int), prepend=1) == -1)
        assert (ids[starts[1:] - 1] == end).all() and ids[-1] == end
        assert not bos or (ids[starts] == bos).all()
        assert (ids == end).sum() == len(starts)
        first = [*tokenizer.prompt(ANSWERS[0][0]), *tokenizer.encode_rest(ANSWERS[0][1]), end]
        assert ids[: len(first)].tolist() == first
        if model.folder.name != "unigram":  # it knows no digits
            assert tokenizer.decode(first[len(bos) : -1]) == "".join(ANSWERS[0])

    # The sample at the end of a run repeats no special token as text.
    prompt, stop = closing_prompt(open_split(tmp_path / "pairs", "train", 64), tokenizer)
    if model.folder.name != "unigram":
        assert tokenizer.prompt(prompt) == tokenizer.prompt(ANSWERS[0][0]) and stop == ""
    assert closing_prompt(open_split(tmp_path / "docs", "train", 8), tokenizer) == ("", "")


def test_a_sample_begins_with_bos_and_ends_with_any_of_the_stops(model, monkeypatch):
    tokenizer = model.ours
    for stop in model.stops:
        ids = [*tokenizer.encode_rest(" Rome"), stop, *tokenizer.encode_rest(" never")]

        def steps(model, idx, *args, **settings):
            assert idx.tolist() == [tokenizer.prompt("the king")]
            for token in ids:
                yield sample.Step(torch.tensor([[token]]), torch.zeros(1, tokenizer.vocab_size))

        monkeypatch.setattr(sample, "steps", steps)
        assert sample.write_text(torch.nn.Linear(1, 1), tokenizer, "the king") == " Rome"


@pytest.mark.parametrize("kind", ["mistral", "codeparrot", "llama3"])
def test_trained_exported_and_read_again(kind, made, tmp_path):
    """The sample at the end does not begin with the name of a token; an export has the same tokens
    with the same meaning, for transformers and for us."""
    transformers = pytest.importorskip("transformers")
    stored = opened(made[kind])
    ours, bos, stops = stored.ours, stored.bos, stored.stops
    write(tmp_path / "a.jsonl", jsonl(DOCUMENTS))
    prepare("docs", str(tmp_path / "a.jsonl"), str(made[kind]), str(tmp_path))
    run = arguments(tmp_path, tmp_path / "run", "--dataset=docs", "--model=llama", "--max_iters=2")
    assert not train.main([*run, "--block_size=16"]).status
    tokenizer = hf.load_tokenizer(str(tmp_path / "run"))
    assert tokenizer.to_json() == ours.to_json()

    export.main([f"--out_dir={tmp_path / 'run'}", f"--dest={tmp_path / 'out'}"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["bos_token_id"] == ours.start
    assert config["eos_token_id"] == (stops if len(stops) > 1 else stops[0])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.model_max_length == 16  # the run's block_size
    assert theirs.eos_token_id == stops[0] and (bos is None or theirs.bos_token_id == bos)
    assert theirs("no more 5").input_ids == tokenizer.prompt("no more 5")
    assert theirs.decode(stops, skip_special_tokens=True) == ""
    back = hf.load_tokenizer(str(tmp_path / "out"))
    assert (back.bos, back.stops, back.content) == (bos, tuple(stops), ours.content)


def test_what_a_config_of_another_vocabulary_says_does_not_count(made, tmp_path):
    """Only special tokens end a text; where no file names one, the well-known names do."""
    shutil.copytree(made["mistral"], tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{"eos_token_id": 77}')
    (tmp_path / "m" / "tokenizer_config.json").unlink()
    tokenizer = hf.load_tokenizer(str(tmp_path / "m"))
    assert (tokenizer.stops, tokenizer.bos) == ((2,), 1)
    (tmp_path / "m" / "tokenizer_config.json").write_text('{"eos_token": {"content": []}}')
    assert "special tokens" in message(hf.load_tokenizer, str(tmp_path / "m"))


def test_a_tokenizer_without_an_end_takes_no_pairs(made, tmp_path):
    shutil.copytree(made["codeparrot"], tmp_path / "bare")
    content = json.loads((tmp_path / "bare" / "tokenizer.json").read_text())
    (tmp_path / "bare" / "tokenizer.json").write_text(json.dumps(content | {"added_tokens": []}))
    path = write(tmp_path / "a.jsonl", jsonl([{"prompt": p, "answer": a} for p, a in ANSWERS]))
    with pytest.raises(UserError, match="no token of this tokenizer ends an answer"):
        prepare("pairs", path, str(tmp_path / "bare"), str(tmp_path))
    (tmp_path / "bare" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    assert hf.load_tokenizer(str(tmp_path / "bare")).stops == (0,)  # though it is not listed


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe"])
def test_what_was_stored_before(kind, made, tmp_path):
    """A run's tokenizer still reads and writes; data are to be prepared again."""
    content = json.loads((made["llama2"] / "tokenizer.json").read_text())
    stored = {"kind": "sentencepiece", "tokenizer": content, "bos": 1, "stops": [2]}
    if kind == "bpe":
        ranks = bpe(special={"<s>": 0, "</s>": 1}).to_json()
        special = ranks["special_tokens"]
        stored = ranks | {"name": "imported", "bos": special["<s>"], "stops": [special["</s>"]]}
    ours = tokenizer_from_json(stored)
    assert (ours.bos, ours.stops) == (stored["bos"], tuple(stored["stops"]))
    ids = ours.prompt("the king of Rome")
    assert ids[0] == ours.bos and ours.decode(ids[1:]) == "the king of Rome"
    assert streamed(ours, ids[3:], ids[:3]) and not {*ours.stops} & {*ours.encode(TEXT).tolist()}

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokenizer.json").write_text(json.dumps(stored))
    words = message(load_tokenizer, tmp_path / "data", {"vocab_size": ours.vocab_size})
    assert "prepare.py data" in words
    run = copy_run(tmp_path / "run")
    edit_json("tokenizer", lambda content: stored)(run / "ckpt" / "000020")
    reseal(run / "ckpt" / "000020")
    assert "the model's own folder" in message(hf.load_tokenizer, str(run))
