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


@pytest.hookimpl(trylast=True)  # behind pytest's own order by device
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test first, so that the other process has something to do beside it."""
    items.sort(key=lambda item: item.path.name != "test_validation.py")
