"""Where an object dies no bytecode runs: Python would report a Ctrl-C there, and not raise it."""

import ast
import gc
from pathlib import Path

from interrupts import files, opcodes

import zinc_attn as za
from zinc_attn.runtime.registry import Keeper, Registry

PACKAGE = Path(za.__file__).parent
IN_PYTHON = {"WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "WeakMethod", "finalize", "__del__"}


class Thing:
    """Something that dies."""


def test_callbacks_are_methods_of_c():
    """A weak reference calls ``append`` of a deque or ``pop`` of a dict, and nothing has a finalizer."""
    called = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "name", None)}
            assert not names & IN_PYTHON, (path, node)
            if isinstance(node, ast.Call) and len(node.args) == 2:
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name == "ref" or name.endswith("Tie"):
                    called.add(getattr(node.args[1], "attr", path))
    assert called == {"append", "pop"}


def test_what_is_kept_goes_with_what_needs_it():
    keeper, things, needed = Keeper(), [Thing(), Thing()], Thing()
    registry: Registry[Thing] = Registry()
    for thing in (*things, needed):
        registry.add(thing)
    for thing in things:
        keeper.keep(thing, needed)
    del thing, needed
    things[0].itself = things[0]  # type: ignore[attr-defined]  # a cycle, which the collector finds
    assert opcodes(things.clear, files("runtime/registry.py")) == 0
    assert len([*registry]) == 2 and len(registry.dead) == 1
    assert opcodes(gc.collect, files("runtime/registry.py")) == 0
    assert [*registry] == [] and not keeper._kept
    registry.purge()
    assert not registry._references and not registry.dead
