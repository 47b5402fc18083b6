"""Keys that rows share are attended once for all of them, and no bit tells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import DRIVERS, FULL, differing

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.cache import rows
from zinc_attn.canonical.constants import KEYS_PER_LEAF
from zinc_attn.kernels.tuning import shared_rows
from zinc_attn.planning import inputs
from zinc_attn.planning.sharing import SharedKeys, shared_leaves
from zinc_attn.planning.splits import plan_splits, sharing_pays

PAGE = 64


def family(cache: za.KVCache, prefix: int, suffixes: list[int], rng: Any) -> tuple[list[Any], list[Any]]:
    """Sequences that share ``prefix`` tokens, and what each holds, (2, tokens, kv_heads, head_dim) float16."""
    shape = cache.shape
    trunk = rng.standard_normal((2, prefix, shape.kv_heads, shape.head_dim)).astype(np.float16)
    root = cache.new_sequence()
    cache.append(root, 0, *trunk)
    seqs, held = [], []
    for n in suffixes:
        seq, kv = root.fork(), trunk
        if n:
            more = rng.standard_normal((2, n, shape.kv_heads, shape.head_dim)).astype(np.float16)
            cache.append(seq, 0, *more)
            kv = np.concatenate([trunk, more], axis=1)
        seqs.append(seq)
        held.append(kv)
    root.free()
    return seqs, held


def keys_by_hand(
    shape: za.AttnShape, requests: int, prefix: int, suffix: int, device: tuple[int, str], cascade: bool | None = None
) -> int:
    """Keys of one KV head that a batch of ``family`` reads in one submission. device: compute units and kind."""
    plan = plan_splits(prefix + suffix, shape, device[0], kind=device[1])
    shared = prefix // PAGE * PAGE if suffix else prefix
    shared -= shared % plan.unit_keys
    each = min(shared_rows(device[1], shape, cascade is True), 1 << (requests - 1).bit_length())
    groups = -(-requests // each)
    saved, items = (requests - groups) * shared // KEYS_PER_LEAF, groups * shared // plan.unit_keys
    if cascade is False or each == 1 or not (cascade or sharing_pays(saved, items, shape, *device)):
        shared = 0
    return groups * shared + requests * (prefix + suffix - shared) * shape.head_chunks


# SwiftShader compiles every kernel anew, and a dispatcher does not know a shape.
TABLE = [
    pytest.param(driver, text, dtype, id=f"{'-'.join(driver)}-{text}-{dtype}")
    for driver in DRIVERS
    for text, dtype in (("9/3/64", "f16"), ("4/4/64", "q8_0"), ("2/1/512", "f16"))
    if FULL or driver == ("default", "vulkan") or text == "9/3/64"
]


@pytest.mark.parametrize(("any_device", "text", "dtype"), TABLE, indirect=["any_device"])
def test_the_bits_of_the_batch_without_it(any_device: za.Device, text: str, dtype: str) -> None:
    shape, rng = za.AttnShape.parse(text), np.random.default_rng(7)
    slow = "SwiftShader" in any_device.info.name  # which takes a second for 10 million products
    few = slow and not FULL
    with za.KVCache(any_device, shape, 1, 16384, dtype, PAGE) as cache:
        seqs, held = family(cache, 600 if few else 1100, [0, 1, 63, 70 if few else 500, 0, 7], rng)
        others, other_held = family(cache, 600, [30, 10], rng)
        order = rng.permutation(8)
        seqs, held = [[*seqs, *others][i] for i in order], [[*held, *other_held][i] for i in order]
        attns = [za.Attention(cache), za.Attention(cache, cascade=False), za.Attention(cache, num_splits=2)]
        # the second and third 1 use a recording again, which lavapipe shows with the first shape
        for new in (0, 1, 1, 1, 3) if FULL or (text, slow) == ("9/3/64", False) else (0, 1, 3):
            q_lens = [new or 1] * 8 if new != 3 else [3, 1, 4 if slow else 40, 2, 1, 1, 5, 1]
            fresh = [rng.standard_normal((2, n if new else 0, shape.kv_heads, shape.head_dim)) for n in q_lens]
            fresh = [x.astype(np.float16) for x in fresh]
            qs = [rng.standard_normal((n, shape.q_heads, shape.head_dim)).astype(np.float32) for n in q_lens]
            held = [np.concatenate(pair, axis=1) for pair in zip(held, fresh, strict=True)]
            columns = ([x[0] for x in fresh], [x[1] for x in fresh]) if new else (None, None)
            results = [attns[0](qs, seqs, 0, *columns, return_lse=True)]
            read = attns[0].keys_read
            results += [attn(qs, seqs, 0, return_lse=True) for attn in attns[1:]]
            assert read < attns[1].keys_read
            for i, kv in enumerate(held):
                want = reference.emulate(qs[i], *rows.stored(*kv, dtype))
                for outs, lses in results:
                    assert not differing(outs[i], want[0]) and not differing(lses[i], want[1]), (new, i)


WIDE = [
    pytest.param(driver, text, dtype, id=f"{'-'.join(driver)}-{text}-{dtype}")
    for driver in DRIVERS
    for text, dtype in (("16/2/256", "f16"), ("12/2/256", "q8_0"), ("8/1/512", "f16"), ("3/3/192", "f16"))
    if FULL or (driver == ("default", "vulkan") and text == "16/2/256")  # SwiftShader: GPU_BUILDS
]


@pytest.mark.parametrize(("any_device", "text", "dtype"), WIDE, indirect=["any_device"])
def test_more_sums_than_registers_hold(any_device: za.Device, text: str, dtype: str) -> None:
    """Several passes over V, for states of leaves and of nodes; the batch's third workgroup has a row too few."""
    shape, rng = za.AttnShape.parse(text), np.random.default_rng(3)
    with za.KVCache(any_device, shape, 1, 16384, dtype, PAGE) as cache:
        seqs, held = family(cache, 1100, [0, 1, 63, 500, 0], rng)
        stored = [rows.stored(*kv, dtype) for kv in held]
        attns = [za.Attention(cache, cascade=True, **layout) for layout in ({}, {"num_splits": 2})]
        alone = za.Attention(cache, cascade=False)
        for scale in (1, 40):  # the second call finds the states of the first
            qs = [rng.standard_normal((1, shape.q_heads, shape.head_dim)).astype(np.float32) * scale for _ in seqs]
            alone(qs, seqs, 0)
            want = [reference.emulate(q, *kv) for q, kv in zip(qs, stored, strict=True)]
            for attn in attns:
                outs, lses = attn(qs, seqs, 0, return_lse=True)
                assert attn.keys_read < alone.keys_read
                for out, lse, (o, s) in zip(outs, lses, want, strict=True):
                    assert not differing(out, o) and not differing(lse, s)


GPU_BUILDS = [
    pytest.param((driver, "vulkan"), text, id=f"{driver}-{text}")
    for driver, text in (("default", "16/2/256"), ("swiftshader", "16/2/256"), ("swiftshader", "9/3/64"))
    if FULL or (driver, text) == ("swiftshader", "16/2/256")  # lavapipe compiles them for half a minute
]


@pytest.mark.parametrize(("any_device", "text"), GPU_BUILDS, indirect=["any_device"])
def test_the_builds_and_the_rules_of_a_gpu(any_device: za.Device, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a card runs, on a device that says it is one: the split rule's states, shared where that pays."""
    info = replace(any_device.info, kind="discrete", compute_units=2)
    monkeypatch.setattr(any_device.runtime, "info", info)
    shape, rng = za.AttnShape.parse(text), np.random.default_rng(5)
    prefix = 2100 if FULL else 1100
    with za.KVCache(any_device, shape, 1, 16384, "f16", PAGE) as cache:
        seqs, held = family(cache, prefix, [64] * 7, rng)
        qs = [rng.standard_normal((1, shape.q_heads, shape.head_dim)).astype(np.float32) for _ in seqs]
        together, alone = (keys_by_hand(shape, 7, prefix, 64, (2, "discrete"), how) for how in (None, False))
        for attn in (za.Attention(cache), za.Attention(cache, num_splits=1, cascade=True)):  # leaves; nodes
            outs, lses = attn(qs, seqs, 0, return_lse=True)
            assert attn.num_splits or attn.keys_read == together < alone
            for q, kv, out, lse in zip(qs, held, outs, lses, strict=True):
                want = reference.emulate(q, *kv)
                assert not differing(out, want[0]) and not differing(lse, want[1])


COUNTS = (  # requests of 64 tokens each behind a prefix; the keys read: as the rule says, and where it is told
    (8, 512, {None: 512 + 8 * 64, False: 8 * (512 + 64)}),  # the lab's count: 7 times 512 rows fewer
    (3, 320, {None: 3 * 384, True: 320 + 3 * 64}),  # little is not shared unless asked for
)


@pytest.mark.parametrize(("requests", "prefix", "counts"), COUNTS)
def test_keys_are_read_once_where_that_pays(
    device: za.Device, requests: int, prefix: int, counts: dict[bool | None, int]
) -> None:
    with za.KVCache(device, za.AttnShape(4, 4, 64), 1, 4096, "f16", PAGE) as cache:
        seqs, _ = family(cache, prefix, [64] * requests, np.random.default_rng(0))
        for cascade, count in counts.items():
            attn = za.Attention(cache, cascade=cascade)
            attn([np.ones((4, 64), np.float32)] * requests, seqs, 0)
            assert attn.keys_read == count, cascade


BY_HAND = (  # shape, requests, prefix, suffix
    *(("9/3/64", 5, 1024, 100), ("32/8/128", 3, 1100, 64), ("32/8/128", 8, 1100, 64)),
    *(("16/2/256", 2, 700, 64), ("16/1/256", 3, 700, 64), ("4/4/64", 9, 640, 0)),
)


@pytest.mark.parametrize(("text", "requests", "prefix", "suffix"), BY_HAND)
def test_keys_are_those_counted_by_hand(device: za.Device, text: str, requests: int, prefix: int, suffix: int) -> None:
    shape, info = za.AttnShape.parse(text), device.info
    with za.KVCache(device, shape, 1, 16384, "f16", PAGE) as cache:
        seqs, _ = family(cache, prefix, [suffix] * requests, np.random.default_rng(0))
        for cascade in (None, False, *([True] if text == "16/2/256" else [])):  # its kernels are there
            attn = za.Attention(cache, cascade=cascade)
            attn([np.ones((shape.q_heads, shape.head_dim), np.float32)] * requests, seqs, 0)
            size = (info.compute_units, info.kind)
            assert attn.keys_read == keys_by_hand(shape, requests, prefix, suffix, size, cascade)


@pytest.mark.both_dispatchers
@pytest.mark.parametrize("cascade", [True, False])
def test_keys_of_several_submissions_are_counted(
    device: za.Device, cascade: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submissions of 2 rows, all of one bucket."""
    with za.KVCache(device, za.AttnShape(4, 4, 64), 1, 4096, "f16", PAGE) as cache:
        seqs, _ = family(cache, 128, [10, 20, 30, 40, 50, 60], np.random.default_rng(0))
        monkeypatch.setattr(inputs, "SCRATCH_BYTES", 4 * 4 * 66 * 6)  # 6 states
        attn = za.Attention(cache, cascade=cascade, num_splits=1000)
        attn([np.ones((4, 64), np.float32)] * 6, seqs, 0)
        assert (attn.keys_read, attn.shared) == (6 * 128 + 210 - 3 * 128 * cascade, cascade)
        attn([], [], 0)
        assert (attn.keys_read, attn.shared) == (0, False)


def test_a_chunk_of_one_sequence_shares_its_keys(device: za.Device) -> None:
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((1500, 2, 64)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((100, 4, 64)).astype(np.float32)
    with za.KVCache(device, za.AttnShape(4, 2, 64), 1, 4096, "f32", PAGE) as cache:
        attn, seq = za.Attention(cache), cache.new_sequence()
        cache.append(seq, 0, k[:1400], v[:1400])
        got = attn(q, seq, 0, k[1400:], v[1400:])
        assert not differing(got, reference.emulate(q, k, v)[0])
        together = sum(-(-rows // 4) * 64 * leaves for rows, leaves in ((100, 21), (93, 1), (29, 1)))
        alone = sum(n - 64 * (21 + (n >= 1408) + (n >= 1472)) for n in range(1401, 1501))
        assert attn.keys_read == together + alone


def test_more_shared_items_than_the_grid_takes(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One split, whose 5 nodes are an item per two rows where they are shared, and one per row where they are not."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((2600, 1, 64)).astype(np.float32)
    q = rng.standard_normal((40, 3, 64)).astype(np.float32)
    with za.KVCache(device, za.AttnShape(3, 1, 64), 1, 4096, "f32") as cache:
        seq = cache.new_sequence()
        cache.append(seq, 0, k, k)
        monkeypatch.setattr(device.runtime, "info", replace(device.info, max_workgroups=(64, 64, 64), kind="cpu"))
        attn = za.Attention(cache, num_splits=1)
        assert not differing(attn(q, seq, 0), reference.emulate(q, k, k)[0])


@pytest.mark.both_dispatchers
def test_a_whole_leaf_that_is_cut_by_a_token(device: za.Device) -> None:
    """Attend only: the sequences' leaves stay as many, and the last one is shared no more."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((128, 2, 64)).astype(np.float32)
    q = rng.standard_normal((4, 64)).astype(np.float32)
    with za.KVCache(device, za.AttnShape(4, 2, 64), 1, 1024, "f32", 256) as cache:
        attn, seq = za.Attention(cache, cascade=True), cache.new_sequence()
        cache.append(seq, 0, k, k)
        other = seq.fork()
        for tokens in (128, 127, 126, 64, 63):
            seq.truncate(tokens)
            got = attn([q, q], [seq, other], 0)
            for out, n in zip(got, (tokens, 128), strict=True):
                assert not differing(out, reference.emulate(q, k[:n], k[:n])[0]), (tokens, n)


def test_what_rows_share() -> None:
    a = np.array([5, 6, 7, 8, 9, 10], np.uint32)
    b = np.array([5, 6, 7, 8, 1, 2], np.uint32)
    c = np.array([5, 6, 3], np.uint32)
    tables = [a, a, b, c]
    limits, units = np.array([1500, 1501, 1490, 700]), np.ones(4, np.int64)
    shared, alone = shared_leaves(limits, units, tables, 256)
    assert shared == [SharedKeys(0, 2, 16, 23), SharedKeys(0, 3, 8, 16), SharedKeys(0, 4, 0, 8)]
    assert alone.tolist() == [23, 23, 16, 8]
    shared, alone = shared_leaves(limits, np.array([1, 1, 8, 8]), tables, 256)
    assert shared == [SharedKeys(0, 2, 0, 23), SharedKeys(2, 2, 0, 8)]
    assert alone.tolist() == [23, 23, 8, 8]
    assert shared_leaves(limits[:1], units[:1], tables[:1], 256) == ([], np.zeros(1, np.int64))


def test_arguments_that_cannot_be(device: za.Device) -> None:
    k = np.ones((1, 4, 64), np.float32)
    with za.KVCache(device, za.AttnShape(4, 4, 64), 1, 1024, "f32", PAGE) as cache:
        with pytest.raises(za.errors.ArgumentError, match=r"^cascade: got 'no', expected True, False or None$"):
            za.Attention(cache, cascade="no")  # type: ignore[arg-type]
        with pytest.raises(za.errors.ArgumentError, match=r"^cache: got Device, expected a KVCache"):
            za.Attention(device)  # type: ignore[arg-type]
        attn, seq = za.Attention(cache), cache.new_sequence()
        with pytest.raises(za.errors.ArgumentError, match=r"^seq: items 0 and 1 are the same sequence"):
            attn([k[0], k[0]], [seq, seq], 0, [k, k], [k, k])
        attn(k[0], seq, 0, k, k)
        both = attn([k[0], -k[0]], [seq, seq], 0)
        assert len(seq) == 1 and not differing(both[0], k[0]) and not differing(both[1], k[0])
