"""Numbers of the graph against their definitions: blocks of weights, float functions, and the table of ROPE."""

import ctypes
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from zinc_attn.canonical.constants import FLUSH
from zinc_attn.canonical.state import flush, reciprocal, weight
from zinc_attn.graph import blocks, elementwise, floats
from zinc_attn.graph.pieces import TYPES
from zinc_attn.graph.rope import Rope, rope

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("rows", (1, 33, 67))
@np.errstate(all="ignore")
def test_weights(kind, rows, rng):
    """Random bytes: gguf's values; pieces are a partition of the block, and rows of a group lie side by side."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    raw = rng.integers(0, 256, (rows, 3 * TYPES[kind].size), np.uint8)
    expected = gguf.dequantize(raw, getattr(gguf.GGMLQuantizationType, kind.upper())).astype(np.float64)
    w = blocks.decode(kind, raw)
    d, m, q = w.d.astype(np.float64), w.m.astype(np.float64), w.q.astype(np.float64)
    if w.scales is not None and w.minima is not None:
        d, m = np.repeat(d, 16, 1) * w.scales, -np.repeat(m, 16, 1) * w.minima
    of_d, of_m = (np.repeat(x, w.q.shape[1] // x.shape[1], 1) for x in (d, m))
    error = np.abs(of_d * q + of_m - expected)
    assert np.all(~np.isfinite(expected) | (error <= 1e-6 * (np.abs(of_d * q) + np.abs(of_m)) + 1e-37))
    packed = blocks.pack(kind, raw)
    assert np.array_equal(blocks.unpack(kind, packed, rows), raw)
    offset, size = TYPES[kind].pieces[0]
    lanes = packed[: min(rows, 32) * size].reshape(-1, size)
    assert np.array_equal(lanes, raw[:32, offset : offset + size])
    assert sorted(byte for begin, n in TYPES[kind].pieces for byte in range(begin, begin + n)) == list(
        range(TYPES[kind].size)
    )


STEP = 65521  # of the numbers whose errors are computed here; scripts/float_errors has all
LINE = re.compile(r"^(\S.*?) +(\d\.\d{4}) at (-?0x\S+)(?: +(\w{16}))?$", flags=re.M)
STATED = {name: (float(error), x) for name, error, x, _ in LINE.findall((ROOT / "docs/graph.md").read_text())}
# function, exact function of float64, and where it has no other arguments the least and the largest one
FUNCTIONS = {
    "rcp": (reciprocal, np.reciprocal, 0),
    "2^x": (lambda x: weight(x, np.zeros_like(x)), np.exp2, -48.5, 0.5),
    "exp": (floats.exp, np.exp),
    "exp(x) - 1": (floats.expm1, np.expm1),
    "log": (floats.log, np.log, 0),
    "softplus": (floats.softplus, lambda x: np.logaddexp(x, 0), -1),
    "1 / sqrt": (floats.inverse_root, lambda x: 1 / np.sqrt(x), 0),
    "square root": (floats.root, np.sqrt, 0),
    "tanh": (floats.tanh, np.tanh),
    "erf": (floats.erf, np.vectorize(math.erf, otypes=[np.float64])),
    "sin": (lambda x: floats.cos_sin(x)[1], np.sin),
    "cos": (lambda x: floats.cos_sin(x)[0], np.cos),
    "SIGMOID": (elementwise.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
}


@np.errstate(all="ignore")
def measured(name, x):
    """The largest error, and float_errors.cpp's sum of the results' bits, of the numbers that are arguments and not
    flushed, and whose results are neither flushed nor infinite."""
    function, exact, *bounds = FUNCTIONS[name]
    least, most = [*bounds, *(-np.inf, np.inf)[len(bounds) :]]
    x = x[(x >= least) & (x <= most) & np.isfinite(x) & (flush(x) == x)]
    wanted = exact(x.astype(np.float64))
    nearest = np.abs(wanted).astype(np.float32)
    x, wanted, nearest = (array[(nearest >= FLUSH) & (nearest < np.inf)] for array in (x, wanted, nearest))
    results = function(x)
    weighted = results.view(np.uint32) * (np.uint64(2) * x.view(np.uint32) + np.uint64(1))
    return round(float(np.max(np.abs(results - wanted) / np.spacing(nearest))), 4), int(np.sum(weighted))


@pytest.fixture(scope="module")
def program():
    """The same of the shaders' text, compiled as C++."""
    printed = subprocess.run([ROOT / "scripts/float_errors", str(STEP)], check=True, capture_output=True, text=True)
    return {name: (float(error), int(results, 16)) for name, error, _, results in LINE.findall(printed.stdout)}


def test_every_function_has_a_stated_error(program):
    assert list(program) == list(STATED) == list(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_stated_error_is_the_largest(name, program):
    """NumPy reaches it at its argument; of other numbers NumPy and the shaders' text have the same bits, and less."""
    error, argument = STATED[name]
    assert measured(name, np.array([float.fromhex(argument)], np.float32))[0] == error
    some = np.arange(0, 1 << 32, STEP, np.uint64).astype(np.uint32).view(np.float32)
    assert measured(name, some) == program[name] <= (error, np.inf)


MODES = ("normal", "neox", "mrope", "imrope", "vision")
SHIM = """#include "rope_table.h"
extern "C" void table(int mode, const int *n, const float *f, const float *factors, uint32_t *words) {
    graph::Rope rope{graph::RopeMode(mode), n[0], n[1], f[0], f[1], f[2], f[3], f[4], f[5], {n[2], n[3], n[4], n[5]},
                     n[6] != 0};
    graph::rope_table(rope, factors, words);
}"""
FLOATS = ("freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rope")
    (folder / "shim.cpp").write_text(SHIM)
    sources = [folder / "shim.cpp", ROOT / "native/graph/rope_table.cpp"]
    flags = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC", f"-I{ROOT}/native/graph"]
    subprocess.run(["g++", *flags, "-o", folder / "rope.so", *sources], check=True)
    return ctypes.CDLL(str(folder / "rope.so")).table


def drawn(rng):
    """Parameters that models have, with a float32's worth of digits."""
    n_dims = int(rng.choice((16, 20, 64, 80, 128, 256)))
    chosen = [rng.choice(values) for values in ((1e4, 5e5, 1e6, 87.5), (1, 0.25, 1.4245), (0, 0.7465, 1))]
    floats = *chosen, rng.uniform(1, 2), 32.0, 1.0
    sections = tuple(int(n) for n in rng.integers(1, n_dims // 4, 4))
    parameters = dict(zip(FLOATS, (float(np.float32(x)) for x in floats), strict=True))
    context, backward = int(rng.choice((0, 4096, 32768))), bool(rng.integers(2))
    return Rope(n_dims, str(rng.choice(MODES)), **parameters, n_ctx_orig=context, sections=sections, backward=backward)


def test_the_words_of_both_languages(native, rng):
    for _ in range(300):
        turn = drawn(rng)
        factors = rng.uniform(0.9, 8, turn.pairs).astype(np.float32) if rng.integers(2) else None
        words = np.zeros((turn.pairs, 4), np.uint32)
        numbers = np.array([turn.n_dims, turn.n_ctx_orig, *turn.sections, turn.backward], np.int32)
        floats = np.array([getattr(turn, name) for name in FLOATS], np.float32)
        pointers = [None if x is None else x.ctypes for x in (numbers, floats, factors)]
        native(MODES.index(turn.mode), *pointers, words.ctypes)
        assert np.array_equal(words, turn.table(factors)), turn


def exact(turn, position, factors):
    """The angle of each pair of ggml's definition in NumPy's float64, and the factor; one: normal or neox."""
    pair = np.arange(turn.pairs)
    theta = position / factors * turn.freq_base ** (-2.0 * pair / turn.n_dims)
    corrected = [
        turn.n_dims * np.log(turn.n_ctx_orig / (beta * 2 * np.pi)) / (2 * np.log(turn.freq_base))
        for beta in (turn.beta_fast, turn.beta_slow)
    ]
    low, high = max(0, np.floor(corrected[0])), min(turn.n_dims - 1, np.ceil(corrected[1]))
    mix = (1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)) * turn.ext_factor
    scale = turn.attn_factor * (1 + 0.1 * np.log(1 / turn.freq_scale) if turn.ext_factor else 1)
    return theta * (turn.freq_scale * (1 - mix) + mix), scale


@pytest.mark.parametrize("position", (0, 1, 7, 4097, 131071, -3))
@pytest.mark.parametrize("ext_factor", (0.0, 1.0))
def test_the_angles_are_those_of_the_definition(position, ext_factor, rng):
    turn = Rope(128, "neox", 1e6, 0.25, ext_factor, 1.25, n_ctx_orig=4096)
    factors = rng.uniform(0.9, 8, turn.pairs).astype(np.float32)
    x = np.concatenate([np.ones(64, np.float32), np.zeros(64, np.float32)]).reshape(1, 1, 1, 128)
    y = rope(x, np.array([[position]], np.int32), turn.table(factors), turn.step)[0, 0, 0]
    angle, scale = exact(turn, position, factors.astype(np.float64))
    wanted = scale * np.concatenate([np.cos(angle), np.sin(angle)])
    assert np.max(np.abs(y - wanted)) < 4e-7
