"""Attention whose plans a tool gives, and whose output is NaN until a kernel writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...cache.kv_cache import KVCache
from ...cache.sequence import Sequence
from ...decode.attention import Attention
from ...decode.workspace import Workspace
from ...kernels.tuning import LayoutFacts
from ...planning.splits import SplitPlan
from ...planning.submission import Submission
from .bits import F32, Output

PlanRule = Callable[[int, int, int | None], SplitPlan]  # tokens, query rows and window to a plan


class PlannedAttention:
    """An ``Attention`` whose calls ``rule`` lays out in place of the split rule; ``planned`` sees every plan."""

    def __init__(self, cache: KVCache, rule: PlanRule, planned: Callable[[SplitPlan], Any], **options: Any) -> None:
        self.cache, self.rule, self.planned = cache, rule, planned
        self.attention = Attention(cache, cascade=True, plan=self._ruled, observer=self._spoil, **options)
        self.close = self.attention.close

    @property
    def shared(self) -> bool:
        """Whether workgroups of the last call read keys for several rows at once."""
        return self.attention.shared

    def lay_out(self, rule: PlanRule, cascade: bool = True, device: LayoutFacts | None = None) -> None:
        """Take another rule, and the builds of pass 1 that ``device`` runs; None is the device at hand.

        Recordings are kept, and work words that were filled for the old rule are not.
        """
        self.rule = rule
        self.attention.replan(cascade, device or self.cache.device.info.layout_facts)

    def _ruled(self, tokens: int, q_len: int, window: int | None) -> SplitPlan:
        plan = self.rule(tokens, q_len, window)
        self.planned(plan)
        return plan

    def _spoil(self, _: Submission, workspace: Workspace) -> None:
        """NaN in the output, so that an element which no kernel writes cannot pass a comparison."""
        out = workspace.tensors.out
        self.cache.device.runtime.write(out, np.full(out.nbytes // 4, 0x7FC0DEAD, np.uint32))

    def outputs(self, queries: list[F32], seqs: list[Sequence], *new: list[Any], **call: Any) -> list[Output]:
        """The outputs of a call on a batch, one per sequence. new: what it appends, k and v; call: its keywords."""
        call |= {"return_lse": True, "allow_empty": True}
        return list(map(Output, *self.attention(queries, seqs, 0, *new, **call)))
