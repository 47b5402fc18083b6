"""The cost model: what a decode call should take on a card, why splits help, how many suffice, what limits the rest.

It is pure arithmetic, without a device or a clock. Every figure is modeled: nothing here was measured on an RDNA4
card. docs/cost-model.md explains the terms.
"""

from .calls import predict_call, predict_requests, predict_rows
from .cards import CARDS, Card, card_with, find_card
from .predict import Prediction, ideal, predict

__all__ = [
    "CARDS", "Card", "Prediction", "card_with", "find_card", "ideal", "predict", "predict_call", "predict_requests",
    "predict_rows",
]  # fmt: skip
