"""The oracle's logits of a random model of each type of weights are those of the record."""

import pytest
from support import FULL

from zinc_attn.tools.graph.check import committed, digest
from zinc_attn.tools.graph.model import KINDS, logits, make_model
from zinc_attn.tools.graph.oracle import Oracle


@pytest.mark.parametrize("kind", KINDS if FULL else KINDS[::3])
def test_the_oracles_digest(kind):
    assert digest(logits(make_model(kind), Oracle())) == committed()[kind]


def test_the_record_has_every_type():
    assert tuple(committed()) == KINDS
