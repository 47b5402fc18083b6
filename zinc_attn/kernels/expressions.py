"""Formulas in GLSL and C. A formula is a Python expression of whole numbers that are never negative."""

import ast
from collections.abc import Callable
from typing import Final, NamedTuple

# The operator of both languages and how tightly it binds. && and || go in parentheses within each other.
_OPERATORS: Final[dict[type[ast.AST], tuple[str, int]]] = {
    ast.Or: ("||", 1), ast.And: ("&&", 1), ast.Eq: ("==", 2),
    ast.LtE: ("<=", 3), ast.Lt: ("<", 3), ast.Gt: (">", 3), ast.GtE: (">=", 3),
    ast.Add: ("+", 4), ast.Sub: ("-", 4), ast.Mult: ("*", 5), ast.FloorDiv: ("/", 5), ast.Mod: ("%", 5),
}  # fmt: skip


class _Language(NamedTuple):
    """number: a format of numbers; name: the text for a name; functions: whether formulas may call functions."""

    number: str
    name: Callable[[str], str]
    functions: bool


def to_glsl(expression: str) -> str:
    """A formula as a GLSL expression of uints. ValueError for what has no translation."""
    return _translated(ast.parse(expression, mode="eval").body, 0, _Language("{}u", str, False))


def to_c(expression: str, name: Callable[[str], str]) -> str:
    """A formula as a C expression of uint64_t. name: the C for a name; ``kind == 'x'`` asks it for ``kind_is_x``.

    A function is ``za_NAME`` in C; several arguments are taken two at a time. Fields and elements are translated, too.
    """
    return _translated(ast.parse(expression, mode="eval").body, 0, _Language("{}", name, True))


def _translated(node: ast.expr, within: int, to: _Language) -> str:
    """An operator that binds more loosely than ``within`` goes in parentheses."""
    level = 9
    match node:
        case ast.Name(id=name):
            text = to.name(name)
        case ast.Constant(value=int(value)):
            text = to.number.format(int(value))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            text, level = " ".join((_translated(test, 1, to), "?", _translated(body, 1, to), ":")), 0
            text = f"{text} {_translated(orelse, 1, to)}"
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[ast.Constant(value=str(kind))]):
            text = to.name(f"{name}_is_{kind}")
        case ast.Call(func=ast.Name(id=function), args=[first, *others]) if to.functions:
            text = _translated(first, 0, to) if others else f"za_{function}({_translated(first, 0, to)})"
            for other in others:
                text = f"za_{function}({text}, {_translated(other, 0, to)})"
        case ast.Attribute(value=record, attr=field) if to.functions:
            text = f"{_translated(record, level, to)}.{field}"
        case ast.Subscript(value=array, slice=index) if to.functions:
            text = f"{_translated(array, level, to)}[{_translated(index, 0, to)}]"
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
            type(op) in _OPERATORS
        ):
            symbol, level = _OPERATORS[type(op)]
            text = f"{_translated(left, level, to)} {symbol} {_translated(right, level + 1, to)}"
        case ast.BoolOp(op=op, values=values):
            symbol, level = _OPERATORS[type(op)]
            text = f" {symbol} ".join(_translated(value, level + 1, to) for value in values)
        case _:
            known = ", ".join(symbol for symbol, _ in _OPERATORS.values())
            raise ValueError(
                f"got {ast.unparse(node)!r}, expected whole numbers, names, conditionals and the operators {known}"
            )
    return f"({text})" if level < within else text
