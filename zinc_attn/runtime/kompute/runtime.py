"""The dispatcher through Kompute: plain Vulkan's runtime, whose steps are recorded and submitted as kp sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from ...errors import ArgumentError, ClosedError, DeviceNotFoundError
from ..base import entered
from ..devices import choose, device_info, list_devices
from ..loader import API_1_1, loader
from ..protocol import DeviceInfo, Dispatch, Use
from ..refusals import check_memory_room
from ..vulkan.commands import Commands
from ..vulkan.device import HostDevice
from ..vulkan.handles import VulkanBuffer, VulkanRecording
from ..vulkan.queue import ComputeQueue
from ..vulkan.runtime import VulkanRuntime, register
from .binding import load_kp, typed
from .commands import HostQueue, KomputeCommands


class HostTensor(VulkanBuffer):
    """A kp tensor as a buffer: bound, and freed with the last holder of ``tensor``."""

    tensor: Any
    name: str


class HostRecording(VulkanRecording):
    """Steps in a host program's kp.Sequence. guard: lets the sequence be evaluated while it is ``armed``."""

    guard: Any
    runtime: KomputeRuntime

    @contextmanager
    def armed(self) -> Iterator[None]:
        for tensor in {b for step in self.steps for b in step.buffers if isinstance(b, HostTensor)}:
            self.runtime.check_alive(tensor)
        try:
            self.guard.armed = True
            yield
        finally:
            self.guard.armed = False


class KomputeRuntime(VulkanRuntime):
    """Runtime over a kp.Manager.

    manager: a host program's, on the device that ``info`` describes; it is used and never destroyed. None: a new
    manager over a device that is opened as plain Vulkan opens it.
    """

    name = "kompute"

    def __init__(self, info: DeviceInfo, manager: Any = None) -> None:
        self.kp, self._manager, host = load_kp(), manager, None
        if manager is not None:
            instance, physical, device, queue, family = self.kp.zinc_attn.handles(manager)
            is_open = partial(self.kp.zinc_attn.is_open, manager)
            host = HostDevice(instance, physical, device, queue, family, is_open)
        super().__init__(info, host)

    def _compute_queue(self) -> ComputeQueue:
        return super()._compute_queue() if self._device.host is None else HostQueue(self._device, self.kp)

    def _recorder(self) -> Commands:
        device = self._device
        if device.host is None:
            handles = (device.instance, device.physical, device.handle, device.queue)
            numbers = (int(device.ffi.cast("uintptr_t", handle)) for handle in handles)
            self._manager = self.kp.zinc_attn.manager(*numbers, device.family)
        self._sequences = KomputeCommands(device, self.kp, self._manager)
        return self._sequences

    # --- sequences of a host program ----------------------------------------------------------------------

    @property
    def hosted(self) -> bool:
        return self._device.host is not None

    @entered
    def host_tensor(self, tensor: Any, name: str) -> HostTensor:
        handle, nbytes = self.kp.zinc_attn.buffer(self._manager, tensor)
        if not handle:
            raise ArgumentError(f"{name}: got a kp.Tensor of another kp.Manager, or one that was destroyed")
        if nbytes != 4 * tensor.size():
            raise ArgumentError(
                f"{name}: got a kp.Tensor of {tensor.size()} elements in {nbytes} bytes, expected 4 each"
            )
        buffer = HostTensor(self._handles, self, nbytes, Use.SCRATCH)
        buffer.handle, buffer.tensor, buffer.name = self._device.ffi.cast("VkBuffer", handle), tensor, name
        return buffer

    @entered
    def check_alive(self, bound: HostTensor) -> None:
        """ClosedError where the host has destroyed or rebuilt a tensor that a recording is bound to."""
        handle, _ = self.kp.zinc_attn.buffer(self._manager, bound.tensor)
        if handle != int(self._device.ffi.cast("uintptr_t", bound.handle)):
            raise ClosedError(f"{bound.name}: the kp.Tensor was destroyed or made anew; record the call again")

    @entered
    def host_output(self, nbytes: int) -> HostTensor:
        check_memory_room(self.info, nbytes)
        with typed(self._device.check):
            tensor = self._manager.tensor_t(np.zeros(nbytes // 4, np.uint32), self.kp.TensorTypes.device)
        return self.host_tensor(tensor, "out")

    @entered
    def record_into(self, sequence: Any, steps: Sequence[Dispatch], out: HostTensor) -> HostRecording:
        if why := self.kp.zinc_attn.refusal(self._manager, sequence):
            raise ArgumentError(f"sequence: got a kp.Sequence {why}; expected a new one of the device's kp.Manager")
        recording = HostRecording(self._handles, self, tuple(steps))
        with self._handles.making(recording) as undo:
            bound = [self._bound(i, step) for i, step in enumerate(steps)]
            recording.guard = self._sequences.record_into(sequence, undo, bound, out.tensor)
            undo.append(partial(setattr, recording.guard, "armed", False))  # before anything that it uses is freed
        register(recording, bound)
        return recording


def host_info(manager: Any, index: int | None) -> DeviceInfo:
    """The facts of the device of a host's kp.Manager; DeviceNotFoundError where ``index`` names another."""
    ours, vk = load_kp().zinc_attn, loader()
    if not ours.is_open(manager):
        raise ClosedError("manager: got one that was destroyed, expected an open kp.Manager")
    instance, physical, *_ = ours.handles(manager)
    facts = device_info(vk, vk.ffi.cast("VkInstance", instance), API_1_1, vk.ffi.cast("VkPhysicalDevice", physical), 0)
    listed = list_devices()
    same = [device for device in listed if device.uuid == facts.uuid]
    if index is None:
        return choose(same or listed, same[0].index if same else None)
    if (named := choose(listed, index)) not in same:
        raise DeviceNotFoundError(f"index: got {index}, {named.name}, but the manager's device is {facts.name}")
    return named
