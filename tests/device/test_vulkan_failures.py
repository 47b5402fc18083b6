"""Both dispatchers where the driver fails, Ctrl-C comes or things end: typed errors, and nothing is left."""

import gc
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from little_kernels import GROUPS, WORDS, best_info, buffers, little, words, works
from support import FULL

from zinc_attn.errors import ClosedError, DeviceLostError, DeviceMemoryError, KernelError, NoVulkanError, ZincAttnError
from zinc_attn.runtime import loader as libvulkan
from zinc_attn.runtime.protocol import Dispatch, Use
from zinc_attn.runtime.vulkan import VulkanRuntime
from zinc_attn.runtime.vulkan.queue import _TIMEOUT as TIMEOUT

MIB = 1 << 20


class World:
    """A recording with its buffers, and every call that a runtime which is closed or lost refuses."""

    def __init__(self, runtime):
        self.x, self.out = buffers(runtime, Use.INPUT, Use.OUTPUT)
        self.recording = runtime.record([Dispatch(little(runtime), (self.x, self.out), GROUPS)])
        self.calls = [
            lambda: runtime.run(self.recording),
            lambda: runtime.read(self.out),
            lambda: runtime.write(self.x, words(0)),
            lambda: runtime.buffer(64, Use.INPUT),
            lambda: little(runtime, "reverse"),
            lambda: runtime.record([]),
            lambda: runtime.timings(self.recording),
            runtime.start,
        ]

    def refuses(self, error, text=None):
        for call in self.calls:
            with pytest.raises(error, match=text):
                call()


# --- calls of the driver that fail -------------------------------------------------------------------------


def test_an_error_is_of_its_results_kind():
    """test_faults.py has every call that fails, and what is left then."""
    kinds = {
        DeviceMemoryError: (-1, -2, -5, -10),
        NoVulkanError: (-3, -9),
        DeviceLostError: (-4,),
        ZincAttnError: (-13,),
    }
    for kind, results in kinds.items():
        assert {type(libvulkan.loader().error(result, "a call")) for result in results} == {kind}


def test_a_kernel_that_the_driver_does_not_compile(runtime, monkeypatch):
    before, failing = dict(runtime._handles.undo), {"vkCreateComputePipelines.return_value": -13}
    with monkeypatch.context() as patch, pytest.raises(KernelError, match=r"^compiling kernel double on "):
        patch.setattr(runtime._device, "lib", Mock(wraps=runtime._device.lib, **failing))
        little(runtime, c=5)
    assert runtime._handles.undo == before
    works(runtime)


def test_device_lost(runtime):
    world = World(runtime)
    runtime._queue.wait_fences = lambda *args: -4
    with pytest.raises(DeviceLostError, match=r"^a submission on .*: VK_ERROR_DEVICE_LOST; open a new"):
        runtime.run(world.recording)
    world.refuses(DeviceLostError, r" was lost earlier; open a new Device$")
    world.recording.close()
    runtime.close()
    again = VulkanRuntime(best_info())
    again.run(again.record([]))
    again.close()


def test_interrupt_during_the_wait(runtime):
    """A signal is seen within a second, and the submission has ended all the same."""
    (x, out), wait = buffers(runtime, Use.INPUT, Use.OUTPUT), runtime._queue.wait_fences

    def interrupted(device, count, fences, wait_all, nanoseconds):
        assert nanoseconds < 1e9
        runtime._queue.wait_fences = wait
        os.kill(os.getpid(), signal.SIGINT)
        return TIMEOUT

    recording = runtime.record([Dispatch(little(runtime, "spin", 20000), (x, out), GROUPS)])
    runtime.write(x, words(0))
    runtime.run(recording)
    expected = runtime.read(out)
    runtime.write(out, np.zeros(WORDS, np.uint32))
    runtime._queue.wait_fences = interrupted
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            runtime.run(recording)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not runtime._queue.in_flight
    np.testing.assert_array_equal(runtime.read(out), expected)
    works(runtime)


# --- the end of things -------------------------------------------------------------------------------------


def test_after_close():
    runtime = VulkanRuntime(best_info())
    world = World(runtime)
    runtime.close()
    runtime.close()
    world.refuses(ClosedError, r": used after close\(\); open it again with Device.open\(\)$")
    world.recording.close()
    world.x.close()
    assert world.x.closed and world.x.nbytes == 4 * WORDS and world.x.use is Use.INPUT
    assert runtime.info is best_info()


def test_close_one_by_one(runtime):
    x, out = buffers(runtime, Use.INPUT, Use.OUTPUT)
    step = Dispatch(little(runtime), (x, out), GROUPS)
    first, second = runtime.record([step]), runtime.record([step])
    for closed, others in ((first, [second]), (x, [])):
        closed.close()
        closed.close()
        with pytest.raises(ClosedError, match=r"^recording: it, or a buffer that it uses, was closed$"):
            runtime.run(first if others else second)
        for other in others:
            runtime.run(other)
    with pytest.raises(ClosedError, match=r"^steps\[0\]\.buffers a: the input buffer of 65536 bytes was"):
        runtime.record([step])
    out.close()
    assert not runtime._handles.undo
    works(runtime)


def test_a_dropped_runtime_is_closed_by_the_next_call(runtime):
    dropped = VulkanRuntime(best_info())
    handles, buffer = dropped._handles, dropped.buffer(64, Use.SCRATCH)
    del dropped
    gc.collect()
    runtime.start()
    assert not handles.closed  # its buffer keeps it alive
    del buffer
    gc.collect()
    assert not handles.closed  # no bytecode has run, in which Ctrl-C would be lost
    runtime.start()
    assert handles.closed and not handles.undo and not handles.device.undo


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_opening_and_closing_leaves_nothing():
    def cycles(count):
        for _ in range(count):
            runtime = VulkanRuntime(best_info())
            x, out, _ = buffers(runtime, Use.INPUT, Use.OUTPUT, Use.SCRATCH)
            runtime.run(runtime.record([Dispatch(little(runtime, c=5), (x, out), GROUPS)], timestamps=True))
            runtime.close()
        gc.collect()

    def growth():
        before = resident_bytes()
        cycles(1000 if FULL else 100)
        return resident_bytes() - before

    cycles(20)
    files = len(os.listdir("/proc/self/fd"))
    assert any(growth() < 4 * MIB for _ in range(3))  # an allocator takes memory at some time, a leak each time
    assert len(os.listdir("/proc/self/fd")) <= files
