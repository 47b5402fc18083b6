"""The NumPy oracles: ``attention`` (float64 truth), ``emulate`` (float32, the kernels' bits), and attention states."""

from .canonical.emulate import emulate
from .canonical.partial import PartialState, PartialStateError, fold, gather
from .canonical.reference import attention, merge_state, merge_states

__all__ = ["PartialState", "PartialStateError", "attention", "emulate", "fold", "gather", "merge_state", "merge_states"]
