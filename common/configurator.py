"""
Configuration for every script of this repo: `python train.py config/llama_shakespeare.py --batch_size=8 --eval_only`

A key is a field of a dataclass, declared once: name, type, default, trailing comment. A config file is
Python that assigns keys. The command line has the last word and is parsed first, so that a config file can
read it and choose by it: `if device == "cpu": n_layer = 4`.
"""

import ast
import difflib
import inspect
import math
import numbers
import re
import sys
import traceback
import types
import typing
from dataclasses import dataclass
from typing import Annotated

from common.errors import UserError


@dataclass(frozen=True)
class Range:
    """The values that a number may take. It stands in the type of a key: `Annotated[int, Range(least=1)]`."""

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None

    def flaw(self, value):
        """(what is wrong with a value, what to do), or None if it is in the range."""
        if self.least is not None and value < self.least:
            what = "is negative" if self.least == 0 else f"is below {self.least}"
        elif self.above is not None and value <= self.above:
            what = f"is not above {self.above}"
        elif self.below is not None and value >= self.below:
            what = f"is not below {self.below}"
        elif self.most is not None and value > self.most:
            what = f"is above {self.most}"
        else:
            return None
        return what, f"give {self}"

    def __str__(self):
        low = f"{self.least} or more" if self.least is not None else f"a number above {self.above}"
        if self.below is None and self.most is None:
            return low
        start = f"{self.least}" if self.least is not None else f"above {self.above}"
        end = (
            f"up to, not including, {self.below}"
            if self.below is not None
            else f"at most {self.most}"
        )
        return (
            f"a number from {start} {end}" if self.least is not None else f"a number {start}, {end}"
        )


PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]
Fraction = Annotated[float, Range(least=0, below=1)]  # 0 <= x < 1
Share = Annotated[float, Range(above=0, most=1)]  # 0 < x <= 1


def ranges(cls):
    """{key: Range} of the fields of a dataclass that declare one, also as `PositiveInt | None`."""
    found = {}
    for key, kind in typing.get_type_hints(cls, include_extras=True).items():
        for part in (kind, *typing.get_args(kind)):
            limits = [
                extra for extra in getattr(part, "__metadata__", ()) if isinstance(extra, Range)
            ]
            if limits:
                found[key] = limits[0]
    return found


def check_ranges(cls, values, where=None):
    """Raise UserError for the first number among `values` that is outside of the range its key declares."""
    for key, limits in ranges(cls).items():
        value = values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and limits.flaw(value):
            what, fix = limits.flaw(value)
            raise UserError(f"{key}={value} {what}", where or cls.__name__, fix)


@dataclass(frozen=True)
class Words:
    """The type of a key that takes a word of a dictionary: `norm: Words(NORM) = "rmsnorm"`. The
    dictionary is read when it is asked, so that a word added later is known. several: the key takes
    a list of them with commas between."""

    dictionary: dict
    several: bool = False

    def has(self, value):
        words = str(value).split(",") if self.several else [value]
        return all(word in self.dictionary for word in words)


def keys(*classes):
    """{key: type} of the fields of some dataclasses."""
    return {key: kind for cls in classes for key, kind in typing.get_type_hints(cls).items()}


def allowed(kind):
    """The types that a key of type `kind` takes, and the words if its text is a choice of words."""
    if isinstance(kind, Words):
        return [str], list(kind.dictionary)
    parts = (
        (kind,) if typing.get_origin(kind) is typing.Literal else typing.get_args(kind) or (kind,)
    )
    words = [word for part in parts for word in typing.get_args(part)]
    return [part for part in parts if not typing.get_args(part)] + [str] * bool(words), words


def from_text(text, kind):
    """The Python value of a command line's text, which stays text where the key takes any text."""
    types_, words = allowed(kind)
    if (
        text in words
        or str in types_
        and not words
        and not (text == "None" and types.NoneType in types_)
    ):
        return text  # a word such as none is a word, not None
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def check(key, value, kind, where):
    """`value` as `kind` wants it (1 is a float, 1e3 an int), else a UserError saying what is expected."""
    types_, words = allowed(kind)
    if isinstance(value, numbers.Real) and not isinstance(
        value, bool
    ):  # numpy's numbers are numbers, too
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if type(value) is float and not math.isfinite(value):
        raise UserError(f"{key} cannot be {value}", where, "give a finite number")
    fits = kind.has(value) if isinstance(kind, Words) else value in words
    if words and not fits and type(value) not in set(types_) - {str}:
        raise UserError(
            f"{key} cannot be {value!r}",
            where,
            "choose from " + ", ".join(words + ["True", "False"] * (bool in types_)),
        )
    if type(value) in types_:
        return value
    if type(value) in (int, float) and float in types_:
        return float(value)
    if type(value) is float and int in types_ and value.is_integer():
        return int(value)
    names = " or ".join(t.__name__.replace("NoneType", "None") for t in types_)
    raise UserError(
        f"{key} must be {names}, not {value!r}", where, "--help shows every key with its default"
    )


def find(key, known, renamed, where):
    """The type of a key, or a UserError that names its successor or the nearest key there is."""
    if key in known:
        return known[key]
    if key in renamed:
        raise UserError(f"{key} has another name here", where, renamed[key])
    near = difflib.get_close_matches(key, known, n=1)
    raise UserError(
        f"unknown key {key}",
        where,
        f"did you mean {near[0]}?"
        if near
        else "--help lists the keys; a name of your own begins with _",
    )


def read_file(path, scope, known, renamed):
    """Run a config file, which may read the names in `scope`, and return the {key: value} it assigns."""
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except OSError as error:
        raise UserError(
            f"cannot read the config file: {error.strerror}",
            path,
            "check the path; config/ holds examples",
        ) from None
    except (SyntaxError, ValueError) as error:  # not utf-8, too
        raise UserError(
            getattr(error, "msg", str(error)),
            f"{path}:{getattr(error, 'lineno', None) or 1}",
            "a config file is Python in utf-8",
        ) from None
    names = dict(scope)
    try:
        exec(compile(tree, path, "exec"), names)
    except (Exception, SystemExit) as error:
        line = next(
            frame.lineno
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if frame.filename == path
        )
        raise UserError(
            f"{type(error).__name__}: {error}", f"{path}:{line}", "mend this line"
        ) from None
    assigned = {
        node.id: node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    found = {}
    for key, line in assigned.items():
        if key in names and not key.startswith("_"):
            where = f"{path}:{line}"
            found[key] = check(key, names[key], find(key, known, renamed, where), where)
    return found


def load(argv, classes, usage, scope=lambda values: {}, renamed={}, defaults={}):
    """({key: value}, the words that are neither) of a command line and the config files it names. The keys
    are the fields of `classes`; scope(values) are names that a config file may read beside the keys given so
    far, such as the device that was found; renamed: {old key: what to use instead}; defaults: {key: what --help
    says in place of the field's}."""
    known = keys(*classes)
    if "--help" in argv or "-h" in argv:
        print(help_text(usage, classes, defaults))
        sys.exit(0)
    values, files, words = {}, [], []
    for arg in argv:
        key, equals, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("-"):
            (files if arg.endswith(".py") else words).append(arg)
        elif not arg.startswith("--") or not key:
            raise UserError(f"cannot read {arg}", "command line", "write --key=value")
        else:
            kind = find(key, known, renamed, arg)
            if not equals and bool not in allowed(kind)[0]:
                raise UserError(f"{key} has no value", arg, f"write --{key}=value, without spaces")
            values[key] = check(key, from_text(text if equals else "True", kind), kind, arg)
    given = dict(values)
    for path in files:
        values |= read_file(path, values | scope(values), known, renamed) | given
    return values, words


def build(cls, values):
    """`cls` from those of the values that are its fields; its own ValueError becomes a UserError."""
    check_ranges(cls, values)
    try:
        return cls(**{key: values[key] for key in keys(cls) if key in values})
    except ValueError as error:
        what, _, fix = str(error).partition(": ")
        raise UserError(what, cls.__name__, fix or "change one of these values") from None


def help_text(usage, classes, defaults):
    """The usage and every key once, with its default, its words and its trailing comment."""
    lines = [usage.strip(), "", "--debug shows where an error comes from"]
    for i, cls in enumerate(classes):
        comments = dict(
            re.findall(r"^    (\w+):[^#\n]*#\s*(.*)$", inspect.getsource(cls), re.MULTILINE)
        )
        lines += ["", f"{cls.__name__}:"]
        for key, kind in keys(cls).items():
            if key not in keys(*classes[:i]):
                choice = f"({'|'.join(allowed(kind)[1])})".replace("()", "")
                lines.append(
                    f"  --{key}={defaults.get(key, repr(getattr(cls, key)))}".ljust(38)
                    + f" {comments.get(key, '')} {choice}".rstrip()
                )
    return "\n".join(lines)
