"""The right output of the calls of one context: the oracle's; all calls have the first call's bits."""

import numpy as np

from ... import reference
from ...canonical.state import F32, F64
from ..harness.bits import Expected, Judge, Output, by_kv_head, compare, oracle, oracle_options, truth
from ..harness.inputs import Inputs
from .spec import CallSpec


class Expectation:
    """The right output of calls of ``spec`` at one context: the oracle's bits, or float64 within matrix units' bound.

    The oracle computes the last ``rows`` rows of each sequence, and of these the last ``kv_heads`` KV heads: all, or as
    many as ``spec.oracle_products`` allows, and at least a row of one head.
    """

    def __init__(self, spec: CallSpec, context: int, judge: Judge = oracle) -> None:
        self.spec, self.judge, shape = spec, judge, spec.shape
        row = spec.batch * context * shape.group * max(shape.head_dim, shape.v_head_dim)  # products of one KV head
        self.rows = min(max(spec.oracle_products // row, 1), spec.q_len)
        self.kv_heads = min(max(spec.oracle_products // (row * self.rows), 1), shape.kv_heads)
        everything = (self.rows, self.kv_heads) == (spec.q_len, shape.kv_heads)
        self.word = ("bound" if spec.bounded else "bits") + ("" if everything else " (sampled)")  # see Row.verified
        self.sequences: list[Expected] = []
        self.truth: F64 | None = None  # out of the first sequence in float64, where the spec is compared with others
        self.first: tuple[str, Output] | None = None  # layout and output of the first call that was right

    def add(self, sequence: int, data: Inputs) -> None:
        """Compute the right output of a sequence of ``data``, unless it is known."""
        if sequence == len(self.sequences):
            arguments = data.q[-self.rows :], data.k, data.v, self.spec.dtype, self.kv_heads
            options = oracle_options(self.spec.arithmetic)
            self.sequences.append(truth(*arguments) if self.spec.bounded else self.judge(*arguments, options))
            if self.spec.against:
                self.truth = next(by_kv_head(reference.attention, data.q, data.k, data.v, self.spec.dtype, None, None))

    def error(self, out: F32) -> float | None:
        """The relative error of out (1, …) in the L2 norm, where it is asked for."""
        if self.truth is None:
            return None
        return float(np.linalg.norm((out[0] - self.truth).ravel()) / np.linalg.norm(self.truth.ravel()))

    def trouble(self, layout: str, got: Output) -> str | None:
        """The fault of a call's output, out (batch, …) and lse (batch, …), in words; None for none."""
        for sequence, (out, lse, want) in enumerate(zip(*got, self.sequences, strict=True)):
            if difference := compare(Output(out, lse), want):
                return difference.text(lead=(sequence,))
        self.first = self.first or (layout, got)
        if difference := compare(got, self.first[1]):
            return f"unlike layout {self.first[0]}: {difference.text()}"
        return None
