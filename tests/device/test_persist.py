"""A sequence in a file has the same bits after load, in any cache of its kind; a wrong file changes nothing."""

import hashlib
import json
import os
import re
import resource
import stat
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cache_rows import SMALL, Twin, new_rows
from page_tables import check_counts, largest

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.cache import files, rows
from zinc_attn.cache.files import CacheFileError

NATIVE = True
LAYERS = 2


def rows_of(n: int, seed: int) -> Any:
    return new_rows(np.random.default_rng(seed), n, SMALL, "f16")


def filled(cache: za.KVCache, tokens: int) -> Any:
    seq = cache.new_sequence()
    for layer in range(LAYERS):
        if tokens:
            cache.append(seq, layer, *rows_of(tokens, layer))
    return seq


@pytest.fixture
def cache(device):
    made = za.KVCache(device, SMALL, LAYERS, 256, "f16", 16)
    yield made
    made.close()


@pytest.fixture
def saved(cache, tmp_path):
    """A sequence of 33 tokens, and its file."""
    seq, path = filled(cache, 33), tmp_path / "file"
    seq.save(path)
    return seq, path


@pytest.mark.parametrize("dtype", ("f16", "f32", "bf16", "q8_0"))
@pytest.mark.of_drivers
def test_a_loaded_sequence_has_the_bits_of_the_saved_one(device, tmp_path, dtype):
    caches = [za.KVCache(device, SMALL, LAYERS, 256, dtype, size) for size in (16, 64)]
    path, twin = tmp_path / "prompt.safetensors", Twin(za.Attention(caches[0]))
    twin.sequence.save(path)
    assert caches[1].load(path).lengths == (0, 0) and caches[1].free_tokens == 256
    twin.append(77)
    twin.sequence.save(str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["prompt.safetensors"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for target in caches:  # the same, with pages in use, and one of another page size
        seq = target.load(path)
        assert len(seq) == 77 and seq.cache is target and seq in target.sequences
        check_counts(target.pool, [s.pages for s in target.sequences])
        assert largest(target).k >= max(np.abs(k).max() for k, _ in twin.held) * 0.99
        back = twin.other(seq, za.Attention(target))
        back.look()
        back.step(3, 3)
    for cache in caches:
        cache.close()


def test_the_file_is_what_other_readers_of_safetensors_expect(cache, saved):
    load_file, path = pytest.importorskip("safetensors.numpy").load_file, saved[1]
    for layer, (name, words) in enumerate(sorted(load_file(path).items())):
        k, v = rows_of(33, layer)
        assert name == f"layer.{layer}" and np.array_equal(words, rows.encode(k, v, cache.shape, "f16"))
    data = path.read_bytes()
    begin, header = parts(data)
    assert header["__metadata__"] == {
        "format": "zinc_attn kv cache",
        "version": "1",
        "shape": "4/2/64",
        "dtype": "f16",
        "num_layers": "2",
        "tokens": "33",
        "sha256": hashlib.sha256(data[begin:]).hexdigest(),
    }
    assert len(cache.load(path)) == 33


def test_saving_replaces_a_file_only_when_complete(cache, saved):
    """Not where the limit on a file's size is met in the midst of a layer."""
    seq, path = saved
    old, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CacheFileError) as caught:
            seq.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == f"{path}: cannot be written: File too large"
    assert path.read_bytes() == old and os.listdir(path.parent) == ["file"]


def parts(data: bytes) -> tuple[int, Any]:
    """(bytes before the data, header)."""
    size = struct.unpack("<Q", data[:8])[0]
    return 8 + size, json.loads(data[8 : 8 + size])


def with_header(data: bytes, change: Any) -> bytes:
    size, header = parts(data)
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[size:]


def meta(**changes: str) -> Any:
    return lambda data: with_header(data, lambda header: header["__metadata__"].update(changes))


def resummed(data: bytes) -> bytes:
    """NaN values under a checksum that fits."""
    size, _ = parts(data)
    data = data[:size] + b"\xff\xff\xff\xff" + data[size + 4 :]
    return meta(sha256=hashlib.sha256(data[size:]).hexdigest())(data)


NOTHING = {"dtype": "U32", "data_offsets": [33 * 512 * 2] * 2}  # a tensor of no bytes, behind two layers
CUT = "truncated, or not a safetensors file: *"
DTYPE, NUM_LAYERS = "dtype: got q8_0, expected f16, the cache's", "num_layers: got 3, expected 2, the cache's"
DAMAGED = {  # what is done to a file, and what is said; a star stands for any text; test_partial.py has more headers
    "empty": (lambda data: b"", CUT),
    "header cut": (lambda data: data[:100], CUT),
    "data cut": (lambda data: data[:-4], CUT),
    "foreign": (
        lambda data: with_header(data, lambda header: header.pop("__metadata__")),
        "format: got None, expected 'zinc_attn kv cache'",
    ),
    "newer": (meta(version="2"), "version: got '2', expected '1'"),
    "all of it": (
        meta(shape="4/2/128", dtype="q8_0", num_layers="3"),
        f"shape: got 4/2/128, expected 4/2/64, the cache's; {DTYPE}; {NUM_LAYERS}",
    ),
    "tokens": (meta(tokens="-1"), "tokens: got '-1', expected a number"),
    "many digits": (meta(tokens="9" * 5000), "tokens: got '999*..., expected a number"),
    "fewer tokens": (meta(tokens="32"), "layer.0: got U32 [33, 2, 64], expected U32 [32, 2, 64] for 32 tokens"),
    "tensors": (
        lambda data: with_header(data, lambda header: header.update({"layer.2": header.pop("layer.1")})),
        "got tensors ['layer.0', 'layer.2'], expected ['layer.0', 'layer.1']",
    ),
    "more tensors": (
        lambda data: with_header(data, lambda header: header.update({"layer.2": {**NOTHING, "shape": [0, 2, 64]}})),
        "got tensors ['layer.0', 'layer.1', 'layer.2'], expected ['layer.0', 'layer.1']",
    ),
    "bit flip": (lambda data: data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:], "sha256 of the data: got *"),
    "NaN": (resummed, "layer.0: a value that no cache stores in tokens 0 to 32; the file is damaged"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_wrong_file_is_refused_and_changes_nothing(cache, saved, name):
    (seq, path), (damage, message) = saved, DAMAGED[name]
    path.write_bytes(damage(path.read_bytes()))

    def state():
        rows_of = [cache.read_rows(seq, layer, 0, 33).tobytes() for layer in range(LAYERS)]
        return rows_of, cache.free_tokens, largest(cache), list(cache.sequences)

    before = state()
    with pytest.raises(CacheFileError) as caught:
        cache.load(path)
    pattern = ".*".join(re.escape(part) for part in f"{path}: {message}".split("*"))
    assert re.fullmatch(pattern, str(caught.value))
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, za.ZincAttnError)
    assert state() == before
    check_counts(cache.pool, [seq.pages])


@pytest.mark.parametrize(("name", "reason"), [("fifo", "it is a FIFO"), ("", "it is a directory")])
def test_paths_that_are_no_regular_file(cache, tmp_path, name, reason):
    """By name and at once; tests/host/test_refusals.py has every kind of path."""
    os.mkfifo(tmp_path / "fifo")
    for call, verb in ((filled(cache, 3).save, "written"), (cache.load, "read")):
        with pytest.raises(CacheFileError, match=f": cannot be {verb}: .*{reason}"):
            call(tmp_path / name)
    with pytest.raises(errors.ArgumentError, match=r"^path: got 7, expected a path"):
        cache.load(7)
    assert cache.free_tokens == cache.capacity and os.listdir(tmp_path) == ["fifo"]


def test_no_flipped_bit_is_accepted(cache, tmp_path, rng):
    """Of the header all, of the data some."""
    path = tmp_path / "file"
    filled(cache, 2).save(path)
    data = path.read_bytes()
    begin = parts(data)[0]
    for bit in [*range(0, 8 * begin, 7), *rng.integers(8 * begin, 8 * len(data), 100)]:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CacheFileError):
            cache.load(path)
    assert cache.free_tokens == cache.capacity


def test_a_file_that_is_cut_while_it_is_read(cache, saved, monkeypatch):
    """By another process, behind the check of its size: an error, and no SIGBUS; the device is free meanwhile."""
    (seq, path), whole = saved, files.read_into

    def free() -> bool:
        return cache.lock.acquire(timeout=5) and cache.lock.release() is None

    def cut(file: Any, offset: int, data: memoryview) -> None:
        if offset > 33 * 512:  # the second layer
            os.truncate(path, offset + 100)
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(free).result(), "the lock is held while the file is read"
        whole(file, offset, data)

    monkeypatch.setattr(files, "read_into", cut)
    with pytest.raises(CacheFileError, match=r"truncated, or not a safetensors file: it ended at byte [\d,]+ while it"):
        cache.load(path)
    assert cache.sequences == [seq]
    check_counts(cache.pool, [seq.pages])


def test_a_sequence_that_is_freed_while_it_is_loaded(cache, saved, monkeypatch):
    """Its pages may be another sequence's by then, whose rows stay."""
    _, path = saved
    real, other = files.read_into, []

    def read_and_free(*arguments):
        if not other:
            for seq in cache.sequences:
                seq.free()
            other.append(filled(cache, 80))
        return real(*arguments)

    monkeypatch.setattr(files, "read_into", read_and_free)
    with pytest.raises(errors.ClosedError, match="sequence: used after free"):
        cache.load(path)
    want = rows.encode(*rows_of(80, 0), SMALL, "f16")
    assert np.array_equal(cache.read_rows(other[0], 0, 0, 80), want)
