"""What the checks of a proof say of the bits: the digest of every restart, and whether all are the committed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from ..check.record import RECORD, load_record, run_digest
from .steps import Row, StepResult

MOST_FAULTS: Final = 20  # in the report; stdout.jsonl has all


def bits_summary(results: Sequence[StepResult]) -> dict[str, Any]:
    """The checks among ``results``.

    restarts: per check the digest over its cases (None where it did not get that far) and how many cases ended how.
    agree: whether every restart has the same digest, None before the first check. committed: the digest of the same
    cases in the package's record, None where the record lacks one. equals_committed: whether every restart has that
    one. faults: the first wrong bits.
    """
    checks = [_one_check(result) for result in results if result.step.command == "check"]
    digests = [one["digest"] for one in checks]
    names = {case for result in results if result.step.command == "check" for case in _digests(result.rows)}
    known = {case: digest for digests in load_record(RECORD).values() for case, digest in digests.items()}
    recorded = bool(names) and names <= set(known)
    committed = run_digest({case: known[case] for case in names}) if recorded else None
    return {
        "restarts": [{name: value for name, value in one.items() if name != "faults"} for one in checks],
        "cases": len(names),
        "agree": None not in digests and len(set(digests)) == 1 if digests else None,
        "committed": committed,
        "equals_committed": None if committed is None else set(digests) == {committed},
        "faults": [fault for one in checks for fault in one["faults"]][:MOST_FAULTS],
    }


def _digests(rows: Sequence[Row]) -> dict[str, str]:
    """The digests by case of a check's last row, which it prints when all cases are done."""
    return next((dict(row["cases"]) for row in rows if "made_by" in row), {})


def _one_check(result: StepResult) -> dict[str, Any]:
    cases = [row for row in result.rows if "case" in row]
    counts = Counter(row["status"] for row in cases)
    digests = _digests(result.rows)
    faults = [
        {"restart": result.step.restart, "case": row["case"], "variation": fault["variation"], "text": fault["text"]}
        for row in cases
        for fault in row["faults"]
    ]
    return {
        "restart": result.step.restart,
        "status": result.status,
        "digest": run_digest(digests) if digests else None,
        "passed": counts["pass"],
        "failed": counts["FAIL"],
        "refused": counts["refused"],
        "faults": faults,
    }
