"""Folders are layers: imports point one way, between files, too. Every public name is described and hidden by none."""

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import zinc_attn as za

PACKAGE = Path(za.__file__).parent
NATIVE = Path(__file__).resolve().parents[2] / "native"
# Each room may import from those before it, and from itself.
ROOMS = (
    *("errors", "limits", "checks", "files", "storage", "dtypes", "shapes", "canonical", "kernels"),
    *("planning", "runtime", "cache", "graph", "decode", "distributed", "integrations", "tools", "cli"),
)
# The same of the C library's files, each a .c and its .h, and of the folders that use it.
NATIVE_ROOMS = (
    *("include", "error", "loops", "floats", "blocks", "rows", "shape", "work"),  # what knows no device
    *("functions", "units", "pipeline_cache", "processor", "device", "objects", "levels"),  # Vulkan
    *("primitives", "check", "attn", "laid", "record", "cache", "call", "prepared"),  # attention
    *("graph", "ggml", "cpu"),
)
FACADES = {"reference": "canonical", "export": "tools"}  # public modules at the top, by the room that they show


FILES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def imported(path: Path) -> set[str]:
    """Files, as modules, that a file imports from, for types alone, too; a package is its ``__init__``."""
    package = path.relative_to(PACKAGE.parent).with_suffix("").parts[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = ".".join((*(package[: len(package) - node.level + 1] if node.level else ()), node.module or ""))
            base = base.rstrip(".")
            for name in (f"{base}.{alias.name}" for alias in node.names):
                known = (module for module in (name, f"{name}.__init__", base, f"{base}.__init__") if module in FILES)
                names.update(list(known)[:1])
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room == "__init__" or room in FACADES:
        return
    rooms = {module.split(".")[1] for module in imported(path) - {"zinc_attn.__init__"}}
    for name in (FACADES.get(other, other) for other in rooms):
        assert ROOMS.index(name) <= ROOMS.index(room), f"{path} imports from {name}"


def test_no_circle_of_files() -> None:
    graph = {name: imported(path) for name, path in FILES.items()}
    assert len(graph) > 150 and sum(map(len, graph.values())) > 800
    TopologicalSorter(graph).prepare()  # an error with the circle where there is one


def test_includes_point_one_way() -> None:
    rooms = {path: path.stem if path.parent.name == "src" else path.parent.name for path in NATIVE.rglob("*.[ch]*")}
    includes = 0
    for path, room in rooms.items():
        for name in re.findall(r'^#include "(.+)"', path.read_text(encoding="utf-8"), re.M):
            places = ((folder / name).resolve() for folder in (path.parent, NATIVE / "src", NATIVE / "include"))
            for target in [place for place in places if place in rooms][:1]:  # none of ggml's and of generated headers
                assert NATIVE_ROOMS.index(rooms[target]) <= NATIVE_ROOMS.index(room), f"{path} includes {name}"
                includes += 1
    assert set(rooms.values()) == set(NATIVE_ROOMS) and includes > 150


def test_no_module_hides_a_public_function() -> None:
    modules = {path.stem for path in PACKAGE.iterdir()}
    assert not modules & {name for name in za.__all__ if isinstance(getattr(za, name), FunctionType)}


def test_torch_is_imported_where_it_is_used() -> None:
    """At the top of no file but the integration's: commands show their help without it."""
    for path in (PACKAGE / "tools").rglob("*.py"):
        assert not re.search(r"^(import|from) (torch|transformers)", path.read_text(encoding="utf-8"), re.M), path


# --- help() of every public name, and of every public method, says something ----------------------------------


def described(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Objects with docstrings of their own: the name, a module's objects, a class's public methods and properties."""
    yield name, value
    if isinstance(value, ModuleType):
        for inner, held in vars(value).items():
            if not inner.startswith("_") and getattr(held, "__module__", "").startswith("zinc_attn"):
                yield from described(f"{name}.{inner}", held)
    if not inspect.isclass(value):
        return
    for base in value.__mro__:
        for method, raw in vars(base).items() if base.__module__.startswith("zinc_attn") else ():
            function = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
            if inspect.isfunction(function) and (not method.startswith("_") or method == "__call__"):
                yield f"{name}.{method}", function


def test_every_public_name_has_a_docstring():
    public = {name: getattr(za, name) for name in za.__all__}
    if find_spec("transformers"):
        public["ZincCache"] = import_module("zinc_attn.integrations.transformers").ZincCache
    objects = dict(entry for name, value in public.items() for entry in described(name, value))
    assert {"KVCache.append", "Attention.__call__", "reference.emulate", "errors.ShapeError"} <= set(objects)
    assert [name for name, value in objects.items() if not (value.__doc__ or "").strip()] == [] and len(objects) > 150


# --- sentences that are read once, and nouns for names --------------------------------------------------------

READABLE = ("zinc_attn", "shaders", "native", "examples", "scripts", "tests")
CEILINGS = {"zinc_attn": 10, "shaders": 10, "native": 10}  # the names out of NAMES that a folder below may have
UNREAD = ("zinc_attn/spirv/", "zinc_attn/kernels/cpp.py", "zinc_attn/runtime/cpu/building.py")
NAMES = re.compile(r"(?<![\w.])(?:at|found|one|of|made|given|own|mine)\b(?!\s*\()(?=\s*(?:=[^=]|[;,)\[.+*/:%-]))")
STRING = r'""".*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
CLAUSE = (  # opens a comment
    r"(?:(?:Of|Where) (?:it|they|them|this|that|these|those|which)|What (?!an? |the )\w+|Those|Things? (?:of|that))\b.*"
)
LATE = r"\bbehind (?:[a-z]+ ){0,2}(?:time|timing|calls?|steps?|runs?|forward|submissions?|exchange|--\w+)\b"  # "after"


def sources(top: str) -> dict[str, str]:
    """The text of each source file of a folder, by its path in the repository."""
    root = PACKAGE.parent
    paths = [path for path in (root / top).rglob("*") if path.suffix in {".py", ".c", ".h", ".cpp", ".glsl", ".comp"}]
    texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return {name: text for name, text in texts.items() if not name.startswith(UNREAD)}


@pytest.mark.parametrize("top", READABLE)
def test_names_are_nouns_and_comments_open_with_a_subject(top: str) -> None:
    counts = Counter[str]()
    for name, text in sources(top).items():
        opening, comment = (r'(?:"""|# )', r"#[^\n]*") if name.endswith(".py") else (r"/[/*] ", r"//[^\n]*|/\*.*?\*/")
        slips = re.findall(f"{opening}{CLAUSE}|{LATE}", text)
        assert not slips, (name, slips)
        code = re.sub(comment, "", re.sub(STRING, "", text, flags=re.S), flags=re.S)
        counts[name.rpartition("/")[0]] += len(NAMES.findall(code))
    assert top not in CEILINGS or max(counts.values()) <= CEILINGS[top], counts
