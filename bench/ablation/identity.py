"""
The identity of a run's code. Rows with the same hash come from the same code.

It is a hash of syntax trees: of the functions that train.py's loop and the making of a run name, of
those that these name, and so on, in all modules that train.py imports. Comments, docstrings,
printed texts, messages and the words of a dictionary that the run does not name do not count, nor
do the rooms that only read settings, print, store and load. The resolved settings and the data are
hashed apart (sweep.py). A name stands for every definition that has it, so that rather too much
counts than too little.
"""

import ast
import functools
import hashlib
import json
from dataclasses import asdict, dataclass

from bench.ablation.settings import variant_config
from common.configurator import build
from common.files import ROOT
from training.settings import TrainConfig

BEGIN = {"train", "make_run"}  # the functions of train.py that a run consists of
# Modules, and rooms, that do not compute what a run from scratch learns.
SILENT = (
    *("bench", "prepare", "sample", "sampling", "weights"),
    *("common.configurator", "common.errors", "common.files"),
    *("training.check", "training.doctor", "training.dry_run", "training.last_words"),
    *("training.loggers", "training.run_folder", "training.settings"),
)
PATHS = ("out_dir", "data_dir", "dataset", "device", "wandb_project", "wandb_run_name")


def digest(content):
    """16 hexadecimal digits of the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def code_hash(values, root=ROOT):
    """The digest of the code of a run of these values, keys of train.py with vocab_size."""
    return hash_of_words(frozenset(words_of(values)), root)


def words_of(values):
    """The words that a run's configuration names: rope, adamw, cosine."""
    settings = asdict(build(TrainConfig, values)) | asdict(variant_config(values))
    texts = [value for key, value in settings.items() if key not in PATHS]
    return {word for text in texts if isinstance(text, str) for word in text.split(",")}


@functools.cache
def hash_of_words(words, root):
    """The digest of the definitions that a run which names these words reaches."""
    definitions = definitions_below(root)
    pending, reached = set(BEGIN), {}
    while pending:
        name = pending.pop()
        if name in reached:
            continue
        chosen = [definition.of_words(words) for definition in definitions[name]]
        chosen = [definition for definition in chosen if definition]
        reached[name] = [[definition.file, definition.tree] for definition in chosen]
        pending |= definitions.keys() & {
            other for definition in chosen for other in definition.names
        }
    return digest(reached)


@functools.cache
def definitions_below(root):
    """{name: [Definition]} of the module-level functions, classes and values of all modules that
    train.py imports, at its top or within a function."""
    definitions, pending, seen = {}, ["train"], set()
    while pending:
        module = pending.pop()
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        silent = any(module == name or module.startswith(name + ".") for name in SILENT)
        if module in seen or silent or not path.is_file():
            continue
        seen.add(module)
        file = path.relative_to(root).as_posix()
        imports, defined = read_module(file, path.read_text(encoding="utf-8"))
        pending += imports
        for name, definition in defined:
            definitions.setdefault(name, []).append(definition)
    return definitions


@functools.cache
def read_module(file, text):
    """([names of the modules that a module may import], [(name, Definition)])."""
    tree, imports, defined = ast.parse(text), [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):  # the fields of a dataclass are settings
            node.body = [part for part in node.body if not isinstance(part, ast.AnnAssign)]
        definition = Definition(file, node)
        defined += [(name, definition) for name in names_defined(node)]
    return imports, defined


def names_defined(node):
    """The names that a statement of a module defines: f of `f[x] = ...` and of `f.x = ...`, too."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    parts = [part for target in targets if target is not None for part in ast.walk(target)]
    return {part.id for part in parts if isinstance(part, ast.Name)}


@dataclass(frozen=True)
class Definition:
    """A statement of a module that defines something."""

    file: str
    node: ast.AST

    @functools.cached_property
    def tree(self):
        return plain(self.node)

    @functools.cached_property
    def names(self):
        """All names and attributes in it."""
        parts = list(ast.walk(self.node))
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        return names | {part.attr for part in parts if isinstance(part, ast.Attribute)}

    def of_words(self, words):
        """The definition as it concerns a run that names these words: a dictionary that has some of
        them without the others, and nothing of `MLP["mish"] = ...` with another word."""
        node, value = self.node, getattr(self.node, "value", None)
        for target in getattr(node, "targets", ()):
            key = getattr(target, "slice", None)
            if isinstance(key, ast.Constant) and key.value not in words:
                return None
        if not isinstance(value, ast.Dict) or not isinstance(node, ast.Assign | ast.AnnAssign):
            return self
        entries = list(zip(value.keys, value.values, strict=True))
        entries = [entry for entry in entries if getattr(entry[0], "value", None) in words]
        if not entries:
            return self
        chosen = ast.Dict([key for key, _ in entries], [part for _, part in entries])
        return Definition(self.file, ast.Expr(chosen))


def is_silent(node):
    """Whether a statement only says something: a docstring, or a print."""
    call = node.value if isinstance(node, ast.Expr) else None
    prints = isinstance(call, ast.Call) and getattr(call.func, "id", "") == "print"
    return prints or isinstance(call, ast.Constant) and isinstance(call.value, str)


def plain(node):
    """A syntax tree as lists, the same for every version of Python: without empty fields, without
    what is raised, and without texts that have a space in them, which are written for people."""
    if isinstance(node, list):
        return [plain(child) for child in node if not is_silent(child)]
    if isinstance(node, ast.Raise):
        return ["Raise"]
    if isinstance(node, ast.JoinedStr | ast.Constant):
        parts = [part.value for part in getattr(node, "values", [node]) if hasattr(part, "value")]
        if any(isinstance(part, str) and " " in part for part in parts):
            return ["text"]
    if isinstance(node, ast.AST):
        present = [
            [name, plain(value)]
            for name, value in ast.iter_fields(node)
            if value not in (None, []) and name != "kind"
        ]
        return [type(node).__name__, *present]
    return repr(node)
