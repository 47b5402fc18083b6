"""The oracle's logits of a random model of each type of weights, and recurrent layers, are those of the record."""

import pytest
from support import FULL

from zinc_attn.tools.graph.check import CASES, PIECES, committed, digest
from zinc_attn.tools.graph.model import KINDS, logits, make_model
from zinc_attn.tools.graph.oracle import Oracle
from zinc_attn.tools.graph.recurrent import LAYERS, layer


@pytest.mark.parametrize("kind", KINDS if FULL else KINDS[::3])
def test_the_oracles_digest(kind):
    assert digest(logits(make_model(kind), Oracle())) == committed()[kind]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_does_not_show_how_many_tokens_come_at_once(name):
    assert {digest(layer(name, Oracle(), pieces)) for pieces in PIECES} == {committed()[name]}


def test_the_record_has_every_case():
    assert tuple(committed()) == CASES
