"""Steps 2 to 4 of a call: plan its submissions, and fill and run a workspace for each.

Plans are kept, since the plan of an earlier call may serve a steady call (``planning.steady``). If the workspace still
has the plan's words, only the lengths in them are changed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Any, Final

import numpy as np

from ..cache.kv_cache import KVCache
from ..cache.unseen import within
from ..canonical.state import F32
from ..errors import ZincAttnError
from ..kernels.records import ITEM, ROW, no_records
from ..planning.arithmetic import EXACT, Arithmetic
from ..planning.call import CallPlan, plan_call
from ..planning.growth import growth_keys
from ..planning.inputs import CallFacts, CallOptions, Request
from ..planning.layouts import SplitLayouts
from ..planning.steady import SteadyKey, steady_key
from ..planning.submission import RecordingKey, Submission
from ..runtime.protocol import Recording
from .arithmetic import check_half_range
from .requests import CallBatch, check_requests
from .scoring import LayerScorings
from .targets import NEW_ARRAYS
from .workspace import PagedStorage, SharedTensors, Tensors, Workspace

Observer = Callable[[Submission, Workspace], None]
_KEPT: Final = 64  # plans of steady calls


class CallRunner:
    """Runs the calls of an ``Attention``: its workspaces, recordings and steady calls.

    layout: the split layouts by (tokens, q_len, window); observer: see ``Attention``, or None.
    """

    def __init__(
        self,
        cache: KVCache,
        scorings: LayerScorings,
        layout: SplitLayouts,
        cascade: bool | None,
        observer: Observer | None,
        arithmetic: Arithmetic = "canonical",
    ) -> None:
        self.cache, self.scorings, self.observer = cache, scorings, observer
        self.layout, self.arithmetic = layout, arithmetic
        self.replan(cascade)
        units = arithmetic == "integer" and cache.device.attends_by_units(cache.shape)
        self.facts = CallFacts(cache.device.info, cache.shape, cache.pool.page_size, units)
        self.recordings: dict[tuple[RecordingKey, int], Recording] = {}  # the int: LayerStorage.number
        self.last: Workspace | None = None  # of the last submission of the last call
        self.shared = False  # whether the last call read keys for several rows at once
        self._counted = 0  # keys read by the submissions before ``last``
        self._workspaces: dict[RecordingKey, Workspace] = {}
        self._tensors = SharedTensors(cache.device)
        self._growth: dict[tuple[CallOptions, int, int, int], set[RecordingKey]] = {}  # and by ``prepare``'s arguments

    def close(self) -> None:
        """Free the recordings, workspaces and tensors; a later call makes them anew."""
        recordings, workspaces, tensors = self.recordings, self._workspaces, self._tensors
        # forgotten before they are closed, users before what they use: an interrupt leaves nothing closed in use
        self.recordings = {}
        self._workspaces, self._tensors = {}, SharedTensors(self.cache.device)
        for recording in recordings.values():
            recording.close()
        for workspace in workspaces.values():
            workspace.close()
        tensors.close()

    def replan(self, cascade: bool | None) -> None:
        """Plan the next calls anew, because ``layout`` gives others now; recordings are kept."""
        self.cascade = cascade
        self._plans: dict[SteadyKey, CallPlan] = {}
        self._options = [
            CallOptions(self.layout, scoring.window, cascade, number, self.arithmetic)
            for number, scoring in enumerate(self.scorings.distinct)
        ]

    @property
    def keys_read(self) -> int:
        """Keys, of one KV head, that the workgroups of the last call read."""
        return self._counted + (self.last.keys_read() if self.last is not None else 0)

    def forget_last(self) -> None:
        """Count nothing, before a call and after a failed one.

        Recordings that a failed call left in a ``together`` block are sent, before a later call writes other words.
        """
        if self.last is not None and self.last.queued is not None and self.last.queued.open:
            with suppress(ZincAttnError):  # reading the results raises it
                self.last.queued.send()
        self.last, self._counted, self.shared = None, 0, False

    def prepare(self, tokens: int, batch: int, q_len: int) -> None:
        """Record the submissions that decode ``batch`` sequences of up to ``tokens`` keys; run each without rows."""
        cache, seen = self.cache, set[tuple[int, int]]()
        for layer, storage in enumerate(cache.layers):
            kind = storage.number, self.scorings.number[layer]
            if kind in seen:
                continue
            seen.add(kind)
            for key in self._growth_keys(layer, tokens, batch, q_len):
                if (key, storage.number) not in self.recordings:
                    nothing = Submission(key, (), no_records(ITEM), no_records(ROW), np.zeros(0, np.uint32), ())
                    workspace = self._workspace(key)
                    workspace.fill(nothing, layer)
                    self.cache.device.runtime.run(self._recording(workspace, layer))

    def _growth_keys(self, layer: int, tokens: int, batch: int, q_len: int) -> set[RecordingKey]:
        """The keys that growth needs in a layer; planned once for all layers of the same scoring."""
        options = self._options[self.scorings.number[layer]]
        arguments = options, tokens, batch, q_len
        if arguments not in self._growth:
            self._growth[arguments] = growth_keys(
                tokens, batch, q_len, options, self.facts, by_rule=self.layout.by_rule
            )
        return self._growth[arguments]

    # --- the steps of a call ------------------------------------------------------------------------------

    def plan(self, requests: Seq[Request], layer: int) -> CallPlan:
        """The submissions of a call of a layer: an earlier plan, if one serves it."""
        options = self._options[self.scorings.number[layer]]
        key = steady_key(requests, options, self.facts)
        plan = None if key is None else self._plans.get(key)
        if plan is None:
            plan = plan_call(requests, options, self.facts)
            if plan.steady is not None:
                if len(self._plans) >= _KEPT:
                    self._plans = {}
                self._plans[plan.steady] = plan
        return plan

    def append(self, call: AttentionCall) -> None:
        """Append the new rows of a call in submissions of their own."""
        for request in call.requests:
            if request.reservation is not None and request.new is not None:
                table = request.sequence.table(request.reservation)
                self.cache.write_values(table, call.layer, request.reservation, *request.new)

    def fill(self, submission: Submission, call: AttentionCall, steady: bool) -> Workspace:
        """A workspace with the words of a submission. steady: the plan serves other calls, too."""
        if self.last is not None:  # count it before its words are written again
            self._counted, self.last = self.keys_read, None
        workspace, requests = self._workspace(submission.key), call.requests
        workspace.fill(submission, call.layer, call.planned if steady else None)
        rows = [requests[piece.request].q[piece.begin : piece.end] for piece in submission.slices]
        workspace.upload_q(rows[0] if len(rows) == 1 else np.concatenate(rows))
        if submission.uploads:
            new = [requests[index].new for index in submission.uploads]
            workspace.upload_rows([pair for pair in new if pair is not None], call.layer, self.cache.encode_into)
        return workspace

    def start(self, workspace: Workspace, layer: int) -> None:
        """Submit a workspace's recording, without a wait, or leave it to the ``together`` block around the call."""
        recording, device = self._recording(workspace, layer), self.cache.device
        if self.observer is not None and workspace.submission is not None:
            self.observer(workspace.submission, workspace)
        self.last, self.shared = workspace, self.shared or workspace.shared is not None
        workspace.queued = None if device.together_block is None else device.queue()
        if workspace.queued is None:
            device.runtime.start(recording)
        else:
            workspace.queued.add(recording)

    def _workspace(self, key: RecordingKey) -> Workspace:
        if key not in self._workspaces:
            pages = PagedStorage(self.cache.device, self.cache.layout, self.cache.layers)
            tensors = Tensors.of(key, pages, self._tensors)
            self._workspaces[key] = Workspace.make(key, pages, self.scorings.distinct[key.scoring], tensors)
        return self._workspaces[key]

    def _recording(self, workspace: Workspace, layer: int) -> Recording:
        key = workspace.key, self.cache.layers[layer].number
        if key not in self.recordings:
            self.recordings[key] = self.cache.device.runtime.record(workspace.dispatches(layer))
        return self.recordings[key]


class AttentionCall:
    """A call of ``Attention``, checked, and its results, gathered from submissions in any order.

    requests: one per sequence; planned: their plan's inputs, from ``plan`` on; largest: the new rows' magnitudes.
    """

    def __init__(self, runner: CallRunner, batch: CallBatch, layer: int, whole: int | None = None) -> None:
        """Check the arguments; ``whole``: see ``check_requests``."""
        self.runner, self.batch, self.layer = runner, batch, layer
        self.scoring, cache = runner.scorings.by_layer[layer], runner.cache
        self.requests, largest_q, self.largest = check_requests(cache, batch, layer, self.scoring, whole)
        if runner.arithmetic not in EXACT:
            within(
                cache,
                [sequence.pages for sequence in batch.sequences],
                lambda held: check_half_range(runner.arithmetic, largest_q, held.maximum(self.largest)),
            )
        self.planned: list[Request] = []
        self._outs: dict[int, F32] = {}  # by request
        self._lses: dict[int, F32] = {}

    def plan(self) -> CallPlan:
        self.planned = [request.planned() for request in self.requests]
        return self.runner.plan(self.planned, self.layer)

    def take(self, copy: bool = True) -> None:
        """Wait for the last submission and take its results; without ``copy`` they live until the next one."""
        last = self.runner.last
        if last is None or last.submission is None:
            return
        if last.key.unmerged:  # a later submission finds its states on the device
            last.ran()
        else:
            self.take_from(last, last.submission, copy)

    def take_from(self, workspace: Workspace, submission: Submission, copy: bool) -> None:
        """Take the results of a submission that a workspace holds; a second time changes nothing."""
        out, lse = workspace.results(copy)
        row = 0
        for request, begin, end in submission.slices:
            rows, n = len(self.requests[request].q), end - begin
            if n == rows:
                self._outs[request], self._lses[request] = out[row : row + n], lse[row : row + n]
            else:
                for gathered, part in ((self._outs, out), (self._lses, lse)):
                    if request not in gathered:
                        gathered[request] = np.empty((rows, *part.shape[1:]), np.float32)
                    gathered[request][begin:end] = part[row : row + n]
            row += n

    def results(self) -> Any:
        """The call's return value. After an interrupt it may be called again."""
        delivers = self.batch.out is not None  # then no array in the device's memory is handed out
        self.take(copy=not delivers)
        outs, lses = list[F32](), list[F32]()
        for i, request in enumerate(self.requests):
            out, lse = self._outs[i], self._lses[i]
            if request.target is not NEW_ARRAYS:
                request.target.write(out, lse)
            outs.append(out)
            lses.append(lse.copy() if delivers else lse)
        return self.batch.shaped(outs, lses)
