"""K and V where a host keeps them: rows of tokens and KV heads in any order, 2 bytes aligned, with anything between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import FULL, row_bytes, same

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.cache.layer_storage import HeadSlice, LayerStorage
from zinc_attn.cache.mover import PageGeometry
from zinc_attn.cache.rows import stored
from zinc_attn.kernels.records import WorkBuffer
from zinc_attn.runtime.protocol import Use
from zinc_attn.storage import storage_types

ONE_DISPATCHER = True
TOKENS = 150


def laid_out(rows: NDArray[np.uint8], stride: int, heads_first: bool) -> NDArray[np.uint8]:
    """(tokens, kv_heads, bytes) with rows ``stride`` bytes apart; what lies between them is no number in any type."""
    whole = np.full((*rows.shape[:2], stride), 0xFF, np.uint8)
    whole[..., : rows.shape[2]] = rows
    return np.ascontiguousarray(whole.swapaxes(0, 1) if heads_first else whole)


CASES = {  # dtype, head_dim, v_head_dim, bytes between rows, heads first
    "odd": ("f16", 65, 67, 0, False),
    "ggml's 40": ("f16", 40, 72, 0, True),
    "apart": ("f32/bf16", 65, 40, 12, False),
    "bytes": ("fp8_e4m3", 72, 65, 1, False),
    "18 and 34 bytes": ("q4_0/q8_0", 96, 32, 0, False),
    "22 bytes": ("q5_0/iq4_nl", 96, 96, 2, True),
    "20 and 24 bytes": ("q4_1/q5_1", 128, 320, 0, False),
}


@dataclass(frozen=True)
class InPlace(PageGeometry):
    """Rows that lie ``apart`` rows from a token to the next, and from a KV head to the next."""

    apart: tuple[int, int] = 0, 0

    def set_header(self, work: WorkBuffer, one: HeadSlice) -> None:
        super().set_header(work, one)
        work.set(token_rows=self.apart[0], head_rows=self.apart[1])


def check_in_place(device: za.Device, dtype: str, k_dim: int, v_dim: int, gap: int, heads_first: bool) -> None:
    shape, rng = za.AttnShape(6, 3, k_dim, v_dim), np.random.default_rng([k_dim, v_dim])
    q = rng.standard_normal((2, 6, k_dim), dtype=np.float32)
    given = [rng.standard_normal((TOKENS, 3, dim)).astype(np.float16).astype(np.float32) for dim in (k_dim, v_dim)]
    kinds, raw, strides = storage_types(dtype), [], []
    for x, kind in zip(given, kinds, strict=True):
        rows = row_bytes(x, kind.name)
        strides.append(-(-(rows.shape[2] + gap) // 2) * 2)
        raw.append(laid_out(rows, strides[-1], heads_first))
    apart = (1, TOKENS) if heads_first else (3, 1)
    want = reference.emulate(q, *stored(*given, dtype, True))
    with za.KVCache(device, shape, 1, TOKENS, dtype, kv_layout="NHD", round_rows=True) as cache:
        sequence = cache.new_sequence()
        cache.append(sequence, 0, *given)  # as many rows, in place of which these are read
        buffers = [device.runtime.buffer(4 * -(-x.size // 4), Use.INPUT) for x in raw]
        for buffer, x in zip(buffers, raw, strict=True):
            device.runtime.write(buffer, np.pad(x.reshape(-1), (0, -x.size % 4)).view(np.uint32))
        cache.layout = InPlace(shape, dtype, 64, 4, (strides[0], strides[1]), apart)
        cache.layers[0] = LayerStorage(0, 0, (HeadSlice(0, 3, *buffers),))
        same(za.Attention(cache)(q, sequence, 0, return_lse=True), want)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_read_where_they_lie(device, name):
    check_in_place(device, *CASES[name])


@pytest.mark.parametrize("any_device", [("swiftshader", "vulkan")], indirect=True, ids=["swiftshader"])
@pytest.mark.parametrize("name", ("odd", "22 bytes") if FULL else ("odd",))
def test_rows_are_read_where_they_lie_on_another_driver(any_device, name):
    check_in_place(any_device, *CASES[name])


@pytest.mark.parametrize(("dtype", "dims"), (("f16", (65, 67)), ("q4_0/q8_0", (96, 32))))
def test_a_cache_of_rows(device, tmp_path, dtype, dims):
    """Rows that share words with their neighbors are written in any order, copied, read back, and kept in a file."""
    shape, rng = za.AttnShape(6, 3, *dims), np.random.default_rng(5)
    k, v = (rng.standard_normal((90, 3, dim)).astype(np.float32) for dim in dims)
    q, options = rng.standard_normal((6, dims[0]), dtype=np.float32), {"round_rows": True, "kv_layout": "NHD"}
    order = rng.permutation(64)
    with za.KVCache(device, shape, 1, 128, dtype, 2, page_order=order, **options) as cache:
        attn, seq = za.Attention(cache), cache.new_sequence()
        cache.append(seq, 0, k[:35], v[:35])
        fork = seq.fork()  # within a page, which is copied
        cache.append(fork, 0, k[40:50], v[40:50])
        cache.append(seq, 0, k[35:89], v[35:89])
        both = (np.concatenate([x[:35], x[40:50]]) for x in (k, v))
        want = reference.emulate(q, *stored(k, v, dtype, True))
        same(attn(q, fork, 0, return_lse=True), reference.emulate(q, *stored(*both, dtype, True)))
        same(attn(q, seq, 0, k=k[89], v=v[89], return_lse=True), want)
        seq.save(tmp_path / "rows")
    with za.KVCache(device, shape, 1, 128, dtype, 64) as tiles:
        same(za.Attention(tiles)(q, tiles.load(tmp_path / "rows"), 0, return_lse=True), want)


@pytest.mark.parametrize("given", ("HND", "nhd", None, ["NHD"]))
def test_a_layout_of_another_name_is_refused(device, given: Any):
    with pytest.raises(errors.ArgumentError, match=r"kv_layout: got .*, expected 'tiles' or 'NHD'"):
        za.KVCache(device, za.AttnShape(1, 1, 8), 1, 16, kv_layout=given)
