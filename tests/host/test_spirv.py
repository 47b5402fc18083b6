"""What the package changes in SPIR-V: hints to unroll loops that index arrays of registers, which a GPU's compiler else
leaves in memory, and products and sums that round once."""

from collections.abc import Iterator

import numpy as np
import pytest
from support import instructions

from zinc_attn.graph.params import modules
from zinc_attn.kernels.declarations import ATTEND, MODULES, MULTIPLY_ADD
from zinc_attn.runtime.device import SPIRV, load_spirv
from zinc_attn.runtime.multiply_add import module_for

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


@pytest.mark.parametrize("decl", [MULTIPLY_ADD, ATTEND], ids=lambda decl: decl.name)
def test_the_module_with_the_operation(decl):
    """fma() of GLSL.std.450 becomes OpFmaKHR with the same operands, behind its capability and its extension."""
    before, after = (instructions(x) for x in (load_spirv(decl), module_for("OpFmaKHR", load_spirv(decl))))
    assert module_for("fma()", load_spirv(decl)) == load_spirv(decl)
    replaced = [words for words in before if words[0] == 12 and words[4] == 50]
    fused = [words for words in after if words[0] == 4427]
    (glsl,) = (words[1] for words in before if words[0] == 11)  # the id of GLSL.std.450
    assert fused and [[12, words[1], words[2], glsl, 50, *words[3:]] for words in fused] == replaced
    known = set(map(tuple, before))
    declared = [words for words in after if tuple(words) not in known and words[0] != 4427]
    assert declared == [[17, 6030], [10, *np.frombuffer(b"SPV_KHR_fma\0", np.uint32).tolist()]]
    order = [words[0] for words in after]
    assert max(i for i, opcode in enumerate(order) if opcode == 17) < order.index(10) < order.index(11)
