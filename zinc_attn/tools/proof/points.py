"""The measured points of a proof: what each restart measured, their spread, and the model's word beside them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...shapes import AttnShape
from ..cost import ChosenCard, MeasuredPoint, compare_point, measured_points
from ..harness.tables import grouped
from .steps import Row, StepResult

_SWEEP_KEY: Final = ("shape", "dtype", "context", "layout", "q_len")
_BENCH_KEY: Final = ("shape", "dtype", "context", "layout")
_TIMES: Final = ("host_us", "device_us", "pass1_us", "gap_us", "pass2_us")
_ORDER: Final = {"failed": 0, "refused": 1, "ok": 2}  # a point has the worst status of its restarts


def sweep_summary(results: Sequence[StepResult], card: ChosenCard | None) -> list[dict[str, Any]]:
    """A record per point of the sweeps: times in µs by the host's clock, rates in GB/s (1e9 bytes).

    median_us: the median of the restarts' medians. spread: the largest of these over the least. modeled_us, ratio and
    same_plan: see ``Comparison``; None without a card.
    """
    rows = _by_restart(results, "sweep")
    groups = grouped((_sweep_key(row), (restart, row)) for restart, row in rows)
    return [_sweep_point(key, mine, card) for key, mine in groups.items()]


def _sweep_key(row: Row) -> tuple[Any, ...]:
    shape = AttnShape(*(row[name] for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim")))
    return (str(shape), *(row[name] for name in _SWEEP_KEY[1:]))


def _sweep_point(key: tuple[Any, ...], rows: Sequence[tuple[int, Row]], card: ChosenCard | None) -> dict[str, Any]:
    timed = [(restart, row) for restart, row in rows if row["median_us"] is not None]
    medians = [row["median_us"] for _, row in timed]
    points = measured_points(row for _, row in timed)[0]
    names = ("median_us", "iqr_us", "repeats")
    restarts = [{"restart": restart, **{name: row[name] for name in names}} for restart, row in timed]
    worst = min((row for _, row in rows), key=lambda row: _ORDER[row["status"]])
    return {
        **dict(zip(_SWEEP_KEY, key, strict=True)),
        "splits": worst["num_splits"],
        **{name: worst[name] for name in ("build", "status", "verified", "error")},
        "restarts": restarts,
        **_spread(medians),
        "kv_gb_s": _median([row["kv_gb_s"] for _, row in timed]),
        **_beside_model(points, card),
    }


def bench_summary(results: Sequence[StepResult], card: ChosenCard | None) -> list[dict[str, Any]]:
    """A record per shape, context and layout of the benches that the model knows: medians of the restarts' medians.

    read_gb_s: the rate at which a kernel that only reads K and V reads them, by device timestamps. spread: of the
    whole call on the device, or by the host's clock where the device has no timestamps.
    """
    rows = _by_restart(results, "bench")
    yardstick = grouped(
        ((row["shape"], row["context"]), row["kv_gb_s"])
        for _, row in rows
        if row["layout"] == "read" and row["measure"] == "device" and row["kv_gb_s"] is not None
    )
    each = [(restart, point) for restart, mine in grouped(rows).items() for point in measured_points(mine)[0]]
    groups = grouped((tuple(getattr(one, name) for name in _BENCH_KEY), (restart, one)) for restart, one in each)
    found = []
    for key, mine in groups.items():
        about, points = dict(zip(_BENCH_KEY, key, strict=True)), [point for _, point in mine]
        found.append(
            {
                **about,
                "status": "ok",
                "restarts": [{"restart": n, **{name: getattr(one, name) for name in _TIMES}} for n, one in mine],
                **{name: _median([getattr(point, name) for point in points]) for name in _TIMES},
                "clock": points[0].clock,
                "spread": _spread([point.total_us for point in points])["spread"],
                "read_gb_s": _median(yardstick.get((about["shape"], about["context"]), [])),
                **_beside_model(points, card),
            }
        )
    return found + _untimed(rows)


def _untimed(rows: Sequence[tuple[int, Row]]) -> list[dict[str, Any]]:
    """The bench rows that failed or were refused, but for baselines, each once."""
    names = (*_BENCH_KEY, "status")
    bad = [row for _, row in rows if row["status"] != "ok" and row["layout"] != "baseline"]
    found = {tuple(row[name] for name in names): row["note"] for row in bad}
    return [{**dict(zip(names, key, strict=True)), "error": note} for key, note in found.items()]


def _by_restart(results: Sequence[StepResult], command: str) -> list[tuple[int, Row]]:
    return [(one.step.restart, row) for one in results if one.step.command == command for row in one.rows]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None


def _spread(medians: Sequence[float]) -> dict[str, float | None]:
    """The median of the restarts' medians, and the largest over the least; 1 where there is one restart."""
    spread = round(max(medians) / min(medians), 4) if medians and min(medians) > 0 else None
    return {"median_us": _median(medians), "spread": spread}


def _beside_model(points: Sequence[MeasuredPoint], card: ChosenCard | None) -> Mapping[str, Any]:
    """The model's times, and the medians over the restarts of measured over modeled; None without a card or a time."""
    found = [compare_point(point, card) for point in points] if card else []
    times = {"modeled_us": "total_us", "modeled_pass1_us": "pass1_us", "modeled_merge_us": "merge_us"}
    ratios = ("ratio", "pass1_ratio", "merge_ratio")
    if not found:
        return dict.fromkeys((*times, *ratios, "same_plan"))
    return {
        **{name: round(getattr(found[0].modeled, of), 4) for name, of in times.items()},
        **{name: _median([getattr(one, name) for one in found]) for name in ratios},
        "same_plan": all(one.same_plan for one in found),
    }
