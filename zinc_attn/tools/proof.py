"""The proof: check, sweep and bench of one device, each in a process of its own, and one report of what they printed.

The report is made to be attached to a public bug report, so it is built from facts that name no person and no machine:
the rows of the commands, facts of the device and versions. What the commands say on stderr may name folders; it goes to
the terminal and never into the report.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np

from .. import __version__
from ..checks import check_int
from ..errors import ArgumentError
from ..runtime.device import RUNTIMES, build_record
from ..runtime.protocol import DeviceInfo
from ..shapes import AttnShape
from .harness.files import write_file
from .harness.inputs import check_stored_v
from .harness.tables import MISSING, figure, grouped
from .models import slug

FORMAT: Final = 2  # of report.json
SHAPES: Final = "16/2/256,32/8/128,9/3/64"
CONTEXTS: Final = {"quick": "1k,4k", "cpu": "1k,8k", "gpu": "1k,8k,32k,128k"}
RESTARTS: Final = 3
TIMEOUT_S: Final = 3600.0
MOST_FAULTS: Final = 20  # in report.md; report.json has all
QUICK_CHECK: Final = ("--quick",)  # arguments of check with --quick, and on a CPU device
PACKAGE_ROOT: Final = Path(__file__).parents[2]
COMMAND: Final = f"{__package__.split('.', maxsplit=1)[0]}.cli"
# Variables that change what a driver does, and so what is measured; their values are words and numbers.
DRIVER_SETTINGS: Final = (
    *("RADV_DEBUG", "RADV_PERFTEST", "AMD_DEBUG", "ACO_DEBUG", "INTEL_DEBUG", "ANV_DEBUG"),
    *("LP_NUM_THREADS", "LP_NATIVE_VECTOR_WIDTH"),
)
DEVICE_FACTS: Final = (  # not the UUID, which can identify a card
    *("name", "kind", "vendor", "driver", "api_version", "compute_units", "compute_units_source", "subgroup_size"),
    *("memory_bytes", "max_buffer_bytes", "refusal", "timestamp_period_ns"),
)

OK: Final = "ok"  # of a step
Record = Mapping[str, Any]


@dataclass(frozen=True)
class ProofSpec:
    """A proof of one device. ArgumentError names a wrong field.

    runtime: the dispatcher. contexts: keys. restarts: how often everything is repeated, each time with new processes
    and an empty pipeline cache. quick: the quick cases of check, which a CPU device always has, and 5 timed runs a
    point. timeout_s: seconds that one command may take.
    """

    info: DeviceInfo
    runtime: str
    shapes: Sequence[AttnShape]
    contexts: Sequence[int]
    restarts: int = RESTARTS
    quick: bool = False
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise ArgumentError(f"runtime: got {self.runtime!r}, expected one of {', '.join(RUNTIMES)}")
        for shape in self.shapes:
            check_stored_v(shape)
        check_int("restarts", self.restarts, 1, 100)
        if not 0 < self.timeout_s < float("inf"):
            raise ArgumentError(f"timeout: got {self.timeout_s:g}, expected seconds above 0")

    def commands(self) -> Iterator[tuple[str, ...]]:
        """The command lines of one restart, less --out: the check, then the sweep and the bench of each shape."""
        on = ("--device", str(self.info.index), "--runtime", self.runtime, "--json")
        yield ("check", *(QUICK_CHECK if self.quick or self.info.kind == "cpu" else ()), *on)
        repeats = ("--repeats", "5") if self.quick else ()
        for shape in self.shapes:
            for name in ("sweep", "bench"):
                yield (name, "--shape", str(shape), "--contexts", ",".join(map(str, self.contexts)), *repeats, *on)


def prove(spec: ProofSpec, folder: Path, on_step: Callable[[Record], Any] = lambda _: None) -> dict[str, Any]:
    """Run the commands of ``spec`` and leave report.md, report.json and the commands' files in ``folder``; the report.

    Both are written anew after every step: a machine that freezes leaves what was measured until then. A step that
    fails stops nothing. on_step sees each step. ArgumentError: the folder takes no files.
    """
    commands = list(spec.commands())
    report: dict[str, Any] = {
        "format": FORMAT,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "zinc_attn": __version__,
        "spirv": {name: build_record()[name] for name in ("compiler", "sources_sha256")},
        "device": {name: getattr(spec.info, name) for name in DEVICE_FACTS} | {"dispatcher": spec.runtime},
        "machine": machine_facts(),
        "planned": spec.restarts * len(commands),
        "steps": [],
    }
    write_report(report, folder)
    for restart in range(1, spec.restarts + 1):
        with tempfile.TemporaryDirectory(prefix="zinc-attn-proof-") as cache:
            for words in commands:
                step = run_step(words, folder / f"restart-{restart}", cache, spec.timeout_s)
                report["steps"].append({"restart": restart, **step})
                write_report(report, folder)
                on_step(report["steps"][-1])
    return report


def run_step(words: Sequence[str], folder: Path, cache: str, timeout_s: float) -> dict[str, Any]:
    """A command in a new process: its exit status (None: stopped at the limit), seconds and rows.

    folder: of its files, which check has none of. cache: the folder of its pipeline cache.
    """
    shape = None if words[0] == "check" else words[2]  # behind --shape
    out = ("--out", str(folder / slug(f"{words[0]}-{shape}"))) if shape else ()
    path = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "ZINC_ATTN_CACHE_DIR": cache, "PYTHONUTF8": "1"}
    argv, begin = [sys.executable, "-m", COMMAND, *words, *out], perf_counter()
    try:
        ended = subprocess.run(argv, stdout=subprocess.PIPE, env=environment, timeout=timeout_s, check=False)
        status, text = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as error:
        status, text = None, error.stdout or b""
    rows = []
    for line in text.decode(errors="replace").splitlines():
        with suppress(ValueError):  # of a last line that a crash has cut short
            rows += [json.loads(line)] if line.startswith("{") else []
    about = {"tool": words[0], "shape": shape, "command": " ".join(words), "exit_status": status}
    return {**about, "seconds": round(perf_counter() - begin, 1), "rows": rows}


def outcome(step: Record) -> str:
    """How a step ended: ok, or why it is not."""
    status = step["exit_status"]
    if status is None:
        return f"STOPPED after {step['seconds']} s"
    if status < 0:
        return f"ENDED by signal {-status}"
    return {0: OK, 1: "WRONG output", 2: "REFUSED"}.get(status, f"FAILED with exit status {status}")


def checks_of(report: Record) -> list[tuple[int, str | None, list[Record]]]:
    """Of every check its restart, the digest over all cases (None where it did not get that far) and its cases."""
    checks = [step for step in report["steps"] if step["tool"] == "check"]
    digests = (next((row["run"] for row in step["rows"] if "run" in row), None) for step in checks)
    cases = ([row for row in step["rows"] if "case" in row] for step in checks)
    return list(zip((step["restart"] for step in checks), digests, cases, strict=True))


def passed(report: Record) -> bool:
    """Whether all steps have run, all are ok, and every check has the same digest."""
    steps, digests = report["steps"], {digest for _, digest, _ in checks_of(report)}
    well = len(steps) == report["planned"] and all(outcome(step) == OK for step in steps)
    return well and len(digests) == 1 and None not in digests


def machine_facts() -> dict[str, Any]:
    """The operating system, the CPU, versions, and the settings of drivers that are set."""
    release, cpu = {}, None
    with suppress(OSError):
        release = platform.freedesktop_os_release()
    with suppress(OSError):
        cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    kernel = platform.release().split("-", maxsplit=1)[0]  # its builder chose the rest, which may be any name
    return {
        "system": f"{release.get('PRETTY_NAME', 'unknown distribution')}, {platform.system()} {kernel}",
        "cpu": f"{cpu[1].strip() if cpu else platform.machine()}, {os.cpu_count()} threads",
        "versions": f"{platform.python_implementation()} {platform.python_version()}, NumPy {np.__version__}",
        "driver_settings": " ".join(f"{x}={os.environ[x]}" for x in DRIVER_SETTINGS if x in os.environ) or "none set",
    }


def write_report(report: Record, folder: Path) -> None:
    text = json.dumps({**report, "passed": passed(report)}, indent=1, ensure_ascii=False, allow_nan=False)
    write_file(folder / "report.json", f"{text}\n".encode())
    write_file(folder / "report.md", markdown(report).encode())
    os.sync()  # what lies in memory alone does not outlive a machine that a driver freezes


def markdown(report: Record) -> str:
    steps, facts = report["steps"], {**report["device"], **report["machine"], "spirv": report["spirv"]["compiler"]}
    bad = [f"- restart {one['restart']}, {one['command']}: {outcome(one)}" for one in steps if outcome(one) != OK]
    blocks = (
        f"# zinc-attn proof: {report['device']['name']}",
        f"**{'passed' if passed(report) else 'NOT passed'}**: {len(steps)} of {report['planned']} steps ran, "
        f"{len(bad)} of them are not ok. Made {report['made']} by zinc-attn {report['zinc_attn']}.",
        *bad,
        "## Device",
        table(("fact", "value"), facts.items()),
        "## Bits",
        *bits_part(report),
        "## Sweep",
        "A decode call of one layer, in µs by the host's clock: the median of each restart.",
        times_table([step for step in steps if step["tool"] == "sweep"]),
        "## Bench",
        "What a call without new rows submits, in µs by the host's clock and the device's: the median of each restart.",
        times_table([step for step in steps if step["tool"] == "bench"]),
        "report.json has every row of every command.",
    )
    return "\n\n".join(blocks) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown. Vertical bars in a cell are escaped, and its lines are joined."""
    cells = ([" ".join(str(cell).split()).replace("|", "\\|") for cell in row] for row in (columns, *rows))
    head, *lines = (f"| {' | '.join(row)} |" for row in cells)
    return "\n".join((head, f"|{'---|' * len(columns)}", *lines))


def bits_part(report: Record) -> Iterator[str]:
    """The digest of each check, how many cases ended how, and the first wrong bits."""
    words, checks = ("pass", "FAIL", "refused"), checks_of(report)
    yield "A case passes where all its variations have the bits of the NumPy oracle."
    counts = ([sum(row["status"] == word for row in cases) for word in words] for *_, cases in checks)
    lines = ((n, digest or MISSING, *count) for (n, digest, _), count in zip(checks, counts, strict=True))
    yield table(("restart", "digest over all cases", *words), lines)
    rows = [row for *_, cases in checks for row in cases]
    faults = [(row["case"], fault["variation"], fault["text"]) for row in rows for fault in row["faults"]]
    if faults:
        yield table(("case", "variation", "first wrong element"), faults[:MOST_FAULTS])


def times_table(steps: Iterable[Record]) -> str:
    """A line per shape, context and layout, with a column per measure: the medians of the restarts, one by one.

    GB/s: the highest of a point's rates. verified: as the command says it; of a point without a time why it has none.
    """
    rows = [(step["shape"], row) for step in steps for row in step["rows"]]
    measures = list(dict.fromkeys(row["measure"] for _, row in rows))
    points = grouped(((shape, row["context"], row["layout"]), row) for shape, row in rows)
    lines = []
    for (shape, context, layout), mine in points.items():
        times = grouped((row["measure"], figure(row["median_us"])) for row in mine)
        bad = next((row for row in mine if row["status"] != "ok"), None)
        verified = f"{bad['status'].upper()}: {bad['error']}" if bad else mine[0]["verified"]
        rate = max((row["kv_gb_s"] for row in mine if row["kv_gb_s"] is not None), default=None)
        cells = (" / ".join(times.get(name, [MISSING])) for name in measures)
        lines.append((shape, f"{context:,}", layout, verified, figure(rate), *cells))
    return table(("shape", "keys", "layout", "verified", "GB/s", *measures), lines)
