"""The float functions against float64: the largest errors that docs/graph.md states, in units of the last place."""

import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from zinc_attn.canonical.constants import FLUSH
from zinc_attn.canonical.state import flush, reciprocal, weight
from zinc_attn.graph import elementwise, floats

ROOT = Path(__file__).parents[2]
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
