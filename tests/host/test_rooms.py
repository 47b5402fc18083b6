"""The folders of the package are layers: imports point one way, and no module hides a public function."""

from __future__ import annotations

import ast
from pathlib import Path
from types import FunctionType

import pytest

import zinc_attn as za

PACKAGE = Path(za.__file__).parent
# Each room may import from those before it, and from itself.
ROOMS = (
    "errors",
    "limits",
    "checks",
    "files",
    "storage",
    "dtypes",
    "shapes",
    "canonical",
    "kernels",
    "planning",
    "runtime",
    "cache",
    "decode",
    "distributed",
    "integrations",
    "tools",
    "cli",
)
FACADES = {"reference": "canonical", "export": "tools"}  # public modules at the top, by the room that they show


def imported(path: Path) -> set[str]:
    """Rooms that a module imports from."""
    package = path.relative_to(PACKAGE.parent).with_suffix("").parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
            names = [base[1]] if len(base) > 1 and base[1] else [alias.name for alias in node.names]
            found.update(name for name in names if not name.startswith("__"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zinc_attn."):
            found.add(str(node.module).split(".")[1])
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room == "__init__" or room in FACADES:
        return
    for name in (FACADES.get(name, name) for name in imported(path)):
        assert ROOMS.index(name) <= ROOMS.index(room), f"{path} imports from {name}"


def test_no_module_hides_a_public_function() -> None:
    modules = {path.stem for path in PACKAGE.iterdir()}
    assert not modules & {name for name in za.__all__ if isinstance(getattr(za, name), FunctionType)}
