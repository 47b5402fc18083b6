"""Shared by host and device tests: seeded inputs, NumPy that raises where a value would go wrong, and who runs what."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import leave_to_their_process
from validated import leave_to_the_layer

_swiftshader = os.environ.get("ZINC_ATTN_SWIFTSHADER_ICD")
if _swiftshader:  # beside the system's drivers; read by the loader when the first instance is made
    os.environ["VK_ADD_DRIVER_FILES"] = _swiftshader


@pytest.fixture(autouse=True)
def _numpy_raises() -> Iterator[None]:
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        yield


@pytest.fixture(autouse=True, scope="module")
def _earlier_objects_stay() -> None:
    """The garbage collector, which tests call often, need not walk over what other files imported, made and left."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)


# The units that take longest, in this order. They begin first, so that no process is left alone with one at the end.
LONGEST = (
    "swiftshader",
    *(f"tests/device/test_{name}.py" for name in ("grid", "validation", "c_engine", "model_files", "ggml", "embed_c")),
)


def work_unit(nodeid: str) -> str:
    """Which tests one process runs together: those of a file, which share kernels, and those of SwiftShader.

    lavapipe's compiled kernels reach another process through Mesa's cache on disk, but only once they are there, and
    two processes that run one file would compile them at the same time. SwiftShader keeps none on disk at all.
    """
    return "swiftshader" if "swiftshader" in nodeid else nodeid.split("::", maxsplit=1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist hands out whole units, the longest ones first. (Its loadgroup needs a pytest before 9.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return work_unit(nodeid)

    config.option.loadscopereorder = False  # the order of the collection, see below
    return Units(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return leave_to_their_process(collection_path, config) or None


@pytest.hookimpl(trylast=True)  # behind pytest's own order, which is by the parameters of session fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The units of LONGEST first, without what runs under the validation layer."""
    leave_to_the_layer(config, items)
    places = {unit: index for index, unit in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(work_unit(item.nodeid), len(places)))
