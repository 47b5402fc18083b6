"""Attention recorded in a host program's own kp.Sequence, which the host evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from ..cache.pages import StepError
from ..cache.sequence import Sequence
from ..cache.transaction import Reservation, Transaction
from ..cache.unseen import append_unseen
from ..canonical.constants import KEYS_PER_NODE
from ..checks import Uncopied, check_int
from ..errors import ArgumentError, LimitError, ShapeError
from ..planning.call import SubmissionPlanner
from ..planning.inputs import CallOptions, Request, SplitLayout
from ..planning.items import Mask
from ..planning.padding import padded, power_of_two
from ..planning.splits import SplitPlan, splits_of
from ..planning.steady import pages_per_leaf
from ..planning.submission import RecordingKey, RowSlice
from ..runtime.protocol import HostSequences, Use
from .requests import check_mask_bytes, check_seen, mask_words
from .runner import CallRunner
from .workspace import PagedStorage, Tensors, TensorWords, Workspace


class RecordOptions(NamedTuple):
    """Keywords of ``Attention.record``."""

    max_tokens: int | None = None
    allow_empty: bool = False
    causal: bool = True
    mask_keys: int = 0


class RecordedAttention(Uncopied, instead="record the call again"):
    """Operations recorded in a host's kp.Sequence, from ``Attention.record``.

    out: kp tensor of float32: (q_len, q_heads, v_dim), then lse (q_len, q_heads); on the device and, after an
    evaluation, in host memory. Close it before the cache.
    """

    def __init__(
        self, runner: CallRunner, sequence: Any, q: Any, seq: Sequence, layer: int, rows: Any, options: RecordOptions
    ) -> None:
        cache, runtime = runner.cache, runner.cache.device.runtime
        assert isinstance(runtime, HostSequences)
        self.runner, self.seq, self.layer = runner, seq, layer
        self.allow_empty, self.causal = options.allow_empty, options.causal
        self.q_len = _count("q", "elements", "q_len", q, cache.shape.q_heads * cache.shape.k_dim)
        self.count = 0 if rows is None else _count("rows", "words", "tokens", rows, cache.layout.row_words)
        most = cache.pool.capacity  # whole pages: a sequence can have more tokens than the cache's capacity
        self.max_tokens = check_int("max_tokens", most if options.max_tokens is None else options.max_tokens, 1, most)
        self.mask_keys = check_int("mask_keys", options.mask_keys, 0, self.max_tokens)
        check_mask_bytes("mask_keys", self.q_len * self.mask_keys, cache)
        self.window = runner.scorings.by_layer[layer].window
        key = self._key()
        pages, owned = PagedStorage(cache.device, cache.layout, cache.layers), []
        words = TensorWords.of(key, pages)
        try:
            query, new_rows = runtime.host_tensor(q, "q"), None if rows is None else runtime.host_tensor(rows, "rows")
            owned.append(runtime.buffer(4 * max(words.states, 1), Use.SCRATCH))
            self._out = runtime.host_output(4 * words.out)
            tensors = Tensors(query, owned[0], self._out, new_rows)
            self._workspace = Workspace.make(key, pages, runner.scorings.by_layer[layer], tensors)
            self._recording = runtime.record_into(sequence, self._workspace.dispatches(layer), self._out)
        except BaseException:
            for buffer in owned:
                buffer.close()
            raise

    def _key(self) -> RecordingKey:
        """One grid serves every length up to max_tokens."""
        cache, info = self.runner.cache, self.runner.cache.device.info
        nodes = -(-self.max_tokens // KEYS_PER_NODE)
        if self.window is not None:  # a span of keys may begin within a node, and so touch one node more
            nodes = min(nodes, -(-(self.window + self.q_len - 1) // KEYS_PER_NODE) + 1)
        most = info.max_items // self.q_len
        if most < 1:
            raise LimitError(f"q: got {self.q_len} rows, expected at most {info.max_items} on {info.name}")
        self.splits = min(splits_of(nodes, cache.shape, info.split_units, self.q_len), most)
        return RecordingKey(
            single_pass=False,
            items=padded(self.splits * self.q_len, info.max_items),
            rows=self.q_len,
            states=power_of_two(nodes * self.q_len),
            appends=self.count,
            tables=power_of_two(max(cache.pool.pages_for(self.max_tokens), pages_per_leaf(cache.pool.page_size))),
            scoring=self.runner.scorings.number[self.layer],
            masks=power_of_two(self.q_len * self.mask_keys) if self.mask_keys else 0,
            arithmetic=self.runner.arithmetic,
        )

    @property
    def out(self) -> Any:
        return self._out.tensor

    @contextmanager
    def step(self, *later: RecordedAttention, mask: Any = None) -> Iterator[None]:
        """Around one evaluation of the host's sequence: the new rows count when the block ends without an error.

        later: the calls of later layers that the same sequence holds, in order; with them the layers must be in step.
        mask: see ``Attention``, of this step alone and at most as wide as the calls' ``mask_keys``: an array for all
        calls that were recorded with some, or a list with an array or None for each call.
        """
        cache = self.runner.cache
        with cache.lock:
            cache.check_sequence(self.seq)
            if any(call.seq is not self.seq for call in later):
                raise ArgumentError("later: got a call of another sequence, expected calls of this one's layers")
            calls = (self, *later)
            masks = _masks(calls, mask)
            appending = [call for call in calls if call.count]
            checked = [
                call._check(appending[0].count if appending else 0, call_mask)
                for call, call_mask in zip(calls, masks, strict=True)
            ]
            with Transaction() as transaction:
                held: Reservation | None = None
                if appending:  # one for all layers: all of them get their rows, or none
                    also = tuple(call.layer for call in appending[1:])
                    held = transaction.reserve(self.seq.pages, appending[0].layer, appending[0].count, also)
                    cache.copy_pages(held.copies)
                for call, words in zip(calls, checked, strict=True):
                    call._fill(held, words)
                with ExitStack() as armed:
                    for call in calls:
                        armed.enter_context(call._recording.armed())
                    yield
                for call in appending:
                    append_unseen(self.seq.pages, call.layer, self.seq.pages.length(call.layer))

    def _check(self, count: int, mask: Any) -> Mask | None:
        """The words of the step's mask. LimitError: beyond max_tokens or mask_keys; StepError: ``count`` is not the
        number of rows that this call appends; ArgumentError: a query row sees no key."""
        length = self.seq.pages.length(self.layer)
        tokens = length + self.count
        if tokens > self.max_tokens:
            raise LimitError(f"seq: {tokens} tokens, expected at most max_tokens = {self.max_tokens}")
        if self.count not in (0, count):
            raise StepError(
                f"layer {self.layer}: got {self.count} tokens at length {length}, expected {count}, as many as the "
                "step's other layers append"
            )
        words = mask_words(mask, self.q_len, tokens)
        if words is not None and words.words.shape[1] > self.mask_keys:
            raise LimitError(f"mask: got {words.words.shape[1]} keys, expected at most mask_keys = {self.mask_keys}")
        if not self.allow_empty:
            check_seen(self.q_len, tokens, self.causal, words, self.window)
        bound = self.runner.scorings.by_layer[self.layer].bound  # of what is added: the host's q and K are not seen
        bound.check(0.0, 0.0, 0, max(tokens, self.q_len), 0.0 if words is None else words.largest)
        return words

    def _fill(self, held: Reservation | None, mask: Mask | None) -> None:
        """Fill the work words for the rows that ``held`` reserves."""
        tokens = self.seq.pages.length(self.layer) + self.count
        table = self.seq.table(held if self.count else None)
        request = Request(self.q_len, tokens, self.count, table, causal=self.causal, mask=mask)
        shape, rows = self.runner.cache.shape, self.q_len
        plan = SplitPlan.fixed(tokens, shape, num_splits=self.splits, q_len=rows, window=self.window)
        scoring, arithmetic = self._workspace.key.scoring, self.runner.arithmetic
        options = CallOptions(self.runner.layout, self.window, False, scoring, arithmetic)
        planner = SubmissionPlanner([request], [SplitLayout.of(plan)], options, self.runner.facts)
        submission = planner.plan((RowSlice(0, 0, self.q_len),), (0,) if self.count else (), two_pass=True)
        self._workspace.fill(submission, self.layer)

    def close(self) -> None:
        """Free what was recorded; the host's sequence refuses to be evaluated afterwards."""
        self._recording.close()
        self._workspace.close()
        for buffer in (self._workspace.tensors.states, self._workspace.tensors.out):
            buffer.close()


def _masks(calls: Seq[RecordedAttention], mask: Any) -> list[Any]:
    """The mask of each call of a step, or None."""
    if not isinstance(mask, (list, tuple)):
        if mask is not None and not any(call.mask_keys for call in calls):
            raise ArgumentError("mask: got one, expected None: no call of the step was recorded with mask_keys")
        return [mask if call.mask_keys else None for call in calls]
    if len(mask) != len(calls):
        raise ArgumentError(f"mask: got {len(mask)} entries, expected an array or one per call ({len(calls)})")
    return list(mask)


def _count(name: str, unit: str, what: str, tensor: Any, size: int) -> int:
    """How many pieces of ``size`` elements a host's tensor has."""
    count, rest = divmod(int(tensor.size()), size)
    if rest or not count:
        raise ShapeError(f"{name}: got a tensor of {tensor.size()} {unit}, expected {what} * {size}")
    return count
