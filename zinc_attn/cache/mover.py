"""Moves rows between the host and the pages of a cache, and pages within it."""

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels import declarations
from ..kernels.dispatches import KernelCall, copy_call, encode_call, move_call
from ..kernels.records import HeadValues, Words, WorkBuffer
from ..planning.padding import power_of_two
from ..runtime.device import Device
from ..runtime.protocol import Buffer, Recording, Use
from ..shapes import TILES, AttnShape, Strides, row_format, strided_format, tile_words
from . import strided
from .device_encoding import encodes_on_device, upload_values, value_words
from .head_scales import kernel_scales
from .layer_storage import HeadSlice, LayerStorage
from .rows import pieces

Positions = NDArray[np.int64]
ROWS_BYTES: Final = 4 << 20  # rows that one submission moves
_LEAST_WORDS: Final = 32  # of a row, as the rows of a submission are counted: every device takes as many workgroups
_ROWS_USE: Final = {"append": Use.INPUT, "encode": Use.SCRATCH, "gather": Use.OUTPUT, "move": Use.SCRATCH}


@dataclass(frozen=True)
class PageGeometry:
    """The places of rows in the pages: see ``shaders/attend/words.glsl``.

    tile: tokens per tile; page_tiles: tiles per page; strides: TILES, or the strides of rows (token, KV head, values).
    """

    shape: AttnShape
    dtype: str
    tile: int
    page_tiles: int
    strides: Strides = TILES

    @cached_property
    def row_words(self) -> int:
        """Words of one token's row in a row tensor, of all KV heads."""
        shape, tiled = self.shape, self.strides == TILES
        row = row_format(shape, self.dtype) if tiled else strided_format(self.strides, shape.latent)
        return shape.kv_heads * row.words

    @cached_property
    def tile_words(self) -> tuple[int, int]:
        """Words of a tile of K and of V of one KV head; V's are 0 for a latent shape."""
        k_stride, v_stride = self.strides
        if k_stride:
            return -(-self.tile * k_stride // 4), 0 if self.shape.latent else -(-self.tile * v_stride // 4)
        row = row_format(self.shape, self.dtype)
        return tile_words(self.tile, row.k_words), tile_words(self.tile, row.v_words)

    def encodes(self, rows: int) -> bool:
        """Whether the device encodes ``rows`` new rows."""
        return self.strides == TILES and encodes_on_device(self.dtype, rows)

    def to_device(self, words: Words) -> Words:
        """Rows (n, kv_heads, words) of ``rows.encode`` as a row tensor of this geometry has them."""
        return words if self.strides == TILES else strided.from_rows(words, self.shape, self.dtype, self.strides)

    def set_header(self, work: WorkBuffer, head_slice: HeadSlice) -> None:
        """The header's words about the pages and the heads of a slice."""
        work.set_shape(self.shape, head_slice.heads, head_slice.first)
        work.set(page_shift=self.page_tiles.bit_length() - 1, page_tiles=self.page_tiles)
        if self.strides != TILES:
            work.set(token_rows=head_slice.heads, head_rows=1)


class _MoveKey(NamedTuple):
    """Kind and sizes of a move. rows: a power of two, or the pairs of pages of a copy; tables: words, a power of two.

    "encode": an append of values that the device encodes; "move": of rows that work buffer "from" has gathered.
    """

    kind: Literal["append", "encode", "gather", "copy", "move", "from"]
    slice: int = 0  # index of the head slice
    rows: int = 1
    tables: int = 0


class _Buffers(NamedTuple):
    """The work words of a move, and its buffers by their names in kernel calls."""

    work: WorkBuffer
    bound: dict[str, Buffer]


class RowMover:
    """Append, gather and copy on the layers of a cache. A recording serves the layers that share K and V buffers."""

    def __init__(self, device: Device, layout: PageGeometry, layers: Seq[LayerStorage]) -> None:
        self._device, self._layout, self._layers = device, layout, layers
        self._buffers: dict[_MoveKey, _Buffers] = {}
        self._recordings: dict[tuple[int, _MoveKey], Recording] = {}

    def append(self, layer: int, positions: Positions, table: Words, rows: Words) -> None:
        """Write rows (n, kv_heads, words) to the tokens at ``positions`` of a sequence with page table ``table``."""
        runtime = self._device.runtime
        for part, index in self._parts(layer, len(positions)):
            key = _MoveKey("append", index, power_of_two(len(positions[part])), power_of_two(len(table)))
            buffers = self._filled(key, [layer], positions[part], table)
            runtime.write(buffers.bound["rows"], self._layout.to_device(rows[part]).reshape(-1))
            runtime.run(self._recording(layer, key))

    def append_values(
        self,
        layer: int,
        positions: Positions,
        table: Words,
        new: tuple[NDArray[Any], NDArray[Any]],
        scales: NDArray[np.float32] | None,
    ) -> None:
        """Like ``append`` for stored values k and v, which the device encodes. scales: (2, kv_heads) of fp8_e4m3."""
        runtime, factors = self._device.runtime, kernel_scales(scales)
        for part, index in self._parts(layer, len(positions), value_words(self._layout.shape, 1)):
            key = _MoveKey("encode", index, power_of_two(len(positions[part])), power_of_two(len(table)))
            buffers = self._buffers_for(key)
            if factors is not None:
                HeadValues(scales=factors).write(buffers.work.heads)
            self._filled(key, [layer], positions[part], table)
            values = new[0][part], new[1][part]
            upload_values(runtime, buffers.bound["values"], self._layout.shape, key.rows, [values])
            runtime.run(self._recording(layer, key))

    def gather(self, layer: int, positions: Positions, table: Words) -> Words:
        """The rows (n, kv_heads, words) of the tokens at ``positions``."""
        layout, n = self._layout, len(positions)
        kv_heads = layout.shape.kv_heads
        rows = np.zeros((n, kv_heads, layout.row_words // kv_heads), np.uint32)
        for part, index in self._parts(layer, n):
            head_slice, target = self._layers[layer].slices[index], rows[part]
            key = _MoveKey("gather", index, power_of_two(len(target)), power_of_two(len(table)))
            buffers = self._filled(key, [layer], positions[part], table)
            self._device.runtime.run(self._recording(layer, key))
            got = self._device.runtime.read(buffers.bound["rows"])[: len(target) * layout.row_words]
            heads = slice(head_slice.first, head_slice.first + head_slice.heads)
            target[:, heads] = got.reshape(target.shape)[:, heads]
        if layout.strides == TILES:
            return rows
        return strided.to_rows(rows, layout.shape, layout.dtype, layout.strides)

    def move(self, sources: Positions, table: Words, targets: Positions, new_table: Words) -> None:
        """Copy the rows of every layer from ``sources`` by ``table`` to ``targets`` by ``new_table``, in other pages.

        There is a submission for the layers that share buffers; no row travels to the host.
        """
        for layers in self._sharing():
            for part, index in self._parts(layers[0], len(sources), layers=len(layers)):
                ends = [self._paged(*pair) for pair in ((sources[part], table), (targets[part], new_table))]
                rows = power_of_two(len(layers) * len(sources[part]))
                tables = power_of_two(len(layers) * max(len(pages) for _, pages in ends))
                key = _MoveKey("move", index, rows, tables)
                for each_key, (positions, pages) in zip((key._replace(kind="from"), key), ends, strict=True):
                    self._filled(each_key, layers, positions, pages)
                self._device.runtime.run(self._recording(layers[0], key))

    def copy(self, source: int, target: int) -> None:
        """Copy a page of every layer to another page, in a submission for the layers that share buffers."""
        for layers in self._sharing():
            key = _MoveKey("copy", rows=len(layers))
            buffers = self._buffers_for(key)
            first = np.array([self._layers[layer].first_page for layer in layers])
            buffers.work.copies["source"], buffers.work.copies["target"] = first + source, first + target
            self._device.runtime.write(buffers.bound["work"], buffers.work.words)
            self._device.runtime.run(self._recording(layers[0], key))

    def close(self) -> None:
        """Free the recordings and buffers; a later call makes them anew."""
        recordings, buffers = self._recordings, self._buffers
        self._recordings, self._buffers = {}, {}
        for recording in recordings.values():
            recording.close()
        for work in buffers.values():
            for buffer in work.bound.values():
                buffer.close()

    def _sharing(self) -> Iterator[list[int]]:
        """The layers that share buffers, together."""
        for _, layers in itertools.groupby(range(len(self._layers)), lambda layer: self._layers[layer].number):
            yield list(layers)

    def _parts(self, layer: int, rows: int, words: int = 0, layers: int = 1) -> Iterator[tuple[slice, int]]:
        """(rows, index of the head slice) that each submission moves, of ``rows`` rows in ``layers`` layers.

        words: uploaded words of a row; 0: all its stored words.
        """
        size = 4 * layers * max(words or self._layout.row_words, _LEAST_WORDS)
        return itertools.product(pieces(rows, size, ROWS_BYTES), range(len(self._layers[layer].slices)))

    def _paged(self, positions: Positions, table: Words) -> tuple[Positions, Words]:
        """Ascending positions, and the pages of the table between the first and the last of them."""
        page = self._layout.tile * self._layout.page_tiles
        first = int(positions[0]) // page
        return positions - first * page, table[first : int(positions[-1]) // page + 1]

    def _filled(self, key: _MoveKey, layers: Seq[int], positions: Positions, table: Words) -> _Buffers:
        """The buffers of a move, filled with the same positions of every layer."""
        buffers, n = self._buffers_for(key), len(positions)
        work = buffers.work
        work.appends["position"] = declarations.NO_TOKEN
        for i, layer in enumerate(layers):  # a layer's pages begin at its first_page in the buffers
            work.appends["position"][i * n : (i + 1) * n] = positions
            work.appends["page_table"][i * n : (i + 1) * n] = work.tables_at + i * len(table)
            work.tables[i * len(table) : (i + 1) * len(table)] = self._layers[layer].first_page + table
        self._device.runtime.write(buffers.bound["work"], work.words)
        return buffers

    def _buffers_for(self, key: _MoveKey) -> _Buffers:
        if key not in self._buffers:
            runtime, layout = self._device.runtime, self._layout
            heads = layout.shape.q_heads if key.kind == "encode" else 0
            work = WorkBuffer(appends=key.rows, tables=key.tables, heads=heads)
            layout.set_header(work, self._layers[0].slices[key.slice])
            bound: dict[str, Buffer] = {}
            try:
                bound["work"] = runtime.buffer(4 * work.words.size, Use.INPUT)
                if key.kind in _ROWS_USE:
                    bound["rows"] = runtime.buffer(4 * key.rows * layout.row_words, _ROWS_USE[key.kind])
                if key.kind == "encode":
                    bound["values"] = runtime.buffer(4 * value_words(layout.shape, key.rows), Use.INPUT)
            except BaseException:
                for buffer in bound.values():
                    buffer.close()
                raise
            self._buffers[key] = _Buffers(work, bound)
        return self._buffers[key]

    def _recording(self, layer: int, key: _MoveKey) -> Recording:
        number, _, slices = self._layers[layer]
        if (number, key) not in self._recordings:
            buffers = self._buffers_for(key)
            slices = slices if key.kind == "copy" else slices[key.slice : key.slice + 1]
            steps = []
            for head_slice in slices:
                bound = {**buffers.bound, "k": head_slice.k, "v": head_slice.v}
                if key.kind == "move":
                    work = self._buffers_for(key._replace(kind="from")).bound["work"]
                    (gather,) = self._calls(key._replace(kind="gather"), head_slice)
                    steps.append(self._device.dispatch(gather, {**bound, "work": work}))
                steps += [self._device.dispatch(call, bound) for call in self._calls(key, head_slice)]
            self._recordings[number, key] = self._device.runtime.record(steps)
        return self._recordings[number, key]

    def _calls(self, key: _MoveKey, head_slice: HeadSlice) -> list[KernelCall]:
        """The launches that move the rows or pages of a head slice."""
        layout = self._layout
        shape, dtype, tile, strides = layout.shape, layout.dtype, layout.tile, layout.strides
        if key.kind == "copy":
            return [copy_call(layout.tile_words, head_slice.heads, layout.page_tiles, key.rows)]
        moved = shape, dtype, tile, key.rows, head_slice.heads, strides
        if key.kind == "gather":
            return [move_call(declarations.GATHER_KERNEL, *moved)]
        encodes = [encode_call(shape, dtype, key.rows)] if key.kind == "encode" else []
        return [*encodes, move_call(declarations.APPEND_KERNEL, *moved)]
