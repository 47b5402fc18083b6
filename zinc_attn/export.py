"""Reading an exported folder: the public names of ``tools.export``."""

from .tools.export import ManifestError, evaluate, evaluate_all, export, load_manifest, manifest

__all__ = ["ManifestError", "evaluate", "evaluate_all", "export", "load_manifest", "manifest"]
