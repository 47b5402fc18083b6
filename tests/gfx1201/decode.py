"""A program for gfx1201 as records that ``wave.c`` executes, by tinygrad's tables of RDNA4's encodings.

Whatever is not understood is refused by its name: an operation, an operand, a modifier that its operand's type has
not, a register that is not the program's own.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from tinygrad.renderer.amd import decode_inst
from tinygrad.runtime.autogen.amd.rdna4 import ins as rdna4

from zinc_attn.errors import UnsupportedError

HERE: Final = Path(__file__).parent
BUILT: Final = Path(os.environ.get("ZINC_ATTN_CACHE") or HERE.parents[1] / ".cache") / "gfx1201"
VECTOR, CONSTANT, NONE, VCC, EXEC, SCC, MINUS_ONE = 256, 255, 124, 106, 126, 253, 193  # numbers of operands
_FLOATS: Final = dict(zip(range(240, 249), (0.5, -0.5, 1, -1, 2, -2, 4, -4, 0.15915494), strict=True))
IN_PLACE: Final = 0xE4  # each of four lanes takes its own
RECORD: Final = np.dtype(  # wave.c's Instruction
    [
        *(("op", "u2"), *((name, "u1") for name in ("dual", "neg", "abs", "half", "mixed", "omod", "quad"))),
        *(("dst", "i2"), ("sdst", "i2"), ("src", "i2", 3), ("count", "u2"), ("offset", "i4", 2), ("constant", "u4", 3)),
    ],
    align=True,
)
_CC: Final = "cc -O3 -march=native -ffp-contract=off -fno-strict-aliasing -shared -fPIC -xc - -lm -o"
_ACCESS: Final = re.compile(
    r"((?:s|s_buffer|ds|buffer)_(?:load|store)|buffer_atomic_(?:and|or))_(2addr_)?(stride64_)?b(32|64|96|128|256|512)"
)


class Operation(NamedTuple):
    """A line of wave.c's table. types: of the result and of three operands."""

    number: int
    kind: str
    types: str


class _Line(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_char_p) for name in ("name", "kind", "types")), ("function", ctypes.c_void_p))


def _build() -> ctypes.CDLL:
    """The interpreter, compiled once for this CPU."""
    table, interpreter, cpu = (Path(HERE, name).read_text() for name in ("operations.def", "wave.c", "/proc/cpuinfo"))
    source = interpreter.replace('#include "operations.def"', table)
    flags = next(line for line in cpu.splitlines() if line.startswith(("flags", "Features")))
    library = BUILT / f"{hashlib.sha256((source + flags).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        new = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*_CC.split(), new], input=source, text=True, check=True)
        new.rename(library)
    return ctypes.CDLL(str(library))


def _operations() -> dict[str, Operation]:
    lines, operations = ctypes.cast(INTERPRETER.operations, ctypes.POINTER(_Line)), dict[str, Operation]()
    while (line := lines[len(operations)]).name:
        operations[line.name.decode()] = Operation(len(operations), line.kind.decode(), (line.types or b"").decode())
    return operations


INTERPRETER: Final = _build()
OPERATIONS: Final = _operations()


def instructions(code: bytes) -> list[tuple[int, Any]]:
    """(byte, instruction) of a program."""
    offset, decoded = 0, []
    while offset < len(code):
        piece = code[offset : offset + 16].ljust(16, b"\0")
        try:  # tinygrad's list of encodings lacks one
            instruction = rdna4.VBUFFER.from_bytes(piece) if piece[3] >> 2 == 0b110001 else decode_inst(piece, "rdna4")
        except ValueError as error:
            raise UnsupportedError(
                f"gfx1201: got a word that is no instruction, at byte {offset:#x}: {error}"
            ) from None
        decoded.append((offset, instruction))
        offset += instruction.size()
    return decoded


def decode(code: bytes, vgprs: int) -> Any:
    """A record per instruction, two of a pair that is issued at once. UnsupportedError."""
    result = instructions(code)
    index = np.cumsum([0, *(1 + hasattr(instruction, "opx") for _, instruction in result)]).tolist()
    starts = dict(zip((offset for offset, _ in result), index, strict=False))
    records = np.zeros(index[-1], RECORD)
    for (offset, instruction), i in zip(result, index, strict=False):
        try:
            _Decoder(instruction, records[i:], vgprs).fill(offset, starts)
        except UnsupportedError as error:
            raise UnsupportedError(f"gfx1201: got {instruction!r} at byte {offset:#x}, {error}") from None
    return records


def _refuse(when: Any, what: str) -> None:
    if when:
        raise UnsupportedError(f"{what}; expected what the shipped kernels are made of, see tests/gfx1201")


def _signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


class _Decoder:
    """One instruction, whose fields are attributes; 0 where its encoding has them not."""

    def __init__(self, instruction: Any, records: Any, vgprs: int) -> None:
        self.instruction, self.records, self.vgprs = instruction, records, vgprs
        self.encoding = type(instruction).__name__.split("_")[0]

    def __getattr__(self, field: str) -> int:
        bits = getattr(type(self.instruction), field, None)
        return 0 if bits is None else self.instruction._raw >> bits.lo & bits.mask

    def fill(self, offset: int, starts: dict[int, int]) -> None:
        moved = "_DPP" in type(self.instruction).__name__
        first = VECTOR + self.vsrc0 if moved else self.src0
        if moved:
            whole = self.dpp < 256 and self.fi and self.row_mask & self.bank_mask == 15
            signs = self.src0_neg | self.src0_abs | self.src1_neg | self.src1_abs
            _refuse(self.encoding not in ("VOP1", "VOP2") or not whole or signs, "with lanes that leave their four")
            self.records[0]["quad"] = self.dpp ^ IN_PLACE
        if self.encoding == "VOPD":
            self.records[0]["dual"] = 1
            for r, x in zip(self.records, "xy", strict=False):
                name = self._begin(r, getattr(self.instruction, f"op{x}").name.lower().replace("_dual", ""))
                r["dst"] = self._own(self.vdstx if x == "x" else self.vdsty << 1 | ~self.vdstx & 1)
                self._sources(r, name, getattr(self, f"src{x}0"), VECTOR + getattr(self, f"vsrc{x}1"))
            return
        r, name = self.records[0], re.sub(r"_e(32|64)$", "", self.instruction.op.name.lower())
        access = _ACCESS.fullmatch(name)
        name = self._begin(r, access[1] if access else name.replace("v_cmpx", "v_cmp"))
        kind = OPERATIONS[name].kind
        if kind in "VW":
            self._vector(r, name, first)
            if kind == "W":
                for n, words in ((VECTOR + self.vdst, 8), (self.src0, 2), (self.src1, 2), (max(self.src2, VECTOR), 8)):
                    self._own(n - VECTOR, words)
        elif kind == "M" and access:
            self._access(r, access)
        elif kind == "B":
            target = offset + 4 + 4 * _signed(self.simm16, 16)
            _refuse(target not in starts, "which jumps to no instruction")
            asked = {"scc": SCC, "vcc": VCC, "exe": EXEC}.get(name[10:13], NONE)
            self._sources(r, name, asked)
            r["offset"][0] = starts[target]
        elif kind in "SE":
            r["sdst"] = self.vdst if self.encoding == "VOP3" else self.sdst
            _refuse(self.neg or self.abs or self.omod or self.clmp, "with modifiers")
            first = self.src0 if self.encoding == "VOP3" else self.sdst if self.encoding == "SOPK" else self.ssrc0
            self._sources(r, name, first, EXEC if kind == "E" else CONSTANT if self.encoding == "SOPK" else self.ssrc1)
        else:
            other = {"s_barrier_signal": self.ssrc0 != MINUS_ONE, "s_barrier_wait": self.simm16 != 0xFFFF}
            _refuse(other.get(name), "which is another barrier than the workgroup's")

    def _begin(self, r: Any, name: str) -> str:
        _refuse(name not in OPERATIONS, f"an operation {name} that operations.def has not")
        r["op"], r["src"], r["offset"] = OPERATIONS[name].number, CONSTANT, (0, -1)
        return name

    def _own(self, n: int, words: int = 1) -> int:
        _refuse(n + words > self.vgprs, f"with vector register {n + words - 1} of the program's {self.vgprs}")
        return n

    def _sources(self, r: Any, name: str, *values: int) -> None:
        """Operands; those that an encoding leaves out are the old result, the literal, or VCC."""
        first, *others = values
        if len(values) == 2 or name == "v_fmac_f32":
            implied = {"v_fmac_f32": VECTOR + int(r["dst"]), "v_fmaak_f32": CONSTANT, "v_fmamk_f32": CONSTANT}
            others = [others[0], implied.get(name, VCC)]
        for k, (n, type_) in enumerate(zip((first, *others), OPERATIONS[name].types[1:], strict=False)):
            upper = type_ in "hw" and n >= VECTOR + 128 and self.encoding in ("VOP1", "VOPC")  # of v0 to v127
            r["half"] |= upper << k
            if type_ != "o":
                self._source(r, k, n - 128 * upper, type_)

    def _source(self, r: Any, k: int, n: int, type_: str) -> None:
        r["src"][k] = n if n < NONE or n in (EXEC, SCC) or n >= VECTOR else CONSTANT
        if type_ == "q":  # the upper half of a constant: a small number's sign is extended, a literal's is not
            r["constant"][k + 1] = 0xFFFFFFFF * (192 < n <= 208)
        if n >= VECTOR:
            self._own(n - VECTOR)
        elif 128 <= n <= 208:
            r["constant"][k] = (n - 128 if n <= 192 else 192 - n) & 0xFFFFFFFF
        elif n in _FLOATS and type_ != "q":
            x = _FLOATS[n]
            r["constant"][k] = np.float16(x).view("u2") if type_ in "hw" else np.float32(x).view("u4")
        elif n == CONSTANT:
            r["constant"][k] = _signed(self.simm16, 16) & 0xFFFFFFFF if self.encoding == "SOPK" else self.literal
        else:
            _refuse(n > NONE and n not in (EXEC, SCC), f"with operand {n}")

    def _vector(self, r: Any, name: str, first: int) -> None:
        result = OPERATIONS[name].types[0]
        if result in "mcs":
            r["sdst"] = self.sdst if self.encoding == "VOP3SD" else self.vdst if result != "c" else VCC
            r["sdst"] = EXEC if "CMPX" in self.instruction.op.name else VCC if self.encoding == "VOPC" else r["sdst"]
        if result not in "ms":
            r["dst"] = self._own(self.vdst)
        if self.encoding in ("VOP1", "VOP2", "VOPC"):
            self._sources(r, name, first, VECTOR + self.vsrc1)
        else:
            self._modifiers(r, OPERATIONS[name].types)
            self._sources(r, name, self.src0, self.src1, self.src2)

    def _modifiers(self, r: Any, types: str) -> None:
        mixed, packed = "x" in types, self.encoding == "VOP3P"
        r["neg"], r["abs"], r["half"], r["omod"] = self.neg, self.neg_hi if packed else self.abs, self.opsel, self.omod
        r["mixed"] = (self.opsel_hi | self.opsel_hi2 << 2) * mixed
        if packed and not mixed:  # a dot product of bytes: what it has in the place of signs says that they are signed
            _refuse(r["neg"] != 3, "of unsigned bytes")
            r["neg"] = 0
        signed, halves = (sum(1 << k for k in range(3) if types[k + 1] in having) for having in ("fghx", "hwx"))
        _refuse(int(r["neg"] | r["abs"]) & ~signed, "with a sign where its operand has none")
        _refuse(int(r["half"]) & ~(int(r["mixed"]) if mixed else halves), "with a half of what has none")
        _refuse(self.clmp or (self.omod and types[0] != "f"), "with a clamp, or a factor where its result is no float")

    def _access(self, r: Any, access: re.Match[str]) -> None:
        r["count"] = count = int(access[4]) // 32
        if self.encoding == "SMEM":
            r["sdst"], r["offset"][0] = self.sdata, _signed(self.ioffset, 24)
            self._source(r, 1, self.soffset, "u")
            r["src"][0] = 2 * self.sbase
        elif self.encoding == "DS":
            store, step = "store" in access[1], 4 * count * (64 if access[3] else 1)
            r["offset"] = self.offset0 | self.offset1 << 8, -1
            if access[2]:
                r["offset"] = self.offset0 * step, self.offset1 * step
            self._source(r, 0, VECTOR + self.addr, "u")
            r["dst"] = self._own(self.data0 if store else self.vdst, count * (2 if access[2] and not store else 1))
            r["src"][2] = VECTOR + self._own(self.data1, count * bool(access[2] and store))
        else:
            _refuse(self.idxen or self.tfe, "with an index or a fault bit")
            _refuse("atomic" in access[1] and self.th & 1, "which gives the old value back")
            self._source(r, 0, VECTOR + self.vaddr if self.offen else NONE, "u")
            self._source(r, 1, self.soffset, "u")
            r["dst"], r["src"][2], r["offset"][0] = self._own(self.vdata, count), self.rsrc, _signed(self.ioffset, 24)
