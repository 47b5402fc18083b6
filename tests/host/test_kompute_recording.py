"""The operations of kp that a list of steps becomes, told by a kp that only writes them down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from zinc_attn.errors import ArgumentError
from zinc_attn.kernels.declarations import Binding, KernelDecl
from zinc_attn.runtime.kompute.buffers import CHAINED_BYTES, KomputeBuffer, is_staged
from zinc_attn.runtime.kompute.lifetime import Lifetime
from zinc_attn.runtime.kompute.recording import KomputeKernel, KomputeRecording, StepRecorder
from zinc_attn.runtime.protocol import Dispatch, Use


class Written:
    """A manager whose sequences write down what they are given; its tensors are sizes."""

    def __init__(self) -> None:
        self.sequences: list[list[str]] = []

    def sequence(self, *marks: int) -> Any:
        written: list[str] = []
        self.sequences.append(written)
        return SimpleNamespace(record=written.append)

    def tensor_t(self, words: Any, kind: str) -> Any:
        return SimpleNamespace(data=lambda: words, name="")

    def algorithm(self, tensors: Any, *rest: Any) -> str:
        return " ".join(tensor.name for tensor in tensors)


def _names(tensors: Any) -> str:
    return " ".join(tensor.name for tensor in tensors)


KP = SimpleNamespace(
    TensorTypes=SimpleNamespace(device="device", storage="storage"),
    OpTensorSyncDevice=lambda tensors: f"up {_names(tensors)}",
    OpTensorSyncLocal=lambda tensors: f"down {_names(tensors)}",
    OpAlgoDispatch=lambda algorithm: f"run {algorithm}",
)
LARGE = CHAINED_BYTES + 4
# name: what the buffer is for, its bytes
BUFFERS = {
    "in": (Use.INPUT, 4),
    "out": (Use.OUTPUT, 4),
    "k": (Use.CACHE, 4),
    "s": (Use.SCRATCH, 4),
    "t": (Use.SCRATCH, 4),
    "large": (Use.SCRATCH, LARGE),
}


def recorded(text: str, into: bool = False) -> tuple[list[list[str]], KomputeRecording]:
    """The operations of each sequence for steps such as ``in s>out``: what each reads, and behind ``>`` writes."""
    manager = Written()
    made: dict[str, KomputeBuffer] = {}
    steps = []
    for step in text.split(", "):
        reads, writes = (names.split() for names in step.split(">"))
        for name in (*reads, *writes):
            if name not in made:
                use, nbytes = BUFFERS[name]
                made[name] = KomputeBuffer(KP, manager, Lifetime(), nbytes, use, is_staged(nbytes, use, False))
                made[name].tensor.name = name
        bindings = (*(Binding(name, "read") for name in reads), *(Binding(name, "write") for name in writes))
        kernel = KomputeKernel.__new__(KomputeKernel)
        kernel.decl, kernel.spirv, kernel.spec = KernelDecl("", "", bindings, ()), b"", np.zeros(0, np.uint32)
        steps.append(Dispatch(kernel, tuple(made[name] for name in (*reads, *writes)), (1, 1, 1)))
    recording = KomputeRecording(Lifetime(), tuple(made.values()), True)
    StepRecorder(KP, manager, recording, manager.sequence() if into else None).record(steps)
    return manager.sequences, recording


@pytest.mark.parametrize(
    ("steps", "operations"),
    (
        ("in>out", [["up in", "run in out", "down out"]]),
        # nothing that the second step uses was written: the two may run at the same time
        ("in>s, in>t", [["up in", "run in s", "run in t"]]),
        ("in>s, s>out", [["up in", "run in s", "down s", "run s out", "down out"]]),
        ("in>large, large>out", [["up in", "run in large"], ["run large out", "down out"]]),
        # a write behind a read is ordered by a copy of the outputs, which then need none at the end
        ("in k>out, in>k", [["up in", "run in k out", "down out", "run in k"]]),
        ("in k>s, s>out, in>k", [["up in", "run in k s", "down s", "run s out", "run in k", "down out"]]),
        # the copy of one buffer makes no other visible
        (
            "in>s, in>t, s>out, t>k",
            [["up in", "run in s", "run in t", "down s", "run s out", "down t", "run t k", "down out"]],
        ),
        (
            "in>large, in>s, large>k, s>out",
            [["up in", "run in large", "run in s"], ["run large k", "run s out", "down out"]],
        ),
    ),
)
def test_what_orders_two_steps(steps, operations):
    sequences, recording = recorded(steps)
    assert sequences == operations
    ran = [sequences[sequence][at - 1] for sequence, at in recording.spans]  # the mark before an operation is its begin
    assert ran == [f"run {step.replace('>', ' ')}" for step in steps.split(", ")]


def test_a_hosts_sequence_takes_all_steps_or_refuses():
    sequences, recording = recorded("in>s, s>out", into=True)
    assert sequences == [["up in", "run in s", "down s", "run s out", "down out"]] and recording.sequences == []
    with pytest.raises(
        ArgumentError, match=r"^steps\[1\]: needs a submission of its own, expected one sequence for all$"
    ):
        recorded("in>large, large>out", into=True)
