"""
The texts that people bring: a file, several separated by commas, a glob, or a folder with all that
is below it. The ending of a file says how it is read:

    .jsonl .ndjson          a document in each line, an object, in the column --field
    .json                   the same in an array of objects; anything else is text
    .csv .tsv .parquet      a document in each row, in the column --field, through `datasets`
    any other               text in utf-8, one document: prose, source code, markdown

.gz and .zst after these are unpacked on the way, the latter by pyarrow, which comes with
`datasets`. Rows with `messages` or `conversations`, or with `prompt` and `answer`, are pairs
(tokens/pairs.py), those with `prompt`, `chosen` and `rejected` preferences (tokens/preferences.py).

A file that is named itself must be readable; one that a folder or a glob leads to is left out if it
is binary, or has another encoding or other columns, and the reason is kept for the printout. Hidden
files are left out, and datasets of our own. Memory does not grow with the text, only with the
longest document, or with the largest .json file.
"""

import codecs
import contextlib
import glob
import gzip
import io
import os
import re
import zlib
from itertools import islice
from pathlib import Path

from common.errors import UserError, one_line
from common.files import parse_json
from tokens.pairs import FORM, PairRows, chat_pairs, plain_pair, preference, text_of
from tokens.sources import give_hub_a_home
from tokens.writing import Corpus

TABLES = {".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
CHUNK = 1 << 20  # bytes of text read at a time
HEAD = 1 << 13  # bytes that tell a text from a binary file
ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")  # how an array of objects begins in JSON
COLUMNS = {"pairs": ["prompt", "answer"], "preferences": ["prompt", "chosen", "rejected"]}
ROWS_SEEN = 100  # rows that show which columns a file has
UNPACKED = 3  # about how many times larger a compressed text becomes


# ---------------------------------------------------------------- files


def find_files(spec):
    """{path: whether it was named itself} of the files that --input=spec names. Raises UserError if
    a part of it names none."""
    found, walked = {}, set()
    parts = [part.strip() for part in spec.split(",") if part.strip()]
    for part in [spec] if os.path.exists(spec) or not parts else parts:
        part, where = os.path.expanduser(part), f"--input={part}"
        matches = [part] if os.path.exists(part) else sorted(glob.glob(part, recursive=True))
        if not matches:
            is_glob = glob.has_magic(part)
            what = "no file matches" if is_glob else "no such file or folder"
            fix = "check the path" + (", and quote it so that the shell passes it on" * is_glob)
            raise UserError(what, where, fix)
        for match in matches:
            if not os.path.isdir(match):
                found[Path(match)] = match == part
                continue
            if os.path.abspath(match) in walked:
                continue
            inside = list(walk(match, walked))
            if match == part and not inside:
                raise UserError("there is no file in this folder", where, "name another")
            for path in inside:
                found.setdefault(path, False)
    return found


def walk(folder, walked):
    """Yield the files below a folder in a fixed order, without hidden ones and without the datasets
    that prepare.py made. Adds the folders to the set `walked`."""
    for root, folders, names in os.walk(folder, onerror=refuse):
        walked.add(os.path.abspath(root))
        if root != folder and {"meta.json", "train.bin"} <= set(names):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and os.path.isfile(os.path.join(root, name)):
                yield Path(root, name)


def refuse(error):
    """Raise UserError for a file or folder that cannot be read."""
    raise UserError(f"cannot read: {error.strerror}", error.filename, "make it readable") from None


def ending(path):
    """(ending that says how a file is read, .gz or .zst or nothing)."""
    packed = path.suffix.lower() if path.suffix.lower() in (".gz", ".zst") else ""
    plain = Path(path.stem) if packed else path
    return plain.suffix.lower(), packed


@contextlib.contextmanager
def opened(path):
    """The bytes of a file as a stream, unpacked. Raises UserError if they cannot be read."""
    packed = ending(path)[1]
    try:
        if packed == ".gz":
            stream = gzip.open(path)  # noqa: SIM115 (closed below)
        elif packed == ".zst":
            packed_stream = needed("pyarrow", path).input_stream(str(path), compression="zstd")
            stream = io.BufferedReader(packed_stream)
        else:
            stream = open(path, "rb")  # noqa: SIM115 (closed below)
        with stream:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"the file is damaged: {one_line(error)}", path, "copy it again") from None
    except OSError as error:
        if error.errno is None:  # pyarrow's, for what is no zstd
            what = f"the file is damaged: {one_line(error)}"
            raise UserError(what, path, "copy it again") from None
        refuse(error)


def needed(package, where):
    """A package that only some inputs need."""
    try:
        return __import__(package)
    except ImportError:
        what = "this needs the package datasets"
        raise UserError(what, where, "pip install datasets") from None


def head_of(path):
    """The first bytes of a file; those of parquet, which is not a text, say nothing."""
    if ending(path)[0] == ".parquet":
        return b""
    with opened(path) as file:
        return file.read(HEAD)


def is_table(path, head):
    """Whether a file that begins with these bytes is read in rows."""
    if ending(path)[0] == ".json":
        return bool(ARRAY.match(head))
    return ending(path)[0] in TABLES


def flaw_of(head):
    """Why a file is not a text in utf-8, as far as its first bytes tell; None if it seems one."""
    for marks, name in (
        ((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "UTF-32"),  # first: it begins as UTF-16 does
        ((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "UTF-16"),
    ):
        if head.startswith(marks):
            return f"the text is {name}, not utf-8"
    if b"\0" not in head:
        return None
    even, odd = head[::2].count(0), head[1::2].count(0)
    if min(even, odd) == 0 and max(even, odd) > len(head) // 4:
        return "the text is UTF-16, not utf-8"  # without a mark, mostly Latin letters
    return "the file is binary, not a text"


def repair_of(flaw):
    """What the user can do about a flaw."""
    return "save it as utf-8" if "-8" in flaw else "leave it out"


# ---------------------------------------------------------------- texts


def read_text(path):
    """Yield the text of a utf-8 file in pieces, with every line end as \\n. Raises UserError, which
    names the first byte that is not utf-8."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    position, data = 0, b"-"
    with opened(path) as file:
        while data:
            data = file.read(CHUNK)
            position += len(data)
            try:
                yield decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                # error.object holds the bytes just read, after those left over from earlier.
                byte = position - len(error.object) + error.start
                what = f"the text is not utf-8: byte {byte:,}"
                raise UserError(what, path, "save it as utf-8") from None


# ---------------------------------------------------------------- tables


def rows_of(path, columns=None):
    """Yield (where it is, row as a dictionary) of a table; of parquet only these columns."""
    if ending(path)[0] == ".json":
        return array_rows(path)
    kind = TABLES[ending(path)[0]]
    return json_rows(path) if kind == "json" else table_rows(path, kind, columns)


def array_rows(path):
    """Yield (where it is, object) of a JSON array. Raises UserError if it is not one of objects."""
    with opened(path) as file:
        rows = parsed(file.read(), "file", path, "check it with another program")
    for number, row in enumerate(rows, 1):
        where = f"{path}, row {number:,}"
        yield where, checked_object(row, "row", where)


def json_rows(path):
    """Yield (path:line, object) of JSON Lines. Raises UserError at the first line that is none."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if line.strip():
                row = parsed(line, "line", where, "a line is an object, {...}")
                yield where, checked_object(row, "line", where)


def parsed(content, kind, where, fix):
    """The value of a JSON file or line, given its bytes."""
    try:
        return parse_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise UserError(f"the {kind} is not utf-8", where, "save it as utf-8") from None
    except ValueError as error:
        what = f"not JSON: {getattr(error, 'msg', error)}"
        raise UserError(what, where, fix) from None


def checked_object(row, kind, where):
    """A row or line, which must be a JSON object."""
    if not isinstance(row, dict):
        what = f"the {kind} holds a JSON {type(row).__name__}, not an object"
        raise UserError(what, where, FORM)
    return row


def table_rows(path, kind, columns):
    """Yield (where it is, row) of a csv or parquet file, only these columns if they are given."""
    give_hub_a_home()
    datasets = needed("datasets", path)
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error says it all
    options = {"columns": columns}
    if kind == "csv":  # a column of texts stays as it is, also if all of them are numbers
        texts = dict.fromkeys(columns or (), str)
        tab = "\t" if ending(path)[0] == ".tsv" else ","
        options = dict(sep=tab, usecols=columns, converters=texts, keep_default_na=False)
    try:
        rows = datasets.load_dataset(
            kind, data_files=glob.escape(str(path)), split="train", streaming=True, **options
        )
        for number, row in enumerate(rows, 1):
            yield f"{path}, row {number:,}", row
    except Exception as error:  # of many kinds: format, encoding, end of the file
        what = f"the table cannot be read: {type(error).__name__} {one_line(error)}"
        raise UserError(what, path, "check it with another program") from None


def shape_of(path, field):
    """(kind, column) of the documents in a table: ("text", column), ("chat", column), ("pairs",
    None) or ("preferences", None). Without --field they are the first that exist of `text`,
    `messages`, `conversations`, and `prompt` with `answer` or with `chosen` and `rejected`. Raises
    UserError, which lists the columns, if there are none."""
    first = {}  # of each column its first value
    for _, row in islice(rows_of(path), ROWS_SEEN):
        first |= {key: value for key, value in row.items() if first.get(key) is None}
    if not first:
        raise UserError("the table is empty", path, "leave it out")

    wanted = [field] if field else ["text", "messages", "conversations"]
    for column in wanted:
        if column in first:
            return ("chat" if isinstance(first[column], list) else "text"), column
    if not field and {"prompt", "answer"} <= first.keys():
        return "pairs", None
    if not field and {"prompt", "chosen", "rejected"} <= first.keys():
        return "preferences", None
    fields = ", ".join(islice(first, 20))
    what = f"there is no field {wanted[0]} among: {fields}"
    fix = "choose one with --field=NAME" + ", or name two of them prompt and answer" * (not field)
    raise UserError(what, path, fix)


# ---------------------------------------------------------------- all that is found


def open_input(spec, field=None):
    """The Corpus or the PairRows of --input=spec and --field. Raises UserError for what cannot be
    read, as far as the beginning of each file tells."""
    named, skipped, shapes = find_files(spec), {}, {}
    for path in named:
        try:
            head = head_of(path)
            flaw = flaw_of(head)
            if flaw:
                raise UserError(flaw, path, repair_of(flaw))
            shapes[path] = shape_of(path, field) if is_table(path, head) else ("file", None)
        except UserError as error:
            if named[path]:
                raise
            skipped[str(path)] = error.parts[0]

    if not shapes:
        name, why = next(iter(skipped.items()))
        raise UserError(f"there is no text here: {why}", name, "name other files")
    kinds = {"text": "text", "file": "text", "chat": "prompts and answers"}
    kinds |= {"pairs": "prompts and answers", "preferences": "preferences"}
    kinds = {kinds[kind]: path for path, (kind, _) in shapes.items()}
    if len(kinds) > 1:
        (first, path), (second, other) = sorted(kinds.items())[:2]
        what = f"{path} holds {first}, {other} {second}"
        raise UserError(what, f"--input={spec}", "prepare them as two datasets")
    if field and all(kind == "file" for kind, _ in shapes.values()):
        what = "a field is a column of a table, and there is no table"
        raise UserError(what, f"--field={field}", "leave it out")

    if "text" not in kinds:
        rows, preferences = (lambda: pair_rows(shapes, skipped)), "preferences" in kinds
        return PairRows(spec, rows, skipped, preferences)
    size = sum(path.stat().st_size * (UNPACKED if ending(path)[1] else 1) for path in shapes)
    if [*shapes.values()] == [("file", None)]:
        return Corpus(spec, lambda: read_text(*shapes), size=size, skipped=skipped)
    return Corpus(spec, lambda: documents_of(shapes, named, skipped), True, size, skipped)


def documents_of(shapes, named, skipped):
    """Yield every document of the files."""
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
    """Yield the texts of a column. Rows without one are counted."""
    empty, fix = 0, "choose a column of texts with --field=NAME"
    for where, row in rows_of(path, [column]):
        value = row.get(column)
        if value is None or isinstance(value, str) and not value.strip():
            empty += 1
            continue
        if not isinstance(value, str):
            what = f"the field {column} is of type {type(value).__name__}, not a text"
            raise UserError(what, where, fix)
        yield text_of(row, column, where, fix)
    if empty:
        skipped[str(path)] = f"only the rows without {column}: {empty:,}"


def pair_rows(shapes, skipped):
    """Yield (where it is, [(prompt, answer), ...]) of every row of the tables."""
    for path, (kind, column) in shapes.items():
        empty, columns = 0, COLUMNS.get(kind, [column])
        for where, row in rows_of(path, columns):
            if kind == "chat":
                pairs = chat_pairs(row.get(column), where)
            else:
                pairs = plain_pair(row, where) if kind == "pairs" else preference(row, where)
            if pairs:
                yield where, pairs
            else:
                empty += 1
        if empty:
            skipped[str(path)] = f"only the rows without an answer: {empty:,}"
