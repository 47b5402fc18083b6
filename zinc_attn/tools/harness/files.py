"""Files that tools leave: rows of a dataclass as JSON lines and as CSV, written whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ...errors import ArgumentError


def json_line(row: Any) -> str:
    """A dataclass as one line of JSON, its floats rounded to 6 digits."""
    return json.dumps(rounded(row), ensure_ascii=False, allow_nan=False)


def csv_text(rows: Sequence[Any]) -> str:
    """A header, and one line per row of one dataclass (at least one); a field that is None is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(rows[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(rounded, rows))
    return text.getvalue()


def rounded(row: Any) -> dict[str, Any]:
    """The fields of a dataclass, floats rounded to 6 digits."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in asdict(row).items()}


def write_file(path: Path, data: bytes, hint: str = "choose another folder with --out") -> None:
    """Write to a temporary name beside ``path``, then rename. ArgumentError where the folder takes no files."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}; {hint}") from error
    finally:
        if temporary is not None:
            with suppress(OSError):  # after the rename there is none
                os.unlink(temporary)


def write_report(folder: Path, name: str, rows: Sequence[Any], png: bytes | None) -> list[Path]:
    """Write ``name``.csv and ``name``.jsonl, and ``name``.png where there is a picture; the paths written."""
    files: Mapping[str, bytes | None] = {
        "csv": csv_text(rows).encode(),
        "jsonl": "".join(f"{json_line(row)}\n" for row in rows).encode(),
        "png": png,
    }
    made = {folder / f"{name}.{suffix}": data for suffix, data in files.items() if data is not None}
    for path, data in made.items():
        write_file(path, data)
    return list(made)
