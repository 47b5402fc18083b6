"""The cost model: what a decode call should take on a card, why splits help, how many suffice, what limits the rest.

It is pure arithmetic, without a device or a clock. Every figure is modeled: nothing here was measured on an RDNA4
card. docs/cost-model.md explains the terms.
"""

from .cards import CARDS, Card, card_with, find_card
from .cascade import predict_cascade
from .links import LINKS, find_link, pays_from, predict_shards
from .predict import LABEL, best_splits, ideal, predict, timeline

__all__ = [
    "CARDS",
    "LABEL",
    "LINKS",
    "Card",
    "best_splits",
    "card_with",
    "find_card",
    "find_link",
    "ideal",
    "pays_from",
    "predict",
    "predict_cascade",
    "predict_shards",
    "timeline",
]
