"""The cost model: what a decode call should take on a card, why splits help, how many suffice, what limits the rest.

It is pure arithmetic, without a device or a clock. Every figure is modeled: nothing here was measured on an RDNA4
card. docs/cost-model.md explains the terms.
"""

from .cards import CARDS, Card, ChosenCard, card_of_device, card_with, find_card
from .cascade import predict_cascade
from .compilers import prediction_compilers
from .measured import Comparison, MeasuredPoint, compare, compare_point, measured_points, read_rows
from .predict import LABEL, best_splits, ideal, predict, timeline
from .prefill import RowsPrediction, matrix_from, predict_call, predict_rows

__all__ = [
    "CARDS",
    "LABEL",
    "Card",
    "ChosenCard",
    "Comparison",
    "MeasuredPoint",
    "RowsPrediction",
    "best_splits",
    "card_of_device",
    "card_with",
    "compare",
    "compare_point",
    "find_card",
    "ideal",
    "matrix_from",
    "measured_points",
    "predict",
    "predict_call",
    "predict_cascade",
    "predict_rows",
    "prediction_compilers",
    "read_rows",
    "timeline",
]
