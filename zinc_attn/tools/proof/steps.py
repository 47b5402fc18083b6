"""One step of a proof: a command of this package in a new process, its rows, and how it ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from .privacy import Scrubber
from .sensors import Sensors, Watch
from .spec import Step

PACKAGE_ROOT: Final = Path(__file__).parents[3]
COMMAND: Final = f"{__package__.split('.', maxsplit=1)[0]}.cli"
GRACE_S: Final = 10.0  # that an interrupted command has to end by itself
NOTE_LINES: Final = 3  # of stderr, in the report

Row = Mapping[str, Any]


@dataclass(frozen=True)
class StepResult:
    """How a step ended. status: ok, failed (a wrong bit, a crash, a time limit) or refused (no room, no device).

    exit_status: None where it was stopped; below 0 for a signal. note: why it did not end well, else empty.
    rows: what it printed. sensors: see ``Watch.summary``.
    """

    step: Step
    status: str
    exit_status: int | None
    seconds: float
    note: str = ""
    rows: Sequence[Row] = ()
    sensors: Sequence[Mapping[str, Any]] = ()

    def to_dict(self) -> dict[str, Any]:
        """The step for the report, without its rows."""
        return {
            "restart": self.step.restart,
            "step": self.step.name,
            "command": "zinc-attn " + " ".join(self.step.words),
            "status": self.status,
            "exit_status": self.exit_status,
            "seconds": round(self.seconds, 1),
            "note": self.note,
            "rows": len(self.rows),
            "sensors": list(self.sensors),
        }


@dataclass(frozen=True)
class Runner:
    """Runs steps below ``folder``. cache: the pipeline caches of the processes, in a new folder for every restart."""

    folder: Path
    cache: Path
    timeout_s: float
    sensors: Sensors
    scrubber: Scrubber

    def run(self, step: Step) -> StepResult:
        """Run a step to its end, or to the time limit; an interrupt stops it and is raised again.

        Its streams are files, so that they survive a frozen machine; that of stderr is scrubbed.
        """
        place = self.folder / f"restart-{step.restart}" / step.name
        place.mkdir(parents=True, exist_ok=True)
        out = ("--record", str(place / "record.json")) if step.command == "check" else ("--out", str(place))
        path = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
        cache = str(self.cache / str(step.restart))
        environment = os.environ | {"PYTHONPATH": path, "ZINC_ATTN_CACHE_DIR": cache, "PYTHONUTF8": "1"}
        argv, begin = [sys.executable, "-m", COMMAND, *step.words, *out], perf_counter()
        with Watch(self.sensors) as watch, open(place / "stdout.jsonl", "wb") as stdout:
            with open(place / "stderr.txt", "wb") as stderr:
                process = subprocess.Popen(
                    argv, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, env=environment
                )
            exit_status = self._wait(process)
        seconds = perf_counter() - begin
        rows = read_lines(place / "stdout.jsonl")
        text = self.scrubber.text((place / "stderr.txt").read_text(encoding="utf-8", errors="replace"))
        (place / "stderr.txt").write_text(text, encoding="utf-8")
        status, note = judge_step(step.command, exit_status, rows, self.timeout_s)
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("written: ")]
        said = "" if exit_status == 0 else " / ".join(lines[-NOTE_LINES:])
        note = self.scrubber.text("; ".join(filter(None, (note, said))))
        return StepResult(step, status, exit_status, seconds, note, rows, watch.summary())

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """The exit status of a process; None where it reached the time limit. It has ended in any case."""
        try:
            return process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            return None
        except KeyboardInterrupt:  # the terminal sent it to the child, too
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            raise
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a command's stdout. A last line that is cut short, as a crash leaves it, is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def judge_step(command: str, exit_status: int | None, rows: Sequence[Row], timeout_s: float) -> tuple[str, str]:
    """(status, why it is not ok) of a command that ended with ``exit_status``, None at the time limit.

    A baseline that is refused, as torch where it is not installed, is no fault of the device.
    """
    mine = [row for row in rows if "status" in row and row.get("layout") != "baseline"]
    wrong = [row for row in mine if row["status"] in ("FAIL", "failed")]
    refused = [row for row in mine if row["status"] == "refused"]
    if exit_status is None:
        return "failed", f"did not end within {timeout_s:g} s and was stopped"
    if exit_status < 0:
        return "failed", f"ended by signal {-exit_status}"
    if wrong:
        return "failed", f"wrong output in {len(wrong)} of {len(mine)} rows{_reason(wrong[0])}"
    if exit_status in (0, 2) and refused:
        return "refused", f"{len(refused)} of {len(mine)} rows were refused{_reason(refused[0])}"
    if exit_status:
        return "refused" if exit_status == 2 else "failed", f"{command} ended with exit status {exit_status}"
    return ("ok", "") if mine else ("failed", f"{command} printed no rows")


def _reason(row: Row) -> str:
    """What a row says of its fault or its refusal; each command has a field of its own for it."""
    said = next((row[name] for name in ("error", "note", "refused") if row.get(name)), None)
    return f": {said}" if said else ""
