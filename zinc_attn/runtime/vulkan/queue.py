"""The compute queue: one submission at a time, and how the queue recovers from a failed submission."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from ...errors import DeviceLostError, ZincAttnError
from ..compiling import LONG_S, tell
from .device import LogicalDevice, Undo

WAIT_NS: Final = 200_000_000  # Ctrl-C is seen between two waits of this length
SETTLE_S: Final = 2.0  # how long a failed submission is waited for
_NOT_READY: Final = 1  # VK_NOT_READY
_TIMEOUT: Final = 2  # VK_TIMEOUT
_DEVICE_LOST: Final = -4  # VK_ERROR_DEVICE_LOST


class ComputeQueue:
    """The queue with its one fence.

    in_flight: a submission may be running, since no wait showed its end; started: ``start`` has made the submission,
    and no wait for its fence has begun. cold: names of kernels in flight that have not run before.
    """

    def __init__(self, device: LogicalDevice) -> None:
        self._device = device
        self.in_flight = self.started = False
        self.cold: set[str] = set()
        lib, handle, null = device.lib, device.handle, device.null
        # The hot path calls the driver's own entry points.
        self._queue_submit = device.entry("vkQueueSubmit")
        self.wait_fences = device.entry("vkWaitForFences")
        self.reset_fences = device.entry("vkResetFences")
        self._fences = fences = device.vk.array("VkFence", [null])
        device.undo.append(lambda: lib.vkDestroyFence(handle, fences[0], null))
        self._replace_fence()

    def send(self, recordings: Sequence[Any], fence: Any) -> int:
        """Submit VkSubmitInfos, in order, and signal ``fence`` at their end: the VkResult."""
        count = len(recordings)
        infos = recordings[0] if count == 1 else self._device.vk.array("VkSubmitInfo", recordings)
        return int(self._queue_submit(self._device.queue, count, infos, fence))

    def start(self, recordings: Sequence[Any]) -> None:
        """``send`` the recordings. No submission may be in flight."""
        self.in_flight = True
        try:
            result = self.send(recordings, self._fence)
        except BaseException:  # an interrupt hides whether the submission was made
            self.settle()
            raise
        if result:
            self._fail(result)
        self.started = True

    def finish(self) -> None:
        """Wait for the submission in flight."""
        if not self.started:  # an interrupt came before ``start`` had ended
            if self.in_flight:
                self.settle()
            return
        self.started = False  # from here on the fence may be reset, and only ``settle`` helps after an interrupt
        handle, result, waited = self._device.handle, _TIMEOUT, 0
        try:
            while result == _TIMEOUT:
                result, waited = self.wait_fences(handle, 1, self._fences, 1, WAIT_NS), waited + WAIT_NS
                if self.cold and (result != _TIMEOUT or waited >= LONG_S * 1e9):
                    self._warmed(result == _TIMEOUT)
            result = result or self.reset_fences(handle, 1, self._fences)
        except BaseException:  # an interrupt hides whether the fence was reset
            self.settle()
            raise
        if result:
            self._fail(result)
        self.in_flight = False

    def _warmed(self, long: bool) -> None:
        """Forget the cold kernels. long: the wait was long, since lavapipe compiles kernels in their first run."""
        names, self.cold = self.cold, set()
        if long:
            tell(self._device.info, names)

    def _fail(self, result: int) -> None:
        device = self._device
        self.settle()
        if device.lost and result != _DEVICE_LOST:
            text = device.vk.error(result, f"a submission on {device.info.name}")
            raise DeviceLostError(f"{text}, and the queue could not be made idle; open a new Device")
        device.check(result, "a submission")

    def settle(self) -> None:
        """Make the queue idle and the fence new, after a failed submission, wait or reset.

        If either fails the device is lost; ``in_flight`` says whether the submission may still run.
        """
        self.started = False
        idle = self.is_idle()
        renewed = idle and self._renew_fence()
        self._device.lost = self._device.lost or not renewed
        self.in_flight = not idle

    def is_idle(self) -> bool:
        """Whether something shows, within SETTLE_S, that no submission runs.

        vkQueueWaitIdle and vkDeviceWaitIdle return in finite time also on a lost device.
        """
        lib, handle = self._device.lib, self._device.handle
        if not lib.vkQueueWaitIdle(self._device.queue) or not lib.vkDeviceWaitIdle(handle):
            return True
        self._device.lost = True  # a device of which neither wait works is not used again, whatever the fence says
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            if not self.wait_fences(handle, 1, self._fences, 1, WAIT_NS // 10):
                return True
            if not lib.vkGetFenceStatus(handle, self._fence) or not lib.vkQueueWaitIdle(self._device.queue):
                return True
            time.sleep(0.01)  # a wait that fails returns at once
        # The specification: after a wait has returned VK_ERROR_DEVICE_LOST, no object of the device is in use.
        return bool(lib.vkDeviceWaitIdle(handle) == _DEVICE_LOST)

    def _renew_fence(self) -> bool:
        """Make the fence known to be unsignalled, or put a new one in its place, on an idle queue; False: neither."""
        handle = self._device.handle
        was_reset = not self.reset_fences(handle, 1, self._fences)
        if was_reset and self._device.lib.vkGetFenceStatus(handle, self._fence) == _NOT_READY:
            return True
        with suppress(ZincAttnError):
            self._replace_fence()
            return True
        return False

    def _replace_fence(self) -> None:
        device = self._device
        fence = device.create(Undo(), "Fence", device.vk.struct("VkFenceCreateInfo"))
        device.lib.vkDestroyFence(device.handle, self._fences[0], device.null)
        self._fence = self._fences[0] = fence
