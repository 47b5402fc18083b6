"""The NumPy oracles: ``attention`` (float64 truth), ``emulate`` (float32, the kernels' bits), and partial states."""

from .canonical.emulate import emulate
from .canonical.partial import PartialState, PartialStateError, fold, gather
from .canonical.reference import attention

__all__ = ["PartialState", "PartialStateError", "attention", "emulate", "fold", "gather"]
