"""The cost model: its limits, its own consistency, and the figures that the documents give."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from zinc_attn import AttnShape, SplitPlan, plan_splits
from zinc_attn.cli import app as cli
from zinc_attn.dtypes import EXPECTED
from zinc_attn.errors import ArgumentError
from zinc_attn.kernels import declarations as kernels
from zinc_attn.kernels.tuning import LayoutFacts
from zinc_attn.storage import STORAGE
from zinc_attn.tools import cost
from zinc_attn.tools.cost import CARDS, assumptions, best_splits, card_with, find_card, ideal, predict, predict_call
from zinc_attn.tools.cost.assumptions import GAP_US, READ_EFFICIENCY, START_US
from zinc_attn.tools.cost.cascade import Cascade, cascade_us
from zinc_attn.tools.cost.pass1 import ISSUE, STORAGE_ISSUE, issue_per_key
from zinc_attn.tools.cost.predict import Prediction
from zinc_attn.tools.rdna4 import compiler
from zinc_attn.tools.rdna4.variants import Spec

QWEN = AttnShape(16, 2, 256)
R9700 = CARDS["r9700"]
SHAPES = [AttnShape.parse(s) for s in ("16/2/256", "32/4/128", "32/8/128", "64/8/64", "24/4/256", "9/3/64")]
CONTEXTS = [1 << i for i in range(10, 18)]


def test_article() -> None:
    """Qwen3-30B-A3B has 4 KV heads, so 1, 8 and 64 splits are 4, 32 and 256 workgroups on 64 units."""
    ours = [predict(SplitPlan.fixed(131072, AttnShape(32, 4, 128), num_splits=n), R9700) for n in (1, 8, 64)]
    assert [p.workgroups for p in ours] == [4, 32, 256]
    assert [p.utilization for p in ours] == [1 / 16, 0.5, 1]
    assert ours[0].total_us > 7 * ours[1].total_us > 14 * ours[2].total_us
    assert ours[0].bound == "latency"


def _us(p: Prediction) -> float:
    return p.total_us


# --- the model -------------------------------------------------------------------------------------------------


def test_ideal_is_the_floor_of_peers() -> None:
    """268 MB and 416 µs on an R9700, about 60 µs on an H200."""
    assert ideal(QWEN, 131072, R9700) == pytest.approx(416, abs=1)
    assert ideal(QWEN, 131072, CARDS["h200"]) == pytest.approx(56, abs=1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_terms(shape: AttnShape, card: cost.Card) -> None:
    before = 0.0
    for context in CONTEXTS:
        p = predict(plan_splits(context, shape, card.compute_units), card)
        assert p.total_us >= before, "more keys take longer"
        before = p.total_us
        assert p.total_us == pytest.approx(p.pass1_us + p.merge_us)
        assert p.pass1_us >= max(p.memory_us + p.partial_us, p.waves_us) >= p.issue_us * 0.999
        assert 0 < p.fraction < READ_EFFICIENCY and p.total_us > p.ideal_us
        assert p.kv_bytes == context * shape.kv_bytes_per_token()
        if context in (1024, 16384):
            _, best = best_splits(context, shape, card)
            assert (
                best.total_us <= min(p, predict(SplitPlan.fixed(context, shape, num_splits=1), card), key=_us).total_us
            )


def test_monotone_in_the_card() -> None:
    plan = plan_splits(2048, QWEN)
    base = predict(plan, R9700).total_us
    assert predict(plan, replace(R9700, bandwidth=800)).total_us < base
    assert predict(plan, replace(R9700, latency_ns=300)).total_us < base
    assert predict(plan, replace(R9700, clock_ghz=2.5)).total_us > base
    times = [predict(plan_splits(131072, QWEN, n), card_with(n)).total_us for n in (16, 32, 64)]
    assert all(a > b for a, b in pairwise(times))


@pytest.mark.parametrize("units", [1, 2, 3, 5, 63])
def test_any_number_of_compute_units(units: int) -> None:
    """Also an odd one, whose last unit is no half of a pair."""
    for p in (predict(plan_splits(8192, QWEN, units), card_with(units)), best_splits(8192, QWEN, card_with(units))[1]):
        assert p.total_us > p.pass1_us >= p.waves_us > 0
    assert cost.predict_rows(QWEN, card_with(units), 64, 8192, "f16", "matrix").waves_us > 0


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.group <= 8], ids=str)
@pytest.mark.parametrize("context", [65536, 98304, 131072])
def test_partial_traffic_from_64k_on(shape: AttnShape, context: int) -> None:
    p = predict(plan_splits(context, shape), R9700)
    assert p.partial_bytes <= 0.04 * p.kv_bytes


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("16/2/256", {8: 0.80, 16: 0.84, 32: 0.88, 64: 0.91, 128: 0.916}),
        ("20/1/576/512/latent", {32: 0.45}),
    ],
)
def test_r9700_reaches_a_share_of_its_bandwidth(text: str, shares: dict[int, float]) -> None:
    """What the split rule has to reach at these lengths, in 1,024 keys, with float16."""
    shape = AttnShape.parse(text)
    reached = {n: predict(plan_splits(n << 10, shape), R9700).fraction for n in shares}
    assert not {n: share for n, share in reached.items() if share < shares[n]}


def test_r9700_is_not_bound_by_issue() -> None:
    """16/2/256: arithmetic alone takes less than half of the time that the bytes take, from 8k on."""
    for context in (8192, 131072):
        p = predict(plan_splits(context, QWEN), R9700)
        assert p.issue_us < 0.5 * p.memory_us
        assert p.bound == "bandwidth" and p.utilization == 1


def test_h200_is_bound_by_issue_at_8_heads() -> None:
    """Pass 1 there at 8 query heads per KV head reaches 60 to 70 % of the read rate."""
    p = predict(SplitPlan.fixed(131072, QWEN, split_size=64), CARDS["h200"])
    assert p.bound == "issue"
    assert 0.6 < p.ideal_us / p.pass1_us / READ_EFFICIENCY < 0.7
    assert predict(SplitPlan.fixed(131072, QWEN, num_splits=8), CARDS["h200"]).bound == "latency"


def test_uneven_splits_cost() -> None:
    """200 nodes on 64 splits: some have 4, some 3. A split per node is faster."""
    shape = AttnShape(32, 8, 128)
    uneven, even = (predict(SplitPlan.fixed(102400, shape, num_splits=n), R9700) for n in (64, 200))
    assert uneven.total_us > 1.04 * even.total_us


def test_no_keys() -> None:
    p = predict(plan_splits(0, QWEN), R9700)
    assert (p.kv_bytes, p.merge_us, p.pass1_us) == (0, GAP_US, START_US)


def test_head_chunks_share_their_keys() -> None:
    p = predict(plan_splits(131072, AttnShape(16, 1, 256)), R9700)
    assert p.memory_us == pytest.approx(131072 * 1024 / (644.6e3 * READ_EFFICIENCY))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0"])
def test_dtypes(dtype: str) -> None:
    p = predict(plan_splits(131072, QWEN, dtype=dtype), R9700, dtype)
    assert p.kv_bytes == 131072 * QWEN.kv_bytes_per_token(dtype)
    assert issue_per_key(QWEN, 8, "loop", dtype) == ISSUE[256, 8][1] + 8 * sum(STORAGE_ISSUE[dtype])


def test_line_through_the_table() -> None:
    for (head_dim, heads), (single, *_) in ISSUE.items():
        line = head_dim * (0.076 * heads + 0.106) + 6.4
        assert line == pytest.approx(single, rel=0.06)
        shape = AttnShape(heads, 1, head_dim)
        assert issue_per_key(shape, heads, "single") == single
        latent = issue_per_key(AttnShape(heads, 1, head_dim, head_dim, latent=True), heads, "single")
        assert latent == pytest.approx(line)  # no variant of the table
    wide, narrow = AttnShape(4, 1, 192, 128), AttnShape(4, 1, 128, 192)
    assert issue_per_key(wide, 4, "loop") == issue_per_key(narrow, 4, "loop") == 160 * (0.076 * 4 + 0.106) + 6.4


def test_table_is_what_the_compiler_makes() -> None:
    if why := compiler.missing():
        pytest.skip(why)
    specs = [Spec(f"attend_{build}_f16", *key) for key in ISSUE for build in kernels.BUILDS]
    for spec, report in zip(specs, compiler.compile_variants(specs), strict=True):
        loop, node = "loop" in spec.kernel, "node" in spec.kernel
        row = ISSUE[spec.head_dim, spec.heads]
        assert report.issue_per_key == pytest.approx(row[loop], abs=1, rel=0.05 if node else 0), spec
        assert R9700.waves(report.vgprs) == report.waves_per_simd == R9700.waves(row[2 + loop])
    dtypes = (*STORAGE, "q8_0/q4_0")
    reports = compiler.compile_variants([Spec(f"attend_loop_{dtype}", 256, 8) for dtype in dtypes])
    for dtype, report in zip(dtypes, reports, strict=True):
        assert report.issue_per_key == pytest.approx(issue_per_key(QWEN, 8, "loop", dtype), rel=0.07), dtype


def test_timeline() -> None:
    plan = plan_splits(8192, QWEN)
    bars = cost.timeline(plan, R9700)
    assert len(bars) == 2 * plan.workgroups  # of eight waves, over two compute units each
    assert {cu for cu, *_ in bars} == set(range(64))
    assert max(end for _, _, end, _ in bars) == pytest.approx(predict(plan, R9700).pass1_us)


# --- shared prefixes -------------------------------------------------------------------------------------


def test_cascade_counts_keys_once_per_group() -> None:
    """The course's count: 8 requests share 512 keys and have 64 of their own. 4/4/64: 8 requests at a time on a CPU."""
    found = Cascade(AttnShape(4, 4, 64), 8, 512, 64, 4, "f16", "cpu", 64)
    assert (found.sharing(8)[0], found.keys_read, found.alone.keys_read) == (8, 512 + 8 * 64, 8 * (512 + 64))
    assert Cascade(AttnShape(4, 4, 64), 1, 512, 64).keys_read == 512 + 64
    cut = Cascade(AttnShape(32, 8, 128), 32, 32768, 256, 2, "f16", "cpu")
    assert (cut.submissions, cut.keys_read) == ([15, 15, 2], 17 * 32768 + 32 * 256), "submissions share nothing"
    grid = Cascade(AttnShape(1, 1, 64), 600, 8192, 0)
    assert grid.submissions == [600]
    many = Cascade(AttnShape(1, 1, 64), 600, 65536, 0)
    assert many.submissions == [511, 89], "65,535 workgroups of 128 splits a submission"
    little = Cascade(AttnShape(4, 4, 64), 3, 320, 64, 4, "f16", "cpu", 64)
    assert little.keys_read == little.alone.keys_read, "two times five leaves are not worth a dispatch"
    wide = Cascade(AttnShape(16, 1, 256), 8, 4096, 64)
    assert replace(wide, cascade=True).sharing(8) == (1, 0), "groups of more than 8 share nothing"
    assert wide.keys_read == wide.alone.keys_read == 8 * (4096 + 64) * 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cascade_terms(shape: AttnShape) -> None:
    for prefix in (0, 2048, 32768, 131072):
        one = cost.predict_cascade(shape, R9700, 1, prefix, 256)
        plan = plan_splits(prefix + 256, shape)
        assert one.total_us == one.alone_us == pytest.approx(predict(plan, R9700).total_us, rel=0.02)
        before = 0.0
        for requests in (2, 8, 32):
            found = cost.predict_cascade(shape, R9700, requests, prefix, 256)
            assert found.keys_read <= found.keys_alone == requests * (prefix + 256)
            assert found.alone_us > before
            before = found.alone_us
            assert found.speed_up > 0.97 if found.rows_each > 1 else not found.pays
            own = requests * 256 * shape.kv_bytes_per_token() + prefix * shape.kv_bytes_per_token()
            assert found.total_us > own / R9700.bandwidth / 1e3, "every key is read once at least"


@pytest.mark.parametrize(("dtype", "worst", "slower", "gain"), [("f16", 0.82, 14, 0.97), ("q8_0", 0.69, 179, 0.92)])
def test_sharing_seldom_costs_much(dtype: str, worst: float, slower: int, gain: float) -> None:
    """What docs/cost-model.md says of the rule, beside a rule that knew the model."""
    found, best = [], []
    for text, requests, prefix, suffix in product(
        ["16/2/256", "32/8/128", "9/3/64", "24/4/256", "32/4/128", "64/8/64"],
        (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32),
        (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 128),
        (16, 256),
    ):
        shape, keys = AttnShape.parse(text), prefix << 10
        one = cost.predict_cascade(shape, R9700, requests, keys, suffix, dtype)
        shared_us = cascade_us(Cascade(shape, requests, keys, suffix, dtype=dtype, cascade=True), R9700)
        found.append(one.speed_up)
        best.append(max(one.alone_us / shared_us, 1.0))
    assert len(found) == 1848 and min(found) > worst and sum(one < 0.97 for one in found) == slower
    assert round(np.log(found).sum() / np.log(best).sum(), 2) == gain


# --- assumptions and documents -----------------------------------------------------------------------------------

PAGE = Path(assumptions.__file__).read_text(encoding="utf-8")
CHANGES = re.findall(r"^(\w+): Final = \S+  # if (\S+): (.+)$", PAGE, re.M)


def figures() -> list[str]:
    """What the page of assumptions gives, in its words."""
    shape, prompts = AttnShape(32, 8, 128), ("16/2/256", "9/3/64")
    shares = [predict(plan_splits(n << 10, QWEN), R9700).fraction for n in (1, 8, 128)]
    one, eight = (predict_call(plan_splits(32768, QWEN, q_len=rows), R9700).total_us for rows in (1, 8))
    calls = [(AttnShape.parse(text), R9700, 32768, 32768) for text in prompts]
    prompt_ms = [cost.predict_rows(*call, "f16", "matrix").total_us / 1e3 for call in calls]
    return [
        *(f"{100 * share:.1f} % at {n}" for share, n in zip(shares, ("1k", "8k", "128k"), strict=True)),
        f"8 rows take {eight / one:.2f} times as long",
        f"{cost.predict_cascade(shape, R9700, 8, 32768, 256).speed_up:.2f} times faster",
        *(f"{ms:.1f} ms for {text}" for ms, text in zip(prompt_ms, prompts, strict=True)),
        f"{predict(plan_splits(131072, QWEN, CARDS['h200'].compute_units), CARDS['h200']).total_us:.1f} µs on an H200",
    ]


def test_every_assumption_says_what_it_changes() -> None:
    assert len(CHANGES) == PAGE.count(": Final = ") == 18
    words = " ".join(PAGE.split('"""')[1].split())
    assert all(figure in words for figure in figures())


@pytest.mark.parametrize(("name", "other", "said"), CHANGES, ids=[name for name, *_ in CHANGES])
def test_assumptions_change_what_their_page_says(
    name: str, other: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [one for path, one in sys.modules.items() if path.startswith(f"{cost.__name__}.")]:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, float(other))
    assert not set(said.split(", ")) - set(figures())


DOC = (Path(__file__).parents[2] / "docs" / "cost-model.md").read_text(encoding="utf-8")


def layout_line(context: int) -> str:
    plan = plan_splits(context, QWEN)
    p, build = predict(plan, R9700), plan.build_on(LayoutFacts(R9700.compute_units))
    name = f"{context >> 10}k" if context >= 1024 else context
    times = " | ".join(f"{us:.1f} µs" for us in (p.pass1_us, p.merge_us, p.total_us))
    return f"| {name} | {p.splits} | {build} | {times} | {100 * p.fraction:.1f} % |"


def share_line(text: str) -> str:
    plans = [plan_splits(512 << i, AttnShape.parse(text)) for i in range(9)]
    return f"| {text} | {' | '.join(f'{100 * predict(plan, R9700).fraction:.1f}' for plan in plans)} |"


def cascade_line(text: str, prefix: int, requests: int) -> str:
    p = cost.predict_cascade(AttnShape.parse(text), R9700, requests, prefix, 256)
    pays = "yes" if p.pays else "no" if p.rows_each > 1 else "–"
    return (
        f"| {text} | {prefix:,} | {requests} | {p.rows_each} | {p.keys_read:,} | {p.keys_alone:,} "
        f"| {p.total_us:,.0f} µs | {p.alone_us:,.0f} µs | {p.speed_up:.2f} | {pays} |\n"
    )


def test_shares_of_the_peak_are_what_the_model_says() -> None:
    for i in range(9):
        assert layout_line(512 << i) in DOC
    header, _, *rows = DOC[DOC.index("| shape | 512 |") :].split("\n\n")[0].splitlines()
    assert len(rows) == 9 and rows == [share_line(row.split(" | ")[0].removeprefix("| ")) for row in rows], header


def test_rows_are_what_the_model_says() -> None:
    """Four rows take at most 1.4 times one row at 16/2/256 and 32k, and eight at most 2.6 times."""
    header, _, *lines = DOC[DOC.index("| shape | 1 row |") :].split("\n\n")[0].splitlines()
    counts = [int(word.split()[0]) for word in header.strip("| ").split(" | ")[1:]]
    for line in lines:
        text, *cells = line.strip("| ").split(" | ")
        plans = [plan_splits(32768, AttnShape.parse(text), q_len=rows) for rows in counts]
        times = [predict_call(plan, R9700).total_us for plan in plans]
        assert cells == [f"{us / times[0]:.2f}" for us in times], text
    by_rows = {rows: predict(plan_splits(32768, QWEN, q_len=rows), R9700).total_us for rows in (1, 4, 8)}
    assert by_rows[4] <= 1.4 * by_rows[1] and by_rows[8] <= 2.6 * by_rows[1]


@pytest.mark.parametrize("text", ["9/3/64", "32/8/128", "16/2/256"])
def test_tables_are_what_the_model_says(text: str) -> None:
    for prefix in (2048, 8192, 32768, 131072):
        for requests in (2, 8, 32):
            line = cascade_line(text, prefix, requests)
            assert line in DOC


def test_plan_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    shape = AttnShape(32, 8, 128)
    argv = ["plan", "--shape", "32/8/128", "--requests", "2,8", "--prefix", "32k", "--suffix", "100"]
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert "modeled for Radeon AI PRO R9700" in text
    assert "66,336" in text and "65,736" in text
    assert cli.main([*argv, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [cost.predict_cascade(shape, R9700, n, 32768, 100).to_dict() for n in (2, 8)]
    assert all(one["label"] == "modeled" for one in found)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prefix", "1k"], "prefix: got --prefix alone, expected --requests"),
        (["--requests", "2", "--device", "0"], "device: got --device with --requests, expected --card or --cu"),
        (["--requests", "two"], "requests: got 'two', expected numbers such as 2,8"),
        (["--requests", "2", "--prefix", "0"], "prefix: got 0, expected an int from 1 to 16777216"),
        (
            ["--requests", "2", "--contexts", "2k"],
            "contexts: got --contexts with --requests, expected --prefix and --suffix",
        ),
    ],
)
def test_plan_refuses(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--shape", "16/2/256", *argv]) == 2
    assert capsys.readouterr().err == f"zinc-attn: error: {message}\n"


# --- refusals, command line -------------------------------------------------------------------------------------


def test_cards() -> None:
    assert find_card("RX 9070 XT") is find_card("9070xt") is CARDS["rx9070xt"]
    assert card_with(64) is R9700
    assert card_with(32).bandwidth == R9700.bandwidth / 2
    names = "r9700, rx9070xt, rx9070, rx9070gre, rx9060xt, a100, h200"
    with pytest.raises(ArgumentError) as caught:
        find_card("GTX 480")
    assert str(caught.value) == f"card: got 'GTX 480', expected one of {names}"
    with pytest.raises(ArgumentError) as caught:
        card_with(0)
    assert str(caught.value) == "cu: got 0, expected an int from 1 to 65536"
    with pytest.raises(ArgumentError, match=f"^dtype: got 'f8', expected {EXPECTED}$"):
        predict(plan_splits(64, QWEN), R9700, "f8")


def test_plan_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    argv = ["plan", "--shape", "16/2/256", "--contexts", "8k", "--card", "r9700"]
    assert cli.main([*argv, "--draw", str(path)]) == 0
    text, said = capsys.readouterr()
    assert "modeled for Radeon AI PRO R9700, one layer; assumed: latency_ns, near_ns" in text
    lines = [line.split() for line in text[text.index("modeled for") :].splitlines()[3:]]
    assert [line[1] for line in lines] == ["1", "auto", "best"]
    assert [line[5] for line in lines[:2]] == ["3.1%", "100.0%"]
    assert path.read_bytes().startswith(b"\x89PNG") and said == f"written: {path}\n"
    assert cli.main([*argv, "--json"]) == 0
    modeled = json.loads(capsys.readouterr().out)["modeled"]
    assert (modeled["label"], modeled["card"]) == ("modeled", "Radeon AI PRO R9700")


def test_plan_draw_needs_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["plan", "--shape", "16/2/256", "--device", "0", "--draw", "x.png"]) == 2
    message = "draw: got --device, expected --card or --cu: what is drawn is modeled for a card"
    assert capsys.readouterr().err == f"zinc-attn: error: {message}\n"
