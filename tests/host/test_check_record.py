"""The committed records of check and of check --graph are what the oracle gives, and a difference is told."""

import numpy as np
import pytest
from support import FULL

from zinc_attn.planning.arithmetic import EXACT
from zinc_attn.tools.check import record
from zinc_attn.tools.check.cases import Case
from zinc_attn.tools.check.outcome import Outcome, oracle_output
from zinc_attn.tools.graph.check import CASES, CHOSEN, PIECES, committed, digest, passes
from zinc_attn.tools.graph.model import KINDS
from zinc_attn.tools.graph.oracle import Oracle
from zinc_attn.tools.graph.recurrent import LAYERS
from zinc_attn.tools.harness.bits import Output

GRID = 60  # default cases without masking options, of which the oracle takes minutes for the long ones
MOST = [case for i, case in enumerate(Case.default()) if i >= GRID or case.context <= 1000 or i == 6]


def test_committed_record_has_the_quick_set_and_the_default_cases():
    """What the documents give of its digests is in tests/device/test_documents.py."""
    ((source, digests),) = record.load_record(record.RECORD).items()
    expected = [case for arithmetic in EXACT for case in (*Case.quick(arithmetic), *Case.default(arithmetic))]
    assert list(digests) == list(dict.fromkeys(map(str, expected))) and source.endswith("oracle, reference.emulate")
    assert {case.context for case in Case.default()} >= {1000, 8191, 8192, 32768, 131072}


@pytest.mark.parametrize("case", [*Case.quick(), *Case.quick("fused"), *MOST], ids=str)
def test_committed_digests_are_the_oracles(case):
    result = oracle_output(case, case.data())
    assert len(result.lse) == case.shape.q_heads and result.digest() == record.committed_digests()[str(case)]


def fault_of(got, want):
    """The line of the fault, empty where no bit differs."""
    outcome = Outcome(Case.quick()[0], "a device")
    assert outcome.compare(2, "layout 8", got, want) == (not outcome.faults)
    return "".join(map(outcome.line, outcome.faults))


def test_first_difference_has_its_distance():
    want = Output(np.zeros((2, 4), np.float32), np.ones(2, np.float32))
    got = Output(want.out.copy(), np.nextafter(want.lse, np.float32(2)))
    assert fault_of(want, want) == ""
    assert fault_of(got, want) == (
        "2 split layout, layout 8: lse[0]: got 1.00000012 (0x3f800001), expected 1 (0x3f800000), 1 ulp apart; "
        "2 of 2 elements differ"
    )
    got.out[1, 2] = np.float32(-1e-45)
    assert "layout 8: out[1, 2]: got -1.40129846e-45" in fault_of(got, want) and "1 ulp apart" in fault_of(got, want)
    got.out[1, 2] = np.nan
    assert "not a number; 1 of 8 elements differ" in fault_of(got, want)
    assert fault_of(Output(-want.out, want.lse), want), "equal numbers, other bits"


@pytest.mark.parametrize("case", (*(KINDS if FULL else KINDS[::3]), *LAYERS, *CHOSEN[: 1 + FULL]))
def test_the_oracles_digest_does_not_show_how_many_tokens_come_at_once(case):
    forward = passes(case)
    assert {digest(forward(Oracle(), pieces)) for pieces in PIECES} == {committed()[case]}


def test_the_record_has_every_case():
    assert tuple(committed()) == (*CASES, *CHOSEN)
