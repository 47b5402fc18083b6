"""Results in arrays of the caller's: out= and lse=."""

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from cache_rows import filled
from support import differing, same

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.kernels.declarations import MERGE
from zinc_attn.planning import inputs

NATIVE = True
SHAPE = za.AttnShape(4, 2, 64)


def values(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, np.float32)


def sevens(shape: tuple[int, ...]) -> Any:
    return np.full(shape, 7, np.float32)


@pytest.mark.one_driver
@pytest.mark.parametrize("tokens", [1, 100, 700])
@pytest.mark.parametrize("q_len", [None, 1, 5])
def test_the_device_writes_there(any_device, monkeypatch, rng, q_len, tokens):
    """Straight from the memory that the device has written: nothing is read into an array of its own."""
    k, v = values(rng, 2, tokens, 2, 64)
    q = values(rng, 4, 64) if q_len is None else values(rng, q_len, 4, 64)
    want = reference.emulate(q, k, v)
    any_device.kernel(MERGE, (64, 32))  # before its first kernel a device reads what the driver is asked

    def check(attend: Any, both: bool = True) -> None:
        given = {"out": sevens(q.shape)} | ({"lse": sevens(q.shape[:-1])} if both else {})
        got = attend(**given, return_lse=both, allow_empty=True)
        result = got if both else (got,)
        assert all(x is y for x, y in zip(result, given.values(), strict=True))
        same(result, want[: len(result)])

    with za.KVCache(any_device, SHAPE, 1, 1024, "f32", 64) as cache:
        attn, sequence = za.Attention(cache), cache.new_sequence()
        monkeypatch.setattr(any_device.runtime, "read", None)
        for new in ({"k": k, "v": v}, {}, {}):  # the second and the third are steady where q has a row
            check(partial(attn, q, sequence, 0, **new))
            check(partial(attn, q, sequence, 0), both=False)
        check(partial(za.attention, q, k, v, any_device))
        monkeypatch.undo()
        lse, out = sevens(q.shape[:-1]), sevens(q.shape)
        same((attn(q, sequence, 0, lse=lse, allow_empty=True), lse), want)
        found, sums = attn(q, sequence, 0, return_lse=True, out=out, allow_empty=True)
        attn(-q, sequence, 0, allow_empty=True)
        assert found is out and not differing(sums, want[1])  # it is no view of memory that another call writes


@pytest.mark.of_drivers
def test_a_batch_and_a_prompt_of_several_submissions(device, rng, monkeypatch):
    """A failed call has written nothing, though all submissions but the last one have run."""
    monkeypatch.setattr(inputs, "SCRATCH_BYTES", 24 * 4 * 4 * 66)  # 24 states
    k, v = values(rng, 2, 300, 2, 64)
    q = [values(rng, n, 4, 64) for n in (1, 2, 100)]
    outs, lses, attended = [sevens(one.shape) for one in q], [sevens(one.shape[:2]) for one in q], []

    def fails(submission: Any, _: Any) -> None:
        attended.append(len(submission.rows))
        if sum(attended) == 103:
            raise errors.DeviceMemoryError("injected")

    with za.KVCache(device, SHAPE, 1, 2048, "f32") as cache:
        attn, sequences = za.Attention(cache, num_splits=64, observer=fails), [cache.new_sequence() for _ in q]
        call = partial(attn, q, sequences, 0, [k] * 3, [v] * 3, return_lse=True, out=outs, lse=lses)
        with pytest.raises(errors.DeviceMemoryError, match="injected"):
            call()
        assert len(attended) > 3 and not any(map(len, sequences)) and all(np.all(x == 7) for x in (*outs, *lses))
        got = call()
        assert attn.keys_read == 300 + 2 * 300 - 1 + sum(range(201, 301))  # of all submissions; none is shared
    assert all(a is b for a, b in zip((*got[0], *got[1]), (*outs, *lses), strict=True))
    for one, *found in zip(q, outs, lses, strict=True):
        same(found, reference.emulate(one, k, v))


def test_torch_tensors_and_the_query_itself(device, rng):
    torch = pytest.importorskip("torch")
    k, v = values(rng, 2, 70, 2, 64)
    q = values(rng, 3, 4, 64)
    want = reference.emulate(q, k, v)
    with filled(device, SHAPE, k, v, "f32", 128) as (cache, sequence):
        attn = za.Attention(cache)
        out, lse = torch.zeros(3, 4, 64), torch.zeros(3, 4)
        got = attn(q, sequence, 0, return_lse=True, out=out, lse=lse)
        assert got[0] is out and got[1] is lse
        same((out.numpy(), lse.numpy()), want)
        for option in ({"dtype": torch.bfloat16}, {"requires_grad": True}):
            with pytest.raises(errors.ArgumentError, match=r"^out: got a tensor that NumPy cannot view, expected a "):
                attn(q, sequence, 0, out=torch.zeros(3, 4, 64, **option))
        own = q.copy()
        assert attn(own, sequence, 0, out=own) is own and not differing(own, want[0])


EXPECTED = "expected a C-contiguous float32 array of shape (3, 4, 64)"
WRITTEN = f"{EXPECTED} that can be written to"
WRONG = [
    (lambda: np.zeros((3, 4, 64)), errors.DTypeError, f"dtype float64, {EXPECTED}"),
    (lambda: np.zeros((3, 4, 64), ">f4"), errors.DTypeError, f"dtype >f4, {EXPECTED}"),
    (lambda: sevens((4, 64)), errors.ShapeError, f"shape (4, 64), {EXPECTED}"),
    (lambda: sevens((3, 4, 128))[..., ::2], errors.ArgumentError, f"an array that is not contiguous, {WRITTEN}"),
    (
        lambda: np.frombuffer(bytes(3072), np.float32).reshape(3, 4, 64),
        errors.ArgumentError,
        f"an array that is read-only, {WRITTEN}",
    ),
    (lambda: [[1.0]], errors.ArgumentError, f"[[1.0]], {EXPECTED}"),
    (lambda: "out", errors.ArgumentError, f"'out', {EXPECTED}"),
]


def test_what_cannot_be_written_to_is_refused(device, rng):
    q, (k, v) = values(rng, 3, 4, 64), values(rng, 2, 5, 2, 64)
    memory, lse = sevens((4, 4, 64)), sevens((3, 4))
    inside = memory.reshape(-1)[100:112].reshape(3, 4)
    overlap = pytest.raises(errors.ArgumentError, match=r"^out, lse: got arrays that overlap in memory, expected ")
    with za.KVCache(device, SHAPE, 1, 128, "f32") as cache:
        attn, seqs = za.Attention(cache), [cache.new_sequence() for _ in range(2)]
        for attend in (
            lambda **to: attn(q, seqs[0], 0, k, v, **to),
            lambda **to: attn([q], seqs[:1], 0, [k], [v], **{name: [array] for name, array in to.items()}),
            lambda **to: za.attention(q, k, v, device, **to),
        ):
            for make, error, message in WRONG:
                with pytest.raises(error, match=f"^out: got {re.escape(message)}$"):
                    attend(out=make(), lse=lse)
            with pytest.raises(errors.ShapeError, match=r"^lse: got shape \(3,\), expected .* of shape \(3, 4\)$"):
                attend(lse=sevens((3,)))
            with overlap:
                attend(out=memory[:3], lse=inside)
        with overlap:
            attn([q, q], seqs, 0, [k, k], [v, v], out=[memory[:3], memory[1:]])
        assert not any(map(len, seqs)) and np.all(memory == 7) and np.all(lse == 7)
