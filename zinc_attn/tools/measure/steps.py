"""The time of every step of a decode that grows from nothing, through all layers, which shows stalls."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from time import perf_counter
from typing import Final

import numpy as np

from ...cache.kv_cache import KVCache
from ...decode.attention import Attention
from ...runtime.device import Device
from ..harness.bits import Judge, Output, compare, oracle
from ..harness.progress import Progress, Steps
from .rows import Row
from .spec import CallSpec

NEIGHBORS: Final = 16  # steps on each side whose median a step is compared with
STALL_RATIO: Final = 3.0  # a step beyond this many times the median, or STALL_MS above it, is a stall
STALL_MS: Final = 50.0
CHECKED: Final = 64  # steps between comparisons of the last layer with the oracle; the last step has one, too
_TOLD: Final = 32  # steps between two reports of progress


def decode_steps(
    devices: Sequence[Device],
    specs: Sequence[CallSpec],
    *,
    prepare: bool,
    progress: Progress | None = None,
    judge: Judge = oracle,
) -> Iterator[Row]:
    """Decode the contexts 1, 2, … of each spec, one sequence on one device after the other: a row per step.

    prepare: whether ``Attention.prepare`` comes first, as a row. judge: see ``measure_calls``. Errors: the cache's.
    """
    for device, spec in product(devices, specs):
        steps, tokens = Steps(progress, len(spec.contexts)), len(spec.contexts)
        blank, data = Row(spec, device.info, device.runtime.name, 0, "auto"), spec.inputs(tokens)
        with KVCache(device, spec.shape, spec.layers, tokens, spec.dtype) as cache:
            attention, sequence = Attention(cache), cache.new_sequence()
            if prepare:
                steps.begin("preparing", 0)
                begin = perf_counter()
                attention.prepare(tokens)
                yield replace(blank, measure="prepare", seconds=(perf_counter() - begin,))
            for step in range(tokens):
                if step % _TOLD == 0:
                    steps.begin(f"{device.runtime.name}: {step:,} of {tokens:,} keys", min(_TOLD, tokens - step))
                k, v = data.k[step : step + 1], data.v[step : step + 1]
                begin = perf_counter()
                for layer in range(spec.layers):
                    output = Output(*attention(data.q, sequence, layer, k, v, return_lse=True))
                seconds = (perf_counter() - begin) / spec.layers
                row = replace(blank, context=step + 1, measure="step", seconds=(seconds,))
                if step % CHECKED == 0 or step == tokens - 1:
                    want = judge(data.q, data.k[: step + 1], data.v[: step + 1], spec.dtype, 1)
                    wrong = compare(output, want)
                    row = row.failed(wrong.text()) if wrong else replace(row, verified="bits (sampled)")
                yield row
        steps.finish()


def stalls(rows: Sequence[Row]) -> list[Row]:
    """The steps among ``rows``, all timed, that took far longer than their neighbors."""
    ms = np.array([row.figures["attention_ms_per_step"] for row in rows], float)
    medians = [np.median(ms[max(index - NEIGHBORS, 0) : index + NEIGHBORS + 1]) for index in range(len(rows))]
    beyond = [x > STALL_RATIO * median or x > median + STALL_MS for x, median in zip(ms, medians, strict=True)]
    return [row for row, stalled in zip(rows, beyond, strict=True) if stalled]
