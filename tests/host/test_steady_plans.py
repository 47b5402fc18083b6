"""For which calls a plan holds: every input of the planner changes, one at a time, and the plan is the same or new."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import support

from zinc_attn.planning import call
from zinc_attn.planning.call import CallPlan, plan_call
from zinc_attn.planning.inputs import CallFacts, CallOptions, Request
from zinc_attn.planning.items import Mask
from zinc_attn.planning.layouts import fixed_layouts, split_rule_layouts
from zinc_attn.planning.steady import SteadyWords, steady_key
from zinc_attn.shapes import AttnShape

SHAPE = AttnShape(4, 2, 64)
PAGE = 128
CPU = CallFacts(support.CPU, SHAPE, PAGE)
GPU = CallFacts(replace(support.GPU, compute_units=2), SHAPE, PAGE)


def options(facts: CallFacts, window: int | None = None, cascade: bool | None = None) -> CallOptions:
    return CallOptions(split_rule_layouts(SHAPE, facts.device.compute_units), window, cascade)


def steps(lengths: tuple[int, ...], new_rows: int = 1, page: int = PAGE) -> list[Request]:
    """A sequence and its fork, which share 640 keys, but no page of a new row, nor of others in its leaf."""
    requests = []
    for number, length in enumerate(lengths):
        table, leaf = np.arange(-(-length // page), dtype=np.uint32), max(64 // page, 1)
        first_private = (len(table) - 1) // leaf * leaf if new_rows else len(table)
        table[min(640 // page, first_private) :] += 10000 * (number + 1)
        requests.append(Request(1, length, new_rows, table, stamp=1000 * number + -(-length // max(page, 64))))
    return requests


def records(plan: CallPlan, requests: list[Request]) -> list[bytes]:
    """Page ids that no key of the requests has are left out."""
    (submission,) = plan.submissions
    arrays = submission.items, submission.rows, submission.appends, submission.shared_items, submission.masks
    parts = zip(submission.slices, submission.tables_at, strict=True)
    tables = [submission.tables[offset : offset + len(requests[part.request].table)] for part, offset in parts]
    words = [array.tobytes() for array in (*arrays, *tables)]
    return [
        repr((submission.key, submission.slices, submission.spans, submission.tables_at, submission.uploads)).encode(),
        *words,
    ]


def moved(plan: CallPlan, requests: list[Request], window: int | None, page: int) -> list[bytes]:
    """The records of a plan after a steady call has set its lengths."""
    (submission,) = plan.submissions
    copied = replace(
        submission, **{name: getattr(submission, name).copy() for name in ("items", "rows", "appends", "tables")}
    )
    words = SteadyWords.of(copied, window, copied.items, copied.appends, [copied.rows], copied.tables, page)
    words.set(requests)
    return records(CallPlan((copied,), plan.upload_first), requests)


@pytest.mark.parametrize("cascade", (None, True, False))
@pytest.mark.parametrize("facts", (CPU, GPU), ids=lambda facts: facts.device.kind)
@pytest.mark.parametrize(
    ("window", "batch", "new_rows", "page"),
    ((None, 1, 1, 1), (None, 2, 1, PAGE), (None, 2, 1, 16), (None, 2, 0, 1), (70, 1, 1, PAGE), (600, 2, 0, PAGE)),
)
def test_lengths_of_a_key_have_one_plan(facts, cascade, window, batch, new_rows, page):
    """One sequence grows, and all do: over leaves, nodes, the window's own, and pages that a leaf has several of."""
    facts = replace(facts, page_size=page)
    call_options, plans, served = options(facts, window, cascade), {}, 0
    lengths = [n + d for n in (64, 128, 448, 512, 576, 640, 1024) for d in (-3, -1, 0, 1, 2, 5, 6, 7)]
    for length in (*lengths, *reversed(lengths)):
        for tokens in {(length,) * batch, (length, 700)[:batch]}:
            requests = steps(tokens, new_rows, page)
            plan = plan_call(requests, call_options, facts)
            assert plan.steady is not None and plan.steady == steady_key(requests, call_options, facts)
            first = plans.setdefault(plan.steady, plan)
            served += first is not plan
            assert moved(first, requests, window, page) == records(plan, requests)
            (submission,) = plan.submissions
            assert submission.spans == first.submissions[0].spans
    assert len(plans) < served


OTHERS: dict[type, dict[str, Any]] = {
    Request: {
        "q_len": 2,
        "tokens": 129,
        "new_rows": 0,
        "table": None,  # which its stamp stands for
        "visible": (np.array([3]), np.array([99])),
        "causal": False,
        "mask": Mask(np.zeros((1, 3), np.uint32), 97),
        "end": 200,
        "shifts": np.zeros(4, np.int64),
        "stamp": 7,
    },
    CallOptions: {
        "layout": fixed_layouts(SHAPE, num_splits=2, split_size=None),
        "window": 60,
        "cascade": False,
        "scoring": 1,
        "arithmetic": "matrix-prefill",
    },
    CallFacts: {"shape": AttnShape(8, 2, 64), "device": support.GPU, "page_size": 64, "units": True},
}


def test_every_other_input_is_planned_anew():
    """The table has every field, so that one which is added says here what the plans that were made do with it."""
    call_options = options(CPU)
    (request,), key = steps((100,)), steady_key(steps((100,)), call_options, CPU)
    assert key is not None and key == steady_key([request._replace(tokens=101)], call_options, CPU)
    assert OTHERS[Request].keys() == set(Request._fields)
    for name, other in OTHERS[Request].items():
        changed = request._replace(**{name: other})
        assert name == "table" or steady_key([changed], call_options, CPU) != key, name
    assert steady_key([request._replace(stamp=None)], call_options, CPU) is None
    assert steady_key([request] * 2, call_options, CPU) != key
    for kind, inputs in ((CallOptions, (call_options, CPU)), (CallFacts, (call_options, CPU))):
        assert OTHERS[kind].keys() == {field.name for field in fields(kind)}
        for name, other in OTHERS[kind].items():
            changed = [replace(array, **{name: other}) if isinstance(array, kind) else array for array in inputs]
            assert steady_key([request], *changed) not in (key, None), name


def test_a_plan_of_several_submissions_holds_for_no_other_call(monkeypatch):
    """A submission that does not append the call's new rows, and one that is not all of the call."""
    requests, call_options = steps((100, 100)), options(CPU)
    assert plan_call(requests, call_options, CPU).steady is not None
    monkeypatch.setattr(call, "UPLOAD_ROWS", 1)
    plan = plan_call(requests, call_options, CPU)
    assert plan.upload_first and len(plan.submissions) == 1 and plan.steady is None
    few = replace(CPU, device=replace(CPU.device, max_workgroups=(4, 4, 1)))
    assert len(plan_call(steps((100, 100), 0), call_options, few).submissions) == 2
    assert plan_call(steps((100, 100), 0), call_options, few).steady is None
