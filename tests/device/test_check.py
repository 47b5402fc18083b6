"""zinc-attn check on a device: it passes, it writes and reads records, and a broken call cannot pass it.

Kernels that are broken and do not pass are in tests/slips/attend.txt.
"""

import json
import re
import sys
from typing import Any

import numpy as np
import pytest
from commands import on, refusal
from commands import run as command
from support import FULL

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.cli import check as check_command
from zinc_attn.distributed import fold
from zinc_attn.planning import call as planned
from zinc_attn.tools import check
from zinc_attn.tools.check import Case, properties
from zinc_attn.tools.check.cases import QUICK
from zinc_attn.tools.check.properties import ShardedKVCache
from zinc_attn.tools.check.record import committed_digests, run_digest
from zinc_attn.tools.harness.split_spec import SplitSpec, parse_split_specs

NATIVE = True


def run(device: za.Device, *options: Any) -> int:
    return command("check", on(device), *options)


# --- what passes -------------------------------------------------------------------------------------------


def test_quick_agrees_with_the_committed_record(device, capsys):
    assert run(device, "--quick") == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    cases = [re.split(" {2,}", line) for line in lines if line.startswith("pass")]
    assert {words[1] for words in cases} == set(QUICK)
    assert all(words[3] == "record" for words in cases)
    assert [line.split()[0] for line in lines if re.match(r" ?\d+ \S", line)] == [str(prop) for prop in range(1, 11)]
    assert all(re.search(r"  pass, \d+ comparisons$", line) for line in lines[-11:-1])
    digest = run_digest({name: committed_digests()[name] for name in QUICK})
    assert lines[-1] == f"run {digest}  {device.info.name}, {device.runtime.name}, {device.info.driver}"


# Of the quick cases, those of shapes, storage and masks that no other test attends on a driver in all of its ways.
ON_A_DRIVER = (
    *("32/8/128 f16 129", "9/3/64 f32 65", "9/3/64 f16 2048", "9/3/64 f16 1700 window=1200+sinks"),
    *("9/3/64 f16 2200 rising window=1900", "9/3/64 f16 2200 falling sinks", "9/3/64 f16 1300 cancelling"),
    *("9/3/64 f16 902 fading", "9/3/64 f16 700 window=300+sinks+mask=tree", "9/3/64 f16 90 mask=blind"),
    *("128/1/64 f16 130 jumping", "9/3/64 q5_1/q4_0 300 rising"),
)


@pytest.mark.of_drivers
def test_quick_cases_agree_with_the_record_on_a_driver(device):
    """test_grid.py, test_storage.py and c_cases.py attend the shapes and types of the others there."""
    cases = [Case.parse(text) for text in (QUICK if FULL else ON_A_DRIVER)]
    outcomes = list(check.check([device], cases, parse_split_specs("1,auto,size:512")))
    assert {(outcome.status, outcome.verified) for outcome in outcomes} == {("pass", "record")}
    assert {prop for outcome in outcomes for prop in outcome.shown} == {*range(1, 11)}


@pytest.mark.parametrize(
    ("case", "missing"),
    [
        ("16/2/256 q8_0 1", {8, 9}),
        ("9/3/64 f32 2", {7, 8, 9}),
        ("9/3/64 bf16 65", {8, 9}),
        ("9/3/64 f16 1100 softcap=3+scale=0.3+sinks", set()),
        ("9/3/64 f16 1100 fused sinks", set()),
        ("9/3/64 f16 700 window=100+softcap=3+sinks", {8}),
        ("6/2/67/133 f16 70 rising noncausal", {8, 9}),
        ("9/3/64 f16 1 mask=blind", {8, 9}),
    ],
)
def test_what_a_case_shows(device, case, missing):
    """What the record does not have is compared with the oracle. One node has nothing to share, and no shards.

    The kernels are those of the quick cases.
    """
    (outcome,) = check.check([device], [Case.parse(case)], parse_split_specs("1,auto"))
    assert (outcome.status, outcome.verified, outcome.faults) == ("pass", "oracle", [])
    assert set(outcome.shown) == {*range(1, 11)} - missing


def test_check_runs_without_rich(device, monkeypatch, capsys):
    """Any import of rich fails here."""
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run(device, "--cases '9/3/64 f16 65' --splits auto") == 0
    assert capsys.readouterr().out.startswith("pass    9/3/64 f16 65")


def test_shards_lie_on_every_device(device, monkeypatch):
    used: list[list[za.Device]] = []

    def sharded(*args: Any, **options: Any) -> ShardedKVCache:
        cache = ShardedKVCache(*args, **options)
        assert set(cache.owners) == set(range(len(cache.devices)))
        used.append(cache.devices)
        return cache

    monkeypatch.setattr(properties, "ShardedKVCache", sharded)
    case, splits = Case.parse("9/3/64 f16 1100"), parse_split_specs("auto")
    with za.Device.open(device.info.index, runtime=device.runtime.name) as other:
        (alone,) = check.check([device], [case], splits)
        both = list(check.check([device, other], [case], splits))
        assert used == [[device, device], [device, other], [other, device]]
    assert [outcome.shown[9] for outcome in (alone, *both)] == [2, 2, 2]
    assert {outcome.status for outcome in (alone, *both)} == {"pass"}


def test_layouts_run_as_planned(device, monkeypatch):
    plans, plan = set[za.SplitPlan](), SplitSpec.plan

    def noted(*arguments: Any) -> za.SplitPlan:
        plans.add(plan(*arguments))
        return plan(*arguments)

    monkeypatch.setattr(SplitSpec, "plan", noted)
    case, sizes = Case.parse("9/3/64 f16 2048"), ({"num_splits": 2}, {"num_splits": 3}, {"split_size": 1536})
    (outcome,) = check.check([device], [case], parse_split_specs("2,3,size:1536"))
    assert outcome.status == "pass" and {za.SplitPlan.fixed(2048, case.shape, **size) for size in sizes} <= plans


def test_devices_are_compared(device, capsys, monkeypatch):
    """Without --full the device with itself: SwiftShader would compile all kernels of a case."""
    found, runtime = za.list_devices() if FULL else [device.info] * 2, device.runtime.name
    monkeypatch.setattr(check_command, "list_devices", lambda: found)
    every = len(found)
    assert command(f"check --device all --runtime {runtime} --json --cases '9/3/64 f16 2' --splits auto") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    outcomes, entries = lines[:every], lines[every:]
    assert len(entries) == every and len({entry["run"] for entry in entries}) == 1
    assert {outcome["status"] for outcome in outcomes} == {"pass"}
    assert [outcome["variations"]["10"] for outcome in outcomes] == [1] + [2] * (every - 1)
    assert entries[0]["made_by"].keys() == {"zinc_attn", "device", "runtime", "driver"}
    assert (entries[0]["made_by"]["runtime"], entries[0]["made_by"]["zinc_attn"]) == (runtime, za.__version__)


# --- records of other machines -----------------------------------------------------------------------------


def test_record_and_against(device, tmp_path, capsys):
    path = tmp_path / "r.json"
    small = "--cases '9/3/64 f16 65,9/3/64 f16 1000' --splits auto"
    assert run(device, small, "--record", path) == 0
    assert capsys.readouterr().err.endswith(f"written: {path}\n")
    assert run(device, small, "--against", path) == 0
    source = f"r.json [0], {device.info.name}, {device.runtime.name}, {device.info.driver}"
    assert f"\n{source}: has 2 of the 2 cases\n" in capsys.readouterr().out
    said = refusal(capsys, "check", on(device), small, "--record", path / "r.json")
    assert said.endswith("; choose another file with --record")
    content = json.loads(path.read_text())
    digest = content["records"][0]["cases"]["9/3/64 f16 65"]
    path.write_text(path.read_text().replace(digest, "0" * 64))
    assert run(device, small, "--against", path) == 1
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if "9/3/64" in line] == ["FAIL", "pass"]
    assert (
        f"        10 driver and GPU: the oracle's bits, {source}: digest {digest[:16]}, expected {'0' * 16}; "
        "the oracle computed here agrees with the device\n"
    ) in text
    path.write_text(json.dumps(content | {"format": 0}))
    said = refusal(capsys, "check", on(device), small, "--against", path)
    assert said == f"{path}: got format 0, expected 1"


def test_a_case_without_room_is_refused(device, monkeypatch, capsys):
    def no_room(*_: Any) -> Any:
        raise za.errors.LimitError("buffer: too much")

    monkeypatch.setattr(za.Sequence, "fork", no_room)
    assert run(device, "--cases '9/3/64 f16 1000'") == 2
    text = capsys.readouterr().out
    assert text.startswith("refused 9/3/64 f16 1000") and "\n        buffer: too much\n" in text


# --- broken calls ------------------------------------------------------------------------------------------


def range_moved(begin: int, end: int, alone: int) -> Any:
    """Of the nodes that rows share: one that nobody attends, or that is shared by rows that do not see all of it."""

    def broken(*arguments: Any) -> Any:
        found, left = SHARED_NODES(*arguments)
        moved = [one._replace(begin=one.begin + begin, end=one.end + end) for one in found]
        return moved, left + alone * (left > 0)

    return broken


def reversed_gather(parts: Any) -> reference.PartialState:
    """A fold of shards in another order. Of three nodes or more: a sum of two does not tell."""
    whole = reference.gather(parts)
    m, total, o = (np.ascontiguousarray(x[:, ::-1]) for x in (whole.m, whole.l, whole.o))
    return reference.PartialState(whole.nodes, m, total, o, whole.span, whole.call, whole.sinks)


SHARED_NODES = planned.shared_nodes
MOVED = [(1, 0, 0), (0, -1, 0), (0, 0, 1), (0, 1, 1)]  # rows share, or requests, where nothing is left to share


@pytest.mark.parametrize(
    ("module", "name", "broken", "case", "shown"),
    (
        *((planned, "shared_nodes", range_moved(*moved), "9/3/64 f16 1000", {"4", "5", "8", "9"}) for moved in MOVED),
        (fold, "gather", reversed_gather, "9/3/64 f16 2048", {"9"}),
    ),
)
def test_a_broken_call_fails(device, module, name, broken, case, shown, monkeypatch, capsys):
    monkeypatch.setattr(module, name, broken)
    assert run(device, f"--cases '{case}' --splits 1,7,auto,size:100") == 1
    text = capsys.readouterr().out
    failed = set(re.findall(r"^ +(\d+) .*: (?:out|lse)\[[\d, ]+\]: got ", text, re.MULTILINE))
    assert text.startswith(f"FAIL    {case}") and failed <= shown and failed & {"4", "8", "9"}, text
