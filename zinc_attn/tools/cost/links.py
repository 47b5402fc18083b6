"""One sequence on several cards: its nodes are dealt to shards, whose partial states are gathered once and folded."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from ...canonical.constants import KEYS_PER_NODE
from ...checks import check_int
from ...errors import ArgumentError
from ...planning.splits import SplitPlan, plan_splits
from ...shapes import AttnShape
from .assumptions import HOST_COPY_GB_S
from .cards import Card
from .predict import Modeled, merge_us, predict


@dataclass(frozen=True)
class Link:
    """A link between shards. hosts: each shard is on a host of its own; otherwise this is the bus of each card."""

    title: str
    latency_us: float
    gb_s: float
    hosts: bool = True


LINKS: Final = {
    "pcie5": Link("PCIe 5.0 x16", 5.0, 50.0, hosts=False),
    "10gbe": Link("10 Gb Ethernet", 30.0, 1.25),
    "25gbe": Link("25 Gb Ethernet", 30.0, 3.125),
    "100gbe": Link("100 Gb Ethernet", 30.0, 12.5),
}


def find_link(name: str) -> Link:
    """A link by name. ArgumentError lists the links."""
    if name not in LINKS:
        raise ArgumentError(f"link: got {name!r}, expected one of {', '.join(LINKS)}")
    return LINKS[name]


@dataclass(frozen=True)
class ShardPrediction(Modeled):
    """A modeled decode call on ``shards`` cards, beside one card that holds all keys (one_us).

    pass1_us: of the shard with most nodes. down_us: its partial states to the host. gather_us: those of the others to
    one host. up_us: all of them to the card that folds. fold_us: pass 2 there. received_bytes: by one host or process.
    """

    card: str
    link: str
    shape: str
    dtype: str
    context: int
    shards: int
    nodes: int
    received_bytes: int
    pass1_us: float
    down_us: float
    gather_us: float
    up_us: float
    fold_us: float
    one_us: float

    @property
    def total_us(self) -> float:
        """The whole call."""
        return self.pass1_us + self.down_us + self.gather_us + self.up_us + self.fold_us

    @property
    def pays(self) -> bool:
        """Whether the shards take less time than one card."""
        return self.total_us < self.one_us


def predict_shards(
    context: int, shape: AttnShape, card: Card, shards: int, link: Link, dtype: str = "f16"
) -> ShardPrediction:
    """``context`` keys on ``shards`` cards of the same kind."""
    check_int("shards", shards, 1)
    nodes = -(-context // KEYS_PER_NODE)
    most, state_bytes = -(-nodes // shards), 4 * shape.q_heads * (shape.v_head_dim + 2)
    others = (nodes - nodes // shards) * state_bytes
    local = SplitPlan.fixed(min(context, most * KEYS_PER_NODE), shape, split_size=KEYS_PER_NODE)
    fold = SplitPlan.fixed(context, shape, split_size=KEYS_PER_NODE)
    return ShardPrediction(
        card=card.title,
        link=link.title,
        shape=str(shape),
        dtype=dtype,
        context=context,
        shards=shards,
        nodes=nodes,
        received_bytes=others,
        pass1_us=predict(local, card, dtype).pass1_us,
        down_us=_bus_us(most * state_bytes),
        gather_us=link.latency_us * (shards - 1).bit_length() + others * 1e-3 / link.gb_s if link.hosts else 0.0,
        up_us=_bus_us(nodes * state_bytes),
        fold_us=merge_us(fold, card, 0, fold.leaves_per_state),
        one_us=predict(plan_splits(context, shape, card.compute_units, dtype), card, dtype).total_us,
    )


def _bus_us(nbytes: int) -> float:
    """Partial states over a card's bus, and one copy in host memory."""
    bus = LINKS["pcie5"]
    return bus.latency_us + nbytes * 1e-3 * (1 / bus.gb_s + 1 / HOST_COPY_GB_S)


def pays_from(shape: AttnShape, card: Card, shards: int, link: Link, dtype: str = "f16") -> int | None:
    """The least power of two, from 1k to 16m keys, from which on shards take less time than one card; None for none."""
    contexts = (1 << exponent for exponent in range(24, 9, -1))
    paying = takewhile(lambda context: predict_shards(context, shape, card, shards, link, dtype).pays, contexts)
    return min(paying, default=None)
