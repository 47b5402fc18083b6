"""The parts of the C library that need no device: the codec of rows, the library's names, and what documents show."""

import ctypes as c
import itertools
import re
import subprocess
from dataclasses import asdict

import numpy as np
import pytest
from c_host import COMPILER, NARROW, NATIVE, PAGE, SHIMMED, contract, library, needs_compiler, structures
from support import row_bytes

from zinc_attn.cache import rows
from zinc_attn.cache.encoded import encoded_rows
from zinc_attn.cache.strided import from_rows
from zinc_attn.graph.declarations import GRAPH_KERNELS
from zinc_attn.kernels import c as generated_c
from zinc_attn.kernels.families import AMD, FAMILIES, INTEL, NVIDIA, layout_of
from zinc_attn.kernels.matrix import WORKGROUP_RULE
from zinc_attn.kernels.sizes import value_passes
from zinc_attn.kernels.tuning import heads_together, most_heads, shared_rows, wave_size
from zinc_attn.limits import MAX_HEADS_PER_WORKGROUP
from zinc_attn.planning.splits import SplitPlan, plan_splits
from zinc_attn.runtime.device import SPIRV, load_spirv
from zinc_attn.runtime.vulkan.commands import Access, levels
from zinc_attn.shapes import KV_LAYOUTS, TILES, AttnShape, row_format, row_strides, strided_format
from zinc_attn.storage import STORAGE, storage_index, storage_types
from zinc_attn.tools.cost.cards import CARDS
from zinc_attn.tools.cost.predict import predict
from zinc_attn.tools.export import describe

MIXED = [f"{k}/{v}" for k, v in zip(STORAGE, [*STORAGE][3:] + [*STORAGE][:3], strict=True)]  # each once as K, as V
SHAPES = ("2/2/64", "2/2/80", "2/2/96/160", "1/1/576/512", "3/3/65/33", "2/2/7/100", "1/1/80/65/latent")


RowPart, RowFormat, NewRows = map(structures(NATIVE / "src" / "rows.h").get, ("row_part", "row_format", "new_rows"))


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


def rows_of_any_codes(rng, kind, dims):
    """Of five tokens and two heads, with finite scales; an encoder makes some of the codes only."""
    stored = row_bytes(rng.standard_normal((5, 2, dims), np.float32), kind.name)
    if kind.quantized:
        codes = stored.reshape(5, 2, -1, kind.block_bytes)[..., 2 * kind.halves :]
        codes[:] = rng.integers(0, 256, codes.shape)
        if kind.head_scale:
            codes[(codes & 127) == 127] = 126
    return stored


@pytest.mark.parametrize("dtype", (*STORAGE, *MIXED))
def test_encoded_rows_have_the_bits_of_the_package(codec, rng, dtype):
    scales = rng.uniform(0.1, 4, (2, 2)).astype(np.float32)
    for shape in (AttnShape(2, 2, 96, 64), AttnShape(2, 2, 64, 32, latent=True)):
        if shape.latent and "/" in dtype:
            continue
        sizes = zip(storage_types(dtype), (shape.head_dim, shape.v_head_dim), strict=True)
        encoded = [rows_of_any_codes(rng, kind, dims) for kind, dims in sizes]
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
def test_every_name_of_the_library_has_its_prefix():
    """So that a host can link it beside any code of its own."""
    command = ["nm", "-g", "--defined-only", library(SHIMMED)._name]
    output = subprocess.run(command, capture_output=True, text=True)
    names = set(re.findall(r"^\w+ [A-Z] (\w+)$", output.stdout, flags=re.M)) - {"_init", "_fini"}
    assert len(names) > 20 and all(name.startswith("za_") for name in names), names


# --- the generated formulas ----------------------------------------------------------------------------------


def values_of(struct):
    return {name: getattr(struct, name) for name, _ in struct._fields_}


NUMBERED = ("9/3/64", "16/2/256", "20/1/576/512/latent", "32/32/128", "71/1/64", "5/1/40", "32/8/192/128", "3/1/65/33")


@pytest.fixture(scope="module")
def formulas():
    """The generated functions and those of shape.c, and the numbers of a shape."""
    if COMPILER is None:
        pytest.skip("there is no C compiler (package gcc)")
    loaded = library([NATIVE / "src" / f"{name}.c" for name in ("shape", "loops", "error")])
    structs = structures(contract() / "zinc_contract.h")
    for family in generated_c.FAMILIES:
        getattr(loaded, f"za_{family}_constants").restype = structs[f"{family}_constants"]
    loaded.za_registers_of.restype = structs["registers"]
    loaded.za_split_rule.restype, loaded.za_units_fit.restype = c.c_uint64, c.c_bool
    loaded.za_split_rule.argtypes = [c.c_void_p, c.c_uint64, c.c_uint64]

    def sizes_of(shape, dtype="f16", page_size=64, layout="tiles", kind="gpu", registers=None):
        k, v = map(storage_index, storage_types(dtype))
        fields = {
            **asdict(shape),
            **(registers or layout_of(kind))._asdict(),
            "page_size": page_size,
            "k_storage": k,
            "v_storage": v,
            "nhd": layout == "NHD",
        }
        sizes = structs["sizes"](**{name: int(x) for name, x in fields.items()}, compute_units=64, cpu=kind == "cpu")
        loaded.za_sizes(c.byref(sizes))
        return sizes

    loaded.sizes_of = sizes_of
    return loaded


@pytest.mark.parametrize("page_size", (1, 64))
@pytest.mark.parametrize("dtype", ("f16", "q8_0", "q8_0/q4_0", "f32/bf16", "iq4_nl/q5_1"))
def test_the_numbers_of_a_shape_are_the_package_s(formulas, dtype, page_size):
    """As the manifest has them, which is compared with what Python computes."""
    for shape, layout, kind in itertools.product(map(AttnShape.parse, NUMBERED), KV_LAYOUTS, describe.KINDS):
        if shape.latent and "/" in dtype:
            continue
        entry = describe._shape(shape, dtype, page_size, 64, layout)
        sizes = formulas.sizes_of(shape, dtype, page_size, layout, kind)
        numbers, special = values_of(sizes), entry["kinds"][kind]["specialization"]
        assert {name: numbers[name] for name in entry["sizes"]} == entry["sizes"], (shape, layout)
        for family, decl in generated_c.FAMILIES.items():
            constants = values_of(getattr(formulas, f"za_{family}_constants")(c.byref(sizes)))
            assert constants == {**special[family], **dict(decl.fixed)}, (shape, layout, kind)
        for nodes, q_len in itertools.product((0, 1, 2, 9, 64, 500, 1 << 15), (1, 2, 33)):
            plan = plan_splits(nodes * 512, shape, 64, q_len)
            assert formulas.za_split_rule(c.byref(sizes), nodes, q_len) == plan.num_splits, (shape, nodes)


def test_the_modeled_share_is_the_package_s(formulas):
    """Of the library's splits, whose programs have the constants of the test before; beside that of Python's."""
    page, shape = (PAGE.parent / "cost-model.md").read_text(), AttnShape(16, 2, 256)
    written = re.search(r"with its own rule the share is (.*) % at 32k and (.*) % at 128k", page)
    for tokens, said in zip((1 << 15, 1 << 17), written.groups(), strict=True):
        splits = formulas.za_split_rule(c.byref(formulas.sizes_of(shape)), tokens // 512, 1)
        plans = SplitPlan.fixed(tokens, shape, num_splits=splits), plan_splits(tokens, shape, 64)
        library, package = (f"{100 * predict(plan, CARDS['r9700']).fraction:.1f}" for plan in plans)
        print(f"{tokens} keys: {library} % of the C library's {splits} splits, {package} % of Python's")
        assert library == package == said


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


@needs_compiler
def test_grids_of_the_graph_s_kernels_are_python_s(rng):
    loaded = library([NATIVE / "src" / "error.c", contract() / "zinc_graph.c"])
    for number, kernel in enumerate(GRAPH_KERNELS):
        for _ in range(50):
            spec = rng.integers(1, 6, len(kernel.decl.spec)).astype(np.uint32)
            words, groups = rng.integers(1, 90, kernel.words).astype(np.uint32), np.zeros(3, np.uint32)
            loaded.za_graph_groups(number, *(c.c_void_p(x.ctypes.data) for x in (spec, words, groups)))
            assert tuple(groups) == kernel.groups(spec.tolist(), words.tolist()), kernel.name


@needs_compiler
@pytest.mark.parametrize("in_order", (False, True))
def test_levels_are_python_s(rng, in_order):
    """Of random lists; what a command waits for is there, and a list that was cleared leaves nothing."""
    loaded = library([NATIVE / "src" / "error.c", NATIVE / "src" / "levels.c"])
    structs = structures(contract() / "zinc_contract.h") | structures(NATIVE / "src" / "objects.h")
    structs |= structures(NATIVE / "src" / "levels.h")
    state, met = structs["levels"](), 0
    a, b = (Access(buffer, 0, 4, True) for buffer in range(2))
    assert [*levels([([a], False), ([b], False), ([b, a], True)], False)] == [0, 0, 1]  # beside b, after a
    for _ in range(100):
        steps, commands = [], []
        for i in range(int(rng.integers(1, 30))):
            n, written = int(rng.integers(1, 7)), int(rng.integers(64))
            kernel = structs["kernel"](name=b"one", bindings=n, written=written)
            command = structs["za_command"](c.addressof(kernel), independent=i > 0 and rng.random() < 0.1)
            places = rng.integers((1, 0, 1), (4, 90, 20), (n, 3)).tolist()
            for to, place in zip(command.place, places, strict=False):
                to.buffer, to.offset, to.size = place
            assert loaded.za_level(c.byref(state), c.byref(command), c.c_uint32(state.last if in_order else 0))
            used = [Access(x, begin, begin + size, written >> j & 1 == 1) for j, (x, begin, size) in enumerate(places)]
            steps.append((used, command.independent))
            commands.append(command.level)
            if command.awaited:
                begin = command.met.offset
                access = Access(command.met.buffer, begin, begin + command.met.size, True)
                assert command.met.size and any(access.meets(other) for other in used)
                met += 1
        assert commands == [*levels(steps, in_order)]
        loaded.za_levels_clear(c.byref(state))
    loaded.za_levels_free(c.byref(state))
    assert met > 100
