"""Files that survive a crash: atomic writes, temporary names, locks, JSON, hashes."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import secrets
import shutil
import sys
from pathlib import Path

from common.errors import Failure, UserError, folded, one_line, tell

UMASK = os.umask(0)
os.umask(UMASK)

# Errors of a file system that does not support an operation at all (FUSE, CIFS, Lustre).
UNSUPPORTED = (
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.EINVAL,
    errno.ENOLCK,
)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

warned = set()  # the warnings that were printed


def warn_once(text, kind="warning", about=None):
    """Print a warning, or a note, to stderr once; with a subject, `about`, once about it."""
    if (about or text) not in warned:
        warned.add(about or text)
        begin = "\r\033[K" if sys.stderr.isatty() else ""  # overwrites a progress bar
        tell(begin + folded(f"{kind}: {text}", 2, sys.stderr))


# ---------------------------------------------------------------- writing


def partial(path, word="partial"):
    """A hidden temporary name beside `path`. Nobody types 16 random digits by hand, so a later
    process may safely remove files with such a name."""
    path = Path(path)
    return path.with_name(f".{path.name}.{word}-{secrets.token_hex(8)}")


def leftovers(path):
    """The temporary files and folders that interrupted writes of `path` left beside it."""
    path = Path(path)
    digits = "[0-9a-f]" * 16
    return list(path.parent.glob(f".{glob.escape(path.name)}.partial-{digits}"))


def remove(path):
    """Remove a file or folder that we made. If the file system refuses (NFS: EBUSY), only warn: a
    file left behind costs some space, an exception would end the run."""
    path = Path(path)
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        warn_once(f"cannot remove {path}: {error.strerror}; remove it by hand")


def write(path, data):
    """Write text or bytes to `path` atomically: temporary name, fsync, rename, fsync of the folder.
    Raises Failure if that is impossible, and leaves the old file untouched."""
    path = Path(path)
    temporary = partial(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise Failure(f"cannot write: {error.strerror}", path, remedy(error)) from error


def no_link(path, flags):
    """An opener for `open` that raises OSError for a symbolic link: one that came with a folder may
    lead to somebody else's file."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def append(path, row):
    """Append a row to a JSONL file and flush it to disk. If a kill left the last line unfinished,
    end it first. Raises Failure if that is impossible."""
    try:
        with open(path, "ab+", opener=no_link) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fix = f"{remedy(error)}; the same command continues"
        raise Failure(f"cannot write a row: {error.strerror}", path, fix) from None


def remedy(error):
    """What the user can do about an OSError raised while writing."""
    number = getattr(error, "errno", None)
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make the folder writable"
    if number in (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY):
        return "move the file or folder of this name away"
    if number == errno.ELOOP:
        return "put a file in the place of the link"
    if number == errno.ENAMETOOLONG:
        return "choose a shorter name"
    if number == errno.ENOENT:
        return "make the folder again"
    if number in NO_SPACE:
        return "free the disk"
    return "check the disk"


def sync(path):
    """Flush a file or a folder to the disk. Some file systems (FUSE, CIFS) cannot flush a folder:
    then it only warns, since a rename is lost only if the power fails within seconds."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in UNSUPPORTED or not Path(path).is_dir():
            raise
        warn_once(f"{path} is on a file system that cannot flush folders: {error.strerror}")
    finally:
        os.close(number)


def share(path):
    """Give a file the permissions that the umask allows. Some libraries write with mode 0600, which
    keeps colleagues from reading the file. File systems without permissions are ignored."""
    with contextlib.suppress(OSError):
        os.chmod(path, 0o666 & ~UMASK)


# ---------------------------------------------------------------- reading


def regular(path):
    """Return `path`. Raises OSError for a pipe or a device: reading one may never end."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    return path


def sha256_of(path):
    """The sha256 of a file's bytes, as hexadecimal text."""
    with open(regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(text, infinity=False):
    """Parse a JSON text (str or bytes). Raises ValueError for anything that is not JSON: bad utf-8,
    NaN, Infinity (unless `infinity`), or nesting deeper than Python can parse."""

    def finite(number):
        allowed = infinity and number == "Infinity"
        if not allowed and not math.isfinite(float(number)):
            raise ValueError(f"{number} is not a JSON number")
        return float(number)

    try:
        return json.loads(text, parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_json(path, fix, infinity=False):
    """Read a JSON file that holds an object. Raises UserError, with `fix` as the advice, if the
    file is missing, unreadable, not JSON, or holds something else."""
    try:
        value = parse_json(Path(regular(path)).read_bytes(), infinity)
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", path, fix) from None
    except ValueError as error:
        raise UserError(f"this is not JSON: {one_line(error)}", path, fix) from None
    if not isinstance(value, dict):
        raise UserError(f"this JSON is a {type(value).__name__}, not a dict", path, fix)
    return value


def fits(content, kinds):
    """Whether the values of these keys have these types; one that is missing is None."""
    return all(isinstance(content.get(key), kind) for key, kind in kinds.items())


# ---------------------------------------------------------------- locks


def is_open_as(path, descriptor):
    """Whether a path leads to the file or folder that is open under a descriptor."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def lock(path):
    """Open `path` and lock it until the returned file is closed or the process ends. Raises
    BlockingIOError if another process holds the lock. On a file system without locks (Lustre, some
    FUSE) the file is returned unlocked, with a warning."""
    file = open(path, "a+", opener=no_link)  # noqa: SIM115 (the caller keeps it open)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            file.close()
            raise
        folder = Path(path).parent
        warn_once(f"{folder} is on a file system without locks: start only one process there")
    return file


def integer(text):
    """An integer of JSON. Raises ValueError for one beyond 64 bits, which no table can hold."""
    number = int(text)
    if abs(number) >= 2**63:
        raise ValueError("an integer beyond 64 bits")
    return number


def json_lines(lines):
    """(number from 1, line, its JSON value or None if it is not JSON) of each line."""
    for number, line in enumerate(lines, 1):
        try:
            yield number, line, json.loads(line, parse_int=integer)
        except (ValueError, RecursionError):
            yield number, line, None
