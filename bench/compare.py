"""
Compare runs: a table of their losses and costs, what differs in their configurations, and their
curves against steps, tokens and seconds.

    python bench/compare.py out-a out-b
    python bench/compare.py out-* --out=figures/sizes
    python bench/compare.py out-* --watch     # until the last run has ended, or Ctrl-C

Prints the table, and writes compare.png and compare.html into the current folder, or OUT.png and
OUT.html. The page is one file that opens from disk. A file of that name that this command did not
write is never replaced. The run folders are only read.
"""

import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import repo_root  # noqa: F401 (puts the repo's root on the path)

from bench.comparison.page import OURS, contents, for_terminal
from bench.comparison.runs import read_run
from common.configurator import build, load
from common.errors import UserError, run
from common.files import write

RENEWED = 10  # seconds
HEAD = 4096  # bytes at the beginning of a file that say whose it is


@dataclass
class CompareConfig:
    out: str = "compare"  # the files are OUT.png and OUT.html
    watch: bool = False  # write them again every 10 seconds until all runs have ended


def outputs(out):
    """{suffix: path} of the files to write. Raises UserError if one cannot be written, or exists
    and is not ours."""
    if not Path(out).name:
        raise UserError("no name for the files", f"out={out!r}", "write --out=compare")
    stem = Path(out.removesuffix(".png").removesuffix(".html"))
    if stem.is_dir():
        stem = stem / "compare"
    if not stem.parent.is_dir():
        raise UserError("no such folder", stem.parent, "make it, or choose another --out")
    paths = {suffix: stem.with_name(stem.name + suffix) for suffix in (".png", ".html")}
    for path in paths.values():
        if os.path.lexists(path) and not is_ours(path):
            fix = "move it away, or choose another name with --out=NAME"
            raise UserError("this file was not written by compare.py", path, fix)
    return paths


def is_ours(path):
    """Whether a file was written by this command: both kinds say so in their first bytes."""
    try:
        with open(path, "rb") as file:
            return OURS.encode() in file.read(HEAD)
    except OSError:
        return False


def names_of(folders):
    """{folder: name}: its last component, or the whole path where two have the same. A folder that
    is given twice counts once."""
    unique = {os.path.realpath(folder): Path(folder) for folder in reversed(folders)}
    folders = list(reversed(unique.values()))
    lasts = [folder.resolve().name for folder in folders]
    return {
        folder: last if lasts.count(last) == 1 else str(folder)
        for folder, last in zip(folders, lasts, strict=True)
    }


def read_runs(folders):
    """([Run], remarks) of run folders. A folder that is no run is left out with a remark. Raises
    UserError if none is left."""
    runs, remarks = [], []
    for folder, name in names_of(folders).items():
        try:
            runs.append(read_run(folder, name))
        except UserError as error:
            if len(folders) == 1:
                raise
            remarks.append(f"{folder} is left out: {error.parts[0]}.")
    if not runs:
        what = f"no run in {len(folders)} folders: {remarks[0]}"
        raise UserError(what, "command line", "name the out_dir of two or more runs")
    for made in runs:
        remarks += made.remarks
    return runs, remarks


def update(folders, paths, command, renewed=None):
    """Read the runs and write both files. Returns (runs, remarks)."""
    runs, remarks = read_runs(folders)
    for suffix, content in contents(runs, remarks, command, renewed).items():
        write(paths[suffix], content)
    return runs, remarks


def watch(folders, paths, command):
    """Renew both files, and the table where it has changed, until all runs have ended. Returns
    them."""
    shown = None
    try:
        while True:
            runs, remarks = update(folders, paths, command, RENEWED)
            progress = [(made.name, made.last_step, len(made.steps)) for made in runs]
            if progress != shown:
                clear = "\033[2J\033[H" if sys.stdout.isatty() else ""
                print(clear + for_terminal(runs, remarks), flush=True)
            shown = progress
            if all(made.finished for made in runs):
                return runs
            time.sleep(RENEWED)
    finally:
        update(folders, paths, command)  # a page that no longer loads itself again


def main(argv):
    values, folders = load(argv, [CompareConfig], __doc__)
    config = build(CompareConfig, values)
    if not folders:
        raise UserError("no run folders", "command line", "type python bench/compare.py OUT OUT2")
    paths = outputs(config.out)
    command = shlex.join(["python", "bench/compare.py", *argv])
    if config.watch:
        runs = watch(folders, paths, command)
    else:
        runs, remarks = update(folders, paths, command)
        print(for_terminal(runs, remarks))
    drawn = any(len(made.steps) for made in runs)
    written = [str(path) for suffix, path in paths.items() if drawn or suffix == ".html"]
    print("\n" + ", ".join(written))


if __name__ == "__main__":
    run(main)
