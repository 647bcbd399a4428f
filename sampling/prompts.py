"""The texts that the user gives, on the command line or in a file."""

import sys

from common.errors import UserError


def read_text(path, what, fix):
    """The text of a utf-8 file. Raises UserError, which calls it `what`, if it cannot be read."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        where = path or "no path is given"
        raise UserError(f"cannot read the {what}: {error.strerror}", where, fix) from None
    except UnicodeDecodeError as error:
        what = f"the {what} is not utf-8: byte {error.start}"
        raise UserError(what, path, "save it as utf-8") from None


def read_prompts(start, path=""):
    """The prompts, a list of texts: the lines of the file at `path`, where an empty line is an
    empty prompt; else `start`, or the content of the file that FILE:name names."""
    if path:
        text = read_text(path, "prompts", "check the path after --prompts=")
        if not text:
            raise UserError("the file of prompts is empty", path, "write a prompt on each line")
        return text.removesuffix("\n").split("\n")
    if start.startswith("FILE:"):
        return [read_text(start.removeprefix("FILE:"), "prompt", "check the path after FILE:")]
    return [start]


def fit(tokenizer, text, where, skip_unknown=False):
    """`text`, if the tokenizer has all its characters. Otherwise, with skip_unknown, the text
    without the unknown characters, which a printed note lists; without it, raises UserError, which
    names the first of them, its position and `where`."""
    try:
        tokenizer.encode(text)
        return text
    except UserError as error:
        if not skip_unknown:
            what, place, fix = error.parts
            place = f"{place}, {where}" if where else place
            raise UserError(what, place, f"{fix}; or drop it with --skip_unknown") from None

    unknown = sorted(c for c in set(text) if not has(tokenizer, c))
    count = sum(text.count(c) for c in unknown)
    named = " ".join(repr(c) for c in unknown[:10])
    note = f"{count} characters are not in the vocabulary and left out: {named}"
    print(f"{where or 'the prompt'}: {note}", file=sys.stderr, flush=True)
    return "".join(c for c in text if c not in unknown)


def has(tokenizer, c):
    """Whether the tokenizer can encode the character c."""
    try:
        tokenizer.encode(c)
        return True
    except UserError:
        return False
