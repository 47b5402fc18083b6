"""What of the C library needs no device: the codec of rows, the library's names, and what documents show."""

import ctypes as c
import re
import subprocess

import numpy as np
import pytest
from c_host import COMPILER, DTYPES, LIBRARY, NARROW, NATIVE, built, library, needs_compiler

from zinc_attn.cache import blocks, head_scales, rows
from zinc_attn.cache.encoded import encoded_rows
from zinc_attn.cache.strided import from_rows
from zinc_attn.limits import BLOCK
from zinc_attn.planning import splits
from zinc_attn.shapes import TILES, AttnShape, row_format, row_strides, strided_format
from zinc_attn.storage import FP8_UNIT, IQ4_NL, STORAGE, storage_index, storage_types

MIXED = [f"{k}/{v}" for k, v in zip(STORAGE, [*STORAGE][3:] + [*STORAGE][:3], strict=True)]  # each once as K, as V
SHAPES = ("2/2/64", "2/2/80", "2/2/96/160", "1/1/576/512", "3/3/65/33", "2/2/7/100", "1/1/80/65/latent")


class RowPart(c.Structure):
    _fields_ = [
        ("dtype", c.c_int),
        *((name, c.c_uint32) for name in ("dims", "stored", "value_words", "scale_words", "stride")),
    ]


class RowFormat(c.Structure):
    _fields_ = [("kv_heads", c.c_uint32), ("k", RowPart), ("v", RowPart)]
    _fields_ += [(name, c.c_float) for name in ("min_input", "max_input")]


class NewRows(c.Structure):
    _fields_ = [("tokens", c.c_uint32), ("encoded", c.c_bool)]
    _fields_ += [(name, c.c_void_p) for name in ("k", "v", "k_scales", "v_scales")]


class StorageType(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        *((name, c.c_uint32) for name in ("bits", "halves", "fifth_bits", "head_scale")),
        ("most", c.c_double),
    ]

    def row(self):
        return tuple(getattr(self, name) for name, _ in self._fields_)


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    """The codec, which needs error.c alone."""
    if COMPILER is None:
        pytest.skip("there is no C compiler (package gcc)")
    sources = [NATIVE / "src" / f"{name}.c" for name in ("rows", "blocks", "floats", "storage", "error")]
    loaded = library(tmp_path_factory.mktemp("codec"), sources)
    loaded.za_rows_encode.restype, loaded.za_row_part.restype = c.c_bool, RowPart
    return loaded


def encode(codec, shape, dtype, k, v, scales=None, encoded=False, strides=TILES):
    """The words of rows, and the largest magnitude of k; a message where the codec refuses them."""
    sizes = [(shape.head_dim, shape.k_dim, strides[0]), (shape.v_head_dim, shape.v_dim, strides[1])]
    sizes[1:] = [(0, 0, 0)] if shape.latent else sizes[1:]
    kinds = storage_types(dtype)
    parts = [codec.za_row_part(1 + storage_index(kind), *size) for kind, size in zip(kinds, sizes, strict=True)]
    row = row_format(shape, dtype) if strides == TILES else strided_format(strides, shape.latent)
    assert [part.value_words for part in parts] == [row.k_values, row.v_values]
    assert [part.scale_words for part in parts] == [row.k_scales, row.v_scales]
    form = RowFormat(shape.kv_heads, *parts, 2.0**-40, 2.0**60)
    scales = np.ones((2, shape.kv_heads), np.float32) if scales is None else scales
    given = [np.ascontiguousarray(x) for x in (k, k if shape.latent else v, *scales)]
    new = NewRows(len(k), encoded, *(x.ctypes.data for x in given))
    out = np.full((len(k), shape.kv_heads, row.words), 0xDEADBEEF, np.uint32)
    largest = c.c_double(0)
    if codec.za_rows_encode(c.byref(form), c.byref(new), out.ctypes.data_as(c.c_void_p), c.byref(largest)):
        return out, largest.value
    return codec.za_error().decode()


def awkward(rng, shape, kind, scale):
    """Values of every magnitude: ties, zero blocks, blocks whose scale is subnormal or 0, and what is flushed."""
    x = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-44, 20, (*shape[:2], 1))).astype(np.float32)
    x[0] = rng.integers(-254, 255, x[0].shape) / np.float32(2)  # scale 1: halves are ties
    x[0, :, ::32] = 127
    x[1, 0] = 0
    x[2] *= np.float32(2.0**-20) / np.abs(x[2]).max()  # the scale is subnormal, or 0
    x[3, :, 5] = 2.0**-41
    x[3, 0, 5] = -(2.0**-149)
    x[4] = np.float32(-0.0)
    most = blocks.MOST.get(kind.name, 60000.0)
    x[5, 0, 0] = -most
    x = x.clip(-most, most)
    if kind.head_scale:
        return x.clip(-448 * scale[:, None], 448 * scale[:, None])
    return x.astype(NARROW.get(kind.name, np.float32))


def awkward_rows(rng, shape, dtype, tokens=64):
    """k, v, and scales of heads that are powers of two: 448 times one is a float32 number."""
    scales = np.exp2(rng.integers(-6, 7, (2, shape.kv_heads))).astype(np.float32)
    sizes = zip((shape.head_dim, shape.v_head_dim), storage_types(dtype), scales, strict=True)
    k, v = (awkward(rng, (tokens, shape.kv_heads, dims), kind, scale) for dims, kind, scale in sizes)
    return k, v, scales


@pytest.mark.parametrize("dtype", (*STORAGE, *MIXED))
def test_rows_have_the_bits_of_the_package(codec, rng, dtype):
    for shape in map(AttnShape.parse, SHAPES):
        if shape.latent and "/" in dtype:
            continue
        with np.errstate(over="ignore"):
            k, v, scales = awkward_rows(rng, shape, dtype)
        kinds = storage_types(dtype)
        given = zip("kv", (k, v), kinds, scales, strict=True)
        stored = [rows.stored_values(name, x, kind.name, scale=scale) for name, x, kind, scale in given]
        want = rows.encode(stored[0][0], stored[1][0], shape, dtype, scales)
        words, largest = encode(codec, shape, dtype, k, v, scales)
        assert np.array_equal(words, want), shape
        assert largest == stored[0][1]
        assert encode(codec, shape, dtype, k[:0], v[:0], scales)[1] == 0
        strides = row_strides(shape, dtype)
        for apart in (strides, (strides[0] + 6, strides[1] + (6 if shape.latent else 2))):
            words, _ = encode(codec, shape, dtype, k, v, scales, strides=apart)
            assert np.array_equal(words, from_rows(want, shape, dtype, apart)), (shape, apart)


def bytes_of_rows(rng, kind, tokens, heads, dims):
    """Random rows as another cache stores them, with no number that is not finite."""
    if not kind.quantized:
        x = rng.standard_normal((tokens, heads, dims), np.float32).astype(NARROW.get(kind.name, np.float32))
        return x.view(np.uint8).reshape(tokens, heads, -1)
    raw = rng.integers(0, 256, (tokens, heads, kind.row_bytes(dims)), np.uint8)
    if kind.head_scale:
        raw[(raw & 127) == 127] = 126
        return raw
    halves = rng.standard_normal((tokens, heads, dims // 32, kind.halves)).astype(np.float16)
    in_blocks = raw.reshape(tokens, heads, dims // 32, -1)
    in_blocks[..., : 2 * kind.halves] = halves.view(np.uint8)
    return raw


@pytest.mark.parametrize("dtype", (*STORAGE, *MIXED))
def test_encoded_rows_have_the_bits_of_the_package(codec, rng, dtype):
    scales = rng.uniform(0.1, 4, (2, 2)).astype(np.float32)
    for shape in (AttnShape(2, 2, 96, 64), AttnShape(2, 2, 64, 32, latent=True)):
        if shape.latent and "/" in dtype:
            continue
        sizes = zip(storage_types(dtype), (shape.head_dim, shape.v_head_dim), strict=True)
        given = [bytes_of_rows(rng, kind, 5, 2, dims) for kind, dims in sizes]
        want, largest = encoded_rows(given[:1] if shape.latent else given, shape, dtype, scales)
        words, found = encode(codec, shape, dtype, *given, scales, encoded=True)
        assert np.array_equal(words, want) and found == largest.k
        strides = row_strides(shape, dtype)
        words, _ = encode(codec, shape, dtype, *given, scales, encoded=True, strides=strides)
        assert np.array_equal(words, from_rows(want, shape, dtype, strides))


@pytest.mark.parametrize(
    "dtype,value,message",
    (
        ("f16", np.inf, "v[1, 0, 3]: got inf, expected a finite value of at most 65504"),
        ("f16", -np.nan, "v[1, 0, 3]: got "),
        ("bf16", 2.0**61, "v[1, 0, 3]: got 2.30584301e+18, expected a finite value of at most 2**60"),
        ("f32", np.nan, "v[1, 0, 3]: got nan, expected a finite value of at most 2**60"),
        ("q8_0", 127 * 65505.0, "v[1, 0, 3]: got 8319135, expected a finite value of at most 8319008"),
        ("q5_1", -65505.0, "v[1, 0, 3]: got -65505, expected a finite value of at most 65504"),
        ("q5_0", np.nan, "v[1, 0, 3]: got nan, expected a finite value of at most 1048064"),
        ("q4_1", 65505.0, "v[1, 0, 3]: got 65505, expected a finite value of at most 65504"),
        ("f32/q4_0", 2.0**19, "v[1, 0, 3]: got 524288, expected a finite value of at most 524032"),
        ("q8_0/iq4_nl", 6550401.0, "v[1, 0, 3]: got 6550401, expected a finite value of at most 6550400"),
        ("fp8_e4m3", np.inf, "v[1, 0, 3]: got inf, expected a finite value of at most 2**60"),
        ("fp8_e4m3", -225.0, "v[1, 0, 3]: got -225, expected at most 448 times the head's scale, 0.5; give a larger "),
    ),
)
def test_values_that_no_row_takes(codec, dtype, value, message):
    kinds, scales = storage_types(dtype), np.full((2, 1), 0.5, np.float32)
    k, v = (np.zeros((2, 1, 64), NARROW.get(kind.name, np.float32)) for kind in kinds)
    v[1, 0, 3] = value
    assert encode(codec, AttnShape(1, 1, 64), dtype, k, v, scales).startswith(message)
    with pytest.raises(rows.ValueRangeError):
        rows.stored_values("v", v, kinds[1].name, scale=scales[1])


@pytest.mark.parametrize(
    "dtype,at,message",
    (
        ("q8_0", 1, "k: got a scale or minimum that is not finite in token 1, KV head 0, block 0, expected numbers"),
        ("q5_1", 24 + 3, "k: got a scale or minimum that is not finite in token 1, KV head 0, block 1, expected "),
        ("fp8_e4m3", 7, "k: got an fp8_e4m3 NaN in token 1, KV head 0, value 7, expected numbers"),
        ("bf16", 7, "k[1, 0, 3]: got nan, expected a finite value"),
    ),
)
def test_encoded_rows_that_no_cache_takes(codec, dtype, at, message):
    shape, kind = AttnShape(1, 1, 64), STORAGE[dtype]
    given = np.zeros((2, 2, 1, kind.row_bytes(64)), np.uint8)
    given[0, 1, 0, at] = 0x7F
    if dtype == "bf16":
        given[0, 1, 0, at - 1] = 0xFF
    assert encode(codec, shape, dtype, *given, encoded=True).startswith(message)
    with pytest.raises(rows.ValueRangeError):
        encoded_rows(list(given), shape, dtype, None)


def test_encoded_blocks_are_whole(codec):
    x = np.zeros((1, 1, 80), np.uint8)
    message = "encoded: got rows of 80 values in v, expected a multiple of 32 for q4_0; give floats for other sizes"
    assert encode(codec, AttnShape(1, 1, 80), "fp8_e4m3/q4_0", x, x, encoded=True) == message
    assert len(encode(codec, AttnShape(1, 1, 80), "fp8_e4m3", x, x, encoded=True)) == 2


def test_the_library_s_types_are_the_package_s(codec):
    """The tables of storage.c, in the order of zinc_attn.h."""
    most, limits = {"f16": blocks.F16_MAX, **blocks.MOST}, (head_scales.LEAST, head_scales.MOST)
    found = [one.row() for one in (StorageType * len(DTYPES)).in_dll(codec, "za_storage")[1:]]
    assert found == [
        (name.encode(), one.bits, one.halves, one.fifth_bits, one.head_scale, most.get(name, 0))
        for name, one in STORAGE.items()
    ]
    assert (*(c.c_float * 16).in_dll(codec, "za_iq4_nl"),) == IQ4_NL
    assert (*(c.c_double * 5).in_dll(codec, "za_storage_limits"),) == (blocks.GROWTH, FP8_UNIT, 448, *limits)
    enum = re.search(r"enum za_dtype \{(.*?)\};", (NATIVE / "include" / "zinc_attn.h").read_text(), flags=re.S)[1]
    assert [name.lower() for name in re.findall(r"ZA_(\w+)", enum)] == [*DTYPES, "dtypes"]
    assert f"enum {{ BLOCK = {BLOCK} }};" in (NATIVE / "src" / "storage.h").read_text()


def test_the_split_rule_has_the_planner_s_numbers():
    line = re.search(r"enum \{ (WORKGROUPS_PER_UNIT.*?) \}", (NATIVE / "src" / "work.c").read_text())[1]
    leaves = {"SINGLE_SPLIT_LEAVES": splits.SINGLE_SPLIT_KEYS // 64, "NODE_LEAVES": splits.NODE_KEYS // 64}
    numbers = {"MAX_SPLITS": splits.MAX_LEAF_SPLITS, "MAX_CPU_STATES": splits.MAX_CPU_STATES, **leaves}
    numbers["WORKGROUPS_PER_UNIT"] = splits.WORKGROUPS_PER_UNIT
    assert {name: int(n) for name, n in re.findall(r"(\w+) = (\d+)", line)} == numbers


@needs_compiler
def test_every_name_of_the_library_has_its_prefix(tmp_path):
    """So that a host can link it beside a JSON reader, or a SHA-256, of its own."""
    file = built(tmp_path, LIBRARY, "-O0")
    found = subprocess.run(["nm", "-g", "--defined-only", file], capture_output=True, text=True)
    names = set(re.findall(r"^\w+ [A-Z] (\w+)$", found.stdout, flags=re.M)) - {"_init", "_fini"}
    assert len(names) > 20 and all(name.startswith("za_") for name in names), names


def test_the_program_uses_the_header_alone():
    included = re.findall(r'#include "(.*)"', (NATIVE / "embed" / "main.c").read_text())
    assert included == ["zinc_attn.h"]
