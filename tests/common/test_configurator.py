"""The grammar of config files and command lines, and what a mistake looks like from the outside."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import pytest

import ablate
import prepare
import sample
import train
from bench.ablation.settings import AblateConfig
from common import errors
from common.commands import ROOT
from common.configurator import Fraction, PositiveInt, Share, build, keys, load
from helpers.texts import message
from model import GPTConfig
from model_llama import LlamaConfig
from parts.architectures import configure
from parts.variant import VariantConfig
from prepare import PrepareConfig
from sample import SampleConfig
from training.settings import TrainConfig


@dataclass
class Keys:
    learning_rate: float = 1e-3  # how fast
    batch_size: int = 12
    n_kv_head: PositiveInt | None = None
    dropout: Fraction = 0.0
    share: Share = 1.0
    compile: bool | Literal["auto"] = "auto"
    eval_only: bool = False  # look once
    dtype: Literal["float32", "bfloat16"] = "float32"
    start: str = "\n"
    name: str | None = None
    norm: Literal["rms", "none"] = "rms"
    bias: bool | Literal["none", "all"] = "all"
    device: str = "auto"

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} is below 1: give 1 or more")


def read(*argv, **more):
    return build(Keys, load(argv, [Keys], "usage", **more).values)


def mistake(word):
    """What is said of an argument, in one line."""
    return message(lambda: read(word, renamed={"old": "use --new"}))


@pytest.mark.parametrize(
    "text, key, value",
    [
        ("--learning_rate=1", "learning_rate", 1.0),
        ("--batch_size=1e3", "batch_size", 1000),
        ("--n_kv_head=null", "n_kv_head", None),
        ("--compile=false", "compile", False),
        ("--compile", "compile", True),
        ("--compile=auto", "compile", "auto"),
        ("--start=a=b c", "start", "a=b c"),
        ("--start=None", "start", "None"),
        ("--name=None", "name", None),
        ("--norm=none", "norm", "none"),
        ("--bias=true", "bias", True),
    ],
)
def test_values(text, key, value):
    got = getattr(read(text), key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("--learning_rte=1", "unknown key learning_rte .*did you mean learning_rate?"),
        ("--bs=8", "unknown key bs (?!.*did you mean)"),
        ("--batch_size=1.5", "batch_size must be int, not 1.5"),
        ("--batch_size=True", "batch_size must be int, not True"),
        ("--compile=maybe", "compile cannot be 'maybe'.*auto"),
        ("--norm=[1]", r"norm cannot be \[1\]"),
        ("--n_kv_head=x", "n_kv_head must be int or None, not 'x'"),
        ("--batch_size", "batch_size has no value.*--batch_size=value"),
        ("-b=1", "cannot read -b=1.*--key=value"),
        ("--config=x.py", "config is not a key.*without --config"),
        ("--batch_size=0", "batch_size=0 is below 1.*give 1 or more"),
        ("--n_kv_head=0", r"n_kv_head=0 is out of range \(--n_kv_head=0\): give 1 or more"),
        ("--dropout=1", "dropout=1.0 is out of range .*0 or more, below 1"),
        ("--share=0", "share=0.0 is out of range .*a number above 0, at most 1"),
        ("--learning_rate=1" + "0" * 400, "learning_rate is too large"),
        ("--learning_rate=1e999", "learning_rate cannot be inf"),
        ("--old=1", "old is not a key here.*use --new"),
        ("missing.py", "cannot read the config file.*missing.py.*config/ holds examples"),
        ("config/llama_shakspeare.py", "did you mean config/llama_shakespeare.py?"),
    ],
)
def test_mistakes_on_the_command_line(text, words):
    assert re.search(words, mistake(text))


def test_files_then_command_line_and_files_read_it(tmp_path):
    (tmp_path / "a.py").write_text(
        "import math\n_half = len(__file__) * 0 + 0.5\nbatch_size = 8\nlearning_rate = _half\n"
        "def dropout():\n    return 1\n"  # no value
        "if device == 'gpu9':\n    start = 'seen'\nif batch_size == 8:\n    n_kv_head = 4\n"
    )
    mark = "\ufeff"  # a byte order mark, as some editors write it
    (tmp_path / "b.py").write_text(f"{mark}batch_size = batch_size * 2\nlearning_rate = 1\n")
    scope = lambda given: {"device": "gpu9"}
    keys = read(str(tmp_path / "a.py"), str(tmp_path / "b.py"), "--learning_rate=3", scope=scope)
    assert (keys.batch_size, keys.learning_rate, keys.start, keys.n_kv_head) == (16, 3.0, "seen", 4)
    assert keys.device == "auto"  # read, not assigned
    assert read(str(tmp_path / "a.py"), "--batch_size=3", scope=scope).batch_size == 3


def test_load_returns_who_gave_which_key(tmp_path):
    (tmp_path / "a.py").write_text("batch_size = 8\nstart = 'a'\n")
    words = ["word", "--learning_rate=1e-3", str(tmp_path / "a.py"), "--batch_size=3"]
    given = load(words, [Keys], "usage")
    assert given.typed == {"learning_rate": 1e-3, "batch_size": 3}
    assert given.in_files == {"batch_size": 8, "start": "a"}
    assert given.values == {"learning_rate": 1e-3, "batch_size": 3, "start": "a"}
    assert (given.files, given.words) == ([words[2]], ["word"])
    assert given.arguments == [words[2], "word", "--learning_rate=1e-3", "--batch_size=3"]


@pytest.mark.parametrize(
    "source, words",
    [
        ("batch_size = 8\nlearning_rte = 1\n", "unknown key learning_rte .*c.py:2.*learning_rate"),
        ("batch_size = 'x'\n", "batch_size must be int, not 'x' .*c.py:1"),
        ("batch_size = \n", "c.py:1.*a config file is Python"),
        ("\nbatch_size = nowhere\n", "NameError.*c.py:2"),
        ("old = 3\n", "old is not a key here .*c.py:1.*use --new"),
        ("\nraise Exception('no')\n", "Exception: no .*c.py:2.*correct this line"),
        ("norm_typo = 1\n", "unknown key norm_typo .*another script. start a variable of your own"),
        ("exec('device, start = 0, 1')", "device is .*another file .*c.py.*OTHER.py .*c.py"),
        ("start = 'a\\0b'\n", "start contains a NUL character .*c.py:1"),
    ],
    ids=range(9),
)
def test_mistakes_in_a_file(tmp_path, source, words):
    (tmp_path / "c.py").write_text(source)
    assert re.search(words, mistake(str(tmp_path / "c.py")))


def script(*argv):
    more = dict(text=True, timeout=60, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, **more)


def test_exit_status_and_one_line(tmp_path):
    done = script("train.py", "--learning_rte=1", f"--out_dir={tmp_path / 'o'}")
    error = "error: unknown key learning_rte (--learning_rte=1): did you mean learning_rate?\n"
    starting = "train.py is starting: importing torch\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", starting + error)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("debug", errors.DEBUG)
def test_debug_prints_the_traceback_too(debug, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", debug, "--learning_rte=1"])
    with pytest.raises(SystemExit):
        errors.run(train.main)
    said = capsys.readouterr().err
    assert "Traceback" in said and "\nerror: unknown key learning_rte" in said


@pytest.mark.parametrize(
    "script, config, line",
    [
        (train, TrainConfig, "--dtype='auto' "),
        (sample, SampleConfig, "=200 draw from the k likeliest tokens only (1 or more) "),
        (prepare, PrepareConfig, "--tokenizer="),
        (ablate, AblateConfig, "--arms="),
    ],
)
def test_help_of_the_scripts(script, config, line, capsys):
    """Every key once, in 80 columns; the most used ones first, the rare ones for --help=all."""
    text = help_of(script, "--help=all", capsys)
    shown = re.findall(r"^  --([a-z0-9_]+)=", text, re.MULTILINE)
    assert line in " ".join(text.split())
    assert set(keys(config)) <= set(shown) and len(shown) == len(set(shown))
    assert max(map(len, text.splitlines())) <= 80
    first = list(getattr(config, "OFTEN", []))
    assert len(first) <= 10 and shown[: len(first)] == first
    if script is train:
        short = re.findall(r"^  --([a-z0-9_]+)=", help_of(train, "--help", capsys), re.MULTILINE)
        assert first == short[: len(first)] and set(short) < set(shown)


def help_of(script, option, capsys):
    """What a script prints for --help; test_errors.py starts one of them as a process."""
    with pytest.raises(SystemExit) as ended:
        script.main([option])
    shown = capsys.readouterr()
    assert not ended.value.code and shown.err == ""
    return shown.out


def test_options_are_frozen():
    """A new option is a cost to every reader: argue for it, then add it here."""
    options = {
        TrainConfig: """
            model arch match init_from out_dir overwrite data_dir dataset
            allow_data_change batch_size gradient_accumulation_steps seed data_seed max_iters
            learning_rate optimizer adam_rate schedule warmup_iters lr_decay_iters min_lr
            weight_decay beta1 beta2 grad_clip eval_interval eval_tokens
            log_interval log eval_only split device dtype compile parallel
            activation_checkpointing""",
        GPTConfig: "block_size vocab_size n_layer n_head n_embd dropout bias tie_embeddings",
        LlamaConfig: """
            block_size vocab_size n_layer n_head n_kv_head n_embd multiple_of ffn_dim_multiplier
            rope_theta norm_eps dropout tie_embeddings""",
        SampleConfig: """
            init_from out_dir checkpoint start prompts chat skip_unknown num_samples max_new_tokens
            stop temperature top_k top_p min_p repetition_penalty seed jsonl show_probs context
            device dtype compile""",
        PrepareConfig: "input field tokenizer vocab_size data_dir list",
    }
    for cls, expected in options.items():
        assert list(keys(cls)) == expected.split()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_config_file_is_read(device):
    """Each shipped config is accepted, one key a line, within its budget of 60 lines."""
    for path in sorted((ROOT / "config").glob("*.py")):
        assert len(path.read_text().splitlines()) <= 60
        if "bench/ablate.py" in path.read_text():
            continue  # a sweep's: tests/bench/test_ablate.py reads these
        scope = lambda given: {"device": device, "device_memory": 80.0}
        values = load([str(path)], [TrainConfig, VariantConfig], "", scope).values
        config = build(TrainConfig, values)
        named = config.model in path.stem or path.stem.startswith("best_")
        assert named or config.init_from != "scratch" or config.dataset.startswith("task:")
        configure(values)
