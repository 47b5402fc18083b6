"""The product's ``Runtime`` on gfx1201: RADV compiles, and wave.c executes what it made."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from tempfile import NamedTemporaryFile
from typing import Any, Final

import numpy as np
from support import GPU

from zinc_attn.errors import KernelError, UnsupportedError
from zinc_attn.kernels.declarations import PRIMITIVES, KernelDecl
from zinc_attn.limits import WAVE
from zinc_attn.runtime.protocol import Dispatch, Use, Words
from zinc_attn.tools.compilers.compiler import HERE, compile_programs, read_answer
from zinc_attn.tools.cost.cards import RDNA4_UNITS

from .binary import read_binary
from .decode import INTERPRETER, OPERATIONS, decode, instructions

INFO: Final = replace(GPU, index=0, name="gfx1201, RADV's code interpreted", driver="radv Mesa 25.0")
MODE: Final = 0xC0  # float mode: denormals of float16 kept and of float32 flushed, rounding to nearest even
KEEPING: Final = 0xF0  # the same with those of float32 kept
POISON: Final = 0x7FC0DEAD  # what nobody wrote: a NaN, and no index
DESCRIPTORS: Final = 0xFFFF800000010000  # where they lie; the upper half is RADV's, in the code


class Run(ctypes.Structure):
    """wave.c's Dispatch."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("code", "sgprs", "buffers", "descriptors")),
        *((name, ctypes.c_uint64) for name in ("count", "sgpr_count", "buffer_count", "descriptors_at")),
        *((name, ctypes.c_uint64) for name in ("descriptors_size", "issued", "loads_outside", "limit")),
        *((name, ctypes.c_uint32 * 3) for name in ("groups", "size")),
        *((name, ctypes.c_uint32) for name in ("lds", "mode", "poison", "seed", "fault_at")),
        ("fault", ctypes.c_char * 200),
    )


class Memory:
    """A buffer. touched: who wrote and who read each word last."""

    def __init__(self, nbytes: int, use: Use, poison: int) -> None:
        self.nbytes, self.use, self.words = nbytes, use, np.full(nbytes // 4, poison, np.uint32)
        self.touched = np.zeros((nbytes // 4, 2), np.uint64)

    def close(self) -> None: ...


class Steps(tuple[Dispatch, ...]):
    """A recording."""

    def close(self) -> None: ...


class Program:
    """A kernel. compiled: ``read_binary`` of it, and its wave. KernelError, UnsupportedError: it cannot be executed."""

    def __init__(self, decl: KernelDecl, spirv: bytes, spec: Sequence[int], compiled: dict[str, Any]) -> None:
        self.decl, self.spec, self.compiled = decl, tuple(spec), compiled
        self.code, mode = bytes.fromhex(compiled["code"]), compiled["float_mode"]
        spilled = compiled["spilled_sgprs"] + compiled["spilled_vgprs"] + compiled["scratch_bytes"]
        name, entry = f"gfx1201: {decl.name} {list(spec)}", compiled["rsrc2"] >> 1 & 0x1F
        if spilled or compiled["wave"] != WAVE:
            raise KernelError(
                f"{name}: got wave{compiled['wave']}, {spilled} spilled, expected wave{WAVE} without spills"
            )
        if mode != MODE or entry not in (3, 6):
            raise UnsupportedError(f"{name}: got float mode {mode:#x}, {entry} scalars, expected {MODE:#x}, 3 or 6")
        self.entry, self.records = entry, decode(self.code, compiled["vgprs"])
        if not compiled["units"] and (self.records["op"] == OPERATIONS["v_wmma_i32_16x16x16_iu8"].number).any():
            raise UnsupportedError(f"{name}: got a compiler that offers no matrix units, expected RADV of Mesa 25.2")
        self.size = _workgroup(spirv, dict(zip(decl.spec, spec, strict=True)))

    def instruction(self, record: int) -> str:
        """The text of a record's instruction."""
        return repr([op for _, op in instructions(self.code) for _ in range(1 + hasattr(op, "opx"))][record])


def _workgroup(spirv: bytes, spec: dict[str, int]) -> tuple[int, int, int]:
    """Invocations in x, y and z: the module's, but for an x that a constant gives."""
    words, index = np.frombuffer(spirv, np.uint32).tolist(), 5
    while (words[index] & 0xFFFF, words[index + 2]) != (16, 17):  # OpExecutionMode LocalSize x y z
        index += words[index] >> 16
    x, y, z = words[index + 3 : index + 6]
    return spec.get("workgroup_size") or spec.get("wave_size") or x, y, z


class Gfx1201:
    """A discrete device of 64 compute units. NoVulkanError where RADV of Mesa 25.0 is missing.

    seed: of the order in which waves and workgroups run. poison: what buffers, registers and shared memory begin with.
    mode: the float mode in the place of a program's own.
    """

    name = "gfx1201"

    def __init__(self, seed: int = 1, poison: int = POISON, mode: int | None = None) -> None:
        self.seed, self.poison, self.mode = seed, poison, mode
        self.programs: dict[Any, Program] = {}
        self.issued = self.dispatches = self.loads_outside = 0
        (compiled,) = compile_programs([(PRIMITIVES, ())])  # says what is missing
        self.info = replace(INFO, matrix=RDNA4_UNITS) if compiled["units"] else INFO
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._compiler = subprocess.Popen(**HERE.process(), text=True, **pipes)

    def close(self) -> None:
        self._compiler.communicate()

    def buffer(self, nbytes: int, use: Use) -> Memory:
        return Memory(nbytes, use, self.poison)

    def write(self, buffer: Memory, data: Words, offset: int = 0) -> None:
        buffer.words[offset : offset + data.size] = data

    def read(self, buffer: Memory) -> Words:
        return buffer.words.copy()

    def peek(self, buffer: Memory) -> Words:
        return buffer.words

    def kernel(self, decl: KernelDecl, spirv: bytes, spec: Sequence[int]) -> Program:
        key = decl.name, spirv, tuple(spec)
        if key not in self.programs:
            self.programs[key] = Program(decl, spirv, spec, self._compiled(decl, spirv, spec))
        return self.programs[key]

    def _compiled(self, decl: KernelDecl, spirv: bytes, spec: Sequence[int]) -> dict[str, Any]:
        with NamedTemporaryFile(suffix=".spv") as file:
            file.write(spirv)
            file.flush()
            job = file.name, len(decl.bindings), decl.constants(spec), False, True
            self._compiler.stdin.write(json.dumps(job) + "\n")
            self._compiler.stdin.flush()
            answer = read_answer(self._compiler.stdout.readline())
        return {"wave": answer["wave"], "units": answer["units"]} | read_binary(bytes.fromhex(answer["cache"]))

    def record(self, steps: Sequence[Dispatch], timestamps: bool = False) -> Steps:
        return Steps(steps)

    def start(self, *recordings: Steps) -> None:
        for recording in recordings:
            self.run(recording)

    def run(self, recording: Steps) -> None:
        for step in recording:
            self._dispatch(step.kernel, step.buffers, step.groups)

    def _dispatch(self, program: Program, buffers: Sequence[Memory], groups: tuple[int, int, int]) -> None:
        table = np.zeros((len(buffers), 4), np.uint64)  # wave.c's Buffer
        descriptors = np.zeros((len(buffers), 4), np.uint32)
        for i, (buffer, binding) in enumerate(zip(buffers, program.decl.bindings, strict=True)):
            writable = binding.access != "read"
            table[i] = buffer.words.ctypes.data, writable and buffer.touched.ctypes.data, buffer.nbytes, writable
            descriptors[i] = 0, (i + 1) << 8, buffer.nbytes, 0
        sgprs = np.array([self.poison, self.poison, DESCRIPTORS & 0xFFFFFFFF, *groups], np.uint32)
        fields = {"code": program.records, "sgprs": sgprs, "buffers": table, "descriptors": descriptors}
        run = Run(
            **{name: x.ctypes.data for name, x in fields.items()},
            **{"count": len(program.records), "sgpr_count": program.entry, "buffer_count": len(buffers)},
            **{"descriptors_at": DESCRIPTORS, "descriptors_size": descriptors.nbytes},
            **{"groups": groups, "size": program.size, "lds": program.compiled["lds"], "poison": self.poison},
            **{"mode": MODE if self.mode is None else self.mode, "seed": self.seed, "limit": 10**10},
        )
        INTERPRETER.dispatch(ctypes.byref(run))
        self.issued += run.issued
        self.dispatches += 1
        self.loads_outside += run.loads_outside
        if run.fault:
            where = f"{program.decl.name}, instruction {run.fault_at}: {program.instruction(run.fault_at)}"
            raise KernelError(f"gfx1201: {run.fault.decode()} ({where})")
