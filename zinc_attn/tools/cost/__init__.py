"""The cost model: what a decode call should take on a card, why splits help, how many suffice, what limits the rest.

It is pure arithmetic, without a device or a clock. Every figure is modeled: nothing here was measured on an RDNA4
card. docs/cost-model.md explains the terms.
"""

from .calls import predict_call, predict_requests, predict_rows
from .cards import CARDS, Card, ChosenCard, card_of_device, card_with, find_card
from .measured import MeasuredPoint, compare_point, measured_points
from .predict import LABEL, Prediction, ideal, predict, prediction_compilers

__all__ = [
    "CARDS", "LABEL", "Card", "ChosenCard", "MeasuredPoint", "Prediction", "card_of_device", "card_with",
    "compare_point", "find_card", "ideal", "measured_points", "predict", "predict_call", "predict_requests",
    "predict_rows", "prediction_compilers",
]  # fmt: skip
