"""How a base result is judged: by the digests of records and the oracle's bits, or by its error against float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...runtime.device import Device
from ..harness.bits import ORACLE_PRODUCTS, Output, compare, oracle, truth
from .cases import Case
from .data import Data
from .outcome import Fault, Outcome
from .record import COMMITTED, Digests, is_of


def reference_arguments(case: Case, data: Data, products: int = ORACLE_PRODUCTS) -> tuple[Any, ...]:
    """Those of ``oracle`` and ``truth``; where these take more than ``products``, for the last KV head alone."""
    sampled = case.rows * case.context * case.shape.q_heads * case.shape.head_dim > products
    masking = {**case.options(), **case.masking.call(case.rows, case.context)}
    return case.query(data), data.k, data.v, case.dtype, 1 if sampled else None, masking


def oracle_output(case: Case, data: Data, products: int = ORACLE_PRODUCTS) -> Output:
    """The oracle's output; where it takes more than ``products``, that of the last KV head's query heads alone."""
    return oracle(*reference_arguments(case, data, products))


def judge(outcome: Outcome, data: Data, known: Mapping[str, Digests]) -> None:
    """Property 10: the digest against those ``known`` (by source); the oracle names the element that differs."""
    if outcome.result is None:
        return
    name, digest, fault = str(outcome.case), outcome.digest, None
    sources = [source for source, digests in known.items() if name in digests]
    differing = [source for source in sources if known[source][name] != digest]
    outcome.shown[10], outcome.verified = len(sources), "record"
    if differing or COMMITTED not in sources:
        expected = oracle_output(outcome.case, data)
        sampled = len(expected.lse) < len(outcome.result.lse)
        outcome.compare(10, "the NumPy oracle", outcome.result, expected)
        fault = next((fault for fault in outcome.faults if fault.property == 10), None)
        outcome.verified = "" if fault else "oracle (sampled heads)" if sampled else "oracle"
    for source in differing:
        text = f"digest {digest[:16]}, expected {known[source][name][:16]}"
        agrees = "" if fault else "; the oracle computed here agrees with the device"
        outcome.faults.append(Fault(10, source, text + agrees))


def judge_bounded(outcome: Outcome, data: Data, known: Mapping[str, Digests], device: Device) -> None:
    """Property 11, the error of out and lse, and 10, the digests in those of ``known`` that are of this device."""
    if outcome.result is None:
        return
    case, want = outcome.case, truth(*reference_arguments(outcome.case, data))
    wrong = compare(outcome.result, want)
    outcome.shown[11] = 1
    if wrong:
        outcome.faults.append(Fault(11, "float64", wrong.text()))
    else:
        outcome.verified = f"bound ({want.share(outcome.result):.2%} of it)"
    for source, digests in known.items():
        if str(case) not in digests or not is_of(source, device, case.arithmetic):
            continue
        outcome.shown[10] += 1
        if digests[str(case)] != outcome.digest:
            text = f"digest {outcome.digest[:16]}, expected {digests[str(case)][:16]}, of the same device and driver"
            outcome.faults.append(Fault(10, source, text))
