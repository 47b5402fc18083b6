"""The benchmark on a device: it verifies before it times, and says what it could not do."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.cli import app as cli
from zinc_attn.decode.contiguous import ContiguousKV, RecordedCall
from zinc_attn.errors import ArgumentError, DeviceMemoryError
from zinc_attn.tools.harness.bits import Output
from zinc_attn.tools.harness.files import write_report
from zinc_attn.tools.harness.inputs import Inputs
from zinc_attn.tools.harness.progress import Steps
from zinc_attn.tools.measure import MEASURES, SPLITS, CallSpec, Row, bench
from zinc_attn.tools.measure.baselines import numpy_attention
from zinc_attn.tools.measure.calls import ReadYardstick, Subject
from zinc_attn.tools.measure.points import Point

SHAPE = za.AttnShape(6, 2, 64)
LAYOUTS = [split.label for split in SPLITS]


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails


def run(device: za.Device, contexts: list[int], **options: Any) -> list[Row]:
    watch = {name: options.pop(name) for name in ("progress", "on_row") if name in options}
    return bench([device], [CallSpec(SHAPE, 1, contexts, page_size=None, repeats=2, **options)], host_rounds=3, **watch)


@pytest.mark.parametrize("dtype", ("f16", "q8_0/q4_0", "fp8_e4m3"))
def test_rows(device: za.Device, dtype: str, tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    seen: list[Row] = []
    rows = run(device, [100, 700], dtype=dtype, progress=lambda *step: said.append(step), on_row=seen.append)
    assert rows == seen and said[-1] == ("done", 24, 24)
    expected = {(0, "auto", m) for m in ("call", "steady call", "empty submit", "host per call")}
    clocked = {"device"} if device.info.timestamp_period_ns else set()
    for context in (100, 700):
        expected |= {(context, "read", m) for m in {"call"} | clocked} | {(context, "baseline", "call")}
        for name in LAYOUTS:
            expected |= {(context, name, m) for m in {"call", "steady call"} | clocked}
            expected |= {(context, name, m) for m in ("pass 1", "gap", "pass 2") if clocked}
    got = {(r.context, r.layout, r.measure) for r in rows if r.status == "ok"}
    assert got == {x for x in expected if x in got or x[2] not in ("gap", "pass 2")}  # a single state has one pass
    assert (700, "auto", "pass 2") in got or not clocked
    for row in rows:
        if row.status != "ok":
            assert (row.runtime, row.status, row.note) == ("torch", "refused", "torch not installed")
            continue
        words = {"read": "xor of all words", "baseline": "error"}
        assert (row.verified or "").startswith(words.get(row.layout, "bits"))
        spread = (row.min_us, row.q1_us, row.median_us, row.q3_us)
        if row.measure == "host per call":  # a difference of medians
            assert row.median_us is not None and set(spread) == {None, row.median_us}
        else:
            assert None not in spread and min(spread) >= 0 and list(spread) == sorted(spread)
        assert (row.repeats, row.latency_mode) == (2 if row.context else row.repeats, MEASURES[row.measure])
        assert row.dtype == dtype and row.shape == "6/2/64"
        if row.layout != "baseline":
            assert (row.device, row.driver, row.runtime) == (device.info.name, device.info.driver, device.runtime.name)
        if row.layout == "read":
            assert row.of_read == 1
    auto = next(r for r in rows if (r.context, r.layout) == (700, "auto"))
    units, kind = device.info.compute_units, device.info.kind
    assert auto.plan == za.plan_splits(700, SHAPE, units, dtype, kind=kind).fingerprint()
    assert auto.kv_gb_s == pytest.approx(700 * SHAPE.kv_bytes_per_token(dtype) / auto.median_us / 1e3)
    table, lines = write_report(tmp_path, "bench", [row.record() for row in rows], None)
    records = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [r["measure"] for r in records] == [json.loads(line)["measure"] for line in lines.read_text().splitlines()]


def test_two_runtimes_share_a_run() -> None:
    pytest.importorskip("kp")
    with za.Device.open(runtime="kompute") as one, za.Device.open(one.info.index, runtime="vulkan") as other:
        spec = CallSpec(SHAPE, 1, [200], page_size=None, repeats=1)
        rows = bench([one, other], [spec], host_rounds=3)
    assert {r.runtime for r in rows} == {"kompute", "vulkan", "numpy", "torch"}
    assert {r.status for r in rows if r.runtime != "torch"} == {"ok"}


def test_wrong_bits_have_no_time(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    real = reference.emulate

    def flipped(*args: Any) -> Any:
        out, lse = real(*args)
        words = out.view(np.uint32)
        words[0, 1, 2] ^= 1
        return out, lse

    monkeypatch.setattr(reference, "emulate", flipped)
    rows = [r for r in run(device, [130]) if r.layout in LAYOUTS and r.context]
    assert [(r.layout, r.status, r.median_us, r.verified) for r in rows] == [
        (name, "failed", None, None) for name in LAYOUTS
    ]
    assert all((r.note or "").startswith("out[0, 0, 1, 2]: got ") for r in rows)


def test_timed_calls_that_do_nothing_have_no_time(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is still the verified one then, but not behind the timing, where it is spoiled before a last call."""
    run_once = RecordedCall.run

    def idle(call: RecordedCall) -> None:
        if not hasattr(call, "ran"):
            run_once(call)
            call.ran = True  # type: ignore[attr-defined]

    monkeypatch.setattr(RecordedCall, "run", idle)
    rows = [row for row in run(device, [100]) if row.layout in LAYOUTS and row.context]
    assert rows and {row.status for row in rows} == {"failed"}
    assert all("in a run behind the timing: " in str(row.error) and "got nan" in str(row.error) for row in rows)


def test_a_wrong_layout_does_not_make_the_others_wrong() -> None:
    """Where the oracle has the last head alone, the other heads are those of the first layout that passed."""
    right = Output(np.ones((2, 8), np.float32), np.ones(2, np.float32))
    wrong, other = (Output(right.out + np.eye(2, 8, dtype=np.float32)[head], right.lse) for head in (1, 0))
    point = Point("bench", CallSpec(SHAPE, 1, [1]), 1, Steps(None, 1))
    point.expected = {0: Output(right.out[1:], right.lse[1:])}
    row = Row("bench", "d", "v", "vulkan", 2, 1, 8, 8, "f16", 1)
    subjects = [Subject(row, {"call": list}, result=lambda one=one: Output(*(x[None] for x in one)))
                for one in (wrong, right, right, other)]  # fmt: skip
    for subject in subjects:
        point.verify(subject)
    assert [subject.row.status for subject in subjects] == ["failed", "ok", "ok", "failed"]


def test_sampled_heads(device: za.Device) -> None:
    rows = [r for r in run(device, [130], oracle_products=0) if r.layout in LAYOUTS and r.context]
    assert {(r.status, r.verified) for r in rows} == {("ok", "bits (sampled)")}


def test_no_room_is_a_row(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ContiguousKV.__init__

    def full(self: ContiguousKV, where: za.Device, k: Any, v: Any, dtype: str) -> None:
        if len(k) > 100:
            raise DeviceMemoryError("no room")
        real(self, where, k, v, dtype)

    monkeypatch.setattr(ContiguousKV, "__init__", full)
    rows = run(device, [100, 101])
    assert {(r.status, r.note) for r in rows if r.context == 101 and r.runtime == device.runtime.name} == {
        ("refused", "no room")
    }
    assert {r.status for r in rows if r.context == 100 and r.runtime != "torch"} == {"ok"}


def test_yardstick_reads_every_word(device: za.Device) -> None:
    cases = ("6/2/64", 1, "f16"), ("2/1/80", 700, "f16"), ("3/1/112/40", 65, "f32"), ("1/1/512", 1000, "f16")
    for text, tokens, dtype in (*cases, ("1/1/64", 65, "q8_0/q4_0"), ("3/1/96", 10, "q5_1")):
        data = Inputs.normal(za.AttnShape.parse(text), tokens, dtype)
        kv = ContiguousKV(device, data.k, data.v, dtype)
        yard = ReadYardstick(kv)
        assert yard.wrong(data, dtype) is None
        data.v[-1] += 1
        assert yard.wrong(data, dtype) == "the yardstick did not read every word"
        yard.close()
        kv.close()


def test_heads_per_workgroup_never_show(device: za.Device) -> None:
    shape = za.AttnShape(5, 1, 64)
    data = Inputs.normal(shape, 300, "f16")
    want = reference.emulate(data.q, data.k, data.v)
    kv = ContiguousKV(device, data.k, data.v)
    plan = za.SplitPlan.fixed(300, shape, num_splits=2)
    for heads in (1, 2, 5, None):
        step = RecordedCall(kv, plan, heads_per_workgroup=heads)
        step.write_q(data.q[None])
        step.poison()
        step.run()
        for got, expected in zip(step.result(), want, strict=True):
            assert np.array_equal(got[0].view(np.uint32), expected.view(np.uint32)), heads
        step.close()
    for heads in (0, 6):
        with pytest.raises(ArgumentError, match=f"^heads_per_workgroup: got {heads}, expected an int "):
            RecordedCall(kv, plan, heads_per_workgroup=heads)
    kv.close()


def test_torch_is_a_row_where_it_is_installed(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with torch's names, which computes with NumPy."""

    class Tensor:
        def __init__(self, x: Any) -> None:
            self.x = np.asarray(x)

        def __getitem__(self, at: Any) -> Tensor:
            return Tensor(self.x[at])

        def to(self, where: str, kind: str) -> Tensor:
            assert (where, kind) == ("cpu", "torch.float32")
            return self

        def float(self) -> Tensor:
            return self

        def cpu(self) -> Tensor:
            return self

        def numpy(self) -> Any:
            return self.x

    def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, enable_gqa: bool) -> Tensor:
        assert enable_gqa and q.x.shape == (1, 6, 1, 64) and k.x.shape == v.x.shape == (1, 2, 130, 64)
        return Tensor(numpy_attention(q.x[0, :, 0], k.x[0], v.x[0], scale)[None, :, None])

    fake = SimpleNamespace(
        __version__="9.9",
        float32="torch.float32",
        from_numpy=Tensor,
        cuda=SimpleNamespace(is_available=lambda: False),
        nn=SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=attend)),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    row = next(r for r in run(device, [130]) if r.runtime == "torch")
    assert (row.status, row.device, row.driver, row.repeats) == ("ok", "CPU", "torch 9.9, float32", 2)


@pytest.mark.parametrize(
    ("options", "text"),
    (
        ({"contexts": [0]}, "contexts: got 0, expected an int from 1 to "),
        ({"repeats": 0}, "repeats: got 0, expected an int of at least 1"),
        ({"seed": -1}, "seed: got -1, expected an int of at least 0"),
        ({"dtype": "f8"}, "dtype: got 'f8', expected one of f32, f16"),
        ({"shape": za.AttnShape(4, 1, 72, 40, latent=True)}, "shape: got 4/1/72/40/latent, expected one whose V is"),
    ),
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError) as error:
        CallSpec(**{"shape": SHAPE, "layers": 1, "contexts": [64], **options})
    assert str(error.value).startswith(text)


def test_no_device_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^devices: got none, expected one or more$"):
        bench([], [CallSpec(SHAPE, 1, [64])])


@pytest.mark.parametrize("as_json", (False, True))
def test_command(as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--runtime", "vulkan", "--shape", "6/2/64", "--contexts", "100,1k", "--repeats", "1"]
    assert cli.main([*words, "--out", str(tmp_path), *(["--json"] if as_json else [])]) == 0
    printed = capsys.readouterr().out
    lines = (tmp_path / "bench.jsonl").read_text().splitlines()
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "bench.csv").read_text().splitlines()) == 1 + len(lines)
    if as_json:
        assert printed.splitlines() == lines
    else:
        assert "per query head" in printed and "torch not installed" in printed
