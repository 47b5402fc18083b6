"""The cost model of many rows: canonical and by matrix units, and the tables that docs/cost-model.md gives of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matrix_program
import pytest

from zinc_attn import AttnShape, plan_splits
from zinc_attn.errors import ArgumentError
from zinc_attn.kernels.declarations import MATRIX
from zinc_attn.planning import sharing, walks
from zinc_attn.planning.arithmetic import Arithmetic
from zinc_attn.tools import cost
from zinc_attn.tools.cost import CARDS, matrix, pass1, predict, predict_call, predict_rows, prefill
from zinc_attn.tools.cost.matrix import MatrixGroup
from zinc_attn.tools.rdna4 import compiler

R9700 = CARDS["r9700"]
SHAPES = ("16/2/256", "32/8/128", "9/3/64")
BOTH: tuple[Arithmetic, Arithmetic] = ("canonical", "matrix")
PROMPTS = (2, 8, 32, 128)  # in 1,024 tokens
COUNTS = (1, 2, 4, 8, 16, 32, 64)  # rows to verify
DOC = (Path(__file__).parents[2] / "docs" / "cost-model.md").read_text(encoding="utf-8")


# --- the tables ------------------------------------------------------------------------------------------------


def prompt_line(text: str, length: int) -> str:
    """A prompt of ``length`` x 1,024 tokens by both arithmetics."""
    shape, n = AttnShape.parse(text), length << 10
    canonical, by_matrix = (predict_rows(shape, R9700, n, n, "f16", one) for one in BOTH)
    times = " | ".join(milliseconds(us) for us in (canonical.total_us, by_matrix.total_us))
    ratio = f"{canonical.total_us / by_matrix.total_us:.2f}"
    parts = (by_matrix.matrix_us, by_matrix.waves_us, by_matrix.memory_us, by_matrix.states_us + by_matrix.merge_us)
    terms = " | ".join(milliseconds(us) for us in parts)
    counts = f"{by_matrix.tflops:.1f} | {100 * by_matrix.waste:.1f} % | {by_matrix.submissions:,}"
    return f"| {text} | {length}k | {times} | {ratio} | {terms} | {counts} |\n"


def milliseconds(us: float) -> str:
    return f"{us / 1e3:,.{2 if us < 1e4 else 1 if us < 1e6 else 0}f} ms"


def rows_line(text: str, length: int) -> str:
    """1 to 64 rows at ``length`` x 1,024 keys: µs of both, and from how many rows matrix units are faster."""
    shape, n = AttnShape.parse(text), length << 10
    pairs = [[predict_rows(shape, R9700, r, n, "f16", one).total_us for one in BOTH] for r in COUNTS]
    cells = " | ".join(f"{a:,.0f} / {b:,.0f}" for a, b in pairs)
    return f"| {text} | {length}k | {cells} | {cost.matrix_from(shape, R9700, n) or 'never'} |\n"


def leaf_line(text: str) -> str:
    """What a leaf takes of a SIMD that has as many waves as fit, for each wave."""
    group = MatrixGroup.of(R9700, AttnShape.parse(text), 64)
    waves = group.resident * group.waves / pass1.SIMDS
    own = group.stall + group.issue
    item = group.item()[1] / 8
    cells = (group.waves, waves, group.matrix, matrix.ISSUE.of(group), item, R9700.simds * group.lds, own, own / waves)
    return f"| {text} | {' | '.join(f'{x:,.0f}' for x in cells)} |\n"


ASSUMED: dict[str, tuple[object, str, object]] = {  # label: (module, name, another value)
    "products and other instructions issue side by side (they issue in turn)": (matrix, "OVERLAP", 1.0),
    "shared memory serves 64 bytes a cycle (128)": (matrix, "LDS_RATE", 0.5),
    "a wait for shared memory takes 32 cycles (64)": (matrix, "LDS_WAIT", 32),
    "a wait for shared memory takes 128 cycles (64)": (matrix, "LDS_WAIT", 128),
    "waves reach a barrier 200 cycles apart (50)": (matrix, "BARRIER_WAIT", 200),
    "a wait for scalar loads takes 200 cycles (100)": (matrix, "TRIP_CYCLES", 200),
    "the L2 gives 3 times memory's rate (6)": (prefill, "L2_RATE", 3.0),
    "tiles without copies: 168 and 120 registers (240 and 192)": (matrix, "VGPRS", {128: 168, 256: 120}),
}
CARD_ASSUMED = {
    "the matrix units reach 80 % of their rate (100 %)": {"matrix_flops": 819},
    "a wait for K or V that a neighbor has read takes 100 ns (200)": {"near_ns": 100.0},
    "a wait for K or V that a neighbor has read takes 300 ns (200)": {"near_ns": 300.0},
}


def assumption_line(label: str, patch: pytest.MonkeyPatch) -> str:
    """32k prompts by matrix units where an assumption is another."""
    card = replace(R9700, **CARD_ASSUMED.get(label, {}))
    with patch.context() as other:
        if label in ASSUMED:
            other.setattr(*ASSUMED[label])
        found = [predict_rows(AttnShape.parse(t), card, 32768, 32768, "f16", "matrix").total_us for t in SHAPES]
    return f"| {label} | {' | '.join(milliseconds(us) for us in found)} |\n"


def tables(patch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The lines of each table by the begin of its header."""
    return {
        "| shape | prompt |": [prompt_line(text, n) for text in SHAPES[:2] for n in PROMPTS],
        "| shape | keys | 1 row |": [rows_line(text, n) for text in SHAPES[:2] for n in (8, 32)],
        "| shape | waves of a workgroup |": [leaf_line(text) for text in SHAPES],
        "| if |": [assumption_line(label, patch) for label in (*CARD_ASSUMED, *ASSUMED)],
    }


def test_tables_are_what_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for header, lines in tables(monkeypatch).items():
        assert DOC[DOC.index(header) :].split("\n\n")[0].splitlines(keepends=True)[2:] == lines or header, header
        for line in lines:
            assert line in DOC


def test_prose_gives_the_models_figures() -> None:
    words = " ".join(DOC.split())
    assert f"to shared memory ({matrix.ISSUE.chunk}), for a score of a lane ({matrix.ISSUE.score}:" in words
    assert f"piece of 64 dimensions of K or V ({matrix.ISSUE.piece:.0f}:" in words
    waits = f"{matrix.LDS_WAIT} cycles for shared memory, {matrix.TRIP_CYCLES} for scalar loads, {matrix.BARRIER_WAIT}"
    assert waits in words and f"issues {matrix.Q_ISSUE} or {matrix.EMIT_ISSUE} instructions" in words
    assert f"waits {R9700.latency_ns:.0f} ns for K and V, the others {R9700.near_ns:.0f}" in words
    assert f"; {prefill.SAMPLES} are modeled" in words


# --- the model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", (*SHAPES, "32/32/128", "40/8/128"))
def test_rows_that_share_keys_take_no_longer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """From 8 rows on at no length more than 2 % longer than side by side, and with small groups much less."""
    calls = [(rows, context) for rows in (8, 12, 24) for context in (1024, 8192, 32768)]
    shape = AttnShape.parse(text)
    shared = [predict_rows(shape, R9700, *call).total_us for call in calls]
    monkeypatch.setattr(sharing, "SEQUENCE_ROWS", 1 << 20)
    alone = [predict_rows(shape, R9700, *call).total_us for call in calls]
    ratios = [a / b for a, b in zip(shared, alone, strict=True)]
    assert max(ratios) < 1.02
    assert (min(ratios) < 0.76) == (text in ("32/8/128", "9/3/64", "32/32/128")), ratios
    plan = plan_splits(32768, shape, q_len=8)
    assert predict_call(plan, R9700).total_us == predict_rows(shape, R9700, 8, 32768).total_us


@pytest.mark.parametrize("text", SHAPES)
def test_few_rows_are_the_call_of_predict(text: str) -> None:
    """Up to the causal triangle, which is a few leaves here: rows below 8 share nothing."""
    shape = AttnShape.parse(text)
    for rows, context in ((1, 512), (1, 8192), (4, 8192), (7, 8192), (1, 131072)):
        old = predict(plan_splits(context, shape, q_len=rows), R9700)
        new = predict_rows(shape, R9700, rows, context)
        assert new.total_us == pytest.approx(old.total_us, rel=0.01)
        assert new.submissions == 1 and new.workgroups <= old.workgroups


@pytest.mark.parametrize("text", SHAPES)
@pytest.mark.parametrize("arithmetic", BOTH)
def test_terms(text: str, arithmetic: Arithmetic) -> None:
    shape, found = AttnShape.parse(text), []
    for length in PROMPTS:
        n = length << 10
        p = predict_rows(shape, R9700, n, n, "f16", arithmetic)
        assert p.pairs == n * (n + 1) // 2 * shape.q_heads
        assert p.computed >= p.pairs * 0.999 and 0 <= p.waste < 0.1
        assert p.total_us == pytest.approx(p.pass1_us + p.merge_us)
        assert p.pass1_us >= max(p.waves_us, p.memory_us + p.states_us, p.again_us) * 0.999
        assert p.waves_us >= p.issue_us * 0.999 >= p.matrix_us * 0.999
        assert p.tflops < 191 and p.to_dict()["arithmetic"] == arithmetic
        found.append(p)
    assert all(4 < b.total_us / a.total_us < 25 for a, b in pairwise(found)), "a prompt's pairs grow with its square"


@pytest.mark.parametrize("text", SHAPES)
def test_rows_that_walk_are_faster(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By more the longer the context, since it is pass 2 and the submissions that are not there."""
    shape, gains = AttnShape.parse(text), []
    for rows, context in ((2048, 2048), (2048, 8192), (2048, 32768), (2048, 131072)):
        walking = predict_rows(shape, R9700, rows, context, "f16", "matrix")
        with monkeypatch.context() as patch:
            patch.setattr(walks, "WALKERS", 10**6)
            split = predict_rows(shape, R9700, rows, context, "f16", "matrix")
        assert walking.merge_us == walking.states_us == 0 < split.merge_us
        assert walking.submissions <= split.submissions and walking.matrix_us < 1.02 * split.matrix_us
        gains.append(split.total_us / walking.total_us)
    assert gains[0] > 1.05 and gains[-1] > 1.2


def test_samples_stand_for_all_submissions(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttnShape(16, 2, 256)
    for arithmetic, n in zip(BOTH, (16384, 65536), strict=True):
        few = predict_rows(shape, R9700, n, n, "f16", arithmetic)
        with monkeypatch.context() as patch:
            patch.setattr(prefill, "SAMPLES", 10**6)
            every = predict_rows(shape, R9700, n, n, "f16", arithmetic)
        assert few.submissions > prefill.SAMPLES and few.total_us == pytest.approx(every.total_us, rel=0.005)


def test_waste_is_that_of_whole_tiles_and_leaves() -> None:
    group = MatrixGroup.of(R9700, AttnShape(9, 3, 64), 64)
    assert group.workgroup.rows(3) == group.workgroup.vectors // 3
    one = predict_rows(AttnShape(16, 2, 256), R9700, 1, 8192, "f16", "matrix")
    assert one.waste == 0.5, "8 vectors in a tile of 16"
    eight = predict_rows(AttnShape(16, 2, 256), R9700, 8, 8192, "f16", "matrix")
    assert eight.computed == 16 * 8 * 8192 and eight.pairs == 16 * sum(range(8185, 8193))


def test_products_at_the_cards_rate() -> None:
    """191 TFLOPS at 2.92 GHz; a tile of 8,192 operations takes a SIMD 16 cycles."""
    flops = R9700.compute_units * R9700.matrix_flops * 2.92e9
    assert flops == pytest.approx(191e12, rel=0.005)
    group = MatrixGroup.of(R9700, AttnShape(16, 2, 256), 64)
    assert group.matrix / group.products == 16
    p = predict_rows(AttnShape(16, 2, 256), R9700, 8, 65536, "f16", "matrix")
    done = p.computed * 2 * 512 / p.matrix_us / 1e6
    assert done == pytest.approx(R9700.compute_units * 1024 * R9700.clock_ghz / 1e3)


def test_matrix_prefill_is_the_arithmetic_that_serves_the_rows() -> None:
    shape = AttnShape(16, 2, 256)
    for rows, like in zip((1, 2), BOTH, strict=True):  # times 8 heads per KV head
        mixed = predict_rows(shape, R9700, rows, 8192, "f16", "matrix-prefill")
        assert mixed == predict_rows(shape, R9700, rows, 8192, "f16", like) and mixed.arithmetic == like
    assert predict_rows(shape, R9700, 1, 8192, "q8_0", "matrix-prefill").arithmetic == "canonical"


def test_refusals() -> None:
    shape = AttnShape(16, 2, 256)
    with pytest.raises(ArgumentError, match=r"^card: got A100-80GB with arithmetic 'matrix', expected one of RDNA4$"):
        predict_rows(shape, CARDS["a100"], 64, 8192, "f16", "matrix")
    with pytest.raises(ArgumentError, match=r"^dtype: got 'q8_0' with arithmetic 'matrix', expected 'f16': of others"):
        predict_rows(shape, R9700, 64, 8192, "q8_0", "matrix")
    with pytest.raises(ArgumentError, match=r"^arithmetic: got 'exact', expected one of 'canonical', 'matrix'"):
        predict_rows(shape, R9700, 64, 8192, "f16", "exact")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^rows: got 65, expected an int from 1 to 64$"):
        predict_rows(shape, R9700, 65, 64)


def test_counts_are_those_of_the_program() -> None:
    """Products exactly; what a leaf takes beside them within a fifth, for programs of five sizes."""
    if why := compiler.missing():
        pytest.skip(why)
    if not (compiler.SPIRV / MATRIX.file).exists():
        pytest.skip(f"the package was built without {MATRIX.name}: its compiler lacks {MATRIX.extension}")
    for group, count, vgprs in matrix_program.counted():
        assert count.products == group.products
        assert count.issue == pytest.approx(matrix.ISSUE.of(group), rel=0.2)
        assert count.lds == pytest.approx(matrix.LDS.of(group), rel=0.2)
        if group.waves > 1:  # a wave alone needs no barriers, and waits half as often
            assert count.lds_waits == pytest.approx(matrix.LDS_WAITS.of(group), rel=0.25)
            assert count.barriers == matrix.PIECE_BARRIERS * group.pieces + matrix.LEAF_BARRIERS - 1
        assert count.scalar_waits == pytest.approx(matrix.SCALAR_WAITS, rel=0.25, abs=4)
        assert count.memory_waits >= 0.8 * matrix.MEMORY_WAITS - 2, "some find their values there"
        if group.workgroup.vectors == 64:
            assert R9700.waves(vgprs) >= R9700.waves(group.vgprs), "as many waves fit as modeled"
