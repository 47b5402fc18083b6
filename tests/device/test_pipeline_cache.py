"""The driver's compiled code on disk, which package and C library share: where it lies, and that what cannot be used is
done without."""

import ctypes as c
import fcntl
import os
import pwd
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import platformdirs
import pytest
from c_host import SHIMMED, Options, declared, library, needs_compiler
from engine import Owner
from faults import Layer, shim
from little_kernels import best_info, works

from zinc_attn.files import cache_folder
from zinc_attn.runtime import loader as libvulkan
from zinc_attn.runtime.vulkan import VulkanRuntime, pipeline_cache

pytestmark = needs_compiler

# --- processes whose driver has a pipeline cache of ``blob``, and what the driver was given at the start --------

# The software drivers keep nothing but the 32-byte header.
SESSION = threading.local()  # blob, and what its driver was given


@pytest.fixture(autouse=True, scope="module")
def driver():
    """The shim's driver, which has the blob of its thread."""
    ffi, layer = libvulkan.loader().ffi, Layer(shim())

    def get_data(real, device, cache, size, data):
        size[0] = len(SESSION.blob)
        if data != ffi.NULL:
            ffi.memmove(data, SESSION.blob, len(SESSION.blob))
        return 0

    def create(real, device, info, *rest):
        SESSION.given = bytes(ffi.buffer(info.pInitialData, info.initialDataSize))
        info.initialDataSize = 0
        return int(real(device, info, *rest)) if SESSION.blob else -1

    with layer.replaced("vkGetPipelineCacheData", get_data), layer.replaced("vkCreatePipelineCache", create):
        yield


def package(blob: bytes) -> bytes:
    SESSION.blob, vk = blob, libvulkan.loader()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vk, "lib", vk.ffi.dlopen(str(shim())))
        with closing(VulkanRuntime(best_info())) as runtime:
            works(runtime)
    return SESSION.given


def c_library(blob: bytes, before_the_end: Callable[[], object] = bool) -> bytes:
    SESSION.blob, loaded, owner = blob, declared(library(SHIMMED)), Owner(best_info(), 4096)
    device = c.c_void_p(loaded.za_device_from(c.byref(owner.host(get_proc=Layer(shim()).get_proc))))
    attn = c.c_void_p(loaded.za_open(device, c.byref(Options(2, 1, 16, dtype=1, page_size=64))))
    loaded.za_cache_free(c.c_void_p(loaded.za_cache_make(attn, 1, 1, None, None)))
    before_the_end()
    assert attn and loaded.za_close(attn) and loaded.za_device_close(device), loaded.za_error()
    owner.close()
    return SESSION.given


SESSIONS = pytest.mark.parametrize("session", (package, c_library))


def as_stored(blob):
    return pipeline_cache._MAGIC + pipeline_cache.checksum(blob) + blob


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The cache of the best device: its file, and the header of what it holds."""
    monkeypatch.setenv("ZINC_ATTN_CACHE_DIR", str(tmp_path))
    with closing(VulkanRuntime(best_info())) as runtime:
        return runtime._pipelines.cache


# --- where it lies ---------------------------------------------------------------------------------------------


@SESSIONS
@pytest.mark.parametrize("variable, below", (("XDG_CACHE_HOME", ""), ("HOME", ".cache"), ("HOME", None), ("", None)))
def test_the_folder(place, monkeypatch, tmp_path, session, variable, below):
    """None: of a relative path, or without a home directory."""
    for name in ("ZINC_ATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a KeyError
    monkeypatch.setenv(variable or "_", "relative" if below is None else str(tmp_path))
    assert session(place.header + b"first") == b""
    files = [] if below is None else [tmp_path / below / "zinc_attn" / "pipelines" / place.file.name]
    assert [*tmp_path.rglob("pipelines/*.bin")] == files


def test_the_folder_of_older_platformdirs(monkeypatch):
    monkeypatch.delenv("ZINC_ATTN_CACHE_DIR", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: Path("~/.cache/zinc_attn"))
    assert cache_folder() is None


# --- what it holds ---------------------------------------------------------------------------------------------


@SESSIONS
@pytest.mark.parametrize("other", (package, c_library))
def test_round_trip(place, session, other):
    assert session(place.header) == b"" and not place.file.exists()
    blobs = [place.header + kept for kept in (b"first", b"second, longer", b"")]
    for one, found, kept in zip((session, other, session), (b"", *blobs), blobs, strict=False):
        assert one(kept) == found
        assert [path.name for path in place.file.parent.iterdir()] == [place.file.name]  # no temporary file is left
    assert place.file.read_bytes() == as_stored(blobs[1])
    assert place.file.stat().st_mode & 0o777 == 0o600


@SESSIONS
@pytest.mark.parametrize("damage", ("empty", "garbage", "short", "flipped", "foreign", "old", "huge"))
def test_a_damaged_file_is_written_anew(place, session, damage):
    blob, foreign = place.header + bytes(100), bytes(132)
    stored = as_stored(blob)
    contents = {
        "empty": b"",
        "garbage": b"\xff" * 300,
        "short": stored[:-1],
        "flipped": stored[:-1] + b"\1",
        "foreign": as_stored(foreign),
        "old": stored.replace(b"cache 2", b"cache 1"),
    }
    place.file.parent.mkdir()
    place.file.write_bytes(contents.get(damage, stored))
    if damage == "huge":  # and takes no room
        os.truncate(place.file, 1 << 40)
    assert session(blob) == b"" and place.file.read_bytes() == stored


@SESSIONS
@pytest.mark.parametrize("folder", ("pipelines", "of the file", "/dev/null", 5000 * "long"))
def test_a_file_that_cannot_be_written(place, session, folder, tmp_path, monkeypatch):
    """Also for root: there is a file where a folder should be, or a folder in the file's place."""
    if folder == "pipelines":
        (tmp_path / folder).write_text("")
    elif folder == "of the file":
        place.file.mkdir(parents=True)
    else:
        monkeypatch.setenv("ZINC_ATTN_CACHE_DIR", folder)
    assert session(place.header + b"first") == b""
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != folder]


def test_processes_at_once(place):
    """Their names for the file that is not complete are one, which who has the lock writes."""
    blobs = {bytes([i]) * 100_000 for i in range(4)}
    unfinished = place.file.with_name("unfinished")
    place.file.parent.mkdir()
    unfinished.write_bytes(b"what a killed process left" * 10_000)
    with open(unfinished, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        c_library(place.header + b"another")
        assert not place.file.exists() and unfinished.exists()
    kept = unfinished.rename(unfinished.with_name("of someone else"))
    unfinished.symlink_to(kept)
    c_library(place.header + b"another")
    assert not place.file.exists() and kept.stat().st_size
    kept.replace(unfinished)
    with ThreadPoolExecutor(4) as threads:
        arguments = [*threads.map(c_library, [place.header + blob for blob in blobs for _ in range(8)])]
    assert {one[len(place.header) :] for one in arguments} <= blobs | {b""}
    assert place.file.read_bytes() in {as_stored(place.header + blob) for blob in blobs}
    assert [path.name for path in place.file.parent.iterdir()] == [place.file.name]


def test_a_host_that_closes_nothing(place):
    """The first call that makes no pipeline saves those of the calls before it; a driver may make no cache."""
    seen = []
    c_library(b"", lambda: seen.append(place.file.exists()))
    c_library(place.header + b"first", lambda: seen.append(place.file.read_bytes()))
    assert seen == [False, as_stored(place.header + b"first")]
