"""The committed record is what the oracle gives, its values are fixed, and record files are read strictly."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zinc_attn.cli import app as cli
from zinc_attn.dtypes import EXPECTED
from zinc_attn.errors import ArgumentError
from zinc_attn.shapes import AttnShape
from zinc_attn.tools.check import cases, data, judge, record
from zinc_attn.tools.check.__main__ import main as write_record
from zinc_attn.tools.check.__main__ import make_record
from zinc_attn.tools.check.cases import Case
from zinc_attn.tools.check.data import KINDS, MASKS, ROWS, Data
from zinc_attn.tools.check.masking import Masking
from zinc_attn.tools.check.outcome import Fault, Outcome
from zinc_attn.tools.harness.bits import Output

SHAPE = AttnShape(4, 2, 64)


def splitmix64(name: str, i: int) -> int:
    """Word i in Python's own integers."""
    mask = (1 << 64) - 1
    z = (int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") + (i + 1) * 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


# --- values ------------------------------------------------------------------------------------------------


def test_words_are_splitmix64() -> None:
    assert data.words("a", 5, 7).tolist() == [splitmix64("a", i) for i in range(7, 12)]


def test_values_are_three_fields_of_a_word() -> None:
    got = data.values("b", (3, 5))
    field = (1 << 21) - 1
    for i, x in enumerate(got.reshape(-1)):
        w = splitmix64("b", i)
        total = (w & field) + ((w >> 21) & field) + ((w >> 42) & field)
        assert float(x) == (2 * total - 3 * field) / 2**21


def test_values_are_nearly_normal_and_a_prefix_of_more() -> None:
    long, short = (data.values("c", (n, 64)) for n in (8192, 100))
    assert np.array_equal(long[:100], short)
    assert abs(float(long.mean())) < 0.01 and abs(float(long.std()) - 1) < 0.01 and float(abs(long).max()) < 3


def test_dtypes_round_the_same_values() -> None:
    exact = data.values("d", (1000,))
    half, brain = (data.values("d", (1000,), dtype) for dtype in ("f16", "bf16"))
    assert half.dtype == np.float16 and np.array_equal(half, exact.astype(np.float16))
    bits = exact.view(np.uint32).astype(np.uint64)
    low, up = bits & ~np.uint64(0xFFFF), bits & np.uint64(0xFFFF)
    odd = (bits >> np.uint64(16)) & np.uint64(1)
    rounded = low + np.where((up > 0x8000) | ((up == 0x8000) & (odd == 1)), 0x10000, 0).astype(np.uint64)
    assert np.array_equal(brain.view(np.uint32), rounded.astype(np.uint32))


def test_query_heads_are_sharper_by_turns() -> None:
    q = Data.make(SHAPE, "f16", 1).q
    assert q.shape == (ROWS, 4, 64)
    assert np.array_equal(q[:, 3], 8 * data.values("4/2/64 q", q.shape)[:, 3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_every_kind_is_stored_as_it_is_and_a_prefix_of_more(kind: str, dtype: str) -> None:
    long, short = (Data.make(SHAPE, dtype, tokens, kind) for tokens in (700, 256))
    for a, b, held in zip(long.prefix(256), short, (*long.stored_as(dtype).prefix(256),), strict=True):
        assert np.array_equal(a, b) and np.array_equal(a, held)


def test_leaf_maxima_move_along_the_context() -> None:
    """In log2 units, of the first head: the kinds differ in where the largest scores are."""
    found = {}
    for kind in KINDS:
        made = Data.make(SHAPE, "f16", 16 * 64, kind)
        scores = made.k[:, 0].astype(np.float64) @ made.q[-1, 0].astype(np.float64) / 8 * np.log2(np.e)
        found[kind] = scores.reshape(16, 64).max(axis=1)
    assert np.ptp(found["normal"]) < 4 and np.ptp(found["cancelling"]) < 4
    assert found["rising"][-1] - found["rising"][0] > 30 and found["falling"][0] - found["falling"][-1] > 30
    assert abs(np.diff(found["jumping"])).max() > 250
    assert np.array_equal(np.rint(found["fading"]), np.repeat(3 * np.arange(8), 2))


def test_cancelling_values_leave_only_roundings() -> None:
    made = Data.make(SHAPE, "f16", 256, "cancelling")
    assert np.array_equal(made.k, made.k.reshape(2, 128, 2, 64)[:, ::-1].reshape(made.k.shape))
    out = judge.oracle_output(Case(SHAPE, "f16", 256, kind="cancelling"), made).out
    assert 0 < np.abs(out).max() < 1e-5


@pytest.mark.parametrize("kind", MASKS)
def test_a_rows_mask_depends_on_its_position_alone(kind: str) -> None:
    three, one = data.mask_of(kind, 3, 301), data.mask_of(kind, 1, 300)
    behind = three.shape[1] - one.shape[1] - 1  # keys that the mask of three rows has before the other's
    assert np.array_equal(three[1, behind:-1], one[0]) and one.shape[1] == (300 if kind in ("random", "f16") else 100)
    assert np.all(three[1, :behind] == (True if three.dtype == bool else 0))


# --- the committed record ----------------------------------------------------------------------------------


def committed() -> list[dict[str, Any]]:
    content = json.loads(record.RECORD.read_text())
    assert content["format"] == record.FORMAT
    return list(content["records"])


def test_committed_record_has_the_quick_set_and_the_default_cases() -> None:
    quick, default = committed()
    assert list(quick["cases"]) == [str(case) for case in Case.quick()]
    matrix = Case.matrix(cases.SHAPES, cases.DTYPES, cases.CONTEXTS)
    assert list(default["cases"]) == [*map(str, matrix), *cases.MASKED]
    for entry in (quick, default):
        assert entry["run"] == record.run_digest(entry["cases"])
        assert entry["made_by"]["runtime"] == "reference.emulate"


@pytest.mark.parametrize(
    "case",
    [
        *Case.quick(),
        *Case.matrix(cases.SHAPES, cases.DTYPES, "1000"),
        *Case.matrix("16/2/256", "f16", "8191"),
        *map(Case.parse, cases.MASKED),
    ],
    ids=str,
)
def test_committed_digests_are_the_oracles(case: Case) -> None:
    digests = {name: digest for entry in committed() for name, digest in entry["cases"].items()}
    result = judge.oracle_output(case, case.data())
    assert len(result.lse) == case.shape.q_heads and result.digest() == digests[str(case)]


@pytest.mark.parametrize("masking", ["none", "window=70+sinks"])
def test_sampled_heads_are_the_last_ones(masking: str) -> None:
    case = Case(SHAPE, "q8_0", 100, Masking.parse(masking))
    data = case.data()
    every, some = judge.oracle_output(case, data), judge.oracle_output(case, data, products=0)
    assert (len(every.lse), len(some.lse)) == (4, 2)
    assert not compare(10, "", every, some)


# --- masking options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "masking"),
    [
        ("none", Masking()),
        ("sinks", Masking(sinks=True)),
        ("window=128+sinks", Masking(128, sinks=True)),
        ("window=1+softcap=2.5+scale=-0.1+sinks", Masking(1, 2.5, -0.1, True)),
        ("sinks+alibi+mask=tree+noncausal", Masking(sinks=True, alibi=True, mask="tree", causal=False)),
    ],
)
def test_masking_has_one_text(text: str, masking: Masking) -> None:
    assert Masking.parse(text) == masking and str(masking) == text
    assert Masking.parse(" + ".join(reversed(text.split("+")))) == masking
    case = Case(SHAPE, "f16", 5, masking)
    assert Case.parse(str(case)) == case and (str(case) == "4/2/64 f16 5") == (text == "none")
    rising = case._replace(kind="rising")
    assert Case.parse(str(rising)) == rising and str(rising).startswith("4/2/64 f16 5 rising")


def test_every_masking_option_changes_the_bits() -> None:
    texts = ["none", "window=60", "softcap=20", "scale=0.1", "sinks", "alibi", *(f"mask={kind}" for kind in MASKS)]
    matrix = Case.matrix("4/2/64", "f16", "150", ",".join(texts))
    assert [str(case.masking) for case in matrix] == texts
    assert len({judge.oracle_output(case, case.data()).digest() for case in matrix}) == len(texts)


def test_sinks_are_seeded() -> None:
    sinks = Case(SHAPE, "f16", 5, Masking(sinks=True)).options()["sinks"]
    assert sinks.dtype == np.float32 and np.array_equal(sinks, 4 * data.values("4/2/64 sinks", (4,)))


# --- digests -----------------------------------------------------------------------------------------------


def test_digests() -> None:
    result = Output(np.array([[1.0, -2.0]], np.float32), np.array([0.5], np.float32))
    assert result.digest() == hashlib.sha256(bytes.fromhex("0000803f000000c00000003f")).hexdigest()
    assert record.run_digest({"b": "2", "a": "1"}) == hashlib.sha256(b"a 1\nb 2\n").hexdigest()


# --- differences -------------------------------------------------------------------------------------------


def compare(prop: int, variation: str, got: Output, want: Output) -> Fault | None:
    outcome = Outcome(Case.quick()[0], "a device")
    outcome.compare(prop, variation, got, want)
    return outcome.faults[0] if outcome.faults else None


def test_first_difference_has_its_distance() -> None:
    want = Output(np.zeros((2, 4), np.float32), np.ones(2, np.float32))
    got = Output(want.out.copy(), np.nextafter(want.lse, np.float32(2)))
    assert compare(2, "layout 8", want, want) is None
    heads = Output(np.zeros((8, 4), np.float32), np.full(8, got.lse[0]))  # the last two of them are compared
    fault = compare(2, "layout 8", heads, want)
    assert fault is not None and (fault.array, fault.index, fault.ulp) == ("lse", (6,), 1)
    assert Outcome(Case.quick()[0], "a device").line(fault) == (
        "2 split layout, layout 8: lse[6]: got 1.00000012 (0x3f800001), expected 1 (0x3f800000), 1 ulp apart; "
        "2 of 2 elements differ"
    )
    got.out[1, 2] = np.float32(-1e-45)
    fault = compare(2, "layout 8", got, want)
    assert fault is not None and (fault.array, fault.index, fault.ulp) == ("out", (1, 2), 1)
    got.out[1, 2] = np.nan
    fault = compare(2, "layout 8", got, want)
    assert fault is not None and fault.ulp is None and "not a number; 1 of 8 elements differ" in fault.text


# --- refusals ----------------------------------------------------------------------------------------------

TEXTS = {
    "{}": "not a file of zinc-attn check --record (KeyError('format'))",
    '{"format": 0}': f"got format 0, expected {record.FORMAT}",
    f'{{"format": {record.FORMAT}, "records": [{{"cases": {{}}}}]}}': "not a file of zinc-attn check --record "
    "(KeyError('made_by'))",
}


@pytest.mark.parametrize("text", TEXTS)
def test_bad_record_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ArgumentError) as error:
        record.load_record(path)
    assert str(error.value) == f"{path}: {TEXTS[text]}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--quick", "--dtype", "f16"],
            "quick: got --quick with --shape, --dtype, --contexts, --masking, --data or --rows, expected either",
        ),
        *(
            (
                ["--masking", f"none,{text}"],
                f"masking: got '{text}', expected none, or words joined by + of window=KEYS, softcap=X, scale=X, "
                "sinks, alibi, noncausal and mask=KIND (of random, tree, blind, f32, f16), each once "
                "(window=128+sinks)",
            )
            for text in ("x", "", "window", "window=1.5", "sinks=1", "none+sinks", "sinks+sinks", "mask=x")
        ),
        (["--masking", "window=0"], "window: got 0, expected an int from 1 to 4611686018427387904"),
        (
            ["--masking", "softcap=0"],
            "softcap: got 0, expected a number from 2**-40 to 2**60, or None for no cap",
        ),
        (
            ["--masking", "scale=nan"],
            "scale: got nan, expected a magnitude from 2**-126 to 2**126, or None for 1 / sqrt(head_dim)",
        ),
        (
            ["--data", "rising,up"],
            "data: got 'up', expected some of normal, rising, falling, jumping, cancelling, fading, coarse",
        ),
        (["--dtype", "f16,f8"], f"dtype: got 'f8', expected {EXPECTED}"),
        (["--contexts", "x"], "contexts: got 'x', expected numbers of keys such as 1k,32k,5000 (k = 1024)"),
        (
            ["--splits", "0"],
            "splits: got '0', expected auto, a number of splits (8) or size:KEYS (size:2048)",
        ),
        (["--runtime", "cuda", "--quick"], "runtime: got 'cuda', expected one of kompute, vulkan"),
        (["--against", "RECORD", "--shape", "4/2/64"], "RECORD: got none of the 20 cases of this run, expected some"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    path = str(record.RECORD)
    assert cli.main(["check", *(path if word == "RECORD" else word for word in options)]) == 2
    line = capsys.readouterr().err.replace(path, "RECORD").removesuffix(" of them\n").rstrip()
    assert line == f"zinc-attn: error: {message}"


def test_make_record(tmp_path: Path) -> None:
    default = [*Case.matrix("4/2/64", "f16,bf16", "3,70"), Case.parse("4/2/64 f32 9 sinks")]
    sets = {"quick": [Case.parse("4/2/64 f32 5")], "default": default}
    assert write_record(["--make-record", str(tmp_path / "record.json")], sets) == 0
    quick, other = json.loads((tmp_path / "record.json").read_text())["records"]
    assert list(quick["cases"]) == ["4/2/64 f32 5"]
    matrix = ["4/2/64 f16 3", "4/2/64 f16 70", "4/2/64 bf16 3", "4/2/64 bf16 70"]
    assert list(other["cases"]) == [*matrix, "4/2/64 f32 9 sinks"]
    assert (quick["made_by"]["set"], other["made_by"]["set"]) == ("quick", "default")
    seen: list[str] = []
    make_record(lambda what, done, total: seen.append(f"{what} {done} {total}"), sets)
    assert seen[0] == "4/2/64 f32 5 0 6" and len(seen) == 6
