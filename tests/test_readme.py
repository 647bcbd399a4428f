"""What the README says: its commands are accepted, its files exist, its words are those of the dictionaries."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from test_variants import SLOTS

import prepare
import sample
import train
from common.configurator import build, load
from parts.architectures import ARCH, configure
from parts.variant import VariantConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line
    for block in BLOCKS
    for line in block.splitlines()
    if re.match(r"(\.venv/bin/)?python |torchrun ", line)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_accepted(command, monkeypatch):
    """Up to the point where it would begin to work: files are there, keys and values are right."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(command, comments=True)
    if "-m" in words[:2]:  # python -m room.module
        script = words.index("-m") + 1
        name = words[script].replace(".", "/") + ".py"
    else:
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        name = words[script]
    argv = words[script + 1 :]
    assert (ROOT / name).is_file() or name == "pytest.py"
    if name == "train.py" and "--init_from=resume" not in argv:
        settings = train.read_config(argv, train.__doc__)
        if settings.config.init_from == "scratch":
            configure({"model": settings.config.model} | settings.model)
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
        "python3 -m venv .venv && .venv/bin/pip install -r requirements-dev.txt && .venv/bin/python -m pytest",
    ]


def test_every_script_and_room_is_in_the_map():
    rooms = [path.parent for path in ROOT.glob("*/__init__.py")]
    assert len(rooms) == 7
    for name in [path.name for path in ROOT.glob("*.py")] + [f"{path.name}/" for path in rooms]:
        assert f"`{name}`" in README, name


def test_every_file_is_python_3_11():
    files = [
        path
        for pattern in ("*.py", "[a-z]*/*.py", "[a-z]*/[a-z]*/*.py")
        for path in ROOT.glob(pattern)
    ]
    assert len(files) > 60
    for path in files:
        ast.parse(path.read_text(encoding="utf-8"), path.name, feature_version=(3, 11))


# Lower rooms first: an import may point to a lower room, or stay in its own. Two rooms of one level do not know each other.
LEVELS = {
    "model": 0,
    "model_llama": 0,
    "common": 0,
    "tokens": 1,
    "parts": 1,
    "weights": 2,
    "training": 3,
    "sampling": 3,
    "prepare": 4,
    "sample": 4,
    "train": 5,
    "bench": 6,
}


def arrows():
    """(file, room of the file, module imported, room of the module) of every import of ours, also those within functions."""
    for path in [
        *ROOT.glob("*.py"),
        *(path for room in LEVELS for path in (ROOT / room).glob("**/*.py")),
    ]:
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            for name in names:
                if name.split(".")[0] in LEVELS:
                    yield path.relative_to(ROOT), own, name, name.split(".")[0]


def test_arrows_of_import_point_down():
    found = list(arrows())
    assert len(found) > 150
    wrong = [
        f"{path} imports {name}"
        for path, own, name, other in found
        if own != other and LEVELS[other] >= LEVELS[own] and own not in ("bench",)
    ]
    assert not wrong


def test_every_room_says_what_it_is_for():
    for path in [*ROOT.glob("[a-z]*/__init__.py"), *ROOT.glob("bench/*/__init__.py")]:
        assert re.fullmatch(r'"""[^\n]+"""\n', path.read_text(encoding="utf-8")), path


def test_every_word_is_in_the_table():
    table = README[README.index("| slot | words |") : README.index("`python -m parts.catalogue`")]
    words = set(re.findall(r"[\w-]+", table))
    for slot, choices in (SLOTS | {"arch": list(ARCH)}).items():
        assert {slot, *choices} <= words, slot
    for key in (
        "n_kv_head",
        "window",
        "full_every",
        "block_local",
        "attn_softcap",
        "logit_softcap",
        "tie_embeddings",
        "low_rank",
        "embed_norm",
        "mlp_width",
    ):
        assert key in words and key in VariantConfig.__dataclass_fields__


def test_links_and_pictures_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
