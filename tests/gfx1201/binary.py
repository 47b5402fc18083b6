"""The machine code of a pipeline, out of its VkPipelineCache: RADV hands it out nowhere else."""

from __future__ import annotations

import struct
from typing import Any, Final

from zinc_attn.errors import KernelError

_HEADER: Final = 32  # of Vulkan's own; then the number of entries, and each: type, key size, data size, key, data
_KEY: Final = 32  # bytes of a shader's key, where a pipeline's is shorter
# struct radv_shader_binary_legacy: a type, ac_shader_config, RADV's own facts, and then these sizes and the parts.
_CONFIG: Final = (
    *("sgprs", "vgprs", "shared_vgprs", "spilled_sgprs", "spilled_vgprs", "lds", "ps_ena", "ps_addr", "float_mode"),
    *("scratch_bytes", "rsrc1", "rsrc2", "rsrc3"),
)
_LDS_STEP: Final = 512


def read_binary(cache: bytes) -> dict[str, Any]:
    """{"code": the words in hexadecimal, and the program's registers, LDS, float mode, scratch} of one pipeline."""
    try:
        (data,) = (data for key, data in _entries(cache) if len(key) == _KEY)
        words = struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4])
        config = dict(zip(_CONFIG, words[1:], strict=False))
        index = words.index(len(data), len(_CONFIG) + 1)  # the total size, behind the facts
        code, executed, ir, disassembly, statistics = words[index + 2 : index + 7]
        begin = 4 * (index + 8) + statistics
        whole = words[0] == 0 and begin + code + ir + disassembly == len(data) and 0 < executed <= code
        # the mode stands twice: a struct with other fields than these would not agree
        if not whole or executed % 4 or config["rsrc1"] >> 12 & 0xFF != config["float_mode"]:
            raise ValueError
    except (ValueError, struct.error):
        raise KernelError(
            f"pipeline cache: got {len(cache)} bytes that are laid out otherwise, expected one program as RADV of Mesa "
            "25.0 keeps it; compile with that version"
        ) from None
    config["lds"] *= _LDS_STEP
    return config | {"code": data[begin : begin + executed].hex()}


def _entries(cache: bytes) -> list[tuple[bytes, bytes]]:
    """(key, data) of every entry of Mesa's container, which must end where the last one does."""
    (count,) = struct.unpack_from("<I", cache, _HEADER)
    entries, offset = [], _HEADER + 4
    for _ in range(count):
        _, key, size = struct.unpack_from("<iII", cache, offset)
        begin = -(-(offset + 12 + key) // 8) * 8
        entries.append((cache[offset + 12 : offset + 12 + key], cache[begin : begin + size]))
        offset = begin + size
    if offset != len(cache):
        raise ValueError
    return entries
