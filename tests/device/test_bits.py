"""The output bits are those of ``reference.emulate``, whatever the layout, the driver and the dispatcher.

One input, one oracle, many layouts. ``scripts/test --full`` runs the whole table, ``scripts/test`` a part of it.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
from numpy.typing import NDArray
from support import CPU_NATIVE, DRIVERS, FULL, SLOW, Arrays, differing, make_inputs, same

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.kernels import dispatches
from zinc_attn.kernels.families import RDNA
from zinc_attn.kernels.tuning import merge_workgroup_size
from zinc_attn.planning.splits import SplitPlan, plan_splits
from zinc_attn.tools.harness.planned_attention import PlannedAttention

# of qwen3.6-35b-a3b, qwen3-30b-a3b, qwen3-8b, qwen3.8-27b, gpt-oss-20b, gemma (two), codellama-34b, smollm2-135m
MODEL_SHAPES = "16/2/256 32/4/128 32/8/128 24/4/256 64/8/64 32/16/256 32/4/512 64/8/128 9/3/64"
OTHER_SHAPES = "8/2/80 12/2/96 7/1/112 10/2/192 5/1/512 16/1/128 16/1/64 13/1/80 2/2/256 11/1/256"
SHORT = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129)
LONG = (1000, 4096, 16384)
SPLITS = (1, 2, 3, 5, 7, 8, 17, 32, 64, 128, 1000) if FULL else (1, 7, 1000)
SIZES, UNITS = ((100, 256, 2048), (2, 32, 64, 96)) if FULL else ((100, 2048), (64,))

CI_SHAPES = ("16/2/256", "9/3/64", "8/2/80", "6/2/192", "5/1/512")
EVERY = tuple(f"{MODEL_SHAPES} {OTHER_SHAPES}".split())
# Shapes, those that are in float32, too, and contexts. A shape and a type take seconds to compile.
CI = {
    ("default", "vulkan"): (CI_SHAPES, CI_SHAPES[:2], (0, 1, 33, 64, 65, 129, 1000)),
    ("default", "kompute"): (CI_SHAPES[:2], CI_SHAPES[:2], (0, 65, 1000)),  # a dispatcher does not know a shape
    ("swiftshader", "vulkan"): (("9/3/64",), (), (1, 65, 577)),
    CPU_NATIVE: (EVERY, EVERY[:2], (*SHORT, 1000)),
}
ALL = dict.fromkeys([*DRIVERS, CPU_NATIVE], (EVERY, EVERY, (*SHORT, *LONG)))
ALL |= {SLOW: (EVERY[:9], EVERY[:9], (1, 65, 129, 1000))}


def table() -> list[Any]:
    """(driver and dispatcher, shape, dtype, context) of every case of this run."""
    rows = []
    for driver, (shapes, in_f32, contexts) in (ALL if FULL else CI).items():
        for shape, dtype, context in product(shapes, ("f16", "f32"), contexts):
            # SwiftShader takes minutes a shape at 16,384 keys; 16/2/256 stands for the others
            too_long = driver[0] == "swiftshader" and context == 16384 and shape != "16/2/256"
            if not too_long and (dtype == "f16" or shape in in_f32):
                name = f"{'-'.join(driver)}-{shape}-{dtype}-{context}"
                rows.append(pytest.param(driver, shape, dtype, context, id=name))
    return rows


def layouts(context: int, shape: za.AttnShape) -> dict[str, SplitPlan]:
    """Every layout of the table, by label; of equal ones, of which a short context has many, the first."""
    table = {f"splits={n}": SplitPlan.fixed(context, shape, num_splits=n) for n in SPLITS}
    table |= {f"size={n}": SplitPlan.fixed(context, shape, split_size=n) for n in SIZES}
    table |= {f"auto cu={n}": plan_splits(context, shape, n) for n in UNITS}
    labels = {plan: name for name, plan in reversed(table.items())}
    return {name: plan for plan, name in labels.items()}


@lru_cache(maxsize=4)
def oracle(shape: za.AttnShape, context: int, dtype: str, kind: str) -> tuple[Arrays, NDArray[Any], NDArray[Any]]:
    arrays = make_inputs(shape, context, dtype, kind)
    out, lse = reference.emulate(*arrays)
    return arrays, out, lse


def check_all_layouts(device: za.Device, text: str, context: int, dtype: str, kind: str, plans: Any = layouts) -> None:
    shape = za.AttnShape.parse(text)
    (q, k, v), out, lse = oracle(shape, context, dtype, kind)
    with za.KVCache(device, shape, 1, max(context, 1), dtype) as cache:
        sequence, attention = cache.new_sequence(), PlannedAttention(cache, plan_splits)
        if context:
            cache.append(sequence, 0, k, v)
        for label, plan in plans(context, shape).items():
            attention.lay_out(lambda *_, plan=plan: plan)
            same(attention.outputs([q], [sequence])[0], (out, lse), (text, dtype, context, kind, label))


@pytest.mark.parametrize(("any_device", "shape", "dtype", "context"), table(), indirect=["any_device"])
def test_bits_equal_the_oracle(any_device, shape, dtype, context):
    check_all_layouts(any_device, shape, context, dtype, "normal")


@pytest.mark.parametrize("kind", ("sharp", "extreme", "equal", "zeros", "subnormal", "cancelling"))
@pytest.mark.parametrize("dtype", ("f16", "f32"))
@pytest.mark.parametrize("shape", ("16/2/256", "9/3/64") if FULL else ("9/3/64",))
@pytest.mark.parametrize("context", (1, 65, 1000) if FULL else (65,))
def test_bits_on_awkward_values(any_device, shape, dtype, context, kind):
    if "SwiftShader" in any_device.info.name and dtype == "f32" and not FULL:
        pytest.skip("float16 shows every layout's kernel there, and test_c_engine.py float32's loads")
    check_all_layouts(any_device, shape, context, dtype, kind)


def test_bits_at_131072_keys(device, monkeypatch):
    """Also where pass 2 merges its 256 states in several rounds of two waves."""
    monkeypatch.setattr(dispatches, "merge_workgroup_size", lambda kind: 64)

    def plans(context, shape):
        made = {"auto": plan_splits(context, shape, 64), "auto 2": plan_splits(context, shape, 2)}
        return made | {f"splits={n}": SplitPlan.fixed(context, shape, num_splits=n) for n in (1, 1000)}

    check_all_layouts(device, "16/2/256" if FULL else "3/1/64", 131072, "f16", "sharp", plans)


# two chunks of K in flight, and workgroups of five heads, which make two passes over V
WIDE = "5/1/264", "f16"
TEN = "10/1/40", "f16"  # whose workgroups have all heads where a context has two nodes
FOR_GPUS = [("4/2/256", "f16"), WIDE, TEN, *((("16/2/256", "f16"), ("11/1/64", "f32")) if FULL else ())]


@pytest.mark.parametrize(("shape", "dtype"), FOR_GPUS)
def test_bits_of_the_programs_for_gpus(device, monkeypatch, shape, dtype):
    """Of 8 heads, which leave registers for fewer value rows: on SwiftShader, in test_cascade.py."""
    facts = {"compute_units": 2, "shared_memory_bytes": 1 << 16, "layout": RDNA}
    monkeypatch.setattr(device.runtime, "info", replace(device.info, **facts))
    monkeypatch.setattr(dispatches, "merge_workgroup_size", lambda _: merge_workgroup_size("discrete"))
    for context in (65, 1000):
        check_all_layouts(device, shape, context, dtype, "normal")


@pytest.mark.both_dispatchers
def test_repeats_and_threads_give_one_output(device):
    shape = za.AttnShape(9, 3, 64)
    q, k, v = make_inputs(shape, 1000, "f16")
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda n: za.attention(q, k, v, device=device, num_splits=n), [1, 3, 8, 16] * 4))
    assert all(not differing(out, outs[0]) for out in outs)
