"""The C library for the tests: its compiler, its case files, zinc_attn.h for ctypes, and the tables of its page."""

from __future__ import annotations

import ctypes as c
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zinc_attn.kernels.declarations import APPEND, COPY, HEADER, HEADER_WORDS, ITEM, ROW
from zinc_attn.storage import STORAGE

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "native"
EMBED = NATIVE / "embed"
PAGE = ROOT / "docs" / "c-hosts.md"
LIBRARY = sorted((NATIVE / "src").glob("*.c"))
SOURCES = [*LIBRARY, *sorted(EMBED.glob("*.c"))]
INCLUDE = f"-I{NATIVE / 'src'}"
DTYPES = ("as_k", *STORAGE)  # enum za_dtype
SHIM = ROOT / "tests" / "device" / "embed_shim.c"
_CREATES = re.sub(r"CREATES\(([A-Z]\w+)\) ?", r"\nWRAP(vkCreate\1)", SHIM.read_text())
WRAP = [f"-Wl,--wrap={name}" for name in sorted(set(re.findall(r"^(?:WRAP\(|\w+ __wrap_)(vk\w+)", _CREATES, re.M)))]
COMPILER = shutil.which(os.environ.get("CC", "cc"))
STRICT = [INCLUDE, "-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-ffp-contract=off"]
SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler (package gcc)")


def _script(path: Path) -> Any:
    """A script as a module."""
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


make_case, make_storage = _script(EMBED / "make_case.py"), _script(NATIVE / "make_storage.py")


def compiled(target: Path, sources: list[Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The compiler's run for a program, or with -shared a library."""
    command = [str(COMPILER), *STRICT, *arguments, "-o", str(target), *map(str, sources), "-lvulkan", "-lm"]
    return subprocess.run(command, capture_output=True, text=True)


def library(folder: Path, sources: list[Path], *arguments: str) -> c.CDLL:
    """Files of the library for ctypes."""
    done = compiled(folder / "library.so", sources, "-O2", "-shared", "-fPIC", *arguments)
    assert done.returncode == 0, done.stderr
    loaded = c.CDLL(str(folder / "library.so"))
    loaded.za_error.restype = c.c_char_p
    return loaded


# --- zinc_attn.h ---------------------------------------------------------------------------------------------


class Options(c.Structure):
    _fields_ = [
        ("manifest", c.c_char_p),
        ("device", c.c_char_p),
        *((name, c.c_uint32) for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim")),
        ("latent", c.c_bool),
        *((name, c.c_int) for name in ("dtype", "v_dtype")),
    ]


class Call(c.Structure):
    _fields_ = [
        *((name, c.c_uint32) for name in ("layer", "tokens")),
        ("page_table", c.c_void_p),
        ("new_rows", c.c_uint32),
        *((name, c.c_void_p) for name in ("k", "v")),
        ("encoded", c.c_bool),
        ("q_len", c.c_uint32),
        *((name, c.c_void_p) for name in ("q", "out", "lse")),
        *((name, c.c_double) for name in ("scale", "softcap")),
        ("window", c.c_uint32),
        ("noncausal", c.c_bool),
        *((name, c.c_void_p) for name in ("sinks", "alibi", "mask")),
        *((name, c.c_uint32) for name in ("mask_keys", "splits")),
    ]


class Trace(c.Structure):
    _fields_ = [
        ("work", c.POINTER(c.c_uint32)),
        ("work_words", c.c_size_t),
        *((name, c.c_uint32) for name in ("splits", "leaves_per_state")),
        ("loop", c.c_bool),
    ]


# --- docs/c-hosts.md -----------------------------------------------------------------------------------------


def section(heading: str) -> str:
    """The text under a heading of the page, up to the next one."""
    return re.split(r"^#+ ", PAGE.read_text().split(f"\n## {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]


def tables(heading: str) -> list[list[dict[str, str]]]:
    """The tables under a heading: a dict for each row, by column."""
    found = []
    for lines in re.findall(r"(?:^\|.*\|\n)+", section(heading), flags=re.M):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in lines.splitlines()]
        found.append([dict(zip(rows[0], row, strict=True)) for row in rows[2:]])
    return found


def page_words(heading: str) -> np.ndarray:
    """The work buffer that the tables under a heading show; words that no table names are 0.

    A table has a row per word: the columns word, name and value; or the word within a record, the name, and a column of
    values for each record, headed by the word where it begins. Names must be those of the declarations.
    """
    records = ITEM, ROW, APPEND, COPY
    words: dict[int, int] = {}
    for row in (row for table in tables(heading) for row in table if "word" in row):
        name, at = row["name"].strip("`"), int(row["word"])
        if row["word"].startswith("+"):
            assert any(name == record[at] for record in records if at < len(record)), row
        elif at < HEADER_WORDS:
            assert name == HEADER[at], row
        values = {at: row["value"]} if "value" in row else {at + int(x): row[x] for x in row if x.isdigit()}
        assert not values.keys() & words, row
        words.update((word, int(value, 0)) for word, value in values.items())
    found = np.zeros(max(words) + 1, np.uint32)
    found[list(words)] = list(words.values())
    return found
