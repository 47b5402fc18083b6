"""The C library as a part of an engine: the engine's device, buffers and command buffers, with the oracle's bits."""

from __future__ import annotations

import ctypes as c
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from c_host import (
    CODES,
    COMPILER,
    DTYPES,
    LIBRARY,
    ROOT,
    SANITIZE,
    SHIM,
    WRAP,
    CachePlaces,
    Place,
    compiled,
    library,
    make_case,
    needs_compiler,
)
from engine import Engine, Options, Owner, Room, call_of
from support import DRIVERS, FULL, same

import zinc_attn as za
from zinc_attn.cache.rows import encode, stored
from zinc_attn.cache.strided import from_rows
from zinc_attn.shapes import TILES, row_strides
from zinc_attn.storage import storage_types
from zinc_attn.tools import export

LAYERS, TOKENS, SLOTS = 3, 640, 2
ON_VULKAN = [driver for driver in DRIVERS if driver[1] == "vulkan"]
SLOPES = np.exp2(-1.0 - np.arange(16)).astype(np.float32)


class Layout(NamedTuple):
    """Where K and V lie: in tiles, or in rows that are so many bytes apart, beside their own."""

    page_size: int
    gap: int | None = None
    heads_first: bool = False


# Shape, types, layout, whether lse lies apart from out, options of the oracle: sizes that are filled up, so that q and
# the results are copied; a latent shape; scales of heads; pages of a token in any order; rows as an engine has them
CASES = [
    ("9/3/64", "f16", Layout(16), False, {}),
    ("4/2/64", "f16", Layout(1), False, {"mask_slopes": True}),
    ("4/2/72/40", "f32", Layout(16), False, {"window": 70, "softcap": 5.0}),
    ("6/2/96/64/latent", "q8_0", Layout(16), True, {"sinks": True}),
    ("4/2/64", "fp8_e4m3", Layout(32), True, {"alibi": True}),
    ("4/2/64", "bf16", Layout(16), True, {"arithmetic": "fused"}),
    ("4/2/65/67", "f16", Layout(1, 0), True, {"mask_slopes": True, "alibi": True}),
    ("4/2/96/32", "q4_0/q8_0", Layout(1, 0, heads_first=True), False, {"mask_slopes": True}),
    ("6/3/40/96", "q5_1/iq4_nl", Layout(16, 2), True, {}),
    ("4/2/64/128", "q4_1/q5_0", Layout(1, 0), False, {}),
    ("4/2/72/65", "fp8_e4m3", Layout(1, 10, heads_first=True), True, {}),
    ("4/2/70/66/latent", "f32", Layout(1, 0), True, {}),
]

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return library(tmp_path_factory.mktemp("engine"), LIBRARY)


class Sequence:
    """What a sequence of the engine has: its page table, and K and V of its tokens by layer, as stored."""

    def __init__(self, shape):
        self.table = []
        sizes = shape.head_dim, shape.v_head_dim
        self.layers = [[np.zeros((0, shape.kv_heads, size), np.float32) for size in sizes] for _ in range(LAYERS)]

    def __len__(self):
        return len(self.layers[0][0])


class Run:
    """Steps of several sequences in all layers, and what the oracle says of them."""

    def __init__(self, engine, shape, dtype, strides, options, rng, scales=None):
        self.engine, self.shape, self.dtype, self.strides, self.scales = engine, shape, dtype, strides, scales
        self.page_size = engine.info.page_size
        self.rng, self.free = rng, rng.permutation(TOKENS // self.page_size).tolist()
        self.options = {name: SLOPES[: shape.q_heads] if value is True else value for name, value in options.items()}

    def request(self, sequence, new, q_len, mask=None, noncausal=False):
        """A request of new rows and query rows, for which the sequence has pages; then `values` gives its arrays."""
        tokens = len(sequence) + new
        while len(sequence.table) * self.page_size < tokens:
            sequence.table.append(self.free.pop())
        given = {"tokens": tokens, "new_rows": new, "q_len": q_len, "noncausal": noncausal, "mask": mask}
        return {**given, "page_table": sequence.table}

    def values(self, sequence, new, q_len):
        """By layer: words of new rows, q; the sequence has the new rows from then on."""
        shape, kinds = self.shape, storage_types(self.dtype)
        for layer in range(LAYERS):
            q = self.rng.standard_normal((q_len, shape.q_heads, shape.head_dim), np.float32)
            if not new:
                yield np.zeros(0, np.uint32), q
                continue
            scales = None if self.scales is None else self.scales[layer]
            sizes = zip((shape.head_dim, shape.v_head_dim), kinds, strict=True)
            k, v = (
                self.rng.standard_normal((new, shape.kv_heads, size), np.float32).astype(
                    make_case.NARROW.get(kind.name, np.float32)
                )
                for size, kind in sizes
            )
            if shape.latent:
                v = k[..., : shape.v_head_dim]
            rows = stored(k, v, self.dtype, latent=shape.latent, scales=scales)
            both = zip(sequence.layers[layer], rows, strict=True)
            sequence.layers[layer] = [np.concatenate([old, added.astype(np.float32)]) for old, added in both]
            words = encode(k, v, shape, self.dtype, scales)
            if self.strides != TILES:
                words = from_rows(words, shape, self.dtype, self.strides)
            yield words.reshape(-1), q

    def call(self, requests):
        names = {"window", "softcap", "sinks", "alibi", "mask_slopes"}
        return call_of(requests, **{k: v for k, v in self.options.items() if k in names})

    def step(self, parts):
        """(struct za_call, by layer (words of the new rows, q of all rows, the oracle's out and lse))."""
        requests, layers = [], [([], [], []) for _ in range(LAYERS)]
        for sequence, new, q_len, *more in parts:
            requests.append(self.request(sequence, new, q_len, *more))
            for layer, (words, q) in enumerate(self.values(sequence, new, q_len)):
                k, v = sequence.layers[layer]
                options = dict(self.options)
                options["mask"] = more[0] if more else None
                options["causal"] = not (more[1] if len(more) > 1 else False)
                want = za.reference.emulate(q, k, v, **options) if q_len else None
                for into, one in zip(layers[layer], (words, q, want), strict=True):
                    into.append(one)
        whole = []
        for words, q, want in layers:
            results = [np.concatenate(one) for one in zip(*filter(None, want), strict=True)]
            whole.append((np.concatenate(words), np.concatenate(q), results))
        return self.call(requests), whole


def fill(words, arrays):
    """Copy arrays to the begin of places."""
    for to, array in zip(words, arrays, strict=True):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint32)
        to[: flat.size] = flat


def results(shape, rows, words):
    """out and lse of ``rows`` rows."""
    n = rows * shape.q_heads
    out = words[2][: n * shape.v_head_dim].view(np.float32).reshape(rows, shape.q_heads, shape.v_head_dim)
    return out, words[3][:n].view(np.float32).reshape(rows, shape.q_heads)


def steps_of(run, rng):
    """A prompt, a second sequence, decode steps of both, alone, and with masks and rows that are not causal."""
    a, b = Sequence(run.shape), Sequence(run.shape)
    yield [(a, 5, 3)]
    yield [(a, 1, 1), (b, 3, 2)]
    yield [(b, 5, 0)]
    for n in (55, 1, 60):  # to the end of a leaf, over it, and far on
        for at in range(0, n, 6):
            yield [(a, min(n - at, 6), 1), (b, 0, 1)]
    mask = rng.standard_normal((2, 5), np.float32)
    mask[1, 2] = -np.inf
    yield [(a, 2, 2, mask), (b, 1, 2, None, True)]
    yield [(b, 0, 1)]


@pytest.mark.parametrize("any_device", ON_VULKAN, indirect=True, ids="-".join)
@pytest.mark.parametrize(("shape", "dtype", "layout", "apart", "options"), CASES)
def test_a_recorded_call_has_the_oracle_s_bits(loaded, any_device, rng, tmp_path, shape, dtype, layout, apart, options):
    """Three layers in one submission of the engine's, two slots, steps of other lengths; and the same by za_run_at."""
    # which compiles everything anew
    if "SwiftShader" in any_device.info.name and not FULL and shape not in ("4/2/72/40", "4/2/96/32"):
        pytest.skip("two shapes on SwiftShader")
    shape, strides = za.AttnShape.parse(shape), TILES
    export.export(tmp_path)
    if layout.gap is not None:
        strides = tuple(stride + layout.gap for stride in row_strides(shape, dtype))
    scales = np.tile(rng.uniform(0.02, 0.2, (1, 2, shape.kv_heads)).astype(np.float32), (LAYERS, 1, 1))
    scales = scales if "fp8" in dtype else None
    types = [DTYPES.index(kind.name) for kind in storage_types(dtype)]
    sizes = shape.q_heads, shape.kv_heads, shape.head_dim, shape.v_head_dim, shape.latent
    owner = Owner(any_device.info, 8 << 20)
    given = int(options.get("arithmetic") == "fused"), layout.page_size, strides[0], strides[1] * (not shape.latent)
    made = Options(str(tmp_path).encode(), *sizes, *types, *given)
    pages, steps = TOKENS // layout.page_size, (1, LAYERS * TOKENS) if layout.heads_first else (0, 0)
    engine = Engine(loaded, owner, made, LAYERS, pages, scales, steps=steps)
    rows, new_rows = 4, 6
    flags = [name in options for name in ("sinks", "softcap", "alibi", "mask_slopes")]
    room = Room(SLOTS, 2, rows, new_rows, 256, 0, 5, *flags)
    prepared = c.c_void_p(engine.c.za_prepare(engine.attn, c.byref(room)))
    assert prepared, engine.error
    places = [engine.places(shape, rows, new_rows, apart) for _ in range(LAYERS)]
    recordings = [owner.commands() for _ in range(SLOTS)]
    for slot, (command, _) in enumerate(recordings):
        for layer in range(LAYERS):
            given = slot, c.c_void_p(owner.number(command)), engine.cache, layer, c.byref(places[layer][0])
            assert engine.c.za_record(prepared, *given), engine.error
        owner.end(command)
    run = Run(engine, shape, dtype, strides, options, rng, scales)
    for number, parts in enumerate(steps_of(run, rng)):
        call, layers = run.step(parts)
        if number % 3 == 2 and any(part[1] for part in parts):  # some steps by calls that wait
            for layer, (words, q, want) in enumerate(layers):
                once, once_words = places[layer]
                fill(once_words, (words, q, [], []))
                assert engine.c.za_run_at(engine.cache, layer, c.byref(call), c.byref(once)), engine.error
                n = len(q)
                got_out, got_lse = once_words[2], once_words[3]
                if not apart:  # lse lies behind the room's rows, so that it is copied
                    got_lse = owner.words[once.lse.offset // 4 :]
                if n:
                    same(results(shape, n, (0, 0, got_out, got_lse)), want, (number, layer))
            continue
        slot = number % SLOTS
        for (_, words), (new, q, _) in zip(places, layers, strict=True):
            fill(words, (new, q, [], []))
        assert engine.c.za_step(prepared, slot, c.byref(call)), engine.error
        owner.submit(recordings[slot][1])
        for (_, words), (_, q, want) in zip(places, layers, strict=True):
            got = results(shape, rows, words)
            same([x[: len(q)] for x in got], want or [x[:0] for x in got], number)
            if not flags[0]:  # what further rows of the room have, which see no key
                assert not np.any(got[0][len(q) :]) and np.all(got[1][len(q) :] == -np.inf)
    engine.c.za_prepared_free(prepared)
    engine.close()
    owner.close()


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory, device):
    """An engine of one small shape in pages of one token, behind a shim that can make calls of Vulkan fail."""
    folder = tmp_path_factory.mktemp("small")
    export.export(folder, [za.AttnShape(2, 1, 16)], dtype="f32", page_size=1)
    shimmed = library(folder, [*LIBRARY, SHIM], *WRAP)
    owner = Owner(device.info, 4 << 20)
    get_proc = c.cast(shimmed.__wrap_vkGetInstanceProcAddr, c.c_void_p).value
    engine = Engine(shimmed, owner, Options(str(folder).encode(), 2, 1, 16, 0, False, 1), 2, 9, None, get_proc)
    yield engine
    engine.close()
    owner.close()


def attempt(engine, places, layer=0, **request):
    """The code and text of za_run_at of one request; "" where it succeeds."""
    call = call_of([{"tokens": 2, "page_table": [3, 4], "new_rows": 1, "q_len": 1, **request}])
    if engine.c.za_run_at(engine.cache, layer, c.byref(call), c.byref(places)):
        return ""
    return f"{CODES[engine.c.za_error_code()]}: {engine.error}"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    (
        ("q", {"buffer": None}, "invalid: q: got no buffer, expected one"),
        ("q", {"offset": 1028}, "invalid: q.offset: got 1028, expected a multiple of "),
        ("rows", {"size": 127}, "invalid: rows.size: got 127 bytes, expected at least 128"),
        ("out", {"offset": 1 << 40}, "invalid: out: got 128 bytes from offset 1099511627776, expected a place within"),
        ("out", {"size": (1 << 64) - 1}, "invalid: out: got 18446744073709551615 bytes from offset "),
        ("lse", {"offset": 2, "size": 8}, "invalid: lse.offset: got 2, expected a multiple of 4"),
        ("lse", {"size": 4}, "invalid: lse.size: got 4 bytes, expected at least 8"),
    ),
)
def test_places_that_are_no_good(small, name, change, message):
    places, _ = small.places(za.AttnShape(2, 1, 16), 1, 1)
    assert attempt(small, places) == ""
    for field, value in change.items():
        setattr(getattr(places, name), field, value)
    assert attempt(small, places).startswith(message)
    small.owner.used = 16 << 10  # the places again


def test_places_that_overlap(small):
    places, _ = small.places(za.AttnShape(2, 1, 16), 1, 1)
    places.out = places.q
    assert attempt(small, places) == "invalid: q, out: got places that overlap, expected places apart"
    places.out = small.cache_places.k
    assert attempt(small, places) == "invalid: out, k: got places that overlap, expected places apart"


def test_caches_and_rooms_that_are_no_good(small):
    def cache(layers, pages, **changes):
        given = CachePlaces(layers, pages, small.cache_places.k, small.cache_places.v)
        for name, value in changes.items():
            setattr(given, name, value)
        assert not small.c.za_cache_from(small.attn, c.byref(given))
        return small.error

    at = small.cache_places.k
    assert cache(2, 10) == "k.size: got 1152 bytes, expected at least 1280"
    assert cache(2, 9, v=Place(at.buffer, at.offset + 2, at.size)).startswith("v.offset: got ")
    assert cache(2, 9, v=at) == "k, v: got places that overlap, expected places apart"
    assert cache(0, 9).startswith("cache: got 0 layers of 9 pages, ")
    assert cache(1, 9, k_scales=1).startswith("k_scales: got some for f32, expected NULL")
    assert cache(2, 9, head_rows=1).startswith("token_rows, head_rows: got 0 and 1, expected 0, since K and V lie in")
    for numbers, message in (
        ((0, 1, 1, 1, 9), "room.slots: got 0, expected 1 to 64"),
        ((1, 1, 1, 1, 0), "room: got 1 requests of 0 tokens, "),
        ((1, 1, 1, 1, 9, 0, 10), "room: got 1 requests of 9 tokens, 1 rows, 1 new rows and masks of 10 keys"),
        ((1, 1, 1 << 17, 1, 9), "q_len, new_rows: got 131072 and 1, which make 131072 items"),
    ):
        assert not small.c.za_prepare(small.attn, c.byref(Room(*numbers)))
        assert small.error.startswith(message)


def test_recordings_and_steps_that_are_no_good(small):
    """Each by its reason; what was recorded and what fits goes on."""
    prepared = c.c_void_p(small.c.za_prepare(small.attn, c.byref(Room(1, 1, 1, 1, 5))))
    places, _ = small.places(za.AttnShape(2, 1, 16), 1, 1)
    command, submit = small.owner.commands()
    at = c.c_void_p(small.owner.number(command))

    def recorded(slot=0, command=at, cache=small.cache, layer=0):
        ok = small.c.za_record(prepared, slot, command, cache, layer, c.byref(places))
        return "" if ok else small.error

    def stepped(slot=0, **request):
        options = {name: request.pop(name) for name in ("softcap", "splits") if name in request}
        call = call_of([{"tokens": 2, "page_table": [3, 4], "new_rows": 1, "q_len": 1, **request}], **options)
        return "" if small.c.za_step(prepared, slot, c.byref(call)) else small.error

    assert recorded(slot=1) == "slot: got 1, expected one below 1"
    assert recorded(command=None) == "commands: got NULL, expected a command buffer"
    assert recorded(layer=2) == "layer: got 2, expected one below 2"
    unaligned = 576 % small.c.za_device_info(small.device).alignment > 0  # bytes of a layer
    assert recorded(layer=1).startswith("k: got layer 1 at offset ") == unaligned
    assert recorded() == ""
    small.owner.end(command)
    assert stepped(slot=1) == "slot: got 1, expected one below 1"
    assert stepped(tokens=6, page_table=range(6)) == "tokens: got 6, expected at most the room's 5"
    assert stepped(q_len=2) == "q_len: got 2, expected at most the room's 1"
    assert stepped(new_rows=2) == "new_rows: got 2, expected at most the room's 1"
    assert stepped(page_table=[3, 9]) == "request[0].page_table[1]: got 9, expected a page below 9"
    assert stepped(mask=np.zeros((1, 1))) == "mask_keys: got 1, expected at most the room's 0"
    assert stepped(softcap=1.0).startswith("softcap, sinks, alibi, mask_slopes: got a step that")
    assert stepped(splits=2) == "splits: got 2, expected 0; a prepared call has its room's"
    assert stepped() == ""
    small.owner.submit(submit)
    assert small.c.za_reset(prepared, 0) and not small.c.za_reset(prepared, 1)
    small.c.za_prepared_free(prepared)


def test_rows_that_are_no_good(small):
    """A prepared call has words for one way in which they lie, and a page is copied in one piece."""
    options = Options.from_buffer_copy(small.options)
    options.q_heads = options.kv_heads = 2
    options.k_stride, options.v_stride, options.page_size = 64, 64, 1
    attn = c.c_void_p(small.c.za_open(small.device, c.byref(options)))
    assert attn, small.error
    made = {}
    for steps, pages in (((0, 0), 9), ((1, 9), 9), ((0, 1), 9), ((1, 11), 9), ((1 << 31, 1), 9), ((3, 1), 6)):
        given = CachePlaces(1, pages, small.cache_places.k, small.cache_places.v, None, None, *steps)
        made[steps] = c.c_void_p(small.c.za_cache_from(attn, c.byref(given))), small.error
    assert made[1, 11][1] == "k.size: got 1152 bytes, expected at least 1280"
    assert made[1 << 31, 1][1].startswith("cache: got 1 layers of 9 pages, ")
    assert made[0, 1][1] == "token_rows, head_rows: got 0 and 1, expected rows from a token to the next"
    caches = {steps: cache for steps, (cache, _) in made.items() if cache}
    assert set(caches) == {(0, 0), (1, 9), (3, 1)}
    assert small.c.za_copy_page(caches[0, 0], 1, 2) and not small.c.za_copy_page(caches[1, 9], 1, 2)
    assert small.error == (
        "cache: got token_rows 1 and head_rows 9, expected 2 and 1, pages in one piece; copy by commands of the host's"
    )
    prepared = c.c_void_p(small.c.za_prepare(attn, c.byref(Room(1, 1, 1, 0, 5))))
    call = call_of([{"tokens": 2, "page_table": [3, 4], "q_len": 1}])
    assert not small.c.za_step(prepared, 0, c.byref(call)) and small.error.startswith("slot: got 0 before a layer was ")
    places, (command, _) = small.places(za.AttnShape(2, 2, 16), 1, 0)[0], small.owner.commands()
    at = c.c_void_p(small.owner.number(command))
    assert small.c.za_record(prepared, 0, at, caches[1, 9], 0, c.byref(places)), small.error
    assert not small.c.za_record(prepared, 0, at, caches[0, 0], 0, c.byref(places))
    assert small.error.startswith("cache: got token_rows 2 and head_rows 1, expected 1 and 9, as in a cache that was ")
    small.owner.end(command)
    small.c.za_prepared_free(prepared)
    for cache in caches.values():
        small.c.za_cache_free(cache)
    small.c.za_close(attn)


def test_hosts_that_are_no_good(small):
    for name in ("instance", "physical", "device", "queue", "get_proc"):
        assert not small.c.za_device_from(c.byref(small.owner.host(**{name: None})))
        assert small.error.startswith("host: got a NULL among instance, ")
    assert not small.c.za_device_from(c.byref(small.owner.host(family=31)))
    assert small.error.startswith("host: got queue family 31, expected one of ")


def test_a_second_thread_is_refused(small):
    """While the first one is in a call; it goes on undisturbed."""
    places, _ = small.places(za.AttnShape(2, 1, 16), 1, 1)
    said: set[str] = set()
    threads = [threading.Thread(target=lambda: said.update(attempt(small, places) for _ in range(200))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.partition(";")[0].partition(":")[0] for one in said} == {"", "busy"}, said
    assert attempt(small, places) == ""


def test_subgroups_of_32_are_the_host_s_to_enable(small, monkeypatch):
    """za_wanted_features asks for them where they are offered, and only what the host enabled is used."""
    owner, device = small.owner, small.owner.device
    size = owner.vk.struct("VkPhysicalDeviceSubgroupSizeControlFeatures")
    chain = owner.vk.struct("VkPhysicalDeviceFeatures2", pNext=size)
    at = owner.number(chain)

    def wants():
        given = [c.c_void_p(owner.number(x)) for x in (device.instance, device.physical)]
        assert small.c.za_wanted_features(*given, c.c_void_p(small.get_proc), c.c_void_p(at))
        return bool(size.subgroupSizeControl)

    def uses(enabled):
        host = owner.host(get_proc=small.get_proc, enabled=enabled)
        made = c.c_void_p(small.c.za_device_from(c.byref(host)))
        wave32 = small.c.za_device_info(made).wave32
        small.c.za_device_close(made)
        return wave32

    size.subgroupSizeControl = 0
    offered = wants()
    assert uses(at) == offered and not uses(None)
    monkeypatch.setenv("EMBED_WAVE32", "1")
    size.subgroupSizeControl = 0
    assert not uses(at)  # offered, but not enabled
    assert wants() and uses(at) and not uses(None)


def test_a_submission_that_did_not_end_loses_the_device(small, monkeypatch):
    """It is the host's: the library leaves it and its queue alone, and another za_device of it works."""
    host = small.owner.host(get_proc=small.get_proc)
    places, _ = small.places(za.AttnShape(2, 1, 16), 1, 1)
    assert attempt(small, places) == ""
    lost = SimpleNamespace(c=small.c, device=c.c_void_p(small.c.za_device_from(c.byref(host))))
    lost.attn = c.c_void_p(small.c.za_open(lost.device, c.byref(small.options)))
    lost.cache = c.c_void_p(small.c.za_cache_from(lost.attn, c.byref(small.cache_places)))
    monkeypatch.setenv("EMBED_FAIL", "vkQueue*:1+:-4")
    call = call_of([{"tokens": 1, "page_table": [0], "q_len": 1}])
    for code in ("lost", "lost"):
        assert not small.c.za_run_at(lost.cache, 0, c.byref(call), c.byref(places))
        assert CODES[small.c.za_error_code()] == code
    assert not small.c.za_prepare(lost.attn, c.byref(Room(1, 1, 1, 1, 5))) and "open it again" in small.error
    for free, one in (("za_cache_free", lost.cache), ("za_close", lost.attn), ("za_device_close", lost.device)):
        getattr(small.c, free)(one)
    monkeypatch.delenv("EMBED_FAIL")
    assert attempt(small, places) == ""


def compiler_file(name):
    """A library of the compiler's, "" where it has none."""
    found = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return found if Path(found).is_absolute() else ""


def test_random_calls(device, tmp_path):
    """Right ones and wrong ones, under the sanitizers where the compiler has them; 10,000 with --full."""
    export.export(tmp_path / "kernels", [za.AttnShape(2, 1, 16)], dtype="f32", page_size=1)
    preload = [compiler_file(name) for name in ("libasan.so", "libubsan.so")]
    sanitized = all(preload) and "VK_INSTANCE_LAYERS" not in os.environ
    flags = SANITIZE if sanitized else ["-O2"]
    made = compiled(tmp_path / "library.so", LIBRARY, *flags, "-shared", "-fPIC")
    assert made.returncode == 0, made.stderr
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"} | ({"LD_PRELOAD": " ".join(preload)} if sanitized else {})
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    arguments = tmp_path / "library.so", tmp_path / "kernels", device.info.name, "5", "10000" if FULL else "400"
    command = [sys.executable, ROOT / "tests" / "c_random.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and " calls: " in done.stdout, done.stderr[-3000:]
