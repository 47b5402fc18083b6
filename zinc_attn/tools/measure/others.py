"""Attention by other programs on the CPU, whose calls are timed in turns with those of a device."""

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from ...cache.rows import stored
from ...canonical.state import F32
from ...errors import ArgumentError, RuntimeUnavailableError
from ..harness.bits import Output
from ..harness.inputs import NUMPY_DTYPES, Inputs
from ..harness.tables import MISSING
from .calls import Subject
from .rows import Row

OTHERS: Final = ("torch", "numpy")
HALVES: Final = {"f16": "float16", "bf16": "bfloat16"}  # torch's types of K and V, which also get float32


def check_others(names: Sequence[str]) -> None:
    """ArgumentError for a name that OTHERS lacks, RuntimeUnavailableError where torch is not installed."""
    if unknown := [name for name in names if name not in OTHERS]:
        raise ArgumentError(f"against: got {unknown[0]!r}, expected some of {', '.join(OTHERS)}")
    if "torch" in names and importlib.util.find_spec("torch") is None:
        raise RuntimeUnavailableError("against: torch is not installed; pip install torch, or leave it out")


def other_subjects(row: Row, data: Inputs) -> Iterator[Subject]:
    """The calls of ``row.spec.against`` on the values that the row's cache holds; rows like ``row``."""
    dtype = row.spec.dtype
    k, v = (data.k, data.v) if dtype in NUMPY_DTYPES else stored(data.k, data.v, dtype)
    k, v = (x.astype(np.float32).swapaxes(0, 1) for x in (k, v))  # (kv_heads, tokens, head_dim)
    cpu = replace(row.info, name="this CPU", kind="other", compute_units=os.cpu_count() or 1)
    for name in row.spec.against:
        for kind in ["float32", *[HALVES[x] for x in [dtype] if name == "torch" and x in HALVES]]:
            version, call = {"torch": torch_call, "numpy": numpy_call}[name](data.q[0], k, v, kind)
            other = replace(row, info=replace(cpu, driver=version), runtime=f"{name} {kind}", layout=MISSING)
            yield Subject(other, call, partial(_output, call), exact=False)


def _output(call: Callable[[], F32]) -> Output:
    out = call()[None, None]
    return Output(out, np.zeros(out.shape[:-1], np.float32))


Call = tuple[str, Callable[[], F32]]  # a program with its version, and the function of out (q_heads, v_head_dim)


def torch_call(q: F32, k: F32, v: F32, kind: str) -> Call:
    """scaled_dot_product_attention of one row, with K and V of a torch dtype."""
    import torch

    attend = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    tensors = [torch.from_numpy(np.ascontiguousarray(x)).to(getattr(torch, kind))[None] for x in (q[:, None], k, v)]

    def call() -> F32:
        with torch.no_grad():
            out: F32 = attend(*tensors)[0, :, 0].float().numpy()
        return out

    return f"torch {torch.__version__}", call


def numpy_call(q: F32, k: F32, v: F32, kind: str) -> Call:
    """Two products and a softmax per KV head, in float32."""
    rows = (q * np.float32(q.shape[-1] ** -0.5)).reshape(len(k), -1, q.shape[-1])
    keys, values = np.ascontiguousarray(k.swapaxes(1, 2)), np.ascontiguousarray(v)

    def call() -> F32:
        scores = rows @ keys
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out: F32 = weights @ values / weights.sum(axis=-1, keepdims=True)
        return out.reshape(len(q), -1)

    return f"NumPy {np.__version__}", call
