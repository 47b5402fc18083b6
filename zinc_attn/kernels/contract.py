"""The contract of every kernel, declared once: bindings, specialisation constants, work-buffer words, variants.

``shaders/contract.glsl`` is generated from this module (``contract_glsl``), so the two sides cannot differ;
a test compares the committed file with the generated text.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Literal

from .. import shapes

Access = Literal["read", "write"]


@dataclass(frozen=True)
class Binding:
    """One storage buffer of descriptor set 0; its index is its position in the kernel's tuple."""

    name: str
    access: Access


@dataclass(frozen=True)
class KernelDecl:
    """A shader source with its interface. ``spec`` names the uint specialisation constants, ids 0, 1, ..."""

    name: str
    source: str
    bindings: tuple[Binding, ...]
    spec: tuple[str, ...]
    defines: tuple[str, ...] = ()


# The work buffer (uint words): a header, then one ITEM per grid x of pass 1, then one ROW per query row, then
# page tables.  All that changes from token to token is in here, so that a recorded submission can be replayed.
HEADER: Final = (
    "q_heads",
    "kv_heads",  # of the K and V buffers: all of them, or a shard's
    "kv_first",  # first KV head of the buffers
    "row_kv_heads",  # KV heads of row tensors: all of them
    "group",  # query heads per KV head
    "score_scale",  # float32 bits of scale * log2(e); with softcap of scale alone
    "state_stride",  # states in the scratch tensor: (m, l) pairs begin behind state_stride * q_heads * head_dim
    "page_shift",  # log2 of the tiles per page
    "page_tiles",  # tiles per page and KV head
    "rows",  # query rows of the call
    "row_table",  # word where the ROW records begin
    "direct",  # 1: each row has at most one state, pass 1 writes the final output
    "append_table",  # word where the APPEND (or COPY) records begin
    "softcap",  # float32 bits of the cap, for attend's specialisation constant softcap = 1
    "softcap_inverse",  # float32 bits of 1 / cap
    "sink_table",  # word where the sinks begin, float32 bits of sink * log2(e) per query head; 0: none
)
HEADER_WORDS: Final = 16
# One workgroup row of pass 1: leaves [leaf_begin, leaf_end) for query row `row`, which sees keys [first, limit); where
# the specialisation constant rows_shared is above 1, for `rows` rows from it on, which all see the same of these leaves
# (the ROW records say where their states go).
# Fresh builds find the sequence's tokens from fresh_begin on in the uploaded rows, from row fresh_row on.
ITEM: Final = (
    "row",
    "limit",
    "leaf_begin",
    "leaf_end",
    "rows",
    "page_table",
    "fresh_begin",
    "fresh_row",
    "unit_leaves",
    "first",
)
ITEM_WORDS: Final = 12
# Pass 2 folds states [state, state + count) of a row; `unit` is the absolute index of the first one's unit.
ROW: Final = ("state", "count", "unit", "unit_leaves")
ROW_WORDS: Final = 4
# A new token: its position in its sequence (or NO_TOKEN), and the word of the sequence's page table.
APPEND: Final = ("position", "page_table")
APPEND_WORDS: Final = 2
NO_TOKEN: Final = 0xFFFFFFFF
COPY: Final = ("source", "target")  # pages
COPY_WORDS: Final = 2

_ATTEND_BINDINGS: Final = (
    Binding("work", "read"),  # uint
    Binding("q", "read"),  # (rows, q_heads, head_dim) float32
    Binding("k", "read"),  # (tiles, head_dim / 8, tile, 8) of the KV dtype
    Binding("v", "read"),  # (tiles, tile, head_dim) of the KV dtype
    Binding("states", "write"),  # o: (states, q_heads, head_dim), then (m, l): (states, q_heads, 2), float32
    Binding("out", "write"),  # out: (rows, q_heads, head_dim), then lse: (rows, q_heads), float32
)
_MERGE_BINDINGS: Final = (Binding("work", "read"), Binding("states", "read"), Binding("out", "write"))

Build = Literal["single", "loop"]
BUILDS: Final[tuple[Build, ...]] = ("single", "loop")


def attend(build: Build, dtype: str, fresh: bool = False) -> KernelDecl:
    """Pass 1. ``single``: one leaf a workgroup, straight line. ``loop``: a range of leaves, emitted per unit.

    ``fresh``: the newest tokens are read from a row tensor (see APPEND_KERNEL) instead of the cache.
    """
    return KernelDecl(
        f"attend_{build}_{dtype}{'_fresh' * fresh}",
        "attend.comp",
        (*_ATTEND_BINDINGS, Binding("rows", "read")) if fresh else _ATTEND_BINDINGS,
        ("head_dim", "heads", "chunks_ahead", "tile", "softcap", "rows_shared"),
        (f"LOOP={int(build == 'loop')}", f"KV_{dtype.upper()}=1", f"FRESH={int(fresh)}"),
    )


MERGE: Final = KernelDecl("merge", "merge.comp", _MERGE_BINDINGS, ("head_dim", "lanes"))
MERGE_DIMS: Final = 64  # head dimensions per workgroup of pass 2 (grid x), two per lane

_APPEND_SPEC: Final = ("row_values", "scales", "chunk_words", "tile")
# rows: (rows, kv_heads, words of a token), see shaders/kv.glsl
APPEND_KERNEL: Final = KernelDecl(
    "append",
    "append.comp",
    (Binding("work", "read"), Binding("rows", "read"), Binding("k", "write"), Binding("v", "write")),
    _APPEND_SPEC,
    ("GATHER=0",),
)
GATHER_KERNEL: Final = KernelDecl(
    "gather",
    "append.comp",
    (Binding("work", "read"), Binding("rows", "write"), Binding("k", "read"), Binding("v", "read")),
    _APPEND_SPEC,
    ("GATHER=1",),
)
COPY_KERNEL: Final = KernelDecl(
    "copy",
    "copy.comp",
    (Binding("work", "read"), Binding("k", "write"), Binding("v", "write")),
    ("tile_words",),
)

KERNELS: Final = (
    *(attend(b, d, f) for d in shapes.DTYPE_BYTES for b in BUILDS for f in (False, True)),
    MERGE,
    APPEND_KERNEL,
    GATHER_KERNEL,
    COPY_KERNEL,
)

# The benchmark's yardstick: a plain read of a buffer, loads * 32 uvec4 a workgroup, xored to one word each.
READ: Final = KernelDecl("read", "read.comp", (Binding("data", "read"), Binding("out", "write")), ("loads",))
MODULES: Final = (*KERNELS, READ)  # all that is built and shipped


def chunks_ahead(kind: str, head_dim: int) -> int:
    """K chunks that pass 1 loads ahead, by device kind: a GPU hides latency with it, a CPU only spills."""
    return 1 if kind == "cpu" else 4 if head_dim % (4 * shapes.CHUNK) == 0 else 2


def merge_lanes(kind: str) -> int:
    """Invocations of a workgroup of pass 2, by device kind: 8 waves of a GPU have 256 states in flight."""
    return shapes.WAVE if kind == "cpu" else 8 * shapes.WAVE


SHARED_HEADS: Final = 16  # query heads, over all rows, that a workgroup of a GPU serves where rows share keys
SHARED_ADDRESSES: Final = 20  # rows and query heads of such a workgroup, in its scalar registers
SCRATCH_BYTES: Final = 128 << 20  # partial states of one submission; longer calls go in blocks of rows


def shared_rows(kind: str, shape: shapes.AttnShape, wherever: bool = False) -> int:
    """Query rows that one workgroup serves where rows share keys, by device kind; 1: none share.

    More of them load and convert K and V less often. A GPU's vector registers hold SHARED_HEADS at half the waves per
    SIMD (more than MAX_ACCUMULATORS sums are made in several passes over V, each for a part of the head dimensions),
    its scalar registers an address for each row and each head. On a CPU more than 8 heads, or several passes, take
    longer than they save; wherever: as many as a GPU where that leaves it none.
    """
    if kind == "cpu":
        own = min(shapes.MAX_ACCUMULATORS // shape.head_dim, 8) // shape.group
        if own > 1 or not wherever:
            return max(own, 1)
    return max(min(SHARED_HEADS // shape.group, SHARED_ADDRESSES // (shape.group + 1)), 1)


def value_slice(head_dim: int) -> int:
    """Consecutive head dimensions per lane in the value loop: the power of two that spreads over 32 lanes."""
    width = 2
    while width * shapes.WAVE < head_dim:
        width *= 2
    return width


def value_passes(head_dim: int, heads: int) -> int:
    """Passes over V in which a workgroup sums ``heads`` query heads, see ``attend.comp``."""
    share = value_slice(head_dim) * heads * shapes.WAVE / shapes.MAX_ACCUMULATORS
    return 1 if share <= 1 else 2 if share <= 2 else 4


def float_bits(value: float) -> int:
    """The uint32 that holds ``value`` rounded to float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _glsl_float(value: float) -> str:
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    text = f"{rounded:.9g}"  # nine digits name one float32
    return text if "." in text or "e" in text else text + ".0"


def contract_glsl() -> str:
    """Text of ``shaders/contract.glsl``."""
    lines = ["// Generated by scripts/build_shaders.py from zinc_attn/shapes.py and zinc_attn/kernels/contract.py."]
    for name in ("LEAF", "NODE", "CHUNK", "WAVE", "LANES", "MAX_ACCUMULATORS"):
        lines.append(f"const uint {name} = {getattr(shapes, name)}u;")
    lines.append(f"const uint RCP_SEED = 0x{shapes.RCP_SEED:08X}u;")
    lines.append(f"const uint MERGE_DIMS = {MERGE_DIMS}u;")
    for name in ("CUTOFF", "FLUSH", "EMPTY_M", "LN2_HI", "LN2_LO", "SQRT2", "LOG2E", "TANH_SMALL", "TANH_MAX"):
        lines.append(f"#define {name} {_glsl_float(getattr(shapes, name))}")
    for prefix, poly in (("EXP2_C", shapes.EXP2_POLY), ("LN_D", shapes.LN_POLY), ("TANH_E", shapes.TANH_POLY)):
        for i, c in enumerate(poly):
            lines.append(f"#define {prefix}{i} {_glsl_float(c)}  // {c!r}")
    for prefix, words in (("HEADER", HEADER), ("ITEM", ITEM), ("ROW", ROW), ("APPEND", APPEND), ("COPY", COPY)):
        lines += [f"const uint {prefix}_{word.upper()} = {i}u;" for i, word in enumerate(words)]
    lines.append(f"const uint HEADER_WORDS = {HEADER_WORDS}u;")
    lines.append(f"const uint ITEM_WORDS = {ITEM_WORDS}u;")
    lines.append(f"const uint ROW_WORDS = {ROW_WORDS}u;")
    lines.append(f"const uint APPEND_WORDS = {APPEND_WORDS}u;")
    lines.append(f"const uint COPY_WORDS = {COPY_WORDS}u;")
    lines.append(f"const uint NO_TOKEN = 0x{NO_TOKEN:08X}u;")
    for kernel, decl in (
        ("ATTEND", attend("loop", "f32", True)),
        ("MERGE", MERGE),
        ("APPEND", APPEND_KERNEL),
        ("COPY", COPY_KERNEL),
        ("READ", READ),
    ):
        lines += [f"#define {kernel}_BIND_{b.name.upper()} {i}" for i, b in enumerate(decl.bindings)]
        lines += [f"#define {kernel}_SPEC_{s.upper()} {i}" for i, s in enumerate(decl.spec)]
    return "\n".join(lines) + "\n"
