"""The plain Vulkan dispatcher: dependencies, memory, refusals, failures, and that nothing is left behind."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest

from zinc_attn.errors import (
    ArgumentError,
    ClosedError,
    DeviceLostError,
    DeviceMemoryError,
    DeviceNotFoundError,
    DTypeError,
    ForkedProcessError,
    KernelError,
    LimitError,
    NoVulkanError,
    ZincAttnError,
)
from zinc_attn.kernels.declarations import Binding, KernelDecl
from zinc_attn.runtime import devices as machine
from zinc_attn.runtime import loader as libvulkan
from zinc_attn.runtime.protocol import Dispatch, Use
from zinc_attn.runtime.vulkan import VulkanKernel, VulkanRuntime, memory, pipeline_cache, pipelines
from zinc_attn.runtime.vulkan import runtime as dispatcher
from zinc_attn.runtime.vulkan.commands import Commands
from zinc_attn.runtime.vulkan.pipelines import local_size_x

if shutil.which("glslangValidator") is None:
    pytest.skip("glslangValidator is not installed", allow_module_level=True)

HEAD = """#version 450
layout(local_size_x = 32) in;
layout(constant_id = 0) const uint C = 0;
layout(binding = 0) buffer A { uint a[]; };
layout(binding = 1) buffer B { uint b[]; };
"""
SOURCES = {
    "double": "void main() { uint i = gl_GlobalInvocationID.x; b[i] = a[i] * 2 + C; }",
    # reads what other workgroups of the step before wrote
    "reverse": "void main() { uint i = gl_GlobalInvocationID.x; b[i] = a[a.length() - 1 - i] + C; }",
    "update": "void main() { uint i = gl_GlobalInvocationID.x; b[i] = b[i] * 3 + a[i] + C; }",
    "spin": """void main() {
        uint i = gl_GlobalInvocationID.x, x = a[i];
        for (uint n = 0; n < C; n++) x = x * 1664525u + (x >> 7);
        b[i] = x;
    }""",
}
READ_WRITE = (Binding("a", "read"), Binding("b", "write"))
WORDS = 1 << 14
GROUPS = (WORDS // 32, 1, 1)
MIB = 1 << 20


@pytest.fixture(scope="session")
def spirv(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("spirv")
    made = {}
    for name, body in SOURCES.items():
        source, target = folder / f"{name}.comp", folder / f"{name}.spv"
        source.write_text(HEAD + body)
        command = ["glslangValidator", "--target-env", "vulkan1.1", "-V", str(source), "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True)
        made[name] = target.read_bytes()
    return made


@pytest.fixture(scope="session")
def info() -> Any:
    return machine.choose(machine.list_devices())


@pytest.fixture
def runtime(info: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VulkanRuntime]:
    monkeypatch.setenv("ZINC_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    made = VulkanRuntime(info)
    yield made
    made.close()


@pytest.fixture
def kernel(runtime: VulkanRuntime, spirv: dict[str, bytes]) -> Callable[..., VulkanKernel]:
    return lambda name, c=0: runtime.kernel(KernelDecl(name, "", READ_WRITE, ("C",)), spirv[name], [c])


class FailingLibrary:
    """libvulkan, of which one function returns a chosen VkResult and does nothing."""

    def __init__(self, lib: Any, function: str, result: int) -> None:
        self._lib, self._function, self._result = lib, function, result

    def __getattr__(self, name: str) -> Any:
        return (lambda *args: self._result) if name == self._function else getattr(self._lib, name)


def words(seed: int, count: int = WORDS) -> Any:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def buffers(runtime: VulkanRuntime, *uses: Use, nbytes: int = 4 * WORDS) -> list[Any]:
    return [runtime.buffer(nbytes, use) for use in uses]


def works(runtime: VulkanRuntime, kernel: VulkanKernel) -> None:
    """``kernel`` doubles and adds 5."""
    x, out = buffers(runtime, Use.INPUT, Use.OUTPUT)
    data = words(99)
    runtime.write(x, data)
    runtime.run(runtime.record([Dispatch(kernel, (x, out), GROUPS)]))
    np.testing.assert_array_equal(runtime.read(out), data * 2 + 5)


# --- what it computes --------------------------------------------------------------------------------------


def test_dependent_steps_replayed(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel]) -> None:
    x, scratch, out = buffers(runtime, Use.INPUT, Use.SCRATCH, Use.OUTPUT)
    steps = [
        Dispatch(kernel("double", 5), (x, scratch), GROUPS),
        Dispatch(kernel("reverse", 7), (scratch, out), GROUPS),
    ]
    recording = runtime.record(steps)
    for seed in range(200):
        data = words(seed)
        runtime.write(x, data)
        runtime.run(recording)
        np.testing.assert_array_equal(runtime.read(out), (data * 2 + 5)[::-1] + 7)


def test_write_after_read_and_after_write(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel]) -> None:
    x, y, scratch, first, second = buffers(runtime, Use.INPUT, Use.INPUT, Use.SCRATCH, Use.OUTPUT, Use.OUTPUT)
    double, reverse, update = kernel("double"), kernel("reverse"), kernel("update", 1)
    pairs = [
        (double, (x, scratch)),
        (reverse, (scratch, first)),  # reads what is overwritten next
        (double, (y, scratch)),
        (update, (x, scratch)),
        (update, (y, scratch)),
        (reverse, (scratch, second)),
    ]
    recording = runtime.record([Dispatch(k, b, GROUPS) for k, b in pairs])
    for seed in range(50):
        a, b = words(seed), words(seed + 1000)
        runtime.write(x, a)
        runtime.write(y, b)
        runtime.run(recording)
        np.testing.assert_array_equal(runtime.read(first), (a * 2)[::-1])
        np.testing.assert_array_equal(runtime.read(second), ((b * 2 * 3 + a + 1) * 3 + b + 1)[::-1])


@pytest.mark.parametrize(
    ("pairs", "barriers"),
    [
        ("ab", 1),  # one step: the barrier at the end alone
        ("ab ac", 1),  # two readers
        ("ab bc", 2),  # read after write
        ("ab cb", 2),  # write after write
        ("ab ca", 2),  # write after read
        ("ab bc ad cd", 3),
        ("ab ac cd bd", 3),  # one barrier orders both writes before it; then b -> d follows c -> d
        ("", 1),
    ],
)
def test_barriers(
    runtime: VulkanRuntime,
    kernel: Callable[..., VulkanKernel],
    monkeypatch: pytest.MonkeyPatch,
    pairs: str,
    barriers: int,
) -> None:
    bound = dict(zip("abcd", buffers(runtime, *[Use.SCRATCH] * 4), strict=True))
    double = kernel("double")
    count = []
    real = Commands.barrier
    monkeypatch.setattr(Commands, "barrier", lambda *args: (count.append(1), real(*args)))
    recording = runtime.record([Dispatch(double, tuple(bound[c] for c in p), GROUPS) for p in pairs.split()])
    runtime.run(recording)
    assert len(count) == barriers


def test_scratch_lasts_between_submissions(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel]) -> None:
    x, scratch, out = buffers(runtime, Use.INPUT, Use.SCRATCH, Use.OUTPUT)
    fill = runtime.record([Dispatch(kernel("double"), (x, scratch), GROUPS)])
    take = runtime.record([Dispatch(kernel("reverse"), (scratch, out), GROUPS)])
    for seed in range(50):
        runtime.write(x, data := words(seed))
        runtime.run(fill)
        runtime.run(take)
        np.testing.assert_array_equal(runtime.read(out), (data * 2)[::-1])


@pytest.mark.parametrize("staged", [False, True])
def test_data_upload(
    runtime: VulkanRuntime,
    kernel: Callable[..., VulkanKernel],
    monkeypatch: pytest.MonkeyPatch,
    staged: bool,
) -> None:
    if staged:  # as on a card whose memory the host cannot map
        monkeypatch.setattr(dispatcher, "STAGING_BYTES", 1 << 14)
        monkeypatch.setitem(memory._WISHES, Use.DATA, (memory.Wish(1, False),))
    data_buffer, out = buffers(runtime, Use.DATA, Use.OUTPUT)
    recording = runtime.record([Dispatch(kernel("double"), (data_buffer, out), GROUPS)])
    expected = words(1)
    runtime.write(data_buffer, expected)
    for offset, count in ((0, WORDS), (3, 1), (100, 9000), (WORDS - 1, 1), (WORDS, 0), (0, 4096), (5, 4097)):
        part = words(offset + count, count)
        runtime.write(data_buffer, part, offset)
        expected[offset : offset + count] = part
        runtime.run(recording)
        np.testing.assert_array_equal(runtime.read(out), expected * 2)
    if staged:
        assert data_buffer.view is None


def test_large_upload_in_real_chunks(
    runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(memory._WISHES, Use.DATA, (memory.Wish(1, False),))
    count = dispatcher.STAGING_BYTES // 4 * 2 + 32
    data_buffer = runtime.buffer(4 * count, Use.DATA)
    out = runtime.buffer(4 * count, Use.OUTPUT)
    runtime.write(data_buffer, data := np.arange(count, dtype=np.uint32))
    runtime.run(runtime.record([Dispatch(kernel("reverse"), (data_buffer, out), (count // 32 // 33, 33, 1))]))
    step = count // 32 // 33 * 32
    np.testing.assert_array_equal(runtime.read(out)[:step], data[::-1][:step])


def test_output_can_be_poisoned(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel]) -> None:
    x, out = buffers(runtime, Use.INPUT, Use.OUTPUT)
    runtime.write(x, words(1))
    runtime.write(out, np.full(WORDS, 0xDEADBEEF, np.uint32))
    runtime.run(runtime.record([Dispatch(kernel("double"), (x, out), (1, 1, 1))]))
    result = runtime.read(out)
    np.testing.assert_array_equal(result[:32], words(1)[:32] * 2)
    assert (result[32:] == 0xDEADBEEF).all()


def test_kernels_are_kept_per_constants(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel]) -> None:
    assert kernel("double", 5) is kernel("double", 5)
    assert kernel("double", 5) is not kernel("double", 6)
    works(runtime, kernel("double", 5))


def test_required_subgroup_size(info: Any, spirv: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (machine, pipelines):
        monkeypatch.setattr(module, "WAVE", info.subgroup_size)  # software drivers offer their own size alone
    runtime = VulkanRuntime(info)
    if not runtime._device.wave32:
        pytest.skip("this device offers no choice of the subgroup size")
    works(runtime, runtime.kernel(KernelDecl("double", "", READ_WRITE, ("C",)), spirv["double"], [5]))
    runtime.close()


def test_local_size(spirv: dict[str, bytes]) -> None:
    assert local_size_x(np.frombuffer(spirv["double"], np.uint32)) == 32
    assert local_size_x(np.zeros(9, np.uint32)) == 1


def test_timestamps(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel]) -> None:
    if not runtime.info.timestamp_period_ns:
        pytest.skip("this device has no timestamps")
    x, scratch, out = buffers(runtime, Use.INPUT, Use.SCRATCH, Use.OUTPUT)
    steps = [
        Dispatch(kernel("spin", 200), (x, scratch), GROUPS),
        Dispatch(kernel("reverse"), (scratch, out), GROUPS),
    ]
    recording = runtime.record(steps, timestamps=True)
    with pytest.raises(ArgumentError, match=r"^recording: it has no timings before its first run, nor after one th"):
        runtime.timings(recording)
    for _ in range(3):
        begin = time.perf_counter()
        runtime.run(recording)
        elapsed = time.perf_counter() - begin
        (b0, e0), (b1, e1) = runtime.timings(recording)
        assert 0.0 == b0 < e0 <= e1 <= elapsed and b0 <= b1 < e1
    plain = runtime.record(steps)
    runtime.run(plain)
    with pytest.raises(ArgumentError, match=r"^recording: it has no timestamps; use record\(steps, timest"):
        runtime.timings(plain)


def test_empty_submit_and_empty_recording(runtime: VulkanRuntime) -> None:
    for _ in range(3):
        runtime.empty_submit()
    recording = runtime.record([], timestamps=True)
    runtime.run(recording)
    assert runtime.name == "vulkan"


def test_threads(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel]) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            double = kernel("double", seed)
            for i in range(30):
                x, out = buffers(runtime, Use.INPUT, Use.OUTPUT)
                data = words(100 * seed + i)
                runtime.write(x, data)
                recording = runtime.record([Dispatch(double, (x, out), GROUPS)])
                runtime.run(recording)
                np.testing.assert_array_equal(runtime.read(out), data * 2 + seed)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, -4, 2, 4.0, True])
def test_buffer_size_refused(runtime: VulkanRuntime, nbytes: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^nbytes: got "):
        runtime.buffer(nbytes, Use.SCRATCH)


def test_buffer_beyond_the_limit(runtime: VulkanRuntime) -> None:
    limit = runtime.info.max_buffer_bytes
    with pytest.raises(LimitError) as caught:
        runtime.buffer(1 << 40, Use.SCRATCH)
    name = runtime.info.name
    text = (
        f"buffer: 1,099,511,627,776 bytes are needed, {name} takes at most {limit:,} in one storage buffer; "
        "use a shorter context or a smaller dtype"
    )
    assert str(caught.value) == text


def test_refusals_of_data(runtime: VulkanRuntime) -> None:
    x, scratch, out = buffers(runtime, Use.INPUT, Use.SCRATCH, Use.OUTPUT)
    with pytest.raises(DTypeError, match=r"^data: got float32, expected uint32 words$"):
        runtime.write(x, np.zeros(4, np.float32))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError) as caught:
        runtime.write(x, words(0), 1)
    assert str(caught.value) == ("data: got shape (16384,) from word 1, expected (n,) within a buffer of 16384 words")
    with pytest.raises(ArgumentError, match=r"^data: got shape \(2, 2\) from word 0"):
        runtime.write(x, np.zeros((2, 2), np.uint32))
    with pytest.raises(ArgumentError, match=r"^data: got shape \(4,\) from word -1"):
        runtime.write(x, np.zeros(4, np.uint32), -1)
    with pytest.raises(ArgumentError, match=r"^buffer: got a scratch buffer, which the host cannot write$"):
        runtime.write(scratch, words(0))
    for other in (x, scratch):
        with pytest.raises(ArgumentError, match=r"^buffer: got a \w+ buffer, expected an output buffer$"):
            runtime.read(other)
    out.close()
    with pytest.raises(ClosedError, match=r"^buffer: the output buffer of 65536 bytes was closed$"):
        runtime.read(out)


def test_refusals_of_recordings(
    runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel], info: Any, spirv: dict[str, bytes]
) -> None:
    x, out = buffers(runtime, Use.INPUT, Use.OUTPUT)
    double = kernel("double")
    before = set(runtime._handles.undo)
    with pytest.raises(ArgumentError) as caught:
        runtime.record([Dispatch(double, (x,), GROUPS)])
    assert str(caught.value) == "steps[0].buffers: got 1, expected the 2 of kernel double: a, b"
    most = runtime.info.max_workgroups
    if most[1] < 1 << 30:
        with pytest.raises(LimitError) as caught_limit:
            runtime.record([Dispatch(double, (x, out), (1, 1 << 30, 1))])
        name = runtime.info.name
        text = (
            f"steps[0].groups: kernel double needs (1, 1073741824, 1), {name} takes at most {most}; "
            "use fewer splits or rows"
        )
        assert str(caught_limit.value) == text
    with pytest.raises(ArgumentError, match=r"^steps\[0\]\.groups z: got 0, expected an int of at least 1$"):
        runtime.record([Dispatch(double, (x, out), (1, 1, 0))])
    other = VulkanRuntime(info)
    with pytest.raises(ArgumentError, match=r"^steps\[0\]\.buffers b: got .* expected a buffer of this"):
        runtime.record([Dispatch(double, (x, other.buffer(64, Use.OUTPUT)), GROUPS)])
    decl = KernelDecl("double", "", READ_WRITE, ("C",))
    foreign = other.kernel(decl, spirv["double"], [0])
    with pytest.raises(ArgumentError, match=r"^steps\[0\]\.kernel: got .* expected a kernel of this runtime"):
        runtime.record([Dispatch(foreign, (x, out), GROUPS)])
    with pytest.raises(ArgumentError, match=r"^recording: got .* expected a recording of this runtime$"):
        runtime.run(other.record([]))
    other.close()
    gc.collect()
    runtime.empty_submit()
    assert set(runtime._handles.undo) == before  # nothing of the refused ones is left


def test_refusals_of_kernels(runtime: VulkanRuntime, spirv: dict[str, bytes]) -> None:
    decl = KernelDecl("double", "", READ_WRITE, ("C",))
    with pytest.raises(ArgumentError, match=r"^spec of kernel double: got 0 values, expected \(C\)$"):
        runtime.kernel(decl, spirv["double"], [])
    with pytest.raises(ArgumentError, match=r"^spec\[0\]: got -1, expected an int from 0 to 4294967295$"):
        runtime.kernel(decl, spirv["double"], [-1])
    for broken in (b"", b"\0" * 64, spirv["double"][:-1]):
        with pytest.raises(KernelError, match=r"^kernel double: \d+ bytes that are no SPIR-V"):
            runtime.kernel(decl, broken, [0])


def test_no_timestamps(info: Any) -> None:
    runtime = VulkanRuntime(dataclasses.replace(info, timestamp_period_ns=0.0))
    with pytest.raises(ArgumentError, match=r"^timestamps: the compute queue of .* has none$"):
        runtime.record([], timestamps=True)
    runtime.close()


def test_device_that_is_gone(info: Any) -> None:
    for changed in (dataclasses.replace(info, uuid="00"), dataclasses.replace(info, index=99)):
        with pytest.raises(DeviceNotFoundError, match=r"^device \d+: .* is not there any more; list again$"):
            VulkanRuntime(changed)


# --- failures ----------------------------------------------------------------------------------------------

FAILURES = [
    ("vkCreateFence", -1, DeviceMemoryError),
    ("vkCreateDevice", -2, DeviceMemoryError),
    ("vkCreateDevice", -3, NoVulkanError),
    ("vkCreateDevice", -4, DeviceLostError),
    ("vkCreateDevice", -10, DeviceMemoryError),
    ("vkCreateInstance", -9, NoVulkanError),
    ("vkEnumeratePhysicalDevices", -3, NoVulkanError),
    ("vkCreateCommandPool", -13, ZincAttnError),
    ("vkCreatePipelineCache", -2, DeviceMemoryError),
]


@pytest.mark.parametrize(("function", "result", "error"), FAILURES)
def test_opening_fails(
    info: Any, monkeypatch: pytest.MonkeyPatch, function: str, result: int, error: type[Exception]
) -> None:
    vk = libvulkan.loader()
    monkeypatch.setattr(vk, "lib", FailingLibrary(vk.lib, function, result))
    with pytest.raises(error, match=f"{function}|listing"):
        VulkanRuntime(info)
    monkeypatch.undo()
    VulkanRuntime(info).close()


@pytest.mark.parametrize(
    ("function", "result"),
    [
        ("vkAllocateMemory", -1),
        ("vkAllocateMemory", -2),
        ("vkAllocateMemory", -10),
        ("vkBindBufferMemory", -2),
        ("vkCreateBuffer", -1),
        ("vkMapMemory", -5),
    ],
)
def test_allocation_fails(
    runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel], function: str, result: int
) -> None:
    lib, before = runtime._device.lib, dict(runtime._handles.undo)
    runtime._device.lib = FailingLibrary(lib, function, result)
    with pytest.raises(DeviceMemoryError):
        runtime.buffer(4096, Use.OUTPUT)
    runtime._device.lib = lib
    assert runtime._handles.undo == before
    works(runtime, kernel("double", 5))


def test_allocation_beyond_the_budget(
    runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = libvulkan.Vulkan.heaps
    few = lambda *args: [heap._replace(free=4096) for heap in real(*args)]  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(libvulkan.Vulkan, "heaps", few)
        runtime.buffer(1024, Use.SCRATCH).close()
        with pytest.raises(DeviceMemoryError) as caught:
            runtime.buffer(MIB, Use.DATA)
    assert str(caught.value) == (
        f"buffer: 1,048,576 bytes are needed, {runtime.info.name} has 4,096 free; "
        "close other buffers or programs, or ask for less"
    )
    works(runtime, kernel("double", 5))


def test_compiling_fails(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel]) -> None:
    lib = runtime._device.lib
    for result, error in ((-3, KernelError), (-13, KernelError), (-2, DeviceMemoryError)):
        runtime._device.lib = FailingLibrary(lib, "vkCreateComputePipelines", result)
        with pytest.raises(error, match=r"^compiling kernel double on "):
            kernel("double", 5)
    runtime._device.lib = lib
    works(runtime, kernel("double", 5))


@pytest.mark.parametrize("function", ["queue_submit", "wait_fences"])
def test_device_lost(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel], info: Any, function: str) -> None:
    x, out = buffers(runtime, Use.INPUT, Use.OUTPUT)
    recording = runtime.record([Dispatch(kernel("double"), (x, out), GROUPS)])
    runtime.run(recording)
    if function == "wait_fences":
        runtime._queue.queue_submit = lambda *args: 0
    setattr(runtime._queue, function, lambda *args: -4)
    with pytest.raises(DeviceLostError, match=r"^a submission on .*: VK_ERROR_DEVICE_LOST; open a new"):
        runtime.run(recording)
    calls: list[Callable[[], object]] = [
        lambda: runtime.run(recording),
        lambda: runtime.read(out),
        lambda: runtime.write(x, words(0)),
        lambda: runtime.buffer(64, Use.INPUT),
        lambda: kernel("reverse"),
        lambda: runtime.record([]),
        lambda: runtime.timings(recording),
        runtime.empty_submit,
    ]
    for call in calls:
        with pytest.raises(DeviceLostError, match=r" was lost earlier; open a new Device$"):
            call()
    recording.close()
    runtime.close()
    again = VulkanRuntime(info)
    again.empty_submit()
    again.close()


def test_submission_without_memory(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel]) -> None:
    double = kernel("double", 5)
    real, runtime._queue.queue_submit = runtime._queue.queue_submit, lambda *args: -1
    with pytest.raises(DeviceMemoryError, match=r"^a submission on .*: VK_ERROR_OUT_OF_HOST_MEMORY$"):
        runtime.empty_submit()
    runtime._queue.queue_submit = real
    works(runtime, double)


def test_interrupt_during_the_wait(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel]) -> None:
    x, out = buffers(runtime, Use.INPUT, Use.OUTPUT)
    runtime.write(x, words(0))
    rounds = 1000
    while True:  # long enough for the signal to arrive within the wait
        recording = runtime.record([Dispatch(kernel("spin", rounds), (x, out), GROUPS)])
        runtime.run(recording)  # a driver may compile in the first run
        begin = time.perf_counter()
        runtime.run(recording)
        if (elapsed := time.perf_counter() - begin) > 0.5:
            break
        rounds = int(rounds * min(10, max(1.5, 0.7 / elapsed)))
    expected = runtime.read(out)
    runtime.write(out, np.zeros(WORDS, np.uint32))
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            runtime.run(recording)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not runtime._queue.in_flight
    np.testing.assert_array_equal(runtime.read(out), expected)  # it finished all the same
    works(runtime, kernel("double", 5))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_interrupt_around_the_submission(
    runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel], moment: str
) -> None:
    double, real = kernel("double", 5), runtime._queue.queue_submit

    def interrupted(*args: Any) -> int:
        if moment == "after":
            real(*args)
        raise KeyboardInterrupt

    runtime._queue.queue_submit = interrupted
    with pytest.raises(KeyboardInterrupt):
        runtime.empty_submit()
    runtime._queue.queue_submit = real
    works(runtime, double)


# --- the end of things -------------------------------------------------------------------------------------


def test_after_close(info: Any, spirv: dict[str, bytes]) -> None:
    runtime = VulkanRuntime(info)
    kernel = runtime.kernel(KernelDecl("double", "", READ_WRITE, ("C",)), spirv["double"], [5])
    x, out = buffers(runtime, Use.INPUT, Use.OUTPUT)
    recording = runtime.record([Dispatch(kernel, (x, out), GROUPS)])
    runtime.close()
    runtime.close()
    for call in (
        lambda: runtime.run(recording),
        lambda: runtime.read(out),
        lambda: runtime.buffer(64, Use.INPUT),
        lambda: runtime.record([]),
        runtime.empty_submit,
    ):
        with pytest.raises(ClosedError, match=r": used after close\(\); open it again with Device.open\(\)$"):
            call()
    recording.close()
    x.close()
    assert x.closed and x.nbytes == 4 * WORDS and x.use is Use.INPUT
    assert runtime.info is info


def test_close_one_by_one(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel]) -> None:
    x, out = buffers(runtime, Use.INPUT, Use.OUTPUT)
    double = kernel("double", 5)
    first = runtime.record([Dispatch(double, (x, out), GROUPS)])
    second = runtime.record([Dispatch(double, (x, out), GROUPS)])
    first.close()
    first.close()
    with pytest.raises(ClosedError, match=r"^recording: it, or a buffer that it uses, was closed$"):
        runtime.run(first)
    runtime.run(second)
    x.close()
    x.close()
    with pytest.raises(ClosedError, match=r"^recording: it, or a buffer that it uses, was closed$"):
        runtime.run(second)
    with pytest.raises(ClosedError, match=r"^steps\[0\]\.buffers a: the input buffer of 65536 bytes was"):
        runtime.record([Dispatch(double, (x, out), GROUPS)])
    out.close()
    assert not runtime._handles.undo
    works(runtime, double)


def test_dropped_objects_are_freed(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel]) -> None:
    works(runtime, kernel("double", 5))
    gc.collect()
    runtime.empty_submit()
    assert not runtime._handles.undo


def test_a_dropped_runtime_is_closed_by_the_next_call(runtime: VulkanRuntime, info: Any) -> None:
    dropped = VulkanRuntime(info)
    handles, buffer = dropped._handles, dropped.buffer(64, Use.DATA)
    del dropped
    gc.collect()
    runtime.empty_submit()
    assert not handles.closed  # its buffer keeps it alive
    del buffer
    gc.collect()
    assert not handles.closed  # no bytecode has run, in which Ctrl-C would be lost
    runtime.empty_submit()
    assert handles.closed and not handles.undo and not handles.device.own


def test_forked_child(runtime: VulkanRuntime, kernel: Callable[..., VulkanKernel]) -> None:
    double = kernel("double", 5)
    x, out = buffers(runtime, Use.INPUT, Use.OUTPUT)
    recording = runtime.record([Dispatch(double, (x, out), GROUPS)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with the driver's threads is the point
        child = os.fork()
    if not child:
        status = 1
        try:
            for call in (
                lambda: runtime.run(recording),
                lambda: runtime.read(out),
                lambda: runtime.write(x, words(0)),
                lambda: runtime.buffer(64, Use.INPUT),
                lambda: kernel("double", 5),
                lambda: runtime.record([]),
                lambda: runtime.timings(recording),
                runtime.empty_submit,
            ):
                try:
                    call()
                except ForkedProcessError:
                    continue
                raise AssertionError
            runtime._device.lib = runtime._device.ffi = None  # closing must not call Vulkan
            recording.close()
            x.close()
            runtime.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    works(runtime, double)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_opening_and_closing_leaves_nothing(info: Any, spirv: dict[str, bytes]) -> None:
    cycles = 1000 if os.environ.get("ZINC_ATTN_TEST_FULL") else 100
    decl = KernelDecl("double", "", READ_WRITE, ("C",))

    def cycle() -> None:
        runtime = VulkanRuntime(info)
        kernel = runtime.kernel(decl, spirv["double"], [5])
        x, out, _ = buffers(runtime, Use.INPUT, Use.OUTPUT, Use.DATA)
        runtime.run(runtime.record([Dispatch(kernel, (x, out), GROUPS)], timestamps=True))
        runtime.close()

    for _ in range(20):
        cycle()
    gc.collect()
    files, before = len(os.listdir("/proc/self/fd")), resident_bytes()
    for _ in range(cycles):
        cycle()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files
    assert resident_bytes() - before < 8 * MIB


# --- the pipeline cache on disk ----------------------------------------------------------------------------


def test_pipeline_cache_folder(info: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ZINC_ATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runtime = VulkanRuntime(info)
    assert runtime._pipelines.cache.file is not None
    assert runtime._pipelines.cache.file.parent == tmp_path / "zinc_attn" / "pipelines"
    runtime.close()


def test_no_pipeline_cache_without_a_home_directory(
    info: Any, spirv: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_entry(uid: int) -> Any:
        raise KeyError(uid)

    for name in ("ZINC_ATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    with monkeypatch.context() as patch:
        patch.setattr(platformdirs, "user_cache_path", lambda *_, **__: Path("~/.cache/zinc_attn"))  # older versions
        assert pipeline_cache._folder() is None
    runtime = VulkanRuntime(info)
    assert runtime._pipelines.cache.file is None
    works(runtime, runtime.kernel(KernelDecl("double", "", READ_WRITE, ("C",)), spirv["double"], [5]))
    runtime.close()


class CachingLibrary:
    """libvulkan with a driver whose pipeline cache holds ``blob``; keeps what it is given at the start."""

    def __init__(self, lib: Any, ffi: Any, blob: bytes) -> None:
        self._lib, self._ffi, self.blob, self.given = lib, ffi, blob, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def vkGetPipelineCacheData(self, device: Any, cache: Any, size: Any, data: Any) -> int:
        if data == self._ffi.NULL:
            size[0] = len(self.blob)
        else:
            self._ffi.memmove(data, self.blob, len(self.blob))
        return 0

    def vkCreatePipelineCache(self, device: Any, info: Any, *rest: Any) -> int:
        self.given = bytes(self._ffi.buffer(info.pInitialData, info.initialDataSize))
        info.initialDataSize = 0
        return int(self._lib.vkCreatePipelineCache(device, info, *rest))


def test_pipeline_cache_round_trip(
    runtime: VulkanRuntime, info: Any, spirv: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the software drivers keep nothing but the 32-byte header
    vk, file = libvulkan.loader(), runtime._pipelines.cache.file
    assert file is not None and not file.exists()
    lib = CachingLibrary(vk.lib, vk.ffi, runtime._pipelines.cache.header + b"first")
    monkeypatch.setattr(vk, "lib", lib)
    decl = KernelDecl("double", "", READ_WRITE, ("C",))
    for found, kept in ((b"", b"first"), (b"first", b"second, longer"), (b"second, longer", b"")):
        lib.blob = runtime._pipelines.cache.header + kept
        again = VulkanRuntime(info)
        assert lib.given == (runtime._pipelines.cache.header + found if found else b"")
        works(again, again.kernel(decl, spirv["double"], [5]))
        again.close()
        assert [p.name for p in file.parent.iterdir()] == [file.name]  # no temporary file is left


@pytest.mark.parametrize("damage", ["garbage", "short", "flipped", "foreign", "folder", "unwritable"])
def test_pipeline_cache_damaged(
    info: Any, spirv: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    monkeypatch.setenv("ZINC_ATTN_CACHE_DIR", str(tmp_path))
    runtime = VulkanRuntime(info)
    file, head = runtime._pipelines.cache.file, runtime._pipelines.cache.header
    assert file is not None
    runtime.close()
    blob = head + bytes(100)
    stored = pipeline_cache._MAGIC + hashlib.sha256(blob).digest() + blob
    if damage == "unwritable":
        (tmp_path / "pipelines").write_text("a file where a folder should be")
    else:
        file.parent.mkdir()
        if damage == "folder":
            file.mkdir()
        else:
            foreign = bytes(32) + bytes(100)
            file.write_bytes(
                {
                    "garbage": b"\xff" * 300,
                    "short": stored[:40],
                    "flipped": stored[:-1] + b"\1",
                    "foreign": pipeline_cache._MAGIC + hashlib.sha256(foreign).digest() + foreign,
                }[damage]
            )
    runtime = VulkanRuntime(info)
    assert runtime._pipelines.cache.digest == b""
    works(runtime, runtime.kernel(KernelDecl("double", "", READ_WRITE, ("C",)), spirv["double"], [5]))
    runtime.close()
