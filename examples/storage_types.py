"""The cost of each storage type of K and V: bytes, modeled time on an R9700, time here, and the rows of a prompt.

    .venv/bin/python examples/storage_types.py --shape 16/2/256 --context 32k --dtypes f16,q8_0,q8_0/q4_0

Compares the bits of one KV head with the oracle first, then times the calls of all types in turns, in tiles and in
cells: rows as other engines keep them, in pages of one token. A second table has the rows of a prompt of 4,096 tokens
of one layer: the host's codec; the host's part, which checks and uploads values that the device encodes; and the whole
``append`` on this device. The host's figures are CPU time of one thread.
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter, thread_time

import numpy as np

import zinc_attn as za
from zinc_attn.cache import rows
from zinc_attn.cache.device_encoding import encodes_on_device, upload_values, value_words
from zinc_attn.runtime.protocol import Use
from zinc_attn.storage import STORAGE, storage_types
from zinc_attn.tools.cost import CARDS, predict
from zinc_attn.tools.harness.bits import oracle
from zinc_attn.tools.harness.inputs import Inputs, parse_contexts
from zinc_attn.tools.measure.points import in_turns

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


def milliseconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """The time that a call takes."""
    begin = clock()
    call()
    return 1e3 * (clock() - begin)


def checked(data: Inputs, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The stored values of a prompt."""
    pairs = zip("kv", (data.k[:PROMPT], data.v[:PROMPT]), storage_types(dtype), strict=True)
    k, v = (rows.stored_values(name, x, kind.name, round_rows=True)[0] for name, x, kind in pairs)
    return k, v


def prompt_calls(cache: za.KVCache, data: Inputs) -> list[Callable[[], float]]:
    """Functions that time the codec, the host's part of it, and an append of the prompt."""
    shape, dtype, seq, runtime = cache.shape, cache.dtype, cache.new_sequence(), cache.device.runtime
    count = len(data.k[:PROMPT])
    buffer = runtime.buffer(4 * value_words(shape, count), Use.INPUT)

    def encode() -> None:
        rows.encode(*checked(data, dtype), shape, dtype)

    def upload() -> None:
        upload_values(runtime, buffer, shape, count, [checked(data, dtype)])

    def append() -> float:
        seq.truncate(0)
        return milliseconds(lambda: cache.append(seq, 0, data.k[:PROMPT], data.v[:PROMPT]), perf_counter)

    host = upload if encodes_on_device(dtype, count) else encode
    return [lambda: milliseconds(encode, thread_time), lambda: milliseconds(host, thread_time), append]


def main() -> None:
    """Print the table."""
    shape, dtypes = za.AttnShape.parse(args.shape), [dtype.strip() for dtype in args.dtypes.split(",")]
    (context,) = parse_contexts(args.context, "context")
    with ExitStack() as stack:
        device = stack.enter_context(za.Device.open(args.device, runtime=args.runtime))
        calls, prompts = [], []
        for dtype in dtypes:
            data = Inputs.normal(shape, context, dtype)
            wanted = oracle(data.q, data.k, data.v, dtype, 1)
            for layout in ({}, {"page_size": 1, "kv_layout": "NHD"}):
                tokens = context + (0 if layout else PROMPT)
                cache = stack.enter_context(za.KVCache(device, shape, 1, tokens, dtype, round_rows=True, **layout))
                seq, attn = cache.new_sequence(), za.Attention(cache)
                cache.append(seq, 0, data.k, data.v)
                got, lse = attn(data.q, seq, 0, return_lse=True)
                heads = slice(-shape.group, None)  # of the last KV head
                for result, want in zip((got, lse), wanted, strict=True):
                    assert np.array_equal(result[heads].view(np.uint32), want.view(np.uint32)), dtype
                prompts += [] if layout else prompt_calls(cache, data)
                calls.append(partial(milliseconds, partial(attn, data.q, seq, 0), perf_counter))
        times = [float(np.median(taken)) for taken in in_turns(calls, args.repeats, 0, 1)]
        print(f"{device.info.name} ({device.info.driver}), {device.runtime.name}; {shape}, {context:,} keys;")
        print(f"bits equal; medians of {args.repeats} in turns\n")
        print("| K/V | bytes a token | R9700, modeled µs | of its bandwidth | here, ms | in cells, ms |")
        print("|---" * 6 + "|")
        for dtype, ms, cells in zip(dtypes, times[::2], times[1::2], strict=True):
            model = predict(za.plan_splits(context, shape), CARDS["r9700"], dtype)
            share = f"{model.total_us:.0f} | {100 * model.ideal_us / model.total_us:.0f} %"
            print(f"| {dtype} | {shape.kv_bytes_per_token(dtype):,} | {share} | {ms:.1f} | {cells:.1f} |")
        print(f"\nThe rows of a prompt of {min(PROMPT, context):,} tokens\n")
        print("| K/V | the host's codec, CPU ms | the host's part, CPU ms | append, ms |")
        print("|---" * 4 + "|")
        medians = [f"{median(taken):.0f}" for taken in in_turns(prompts, args.repeats, 1, 1)]
        for i, dtype in enumerate(dtypes):
            print(f"| {dtype} | {' | '.join(medians[3 * i : 3 * i + 3])} |")


try:
    main()
except za.ZincAttnError as error:
    parser.error(str(error))
