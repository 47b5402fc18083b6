"""The protocol between this package and a dispatcher. ``kompute``, ``vulkan`` and ``cpu`` implement it.

A runtime makes buffers and kernels, records lists of dispatches once, and replays them, without knowing attention. Data
are uint32 words. Every method may raise DeviceMemoryError, DeviceLostError, ClosedError, or ForkedProcessError.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from ..kernels.declarations import KernelDecl
from ..kernels.device_info import DeviceInfo as DeviceInfo  # noqa: PLC0414  (it is imported from here)
from ..kernels.records import Words


class Use(Enum):
    """The purpose of a buffer, by which a runtime picks its memory."""

    INPUT = "input"  # small; written by the host before a recording is submitted, read by kernels
    OUTPUT = "output"  # small; written by kernels, read by the host afterwards
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
    """A compute pipeline: one SPIR-V module with its specialization constants fixed."""

    @property
    def decl(self) -> KernelDecl: ...


@dataclass(frozen=True)
class Dispatch:
    """One kernel launch: ``buffers`` in binding order, ``groups`` workgroups in x, y, z.

    independent: it writes other parts of the buffers than the dispatch before it, and need not wait for that dispatch.
    """

    kernel: Kernel
    buffers: tuple[Buffer, ...]
    groups: tuple[int, int, int]
    independent: bool = False


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
        """Copy ``data`` to an INPUT or OUTPUT buffer from word ``offset``, where the next submission finds it."""

    def read(self, buffer: Buffer) -> Words:
        """The words of an OUTPUT buffer as the last finished submission left them (a copy)."""

    def peek(self, buffer: Buffer) -> Words:
        """The words of ``read`` where they lie, without a copy: valid until the next ``run``, ``write`` or close."""

    def kernel(self, decl: KernelDecl, spirv: bytes, spec: Sequence[int]) -> Kernel:
        """A pipeline; ``spec`` gives decl.spec's uint32 values in order. Compiles here or at the first run."""

    def record(self, steps: Sequence[Dispatch], timestamps: bool = False) -> Recording:
        """Record ``steps`` in order. A step sees what earlier steps wrote (by the kernels' declared access).

        INPUT buffers among the steps' buffers are made current first, OUTPUT buffers can be read after run().
        """

    def run(self, recording: Recording) -> None:
        """Submit, and wait until it has finished."""

    def start(self, *recordings: Recording) -> None:
        """Submit, all in one submission.

        Every later call of the runtime first waits for the submission, and raises its error. It has no ``timings``.
        """

    def timings(self, recording: Recording) -> list[tuple[float, float]]:
        """(begin, end) seconds of every step of the last run, from one arbitrary zero; recorded with timestamps."""

    def close(self) -> None:
        """Destroy everything made by this runtime. Later calls raise ClosedError."""


class HostTensor(Buffer, Protocol):
    """A tensor of a host program as a buffer: bound, never written by the runtime, never freed."""

    @property
    def tensor(self) -> Any: ...


class HostRecording(Recording, Protocol):
    """Steps in a host's sequence, which can be evaluated only while they are armed."""

    def armed(self) -> AbstractContextManager[None]:
        """Let the sequence be evaluated within. ClosedError where a tensor of the host is gone."""


@runtime_checkable
class HostSequences(Protocol):
    """A runtime that can record into a command sequence which a host program owns and evaluates."""

    @property
    def hosted(self) -> bool:
        """Whether the device is the host program's own, whose sequences it can record into."""

    def host_tensor(self, tensor: Any, name: str) -> HostTensor:
        """A tensor of the host as a buffer. ArgumentError: another device's, or elements of another size than 4."""

    def host_output(self, nbytes: int) -> HostTensor:
        """A new tensor like the host's own, which the host's operations can bind and copy."""

    def record_into(self, sequence: Any, steps: Sequence[Dispatch], out: HostTensor) -> HostRecording:
        """Record ``steps`` at the end of the host's sequence, and then the copy of ``out`` to the host.

        Closing frees the steps' objects, but not ``out``, which lives as long as someone holds it.
        """
