"""Vulkan calls that fail, one by one: builds the library fault_shim.c and tells a story with it in another process.

The story opens a device, fills a cache, forks, tells the ``story`` of cache_rows, saves and loads a sequence, makes 49
more calls, and closes. Every result must have the oracle's bits or be a ZincAttnError, whatever call of Vulkan fails;
closing must end; and where the device goes on working no Vulkan object may be left. ``c_failures`` asks the same of the
C library, in the tests' process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cache_rows import Twin, done_or_not_done, story, together
from objects import NATIVE, linked, new_folder
from support import same

import zinc_attn as za
from zinc_attn.errors import DeviceLostError, ZincAttnError
from zinc_attn.runtime.loader import loader

SOURCE = Path(__file__).with_name("device") / "fault_shim.c"
SHAPE, LAYERS, PAGE = za.AttnShape(2, 1, 64), 2, 16
MORE_CALLS = 49
STORY_LIMIT_S = 60  # a story takes a fraction of a second; the driver's first compilation may take the rest
WAITING = ("vkQueueSubmit", "vkWaitForFences", "vkResetFences", "vkQueueWaitIdle", "vkDeviceWaitIdle")
MAKING = ("vkCreate", "vkAllocate")  # such a call that is said to have failed is never carried out
GOOD = ("not reached", "right", "one call failed", "device lost", "never opened")

# All functions that the C library calls, and what else the package and Kompute do.
_OF_C = re.findall(r"\bX\(([A-Z]\w+)\)", (NATIVE / "src" / "functions.h").read_text())
_MORE = "EnumerateInstanceVersion CreateInstance CreateQueryPool DestroyQueryPool GetQueryPoolResults GetFenceStatus"
_MORE += " FlushMappedMemoryRanges FreeCommandBuffers"
FUNCTIONS = [f"vk{name}" for name in (*_OF_C, *_MORE.split())]
_OBJECT = re.compile(r"vk(Create|Allocate|Destroy|Free)(?:Compute)?(\w+?)s?")
KINDS = [match[2] for name in FUNCTIONS if (match := _OBJECT.fullmatch(name)) and match[1] in ("Destroy", "Free")]
_NOTED = {"vkBeginCommandBuffer": "begin(x0);", "vkQueueSubmit": "submit(x1, x2);"}
_NOTED |= dict.fromkeys(("vkWaitForFences", "vkQueueWaitIdle", "vkDeviceWaitIdle"), "pendings = 0;")


class Fault(NamedTuple):
    """The n-th call (from 1) of a function returns ``result``."""

    function: str
    nth: int
    result: int
    carry_out: bool = False  # what the call asks for is done all the same
    persistent: bool = False  # so do all later calls


Faults = tuple[Fault, ...]  # of one story

# --- the library that makes calls fail ---------------------------------------------------------------------


def _wrapper(number: int, name: str) -> str:
    """A function in front of libvulkan's: a result may be another one, and objects are counted."""
    kind = loader().ffi.typeof(f"PFN_{name}")
    parameters = ", ".join(f"{x.cname} x{i}" for i, x in enumerate(kind.args))
    call = f"((PFN_{name})fault_next[{number}])({', '.join(f'x{i}' for i, _ in enumerate(kind.args))});"
    what = match[2] if (match := _OBJECT.fullmatch(name)) else ""
    count = f"fault_live[{KINDS.index(what)}]" if what in KINDS else ""
    if kind.result.cname == "void":
        handle = "x0" if what in ("Instance", "Device") else "x1"
        return f"void {name}({parameters}) {{ {f'{count} -= !!{handle};' if count else ''} {call} }}"
    return f"""VkResult {name}({parameters}) {{
    VkResult said = VK_SUCCESS;
    const enum mode mode = enter({number}, &said);
    if (mode == REFUSE) return said;
    {_NOTED.get(name, "")}
    const VkResult result = {call}
    {f"{count} += result == VK_SUCCESS;" if count else ""}
    return mode == CARRY_OUT ? said : result;
}}"""


def build(folder: Path) -> Path:
    """Compile the library into ``folder``."""
    names, own = (", ".join(form.format(name) for name in FUNCTIONS) for form in ('"{}"', "(PFN_vkVoidFunction){}"))
    lines = [f"enum {{ COUNT = {len(FUNCTIONS)} }};", f"static const char *const NAMES[] = {{{names}}};"]
    lines += ["PFN_vkVoidFunction fault_next[COUNT];", f"long fault_calls[COUNT], fault_live[{len(KINDS)}];"]
    lines += [*itertools.starmap(_wrapper, enumerate(FUNCTIONS)), f"static const PFN_vkVoidFunction OWN[] = {{{own}}};"]
    (folder / "wrappers.h").write_text("\n".join(lines))
    command = ["cc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{folder}"]
    link = "cc", "-shared", "-Wl,--no-as-needed", "-lvulkan"  # where functions are found that it has not
    done = linked(folder / "libfault_shim.so", [(command, SOURCE)], link)
    assert done.returncode == 0, done.stderr
    return folder / "libfault_shim.so"


@functools.cache
def shim() -> Path:
    """The library for this process."""
    return build(new_folder())


def environment(library: Path) -> dict[str, str]:
    """For a process with the library in front of libvulkan, with lavapipe as its only driver."""
    icd = next(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))
    paths = [str(Path(za.__file__).parents[1]), str(Path(__file__).parent)]
    changes = {
        "VK_DRIVER_FILES": str(icd),
        "VK_ICD_FILENAMES": str(icd),
        "LD_PRELOAD": str(library),
        "NODEVICE_SELECT": "1",  # Mesa's layer that orders devices crashes where a listing fails
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *paths]),
        "ZINC_ATTN_CACHE_DIR": str(library.parent / "cache"),
    }
    removed = ("ZINC_ATTN_DEVICE", "ZINC_ATTN_RUNTIME", "ZINC_ATTN_SWIFTSHADER_ICD", "VK_ADD_DRIVER_FILES")
    return {k: v for k, v in os.environ.items() if k not in removed} | changes


class Layer:
    """The library in this process. get_proc: the address of its vkGetInstanceProcAddr."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._next = (ctypes.c_void_p * len(FUNCTIONS)).in_dll(self._lib, "fault_next")
        self.disarm = self._lib.fault_disarm
        self.get_proc = ctypes.cast(self._lib.vkGetInstanceProcAddr, ctypes.c_void_p).value

    def _long(self, name: str) -> int:
        return ctypes.c_long.in_dll(self._lib, name).value

    def arm(self, fault: Fault) -> None:
        function, nth, *rest = fault
        self._lib.fault_arm(function.encode(), ctypes.c_long(nth), *map(int, rest))

    def fired(self) -> int:
        return ctypes.c_int.in_dll(self._lib, "fault_fired").value

    def misused(self) -> int:
        """Command buffers that were begun while they might run."""
        return self._long("fault_misused")

    def blocks(self) -> int:
        """Blocks of memory that the C library has not freed."""
        return self._long("fault_blocks")

    def calls(self) -> dict[str, int]:
        return dict(zip(FUNCTIONS, (ctypes.c_long * len(FUNCTIONS)).in_dll(self._lib, "fault_calls"), strict=True))

    def live(self) -> dict[str, int]:
        """Living objects per kind, where there are any."""
        counts = (ctypes.c_long * len(KINDS)).in_dll(self._lib, "fault_live")
        return {kind: count for kind, count in zip(KINDS, counts, strict=True) if count}

    @contextmanager
    def replaced(self, name: str, function: Callable[..., Any]) -> Iterator[None]:
        """``function`` takes the calls of a function of Vulkan, and that function as its first argument."""
        ffi, number = loader().ffi, FUNCTIONS.index(name)
        kind, real = ffi.typeof(f"PFN_{name}"), self._next[number]
        callback = ffi.callback(kind, partial(function, ffi.cast(kind, real or 0)))
        self._next[number] = int(ffi.cast("uintptr_t", callback))
        try:
            yield
        finally:
            self._next[number] = real


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
    """Print the number of calls of one undisturbed story, then the outcome for each fault in the file."""
    folder = Path(tempfile.mkdtemp(dir=library.parent))
    loader().lib = loader().ffi.dlopen(str(library))
    za.list_devices()
    layer = Layer(library)
    faulthandler.enable()
    faulthandler.dump_traceback_later(10 * STORY_LIMIT_S, exit=True)
    assert (ended := outcome(layer, runtime, folder, [])) == "not reached", ended  # the driver compiles
    before, live = layer.calls(), layer.live()
    assert (ended := outcome(layer, runtime, folder, [])) == "not reached", ended
    assert layer.live() == live, (layer.live(), live)
    print(json.dumps({name: n - before[name] for name, n in layer.calls().items()}), flush=True)
    for faults in json.loads(plan.read_text()):
        faulthandler.dump_traceback_later(STORY_LIMIT_S, exit=True)
        print(outcome(layer, runtime, folder, [Fault(*f) for f in faults]), flush=True)
        faulthandler.cancel_dump_traceback_later()


# --- many faults, told in one process ----------------------------------------------------------------------


def told(library: Path, runtime: str, faults: Sequence[Faults]) -> tuple[dict[str, int], list[str]]:
    """How often the undisturbed story calls each function, and the outcomes of stories under these faults."""
    plan = library.parent / f"plan-{runtime}.json"
    plan.write_text(json.dumps(faults))
    command = [sys.executable, __file__, str(library), runtime, str(plan)]
    done = subprocess.run(command, env=environment(library), capture_output=True, text=True, timeout=3600)
    counts, *outcomes = done.stdout.splitlines() or [""]
    assert done.returncode == 0, f"after {outcomes} and {counts}: {done.returncode}, {done.stderr[-3000:]}"
    return json.loads(counts), outcomes


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


if __name__ == "__main__":
    tell_stories(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
