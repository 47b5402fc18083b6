"""The cost model of calls that the planner cuts: rows by both arithmetics, and requests that share a prefix."""

from __future__ import annotations

import json
from itertools import pairwise, product
from pathlib import Path

import matrix_program
import numpy as np
import pytest

from zinc_attn import AttnShape, plan_splits
from zinc_attn.cli import app as cli
from zinc_attn.errors import ArgumentError
from zinc_attn.kernels.declarations import MATRIX
from zinc_attn.planning import sharing, whole_context
from zinc_attn.planning.arithmetic import Arithmetic
from zinc_attn.tools.cost import CARDS, calls, matrix, predict, predict_call, predict_cascade, predict_rows
from zinc_attn.tools.rdna4 import compiler

QWEN, R9700 = AttnShape(16, 2, 256), CARDS["r9700"]
SHAPES = ("16/2/256", "32/8/128", "9/3/64")
BOTH: tuple[Arithmetic, Arithmetic] = ("canonical", "matrix")
DOC = (Path(__file__).parents[2] / "docs" / "cost-model.md").read_text(encoding="utf-8")


# --- the tables ------------------------------------------------------------------------------------------------


def table(header: str) -> list[list[str]]:
    """The cells of the document's table that begins so, with its header."""
    lines = DOC[DOC.index(header) :].split("\n\n")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in (lines[0], *lines[2:])]


def test_rows_are_what_the_model_says() -> None:
    """Four rows take at most 1.4 times one row at 16/2/256 and 32k, and eight at most 2.6 times."""
    (_, *counts), *lines = table("| shape | 1 row |")
    for text, *cells in lines:
        plans = [plan_splits(32768, AttnShape.parse(text), q_len=int(count.split()[0])) for count in counts]
        times = [predict_call(plan, R9700).total_us for plan in plans]
        assert cells == [f"{us / times[0]:.2f}" for us in times], text
        assert text != "16/2/256" or (times[3] <= 1.4 * times[0] and times[5] <= 2.6 * times[0])


def test_prompts_are_what_the_model_says() -> None:
    (*_, one, four, sixteen, last), *lines = table("| shape | keys | prompt")
    for text, keys, *cells in lines:
        shape, n = AttnShape.parse(text), int(keys.removesuffix("k")) << 10
        canonical, by_matrix = (predict_rows(shape, R9700, n, n, "f16", how) for how in BOTH)
        times = [f"{p.total_us / 1e3:.1f} ms" for p in (canonical, by_matrix)]
        ratios = [f"{canonical.total_us / by_matrix.total_us:.2f}", f"{by_matrix.tflops:.1f}"]
        counts = [int(head.split()[0]) for head in (one, four, sixteen, last)]
        pairs = [[predict_rows(shape, R9700, count, n, "f16", how).total_us for how in BOTH] for count in counts]
        assert cells == times + ratios + [f"{a:,.0f} / {b:,.0f}" for a, b in pairs], (text, keys)


def test_cascades_are_what_the_model_says() -> None:
    for line in table("| shape | prefix | requests |")[1:]:
        p = predict_cascade(AttnShape.parse(line[0]), R9700, int(line[2]), int(line[1].replace(",", "")), 256)
        cells = [str(p.rows_each), f"{p.keys_read:,}", f"{p.keys_alone:,}"]
        assert line[3:] == [*cells, f"{p.total_us:,.0f} µs", f"{p.alone_us:,.0f} µs", f"{p.speed_up:.2f}"], line


# --- rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", (*SHAPES, "32/32/128", "40/8/128"))
def test_rows_that_share_keys_take_no_longer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """From 8 rows on at no length more than 2 % longer than side by side, and with small groups much less."""
    calls = [(count, context) for count in (8, 12, 24) for context in (1024, 8192, 32768)]
    shape = AttnShape.parse(text)
    shared = [predict_rows(shape, R9700, *call).total_us for call in calls]
    assert predict_call(plan_splits(32768, shape, q_len=8), R9700).total_us == shared[2]
    monkeypatch.setattr(sharing, "SEQUENCE_ROWS", 1 << 20)
    alone = [predict_rows(shape, R9700, *call).total_us for call in calls]
    ratios = [a / b for a, b in zip(shared, alone, strict=True)]
    assert max(ratios) < 1.02
    assert (min(ratios) < 0.76) == (text in ("32/8/128", "9/3/64", "32/32/128")), ratios


@pytest.mark.parametrize("text", SHAPES)
def test_few_rows_are_the_call_of_predict(text: str) -> None:
    """Up to the causal triangle, which is a few leaves here: rows below 8 share nothing."""
    shape = AttnShape.parse(text)
    for count, context in ((1, 512), (1, 8192), (4, 8192), (7, 8192), (1, 131072)):
        old = predict(plan_splits(context, shape, q_len=count), R9700)
        new = predict_rows(shape, R9700, count, context)
        assert new.total_us == pytest.approx(old.total_us, rel=0.01 if count > 1 else 1e-12)
        assert new.submissions == 1 and new.workgroups <= old.workgroups


@pytest.mark.parametrize("text", SHAPES)
@pytest.mark.parametrize("arithmetic", BOTH)
def test_terms(text: str, arithmetic: Arithmetic) -> None:
    shape, found = AttnShape.parse(text), []
    for n in (2048, 8192, 32768, 131072):
        p = predict_rows(shape, R9700, n, n, "f16", arithmetic)
        assert p.flops == n * (n + 1) * shape.q_heads * 2 * shape.k_dim
        assert p.total_us == pytest.approx(p.pass1_us + p.merge_us)
        assert p.pass1_us >= max(p.waves_us, p.memory_us + p.partial_us, p.again_us) * 0.999
        assert p.waves_us >= p.issue_us * 0.999 and p.tflops < 191 and p.to_dict()["arithmetic"] == arithmetic
        found.append(p)
    assert all(4 < b.total_us / a.total_us < 25 for a, b in pairwise(found)), "a prompt's pairs grow with its square"


@pytest.mark.parametrize("text", SHAPES)
def test_rows_that_walk_are_faster(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By more the longer the context, since it is pass 2 and the submissions that are not there."""
    shape, gains = AttnShape.parse(text), []
    for context in (2048, 8192, 32768, 131072):
        walking = predict_rows(shape, R9700, 2048, context, "f16", "matrix")
        with monkeypatch.context() as patch:
            patch.setattr(whole_context, "WORKGROUPS", 10**6)
            split = predict_rows(shape, R9700, 2048, context, "f16", "matrix")
        assert walking.merge_us == walking.partial_us == 0 < split.merge_us
        assert walking.submissions <= split.submissions
        gains.append(split.total_us / walking.total_us)
    assert gains[0] > 1.05 and gains[-1] > 1.2


def test_samples_stand_for_all_submissions(monkeypatch: pytest.MonkeyPatch) -> None:
    for arithmetic, n in zip(BOTH, (16384, 65536), strict=True):
        few = predict_rows(QWEN, R9700, n, n, "f16", arithmetic)
        with monkeypatch.context() as patch:
            patch.setattr(calls, "SAMPLES", 10**6)
            every = predict_rows(QWEN, R9700, n, n, "f16", arithmetic)
        assert few.submissions > calls.SAMPLES + 1 and few.total_us == pytest.approx(every.total_us, rel=0.005)


def test_matrix_prefill_is_the_arithmetic_that_serves_the_rows() -> None:
    for count, like in zip((1, 2), BOTH, strict=True):  # times 8 heads per KV head
        mixed = predict_rows(QWEN, R9700, count, 8192, "f16", "matrix-prefill")
        assert mixed == predict_rows(QWEN, R9700, count, 8192, "f16", like) and mixed.arithmetic == like
    assert predict_rows(QWEN, R9700, 1, 8192, "q8_0", "matrix-prefill").arithmetic == "canonical"


@pytest.mark.parametrize(
    ("card", "count", "dtype", "arithmetic", "message"),
    [
        ("a100", 64, "f16", "matrix", "card: got A100-80GB with arithmetic 'matrix', expected one of RDNA4"),
        ("r9700", 64, "q8_0", "matrix", "dtype: got 'q8_0' with arithmetic 'matrix', expected 'f16': of others"),
        ("r9700", 64, "f16", "exact", "arithmetic: got 'exact', expected one of 'canonical', 'matrix'"),
        ("r9700", 65, "f16", "canonical", "rows: got 65, expected an int from 1 to 64"),
    ],
)
def test_refusals(card: str, count: int, dtype: str, arithmetic: Arithmetic, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        predict_rows(QWEN, CARDS[card], count, 64, dtype, arithmetic)
    assert str(caught.value).startswith(message)


def test_counts_are_those_of_the_program() -> None:
    """Products exactly; what a leaf takes beside them within a fifth, for programs of five sizes."""
    if why := compiler.missing():
        pytest.skip(why)
    if not (compiler.SPIRV / MATRIX.file).exists():
        pytest.skip(f"the package was built without {MATRIX.name}: its compiler lacks {MATRIX.extension}")
    for group, count, vgprs in matrix_program.counted():
        assert count.products == group.products
        assert count.issue == pytest.approx(matrix.ISSUE.of(group), rel=0.2)
        if group.waves > 1:  # a wave alone needs no barriers, and waits half as often
            assert count.lds_waits == pytest.approx(matrix.LDS_WAITS.of(group), rel=0.25)
            assert count.barriers == matrix.PIECE_BARRIERS * group.parts.piece + matrix.LEAF_BARRIERS - 1
        assert count.scalar_waits == pytest.approx(matrix.SCALAR_WAITS, rel=0.25, abs=4)
        assert count.memory_waits >= 0.8 * matrix.MEMORY_WAITS - 2, "some find their values there"
        if group.vectors == 64:
            assert R9700.waves(vgprs) >= R9700.waves(group.vgprs), "as many waves fit as modeled"


# --- shared prefixes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", (*SHAPES, "32/4/128", "64/8/64", "24/4/256"))
def test_cascade_terms(text: str) -> None:
    shape = AttnShape.parse(text)
    for prefix in (0, 2048, 32768, 131072):
        one = predict_cascade(shape, R9700, 1, prefix, 256)
        assert one.total_us == one.alone_us == pytest.approx(predict(plan_splits(prefix + 256, shape), R9700).total_us)
        before = 0.0
        for requests in (2, 8, 32):
            found = predict_cascade(shape, R9700, requests, prefix, 256)
            assert found.keys_read <= found.keys_alone == requests * (prefix + 256)
            assert found.alone_us > before
            before = found.alone_us
            assert found.speed_up > 0.97 if found.rows_each > 1 else not found.pays
            own = requests * 256 * shape.kv_bytes_per_token() + prefix * shape.kv_bytes_per_token()
            assert found.total_us > own / R9700.bandwidth / 1e3, "every key is read once at least"
    ragged = predict_cascade(AttnShape(32, 8, 128), R9700, 8, 32768 + 412, 100)
    assert ragged.keys_read == 2 * 32768 + 8 * (412 + 100), "whole nodes of whole pages are shared"
    wide = predict_cascade(AttnShape(16, 1, 256), R9700, 8, 4096, 64, cascade=True)
    assert (wide.rows_each, wide.keys_read) == (1, 8 * (4096 + 64) * 2), "groups of more than 8 share nothing"
    many = predict_cascade(AttnShape(1, 1, 64), R9700, 600, 65536, 0, cascade=False)
    assert many.keys_read == 600 * 65536, "two submissions: 65,535 workgroups of 128 splits are 511 requests"


@pytest.mark.parametrize(("dtype", "worst", "slower", "gain"), [("f16", 0.82, 6, 0.97), ("q8_0", 0.69, 22, 0.92)])
def test_sharing_seldom_costs_much(dtype: str, worst: float, slower: int, gain: float) -> None:
    """What docs/cost-model.md says of the rule, beside a rule that knew the model."""
    found, best = [], []
    for text, requests, prefix in product(
        ("16/2/256", "32/8/128", "9/3/64", "24/4/256", "32/4/128", "64/8/64"),
        (2, 5, 7, 8, 16, 32),
        (1, 2, 4, 6, 12, 24, 64, 128),
    ):
        call = AttnShape.parse(text), R9700, requests, prefix << 10, 16, dtype
        found.append(predict_cascade(*call).speed_up)
        best.append(max(predict_cascade(*call, cascade=True).speed_up, 1.0))
    assert len(found) == 288 and min(found) > worst and sum(one < 0.97 for one in found) == slower
    assert round(np.log(found).sum() / np.log(best).sum(), 2) == gain
    words = " ".join(DOC.split())
    assert f"{gain:.0%}".replace("%", " %") in words and f"at most {1 - worst:.0%}".replace("%", " %") in words
    assert (f"{slower} of 288 calls" if dtype == "f16" else f"and {slower} calls") in words


def test_plan_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    argv = ["plan", "--shape", "32/8/128", "--requests", "2,8", "--prefix", "32k", "--suffix", "100"]
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert "modeled for Radeon AI PRO R9700" in text and "66,336" in text and "65,736" in text
    assert cli.main([*argv, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [predict_cascade(AttnShape(32, 8, 128), R9700, n, 32768, 100).to_dict() for n in (2, 8)]
    assert all(one["label"] == "modeled" for one in found)
