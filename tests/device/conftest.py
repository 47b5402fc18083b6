"""Devices for the tests: every Vulkan device of the machine, SwiftShader among them, on both dispatchers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
from support import DRIVERS, RUNTIMES

import zinc_attn as za
from zinc_attn import probe


def _swiftshader_reason() -> str | None:
    if os.environ.get("ZINC_ATTN_SWIFTSHADER_ICD"):
        return None
    return "SwiftShader is not here: run scripts/test on Debian, which fetches it, or set ZINC_ATTN_SWIFTSHADER_ICD"


def open_device(driver: str, runtime: str) -> za.Device:
    """The machine's best device ("default") or SwiftShader, on a dispatcher; skips where it cannot be had."""
    if runtime == "kompute" and importlib.util.find_spec("kp") is None:
        pytest.skip("kp is not installed: scripts/run builds it")
    reason = _swiftshader_reason() if driver == "swiftshader" else None
    if reason:
        pytest.skip(reason)
    if driver == "swiftshader":
        return za.Device.open("SwiftShader", runtime=runtime)
    others = [d for d in za.list_devices() if "SwiftShader" not in d.name]
    if not others:
        pytest.skip("SwiftShader is the only Vulkan device")
    best = probe.choose(others, os.environ.get("ZINC_ATTN_DEVICE"))
    return za.Device.open(best.index, runtime=runtime)


@pytest.fixture(scope="session", params=RUNTIMES)
def device(request: pytest.FixtureRequest) -> Iterator[za.Device]:
    """The machine's best device, on each dispatcher."""
    with open_device("default", request.param) as opened:
        yield opened


@pytest.fixture(scope="session", params=DRIVERS, ids="-".join)
def any_device(request: pytest.FixtureRequest) -> Iterator[za.Device]:
    """Every driver on every dispatcher."""
    with open_device(*request.param) as opened:
        yield opened
