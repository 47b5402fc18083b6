"""What a sweep measures on a device: it verifies, it times, and it catches a wrong bit."""

import csv
import io
import json
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from commands import on, records, refusal, shown
from commands import run as main

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.tools.harness.bits import Output
from zinc_attn.tools.harness.split_spec import parse_split_specs
from zinc_attn.tools.measure import WARM_UP_RUNS, CallSpec, measure_calls, points

NATIVE = True
SHAPE = za.AttnShape(4, 2, 64)


def run(device, contexts, splits="auto,1", **options):
    seams = {name: options.pop(name) for name in ("progress", "wrap_call") if name in options}
    spec = CallSpec(SHAPE, 10, contexts, parse_split_specs(splits), repeats=2, **options)
    return list(measure_calls([device], [spec], **seams))


CALLS = [("f32", 1, 3, 16), ("f16", 3, 1, 64), ("bf16", 2, 5, 128), ("q8_0", 3, 2, 256)]
CALLS += [("f16", 1, 64, None), ("f32", 1, 1, None)]


@pytest.mark.parametrize(("dtype", "batch", "q_len", "page_size"), CALLS)
def test_calls(device, dtype, batch, q_len, page_size):
    options: dict[str, Any] = {"dtype": dtype, "batch": batch, "q_len": q_len, "page_size": page_size}
    said, layouts, info = list[Any](), ["auto", "1", "size:100"], device.info
    rows = run(device, [64, 300], ",".join(layouts), progress=lambda *step: said.append(step), **options)
    rows = [row for row in rows if row.measure == "call"]
    assert [(r.context, r.layout) for r in rows] == [(n, s) for n in (64, 300) for s in layouts]
    for record, row in ((row.record(), row) for row in rows):
        assert (record["status"], record["verified"], record["error"], record["repeats"]) == ("ok", "bits", None, 2)
        assert {name: record[name] for name in options} == options
        assert (record["device"], record["driver"], record["runtime"]) == (info.name, info.driver, device.runtime.name)
        assert 0 < record["min_us"] <= record["median_us"] <= record["max_us"]
        assert row.figures["attention_ms_per_step"] == pytest.approx(record["median_us"] * 10 / 1000, rel=1e-4)
        assert row.figures["tokens_s"] == pytest.approx(batch * q_len * 1000 / row.figures["attention_ms_per_step"])
        whole = record["latency_mode"] == "decode call: append, attend, merge; host clock, warm; median"
        assert whole == (page_size is not None)
    plan = za.plan_splits(300, SHAPE, info.compute_units, q_len)
    assert rows[3].plan == plan and rows[3].record()["plan"] == plan.fingerprint()
    assert any(what.startswith("compiling shaders") for what, _, _ in said)
    steps = [done for _, done, _ in said]
    assert steps == sorted(steps) and said[-1] == ("done", steps[-1], steps[-1])


@pytest.mark.parametrize("kind", ["discrete", "cpu"])
def test_a_gpu_is_timed_once_its_clock_has_risen(device, monkeypatch, kind):
    """Rounds fill a time before the timed ones on a GPU, and are a few on a CPU."""
    monkeypatch.setattr(points, "GPU_WARM_UP_S", 0.2)
    runs = count(1)

    def wrap(call):
        call.row = replace(call.row, info=replace(call.row.info, kind=kind))
        monkeypatch.setattr(call, "timed_run", lambda: {"call": float(next(runs))})
        return call

    (row,) = run(device, [100], "auto", wrap_call=wrap)
    first, second = row.seconds
    assert second == first + 1 and (first == WARM_UP_RUNS + 1) == (kind == "cpu")


def flip(x, at):
    """A copy with the lowest bit of one element flipped."""
    words = x.copy().view(np.uint32)
    words[at] ^= 1
    return words.view(np.float32)


@pytest.mark.parametrize("page_size", [256, None])
@pytest.mark.parametrize(("name", "index"), [("out", (-1, -1, 17)), ("lse", (-1, -1))])
@pytest.mark.parametrize("products", [0, 1 << 30], ids=["sampled", "full"])
def test_one_wrong_bit_fails(device, monkeypatch, page_size, name, index, products):
    """A bit of the last call of the oracle: of the last sequence's last KV head."""
    batch, calls, right = 2 if page_size else 1, count(1), reference.emulate
    last = batch * (2 if products else 1)

    def wrong(*arguments, **options):
        output = Output(*right(*arguments, **options))
        flipped = output._replace(**{name: flip(getattr(output, name), index)})
        return flipped if next(calls) == last else output

    monkeypatch.setattr(reference, "emulate", wrong)
    rows = run(device, [100], page_size=page_size, batch=batch, q_len=3, oracle_products=products)
    assert [row.layout for row in rows] == ["auto", "1"]  # without passes
    for row in rows:
        assert (row.status, row.verified, set(row.figures.values())) == ("failed", None, {None})
        place = (batch - 1, 2, 3, 17) if name == "out" else (batch - 1, 2, 3)
        assert row.error is not None and row.error.startswith(f"{name}[{', '.join(map(str, place))}]: got ")
        rows_and_heads = 3 * 4 if products else 2
        assert row.error.endswith(f"; 1 of {rows_and_heads * (1 if name == 'lse' else 64)} elements differ")


def wrong_call(number, element, result):
    """Flips a bit of ``out`` in a result of the call that is wrapped as the ``number``-th; the first result is 1."""
    calls, results = count(1), count(1)

    def wrap(call):
        def flipped():
            out, lse = call.result()
            return Output(flip(out, element) if next(results) == result else out, lse)

        return replace(call, result=flipped) if next(calls) == number else call

    return wrap


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize(
    ("products", "result", "said"),
    [(0, 1, "unlike layout auto: "), *((1 << 30, n, "while timing: ") for n in (2, 1 + WARM_UP_RUNS + 2))],
)
def test_one_wrong_bit_of_a_layout_fails(device, page_size, products, result, said):
    """Outside the sample of the oracle, and in the first and the last of the calls that are timed."""
    wrong = {"wrap_call": wrong_call(2, (0, 0, 1, 2), result), "oracle_products": products}
    *first, second = run(device, [100], page_size=page_size, **wrong)
    assert {row.status for row in first} == {"ok"}
    assert (second.status, second.verified, second.figures["median_us"]) == ("failed", None, None)
    assert second.error is not None and second.error.startswith(f"{said}out[0, 0, 1, 2]: got ")


def test_a_wrong_layout_does_not_make_the_others_wrong(device):
    """Whose heads outside the sample are compared with those of the first layout that is right."""
    wrong, right = run(device, [100], oracle_products=0, wrap_call=wrong_call(1, (0, 0, 3, 2), 1))
    assert (wrong.status, right.status, right.verified) == ("failed", "ok", "bits (sampled)")
    assert wrong.error is not None and wrong.error.startswith("out[0, 0, 3, 2]: got ")


@pytest.mark.parametrize("page_size", [None, 256])
@pytest.mark.parametrize("from_call", ["first", "timed"])
def test_what_no_kernel_writes_fails(device, monkeypatch, page_size, from_call):
    """A call whose submission does nothing does not pass with the right output of an earlier one."""
    real = {name: getattr(device.runtime, name) for name in ("run", "start")}

    def idle():
        for name in real:
            monkeypatch.setattr(device.runtime, name, lambda recording: None)

    def wrap(call):
        spoils = count(1)

        def spoil():
            number = next(spoils)
            if number == 1 and from_call == "first":
                call.call()
                call.cut_back()
            call.spoil()
            if number == (1 if from_call == "first" else 2):
                idle()

        return replace(call, spoil=spoil)

    rows = run(device, [100], "1", page_size=page_size, wrap_call=wrap)
    for name, method in real.items():
        monkeypatch.setattr(device.runtime, name, method)
    assert [row.status for row in rows] == ["failed"]
    assert ("after the timing: " in str(rows[0].error)) == (from_call == "timed")


def test_no_room(device, monkeypatch):
    monkeypatch.setattr(device.runtime, "info", replace(device.info, max_buffer_bytes=1 << 20))
    keys = (1 << 20) // 128 + 1  # a KV head takes 128 bytes per key
    refused, also, fine, good = run(device, [keys, 64])
    assert refused.status == also.status == "refused"
    assert refused.error is not None and "in one storage buffer" in refused.error
    assert fine.status == good.status == "ok"
    assert [r.status for r in run(device, [keys], page_size=None)] == ["refused"] * 2


def command(device, out, options):
    """The words of the command."""
    return "sweep --shape 4/2/64 --repeats 2", options, on(device), "--out", out


def test_command(device, tmp_path, capsys):
    info = device.info
    options = "--layers 3 --contexts 64,1k --dtype q8_0 --batch 3 --rows 2 --page-size 64 --weights-ms 5"
    assert main(*command(device, tmp_path, options)) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        f"{info.name} ({info.driver}), {device.runtime.name}\nshape 4/2/64, q8_0, 3 attention layers\n"
        "3 sequences, 2 rows each per call; cache with pages of 64 tokens; rest of a step 5 ms\n"
    )
    assert out.endswith("step tokens/s: with 5 ms for all else of the step, as --weights-ms says.\n")
    assert out.count(" bits ") == 4
    assert ("running on the CPU through" in err) == (info.kind == "cpu")
    files = [tmp_path / f"sweep.{kind}" for kind in ("jsonl", "csv", "png")]
    assert err.endswith(f"written: {', '.join(map(str, files))}\n") and {*tmp_path.iterdir()} == {*files}
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    table = list(csv.DictReader(io.StringIO(files[1].read_text())))
    assert table == [{name: "" if x is None else str(x) for name, x in row.items()} for row in rows]
    points = [(64, "auto"), (64, "1"), (1024, "auto"), (1024, "1")]
    assert [(r["context"], r["layout"], r["layers"]) for r in rows] == [(*point, 3) for point in points]
    for row in rows:
        assert row["step_tokens_s"] == pytest.approx(6e3 / (row["attention_ms_per_step"] + 5), rel=1e-5)
    picture = shown(files[2].read_bytes())
    assert picture["title"] == "Tokens per second by context, attention and 5 ms for the rest"
    assert picture["lines"]["one split"] == [[row["context"], row["step_tokens_s"]] for row in rows[1::2]]


@pytest.mark.of_drivers  # whose buffers are too small for 16m keys
def test_a_card_and_another_device_beside(device, tmp_path, capsys):
    """The cost model's rows stand behind those that were measured, and a picture takes an earlier run's."""
    measured = records(capsys, *command(device, tmp_path / "a", "--contexts 64,256 --card r9700 --json"))
    told = [(row["context"], row["device"], row["layout"], row["measure"]) for row in measured]
    here, card = device.info.name, "Radeon AI PRO R9700"
    kinds = [(here, "auto", "call"), (card, "auto", "modeled"), (here, "1", "call"), (card, "1", "modeled")]
    assert told == [(context, *kind) for context in (64, 256) for kind in kinds]
    (plan,) = records(capsys, "plan --shape 4/2/64 --contexts 256 --card r9700 --json")
    assert measured[5]["median_us"] == pytest.approx(plan["modeled"]["total_us"], rel=1e-4)
    assert (measured[5]["plan"], measured[5]["verified"]) == (plan["fingerprint"], None)
    renamed = {"device": "another (X)", "device_kind": "discrete"}
    other = [row | renamed for row in measured if row["measure"] == "call"]
    file = tmp_path / "another.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in other))
    beside = command(device, tmp_path / "b", f"--contexts 64 --card r9700 --beside {file}")
    assert main(*beside) == 0
    out = capsys.readouterr().out
    assert "another" not in out and out.count(" modeled  ") == 2 * 2 and "\nmodeled: nothing ran: " in out
    lines = shown((tmp_path / "b" / "sweep.png").read_bytes())["lines"]
    assert lines["another, measured · one split"] == [[row["context"], row["tokens_s"]] for row in other[1::2]]
    assert [[64, measured[1]["tokens_s"]]] == lines["Radeon AI PRO R9700, modeled · split rule"] and len(lines) == 6
    assert main(*command(device, tmp_path / "c", "--contexts 16m --card r9700")) == 2 and not (tmp_path / "c").exists()
    capsys.readouterr()
    file.write_text(json.dumps(other[0] | {"layers": 2}))
    expected = "expected a sweep.jsonl of the same shape, layers and call"
    assert refusal(capsys, *beside) == f"{file}: got rows of another call, {expected}"


def test_command_fails_on_a_wrong_bit(device, tmp_path, monkeypatch, capsys):
    right = reference.emulate

    def wrong(*arguments, **options):
        out, lse = right(*arguments, **options)
        return flip(out, (0, 0, 0)), lse

    monkeypatch.setattr(reference, "emulate", wrong)
    assert main(*command(device, tmp_path, "--contexts 64 --oracle numpy")) == 1
    out = capsys.readouterr().out
    assert "\n1 sequence, 1 row per call; cache with pages of " in out
    assert "64 keys, auto, 1: FAILED: out[0, 0, 0, 0]: got " in out
    assert not (tmp_path / "sweep.png").exists()
