"""Writing an export to a folder, and reading it back with its checksums verified."""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from typing import Any, Final

from ...canonical.tensorfile import PathLike
from ...checks import check_path, shown
from ...errors import ArgumentError
from ...files import json_of, read_file, read_text
from ...kernels import declarations as kernels
from ...runtime.device import load_spirv
from ...shapes import AttnShape
from ..harness.files import write_file
from .describe import FORMAT, VERSION, manifest

MANIFEST: Final = "manifest.json"
DIGEST: Final = "manifest_sha256"  # the first entry of the file, see ``sealed``
_SEAL: Final = re.compile(rf'"{DIGEST}": "(.{{64}})"'.encode())
_MANIFEST: Final = "a manifest; make it with zinc-attn export DIR"


class ManifestError(ArgumentError):
    """A manifest or a file that it names is missing, damaged or of another version; the message says which."""


def export(directory: PathLike, attn_shapes: Iterable[AttnShape] = (), **options: Any) -> dict[str, Any]:
    """Write the SPIR-V modules and manifest.json to ``directory``, and return the manifest.

    options: dtype, page_size, compute_units and kv_layout, as ``manifest`` takes them.

    Each file appears under its name when it is complete, the manifest last; files of these names are replaced. The
    manifest begins with ``manifest_sha256``, see ``sealed``. ArgumentError also where the directory cannot be written.
    """
    target = check_path("directory", directory)
    if not isinstance(attn_shapes, Iterable) or hasattr(attn_shapes, "dtype"):  # arrays of no axes do not iterate
        raise ArgumentError(f"attn_shapes: got {shown(attn_shapes)}, expected a list of AttnShapes")
    contents = manifest(attn_shapes, **options)
    text = json.dumps({DIGEST: "0" * 64, **contents}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    data = sealed(text.encode())
    files = {decl.file: load_spirv(decl) for decl in kernels.KERNELS} | {MANIFEST: data}
    for name, content in files.items():
        write_file(target / name, content, "choose another directory")
    result: dict[str, Any] = json.loads(data)
    return result


def sealed(text: bytes) -> bytes:
    """A manifest's bytes with their checksum in place: the checksum of the bytes with 64 zeros there.

    A reader finds the place without parsing: the first ``"manifest_sha256": "`` of the file. ManifestError without one.
    """
    if (seal := _SEAL.search(text)) is None:
        raise ManifestError(f"manifest: it has no {DIGEST} of 64 digits; export again")
    before, after = text[: seal.start(1)], text[seal.end(1) :]
    return before + hashlib.sha256(before + b"0" * 64 + after).hexdigest().encode() + after


def load_manifest(path: PathLike) -> dict[str, Any]:
    """The manifest at ``path`` (the file, or its directory), with its version and all checksums verified.

    ManifestError where a file is missing, is no manifest, has another version, or was changed by as much as a byte: the
    manifest or a module. ArgumentError: ``path`` is no path.
    """
    file = check_path("path", path)
    file = file / MANIFEST if os.path.isdir(file) else file  # False, and no error, also for a name that is too long
    text = read_text(file, _MANIFEST, ManifestError)
    parsed = json_of(text, file, _MANIFEST, ManifestError)
    data = parsed if isinstance(parsed, dict) else {"format": parsed}
    if (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        got = f"format {shown(data.get('format'))}, version {shown(data.get('version'))}"
        expected = f"{FORMAT!r}, {VERSION}; export again with the zinc-attn that reads it"
        raise ManifestError(f"{file}: got {got}, expected {expected}")
    if sealed(text.encode()) != text.encode():
        raise ManifestError(f"{file}: its {DIGEST} is not that of its bytes; the file was changed, export again")
    for kernel in data["kernels"]:  # a manifest of this version that nobody has changed has them
        module = file.parent / kernel["file"]
        code = read_file(module, "a module of the manifest; export again", ManifestError)
        if (digest := hashlib.sha256(code).hexdigest()) != kernel["sha256"]:
            raise ManifestError(
                f"{module}: got SHA-256 {digest}, expected {kernel['sha256']}; export again, nothing else goes with "
                "this manifest"
            )
    return data
