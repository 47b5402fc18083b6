"""The arithmetic in words: encodings, constants, the reduction, and the order of a call's dispatches."""

from __future__ import annotations

from typing import Any, Final

from ...storage import IQ4_NL

ENCODINGS: Final = {
    "f32": "IEEE 754 binary32",
    "f16": "IEEE 754 binary16",
    "bf16": "the upper half of a binary32",
    "q8_0": "d * q, q an int8",
    "fp8_e4m3": "OCP's 8-bit floating point of 4 exponent and 3 mantissa bits, times the float32 scale of the head",
    "q5_1": "d * q + m, q of 5 bits, the product and the sum rounded on their own",
    "q5_0": "d * (q - 16), q of 5 bits",
    "q4_1": "d * q + m, q of 4 bits, the product and the sum rounded on their own",
    "q4_0": "d * (q - 8), q of 4 bits",
    "iq4_nl": f"d * t[q], t = {', '.join(map(str, IQ4_NL))}",
}

CONSTANTS: Final = {
    "KEYS_PER_LEAF": "keys per leaf; leaves lie at absolute multiples",
    "LEAVES_PER_NODE": "leaves per node; nodes lie at absolute multiples",
    "KEYS_PER_NODE": "keys per node: LEAVES_PER_NODE leaves of KEYS_PER_LEAF",
    "CHUNK": "head dimensions summed on their own before they join the dot product",
    "WEIGHT_PARTIALS": "weight sums of a leaf: keys congruent modulo WEIGHT_PARTIALS",
    "CUTOFF": "2**d counts as 0 for d below it",
    "FLUSH": "smaller magnitudes of l, o and out become +0",
    "EMPTY_M": "m of the empty state; its l and o are 0",
    "EXP2_POLY": "2**x on [-1/2, 1/2], c0 first, by Horner's rule",
    "RCP_SEED": "1 / x starts from the float32 with bits RCP_SEED - bits(x); then three times y += y * (1 - x * y)",
    "LN_POLY": "ln(1 + x) = x - x**2 / 2 + x**3 * (d0 + d1 x + ...)",
    "LN2_HI": "ln 2 in two parts: its high part",
    "LN2_LO": "its low part",
    "SQRT2": "mantissas above it are halved before ln",
    "LOG2E": "log2(e), used on the host in float64",
    "TANH_POLY": "tanh x = x + x**3 * (e0 + e1 x**2 + ...) below TANH_SMALL",
    "TANH_SMALL": "from here on tanh x = (1 - t) * rcp(1 + t), t = 2**(-2 x log2 e)",
    "TANH_MAX": "larger magnitudes count as this",
    "MIN_INPUT": "smaller magnitudes of float32 and bfloat16 q, k, v count as 0: the host flushes them to +0",
    "MAX_INPUT": "largest magnitude of q, k, v; the host refuses larger ones, NaN and infinities",
    "MAX_SCORE": "largest head_dim * max|q| * max|k| * max(1, 1.5 |scale|); the host refuses more",
    "MAX_HEAD_DIM": "largest head_dim and v_head_dim",
    "MAX_Q_HEADS": "most query heads",
    "K_DIMS": "k_dim is a multiple of it: the last dimensions of q and K are filled up with zeros",
    "V_DIMS": "v_dim is a multiple of it, and of value_slice; the last dimensions of V are filled up with zeros",
    "WAVE": "invocations of a wave; a workgroup of pass 2 has several",
    "MAX_HEADS_PER_WORKGROUP": "most query heads of a workgroup of pass 1",
    "MAX_ACCUMULATORS": "most sums of weighted values, WAVE * value_slice a query head, of a workgroup of pass 1 in "
    "one pass over V; more take two or four",
    "MAX_VALUE_PASSES": "most passes over V",
    "MAX_CONTEXT": "most keys",
    "BLOCK": "head dimensions that share a scale d, and a minimum m where there is one, both float16",
    "MERGE_DIMS": "head dimensions per workgroup of pass 2",
}
REDUCTION: Final = (
    "All arithmetic is float32 with one rounding per operation, never fused. A state is (m, l, o).",
    "Score: s = score_scale * sum over chunks, ascending, of each chunk's own ascending sum of q * k.",
    "Softcap: with t = score_scale * that sum, s = (cap * tanh(t * (1 / cap))) * log2 e.",
    "Leaf: m = roundEven(max s); a weight is P(s - roundEven(s)) * 2**(roundEven(s) - m); l = (c0 + c1) + (c2 + c3), "
    "c_j the ascending sum of the weights of keys congruent to j; o = ascending sum of weight * v; o is flushed.",
    "Merge of a and b: m = max(m_a, m_b); x = x_a * 2**(m_a - m) + x_b * 2**(m_b - m) for l and o; x is flushed.",
    "2**d, d an integer, counts as 0 below CUTOFF; flushed: magnitudes below FLUSH become +0.",
    "Fold: leaves fold ascending into nodes, nodes fold ascending into the total, each from the empty state. A sink "
    "merges last: m = roundEven(sink), l = P(sink - m), o = 0.",
    "Finish: out = flush(o * rcp(l)), lse = m * ln 2 + ln(l); 0 and -inf where neither key nor sink is seen.",
)


def _after_writes(stage: str, access: str) -> dict[str, str]:
    """A barrier after which what kernels wrote is read by this stage."""
    return {
        "srcStageMask": "VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT",
        "srcAccessMask": "VK_ACCESS_SHADER_WRITE_BIT",
        "dstStageMask": f"VK_PIPELINE_STAGE_{stage}_BIT",
        "dstAccessMask": f"VK_ACCESS_{access}_READ_BIT",
    }


DISPATCH: Final[tuple[dict[str, Any], ...]] = (
    {"host": "writes work, q and rows; vkQueueSubmit makes them visible to the device"},
    {"kernel": "append", "when": "appends > 0"},
    {
        "barrier": _after_writes("COMPUTE_SHADER", "SHADER"),
        "when": "appends > 0",
        "for": "attend reads the new rows of k and v. With attend.from_upload it reads them from rows: then append "
        "comes last, behind a barrier of COMPUTE_SHADER with no access masks, and no barrier is needed here",
    },
    {
        "kernel": "attend",
        "when": "items > 0",
        "module": "attend_single where no item has more than one leaf; attend_node where leaves_per_state is a node's, "
        "no item reaches beyond a node and rows_shared is 1, on a device that vulkan.node_workgroups describes; "
        "attend_loop suits every layout",
    },
    {
        "barrier": _after_writes("COMPUTE_SHADER", "SHADER"),
        "when": "single_pass == 0",
        "for": "merge reads states",
    },
    {"kernel": "merge", "when": "single_pass == 0"},
    {
        "barrier": _after_writes("HOST", "HOST"),
        "for": "the host reads out once the fence is signalled; to kernels that read out, and before the next call "
        "writes k, v, states or out: COMPUTE_SHADER, SHADER_READ | SHADER_WRITE",
    },
)
