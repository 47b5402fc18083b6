"""The cost model: its limits, its own consistency, and the figures that the documents give."""

import re
import sys
from itertools import product
from pathlib import Path

import pytest
from commands import records, run
from support import needs_radv

from zinc_attn import AttnShape, SplitPlan, plan_splits
from zinc_attn.kernels.declarations import UNITS
from zinc_attn.runtime.device import SPIRV
from zinc_attn.storage import STORAGE
from zinc_attn.tools import cost
from zinc_attn.tools.compilers import compiler
from zinc_attn.tools.compilers.variants import Spec
from zinc_attn.tools.cost import CARDS, card_with, find_card, predict, predict_call, predict_requests, predict_rows
from zinc_attn.tools.cost.assumptions import GAP_US
from zinc_attn.tools.cost.pass1 import ISSUE, UNITS_ISSUE, issue_per_key
from zinc_attn.tools.cost.step import ModelStep

QWEN, LARGE = AttnShape(16, 2, 256), AttnShape(32, 8, 128)
R9700 = CARDS["r9700"]


@pytest.mark.parametrize("units", [1, 2, 3, 5, 63])
def test_any_number_of_compute_units(units):
    """Also an odd one, whose last unit is no half of a pair."""
    for p in (predict_call(plan_splits(8192, QWEN, units, q_len=rows), card_with(units)) for rows in (1, 64)):
        assert p.total_us > p.pass1_us >= p.waves_us > 0


def test_a_step_of_a_whole_model():
    """A Qwen3.6-35B-A3B's: 2 GB of weights, K and V of 10 layers, 60 MiB of states read and written."""
    step = ModelStep(2_000_000_000, 2 * 60 << 20, 400, 10, QWEN, "f16")
    assert step.bytes_at(1000) == 2_000_000_000 + (120 << 20) + 1000 * 20 * 1024
    alone = (2_000_000_000 + (120 << 20)) / R9700.read_rate + 400 * GAP_US
    us = step.us(131072, R9700)
    assert us == pytest.approx(alone + 10 * (GAP_US + predict(plan_splits(131072, QWEN), R9700).total_us))
    assert step.us(0, R9700) == pytest.approx(alone) and us <= step.us(131072, R9700, 1)
    assert step.fraction(131072, R9700) == pytest.approx(step.bytes_at(131072) / R9700.bandwidth / 1e3 / us)


def test_what_a_call_waits_for():
    latent, keys = AttnShape.parse("20/1/576/512/latent"), 131072
    plans = {"bandwidth": plan_splits(keys, QWEN), "issue": plan_splits(keys, latent)}
    plans["latency"] = SplitPlan.fixed(keys, QWEN, num_splits=1)
    assert {name: predict(plan, R9700).bound for name, plan in plans.items()} == {name: name for name in plans}


def test_table_is_what_the_compiler_makes():
    needs_radv()
    keys = [(arithmetic, *key) for arithmetic, table in ISSUE.items() for key in table]
    specs = [Spec("attend_f16", *key, rows=-(-key[1] // 8), arithmetic=arithmetic) for arithmetic, *key in keys]
    for spec, report in zip(specs, compiler.compile_variants(specs), strict=True):
        cycles, vgprs = ISSUE[spec.arithmetic][spec.head_dim, spec.heads]
        assert report.issue_per_key == pytest.approx(cycles, abs=1), spec
        assert R9700.family.waves(report.compiled.registers) == report.compiled.waves == R9700.family.waves(vgprs)
    dtypes = (*STORAGE, "q8_0/q4_0")
    reports = compiler.compile_variants([Spec(f"attend_{dtype}", 256, 8) for dtype in dtypes])
    for dtype, report in zip(dtypes, reports, strict=True):
        assert report.issue_per_key == pytest.approx(issue_per_key(QWEN, 8, dtype), rel=0.07), dtype
    built = UNITS_ISSUE if (SPIRV / UNITS.file).exists() else ()  # else glslang does not know the kernel's extension
    specs = [Spec("attend_matrix_q8_0", dims, 64, arithmetic="integer") for dims in built]
    assert [round(report.leaf or 0) for report in compiler.compile_variants(specs)] == [UNITS_ISSUE[x] for x in built]


PAGE = Path(cost.assumptions.__file__).read_text(encoding="utf-8")
CHANGES = re.findall(r"^(\w+): Final = \S+  # if (\S+): (.+)$", PAGE, re.M)
DOC = (Path(__file__).parents[2] / "docs" / "cost-model.md").read_text(encoding="utf-8")


def figures():
    """What the page of assumptions gives, in its words."""
    shares = [predict(plan_splits(n << 10, QWEN), R9700).fraction for n in (1, 8, 128)]
    single, eight = (predict_call(plan_splits(32768, QWEN, q_len=rows), R9700).total_us for rows in (1, 8))
    shared, alone = (predict_requests(LARGE, R9700, 8, 32768, 256, cascade=how) for how in (None, False))
    return [
        *(f"{100 * share:.1f} % at {n}" for share, n in zip(shares, ("1k", "8k", "128k"), strict=True)),
        f"8 rows take {eight / single:.2f} times as long",
        f"{alone / shared:.2f} times faster",
    ]


def test_every_assumption_says_what_it_changes():
    assert len(CHANGES) == PAGE.count(": Final = ") == 14
    words = " ".join(PAGE.split('"""')[1].split())
    assert all(figure in words for figure in figures())


@pytest.mark.parametrize(("name", "other", "said"), CHANGES, ids=[name for name, *_ in CHANGES])
def test_assumptions_change_what_their_page_says(name, other, said, monkeypatch):
    for module in [module for path, module in sys.modules.items() if path.startswith(f"{cost.__name__}.")]:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, float(other))
    assert not set(said.split(", ")) - set(figures())


def layout_line(context):
    plan = plan_splits(context, QWEN)
    p = predict(plan, R9700)
    name = f"{context >> 10}k" if context >= 1024 else context
    times = " | ".join(f"{us:.1f} µs" for us in (p.pass1_us, p.merge_us, p.total_us))
    return f"| {name} | {p.splits} | {times} | {100 * p.fraction:.1f} % |"


def shares(text, dtypes, contexts):
    plans = [(plan_splits(n, AttnShape.parse(text)), dtype) for n in contexts for dtype in dtypes]
    return [f"{100 * predict(plan, R9700, dtype).fraction:.1f}" for plan, dtype in plans]


def table(header):
    """The cells of the document's table that begins so, with its header."""
    lines = DOC[DOC.index(header) :].split("\n\n")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in (lines[0], *lines[2:])]


def test_tables_are_what_the_model_says():
    assert all(layout_line(512 << i) in DOC for i in range(9))
    _, *rows = table("| shape | 512 |")
    assert len(rows) == 9 and rows == [[row[0], *shares(row[0], ["f16"], [512 << i for i in range(9)])] for row in rows]
    (_, *dtypes), *rows = table("| keys | f16 |")
    assert rows == [[f"{n}k", *shares("16/2/256", dtypes, [n << 10])] for n in (32, 128)]


def test_issue_against_memory_is_what_the_model_says():
    (_, *heads), *rows = table("| card | 16/2/256 f16 |")
    cards = [find_card(row[0]) for row in rows]
    for card, (_, *cells) in zip(cards, rows, strict=True):
        for head, cell in zip(heads, cells, strict=True):
            shape, dtype = AttnShape.parse(head.split()[0]), head.split()[1]
            us = cost.ideal(shape, 32768, card, dtype)
            issue = {name: us * share for name, share in cost.issue_shares(shape, card, dtype).items()}
            said = " / ".join(f"**{x:.0f}**" if x > us else f"{x:.0f}" for x in issue.values())
            assert cell == f"{us:.0f}; {said}", (card.title, head)
    assert len(set(map(id, cards))) == 6 and list(issue) == ["canonical", "fused", "integer"]


def test_an_h200_is_what_the_model_says(monkeypatch):
    measured = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
    lines = table("| shape | keys | model, two workgroups |")[1:]
    plans = [plan_splits(int(keys.replace(",", "")), AttnShape.parse(text), 132) for text, keys, *_ in lines]
    two = [predict(plan, CARDS["h200"]).total_us for plan in plans]
    monkeypatch.setitem(ISSUE, "canonical", {key: (cycles, 197) for key, (cycles, _) in ISSUE["canonical"].items()})
    for (text, keys, *cells), us, plan in zip(lines, two, plans, strict=True):
        single = predict(plan, CARDS["h200"]).total_us
        assert us <= single and cells[:2] == [f"{us:.0f}", f"{single:.0f}"]
        assert re.search(rf"^\| {text} \| {keys} \| \d+ \| {cells[2]} \|", measured, re.M)
        assert cells[3] == f"{int(cells[2]) / single:.1f}"


def test_rows_are_what_the_model_says():
    (_, *counts), *lines = table("| shape | 1 row |")
    for text, *cells in lines:
        plans = [plan_splits(32768, AttnShape.parse(text), q_len=int(count.split()[0])) for count in counts]
        times = [predict_call(plan, R9700).total_us for plan in plans]
        assert cells == [f"{us / times[0]:.2f}" for us in times], text


def test_shared_prefixes_are_what_the_model_says():
    for text, prefix, requests, *cells in table("| shape | prefix | requests |")[1:]:
        call = AttnShape.parse(text), R9700, int(requests), int(prefix.replace(",", "")), 256
        us, alone = (predict_requests(*call, cascade=how) for how in (None, False))
        assert cells == [f"{us:,.0f} µs", f"{alone:,.0f} µs", f"{alone / us:.2f}"], text


def test_cards():
    assert find_card("RX 9070 XT") is find_card("9070xt") is CARDS["rx9070xt"]
    assert cost.card_of("AMD Radeon RX 9070 XT (RADV GFX1201)") is CARDS["rx9070xt"]
    assert cost.card_of("Intel(R) Arc(tm) B580 Graphics (BMG G21)") is CARDS["b580"]
    assert cost.card_of("NVIDIA H200") is CARDS["h200"]
    assert cost.card_of("NVIDIA GeForce RTX 4090 Laptop GPU") is cost.card_of("llvmpipe (LLVM 15.0.6)") is None
    assert card_with(64) is R9700 and card_with(32).bandwidth == R9700.bandwidth / 2


# --- calls that the planner cuts: several rows of a sequence, and requests that share a prefix ----------------


def test_prompts_are_what_the_model_says():
    times = [
        f"{predict_rows(AttnShape.parse(text), R9700, n, n).total_us / 1e3:.1f} ms"
        for text, n in product(("16/2/256", "32/8/128"), (8192, 32768))
    ]
    assert "{} at 8k and {} at 32k keys; 32/8/128 takes {} and {}.".format(*times) in " ".join(DOC.split())


def test_prompts_by_matrix_units_are_what_the_model_says():
    def times(rows, tokens):
        for text, name in product(("16/2/256", "32/8/128"), ("integer", "canonical")):
            yield predict_rows(AttnShape.parse(text), R9700, rows, tokens, "q8_0", name).total_us / 1e3

    text = " ".join(DOC.replace(" %", "%").split()).replace(" %", "%")
    units, canonical, units_128, canonical_128 = times(2048, 34816)
    said = f"{units:.1f} ms in place of canonical's {canonical:.1f} ms ({units / canonical:.0%}); 32/8/128 takes "
    assert f"{said}{units_128:.1f} ms in place of {canonical_128:.1f} ms ({units_128 / canonical_128:.0%})." in text
    units, canonical, units_128, canonical_128 = times(512, 33280)
    assert f"the shares are {units / canonical:.0%} and {units_128 / canonical_128:.0%}." in text


def test_plan_prints(capsys):
    plan = "plan --model qwen3.6-35b-a3b --contexts 8k --rows 1,4 --splits 1,auto"
    assert run(plan, "--card '9060 XT'") == 0
    text = capsys.readouterr().out
    assert "modeled for Radeon RX 9060 XT; assumed of it: clock_ghz, l2_mib (docs/cost-model.md)" in text
    lines = [line.split() for line in text[text.index("modeled for") :].splitlines()[4:]]
    wanted = [["8,192", rows, layout, "16", "MiB"] for layout in ("1", "auto") for rows in ("1", "4")]
    assert [line[:5] for line in lines] == wanted
    assert [line[7] for line in lines] == ["12.5%", "50.0%", "100.0%", "100.0%"]
    p = predict(plan_splits(8192, QWEN, 32), CARDS["rx9060xt"])
    assert lines[2][-1] == f"{1e6 / (10 * p.total_us):,.0f}", "10 layers attend"
    result = [record["modeled"] for record in records(capsys, plan, "--cu 64 --json")]
    assert result[2:] == [predict_call(plan_splits(8192, QWEN, q_len=rows), R9700).to_dict() for rows in (1, 4)]
    assert result[0]["label"] == "modeled"
    assert result[0]["compiler"]["counted_mesa"] == "Mesa 25.0.7, ACO for gfx1201"
