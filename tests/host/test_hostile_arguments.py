"""No argument, however wrong, gives anything but a result or a ZincAttnError: what needs no device."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import pytest
from hostile import SHAPE, K, Q, V, walk

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.tools import export

M = np.zeros((1, 1, 2), np.float32)
PART = za.PartialState(np.zeros(1, np.int64), M, M + 1, np.ones((1, 1, 2, 64), np.float32), (0, 1), "a call")
PLAN = {"context_len": 100, "shape": SHAPE, "boundaries": (0, 100), "q_len": 1, "begin": 0}
OPTIONS = {"scale": 0.5, "causal": True, "window": 2, "softcap": 1.0, "sinks": np.zeros(2, np.float32)}
CALL = {"q": Q, "k": K, "v": V} | OPTIONS
MERGED = {"v_a": K, "s_a": K[..., 0], "v_b": V, "s_b": V[..., 0]}


@wraps(za.PartialState)
def folded(**fields: Any) -> object:
    """A part is examined where it is folded."""
    return za.fold([za.PartialState(**fields)])


TABLE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "AttnShape": (za.AttnShape, {"q_heads": 2, "kv_heads": 2, "head_dim": 64}),
    "AttnShape.parse": (za.AttnShape.parse, {"text": "2/2/64"}),
    "AttnShape.kv_bytes_per_token": (SHAPE.kv_bytes_per_token, {"dtype": "f16"}),
    "PartialState": (folded, vars(PART)),
    "PartialState.from_bytes": (za.PartialState.from_bytes, {"data": PART.to_bytes()}),
    "SplitPlan": (za.SplitPlan, PLAN),
    "SplitPlan.fixed": (za.SplitPlan.fixed, {"context_len": 100, "shape": SHAPE, "num_splits": 2}),
    "SplitPlan.from_dict": (za.SplitPlan.from_dict, {"data": za.SplitPlan(**PLAN).to_dict()}),
    "fold": (za.fold, {"parts": [PART]}),
    "merge_state": (za.merge_state, MERGED),
    "merge_states": (za.merge_states, {"v": np.ones((3, 1, 2, 64)), "s": np.zeros((3, 1, 2))}),
    "plan_splits": (za.plan_splits, {"context_len": 100, "shape": SHAPE}),
    "reference.attention": (reference.attention, CALL),
    "reference.emulate": (reference.emulate, CALL),
    "reference.gather": (reference.gather, {"parts": [PART]}),
    "export.export": (export.export, {"directory": "made", "attn_shapes": ()}),
    "export.load_manifest": (export.load_manifest, {"path": "made"}),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_result_or_a_typed_refusal(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "export.load_manifest":
        export.export("made")
    call, arguments = TABLE[name]
    call(**arguments)
    assert walk(lambda: TABLE[name]) == []
