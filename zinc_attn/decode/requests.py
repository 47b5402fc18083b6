"""Step 1 of a call: the caller's arrays become requests, or a typed refusal; then their new rows get pages."""

import inspect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..cache.kv_cache import KVCache
from ..cache.rows import Largest, checked_values
from ..cache.sequence import Sequence
from ..cache.transaction import Reservation, Transaction
from ..cache.unseen import examine, within
from ..canonical.arguments import check_mask, key_ranges
from ..canonical.state import F32
from ..checks import check_array, check_bool
from ..errors import ArgumentError, LimitError, ShapeError
from ..kernels import declarations
from ..limits import MAX_CONTEXT
from ..planning.inputs import Request
from ..planning.items import Mask
from .scoring import Scoring
from .targets import NEW_ARRAYS, Target, check_targets


@dataclass(eq=False, slots=True)
class CallRequest:
    """The rows of one sequence of a call, checked.

    q: (q_len, q_heads, head_dim) checked values; tokens: of the sequence's layer, the new rows included; new: k and v
    of the new rows, (n, kv_heads, head_dim) stored values, or None; causal, mask: see ``planning.inputs.Request``;
    target: where the results go; reservation: where the new rows go, from ``reserve_rows`` on.
    """

    sequence: Sequence
    q: NDArray[Any]
    tokens: int
    new: tuple[NDArray[Any], NDArray[Any]] | None = None
    causal: bool = True
    mask: Mask | None = None
    target: Target = NEW_ARRAYS
    reservation: Reservation | None = None

    def planned(self) -> Request:
        """This request as the plan of the call takes it."""
        sequence, new_rows = self.sequence, 0 if self.new is None else len(self.new[0])
        table = sequence.table(self.reservation)
        return Request(len(self.q), self.tokens, new_rows, table, sequence.stamp, self.causal, self.mask)


class CallBatch(NamedTuple):
    """A call's arguments: lists with an entry per sequence, None for missing arguments, and flags.

    single: whether the call has a sequence in place of a list.
    """

    sequences: list[Any]
    q: Seq[Any]
    k: Seq[Any] | None
    v: Seq[Any] | None
    out: Seq[Any] | None
    lse: Seq[Any] | None
    mask: Seq[Any] | None
    single: bool
    return_lse: bool = False
    allow_empty: bool = False
    causal: bool = True

    def check_new(self, latent: bool) -> None:
        """Refuse k without v, and v without k, but for a latent cache, which takes no v."""
        if latent and self.v is not None:
            raise ArgumentError("v: got an array, expected None: the values of a latent cache are part of k")
        if (self.k is None) != (self.v is None) and not latent:
            raise ArgumentError(f"{'v' if self.v is None else 'k'}: got None, expected both k and v, or neither")

    def check_mask(self, i: int, q_len: int, tokens: int, window: int | None, cache: KVCache) -> Mask | None:
        """The mask of sequence number ``i``, of ``tokens`` keys, as words, or None.

        Without ``allow_empty`` rows that see no key are refused.
        """
        mask = None
        if self.mask is not None:
            mask = mask_words(self.mask[i], q_len, tokens)
            check_mask_bytes("mask", 0 if mask is None else mask.words.size, cache)
        if not self.allow_empty:
            check_seen(q_len, tokens, self.causal, mask, window)
        return mask

    def shaped(self, outs: Seq[F32], lses: Seq[F32]) -> Any:
        """The call's return value, from results (q_len, ...) of each sequence, or the caller's arrays with them."""
        returned = []
        for targets, results in ((self.out, outs), (self.lse, lses))[: 1 + self.return_lse]:
            rows = zip(self.q, results, strict=True)
            arrays = [x[0] if np.ndim(q) == 2 else x for q, x in rows] if targets is None else list(targets)
            returned.append(arrays[0] if self.single else arrays)
        return tuple(returned) if self.return_lse else returned[0]


def call_arguments(  # noqa: PLR0913  (the arguments of a call)
    q: Any,
    seq: Any,
    layer: int,
    k: Any = None,
    v: Any = None,
    *,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    allow_empty: bool = False,
    causal: bool = True,
    mask: Any = None,
) -> tuple[CallBatch, int]:
    """The arguments of every call, of one sequence or, where ``seq`` is a list, of a batch, and the layer."""
    options = {"return_lse": return_lse, "allow_empty": allow_empty, "causal": causal}
    flags = [check_bool(name, flag) for name, flag in options.items()]
    if not isinstance(seq, (list, tuple)):
        k, v, out, lse, mask = (None if value is None else [value] for value in (k, v, out, lse, mask))
        return CallBatch([seq], [q], k, v, out, lse, mask, True, *flags), layer
    for name, column in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse), ("mask", mask)):
        if column is not None and (not isinstance(column, (list, tuple)) or len(column) != len(seq)):
            raise ArgumentError(f"{name}: expected a list of {len(seq)} arrays, one per sequence")
    if q is None:
        raise ArgumentError(f"q: got None, expected a list of {len(seq)} arrays, one per sequence")
    return CallBatch(list(seq), q, k, v, out, lse, mask, False, *flags), layer


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def takes(
    arguments: Callable[P, tuple[CallBatch, int]],
) -> Callable[[Callable[[S, CallBatch, int], R]], Callable[Concatenate[S, P], R]]:
    """Give a method the parameters of ``arguments``, whose result, a CallBatch and a layer, is passed on to it."""

    def decorated(method: Callable[[S, CallBatch, int], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return method(self, *arguments(*args, **kwargs))

        signature, call_signature = inspect.signature(method), inspect.signature(arguments)
        parameters = [signature.parameters["self"], *call_signature.parameters.values()]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # help() shows it
        return call

    return decorated


def check_requests(
    cache: KVCache, batch: CallBatch, layer: int, scoring: Scoring, whole: int | None = None
) -> tuple[list[CallRequest], float, Largest]:
    """The requests of a call of a layer, their largest |q|, and the largest magnitudes of its new rows.

    The bound on scores counts all rows of the sequences in the layer. whole: tokens of the whole sequence where
    ``batch`` has a shard, else None. Typed refusals name the argument; ``reserve_rows`` refuses a lack of room later.
    """
    requests, q_max, new_max, most, added = [], 0.0, Largest(), 0, 0.0
    batch.check_new(cache.shape.latent)
    if batch.single and not isinstance(batch.sequences[0], Sequence):
        got = type(batch.sequences[0]).__name__
        raise ArgumentError(
            f"seq: got {got}, expected a Sequence or a list of them; the order is (q, seq, layer, k=, v=)"
        )
    for i, sequence in enumerate(batch.sequences):
        if cache.check_sequence(sequence).pages.unseen:
            examine(cache, sequence.pages, layer)
        q, largest = check_q(cache, batch.q[i])
        q_max, new = max(q_max, largest), None
        if batch.k is not None:
            check_once(batch.sequences, i)
            k, v, largest_new = cache.check_rows(batch.k[i], None if batch.v is None else batch.v[i], layer)
            new, new_max = (k, v), new_max.maximum(largest_new)
            tokens = sequence.pages.check_append(layer, len(k)) + len(k)
        else:
            tokens = sequence.pages.length(layer)
        seen = tokens if whole is None else whole
        mask = batch.check_mask(i, len(q), seen, scoring.window, cache)
        most, added = max(most, seen, len(q)), max(added, 0.0 if mask is None else mask.largest)
        requests.append(CallRequest(sequence, q, tokens, new, batch.causal, mask))
    within(
        cache,
        [sequence.pages for sequence in batch.sequences],
        lambda held: scoring.bound.check(q_max, max(held.k, new_max.k), cache.shape.head_dim, most, added),
    )
    if batch.out is not None or batch.lse is not None:
        shapes = [(*np.shape(q)[:-1], cache.shape.v_head_dim) for q in batch.q]
        for request, target in zip(requests, check_targets(shapes, batch.out, batch.lse), strict=True):
            request.target = target
    return requests, q_max, new_max


def check_once(sequences: Seq[Any], i: int) -> None:
    """Refuse sequence number ``i`` of a call with new rows if it also stands earlier in the list."""
    if sequences[i] in sequences[:i]:
        raise ArgumentError(
            f"seq: items {sequences.index(sequences[i])} and {i} are the same sequence, expected each once where k and "
            "v are given; fork() it"
        )


def check_mask_bytes(name: str, words: int, cache: KVCache) -> None:
    """Refuse a mask of more than half of the largest buffer, which holds the call's records, too."""
    limit = cache.device.info.max_buffer_bytes // 2
    if 4 * words > limit:
        raise LimitError(
            f"{name}: got {4 * words:,} bytes as float32, expected at most {limit:,}; attend fewer rows at a time"
        )


def mask_words(mask: Any, q_len: int, tokens: int) -> Mask | None:
    """A mask of the last of ``tokens`` keys, checked, as words."""
    values, most = check_mask(mask, q_len, tokens)
    if values is None:
        return None
    return Mask(np.ascontiguousarray(values).view(np.uint32), tokens - values.shape[1], most)


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


def reserve_rows(cache: KVCache, requests: list[CallRequest], layer: int) -> Transaction | None:
    """Reserve pages for the requests' new rows, and copy the shared pages among them; None: there are no new rows."""
    if not requests or requests[0].new is None:  # then no request has new rows
        return None
    transaction = cache.transaction()
    if len(requests) > 1:  # short ones first: fewer copies
        requests = sorted(requests, key=lambda request: request.sequence.pages.length(layer))
    for request in requests:
        if request.new is not None:
            request.reservation = transaction.reserve(request.sequence.pages, layer, len(request.new[0]))
            cache.copy_pages(request.reservation.copies)
    return transaction


def check_q(cache: KVCache, q: Any) -> tuple[NDArray[Any], float]:
    """(values (q_len, q_heads, head_dim), largest magnitude). Errors have indices of the caller's array."""
    array, shape = check_array("q", q), cache.shape
    want = (shape.q_heads, shape.head_dim)
    if array.ndim not in (2, 3) or array.shape[-2:] != want or len(array) == 0:
        raise ShapeError(f"q: got shape {array.shape}, expected {want} or (q_len, {want[0]}, {want[1]})")
    if array.ndim == 3 and len(array) > MAX_CONTEXT:
        raise ShapeError(f"q: got {len(array):,} rows, expected at most {MAX_CONTEXT:,}")
    if array.dtype != np.float32:
        array = check_array("q", array, ("float32", "float16", "bfloat16"))
    values, largest = checked_values("q", array)
    return (values if array.ndim == 3 else values[None]), largest
