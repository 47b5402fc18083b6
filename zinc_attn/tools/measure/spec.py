"""The measured calls, checked before any device is opened."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...cache.pages import PagePool
from ...checks import check_int
from ...decode.arithmetic import arithmetic_name
from ...dtypes import storage_dtype
from ...errors import ArgumentError
from ...limits import MAX_CONTEXT
from ...planning.arithmetic import EXACT, Arithmetic, on_matrices
from ...shapes import AttnShape, row_format
from ..harness.bits import ORACLE_PRODUCTS
from ..harness.inputs import Inputs, check_stored_v
from ..harness.split_spec import SplitSpec

PAGE_SIZE: Final = 256  # tokens


@dataclass(frozen=True)
class CallSpec:
    """The calls that are measured. ArgumentError and its kinds name the field that cannot be.

    layers: attention layers of a step; contexts: keys of a sequence, the call's q_len rows among them; splits: layouts;
    dtype: of K and V; batch: sequences in a call, with q_len new rows each; page_size: tokens, None for calls of one
    sequence that append nothing, whose submission alone is timed; repeats: timed calls per point (None: 5 to 50 within
    some seconds); arithmetic: see ``Attention``; weights_ms: the time of the rest of a step; against: names of OTHERS,
    for calls of one row; oracle_products: batch * q_len * context * q_heads * head_dim up to which everything is
    compared with the oracle, and above which as many KV heads as that allows.
    """

    shape: AttnShape
    layers: int
    contexts: Sequence[int]
    splits: Sequence[SplitSpec] = (SplitSpec("auto"), SplitSpec("1", num_splits=1))
    dtype: str = "f16"
    batch: int = 1
    q_len: int = 1
    page_size: int | None = PAGE_SIZE
    repeats: int | None = None
    model: str = ""
    arithmetic: Arithmetic = "canonical"
    weights_ms: float | None = None
    against: Sequence[str] = ()
    oracle_products: int = ORACLE_PRODUCTS

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", storage_dtype(self.dtype))
        row_format(check_stored_v(self.shape), self.dtype)  # refuses a dtype that the shape does not take
        for name in ("layers", "batch", "q_len"):
            check_int(name, getattr(self, name), 1)
        if self.page_size is not None:
            PagePool(1, self.page_size)
        arithmetic_name(self.arithmetic)
        if self.repeats is not None:
            check_int("repeats", self.repeats, 1)
        if self.weights_ms is not None and not 0 <= self.weights_ms < float("inf"):
            raise ArgumentError(f"weights_ms: got {self.weights_ms:g}, expected milliseconds of at least 0")
        shortest = min(check_int("contexts", context, 1, MAX_CONTEXT) for context in self.contexts)
        if shortest < self.q_len:
            raise ArgumentError(f"contexts: got {shortest}, expected at least {self.q_len}, the call's own rows")
        check_int("batch * contexts", self.batch * max(self.contexts), 1, MAX_CONTEXT)  # tokens of a cache

    @property
    def bounded(self) -> bool:
        """Whether matrix units attend, so that a call has a bound of its error in place of the oracle's bits."""
        return self.arithmetic not in EXACT and on_matrices(self.arithmetic, self.q_len, self.shape)

    def inputs(self, context: int, sequence: int = 0) -> Inputs:
        return Inputs.normal(self.shape, context, self.dtype, q_len=self.q_len, sequence=sequence)
