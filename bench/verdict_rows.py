"""
The runs that bench/verdict.py judges: the rows of .csv, .tsv and .jsonl files, and run folders of
train.py.
"""

import csv
import io
import math
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from common import files
from common.errors import UserError, one_line

DELIMITERS = {".csv": ",", ".tsv": "\t"}
MISSING = ("", "na", "n/a")  # a loss in lower case that is none
SEED = re.compile(r"[-_.](?:seed|s)?[-_]?(\d+)$")  # at the end of the name of a run folder
# What names no setting: a number, a date or a time of day, a truth value, nothing.
NO_NAME = re.compile(r"[-+.]?\d[-+.:/ \detz]*|nan|inf|true|false|", re.IGNORECASE)
KNOWN = "name .csv, .tsv or .jsonl files, or run folders of train.py"


class Run(NamedTuple):
    """A run, or a row of a run's log. Its loss is None where it is missing and infinite where the
    run diverged."""

    arm: str
    setting: str
    seed: str | None  # "" where it is unknown, None where its table has no column of seeds
    loss: float | None
    others: dict  # {column: text} of the file and of the columns that are not named above


def read(given, config):
    """[Run] of the files and run folders of a command line."""
    runs = []
    for name in dict.fromkeys(given.words):
        path = Path(name)
        suffix = path.suffix.lower()
        folder = path.parent if path.name == "rows.jsonl" else path
        if (folder / "sweep.json").exists():
            fix = f"run `python bench/report.py {shlex.quote(str(folder))}`"
            raise UserError("this is a sweep of bench/ablate.py", name, fix)
        if path.is_dir():
            runs.append(run_of_folder(path))
        elif not path.exists():
            raise UserError("no such file or folder", name, "check the path")
        elif suffix in DELIMITERS or suffix == ".jsonl":
            runs += runs_of_table(path, config, given)
        else:
            raise UserError("cannot tell what this is", name, KNOWN)
    return runs


# ---------------------------------------------------------------- tables


def runs_of_table(path, config, given):
    """[Run] of the rows of a .csv, .tsv or .jsonl file."""
    names = {key: getattr(config, f"{key}_column") for key in ("arm", "loss", "seed", "setting")}
    for key in ("seed", "setting"):
        if f"{key}_column" not in given.typed and names[key] in (names["arm"], names["loss"]):
            names[key] = None  # a column of this name holds something else
    for key, name in names.items():
        if name is not None and list(names.values()).count(name) > 1:
            fix = "name another column for one of them"
            raise UserError(f"{name} is the column of two things", f"{key}_column={name}", fix)
    rows = list(rows_of(path))
    if not rows:
        raise UserError("no rows", path, "write a header, and a row for each run")
    columns = list(dict.fromkeys(key for _, row in rows for key in row))
    check_columns(path, names, columns, given)

    runs = []
    for line, row in rows:
        texts = {key: text_of(value) for key, value in row.items()}
        others = {key: text for key, text in texts.items() if key not in names.values()}
        # pandas writes integers as 1.0, 2.0 where the column has gaps.
        seed = texts.get(names["seed"], "").removesuffix(".0")
        found = Run(
            arm=texts.get(names["arm"], ""),
            setting=texts.get(names["setting"], ""),
            seed=seed if names["seed"] in columns else None,
            loss=loss_of(texts.get(names["loss"], ""), f"{path}:{line}"),
            others={"file": str(path)} | others,
        )
        runs.append(found)
    if all(each.loss is None for each in runs):
        fix = f"is --loss_column={config.loss_column} right?"
        raise UserError(f"none of the {len(runs)} rows has a loss", path, fix)
    return runs


def check_columns(path, names, columns, given):
    """Raise UserError if a table lacks columns that it needs or that were named."""
    needed = [key for key in names if key in ("arm", "loss") or f"{key}_column" in given.typed]
    missing = [key for key in needed if names[key] not in columns]
    if missing:
        options = " ".join(f"--{key}_column=" for key in missing)
        fix = f"its columns are {', '.join(columns)}; name one with {options}"
        raise UserError(f"no column {' or '.join(names[key] for key in missing)}", path, fix)


def rows_of(path):
    """(number of its line, {column: value}) of each row of a file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", path, "check the path") from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError("this is not a text in UTF-8", path, "save the table as a .csv in UTF-8")
    if path.suffix.lower() == ".jsonl":
        for number, line, row in files.json_lines(text.split("\n")):
            if isinstance(row, dict):
                yield number, row
            elif line.strip():
                raise UserError("not a JSON object", f"{path}:{number}", "correct this line")
    else:
        yield from rows_of_cells(path, text)


def rows_of_cells(path, text):
    """(number of its line, {column: text}) of each row of a .csv or .tsv file. If its header has
    more commas, semicolons or tabs than what its name promises, they separate the cells."""
    header = text.lstrip("\r\n").partition("\n")[0]
    own = DELIMITERS[path.suffix.lower()]
    delimiter = max([own, ",", ";", "\t"], key=header.count)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True, strict=True)
    table = []  # (number of its line, its cells) of each line that is not empty
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if any(cells):
                table.append((reader.line_num, cells))
    except csv.Error as error:
        where = f"{path}:{reader.line_num}"
        fix = "close the quotes of each cell, and double those within a cell"
        raise UserError(f"cannot read: {one_line(error)}", where, fix) from None

    first, columns = table[0] if table else (1, [])
    if len(columns) == 1:
        fix = "separate its cells by commas, semicolons or tabs"
        raise UserError(f"it has one column, {columns[0]}", path, fix)
    for name in filter(None, columns):
        if columns.count(name) > 1:
            raise UserError(f"two columns are named {name}", f"{path}:{first}", "rename one")
    for number, cells in table[1:]:
        if any(cells[len(columns) :]):
            what = f"{len(cells)} cells under {len(columns)} columns"
            raise UserError(what, f"{path}:{number}", "put a cell with a comma in quotes")
        named = dict(zip(columns, cells, strict=False))
        named.pop("", None)  # the index that pandas writes has no name
        yield number, named


def text_of(value):
    return "" if value is None else str(value).strip()


def loss_of(text, where):
    """The loss that a cell states: None if it is missing, infinite if it is not a finite number."""
    if text.lower() in MISSING:
        return None
    try:
        loss = float(text)
    except ValueError:
        fix = "write a number such as 2.03, nothing (missing), or nan (diverged)"
        raise UserError(f"the loss is {text}", where, fix) from None
    return loss if math.isfinite(loss) else math.inf


# ---------------------------------------------------------------- run folders


def run_of_folder(path):
    """The Run of a run folder of train.py: its last validation loss. It is missing where the run
    has not ended, and infinite where it diverged."""
    config = config_of_folder(path)
    arm = path.resolve().name
    found = SEED.search(arm)
    if found and int(found.group(1)) == config.get("seed"):
        arm = arm[: found.start()]
    loss = None
    if (path / "diverged.json").exists():
        loss = math.inf
    elif (path / "log.jsonl").exists():
        lines = (path / "log.jsonl").read_bytes().split(b"\n")
        for _, _, row in files.json_lines(lines):  # a kill may cut a line short
            if isinstance(row, dict) and (row.get("step") or 0) >= config["max_iters"]:
                for key in ("val_loss", "whole_val_loss"):
                    if row.get(key) is not None:
                        loss = row[key]
    setting = text_of(config.get("dataset"))
    return Run(arm, setting, text_of(config.get("seed")), loss, others={"file": str(path)})


def config_of_folder(path):
    """The config.json of a run folder. Raises UserError if the folder is none."""
    if not (path / "config.json").exists():
        inner = list(path.glob("*/config.json"))
        if inner:
            raise UserError(f"it holds {len(inner)} run folders", path, f"name them, as {path}/*")
        raise UserError("not a run of train.py: it has no config.json", path, KNOWN)
    config = files.read_json(path / "config.json", KNOWN)
    if not isinstance(config.get("max_iters"), int | float):
        raise UserError("not a run of train.py: its config.json has no max_iters", path, KNOWN)
    return config


# ---------------------------------------------------------------- which rows count


def last_of_each(rows, config):
    """(the rows that count, [warning], [note]): of the rows of one run the last one with a loss.
    Warnings are about rows that may have been meant as runs. Raises UserError if they were."""
    usable = [row for row in rows if row.loss is not None and row.arm]
    if not usable:
        fix = "train a run to its end, or check --arm_column="
        raise UserError("no row has both a loss and an arm", "runs", fix)
    runs = []  # of which run each row is; without a seed, a row is a run of its own
    for number, row in enumerate(usable):
        runs.append((row.arm, row.setting, row.seed) if row.seed else number)
    last = dict(zip(runs, usable, strict=True))
    pairs = [(row, last[run]) for run, row in zip(runs, usable, strict=True)]
    replaced = [(row, later) for row, later in pairs if later is not row]

    warnings = []
    notes = []
    if replaced:
        what = f"{len(replaced)} of {len(usable)} rows were replaced by a later row of the same arm"
        what += ", seed and setting" if any(row.setting for row in usable) else " and seed"
        fix = advice(replaced, usable, config)
        columns = differing(replaced)
        if columns:
            warnings.append(f"{what}, and they differ in: {', '.join(columns)}. {fix}")
        else:
            notes.append(f"{what}.")
        for column in columns:
            ends = Counter(row.others.get(column) for row in last.values())
            if len(ends) > 1 and max(ends.values()) > len(last) / 2:  # most runs end alike
                warnings.append(f"Some runs may be cut short: their last rows differ in {column}.")
    if len(usable) < len(rows):
        notes.append(f"Rows left out, without a loss or an arm: {len(rows) - len(usable)}.")
        lost = {row.arm for row in rows} - {row.arm for row in usable} - {""}
        if lost:
            notes.append(f"Arms left out, without any loss: {', '.join(sorted(lost))}.")
    alone = sum(row.seed is None for row in usable)
    if alone:
        what = f"No column {config.seed_column}: each of the {alone} rows counts as a run"
        notes.append(f"{what} (else --seed_column=).")
    return list(last.values()), warnings, notes


def differing(replaced, among=None):
    """The columns in which a replaced row differs from the one that replaced it. among: a column
    counts if both its cells are among these; None: all count."""
    columns = {}  # a set in order
    for row, later in replaced:
        for key in row.others | later.others:
            cells = {(key, row.others.get(key)), (key, later.others.get(key))}
            if len(cells) == 2 and (among is None or cells <= among):
                columns[key] = True
    return list(columns)


def advice(replaced, rows, config):
    """What to do if the replaced rows were runs of their own, as sentences. Raises UserError if
    they must be: a column of names that several arms share, as settings are, tells them apart."""
    arms_with = {}  # {(column, text): the arms with this cell}
    for row in rows:
        for cell in row.others.items():
            arms_with.setdefault(cell, set()).add(row.arm)
    shared = {cell for cell, arms in arms_with.items() if len(arms) > 1 and cell[0] != "file"}
    names = {(column, text) for column, text in shared if not NO_NAME.fullmatch(text)}
    columns = differing(replaced, names)
    if columns:
        column = columns[0]
        row, _ = replaced[0]
        fix = f"add --setting_column={shlex.quote(column)}"
        if row.setting:
            fix = f"join it with {config.setting_column} in one column of settings"
        what = f"rows of one arm and seed differ in {column}"
        fix += f"; or delete {column}, and the last row counts"
        raise UserError(what, row.others["file"], fix)

    meaning = "each row is a run, give each its own seed"
    if "file" in differing(replaced):
        return f"If {meaning}; if each file is a setting, add a column that names it."
    columns = differing(replaced, shared)
    if columns:
        column = columns[0]
        meaning += f"; if {column} is a setting, add --setting_column={column}"
    return f"That is right for a log of evaluations. If {meaning}."
