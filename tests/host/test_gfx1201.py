"""gfx1201's machine code, executed: the oracle's bits, AMD's pseudo-code, and what the interpreter refuses."""

import ctypes
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
from broken_shaders import break_kernels
from little_kernels import HEAD, compiled, declared, spirv
from support import needs_radv

from zinc_attn.errors import KernelError, UnsupportedError, WrongResultError
from zinc_attn.kernels import declarations as kernels
from zinc_attn.runtime.device import Device, load_spirv
from zinc_attn.runtime.primitives import answers, check_primitives
from zinc_attn.tools.check import Case, check
from zinc_attn.tools.harness.split_spec import VARIED_LAYOUTS, parse_split_specs

if shutil.which("cc") is None:
    pytest.skip("cc is not installed", allow_module_level=True)
pytest.importorskip("tinygrad", reason="tinygrad 0.14, which has AMD's tables, wants Python 3.11 or later")
from gfx1201 import CASES, decode, judge, runtime

JUDGED = [name for name, operation in decode.OPERATIONS.items() if operation.kind not in "NMW"]
SAME = (  # one function, of other operands
    *({"v_fmac_f32", "v_fmaak_f32"}, {"s_mul_i32", "s_mulk_i32"}),
    {"s_cbranch_scc0", "s_cbranch_vccz", "s_cbranch_execz"},
    {"s_cbranch_scc1", "s_cbranch_vccnz", "s_cbranch_execnz"},
)


@pytest.fixture(scope="module")
def device():
    needs_radv()
    with Device(runtime.Gfx1201()) as opened:
        yield opened


@pytest.mark.parametrize("name", JUDGED)
def test_an_operation_is_that_of_amds_pseudo_code(name):
    """Alone of all that have its types."""
    rng = np.random.default_rng(JUDGED.index(name))
    for mode in [runtime.MODE] * 8 + [runtime.KEEPING] * 3:
        assert judge.disagreement(name, rng, mode) == ""
    for other, (_, *types) in decode.OPERATIONS.items():
        if types == [*decode.OPERATIONS[name][1:]] and not any({name, other} <= same for same in ({name}, *SAME)):
            assert any(judge.disagreement(name, rng, executed=other) for _ in range(500)), other


def test_the_oracles_bits(device):
    """With another order of waves and workgroups, and another poison, for each case; every kernel is reached."""
    here = device.runtime
    for i, text in enumerate(CASES):
        here.seed, here.poison = i + 1, (runtime.POISON, 0, 0xFFFFFFFF)[i % 3]
        (outcome,) = check([device], [Case.parse(text)], parse_split_specs(VARIED_LAYOUTS))
        assert (outcome.status, outcome.faults) == ("pass", []), text
    assert here.loads_outside == 0
    ran = {program.decl.name for program in here.programs.values()}
    others = (kernels.APPEND_KERNEL, kernels.COPY_KERNEL, kernels.ENCODE, kernels.PRIMITIVES, kernels.MULTIPLY_ADD)
    assert ran >= {decl.name for decl in (*others, kernels.ATTEND, kernels.MERGE)}


def executed(records, wave):
    """Run the decoded operations on a wave."""
    run = runtime.Run(code=records.ctypes.data, count=len(records), mode=runtime.MODE)
    decode.INTERPRETER.single(ctypes.byref(run), wave.ctypes.data_as(ctypes.c_void_p))
    assert run.fault == b""


def test_a_pair_reads_before_it_writes():
    """v1 and v2 change places."""
    pair, wave = np.zeros(2, decode.RECORD), np.zeros(1, judge.WAVE)
    pair["op"], pair["dual"], pair["dst"] = decode.OPERATIONS["v_mov_b32"].number, (1, 0), (1, 2)
    pair["src"][:, 0] = decode.VECTOR + pair["dst"][::-1]
    wave["v"], wave["s"] = np.arange(256)[:, None], 0xFFFFFFFF
    executed(pair, wave)
    assert wave["v"][0, :4, 31].tolist() == [0, 2, 1, 3] and wave["pc"] == 2


@pytest.mark.parametrize("third", (0x108, 0x80))
def test_a_product_of_matrices(third, rng):
    """v[8:15] = v[0:1] v[2:3] + v[8:15], or + 0: a lane has eight bytes of a row, of a column, and a column of sums."""
    words = np.array([0xCC444008, 0x78000000 | third << 18 | 0x102 << 9 | 0x100], np.uint32)
    record, wave = decode.decode(words.tobytes(), 16), np.zeros(1, judge.WAVE)
    wave["v"], wave["s"] = rng.integers(0, 1 << 32, wave["v"].shape, np.uint32), 0xFFFFFFFF
    old = wave["v"][0, :16].copy()
    a, b = (old[n : n + 2].reshape(2, 2, 16).transpose(2, 1, 0).copy().view(np.int8).reshape(16, 16) for n in (0, 2))
    sums = old[8:].reshape(8, 2, 16).transpose(1, 0, 2).reshape(16, 16).astype(np.int32) * (third == 0x108)
    executed(record, wave)
    got = wave["v"][0, 8:16].reshape(8, 2, 16).transpose(1, 0, 2).reshape(16, 16)
    assert (got.view(np.int32) == sums + a.astype(np.int32) @ b.T.astype(np.int32)).all()


@pytest.mark.parametrize(("mode", "refused"), [(runtime.KEEPING, ""), (0x00, "the float32 of a float16")])
def test_primitives_in_another_float_mode(mode, refused, device, monkeypatch):
    """A card that keeps float32's denormals has the same bits; one that flushes float16's is refused."""
    monkeypatch.setattr(device.runtime, "mode", mode)
    with pytest.raises(WrongResultError, match=refused) if refused else nullcontext():
        check_primitives(device.runtime, load_spirv(kernels.PRIMITIVES))


def test_a_missing_barrier_is_a_race(tmp_path, monkeypatch, device):
    change = "attend/node.glsl", "barrier();\n        for (uint i = 0u", "for (uint i = 0u"
    break_kernels(monkeypatch, tmp_path, change)
    with pytest.raises(KernelError, match=r"a race: byte .* of shared memory is (read|written) by wave"):
        list(check([Device(device.runtime)], [Case.parse("9/3/64 f16 600")], []))


def test_spilled_registers_and_unknown_modifiers_are_refused(device):
    kernel = device.runtime.kernel(declared("double"), spirv("double"), [0])
    with pytest.raises(KernelError, match="got wave32, 3 spilled, expected wave32 without spills"):
        runtime.Program(kernel.decl, spirv("double"), [0], kernel.compiled | {"spilled_vgprs": 3})
    with pytest.raises(UnsupportedError, match="lanes that leave their four"):  # quad_perm without the bit fi
        decode.decode(np.array([0x7E0402FA, 0xFF08B101], np.uint32).tobytes(), 3)


REFUSED = {  # statements of a little kernel
    "b[0] = i": (KernelError, r"a race: byte 0 of a buffer is written by wave 0 and written by another workgroup"),
    "b[i] = a[i ^ 32]; a[i] = 0": (KernelError, r"binding 0, .* and a kernel that declares to write it"),
    "b[i + 4000] = 1": (KernelError, r"an access to byte 16384 of binding 1, expected a word of its 16384 bytes"),
    "b[i] = floatBitsToUint(sin(a[i]))": (UnsupportedError, r"an operation v_sin_f32 that operations.def has not"),
}


@pytest.mark.parametrize("statement", REFUSED)
def test_refusals(statement, device):
    source = f"{HEAD}void main() {{ uint i = gl_GlobalInvocationID.x; {statement}; }}"
    error, text = REFUSED[statement]
    with pytest.raises(error, match=f"gfx1201: .*{text}"):
        kernel = device.runtime.kernel(declared(statement), compiled(source), [0])
        answers(device.runtime, kernel, np.zeros(4096, np.uint32), 4096, 128)
