"""What the README says: its commands are accepted, its files exist, its words are those of the dictionaries."""
import ast
import re
import shlex
from pathlib import Path

import pytest

import prepare
import sample
import train
from configurator import build, load
from test_variants import SLOTS
from variants import ARCH, VariantConfig, choose

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if re.match(r"(\.venv/bin/)?python |torchrun ", line)]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_accepted(command, monkeypatch):
    """Up to the point where it would begin to work: files are there, keys and values are right."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(command, comments=True)
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    name, argv = words[script], words[script + 1 :]
    assert (ROOT / name).is_file()
    if name == "train.py" and "--init_from=resume" not in argv:
        config, given, _ = train.read_config(argv, train.__doc__)
        if config.init_from == "scratch":
            config_class, _, values = choose({"model": config.model} | given)
            build(config_class, values)
    elif name == "sample.py":
        build(sample.SampleConfig, load(argv, [sample.SampleConfig], "")[0])
    elif name == "prepare.py":
        build(prepare.PrepareConfig, load(argv, [prepare.PrepareConfig], "")[0])


def test_there_are_commands_to_test():
    assert len(COMMANDS) > 8


def test_the_first_two_commands_do_all_the_set_up():
    setups = [line for block in BLOCKS for line in block.splitlines() if "venv" in line]
    assert setups == [
        "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && .venv/bin/python train.py config/llama_shakespeare.py",
        "python3 -m venv .venv && .venv/bin/pip install -r requirements-dev.txt && .venv/bin/python -m pytest"]


def test_every_file_is_in_the_map():
    for path in ROOT.glob("*.py"):
        assert f"`{path.name}`" in README, path.name


def test_every_file_is_python_3_11():
    files = [path for folder in (ROOT, ROOT / "bench", ROOT / "config", ROOT / "tests") for path in folder.glob("*.py")]
    assert len(files) > 60
    for path in files:
        ast.parse(path.read_text(encoding="utf-8"), path.name, feature_version=(3, 11))


def test_arrows_of_import_point_down_the_map():
    rows = [re.findall(r"`(\w+)\.py`", line) for line in README[README.index("## The files") :].splitlines() if line.startswith("| `")]
    place = {name: i for i, names in enumerate(rows) for name in names}
    for name, i in place.items():
        tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
        for node in tree.body:  # at the top of the file
            for other in [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names] if isinstance(node, ast.Import) else []:
                assert place.get(other, i) >= i, f"{name}.py imports {other}.py from above"


def test_every_word_is_in_the_table():
    table = README[README.index("| slot | words |") : README.index("`python variants.py`")]
    words = set(re.findall(r"[\w-]+", table))
    for slot, choices in (SLOTS | {"arch": list(ARCH)}).items():
        assert {slot, *choices} <= words, slot
    for key in ("n_kv_head", "window", "full_every", "block_local", "attn_softcap", "logit_softcap", "tie_embeddings", "low_rank", "embed_norm", "mlp_width"):
        assert key in words and key in VariantConfig.__dataclass_fields__


def test_links_and_pictures_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
