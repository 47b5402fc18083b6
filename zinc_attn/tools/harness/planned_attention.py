"""Attention whose plans a tool gives, and whose output is NaN until a kernel writes it."""

from collections.abc import Callable
from typing import Any

from ...cache.kv_cache import KVCache
from ...cache.sequence import Sequence
from ...canonical.state import F32
from ...decode.attention import Attention
from ...planning.splits import SplitPlan
from .bits import Output

PlanRule = Callable[[int, int, int | None], SplitPlan]  # tokens, query rows and window to a plan


class PlannedAttention:
    """An ``Attention`` whose calls ``rule`` lays out in place of the split rule."""

    def __init__(self, cache: KVCache, rule: PlanRule, **options: Any) -> None:
        self.cache, self.rule = cache, rule

        def ruled(tokens: int, q_len: int, window: int | None) -> SplitPlan:
            return self.rule(tokens, q_len, window)

        options["observer"] = lambda _, workspace: workspace.spoil()
        self.attention = Attention(cache, cascade=True, plan=ruled, **options)
        self.close = self.attention.close

    def lay_out(self, rule: PlanRule, cascade: bool = True) -> None:
        """Take another rule. Recordings are kept, and work words that were filled for the old rule are not."""
        self.rule = rule
        self.attention.replan(cascade)

    def outputs(self, queries: list[F32], seqs: list[Sequence], *new: list[Any], **call: Any) -> list[Output]:
        """The outputs of a call on a batch, one per sequence. new: what it appends, k and v; call: its keywords."""
        call |= {"return_lse": True, "allow_empty": True}
        return list(map(Output, *self.attention(queries, seqs, 0, *new, **call)))
