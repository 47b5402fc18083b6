"""Measured calls beside the model: the rows that ``bench --json`` and ``sweep --json`` print, and a prediction of each.

The model times a call from the begin of pass 1 to the end of pass 2. A bench has that span by the device's timestamps,
and both passes apart; a sweep has the host's clock around a whole decode call, which also submits, appends the new row
and reads the output back. ``MeasuredPoint.clock`` says which of the two a ratio rests on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Final

from ...checks import shown
from ...errors import ArgumentError
from ...kernels.tuning import LayoutFacts
from ...shapes import AttnShape
from ..harness.split_spec import SplitSpec
from .calls import predict_call
from .cards import ChosenCard
from .predict import Prediction

Row = Mapping[str, Any]
_BENCH_LAYOUTS: Final = {"auto": "auto", "1 split": "1"}  # those that the model knows, as SplitSpec reads them
_KINDS: Final[dict[str, Any]] = {
    "str": str,
    "int": int,
    "int | None": (int, type(None)),
    "float | None": (int, float, type(None)),
}
_TIMES: Final = {"call": "host_us", "device": "device_us", "pass 1": "pass1_us", "gap": "gap_us", "pass 2": "pass2_us"}
_SHARED: Final = ("device", "device_kind", "driver", "runtime", "dtype", "context", "plan")  # fields of both commands


@dataclass(frozen=True)
class MeasuredPoint:
    """One decode call of one layer and one sequence, as a device took it: medians in µs, None where not measured.

    layout: as SplitSpec reads it. plan: fingerprint. compute_units: None where the rows do not have it. device_us: from
    the begin of the first dispatch to the end of the last. host_us: the whole call by the host's clock.
    """

    device: str
    device_kind: str
    driver: str
    runtime: str
    shape: str
    dtype: str
    context: int
    layout: str
    q_len: int
    plan: str
    compute_units: int | None
    host_us: float | None = None
    device_us: float | None = None
    pass1_us: float | None = None
    gap_us: float | None = None
    pass2_us: float | None = None

    @property
    def clock(self) -> str:
        """Which clock ``total_us`` is by: host or device."""
        return "host" if self.device_us is None else "device"

    @property
    def total_us(self) -> float:
        """The device's span where it was measured, else the host's."""
        total = self.host_us if self.device_us is None else self.device_us
        assert total is not None  # measured_points makes no point without a time
        return total

    @property
    def merge_us(self) -> float | None:
        """Pass 2 with the gap before it, as the model counts it."""
        return None if self.pass2_us is None else self.pass2_us + (self.gap_us or 0.0)


@dataclass(frozen=True)
class Comparison:
    """A measured call beside the model's.

    chosen: the card that was modeled. same_plan: whether the model timed the layout that ran; otherwise the split rule
    of this version lays the call out in another way. The ratios are measured over modeled: of the whole call, of pass 1
    and of the gap with pass 2; None where the rows do not have it, or the call has one pass.
    """

    point: MeasuredPoint
    chosen: ChosenCard
    modeled: Prediction
    same_plan: bool
    ratio: float
    pass1_ratio: float | None
    merge_ratio: float | None


def measured_points(rows: Iterable[Row]) -> tuple[list[MeasuredPoint], Counter[str]]:
    """The calls that the model covers, in the order of the rows; and how many rows were left out, by the reason.

    The rows of one bench point, a measure each, become one point; a measure that the point already has begins the same
    point of another run. ArgumentError: a row lacks a field.
    """
    found: list[dict[str, Any]] = []
    open_points: dict[tuple[Any, ...], dict[str, Any]] = {}
    left_out: Counter[str] = Counter()
    for row in rows:
        try:
            if reason := _uncovered(row):
                left_out[reason] += 1
                continue
            call, name, us = _call(row), _TIMES.get(row.get("measure", "call")), row["median_us"]
            _check_kinds(call | {name: us} if name else call)
        except (KeyError, TypeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else f"a value of another kind: {error}"
            raise ArgumentError(f"a row has {what}; expected rows of bench --json or sweep --json") from error
        key = ("measure" in row, *call.values())
        if key not in open_points or name in open_points[key]:
            found.append(call)
            open_points[key] = call
        if name:
            open_points[key][name] = us
    points = [MeasuredPoint(**one) for one in found]
    return [one for one in points if one.host_us is not None or one.device_us is not None], left_out


def _check_kinds(values: Mapping[str, Any]) -> None:
    """Refuse values that are not of the kinds of MeasuredPoint's fields."""
    for one in fields(MeasuredPoint):
        if one.name in values and not isinstance(value := values[one.name], _KINDS[str(one.type)]):
            raise ArgumentError(f"{one.name}: got {shown(value)}, expected {one.type}")


def _uncovered(row: Row) -> str | None:
    """Why the model has no word on a row; None where it has."""
    if row["status"] != "ok":
        return str(row["status"])
    if row.get("arithmetic") not in (None, "canonical"):  # a yardstick has none, and older files have no such field
        return f"of arithmetic {row['arithmetic']}"
    if "measure" in row:
        found = str(row["layout"]) if row["context"] else "host work without keys"
        return None if found in _BENCH_LAYOUTS else found
    if row["median_us"] is None:
        return "without a time"
    if row["batch"] > 1:
        return "several sequences in a call"
    return "several ranks" if row["ranks"] > 1 else None


def _call(row: Row) -> dict[str, Any]:
    """The fields of MeasuredPoint but for its times."""
    if "measure" in row:
        own = {"shape": row["shape"], "layout": _BENCH_LAYOUTS[row["layout"]], "q_len": 1}
        return {name: row[name] for name in _SHARED} | own | {"compute_units": row.get("compute_units")}
    shape = AttnShape(*(row[name] for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim")))
    return {name: row[name] for name in (*_SHARED, "layout", "q_len", "compute_units")} | {"shape": str(shape)}


def compare_point(point: MeasuredPoint, chosen: ChosenCard) -> Comparison:
    """A measured call beside the model's on the chosen card, of the layout that ran where the rule still has it."""
    card, shape, split = chosen.card, AttnShape.parse(point.shape), SplitSpec.parse(point.layout)
    units = (card.compute_units if point.compute_units is None else point.compute_units, card.compute_units)
    facts = [LayoutFacts(n, point.device_kind, node) for n, node in product(units, (True, False))]
    plans = [split.plan(point.context, shape, one, point.dtype, point.q_len) for one in facts]
    same = [plan for plan in plans if plan.fingerprint() == point.plan]
    modeled = predict_call((same or plans)[0], card, point.dtype)
    ratio = point.total_us / modeled.total_us
    pass1_ratio = None if point.pass1_us is None else point.pass1_us / modeled.pass1_us
    merge_ratio = point.merge_us / modeled.merge_us if point.merge_us is not None and modeled.merge_us else None
    return Comparison(point, chosen, modeled, bool(same), ratio, pass1_ratio, merge_ratio)
