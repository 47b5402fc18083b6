"""The C library as a part of an engine: the engine's device, buffers and command buffers, with the oracle's bits."""

from __future__ import annotations

import ctypes as c
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from c_cases import CASES, FEW, OF_OTHER_TYPES, check_case
from c_failures import CODE_OF, failures
from c_host import (
    SANITIZED,
    SHIMMED,
    CachePlaces,
    Options,
    Place,
    Room,
    compiler_file,
    library,
    needs_compiler,
)
from engine import Engine, Failed, Made, Opened, Owner, call_of, subgroups_from
from faults import Fault, Layer, shim
from support import DRIVERS, FULL

import zinc_attn as za
from zinc_attn.kernels.sizes import LEAST_SHARED_BYTES
from zinc_attn.runtime.devices import MATRIX_FEATURES

TESTS = Path(__file__).parents[1]
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def loaded():
    return library(SHIMMED)


CHOSEN = [name for name in CASES if FULL or name not in OF_OTHER_TYPES]
WHERE = [  # SwiftShader compiles everything anew
    (driver, name)
    for driver in DRIVERS
    for name in (CHOSEN if FULL or driver[0] == "default" else FEW[:1])
    if driver[1] == "vulkan"
]


@pytest.mark.parametrize(
    ("any_device", "name"), WHERE, indirect=["any_device"], ids=lambda x: "-".join([*x]) if isinstance(x, tuple) else x
)
def test_a_case_has_the_oracle_s_bits(loaded, any_device, monkeypatch, name):
    """Two layers in one submission of the engine's, steps of other lengths; by za_run_at and za_run, too."""
    monkeypatch.setenv("ZINC_ATTN_UNITS", "1")
    check_case(loaded, any_device.info, CASES[name])


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(device):
    """An engine of one small shape in pages of one token, behind a shim that can make calls of Vulkan fail."""
    loaded, owner, layer = library(SHIMMED), Owner(device.info, 4 << 20), Layer(shim())
    engine = Engine(loaded, owner, Options(2, 1, 16, 0, False, 1, page_size=1), 2, 9, None, layer.get_proc)
    engine.layer = layer
    yield engine
    engine.close()
    owner.close()
    assert layer.blocks() == 0


@pytest.fixture
def make(small):
    made = Made(small.c)
    yield made
    made.close()


def refused(message):
    """Around a call of ``make`` that fails with this text, in which ... stands for any other."""
    return pytest.raises(Failed, match=rf"^\w+: {re.escape(message).replace(re.escape('...'), '.*')}$")


def attempt(engine, places, layer=0, **request):
    """The code and text of za_run_at of one request; "" where it succeeds."""
    call = call_of([{"tokens": 2, "page_table": [3, 4], "new_rows": 1, "q_len": 1, **request}])
    if engine.c.za_run_at(engine.cache, layer, c.byref(call), c.byref(places)):
        return ""
    return f"{engine.code}: {engine.error}"


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


def test_caches_and_rooms_that_are_no_good(small, make):
    at = small.cache_places.k
    for layers, pages, changes, message in (
        (2, 10, {}, "k.size: got 1152 bytes, expected at least 1280"),
        (2, 9, {"v": Place(at.buffer, at.offset + 2, at.size)}, "v.offset: got ..., expected a multiple of ..."),
        (2, 9, {"v": at}, "k, v: got places that overlap, expected places apart"),
        (0, 9, {}, "layers, pages: got 0 and 9, expected numbers from 1 on"),
        (1, 9, {"k_scales": 1}, "k_scales: got some for f32, expected NULL; only fp8_e4m3 has scales of heads"),
        (2, 9, {"head_rows": 1}, "token_rows, head_rows: got 0 and 1, expected 0, since K and V lie in tiles"),
    ):
        places = CachePlaces(layers, pages, **{"k": at, "v": small.cache_places.v, **changes})
        with refused(message):
            make("za_cache_from", small.attn, c.byref(places))
    for numbers, message in (
        ((0, 1, 1, 1, 9), "room.slots: got 0, expected 1 to 64"),
        ((1, 1, 1, 1, 0), "room: got 1 requests of 0 tokens, ..."),
        ((1, 1, 1, 1, 9, 0, 10), "room: got 1 requests of 9 tokens, 1 rows, 1 new rows and masks of 10 keys, ..."),
        ((1, 1, 1 << 17, 1, 9), "q_len, new_rows: got 131072 and 1, which make 131072 items ...; make several calls"),
    ):
        with refused(message):
            make("za_prepare", small.attn, c.byref(Room(*numbers)))


@pytest.mark.parametrize("huge", (1, 2, 7, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 24) + 1))
def test_numbers_of_any_size_are_taken_or_refused(small, huge):
    for index in range(7):
        room = [2, 3, 8, 8, 9, 0, 9]
        room[index] = huge
        prepared = c.c_void_p(small.c.za_prepare(small.attn, c.byref(Room(*room))))
        assert prepared or small.error
        small.c.za_prepared_free(prepared)
    for layers, pages in ((huge, 3), (3, huge), (huge, huge)):
        prepared = c.c_void_p(small.c.za_cache_make(small.attn, layers, pages, None, None))
        assert prepared or small.error
        small.c.za_cache_free(prepared)
        given = CachePlaces(layers, pages, small.cache_places.k, small.cache_places.v, None, None, 0, 0)
        prepared = c.c_void_p(small.c.za_cache_from(small.attn, c.byref(given)))
        assert prepared or small.error
        small.c.za_cache_free(prepared)


def test_recordings_and_steps_that_are_no_good(small):
    """Each by its reason; what was recorded and what fits goes on."""
    prepared = c.c_void_p(small.c.za_prepare(small.attn, c.byref(Room(2, 1, 1, 1, 5))))
    less = CachePlaces(1, 3, small.cache_places.k, small.cache_places.v)
    little = c.c_void_p(small.c.za_cache_from(small.attn, c.byref(less)))
    places, words = small.places(za.AttnShape(2, 1, 16), 1, 1)
    command, submit = small.owner.commands()
    handle = c.c_void_p(small.owner.number(command))

    def recorded(slot=0, command=handle, cache=small.cache, layer=0):
        ok = small.c.za_record(prepared, slot, command, cache, layer, c.byref(places))
        return "" if ok else small.error

    def stepped(slot=0, **request):
        options = {name: request.pop(name) for name in ("softcap", "splits") if name in request}
        call = call_of([{"tokens": 2, "page_table": [3, 4], "new_rows": 1, "q_len": 1, **request}], **options)
        return "" if small.c.za_step(prepared, slot, c.byref(call)) else small.error

    assert stepped().startswith("slot: got 0, but no layer is recorded for it; record first, ")
    assert recorded(slot=2) == "slot: got 2, expected one below 2"
    assert recorded(command=None) == "commands: got NULL, expected a command buffer"
    assert recorded(layer=2) == "layer: got 2, expected one below 2"
    unaligned = 576 % small.c.za_device_info(small.device).alignment > 0  # bytes of a layer
    assert recorded(layer=1).startswith("k: got layer 1 at offset ") == unaligned
    assert recorded(slot=1, cache=little) == recorded(slot=1) == recorded() == ""
    small.owner.end(command)
    assert stepped(slot=2) == "slot: got 2, expected one below 2"
    assert stepped(slot=1) == "request[0].page_table[0]: got 3, expected a page below 3"  # of little; slot 0 has nine
    assert stepped(tokens=6, page_table=range(6)) == "tokens: got 6, expected at most the room's 5"
    assert stepped(q_len=2) == "q_len: got 2, expected at most the room's 1"
    assert stepped(new_rows=2) == "new_rows: got 2, expected at most the room's 1"
    assert stepped(page_table=[3, 9]) == "request[0].page_table[1]: got 9, expected a page below 9"
    assert stepped(mask=np.zeros((1, 1))) == "mask_keys: got 1, expected at most the room's 0"
    assert stepped(softcap=1.0) == "softcap: got a step that has it, expected one without it, as its room says"
    assert stepped(splits=2) == "splits: got 2, expected 0; a prepared call has its room's"
    assert stepped() == ""
    small.owner.submit(submit)
    assert small.c.za_reset(prepared, 0) and not small.c.za_reset(prepared, 2)
    assert stepped().startswith("slot: got 0, but no layer is recorded for it; ")
    command, submit = small.owner.commands()
    assert recorded(command=c.c_void_p(small.owner.number(command))) == ""
    small.owner.end(command)
    assert words[2].any()  # of the step
    small.owner.submit(submit)  # which is forgotten: there is no request
    assert not words[2].any() and np.all(words[3] == -np.inf)
    small.c.za_prepared_free(prepared)
    small.c.za_cache_free(little)


NULLS = {  # of each function: its first argument, and the next one that is looked at
    "za_device_from": ("host", ""),
    "za_open": ("device", "options"),
    "za_cache_make": ("attn", ""),
    "za_cache_from": ("attn", "places"),
    "za_copy_page": ("cache", ""),
    "za_run": ("cache", "call"),
    "za_run_at": ("cache", "call"),
    "za_prepare": ("attn", "room"),
    "za_record": ("prepared", ""),
    "za_step": ("prepared", ""),
    "za_reset": ("prepared", ""),
}


@pytest.mark.parametrize("name", NULLS)
def test_null_is_refused(small, name):
    (first, second), function = NULLS[name], getattr(small.c, name)
    assert not function(*[None] * 6)
    assert small.error == f"{first}: got NULL, expected one"
    if second:
        assert not function(getattr(small, first), *[None] * 5)
        assert small.error == f"{second}: got NULL, expected one"


def test_rows_that_are_no_good(small, make):
    """A prepared call has words for one way in which they lie, and a page is copied in one piece."""

    def opened(page_size):
        options = Options(2, 2, 16, 0, False, 1, page_size=page_size, k_stride=64, v_stride=64)
        return make("za_open", small.device, c.byref(options), free="za_close")

    def cache(attn, pages, *steps):
        places = CachePlaces(1, pages, small.cache_places.k, small.cache_places.v, None, None, *steps)
        return make("za_cache_from", attn, c.byref(places), free="za_cache_free")

    attn, pages_of_four = opened(1), opened(4)
    whole, apart, _ = cache(attn, 9, 0, 0), cache(attn, 9, 1, 9), cache(attn, 6, 3, 1)
    for steps, message in (
        ((0, 1), "token_rows, head_rows: got 0 and 1, expected numbers from 1 on, ..., or 0 and 0"),
        ((2, 0), "token_rows, head_rows: got 2 and 0, expected numbers from 1 on, ..., or 0 and 0"),
        ((1, 11), "k.size: got 1152 bytes, expected at least 1280"),
        ((1 << 31, 1), "layers, pages: got 1 and 9, ...; make several caches of fewer layers or pages"),
    ):
        with refused(message):
            cache(attn, 9, *steps)
    for steps in ((1, 1), (2, 2)):  # rows that collide
        with refused("token_rows, head_rows: got ..."):
            cache(pages_of_four, 2, *steps)
    for steps in ((2, 1), (1, 4)):
        cache(pages_of_four, 2, *steps)
    make("za_copy_page", whole, 1, 2)
    in_pieces = "cache: got token_rows 1 and head_rows 9, expected 2 and 1, pages in one piece"
    with refused(f"{in_pieces}; copy by commands of the host's"):
        make("za_copy_page", apart, 1, 2)
    prepared = make("za_prepare", attn, c.byref(Room(1, 1, 1, 0, 5)), free="za_prepared_free")
    places = small.places(za.AttnShape(2, 2, 16), 1, 0)[0]
    command, later = (small.owner.commands()[0] for _ in range(2))

    def record(command, cache):
        make("za_record", prepared, 0, c.c_void_p(small.owner.number(command)), cache, 0, c.byref(places))

    record(command, apart)
    with refused("cache: got token_rows 2 and head_rows 1, expected 1 and 9, as in a cache that was ..."):
        record(command, whole)
    small.owner.end(command)
    make("za_reset", prepared, 0)  # nothing is recorded, so the other cache may be
    record(later, whole)


def test_hosts_that_are_no_good(small):
    for name in ("instance", "physical", "device", "queue", "get_proc"):
        assert not small.c.za_device_from(c.byref(small.owner.host(**{name: None})))
        assert small.error.startswith("host: got a NULL among instance, ")
    assert not small.c.za_device_from(c.byref(small.owner.host(family=31)))
    assert small.error.startswith("host: got queue family 31, expected one of ")
    ffi, find = small.owner.ffi, small.owner.lib.vkGetInstanceProcAddr
    get_proc = ffi.callback(
        "void *(void *, const char *)",
        lambda i, name: ffi.cast("void *", b"Fence" not in ffi.string(name) and find(ffi.cast("VkInstance", i), name)),
    )
    assert not small.c.za_device_from(c.byref(small.owner.host(get_proc=small.owner.number(get_proc))))
    assert small.error.startswith("get_proc: it has no vkResetFences, ")


def test_a_device_without_room_for_a_workgroup_is_refused(small):
    def little(real, physical, properties):
        real(physical, properties)
        properties.limits.maxComputeSharedMemorySize = 16384

    with small.layer.replaced("vkGetPhysicalDeviceProperties", little):
        device = c.c_void_p(small.c.za_device_from(c.byref(small.owner.host(get_proc=small.get_proc))))
    assert device, small.error
    assert not small.c.za_open(device, c.byref(small.options)) and small.code == "unsupported"
    assert small.error.endswith(f": its maxComputeSharedMemorySize is 16384, expected {LEAST_SHARED_BYTES} or more")
    small.c.za_device_close(device)


def test_a_second_thread_is_refused(small):
    """While the first one is in a call; it goes on undisturbed."""
    places, _ = small.places(za.AttnShape(2, 1, 16), 1, 1)
    said: set[str] = set()
    threads = [threading.Thread(target=lambda: said.update(attempt(small, places) for _ in range(200))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {line.partition(";")[0].partition(":")[0] for line in said} == {"", "busy"}, said
    assert attempt(small, places) == ""


def ask_for_features(small, chain, get_proc=None):
    """za_wanted_features fills in a chain of features."""
    device = small.owner.device
    handles = (c.c_void_p(small.owner.number(x)) for x in (device.instance, device.physical, chain))
    instance, physical, features = handles
    assert small.c.za_wanted_features(instance, physical, c.c_void_p(get_proc or small.get_proc), features)


def test_subgroups_of_32_are_the_host_s_to_enable(small):
    """za_wanted_features asks for them where they are offered, and only what the host enabled is used."""
    vk = small.owner.vk
    size = vk.struct("VkPhysicalDeviceSubgroupSizeControlFeatures")
    chain = vk.struct("VkPhysicalDeviceFeatures2", pNext=size)

    def uses(enabled):
        host = small.owner.host(get_proc=small.get_proc, enabled=enabled and small.owner.number(enabled))
        handle = c.c_void_p(small.c.za_device_from(c.byref(host)))
        wave32 = small.c.za_device_info(handle).wave32
        small.c.za_device_close(handle)
        return wave32

    ask_for_features(small, chain)
    assert uses(chain) == bool(size.subgroupSizeControl) and not uses(None)
    with subgroups_from(small.layer, 32):
        size.subgroupSizeControl = 0
        assert not uses(chain)  # offered, but not enabled
        ask_for_features(small, chain)
        assert size.subgroupSizeControl and uses(chain) and not uses(None)


def matrix_features(owner):
    """A chain of the features of matrix units, and its structs."""
    chain, structs = owner.vk.struct("VkPhysicalDeviceFeatures2"), []
    for name in MATRIX_FEATURES:
        structs.append(owner.vk.struct(name, pNext=chain.pNext))
        chain.pNext = structs[-1]
    return chain, structs


def test_matrix_units_are_the_host_s_to_enable(small, monkeypatch):
    """za_wanted_features asks for them where they are offered and $ZINC_ATTN_UNITS leaves them in."""
    for asked in "01":
        monkeypatch.setenv("ZINC_ATTN_UNITS", asked)
        chain, (matrix, int8, memory) = matrix_features(small.owner)
        ask_for_features(small, chain)
        wanted = matrix.cooperativeMatrix, int8.shaderInt8, memory.vulkanMemoryModel
        offered = small.owner.device.info.matrix.int8 is not None
        assert wanted == (int(asked == "1" and offered),) * 3 and not int8.shaderFloat16


def test_a_driver_that_does_not_know_matrix_units_is_not_asked_for_them(small, monkeypatch):
    """It leaves the struct of the feature as it is, and has no function that lists products."""
    monkeypatch.setenv("ZINC_ATTN_UNITS", "1")
    asked, known = [], c.CFUNCTYPE(c.c_void_p, c.c_void_p, c.c_char_p)(small.get_proc)
    products = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p)(lambda *_: asked.append(1) or -3)

    @c.CFUNCTYPE(c.c_void_p, c.c_void_p, c.c_char_p)
    def get_proc(instance, name):
        lists = name == b"vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
        return c.cast(products, c.c_void_p).value if lists else known(instance, name)

    chain, structs = matrix_features(small.owner)
    with small.layer.replaced("vkGetPhysicalDeviceFeatures2", lambda *_: None):
        ask_for_features(small, chain, c.cast(get_proc, c.c_void_p).value)
    assert not asked and not structs[0].cooperativeMatrix


def test_a_call_that_failed_leaves_commands_for_the_next(small):
    """They were being recorded; the validation layer looks on (validated.py)."""
    small.layer.arm(Fault("vkEndCommandBuffer", 1, -1))
    assert not small.c.za_copy_page(small.cache, 1, 2) and small.error.startswith("vkEndCommandBuffer: out of host")
    small.layer.disarm()
    assert small.c.za_copy_page(small.cache, 1, 2), small.error


@pytest.mark.parametrize(
    ("failing", "first"),
    (
        # nor is it known to have ended
        (("vkQueueSubmit", "vkQueueWaitIdle"), "memory: vkQueueSubmit: out of device memory"),
        (("vkResetFences",), ""),  # the call itself has ended
    ),
)
def test_a_device_that_may_be_lost_is_left_alone(small, failing, first):
    """It is the host's: another za_device of it works."""
    host = small.owner.host(get_proc=small.get_proc)
    places, _ = small.places(za.AttnShape(2, 1, 16), 1, 1)
    assert attempt(small, places) == ""
    lost = Opened()
    lost.c, lost.device = small.c, c.c_void_p(small.c.za_device_from(c.byref(host)))
    lost.attn = c.c_void_p(small.c.za_open(lost.device, c.byref(small.options)))
    lost.cache = c.c_void_p(small.c.za_cache_from(lost.attn, c.byref(small.cache_places)))
    for name in failing:
        small.layer.arm(Fault(name, 1, -2 if first else -4, persistent=True))
    said = [attempt(lost, places) for _ in range(3)]
    assert said[0].startswith(first) and bool(said[0]) == bool(first)
    assert all(line.startswith("lost: ") and "open it again" in line for line in said[1:])
    lost.close()
    small.layer.disarm()
    assert attempt(small, places) == ""


def test_an_object_in_use_is_not_closed(small):
    """It says by what, and stays as it was."""
    assert not small.c.za_close(small.attn)
    assert small.error == "attn: got one with 1 caches and 0 prepared calls, expected none; free them first"
    places, _ = small.places(za.AttnShape(2, 1, 16), 1, 1)
    prepared = c.c_void_p(small.c.za_prepare(small.attn, c.byref(Room(1, 1, 1, 1, 5))))
    assert not small.c.za_device_close(small.device)
    assert small.error == "device: got one with 1 open za_attn, expected none; za_close comes first"
    assert not small.c.za_close(small.attn)
    assert small.error == "attn: got one with 1 caches and 1 prepared calls, expected none; free them first"
    assert attempt(small, places) == ""
    small.c.za_prepared_free(prepared)


def test_every_call_of_vulkan_fails_once(small, device):
    """With a lost device; under the sanitizers the first call of each function with too little memory."""
    every = dict.fromkeys(CODE_OF) if FULL else {-4: None}
    failures(small.c, device.info, {-2: (1,)} if SANITIZED and not FULL else every)


# --- under the sanitizers ------------------------------------------------------------------------------------

# The driver's compiler is four times slower there, so the cases are few without --full.
WITHOUT_KERNELS = "no_good or overlap or null or any_size or fails_once or what_a_call or what_opening or what_scales"
FEW_TESTS = f"not sanitizers and ({WITHOUT_KERNELS} or not_there or default and {FEW[0].split()[0]})"


def test_calls_and_refusals_under_the_sanitizers():
    preload = [compiler_file(name) for name in ("libasan.so", "libubsan.so")]
    if not all(preload):
        pytest.skip("the compiler has no sanitizers")
    told = {"ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": " ".join(preload)}
    files = [Path(__file__).with_name(f"test_c_{name}.py") for name in ("library", "engine")]
    chosen = "not sanitizers" if FULL else FEW_TESTS
    command = [sys.executable, "-m", "pytest", "-qs", "-p", "no:cacheprovider", *files, "-k", chosen]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **told}, cwd=TESTS.parent)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
