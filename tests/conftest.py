"""Shared by host and device tests: seeded inputs, and NumPy that raises where a value would go wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

_swiftshader = os.environ.get("ZINC_ATTN_SWIFTSHADER_ICD")
if _swiftshader:  # beside the system's drivers; read by the loader when the first instance is made
    os.environ["VK_ADD_DRIVER_FILES"] = _swiftshader


@pytest.fixture(autouse=True)
def _numpy_raises() -> Iterator[None]:
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)
