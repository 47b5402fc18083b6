"""Object files of C and C++ sources. Equal text is compiled once, by whichever process and run comes first."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NATIVE = Path(os.environ.get("ZINC_ATTN_NATIVE", ROOT / "native"))  # test_slips.py tests copies
FOLDER = Path(os.environ.get("ZINC_ATTN_CACHE", ROOT / ".cache")) / "objects"
KEPT_S = 7 * 24 * 3600  # an object that nothing has used for a week goes
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}

Done = subprocess.CompletedProcess[str]
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def new_folder() -> Path:
    """An empty folder, which lives as long as the process."""
    _FOLDERS.append(tempfile.TemporaryDirectory())
    return Path(_FOLDERS[-1].name)


def run(command: Sequence[str]) -> Done:
    """A compiler's run, outside any sanitizer that this process has."""
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)


def key_of(command: Sequence[str], source: Path) -> str:
    """A hash of the command, the source and all headers of native/, of the source's folder and of those of ``-I``."""
    folders = source.parent, *(Path(flag[2:]) for flag in command if flag.startswith("-I"))
    files = [*sorted(NATIVE.rglob("*.h")), *(file for folder in folders for file in sorted(folder.glob("*.h")))]
    headers = [file.read_bytes() for file in files]
    told = " ".join(flag for flag in command if not flag.startswith("-I")).encode()
    return hashlib.sha256(b"\0".join([told, source.read_bytes(), *headers])).hexdigest()


def compiled_object(command: Sequence[str], source: Path) -> tuple[Path, Done]:
    """The object file that a compiler with its flags makes of a source, and its run, which may have failed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    target = FOLDER / f"{source.stem}-{key_of(command, source)[:32]}.o"
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            os.utime(target)
            return target, subprocess.CompletedProcess([], 0, "", "")
        object_file = target.with_suffix(".new")
        done = run([*command, "-fPIC", "-c", str(source), "-o", str(object_file)])
        if done.returncode == 0:
            object_file.rename(target)
    return target, done


def joined(folder: Path, sources: Sequence[Path]) -> Path:
    """One source of several of native/ whose names at file scope differ: a compiler reads their headers once."""
    target = folder / "joined.cpp"
    texts = [f'#line 1 "{source.relative_to(NATIVE)}"\n{source.read_text()}' for source in sources]
    target.write_text("".join(texts))
    return target


def linked(target: Path, commands: Sequence[tuple[Sequence[str], Path]], link: Sequence[str]) -> Done:
    """A program or library of sources, each with the command that compiles it. link: the command, with libraries."""
    for old in FOLDER.glob("*"):
        if time.time() - old.stat().st_mtime > KEPT_S:
            old.unlink(missing_ok=True)
    objects = []
    for command, source in commands:
        object_file, done = compiled_object(command, source)
        if done.returncode:
            return done
        objects.append(str(object_file))
    return run([link[0], "-o", str(target), *objects, *link[1:]])
