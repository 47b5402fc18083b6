"""A sequence in a file has the same bits after load, in any cache of its kind; a wrong file changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import socket
import stat
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import same

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.cache import files, rows
from zinc_attn.cache.files import CacheFileError
from zinc_attn.cache.pages import CapacityError

SHAPE, LAYERS = za.AttnShape(4, 2, 64), 2


def rows_of(n: int, seed: int, dtype: str = "f16") -> Any:
    x = np.random.default_rng(seed).standard_normal((2, n, 2, 64), np.float32)
    if dtype == "bf16":
        return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return x.astype(np.float16) if dtype == "f16" else x


def query(n: int = 1) -> Any:
    return np.random.default_rng(7).standard_normal((n, 4, 64), np.float32)


def filled(cache: za.KVCache, tokens: int) -> Any:
    seq = cache.new_sequence()
    for layer in range(cache.num_layers):
        if tokens:
            cache.append(seq, layer, *rows_of(tokens, layer, cache.dtype))
    return seq


@pytest.fixture
def cache(device):
    made = za.KVCache(device, SHAPE, LAYERS, 256, "f16", 16)
    yield made
    made.close()


@pytest.fixture
def saved(cache, tmp_path):
    """A sequence of 33 tokens, and its file."""
    seq, path = filled(cache, 33), tmp_path / "file"
    seq.save(path)
    return seq, path


@pytest.mark.both_dispatchers
@pytest.mark.parametrize("dtype", ("f16", "f32", "bf16", "q8_0"))
def test_a_loaded_sequence_has_the_bits_of_the_saved_one(device, tmp_path, dtype):
    caches = [za.KVCache(device, SHAPE, LAYERS, 256, dtype, size) for size in (16, 64)]
    path = tmp_path / "prompt.safetensors"
    filled(caches[0], 77).save(str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["prompt.safetensors"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for target in caches:  # the same, with pages in use, and one of another page size
        seq = target.load(path)
        assert len(seq) == 77 and seq.cache is target and seq in target.sequences
        target.pool.check([s.pages for s in target.sequences])
        attn = za.Attention(target)
        for layer in range(LAYERS):
            k, v = rows_of(77, layer, dtype)
            new_k, new_v = rows_of(3, 10 + layer, dtype)
            got = attn(query(), seq, layer, return_lse=True)
            same(got, reference.emulate(query(), *rows.stored(k, v, dtype)))
            got = attn(query(3), seq, layer, k=new_k, v=new_v, return_lse=True)
            stored = rows.stored(np.concatenate([k, new_k]), np.concatenate([v, new_v]), dtype)
            same(got, reference.emulate(query(3), *stored))
        assert target.largest.k >= np.abs(rows_of(77, 0, dtype)[0]).max() * 0.99
    for one in caches:
        one.close()


def test_the_file_is_what_other_readers_of_safetensors_expect(cache, saved):
    load_file, path = pytest.importorskip("safetensors.numpy").load_file, saved[1]
    for layer, (name, words) in enumerate(sorted(load_file(path).items())):
        k, v = rows_of(33, layer)
        assert name == f"layer.{layer}" and np.array_equal(words, rows.encode(k, v, cache.shape, "f16"))
    size, header = parts(path.read_bytes())
    assert header["__metadata__"] == {
        "format": "zinc_attn kv cache",
        "version": "1",
        "shape": "4/2/64",
        "dtype": "f16",
        "num_layers": "2",
        "tokens": "33",
        "sha256": hashlib.sha256(path.read_bytes()[size:]).hexdigest(),
    }
    assert len(cache.load(path)) == 33


def test_an_empty_sequence(cache, tmp_path):
    filled(cache, 0).save(tmp_path / "file")
    seq = cache.load(tmp_path / "file")
    assert seq.lengths == (0, 0) and cache.free_tokens == cache.capacity
    cache.append(seq, 0, *rows_of(1, 1))


def test_saving_replaces_a_file_only_when_complete(cache, saved, monkeypatch):
    """Not where the disk refuses at the end, nor where the limit on a file's size is met in the midst of a layer."""
    seq, path = saved
    old, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(*args):
        raise OSError(28, "No space left on device")

    def refused(to, reason):
        with pytest.raises(CacheFileError) as caught:
            seq.save(to)
        assert str(caught.value) == f"{to}: cannot be written: {reason}"
        assert path.read_bytes() == old and os.listdir(path.parent) == ["file"]

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refused(path, "No space left on device")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        refused(path, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    refused(path.parent / "nowhere" / "file", "No such file or directory")
    seq.truncate(20)
    seq.save(path)
    assert path.read_bytes() != old and len(cache.load(path)) == 20
    seq.free()
    with pytest.raises(errors.ClosedError, match="used after free"):
        seq.save(path)


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


def three_layers(header: Any) -> None:
    header["layer.2"] = {"dtype": "U32", "shape": [0, 2, 64], "data_offsets": [33 * 512 * 2] * 2}


CUT = "truncated, or not a safetensors file: *"
DTYPE, NUM_LAYERS = "dtype: got q8_0, expected f16, the cache's", "num_layers: got 3, expected 2, the cache's"
DAMAGED = {  # what is done to a file, and what is said; a star stands for any text
    "empty": (lambda data: b"", CUT),
    "text": (lambda data: b"hello, this is some text\n" * 100, CUT),
    "header cut": (lambda data: data[:100], CUT),
    "data cut": (lambda data: data[:-4], CUT),
    "more data": (lambda data: data + b"1234", CUT),
    "foreign": (
        lambda data: with_header(data, lambda header: header.pop("__metadata__")),
        "format: got None, expected 'zinc_attn kv cache'",
    ),
    "newer": (meta(version="2"), "version: got '2', expected '1'"),
    "shape": (meta(shape="8/2/64"), "shape: got 8/2/64, expected 4/2/64, the cache's"),
    "all of it": (
        meta(shape="4/2/128", dtype="q8_0", num_layers="3"),
        f"shape: got 4/2/128, expected 4/2/64, the cache's; {DTYPE}; {NUM_LAYERS}",
    ),
    "tokens": (meta(tokens="-1"), "tokens: got '-1', expected a number"),
    "many digits": (meta(tokens="9" * 5000), "tokens: got '999*..., expected a number"),
    "fewer tokens": (meta(tokens="32"), "layer.0: got U32 [33, 2, 64], expected U32 [32, 2, 64] for 32 tokens"),
    "tensors": (
        lambda data: with_header(data, three_layers),
        "got tensors ['layer.0', 'layer.1', 'layer.2'], expected ['layer.0', 'layer.1']",
    ),
    "bit flip": (lambda data: data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:], "sha256 of the data: got *"),
    "NaN": (resummed, "layer.0: a value that no cache stores in tokens 0 to 32; the file is damaged"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_wrong_file_is_refused_and_changes_nothing(cache, saved, name):
    (seq, path), (damage, message) = saved, DAMAGED[name]
    path.write_bytes(damage(path.read_bytes()))
    attn = za.Attention(cache)

    def state():
        bits = [attn(query(), seq, layer).tobytes() for layer in range(LAYERS)]
        return bits, cache.free_tokens, cache.largest, list(cache.sequences)

    before = state()
    with pytest.raises(CacheFileError) as caught:
        cache.load(path)
    begin, star, end = f"{path}: {message}".partition("*")
    got = str(caught.value)
    assert got.startswith(begin) and got.endswith(end) and (star or got == begin)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, za.ZincAttnError)
    assert state() == before
    cache.pool.check([seq.pages])


def test_no_room_for_what_is_in_the_file(device, saved):
    small = za.KVCache(device, SHAPE, LAYERS, 64, "f16", 16, max_sequences=2)
    seq = filled(small, 20)
    with pytest.raises(CapacityError, match="got 33 tokens at length 0, expected at most 32"):
        small.load(saved[1])
    assert small.free_tokens == 32 and small.sequences == [seq]
    seq.truncate(0)
    other = small.new_sequence()
    with pytest.raises(errors.LimitError, match="max_sequences: 2 sequences are live"):
        small.load(saved[1])
    assert small.free_tokens == 64 and small.sequences == [seq, other]
    other.free()
    assert len(small.load(saved[1])) == 33
    small.close()


# --- paths and headers that other programs make -------------------------------------------------------------


def odd_paths(folder: Path) -> dict[str, Any]:
    """Paths that are no regular file, or no path; a listening socket is kept open by the caller."""
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(folder / "fifo")
    return {
        "fifo": (folder / "fifo", "it is a FIFO"),
        "a link to it": (folder / "link", "it is a FIFO"),
        "socket": (folder / "socket", "it is a socket"),
        "directory": (folder, "it is a directory"),
        "device": (Path("/dev/zero"), "it is a character device"),
        "surrogate": (f"{folder}/a\ud800b", "surrogates not allowed"),
        "long name": (folder / ("n" * 300), "File name too long"),
        "long path": (f"{folder}/" + "d/" * 5000, "File name too long"),
    }


def test_paths_that_are_no_regular_file(cache, tmp_path, monkeypatch):
    """Refused at once, by name, with nothing written, opened or replaced."""
    seq = filled(cache, 3)
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        paths = odd_paths(tmp_path)
        before = {path.name: path.lstat() for path in tmp_path.iterdir()}
        for call, verb in ((seq.save, "written"), (cache.load, "read")):
            for path, reason in paths.values():
                with pytest.raises(CacheFileError) as caught:
                    call(path)
                text = str(caught.value)
                assert f": cannot be {verb}: " in text and reason in text, text
                assert text.isprintable() and len(text) < 1200
            for wrong in (None, 7, 1.5, ["a"]):
                with pytest.raises(errors.ArgumentError) as refused:
                    call(wrong)
                assert str(refused.value) == f"path: got {wrong!r}, expected a path"
            for wrong in (f"{tmp_path}/a\0b", b"a\0b", ""):
                with pytest.raises(errors.ArgumentError, match=r"expected a path that is not empty and has no NUL"):
                    call(wrong)
        assert {path.name: path.lstat() for path in tmp_path.iterdir()} == before
    with pytest.raises(CacheFileError, match=r"/nothing: .*No such file or directory"):
        cache.load(tmp_path / "nothing")
    assert cache.sequences == [seq]
    longest = os.fsencode(tmp_path / ("n" * 255))
    seq.save(longest)
    assert len(cache.load(longest)) == 3


HEADERS = {
    "lists": (b"[" * 200_000, "nested too deeply"),
    "objects": (b'{"a":' * 200_000, "nested too deeply"),
    "digits": (
        b'{"layer.0":{"dtype":"U32","shape":[' + b"9" * 5000 + b"]}}",
        "the number 9999999999999999999, expected",
    ),
    "metadata": (b'{"__metadata__":[]}', "__metadata__ of another form, expected an object of strings"),
    "gap": (
        b'{"layer.0":{"dtype":"U32","shape":[2],"data_offsets":[8,16]}}',
        "tensor layer.0 at byte 8, expected it at 0",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_crash_parsers(cache, tmp_path, name):
    path, (header, message) = tmp_path / "file", HEADERS[name]
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CacheFileError, match=rf"file: truncated, or not a safetensors file: .*{re.escape(message)}"):
        cache.load(path)
    for size in (2**64 - 1, 2**63, 1 << 40, len(header) + 1):
        path.write_bytes(struct.pack("<Q", size) + header)
        with pytest.raises(CacheFileError, match=f"got a header of {size:,} bytes, expected at most "):
            cache.load(path)


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
        taken = cache.lock.acquire(timeout=5)
        if taken:
            cache.lock.release()
        return taken

    def cut(file: Any, at: int, data: memoryview) -> None:
        if at > 33 * 512:  # the second layer
            os.truncate(path, at + 100)
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(free).result(), "the lock is held while the file is read"
        whole(file, at, data)

    monkeypatch.setattr(files, "read_into", cut)
    with pytest.raises(CacheFileError, match=r"truncated, or not a safetensors file: it ended at byte [\d,]+ while it"):
        cache.load(path)
    assert cache.sequences == [seq]
    cache.pool.check([seq.pages])


def test_a_sequence_that_is_freed_while_it_is_loaded(cache, saved, monkeypatch):
    """Its pages may be another sequence's by then, whose rows stay."""
    _, path = saved
    real, other = files.read_into, []

    def read_and_free(*given):
        if not other:
            for seq in cache.sequences:
                seq.free()
            other.append(filled(cache, 80))
        return real(*given)

    monkeypatch.setattr(files, "read_into", read_and_free)
    with pytest.raises(errors.ClosedError, match="sequence: used after free"):
        cache.load(path)
    want = rows.encode(*rows_of(80, 0), SHAPE, "f16")
    assert np.array_equal(cache.read_rows(other[0], 0, 0, 80), want)
