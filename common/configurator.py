"""
Configuration for every script of this repo:

    python train.py config/llama_shakespeare.py --batch_size=8 --eval_only

A key is a field of a dataclass, declared once: name, type, range, default, trailing comment. A
config file is Python that assigns keys. The command line overrides it, and is parsed first, so that
a config file can depend on its values: `if device == "cpu": n_layer = 4`.
"""

import ast
import difflib
import inspect
import io
import math
import numbers
import os
import sys
import textwrap
import tokenize
import traceback
import types
import typing
from dataclasses import dataclass
from typing import Annotated

from common import files
from common.errors import UserError, one_line, speaks


@dataclass(frozen=True)
class Range:
    """The values that a number may take. A key declares it: `Annotated[int, Range(least=1)]`."""

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None

    def flaw(self, value):
        """A description of why `value` is outside the range, or None if it is inside."""
        if self.least is not None and value < self.least:
            return "is negative" if self.least == 0 else f"is below {self.least}"
        if self.above is not None and value <= self.above:
            return f"is not above {self.above}"
        if self.below is not None and value >= self.below:
            return f"is not below {self.below}"
        if self.most is not None and value > self.most:
            return f"is above {self.most}"
        return None

    def __str__(self):
        low = f"{self.least} or more" if self.least is not None else f"a number above {self.above}"
        if self.below is not None:
            return f"{low}, below {self.below}"
        return low if self.most is None else f"{low}, at most {self.most}"


PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]
Fraction = Annotated[float, Range(least=0, below=1)]  # 0 <= x < 1
Share = Annotated[float, Range(above=0, most=1)]  # 0 < x <= 1
Probability = Annotated[float, Range(least=0, most=1)]  # 0 <= x <= 1


def ranges(cls):
    """{key: Range} of the fields of a dataclass that declare one, as `PositiveInt | None` does
    too."""
    limits = {}
    for key, kind in typing.get_type_hints(cls, include_extras=True).items():
        for part in (kind, *typing.get_args(kind)):
            for extra in getattr(part, "__metadata__", ()):
                if isinstance(extra, Range):
                    limits[key] = extra
    return limits


def check_ranges(cls, values, where=None):
    """Raise UserError for the first of `values` that is outside the range its key declares."""
    for key, limits in ranges(cls).items():
        value = values.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        flaw = limits.flaw(value) if is_number else None
        if flaw:
            raise UserError(f"{key}={value} {flaw}", where or cls.__name__, f"give {limits}")


@dataclass(frozen=True)
class Words:
    """The type of a key whose values are words of a dictionary: `norm: Words(NORM) = "rmsnorm"`.
    The dictionary is read at each use, so that words may be added later. several: the key takes a
    comma-separated list of words."""

    dictionary: dict
    several: bool = False

    def has(self, value):
        words = str(value).split(",") if self.several else [value]
        return all(word in self.dictionary for word in words)


def keys(*classes):
    """{key: type} of the fields of some dataclasses."""
    return {key: kind for cls in classes for key, kind in typing.get_type_hints(cls).items()}


def allowed(kind):
    """(types, words) that a key of type `kind` takes. If there are words, a text value must be one
    of them."""
    if isinstance(kind, Words):
        return [str], list(kind.dictionary)
    is_choice = typing.get_origin(kind) is typing.Literal
    parts = (kind,) if is_choice else typing.get_args(kind) or (kind,)
    words = [word for part in parts for word in typing.get_args(part)]
    plain_types = [part for part in parts if not typing.get_args(part)]
    return plain_types + ([str] if words else []), words


def from_text(text, kind):
    """The Python value that a text on the command line stands for. It stays a text if the key takes
    any text."""
    kinds, words = allowed(kind)
    takes_any_text = str in kinds and not words
    is_none = text == "None" and types.NoneType in kinds
    if text in words or takes_any_text and not is_none:
        return text  # a word such as none is a word, not None
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: nested too deep
        return text


def check(key, value, kind, where):
    """`value` converted to what `kind` takes (1 to a float, 1e3 to an int). Raises UserError if
    that is impossible, naming the key and what it takes."""
    kinds, words = allowed(kind)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # numpy's numbers too
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if type(value) is float and not math.isfinite(value):
        raise UserError(f"{key} cannot be {value}", where, "give a finite number")
    if type(value) is str and "\0" in value:  # no path can contain one
        raise UserError(f"{key} contains a NUL character", where, "leave it out")

    fits = kind.has(value) if isinstance(kind, Words) else value in words
    if words and not fits and type(value) not in set(kinds) - {str}:
        choices = words + ["True", "False"] if bool in kinds else words
        raise UserError(f"{key} cannot be {value!r}", where, "choose from " + ", ".join(choices))
    if type(value) in kinds:
        return value
    if type(value) in (int, float) and float in kinds:
        return float(value)
    if type(value) is float and int in kinds and value.is_integer():
        return int(value)

    expected = " or ".join(kind.__name__.replace("NoneType", "None") for kind in kinds)
    fix = "--help shows every key with its default"
    raise UserError(f"{key} must be {expected}, not {value!r}", where, fix)


def find(key, known, renamed, where):
    """The type of a key. Raises UserError, with the new name or the most similar key, if the key is
    unknown."""
    if key in known:
        return known[key]
    if key in renamed:
        raise UserError(f"{key} has another name here", where, renamed[key])
    near = difflib.get_close_matches(key, known, n=1)
    advice = "--help lists the keys; a name of your own begins with _"
    raise UserError(f"unknown key {key}", where, f"did you mean {near[0]}?" if near else advice)


def find_file(path):
    """The path of a config file: one that is not in the current directory may be in the repo."""
    if os.path.exists(path) or not (files.ROOT / path).is_file():
        return path
    return str(files.ROOT / path)


def compile_file(path):
    """(the code of a config file, {name it assigns: line}). Raises UserError if the file cannot be
    read."""
    try:
        with open(path, encoding="utf-8-sig") as file:  # skips the byte order mark of some editors
            tree = ast.parse(file.read())
        code = compile(tree, path, "exec")
    except OSError as error:
        what = f"cannot read the config file: {error.strerror}"
        examples = [str(each.relative_to(files.ROOT)) for each in files.ROOT.glob("config/**/*.py")]
        near = difflib.get_close_matches(path, examples, n=1)
        fix = f"did you mean {near[0]}?" if near else "check the path; config/ holds examples"
        raise UserError(what, path, fix) from None
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # also: not utf-8
        what = getattr(error, "msg", None) or one_line(error) or "it is nested too deep"
        where = f"{path}:{getattr(error, 'lineno', None) or 1}"
        raise UserError(what, where, "a config file is Python in utf-8") from None

    stores = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return code, {node.id: node.lineno for node in stores if isinstance(node.ctx, ast.Store)}


def read_file(path, scope, known, renamed):
    """The {key: value} that a config file assigns. It may read the names in `scope`."""
    code, assigned = compile_file(path)
    names = dict(scope)
    try:
        exec(code, names)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # any exception, even SystemExit, is a mistake in the file
        frames = traceback.extract_tb(error.__traceback__)
        line = [frame.lineno for frame in frames if frame.filename == path][-1]
        what = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(what, f"{path}:{line}", "mend this line") from None

    values = {}
    for key, line in assigned.items():
        if key in names and not key.startswith("_"):
            where = f"{path}:{line}"
            values[key] = check(key, names[key], find(key, known, renamed, where), where)
    return values


def load(argv, classes, usage, scope=lambda values: {}, renamed=None, defaults=None):
    """({key: value}, other words) of a command line and of the config files it names.

    The keys are the fields of `classes`. scope(values) returns names that a config file may read
    in addition to the keys given so far, such as the detected device. renamed: {old key: what to
    use instead}. defaults: {key: the default that --help prints instead of the field's}."""
    if "--help" in argv or "-h" in argv:
        print(help_text(usage, classes, defaults))
        sys.exit(0)

    known, renamed = keys(*classes), renamed or {}
    given, config_files, words = {}, [], []
    for arg in argv:
        key, equals, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("-"):
            (config_files if arg.endswith(".py") else words).append(arg)
            continue
        if not arg.startswith("--") or not key:
            raise UserError(f"cannot read {arg}", "command line", "write --key=value")
        kind = find(key, known, renamed, arg)
        if not equals and bool not in allowed(kind)[0]:
            raise UserError(f"{key} has no value", arg, f"write --{key}=value, without spaces")
        given[key] = check(key, from_text(text if equals else "True", kind), kind, arg)

    values = dict(given)
    for name in config_files:
        path = find_file(name)
        if path != name and speaks():
            files.warn_once(f"{name} is not in this directory: reading {path}", "note")
        values |= read_file(path, values | scope(values), known, renamed) | given
    return values, words


def typed(argv):
    """The keys that a command line gives itself, and not through its config files."""
    return {arg.removeprefix("--").partition("=")[0] for arg in argv if arg.startswith("--")}


def build(cls, values):
    """An instance of `cls` from the values that are its fields. Raises UserError if a value is
    out of range or `cls` itself raises ValueError."""
    check_ranges(cls, values)
    try:
        return cls(**{key: values[key] for key in keys(cls) if key in values})
    except ValueError as error:
        what, _, fix = str(error).partition(": ")
        raise UserError(what, cls.__name__, fix or "change one of these values") from None


# ---------------------------------------------------------------- --help

KEY_WIDTH, WIDTH = 34, 80  # characters of a key with its default, and of a line


def help_text(usage, classes, defaults=None):
    """The usage, and every key once: its default, its comment, and its words or its range."""
    lines, shown = [usage.strip(), "", "--debug shows where an error comes from"], set()
    for cls in classes:
        comments, limits = comments_of(cls), ranges(cls)
        lines += ["", f"{cls.__name__}:"]
        for key, kind in keys(cls).items():
            if key in shown:
                continue
            shown.add(key)
            default = (defaults or {}).get(key, repr(getattr(cls, key)))
            # a space after each bar lets a long list of words be wrapped
            choice = "| ".join(allowed(kind)[1]) or str(limits.get(key, ""))
            text = f"{comments.get(key, '')} {f'({choice})' if choice else ''}".strip()
            lines += help_lines(f"  --{key}={default}", text)
    return "\n".join(lines)


def help_lines(head, text):
    """The lines of one key: `head`, with the text beside it, or below it if `head` is too wide."""
    column = " " * (KEY_WIDTH + 1)
    wrapped = textwrap.wrap(text, WIDTH - len(column), break_on_hyphens=False)
    body = [column + line.replace("| ", "|") for line in wrapped] or [""]
    if len(head) > KEY_WIDTH:
        return [head, *body] if text else [head]
    return [(head.ljust(len(column)) + body[0][len(column) :]).rstrip(), *body[1:]]


def comments_of(cls):
    """{key: its trailing comment, joined if the field takes several lines}."""
    source = textwrap.dedent(inspect.getsource(cls))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    by_key = {}
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            lines = [comments.get(i, "") for i in range(node.lineno, node.end_lineno + 1)]
            by_key[node.target.id] = " ".join(line.lstrip("# ") for line in lines if line)
    return by_key
