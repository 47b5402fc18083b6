"""Digests: the committed record, the records of other machines, and the oracle that judges where they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ... import __version__
from ...errors import ArgumentError
from ...runtime.device import Device, build_record
from ..harness.bits import ORACLE_PRODUCTS, Output, oracle
from ..harness.progress import Progress, Steps
from .cases import Case
from .data import Data
from .outcome import Fault, Outcome

RECORD: Final = Path(__file__).parents[1] / "reference_record.json"
COMMITTED: Final = "the committed record"
FORMAT: Final = 1  # of record files; the values of a case are part of it

Digests = Mapping[str, str]  # by case


def run_digest(digests: Digests) -> str:
    """SHA-256 over the sorted lines 'case digest'."""
    return hashlib.sha256("".join(f"{case} {digests[case]}\n" for case in sorted(digests)).encode()).hexdigest()


def reference_arguments(case: Case, data: Data, products: int) -> tuple[Any, ...]:
    """Those of ``oracle`` and ``truth``; where these take more than ``products``, for the last KV head alone."""
    sampled = case.rows * case.context * case.shape.q_heads * case.shape.head_dim > products
    masking = {**case.options(), **case.masking.call(case.rows, case.context)}
    return case.query(data), data.k, data.v, case.dtype, 1 if sampled else None, masking


def oracle_output(case: Case, data: Data, products: int = ORACLE_PRODUCTS) -> Output:
    """The oracle's output; where it takes more than ``products``, that of the last KV head's query heads alone."""
    return oracle(*reference_arguments(case, data, products))


def judge(outcome: Outcome, data: Data, known: Mapping[str, Digests]) -> None:
    """Property 10: the digest against those ``known`` (by source); the oracle names the element that differs."""
    if outcome.result is None:
        return
    name, digest, fault = str(outcome.case), outcome.digest, None
    sources = [source for source, digests in known.items() if name in digests]
    differing = [source for source in sources if known[source][name] != digest]
    outcome.shown[10], outcome.verified = len(sources), "record"
    if differing or COMMITTED not in sources:
        expected = oracle_output(outcome.case, data)
        sampled = len(expected.lse) < len(outcome.result.lse)
        outcome.compare(10, "the NumPy oracle", outcome.result, expected)
        fault = next((fault for fault in outcome.faults if fault.property == 10), None)
        outcome.verified = "" if fault else "oracle (sampled heads)" if sampled else "oracle"
    for source in differing:
        text = f"digest {digest[:16]}, expected {known[source][name][:16]}"
        agrees = "" if fault else "; the oracle computed here agrees with the device"
        outcome.faults.append(Fault(10, source, text + agrees))


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


def make_entry(digests: Digests, **made_by: Any) -> dict[str, Any]:
    """One run of a record file."""
    return {"made_by": {"zinc_attn": __version__, **made_by}, "run": run_digest(digests), "cases": dict(digests)}


def record_text(entries: Sequence[dict[str, Any]]) -> str:
    """A record file."""
    return json.dumps({"format": FORMAT, "records": entries}, indent=1, ensure_ascii=False) + "\n"


def load_record(path: Path) -> dict[str, dict[str, str]]:
    """Digests by case of each run of a record file. ArgumentError names the file."""
    try:
        content, found = json.loads(path.read_text()), {}
        if content["format"] != FORMAT:
            raise ArgumentError(f"{path}: got format {content['format']!r}, expected {FORMAT}")
        for i, entry in enumerate(content["records"]):
            by, cases = entry["made_by"], {str(case): str(digest) for case, digest in entry["cases"].items()}
            found[f"{path.name} [{i}], {origin(by)}"] = cases
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}, expected a file of zinc-attn check --record") from error
    except ArgumentError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{path}: not a file of zinc-attn check --record ({error!r})") from error
    return found


def committed_digests() -> dict[str, str]:
    """Digests by case of the committed record."""
    return {case: digest for digests in load_record(RECORD).values() for case, digest in digests.items()}


def make_record(progress: Progress | None = None, sets: Mapping[str, Sequence[Case]] | None = None) -> str:
    """A record file by the oracle alone, with an entry per set of cases.

    sets: the cases by the name of their set; None: the quick set and the default cases, as they are committed.
    """
    sets = {"quick": Case.quick(), "default": Case.default()} if sets is None else sets
    wanted = list(dict.fromkeys(case for cases in sets.values() for case in cases))
    steps, made = Steps(progress, len(wanted)), dict[Case, str]()
    for case in wanted:
        steps.begin(str(case))
        made[case] = oracle_output(case, case.data()).digest()
    entries = []
    for name, cases in sets.items():
        by = {"device": "NumPy float32 oracle", "runtime": "reference.emulate", "set": name, "numpy": np.__version__}
        entries.append(make_entry({str(case): made[case] for case in cases}, **by))
    return record_text(entries)
