"""The Kompute dispatcher, the only importer of ``kp``.

``binding`` knows scripts/build_kp.sh's kp, ``commands`` makes kp's operations, ``runtime`` is Vulkan's with these.
"""

from .binding import load_kp
from .runtime import KomputeRuntime, host_info

__all__ = ["KomputeRuntime", "host_info", "load_kp"]
