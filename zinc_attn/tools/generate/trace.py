"""What a model's attention did: an observer of a ZincCache, and the first difference between two observed runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from time import perf_counter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..harness.bits import first_difference as first_unequal

F32 = NDArray[np.float32]
OURS: Final = "DIFFERENT"
HOST: Final = "host differs"


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer's attention. inputs: digest of q and the new k and v. The arrays are there if they are kept.

    q, out: float32 (q_len, q_heads, head_dim). k, v: torch tensors (kv_heads, q_len, head_dim) of the model's dtype,
    None where the module attends the rows of an earlier call, and v also where the layer's shape is latent. options:
    scale, window, softcap, sinks and ALiBi slopes.
    """

    layer: int
    inputs: bytes
    output: bytes
    q: F32 | None = None
    k: Any = None
    v: Any = None
    out: F32 | None = None
    options: Any = None


@dataclass(eq=False)
class Step:
    """One forward: its attention calls, and the float32 logits (vocab,) of its last token."""

    calls: list[Call] = field(default_factory=list)
    logits: Any = None


class AttentionTrace:
    """The observer of a ZincCache of one batch row. It adds up the time that attention takes.

    digests: also keep digests of inputs and outputs, and the logits. keep: keep the arrays, too.
    """

    def __init__(self, *, digests: bool = False, keep: bool = False) -> None:
        self.digests, self.keep = digests or keep, keep
        self.seconds = 0.0  # in attention
        self.steps_s: list[float] = []  # the same, per step
        self.steps: list[Step] = [Step()]
        self._own_seconds = 0.0  # in this observer

    def __call__(self, call: Any) -> None:
        """Take an ``AttendedCall``."""
        begin = perf_counter()
        self.seconds += call.seconds
        if self.digests:
            given = [x for x in (call.query, *(call.new or ())) if x is not None]
            arrays = [x.detach().to("cpu").float().contiguous().numpy() for x in given]
            kept: dict[str, Any] = {}
            if self.keep:
                k, v = (None if x is None else x[0].detach().to("cpu") for x in call.new or (None, None))
                q = np.ascontiguousarray(arrays[0][0].transpose(1, 0, 2))
                kept = {"q": q, "k": k, "v": v, "out": call.out[0].copy(), "options": call.options}
            self.steps[-1].calls.append(Call(call.layer, _digest(*arrays), _digest(call.out), **kept))
        self._own_seconds += perf_counter() - begin

    def end_step(self, logits: Any) -> None:
        """A forward has ended with these logits."""
        self.steps_s.append(self.seconds - sum(self.steps_s))
        if self.digests:
            self.steps[-1].logits = logits
            self.steps.append(Step())

    @contextmanager
    def timed(self, seconds: list[float]) -> Iterator[None]:
        """Append the time of the block to ``seconds``, without what this observer took of it."""
        begin, own = perf_counter(), self._own_seconds
        yield
        seconds.append(perf_counter() - begin - (self._own_seconds - own))


def _digest(*arrays: Any) -> bytes:
    made = hashlib.blake2b(digest_size=16)
    for array in arrays:
        made.update(np.ascontiguousarray(array).data)
    return made.digest()


class Difference(NamedTuple):
    """The first place where two runs part. status: "DIFFERENT" where attention gave other bits on the same q, k and v,
    "host differs" where the model's own arithmetic has moved."""

    status: str
    text: str


def first_difference(got: Sequence[Step], want: Sequence[Step]) -> Difference | None:
    """None where every attention output and all logits have the same bits."""
    moved = "differ after equal attention: the model's own arithmetic moved"
    for step, (a, b) in enumerate(zip_longest(got, want, fillvalue=Step())):
        for one, other in zip_longest(a.calls, b.calls):
            if one is None or other is None:
                return Difference(HOST, f"step {step}: another number of attention calls")
            where = f"step {step}, layer {other.layer}"
            if one.inputs != other.inputs:
                return Difference(HOST, f"{where}: q, k or v {moved}")
            if one.output != other.output:
                kept = one.out is not None and other.out is not None and first_unequal("out", one.out, other.out)
                text = kept.text() if kept else "outputs differ"
                return Difference(OURS, f"{where}: {text} on equal q, k and v")
        bits: list[Any] = [None if x is None else x.numpy().view(np.uint32) for x in (a.logits, b.logits)]
        if not np.array_equal(bits[0], bits[1]):
            return Difference(HOST, f"step {step}: logits {moved}")
    return None
