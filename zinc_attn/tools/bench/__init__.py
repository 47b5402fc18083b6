"""Times of decode attention beside a read yardstick and other attention: verify, then time, in one program.

Everything of one shape and context takes turns, runtimes and layouts alike, so that ratios come from the same seconds.
The baselines follow, since their thread pools spin on after each call. What has wrong bits has no time.
"""

from .measure import bench
from .plots import bench_png
from .report import COLUMNS, HOST_COLUMNS, table_cells
from .rows import DEVICE_CLOCK, HOST_CLOCK, BenchRow, BenchSpec

__all__ = ["COLUMNS", "DEVICE_CLOCK", "HOST_CLOCK", "HOST_COLUMNS", "BenchRow", "BenchSpec"]
__all__ += ["bench", "bench_png", "table_cells"]
