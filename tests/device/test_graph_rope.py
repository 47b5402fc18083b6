"""ROPE: the oracle's bits in every mode, at the ends of the positions' range, strided."""

import numpy as np
import pytest
from graph_harness import same

from zinc_attn.graph import declarations as graph
from zinc_attn.graph import rows
from zinc_attn.graph.records import tensor
from zinc_attn.graph.rope import Rope, rope
from zinc_attn.tools.graph.device import as_words, run

EXECUTED = True

YARN = {"freq_scale": 0.25, "ext_factor": 0.7, "n_ctx_orig": 4096}
CASES = [  # rows' elements, the first that turns, parameters
    (64, 0, Rope(64, "normal")),
    (80, 8, Rope(20, "normal", 5e5, **YARN)),
    (82, 6, Rope(32, "neox", 1e6, attn_factor=1.25, backward=True)),
    (128, 0, Rope(128, "mrope", sections=(16, 24, 24, 0))),
    (64, 0, Rope(32, "imrope", sections=(5, 4, 4, 3), **YARN)),
    (80, 0, Rope(40, "vision", sections=(20, 20, 0, 0))),
]


@pytest.mark.parametrize(("n", "first", "turn"), CASES, ids=lambda x: getattr(x, "mode", None))
@pytest.mark.parametrize("dtype", (np.float32, np.float16))
def test_rope(any_device, n, first, turn, dtype, rng):
    batch, tokens, heads = 2, 5, 3
    base = (10 * rng.standard_normal((batch, tokens, heads, 2 * n), np.float32)).astype(dtype)
    base[0, 0, 0, n : n + 8] = (0, -0.0, 1e-7, np.inf, -np.inf, np.nan, 6e4, -6e4)
    x = base[..., n:]
    positions = rng.integers(0, 200_000, (4, tokens), np.int32)
    positions[:, :4] = (0, 2**31 - 1, -(2**31), -5)
    table = turn.table(rng.uniform(1, 8, turn.pairs).astype(np.float32))
    table[-2:, :2] = (1 << 20 | 1, 0), (0, 1)  # small phases, and those whose lower word is 0
    wanted = rope(x, positions, table, turn.step, first)
    values = {"x": tensor(x, n), "y": tensor(wanted), "positions": 0, "stride": tokens, "table": 0, "first": first}
    least = dtype(1e-6) if first and dtype is np.float32 else dtype(0)
    wanted[np.abs(wanted) < least] = 0
    values |= {"pairs": turn.pairs, "step": turn.step, "least": least}
    spec = [graph.FLOAT_TYPES.index("f32" if dtype == np.float32 else "f16")]
    words = as_words(wanted).size
    same(*run(any_device.runtime, graph.ROPE, (base, positions, table), (words,), spec, **values), wanted)
    if dtype is np.float32 and not any_device.info.native:  # of a norm; the processor has a dispatch for each
        a = rng.standard_normal((1, 1, 1, n), np.float32)
        wanted = rope(rows.norm("rms", x, 1e-6, ("mul", a)), positions, table, turn.step, first)
        wanted[np.abs(wanted) < least] = 0
        values |= {"b": tensor(a), "eps": 1e-6, "factor": 1.0 / n, "scales": (0, 0), "joined": 1}
        spec = graph.NORM_OPS.index("rms"), graph.FOLLOW_OPS.index("mul"), 0, 1
        operands = base, a, a, positions, table
        same(*run(any_device.runtime, graph.NORM, operands, (words,), spec, **values), wanted)
