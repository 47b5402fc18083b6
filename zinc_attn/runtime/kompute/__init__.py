"""The Kompute dispatcher, the only importer of ``kp``.

``buffers`` makes kp's tensors, ``recording`` turns steps into kp's operations, and ``lifetime`` knows when kp's objects
may be destroyed. ``runtime`` makes a ``Runtime`` of them.

Kompute as published ignores most of Vulkan's errors. The build of scripts/build_kp.sh raises them, and no other is
used.
"""

from .runtime import KomputeRuntime, load_kp

__all__ = ["KomputeRuntime", "load_kp"]
