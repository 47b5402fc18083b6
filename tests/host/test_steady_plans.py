"""For which calls a plan holds, by every input of the planner in turn, and which recordings growth needs."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import support

from zinc_attn.planning import call, growth
from zinc_attn.planning.call import CallPlan, plan_call
from zinc_attn.planning.growth import growth_keys
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
    others = submission.key, submission.slices, submission.spans, submission.tables_at, submission.uploads
    return [repr(others).encode(), *(array.tobytes() for array in (*arrays, *tables))]


def moved(plan: CallPlan, requests: list[Request], window: int | None, page: int) -> list[bytes]:
    """The records of a plan after a steady call has set its lengths."""
    (submission,) = plan.submissions
    arrays = {name: getattr(submission, name).copy() for name in ("items", "rows", "appends", "tables")}
    copied = replace(submission, **arrays)
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


def keys_of(lengths, batch, q_len, options, facts):
    """The keys of calls of these lengths, each of which is planned."""
    keys = set()
    for length in lengths:
        pages = -(-length // facts.page_size)
        tables = np.arange(batch * pages, dtype=np.uint32).reshape(batch, pages)
        requests = [Request(q_len, length, q_len, table) for table in tables]
        keys |= {submission.key for submission in plan_call(requests, options, facts).submissions}
    return keys


@pytest.mark.parametrize(
    ("shape", "kind", "units", "batch", "q_len", "window", "splits"),
    [
        ("16/2/256", "discrete", 64, 1, 1, None, None),
        ("32/8/128", "discrete", 56, 1, 1, None, None),
        ("9/3/64", "cpu", 2, 1, 1, 700, None),
        ("9/3/64", "discrete", 64, 5, 1, 1000, None),
        ("32/4/128", "discrete", 64, 3, 5, None, 7),
        ("32/8/128", "discrete", 1, 1, 1, None, None),
        ("32/32/128", "discrete", 2, 1, 1, None, None),  # workgroups walk from 2,049 keys on
    ],
)
@pytest.mark.parametrize("short", (False, True))
def test_few_lengths_stand_for_all(short, shape, kind, units, batch, q_len, window, splits):
    """Also where a submission has 100 workgroups."""
    parsed, tokens = AttnShape.parse(shape), 2200 // q_len * q_len
    info = replace(support.GPU, kind=kind, compute_units=units, max_workgroups=(100 if short else 65535,) * 3)
    facts = CallFacts(info, parsed, 256)
    fixed = fixed_layouts(parsed, num_splits=splits, split_size=None) if splits else None
    layouts = fixed or split_rule_layouts(parsed, units)
    options = CallOptions(layouts, window)
    result = growth_keys(tokens, batch, q_len, options, facts, by_rule=layouts.by_rule)
    every = keys_of(range(q_len, tokens + 1, q_len), batch, q_len, options, facts)
    assert every <= result and len(result) < len(every) + 12


def test_a_long_context_is_planned_from_few_lengths(monkeypatch):
    """Of 2,048 leaves fewer than a tenth are planned, so that a cache is prepared in seconds."""
    planned = set()

    def noted(requests, *others):
        planned.add(-(-requests[0].tokens // 64))
        return plan_call(requests, *others)

    monkeypatch.setattr(growth, "plan_call", noted)
    shape = AttnShape(16, 2, 256)
    layouts = split_rule_layouts(shape, 2)
    growth_keys(131_072, 1, 1, CallOptions(layouts), CallFacts(support.CPU, shape, 256), by_rule=True)
    assert {1, 2048} <= planned and len(planned) < 204


def test_rows_before_a_cut_share_another_node_from_the_middle_of_a_leaf_on():
    shape, q_len = AttnShape(4, 2, 64), 36
    facts = CallFacts(replace(support.CPU, max_workgroups=(65535, 65535, 33)), shape, 256)
    options = CallOptions(split_rule_layouts(shape, 2))
    result = growth_keys(7744, 1, q_len, options, facts, by_rule=True)
    assert keys_of(range(7681, 7745), 1, q_len, options, facts) <= result
    assert {key.rows for key in result} >= {4}, "the rows behind the cut"
