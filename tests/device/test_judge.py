"""Native code of the processor as the oracle: its bits are NumPy's, drawn parts show it, and it never judges itself."""

from contextlib import ExitStack

import numpy as np
import pytest
from commands import on, records, refusal, run
from support import CPU_NATIVE

from zinc_attn.canonical.state import F32
from zinc_attn.cli.arguments import open_oracle
from zinc_attn.errors import WrongResultError
from zinc_attn.runtime.cpu import library as native
from zinc_attn.tools.check.cases import Case
from zinc_attn.tools.check.outcome import oracle_output
from zinc_attn.tools.graph import check as graph
from zinc_attn.tools.graph.device import OnDevice
from zinc_attn.tools.graph.oracle import DrawnOracle
from zinc_attn.tools.harness.judge import NativeOracle

NATIVE = True
SWEEP = "sweep --shape 4/2/64 --contexts 600 --splits auto --repeats 1 --no-picture --json"
CHECK = "check --cases '4/2/64 f16 100' --splits auto"


@pytest.fixture
def cpu(device_of):
    return device_of(*CPU_NATIVE)


@pytest.mark.parametrize("case", [*Case.quick("canonical")[:4], *Case.quick("fused")[9:13], *Case.quick("integer")[:2]])
def test_the_oracles_bits(cpu, case):
    """All of a call, and of many products those of the last KV head."""
    judge, data = NativeOracle(cpu), case.data()
    for products in (1 << 30, 0):
        of_both = [oracle_output(case, data, products, *by) for by in ((), (judge,))]
        assert of_both[0].digest() == of_both[1].digest()
    assert judge.calls == 2


def test_a_drawn_part_with_other_bits_ends_the_run(cpu, monkeypatch):
    case = Case.parse("4/2/64 f16 600")
    attend = NativeOracle._attend
    monkeypatch.setattr(NativeOracle, "_attend", lambda self, q, *rest: attend(self, np.nextafter(q, 9), *rest))
    with pytest.raises(WrongResultError, match=r"other bits than NumPy, out\[.*; use --oracle numpy"):
        oracle_output(case, case.data(), judge=NativeOracle(cpu))

    class Wrong(OnDevice):
        def swiglu(self, gate: F32, up: F32) -> F32:
            return np.nextafter(super().swiglu(gate, up), np.float32(9))

    with pytest.raises(WrongResultError, match="other bits than NumPy in swiglu; use --oracle numpy"):
        graph.passes("q8_0")(DrawnOracle(Wrong(cpu), "q8_0"), (6,))


@pytest.mark.of_drivers
def test_who_judges_is_said(device, cpu, capsys, tmp_path, monkeypatch):
    options = on(device), "--out", tmp_path
    for named, judge in (((), "cpu"), (("--oracle", "numpy"), "numpy")):
        (row,) = records(capsys, SWEEP, *options, *named)
        assert (row["verified"], row["oracle"]) == ("bits", judge)
    assert run("check --graph q8_0 --oracle cpu", options[0]) == 0
    assert "oracle: native code, whose bits drawn" in capsys.readouterr().err
    (row,) = records(capsys, SWEEP, "--device cpu --out", tmp_path)  # which is never judged by itself
    assert (row["verified"], row["oracle"]) == ("bits", "numpy")
    assert refusal(capsys, CHECK, "--device cpu --oracle cpu").startswith("oracle: got cpu, which would judge itself")
    monkeypatch.setattr(native, "compiler", lambda: None)
    with ExitStack() as stack:
        assert open_oracle(stack, None, [device]) is None
    assert "oracle: NumPy (cpu: there is no C++ compiler" in capsys.readouterr().err
    assert "there is no C++ compiler" in refusal(capsys, CHECK, options[0], "--oracle cpu")
