"""Vulkan calls that fail, one by one: builds the layer fault_layer.c and tells a story under it in other processes.

The story opens a device, fills a cache, forks, tells the ``story`` of cache_rows, saves and loads a sequence, makes 49
more calls, and closes. Every result must have the oracle's bits or be a ZincAttnError, whatever call of Vulkan fails;
closing must end; and where the device goes on working no Vulkan object may be left.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cache_rows import Twin, done_or_not_done, story, together
from support import same

import zinc_attn as za
from zinc_attn.errors import DeviceLostError, ZincAttnError

LAYER = "VK_LAYER_ZINC_ATTN_fault"
SHAPE, LAYERS, PAGE = za.AttnShape(2, 1, 64), 2, 16
MORE_CALLS = 49
STORY_LIMIT_S = 60  # a story takes a fraction of a second; the driver's first compilation may take the rest
WAITING = ("vkQueueSubmit", "vkWaitForFences", "vkResetFences", "vkQueueWaitIdle", "vkDeviceWaitIdle")
MAKING = ("vkCreate", "vkAllocate")  # such a call that is said to have failed is never carried out
GOOD = ("not reached", "right", "one call failed", "device lost", "never opened")


class Fault(NamedTuple):
    """The n-th call (from 1) of a function returns ``result``."""

    function: str
    nth: int
    result: int
    carry_out: bool = False  # what the call asks for is done all the same
    persistent: bool = False  # so do all later calls


Faults = tuple[Fault, ...]  # of one story

# --- the layer ---------------------------------------------------------------------------------------------


def build(folder: Path) -> Path:
    """Compile the layer into ``folder``, with the manifest by which the Vulkan loader finds it."""
    library = folder / "libfault_layer.so"
    source = Path(__file__).with_name("device") / "fault_layer.c"
    command = ["cc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, "-fvisibility=hidden", str(source), "-o", str(library)], check=True)
    layer = {"name": LAYER, "type": "GLOBAL", "library_path": str(library), "api_version": "1.3.0"}
    layer |= {"implementation_version": "1", "description": "makes one Vulkan call fail"}
    (folder / "fault_layer.json").write_text(json.dumps({"file_format_version": "1.2.0", "layer": layer}))
    return library


def environment(library: Path) -> dict[str, str]:
    """For a process under the layer, with lavapipe as its only driver."""
    icd = next(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))
    paths = [str(Path(za.__file__).parents[1]), str(Path(__file__).parent)]
    changes = {
        "VK_DRIVER_FILES": str(icd),
        "VK_ICD_FILENAMES": str(icd),
        "VK_LAYER_PATH": str(library.parent),
        "VK_INSTANCE_LAYERS": LAYER,
        "NODEVICE_SELECT": "1",  # Mesa's layer that orders devices crashes where a listing fails
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *paths]),
        "ZINC_ATTN_CACHE_DIR": str(library.parent / "cache"),
    }
    removed = ("ZINC_ATTN_DEVICE", "ZINC_ATTN_RUNTIME", "ZINC_ATTN_SWIFTSHADER_ICD", "VK_ADD_DRIVER_FILES")
    return {k: v for k, v in os.environ.items() if k not in removed} | changes


class Layer:
    """The layer that the Vulkan loader has loaded into this process."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.fault_function.restype = self._lib.fault_kind.restype = ctypes.c_char_p
        self._lib.fault_calls.restype = self._lib.fault_live.restype = ctypes.c_long
        self._lib.fault_misused.restype = ctypes.c_long
        self.disarm = self._lib.fault_disarm
        self.misused = self._lib.fault_misused  # command buffers that were begun while they might run

    @staticmethod
    def _each(name_of: Any, count: Any) -> dict[str, int]:
        names = iter(map(name_of, itertools.count()).__next__, None)
        return {name.decode(): int(count(name)) for name in names}

    def arm(self, fault: Fault) -> None:
        function, nth, *rest = fault
        self._lib.fault_arm(function.encode(), ctypes.c_long(nth), *map(int, rest))

    def fired(self) -> int:
        return int(self._lib.fault_fired())

    def calls(self) -> dict[str, int]:
        return self._each(self._lib.fault_function, self._lib.fault_calls)

    def live(self) -> dict[str, int]:
        """Living objects per kind, where there are any."""
        counts = self._each(self._lib.fault_kind, self._lib.fault_live)
        return {kind: count for kind, count in counts.items() if count}


# --- the story, told in a process of its own ---------------------------------------------------------------


class Story:
    """A device, a cache and its sequences, each beside the rows that it must hold."""

    def __init__(self, runtime: str, folder: Path) -> None:
        self.runtime, self.path = runtime, folder / "sequence"
        self.device: Any = None
        self.cache: Any = None
        self.attn: Any = None
        self.twins: list[Twin] = []
        self.errors: list[ZincAttnError] = []

    def attempt(self, step: Callable[[], object]) -> bool:
        """Whether the step went through; a typed error is noted."""
        try:
            with done_or_not_done(self.twins):
                step()
        except ZincAttnError as error:
            self.errors.append(error)
            return False
        return True

    def open(self) -> None:
        self.device = za.Device.open(0, runtime=self.runtime)

    def make_cache(self) -> None:
        self.cache = za.KVCache(self.device, SHAPE, LAYERS, 512, "f16", PAGE)
        self.attn = za.Attention(self.cache)
        self.twins = [Twin(self.attn, seed) for seed in range(2)]

    def save_and_load(self, twin: Twin) -> None:
        twin.sequence.save(self.path)
        twin.other(self.cache.load(self.path)).look()

    def timed(self) -> None:
        """A recording with timestamps, on K and V of its own."""
        runtime, seen, q = self.device.runtime, list[Any](), np.ones((2, 64), np.float32)
        with za.KVCache(self.device, SHAPE, 1, 40, "f32") as cache:
            twin = Twin(za.Attention(cache, observer=lambda _, workspace: seen.append(workspace)))
            twin.append(40)
            result = twin.attention(q, twin.sequence, 0, return_lse=True)
            twin.check(0, q, result)
            recording = runtime.record(seen[0].dispatches(0), timestamps=True)
            runtime.run(recording)
            runtime.timings(recording)
            same([x[0] for x in seen[0].results()], result, "the timed call")

    def steps(self) -> Iterator[Callable[[], object]]:
        a, c = self.twins
        for twin, layer in itertools.product((a, c), range(LAYERS)):
            yield partial(twin.append, 20, [layer])
        yield lambda: self.twins.insert(1, a.fork())
        b = self.twins[1] if len(self.twins) == 3 else c
        yield from story(a, b, c, self.path)
        yield lambda: self.save_and_load(a)
        yield self.timed
        for call in range(MORE_CALLS):
            twins, n = ([a, b], 0) if call % 5 == 4 else ([a], int(call % 3 == 0))
            yield partial(together, twins, [n] * len(twins), [1] * len(twins), layers=(call % LAYERS,))

    def tell(self) -> None:
        """Everything but the end. What cannot be opened or made is tried once more, and then done without."""
        if not (self.attempt(self.open) or self.attempt(self.open)):
            return
        if not (self.attempt(self.make_cache) or self.attempt(self.make_cache)):
            return
        for step in self.steps():
            self.attempt(step)

    def close(self) -> None:
        if self.device is not None:
            self.device.close()
        self.device = self.cache = self.attn = None
        self.twins.clear()
        gc.collect()


def outcome(layer: Layer, runtime: str, folder: Path, faults: Sequence[Fault]) -> str:
    """How a story under faults ended: one of GOOD, or what is wrong."""
    before = layer.live()
    story = Story(runtime, folder)
    layer.disarm()
    for fault in faults:
        layer.arm(fault)
    try:
        story.tell()
        opened = story.cache is not None
        lost = opened and not story.attempt(story.device.runtime.start)
        lost = lost and isinstance(story.errors[-1], DeviceLostError)
        story.close()
    except BaseException as error:
        story.close()
        return f"{type(error).__name__}: {error}"[:300]
    fired = layer.fired()
    layer.disarm()
    if not fired:
        return "not reached"
    if not opened:
        return "never opened"
    left = {kind: n - before.get(kind, 0) for kind, n in layer.live().items() if n > before.get(kind, 0)}
    if left and not lost and not any(fault.persistent for fault in faults):
        return f"left behind: {left}"
    if lost:
        return "device lost"
    return "one call failed" if story.errors else "right"


def tell_stories(library: Path, runtime: str, plan: Path) -> None:
    """Print the number of calls of one undisturbed story, then 'index outcome' for each fault in the file."""
    folder = Path(tempfile.mkdtemp(dir=library.parent))
    za.list_devices()
    layer = Layer(library)
    faulthandler.enable()
    faulthandler.dump_traceback_later(10 * STORY_LIMIT_S, exit=True)
    assert (ended := outcome(layer, runtime, folder, [])) == "not reached", ended  # the driver compiles
    before, live = layer.calls(), layer.live()
    assert (ended := outcome(layer, runtime, folder, [])) == "not reached", ended
    assert layer.live() == live, (layer.live(), live)
    print(json.dumps({name: n - before[name] for name, n in layer.calls().items()}), flush=True)
    for index, faults in enumerate(json.loads(plan.read_text())):
        print("start", index, flush=True)
        faulthandler.dump_traceback_later(STORY_LIMIT_S, exit=True)
        print("end", index, outcome(layer, runtime, folder, [Fault(*f) for f in faults]), flush=True)
        faulthandler.cancel_dump_traceback_later()


# --- many faults, told in few processes --------------------------------------------------------------------


def told(library: Path, runtime: str, faults: Sequence[Faults], limit_s: float = 3600) -> tuple[list[str], int, str]:
    """The lines that a process prints which tells these stories, its exit status and what it says of an error."""
    plan = library.parent / f"plan-{runtime}.json"
    plan.write_text(json.dumps(faults))
    command = [sys.executable, __file__, str(library), runtime, str(plan)]
    done = subprocess.run(command, env=environment(library), capture_output=True, text=True, timeout=limit_s)
    lines = done.stdout.splitlines()
    if done.returncode and not any(line.startswith("start") for line in lines):
        raise RuntimeError(f"the undisturbed story ended with {done.returncode}: {done.stderr[-3000:]}")
    return lines, done.returncode, done.stderr


def run_faults(library: Path, runtime: str, faults: Sequence[Faults]) -> list[str]:
    """The outcome of each story. A process that ends in one goes on with the next in another process."""
    outcomes: list[str] = []
    while len(outcomes) < len(faults):
        lines, status, error = told(library, runtime, faults[len(outcomes) :])
        ended = [line.split(maxsplit=2)[2] for line in lines if line.startswith("end")]
        outcomes += ended
        if sum(line.startswith("start") for line in lines) > len(ended):
            outcomes.append(f"the process ended with {status}: {error[-1500:]}")
        elif not ended:
            raise RuntimeError(f"no story was told, and the process ended with {status}: {error[-3000:]}")
    return outcomes


def count_calls(library: Path, runtime: str) -> dict[str, int]:
    """How often the undisturbed story calls each function."""
    counts: dict[str, int] = json.loads(told(library, runtime, [], 600)[0][0])
    return counts


def all_faults(calls: dict[str, int]) -> list[Faults]:
    """Every call of every function with every result, carried out or not; every function for good; and pairs."""
    single = []
    for function, count in calls.items():
        results = (-1, -2, -4, -13) if function in WAITING else (-1, -4)
        carried = (False,) if function.startswith(MAKING) else (False, True)
        for result in results:
            for carry in carried:
                single += [Fault(function, n, result, carry) for n in range(1, count + 1)]
                single += [Fault(function, n, result, carry, True) for n in sorted({1, count // 2 + 1}) if count]
    return [(fault,) for fault in single] + settling_faults()


def settling_faults() -> list[Faults]:
    """A submission or a wait that fails, and for good what would make that good."""
    settled: list[Faults] = []
    firsts = [(-1, False, False), (-4, False, False), (-13, True, False), (-1, False, True)]
    idle = ("vkQueueWaitIdle", "vkDeviceWaitIdle", "vkGetFenceStatus")
    each = (idle[:1], idle[:2], idle, idle[2:], ("vkGetFenceStatus", "vkCreateFence"))
    for first in ("vkQueueSubmit", "vkWaitForFences", "vkResetFences"):
        for start in (Fault(first, 20, *fields) for fields in firsts):
            for settling, result in itertools.product(each, (-1, -4)):
                # the first fence and the first submissions are the story's own
                good = (Fault(name, 2 if name == "vkCreateFence" else 1, result, False, True) for name in settling)
                settled.append((start, *good))
    return settled


def summary(faults: Sequence[Faults], outcomes: Sequence[str]) -> str:
    """How many stories ended how, and each one that ended badly."""
    counts = Counter(o if o in GOOD else "BAD" for o in outcomes)
    lines = [", ".join(f"{name}: {counts[name]}" for name in (*GOOD, "BAD")) + f"; {len(faults)} in all"]
    lines += [f"{f}: {o}" for f, o in zip(faults, outcomes, strict=True) if o not in GOOD]
    return "\n".join(lines)


if __name__ == "__main__":
    tell_stories(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
