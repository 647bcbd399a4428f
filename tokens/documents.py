"""
The texts that people bring: a file, several separated by commas, a glob, or a folder with all that
is below it. The ending of a file says how it is read:

    .jsonl .ndjson     a document in each line, an object, in the column --field
    .json              the same in an array of objects, or of texts; also JSON Lines, and an object
                       that holds one array of objects, or one of texts and nothing else
    .csv .tsv          a document in each row, in the column --field
    .parquet           the same, through pyarrow
    any other          text in utf-8, one document: prose, source code, markdown

.gz and .zst after these, but not after .parquet, are unpacked, the latter by pyarrow. Rows of
prompts and answers are pairs or preferences (tokens/answers.py). A file given by its name must be
readable; in a folder or a glob, files that are not text are left out, with the reason; but an error
after 100 rows of a table ends all. Memory grows only with the longest document or .json file.
"""

import codecs
import contextlib
import csv
import glob
import gzip
import io
import os
import re
import sys
import zlib
from functools import partial
from itertools import chain, islice
from pathlib import Path

from common.errors import UserError, one_line
from common.files import parse_json, warn_once
from tokens.answers import CHATS, COLUMNS, chat_pairs, is_chat, pair, preference, text_of
from tokens.writing import Corpus, PairRows

TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
PACKED = (".gz", ".zst")
CHUNK = 1 << 20  # bytes of text read at a time
HEAD = 1 << 13  # bytes that tell a text from a binary file
ROWS_SEEN = 100  # rows that show which columns a file has
HOLDS = {"file": "text", "chat": "pairs"}  # what a file holds where its kind has another name
UNPACKED = dict.fromkeys((*PACKED, ".parquet"), 3)  # about how many times larger the text is


# ---------------------------------------------------------------- files


def find_files(spec):
    """{path: whether it was named itself} of the files that --input=spec names. Raises UserError if
    a part of it names none."""
    is_named = {}
    parts = [part.strip() for part in spec.split(",") if part.strip()]
    if os.path.exists(spec) or not parts:  # a name may hold a comma
        parts = [spec]
    for part in parts:
        where = f"--input={part}"
        part = os.path.expanduser(part)
        matches = [part] if os.path.exists(part) else sorted(glob.glob(part, recursive=True))
        if not matches:
            what = "no file matches" if glob.has_magic(part) else "no such file or folder"
            fix = "check the path"
            if "://" in part:
                fix = "download it, and name the file"
            elif re.fullmatch(r"[\w.-]+/[\w.-]+", part):
                fix = f"check the path; of the Hugging Face hub, it is --input=hf:{part}"
            raise UserError(what, where, fix)
        paths = [path for match in matches for path in files_at(match)]
        if not paths:
            raise UserError("there is no file here", where, "name another")
        for path in paths:
            is_named[path] = path == Path(part) or is_named.get(path, False)
    return is_named


def files_at(path):
    """The file itself, or the files below a folder in a fixed order, without hidden ones, without
    what Python compiled, and without the datasets that prepare.py made. No file for a pipe or a
    device."""
    if not os.path.isdir(path):
        return [Path(path)] if os.path.isfile(path) else []

    def refuse(error):
        raise UserError(f"cannot read: {error.strerror}", error.filename, "make it readable")

    paths = []
    seen = set()  # so that a link to a folder above ends
    for root, folders, names in os.walk(path, onerror=refuse, followlinks=True):
        place = os.path.realpath(root)
        is_dataset = root != path and {"meta.json", "train.bin"} <= set(names)
        if place in seen or is_dataset:
            folders.clear()  # os.walk goes into those that are left in this list
            continue
        seen.add(place)
        visible = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        folders[:] = sorted(visible)
        files = [Path(root, name) for name in sorted(names) if not name.startswith(".")]
        paths += [file for file in files if file.is_file()]
    return paths


def ending(path):
    """(ending that says how a file is read, .gz or .zst or nothing)."""
    suffix = path.suffix.lower()
    if suffix in PACKED:
        return Path(path.stem).suffix.lower(), suffix
    return suffix, ""


@contextlib.contextmanager
def opened(path):
    """The bytes of a file as a stream, unpacked. Raises UserError if they cannot be read."""
    packed = ending(path)[1]
    try:
        if packed == ".gz":
            stream = gzip.open(path)  # noqa: SIM115 (closed below)
        elif packed == ".zst":
            import pyarrow  # here, since only these files need it

            raw = pyarrow.input_stream(str(path), compression="zstd")
            stream = io.BufferedReader(raw)
        else:
            stream = open(path, "rb")  # noqa: SIM115 (closed below)
        with stream:
            yield stream
    except (EOFError, zlib.error, OSError) as error:
        reason = getattr(error, "strerror", None)
        what = f"cannot read: {reason}" if reason else f"the file is damaged: {one_line(error)}"
        raise UserError(what, path, "make it readable, or copy it again") from None


# ---------------------------------------------------------------- texts and tables


def read_text(path):
    """Yield the text of a utf-8 file in pieces, with every line end as \\n. Raises UserError, which
    names the first byte that is not utf-8."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    position = 0  # bytes read
    ended = False
    with opened(path) as file:
        while not ended:
            data = file.read(CHUNK)
            ended = not data
            position += len(data)
            try:
                yield decoder.decode(data, final=ended)
            except UnicodeDecodeError as error:
                # error.object holds the bytes just read, after those left over from earlier.
                byte = position - len(error.object) + error.start
                what = f"the text is not utf-8: byte {byte:,}"
                raise UserError(what, path, "save it as utf-8") from None


def parquet_rows(path, columns):
    """Yield (where it is, row as a dictionary) of a .parquet file."""
    from pyarrow import parquet  # here, since only these files need it

    table = parquet.ParquetFile(path)
    number = 0
    for batch in table.iter_batches(1024, columns=columns):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number:,}", row


def csv_rows(path, file, delimiter):
    """Yield (where it is, row as a dictionary) of a .csv or .tsv file. Raises UserError, with the
    line at which the row begins, at one that cannot be read or does not fit the header."""
    csv.field_size_limit(sys.maxsize)
    lines = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    header = []
    line = 1  # at which a row begins; a quoted text may have several
    fix = "put a text with a comma, tab or quote in double quotes"
    try:
        for row in rows:
            where = f"{path}:{line}"
            line = rows.line_num + 1
            if re.search("[\udc80-\udcff]", "".join(row)):
                raise UserError("the text is not utf-8", where, "save it as utf-8")
            if not header:
                header = row
                twice = [name for name in row if name and row.count(name) > 1]
                if twice:
                    raise UserError(f"two columns are called {twice[0]}", where, "rename one")
            elif row and len(row) != len(header):
                what = f"this row has {len(row)} cells where the header has {len(header)}"
                raise UserError(what, where, fix)
            elif row:  # else a blank line
                yield where, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise UserError(f"a row cannot be read: {error}", f"{path}:{line}", fix) from None


def json_rows(path, file):
    """Yield (where it is, row) of a .json file: JSON Lines, an array of objects or of texts, or an
    object with one array of rows: objects, or texts if it holds nothing else. Any other object is
    one row: a conversation, or a package.json, whose keywords are no rows."""
    lines = []  # as far as the second row, over blank lines
    for _ in range(2):
        lines.append(file.readline())
        while lines[-1].isspace():
            lines.append(file.readline())
    *first_row, second_row = lines
    try:
        is_json_lines = second_row != b"" and isinstance(parse_json(b"".join(first_row)), dict)
    except ValueError:
        is_json_lines = False
    if is_json_lines:
        yield from numbered(path, chain(lines, file))
        return

    content = parse_json(b"".join([*lines, file.read()]))
    rows = content
    if isinstance(content, dict):
        rows = [content]
        arrays = [key for key, value in content.items() if isinstance(value, list)]
        if len(arrays) == 1 and arrays[0] not in CHATS:
            array = content[arrays[0]]
            holds_rows = array and all(isinstance(item, dict) for item in array)
            if len(content) == 1 or holds_rows:
                rows = array
    if not isinstance(rows, list):
        raise ValueError(f"a {type(rows).__name__}, not an array of objects")
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number:,}", {"text": row} if isinstance(row, str) else row


def numbered(path, lines):
    """Yield (where it is, line) of each line of a file."""
    for number, line in enumerate(lines, 1):
        yield f"{path}:{number}", line


def raw_rows(path, columns):
    """Yield (where it is, row) of a table: a line of JSON as bytes, else a dictionary."""
    kind = ending(path)[0]
    if kind == ".parquet":
        yield from parquet_rows(path, columns)
        return
    with opened(path) as file:
        if kind in (".csv", ".tsv"):
            yield from csv_rows(path, file, "\t" if kind == ".tsv" else ",")
        elif kind == ".json":
            yield from json_rows(path, file)
        else:
            yield from numbered(path, file)


def rows_of(path, columns=None):
    """Yield (where it is, row as a dictionary) of a table; of parquet only these columns. Raises
    UserError at the first row that cannot be read."""
    where = path
    kind = ending(path)[0].removeprefix(".")
    try:
        for where, row in raw_rows(path, columns):
            if isinstance(row, bytes):
                row = parse_json(row) if row.strip() else {}
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__}, not an object")
            if row:
                yield where, row
    except (ValueError, OSError) as error:  # OSError: of pyarrow
        flaw = getattr(error, "msg", None) or one_line(error)
        what = f"this cannot be read as {kind}: {flaw}"
        raise UserError(what, where, "fix this row, or leave the file out") from None


def shape_of(path, field):
    """(kind, column): how the documents lie in a file. The kind is "file" for a text, and for a
    table "text", "chat" (these two in a column), "pairs" or "preferences". Raises UserError for
    what cannot be read, as far as the beginning of the file tells."""
    kind = ending(path)[0]
    if kind != ".parquet":
        with opened(path) as file:
            if b"\0" in file.read(HEAD):
                what = "the file is binary, UTF-16 or UTF-32, not utf-8 text"
                raise UserError(what, path, "save it as utf-8, or leave it out")
    if kind in TABLES:
        return shape_of_table(path, field)
    return "file", None


def shape_of_table(path, field):
    """(kind, column), as in shape_of, from a table's first rows: a filled column of texts, else
    preferences, else conversations, else pairs. Raises UserError without any."""
    first = {}  # the first value in each column
    for _, row in islice(rows_of(path), ROWS_SEEN):
        for column, value in row.items():
            if first.get(column) is None:
                first[column] = value
    if not first:
        raise UserError("the table is empty", path, "leave it out")

    wanted = field or "text"
    if is_chat(first.get(wanted)):
        return "chat", wanted
    chats = [column for column in CHATS if is_chat(first.get(column))]
    answers = None  # (kind, column) of the answers in the table, without a --field
    if not field and first.keys() >= {"chosen", "rejected"}:
        answers = "preferences", None
    elif not field and chats:
        answers = "chat", chats[0]
    elif not field and first.keys() >= {"prompt", "answer"}:
        answers = "pairs", None
    if answers and first.get(wanted) is None:
        return answers
    if wanted in first:
        if first[wanted] is not None:
            text_of(first, wanted, path, "choose a --field")
        if answers:
            what = "the column text is learned, and the answers beside it are not"
            warn_once(f"{what}: to learn these, remove the column ({path})", "note", "answers")
        return "text", wanted
    what = f"there is no field {wanted} among: {', '.join(map(str, islice(first, 20)))}"
    fix = "choose one with --field=NAME, or rename two columns to prompt and answer"
    raise UserError(what, path, fix)


# ---------------------------------------------------------------- all that is found


def open_input(spec, field=None):
    """The Corpus or the PairRows of --input=spec and --field. Raises UserError for what cannot be
    read, as far as the beginning of each file tells."""
    named = find_files(spec)
    shapes = {}
    skipped = {}
    for path in named:
        try:
            shapes[path] = shape_of(path, field)
        except UserError as error:
            if named[path]:
                raise
            skipped[str(path)] = error.parts[0]
    if not shapes:
        name, why = next(iter(skipped.items()))
        raise UserError(f"there is no text here: {why}", name, "name other files")

    content = common_kind(spec, shapes)
    if field and all(kind == "file" for kind, _ in shapes.values()):
        raise UserError("there is no table with fields", f"--field={field}", "leave it out")
    size = sum(path.stat().st_size * UNPACKED.get(path.suffix.lower(), 1) for path in shapes)
    if content != "text":
        rows = partial(pair_rows, shapes, skipped)
        return PairRows(spec, rows, skipped, content == "preferences", size)
    if [*shapes.values()] == [("file", None)]:
        pieces = partial(read_text, *shapes)
        return Corpus(spec, pieces, size=size, skipped=skipped)
    pieces = partial(documents_of, shapes, named, skipped)
    return Corpus(spec, pieces, documents=True, size=size, skipped=skipped)


def common_kind(spec, shapes):
    """What all files hold: "text", "pairs" or "preferences". Raises UserError if they differ."""
    examples = {HOLDS.get(kind, kind): path for path, (kind, _) in shapes.items()}
    if len(examples) > 1:
        what = ", ".join(f"{path} holds {kind}" for kind, path in examples.items())
        raise UserError(what, f"--input={spec}", "prepare them as datasets of their own")
    return next(iter(examples))


def documents_of(shapes, named, skipped):
    """Yield every document of the files. What is left out is added to `skipped`."""
    for path, (kind, column) in shapes.items():
        if kind == "text":
            yield from column_of(path, column, skipped)
            continue
        try:
            text = "".join(read_text(path))
        except UserError as error:
            if named[path]:
                raise
            skipped[str(path)] = error.parts[0]
            continue
        if text.strip():
            yield text
        else:
            skipped[str(path)] = "the file is empty"


def column_of(path, column, skipped):
    """Yield the texts in a column of a table. Rows without one are counted."""
    empty = 0
    for where, row in rows_of(path, [column]):
        text = ""
        if row.get(column) is not None:
            text = text_of(row, column, where, "choose a --field")
        if text.strip():
            yield text
        else:
            empty += 1
    if empty:  # counted in a whole pass only
        skipped[str(path)] = f"{empty:,} of its rows, which have no {column}"


def pair_rows(shapes, skipped):
    """Yield (where it is, [(prompt, answer), ...]) of every row of the tables. Rows without an
    answer are counted."""
    for path, (kind, column) in shapes.items():
        empty = 0
        for where, row in rows_of(path, COLUMNS.get(kind, [column])):
            if kind == "chat":
                pairs = chat_pairs(row.get(column), where)
            elif kind == "pairs":
                pairs = [pair(row, where)]
            else:
                pairs = preference(row, where)
            if pairs:
                yield where, pairs
            else:
                empty += 1
        if empty:  # counted in a whole pass only
            skipped[str(path)] = f"{empty:,} of its rows, which have no answer"
