"""The time of a decode step of a whole model: its weights once, states, attention, and the waits between dispatches."""

from dataclasses import dataclass

from ...planning.splits import SplitPlan, plan_splits
from ...shapes import AttnShape
from .assumptions import GAP_US
from .cards import Card
from .predict import predict


@dataclass(frozen=True)
class ModelStep:
    """The bytes that a step of one sequence moves, and its waits.

    weights: that it reads, of experts the chosen ones. states: of recurrent layers, read and written. barriers: between
    dispatches, without those of attention. layers: that attend to all keys, of ``shape`` and ``dtype``.
    """

    weights: int
    states: int
    barriers: int
    layers: int
    shape: AttnShape
    dtype: str

    def bytes_at(self, context: int) -> int:
        """The bytes that a step after ``context`` tokens must read or write."""
        return self.weights + self.states + self.layers * context * self.shape.kv_bytes_per_token(self.dtype)

    def us(self, context: int, card: Card, splits: int | None = None) -> float:
        """µs on ``card``; splits: None for the split rule. A context of 0 is a step without attention.

        A barrier costs GAP_US; weights and states are long reads. The arithmetic of products is left out:
        ``zinc-attn compilers`` holds it below a fifth of these reads' time.
        """
        rest = (self.weights + self.states) / card.read_rate + self.barriers * GAP_US
        if not context:
            return rest
        plan = plan_splits(context, self.shape, card.compute_units)
        if splits is not None:
            plan = SplitPlan.fixed(context, num_splits=splits, shape=self.shape)
        return rest + self.layers * (predict(plan, card, self.dtype).total_us + GAP_US)

    def fraction(self, context: int, card: Card) -> float:
        """The time of its bytes at the card's whole bandwidth, as a part of the step by the split rule."""
        return self.bytes_at(context) / card.bandwidth / 1e3 / self.us(context, card)
