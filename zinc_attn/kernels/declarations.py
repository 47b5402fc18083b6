"""The contract between a kernel and its caller: bindings, specialization constants and words of the work buffer.

Each fact is declared here once. ``glsl`` generates ``contract.glsl`` of ``shaders/`` from it, so the two sides cannot
differ; a test compares the committed files with the generated text.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Final, Literal

from ..canonical.constants import BIASES, LEAVES_PER_NODE
from ..limits import BLOCK, WAVE
from .formulas import evaluate

Access = Literal["read", "write"]
MAX_BINDINGS: Final = 10  # of a kernel
GRID_SIDE: Final = 65_535  # workgroups along an axis, which every device takes


@dataclass(frozen=True)
class Binding:
    """One storage buffer of descriptor set 0; its index is its position in the kernel's tuple."""

    name: str
    access: Access


@dataclass(frozen=True)
class KernelDecl:
    """A kernel: a SPIR-V module, its interface, and the specialization constants that tell it from its siblings.

    source: the GLSL file. module: name of the SPIR-V module, where several kernels share a module; None means ``name``.
    spec: names of the uint specialization constants that the caller gives, ids 0, 1, ...
    fixed: (name, value) of the kernel's own constants; their ids follow. extension: a GLSL extension that the kernel
    needs; a compiler without it leaves the package without the kernel. grid: the workgroups along x, y and z, as
    formulas of the specialization constants and of names that the caller gives; or a single formula of their number,
    which is spread over x and y beyond GRID_SIDE.
    """

    name: str
    source: str
    bindings: tuple[Binding, ...]
    spec: tuple[str, ...]
    module: str | None = None
    fixed: tuple[tuple[str, int], ...] = ()
    extension: str | None = None
    grid: tuple[str, ...] = ()

    def groups(self, spec: Sequence[int], **names: Any) -> tuple[int, int, int]:
        """The workgroups for the caller's constants and values of the other names of the grid."""
        known = {**dict(zip(self.spec, spec, strict=True)), **names}
        x, *others = (evaluate(formula, known) for formula in self.grid)
        y, z = others or (max(-(-x // GRID_SIDE), 1), 1)
        return x if others else -(-x // y), y, z

    @property
    def family(self) -> str:
        """The name of its source, and of its sections in ``contract.ini``."""
        return PurePath(self.source).stem

    @property
    def file(self) -> str:
        """File name of the SPIR-V module."""
        return f"{self.module or self.name}.spv"

    @property
    def constant_names(self) -> tuple[str, ...]:
        """Every specialization constant of the module; a constant's position is its id."""
        return (*self.spec, *(name for name, _ in self.fixed))

    def constants(self, spec: Sequence[int]) -> tuple[int, ...]:
        """Values of every specialization constant, from the caller's."""
        return (*spec, *(value for _, value in self.fixed))

    def wave(self, spec: Sequence[int], lanes: int = WAVE) -> int:
        """Invocations of a subgroup to ask for: a wave's in pass 1, WAVE in others with subgroups, else ``lanes``."""
        if self.name == "attend":
            return spec[self.spec.index("workgroup_size")] // LEAVES_PER_NODE
        return WAVE if self.has_subgroups else lanes

    @property
    def has_subgroups(self) -> bool:
        """Whether invocations meet in subgroups, beside shared memory."""
        return "subgroups" in self.spec or self.extension is not None

    def fused(self, spec: Sequence[int]) -> bool:
        """Whether the caller's constants ask for fused sums."""
        return "arithmetic" in self.spec and spec[self.spec.index("arithmetic")] in (FUSED_NATIVE, FUSED_EMULATED)


# --- words of the work buffer -------------------------------------------------------------------------------------
# A header comes first, then one ITEM per workgroup of pass 1 in grid y, then one ROW per query row, then APPEND (or
# COPY) records, then page tables, a HEAD per query head, and masks; all are uint words.
# The buffer has everything that changes from token to token, so that a recorded submission can be used again.
# {word: meaning} of each record, in order; contract.glsl and the manifest print the meanings.
HEADER: Final = {
    "q_heads": "query heads",
    "kv_heads": "KV heads in the K and V buffers: all of them, or a shard's",
    "kv_first": "first KV head of these buffers",
    "row_kv_heads": "KV heads of the rows buffer: all of them",
    "group": "query heads per KV head",
    "score_scale": "factor of the scores, float32: scale * log2(e), rounded once; scale alone where scores are capped",
    "state_stride": "states in the scratch tensor: the (m, l) pairs begin after state_stride * q_heads * v_dim floats",
    "page_shift": "log2 of the tiles per page",
    "page_tiles": "tiles per page and KV head",
    "rows": "query rows of the call; 0: log-sum-exps are not written",
    "row_table": "word where the ROW records begin",
    "single_pass": "1: pass 1 writes the output; an item has all keys that its rows see (one node, or matrix units)",
    "append_table": "word where the APPEND (or COPY) records begin",
    "softcap": "the cap, float32: scores become cap * tanh(score / cap); read where the constant softcap is 1",
    "softcap_inverse": "1 / cap, float32; read where the constant softcap is 1",
    "head_table": "word where the HEAD records begin",
    "first_page": "page where the layer begins in buffers that layers share; added to the ids of page tables",
    "token_rows": "where K and V lie as rows: rows from a token to the next; 1 where KV heads come first",
    "head_rows": "as token_rows, from a KV head to the next; tokens of the buffer where KV heads come first",
}
HEADER_WORDS: Final = 24
ITEM: Final = {
    "row": "query row; the first row of `rows`",
    "limit": "the row sees keys first ... limit - 1",
    "node_begin": "first node",
    "node_end": "node after the last; an item without a node does nothing",
    "rows": "query rows, at most the constant rows_shared; all see the same of the item's keys, in the same pages",
    "page_table": "word where the sequence's page ids begin",
    "first": "lowest key that the row sees; 0 without a window",
    "key_shift": "added to a key's number in the sequence: its position, where the sequence is a shard",
    "row_step": "attend_matrix: first and limit are the last row's, and grow by this from row to row: 0 or 1",
}
ITEM_WORDS: Final = 9
ROW: Final = {
    "state": "number, in the scratch tensor, of the row's first state",
    "count": "states of the row; 0 and no sinks give output 0 and lse -inf",
    "node": "node of the first state; node n has state number state + n - node",
    "position": "int32, the row's position, negative for rows before the first key; read where scores have a bias",
    "mask": "word where the row's mask begins, a float32 for each key: added to the key's score in natural units, "
    "-inf for a key that the row does not see; read where mask is not 0",
    "mask_begin": "position of the mask's first key",
    "mask_end": "position after the mask's last key; 0 for no mask",
}
ROW_WORDS: Final = 7
APPEND: Final = {
    "position": "position of the new token in its sequence, or NO_TOKEN for nothing to append",
    "page_table": "word where the sequence's page ids begin",
}
APPEND_WORDS: Final = 2
NO_TOKEN: Final = 0xFFFFFFFF  # the position of no new token
HIDDEN: Final = 0xFF800000  # minus infinity: the word of a mask for an unseen key, and of a head without a sink
COPY: Final = {
    "source": "page to read; first_page is not added, because a submission copies all layers of the buffers",
    "target": "page to write",
}
COPY_WORDS: Final = 2
HEAD: Final = {
    "sink": "float32(sink) * float32(log2(e)), a logit that joins the softmax without a value, or HIDDEN for none",
    **{name: "float32(slope * log2(e)); read where the constant biases has its bit" for name in BIASES},
    "mask": "float32(slope * log2(e)), which multiplies the row's mask; slope is 1 by default; read where mask is 1",
    "k_scale": "float32(256 * scale) of the KV head's K; read for fp8_e4m3",
    "v_scale": "float32(256 * scale) of its V; read for fp8_e4m3",
}
HEAD_WORDS: Final = 4 + len(BIASES)


def float_bits(value: float) -> int:
    """The uint32 that holds ``value`` rounded to float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


# --- kernels ------------------------------------------------------------------------------------------------------
_ATTEND_BINDINGS: Final = (
    Binding("work", "read"),  # uint
    Binding("q", "read"),  # (rows, q_heads, k_dim) float32
    Binding("k", "read"),  # (tiles, k_dim / 8, tile, 8) of the storage type
    Binding("v", "read"),  # (tiles, tile, v_dim) of the storage type; a latent shape has K here, too
    Binding("states", "write"),  # o: (states, q_heads, v_dim), then (m, l): (states, q_heads, 2), float32
    Binding("out", "write"),  # out: (rows, q_heads, v_dim), then lse: (rows, q_heads), float32
)

# attend's constant "arithmetic"
CANONICAL: Final = 0
FUSED_NATIVE: Final = 1  # the sums of products by fma()
FUSED_EMULATED: Final = 2  # the same sums by float32 operations
INTEGER_SUMS: Final = 3
# Where K and V lie as rows, (token, KV head, values), and not in tiles; all 0 else.
ROWS_SPEC: Final = (
    "k_size",  # dimensions that a row of K has, of k_dim
    "v_size",
    "k_stride",  # bytes from a row of K to the next, a multiple of 2; 0 for tiles
    "v_stride",
)
ATTEND_SPEC: Final = (
    "k_dim",
    "v_dim",
    "latent",
    "vectors",  # query vectors of a workgroup: heads, over all rows that share its keys
    "chunks_ahead",
    "tile",
    "softcap",
    "biases",  # the sum of 1 << i of those that scores have, by their places in BIASES
    "mask",
    "rows_shared",
    "k_storage",  # the index of K's type in storage.STORAGE
    "v_storage",  # of V's
    "arithmetic",  # CANONICAL, FUSED_NATIVE, FUSED_EMULATED or INTEGER_SUMS
    "workgroup_size",  # invocations of eight waves
    "subgroups",  # 1: the driver was asked for subgroups of a wave, or has no others
    "walks",  # 1: items may have several nodes; 0: each has one
    *ROWS_SPEC,
    "rows_ahead",  # most rows of V in flight
    "pass_sums",  # sums of weighted values of a wave in a pass over V
)
# Pass 1: a workgroup of eight waves attends nodes one after another, a leaf a wave.
_ATTEND_GRID: Final = "ceil_div(group, vectors)", "items", "kv_heads"
ATTEND: Final = KernelDecl("attend", "attend/attend.comp", _ATTEND_BINDINGS, ATTEND_SPEC, grid=_ATTEND_GRID)
# Pass 1 of arithmetic "matrix", on devices with VK_KHR_cooperative_matrix.
MATRIX: Final = KernelDecl(
    "attend_matrix",
    "attend/attend_matrix.comp",
    _ATTEND_BINDINGS,
    (
        "k_dim",
        "v_dim",
        "latent",
        "vectors",  # query vectors (rows and heads) of a workgroup
        "mat_m",  # a tile of the matrix units: vectors,
        "mat_n",  # keys or dimensions,
        "mat_k",  # and products that one step adds
        "unrolled",  # 1: a copy of the code for each piece of K and V, matrices in registers; 0: a smaller program
        "waves",  # 1: subgroups are waves; 0: they may be smaller, and some have nothing to multiply
        "tile",
        "softcap",
        "biases",
        "mask",
        "k_storage",
        "v_storage",
        "workgroup_size",  # invocations of a workgroup
        *ROWS_SPEC,
    ),
    extension="GL_KHR_cooperative_matrix",
    grid=_ATTEND_GRID,
)
# Pass 1 of arithmetic "integer" for many rows, on devices whose units multiply int8.
UNITS: Final = replace(MATRIX, name="attend_units", source="attend/attend_units.comp")
MERGE_DIMS: Final = 64  # head dimensions per workgroup of pass 2 (grid x), two per lane
MERGE: Final = KernelDecl(
    "merge",
    "attend/merge.comp",
    (Binding("work", "read"), Binding("states", "read"), Binding("out", "write")),
    ("v_dim", "workgroup_size"),
    grid=(f"ceil_div(v_dim, {MERGE_DIMS})", "q_heads", "rows"),
)


def _mover(name: str, rows: Access, cache: Access, gather: int) -> KernelDecl:
    """Rows between a row tensor (rows, kv_heads, words of a token; see shaders/cache/append.comp) and the cache."""
    return KernelDecl(
        name,
        "cache/append.comp",
        (Binding("work", "read"), Binding("rows", rows), Binding("k", cache), Binding("v", cache)),
        ("k_values", "v_values", "k_scales", "v_scales", "chunk_words", "tile", "k_stride", "v_stride"),
        module="append",
        fixed=(("gather", gather),),
        grid=("appends", "kv_heads", "1"),
    )


APPEND_KERNEL: Final = _mover("append", "read", "write", 0)
GATHER_KERNEL: Final = _mover("gather", "write", "read", 1)
COPY_KERNEL: Final = KernelDecl(
    "copy",
    "cache/copy.comp",
    (Binding("work", "read"), Binding("k", "write"), Binding("v", "write")),
    ("k_tile_words", "v_tile_words"),
    grid=("copies", "kv_heads", "page_tiles"),
)

# New rows that the device encodes: float32 values (rows, kv_heads, head_dim) of K, then those of V, to a row tensor.
ENCODE: Final = KernelDecl(
    "encode",
    "cache/encode.comp",
    (Binding("work", "read"), Binding("values", "read"), Binding("rows", "write")),
    ("k_size", "v_size", "k_dim", "v_dim", "latent", "k_storage", "v_storage"),
    # a lane has a block, a head whole pairs of them; K and V are workgroups of their own
    grid=(
        "appends",
        f"ceil_div(2 * ceil_div(max(k_dim, v_dim), {2 * BLOCK}) * kv_heads, {WAVE})",
        "1 if latent else 2",
    ),
)

# Query vectors that lie on the device, as arithmetic "integer" takes them; Python rounds them on the host.
ROUND: Final = KernelDecl(
    "round_q",
    "attend/round_q.comp",
    (Binding("q", "read"), Binding("rounded", "write")),  # (rows, q_heads, head_dim), (rows, q_heads, k_dim) float32
    ("q_heads", "head_dim", "k_dim"),
    grid=("ceil_div(q_heads, 4)", "1", "rows"),
)

# The question to a device before its first kernel: ``results`` of rows of ``numbers``, see primitives.comp.
NUMBERS: Final = ("score", "m", "other_m", "a", "b", "l", "word", "scale")
NUMBER_WORDS: Final = len(NUMBERS)
RESULTS: Final = ("weight", "power", "tanh", "merged", "reciprocal", "lse", "low", "high", "product", "fused")
RESULT_WORDS: Final = len(RESULTS)
QUESTION_ROWS: Final = 64
PRIMITIVES: Final = KernelDecl(
    "primitives",
    "attend/primitives.comp",
    (Binding("numbers", "read"), Binding("results", "write")),
    (),
    grid=(f"{QUESTION_ROWS // WAVE}", "1", "1"),
)

# The question to a device before arithmetic "fused": ``sums`` of ``triples`` a, b, c, two of each kind side by side.
TRIPLES: Final = 2048
MULTIPLY_ADD: Final = KernelDecl(
    "multiply_add",
    "attend/multiply_add.comp",
    (Binding("triples", "read"), Binding("sums", "write")),
    ("arithmetic",),
    grid=(f"{TRIPLES // (2 * WAVE)}", "1", "1"),
)

# Decode attention as one reads it, which the tests alone dispatch: see shaders/attend/plain.comp.
PLAIN: Final = KernelDecl(
    "plain",
    "attend/plain.comp",
    (Binding("q", "read"), Binding("k", "read"), Binding("v", "read"), Binding("out", "write")),
    ("slices", "k_dim", "group", "keys", "scale"),
)

KERNELS: Final = (ATTEND, MERGE, APPEND_KERNEL, GATHER_KERNEL, COPY_KERNEL, ROUND, PRIMITIVES, MULTIPLY_ADD)

# One kernel of each module.
MODULES: Final = tuple({decl.file: decl for decl in reversed((*KERNELS, ENCODE, MATRIX, UNITS, PLAIN))}.values())[::-1]
