"""The sweep on a device: it verifies, it times, and it catches a wrong bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zinc_attn as za
from zinc_attn import cli, reference, sweep
from zinc_attn.errors import ArgumentError
from zinc_attn.sweep import Inputs, SweepRow, parse_layouts

SHAPE = za.AttnShape(4, 2, 64)


def run(device: za.Device, contexts: list[int], splits: str = "auto,1", **options: Any) -> list[SweepRow]:
    return sweep.sweep(device, SHAPE, 10, contexts, parse_layouts(splits), repeats=2, **options)


def test_rows(device: za.Device) -> None:
    said: list[tuple[str, int, int]] = []
    seen: list[SweepRow] = []
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
        assert row.attention_ms_per_token == pytest.approx(row.median_us * 10 / 1000)
        assert row.tokens_s_with_weights == pytest.approx(1000 / (row.attention_ms_per_token + 9))
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


def test_sampled_heads(device: za.Device) -> None:
    assert [r.verified for r in run(device, [1000], oracle_products=0)] == ["bits (sampled heads)"] * 2


def flip(x: Any, at: tuple[int, ...]) -> Any:
    """A copy with the lowest bit of one element flipped."""
    words = x.copy().view(np.uint32)
    words[at] ^= 1
    return words.view(np.float32)


@pytest.mark.parametrize(("name", "at"), [("out", (3, 17)), ("lse", (2,))])
@pytest.mark.parametrize("heads", [2, 4], ids=["sampled", "full"])
def test_one_wrong_bit_fails(
    device: za.Device, monkeypatch: pytest.MonkeyPatch, name: str, at: tuple[int, ...], heads: int
) -> None:
    emulate = reference.emulate

    def wrong(q: Any, k: Any, v: Any) -> Any:
        out, lse = emulate(q, k, v)
        where = (at[0] - 4 + len(out), *at[1:])  # the sampled heads are the last ones
        return (flip(out, where), lse) if name == "out" else (out, flip(lse, where))

    monkeypatch.setattr(reference, "emulate", wrong)
    for row in run(device, [100], oracle_products=0 if heads == 2 else sweep.ORACLE_PRODUCTS):
        assert (row.status, row.verified, row.median_us, row.tokens_s) == ("failed", None, None, None)
        assert row.error is not None and row.error.startswith(f"{name}[{', '.join(map(str, at))}]: got ")
        assert row.error.endswith(f"; 1 of {heads * (1 if name == 'lse' else 64)} elements differ")


def test_a_wrong_bit_outside_the_sample_fails(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = sweep._run, [0]

    def wrong(step: Any) -> Any:
        calls[0] += 1
        out, lse = real(step)
        return (flip(out, (0, 5)), lse) if calls[0] == 2 else (out, lse)

    monkeypatch.setattr(sweep, "_run", wrong)
    first, second = run(device, [100], oracle_products=0)
    assert first.status == "ok"
    assert second.error is not None and second.error.startswith("unlike layout auto: out[0, 5]: got ")


def test_a_wrong_bit_while_timing_fails(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sweep.AttentionStep.result
    calls = [0]

    def wrong(step: Any) -> Any:
        calls[0] += 1
        out, lse = real(step)
        return (flip(out, (0, 1, 2)), lse) if calls[0] == 4 else (out, lse)  # two layouts verified, then timed

    monkeypatch.setattr(sweep.AttentionStep, "result", wrong)
    first, second = run(device, [100])
    assert (first.status, second.status, second.median_us) == ("ok", "failed", None)
    assert second.error is not None and second.error.startswith("in timed run 2: out[1, 2]: got ")


def test_no_room(device: za.Device) -> None:
    keys = min(device.info.max_buffer_bytes // 256 + 1, 1 << 24)
    if keys * 256 <= device.info.max_buffer_bytes:
        pytest.skip("every legal context fits into one buffer of this device")
    refused, also, fine, good = run(device, [keys, 64])
    assert refused.status == also.status == "refused"
    assert refused.error is not None and "bytes in one storage buffer" in refused.error
    assert fine.status == good.status == "ok"


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
    monkeypatch.setattr(reference, "emulate", lambda *a: (flip(emulate(*a)[0], (0, 0)), emulate(*a)[1]))
    argv = command(device, "--shape", "4/2/64", "--contexts", "64", "--out", str(tmp_path))
    assert cli.main(argv) == 1
    assert "64 keys, auto, 1: FAILED: out[0, 0]: got " in capsys.readouterr().out
    assert not (tmp_path / "sweep.png").exists()
