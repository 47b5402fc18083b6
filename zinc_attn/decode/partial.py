"""Partial states of a call: pass 1 alone, a state per query row and node of 512 keys, read by the host."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..canonical.arguments import key_ranges
from ..canonical.constants import KEYS_PER_NODE
from ..canonical.partial import PartialState
from ..canonical.state import empty_state
from ..checks import check_int, shown
from ..errors import ArgumentError
from ..limits import MAX_CONTEXT
from ..planning.call import UPLOAD_ROWS, CallPlan, SubmissionPlanner
from ..planning.duration import in_parts, row_cost
from ..planning.inputs import CallOptions, SplitLayout
from ..planning.items import Indices
from ..planning.splits import SplitPlan
from ..planning.submission import RowSlice, Submission
from .requests import CallBatch
from .runner import AttentionCall, CallRunner
from .workspace import Workspace


@dataclass(frozen=True, eq=False)
class NodeRange:
    """The nodes that a partial call attends, checked.

    held: absolute numbers, ascending, of the nodes that the sequence holds, or None for 0, 1, ...; tokens: of the whole
    sequence, None for those held; within: absolute nodes [first, end) to attend, None for all.
    """

    held: Indices | None
    tokens: int | None
    within: tuple[int, int] | None

    @classmethod
    def checked(cls, nodes: Any, tokens: Any, within: Any) -> NodeRange:
        """From the caller's arguments. ArgumentError names the wrong one."""
        last = MAX_CONTEXT // KEYS_PER_NODE
        if nodes is not None and (not isinstance(nodes, (list, tuple, np.ndarray)) or getattr(nodes, "ndim", 1) != 1):
            raise ArgumentError(f"nodes: got {shown(nodes)}, expected a list of node numbers, or None")
        held = None if nodes is None else np.array([check_int("nodes", n, 0, last) for n in nodes], np.int64)
        if held is not None and np.any(held[1:] <= held[:-1]):
            raise ArgumentError(f"nodes: got {list(held)}, expected ascending numbers")
        if within is not None:
            if not isinstance(within, (tuple, list)) or len(within) != 2:
                raise ArgumentError(f"within: got {shown(within)}, expected (first, end), node numbers, or None")
            first = check_int("within[0]", within[0], 0, last)
            within = first, check_int("within[1]", within[1], first, last)
        return cls(held, None if tokens is None else check_int("tokens", tokens, 0, MAX_CONTEXT), within)


class PartialCall(AttentionCall):
    """A call of ``Attention.partial``, on one sequence.

    tokens: of the whole sequence; span: its nodes [first, end) that rows see; [begin, last): held nodes to attend.
    """

    def __init__(self, runner: CallRunner, batch: CallBatch, layer: int, *, nodes: NodeRange) -> None:
        super().__init__(runner, batch, layer, nodes.tokens)
        (self.request,) = self.requests
        self._held, self.tokens = _held_nodes(nodes, self.request.tokens)
        self._firsts, self._limits = key_ranges(self.tokens, len(self.request.q), True, self.scoring.window)
        self.span = int(self._firsts.min()) // KEYS_PER_NODE, -(-int(self._limits.max()) // KEYS_PER_NODE)
        within = self.span if nodes.within is None else nodes.within
        first, end = max(self.span[0], within[0]), min(self.span[1], within[1])
        begin, last = np.searchsorted(self._held, (first, max(first, end)))
        self.begin, self.last_node, self._attended = int(begin), int(last), self._held[begin:last]
        self._parts: dict[int, tuple[NDArray[np.float32], ...]] = {}  # by the first row of each submission

    def plan(self) -> CallPlan:
        """A state per node, in the submissions that scratch allows."""
        runner, request, facts = self.runner, self.request, self.runner.facts
        planned, there, q_len = request.planned(), request.tokens, len(request.q)
        upload = 0 < planned.new_rows <= UPLOAD_ROWS
        if not self._attended.size:
            return CallPlan((), planned.new_rows > 0)
        planned = planned._replace(
            visible=(self._held_before(self._firsts), np.minimum(self._held_before(self._limits), there)),
            end=self.tokens,
            shifts=(self._held - np.arange(self._held.size)) * KEYS_PER_NODE,
        )
        first, stop = self.begin * KEYS_PER_NODE, min(self.last_node * KEYS_PER_NODE, there)
        edges = (*range(first, stop, KEYS_PER_NODE), stop)
        plan = SplitPlan(stop, runner.cache.shape, edges, q_len, first)
        options = CallOptions(runner.layout, None, False, runner.scorings.number[self.layer], runner.arithmetic)
        layout = SplitLayout.of(plan)
        planner = SubmissionPlanner([planned], [layout], options, facts)
        by_matrix = facts.by_matrix(options.arithmetic, q_len)
        room = min(facts.max_states // row_cost(layout, facts, by_matrix), facts.device.max_items // plan.states)
        room = max(room, 1)
        slices = [RowSlice(0, row, min(row + room, q_len)) for row in range(0, q_len, room)]
        uploads = [(0,) if upload and not piece.begin else () for piece in slices]
        submissions = (planner.plan((piece,), new, partial=True) for piece, new in zip(slices, uploads, strict=True))
        parts = tuple(part for submission in submissions for part in in_parts(submission, facts))
        return CallPlan(parts, planned.new_rows > UPLOAD_ROWS)

    def _held_before(self, positions: Indices) -> Indices:
        """Keys of this sequence that lie before absolute positions."""
        inside = np.clip(positions[:, None] - self._attended * KEYS_PER_NODE, 0, KEYS_PER_NODE)
        return np.asarray(inside.sum(axis=1) + self.begin * KEYS_PER_NODE)

    def take_from(self, workspace: Workspace, submission: Submission, copy: bool) -> None:
        """Take the states of a submission."""
        self._parts[submission.slices[0].begin] = workspace.states(len(submission.rows), self._attended.size)

    def results(self) -> PartialState:
        """The states of all rows; empty where a row sees no key of a node."""
        self.take()
        state, nodes = self._empty(), self._attended
        if self._parts:
            firsts, limits = self._firsts[:, None], self._limits[:, None]
            seen = (nodes * KEYS_PER_NODE < limits) & ((nodes + 1) * KEYS_PER_NODE > firsts)
            for target, parts in zip((state.m, state.l, state.o), zip(*self._parts.values(), strict=True), strict=True):
                target[seen] = np.concatenate(parts)[seen]
        return state

    def _empty(self) -> PartialState:
        """Empty states with the identity of the call, which allows only states of one call to be folded."""
        cache, request, scoring, q_len = self.runner.cache, self.request, self.scoring, len(self.request.q)
        empty = empty_state((q_len, len(self._attended), cache.shape.q_heads), cache.shape.v_head_dim)
        text = f"{cache.shape} {self.tokens} {q_len} {scoring.scale!r} {scoring.window} {scoring.softcap!r}"
        text += f" {cache.dtype}"
        if self.runner.arithmetic != "canonical":
            text += f" {self.runner.arithmetic}"
        if scoring.scales is not None:
            text += f" {scoring.scales.tobytes().hex()}"
        sinks = b"" if scoring.sinks is None else scoring.sinks.tobytes()
        biases = b"".join(name.encode() + slopes.tobytes() for name, slopes in scoring.biases.items())
        if request.mask is not None:
            biases += b"" if scoring.mask_slopes is None else b"slopes" + scoring.mask_slopes.tobytes()
            biases += f"mask {request.mask.begin} ".encode() + request.mask.words.tobytes()
        q = np.ascontiguousarray(request.q, np.float32).tobytes()
        identity = hashlib.sha256(text.encode() + b"\0" + sinks + biases + q).hexdigest()
        return PartialState(self._attended, empty.m, empty.l, empty.o, self.span, identity, scoring.sinks)


def _held_nodes(nodes: NodeRange, there: int) -> tuple[Indices, int]:
    """(held nodes, tokens of the whole sequence). ArgumentError: they contradict the ``there`` tokens of this part."""
    held = np.arange(-(-there // KEYS_PER_NODE)) if nodes.held is None else nodes.held
    tokens = there if nodes.tokens is None else nodes.tokens
    want = int(np.clip(tokens - held * KEYS_PER_NODE, 0, KEYS_PER_NODE).sum())
    if there != want or (held.size and held[-1] * KEYS_PER_NODE >= tokens):
        raise ArgumentError(
            f"nodes, tokens: got {held.size} nodes of a sequence of {tokens} tokens, which hold {want}, and a seq "
            f"of {there}; expected as many"
        )
    return held, tokens
