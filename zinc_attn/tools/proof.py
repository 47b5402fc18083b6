"""The proof: check, sweep and bench of one device, each in a process of its own, and one report of their output.

A kit (scripts/kit) adds models of llama.cpp, whose steps ``llama_kit.py`` of its folder runs.

The report is made to be attached to a public bug report, so it is built from facts that name no person and no machine:
the rows of the commands, facts of the device and versions. The commands' stderr may name folders; it is never in it.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Final

import numpy as np

from .. import __version__
from ..checks import check_int, plain
from ..errors import ArgumentError
from ..files import read_json
from ..kernels.declarations import MATRIX
from ..runtime.cpu import NAME as CPU
from ..runtime.device import RUNTIMES, SPIRV, build_record
from ..runtime.protocol import DeviceInfo
from ..shapes import AttnShape
from .harness.files import write_file
from .harness.inputs import check_stored_v
from .harness.tables import MISSING, figure, grouped
from .models import slug

FORMAT: Final = 3  # of report.json
SHAPES: Final = "16/2/256,32/8/128,9/3/64"
CONTEXTS: Final = {"quick": "1k,4k", "cpu": "1k,8k", "gpu": "1k,8k,32k,128k"}
RESTARTS: Final = 3
TIMEOUT_S: Final = 3600.0
MOST_FAULTS: Final = 20  # in report.md; report.json has all
QUICK_CHECK: Final = ("--quick",)  # arguments of check with --quick or --minutes, and on a CPU device
MORE_CHECKS: Final = ("--quick", "--arithmetic", "fused"), ("--quick", "--arithmetic", "integer")
GRAPH_CHECK: Final = ("--graph",)
UNITS_CHECK: Final = ("--quick", "--arithmetic", "matrix")  # where the device and the package have matrix units
PACKAGE_ROOT: Final = Path(__file__).parents[2]
COMMAND: Final = f"{__package__.split('.', maxsplit=1)[0]}.cli"
# Variables that change what a driver does, and so the measurement; their values are words and numbers.
DRIVER_SETTINGS: Final = (
    *("RADV_DEBUG", "RADV_PERFTEST", "AMD_DEBUG", "ACO_DEBUG", "INTEL_DEBUG", "ANV_DEBUG"),
    *("LP_NUM_THREADS", "LP_NATIVE_VECTOR_WIDTH"),
)
DEVICE_FACTS: Final = (  # not the UUID, which can identify a card
    *("name", "kind", "vendor", "driver", "api_version", "compute_units", "compute_units_source", "subgroup_size"),
    *("memory_bytes", "max_buffer_bytes", "refusal", "timestamp_period_ns", "fma_operation", "integer_dots"),
)

OK: Final = "ok"  # of a step
NOT_RUN: Final = "NOT RUN: the time was up"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """A process: a tool's words, and the program that runs them. subject: the shape or the model of its times."""

    tool: str
    words: tuple[str, ...]
    program: tuple[str, ...]
    subject: str | None = None


@dataclass(frozen=True)
class ProofSpec:
    """A proof of one device. ArgumentError names a wrong field.

    runtime: the dispatcher. contexts: keys. restarts: how often everything is repeated, each time with new processes
    and an empty pipeline cache. quick: the quick cases of check and the first model alone, which a CPU device always
    has, and 5 timed runs a point. timeout_s: seconds that one command may take. budget_s: seconds of all
    commands, which then take the quick cases of check. kit: a kit's file of models. pictures: whether to leave PNGs.
    """

    info: DeviceInfo
    runtime: str
    shapes: Sequence[AttnShape]
    contexts: Sequence[int]
    restarts: int = RESTARTS
    quick: bool = False
    timeout_s: float = TIMEOUT_S
    budget_s: float = float("inf")
    kit: Path | None = None
    pictures: bool = True

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise ArgumentError(f"runtime: got {self.runtime!r}, expected one of {', '.join(RUNTIMES)}")
        for shape in self.shapes:
            check_stored_v(shape)
        check_int("restarts", self.restarts, 1, 100)
        if not 0 < self.timeout_s < float("inf"):
            raise ArgumentError(f"timeout: got {self.timeout_s:g}, expected seconds above 0")
        if not self.budget_s > 0:
            raise ArgumentError(f"minutes: got {self.budget_s / 60:g}, expected minutes above 0")
        if self.kit:
            models_of(self.kit)

    def steps(self) -> Iterator[Step]:
        """The steps of one restart, without --out: checks, models, then the bench and the sweep of each shape."""
        command = sys.executable, "-m", COMMAND
        on = ("--device", str(self.info.index), "--runtime", self.runtime, "--json")
        small = self.quick or self.info.kind == "cpu"
        checks = [QUICK_CHECK if small or self.budget_s < float("inf") else (), *MORE_CHECKS]
        units = self.info.matrix.fragment and (SPIRV / MATRIX.file).exists()
        for options in [*checks, UNITS_CHECK] if units else checks:
            yield Step("check", (*options, *on), (*command, "check"))
        if self.info.integer_dots:  # products of quantized weights need them
            runtime = CPU if self.info.native else "vulkan"
            yield Step("check", (*GRAPH_CHECK, *on[:3], runtime, "--json"), (*command, "check"))
        if self.info.integer_dots and self.kit:
            program = sys.executable, str(self.kit.with_name("llama_kit.py"))
            models = models_of(self.kit)
            for model in models[:1] if small else models[1:]:
                yield Step("llama", (*model.split(), *(["quick"] * small)), program, model)
        more = (*(("--repeats", "5") if self.quick else ()), *(() if self.pictures else ("--no-picture",)), *on)
        contexts = ",".join(map(str, self.contexts))
        for name, shape in product(("bench", "sweep"), map(str, self.shapes)):
            yield Step(name, ("--shape", shape, "--contexts", contexts, *more), (*command, name), shape)


def models_of(kit: Path) -> list[str]:
    """A kit's models, as "NAME LAYERS": that of a CPU device, then the others. ArgumentError: the file is no kit's."""
    expected = "digests by a model's name and layers, as scripts/kit makes them"
    models = read_json(kit, expected)
    if not isinstance(models, dict) or not all(re.fullmatch(r"\S+ \d+", name) for name in models):
        raise ArgumentError(f"{plain(kit)}: got other JSON, expected {expected}")
    return list(models)


def prove(spec: ProofSpec, folder: Path, on_step: Callable[[Record], Any] = lambda _: None) -> dict[str, Any]:
    """Run the steps of ``spec`` and leave report.md, report.json and the commands' files in ``folder``; the report.

    Both are written anew after every step, for a machine that freezes; a step that fails stops nothing. on_step sees
    each step. ArgumentError: the folder takes no files.
    """
    steps, end = list(spec.steps()), monotonic() + spec.budget_s
    report: dict[str, Any] = {
        "format": FORMAT,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "zinc_attn": __version__,
        "spirv": {name: build_record()[name] for name in ("compiler", "sources_sha256")},
        "device": {name: getattr(spec.info, name) for name in DEVICE_FACTS}
        | {"matrix_units": str(spec.info.matrix), "dispatcher": spec.runtime},
        "machine": machine_facts(),
        "planned": spec.restarts * len(steps),
        "steps": [],
    }
    write_report(report, folder)
    for restart in range(1, spec.restarts + 1):
        with tempfile.TemporaryDirectory(prefix="zinc-attn-proof-") as cache:
            for step in steps:
                limit = min(spec.timeout_s, end - monotonic())
                told = run_step(step, folder / f"restart-{restart}", cache, limit, spec.info)
                report["steps"].append({"restart": restart, **told})
                write_report(report, folder)
                on_step(report["steps"][-1])
    return report


def run_step(step: Step, folder: Path, cache: str, timeout_s: float, info: DeviceInfo) -> dict[str, Any]:
    """A step in a new process: its exit status (None: stopped at the limit, or never begun), seconds and rows.

    folder: of its files; check leaves none. cache: the folder of its pipeline cache, and of a model's file.
    """
    begin, status, text = monotonic(), None, b""
    out = ("--out", str(folder / slug(f"{step.tool}-{step.subject}"))) if step.tool in ("sweep", "bench") else ()
    path = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "ZINC_ATTN_CACHE_DIR": cache, "PYTHONUTF8": "1"}
    environment |= {"ZINC_ATTN_DEVICE": info.name, "GGML_VK_VISIBLE_DEVICES": str(info.index)}
    if timeout_s > 0:
        with tempfile.TemporaryFile() as stdout:
            status = run_group((*step.program, *step.words, *out), environment, stdout, timeout_s)
            stdout.seek(0)
            text = stdout.read()
    rows = []
    for line in text.decode(errors="replace").splitlines():
        with suppress(ValueError):  # of a last line that a crash has cut short
            rows += [json.loads(line)] if line.startswith("{") else []
    about = {"tool": step.tool, "shape": step.subject, "command": " ".join((step.tool, *step.words))}
    seconds = round(monotonic() - begin, 1) if timeout_s > 0 else 0.0
    return {**about, "exit_status": status, "seconds": seconds, "rows": rows}


def run_group(argv: Sequence[str], environment: Mapping[str, str], stdout: Any, timeout_s: float) -> int | None:
    """The exit status of a command, None where it was stopped; its children end with it, also at Ctrl-C."""
    process = subprocess.Popen(argv, stdout=stdout, env=environment, start_new_session=True)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)  # a driver may hold it for ever


def outcome(step: Record) -> str:
    """The outcome of a step: ok, or why it is not."""
    status = step["exit_status"]
    if status is None:
        return f"STOPPED after {step['seconds']} s" if step["seconds"] else NOT_RUN
    if status < 0:
        return f"ENDED by signal {-status}"
    return {0: OK, 1: "WRONG output", 2: "REFUSED"}.get(status, f"FAILED with exit status {status}")


def checks_of(report: Record) -> list[tuple[int, str, str | None, list[Record]]]:
    """(restart, command, digest over all cases, cases) of each step with bits; digest None: the step ended before."""
    checks = [step for step in report["steps"] if step["tool"] in ("check", "llama")]
    digests = (next((row["run"] for row in step["rows"] if "run" in row), None) for step in checks)
    cases = ([row for row in step["rows"] if "case" in row] for step in checks)
    names = ((step["restart"], step["command"].split(" --device")[0]) for step in checks)
    return [(*name, *rest) for name, *rest in zip(names, digests, cases, strict=True)]


def passed(report: Record) -> bool:
    """Whether all steps have run, all are ok, and each check has the same digest in every restart."""
    steps, digests = report["steps"], {(command, digest) for _, command, digest, _ in checks_of(report)}
    well = len(steps) == report["planned"] and all(outcome(step) == OK for step in steps)
    return well and len(digests) == len({command for command, _ in digests}) and None not in dict(digests).values()


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
    os.sync()  # data in memory alone do not outlive a machine that a driver freezes


def markdown(report: Record) -> str:
    steps, facts = report["steps"], {**report["device"], **report["machine"], "spirv": report["spirv"]["compiler"]}
    bad = [f"- restart {step['restart']}, {step['command']}: {outcome(step)}" for step in steps if outcome(step) != OK]
    ran = sum(outcome(step) != NOT_RUN for step in steps)
    blocks = (
        f"# zinc-attn proof: {report['device']['name']}",
        f"**{'passed' if passed(report) else 'NOT passed'}**: {ran} of {report['planned']} steps ran, "
        f"{len(bad) - len(steps) + ran} of them are not ok. Made {report['made']} by zinc-attn {report['zinc_attn']}.",
        *bad,
        "## Device",
        table(("fact", "value"), facts.items()),
        "## Bits",
        *bits_part(report),
        *models_part([row for step in steps if step["tool"] == "llama" for row in step["rows"]]),
        "## Bench",
        "What a call without new rows submits, in µs by the host's clock and the device's: the median of each restart.",
        times_table([step for step in steps if step["tool"] == "bench"]),
        "## Sweep",
        "A decode call of one layer, in µs by the host's clock: the median of each restart.",
        times_table([step for step in steps if step["tool"] == "sweep"]),
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
    yield "A case passes where all its variations have the oracle's bits, and a model where its logits have the kit's."
    counts = ([sum(row["status"] == word for row in cases) for word in words] for *_, cases in checks)
    lines = ((*name, digest or MISSING, *count) for (*name, digest, _), count in zip(checks, counts, strict=True))
    yield table(("restart", "command", "digest over all cases", *words), lines)
    rows = [row for *_, cases in checks for row in cases]
    faults = [(row["case"], fault["variation"], fault["text"]) for row in rows for fault in row["faults"]]
    if faults:
        yield table(("case", "variation", "first wrong element"), faults[:MOST_FAULTS])


def models_part(rows: Sequence[Record]) -> Iterator[str]:
    """Tokens per second of models with random weights, if there are some, and what kept a back end from them."""
    if not rows:
        return
    yield "## llama.cpp"
    yield "Tokens/s of a prompt (pp) and of steps (tg), @ so many tokens before them: medians, back ends in turns."
    speeds = grouped(((row["model"], row["test"], row["back_end"]), row["tokens_s"]) for row in rows if "test" in row)
    cells = {key: figure(median(values)) for key, values in speeds.items()}
    names = list(dict.fromkeys(name for *_, name in cells))
    tests = dict.fromkeys((model, test) for model, test, _ in cells)
    yield table(("model", "test", *names), ([*key, *(cells.get((*key, x), MISSING) for x in names)] for key in tests))
    yield from dict.fromkeys(f"- {row['model']}: {row['left_out']}" for row in rows if "left_out" in row)


def times_table(steps: Iterable[Record]) -> str:
    """A line per shape, context and layout, with a column per measure: the medians of the restarts, one by one.

    GB/s: the highest of a point's rates. verified: as the command says it; of a point without a time why it has none.
    """
    rows = [(step["shape"], row) for step in steps for row in step["rows"]]
    measures = list(dict.fromkeys(row["measure"] for _, row in rows))
    points = grouped(((shape, row["context"], row["layout"]), row) for shape, row in rows)
    lines = []
    for (shape, context, layout), point_rows in points.items():
        times = grouped((row["measure"], figure(row["median_us"])) for row in point_rows)
        bad = next((row for row in point_rows if row["status"] != "ok"), None)
        verified = f"{bad['status'].upper()}: {bad['error']}" if bad else point_rows[0]["verified"]
        rate = max((row["kv_gb_s"] for row in point_rows if row["kv_gb_s"] is not None), default=None)
        cells = (" / ".join(times.get(name, [MISSING])) for name in measures)
        lines.append((shape, f"{context:,}", layout, verified, figure(rate), *cells))
    return table(("shape", "keys", "layout", "verified", "GB/s", *measures), lines)
