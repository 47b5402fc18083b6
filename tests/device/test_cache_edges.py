"""Calls at the edges of a submission, a grid, a window; rows side by side, odd strides, tokens taken back."""

import numpy as np
import pytest
from cache_rows import SMALL, Twin, new_q, new_rows, together
from support import differing, same

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.cache import rows
from zinc_attn.decode import runner
from zinc_attn.planning import call, inputs
from zinc_attn.planning.splits import SplitPlan, plan_splits

NATIVE = True
STATE_BYTES = 4 * SMALL.q_heads * (SMALL.head_dim + 2)


@pytest.mark.both_dispatchers
def test_steady_decode_of_a_batch_in_several_blocks(device, monkeypatch):
    """Every block but the first attends rows that the first submission appended."""
    monkeypatch.setattr(inputs, "SCRATCH_BYTES", 3 * STATE_BYTES)
    monkeypatch.setattr(runner, "_KEPT", 0)  # plans
    planned = []
    with za.KVCache(device, SMALL, 1, 4096, page_size=64) as cache:
        attention = za.Attention(cache, observer=lambda submission, _: planned.append(len(submission.rows)))
        twins = [Twin(attention, seed) for seed in range(3)]
        for twin in twins:
            twin.append(600)
        for count in (1, 1, 1, 2, 1):
            together(twins, [count] * 3)
    assert planned == [1] * 18  # a row has two states, of which a block holds three


def test_rounding_a_bucket_never_goes_beyond_a_limit(device, monkeypatch):
    """1,500 rows over 3 states each: the power of two above would be beyond the scratch that one call may have."""
    monkeypatch.setattr(inputs, "SCRATCH_BYTES", 5000 * STATE_BYTES)
    planned = []
    with za.KVCache(device, SMALL, 1, 2048, page_size=64) as cache:
        Twin(za.Attention(cache, observer=lambda submission, _: planned.append(submission))).step(1500, 1500)
    assert all(submission.key.states <= 5000 for submission in planned)


def test_a_prompt_longer_than_one_append(device, monkeypatch):
    monkeypatch.setattr(call, "UPLOAD_ROWS", 100)
    with za.KVCache(device, SMALL, 1, 512, page_size=64) as cache:
        twin = Twin(za.Attention(cache))
        twin.step(300, 2)
        monkeypatch.setattr(call, "UPLOAD_ROWS", 1)
        both = [twin, twin.fork()]
        for _ in range(3):  # a batch of more new rows than that, step after step
            together(both, (1, 1))


@pytest.mark.parametrize("dtype", ("f32", "f16", "bf16", "q8_0"))
def test_rows_in_any_memory_order(device, rng, dtype):
    k = np.rint(rng.standard_normal((70, SMALL.kv_heads, SMALL.head_dim)) * 4).astype(np.float16)
    q = new_q(rng, 1, SMALL)
    want = reference.emulate(q, *rows.stored(k, -k, dtype))[0]
    with za.KVCache(device, SMALL, 1, 256, dtype=dtype, page_size=64) as cache:
        for order in (np.asfortranarray, lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2), lambda x: x[::-1][::-1]):
            sequence, attention = cache.new_sequence(), za.Attention(cache)
            attention(np.asfortranarray(q), sequence, 0, k=order(k)[:69], v=order(-k)[:69])
            assert not differing(attention(q, sequence, 0, k=order(k)[69], v=order(-k)[69]), want)
            sequence.free()


def test_the_last_tokens_are_taken_back(device):
    """Speculative tokens: what is left has the bits of a sequence that never had them, within a step, too."""
    for make, devices in ((za.KVCache, device), (za.ShardedKVCache, [device] * 2)):
        with make(devices, SMALL, 2, 1024, page_size=16) as cache:
            twin = Twin((za.Attention if make is za.KVCache else za.ShardedAttention)(cache))
            twin.append(60)
            twin.sequence.drop_last(0)
            twin.sequence.drop_last(3)
            cache.append(twin.sequence, 0, *new_rows(twin.rng, 2, SMALL, "f16"))  # layer 1 is behind
            twin.sequence.drop_last(5)
            assert list(twin.sequence.lengths) == [52, 52]
            twin.truncate(52)
            twin.look()
            for n in (-1, 53, True, 2.5, None):
                with pytest.raises(errors.ArgumentError, match=f"^n: got {n}, expected"):
                    twin.sequence.drop_last(n)
            twin.sequence.drop_last(52)
            assert len(twin) == 0
            twin.sequence.free()
            with pytest.raises(errors.ClosedError, match=r"^sequence: used after free\(\)$"):
                twin.sequence.drop_last(1)
        with pytest.raises(errors.ClosedError, match=r"used after close\(\)$"):
            twin.sequence.drop_last(1)


@pytest.mark.parametrize("window", (None, 100))
@pytest.mark.parametrize("rows", (2, 5, 8, 70))
@pytest.mark.parametrize("shape", ("3/1/64", "4/1/128"))
def test_rows_side_by_side_as_on_a_gpu(device: za.Device, shape: str, rows: int, window: int | None) -> None:
    """A split per node: in one call, with keys that rows share attended together or apart, and each row on its own."""
    parsed = za.AttnShape.parse(shape)

    def plan(tokens: int, q_len: int, window: int | None) -> SplitPlan:
        return plan_splits(tokens, parsed, 64, q_len, window)

    options = {"plan": plan, "window": window}
    with za.KVCache(device, parsed, 1, 4096, "f16", 256) as cache:
        twin = Twin(za.Attention(cache, **options), window=window)
        twin.append(1200)
        for cascade in (None, True, False):
            twin.look(rows, za.Attention(cache, cascade=cascade, **options))
        twin.look()
        twin.truncate(1201 - rows)
        twin.look()


@pytest.mark.parametrize("window", (1, 130))
def test_a_window_reads_only_its_keys(device: za.Device, window: int) -> None:
    """Keys outside it are not touched: a cache full of NaN there does not show."""
    shape = za.AttnShape(2, 1, 64)
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((4000, 1, 64), np.float32) for _ in "kv")
    q = rng.standard_normal((2, 64), np.float32)
    want = reference.emulate(q, k, v, window=window)
    begin = (4000 - window) // 64 * 64
    with za.KVCache(device, shape, 1, 4096, "f32") as cache:
        sequence = cache.new_sequence()
        cache.append(sequence, 0, k, v)
        cache.mover.append(
            0, np.arange(begin), sequence.table(), rows.encode(*[np.full_like(k[:begin], np.nan)] * 2, shape, "f32")
        )
        for layout in ({"num_splits": 2}, {}):
            same(za.Attention(cache, window=window, **layout)(q, sequence, 0, return_lse=True), want)
