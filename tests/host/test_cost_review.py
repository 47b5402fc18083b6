"""A published review's own model of split attention: what its program prints, compiled and run on an A100's figures.

It counts workgroups and bytes only. docs/cost-model.md shows its tables beside these; zinc_attn's cost model is apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zinc_attn import AttnShape
from zinc_attn.tools.cost import CARDS, Card


def utilization(workgroups: int, units: int) -> float:
    """Share of the compute units that get a workgroup."""
    return min(1.0, workgroups / units)


def review_splits(blocks: int, units: int, context: int, least_keys: int = 128) -> int:
    """Splits that just fill the units, of at least ``least_keys`` keys; ``blocks``: batch x query heads."""
    return 1 if blocks >= units else min(-(-units // blocks), max(1, context // least_keys))


@dataclass(frozen=True)
class ReviewRow:
    """One configuration: plain flash attention (one block per query head) and split."""

    plain_utilization: float
    splits: int
    blocks: int
    split_utilization: float
    plain_us: float
    split_us: float  # without the reduction
    reduction_us: float

    @property
    def speed_up(self) -> float:
        return self.plain_us / (self.split_us + self.reduction_us)

    @property
    def reduction_share(self) -> float:
        return self.reduction_us / (self.split_us + self.reduction_us)


def review(shape: AttnShape, context: int, card: Card = CARDS["a100"], batch: int = 1, lse_bytes: int = 4) -> ReviewRow:
    """KV bytes over bandwidth x utilization; the reduction reads float16 partial states. lse_bytes: of a state."""
    blocks, rate = batch * shape.q_heads, card.bandwidth * 1e3
    splits = review_splits(blocks, card.compute_units, context)
    plain, split = (utilization(n, card.compute_units) for n in (blocks, blocks * splits))
    read = context * shape.kv_bytes_per_token("f16") / rate  # the review counts one sequence
    reduction = splits * shape.q_heads * (2 * shape.head_dim + lse_bytes) / rate
    return ReviewRow(plain, splits, blocks * splits, split, read / plain, read / split, reduction)


@pytest.mark.parametrize(
    ("shape", "plain", "splits", "blocks"),
    [  # MHA-32h, GQA-32/8, GQA-16/2, MQA-16/1 at 8,192 keys; split: all 100.0 %
        (AttnShape(32, 32, 128), "29.6", 4, 128),
        (AttnShape(32, 8, 128), "29.6", 4, 128),
        (AttnShape(16, 2, 128), "14.8", 7, 112),
        (AttnShape(16, 1, 128), "14.8", 7, 112),
    ],
    ids=str,
)
def test_review_utilization(shape: AttnShape, plain: str, splits: int, blocks: int) -> None:
    row = review(shape, 8192)
    assert (f"{row.plain_utilization:.1%}", row.splits, row.blocks) == (f"{plain}%", splits, blocks)
    assert row.split_utilization == 1


# keys, KV MB, splits, split utilization, plain µs, split µs, speed-up; main µs, reduction µs, share
REVIEW_CONTEXTS = [
    (512, "0.5", 4, "59.3", "1.8", "0.5", "3.9", "0.44", "0.0083", "1.85"),
    (1024, "1.0", 7, "100.0", "3.5", "0.5", "6.6", "0.52", "0.0146", "2.70"),
    (2048, "2.1", 7, "100.0", "7.1", "1.1", "6.7", "1.05", "0.0146", "1.37"),
    (4096, "4.2", 7, "100.0", "14.2", "2.1", "6.7", "2.10", "0.0146", "0.69"),
    (8192, "8.4", 7, "100.0", "28.3", "4.2", "6.7", "4.19", "0.0146", "0.35"),
    (16384, "16.8", 7, "100.0", "56.6", "8.4", "6.7", "8.39", "0.0146", "0.17"),
    (32768, "33.6", 7, "100.0", "113.2", "16.8", "6.7", "16.78", "0.0146", "0.09"),
    (65536, "67.1", 7, "100.0", "226.5", "33.6", "6.7", "33.55", "0.0146", "0.04"),
]


@pytest.mark.parametrize("line", REVIEW_CONTEXTS, ids=lambda line: str(line[0]))
def test_review_contexts(line: tuple[int, str, int, str, str, str, str, str, str, str]) -> None:
    shape, keys = AttnShape(16, 2, 128), line[0]
    timed, reduced = review(shape, keys, lse_bytes=0), review(shape, keys)  # its speed-up table leaves the lse out
    assert line[1:7] == (
        f"{keys * shape.kv_bytes_per_token() / 1e6:.1f}",
        timed.splits,
        f"{100 * timed.split_utilization:.1f}",
        f"{timed.plain_us:.1f}",
        f"{timed.split_us + timed.reduction_us:.1f}",
        f"{timed.speed_up:.1f}",
    )
    share = f"{100 * reduced.reduction_share:.2f}"
    assert line[7:] == (f"{reduced.split_us:.2f}", f"{reduced.reduction_us:.4f}", share)


@pytest.mark.parametrize(
    ("batch", "plain", "splits"),
    [(1, "29.6", 4), (2, "59.3", 2), (4, "100.0", 1), (8, "100.0", 1), (16, "100.0", 1), (32, "100.0", 1)],
)
def test_review_batches(batch: int, plain: str, splits: int) -> None:
    row = review(AttnShape(32, 8, 128), 4096, batch=batch)
    assert (f"{100 * row.plain_utilization:.1f}", row.splits, row.split_utilization) == (plain, splits, 1)


def test_review_text() -> None:
    """16/2 at 32,768 keys with 128 splits: 16 of 108 units, then 2,048 blocks, 256 keys a split."""
    assert f"{utilization(16, 108):.1%}" == "14.8%"
    assert (16 * 128, utilization(16 * 128, 108), 32768 // 128) == (2048, 1, 256)


def test_article_text() -> None:
    """Qwen3-30B-A3B with 32 query heads: 32 workgroups on 64 units, and 256 with 8 splits."""
    assert utilization(32, 64) == 0.5
    assert (32 * 8, utilization(32 * 8, 64), 32 * 8 // 64) == (256, 1, 4)
