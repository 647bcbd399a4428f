"""Text in, token files out; --list."""

import hashlib
import json
import os
import signal
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

import prepare
import train
from common import files
from common.commands import ROOT
from common.configurator import build
from common.errors import Failure
from helpers.texts import decoded, message
from tokens import documents, token_files
from tokens.token_files import load_meta, load_split, load_tokenizer

pytestmark = pytest.mark.usefixtures("elsewhere")
TEXT = "First Citizen:\nBefore we proceed  any further,\n\n\n hear me speak.\n\t\nZwölf, 你好 🙂!\n"
TEXT *= 30


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    return "book.txt"


def thirds(text):
    """{split: text} of a short text: the last 5 % for the test, 90 % of the rest for training."""
    test = len(text) - int(0.05 * len(text))
    train = int(0.9 * test)
    return {"train": text[:train], "val": text[train:test], "test": text[test:]}


# ---------------------------------------------------------------- a text of one's own


@pytest.mark.parametrize("kind", ["auto", "char", "byte", "gpt2"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_whole_set(book, kind, chunk, monkeypatch, capsys):
    monkeypatch.setattr(documents, "CHUNK", chunk)  # bytes: characters are torn apart too
    meta = prepare.prepare("mybook", book, kind)
    assert decoded("mybook") == [*thirds(TEXT).values()]
    tokenizer = load_tokenizer("data/mybook", meta)
    assert meta == load_meta("data/mybook")
    assert meta["tokenizer"] == ("char" if kind == "auto" else kind)
    size = {"byte": 256, "gpt2": 261}.get(kind, len(set(TEXT)))
    assert meta["vocab_size"] == tokenizer.vocab_size == size
    for split, text in thirds(TEXT).items():
        ids = load_split("data/mybook", split, 8)
        assert ids.tolist() == tokenizer.encode(text).tolist()  # in pieces as in one
        data = Path(f"data/mybook/{split}.bin").read_bytes()
        assert meta["splits"][split] == {
            "tokens": len(ids),
            "bytes": len(text.encode()),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    assert meta["source"] == book and "canonical" not in meta
    assert meta["source_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert sorted(os.listdir("data/mybook")) == sorted([*token_files.FILES[:4], "test.bin"])
    assert os.listdir("data") == ["mybook"]
    assert ("prepared in characters" in capsys.readouterr().out) == (kind == "auto")


def test_large_vocabulary_takes_uint32(tmp_path):
    chars = (chr(c) for c in range(0x20, 0x10FF0) if not 0xD800 <= c < 0xE000)
    text = "".join(char for char in chars if not char.isspace())
    Path("book.txt").write_text(text, encoding="utf-8")
    meta = prepare.prepare("mybook", "book.txt", "char")
    assert meta["vocab_size"] == len(text) > 65536 and meta["dtype"] == "uint32"
    assert "".join(decoded("mybook")) == text


LONG = "x" * 300


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("mybook", {}, ["not a known dataset", "--input=TEXTFILE", "shakespeare_char"]),
        ("shakespear_char", {}, ["did you mean shakespeare_char"]),
        ("mybook", {"input": "none.txt"}, ["no such file", "--input=none.txt"]),
        ("../x", {"input": "book.txt"}, ["not a valid dataset name"]),
        ("book.txt", {}, ["not a valid dataset name", "--input=FILE"]),
        (LONG, {"input": "book.txt"}, ["not a valid dataset name", "200 bytes"]),
        ("mybook", {"input": "book.txt", "vocab_size": 300}, ["add --tokenizer=bpe"]),
        ("mybook", {"field": "body"}, ["--field", "--input="]),
        ("task:copy", {}, ["python -m extras.tasks copy"]),
        ("wikitext-103", {}, ["--input=hf:OWNER/NAME"]),
        ("mybook", {"input": "book.txt", "data_dir": LONG}, ["be written", "--data_dir"]),
    ],
)
def test_bad_request(book, name, options, words):
    text = message(lambda: prepare.prepare(name, **options))
    assert all(word in text for word in words)
    assert not Path("data").exists()


@pytest.mark.parametrize("name", ["mybook", ".mybook.lock"])
def test_something_else_has_the_name(book, name):
    Path("data").mkdir()
    Path("data/mybook").write_text("mine") if name == "mybook" else Path("data", name).mkdir()
    text = message(prepare.prepare, "mybook", book)
    assert f"data/{name})" in text and ("folder" in text or "directory" in text)
    assert os.listdir("data") == [name] and (name != "mybook" or Path("data/mybook").is_file())


# ---------------------------------------------------------------- replaced as a whole


def test_a_dataset_is_replaced_as_a_whole_and_what_is_the_users_stays(book, capsys):
    for _ in range(2):
        prepare.prepare("mybook", book, "char")
    assert "had other tokens" not in capsys.readouterr().out
    Path("data/mybook/input.txt").write_text("mine, and short")
    Path("data/mybook/notes").mkdir()
    own = ["mybook.old", "mybook.new", "mybook.tmp", ".mybook.partial-1", ".mybook.lock.old"]
    for name in own:  # as a program might call its temporary files
        Path("data", name).mkdir()
        Path("data", name, "train.bin").write_text("mine")
    before = contents_of_set()
    prepare.prepare("mybook", book, "byte")
    assert load_meta("data/mybook")["tokenizer"] == "byte" and contents_of_set() != before
    assert "replaced the dataset made from book.txt, which had other" in capsys.readouterr().out
    old = load_meta("data/mybook")
    splits = {name: old["splits"][name] for name in ("train", "val")}  # as before there were tests
    Path("data/mybook/meta.json").write_text(json.dumps(old | {"splits": splits}))
    prepare.prepare("mybook", book, "byte")
    assert load_meta("data/mybook") == old and "had other" not in capsys.readouterr().out
    assert Path("data/mybook/notes").is_dir()
    assert Path("data/mybook/input.txt").read_text() == "mine, and short"
    prepare.prepare("mybook")  # no --input: input.txt
    assert "".join(decoded("mybook")) == "mine, and short"
    assert sorted(os.listdir("data")) == sorted([*own, "mybook"])
    assert all(Path("data", name, "train.bin").read_text() == "mine" for name in own)


def test_files_of_the_users_are_kept_when_two_have_one_name(book):
    """The user wrote notes into the new dataset before those of the old one were moved there."""
    prepare.prepare("mybook", book)
    Path("data/mybook/notes.txt").write_text("old")
    Path("data/mybook/train.mask.bin").mkdir()
    Path("data/mybook").rename(files.partial("data/mybook.old"))  # as a killed call leaves it
    Path("data/mybook").mkdir()
    Path("data/mybook/notes.txt").write_text("new")
    prepare.prepare("mybook", book, "byte")
    assert Path("data/mybook/notes.txt").read_text() == "new"
    assert Path("data/mybook/notes.txt.old").read_text() == "old"
    assert Path("data/mybook/train.mask.bin").is_dir() and os.listdir("data") == ["mybook"]


def test_a_dataset_behind_a_link_stays_there(book, tmp_path):
    (tmp_path / "disk" / "mybook").mkdir(parents=True)
    (tmp_path / "disk" / "mybook" / "notes.txt").write_text("mine")
    Path("data").mkdir()
    Path("data/mybook").symlink_to(tmp_path / "disk" / "mybook")
    prepare.prepare("mybook", book)
    assert Path("data/mybook").is_symlink() and os.listdir("disk") == os.listdir("data")
    assert load_meta("data/mybook") and Path("data/mybook/notes.txt").read_text() == "mine"


def test_two_at_once_wait_for_each_other(book, capsys):
    prepare.prepare("mybook", book)
    started = threading.Thread(target=prepare.prepare, args=("mybook", book, "byte"))
    with token_files.only_process(Path("data/mybook")):
        started.start()
        started.join(timeout=0.5)
        assert started.is_alive() and load_meta("data/mybook")["tokenizer"] == "char"
    started.join(timeout=60)
    assert load_meta("data/mybook")["tokenizer"] == "byte" and os.listdir("data") == ["mybook"]
    assert capsys.readouterr().err.count("waiting") == 1


def contents_of_set():
    return {name: Path("data/mybook", name).read_bytes() for name in token_files.FILES[:4]}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_killed_at_any_moment(book, monkeypatch):
    """Before each step of writing: at the next call the old or the new dataset is there, whole."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # which is slow
    done, seen = False, set()
    for after in range(100):
        prepare.prepare("mybook", book, "char")
        old = contents_of_set()
        Path("data/mybook/notes.txt").write_text("mine")
        done = kill_child(after) == 0
        with token_files.only_process(Path("data/mybook")):  # what the next call begins with
            token_files.recover(Path("data/mybook"))
        now, kind = contents_of_set(), load_meta("data/mybook")["tokenizer"]
        assert now == old if kind == "char" else "".join(decoded("mybook")) == TEXT
        assert Path("data/mybook/notes.txt").read_text() == "mine"
        assert os.listdir("data") == ["mybook"]
        seen.add(kind)
        if done:
            break
    assert done and after > 15 and seen == {"char", "byte"}


def test_stopped_at_any_moment(book, monkeypatch):
    """Nothing unfinished is left, whether the old or the new dataset is there, and it is said."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    monkeypatch.setattr(os, "fsync", lambda file: None)  # which is slow
    left = [10**9]  # steps until a signal comes
    number = signal.SIGINT
    interrupt_steps(left, lambda: os.kill(os.getpid(), number), monkeypatch)
    prepare.prepare("mybook", book, "char")
    kinds = []
    for after in range(100):
        left[0] = after
        number = SIGNALS[after % 3]
        try:
            prepare.prepare("mybook", book, "byte")
            break
        except Failure as error:
            assert error.status == 128 + number and "mybook" in str(error)
            kinds.append(load_meta("data/mybook")["tokenizer"])
            assert ("complete" in str(error)) == (kinds[-1] == "byte")
            assert "".join(decoded("mybook")) == TEXT and os.listdir("data") == ["mybook"]
    assert after > 15 and kinds[0] == "char" and kinds[-1] == "byte"
    assert handlers == [signal.getsignal(number) for number in SIGNALS]


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_steps(left, action, monkeypatch):
    """Do something before the step of writing at which the number left[0], counting down, is 0."""

    def interrupted(function):
        def wrapped(*args, **options):
            left[0] -= 1
            if left[0] == -1:
                action()
            return function(*args, **options)

        return wrapped

    steps = [(os, name) for name in ("mkdir", "rename", "unlink", "rmdir", "fsync")]
    for owner, name in [*steps, (token_files.TokenFile, "add"), (Path, "write_text")]:
        monkeypatch.setattr(owner, name, interrupted(getattr(owner, name)))


def kill_child(after):
    """The exit status of a forked child that prepares and dies at its step number `after`."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            interrupt_steps([after], lambda: os._exit(9), pytest.MonkeyPatch())
            prepare.prepare("mybook", "book.txt", "byte")
            os._exit(0)
        finally:
            os._exit(1)  # whatever fails must not go on as a second pytest
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---------------------------------------------------------------- the command line


def test_command_line(book, capsys):
    prepare.main(["mybook", f"--input={book}", "--tokenizer=byte", "--data_dir=sets"])
    out, err = capsys.readouterr()
    assert err == ""  # no progress bar where nobody looks
    assert f"preparing {Path('sets/mybook').absolute()}\n" in out and "sha256" in out
    assert "  vocabulary: 256 bytes\n  train.bin  " in out
    assert load_meta("sets/mybook")["vocab_size"] == 256
    said = message(prepare.main, ["mybook", "other.txt"])
    assert "takes the name of one dataset" in said and "--input=FILE for your own text" in said
    assert "extras.tasks NAME --seed" in message(prepare.main, ["task:copy", "--seed=3"])


def printed_command(out):
    """The words of the command that prepare.py ends with."""
    return out.split("train on it:\n")[1].replace("\\\n", " ").split()


def run_command(out):
    """Run the command that prepare.py ends with, for two steps of a small model."""
    command = printed_command(out)
    sizes = ["--max_iters=2", "--n_layer=1", "--n_embd=32", "--device=cpu", "--eval_interval=2"]
    return train.main([*command[2:], *sizes, "--eval_tokens=500"]).status


@pytest.mark.parametrize("kind", ["text", "documents", "pairs"])
def test_own_text_has_few_tokens_and_ends_with_a_command_that_works(kind, capsys):
    """GPT-2's 50,257 would be most of a small model; from a megabyte on they are taken."""
    name, line = {
        "text": ("mine.txt", "{i} speaks of the king"),
        "documents": ("mine.jsonl", '{{"text": "{i} speaks of the king"}}'),
        "pairs": ("mine.jsonl", '{{"prompt": "{i}?", "answer": "no,\\n{i}"}}'),
    }[kind]
    Path(name).write_text("".join(line.format(i=i) + "\n" for i in range(60)))
    prepare.main(["mine", f"--input={name}"])
    out = capsys.readouterr().out
    meta = load_meta("data/mine")
    assert meta["tokenizer"] == ("char" if kind == "text" else "bpe") and meta["vocab_size"] < 400
    assert ("ngrams" in meta) == (kind != "pairs")
    assert "gpt2" in out and not run_command(out)
    if kind != "text":
        assert prepare.chosen_tokenizer("mine", "auto", Mock(size=999_999)) == prepare.SMALL_BPE
        assert prepare.chosen_tokenizer("mine", "auto", Mock(size=1_000_000)) == "gpt2"
        assert prepare.chosen_tokenizer("mine", "gpt2", Mock(size=1)) == "gpt2"
        assert prepare.chosen_tokenizer("mine", "auto", {"train": None}) == "gpt2"


@pytest.mark.parametrize(
    "recipe", [prepare.SCRATCH, prepare.FINETUNING, prepare.PREFERENCES], ids=lambda r: r.config
)
def test_recipes_are_those_of_their_configs(recipe):
    code = (ROOT / f"config/{recipe.config}.py").read_text(encoding="utf-8")
    cpu = {"device": "cpu"}
    gpu = {"device": "cuda"}
    exec(code, cpu)
    exec(code, gpu)
    assert cpu["max_iters"] == recipe.steps
    rows = cpu["batch_size"] * cpu.get("gradient_accumulation_steps", 1)
    assert rows == recipe.rows * (2 if recipe is prepare.PREFERENCES else 1)
    key, _, value = recipe.size.removeprefix("--").partition("=")
    assert cpu[key] == int(value)
    if "block_size" in cpu:
        assert cpu["block_size"] == recipe.block_size
        assert gpu["block_size"] <= prepare.LARGEST_BLOCK
    if not gpu.get("dropout"):
        rows = gpu["batch_size"] * gpu.get("gradient_accumulation_steps", 1) * gpu["max_iters"]
        assert rows == recipe.most_rows * (2 if recipe is prepare.PREFERENCES else 1)


def meta_of(**train):
    """meta.json of a dataset, whose validation split is a tenth."""
    val = {key: max(1, count // 10) for key, count in train.items()} | {"longest": 50}
    if "longest" not in train:
        del val["longest"]
    return {"name": "x", "splits": {"train": train, "val": val}}


@pytest.mark.parametrize(
    "train, tokenizer, expected",
    [
        ({"tokens": 10**6}, "auto", []),
        ({"tokens": 15_360}, "auto", ["--block_size=128", "--max_iters=100", "--batch_size=12"]),
        ({"tokens": 1536}, "bpe", ["--max_iters=90", "--dropout=0.1"]),
        ({"tokens": 2000, "pairs": 48, "longest": 50}, "auto", ["--block_size=49"]),
        ({"tokens": 10**6}, "gpt2", ["config/finetune_shakespeare.py", "--init_from=gpt2"]),
        ({"tokens": 10**6}, "run", ["--init_from=run", "--block_size=32"]),
        ({"tokens": 4096}, "me/model", ["--block_size=408", "--max_iters=20"]),
        (
            {"tokens": 999, "pairs": 32, "preferences": 16, "longest": 50},
            "run",
            ["extras.preferences", "config/dpo_example.py", "--block_size=32", "--max_iters=20"],
        ),
    ],
)
def test_the_command_suits_the_dataset(train, tokenizer, expected, capsys):
    """Up to ten epochs without dropout, and what was prepared for a model trains that model."""
    Path("run").mkdir()
    Path("run/config.json").write_text('{"block_size": 32}')
    prepare.print_training(meta_of(**train), "data", tokenizer)
    out = capsys.readouterr().out
    command = printed_command(out)
    assert {*expected} <= {*command}
    keys = dict(word.removeprefix("--").split("=") for word in command if word.startswith("--"))
    assert ("max_iters" in keys) == (train["tokens"] < 10**6) and "--init_from=auto" not in command
    assert ("NOTE" in out) == ("dropout" in keys)


def test_preferences_for_no_model_end_with_what_they_need(capsys):
    train = {"tokens": 999, "pairs": 32, "preferences": 16, "longest": 50}
    prepare.print_training(meta_of(**train), "data", "auto")
    out = capsys.readouterr().out
    assert "--tokenizer=RUN" in out and "train.py" not in out


def test_a_home_folder_in_every_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home/a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "home/b.txt").write_text(TEXT, encoding="utf-8")
    prepare.main(["x", "--input=~/a.txt,~/b.txt", "--data_dir=~/sets", "--tokenizer=byte"])
    assert load_meta(tmp_path / "home/sets/x") and not Path("~").exists()
    config = build(prepare.PrepareConfig, {"tokenizer": Path("~/model")})
    assert config.tokenizer == str(tmp_path / "home/model")


def test_marks_between_texts_offer_documents(capsys, monkeypatch):
    """Also marks that are read in two parts."""
    monkeypatch.setattr(documents, "CHUNK", 8)
    Path("stories.txt").write_text("Once upon a time.<|endoftext|>" * 7 + TEXT, encoding="utf-8")
    prepare.prepare("x", "stories.txt", "byte")
    out = capsys.readouterr().out
    assert "<|endoftext|> stands 7 times" in out and "docs/your_text.md" in out


def test_list(book, capsys):
    meta = prepare.prepare("mybook", book, "byte")
    capsys.readouterr()
    prepare.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = {line.split()[0]: line for line in lines if line.strip()}
    assert all("not prepared" in rows[name] for name in ("shakespeare_char", "plays"))
    counts = "/".join(f"{meta['splits'][split]['tokens']:,}" for split in meta["splits"])
    assert rows["mybook"].split() == ["mybook", "book.txt", "byte", "256:", counts]

    Path("data/mybook/meta.json").write_text("{}")
    prepare.main(["--list"])
    assert "damaged" in capsys.readouterr().out
