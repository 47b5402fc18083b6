"""The properties of a case on devices: every variation must give the bits of the base result."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...cache.kv_cache import KVCache
from ...cache.sequence import Sequence
from ...canonical.constants import KEYS_PER_NODE
from ...canonical.state import F32
from ...distributed.attention import ShardedAttention
from ...distributed.cache import ShardedKVCache
from ...errors import LimitError
from ...planning.arithmetic import EXACT
from ...runtime.device import Device
from ...storage import storage_types
from ..harness.bits import Judge, Output, oracle
from ..harness.planned_attention import PlannedAttention, PlanRule
from ..harness.progress import Progress, Steps
from ..harness.split_spec import SplitSpec
from .cases import Case
from .data import ROWS, Data, words
from .outcome import Outcome
from .record import COMMITTED, Digests, committed_digests, is_of

GPUS: Final = (2, 32, 96)  # compute units of devices whose layouts are tried
SPARE: Final = 8  # pages for the cascade's own tokens
LONG: Final = 4 * SPARE * 256  # tokens from which the sequence gives these pages up: a larger cache may fit no buffer
TAIL: Final = 70  # tokens that the chunking variations append anew
PIECE: Final = 16384  # tokens per append of a long prompt


def check(
    devices: Seq[Device],
    cases: Seq[Case],
    splits: Seq[SplitSpec],
    *,
    against: Mapping[str, Digests] | None = None,
    judge: Judge = oracle,
    progress: Progress | None = None,
) -> Iterator[Outcome]:
    """Every case on every device, compared with the committed record, with ``against`` and with the first device.

    judge: the oracle of a case that the record lacks.
    A device holds shards of the sequence together with the other devices; a single device holds two shards.
    """
    known = {COMMITTED: committed_digests(), **(against or {})}
    steps = Steps(progress, len(cases) * len(devices))
    for case in cases:
        data, first = case.data(), None
        for device in devices:
            steps.begin(f"{case} on {device.info.name}")
            outcome = Outcome(case, title(device))
            others = [other for other in devices if other is not device]
            try:
                _Examination(device, outcome, data).run(splits, others or [device])
            except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
                outcome.refused = str(error) or "no room in host memory"
            exact = case.arithmetic in EXACT
            outcome.judge(data, {source: d for source, d in known.items() if exact or is_of(source, device)}, judge)
            if exact and first and first.result and outcome.result:
                outcome.compare(10, f"unlike {first.subject}", outcome.result, first.result)
            first = first or outcome
            yield outcome


def title(device: Device) -> str:
    return f"{device.info.name} ({device.info.index}), {device.runtime.name}"


class _Examination:
    """The variations of one case on one device, each compared in ``outcome``."""

    def __init__(self, device: Device, outcome: Outcome, data: Data) -> None:
        self.device, self.outcome, self.data = device, outcome, data
        self.case = outcome.case
        self.query = self.case.query(data)
        self.split_rule = self._by_split(SplitSpec("auto"))

    def run(self, splits: Seq[SplitSpec], others: Seq[Device]) -> None:
        """Properties 1 to 9, where the case can show them."""
        case, data = self.case, self.data
        with self._filled(case, data, 256, spare=SPARE * (case.context < LONG)) as (attention, seq):
            self.outcome.result = self._output(attention, self.query, seq)
            self._repeats(attention, seq)
            self._layouts(attention, seq, splits)
            self._batches(attention, seq)
            at_once = self._chunks(attention, seq)
            self._cascades(attention, seq)
        self._pages()
        for other, held in case.same_values(data):
            with self._filled(other, held, 256) as (attention, seq):
                self.outcome.compare(7, f"stored as {other.dtype}", self._output(attention, self.query, seq))
        if case.context > KEYS_PER_NODE:  # a single node has one place
            self._shards([self.device, *others], at_once)

    def _by_split(self, split: SplitSpec, compute_units: int | None = None) -> PlanRule:
        shape, units = self.case.shape, compute_units or self.device.info.split_units
        return lambda tokens, q_len, window: split.plan(tokens, shape, units, q_len, window)

    @contextmanager
    def _filled(
        self, case: Case, data: Data, page: int, *, shuffled: bool = False, spare: int = 0, kv_layout: str = "tiles"
    ) -> Iterator[tuple[PlannedAttention, Sequence]]:
        """A sequence of ``data`` in a cache of that size and ``spare`` pages more, and attention by the split rule."""
        pages = -(-len(data.k) // page) + spare
        order = np.argsort(words("pages", pages), kind="stable").tolist() if shuffled else None
        options: dict[str, Any] = {"page_order": order, "kv_layout": kv_layout}
        with closing(KVCache(self.device, case.shape, 1, pages * page, case.dtype, page, **options)) as cache:
            seq = cache.new_sequence()
            _append(cache, seq, data, 0, len(data.k), PIECE)
            options = {"arithmetic": case.arithmetic, **case.options()}
            with closing(PlannedAttention(cache, self.split_rule, **options)) as attention:
                yield attention, seq

    def _output(self, attention: PlannedAttention, q: F32, seq: Sequence, *new: NDArray[Any]) -> Output:
        """The output of a call that appends ``new``."""
        return self._outputs(attention, [q], [seq], *([x] for x in new))[0]

    def _outputs(
        self, attention: PlannedAttention, queries: list[F32], seqs: list[Sequence], *new: list[NDArray[Any]]
    ) -> list[Output]:
        """The outputs of a call on a batch, each with the mask of its rows."""
        added = [len(x) for x in new[0]] if new else [0] * len(seqs)
        calls = [
            self.case.masking(1 if q.ndim == 2 else len(q), len(seq) + count)
            for q, seq, count in zip(queries, seqs, added, strict=True)
        ]
        masks = [call["mask"] for call in calls] if self.case.mask else None
        return attention.outputs(queries, seqs, *new, causal=self.case.causal, mask=masks)

    def _repeats(self, attention: PlannedAttention, seq: Sequence) -> None:
        """Property 1: the call again, with another query in between."""
        for i in (2, 3):
            self._output(attention, -self.query, seq)
            self.outcome.compare(1, f"run {i}", self._output(attention, self.query, seq))

    def _layouts(self, attention: PlannedAttention, seq: Sequence, splits: Seq[SplitSpec]) -> None:
        """Properties 2 and 3: every layout, and the split rule for other devices."""
        tried = [(2, f"layout {split.label}", self._by_split(split)) for split in splits]
        tried += [(3, f"{units} compute units", self._by_split(SplitSpec("auto"), units)) for units in GPUS]
        for prop, variation, rule in tried:
            attention.lay_out(rule)
            self.outcome.compare(prop, variation, self._output(attention, self.query, seq))
        attention.lay_out(self.split_rule)

    def _batches(self, attention: PlannedAttention, seq: Sequence) -> None:
        """Property 4: with other sequences and queries in the batch, whose outputs must not change, either.

        And property 6: a sequence that shared its pages, and copied the last page when it appended.
        """
        q = self.data.q
        seqs, queries = [seq.fork(), seq.fork(), seq], [q[: max(self.case.rows // 3, 1)], q[1], self.query]
        seqs[0].truncate(len(seq) // 3)
        seqs[1].truncate(len(seq) - 1)
        alone = [self._output(attention, queries[i], seqs[i]) for i in (0, 1)]
        for name, order in (("first of 3", (2, 0, 1)), ("last of 3", (1, 0, 2)), ("second of 2", (1, 2))):
            got = self._outputs(attention, [queries[i] for i in order], [seqs[i] for i in order])
            for i, output in zip(order, got, strict=True):
                want = (*alone, self.outcome.result)[i]
                self.outcome.compare(4, name if i == 2 else f"the others, {name}", output, want)
        if len(seq) < LONG:  # a longer one leaves no page for the copy
            _append(attention.cache, seqs[1], self.data, len(seq) - 1, len(seq), 1)
            self.outcome.compare(6, "copied page", self._output(attention, self.query, seqs[1]))
        seqs[0].free()
        seqs[1].free()

    def _chunks(self, attention: PlannedAttention, seq: Sequence) -> Output:
        """Property 5: the last rows at once; then cut off and appended anew, at once, in parts and one by one."""
        data, causal, rows = self.data, self.case.causal, self.case.rows
        n = len(seq)
        count, tail = min(max(ROWS, rows), n), min(max(TAIL, rows), n)
        q, begin = data.q[-count:], n - count
        at_once = self._output(attention, q, seq)
        last = -1 if rows == 1 else slice(-rows, None)
        self.outcome.compare(5, f"last of {count} rows", Output(at_once.out[last], at_once.lse[last]))
        for piece, ends in ((tail, {count}), (37, {1, count}), (11, {*range(1, count + 1)})):
            seq.truncate(n - tail)
            _append(attention.cache, seq, data, n - tail, begin if causal else n, piece)
            slices = list(pairwise((0, *sorted(ends))))
            if not causal:  # a row sees the keys of those after it, too: all are there, and the rows are the last ones
                slices = [(count - end, count) for _, end in slices]
            for first, end in slices:
                new = data.rows(begin + first, begin + end) if causal else ()
                got = self._output(attention, q[first:end], seq, *new)
                want = Output(at_once.out[first:end], at_once.lse[first:end])
                self.outcome.compare(5, f"rows {first} to {end - 1} of {count} appended and attended", got, want)
        return at_once

    def _cascades(self, attention: PlannedAttention, seq: Sequence) -> None:
        """Property 8: keys that sequences or rows share, attended once for several rows, or apart.

        Counted where the device attends keys for several rows at once. Changes the sequence.
        """
        data = self.data
        if len(seq) >= LONG:
            seq.truncate(len(seq) - len(seq) // 4)
        n, tail = len(seq), min(TAIL, len(seq))
        seqs = [seq.fork(), seq, seq.fork(), seq.fork()]
        seqs[0].truncate(n - n // 3)
        for branch in (seqs[0], seqs[3]):
            attention.cache.append(branch, 0, *(-x for x in data.rows(0, tail)))
        batch = [data.q[: max(2, self.case.rows)], data.q[-1], data.q[0], data.q[1:2]], seqs
        chunk = [data.q[-min(max(ROWS, self.case.rows), n) :]], [seq]
        tried = [("sequence", self.split_rule, *batch), ("one sequence, chunk", self.split_rule, *chunk)]
        if n >= 2 * KEYS_PER_NODE:  # a split of as many keys as a node has emits whole nodes
            tried.append(("1 split, sequence", self._by_split(SplitSpec.parse("1")), *batch))
        for name, rule, queries, sequences in tried:
            others = [-q for q in queries]
            attention.lay_out(rule)
            self._outputs(attention, others, sequences)
            # Matrix units share rows of an item alone.
            if self.case.arithmetic in EXACT and not attention.attention.shared:
                continue
            attention.lay_out(rule, cascade=False)
            want = self._outputs(attention, queries, sequences)
            self._outputs(attention, others, sequences)  # other partial states than the next call must make
            attention.lay_out(rule)
            for i, pair in enumerate(zip(self._outputs(attention, queries, sequences), want, strict=True)):
                self.outcome.compare(8, f"{name} {i + 1} of {len(sequences)}", *pair)

    def _pages(self) -> None:
        """Property 6: other page sizes, pages in another order.

        Pages of one token have block types as rows; plain types lie in tiles of one token as they do in rows.
        """
        blocks = any(kind.halves for kind in storage_types(self.case.dtype))
        for page, shuffled, kv_layout in ((1, True, "NHD" if blocks else "tiles"), (1024, False, "tiles")):
            with self._filled(self.case, self.data, page, shuffled=shuffled, kv_layout=kv_layout) as (attention, seq):
                variation = f"pages of {page}{', shuffled' * shuffled}{', rows' * (kv_layout == 'NHD')}"
                self.outcome.compare(6, variation, self._output(attention, self.query, seq))

    def _shards(self, devices: Seq[Device], at_once: Output) -> None:
        """Property 9: nodes of 512 keys, dealt unevenly to shards on ``devices``, the first of which folds.

        at_once: the output of the last rows, which are appended and attended; then the last one by itself.
        """
        case, data = self.case, self.data
        rows = len(at_once.lse) if case.causal else 0  # a shard appends the rows that are attended
        n, begin = len(data.k), len(data.k) - rows
        weights = [1.0 + i % 2 for i in range(len(devices))]
        with (
            ShardedKVCache(devices, case.shape, 1, case.context, case.dtype, 256, weights=weights) as sharded,
            closing(ShardedAttention(sharded, arithmetic=case.arithmetic, **case.options())) as attention,
        ):
            seq = sharded.new_sequence()
            _append(sharded, seq, data, 0, begin, PIECE)
            where = "shards on " + " and ".join(map(title, devices))

            def attend(q: F32, *new: NDArray[Any]) -> Output:
                mask = case.masking(1 if q.ndim == 2 else len(q), n)["mask"]
                return Output(*attention(q, seq, 0, *new, return_lse=True, mask=mask))

            if rows:
                self.outcome.compare(9, f"{where}, rows", attend(data.q[-rows:], *data.rows(begin, n)), at_once)
            if rows or case.rows == 1:
                self.outcome.compare(9, where, attend(self.query))
            else:  # a shard's rows see no keys after them, and the last row has none there
                self.outcome.compare(9, where, attend(data.q[-1]), Output(at_once.out[-1], at_once.lse[-1]))


def _append(kv_cache: Any, seq: Any, data: Data, begin: int, end: int, piece: int) -> None:
    """Append the tokens [begin, end) of ``data``, at most ``piece`` at a time."""
    for first, until in pairwise((*range(begin, end, piece), end)):
        kv_cache.append(seq, 0, *data.rows(first, until))
