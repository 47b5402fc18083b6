"""Keys that rows share are attended once for all of them, and no bit tells."""

from dataclasses import replace

import numpy as np
import pytest
from cache_rows import Twin, together
from support import CPU, FULL

import zinc_attn as za
from zinc_attn.kernels.families import RDNA
from zinc_attn.kernels.tuning import shared_rows
from zinc_attn.planning.call import plan_call
from zinc_attn.planning.inputs import CallFacts, CallOptions, Request
from zinc_attn.planning.items import item_keys
from zinc_attn.planning.layouts import split_rule_layouts

NATIVE = True
PAGE = 64


def family(attention: za.Attention, prefix: int, suffixes: list[int], seed: int = 0) -> list[Twin]:
    """Sequences that share ``prefix`` tokens."""
    root = Twin(attention, seed)
    root.append(prefix)
    twins = [root.fork() for _ in suffixes]
    for twin, n in zip(twins, suffixes, strict=True):
        if n:
            twin.append(n)
    root.sequence.free()
    return twins


@pytest.mark.one_driver
@pytest.mark.parametrize(("text", "dtype"), (("9/3/64", "f16"), ("4/4/64", "q8_0"), *[("2/1/512", "f16")] * FULL))
def test_the_bits_of_the_batch_without_it(any_device: za.Device, text: str, dtype: str) -> None:
    with za.KVCache(any_device, za.AttnShape.parse(text), 1, 16384, dtype, PAGE) as cache:
        attns = [za.Attention(cache), za.Attention(cache, cascade=False), za.Attention(cache, num_splits=2)]
        twins = family(attns[0], 1100, [0, 1, 63, 500, 0, 7], 7)
        twins += family(attns[0], 600, [30, 10], 8)
        twins = [twins[i] for i in np.random.default_rng(7).permutation(8)]
        # the second and third 1 use a recording again, which lavapipe shows with the first shape
        for new in (0, 1, 1, 1, 3) if text == "9/3/64" else (0, 1, 3):
            q_lens = [new or 1] * 8 if new != 3 else [3, 1, 40, 2, 1, 1, 5, 1]
            together(twins, q_lens if new else [0] * 8, q_lens)
            for attn in attns[1:]:
                together(twins, [0] * 8, q_lens, attn)
            assert attns[0].keys_read < attns[1].keys_read


@pytest.mark.parametrize("any_device", [("swiftshader", "vulkan")], indirect=True, ids=["swiftshader"])
def test_the_builds_and_the_rules_of_a_gpu(any_device, monkeypatch):
    """What a card runs, on a device that says it is one: the split rule's states, shared where that pays."""
    facts = {"kind": "discrete", "compute_units": 2, "shared_memory_bytes": 1 << 16, "layout": RDNA}
    monkeypatch.setattr(any_device.runtime, "info", replace(any_device.info, **facts))
    with za.KVCache(any_device, za.AttnShape(8, 1, 160), 1, 16384, "f16", PAGE) as cache:
        attns = za.Attention(cache), za.Attention(cache, num_splits=1, cascade=True)
        twins = family(attns[0], 1100, [64] * 7, 5)
        for attn in attns:
            together(twins, [0] * 7, [1] * 7, attn)
            assert attn.keys_read == 4 * 1024 + 7 * (1164 - 1024)  # four workgroups attend what the seven rows share


COUNTS = (  # shape, requests, prefix and suffix, and the keys read where the rule decides, and where it is told
    ("4/4/64", 8, 512, 64, {None: 512 + 8 * 64, False: 8 * 576}),
    ("4/4/64", 2, 512, 64, {None: 2 * 576, True: 512 + 2 * 64}),  # little is not shared unless asked for
    ("4/4/64", 3, 500, 64, {True: 3 * 564}),  # nor is what is no whole node
    ("4/4/64", 9, 640, 0, {None: 2 * 512 + 9 * 128, True: 512 + 9 * 128}),  # eight rows to a workgroup, or ten
    ("9/3/64", 5, 1024, 100, {None: 3 * 1024 + 5 * 100, True: 1024 + 5 * 100}),
    ("32/8/128", 3, 1100, 64, {None: 3 * 1164}),
    ("32/8/128", 8, 1100, 64, {None: 4 * 1024 + 8 * 140, False: 8 * 1164}),
    ("16/2/256", 2, 700, 64, {None: 2 * 764, True: 512 + 2 * 252}),
    ("16/1/256", 3, 700, 64, {None: 2 * 3 * 764}),  # two workgroups share a KV head
)


@pytest.mark.parametrize(("text", "requests", "prefix", "suffix", "counts"), COUNTS)
def test_keys_are_read_once_where_that_pays(text, requests, prefix, suffix, counts):
    shape, tokens = za.AttnShape.parse(text), prefix + suffix
    pages, shared = np.arange(-(-tokens // PAGE), dtype=np.uint32), prefix // PAGE
    tables = [np.where(pages < shared, pages, pages + 1000 * i).astype(np.uint32) for i in range(requests)]
    facts = CallFacts(CPU, shape, PAGE)
    layout = split_rule_layouts(shape, CPU.compute_units)
    for cascade, keys in counts.items():
        plan = plan_call([Request(1, tokens, 0, table) for table in tables], CallOptions(layout, None, cascade), facts)
        (submission,) = plan.submissions
        assert shape.head_chunks * item_keys(submission.items) + item_keys(submission.shared_items) == keys, cascade


def test_a_workspace_and_a_plan_that_are_used_again(device):
    """Items of a longer call before are attended no more, and a steady call's plan is of the cascade asked for last."""
    with za.KVCache(device, za.AttnShape(4, 2, 64), 1, 2048, "f16", PAGE) as cache:
        attn = za.Attention(cache, split_size=512)
        twin = Twin(attn)
        twin.append(1700)
        for tokens in (1700, 1000):
            twin.truncate(tokens)
            twin.look()
            assert (attn.keys_read, attn.recordings) == (tokens, 1)
        twins = [twin, twin.fork()]
        for cascade in (False, True, False):
            attn.replan(cascade)
            together(twins, [0, 0], [1, 1])
            assert attn.shared is cascade


@pytest.mark.of_drivers  # whose workgroups take four rows
def test_a_chunk_of_one_sequence_shares_its_keys(device: za.Device) -> None:
    with za.KVCache(device, za.AttnShape(4, 2, 64), 1, 4096, "f32", PAGE) as cache:
        twin = Twin(za.Attention(cache))
        twin.append(1400)
        twin.step(100, 100)
        together, alone = 100 // 4 * 1024, sum(n - 1024 for n in range(1401, 1501))
        assert twin.attention.keys_read == together + alone


def test_more_shared_items_than_the_grid_takes(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One split, whose 7 nodes are an item per two rows where they are shared, and one per row where they are not."""
    with za.KVCache(device, za.AttnShape(3, 1, 64), 1, 4096, "f32") as cache:
        twin = Twin(za.Attention(cache))
        twin.append(4000)
        monkeypatch.setattr(device.runtime, "info", replace(device.info, max_workgroups=(64, 48, 64)))
        twin.look(40, za.Attention(cache, num_splits=1))


def test_rows_of_a_workgroup() -> None:
    """Two rows of 8 heads where 50.5 KiB are theirs; fewer vectors where a workgroup has less shared memory."""
    shapes = [za.AttnShape.parse(text) for text in ("16/2/256", "32/8/128", "4/4/64", "16/1/256")]
    assert [[shared_rows(shape, kib << 10) for kib in (64, 48, 26)] for shape in shapes] == [
        [2, 1, 1],
        [4, 4, 2],
        [10, 10, 10],
        [1, 1, 1],
    ]
