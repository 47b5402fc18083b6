"""The NumPy oracles: ``attention`` (float64 truth), ``emulate`` (float32, the kernels' bits), and attention states."""

from .canonical.reference import (
    PartialState,
    PartialStateError,
    attend_partial,
    attention,
    emulate,
    fold,
    gather,
    merge_partials,
    merge_state,
    merge_states,
    merge_two,
    paged_online_attention,
    partitioned_attention,
)

__all__ = [
    "PartialState",
    "PartialStateError",
    "attend_partial",
    "attention",
    "emulate",
    "fold",
    "gather",
    "merge_partials",
    "merge_state",
    "merge_states",
    "merge_two",
    "paged_online_attention",
    "partitioned_attention",
]
