"""The C library as a part of an engine: the engine's device, buffers and command buffers, with the oracle's bits."""

from __future__ import annotations

import ctypes as c

import numpy as np
import pytest
from c_host import DTYPES, LIBRARY, library, make_case, needs_compiler
from engine import Engine, Options, Owner, Room, call_of
from support import DRIVERS, same

import zinc_attn as za
from zinc_attn.cache.rows import encode, stored
from zinc_attn.storage import storage_types
from zinc_attn.tools import export

LAYERS, TOKENS, SLOTS = 3, 640, 2
ON_VULKAN = [driver for driver in DRIVERS if driver[1] == "vulkan"]
SLOPES = np.exp2(-1.0 - np.arange(16)).astype(np.float32)
# Shape, types, page size, whether lse lies apart from out, options of the oracle: sizes that are filled up, so that q
# and the results are copied; a latent shape; scales of heads; pages of a token in any order
CASES = [
    ("9/3/64", "f16", 16, False, {}),
    ("4/2/64", "f16", 1, False, {}),
    ("4/2/72/40", "f32", 16, False, {"window": 70, "softcap": 5.0}),
    ("6/2/96/64/latent", "q8_0", 16, True, {"sinks": True}),
    ("4/2/64", "fp8_e4m3", 32, True, {"alibi": True}),
    ("4/2/64", "bf16", 16, True, {"arithmetic": "fused"}),
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

    def __init__(self, engine, shape, dtype, page_size, options, rng, scales=None):
        self.engine, self.shape, self.dtype, self.page_size, self.scales = engine, shape, dtype, page_size, scales
        self.rng, self.free = rng, rng.permutation(TOKENS // page_size).tolist()
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
            yield encode(k, v, shape, self.dtype, scales).reshape(-1), q

    def call(self, requests):
        names = {"window", "softcap", "sinks", "alibi"}
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
@pytest.mark.parametrize(("shape", "dtype", "page_size", "apart", "options"), CASES)
def test_a_recorded_call_has_the_oracle_s_bits(
    loaded, any_device, rng, tmp_path, shape, dtype, page_size, apart, options
):
    """Three layers in one submission of the engine's, two slots, steps of other lengths; and the same by za_run_at."""
    if "SwiftShader" in any_device.info.name and shape != "4/2/72/40":  # which compiles everything anew
        pytest.skip("one shape on SwiftShader")
    shape = za.AttnShape.parse(shape)
    export.export(tmp_path, [shape], dtype=dtype, page_size=page_size)
    scales = np.tile(rng.uniform(0.02, 0.2, (1, 2, shape.kv_heads)).astype(np.float32), (LAYERS, 1, 1))
    scales = scales if "fp8" in dtype else None
    types = [DTYPES.index(kind.name) for kind in storage_types(dtype)]
    sizes = shape.q_heads, shape.kv_heads, shape.head_dim, shape.v_head_dim, shape.latent
    owner = Owner(any_device.info, 8 << 20)
    arithmetic = int(options.get("arithmetic") == "fused")
    engine = Engine(
        loaded,
        owner,
        tmp_path,
        Options(str(tmp_path).encode(), *sizes, *types, arithmetic),
        LAYERS,
        TOKENS // page_size,
        scales,
    )
    rows, new_rows = 4, 6
    flags = options.get("sinks", False), "softcap" in options, options.get("alibi", False)
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
    run = Run(engine, shape, dtype, page_size, options, rng, scales)
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
