"""The output of the commands: tables, JSON lines and notes.

Results go to stdout: where it is full or has lost its reader, ``stdout_trouble`` gives the status of the process.
Everything else goes to stderr: output that it does not take is lost, and changes no status.
"""

import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, TextIO

from ..errors import ZincAttnError
from ..runtime.protocol import DeviceInfo
from ..tools.harness.progress import Progress
from ..tools.models import ModelPreset

QUIET_S: Final = 5.0  # between two lines of progress
EX_IOERR: Final = 74  # of sysexits.h
NO_READER: Final = 141  # of a process that SIGPIPE ends, as a shell counts it


def need(package: str) -> None:
    """Refuse where a package of the extra ``cli`` is missing."""
    if importlib.util.find_spec(package) is None:
        raise ZincAttnError(f"this command needs {package}: pip install 'zinc-attn[cli]'")


def open_streams() -> None:
    """Let stdout and stderr replace characters that their encodings lack; a closed stream becomes the null device."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until the end)
        setattr(sys, name, stream)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def stdout_trouble(write: bool = False) -> int | None:
    """Flush stdout; write: an empty line first. Where that fails, the process's exit status, and a line on stderr."""
    try:
        if write:
            print()
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        return NO_READER
    except OSError as error:
        _discard(sys.stdout)
        say(f"zinc-attn: error: stdout cannot be written: {error.strerror or error}; the results are incomplete")
        return EX_IOERR
    return None


def _discard(stream: TextIO) -> None:
    """Send a stream's buffer to the null device, so that the interpreter's flush at exit does not fail."""
    with suppress(OSError, ValueError):  # a stream without a file descriptor buffers nothing
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_json(records: Iterable[dict[str, Any]]) -> None:
    """JSON lines on stdout, with escapes where its encoding may lack a character."""
    for record in records:
        plain = not sys.stdout.encoding.lower().startswith("utf")
        print(json.dumps(record, ensure_ascii=plain, allow_nan=False), flush=True)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 0, sections: int = 0) -> None:
    """The table of these columns and rows on stdout, aligned with spaces. It is never cut: a terminal may wrap it.

    columns: headings, of several lines perhaps; left: columns aligned to the left; sections: first cells whose change
    is set off by an empty line.
    """
    lines = [list(row) for row in rows]
    headings = [name.split("\n") for name in columns]
    above = [list(line) for line in zip_longest(*(reversed(heading) for heading in headings), fillvalue="")][::-1]
    widths = [max(map(len, column)) for column in zip(*above, *lines, strict=True)]
    for index, line in enumerate([*above, *lines], -len(above)):
        if index == 0:
            print("─" * (sum(widths) + 2 * len(widths) - 2))
        elif index > 0 and lines[index - 1][:sections] != line[:sections]:
            print()
        cells = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


def say(text: str) -> None:
    """A line on stderr."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def say_written(paths: Iterable[Path]) -> None:
    """Name the files that a command wrote."""
    say(f"written: {', '.join(map(str, paths))}")


def note_cpu(info: DeviceInfo) -> None:
    """Say plainly that a software driver runs."""
    if info.kind == "cpu":
        say(f"not a GPU: running on the CPU through {info.name}")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on stderr; lines where stderr is no terminal, or without rich."""
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        with _progress_lines() as told:
            yield told
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    text = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)


@contextmanager
def _progress_lines() -> Iterator[Progress]:
    """Every QUIET_S seconds a line on stderr that names the current work, unless the last line named it."""
    now, ended = ["starting …"], threading.Event()

    def tell() -> None:
        said = ""
        while not ended.wait(QUIET_S):
            if said != (said := now[0]):
                say(said)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield lambda what, done, total: now.__setitem__(0, f"{what} ({done} of {total})")
    finally:
        ended.set()
        teller.join()


def model_text(model: ModelPreset, dtype: str) -> str:
    """The model's name, if it has one, its shape and the dtype of K and V."""
    name = "" if model.name == str(model.shape) else f"{model.name}: "
    return f"{name}shape {model.shape}, {dtype}"


def arithmetic_text(arithmetic: str) -> str:
    """The end of a heading that names attention's arithmetic; empty for the canonical one."""
    return "" if arithmetic == "canonical" else f"; arithmetic {arithmetic}"


def binary_size(nbytes: int) -> str:
    """134217728 to "128 MiB"."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def plural(count: int, noun: str) -> str:
    """2 and "layer" to "2 layers"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
