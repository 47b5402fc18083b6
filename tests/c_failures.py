"""Calls of Vulkan that fail under the C library (see ``faults``): what fails is said, and what follows is right, or
refused where the device is lost."""

from __future__ import annotations

import ctypes as c
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import faults
import numpy as np
from c_host import Data, Options, Room
from engine import Engine, Failed, Made, Owner, address, call_of
from faults import Fault
from support import FULL

import zinc_attn as za

SHAPE, LAYERS = za.AttnShape(4, 2, 16), 2
OPTIONS = Options(4, 2, 16, 0, False, 1, page_size=1)
CODE_OF = {-1: "memory", -2: "memory", -4: "lost", -13: "driver"}  # a VkResult and the code that it becomes
# What the library does without: a list of extensions, a pipeline cache, and a last wait.
NEEDLESS = (
    *("vkEnumerateDeviceExtensionProperties", "vkCreatePipelineCache", "vkGetPipelineCacheData"),
    *("vkDeviceWaitIdle", "vkQueueWaitIdle", "vkResetFences"),
)

Q = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 4, 16)
K, V = np.stack([Q.reshape(2, 2, 16), Q.reshape(2, 2, 16) + 1])  # of two tokens
REQUEST = {"tokens": 2, "page_table": [3, 1], "new_rows": 2, "q_len": 1}


class WrongAnswer(Exception):
    """A result that is not the oracle's, or a failure where there is none."""


def run_once(make: Made, cache: Any, **changes: Any) -> Any:
    """From host memory."""
    out, lse = np.empty_like(Q), np.empty((1, 4), np.float32)
    data = Data(address(K), address(V), False, address(Q), address(out), address(lse))
    make("za_run", cache, 0, c.byref(call_of([{**REQUEST, **changes}])), c.byref(data))
    return out, lse


class Failures:
    """Runs on a device of the library's own and on an engine's. rows: of q in the engine's calls; 0: drivers compile
    little, and there are no results."""

    rows = 0

    def __init__(self, loaded: c.CDLL, info: Any) -> None:
        self.c, self.info, self.layer = loaded, info, faults.Layer(faults.shim())
        self.owner, self.want = Owner(info, 4 << 20), za.reference.emulate(Q, K, V)
        self.open_engine()

    def open_engine(self) -> None:
        self.owner.used = 0
        self.engine = Engine(self.c, self.owner, OPTIONS, LAYERS, 4, get_proc=self.layer.get_proc)
        self.places = self.engine.places(SHAPE, 1, 2)

    def opened(self, make: Made) -> None:
        """A cache of a device that the library opens, and a copied page."""
        device = make("za_device_open", self.info.name.encode(), free="za_device_close")
        attn = make("za_open", device, c.byref(OPTIONS), free="za_close")
        cache = make("za_cache_make", attn, 1, 4, None, None, free="za_cache_free")
        make("za_copy_page", cache, 3, 0)

    def recorded(self, make: Made) -> Any:
        """A prepared call of two layers that is recorded, and two that wait, at places of the engine's and from host
        memory."""
        engine, owner, (places, words) = self.engine, self.owner, self.places
        words[0][:128] = np.concatenate([K, V], axis=2).reshape(-1).view(np.uint32)
        words[1][:], words[2][:], words[3][:] = Q, 0, 0
        prepared = make("za_prepare", engine.attn, c.byref(Room(1, 1, self.rows, 2, 4)), free="za_prepared_free")
        command, submit = owner.commands()
        try:
            for layer in range(LAYERS):
                arguments = c.c_void_p(owner.number(command)), engine.cache, layer, c.byref(places)
                make("za_record", prepared, 0, *arguments)
        finally:
            owner.end(command)
        call = call_of([{**REQUEST, "q_len": self.rows}])
        make("za_step", prepared, 0, c.byref(call))
        owner.submit(submit)
        recorded = [x.copy() for x in words[2:]]
        make("za_run_at", engine.cache, 1, c.byref(call), c.byref(places))
        if not all(np.array_equal(x, y) for x, y in zip(recorded, words[2:], strict=True)):
            raise WrongAnswer("run_at: other bits than those of the recorded call")
        run_once(make, engine.cache, q_len=self.rows)
        make("za_copy_page", engine.cache, 3, 0)
        return self.rows and words[2:]

    def attempt(self, run: Callable[[], Any]) -> str:
        """ "" where it succeeds, with the oracle's bits if there are results; else what failed."""
        try:
            for got, right in zip(run() or self.want, self.want, strict=True):
                if not np.array_equal(got.view(np.uint32), right.view(np.uint32)):
                    raise WrongAnswer("a call beside one that failed")
            return ""
        except Failed as error:
            return str(error)

    def next_calls(self, make: Made, run: str) -> list[str]:
        """The results of five calls of the objects that exist."""
        there = dict(make.frees)
        if run == "recorded":
            there = {"za_close": self.engine.attn, "za_cache_free": self.engine.cache}
        attn, cache, more = there.get("za_close"), there.get("za_cache_free"), Made(self.c)
        calls: list[Callable[[], Any]] = []
        if attn:
            room = c.byref(Room(1, 1, 1, 2, 4))
            calls.append(lambda: more("za_prepare", attn, room, free="za_prepared_free") and None)
            calls.append(lambda: more("za_cache_make", attn, 1, 4, None, None, free="za_cache_free") and None)
        if cache:
            calls += [partial(run_once, more, cache)] * 2 + [partial(more, "za_copy_page", cache, 3, 0)]
        said = [self.attempt(call) for call in calls]
        more.close()
        return said

    def under(self, run: str, fault: Fault | None = None) -> bool:
        """Whether a run reaches the fault. The call that fails says so by its code, and the next five have the oracle's
        bits, or all of them say that the device is lost."""
        make = Made(self.c)
        if fault:
            self.layer.arm(fault)
        said, fired = self.attempt(partial(getattr(self, run), make)), self.layer.fired()
        self.layer.disarm()
        behind = {text.partition(":")[0] for text in self.next_calls(make, run)}
        make.close()
        code = CODE_OF[fault.result] if fault and fired else ""
        advice = "; use a shorter context or free memory" if fault and fault.function == "vkAllocateMemory" else ""
        end = f"(VkResult {fault.result}){advice}" if fault and fired else ""
        right = said.startswith(f"{code}: ") and said.endswith(end) if fired else not said
        if not right or behind - {"lost" if code == "lost" else ""}:
            raise WrongAnswer(f"{run}, {fault}: {said}; behind it {behind}")
        if run == "recorded" and code == "lost":
            self.engine.close()
            self.open_engine()
        return bool(fired)

    def close(self) -> None:
        self.engine.close()
        self.owner.close()


def failures(loaded: c.CDLL, info: Any, numbers: dict[int, Any]) -> None:
    """Each call of each function gives each result once, in two runs. numbers: of a result, the calls that give it;
    None for all."""
    layer = faults.Layer(faults.shim())
    blocks, live, calls = layer.blocks(), layer.live(), layer.calls()
    runs, names = Failures(loaded, info), ("opened", "recorded")
    for run in names:
        runs.under(run)
    called = [name for name, n in layer.calls().items() if n > calls[name] and name not in NEEDLESS]
    never = set(called)
    for run, name, result in itertools.product(names, called, numbers):
        runs.rows = int(FULL or CODE_OF[result] != "lost")
        for number in numbers[result] or itertools.count(1):
            if not runs.under(run, Fault(name, number, result)):
                break
            never.discard(name)
    runs.close()
    left = {kind: n - live.get(kind, 0) for kind, n in layer.live().items() if n != live.get(kind, 0)}
    left.pop("CommandBuffer", 0)  # they go with their pool
    if never or left or layer.blocks() != blocks:
        raise WrongAnswer(f"never failed: {never}; left: {left} and {layer.blocks() - blocks} blocks of memory")
