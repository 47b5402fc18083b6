"""The manifest: what is generated from the declarations, so that it cannot differ from what this package dispatches."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

from ... import __version__, limits
from ...cache.pages import PagePool
from ...canonical import constants, primitives
from ...canonical.constants import KEYS_PER_LEAF, LEAVES_PER_NODE
from ...checks import check_int
from ...dtypes import storage_dtype
from ...errors import ArgumentError
from ...kernels import declarations as kernels
from ...kernels.declarations import KernelDecl
from ...kernels.tuning import node_shared_bytes
from ...limits import MAX_CONTEXT
from ...planning import splits
from ...runtime.device import build_record, load_spirv
from ...shapes import AttnShape, row_format
from ...storage import STORAGE, storage_index, storage_types
from .arithmetic import CONSTANTS, DISPATCH, ENCODINGS, REDUCTION
from .formulas import (
    BUFFERS,
    CACHE_INDEX,
    CACHE_LAYOUT,
    INPUTS,
    QUANTITIES,
    ROW_INDEX,
    ROW_LAYOUT,
    SIZES,
    evaluate,
    evaluate_all,
)
from .meanings import BINDINGS, FIELDS, GRIDS, ROLES, SPECIALIZATION, TYPES

FORMAT: Final = "zinc_attn export"
VERSION: Final = 5
KINDS: Final = ("gpu", "cpu")


def family(decl: KernelDecl) -> str:
    """The key of a kernel in the tables of ``meanings``: the name of its source."""
    return decl.source.removesuffix(".comp")


def _constant(value: Any) -> dict[str, Any]:
    """A number, or several, and its float32 bits if it is a float."""
    if isinstance(value, tuple):
        parts = [_constant(x) for x in value]
        return {key: [part[key] for part in parts] for key in parts[0]}
    if isinstance(value, float):
        return {"value": value, "float32_bits": f"0x{kernels.float_bits(value):08X}"}
    return {"value": value}


def _constants() -> dict[str, Any]:
    """Every number of the canonical reduction and of the limits, and pass 2's."""
    declared = {**vars(constants), **vars(limits)}
    found = {n: x for n, x in declared.items() if n.isupper() and isinstance(x, int | float | tuple)}
    found["MERGE_DIMS"] = kernels.MERGE_DIMS
    return {name: {**_constant(value), "meaning": CONSTANTS[name]} for name, value in found.items()}


def _record(name: str, fields: Iterable[str], words: int) -> dict[str, Any]:
    """A record of the work buffer."""
    described = []
    for i, field in enumerate(fields):
        key = f"{name}.{field}"
        value, meaning = FIELDS[key]
        place = {"name": field, "word": i, "byte": 4 * i, "type": TYPES.get(key, "uint32")}
        described.append({**place, "value": value, "meaning": meaning})
    return {"words": words, "fields": described}


def _work() -> dict[str, Any]:
    """The work buffer."""
    return {
        "element": "uint32",
        "order": "header, item records, row records, append (or copy) records, page ids, then sinks, ALiBi slopes, "
        "scales of heads and masks where there are any; unused words are 0",
        "header": _record("header", kernels.HEADER, kernels.HEADER_WORDS),
        "item": _record("item", kernels.ITEM, kernels.ITEM_WORDS),
        "row": _record("row", kernels.ROW, kernels.ROW_WORDS),
        "append": _record("append", kernels.APPEND, kernels.APPEND_WORDS),
        "copy": _record("copy", kernels.COPY, kernels.COPY_WORDS),
        "no_token": kernels.NO_TOKEN,
    }


def _kernel(decl: KernelDecl, digest: str, size: int) -> dict[str, Any]:
    """A kernel's module and interface."""
    key = family(decl)
    bindings = []
    for i, binding in enumerate(decl.bindings):
        element, meaning = BINDINGS[f"{key}.{binding.name}"]
        bindings.append({"binding": i, **asdict(binding), "element": element, "meaning": meaning})
    numbered, fixed = [], dict(decl.fixed)
    for i, name in enumerate(decl.constant_names):
        value, meaning = SPECIALIZATION[f"{key}.{name}"]
        numbered.append(
            {"id": i, "offset": 4 * i, "size": 4, "type": "uint32", "name": name, "value": value, "meaning": meaning}
        )
        if name in fixed:  # the kernel's own, the same for every shape
            numbered[-1] |= {"value": str(fixed[name]), "fixed": fixed[name]}
    grid = {axis: {"workgroups": n, "each": each} for axis, (n, each) in zip("xyz", GRIDS[key], strict=True)}
    return {
        "name": decl.name,
        "family": key,
        "role": ROLES[decl.name if decl.name in ROLES else key],
        "file": decl.file,
        "sha256": digest,
        "bytes": size,
        "entry_point": "main",
        "local_size": [
            "merge_lanes" if decl is kernels.MERGE else f"{limits.WAVE}",
            f"{LEAVES_PER_NODE}" if decl is kernels.ATTEND["node"] else "1",
            "1",
        ],
        "bindings": bindings,
        "push_constants": [],
        "specialization_constants": numbered,
        "grid": grid,
    }


def split_rule_formulas() -> dict[str, Any]:
    """The planner's split rule as formulas."""
    return {
        "names": {"target": f"ceil_div(compute_units * {splits.WORKGROUPS_PER_UNIT}, kv_heads * head_chunks * q_len)"},
        "first_that_holds": [
            {
                "when": f"kind == 'cpu' and leaves * q_len <= {splits.MAX_CPU_STATES}",
                "splits": "max(leaves, 1)",
                "leaves_per_state": "1",
            },
            {
                "when": f"leaves <= {splits.SINGLE_SPLIT_KEYS // KEYS_PER_LEAF}",
                "splits": "1",
                "leaves_per_state": f"{LEAVES_PER_NODE}",
            },
            {
                "when": f"kind == 'gpu' and leaves < {splits.NODE_KEYS // KEYS_PER_LEAF}",
                "splits": f"min(leaves, target, {splits.MAX_LEAF_SPLITS})",
                "leaves_per_state": f"1 if splits > nodes else {LEAVES_PER_NODE}",
            },
            {"when": "kind == 'gpu' and q_len == 1", "splits": "nodes", "leaves_per_state": f"{LEAVES_PER_NODE}"},
            {"when": "True", "splits": "min(nodes, target)", "leaves_per_state": f"{LEAVES_PER_NODE}"},
        ],
        "boundary": "max(min((first_leaf + split * ceil_div(leaves, leaves_per_state) // splits * leaves_per_state) * "
        f"{KEYS_PER_LEAF}, context_len), begin)",
        "node_workgroups": "a host that uses attend_node has one split per node where kind is 'gpu': it "
        f"begins at begin and at every multiple of {KEYS_PER_LEAF * LEAVES_PER_NODE} above it, with {LEAVES_PER_NODE} "
        "leaves per state",
        "tables": "shapes[].kinds[].splits holds the rule for q_len 1 as rows: from and to are context lengths, both "
        f"included (with a window context_len - {KEYS_PER_LEAF} * first_leaf); the number of splits is splits where "
        "per is 'call', and leaves or nodes where it says so",
    }


def split_table(shape: AttnShape, compute_units: int, kind: str) -> list[dict[str, Any]]:
    """The split rule for one query row as rows of contexts ``from`` ... ``to`` with one unit and one way to count.

    ``splits`` per "call", or one per "leaf" or "node" of the context. Equal to ``plan_splits`` at every context.
    """
    rows = _split_rows(splits.split_target(shape, compute_units, 1), kind)
    return [dict(zip(("from", "to", "splits", "per", "leaves_per_state"), row, strict=True)) for row in rows]


@functools.lru_cache(maxsize=64)
def _split_rows(target: int, kind: str) -> list[tuple[int, int, int, str, int]]:
    """The columns of the table. It looks at every number of leaves, so its loop is kept short."""
    rows: list[tuple[int, int, int, str, int]] = []
    first, number, unit = 0, -1, -1  # of the row: its leaves, and the splits and the unit of the first context
    by_call = by_leaf = by_node = False  # whether all contexts of the row have so many splits
    for leaves in range(MAX_CONTEXT // KEYS_PER_LEAF + 2):
        now, now_unit = splits.splits_for(leaves, target, 1, kind)
        nodes = -(-leaves // LEAVES_PER_NODE)
        call, leaf, node = by_call and now == number, by_leaf and now == leaves, by_node and now == nodes
        behind = leaves * KEYS_PER_LEAF > MAX_CONTEXT
        if behind or now_unit != unit or not (call or leaf or node):
            if leaves:
                begin = (first - 1) * KEYS_PER_LEAF + 1 if first else 0
                way = "call" if by_call else "leaf" if by_leaf else "node"
                rows.append((begin, (leaves - 1) * KEYS_PER_LEAF, number if by_call else 1, way, unit))
            first, number, unit = leaves, now, now_unit
            call, leaf, node = True, now == leaves, now == nodes
        by_call, by_leaf, by_node = call, leaf, node
    return rows


def _shape(shape: AttnShape, dtype: str, page_size: int, compute_units: int) -> dict[str, Any]:
    """Everything that is a number once shape, dtype and page size are known."""
    row_format(shape, dtype)  # refuses a dtype that the shape does not take
    names = {**asdict(shape), "latent": int(shape.latent), **storage_names(dtype), "page_size": page_size}
    sizes = evaluate_all(SIZES, names)
    kinds = {}
    for kind in KINDS:
        known = {**names, **sizes, "kind": kind, "softcap": 0, "alibi": 0, "masked": 0}
        known |= {name: evaluate(QUANTITIES[name][0], known) for name in ("chunks_ahead", "merge_lanes")}
        values: dict[str, dict[str, int]] = {}
        for decl in kernels.KERNELS:
            key = family(decl)
            values[key] = {name: evaluate(SPECIALIZATION[f"{key}.{name}"][0], known) for name in decl.spec}
        kinds[kind] = {"specialization": values, "splits": split_table(shape, compute_units, kind)}
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


def storage_names(dtype: str) -> dict[str, int]:
    """What the formulas know of K's and V's types."""
    found: dict[str, int] = {}
    for of, kind in zip("kv", storage_types(dtype), strict=True):
        sizes = {"storage": storage_index(kind), "bits": kind.bits, "halves": kind.halves, "fifth": kind.fifth_bits}
        found |= {f"{of}_{name}": int(size) for name, size in sizes.items()}
    return found


def _described(table: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, str]]:
    """A table of (expression, meaning) for JSON."""
    return {name: {"expression": expression, "meaning": meaning} for name, (expression, meaning) in table.items()}


def _vulkan() -> dict[str, Any]:
    """What the modules ask of a Vulkan device."""
    return {
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
            "for": "speed only: the modules give the same bits at every size",
        },
        "node_workgroups": {
            "for": "attend_node, which a host need not use",
            "invocations": LEAVES_PER_NODE * limits.WAVE,
            "shared_bytes": node_shared_bytes(limits.MAX_HEADS_PER_WORKGROUP),
            "subgroup_size": f"{limits.WAVE}; others give the same bits slowly",
        },
    }


def _primitives() -> dict[str, Any]:
    """What a host asks a device before its first kernel."""
    numbers, results = primitives.words(kernels.NUMBERS, kernels.RESULTS)
    return {
        "for": "a host runs the kernel primitives once on a device, before any other: where a word of its results is "
        "not as here, the driver computes a float function otherwise, and attention would have other bits",
        "workgroups": [primitives.ROWS // limits.WAVE, 1, 1],
        "number_names": list(kernels.NUMBERS),
        "result_names": list(kernels.RESULTS),
        "numbers": numbers.reshape(-1).tolist(),
        "results": results.reshape(-1).tolist(),
    }


def manifest(
    attn_shapes: Iterable[AttnShape] = (), *, dtype: str = "f16", page_size: int = 256, compute_units: int = 64
) -> dict[str, Any]:
    """The manifest as a JSON-serializable dict; section ``shapes`` has the sizes and split tables of ``attn_shapes``.

    dtype and page_size (tokens, a power of two from 16 on) of the cache; compute_units: of the device that the split
    tables are for. ArgumentError for what is not one of these, KernelError where the SPIR-V was not built.
    """
    dtype = storage_dtype(dtype)
    page_size = PagePool(1, page_size).page_size  # refuses a wrong one
    compute_units = check_int("compute_units", compute_units, 1)
    chosen = list(attn_shapes)
    for shape in chosen:
        if not isinstance(shape, AttnShape):
            raise ArgumentError(f"attn_shapes: got {shape!r}, expected AttnShapes")
    modules = []
    for decl in kernels.KERNELS:
        code = load_spirv(decl)
        modules.append(_kernel(decl, hashlib.sha256(code).hexdigest(), len(code)))
    build = build_record()
    return {
        "format": FORMAT,
        "version": VERSION,
        "package": {"name": "zinc-attn", "version": __version__},
        "build": {"compiler": build["compiler"], "sources_sha256": build["sources_sha256"]},
        "vulkan": _vulkan(),
        "expressions": "Python integer expressions; ceil_div(a, b) is the quotient rounded up, log2 of a power of two",
        "inputs": INPUTS,
        "quantities": {**_described(SIZES), **_described(QUANTITIES)},
        "kernels": modules,
        "work": _work(),
        "buffers": {name: {"bytes": expression, "meaning": meaning} for name, (expression, meaning) in BUFFERS.items()},
        "dtypes": {name: {**asdict(kind), "encoding": ENCODINGS[name]} for name, kind in STORAGE.items()},
        "cache": {"element": "uint32", "layout": CACHE_LAYOUT, "index": CACHE_INDEX},
        "rows": {"element": "uint32", "layout": ROW_LAYOUT, "index": ROW_INDEX},
        "split_rule": split_rule_formulas(),
        "dispatch": list(DISPATCH),
        "primitives": _primitives(),
        "constants": _constants(),
        "reduction": list(REDUCTION),
        "shapes": [_shape(shape, dtype, page_size, compute_units) for shape in chosen],
    }
