"""A device opened through one of the dispatchers."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from ..checks import Uncopied, check_int, described, shown
from ..errors import ArgumentError, ClosedError, KernelError, NoVulkanError, RuntimeUnavailableError, ZincAttnError
from ..kernels.declarations import CANONICAL, INTEGER_SUMS, MULTIPLY_ADD, PRIMITIVES, UNITS, KernelDecl
from ..kernels.dispatches import KernelCall
from ..kernels.matrix import matrix_workgroup
from ..planning.arithmetic import Arithmetic
from ..shapes import AttnShape
from . import cpu
from . import devices as machine
from .cpu import CpuRuntime, cpu_info
from .kompute import KomputeRuntime, host_info, load_kp
from .loops import unrolled
from .multiply_add import CONSTANT, Way, find_way, module_for
from .primitives import check_primitives
from .protocol import Buffer, DeviceInfo, Dispatch, Kernel, Recording, Runtime
from .vulkan import VulkanRuntime

SPIRV = Path(__file__).parents[1] / "spirv"
_DISPATCHERS: Final[dict[str, Callable[[DeviceInfo], Runtime]]] = {
    "kompute": KomputeRuntime,
    "vulkan": VulkanRuntime,
    CpuRuntime.name: CpuRuntime,
}
RUNTIMES = tuple(_DISPATCHERS)
_LOG: Final = logging.getLogger("zinc_attn")


def list_devices() -> list[DeviceInfo]:
    """The Vulkan devices of this machine, in the loader's order, and its processor, "cpu".

    NoVulkanError where there is no Vulkan device, and no C++ compiler for the processor's kernels.
    """
    try:
        devices = machine.list_devices()
    except NoVulkanError as error:
        native = cpu_info(0)
        if native.refusal is not None:
            raise NoVulkanError(f"{error}; or, for native code of the processor: {native.refusal}") from error
        return [native]
    return [*devices, cpu_info(len(devices))]


def find_device(device: int | str | None = None, runtime: str | None = None) -> DeviceInfo:
    """The device that ``Device.open`` opens."""
    if device is None and runtime != CpuRuntime.name:
        device = os.environ.get("ZINC_ATTN_DEVICE") or None
    if device is None and asked_runtime(runtime) == CpuRuntime.name:
        device = cpu.NAME
    return machine.choose(list_devices(), device)


def asked_runtime(runtime: str | None) -> str | None:
    """``runtime``, else $ZINC_ATTN_RUNTIME, checked; None where neither is given."""
    asked = (os.environ.get("ZINC_ATTN_RUNTIME") or None) if runtime is None else runtime
    if asked is not None and (not isinstance(asked, str) or asked not in RUNTIMES):
        raise ArgumentError(f"runtime: got {shown(asked)}, expected one of {', '.join(RUNTIMES)}")
    return asked


def runtime_of(info: DeviceInfo, runtime: str | None = None) -> str:
    """The runtime by which ``Device.open`` opens a device. ArgumentError: ``runtime`` is not one of the device's."""
    asked = asked_runtime(runtime)
    if asked is None or (info.native and runtime is None):
        return CpuRuntime.name if info.native else default_runtime()
    if info.native != (asked == CpuRuntime.name):
        other = "" if info.native else ", or name the device cpu"
        raise ArgumentError(f"runtime: got {shown(asked)}, which {info.name} has not; leave it out{other}")
    return asked


def default_runtime() -> str:
    """The dispatcher of a Vulkan device where none is named."""
    try:
        load_kp()
    except RuntimeUnavailableError:
        return "vulkan"
    return "kompute"


class QueuedRecordings:
    """Recordings of one submission of a ``together`` block, submitted by ``send``, or before a result is read."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._recordings: list[Recording] = []
        self._sent = False
        self._failure: Callable[[], ZincAttnError] | None = None

    def add(self, recording: Recording) -> None:
        self._recordings.append(recording)

    def send(self) -> None:
        """Submit. A second call does nothing, or raises the error of the first. After Ctrl-C it may be called again."""
        if self._failure is not None:
            raise self._failure()
        if self._recordings and not self._sent:
            try:
                self._runtime.start(*self._recordings)
            except ZincAttnError as error:
                kind, text = type(error), str(error)
                self._failure = lambda: kind(text)  # the error itself holds frames, and what their calls were given
                raise
        self._sent = True

    def drop(self) -> None:
        """Submit nothing after an interrupt before ``send``: other calls may own the recordings' buffers by now."""
        if self.open:
            self._failure = lambda: ClosedError("submit: the together block was interrupted before it was submitted")

    @property
    def open(self) -> bool:
        """Whether it can take more recordings."""
        return not self._sent and self._failure is None


class Device(Uncopied, instead="Device.open opens it in another process"):
    """An open device: a runtime and the kernels compiled on it. Close it, or use it as a context manager.

    ``Device.open`` and ``Device.from_kompute`` make one, with its ``runtime``.
    May be used from several threads (calls are serialized); not after close(), nor in a forked child.
    """

    def __init__(self, runtime: Runtime) -> None:
        """See the class. ArgumentError for a name, which ``Device.open`` takes."""
        if isinstance(runtime, (str, int)):
            raise ArgumentError(f"runtime: got {shown(runtime)}, expected an open one; names are for Device.open")
        self.runtime = runtime
        self.lock = threading.RLock()  # serializes calls that are more than one runtime call
        self._kernels: dict[tuple[str, tuple[int, ...]], Kernel] = {}
        self._way: Way | None = None
        self._checked = False  # whether ``check_primitives`` has passed
        self.together_block: QueuedRecordings | None = None
        self._closed = False

    @classmethod
    def open(cls, device: int | str | None = None, *, runtime: str | None = None) -> Device:
        """Open a device.

        device: None for $ZINC_ATTN_DEVICE or else the best (discrete, integrated, cpu); an index of list_devices(), or
        a piece of the name. "cpu" is the processor itself: the best where there is no Vulkan device, and the default of
        runtime="cpu", its only runtime. runtime: "kompute" or "vulkan", with the same bits; None for
        $ZINC_ATTN_RUNTIME, or else "kompute" where the package kp of scripts/build_kp.sh is installed, else "vulkan".
        DeviceNotFoundError, NoVulkanError, RuntimeUnavailableError.
        """
        named = device is not None or os.environ.get("ZINC_ATTN_DEVICE") or asked_runtime(runtime) == CpuRuntime.name
        info = find_device(device, runtime)
        if info.native and not named:
            _LOG.warning("there is no Vulkan device: the processor runs the kernels, as native code")
        return cls(_DISPATCHERS[runtime_of(info, runtime)](info))

    @classmethod
    def from_kompute(cls, manager: Any, index: int | None = None) -> Device:
        """A Device on a host program's kp.Manager, which is never destroyed. Close it before the manager.

        index: None, or the manager's device in list_devices(); DeviceNotFoundError for another. ClosedError where the
        manager was destroyed. Kernels get no subgroup size and no matrix units, for which kp does not ask. For hosts
        that record this package's operations in their own kp.Sequence (``Attention.record``). Before the first kernel
        the driver is asked for known results, by a submission to the manager's queue.
        """
        if not isinstance(manager, load_kp().Manager):
            raise ArgumentError(f"manager: got {shown(manager)}, expected a kp.Manager")
        index = None if index is None else check_int("index", index, 0)
        return cls(KomputeRuntime(host_info(manager, index), manager))

    @property
    def info(self) -> DeviceInfo:
        """The device's facts."""
        return self.runtime.info

    def kernel(self, decl: KernelDecl, spec: tuple[int, ...]) -> Kernel:
        """The pipeline of a kernel with its specialization constants, made once per device.

        WrongResultError: a float function of the driver has other bits, which the first call checks.
        """
        key = (decl.name, spec)
        if key not in self._kernels:
            if not self._checked:
                check_primitives(self.runtime, load_spirv(PRIMITIVES))
                self._checked = True
            spirv = load_spirv(decl, self.info.kind)
            if decl.fused(spec):
                spirv = module_for(self.fused_way(), spirv)
            self._kernels[key] = self.runtime.kernel(decl, spirv, spec)
        return self._kernels[key]

    def fused_way(self) -> Way:
        """How the device makes the sums of arithmetic "fused": it is asked once. WrongResultError where it cannot."""
        if self._way is None:
            self._way = find_way(self.runtime, load_spirv(MULTIPLY_ADD))
        return self._way

    def arithmetic_constant(self, arithmetic: Arithmetic) -> int:
        """The value of attend's constant for an arithmetic with one result. WrongResultError: see ``fused_way``."""
        if arithmetic == "fused":
            return CONSTANT[self.fused_way()]
        return INTEGER_SUMS if arithmetic == "integer" else CANONICAL

    def attends_by_units(self, shape: AttnShape) -> bool:
        """Whether int8 matrix units attend many rows of arithmetic "integer": a GPU's if the package has their kernel.

        $ZINC_ATTN_UNITS: 1 for a CPU's units, too; 0 for none.
        """
        asked, info = os.environ.get("ZINC_ATTN_UNITS"), self.info
        if not (asked == "1" if asked else info.kind != "cpu") or not (SPIRV / UNITS.file).exists():
            return False
        return matrix_workgroup(shape, info.matrix, info.kind, 1, integer=True) is not None

    def dispatch(self, call: KernelCall, buffers: Mapping[str, Buffer]) -> Dispatch:
        """The dispatch of a kernel call, with the buffers that it names."""
        kernel = self.kernel(call.decl, call.spec)
        return Dispatch(kernel, tuple(buffers[name] for name in call.buffers), call.groups, call.independent)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Calls of ``Attention.submit`` in the block go to the device in one submission when it ends.

        Their caches differ, as those of a draft and a target model do, and no call needs another's result. A result
        that is needed within the block submits the calls until then. Other threads' calls wait for the block's end.
        """
        with self.lock:
            outer, self.together_block = self.together_block, QueuedRecordings(self.runtime)
            try:
                yield
                self.together_block.send()
            except BaseException:
                self.flush()  # the calls before the one that failed are made
                raise
            finally:
                self.together_block.drop()
                self.together_block = outer

    def queue(self) -> QueuedRecordings | None:
        """The recordings that the ``together`` block around the call will submit; None outside a block."""
        if self.together_block is not None and not self.together_block.open:
            self.together_block = QueuedRecordings(self.runtime)
        return self.together_block

    def flush(self) -> None:
        """Submit the recordings of a ``together`` block so far. Reading the results raises the error of a failure."""
        if self.together_block is not None:
            with suppress(ZincAttnError):
                self.together_block.send()

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def close(self) -> None:
        """Free everything on the device. Harmless when repeated."""
        self._closed = True
        self._kernels.clear()
        self.runtime.close()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return described(self, lambda: f"{self.info.name!r}, runtime={self.runtime.name!r}{', closed' * self._closed}")


def load_spirv(decl: KernelDecl, kind: str = "cpu") -> bytes:
    """The SPIR-V of a kernel for a kind of device; a GPU's has its loops unrolled. KernelError: it was not built."""
    path = SPIRV / decl.file
    if not path.exists():
        if why := build_record().get("missing", {}).get(decl.name):
            raise KernelError(f"kernel {decl.name}: the package was built without it: {why}; use a newer glslang")
        raise KernelError(f"{path} is missing; build the SPIR-V with scripts/build_shaders.py, or install the wheel")
    return path.read_bytes() if kind == "cpu" else unrolled(path.read_bytes())


def build_record() -> dict[str, Any]:
    """The record of the SPIR-V's build: compiler, source and module checksums."""
    path = SPIRV / "build.json"
    if not path.exists():
        raise KernelError(f"{path} is missing; build the SPIR-V with scripts/build_shaders.py, or install the wheel")
    record: dict[str, Any] = json.loads(path.read_text())
    return record
