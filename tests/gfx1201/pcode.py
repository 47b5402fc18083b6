"""AMD's published pseudo-code, of which tinygrad's tables have the text, as a judge of operations.def.

Python executes the text after a few changes of spelling. What it leaves open is decided here as the kernels rely on it:
float32 is flushed by the mode, results are rounded to nearest even, and a conversion to an integer saturates.
"""

from __future__ import annotations

import operator
import re
from fractions import Fraction
from functools import cache
from types import CodeType
from typing import Any, Final

import numpy as np
from tinygrad.runtime.autogen.amd.rdna4.str_pcode import PCODE

TEXTS: Final = {re.sub(r"_E(32|64)$|_DUAL", "", op.name).lower(): text for op, text in PCODE.items()}
_FLOATS: Final = {16: (np.float16, np.uint16, 10), 32: (np.float32, np.uint32, 23)}  # type, words, bits of a mantissa


class Value:
    """Bits of a size and a kind: u, i, f or b. A view writes through to its ``home``, which is a value and a bit."""

    __array_ufunc__ = None
    flush = True  # denormals of float32

    def __init__(self, bits: Any, size: int = 32, kind: str = "u", home: tuple[Value, int] | None = None) -> None:
        self.__dict__.update(bits=int(bits) & (1 << size) - 1, size=size, kind=kind, home=home or (self, 0))

    def __getattr__(self, name: str) -> Value:
        return Value(self.bits, int(name[1:]), name[0], self.home)

    def __setattr__(self, name: str, x: Any) -> None:
        size = int(name[1:])
        self._put(size, float_bits(x, size) if name[0] == "f" else int(x))

    def __getitem__(self, key: Any) -> Value:
        high, low = (int(key.start), int(key.stop)) if isinstance(key, slice) else (int(key), int(key))
        if high < low:  # [0 : 31] turns the bits around
            return Value(int(f"{self.bits:032b}"[::-1], 2))
        return Value(self.bits >> low, high - low + 1, "u", (self.home[0], self.home[1] + low))

    def __setitem__(self, key: Any, x: Any) -> None:
        view = self[key]
        view._put(view.size, int(x))

    def _put(self, size: int, x: int) -> None:
        home, offset = self.home
        mask = (1 << size) - 1
        home.__dict__["bits"] = home.bits & ~(mask << offset) | (x & mask) << offset

    def __int__(self) -> int:
        return self.bits - (self.kind == "i" and self.bits >> (self.size - 1)) * (1 << self.size)

    __index__ = __int__

    def __bool__(self) -> bool:
        return self.bits != 0

    def __invert__(self) -> Value:
        return Value(~self.bits, self.size, self.kind)

    def parts(self) -> tuple[int, int, int]:
        """Sign, exponent and mantissa."""
        size, bits = self.size, _FLOATS[self.size][2]
        return self.bits >> (size - 1), self.bits >> bits & (1 << size - 1 - bits) - 1, self.bits & (1 << bits) - 1

    def number(self) -> Any:
        """A float as float64, an integer as int."""
        if self.kind != "f":
            return int(self)
        float_type, word, _ = _FLOATS[self.size]
        return np.float64(word(float_bits(self, self.size)).view(float_type))


def number(x: Any) -> Any:
    return x.number() if isinstance(x, Value) else x


def float_bits(x: Any, size: int) -> int:
    """The bits of a float that is rounded and flushed; a NaN's stay."""
    float_type, word, _ = _FLOATS[size]
    with np.errstate(all="ignore"):
        bits = x.bits if isinstance(x, Value) and x.kind == "f" else int(float_type(number(x)).view(word))
    return bits & 1 << 31 if size == 32 and Value.flush and not bits & 0x7F800000 else bits


def _method(operation: Any, turned: bool = False) -> Any:
    def method(self: Value, other: Any) -> Any:
        a, b = (number(other), number(self)) if turned else (number(self), number(other))
        result = operation(a, b)
        if not isinstance(result, int) or isinstance(result, bool):
            return result  # float64, or a comparison's
        shift = operation in (operator.lshift, operator.rshift)
        return Value(result, self.size if shift else max(self.size, getattr(other, "size", 0)), self.kind)

    return method


for _name in "add sub mul truediv and_ or_ xor lshift rshift lt le eq ne gt ge".split():  # noqa: SIM905
    setattr(Value, f"__{_name.strip('_')}__", _method(getattr(operator, _name)))
for _name in ("truediv", "lshift"):
    setattr(Value, f"__r{_name}__", _method(getattr(operator, _name), turned=True))


def _fma(*operands: Any) -> Any:
    """a * b + c, rounded once to float32."""
    a, b, c = map(number, operands)
    near = a * b + c  # the product is exact
    if not np.isfinite(near) or not (exact := Fraction(a) * Fraction(b) + Fraction(c)):
        return near
    step = Fraction(2) ** max(int(np.frexp(near)[1]) - 24, -149)
    return np.copysign(float(round(exact / step) * step), near)


def _to_int(low: int, high: int) -> Any:
    return lambda x: 0 if np.isnan(n := number(x)) else int(min(max(np.trunc(n), low), high))


def _cat(*parts: Value) -> Value:
    bits = 0
    for part in parts:
        bits = bits << part.size | part.bits
    return Value(bits, sum(part.size for part in parts))


def _called(name: str) -> Any:
    """Another operation as a function."""
    return lambda *x: getattr(execute(TEXTS[name], {"S0": x[0], "S1": x[1], "D0": Value(0)})["D0"], name[-3:])


def _is_nan(x: Value) -> bool:
    return bool(np.isnan(x.number()))


def _is_quiet(x: Value) -> bool:
    return x.parts()[2] >> (_FLOATS[x.size][2] - 1) == 1


_NAMES: Final[dict[str, Any]] = {
    **{"F": np.float64, "V": Value, "cat": _cat, "fma": _fma, "abs": lambda x: abs(number(x)), "WAVE64": False},
    **{"cast": lambda size, kind, x: x if kind == "F" else Value(int(x), size, kind.lower())},
    **{"trunc": lambda x: np.trunc(number(x)), "floor": lambda x: np.floor(number(x))},
    **{"fract": lambda x: number(x) - np.floor(number(x)), "isEven": lambda x: np.fmod(number(x), 2) == 0},
    **{"sign": lambda x: x.parts()[0] == 1, "exponent": lambda x: x.parts()[1], "isNAN": _is_nan},
    **{"isQuietNAN": lambda x: _is_nan(x) and _is_quiet(x), "isSignalNAN": lambda x: _is_nan(x) and not _is_quiet(x)},
    **{"cvtToQuietNAN": lambda x: x, "signext": lambda x: Value(int(x), 64, "i"), "lg": lambda a, b: a < b or a > b},
    **{"signext_from_bit": lambda x, n: Value(x.bits, int(n), "i") if n else 0},
    **{"f16_to_f32": number, "i32_to_f32": lambda x: np.float64(int(x)), "u32_to_f32": lambda x: np.float64(int(x))},
    **{"f32_to_i32": _to_int(-(2**31), 2**31 - 1), "f32_to_u32": _to_int(0, 2**32 - 1)},
    **{"s_ff1_i32_b32": lambda x: (x.bits & -x.bits).bit_length() - 1},
    **{name: _called(name) for name in ("v_max_u32", "v_max_i32", "v_min_i32", "v_max_num_f32", "v_min_num_f32")},
}


def execute(text: str, values: dict[str, Any]) -> dict[str, Any]:
    """The names after a piece of pseudo-code."""
    names = _NAMES | {"tmp": Value(0, 64), "TRAPSTS": Value(0), "S": [values.get(f"S{i}") for i in range(3)]} | values
    with np.errstate(all="ignore"):
        exec(_compiled(text), names)
    return names


@cache
def _compiled(text: str) -> CodeType:
    lines, depth = [], 0
    text = re.sub(r"(&&|\|\|)\n", r"\1 ", re.sub(r"//.*", "", text)).replace("TRAPSTS.INVALID", "TRAPSTS.u1")
    for line in filter(None, (part.strip() for part in re.split(r"[;\n]", text))):
        if re.match(r"(endif|endfor|elsif|else)\b", line):
            depth -= 1 + (line == "endif)")  # of a function, too
        if line[:3] != "end":
            lines.append("    " * depth + _statement(re.sub(r"\bin\b", "given", line)))
        depth += bool(re.search(r"^else$| (then|do|\()$", line))
    return compile("\n".join(lines), text, "exec")


def _statement(line: str) -> str:
    """A line of pseudo-code as Python."""
    if line == "break":
        return line
    if match := re.match(r"declare (\w+) : [^[]*(\[\d\])?", line):
        empty = f"[None] * {match[2]}[0]" if match[2] else "V(0)"
        return "pass" if match[1] == "S" else f"{match[1]} = {empty}"
    if match := re.match(r"(\w+) = lambda(\(.*\)) \($", line):
        return f"def {match[1]}{match[2]}:"
    if match := re.match(r"for (\w+) given (\S+) : (\S+) do", line):
        return f"for {match[1]} in range({match[2]}, {match[3]} + 1):"
    if match := re.match(r"(?:(els)?if) (.*) then$", line):
        return f"{'elif' if match[1] else 'if'} {_expression(match[2])}:"
    match = re.match(r"(return|.*? [-+]?=(?!=)|else)(.*)", line)
    assert match, line
    return f"{_expression(match[1])} {_expression(match[2].strip())}" if match[2] else f"{line}:"


def _expression(text: str) -> str:
    for pattern, python in (
        (r"(\S+) <> (\S+)", r"lg(\1, \2)"),
        (r"\b(\d+)'([UIFB])\(", r"cast(\1, '\2', "),
        (r"\b(\d+)'(0x[0-9a-f]+|\d+)U?\b", r"V(\2, \1)"),
        (r"(?<![\w.'])(\d+\.\d+)F?\b", r"F(\1)"),
        (r"(?<![\w.'])(0x[0-9a-f]+|\d+)U?LL\b", r"V(\1, 64)"),
        (r"(?<![\w.'])(0x[0-9a-f]+|\d+)U\b", r"V(\1)"),
        (r"\{(.*?)\}", r"cat(\1)"),
        (r"&&", " and "),
        (r"\|\|", " or "),
        (r"!(?!=)", " not "),
        (r"\[([^][?]+) \? (\w+) : (\w+)\]", r"[\2 if \1 else \3]"),
        (r"^(.+) \? (.+) : (.+)$", r"(\2 if \1 else \3)"),
    ):
        text = re.sub(pattern, python, text)
    return text
