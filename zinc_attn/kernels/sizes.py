"""How pass 1 divides its work among lanes, passes and registers: formulas that the shader and the host share.

``FORMULAS`` declares each once, as a Python expression. The host evaluates them (``attend_sizes``), and ``glsl``
translates them into ``shaders/attend/attend_sizes.glsl``, where they are specialization constant expressions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from .. import limits
from ..canonical import constants
from ..storage import STORAGE, storage_index, storage_types
from .families import RDNA, Layout, layout_of
from .formulas import Formulas

if TYPE_CHECKING:
    from ..shapes import AttnShape

# The inputs of the formulas: attend's specialization constants, and the invocations of a wave.
INPUTS: Final = (
    "K_DIM", "V_DIM", "VECTORS", "CHUNKS_AHEAD", "K_STORAGE", "V_STORAGE", "LATENT", "ROWS_AHEAD", "PASS_SUMS",
    "LANES",
)  # fmt: skip
KNOWN: Final = {
    **{name: getattr(limits, name) for name in ("WAVE", "MAX_VALUE_PASSES", "BLOCK")},
    **{name: getattr(constants, name) for name in ("CHUNK", "KEYS_PER_LEAF", "LEAVES_PER_NODE", "WEIGHT_PARTIALS")},
    **{f"STORAGE_{name.upper()}": i for i, name in enumerate(STORAGE)},
}


def _by_type(side: str, attribute: str) -> str:
    """The value of an attribute of ``StorageType`` for the type of K or V, as an expression."""
    values: dict[int, list[str]] = {}
    for kind in STORAGE.values():
        values.setdefault(int(getattr(kind, attribute)), []).append(f"{side}_STORAGE == STORAGE_{kind.name.upper()}")
    *named, (last, _) = sorted(values.items(), key=lambda item: len(item[1]))  # the most frequent value needs no test
    return "".join(f"{value} if {' or '.join(tests)} else " for value, tests in named) + str(last)


def _words(side: str) -> dict[str, tuple[str, str]]:
    """The formulas of a stored row of K or V, as ``storage.StorageType`` has them."""
    return {
        f"{side}_BITS": (_by_type(side, "bits"), f"bits of a stored value of {side}"),
        f"{side}_HALVES": (_by_type(side, "halves"), "float16 numbers of a block: its scale, or scale and minimum"),
        f"{side}_FIFTH": (_by_type(side, "fifth_bits"), "1 where a block has a word of fifth bits"),
        f"{side}_VALUES": (f"{side}_DIM * {side}_BITS // 32", f"words of a token's {side} values, of one KV head"),
        f"{side}_BLOCKS": (f"({side}_DIM + BLOCK - 1) // BLOCK", "blocks of a row"),
        f"{side}_PAIRED": (f"({side}_BLOCKS * {side}_HALVES + 1) // 2", "words of the blocks' float16 numbers"),
        f"{side}_SCALES": (f"{side}_PAIRED + {side}_BLOCKS * {side}_FIFTH", "these words and the words of fifth bits"),
    }


# name: (expression, meaning).
FORMULAS: Final[dict[str, tuple[str, str]]] = {
    "WHOLE_SLICE": (
        "2 if V_DIM <= 64 else 4 if V_DIM <= 128 else 8 if V_DIM <= 256 else 16 if V_DIM <= 512 else 32",
        "head dimensions per lane if one pass covers a value row: the least power of two with which 32 lanes cover V",
    ),
    "LANE_SUMS": ("PASS_SUMS // WAVE", "value sums that a lane's registers hold"),
    "VALUE_PASSES": (
        "1 if WHOLE_SLICE * VECTORS <= LANE_SUMS else "
        "2 if WHOLE_SLICE * VECTORS <= 2 * LANE_SUMS else MAX_VALUE_PASSES",
        "passes over V; in each a lane sums as much as its registers hold",
    ),
    "SLICE": ("WHOLE_SLICE // VALUE_PASSES", "head dimensions per lane and pass"),
    "PAIRS": ("SLICE // 2", "the same in pairs"),
    "VALUE_LANES": ("V_DIM // WHOLE_SLICE", "slices of a pass, a lane each; in a wave of fewer lanes several"),
    **_words("K"),
    **_words("V"),
    "CHUNK_WORDS": ("CHUNK * K_BITS // 32", "words of a chunk of K"),
    "SLICE_WORDS": (
        "1 if SLICE * V_BITS <= 32 else SLICE * V_BITS // 32",
        "stored words of a lane's slice of a value row; several lanes share a word that has more values",
    ),
    "LOAD_LIMIT": ("(CHUNK_WORDS if CHUNK_WORDS <= 4 else 4) if LATENT == 1 else 4", "words in one piece"),
    "LOAD_WORDS": ("SLICE_WORDS if SLICE_WORDS <= LOAD_LIMIT else LOAD_LIMIT", "words per load"),
    "SLICE_LOADS": ("SLICE_WORDS // LOAD_WORDS", "loads per slice"),
    "WORD_PAIRS": ("16 // V_BITS if V_BITS <= 16 else 1", "pairs of values of V in a word, or in two of float32"),
    "KEYS_AHEAD": ("ROWS_AHEAD // SLICE_LOADS if SLICE_LOADS <= 2 else 2", "value rows in flight"),
    "WAVE_FLOATS": ("KEYS_PER_LEAF * VECTORS", "floats of shared memory that a wave has for its weights"),
    "FOLD_ROOM": (
        "KEYS_PER_LEAF if VALUE_PASSES == 1 else WAVE",
        "floats that a wave has for a round of the fold, for each vector: in the place of its weights, or after them",
    ),
    "FOLD_DIMS": (
        "SLICE if SLICE * LANES <= FOLD_ROOM else FOLD_ROOM // LANES",
        "head dimensions of a lane that a round of the fold takes",
    ),
    "FOLD_BEGIN": ("0 if VALUE_PASSES == 1 else LEAVES_PER_NODE * WAVE_FLOATS", "where rounds of the fold lie"),
    "SHARED_FLOATS": (
        "LEAVES_PER_NODE * (WAVE_FLOATS + (0 if VALUE_PASSES == 1 else FOLD_ROOM * VECTORS))",
        "floats of shared memory that a workgroup has for weights and rounds",
    ),
    "POWER_KEYS": ("ROWS_AHEAD", "arithmetic integer: keys whose scales of V are in flight"),
    "VALUE_POWERS": (
        "LEAVES_PER_NODE * VECTORS * V_BLOCKS",
        "arithmetic integer: powers of two by which a workgroup rounds weights",
    ),
    "SHARED_BYTES": (
        "4 * (SHARED_FLOATS + VALUE_POWERS + LEAVES_PER_NODE * VECTORS * (1 + WEIGHT_PARTIALS))",
        "bytes of both in a workgroup, and of m and the sums of weights of each leaf and vector",
    ),
}
assert constants.KEYS_PER_LEAF % (2 * limits.WAVE) == 0, "a lane has pairs of keys, and a round of the fold has room"
SIZES: Final = Formulas(FORMULAS, INPUTS, KNOWN)


def chunks_ahead(kind: str, k_dim: int, layout: Layout | None = None) -> int:
    """K chunks that pass 1 loads ahead, which hide latency on a GPU and only spill on a CPU."""
    return min((layout or layout_of(kind)).chunks, 4 if k_dim % (4 * constants.CHUNK) == 0 else 2)


def attend_sizes(
    shape: AttnShape, vectors: int, dtype: str, layout: Layout = RDNA, lanes: int = limits.WAVE
) -> Mapping[str, int]:
    """Every constant of ``shaders/attend/attend_sizes.glsl`` by name, for a variant of pass 1.

    vectors: of a workgroup: heads times rows that share keys; layout: the device's; lanes: of a wave.
    """
    k, v = map(storage_index, storage_types(dtype))
    ahead = chunks_ahead("", shape.k_dim, layout)
    registers = layout.rows_ahead, layout.pass_sums, lanes
    return SIZES.values(shape.k_dim, shape.v_dim, vectors, ahead, k, v, int(shape.latent), *registers)


def value_passes(shape: AttnShape, vectors: int, layout: Layout = RDNA) -> int:
    """Passes over V in which a workgroup sums for ``vectors`` query vectors."""
    return attend_sizes(shape, vectors, "f16", layout)["VALUE_PASSES"]


def shared_bytes(shape: AttnShape, vectors: int, layout: Layout = RDNA) -> int:
    """Shared memory of a workgroup of pass 1 for ``vectors`` query vectors."""
    return attend_sizes(shape, vectors, "f16", layout)["SHARED_BYTES"]


# Shared memory of a workgroup of up to MAX_HEADS_PER_WORKGROUP query vectors of any shape.
LEAST_SHARED_BYTES: Final = max(
    SIZES.values(limits.MAX_HEAD_DIM, dim, limits.MAX_HEADS_PER_WORKGROUP, 1, 1, 1, 0, *RDNA[2:4], limits.WAVE)[
        "SHARED_BYTES"
    ]
    for dim in (64, limits.MAX_HEAD_DIM)
)
