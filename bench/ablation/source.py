"""The hash of the training code. Rows of a sweep with the same hash come from the same code."""

import ast
import hashlib
import json

from common.files import ROOT


def digest(content):
    """16 hexadecimal digits of the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def code_hash(name="train"):
    """The digest of the source of train.py and of every file of ours that it imports, directly or
    indirectly, also inside functions. Comments and docstrings do not count."""
    return digest(sources(name))


def sources(name="train"):
    """{file, relative to the root: its syntax tree} of a module and all that it imports of ours."""
    found, pending = {}, [name]
    while pending:
        for path in files_of(pending.pop()):
            file = path.relative_to(ROOT).as_posix()
            if file not in found:
                tree = ast.parse(path.read_text(encoding="utf-8"))
                found[file] = without_docstrings(tree)
                pending += imports(tree)
    return found


def files_of(module):
    """The files that an import of a dotted module name runs: its packages' and its own."""
    parts = module.split(".")
    packages = [ROOT.joinpath(*parts[: n + 1], "__init__.py") for n in range(len(parts))]
    own = ROOT.joinpath(*parts).with_suffix(".py")
    return [path for path in (*packages, own) if path.exists()]


def imports(tree):
    """The dotted names that a file imports, as modules or from modules, anywhere in it."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` names a module, too
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def is_docstring(node):
    """Whether a statement is text alone."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def without_docstrings(node):
    """A syntax tree as lists, the same for every version of Python: empty fields are left out."""
    if isinstance(node, list):
        return [without_docstrings(child) for child in node if not is_docstring(child)]
    if isinstance(node, ast.AST):
        present = [
            [name, without_docstrings(value)]
            for name, value in ast.iter_fields(node)
            if value not in (None, []) and name != "kind"
        ]
        return [type(node).__name__, *present]
    return repr(node)
