"""The sizes and numbers of a call as formulas: Python integer expressions over names, each of them explained.

Besides the operators there are ``ceil_div(a, b)`` for the quotient rounded up, ``log2``, ``min`` and ``max``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ... import limits
from ...cache.pages import MAX_PAGE_SIZE, MIN_PAGE_SIZE
from ...canonical.constants import CHUNK, KEYS_PER_LEAF, LEAVES_PER_NODE
from ...kernels import declarations as kernels
from ...kernels.tuning import merge_lanes
from ...limits import BLOCK, MAX_CONTEXT

# of a shape: expression, meaning; each uses only names before it
SIZES: Final[dict[str, tuple[str, str]]] = {
    "group": ("q_heads // kv_heads", "query heads per KV head; head h reads KV head h // group"),
    "value_slice": (
        "2 if v_head_dim <= 64 else 4 if v_head_dim <= 128 else 8 if v_head_dim <= 256 else 16 if v_head_dim <= 512 "
        "else 32",
        "consecutive dimensions of V per lane",
    ),
    "v_dim": (
        f"ceil_div(v_head_dim, max(value_slice, {limits.V_DIMS})) * max(value_slice, {limits.V_DIMS})",
        "v_head_dim as V, states and output have it, filled up by zeros",
    ),
    "k_dim": (
        f"ceil_div(max(head_dim, v_dim if latent else 0), {limits.K_DIMS}) * {limits.K_DIMS}",
        "head_dim as q and K have it, filled up by zeros",
    ),
    "head_chunks": (
        f"ceil_div(group, min({limits.MAX_HEADS_PER_WORKGROUP}, "
        f"{limits.MAX_ACCUMULATORS // limits.WAVE} // value_slice))",
        "workgroups that share one KV head",
    ),
    "heads_per_workgroup": ("ceil_div(group, head_chunks)", "query heads of one workgroup of pass 1"),
    "k_values": ("k_dim * k_bits // 32", "words of one token's K values of one KV head"),
    "v_values": ("0 if latent else v_dim * v_bits // 32", "words of its V values"),
    "k_blocks": (f"ceil_div(k_dim, {BLOCK})", "blocks of a row of K"),
    "v_blocks": (f"0 if latent else ceil_div(v_dim, {BLOCK})", "of V"),
    "k_paired": (
        "ceil_div(k_blocks * k_halves, 2)",
        "words of their float16 numbers, the last one filled up",
    ),
    "v_paired": ("ceil_div(v_blocks * v_halves, 2)", "of V's"),
    "k_scales": ("k_paired + k_blocks * k_fifth", "words of what the blocks of K share: these, then their fifth bits"),
    "v_scales": ("v_paired + v_blocks * v_fifth", "of V"),
    "k_words": ("k_values + k_scales", "words of one token's K of one KV head"),
    "v_words": ("v_values + v_scales", "words of its V"),
    "chunk_words": (f"k_values // (k_dim // {CHUNK})", f"words of {CHUNK} dimensions of K"),
    "token_words": ("kv_heads * (k_words + v_words)", "words of one token: K and V of every KV head"),
    "tile": (f"min({KEYS_PER_LEAF}, page_size)", "tokens per tile"),
    "page_tiles": ("page_size // tile", "tiles per page and KV head"),
    "k_tile_words": ("tile * k_words", "words of K of a tile"),
    "v_tile_words": ("tile * v_words", "words of V of a tile; 0 for a latent shape, whose K buffer is bound as V, too"),
    "k_page_words": ("kv_heads * page_tiles * k_tile_words", "words of K of a page in one layer"),
    "v_page_words": ("kv_heads * page_tiles * v_tile_words", "words of V of a page in one layer"),
    "state_words": ("q_heads * (v_dim + 2)", "words of a state of all query heads"),
}
# of a kind of device, and of a call; the call's inputs are in ``INPUTS``
QUANTITIES: Final[dict[str, tuple[str, str]]] = {
    "chunks_ahead": (
        f"1 if kind == 'cpu' else 4 if k_dim % {4 * CHUNK} == 0 else 2",
        "chunks of K in flight: a GPU hides latency with it, a CPU only spills",
    ),
    "merge_lanes": (
        f"{merge_lanes('cpu')} if kind == 'cpu' else {merge_lanes('gpu')}",
        f"invocations of a workgroup of pass 2; {limits.WAVE} where maxComputeWorkGroupInvocations is less",
    ),
    "begin": ("max(context_len - q_len + 1 - window, 0) if window else 0", "lowest key that some row sees"),
    "first_leaf": (f"begin // {KEYS_PER_LEAF}", "leaf of that key"),
    "leaves": (f"ceil_div(context_len, {KEYS_PER_LEAF}) - first_leaf", "leaves of the context that some row sees"),
    "nodes": (f"ceil_div(leaves, {LEAVES_PER_NODE})", "as many nodes"),
    "unit_keys": (f"{KEYS_PER_LEAF} * leaves_per_state", "keys per emitted state"),
    "first_unit": ("begin // unit_keys", "absolute index of the unit that holds key begin"),
    "states_per_row": (
        "ceil_div(context_len, unit_keys) - first_unit",
        "states of a query row",
    ),
    "single_pass": ("1 if states_per_row == 1 else 0", "1: pass 2 is left out; of several sequences where all have 1"),
    "states": ("rows * states_per_row", "states of the call"),
}
INPUTS: Final = {
    "q_heads": "query heads of the shape",
    "kv_heads": "KV heads of the shape",
    "head_dim": "head dimension of q and K",
    "v_head_dim": "head dimension of V and the output",
    "latent": "1 where V is the first v_head_dim dimensions of K and is not stored, else 0",
    "k_storage": "index of K's type, see dtypes",
    "v_storage": "of V's; K's for a latent shape",
    "k_bits": "bits of a value of K's type, see dtypes",
    "v_bits": "of V's",
    "k_halves": "float16 numbers of a block of K's type",
    "v_halves": "of V's",
    "k_fifth": "1 where blocks of K's type have fifth bits, else 0",
    "v_fifth": "of V's",
    "scale_words": "2 * kv_heads where K's or V's type is fp8_e4m3, else 0",
    "scale_table": "word of the work buffer where the scales of heads begin, 0 for none",
    "page_size": f"tokens per page, a power of two from {MIN_PAGE_SIZE} to {MAX_PAGE_SIZE}",
    "layers": "layers that share a K and a V buffer",
    "pages": "pages of a layer",
    "layer": "of the call, counted among those that share the buffers",
    "kind": "'cpu' for a device of type VK_PHYSICAL_DEVICE_TYPE_CPU, else 'gpu'",
    "compute_units": "of the device",
    "context_len": f"keys of the sequence, the call's own among them, 0 to {MAX_CONTEXT}",
    "q_len": "query rows of the sequence, the last tokens of it",
    "rows": "query rows of the call: q_len. Of several sequences items, row records and states lie one behind the "
    "other, and row and state count on",
    "window": "keys that a row sees at most, its own position counted; 0 for no window",
    "softcap": "1 where scores are capped, 0 else; the values in shapes are those for 0",
    "cap": "of the softcap",
    "scale": "of the scores",
    "splits": "from split_rule, or any layout: bits never depend on it",
    "leaves_per_state": "from split_rule",
    "split": "0 ... splits - 1",
    "begin_key": "split_rule.boundary at split",
    "end_key": "split_rule.boundary at split + 1",
    "row": "query row of the call",
    "limit": "keys up to the row's own position: for row i of q_len max(context_len - q_len + 1 + i, 0)",
    "first": "lowest key that the row sees: max(limit - window, 0) with a window, else 0",
    "row_leaves": f"ceil_div(limit, {KEYS_PER_LEAF}), and at least 1 where single_pass is 1",
    "items": "item records: those that have leaf_begin < leaf_end",
    "appends": "append records",
    "copies": "copy records",
    "table_words": "page ids in the work buffer",
    "page_table": "word of the work buffer where a sequence's page ids begin",
    "sink_words": "q_heads where there are sinks, else 0",
    "alibi": "1 where scores have ALiBi's bias, 0 else; the values in shapes are those for 0",
    "masked": "1 where rows have masks, 0 else; the values in shapes are those for 0",
    "alibi_words": "q_heads where alibi is 1, else 0",
    "mask_words": "float32 of all masks: query rows times keys of the mask, over all sequences",
    "alibi_table": "word of the work buffer where the ALiBi slopes begin, 0 for none",
    "sink_table": "word of the work buffer where the sinks begin, 0 for none",
    "token": "position of a token in its sequence",
    "page": "page of the K and V buffers: layer * pages plus a page id; of a token, header.first_page plus word "
    "page_table + token // page_size of the work buffer",
    "kv_head": "of a K or V value",
    "dim": "head dimension of a K or V value, below k_dim or v_dim",
}
BUFFERS: Final[dict[str, tuple[str, str]]] = {
    "work": (
        f"4 * ({kernels.HEADER_WORDS} + items * {kernels.ITEM_WORDS} + rows * {kernels.ROW_WORDS} "
        f"+ appends * {kernels.APPEND_WORDS} + table_words + sink_words "
        "+ alibi_words + scale_words + mask_words)",
        "host-visible; written by the host before each call",
    ),
    "q": ("4 * rows * q_heads * k_dim", "host-visible, or written by a kernel before"),
    "rows": ("4 * appends * token_words", "host-visible, or written by a kernel before; 0 in what is filled up"),
    "k": ("4 * layers * pages * k_page_words", "device-local; need not be cleared"),
    "v": (
        "4 * layers * pages * v_page_words",
        "device-local; need not be cleared; not there for a latent shape, whose K is bound in its place",
    ),
    "states": ("4 * states * state_words", "device-local scratch; not needed where header.single_pass is 1"),
    "out": ("4 * rows * q_heads * (v_dim + 1)", "host-visible, or read by a kernel after"),
}

CACHE_LAYOUT: Final = {
    "k": f"(layers, pages, kv_heads, page_tiles) tiles of values (k_dim / {CHUNK}, tile, {CHUNK}), then what blocks "
    "share, (k_scales, tile) words",
    "v": "(layers, pages, kv_heads, page_tiles) tiles of values (tile, v_dim), then what blocks share, (tile, "
    "v_scales) words; of a latent shape the first v_dim dimensions of K",
    "pages": "a page id names the same place in every layer's pages; page tables hold ids, to which the kernels add "
    "header.first_page. As many layers share a K and a V buffer as maxStorageBufferRange allows, or fewer",
}
ROW_LAYOUT: Final = "(rows, kv_heads) times K values, V values, K scales, V scales"
# words of the cache and of rows: an expression each
CACHE_INDEX: Final = {
    "tile_number": "(page * kv_heads + kv_head) * page_tiles + token // tile % page_tiles",
    "k_tile_at": "tile_number * k_tile_words",
    "v_tile_at": "tile_number * v_tile_words",
    "k_word": f"k_tile_at + (dim // {CHUNK} * tile + token % tile) * chunk_words + dim % {CHUNK} * k_bits // 32",
    "v_word": "v_tile_at + token % tile * v_values + dim * v_bits // 32",
    "k_bit": "dim * k_bits % 32",
    "v_bit": "dim * v_bits % 32",
    "k_scale_word": f"k_tile_at + tile * k_values + dim // {BLOCK} * k_halves // 2 * tile + token % tile",
    "v_scale_word": f"v_tile_at + tile * v_values + token % tile * v_scales + dim // {BLOCK} * v_halves // 2",
    "k_scale_bit": f"dim // {BLOCK} * k_halves % 2 * 16",
    "v_scale_bit": f"dim // {BLOCK} * v_halves % 2 * 16",
    "k_fifth_word": f"k_tile_at + tile * k_values + (k_paired + dim // {BLOCK}) * tile + token % tile",
    "v_fifth_word": f"v_tile_at + tile * v_values + token % tile * v_scales + v_paired + dim // {BLOCK}",
    "fifth_bit": f"dim % {BLOCK}",
}
ROW_INDEX: Final = {
    "row_at": "(row * kv_heads + kv_head) * (k_words + v_words)",
    "k_word": "row_at + dim * k_bits // 32",
    "v_word": "row_at + k_values + dim * v_bits // 32",
    **{name: CACHE_INDEX[name] for name in ("k_bit", "v_bit", "k_scale_bit", "v_scale_bit", "fifth_bit")},
    "k_scale_word": f"row_at + k_values + v_values + dim // {BLOCK} * k_halves // 2",
    "v_scale_word": f"row_at + k_values + v_values + k_scales + dim // {BLOCK} * v_halves // 2",
    "k_fifth_word": f"row_at + k_values + v_values + k_paired + dim // {BLOCK}",
    "v_fifth_word": f"row_at + k_values + v_values + k_scales + v_paired + dim // {BLOCK}",
}


def evaluate(expression: str, names: Mapping[str, Any]) -> int:
    """The value of one of this module's expressions; never give it one from a file."""
    functions = {"min": min, "max": max, "ceil_div": lambda a, b: -(-a // b), "log2": lambda a: a.bit_length() - 1}
    return int(eval(expression, {"__builtins__": {}, **functions}, dict(names)))  # of the constants above


def evaluate_all(table: Mapping[str, tuple[str, str]], names: Mapping[str, Any]) -> dict[str, int]:
    """The values of a table of (expression, meaning), each of which may use those before it."""
    found: dict[str, int] = {}
    for name, (expression, _) in table.items():
        found[name] = evaluate(expression, {**names, **found})
    return found
