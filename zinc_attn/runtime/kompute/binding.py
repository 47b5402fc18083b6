"""The ``kp`` module: its build that this package can use, and its errors made typed ones."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from ...errors import RuntimeUnavailableError, ZincAttnError

VERSION: Final = 2  # of kp.zinc_attn, see scripts/lib/kp_zinc_attn.hpp
_RESULT: Final = re.compile(r"zinc_attn: (vk\w+): VkResult (-?\d+)")  # scripts/lib/kp_checked.hpp writes it


def load_kp() -> Any:
    """The ``kp`` module. RuntimeUnavailableError where it is not installed, or is another build."""
    try:
        import kp
    except ImportError as error:
        raise RuntimeUnavailableError(
            "runtime 'kompute' needs the package kp, which is not installed; build it with scripts/build_kp.sh from a "
            "clone of the repository, or use runtime='vulkan'"
        ) from error
    if (version := getattr(getattr(kp, "zinc_attn", None), "version", None)) != VERSION:
        what = f"has version {version} of kp.zinc_attn, expected {VERSION}"
        if version is None:
            what = "ignores Vulkan's errors, so that a failed wait would give wrong results, and has no kp.zinc_attn"
        raise RuntimeUnavailableError(
            f"runtime 'kompute': the installed kp {what}; build kp with scripts/build_kp.sh from a clone of the "
            "repository, or use runtime='vulkan'"
        )
    return kp


@contextmanager
def typed(check: Callable[[int, str], None]) -> Iterator[None]:
    """Hand the VkResult and the function of an exception of kp to ``check``, which raises the typed error."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ZincAttnError):
            raise
        if match := _RESULT.search(str(error)):
            check(int(match[2]), match[1])
        raise ZincAttnError(f"Kompute: {error}") from error
