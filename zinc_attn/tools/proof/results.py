"""What the restarts of a proof say together: of the bits, and of each measured point beside the model."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ...shapes import AttnShape
from ..check.record import committed_digests, run_digest
from ..cost import ChosenCard, MeasuredPoint, compare_point, measured_points
from ..harness.tables import grouped
from .steps import Row, StepResult

MOST_FAULTS: Final = 20  # in the report; stdout.jsonl has all
_BENCH_KEY: Final = ("shape", "dtype", "context", "layout")
_SWEEP_KEY: Final = (*_BENCH_KEY, "q_len")
_TIMES: Final = ("host_us", "device_us", "pass1_us", "gap_us", "pass2_us")
_ORDER: Final = {"failed": 0, "refused": 1, "ok": 2}  # a point has the worst status of its restarts


def bits_summary(results: Sequence[StepResult]) -> dict[str, Any]:
    """The checks among ``results``.

    restarts: per check the digest over its cases (None where it did not get that far) and how many cases ended how.
    agree: whether every restart has the same digest, None before the first check. committed: the digest of the same
    cases in the package's record, None where the record lacks one. equals_committed: whether every restart has that
    one. faults: the first wrong bits.
    """
    restarts: list[dict[str, Any]] = []
    names: set[str] = set()
    faults: list[dict[str, Any]] = []
    for one in (one for one in results if one.step.command == "check"):
        cases: dict[str, str] = {}  # of the last row, which it prints when all are done
        for row in one.rows:
            cases = row["cases"] if "made_by" in row else cases
        names |= set(cases)
        ended = [row for row in one.rows if "case" in row]
        counts = Counter(row["status"] for row in ended)
        about = {"restart": one.step.restart, "status": one.status, "digest": run_digest(cases) if cases else None}
        restarts.append({**about, "passed": counts["pass"], "failed": counts["FAIL"], "refused": counts["refused"]})
        faults += [
            {"restart": one.step.restart, "case": row["case"], **{k: fault[k] for k in ("variation", "text")}}
            for row in ended
            for fault in row["faults"]
        ]
    known, digests = committed_digests(), {one["digest"] for one in restarts}
    committed = run_digest({case: known[case] for case in names}) if names and names <= set(known) else None
    return {
        "restarts": restarts,
        "cases": len(names),
        "agree": len(digests) == 1 and None not in digests if restarts else None,
        "committed": committed,
        "equals_committed": None if committed is None else digests == {committed},
        "faults": faults[:MOST_FAULTS],
    }


def sweep_summary(results: Sequence[StepResult], card: ChosenCard | None) -> list[dict[str, Any]]:
    """A record per point of the sweeps: times in µs by the host's clock, rates in GB/s (1e9 bytes).

    median_us: the median of the restarts' medians. spread: the largest of these over the least. modeled_us, ratio and
    same_plan: see ``Comparison``; None without a card.
    """
    found = []
    for key, rows in grouped((_sweep_key(row), (n, row)) for n, row in _rows(results, "sweep")).items():
        timed = [(restart, row) for restart, row in rows if row["median_us"] is not None]
        medians = [row["median_us"] for _, row in timed]
        worst = min((row for _, row in rows), key=lambda row: _ORDER[row["status"]])
        found.append(
            {
                **dict(zip(_SWEEP_KEY, key, strict=True)),
                "splits": worst["num_splits"],
                **{name: worst[name] for name in ("build", "status", "verified", "error")},
                "restarts": [
                    {"restart": n, **{name: row[name] for name in ("median_us", "iqr_us", "repeats")}}
                    for n, row in timed
                ],
                "median_us": _median(medians),
                "spread": _spread(medians),
                "kv_gb_s": _median(row["kv_gb_s"] for _, row in timed),
                **_beside_model(measured_points(row for _, row in timed)[0], card),
            }
        )
    return found


def _sweep_key(row: Row) -> tuple[Any, ...]:
    shape = AttnShape(*(row[name] for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim")))
    return (str(shape), *(row[name] for name in _SWEEP_KEY[1:]))


def bench_summary(results: Sequence[StepResult], card: ChosenCard | None) -> list[dict[str, Any]]:
    """A record per shape, context and layout of the benches that the model knows: medians of the restarts' medians.

    read_gb_s: the rate at which a kernel that only reads K and V reads them, by device timestamps. spread: of the
    whole call on the device, or by the host's clock where the device has no timestamps. The rows that failed or were
    refused follow, each once, but for baselines.
    """
    rows = _rows(results, "bench")
    yardstick = grouped(
        ((row["shape"], row["context"]), row["kv_gb_s"])
        for _, row in rows
        if row["layout"] == "read" and row["measure"] == "device" and row["kv_gb_s"] is not None
    )
    each = [(restart, point) for restart, mine in grouped(rows).items() for point in measured_points(mine)[0]]
    groups = grouped((tuple(getattr(one, name) for name in _BENCH_KEY), (restart, one)) for restart, one in each)
    found = []
    for key, pairs in groups.items():
        about, points = dict(zip(_BENCH_KEY, key, strict=True)), [point for _, point in pairs]
        restarts = [{"restart": n, **{name: getattr(one, name) for name in _TIMES}} for n, one in pairs]
        found.append(
            {
                **about,
                "status": "ok",
                "restarts": restarts,
                **{name: _median(one[name] for one in restarts) for name in _TIMES},
                "clock": points[0].clock,
                "spread": _spread([point.total_us for point in points]),
                "read_gb_s": _median(yardstick.get((about["shape"], about["context"]), [])),
                **_beside_model(points, card),
            }
        )
    names = (*_BENCH_KEY, "status")
    bad = [row for _, row in rows if row["status"] != "ok" and row["layout"] != "baseline"]
    untimed = {tuple(row[name] for name in names): row["note"] for row in bad}
    return found + [{**dict(zip(names, key, strict=True)), "error": note} for key, note in untimed.items()]


def _rows(results: Sequence[StepResult], command: str) -> list[tuple[int, Row]]:
    """(restart, row) of every row that the command printed."""
    return [(one.step.restart, row) for one in results if one.step.command == command for row in one.rows]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None


def _spread(medians: Sequence[float]) -> float | None:
    """The largest of the restarts' medians over the least; 1 where there is one restart."""
    return round(max(medians) / min(medians), 4) if medians and min(medians) > 0 else None


def _beside_model(points: Sequence[MeasuredPoint], card: ChosenCard | None) -> Mapping[str, Any]:
    """The model's times, and the medians over the restarts of measured over modeled; None without a card or a time."""
    found = [compare_point(point, card) for point in points] if card else []
    times = {"modeled_us": "total_us", "modeled_pass1_us": "pass1_us", "modeled_merge_us": "merge_us"}
    ratios = ("ratio", "pass1_ratio", "merge_ratio")
    if not found:
        return dict.fromkeys((*times, *ratios, "same_plan"))
    return {
        **{name: round(getattr(found[0].modeled, of), 4) for name, of in times.items()},
        **{name: _median(getattr(one, name) for one in found) for name in ratios},
        "same_plan": all(one.same_plan for one in found),
    }
