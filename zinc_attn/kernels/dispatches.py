"""Every dispatch of the package, built in one place: which kernel, with which constants, buffers and grid.

A ``KernelCall`` names its buffers; whoever runs it binds them. Decode calls, one-shot calls, partial states, the fold
of shards and a host's own Kompute sequence are made of these calls, and the compiler gate compiles their programs.
Grids are those of the declarations. The manifest states the constants as formulas; a test compares the two.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..canonical.constants import CHUNK, LEAVES_PER_NODE
from ..limits import MAX_HEADS_PER_WORKGROUP
from ..shapes import TILES, AttnShape, Strides, row_format, strided_format
from ..storage import storage_index, storage_types
from . import declarations
from .declarations import KernelDecl
from .families import Layout, layout_of
from .matrix import MatrixFragment, MatrixWorkgroup
from .sizes import chunks_ahead, value_passes
from .tuning import heads_together, merge_workgroup_size, wave_size


@dataclass(frozen=True)
class KernelCall:
    """A ``Dispatch`` whose buffers are still names."""

    decl: KernelDecl
    spec: tuple[int, ...]
    buffers: tuple[str, ...]
    groups: tuple[int, int, int]
    independent: bool = False


def _row_constants(shape: AttnShape, dtype: str, strides: Strides = TILES) -> dict[str, int]:
    """The specialization constants about rows of K and V, which several kernels have."""
    k, v = storage_types(dtype)
    sizes = (shape.head_dim, shape.v_head_dim) if strides != TILES else TILES
    return {
        "k_size": sizes[0],
        "v_size": sizes[1],
        "k_stride": strides[0],
        "v_stride": strides[1],
        "k_dim": shape.k_dim,
        "v_dim": shape.v_dim,
        "latent": int(shape.latent),
        "k_storage": storage_index(k),
        "v_storage": storage_index(v),
    }


@dataclass(frozen=True)
class AttendVariant:
    """The choices that select a program of pass 1.

    kind: the device's (``DeviceInfo.kind``); tile: tokens per tile of the K and V buffers; rows: query rows that one
    workgroup serves; heads: query heads of one row that it serves, None for the shape's choice (the bits do not depend
    on it); layout: the device's (``DeviceInfo.layout``), by default that of its kind;
    subgroups: ``DeviceInfo.wave_subgroups``; walks: whether items may have several nodes; strides: see ``Strides``.
    """

    shape: AttnShape
    dtype: str
    kind: str
    tile: int
    softcap: bool = False
    biases: int = 0
    mask: bool = False
    rows: int = 1
    heads: int | None = None
    most_heads: int = MAX_HEADS_PER_WORKGROUP
    arithmetic: int = declarations.CANONICAL
    layout: Layout | None = None
    subgroups: bool = True
    walks: bool = True
    strides: Strides = TILES

    @property
    def heads_per_workgroup(self) -> int:
        """Query heads of one row that a workgroup serves: with several rows all of a KV head's."""
        if self.rows > 1:
            return self.shape.group
        return self.heads or heads_together(self.shape, self.most_heads, self.registers)

    @property
    def registers(self) -> Layout:
        """The device's layout, by default its kind's."""
        return self.layout or layout_of(self.kind)

    def program(self) -> tuple[KernelDecl, tuple[int, ...]]:
        """The kernel and its specialization constants."""
        vectors, layout = self.heads_per_workgroup * self.rows, self.registers
        passes = value_passes(self.shape, vectors, layout)
        values = {
            **_row_constants(self.shape, self.dtype, self.strides),
            "vectors": vectors,
            "chunks_ahead": chunks_ahead(self.kind, self.shape.k_dim, layout),
            "rows_ahead": layout.rows_ahead,
            "pass_sums": layout.pass_sums,
            "tile": self.tile,
            "softcap": int(self.softcap),
            "biases": self.biases,
            "mask": int(self.mask),
            "rows_shared": self.rows,
            "arithmetic": self.arithmetic,
            "subgroups": int(self.subgroups),
            "walks": int(self.walks),
            "workgroup_size": LEAVES_PER_NODE * wave_size(layout.lanes, self.shape, vectors, passes),
        }
        return declarations.ATTEND, tuple(values[name] for name in declarations.ATTEND.spec)


@dataclass(frozen=True)
class MatrixVariant:
    """The choices that select a program of pass 1 with matrix units; see ``AttendVariant``."""

    shape: AttnShape
    dtype: str
    mat: MatrixFragment
    workgroup: MatrixWorkgroup
    tile: int
    softcap: bool = False
    biases: int = 0
    mask: bool = False
    strides: Strides = TILES
    integer: bool = False

    @classmethod
    def of(cls, canonical: AttendVariant, mat: MatrixFragment, workgroup: MatrixWorkgroup) -> MatrixVariant:
        """The variant that serves the calls of a canonical variant."""
        integer = canonical.arithmetic == declarations.INTEGER_SUMS
        options = canonical.tile, canonical.softcap, canonical.biases, canonical.mask, canonical.strides, integer
        return cls(canonical.shape, canonical.dtype, mat, workgroup, *options)

    @property
    def rows(self) -> int:
        """Query rows that an item has at most."""
        return self.workgroup.rows(self.shape.group)

    def program(self) -> tuple[KernelDecl, tuple[int, ...]]:
        """The kernel and its specialization constants."""
        decl = declarations.UNITS if self.integer else declarations.MATRIX
        values = {
            **_row_constants(self.shape, self.dtype, self.strides),
            "vectors": self.workgroup.vectors,
            "mat_m": self.mat.m,
            "mat_n": self.mat.n,
            "mat_k": self.mat.k,
            "unrolled": int(self.workgroup.unrolled),
            "waves": int(self.workgroup.waves),
            "tile": self.tile,
            "softcap": int(self.softcap),
            "biases": self.biases,
            "mask": int(self.mask),
            "workgroup_size": self.workgroup.size,
        }
        return decl, tuple(values[name] for name in decl.spec)


def attend_call(
    variant: AttendVariant | MatrixVariant, items: int, kv_heads: int, target: str, work: str = "work", states: str = ""
) -> KernelCall:
    """Pass 1 over ``items`` work items and the ``kv_heads`` heads of the K and V buffers.

    target: the buffer of its results, "states", or "out" where each row has a single state. It is bound as the states
    and as the output, so that pass 2 waits for one buffer. states: the buffer for matrix units' totals of contexts.
    """
    decl, spec = variant.program()
    groups = decl.groups(spec, group=variant.shape.group, items=items, kv_heads=kv_heads)
    return KernelCall(decl, spec, (work, "q", "k", "v", states or target, target), groups)


def merge_call(shape: AttnShape, kind: str, rows: int) -> KernelCall:
    """Pass 2: fold the states of ``rows`` query rows and divide."""
    decl, spec = declarations.MERGE, (shape.v_dim, merge_workgroup_size(kind))
    return KernelCall(decl, spec, ("work", "states", "out"), decl.groups(spec, q_heads=shape.q_heads, rows=rows))


def move_call(
    decl: KernelDecl, shape: AttnShape, dtype: str, tile: int, rows: int, kv_heads: int, strides: Strides = TILES
) -> KernelCall:
    """Write ``rows`` uploaded rows to the cache, or read as many back, as ``decl`` does."""
    row = row_format(shape, dtype) if strides == TILES else strided_format(strides, shape.latent)
    chunk_words = storage_types(dtype)[0].value_words(CHUNK)
    values = {**asdict(row), **_row_constants(shape, dtype, strides), "chunk_words": chunk_words, "tile": tile}
    spec = tuple(values[name] for name in decl.spec)
    return KernelCall(decl, spec, ("work", "rows", "k", "v"), decl.groups(spec, appends=rows, kv_heads=kv_heads))


def encode_call(shape: AttnShape, dtype: str, rows: int) -> KernelCall:
    """Make the words of ``rows`` rows, all KV heads of them, from the uploaded float32 values."""
    values = {**_row_constants(shape, dtype), "k_size": shape.head_dim, "v_size": shape.v_head_dim}
    decl, spec = declarations.ENCODE, tuple(values[name] for name in declarations.ENCODE.spec)
    return KernelCall(decl, spec, ("work", "values", "rows"), decl.groups(spec, appends=rows, kv_heads=shape.kv_heads))


def copy_call(tile_words: tuple[int, int], kv_heads: int, page_tiles: int, pairs: int = 1) -> KernelCall:
    """Copy ``pairs`` pages within the cache. tile_words: of a tile of K and of V."""
    decl = declarations.COPY_KERNEL
    groups = decl.groups(tile_words, copies=pairs, kv_heads=kv_heads, page_tiles=page_tiles)
    return KernelCall(decl, tile_words, ("work", "k", "v"), groups)
