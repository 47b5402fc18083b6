"""The tables of a benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ..harness.tables import figure, grouped
from .rows import BenchRow

COLUMNS: Final = (
    *("shape", "context", "runtime", "layout", "verified", "call\nµs", "IQR\nµs", "CPU\nµs", "steady\ncall µs"),
    *("pass 1\nµs", "gap\nµs", "pass 2\nµs", "KV\nGB/s", "of\nread", "device\nGB/s", "of\nread"),
)
HOST_FIGURES: Final = {  # heading to measure and field
    "empty submit\nµs": ("empty submit", "median_us"),
    "call\nµs": ("call", "median_us"),
    "steady call\nµs": ("steady call", "median_us"),
    "IQR\nµs": ("steady call", "iqr_us"),
    "host per call\nµs": ("host per call", "median_us"),
    "of it caller's\nCPU µs": ("host per call", "caller_us"),
}
HOST_COLUMNS: Final = ("shape", "runtime", *HOST_FIGURES)


def table_cells(rows: Iterable[BenchRow]) -> tuple[list[list[str]], list[list[str]]]:
    """Lines of HOST_COLUMNS, one per shape and runtime; and lines of COLUMNS, one per context and layout too.

    IQR: between the quartiles of the steady call, or of the call. CPU: of the call, all threads.
    """
    subjects = grouped(((row.shape, row.context, row.runtime, row.layout), row) for row in rows)
    host, main = [], []
    for (shape, context, runtime, layout), mine in subjects.items():
        measures = {row.measure: row for row in mine}
        if context:
            figures = [("call", "median_us"), ("call", "iqr_us"), ("call", "cpu_us")]
            figures += [(measure, "median_us") for measure in ("steady call", "pass 1", "gap", "pass 2")]
            figures += [(measure, field) for measure in ("call", "device") for field in ("kv_gb_s", "of_read")]
            row = mine[0]
            word = (row.verified or "") if row.status == "ok" else f"{row.status.upper()}: {row.note}"
            main.append([shape, f"{context:,}", runtime, layout, word, *(_cell(measures, *one) for one in figures)])
        else:
            host.append([shape, runtime, *(_cell(measures, *one) for one in HOST_FIGURES.values())])
    return host, main


def _cell(measures: Mapping[str, BenchRow], measure: str, field: str) -> str:
    """One field of one measure; the field iqr_us is the distance of the quartiles."""
    row = measures.get(measure)
    if field == "iqr_us":
        return figure(None if row is None or row.q1_us is None or row.q3_us is None else row.q3_us - row.q1_us)
    x = getattr(row, field, None)
    return f"{x:.1%}" if field == "of_read" and x is not None else figure(x)
