"""Choosing a device, and the refusals of the machine. Needs no Vulkan."""

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support import CPU, GPU

from zinc_attn.errors import ArgumentError, DeviceNotFoundError, LimitError, NoVulkanError, RuntimeUnavailableError
from zinc_attn.runtime import devices as machine
from zinc_attn.runtime import loader as libvulkan
from zinc_attn.runtime.protocol import DeviceInfo
from zinc_attn.runtime.vulkan import VulkanRuntime


def device(index: int, name: str, kind: str) -> DeviceInfo:
    return replace(CPU, index=index, name=name, kind=kind)


IGPU = device(1, "AMD Radeon 780M", "integrated")
CARD = device(2, "AMD Radeon RX 9070 XT (RADV GFX1201)", "discrete")
TWIN_A = device(3, "NVIDIA H200", "discrete")
TWIN_B = device(4, "NVIDIA H200", "discrete")
NVL = device(5, "NVIDIA H200 NVL", "discrete")
VIRTUAL = device(6, "virtio", "virtual")
OTHER = device(7, "thing", "other")


@pytest.mark.parametrize(
    ("devices", "request_", "chosen"),
    [
        ([CPU, IGPU], None, IGPU),
        ([CPU, IGPU, CARD], None, CARD),
        ([OTHER, CPU, VIRTUAL], None, VIRTUAL),
        ([OTHER, CPU], None, CPU),
        ([CPU, TWIN_B, TWIN_A], None, TWIN_A),
        *(([CPU, IGPU, CARD], query, CPU) for query in (0, "LLVMPIPE")),
        *(([CPU, IGPU, CARD], query, CARD) for query in ("2", "gfx1201")),
        *(([CPU, IGPU, CARD], query, IGPU) for query in (" 1 ", "780m")),
        ([TWIN_A, NVL], "nvidia h200", TWIN_A),  # a whole name wins over a piece
        ([TWIN_A, NVL], "nvl", NVL),
        ([TWIN_A, TWIN_B], 4, TWIN_B),
    ],
)
def test_choose(devices, request_, chosen):
    assert machine.choose(devices, request_) is chosen


BOTH = "0: llvmpipe (LLVM 15.0.6, 256 bits) (cpu), 1: AMD Radeon 780M (integrated)"
NONE = f"device: no Vulkan device matches {{!r}}; the devices are {BOTH}"
TWO = "device: 'h200' matches 2 devices, give an index: 3: NVIDIA H200 (discrete), 4: NVIDIA H200 (discrete)"
NO_NAME = "device: got {}, expected None, an index or a piece of a device's name"


@pytest.mark.parametrize(
    ("devices", "request_", "error", "text"),
    [
        *(([CPU, IGPU], query, DeviceNotFoundError, NONE.format(query)) for query in ("foo", 7, "7", -1, "")),
        ([CPU, TWIN_A, TWIN_B], "h200", DeviceNotFoundError, TWO),
        *(([CPU], query, ArgumentError, NO_NAME.format(query)) for query in (True, 1.0)),
        ([], None, NoVulkanError, f"there is no Vulkan device: {machine.INSTALL_DRIVER}"),
    ],
)
def test_choose_refuses(devices, request_, error, text):
    with pytest.raises(error) as caught:
        machine.choose(devices, request_)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("raised", "error", "text"),
    [
        ("OSError('Cannot find Vulkan SDK')", NoVulkanError, "there is no libvulkan on this machine: install"),
        ("ImportError('vulkan')", RuntimeUnavailableError, "the Python package `vulkan` is missing: pip"),
    ],
)
def test_missing_loader(monkeypatch, tmp_path, raised, error, text):
    (tmp_path / "vulkan.py").write_text(f"raise {raised}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vulkan", raising=False)
    with pytest.raises(error, match=f"^{text}"):
        libvulkan.Vulkan()


LIMITS = {
    "maxComputeWorkGroupInvocations": 1024,
    "maxComputeWorkGroupSize": (1024, 1, 1),
    "maxComputeSharedMemorySize": 32768,  # AMD's driver for Windows
}


@pytest.mark.parametrize(
    ("change", "refusal"),
    (
        ({}, None),
        ({"maxComputeSharedMemorySize": 16384}, "maxComputeSharedMemorySize is 16384, expected 30464 or more"),
        ({"maxComputeWorkGroupInvocations": 128}, "maxComputeWorkGroupInvocations is 128, expected 256 or more"),
        ({"maxComputeWorkGroupSize": (128, 8, 1)}, "maxComputeWorkGroupSize[0] is 128, expected 256 or more"),
    ),
)
def test_a_device_that_cannot_attend(change, refusal):
    """It is listed with the limit, and refused before anything is made on it."""
    assert machine._refusal(SimpleNamespace(**LIMITS | change)) == refusal
    if refusal is not None:
        with pytest.raises(LimitError, match=re.escape(f"cannot attend: {refusal}; use another device")):
            VulkanRuntime(replace(GPU, refusal=refusal))


def test_vendors_have_names():
    assert [machine.vendor_name(number) for number in (0x1002, 0x10005, 0xABC)] == ["AMD", "Mesa", "0x0ABC"]


def test_subgroups_of_a_host_are_no_waves():
    """Nobody has asked a host's driver for them: one that says 32 may run fewer. A CPU's are what they are."""
    assert not replace(GPU, subgroup_size=32).with_own_subgroups().wave_subgroups
    assert CPU.with_own_subgroups() is CPU
