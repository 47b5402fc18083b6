"""What the checks of a proof say of the bits: the digest of every restart, and whether all are the committed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ..check.record import committed_digests, run_digest
from .steps import StepResult

MOST_FAULTS: Final = 20  # in the report; stdout.jsonl has all


def bits_summary(results: Sequence[StepResult]) -> dict[str, Any]:
    """The checks among ``results``.

    restarts: per check the digest over its cases (None where it did not get that far) and how many cases ended how.
    agree: whether every restart has the same digest, None before the first check. committed: the digest of the same
    cases in the package's record, None where the record lacks one. equals_committed: whether every restart has that
    one. faults: the first wrong bits.
    """
    checks = [result for result in results if result.step.command == "check"]
    by_case = [_digests(result) for result in checks]
    digests = [run_digest(one) if one else None for one in by_case]
    names = {case for one in by_case for case in one}
    known = committed_digests()
    recorded = bool(names) and names <= set(known)
    committed = run_digest({case: known[case] for case in names}) if recorded else None
    return {
        "restarts": [_restart(*one) for one in zip(checks, digests, strict=True)],
        "cases": len(names),
        "agree": None not in digests and len(set(digests)) == 1 if digests else None,
        "committed": committed,
        "equals_committed": None if committed is None else set(digests) == {committed},
        "faults": [fault for result in checks for fault in _faults(result)][:MOST_FAULTS],
    }


def _digests(result: StepResult) -> dict[str, str]:
    """The digests by case of a check's last row, which it prints when all cases are done."""
    return next((dict(row["cases"]) for row in result.rows if "made_by" in row), {})


def _restart(result: StepResult, digest: str | None) -> dict[str, Any]:
    counts = Counter(row["status"] for row in result.rows if "case" in row)
    ended = {"passed": counts["pass"], "failed": counts["FAIL"], "refused": counts["refused"]}
    return {"restart": result.step.restart, "status": result.status, "digest": digest, **ended}


def _faults(result: StepResult) -> Iterator[dict[str, Any]]:
    for row in result.rows:
        for fault in row["faults"] if "case" in row else ():
            about = {name: fault[name] for name in ("variation", "text")}
            yield {"restart": result.step.restart, "case": row["case"], **about}
