"""Typed refusals. Each message says what was given, what was expected and, where there is one, what to do."""


class ZincAttnError(Exception):
    """Base of every error this package raises on purpose."""


class ArgumentError(ZincAttnError, ValueError):
    """An argument is wrong; the message names it."""


class ShapeError(ArgumentError):
    """An array's axes do not fit; the message prints the expected axes."""


class DTypeError(ArgumentError):
    """An array's dtype is not one that this argument takes."""


class ValueRangeError(ArgumentError):
    """A value is NaN, infinite or beyond 2**60; the message names its index."""


class LimitError(ArgumentError):
    """A size is beyond a limit of the device; the message states the limit."""


class UnsupportedError(ArgumentError):
    """A model or a host asks for something that this package does not do; the message names it."""


class DeviceNotFoundError(ArgumentError):
    """No Vulkan device matches the request."""


class NoVulkanError(ZincAttnError):
    """There is no Vulkan loader, or no driver, on this machine."""


class RuntimeUnavailableError(ZincAttnError):
    """The dispatcher is not installed, is a build that ignores errors, or cannot do what was asked of it."""


class KernelError(ZincAttnError):
    """The SPIR-V of a kernel is missing, stale, or refused by the driver."""


class WrongResultError(KernelError):
    """The driver computes a number otherwise than the kernels rely on; nothing was attended."""


class DeviceMemoryError(ZincAttnError, MemoryError):
    """The device, or the host, has no room for an allocation."""


class DeviceLostError(ZincAttnError):
    """The driver reported that the device was lost; open a new Device."""


class ClosedError(ZincAttnError):
    """The object was used after close()."""


class ForkedProcessError(ZincAttnError):
    """The object was made in another process; Vulkan handles do not survive fork()."""
