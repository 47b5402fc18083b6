"""The protocol between this package and a dispatcher. ``kompute`` and ``vulkan`` implement it; nothing else does.

A runtime makes buffers and kernels, records lists of dispatches once, and replays them. It knows nothing of
attention. All data are uint32 words; every method may raise DeviceMemoryError, DeviceLostError or ClosedError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentError, ClosedError, DeviceMemoryError, ForkedProcessError, LimitError
from .kernels import KernelDecl
from .shapes import check_int

Words = NDArray[np.uint32]


@dataclass(frozen=True)
class DeviceInfo:
    """Facts of one Vulkan device. compute_units is the driver's count, or the CPU's threads on a CPU device."""

    index: int  # in the loader's enumeration order
    name: str
    kind: str  # "discrete", "integrated", "virtual", "cpu" or "other"
    vendor: str
    driver: str  # driver name and version
    api_version: str
    uuid: str  # hexadecimal
    compute_units: int
    compute_units_source: str  # which query gave compute_units, or "assumed"
    subgroup_size: int
    memory_bytes: int  # largest device-local heap
    max_buffer_bytes: int  # maxStorageBufferRange
    max_workgroups: tuple[int, int, int]
    timestamp_period_ns: float  # 0 where the compute queue has no timestamps


class Use(Enum):
    """What a buffer is for; a runtime picks memory by it."""

    INPUT = "input"  # small; written by the host before a recording is submitted, read by kernels
    OUTPUT = "output"  # small; written by kernels, read by the host afterwards
    DATA = "data"  # large; uploaded now and then, read by kernels
    SCRATCH = "scratch"  # written and read by kernels within a recording
    CACHE = "cache"  # device memory only, large; written and read by kernels, kept between recordings


class Buffer(Protocol):
    """A storage buffer of ``nbytes`` bytes (a multiple of 4)."""

    @property
    def nbytes(self) -> int: ...

    @property
    def use(self) -> Use: ...

    def close(self) -> None: ...


class Kernel(Protocol):
    """A compute pipeline: one SPIR-V module with its specialisation constants fixed."""

    @property
    def decl(self) -> KernelDecl: ...


@dataclass(frozen=True)
class Dispatch:
    """One kernel launch: ``buffers`` in binding order, ``groups`` workgroups in x, y, z."""

    kernel: Kernel
    buffers: tuple[Buffer, ...]
    groups: tuple[int, int, int]


class Recording(Protocol):
    """A list of dispatches that can be submitted any number of times."""

    def close(self) -> None: ...


class Runtime(Protocol):
    """One dispatcher on one device."""

    @property
    def name(self) -> str: ...

    @property
    def info(self) -> DeviceInfo: ...

    def buffer(self, nbytes: int, use: Use) -> Buffer:
        """A new buffer. LimitError beyond max_buffer_bytes, DeviceMemoryError when there is no room."""

    def write(self, buffer: Buffer, data: Words, offset: int = 0) -> None:
        """Copy ``data`` to the buffer from word ``offset``. INPUT: takes effect at the next submission; DATA: now.

        INPUT writes cost no submission. DATA writes may make one, and so may OUTPUT writes (a test poisons with them).
        """

    def read(self, buffer: Buffer) -> Words:
        """The words of an OUTPUT buffer as the last finished submission left them (a copy)."""

    def kernel(self, decl: KernelDecl, spirv: bytes, spec: Sequence[int]) -> Kernel:
        """A pipeline; ``spec`` gives decl.spec's uint32 values in order. Compiles here or at the first run."""

    def record(self, steps: Sequence[Dispatch], timestamps: bool = False) -> Recording:
        """Record ``steps`` in order. A step sees what earlier steps wrote (by the kernels' declared access).

        INPUT buffers among the steps' buffers are made current first, OUTPUT buffers can be read after wait().
        """

    def run(self, recording: Recording) -> None:
        """Submit, and wait until it has finished."""

    def timings(self, recording: Recording) -> list[tuple[float, float]]:
        """(begin, end) seconds of every step of the last run, from one arbitrary zero; recorded with timestamps."""

    def empty_submit(self) -> None:
        """Submit nothing and wait: the floor of a call's host time."""

    def close(self) -> None:
        """Destroy everything made by this runtime. Later calls raise ClosedError."""


# --- refusals that both dispatchers make -------------------------------------------------------------------


def check_nbytes(nbytes: int, info: DeviceInfo, limit: int) -> int:
    """``nbytes`` if one buffer can have that size: a positive multiple of 4 up to ``limit``."""
    nbytes = check_int("nbytes", nbytes, 1)
    if nbytes % 4:
        raise ArgumentError(f"nbytes: got {nbytes}, expected a multiple of 4")
    if nbytes > limit:
        raise LimitError(
            f"buffer: {nbytes:,} bytes are needed, {info.name} takes at most {limit:,} in one storage buffer; "
            "use a shorter context or a smaller dtype"
        )
    return nbytes


def check_step(at: int, step: Dispatch, info: DeviceInfo) -> None:
    """Refuse a step whose buffers are not the kernel's bindings, or whose grid the device does not take."""
    decl = step.kernel.decl
    if len(step.buffers) != len(decl.bindings):
        raise ArgumentError(
            f"steps[{at}].buffers: got {len(step.buffers)}, expected the {len(decl.bindings)} of kernel {decl.name}: "
            f"{', '.join(b.name for b in decl.bindings)}"
        )
    for axis, count, most in zip("xyz", step.groups, info.max_workgroups, strict=True):
        if check_int(f"steps[{at}].groups {axis}", count, 1) > most:
            raise LimitError(
                f"steps[{at}].groups: kernel {decl.name} needs {step.groups}, {info.name} takes at most "
                f"{info.max_workgroups}; use fewer splits or rows"
            )


def no_room(nbytes: int, free: int, info: DeviceInfo) -> DeviceMemoryError:
    """The error of an allocation that does not fit."""
    return DeviceMemoryError(
        f"buffer: {nbytes:,} bytes are needed, {info.name} has {free:,} free; close other buffers or programs, or ask "
        "for less"
    )


def after_close(info: DeviceInfo) -> ClosedError:
    """The error of a call on a closed device."""
    return ClosedError(f"{info.name}: used after close(); open it again with Device.open()")


def after_fork(info: DeviceInfo) -> ForkedProcessError:
    """The error of a call in a process that did not open the device."""
    return ForkedProcessError(f"{info.name}: opened before fork(); open a Device in the child process")
