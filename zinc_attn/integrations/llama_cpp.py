"""llama-cpp-python with models on zinc_attn's device: call ``load`` before the first ``Llama``."""

import ctypes
import importlib
import os
from pathlib import Path

from ..errors import ArgumentError, RuntimeUnavailableError
from ..files import open_regular, refusing
from ..runtime.cpu.building import LIBRARIES


def load(library: str | os.PathLike[str] | None = None) -> None:
    """Load libggml-zinc.so into the ggml that llama_cpp has.

    library: its file; None: the one that $GGML_BACKEND_PATH names, or else the platform wheel's. Afterwards
    ``Llama(…, n_gpu_layers=-1, flash_attn=True)`` has its weights, its KV cache and all of its operations there.
    Several may be opened and used in several threads.

    ArgumentError: neither names a library, or there is no such file. RuntimeUnavailableError: llama-cpp-python is not
    installed or finds no llama.cpp, or its ggml does not take the library, because it is for another version of ggml,
    or there is no Vulkan device or no kernels; the library says on stderr which.
    """
    carried = LIBRARIES / "libggml-zinc.so"
    chosen = library or os.environ.get("GGML_BACKEND_PATH") or (carried if carried.exists() else None)
    if not chosen:
        raise ArgumentError("library: got none, expected the path of libggml-zinc.so, here or in $GGML_BACKEND_PATH")
    path = Path(chosen).absolute()
    with refusing(path, "libggml-zinc.so, as docs/llama.md builds it"), open_regular(path):
        pass
    try:
        bound = importlib.import_module("llama_cpp.llama_cpp")
    except ModuleNotFoundError as error:
        raise RuntimeUnavailableError("llama-cpp-python is not installed: docs/llama.md says how") from error
    except (FileNotFoundError, RuntimeError) as error:
        advice = "name the folder of libllama.so in $LLAMA_CPP_LIB_PATH"
        if "GLIBC" in str(error):  # libc's own name of the version that it lacks
            advice = "that llama.cpp was built on a later system: build it on this one, as docs/llama.md does"
        elif folder := os.environ.get("LLAMA_CPP_LIB_PATH"):
            advice = f"$LLAMA_CPP_LIB_PATH: got {folder}, expected the folder of a libllama.so that can be loaded"
        raise RuntimeUnavailableError(f"llama-cpp-python: {error}; {advice}") from error
    register = bound._lib.ggml_backend_load  # of the ggml that libllama is linked to
    register.argtypes, register.restype = [ctypes.c_char_p], ctypes.c_void_p
    if not register(os.fsencode(path)):
        raise RuntimeUnavailableError(f"ggml does not take {path}: the reason is on stderr")
