"""The cost model: what a decode call should take on a card, by arithmetic alone. docs/cost-model.md has the terms."""

from .calls import predict_call, predict_requests, predict_rows
from .cards import CARDS, Card, card_of, card_with, find_card
from .predict import Prediction, ideal, issue_shares, predict

__all__ = [
    "CARDS", "Card", "Prediction", "card_of", "card_with", "find_card", "ideal", "issue_shares", "predict",
    "predict_call", "predict_requests", "predict_rows",
]  # fmt: skip
