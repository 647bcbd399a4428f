"""
How a script starts and ends.

Exit status: 0 success, 2 a mistake by the user, 1 a failure while running, 128 + n after signal n
(130: Ctrl-C). An error is one line on stderr: `error: <what> (<key or file>): <what to do>`.
"""

import errno
import os
import signal
import sys

# Nothing else is imported here: until `end_at_once` is called, Ctrl-C prints a traceback.

# What to install for a module whose package has another name, a partner, or one right version.
PACKAGES = {
    "faiss": "faiss-cpu",
    "ray": "ray==2.60.0",
    "starlette": "starlette uvicorn",
    "uvicorn": "starlette uvicorn",
}
WRAP = {"break_on_hyphens": False, "break_long_words": False}  # of textwrap
DEBUG = ("--debug", "--debug=True")
BROKEN_PIPE = 141  # the exit status of a process that SIGPIPE ends
# Control characters, those that reverse the text that follows, and halves of a character.
OBEYED = "[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
NO_MEMORY = "alloc_cpu|can.t allocate memory|out of memory|bad_alloc|STATUS_ALLOC_FAILED"
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set together, or not at all


class UserError(Exception):
    """A mistake the user can fix: what is wrong, where (key, file or value), and what to do."""

    status = 2  # the exit status of the script

    def __init__(self, what, where, fix):
        super().__init__(f"{what} ({where}): {fix}")
        self.parts = (what, where, fix)


class Failure(UserError):
    """A failure while running, described in the same form."""

    status = 1


def printable(text, keep="", figure=False):
    """Make a text that others wrote, such as a name, a key or what a model writes, safe to show.
    Characters that a terminal obeys become Python's escapes, except those in `keep`. figure: it is
    for matplotlib, which would set what stands between two $ as a formula."""
    import re

    def escape(found):
        return found[0] if found[0] in keep else repr(found[0])[1:-1]

    text = re.sub(OBEYED, escape, text)
    return text.replace("$", r"\$") if figure else text


def one_line(error, most=160):
    """The first `most` characters of an error's message, without line breaks."""
    try:
        text = str(error)
    except Exception:  # of a class of others, such as one in a config file
        text = "an error without a text"
    return printable(" ".join(text.split()))[:most]


def nearest(name, known):
    """What to do about a name that is not known: a question with the most similar one, or "".
    Nearly any name resembles one of two letters."""
    import difflib

    if len(name) < 3:
        return ""
    alike = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(name.casefold(), alike, n=1)
    return f"did you mean {alike[near[0]]}?" if near else ""


def folded(text, indent=2, stream=None):
    """Prepare a line for a stream (None: stdout): without control characters. On a terminal it is
    folded between words, but not in a `command`, which can be pasted, with `indent` spaces before
    each further line. Elsewhere it stays one line, so that programs can search it."""
    from common.commands import runnable

    text = runnable(printable(text))
    if not (stream or sys.stdout).isatty():
        return text
    import shutil
    import textwrap

    width = max(2 * indent, shutil.get_terminal_size().columns)
    parts = text.split("`")
    parts[1::2] = [command.replace(" ", "\0") for command in parts[1::2]]
    text = textwrap.fill("`".join(parts), width, subsequent_indent=" " * indent, **WRAP)
    return text.replace("\0", " ")


def tell(text, stream=None):
    """Print a text to a stream (None: stderr). Returns the OSError of a stream that cannot be
    written: its pipe or terminal is closed, its disk is full. All that follows is then discarded,
    since Python would try again on exit, and print a traceback."""
    stream = stream or sys.stderr
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        discard(stream)
        return error
    return None


def discard(stream):
    """Let a stream write to /dev/null, also what it still holds."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:  # noqa: SIM105 (contextlib is slow to import)
        os.dup2(nowhere, stream.fileno())
    except OSError:  # it has no descriptor
        pass
    os.close(nowhere)


def ranks_of_torchrun():
    """(rank, number of ranks) of this process, from the environment that torchrun sets. None if its
    variables are missing, or contradict each other."""
    numbers = [os.environ.get(name, "") for name in TORCHRUN if name != "MASTER_ADDR"]
    if "MASTER_ADDR" not in os.environ or not all(text.isdecimal() for text in numbers):
        return None
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    return (rank, size) if rank < size else None


def speaks():
    """Whether this process prints messages: of the processes of torchrun, only rank 0 does."""
    ranks = ranks_of_torchrun()
    return ranks is None or ranks[0] == 0


def end_at_once():
    """Let Ctrl-C end the process at once, without a traceback, until `run` is called. A script
    calls this before its other imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored by the shell
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(main):
    """Run `main(argv)` as a script and exit with its status, or with the status of the error that
    it raises. `--debug` prints the traceback as well."""
    argv = [arg for arg in sys.argv[1:] if arg not in DEBUG]
    if sys.stderr is None:  # closed by the caller; print(file=None) writes to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)

    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by `end_at_once`
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if sys.stdout is None:
            fix = "redirect it to a file, or to /dev/null"
            raise UserError("standard output is closed", "stdout", fix)
        sys.stdout.reconfigure(errors="replace")  # "?" for a character that cannot be shown
        status = main(argv) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        tell("stopped")
        status = 130
    except BrokenPipeError:  # nothing reads our output any more, as in `| head`
        status = BROKEN_PIPE
    except Exception as error:
        status = fail(error)

    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            discard(stream)
    if "RANK" in os.environ:  # gloo's threads can abort an interpreter that shuts down normally
        os._exit(status)
    sys.exit(status)


def fail(error):
    """Print the message of an exception that ends a script. Returns the exit status."""
    if any(arg in DEBUG for arg in sys.argv):
        import traceback

        tell(printable(traceback.format_exc(), keep="\n"))
    status, message = explained(error)
    if status == 1 or speaks():  # every rank finds the same mistake, so only one prints it
        tell(folded(f"error: {message}", 7, sys.stderr))
    return status


def explained(error):
    """(exit status, message of one line) for an exception that ends a script."""
    text = one_line(error, None)
    if isinstance(error, UserError):
        return error.status, text
    if is_out_of_memory(error):
        fix = "use a smaller model, batch or context (--n_layer, --batch_size, --context, ...)"
        return 1, f"out of memory (memory): {fix}"
    of_output = isinstance(error, OSError) and not error.filename
    if of_output and error.errno in (errno.ENOSPC, errno.EIO):  # EIO: its terminal is closed
        return 1, f"{error.strerror} (output): free the disk, or write elsewhere"
    if isinstance(error, ModuleNotFoundError):
        packages = PACKAGES.get(error.name, error.name)
        return 2, f"{error.name} is not installed (package): pip install {packages}"
    return 1, f"{text} ({type(error).__name__}): run again with --debug to see where"


def is_out_of_memory(error):
    """Whether an exception of Python, NumPy or torch means that there is too little memory."""
    import re

    if isinstance(error, RuntimeError):
        return re.search(NO_MEMORY, str(error)) is not None
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM


# ---------------------------------------------------------------- signals


class StopSignals:
    """In the block of `with StopSignals() as stops:` SIGINT, SIGTERM and SIGHUP raise
    KeyboardInterrupt. After stops.wait(), until stops.at_once(), they are only remembered: the last
    one is `stops.number`. runtime.StopRequest only remembers."""

    def __init__(self):
        self.waiting = False
        self.number = None
        self.handlers = {}  # {signal: its handler before}
        self.process = os.getpid()

    def __enter__(self):
        import threading

        if threading.current_thread() is threading.main_thread():  # no other can have handlers
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # ignored, as by nohup
                    self.handlers[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, *error):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def note(self, number, frame):
        """The handler. It prints nothing, since the stream may be closed."""
        if os.getpid() != self.process:  # a worker that a library forked, and ends by a signal
            os._exit(128 + number)
        self.number = number
        if not self.waiting:
            raise KeyboardInterrupt

    def wait(self):
        """Remember signals instead of raising."""
        self.waiting = True

    def at_once(self):
        """Raise KeyboardInterrupt at a signal, and now if there was one."""
        self.waiting = False
        if self.number is not None:
            raise KeyboardInterrupt
