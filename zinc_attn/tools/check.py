"""``zinc-attn check``: do the output bits stay the same, on this device and on others?

A case is a shape, a dtype of K and V, a context and masking options: one decode row over seeded values that are the
same on every machine. Its base result is the split rule's, on pages of 256. Every property but the last is a set of
variations that must give the base result's bits; the base result itself must have the digest that the NumPy oracle
gave (``reference_record.json``), or, for a case which is not in there, the bits of the oracle computed here.

Values: word i of an array is splitmix64 (Steele, Lea, Flood 2014) with the first 8 bytes of SHA-256 of the array's
name as the seed; three 21-bit fields of the word are added and scaled to standard deviation 1 in [-3, 3], all exact.
Query head h is multiplied by 2**(h % 4), so that flat and sharp softmaxes occur, and sinks by 4.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import __version__, reference
from ..cache import kv_cache as cache
from ..cache import rows
from ..cache.sequence import Sequence as CachedSequence
from ..canonical.constants import KEYS_PER_NODE
from ..decode.attention import Attention
from ..decode.scoring import check_scale, check_softcap, check_window
from ..distributed.sharded import ShardedAttention, ShardedKVCache
from ..errors import ArgumentError, LimitError
from ..planning.splits import SplitPlan, plan_splits
from ..runtime.device import RUNTIMES, Device, build_record, list_devices
from ..shapes import AttnShape, value_words
from .sweep import Layout, Progress, parse_contexts, parse_layouts, write_file

F32 = NDArray[np.float32]

RECORD: Final = Path(__file__).parent / "reference_record.json"
COMMITTED: Final = "the committed record"
FORMAT: Final = 1  # of record files; the values of a case are part of it
PROPERTIES: Final = {
    1: "run (repeats)",
    2: "split layout",
    3: "compute-unit count",
    4: "batch composition and order",
    5: "prefill chunking, rows at once",
    6: "page size and placement",
    7: "stored dtype, or the same values in f32",
    8: "shared prefix (cascade)",
    9: "sequence shards over devices",
    10: "driver and GPU: the oracle's bits",
}
LAYOUTS: Final = "1,2,8,64,auto,size:256,size:2048"
CONTEXTS: Final = "1000,8191,8k,32k,128k"
SHAPES: Final = "16/2/256,32/4/128,9/3/64"
DTYPES: Final = "f32,f16,bf16,q8_0"
QUICK: Final = (
    *("16/2/256 f16 1000", "16/2/256 q8_0 577", "32/8/128 f16 129"),
    *("9/3/64 bf16 300", "9/3/64 f32 65", "9/3/64 f16 2048"),
    *("9/3/64 f16 1700 window=1200+sinks", "9/3/64 f16 1100 softcap=20+scale=0.25+sinks"),
)
MASKED: Final = (  # beside the matrix
    *("64/8/64 f16 1000 window=128+sinks", "64/8/64 f16 8191 sinks"),
    *("32/16/128 bf16 8191 window=4096+softcap=50", "32/16/128 f16 1000 softcap=50+scale=0.0625"),
    *("16/2/256 q8_0 1000 window=600+scale=0.125", "9/3/64 f32 2048 window=1100+softcap=20+scale=0.25+sinks"),
)
COMPUTE_UNITS: Final = (2, 32, 64, 96)
SPARE: Final = 8  # pages for what the cascade's sequences have of their own
LONG: Final = 4 * SPARE * 256  # tokens from which the sequence gives these pages up: a larger cache may fit no buffer
ROWS: Final = 3  # query rows made per shape; the last one is the case's
TAIL: Final = 70  # tokens that the chunking variations append anew
PIECE: Final = 16384  # tokens per append of a long prompt
ORACLE_PRODUCTS: Final = 1 << 30  # context * q_heads * head_dim up to which the oracle here computes every head


# --- values ------------------------------------------------------------------------------------------------


def words(name: str, count: int, first: int = 0) -> NDArray[np.uint64]:
    """Words first ... first + count - 1 of the array called ``name``."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    z = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


def values(name: str, shape: tuple[int, ...], dtype: str = "f32") -> NDArray[Any]:
    """An array of ``shape``: float16 for f16, otherwise float32, of values that bfloat16 holds for bf16."""
    out = np.empty(shape, np.float16 if dtype == "f16" else np.float32)
    flat, mask, block = out.reshape(-1), np.uint64((1 << 21) - 1), 1 << 18
    for at in range(0, flat.size, block):
        w = words(name, min(block, flat.size - at), at)
        total = ((w & mask) + ((w >> np.uint64(21)) & mask) + ((w >> np.uint64(42)) & mask)).astype(np.int64)
        x = (2 * total - 3 * ((1 << 21) - 1)).astype(np.float32) * np.float32(2.0**-21)
        if dtype == "bf16":
            bits = x.view(np.uint32)
            x = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
        flat[at : at + block] = x
    return out


class Data(NamedTuple):
    """q (ROWS, q_heads, head_dim) float32; k, v (tokens, kv_heads, head_dim) as a cache of the dtype takes them."""

    q: F32
    k: NDArray[Any]
    v: NDArray[Any]

    @classmethod
    def make(cls, shape: AttnShape, dtype: str, tokens: int) -> Data:
        """The values of a shape; fewer tokens are a prefix of more, and a dtype rounds the same values."""
        q = values(f"{shape} q", (ROWS, shape.q_heads, shape.head_dim))
        q *= np.exp2(np.arange(shape.q_heads) % 4).astype(np.float32)[:, None]
        k, v = (values(f"{shape} {name}", (tokens, shape.kv_heads, shape.head_dim), dtype) for name in "kv")
        return cls(q, k, v)


# --- cases and results -------------------------------------------------------------------------------------


class Masking(NamedTuple):
    """The masking options of a case; ``sinks`` says whether it has them, their values are seeded."""

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        numbers = {name: value for name, value in self._asdict().items() if name != "sinks" and value is not None}
        said = [f"{name}={str(value).removesuffix('.0')}" for name, value in numbers.items()] + ["sinks"] * self.sinks
        return "+".join(said) or "none"

    @classmethod
    def parse(cls, text: str) -> Masking:
        """``none``, or words joined by +, each once: ``window=128``, ``softcap=50``, ``scale=0.125``, ``sinks``."""
        found: dict[str, Any] = {}
        words = [] if text.strip() == "none" else [word.strip() for word in text.split("+")]
        try:
            for word in words:
                name, _, number = word.partition("=")
                if name in found or (word != "sinks" and name not in ("window", "softcap", "scale")):
                    raise ValueError(word)
                found[name] = True if word == "sinks" else int(number) if name == "window" else float(number)
        except ValueError:
            raise ArgumentError(
                f"masking: got {text!r}, expected none, or words joined by + of window=KEYS, softcap=X, scale=X and "
                "sinks, each once (window=128+sinks)"
            ) from None
        check_window(found.get("window"))
        check_softcap(found.get("softcap"))
        check_scale(found.get("scale"), 64)
        return cls(**found)


class Case(NamedTuple):
    """One set of values: decode of one row over ``context`` keys."""

    shape: AttnShape
    dtype: str
    context: int
    masking: Masking = Masking()

    def __str__(self) -> str:
        masked = f" {self.masking}" if self.masking != Masking() else ""
        return f"{self.shape} {self.dtype} {self.context}{masked}"

    def data(self) -> Data:
        """The case's values."""
        return Data.make(self.shape, self.dtype, self.context)

    def options(self) -> dict[str, Any]:
        """The masking options as ``Attention`` and the oracle take them."""
        sinks = values(f"{self.shape} sinks", (self.shape.q_heads,)) * np.float32(4) if self.masking.sinks else None
        return {**self.masking._asdict(), "sinks": sinks}

    @classmethod
    def parse(cls, text: str) -> Case:
        """The inverse of ``str``."""
        shape, dtype, context, *masked = text.split()
        return cls(AttnShape.parse(shape), dtype, int(context), *map(Masking.parse, masked))

    @classmethod
    def matrix(cls, shapes: str, dtypes: str, contexts: str, masking: str = "none") -> list[Case]:
        """Every combination. ArgumentError for what no kernel serves."""
        parsed = [AttnShape.parse(text.strip()) for text in shapes.split(",")]
        names = [text.strip() for text in dtypes.split(",")]
        for shape, dtype in product(parsed, names):
            value_words(shape.head_dim, dtype)
        masks = [Masking.parse(text) for text in masking.split(",")]
        return list(dict.fromkeys(cls(*one) for one in product(parsed, names, parse_contexts(contexts), masks)))

    @classmethod
    def default(cls) -> list[Case]:
        """The default matrix, and the fixed cases with masking options."""
        return list(dict.fromkeys((*cls.matrix(SHAPES, DTYPES, CONTEXTS), *map(cls.parse, MASKED))))

    @classmethod
    def quick(cls) -> list[Case]:
        """The small fixed set."""
        return list(map(cls.parse, QUICK))


class Result(NamedTuple):
    """out (..., q_heads, head_dim) and lse (..., q_heads)."""

    out: F32
    lse: F32

    def digest(self) -> str:
        """SHA-256 of the bytes of out, then lse, float32, little-endian."""
        return hashlib.sha256(b"".join(np.ascontiguousarray(x, "<f4").tobytes() for x in self)).hexdigest()


def run_digest(digests: Mapping[str, str]) -> str:
    """SHA-256 over the sorted lines 'case digest'."""
    return hashlib.sha256("".join(f"{case} {digests[case]}\n" for case in sorted(digests)).encode()).hexdigest()


@dataclass(frozen=True)
class Fault:
    """A wrong bit: which property, in which variation, and the first element that differs."""

    property: int
    variation: str
    text: str
    array: str | None = None
    index: tuple[int, ...] | None = None
    ulp: int | None = None  # None where a side is no number

    def __str__(self) -> str:
        return f"{self.property} {PROPERTIES[self.property]}, {self.variation}: {self.text}"


def compare(prop: int, variation: str, got: Result, want: Result, first_head: int = 0) -> Fault | None:
    """The first element whose bits differ; None where all are equal. Heads count from ``first_head``."""
    for array, a, b in zip(Result._fields, got, want, strict=True):
        bits_a, bits_b = (np.ascontiguousarray(x).view(np.uint32) for x in (a, b))
        where = np.argwhere(bits_a != bits_b)
        if not len(where):
            continue
        at = tuple(int(i) for i in where[0])
        heads_axis = a.ndim - (2 if array == "out" else 1)
        index = tuple(i + first_head if axis == heads_axis else i for axis, i in enumerate(at))
        places = (int(x & 0x7FFFFFFF) * (-1 if x >> 31 else 1) for x in (bits_a[at], bits_b[at]))
        ulp = None if np.isnan(a[at]) or np.isnan(b[at]) else abs(next(places) - next(places))
        text = (
            f"{array}[{', '.join(map(str, index))}]: got {a[at]:.9g} (0x{bits_a[at]:08x}), expected {b[at]:.9g} "
            f"(0x{bits_b[at]:08x}), {'not a number' if ulp is None else f'{ulp:,} ulp apart'}; "
            f"{len(where):,} of {a.size:,} elements differ"
        )
        return Fault(prop, variation, text, array, index, ulp)
    return None


@dataclass
class Outcome:
    """What one case showed on one device and dispatcher."""

    case: Case
    subject: str
    result: Result | None = None
    shown: dict[int, int] = field(default_factory=dict)  # variations per property
    faults: list[Fault] = field(default_factory=list)
    refused: str | None = None
    verified: str = ""

    @property
    def digest(self) -> str:
        """Of the base result."""
        return self.result.digest() if self.result else ""

    @property
    def status(self) -> str:
        """pass, FAIL or refused (no room for the case)."""
        return "FAIL" if self.faults else "refused" if self.refused else "pass"

    def compare(self, prop: int, variation: str, got: Result, want: Result | None = None, first_head: int = 0) -> None:
        """Count a variation, and note its fault; ``want`` is the base result where it is not given."""
        want = want or self.result
        assert want is not None
        self.shown[prop] = self.shown.get(prop, 0) + 1
        fault = compare(prop, variation, got, want, first_head)
        if fault:
            self.faults.append(fault)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "case": str(self.case),
            "on": self.subject,
            "status": self.status,
            "digest": self.digest,
            "verified": self.verified,
            "variations": {str(prop): count for prop, count in sorted(self.shown.items())},
            "faults": [vars(fault) for fault in self.faults],
            "refused": self.refused,
        }


# --- on a device -------------------------------------------------------------------------------------------

Rule = Callable[[int, int, int | None], SplitPlan]  # tokens, query rows and window to a plan


def _by_layout(layout: Layout, device: Device, shape: AttnShape, dtype: str) -> Rule:
    units, kind = device.info.compute_units, device.info.kind
    return lambda n, q_len, window: layout.plan(n, shape, units, dtype, kind, q_len, window)


def _by_units(units: int, shape: AttnShape, dtype: str) -> Rule:
    return lambda n, q_len, window: plan_splits(n, shape, units, dtype, q_len, window=window)


class _Attention(Attention):
    """Attention by a given rule. Its output is NaN until a kernel writes it."""

    rule: Rule

    def __init__(self, held: cache.KVCache, **options: Any) -> None:
        super().__init__(held, plan=self._ruled, observer=self._poison, **options)

    def _ruled(self, tokens: int, q_len: int, window: int | None) -> SplitPlan:
        return self.rule(tokens, q_len, window)

    def lay_out(self, rule: Rule, cascade: bool = True) -> None:
        """Take another rule; recordings are kept, what was filled for the old one is not."""
        self.rule = rule
        self.replan(cascade)

    def _poison(self, _: Any, workspace: Any) -> None:
        out = workspace.tensors.out
        self.device.runtime.write(out, np.full(out.nbytes // 4, 0x7FC0DEAD, np.uint32))

    def result(self, q: F32, seq: CachedSequence, k: Any = None, v: Any = None) -> Result:
        """Of one sequence."""
        return Result(*self(q, seq, 0, k, v, return_lse=True))

    def results(self, queries: list[F32], seqs: list[CachedSequence]) -> list[Result]:
        """Of a batch."""
        return list(map(Result, *self(queries, seqs, 0, return_lse=True)))


@contextmanager
def _filled(
    device: Device, case: Case, data: Data, page: int, *, shuffled: bool = False, spare: int = 0
) -> Iterator[tuple[_Attention, CachedSequence]]:
    """A sequence that holds ``data``, in a cache of that size and ``spare`` pages, and attention by the split rule."""
    shape, dtype = case.shape, case.dtype
    pages = -(-len(data.k) // page) + spare
    order = np.argsort(words("pages", pages), kind="stable").tolist() if shuffled else None
    held = cache.KVCache(device, shape, 1, pages * page, dtype, page, page_order=order)
    try:
        seq = held.new_sequence()
        for at in range(0, len(data.k), PIECE):
            held.append(seq, 0, data.k[at : at + PIECE], data.v[at : at + PIECE])
        attention = _Attention(held, **case.options())
        attention.lay_out(_by_layout(Layout("auto"), device, shape, dtype))
        try:
            yield attention, seq
        finally:
            attention.close()
    finally:
        held.close()


def examine(
    device: Device, case: Case, data: Data, layouts: Sequence[Layout], subject: str, beside: Sequence[Device] = ()
) -> Outcome:
    """Properties 1 to 9 of a case on a device. ``data`` has the case's tokens.

    beside: other devices, which hold shards of the sequence; none: this one holds two.
    """
    outcome, (shape, dtype, *_) = Outcome(case, subject), case
    check, q = outcome.compare, data.q[-1]
    try:
        with _filled(device, case, data, 256, spare=SPARE * (case.context < LONG)) as (attention, seq):
            rule = attention.rule
            outcome.result = attention.result(q, seq)
            for i in (2, 3):  # another query in between
                attention.result(data.q[0], seq)
                check(1, f"run {i}", attention.result(q, seq))
            plans = {(2, f"layout {one.label}"): _by_layout(one, device, shape, dtype) for one in layouts}
            plans |= {(3, f"{units} compute units"): _by_units(units, shape, dtype) for units in COMPUTE_UNITS}
            for (prop, variation), plan in plans.items():
                attention.lay_out(plan)
                check(prop, variation, attention.result(q, seq))
            attention.lay_out(rule)
            _batches(outcome, attention, seq, data)
            at_once = _chunks(outcome, attention, seq, data)
            _cascades(outcome, attention, seq, data)
        for page, shuffled in ((16, True), (1024, False)):
            with _filled(device, case, data, page, shuffled=shuffled) as (attention, seq):
                check(6, f"pages of {page}{', shuffled' * shuffled}", attention.result(q, seq))
        if dtype != "f32":
            same = data._replace(**dict(zip("kv", rows.stored(data.k, data.v, dtype), strict=True)))
            with _filled(device, case._replace(dtype="f32"), same, 256) as (attention, seq):
                check(7, "stored as f32", attention.result(q, seq))
        if case.context > KEYS_PER_NODE:  # one node has one place
            _shards(outcome, [device, *(beside or [device])], data, at_once)
    except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
        outcome.refused = str(error) or "no room in host memory"
    return outcome


def _batches(outcome: Outcome, attention: _Attention, seq: CachedSequence, data: Data) -> None:
    """Property 4: beside other sequences and queries, which must be what they are alone, too."""
    seqs, queries = [seq.fork(), seq.fork(), seq], [data.q[:1], data.q[1], data.q[-1]]
    seqs[0].truncate(len(seq) // 3)
    seqs[1].truncate(len(seq) - 1)
    alone = [attention.result(queries[i], seqs[i]) for i in (0, 1)]
    for name, order in (("first of 3", (2, 0, 1)), ("last of 3", (1, 0, 2)), ("second of 2", (1, 2))):
        got = attention.results([queries[i] for i in order], [seqs[i] for i in order])
        for i, one in zip(order, got, strict=True):
            outcome.compare(4, name if i == 2 else f"the others, {name}", one, (*alone, outcome.result)[i])
    seqs[0].free()
    seqs[1].free()


def _chunks(outcome: Outcome, attention: _Attention, seq: CachedSequence, data: Data) -> Result:
    """Property 5: the last rows at once; then cut off and appended anew, at once, in parts and one by one."""
    n = len(seq)
    count, tail = min(ROWS, n), min(TAIL, n)
    q, begin = data.q[-count:], n - count
    at_once = attention.result(q, seq)
    outcome.compare(5, f"last of {count} rows", Result(at_once.out[-1], at_once.lse[-1]))
    for piece, ends in ((tail, {count}), (37, {1, count}), (11, {*range(1, count + 1)})):
        seq.truncate(n - tail)
        for at, end in pairwise((*range(n - tail, begin, piece), begin)):
            attention.cache.append(seq, 0, data.k[at:end], data.v[at:end])
        for at, end in pairwise((0, *sorted(ends))):
            new = slice(begin + at, begin + end)
            got = attention.result(q[at:end], seq, data.k[new], data.v[new])
            want = Result(at_once.out[at:end], at_once.lse[at:end])
            outcome.compare(5, f"rows {at} to {end - 1} of {count} appended and attended", got, want)
    return at_once


def _cascades(outcome: Outcome, attention: _Attention, seq: CachedSequence, data: Data) -> None:
    """Property 8: sequences that share all or a prefix, and rows of one, with what they share attended once or apart.

    Counted where keys are attended for several rows at once.
    """
    if len(seq) >= LONG:
        seq.truncate(len(seq) - len(seq) // 4)
    n, tail = len(seq), min(TAIL, len(seq))
    seqs = [seq.fork(), seq, seq.fork(), seq.fork()]
    seqs[0].truncate(n - n // 3)
    for branch in (seqs[0], seqs[3]):
        attention.cache.append(branch, 0, data.v[:tail], data.k[:tail])
    batch = [data.q[:2], data.q[-1], data.q[0], data.q[1:2]], seqs
    rule, case = attention.rule, outcome.case
    tried = [("sequence", rule, *batch), ("one sequence, chunk", rule, [data.q[-min(ROWS, n) :]], [seq])]
    if n >= 2 * KEYS_PER_NODE:  # a split of as many keys as a node has emits whole nodes
        nodes = _by_layout(Layout.parse("1"), attention.device, case.shape, case.dtype)
        tried.append(("1 split, sequence", nodes, *batch))
    for name, plan, queries, of in tried:
        others = [-q for q in queries]
        attention.lay_out(plan)
        attention.results(others, of)
        if not attention.shared:
            continue
        attention.lay_out(plan, cascade=False)
        want = attention.results(queries, of)
        attention.results(others, of)  # other partial states than those that must be made now
        attention.lay_out(plan)
        for i, pair in enumerate(zip(attention.results(queries, of), want, strict=True)):
            outcome.compare(8, f"{name} {i + 1} of {len(of)}", *pair)
    attention.lay_out(rule)
    for i in (0, 2, 3):
        seqs[i].free()


def _shards(outcome: Outcome, devices: Sequence[Device], data: Data, at_once: Result) -> None:
    """Property 9: nodes of 512 keys dealt unevenly to shards on ``devices``, the first of which folds.

    at_once: the result of the last rows of ``data``, which are appended and attended; then the last one by itself.
    """
    case, begin = outcome.case, len(data.k) - len(at_once.lse)
    weights = [1.0 + i % 2 for i in range(len(devices))]
    with ShardedKVCache(devices, case.shape, 1, case.context, case.dtype, 256, weights=weights) as held:
        attention, seq = ShardedAttention(held, **case.options()), held.new_sequence()
        try:
            for at, end in pairwise((*range(0, begin, PIECE), begin)):
                held.append(seq, 0, data.k[at:end], data.v[at:end])
            new = data.q[-len(at_once.lse) :], seq, 0, data.k[begin:], data.v[begin:]
            where = "shards on " + " and ".join(map(title, devices))
            outcome.compare(9, f"{where}, rows", Result(*attention(*new, return_lse=True)), at_once)
            outcome.compare(9, where, Result(*attention(data.q[-1], seq, 0, return_lse=True)))
        finally:
            attention.close()


# --- the record and the oracle -----------------------------------------------------------------------------


def oracle(case: Case, data: Data, products: int = ORACLE_PRODUCTS) -> tuple[Result, int]:
    """The oracle's result, and the first head it is of: above ``products`` only the last KV head's are computed."""
    k, v = (data.k, data.v) if case.dtype == "f16" else rows.stored(data.k, data.v, case.dtype)
    first = 0 if case.context * case.shape.q_heads * case.shape.head_dim <= products else -case.shape.group
    at = slice(case.shape.kv_heads - 1 if first else 0, None)
    options = case.options()
    if case.masking.sinks:
        options["sinks"] = options["sinks"][first:]
    result = Result(*reference.emulate(data.q[-1, first:], k[:, at], v[:, at], **options))
    return result, case.shape.q_heads - len(result.lse)


def judge(outcome: Outcome, data: Data, known: Mapping[str, Mapping[str, str]]) -> None:
    """Property 10: the digest against those ``known`` (by source); the oracle names the element that differs."""
    if outcome.result is None:
        return
    name, digest, fault = str(outcome.case), outcome.digest, None
    sources = [source for source, digests in known.items() if name in digests]
    differing = [source for source in sources if known[source][name] != digest]
    outcome.shown[10], outcome.verified = len(sources), "record"
    if differing or COMMITTED not in sources:
        expected, first = oracle(outcome.case, data)
        outcome.compare(10, "the NumPy oracle", Result(*(x[first:] for x in outcome.result)), expected, first)
        fault = next((fault for fault in outcome.faults if fault.property == 10), None)
        outcome.verified = "" if fault else "oracle (sampled heads)" if first else "oracle"
    for source in differing:
        text = f"digest {digest[:16]}, expected {known[source][name][:16]}"
        outcome.faults.append(
            Fault(10, source, text + ("" if fault else "; the oracle computed here agrees with the device"))
        )


def make_entry(digests: Mapping[str, str], **made_by: Any) -> dict[str, Any]:
    """One run of a record file."""
    return {"made_by": {"zinc_attn": __version__, **made_by}, "run": run_digest(digests), "cases": dict(digests)}


def record_text(entries: Sequence[dict[str, Any]]) -> str:
    """A record file."""
    return json.dumps({"format": FORMAT, "records": entries}, indent=1, ensure_ascii=False) + "\n"


def load_record(path: Path) -> dict[str, dict[str, str]]:
    """Digests by case of each run of a record file. ArgumentError names the file."""
    try:
        content, found = json.loads(path.read_text()), {}
        if content["format"] != FORMAT:
            raise ArgumentError(f"{path}: got format {content['format']!r}, expected {FORMAT}")
        for i, entry in enumerate(content["records"]):
            by, cases = entry["made_by"], {str(case): str(digest) for case, digest in entry["cases"].items()}
            found[f"{path.name} [{i}], {by['device']}, {by['runtime']}"] = cases
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}, expected a file of zinc-attn check --record") from error
    except ArgumentError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{path}: not a file of zinc-attn check --record ({error!r})") from error
    return found


# --- the command -------------------------------------------------------------------------------------------


def check(
    devices: Sequence[Device],
    cases: Sequence[Case],
    layouts: Sequence[Layout],
    *,
    against: Mapping[str, Mapping[str, str]] | None = None,
    progress: Progress | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Every case on every device, compared with the committed record, with ``against`` and with the first device."""
    committed = {case: digest for digests in load_record(RECORD).values() for case, digest in digests.items()}
    known = {COMMITTED: committed, **(against or {})}
    outcomes: list[Outcome] = []

    def same_values(case: Case) -> tuple[str, str]:
        return str(case.shape), case.dtype

    for _, group in groupby(sorted(cases, key=same_values), key=same_values):
        mine = sorted(group, key=lambda case: (case.context, str(case)))
        data = None
        for case in mine:
            first: Outcome | None = None
            for device in devices:
                subject = title(device)
                if progress:
                    progress(f"{case} on {device.info.name}", len(outcomes), len(cases) * len(devices))
                data = data or Data.make(case.shape, case.dtype, mine[-1].context)
                cut = data._replace(k=data.k[: case.context], v=data.v[: case.context])
                beside = [other for other in devices if other is not device]
                outcome = examine(device, case, cut, layouts, subject, beside)
                judge(outcome, cut, known)
                if outcome.result and first and first.result:
                    outcome.compare(10, f"unlike {first.subject}", outcome.result, first.result)
                first = first or outcome
                outcomes.append(outcome)
                if on_outcome:
                    on_outcome(outcome)
    return outcomes


def title(device: Device) -> str:
    """The device and its dispatcher."""
    return f"{device.info.name} ({device.info.index}), {device.runtime.name}"


def describe(device: Device) -> dict[str, Any]:
    """What a record says of where its digests come from."""
    info, built = device.info, build_record()
    about = {name: getattr(info, name) for name in ("kind", "vendor", "driver", "api_version")}
    spirv = {name: built[name] for name in ("compiler", "sources_sha256")}
    return {"device": info.name, "runtime": device.runtime.name, **about, "numpy": np.__version__, "spirv": spirv}


def make_record(progress: Progress | None = None) -> str:
    """The committed record: the quick set and the default cases, by the oracle alone."""
    default, entries, made = Case.default(), [], dict[Case, str]()
    wanted = list(dict.fromkeys((*Case.quick(), *default)))
    for i, case in enumerate(wanted):
        if progress:
            progress(str(case), i, len(wanted))
        made[case] = oracle(case, case.data())[0].digest()
    for name, cases in (("quick", Case.quick()), ("default", default)):
        by = {"device": "NumPy float32 oracle", "runtime": "reference.emulate", "set": name, "numpy": np.__version__}
        entries.append(make_entry({str(case): made[case] for case in cases}, **by))
    return record_text(entries)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``zinc-attn check``."""
    installed = RUNTIMES if importlib.util.find_spec("kp") else ("vulkan",)
    add = parser.add_argument
    add("--quick", action="store_true", help="a small fixed set of cases, in place of the matrix")
    add("--shapes", metavar="LIST", help=f"Q/KV/D (default: {SHAPES})")
    add("--dtypes", metavar="LIST", help=f"of K and V (default: {DTYPES})")
    add("--contexts", metavar="LIST", help=f"keys, k = 1024 (default: {CONTEXTS})")
    masking = "none, or some of window=KEYS, softcap=X, scale=X, sinks, joined by +"
    add("--masking", metavar="LIST", help=f"{masking} (default: none, and the few cases that have some)")
    add("--layouts", default=LAYOUTS, metavar="LIST", help="splits, auto or size:KEYS (default: %(default)s)")
    add("--devices", metavar="LIST", help="all, or indices or pieces of names (default: the best one)")
    add("--runtimes", default=",".join(installed), metavar="LIST", help="dispatchers (default: %(default)s)")
    add("--record", metavar="FILE", type=Path, help="write the digests, for another machine's --against")
    add("--against", metavar="FILE", type=Path, help="compare with another machine's digests, too")
    add("--json", action="store_true", help="JSON lines on stdout, one per case, then one per device")


def run(args: argparse.Namespace, progress_bar: Callable[[], AbstractContextManager[Progress]]) -> int:
    """Check, print, and write the record. 0: all bits are equal; 1: some differ; 2: a case was refused."""
    asked = args.shapes, args.dtypes, args.contexts, args.masking
    if args.quick and any(asked):
        raise ArgumentError("quick: got --quick with --shapes, --dtypes, --contexts or --masking, expected either")
    if any(asked):
        cases = Case.matrix(*(a or b for a, b in zip(asked, (SHAPES, DTYPES, CONTEXTS, "none"), strict=True)))
    else:
        cases = Case.quick() if args.quick else Case.default()
    layouts = parse_layouts(args.layouts)
    against = load_record(args.against) if args.against else {}
    names = [str(case) for case in cases]
    width = max(22, *map(len, names)) + 2
    if against and not any(name in digests for digests in against.values() for name in names):
        raise ArgumentError(f"{args.against}: got none of the {len(names)} cases of this run, expected some of them")
    chosen: list[Any] = [None]
    if args.devices:
        every = args.devices == "all"
        chosen = [d.index for d in list_devices()] if every else [name.strip() for name in args.devices.split(",")]
    runtimes = dict.fromkeys(name.strip() for name in args.runtimes.split(","))
    with ExitStack() as stack:
        devices = [stack.enter_context(Device.open(name, runtime=by)) for name, by in product(chosen, runtimes)]
        with progress_bar() as progress:
            outcomes = check(
                devices,
                cases,
                layouts,
                against=against,
                progress=progress,
                on_outcome=lambda outcome: print("\n".join(outcome_lines(outcome, args.json, width)), flush=True),
            )
        entries = []
        for device in devices:
            digests = {str(o.case): o.digest for o in outcomes if o.subject == title(device) and o.result}
            entries.append(make_entry(digests, **describe(device)))
    lines = [json.dumps(entry) for entry in entries] if args.json else summary(outcomes, entries, against)
    print("\n".join(lines))
    if args.record:
        write_file(args.record, record_text(entries).encode())
        print(f"written: {args.record}", file=sys.stderr)
    found = {outcome.status for outcome in outcomes}
    return 1 if "FAIL" in found else 2 if "refused" in found else 0


def outcome_lines(outcome: Outcome, as_json: bool, width: int) -> Iterator[str]:
    """One line, the case's name ``width`` wide, and one for each property that fails: the first variation's."""
    if as_json:
        yield json.dumps(outcome.to_dict())
        return
    name = f"{outcome.case!s:<{width}}"
    yield f"{outcome.status:<8}{name}{outcome.digest[:16]:<18}{outcome.verified:<24}{outcome.subject}"
    if outcome.refused:
        yield f"        {outcome.refused}"
    seen: dict[int, list[Fault]] = {}
    for fault in outcome.faults:
        seen.setdefault(fault.property, []).append(fault)
    for faults in seen.values():
        more = f" (and in {len(faults) - 1} more variations)" if len(faults) > 1 else ""
        yield f"        {faults[0]}{more}"


def summary(
    outcomes: Sequence[Outcome], entries: Sequence[dict[str, Any]], against: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """The properties over all cases, and the digests of the run."""
    yield ""
    for prop, text in PROPERTIES.items():
        shown = sum(outcome.shown.get(prop, 0) for outcome in outcomes)
        bad = sum(any(fault.property == prop for fault in outcome.faults) for outcome in outcomes)
        word = f"pass, {shown} comparisons" if shown else "not shown"
        word = f"FAIL in {bad} of {len(outcomes)} cases" if bad else word
        yield f"{prop:>2} {text:<42}{word}"
    for source, digests in against.items():
        mine = {str(outcome.case) for outcome in outcomes}
        yield f"{source}: has {len(mine & set(digests))} of the {len(mine)} cases"
    for entry in entries:
        yield f"run {entry['run']}  {entry['made_by']['device']}, {entry['made_by']['runtime']}"


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m zinc_attn.tools.check --make-record``: write the committed record."""
    parser = argparse.ArgumentParser(prog="python -m zinc_attn.tools.check", description=main.__doc__)
    parser.add_argument("--make-record", action="store_true", required=True, help=f"write {RECORD}")
    parser.parse_args(argv)
    write_file(RECORD, make_record(lambda what, done, total: print(f"{done}/{total} {what}", file=sys.stderr)).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
