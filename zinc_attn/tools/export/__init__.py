"""The operation for runtimes without Python: the SPIR-V modules, and one manifest.json that says how to run them."""

from .arithmetic import CONSTANTS, ENCODINGS
from .describe import KINDS, dtype_bits, family, manifest, split_rule_formulas, split_table
from .files import MANIFEST, ManifestError, export, load_manifest
from .formulas import BUFFERS, CACHE_INDEX, INPUTS, QUANTITIES, ROW_INDEX, SIZES, evaluate, evaluate_all
from .meanings import BINDINGS, FIELDS, GRIDS, SPECIALISATION

__all__ = [
    "BINDINGS",
    "BUFFERS",
    "CACHE_INDEX",
    "CONSTANTS",
    "ENCODINGS",
    "FIELDS",
    "GRIDS",
    "INPUTS",
    "KINDS",
    "MANIFEST",
    "QUANTITIES",
    "ROW_INDEX",
    "SIZES",
    "SPECIALISATION",
    "ManifestError",
    "dtype_bits",
    "evaluate",
    "evaluate_all",
    "export",
    "family",
    "load_manifest",
    "manifest",
    "split_rule_formulas",
    "split_table",
]
