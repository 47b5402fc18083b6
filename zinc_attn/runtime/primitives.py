"""The question to a device before its first kernel: does its driver compute what the kernels rely on?"""

from contextlib import ExitStack, closing
from typing import Final

import numpy as np

from ..canonical import primitives
from ..errors import WrongResultError
from ..kernels.declarations import NUMBERS, PRIMITIVES, RESULTS
from ..kernels.records import Words
from .protocol import Dispatch, Kernel, Runtime, Use

_UNWRITTEN: Final = 0xFFFFFFFF  # a NaN, and no result
_WHAT: Final = {
    "weight": "a power of two by a polynomial",
    "power": "a power of two",
    "tanh": "a hyperbolic tangent by polynomials",
    "merged": "a rescaled sum",
    "reciprocal": "a reciprocal by Newton steps",
    "lse": "a logarithm by a polynomial",
    "low": "the float32 of a float16, many of them denormal",
    "high": "the float32 of a float16, many of them denormal",
    "product": "an int8 times a float32",
    "fused": "an int8, read as a denormal float16, times a float32",
}


def answers(runtime: Runtime, kernel: Kernel, words: Words, count: int, groups: int) -> Words:
    """The ``count`` words that a kernel of two buffers computes from ``words`` in its first buffer."""
    with ExitStack() as stack:
        inputs = stack.enter_context(closing(runtime.buffer(words.nbytes, Use.INPUT)))
        outputs = stack.enter_context(closing(runtime.buffer(4 * count, Use.OUTPUT)))
        step = Dispatch(kernel, (inputs, outputs), (groups, 1, 1))
        recording = stack.enter_context(closing(runtime.record([step])))
        runtime.write(outputs, np.full(count, _UNWRITTEN, np.uint32))
        runtime.write(inputs, words)
        runtime.run(recording)
        return runtime.read(outputs)


def check_primitives(runtime: Runtime, spirv: bytes) -> None:
    """WrongResultError where a result of ``primitives.comp`` has other bits than NumPy's."""
    numbers, expected = primitives.words(NUMBERS, RESULTS)
    kernel, (groups, *_) = runtime.kernel(PRIMITIVES, spirv, ()), PRIMITIVES.groups(())
    results = answers(runtime, kernel, numbers.reshape(-1), expected.size, groups)
    results = results.reshape(expected.shape)
    if np.array_equal(results, expected):
        return
    row, column = np.argwhere(results != expected)[0]
    name, info = RESULTS[column], runtime.info
    raise WrongResultError(
        f"{info.name} ({info.driver}): the driver computes {_WHAT[name]} ({name}, row {row}) as "
        f"0x{results[row, column]:08X}, expected 0x{expected[row, column]:08X}, so that attention would have other "
        "bits; use another driver, or another version of it"
    )
