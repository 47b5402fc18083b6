"""Sizes rounded up, so that few recordings serve many calls."""


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n`` and 1."""
    return 1 << max(n - 1, 0).bit_length()


def padded(n: int, limit: int, least: int = 1) -> int:
    """The least power of two that is at least ``n`` and ``least``, but not beyond ``limit`` where ``n`` is not."""
    return max(min(power_of_two(max(n, least)), limit), n)
