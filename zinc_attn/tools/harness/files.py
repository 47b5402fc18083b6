"""Files that tools leave, written whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ...checks import plain
from ...errors import ArgumentError
from ...files import CONTENT_BYTES, check_folder, check_target, content_of, open_regular, replacing

ELSEWHERE: Final = "choose another folder with --out"


def write_file(path: Path, data: bytes, hint: str = ELSEWHERE) -> None:
    """Write ``path`` whole or not at all, in a folder that is made. ArgumentError, which ends with ``hint``."""
    with _writing(path, hint):
        _check_replaced(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(data)


def check_out(folder: str | Path | None) -> None:
    """Refuse a folder of --out that takes no files, before the work that fills it is done. None: there is no --out."""
    if folder is not None:
        with _writing(Path(folder), ELSEWHERE):
            check_folder(Path(folder))


def check_file(path: Path, hint: str) -> None:
    """Refuse a file that ``write_file`` could not write, before the work that makes its content is done."""
    with _writing(path, hint):
        _check_replaced(path)
        check_folder(path.parent)


def _check_replaced(path: Path) -> None:
    """OSError where ``path`` takes no file, or is a file that no tool writes, such as a checkpoint."""
    check_target(path)
    with suppress(FileNotFoundError), open_regular(path) as file:
        if (content := content_of(file.read(CONTENT_BYTES))) not in (None, "empty"):
            raise OSError(0, f"it is {content}, expected a new name or a file of this program's")


@contextmanager
def _writing(path: Path, hint: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArgumentError(f"{plain(path)}: cannot be written: {error.strerror or error}; {hint}") from error
