"""A model's own special tokens, from its tokenizer into data, samples and exports: LLaMA 2 and
Mistral end a text with </s>, LLaMA 3 with one of several."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import sample
import train
from common.errors import UserError
from helpers.runs import arguments
from helpers.texts import message
from prepare import prepare
from tokens.data import open_split
from tokens.token_files import load_mask, load_meta, load_split, load_tokenizer
from tokens.tokenizer import GPT4, LETTERS, encode_batches
from training.terminal import closing_prompt
from weights import export, hf

TEXT = "the king of rome shall speak no more,\nand Zoë says <s> no </s> word  in 1999.\n"
ANSWERS = [(f"king {i}?\n", f" he is\nking {i}") for i in range(8)]
DOCUMENTS = [{"text": f"king {i} of rome"} for i in range(40)]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def byte_level(special, last=()):
    """A byte-level BPE with GPT-4's pattern, with special tokens first and last."""
    library = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(GPT4), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    library.decoder = decoders.ByteLevel()
    alphabet = [*LETTERS.values()]
    options = dict(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([TEXT] * 9, trainers.BpeTrainer(vocab_size=300, **options))
    library.add_special_tokens(list(last))
    return library


def sentencepiece():
    """As LLaMA 2 has it: characters, blanks as \u2581, bytes for what is unknown."""
    blanks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    seen = tokenizers.Tokenizer(models.BPE())
    seen.normalizer = normalizers.Sequence(blanks)
    seen.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    seen.train_from_iterator([TEXT.replace("\n", " ")] * 9, trainers.BpeTrainer(vocab_size=60))
    trained = json.loads(seen.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *trained["vocab"]]
    vocab, merges = {name: i for i, name in enumerate(names)}, map(tuple, trained["merges"])
    options = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    library = tokenizers.Tokenizer(models.BPE(vocab, [*merges], **options))
    library.normalizer = seen.normalizer
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def with_bos(library, bos):
    """The library's tokenizer with `bos` before each text."""
    ids = [(bos, library.token_to_id(bos))]
    library.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=ids)
    return library


def write(folder, library, **files):
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of Hugging Face's with the tokenizers of three models, and bos and stops of each."""
    root, expected = tmp_path_factory.mktemp("models"), {}
    about = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    write(root / "llama2", with_bos(sentencepiece(), "<s>"), tokenizer_config=about)
    expected["llama2"] = (1, [2])

    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    library = with_bos(byte_level([], names), names[0])
    first = library.token_to_id(names[0])
    about = {"bos_token": names[0], "eos_token": names[3]}
    stops = {"bos_token_id": first, "eos_token_id": [first + 1, first + 3]}
    write(root / "llama3", library, tokenizer_config=about, generation_config=stops)
    expected["llama3"] = (first, [first + 3, first + 1, first + 2])

    library = byte_level(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    config = {"bos_token_id": 1, "eos_token_id": 2}
    about = {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}}
    about["add_bos_token"] = True
    write(root / "mistral", library, tokenizer_config=about, config=config)
    expected["mistral"] = (1, [2])
    return root, expected


@pytest.fixture(params=["llama2", "llama3", "mistral"])
def model(request, folders):
    root, expected = folders
    return SimpleNamespace(folder=root / request.param, expected=expected[request.param])


def test_ids_are_those_of_the_library(model, monkeypatch):
    library = tokenizers.Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    ours, (bos, stops) = hf.load_tokenizer(str(model.folder)), model.expected
    assert ours.bos == ours.start == bos and [*ours.stops] == stops and ours.end == stops[0]
    assert ours.prompt("") == [bos]
    plain = TEXT.replace("<s>", "s").replace("</s>", "s")
    for text in (plain, "no\n more  5 你好 🙂", "\n"):
        assert ours.prompt(text) == [bos, *library.encode(text, add_special_tokens=False).ids]
    ids = ours.encode(TEXT)  # a text that spells a special token is ordinary text
    assert not {bos, *stops} & {*ids.tolist()} and ours.decode(ids).removeprefix(" ") == TEXT
    monkeypatch.setattr("tokens.tokenizer.PIECE", 50)  # a long text in pieces as in one
    parts = [ids for ids, _ in encode_batches(ours, iter([TEXT * 40]), False)]
    assert len(parts) > 20 and np.concatenate(parts).tolist() == ours.encode(TEXT * 40).tolist()


def test_documents_pairs_and_preferences_end_with_it(model, tmp_path):
    bos, (end, *_) = model.expected
    write_rows(tmp_path / "a.jsonl", DOCUMENTS)
    prepare("docs", str(tmp_path / "a.jsonl"), str(model.folder), str(tmp_path))
    tokenizer = load_tokenizer(tmp_path / "docs", load_meta(tmp_path / "docs"))
    ids = np.asarray(load_split(tmp_path / "docs", "train", 0))
    texts = np.split(ids, np.flatnonzero(ids == end) + 1)[:-1]
    assert len(texts) > 20 and sum(map(len, texts)) == len(ids)
    for text in texts:
        words = tokenizer.decode(text[1:-1]).strip()
        assert text[0] == bos and text[-1] == end and words.startswith("king ")

    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in [*ANSWERS, ("", "x")]]
    tastes = [{"prompt": p, "chosen": a, "rejected": a[::-1]} for p, a in ANSWERS]
    for name, lines in {"pairs": rows, "tastes": tastes}.items():
        path = write_rows(tmp_path / f"{name}.jsonl", lines)
        prepare(name, path, str(model.folder), str(tmp_path))
        ids, mask = load_split(tmp_path / name, "train", 0), load_mask(tmp_path / name, "train")
        starts = np.flatnonzero(np.diff(mask.astype(int), prepend=1) == -1)
        assert (ids[starts] == bos).all() and (ids[starts[1:] - 1] == end).all() and ids[-1] == end
        assert (ids == end).sum() == len(starts)
        first = [*tokenizer.prompt(ANSWERS[0][0]), *tokenizer.encode(ANSWERS[0][1]), end]
        assert ids[: len(first)].tolist() == first

    # The sample at the end of a run repeats no special token as text.
    prompt, stop = closing_prompt(open_split(tmp_path / "pairs", "train", 64), tokenizer)
    assert tokenizer.prompt(prompt) == tokenizer.prompt(ANSWERS[0][0]) and stop == ""
    assert closing_prompt(open_split(tmp_path / "docs", "train", 8), tokenizer) == ("", "")


def test_a_sample_begins_with_bos_and_ends_with_any_of_the_stops(model, monkeypatch):
    tokenizer, (bos, stops) = hf.load_tokenizer(str(model.folder)), model.expected
    for stop in stops:
        ids = [*tokenizer.encode(" rome"), stop, *tokenizer.encode(" never")]

        def steps(model, idx, *args, **settings):
            assert idx.tolist() == [[bos, *tokenizer.encode("the king")]]
            for token in ids:
                yield sample.Step(torch.tensor([[token]]), torch.zeros(1, tokenizer.vocab_size))

        monkeypatch.setattr(sample, "steps", steps)
        assert sample.write_text(torch.nn.Linear(1, 1), tokenizer, "the king") == " rome"


def test_trained_exported_and_read_again(model, tmp_path, capsys):
    """The sample at the end does not begin with the name of a token; an export has the same tokens
    with the same meaning, for transformers and for us."""
    bos, stops = model.expected
    write_rows(tmp_path / "a.jsonl", DOCUMENTS)
    prepare("docs", str(tmp_path / "a.jsonl"), str(model.folder), str(tmp_path))
    run = arguments(tmp_path, tmp_path / "run", "--dataset=docs", "--model=llama", "--max_iters=2")
    assert not train.main([*run, "--block_size=16"]).status
    tokenizer = hf.load_tokenizer(str(tmp_path / "run"))
    assert tokenizer.to_json() == hf.load_tokenizer(str(model.folder)).to_json()

    export.main([f"--out_dir={tmp_path / 'run'}", f"--dest={tmp_path / 'out'}"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["bos_token_id"] == bos
    assert config["eos_token_id"] == (stops if len(stops) > 1 else stops[0])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (bos, stops[0])
    assert theirs("no more 5").input_ids == tokenizer.prompt("no more 5")
    assert theirs.decode(stops, skip_special_tokens=True) == ""
    back = hf.load_tokenizer(str(tmp_path / "out"))
    assert (back.bos, back.stops) == (tokenizer.bos, tokenizer.stops)
    assert back.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


def test_what_a_config_of_another_vocabulary_says_does_not_count(folders, tmp_path):
    """Only special tokens end a text; where no file names one, the well-known names do."""
    shutil.copytree(folders[0] / "mistral", tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{"eos_token_id": 77}')
    (tmp_path / "m" / "tokenizer_config.json").unlink()
    tokenizer = hf.load_tokenizer(str(tmp_path / "m"))
    assert tokenizer.stops == (2,) and tokenizer.bos is None and tokenizer.start == 2
    (tmp_path / "m" / "tokenizer_config.json").write_text('{"eos_token": {"content": []}}')
    assert "special tokens" in message(hf.load_tokenizer, str(tmp_path / "m"))


def test_a_tokenizer_without_an_end_takes_no_pairs(tmp_path):
    write(tmp_path / "bare", byte_level([]))
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": p, "answer": a} for p, a in ANSWERS])
    with pytest.raises(UserError, match="no token of this tokenizer ends an answer"):
        prepare("pairs", path, str(tmp_path / "bare"), str(tmp_path))
