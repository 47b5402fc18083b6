"""The sizes and numbers of a call as formulas: ``manifest.ini`` has them and their meanings, ``evaluate`` their values.

A formula is a Python integer expression over names, each of them explained in the manifest. Besides the operators there
are ``ceil_div(a, b)`` for the quotient rounded up, ``log2``, ``min`` and ``max``.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from pathlib import Path
from typing import Any, Final

from ... import limits, storage
from ...cache import pages
from ...canonical import constants, primitives
from ...errors import ArgumentError
from ...kernels import declarations, tuning
from ...planning import splits

_MODULES: Final = (constants, limits, declarations, tuning, splits, pages, storage)  # whose constants the file may name
_DERIVED: Final[dict[str, object]] = {  # and what follows from these
    "FOUR_CHUNKS": 4 * constants.CHUNK,
    "TWICE_CPU_WAVE": 2 * tuning.CPU_WAVE,
    "ACCUMULATORS_PER_LANE": limits.MAX_ACCUMULATORS // limits.WAVE,
    "CPU_MERGE_SIZE": tuning.merge_workgroup_size("cpu"),
    "GPU_MERGE_SIZE": tuning.merge_workgroup_size("gpu"),
    "SINGLE_SPLIT_LEAVES": splits.SINGLE_SPLIT_KEYS // constants.KEYS_PER_LEAF,
    "NODE_LEAVES": splits.NODE_KEYS // constants.KEYS_PER_LEAF,
    "PRIMITIVE_GROUPS": primitives.ROWS // limits.WAVE,
    "STORAGE_NUMBERS": ", ".join(f"{i} {name}" for i, name in enumerate(storage.STORAGE)),
    "IQ4_NL_VALUES": ", ".join(map(str, storage.IQ4_NL)),
}
_OPERATORS: Final[dict[type, Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: Final[dict[str, Callable[..., int]]] = {
    "min": min,
    "max": max,
    "ceil_div": lambda a, b: -(-a // b),
    "log2": lambda a: a.bit_length() - 1,
}


@functools.cache
def _file() -> Mapping[str, Mapping[str, str]]:
    """The sections of ``manifest.ini`` with the constants' values in place of their names."""
    parser = ConfigParser(delimiters=("=",), comment_prefixes=("#",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their capitals
    known = _DERIVED | {name: value for module in _MODULES for name, value in vars(module).items() if name.isupper()}
    parser.read_string(Path(__file__).with_name("manifest.ini").read_text(encoding="utf-8").format_map(known))
    return {name: {key: text.replace("\n", " ") for key, text in parser.items(name)} for name in parser.sections()}


def meanings(section: str) -> Mapping[str, str]:
    """The entries of a section of ``manifest.ini``, in the file's order."""
    return _file().get(section, {})


@functools.cache
def formulas(section: str) -> Mapping[str, tuple[str, str]]:
    """The entries (formula, meaning) of a section of ``manifest.ini``, in the file's order."""
    parts = {name: text.partition(" |") for name, text in meanings(section).items()}
    return {name: (formula, meaning.strip()) for name, (formula, _, meaning) in parts.items()}


@functools.lru_cache(maxsize=1024)
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


def evaluate(expression: str, names: Mapping[str, Any]) -> int:
    """The value of a formula of a manifest, also of one from a file: nothing but arithmetic is ever done.

    names: the values of the names in it, ints, and for ``kind`` a str. ArgumentError for a name that has no value, and
    for what is no formula.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | str() as found):
                return found
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
                a, b = value(left), value(right)
                if isinstance(node, ast.BinOp) and str in (type(a), type(b)):
                    raise TypeError("a str times a number would take memory")
                return _OPERATORS[type(op)](a, b)
            case ast.BoolOp(op=ast.And(), values=parts):
                return all(map(value, parts))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return value(body) if value(test) else value(orelse)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return _FUNCTIONS[name](*map(value, args))
        raise KeyError(ast.unparse(node))

    try:
        return int(value(_parsed(expression)))
    except (KeyError, TypeError, ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ArgumentError(f"expression: got {expression!r}, expected a formula over {', '.join(names)}") from error


def evaluate_all(table: Mapping[str, tuple[str, str]], names: Mapping[str, Any]) -> dict[str, int]:
    """The values of a table of (formula, meaning), each of which may use those before it."""
    found: dict[str, int] = {}
    for name, (formula, _) in table.items():
        found[name] = evaluate(formula, {**names, **found})
    return found
