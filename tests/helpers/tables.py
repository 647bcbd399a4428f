"""Texts, and tables of them."""

import json
from pathlib import Path

TEXTS = [f"Document {i}\nover the {'hills and far ' * (i % 7)}away, Zoë.\n" for i in range(400)]
ROWS = [{"id": i, "text": text, "body": f"body {i}"} for i, text in enumerate(TEXTS)]


def write(path, content):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    Path(path).write_bytes(data)
    return str(path)


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)
