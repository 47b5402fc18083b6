"""Slips, changes of one token or of as few as make one, are caught by the tests that the tables of tests/slips/ name.

Under a file a table has lines ``WHAT BREAKS: TEXT → REPLACEMENT @ TEST``; the file has TEXT once. TEST is a name of
``TESTS`` or of ``NATIVE_TESTS``, or a case of ``check --quick``. No change makes an access out of bounds or a loop that
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

import numpy as np
import pytest
from broken_shaders import break_kernels
from c_cases import CASES
from c_host import COMPILER, ROOT
from device import test_graph_elementwise as elementwise
from device import test_graph_experts as experts
from device import test_graph_fit as fit
from device import test_graph_moves as moves
from device import test_graph_order as order
from device import test_graph_products as products
from device import test_graph_recurrent as recurrent
from device import test_graph_rope as rope
from device import test_graph_routing as routing
from device import test_graph_rows as rows
from device import test_grid as grid
from support import FULL, needs_matrix_units, open_device

import zinc_attn as za
from zinc_attn.graph.params import modules
from zinc_attn.kernels.declarations import MODULES
from zinc_attn.tools import check
from zinc_attn.tools.check import Case
from zinc_attn.tools.check.record import committed_digests
from zinc_attn.tools.graph.check import check_graph
from zinc_attn.tools.harness.bits import Output
from zinc_attn.tools.harness.split_spec import parse_split_specs


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
    found, file = [], ""
    table = (ROOT / "tests" / "slips" / f"{room}.txt").read_text(encoding="utf-8")
    for line in table.replace("→\n    ", "→ ").splitlines():
        breaks, is_slip, rest = line.partition(": ")
        change, _, test = rest.rpartition(" @ ")
        if is_slip:
            found.append(Slip(room, file, breaks, *change.split(" → "), test))
        else:
            file = Path("native" if room == "native" else "", line)
    return found


# --- what catches a slip: each raises AssertionError ---------------------------------------------------------


def called(test, *given):
    """A test of another file with these parameters."""

    def call(device, rng):
        fixtures, rest = {"any_device": device, "device": device, "rng": rng}, iter(given)
        names = inspect.signature(test).parameters
        test(*(fixtures[name] if name in fixtures else next(rest) for name in names))

    return call


def checked(kind):
    """``check --graph`` of a type of weights."""

    def check_kind(device, rng):
        (outcome,) = check_graph(device, [kind])
        assert outcome.fault == ""

    return check_kind


def quick(test):
    """``check`` of a case reports the properties before " of ", or 10, and 11 only where it is named.

    Of properties 2 and 10 the output alone is compared with the record, which compiles few pipelines.
    """
    numbers, _, text = test.rpartition(" of ")
    named, case = {int(number) for number in numbers.split("+") if number} or {10}, Case.parse(text)

    def check_case(device, rng):
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


CHECKED = "q8_0", "q4_0", "q5_1", "q2_K", "q4_K", "q6_K", "bf16", "gdn", "mamba2"
MULTIPLIED = "mxfp4", "q4_0", "iq4_xs", "q2_K", "q3_K", "q6_K"
MASKED = Case.parse("2/1/40 f32 17 rows=3 mask=f16+noncausal")
TESTS = {
    **{f"check {kind}": checked(kind) for kind in CHECKED},
    **{f"products {kind}": called(products.test_types, kind) for kind in MULTIPLIED},
    "mask slopes": called(grid.test_the_oracles_bits, MASKED),
    "merges": called(grid.test_what_merges_flush),
    "shapes": called(products.test_shapes, "q4_0"),
    "experts": called(experts.test_types, "q4_0"),
    "pieces of experts": called(experts.test_shapes, "f16", *experts.CASES[2]),
    "lists": called(experts.test_lists, *experts.LISTS[1]),
    "floats": called(products.test_floats, "f32", "f32", 33, 5, 643, (0, 1, 2, 3)),
    **{op: called(elementwise.test_unary, op, ("f32", "f32")) for op in ("exp", "sqrt", "gelu")},
    "bf16": called(elementwise.test_unary, "gelu", ("bf16", "bf16")),
    "div": called(elementwise.test_binary, *elementwise.REPEATED[3]),
    "oai": called(elementwise.test_glu, "swiglu_oai", "f32"),
    "swiglu": called(elementwise.test_glu, "swiglu", "f32"),
    "norm": called(rows.test_norm, "norm", 70, ("mul", "add")),
    "zeros": called(rows.test_norm_of_zeros_and_of_a_transposed_tensor, 0.0),
    "joined rows": called(rows.test_norm_as_int8, 128, 2),
    "sums of experts": called(routing.test_sum_experts, 2, 300, 288, 1),
    "soft_max": called(rows.test_soft_max, *rows.MASKED[1]),
    "alibi": called(rows.test_soft_max, *rows.MASKED[2]),
    "rope": called(rope.test_rope, *rope.CASES[0], np.float32),
    "argsort": called(order.test_argsort, (2, 3, 700, 2), True),
    "pads": called(moves.test_what_repeats_and_what_is_padded, "f16", ("odd", "odd")),
    "rows of q3_K": called(moves.test_rows_of_weights, "q3_K"),
    "fit": called(fit.test_fit, 40, 48),
    "conv": called(recurrent.test_ssm_conv, *recurrent.CONVOLUTIONS[1]),
    "normed conv": called(recurrent.test_ssm_conv, *recurrent.CONVOLUTIONS[4]),
    "deltas": called(recurrent.test_delta_net, *recurrent.DELTA_NETS[1]),
    "odd deltas": called(recurrent.test_delta_net, *recurrent.DELTA_NETS[3]),
    "scan": called(recurrent.test_ssm_scan, *recurrent.SCANS[1]),
    "scan by element": called(recurrent.test_ssm_scan, *recurrent.SCANS[0]),
}
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
    "planned": "device/test_c_library.py::test_items_are_the_planner_s",
    "refused options": "device/test_c_library.py::test_what_opening_refuses",
    "workgroups": "host/test_c_host.py::test_workgroups_serve",
    "a run": "device/test_embed_c.py::test_the_digest_is_the_oracle_s",
    "waves": "device/test_embed_c.py::test_subgroups_of_32",
    "codec": "host/test_c_host.py::test_rows_have_the_bits",
    "encoded": "host/test_c_host.py::test_encoded_rows_have_the_bits",
    "lists": "host/test_ggml_lists.py::test_",
    "ggml": "device/test_ggml.py::test_",
    "experts": "device/test_ggml.py::test_experts",
    "graphs": "device/test_ggml.py::test_a_graph_has",
    "places": "device/test_ggml.py::test_a_line_says",
}
SLIPS = [slip for room in ("attend", "graph", "native") for slip in slips(room)]
DEFAULT = {
    *("a wave's maximum", "the cut-off by one", "a copied page's V", "a fifth bit's place", "the head of a slope"),
    *("sums of a chunk that are not fused", "maximum of the row before", "the fold of leaves", "high integers of q"),
    *("small phases", "the last NaN", "the smallest cache", "an overlap that goes on", "rounding of q4_0"),
}


def is_a_case(slip):
    """Whether a quick case catches the slip."""
    return slip.room == "attend" and slip.test not in TESTS


def needs_units(slip):
    return slip.file.name.startswith(("matrix_", "units_"))


def test_the_tables_are_of_the_files_and_the_tests():
    for slip in SLIPS:
        assert (ROOT / slip.file).read_text(encoding="utf-8").count(slip.old) == 1, slip
        if is_a_case(slip):
            case = Case.parse(slip.test.rpartition(" of ")[2])
            assert case in Case.quick(case.arithmetic), slip
    assert {slip.test for slip in SLIPS if slip.room != "native" and not is_a_case(slip)} == set(TESTS)
    assert {slip.test for slip in SLIPS if slip.room == "native"} <= set(NATIVE_TESTS)
    names = {slip.breaks for slip in SLIPS}
    assert len(names) == len(SLIPS) >= 240 and names >= DEFAULT


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


def chosen():
    """Slips of this run. With ``--full`` what a canonical case catches is tried in arithmetic "fused", too."""
    for slip in SLIPS:
        if FULL or slip.breaks in DEFAULT:
            yield slip
        if FULL and is_a_case(slip) and Case.parse(slip.test.rpartition(" of ")[2]).arithmetic == "canonical":
            yield slip._replace(breaks=f"{slip.breaks}, fused", test=f"{slip.test} fused")


@pytest.mark.parametrize("slip", list(chosen()), ids=str)
def test_a_slip_is_caught(slip, rng, monkeypatch, tmp_path):
    if slip.room == "native":
        if COMPILER is None:
            pytest.skip("there is no C compiler (package gcc)")
        return fails_in_a_copy(slip, tmp_path)
    test = quick(slip.test) if is_a_case(slip) else TESTS[slip.test]
    put_in(slip, monkeypatch, tmp_path)
    if needs_units(slip):
        monkeypatch.setenv("ZINC_ATTN_UNITS", "1")
    with open_device("default", "vulkan") as device, pytest.raises(AssertionError):
        if needs_units(slip):
            needs_matrix_units(device)
        test(device, rng)
