"""The question to a device before arithmetic "fused": how does it compute a * b + c with one rounding?"""

from typing import Final, Literal, get_args

import numpy as np

from ..canonical import products
from ..errors import WrongResultError
from ..kernels.declarations import FUSED_EMULATED, FUSED_NATIVE, MULTIPLY_ADD
from .primitives import answers
from .protocol import Runtime

# Best first: VK_KHR_shader_fma's operation, which rounds once; GLSL's function, which may; several float32 operations.
Way = Literal["OpFmaKHR", "fma()", "emulated"]
WAYS: Final[tuple[Way, ...]] = get_args(Way)
CONSTANT: Final[dict[Way, int]] = {"OpFmaKHR": FUSED_NATIVE, "fma()": FUSED_NATIVE, "emulated": FUSED_EMULATED}

_HEADER_WORDS: Final = 5
_CAPABILITY, _EXTENSION, _EXT_INST = 17, 10, 12  # opcodes; the only imported set is GLSL.std.450
_FMA: Final = 50  # of GLSL.std.450
_OP_FMA, _FMA_CAPABILITY = 4427, 6030


def ways_of(runtime: Runtime) -> tuple[Way, ...]:
    """The ways that a device may have, best first."""
    return WAYS if runtime.info.fma_operation else WAYS[1:]


def find_way(runtime: Runtime, spirv: bytes) -> Way:
    """The first of ``ways_of`` whose results have NumPy's bits, by MULTIPLY_ADD's module. WrongResultError: none."""
    words, expected = products.triple_words()
    for way in ways_of(runtime):
        kernel = runtime.kernel(MULTIPLY_ADD, module_for(way, spirv), (CONSTANT[way],))
        results = answers(runtime, kernel, words, expected.size, MULTIPLY_ADD.groups((CONSTANT[way],))[0])
        if np.array_equal(results, expected):
            return way
    raise WrongResultError(
        f"{runtime.info.name} ({runtime.info.driver}): the driver computes no product and sum with one rounding, "
        'neither by fma() nor by exact float32 operations; use arithmetic="canonical", or another driver'
    )


def module_for(way: Way, spirv: bytes) -> bytes:
    """A SPIR-V module as a way needs it: with OpFmaKHR in the place of every fma(), whose operands are the same.

    glslang does not know the operation (SPV_KHR_fma, 2025).
    """
    if way != "OpFmaKHR":
        return spirv
    words = np.frombuffer(spirv, np.uint32)
    parts, offset, declared = [words[:_HEADER_WORDS]], _HEADER_WORDS, False
    while offset < len(words):
        length, opcode = int(words[offset]) >> 16, int(words[offset]) & 0xFFFF
        instruction = words[offset : offset + length]
        if opcode != _CAPABILITY and not declared:  # capabilities come first, and then extensions
            name = np.frombuffer(b"SPV_KHR_fma\0", np.uint32)
            parts += [_instruction(_CAPABILITY, _FMA_CAPABILITY), _instruction(_EXTENSION, *name)]
            declared = True
        if opcode == _EXT_INST and instruction[4] == _FMA:  # type, result, set, instruction, operands
            instruction = _instruction(_OP_FMA, *instruction[1:3], *instruction[5:])
        parts.append(instruction)
        offset += length
    return np.concatenate(parts).tobytes()


def _instruction(opcode: int, *operands: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array([(len(operands) + 1) << 16 | opcode, *operands], np.uint32)
