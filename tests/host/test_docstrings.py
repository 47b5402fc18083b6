"""``help()`` of every public name, and of every public method, says something."""

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import zinc_attn as za


def described(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What has a docstring of its own: the name; what a module holds; of a class its public methods and properties."""
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


def undescribed(found: dict[str, Any], *among: str) -> list[str]:
    assert set(among) <= set(found)
    return [name for name, value in found.items() if not (value.__doc__ or "").strip()]


def test_every_public_name_has_a_docstring():
    found = dict(one for name in za.__all__ for one in described(name, getattr(za, name)))
    methods = "KVCache.append", "Attention.__call__", "Sequence.fork"
    assert undescribed(found, *methods, "fold", "reference.emulate", "errors.ShapeError") == [] and len(found) > 150


def test_every_public_name_of_zinc_cache_has_a_docstring():
    pytest.importorskip("transformers", reason="transformers is not installed: pip install zinc-attn[transformers]")
    from zinc_attn.integrations.transformers import ZincCache

    assert undescribed(dict(described("ZincCache", ZincCache)), "ZincCache.prepare") == []
