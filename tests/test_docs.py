"""README.md, docs/ and bench/README.md: their commands are accepted, their files exist, the README
stays short."""

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import prepare
import sample
import train
from bench.ablation.settings import read as read_sweep
from bench.settings import plan as plans
from bench.verdict import VerdictConfig
from common.commands import ROOT
from common.configurator import build, load
from parts import catalogue
from parts.architectures import configure
from training.run_folder import CSV_COLUMNS, LISTS
from training.settings import TrainConfig, read_config
from training.terminal import MEASURES
from weights import export

PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", "").splitlines()]
BENCH = (ROOT / "bench/README.md").read_text(encoding="utf-8")
LINES += re.findall(r"^\| `([^`]+)`", BENCH.replace("CONFIG", "config/ablate_shakespeare.py"), re.M)
# tests/extras reads the commands of the extras.
OURS = r"((\.venv/bin/)?python |torchrun )(?!-m (pytest|extras\.))"
COMMANDS = sorted({line for line in LINES if re.match(OURS, line)})
CONFIGS = {
    "sample.py": sample.SampleConfig,
    "prepare.py": prepare.PrepareConfig,
    "weights/export.py": export.ExportConfig,
    "parts/catalogue.py": catalogue.CatalogueConfig,
    "bench/verdict.py": VerdictConfig,
}


def script_of(command):
    """(script or module as a path, its arguments) of a shell line."""
    words = shlex.split(command, comments=True)
    if "-m" in words[:2]:
        at = words.index("-m") + 1
        return words[at].replace(".", "/") + ".py", words[at + 1 :]
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[at], words[at + 1 :]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_accepted(command, monkeypatch):
    """Each command is read up to the point where it would begin to work."""
    monkeypatch.chdir(ROOT)
    name, argv = script_of(command)
    assert (ROOT / name).is_file()
    for word in argv:
        value = word.partition("=")[2].removeprefix("FILE:") or word
        if value.startswith(("docs/", "config/")):
            assert Path(value).is_file(), value

    if name == "train.py" and "--init_from=resume" not in argv:
        settings = read_config(argv, "")
        if settings.config.init_from == "scratch":
            configure({"model": settings.config.model} | settings.model)
    elif name in CONFIGS:
        build(CONFIGS[name], load(argv, [CONFIGS[name]], "").values)
    elif name == "bench/ablate.py" and plans.is_asked(argv):
        plans.read(argv, "")
    elif name == "bench/ablate.py":
        for sweep in read_sweep(argv, ""):  # stored runs keep the rates that they chose
            assert sweep.config.lr_grid == [1] or not sweep.config.out_dir.startswith("bench/")
    else:  # a resumed run has more settings; of the others, the pages name no keys
        load(argv, [TrainConfig] if name == "train.py" else [], "")


def test_the_python_of_two_pages_runs(tmp_path, monkeypatch):
    """Block after block, with fewer steps, in a folder that has the runs and the data they name."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("First Citizen:\nROMEO and JULIET: speak.\n\n" * 100)
    prepare.prepare("words", input="text.txt", tokenizer="char")
    Path("data/words").rename("data/shakespeare_char")
    size = ["--n_layer=1", "--n_embd=32", "--n_head=4", "--block_size=16", "--max_iters=2"]
    words = ["--dataset=shakespeare_char", "--log_interval=1", "--device=cpu", *size]
    train.main([*words, "--out_dir=out-llama-shakespeare"])
    shutil.copytree("out-llama-shakespeare", "out-gpt2-shakespeare")
    for page in ("from_python", "watch"):
        text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
        names = {}
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            block = block.replace("range(500)", "range(2)").replace(
                "max_new_tokens=100", "stop='e'"
            )
            exec(block.replace('"--max_iters=40"', f"*{size}"), names)
    assert len(names["log"]) == 4 and Path("two-runs.png").is_file()


def test_the_columns_of_a_log_are_explained():
    page = (ROOT / "docs/watch.md").read_text(encoding="utf-8")
    for key in {*CSV_COLUMNS, *LISTS, *MEASURES}:
        assert f"`{key}`" in page, key


def test_the_first_two_commands_do_all_the_set_up():
    venv = "python3 -m venv .venv && .venv/bin/pip install -r"
    assert [line for line in LINES if "venv" in line] == [
        f"{venv} requirements.txt && .venv/bin/python train.py config/llama_shakespeare.py",
        f"{venv} requirements-dev.txt && .venv/bin/python -m pytest",
    ]


def test_the_ways_to_write_arms_are_read():
    page = (ROOT / "docs/ablation.md").read_text(encoding="utf-8")
    ways = re.findall(r"^\| `(\S+.*)` \| (?:every sweep|`config/answer)", page, re.MULTILINE)
    assert len(ways) == 3
    for way in ways:
        words = shlex.split(f"config/answer/settings.py --arms={way}")
        assert plans.read(words, "").parts


PIN = r"^([\w-]+)==(\S+)"


def test_the_lists_of_packages_agree():
    """requirements.txt and uv.lock have the same versions, which pyproject.toml allows."""
    texts = [(ROOT / name).read_text() for name in ("requirements.txt", "requirements-dev.txt")]
    pins, more = (re.findall(PIN, text, re.MULTILINE) for text in texts)
    core = re.findall(PIN, texts[0].split("\n\n")[0], re.MULTILINE)
    locked = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    locked = {package["name"]: package["version"] for package in locked}
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = [table["project"]["optional-dependencies"], table["dependency-groups"]]
    needed = [Requirement(word) for word in table["project"]["dependencies"]]
    others = [Requirement(word) for group in extras for words in group.values() for word in words]

    assert {name for name, _ in core} == {one.name for one in needed}
    allowed = {one.name: one.specifier for one in needed + others}
    for name, version in pins + more:
        assert version == locked[name.lower().replace("_", "-")], name
        assert version in allowed[name], name
    workflow = (ROOT / ".github/workflows/pages.yml").read_text(encoding="utf-8")
    assert f"markdown-it-py=={locked['markdown-it-py']}" in workflow


def test_the_readme_and_its_first_screen_are_short():
    assert len(README.splitlines()) <= 130 and len(README.split()) <= 1100
    first, _, _ = README.partition("\nTo change the code")
    prose = re.sub(r"```.*?```|<img.*?>", "", first, flags=re.DOTALL)
    assert len(first.splitlines()) <= 30
    assert len(re.findall(r"[A-Za-z][\w'./-]*", prose)) <= 230
    assert len(re.findall(r"(?<![\w-])\d+(?:[.,]\d+)*", prose)) <= 35


def test_the_readme_links_every_page_and_names_every_room():
    for page in PAGES[1:]:
        assert page.relative_to(ROOT).as_posix() in README, page.name
    rooms = [f"{path.parent.name}/" for path in ROOT.glob("*/__init__.py")]
    assert len(rooms) == 8
    for name in [path.name for path in ROOT.glob("*.py")] + rooms:
        assert f"`{name}`" in README, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        forge = target.startswith(("http", "../../actions/", "../../deployments/"))
        assert forge or (page.parent / target).exists(), target
