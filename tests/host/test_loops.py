"""Loops of SPIR-V that index arrays of registers, which a GPU's compiler leaves in memory unless it unrolls them."""

from collections.abc import Iterator

import pytest
from support import instructions

from zinc_attn.graph.params import modules
from zinc_attn.kernels.declarations import ATTEND, MODULES
from zinc_attn.runtime.device import SPIRV, load_spirv

BUILT = [decl for decl in (*MODULES, *modules()) if (SPIRV / decl.file).exists()]
VARIABLE, ACCESS_CHAIN, LOOP_MERGE, LABEL, LIFETIMES = 59, 65, 246, 248, (6, 7)  # Private and Function
CONSTANTS = range(41, 53)  # OpConstantTrue to OpSpecConstantOp


def indexing_loops(spirv: bytes) -> Iterator[int]:
    """The control of the innermost loop around each access to an element of an array of registers whose number is no
    constant. A loop's blocks lie between its head and its merge block."""
    constants, registers, loops = set(), set(), []
    for opcode, *words in instructions(spirv):
        if opcode in CONSTANTS:
            constants.add(words[1])
        elif opcode == VARIABLE and words[2] in LIFETIMES:
            registers.add(words[1])
        elif opcode == LOOP_MERGE:
            loops.append((words[0], words[2]))
        elif opcode == LABEL and loops and loops[-1][0] == words[0]:
            loops.pop()
        elif opcode == ACCESS_CHAIN and words[2] in registers and not constants.issuperset(words[3:]) and loops:
            yield loops[-1][1]


@pytest.mark.parametrize("decl", BUILT, ids=lambda decl: decl.name)
def test_a_gpu_unrolls_every_loop_that_indexes_registers(decl):
    assert set(indexing_loops(load_spirv(decl, "discrete"))) <= {1}
    assert load_spirv(decl, "cpu") == (SPIRV / decl.file).read_bytes()


def test_hints_that_are_there_stay():
    """attend has loops of all kinds: without a hint, that are unrolled, and that must not be."""
    before, after = (
        [words[3] for words in instructions(x) if words[0] == LOOP_MERGE]
        for x in (load_spirv(ATTEND), load_spirv(ATTEND, "integrated"))
    )
    assert set(before) == {0, 1, 2} and after == [control or 1 for control in before]
    assert 0 in set(indexing_loops(load_spirv(ATTEND)))
