"""Attention on K and V of one sequence that lie contiguously on a device: what a one-shot call and the sweep run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..cache.head_scales import check_head_scales, kernel_scales
from ..cache.rows import pack_k, pack_v, stored_values, tiles
from ..canonical.arguments import key_ranges
from ..canonical.constants import KEYS_PER_LEAF
from ..checks import check_int
from ..kernels.dispatches import AttendVariant, KernelCall, MatrixVariant, attend_call, matrix_call, merge_call
from ..kernels.records import WorkBuffer
from ..limits import WAVE
from ..planning.arithmetic import Arithmetic, on_matrices
from ..planning.items import Mask, Visible, item_records, row_records
from ..planning.splits import SplitPlan
from ..runtime.device import Device
from ..runtime.protocol import Buffer, Recording, Use, Words
from ..shapes import AttnShape, filled_up, row_format
from ..storage import storage_types
from .arithmetic import ARRAYS, check_arithmetic, workgroup_on
from .scoring import Scoring, check_scale
from .workspace import out_and_lse

F32 = NDArray[np.float32]
DTYPES: Final = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}
_USES: Final = {"work": Use.INPUT, "q": Use.INPUT, "states": Use.SCRATCH, "out": Use.OUTPUT}
PIECE: Final = 16 * WAVE  # bytes that a workgroup of the benchmark's yardstick reads at once
_ONE_PAGE: Final = 31  # page_shift with which every tile lies in page 0


def whole_pieces(nbytes: int) -> int:
    """The bytes of a buffer of ``nbytes`` that a kernel reads in whole pieces."""
    return -(-nbytes // PIECE) * PIECE


def packed(k: NDArray[Any], v: NDArray[Any], dtype: str, check: bool) -> Iterator[Words]:
    """The words of the buffers of ContiguousKV, of K and then of V, filled up by zeros. check: as a cache does."""
    shape, kinds = AttnShape(k.shape[1], k.shape[1], k.shape[2], v.shape[2]), storage_types(dtype)
    for name, pack, x, kind in zip("kv", (pack_k, pack_v), (k, v), kinds, strict=True):
        words = pack(stored_values(name, x, kind.name)[0] if check else x, shape, kind)
        missing = whole_pieces(words.nbytes) - words.nbytes
        yield np.pad(words, (0, missing // 4)) if missing else words


class ContiguousKV:
    """K and V of one sequence and layer on a device, in the kernels' layout.

    k: (tokens, kv_heads, head_dim), v: (tokens, kv_heads, v_head_dim), both float32 or both float16, checked by the
    caller. dtype: None for theirs; otherwise they are checked and stored as by a cache of that dtype.
    """

    def __init__(self, device: Device, k: NDArray[Any], v: NDArray[Any], dtype: str | None = None) -> None:
        self.device = device
        self.tokens, kv_heads, _ = k.shape
        self.dtype = dtype or DTYPES[k.dtype]
        row = row_format(AttnShape(kv_heads, kv_heads, k.shape[2], v.shape[2]), self.dtype)
        sizes = (
            4 * max(tiles(self.tokens), 1) * KEYS_PER_LEAF * kv_heads * words for words in (row.k_words, row.v_words)
        )
        with ExitStack() as undo:
            self.k, self.v = (
                undo.enter_context(closing(device.runtime.buffer(whole_pieces(n), Use.DATA))) for n in sizes
            )
            if self.tokens:
                for buffer, words in zip((self.k, self.v), packed(k, v, self.dtype, dtype is not None), strict=True):
                    device.runtime.write(buffer, words)
            undo.pop_all()

    def close(self) -> None:
        """Free the device memory."""
        self.k.close()
        self.v.close()


class RecordedCall:
    """One recorded attention call on a ContiguousKV: a plan, its buffers and its submission. Run it at will.

    scoring: None is the usual scale and nothing else; its window must be the plan's. mask: of the query rows, or None.
    heads_per_workgroup: query heads that one workgroup of pass 1 serves, which never shows in the bits; None is the
    shape's choice. arithmetic: see ``Attention``; with matrix units a workgroup serves what their tiles hold.
    """

    def __init__(
        self,
        kv: ContiguousKV,
        plan: SplitPlan,
        *,
        scoring: Scoring | None = None,
        causal: bool = True,
        mask: Mask | None = None,
        timestamps: bool = False,
        heads_per_workgroup: int | None = None,
        arithmetic: Arithmetic = "canonical",
    ) -> None:
        shape, runtime, info = plan.shape, kv.device.runtime, kv.device.info
        per_workgroup = shape.heads_per_workgroup
        if heads_per_workgroup is not None:
            per_workgroup = check_int("heads_per_workgroup", heads_per_workgroup, 1, per_workgroup)
        self.plan, self.runtime = plan, runtime
        scoring = Scoring(check_scale(None, shape.head_dim)) if scoring is None else scoring
        visible = key_ranges(plan.context_len, plan.q_len, causal, scoring.window)
        variant = AttendVariant(
            shape,
            kv.dtype,
            plan.build_on(info.layout_facts, kv.dtype),
            info.kind,
            KEYS_PER_LEAF,
            softcap=scoring.softcap is not None,
            alibi=scoring.alibi is not None,
            mask=mask is not None,
            heads=per_workgroup,
            lanes=info.attend_lanes,
        )
        matrix = _matrix_variant(kv, plan, arithmetic, variant)
        work = _work_buffer(kv, plan, scoring, visible, mask, 1 if matrix is None else matrix.rows)
        vectors = plan.q_len * shape.q_heads
        out_bytes = 4 * vectors * (shape.v_dim + 1)
        sizes = (4 * work.words.size, 4 * vectors * shape.k_dim, max(plan.scratch_bytes, 4), out_bytes)
        self._buffers: dict[str, Buffer] = {}
        self._recording: Recording | None = None
        try:
            for name, nbytes in zip(_USES, sizes, strict=True):
                self._buffers[name] = runtime.buffer(nbytes, _USES[name])
            runtime.write(self._buffers["work"], work.words)
            calls: list[KernelCall] = []
            if len(work.items):
                size = len(work.items), shape.kv_heads, "out" if plan.passes == 1 else "states"
                calls.append(attend_call(variant, *size) if matrix is None else matrix_call(matrix, *size))
            if plan.passes == 2:
                calls.append(merge_call(shape, info.kind, plan.q_len))
            bound = {**self._buffers, "k": kv.k, "v": kv.v}
            self._recording = runtime.record([kv.device.dispatch(call, bound) for call in calls], timestamps)
        except BaseException:
            self.close()
            raise

    def write_q(self, q: NDArray[Any]) -> None:
        """Set the query rows: (q_len, q_heads, head_dim), checked float32 or float16 values."""
        self.runtime.write(self._buffers["q"], filled_up(q, self.plan.shape.k_dim).reshape(-1).view(np.uint32))

    def run(self) -> None:
        """Submit and wait."""
        assert self._recording is not None
        self.runtime.run(self._recording)

    def timings(self) -> list[tuple[float, float]]:
        """Begin and end of each pass on the device's clock; for a step made with timestamps."""
        assert self._recording is not None
        return self.runtime.timings(self._recording)

    def poison(self) -> None:
        """Fill the output with NaN, so that an element which no kernel writes cannot pass a comparison."""
        words = np.full(self._buffers["out"].nbytes // 4, 0x7FC0DEAD, np.uint32)
        self.runtime.write(self._buffers["out"], words)

    def result(self, copy: bool = True) -> tuple[F32, F32]:
        """out (q_len, q_heads, v_head_dim) and lse (q_len, q_heads) of the last run.

        Without ``copy`` they are valid until the next run or ``close``.
        """
        words = (self.runtime.read if copy else self.runtime.peek)(self._buffers["out"])
        return out_and_lse(words, self.plan.q_len, self.plan.shape)

    def close(self) -> None:
        """Free the step's buffers and command buffers."""
        if self._recording is not None:
            self._recording.close()
        for buffer in self._buffers.values():
            buffer.close()


def _matrix_variant(
    kv: ContiguousKV, plan: SplitPlan, arithmetic: Arithmetic, canonical: AttendVariant
) -> MatrixVariant | None:
    """Pass 1 with matrix units where ``arithmetic`` asks for them, None where the canonical one runs."""
    info, shape = kv.device.info, plan.shape
    if not on_matrices(check_arithmetic(arithmetic, kv.device, shape, kv.dtype, ARRAYS), plan.q_len, shape):
        return None
    tile, workgroup = info.matrix.tile, workgroup_on(info, shape, plan.q_len * shape.group)
    assert tile is not None and workgroup is not None, "check_arithmetic refuses these"
    return MatrixVariant.of(canonical, tile, workgroup)


def _work_buffer(
    kv: ContiguousKV, plan: SplitPlan, scoring: Scoring, visible: Visible, mask: Mask | None, rows_each: int
) -> WorkBuffer:
    """The call's work buffer; page 0 holds everything. rows_each: query rows of a work item at most."""
    single_pass, ranges = plan.passes == 1, np.array(plan.leaf_ranges())
    items = item_records(visible, ranges, plan.leaves_per_state, keep_empty=single_pass, rows_each=rows_each)
    ones = check_head_scales(kv.dtype, plan.shape, 1, None, None)
    heads = scoring.heads._replace(scales=kernel_scales(ones))
    work = WorkBuffer(len(items), plan.q_len, 0, 1, heads, 0 if mask is None else mask.words.size)
    work.set_shape(plan.shape, plan.shape.kv_heads)
    work.set(
        **scoring.header(plan.shape.head_dim),
        state_stride=plan.states * plan.q_len,
        page_shift=_ONE_PAGE,
        page_tiles=max(tiles(kv.tokens), 1),
        rows=plan.q_len,
        single_pass=int(single_pass),
    )
    work.items[:] = items
    work.items["page_table"] = work.tables_at
    work.rows[:] = row_records(visible, plan)
    work.rows["position"] = (kv.tokens - plan.q_len + np.arange(plan.q_len)).astype(np.uint32)
    if mask is not None:
        width = mask.words.shape[1]
        work.rows["mask"] = work.masks_at + np.arange(plan.q_len) * width
        work.rows["mask_begin"], work.rows["mask_end"] = mask.begin, mask.begin + width
        work.masks[:] = mask.words.reshape(-1)
    return work
