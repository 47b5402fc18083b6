"""wave.c's operations beside AMD's pseudo-code, on the same random registers and modifiers."""

from __future__ import annotations

import ctypes
import re
from typing import Any, Final

import numpy as np

from .decode import EXEC, INTERPRETER, OPERATIONS, RECORD, VECTOR
from .pcode import TEXTS, Value, execute, float_bits
from .runtime import MODE, Run

LANES: Final = 32
RESULT, MASK, TARGET = 0, 40, 9  # the vector and the scalar register that take results, and where a jump goes
WAVE: Final = np.dtype([("v", "u4", (256, LANES)), ("s", "u4", 128), ("scc", "u4"), ("pc", "u4"), ("rest", "u4", 3)])
EDGES: Final = np.array(  # integers, ones and ties, infinities and NaN, denormals, pairs of float16, bytes to permute
    [*(0, 1, 2, 31, 32, 63, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x3F800000, 0xBF800000, 0x3F000000, 0xBF000000),
     *(0x3FC00000, 0x40200000, 0xC0200000, 0x4B000001, 0x4AFFFFFF, 0x4F000000, 0xCF000000, 0x4F800000, 0x7F7FFFFF),
     *(0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 1, 0x807FFFFF, 0x00800000, 0x80800000, 0x00FFFFFF, 0x33800000),
     *(0x00010001, 0x83FF03FF, 0x04000400, 0x7C00FC00, 0x7E007C01, 0x3C003E00, 0x08090A0B, 0x0C0DFF07)],
    np.uint32,
)  # fmt: skip
_IMMEDIATE: Final = re.compile(r"s_\w+k_(co_)?i32")  # with the old result and a literal


def _numbers(rng: np.random.Generator, *shape: int) -> Any:
    """Edges, random words, and floats near one."""
    words = rng.integers(0, 1 << 32, shape, np.uint32)
    near = (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 9, shape))).astype(np.float32).view(np.uint32)
    return np.choose(rng.integers(0, 3, shape), (EDGES[rng.integers(0, len(EDGES), shape)], words, near))


def _draw(name: str, rng: np.random.Generator) -> tuple[Any, Any]:
    """A record of an operation, with modifiers that its types have, and a wave."""
    _, kind, types = OPERATIONS[name]
    record, wave = np.zeros(1, RECORD), np.zeros(1, WAVE)
    r, w = record[0], wave[0]
    r["dst"], r["sdst"], r["offset"] = RESULT, MASK, (TARGET, -1)
    r["src"] = [VECTOR + k if kind == "V" and t != "b" else 10 + 2 * k for k, t in enumerate(types[1:], 1)]
    for field, having in (("neg", "fghx"), ("abs", "fghx"), ("half", "hwx"), ("mixed", "x")):
        r[field] = sum(int(kind == "V" and t in having and rng.integers(2)) << k for k, t in enumerate(types[1:]))
    r["half"] &= r["mixed"] if "x" in types else 7
    r["omod"] = rng.integers(4) * (kind == "V" and types[0] == "f")
    w["v"], w["s"], w["scc"] = _numbers(rng, 256, LANES), _numbers(rng, 128), rng.integers(2)
    w["s"][EXEC] = rng.choice([0xFFFFFFFF, rng.integers(1 << 32), 1 << rng.integers(32)])
    if not rng.integers(4):  # equal operands
        w["v"][2], w["s"][14] = w["v"][1], w["s"][12]
    if kind == "E":
        r["src"][1] = EXEC
    if kind == "B":
        w["s"][12] *= rng.integers(2, dtype=np.uint32)
    if _IMMEDIATE.fullmatch(name):
        w["s"][14] = w["s"][14].astype(np.int16).astype(np.int32)
    return record, wave


def _operand(r: Any, w: Any, k: int, type_: str, lane: int) -> Value:
    """Operand ``k`` of a lane, with its modifiers."""
    n = int(r["src"][k])
    if type_ == "b":
        return Value(int(w["s"][n]) >> lane & 1, 1)
    x = int(w["v"][n - VECTOR][lane]) if n >= VECTOR else int(w["s"][n]) | int(w["s"][n + (n < EXEC)]) << 32
    sixteen = type_ in "hw" or (type_ == "x" and r["mixed"] >> k & 1)
    shift = 16 if sixteen and r["half"] >> k & 1 else 0
    sign = 1 << (15 if sixteen else 31) + shift
    x = x & ~sign if r["abs"] >> k & 1 else x
    x = x ^ sign if r["neg"] >> k & 1 else x
    return Value(x if type_ == "x" else x >> shift, 64)  # the text of a mix chooses the half itself


def _after(name: str, r: Any, w: Any, lane: int) -> dict[str, Any]:
    """The pseudo-code's names after it, for a lane, or for a wave's scalars."""
    types, s = OPERATIONS[name].types, w["s"]
    a, b, c = (_operand(r, w, k, t, lane) if t != "o" else Value(0, 64) for k, t in enumerate(types[1:]))
    names = {"S0": a, "S1": b, "S2": c, "D0": Value(0, 64), "SIMM32": c, "laneId": Value(lane)}
    names |= {"EXEC_LO": Value(s[EXEC]), "EXEC": Value(s[EXEC], 64), "VCC": Value(c.bits << lane, 64)}
    names |= {"NEG": Value(3)} if name == "v_dot4_i32_iu8" else {}
    names |= {"OPSEL": Value(r["half"]), "OPSEL_HI": Value(r["mixed"]), "PC": Value(0, 64, "i"), "SIMM16": Value(7)}
    names |= {"SCC": Value(w["scc"], 1), "SRC0": Value(0), "VGPR": [[Value(x)] for x in w["v"][1]]}
    if name in ("v_fmac_f32", "v_swap_b32"):
        names["D0"] = c if types[3] == "f" else Value(w["v"][RESULT][lane], 64)
    if _IMMEDIATE.fullmatch(name):
        names |= {"D0": a, "S0": b}
    if name.startswith("s_cbranch"):
        names |= {"SCC": Value(bool(a.u32)), "EXECZ": Value(not a.u32), "VCCZ": Value(not a.u32)}
    return execute(TEXTS[name], names)


def _judge(name: str, r: Any, old: Any, new: Any) -> None:
    """The wave ``new``, a copy of ``old``, after the operation by its pseudo-code."""
    _, kind, types = OPERATIONS[name]
    mask, new["pc"] = 0, 1
    if kind == "V" and types[0] != "s":
        for lane in (lane for lane in range(LANES) if int(old["s"][EXEC]) >> lane & 1):
            results = _after(name, r, old, lane)
            bits = results["D0"].bits
            mask |= ((results["VCC"].bits if types[0] == "c" else bits) >> lane & 1) << lane
            if types[0] != "m":
                y = Value(bits, 32, "f").number() * (1, 2, 4, 0.5)[r["omod"]] if r["omod"] else 0
                new["v"][RESULT][lane] = float_bits(y, 32) if r["omod"] else bits & 0xFFFFFFFF
            if name == "v_swap_b32":
                new["v"][1][lane] = results["S0"].bits & 0xFFFFFFFF
        new["s"][MASK] = mask if types[0] in "mc" else new["s"][MASK]
        return
    results = _after(name, r, old, 0)
    if kind == "B":
        new["pc"] = 1 if int(results["PC"]) == 4 else TARGET
        return
    new["scc"], new["s"][EXEC] = bool(results["SCC"]), results["EXEC"].bits
    for k in range({"o": 0, "q": 2}.get(types[0], 1)):
        new["s"][MASK + k] = results["D0"].bits >> 32 * k & 0xFFFFFFFF


def disagreement(name: str, rng: np.random.Generator, mode: int = MODE, executed: str = "") -> str:
    """Where wave.c and the pseudo-code differ for one record; empty where they agree. executed: another operation."""
    record, wave = _draw(name, rng)
    record["op"], Value.flush = OPERATIONS[executed or name].number, not mode & 0x20
    r, old, new = record[0], wave[0].copy(), wave[0].copy()
    run = Run(code=record.ctypes.data, count=1, mode=mode)
    INTERPRETER.single(ctypes.byref(run), wave.ctypes.data_as(ctypes.c_void_p))
    _judge(name, r, old, new)
    for field in ("v", "s", "scc", "pc"):
        a, b = np.atleast_1d(wave[0][field]), np.atleast_1d(new[field])
        x, y, of_floats = a.view(np.float32), b.view(np.float32), OPERATIONS[name].types[0] == "f"
        # a NaN is as good as another, and so are the zeros that the text rounds to
        same = (np.isnan(x) & np.isnan(y)) | ((x == 0) & (y == 0) & ("rndne" in name))
        if (different := (a != b) & ~(same & of_floats)).any():
            index = tuple(np.argwhere(different)[0].tolist())
            return (
                f"{name} {r}: {field}{list(index)} is {a[index]:#x}, by AMD's text {b[index]:#x} {run.fault.decode()}"
            )
    return ""
