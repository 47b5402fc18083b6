"""The time of every step of a decode that grows from nothing, through all layers: what shows a stall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...cache.kv_cache import KVCache
from ...checks import check_int
from ...decode.attention import Attention
from ...runtime.device import Device
from ...shapes import AttnShape
from ..harness.bits import Output, compare, oracle
from ..harness.inputs import Inputs
from ..harness.plots import Line, lines_png
from ..harness.progress import Progress, Steps
from .rows import Row

NEIGHBORS: Final = 16  # steps on each side whose median a step is compared with
STALL_RATIO: Final = 3.0  # a step is a stall beyond so many times that median, or so many milliseconds above it
STALL_MS: Final = 50.0
CHECKED: Final = 64  # every so many steps, and behind the last one, the last layer is compared with the oracle
_TOLD: Final = 32  # steps between two reports of progress


class DecodeSpec(NamedTuple):
    """What is decoded: ``tokens`` steps of one sequence through ``layers`` layers. prepare: call ``prepare`` first."""

    shape: AttnShape
    layers: int
    tokens: int
    dtype: str = "f16"
    prepare: bool = True
    seed: int = 0


@dataclass(frozen=True)
class DecodeRun:
    """The steps of one device and dispatcher. differ: outputs that were compared and are not the oracle's."""

    rows: list[Row]
    prepare_s: float
    recordings: int
    compared: int
    differ: int


def decode_run(device: Device, spec: DecodeSpec, progress: Progress | None = None) -> DecodeRun:
    """Decode, and compare sampled outputs with the oracle. Errors: those of the cache and of its calls."""
    tokens, layers = check_int("tokens", spec.tokens, 1), check_int("layers", spec.layers, 1)
    data = Inputs.normal(spec.shape, tokens, spec.dtype, spec.seed)
    steps = Steps(progress, tokens)
    with KVCache(device, spec.shape, layers, tokens, spec.dtype) as cache:
        attention, sequence = Attention(cache), cache.new_sequence()
        begin = perf_counter()
        if spec.prepare:
            steps.begin("preparing", 0)
            attention.prepare(tokens)
        prepare_s, seconds, compared, differ = perf_counter() - begin, np.zeros(tokens), 0, 0
        for at in range(tokens):
            if at % _TOLD == 0:
                steps.begin(f"{device.runtime.name}: {at:,} of {tokens:,} keys", min(_TOLD, tokens - at))
            k, v = data.k[at : at + 1], data.v[at : at + 1]
            begin = perf_counter()
            for layer in range(layers):
                found = Output(*attention(data.q, sequence, layer, k, v, return_lse=True))
            seconds[at] = perf_counter() - begin
            if at % CHECKED == 0 or at == tokens - 1:
                want = oracle(data.q, data.k[: at + 1], data.v[: at + 1], spec.dtype, 1)
                compared, differ = compared + 1, differ + (compare(found, want) is not None)
        recordings = attention.recordings
    steps.finish()
    return DecodeRun(_rows(device, spec, 1e3 * seconds), prepare_s, recordings, compared, differ)


def _rows(device: Device, spec: DecodeSpec, ms: NDArray[np.float64]) -> list[Row]:
    rows, fields = [], {"layers": spec.layers, "prepared": spec.prepare}
    for at, mine in enumerate(ms.tolist()):
        median = float(np.median(ms[max(at - NEIGHBORS, 0) : at + NEIGHBORS + 1]))
        stall = mine > STALL_RATIO * median or mine > median + STALL_MS
        step = {"ms": mine, "neighbors_ms": median, "stall": stall}
        rows.append(Row.of("steps", device, spec.shape, spec.dtype, at + 1, **fields, **step))
    return rows


def steps_png(runs: Sequence[DecodeRun], title: str) -> bytes:
    """A PNG of the time of every step over the context, a line per run."""
    lines = []
    for run in runs:
        first = run.rows[0]
        how = f"{first.runtime}, {'prepared' if first.prepared else 'not prepared'}"
        lines.append(Line(how, [(row.context, row.ms) for row in run.rows], "-", width=0.7))
    about = f"{runs[0].rows[0].device} · {runs[0].rows[0].driver}"
    return lines_png({about: lines}, title, "ms per step, all layers", contexts=False)
