"""What the pictures of the extras share."""

import os
from pathlib import Path

from common.errors import UserError


def check_picture(path, writer):
    """Raise UserError unless `path` can take a PNG, over no file but one that `writer` drew."""
    path = Path(path)
    if path.suffix != ".png" or not path.parent.is_dir():
        raise UserError("out must be a .png in a folder that exists", f"out={path}", "change it")
    head = path.read_bytes()[:4096] if path.is_file() else b""
    if os.path.lexists(path) and writer.encode() not in head:
        fix = "move it away, or choose another name with --out=NAME.png"
        raise UserError(f"this file was not written by {writer}", f"out={path}", fix)
