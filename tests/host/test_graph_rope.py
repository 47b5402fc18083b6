"""The table of ROPE: the words of C++, and its angles against float64."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from zinc_attn.graph.rope import Rope, rope

ROOT = Path(__file__).parents[2]
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
    floats = (
        rng.choice((1e4, 5e5, 1e6, 87.5)),
        rng.choice((1, 0.25, 1.4245)),
        rng.choice((0, 0.7465, 1)),
        rng.uniform(1, 2),
    )
    floats = (*floats, 32.0, 1.0)
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
