"""Steps 2 to 4 of a call: plan its submissions, fill a workspace for each, submit, wait and read.

A steady call is one that a plan holds for that was made for a call before, see ``planning.inputs.steady_key``: the
workspace that has it is given the new lengths, and its recording replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..cache.kv_cache import KVCache
from ..kernels.records import ITEM, ROW, no_records
from ..planning.arithmetic import Arithmetic
from ..planning.call import RecordingKey, Submission, plan_call
from ..planning.growth import growth_keys
from ..planning.inputs import CallOptions, DeviceFacts, SteadyKey, steady_key
from ..planning.layouts import SplitLayouts
from ..runtime.protocol import Recording
from .requests import CallRequest
from .scoring import LayerScorings
from .workspace import SharedTensors, SteadyState, Tensors, Workspace

F32 = NDArray[np.float32]
Observer = Callable[[Submission, Workspace], None]
Collect = Callable[[], tuple[list[F32], list[F32]]]
_STEADY_CALLS: Final = 256  # steady calls whose workspaces are remembered


class CallRunner:
    """Runs the calls of an ``Attention``: its workspaces, recordings and steady calls.

    layout: the split layouts by (tokens, q_len, window); observer: None, or called with every submission and its
    workspace before it is submitted.
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
        info, runtime = cache.device.info, cache.device.runtime
        self.cache, self.scorings, self.observer = cache, scorings, observer
        self.layout, self.arithmetic = layout, arithmetic
        self.replan(cascade)
        self.facts = DeviceFacts(
            cache.shape,
            info.kind,
            info.compute_units,
            info.max_workgroups,
            info.max_buffer_bytes,
            cache.pool.page_size,
            not runtime.orders_cache_writes,
            info.matrix,
        )
        self.recordings: dict[tuple[RecordingKey, int], Recording] = {}  # the int: LayerStorage.number
        self.last: Workspace | None = None  # of the last submission of the last call
        self.shared = False  # whether the last call read keys for several rows at once
        self._counted = 0  # keys read by the submissions before ``last``
        self._workspaces: dict[RecordingKey, Workspace] = {}
        self._tensors = SharedTensors(cache.device)
        self._steady: dict[SteadyKey, Workspace] = {}  # of the last call of each key
        self._growth: dict[tuple[CallOptions, int, int, int], set[RecordingKey]] = {}  # and by ``prepare``'s arguments

    def close(self) -> None:
        """Free the recordings, workspaces and tensors; a later call makes them anew."""
        recordings, workspaces, tensors = self.recordings, self._workspaces, self._tensors
        # forgotten before they are closed, users before what they use: an interrupt leaves nothing closed in use
        self.recordings, self._steady = {}, {}
        self._workspaces, self._tensors = {}, SharedTensors(self.cache.device)
        for recording in recordings.values():
            recording.close()
        for workspace in workspaces.values():
            workspace.close()
        tensors.close()

    def replan(self, cascade: bool | None) -> None:
        """Plan the next calls anew, where ``layout`` gives others now; recordings are kept."""
        self.cascade = cascade
        self._options = [
            CallOptions(self.layout, one.window, cascade, number, self.arithmetic)
            for number, one in enumerate(self.scorings.distinct)
        ]

    @property
    def keys_read(self) -> int:
        """Keys, of one KV head, that the workgroups of the last call read."""
        return self._counted + (self.last.keys_read() if self.last is not None else 0)

    def begin(self) -> None:
        """Before a call: nothing is counted."""
        self.last, self._counted, self.shared = None, 0, False

    def prepare(self, tokens: int, batch: int, q_len: int) -> None:
        """Record, and run once on nothing, what decode of ``batch`` sequences of up to ``tokens`` keys will need."""
        cache, seen = self.cache, set[tuple[int, int]]()
        for layer, storage in enumerate(cache.layers):
            kind = storage.number, self.scorings.number[layer]
            if kind in seen:
                continue
            seen.add(kind)
            for key in self._growth_keys(layer, tokens, batch, q_len):
                if (key, storage.number) not in self.recordings:
                    nothing = Submission(key, (), no_records(ITEM), no_records(ROW), np.zeros(0, np.uint32), ())
                    workspace = self._workspace(nothing)
                    workspace.fill(nothing)
                    workspace.upload_words(layer)
                    self.cache.device.runtime.run(self._recording(workspace, layer))

    def _growth_keys(self, layer: int, tokens: int, batch: int, q_len: int) -> set[RecordingKey]:
        """What growth needs in a layer; planned once for all layers of the same scoring."""
        options = self._options[self.scorings.number[layer]]
        arguments = options, tokens, batch, q_len
        if arguments not in self._growth:
            self._growth[arguments] = growth_keys(tokens, batch, q_len, options, self.facts, self.layout.unit)
        return self._growth[arguments]

    # --- attention ----------------------------------------------------------------------------------------

    def attend(self, requests: list[CallRequest], layer: int) -> tuple[list[F32], list[F32]]:
        """out (q_len, q_heads, head_dim) and lse (q_len, q_heads) of every request, in order."""
        return self.start(requests, layer)()

    def start(self, requests: list[CallRequest], layer: int) -> Collect:
        """Submit a call. What is returned gives ``attend``'s results, for which it waits.

        Where there are several submissions, all but the last have finished.
        """
        if not requests:
            return lambda: ([], [])
        results, options = _Results(requests), self._options[self.scorings.number[layer]]
        planned = [request.planned() for request in requests]
        steady = steady_key(planned, options, self.facts)
        known = None if steady is None else self._steady.get(steady)
        if known is not None and known.steady is not None and known.steady.key == steady:
            last = self._replay(known, known.steady, requests, layer)
            return lambda: results.delivered(last, known)
        plan = plan_call(planned, options, self.facts)
        if plan.upload_first:
            for request in requests:
                self.append(request, layer)
        *earlier, last = plan.submissions
        for submission in earlier:
            workspace = self.submit(submission, requests, layer)
            results.take(submission, *workspace.results(submission.query_rows, copy=True))
        workspace = self.submit(last, requests, layer, plan.steady)
        return lambda: results.delivered(last, workspace)

    def append(self, request: CallRequest, layer: int) -> None:
        """Append the new rows of a request in submissions of their own."""
        if request.reservation is not None and request.new is not None:
            self.cache.write_values(request.sequence, layer, request.reservation, *request.new)

    def submit(
        self, submission: Submission, requests: list[CallRequest], layer: int, steady: SteadyKey | None = None
    ) -> Workspace:
        """Fill the workspace of a planned submission and start it. steady: of the plan that it is all of."""
        workspace = self._workspace(submission)
        workspace.fill(submission)
        self._upload(workspace, submission, requests, layer)
        workspace.upload_words(layer)
        if steady is not None:
            words = workspace.steady_words(submission, self.scorings.of(layer).window)
            workspace.steady = SteadyState(steady, tuple(request.tokens for request in requests), words)
            if len(self._steady) >= _STEADY_CALLS:
                self._steady = {}
            self._steady[steady] = workspace
        self._run(workspace, submission, layer)
        return workspace

    def _replay(self, workspace: Workspace, state: SteadyState, requests: list[CallRequest], layer: int) -> Submission:
        """A steady call: set the lengths, start the recording."""
        submission, lengths = state.words.submission, tuple(request.tokens for request in requests)
        changed = lengths != state.lengths
        if changed:
            workspace.steady = None  # an interrupted call leaves words that the next one must fill again
            state.words.set(lengths)
        self._upload(workspace, submission, requests, layer)
        if changed:
            workspace.upload_words(layer)
            workspace.steady = state._replace(lengths=lengths)
        else:
            workspace.rebind_layer(layer)
        self._run(workspace, submission, layer)
        return submission

    # --- a submission -------------------------------------------------------------------------------------

    def _workspace(self, submission: Submission) -> Workspace:
        if self.last is not None:  # count it before its words are written again
            self._counted, self.last = self.keys_read, None
        key = submission.key
        if key not in self._workspaces:
            tensors = Tensors.shared(key, self.cache, self._tensors)
            self._workspaces[key] = Workspace.make(key, self.cache, self.scorings.distinct[key.scoring], tensors)
        return self._workspaces[key]

    def _upload(self, workspace: Workspace, submission: Submission, requests: list[CallRequest], layer: int) -> None:
        first = submission.slices[0]
        q = requests[first.request].q[first.begin : first.end]
        if len(submission.slices) > 1:
            q = np.concatenate([requests[one.request].q[one.begin : one.end] for one in submission.slices])
        workspace.upload_q(q)
        if submission.uploads:
            workspace.upload_rows([new for at in submission.uploads if (new := requests[at].new) is not None], layer)

    def _recording(self, workspace: Workspace, layer: int) -> Recording:
        key = workspace.key, self.cache.layers[layer].number
        if key not in self.recordings:
            dispatches = workspace.dispatches(layer, self.scorings.distinct[workspace.key.scoring])
            self.recordings[key] = self.cache.device.runtime.record(dispatches)
        return self.recordings[key]

    def _run(self, workspace: Workspace, submission: Submission, layer: int) -> None:
        recording = self._recording(workspace, layer)
        if self.observer is not None:
            self.observer(submission, workspace)
        workspace.submission = self.cache.device.start(recording)
        self.last, self.shared = workspace, self.shared or workspace.shared is not None


class _Results:
    """The rows of every request, gathered from submissions in any order.

    delivers: whether all of them are written to arrays of the caller's, so that the rows of the last submission can be
    taken where they lie.
    """

    def __init__(self, requests: list[CallRequest]) -> None:
        self.delivers = all(request.target.out is not None for request in requests)
        self.out: list[F32] = [np.empty(0, np.float32)] * len(requests)
        self.lse: list[F32] = [np.empty(0, np.float32)] * len(requests)
        self._requests = requests

    def take(self, submission: Submission, out: F32, lse: F32) -> None:
        """The rows of a submission's slices, one behind the other."""
        at = 0
        for one in submission.slices:
            n, rows = one.end - one.begin, len(self._requests[one.request].q)
            if n == rows:
                self.out[one.request], self.lse[one.request] = out[at : at + n], lse[at : at + n]
            else:
                if not self.out[one.request].size:
                    self.out[one.request] = np.empty((rows, *out.shape[1:]), np.float32)
                    self.lse[one.request] = np.empty((rows, *lse.shape[1:]), np.float32)
                self.out[one.request][one.begin : one.end] = out[at : at + n]
                self.lse[one.request][one.begin : one.end] = lse[at : at + n]
            at += n

    def delivered(self, last: Submission, workspace: Workspace) -> tuple[list[F32], list[F32]]:
        """The results, with those of the last submission, in the caller's arrays where there are some."""
        self.take(last, *workspace.results(last.query_rows, copy=not self.delivers))
        for request, out, lse in zip(self._requests, self.out, self.lse, strict=True):
            request.target.write(out, lse)
        if self.delivers:  # what lies in the device's memory is not handed out
            return [], [lse.copy() for lse in self.lse]
        return self.out, self.lse
