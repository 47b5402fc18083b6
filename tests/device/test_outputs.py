"""Results in arrays of the caller's: out= and lse=."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import differing

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.kernels.declarations import READ

SHAPE = za.AttnShape(4, 2, 64)
THIRDS = za.AttnShape(6, 2, 64)  # has the pipelines of 9/3/64, which SwiftShader has compiled for test_bits.py


def values(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, np.float32)


def filled(shape: tuple[int, ...]) -> Any:
    return np.full(shape, 7, np.float32)


@pytest.mark.both_dispatchers
@pytest.mark.parametrize("tokens", [1, 100, 700])
@pytest.mark.parametrize("q_len", [None, 1, 5])
def test_the_device_writes_there(any_device, monkeypatch, rng, q_len, tokens):
    """Straight from the memory that the device has written: nothing is read into an array of its own."""
    k, v = values(rng, 2, tokens, 2, 64)
    q = values(rng, 6, 64) if q_len is None else values(rng, q_len, 6, 64)
    want = reference.emulate(q, k, v)
    any_device.kernel(READ, (1,))  # before its first kernel a device reads what the driver is asked
    with za.KVCache(any_device, THIRDS, 1, 1024, "f32", 64) as cache:
        attn, sequence, new = za.Attention(cache), cache.new_sequence(), {"k": k, "v": v}
        monkeypatch.setattr(any_device.runtime, "read", None)
        for calls in (1, 2, 3):  # the second and the third are steady where q has a row
            out, lse = filled(q.shape), filled(q.shape[:-1])
            got = attn(q, sequence, 0, **new, return_lse=True, out=out, lse=lse, allow_empty=True)
            assert got[0] is out and got[1] is lse
            assert not differing(out, want[0]) and not differing(lse, want[1]), calls
            out = filled(q.shape)
            assert attn(q, sequence, 0, out=out, allow_empty=True) is out and not differing(out, want[0])
            new = {}
        out, lse = filled(q.shape), filled(q.shape[:-1])
        got = za.attention(q, k, v, any_device, return_lse=True, out=out, lse=lse, allow_empty=True)
        assert got[0] is out and got[1] is lse
        assert not differing(out, want[0]) and not differing(lse, want[1])
        monkeypatch.undo()
        lse = filled(q.shape[:-1])
        assert not differing(attn(q, sequence, 0, lse=lse, allow_empty=True), want[0]) and not differing(lse, want[1])
        found, sums = attn(q, sequence, 0, return_lse=True, out=out, allow_empty=True)
        assert found is out and not differing(sums, want[1])
        attn(-q, sequence, 0, allow_empty=True)
        assert not differing(sums, want[1])  # it is no view of memory that another call writes


def test_a_batch_and_a_prompt_of_several_submissions(device, rng):
    k, v = values(rng, 2, 5000, 2, 64)
    q = [values(rng, n, 4, 64) for n in (1, 2, 2500)]
    with za.KVCache(device, SHAPE, 1, 16384, "f32") as cache:
        sizes: list[int] = []
        attn = za.Attention(cache, num_splits=64, observer=lambda submission, _: sizes.append(len(submission.rows)))
        sequences = [cache.new_sequence() for _ in q]
        everywhere = np.full((2503 * 4 * 65,), 7, np.float32)
        outs, lses, at = [], [], 0
        for one in q:  # one behind the other in one piece of memory
            for found, shape in ((outs, one.shape), (lses, one.shape[:2])):
                count = int(np.prod(shape))
                found.append(everywhere[at : at + count].reshape(shape))
                at += count
        got = attn(q, sequences, 0, [k] * 3, [v] * 3, return_lse=True, out=outs, lse=lses)
        assert len(sizes) > 1 and sum(sizes) == 2503
        assert all(a is b for a, b in zip((*got[0], *got[1]), (*outs, *lses), strict=True))
        for one, out, lse in zip(q, outs, lses, strict=True):
            rows = slice(max(0, len(one) - 8), None)
            want = reference.emulate(one[rows], k, v)
            assert not differing(out[rows], want[0]) and not differing(lse[rows], want[1])


def test_torch_tensors_and_the_query_itself(device, rng):
    torch = pytest.importorskip("torch")
    k, v = values(rng, 2, 70, 2, 64)
    q = values(rng, 3, 4, 64)
    want = reference.emulate(q, k, v)
    with za.KVCache(device, SHAPE, 1, 128, "f32") as cache:
        attn, sequence = za.Attention(cache), cache.new_sequence()
        cache.append(sequence, 0, k, v)
        for attend in (
            lambda **to: attn(q, sequence, 0, return_lse=True, **to),
            lambda **to: za.attention(q, k, v, device, return_lse=True, **to),
        ):
            out, lse = torch.zeros(3, 4, 64), torch.zeros(3, 4)
            got = attend(out=out, lse=lse)
            assert got[0] is out and got[1] is lse
            assert not differing(out.numpy(), want[0]) and not differing(lse.numpy(), want[1])
            for tensor in (torch.zeros(3, 4, 64, dtype=torch.bfloat16), torch.zeros(3, 4, 64, requires_grad=True)):
                with pytest.raises(
                    errors.ArgumentError, match=r"^out: got a tensor that NumPy cannot view, expected a "
                ):
                    attend(out=tensor)
            with pytest.raises(errors.ArgumentError, match=r"^out: got an array that is not contiguous, "):
                attend(out=torch.zeros(64, 4, 3).permute(2, 1, 0))
        same = q.copy()
        assert attn(same, sequence, 0, out=same) is same and not differing(same, want[0])


def _read_only() -> Any:
    array = filled((3, 4, 64))
    array.flags.writeable = False
    return array


EXPECTED = "expected a C-contiguous float32 array of shape (3, 4, 64)"
WRONG = [
    (lambda: np.zeros((3, 4, 64)), errors.DTypeError, f"out: got dtype float64, {EXPECTED}"),
    (lambda: np.zeros((3, 4, 64), ">f4"), errors.DTypeError, f"out: got dtype >f4, {EXPECTED}"),
    (lambda: filled((4, 64)), errors.ShapeError, f"out: got shape (4, 64), {EXPECTED}"),
    (lambda: filled((3, 4, 65)), errors.ShapeError, f"out: got shape (3, 4, 65), {EXPECTED}"),
    (
        lambda: filled((3, 4, 128))[..., ::2],
        errors.ArgumentError,
        f"out: got an array that is not contiguous, {EXPECTED} that can be written to",
    ),
    (_read_only, errors.ArgumentError, f"out: got an array that is read-only, {EXPECTED} that can be written to"),
    (lambda: [[1.0]], errors.ArgumentError, f"out: got [[1.0]], {EXPECTED}"),
    (lambda: "out", errors.ArgumentError, f"out: got 'out', {EXPECTED}"),
]


@pytest.mark.parametrize(("make", "error", "message"), WRONG)
def test_what_cannot_be_written_to_is_refused(device, rng, make, error, message):
    q, (k, v) = values(rng, 3, 4, 64), values(rng, 2, 5, 2, 64)
    lse = filled((3, 4))
    with za.KVCache(device, SHAPE, 1, 128, "f32") as cache:
        attn, sequence = za.Attention(cache), cache.new_sequence()
        for attend in (
            lambda **to: attn(q, sequence, 0, k, v, **to),
            lambda **to: attn([q], [sequence], 0, [k], [v], **{name: [array] for name, array in to.items()}),
            lambda **to: za.attention(q, k, v, device, **to),
        ):
            with pytest.raises(error) as caught:
                attend(out=make(), lse=lse)
            assert str(caught.value) == message
            with pytest.raises(errors.ShapeError, match=r"^lse: got shape \(3,\), expected .* of shape \(3, 4\)$"):
                attend(lse=filled((3,)))
        assert len(sequence) == 0 and np.all(lse == 7)


def test_arrays_that_overlap_are_refused(device, rng):
    q, (k, v) = values(rng, 3, 4, 64), values(rng, 2, 5, 2, 64)
    memory = filled((4, 4, 64))
    with za.KVCache(device, SHAPE, 1, 128, "f32") as cache:
        attn, sequences = za.Attention(cache), [cache.new_sequence() for _ in range(2)]
        with pytest.raises(
            errors.ArgumentError, match=r"^out, lse: got arrays that overlap in memory, expected one for"
        ):
            attn([q, q], sequences, 0, [k, k], [v, v], out=[memory[:3], memory[1:]])
        inside = memory.reshape(-1)[100:112].reshape(3, 4)
        for attend in (
            lambda: attn(q, sequences[0], 0, k, v, out=memory[:3], lse=inside),
            lambda: za.attention(q, k, v, device, out=memory[:3], lse=inside),
        ):
            with pytest.raises(
                errors.ArgumentError, match=r"^out, lse: got arrays that overlap in memory, expected one"
            ):
                attend()
        assert not any(map(len, sequences)) and np.all(memory == 7)


@pytest.mark.both_dispatchers
def test_a_failed_call_has_written_nothing(device, rng):
    """Also where one of several submissions had run before."""
    k, v = values(rng, 2, 600, 2, 64)
    q = values(rng, 600, 4, 64)
    with za.KVCache(device, SHAPE, 1, 1024, "f32") as cache:
        submitted: list[int] = []

        def fails(submission: Any, _: Any) -> None:
            submitted.append(len(submission.rows))
            if sum(submitted) == len(q):
                raise errors.DeviceMemoryError("injected")

        attn, sequence = za.Attention(cache, num_splits=1 << 14, observer=fails), cache.new_sequence()
        out, lse = filled(q.shape), filled(q.shape[:2])
        with pytest.raises(errors.DeviceMemoryError, match="injected"):
            attn(q, sequence, 0, k, v, out=out, lse=lse)
        with pytest.raises(za.CapacityError):
            attn(q[:1], sequence, 0, np.repeat(k, 2, axis=0), np.repeat(v, 2, axis=0), out=out[:1])
        assert np.all(out == 7) and np.all(lse == 7) and len(sequence) == 0 and len(submitted) > 1
