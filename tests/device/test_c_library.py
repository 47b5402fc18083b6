"""zinc_attn.h called from outside C: what za_run refuses, what a failure leaves, and the words of docs/c-hosts.md."""

import ctypes as c
import itertools
import re
from dataclasses import replace
from typing import Any, NamedTuple

import c_host
import numpy as np
import pytest
from c_host import (
    DTYPES,
    LIBRARY,
    Call,
    Data,
    Options,
    Request,
    declared,
    library,
    name_for,
    needs_compiler,
    page_words,
    tables,
)
from engine import Failed, Made, Opened, address, subgroups_from
from faults import Layer, shim
from support import has_int8_units, same

import zinc_attn as za
from zinc_attn.cache.rows import encode, stored, stored_scales
from zinc_attn.canonical.arguments import key_ranges
from zinc_attn.canonical.integer import rounded
from zinc_attn.kernels import declarations as kernels
from zinc_attn.kernels.contract import formulas, meanings
from zinc_attn.kernels.matrix import matrix_workgroup
from zinc_attn.kernels.records import ITEM, HeadValues, WorkBuffer
from zinc_attn.kernels.tuning import SHARED_VECTORS, shared_rows
from zinc_attn.limits import MAX_HEADS_PER_WORKGROUP
from zinc_attn.planning.items import item_records
from zinc_attn.planning.splits import plan_splits
from zinc_attn.storage import FP8_UNIT
from zinc_attn.tools.export import evaluate, evaluate_all
from zinc_attn.tools.export.describe import storage_names

SHAPE = za.AttnShape(4, 2, 64)  # that of the page, whose numbers follow
LAYERS, PAGES, PAGE_SIZE, TOKENS, NEW = 2, 12, 64, 129, 2

PAGE_SLOPES = np.exp2(-1.0 - np.arange(4)).astype(np.float32)
PAGE_SCALES = (0.5, 0.25), (1.0, 2.0)  # of K's two heads, and of V's
PAGE_MASK = np.array([[0, 0], [-np.inf, 0]], np.float32)
SLOPES = np.exp2(-2.0 * np.arange(4)).astype(np.float32)
MASK = np.linspace(-3, 3, 2 * TOKENS, dtype=np.float32).reshape(2, TOKENS)  # also as (2, 7), of the last 7 keys
MASK[0, 9] = -np.inf

NATIVE = PROCESSOR_TOO = True
pytestmark = needs_compiler


class Values(NamedTuple):
    """q (rows, q_heads, head_dim), k and v (tokens, kv_heads, head_dim)."""

    q: Any
    k: Any
    v: Any


class Library(Opened):
    """The library, opened for a shape and its types, with a cache.

    scales: float32 (LAYERS, kv_heads), K's and V's, or None.
    """

    def __init__(self, device, dtype="f16", scales=(None, None), shape=SHAPE, pages=PAGES, units=64, arithmetic=0):
        self.shape, self.pages = shape, pages
        self.c = declared(library(c_host.SHIMMED))
        self.device = c.c_void_p(self.c.za_device_open(name_for(device)))
        assert self.device, self.error
        sizes = shape.q_heads, shape.kv_heads, shape.head_dim, 0, False
        self.attn = c.c_void_p(self.open_with(*sizes, DTYPES.index(dtype), 0, arithmetic, PAGE_SIZE, 0, 0, units))
        assert self.attn, self.error
        self.cache = c.c_void_p(self.c.za_cache_make(self.attn, LAYERS, pages, *self.pointers(scales)))
        assert self.cache, self.error

    @staticmethod
    def pointers(arrays):
        return [c.c_void_p(address(x)) for x in arrays]

    def open_with(self, *options):
        """The result of za_open for Options."""
        return self.c.za_open(self.device, c.byref(Options(*options)))

    def run(self, q, k, v, table, tokens, layer=1, **more):
        """out and lse of a call of one request. Arrays in ``more`` are float32."""
        q, k, v, table = (np.ascontiguousarray(x) for x in (q, k, v, np.array(table, np.uint32)))
        out, lse = np.empty(q.shape, np.float32), np.empty(q.shape[:2], np.float32)
        request = Request(tokens, len(table), address(table), len(k), len(q))
        data = Data()
        call = Call(request=c.addressof(request), requests=1)
        data.k, data.v, data.q, data.out, data.lse = map(address, (k, v, q, out, lse))
        for name, value in more.items():
            (of,) = (one for one in (request, call, data) if hasattr(one, name))
            setattr(of, name, address(value) if isinstance(value, np.ndarray) else value)
        if not self.c.za_run(self.cache, layer, c.byref(call), c.byref(data)):
            raise Failed(self.error)
        return out, lse

    def make_cache(self, layers=LAYERS, pages=PAGES, *scales):
        """The error of a cache that is not made."""
        assert not self.c.za_cache_make(self.attn, layers, pages, *self.pointers((*scales, None, None)[:2]))
        return self.error

    def words(self):
        trace = self.c.za_trace(self.attn)
        words = c.cast(trace.work, c.POINTER(c.c_uint32))
        return np.ctypeslib.as_array(words, (trace.work_words,)).copy()


@pytest.fixture(scope="module")
def inputs():
    """q of two rows, and K and V of 129 tokens."""
    rng = np.random.default_rng(3)
    k, v = rng.standard_normal((2, TOKENS, 2, 64)).astype(np.float16)
    return Values(rng.standard_normal((2, 4, 64), np.float32), k, v)


@pytest.fixture(scope="module")
def opened(device):
    """The library, on the device of the package."""
    made = Library(device)
    yield made
    made.close()
    assert Layer(shim()).blocks() == 0


def page_call(opened, inputs, layer=1, encoded=False, **more):
    """The call of the page: the first 127 tokens are there, the last two are new."""
    q, k, v = inputs
    opened.run(q[:0], k[:-NEW], v[:-NEW], (11, 10), TOKENS - NEW, layer, encoded=encoded)
    return opened.run(q, k[-NEW:], v[-NEW:], (11, 10, 9), TOKENS, layer, encoded=encoded, **more)


# --- docs/c-hosts.md -----------------------------------------------------------------------------------------


def words_of_page(section, size):
    """The words of the page's call, with those that a later section of the page fills in where they are 0."""
    result = np.zeros(size, np.uint32)
    for words in map(page_words, ("A call in words", section)):
        assert not np.any((result[: len(words)] != 0) & (words != 0))
        result[: len(words)] |= words
    return result.tolist()


PLAIN = ({}, page_words("A call in words").tolist())
BIASED = ({"alibi": PAGE_SLOPES, "mask": PAGE_MASK}, words_of_page("Slopes and masks", 87))


@pytest.mark.parametrize(("options", "words"), (PLAIN, BIASED), ids=("plain", "biased"))
def test_the_words_of_the_page_are_those_of_the_library(opened, inputs, options, words):
    """And its bits are the oracle's; the calls of two layers differ in one word."""
    found_words, keys = [], 2 * ("mask" in options)
    for layer in range(LAYERS):
        result = page_call(opened, inputs, layer, **options, mask_keys=keys)
        found_words.append(opened.words())
        same(result, za.reference.emulate(*inputs, **options))
    assert found_words[1].tolist() == words
    assert np.flatnonzero(np.not_equal(*found_words)).tolist() == [list(kernels.HEADER).index("first_page")]
    trace = opened.c.za_trace(opened.attn)
    assert (trace.splits, trace.shared) == (1, 0)


@pytest.mark.of_drivers
def test_a_copied_page_is_the_page_in_every_layer(opened, inputs):
    """What the fork's page holds is attended in both layers."""
    q, k, v = inputs
    page_call(opened, inputs, 0)
    before = page_call(opened, inputs, 1)
    assert opened.c.za_copy_page(opened.cache, 9, 8), opened.error
    assert opened.c.za_copy_page(opened.cache, 9, 9), opened.error  # to itself
    for layer in range(LAYERS):
        opened.run(q[:0], -k[-1:], -v[-1:], (11, 10, 9), TOKENS, layer)  # which the fork does not see
        same(opened.run(q, k[:0], v[:0], (11, 10, 8), TOKENS, layer), before)


def test_the_page_s_grids_and_places_follow_from_the_formulas(device):
    kind = "cpu" if device.info.kind == "cpu" else "gpu"
    names = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "latent": 0, "page_size": PAGE_SIZE}
    names["nhd"] = 0
    names |= {**storage_names("f16"), "layers": LAYERS, "pages": PAGES, "layer": 1, "kind": kind}
    names |= evaluate_all(formulas("sizes"), names)
    names |= {"items": 2, "rows": 2, "appends": NEW, "vectors": names["heads_per_workgroup"]}
    grids = {row["kernel"].strip("`").split("_")[0]: row["workgroups"] for row in tables("A call in words")[-1]}
    assert set(grids) == {"append", "attend", "merge"}
    for decl in (kernels.ATTEND, kernels.APPEND_KERNEL, kernels.MERGE):
        assert grids[decl.name] == " × ".join(str(evaluate(count, names)) for count in decl.grid)
    names |= {"token": 128, "kv_head": 1, "dim": 9}
    names["page"] = evaluate(formulas("work.header")["first_page"][0], names) + 9
    places = {row["name"].strip("`"): int(row["value"]) for row in tables("Where a value lies")[0]}
    assert places.pop("page") == names["page"]
    for name, value in places.items():
        names[name] = evaluate(meanings("cache.index")[name], names)
        assert names[name] == value


# --- contexts and layouts -------------------------------------------------------------------------------------

CONTEXTS = (0, 1, 63, 64, 65, 1000, 4224)
OPTIONS = ({}, {"window": 130, "sinks": True}, {"window": 3000, "softcap": 2.0, "sinks": True}, {"softcap": 30.0})


@pytest.mark.of_drivers
def test_contexts_and_layouts_have_the_oracle_s_bits(opened, device, rng):
    """The split rule's and others; awkward values: large scores, subnormals, zeros."""
    shape = za.AttnShape(20, 2, 80)  # two chunks of heads, or one of ten, and lanes without a slice of the values
    q = rng.standard_normal((1, shape.q_heads, shape.head_dim), np.float32)
    q[0, 0, :3] = -0.0, 2.0**-41, -(2.0**-149)  # counts as 0
    k, v = rng.standard_normal((2, max(CONTEXTS), shape.kv_heads, shape.head_dim)).astype(np.float16)
    k[5:9] *= np.float16(60)
    v[::3, 0, :4] = np.float16(6e-8), np.float16(-6e-8), np.float16(-0.0), np.float16(65504)
    host = Library(device, shape=shape, pages=max(CONTEXTS) // PAGE_SIZE, units=8)
    table = rng.permutation(host.pages)
    for n, options in itertools.product(CONTEXTS, OPTIONS):
        last, more = max(n - 1, 0), dict(options)
        if "sinks" in options:
            more["sinks"] = rng.standard_normal(shape.q_heads, np.float32)
        want = za.reference.emulate(q, k[:n], v[:n], **more)
        host.run(q[:0], k[:last], v[:last], table, last)
        for splits in (0, 1, 7):
            same(host.run(q, k[last:n], v[last:n], table, n, splits=splits, **more), want, (n, options, splits))
    host.close()


def test_items_are_the_planner_s(opened, device):
    """So what ``zinc-attn plan`` models is what an engine runs."""
    tokens, units = 70 * 512 + 1, replace(device.info, compute_units=1).split_units
    host = Library(device, pages=-(-tokens // PAGE_SIZE), units=1)
    table, q = np.arange(host.pages), np.zeros((1, 4, 64), np.float32)
    nothing = np.zeros((0, 2, 64), np.float16)
    for n, window in ((1, None), (512, None), (513, None), (9000, 5000), (tokens, None)):
        plan = plan_splits(n, SHAPE, units, 1, window)
        want = item_records(key_ranges(n, 1, True, window), np.array(plan.node_ranges()), keep_empty=plan.states == 1)
        host.run(q, nothing, nothing, table, n, window=window or 0)
        words = host.words()
        items = words[kernels.HEADER_WORDS : words[list(kernels.HEADER).index("row_table")]].view(ITEM)
        want["page_table"] = items["page_table"][0]
        assert np.array_equal(items, want), n
    assert len(items) == min(71, 32 * units)
    host.close()


@pytest.mark.parametrize(
    ("dtype", "options", "noncausal"),
    (
        ("f16", {"sinks": SLOPES}, False),
        ("fp8_e4m3", {"alibi": PAGE_SLOPES}, False),
        ("q8_0", {"softcap": 3.0}, True),
        ("q4_0", {"arithmetic": "integer"}, False),
    ),
)
def test_rows_of_a_prompt_attend_shared_keys_together(opened, device, rng, dtype, options, noncausal):
    """On a device that few workgroups fill: nodes that all rows of an item see, and those behind, a row each."""
    tokens, rows = 1560, 49  # the last rows see a node more, and the last of all is alone
    q = rng.standard_normal((rows, 4, 64), np.float32)
    k, v = rng.standard_normal((2, tokens, 2, 64)).astype(np.float16 if dtype == "f16" else np.float32)
    scales = np.full((2, 2), 0.1, np.float32)
    given = [np.tile(x, (LAYERS, 1)) for x in scales] if dtype == "fp8_e4m3" else (None, None)
    integer = stored_scales(k, v, dtype) if "arithmetic" in options else {}
    host = Library(device, dtype, given, pages=25, units=1, arithmetic=2 if integer else 0)
    kept = stored(k, v, dtype, scales=scales if dtype == "fp8_e4m3" else None)
    want = za.reference.emulate(q, *kept, causal=not noncausal, **options, **integer)
    options = {name: x for name, x in options.items() if name != "arithmetic"}
    table = rng.permutation(25)
    host.run(q[:0], k[:-1], v[:-1], table, tokens - 1)
    same(host.run(q, k[-1:], v[-1:], table, tokens, noncausal=noncausal, **options), want)
    most = MAX_HEADS_PER_WORKGROUP if device.info.kind == "cpu" else SHARED_VECTORS
    each = shared_rows(SHAPE, device.info.shared_memory_bytes, most)
    first = tokens - rows + 1  # keys that the first row sees
    limits = [tokens if noncausal else first + row for row in range(0, rows - 1, each)]
    assert host.c.za_trace(host.attn).shared == sum(limit // 512 for limit in limits)
    host.run(q, k[:0], v[:0], table, tokens, noncausal=noncausal, window=2000, **options)
    assert host.c.za_trace(host.attn).shared == 0
    host.close()


@pytest.mark.parametrize(
    ("dtype", "options"),
    (
        ("q8_0", {"sinks": SLOPES}),
        ("q4_0", {"window": 100}),
        ("q5_0", {"softcap": 300.0, "alibi": PAGE_SLOPES}),
        ("iq4_nl", {"mask": True}),
        ("q8_0", {"noncausal": True}),
    ),
)
def test_many_rows_by_matrix_units(matrix_device, monkeypatch, rng, dtype, options):
    """With a state for each node, in two splits, and with all nodes in a workgroup, where these are enough: rows that
    see no key, one key and several nodes, whose scores are equal, large or awkward to round."""
    if not has_int8_units(matrix_device.info):
        pytest.skip("the device's matrix units have no int8 products of 8 or 16")
    monkeypatch.setenv("ZINC_ATTN_UNITS", "1")
    q = rng.standard_normal((49, 4, 64), np.float32)
    q[::5] *= 25.0
    q[3] = 0
    whole, unit = rounded(q, -1)
    q[1::4, :, 1:] = ((whole + np.float32(0.5)) * unit)[1::4, :, 1:]
    q[2::4, :, 0] = 2 * np.abs(q[2::4]).max(-1) * np.float32(1 - 2.0**-20)  # is rounded up; odd integers beside it
    q[2::4, 0, 0] = np.float32(4 - 2.0**-20)
    k, v = rng.standard_normal((2, 1560, 2, 64), np.float32)
    scales, kept, table = stored_scales(k, v, dtype), stored(k, v, dtype), rng.permutation(25)
    facts = matrix_device.info.matrix, matrix_device.info.kind
    hosts = [Library(matrix_device, dtype, pages=25, units=units, arithmetic=2) for units in (1 << 20, 1)]
    for host in hosts:
        host.run(q[:0], k, v, table, len(k))
    for tokens, rows in ((0, 17), (1, 9), (600, 40), (1560, 49), (1560, 7)):
        more, given = dict(options), {name: x[:tokens] for name, x in scales.items()}
        if more.pop("mask", False) and tokens:
            more["mask"] = rng.standard_normal((rows, tokens), np.float32)
            more["mask"][rng.random((rows, tokens)) < 0.3] = -np.inf
        causal, seen = "noncausal" not in more, [x[:tokens] for x in kept]
        asked = {name: x for name, x in more.items() if name != "noncausal"}
        want = za.reference.emulate(q[:rows], *seen, causal=causal, arithmetic="integer", **asked, **given)
        more |= {"mask_keys": tokens} if "mask" in more else {}
        for host, splits in itertools.product(hosts, (0, 2)):
            got = host.run(q[:rows], k[:0], v[:0], table, tokens, splits=splits, **more)
            same(got, want, (tokens, rows, splits))
            items, walks = host.c.za_trace(host.attn).shared, host is hosts[1] and not splits
            blocks = 0 if rows < 8 else -(-rows // matrix_workgroup(SHAPE, *facts, 2 * rows, True).rows(2))
            assert tokens < 600 or (items == blocks if walks or not blocks else items > blocks), (tokens, rows, splits)
    for host in hosts:
        host.close()


def test_a_scale_of_0_is_the_default_one(opened, inputs):
    """As every other 0 of a call; a negative scale is a scale."""
    for scale, meant in ((0.0, None), (-0.0, None), (-0.125, -0.125), (0.5, 0.5)):
        same(page_call(opened, inputs, scale=scale), za.reference.emulate(*inputs, scale=meant), scale)


# --- storage types -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scaled(opened, device):
    """The library for fp8_e4m3, with the page's scales in layer 1 and others in layer 0."""
    scales = [np.array([[1, 3], of_layer], np.float32) for of_layer in PAGE_SCALES]
    made = Library(device, "fp8_e4m3", scales)
    yield made
    made.close()


def test_scales_of_heads(scaled, inputs):
    """The words of the page, which are those of the package, and bits of the oracle, of floats and of stored bytes."""
    q, k, v = inputs
    k, v, scales = k.astype(np.float32), v.astype(np.float32), np.array(PAGE_SCALES, np.float32)
    want = za.reference.emulate(q, *stored(k, v, "fp8_e4m3", scales=scales))
    codes = [x.view(np.uint8) for x in np.split(encode(k, v, SHAPE, "fp8_e4m3", scales), 2, axis=2)]
    work = WorkBuffer(items=2, rows=2, appends=NEW, tables=3, heads=4)
    HeadValues(scales=scales.reshape(-1) * np.float32(FP8_UNIT)).write(work.heads)
    page = words_of_page("Scales of heads", 83)
    for given, encoded in (((k, v), False), (codes, True)):
        same(page_call(scaled, Values(q, *given), encoded=encoded), want)
        assert scaled.words().tolist() == page
    assert page[63:] == work.heads.view(np.uint32).tolist() and page[15] == work.header["head_table"] == 63


def test_what_scales_refuse(scaled, opened, inputs):
    """By name; a row that its scale does not fit leaves what the cache holds."""
    q, k, v = (x.astype(np.float32) for x in inputs)
    before = page_call(scaled, Values(q, k, v))
    too_large, nan = v[-NEW:].copy(), np.full((NEW, 2, 64), 0x7F, np.uint8)
    too_large[1, 1, 3] = 449 * PAGE_SCALES[1][1]
    at_most = r"^v\[1, 1, 3\]: got 898, expected at most 448 times the head's scale, 2; give a larger one in"
    with pytest.raises(Failed, match=at_most):
        scaled.run(q, k[-NEW:], too_large, (11, 10, 9), TOKENS)
    with pytest.raises(Failed, match=r"^k: got an fp8_e4m3 NaN in token 0, KV head 0, value 0"):
        scaled.run(q, nan, nan, (11, 10, 9), TOKENS, encoded=True)
    same(scaled.run(q, k[:0], v[:0], (11, 10, 9), TOKENS), before)
    good = np.ones((LAYERS, 2), np.float32)
    for bad in (np.nan, 0.0, -1.0, 2.0**52):
        scales = good.copy()
        scales[1, 0] = bad
        want = f"v_scales[1, 0]: got {bad:g}, expected a scale from 2**-31 to 2**51"
        assert scaled.make_cache(LAYERS, PAGES, good, scales) == want
    missing = "k_scales: got NULL, expected (2, 2) scales of layers and KV heads for fp8_e4m3"
    assert scaled.make_cache(LAYERS, PAGES, None, good).startswith(missing)
    needless = "v_scales: got some for f16, expected NULL; only fp8_e4m3 has scales of heads"
    assert opened.make_cache(LAYERS, PAGES, None, good) == needless


def test_a_latent_shape_has_no_v(scaled):
    make, one = Made(scaled.c), np.ones((1, 1), np.float32)
    rows, table = np.zeros((1, 1, 64), np.float32), np.zeros(1, np.uint32)
    options = Options(1, 1, 64, 32, True, DTYPES.index("fp8_e4m3"))
    attn = make("za_open", scaled.device, c.byref(options), free="za_close")

    def cache(*scales):
        return make("za_cache_make", attn, 1, 1, *scaled.pointers(scales), free="za_cache_free")

    part = "v_scales: got some for a latent shape, expected NULL; its V is part of its K"
    with pytest.raises(Failed, match=f"^invalid: {part}$"):
        cache(one, one)
    held, request, x = cache(one, None), Request(1, 1, address(table), 1), address(rows)
    call = Call(request=c.addressof(request), requests=1)
    for request.q_len, data, message in (
        (0, (x, x), "v: got an array, expected NULL; V of a latent shape is part of k"),
        (0, (), "k: got NULL, expected (1, 1, 64) values of fp8_e4m3"),
        (1, (), "q: got NULL, expected (1, 1, 64) floats"),
        (1, (None, None, False, x), "out: got NULL, expected (1, 1, 32) floats"),
    ):
        with pytest.raises(Failed, match=f"^invalid: {re.escape(message)}$"):
            make("za_run", held, 0, c.byref(call), c.byref(Data(*data)))
    make("za_run", held, 0, c.byref(Call()), c.byref(Data()))  # no requests
    make.close()


# --- refusals ------------------------------------------------------------------------------------------------


BEYOND = "mask, mask_slopes: got values and slopes whose products add up to 4.79"


@pytest.mark.parametrize(
    "change,message",
    (
        ({"layer": 2}, "layer: got 2, expected one below 2"),
        ({"tokens": (1 << 24) + 1}, "tokens: got 16777217, expected at most 16777216"),
        ({"tokens": 1}, "new_rows: got 2, expected at most the 1 tokens"),
        ({"table": (11, 12, 9)}, "page_table[1]: got 12, expected a page below 12"),
        ({"pages": 2}, "request[0].pages: got 2, expected at least 3 for 129 tokens in pages of 64"),
        ({"splits": 1 << 24}, "q_len, splits: got 2 and 16777216, expected a product of at most 16777216"),
        ({"scale": np.inf}, "scale: got inf, expected a magnitude from 2**-126 to 2**126, or 0 for 1 / sqrt(head_dim)"),
        ({"scale": np.nan}, "scale: got nan, expected a magnitude"),
        ({"scale": -1e-40}, "scale: got -1e-40, expected a magnitude"),
        ({"scale": -1e30}, "scale = -1e+30 and 0 that biases and masks add, whose scores may overflow"),
        (
            {"scale": 1e20, "softcap": 2.0**-40},
            "scale = 1e+20 and 0 that biases and masks add, whose scores may overflow",
        ),
        ({"mask": MASK - np.float32(2.0**59), "mask_keys": 7, "mask_slopes": SLOPES * np.float32(2.0**59)}, BEYOND),
        ({"softcap": np.nan}, "softcap: got nan, expected 2**-40 to 2**60, or 0 for none"),
        ({"sinks": np.full(4, np.nan, np.float32)}, "sinks[0]: got nan, expected at most 2**60"),
        ({"alibi": SLOPES * np.float32(2.0**62)}, "alibi[0]: got 4.61169e+18"),
        ({"mask_slopes": SLOPES}, "mask_slopes: got slopes for a call whose requests have no mask, expected NULL; "),
        ({"mask": MASK}, "request[0].mask_keys: got 0 with a mask, expected its keys; mask NULL for none"),
        ({"mask_keys": 3}, "mask: got NULL, expected q_len * mask_keys = 6 numbers"),
        ({"mask": MASK, "mask_keys": TOKENS + 1}, "mask_keys: got 130, expected at most the 129 tokens"),
        ({"mask": MASK * np.float32("nan"), "mask_keys": 7}, "mask[0, 0]: got nan, expected at most 2**60, or "),
        ({"mask": -MASK, "mask_keys": 7}, "mask[1, 2]: got inf, expected at most 2**60, or -INFINITY for a key "),
        ({"mask": MASK + np.float32(2.0**61), "mask_keys": 7}, "mask[0, 0]: got 2.30584e+18, expected at most "),
        ({"q": np.nan}, "q[0, 0, 1]: got nan, expected at most 2**60"),
        ({"q": 2.0**61}, "q[0, 0, 1]: got 2.30584e+18, expected at most 2**60"),
        ({"k": np.inf}, "k[0, 0, 1]: got inf, expected a finite value of at most 65504"),
        ({"v": np.nan}, "v[0, 0, 1]: got nan, expected a finite value of at most 65504"),
    ),
)
def test_what_a_call_refuses(opened, inputs, change, message):
    """By name, and without an effect on what the cache holds."""
    q, k, v = (x.copy() for x in inputs)
    before = page_call(opened, inputs)
    arguments = {"q": q, "k": k[-NEW:], "v": v[-NEW:], "table": (11, 10, 9), "tokens": TOKENS}
    for name, value in change.items():
        if name in ("q", "k", "v"):
            arguments[name].reshape(-1)[1] = value
        else:
            arguments[name] = value
    with pytest.raises(Failed, match=re.escape(message)):
        opened.run(**arguments)
    same(opened.run(inputs.q, k[:0], v[:0], (11, 10, 9), TOKENS), before)


@pytest.mark.of_drivers
def test_too_large_a_key_does_not_stay(opened, inputs):
    """The bound on scores counts the keys of calls that succeeded, and those of all."""
    q, k, v = (x.copy() for x in inputs)
    k[-1, 0, 0] = 65504
    with pytest.raises(Failed, match="scores may overflow"):
        opened.run(q, k[-NEW:], v[-NEW:], (11, 10, 9), TOKENS, scale=1e22)
    page_call(opened, inputs, scale=1e22)
    kept, opened.cache = opened.cache, c.c_void_p(opened.c.za_cache_make(opened.attn, LAYERS, PAGES, None, None))
    opened.run(q, k[-NEW:], v[-NEW:], (11,), NEW)
    with pytest.raises(Failed, match="scores may overflow"):
        opened.run(q, k[:0], v[:0], (11,), NEW, scale=1e22)
    opened.c.za_cache_free(opened.cache)
    opened.cache = kept


def test_what_a_cache_and_a_copy_refuse(opened):
    assert not opened.c.za_copy_page(opened.cache, 3, 12)
    assert opened.error == "source, target: got pages 3 and 12, expected pages below 12"
    too_large = opened.make_cache(1000, 1 << 20)
    assert too_large.startswith("layers, pages: got 1000 and 1048576, ")
    assert too_large.endswith("make several caches of fewer layers or pages")


@pytest.mark.parametrize("device", ["vulkan"], indirect=True, scope="session")
def test_a_device_that_is_not_there(device):
    """Its refusal names those that are."""
    names = ", ".join(info.name for info in za.list_devices() if not info.native)
    message = f"invalid: no Vulkan device matches 'none such'; the devices are {names}"
    with pytest.raises(Failed, match=f"^{re.escape(message)}$"):
        Made(declared(library(c_host.SHIMMED)))("za_device_open", b"none such", free="za_device_close")


@pytest.mark.parametrize(
    ("sizes", "dtypes", "message"),
    (
        ((0, 2, 64, 0, False), (2, 0), "got shape 0/2/64, expected numbers from 1 on"),
        ((4, 2, 64, 0, False), (0, 0), "got dtype 0 and v_dtype 0, expected a za_dtype, 1 to 10; v_dtype 0 is K's"),
        ((4, 2, 64, 0, False), (2, 11), "got dtype 2 and v_dtype 11, expected a za_dtype, 1 to 10"),
        ((4, 2, 64, 0, False), (2, -1), "got dtype 2 and v_dtype -1, expected a za_dtype"),
        ((4, 2, 64, 32, True), (2, 4), "got dtype f16 and v_dtype q8_0 for a latent shape, expected one type"),
        ((4, 2, 64, 65, True), (2, 0), "got v_head_dim 65 for a latent shape, expected at most head_dim = 64"),
        ((4, 2, 64, 0, False), (2, 0, 3), "options: got arithmetic 3, expected a za_arithmetic, 0 to 2"),
        ((4, 2, 64, 0, False), (4, 2, 2), "got dtype q8_0 and v_dtype f16 with ZA_INTEGER, expected q8_0, q5_0, q4_0"),
        ((4, 2, 64, 0, False), (2, 0, 0, 96), "options.page_size: got 96, expected a power of two up to 65536"),
        ((4, 2, 64, 0, False), (2, 0, 0, 1 << 17), "options.page_size: got 131072, expected a power of two up to"),
        ((4, 3, 64, 0, False), (2, 0, 0, 1), "got shape 4/3/64/64, expected at most 65535 query heads, a multiple of"),
        ((4, 2, 64, 577, False), (2, 0, 0, 1, 128), "got shape 4/2/64/577, expected at most 65535 query heads, a"),
        ((4, 2, 64, 0, False), (2, 0, 0, 1, 126, 128), "k_stride: got 126, expected a multiple of 2 from 128, the"),
        ((4, 2, 64, 0, False), (2, 4, 0, 1, 128), "v_stride: got 0, expected a multiple of 2 from 68, the bytes of a"),
        ((4, 2, 64, 0, False), (2, 0, 0, 1, 128, 1 << 17), "v_stride: got 131072, expected a multiple of 2 from 128"),
        ((4, 2, 64, 32, True), (2, 0, 0, 1, 128, 64), "v_stride: got 64 for a latent shape, expected 0, since its V"),
    ),
)
def test_what_opening_refuses(opened, sizes, dtypes, message):
    assert not opened.open_with(*sizes, *dtypes)
    assert message in opened.error


@pytest.mark.parametrize("device", ["vulkan"], indirect=True, scope="session")
@pytest.mark.parametrize("size", (32, 16))
def test_subgroups_of_a_layout_are_asked_for_where_they_are_offered(device, inputs, size):
    """And only the size: nothing rests on full subgroups."""
    with subgroups_from(Layer(shim()), size) as asked:
        host = Library(device)
        assert host.c.za_device_info(host.device).wave32
        same(page_call(host, inputs), za.reference.emulate(*inputs))
        host.close()
    assert asked[0] == (1, 0) and asked[1:] == [(size, 0)] * len(asked[1:]) and len(asked) > 3


@pytest.mark.parametrize(("kernel", "arithmetic"), (("primitives", 0), ("multiply_add", 1)))
def test_a_driver_that_computes_other_bits_is_refused(device, tmp_path, monkeypatch, kernel, arithmetic):
    """Which none here does: the library expects another word than the device gives."""
    for name in ("zinc_contract.h", "zinc_contract.c"):
        text = (c_host.contract() / name).read_text()
        text = re.sub(rf"(words_{kernel}_results\[\] = {{\n    0x)........", r"\g<1>00000001", text)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(c_host, "contract", lambda: tmp_path)
    make = Made(declared(library(LIBRARY)))
    opened = make("za_device_open", device.info.name.encode(), free="za_device_close")
    with pytest.raises(Failed, match=f"unsupported: the driver computes result 0 of the kernel {kernel} as "):
        make("za_open", opened, c.byref(Options(4, 2, 64, dtype=2, arithmetic=arithmetic)))
    make.close()
