"""``zinc-attn devices``: the Vulkan devices of this machine."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

from ..errors import ZincAttnError
from ..runtime.device import Device, list_devices
from ..runtime.devices import choose
from ..runtime.protocol import DeviceInfo
from .arguments import Subparsers, add_command
from .terminal import binary_size, print_json, print_rows


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.flag("--json", "JSON lines with every field")


def run(args: argparse.Namespace) -> int:
    devices = list_devices()
    if args.json:
        print_json(asdict(d) | {"fused": fused_way(d)} for d in devices)
        return 0
    best = choose(devices, os.environ.get("ZINC_ATTN_DEVICE") or None)
    for d in devices:
        rows = [
            ("kind", f"{d.kind} ({d.vendor})"),
            ("driver", f"{d.driver}, Vulkan {d.api_version}"),
            ("CUs", f"{d.compute_units} ({d.compute_units_source})"),
            ("subgroup", f"{d.subgroup_size} invocations"),
            ("fused", fused_way(d)),
            ("memory", binary_size(d.memory_bytes)),
            ("max buffer", binary_size(d.max_buffer_bytes)),
        ]
        if d.refusal is not None:
            rows.append(("cannot attend", d.refusal))
        print_rows((f"{d.index}{'*' if d is best else ''}", d.name), rows, left=2)
    return 0


def fused_way(info: DeviceInfo) -> str:
    """How the device makes the sums of arithmetic "fused", or why it cannot be asked."""
    try:
        with Device.open(info.index, runtime="vulkan") as device:
            return device.fused_way()
    except ZincAttnError as error:
        return str(error)
