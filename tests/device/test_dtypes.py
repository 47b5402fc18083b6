"""What dtypes a call without a cache takes and refuses, and small values; host/test_dtypes.py has those of caches."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.cache.rows import decode
from zinc_attn.checks import BFLOAT16

torch = pytest.importorskip("torch", reason="torch is not installed")

SHAPE = za.AttnShape(4, 2, 64)
RNG = np.random.default_rng(0)
Q, K = (RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 64), (10, 2, 64)))
TAKEN = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
REFUSED = (np.dtype(np.float64), np.dtype(np.int8))


def as_torch(x: NDArray[Any]) -> Any:
    """The same values as a tensor of the same dtype."""
    return torch.from_numpy(x.astype(np.float32)).to(getattr(torch, x.dtype.name))


LIBRARIES = pytest.mark.parametrize("make", (np.asarray, as_torch), ids=("numpy", "torch"))


@LIBRARIES
def test_of_a_call_without_a_cache(device, make):
    for dtype in TAKEN:
        narrow = [x.astype(dtype) for x in (Q, K, K)]
        want = za.attention(*(x.astype(np.float32) for x in narrow), device=device)
        assert np.array_equal(za.attention(*map(make, narrow), device=device), want)
        other = make(K.astype(np.float16 if dtype != np.float16 else np.float32))
        with pytest.raises(errors.DTypeError, match=r"^v: got dtype"):
            za.attention(Q, make(narrow[1]), other, device=device)
    for dtype in REFUSED:
        for at in range(3):
            given = [make(x.astype(dtype)) if i == at else x for i, x in enumerate((Q, K, K))]
            with pytest.raises(errors.DTypeError):
                za.attention(*given, device=device)


def test_small_values_are_flushed(device):
    small = np.full_like(K, 2.0**-41)
    small[0, 0, 0] = 2.0**-40
    for kind, dtype in (("f32", np.float32), ("bf16", BFLOAT16)):
        with za.KVCache(device, SHAPE, 1, 4096, kind) as cache:
            appended, encoded = cache.new_sequence(), cache.new_sequence()
            cache.append(appended, 0, small, small)
            cache.append_encoded(encoded, 0, *[small.astype(dtype).view(np.uint8)] * 2)
            for seq in (appended, encoded):
                keys, _ = decode(cache.read_rows(seq, 0, 0, 10), SHAPE, kind)
                assert np.count_nonzero(keys) == 1 and keys[0, 0, 0] == 2.0**-40


def test_what_else_is_refused(device):
    with pytest.raises(errors.DTypeError):
        za.attention(Q.tolist(), K, K, device=device)
    with pytest.raises(errors.ArgumentError, match=r"^k: got a Tensor"):
        za.attention(Q, torch.from_numpy(K).to(torch.float8_e4m3fn), K, device=device)
