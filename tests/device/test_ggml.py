"""native/ggml behind as much of ggml's interface as it uses (``tests/ggml``): its bits are the oracle's, with keys in
the order of writes. ``test_llama.py`` runs it with llama.cpp."""

import ctypes as c
import os
import shutil
import subprocess
from typing import Any, NamedTuple

import numpy as np
import pytest
from c_host import LIBRARY, NATIVE, ROOT, built, needs_compiler
from engine import address
from support import row_bytes, same

import zinc_attn as za
from zinc_attn.cache.rows import stored
from zinc_attn.storage import STORAGE
from zinc_attn.tools import export

COMPILER = shutil.which(os.environ.get("CXX", "c++"))
STUB = ROOT / "tests" / "ggml"
TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "i32", "i64")
SET_ROWS, FLASH_ATTN_EXT = 5, 6
DONE, DECLINED, FAILED = range(3)
ROOM = 4 << 20  # bytes of K, and of V behind it
pytestmark = [needs_compiler, pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler (package g++)")]


class BackEnd:
    """The back end with a buffer; tensors keep the arrays that they are made of."""

    def __init__(self, folder: Any) -> None:
        for name in ("ggml-backend.h", "ggml-backend-impl.h"):
            (folder / name).write_text('#include "ggml.h"\n')
        ours = [file for file in (NATIVE / "ggml").glob("*.cpp") if "llama.h" not in file.read_text()]
        flags = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", '-DZINC_GGML_VERSION="1"']
        include = [f"-I{one}" for one in (STUB, folder, NATIVE / "ggml", NATIVE / "include")]
        command = [COMPILER, *flags, *include, *ours, STUB / "back_end.cpp", built(folder, LIBRARY)]
        done = subprocess.run([*command, f"-Wl,-rpath,{folder}", "-o", folder / "b.so"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.c, self.kept = c.CDLL(str(folder / "b.so")), list[Any]()
        for name in ("make_buffer", "make_tensor", "make_view"):
            getattr(self.c, name).restype = c.c_void_p
        assert self.c.open_back_end()
        self.buffer = c.c_void_p(self.c.make_buffer(c.c_size_t(2 * ROOM)))

    def tensor(self, kind: str, *ne: int, array: Any = None, offset: int = 0) -> c.c_void_p:
        """Of an array, or at an offset of the buffer."""
        self.kept.append(array)
        sizes, buffer = (c.c_int64 * 4)(*ne, *[1] * (4 - len(ne))), self.buffer if array is None else None
        at = buffer, c.c_size_t(offset), c.c_void_p(address(array))
        return c.c_void_p(self.c.make_tensor(TYPES.index(kind), sizes, *at))

    def view(self, of: c.c_void_p, ne: tuple[int, ...], nb: tuple[int, ...]) -> c.c_void_p:
        return c.c_void_p(self.c.make_view(of, (c.c_int64 * 4)(*ne), (c.c_size_t * 4)(*nb)))

    def compute(self, op: int, out: c.c_void_p, *sources: Any, params: tuple[float, ...] = (0, 0, 0)) -> int:
        given = (c.c_void_p * 5)(*[one and one.value for one in sources])
        return int(self.c.compute(op, out, given, (c.c_float * 3)(*params)))


@pytest.fixture(scope="module")
def back_end(tmp_path_factory, device):
    folder = tmp_path_factory.mktemp("ggml")
    export.export(folder / "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZINC_ATTN_KERNELS", str(folder / "kernels"))
        patch.setenv("ZINC_ATTN_DEVICE", device.info.name)
        return BackEnd(folder)


class Part:
    """K or V of ``cells`` cells: (heads * dims, cells) in the buffer, or with the cells of each head together."""

    def __init__(self, back_end: BackEnd, kind: str, heads: int, dims: int, cells: int, offset: int) -> None:
        self.back_end, self.kind, self.heads, self.dims, self.cells = back_end, kind, heads, dims, cells
        self.head, self.value = STORAGE[kind].row_bytes(dims), {"f32": 4, "f16": 2, "q8_0": 34, "q4_0": 18}[kind]
        self.root = back_end.tensor(kind, heads * dims, cells, offset=offset)

    def write(self, x: Any, cells: Any) -> int:
        """x (tokens, heads, dims) to cells, by SET_ROWS."""
        rows, numbers = np.ascontiguousarray(x.reshape(len(x), -1)), np.ascontiguousarray(cells, np.int64)
        of = self.back_end.tensor({4: "f32", 2: "f16"}[rows.itemsize], *rows.shape[::-1], array=rows)
        row = self.head * self.heads
        to = self.back_end.view(self.root, (rows.shape[1], self.cells, 1, 1), (self.value, row, row, row))
        return self.back_end.compute(SET_ROWS, to, of, self.back_end.tensor("i64", len(x), array=numbers))

    def keys(self, streams: int, heads_first: bool) -> c.c_void_p:
        """As FLASH_ATTN_EXT takes it: (dims, cells of a stream, heads, streams)."""
        cells, head = self.cells // streams, self.head
        row, apart = (head, head * cells) if heads_first else (head * self.heads, head)
        return self.back_end.view(
            self.root, (self.dims, cells, self.heads, streams), (self.value, row, apart, head * self.heads * cells)
        )


def attend(back_end, k, v, q, mask, sinks=None, scale=0.125, max_bias=0.0, softcap=0.0, heads_first=False) -> Any:
    """q (streams, rows, q_heads, dims), mask (streams, more rows, more cells) or None: out, or the answer."""
    streams, rows, heads, dims = q.shape
    out = np.zeros((*q.shape[:3], v.dims), np.float32)
    q_root = back_end.tensor("f32", *q.shape[::-1], array=q)
    q_view = back_end.view(q_root, (dims, rows, heads, streams), (4, 4 * dims * heads, 4 * dims, q[0].nbytes))
    given = None
    if mask is not None:
        given = back_end.tensor("f16", *mask.shape[:0:-1], 1, streams, array=mask)
    sinks = sinks if sinks is None else back_end.tensor("f32", heads, array=sinks)
    parts = k.keys(streams, heads_first), v.keys(streams, heads_first)
    to = back_end.tensor("f32", *out.shape[::-1], array=out)
    answer = back_end.compute(FLASH_ATTN_EXT, to, q_view, *parts, given, sinks, params=(scale, max_bias, softcap))
    return answer or out


class Case(NamedTuple):
    rows: int
    cells: int = 70
    kinds: tuple[str, str] = ("f16", "f16")
    sizes: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (2, 3)  # of KV, query heads of each
    streams: int = 1
    mask: str = "causal"
    sinks: bool = False
    softcap: float = 0.0
    max_bias: float = 0.0
    heads_first: bool = False


CASES = {
    "decode": Case(1),
    "prompt": Case(9, kinds=("q8_0", "q4_0")),
    "equal rows": Case(3, mask="shown"),
    "no mask": Case(2, mask=""),
    "streams": Case(3, streams=2, softcap=8.0, sinks=True),
    "float mask": Case(2, mask="float", kinds=("f32", "f32"), sizes=(40, 65)),
    "ALiBi": Case(3, mask="float", max_bias=8.0),
    "heads first": Case(4, heads_first=True, kinds=("f16", "q8_0")),
}


def slopes_of(heads: int, max_bias: float) -> Any:
    """ggml's, of ALiBi."""
    whole = 2 ** int(np.log2(heads))
    steps = np.float32(2) ** (np.float32([-max_bias, -max_bias / 2]) / np.float32(whole))
    of_heads = [steps[0] ** np.float32(h + 1) for h in range(whole)]
    return np.float32(of_heads + [steps[1] ** np.float32(2 * h + 1) for h in range(heads - whole)])


def mask_of(rng, case: Case, order: Any) -> Any:
    """float16 (streams, rows + 2, cells + 4); order: (streams, cells), cells in the order of writes."""
    mask = np.zeros((case.streams, case.rows + 2, case.cells + 4), np.float16)
    shown = mask[:, : case.rows, : case.cells]
    if case.mask == "float":
        shown[:] = rng.standard_normal(shown.shape)
        shown[rng.random(shown.shape) < 0.3] = -np.inf
    rank = np.argsort(order, axis=1)[:, None]
    behind = case.cells - case.rows + np.arange(case.rows)[:, None]
    if case.mask == "causal":
        shown[np.broadcast_to(rank > behind, shown.shape)] = -np.inf
    shown[:, :, 5] = shown[:, :, 5] if case.mask != "shown" else -np.inf
    return mask


@pytest.mark.parametrize("name", CASES)
def test_bits_are_the_oracle_s(back_end, rng, name):
    case, (kv_heads, group) = CASES[name], CASES[name].heads
    total, q_heads = case.cells * case.streams, kv_heads * group
    halves = [rng.standard_normal((total, kv_heads, size), np.float32) for size in case.sizes]
    k, v = (
        Part(back_end, kind, kv_heads, size, total, offset)
        for kind, size, offset in zip(case.kinds, case.sizes, (0, ROOM), strict=True)
    )
    back_end.c.clear_buffer(back_end.buffer)
    if case.heads_first:
        written = np.arange(total)
        for part, x in zip((k, v), halves, strict=True):
            data = row_bytes(np.ascontiguousarray(x.swapaxes(0, 1).reshape(1, -1, part.dims)), part.kind)
            back_end.c.set_bytes(part.root, c.c_void_p(address(data)), c.c_size_t(0), c.c_size_t(data.nbytes))
    else:
        written = rng.permutation(total)
        for some in np.split(written, [total - 7]):
            for part, x in zip((k, v), halves, strict=True):
                assert part.write(x[some], some) == DONE
    order = np.array([[n % case.cells for n in written if n // case.cells == s] for s in range(case.streams)])
    q = rng.standard_normal((case.streams, case.rows, q_heads, case.sizes[0]), np.float32)
    sinks = rng.standard_normal(q_heads, np.float32) if case.sinks else None
    mask = mask_of(rng, case, order) if case.mask else None
    numbers = {"max_bias": case.max_bias, "softcap": case.softcap, "heads_first": case.heads_first}
    found = attend(back_end, k, v, q, mask, sinks, **numbers)
    for s, row in np.ndindex(case.streams, case.rows):
        seen = order[s] if mask is None else order[s][~np.isinf(mask[s, row, order[s]])]
        options = {"scale": 0.125, "softcap": case.softcap or None, "sinks": sinks}
        if case.mask == "float":
            options["mask"] = mask[s, row, seen].astype(np.float32)[None]
            options |= {"mask_slopes": slopes_of(q_heads, case.max_bias)} if case.max_bias else {}
        kept = stored(*(x[seen + s * case.cells] for x in halves), "/".join(case.kinds), True, False)
        want, _ = za.reference.emulate(q[s, row], *kept, causal=False, **options)
        same([found[s, row]], [want], (name, s, row))


def test_a_state_that_is_restored_to_other_cells_keeps_the_order_of_writes(back_end):
    """Tokens in the first half of the cells are read by K and V, the cache is cleared, and they are put into the second
    half, before another token."""
    n, sizes, rng = 20, (2, 64, 41), np.random.default_rng(7)  # rows that no other test has
    k, v = (Part(back_end, "f16", *sizes, offset) for offset in (0, ROOM))
    back_end.c.clear_buffer(back_end.buffer)
    q, x = rng.standard_normal((1, 1, 6, 64), np.float32), rng.standard_normal((2, n + 1, 2, 64), np.float32)
    hidden = np.full((1, 1, 41), -np.inf, np.float16)

    def shown(cells):
        mask = hidden.copy()
        mask[..., cells] = 0
        return attend(back_end, k, v, q, mask)

    shown([0])  # from now on the tensors are K and V
    cells = rng.permutation(n)
    for part, values in zip((k, v), x, strict=True):
        assert part.write(values[:n], cells) == DONE
    states = [np.empty(n * part.head * 2, np.uint8) for part in (k, v)]
    for part, state in zip((k, v), states, strict=True):
        back_end.c.get_bytes(part.root, c.c_void_p(address(state)), c.c_size_t(0), c.c_size_t(state.nbytes))
    back_end.c.clear_buffer(back_end.buffer)
    shown([0])
    for part, state in zip((k, v), states, strict=True):
        at = c.c_size_t(n * part.head * 2), c.c_size_t(state.nbytes)
        back_end.c.set_bytes(part.root, c.c_void_p(address(state)), *at)
    for part, values in zip((k, v), x, strict=True):
        assert part.write(values[n:], [3]) == DONE
    kept = stored(*x, "f16/f16", True, False)
    same(shown([3, *range(n, 2 * n)])[0], [za.reference.emulate(q[0, 0], *kept, scale=0.125)[0]])


def test_what_is_no_row_is_refused(back_end):
    """By a failed call; the largest float16 is one."""
    part, row = Part(back_end, "f16", 2, 64, 9, 0), np.zeros((1, 2, 64), np.float32)
    for value, cell, answer in ((65504, 8, DONE), (65505, 8, FAILED), (np.nan, 8, FAILED), (0, 9, FAILED)):
        row[0, 1, 3] = value
        assert part.write(row, [cell]) == answer
    q = np.zeros((1, 1, 6, 64), np.float32)
    mask = np.full((1, 1, 9), np.nan, np.float16)
    assert attend(back_end, part, part, q, mask) == FAILED
    assert attend(back_end, part, part, q, None, softcap=-1.0) == DECLINED
