"""
Configuration for every script of this repo:

    python train.py config/llama_shakespeare.py --batch_size=8 --eval_only

A key is a field of a dataclass, declared once: name, type, range, default, comment. A config file
is Python that assigns keys. The command line overrides it, and is parsed first, so that a config
file can depend on its values: `if device == "cpu": n_layer = 4`.

--help is made from the dataclass too. The text of a key is its trailing comment, or the lines `#:`
above it. Any other comment line is the heading of the keys below it; keys under `# rare: ...` are
shown by --help=all only. A class may list the keys that come first in OFTEN.
"""

import ast
import contextlib
import difflib
import inspect
import io
import json
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

    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    most: float = math.inf

    def __contains__(self, value):
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self):
        low = f"{self.least} or more" if self.least > -math.inf else f"a number above {self.above}"
        if self.below < math.inf:
            return f"{low}, below {self.below}"
        return low if self.most == math.inf else f"{low}, at most {self.most}"


PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]
Fraction = Annotated[float, Range(least=0, below=1)]  # 0 <= x < 1
Share = Annotated[float, Range(above=0, most=1)]  # 0 < x <= 1
Probability = Annotated[float, Range(least=0, most=1)]  # 0 <= x <= 1


@dataclass(frozen=True)
class Words:
    """The type of a key whose values are words of a dictionary: `norm: Words(NORM) = "rmsnorm"`.
    The dictionary is read at each use, so that words may be added later. several: the key takes a
    comma-separated list of words."""

    dictionary: dict
    several: bool = False

    def __contains__(self, value):
        words = str(value).split(",") if self.several else [value]
        return all(type(word) is str and word in self.dictionary for word in words)


def keys(*classes):
    """{key: type} of the fields of some dataclasses."""
    hints = (typing.get_type_hints(cls, include_extras=True) for cls in classes)
    return {key: kind for some in hints for key, kind in some.items()}


def allowed(kind):
    """(types, words, Range or None) that a key of type `kind` takes. If there are words, a text
    value must be one of them."""
    plain, words, limits = [], [], None
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    for part in typing.get_args(kind) if is_union else (kind,):
        if isinstance(part, Words):
            words += part.dictionary
        elif typing.get_origin(part) is typing.Literal:
            words += typing.get_args(part)
        elif typing.get_origin(part) is Annotated:
            plain.append(part.__origin__)
            limits = part.__metadata__[0]
        else:
            plain.append(part)
    return plain + ([str] if words else []), words, limits


def from_text(text, kind):
    """The Python value that a text on the command line stands for. It stays a text if the key takes
    any text."""
    kinds, words, _ = allowed(kind)
    is_none = text == "None" and types.NoneType in kinds
    if text in words or str in kinds and not words and not is_none:
        return text  # a word such as none is a word, not None
    for read in (ast.literal_eval, json.loads):  # the errors' last two: nested too deep
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return read(text.capitalize() if text in ("true", "false", "none") else text)
    return text


def to_number(key, value, kinds, where):
    """A number as the int or float that a key of these types takes, if that changes no digit."""
    try:
        number = float(value)
    except OverflowError:
        raise UserError(f"{key} is too large", where, "give a smaller number") from None
    if not math.isfinite(number):
        raise UserError(f"{key} cannot be {number}", where, "give a finite number")
    is_int = isinstance(value, numbers.Integral)
    if float in kinds and not (is_int and int in kinds):
        return number
    return int(value) if is_int or int in kinds and number.is_integer() else number


def check(key, value, kind, where):
    """`value` converted to what `kind` takes (1 to a float, 1e3 to an int). Raises UserError if
    that is impossible or out of range, naming the key and what it takes."""
    kinds, words, limits = allowed(kind)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # numpy's numbers too
        value = to_number(key, value, kinds, where)
    if type(value) is str and "\0" in value:  # no path can contain one
        raise UserError(f"{key} contains a NUL character", where, "leave it out")

    fits = value in kind if isinstance(kind, Words) else value in words
    if words and not fits and type(value) not in set(kinds) - {str}:
        choices = words + ["True", "False"] if bool in kinds else words
        raise UserError(f"{key} cannot be {value!r}", where, "choose from " + ", ".join(choices))
    if type(value) not in kinds:
        expected = " or ".join(kind.__name__.replace("NoneType", "None") for kind in kinds)
        fix = "--help shows every key with its default"
        raise UserError(f"{key} must be {expected}, not {value!r}", where, fix)
    if limits and type(value) in (int, float) and value not in limits:
        raise UserError(f"{key}={value} is out of range", where, f"give {limits}")
    return value


def find(key, known, renamed, where):
    """The type of a key. Raises UserError, with the new name or the most similar key, if the key is
    unknown."""
    if key in known:
        return known[key]
    if key in renamed:
        raise UserError(f"{key} is no key here", where, renamed[key])
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
        raise UserError(what, path, "check the path; config/ holds examples") from None
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
    except (Exception, SystemExit) as error:  # even SystemExit is a mistake in the file
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
    """({key: value}, other words) of a command line and of the config files it names. The keys are
    the fields of `classes`. scope(values) returns names that a config file may read, too, such as
    the detected device. renamed: {old key: what to use instead}. defaults: those that --help prints
    instead of the fields'."""
    print_help(argv, usage, classes, defaults)
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
    """An instance of `cls` from the values that are its fields. Raises UserError if a value does
    not fit its key, or `cls` itself raises ValueError."""
    where = cls.__name__
    kinds = keys(cls)
    fitting = {key: check(key, values[key], kinds[key], where) for key in kinds if key in values}
    try:
        return cls(**fitting)
    except ValueError as error:
        what, _, fix = str(error).partition(": ")
        raise UserError(what, where, fix or "change one of these values") from None


# ---------------------------------------------------------------- --help

KEY_WIDTH, WIDTH = 34, 80  # characters of a key with its default, and of a line
WRAP = {"break_on_hyphens": False, "break_long_words": False}
OFTEN, RARE = "most used", "rare: "  # the first heading; how one of --help=all begins


def print_help(argv, usage, classes, defaults=None):
    """Print the help and exit if a command line asks for it: all keys for --help=all."""
    if {"--help", "-h", "--help=all"} & {*argv}:
        print(help_text(usage, classes, defaults, everything="--help=all" in argv))
        sys.exit(0)


def folded_usage(usage):
    """The docstring of a script in lines of at most WIDTH characters."""
    lines = []
    for block in usage.strip().split("\n\n"):
        is_prose = "\n " not in f"\n{block}"
        for line in [" ".join(block.split())] if is_prose else block.splitlines():
            indent = " " * (0 if is_prose else 8)
            lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, **WRAP)
        lines.append("")
    return lines[:-1]


def help_text(usage, classes, defaults=None, everything=False):
    """The usage, and every key once under its heading: its default, its text, and its words or its
    range. The keys in OFTEN of a class come first. everything: print the rare keys too."""
    often = [key for cls in classes for key in getattr(cls, "OFTEN", ())]
    groups = {OFTEN: dict.fromkeys(often, [])}  # {heading: {key: lines}}
    texts = {key: text for cls in reversed(classes) for key, text in texts_of(cls).items()}
    for key, kind in keys(*classes).items():
        heading, text, default = texts[key]
        kinds, words, limits = allowed(kind)
        words += ["True", "False"] * (bool in kinds and len(words) > 0)
        choice = ", or ".join(filter(None, ("| ".join(words), str(limits or ""))))
        lines = help_lines(
            f"  --{key}={(defaults or {}).get(key, default)}",
            f"{text} {f'({choice})' if choice else ''}".strip(),
        )
        groups.setdefault(OFTEN if key in often else heading, {})[key] = lines

    rare = [key for name in groups if name.startswith(RARE) for key in groups[name]]
    lines = folded_usage(usage)
    for heading, group in groups.items():
        if group and (everything or not heading.startswith(RARE)):
            lines += ["", f"{heading.removeprefix(RARE)}:", *sum(group.values(), [])]
    if rare and not everything:
        more = f"--help=all shows {len(rare)} more: {', '.join(rare)}"
        lines += ["", *textwrap.wrap(more, WIDTH)]
    return "\n".join([*lines, "", "--debug shows where an error comes from"])


def help_lines(head, text):
    """The lines of one key: `head`, with the text beside it, or below it if `head` is too wide."""
    column = " " * (KEY_WIDTH + 1)
    wrapped = textwrap.wrap(text, WIDTH - len(column), **WRAP)
    body = [column + line.replace("| ", "|") for line in wrapped] or [""]
    if len(head) > KEY_WIDTH:
        return [head, *body] if text else [head]
    return [(head.ljust(len(column)) + body[0][len(column) :]).rstrip(), *body[1:]]


def texts_of(cls):
    """{key: (heading, text, default)} of the fields of a dataclass, from the comments in its
    source."""
    source = textwrap.dedent(inspect.getsource(cls))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    texts, heading, last = {}, cls.__name__, 0
    for node in ast.parse(source).body[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        text = []
        for line in range(last + 1, node.end_lineno + 1):
            comment = comments.get(line, "")
            if comment.startswith("#:") or line >= node.lineno:
                text.append(comment.lstrip("#: "))
            elif comment:
                heading = comment.lstrip("# ")
        key, last = node.target.id, node.end_lineno
        texts[key] = heading, " ".join(filter(None, text)), repr(getattr(cls, key))
    return texts
