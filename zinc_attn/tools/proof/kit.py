"""The proof: every step in turn, and the report anew after each, so that a frozen machine leaves what was measured."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ...runtime.devices import pci_address
from ..harness.files import check_out, write_file
from .markdown import markdown
from .privacy import Scrubber
from .report import FINISHED, Setting, make_report
from .sensors import Sensors
from .spec import ProofSpec, Step
from .steps import PACKAGE_ROOT, Runner, StepResult

OnBegin = Callable[[Step, int, int], Any]  # a step, its number from 0, and how many there are
OnEnd = Callable[[StepResult], Any]


def check_folder(folder: Path) -> None:
    """ArgumentError where ``folder`` holds files, as a report must not mix the steps of two proofs, or takes none."""
    check_out(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ArgumentError(f"out: got {folder}, which is not empty, expected a new or an empty folder")


def prove(
    spec: ProofSpec,
    folder: Path,
    *,
    sensors: Sensors | None = None,
    on_begin: OnBegin | None = None,
    on_end: OnEnd | None = None,
) -> dict[str, Any]:
    """Run the steps of ``spec``, and leave report.md, report.json and the raw files in ``folder``; the report.

    sensors: None for those of the machine. on_begin and on_end see each step. A step that fails stops nothing. An
    interrupt is raised again once the report says so. ArgumentError: the folder has files, or takes none.
    """
    check_folder(folder)
    pci = pci_address(spec.info.index)
    sensors = sensors or Sensors(pci)
    scrubber = Scrubber({folder.absolute(): ".", PACKAGE_ROOT: "[package]"})
    setting = Setting(spec, pci, sensors, sensors.read(), scrubber)
    results: list[StepResult] = []
    report = write_proof(setting, results, folder, "running")
    with tempfile.TemporaryDirectory(prefix="zinc-attn-proof-") as cache:
        runner, steps = Runner(folder, Path(cache), spec.timeout_s, sensors, scrubber), spec.steps()
        for i, step in enumerate(steps):
            if on_begin:
                on_begin(step, i, len(steps))
            try:
                results.append(runner.run(step))
            except KeyboardInterrupt:
                write_proof(setting, results, folder, f"interrupted in {step.name} of restart {step.restart}")
                raise
            if on_end:
                on_end(results[-1])
            report = write_proof(setting, results, folder, FINISHED if len(results) == len(steps) else "running")
    return report


def write_proof(setting: Setting, results: list[StepResult], folder: Path, ended: str) -> dict[str, Any]:
    """Write report.json and report.md of the steps so far; the report."""
    report = make_report(setting, results, ended)
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_file(folder / "report.json", text.encode())
    write_file(folder / "report.md", markdown(report).encode())
    if hasattr(os, "sync"):  # what lies in memory alone does not outlive a machine that a driver freezes
        os.sync()
    return report
