"""How the base result of matrix arithmetic is judged: its error against float64, and earlier records of the device."""

from __future__ import annotations

from collections.abc import Mapping

from ...runtime.device import Device
from ..harness.bits import ORACLE_PRODUCTS
from ..harness.bound import Truth, truth
from .cases import Case
from .data import Data
from .outcome import Fault, Outcome
from .record import Digests, describe, origin, reference_arguments


def case_truth(case: Case, data: Data, products: int = ORACLE_PRODUCTS) -> Truth:
    """What float64 says of a case; where that takes more than ``products``, of the last KV head's query heads alone."""
    return truth(*reference_arguments(case, data, products))


def judge_bounded(outcome: Outcome, data: Data, known: Mapping[str, Digests], device: Device) -> None:
    """Property 11, the error of out and lse, and 10, the digests in those of ``known`` that are of this device."""
    if outcome.result is None:
        return
    case, want = outcome.case, case_truth(outcome.case, data)
    wrong = want.beyond(outcome.result)
    outcome.shown[11] = 1
    if wrong:
        outcome.faults.append(Fault(11, "float64", wrong))
    else:
        outcome.verified = f"bound ({want.share(outcome.result):.2%} of it)"
    for source, digests in known.items():
        if str(case) not in digests or not is_of(source, device, case.arithmetic):
            continue
        outcome.shown[10] = outcome.shown.get(10, 0) + 1
        if digests[str(case)] != outcome.digest:
            text = f"digest {outcome.digest[:16]}, expected {digests[str(case)][:16]}, of the same device and driver"
            outcome.faults.append(Fault(10, source, text))


def is_of(source: str, device: Device, arithmetic: str) -> bool:
    """Whether a record, by its name, is of this device and driver."""
    return source.endswith(f", {origin(describe(device, arithmetic))}")
