"""The parts of the C library that need no device: the codec of rows, the library's names, and what documents show."""

import ctypes as c
import itertools
import re
import subprocess
from dataclasses import asdict

import numpy as np
import pytest
from c_host import COMPILER, LIBRARY, NARROW, NATIVE, built, library, needs_compiler

from zinc_attn.cache import rows
from zinc_attn.cache.encoded import encoded_rows
from zinc_attn.cache.mover import PageGeometry
from zinc_attn.cache.strided import from_rows
from zinc_attn.kernels import c as generated_c
from zinc_attn.kernels import declarations
from zinc_attn.kernels.declarations import MAX_BINDINGS
from zinc_attn.kernels.dispatches import AttendVariant, copy_call, merge_call, move_call
from zinc_attn.kernels.families import AMD, FAMILIES, INTEL, NVIDIA, Layout, layout_of
from zinc_attn.kernels.matrix import WORKGROUP_RULE
from zinc_attn.kernels.sizes import value_passes
from zinc_attn.kernels.tuning import heads_together, most_heads, shared_rows, wave_size
from zinc_attn.limits import MAX_HEADS_PER_WORKGROUP
from zinc_attn.planning.splits import plan_splits
from zinc_attn.runtime.device import SPIRV, load_spirv
from zinc_attn.runtime.vulkan.commands import Access, levels
from zinc_attn.shapes import KV_LAYOUTS, TILES, AttnShape, row_format, row_strides, strided_format
from zinc_attn.storage import STORAGE, storage_index, storage_types
from zinc_attn.tools.export import describe

MIXED = [f"{k}/{v}" for k, v in zip(STORAGE, [*STORAGE][3:] + [*STORAGE][:3], strict=True)]  # each once as K, as V
SHAPES = ("2/2/64", "2/2/80", "2/2/96/160", "1/1/576/512", "3/3/65/33", "2/2/7/100", "1/1/80/65/latent")


class RowPart(c.Structure):
    _fields_ = [
        ("dtype", c.c_int),
        *((name, c.c_uint32) for name in ("dims", "stored", "value_words", "scale_words", "stride")),
    ]


class RowFormat(c.Structure):
    _fields_ = [("kv_heads", c.c_uint32), ("k", RowPart), ("v", RowPart)]


class NewRows(c.Structure):
    _fields_ = [("tokens", c.c_uint32), ("encoded", c.c_bool)]
    _fields_ += [(name, c.c_void_p) for name in ("k", "v", "k_scales", "v_scales")]


@pytest.fixture(scope="module")
def codec():
    """The codec, which needs the contract and error.c alone."""
    if COMPILER is None:
        pytest.skip("there is no C compiler (package gcc)")
    sources = [NATIVE / "src" / f"{name}.c" for name in ("rows", "blocks", "floats", "error")]
    loaded = library(sources)
    loaded.za_rows_encode.restype = c.c_bool
    return loaded


def encode(codec, shape, dtype, k, v, scales=None, encoded=False, strides=TILES):
    """The words of rows, and the largest magnitude of k; a message where the codec refuses them."""
    row = row_format(shape, dtype) if strides == TILES else strided_format(strides, shape.latent)
    k_type, v_type = (1 + storage_index(kind) for kind in storage_types(dtype))
    k_part = RowPart(k_type, shape.head_dim, shape.k_dim, row.k_values, row.k_scales, strides[0])
    v_part = RowPart(v_type, shape.v_head_dim, shape.v_dim, row.v_values, row.v_scales, strides[1])
    form = RowFormat(shape.kv_heads, k_part, RowPart(v_type) if shape.latent else v_part)
    scales = np.ones((2, shape.kv_heads), np.float32) if scales is None else scales
    arrays = [np.ascontiguousarray(x) for x in (k, k if shape.latent else v, *scales)]
    new = NewRows(len(k), encoded, *(x.ctypes.data for x in arrays))
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
    most = kind.most if kind.halves else 60000.0
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
        parts = zip("kv", (k, v), kinds, scales, strict=True)
        stored = [rows.stored_values(name, x, kind.name, scale=scale) for name, x, kind, scale in parts]
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
        encoded = [bytes_of_rows(rng, kind, 5, 2, dims) for kind, dims in sizes]
        want, largest = encoded_rows(encoded[:1] if shape.latent else encoded, shape, dtype, scales)
        words, largest_k = encode(codec, shape, dtype, *encoded, scales, encoded=True)
        assert np.array_equal(words, want) and largest_k == largest.k
        strides = row_strides(shape, dtype)
        words, _ = encode(codec, shape, dtype, *encoded, scales, encoded=True, strides=strides)
        assert np.array_equal(words, from_rows(want, shape, dtype, strides))


@pytest.mark.parametrize(
    "dtype,value,message",
    (
        ("f16", np.inf, "v[1, 0, 3]: got inf, expected a finite value of at most 65504"),
        ("bf16", 2.0**61, "v[1, 0, 3]: got 2.30584301e+18, expected a finite value of at most 2**60"),
        ("f32", np.nan, "v[1, 0, 3]: got nan, expected a finite value of at most 2**60"),
        ("q8_0", 127 * 65505.0, "v[1, 0, 3]: got 8319135, expected a finite value of at most 8319008"),
        ("q5_1", -65505.0, "v[1, 0, 3]: got -65505, expected a finite value of at most 65504"),
        ("q5_0", np.nan, "v[1, 0, 3]: got nan, expected a finite value of at most 1048064"),
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
    "dtype,offset,message",
    (
        ("q8_0", 1, "k: got a scale or minimum that is not finite in token 1, KV head 0, block 0, expected numbers"),
        ("q5_1", 24 + 3, "k: got a scale or minimum that is not finite in token 1, KV head 0, block 1, expected "),
        ("fp8_e4m3", 7, "k: got an fp8_e4m3 NaN in token 1, KV head 0, value 7, expected numbers"),
        ("bf16", 7, "k[1, 0, 3]: got nan, expected a finite value"),
    ),
)
def test_encoded_rows_that_no_cache_takes(codec, dtype, offset, message):
    shape, kind = AttnShape(1, 1, 64), STORAGE[dtype]
    encoded = np.zeros((2, 2, 1, kind.row_bytes(64)), np.uint8)
    encoded[0, 1, 0, offset] = 0x7F
    if dtype == "bf16":
        encoded[0, 1, 0, offset - 1] = 0xFF
    assert encode(codec, shape, dtype, *encoded, encoded=True).startswith(message)
    with pytest.raises(rows.ValueRangeError):
        encoded_rows(list(encoded), shape, dtype, None)


def test_encoded_blocks_are_whole(codec):
    x = np.zeros((1, 1, 80), np.uint8)
    message = "encoded: got rows of 80 values in v, expected a multiple of 32 for q4_0; give floats for other sizes"
    assert encode(codec, AttnShape(1, 1, 80), "fp8_e4m3/q4_0", x, x, encoded=True) == message
    assert len(encode(codec, AttnShape(1, 1, 80), "fp8_e4m3", x, x, encoded=True)) == 2


@needs_compiler
def test_every_name_of_the_library_has_its_prefix(tmp_path):
    """So that a host can link it beside any code of its own."""
    file = built(tmp_path, LIBRARY, "-O0")
    output = subprocess.run(["nm", "-g", "--defined-only", file], capture_output=True, text=True)
    names = set(re.findall(r"^\w+ [A-Z] (\w+)$", output.stdout, flags=re.M)) - {"_init", "_fini"}
    assert len(names) > 20 and all(name.startswith("za_") for name in names), names


# --- the generated formulas ----------------------------------------------------------------------------------


def words_named(names, kind=c.c_uint32):
    """A struct of words with these names."""
    return type("Words", (c.Structure,), {"_fields_": [(name, kind) for name in names]})


def values_of(struct):
    return {name: getattr(struct, name) for name, _ in struct._fields_}


NUMBERED = ("9/3/64", "16/2/256", "20/1/576/512/latent", "32/32/128", "71/1/64", "5/1/40", "32/8/192/128", "3/1/65/33")


@pytest.fixture(scope="module")
def formulas():
    """The generated functions and those of shape.c, and the numbers of a shape."""
    if COMPILER is None:
        pytest.skip("there is no C compiler (package gcc)")
    loaded = library([NATIVE / "src" / f"{name}.c" for name in ("shape", "loops", "error")])
    fields = [(name, c.c_bool if name == "cpu" else c.c_uint64) for name in generated_c.size_fields()]
    loaded.Sizes = type("Sizes", (c.Structure,), {"_fields_": fields})
    for family, decl in generated_c.FAMILIES.items():
        getattr(loaded, f"za_{family}_constants").restype = words_named(decl.constant_names)
    loaded.za_split_rule.restype, loaded.za_units_fit.restype = c.c_uint64, c.c_bool
    loaded.za_split_rule.argtypes = [c.c_void_p, c.c_uint64, c.c_uint64]

    def sizes_of(shape, dtype="f16", page_size=64, layout="tiles", kind="gpu", registers=None):
        k, v = map(storage_index, storage_types(dtype))
        fields = {**asdict(shape), **(registers or layout_of(kind))._asdict(), "page_size": page_size}
        fields |= {"k_storage": k, "v_storage": v, "nhd": layout == "NHD"}
        sizes = loaded.Sizes(**{name: int(x) for name, x in fields.items()}, compute_units=64, cpu=kind == "cpu")
        loaded.za_sizes(c.byref(sizes))
        return sizes

    loaded.sizes_of = sizes_of
    return loaded


def programs(shape, dtype, kind, tile, strides, pages):
    """Declarations and constants of the package's kernels."""
    append = move_call(declarations.APPEND_KERNEL, shape, dtype, tile, 1, shape.kv_heads, strides)
    attend = AttendVariant(shape, dtype, kind, tile, strides=strides)
    calls = merge_call(shape, kind, 1), append, copy_call(pages.tile_words, 1, 1)
    return [attend.program(), *((call.decl, call.spec) for call in calls)]


@pytest.mark.parametrize("page_size", (1, 64))
@pytest.mark.parametrize("dtype", (*STORAGE, "q8_0/q4_0", "f32/bf16", "iq4_nl/q5_1"))
def test_the_numbers_of_a_shape_are_the_package_s(formulas, dtype, page_size):
    """The library's, and the manifest's: of rows, pages, kernels and splits."""
    for shape, layout, kind in itertools.product(map(AttnShape.parse, NUMBERED), KV_LAYOUTS, describe.KINDS):
        if shape.latent and "/" in dtype:
            continue
        entry = describe._shape(shape, dtype, page_size, 64, layout)
        sizes = formulas.sizes_of(shape, dtype, page_size, layout, kind)
        numbers, special = values_of(sizes), entry["kinds"][kind]["specialization"]
        assert {name: numbers[name] for name in entry["sizes"]} == entry["sizes"], (shape, layout)
        strides = row_strides(shape, dtype) if layout == "NHD" else TILES
        row = row_format(shape, dtype) if layout == "tiles" else strided_format(strides, shape.latent)
        pages = PageGeometry(shape, dtype, numbers["tile"], numbers["page_tiles"], strides)
        assert {name: numbers[name] for name in asdict(row)} == asdict(row), (shape, layout)
        assert (numbers["k_stride"], numbers["v_stride"]) == strides, (shape, layout)
        assert entry["kv_bytes_per_token"] == 4 * pages.row_words, (shape, layout)
        each = [shape.kv_heads * numbers["page_tiles"] * words for words in pages.tile_words]
        assert [numbers["k_page_words"], numbers["v_page_words"]] == each, (shape, layout)
        for family, decl in generated_c.FAMILIES.items():
            constants = values_of(getattr(formulas, f"za_{family}_constants")(c.byref(sizes)))
            assert constants == {**special[family], **dict(decl.fixed)}, (shape, layout, kind)
        device = "cpu" if kind == "cpu" else "discrete"
        for decl, values in programs(shape, dtype, device, numbers["tile"], strides, pages):
            assert tuple(special[decl.family][name] for name in decl.spec) == values, (shape, layout, kind)
        for nodes, q_len in itertools.product((0, 1, 2, 9, 64, 500, 1 << 15), (1, 2, 33)):
            plan = plan_splits(nodes * 512, shape, 64, q_len)
            assert formulas.za_split_rule(c.byref(sizes), nodes, q_len) == plan.num_splits, (shape, nodes)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_workgroups_serve_as_many_heads_and_rows_as_the_package_s(formulas, family):
    """Where registers, shared memory or compute units bound them; their waves have as many invocations."""
    layout = family.layout
    for group, dims, shared in itertools.product(range(1, 40), (64, 100, 128, 256, 576), (16 << 10, 32 << 10, 1 << 16)):
        shape = AttnShape(group * 2, 2, dims)
        sizes = c.byref(formulas.sizes_of(shape, registers=layout))
        cpu = c.byref(formulas.sizes_of(shape, kind="cpu"))
        assert formulas.za_rows_together(sizes, shared) == shared_rows(shape, shared, layout=layout)
        assert formulas.za_rows_together(cpu, shared) == shared_rows(shape, shared, MAX_HEADS_PER_WORKGROUP)
        for vectors in (8, 16, 32, 64):
            room = vectors, 16, shared, 512
            rule = WORKGROUP_RULE.values(shape.k_dim, shape.v_dim, vectors, 16, 1, 1, *room[2:])
            assert formulas.za_units_fit(sizes, *map(c.c_uint64, room)) == rule["FITS"], shape
            assert formulas.za_units_walks(sizes, c.c_uint64(vectors)) == rule["WALKS"], shape
            assert formulas.za_units_size(sizes, *map(c.c_uint64, room[:2])) == rule["SIZE"], shape
        for items in (1, 7, 200):
            most = most_heads(shape, items, 64, shared, layout)
            heads = heads_together(shape, most, layout)
            assert formulas.za_heads_together(sizes, c.c_uint64(items), shared) == heads, shape
            lanes = wave_size(layout.lanes, shape, heads, value_passes(shape, heads, layout))
            assert formulas.za_lanes(sizes, c.c_uint64(heads)) == lanes, shape


def test_a_device_has_the_registers_of_its_family(formulas):
    formulas.za_registers_of.restype = words_named(Layout._fields)
    for kind, vendor, major, subgroup in itertools.product(
        ("cpu", "gpu"), (AMD, NVIDIA, INTEL, 0x13B5), (2, 25, 26, 580), (4, 8, 16, 32)
    ):
        result = formulas.za_registers_of(kind == "cpu", vendor, major, subgroup)
        assert tuple(values_of(result).values()) == layout_of(kind, vendor, major, subgroup)


def test_loops_are_unrolled_as_by_the_package(formulas):
    formulas.za_unrolled.restype, formulas.free.argtypes = c.c_void_p, [c.c_void_p]
    for decl in generated_c.KERNELS:
        if decl.extension and not (SPIRV / decl.file).exists():
            continue  # of an older glslang
        code = load_spirv(decl)
        hinted = formulas.za_unrolled(code, c.c_size_t(len(code) // 4))
        assert c.string_at(hinted, len(code)) == load_spirv(decl, "discrete"), decl
        formulas.free(hinted)


class Kernel(c.Structure):
    _fields_ = [("name", c.c_char_p), ("module", c.c_char_p), ("code", c.c_void_p), ("code_bytes", c.c_size_t)]
    _fields_ += [(name, c.c_uint32) for name in ("bindings", "constants", "written")]


class Command(c.Structure):
    _fields_ = [("kernel", c.POINTER(Kernel)), ("pipeline", c.c_void_p), ("place", c.c_uint64 * 3 * MAX_BINDINGS)]
    _fields_ += [("groups", c.c_uint32 * 3), ("beside", c.c_bool), ("products", c.c_uint64), ("level", c.c_uint32)]
    _fields_ += [("behind", c.POINTER(Kernel)), ("met", c.c_uint64 * 3)]


@needs_compiler
@pytest.mark.parametrize("in_order", (False, True))
def test_levels_are_python_s(rng, in_order):
    """Of random lists; what a command waits for is there, and a list that was cleared leaves nothing."""
    loaded = library([NATIVE / "src" / "error.c", NATIVE / "src" / "levels.c"])
    state, met = (c.c_uint64 * 3)(), 0  # struct levels: a pointer, two words, and the last level
    last = c.c_uint32.from_buffer(state, 16)
    a, b = (Access(buffer, 0, 4, True) for buffer in range(2))
    assert [*levels([([a], False), ([b], False), ([b, a], True)], False)] == [0, 0, 1]  # beside b, behind a
    for _ in range(100):
        steps, commands = [], []
        for i in range(int(rng.integers(1, 30))):
            n, written = int(rng.integers(1, 7)), int(rng.integers(64))
            kernel = Kernel(b"one", b"one", None, 0, n, 0, written)
            command = Command(c.pointer(kernel), beside=i > 0 and rng.random() < 0.1)
            places = [(*map(int, rng.integers((1, 0, 1), (4, 90, 20))),) for _ in range(n)]
            command.place[:n] = [(c.c_uint64 * 3)(*place) for place in places]
            assert loaded.za_level(state, c.byref(command), last if in_order else c.c_uint32(0))
            accesses = [
                Access(b, start, start + size, written >> j & 1 == 1) for j, (b, start, size) in enumerate(places)
            ]
            steps.append((accesses, command.beside))
            commands.append(command.level)
            if command.behind:
                buffer, begin, size = command.met
                access = Access(buffer, begin, begin + size, True)
                assert size and any(access.meets(other) for other in accesses)
                met += 1
        assert commands == [*levels(steps, in_order)]
        loaded.za_levels_clear(state)
    loaded.za_levels_free(state)
    assert met > 100
