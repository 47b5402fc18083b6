"""The operation for runtimes without Python: the SPIR-V modules, and one manifest.json that says how to run them."""

from .describe import manifest
from .files import MANIFEST, ManifestError, export, load_manifest
from .formulas import evaluate, evaluate_all

__all__ = ["MANIFEST", "ManifestError", "evaluate", "evaluate_all", "export", "load_manifest", "manifest"]
