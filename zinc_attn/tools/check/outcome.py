"""What a case showed: how often each property was compared, and every wrong bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..harness.bits import Output, compare
from .cases import Case

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

MATRIX_PROPERTIES: Final = {
    **PROPERTIES,
    7: "stored dtype, of the same values",
    10: "an earlier record of the device",
    11: "error against float64, in its bound",
}


def properties_of(arithmetic: str) -> Mapping[int, str]:
    """What is shown of an arithmetic, by number."""
    return PROPERTIES if arithmetic == "canonical" else MATRIX_PROPERTIES


@dataclass(frozen=True)
class Fault:
    """A wrong bit: which property, in which variation, and the first element that differs."""

    property: int
    variation: str
    text: str
    array: str | None = None
    index: tuple[int, ...] | None = None
    ulp: int | None = None  # None where one of the two values is not a number


@dataclass
class Outcome:
    """What one case showed on one device and dispatcher."""

    case: Case
    subject: str
    result: Output | None = None  # the base result
    shown: Counter[int] = field(default_factory=Counter)  # variations per property
    faults: list[Fault] = field(default_factory=list)
    refused: str | None = None
    verified: str = ""

    @property
    def digest(self) -> str:
        """The digest of the base result."""
        return self.result.digest() if self.result else ""

    @property
    def status(self) -> str:
        """pass, FAIL, or refused where there is no room for the case."""
        return "FAIL" if self.faults else "refused" if self.refused else "pass"

    def compare(self, prop: int, variation: str, got: Output, want: Output | None = None) -> None:
        """Count a variation, and note the first element whose bits differ, if one does.

        ``want`` is the base result where it is not given. It may be of the last heads alone.
        """
        want = want or self.result
        assert want is not None
        self.shown[prop] += 1
        if found := compare(got, want):
            self.faults.append(Fault(prop, variation, found.text(ulp=True), found.array, found.index, found.ulp))

    def line(self, fault: Fault) -> str:
        """A fault in words."""
        title = properties_of(self.case.arithmetic)[fault.property]
        return f"{fault.property} {title}, {fault.variation}: {fault.text}"

    def to_dict(self) -> dict[str, Any]:
        """The outcome for JSON."""
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
