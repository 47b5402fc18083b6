"""Records of digests: the committed one, and those of other machines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ... import __version__
from ...errors import ArgumentError
from ...files import read_json
from ...runtime.device import Device, build_record

RECORD: Final = Path(__file__).parents[1] / "reference_record.json"
COMMITTED: Final = "the committed record"
FORMAT: Final = 1  # of record files; the values of a case are part of it

Digests = Mapping[str, str]  # by case


def run_digest(digests: Digests) -> str:
    """SHA-256 over the sorted lines 'case digest'."""
    return hashlib.sha256("".join(f"{case} {digests[case]}\n" for case in sorted(digests)).encode()).hexdigest()


def describe(device: Device, arithmetic: str = "canonical") -> dict[str, Any]:
    """What a record says of where its digests come from."""
    info, built = device.info, build_record()
    about: dict[str, Any] = {name: getattr(info, name) for name in ("kind", "vendor", "driver", "api_version")}
    spirv = {name: built[name] for name in ("compiler", "sources_sha256")}
    if arithmetic != "canonical":
        about |= {"arithmetic": arithmetic, "tile": info.matrix.tile and info.matrix.tile._asdict()}
    return {"device": info.name, "runtime": device.runtime.name, **about, "numpy": np.__version__, "spirv": spirv}


def origin(made_by: Mapping[str, Any]) -> str:
    """What the digests of a record are of: with matrix units also the driver, whose own they are."""
    words = [made_by["device"], made_by["runtime"]]
    return ", ".join(words if made_by.get("arithmetic") is None else [*words, made_by["driver"]])


def is_of(source: str, device: Device, arithmetic: str) -> bool:
    """Whether a record, by its name, is of this device and driver."""
    return source.endswith(f", {origin(describe(device, arithmetic))}")


def make_entry(digests: Digests, **made_by: Any) -> dict[str, Any]:
    """One run of a record file."""
    return {"made_by": {"zinc_attn": __version__, **made_by}, "run": run_digest(digests), "cases": dict(digests)}


def record_text(entries: Sequence[dict[str, Any]]) -> str:
    """A record file."""
    return json.dumps({"format": FORMAT, "records": entries}, indent=1, ensure_ascii=False) + "\n"


def load_record(path: Path) -> dict[str, dict[str, str]]:
    """Digests by case of each run of a record file. ArgumentError names the file."""
    content, found = read_json(path, "a file of zinc-attn check --record"), {}
    try:
        if content["format"] != FORMAT:
            raise ArgumentError(f"{path}: got format {content['format']!r}, expected {FORMAT}")
        for i, entry in enumerate(content["records"]):
            by, cases = entry["made_by"], {str(case): str(digest) for case, digest in entry["cases"].items()}
            found[f"{path.name} [{i}], {origin(by)}"] = cases
    except (KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{path}: not a file of zinc-attn check --record ({error!r})") from error
    return found


def committed_digests() -> dict[str, str]:
    """Digests by case of the committed record."""
    return {case: digest for digests in load_record(RECORD).values() for case, digest in digests.items()}
