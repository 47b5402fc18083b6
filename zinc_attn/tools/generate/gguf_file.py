"""A GGUF file: what transformers' loader of these files needs or would leave out without a word."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import UnsupportedError
from .hf_model import refusing


@contextmanager
def parsed_once(file: Path) -> Iterator[None]:
    """Parse a GGUF file's header, and make gguf's table of tensor names, once in this block.

    transformers' loader does the first for the config, the weights and the tokenizer each, and the second for every
    module: 53 s in place of 10 for 28 layers and 152,000 tokens. UnsupportedError: a package is missing.
    """
    with refusing(f"model: {file} is a GGUF file, which needs other packages (pip install 'zinc-attn[gguf]')"):
        gguf, _ = map(import_module, ("gguf", "accelerate"))
        own = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in own.items():
            setattr(gguf, name, cache(function))
        yield
    finally:
        for name, function in own.items():
            setattr(gguf, name, function)


def read_header(file: Path) -> dict[str, Any]:
    """The fields of a GGUF file by name, and the names of its tensors; lists and tensors are None.

    UnsupportedError: the file is truncated, no GGUF file, or one part of several.
    """
    import gguf

    with refusing(f"model: {file} is no whole GGUF file, expected one, so copy or download it again"):
        reader = gguf.GGUFReader(os.path.join(file.parent, file.name))  # as transformers spells it
        fields = reader.fields.values()
        found: dict[str, Any] = {one.name: one.contents() if len(one.data) == 1 else None for one in fields}
        parts = int(found.get("split.count", 1))
    if parts > 1:
        raise UnsupportedError(
            f"model: {file} is one of the {parts} parts of a checkpoint, expected a whole one; join them with "
            "llama.cpp's llama-gguf-split --merge"
        )
    return found | {tensor.name: None for tensor in reader.tensors}


def check_scaling(header: dict[str, Any], config: Any) -> None:
    """UnsupportedError where the file scales the rotary positions and the config that was made from it does not."""
    scaling = _scaling(header)
    if scaling and set(_rope_types(getattr(config, "rope_parameters", None))) <= {"default"}:
        import transformers

        raise UnsupportedError(
            f"got scaled rotary positions ({scaling}), which transformers {transformers.__version__} does not "
            "read from a GGUF file; expected a file without, or the same checkpoint as safetensors files"
        )


def _scaling(found: dict[str, Any]) -> str:
    """The field or tensor that scales the rotary positions, or an empty string."""
    prefix = f"{found.get('general.architecture')}.rope."
    if (kind := found.get(f"{prefix}scaling.type", "none")) != "none":
        return f"{prefix}scaling.type = {kind}"
    for name in (f"{prefix}scaling.factor", f"{prefix}scale_linear"):
        if found.get(name, 1) not in (0, 1):  # llama.cpp takes 0 for none
            return f"{name} = {found[name]:g}"
    return min((name for name in found if name.startswith(("rope_freqs", "rope_factors"))), default="")


def _rope_types(parameters: Any) -> Iterator[str]:
    """The rope types that a config states; in some models there is one per layer type."""
    for key, value in parameters.items() if isinstance(parameters, dict) else ():
        if key == "rope_type":
            yield value
        yield from _rope_types(value)
