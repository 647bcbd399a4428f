"""How a script ends: exit 0 when done, 2 on a mistake of the user's, 1 on a failure while running; an error is one
line, `error: <what> (<key or file>): <what to do>`."""

import os
import sys
import traceback


class UserError(Exception):
    """A mistake the user can mend: what was wrong, where (key, file or value), and what to do."""

    status = 2

    def __init__(self, what, where, fix):
        super().__init__(f"{what} ({where}): {fix}")
        self.parts = what, where, fix


class Failure(UserError):
    """What went wrong while running, told in the same form."""

    status = 1


def run(main):
    """Run `main(argv)` as a script: exit 0 when done, 2 on a user's mistake, 1 on a failure while
    running. An error is one line on stderr; `--debug` adds the traceback."""
    debug = [arg for arg in sys.argv[1:] if arg.partition("=")[0] == "--debug"]
    sys.stdout.reconfigure(
        errors="replace"
    )  # a terminal that cannot show a character shows a question mark
    try:
        status = main([arg for arg in sys.argv[1:] if arg not in debug]) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        status = 130
    except BrokenPipeError:  # whoever read our output has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except Exception as error:
        if debug and not debug[0].lower().endswith("=false"):
            traceback.print_exc()
        status = getattr(error, "status", 1)
        where = (
            ""
            if isinstance(error, UserError)
            else f" ({type(error).__name__}): run again with --debug to see where"
        )
        if (
            status == 1 or os.environ.get("RANK", "0") == "0"
        ):  # all ranks find the same mistake: one tells
            print(f"error: {' '.join(str(error).split())}{where}", file=sys.stderr)
    if (
        "RANK" in os.environ
    ):  # a rank of torchrun: gloo's threads can abort an interpreter that takes itself down
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def one_line(error):
    return " ".join(str(error).split())[:160]
