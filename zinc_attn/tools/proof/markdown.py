"""The report as Markdown, for people: the same facts as report.json, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from ..harness.tables import MISSING, figure

Report = Mapping[str, Any]
ABSENT: Final = "absent"
FOOT: Final = (  # what the reader can do with it
    "The raw rows lie beside this file, a folder per restart and step. `zinc-attn plan --measured FILE.jsonl`",
    "compares one of them with the model, `zinc-attn check --against record.json` another machine's digests.",
)


def markdown(report: Report) -> str:
    """The text of report.md."""
    parts: Mapping[str, Callable[[Report], Iterator[str]]] = {
        "Device": device_part,
        "Steps": steps_part,
        "Bits": bits_part,
        "Sweep": sweep_part,
        "Bench": bench_part,
        "Temperature and clocks": sensors_part,
    }
    lines = [*head(report), ""]
    for title, part in parts.items():
        lines += [f"## {title}", "", *part(report), ""]
    return "\n".join((*lines, *FOOT)) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """A table of Markdown. Vertical bars in a cell are escaped, and its lines are joined."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        cells = (" ".join(str(cell).split()).replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(cells)} |"


def word(x: bool | None) -> str:
    """yes, no, or a dash where it is not known."""
    return MISSING if x is None else "yes" if x else "no"


def head(report: Report) -> Iterator[str]:
    """The title, the outcome, and the version."""
    device, bad = report["device"], [one for one in report["steps"] if one["status"] != "ok"]
    yield f"# zinc-attn proof: {device['name']}"
    yield ""
    ended = bad or len(report["steps"]) == report["steps_planned"]
    outcome = "**passed**" if report["passed"] else "**NOT passed**" if ended else "**not ended**"
    yield (
        f"{outcome}: {len(report['steps'])} of {report['steps_planned']} steps ran, {len(bad)} of them failed or were "
        f"refused; {report['ended']}. Made {report['made']} by zinc-attn {report['zinc_attn']}."
    )


def device_part(report: Report) -> Iterator[str]:
    """Device, package and machine."""
    device, machine, spirv, card = (report[name] for name in ("device", "machine", "spirv", "card"))
    settings = ", ".join(f"{name}={value}" for name, value in machine["driver_settings"].items())
    measured = [
        f"{shape} at {', '.join(f'{n:,}' for n in contexts) or 'no context: none fits the memory'} keys"
        for shape, contexts in report["arguments"]["contexts"].items()
    ]
    return table(
        ("fact", "value"),
        (
            ("name", f"{device['name']} ({device['kind']}, {device['vendor']})"),
            ("driver", f"{device['driver']}, Vulkan {device['api_version']}"),
            ("dispatcher", report["arguments"]["runtime"]),
            ("measured", "; ".join(measured)),
            ("compute units", f"{device['compute_units']} ({device['compute_units_source']})"),
            ("subgroup size", device["subgroup_size"]),
            ("workgroups of eight waves", word(device["node_workgroups"])),
            ("memory, max buffer", f"{device['memory_bytes']:,} and {device['max_buffer_bytes']:,} bytes"),
            ("PCI address", device["pci"] or "no query tells"),
            ("SPIR-V", f"{spirv['compiler']}, sources {spirv['sources_sha256']}" if spirv else "not built"),
            ("modeled card", f"{card['title']}, by {card['by']}" if card else "none: a CPU device is not modeled"),
            ("counts of the model", f"{report['compiler']['counted_mesa']}, {report['compiler']['counted_glsl']}"),
            ("system", machine["system"]),
            ("CPU", f"{machine['cpu']}, {machine['cpu_threads']} threads"),
            ("Python, NumPy", f"{machine['python']}, {machine['numpy']}"),
            ("driver settings", settings or "none set"),
        ),
    )


def steps_part(report: Report) -> Iterator[str]:
    """How every step ended."""
    rows = (
        (one["restart"], f"`{one['command']}`", one["status"].upper() if one["status"] != "ok" else "ok",
         one["seconds"], one["note"] or MISSING)
        for one in report["steps"]
    )  # fmt: skip
    return table(("restart", "command", "status", "s", "note"), rows)


def bits_part(report: Report) -> Iterator[str]:
    """The digests."""
    bits = report["bits"]
    yield (
        f"Cases: {bits['cases']}. All restarts have the same digest: {word(bits['agree'])}. It is that of the "
        f"committed record: {word(bits['equals_committed'])}."
    )
    yield ""
    names = ("passed", "failed", "refused")
    rows = [(one["restart"], one["digest"] or ABSENT, *(one[name] for name in names)) for one in bits["restarts"]]
    columns = ("restart", "digest over all cases", "pass", "FAIL", "refused")
    yield from table(columns, [*rows, ("committed", bits["committed"] or "not in the record", *[MISSING] * 3)])
    if bits["faults"]:
        yield ""
        faults = ((one["restart"], one["case"], one["variation"], one["text"]) for one in bits["faults"])
        yield from table(("restart", "case", "variation", "first wrong element"), faults)


def sweep_part(report: Report) -> Iterator[str]:
    """The sweep's points beside the model."""
    yield "A decode call (append, attend, merge, readback) of one layer by the host's clock: median (IQR) in µs. The"
    yield "model has neither submission nor readback; the bench's ratio is by the device's clock, where it has one."
    yield ""
    columns = ("shape", "keys", "layout", "splits", "verified", "per restart", "spread", "GB/s", "modeled µs", "ratio")
    yield from table(columns, map(_sweep_cells, report["sweep"]))


def _sweep_cells(one: Mapping[str, Any]) -> Sequence[object]:
    verified = one["verified"] if one["status"] == "ok" else f"{one['status'].upper()}: {one['error']}"
    each = ", ".join(f"{figure(r['median_us'])} ({figure(r['iqr_us'])})" for r in one["restarts"]) or MISSING
    figures = (figure(one[name]) for name in ("spread", "kv_gb_s", "modeled_us", "ratio"))
    return (one["shape"], f"{one['context']:,}", _layout(one), one["splits"], verified, each, *figures)


def bench_part(report: Report) -> Iterator[str]:
    """The bench's passes beside the model."""
    yield "Medians of the restarts in µs. call: by the host's clock. device and passes: by the device's timestamps, in"
    yield "runs of their own between those of the call: where they exceed it, runs differ by as much on this machine."
    yield "Merge is the gap and pass 2, as modeled."
    yield ""
    names = ("host_us", "device_us", "pass1_us", "gap_us", "pass2_us", "spread", "read_gb_s")
    modeled = ("modeled_pass1_us", "modeled_merge_us", "ratio", "pass1_ratio", "merge_ratio")
    columns = ("shape", "keys", "layout", "call", "device", "pass 1", "gap", "pass 2", "spread", "read GB/s",
               "modeled pass 1", "modeled merge", "ratio", "ratio of pass 1", "ratio of merge")  # fmt: skip
    rows = []
    for one in report["bench"]:
        begin = (one["shape"], f"{one['context']:,}", _layout(one))
        if one["status"] == "ok":
            rows.append((*begin, *(figure(one[name]) for name in (*names, *modeled))))
        else:
            rows.append((*begin, f"{one['status'].upper()}: {one['error']}", *[MISSING] * (len(columns) - 4)))
    yield from table(columns, rows)
    yield ""
    yield "ratio: measured over modeled. spread: the slowest restart over the fastest."
    yield "A star at a layout: the model timed the layout of this version's split rule, not the one that ran."


def _layout(one: Mapping[str, Any]) -> str:
    return f"{one['layout']}*" if one.get("same_plan") is False else str(one["layout"])


def sensors_part(report: Report) -> Iterator[str]:
    """Temperature, clocks and load around every step."""
    sensors = report["sensors"]
    if not sensors["before_all"]:
        yield f"{ABSENT}: no temperature, clock or load of a card can be read on this machine."
        return
    whose = "of the device, by its PCI address" if sensors["matched_by_pci"] else "of each card; none is matched"
    yield f"Readings are {whose}. Not readable: {', '.join(sensors['absent']) or 'nothing'}."
    yield ""
    rows = []
    for step in report["steps"]:
        for one in step["sensors"]:
            during = "/".join(figure(one[f"during_{name}"]) for name in ("min", "median", "max"))
            during = during if one["samples"] else ABSENT
            values = (figure(one["before"]), during, figure(one["after"]))
            rows.append((step["restart"], step["step"], one["card"], f"{one['name']} {one['unit']}", *values))
    yield from table(("restart", "step", "card", "sensor", "before", "during: min/median/max", "after"), rows)
