"""``Attention.submit`` and ``Device.together``: calls whose results are taken later have the bits of calls."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from support import raising, same

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.decode.pending import PendingAttention
from zinc_attn.decode.runner import CallRunner
from zinc_attn.planning import duration

pytestmark = pytest.mark.both_dispatchers
SHAPE = za.AttnShape(4, 2, 64)
RNG = np.random.default_rng(0)
K, V = (RNG.standard_normal((400, 2, 64)).astype(np.float16) for _ in "kv")
Q = RNG.standard_normal((400, 4, 64)).astype(np.float32)


def oracle(tokens: int, rows: int = 1) -> Any:
    q = Q[tokens - rows : tokens]
    return reference.emulate(q[0] if rows == 1 else q, K[:tokens], V[:tokens])


failing, interrupted = raising(errors.DeviceMemoryError), raising(KeyboardInterrupt)


@pytest.fixture
def cache(device: za.Device) -> Iterator[za.KVCache]:
    with za.KVCache(device, SHAPE, 2, 1024, "f16", 16) as made:
        yield made


@pytest.fixture
def three(device: za.Device) -> Iterator[tuple[list[za.Attention], list[za.Sequence]]]:
    """An Attention on each of three caches, and an empty sequence of each."""
    with ExitStack() as stack:
        caches = [stack.enter_context(za.KVCache(device, SHAPE, 1, 512, "f16", 16)) for _ in range(3)]
        yield [za.Attention(cache) for cache in caches], [cache.new_sequence() for cache in caches]


@pytest.fixture
def sent(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many recordings each submission of the device has."""
    found, start = list[int](), device.runtime.start
    monkeypatch.setattr(device.runtime, "start", lambda *all_: (found.append(len(all_)), start(*all_)))
    return found


def submit(attn: za.Attention, seq: za.Sequence, layer: int, tokens: int, rows: int = 1, **more: Any) -> Any:
    """A call that appends the story's last ``rows`` tokens of ``tokens``."""
    new = slice(tokens - rows, tokens)
    q = Q[new][0] if rows == 1 else Q[new]
    return attn.submit(q, seq, layer, K[new], V[new], return_lse=True, **more)


def test_results_are_those_of_calls(cache):
    attn, seq = za.Attention(cache), cache.new_sequence()
    for tokens, rows in ((70, 70), (71, 1), (72, 1), (128, 56), (129, 1)):
        for layer in (0, 1):
            pending = submit(attn, seq, layer, tokens, rows)
            if cache.device.runtime.name == "vulkan":
                assert cache.device.runtime._queue.in_flight  # type: ignore[attr-defined]
                assert seq.lengths[layer] == tokens - rows
            same(pending.result(), oracle(tokens, rows))
            assert seq.lengths[layer] == tokens and pending.result() is pending.result()
    out, lse = np.empty((4, 64), np.float32), np.empty(4, np.float32)
    result = submit(attn, seq, 0, 130, out=out, lse=lse).result()
    assert result[0] is out and result[1] is lse
    same((out, lse), oracle(130))


# what completes a call that was submitted to layer 0 of a sequence
OTHERS: dict[str, Callable[[za.KVCache, za.Attention, za.Sequence], Any]] = {
    "a call of the next layer": lambda c, a, s: a(Q[0], s, 1, K[:1], V[:1]),
    "another submit": lambda c, a, s: a.submit(Q[0], s, 1, K[:1], V[:1]),
    "a call of no sequence": lambda c, a, s: a([], [], 0),
    "a submit of no sequence": lambda c, a, s: a.submit([], [], 0),
    "another Attention": lambda c, a, s: za.Attention(c)(Q[0], s, 0),
    "an append": lambda c, a, s: c.append(s, 1, K[:1], V[:1]),
    "a new sequence": lambda c, a, s: c.new_sequence(),
    "truncate": lambda c, a, s: s.retract(0, len(s)),
    "free": lambda c, a, s: s.free(),
    "prepare": lambda c, a, s: a.prepare(100),
    "closing the Attention": lambda c, a, s: a.close(),
    "closing the cache": lambda c, a, s: c.close(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_caches_next_call_completes_it(device, name):
    cache = za.KVCache(device, SHAPE, 2, 1024, "f16", 16)
    attn, seq = za.Attention(cache), cache.new_sequence()
    for layer in (0, 1):
        cache.append(seq, layer, K[:99], V[:99])
    pending = submit(attn, seq, 0, 100)
    OTHERS[name](cache, attn, seq)
    assert cache.unfinished is not pending
    if name not in ("truncate", "free"):
        assert seq.lengths[0] == 100
    same(pending.result(), oracle(100))
    cache.close()


def test_a_failure_is_the_results(cache, monkeypatch):
    """However often it is asked for. An interrupt is not: the call is completed later, by whoever asks next."""
    attn, seq = za.Attention(cache), cache.new_sequence()
    free, pending = cache.free_tokens, submit(attn, seq, 0, 70, 70)
    with monkeypatch.context() as patch:
        patch.setattr(cache.device.runtime, "read", failing)
        for _ in range(2):
            with pytest.raises(errors.DeviceMemoryError, match="injected"):
                pending.result()
    assert seq.lengths == (0, 0) and cache.free_tokens == free
    for layer, ask in enumerate((lambda: None, cache.new_sequence)):
        pending = submit(attn, seq, layer, 70, 70)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(cache.device.runtime, "read", interrupted)
            pending.result()
        ask()
        same(pending.result(), oracle(70, 70))
        assert seq.lengths == (70, 70 * layer)


def test_a_result_of_a_closed_device():
    with za.Device.open(runtime="vulkan") as device:
        cache = za.KVCache(device, SHAPE, 1, 64, "f16", 16)
        attn, seq = za.Attention(cache), cache.new_sequence()
        pending = attn.submit(Q[0], seq, 0, K[:1], V[:1])
    with pytest.raises(errors.ClosedError):
        pending.result()


def test_calls_of_several_caches_go_in_one_submission(device, three, sent):
    attns, seqs = three
    for tokens, rows in ((70, 70), (71, 1), (72, 1)):
        with device.together():
            pending = [submit(attn, seq, 0, tokens, rows) for attn, seq in zip(attns, seqs, strict=True)]
            assert not sent
        assert sent == [3]
        for call in reversed(pending):
            same(call.result(), oracle(tokens, rows))
        sent.clear()
    with device.together():  # a result, and a call, within the block
        first = submit(attns[0], seqs[0], 0, 73)
        same(attns[1](Q[72], seqs[1], 0, K[72:73], V[72:73], return_lse=True), oracle(73))
        third = submit(attns[2], seqs[2], 0, 73)
        same(first.result(), oracle(73))
        assert sent == [2]  # the third waits for the block's end
    assert sent == [2, 1]
    same(third.result(), oracle(73))


def test_an_undone_call_leaves_nothing_in_the_queue(device, three, sent, monkeypatch):
    """The next call takes its workspace: two dispatches of one submission would write to the same results."""
    (attn, *_), (seq, *_) = three
    attn.cache.append(seq, 0, K[:70], V[:70])
    start = CallRunner.start

    def cut(self: CallRunner, *arguments: Any) -> None:
        start(self, *arguments)
        raise KeyboardInterrupt

    sent.clear()
    with device.together():
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(CallRunner, "start", cut)
            attn.submit(Q[0], seq, 0)
        assert sent == [1]
        second = attn.submit(Q[69], seq, 0, return_lse=True)
    assert sent == [1, 1]
    same(second.result(), oracle(70))


def test_a_block_that_is_interrupted_twice_writes_nothing_later(device, three, sent, monkeypatch):
    """What an undone call queued would write to places that other calls own by then."""
    (attn, other, _), (seq, its, _) = three
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), device.together():
        pending = [submit(attn, seq, 0, 70, 70), submit(other, its, 0, 70, 70)]
        patch.setattr(device.runtime, "start", interrupted)
        raise KeyboardInterrupt
    sent.clear()
    for call in pending:
        with pytest.raises(errors.ClosedError, match="interrupted before it was submitted"):
            call.result()
    assert sent == [] and (len(seq), len(its)) == (0, 0)
    same(submit(attn, seq, 0, 70, 70).result(), oracle(70, 70))


def test_a_failure_of_one_submission_is_that_of_all_its_calls(device, three, monkeypatch):
    attns, seqs = three
    pending: list[PendingAttention] = []
    with monkeypatch.context() as patch:
        patch.setattr(device.runtime, "start", failing)
        with pytest.raises(errors.DeviceMemoryError, match="injected"), device.together():
            pending = [submit(attn, seq, 0, 70, 70) for attn, seq in zip(attns, seqs, strict=True)]
    for call in pending:
        with pytest.raises(errors.DeviceMemoryError, match="injected"):
            call.result()
    assert [len(seq) for seq in seqs] == [0, 0, 0]
    with pytest.raises(errors.ArgumentError, match=r"^v: got None"), device.together():  # the other call is made
        made = submit(attns[0], seqs[0], 0, 70, 70)
        attns[1].submit(Q[0], seqs[1], 0, K[:1], None)
    same(made.result(), oracle(70, 70))


# --- calls of more work than one submission may have -------------------------------------------------------------

WAYS: dict[str, Callable[[za.Attention, Any, Any, dict[str, Any]], Any]] = {
    "call": lambda a, q, s, more: a(q, s, 0, return_lse=True, **more),
    "submit": lambda a, q, s, more: a.submit(q, s, 0, return_lse=True, **more).result(),
    "partial": lambda a, q, s, more: za.fold([a.partial(q, s, 0, **more)]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("rows", "options"),
    ((1, {}), (3, {}), (1, {"num_splits": 2}), (1, {"arithmetic": "fused", "alibi": np.ones(4, "f")})),
)
def test_what_takes_too_long_is_cut(device, monkeypatch, way, rows, options):
    """Rows into submissions of their own, and the keys of a row, whose states the last submission merges."""
    monkeypatch.setattr(duration, "work_bound", lambda facts, by_matrix=False: 450 * duration.key_work(facts))
    k, v = (RNG.standard_normal((1100, 2, 64)).astype(np.float16) for _ in "kv")
    mask, seen = np.where(RNG.random((rows, 90)) < 0.5, -np.inf, 0.5).astype("f"), list[bool]()
    told = {name: value for name, value in options.items() if name != "num_splits"}
    with za.KVCache(device, SHAPE, 1, 2048) as cache:
        attn = za.Attention(cache, observer=lambda submission, _: seen.append(submission.key.unmerged), **options)
        seq = cache.new_sequence()
        cache.append(seq, 0, k[:-rows], v[:-rows])
        result = WAYS[way](attn, Q[:rows], seq, {"k": k[-rows:], "v": v[-rows:], "mask": mask})
        same(result, reference.emulate(Q[:rows], k, v, mask=mask, **told))
    assert seen == [True, True, False] * rows  # a submission for each node, whichever splits they are of
