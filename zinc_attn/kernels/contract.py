"""The words and formulas of the contract, as ``contract.ini`` has them, and the values of its formulas.

The manifest shows them, and ``c`` makes C of them. Needs the standard library alone.

A formula is a Python integer expression over names that the manifest explains, with the operators and ``FUNCTIONS`` of
``formulas``. All formulas are the package's own, so Python evaluates them.
"""

import functools
import json
import re
from collections.abc import Mapping
from configparser import ConfigParser
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from .. import limits, storage
from ..canonical import constants
from . import declarations, families, questions, sizes, tuning
from .formulas import evaluate
from .split_rule import SPLIT_RULE

_MODULES: Final = (constants, limits, declarations, questions, sizes, tuning, storage)


@functools.cache
def _file() -> Mapping[str, Mapping[str, str]]:
    """The sections of ``contract.ini``, the values of expressions in braces filled in."""
    known = {name: value for module in _MODULES for name, value in vars(module).items()}
    known["families"] = families
    text = Path(__file__).with_name("contract.ini").read_text(encoding="utf-8")
    parser = ConfigParser(delimiters=("=",), comment_prefixes=("#",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their capitals
    parser.read_string(re.sub(r"\{(.+?)\}", lambda match: str(eval(match[1], known)), text))
    return {name: {key: text.replace("\n", " ") for key, text in parser.items(name)} for name in parser.sections()}


def meanings(section: str) -> Mapping[str, str]:
    """The entries of a section of ``contract.ini``, in the file's order; an empty table without such a section."""
    return _file().get(section, {})


def structure(section: str) -> dict[str, Any]:
    """A section as an object for JSON: a point in a name begins an inner object, and JSON text is parsed."""
    tree: dict[str, Any] = {}
    for name, text in meanings(section).items():
        *ways, last = name.split(".")
        inner = functools.reduce(lambda outer, way: outer.setdefault(way, {}), ways, tree)
        inner[last] = text
        with suppress(ValueError):
            inner[last] = json.loads(text)
    return tree


@functools.cache
def formulas(section: str) -> Mapping[str, tuple[str, str]]:
    """(formula, meaning) by name of a section of ``contract.ini``, in the file's order, or of the split rule."""
    if section == "split_rule":
        return SPLIT_RULE.told()
    parts = {name: text.partition(" |") for name, text in meanings(section).items()}
    return {name: (formula, meaning.strip()) for name, (formula, _, meaning) in parts.items()}


def evaluate_all(table: Mapping[str, tuple[str, str]], names: Mapping[str, Any]) -> dict[str, int]:
    """The values of a table of (formula, meaning), each of which may use those before it."""
    values: dict[str, int] = {}
    for name, (formula, _) in table.items():
        values[name] = evaluate(formula, {**names, **values})
    return values
