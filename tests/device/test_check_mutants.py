"""``check --quick`` sees every slip of the kernels: a table of small changes to the shaders, each of which it reports.

A change is one token, or as few as make one slip. The default run has some of them, ``--full`` all. No change makes an
access out of bounds or a loop that does not end, so no driver can crash or hang. Those of the kernel of matrix units
are at the end: a slip there may stay within the bound of the error, and then only the bits of a variation show it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from broken_shaders import SHADERS, Change, break_kernels
from support import FULL

import zinc_attn as za
from zinc_attn.canonical.constants import KEYS_PER_NODE
from zinc_attn.planning.arithmetic import Arithmetic
from zinc_attn.runtime import device as device_module
from zinc_attn.tools import check
from zinc_attn.tools.check import Case
from zinc_attn.tools.check.record import committed_digests
from zinc_attn.tools.harness.bits import Output
from zinc_attn.tools.harness.split_spec import parse_split_specs

RISING, FALLING = "9/3/64 f16 2200 rising window=1900", "9/3/64 f16 2200 falling sinks"
CANCELLING, BLIND = "9/3/64 f16 1300 cancelling", "9/3/64 f16 90 mask=blind"
FADING, FADING_F32 = "9/3/64 f16 902 fading", "9/3/64 f32 1152 fading"
SOFTCAP, WINDOW = "9/3/64 f16 1100 softcap=20+scale=0.25+sinks", "9/3/64 f16 1700 window=1200+sinks"
BIASES, NONCAUSAL = "9/3/64 f16 700 jumping alibi+mask=f16", "9/3/64 f16 600 cancelling mask=f32+noncausal"
SIZES, LATENT, RATIO = "6/2/67/133 f16 577 rising", "2/1/72/40/latent f16 577 rising", "128/1/64 f16 130 jumping"
WIDE, Q8_0, BF16 = "32/8/128 f16 129", "16/2/256 q8_0 577", "9/3/64 bf16 300"
FIVE_BITS, FOUR_BITS = "9/3/64 q5_1/q4_0 300 rising", "9/3/64 q4_1/q5_0 300"
INTEGER, INTEGER_SIZES = "16/2/256 q8_0 1000", "6/2/67/133 q8_0 577 rising"
IQ4_NL, FP8 = "6/2/72/40 iq4_nl/fp8_e4m3 130", "9/3/64 fp8_e4m3/q5_1 90"


class Mutant(NamedTuple):
    """What breaks, a text of the file and its replacement, the quick case that reports it, and the property.

    arithmetics: in which it does; of matrix units: whether the error stays within its bound.
    """

    breaks: str
    old: str
    new: str
    case: str
    prop: int = 10
    arithmetics: tuple[Arithmetic, ...] = ("canonical", "fused")
    bounded: bool = False

    def __str__(self) -> str:
        return self.breaks


SUMS: tuple[Arithmetic, ...] = ("integer",)
MUTANTS = {
    "attend/integer.glsl": (
        Mutant("the last block of a row", "|| chunk == K_DIM / CHUNK", "|| chunk == 0u", INTEGER_SIZES, 10, SUMS),
        Mutant("the last keys' scales", "while (t < leaf.count)", "while (t + 4u < leaf.count)", INTEGER, 10, SUMS),
        Mutant("a block's power", "* V_BLOCKS + block]", "* V_BLOCKS]", INTEGER, 10, SUMS),
        Mutant("the vector of a power", "* VECTORS + at / V_BLOCKS]", "* VECTORS]", INTEGER, 10, SUMS),
    ),
    "attend/fold.glsl": (
        Mutant("maximum of the states before", "t < lane ? other", "t > lane ? other", RISING),
        Mutant("a state is before itself", "t < lane ?", "t <= lane ?", RISING),
        Mutant("a state's weight", "o[j] * state_power[batch + j]", "o[j]", CANCELLING),
        Mutant("order of states", "total_power[batch + t], o[t]", "total_power[batch + t], o[t ^ 1u]", CANCELLING),
    ),
    "attend/merge.comp": (
        Mutant("the states of a row", "there = s < row.count", "there = s + 1u < row.count", RISING),
        Mutant("the last pair of dimensions", "&& dim < V_DIM)", "&& dim < V_DIM - 2u)", CANCELLING),
    ),
    "attend/node.glsl": (
        Mutant("a wave's maximum", "top = max(top, wave_m[at]);", "top = wave_m[at];", FALLING),
        Mutant("a wave's weight", "(q01, q23), powers.y)", "(q01, q23), powers.x)", RISING),
        Mutant("the vector that a wave folds", "return min(wave + f", "return min(f", RISING),
        Mutant("a pair of the fold", "= state.o[h * LANE_PAIRS + (d + e) / 2u]", "= state.o[h * LANE_PAIRS]", WIDE),
        Mutant("the order of leaves", "((t * VECTORS + folded", "(((t ^ 1u) * VECTORS + folded", CANCELLING),
        Mutant("the state of a node", "state_of(vector.x, node)", "state_of(vector.x, item.node_begin)", CANCELLING, 2),
    ),
    "attend/attend.comp": (
        Mutant("the leaf of a wave", "LEAVES_PER_NODE + wave);", "LEAVES_PER_NODE + (wave ^ 1u));", CANCELLING),
        Mutant("the nodes of a walk", "node < item.node_end; ++node", "node < item.node_begin + 1u; ++node", RISING, 2),
    ),
    "attend/weights.glsl": (
        Mutant("rounding of a maximum", "m[h] = roundEven(", "m[h] = ceil(", FADING),
        Mutant("a quarter of the keys' maximum", "weights[at + 1u]), max", "weights[at]), max", FADING),
        Mutant("order of the weights", "sum + weights[own + (t", "sum + weights[own + (60u - t", CANCELLING),
        Mutant("a hidden key", "if (MASK != 0u) {", "if (MASK == 7u) {", BLIND),
    ),
    "floats.glsl": (
        Mutant("the cut-off by one", "d < CUTOFF ?", "d <= CUTOFF ?", FADING),
        Mutant("the flush at its bound", "lessThan(", "lessThanEqual(", FADING),
        Mutant("a step of the polynomial", "HORNER(x, EXP2_C5)", "HORNER(x, EXP2_C6)", CANCELLING),
        Mutant("a Newton step", "i < 3;", "i < 2;", CANCELLING),
        Mutant("the low part of ln 2", "y = y + low;", "y = y - low;", RISING),
        Mutant("digits of a weight", "(254u + INTEGER_BITS", "(253u + INTEGER_BITS", INTEGER, 10, SUMS),
    ),
    "attend/state.glsl": (
        Mutant("the flush of merges", "vec2 sum = x + b;\n    return flush", "vec2 sum = x + b;\n    return ", FADING),
        Mutant("the flush of nodes", "float sum = x + b;\n    return flush", "float sum = x + b;\n    return ", FADING),
        Mutant("the flush of out", ": flush(quotient)", ": quotient", FADING),
        Mutant("a sink's maximum", "    m = max(m, whole);", "    m = whole;", WINDOW),
        Mutant("a sink's weight of o", "return powers.x;", "return 1.0;", FALLING),
    ),
    "contract.glsl": (
        Mutant("the cut-off a step lower", "CUTOFF -48.0", "CUTOFF -49.0", FADING),
        Mutant("a coefficient's last bit", "EXP2_C2 0.240226477", "EXP2_C2 0.240226492", CANCELLING),
        Mutant("where tanh's formula changes", "TANH_SMALL 0.600000024", "TANH_SMALL 0.7", SOFTCAP),
    ),
    "attend/scores.glsl": (
        Mutant("order in a chunk", "for (uint d = 1u; d < 4u; ++d)", "for (uint d = 3u; d > 0u; --d)", CANCELLING),
        Mutant(
            "sums of a chunk that are not fused",
            "multiply_add(vec2(qb[n][d]), vec2(k0b[at][d], k1b[at][d]), chunk_sum[n])",
            "chunk_sum[n] + qb[n][d] * vec2(k0b[at][d], k1b[at][d])",
            *(CANCELLING, 10, ("fused",)),
        ),
        Mutant("ALiBi's position on a shard", " + lane + item.key_shift", " + lane", BIASES, 9),
    ),
    "attend/chunks.glsl": (
        Mutant("a scale of q8_0", "k_block(key0[i], c / 4u)", "k_block(key0[i], c / 8u)", Q8_0),
        Mutant("the key behind the last", "b < leaf.count)", "b <= leaf.count)", BF16),
    ),
    "attend/score_mod.glsl": (
        Mutant("a sum that must not be fused", "= s + bias;", "= fma_emulated(vec2(slope), term, s);", BIASES),
        Mutant("ALiBi's sign", "-abs(distance)", "abs(distance)", BIASES),
        Mutant("a mask's first key", "position[i] >= work[record", "position[i] > work[record", NONCAUSAL),
        Mutant("a mask's unit", "HEAD_WORD(head, HEAD_MASK)", "HEAD_WORD(head, HEAD_ALIBI)", BIASES),
    ),
    "attend/item.glsl": (
        Mutant("a window by one", "max(item.first, first_key)", "max(item.first + 1u, first_key)", WINDOW),
        Mutant("the last key", "max(item.limit, first_key)", "max(item.limit - 1u, first_key)", CANCELLING),
        Mutant("the last heads of a group", "group - VECTORS);", "group - VECTORS - 1u);", RATIO),
        Mutant("a row of several", "row + h / ROW_HEADS, item", "row + h % ROW_HEADS, item", CANCELLING, 8),
    ),
    "attend/values.glsl": (
        Mutant("the flush of leaves", "o[i] = flush(sum);", "o[i] = sum;", FADING_F32),
        Mutant("a pair of a shared word", "word >>= slice * SLICE", "word >>= 0u * SLICE", FOUR_BITS),
        Mutant("the block of a slice", "slice * SLICE / BLOCK", "slice * SLICE / 64u", FIVE_BITS),
    ),
    "attend/words.glsl": (
        Mutant("a page shift", "(tile >> shift)", "(tile >> (shift + 1u))", CANCELLING),
        Mutant("a tile in its page", "first + (tile & (", "first + (tile / 2u & (", CANCELLING),
        Mutant("a token in a small tile", "key : token % TILE", "key : token % (TILE / 2u)", CANCELLING, 6),
        Mutant("a chunk of latent V", "+ at % CHUNK_WORDS : at", "+ at % 2u : at", LATENT),
    ),
    "attend/storage.glsl": (
        Mutant("where K has fifth bits", "where, K_PAIRED + block)", "where, block)", FIVE_BITS),
        Mutant("a minimum", "Block(both.x, both.y, fifth)", "Block(both.x, both.x, fifth)", FIVE_BITS),
        Mutant("where V has scales", "block * V_HALVES / 2u", "block * V_HALVES / 4u", Q8_0),
        Mutant("the last bit of bfloat16", "w & 0xFFFF0000u", "w & 0xFFFE0000u", BF16),
        Mutant("a mantissa of fp8", "(bytes & 0x00800080u)", "(bytes & 0x00800000u)", FP8),
        Mutant(
            "an odd value of fp8",
            "w >> 8 : w) & 0x00FF00FFu;\n        x = unpackHalf2x16((",
            "w : w) & 0x00FF00FFu;\n        x = unpackHalf2x16((",
            FP8,
        ),
        Mutant("the polynomial of iq4_nl", "cubic, y, -37.8056", "cubic, y, -38.8056", IQ4_NL),
        Mutant("a fifth bit's place", "(fifth & 0xFFu) |", "(fifth & 0xFEu) |", FIVE_BITS),
        Mutant("the offset of q4_0", "block.scale * -8.0", "block.scale * -7.0", FIVE_BITS),
        Mutant("the offset of q5_0", "block.scale * -16.0", "block.scale * -15.0", FOUR_BITS),
        Mutant("the minimum of q4_1", ": block.minimum;", ": -block.minimum;", FOUR_BITS),
        Mutant("the fifth bits of a chunk", "8u * (chunk % 4u)", "8u * (chunk % 2u)", FIVE_BITS),
    ),
    "cache/append.comp": (
        Mutant("a new token's tile", "tile & ((1u << shift) - 1u)", "tile & ((1u << shift) - 2u)", CANCELLING),
        Mutant("a new token's scales", "TILE * K_VALUES + i * TILE", "TILE * K_VALUES + i * 32u", Q8_0),
    ),
    "cache/copy.comp": (Mutant("a copied page's V", "= v[source * V_TILE", "= v[target * V_TILE", CANCELLING, 6),),
}
DEFAULT = (
    *("a wave's maximum", "the cut-off by one", "a copied page's V", "a fifth bit's place"),
    "sums of a chunk that are not fused",
)

TABLE = [(file, mutant) for file, mutants in MUTANTS.items() for mutant in mutants]
# of those for both arithmetics the default run has the canonical one
CHOSEN = [
    (file, mutant, arithmetic)
    for file, mutant in TABLE
    for arithmetic in (mutant.arithmetics if FULL else mutant.arithmetics[:1])
    if FULL or mutant.breaks in DEFAULT
]
ONE = pytest.mark.parametrize("device", ["vulkan"], indirect=True)  # every dispatcher runs the same SPIR-V


@pytest.fixture
def index(device: za.Device) -> int:
    """The device that is opened anew with changed shaders. The cases fill the merge's rounds of a CPU device."""
    if device.info.kind != "cpu":
        pytest.skip("the quick cases have one round of states on a GPU; the default cases have several")
    return device.info.index


def test_the_table_is_of_the_shaders_and_the_quick_cases():
    """Each text occurs once, and the cases are those of --quick."""
    for file, one in (*TABLE, *((f"attend/{file}.glsl", one) for file, one in MATRIX_MUTANTS)):
        assert (SHADERS / file).read_text().count(one.old) == 1, f"{file}: {one.old}"
        cases = Case.quick("matrix" if "matrix_" in file else one.arithmetics[0])
        assert one.case in (str(case._replace(arithmetic="canonical")) for case in cases)
    names = [mutant.breaks for _, mutant in TABLE]
    assert len(set(names)) == len(names) >= 20 and set(DEFAULT) <= set(names)


@ONE
@pytest.mark.parametrize(("file", "mutant", "arithmetic"), CHOSEN, ids=[f"{one}-{name}" for _, one, name in CHOSEN])
def test_a_mutant_is_caught(index, file, mutant, arithmetic, monkeypatch, tmp_path):
    changes = [Change(file, mutant.old, mutant.new)]
    only = "attend" if file == "attend/score_mod.glsl" else ""  # the kernel of matrix units has no fma_emulated()
    monkeypatch.setattr(device_module, "SPIRV", break_kernels(changes, tmp_path, only))
    with za.Device.open(index, runtime="vulkan") as device:
        found = failing(device, Case.parse(mutant.case, arithmetic), mutant.prop)
    assert mutant.prop in found


def failing(device: za.Device, case: Case, prop: int) -> set[int]:
    """The properties that fail. For 2, 3 and 10 only some of what ``check`` compares, which compiles few pipelines."""
    if prop not in (2, 3, 10):
        (outcome,) = check.check([device], [case], parse_split_specs("auto"))
        return {fault.property for fault in outcome.faults}
    committed = committed_digests()
    found = zip((10, 2, 3), base_results(device, case), strict=True)
    return {prop for prop, output in found if output.digest() != committed[str(case)]}


def base_results(device: za.Device, case: Case) -> Iterator[Output]:
    """The output by the split rule, then that of one split, then by a GPU's split rule."""
    data, tokens = case.data(), case.context
    call = {**case.masking(1, tokens), "return_lse": True, "allow_empty": True}
    with za.KVCache(device, case.shape, 1, -(-tokens // 256) * 256, case.dtype, 256) as cache:
        seq = cache.new_sequence()
        cache.append(seq, 0, *data.rows(0, tokens))
        for layout in ({}, {"num_splits": 1}, {"split_size": KEYS_PER_NODE}):
            yield Output(
                *za.Attention(cache, **layout, **case.options(), arithmetic=case.arithmetic)(data.q[-1], seq, 0, **call)
            )


# Of slopes of masks, which no case of the record has. Behind each: where out differs, in two heads of a row, and in a
# row that the mask hides.
SLOPES = (
    ("attend/score_mod.glsl", Mutant("the slope of a mask", "(head, HEAD_MASK)", "(head, HEAD_ALIBI)", ""), (1, 1, 0)),
    ("attend/score_mod.glsl", Mutant("the head of a slope", "(head, HEAD_MASK)", "(0u, HEAD_MASK)", ""), (0, 1, 0)),
)


@ONE
@pytest.mark.parametrize(("file", "mutant", "differ"), SLOPES if FULL else SLOPES[1:], ids=str)
def test_a_mutant_of_mask_slopes_is_caught(index, file, mutant, differ, rng, monkeypatch, tmp_path):
    q, k = (rng.standard_normal((n, heads, 16), np.float32) for n, heads in ((2, 2), (9, 1)))
    options = {"mask": rng.standard_normal((2, 9), np.float32), "mask_slopes": np.float32([0.5, 0.25])}
    options["mask"][1] = -np.inf
    changes = [Change(file, mutant.old, mutant.new)]
    monkeypatch.setattr(device_module, "SPIRV", break_kernels(changes, tmp_path, "attend"))
    with za.Device.open(index, runtime="vulkan") as device:
        found, hidden = za.attention(q, k, k, device=device, allow_empty=True, **options)
    want = za.reference.emulate(q, k, k, **options)[0][0]
    assert (*np.any(found.view(np.uint32) != want.view(np.uint32), axis=1), np.any(hidden)) == differ


# --- matrix units ------------------------------------------------------------------------------------------

MATRIX_WINDOW, MATRIX_BF16 = "32/8/128 f16 300 rows=17 window=100+sinks", "9/3/64 bf16 700 rows=23 rising window=600"
COARSE = "9/3/64 f16 1290 rows=40 coarse"
INTEGER_ROWS = "16/2/256 q4_0 577 rows=40"
MATRIX_MUTANTS = (
    ("matrix_weights", Mutant("maximum of the row before", "at = t * W", "at = t / 8u * 8u * W", MATRIX_WINDOW, 5)),
    ("matrix_values", Mutant("the fold of leaves", "* node_w +", "* 1.000001 * node_w +", COARSE, 5, bounded=True)),
    ("units_scores", Mutant("high integers of q", "dots * 256", "dots * 255", INTEGER_ROWS, 10, SUMS)),
    ("units_values", Mutant("a vector's largest", "largest_of_four(top)", "top", INTEGER_ROWS, 10, SUMS)),
    ("units_inputs", Mutant("a scale of V", "V_BLOCKS - 1u)).scale", "0u)).scale", INTEGER_ROWS, 10, SUMS)),
    ("matrix_vectors", Mutant("a row's last key", "(item.last_row - row) * item.row_step", "0u", MATRIX_WINDOW, 5)),
    ("matrix_inputs", Mutant("a conversion", "high.zw));", "high.zw * 1.001));", COARSE, 7, bounded=True)),
    ("matrix_weights", Mutant("a key behind the last", "number < vector.l", "number <= vector.l", MATRIX_BF16, 11)),
)


@pytest.mark.parametrize(("file", "mutant"), MATRIX_MUTANTS if FULL else MATRIX_MUTANTS[:3], ids=str)
def test_a_mutant_of_matrix_units_is_caught(matrix_device, file, mutant, monkeypatch, tmp_path):
    changes, integer = [Change(f"attend/{file}.glsl", mutant.old, mutant.new)], file.startswith("units")
    monkeypatch.setattr(device_module, "SPIRV", break_kernels(changes, tmp_path))
    monkeypatch.setenv("ZINC_ATTN_UNITS", "1")
    case = Case.parse(mutant.case, "integer" if integer else "matrix")
    with za.Device.open(matrix_device.info.index, runtime="vulkan") as device:
        (outcome,) = check.check([device], [case], parse_split_specs("1,auto,size:512"))
    found = sorted({fault.property for fault in outcome.faults})
    assert mutant.prop in found and (11 not in found) == (integer or mutant.bounded), f"reported: {found}"
