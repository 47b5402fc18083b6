"""Steps become operations of kp sequences, with what orders them in between.

Kompute's binding has no barrier between two dispatches. Where a step reads what an earlier step wrote, the buffer in
between decides how the two are ordered: a small SCRATCH buffer has a staging twin, and copying it to the host
between the steps records the barriers that are needed; a large one has none, and the steps go into two submissions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import ArgumentError
from ...kernels.declarations import KernelDecl
from ..protocol import Dispatch, Use
from .buffers import KomputeBuffer
from .lifetime import Lifetime


class KomputeKernel:
    """SPIR-V and constants; kp fuses pipeline, tensors and grid into an algorithm when a step is recorded."""

    def __init__(self, decl: KernelDecl, spirv: bytes, spec: Sequence[int]) -> None:
        self.decl, self.spirv, self.spec = decl, spirv, np.array(decl.constants(spec), np.uint32)


class KomputeRecording:
    """Sequences to evaluate in order. ``spans`` maps each step to (sequence, position of its operation)."""

    def __init__(self, lifetime: Lifetime, buffers: tuple[KomputeBuffer, ...], timed: bool) -> None:
        self.lifetime, self.buffers, self.timed = lifetime, buffers, timed
        self.sequences: list[Any] = []
        self.algorithms: list[Any] = []
        self.spans: list[tuple[int, int]] = []
        self.cold = True  # until its first run

    def close(self) -> None:
        """Free the command buffers and descriptor sets; pipelines are shared, and live as long as the device."""
        if not self.lifetime.kept:
            for item in (*self.sequences, *self.algorithms):
                item.destroy()
        self.sequences, self.algorithms = [], []


class StepRecorder:
    """Records the steps of one KomputeRecording.

    into: a host program's sequence, which takes all steps; None: sequences are made as they are needed.
    """

    def __init__(self, kp: Any, manager: Any, made: KomputeRecording, into: Any = None) -> None:
        self._kp, self._manager, self._made, self._into = kp, manager, made, into
        self._inputs = [b.tensor for b in made.buffers if b.use is Use.INPUT]
        self._outputs = [b.tensor for b in made.buffers if b.use is Use.OUTPUT]
        self._output_ids = {id(b) for b in made.buffers if b.use is Use.OUTPUT}
        self._sequences: list[Any] = made.sequences if into is None else [into]
        self._marks = 0  # timestamps of a sequence
        self._position = 0  # operations in the last sequence
        self._written: set[int] = set()  # buffers that a step has written and nothing has ordered since
        self._read: set[int] = set()  # buffers that a step has read since
        self._copied = False  # outputs are in host memory as the last step left them

    def record(self, steps: Sequence[Dispatch]) -> None:
        """Record ``steps`` in order, behind the upload of the inputs and before the copy of the outputs to the host."""
        self._marks = 2 * len(steps) + 4 if self._made.timed else 0
        if self._into is None:
            self._begin_sequence()
        if self._inputs:
            self._add(self._kp.OpTensorSyncDevice(self._inputs))
        for at, step in enumerate(steps):
            self._order(at, step)
            self._dispatch(step)
        if self._outputs and not self._copied:
            self._add(self._kp.OpTensorSyncLocal(self._outputs))

    def _begin_sequence(self) -> None:
        self._sequences.append(self._manager.sequence(0, self._marks))
        self._position = 0

    def _add(self, operation: Any) -> None:
        self._sequences[-1].record(operation)
        self._position += 1

    def _order(self, at: int, step: Dispatch) -> None:
        """Let ``step`` come after the steps that wrote what it uses, and those that read what it writes."""
        used = {id(buffer) for buffer in step.buffers}
        conflicts = [b for b in self._made.buffers if id(b) in self._written & used]
        if conflicts:
            if all(b.chained for b in conflicts):
                self._add(self._kp.OpTensorSyncLocal([b.tensor for b in conflicts]))
                self._written -= {id(b) for b in conflicts}  # a copy makes no other buffer visible
            elif self._into is not None:
                raise ArgumentError(f"steps[{at}]: needs a submission of its own, expected one sequence for all")
            else:
                self._begin_sequence()
                self._written.clear()
            self._read.clear()
        elif _accessed(step, "write") & self._read and self._outputs:
            # a write after a read needs order, not visibility: any copy between the two gives it
            self._add(self._kp.OpTensorSyncLocal(self._outputs))
            self._written -= self._output_ids
            self._read.clear()
            self._copied = True

    def _dispatch(self, step: Dispatch) -> None:
        kernel, made, none = step.kernel, self._made, np.array([], np.uint32)
        assert isinstance(kernel, KomputeKernel)
        tensors = [b.tensor for b in step.buffers if isinstance(b, KomputeBuffer)]
        made.algorithms.append(self._manager.algorithm(tensors, kernel.spirv, list(step.groups), kernel.spec, none))
        self._add(self._kp.OpAlgoDispatch(made.algorithms[-1]))
        made.spans.append((len(self._sequences) - 1, self._position))
        written = _accessed(step, "write")
        self._written |= written
        self._read |= _accessed(step, "read")
        self._copied = self._copied and not written & self._output_ids


def _accessed(step: Dispatch, access: str) -> set[int]:
    """The ids of the buffers that the kernel of ``step`` declares to read, or to write."""
    declared = zip(step.buffers, step.kernel.decl.bindings, strict=True)
    return {id(buffer) for buffer, binding in declared if binding.access == access}
