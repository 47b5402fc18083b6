"""Native code of the processor as the oracle: each call compares it with NumPy before it judges."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final

import numpy as np

from ...cache.kv_cache import KVCache
from ...canonical.state import F32
from ...decode.attention import Attention
from ...decode.axes import attention_shape
from ...errors import WrongResultError
from ...runtime.device import Device
from .bits import Output, Rows, compare, of_heads, oracle

DRAWN_KEYS: Final = 2048  # at most: four nodes, which NumPy attends for one KV head in some hundredths of a second


class NativeOracle:
    """``oracle`` on ``device``, which is the processor. WrongResultError: it has other bits than NumPy.

    NumPy attends some of each call, too: a drawn KV head, a drawn number of the last keys. calls: their number so far.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.calls, self._rng = device, 0, np.random.default_rng(0)

    def __call__(
        self,
        q: F32,
        k: Rows,
        v: Rows,
        dtype: str,
        kv_heads: int | None = None,
        masking: Mapping[str, Any] | None = None,
    ) -> Output:
        held, options = k.shape[1], dict(masking or {})
        head, rows = int(self._rng.integers(held)), 1 if q.ndim == 2 else len(q)
        keys = int(self._rng.integers(rows, max(min(len(k), DRAWN_KEYS), rows) + 1))
        some = of_heads(q, k[-keys:], v[-keys:], options, head, head + 1)
        if some[3].get("mask") is not None:
            some[3]["mask"] = some[3]["mask"][..., -keys:]
        if wrong := compare(self._attend(*some[:3], dtype, some[3]), oracle(*some[:3], dtype, None, some[3])):
            raise WrongResultError(
                f"oracle: native code of the processor has other bits than NumPy, {wrong.text()}; use --oracle numpy"
            )
        self.calls += 1
        q, k, v, options = of_heads(q, k, v, options, held - (kv_heads or held), held)
        return self._attend(q, k, v, dtype, options)

    def _attend(self, q: F32, k: Rows, v: Rows, dtype: str, options: Mapping[str, Any]) -> Output:
        call_options = {name: options[name] for name in ("causal", "mask") if name in options}
        model_options = {name: x for name, x in options.items() if name not in call_options}
        with KVCache(self.device, attention_shape(q.shape, k.shape, v.shape), 1, len(k), dtype) as cache:
            sequence = cache.new_sequence()
            cache.append(sequence, 0, k, v)
            with closing(Attention(cache, **model_options)) as attention:
                return Output(*attention(q, sequence, 0, return_lse=True, allow_empty=True, **call_options))
