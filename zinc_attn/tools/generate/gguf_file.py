"""A GGUF file: where it is, and what transformers' loader of these files needs or would leave out without a word."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from ...errors import ArgumentError, RuntimeUnavailableError, UnsupportedError
from ...files import CONTENT_BYTES, GGUF, content_of, open_regular
from ..harness.progress import Progress, Steps

PACKAGES: Final = ("gguf", "accelerate")  # what transformers' loader imports beside torch


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says of itself.

    scaling: the name of a field or tensor that scales the rotary positions, "" for none.
    """

    architecture: str
    has_tokenizer: bool
    scaling: str


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that ``path`` names, or the only one in a folder without safetensors files; None for none.

    ArgumentError: there is no such file, or several are in the folder.
    """
    if path.suffix == ".gguf" and not os.path.isdir(path):
        if not os.path.isfile(path):
            raise ArgumentError(f"model: got {str(path)!r}, which is no file, expected a GGUF file or a folder")
        return path
    if not os.path.isdir(path) or any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ArgumentError(f"model: {path} has {len(files)} GGUF files, expected the path of one of them: {names}")
    return files[0] if files else None


def read_header(file: Path) -> GGUFHeader:
    """Read and check the header of a GGUF file, whose packages ``reading`` has checked.

    ArgumentError: no GGUF file, or a truncated one. UnsupportedError: one part of several.
    """
    import gguf

    try:
        with open_regular(file) as opened:
            if content_of(opened.read(CONTENT_BYTES)) != GGUF:
                raise ArgumentError(f"model: {file} does not begin with the letters GGUF, expected a GGUF file")
            size = os.fstat(opened.fileno()).st_size
    except OSError as error:
        raise ArgumentError(f"model: cannot read {file}: {error.strerror}; expected a GGUF file") from error
    try:
        reader = gguf.GGUFReader(os.path.join(file.parent, file.name))  # as transformers spells it
        fields = reader.fields.values()
        found: dict[str, Any] = {one.name: one.contents() if len(one.data) == 1 else None for one in fields}
        architecture, parts = str(found["general.architecture"]), int(found.get("split.count", 1))
    except Exception as error:  # whatever reading beyond the end, or of other bytes, comes to
        raise ArgumentError(
            f"model: {file} is truncated or damaged: got {size:,} bytes that are no whole GGUF file; expected a "
            "complete one, so copy or download it again"
        ) from error
    if parts > 1:
        raise UnsupportedError(
            f"model: {file} is one of the {parts} parts of a checkpoint, expected a whole one; join them with "
            "llama.cpp's llama-gguf-split --merge"
        )
    return GGUFHeader(
        architecture=architecture,
        has_tokenizer="tokenizer.ggml.model" in found,
        scaling=_scaling(found, architecture, {tensor.name for tensor in reader.tensors}),
    )


@contextmanager
def reading(file: Path, progress: Progress | None = None) -> Iterator[None]:
    """Parse a GGUF file's header once in this block, and tell ``progress`` of every tensor that is unpacked.

    transformers' loader otherwise parses it for the config, the weights and the tokenizer each, and makes gguf's table
    of tensor names for every module of the model. RuntimeUnavailableError: a package that loads GGUF files is missing.
    """
    needs = f"model: {file} is a GGUF file, which needs"
    install = "pip install 'zinc-attn[gguf]'"
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise RuntimeUnavailableError(f"{needs} {' and '.join(missing)}: {install}")
    try:
        import gguf

        own = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map", "dequantize")}
    except (ImportError, AttributeError) as error:  # the package is there, and what it needs or has is not
        raise RuntimeUnavailableError(f"{needs} gguf: {error}: {install}") from error
    steps = Steps(progress, 0)

    def reader(*arguments: Any) -> Any:
        steps.begin(f"reading {file.name}", 0)
        made = own["GGUFReader"](*arguments)
        steps.total = len(made.tensors)
        return made

    def dequantize(*tensor: Any) -> Any:
        steps.begin(f"unpacking {file.name}")
        return own["dequantize"](*tensor)

    table = cache(own["get_tensor_name_map"])
    try:
        gguf.GGUFReader, gguf.get_tensor_name_map, gguf.dequantize = cache(reader), table, dequantize
        yield
    finally:
        for name, function in own.items():
            setattr(gguf, name, function)


def check_scaling(header: GGUFHeader, config: Any) -> None:
    """UnsupportedError where the file scales the rotary positions and the config that was made from it does not."""
    if header.scaling and set(_rope_types(getattr(config, "rope_parameters", None))) <= {"default"}:
        import transformers

        raise UnsupportedError(
            f"got scaled rotary positions ({header.scaling}), which transformers {transformers.__version__} does not "
            "read from a GGUF file; expected a file without, or the same checkpoint as safetensors files"
        )


def _scaling(found: dict[str, Any], architecture: str, tensors: set[str]) -> str:
    """The field or tensor that scales the rotary positions, or an empty string."""
    prefix = f"{architecture}.rope."
    if (kind := found.get(f"{prefix}scaling.type", "none")) != "none":
        return f"{prefix}scaling.type = {kind}"
    for name in (f"{prefix}scaling.factor", f"{prefix}scale_linear"):
        if found.get(name, 1) not in (0, 1):  # llama.cpp takes 0 for none
            return f"{name} = {found[name]:g}"
    return min((name for name in tensors if name.startswith(("rope_freqs", "rope_factors"))), default="")


def _rope_types(parameters: Any) -> Iterator[str]:
    """The rope types that a config states; in some models there is one per layer type."""
    for key, value in parameters.items() if isinstance(parameters, dict) else ():
        if key == "rope_type":
            yield value
        yield from _rope_types(value)
