"""The tables of a benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ..harness.tables import figure, grouped
from .rows import BenchRow

HOST_FIGURES: Final = (  # heading, measure and field
    ("empty submit\nµs", "empty submit", "median_us"),
    ("call\nµs", "call", "median_us"),
    ("steady call\nµs", "steady call", "median_us"),
    ("IQR\nµs", "steady call", "iqr_us"),
    ("host per call\nµs", "host per call", "median_us"),
    ("of it caller's\nCPU µs", "host per call", "caller_us"),
)
FIGURES: Final = (
    ("call\nµs", "call", "median_us"),
    ("IQR\nµs", "call", "iqr_us"),
    ("CPU\nµs", "call", "cpu_us"),
    ("steady\ncall µs", "steady call", "median_us"),
    *((f"{measure}\nµs", measure, "median_us") for measure in ("pass 1", "gap", "pass 2")),
    ("KV\nGB/s", "call", "kv_gb_s"),
    ("of\nread", "call", "of_read"),
    ("device\nGB/s", "device", "kv_gb_s"),
    ("of\nread", "device", "of_read"),
)
HOST_COLUMNS: Final = ("shape", "runtime", *(heading for heading, *_ in HOST_FIGURES))
COLUMNS: Final = ("shape", "context", "runtime", "layout", "verified", *(heading for heading, *_ in FIGURES))


def table_cells(rows: Iterable[BenchRow]) -> tuple[list[list[str]], list[list[str]]]:
    """Lines of HOST_COLUMNS, one per shape and runtime; and lines of COLUMNS, one per context and layout too.

    IQR: between the quartiles of the steady call, or of the call. CPU: of the call, all threads.
    """
    subjects = grouped(((row.shape, row.context, row.runtime, row.layout), row) for row in rows)
    host, main = [], []
    for (shape, context, runtime, layout), mine in subjects.items():
        measures, row = {row.measure: row for row in mine}, mine[0]
        cells = [_cell(measures, *names) for _, *names in (FIGURES if context else HOST_FIGURES)]
        word = (row.verified or "") if row.status == "ok" else f"{row.status.upper()}: {row.note}"
        if context:
            main.append([shape, f"{context:,}", runtime, layout, word, *cells])
        else:
            host.append([shape, runtime, *cells])
    return host, main


def _cell(measures: Mapping[str, BenchRow], measure: str, field: str) -> str:
    """One field of one measure; the field iqr_us is the distance of the quartiles."""
    row = measures.get(measure)
    if field == "iqr_us":
        return figure(None if row is None or row.q1_us is None or row.q3_us is None else row.q3_us - row.q1_us)
    x = getattr(row, field, None)
    return f"{x:.1%}" if field == "of_read" and x is not None else figure(x)
