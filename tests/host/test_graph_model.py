"""What the oracle makes of random models of each type of weights, and of layers, is the record's."""

import pytest
from support import FULL

from zinc_attn.tools.graph.check import CASES, CHOSEN, PIECES, committed, digest, passes
from zinc_attn.tools.graph.model import KINDS
from zinc_attn.tools.graph.oracle import Oracle
from zinc_attn.tools.graph.recurrent import LAYERS


@pytest.mark.parametrize("case", (*(KINDS if FULL else KINDS[::3]), *LAYERS, *CHOSEN[: 1 + FULL]))
def test_the_oracles_digest_does_not_show_how_many_tokens_come_at_once(case):
    forward = passes(case)
    assert {digest(forward(Oracle(), pieces)) for pieces in PIECES} == {committed()[case]}


def test_the_record_has_every_case():
    assert tuple(committed()) == (*CASES, *CHOSEN)
