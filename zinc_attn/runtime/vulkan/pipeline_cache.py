"""The driver's pipeline cache, kept on disk between processes. A file that cannot be read or written is ignored.

The C library has the same files (native/src/pipeline_cache.c).
"""

import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final

from ...files import cache_folder, open_regular, replacing
from .device import LogicalDevice

_MAGIC: Final = b"zinc_attn pipeline cache 2\n"  # then the CRC-32 of the driver's data, then the data
_HEADER_BYTES: Final = 32  # of VkPipelineCacheHeaderVersionOne, with which the driver's data begin


def checksum(data: bytes) -> bytes:
    """The checksum of the driver's data, as a file has it."""
    return struct.pack("=I", zlib.crc32(data))


class PipelineCache:
    """A VkPipelineCache, filled from a file that only this driver and device write.

    file: below ZINC_ATTN_CACHE_DIR, or the user's cache folder; None where there is no such folder.
    """

    def __init__(self, device: LogicalDevice) -> None:
        self._device = device
        props = device.properties
        head = struct.pack("=IIII", _HEADER_BYTES, 1, props.vendorID, props.deviceID)
        self.header = head + (uuid := bytes(props.pipelineCacheUUID))
        self.file: Path | None = None
        self.checksum = b""  # of the data in the file
        data = b""
        if folder := cache_folder():
            numbers = props.vendorID, props.deviceID, props.driverVersion, zlib.crc32(uuid)
            self.file = folder / "pipelines" / ("-".join(f"{x:08x}" for x in numbers) + ".bin")
            with suppress(OSError), open_regular(self.file) as file:
                stored = file.read(1 << 28).removeprefix(_MAGIC)  # a larger one is none of the driver's
                driver_data = stored[4:]
                if checksum(driver_data) == stored[:4] and driver_data[:_HEADER_BYTES] == self.header:
                    data, self.checksum = driver_data, stored[:4]
        create = device.vk.struct(
            "VkPipelineCacheCreateInfo", initialDataSize=len(data), pInitialData=device.ffi.from_buffer(data)
        )
        self.handle = device.create(device.undo, "PipelineCache", create)

    def save(self) -> None:
        """Write the driver's data if they have changed."""
        data = self._data()
        if self.file is None or data is None or (new := checksum(data)) == self.checksum:
            return
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.file, 0o600) as file:
                file.write(_MAGIC + new + data)
            self.checksum = new

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
