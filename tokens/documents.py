"""
The texts that people bring: a file, several separated by commas, a glob, or a folder with all that
is below it. The ending of a file says how it is read:

    .jsonl .ndjson     a document in each line, an object, in the column --field
    .json              the same in an array of objects; anything else is text
    .csv .tsv          a document in each row, in the column --field
    .parquet           the same, through pyarrow
    any other          text in utf-8, one document: prose, source code, markdown

.gz and .zst after these are unpacked on the way, the latter by pyarrow. Rows of prompts and answers
are pairs or preferences (tokens/pairs.py). A file given by its name must be readable; in a folder
or a glob, files that are not text are left out, and the reason is printed. Memory grows only with
the longest document, or with the largest .json file.
"""

import codecs
import contextlib
import csv
import glob
import gzip
import importlib
import io
import os
import re
import sys
import zlib
from functools import partial
from itertools import islice
from pathlib import Path

from common.errors import UserError, one_line
from common.files import parse_json
from tokens.writing import Corpus, PairRows

TABLES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
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
    paths = {}
    parts = [part.strip() for part in spec.split(",") if part.strip()]
    for part in [spec] if os.path.exists(spec) or not parts else parts:
        part, where = os.path.expanduser(part), f"--input={part}"
        matches = [part] if os.path.exists(part) else sorted(glob.glob(part, recursive=True))
        if not matches:
            what = "no file matches" if glob.has_magic(part) else "no such file or folder"
            raise UserError(what, where, "check the path")
        for match in matches:
            inside = walk(match) if os.path.isdir(match) else [Path(match)] * os.path.isfile(match)
            if match == part and not inside:
                raise UserError("there is no file here", where, "name another")
            for path in inside:
                paths[path] = paths.get(path) or path == Path(part)
    return paths


def walk(folder):
    """The files below a folder in a fixed order, without hidden ones and without the datasets that
    prepare.py made."""

    def refuse(error):
        raise UserError(f"cannot read: {error.strerror}", error.filename, "make it readable")

    paths = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        if root != folder and {"meta.json", "train.bin"} <= set(names):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        shown = [Path(root, name) for name in sorted(names) if not name.startswith(".")]
        paths += [path for path in shown if path.is_file()]
    return paths


def ending(path):
    """(ending that says how a file is read, .gz or .zst or nothing)."""
    suffix = path.suffix.lower()
    return (Path(path.stem).suffix.lower(), suffix) if suffix in (".gz", ".zst") else (suffix, "")


@contextlib.contextmanager
def opened(path):
    """The bytes of a file as a stream, unpacked. Raises UserError if they cannot be read."""
    packed = ending(path)[1]
    try:
        if packed == ".gz":
            stream = gzip.open(path)  # noqa: SIM115 (closed below)
        elif packed == ".zst":
            raw = needed("pyarrow", path).input_stream(str(path), compression="zstd")
            stream = io.BufferedReader(raw)
        else:
            stream = open(path, "rb")  # noqa: SIM115 (closed below)
        with stream:
            yield stream
    except (EOFError, zlib.error, OSError) as error:
        reason = getattr(error, "strerror", None)
        what = f"cannot read: {reason}" if reason else f"the file is damaged: {one_line(error)}"
        raise UserError(what, path, "make it readable, or copy it again") from None


def needed(package, where):
    """A package that only some inputs need."""
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise UserError(f"this needs the package {name}", where, f"pip install {name}") from None


def flaw_of(head):
    """Why a file is not a text in utf-8, as far as its first bytes tell; None if it seems one."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        return "the text is UTF-16 or UTF-32, not utf-8"
    return "the file is binary, or UTF-16, not utf-8 text" if b"\0" in head else None


# ---------------------------------------------------------------- texts and tables


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


def raw_rows(path, columns):
    """Yield (where it is, row) of a table: a line of JSON as bytes, else a dictionary."""
    kind = ending(path)[0]
    if kind == ".parquet":
        table = needed("pyarrow.parquet", path).ParquetFile(path)
        batches = table.iter_batches(1024, columns=columns)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"{path}, row {number:,}", row) for number, row in enumerate(rows, 1))
        return
    with opened(path) as file:
        if kind in (".csv", ".tsv"):
            csv.field_size_limit(sys.maxsize)
            lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            rows = csv.DictReader(lines, delimiter="\t" if kind == ".tsv" else ",", strict=True)
        else:
            rows = parse_json(file.read()) if kind == ".json" else file
        for number, row in enumerate(rows, 1):
            yield f"{path}:{number}" if rows is file else f"{path}, row {number:,}", row


def rows_of(path, columns=None):
    """Yield (where it is, row as a dictionary) of a table; of parquet only these columns. Raises
    UserError at the first row that cannot be read."""
    where, kind = path, ending(path)[0].removeprefix(".")
    try:
        for where, row in raw_rows(path, columns):
            if isinstance(row, bytes):
                row = parse_json(row) if row.strip() else {}
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__}, not an object")
            if row:
                yield where, row
    except (ValueError, OSError, csv.Error) as error:  # OSError: of pyarrow
        flaw = getattr(error, "msg", None) or one_line(error)
        what = f"this cannot be read as {kind}: {flaw}"
        raise UserError(what, where, "mend it, or leave the file out") from None


def shape_of(path, field):
    """(kind, column) of the documents in a table: ("text", column), ("chat", column), ("pairs",
    None) or ("preferences", None), the first that exist. Raises UserError, which lists the columns,
    if there are none."""
    first = {}  # of each column its first value
    for _, row in islice(rows_of(path), ROWS_SEEN):
        first |= {key: value for key, value in row.items() if first.get(key) is None}
    if not first:
        raise UserError("the table is empty", path, "leave it out")

    wanted = [field] if field else ["text", "messages", "conversations"]
    for column in wanted:
        if column in first:
            return ("chat" if isinstance(first[column], list) else "text"), column
    for kind, columns in COLUMNS.items():
        if not field and {*columns} <= first.keys():
            return kind, None
    what = f"there is no field {wanted[0]} among: {', '.join(map(str, islice(first, 20)))}"
    raise UserError(
        what, path, "choose one with --field=NAME, or rename two columns to prompt and answer"
    )


# ---------------------------------------------------------------- all that is found


def open_input(spec, field=None):
    """The Corpus or the PairRows of --input=spec and --field. Raises UserError for what cannot be
    read, as far as the beginning of each file tells."""
    named, skipped, shapes = find_files(spec), {}, {}
    for path in named:
        try:
            kind, head = ending(path)[0], b""
            if kind != ".parquet":
                with opened(path) as file:
                    head = file.read(HEAD)
            if flaw := flaw_of(head):
                raise UserError(flaw, path, "save it as utf-8, or leave it out")
            is_table = ARRAY.match(head) if kind == ".json" else kind in TABLES
            shapes[path] = shape_of(path, field) if is_table else ("file", None)
        except UserError as error:
            if named[path]:
                raise
            skipped[str(path)] = error.parts[0]

    if not shapes:
        name, why = next(iter(skipped.items()))
        raise UserError(f"there is no text here: {why}", name, "name other files")
    words = {"chat": "pairs", "file": "text"}
    kinds = {words.get(kind, kind): path for path, (kind, _) in shapes.items()}
    if len(kinds) > 1:
        what = ", ".join(f"{path} holds {kind}" for kind, path in kinds.items())
        raise UserError(what, f"--input={spec}", "prepare them as datasets of their own")
    if field and {kind for kind, _ in shapes.values()} == {"file"}:
        raise UserError("there is no table with fields", f"--field={field}", "leave it out")

    size = sum(path.stat().st_size * (UNPACKED if ending(path)[1] else 1) for path in shapes)
    if "text" not in kinds:
        rows = partial(pair_rows, shapes, skipped)
        return PairRows(spec, rows, skipped, "preferences" in kinds, size)
    if [*shapes.values()] == [("file", None)]:
        return Corpus(spec, lambda: read_text(*shapes), size=size, skipped=skipped)
    return Corpus(spec, lambda: documents_of(shapes, named, skipped), True, size, skipped)


def documents_of(shapes, named, skipped):
    """Yield every document of the files. Rows without a text are counted."""
    for path, (kind, column) in shapes.items():
        try:
            texts = ["".join(read_text(path))] if kind == "file" else column_of(path, column)
            empty = 0
            for text in texts:
                if text.strip():
                    yield text
                else:
                    empty += 1
                    rows = f"{empty:,} of its rows, which have no {column}"
                    skipped[str(path)] = "the file is empty" if kind == "file" else rows
        except UserError as error:
            if named[path] or kind != "file":
                raise
            skipped[str(path)] = error.parts[0]


def column_of(path, column):
    """Yield the text in a column of each row, "" if there is none."""
    for where, row in rows_of(path, [column]):
        yield "" if row.get(column) is None else text_of(row, column, where, "choose a --field")


def pair_rows(shapes, skipped):
    """Yield (where it is, [(prompt, answer), ...]) of every row of the tables."""
    for path, (kind, column) in shapes.items():
        empty = 0
        for where, row in rows_of(path, COLUMNS.get(kind, [column])):
            is_chat = kind == "chat"
            pairs = chat_pairs(row.get(column), where) if is_chat else answers(row, kind, where)
            if pairs:
                yield where, pairs
            else:
                empty += 1
                skipped[str(path)] = f"{empty:,} of its rows, which have no answer"


# ---------------------------------------------------------------- prompts and answers

FORM = 'a line is {"prompt": "...", "answer": "..."}, or {"messages": [...]}'
MESSAGE = 'a message is {"role": "user", "content": "..."}'
SHAREGPT = {"human": "user", "gpt": "assistant"}  # its names of the two roles


def text_of(row, key, where, fix=FORM):
    """row[key], which must be a text of whole characters; else a UserError."""
    text = row.get(key)
    if not isinstance(text, str):
        raise UserError(f"{key} is missing or not a text", where, fix)
    if re.search("[\ud800-\udfff]", text):
        raise UserError(f"the {key} holds half a character, \\ud800 to \\udfff", where, "remove it")
    return text


def answers(row, kind, where):
    """[(prompt, answer)] of a row, or of a preference [(prompt, chosen), (prompt, rejected)].
    Raises UserError if a text is missing, or the answers are the same."""
    prompt, *texts = (text_of(row, key, where) for key in COLUMNS[kind])
    if not all(text.strip() for text in texts):
        raise UserError("an answer is empty", where, "leave the row out, or write an answer")
    if len({*texts}) < len(texts):
        raise UserError("both answers are the same", where, "leave the preference out")
    return [(prompt, text) for text in texts]


def chat_pairs(messages, where):
    """[(prompt, answer), ...] of a conversation, one for each message of the assistant, whose
    prompt is what stands before it:

        User: What is the capital of France?
        Assistant:

    A message without content, such as the call of a tool, is left out. Raises UserError if the
    conversation is malformed."""
    if not isinstance(messages, list):
        raise UserError("the messages are missing or not a list", where, FORM)
    pairs, before = [], ""
    for message in messages:
        if not isinstance(message, dict):
            raise UserError("a message is not an object", where, MESSAGE)
        if "role" not in message and "from" in message:
            role = text_of(message, "from", where, MESSAGE)
            message = {"role": SHAREGPT.get(role, role), "content": message.get("value")}
        role = text_of(message, "role", where, MESSAGE).capitalize()
        if message.get("content") is None:
            continue
        content = content_of(message, where)
        if role == "Assistant" and content.strip():
            pairs.append((f"{before}{role}:", f" {content}"))
        before += f"{role}: {content}\n"
    return pairs


def content_of(message, where):
    """The text of a message, whose content is a text or a list of parts."""
    content = message["content"]
    if not isinstance(content, list):
        return text_of(message, "content", where, MESSAGE)
    if not all(isinstance(part, dict) for part in content):
        raise UserError("a part of the content is not an object", where, MESSAGE)
    return "".join(text_of(part, "text", where, MESSAGE) for part in content)
