"""What the commands print: tables, JSON lines and notes. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ..errors import ZincAttnError
from ..runtime.device import list_devices
from ..runtime.protocol import DeviceInfo
from ..tools.harness.progress import Progress
from ..tools.harness.tables import MISSING
from ..tools.models import ModelPreset

TABLE_COLUMNS: Final = 240  # characters of the widest table
STYLES: Final = {"FAILED": "bold red", "DIFFERENT": "bold red", "refused": "yellow", "host differs": "yellow"}


def has_rich() -> bool:
    """Whether the package that draws tables and progress bars is installed."""
    return importlib.util.find_spec("rich") is not None


def need(*packages: str) -> None:
    """Refuse where a package of the extra ``cli`` is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ZincAttnError(f"this command needs {' and '.join(missing)}: pip install 'zinc-attn[cli]'")


# --- stdout ------------------------------------------------------------------------------------------------


def print_json(records: Iterable[dict[str, Any]]) -> None:
    """JSON lines on stdout, with escapes where its encoding may lack a character."""
    for record in records:
        plain = not sys.stdout.encoding.lower().startswith("utf")
        print(json.dumps(record, ensure_ascii=plain, allow_nan=False), flush=True)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 0, sections: int = 0) -> None:
    """The table of these columns and rows on stdout; without rich the same text in plain columns.

    left: columns aligned to the left; sections: first cells whose change is set off. A row with one of STYLES has its
    color. The table is never cut: a terminal that is narrower wraps it.
    """
    lines = [list(row) for row in rows]
    if not has_rich():
        _print_plain([[name.replace("\n", " ") for name in columns], *lines], left)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    for before, line in zip([*lines[:1], *lines], lines, strict=False):
        if before[:sections] != line[:sections]:
            table.add_section()
        table.add_row(*line, style=next((STYLES[cell] for cell in line if cell in STYLES), None))
    Console(markup=False, highlight=False, emoji=False, width=TABLE_COLUMNS).print(table)


def _print_plain(lines: list[list[str]], left: int) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


# --- stderr ------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr)


def say_written(paths: Iterable[Path]) -> None:
    """Name the files that a command wrote."""
    say(f"written: {', '.join(map(str, paths))}")


def note_cpu(info: DeviceInfo) -> None:
    """Say plainly that a software driver runs."""
    if info.kind == "cpu":
        names = {"llvmpipe": "lavapipe", "swiftshader": "SwiftShader"}
        driver = next((name for key, name in names.items() if key in info.name.lower()), info.name)
        others = any(d.kind != "cpu" for d in list_devices())
        say(f"{'as asked, not on a GPU' if others else 'no GPU'}: running on the CPU through {driver}")


@contextmanager
def progress_bar(what: str = "starting") -> Iterator[Progress]:
    """A progress bar on stderr that begins with ``what``; nothing where stderr is no terminal, or without rich."""
    if not has_rich():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    text = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Bar(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)


# --- words and numbers -------------------------------------------------------------------------------------


def model_text(model: ModelPreset, dtype: str) -> str:
    """The model's name, if it has one, its shape and the dtype of K and V."""
    name = "" if model.name == str(model.shape) else f"{model.name}: "
    return f"{name}shape {model.shape}, {dtype}"


def arithmetic_text(arithmetic: str) -> str:
    """What a heading says of attention's arithmetic behind its last word: nothing of the canonical one."""
    return "" if arithmetic == "canonical" else f"; arithmetic {arithmetic}"


def binary_size(nbytes: int) -> str:
    """134217728 to "128 MiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def plural(count: int, noun: str) -> str:
    """2 and "layer" to "2 layers"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def count(x: int | None) -> str:
    """1234567 to "1,234,567"."""
    return MISSING if x is None else f"{x:,}"
