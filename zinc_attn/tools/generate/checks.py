"""The self-check of generation: other split layouts, page sizes and prefill chunks beside the first run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...runtime.device import Device
from ..harness.progress import Progress, Steps
from ..harness.split_spec import SplitSpec
from .generation import Generation, Settings, even_chunks, generate_ids
from .hf_model import HFModel
from .trace import AttentionTrace, first_difference

CHECK_LAYOUTS: Final = ("1", "8", "auto", "size:256")
CHECK_PAGES: Final = (16, 64, 256)
CHECK_CHUNKS: Final = (1, 7, 64, None)  # None: the whole prompt at once
ONE_BY_ONE: Final = 256  # prompt tokens at most that are fed one by one


@dataclass(frozen=True)
class Check:
    """A run of the self-check beside the first one.

    kind: "layout" or "page size", where the chunks are the same and every bit must be equal, or "chunks", where token
    ids are compared, because a CPU's matrix product may round differently for another number of rows. status: "equal",
    "ids differ", "host differs" (the model's own arithmetic) or "DIFFERENT" (attention). bits_equal: of attention and
    logits; None for chunks.
    """

    kind: str
    value: str
    status: str
    bits_equal: bool | None
    ids_equal: bool
    text: str = ""


def selfcheck(
    model: HFModel,
    device: Device,
    prompt: Sequence[int],
    settings: Settings,
    want: Generation,
    traced: AttentionTrace,
    progress: Progress | None = None,
) -> list[Check]:
    """Generate again with other layouts, page sizes and prefill chunks, and compare with ``settings``' own run.

    want, traced: what that run gave, and the trace with digests that observed it.
    """
    runs: list[tuple[str, str, Settings, list[int] | None]] = []  # kind, value, settings, chunks where these vary
    for layout in map(SplitSpec.parse, CHECK_LAYOUTS):
        other = replace(settings, num_splits=layout.num_splits, split_size=layout.split_size)
        runs.append(("layout", layout.label, other, None))
    runs += [("page size", str(pages), replace(settings, page_size=pages), None) for pages in CHECK_PAGES]
    for size in CHECK_CHUNKS:
        if size is None or size < len(prompt):  # a larger one is the same as all at once
            sizes, label = chunk_sizes(len(prompt), size)
            runs.append(("chunks", label, settings, sizes))
    found, steps = [], Steps(progress, len(runs))
    for kind, value, other, chunks in runs:
        steps.begin(f"{kind} {value}")
        trace = AttentionTrace(digests=chunks is None)
        got = generate_ids(model, device, prompt, other, trace=trace, chunks=chunks)
        part = first_difference(trace.steps, traced.steps) if chunks is None else None
        status, text = part or ("equal", "")
        if chunks is not None and got.ids != want.ids:
            at = next((i for i, (a, b) in enumerate(zip(got.ids, want.ids, strict=False)) if a != b), len(got.ids))
            margin = want.margins[min(at, len(want.margins) - 1)]
            status, text = "ids differ", f"from new token {at} on, where the best logit led by {margin:.3g}"
        bits_equal = part is None if chunks is None else None
        found.append(Check(kind, value, status, bits_equal, got.ids == want.ids, text))
    return found


def chunk_sizes(tokens: int, size: int | None) -> tuple[list[int], str]:
    """Sizes of the chunks of a prompt, and their name. Beyond ONE_BY_ONE tokens only the last ones go one by one."""
    if size is None:
        return [tokens], "all"
    head = tokens - ONE_BY_ONE
    if size == 1 and head > 0:
        return [*even_chunks(head, 64), *[1] * ONE_BY_ONE], f"1 (the last {ONE_BY_ONE}, by 64 before)"
    return even_chunks(tokens, size), str(size)
