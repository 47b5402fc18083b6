"""Step 1 of a call: the caller's arrays become requests, or a typed refusal."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cache.kv_cache import KVCache
from ..cache.rows import Largest, checked_values
from ..cache.sequence import Sequence
from ..cache.transaction import Reservation, Transaction
from ..cache.unseen import examine
from ..canonical.arguments import check_mask, key_ranges
from ..checks import check_array, check_bool
from ..errors import ArgumentError, LimitError, ShapeError
from ..kernels import declarations
from ..limits import MAX_CONTEXT
from ..planning.inputs import Request
from ..planning.items import Mask
from .scoring import check_score_bound
from .targets import NEW_ARRAYS, Target, check_targets

F32 = NDArray[np.float32]


@dataclass(eq=False, slots=True)
class CallRequest:
    """The rows of one sequence of a call.

    q: (q_len, q_heads, head_dim) checked values; new: k and v of the new rows, (n, kv_heads, head_dim) stored values,
    or None; tokens: of the sequence's layer, the new rows included; reservation: the places of the new rows; causal,
    mask: see ``planning.call.Request``; target: where the results go.
    """

    sequence: Sequence
    q: NDArray[Any]
    new: tuple[NDArray[Any], NDArray[Any]] | None = None
    tokens: int = 0
    reservation: Reservation | None = None
    target: Target = NEW_ARRAYS
    causal: bool = True
    mask: Mask | None = None

    @property
    def new_rows(self) -> int:
        """Rows that the call appends."""
        return 0 if self.new is None else len(self.new[0])

    def planned(self) -> Request:
        """What the plan of the call needs to know of this request."""
        table = self.sequence.table(self.reservation)
        return Request(len(self.q), self.tokens, self.new_rows, table, self.sequence.stamp, self.causal, self.mask)


@dataclass(frozen=True, eq=False)
class Checked:
    """The requests of a call, the largest |q| of them, and the largest magnitudes of its new rows."""

    requests: list[CallRequest]
    largest_q: float
    largest: Largest


class CallBatch(NamedTuple):
    """A call's arguments with an entry per sequence; None for those that are not given. single: not a batch."""

    sequences: list[Any]
    q: Seq[Any]
    k: Seq[Any] | None
    v: Seq[Any] | None
    out: Seq[Any] | None
    lse: Seq[Any] | None
    mask: Seq[Any] | None
    single: bool

    @classmethod
    def checked(
        cls, seq: Any, q: Any, k: Any = None, v: Any = None, out: Any = None, lse: Any = None, mask: Any = None
    ) -> CallBatch:
        """The arguments of a call of one sequence, or, where ``seq`` is a list, of a batch."""
        single = not isinstance(seq, (list, tuple))
        if single:
            q, (k, v, out, lse, mask) = [q], (None if x is None else [x] for x in (k, v, out, lse, mask))
        sequences = [seq] if single else list(seq)
        for name, column in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse), ("mask", mask)):
            if column is not None and (not isinstance(column, (list, tuple)) or len(column) != len(sequences)):
                raise ArgumentError(f"{name}: expected a list of {len(sequences)} arrays, one per sequence")
        if q is None:
            raise ArgumentError(f"q: got None, expected a list of {len(sequences)} arrays, one per sequence")
        return cls(sequences, q, k, v, out, lse, mask, single)

    def check_new(self, latent: bool) -> None:
        """Refuse k without v, and v without k, but for a latent cache, which takes no v."""
        if latent and self.v is not None:
            raise ArgumentError("v: got an array, expected None: the values of a latent cache are part of k")
        if (self.k is None) != (self.v is None) and not latent:
            raise ArgumentError(f"{'v' if self.v is None else 'k'}: got None, expected both k and v, or neither")


class CallArguments(NamedTuple):
    """A call's arguments as they were given, with an entry per sequence."""

    batch: CallBatch
    return_lse: bool
    allow_empty: bool
    causal: bool = True

    @classmethod
    def checked(cls, batch: CallBatch, return_lse: Any, allow_empty: Any, causal: Any) -> CallArguments:
        """The arguments of a call on a KVCache, as far as they can be checked without it."""
        if batch.single and not isinstance(batch.sequences[0], Sequence):
            given = type(batch.sequences[0]).__name__
            raise ArgumentError(f"seq: got {given}, expected a Sequence or a list of them")
        flags = {"return_lse": return_lse, "allow_empty": allow_empty, "causal": causal}
        return cls(batch, **{name: check_bool(name, x) for name, x in flags.items()})

    def attach_masks(self, requests: list[CallRequest], window: int | None) -> None:
        """Check and keep the masks of the requests, whose tokens are known, and refuse rows that see no key."""
        for i, request in enumerate(requests):
            request.causal = self.causal
            set_mask(request, None if self.batch.mask is None else self.batch.mask[i], request.tokens)
            if not self.allow_empty:
                check_seen(len(request.q), request.tokens, self.causal, request.mask, window)

    def shaped(self, found: tuple[list[F32], list[F32]]) -> Any:
        """What the call returns, of its results (q_len, ...) of each sequence."""
        outs, lses = (
            list(map(shaped_like, self.batch.q, results)) if given is None else list(given)
            for given, results in zip((self.batch.out, self.batch.lse), found, strict=True)
        )
        if self.batch.single:
            return (outs[0], lses[0]) if self.return_lse else outs[0]
        return (outs, lses) if self.return_lse else outs


def check_requests(cache: KVCache, batch: CallBatch, scale: float, layer: int) -> Checked:
    """The requests of a call of a layer, whose bound on scores counts all rows that its sequences have there. Typed
    refusals name the argument."""
    requests, q_max, new_max = [], 0.0, Largest()
    sequences, q, k, v, out, lse, *_ = batch
    batch.check_new(cache.shape.latent)
    for i, sequence in enumerate(sequences):
        examine(cache.check_sequence(sequence), layer)
        if k is not None:
            check_once(sequences, i)
        rows, largest = _check_q(cache, q[i])
        q_max = max(q_max, largest)
        new = None
        if k is not None:
            *new, largest_new = cache.check_rows(k[i], None if v is None else v[i], layer)
            new_max = new_max.joined(largest_new)
        requests.append(CallRequest(sequence, rows, None if new is None else (new[0], new[1])))
    check_score_bound(q_max, cache.largest.joined(new_max).k, cache.shape.head_dim, scale)
    if out is not None or lse is not None:
        dims = cache.shape.v_head_dim
        shapes = [(*request.q.shape[3 - np.ndim(x) : 2], dims) for request, x in zip(requests, q, strict=True)]
        for request, target in zip(requests, check_targets(shapes, out, lse), strict=True):
            request.target = target
    return Checked(requests, q_max, new_max)


def check_once(sequences: Seq[Any], i: int) -> None:
    """Refuse sequence number ``i`` of a call with new rows where it is one of those before it."""
    if sequences[i] in sequences[:i]:
        raise ArgumentError(
            f"seq: items {sequences.index(sequences[i])} and {i} are the same sequence, expected each once where k and "
            "v are given; fork() it"
        )


def set_mask(request: CallRequest, mask: Any, tokens: int) -> None:
    """Check a request's mask of the last keys of a sequence of ``tokens`` keys, and keep it as words."""
    request.mask = mask_words(mask, len(request.q), tokens)
    if request.mask is not None:
        check_mask_bytes("mask", request.mask.words.size, request.sequence.cache)


def check_mask_bytes(name: str, words: int, cache: KVCache) -> None:
    """Refuse a mask of more than half of the largest buffer, which holds the call's records, too."""
    limit = cache.device.info.max_buffer_bytes // 2
    if 4 * words > limit:
        raise LimitError(
            f"{name}: got {4 * words:,} bytes as float32, expected at most {limit:,}; attend fewer rows at a time"
        )


def mask_words(mask: Any, q_len: int, tokens: int) -> Mask | None:
    """A mask of the last of ``tokens`` keys, checked, as words."""
    values = check_mask(mask, q_len, tokens)
    return None if values is None else Mask(np.ascontiguousarray(values).view(np.uint32), tokens - values.shape[1])


def check_seen(q_len: int, keys: int, causal: bool = True, mask: Mask | None = None, window: int | None = None) -> None:
    """Refuse query rows that see no key. keys: of the sequence, the new ones included; window: see ``Attention``."""
    blind = max(q_len - keys, 0) if causal else 0 if keys else q_len
    if blind:
        raise ArgumentError(
            f"q: got {q_len} rows for {keys} keys, {blind} of them before the first key, expected at least as many "
            "keys as rows; append k and v first, or give allow_empty=True, with which such rows have an output of 0"
        )
    if mask is None:
        return
    first, limit = (x[:, None] for x in key_ranges(keys, q_len, causal, window))
    position = mask.begin + np.arange(mask.words.shape[1])
    seen = (mask.words != declarations.HIDDEN) & (position >= first) & (position < limit)
    sees = seen.any(axis=1) | (first < np.minimum(limit, mask.begin))[:, 0]  # in the mask, or before it
    if not np.all(sees):
        raise ArgumentError(
            f"mask: row {int(np.argmin(sees))} sees no key, expected one at least; give allow_empty=True, with which "
            "such rows have an output of 0"
        )


def reserve_rows(cache: KVCache, requests: list[CallRequest], layer: int) -> Transaction:
    """Reserve the places of the requests' new rows, and copy the shared pages that they would be written to."""
    transaction = cache.transaction()
    for request in requests:
        request.tokens = request.sequence.pages.length(layer) + request.new_rows
    for request in sorted(requests, key=lambda one: one.tokens - one.new_rows):  # short ones first: fewer copies
        if request.new is not None:
            request.reservation = transaction.reserve(request.sequence.pages, layer, request.new_rows)
            cache.copy_pages(request.reservation.copies)
    return transaction


def _check_q(cache: KVCache, q: Any) -> tuple[NDArray[Any], float]:
    """(q_len, q_heads, head_dim) values and the largest magnitude; indices in errors are as the caller counts them."""
    array, shape = check_array("q", q), cache.shape
    want = (shape.q_heads, shape.head_dim)
    if array.ndim not in (2, 3) or array.shape[-2:] != want or array.shape[0] == 0:
        raise ShapeError(f"q: got shape {array.shape}, expected {want} or (q_len, {want[0]}, {want[1]})")
    if array.ndim == 3 and len(array) > MAX_CONTEXT:
        raise ShapeError(f"q: got {len(array):,} rows, expected at most {MAX_CONTEXT:,}")
    values, largest = checked_values("q", check_array("q", array, ("float32", "float16", "bfloat16")))
    return (values if array.ndim == 3 else values[None]), largest


def shaped_like(q: Any, out: NDArray[np.float32]) -> NDArray[np.float32]:
    """Results (q_len, ...) without the first axis where the caller's q has no row axis."""
    return out[0] if np.ndim(q) == 2 else out
