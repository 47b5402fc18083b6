"""The sweep on a device: it verifies, it times, and it catches a wrong bit."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.cli import app as cli
from zinc_attn.errors import ArgumentError
from zinc_attn.tools.harness.bits import ORACLE_PRODUCTS, Output
from zinc_attn.tools.harness.inputs import Inputs
from zinc_attn.tools.harness.split_spec import parse_split_specs
from zinc_attn.tools.measure import WARM_UP_RUNS, CallSpec, Row, sweep
from zinc_attn.tools.measure.calls import Subject
from zinc_attn.tools.measure.points import Sample, oracle_of

SHAPE = za.AttnShape(4, 2, 64)


def run(device: za.Device, contexts: list[int], splits: str = "auto,1", **options: Any) -> list[Row]:
    seams = {name: options.pop(name) for name in ("progress", "on_row", "oracle", "wrap_call") if name in options}
    spec = CallSpec(SHAPE, 10, contexts, parse_split_specs(splits), repeats=2, **options)
    return sweep(device, spec, **seams)


def test_rows(device: za.Device) -> None:
    said: list[tuple[str, int, int]] = []
    seen: list[Row] = []
    layouts = ["auto", "1", "7", "size:300"]
    watch: dict[str, Any] = {"progress": lambda *step: said.append(step), "on_row": seen.append}
    rows = run(device, [100, 1024], ",".join(layouts), weights_ms=9.0, **watch)
    assert rows == seen
    assert [(r.context, r.layout) for r in rows] == [(n, s) for n in (100, 1024) for s in layouts]
    info = device.info
    for row in rows:
        assert (row.status, row.verified, row.error, row.repeats) == ("ok", "bits", None, 2)
        assert row.min_us is not None and row.median_us is not None and row.max_us is not None
        assert 0 < row.min_us <= row.median_us <= row.max_us
        assert row.attention_ms_per_step == pytest.approx(row.median_us * 10 / 1000)
        assert row.tokens_s_with_weights == pytest.approx(1000 / (row.attention_ms_per_step + 9))
        assert (row.dtype, row.batch, row.q_len, row.page_size) == ("f16", 1, 1, 256)
        assert row.latency_mode == "decode call: append, attend, merge; host clock, warm; median"
        assert (row.device, row.driver, row.runtime) == (info.name, info.driver, device.runtime.name)
    assert rows[4].plan == za.plan_splits(1024, SHAPE, info.compute_units, kind=info.kind).fingerprint()
    assert any(what.startswith("compiling shaders") for what, _, _ in said)
    steps = [done for _, done, _ in said]
    assert steps == sorted(steps) and said[-1] == ("done", steps[-1], steps[-1])


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_own_values(device: za.Device, dtype: str) -> None:
    kv = Inputs.normal(SHAPE, 200, dtype, seed=3)
    assert [r.status for r in run(device, [200, 65], kv=kv, dtype=dtype)] == ["ok"] * 4
    with pytest.raises(ArgumentError) as error:
        run(device, [201], kv=kv, dtype=dtype)
    assert str(error.value) == "contexts: got 201, expected at most 200, the tokens in normal, seed 3"


@pytest.mark.both_dispatchers
@pytest.mark.parametrize(
    ("dtype", "batch", "q_len", "page_size"),
    [("f32", 1, 3, 16), ("f16", 3, 1, 64), ("bf16", 2, 5, 128), ("q8_0", 3, 2, 256), ("f16", 1, 64, None),
     ("f32", 1, 1, None)],
)  # fmt: skip
def test_calls(device: za.Device, dtype: str, batch: int, q_len: int, page_size: int | None) -> None:
    options: dict[str, Any] = {"dtype": dtype, "batch": batch, "q_len": q_len, "page_size": page_size}
    rows = run(device, [64, 300], "auto,1,size:100", **options)
    assert [(r.status, r.verified, r.error) for r in rows] == [("ok", "bits", None)] * 6
    for row in rows:
        assert {name: getattr(row, name) for name in options} == options
        assert row.tokens_s is not None and row.attention_ms_per_step is not None
        assert row.tokens_s == pytest.approx(batch * q_len * 1000 / row.attention_ms_per_step)
        assert ("append" in row.latency_mode) == (page_size is not None)
    auto = za.plan_splits(300, SHAPE, device.info.compute_units, dtype, q_len, device.info.kind)
    assert rows[3].plan == auto.fingerprint()


def test_timed_calls_are_calls_of_the_cache(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call appends to all sequences at the same context, and only that is within the clock."""
    seen: list[tuple[list[int], list[int]]] = []
    call = za.Attention.__call__

    def watch(self: Any, q: Any, seq: Any, *rest: Any, **options: Any) -> Any:
        before = [len(s) for s in seq]
        result = call(self, q, seq, *rest, **options)
        seen.append((before, [len(s) for s in seq]))
        return result

    monkeypatch.setattr(za.Attention, "__call__", watch)
    run(device, [100], "auto", batch=2, q_len=3)
    assert seen == [([97, 97], [100, 100])] * (2 + WARM_UP_RUNS + 2 + 2)  # a spoiled call first and last


def test_own_values_of_many_rows(device: za.Device) -> None:
    kv = Inputs.normal(SHAPE, 90, "f32", seed=3, q_len=4)
    assert [r.status for r in run(device, [90, 65], kv=kv, dtype="q8_0", q_len=4, batch=2)] == ["ok"] * 4


def test_sampled(device: za.Device) -> None:
    for options in ({}, {"batch": 3, "q_len": 4}, {"page_size": None}):
        rows = run(device, [1000], oracle_products=0, **options)
        assert [(r.status, r.verified) for r in rows] == [("ok", "bits (sampled)")] * 2


def flip(x: Any, at: tuple[int, ...]) -> Any:
    """A copy with the lowest bit of one element flipped."""
    words = x.copy().view(np.uint32)
    words[at] ^= 1
    return words.view(np.float32)


@pytest.mark.parametrize(("name", "at"), [("out", (1, 2, 3, 17)), ("lse", (1, 2, 2))])
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "full"])
def test_one_wrong_bit_fails(device: za.Device, name: str, at: tuple[int, ...], sampled: bool) -> None:
    right = oracle_of(CallSpec(SHAPE, 1, [100]))

    def wrong(data: Inputs, dtype: str, sample: Sample) -> Output:
        output = right(data, dtype, sample)
        assert isinstance(output, Output)
        if sample.sequence != at[0]:
            return output
        end = (3, 4, 0)  # rows and heads are counted from the end, where the oracle's are
        where = tuple(i - j for i, j in zip(at[1:], end, strict=False))
        return output._replace(**{name: flip(getattr(output, name), where)})

    products = 0 if sampled else ORACLE_PRODUCTS
    for row in run(device, [100], batch=2, q_len=3, oracle_products=products, oracle=wrong):
        assert (row.status, row.verified, row.median_us, row.tokens_s) == ("failed", None, None, None)
        assert row.error is not None and row.error.startswith(f"{name}[{', '.join(map(str, at))}]: got ")
        elements = (2 if sampled else 3 * 4) * (1 if name == "lse" else 64)
        assert row.error.endswith(f"; 1 of {elements} elements differ")


def wrong_second(element: tuple[int, ...], result: int) -> Callable[[Subject], Subject]:
    """Flips a bit of ``out`` in one of the results of the second call that is wrapped; the first result is number 1."""
    calls, results = count(1), count(1)

    def wrap(call: Subject) -> Subject:
        def flipped() -> Output:
            out, lse = call.result()
            return Output(flip(out, element) if next(results) == result else out, lse)

        return replace(call, result=flipped) if next(calls) == 2 else call

    return wrap


def test_a_wrong_bit_outside_the_sample_fails(device: za.Device) -> None:
    first, second = run(device, [100], oracle_products=0, wrap_call=wrong_second((0, 0, 0, 5), 1))
    assert first.status == "ok"
    assert second.error is not None and second.error.startswith("unlike layout auto: out[0, 0, 0, 5]: got ")


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize(("result", "when"), [(2, "a warm-up run"), (1 + WARM_UP_RUNS + 2, "timed run 2")])
def test_a_wrong_bit_while_timing_fails(device: za.Device, page_size: int | None, result: int, when: str) -> None:
    first, second = run(device, [100], page_size=page_size, wrap_call=wrong_second((0, 0, 1, 2), result))
    assert (first.status, second.status, second.verified, second.median_us) == ("ok", "failed", None, None)
    assert second.error is not None and second.error.startswith(f"in {when}: out[0, 0, 1, 2]: got ")


@pytest.mark.parametrize("page_size", [None, 256])
def test_what_no_kernel_writes_fails(device: za.Device, monkeypatch: pytest.MonkeyPatch, page_size: int | None) -> None:
    """A call whose submission does nothing does not pass with the right output of an earlier one."""
    real = {name: getattr(device.runtime, name) for name in ("run", "start")}

    def idle(call: Subject) -> Subject:
        def spoil() -> None:
            call.run()
            call.spoil()
            for name in real:
                monkeypatch.setattr(device.runtime, name, lambda recording: None)

        return replace(call, spoil=spoil)

    (row,) = run(device, [100], "1", page_size=page_size, wrap_call=idle)
    for name, method in real.items():
        monkeypatch.setattr(device.runtime, name, method)
    assert row.status == "failed"


def test_no_room(device: za.Device) -> None:
    keys = min(device.info.max_buffer_bytes // 128 + 1, 1 << 24)  # a KV head takes 128 bytes per key
    if keys * 128 <= device.info.max_buffer_bytes:
        pytest.skip("every legal context fits into one buffer of this device")
    refused, also, fine, good = run(device, [keys, 64])
    assert refused.status == also.status == "refused"
    assert refused.error is not None and "in one storage buffer" in refused.error
    assert fine.status == good.status == "ok"
    assert [r.status for r in run(device, [keys], page_size=None)] == ["refused"] * 2


def test_a_batch_beyond_the_cache(device: za.Device) -> None:
    (row,) = run(device, [1 << 20], "auto", batch=17)
    assert (row.status, row.error) == (
        "refused",
        "17 x 1,048,576 tokens: a cache holds at most 16,777,216, in whole pages",
    )


# --- as a user ---------------------------------------------------------------------------------------------


def command(device: za.Device, *args: str) -> list[str]:
    return ["sweep", "--device", str(device.info.index), "--runtime", device.runtime.name, "--repeats", "2", *args]


def test_command(device: za.Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    info = device.info
    argv = command(device, "--shape", "4/2/64", "--layers", "3", "--contexts", "64,1k", "--out", str(tmp_path))
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        f"{info.name} ({info.driver}), {device.runtime.name}\nshape 4/2/64, f16, 3 attention layers\n"
        "1 sequence, 1 row per call; cache with pages of 256 tokens\n"
    )
    assert out.count(" bits ") == 4
    assert ("running on the CPU through" in err) == (info.kind == "cpu")
    files = ["sweep.csv", "sweep.jsonl", "sweep.png"]
    assert err.endswith(f"written: {', '.join(str(tmp_path / name) for name in files)}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    records = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    points = [(64, "auto"), (64, "1"), (1024, "auto"), (1024, "1")]
    assert [(r["context"], r["layout"], r["layers"]) for r in records] == [(*point, 3) for point in points]
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 5
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "said"),
    [(["--dtype", "q8_0", "--batch", "3", "--rows", "2", "--page-size", "64"],
      "shape 4/2/64, q8_0, 1 attention layer\n3 sequences, 2 rows each per call; cache with pages of 64 tokens\n"),
     (["--contiguous", "--rows", "4"],
      "shape 4/2/64, f16, 1 attention layer\n1 sequence, 4 rows per call; contiguous K and V\n")],
)  # fmt: skip
def test_command_calls(
    device: za.Device, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    pytest.importorskip("matplotlib")
    argv = command(device, "--shape", "4/2/64", "--contexts", "64,200", *args, "--out", str(tmp_path))
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert said in out and out.count(" bits ") == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep.csv", "sweep.jsonl", "sweep.png"]


def test_command_json_and_kv(device: za.Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    made = Inputs.normal(SHAPE, 70, "f32")
    np.savez(tmp_path / "mine.npz", q=made.q, k=made.k, v=made.v)
    argv = command(device, "--kv", str(tmp_path / "mine.npz"), "--json", "--out", str(tmp_path / "out"))
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert out == (tmp_path / "out" / "sweep.jsonl").read_text()
    record = json.loads(out.splitlines()[0])
    assert (record["model"], record["context"], record["dtype"]) == ("mine", 70, "f32")


def test_command_fails_on_a_wrong_bit(
    device: za.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    emulate = reference.emulate
    monkeypatch.setattr(reference, "emulate", lambda *a: (flip(emulate(*a)[0], (0, 0, 0)), emulate(*a)[1]))
    argv = command(device, "--shape", "4/2/64", "--contexts", "64", "--out", str(tmp_path))
    assert cli.main(argv) == 1
    assert "64 keys, auto, 1: FAILED: out[0, 0, 0, 0]: got " in capsys.readouterr().out
    assert not (tmp_path / "sweep.png").exists()
