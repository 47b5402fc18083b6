"""The library of native kernels: the wheel's, or a compiled one, which the cache folder keeps."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from ...errors import KernelError, RuntimeUnavailableError, WrongResultError
from ...files import cache_folder
from . import building

SOURCES: Final = Path(__file__).parents[2] / "spirv" / "cpu"  # scripts/build_shaders.py puts them there
_INSTALL: Final = "there is no C++ compiler: install g++ 12 or later, or set CXX"
_LOG: Final = logging.getLogger("zinc_attn")


class Step(ctypes.Structure):
    """runtime.h's Step."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("spec", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("groups", ctypes.c_uint32 * 3),
        ("unused", ctypes.c_uint32),
        ("begin", ctypes.c_double),
        ("end", ctypes.c_double),
    )


def compiler() -> str | None:
    """$CXX, or the first C++ compiler that is there."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def no_compiler() -> str | None:
    """Why there can be no library; None where there is one, or a compiler."""
    return None if next(_carried(), None) or compiler() else _INSTALL


@cache
def cpu_facts() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo; empty where there is none."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def machine_flags() -> str:
    """The facts that -march=native depends on, as text."""
    facts = cpu_facts()
    return f" {facts.get('model name')} {facts.get('flags') or facts.get('Features') or platform.processor()} "


@cache
def library() -> Any:
    """The library, loaded. RuntimeUnavailableError: there is no compiler, or no folder for the library; KernelError:
    the sources do not compile; WrongResultError: results would have other bits.

    $ZINC_ATTN_CPU_FLAGS: the compiler's flags in place of -march=native; no wheel's library is taken then.
    """
    for carried in _carried():
        try:
            return _declared(ctypes.CDLL(str(carried)))
        except (OSError, WrongResultError) as error:  # the next one, or one that is compiled here, may serve
            _LOG.warning("cpu: the library %s of the package does not serve: %s", carried.name, error)
    if not (files := sorted(SOURCES.glob("*"))):
        raise KernelError(f"{SOURCES} is missing; run scripts/build_shaders.py, or install the wheel")
    if (why := no_compiler()) or (path := compiler()) is None:
        raise RuntimeUnavailableError(f"cpu: {why or _INSTALL}")
    command = [path, *building.FLAGS, *os.environ.get("ZINC_ATTN_CPU_FLAGS", "-march=native").split()]
    key = hashlib.sha256("\0".join([*command, machine_flags(), str(os.stat(path).st_mtime_ns)]).encode())
    for file in files:
        key.update(file.read_bytes())
    with ExitStack() as stack:  # without a cache folder the library lives as long as the process
        folder = cache_folder() or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zinc_attn.")))
        loaded = _loaded(command, files, folder / "cpu" / f"{key.hexdigest()[:32]}.so")
    return _declared(loaded)


def _carried() -> Iterator[Path]:
    """The wheel's libraries for this processor, the best first; none with $ZINC_ATTN_CPU_FLAGS."""
    if "ZINC_ATTN_CPU_FLAGS" in os.environ:
        return iter(())
    return building.carried(building.LIBRARIES, set(cpu_facts().get("flags", "").split()))


def _declared(loaded: Any) -> Any:
    """The library with its functions' types. WrongResultError: its results would have other bits."""
    loaded.zinc_cpu_fault.restype = ctypes.c_char_p
    loaded.zinc_cpu_kernel.restype = loaded.zinc_cpu_open.restype = ctypes.c_void_p
    loaded.zinc_cpu_kernel.argtypes = (ctypes.c_char_p,)
    loaded.zinc_cpu_open.argtypes = (ctypes.c_uint,)
    loaded.zinc_cpu_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    if fault := loaded.zinc_cpu_fault():
        raise WrongResultError(f"cpu: {fault.decode()}, so that results would have other bits; use another compiler")
    return loaded


def _loaded(command: list[str], files: list[Path], target: Path) -> ctypes.CDLL:
    """The library ``target``, built if it is missing."""
    try:
        if not target.exists():
            _LOG.warning("cpu: compiling the kernels for this processor, which takes half a minute, once")
            building.build(command, [file for file in files if file.suffix == ".cpp"], target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.CalledProcessError) as error:
        if said := getattr(error, "stderr", None):
            text = f"cpu: {command[0]} does not compile the kernels; use g++ 12 or later:\n{said[-2000:]}"
            raise KernelError(text) from error
        hint = "set ZINC_ATTN_CACHE_DIR to a folder that can be written, and whose files may be executed"
        raise RuntimeUnavailableError(f"cpu: {target} cannot be made or loaded ({error}); {hint}") from error


@cache
def pool(pid: int, threads: int) -> int:
    """The threads of process ``pid``, which live as long as it does. MemoryError where there is no room for them."""
    address: int | None = library().zinc_cpu_open(threads)
    if address is None:
        raise MemoryError
    return address
