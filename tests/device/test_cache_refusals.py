"""What a KVCache, its sequences and its Attention refuse, in which words, and that nothing has changed then.

Which rows are refused is in tests/host/test_dtypes.py and test_blocks.py; want of room in host/test_pages.py, and of
any call in test_fuzz.py.
"""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
from cache_rows import SMALL, new_rows
from page_tables import check_counts, largest
from support import same

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.cache.pages import StepError

NATIVE = True


def k_(n: int = 1, dtype: Any = np.float16, heads: int = 2) -> Any:
    return np.ones((n, heads, 64), dtype)


def q_(n: int = 1, heads: int = 4) -> Any:
    return np.ones((n, heads, 64), np.float32)


class Scene:
    """A float16 cache of 7 pages of 16: ``seq`` has 20 tokens, ``ahead`` has 3 in layer 0 and 2 in layer 1."""

    def __init__(self, device: za.Device) -> None:
        self.cache = za.KVCache(device, SMALL, 2, 100, "f16", 16, max_sequences=3)
        self.other = za.KVCache(device, SMALL, 2, 16, "f16", 16)
        self.attn = za.Attention(self.cache)
        self.seq, self.ahead = self.cache.new_sequence(), self.cache.new_sequence()
        self.foreign, self.gone = self.other.new_sequence(), self.cache.new_sequence()
        self.gone.free()
        rng = np.random.default_rng(0)
        for layer in (0, 1):
            self.cache.append(self.seq, layer, *new_rows(rng, 20, SMALL, "f16"))
            self.cache.append(self.ahead, layer, *new_rows(rng, 2, SMALL, "f16"))
        self.cache.append(self.ahead, 0, *new_rows(rng, 1, SMALL, "f16"))

    def state(self) -> Any:
        lives = (self.seq, self.ahead)
        check_counts(self.cache.pool, [s.pages for s in self.cache.sequences])
        bits = [x.tobytes() for s in lives for layer in (0, 1) for x in self.attn(q_(), s, layer, return_lse=True)]
        return bits, self.cache.free_tokens, [s.lengths for s in lives], len(self.cache.sequences), largest(self.cache)

    def close(self) -> None:
        self.cache.close()
        self.other.close()


FREED = "sequence: used after free()"
FOREIGN = "seq: got a sequence of another cache, expected one of this cache"
AHEAD = (
    "layer 0: got 1 tokens at length 3, expected none yet, layer 1 has length 2; append 1 to every layer that is "
    "behind first, or truncate(2)"
)
EARLY = (
    "q: got {} rows for {} keys, {} of them before the first key, expected at least as many keys as rows; append k and "
    "v first, or give allow_empty=True, with which such rows have an output of 0"
)
BAD: tuple[tuple[type[Exception], str, Callable[[Scene], Any]], ...] = (
    (errors.ClosedError, FREED, lambda s: s.cache.append(s.gone, 0, k_(), k_())),
    (errors.ClosedError, FREED, lambda s: s.attn(q_(), s.gone, 0)),
    (errors.ClosedError, FREED, lambda s: s.gone.drop_last(1)),
    (errors.ClosedError, FREED, lambda s: s.gone.save("/nowhere/at all")),
    (errors.ArgumentError, FOREIGN, lambda s: s.attn(q_(), s.foreign, 0)),
    (errors.ArgumentError, FOREIGN, lambda s: s.cache.append(s.foreign, 0, k_(), k_())),
    (errors.ArgumentError, "seq: got str, expected a Sequence of this cache",
     lambda s: s.cache.append("seq", 0, k_(), k_())),
    (errors.ArgumentError,
     "seq: items 0 and 1 are the same sequence, expected each once where k and v are given; fork() it",
     lambda s: s.attn([q_(), q_()], [s.seq, s.seq], 0, k=[k_(), k_()], v=[k_(), k_()])),
    (errors.ArgumentError, "layer: got 2, expected an int from 0 to 1", lambda s: s.attn(q_(), s.seq, 2)),
    (errors.ArgumentError, "window: got 3 entries, expected an int, None or one per layer (2)",
     lambda s: za.Attention(s.cache, window=[1, 2, 3])),
    (errors.ArgumentError, "sinks: got 1 rows, expected (4,) or a row per layer (2)",
     lambda s: za.Attention(s.cache, sinks=np.zeros((1, 4), np.float32))),
    (errors.ArgumentError, "layer: got an array, expected an int, which comes after seq and before k and v",
     lambda s: s.attn(q_(), k_(), k_())),
    (errors.ArgumentError,
     "seq: got ndarray, expected a Sequence or a list of them; the order is (q, seq, layer, k=, v=)",
     lambda s: s.attn(q_(), k_(), 0)),
    (errors.ArgumentError, "v: got None, expected both k and v, or neither", lambda s: s.attn(q_(), s.seq, 0, k=k_())),
    (errors.ArgumentError, "k: got None, expected both k and v, or neither", lambda s: s.attn(q_(), s.seq, 0, v=k_())),
    (errors.ArgumentError, "q: expected a list of 2 arrays, one per sequence",
     lambda s: s.attn([q_()], [s.seq, s.ahead], 0)),
    (errors.ArgumentError, "q: got None, expected a list of 2 arrays, one per sequence",
     lambda s: s.attn(None, [s.seq, s.ahead], 0)),
    (errors.ArgumentError, "mask: expected a list of 2 arrays, one per sequence",
     lambda s: s.attn([q_(), q_()], [s.seq, s.ahead], 0, mask=[None])),
    (errors.ArgumentError, EARLY.format(21, 20, 1), lambda s: s.attn(q_(21), s.seq, 0)),
    (errors.ArgumentError, EARLY.format(30, 22, 8), lambda s: s.attn(q_(30), s.seq, 0, k=k_(2), v=k_(2))),
    (errors.ArgumentError, "allow_empty: got 1, expected True or False",
     lambda s: s.attn(q_(), s.seq, 0, allow_empty=1)),
    (errors.ArgumentError, "kv_layout: got 'nhd', expected 'tiles' or 'NHD'",
     lambda s: za.KVCache(s.cache.device, SMALL, 1, 16, kv_layout="nhd")),
    (errors.ShapeError, "q: got shape (1, 6, 64), expected (4, 64) or (q_len, 4, 64)",
     lambda s: s.attn(q_(heads=6), s.seq, 0, k=k_(), v=k_())),
    (errors.ShapeError, "q: got shape (0, 4, 64), expected (4, 64) or (q_len, 4, 64)",
     lambda s: s.attn(q_(0), s.seq, 0)),
    (errors.ShapeError, "k: got shape (1, 4, 64), expected (tokens, 2, 64)",
     lambda s: s.cache.append(s.seq, 0, k_(heads=4), k_(heads=4))),
    (errors.ShapeError, "v: got shape (1, 2, 64), expected k's tokens: (2, 2, 64)",
     lambda s: s.cache.append(s.seq, 0, k_(2), k_(1))),
    (errors.ShapeError, "k: got shape (0, 2, 64), expected at least one token",
     lambda s: s.cache.append(s.seq, 0, k_(0), k_(0))),
    (errors.DTypeError,
     "v: got dtype float32, a f16 cache takes float16; a cache made with round_rows=True rounds float32 and bfloat16",
     lambda s: s.cache.append(s.seq, 0, k_(), k_(1, np.float32))),
    (errors.ValueRangeError, "k[0, 0, 0]: got inf, expected a finite value of at most 2**60",
     lambda s: s.attn(q_(), s.seq, 0, k=k_(3) * np.float16(np.inf), v=k_(3))),
    (StepError, AHEAD, lambda s: s.attn([q_(), q_(30)], [s.ahead, s.seq], 0, k=[k_(), k_()], v=[k_(), k_()])),
    (StepError,
     "save: layer 0 has length 3, layer 1 has length 2, expected equal lengths; append to every layer first, or "
     "truncate(2)", lambda s: s.ahead.save("/nowhere/at all")),
    (errors.LimitError, "max_sequences: 3 sequences are live, expected at most 3; free() one",
     lambda s: [s.seq.fork() for _ in range(2)]),
)  # fmt: skip


def test_bad_arguments_change_nothing(device: za.Device) -> None:
    scene = Scene(device)
    before = scene.state()
    for error, message, call in BAD:
        with pytest.raises(error) as caught:
            call(scene)
        assert type(caught.value) is error and str(caught.value) == message
        for seq in list(scene.cache.sequences):
            if seq not in (scene.seq, scene.ahead):
                seq.free()  # the first fork of two
        assert scene.state() == before, message
    scene.close()


GIVEN_UP: dict[str, Callable[[za.KVCache, za.Sequence], Any]] = {
    "truncated": lambda cache, seq: seq.truncate(20),
    "dropped from a tree": lambda cache, seq: seq.keep([], 1),
    "truncated, and written again": lambda cache, seq: (
        seq.truncate(19),
        *(cache.append(seq, layer, k_(1, np.float32), k_(1, np.float32)) for layer in (0, 1)),
    ),
}


@pytest.mark.parametrize("give_up", GIVEN_UP)
def test_rows_that_are_gone_refuse_nothing(device: za.Device, give_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of K of 2**60, in the sequence itself, nor those of others; what is there is read once, where a call needs it."""
    k, q = k_(20, np.float32), q_() * np.float32(2.0**50)
    with za.KVCache(device, SMALL, 2, 128, "f32", 16) as cache:
        seq, attn = cache.new_sequence(), za.Attention(cache)
        for layer in (0, 1):
            cache.append(seq, layer, k, k)
        want = attn(q, seq, 0)
        for layer in (0, 1):
            cache.append(seq, layer, k[:1] * np.float32(2.0**60), k[:1])
        forks = [seq.fork(), seq.fork()]
        for sequence in (seq, *forks):
            with pytest.raises(errors.ValueRangeError, match=r"max\|k\| = 1\.15292e\+18"):
                attn(q, sequence, 0)
        forks.pop().free()
        GIVEN_UP[give_up](cache, seq)
        same([attn(q, seq, 0)], [want])
        assert seq.pages.state.largest == (1, 1)
        monkeypatch.setattr(cache.mover, "gather", lambda *_: pytest.fail("read again"))
        same([attn(q, seq, 0)], [want])
        for sequence in (forks[0], [seq, forks[0]]):  # which still has it
            with pytest.raises(errors.ValueRangeError, match=r"max\|k\| = 1\.15292e\+18"):
                attn(q if sequence is forks[0] else [q, q], sequence, 0)
        assert largest(cache) == (2.0**60, 1)


def test_rows_of_another_sequence_of_a_call_refuse_nothing(device: za.Device) -> None:
    k, q = k_(1, np.float32), q_() * np.float32(2.0**50)
    with za.KVCache(device, SMALL, 1, 32, "f32", 16) as cache:
        seqs, attn = [cache.new_sequence() for _ in "ab"], za.Attention(cache)
        attn([q_(), q_()], seqs, 0, [k, k * np.float32(2.0**60)], [k, k])
        same(attn(q, seqs[0], 0, return_lse=True), reference.emulate(q, k, k))
        with pytest.raises(errors.ValueRangeError, match=r"max\|k\| = 1\.15292e\+18"):
            attn(q, seqs[1], 0)


def test_what_is_seen_of_objects(device: za.Device) -> None:
    """By ``copy`` and ``pickle``, which are refused, and in a debugger, which another thread's lock does not stop."""
    with za.KVCache(device, SMALL, 2, 100, "f16", page_size=64) as cache, ThreadPoolExecutor(1) as other:
        seq, freed = cache.new_sequence(), cache.new_sequence()
        cache.append(seq, 0, k_(7), k_(7))
        freed.free()
        said = f"KVCache(4/2/64, f16, 2 layers, 64 of 100 tokens free in pages of 64, {device})"
        texts = {
            cache: said,
            seq: f"Sequence(serial={seq.serial}, 0 to 7 tokens)",
            freed: f"Sequence(serial={freed.serial}, 0 tokens, freed)",
            za.Attention(cache, split_size=64): f"Attention({said}, num_splits=None, split_size=64, canonical)",
        }
        with cache.lock:
            assert other.submit(lambda: list(map(repr, texts))).result(10) == list(texts.values())
        for one, change in product((device, *texts), (copy.copy, copy.deepcopy, pickle.dumps)):
            text = f"^{type(one).__name__}: it stands for memory of a device"
            with pytest.raises(errors.UnsupportedError, match=text):
                change(one)
            made = object.__new__(type(one))  # its constructor failed
            assert repr(made) == f"<{type(one).__name__}: AttributeError>"
    assert repr(cache).endswith(f"{device}, closed)")
