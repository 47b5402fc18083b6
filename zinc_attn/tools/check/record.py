"""Records of digests: the committed one, and those of other machines."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ... import __version__
from ...errors import ArgumentError
from ...files import read_json
from ...runtime.device import Device

RECORD: Final = Path(__file__).parents[1] / "reference_record.json"
COMMITTED: Final = "the committed record"
FORMAT: Final = 1  # of record files; the values of a case are part of it

Digests = Mapping[str, str]  # by case


def run_digest(digests: Digests) -> str:
    """SHA-256 over the sorted lines 'case digest'."""
    return hashlib.sha256("".join(f"{case} {digests[case]}\n" for case in sorted(digests)).encode()).hexdigest()


def maker(device: Device) -> dict[str, str]:
    """The facts of a record about the device of its digests."""
    return {"device": device.info.name, "runtime": device.runtime.name, "driver": device.info.driver}


def origin(made_by: Mapping[str, Any]) -> str:
    """The origin of a record's digests, in words."""
    return ", ".join(str(made_by[key]) for key in ("device", "runtime", "driver") if key in made_by)


def is_of(source: str, device: Device) -> bool:
    """Whether a record, by its name, is of this device and driver."""
    return source.endswith(f", {origin(maker(device))}")


def make_entry(digests: Digests, made_by: Mapping[str, str]) -> dict[str, Any]:
    """One run of a record file."""
    return {"made_by": {"zinc_attn": __version__, **made_by}, "run": run_digest(digests), "cases": dict(digests)}


def record_text(entries: Sequence[dict[str, Any]]) -> str:
    return json.dumps({"format": FORMAT, "records": entries}, indent=1, ensure_ascii=False) + "\n"


def load_record(path: Path) -> dict[str, Digests]:
    """Digests by case of each run of a record file. ArgumentError names the file."""
    content = read_json(path, "a file of zinc-attn check --record")
    try:
        if content["format"] != FORMAT:
            raise ArgumentError(f"{path}: got format {content['format']!r}, expected {FORMAT}")
        return {
            f"{path.name} [{i}], {origin(entry['made_by'])}": {str(k): str(v) for k, v in entry["cases"].items()}
            for i, entry in enumerate(content["records"])
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{path}: not a file of zinc-attn check --record ({error!r})") from error


def committed_digests() -> dict[str, str]:
    return {case: digest for digests in load_record(RECORD).values() for case, digest in digests.items()}
