"""zinc-attn check --graph: the bits of random models on every device, records, and what is said of a fault."""

import json
import re

import numpy as np
import pytest
from support import FULL

from zinc_attn.cli import app as cli
from zinc_attn.tools.graph import check as checking
from zinc_attn.tools.graph import device as on_device
from zinc_attn.tools.graph.device import OnDevice
from zinc_attn.tools.graph.model import KINDS

NATIVE = True
EXECUTED = True
SHOWN = "q8_0", "q4_K", "bf16", "f16 experts"  # blocks of 32, of 256, no blocks, and matrices that ids choose
OPERATIONS = 116  # of both ways in which the tokens come
LAYERS = {"gdn": 28, "kda": 28, "mamba": 20, "mamba2": 20, **dict.fromkeys(checking.CHOSEN[: 1 + FULL], 248)}


@pytest.mark.one_driver(default=("q4_K", "kda", "mamba", "qwen35moe"))  # the last has gdn
@pytest.mark.parametrize("kind", [*(KINDS if FULL else SHOWN), *LAYERS])
def test_the_oracles_bits(any_device, kind, monkeypatch):
    monkeypatch.setattr(on_device, "BOUND", 1 << (17 if kind == "qwen35moe" else 27))  # not all experts in a dispatch
    operations = LAYERS.get(kind, OPERATIONS + 40 * kind.endswith("experts"))
    outcome = checking.GraphOutcome(kind, checking.committed()[kind], operations, "")
    assert [*checking.check_graph(any_device, [kind])] == [outcome]
    assert getattr(any_device.runtime, "loads_outside", 0) == 0  # gfx1201's


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SHOWN])
def test_every_type(device, kind, monkeypatch):
    test_the_oracles_bits(device, kind, monkeypatch)


def test_the_record_has_every_case():
    assert tuple(checking.committed()) == (*checking.CASES, *checking.CHOSEN)


@pytest.fixture
def check(device, capsys):
    """The exit status and the lines of the command, which has one type of weights."""

    def run(*options):
        where = "--device", str(device.info.index), "--runtime", device.runtime.name
        return cli.main(["check", "--graph", "q8_0", *where, *map(str, options)]), capsys.readouterr().out.splitlines()

    return run


def test_records(check, tmp_path):
    written, other = tmp_path / "mine.json", tmp_path / "other.json"
    digest = checking.committed()["q8_0"]
    status, lines = check("--record", written)
    assert status == 0 and re.fullmatch(rf"pass +graph q8_0 +{digest[:18]} +{OPERATIONS} operations  .*", lines[0])
    record = json.loads(written.read_text())
    entry = record["records"][0]
    assert entry["cases"] == {"graph q8_0": digest} and lines[1].startswith(f"run {entry['run']}  ")
    assert check("--against", written) == (0, lines)
    entry["cases"]["graph q8_0"] = "0" * 64
    other.write_text(json.dumps(record))
    status, lines = check("--against", other)
    assert status == 1 and lines[0].startswith("FAIL    graph q8_0")
    assert re.fullmatch(rf" {{8}}other.json \[0\], .* has {'0' * 16}", lines[1])
    status, lines = check("--against", other, "--json")
    assert status == 1 and json.loads(lines[0])["fault"].endswith("0" * 16) and json.loads(lines[1])["cases"]


FAULTS = {  # what is changed, and the line
    "an operation": (
        (OnDevice, "swiglu", lambda self, gate, up, swiglu=OnDevice.swiglu: swiglu(self, up, gate)),
        r"operation 13, swiglu: \d+ of 3072 values differ",
    ),
    "the logits": (
        (checking, "logits", lambda model, of, pieces: np.float32(len(pieces)) + of_model(model, of, pieces)),
        "logits depend on how many tokens come at once",
    ),
    "the record": ((checking, "committed", dict), r"got digest ed4a92e820887d3a, expected none"),
}
of_model = checking.logits


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_reported(check, monkeypatch, what):
    change, line = FAULTS[what]
    monkeypatch.setattr(*change)
    status, lines = check()
    assert status == 1 and lines[0].startswith("FAIL    graph q8_0") and re.fullmatch(f" {{8}}{line}", lines[1])
