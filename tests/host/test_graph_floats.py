"""The graph's float functions against float64: the largest error of each over its range, in units of the last place."""

import math

import numpy as np
import pytest

from zinc_attn.graph import floats

COUNT = 1 << 16
erf = np.vectorize(math.erf, otypes=[np.float64])


def logarithmic(low, high):
    """Numbers of all magnitudes between these."""
    return lambda rng: np.exp(rng.uniform(math.log(low), math.log(high), COUNT))


def both_signs(low, high):
    return lambda rng: logarithmic(low, high)(rng) * rng.choice((-1.0, 1.0), COUNT)


# function, exact function of float64, arguments, bound in units of the last place of the exact result
ACCURACY = {
    "exp": (floats.exp, np.exp, lambda rng: rng.uniform(-69, 88.72283, COUNT), 1.5),
    "expm1": (floats.expm1, np.expm1, both_signs(1e-20, 88), 4.5),
    "log": (floats.log, np.log, logarithmic(2.0**-100, 3e38), 1.5),
    "log near 1": (floats.log, np.log, lambda rng: rng.uniform(0.5, 2, COUNT), 1.5),
    "softplus": (floats.softplus, lambda x: np.log1p(np.exp(x)), lambda rng: rng.uniform(-1, 30, COUNT), 2.5),
    "1 / sqrt": (floats.inverse_root, lambda x: 1 / np.sqrt(x), logarithmic(2.0**-100, 3e38), 1.5),
    "tanh": (floats.tanh, np.tanh, both_signs(1e-20, 40), 2.5),
    "erf": (floats.erf, erf, both_signs(1e-20, 10), 1.5),
    "cos, small": (lambda x: floats.cos_sin(x)[0], np.cos, both_signs(1e-20, 0.78), 2.5),
    "sin, small": (lambda x: floats.cos_sin(x)[1], np.sin, both_signs(1e-20, 0.78), 2.5),
    "cos": (lambda x: floats.cos_sin(x)[0], np.cos, both_signs(0.1, 3e38), 2.5),
    "sin": (lambda x: floats.cos_sin(x)[1], np.sin, both_signs(0.1, 3e38), 2.5),
}


@pytest.mark.parametrize("name", ACCURACY)
def test_accuracy(name, rng):
    function, exact, arguments, bound = ACCURACY[name]
    x = arguments(rng).astype(np.float32)
    wanted = exact(x.astype(np.float64))
    error = float(np.max(np.abs(function(x) - wanted) / np.spacing(np.abs(wanted).astype(np.float32))))
    print(f"{name}: {error:.2f} units of the last place")
    assert error <= bound
