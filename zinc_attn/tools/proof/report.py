"""The report of a proof as one JSON object: facts, steps, bits, points and sensors, scrubbed of names and folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Final

from ..cost import card_of_device, prediction_compilers
from .bits import bits_summary
from .facts import device_facts, machine_facts, package_facts
from .points import bench_summary, sweep_summary
from .privacy import Scrubber
from .sensors import Reading, Sensors
from .spec import ProofSpec
from .steps import StepResult

FORMAT: Final = 1  # of report.json
FINISHED: Final = "finished"


@dataclass(frozen=True)
class Setting:
    """What a report says beside the steps. sensors: those of the machine; first: what they read before all steps."""

    spec: ProofSpec
    pci: str | None
    sensors: Sensors
    first: Sequence[Reading]
    scrubber: Scrubber


def make_report(setting: Setting, results: Sequence[StepResult], ended: str) -> dict[str, Any]:
    """The report of the steps that have run.

    ended: ``FINISHED``, or why there are fewer steps than planned. passed: all steps ran and are ok, and the digests
    of all restarts agree. card: which one the model timed, what it was chosen by, and what is assumed of it; it, and
    what rests on it, is None for a CPU device. sensors: whether they are those of the device, what cannot be read, and
    the values before all steps.
    """
    info = setting.spec.info
    card = card_of_device(info.name, info.kind, info.compute_units)
    bits = bits_summary(results)
    planned = len(setting.spec.steps())
    well = len(results) == planned and all(one.status == "ok" for one in results)
    report = {
        "format": FORMAT,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "ended": ended,
        "passed": bool(ended == FINISHED and well and bits["agree"]),
        **package_facts(),
        "arguments": setting.spec.to_dict(),
        "device": device_facts(info, setting.pci),
        "machine": machine_facts(),
        "card": card
        and {"title": card.card.title, "by": card.by, "source": card.card.source, "assumed": list(card.card.assumed)},
        "compiler": dict(prediction_compilers()),
        "steps_planned": planned,
        "steps": [one.to_dict() for one in results],
        "bits": bits,
        "sweep": sweep_summary(results, card),
        "bench": bench_summary(results, card),
        "sensors": {
            "matched_by_pci": setting.sensors.matched(setting.first),
            "absent": setting.sensors.absent(setting.first),
            "before_all": [one._asdict() for one in setting.first],
        },
    }
    found: dict[str, Any] = setting.scrubber.value(report)
    return found
