"""The cost model: what a decode call should take on a card, why splits help, how many suffice, what limits the rest.

It is pure arithmetic, without a device or a clock. Every figure is modelled: nothing here was measured on an RDNA4
card. docs/cost-model.md explains the terms.
"""

from .cards import CARDS, READ_EFFICIENCY, Card, card_with, find_card
from .cascade import Cascade, CascadePrediction, cascade_layout, cascade_us, predict_cascade
from .links import LINKS, Link, ShardPrediction, find_link, pays_from, predict_shards
from .pass1 import DTYPE_ISSUE, ISSUE, START_US, Workgroup, issue_per_key
from .predict import GAP_US, LABEL, Prediction, best_splits, ideal, predict, timeline

__all__ = [
    "CARDS",
    "DTYPE_ISSUE",
    "GAP_US",
    "ISSUE",
    "LABEL",
    "LINKS",
    "READ_EFFICIENCY",
    "START_US",
    "Card",
    "Cascade",
    "CascadePrediction",
    "Link",
    "Prediction",
    "ShardPrediction",
    "Workgroup",
    "best_splits",
    "card_with",
    "cascade_layout",
    "cascade_us",
    "find_card",
    "find_link",
    "ideal",
    "issue_per_key",
    "pays_from",
    "predict",
    "predict_cascade",
    "predict_shards",
    "timeline",
]
