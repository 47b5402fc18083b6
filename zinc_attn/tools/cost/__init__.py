"""The cost model: what a decode call should take on a card, by arithmetic alone. docs/cost-model.md has the terms."""

from .calls import predict_call, predict_requests, predict_rows
from .cards import CARDS, Card, card_with, find_card
from .predict import Prediction, ideal, predict

__all__ = [
    "CARDS", "Card", "Prediction", "card_with", "find_card", "ideal", "predict", "predict_call", "predict_requests",
    "predict_rows",
]  # fmt: skip
