"""Both dispatchers: what they record, their clocks, and what they refuse; attention tests have what they compute."""

import re
import time
from contextlib import closing
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from engine import subgroups_from
from faults import Layer, shim
from little_kernels import GROUPS, best_info, buffers, declared, little, spirv, words, works
from support import RUNTIMES

import zinc_attn as za
from zinc_attn.errors import ArgumentError, ClosedError, DeviceNotFoundError, DTypeError, KernelError, LimitError
from zinc_attn.kernels.declarations import COPY_KERNEL
from zinc_attn.runtime import compiling
from zinc_attn.runtime.device import load_spirv
from zinc_attn.runtime.loader import loader
from zinc_attn.runtime.protocol import Dispatch, Use
from zinc_attn.runtime.vulkan import VulkanRuntime
from zinc_attn.runtime.vulkan.commands import waiting
from zinc_attn.runtime.vulkan.queue import _TIMEOUT as TIMEOUT

# --- what it records ---------------------------------------------------------------------------------------


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
def test_barriers(runtime, pairs, barriers):
    bound = dict(zip("abcd", buffers(runtime, *[Use.SCRATCH] * 4), strict=True))
    steps = [Dispatch(little(runtime), tuple(bound[c] for c in p), GROUPS) for p in pairs.split()]
    assert sum(waiting([runtime._bound(i, step) for i, step in enumerate(steps)])) == barriers - 1
    runtime.run(runtime.record(steps))


def test_required_subgroup_size(dispatcher_class, monkeypatch):
    """Both dispatchers ask for full waves where they are offered."""
    vk = loader()
    monkeypatch.setattr(vk, "lib", vk.ffi.dlopen(str(shim())))
    with subgroups_from(Layer(shim()), 32) as asked, closing(dispatcher_class(best_info())) as runtime:
        works(runtime)
    assert asked == [(1, 1), (32, 2)]


def test_what_compiles_for_long_is_said_once(runtime, monkeypatch, caplog):
    """Before the driver is done, where it compiles a pipeline as it is made, or as it first runs."""
    x, out = buffers(runtime, Use.INPUT, Use.OUTPUT)
    lib, wait, slices = runtime._device.lib, runtime._queue.wait_fences, iter([TIMEOUT] * 12)
    said = f"{runtime.info.name}: waiting for double, which the driver compiles before the first run: once, and for "

    def build(*arguments):
        end = time.monotonic() + 60
        while not caplog.messages and time.monotonic() < end:
            time.sleep(0.001)
        return lib.vkCreateComputePipelines(*arguments)

    monkeypatch.setattr(compiling, "LONG_S", 0.01)
    monkeypatch.setattr(runtime._device, "lib", Mock(wraps=lib, vkCreateComputePipelines=build))
    recording = runtime.record([Dispatch(little(runtime), (x, out), GROUPS)])
    little(runtime)
    assert [message.startswith(said) for message in caplog.messages] == [True]
    caplog.clear()
    runtime._queue.wait_fences = lambda *arguments: next(slices, None) or wait(*arguments)
    runtime.run(recording)
    assert [message.startswith(said) for message in caplog.messages] == [True] and next(slices, None) is None
    slices = iter([TIMEOUT] * 12)
    runtime.run(recording)
    works(runtime, c=0)
    assert len(caplog.messages) == 1 and caplog.records[0].levelname == "WARNING"


def test_timestamps(runtime):
    if not runtime.info.timestamp_period_ns:
        pytest.skip("this device has no timestamps")
    x, scratch, out = buffers(runtime, Use.INPUT, Use.SCRATCH, Use.OUTPUT)
    spin, reverse = little(runtime, "spin", 200), little(runtime, "reverse")
    steps = [Dispatch(spin, (x, scratch), GROUPS), Dispatch(reverse, (scratch, out), GROUPS)]
    recording, plain = runtime.record(steps, timestamps=True), runtime.record(steps)
    with pytest.raises(ArgumentError, match=r"^recording: it has no timings before its first run, nor after one th"):
        runtime.timings(recording)
    for _ in range(3):
        begin = time.perf_counter()
        runtime.run(recording)
        elapsed = time.perf_counter() - begin
        (b0, e0), (b1, e1) = runtime.timings(recording)
        assert 0.0 == b0 < e0 <= e1 <= elapsed and b0 <= b1 < e1
    runtime.run(plain)
    with pytest.raises(ArgumentError, match=r"^recording: it has no timestamps; use record\(steps, timest"):
        runtime.timings(plain)
    runtime.run(runtime.record([], timestamps=True))


# --- what it refuses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", (*RUNTIMES, "cpu"))
def test_what_every_runtime_refuses(name, device_of, best_device_index):
    runtime = device_of("cpu" if name == "cpu" else "default", name).runtime
    with za.Device.open("cpu" if name == "cpu" else best_device_index, runtime=name) as another:
        other, spirv, most = another.runtime, load_spirv(COPY_KERNEL), runtime.info.max_workgroups
        work, k, v, out = (runtime.buffer(256, use) for use in (Use.INPUT, Use.CACHE, Use.CACHE, Use.OUTPUT))
        kernel, foreign = (r.kernel(COPY_KERNEL, spirv, (8, 8)) for r in (runtime, other))
        elsewhere, many = other.buffer(256, Use.CACHE), (1, 1 << 30, 1) if most[1] < 1 << 30 else (1, 1, 1 << 31)

        def recording(*buffers, groups=(1, 1, 1), of=kernel):
            return lambda: runtime.record([Dispatch(of, buffers, groups)])

        def writing(buffer, data, offset=0):
            return lambda: runtime.write(buffer, data, offset)

        limit = f"kernel copy needs {many}, {runtime.info.name} takes at most {most}; use fewer splits or rows"
        room, square = r"expected \(n,\) within a buffer of 64 words", words(0, 64).reshape(2, 32)
        step, alien = r"steps\[0\]\.", r"got .*, expected a {} of this runtime"
        for call, error, text in (
            (writing(work, np.zeros(4, np.float32)), DTypeError, "data: got float32, expected uint32 words"),
            (writing(work, words(0, 64), 1), ArgumentError, rf"data: got shape \(64,\) from word 1, {room}"),
            (writing(work, square), ArgumentError, rf"data: got shape \(2, 32\) from word 0, {room}"),
            (writing(work, words(0, 4), -1), ArgumentError, rf"data: got shape \(4,\) from word -1, {room}"),
            (writing(k, words(0, 4)), ArgumentError, "buffer: got a cache buffer, which the host cannot write"),
            (lambda: runtime.read(k), ArgumentError, "buffer: got a cache buffer, expected an output buffer"),
            (lambda: runtime.read(work), ArgumentError, "buffer: got a input buffer, expected an output buffer"),
            *(
                (
                    lambda nbytes=nbytes: runtime.buffer(nbytes, Use.SCRATCH),
                    ArgumentError,
                    f"nbytes: got {nbytes}, expected an? .*",
                )
                for nbytes in (0, -4, 2, 4.0, True)
            ),
            (recording(work, k), ArgumentError, f"{step}buffers: got 2, expected the 3 of kernel copy: work, k, v"),
            (recording(work, k, v, groups=many), LimitError, f"{step}groups: {re.escape(limit)}"),
            (
                recording(work, k, v, groups=(1, 1, 0)),
                ArgumentError,
                f"{step}groups z: got 0, expected an int of at least 1",
            ),
            (recording(work, k, elsewhere), ArgumentError, f"{step}buffers v: {alien.format('buffer')}"),
            (recording(work, k, v, of=None), ArgumentError, f"{step}kernel: {alien.format('kernel')}"),
            (lambda: runtime.run(other.record([])), ArgumentError, f"recording: {alien.format('recording')}"),
        ):
            with pytest.raises(error, match=f"^{text}$"):
                call()
        if name != "cpu":
            with pytest.raises(ArgumentError, match=r"expected a kernel of this runtime$"):
                recording(work, k, v, of=foreign)()
        out.close()
        with pytest.raises(ClosedError, match=r"^buffer: the output buffer of 256 bytes was closed$"):
            runtime.read(out)


def test_refusals_of_kernels(runtime):
    """One is made once per constants."""
    assert little(runtime, c=5) is little(runtime, c=5) is not little(runtime, c=6)
    good = spirv("double")
    for code, spec, error, text in (
        (good, [], ArgumentError, r"^spec of kernel double: got 0 values, expected \(C\)$"),
        (good, [-1], ArgumentError, r"^spec\[0\]: got -1, expected an int from 0 to 4294967295$"),
        *(
            (bad, [0], KernelError, r"^kernel double: \d+ bytes that are no SPIR-V")
            for bad in (b"", bytes(64), good[:-1])
        ),
    ):
        with pytest.raises(error, match=text):
            runtime.kernel(declared("double"), code, spec)


def test_no_timestamps():
    runtime = VulkanRuntime(replace(best_info(), timestamp_period_ns=0.0))
    with pytest.raises(ArgumentError, match=r"^timestamps: the compute queue of .* has none$"):
        runtime.record([], timestamps=True)
    runtime.close()


@pytest.mark.parametrize("changed", ({"uuid": "00"}, {"index": 99}))
def test_device_that_is_gone(changed):
    with pytest.raises(DeviceNotFoundError, match=r"^device \d+: .* is not there any more; list again$"):
        VulkanRuntime(replace(best_info(), **changed))
