"""The C library for the tests: its compiler, zinc_attn.h for ctypes, and the tables of its page."""

from __future__ import annotations

import ctypes as c
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
from ml_dtypes import bfloat16
from objects import NATIVE, ROOT, linked

from zinc_attn.canonical.constants import BIASES
from zinc_attn.graph import c as graph_c
from zinc_attn.kernels import c as generated_c
from zinc_attn.kernels.declarations import APPEND, HEAD, HEADER, HEADER_WORDS, ITEM, ROW
from zinc_attn.runtime.cpu import library as native
from zinc_attn.runtime.device import SPIRV
from zinc_attn.storage import STORAGE

EMBED = ROOT / "examples" / "embed"
PAGE = ROOT / "docs" / "c-hosts.md"
LIBRARY = sorted((NATIVE / "src").glob("*.c"))  # and what ``contract`` makes
DTYPES = ("as_k", *STORAGE)  # enum za_dtype
CODES = ("ok", "invalid", "unsupported", "memory", "busy", "lost", "driver")  # enum za_code
SHIMMED = [*LIBRARY, faults.SOURCE]  # with calls of Vulkan that fail where a test says so
WRAPPED = [f"-Wl,--wrap={name}" for name in ("malloc", "calloc", "realloc", "free")]
COMPILER = shutil.which(os.environ.get("CC", "cc"))
STRICT = [f"-I{NATIVE / 'include'}", "-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-ffp-contract=off"]
SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")  # this process: test_c_engine.py starts one

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler (package gcc)")


def _script(path: Path) -> Any:
    """A script as a module."""
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


digest = _script(EMBED / "digest.py")
NARROW = {"f16": np.float16, "bf16": bfloat16}  # k and v of za_run, which are float32 for all other types


@functools.cache
def _made() -> Any:
    folder = tempfile.TemporaryDirectory()
    for name, text in (generated_c.generated(SPIRV) | graph_c.generated(SPIRV)).items():
        Path(folder.name, name).write_text(text)
    return folder


def contract() -> Path:
    """The folder of zinc_contract.h, zinc_graph.h and their sources, as scripts/build_contract.py writes them."""
    return Path(_made().name)


def compiled(target: Path, sources: list[Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The compiler's run for a program, or with -shared a library, of sources and the contract."""
    shim = [*WRAPPED, str(faults.shim())] if faults.SOURCE in sources else []
    flags = [*STRICT, f"-I{contract()}", *(flag for flag in arguments if flag != "-shared")]
    files = (source for source in (*sources, contract() / "zinc_contract.c") if source != faults.SOURCE)
    commands = [([str(COMPILER), *flags], source) for source in files]
    return linked(target, commands, [str(COMPILER), *arguments, *shim, "-lvulkan", "-lm"])


def compiler_file(name: str) -> str:
    """A library of the compiler's, "" where it has none."""
    output = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return output if Path(output).is_absolute() else ""


def built(folder: Path, sources: list[Path], *arguments: str) -> str:
    """A shared library of files of the library."""
    done = compiled(folder / "library.so", sources, "-O2", "-shared", *arguments)
    assert done.returncode == 0, done.stderr
    return str(folder / "library.so")


@functools.cache
def _built_once(sources: tuple[Path, ...], with_contract: Path) -> tuple[Any, str]:
    folder = tempfile.TemporaryDirectory()
    return folder, built(Path(folder.name), [*sources], *(SANITIZE if SANITIZED else []))


def library(sources: list[Path]) -> c.CDLL:
    """The same for ctypes, built once for all tests of a process."""
    loaded = c.CDLL(_built_once(tuple(sources), contract())[1])
    loaded.za_error.restype = c.c_char_p
    return loaded


@functools.cache
def name_for(device: Any) -> bytes:
    """The argument of za_device_open for a device of the package.

    The processor's library is the package's, with the functions of Vulkan that the C library calls.
    """
    if device.info.native:
        package, folder = native.library()._name, tempfile.TemporaryDirectory()
        target, compiler = Path(folder.name, "libzinc_cpu.so"), str(native.compiler())
        folders = *(f"-I{NATIVE / name}" for name in ("include", "cpu")), f"-I{contract()}"
        flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", *folders]
        source = NATIVE / "cpu" / "vulkan.cpp"
        done = linked(target, [([compiler, *flags], source)], [compiler, "-shared", package])
        assert done.returncode == 0, done.stderr
        os.environ["ZINC_ATTN_CPU_LIBRARY"] = str(target)
        _FOLDERS.append(folder)
    return bytes(device.info.name, "utf-8")


_FOLDERS: list[Any] = []  # that live as long as the process


# --- zinc_attn.h ---------------------------------------------------------------------------------------------


def _structure(name: str, fields: str) -> type[c.Structure]:
    """A struct from its fields, "type: name name ..." in each line."""
    kinds = {"u": c.c_uint32, "i": c.c_int, "b": c.c_bool, "d": c.c_double, "p": c.c_void_p, "q": c.c_uint64}
    kinds |= {"s": c.c_char_p, "z": c.c_size_t, "place": Place if name != "Place" else None}
    lines = [line.split(":") for line in fields.split("\n") if line.strip()]
    return type(name, (c.Structure,), {"_fields_": [(x, kinds[a.strip()]) for a, b in lines for x in b.split()]})


Place = _structure("Place", "p: buffer\nq: offset size")
Options = _structure(
    "Options",
    """u: q_heads kv_heads head_dim v_head_dim
    b: latent
    i: dtype v_dtype arithmetic
    u: page_size k_stride v_stride compute_units""",
)
Info = _structure("Info", "u: page_size k_dim v_dim row_words\nq: k_page_bytes v_page_bytes")
DeviceInfo = _structure("DeviceInfo", "s: name\nb: cpu wave32\nq: alignment most")
Host = _structure("Host", "p: instance physical device\nu: family\np: queue get_proc enabled")
CachePlaces = _structure("CachePlaces", "u: layers pages\nplace: k v\np: k_scales v_scales\nu: token_rows head_rows")
Request = _structure(
    "Request", "u: tokens pages\np: page_table\nu: new_rows q_len\nb: noncausal\np: mask\nu: mask_keys"
)
Call = _structure(
    "Call",
    f"p: request\nu: requests\nd: scale softcap\nu: window\np: sinks {' '.join(BIASES)} mask_slopes\nu: splits",
)
Data = _structure("Data", "p: k v\nb: encoded\np: q out lse")
Places = _structure("Places", "place: rows q out lse")
Room = _structure(
    "Room", f"u: slots requests rows new_rows tokens pages mask_keys\nb: sinks softcap {' '.join(BIASES)} mask_slopes"
)
Trace = _structure("Trace", "p: work\nz: work_words\nu: splits shared")


def declared(loaded: c.CDLL) -> c.CDLL:
    """The library with the results of its functions that are no int."""
    for name in ("za_device_open", "za_device_from", "za_open", "za_cache_make", "za_cache_from", "za_prepare"):
        getattr(loaded, name).restype = c.c_void_p
    for name in ["run", "run_at", "copy_page", "record", "step", "reset", "wanted_features", "close", "device_close"]:
        getattr(loaded, f"za_{name}").restype = c.c_bool
    loaded.za_trace.restype, loaded.za_info.restype, loaded.za_device_info.restype = Trace, Info, DeviceInfo
    loaded.za_device_host.restype, loaded.za_error.restype = Host, c.c_char_p
    return loaded


# --- docs/c-hosts.md -----------------------------------------------------------------------------------------


def section(heading: str) -> str:
    """The text under a heading of the page, up to the next one."""
    return re.split(r"^#+ ", PAGE.read_text().split(f"\n## {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]


def tables(heading: str) -> list[list[dict[str, str]]]:
    """The tables under a heading: a dict for each row, by column."""
    results = []
    for lines in re.findall(r"(?:^\|.*\|\n)+", section(heading), flags=re.M):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines.splitlines()]
        results.append([dict(zip(rows[0], row, strict=True)) for row in rows[2:]])
    return results


def page_words(heading: str) -> np.ndarray:
    """The work buffer that the tables under a heading show; words that no table names are 0.

    A table has a row per word: the columns word, name and value; or the word within a record, the name, and a column of
    values for each record, headed by the word where it begins. Names must be those of the declarations.
    """
    header, *records = map(list, (HEADER, ITEM, ROW, APPEND, HEAD))
    words: dict[int, int] = {}
    for row in (row for table in tables(heading) for row in table if "word" in row):
        name, place = row["name"].strip("`"), int(row["word"])
        if row["word"].startswith("+"):
            assert any(name == record[place] for record in records if place < len(record)), row
        elif place < HEADER_WORDS:
            assert name == header[place], row
        values = {place: row["value"]} if "value" in row else {place + int(x): row[x] for x in row if x.isdigit()}
        assert not values.keys() & words, row
        words.update((word, int(value, 0)) for word, value in values.items())
    result = np.zeros(max(words) + 1, np.uint32)
    result[list(words)] = list(words.values())
    return result
