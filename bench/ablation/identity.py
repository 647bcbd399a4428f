"""
The identity of a run's code. Rows with the same hash come from the same code.

It is a hash of syntax trees: of the functions that train.py's loop and the making of a run name, of
those that these name, and so on, in all modules that train.py imports. Comments, docstrings,
printed texts, messages and the entries of a dictionary that the run does not use do not count, nor
do the modules in SILENT, which only read settings, print, store and load. The resolved settings and
the data are hashed separately (sweep.py). A name stands for all definitions of that name: the hash
covers too much rather than too little.
"""

import ast
import functools
import hashlib
import json
from dataclasses import asdict

from common.configurator import build
from common.files import ROOT
from training.settings import TrainConfig, variant_config

BEGIN = {"train", "make_run"}  # the functions of train.py that a run consists of
# Packages and modules that do not compute what a run from scratch learns.
SILENT = (
    *("bench", "prepare", "sample", "sampling", "weights"),
    *("common.configurator", "common.errors", "common.files"),
    *("training.run_folder", "training.settings", "training.terminal"),
)
PATHS = ("out_dir", "data_dir", "dataset", "device")


def digest(content):
    """16 hexadecimal digits of the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def code_hash(values, root=ROOT):
    """The digest of the code of a run of these values, keys of train.py with vocab_size."""
    settings = asdict(build(TrainConfig, values)) | asdict(variant_config(values))
    texts = [value for key, value in settings.items() if key not in PATHS]
    words = {word for text in texts if isinstance(text, str) for word in text.split(",")}
    return hash_of_words(frozenset(words), root)


@functools.cache
def hash_of_words(words, root):
    """The digest of the definitions that a run reaches if its settings hold these words."""
    definitions = definitions_below(root)
    pending, reached = set(BEGIN), {}
    while pending:
        name = pending.pop()
        nodes = [(file, with_words(node, words)) for file, node in definitions[name]]
        reached[name] = [[file, digest_of(node)] for file, node in nodes if node]
        pending |= {other for _, node in nodes if node for other in names_in(node)}
        pending &= definitions.keys() - reached.keys()
    return digest(reached)


@functools.cache
def definitions_below(root):
    """{name: [(file, statement)]} of the module-level functions, classes and values of all modules
    that train.py imports, at its top or within a function."""
    definitions, pending, seen = {}, ["train"], set()
    while pending:
        module = pending.pop()
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        silent = any(module == name or module.startswith(name + ".") for name in SILENT)
        if module in seen or silent or not path.is_file():
            continue
        seen.add(module)
        tree = parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                pending += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                pending += [alias.name for alias in node.names]
        for node in tree.body:
            for name in names_defined(node):
                entry = path.relative_to(root).as_posix(), node
                definitions.setdefault(name, []).append(entry)
    return definitions


@functools.cache
def parse(text):
    """The syntax tree of a module, without the fields of dataclasses, which are settings."""
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            node.body = [part for part in node.body if not isinstance(part, ast.AnnAssign)]
    return tree


def names_defined(node):
    """The names that a statement of a module defines: f of `f[x] = ...` and of `f.x = ...`, too."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    parts = [part for target in targets if target is not None for part in ast.walk(target)]
    return {part.id for part in parts if isinstance(part, ast.Name)}


@functools.cache
def names_in(node):
    """All names and attributes in a statement."""
    names = [getattr(part, "id", None) or getattr(part, "attr", None) for part in ast.walk(node)]
    return {name for name in names if isinstance(name, str)}


def with_words(node, words):
    """A statement as it concerns a run that names these words: a dictionary that has some of them
    without the others, and None for `MLP["mish"] = ...` with another word."""
    for target in getattr(node, "targets", ()):
        key = getattr(target, "slice", None)
        if isinstance(key, ast.Constant) and key.value not in words:
            return None
    table = getattr(node, "value", None)
    if not isinstance(table, ast.Dict) or not isinstance(node, ast.Assign | ast.AnnAssign):
        return node
    entries = list(zip(table.keys, table.values, strict=True))
    named = [entry for entry in entries if getattr(entry[0], "value", None) in words]
    kept = [entry for entry in entries if entry in named or entry[0] is None]  # None: **other
    return ast.Dict(*map(list, zip(*kept, strict=True))) if named else node


@functools.cache
def digest_of(node):
    return digest(plain(node))


def plain(node):
    """A syntax tree as lists, the same for every version of Python: without empty fields, without
    what is raised or printed, and without texts that have a space in them, which people read."""
    if isinstance(node, list):
        return [part for part in map(plain, node) if part != ["Expr", ["value", ["said"]]]]
    if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
        return ["Expr", ["value", ["said"]]]  # a docstring
    if isinstance(node, ast.Raise):
        return ["Raise"]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
        return ["said"]
    if isinstance(node, ast.JoinedStr | ast.Constant):
        parts = [getattr(part, "value", None) for part in getattr(node, "values", [node])]
        if any(isinstance(part, str) and " " in part for part in parts):
            return ["said"]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [field for field in ast.iter_fields(node) if field[1] not in (None, [])]
    return [type(node).__name__, *([key, plain(part)] for key, part in fields if key != "kind")]
