"""Write an input file for ``embed``, and print the SHA-256 of the results that it must write: the oracle's bits.

    .venv/bin/python examples/embed_c/make_case.py build/case --shape 16/2/256 --dtype f16 --layers 3 --prompt 300

A prompt goes in chunks, every row of which is attended; then it is forked, and each fork decodes tokens of its own.

The file, little-endian: "ZINCCASE", then uint32 version, q_heads, kv_heads, head_dim, dtype (0 f32, 1 f16, 2 bf16, 3
q8_0), layers, steps, splits (0: the split rule), window (0: none), sinks (1: there are some), then float64 scale and
softcap (0: none); three uint32 a step, its sequence, new rows and query rows; sinks (q_heads) float32; then, by step
and layer, q (query rows, q_heads, head_dim) float32, k and v (new rows, kv_heads, head_dim), float32 for f32 and q8_0.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

import zinc_attn as za
from zinc_attn.cache.rows import stored

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": bfloat16, "q8_0": np.float32}  # of k and v in the file


class Step(NamedTuple):
    """Append new_rows tokens to a sequence, then attend its last q_len. A new sequence is a fork of the one before."""

    sequence: int
    new_rows: int
    q_len: int


class Values(NamedTuple):
    """What a step gives a layer: q (q_len, q_heads, head_dim); k, v (new_rows, kv_heads, head_dim)."""

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]


@dataclass
class Case:
    """The steps of a run and their values, by step and layer; options: keyword arguments of the oracle."""

    shape: za.AttnShape
    dtype: str
    layers: int
    steps: list[Step]
    values: list[list[Values]]
    splits: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def drawn(
        cls, rng: np.random.Generator, shape: za.AttnShape, dtype: str, layers: int, steps: list[Step], **more: Any
    ) -> Case:
        """A case of normally distributed values."""

        def draw(rows: int, heads: int) -> NDArray[Any]:
            return rng.standard_normal((rows, heads, shape.head_dim), np.float32)

        values = [
            [
                Values(
                    draw(step.q_len, shape.q_heads),
                    *(draw(step.new_rows, shape.kv_heads).astype(DTYPES[dtype]) for _ in "kv"),
                )
                for _ in range(layers)
            ]
            for step in steps
        ]
        return cls(shape, dtype, layers, steps, values, **more)

    def write(self, path: Path) -> None:
        """Write the file. The scale is 1 / sqrt(head_dim)."""
        shape, sinks, softcap = self.shape, self.options.get("sinks"), self.options.get("softcap") or 0.0
        numbers = (2, shape.q_heads, shape.kv_heads, shape.head_dim, list(DTYPES).index(self.dtype))
        numbers += (self.layers, len(self.steps), self.splits, self.options.get("window") or 0, int(sinks is not None))
        head = struct.pack("<8s10I2d", b"ZINCCASE", *numbers, 1 / math.sqrt(shape.head_dim), softcap)
        arrays = [np.array(self.steps, "<u4"), np.array([] if sinks is None else sinks, "<f4")]
        arrays += [array for step in self.values for layer in step for array in layer]
        path.write_bytes(head + b"".join(array.tobytes() for array in arrays))

    def results(self) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """The oracle's out (q_len, q_heads, head_dim) and lse (q_len, q_heads), by step and layer."""
        nothing = [np.zeros((0, self.shape.kv_heads, self.shape.head_dim), np.float32)] * 2
        sequences: list[list[list[NDArray[Any]]]] = []  # by sequence and layer: K and V of its tokens, as stored
        for step, of_step in zip(self.steps, self.values, strict=True):
            if step.sequence == len(sequences):
                sequences.append(list(sequences[-1]) if sequences else [nothing] * self.layers)
            for layer, (q, k, v) in enumerate(of_step):
                if step.new_rows:
                    both = zip(sequences[step.sequence][layer], stored(k, v, self.dtype), strict=True)
                    sequences[step.sequence][layer] = [np.concatenate(pair) for pair in both]
                if step.q_len:
                    yield za.reference.emulate(q, *sequences[step.sequence][layer], **self.options)


def digest(case: Case) -> str:
    """SHA-256 of the results as ``embed`` writes them."""
    return hashlib.sha256(b"".join(x.tobytes() for pair in case.results() for x in pair)).hexdigest()


def main() -> None:
    """Write the file, print the digest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", default="16/2/256", metavar="Q/KV/D")
    parser.add_argument("--dtype", default="f16", choices=DTYPES, help="of K and V in the cache (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompt", type=int, default=150, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=64, metavar="N", help="of the prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4, metavar="N", help="that a fork decodes (default: %(default)s)")
    parser.add_argument("--forks", type=int, default=2, metavar="N", help="of the prompt (default: %(default)s)")
    parser.add_argument("--splits", type=int, default=0, metavar="N", help="of the keys; 0: the split rule")
    parser.add_argument("--window", type=int, metavar="N")
    parser.add_argument("--softcap", type=float, metavar="X")
    parser.add_argument("--sinks", action="store_true", help="random ones")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args()
    shape, rng = za.AttnShape.parse(args.shape), np.random.default_rng(args.seed)
    sizes = [min(args.chunk, args.prompt - at) for at in range(0, args.prompt, args.chunk)]
    steps = [Step(0, n, n) for n in sizes]
    steps += [Step(fork, 0, 1) for fork in range(1, args.forks)]  # all forks before one grows
    steps += [Step(fork, 1, 1) for _ in range(args.tokens) for fork in range(args.forks)]
    options = {"window": args.window, "softcap": args.softcap}
    options["sinks"] = rng.standard_normal(shape.q_heads, dtype=np.float32) if args.sinks else None
    case = Case.drawn(rng, shape, args.dtype, args.layers, steps, splits=args.splits, options=options)
    case.write(args.file)
    print(f"{digest(case)}  {args.file}.out")


if __name__ == "__main__":
    main()
