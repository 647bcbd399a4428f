"""
The hash of the code that a run reaches. Rows with the same hash come from the same code.

A small copy of the run is made on a CPU, takes two steps and is evaluated, while Python reports
each function of ours that is called. The hash is that of their syntax trees, of the module-level
values that they name, and of the class attributes of the objects they are called on. Comments,
docstrings, printed texts and messages of errors do not count, nor does what only reads settings,
prints, saves or logs. The words of a dictionary that the run does not name do not count, either.
"""

import ast
import functools
import hashlib
import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import train
from bench.ablation import measure
from bench.ablation.settings import variant_config
from common.configurator import build
from common.files import ROOT
from training.settings import TrainConfig

# What a run reads, prints or writes, and not what it computes. The resolved settings are hashed
# apart from the code (Sweep.hash_configurations).
SILENT_FILES = (
    *("common/configurator.py", "common/errors.py", "common/files.py"),
    *("training/loggers.py", "training/run_folder.py", "training/settings.py"),
)
SILENT = {
    *("choose_compile", "configure", "describe", "find_data", "find_device", "idle"),
    *("mixed_fingerprint", "read_config", "versions"),
    *("content_flaw", "load_meta", "size_flaw"),  # the data's fingerprint is hashed, too
}


def digest(content):
    """16 hexadecimal digits of the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def code_hash(values):
    """The digest of the code that a run of these values reaches. `values` are keys of train.py,
    with vocab_size."""
    return digest(sources(*reached(values), words_of(values)))


# ---------------------------------------------------------------- what a run reaches


def reached(values):
    """({(file, qualified name)} of the functions of ours that the run calls, and of the classes of
    the objects that it consists of)."""
    small = {"batch_size": 1, "gradient_accumulation_steps": 1, "log_interval": 1}
    small |= {"eval_tokens": 4 * values["block_size"] + 1}
    small |= {"device": "cpu", "dtype": "float32", "compile": False}
    with Trace() as trace:
        run = measure.start_run(values | small)
        train.train_step(run)
        run.step = max(run.step, run.config.warmup_iters)  # the schedule begins after the warm-up
        train.train_step(run)
        train.score(run)

    splits = [split for source in run.data.sources for split in source.splits.values()]
    objects = [*run.learner.model.modules(), *run.learner.optimizers, run.data.batches, *splits]
    kinds = {kind for each in objects for kind in type(each).__mro__}
    classes = {(module_file(kind.__module__), kind.__qualname__) for kind in kinds}
    return trace.functions, {(file, name) for file, name in classes if file}


class Trace:
    """A context that notes the functions of ours that are called, in this thread and in those that
    start within it. functions: {(file, qualified name)}."""

    def __init__(self):
        self.functions = set()
        self.local = threading.local()

    def __enter__(self):
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        threading.setprofile(None)

    def note(self, frame, event, argument):
        silent = getattr(self.local, "silent", None)  # the frame of a function of SILENT
        if silent is not None:
            if event == "return" and frame is silent:
                self.local.silent = None
        elif event == "call":
            file = our_file(frame.f_code.co_filename)
            if file and frame.f_code.co_name in SILENT:
                self.local.silent = frame
            elif file:
                # A function within another one is a part of it.
                name = frame.f_code.co_qualname.partition(".<locals>")[0]
                self.functions.add((file, name))


@functools.cache
def our_file(path):
    """The path, relative to the root, of a file whose code counts; None for any other."""
    path = Path(path)
    if not path.is_relative_to(ROOT) or "site-packages" in path.parts:
        return None
    file = path.relative_to(ROOT).as_posix()
    return None if file.startswith(("bench/", "tests/")) or file in SILENT_FILES else file


@functools.cache
def module_file(module):
    """The file of a module, loaded or not, as `our_file` gives it."""
    path = ROOT.joinpath(*module.split("."))
    found = [each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()]
    return our_file(str(found[0])) if found else None


def words_of(values):
    """The words that a run's configuration names: rope, adamw, cosine."""
    settings = asdict(build(TrainConfig, values)) | asdict(variant_config(values))
    paths = ("out_dir", "data_dir", "dataset", "device", "wandb_project", "wandb_run_name")
    texts = [value for key, value in settings.items() if key not in paths]
    return {word for text in texts if isinstance(text, str) for word in text.split(",")}


# ---------------------------------------------------------------- its text


def sources(functions, classes, words, root=ROOT):
    """{file: {name: syntax tree}} of some functions, of the attributes of some classes and of those
    of the functions, and of the module-level values that these name."""
    classes = classes | {(file, name.rpartition(".")[0]) for file, name in functions}
    pending = functions | {(file, name + ".") for file, name in classes if name}
    found = {}

    while pending:
        file, name = pending.pop()
        module = read_module(root, file)
        if name not in module.definitions or name in found.setdefault(file, {}):
            continue
        definitions = [node for node in module.definitions[name] if not is_other_word(node, words)]
        nodes = [chosen_words(node, words) for node in definitions]
        found[file][name] = [plain(node) for node in nodes]
        for node in nodes:
            pending |= module.values_named(node)
    return found


@functools.cache
def read_module(root, file):
    return Module(root, file)


class Module:
    """A file of ours: definitions {name: [nodes]} of its functions, of its classes' attributes (the
    name of the class and a dot) and of its module-level values; imports {name: (module, name)}."""

    def __init__(self, root, file):
        self.root, self.file = root, file
        self.definitions, self.values, self.imports = {}, set(), {}
        tree = ast.parse((root / file).read_text(encoding="utf-8"))
        self.define(tree.body, "")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (node.module, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (alias.name, None)

    def define(self, body, prefix):
        """Note the definitions of a module, or of a class whose name and a dot are the prefix."""
        attributes = []
        for node in body:
            if isinstance(node, ast.FunctionDef):
                self.definitions[prefix + node.name] = [node]
            elif isinstance(node, ast.ClassDef):
                self.define(node.body, f"{prefix}{node.name}.")
                if any("dataclass" in ast.dump(each) for each in node.decorator_list):
                    self.definitions[f"{prefix}{node.name}."] = []  # its values are the settings
            elif prefix:
                attributes.append(node)
            else:
                self.define_values(node)
        if prefix:
            self.definitions[prefix] = attributes

    def define_values(self, node):
        """Note a statement of the module as the definition of the names that it assigns."""
        for target in getattr(node, "targets", None) or [getattr(node, "target", None)]:
            for part in ast.walk(target) if target is not None else ():
                if isinstance(part, ast.Name):
                    self.definitions.setdefault(part.id, []).append(node)
                    self.values.add(part.id)

    def values_named(self, node):
        """{(file, name)} of the module-level values that a syntax tree names."""
        found = set()
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                found.add(self.origin(part.id))
            elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                found.add(self.origin(part.value.id, part.attr))
        return found - {None}

    def origin(self, name, attribute=None):
        """(file, name) of the value that a name, or an attribute of a module, stands for; None if
        it is no module-level value of ours."""
        if name in self.values and attribute is None:
            return self.file, name
        module, original = self.imports.get(name, (None, None))
        if module is None:
            return None
        if attribute is not None:  # `from package import module`, or `import module`
            module, original = f"{module}.{original}" if original else module, attribute
        file = module_file(module)
        return read_module(self.root, file).origin(original) if file and original else None


def chosen_words(node, words):
    """A module-level value; if it is a dictionary that has some of the words, then without the
    others."""
    value = getattr(node, "value", None)
    if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(value, ast.Dict):
        return node
    entries = list(zip(value.keys, value.values, strict=True))
    chosen = [
        entry for entry in entries if isinstance(entry[0], ast.Constant) and entry[0].value in words
    ]
    keys, values = zip(*(chosen or entries), strict=True) if entries else ((), ())
    return ast.Assign(targets=[], value=ast.Dict(keys=list(keys), values=list(values)))


def is_other_word(node, words):
    """Whether a statement adds a word to a dictionary, as in `MLP["mish"] = ...`, that is none of
    these."""
    target = node.targets[0] if isinstance(node, ast.Assign) and node.targets else None
    key = target.slice if isinstance(target, ast.Subscript) else None
    return isinstance(key, ast.Constant) and key.value not in words


def is_message(node):
    """Whether a statement is a text alone, or prints."""
    if not isinstance(node, ast.Expr):
        return False
    call = node.value
    prints = isinstance(call, ast.Call) and getattr(call.func, "id", "") == "print"
    return prints or isinstance(call, ast.Constant) and isinstance(call.value, str)


def plain(node):
    """A syntax tree as lists, the same for every version of Python: without empty fields, texts
    that are printed, and what an error says."""
    if isinstance(node, list):
        return [plain(child) for child in node if not is_message(child)]
    if isinstance(node, ast.Raise):
        return ["Raise"]
    if isinstance(node, ast.AST):
        present = [
            [name, plain(value)]
            for name, value in ast.iter_fields(node)
            if value not in (None, []) and name != "kind"
        ]
        return [type(node).__name__, *present]
    return repr(node)
