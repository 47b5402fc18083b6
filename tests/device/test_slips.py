"""Slips, changes of one token or of as few as make one, are caught by the tests that the tables of tests/slips/ name.

Under a file a table has lines ``WHAT BREAKS: TEXT → REPLACEMENT @ TEST``; the file has TEXT once. TEST is a case of
``check --quick``, a kind of ``check --graph``, a test of tests/device/ with its parameters, ``bias.of_one_call()`` for
test_bias.py's, or, of native/, a name of ``NATIVE_TESTS``. cpu.txt is of the processor, whose source with the slip
is compiled for any processor of the kind. No change makes an access out of bounds or a loop that
does not end, so no driver can crash or hang. The default run tries a few slips of each kind, ``--full`` all. Generated
sizes and rules are in no table: tests compare them with the package's numbers.
"""

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from broken_cpu import break_library
from broken_shaders import break_kernels
from c_cases import CASES
from c_host import COMPILER, ROOT
from support import FULL, needs_matrix_units, open_device

import zinc_attn as za
from zinc_attn.errors import WrongResultError
from zinc_attn.graph.params import modules
from zinc_attn.kernels.declarations import MODULES
from zinc_attn.runtime.cpu.library import no_compiler
from zinc_attn.tools import check
from zinc_attn.tools.check import Case
from zinc_attn.tools.check.record import committed_digests
from zinc_attn.tools.harness.bits import Output
from zinc_attn.tools.harness.split_spec import parse_split_specs

FIXTURES = "any_device", "device", "cpu", "rng", "monkeypatch", "tmp_path"


class Slip(NamedTuple):
    """file: its path from the root."""

    room: str
    file: Path
    breaks: str
    old: str
    new: str
    test: str

    def __str__(self) -> str:
        return self.breaks


def slips(room: str) -> list[Slip]:
    """The table of a room. Files of native/ are named by their paths in it."""
    table_slips, file = [], ""
    table = (ROOT / "tests" / "slips" / f"{room}.txt").read_text(encoding="utf-8")
    for line in table.replace("→\n    ", "→ ").splitlines():
        breaks, is_slip, rest = line.partition(": ")
        change, _, test = rest.rpartition(" @ ")
        if is_slip:
            table_slips.append(Slip(room, file, breaks, *change.split(" → "), test))
        else:
            file = Path("native" if room == "native" else "", line)
    return table_slips


# --- what catches a slip: a function that raises AssertionError -----------------------------------------------


def caught_by(slip):
    """The function, of fixtures by their names."""
    if is_a_case(slip):
        return quick(slip.test)
    text = re.sub(r"^check (\w+)$", r'check_graph.the_oracles_bits("\1")', slip.test)
    file, name, given = re.fullmatch(r"(\w+)\.(\w+)\((.*)\)", text).groups()
    folder = "graph_" if slip.room == "graph" and file != "check_graph" else ""
    tests = importlib.import_module(f"device.test_{folder}{file}")
    test, values = getattr(tests, f"test_{name}"), eval(f"[{given}]", vars(tests))
    names = inspect.signature(test).parameters
    arguments = dict(zip([name for name in names if name not in FIXTURES], values, strict=True))
    return lambda **fixtures: test(**arguments, **{one: fixtures[one] for one in FIXTURES if one in names})


def quick(test):
    """``check`` of a case reports the properties before " of ", or 10, and 11 only where it is named.

    Of properties 2 and 10 the output alone is compared with the record, which compiles few pipelines.
    """
    numbers, _, text = test.rpartition(" of ")
    named, case = {int(number) for number in numbers.split("+") if number} or {10}, Case.parse(text)

    def check_case(device, **_):
        if case.rows == 1 and device.info.kind != "cpu":
            pytest.skip("the quick cases have one round of states on a GPU; the default cases have several")
        if case.rows == 1 and named <= {2, 10}:
            assert digest(device, case, 1 if 2 in named else None) == committed_digests()[str(case)]
            return
        (outcome,) = check.check([device], [case], parse_split_specs("auto" if case.rows == 1 else "1,auto,size:512"))
        assert {fault.property for fault in outcome.faults} & {*named, 11} != named

    return check_case


def digest(device, case, splits):
    """Of the case's output in splits, or by the split rule."""
    data, tokens = case.data(), case.context
    call = {**case.masking(1, tokens), "return_lse": True, "allow_empty": True}
    with za.KVCache(device, case.shape, 1, -(-tokens // 256) * 256, case.dtype, 256) as cache:
        sequence = cache.new_sequence()
        cache.append(sequence, 0, *data.rows(0, tokens))
        attention = za.Attention(cache, num_splits=splits, arithmetic=case.arithmetic, **case.options())
        return Output(*attention(data.q[-1], sequence, 0, **call)).digest()


NATIVE_TESTS = {  # the begin of a node id, or all of it
    **{name: f"device/test_c_engine.py::test_a_case_has_the_oracle_s_bits[default-vulkan-{name}]" for name in CASES},
    "refused calls": "device/test_c_library.py::test_what_a_call_refuses",
    "largest key": "device/test_c_library.py::test_too_large_a_key",
    "scales": "device/test_c_library.py::test_scales_of_heads",
    "copies": "device/test_c_library.py::test_a_copied_page",
    "recordings": "device/test_c_engine.py::test_recordings_and_steps",
    "rows of hosts": "device/test_c_engine.py::test_rows_that_are_no_good",
    "losses": "device/test_c_engine.py::test_a_device_that_may_be_lost",
    "failures": "device/test_c_engine.py::test_every_call_of_vulkan_fails",
    "closing": "device/test_c_engine.py::test_an_object_in_use",
    "together": "device/test_c_library.py::test_rows_of_a_prompt",
    "units": "device/test_c_library.py::test_many_rows_by_matrix_units",
    "planned": "device/test_c_library.py::test_items_are_the_planner_s",
    "refused options": "device/test_c_library.py::test_what_opening_refuses",
    "workgroups": "host/test_c_host.py::test_workgroups_serve",
    "a run": "device/test_embed_c.py::test_the_digest_is_the_oracle_s",
    "waves": "device/test_c_library.py::test_subgroups_of_a_layout",
    "compiled": "device/test_pipeline_cache.py::test_",
    "levels": "host/test_c_host.py::test_levels_are_python_s",
    "codec": "host/test_c_host.py::test_rows_have_the_bits",
    "encoded": "host/test_c_host.py::test_encoded_rows_have_the_bits",
    "write order": "host/test_ggml_cells.py::test_",
    "ggml": "device/test_ggml.py::test_",
    "lists": "device/test_ggml.py::test_bits_are_the_oracle_s",
    "integer bits": "device/test_ggml.py::test_bits_are_the_oracle_s[vulkan-integer]",
    "refused types": "device/test_ggml.py::test_what_an_arithmetic_does_not_take_is_refused[vulkan]",
    "experts": "device/test_ggml.py::test_experts",
    "graphs": "device/test_ggml.py::test_a_graph_has",
    "fused": "device/test_ggml.py::test_a_fusion_saves",
    "places": "device/test_ggml.py::test_a_line_says",
    "own buffers": "device/test_ggml.py::test_ggml_s_own_buffers",
    "shared weights": "device/test_ggml.py::test_weights_that_another",
}
SLIPS = [slip for room in ("attend", "graph", "native", "cpu") for slip in slips(room)]
DEFAULT = {
    *("a wave's maximum", "the cut-off by one", "the head of a slope", "sums of a chunk that are not fused"),
    *("maximum of the row before", "the fold of leaves", "high integers of q", "a key that a mask hides"),
    *("small phases", "the last NaN", "equal rows that are saved again", "rounding of q4_0"),
}


def is_a_case(slip):
    """Whether a quick case catches the slip."""
    return slip.test[0].isdigit()


def needs_units(slip):
    return slip.file.name.startswith(("matrix_", "units_"))


def test_the_tables_are_of_the_files_and_the_tests():
    for slip in SLIPS:
        assert (ROOT / slip.file).read_text(encoding="utf-8").count(slip.old) == 1, slip
        if is_a_case(slip):
            case = Case.parse(slip.test.rpartition(" of ")[2])
            assert case in Case.quick(case.arithmetic), slip
        assert slip.test in NATIVE_TESTS if slip.room == "native" else caught_by(slip), slip
    names = {slip.breaks for slip in SLIPS}
    assert len(names) == len(SLIPS) >= 280 and names >= DEFAULT


def put_in(slip, monkeypatch, folder):
    """Make the slip, for devices that are opened afterwards, or in the oracle."""
    if slip.file.suffix != ".py":
        changed = slip.file.relative_to("shaders")
        # the kernel of matrix units has no fma_emulated(), and a device is asked for products and sums first
        only = "attend" if changed.name in ("score_mod.glsl", "multiply_add.glsl") else ""
        change = str(changed), slip.old, slip.new
        break_kernels(monkeypatch, folder, change, only, modules() if slip.room == "graph" else MODULES)
        return
    module = importlib.import_module(".".join(slip.file.with_suffix("").parts))
    names = dict(vars(module))
    exec(compile(Path(module.__file__).read_text().replace(slip.old, slip.new), str(slip.file), "exec"), names)
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__:
            monkeypatch.setattr(inspect.unwrap(function), "__code__", inspect.unwrap(names[name]).__code__)


def fails_in_a_copy(slip, folder):
    """The test fails or crashes with the slip in a copy of native/, and no compiler refuses it."""
    shutil.copytree(ROOT / "native", folder / "native")
    file = folder / slip.file
    file.write_text(file.read_text().replace(slip.old, slip.new))
    test = f"tests/{NATIVE_TESTS[slip.test]}"
    path, _, name = test.partition("::")
    chosen = [test] if "[" in name else [path, "-k", name]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *chosen]
    env = {**os.environ, "ZINC_ATTN_NATIVE": str(folder / "native"), "ZINC_ATTN_TEST_FULL": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)
    assert done.returncode == 1 or done.returncode < 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert not re.search(r":\d+:\d+: error: ", done.stdout), done.stdout[-2000:]


def fails_on_the_processor(slip, rng, monkeypatch, folder):
    """The test fails where one source of native/cpu is compiled with the slip, or the library is refused."""
    if no_compiler() is not None:
        pytest.skip(str(no_compiler()))
    broken = "attend" if is_a_case(slip) or slip.test.startswith("storage") else "products"
    broken = "kernels" if slip.file.name in ("glsl.h", "cpp.py") or slip.file.name == "runtime.cpp" else broken
    break_library(monkeypatch, folder, slip.file, slip.old, slip.new, broken)
    with pytest.raises((AssertionError, WrongResultError)), za.Device.open("cpu") as device:
        fixtures = {**dict.fromkeys(("any_device", "device", "cpu"), device), "rng": rng, "tmp_path": folder}
        caught_by(slip)(monkeypatch=monkeypatch, **fixtures)


@pytest.mark.parametrize("slip", [slip for slip in SLIPS if FULL or slip.breaks in DEFAULT], ids=str)
def test_a_slip_is_caught(slip, rng, monkeypatch, tmp_path):
    if slip.room == "cpu":
        return fails_on_the_processor(slip, rng, monkeypatch, tmp_path)
    if slip.room == "native":
        if COMPILER is None:
            pytest.skip("there is no C compiler (package gcc)")
        if slip.test == "units":
            with open_device("default", "vulkan") as device:
                needs_matrix_units(device)
        return fails_in_a_copy(slip, tmp_path)
    put_in(slip, monkeypatch, tmp_path)
    if needs_units(slip):
        monkeypatch.setenv("ZINC_ATTN_UNITS", "1")
    with open_device("default", "vulkan") as device, pytest.raises(AssertionError):
        if needs_units(slip):
            needs_matrix_units(device)
        caught_by(slip)(any_device=device, device=device, rng=rng, monkeypatch=monkeypatch)
