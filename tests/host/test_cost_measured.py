"""Rows of bench and sweep beside the model, and the compilers that a prediction names."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from zinc_attn.errors import ArgumentError, KernelError
from zinc_attn.kernels.tuning import LayoutFacts
from zinc_attn.shapes import AttnShape
from zinc_attn.tools import cost
from zinc_attn.tools.cost import CARDS
from zinc_attn.tools.harness.split_spec import SplitSpec

SHAPE = AttnShape(32, 8, 128)
CARD = "AMD Radeon RX 9070 (RADV GFX1201)"
ABOUT = {"device": CARD, "device_kind": "discrete", "driver": "radv", "runtime": "vulkan", "dtype": "f16"}


def fingerprint(layout: str, compute_units: int, node: bool = True) -> str:
    return SplitSpec.parse(layout).plan(8192, SHAPE, LayoutFacts(compute_units, "discrete", node), "f16").fingerprint()


def sweep_row(layout: str = "auto", **change: Any) -> dict[str, Any]:
    sizes = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "compute_units": 56, "q_len": 1}
    row = {**ABOUT, **sizes, "context": 8192, "layout": layout, "plan": fingerprint(layout, 56)}
    return {**row, "status": "ok", "batch": 1, "ranks": 1, "median_us": 100.0, **change}


def bench_row(measure: str, us: float, **change: Any) -> dict[str, Any]:
    row = {**ABOUT, "shape": "32/8/128", "context": 8192, "layout": "1 split", "plan": fingerprint("1", 56)}
    return {**row, "status": "ok", "measure": measure, "median_us": us, **change}


BENCH = [
    bench_row(*one) for one in (("call", 900.0), ("pass 1", 800.0), ("gap", 4.0), ("pass 2", 6.0), ("device", 810.0))
]


def test_rows_become_points() -> None:
    points, left_out = cost.measured_points([
        *BENCH, *BENCH, sweep_row(), sweep_row(batch=3), sweep_row(status="failed"), sweep_row(ranks=2),
        bench_row("call", 1.0, layout="read"), bench_row("call", 1.0, context=0),
    ])  # fmt: skip
    assert [(one.layout, one.clock, one.total_us, one.merge_us) for one in points] == [
        ("1", "device", 810.0, 10.0), ("1", "device", 810.0, 10.0), ("auto", "host", 100.0, None),
    ]  # fmt: skip
    assert sum(left_out.values()) == 5 and left_out["several sequences in a call"] == 1


def test_comparisons() -> None:
    points, _ = cost.measured_points([*BENCH, sweep_row(), sweep_row(plan="00")])
    card = cost.find_card("rx9070")
    one, two, three = (cost.compare_point(point, cost.ChosenCard(card, "its name")) for point in points)
    plans = [SplitSpec.parse(layout).plan(8192, SHAPE, LayoutFacts(56), "f16") for layout in ("1", "auto")]
    single, auto = (cost.predict(plan, card) for plan in plans)
    assert one.same_plan
    assert one.ratio == pytest.approx(810 / single.total_us) and one.pass1_ratio == pytest.approx(800 / single.pass1_us)
    assert one.merge_ratio == pytest.approx(10 / single.merge_us)
    assert two.same_plan and two.ratio == pytest.approx(100 / auto.total_us)
    assert (two.pass1_ratio, two.merge_ratio) == (None, None) and not three.same_plan
    ((point,), _) = cost.measured_points([sweep_row(plan=fingerprint("auto", 56, node=False))])
    four = cost.compare_point(point, cost.ChosenCard(CARDS["r9700"], "its name"))
    assert four.same_plan, "the layout of the device's compute units, on a card that has others"


@pytest.mark.parametrize(
    ("name", "units", "title"),
    [
        (CARD, 56, "Radeon RX 9070"),
        ("AMD Radeon RX 9070 XT (RADV GFX1201)", 64, "Radeon RX 9070 XT"),
        ("AMD Radeon RX 9070 GRE", 48, "Radeon RX 9070 GRE"),
        ("NVIDIA GH200 480GB", 132, "132 compute units like an R9700's"),
        ("NVIDIA RTX A1000", None, None),
        ("AMD Radeon Graphics (RADV GFX1201)", 64, "64 compute units like an R9700's"),
    ],
)
def test_card_of_a_device(name: str, units: int | None, title: str | None) -> None:
    chosen = cost.card_of_device(name, "discrete", units)
    assert (chosen and chosen.card.title) == title
    assert cost.card_of_device(name, "cpu", units) is None
    for wrong in ("64", 0, 64.5):
        with pytest.raises(ArgumentError, match=r"^compute_units: got "):
            cost.card_of_device("another GPU", "discrete", wrong)  # type: ignore[arg-type]
    if chosen and title and "like an" in title:
        assert chosen.card.source == "the R9700, scaled" and {"clock_ghz", "bandwidth"} <= set(chosen.card.assumed)


def test_predictions_name_their_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SplitSpec.parse("auto").plan(8192, SHAPE, LayoutFacts(64), "f16")
    said = cost.predict(plan, cost.find_card("r9700")).to_dict()["compiler"]
    assert (said["counted_mesa"], said["counted_glsl"]) == ("Mesa 25.0.7, ACO for gfx1201", "glslang 12")

    def not_built() -> None:
        raise KernelError("build.json is missing")

    monkeypatch.setattr(sys.modules[cost.prediction_compilers.__module__], "build_record", not_built)
    cost.prediction_compilers.cache_clear()
    try:
        assert cost.prediction_compilers()["glsl"] is None
    finally:
        cost.prediction_compilers.cache_clear()
