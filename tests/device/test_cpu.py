"""The processor as a device: how it is opened and built, and what its runtime refuses."""

import ctypes
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import CPU_NATIVE, FULL, same

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.cli.arguments import open_devices
from zinc_attn.cli.check import chosen_devices
from zinc_attn.kernels.declarations import COPY_KERNEL
from zinc_attn.runtime import devices as machine
from zinc_attn.runtime.cpu import building
from zinc_attn.runtime.cpu import library as native
from zinc_attn.runtime.cpu.runtime import CpuRuntime
from zinc_attn.runtime.protocol import Dispatch, Use

SHAPE = za.AttnShape(4, 2, 64)
# Which instructions the library may use: those of every processor of the kind, or those that this one has, too.
EXTENSIONS = {
    **{"avx2": "-mavx2", "f16c": "-mavx2 -mf16c -mfma", "avx512bw": "-march=skylake-avx512"},
    "lm": "-O2 -DZINC_CPU_UCONTEXT",  # as on processors that are not x86
}
FORMS = ["-O0", *(flags for name, flags in EXTENSIONS.items() if FULL and f" {name} " in native.machine_flags())]


@pytest.fixture
def cpu(device_of):
    return device_of(*CPU_NATIVE)


def arrays(rng, tokens=100):
    k, v = rng.standard_normal((2, tokens, SHAPE.kv_heads, SHAPE.head_dim), np.float32)
    return rng.standard_normal((SHAPE.q_heads, SHAPE.head_dim), np.float32), k, v


def test_the_processor_is_listed_last_and_named_cpu(cpu):
    *others, last = za.list_devices()
    assert last.native and last == cpu.info and last.index == len(others) and not any(d.native for d in others)
    assert machine.choose([last, *others]).native is (not others)


def test_its_runtime_names_it(cpu, monkeypatch, best_device_index):
    monkeypatch.setenv("ZINC_ATTN_DEVICE", str(best_device_index))
    with za.Device.open(runtime="cpu") as device, za.Device.open("cpu", runtime="cpu") as named:
        assert device.info == named.info == cpu.info
    with pytest.raises(errors.ArgumentError, match=r"'cpu', which .* has not; leave it out, or name the device cpu"):
        za.Device.open(best_device_index, runtime="cpu")
    with pytest.raises(errors.ArgumentError, match="runtime: got 'vulkan', which cpu has not; leave it out"):
        za.Device.open("cpu", runtime="vulkan")
    with ExitStack() as stack:  # the default device has one of a list
        assert [one.runtime.name for one in open_devices(stack, [None], "vulkan,cpu")] == ["vulkan"]
    monkeypatch.setenv("ZINC_ATTN_RUNTIME", "cpu")
    with pytest.raises(errors.ArgumentError, match="runtime: got 'cpu', which"):  # as two variables say
        za.Device.open()
    monkeypatch.delenv("ZINC_ATTN_DEVICE")
    with ExitStack() as stack:  # where there are two kinds, each takes its own
        found = [*open_devices(stack, [None], None), *open_devices(stack, [best_device_index, "cpu"], "vulkan,cpu")]
        assert [one.runtime.name for one in found] == ["cpu", "vulkan", "cpu"]
    assert chosen_devices("all", "cpu") == [cpu.info.index] and cpu.info.index not in chosen_devices("all", "vulkan")


def test_without_vulkan_it_is_the_default(monkeypatch, caplog, rng, cpu):
    def none():
        raise errors.NoVulkanError("the Vulkan loader knows no device")

    monkeypatch.setattr(machine, "list_devices", none)
    monkeypatch.delenv("ZINC_ATTN_DEVICE", raising=False)
    with za.Device.open() as device:
        q, k, v = arrays(rng)
        same([za.attention(q, k, v, device=device)], za.reference.emulate(q, k, v)[:1])
    assert caplog.messages == ["there is no Vulkan device: the processor runs the kernels, as native code"]
    monkeypatch.setattr(native, "compiler", lambda: None)
    with pytest.raises(errors.NoVulkanError, match=r"no device; or, for native code .* install g\+\+ 12 or later"):
        za.list_devices()


def test_without_a_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(native, "compiler", lambda: None)
    with pytest.raises(errors.RuntimeUnavailableError, match=r"cpu: there is no C.. compiler: install"):
        za.Device.open("cpu")


def test_a_library_that_the_wheel_carries_comes_first(cpu, monkeypatch, tmp_path, caplog):
    """The library for this processor. A library that does not serve is named, and the compiler is asked."""
    built, sources = native.library()._name, tmp_path / "cpu"
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setattr(building, "LIBRARIES", tmp_path)
    monkeypatch.setattr(native, "compiler", lambda: None)
    broken, whole = (tmp_path / f"libzinc_cpu{level}.so" for level in ("-v3", ""))
    whole.write_bytes(Path(built).read_bytes())
    if platform.machine() != "x86_64":
        pytest.skip("wheels carry libraries for x86-64")
    assert native.library.__wrapped__()._name == str(whole) and native.no_compiler() is None and not caplog.messages
    broken.write_text("no library")
    monkeypatch.setattr(native, "cpu_facts", lambda: {"flags": " ".join(building.LEVELS["libzinc_cpu-v3.so"])})
    assert native.library.__wrapped__()._name == str(whole)
    assert "libzinc_cpu-v3.so of the package does not serve" in caplog.text
    whole.unlink()
    with pytest.raises(errors.KernelError, match=r"run scripts/build_shaders\.py, or install the wheel"):
        native.library.__wrapped__()
    sources.mkdir()
    (sources / "a.cpp").touch()
    with pytest.raises(errors.RuntimeUnavailableError, match="there is no C"):
        native.library.__wrapped__()


def test_processes_that_build_at_the_same_time_compile_once(tmp_path):
    """The others wait for the first one's library."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho "$@" >>"$0.log"; sleep 0.2; for target; do :; done; : >"$target"')
    compiler.chmod(0o700)
    with ThreadPoolExecutor(3) as pool:
        builds = [pool.submit(building.build, [str(compiler)], [Path("a.cpp")], tmp_path / "b.so") for _ in range(3)]
    assert not any(build.exception() for build in builds)
    assert [line.split()[0] for line in Path(f"{compiler}.log").read_text().splitlines()] == ["-c", "-shared"]


@pytest.mark.parametrize(
    ("flags", "error", "said"),
    (
        ("-mfma -ffp-contract=fast", errors.WrongResultError, "fused a product and a sum"),
        ("-ffast-math", errors.KernelError, "results are exact"),
        ("-std=c++98", errors.KernelError, "use g"),
    ),
)
def test_a_build_whose_bits_would_differ_is_refused(cpu, monkeypatch, tmp_path, flags, error, said):
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("runtime.cpp", "runtime.h", "sources.h"):
        (sources / name).write_bytes((native.SOURCES / name).read_bytes())
    declared = re.findall(r"^extern const NamedKernel (.*);", (native.SOURCES / "runtime.h").read_text(), re.M)
    names = re.findall(r"\w+", " ".join(declared))
    tables = (f"const zinc::NamedKernel zinc::{name}[] = {{{{}}}};" for name in names)
    (sources / "kernels.cpp").write_text("\n".join(['#include "runtime.h"', *tables, ""]))
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setenv("ZINC_ATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ZINC_ATTN_CPU_FLAGS", "-O2")
    native.library.__wrapped__()  # which builds nothing that differs
    monkeypatch.setenv("ZINC_ATTN_CPU_FLAGS", flags)
    with pytest.raises(error, match=said):
        native.library.__wrapped__()
    monkeypatch.setenv("ZINC_ATTN_CACHE_DIR", "/dev/null")
    with pytest.raises(errors.RuntimeUnavailableError, match="set ZINC_ATTN_CACHE_DIR to a folder that can be written"):
        native.library.__wrapped__()


@pytest.mark.parametrize("flags", FORMS)
def test_every_form_of_the_library_has_the_bits(cpu, flags):
    """Attention of each type that takes its own path, and products, in a process with the form of the library."""
    cases = "4/2/64 f16 100,4/2/64 q8_0 100,4/2/64 q5_1 100"
    for options in (("--cases", cases), ("--graph", "q5_0,mxfp4,q2_K,q6_K,f16 experts")):
        command = [sys.executable, "-m", "zinc_attn.cli", "check", *options, "--device", "cpu"]
        done = subprocess.run(
            command, env=os.environ | {"ZINC_ATTN_CPU_FLAGS": flags}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_results_do_not_depend_on_threads(cpu, rng):
    q, k, v = arrays(rng, 3000)
    info = za.list_devices()[-1]
    outs = []
    for threads in (1, 2, 7):
        with za.Device(CpuRuntime(replace(info, compute_units=threads))) as device:
            outs.append(za.attention(q, k, v, device=device))
    same(outs[1:], [outs[0]] * 2)


def test_timings_and_the_end(cpu):
    runtime = CpuRuntime(cpu.info)
    buffers = [runtime.buffer(256, use) for use in (Use.INPUT, Use.CACHE, Use.CACHE)]
    recording = runtime.record([Dispatch(runtime.kernel(COPY_KERNEL, b"", (8, 8)), buffers, (1, 1, 1))], True)
    with pytest.raises(errors.ArgumentError, match="no timings before its first run"):
        runtime.timings(recording)
    runtime.run(recording)
    ((begin, end),) = runtime.timings(recording)
    assert 0 == begin <= end < 10
    buffers[1].close()
    with pytest.raises(errors.ClosedError, match="a buffer that it uses, was closed"):
        runtime.run(recording)
    runtime.close()
    runtime.close()
    with pytest.raises(errors.ClosedError, match="cpu: used after close"):
        runtime.buffer(4, Use.INPUT)


def test_the_float_mode_of_a_caller_changes_nothing(cpu, rng):
    """Kernels round to nearest where the calling thread rounds toward zero, which it does again after the call."""
    libm = ctypes.CDLL(None)
    q, k, v = arrays(rng)
    toward_zero = 0xC00 if platform.machine() == "x86_64" else 0xC00000
    with za.Device(CpuRuntime(replace(cpu.info, compute_units=1))) as device:  # the caller's thread runs all
        before = za.attention(q, k, v, device=device)
        assert libm.fesetround(toward_zero) == 0
        try:
            after, mode = za.attention(q, k, v, device=device), libm.fegetround()
        finally:
            libm.fesetround(0)
    assert mode == toward_zero
    same([after], [before])
