"""What is measured, checked before any device is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...cache.pages import PagePool
from ...cache.rows import stored_values
from ...checks import check_int
from ...decode.arithmetic import arithmetic_name
from ...dtypes import storage_dtype
from ...errors import ArgumentError, ShapeError
from ...limits import MAX_CONTEXT
from ...planning.arithmetic import Arithmetic, on_matrices
from ...shapes import AttnShape, row_format
from ...storage import storage_types
from ..harness.bits import ORACLE_PRODUCTS
from ..harness.inputs import Inputs, check_stored_v
from ..harness.split_spec import SplitSpec

PAGE_SIZE: Final = 256  # tokens


@dataclass(frozen=True)
class CallSpec:
    """The calls that are measured. ArgumentError and its kinds name the field that cannot be.

    layers: attention layers of a step; contexts: keys of a sequence, the call's q_len rows among them; splits:
    layouts (those of ``distributed_sweep`` and ``bench`` are their own); dtype: of K and V; batch: sequences in a call,
    with q_len new rows each; page_size: tokens, None for contiguous K and V without a cache (one sequence); repeats:
    timed calls per point (None: 5 to 50 within some seconds); weights_ms: the rest of a step; kv: values of this shape
    for every sequence, in place of normal ones from ``seed``; arithmetic: see ``Attention``; oracle_products: batch *
    q_len * context * q_heads * head_dim up to which everything is compared with the oracle, and above it as many KV
    heads as that allows.
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
    weights_ms: float | None = None
    seed: int = 0
    kv: Inputs | None = None
    model: str = ""
    arithmetic: Arithmetic = "canonical"
    oracle_products: int = ORACLE_PRODUCTS

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", storage_dtype(self.dtype))
        row_format(check_stored_v(self.shape), self.dtype)  # refuses a dtype that the shape does not take
        for name in ("layers", "batch", "q_len"):
            check_int(name, getattr(self, name), 1)
        if self.page_size is not None:
            PagePool(1, self.page_size)
        elif self.batch > 1:
            raise ArgumentError(f"batch: got {self.batch}, expected 1 for contiguous K and V without a cache")
        for name in ("contexts", "splits"):
            if not getattr(self, name):
                raise ArgumentError(f"{name}: got none, expected one or more")
        arithmetic_name(self.arithmetic)
        check_int("seed", self.seed, 0)
        if self.repeats is not None:
            check_int("repeats", self.repeats, 1)
        if self.weights_ms is not None and not 0 <= self.weights_ms < float("inf"):
            raise ArgumentError(f"weights_ms: got {self.weights_ms}, expected milliseconds of at least 0")
        shortest = min(check_int("contexts", context, 1, MAX_CONTEXT) for context in self.contexts)
        if shortest < self.q_len:
            raise ArgumentError(f"contexts: got {shortest}, expected at least {self.q_len}, the call's own rows")
        if self.kv is not None:
            self._check_kv(self.kv)

    def _check_kv(self, kv: Inputs) -> None:
        longest = max(self.contexts)
        if kv.shape != self.shape:
            raise ShapeError(f"kv: got {kv.shape}, expected {self.shape}")
        if len(kv.rows) != self.q_len:
            raise ShapeError(f"q_len: got {self.q_len}, expected {len(kv.rows)}, the query rows in {kv.source}")
        if longest > len(kv.k):
            raise ArgumentError(f"contexts: got {longest}, expected at most {len(kv.k)}, the tokens in {kv.source}")
        try:
            for name, x, kind in zip("kv", (kv.k, kv.v), storage_types(self.dtype), strict=True):
                stored_values(name, x, kind.name)
        except ArgumentError as error:
            raise type(error)(f"{kv.source}: {error}") from error

    @property
    def bounded(self) -> bool:
        """Whether matrix units attend, so that a call has a bound of its error in place of the oracle's bits."""
        return on_matrices(self.arithmetic, self.q_len, self.shape)

    def inputs(self, context: int, sequence: int = 0) -> Inputs:
        """The values of one sequence of the batch."""
        if self.kv:
            return self.kv.prefix(context)
        return Inputs.normal(self.shape, context, self.dtype, self.seed, q_len=self.q_len, sequence=sequence)
