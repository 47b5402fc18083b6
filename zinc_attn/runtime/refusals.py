"""Refusals and errors that all dispatchers make."""

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from ..checks import check_int
from ..errors import ArgumentError, ClosedError, DeviceMemoryError, DTypeError, LimitError
from ..kernels.records import Words
from .protocol import Buffer, DeviceInfo, Dispatch, Use

COMPILE_HEADROOM: Final = 512 << 20  # address space that a CPU driver's compiler is given at least
MEMORY_HEADROOM: Final = 32 << 20  # address space that an allocation of device memory leaves at least
FILE_HEADROOM: Final = 64 << 20  # of a CPU driver's own: code of kernels, command buffers, descriptors


def check_nbytes(nbytes: int, info: DeviceInfo) -> int:
    """``nbytes`` if one buffer can have that size: a positive multiple of 4 up to the device's limit."""
    nbytes = check_int("nbytes", nbytes, 1)
    if nbytes % 4:
        raise ArgumentError(f"nbytes: got {nbytes}, expected a multiple of 4")
    if nbytes > info.max_buffer_bytes:
        raise LimitError(
            f"buffer: {nbytes:,} bytes are needed, {info.name} takes at most {info.max_buffer_bytes:,} in one storage "
            "buffer; use a shorter context or a smaller dtype"
        )
    return nbytes


def check_step(index: int, step: Dispatch, info: DeviceInfo) -> None:
    """Refuse a step whose buffers are not the kernel's bindings, or whose grid the device does not take."""
    decl = step.kernel.decl
    if len(step.buffers) != len(decl.bindings):
        raise ArgumentError(
            f"steps[{index}].buffers: got {len(step.buffers)}, expected the {len(decl.bindings)} of kernel "
            f"{decl.name}: {', '.join(b.name for b in decl.bindings)}"
        )
    for axis, count, most in zip("xyz", step.groups, info.max_workgroups, strict=True):
        if check_int(f"steps[{index}].groups {axis}", count, 1) > most:
            raise LimitError(
                f"steps[{index}].groups: kernel {decl.name} needs {step.groups}, {info.name} takes at most "
                f"{info.max_workgroups}; use fewer splits or rows"
            )


def write_words(buffer: Buffer, view: Words | None, data: Words, offset: int) -> None:
    """Copy ``data`` to a buffer's host ``view`` from word ``offset``. ArgumentError, DTypeError: it does not fit."""
    if view is None:
        raise ArgumentError(f"buffer: got a {buffer.use.value} buffer, which the host cannot write")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint32:
        raise DTypeError(f"data: got {getattr(data, 'dtype', type(data).__name__)}, expected uint32 words")
    count, size = data.size, buffer.nbytes // 4
    if data.ndim != 1 or offset < 0 or offset + count > size:
        room = f"expected (n,) within a buffer of {size} words"
        raise ArgumentError(f"data: got shape {data.shape} from word {offset}, {room}")
    view[offset : offset + count] = data


def output_words(buffer: Buffer, view: Words | None) -> Words:
    """``view`` if the host reads the buffer, else a refusal."""
    if buffer.use is not Use.OUTPUT or view is None:
        raise ArgumentError(f"buffer: got a {buffer.use.value} buffer, expected an output buffer")
    return view


def check_timed(timestamps: bool, ran: bool) -> None:
    """Refuse the question for the timings of a recording that has none."""
    if not timestamps:
        raise ArgumentError("recording: it has no timestamps; use record(steps, timestamps=True)")
    if not ran:
        raise ArgumentError("recording: it has no timings before its first run, nor after one that failed")


def no_room(nbytes: int, free: int, info: DeviceInfo) -> DeviceMemoryError:
    """The error of an allocation that does not fit."""
    return DeviceMemoryError(
        f"buffer: {nbytes:,} bytes are needed, {info.name} has {free:,} free; close other buffers or programs, or ask "
        "for less"
    )


def closed_device(info: DeviceInfo) -> ClosedError:
    """The error of a use of ``info`` after its Device was closed."""
    return ClosedError(f"{info.name}: used after close(); open it again with Device.open()")


def no_host_memory(info: DeviceInfo) -> DeviceMemoryError:
    """The error of an allocation of host memory that failed in a call on ``info``."""
    return DeviceMemoryError(f"{info.name}: the process has no host memory left; ask for less, or raise its limit")


def _limit(info: DeviceInfo, name: str) -> int | None:
    """A limit of a CPU device's process, by its name in ``resource``; None where there is none."""
    if info.kind != "cpu":
        return None
    limit, _ = resource.getrlimit(getattr(resource, name))
    return None if limit == resource.RLIM_INFINITY else limit


def address_space(info: DeviceInfo) -> tuple[int, int] | None:
    """(RLIMIT_AS, bytes that it leaves) of a CPU device's process; None: there is no limit, or it is not known."""
    if (limit := _limit(info, "RLIMIT_AS")) is None:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux: how much is mapped is not known
        return None
    return limit, max(0, limit - pages * resource.getpagesize())


def check_compile_room(info: DeviceInfo) -> None:
    """DeviceMemoryError where the process has too little room for a CPU device's driver to compile.

    Such a driver compiles with LLVM, which ends the process where an allocation fails. RLIMIT_AS must leave
    COMPILE_HEADROOM beyond what the process has mapped; see also ``_check_file_room``.
    """
    room = address_space(info)
    if room is not None and room[1] < COMPILE_HEADROOM:
        raise DeviceMemoryError(
            f"{info.name} compiles with LLVM, which needs up to {COMPILE_HEADROOM:,} bytes of address space: the "
            f"process's limit (RLIMIT_AS, {room[0]:,}) leaves {room[1]:,}; raise it (ulimit -v)"
        )
    _check_file_room(info, 0)


def check_memory_room(info: DeviceInfo, nbytes: int) -> None:
    """DeviceMemoryError unless the process's limits let a CPU device's driver take ``nbytes`` of memory.

    lavapipe maps the bytes at once and ignores a failure: the first access would end the process. RLIMIT_AS must leave
    MEMORY_HEADROOM besides; see also ``_check_file_room``.
    """
    room = address_space(info)
    if room is not None and room[1] < nbytes + MEMORY_HEADROOM:
        raise DeviceMemoryError(
            f"buffer: {nbytes:,} bytes are needed, and {MEMORY_HEADROOM:,} for the driver and the host: the process's "
            f"limit on its address space (RLIMIT_AS, {room[0]:,}) leaves {room[1]:,}; raise it (ulimit -v), close "
            "other buffers, or ask for less"
        )
    _check_file_room(info, nbytes)


def _check_file_room(info: DeviceInfo, nbytes: int) -> None:
    """DeviceMemoryError unless RLIMIT_FSIZE lets a CPU device's driver take ``nbytes`` and FILE_HEADROOM.

    lavapipe keeps all memory of a device in one unnamed file, and SwiftShader the code of each kernel. Neither driver
    notices that its file cannot grow, and the first access beyond the end would end the process.
    """
    if (limit := _limit(info, "RLIMIT_FSIZE")) is None:
        return
    held = 0
    with suppress(OSError):  # not Linux: how large the files are is not known
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # another thread has closed it
                if os.readlink(link).startswith("/memfd:"):
                    held = max(held, link.stat().st_size)
    if limit < held + nbytes + FILE_HEADROOM:
        raise DeviceMemoryError(
            f"{info.name} keeps memory in a file: its {held + nbytes:,} bytes, and up to {FILE_HEADROOM:,} of the "
            f"driver's own, do not fit the process's limit on the size of files (RLIMIT_FSIZE, {limit:,}); raise it "
            "(ulimit -f)"
        )
