"""native/ggml behind as much of ggml's interface as it uses (``tests/ggml``): its bits are the oracle's, with keys in
the order of writes. ``test_llama.py`` runs it with llama.cpp, and ggml's own tests of it."""

import ctypes as c
import itertools
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import faults
import ggml_graphs as graphs
import numpy as np
import pytest
from c_host import LIBRARY, NATIVE, ROOT, built, compiler_file, contract, name_for, needs_compiler
from engine import address
from objects import joined, linked
from support import FULL, has_int8_units, row_bytes, same

import zinc_attn as za
from zinc_attn.cache.rows import stored, stored_scales
from zinc_attn.graph import blocks
from zinc_attn.storage import STORAGE

COMPILER = shutil.which(os.environ.get("CXX", "c++"))
STUB = ROOT / "tests" / "ggml"
# numbers, and bytes of a block
TYPES = {"f32": (0, 4), "f16": (1, 2), "bf16": (2, 2), "q8_0": (3, 34), "q4_0": (7, 18), "i32": (9, 4), "i64": (10, 8)}
SET_ROWS, FLASH_ATTN_EXT, MUL_MAT, CPY = range(5, 9)
DONE, DECLINED, FAILED = range(3)
ANY, _, COMPUTE = range(3)  # usage of a buffer
OURS = [path for path in sorted((NATIVE / "ggml").glob("*.cpp")) if path.stem != "interface"]
OURS.sort(key=lambda path: path.stem != "lists")  # whose HIDDEN is a macro in C, which the others include
GRAPH = [NATIVE / "graph" / f"{name}.cpp" for name in ("memory", "recorder", "rope_table")]
V_AT = 1 << 20  # K lies at the begin of the buffer
PROCESSOR_TOO = True
pytestmark = [needs_compiler, pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler (package g++)")]


class BackEnd:
    """The back end with a buffer."""

    @staticmethod
    def compiled(folder: Any, *more: str) -> Any:
        for name in ("ggml-backend.h", "ggml-backend-impl.h", "ggml-impl.h"):
            (folder / name).write_text('#include "ggml.h"\n')
        flags = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", *more]
        folders = STUB, folder, NATIVE / "src", NATIVE / "include", contract()
        flags += ["-Wno-missing-field-initializers", *(f"-I{one}" for one in folders)]
        library = built(folder, [*LIBRARY, contract() / "zinc_graph.c"], *more)
        flags += [f"-I{NATIVE / 'ggml'}"]  # of the files that are joined
        ours = joined(folder, OURS), *GRAPH, STUB / "back_end.cpp"
        commands = [([str(COMPILER), *flags], source) for source in ours]
        link = [str(COMPILER), "-shared", *more, library, f"-Wl,-rpath,{folder}"]
        done = linked(folder / "b.so", commands, link)
        assert done.returncode == 0, done.stderr
        return folder / "b.so"

    def __init__(self, path: Any) -> None:
        self.path, self.c = path, c.CDLL(str(path))
        for name in ("make_buffer", "make_host_buffer", "make_tensor", "make_view", "bytes_of"):
            getattr(self.c, name).restype = c.c_void_p
        self.c.takes_cache.restype = self.c.describe.restype = self.c.compute_graph.restype = c.c_bool
        self.c.set_most.restype = self.c.free_bytes.restype = c.c_size_t
        assert self.c.open_back_end()
        self.buffer = c.c_void_p(self.c.make_buffer(c.c_size_t(2 * V_AT), ANY))

    def tensor(self, kind: str, *ne: int, array: Any = None, offset: int = 0, buffer: Any = None) -> c.c_void_p:
        """At an offset of a buffer, or of one of its own with an array."""
        sizes, buffer = (c.c_int64 * 4)(*ne, *[1] * (4 - len(ne))), buffer or self.buffer
        if array is not None:
            buffer = c.c_void_p(self.c.make_buffer(c.c_size_t(array.nbytes + offset), COMPUTE))
        made = c.c_void_p(self.c.make_tensor(TYPES[kind][0], sizes, buffer, c.c_size_t(offset)))
        if array is not None:
            self.put(made, array)
        return made

    def put(self, tensor: c.c_void_p, array: Any, offset: int = 0) -> None:
        """Write an array to the tensor's bytes from an offset on."""
        self.c.set_bytes(tensor, c.c_void_p(address(array)), c.c_size_t(offset), c.c_size_t(array.nbytes))

    def get(self, tensor: c.c_void_p, array: Any, offset: int = 0) -> Any:
        """The array, with the tensor's bytes from an offset on."""
        self.c.get_bytes(tensor, c.c_void_p(address(array)), c.c_size_t(offset), c.c_size_t(array.nbytes))
        return array

    def view(self, of: c.c_void_p, ne: tuple[int, ...], nb: tuple[int, ...], offset: int = 0) -> c.c_void_p:
        return c.c_void_p(self.c.make_view(of, (c.c_int64 * 4)(*ne), (c.c_size_t * 4)(*nb), c.c_size_t(offset)))

    def memory(self, words: Any) -> tuple[c.c_void_p, c.c_void_p]:
        """A buffer with these words, and a tensor that is all of it."""
        buffer = c.c_void_p(self.c.make_buffer(c.c_size_t(words.nbytes), COMPUTE))
        whole = self.tensor("f32", words.size, buffer=buffer)
        self.put(whole, words)
        return buffer, whole

    def describe(self, op: int, out: c.c_void_p, *sources: Any, params: bytes = b"", flags: int = 0) -> bool:
        given = (c.c_void_p * 10)(*[one and one.value for one in sources])
        return bool(self.c.describe(op, out, given, params.ljust(64, b"\0"), flags))

    def graph(self, nodes: list[c.c_void_p]) -> None:
        assert self.c.compute_graph((c.c_void_p * len(nodes))(*[node.value for node in nodes]), len(nodes))

    def counts(self) -> list[int]:
        """Dispatches, barriers and workgroups until now."""
        found = (c.c_uint64 * 3)()
        self.c.counts(found)
        return [*found]

    def compute(self, op: int, out: c.c_void_p, *sources: Any, params: tuple[float, ...] = (0, 0, 0), n=1) -> int:
        """The operation's result, computed n times in a graph, or only asked for: what the device answers."""
        if not self.describe(op, out, *sources, params=struct.pack(f"{len(params)}f", *params), flags=2):
            return DECLINED
        return DONE if not n or self.c.compute_graph((c.c_void_p * n)(*[out.value] * n), n) else FAILED

    def attend(self, k, v, q, mask=None, sinks=None, scale=0.125, max_bias=0.0, softcap=0.0, gap=0) -> Any:
        """q (streams, rows, q_heads, dims), mask (streams, more rows, more cells): out, or the answer. gap: numbers
        between two vectors of q."""
        (streams, rows, heads, dims), out = q.shape, np.zeros((*q.shape[:3], v.dims), np.float32)
        q = np.pad(q, [(0, 0)] * 3 + [(0, gap)])
        q_nb = 4, 4 * (dims + gap) * heads, 4 * (dims + gap), q[0].nbytes
        q_view = self.view(self.tensor("f32", *q.shape[::-1], array=q), (dims, rows, heads, streams), q_nb)
        if mask is not None:
            mask = self.tensor("f16", *mask.shape[:0:-1], 1, streams, array=mask)
        sources = q_view, k.keys(streams), v.keys(streams), mask, sinks and self.tensor("f32", heads, array=sinks[0])
        self.operation = self.tensor("f32", *out.shape[::-1], array=out)
        answer = self.compute(FLASH_ATTN_EXT, self.operation, *sources, params=(scale, max_bias, softcap))
        return answer or self.get(self.operation, out)


@pytest.fixture(scope="module")
def back_end(tmp_path_factory, device):
    folder = tmp_path_factory.mktemp("ggml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZINC_ATTN_DEVICE", name_for(device).decode())
        made = BackEnd(BackEnd.compiled(folder))
        made.on_processor = device.info.native
        return made


@pytest.fixture(scope="module")
def loaded(back_end, device, tmp_path_factory):
    """The back end, loaded again with variables of the environment, which it reads when it is."""
    folder = tmp_path_factory.mktemp("loaded")

    def load(**variables: str) -> BackEnd:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"ZINC_ATTN_DEVICE": device.info.name, **variables}.items():
                patch.setenv(name, value)
            return BackEnd(shutil.copy(back_end.path, folder / f"{len([*folder.iterdir()])}.so"))

    return load


@pytest.fixture(scope="module")
def of_arithmetic(back_end, loaded):
    """The back end by its arithmetic."""
    load = cache(lambda name: loaded(ZINC_ATTN_ARITHMETIC=name, ZINC_ATTN_UNITS="1"))
    return lambda name: back_end if name == "canonical" else load(name)


class Part:
    """K or V in the buffer: (heads * dims, cells). nb: other strides of what ``keys`` gives."""

    def __init__(self, back_end, kind, heads, dims, cells, offset, nb: tuple[int, ...] = (), copied=False) -> None:
        self.c, self.back_end, self.kind, self.heads = back_end.c, back_end, kind, heads
        self.dims, self.cells, self.nb, self.copied = dims, cells, nb, copied
        self.head, self.value = STORAGE[kind].row_bytes(dims), TYPES[kind][1]  # bytes
        self.row = heads * self.head
        self.root = back_end.tensor(kind, heads * dims, cells, offset=offset)

    def write(self, x: Any, cells: Any) -> int:
        """x (tokens, heads, dims) to cells, by SET_ROWS."""
        rows, numbers = np.ascontiguousarray(x.reshape(len(x), -1)), np.ascontiguousarray(cells, np.int64)
        of = self.back_end.tensor("f32", *rows.shape[::-1], array=rows)
        to = self.back_end.view(self.root, (rows.shape[1], self.cells, 1, 1), (self.value, *[self.row] * 3))
        return self.back_end.compute(SET_ROWS, to, of, self.back_end.tensor("i64", len(x), array=numbers))

    def keys(self, streams: int) -> c.c_void_p:
        """As FLASH_ATTN_EXT takes it: (dims, cells of a stream, heads, streams)."""
        ne = self.dims, self.cells // streams, self.heads, streams
        view = self.back_end.view(self.root, ne, self.nb or (self.value, self.row, self.head, self.row * ne[1]))
        if not self.copied:
            return view
        copy = self.back_end.tensor("f16", *ne, array=np.empty(ne, np.float16))
        assert self.back_end.compute(CPY, copy, view, copy) == DONE
        return copy

    def state(self, cells: int, begin: int = 0) -> Any:
        """The bytes of cells, as a state is saved."""
        return self.back_end.get(self.root, np.empty(cells * self.row, np.uint8), begin * self.row)

    def restore(self, bytes_: Any, cell: int) -> None:
        self.back_end.put(self.root, bytes_, cell * self.row)

    def copy(self, begin: int, end: int, cell: int) -> None:
        """Cells [begin, end) to where ``cell`` is, as llama.cpp copies a stream where the host addresses both."""
        sizes = (one * self.row for one in (begin, cell, end - begin))
        self.c.copy_bytes(self.root, *(c.c_size_t(size) for size in sizes))


class Cache:
    """K and V of cells in float16, a query row, and the values of tokens."""

    def __init__(self, back_end: BackEnd, cells: int, tokens: int, rng: Any) -> None:
        self.back_end, self.cells = back_end, cells
        self.parts = [Part(back_end, "f16", 2, 64, cells, offset) for offset in (0, V_AT)]
        self.q = rng.standard_normal((1, 1, 6, 64), np.float32)
        self.x = rng.standard_normal((2, tokens, 2, 64), np.float32)

    def write(self, tokens: Any, cells: Any) -> None:
        assert [part.write(x[tokens], cells) for part, x in zip(self.parts, self.x, strict=True)] == [DONE] * 2

    def clear(self) -> None:
        """And from now on the tensors are K and V."""
        self.back_end.c.clear_buffer(self.back_end.buffer)
        self.attend([0])

    def attend(self, cells: Any, sinks: Any = None) -> Any:
        """What the row gets from these cells."""
        mask = np.full((1, 1, self.cells), -np.inf, np.float16)
        mask[..., cells] = 0
        return self.back_end.attend(*self.parts, self.q, mask, sinks)

    def has_bits(self, cells: Any, tokens: Any) -> Any:
        """What the row gets from these cells, which hold the tokens in this order."""
        found = self.attend(cells)
        kept = stored(*self.x[:, tokens], "f16/f16", True, False)
        same(found[0], za.reference.emulate(self.q[0, 0], *kept, scale=0.125)[:1])
        return found


class Case(NamedTuple):
    rows: int
    cells: int = 70
    kinds: tuple[str, str] = ("f16", "f16")
    sizes: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (2, 6)  # of KV, of q
    streams: int = 1
    mask: str = "causal"
    sinks: bool = False
    in_turns: bool = False  # whether a cell of each stream is followed by one of the next stream
    copied: bool = False  # to float16
    numbers: dict[str, float] = {}  # noqa: RUF012
    checked: slice = slice(None)
    arithmetic: str = "canonical"
    most: int = 0  # bytes that a kernel can bind; 0: the device's


CASES = {
    "decode": Case(1),
    "prompt": Case(9, kinds=("q8_0", "q4_0")),
    "equal rows": Case(3, mask="shown"),
    "rows that share keys": Case(121, 1700, kinds=("f16", "q8_0"), heads=(3, 9), checked=slice(112, None)),
    "no mask": Case(2, mask=""),
    "no mask, several nodes": Case(5, 600, mask="", heads=(3, 9)),
    "rows of other overlaps": Case(7, mask="overlaps"),
    "streams": Case(3, streams=2, sinks=True, numbers={"softcap": 8.0}),
    "streams in turns": Case(3, streams=2, in_turns=True),
    "float mask": Case(2, mask="float", kinds=("f32", "bf16"), sizes=(40, 66)),
    "copied": Case(3, streams=2, kinds=("f32", "f32"), copied=True),
    "ALiBi": Case(3, mask="float", numbers={"max_bias": 8.0}),
    "fused": Case(9, kinds=("f16", "q8_0"), arithmetic="fused"),
    "integer": Case(
        9, kinds=("q8_0", "q4_0"), streams=2, mask="prompt", numbers={"scale": 2.0**35}, arithmetic="integer"
    ),
    "integer, q with gaps": Case(3, kinds=("q4_0", "q4_0"), sinks=True, numbers={"gap": 8}, arithmetic="integer"),
    "integer, shared": Case(
        121, 1700, kinds=("q8_0", "q8_0"), heads=(3, 9), checked=slice(0, None, 12), arithmetic="integer"
    ),
    # By matrix units 512 rows make a call without states; so many bytes hold the states of 279 rows.
    "integer, without states": Case(
        *(512, 600, ("q8_0", "q4_0"), (32, 32), (32, 64), 1, "prompt"),
        checked=slice(0, None, 40),
        arithmetic="integer",
        most=9 << 19,
    ),
    "pieces": Case(4200, 4000, mask="few", checked=slice(4188, None)),  # 4,194 rows of 4,000 keys are a call's
}
SLOPES = np.exp2([-2, -4, -6, -8, -1, -3]).astype(np.float32)  # ggml's, of six heads and a max_bias of 8


def mask_of(rng: Any, case: Case, order: Any) -> Any:
    """float16 (streams, rows + 2, cells + 4); order: (streams, cells), cells in the order of writes."""
    mask = np.zeros((case.streams, case.rows + 2, case.cells + 4), np.float16)
    shown = mask[:, : case.rows, : case.cells]
    if case.mask == "float":
        shown[:] = rng.standard_normal(shown.shape)
        shown[rng.random(shown.shape) < 0.1] *= 2.0**-22  # subnormal
        shown[rng.random(shown.shape) < 0.3] = -np.inf
        shown[:, 1] = np.where(np.isinf(shown[:, 0]), shown[:, 0], 0)  # the keys of row 0, and no bias
    if case.mask == "overlaps":  # a window, all keys, some of them, keys that go on after these, and none
        shown[:] = -np.inf
        for row, seen in enumerate((slice(6), slice(1, 7), slice(None), slice(3, 6), [4, 5, 9], [9, 10], [])):
            shown[0, row, order[0][seen]] = 0
    if case.mask == "few":  # but for the first row
        shown[:, 1:, order[0][3:]] = -np.inf
    if case.mask in ("causal", "prompt"):  # causal: but row 1 sees two keys more than row 0
        own = case.cells - case.rows + np.arange(case.rows)[:, None]
        own[0] -= case.mask == "causal"
        shown[np.argsort(order, axis=1)[:, None] > own] = -np.inf
    return mask


@pytest.mark.parametrize("name", CASES)
def test_bits_are_the_oracle_s(of_arithmetic, device, rng, name):
    case = CASES[name]
    back_end, scale = of_arithmetic(case.arithmetic), case.numbers.get("scale", 0.125)
    total, (kv_heads, q_heads) = case.cells * case.streams, case.heads
    x = [rng.standard_normal((total, kv_heads, size), np.float32) for size in case.sizes]
    for values in x:
        values[..., :8] *= np.float32(2.0**-45)  # which attention takes as 0
    sides = zip(case.kinds, case.sizes, (0, V_AT), strict=True)
    parts = [Part(back_end, kind, kv_heads, size, total, offset, (), case.copied) for kind, size, offset in sides]
    numbers = np.arange(total).reshape(case.streams, -1)  # of the streams' cells
    if case.in_turns:
        numbers = numbers.reshape(-1, case.streams).T
        for part in parts:
            part.nb = part.value, case.streams * part.row, part.head, part.row
    back_end.c.clear_buffer(back_end.buffer)
    written = rng.permutation(total)
    for some in np.split(written, [total - 7]):
        assert [part.write(values[some], some) for part, values in zip(parts, x, strict=True)] == [DONE] * 2
    order = np.argsort(np.argsort(written)[numbers], axis=1)
    q = rng.standard_normal((case.streams, case.rows, q_heads, case.sizes[0]), np.float32)
    q *= np.float32(0.125 / scale)  # of a large scale some are below 2**-40, which attention takes as 0
    sinks = [rng.standard_normal(q_heads, np.float32)] if case.sinks else None
    mask = mask_of(rng, case, order) if case.mask else None
    most = case.most and back_end.c.set_most(c.c_size_t(case.most))
    before = back_end.counts()
    found = back_end.attend(*parts, q, mask, sinks, **case.numbers)
    dispatches, _, workgroups = np.subtract(back_end.counts(), before)
    assert name != "rows that share keys" or workgroups < 2500  # lists of rows share words, too
    assert not case.most or back_end.c.set_most(c.c_size_t(most)) == case.most
    assert not case.most or (dispatches == 2) == has_int8_units(device.info), dispatches
    for s, row in itertools.product(range(case.streams), range(case.rows)[case.checked]):
        seen = order[s] if mask is None else order[s][~np.isinf(mask[s, row, order[s]])]
        options = {"scale": scale, "softcap": case.numbers.get("softcap"), "sinks": sinks and sinks[0]}
        options["arithmetic"] = case.arithmetic
        if case.mask == "float":
            options["mask"] = mask[s, row, seen].astype(np.float32)[None]
            options["mask_slopes"] = SLOPES if case.numbers else None
        kinds = "f16/f16" if case.copied else "/".join(case.kinds)
        seen_x = [values[numbers[s, seen]] for values in x]
        kept = stored(*seen_x, kinds, True, False)
        if case.arithmetic == "integer":
            options |= stored_scales(*seen_x, kinds)
        want, _ = za.reference.emulate(q[s, row], *kept, causal=False, **options)
        same([found[s, row]], [want], (name, s, row))


def test_a_state_that_is_restored_to_other_cells_keeps_the_order_of_writes(back_end):
    """Tokens in the first half of the cells are read, the cache is cleared, and they are put into the second half."""
    n, rng = 20, np.random.default_rng(7)  # rows that no other test has
    cache = Cache(back_end, 2 * n + 1, n + 1, rng)
    cache.clear()
    cache.write(slice(n), rng.permutation(n))
    states = [part.state(n) for part in cache.parts]
    cache.clear()
    for part, state in zip(cache.parts, states, strict=True):
        part.restore(state, n)
    cache.write(slice(n, None), [3])
    cache.has_bits([3, *range(n, 2 * n)], range(n + 1))


def test_ggml_s_own_buffers_keep_the_order_of_writes_on_the_processor(back_end, rng):
    """Keys that llama.cpp keeps on the CPU: written, saved, restored elsewhere and copied, then given back."""
    n, freed, own = 20, c.c_bool(False), back_end.buffer
    back_end.buffer = c.c_void_p(back_end.c.make_host_buffer(c.c_size_t(2 * V_AT), c.byref(freed)))
    try:
        cache = Cache(back_end, 3 * n, n, rng)
        if not back_end.on_processor:
            assert cache.attend(range(n)) == DECLINED
            return
        cache.attend(range(n))  # from now on the tensors are K and V
        cache.write(slice(None), rng.permutation(n))
        for part in cache.parts:
            part.restore(part.state(n), n)
            part.copy(n, 2 * n, 2 * n)
        for begin in (0, n, 2 * n):
            cache.has_bits(range(begin, begin + n), range(n))
        back_end.c.free_buffer(back_end.buffer)
        assert freed.value
    finally:
        back_end.buffer = own


def test_weights_that_another_device_reads_stay_blocks(back_end, rng):
    """ggml's CPU code reads the processor's buffers in place: what is left to it is in no layout of products."""
    words = rng.integers(0, 256, 8 * 272, np.uint8)
    weight = back_end.tensor("q8_0", 256, 8, array=words)
    back_end.c.make_weight(weight, True)
    x, y = back_end.tensor("f32", 256, 1, array=np.ones(256, np.float32)), back_end.tensor("f32", 8, 1)
    product, other = (graphs.NUMBERS.index(name) for name in ("MUL_MAT", "SQR"))
    assert back_end.describe(product, y, weight, x)
    back_end.graph([y])
    assert not back_end.describe(other, back_end.tensor("f32", 256, 8), weight)
    assert back_end.describe(product, y, weight, x) != back_end.on_processor
    assert (back_end.get(weight, np.empty_like(words)) == words).all()


@pytest.mark.parametrize("device", ["cpu"], indirect=True, scope="session")
def test_a_state_in_a_buffer_is_restored_in_the_order_of_cells(back_end, rng):
    """As llama.cpp keeps it on the device: a tensor of one dimension, whatever the order of the cells was before."""
    n = 20
    cache, cells = Cache(back_end, n, n, rng), rng.permutation(n)
    cache.attend(range(n))
    cache.write(slice(None), cells)
    for part in cache.parts:
        state = part.state(n)
        kept = c.c_void_p(back_end.c.bytes_of(back_end.tensor("f16", state.nbytes // 2, array=state)))
        back_end.c.set_bytes(part.root, kept, c.c_size_t(0), c.c_size_t(state.nbytes))
    cache.has_bits(range(n), np.argsort(cells))


def test_the_processor_is_no_second_device_behind_another_reader_of_its_memory(back_end, tmp_path):
    """BLAS would be asked before it, and take weights in the products' layout for ggml's blocks."""
    library = c.CDLL(shutil.copy(back_end.path, tmp_path / "b.so"))
    library.devices_after_another.restype = c.c_size_t
    assert library.devices_after_another() == 1


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_heads_may_lie_before_cells(back_end, rng, kind):
    """Of a cache that is set and not written, whose keys are in the order of cells."""
    cells, (k, v) = 70, rng.standard_normal((2, 70, 2, 64), np.float32)
    head = STORAGE[kind].row_bytes(64)
    parts = [
        Part(back_end, kind, 2, 64, cells, offset, (TYPES[kind][1], head, cells * head, 2 * cells * head))
        for offset in (0, V_AT)
    ]
    for part, x in zip(parts, (k, v), strict=True):
        part.restore(np.ascontiguousarray(row_bytes(x, kind).swapaxes(0, 1)).reshape(-1), 0)
    q = rng.standard_normal((1, 3, 6, 64), np.float32)
    want, _ = za.reference.emulate(q[0], *stored(k, v, f"{kind}/{kind}", True, False), causal=False, scale=0.125)
    same(back_end.attend(*parts, q)[0], want)


def test_a_plan_is_of_one_operation(back_end, rng):
    """Of its order of cells, its mask, and every field of its tensors."""
    cache, later = Cache(back_end, 9, 9, rng), [*range(1, 9), 0]
    back_end.c.clear_buffer(back_end.buffer)
    cache.write(slice(None), range(9))
    first = cache.has_bits(range(9), range(9))
    cache.write([0], [0])
    assert not np.array_equal(first, cache.has_bits(range(9), later))
    later.remove(5)
    cache.has_bits(later, later)
    cache.attend(later, [np.zeros(6, np.float32)])
    assert back_end.c.fields_not_in_key(back_end.operation) == 0


def test_what_is_no_row_or_mask_is_refused(back_end):
    """A row of a cell that there is not, a NaN and an infinity."""
    part, row, q = Part(back_end, "f16", 2, 64, 9, 0), *(np.zeros(n, np.float32) for n in ((1, 2, 64), (1, 1, 6, 64)))
    assert [part.write(row, [cell]) for cell in (8, 9)] == [DONE, FAILED]
    for bias in np.nan, np.inf:
        assert back_end.attend(part, part, q, np.array([[[0] * 8 + [bias]]], np.float16)) == FAILED


WAYS = {  # values in a row of the roots, of which K and V have 64 for each of 2 heads; their strides; and numbers
    "softcap": (128, (), {"softcap": -1.0}),
    "bias": (128, (), {"max_bias": -1.0}),
    "heads at one place": (128, (2, 256, 0, 2304), {}),
    "cells that are no whole rows": (128, (2, 192, 128, 2304), {}),
    "roots of shorter rows": (96, (), {}),
    "one root, where V is no part of K": (128, None, {}),
}


@pytest.mark.parametrize("name", WAYS)
def test_what_cannot_be_computed_is_declined(back_end, name):
    values, nb, numbers = WAYS[name]
    k, v = (Part(back_end, "f16", 2, 64, 9, offset, nb or ()) for offset in (0, V_AT))
    k.root, v.root = (back_end.tensor("f16", values, 12, offset=offset) for offset in (0, V_AT))
    if nb is None:
        v = Part(back_end, "f16", 2, 32, 9, 0)
        v.root = k.root
    assert back_end.attend(k, v, np.zeros((1, 1, 6, 64), np.float32), **numbers) == DECLINED


@pytest.mark.parametrize(("dims", "cells", "q_heads"), [(1, 2**32 + 1, 1), (576, 320_000, 128)])
def test_more_than_a_call_takes_is_declined(back_end, dims, cells, q_heads):
    """Keys of a request, of which 32 bits would be one key; a row's states, which are 185 MB."""
    cells *= 40 if cells < 2**24 and back_end.on_processor else 1  # which binds 4 GiB
    k = Part(back_end, "f16", 1, dims, cells, 0)
    k.root = back_end.tensor("f16", dims, 9)
    assert back_end.attend(k, k, np.zeros((1, 1, q_heads, dims), np.float32)) == DECLINED


def test_moves_of_8_bytes_that_shift_or_lie_in_another_order_are_declined(back_end):
    """They are moved as words, of which rows are dense and shifts would be twice as many."""
    x, y = back_end.tensor("i64", 2, 2), back_end.tensor("i64", 2, 4)
    transposed = back_end.view(x, (2, 2, 1, 1), (16, 8, 32, 32))
    along_1 = struct.pack("i", 1)
    for name, sources in (("SET", (y, x)), ("PAD", (x,)), ("ROLL", (y,)), ("CONCAT", (x, transposed))):
        assert not back_end.describe(graphs.NUMBERS.index(name), y, *sources, params=along_1), name
    assert back_end.describe(graphs.NUMBERS.index("CONCAT"), y, x, x, params=along_1)


def test_splits_that_are_asked_for_make_other_workgroups_and_no_other_bit(loaded, capfd, rng):
    """1,500 keys are three nodes."""
    found, state = [], rng.bit_generator.state
    for variables in ({}, {"ZINC_ATTN_SPLITS": "1"}):
        rng.bit_generator.state = state
        cache = Cache(loaded(**variables), 1500, 1500, rng)
        cache.write(slice(None), np.arange(1500))
        before, out = cache.back_end.counts(), cache.attend(slice(None))
        found.append((out.tobytes(), cache.back_end.counts()[2] - before[2]))
    (rule, by_rule), (one, by_one) = found
    assert rule == one and by_rule > by_one
    with pytest.raises(AssertionError):
        loaded(ZINC_ATTN_SPLITS="0")
    assert "ZINC_ATTN_SPLITS: got '0', expected 1 to 32768" in capfd.readouterr().err


@pytest.mark.parametrize("staging", ["0", "1"])
def test_memory_that_is_given_back_is_free(loaded, staging):
    """Whether the host sees it or not."""
    other = loaded(ZINC_ATTN_STAGING=staging)
    before = other.c.free_bytes()
    buffer = c.c_void_p(other.c.make_buffer(c.c_size_t(1 << 20), COMPUTE))
    assert before - other.c.free_bytes() >= 1 << 20
    other.c.free_buffer(buffer)
    assert other.c.free_bytes() == before


def test_a_cache_that_no_kernel_can_bind_is_refused_when_it_is_made(back_end, capfd):
    assert back_end.c.takes_cache(back_end.tensor("f16", 64, 1000), b"cache_k_l0", False)
    assert not back_end.c.takes_cache(back_end.tensor("f16", 64, 1 << 29), b"cache_k_l0", False)
    assert "cache_k_l0: got 68719476736 bytes, expected at most " in capfd.readouterr().err


def test_what_an_arithmetic_does_not_take_is_refused(of_arithmetic, capfd):
    """A cache when it is made, the graph of other keys, which no other device is given, and an arithmetic's name."""
    integer, found = of_arithmetic("integer"), "got type f16 with ZINC_ATTN_ARITHMETIC=integer, expected q8_0, q5_0, "
    for name, kind, computed, taken in (
        (b"cache_k_l0", "q8_0", False, True),
        (b"cache_v_l0", "q4_0", False, True),
        (b"cache_k_l0", "f16", False, False),
        (b"cache_v_l0", "f16", False, False),
        (b"cache_k_l0", "f16", True, True),  # a graph's result with a cache's name
        (b"cache_r_l0", "f32", False, True),
    ):
        assert integer.c.takes_cache(integer.tensor(kind, 64, 1000), name, computed) == taken
        assert (f"{name.decode()}: {found}" in capfd.readouterr().err) != taken
    for kinds in (("q8_0", "f16"), ("f16", "q8_0")):
        k, v = (Part(integer, kind, 2, 64, 9, offset) for kind, offset in zip(kinds, (0, V_AT), strict=True))
        assert integer.attend(k, v, np.zeros((1, 1, 6, 64), np.float32)) == FAILED
        assert found in capfd.readouterr().err
    with pytest.raises(AssertionError):
        of_arithmetic("whole")
    assert "ZINC_ATTN_ARITHMETIC: got 'whole', expected canonical, fused or integer" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "operand", "terms", "said"),
    [
        ("kv_new", "result", (64, 1), True),
        ("kv_same", "result", (64, 64), False),
        ("kv_old", "cache", (64, 1), False),
        ("node_7", "result", (64, 1), False),
    ],
)
def test_a_product_whose_terms_change_from_graph_to_graph_is_told(back_end, capfd, name, operand, terms, said):
    """Neither with a cache, nor by a name that ggml gives in another way in each graph."""
    for n in terms:
        x = [np.ones((8, n), np.float32)] * 2
        first = back_end.tensor("f32", n, 8, array=None if operand == "cache" else x[0])
        sources = first, back_end.tensor("f32", n, 8, array=x[1])
        out = back_end.tensor("f32", 8, 8, array=np.zeros((8, 8), np.float32))
        back_end.c.prepare(MUL_MAT, out, (c.c_void_p * 10)(*[one.value for one in sources]), name.encode())
    line = f"the model has sums over the tokens of a batch ({name}); logits depend on the batch"
    assert (line in capfd.readouterr().err) == said


# --- Vulkan calls that fail ------------------------------------------------------------------------------------------

DISPATCHED = 60  # operations of a graph: more than its first submission has
STEP_FAILED = "vkQueueSubmit", "vkEndCommandBuffer", "vkBeginCommandBuffer", "vkWaitForFences", "vkResetFences"
FIRST_GRAPH = "vkCreateBuffer", "vkAllocateMemory", "vkBindBufferMemory", "vkMapMemory", "vkCreateShaderModule"
FIRST_GRAPH += "vkCreateDescriptorSetLayout", "vkCreatePipelineLayout", "vkCreateComputePipelines"
FIRST_GRAPH += "vkCreateDescriptorPool", "vkAllocateDescriptorSets"


class Rounds:
    """A graph, again and again: q is set, the graph computed, and its result read."""

    def __init__(self, back_end: BackEnd) -> None:
        rng = np.random.default_rng(1)
        self.back_end, self.q = back_end, rng.standard_normal((1, 2, 2, 64), np.float32)
        parts = [Part(back_end, "f16", 2, 64, 70, offset) for offset in (0, V_AT)]
        for part in parts:
            part.restore(row_bytes(rng.standard_normal((70, 2, 64), np.float32), "f16").reshape(-1), 0)
        self.of_q, self.out = (back_end.tensor("f32", 64, 2, 2, array=x) for x in (self.q, np.zeros_like(self.q)))
        view = back_end.view(self.of_q, (64, 2, 2, 1), (4, 512, 256, self.q.nbytes))
        self.sources = view, *(part.keys(1) for part in parts), None, None

    def round(self) -> Any:
        """The result, or None where the graph failed."""
        self.back_end.put(self.of_q, self.q)
        answer = self.back_end.compute(FLASH_ATTN_EXT, self.out, *self.sources, params=(0.125, 0, 0), n=DISPATCHED)
        found = self.back_end.get(self.out, np.full_like(self.q, 7))
        self.missed = bool(np.isnan(found).all())  # it could not be read, so the next graph fails
        return None if answer else found

    def under(self, layer: faults.Layer, fault: faults.Fault, want: Any) -> str:
        """The faults of a round under a failing call and of the next round; want: the result."""
        layer.arm(fault)
        found = self.round()
        layer.disarm()
        right = found is None or self.missed or np.array_equal(found, want)
        if self.missed and self.round() is not None:
            return f"{fault}: the next graph did not fail"
        return "" if right and np.array_equal(self.round(), want) else f"{fault}: {'the next' if right else 'its'} bits"

    def tell(self, layer: faults.Layer) -> Iterator[str]:
        """The faults. No pipeline and no memory exists when the first calls fail."""
        for name in FIRST_GRAPH:
            layer.arm(faults.Fault(name, 1, -1))
            failed = self.round() is None or self.missed
            yield "" if failed and layer.fired() else f"{name}: the first graph did not fail"
            layer.disarm()
        want, _ = self.round(), self.round()
        before, live = layer.calls(), layer.live()
        yield "" if np.array_equal(self.round(), want) else "the undisturbed graph"
        counts = {name: n - before[name] for name, n in layer.calls().items()}
        assert all(counts[name] for name in STEP_FAILED), counts
        for name, carry_out in itertools.product(STEP_FAILED, (False, True)):
            for nth in range(1, counts[name] + 1):
                yield self.under(layer, faults.Fault(name, nth, -1, carry_out), want)
        yield self.under(layer, faults.Fault("vkQueueSubmit", 1, -1, False, True), want)  # with a staged read
        yield "" if layer.live() == live else f"left behind: {live}, {layer.live()}"
        yield "" if not layer.misused() else "commands are recorded where others may run"
        layer.arm(faults.Fault("vkQueueSubmit", 2, -4))
        lost = [self.round() for _ in range(3)]
        yield "" if lost[1] is None and lost[2] is None else "a lost device computes"


@pytest.mark.parametrize("device", ["vulkan"], indirect=True, scope="session")
@pytest.mark.parametrize("staging", ["0", "1"])
def test_a_call_that_fails_fails_its_graph(back_end, tmp_path, staging):
    """And the next graph is right, unless the device was lost."""
    library = faults.build(tmp_path)
    command, env = [sys.executable, __file__, library, back_end.path], faults.environment(library)
    env |= {"ZINC_ATTN_STAGING": staging, "ZINC_ATTN_CPU": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["told", ""]), done.stdout + done.stderr[-2000:]
    assert "the device was lost" in done.stderr and "use a shorter context or free memory" in done.stderr


# --- threads ---------------------------------------------------------------------------------------------------------

SESSIONS = 8  # threads


def session(path: Path, number: int, start: threading.Barrier) -> list[bytes | int]:
    """A model is opened, asked about, loaded and run; its state is saved in two halves and restored to other cells; it
    is run and closed. What it computed, and answers that are none."""
    start.wait()
    back_end, rng, n, found = BackEnd(path), np.random.default_rng(number), 40, []
    small = [Part(back_end, "f16", 2, 64, 9, offset) for offset in (0, V_AT)]

    def shown(cells: Any) -> None:
        out = cache.attend(cells)
        found.append(out if isinstance(out, int) else out.tobytes())

    for heads in range(6, 10, 2):  # of q; every thread has a kind of its own
        cache, cells = Cache(back_end, 2 * n, n, rng), rng.permutation(n)
        new, keys = back_end.tensor("f32", 64, 1, heads + 4 * number), (part.keys(1) for part in small)
        found.append(back_end.compute(FLASH_ATTN_EXT, new, new, *keys, None, None, params=(0.125, 0, 0), n=0))
        cache.clear()
        cache.write(slice(None), cells)
        shown(cells)
        states = [part.state(n // 2, begin) for part in cache.parts for begin in (0, n // 2)]
        cache.clear()
        for i, state in enumerate(states):
            cache.parts[i // 2].restore(state, n + i % 2 * n // 2)
        shown(range(n, 2 * n))
    back_end.c.close_back_end()
    return found


def sessions(path: Path, together: int) -> list[list[bytes | int]]:
    start = threading.Barrier(together)
    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(lambda number: session(path, number, start), range(SESSIONS)))


def test_models_of_eight_threads_have_the_bits_of_one(back_end, tmp_path):
    """All of them open the back end at once. With --full a thread sanitizer looks on, where the compiler has one."""
    preload = compiler_file("libtsan.so") if FULL else None
    path = BackEnd.compiled(tmp_path, "-fsanitize=thread", "-g") if preload else back_end.path
    told = {"LD_PRELOAD": preload or "", "TSAN_OPTIONS": "ignore_noninstrumented_modules=1"}
    told["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, __file__, path]
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "told\n"), done.stdout + done.stderr[-3000:]
    assert done.stderr.count("ggml-zinc") == 1, done.stderr  # the line that names the device


if __name__ == "__main__" and len(sys.argv) == 2:
    many, one = (sessions(Path(sys.argv[1]), n) for n in (SESSIONS, 1))
    failed = sum(answer in (DECLINED, FAILED) for answers in many for answer in answers)
    print("told" if many == one and not failed else f"{failed} failed; other bits: {many != one}")
elif __name__ == "__main__":
    rounds = Rounds(BackEnd(Path(sys.argv[2])))
    wrong = [*filter(None, rounds.tell(faults.Layer(Path(sys.argv[1]))))]
    print("\n".join(wrong) or "told")


# --- graphs ----------------------------------------------------------------------------------------------------------

ROW = 256  # values


def q8_0_rows(rng, count):
    w = rng.integers(0, 256, (count, ROW // 32 * 34), np.uint8)
    w.reshape(count, -1, 34)[..., :2] = np.array([0.001], np.float16).view(np.uint8)
    return w


@pytest.fixture(scope="module")
def given(back_end):
    """The tensors that graphs name by capitals, but for A, and their values."""
    rng, found = np.random.default_rng(7), dict[str, Any]()
    w, experts = q8_0_rows(rng, ROW), q8_0_rows(np.random.default_rng(8), 4 * ROW)
    floats = rng.standard_normal((4, ROW // 4, ROW), np.float32).astype(np.float16)
    found["W"] = back_end.tensor("q8_0", ROW, ROW, array=w), blocks.decode("q8_0", w)
    found["E"] = back_end.tensor("q8_0", ROW, ROW // 4, 4, array=w), [blocks.decode("q8_0", x) for x in np.split(w, 4)]
    found["B"] = (
        back_end.tensor("q8_0", ROW, ROW, 4, array=experts),
        [blocks.decode("q8_0", x) for x in np.split(experts, 4)],
    )
    found["M"] = back_end.tensor("q8_0", ROW, ROW, array=w, offset=16), found["W"][1]
    for name in "WEBM":
        back_end.c.make_weight(found[name][0], True)
    found["L"] = back_end.tensor("q8_0", ROW, ROW, array=w), found["W"][1]  # an adapter's
    found["F"] = back_end.tensor("f16", ROW, ROW // 4, 4, array=floats), floats.astype(np.float32)
    found["G"] = back_end.tensor("f16", ROW, ROW // 4, array=floats[0]), found["F"][1][0]
    ids = {f"H{n}": rng.integers(0, 4, (n, 2)) for n in (3, 20)} | {"J": rng.integers(0, 9, (3, 3))}
    for name, x in (ids | {"I": np.ones((1, 1)), "P": np.arange(12).reshape(4, 3) ** 5}).items():
        found[name] = back_end.tensor("i32", *x.shape[::-1], array=x.astype(np.int32)), x[None, None].astype(np.int32)
    x = rng.standard_normal((2, 9, 2, 64), np.float32)
    for name, values, kept in zip("KV", x, stored(*x, "f16/f16", True, False), strict=True):
        part = Part(back_end, "f16", 2, 64, 9, 0)
        part.root = back_end.tensor("f16", 128, 9, array=np.ascontiguousarray(row_bytes(values, "f16").reshape(-1)))
        found[name] = part.keys(1), kept
    return found


def test_adapters_are_ggml_s_blocks_where_others_may_read_them(back_end, given):
    """Quantized tensors that are no weights of a model: ggml's CPU code, and copies to ZINC0, read the processor's."""
    graph, tensor = graphs.named("MUL_MAT(L, x[256,3])"), given["L"][0]
    blocks_of_w = back_end.get(tensor, np.empty(ROW * ROW // 32 * 34, np.uint8))
    graph.run(back_end, np.zeros(graph.words, np.uint32), given)
    if back_end.on_processor:
        assert c.string_at(back_end.c.bytes_of(tensor), blocks_of_w.nbytes) == blocks_of_w.tobytes()


@pytest.mark.parametrize("weights", "EF")
@pytest.mark.parametrize(("tokens", "slots", "most"), ((3, 1, 0), (3, 2, 60_000), (20, 2, 60_000)))
def test_experts(back_end, given, weights, tokens, slots, most, monkeypatch, capfd):
    """One by one and in tiles, and in pieces of experts, as large as a binding may be; with no barrier too many."""
    graph = graphs.named(f"MUL_MAT_ID({weights}, x[256,{slots},{tokens}], H{tokens})[64,2,{tokens}]")
    words = np.random.default_rng(9).standard_normal(graph.words, np.float32).view(np.uint32)
    usual, before = back_end.c.set_most(c.c_size_t(most or 1 << 27)), back_end.counts()
    monkeypatch.setenv("ZINC_ATTN_LOG", "barriers")
    wrong = graph.wrong(back_end, words, given, graph.oracle(words, given))
    back_end.c.set_most(c.c_size_t(usual))
    barriers = int(weights == "E" or tokens > 8)  # after int8 and the list by expert; parts run beside each other
    assert not wrong and back_end.counts()[1] - before[1] == barriers
    line = r"zinc_attn: barrier: mul_mat\w* waits for (quantize|by_expert): bytes \d+ to \d+ of buffer 0x[0-9a-f]+\n"
    assert re.fullmatch(line * barriers, capfd.readouterr().err)


@pytest.mark.parametrize("name", [*graphs.GRAPHS, "random"])
def test_a_graph_has_the_oracle_s_bits_fused_or_not(back_end, given, monkeypatch, name):
    rng = np.random.default_rng(52)
    for n in range(150 if name == "random" else 1):
        graph = graphs.random_graph(rng) if name == "random" else graphs.named(graphs.GRAPHS[name], rng)
        words = rng.standard_normal(graph.words, np.float32).view(np.uint32)
        rows = q8_0_rows(np.random.default_rng(9), ROW)  # A: weights that lie as ggml's blocks until a graph reads them
        given["A"] = back_end.tensor("q8_0", ROW, ROW, array=rows), blocks.decode("q8_0", rows)
        want = graph.oracle(words, given)
        for fused in (None, "0"):
            monkeypatch.setenv("ZINC_ATTN_FUSE", fused) if fused else monkeypatch.delenv("ZINC_ATTN_FUSE", False)
            wrong = graph.wrong(back_end, words, given, want)
            assert not wrong, (n, wrong, fused, graph.nodes, graph.slot)


@pytest.mark.parametrize("name", graphs.FUSIONS)
def test_a_fusion_saves_what_the_table_says(back_end, given, monkeypatch, name):
    """Its dispatches and a barrier, where all others are; and docs/graph.md has its row."""
    graph, counts = graphs.named(graphs.FUSED[name]), []
    for names in (graphs.FUSIONS.keys() - {name}, graphs.FUSIONS):
        monkeypatch.setenv("ZINC_ATTN_FUSE", ",".join(names))
        before = back_end.counts()
        graph.run(back_end, np.zeros(graph.words, np.uint32), given)
        counts.append(np.subtract(back_end.counts(), before))
    nodes, others, saves = graphs.FUSIONS[name]
    dispatches, barriers, _ = counts[0] - counts[1]
    here = name not in ("gated", "rms", "turned") or not back_end.on_processor
    assert (dispatches, barriers > 0) == (saves * here, here)
    assert f"{name} {saves} {others} {nodes}" in " ".join((ROOT / "docs/graph.md").read_text().split())


PLACES = {  # of a weight, or of what is made of it: the line
    "here": "the model is here whole but for the look-up of tokens (1 operations, 0 of attention): the promise holds",
    "weight": "another device has a part of the model ( is there)",
    "source": "another device has a part of the model ( is made there)",
    "result": "another device has a part of the model ( goes there)",
}


@pytest.mark.parametrize("elsewhere", PLACES)
def test_a_line_says_whether_the_model_is_here(loaded, capfd, elsewhere):
    """A library says one line in a process."""
    other, x = loaded(), np.ones(ROW, np.float32)
    weight, tokens, made = (other.tensor("f32", ROW, array=x) for _ in range(3))
    other.c.make_weight(weight, elsewhere != "weight")
    flags = 0 if elsewhere == "result" else 2
    assert other.describe(graphs.NUMBERS.index("MUL"), made, weight, tokens, flags=flags)
    if elsewhere == "source":
        other.c.hand_over(made)
    if elsewhere != "weight":
        other.graph([made])
    other.get(made, x)
    said = [line for line in capfd.readouterr().err.splitlines() if "ZINC0 is" not in line]
    assert len(said) == 1 and said[0].startswith(f"ggml-zinc: {PLACES[elsewhere]}"), said
