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
from dataclasses import dataclass, field
from typing import Annotated

from common import files
from common.commands import ROOT, WIDTH, runnable
from common.errors import WRAP, UserError, nearest, one_line, speaks


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
PathName = Annotated[str, None]  # a path, or a name that may be one: ~ is the home folder


@dataclass(frozen=True)
class Words:
    """The type of a key whose values are words of a dictionary: `norm: Words(NORM) = "rmsnorm"`.
    The dictionary is read at each use, so words may be added later. several: the key takes a
    comma-separated list of words."""

    dictionary: dict
    several: bool = False

    def __contains__(self, value):
        words = str(value).split(",") if self.several else [value]
        return all(type(word) is str and word in self.dictionary for word in words)


def keys(*classes):
    """{key: type} of the fields of some dataclasses."""
    kinds = {}
    for cls in classes:
        kinds |= typing.get_type_hints(cls, include_extras=True)
    return kinds


def allowed(kind):
    """(types, words, Range or None) that a key of type `kind` takes. Without words: any text."""
    parts = [kind]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        parts = typing.get_args(kind)
    plain = []
    words = []
    limits = None
    for part in parts:
        if isinstance(part, Words):
            words += part.dictionary
        elif typing.get_origin(part) is typing.Literal:
            words += typing.get_args(part)
        elif typing.get_origin(part) is Annotated:
            plain.append(part.__origin__)
            limits = part.__metadata__[0]
        else:
            plain.append(part)
    if words:
        plain.append(str)
    return plain, words, limits


def from_text(text, kind):
    """Convert the text of a command-line value to a Python value, unless the key takes any text."""
    kinds, words, _ = allowed(kind)
    is_none = text == "None" and types.NoneType in kinds
    takes_any_text = str in kinds and not words
    if text in words or (takes_any_text and not is_none):
        return text  # a word such as none is a word, not None
    if list in kinds and text.lstrip("-.")[:1].isdigit():  # 0.5,1,2
        text = f"[{text}]"
    if text in ("true", "false", "none"):
        text = text.capitalize()
    for read in (ast.literal_eval, json.loads):  # the last two errors: it is nested too deep
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return read(text)
    return text


def to_number(key, value, kinds, where):
    """Convert a number to one of these types, int or float, if the conversion is exact."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if abs(number) >= 2**63 and (float not in kinds or isinstance(value, int)):
        raise UserError(f"{key} is too large", where, "give a smaller number")
    if not math.isfinite(number):
        raise UserError(f"{key} cannot be {number}", where, "give a finite number")
    if float in kinds and not (int in kinds and isinstance(value, numbers.Integral)):
        return number
    return int(value) if number.is_integer() else number


def check(key, value, kind, where, fix="--help shows every key"):
    """Return `value`, converted to a type that `kind` takes (1 to a float, 1e3 to an int). Raises
    UserError if that is impossible (it names `fix`), or if the value is out of range."""
    kinds, words, limits = allowed(kind)
    if isinstance(value, str | os.PathLike) and PathName in (kind, *typing.get_args(kind)):
        value = os.path.expanduser(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # numpy's numbers too
        value = to_number(key, value, kinds, where)
    if type(value) is str and "\0" in value:  # no path can contain one
        raise UserError(f"{key} contains a NUL character", where, "remove it")

    is_word = value in (kind if isinstance(kind, Words) else words)
    needs_no_word = type(value) in kinds and type(value) is not str  # such as True
    if words and not is_word and not needs_no_word:
        choice = f"choose from {choice_text(kind).replace('| ', ', ')}"
        raise UserError(f"{key} cannot be {value!r}", where, choice)
    if type(value) not in kinds:
        expected = " or ".join(cls.__name__.replace("NoneType", "None") for cls in kinds)
        raise UserError(f"{key} must be {expected}, not {value!r}", where, fix)
    if limits and type(value) in (int, float) and value not in limits:
        raise UserError(f"{key}={value} is out of range", where, f"give {limits}")
    return value


def find(key, known, renamed, where, more=""):
    """The type of a key. Raises UserError with the new or the most similar key, and with `more`."""
    if key in known:
        return known[key]
    if key in renamed:
        raise UserError(f"{key} is not a key here", where, renamed[key])
    fix = nearest(key, known) or "--help lists the keys"
    raise UserError(f"unknown key {key}", where, fix + more)


def find_file(path):
    """The path of a config file. If it is not in the current directory, it may be in the repo."""
    in_repo = ROOT / path
    return str(in_repo) if os.path.isfile(in_repo) and not os.path.exists(path) else path


def compile_file(path):
    """(compiled code, {assigned name: line}) of a config file. Raises UserError if unreadable."""
    try:
        with open(path, encoding="utf-8-sig") as file:  # skips the byte order mark of some editors
            tree = ast.parse(file.read())
        code = compile(tree, path, "exec")
    except OSError as error:
        what = f"cannot read the config file: {error.strerror}"
        ours = [str(file.relative_to(ROOT)) for file in ROOT.glob("config/**/*.py")]
        near = "" if os.path.exists(path) else nearest(path, ours)
        raise UserError(what, path, near or "check the path; config/ holds examples") from None
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # also: not utf-8
        what = getattr(error, "msg", None) or one_line(error) or "it is nested too deep"
        line = getattr(error, "lineno", None) or 1
        raise UserError(what, f"{path}:{line}", "a config file is Python in utf-8") from None

    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return code, {name.id: name.lineno for name in names if isinstance(name.ctx, ast.Store)}


def read_file(path, scope, known, renamed):
    """The {key: value} that a config file assigns. It may read the names in `scope`."""
    code, assigned = compile_file(path)
    names = {"__file__": path} | scope
    try:
        exec(code, names)
    except (Exception, SystemExit) as error:  # even SystemExit is a mistake in the file
        frames = traceback.extract_tb(error.__traceback__)
        line = [frame.lineno for frame in frames if frame.filename == path][-1]
        what = f"{type(error).__name__}: {one_line(error)}"
        fix = "correct this line, or give the file to the script that it is for"
        raise UserError(what, f"{path}:{line}", fix) from None

    old = [key for key in assigned if key in names and key in renamed and key not in known]
    if len(old) > 1:  # as in a config of nanoGPT: name all at once
        advice = "; ".join(f"{key} (line {assigned[key]}): {renamed[key]}" for key in old)
        raise UserError(f"{', '.join(old)} are not keys here", path, advice)

    values = {}
    more = " (is this file for another script? start a variable of your own with _)"
    for key, line in assigned.items():
        if key in names and not key.startswith("_"):
            where = f"{path}:{line}"
            values[key] = check(key, names[key], find(key, known, renamed, where, more), where)
    for key in sorted(known.keys() & (names.keys() - assigned.keys())):
        changed = key not in scope or names[key] is not scope[key]
        if changed and not callable(names[key]):  # a function, such as math.log, is no value
            what = f"{key} is set by another file than this, by exec or import"
            raise UserError(what, path, f"name both on the command line: OTHER.py {path}")
    return values


@dataclass(frozen=True)
class Given:
    """Who said what: the values that the user typed, and the values of the config files."""

    typed: dict = field(default_factory=dict)  # {key: value} of the command line alone
    in_files: dict = field(default_factory=dict)  # {key: value} that the config files assign
    files: list = field(default_factory=list)  # the config files, as they were typed
    words: list = field(default_factory=list)  # arguments that are neither a key nor a config file
    texts: dict = field(default_factory=dict)  # {key: "--key=value"} as it was typed

    @property
    def values(self):
        """{key: value} of both. The command line has the last word."""
        return self.in_files | self.typed

    @property
    def arguments(self):
        """The command line, for a command to print."""
        return [*self.files, *self.words, *self.texts.values()]


def load(argv, classes, usage, scope=lambda values: {}, renamed=None, defaults=None):
    """Read a command line and the config files that it names: the only place that reads its
    keys. Returns Given. The keys are the fields of `classes`.

    scope(values) returns more names that a config file may read, such as the detected device.
    renamed: {old key: what to use instead}. defaults: {key: default that --help prints}."""
    print_help(argv, usage, classes, defaults)
    given = Given()
    known = keys(*classes)
    renamed = {"config": "name the file alone, without --config"} | (renamed or {})
    for arg in argv:
        if arg.startswith("-"):
            key, value = parse(arg, known, renamed)
            given.typed[key] = value
            given.texts[key] = arg
        elif arg.endswith(".py"):
            given.files.append(os.path.expanduser(arg))
        else:
            given.words.append(os.path.expanduser(arg))

    for name in given.files:
        path = find_file(name)
        if path != name and speaks():
            files.warn_once(f"{name} is not in this directory: reading {path}", "note")
        names = given.values | scope(given.values)
        given.in_files.update(read_file(path, names, known, renamed))
    return given


def parse(arg, known, renamed):
    """(key, value) of the argument --key=value. Raises UserError if it is something else."""
    key, equals, text = arg.removeprefix("--").partition("=")
    if not arg.startswith("--") or not key:
        raise UserError(f"cannot read {arg}", "command line", "write --key=value")
    kind = find(key, known, renamed, arg)
    if not equals:  # --compile means --compile=True
        if bool not in allowed(kind)[0]:
            raise UserError(f"{key} has no value", arg, f"write --{key}=value, without spaces")
        text = "True"
    return key, check(key, from_text(text, kind), kind, arg)


def build(cls, values):
    """Make an instance of `cls` from those values that are its fields; others are ignored. Raises
    UserError if a value does not fit its key, or if `cls` raises ValueError."""
    where = "configuration"
    fitting = {}
    for key, kind in keys(cls).items():
        if key in values:
            fitting[key] = check(key, values[key], kind, where)
    try:
        return cls(**fitting)
    except ValueError as error:
        what, _, fix = str(error).partition(": ")
        raise UserError(what, where, fix or "change one of these values") from None


# ---------------------------------------------------------------- --help

KEY_WIDTH = 34  # characters of a key with its default
OFTEN = "most used"  # the first heading
RARE = "rare: "  # a heading that only --help=all prints begins with it


def print_help(argv, usage, classes, defaults=None):
    """If a command line asks for help, print it and exit. --help=all prints the rare keys too."""
    everything = "--help=all" in argv
    if everything or "--help" in argv or "-h" in argv:
        print(help_text(usage, classes, defaults, everything))
        sys.exit(0)


def folded_usage(usage):
    """The docstring of a script in lines of at most WIDTH characters. Prose is filled; an indented
    block keeps its lines."""
    lines = []
    for block in usage.strip().split("\n\n"):
        if "\n " in f"\n{block}":
            for line in block.splitlines():
                lines += textwrap.wrap(line, WIDTH, subsequent_indent=" " * 8, **WRAP)
        else:
            lines += textwrap.wrap(" ".join(block.split()), WIDTH, **WRAP)
        lines.append("")
    return lines[:-1]


def help_text(usage, classes, defaults=None, everything=False):
    """The usage, and every key once under its heading. everything: print the rare keys too."""
    groups = help_groups(classes, defaults or {})
    rare = []
    lines = folded_usage(runnable(usage))
    for heading, group in groups.items():
        is_rare = heading.startswith(RARE)
        if is_rare:
            rare += group
        if group and (everything or not is_rare):
            lines += ["", f"{heading.removeprefix(RARE)}:"]
            for lines_of_key in group.values():
                lines += lines_of_key
    if rare and not everything:
        more = f"--help=all shows {len(rare)} more: {', '.join(rare)}"
        lines += ["", *textwrap.wrap(more, WIDTH)]
    lines += ["", "--debug shows where an error comes from"]
    return "\n".join(lines)


def help_groups(classes, defaults):
    """{heading: {key: its lines}} of --help."""
    often = [key for cls in classes for key in getattr(cls, "OFTEN", ())]
    texts = {}
    for cls in classes:
        texts = texts_of(cls) | texts
    groups = {OFTEN: dict.fromkeys(often, [])}
    for key, kind in keys(*classes).items():
        heading, text, default = texts[key]
        if choice := choice_text(kind):
            text = f"{text} ({choice})".strip()
        if key in often:
            heading = OFTEN
        head = f"  --{key}={defaults.get(key, default)}"
        groups.setdefault(heading, {})[key] = help_lines(head, text)
    return groups


def choice_text(kind):
    """The words or the range that a key of type `kind` takes; "" if it takes any value."""
    kinds, words, limits = allowed(kind)
    if words and bool in kinds:
        words += ["True", "False"]
    choices = ["| ".join(words), str(limits or "")]
    return ", or ".join(filter(None, choices))


def help_lines(head, text):
    """The lines of one key: `head`, with the text beside it, or below it if `head` is too wide."""
    indent = KEY_WIDTH + 1
    body = [line.replace("| ", "|") for line in textwrap.wrap(text, WIDTH - indent, **WRAP)]
    lines = [head]
    if body and len(head) <= KEY_WIDTH:
        lines = [head.ljust(indent) + body.pop(0)]
    return lines + [" " * indent + line for line in body]


def texts_of(cls):
    """{key: (heading, text, default)} of the fields of a dataclass, from its source's comments."""
    source = textwrap.dedent(inspect.getsource(cls))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    texts = {}
    heading = "keys"
    last = 0  # the last line of the key before
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
        last = node.end_lineno
        key = node.target.id
        texts[key] = (heading, " ".join(filter(None, text)), repr(getattr(cls, key)))
    return texts
