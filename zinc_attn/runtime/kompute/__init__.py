"""The Kompute dispatcher, the only importer of ``kp``.

``binding`` knows the build of kp by scripts/build_kp.sh, ``commands`` turns steps into kp's operations, and ``runtime``
is plain Vulkan's with these.
"""

from .binding import load_kp
from .runtime import KomputeRuntime, host_info

__all__ = ["KomputeRuntime", "host_info", "load_kp"]
