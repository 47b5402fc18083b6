"""What several test files share."""

from __future__ import annotations

import os

FULL = os.environ.get("ZINC_ATTN_TEST_FULL") == "1"
RUNTIMES = ("kompute", "vulkan")
# the machine's best device, and SwiftShader, each on both dispatchers
DRIVERS = [(driver, runtime) for driver in ("default", "swiftshader") for runtime in RUNTIMES]
