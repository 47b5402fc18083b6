"""Files that a user names: opened without waiting, read within limits, and written whole or not at all.

Where a path names no regular file, the error says what it names. No reader waits for the other end of a FIFO, takes
memory without a limit, or follows JSON beyond MOST_DEPTH levels.
"""

import fcntl
import hashlib
import io
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NoReturn

import platformdirs

from .checks import plain
from .errors import ArgumentError

MOST_BYTES: Final = 64 << 20  # the largest file that is read whole
MOST_DEPTH: Final = 64  # levels of nested lists and objects of JSON
INTEGER_DIGITS: Final = 19  # digits of 2**63 - 1, the largest integer in JSON
_KINDS: Final = {
    stat.S_IFREG: "a regular file", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a character device", stat.S_IFBLK: "a block device",
}  # fmt: skip
GGUF: Final = "a GGUF file"
ZIP: Final = "a zip archive, such as .npz or .bin"
CONTENT_BYTES: Final = 16  # the first bytes of a file, which ``content_of`` reads
_CONTENTS: Final[dict[str, Callable[[bytes], bool]]] = {  # tests of first bytes, for files that people name by mistake
    GGUF: lambda start: start[:4] == b"GGUF" and not start[5:8].strip(bytes(1)),
    "a safetensors file": lambda start: start[5:9] == bytes(3) + b"{",
    ZIP: lambda start: start[:4] == b"PK\3\4",
    "a NumPy array": lambda start: start[:6] == b"\x93NUMPY",
    "compressed by gzip": lambda start: start[:2] == b"\x1f\x8b",
    "text in UTF-16": lambda start: start[:2] in (b"\xff\xfe", b"\xfe\xff"),
    "empty": lambda start: not start,
}


def cache_folder() -> Path | None:
    """The package's cache folder; None where the user has no home directory."""
    if chosen := os.environ.get("ZINC_ATTN_CACHE_DIR"):
        return Path(chosen)
    try:
        folder = platformdirs.user_cache_path("zinc_attn", appauthor=False)
    except RuntimeError:  # without a home directory; older versions of platformdirs return a path that begins with ~
        return None
    return folder if folder.is_absolute() else None


# --- reading -----------------------------------------------------------------------------------------------


def open_regular(path: Path) -> io.FileIO:
    """``path``, open for reading. OSError with a reason: it is no regular file, and was not opened."""
    mode = _mode(path)
    if stat.S_ISREG(mode):
        file = io.FileIO(path)  # one call into C: Ctrl-C cannot come between a descriptor and its owner
        try:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode):
                return file
        except BaseException:
            file.close()
            raise
        file.close()
    raise OSError(0, f"it is {kind_of(mode)}")


@contextmanager
def refusing(path: Path, expected: str, error: type[ArgumentError] = ArgumentError) -> Iterator[None]:
    """A block that reads ``path``: its OSError becomes ``error``. expected: what the file should be, in words."""
    try:
        yield
    except OSError as failed:
        raise error(f"{plain(path)}: cannot be read: {failed.strerror or failed}; expected {expected}") from failed


def read_file(path: Path, expected: str, error: type[ArgumentError] = ArgumentError) -> bytes:
    """All bytes of a regular file of at most MOST_BYTES. Errors: see ``refusing``."""
    with refusing(path, expected, error), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise OSError(0, f"it has {size:,} bytes, more than {MOST_BYTES:,}")
        data = file.read(size)
        if len(data) < size:
            raise OSError(0, f"it ended at byte {len(data):,} while it was read")
        return data


def read_text(path: Path, expected: str, error: type[ArgumentError] = ArgumentError) -> str:
    """The text of a UTF-8 file that is not empty. Errors: see ``read_file``."""
    data = read_file(path, expected, error)
    with refusing(path, expected, error):
        if kind := content_of(data):
            raise OSError(0, f"it is {kind}")
        try:
            return data.decode()
        except UnicodeDecodeError as failed:
            raise OSError(0, f"it is no UTF-8: {failed.reason} at byte {failed.start:,}") from None


def read_json(path: Path, expected: str) -> Any:
    """The value in a JSON file. Errors: see ``read_text``."""
    return json_of(read_text(path, expected), path, expected)


def json_of(text: str, path: Path, expected: str, error: type[ArgumentError] = ArgumentError) -> Any:
    """The JSON value of ``text``, which was read from ``path``."""
    with refusing(path, expected, error):
        try:
            return parse_json(text)
        except ValueError as failed:
            raise OSError(0, f"it is not JSON: {failed}") from None


def content_of(data: bytes) -> str | None:
    """The kind of file that begins with ``data``, in words; None for text and for unknown kinds."""
    return next((name for name, is_it in _CONTENTS.items() if is_it(data[:CONTENT_BYTES])), None)


def parse_json(text: str, **hooks: Any) -> Any:
    """``json.loads`` with its ``hooks``. ValueError also for JSON nested too deeply, and for too long an integer."""
    try:
        value = json.loads(text, **{"parse_int": _integer, **hooks})
        level = [value]
        for _ in range(MOST_DEPTH):
            level = [x for entry in level if isinstance(entry, (dict, list)) for x in _values(entry)]
            if not level:
                return value
    except RecursionError:
        pass
    raise ValueError(f"nested too deeply, expected at most {MOST_DEPTH} levels")


def _values(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _integer(text: str) -> int:
    return int(text) if len(text) <= INTEGER_DIGITS else no_integer(text)


def no_integer(text: str) -> NoReturn:
    """Refuse a number that is no integer, or an integer that is too long."""
    raise ValueError(f"got the number {text[:INTEGER_DIGITS]}, expected an integer below 2**63")


# --- writing -----------------------------------------------------------------------------------------------


def check_target(path: Path) -> None:
    """OSError with a reason where ``path`` cannot name a file, or names something else than a regular file."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(mode := _mode(path)):
            raise OSError(0, f"it is {kind_of(mode)}, expected a regular file or a new name")


def check_folder(path: Path) -> None:
    """OSError with a reason unless files can be written in the folder ``path``, or it can be created."""
    place = next(place for place in (path, *path.parents) if _is_there(place))
    if not stat.S_ISDIR(mode := _mode(place)):
        raise OSError(0, f"{place} is {kind_of(mode)}, expected a folder")
    with tempfile.TemporaryFile(dir=place):  # only a file shows that the folder takes one
        pass


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A new file of these permissions, less the process's mask, that takes the place of ``path`` after the block.

    If the block fails, the file is removed and ``path`` stays as it was. OSError: see ``check_target``. A killed
    process leaves the file: its lock, held until it has a name, tells ``remove_unfinished`` whether that process lives.
    """
    check_target(path)
    remove_unfinished(path)
    temporary = path
    try:
        while True:
            temporary = path.with_name(f"{_unfinished(path)}{secrets.token_hex(8)}.tmp")
            with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:  # one C call: no descriptor is lost
                with suppress(OSError):  # a file system without locks: nobody gets this one, so nobody removes it
                    fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file.fileno()).st_nlink:  # otherwise another process removed it before it was locked
                    yield file
                    file.flush()
                    os.replace(temporary, path)
                    return
    except BaseException:
        with suppress(OSError):  # the first error is raised; a file system that is gone has no file to remove
            if temporary != path:
                temporary.unlink(missing_ok=True)
        raise


def remove_unfinished(path: Path) -> None:
    """Remove the files of ``replacing`` for ``path`` whose processes were killed: those that nobody has locked."""
    begin = _unfinished(path)
    with suppress(OSError, ValueError):  # a folder that is not there, or that cannot be read, has none to remove
        for name in os.listdir(path.parent):
            if name.startswith(begin):
                with suppress(OSError), open(path.with_name(name), "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError where its process lives
                    path.with_name(name).unlink(missing_ok=True)


def _unfinished(path: Path) -> str:
    """The prefix of temporary names of ``replacing``; short, since ``path`` may have the longest possible name."""
    return f".{hashlib.sha256(path.name.encode(errors='surrogatepass')).hexdigest()[:16]}."


def kind_of(mode: int) -> str:
    """The kind of a file with this mode, with its article."""
    return _KINDS.get(stat.S_IFMT(mode), "no regular file")


def _mode(path: Path) -> int:
    try:
        return os.stat(path).st_mode
    except ValueError as error:  # NUL, or characters that no file name has here
        raise OSError(0, f"{error}, expected the path of a file") from None


def _is_there(path: Path) -> bool:
    with suppress(FileNotFoundError):
        return bool(_mode(path))
    return False
