"""Texts that a person gives: from the command line or a file, and what of them a vocabulary has."""

import sys

from common.errors import UserError


def read_text(path, what, fix):
    """The text of a utf-8 file; UserError naming `what` if it cannot be read."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise UserError(f"cannot read the {what}: {error.strerror}", path, fix) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"the {what} is not utf-8: byte {error.start}", path, "save it as utf-8"
        ) from None


def read_prompts(start, path=""):
    """The prompts: each line of the file at `path`, where an empty line is an empty prompt; or `start` itself, or what
    is in the file that FILE:path names."""
    if path:
        text = read_text(path, "prompts", "check the path after --prompts=")
        if not text:
            raise UserError("the file of prompts is empty", path, "write a prompt on each line")
        return text.removesuffix("\n").split("\n")
    if start.startswith("FILE:"):
        return [read_text(start.removeprefix("FILE:"), "prompt", "check the path after FILE:")]
    return [start]


def fit(tokenizer, text, where, skip_unknown=False):
    """`text` if the tokenizer has all its characters; without those it lacks, saying so once, with skip_unknown; else
    UserError naming the first of them and its place."""
    try:
        tokenizer.encode(text)
        return text
    except UserError as error:
        if not skip_unknown:
            what, place, fix = error.parts
            raise UserError(
                what,
                f"{place}, {where}" if where else place,
                f"{fix}; or drop it with --skip_unknown",
            ) from None
    unknown = {c for c in set(text) if not has(tokenizer, c)}
    count = sum(c in unknown for c in text)
    print(
        f"{where or 'the prompt'}: {count} characters are not in the vocabulary and left out: {' '.join(map(repr, sorted(unknown)[:10]))}",
        file=sys.stderr,
        flush=True,
    )
    return "".join(c for c in text if c not in unknown)


def has(tokenizer, c):
    try:
        tokenizer.encode(c)
        return True
    except UserError:
        return False
