"""Write an input file for ``embed``, and print the SHA-256 of the results that it must write: the oracle's bits.

    .venv/bin/python native/embed/make_case.py build/case --shape 16/2/256 --dtype f16 --layers 3 --prompt 300

A prompt goes in chunks, every row of which is attended; then it is forked, and each fork decodes tokens of its own.
With --tree, each step of a fork is a tree of speculative tokens, whose mask says which of them follow each other.

The file, little-endian: "ZINCCASE", then uint32 version, q_heads, kv_heads, head_dim, v_head_dim, latent (1: V is a
part of K), the types of K and of V (enum za_dtype), layers, steps, splits (0: the split rule), window (0: none), sinks
and alibi (1: there are some), noncausal (1: rows see what is behind them, too), then float64 scale and softcap (0:
none); four uint32 a step, its sequence, new rows, query rows and the keys of its mask (0: none); sinks, then slopes
(q_heads) float32; the scales of K, then of V (layers, kv_heads) float32, of each that is fp8_e4m3; by step, its mask
(query rows, keys) float32; then, by step and layer, q (query rows, q_heads, head_dim) float32, k (new rows, kv_heads,
head_dim) and, unless the shape is latent, v (new rows, kv_heads, v_head_dim), in float16 for f16, bfloat16 for bf16 and
float32 for all others, each filled up to whole words.
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
from zinc_attn.dtypes import storage_dtype
from zinc_attn.storage import storage_index, storage_types

VERSION = 4  # of the file
NARROW = {"f16": np.float16, "bf16": bfloat16}  # k and v in the file, which are float32 for all other types


class Step(NamedTuple):
    """Append new_rows tokens to a sequence, then attend its last q_len. A new sequence is a fork of the one before."""

    sequence: int
    new_rows: int
    q_len: int


class Values(NamedTuple):
    """What a step gives a layer: q (q_len, q_heads, head_dim); k, v (new_rows, kv_heads, head_dim or v_head_dim), v the
    begin of k where the shape is latent."""

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]


@dataclass
class Case:
    """The steps of a run and their values, by step and layer; options: keyword arguments of the oracle; masks: by the
    number of a step that has one, (q_len, n) float32 of the last n keys, for all layers; scales: (layers, 2, kv_heads)
    float32, K's and V's, where a type is fp8_e4m3."""

    shape: za.AttnShape
    dtype: str
    layers: int
    steps: list[Step]
    values: list[list[Values]]
    splits: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    masks: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    scales: NDArray[np.float32] | None = None

    @classmethod
    def drawn(
        cls, rng: np.random.Generator, shape: za.AttnShape, dtype: str, layers: int, steps: list[Step], **more: Any
    ) -> Case:
        """A case of normally distributed values, and of scales of heads where a type has them."""
        k_type, v_type = (NARROW.get(kind.name, np.float32) for kind in storage_types(dtype))

        def draw(*size: int) -> NDArray[Any]:
            return rng.standard_normal(size, np.float32)

        def of_step(step: Step) -> Values:
            q = draw(step.q_len, shape.q_heads, shape.head_dim)
            k = draw(step.new_rows, shape.kv_heads, shape.head_dim).astype(k_type)
            if shape.latent:
                return Values(q, k, k[..., : shape.v_head_dim])
            return Values(q, k, draw(step.new_rows, shape.kv_heads, shape.v_head_dim).astype(v_type))

        values = [[of_step(step) for _ in range(layers)] for step in steps]
        if any(kind.head_scale for kind in storage_types(dtype)):
            more["scales"] = rng.uniform(0.02, 0.2, (layers, 2, shape.kv_heads)).astype(np.float32)
            if shape.latent:
                more["scales"][:, 1] = more["scales"][:, 0]
        return cls(shape, dtype, layers, steps, values, **more)

    def write(self, path: Path) -> None:
        """Write the file. The scale is 1 / sqrt(head_dim)."""
        shape, options = self.shape, self.options
        heads = [options.get(name) for name in ("sinks", "alibi")]
        kinds = storage_types(self.dtype)
        numbers = [VERSION, shape.q_heads, shape.kv_heads, shape.head_dim, shape.v_head_dim, int(shape.latent)]
        numbers += [1 + storage_index(kind) for kind in kinds]
        numbers += [self.layers, len(self.steps), self.splits]
        numbers += [options.get("window") or 0, *(int(one is not None) for one in heads)]
        numbers += [int(not options.get("causal", True))]
        scale = 1 / math.sqrt(shape.head_dim)
        head = struct.pack("<8s15I2d", b"ZINCCASE", *numbers, scale, options.get("softcap") or 0.0)
        widths = [self.masks[i].shape[1] if i in self.masks else 0 for i in range(len(self.steps))]
        stored_parts = 1 if shape.latent else 2  # K alone, or K and V
        arrays: list[NDArray[Any]] = [np.column_stack([np.array(self.steps), widths]).astype("<u4")]
        arrays += [np.array(one, "<f4") for one in heads if one is not None]
        if self.scales is not None:
            arrays += [self.scales[:, i] for i in range(stored_parts) if kinds[i].head_scale]
        arrays += [np.array(self.masks[i], "<f4") for i in sorted(self.masks)]
        arrays += [array for step in self.values for layer in step for array in layer[: 1 + stored_parts]]
        parts = (array.tobytes() for array in arrays)
        path.write_bytes(head + b"".join(part + bytes(-len(part) % 4) for part in parts))

    def results(self) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """The oracle's out (q_len, q_heads, v_head_dim) and lse (q_len, q_heads), by step and layer."""
        shape = self.shape
        nothing = [np.zeros((0, shape.kv_heads, dim), np.float32) for dim in (shape.head_dim, shape.v_head_dim)]
        sequences: list[list[list[NDArray[Any]]]] = []  # by sequence and layer: K and V of its tokens, as stored
        for i, (step, of_step) in enumerate(zip(self.steps, self.values, strict=True)):
            if step.sequence == len(sequences):
                sequences.append(list(sequences[-1]) if sequences else [nothing] * self.layers)
            for layer, (q, k, v) in enumerate(of_step):
                if step.new_rows:
                    scales = None if self.scales is None else self.scales[layer]
                    new = stored(k, v, self.dtype, latent=shape.latent, scales=scales)
                    both = zip(sequences[step.sequence][layer], new, strict=True)
                    sequences[step.sequence][layer] = [np.concatenate(pair) for pair in both]
                if step.q_len:
                    keys, values = sequences[step.sequence][layer]
                    yield za.reference.emulate(q, keys, values, mask=self.masks.get(i), **self.options)


def digest(case: Case) -> str:
    """SHA-256 of the results as ``embed`` writes them."""
    return hashlib.sha256(b"".join(x.tobytes() for pair in case.results() for x in pair)).hexdigest()


def slopes(heads: int) -> NDArray[np.float32]:
    """ALiBi's slopes of a power of two of heads; of others the same formula, which is as good here."""
    return np.exp2(-8 * np.arange(1, heads + 1) / heads).astype(np.float32)


def tree_mask(rng: np.random.Generator, tokens: int) -> NDArray[np.float32]:
    """The mask (tokens, tokens) of a random tree: a token follows one of those before it, and sees what that one sees
    and itself."""
    seen = np.eye(tokens, dtype=bool)
    for token in range(1, tokens):
        seen[token] |= seen[rng.integers(token)]
    return np.where(seen, np.float32(0), np.float32(-np.inf))


def main() -> None:
    """Write the file, print the digest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", default="16/2/256", metavar="Q/KV/D[/V[/latent]]")
    types = "of K and V in the cache, for example q8_0 or q8_0/q4_0 (default: %(default)s)"
    parser.add_argument("--dtype", default="f16", type=storage_dtype, help=types)
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompt", type=int, default=150, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=64, metavar="N", help="of the prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4, metavar="N", help="that a fork decodes (default: %(default)s)")
    parser.add_argument("--forks", type=int, default=2, metavar="N", help="of the prompt (default: %(default)s)")
    parser.add_argument("--splits", type=int, default=0, metavar="N", help="of the keys; 0: the split rule")
    parser.add_argument("--window", type=int, metavar="N")
    parser.add_argument("--softcap", type=float, metavar="X")
    parser.add_argument("--sinks", action="store_true", help="random ones")
    parser.add_argument("--alibi", action="store_true", help="slopes of ALiBi")
    parser.add_argument("--noncausal", action="store_true", help="rows see what is behind them, too")
    parser.add_argument("--tree", type=int, metavar="N", help="a fork decodes N tokens a step, with a mask of a tree")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args()
    shape, rng = za.AttnShape.parse(args.shape), np.random.default_rng(args.seed)
    sizes = [min(args.chunk, args.prompt - at) for at in range(0, args.prompt, args.chunk)]
    steps = [Step(0, n, n) for n in sizes]
    steps += [Step(fork, 0, 1) for fork in range(1, args.forks)]  # all forks before one grows
    first, each = len(steps), args.tree or 1
    steps += [Step(fork, each, each) for _ in range(args.tokens) for fork in range(args.forks)]
    masks = {i: tree_mask(rng, each) for i in range(first, len(steps))} if args.tree else {}
    options = {"window": args.window, "softcap": args.softcap, "causal": not args.noncausal}
    options["sinks"] = rng.standard_normal(shape.q_heads, dtype=np.float32) if args.sinks else None
    options["alibi"] = slopes(shape.q_heads) if args.alibi else None
    case = Case.drawn(rng, shape, args.dtype, args.layers, steps, splits=args.splits, options=options, masks=masks)
    case.write(args.file)
    print(f"{digest(case)}  {args.file}.out")


if __name__ == "__main__":
    main()
