"""The run of ``zinc-attn sweep``, ``bench`` and ``decode``: open devices, measure, print, and leave files."""

import csv
import io
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Final

from ..decode.arithmetic import check_arithmetic
from ..tools.harness.bits import Judge, oracle
from ..tools.harness.files import check_out, write_file
from ..tools.harness.inputs import parse_contexts
from ..tools.harness.judge import NativeOracle
from ..tools.harness.split_spec import parse_split_specs
from ..tools.harness.tables import figure, grouped
from ..tools.measure import MODELED, CallSpec, Row, measure_calls, rows_png
from ..tools.measure.rows import LINE
from ..tools.models import ModelPreset, slug
from .arguments import open_devices, open_oracle
from .terminal import need, note_cpu, plural, print_json, print_rows, progress_bar, say_written

Record = Mapping[str, Any]
FIGURES: Final = {  # heading: the measure, and the field of its row; a column without any figure is left out
    "µs per\nlayer": ("call", "median_us"),
    "IQR\nµs": ("call", "iqr_us"),
    "KV\nGB/s": ("call", "kv_gb_s"),
    "attn\nms/step": ("call", "attention_ms_per_step"),
    "attn\ntokens/s": ("call", "tokens_s"),
    "step\ntokens/s": ("call", "step_tokens_s"),
    "error vs\nfloat64": ("call", "relative_error"),
    "device\nµs": ("device", "median_us"),
    "pass 1\nµs": ("pass 1", "median_us"),
    "gap\nµs": ("gap", "median_us"),
    "pass 2\nµs": ("pass 2", "median_us"),
    "device\nGB/s": ("device", "kv_gb_s"),
}
WORDS: Final = {  # of the column ``verified``
    "bits": "out and lse equal the oracle's bit for bit",
    "bits*": "those of some KV heads equal the oracle's, and all bits those of the context's first layout",
    "bound": "as near to float64 as the roundings of matrix units allow, and the bits of the context's first layout",
    "bound*": "as bound, but some KV heads alone are compared with float64",
    MODELED: "nothing ran: attend and merge as the cost model has them on this card (docs/cost-model.md)",
}


def call_spec(args: Namespace, model: ModelPreset, dtype: str, **more: Any) -> CallSpec:
    """The calls of a model as the options of ``CommandParser.measuring`` have them, and ``more``."""
    contexts, splits = parse_contexts(args.contexts), parse_split_specs(args.splits)
    more |= {"dtype": dtype, "repeats": args.repeats, "arithmetic": args.arithmetic, "model": model.name}
    return CallSpec(model.shape, model.attention_layers, contexts, splits, **more)


def run_calls(
    args: Namespace,
    specs: Sequence[Sequence[CallSpec]],
    about: str,
    figure_of: tuple[str, str],
    *,
    measure: Callable[..., Iterator[Row]] = measure_calls,
    show: Callable[[Sequence[Row]], None] | None = None,
    beside: Sequence[Record] = (),
) -> int:
    """Measure the calls of ``specs``, a group of one shape after the other, print and write the files; the exit status.

    about: the heading's lines. figure_of: the field of the picture, and its title. show: prints the rows, None for
    ``print_measured``. beside: rows of an earlier run, which the picture shows, too.
    """
    if args.picture:
        need("matplotlib")
    check_out(args.out)
    with ExitStack() as stack:
        devices = open_devices(stack, [args.device], args.runtime)
        for spec in (spec for group in specs for spec in group):
            for device in devices:
                check_arithmetic(spec.arithmetic, device, spec.dtype, spec.shape)
        info = devices[0].info
        runtimes = [device.runtime.name for device in devices]
        note_cpu(info)
        processor = open_oracle(stack, args.oracle, devices)
        judge: Judge = NativeOracle(processor) if processor else oracle
        judged_by = {"oracle": "cpu" if processor else "numpy"}
        if not args.json:
            print(f"{info.name} ({info.driver}), {', '.join(runtimes)}\n{about}", flush=True)
        progress, rows = stack.enter_context(progress_bar()), list[Row]()
        for row in chain.from_iterable(measure(devices, group, progress=progress, judge=judge) for group in specs):
            rows.append(row)
            if args.json:
                print_json([row.record() | judged_by])
    if not args.json:
        (show or print_measured)(rows)
    if all(row.status == "refused" for row in rows if row.runtime in runtimes):
        return 2  # an earlier run's files stay
    records = [row.record() | judged_by for row in rows]
    shown = [record for record in (*records, *beside) if record["measure"] in ("call", "step", MODELED)]
    field, headline = figure_of
    notes = f"{about.replace(chr(10), '; ')}\n{info.name}, {info.driver}, through {', '.join(runtimes)}"
    lines = "".join(f"{json.dumps(record, ensure_ascii=False, allow_nan=False)}\n" for record in records)
    table = csv.DictWriter(csv_text := io.StringIO(), list(records[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(records)
    files = {"jsonl": lines.encode(), "csv": csv_text.getvalue().encode()}
    if args.picture and (png := rows_png(shown, headline, notes, field)):
        files["png"] = png
    name = Path(args.out or f"{args.command}-{slug(info.name)}") / args.command
    for kind, data in files.items():
        write_file(name.with_suffix(f".{kind}"), data)
    say_written(name.with_suffix(f".{kind}") for kind in files)
    return 1 if any(row.status == "failed" for row in rows) else 0


def print_measured(rows: Sequence[Row]) -> None:
    """A line per call, and the meaning of the table's words."""
    calls = grouped(((row.context, *row.line.values()), row) for row in rows).values()
    told = [name for name in LINE if len({row.line[name] for row in rows}) > 1]
    as_call = {MODELED: "call"}
    measured = [
        {(as_call.get(row.measure, row.measure), f): x for row in call for f, x in row.figures.items()}
        for call in calls
    ]
    shown = {name: key for name, key in FIGURES.items() if any(figures.get(key) is not None for figures in measured)}
    lines = []
    for (row, *_), values in zip(calls, measured, strict=True):
        call = [f"{row.context:,}", *(row.line[name] for name in told), row.layout]
        splits = figure(row.plan.num_splits if row.plan else None)
        lines.append([*call, splits, _verdict(row), *(figure(values.get(key)) for key in shown.values())])
    print_rows(("context", *told, "layout", "splits", "verified", *shown), lines, sections=1)
    print("\n".join(notes(rows)))


def _verdict(row: Row) -> str:
    if row.measure == MODELED:
        return MODELED
    return {"failed": "FAILED", "refused": "refused"}.get(row.status, row.verified or "").replace(" (sampled)", "*")


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """The meaning of the table's words, and why a call has no time."""
    said = {_verdict(row) for row in rows}
    yield from (f"{word}: {meaning}." for word, meaning in WORDS.items() if word in said)
    for row in [row for row in rows if row.seconds][:1]:
        layers, tokens = plural(row.spec.layers, "layer"), plural(row.spec.batch * row.spec.q_len, "token")
        yield f"Time: {row.latency_mode}. Values: normal, seeded."
        yield f"attn tokens/s: as if attention over {layers} were all of a step of {tokens}."
        if row.spec.weights_ms is not None:
            yield f"step tokens/s: with {row.spec.weights_ms:g} ms for all else of the step, as --weights-ms says."
        if row.relative_error is not None:
            yield "error: of out against float64, relative, in the L2 norm."
    troubles = grouped(((row.context, row.status, row.error), row.layout) for row in rows if row.error)
    for (context, status, error), layouts in troubles.items():
        yield f"{context:,} keys, {', '.join(layouts)}: {'FAILED' if status == 'failed' else status}: {error}"
