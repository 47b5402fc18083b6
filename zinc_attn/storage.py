"""The types in which a cache stores K and V, and the words of each; needs no NumPy."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from .limits import BLOCK

IQ4_NL: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml's table
F16_MAX: Final = 65504.0
FP8_UNIT: Final = 256.0  # an fp8_e4m3 value over the float16 of the same exponent bits and mantissa
FP8_MAX: Final = 448.0
LEAST_SCALE: Final = 2.0**-31  # of a head: fp8_e4m3's magnitudes, 2**-9 to 448, are then within the bounds of inputs
MOST_SCALE: Final = 2.0**51
# The largest stored magnitude of block types and fp8_e4m3 over the caller's largest: iq4_nl's scale is fitted. With a
# subnormal float16 scale the ratio may be three for tiny magnitudes, for which MAX_SCORE leaves room.
GROWTH: Final = 1.125


@dataclass(frozen=True)
class StorageType:
    """A type of stored values.

    bits: of a value. halves: float16 numbers that a block of 32 dimensions has besides its values: a scale, or a scale
    and a minimum; 0 for types without blocks. fifth_bits: whether a block has a word of fifth bits, bit i for dimension
    i. head_scale: whether a value is multiplied by the float32 scale of its head. most: the largest magnitude of a row,
    for which the scale and the minimum of blocks are float16 numbers; 0 stands for MAX_INPUT.
    """

    name: str
    bits: int
    halves: int = 0
    fifth_bits: bool = False
    head_scale: bool = False
    most: float = 0

    @cached_property
    def quantized(self) -> bool:
        """Whether rows of every dtype are rounded to values of the type."""
        return self.halves > 0 or self.head_scale

    @property
    def integers(self) -> bool:
        """Whether a value is an integer times the scale of its block: what arithmetic "integer" takes."""
        return self.halves == 1

    def value_words(self, dims: int) -> int:
        """uint32 words of the values of a row of ``dims`` dimensions, a multiple of 8."""
        return dims * self.bits // 32

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one of ggml's blocks: float16 numbers, fifth bits, values."""
        return 2 * self.halves + 4 * self.fifth_bits + BLOCK * self.bits // 8

    def row_bytes(self, dims: int) -> int:
        """Bytes of a row of ``dims`` dimensions as engines keep it: values, or ggml's blocks, the last one whole."""
        return -(-dims // BLOCK) * self.block_bytes if self.halves else dims * self.bits // 8

    def scale_words(self, dims: int) -> int:
        """uint32 words of a row's scales and minima, two a word, and then of its fifth bits."""
        blocks = -(-dims // BLOCK)
        return -(-blocks * self.halves // 2) + blocks * self.fifth_bits


# A type's index is the value of the specialization constants k_storage and v_storage. Block types are ggml's: in q4_0,
# q5_0 and q8_0 a value is scale * (q - offset), in q4_1 and q5_1 scale * q + minimum, in iq4_nl scale * table[q].
STORAGE: Final = {
    kind.name: kind
    for kind in (
        StorageType("f32", 32),
        StorageType("f16", 16, most=F16_MAX),
        StorageType("bf16", 16),
        StorageType("q8_0", 8, 1, most=127 * F16_MAX),
        StorageType("fp8_e4m3", 8, head_scale=True),
        StorageType("q5_1", 4, 2, fifth_bits=True, most=F16_MAX),
        StorageType("q5_0", 4, 1, fifth_bits=True, most=16 * F16_MAX),
        StorageType("q4_1", 4, 2, most=F16_MAX),
        StorageType("q4_0", 4, 1, most=8 * F16_MAX),
        StorageType("iq4_nl", 4, 1, most=100 * F16_MAX),
    )
}


@lru_cache(maxsize=256)
def storage_types(dtype: str) -> tuple[StorageType, StorageType]:
    """The types of K and of V. dtype: a name that ``storage_dtype`` made."""
    k, _, v = dtype.partition("/")
    return STORAGE[k], STORAGE[v or k]


def storage_index(kind: StorageType) -> int:
    """The value of the specialization constant for a type."""
    return list(STORAGE).index(kind.name)
