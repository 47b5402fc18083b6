"""The operation for runtimes without Python: the SPIR-V modules, and one manifest.json that says how to run them."""

from ...kernels.contract import evaluate_all
from ...kernels.formulas import evaluate
from .describe import manifest
from .files import MANIFEST, ManifestError, export, load_manifest

__all__ = ["MANIFEST", "ManifestError", "evaluate", "evaluate_all", "export", "load_manifest", "manifest"]
