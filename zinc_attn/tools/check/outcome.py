"""The outcome of a case: how often each property was compared, every wrong bit, and the base result's verdict."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ...planning.arithmetic import EXACT
from ..harness.bits import ORACLE_PRODUCTS, Judge, Output, compare, oracle, oracle_options, truth
from .cases import Case
from .data import Data
from .record import COMMITTED, Digests, make_entry, record_text

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


def properties_of(arithmetic: str) -> Mapping[int, str]:
    """The properties that are shown of an arithmetic, by number."""
    if arithmetic in EXACT:
        return PROPERTIES
    matrix_texts = {7: "stored dtype, of the same values", 10: "an earlier record of the device"}
    return PROPERTIES | matrix_texts | {11: "error against float64, in its bound"}


class Fault(NamedTuple):
    """A wrong bit: its property, its variation, and the first element that differs, in words."""

    property: int
    variation: str
    text: str


@dataclass
class Outcome:
    """The outcome of one case on one device and dispatcher."""

    case: Case
    subject: str
    result: Output | None = None  # the base result
    shown: Counter[int] = field(default_factory=Counter)  # variations per property
    faults: list[Fault] = field(default_factory=list)
    refused: str | None = None
    verified: str = ""

    @property
    def digest(self) -> str:
        return self.result.digest() if self.result else ""

    @property
    def status(self) -> str:
        """pass, FAIL, or refused where there is no room for the case."""
        return "FAIL" if self.faults else "refused" if self.refused else "pass"

    def compare(self, prop: int, variation: str, got: Output, want: Output | None = None) -> bool:
        """Count a variation, and note the first element whose bits differ; whether all bits are equal.

        want: the base result where it is not given. It may be of the last heads alone.
        """
        want = want or self.result
        assert want is not None
        self.shown[prop] += 1
        if difference := compare(got, want):
            self.faults.append(Fault(prop, variation, difference.text(ulp=True)))
        return difference is None

    def judge(self, data: Data, known: Mapping[str, Digests], judge: Judge = oracle) -> None:
        """Property 10: the digest against those ``known``, by source; and property 11, the error against float64.

        The committed record stands for the oracle. The oracle (``judge``) is asked where the record lacks a case,
        and where digests differ, so that it names the element. It has no bits of matrix units.
        """
        if self.result is None:
            return
        name, digest, agrees = str(self.case), self.digest, ""
        expected = {source: digests[name] for source, digests in known.items() if name in digests}
        differing = {source: want for source, want in expected.items() if want != digest}
        self.shown[10] += len(expected)
        if self.case.arithmetic == "matrix":
            self._judge_error(self.result, data)
        else:
            self.verified = "record"
            if differing or COMMITTED not in expected:
                agrees = self._ask_oracle(self.result, data, judge)
        for source, want in differing.items():
            self.faults.append(Fault(10, source, f"digest {digest[:16]}, expected {want[:16]}{agrees}"))

    def _ask_oracle(self, result: Output, data: Data, judge: Judge) -> str:
        """Compare with the oracle's bits. Returns a note on a digest that differs although the bits are equal."""
        want = oracle_output(self.case, data, judge=judge)
        if not self.compare(10, "the oracle" if judge is not oracle else "the NumPy oracle", result, want):
            self.verified = ""
            return ""
        self.verified = "oracle (sampled heads)" if len(want.lse) < len(result.lse) else "oracle"
        return "; the oracle computed here agrees with the device"

    def _judge_error(self, result: Output, data: Data) -> None:
        want = truth(*reference_arguments(self.case, data))
        self.shown[11] = 1
        if wrong := compare(result, want):
            self.faults.append(Fault(11, "float64", wrong.text()))
        else:
            self.verified = f"bound ({want.share(result):.2%} of it)"

    def line(self, fault: Fault) -> str:
        title = properties_of(self.case.arithmetic)[fault.property]
        return f"{fault.property} {title}, {fault.variation}: {fault.text}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": str(self.case),
            "on": self.subject,
            "status": self.status,
            "digest": self.digest,
            "verified": self.verified,
            "variations": {str(prop): count for prop, count in sorted(self.shown.items())},
            "faults": [fault._asdict() for fault in self.faults],
            "refused": self.refused,
        }


def reference_arguments(case: Case, data: Data, products: int = ORACLE_PRODUCTS) -> tuple[Any, ...]:
    """The arguments of ``oracle`` and ``truth``; beyond ``products``, for the last KV head alone."""
    sampled = case.rows * case.context * case.shape.q_heads * case.shape.head_dim > products
    masking = {**case.options(), **case.masking(case.rows, case.context)}
    return case.query(data), data.k, data.v, case.dtype, 1 if sampled else None, masking


def oracle_output(case: Case, data: Data, products: int = ORACLE_PRODUCTS, judge: Judge = oracle) -> Output:
    """The oracle's output; beyond ``products``, of the last KV head's query heads alone."""
    q, k, v, dtype, heads, masking = reference_arguments(case, data, products)
    return judge(q, k, v, dtype, heads, masking | oracle_options(case.arithmetic))


def make_record(cases: Iterable[Case]) -> str:
    """The text of a record file by the oracle alone."""
    digests = {str(case): oracle_output(case, case.data()).digest() for case in dict.fromkeys(cases)}
    return record_text([make_entry(digests, {"device": "NumPy float32 oracle", "runtime": "reference.emulate"})])
