"""Recurrent layers: the oracle's bits, whatever the number of tokens that come at once."""

import numpy as np
import pytest
from graph_harness import same

from zinc_attn.graph import declarations as graph
from zinc_attn.graph import recurrent, rows
from zinc_attn.graph.records import tensor
from zinc_attn.tools.graph.device import run

EXECUTED = True

EDGES = np.float32([0.0, -0.0, 1e-40, -1e-38, 3e-31, 8e-13, -9e-13, 1e-6, 200, -200, 3e38])


def drawn(rng, shape, edges=(), least=-12):
    """Numbers of several magnitudes; edges take the places of some."""
    x = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(least, 3, shape)).astype(np.float32)
    some = rng.random(shape) < (0.1 if len(edges) else 0)
    return np.where(some, rng.choice(np.float32([*edges, 0]), shape), x).astype(np.float32)


def same_as(words, wanted, written):
    """wanted: of each result; written: the states of how many of the slots that there was room for."""
    same(words[0], wanted.outputs)
    assert len(wanted.kept) == written
    same(words[1], wanted.kept)


CONVOLUTIONS = [
    (4, 257, 1, 1, 0, 1, None),
    (4, 70, 23, 2, 1, 1, None),
    (3, 5, 600, 1, 1, 0, None),
    (9, 33, 8, 3, 0, 0, None),
    (4, 768, 1, 2, 0, 1, ("rms", 128)),
    (4, 256, 1, 1, 1, 1, ("l2", 32)),
]


def normed_heads(y, op, size, scale):
    return rows.norm(op, y.reshape(*y.shape[:-1], -1, size), 1e-6, ("scale", scale)).reshape(y.shape)


@pytest.mark.one_driver("4-70", "4-768")
@pytest.mark.parametrize(
    ("taps", "channels", "tokens", "sequences", "biased", "silu", "normed"),
    CONVOLUTIONS,
)
def test_ssm_conv(any_device, taps, channels, tokens, sequences, biased, silu, normed, rng):
    """normed: the norm of the first channels, and of a head behind these, and how many channels a head has."""
    x = drawn(rng, (sequences, channels, taps - 1 + tokens), EDGES, -30)
    x[0, 0, 0], x[-1, 1, -1], x[0, 2, 0] = np.inf, np.nan, -np.inf
    w, bias = drawn(rng, (channels, taps), EDGES[:8], -30), drawn(rng, (1, 1, channels), EDGES)
    x[0, 3] *= 2.0**-45  # factors that are too small
    bias[0, 0, 3] = 0
    wanted = recurrent.ssm_conv(x, w, bias if biased else None, bool(silu))
    length = 1 if tokens == 1 else 4
    op, size = normed or ("rms", 1)
    parts = (0, 2 * size), (2 * size, 3 * size)
    norms = [
        normed_heads(wanted[..., slice(*part)], op, size, scale) for part, scale in zip(parts, (0.5, 1), strict=True)
    ]
    early, late = np.ascontiguousarray(x[..., : taps - 1]), np.ascontiguousarray(x[..., taps - 1 :].swapaxes(1, 2))
    values = {"late": tensor(late.swapaxes(1, 2)), "y": tensor(wanted), "run": length, "size": size, "offsets": (0, 0)}
    values |= {"begins": (0, 2 * size), "ends": (2 * size, 3 * size)}
    values |= {"scales": (0.5, 1.0), "eps": 1e-6, "factor": 1.0 / size}
    given, spec = (early, late, w, bias), (biased, silu, int(normed is not None), graph.NORM_OPS.index(op))
    counts = wanted.size, *(norm.size if normed else 1 for norm in norms)
    got, *found = run(any_device.runtime, graph.SSM_CONV, given, counts, spec, **values)
    same(got, wanted)
    for words, norm in zip(found, norms, strict=True):
        same(words, norm if normed else norm[:0])


def delta_operands(rng, size, tokens, heads, sequences, repeats, by_channel):
    """q, k, v, gate, beta and state as a model has them."""
    q, k = (drawn(rng, (sequences, tokens, heads, size), EDGES[:7]) for _ in range(2))
    v = drawn(rng, (sequences, tokens, heads * repeats, size), EDGES[:8])
    gate = -np.abs(drawn(rng, (sequences, tokens, heads * repeats, size if by_channel else 1), [-200, -14, 0, 0.1]))
    beta = np.abs(drawn(rng, (*v.shape[:3], 1), EDGES[:8]))
    state = drawn(rng, (sequences, heads * repeats, size, size), EDGES[:8], -30)
    v[0, 0, 0, 1], beta[0, 0, 0], state[0, 0, 1] = 2.0**-62, 1, 0  # a delta that is too small
    k[0, 0, 0] *= 2.0**30
    return [q, k, v, gate, beta, state]


def run_delta_net(device, operands, columns, slots, ids=None):
    """ids: where the states are that the sequences have, if they do not lie in their order."""
    _, _, v, gate, _, state = operands
    named = ids is not None
    ids = np.arange(len(v), dtype=np.int32) if ids is None else ids
    sequences, tokens, _, size = v.shape
    state_size = state[0].size
    written = min(tokens, slots)
    names = "q", "k", "v", "gate", "beta", "state"
    values = {name: tensor(operand) for name, operand in zip(names, operands, strict=True)}
    values |= {"ids": 0, "outputs": 0, "kept": 0, "steps": (state_size, state_size * sequences), "slots": slots}
    values |= {"scale": recurrent.scale_of(size)}
    arguments = [*(operand if operand.base is None else operand.base for operand in operands), ids]
    spec = size, columns, int(gate.shape[-1] == size), int(named)
    counts = v.size, written * sequences * state_size + 3
    return run(device.runtime, graph.DELTA_NET, arguments, counts, spec, **values)


DELTA_NETS = [
    (128, 1, 2, 1, 1, False, 2, 1),
    (16, 5, 2, 2, 3, True, 1, 4),
    (64, 40, 1, 1, 2, True, 4, 1),
    (20, 3, 2, 3, 1, False, 1, 4),
    (4, 600, 1, 1, 1, False, 1, 2),
]


@pytest.mark.one_driver("16-5", "64-40")
@pytest.mark.parametrize(
    ("size", "tokens", "heads", "sequences", "repeats", "by_channel", "columns", "slots"),
    DELTA_NETS,
)
def test_delta_net(any_device, size, tokens, heads, sequences, repeats, by_channel, columns, slots, rng):
    operands = delta_operands(rng, size, tokens, heads, sequences, repeats, by_channel)
    operands[0] = np.ascontiguousarray(operands[0].swapaxes(1, 2)).swapaxes(1, 2)  # of a permuted q
    wanted, ids = recurrent.delta_net(*operands, slots), None
    if sequences > 1:
        ids = (np.arange(sequences, dtype=np.int32) + 1) % sequences
        operands[5] = operands[5][np.argsort(ids)]
    same_as(run_delta_net(any_device, operands, columns, slots, ids), wanted, min(tokens, slots))


def test_numbers_that_are_not_finite_stay_in_their_rows(any_device, rng):
    for at, edge in ((2, np.inf), (2, np.nan), (3, 200.0), (5, -np.inf), (4, np.nan)):
        operands = delta_operands(rng, 16, 3, 1, 2, 1, False)
        operands[at][0, 0, 0, 0] = edge
        wanted = recurrent.delta_net(*operands)
        assert np.isfinite(wanted.outputs[1]).all() and not np.isfinite(wanted.outputs[0]).all()
        same_as(run_delta_net(any_device, operands, 1, 1), wanted, 1)


SCANS = [
    (16, 1, 38, 2, 9, 2, True, 2, 1),
    (128, 6, 4, 2, 3, 2, False, 2, 4),
    (96, 3, 6, 3, 1, 1, False, 1, 1),
    (6, 7, 2, 1, 600, 1, True, 1, 3),
    (256, 2, 2, 2, 4, 3, False, 1, 2),
]


@pytest.mark.one_driver("16-1", "96-3")
@pytest.mark.parametrize(
    ("size", "of_head", "heads", "groups", "tokens", "sequences", "by_element", "columns", "slots"),
    SCANS,
)
def test_ssm_scan(any_device, size, of_head, heads, groups, tokens, sequences, by_element, columns, slots, rng):
    state = drawn(rng, (sequences + 2, heads, of_head, size), EDGES[:8], -30)
    x, dt = (
        drawn(rng, (sequences, tokens, heads, of_head), EDGES[:8]),
        drawn(rng, (sequences, tokens, heads), EDGES[:8]),
    )
    x[-1, 0, 0, -1], state[:, 0, -1] = 2.0**-62, 0  # a product that is too small
    x[0, 0, 0, 0], dt[0, 0, -1] = np.inf, np.nan
    dt[-1, -1, 0] = 25
    a = -np.abs(drawn(rng, (heads, size if by_element else 1), [200, 1, 0]))
    both = drawn(rng, (sequences, tokens, 2 * groups, size), EDGES[:8])
    both[-1, 0, :groups] *= 2.0**30
    b, c = both[:, :, :groups], both[:, :, groups:]  # parts of a tensor
    ids = rng.permutation(sequences + 2)[:sequences].astype(np.int32)
    wanted = recurrent.ssm_scan(state, x, dt, a, b, c, ids, slots)
    written = min(tokens, slots)
    values = {"a": 0, "b": tensor(b), "c": tensor(c, groups * size), "ids": 0, "outputs": 0, "kept": 0, "slots": slots}
    values |= {"steps": (state[0].size, state[0].size * sequences)}
    operands = state, x, dt, a, both, both, ids
    counts = x.size, written * sequences * state[0].size + 3
    spec = size, columns, int(by_element)
    same_as(run(any_device.runtime, graph.SSM_SCAN, operands, counts, spec, **values), wanted, written)
