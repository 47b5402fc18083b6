"""What each storage type of K and V takes: bytes, modeled time on an R9700, time here, and the quantizing of a prompt.

    .venv/bin/python examples/storage_types.py --shape 16/2/256 --context 32k --dtypes f16,q8_0,q8_0/q4_0

Compares the bits of one KV head with the oracle first, then times the calls of all types in turns. Quantizing is the
host's work for a prompt of 4,096 tokens of one layer.
"""

import argparse
from contextlib import ExitStack
from time import perf_counter

import numpy as np

import zinc_attn as za
from zinc_attn.cache import rows
from zinc_attn.storage import STORAGE, storage_types
from zinc_attn.tools.cost import CARDS, predict
from zinc_attn.tools.harness.bits import oracle
from zinc_attn.tools.harness.inputs import Inputs, parse_contexts
from zinc_attn.tools.harness.timing import in_turns

PAIRS = "f16/q8_0,f16/q4_0,q8_0/q5_1,q8_0/q4_0,q5_1/q4_0"
PROMPT = 4096

parser = argparse.ArgumentParser(description="What each storage type takes.")
parser.add_argument("--shape", default="16/2/256", help="default: %(default)s")
parser.add_argument("--context", default="32k", help="keys (default: %(default)s)")
parser.add_argument("--dtypes", default=f"{','.join(STORAGE)},{PAIRS}", help="default: %(default)s")
parser.add_argument("--repeats", type=int, default=7, help="timed calls of each (default: %(default)s)")
parser.add_argument("--device", help="index or piece of the name")
parser.add_argument("--runtime", help="kompute or vulkan")
args = parser.parse_args()


def quantizing_ms(shape: za.AttnShape, data: Inputs, dtype: str) -> float:
    """Checking and encoding the rows of a prompt, the best of three."""
    spent = []
    for _ in range(3):
        begin = perf_counter()
        pairs = zip("kv", (data.k[:PROMPT], data.v[:PROMPT]), storage_types(dtype), strict=True)
        k, v = (rows.stored_values(name, x, kind.name)[0] for name, x, kind in pairs)
        rows.encode(k, v, shape, dtype)
        spent.append(1e3 * (perf_counter() - begin))
    return min(spent)


def main() -> None:
    """Print the table."""
    shape, dtypes = za.AttnShape.parse(args.shape), [dtype.strip() for dtype in args.dtypes.split(",")]
    (context,) = parse_contexts(args.context, "context")
    with ExitStack() as stack:
        device = stack.enter_context(za.Device.open(args.device, runtime=args.runtime))
        calls, quantizing = [], []
        for dtype in dtypes:
            data = Inputs.normal(shape, context, dtype)
            cache = stack.enter_context(za.KVCache(device, shape, 1, context, dtype))
            seq, attn = cache.new_sequence(), za.Attention(cache)
            cache.append(seq, 0, data.k, data.v)
            got, lse = attn(data.q, seq, 0, return_lse=True)
            heads = slice(-shape.group, None)  # of the last KV head
            for mine, want in zip((got, lse), oracle(data.q, data.k, data.v, dtype, 1), strict=True):
                assert np.array_equal(mine[heads].view(np.uint32), want.view(np.uint32)), dtype
            quantizing.append(quantizing_ms(shape, data, dtype))

            def call(attn: za.Attention = attn, q: np.ndarray = data.q, seq: za.Sequence = seq) -> float:
                begin = perf_counter()
                attn(q, seq, 0)
                return 1e3 * (perf_counter() - begin)

            calls.append(call)
        times = [float(np.median(taken)) for taken in in_turns(calls, args.repeats, 0, 1)]
        print(f"{device.info.name} ({device.info.driver}), {device.runtime.name}; {shape}, {context:,} keys;")
        print(
            f"bits equal; medians of {args.repeats} in turns; quantizing {min(PROMPT, context):,} tokens on the host\n"
        )
        print("| K/V | bytes a token | R9700, modeled µs | of its bandwidth | here, ms | quantizing, ms |")
        print("|---" * 6 + "|")
        for dtype, ms, host_ms in zip(dtypes, times, quantizing, strict=True):
            made = predict(za.plan_splits(context, shape, dtype=dtype), CARDS["r9700"], dtype)
            share = f"{made.total_us:.0f} | {100 * made.ideal_us / made.total_us:.0f} %"
            print(f"| {dtype} | {shape.kv_bytes_per_token(dtype):,} | {share} | {ms:.1f} | {host_ms:.0f} |")


try:
    main()
except za.ZincAttnError as error:
    parser.error(str(error))
