"""What a sweep measures, checked before any device is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...cache.pages import PagePool
from ...cache.rows import stored_values
from ...errors import ArgumentError, DTypeError, ShapeError
from ...shapes import AttnShape, check_int, value_words
from ..harness.inputs import NUMPY_DTYPES, Inputs
from ..harness.oracle import ORACLE_PRODUCTS
from ..harness.split_spec import SplitSpec

PAGE_SIZE: Final = 256  # tokens


@dataclass(frozen=True)
class SweepSpec:
    """The calls of a sweep. ArgumentError and its kinds name the field that cannot be measured.

    layers: attention layers of a step; contexts: keys of a sequence, the call's q_len rows among them; splits: layouts
    (``distributed_sweep`` has its own); dtype: of K and V; batch: sequences in a call, with q_len new rows each;
    page_size: tokens, None for contiguous K and V without a cache (one sequence, f32 or f16); repeats: timed calls per
    point (None: 5 to 50 within 3 s); weights_ms: the rest of a step; kv: values of this shape for every sequence, in
    place of normal ones from ``seed``; oracle_products: batch * q_len * context * q_heads * head_dim up to which
    everything is compared with the oracle, and above it as many KV heads as that allows.
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
    oracle_products: int = ORACLE_PRODUCTS

    def __post_init__(self) -> None:
        value_words(self.shape.head_dim, self.dtype)
        for name in ("layers", "batch", "q_len"):
            check_int(name, getattr(self, name), 1)
        if self.page_size is not None:
            PagePool(1, self.page_size)
        elif self.dtype not in NUMPY_DTYPES:
            raise DTypeError(f"dtype: got {self.dtype}, expected f32 or f16 for contiguous K and V without a cache")
        elif self.batch > 1:
            raise ArgumentError(f"batch: got {self.batch}, expected 1 for contiguous K and V without a cache")
        for name in ("contexts", "splits"):
            if not getattr(self, name):
                raise ArgumentError(f"{name}: got none, expected one or more")
        check_int("seed", self.seed, 0)
        if self.repeats is not None:
            check_int("repeats", self.repeats, 1)
        if self.weights_ms is not None and not 0 <= self.weights_ms < float("inf"):
            raise ArgumentError(f"weights_ms: got {self.weights_ms}, expected milliseconds of at least 0")
        shortest = min(self.contexts)
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
        if self.page_size is None and kv.dtype != self.dtype:
            raise DTypeError(f"dtype: got {self.dtype}, expected {kv.dtype} for {kv.source} without a cache")
        try:
            for name, x in (("k", kv.k), ("v", kv.v)):
                stored_values(name, x, self.dtype)
        except ArgumentError as error:
            raise type(error)(f"{kv.source}: {error}") from error

    def inputs(self, context: int, sequence: int = 0) -> Inputs:
        """The values of one sequence of the batch."""
        if self.kv:
            return self.kv.prefix(context)
        return Inputs.normal(self.shape, context, self.dtype, self.seed, q_len=self.q_len, sequence=sequence)
