"""Calls of Vulkan that fail under the C library, by the shim ``embed_shim.c``: what fails is said, and what follows is
right, or refused where the device is lost."""

from __future__ import annotations

import ctypes as c
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
from c_host import CODES, NATIVE, Data, Options, Room, blocks
from engine import Engine, Owner, address, call_of
from support import FULL

import zinc_attn as za

SHAPE, LAYERS = za.AttnShape(4, 2, 16), 2
HEADS, VALUES = 2, 4 * 16  # of KV; numbers of a row of q, and of a new row's K and V


class WrongAnswer(Exception):
    """A result that is not the oracle's, or a failure where there is none."""


class Failed(Exception):
    """A function of the library that failed."""


class Made:
    """What a run has made, freed in the opposite order; every function that fails raises."""

    def __init__(self, loaded: c.CDLL) -> None:
        self.c, self.frees = loaded, list[tuple[str, Any]]()

    def __call__(self, name: str, *arguments: Any, free: str | None = None) -> Any:
        handle = getattr(self.c, name)(*arguments)
        if not handle:
            raise Failed(f"{CODES[self.c.za_error_code()]}: {self.c.za_error().decode()}")
        if free is None:
            return None
        self.frees.append((free, c.c_void_p(handle)))
        return self.frees[-1][1]

    def close(self) -> None:
        for name, handle in reversed(self.frees):
            getattr(self.c, name)(handle)


Q = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 4, 16)
K, V = np.stack([Q.reshape(2, 2, 16), Q.reshape(2, 2, 16) + 1])  # of two tokens
REQUEST = [{"tokens": 2, "page_table": [3, 1], "new_rows": 2, "q_len": 1}]


def run_once(make: Made, cache: Any, **changes: Any) -> Any:
    """From host memory."""
    out, lse = np.empty_like(Q), np.empty((1, 4), np.float32)
    data = Data(address(K), address(V), False, address(Q), address(out), address(lse))
    make("za_run", cache, 0, c.byref(call_of([{**REQUEST[0], **changes}])), c.byref(data))
    return out, lse


def from_the_device_on(make: Made, options: Any, name: bytes) -> Any:
    """A cache of a device that the library opens, and a copied page."""
    device = make("za_device_open", name, free="za_device_close")
    attn = make("za_open", device, c.byref(options), free="za_close")
    cache = make("za_cache_make", attn, 1, 4, None, None, free="za_cache_free")
    make("za_copy_page", cache, 3, 0)


def in_the_engine(make: Made, engine: Engine, places: Any, words: Any, rows: int) -> Any:
    """A prepared call of two layers that is recorded, and two that wait, at places of the engine's and from host
    memory. rows: of q; 0: drivers compile little, and there are no results."""
    owner, n = engine.owner, 2 * VALUES
    words[0][:n] = np.concatenate([K, V], axis=2).reshape(-1).view(np.uint32)
    words[1][:64], words[2][:], words[3][:] = Q.reshape(-1).view(np.uint32), 0, 0
    room, request = Room(1, 1, rows, 2, 4), [{**REQUEST[0], "q_len": rows}]
    prepared = make("za_prepare", engine.attn, c.byref(room), free="za_prepared_free")
    command, submit = owner.commands()
    try:
        for layer in range(LAYERS):
            arguments = c.c_void_p(owner.number(command)), engine.cache, layer, c.byref(places)
            make("za_record", prepared, 0, *arguments)
    finally:
        owner.end(command)
    make("za_step", prepared, 0, c.byref(call_of(request)))
    owner.submit(submit)
    recorded = [x.copy() for x in words[2:]]
    make("za_run_at", engine.cache, 1, c.byref(call_of(request)), c.byref(places))
    if not all(np.array_equal(x, y) for x, y in zip(recorded, words[2:], strict=True)):
        raise WrongAnswer("run_at: other bits than those of the recorded call")
    run_once(make, engine.cache, q_len=rows)
    make("za_copy_page", engine.cache, 3, 0)
    return rows and (words[2].view(np.float32).reshape(1, 4, 16), words[3].view(np.float32).reshape(1, 4))


@contextmanager
def failing(wish: str) -> Iterator[None]:
    os.environ["EMBED_FAIL"] = wish
    try:
        yield
    finally:
        del os.environ["EMBED_FAIL"]


def fallible() -> list[str]:
    """The functions that give a VkResult, of all that the library calls."""
    names = re.findall(r"\bX\((\w+)\)", (NATIVE / "src" / "functions.h").read_text())
    void = re.compile(
        "Get|Destroy|Free|Cmd|Update|EnumerateDeviceExtension|DeviceWaitIdle|QueueWaitIdle|ResetFences|CreatePipelineCache|name"
    )
    return ["vkEnumerateInstanceVersion", "vkCreateInstance", *(f"vk{name}" for name in names if not void.match(name))]


RESULTS = {-1: "memory", -2: "memory", -4: "lost", -13: "driver"}  # a VkResult and the code that it becomes


class Failures:
    """Each call of each function gives each result once, in two runs. The call says so by its code, and the next five
    have the oracle's bits, or all of them say that the device is lost."""

    def __init__(self, loaded: c.CDLL, info: Any) -> None:
        self.c, self.info = loaded, info
        self.options = Options(4, HEADS, 16, 0, False, 1, 0, 0, 1)
        self.get_proc = c.cast(getattr(loaded, "__wrap_vkGetInstanceProcAddr"), c.c_void_p).value
        self.owner, self.want = Owner(info, 4 << 20), za.reference.emulate(Q, K, V)
        self.open_engine()

    def open_engine(self) -> None:
        self.owner.used = 0
        self.engine = Engine(self.c, self.owner, self.options, LAYERS, 4, get_proc=self.get_proc)
        self.places = self.engine.places(SHAPE, 1, 2)

    def opened(self, make: Made) -> Any:
        return from_the_device_on(make, self.options, self.info.name.encode())

    def recorded(self, make: Made) -> Any:
        return in_the_engine(make, self.engine, *self.places, self.rows)

    def attempt(self, run: Any, *arguments: Any) -> str:
        """ "" where it succeeds, with the oracle's bits if there are results; else what failed."""
        try:
            for got, right in zip(run(*arguments) or self.want, self.want, strict=True):
                if not np.array_equal(got.view(np.uint32), right.view(np.uint32)):
                    raise WrongAnswer("a call beside one that failed")
            return ""
        except Failed as error:
            return str(error)

    def next_calls(self, make: Made, what: str) -> list[str]:
        """The results of five calls of the objects that exist."""
        there = {free: handle for free, handle in make.frees}
        if what == "recorded":
            there = {"za_close": self.engine.attn, "za_cache_free": self.engine.cache}
        attn, cache, more = there.get("za_close"), there.get("za_cache_free"), Made(self.c)
        of_attn = (
            ("za_prepare", attn, c.byref(Room(1, 1, 1, 2, 4)), "za_prepared_free"),
            ("za_cache_make", attn, 1, 4, None, None, "za_cache_free"),
        )
        said = [self.attempt(lambda call=call: more(*call[:-1], free=call[-1]) and None) for call in of_attn if attn]
        if cache:
            said += [self.attempt(run_once, more, cache) for _ in range(2)]
            said.append(self.attempt(more, "za_copy_page", cache, 3, 0))
        more.close()
        return said

    def table(self, faults: dict[int, Any]) -> Counter[str]:
        """faults: of each result the numbers of the calls that give it; None: all."""
        never, counts = set(fallible()), Counter[str]()
        for run, name, result in ((x, y, z) for x in ("opened", "recorded") for y in fallible() for z in faults):
            self.rows = int(FULL or RESULTS[result] != "lost")
            for number in faults[result] or count(1):
                make = Made(self.c)
                with failing(f"{name}:{number}:{result}"):
                    said = self.attempt(getattr(self, run), make)
                behind = self.next_calls(make, run)
                make.close()
                if not said:
                    break
                never.discard(name)
                where, code = f"{run}, {name} {number}: {said}", RESULTS[result]
                advice = "; use a shorter context or free memory" if name == "vkAllocateMemory" else ""
                if not said.startswith(f"{code}: ") or not said.endswith(f"(VkResult {result}){advice}"):
                    raise WrongAnswer(where)
                if {text.partition(":")[0] for text in behind} - {"lost" if code == "lost" else ""}:
                    raise WrongAnswer(f"{where}; behind it {behind}")
                counts[f"{run} {code}"] += 1
                if run == "recorded" and code == "lost":
                    self.engine.close()
                    self.open_engine()
        if never:
            raise WrongAnswer(f"never failed: {never}")
        return counts

    def close(self) -> None:
        self.engine.close()
        self.owner.close()


def failures(loaded: c.CDLL, info: Any, faults: dict[int, Any]) -> Counter[str]:
    before, runs = blocks(loaded), Failures(loaded, info)
    result = runs.table(faults)
    runs.close()
    if blocks(loaded) != before:
        raise WrongAnswer(f"{blocks(loaded) - before} blocks of memory were not freed")
    return result
