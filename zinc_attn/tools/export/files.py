"""Writing an export to a folder, and reading it back with its checksums verified."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ...canonical.tensorfile import PathLike
from ...checks import check_path, plain, shown
from ...errors import ArgumentError
from ...files import json_of, read_file, read_text
from ...kernels import declarations as kernels
from ...runtime.device import load_spirv
from ...shapes import AttnShape
from ..harness.files import write_file
from .describe import FORMAT, VERSION, manifest

MANIFEST: Final = "manifest.json"
DIGEST: Final = "manifest_sha256"  # the first entry of the file, see ``sealed``
_MANIFEST: Final = "a manifest; make it with zinc-attn export DIR"


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

    Each file appears under its name when it is complete, the manifest last; files of these names are replaced. The file
    and what is returned begin with ``manifest_sha256``, see ``sealed``.
    ArgumentError also where the directory cannot be written.
    """
    target = check_path("directory", directory)
    if os.path.exists(target) and not os.path.isdir(target):
        raise ArgumentError(f"directory: got {target}, which is a file, expected a directory or a new name")
    if not isinstance(attn_shapes, Iterable) or hasattr(attn_shapes, "dtype"):  # arrays of no axes do not iterate
        raise ArgumentError(f"attn_shapes: got {shown(attn_shapes)}, expected a list of AttnShapes")
    made = manifest(attn_shapes, dtype=dtype, page_size=page_size, compute_units=compute_units)
    hint = "choose another directory"
    for decl in {decl.file: decl for decl in kernels.KERNELS}.values():
        write_file(target / decl.file, load_spirv(decl), hint)
    text = json.dumps({DIGEST: "0" * 64, **made}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    data = sealed(text.encode())
    write_file(target / MANIFEST, data, hint)
    found: dict[str, Any] = json.loads(data)
    return found


def sealed(text: bytes) -> bytes:
    """A manifest's bytes with their checksum in place: that of the bytes with 64 zeros there.

    A reader finds the place without parsing: the first ``"manifest_sha256": "`` of the file. ManifestError without one.
    """
    at = _digest_at(text)
    zeros = text[:at] + b"0" * 64 + text[at + 64 :]
    return text[:at] + hashlib.sha256(zeros).hexdigest().encode() + text[at + 64 :]


def _digest_at(text: bytes) -> int:
    """Where the 64 digits of a manifest's checksum begin."""
    before = f'"{DIGEST}": "'.encode()
    at = text.find(before) + len(before)
    if before not in text or text[at + 64 : at + 65] != b'"':
        raise ManifestError(f"manifest: it has no {DIGEST} of 64 digits; export again")
    return at


def load_manifest(path: PathLike) -> dict[str, Any]:
    """The manifest at ``path`` (the file, or its directory), with its version and all checksums verified.

    ManifestError where a file is missing, is no manifest, has another version, or was changed by as much as a byte: the
    manifest or a module. ArgumentError: ``path`` is no path.
    """
    file = check_path("path", path)
    file = file / MANIFEST if os.path.isdir(file) else file  # False, and no error, also for a name that is too long
    text = read_text(file, _MANIFEST, ManifestError)
    data = json_of(text, file, _MANIFEST, ManifestError)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        given = data.get("format") if isinstance(data, dict) else data
        raise ManifestError(f"{file}: got format {given!r}, expected {FORMAT!r}")
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version != VERSION:
        raise ManifestError(
            f"{file}: got version {version!r}, expected {VERSION}; export again with the zinc-attn that reads it"
        )
    if (found := text.encode()) != (right := sealed(found)):
        at = _digest_at(found)
        raise ManifestError(
            f"{file}: got {DIGEST} {plain(found[at : at + 64].decode(errors='replace'))}, expected "
            f"{right[at : at + 64].decode()}; the file was changed, export again"
        )
    modules = data.get("kernels")
    if not isinstance(modules, list) or not modules:
        raise ManifestError(f"{file}: it has no list of kernels; export again")
    for module in modules:
        _check_module(file, module)
    return data


def _check_module(file: Path, module: Any) -> None:
    """Refuse a module that is not beside the manifest as the manifest describes it."""
    name = module.get("file") if isinstance(module, dict) else None
    if not isinstance(name, str) or name != Path(name).name or not name.endswith(".spv"):
        raise ManifestError(f"{file}: got the file name {name!r} for a kernel, expected one ending in .spv beside it")
    data = read_file(file.parent / name, "a module of the manifest; export again", ManifestError)
    digest = hashlib.sha256(data).hexdigest()
    if digest != module.get("sha256"):
        raise ManifestError(
            f"{file.parent / name}: got SHA-256 {digest}, expected {module.get('sha256')}; export again, nothing else "
            "goes with this manifest"
        )
