"""What a proof does: which commands run, with which arguments, and how often each is repeated in a new process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...checks import check_int
from ...errors import ArgumentError
from ...limits import MAX_CONTEXT
from ...runtime.device import RUNTIMES
from ...runtime.protocol import DeviceInfo
from ...shapes import AttnShape
from ..harness.inputs import check_stored_v
from ..models import slug

SHAPES: Final = "16/2/256,32/8/128,9/3/64"
CONTEXTS: Final = (1024, 8192, 32768, 131072)  # keys, on a GPU
CPU_CONTEXTS: Final = (1024, 8192)
QUICK_CONTEXTS: Final = (1024, 4096)
RESTARTS: Final = 3
QUICK_REPEATS: Final = 5
TIMEOUT_S: Final = 3600.0
DTYPE: Final = "f16"  # of K and V, in sweep and bench
MEMORY_SHARE: Final = 0.5  # of the free device memory that K and V of one layer may take where contexts are not given
QUICK_CHECK: Final = ("--quick",)  # arguments of check with --quick, and on a CPU device
FULL_CHECK: Final = ()  # on a GPU: the whole matrix, whose contexts go up to 128k


@dataclass(frozen=True)
class Step:
    """One command in a process of its own. name: also that of its folder; words: of the command line, less --out."""

    restart: int
    name: str
    words: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command's name."""
        return self.words[0]


@dataclass(frozen=True)
class ProofSpec:
    """A proof of one device. ArgumentError names a wrong field.

    runtime: the dispatcher. contexts: keys; None for those of the device's kind that its memory holds. restarts: how
    often everything is repeated. quick: few cases, few timed runs, and short contexts where none are given. timeout_s:
    seconds that one step may take. free_bytes: of the device's memory.
    """

    info: DeviceInfo
    runtime: str
    shapes: Sequence[AttnShape]
    contexts: Sequence[int] | None = None
    restarts: int = RESTARTS
    quick: bool = False
    timeout_s: float = TIMEOUT_S
    free_bytes: int = 1 << 62

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise ArgumentError(f"runtime: got {self.runtime!r}, expected one of {', '.join(RUNTIMES)}")
        if not self.shapes:
            raise ArgumentError("shapes: got none, expected one or more")
        for shape in self.shapes:
            check_stored_v(shape)
        check_int("restarts", self.restarts, 1, 100)
        for context in self.contexts or ():
            check_int("contexts", context, 1, MAX_CONTEXT)
        if not 0 < self.timeout_s < float("inf"):
            raise ArgumentError(f"timeout: got {self.timeout_s:g}, expected seconds above 0")

    @property
    def check(self) -> tuple[str, ...]:
        """The arguments of every check, less the device."""
        return QUICK_CHECK if self.quick or self.info.kind == "cpu" else FULL_CHECK

    def contexts_of(self, shape: AttnShape) -> list[int]:
        """The contexts of a shape: those given, or the default ones whose K and V the device holds."""
        if self.contexts is not None:
            return list(self.contexts)
        cpu = self.info.kind == "cpu"
        defaults = QUICK_CONTEXTS if self.quick else CPU_CONTEXTS if cpu else CONTEXTS
        per_token = shape.kv_bytes_per_token(DTYPE)
        larger = max(shape.k_dim, shape.v_dim) / (shape.k_dim + shape.v_dim)  # of K and V, which are buffers apart
        return [
            context
            for context in defaults
            if context * per_token * larger <= self.info.max_buffer_bytes
            and context * per_token <= self.free_bytes * MEMORY_SHARE
        ]

    def steps(self) -> list[Step]:
        """Every step in order: in each restart the check, then the sweep and the bench of each shape."""
        device = str(self.info.index)
        found = []
        for restart in range(1, self.restarts + 1):
            words = ("check", *self.check, "--device", device, "--runtime", self.runtime, "--json")
            found.append(Step(restart, "check", words))
            for shape in self.shapes:
                if contexts := ",".join(map(str, self.contexts_of(shape))):
                    found += self._timed(restart, shape, contexts)
        return found

    def _timed(self, restart: int, shape: AttnShape, contexts: str) -> list[Step]:
        what = ("--contexts", contexts, "--dtype", DTYPE, "--device", str(self.info.index))
        what = (*what, *(("--repeats", str(QUICK_REPEATS)) if self.quick else ()), "--json")
        sweep = ("sweep", "--shape", str(shape), *what, "--runtime", self.runtime)
        bench = ("bench", "--shape", str(shape), *what, "--runtime", self.runtime)
        return [Step(restart, f"{words[0]}-{slug(str(shape))}", words) for words in (sweep, bench)]

    def to_dict(self) -> dict[str, Any]:
        """What the report says of the arguments."""
        contexts = {str(shape): self.contexts_of(shape) for shape in self.shapes}
        about = {"runtime": self.runtime, "restarts": self.restarts, "quick": self.quick, "timeout_s": self.timeout_s}
        return {**about, "contexts": contexts, "dtype": DTYPE, "check": " ".join(self.check)}
