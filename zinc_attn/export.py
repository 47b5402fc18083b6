"""Reading an exported folder: the public names of ``tools.export``."""

from .tools.export import ManifestError, export, load_manifest, manifest

__all__ = ["ManifestError", "export", "load_manifest", "manifest"]
