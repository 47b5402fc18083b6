"""Write an input file for ``embed``, and print the digest that it must print: SHA-256 of the oracle's (out, lse) bytes.

    .venv/bin/python examples/embed_c/make_case.py case.bin --shape 16/2/256 --tokens 1000 [--splits 7] [--window 128]

The file, little-endian: "ZINCCASE", then uint32 version, q_heads, kv_heads, head_dim, tokens, splits (0: the split
rule), window (0: none), sinks (1: there are some), then float64 scale and softcap (0: none), then q (q_heads, head_dim)
float32, sinks (q_heads) float32, k and v (tokens, kv_heads, head_dim) float16.
"""

import argparse
import hashlib
import math
import struct
from pathlib import Path

import numpy as np

import zinc_attn as za


def write_case(
    path: Path,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    splits: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> None:
    """q: (q_heads, head_dim) float32; k, v: (tokens, kv_heads, head_dim) float16; sinks: (q_heads,) float32.

    The scale is 1 / sqrt(head_dim).
    """
    numbers = (1, len(q), *k.shape[1:], len(k), splits, window or 0, int(sinks is not None))
    head = struct.pack("<8s8I2d", b"ZINCCASE", *numbers, 1 / math.sqrt(q.shape[1]), softcap or 0.0)
    arrays = (q.astype("<f4"), np.array([] if sinks is None else sinks, "<f4"), k.astype("<f2"), v.astype("<f2"))
    path.write_bytes(head + b"".join(x.tobytes() for x in arrays))


def digest(out: np.ndarray, lse: np.ndarray) -> str:
    """SHA-256 of out (q_heads, head_dim) and lse (q_heads), float32."""
    return hashlib.sha256(out.astype("<f4").tobytes() + lse.astype("<f4").tobytes()).hexdigest()


def main() -> None:
    """Write the file, print the digest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", default="16/2/256", metavar="Q/KV/D")
    parser.add_argument("--tokens", type=int, default=1000, metavar="N")
    parser.add_argument("--splits", type=int, default=0, metavar="N")
    parser.add_argument("--window", type=int, metavar="N")
    parser.add_argument("--softcap", type=float, metavar="X")
    parser.add_argument("--sinks", action="store_true", help="random ones")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args()
    shape, rng = za.AttnShape.parse(args.shape), np.random.default_rng(args.seed)
    q = rng.standard_normal((shape.q_heads, shape.head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, args.tokens, shape.kv_heads, shape.head_dim)).astype(np.float16)
    sinks = rng.standard_normal(shape.q_heads, dtype=np.float32) if args.sinks else None
    options = {"window": args.window, "softcap": args.softcap, "sinks": sinks}
    write_case(args.file, q, k, v, args.splits, **options)
    print(f"{digest(*za.reference.emulate(q, k, v, **options))}  {args.file}")


if __name__ == "__main__":
    main()
