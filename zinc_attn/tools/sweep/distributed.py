"""The sweep of one sequence whose nodes lie on MPI ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np

from ...distributed.sharded import RankError, Ranks
from ...errors import LimitError
from ...planning.splits import SplitPlan
from ...runtime.device import Device
from ...shapes import KEYS_PER_NODE
from ..harness.inputs import Inputs
from ..harness.progress import Progress, Steps
from ..harness.split_spec import SplitSpec
from ..harness.timing import FEWEST_REPEATS, MOST_REPEATS
from .calls import RankedInputs
from .points import BUDGET_S, Expected, Oracle, Point, expected_output, is_everything, samples, time_points
from .rows import SweepRow
from .spec import SweepSpec

NODES = SplitSpec("nodes", split_size=KEYS_PER_NODE)


def distributed_sweep(
    ranks: Ranks,
    device: Device,
    spec: SweepSpec,
    *,
    progress: Progress | None = None,
    on_row: Callable[[SweepRow], Any] | None = None,
    oracle: Oracle = expected_output,
) -> list[SweepRow]:
    """``sweep`` of one sequence whose nodes lie on ``ranks``, each with its ``device``; all make the same call.

    The layout is a split per node, and spec.splits does not count. Every rank compares its bits with the oracle's and
    with those of rank 0. A row says the same on all ranks but for its device, bytes and times; without spec.repeats
    rank 0 says how many calls are timed. RankError: see Ranks.
    """
    ranks.agree(_set_up(spec), 1.0)
    steps, rows = Steps(progress, 4 * len(spec.contexts)), list[SweepRow]()
    for i, context in enumerate(spec.contexts):
        steps.done = 4 * i
        plan = SplitPlan.fixed(context, spec.shape, split_size=KEYS_PER_NODE, q_len=spec.q_len)
        point = Point(SweepRow.of(spec, device, context, NODES.label, plan, ranks=ranks.size), NODES, plan)
        with ExitStack() as stack:
            _measure(stack, ranks, device, spec, point, oracle, steps)
        rows.append(point.row)
        if on_row:
            on_row(point.row)
    steps.finish()
    return rows


def _set_up(spec: SweepSpec) -> str:
    """What every rank must have been given alike."""
    names = ("shape", "layers", "contexts", "dtype", "q_len", "page_size", "repeats", "seed", "weights_ms")
    words = {name: str(getattr(spec, name)) for name in names}
    if spec.kv:
        words["values"] = hashlib.sha256(b"".join(x.tobytes() for x in (spec.kv.q, spec.kv.k, spec.kv.v))).hexdigest()
    return ", ".join(f"{name} {value}" for name, value in words.items())


def _measure(
    stack: ExitStack, ranks: Ranks, device: Device, spec: SweepSpec, point: Point, oracle: Oracle, steps: Steps
) -> None:
    """Verify one point on all ranks, then time it."""
    context = point.row.context
    trouble, resident, data, expected = "", None, None, None
    try:
        resident = stack.enter_context(closing(RankedInputs(ranks, device, spec, context)))
        data, expected = _prepare(spec, context, oracle, steps)
    except (LimitError, MemoryError, RankError) as error:
        if ranks.lost:
            raise
        trouble = str(error) or "no room in host memory"
    if trouble := _first_trouble(ranks, trouble):
        point.row = point.row.refused(trouble)
        return
    assert resident is not None and data is not None and expected is not None
    steps.begin(f"compiling shaders, checking bits · {context:,} keys")
    resident.add(data)  # only here, so that every rank appends or none does
    point.call = resident
    resident.spoil()
    before = ranks.received_bytes
    seconds = resident.run()
    received, point.output = ranks.received_bytes - before, resident.result()
    point.row = replace(point.row, received_bytes=received, formula_bytes=resident.formula_bytes)
    everything = is_everything(spec, samples(spec, context))
    point.verify([expected], None, "bits" if everything else "bits (sampled)")
    _share_verdict(ranks, point)
    if point.row.status == "ok":
        steps.begin(f"timing · {context:,} keys")
        likely = int(np.clip(BUDGET_S / seconds, FEWEST_REPEATS, MOST_REPEATS))
        time_points([point], spec.repeats or int(ranks.exchange(str(likely).encode())[0]))
        _share_verdict(ranks, point)


def _prepare(spec: SweepSpec, context: int, oracle: Oracle, steps: Steps) -> tuple[Inputs, Expected]:
    """The values of the sequence, and what the oracle says of them."""
    steps.begin(f"making data · {context:,} keys")
    data = spec.inputs(context)
    steps.begin(f"computing the oracle · {context:,} keys")
    (sample,) = samples(spec, context)
    return data, oracle(data, spec.dtype, sample)


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
