"""Slips of one token in shaders/graph/ and zinc_attn/graph/ are seen by the tests that a table names: the default
run tries two, ``--full`` all.

No change makes an access out of bounds or a loop that does not end. A change to a shader is a device with other
modules; one to an oracle takes the place of its functions' code, and the device is right.
"""

import importlib
import inspect
from pathlib import Path

import numpy as np
import pytest
from broken_shaders import SHADERS, Change, break_kernels
from device import test_graph_elementwise as elementwise
from device import test_graph_experts as experts
from device import test_graph_fit as fit
from device import test_graph_moves as moves
from device import test_graph_order as order
from device import test_graph_products as products
from device import test_graph_recurrent as recurrent
from device import test_graph_rope as rope
from device import test_graph_routing as routing
from device import test_graph_rows as rows
from slips import check_table, slips
from support import FULL, open_device

from zinc_attn.graph.params import modules
from zinc_attn.runtime import device as device_module
from zinc_attn.tools.graph.check import check_graph


def checked(kind):
    """``check --graph`` of a type of weights."""

    def check(device, rng):
        (outcome,) = check_graph(device, [kind])
        assert outcome.fault == ""

    return check


def called(test, *given):
    return lambda device, rng: test(device, *given, rng=rng)


TESTS = {
    **{
        f"check {kind}": checked(kind)
        for kind in ("q8_0", "q4_0", "q5_1", "q2_K", "q4_K", "q6_K", "bf16", "gdn", "mamba2")
    },
    **{
        f"products {kind}": called(products.test_types, kind)
        for kind in ("mxfp4", "q4_0", "iq4_xs", "q2_K", "q3_K", "q6_K")
    },
    "shapes": called(products.test_shapes, "q4_0"),
    "experts": called(experts.test_types, "q4_0"),
    "pieces of experts": called(experts.test_shapes, "f16", *experts.CASES[2]),
    "lists": called(experts.test_lists, *experts.LISTS[1]),
    "floats": called(products.test_floats, "f32", "f32", 33, 5, 643, (0, 1, 2, 3)),
    **{op: called(elementwise.test_unary, op, ("f32", "f32")) for op in ("exp", "sqrt", "softplus", "gelu", "sin")},
    "bf16": called(elementwise.test_unary, "gelu", ("bf16", "bf16")),
    "div": called(elementwise.test_binary, *elementwise.REPEATED[3]),
    "oai": called(elementwise.test_glu, "swiglu_oai", "f32"),
    "swiglu": called(elementwise.test_glu, "swiglu", "f32"),
    "add_id": called(elementwise.test_add_id),
    "norm": called(rows.test_norm, "norm", 70, ("mul", "add")),
    "long norm": called(rows.test_norm, "rms", 1025, ("add", "mul")),
    "zeros": called(rows.test_norm_of_zeros_and_of_a_transposed_tensor, 0.0),
    "int8": called(rows.test_norm_as_int8, 32, 1),
    "joined rows": called(rows.test_norm_as_int8, 128, 2),
    "sums of experts": lambda device, rng: routing.test_sum_experts(device, rng, 2, 300, 288, 1),
    "sums": called(rows.test_sums, (2, 3, 257)),
    "soft_max": called(rows.test_soft_max, *rows.MASKED[1]),
    "alibi": called(rows.test_soft_max, *rows.MASKED[2]),
    "rope": called(rope.test_rope, *rope.CASES[0], np.float32),
    "argsort": lambda device, rng: order.test_argsort(device, rng, (2, 3, 700, 2), True),
    "top_k": lambda device, rng: order.test_top_k(device, rng, (1, 1, 2, 5000), 1000),
    "copies": lambda device, rng: moves.test_copies_convert_and_take_another_shape(device, rng, *moves.MOVED[2]),
    "pads": lambda device, rng: moves.test_what_repeats_and_what_is_padded(device, rng, "f16", ("odd", "odd")),
    "rows of q3_K": lambda device, rng: moves.test_rows_of_weights(device, rng, "q3_K"),
    "fit": called(fit.test_fit, 40, 48),
    "conv": called(recurrent.test_ssm_conv, *recurrent.CONVOLUTIONS[1]),
    "normed conv": called(recurrent.test_ssm_conv, *recurrent.CONVOLUTIONS[4]),
    "deltas": called(recurrent.test_delta_net, *recurrent.DELTA_NETS[1]),
    "odd deltas": called(recurrent.test_delta_net, *recurrent.DELTA_NETS[3]),
    "scan": called(recurrent.test_ssm_scan, *recurrent.SCANS[1]),
    "scan by element": called(recurrent.test_ssm_scan, *recurrent.SCANS[0]),
}

# Under a file: what breaks, a text that the file has once, its replacement, and a test that fails with it.
TABLE = """
shaders/graph/numbers.glsl
a Newton step of 1 / sqrt: i < 3; → i < 2; @ check q8_0
the rounding of a root: (r + 1u) >> 1 → r >> 1 @ sqrt
the largest quotient: > 127; → > 126; @ div
where exp is infinite: x > EXP_MOST ? → x >= EXP_MOST ? @ exp
a quotient's sign: & ~MAGNITUDE; → & MAGNITUDE; @ div
shaders/graph/turns.glsl
the nearest quarter: + 0x20000000u → + 0x10000000u @ check q8_0
a carry of a negative phase: uint(phase.x == 0u) → 0u @ rope
small phases: 95u - zeros - more → 95u - more @ rope
shaders/graph/float_types.glsl
bf16's ties: (bits >> 16 & 1u) → 1u @ bf16
shaders/graph/activations.glsl
the factor of an exponent: alpha * -x → -x @ oai
the end of gelu: x < GELU_LEAST ? → x > GELU_LEAST ? @ gelu
shaders/graph/glu.glsl
a gate's limit: gate < -p.limit ? → gate < p.limit ? @ oai
a flushed activation: flush(activation(x)) * → activation(x) * @ swiglu
shaders/graph/norm.glsl
a flushed square: squares + flush(square); → squares + square; @ zeros
the mean: - measured.x; → ; @ norm
a column that repeats: return repeated(t, uvec4(j, 0u, 0u, 0u)).x → return j @ norm
a row of several: row % p.joined * blocks → row / p.joined * blocks @ joined rows
shaders/graph/expert_sums.glsl
what is added: flush(plus[p.added[0] + at]) → flush(plus[p.added[0]]) @ sums of experts
shaders/graph/row_sum.glsl
the order of a tree: partial[r + apart] → partial[2u * apart - 1u - r] @ check q8_0
shaders/graph/soft_max.comp
an odd slope: (head - p.heads) + 1u) → (head - p.heads) + 2u) @ alibi
shaders/graph/soft_max.glsl
a whole maximum: : roundEven(most); → : most; @ soft_max
shaders/graph/sort.comp
equal values: a.y < b.y → a.y > b.y @ argsort
the mirror of a merge: i % distance) - 1u → i % distance) - 0u @ argsort
shaders/graph/sums.glsl
a flushed product: NAN : flush(sum); → NAN : sum; @ floats
what no expert has made: expert == p.experts[2] → expert == p.experts[1] @ pieces of experts
shaders/graph/tensor.glsl
the last dimension: at.w * t.s[3] → at.w * t.s[2] @ floats
shaders/graph/columns.glsl
the first expert of a piece: - p.experts[0]; → - 0u; @ pieces of experts
an id that is no expert's: (expert < all ? expert : 0u) → (expert <= all ? expert : 0u) @ experts
the row of a slot: % p.x_slots, → / p.x_slots, @ pieces of experts
shaders/graph/by_expert.comp
where an expert's tiles begin: e < expert; ++e → e + 1u < expert; ++e @ lists
what a tile lacks: next[expert] + count[expert]; → next[expert] + count[expert] + 1u; @ lists
shaders/graph/mul_mat_float_vec.comp
where a superblock ends: (superblock + 1u) * chunks → (superblock + 2u) * chunks @ check bf16
a chunk loaded ahead: chunk * W_WORDS + i]; → chunk * W_WORDS + i % W_WORDS]; @ check bf16
shaders/graph/mul_mat_float.comp
an element's chain: k % SUPERBLOCK == SUPERBLOCK - STEPS → k % SUPERBLOCK == 0u @ floats
shaders/graph/q_blocks.glsl
the high bits of q6_K: bits(piece16(more), 2u * (j % 4u) → bits(piece16(more), 2u * (j % 2u) @ check q6_K
scales of q4_K: uint scales = j < 4u → uint scales = j < 5u @ check q4_K
fifth bits: spread_16(fifth >> 16) → spread_16(fifth >> 15) @ check q5_1
shaders/graph/q_sums.glsl
minima of q2_K: w.z * x.y + w.w * x.z → w.z * x.y + w.z * x.z @ check q2_K
a flushed factor: least_scale(x.x) ? 0.0 → least_scale(x.x) ? w.x @ products mxfp4
shaders/graph/q_places.glsl
a row that is not there: min(lane, width - 1u) → min(lane, width - 2u) @ check q8_0
the half of a word: int(at * bits & 31u) → int(0u * bits & 31u) @ check q8_0
shaders/graph/quantizing.glsl
the second half's sum: + sums[own + 7u] → + sums[own + 6u] @ check q2_K
shaders/graph/tiles.glsl
a short superblock: b % 8u == 7u || b + 1u == p.blocks → b % 8u == 7u @ products q4_0
products with scales: 128 - OFFSET * s → 127 - OFFSET * s @ products q3_K
a tile's superblock: (superblock * 8u + j) * rows_of_x() → (superblock * 4u + j) * rows_of_x() @ check q4_K
a column's row of x: * TILE_COLUMNS + i); → * TILE_COLUMNS); @ experts
shaders/graph/mul_mat.comp
an invocation's rows: + own.x) * 4u + i % 4u → + own.x) * 4u + i % 2u @ products q4_0
shaders/graph/mul_mat_units.comp
sums of one half: HALVES && k >= STEPS / 2u → HALVES && k > STEPS / 2u @ products q6_K
what mxfp4 flushes: subgroupAny(is_small()) → false @ products mxfp4
a matrix's columns: o / OWN_ROWS * MAT_N → o % OWN_ROWS * MAT_N @ products q4_0
minima of the second half: w2[m][e], w3[m][e] → w2[m][e], w2[m][e] @ products q2_K
shaders/graph/waves.glsl
a round's superblocks: s < end - round → s < 1u @ check q4_0
shaders/graph/mul_mat_vec.comp
the second superblock ahead: small_pieces[n * BLOCKS + j] → small_pieces[0u * BLOCKS + j] @ shapes
a block behind the last: IS_MXFP4 || number < p.blocks ? → IS_MXFP4 || number <= p.blocks ? @ shapes
shaders/graph/fit.comp
the least magnitude: < floatBitsToUint(p.least) → <= floatBitsToUint(p.least) @ fit
shaders/graph/move.comp
what is padded: lessThan(at + shift, sizes) → lessThanEqual(at + shift, sizes) @ pads
shaders/graph/get_weights.comp
scales of q3_K: (j % 2u) + j / 8u * 4u) → (j % 2u) + j / 4u * 4u) @ rows of q3_K
shaders/graph/ssm_conv.comp
a tap's factor: abs(v) < PRODUCT_MIN → abs(v) < FLUSH @ conv
a head's channels: flush(square), p.size) → flush(square), 256u) @ normed conv
what comes late: (at - n) * p.late.s[0] → (at - n) * p.x.s[0] @ conv
the last run of tokens: min(begin + p.run, tokens) → min(begin + p.run, tokens - 1u) @ conv
shaders/graph/states.glsl
a row's lane: gl_LocalInvocationID.x % LANES; → gl_LocalInvocationID.x % LANES ^ 1u; @ check gdn
halves of parts: of[i] + of[i + apart] → of[i] + of[2u * apart - 1u - i] @ deltas
an odd row's end: SIZE % (4u * LANES) == 0u → SIZE % 4u == 0u @ odd deltas
a state that is flushed: vec4(STATE_MIN) → vec4(FLUSH) @ scan
shaders/graph/delta_net.comp
the head of q: head % p.q.n[1] → head / p.q.n[1] @ deltas
the least decay: DECAY_MIN); → FACTOR_MIN); @ deltas
a delta that is flushed: above(delta, FACTOR_MIN) → above(delta, FLUSH) @ deltas
a state that is named: NAMED != 0u → NAMED == 0u @ deltas
a kept state's slot: tokens - 1u - t; → t; @ deltas
shaders/graph/ssm_scan.comp
the state of a sequence: ids[p.ids + sequence] → sequence @ scan
decays of a head: p.a + head * SIZE → p.a + 0u * SIZE @ scan by element
x that is flushed: above(added, FACTOR_MIN) → above(added, FLUSH) @ scan
one head of a lane: own == 0u || BY_ELEMENT != 0u → own == 0u @ scan by element
zinc_attn/graph/recurrent.py
where states end: states[::-1][:slots] → states[:slots] @ check mamba2
zinc_attn/graph/products.py
a rounding to int8: np.rint(scaled) → np.trunc(scaled) @ check q8_0
a superblock's length: 2 * SUPERBLOCK // X_BLOCK → SUPERBLOCK // X_BLOCK @ check q4_0
an expert's row of x: slot % x.shape[1] → slot // x.shape[1] @ pieces of experts
zinc_attn/graph/rows.py
the tree of a sum: partial[..., :lanes] + partial[..., lanes:] → partial[..., ::2] + partial[..., 1::2] @ check q8_0
the larger of two lengths: length > least, → length < least, @ zeros
zinc_attn/graph/rope.py
the sine's sign: x0 * cos - x1 * sin → x0 * cos + x1 * sin @ check q8_0
zinc_attn/graph/floats.py
ln 2 in two parts: - whole * f32(attention.LN2_LO) → + whole * f32(attention.LN2_LO) @ check q8_0
zinc_attn/graph/elementwise.py
an act of a gate: flush(activation(a)) * b → activation(a) * b @ swiglu
zinc_attn/graph/blocks.py
the offset of q3_K: + 4 * high - 4 → + 4 * high - 3 @ products q3_K
scales of iq4_xs: (four | two << 4) → (four | two << 3) @ products iq4_xs
zinc_attn/graph/order.py
the last NaN: key, np.isnan(x)) → key, ~np.isnan(x)) @ argsort
zinc_attn/graph/moves.py
a shift of an index: np.arange(n) + s → np.arange(n) - s @ pads
"""


SLIPS = slips(TABLE)
DEFAULT = "small phases", "the last NaN"


def test_the_table_is_of_the_files():
    check_table(SLIPS, SHADERS.parent)
    assert {slip.test for slip in SLIPS} <= set(TESTS)


def put_in(slip, monkeypatch, tmp_path):
    """Make the slip, for devices that are opened afterwards, or in the oracle."""
    path = Path(slip.file)
    if path.suffix != ".py":
        change = Change(str(path.relative_to("shaders")), slip.old, slip.new)
        monkeypatch.setattr(device_module, "SPIRV", break_kernels([change], tmp_path, modules=modules()))
        return
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    names = dict(vars(module))
    exec(compile(Path(module.__file__).read_text().replace(slip.old, slip.new), slip.file, "exec"), names)
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__:
            monkeypatch.setattr(inspect.unwrap(function), "__code__", inspect.unwrap(names[name]).__code__)


@pytest.mark.parametrize("slip", [slip for slip in SLIPS if FULL or slip.breaks in DEFAULT], ids=str)
def test_a_slip_is_caught(slip, rng, monkeypatch, tmp_path):
    put_in(slip, monkeypatch, tmp_path)
    with open_device("default", "vulkan") as device, pytest.raises(AssertionError):
        TESTS[slip.test](device, rng)
