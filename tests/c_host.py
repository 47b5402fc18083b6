"""The C library for the tests: its compiler, zinc_attn.h for ctypes, and the tables of its page."""

from __future__ import annotations

import ctypes as c
import functools
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults
import numpy as np
import pytest
from ml_dtypes import bfloat16
from objects import NATIVE, ROOT, linked, new_folder

from zinc_attn.graph import c as graph_c
from zinc_attn.kernels import c as generated_c
from zinc_attn.kernels.declarations import APPEND, HEAD, HEADER, HEADER_WORDS, ITEM, MAX_BINDINGS, ROW
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


digest = SimpleNamespace(**runpy.run_path(str(EMBED / "digest.py")))
NARROW = {"f16": np.float16, "bf16": bfloat16}  # k and v of za_run, which are float32 for all other types


@functools.cache
def contract() -> Path:
    """The folder of zinc_contract.h, zinc_graph.h and their sources, as scripts/build_contract.py writes them."""
    folder = new_folder()
    for name, text in (generated_c.generated(SPIRV) | graph_c.generated(SPIRV)).items():
        (folder / name).write_text(text)
    return folder


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
def _built_once(sources: tuple[Path, ...], with_contract: Path) -> str:
    return built(new_folder(), [*sources], *(SANITIZE if SANITIZED else []))


def library(sources: list[Path]) -> c.CDLL:
    """The same for ctypes, built once for all tests of a process."""
    loaded = c.CDLL(_built_once(tuple(sources), contract()))
    loaded.za_error.restype = c.c_char_p
    return loaded


@functools.cache
def name_for(device: Any) -> bytes:
    """The argument of za_device_open for a device of the package.

    The processor's library is the package's, with the functions of Vulkan that the C library calls.
    """
    if device.info.native:
        package, compiler = native.library()._name, str(native.compiler())
        target = new_folder() / "libzinc_cpu.so"
        folders = *(f"-I{NATIVE / name}" for name in ("include", "cpu")), f"-I{contract()}"
        flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", *folders]
        source = NATIVE / "cpu" / "vulkan.cpp"
        done = linked(target, [([compiler, *flags], source)], [compiler, "-shared", package])
        assert done.returncode == 0, done.stderr
        os.environ["ZINC_ATTN_CPU_LIBRARY"] = str(target)
    return bytes(device.info.name, "utf-8")


# --- zinc_attn.h ---------------------------------------------------------------------------------------------


_SCALARS = {"uint32_t": c.c_uint32, "uint64_t": c.c_uint64, "VkDeviceSize": c.c_uint64, "size_t": c.c_size_t}
_SCALARS |= {"bool": c.c_bool, "double": c.c_double, "enum": c.c_int, "char *": c.c_char_p, "void": None}
STRUCTS: dict[str, type[c.Structure]] = {}  # by the names in C


def _kind(text: str) -> Any:
    """The type of a field or a result; a pointer or a handle is a number."""
    text = text.replace("const ", "").strip()
    if text.startswith("struct ") and "*" not in text:
        return STRUCTS[text.split()[1]]
    return _SCALARS.get(text if "*" in text else text.split()[0], c.c_void_p)


def structures(header: Path) -> dict[str, type[c.Structure]]:
    """STRUCTS with those of a header."""
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)
    for name, body in re.findall(r"^(?:extern const )?struct (\w+) \{\n(.*?)^\}", text, flags=re.S | re.M):
        fields: list[tuple[str, Any]] = []
        for kind, names in re.findall(r"((?:const )?(?:(?:enum|struct) )?\w+) ([^;]+);", body):
            for pointer, field, count in re.findall(r"(\*?)(\w+)(?:\[(\w+)\])?", re.sub(r"\s*,\s*", " ", names)):
                number = {"MAX_BINDINGS": MAX_BINDINGS}.get(count) or int(count or 0)
                of = _kind(f"{kind} {pointer}")
                fields.append((field, of * number if number else of))
        STRUCTS[name] = type(name, (c.Structure,), {"_fields_": fields})
    return STRUCTS


HEADER_FILE = NATIVE / "include" / "zinc_attn.h"
structures(HEADER_FILE)
Host, Options, Place, CachePlaces, Request, Call, Data, Places, Room = (
    STRUCTS[f"za_{name}"]
    for name in ("host", "options", "place", "cache_places", "request", "call", "data", "places", "room")
)


def declared(loaded: c.CDLL) -> c.CDLL:
    """The library with the results of its functions."""
    for result, name in re.findall(r"^ZA_API ([\w ]+ \*?)(\w+)\(", HEADER_FILE.read_text(), flags=re.M):
        getattr(loaded, name).restype = _kind(result)
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
