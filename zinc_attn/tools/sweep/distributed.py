"""The sweep of one sequence whose nodes lie on MPI ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np

from ...canonical.constants import KEYS_PER_NODE
from ...distributed.ranks import RankError, Ranks
from ...errors import ArgumentError, LimitError
from ...planning.splits import SplitPlan
from ...runtime.device import Device
from ..harness.progress import Progress, Steps, each_point
from ..harness.split_spec import SplitSpec
from ..harness.timing import FEWEST_REPEATS, MOST_REPEATS
from .calls import RankedInputs
from .points import BUDGET_S, Point, oracle_of, samples, time_points
from .rows import SweepRow, SweepSpec

NODES = SplitSpec("nodes", split_size=KEYS_PER_NODE)


def distributed_sweep(
    ranks: Ranks,
    device: Device,
    spec: SweepSpec,
    *,
    progress: Progress | None = None,
    on_row: Callable[[SweepRow], Any] | None = None,
) -> list[SweepRow]:
    """``sweep`` of one sequence whose nodes lie on ``ranks``, each with its ``device``; all make the same call.

    The layout is a split per node, and spec.splits does not count. Every rank compares its bits with the oracle's and
    with those of rank 0. A row says the same on all ranks but for its device, bytes and times; without spec.repeats
    rank 0 says how many calls are timed. ArgumentError: a batch, or no cache. RankError: see Ranks.
    """
    ranks.agree(_set_up(spec), 1.0)
    if spec.batch > 1 or spec.page_size is None:
        got = f"batch: got {spec.batch}" if spec.batch > 1 else "page_size: got None"
        raise ArgumentError(f"{got} for a distributed sweep, expected one sequence in a cache of pages")
    steps = Steps(progress, 4 * len(spec.contexts))

    def rows(context: int) -> list[SweepRow]:
        plan = SplitPlan.fixed(context, spec.shape, split_size=KEYS_PER_NODE, q_len=spec.q_len)
        point = Point(SweepRow.of(spec, device, context, NODES.label, plan, ranks=ranks.size), NODES, plan)
        with ExitStack() as stack:
            _measure(stack, ranks, device, spec, point, steps)
        return [point.row]

    return each_point(spec.contexts, steps, rows, on_row)


def _set_up(spec: SweepSpec) -> str:
    """What every rank must have been given alike."""
    names = (
        *("shape", "layers", "contexts", "dtype", "batch", "q_len"),
        *("page_size", "repeats", "seed", "weights_ms", "arithmetic"),
    )
    words = {name: str(getattr(spec, name)) for name in names}
    if spec.kv:
        words["values"] = hashlib.sha256(b"".join(x.tobytes() for x in (spec.kv.q, spec.kv.k, spec.kv.v))).hexdigest()
    return ", ".join(f"{name} {value}" for name, value in words.items())


def _measure(stack: ExitStack, ranks: Ranks, device: Device, spec: SweepSpec, point: Point, steps: Steps) -> None:
    """Verify one point on all ranks, then time it."""
    context, trouble = point.row.context, ""
    try:
        resident = stack.enter_context(closing(RankedInputs(ranks, device, spec, context)))
        steps.begin(f"making data · {context:,} keys")
        data = spec.inputs(context)
        steps.begin(f"computing the oracle · {context:,} keys")
        expected = {0: oracle_of(spec)(data, spec.dtype, *samples(spec, context))}
    except (LimitError, MemoryError, RankError) as error:
        if ranks.lost:
            raise
        trouble = str(error) or "no room in host memory"
    if trouble := _first_trouble(ranks, trouble):
        point.row = point.row.refused(trouble)
        return
    steps.begin(f"compiling shaders, checking bits · {context:,} keys")
    resident.add(data)  # only here, so that every rank appends or none does
    point.call = call = resident.call(NODES, point.plan)
    call.spoil()
    before = ranks.received_bytes
    seconds = call.run()
    received, point.output = ranks.received_bytes - before, call.result()
    point.row = replace(point.row, received_bytes=received, formula_bytes=resident.formula_bytes)
    point.verify(expected, None)
    _share_verdict(ranks, point)
    if point.row.status == "ok":
        steps.begin(f"timing · {context:,} keys")
        likely = int(np.clip(BUDGET_S / seconds, FEWEST_REPEATS, MOST_REPEATS))
        time_points([point], spec.repeats or int(ranks.exchange(str(likely).encode())[0]))
        _share_verdict(ranks, point)


def _first_trouble(ranks: Ranks, mine: str) -> str:
    """What the first rank in trouble says, the same on all ranks; empty where none is in trouble."""
    said = [text.decode() for text in ranks.exchange(mine.encode())]
    return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text), "")


def _share_verdict(ranks: Ranks, point: Point) -> None:
    """Fail the point on all ranks where it failed on one, or where the output of a rank is not that of rank 0."""
    assert point.call is not None
    digest = point.call.result().digest()
    first = ranks.exchange(digest.encode())[0].decode()
    other = "" if digest == first else "out or lse are not those of rank 0"
    if trouble := _first_trouble(ranks, point.row.error or other):
        point.row = point.row.failed(trouble)
