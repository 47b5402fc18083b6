"""Attention on K and V of one sequence that lie contiguously on a device: what a one-shot call and the sweep run.

They are a cache of one page, so that a call is planned and its workspace filled as one on a KVCache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..cache.head_scales import check_head_scales, kernel_scales
from ..cache.layer_storage import HeadSlice, LayerStorage
from ..cache.mover import PageGeometry
from ..cache.rows import pack_k, pack_v, stored_values, tiles
from ..canonical.constants import KEYS_PER_LEAF
from ..planning.arithmetic import Arithmetic
from ..planning.call import SubmissionPlanner
from ..planning.inputs import CallFacts, CallOptions, Request, SplitLayout
from ..planning.items import Mask
from ..planning.splits import SplitPlan
from ..planning.submission import RowSlice
from ..runtime.device import Device
from ..runtime.protocol import Buffer, Use, Words
from ..shapes import TILES, AttnShape, Strides, row_format
from ..storage import storage_types
from .arithmetic import ARRAYS, check_arithmetic
from .scoring import Scoring, check_scale
from .workspace import PagedStorage, Tensors, Workspace

F32 = NDArray[np.float32]
DTYPES: Final = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}
_EVERY_TILE: Final = 31  # page_shift with which every tile lies in page 0


def packed(k: NDArray[Any], v: NDArray[Any], dtype: str, check: bool) -> Iterator[Words]:
    """The words of the buffers of ContiguousKV in tiles, of K and then of V. check: as a cache does."""
    shape, kinds = AttnShape(k.shape[1], k.shape[1], k.shape[2], v.shape[2]), storage_types(dtype)
    for name, pack, x, kind in zip("kv", (pack_k, pack_v), (k, v), kinds, strict=True):
        yield pack(stored_values(name, x, kind.name)[0] if check else x, shape, kind)


class RowsInPlace:
    """K and V of one sequence and layer as rows that the caller laid out: bytes, on a device.

    k, v: uint8 of any shape, rows of ``dtype``'s values or of ggml's blocks; strides: bytes from a row to the next;
    apart: rows from a token to the next, and from a KV head to the next.
    """

    def __init__(
        self,
        device: Device,
        tokens: int,
        dtype: str,
        k: NDArray[np.uint8],
        v: NDArray[np.uint8],
        strides: Strides,
        apart: tuple[int, int],
    ) -> None:
        self.device, self.tokens, self.dtype, self.strides = device, tokens, dtype, strides
        self.header = {"token_rows": apart[0], "head_rows": apart[1]}
        given = [np.pad(x.reshape(-1), (0, -x.size % 4)).view(np.uint32) for x in (k, v)]
        with ExitStack() as undo:
            self.k, self.v = (undo.enter_context(closing(device.runtime.buffer(x.nbytes, Use.DATA))) for x in given)
            for buffer, words in zip((self.k, self.v), given, strict=True):
                device.runtime.write(buffer, words)
            undo.pop_all()

    def close(self) -> None:
        """Free the device memory."""
        self.k.close()
        self.v.close()


class ContiguousKV:
    """K and V of one sequence and layer on a device, in the kernels' layout.

    k: (tokens, kv_heads, head_dim), v: (tokens, kv_heads, v_head_dim), both float32 or both float16, checked by the
    caller. dtype: None for theirs; otherwise they are checked and stored as by a cache of that dtype.
    """

    def __init__(self, device: Device, k: NDArray[Any], v: NDArray[Any], dtype: str | None = None) -> None:
        self.device, self.strides, self.header = device, TILES, dict[str, int]()
        self.tokens, kv_heads, _ = k.shape
        self.dtype = dtype or DTYPES[k.dtype]
        row = row_format(AttnShape(kv_heads, kv_heads, k.shape[2], v.shape[2]), self.dtype)
        sizes = (
            4 * max(tiles(self.tokens), 1) * KEYS_PER_LEAF * kv_heads * words for words in (row.k_words, row.v_words)
        )
        with ExitStack() as undo:
            self.k, self.v = (undo.enter_context(closing(device.runtime.buffer(n, Use.DATA))) for n in sizes)
            if self.tokens:
                for buffer, words in zip((self.k, self.v), packed(k, v, self.dtype, dtype is not None), strict=True):
                    device.runtime.write(buffer, words)
            undo.pop_all()

    def close(self) -> None:
        """Free the device memory."""
        self.k.close()
        self.v.close()


class RecordedCall:
    """One recorded attention call on K and V in one piece: a plan, its buffers and its submission. Run it at will.

    scoring: None is the usual scale and nothing else; its window must be the plan's. mask: of the query rows, or None.
    arithmetic: see ``Attention``.
    """

    def __init__(
        self,
        kv: ContiguousKV | RowsInPlace,
        plan: SplitPlan,
        *,
        scoring: Scoring | None = None,
        causal: bool = True,
        mask: Mask | None = None,
        timestamps: bool = False,
        arithmetic: Arithmetic = "canonical",
    ) -> None:
        shape, device = plan.shape, kv.device
        self.plan, self.runtime = plan, device.runtime
        scoring = Scoring(check_scale(None, shape.head_dim)) if scoring is None else scoring
        ones = check_head_scales(kv.dtype, shape, 1, None, None)
        scoring = replace(scoring, scales=kernel_scales(ones))
        arithmetic = check_arithmetic(arithmetic, device, shape, kv.dtype, ARRAYS)
        splits = SplitLayout.of(plan, plan.build_on(device.info.layout_facts, kv.dtype))
        options = CallOptions(lambda *_: splits, scoring.window, cascade=False, arithmetic=arithmetic)
        request = Request(plan.q_len, kv.tokens, 0, np.zeros(1, np.uint32), causal=causal, mask=mask)
        planner = SubmissionPlanner([request], [splits], options, CallFacts(device.info, shape, KEYS_PER_LEAF))
        submission = planner.plan((RowSlice(0, 0, plan.q_len),), ())
        key = submission.key._replace(  # for this one call alone: nothing is rounded up
            items=len(submission.items),
            states=plan.states * plan.q_len,
            rows=plan.q_len,
            tables=1,
            masks=len(submission.masks),
        )
        layout = PageGeometry(shape, kv.dtype, KEYS_PER_LEAF, max(tiles(kv.tokens), 1), kv.strides)
        pages = PagedStorage(device, layout, [LayerStorage(0, 0, (HeadSlice(0, shape.kv_heads, kv.k, kv.v),))])
        self._made = ExitStack()
        try:
            self._workspace = Workspace.make(key, pages, scoring, Tensors.of(key, pages, self._buffer))
            self._made.callback(self._workspace.close)
            self._workspace.work.set(page_shift=_EVERY_TILE, **kv.header)
            self._workspace.fill(submission, 0)
            dispatches = self._workspace.dispatches(0, scoring)
            self._recording = self.runtime.record(dispatches, timestamps)
            self._made.callback(self._recording.close)
        except BaseException:
            self.close()
            raise

    def _buffer(self, _: str, words: int, use: Use) -> Buffer:
        return self._made.enter_context(closing(self.runtime.buffer(4 * max(words, 1), use)))

    def write_q(self, q: NDArray[Any]) -> None:
        """Set the query rows: (q_len, q_heads, head_dim), checked float32 or float16 values."""
        self._workspace.upload_q(q)

    def run(self) -> None:
        """Submit and wait."""
        self.runtime.run(self._recording)

    def timings(self) -> list[tuple[float, float]]:
        """Begin and end of each pass on the device's clock; for a step made with timestamps."""
        return self.runtime.timings(self._recording)

    def poison(self) -> None:
        """Fill the output with NaN, so that an element which no kernel writes cannot pass a comparison."""
        out = self._workspace.tensors.out
        self.runtime.write(out, np.full(out.nbytes // 4, 0x7FC0DEAD, np.uint32))

    def result(self, copy: bool = True) -> tuple[F32, F32]:
        """out (q_len, q_heads, v_head_dim) and lse (q_len, q_heads) of the last run.

        Without ``copy`` they are valid until the next run or ``close``.
        """
        return self._workspace.results(copy)

    def close(self) -> None:
        """Free the step's buffers and command buffers."""
        self._made.close()
