"""Devices for the tests: every Vulkan device of the machine, SwiftShader among them, on the dispatchers that matter."""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from support import CPU_NATIVE, DRIVERS, FULL, GFX1201, NATIVE, RUNTIMES, needs_matrix_units, open_device

import zinc_attn as za
from zinc_attn.runtime import devices as machine
from zinc_attn.runtime.kompute import KomputeRuntime
from zinc_attn.runtime.vulkan import VulkanRuntime


@pytest.fixture(scope="session")
def device_of() -> Iterator[Callable[[str, str], za.Device]]:
    """A device by driver and dispatcher, opened once for all tests of this process: it keeps what it has compiled."""
    with ExitStack() as stack:
        yield cache(lambda driver, runtime: stack.enter_context(open_device(driver, runtime)))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest, device_of: Callable[[str, str], za.Device]) -> za.Device:
    """The machine's best device, on the dispatchers that ``pytest_generate_tests`` names, or the processor."""
    return device_of("cpu" if request.param == "cpu" else "default", request.param)


@pytest.fixture(scope="session")
def any_device(request: pytest.FixtureRequest, device_of: Callable[[str, str], za.Device]) -> za.Device:
    """Every driver, on the dispatchers that ``pytest_generate_tests`` names."""
    return device_of(*request.param)


@pytest.fixture
def matrix_device(device: za.Device) -> za.Device:
    """``device`` where it, the dispatcher and the package have matrix units; lavapipe has them from Mesa 26 on."""
    needs_matrix_units(device)
    return device


@pytest.fixture(scope="session")
def best_device_index() -> int | None:
    """The index of the machine's best device other than SwiftShader; None where there is no other."""
    others = [d for d in za.list_devices() if "SwiftShader" not in d.name and not d.native]
    return machine.choose(others).index if others else None


@pytest.fixture(autouse=True)
def _default_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, best_device_index: int | None
) -> None:
    """A test that names no device runs on the machine's best one, in this process and in those that a test starts.

    SwiftShader may be the first of several CPU devices, and keeps no compiled code: every process, and every device
    that is opened, would compile its kernels anew. Tests of SwiftShader name it.
    """
    if on_the_processor(request.module, request.node):
        monkeypatch.setenv("ZINC_ATTN_DEVICE", "cpu")
    elif best_device_index is not None and "ZINC_ATTN_DEVICE" not in os.environ:
        monkeypatch.setenv("ZINC_ATTN_DEVICE", str(best_device_index))


@pytest.fixture(params=RUNTIMES)
def dispatcher_class(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> type[VulkanRuntime]:
    """Each dispatcher itself, with a pipeline cache of its own."""
    monkeypatch.setenv("ZINC_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    if request.param == "vulkan":
        return VulkanRuntime
    pytest.importorskip("kp", reason="kp is not installed: scripts/build_kp.sh builds it")
    return KomputeRuntime


@pytest.fixture
def runtime(dispatcher_class: type[VulkanRuntime]) -> Iterator[VulkanRuntime]:
    """An open runtime of each dispatcher."""
    made = dispatcher_class(machine.choose(machine.list_devices()))
    yield made
    made.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes on one thread: small models are faster that way, and a busy machine does not slow them down."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def models_may_attend(one_thread: None) -> Iterator[None]:
    """Models of transformers may name attention "zinc"; no gradients."""
    import torch

    from zinc_attn.integrations import transformers as hf

    hf.register()
    with torch.no_grad():
        yield


def on_the_processor(module: object, test: pytest.Item) -> bool:
    """Whether a test that is not told a device has the processor: its file says NATIVE, and no mark is of drivers."""
    marked = any(test.get_closest_marker(name) for name in ("both_dispatchers", "of_drivers"))
    return NATIVE and getattr(module, "NATIVE", None) is True and not marked and not FULL


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Plain Vulkan for every test, and Kompute for those that are marked ``both_dispatchers``; with --full for all.

    The mark is for tests of what the dispatchers do differently: order, memory, errors, recordings. A file whose others
    never differ, being far from the device, says ONE_DISPATCHER = True.
    Native code of the processor runs all that are not marked ``of_drivers``.
    A file that says NATIVE = True, whose tests are of what no driver sees, runs on the processor alone but for these.
    One that says PROCESSOR_TOO = True runs on a Vulkan device and on the processor.
    A file that says EXECUTED = True also runs on gfx1201's machine code, interpreted.
    """
    every = FULL and not getattr(metafunc.module, "ONE_DISPATCHER", False)
    both = every or metafunc.definition.get_closest_marker("both_dispatchers") is not None
    parametrized = {name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark.args[0])}
    if "device" in metafunc.fixturenames and "device" not in parametrized:
        runtimes = [runtime for runtime in RUNTIMES if both or runtime == "vulkan"]
        too = ["cpu"] if NATIVE and getattr(metafunc.module, "PROCESSOR_TOO", False) else []
        runtimes = ["cpu"] if on_the_processor(metafunc.module, metafunc.definition) else [*runtimes, *too]
        metafunc.parametrize("device", runtimes, indirect=True, scope="session")
    if "any_device" in metafunc.fixturenames and "any_device" not in parametrized:
        drivers = [driver for driver in DRIVERS if both or driver[1] == "vulkan"]
        drivers += [] if metafunc.definition.get_closest_marker("of_drivers") else [CPU_NATIVE]
        drivers += [GFX1201] if getattr(metafunc.module, "EXECUTED", False) else []
        metafunc.parametrize("any_device", drivers, indirect=True, ids="-".join, scope="session")


def words_of(item: pytest.Item) -> Sequence[str] | None:
    """Words of cases that a test marked ``one_driver`` has on its driver; None where it has all of them there."""
    mark = item.get_closest_marker("one_driver")
    driver = next((name for name in ("swiftshader", "default") if name in item.name), "")
    return mark and {"swiftshader": mark.args}.get(driver, mark.kwargs.get(driver))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """UsageError: a word of a mark ``one_driver`` is in the name of no case, so that it would keep none."""
    report = yield
    cases: dict[tuple[str, str], list[bool]] = {}
    for item in report.result if isinstance(collector, pytest.Module) and not FULL else ():
        for word in words_of(item) or () if isinstance(item, pytest.Function) else ():
            cases.setdefault((item.originalname, word), []).append(word in item.name)
    for (name, word), found in cases.items():
        if not any(found):
            raise pytest.UsageError(f"{collector.nodeid}::{name}: one_driver has {word!r}, which is in no case's name")
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --full SwiftShader leaves out tests marked ``one_driver`` but for cases with a word of the mark's.

    It keeps no compiled code: each pipeline takes about two seconds. The words choose cases that differ in the kernel's
    arithmetic or barriers; the processor and gfx1201's machine code have all cases, and so has lavapipe unless
    ``default`` has words for it.
    """
    words = {item: None if FULL else words_of(item) for item in items}
    kept = [item for item in items if words[item] is None or any(word in item.name for word in words[item])]
    config.hook.pytest_deselected(items=[*{*items} - {*kept}])
    items[:] = kept


def _names(names: str | Sequence[str]) -> Sequence[str]:
    return names.replace(",", " ").split() if isinstance(names, str) else names
