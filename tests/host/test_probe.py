"""Choosing a device, and the refusals of the machine. Needs no Vulkan."""

import builtins
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from support import CPU

from zinc_attn.errors import ArgumentError, DeviceNotFoundError, NoVulkanError, RuntimeUnavailableError
from zinc_attn.runtime import devices as machine
from zinc_attn.runtime import loader as libvulkan
from zinc_attn.runtime.protocol import DeviceInfo


def device(index: int, name: str, kind: str) -> DeviceInfo:
    return dataclasses.replace(CPU, index=index, name=name, kind=kind)


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
        ([CPU], None, CPU),
        ([CPU, IGPU], None, IGPU),
        ([CPU, IGPU, CARD], None, CARD),
        ([OTHER, CPU, VIRTUAL], None, VIRTUAL),
        ([OTHER, CPU], None, CPU),
        ([OTHER], None, OTHER),
        ([CPU, TWIN_B, TWIN_A], None, TWIN_A),
        *(([CPU, IGPU, CARD], one, CPU) for one in (0, "LLVMPIPE")),
        *(([CPU, IGPU, CARD], one, CARD) for one in ("2", "gfx1201")),
        *(([CPU, IGPU, CARD], one, IGPU) for one in (" 1 ", "780m")),
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
        *(([CPU, IGPU], one, DeviceNotFoundError, NONE.format(one)) for one in ("foo", 7, "7", -1, "")),
        ([CPU, TWIN_A, TWIN_B], "h200", DeviceNotFoundError, TWO),
        *(([CPU], one, ArgumentError, NO_NAME.format(one)) for one in (True, 1.0)),
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
        (OSError("Cannot find Vulkan SDK"), NoVulkanError, "there is no libvulkan on this machine: install"),
        (ImportError("vulkan"), RuntimeUnavailableError, "the Python package `vulkan` is missing: pip"),
    ],
)
def test_missing_loader(monkeypatch, raised, error, text):
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "vulkan":
            raise raised
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(error) as caught:
        libvulkan.Vulkan()
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("vendor", "name"), [(0x1002, "AMD"), (0x10DE, "NVIDIA"), (0x10005, "Mesa"), (0xABC, "0x0ABC")]
)
def test_vendor_name(vendor, name):
    assert machine.vendor_name(vendor) == name


NODE = {"kind": 2, "invocations": 1024, "height": 1024, "shared": 65536, "subgroup": 64, "least": 32}


@pytest.mark.parametrize(
    ("change", "works"),
    (
        ({}, True),
        ({"subgroup": 32, "least": None}, True),
        ({"least": None}, False),  # 64 invocations, and no other size
        ({"least": 64}, False),
        ({"subgroup": 16, "least": None}, False),
        ({"subgroup": 8, "least": None, "kind": 4}, True),  # a CPU
        ({"shared": 32768}, True),  # AMD's driver for Windows
        ({"shared": 16384}, False),
        ({"invocations": 128}, False),
        ({"height": 4}, False),
    ),
)
def test_node_workgroups(change, works):
    facts = NODE | change
    limits = SimpleNamespace(
        maxComputeWorkGroupInvocations=facts["invocations"],
        maxComputeWorkGroupSize=(1024, facts["height"], 64),
        maxComputeSharedMemorySize=facts["shared"],
    )
    told = {
        "VkPhysicalDeviceSubgroupProperties": SimpleNamespace(subgroupSize=facts["subgroup"]),
        "VkPhysicalDeviceSubgroupSizeControlProperties": SimpleNamespace(
            minSubgroupSize=facts["least"], maxSubgroupSize=64, requiredSubgroupSizeStages=0x20
        ),
    }
    props = SimpleNamespace(limits=limits, deviceType=facts["kind"])
    vk: Any = SimpleNamespace(properties=lambda device, *names: [props, *(told[name] for name in names)])
    extensions = set() if facts["least"] is None else {"VK_EXT_subgroup_size_control"}
    assert machine._node_workgroups(vk, None, extensions, 1 << 22) is works
