"""What of examples/embed_c needs no device: the codec of rows, the library's names, and what documents show."""

from __future__ import annotations

import ctypes as c
import re
import subprocess
import sys

import numpy as np
import pytest
from c_host import (
    COMPILER,
    DTYPES,
    EXAMPLE,
    LIBRARY,
    ROOT,
    STRICT,
    library,
    make_case,
    needs_compiler,
    tables,
)

from zinc_attn.cache import rows
from zinc_attn.shapes import AttnShape, row_format


class RowPart(c.Structure):
    _fields_ = [(name, c.c_uint32) for name in ("dims", "value_words", "scale_words")]


class RowFormat(c.Structure):
    _fields_ = [
        ("dtype", c.c_int),
        ("kv_heads", c.c_uint32),
        *((name, RowPart) for name in "kv"),
        *((name, c.c_float) for name in ("min_input", "max_input")),
    ]


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    """rows.c, which needs error.c alone."""
    loaded = library(tmp_path_factory.mktemp("codec"), [EXAMPLE / "rows.c", EXAMPLE / "error.c"])
    loaded.za_rows_encode.restype = loaded.za_row_words.restype = c.c_bool
    return loaded


def encode(codec, k, v, dtype):
    """The words of rows, and the largest magnitude of k; a message where the codec refuses them."""
    n, kv_heads, _ = k.shape
    parts = RowPart(), RowPart()
    for x, part in zip((k, v), parts, strict=True):
        if not codec.za_row_words(DTYPES.index(dtype), x.shape[2], c.byref(part)):
            return codec.za_error().decode()
    row = row_format(AttnShape(kv_heads, kv_heads, k.shape[2], v.shape[2]), dtype)
    assert (parts[0].value_words, parts[0].scale_words) == (row.k_values, row.k_scales)
    assert (parts[1].value_words, parts[1].scale_words) == (row.v_values, row.v_scales)
    form = RowFormat(DTYPES.index(dtype), kv_heads, *parts, 2.0**-40, 2.0**60)
    out = np.full((n, kv_heads, sum(part.value_words + part.scale_words for part in parts)), 0xDEADBEEF, np.uint32)
    largest = c.c_double(0)
    pointers = [x.ctypes.data_as(c.c_void_p) for x in (k, v)]
    if codec.za_rows_encode(c.byref(form), *pointers, n, out.ctypes.data_as(c.c_void_p), c.byref(largest)):
        return out, largest.value
    return codec.za_error().decode()


def awkward(rng, shape, dtype):
    """Values of every magnitude: ties, zero blocks, blocks whose scale is subnormal or 0, and what is flushed."""
    x = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-44, 20, (*shape[:2], 1))).astype(np.float32)
    x[0] = rng.integers(-254, 255, x[0].shape) / np.float32(2)  # scale 1: halves are ties
    x[0, :, ::32] = 127
    x[1, 0] = 0
    x[2] *= np.float32(2.0**-20) / np.abs(x[2]).max()  # the scale is subnormal, or 0
    x[3, :, 5] = 2.0**-41, -(2.0**-149)
    x[4] = np.float32(-0.0)
    x[5, 0, 0] = 127 * 65504 if dtype == "q8_0" else 60000
    return x.astype(np.float16).clip(-65504, 65504) if dtype == "f16" else x.astype(make_case.DTYPES[dtype])


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k_dim,v_dim", ((64, 64), (80, 80), (96, 96), (512, 512), (576, 576), (192, 128), (96, 160)))
def test_rows_have_the_bits_of_the_package(codec, rng, dtype, k_dim, v_dim):
    if dtype == "q8_0" and k_dim % 32:
        return
    with np.errstate(over="ignore"):
        k, v = (awkward(rng, (64, 2, dim), dtype) for dim in (k_dim, v_dim))
    stored = [rows.stored_values(name, x, dtype) for name, x in (("k", k), ("v", v))]
    want = rows.encode(stored[0][0], stored[1][0], AttnShape(2, 2, k_dim, v_dim), dtype)
    words, largest = encode(codec, k, v, dtype)
    assert np.array_equal(words, want)
    assert largest == stored[0][1]
    assert encode(codec, k[:0], v[:0], dtype)[1] == 0


@needs_compiler
@pytest.mark.parametrize(
    "dtype,value,message",
    (
        ("f16", np.inf, "v[1, 0, 3]: got inf, expected a finite value of at most 65504"),
        ("f16", -np.nan, "v[1, 0, 3]: got "),
        ("bf16", 2.0**61, "v[1, 0, 3]: got 2.30584e+18, expected a finite value of at most 1.15292e+18"),
        ("f32", np.nan, "v[1, 0, 3]: got nan, expected a finite value of at most 1.15292e+18"),
        ("q8_0", 127 * 65505.0, "v[1, 0, 3]: got 8.31914e+06, expected a finite value of at most 8.31901e+06"),
    ),
)
def test_values_that_no_row_takes(codec, dtype, value, message):
    k, v = np.zeros((2, 2, 1, 64), make_case.DTYPES[dtype])
    v[1, 0, 3] = value
    assert encode(codec, k, v, dtype).startswith(message)
    with pytest.raises(rows.ValueRangeError):
        rows.stored_values("v", v, dtype)


@needs_compiler
def test_q8_0_needs_whole_blocks(codec):
    x = np.zeros((1, 1, 80), np.float32)
    message = "dtype: got q8_0 at head_dim 80, expected a head_dim that is a multiple of 32"
    assert encode(codec, x, x, "q8_0") == message


@needs_compiler
def test_the_page_s_row_of_q8_0(codec):
    k, v = np.zeros((2, 1, 1, 64), np.float32)
    k[0, 0, [0, 1, 2, 3, 32, 33, 34]] = 1, -0.5, 0.25, 0.01, -2, 0.03, 0.007
    v[0, 0, :4] = 127, 0.5, 1.5, -2.5
    shown = {int(row["word"]): int(row["value"], 0) for row in tables("q8_0")[0]}
    words, _ = encode(codec, k, v, "q8_0")
    assert {at: int(word) for at, word in enumerate(words[0, 0]) if word} == shown
    assert np.array_equal(words, rows.encode(k, v, AttnShape(1, 1, 64), "q8_0")) and words.shape[2] == 34


@needs_compiler
def test_every_name_of_the_library_has_its_prefix(tmp_path):
    """So that a host can link it beside a JSON reader, or a SHA-256, of its own."""
    for source in LIBRARY:
        target = tmp_path / f"{source.stem}.o"
        command = [COMPILER, *STRICT, "-c", "-o", str(target), str(source)]
        assert subprocess.run(command, capture_output=True, text=True).returncode == 0
    found = subprocess.run(
        ["nm", "-g", "--defined-only", *map(str, sorted(tmp_path.glob("*.o")))], capture_output=True, text=True
    )
    names = re.findall(r"^\w+ [A-Z] (\w+)$", found.stdout, flags=re.M)
    assert len(names) > 20 and all(name.startswith("za_") for name in names), names


def test_the_program_uses_the_header_alone():
    for name in ("main.c", "case.c"):
        included = set(re.findall(r'#include "(.*)"', (EXAMPLE / name).read_text()))
        assert included <= {"zinc_attn.h", "case.h"}


def test_the_digest_of_the_embedding_page(tmp_path):
    """docs/embedding.md shows what make_case.py prints without options."""
    command = [sys.executable, str(EXAMPLE / "make_case.py"), str(tmp_path / "case")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] in (ROOT / "docs" / "embedding.md").read_text()
