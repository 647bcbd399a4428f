"""A text on its way into token files: what prepare.py reads, wherever it comes from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Corpus:
    """One long text, or many documents.

    `pieces()` starts a new pass over the text. With `documents`, each piece is a whole document:
    an end-of-text token follows it, and a hash of its content decides on its split. Otherwise the
    pieces are consecutive parts of one text, which is split by position."""

    source: str  # where the text comes from, for meta.json
    pieces: Callable[[], Iterator[str]]
    documents: bool = False
    size: int | None = None  # about how many bytes, for a progress bar
    skipped: dict = field(default_factory=dict)  # {file: why it is left out}, complete after a pass
