"""The figures of the model that no document gives and no compiled program shows, and what another value would change.

With the values below, in float16 on an R9700: 16/2/256 reaches 20.7 % at 1k, 82.2 % at 8k and 91.6 % at 128k keys of
the peak bandwidth; at 32k keys its 8 rows take 2.32 times as long as one; where a prefix of 32k keys is shared, 8
requests of 32/8/128 are 4.78 times faster than alone. docs/cost-model.md has the values' origins; a test checks this.
"""

from typing import Final

# Share of the peak rate that a long read reaches. llama.cpp at 224K on an R9700 reads about 610 of 644.6 GB/s.
READ_EFFICIENCY: Final = 0.95  # if 1.0: 96.4 % at 128k
# A memory read while memory is not saturated.
LATENCY_NS: Final = 400.0  # if 600.0: 81.3 % at 8k, 91.6 % at 128k
# A read from the cache in which partial states wait for pass 2.
NEAR_NS: Final = 200.0  # if 400.0: 81.2 % at 8k
# Sharpness of the bend between too few bytes in flight and full memory: time = (a^p + b^p)^(1/p).
KNEE: Final = 4.0  # if 2.0: 76.8 % at 8k, 88.4 % at 128k
# First workgroup: launch, then the work words and the page table, one after the other.
START_US: Final = 1.0  # if 3.0: 77.3 % at 8k
# Barrier between two dispatches: drain, invalidate, launch.
GAP_US: Final = 2.0  # if 4.0: 77.3 % at 8k
# A main loop's trip waits for scalar loads and addresses before its vector loads.
TRIP_CYCLES: Final = 100  # if 200: 20.0 % at 1k
# A leaf's waits outside the main loops: LDS round trips of the maximum and the weights.
LEAF_CYCLES: Final = 1500  # if 3000: 20.1 % at 1k
# A round of the node build's fold: two barriers, an LDS round trip, eight merges.
FOLD_CYCLES: Final = 400  # if 800: 20.0 % at 1k
# Keys that a neighbor in the grid just read come so many times faster than from memory.
L2_RATE: Final = 6.0  # if 3.0: 8 rows take 2.71 times as long
# Partial states, and keys of other requests, that the caches hold move so many times faster than memory reads.
CACHED_RATE: Final = 2.5  # if 1.25: 3.96 times faster
# Pass 2 adds a node to the total: four dependent operations of five cycles (it issues 11).
MERGE_FOLD_CYCLES: Final = 20  # if 40: 81.9 % at 8k, 91.6 % at 128k
# LDS round trips and barriers of a round of pass 2.
MERGE_WAIT_CYCLES: Final = 500  # if 1000: 81.8 % at 8k
# The total goes through the LDS to the next wave of pass 2, after a barrier.
MERGE_TURN_CYCLES: Final = 100  # if 200: 82.1 % at 8k
