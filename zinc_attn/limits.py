"""Limits of shapes and kernels, and the names of the storage types. Needs the standard library alone."""

from __future__ import annotations

from typing import Final

HEAD_DIMS: Final = (64, 80, 96, 112, 128, 192, 256, 512)
MAX_GROUP: Final = 16  # query heads per KV head
WAVE: Final = 32  # invocations of a wave; pass 1 has one to a workgroup
MAX_HEADS_PER_WORKGROUP: Final = 8
MAX_ACCUMULATORS: Final = 2048  # head_dim x heads of one workgroup: what the registers of a wave hold
MAX_CONTEXT: Final = 1 << 24  # keys; beyond it, float32 no longer counts weights exactly

DTYPE_BYTES: Final = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 1}  # per stored K or V value, without q8_0's scales
Q8_BLOCK: Final = 32  # consecutive head dimensions that share a scale in q8_0
