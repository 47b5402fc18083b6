"""Requests that share a prefix: one decode call with cascade and one without, on the same pages of one cache.

    .venv/bin/python examples/cascade.py --shapes 32/8/128 --prefixes 2k,8k --requests 2,8

Compares the bits of both first, then times them in turns. CPU time counts all threads of the process; on a driver that
runs on the CPU it is the work itself, and other work on the machine changes it little.
"""

import argparse
from time import perf_counter, process_time

import numpy as np

import zinc_attn as za
from zinc_attn.tools.harness.inputs import parse_contexts

parser = argparse.ArgumentParser(description="Time a batch that shares a prefix, with and without cascade.")
parser.add_argument("--shapes", default="9/3/64,32/8/128,16/2/256", help="default: %(default)s")
parser.add_argument("--prefixes", default="2k,8k,32k", help="keys (default: %(default)s)")
parser.add_argument("--requests", default="2,8,32", help="default: %(default)s")
parser.add_argument("--suffix", type=int, default=256, help="keys of a request's own (default: %(default)s)")
parser.add_argument("--repeats", type=int, default=7, help="timed calls of each (default: %(default)s)")
parser.add_argument("--device", help="index or piece of the name")
parser.add_argument("--runtime", help="kompute or vulkan")
args = parser.parse_args()


def measure(device: za.Device, shape: za.AttnShape, prefix: int, requests: int) -> str:
    """A line of the table."""
    rng = np.random.default_rng([prefix, requests])

    def rows(tokens: int) -> list[np.ndarray]:
        return [rng.standard_normal((tokens, shape.kv_heads, shape.head_dim)).astype(np.float16) for _ in "kv"]

    page = 256
    capacity = (-(-prefix // page) + requests * (-(-args.suffix // page) + 1)) * page
    with za.KVCache(device, shape, 1, capacity, "f16", page) as cache:
        root = cache.new_sequence()
        cache.append(root, 0, *rows(prefix))
        sequences = [root.fork() for _ in range(requests)]
        for sequence in sequences:
            cache.append(sequence, 0, *rows(args.suffix))
        q = [rng.standard_normal((shape.q_heads, shape.head_dim), dtype=np.float32) for _ in sequences]
        both = [za.Attention(cache, cascade=True), za.Attention(cache, cascade=False)]
        outs = [attention(q, sequences, 0) for attention in both]  # compiles, too
        assert all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(*outs, strict=True))
        spent = np.empty((args.repeats, 2, 2))
        for i in range(args.repeats):
            for which, attention in enumerate(both):
                wall, cpu = perf_counter(), process_time()
                attention(q, sequences, 0)
                spent[i, which] = process_time() - cpu, perf_counter() - wall
        (cpu_on, wall_on), (cpu_off, wall_off) = 1e3 * np.median(spent, axis=0)
        read = [attention.keys_read for attention in both]
    return (
        f"| {shape} | {prefix:,} | {requests} | {read[0]:,} | {read[1]:,} | {cpu_on:.1f} | {cpu_off:.1f} "
        f"| {cpu_off / cpu_on:.2f} | {wall_on:.1f} | {wall_off:.1f} | {wall_off / wall_on:.2f} |"
    )


def main() -> None:
    """Print the table."""
    shapes = [za.AttnShape.parse(text) for text in args.shapes.split(",")]
    prefixes, counts = parse_contexts(args.prefixes, "prefixes"), parse_contexts(args.requests, "requests")
    with za.Device.open(args.device, runtime=args.runtime) as device:
        print(f"{device.info.name} ({device.info.driver}), {device.runtime.name}, f16, suffix {args.suffix};")
        print(f"bits equal; medians of {args.repeats}, ms: with cascade, without, ratio\n")
        times = "CPU ms", "without", "ratio", "wall ms", "without", "ratio"
        print("|", " | ".join(("shape", "prefix", "requests", "keys read", "without", *times)), "|")
        print("|---" * 11 + "|")
        for shape in shapes:
            for prefix in prefixes:
                for requests in counts:
                    print(measure(device, shape, prefix, requests), flush=True)


try:
    main()
except za.ZincAttnError as error:
    parser.error(str(error))
