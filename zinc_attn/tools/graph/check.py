"""Logits of random models on a device, operation by operation, against the oracle's."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...canonical.state import F32
from ...errors import UnsupportedError
from ...runtime.device import Device
from .device import OnDevice
from .hybrid import HYBRIDS, Operations, hybrid, make_layers
from .model import KINDS, TOKENS, logits, make_model
from .oracle import DrawnOracle, Oracle
from .recurrent import LAYERS, layer

RECORD: Final = Path(__file__).with_name("record.json")
CASES: Final = (*KINDS, *LAYERS)
CHOSEN: Final = tuple(HYBRIDS)  # cases that run where they are named
PIECES: Final = ((len(TOKENS),), (4, 1, 1))  # ways in which the tokens come


@dataclass(frozen=True)
class GraphOutcome:
    """A case on a device. fault: the first operation with other bits, or how logits differ; or empty."""

    kind: str
    digest: str
    operations: int
    fault: str


def name_of(kind: str) -> str:
    """A model's name in records of digests."""
    return f"graph {kind}"


def digest(x: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


def committed() -> dict[str, str]:
    return {str(kind): str(value) for kind, value in json.loads(RECORD.read_text(encoding="utf-8")).items()}


class _Compared:
    """``Operations`` of a device, compared with the oracle's on the same operands."""

    def __init__(self, device: Operations, oracle: Operations) -> None:
        self._device, self._oracle, self.count, self.fault = device, oracle, 0, ""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        on_device, wanted = getattr(self._device, name), getattr(self._oracle, name)

        @wraps(on_device)
        def both(*operands: Any) -> Any:
            got, want = on_device(*operands), wanted(*operands)
            self.count += 1
            if not self.fault and not np.array_equal(got.view(np.uint32), want.view(np.uint32)):
                differ = int((got.view(np.uint32) != want.view(np.uint32)).sum())
                self.fault = f"operation {self.count}, {name}: {differ} of {got.size} values differ"
            return got

        return both


def passes(case: str) -> Callable[[Operations, tuple[int, ...]], F32]:
    """The forward pass of a case, over operations, of tokens in pieces."""
    if case in KINDS:
        return partial(logits, make_model(case))
    return partial(hybrid, case, make_layers(case)) if case in HYBRIDS else partial(layer, case)


def check_graph(
    device: Device, cases: Sequence[str] = CASES, processor: Device | None = None
) -> Iterator[GraphOutcome]:
    """An outcome for each case, one of CASES or CHOSEN. processor: runs the oracle's operations that are not drawn.

    UnsupportedError: the device has no integer dot product here.
    """
    if not device.info.integer_dots:
        raise UnsupportedError(
            f"device: {device.info.name} ({device.runtime.name}) has no integer dot product, which products of "
            "quantized weights need; use plain Vulkan (--runtime vulkan) on a device with Vulkan 1.3 or "
            "VK_KHR_shader_integer_dot_product"
        )
    known = committed()
    for kind in cases:
        forward, digests, operations, fault = passes(kind), list[str](), 0, ""
        oracle = DrawnOracle(OnDevice(processor), kind) if processor else Oracle()
        for pieces in PIECES:
            compared = _Compared(OnDevice(device), oracle)
            digests.append(digest(forward(compared, pieces)))
            operations, fault = operations + compared.count, fault or compared.fault
        if not fault and len(set(digests)) > 1:
            fault = "logits depend on how many tokens come at once"
        if not fault and digests[0] != known.get(kind):
            fault = f"got digest {digests[0][:16]}, expected {known.get(kind, 'none')[:16]}"
        yield GraphOutcome(kind, digests[0], operations, fault)
