"""The house: five scripts at the root, rooms that import only what lies below them, ruff, sizes."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from common import early
from common.commands import ROOT

# Lower rooms first: a file imports from its own room or from a lower one. Rooms of one level do
# not know each other.
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
    "extras": 7,
}
IN_ROOMS = [path for room in LEVELS for path in (ROOT / room).rglob("*.py")]
FILES = sorted([*ROOT.glob("*.py"), *IN_ROOMS])
FORMULAS = [ROOT / f"tests/parts/{name}.py" for name in ("references", "mixer_references")]


def room_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@functools.cache
def tree_of(path):
    """The syntax tree of a file, parsed once for all tests."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(path):
    """The names of all modules that a file imports, also within its functions."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_point_down():
    count, upward = 0, []
    for path in FILES:
        for module in imported_modules(path):
            room, other = room_of(path), module.split(".")[0]
            count += other in LEVELS
            if other in LEVELS and room != other and LEVELS[other] >= LEVELS[room]:
                upward.append(f"{path.relative_to(ROOT)} imports {module}")
    assert count > 150
    assert not upward


def test_tests_of_the_core_do_not_know_the_extras():
    """Not even in a function. test_imports_point_down has the core itself."""
    for path in (ROOT / "tests").rglob("*.py"):
        known = {module.split(".")[0] for module in imported_modules(path)}
        assert "extras" in path.parts or "extras" not in known, path


def test_the_readable_models_import_only_torch():
    for name in ("model.py", "model_llama.py"):
        packages = {module.split(".")[0] for module in imported_modules(ROOT / name)}
        assert packages <= {"torch", "math", "dataclasses"}, name


def imports_at_the_top():
    """{module of ours: the names of the modules that it imports when it is imported}."""
    graph = {}
    for path in FILES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        body = tree_of(path).body
        top = [node for node in body if isinstance(node, ast.ImportFrom | ast.Import)]
        graph[module] = set()
        for node in top:
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{name}" for name in names)]
            graph[module] |= set(names)
    return graph


def test_no_circle_of_imports():
    graph = imports_at_the_top()
    done = set()

    def visit(module, above):
        assert module not in above, " -> ".join([*above, module])
        if module not in done:
            for other in graph[module] & graph.keys():
                visit(other, [*above, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def test_a_script_names_the_packages_of_the_ablation_before_it_imports_them():
    """Where they are missing, it ends with one line that says what to install."""
    graph = imports_at_the_top()

    def reached(module, known):
        for other in graph[module] - known:
            known.add(other)
            if other in graph:
                reached(other, known)
        return {name.split(".")[0] for name in known}

    scripts = 0
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if '__main__"' in text and reached(module, set()) & {*early.ABLATE}:
            scripts += 1
            assert path.name not in ("train.py", "sample.py", "prepare.py")
            assert "early.need(*early.ABLATE)" in text, path
    assert scripts > 5


def test_every_room_and_file_says_what_it_is_for():
    for path in FILES:
        assert ast.get_docstring(tree_of(path)), path
    for path in [*ROOT.glob("[a-z]*/__init__.py"), *ROOT.glob("bench/*/__init__.py")]:
        assert re.fullmatch(r'"""[^\n]+"""\n', path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff(command):
    """It also reports syntax that is newer than Python 3.11."""
    ruff = [sys.executable, "-m", "ruff", *command.split(), "."]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def length(node):
    return node.end_lineno - node.lineno + 1


def test_functions_fit_on_a_screen_and_files_in_one_sitting():
    long = []
    for path in FILES:
        lines = lines_of([path])
        if lines > (550 if path.name == "train.py" else 420):
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef) and length(node) > 60:
                long.append(f"{path.relative_to(ROOT)}: {node.name} has {length(node)} lines")
    assert not long


def test_few_files_stand_at_the_root_and_in_results():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    if not listed:
        pytest.skip("no git here")
    files = [name for name in listed.splitlines() if not name.startswith(".")]
    assert len([name for name in files if "/" not in name]) <= 13
    assert len([name for name in files if name.startswith("bench/results/")]) <= 300


def test_actions_are_pinned_by_their_commits():
    """A tag of another repository may be moved."""
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob(".github/workflows/*.yml")]
    used = re.findall(r"uses: (.+)", "".join(texts))
    assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", line) for line in used)


def test_the_changes_begin_with_the_version_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changes = (ROOT / "docs/CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+?),? ", changes, re.MULTILINE)[1] == project["version"]


# What a reader must hold: the files that the entries of the core reach, each with those before it,
# and their lines. Each bound is the count of 2026-11-28 with some slack, and is set anew at most
# once a month, by a commit that says why. Lower is better, but a bound never excuses a dense line.
REACH = {"train": (46, 10_250), "sample": (52, 11_050), "ablate": (71, 15_100)}
# Lines in all languages. parts/ and its FORMULAS have no total, so that a part can be added.
TOTALS = {"the core without parts": 20_300, "extras": 5_600, "tests": 20_700}
LANGUAGES = {".py", ".js", ".css", ".html", ".j2", ".sh"}


def lines_of(paths):
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def files_reached(names):
    """Our files that the imports of these modules load, one after the other in a process of its
    own: [paths after the first, after the second, ...]."""
    code = "import sys; sys.path.insert(0, 'bench')\n" + "".join(
        f"import {name}; print(*(getattr(m, '__file__', '') for m in [*sys.modules.values()]))\n"
        for name in names
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    found = []
    for line in done.stdout.splitlines():
        loaded = [Path(name).relative_to(ROOT) for name in line.split() if str(ROOT) in name]
        ours = [path for path in loaded if path.parts[0].removesuffix(".py") in LEVELS]
        found.append([path for path in ours if path.name != "__init__.py"])
    return found


def test_an_entry_reaches_few_files():
    for name, reached in zip(REACH, files_reached(REACH), strict=True):
        files, lines = REACH[name]
        assert Path("train.py") in reached
        assert len(reached) <= files, sorted(map(str, reached))
        assert lines_of(ROOT / path for path in reached) <= lines


def test_the_totals_have_some_slack():
    counted = {place: [] for place in TOTALS}
    for room in {*LEVELS, "tests"} - {"parts"}:
        place = room if room in TOTALS else "the core without parts"
        for path in [ROOT / f"{room}.py", *(ROOT / room).rglob("*")]:
            if path.suffix in LANGUAGES and path.is_file() and "results" not in path.parts:
                counted[place] += [path] * (path not in FORMULAS)
    for place, bound in TOTALS.items():
        assert lines_of(counted[place]) <= bound, f"{place}: {lines_of(counted[place])} lines"
