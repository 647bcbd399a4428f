"""The settings of a run: `auto`, resuming, mistakes, pretrained weights."""

import json
import re

import pytest
import torch

import train
from common import runtime
from common.configurator import keys
from common.errors import UserError
from helpers.checkpoints import edit_json, reseal
from helpers.runs import ROOT, arguments, losses, made, stop_after
from helpers.texts import message
from prepare import prepare
from tokens.token_files import load_split
from training import settings
from weights import checkpoint


@pytest.mark.parametrize("name", ["gpt2_124m", "llama_124m"])
def test_a_larger_gpu_takes_the_same_tokens_in_fewer_passes(name, monkeypatch):
    passes = []
    for memory in (24e9, 40e9, 80e9):
        monkeypatch.setattr(settings, "find_device", lambda device: "cuda")
        monkeypatch.setattr(runtime, "find_device", lambda device: "cuda")
        monkeypatch.setattr(settings, "memory_of", lambda device, memory=memory: memory / 1e9)
        config = train.read_config([str(ROOT / f"config/{name}.py")], "").config
        assert config.batch_size * config.gradient_accumulation_steps == 480
        assert config.gradient_accumulation_steps % 8 == 0  # each of 8 GPUs does as many
        passes.append(config.gradient_accumulation_steps)
        monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda word: None)
        made = runtime.set_up(config.device, "float32")  # without a number, set_device fails
        assert made.reasons["device"] == f"device {made.device} (the best one here)"
        assert made.device == "cuda:0"
    assert passes == [40, 16, 8]
    for key, value in dict(RANK=0, WORLD_SIZE=2, MASTER_ADDR="", MASTER_PORT=1).items():
        monkeypatch.setenv(key, str(value))
    assert runtime.with_number("cuda:0") == "cuda"  # stored by one process: each rank has its own


@pytest.fixture
def compiled(monkeypatch):
    """The list of the blocks that were compiled, where compiling pays from about three steps on."""
    blocks = []

    def compile(block, **more):
        blocks.append(block)
        return block

    step_flops = 6 * 27_000 * 4 * 16  # of a model of SIZE
    monkeypatch.setattr(runtime, "COMPILE_PAYS", 3 * step_flops)
    monkeypatch.setattr(runtime.shutil, "which", lambda name: "g++")
    monkeypatch.setattr(torch, "compile", compile)
    return blocks


@pytest.mark.parametrize("has_bfloat16, dtype", [(False, "float32"), (True, "bfloat16")])
def test_resuming_does_not_choose_again_unless_asked(
    data_dir, tmp_path, compiled, monkeypatch, capsys, has_bfloat16, dtype
):
    """A run that repays compiling is resumed so near its end that the rest would not."""
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda: has_bfloat16)
    run = arguments(data_dir, tmp_path / "run", "--max_iters=6", "--eval_interval=20")
    stop_after(5)
    assert train.main(run).status == 143 and len(compiled) == 2
    stored = checkpoint.read(checkpoint.find(tmp_path / "run"))[1]
    assert (stored["compile"], stored["dtype"], stored["device"]) == (True, dtype, "cpu")

    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda: not has_bfloat16)
    resume = ["--init_from=resume", f"--out_dir={tmp_path / 'run'}"]
    for choices in ([], ["--compile=auto", "--dtype=auto", "--device=auto"]):
        resumed = made([*resume, *choices]).runtime
        assert (resumed.compile, resumed.dtype, resumed.device) == (True, dtype, "cpu")
    assert len(compiled) == 3 * 2 and "will differ" not in capsys.readouterr().out

    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    resumed = made([*resume, "--compile=False", f"--dtype={other}"]).runtime
    assert (resumed.compile, resumed.dtype) == (False, other)
    words = f"warning: dtype {dtype} -> {other}, compile True -> False: the run will differ"
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("has_bfloat16, dtype", [(False, "float32"), (True, "bfloat16")])
def test_a_run_of_some_length_uses_bfloat16(data_dir, tmp_path, monkeypatch, has_bfloat16, dtype):
    """Eager, where the CPU multiplies bfloat16; Muon follows. A dtype that was asked for stays."""
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda: has_bfloat16)
    run = arguments(data_dir, tmp_path / "run", "--max_iters=6", "--optimizer=muon")
    assert made(run).runtime.dtype == "float32"  # too short
    monkeypatch.setattr(runtime, "BFLOAT16_PAYS", 3 * 6 * 27_000 * 4 * 16)
    short = made(run)
    assert (short.runtime.dtype, short.runtime.compile) == (dtype, False)
    assert short.optimizers[0].dtype == getattr(torch, dtype)
    assert made([*run, "--dtype=float32"]).runtime.dtype == "float32"


def test_a_run_of_another_machine_goes_on_with_the_device_there_is(
    data_dir, tmp_path, monkeypatch, capsys
):
    """Its checkpoint names a device that is not here; whether to compile is chosen anew."""
    train.main(arguments(data_dir, tmp_path / "run", "--max_iters=1"))
    stored = checkpoint.read(checkpoint.find(tmp_path / "run"))
    there = stored[0], stored[1] | {"device": "mps", "compile": True}, stored[2]
    monkeypatch.setattr(checkpoint, "read", lambda folder: there)
    resume = ["--init_from=resume", f"--out_dir={tmp_path / 'run'}"]
    config = train.read_config(resume, "").config
    assert (config.device, config.compile) == ("cpu", "auto")
    assert "warning: device mps -> cpu, compile True -> auto: the run" in capsys.readouterr().out
    assert "no Metal device" in message(train.read_config, [*resume, "--device=mps"], "")
    monkeypatch.setattr(settings, "find_device", lambda device: device)
    settings.resume_values(stored[1] | {"device": "cuda:1"}, {"device": "cuda"}, tmp_path)
    assert not capsys.readouterr().out  # the same kind


def test_match_sets_the_width_of_the_mlp(start, tmp_path, capsys):
    """To one that tests/parts/test_costs.py finds right; the same command resumes the run."""
    options = "--max_iters=1 --model=llama --multiple_of=8 --n_kv_head=1 --match=params"
    for name, more in (("run", "--mlp=gelu"), ("readable", "")):  # both keys are LLaMA's own
        start(name, f"{options} {more}")
        said = re.search(r"match params: mlp_width (\d+), [+-]0\.\d\d %", capsys.readouterr().out)
        assert checkpoint.open_run(tmp_path / name)[0].config.mlp_width == int(said[1])
        start(name, f"{options} {more} --init_from=resume --max_iters=2")


def test_resume_refuses_another_architecture_and_other_data(start, resume, tmp_path, data_dir):
    start("run", "--max_iters=2")
    start("llama", "--model=llama --max_iters=2")
    for name, more, words in (
        ("run", "--n_layer=3", "n_layer 2 -> 3"),
        ("llama", "--window=4", "window 0 -> 4"),  # a key that the readable model does not have
        ("llama", "--arch=olmo2", "block pre -> output"),
    ):
        said = message(resume, name, f"--max_iters=6 {more}")
        assert re.search(f"architecture.*{words}", said)
    assert "dtype=float16" in message(resume, "run", "--max_iters=6 --dtype=float16")
    assert "optimizer=muon" in message(resume, "run", "--max_iters=6 --optimizer=muon")
    assert "overwrite=True" in message(resume, "run", "--max_iters=6 --overwrite")
    others = """model arch match optimizer init_from out_dir overwrite data_dir dataset
        allow_data_change eval_interval log_interval log eval_only split parallel
        activation_checkpointing"""
    course = keys(settings.TrainConfig).keys() - {*others.split()}
    assert {*settings.COURSE} == course | {*settings.DROPOUTS}
    other = f"--max_iters=6 --data_dir={tmp_path}"
    text = tmp_path / "other.txt"
    text.write_text("the king of rome shall speak no more\n" * 100)
    prepare("words", input=str(text), tokenizer="char", data_dir=str(tmp_path))
    assert "has changed since" in message(resume, "run", other)
    assert not resume("run", f"{other} --allow_data_change")
    assert checkpoint.steps(tmp_path / "run") == [2, 6]
    back = f"--max_iters=8 --data_dir={data_dir}"
    assert "has changed since" in message(resume, "run", back)  # it was allowed once


@pytest.mark.parametrize("missing", ["k", "t"])  # in the middle of the vocabulary, and its end
def test_another_vocabulary_is_never_trained_into(data_dir, start, resume, tmp_path, missing):
    """Of a text without one character: the ids after it mean the next characters. Neither by a run
    that goes on nor by another run's weights, whatever the user allows."""
    text = (data_dir / "words.txt").read_text().replace(missing, "")
    (tmp_path / "text.txt").write_text(text)
    prepare("words", str(tmp_path / "text.txt"), "char", str(tmp_path))
    start("run", "--max_iters=2")
    there = f"--data_dir={tmp_path} --max_iters=4"
    for more in (f"--init_from={tmp_path / 'run'}", f"--init_from={tmp_path / 'run'} --arch=None"):
        said = message(start, "other", f"{there} {more}")
        assert "dataset=words" in said and f"--tokenizer={tmp_path / 'run'}" in said
    for more in ("", "--allow_data_change", "--eval_only --allow_data_change"):
        assert "dataset=words" in message(resume, "run", f"{there} {more}")
    assert not (tmp_path / "other").exists() and checkpoint.steps(tmp_path / "run") == [2]
    prepare("words", str(tmp_path / "text.txt"), str(tmp_path / "run"), str(tmp_path))
    assert not start("other", f"{there} --init_from={tmp_path / 'run'}")
    assert not resume("run", f"{there} --allow_data_change")


@pytest.mark.parametrize(
    "more, words",
    [
        (["--n_head=3"], "n_embd=32 is not divisible by n_head=3"),
        (["--rope_theta=5.0"], "rope_theta"),
        (["--mlp=foo"], "mlp cannot be 'foo'.*relu, gelu.*swiglu"),
        (["--log=csv,paper"], "log cannot be 'csv,paper'.*tensorboard, wandb, csv"),
        (["--min_lr=1"], "min_lr=1.0 is above learning_rate"),
        (["--warmup_iters=10", "--max_iters=10"], "warmup_iters=10 is not below max_iters=10"),
        (["--warmup_iters=9", "--lr_decay_iters=9"], "=9 is not below lr_decay_iters=9"),
        (["--eval_tokens=1"], "eval_tokens=1 scores nothing"),
        (["--norm=batchnorm", "--activation_checkpointing", "--max_iters=1"], "norm=batchnorm"),
        (["--out_dir="], "out_dir is empty"),
        (["--adam_rate=0.5"], "adam_rate has no effect with optimizer=adamw"),
        (["--device=cuda"], "no CUDA device is visible.*--device=cpu"),
        (["--device=tpu"], "unknown device tpu"),
        (["--dataset=nowhere"], "prepare.py nowhere"),
        (["--vocab_size=5"], "vocab_size=5 is below the data's"),
        (["--eval_iters=5"], "eval_tokens"),
        (["--epochs=5"], "use --max_iters"),
        (["--init_from=nowhere/at-all"], "nowhere/at-all"),
        (["--init_from=gone", "--dataset=not-prepared"], "init_from=gone"),  # before the text
        (["--init_from=resume"], "no checkpoint here"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(data_dir, tmp_path, more, words):
    if more == ["--device=cuda"] and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert re.search(words, message(train.main, arguments(data_dir, tmp_path / "run", *more)))
    assert not (tmp_path / "run").exists()


def test_all_old_keys_of_a_config_file_are_named_at_once(tmp_path):
    (tmp_path / "theirs.py").write_text("eval_iters = 200\nwandb_log = True\ndecay_lr = False\n")
    found = message(train.read_config, [str(tmp_path / "theirs.py")], "")
    assert found.startswith("eval_iters, decay_lr are not keys here")
    assert "eval_iters (line 1): use --eval_tokens" in found
    assert "decay_lr (line 3): use --schedule" in found and "wandb_log" not in found


def test_a_warm_up_that_nobody_typed_is_shortened_for_a_short_run(data_dir, tmp_path, capsys):
    """A run of 20 steps with a config of 100 steps of warm-up warms up for two, also when the same
    command resumes it. The default of 2,000 steps is treated alike; what was typed is refused."""
    (tmp_path / "long.py").write_text("max_iters, warmup_iters, learning_rate = 750, 100, 1e-2\n")
    words = arguments(data_dir, tmp_path / "run", "--max_iters=20", "--eval_interval=10")
    words = [word for word in words if "warmup" not in word]
    argv = [str(tmp_path / "long.py"), *words]
    stop_after(5)
    assert train.main(argv).status == 143 and not train.main([*argv, "--init_from=resume"]).status
    printed = capsys.readouterr()
    note = "note: warmup_iters shortened from 100 to 2 (a tenth of max_iters=20)\n"
    assert printed.err.count(note) == 1 and len(note) <= 80 and "will differ" not in printed.out
    rates = dict(losses(tmp_path / "run", "lr"))
    assert rates[1] < rates[2] and max(rates, key=rates.get) == 3
    assert json.loads((tmp_path / "run" / "config.json").read_text())["warmup_iters"] == 2

    assert train.read_config([*words, "--max_iters=9"], "").config.warmup_iters == 0
    assert train.read_config([argv[0], "--max_iters=101"], "").config.warmup_iters == 100
    with pytest.raises(UserError, match="warmup_iters=100 is not below max_iters=20"):
        train.read_config([*argv, "--warmup_iters=100"], "")


@pytest.mark.parametrize(
    "words, log", [("=True", "wandb"), ("", "wandb"), ("=False", "none"), (" --log=csv", "csv")]
)
def test_nanogpts_wandb_log_means_log_wandb(words, log):
    assert train.read_config(f"--wandb_log{words}".split(), "").config.log == log


@pytest.fixture
def pretrained(data_dir, tmp_path, monkeypatch):
    """A small LLaMA of transformers, and the command line of a run that starts from its folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=20, hidden_size=24, intermediate_size=40, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=16)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    model.save_pretrained(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    run = arguments(data_dir, tmp_path / "run", "--init_from=hf")
    return model, [arg for arg in run if not arg.startswith(("--n_", "--block"))]


def test_pretrained_weights_go_on_training(pretrained, data_dir, tmp_path, resume):
    """The first evaluation is transformers' own loss."""
    (reference, run), out = pretrained, tmp_path / "run"
    train.main([*run, "--max_iters=2", "--eval_interval=2", "--eval_tokens=17"])
    tokens = torch.from_numpy(load_split(data_dir / "words", "val", 16)[:17].astype("int64"))[None]
    scores = reference(tokens[:, :-1]).logits.log_softmax(-1)
    expected = -scores.gather(2, tokens[:, 1:, None]).mean().item()
    scored = dict(losses(out, "val_loss"))
    assert abs(scored[0] - expected) < 1e-5 and scored[2] != scored[0]
    assert json.loads((out / "config.json").read_text())["model"] == "llama"
    for steps in (3, 4):  # it knows its width without the folder, and where it began
        assert not resume("run", f"--max_iters={steps}")
    model, _, config, _ = checkpoint.open_run(out)
    assert model.blocks[0].mlp.gate.weight.shape == (40, 24)
    assert config["init_from"] == str(tmp_path / "hf")


def test_what_does_not_fit_pretrained_weights_is_said(pretrained, tmp_path, monkeypatch, capsys):
    run = pretrained[1]
    made([*run, "--block_size=64", "--window=4"])
    printed = capsys.readouterr()
    assert "note: block_size shortened from 64 to 16" in printed.out
    assert "note: window 0 -> 4: not as in the model of these weights" in printed.out
    assert printed.err.count("tokenizer cannot be read") == 1
    assert "another model (model=gpt2)" in message(train.main, [*run, "--model=gpt2"])
    assert "model with another arch (arch=llama3)" in message(train.main, [*run, "--arch=llama3"])
    words = message(train.main, [*run, "--vocab_size=30"])
    assert "leave out the keys" in words, words
    monkeypatch.setattr("weights.hf.agrees_with", lambda name, tokenizer: False)
    words = "not prepared with the tokenizer of these weights.*prepare.py NAME"
    assert re.search(words, message(train.main, run)) and not (tmp_path / "run").exists()


def test_a_run_in_an_order_that_is_not_made_any_more_names_the_last_commit(
    start, resume, tmp_path, monkeypatch
):
    """A run of more samples than LARGE that was saved before its order was stored."""
    start("run", "--max_iters=2")
    monkeypatch.setattr(settings, "LARGE", 1)
    assert resume("run", "--max_iters=3") == 0
    folder = checkpoint.find(tmp_path / "run")
    edit_json("state", lambda state: {key: state[key] for key in state if key != "order"})(folder)
    reseal(folder)
    assert "5aa2740" in message(resume, "run", "--max_iters=4")
    assert resume("run", "--eval_only") == 0  # which uses no order
    monkeypatch.undo()
    assert resume("run", "--max_iters=4") == 0
