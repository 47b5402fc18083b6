"""llama-cpp-python with the KV cache and attention of zinc_attn: call ``load`` before the first ``Llama``."""

from __future__ import annotations

import ctypes
import importlib
import os
from pathlib import Path

from ..errors import RuntimeUnavailableError


def load(library: str | os.PathLike[str] | None = None) -> None:
    """Load libggml-zinc.so, which docs/llama.md says how to build, into the ggml that llama_cpp has.

    library: its file; None: the one that $GGML_BACKEND_PATH names. ``Llama(…, n_gpu_layers=-1, flash_attn=True)`` then
    has its cache and attention there, and its weights on the CPU.

    RuntimeUnavailableError: ggml does not take the library, because it is for another version of ggml, or there is no
    Vulkan device or no kernels. The library says on stderr which.
    """
    path = Path(library or os.environ.get("GGML_BACKEND_PATH", "libggml-zinc.so")).absolute()
    bound = importlib.import_module("llama_cpp.llama_cpp")
    register = bound._lib.ggml_backend_load  # of the ggml that libllama is linked to
    register.argtypes, register.restype = [ctypes.c_char_p], ctypes.c_void_p
    if not register(os.fsencode(path)):
        raise RuntimeUnavailableError(f"ggml does not take {path}: the reason is on stderr")
