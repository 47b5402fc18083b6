"""The options of scores, checked: how scores are made and which keys count."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..cache.head_scales import kernel_scales
from ..cache.kv_cache import KVCache
from ..cache.rows import checked_values
from ..canonical import arguments
from ..canonical.constants import BIASES
from ..canonical.emulate import score_scale
from ..canonical.score_bound import ScoreBound
from ..canonical.state import F32, sink_scores
from ..checks import check_array
from ..errors import ArgumentError
from ..kernels import declarations
from ..kernels.records import HeadValues


@dataclass(frozen=True, eq=False)
class Scoring:
    """The checked options. sinks, mask_slopes, biases by name: (q_heads,) float32 in log2 units; scales: the factors of
    fp8_e4m3's values, see ``cache.head_scales``."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: F32 | None = None
    biases: Mapping[str, F32] = field(default_factory=dict)
    scales: F32 | None = None
    mask_slopes: F32 | None = None

    @cached_property
    def bound(self) -> ScoreBound:
        return ScoreBound.of(self.scale, self.softcap, self.biases, self.mask_slopes)

    @property
    def bias_bits(self) -> int:
        """Attend's constant ``biases``."""
        return sum(1 << i for i, name in enumerate(BIASES) if name in self.biases)

    @property
    def heads(self) -> HeadValues:
        """The work buffer's values per head."""
        return HeadValues(self.sinks, self.mask_slopes, self.scales, self.biases)

    def header(self) -> dict[str, int]:
        """The header words of the work buffer."""
        words = {"score_scale": float(score_scale(self.scale, self.softcap))}
        if self.softcap is not None:
            words |= {"softcap": self.softcap, "softcap_inverse": 1.0 / self.softcap}
        return {name: declarations.float_bits(value) for name, value in words.items()}


def check_sinks(sinks: Any, q_heads: int) -> F32 | None:
    """Sinks (q_heads,) in log2 units, or None."""
    array = arguments.check_sinks(sinks, q_heads)
    if array is None:
        return None
    with np.errstate(over="ignore"):  # a value beyond float32 becomes infinite, and is refused
        return sink_scores(checked_values("sinks", array.astype(np.float32))[0])


class LayerScorings:
    """The scoring of each layer of a cache. Layers with equal scorings share a number, and with it their recordings.

    common: scale, softcap and slopes of all layers. window: keys, None, or a list with one of these per layer;
    sinks: (q_heads,), (num_layers, q_heads), or a list with an array or None per layer.
    """

    def __init__(self, cache: KVCache, common: Scoring, window: Any, sinks: Any) -> None:
        numbers: dict[tuple[int | None, bytes | None, bytes | None], int] = {}
        self.distinct: list[Scoring] = []
        self.number: list[int] = []  # by layer, into ``distinct``
        layers = cache.num_layers
        windows, rows = _windows(window, layers), _sink_rows(sinks, layers, cache.shape.q_heads)
        for layer, (keys, row) in enumerate(zip(windows, rows, strict=True)):
            scales = kernel_scales(cache.scales_of(layer))
            key = keys, None if row is None else row.tobytes(), None if scales is None else scales.tobytes()
            if key not in numbers:
                numbers[key] = len(self.distinct)
                self.distinct.append(replace(common, window=keys, sinks=row, scales=scales))
            self.number.append(numbers[key])
        self.by_layer = [self.distinct[number] for number in self.number]


def _windows(window: Any, num_layers: int) -> list[int | None]:
    if not isinstance(window, (list, tuple)):
        return [arguments.check_window(window)] * num_layers
    if len(window) != num_layers:
        raise ArgumentError(f"window: got {len(window)} entries, expected an int, None or one per layer ({num_layers})")
    return list(map(arguments.check_window, window))


def _sink_rows(sinks: Any, num_layers: int, q_heads: int) -> list[F32 | None]:
    if not isinstance(sinks, (list, tuple)) and sinks is not None:
        sinks = check_array("sinks", sinks)
    if not isinstance(sinks, (list, tuple)) and np.ndim(sinks) != 2:
        return [check_sinks(sinks, q_heads)] * num_layers
    if len(sinks) != num_layers:
        raise ArgumentError(f"sinks: got {len(sinks)} rows, expected ({q_heads},) or a row per layer ({num_layers})")
    return [check_sinks(row, q_heads) for row in sinks]
