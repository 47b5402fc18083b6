"""How the library of native kernels is built, and which of a wheel's libraries a processor runs."""

from __future__ import annotations

import fcntl
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

# -ffp-contract=off: no product is fused with a sum.
FLAGS: Final = ("-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread")
LIBRARIES: Final = Path(__file__).parents[2] / "libraries"  # the folder of compiled ones, in a platform wheel
# Libraries of kernels that a platform wheel carries, the best first, with Linux's names of the extensions that each one
# needs. native/CMakeLists.txt builds them (ZINC_ATTN_CPU_LEVELS).
_V3: Final = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4: Final = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"})
LEVELS: Final = {"libzinc_cpu-v4.so": _V3 | _V4, "libzinc_cpu-v3.so": _V3, "libzinc_cpu.so": frozenset[str]()}


def carried(folder: Path, extensions: set[str]) -> Iterator[Path]:
    """The libraries in ``folder`` that a processor with these extensions runs, the best first."""
    if platform.machine() == "x86_64":
        paths = (folder / name for name, needed in LEVELS.items() if needed <= extensions)
        yield from (path for path in paths if path.exists())


def build(command: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    """Compile the files in parallel and link them, in one of several processes, for which the others wait.

    CalledProcessError: the compiler refuses a file.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(target.with_suffix(".lock"), "w") as lock, tempfile.TemporaryDirectory(dir=target.parent) as staging:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        objects = [str(Path(staging) / f"{source.stem}.o") for source in sources]
        commands = [[*command, "-c", str(source), "-o", name] for source, name in zip(sources, objects, strict=True)]
        running = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for words in commands]
        messages = [process.communicate()[1] for process in running]
        if any(process.returncode for process in running):
            raise subprocess.CalledProcessError(1, list(command), stderr="".join(messages))
        library = Path(staging) / target.name
        subprocess.run([*command, "-shared", *objects, "-o", str(library)], check=True)
        library.replace(target)
