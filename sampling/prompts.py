"""The prompts that a user gives, and what is printed beside the texts."""

import os
import re
import shutil
import sys
from datetime import datetime

from common.errors import UserError, folded, one_line, printable


def note(text):
    """Print a line to stderr."""
    print(folded(text, 2, sys.stderr), file=sys.stderr, flush=True)


def shown(text):
    """A model's text, ready to print: on a terminal its control characters are escaped."""
    return printable(text, keep="\n\t") if sys.stdout.isatty() else text


def show(text):
    """Print a piece of a text while it is written."""
    print(shown(text), end="", flush=True)


def show_cut(lines):
    """Print lines, cut to the width of the terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(line[:width] for line in lines))


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
        path = os.path.expanduser(start.removeprefix("FILE:"))
        return [read_text(path, "prompt", "check the path after FILE:")]
    return [start]


def mistake(tokenizer, text):
    """The UserError with which the tokenizer refuses a text, or None."""
    try:
        tokenizer.encode(text)
    except UserError as error:
        return error
    return None


def fit(tokenizer, text, where, skip_unknown=False):
    """`text` as the tokenizer can encode it: with skip_unknown, without unknown characters, which a
    note lists. Otherwise raises UserError, which names the first of them and `where`."""
    error = mistake(tokenizer, text)
    if error is None:
        return text
    if not skip_unknown:
        what, place, fix = error.parts
        if where:
            place = f"{place}, {where}"
        raise UserError(what, place, f"{fix}; or drop it with --skip_unknown")

    unknown = sorted(c for c in set(text) if mistake(tokenizer, c))
    count = sum(text.count(c) for c in unknown)
    named = " ".join(repr(c) for c in unknown[:10])
    left_out = f"not in the vocabulary and left out ({count}): {named}"
    note(f"{where or 'the prompt'}: {left_out}")
    return "".join(c for c in text if c not in unknown)


def chat_prompt(tokenizer, messages):
    """The text of a conversation up to where the model's answer begins, by the model's own chat
    template. messages: [{"role": "user" or "assistant", "content": text}, ...]. Raises UserError
    if the model has no template, or the template fails."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # here, since few prompts need it

    chat = getattr(tokenizer, "chat", None)
    if not chat:
        fix = "leave it out, and write the prompt as in the model's training"
        raise UserError("this model has no chat template", "--chat", fix)

    def refuse(message):
        raise ValueError(message)

    options = {"trim_blocks": True, "lstrip_blocks": True}  # as in transformers
    room = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"], **options)
    # jinja does not know {% generation %}, which marks the assistant's words for training.
    text = re.sub(r"(\{%-?\s*)generation\b", r"\1if true", chat["template"])
    text = re.sub(r"(\{%-?\s*)endgeneration\b", r"\1endif", text)
    facts = {"messages": messages, "tools": None, "documents": None, "raise_exception": refuse}
    # Always the date that Llama 3's templates know, so that the same command writes the same text.
    facts |= {"add_generation_prompt": True, "strftime_now": datetime(2024, 7, 26).strftime}
    try:
        return room.from_string(text).render(chat | facts)
    except Exception as error:  # it is a program of somebody else's
        what = f"the model's chat template fails: {type(error).__name__} {one_line(error)}"
        raise UserError(what, "--chat", "leave it out, or write other messages") from None
