"""K and V on a device, and the calls on them that are verified and timed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from ...cache.kv_cache import KVCache
from ...cache.sequence import Sequence
from ...canonical.state import F32
from ...decode.attention import Attention
from ...decode.workspace import Workspace
from ...runtime.device import Device
from ..harness.bits import Output, compare
from ..harness.inputs import Inputs
from ..harness.split_spec import SplitSpec
from .expected import Expectation
from .rows import Row
from .spec import PAGE_SIZE, CallSpec


@dataclass
class Subject:
    """A call that is verified and timed, and its row.

    call: what the host's clock times; cut_back: called after each, outside the clock. result: out (batch, q_len,
    q_heads, v_head_dim) and lse (batch, q_len, q_heads) of the last call; spoil: leaves another output, so that an
    element which the call does not write is seen. spans: seconds of the last call on the device's clock, by measure.
    """

    row: Row
    call: Callable[[], object]
    result: Callable[[], Output]
    spoil: Callable[[], object] = lambda: None
    cut_back: Callable[[], object] = lambda: None
    spans: Callable[[], Mapping[str, float]] = dict
    exact: bool = True  # whether every call must give the expected bits
    output: Output | None = None  # the verified output
    times: list[Mapping[str, float]] = field(default_factory=list)

    def verify(self, expected: Expectation) -> None:
        """Make the call for the first time, and give its row the verdict on its output."""
        self.spoil()
        self._run()
        self.output = self.result()
        trouble = expected.trouble(self.row.layout, self.output) if self.exact else None
        word, error = expected.word if self.exact else None, expected.error(self.output.out)
        self.row = self.row.failed(trouble) if trouble else replace(self.row, verified=word, relative_error=error)

    def timed_run(self) -> Mapping[str, float]:
        """A time of every measure; the output of each call is compared with the verified one."""
        seconds = self._run()
        self._compare("while timing")
        return {"call": seconds, **self.spans()}

    def run_spoiled(self) -> None:
        """Spoil the output and call once more after the timing: calls that write nothing would show here."""
        self.spoil()
        self._run()
        self._compare("after the timing")

    def rows(self) -> list[Row]:
        """A row per measure, or a single row that says why there is no time."""
        if self.row.status != "ok" or not self.times:
            return [self.row]
        series = {measure: tuple(x[measure] for x in self.times) for measure in self.times[0]}
        return [replace(self.row, measure=measure, seconds=seconds) for measure, seconds in series.items()]

    def _run(self) -> float:
        begin = perf_counter()
        self.call()
        seconds = perf_counter() - begin
        self.cut_back()
        return seconds

    def _compare(self, when: str) -> None:
        assert self.output is not None
        if self.exact and self.row.status == "ok" and (difference := compare(self.result(), self.output)):
            self.row = self.row.failed(f"{when}: {difference.text()}")


class CachedCalls:
    """The sequences of a batch in a cache of one layer, which have ``before`` tokens each between the calls."""

    def __init__(self, device: Device, spec: CallSpec, context: int) -> None:
        self.appends, self.arithmetic = spec.page_size is not None, spec.arithmetic
        self.before, page_size = context - spec.q_len * self.appends, spec.page_size or PAGE_SIZE
        capacity = spec.batch * -(-context // page_size) * page_size
        self.cache = KVCache(device, spec.shape, 1, capacity, spec.dtype, page_size)
        self.sequences: list[Sequence] = []
        self.rows: list[tuple[F32, ...]] = []  # of each sequence: q, and k and v that a call appends

    def add(self, data: Inputs) -> None:
        sequence, n = self.cache.new_sequence(), self.before
        if n:
            self.cache.append(sequence, 0, data.k[:n], data.v[:n])
        self.sequences.append(sequence)
        self.rows.append((data.q, data.k[n:].copy(), data.v[n:].copy()) if self.appends else (data.q,))

    def subject(self, row: Row, split: SplitSpec) -> Subject:
        """The call under a layout; of a call that appends nothing, its submission alone, with the device's clock."""
        sizes: dict[str, Any] = {"num_splits": split.num_splits, "split_size": split.split_size}
        workspaces: list[Workspace] = []
        sizes |= {"observer": lambda _, workspace: workspaces.append(workspace)}
        attention = Attention(self.cache, arithmetic=self.arithmetic, **sizes)
        (q, *new), got = map(list, zip(*self.rows, strict=True)), list[Any]()

        def attend(q: list[F32]) -> None:
            got[:] = attention(q, self.sequences, 0, *new, return_lse=True)

        def cut_back() -> None:
            for sequence in self.sequences:
                sequence.truncate(self.before)

        def spoil() -> None:
            attend([-x for x in q])
            cut_back()

        if not self.appends:
            attend(q)
            if len(workspaces) == 1:  # each of several submissions needs its own words there: the call is timed
                return self._submitted(row, workspaces[0])
        return Subject(row, lambda: attend(q), lambda: Output(*map(np.stack, got)), spoil, cut_back)

    def _submitted(self, row: Row, workspace: Workspace) -> Subject:
        """The submission of a call of one sequence, by itself."""
        runtime = self.cache.device.runtime
        timestamps = bool(runtime.info.timestamp_period_ns)
        recording = runtime.record(workspace.dispatches(0), timestamps)

        def spans() -> Mapping[str, float]:
            return pass_times(runtime.timings(recording)) if timestamps else {}

        def result() -> Output:
            return Output(*(x[None] for x in workspace.results()))

        return Subject(row, lambda: runtime.run(recording), result, workspace.spoil, spans=spans)

    def close(self) -> None:
        self.cache.close()


def pass_times(spans: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Seconds by measure, from begin and end of the one or two dispatches of a call."""
    (begin, end), *more = spans
    times = {"device": end - begin, "pass 1": end - begin}
    for second, last in more:
        times |= {"device": last - begin, "gap": second - end, "pass 2": last - second}
    return times
