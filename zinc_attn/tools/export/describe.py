"""The manifest, generated from the declarations, so that it cannot differ from this package's dispatches."""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

from ... import __version__, limits
from ...cache.pages import PagePool
from ...canonical import constants
from ...checks import check_int
from ...dtypes import storage_dtype
from ...errors import ArgumentError
from ...kernels import declarations as kernels
from ...kernels.contract import evaluate_all, formulas, meanings, structure
from ...kernels.declarations import KernelDecl
from ...kernels.formulas import evaluate
from ...kernels.questions import questions
from ...kernels.split_rule import SPLIT_RULE
from ...runtime.device import build_record, load_spirv
from ...shapes import AttnShape, check_kv_layout, row_format
from ...storage import STORAGE, storage_index, storage_types

FORMAT: Final = "zinc_attn export"
VERSION: Final = 10
KINDS: Final = ("gpu", "cpu")
OF_KIND: Final = ("chunks", "rows_ahead", "pass_sums", "chunks_ahead", "merge_workgroup_size")
LOCAL_SIZES: Final = {"attend": "workgroup_size", "merge": "merge_workgroup_size"}  # invocations along x
RECORDS: Final = ("header", "item", "row", "append", "copy", "head")  # of the work buffer


def declared_constants() -> dict[str, Any]:
    """Every number of the canonical reduction and of the limits, and pass 2's, by its name."""
    declared = {**vars(constants), **vars(limits), "MERGE_DIMS": kernels.MERGE_DIMS}
    return {name: x for name, x in declared.items() if name.isupper() and isinstance(x, int | float | tuple)}


def _constant(value: Any) -> dict[str, Any]:
    """A number, or several, and its float32 bits if it is a float."""
    if isinstance(value, tuple):
        parts = [_constant(x) for x in value]
        return {key: [part[key] for part in parts] for key in parts[0]}
    if isinstance(value, float):
        return {"value": value, "float32_bits": f"0x{kernels.float_bits(value):08X}"}
    return {"value": value}


def _record(name: str) -> dict[str, Any]:
    values, types, fields = formulas(f"work.{name}"), meanings("types"), []
    for i, (field, meaning) in enumerate(getattr(kernels, name.upper()).items()):
        kind = types.get(f"{name}.{field}", "uint32")
        told = {"value": values[field][0], "meaning": meaning}
        fields.append({"name": field, "word": i, "byte": 4 * i, "type": kind, **told})
    return {"words": getattr(kernels, f"{name.upper()}_WORDS"), "fields": fields}


def _kernel(decl: KernelDecl) -> dict[str, Any]:
    key, code, roles = decl.family, load_spirv(decl), meanings("roles")
    told = meanings(f"{key}.grid")
    elements, values = _described(f"{key}.bindings", "element"), _described(f"{key}.constants", "value")
    bindings = [{"binding": i, **asdict(binding), **elements[binding.name]} for i, binding in enumerate(decl.bindings)]
    fixed = {name: {"value": str(value), "fixed": value} for name, value in decl.fixed}  # the same for every shape
    numbered = [
        {"id": i, "offset": 4 * i, "size": 4, "type": "uint32", "name": name, **values[name], **fixed.get(name, {})}
        for i, name in enumerate(decl.constant_names)
    ]
    return {
        "name": decl.name,
        "family": key,
        "role": roles[decl.name if decl.name in roles else key],
        "file": decl.file,
        "sha256": hashlib.sha256(code).hexdigest(),
        "bytes": len(code),
        "entry_point": "main",
        "local_size": [LOCAL_SIZES.get(decl.name, f"{limits.WAVE}"), "1", "1"],
        "bindings": bindings,
        "push_constants": [],
        "specialization_constants": numbered,
        "grid": {axis: {"workgroups": n, "each": told[axis]} for axis, n in zip("xyz", decl.grid, strict=True)},
    }


def _shape(shape: AttnShape, dtype: str, page_size: int, compute_units: int, kv_layout: str) -> dict[str, Any]:
    """All numbers that follow from shape, dtype, page size and layout."""
    row_format(shape, dtype)  # refuses a dtype that the shape does not take
    names = {**asdict(shape), "latent": int(shape.latent), **storage_names(dtype), "page_size": page_size}
    names["nhd"] = int(kv_layout == "NHD")
    sizes, of_kind = evaluate_all(formulas("sizes"), names), formulas("quantities")
    kinds = {}
    for kind in KINDS:
        known = {**names, **sizes, "kind": kind, "softcap": 0, "arithmetic": 0, "biases": 0, "masked": 0}
        known |= evaluate_all({name: of_kind[name] for name in OF_KIND}, known)
        values = {
            decl.family: {name: evaluate(formulas(f"{decl.family}.constants")[name][0], known) for name in decl.spec}
            for decl in kernels.KERNELS
        }
        kinds[kind] = {"specialization": values}
    return {
        "shape": str(shape),
        **asdict(shape),
        "dtype": dtype,
        "page_size": page_size,
        "kv_layout": kv_layout,
        "compute_units": compute_units,
        "sizes": sizes,
        "most_splits": SPLIT_RULE.values(0, compute_units, shape.kv_heads, shape.head_chunks, 1)["MOST_SPLITS"],
        "kv_bytes_per_token": 4 * sizes["token_words"],
        "state_bytes": 4 * sizes["state_words"],
        "kinds": kinds,
    }


def storage_names(dtype: str) -> dict[str, int]:
    """The names in formulas that K's and V's types determine."""
    names: dict[str, int] = {}
    for side, kind in zip("kv", storage_types(dtype), strict=True):
        names |= {f"{side}_storage": storage_index(kind), f"{side}_bits": kind.bits}
        names |= {f"{side}_halves": kind.halves, f"{side}_fifth": int(kind.fifth_bits)}
    return names


def _described(section: str, key: str = "expression") -> dict[str, dict[str, str]]:
    return {name: {key: formula, "meaning": meaning} for name, (formula, meaning) in formulas(section).items()}


def _primitives() -> dict[str, Any]:
    """The question of a host to a device before its first kernel."""
    numbers, results, *_ = questions()
    return {
        **meanings("primitives"),
        "workgroups": list(kernels.PRIMITIVES.groups(())),
        "number_names": list(kernels.NUMBERS),
        "result_names": list(kernels.RESULTS),
        "numbers": numbers.tolist(),
        "results": results.tolist(),
    }


def _multiply_add() -> dict[str, Any]:
    """The question of a host to a device before its first call with arithmetic "fused"."""
    *_, triples, sums = questions()
    workgroups = list(kernels.MULTIPLY_ADD.groups((0,)))
    return {**meanings("multiply_add"), "workgroups": workgroups, "triples": triples.tolist(), "sums": sums.tolist()}


def manifest(
    attn_shapes: Iterable[AttnShape] = (),
    *,
    dtype: str = "f16",
    page_size: int = 256,
    compute_units: int = 64,
    kv_layout: str = "tiles",
) -> dict[str, Any]:
    """The manifest as a JSON-serializable dict; section ``shapes`` has the sizes of ``attn_shapes``.

    dtype, page_size and kv_layout of the cache, as ``KVCache`` takes them; compute_units: of the device whose
    splits they name. ArgumentError: a wrong value of these; KernelError: the SPIR-V was not built.
    """
    dtype = storage_dtype(dtype)
    page_size = PagePool(1, page_size).page_size  # refuses a wrong one
    compute_units, kv_layout = check_int("compute_units", compute_units, 1), check_kv_layout(kv_layout)
    chosen = list(attn_shapes)
    for shape in chosen:
        if not isinstance(shape, AttnShape):
            raise ArgumentError(f"attn_shapes: got {shape!r}, expected AttnShapes")
    build, words, told = build_record(), "uint32", meanings("constants")
    records = {name: _record(name) for name in RECORDS}
    return {
        "format": FORMAT,
        "version": VERSION,
        "package": {"name": "zinc-attn", "version": __version__},
        "build": {"compiler": build["compiler"], "sources_sha256": build["sources_sha256"]},
        "vulkan": structure("vulkan"),
        "expressions": "Python integer expressions; ceil_div(a, b) is the quotient rounded up, log2 of a power of two",
        "inputs": dict(meanings("inputs")),
        "quantities": {**_described("sizes"), **_described("quantities")},
        "kernels": [_kernel(decl) for decl in kernels.KERNELS],
        "work": {"element": words, **meanings("work"), **records, "no_token": kernels.NO_TOKEN},
        "buffers": _described("buffers", "bytes"),
        "dtypes": {name: {**asdict(kind), "encoding": meanings("encodings")[name]} for name, kind in STORAGE.items()},
        "cache": {"element": words, "layout": dict(meanings("cache.layout")), "index": dict(meanings("cache.index"))},
        "rows": {"element": words, **meanings("rows"), "index": dict(meanings("rows.index"))},
        "split_rule": _described("split_rule"),
        "dispatch": list(structure("dispatch").values()),
        "primitives": _primitives(),
        "multiply_add": _multiply_add(),
        "constants": {name: {**_constant(x), "meaning": told[name]} for name, x in declared_constants().items()},
        "reduction": list(meanings("reduction").values()),
        "shapes": [_shape(shape, dtype, page_size, compute_units, kv_layout) for shape in chosen],
    }
