"""What the kernels' names mean: words of the work buffer, bindings, specialization constants, grids.

Each table is keyed by the place of the name; a test asks for an entry for every declared name.
"""

from __future__ import annotations

from typing import Final

from ... import limits
from ...canonical import primitives
from ...canonical.constants import CHUNK, KEYS_PER_LEAF, LEAVES_PER_NODE
from ...kernels import declarations as kernels
from ...kernels.tuning import CPU_LANES, SHARED_ADDRESSES, SHARED_HEADS
from ...storage import FP8_UNIT, STORAGE

# words of the work buffer: value, meaning. The value is that of a whole cache, not of a shard of KV heads.
FIELDS: Final[dict[str, tuple[str, str]]] = {
    "header.q_heads": ("q_heads", "query heads"),
    "header.kv_heads": ("kv_heads", "KV heads in the K and V buffers: all of them, or a shard's"),
    "header.kv_first": ("0", "first KV head of the K and V buffers"),
    "header.row_kv_heads": ("kv_heads", "KV heads of the rows buffer: all of them"),
    "header.group": ("group", "query heads per KV head"),
    "header.score_scale": (
        "float32(scale) if softcap else float32(scale * log2(e))",
        "factor of the scores, the product taken in float64 and rounded once; scale is 1 / sqrt(head_dim) by default",
    ),
    "header.state_stride": ("states", "states in the states buffer; the (m, l) pairs begin behind their o"),
    "header.page_shift": ("log2(page_tiles)", "log2 of the tiles per page"),
    "header.page_tiles": ("page_tiles", "tiles per page and KV head"),
    "header.rows": ("rows", "query rows of the call"),
    "header.row_table": (f"{kernels.HEADER_WORDS} + items * {kernels.ITEM_WORDS}", "word where the row records begin"),
    "header.single_pass": ("single_pass", "1: each row has one state at most, and pass 1 writes the final output"),
    "header.append_table": (
        f"{kernels.HEADER_WORDS} + items * {kernels.ITEM_WORDS} + rows * {kernels.ROW_WORDS}",
        "word where the append records (or copy records) begin",
    ),
    "header.softcap": ("float32(cap)", "scores become cap * tanh(score / cap); read where softcap is 1"),
    "header.softcap_inverse": ("float32(1 / cap)", "read where softcap is 1"),
    "header.sink_table": (
        "sink_table",
        "word of the work buffer where q_heads attention sinks begin, float32(sink) * float32(log2(e)) each: logits "
        "that join the softmax without a value; 0 for none",
    ),
    "header.alibi_table": (
        "alibi_table",
        "word of the work buffer where q_heads ALiBi slopes begin, float32(slope * log2(e)) each, the product taken in "
        "float64; read where alibi is 1",
    ),
    "header.scale_table": (
        "scale_table",
        "word of the work buffer where the scales of fp8_e4m3 begin, "
        f"{FP8_UNIT:g} * the float32 scale of each KV head of K, then of V; read where a type is fp8_e4m3",
    ),
    "header.first_page": (
        "layer * pages",
        "is added to every id of the page tables: where the layer begins in K and V buffers that several layers share",
    ),
    "item.row": ("row", "query row"),
    "item.limit": ("limit", "the row sees keys first ... limit - 1"),
    "item.leaf_begin": (
        f"max(ceil_div(begin_key, unit_keys) * leaves_per_state if split else first_leaf, first // {KEYS_PER_LEAF})",
        "first leaf",
    ),
    "item.leaf_end": (
        "min(ceil_div(end_key, unit_keys) * leaves_per_state, row_leaves)",
        "leaf behind the last; an item that has leaf_begin >= leaf_end leaves early, better not to make it",
    ),
    "item.rows": (
        "1",
        "query rows from row on that the item is for, at most attend.rows_shared; where more than one, all of them see "
        "all keys of its leaves, in the same pages. A state per unit goes to row.state + unit - row.unit of each",
    ),
    "item.page_table": ("page_table", "word of the work buffer where the sequence's page ids begin"),
    "item.upload_begin": (
        "0xFFFFFFFF",
        "from_upload kernels: tokens from this position on are read from the rows buffer; 0xFFFFFFFF for none",
    ),
    "item.upload_row": ("0", "from_upload kernels: row of the rows buffer that holds token upload_begin"),
    "item.leaves_per_state": ("leaves_per_state", f"leaves per emitted state: 1, or {LEAVES_PER_NODE} (a node)"),
    "item.first": ("first", "lowest key that the row sees; 0 without a window"),
    "item.key_shift": (
        "0",
        "added to the number of a key in the sequence: its position, where the sequence is a shard; for alibi and mask",
    ),
    "item.row_step": ("0", "what first and limit grow by from row to row, in this package's matrix kernel"),
    "row.state": ("row * states_per_row + first // unit_keys - first_unit", "place of the row's first state"),
    "row.count": (
        "max(ceil_div(limit, unit_keys) - first // unit_keys, 0)",
        "states of the row; 0 and no sinks give output 0 and lse -inf",
    ),
    "row.unit": ("first // unit_keys", "absolute index of the first state's unit"),
    "row.leaves_per_state": ("leaves_per_state", "leaves per state, as in the row's items"),
    "row.position": (
        "context_len - q_len + row",
        "the row's own position, negative for rows before the first key; read where alibi is 1",
    ),
    "row.mask": (
        "0",
        "word of the work buffer where the row's mask begins, a float32 for each key: what is added to its score in "
        "natural units, -inf where the row does not see it; read where mask is 1",
    ),
    "row.mask_begin": ("0", "position of the first key that the mask is for"),
    "row.mask_end": ("0", "position behind the last; 0 for no mask"),
    "append.position": ("token", "the new token's position in its sequence; no_token: nothing to append"),
    "append.page_table": ("page_table", "word of the work buffer where the sequence's page ids begin"),
    "copy.source": (
        "page",
        "page to read; header.first_page is not added, so one submission copies a page in every layer of the buffers",
    ),
    "copy.target": ("page", "page to write"),
}
# their types, where these are not uint32
TYPES: Final = {
    "header.score_scale": "float32",
    "header.softcap": "float32",
    "header.softcap_inverse": "float32",
    "row.position": "int32",
}

# bindings: element, meaning. All of descriptor set 0, storage buffers.
BINDINGS: Final[dict[str, tuple[str, str]]] = {
    "attend.work": ("uint32", "the work buffer"),
    "attend.q": ("float32", "(rows, q_heads, k_dim), 0 from head_dim on"),
    "attend.k": ("uint32", "K, see cache"),
    "attend.v": ("uint32", "V, see cache; of a latent shape K once more"),
    "attend.states": (
        "float32",
        "o (states, q_heads, v_dim), then (m, l) (states, q_heads, 2); where header.single_pass is 1, any buffer, "
        "for example out once more",
    ),
    "attend.out": (
        "float32",
        "out (rows, q_heads, v_dim), then lse (rows, q_heads); written where header.single_pass is 1, else any "
        "buffer, for example states once more",
    ),
    "attend.rows": (
        "uint32",
        "from_upload kernels: rows of the newest tokens, see rows; else any buffer, for example work",
    ),
    "merge.work": ("uint32", "the work buffer"),
    "merge.states": ("float32", "what attend wrote"),
    "merge.out": ("float32", "out (rows, q_heads, v_dim), then lse (rows, q_heads), natural log"),
    "append.work": ("uint32", "the work buffer"),
    "append.rows": ("uint32", "rows of tokens, one per append record, see rows (gather: written)"),
    "append.k": ("uint32", "K, see cache (gather: read)"),
    "append.v": ("uint32", "V, see cache (gather: read); of a latent shape any buffer, for example K once more"),
    "copy.work": ("uint32", "the work buffer"),
    "copy.k": ("uint32", "K, read and written"),
    "copy.v": ("uint32", "V, read and written; of a latent shape any buffer, for example K once more"),
    "primitives.numbers": ("uint32", "the words of primitives.numbers"),
    "primitives.results": ("uint32", "as many words as primitives.results has"),
}

# specialization constants: value, meaning
SPECIALIZATION: Final[dict[str, tuple[str, str]]] = {
    "attend.k_dim": ("k_dim", "dimensions of q and K"),
    "attend.v_dim": ("v_dim", "dimensions of V and the output"),
    "attend.latent": ("latent", "1: V is the first dimensions of K"),
    "attend.heads": ("heads_per_workgroup", "query heads that one workgroup serves; never shows in the bits"),
    "attend.chunks_ahead": (
        "chunks_ahead",
        f"chunks of {CHUNK} dimensions of K in flight; divides k_dim / {CHUNK}; never shows in the bits",
    ),
    "attend.tile": ("tile", "tokens per tile"),
    "attend.softcap": ("softcap", "1: scores are capped by header.softcap"),
    "attend.alibi": ("alibi", "1: scores have a bias by the distance of key and row"),
    "attend.mask": ("masked", "1: rows have masks"),
    "attend.rows_shared": (
        "1",
        "query rows per workgroup; heads is then group * rows_shared, the grid's z 1 and header.single_pass 0. A GPU's "
        f"registers hold min({SHARED_HEADS} // group, {SHARED_ADDRESSES} // (group + 1)) rows",
    ),
    "attend.k_storage": ("k_storage", f"storage type of K: {', '.join(f'{i} {n}' for i, n in enumerate(STORAGE))}"),
    "attend.v_storage": ("v_storage", "storage type of V, numbered like K's"),
    "attend.from_upload": ("0", "1: the newest tokens are read from the rows buffer"),
    "attend.lanes": (
        f"{limits.WAVE}",
        f"invocations of a workgroup; on a CPU {CPU_LANES} or {2 * CPU_LANES} may be faster, where V has a multiple of "
        "that many slices and one pass; attend_node, which has more, does not declare it; never shows in the bits",
    ),
    "merge.v_dim": ("v_dim", "dimensions of the output"),
    "merge.lanes": (
        "merge_lanes",
        f"invocations of a workgroup, a multiple of {limits.WAVE}; never shows in the bits",
    ),
    "append.k_values": ("k_values", "words of K values per token and KV head"),
    "append.v_values": ("v_values", "words of V values"),
    "append.k_scales": ("k_scales", "words of what the blocks of K share"),
    "append.v_scales": ("v_scales", "words of what the blocks of V share"),
    "append.chunk_words": ("chunk_words", f"words of {CHUNK} dimensions of K"),
    "append.tile": ("tile", "tokens per tile"),
    "append.gather": ("gather", "0: rows into the cache; 1: out of it"),
    "copy.k_tile_words": ("k_tile_words", "words of a tile of K"),
    "copy.v_tile_words": ("v_tile_words", "words of a tile of V"),
}

# workgroups in x, y, z: count, meaning
GRIDS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "attend": (("items", "item record"), ("kv_heads", "KV head"), ("head_chunks", "chunk of a KV head's query heads")),
    "merge": (
        (f"ceil_div(v_dim, {kernels.MERGE_DIMS})", f"{kernels.MERGE_DIMS} head dimensions"),
        ("q_heads", "query head"),
        ("rows", "query row"),
    ),
    "append": (("appends", "append record"), ("kv_heads", "KV head"), ("1", "")),
    "copy": (("copies", "copy record"), ("kv_heads", "KV head"), ("page_tiles", "tile of the page")),
    "primitives": ((f"{primitives.ROWS // limits.WAVE}", f"{limits.WAVE} rows of numbers"), ("1", ""), ("1", "")),
}
ROLES: Final = {
    "attend": "pass 1: states of ranges of leaves",
    "merge": "pass 2: folds a row's states, divides once",
    "append": "rows of new tokens into the cache",
    "gather": "rows of tokens out of the cache",
    "copy": "whole pages within the cache, for a shared page that is about to be written",
    "primitives": "the kernels' float functions on known numbers, once per device and before any other kernel",
}
