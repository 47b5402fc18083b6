"""A sequence in a file has the same bits after load, in any cache of its kind; a wrong file changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.cache import rows
from zinc_attn.cache.kv_cache import CacheFileError
from zinc_attn.cache.pages import CapacityError
from zinc_attn.canonical import reference

pytest.importorskip("safetensors", reason="safetensors is not installed: pip install 'zinc-attn[files]'")
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


def same(got: Any, want: Any) -> bool:
    return all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(got, want, strict=True))


@pytest.fixture
def cache(device: za.Device) -> Any:
    made = za.KVCache(device, SHAPE, LAYERS, 256, "f16", 16)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ("f16", "f32", "bf16", "q8_0"))
def test_a_loaded_sequence_has_the_bits_of_the_saved_one(device: za.Device, tmp_path: Path, dtype: str) -> None:
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
            assert same(
                attn(query(), seq, layer, return_lse=True), reference.emulate(query(), *rows.stored(k, v, dtype))
            )
            got = attn(query(3), seq, layer, k=new_k, v=new_v, return_lse=True)
            stored = rows.stored(np.concatenate([k, new_k]), np.concatenate([v, new_v]), dtype)
            assert same(got, reference.emulate(query(3), *stored))
        assert target.max_k >= np.abs(rows_of(77, 0, dtype)[0]).max() * 0.99
    for one in caches:
        one.close()


def test_the_file_is_what_other_readers_of_safetensors_expect(cache: za.KVCache, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    path = tmp_path / "file"
    seq = filled(cache, 33)
    cache.append(seq, 1, *rows_of(4, 9))  # a step is under way: the tokens that every layer has are saved
    seq.save(path)
    for layer, (name, words) in enumerate(sorted(load_file(path).items())):
        k, v = rows_of(33, layer)
        assert name == f"layer.{layer}" and np.array_equal(words, rows.encode(k, v, "f16"))
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


def test_an_empty_sequence(cache: za.KVCache, tmp_path: Path) -> None:
    filled(cache, 0).save(tmp_path / "file")
    seq = cache.load(tmp_path / "file")
    assert seq.lengths == (0, 0) and cache.free_tokens == cache.capacity
    cache.append(seq, 0, *rows_of(1, 1))


def test_saving_replaces_a_file_only_when_complete(
    cache: za.KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    seq = filled(cache, 33)
    seq.save(path)
    old = path.read_bytes()
    seq.truncate(20)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheFileError) as caught:
        seq.save(path)
    assert str(caught.value) == f"{path}: cannot be written: No space left on device"
    assert path.read_bytes() == old and [p.name for p in tmp_path.iterdir()] == ["file"]
    monkeypatch.undo()
    seq.save(path)
    assert path.read_bytes() != old and len(cache.load(path)) == 20
    with pytest.raises(CacheFileError) as caught:
        seq.save(tmp_path / "nowhere" / "file")
    assert str(caught.value) == f"{tmp_path / 'nowhere' / 'file'}: cannot be written: No such file or directory"
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


def flipped(at: int) -> Any:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def resummed(data: bytes) -> bytes:
    """NaN values under a checksum that fits."""
    size, _ = parts(data)
    data = data[:size] + b"\xff\xff\xff\xff" + data[size + 4 :]
    return meta(sha256=hashlib.sha256(data[size:]).hexdigest())(data)


def three_layers(header: Any) -> None:
    header["layer.2"] = {"dtype": "U32", "shape": [0, 2, 64], "data_offsets": [33 * 512 * 2] * 2}


DAMAGED = [
    ("empty", lambda data: b"", "truncated, or not a safetensors file: "),
    ("text", lambda data: b"hello, this is some text\n" * 100, "truncated, or not a safetensors file: "),
    ("header cut", lambda data: data[:100], "truncated, or not a safetensors file: "),
    ("data cut", lambda data: data[:-4], "truncated, or not a safetensors file: "),
    ("more data", lambda data: data + b"1234", "truncated, or not a safetensors file: "),
    (
        "foreign",
        lambda data: with_header(data, lambda header: header.pop("__metadata__")),
        "format: got None, expected 'zinc_attn kv cache'",
    ),
    ("newer", meta(version="2"), "version: got '2', expected '1'"),
    ("shape", meta(shape="8/2/64"), "shape: got 8/2/64, expected 4/2/64, the cache's"),
    (
        "all of it",
        meta(shape="4/2/128", dtype="q8_0", num_layers="3"),
        "shape: got 4/2/128, expected 4/2/64, the cache's; dtype: got q8_0, expected f16, the cache's; "
        "num_layers: got 3, expected 2, the cache's",
    ),
    ("tokens", meta(tokens="-1"), "tokens: got '-1', expected a number"),
    (
        "fewer tokens",
        meta(tokens="32"),
        "layer.0: got U32 [33, 2, 64], expected U32 [32, 2, 64] for 32 tokens",
    ),
    (
        "tensors",
        lambda data: with_header(data, three_layers),
        "got tensors ['layer.0', 'layer.1', 'layer.2'], expected ['layer.0', 'layer.1']",
    ),
    ("bit flip", flipped(-1000), "sha256 of the data: got "),
    ("NaN", resummed, "layer.0: a value that no cache stores in tokens 0 to 8191; the file is damaged"),
]


@pytest.mark.parametrize(("damage", "message"), [d[1:] for d in DAMAGED], ids=[d[0] for d in DAMAGED])
def test_a_wrong_file_is_refused_and_changes_nothing(
    cache: za.KVCache, tmp_path: Path, damage: Any, message: str
) -> None:
    path = tmp_path / "file"
    seq = filled(cache, 33)
    seq.save(path)
    path.write_bytes(damage(path.read_bytes()))
    attn = za.Attention(cache)
    bits = [attn(query(), seq, layer).tobytes() for layer in range(LAYERS)]
    before = cache.free_tokens, cache.max_k, list(cache.sequences)
    with pytest.raises(CacheFileError) as caught:
        cache.load(path)
    got = str(caught.value)
    assert got == f"{path}: {message}" or (
        message.endswith(": " if "safe" in message else "got ") and got.startswith(f"{path}: {message}")
    )
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, za.ZincAttnError)
    assert (cache.free_tokens, cache.max_k, list(cache.sequences)) == before
    cache.pool.check([seq.pages])
    assert bits == [attn(query(), seq, layer).tobytes() for layer in range(LAYERS)]


def test_files_and_caches_of_another_kind(device: za.Device, cache: za.KVCache, tmp_path: Path) -> None:
    path = tmp_path / "file"
    filled(cache, 33).save(path)
    for shape, layers, dtype, message in (
        (za.AttnShape(4, 2, 128), 2, "f16", "shape: got 4/2/64, expected 4/2/128, the cache's"),
        (SHAPE, 3, "f16", "num_layers: got 2, expected 3, the cache's"),
        (SHAPE, 2, "bf16", "dtype: got f16, expected bf16, the cache's"),
    ):
        other = za.KVCache(device, shape, layers, 64, dtype, 16)
        with pytest.raises(CacheFileError) as caught:
            other.load(path)
        assert str(caught.value) == f"{path}: {message}"
        other.close()
    for missing, said in ((tmp_path / "nothing", "No such file or directory"), (tmp_path, "")):
        with pytest.raises(CacheFileError) as caught:
            cache.load(missing)
        assert str(caught.value).startswith(f"{missing}: ") and said in str(caught.value)


def test_no_room_for_what_is_in_the_file(device: za.Device, cache: za.KVCache, tmp_path: Path) -> None:
    path = tmp_path / "file"
    filled(cache, 33).save(path)
    small = za.KVCache(device, SHAPE, LAYERS, 64, "f16", 16, max_sequences=2)
    seq = filled(small, 20)
    with pytest.raises(CapacityError, match="got 33 tokens at length 0, expected at most 32"):
        small.load(path)
    assert small.free_tokens == 32 and small.sequences == [seq]
    seq.truncate(0)
    other = small.new_sequence()
    with pytest.raises(errors.LimitError, match="max_sequences: 2 sequences are live"):
        small.load(path)
    assert small.free_tokens == 64 and small.sequences == [seq, other]
    other.free()
    assert len(small.load(path)) == 33
    small.close()


def test_without_safetensors_the_message_says_how_to_get_it(
    cache: za.KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    filled(cache, 3).save(path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(errors.RuntimeUnavailableError) as caught:
        cache.load(path)
    assert str(caught.value) == (
        "KVCache.load needs the package safetensors, which is not installed; pip install 'zinc-attn[files]'"
    )
