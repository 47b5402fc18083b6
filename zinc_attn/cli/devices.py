"""``zinc-attn devices``: the devices of this machine."""

import argparse
import os
from dataclasses import asdict
from typing import Final

from ..errors import ZincAttnError
from ..runtime.device import Device, list_devices
from ..runtime.devices import choose
from ..runtime.protocol import DeviceInfo
from ..shapes import AttnShape
from ..tools.cost import card_of, issue_shares
from .arguments import Subparsers, add_command
from .plan import issue_text
from .terminal import binary_size, print_json, print_rows

SHAPE: Final = AttnShape(16, 2, 256)


def declare(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, run)
    parser.flag("--json", "JSON lines with every field")


def run(args: argparse.Namespace) -> int:
    devices = list_devices()
    if args.json:
        print_json(asdict(d) | {"fused": fused_way(d), "issue_shares": issue_of(d)} for d in devices)
        return 0
    best = choose(devices, os.environ.get("ZINC_ATTN_DEVICE") or None)
    for d in devices:
        rows = [
            ("kind", f"{d.kind} ({d.vendor})"),
            ("driver", d.driver if d.native else f"{d.driver}, Vulkan {d.api_version}"),
            ("CUs", f"{d.compute_units} ({d.compute_units_source})"),
            ("subgroup", f"{d.subgroup_size} invocations"),
            ("fused", fused_way(d)),
            ("memory", binary_size(d.memory_bytes)),
            ("max buffer", binary_size(d.max_buffer_bytes)),
        ]
        if shares := issue_of(d):
            rows.append(("issue/memory", f"{issue_text(shares)} ({SHAPE}, f16, modeled)"))
        if d.refusal is not None:
            rows.append(("cannot attend", d.refusal))
        print_rows((f"{d.index}{'*' if d is best else ''}", d.name), rows, left=2)
    return 0


def issue_of(info: DeviceInfo) -> dict[str, float] | None:
    """``issue_shares`` of 16/2/256 in float16; None where no facts of the device are known."""
    return issue_shares(SHAPE, card, "f16") if (card := card_of(info.name)) else None


def fused_way(info: DeviceInfo) -> str:
    """How the device makes the sums of arithmetic "fused", or why it cannot be asked."""
    if info.native:
        return "by native code, which the first use compiles and asks"
    try:
        with Device.open(info.index, runtime="vulkan") as device:
            return device.fused_way()
    except ZincAttnError as error:
        return str(error)
