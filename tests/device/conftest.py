"""Devices for the tests: every Vulkan device of the machine, SwiftShader among them, on both dispatchers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import DRIVERS, RUNTIMES, open_device

import zinc_attn as za


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
