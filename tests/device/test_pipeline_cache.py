"""The driver's compiled code on disk: where it lies, and that a file that cannot be used is done without."""

import hashlib
import pwd
from pathlib import Path

import platformdirs
import pytest
from little_kernels import best_info, works

from zinc_attn.files import cache_folder
from zinc_attn.runtime import loader as libvulkan
from zinc_attn.runtime.vulkan import VulkanRuntime, pipeline_cache


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Opens a runtime whose cache lies below tmp_path, and closes it at the end."""
    monkeypatch.setenv("ZINC_ATTN_CACHE_DIR", str(tmp_path))
    made = []

    def another():
        made.append(VulkanRuntime(best_info()))
        return made[-1]

    yield another
    for one in made:
        one.close()


def test_the_folder(opened, monkeypatch, tmp_path):
    monkeypatch.delenv("ZINC_ATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = opened()._pipelines.cache.file
    assert file is not None and file.parent == tmp_path / "zinc_attn" / "pipelines"


def test_no_folder_without_a_home_directory(opened, monkeypatch):
    def no_entry(uid):
        raise KeyError(uid)

    for name in ("ZINC_ATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    with monkeypatch.context() as patch:
        patch.setattr(platformdirs, "user_cache_path", lambda *_, **__: Path("~/.cache/zinc_attn"))  # older versions
        assert cache_folder() is None
    runtime = opened()
    assert runtime._pipelines.cache.file is None
    works(runtime)


class CachingLibrary:
    """libvulkan with a driver whose pipeline cache holds ``blob``; keeps what it is given at the start."""

    def __init__(self, lib, ffi, blob):
        self._lib, self._ffi, self.blob, self.given = lib, ffi, blob, b""

    def __getattr__(self, name):
        return getattr(self._lib, name)

    def vkGetPipelineCacheData(self, device, cache, size, data):
        if data == self._ffi.NULL:
            size[0] = len(self.blob)
        else:
            self._ffi.memmove(data, self.blob, len(self.blob))
        return 0

    def vkCreatePipelineCache(self, device, info, *rest):
        self.given = bytes(self._ffi.buffer(info.pInitialData, info.initialDataSize))
        info.initialDataSize = 0
        return int(self._lib.vkCreatePipelineCache(device, info, *rest))


def test_round_trip(opened, monkeypatch):
    # the software drivers keep nothing but the 32-byte header
    vk, cache = libvulkan.loader(), opened()._pipelines.cache
    assert not cache.file.exists()
    lib = CachingLibrary(vk.lib, vk.ffi, cache.header + b"first")
    monkeypatch.setattr(vk, "lib", lib)
    for found, kept in ((b"", b"first"), (b"first", b"second, longer"), (b"second, longer", b"")):
        lib.blob = cache.header + kept
        again = VulkanRuntime(best_info())
        assert lib.given == (cache.header + found if found else b"")
        works(again)
        again.close()
        assert [p.name for p in cache.file.parent.iterdir()] == [cache.file.name]  # no temporary file is left


@pytest.mark.parametrize("damage", ["garbage", "short", "flipped", "foreign", "folder", "unwritable"])
def test_damaged(opened, tmp_path, damage):
    cache = opened()._pipelines.cache
    blob, foreign = cache.header + bytes(100), bytes(132)
    stored = pipeline_cache._MAGIC + hashlib.sha256(blob).digest() + blob
    contents = {
        "garbage": b"\xff" * 300,
        "short": stored[:40],
        "flipped": stored[:-1] + b"\1",
        "foreign": pipeline_cache._MAGIC + hashlib.sha256(foreign).digest() + foreign,
    }
    if damage == "unwritable":
        (tmp_path / "pipelines").write_text("a file where a folder should be")
    elif damage == "folder":
        cache.file.mkdir(parents=True)
    else:
        cache.file.parent.mkdir()
        cache.file.write_bytes(contents[damage])
    runtime = opened()
    assert runtime._pipelines.cache.digest == b""
    works(runtime)
