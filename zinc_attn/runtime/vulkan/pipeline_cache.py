"""The driver's pipeline cache, kept on disk between processes. What cannot be read or written is done without."""

from __future__ import annotations

import hashlib
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

from ...files import cache_folder, open_regular, replacing
from .device import LogicalDevice

_MAGIC: Final = b"zinc_attn pipeline cache 1\n"  # then the SHA-256 of the driver's data, then the data
_HEADER_BYTES: Final = 32  # of VkPipelineCacheHeaderVersionOne, with which the driver's data begin


class PipelineCache:
    """A VkPipelineCache, filled from a file that only this driver and device write.

    file: below ZINC_ATTN_CACHE_DIR, or the user's cache folder; None where there is no such folder.
    """

    def __init__(self, device: LogicalDevice) -> None:
        self._device = device
        props = device.properties
        head = struct.pack("=IIII", _HEADER_BYTES, 1, props.vendorID, props.deviceID)
        self.header = head + bytes(props.pipelineCacheUUID)
        key = self.header + struct.pack("=I", props.driverVersion) + device.info.driver.encode()
        self.file: Path | None = None
        self.digest = b""  # of what the file holds
        data = b""
        if folder := cache_folder():
            self.file = folder / "pipelines" / f"{hashlib.sha256(key).hexdigest()[:32]}.bin"
            with suppress(OSError), open_regular(self.file) as file:
                stored = file.readall().removeprefix(_MAGIC)
                digest, found = stored[:32], stored[32:]
                if hashlib.sha256(found).digest() == digest and found[:_HEADER_BYTES] == self.header:
                    data, self.digest = found, digest
        create = device.vk.struct(
            "VkPipelineCacheCreateInfo", initialDataSize=len(data), pInitialData=device.ffi.from_buffer(data)
        )
        self.handle = device.create(device.own, "PipelineCache", create)

    def save(self) -> None:
        """Write what the driver has made by now, where that has changed."""
        data = self._data()
        if self.file is None or data is None or (digest := hashlib.sha256(data).digest()) == self.digest:
            return
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.file, 0o600) as file:
                file.write(_MAGIC + digest + data)
            self.digest = digest

    def _data(self) -> bytes | None:
        """The driver's data; None where it gives none, or only a header."""
        device, size = self._device, self._device.ffi.new("size_t*")
        get = device.lib.vkGetPipelineCacheData
        if get(device.handle, self.handle, size, device.null) or size[0] <= _HEADER_BYTES:
            return None
        raw = device.ffi.new("char[]", size[0])
        if get(device.handle, self.handle, size, raw):
            return None
        return bytes(device.ffi.buffer(raw, size[0]))
