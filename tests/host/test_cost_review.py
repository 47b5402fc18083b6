"""A published review's own model of split attention: what its program prints, compiled and run on an A100's figures.

It counts workgroups and bytes only; zinc_attn's cost model is apart, and shares the card and the bytes of a token.
"""

from __future__ import annotations

import pytest

from zinc_attn import AttnShape
from zinc_attn.tools.cost import CARDS

A100 = CARDS["a100"]


def utilization(workgroups: int) -> float:
    """Share of the compute units that get a workgroup."""
    return min(1.0, workgroups / A100.compute_units)


def review(
    text: str, context: int, batch: int = 1, lse_bytes: int = 4
) -> tuple[float, int, float, float, float, float]:
    """(plain utilization, splits, split utilization, plain µs, split µs without the reduction, reduction µs).

    KV bytes over bandwidth x utilization; the reduction reads float16 partial states with ``lse_bytes`` each. Splits
    just fill the units, and have 128 keys at least.
    """
    shape, rate = AttnShape.parse(text), A100.bandwidth * 1e3
    blocks = batch * shape.q_heads
    splits = 1 if blocks >= A100.compute_units else min(-(-A100.compute_units // blocks), max(1, context // 128))
    plain, split = utilization(blocks), utilization(blocks * splits)
    read = context * shape.kv_bytes_per_token("f16") / rate  # the review counts one sequence
    reduction = splits * shape.q_heads * (2 * shape.head_dim + lse_bytes) / rate
    return plain, splits, split, read / plain, read / split, reduction


@pytest.mark.parametrize(
    ("text", "context", "batch", "plain", "splits"),
    [  # split: all 100.0 %
        *(("32/32/128", 8192, 1, "29.6", 4), ("32/8/128", 8192, 1, "29.6", 4)),
        *(("16/2/128", 8192, 1, "14.8", 7), ("16/1/128", 8192, 1, "14.8", 7)),
        *(("32/8/128", 4096, 1, "29.6", 4), ("32/8/128", 4096, 2, "59.3", 2), ("32/8/128", 4096, 4, "100.0", 1)),
        ("32/8/128", 4096, 32, "100.0", 1),
    ],
)
def test_review_utilization(text: str, context: int, batch: int, plain: str, splits: int) -> None:
    before, found, after, *_ = review(text, context, batch)
    assert (f"{100 * before:.1f}", found, after) == (plain, splits, 1)


@pytest.mark.parametrize(
    "line",
    [  # keys, splits, split utilization, plain µs, split µs, speed-up; main µs, reduction µs, share
        (512, 4, "59.3", "1.8", "0.5", "3.9", "0.44", "0.0083", "1.85"),
        (1024, 7, "100.0", "3.5", "0.5", "6.6", "0.52", "0.0146", "2.70"),
        (8192, 7, "100.0", "28.3", "4.2", "6.7", "4.19", "0.0146", "0.35"),
        (65536, 7, "100.0", "226.5", "33.6", "6.7", "33.55", "0.0146", "0.04"),
    ],
    ids=lambda line: str(line[0]),
)
def test_review_contexts(line: tuple[int, int, str, str, str, str, str, str, str]) -> None:
    _, splits, used, plain, split, reduction = review("16/2/128", line[0], lse_bytes=0)  # its speed-ups leave it out
    times = f"{plain:.1f}", f"{split + reduction:.1f}", f"{plain / (split + reduction):.1f}"
    *_, split, reduction = review("16/2/128", line[0])
    share = f"{100 * reduction / (split + reduction):.2f}"
    assert line[1:] == (splits, f"{100 * used:.1f}", *times, f"{split:.2f}", f"{reduction:.4f}", share)
