"""Pass 2 alone: any number of states from any absolute unit, in workgroups of one wave and of eight."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from support import same

import zinc_attn as za
from zinc_attn.canonical import state as algebra
from zinc_attn.canonical.constants import LEAVES_PER_NODE
from zinc_attn.kernels import declarations as kernels
from zinc_attn.kernels.records import WorkBuffer
from zinc_attn.runtime.protocol import Dispatch, Use

# states of a row, absolute index of the first one's unit
CASES = ((0, 0), (1, 0), (1, 37), (8, 5), (32, 0), (33, 31), (100, 3), (256, 0), (257, 290), (600, 71))


def canonical(states: algebra.State, unit: int, leaves: bool) -> algebra.State:
    """States (count, heads ...) folded in order: leaves to nodes at absolute multiples of 8, nodes to the total."""
    m, total, o = states
    count, heads, dim = o.shape
    groups = (unit + np.arange(count)) // LEAVES_PER_NODE if leaves else np.arange(count)
    empty = algebra.empty_state((heads,), dim)
    one = [
        reduce(algebra.merge, [algebra.State(m[i], total[i], o[i]) for i in np.nonzero(groups == g)[0]], empty)
        for g in np.unique(groups)
    ]
    return reduce(algebra.merge, one, empty)


@pytest.mark.parametrize(  # a CPU device has 32 lanes and a GPU 256; any other number shows with one size
    ("heads", "dim", "lanes"),
    [(*size, lanes) for size in ((3, 64), (2, 80), (2, 256)) for lanes in (32, 256)] + [(3, 64, 128)],
)
def test_states_fold_in_the_canonical_order(any_device, heads, dim, lanes):
    runtime, rng = any_device.runtime, np.random.default_rng(7)
    cases = [(n, unit, leaves) for leaves in (True, False) for n, unit in CASES]
    counts = [n for n, *_ in cases]
    starts = np.concatenate([[0], np.cumsum(counts)])
    size, rows = int(starts[-1]), len(cases)
    o = rng.standard_normal((size, heads, dim), np.float32)
    m = np.rint(rng.normal(0, 12, (size, heads))).astype(np.float32)
    total = (1 + 63 * rng.random((size, heads))).astype(np.float32)
    gone = rng.random((size, heads)) < 0.05  # of no keys
    m[gone], total[gone], o[gone] = algebra.empty_state((1,), dim)[0][0], 0, 0

    work = WorkBuffer(0, rows, 0, 1)
    work.set_shape(za.AttnShape(heads, heads, dim), heads)
    work.set(state_stride=size, rows=rows)
    for i, (n, unit, leaves) in enumerate(cases):
        work.rows[i] = starts[i], n, unit, 1 if leaves else LEAVES_PER_NODE, 0, 0, 0, 0
    words = np.concatenate((o.ravel(), np.stack([m, total], -1).ravel())).view(np.uint32)
    buffers = [runtime.buffer(4 * len(one), Use.INPUT) for one in (work.words, words)]
    buffers.append(runtime.buffer(4 * rows * heads * (dim + 1), Use.OUTPUT))
    runtime.write(buffers[0], work.words)
    runtime.write(buffers[1], words)
    kernel = any_device.kernel(kernels.MERGE, (dim, lanes))
    recording = runtime.record([Dispatch(kernel, tuple(buffers), (-(-dim // kernels.MERGE_DIMS), heads, rows))])
    runtime.run(recording)
    got = runtime.read(buffers[2]).view(np.float32)
    recording.close()
    for buffer in buffers:
        buffer.close()
    out, lse = got[: rows * heads * dim].reshape(rows, heads, dim), got[rows * heads * dim :].reshape(rows, heads)
    for i, (n, unit, leaves) in enumerate(cases):
        part = slice(starts[i], starts[i + 1])
        state = canonical(algebra.State(m[part], total[part], o[part]), unit, leaves)
        same((out[i], lse[i]), algebra.normalize(state), (n, unit, leaves))
