"""Writing an export to a folder, and reading it back with its checksums verified."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ...errors import ArgumentError
from ...kernels import contract as kernels
from ...runtime.device import load_spirv
from ...shapes import AttnShape
from ..sweep import write_file
from .describe import FORMAT, VERSION, manifest

MANIFEST: Final = "manifest.json"
PathLike = str | os.PathLike[str]


class ManifestError(ArgumentError):
    """A manifest or a file that it names is missing, damaged or of another version; the message says which."""


def export(
    directory: PathLike,
    attn_shapes: Iterable[AttnShape] = (),
    *,
    dtype: str = "f16",
    page_size: int = 256,
    compute_units: int = 64,
) -> dict[str, Any]:
    """Write the SPIR-V modules and manifest.json to ``directory``, and return the manifest; see ``manifest``.

    Each file appears under its name when it is complete, the manifest last; files of these names are replaced.
    ArgumentError also where the directory cannot be written.
    """
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"directory: got {target}, which is a file, expected a directory or a new name")
    made = manifest(attn_shapes, dtype=dtype, page_size=page_size, compute_units=compute_units)
    hint = "choose another directory"
    for decl in kernels.KERNELS:
        write_file(target / f"{decl.name}.spv", load_spirv(decl), hint)
    text = json.dumps(made, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_file(target / MANIFEST, text.encode(), hint)
    return made


def load_manifest(path: PathLike) -> dict[str, Any]:
    """The manifest at ``path`` (the file, or its directory), with its version and every module's checksum verified.

    ManifestError where a file is missing, is no manifest, has another version, or does not have its checksum.
    """
    file = Path(path)
    file = file / MANIFEST if file.is_dir() else file
    try:
        data = json.loads(file.read_bytes())
    except OSError as error:
        raise ManifestError(f"{file}: cannot be read: {error.strerror}; make it with zinc-attn export DIR") from error
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{file}: not JSON: {error}; make it with zinc-attn export DIR") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        given = data.get("format") if isinstance(data, dict) else data
        raise ManifestError(f"{file}: got format {given!r}, expected {FORMAT!r}")
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version != VERSION:
        raise ManifestError(
            f"{file}: got version {version!r}, expected {VERSION}; export again with the zinc-attn that reads it"
        )
    modules = data.get("kernels")
    if not isinstance(modules, list):
        raise ManifestError(f"{file}: it has no list of kernels; export again")
    for module in modules:
        _check_module(file, module)
    return data


def _check_module(file: Path, module: Any) -> None:
    """Refuse a module that is not beside the manifest as the manifest describes it."""
    name = module.get("file") if isinstance(module, dict) else None
    if not isinstance(name, str) or name != Path(name).name or not name.endswith(".spv"):
        raise ManifestError(f"{file}: got the file name {name!r} for a kernel, expected one ending in .spv beside it")
    try:
        digest = hashlib.sha256((file.parent / name).read_bytes()).hexdigest()
    except OSError as error:
        raise ManifestError(f"{file.parent / name}: cannot be read: {error.strerror}; export again") from error
    if digest != module.get("sha256"):
        raise ManifestError(
            f"{file.parent / name}: got SHA-256 {digest}, expected {module.get('sha256')}; export again, nothing else "
            "goes with this manifest"
        )
