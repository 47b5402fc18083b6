"""No argument, however wrong, gives anything but a result or a ZincAttnError: what needs no device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hostile import INNER, ON_DEVICE, Make, all_public, walk

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.tools import export

SHAPE = za.AttnShape(2, 2, 64)


def arrays() -> dict[str, Any]:
    return {"q": np.ones((2, 64), np.float32), **{name: np.ones((3, 2, 64), np.float32) for name in "kv"}}


def options() -> dict[str, Any]:
    return {"scale": 0.5, "causal": True, "window": 2, "softcap": 1.0, "sinks": np.zeros(2, np.float32)}


def part() -> za.PartialState:
    m = np.zeros((1, 1, 2), np.float32)
    return za.PartialState(np.zeros(1, np.int64), m, m + 1, np.ones((1, 1, 2, 64), np.float32), (0, 1), "a call")


def fields() -> dict[str, Any]:
    return dict(vars(part()))


def merged() -> dict[str, Any]:
    v, s = np.ones((3, 2, 64), np.float32), np.zeros((3, 2), np.float32)
    return {"v_a": v, "s_a": s, "v_b": v, "s_b": s}


PLAN = {"context_len": 100, "shape": SHAPE, "boundaries": (0, 50, 100), "leaves_per_state": 1, "q_len": 1, "begin": 0}

TABLE: dict[str, Make] = {
    "AttnShape": lambda: (za.AttnShape, {"q_heads": 2, "kv_heads": 2, "head_dim": 64}),
    "AttnShape.parse": lambda: (za.AttnShape.parse, {"text": "2/2/64"}),
    "AttnShape.kv_bytes_per_token": lambda: (SHAPE.kv_bytes_per_token, {"dtype": "f16"}),
    "PartialState": lambda: (lambda **given: za.fold([za.PartialState(**given)]), fields()),
    "PartialState.from_bytes": lambda: (za.PartialState.from_bytes, {"data": part().to_bytes()}),
    "SplitPlan": lambda: (za.SplitPlan, dict(PLAN)),
    "SplitPlan.fixed": lambda: (za.SplitPlan.fixed, {"context_len": 100, "shape": SHAPE, "num_splits": 2}),
    "SplitPlan.from_dict": lambda: (za.SplitPlan.from_dict, {"data": za.SplitPlan(**PLAN).to_dict()}),
    "fold": lambda: (za.fold, {"parts": [part()]}),
    "merge_state": lambda: (za.merge_state, merged()),
    "merge_states": lambda: (za.merge_states, {"v": np.ones((3, 1, 2, 64)), "s": np.zeros((3, 1, 2))}),
    "plan_splits": lambda: (za.plan_splits, {"context_len": 100, "shape": SHAPE}),
    "reference.attention": lambda: (reference.attention, arrays() | options()),
    "reference.emulate": lambda: (reference.emulate, arrays() | options()),
    "reference.gather": lambda: (reference.gather, {"parts": [part()]}),
    "export.export": lambda: (export.export, {"directory": "made", "attn_shapes": ()}),
    "export.load_manifest": lambda: (export.load_manifest, {"path": "made"}),
}


def test_every_public_callable_is_in_a_table():
    assert all_public() == set(TABLE) | set(ON_DEVICE) | INNER


@pytest.mark.parametrize("name", TABLE)
def test_a_result_or_a_typed_refusal(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "export.load_manifest":
        export.export("made")
    call, arguments = TABLE[name]()
    call(**arguments)
    assert walk(TABLE[name]) == []
