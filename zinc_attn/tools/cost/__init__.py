"""The cost model: what a decode call should take on a card, why splits help, how many suffice, what limits the rest.

It is pure arithmetic, without a device or a clock. Every figure is modeled: nothing here was measured on an RDNA4
card. docs/cost-model.md explains the terms.
"""

from .calls import predict_call, predict_cascade, predict_rows
from .cards import CARDS, Card, ChosenCard, card_of_device, card_with, find_card
from .measured import Comparison, MeasuredPoint, compare, compare_point, measured_points, read_rows
from .predict import LABEL, Prediction, best_splits, ideal, predict, prediction_compilers

__all__ = [
    "CARDS", "LABEL", "Card", "ChosenCard", "Comparison", "MeasuredPoint", "Prediction", "best_splits",
    "card_of_device", "card_with", "compare", "compare_point", "find_card", "ideal", "measured_points", "predict",
    "predict_call", "predict_cascade", "predict_rows", "prediction_compilers", "read_rows",
]  # fmt: skip
