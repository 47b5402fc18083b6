"""``check --arithmetic matrix`` on a device with matrix units: it passes, and reports every slip of the kernel.

A slip may stay within the bound of the error: then only the bits of a variation show it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from broken_shaders import SHADERS, Change, break_kernels
from support import FULL

import zinc_attn as za
from zinc_attn.kernels.declarations import MATRIX
from zinc_attn.runtime import device as device_module
from zinc_attn.tools import check
from zinc_attn.tools.check import Case
from zinc_attn.tools.check.cases import MATRIX_QUICK
from zinc_attn.tools.harness.split_spec import parse_split_specs

WINDOW, BF16 = "32/8/128 f16 300 rows=17 window=100+sinks", "9/3/64 bf16 700 rows=23 rising window=600"
COARSE, CANCELLING = "9/3/64 f16 1290 rows=40 coarse", "9/3/64 q8_0 577 rows=16 cancelling"


class Mutant(NamedTuple):
    """What breaks, where, a text of the file and its replacement, the case that reports it, and the property.

    bounded: whether the error stays within its bound.
    """

    breaks: str
    file: str
    old: str
    new: str
    case: str
    prop: int
    bounded: bool

    def __str__(self) -> str:
        return self.breaks


MUTANTS = (
    Mutant("maximum of the row before", "scores", "at = t * W", "at = (t < 4u ? t : t - 4u) * W", WINDOW, 5, False),
    Mutant("the fold of leaves", "values", "old * unit_w +", "old * 1.000001 * unit_w +", COARSE, 2, True),
    Mutant("a row's last key", "tiles", "(item.last_row - row) * item.row_step", "0u", WINDOW, 5, False),
    Mutant("a conversion of K", "tiles", "halves(high.zw));", "halves(high.zw * 1.001));", COARSE, 7, True),
    Mutant("a key behind the last", "scores", "before = lessThan(", "before = lessThanEqual(", BF16, 11, False),
)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A compiler that knows the kernel's extension."""
    if shutil.which("glslangValidator") is None:
        pytest.skip("glslangValidator is not installed")
    out = tmp_path_factory.mktemp("spirv") / MATRIX.file
    command = ["glslangValidator", "-V", "--target-env", "vulkan1.1", f"-I{SHADERS}", "-o", str(out)]
    done = subprocess.run([*command, str(SHADERS / MATRIX.source)], capture_output=True, text=True)
    if f"extension not supported: {MATRIX.extension}" in done.stdout:
        pytest.skip(f"this glslangValidator does not know {MATRIX.extension}")


def outcome_of(device: za.Device, text: str) -> check.Outcome:
    with za.Device.open(device.info.index, runtime="vulkan") as another:  # which loads the kernels anew
        (outcome,) = check.check([another], [Case.parse(text, "matrix")], parse_split_specs("1,auto,size:512"))
    return outcome


def test_the_table_is_of_the_shaders_and_the_quick_cases() -> None:
    for one in MUTANTS:
        assert (SHADERS / f"matrix_{one.file}.glsl").read_text().count(one.old) == 1, one.breaks
        assert one.case in MATRIX_QUICK


@pytest.mark.parametrize("text", [COARSE, CANCELLING])
def test_every_property_holds(matrix_device: za.Device, text: str) -> None:
    """Numbers of q8_0 with scales of all kinds are in no other type, so that case has nothing to compare for 7."""
    outcome = outcome_of(matrix_device, text)
    assert outcome.status == "pass", [outcome.line(fault) for fault in outcome.faults]
    assert set(outcome.shown) == {*range(1, 10), 11} - ({7} if text == CANCELLING else set())
    assert outcome.verified.startswith("bound (")


@pytest.mark.parametrize("mutant", MUTANTS if FULL else MUTANTS[:2], ids=str)
def test_a_mutant_is_caught(
    matrix_device: za.Device, compiler: None, mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changes = [Change(f"matrix_{mutant.file}.glsl", mutant.old, mutant.new)]
    monkeypatch.setattr(device_module, "SPIRV", break_kernels(changes, tmp_path))
    found = sorted({fault.property for fault in outcome_of(matrix_device, mutant.case).faults})
    assert mutant.prop in found and (11 not in found) == mutant.bounded, f"reported: {found}"
