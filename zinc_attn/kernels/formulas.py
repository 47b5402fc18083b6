"""Formulas that several languages share: each is declared once, as a Python expression of integers.

A formula uses //, *, +, -, comparisons, ``or`` and conditionals of integers that are never negative, over the inputs,
the known values and the formulas before it.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any, Final

FUNCTIONS: Final[Mapping[str, Callable[..., int]]] = {
    "min": min,
    "max": max,
    "ceil_div": lambda a, b: -(-a // b),
    "log2": lambda a: a.bit_length() - 1,
}


def evaluate(formula: str, names: Mapping[str, Any]) -> int:
    """The value of a formula of this package. names: the values of the names in it, ints, and for ``kind`` a str."""
    return int(eval(formula, {"__builtins__": {}, **FUNCTIONS}, dict(names)))


class Formulas:
    """table: {name: (expression, meaning)}; inputs: names that a caller gives values for; known: {name: value}."""

    def __init__(self, table: Mapping[str, tuple[str, str]], inputs: tuple[str, ...], known: Mapping[str, int]) -> None:
        self.table, self.inputs, self.known = dict(table), inputs, dict(known)
        self._code: dict[str, CodeType] = {name: compile(text, name, "eval") for name, (text, _) in table.items()}
        self.values = lru_cache(maxsize=4096)(self._values)

    def told(self) -> Mapping[str, tuple[str, str]]:
        """The table as the manifest has it: names in small letters, numbers for known names."""

        def lowered(match: re.Match[str]) -> str:
            return str(self.known.get(match[0], match[0].lower()))

        rows = self.table.items()
        return {name.lower(): (re.sub(r"[A-Z_]{2,}", lowered, text), meaning) for name, (text, meaning) in rows}

    def _values(self, *inputs: int) -> Mapping[str, int]:
        """Every formula's value by name, for the values of the inputs."""
        values = {**self.known, **dict(zip(self.inputs, inputs, strict=True))}
        for name, code in self._code.items():
            values[name] = int(eval(code, {"__builtins__": {}}, values))
        return {name: values[name] for name in self.table}
