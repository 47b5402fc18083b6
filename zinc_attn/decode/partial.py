"""Partial states of a call: pass 1 alone, a state per query row and node of 512 keys, read by the host."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..canonical.arguments import key_ranges
from ..canonical.constants import KEYS_PER_NODE, LEAVES_PER_NODE
from ..canonical.partial import PartialState
from ..canonical.state import empty_state
from ..checks import check_int, shown
from ..errors import ArgumentError
from ..limits import MAX_CONTEXT
from ..planning.call import UPLOAD_ROWS, RowSlice, SubmissionPlanner
from ..planning.inputs import CallOptions, Request, SplitLayout
from ..planning.items import Indices
from ..planning.splits import SplitPlan
from .requests import CallRequest, set_mask
from .runner import CallRunner
from .scoring import Scoring


@dataclass(frozen=True, eq=False)
class NodeRange:
    """Which nodes a partial call attends, checked.

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


def attend_nodes(runner: CallRunner, request: CallRequest, layer: int, nodes: NodeRange, mask: Any) -> PartialState:
    """The states of a request's rows over the nodes that its sequence holds; its new rows are appended.

    mask: of the last keys of the whole sequence, or None.
    """
    scoring, there, q_len = runner.scorings.of(layer), request.tokens, len(request.q)
    held, tokens = _held_nodes(nodes, there)
    set_mask(request, mask, tokens)
    firsts, limits = key_ranges(tokens, q_len, True, scoring.window)
    span = int(firsts.min()) // KEYS_PER_NODE, -(-int(limits.max()) // KEYS_PER_NODE)
    within = span if nodes.within is None else nodes.within
    first, end = max(span[0], within[0]), min(span[1], within[1])
    begin, last = np.searchsorted(held, (first, max(first, end)))
    found = _empty(runner, request, tokens, scoring, held[begin:last], span)
    if begin == last:
        runner.append(request, layer)
        return found
    mine = found.nodes

    def held_before(positions: NDArray[Any]) -> Any:
        """Keys of this sequence that lie before absolute positions."""
        inside = np.clip(positions[:, None] - mine * KEYS_PER_NODE, 0, KEYS_PER_NODE)
        return inside.sum(axis=1) + begin * KEYS_PER_NODE

    planned = request.planned()._replace(
        visible=(held_before(firsts), np.minimum(held_before(limits), there)),
        end=tokens,
        shifts=(held - np.arange(held.size)) * KEYS_PER_NODE,
    )
    stop = min(int(last) * KEYS_PER_NODE, there)
    edges = (*range(int(begin) * KEYS_PER_NODE, stop, KEYS_PER_NODE), stop)
    plan = SplitPlan(stop, runner.cache.shape, edges, LEAVES_PER_NODE, q_len, int(begin) * KEYS_PER_NODE)
    states = _submit_rows(runner, request, planned, layer, plan)
    seen = (mine * KEYS_PER_NODE < limits[:, None]) & ((mine + 1) * KEYS_PER_NODE > firsts[:, None])
    for target, source in zip((found.m, found.l, found.o), states, strict=True):
        target[seen] = source[seen]
    return found


def _held_nodes(nodes: NodeRange, there: int) -> tuple[Indices, int]:
    """(nodes that the sequence holds, tokens of the whole sequence), which must fit the ``there`` tokens it has."""
    held = np.arange(-(-there // KEYS_PER_NODE)) if nodes.held is None else nodes.held
    tokens = there if nodes.tokens is None else nodes.tokens
    want = int(np.clip(tokens - held * KEYS_PER_NODE, 0, KEYS_PER_NODE).sum())
    if there != want or (held.size and held[-1] * KEYS_PER_NODE >= tokens):
        raise ArgumentError(
            f"nodes, tokens: got {held.size} nodes of a sequence of {tokens} tokens, which hold {want}, and a seq "
            f"of {there}; expected as many"
        )
    return held, tokens


def _empty(
    runner: CallRunner, request: CallRequest, tokens: int, scoring: Scoring, mine: Indices, span: tuple[int, int]
) -> PartialState:
    """The empty states of nodes ``mine``, with the identity of the call: states of one call fold together."""
    cache, q_len = runner.cache, len(request.q)
    empty = empty_state((q_len, len(mine), cache.shape.q_heads), cache.shape.v_head_dim)
    text = f"{cache.shape} {tokens} {q_len} {scoring.scale!r} {scoring.window} {scoring.softcap!r} {cache.dtype}"
    if runner.arithmetic != "canonical":
        text += f" {runner.arithmetic}"
    if scoring.scales is not None:
        text += f" {scoring.scales.tobytes().hex()}"
    sinks = b"" if scoring.sinks is None else scoring.sinks.tobytes()
    biases = b"" if scoring.alibi is None else b"alibi" + scoring.alibi.tobytes()
    if request.mask is not None:
        biases += f"mask {request.mask.begin} ".encode() + request.mask.words.tobytes()
    q = np.ascontiguousarray(request.q, np.float32).tobytes()
    identity = hashlib.sha256(text.encode() + b"\0" + sinks + biases + q).hexdigest()
    return PartialState(mine, empty.m, empty.l, empty.o, span, identity, scoring.sinks)


def _submit_rows(
    runner: CallRunner, request: CallRequest, planned: Request, layer: int, plan: SplitPlan
) -> tuple[NDArray[np.float32], ...]:
    """m, l (rows, nodes, q_heads) and o (rows, nodes, q_heads, v_head_dim), in the submissions that scratch allows.

    planned: what the plan needs to know of the request.
    """
    facts, q_len = runner.facts, len(request.q)
    upload = request.new_rows and request.new_rows <= UPLOAD_ROWS
    if request.new_rows and not upload:
        runner.append(request, layer)
    options = CallOptions(runner.layout, None, False, runner.scorings.number[layer], runner.arithmetic)
    layout = SplitLayout.of(plan, plan.build_on(runner.cache.device.info.layout_facts, runner.cache.dtype))
    planner = SubmissionPlanner([planned], [layout], options, facts)
    room = max(1, min(facts.max_states, facts.max_workgroups[0]) // plan.states)
    parts: list[Seq[NDArray[np.float32]]] = []
    for row in range(0, q_len, room):
        rows = RowSlice(0, row, min(row + room, q_len))
        submission = planner.plan((rows,), (0,) if upload and row == 0 else (), partial=True)
        workspace = runner.submit(submission, [request], layer)
        parts.append(workspace.states(rows.end - rows.begin, plan.states))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))
