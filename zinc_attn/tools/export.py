"""The operation for runtimes without Python: the SPIR-V modules, and one manifest.json that says how to run them.

The manifest is generated from ``shapes``, ``kernels`` and ``planner``, so it cannot differ from what this package
dispatches. Formulas are Python integer expressions over the names in ``quantities``, with ``ceil_div(a, b)`` for the
quotient rounded up and ``log2``. What a name means stands in the tables below, keyed by its place; a test asks for an
entry for every declared name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from .. import __version__, limits, shapes
from ..cache.pages import MAX_PAGE_SIZE, MIN_PAGE_SIZE
from ..canonical.constants import CHUNK, LEAF, NODE
from ..canonical.tensorfile import PathLike, plain, read_regular
from ..checks import check_int, check_path, shown
from ..errors import ArgumentError
from ..kernels import contract as kernels
from ..kernels.contract import KernelDecl
from ..limits import DTYPE_BYTES, MAX_CONTEXT, Q8_BLOCK
from ..planning import splits as planner
from ..planning.splits import split_rule
from ..runtime.device import build_record, load_spirv
from ..shapes import AttnShape, value_words
from .sweep import write_file

FORMAT: Final = "zinc_attn export"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
DIGEST: Final = "manifest_sha256"  # the first entry of the file, see ``sealed``
MOST_BYTES: Final = 64 << 20  # of a manifest or a module that is read
KINDS: Final = ("gpu", "cpu")


class ManifestError(ArgumentError):
    """A manifest or a file that it names is missing, damaged or of another version; the message says which."""


# --- what the names mean -----------------------------------------------------------------------------------

# words of the work buffer: type, value, meaning. The value is that of a whole cache, not of a shard of KV heads.
FIELDS: Final[dict[str, tuple[str, str, str]]] = {
    "header.q_heads": ("uint32", "q_heads", "query heads"),
    "header.kv_heads": ("uint32", "kv_heads", "KV heads in the K and V buffers: all of them, or a shard's"),
    "header.kv_first": ("uint32", "0", "first KV head of the K and V buffers"),
    "header.row_kv_heads": ("uint32", "kv_heads", "KV heads of the rows buffer: all of them"),
    "header.group": ("uint32", "group", "query heads per KV head"),
    "header.score_scale": (
        "float32",
        "float32(scale) if softcap else float32(scale * log2(e))",
        "factor of the scores, the product taken in float64 and rounded once; scale is 1 / sqrt(head_dim) by default",
    ),
    "header.state_stride": ("uint32", "states", "states in the states buffer; the (m, l) pairs begin behind their o"),
    "header.page_shift": ("uint32", "log2(page_tiles)", "log2 of the tiles per page"),
    "header.page_tiles": ("uint32", "page_tiles", "tiles per page and KV head"),
    "header.rows": ("uint32", "rows", "query rows of the call"),
    "header.row_table": (
        "uint32",
        f"{kernels.HEADER_WORDS} + items * {kernels.ITEM_WORDS}",
        "word where the row records begin",
    ),
    "header.direct": (
        "uint32",
        "direct",
        "1: each row has one state at most, and pass 1 writes the final output",
    ),
    "header.append_table": (
        "uint32",
        f"{kernels.HEADER_WORDS} + items * {kernels.ITEM_WORDS} + rows * {kernels.ROW_WORDS}",
        "word where the append records (or copy records) begin",
    ),
    "header.softcap": ("float32", "float32(cap)", "scores become cap * tanh(score / cap); read where softcap is 1"),
    "header.softcap_inverse": ("float32", "float32(1 / cap)", "read where softcap is 1"),
    "header.sink_table": (
        "uint32",
        "sink_table",
        "word of the work buffer where q_heads attention sinks begin, float32(sink) * float32(log2(e)) each: logits "
        "that join the softmax without a value; 0 for none",
    ),
    "item.row": ("uint32", "row", "query row"),
    "item.limit": ("uint32", "limit", "the row sees keys first ... limit - 1"),
    "item.leaf_begin": (
        "uint32",
        f"max(ceil_div(begin_key, unit_keys) * unit_leaves if split else first_leaf, first // {LEAF})",
        "first leaf",
    ),
    "item.leaf_end": (
        "uint32",
        "min(ceil_div(end_key, unit_keys) * unit_leaves, row_leaves)",
        "leaf behind the last; an item that has leaf_begin >= leaf_end leaves early, better not to make it",
    ),
    "item.rows": (
        "uint32",
        "1",
        "query rows from row on that the item is for, at most attend.rows_shared; where more than one, all of them see "
        "all keys of its leaves, in the same pages. A state per unit goes to row.state + unit - row.unit of each",
    ),
    "item.page_table": ("uint32", "page_table", "word of the work buffer where the sequence's page ids begin"),
    "item.fresh_begin": (
        "uint32",
        "0xFFFFFFFF",
        "fresh kernels: tokens from this position on are read from the rows buffer; 0xFFFFFFFF for none",
    ),
    "item.fresh_row": ("uint32", "0", "fresh kernels: row of the rows buffer that holds token fresh_begin"),
    "item.unit_leaves": ("uint32", "unit_leaves", f"leaves per emitted state: 1, or {NODE} (a node)"),
    "item.first": ("uint32", "first", "lowest key that the row sees; 0 without a window"),
    "row.state": ("uint32", "row * states_per_row + first // unit_keys - first_unit", "place of the row's first state"),
    "row.count": (
        "uint32",
        "max(ceil_div(limit, unit_keys) - first // unit_keys, 0)",
        "states of the row; 0 and no sinks give output 0 and lse -inf",
    ),
    "row.unit": ("uint32", "first // unit_keys", "absolute index of the first state's unit"),
    "row.unit_leaves": ("uint32", "unit_leaves", "leaves per state, as in the row's items"),
    "append.position": ("uint32", "token", "the new token's position in its sequence; no_token: nothing to append"),
    "append.page_table": ("uint32", "page_table", "word of the work buffer where the sequence's page ids begin"),
    "copy.source": ("uint32", "page", "page id to read"),
    "copy.target": ("uint32", "page", "page id to write"),
}

# bindings: element, meaning. All of descriptor set 0, storage buffers.
BINDINGS: Final[dict[str, tuple[str, str]]] = {
    "attend.work": ("uint32", "the work buffer"),
    "attend.q": ("float32", "(rows, q_heads, head_dim)"),
    "attend.k": ("uint32", "K of one layer, see cache"),
    "attend.v": ("uint32", "V of one layer, see cache"),
    "attend.states": (
        "float32",
        "o (states, q_heads, head_dim), then (m, l) (states, q_heads, 2); where header.direct is 1, any buffer, "
        "for example out once more",
    ),
    "attend.out": (
        "float32",
        "out (rows, q_heads, head_dim), then lse (rows, q_heads); written where header.direct is 1, else any buffer, "
        "for example states once more",
    ),
    "attend.rows": ("uint32", "fresh kernels: rows of the newest tokens, see rows; else any buffer, for example work"),
    "merge.work": ("uint32", "the work buffer"),
    "merge.states": ("float32", "what attend wrote"),
    "merge.out": ("float32", "out (rows, q_heads, head_dim), then lse (rows, q_heads), natural log"),
    "append.work": ("uint32", "the work buffer"),
    "append.rows": ("uint32", "rows of tokens, one per append record, see rows (gather: written)"),
    "append.k": ("uint32", "K of one layer, see cache (gather: read)"),
    "append.v": ("uint32", "V of one layer, see cache (gather: read)"),
    "copy.work": ("uint32", "the work buffer"),
    "copy.k": ("uint32", "K of one layer, read and written"),
    "copy.v": ("uint32", "V of one layer, read and written"),
}

# specialisation constants: value, meaning
SPECIALISATION: Final[dict[str, tuple[str, str]]] = {
    "attend.head_dim": ("head_dim", "head dimension"),
    "attend.heads": ("heads_per_workgroup", "query heads that one workgroup serves; never shows in the bits"),
    "attend.chunks_ahead": (
        "chunks_ahead",
        f"chunks of {CHUNK} dimensions of K in flight; divides head_dim / {CHUNK}; never shows in the bits",
    ),
    "attend.tile": ("tile", "tokens per tile"),
    "attend.softcap": ("softcap", "1: scores are capped by header.softcap"),
    "attend.rows_shared": (
        "1",
        "query rows per workgroup; heads is then group * rows_shared, the grid's z 1 and header.direct 0. A GPU's "
        f"registers hold min({kernels.SHARED_HEADS} // group, {kernels.SHARED_ADDRESSES} // (group + 1)) rows",
    ),
    "attend.storage": (
        "storage",
        f"storage type of K and V: {', '.join(f'{i} {n}' for i, n in enumerate(kernels.STORAGE))}",
    ),
    "attend.fresh": ("fresh", "1: the newest tokens are read from the rows buffer"),
    "merge.head_dim": ("head_dim", "head dimension"),
    "merge.lanes": (
        "merge_lanes",
        f"invocations of a workgroup, a multiple of {limits.WAVE}; never shows in the bits",
    ),
    "append.row_values": ("value_words", "words of K (or V) values per token and KV head"),
    "append.scales": ("scale_words", "words of their scales"),
    "append.chunk_words": ("chunk_words", f"words of {CHUNK} dimensions of K"),
    "append.tile": ("tile", "tokens per tile"),
    "append.gather": ("gather", "0: rows into the cache; 1: out of it"),
    "copy.tile_words": ("tile_words", "words of a tile"),
}

# workgroups in x, y, z: count, meaning
GRIDS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "attend": (("items", "item record"), ("kv_heads", "KV head"), ("head_chunks", "chunk of a KV head's query heads")),
    "merge": (
        (f"ceil_div(head_dim, {kernels.MERGE_DIMS})", f"{kernels.MERGE_DIMS} head dimensions"),
        ("q_heads", "query head"),
        ("rows", "query row"),
    ),
    "append": (("appends", "append record"), ("kv_heads", "KV head"), ("1", "")),
    "copy": (("copies", "copy record"), ("kv_heads", "KV head"), ("page_tiles", "tile of the page")),
}
ROLES: Final = {
    "attend": "pass 1: states of ranges of leaves",
    "merge": "pass 2: folds a row's states, divides once",
    "append": "rows of new tokens into the cache",
    "gather": "rows of tokens out of the cache",
    "copy": "whole pages within the cache, for a shared page that is about to be written",
}

# of a shape: expression, meaning; each uses only names before it
SIZES: Final[dict[str, tuple[str, str]]] = {
    "group": ("q_heads // kv_heads", "query heads per KV head; head h reads KV head h // group"),
    "head_chunks": (
        f"ceil_div(group, min({limits.MAX_HEADS_PER_WORKGROUP}, {limits.MAX_ACCUMULATORS} // head_dim))",
        "workgroups that share one KV head",
    ),
    "heads_per_workgroup": ("ceil_div(group, head_chunks)", "query heads of one workgroup of pass 1"),
    "value_words": ("head_dim * value_bits // 32", "words of one token's K (or V) values of one KV head"),
    "scale_words": (
        f"ceil_div(head_dim, {2 * Q8_BLOCK}) if dtype == 'q8_0' else 0",
        "words of their float16 scales, two a word, the last word filled up",
    ),
    "chunk_words": (f"value_words // (head_dim // {CHUNK})", f"words of {CHUNK} dimensions"),
    "token_words": ("kv_heads * 2 * (value_words + scale_words)", "words of one token: K and V of every KV head"),
    "tile": (f"min({LEAF}, page_size)", "tokens per tile"),
    "page_tiles": ("page_size // tile", "tiles per page and KV head"),
    "tile_words": ("tile * (value_words + scale_words)", "words of K (or V) of a tile"),
    "page_words": ("kv_heads * page_tiles * tile_words", "words of K (or V) of a page in one layer"),
    "state_words": ("q_heads * (head_dim + 2)", "words of a state of all query heads"),
}
# of a kind of device, and of a call; the call's inputs are in ``INPUTS``
QUANTITIES: Final[dict[str, tuple[str, str]]] = {
    "chunks_ahead": (
        f"1 if kind == 'cpu' else 4 if head_dim % {4 * CHUNK} == 0 else 2",
        "chunks of K in flight: a GPU hides latency with it, a CPU only spills",
    ),
    "merge_lanes": (
        f"{kernels.merge_lanes('cpu')} if kind == 'cpu' else {kernels.merge_lanes('gpu')}",
        f"invocations of a workgroup of pass 2; {limits.WAVE} where maxComputeWorkGroupInvocations is less",
    ),
    "begin": ("max(context_len - q_len + 1 - window, 0) if window else 0", "lowest key that some row sees"),
    "first_leaf": (f"begin // {LEAF}", "leaf of that key"),
    "leaves": (f"ceil_div(context_len, {LEAF}) - first_leaf", "leaves of the context that some row sees"),
    "nodes": (f"ceil_div(leaves, {NODE})", "as many nodes"),
    "unit_keys": (f"{LEAF} * unit_leaves", "keys per emitted state"),
    "first_unit": ("begin // unit_keys", "absolute index of the unit that holds key begin"),
    "states_per_row": (
        "ceil_div(context_len, unit_keys) - first_unit",
        "states of a query row",
    ),
    "direct": ("1 if states_per_row == 1 else 0", "1: pass 2 is left out; of several sequences where all have 1"),
    "states": ("rows * states_per_row", "states of the call"),
}
INPUTS: Final = {
    "q_heads": "query heads of the shape",
    "kv_heads": "KV heads of the shape",
    "head_dim": "head dimension of the shape",
    "dtype": "of the cache, see dtypes",
    "value_bits": "the dtype's",
    "values_per_word": "the dtype's",
    "page_size": f"tokens per page, a power of two from {MIN_PAGE_SIZE} to {MAX_PAGE_SIZE}",
    "pages": "pages of the cache",
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
    "unit_leaves": "from split_rule",
    "split": "0 ... splits - 1",
    "begin_key": "split_rule.boundary at split",
    "end_key": "split_rule.boundary at split + 1",
    "row": "query row of the call",
    "limit": "keys up to the row's own position: for row i of q_len max(context_len - q_len + 1 + i, 0)",
    "first": "lowest key that the row sees: max(limit - window, 0) with a window, else 0",
    "row_leaves": f"ceil_div(limit, {LEAF}), and at least 1 where direct is 1",
    "items": "item records: those that have leaf_begin < leaf_end",
    "appends": "append records",
    "copies": "copy records",
    "table_words": "page ids in the work buffer",
    "page_table": "word of the work buffer where a sequence's page ids begin",
    "sink_words": "q_heads where there are sinks, else 0",
    "sink_table": "word of the work buffer where the sinks begin, 0 for none",
    "token": "position of a token in its sequence",
    "page": "page id: of a token, word page_table + token // page_size of the work buffer",
    "kv_head": "of a K or V value",
    "dim": "head dimension of a K or V value",
}
BUFFERS: Final[dict[str, tuple[str, str]]] = {
    "work": (
        f"4 * ({kernels.HEADER_WORDS} + items * {kernels.ITEM_WORDS} + rows * {kernels.ROW_WORDS} "
        f"+ appends * {kernels.APPEND_WORDS} + table_words + sink_words)",
        "host-visible; written by the host before each call",
    ),
    "q": ("4 * rows * q_heads * head_dim", "host-visible, or written by a kernel before"),
    "rows": ("4 * appends * token_words", "host-visible, or written by a kernel before"),
    "k": ("4 * pages * page_words", "device-local, one per layer; need not be cleared"),
    "v": ("4 * pages * page_words", "device-local, one per layer; need not be cleared"),
    "states": ("4 * states * state_words", "device-local scratch; not needed where header.direct is 1"),
    "out": ("4 * rows * q_heads * (head_dim + 1)", "host-visible, or read by a kernel after"),
}

CACHE_LAYOUT: Final = {
    "k": f"(pages, kv_heads, page_tiles) tiles of values (head_dim / {CHUNK}, tile, {CHUNK}), then scales "
    "(scale_words, tile) words",
    "v": "(pages, kv_heads, page_tiles) tiles of values (tile, head_dim), then scales (tile, scale_words) words",
    "pages": "a page id names the same slots in K and V of every layer; word page_table + token // page_size of the "
    "work buffer is the id of the page that holds token",
}
ROW_LAYOUT: Final = "(rows, kv_heads) times K values, V values, K scales, V scales"
# words of the cache and of rows: an expression each
CACHE_INDEX: Final = {
    "tile_at": "((page * kv_heads + kv_head) * page_tiles + token // tile % page_tiles) * tile_words",
    "k_word": f"tile_at + (dim // {CHUNK} * tile + token % tile) * chunk_words + dim % {CHUNK} // values_per_word",
    "v_word": "tile_at + token % tile * value_words + dim // values_per_word",
    "bit": "dim % values_per_word * value_bits",
    "k_scale_word": f"tile_at + tile * value_words + dim // {2 * Q8_BLOCK} * tile + token % tile",
    "v_scale_word": f"tile_at + tile * value_words + token % tile * scale_words + dim // {2 * Q8_BLOCK}",
    "scale_bit": f"dim // {Q8_BLOCK} % 2 * 16",
}
ROW_INDEX: Final = {
    "row_at": "(row * kv_heads + kv_head) * 2 * (value_words + scale_words)",
    "k_word": "row_at + dim // values_per_word",
    "v_word": "row_at + value_words + dim // values_per_word",
    "bit": "dim % values_per_word * value_bits",
    "k_scale_word": f"row_at + 2 * value_words + dim // {2 * Q8_BLOCK}",
    "v_scale_word": f"row_at + 2 * value_words + scale_words + dim // {2 * Q8_BLOCK}",
    "scale_bit": f"dim // {Q8_BLOCK} % 2 * 16",
}
ENCODINGS: Final = {
    "f32": "IEEE 754 binary32",
    "f16": "IEEE 754 binary16",
    "bf16": "the upper half of a binary32",
    "q8_0": f"int8 times the float16 scale of its {Q8_BLOCK} dimensions: scale = float16(max|x| / 127), "
    "q = rint(x / scale) within -127 ... 127, 0 where the scale is 0",
}

CONSTANTS: Final = {
    "LEAF": "keys per leaf; leaves lie at absolute multiples",
    "NODE": "leaves per node; nodes lie at absolute multiples",
    "KEYS_PER_NODE": "keys per node: NODE leaves of LEAF",
    "CHUNK": "head dimensions summed on their own before they join the dot product",
    "LANES": "weight sums of a leaf: keys congruent modulo LANES",
    "CUTOFF": "2**d counts as 0 for d below it",
    "FLUSH": "smaller magnitudes of l, o and out become +0",
    "EMPTY_M": "m of the empty state; its l and o are 0",
    "EXP2_POLY": "2**x on [-1/2, 1/2], c0 first, by Horner's rule",
    "RCP_SEED": "1 / x starts from the float32 with bits RCP_SEED - bits(x); then three times y += y * (1 - x * y)",
    "LN_POLY": "ln(1 + x) = x - x**2 / 2 + x**3 * (d0 + d1 x + ...)",
    "LN2_HI": "ln 2 in two parts: its high part",
    "LN2_LO": "its low part",
    "SQRT2": "mantissas above it are halved before ln",
    "LOG2E": "log2(e), used on the host in float64",
    "TANH_POLY": "tanh x = x + x**3 * (e0 + e1 x**2 + ...) below TANH_SMALL",
    "TANH_SMALL": "from here on tanh x = (1 - t) * rcp(1 + t), t = 2**(-2 x log2 e)",
    "TANH_MAX": "larger magnitudes count as this",
    "MIN_INPUT": "smaller magnitudes of float32 and bfloat16 q, k, v count as 0: the host flushes them to +0",
    "MAX_INPUT": "largest magnitude of q, k, v; the host refuses larger ones, NaN and infinities",
    "MAX_SCORE": "largest head_dim * max|q| * max|k| * max(1, 1.5 |scale|); the host refuses more",
    "HEAD_DIMS": "supported head dimensions",
    "MAX_GROUP": "most query heads per KV head",
    "WAVE": "invocations of a wave; a workgroup of pass 2 has several",
    "MAX_HEADS_PER_WORKGROUP": "most query heads of a workgroup of pass 1",
    "MAX_ACCUMULATORS": "most head_dim * heads of a workgroup of pass 1 in one pass over V; more take two or four",
    "MAX_CONTEXT": "most keys",
    "Q8_BLOCK": "head dimensions that share a q8_0 scale",
    "MERGE_DIMS": "head dimensions per workgroup of pass 2",
}
REDUCTION: Final = (
    "All arithmetic is float32 with one rounding per operation, never fused. A state is (m, l, o).",
    "Score: s = score_scale * sum over chunks, ascending, of each chunk's own ascending sum of q * k.",
    "Softcap: with t = score_scale * that sum, s = (cap * tanh(t * (1 / cap))) * log2 e.",
    "Leaf: m = roundEven(max s); a weight is P(s - roundEven(s)) * 2**(roundEven(s) - m); l = (c0 + c1) + (c2 + c3), "
    "c_j the ascending sum of the weights of keys congruent to j; o = ascending sum of weight * v; o is flushed.",
    "Merge of a and b: m = max(m_a, m_b); x = x_a * 2**(m_a - m) + x_b * 2**(m_b - m) for l and o; x is flushed.",
    "2**d, d an integer, counts as 0 below CUTOFF; flushed: magnitudes below FLUSH become +0.",
    "Fold: leaves fold ascending into nodes, nodes fold ascending into the total, each from the empty state. A sink "
    "merges last: m = roundEven(sink), l = P(sink - m), o = 0.",
    "Finish: out = flush(o * rcp(l)), lse = m * ln 2 + ln(l); 0 and -inf where neither key nor sink is seen.",
)
DISPATCH: Final[tuple[dict[str, Any], ...]] = (
    {"host": "writes work, q and rows; vkQueueSubmit makes them visible to the device"},
    {"kernel": "append", "when": "appends > 0"},
    {
        "barrier": {
            "srcStageMask": "VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT",
            "srcAccessMask": "VK_ACCESS_SHADER_WRITE_BIT",
            "dstStageMask": "VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT",
            "dstAccessMask": "VK_ACCESS_SHADER_READ_BIT",
        },
        "when": "appends > 0",
        "for": "attend reads the new rows of k and v. A fresh attend module reads them from rows instead: then append "
        "comes last, behind a barrier of COMPUTE_SHADER with no access masks, and no barrier is needed here",
    },
    {
        "kernel": "attend",
        "when": "items > 0",
        "module": "attend_single_* where no item has more than one leaf, "
        "else attend_loop_*, which is right for every layout",
    },
    {
        "barrier": {
            "srcStageMask": "VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT",
            "srcAccessMask": "VK_ACCESS_SHADER_WRITE_BIT",
            "dstStageMask": "VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT",
            "dstAccessMask": "VK_ACCESS_SHADER_READ_BIT",
        },
        "when": "direct == 0",
        "for": "merge reads states",
    },
    {"kernel": "merge", "when": "direct == 0"},
    {
        "barrier": {
            "srcStageMask": "VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT",
            "srcAccessMask": "VK_ACCESS_SHADER_WRITE_BIT",
            "dstStageMask": "VK_PIPELINE_STAGE_HOST_BIT",
            "dstAccessMask": "VK_ACCESS_HOST_READ_BIT",
        },
        "for": "the host reads out once the fence is signalled; to kernels that read out, and before the next call "
        "writes k, v, states or out: COMPUTE_SHADER, SHADER_READ | SHADER_WRITE",
    },
)


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


# --- the parts of the manifest -----------------------------------------------------------------------------


def family(decl: KernelDecl) -> str:
    """The key of a kernel in the tables above: the name of its source."""
    return decl.source.removesuffix(".comp")


def _constant(value: Any) -> dict[str, Any]:
    if isinstance(value, tuple):
        parts = [_constant(x) for x in value]
        return {key: [part[key] for part in parts] for key in parts[0]}
    if isinstance(value, float):
        return {"value": value, "float32_bits": f"0x{kernels.float_bits(value):08X}"}
    return {"value": value}


def _constants() -> dict[str, Any]:
    """Every number that ``shapes`` declares, and pass 2's."""
    found = {n: x for n, x in vars(shapes).items() if n.isupper() and isinstance(x, int | float | tuple)}
    found["MERGE_DIMS"] = kernels.MERGE_DIMS
    return {name: {**_constant(value), "meaning": CONSTANTS[name]} for name, value in found.items()}


def _record(name: str, fields: Iterable[str], words: int) -> dict[str, Any]:
    """A record of the work buffer."""
    described = []
    for i, field in enumerate(fields):
        kind, value, meaning = FIELDS[f"{name}.{field}"]
        described.append({"name": field, "word": i, "byte": 4 * i, "type": kind, "value": value, "meaning": meaning})
    return {"words": words, "fields": described}


def _work() -> dict[str, Any]:
    return {
        "element": "uint32",
        "order": "header, item records, row records, append (or copy) records, page ids, sinks; unused words are 0",
        "header": _record("header", kernels.HEADER, kernels.HEADER_WORDS),
        "item": _record("item", kernels.ITEM, kernels.ITEM_WORDS),
        "row": _record("row", kernels.ROW, kernels.ROW_WORDS),
        "append": _record("append", kernels.APPEND, kernels.APPEND_WORDS),
        "copy": _record("copy", kernels.COPY, kernels.COPY_WORDS),
        "no_token": kernels.NO_TOKEN,
    }


def _kernel(decl: KernelDecl, digest: str, size: int, variant: dict[str, Any]) -> dict[str, Any]:
    key = family(decl)
    bindings = []
    for i, binding in enumerate(decl.bindings):
        element, meaning = BINDINGS[f"{key}.{binding.name}"]
        bindings.append(
            {"binding": i, "name": binding.name, "access": binding.access, "element": element, "meaning": meaning}
        )
    constants, fixed = [], dict(decl.fixed)
    for i, name in enumerate(decl.constant_names):
        value, meaning = SPECIALISATION[f"{key}.{name}"]
        constants.append(
            {"id": i, "offset": 4 * i, "size": 4, "type": "uint32", "name": name, "value": value, "meaning": meaning}
        )
        if name in fixed:  # the kernel's own, the same for every shape
            constants[-1] |= {"value": str(fixed[name]), "fixed": fixed[name]}
    grid = {axis: {"workgroups": n, "each": each} for axis, (n, each) in zip("xyz", GRIDS[key], strict=True)}
    return {
        "name": decl.name,
        "family": key,
        "role": ROLES[decl.name if decl.name in ROLES else key],
        **variant,
        "file": decl.file,
        "sha256": digest,
        "bytes": size,
        "entry_point": "main",
        "local_size": ["merge_lanes" if "lanes" in decl.spec else f"{limits.WAVE}", "1", "1"],
        "bindings": bindings,
        "push_constants": [],
        "specialisation_constants": constants,
        "grid": grid,
    }


def _split_rule() -> dict[str, Any]:
    return {
        "names": {"target": f"ceil_div(compute_units * {planner.WORKGROUPS_PER_UNIT}, kv_heads * head_chunks * q_len)"},
        "first_that_holds": [
            {
                "when": f"kind == 'cpu' and leaves * q_len <= {planner.MAX_CPU_STATES}",
                "splits": "max(leaves, 1)",
                "unit_leaves": "1",
            },
            {"when": f"leaves <= {planner.SINGLE_SPLIT_KEYS // LEAF}", "splits": "1", "unit_leaves": f"{NODE}"},
            {
                "when": f"kind == 'gpu' and leaves < {planner.NODE_KEYS // LEAF}",
                "splits": f"min(leaves, target, {planner.MAX_LEAF_SPLITS})",
                "unit_leaves": f"1 if splits > nodes else {NODE}",
            },
            {"when": "kind == 'gpu' and q_len == 1", "splits": "nodes", "unit_leaves": f"{NODE}"},
            {"when": "True", "splits": "min(nodes, target)", "unit_leaves": f"{NODE}"},
        ],
        "boundary": "max(min((first_leaf + split * ceil_div(leaves, unit_leaves) // splits * unit_leaves) * "
        f"{LEAF}, context_len), begin)",
        "tables": "shapes[].kinds[].splits holds the rule for q_len 1 as rows: from and to are context lengths, both "
        f"included (with a window context_len - {LEAF} * first_leaf); the number of splits is splits where per is "
        "'call', and leaves or nodes where it says so",
    }


def split_table(shape: AttnShape, compute_units: int, kind: str) -> list[dict[str, Any]]:
    """The split rule for one query row as rows of contexts ``from`` ... ``to`` with one unit and one way to count.

    ``splits`` per "call", or one per "leaf" or "node" of the context. Equal to ``plan_splits`` at every context.
    """
    rows: list[dict[str, Any]] = []
    ways: dict[str, int] = {}  # that fit all contexts of the last row
    for leaves in range(MAX_CONTEXT // LEAF + 1):
        splits, unit = split_rule(leaves, shape, compute_units, 1, kind)
        nodes = -(-leaves // NODE)
        now = {"call": splits, **({"leaf": 1} if splits == leaves else {}), **({"node": 1} if splits == nodes else {})}
        left = {way: n for way, n in ways.items() if now.get(way) == n}
        if not left or unit != rows[-1]["unit_leaves"]:
            rows.append({"from": (leaves - 1) * LEAF + 1 if leaves else 0, "unit_leaves": unit})
            left = now
        ways = left
        way = next(iter(ways))
        rows[-1].update({"to": leaves * LEAF, "splits": ways[way], "per": way})
    return [{key: row[key] for key in ("from", "to", "splits", "per", "unit_leaves")} for row in rows]


def _shape(shape: AttnShape, dtype: str, page_size: int, compute_units: int) -> dict[str, Any]:
    """Everything that is a number once shape, dtype and page size are known."""
    value_words(shape.head_dim, dtype)  # refuses a dtype that the head_dim does not take
    names = {**asdict(shape), **_dtype(dtype), "dtype": dtype, "page_size": page_size}
    sizes = evaluate_all(SIZES, names)
    kinds = {}
    for kind in KINDS:
        known = {**names, **sizes, "kind": kind, "softcap": 0}
        known |= {name: evaluate(QUANTITIES[name][0], known) for name in ("chunks_ahead", "merge_lanes")}
        values: dict[str, dict[str, int]] = {}
        for decl in kernels.KERNELS:
            key = family(decl)
            values[key] = {name: evaluate(SPECIALISATION[f"{key}.{name}"][0], known) for name in decl.spec}
        kinds[kind] = {"specialisation": values, "splits": split_table(shape, compute_units, kind)}
    return {
        "shape": str(shape),
        **asdict(shape),
        "dtype": dtype,
        "page_size": page_size,
        "compute_units": compute_units,
        "sizes": sizes,
        "kv_bytes_per_token": shape.kv_bytes_per_token(dtype),
        "state_bytes": 4 * sizes["state_words"],
        "kinds": kinds,
    }


def _dtype(dtype: str) -> dict[str, int]:
    bits = 8 * DTYPE_BYTES[dtype]
    return {"value_bits": bits, "values_per_word": 32 // bits}


def _described(table: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, str]]:
    return {name: {"expression": expression, "meaning": meaning} for name, (expression, meaning) in table.items()}


# --- writing and reading -----------------------------------------------------------------------------------


def manifest(
    attn_shapes: Iterable[AttnShape] = (), *, dtype: str = "f16", page_size: int = 256, compute_units: int = 64
) -> dict[str, Any]:
    """The manifest as a JSON-serialisable dict; section ``shapes`` has the sizes and split tables of ``attn_shapes``.

    dtype and page_size (tokens, a power of two from 16 on) of the cache; compute_units: of the device that the split
    tables are for. ArgumentError for what is not one of these, KernelError where the SPIR-V was not built.
    """
    shapes.dtype_bytes(dtype)
    page_size = check_int("page_size", page_size, MIN_PAGE_SIZE, MAX_PAGE_SIZE)
    if page_size & (page_size - 1):
        raise ArgumentError(
            f"page_size: got {page_size}, expected a power of two from {MIN_PAGE_SIZE} to {MAX_PAGE_SIZE}"
        )
    compute_units = check_int("compute_units", compute_units, 1)
    chosen = list(attn_shapes)
    for shape in chosen:
        if not isinstance(shape, AttnShape):
            raise ArgumentError(f"attn_shapes: got {shape!r}, expected AttnShapes")
    variants = {
        kernels.attend(build, kv, fresh).name: {"build": build, "dtype": kv, "fresh": fresh}
        for build in kernels.BUILDS
        for kv in DTYPE_BYTES
        for fresh in (False, True)
    }
    modules = []
    for decl in kernels.KERNELS:
        code = load_spirv(decl)
        modules.append(_kernel(decl, hashlib.sha256(code).hexdigest(), len(code), variants.get(decl.name, {})))
    build = build_record()
    return {
        "format": FORMAT,
        "version": VERSION,
        "package": {"name": "zinc-attn", "version": __version__},
        "build": {"compiler": build["compiler"], "sources_sha256": build["sources_sha256"]},
        "vulkan": {
            "api_version": "1.1",
            "features": [],
            "extensions": [],
            "storage_buffers_per_stage": max(len(decl.bindings) for decl in kernels.KERNELS),
            "subgroup_size": {
                "request": limits.WAVE,
                "how": "VkPipelineShaderStageRequiredSubgroupSizeCreateInfo, where Vulkan 1.3 or "
                "VK_EXT_subgroup_size_control offers subgroupSizeControl for compute and "
                f"minSubgroupSize <= {limits.WAVE} <= maxSubgroupSize; else nothing",
                "require_full_subgroups": False,
                "for": "speed only: the modules use no subgroup operation and give the same bits at every size",
            },
        },
        "expressions": "Python integer expressions; ceil_div(a, b) is the quotient rounded up, log2 of a power of two",
        "inputs": INPUTS,
        "quantities": {**_described(SIZES), **_described(QUANTITIES)},
        "kernels": modules,
        "work": _work(),
        "buffers": {name: {"bytes": expression, "meaning": meaning} for name, (expression, meaning) in BUFFERS.items()},
        "dtypes": {name: {**_dtype(name), "encoding": ENCODINGS[name]} for name in DTYPE_BYTES},
        "cache": {"element": "uint32", "layout": CACHE_LAYOUT, "index": CACHE_INDEX},
        "rows": {"element": "uint32", "layout": ROW_LAYOUT, "index": ROW_INDEX},
        "split_rule": _split_rule(),
        "dispatch": list(DISPATCH),
        "constants": _constants(),
        "reduction": list(REDUCTION),
        "shapes": [_shape(shape, dtype, page_size, compute_units) for shape in chosen],
    }


def export(
    directory: PathLike,
    attn_shapes: Iterable[AttnShape] = (),
    *,
    dtype: str = "f16",
    page_size: int = 256,
    compute_units: int = 64,
) -> dict[str, Any]:
    """Write the SPIR-V modules and manifest.json to ``directory``, and return the manifest; see ``manifest``.

    Each file appears under its name when it is complete, the manifest last; files of these names are replaced. The file
    and what is returned begin with ``manifest_sha256``, see ``sealed``.
    ArgumentError also where the directory cannot be written.
    """
    target = check_path("directory", directory)
    if os.path.exists(target) and not os.path.isdir(target):
        raise ArgumentError(f"directory: got {target}, which is a file, expected a directory or a new name")
    if not isinstance(attn_shapes, Iterable) or hasattr(attn_shapes, "dtype"):  # arrays of no axes do not iterate
        raise ArgumentError(f"attn_shapes: got {shown(attn_shapes)}, expected a list of AttnShapes")
    made = manifest(attn_shapes, dtype=dtype, page_size=page_size, compute_units=compute_units)
    hint = "choose another directory"
    for decl in {decl.file: decl for decl in kernels.KERNELS}.values():
        write_file(target / decl.file, load_spirv(decl), hint)
    text = json.dumps({DIGEST: "0" * 64, **made}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    data = sealed(text.encode())
    write_file(target / MANIFEST, data, hint)
    found: dict[str, Any] = json.loads(data)
    return found


def sealed(text: bytes) -> bytes:
    """A manifest's bytes with their checksum in place: that of the bytes with 64 zeros there.

    A reader finds the place without parsing: the first ``"manifest_sha256": "`` of the file. ManifestError without one.
    """
    at = _digest_at(text)
    zeros = text[:at] + b"0" * 64 + text[at + 64 :]
    return text[:at] + hashlib.sha256(zeros).hexdigest().encode() + text[at + 64 :]


def _digest_at(text: bytes) -> int:
    """Where the 64 digits of a manifest's checksum begin."""
    before = f'"{DIGEST}": "'.encode()
    at = text.find(before) + len(before)
    if before not in text or text[at + 64 : at + 65] != b'"':
        raise ManifestError(f"manifest: it has no {DIGEST} of 64 digits; export again")
    return at


def load_manifest(path: PathLike) -> dict[str, Any]:
    """The manifest at ``path`` (the file, or its directory), with its version and all checksums verified.

    ManifestError where a file is missing, is no manifest, has another version, or was changed by as much as a byte: the
    manifest or a module. ArgumentError: ``path`` is no path.
    """
    file = check_path("path", path)
    file = file / MANIFEST if os.path.isdir(file) else file  # False, and no error, also for a name that is too long
    try:
        text = read_regular(file, MOST_BYTES)
        data = json.loads(text)
    except OSError as error:
        raise ManifestError(
            f"{plain(file)}: cannot be read: {error.strerror}; make it with zinc-attn export DIR"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{file}: not JSON: {error}; make it with zinc-attn export DIR") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        given = data.get("format") if isinstance(data, dict) else data
        raise ManifestError(f"{file}: got format {given!r}, expected {FORMAT!r}")
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version != VERSION:
        raise ManifestError(
            f"{file}: got version {version!r}, expected {VERSION}; export again with the zinc-attn that reads it"
        )
    if text != (right := sealed(text)):
        at = _digest_at(text)
        raise ManifestError(
            f"{file}: got {DIGEST} {plain(text[at : at + 64].decode(errors='replace'))}, expected "
            f"{right[at : at + 64].decode()}; the file was changed, export again"
        )
    modules = data.get("kernels")
    if not isinstance(modules, list) or not modules:
        raise ManifestError(f"{file}: it has no list of kernels; export again")
    for module in modules:
        _check_module(file, module)
    return data


def _check_module(file: Path, module: Any) -> None:
    """Refuse a module that is not beside the manifest as the manifest describes it."""
    name = module.get("file") if isinstance(module, dict) else None
    if not isinstance(name, str) or name != Path(name).name or not name.endswith(".spv"):
        raise ManifestError(f"{file}: got the file name {name!r} for a kernel, expected one ending in .spv beside it")
    try:
        digest = hashlib.sha256(read_regular(file.parent / name, MOST_BYTES)).hexdigest()
    except OSError as error:
        raise ManifestError(f"{file.parent / name}: cannot be read: {error.strerror}; export again") from error
    if digest != module.get("sha256"):
        raise ManifestError(
            f"{file.parent / name}: got SHA-256 {digest}, expected {module.get('sha256')}; export again, nothing else "
            "goes with this manifest"
        )
