"""Every refusal is a typed error with a message that says what was given and what was expected; none is a crash."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from support import same

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.checks import BFLOAT16
from zinc_attn.errors import ArgumentError, DTypeError, ShapeError, ValueRangeError
from zinc_attn.runtime import device as device_module
from zinc_attn.runtime import loader as libvulkan
from zinc_attn.runtime.protocol import Use

NATIVE = True


def arrays():
    """q of 4 heads, k and v of 10 tokens and 2 heads, head_dim 64."""
    rng = np.random.default_rng(0)
    shapes = {"q": (4, 64), "k": (10, 2, 64), "v": (10, 2, 64)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def put(x, index, value):
    changed = x.copy()
    changed[index] = value
    return changed


def arguments(change):
    """Arguments of a good call with a change, which is written as keyword arguments in terms of q, k and v."""
    good = arrays()
    return good | eval(f"dict({change})", {"np": np, "put": put} | good)


def shapes(q=(4, 64), k=(10, 2, 64), v=(10, 2, 64)):
    """How a message tells the shapes."""
    k_v = f"k is (tokens, kv_heads, head_dim) = {k} and v is (tokens, kv_heads, v_head_dim) = {v}"
    return f"where q is (q_heads, head_dim) = {q}, {k_v}"


EARLY = (
    "q: got {} rows for {} keys, {} of them before the first key, expected at least as many keys as rows; append k and "
    "v first, or give allow_empty=True, with which such rows have an output of 0"
)
SWAPPED = (  # as torch's scaled_dot_product_attention has them
    f"q_heads: got 4, expected a multiple of kv_heads = 10, {shapes(k=(2, 10, 64), v=(2, 10, 64))}; k looks like "
    "(kv_heads, tokens, head_dim) and v like (kv_heads, tokens, v_head_dim): pass k.swapaxes(0, 1) and v.swapaxes(0, 1)"
)
TOO_LARGE = (
    "q, k: got max|q| = 3.60288e+16, max|k| = 3.60288e+16, scale = 0.125 at head_dim 64; expected max|q| * max|k| * "
    "head_dim * scale of at most 2**96"
)
MAGNITUDE = "expected a magnitude from 2**-126 to 2**126, or None for 1 / sqrt(head_dim)"
CASES = {
    ShapeError: {
        "q=q[0]": "q: got shape (64,), expected (q_heads, head_dim) or (q_len, q_heads, head_dim)",
        "k=k[0]": "k: got shape (2, 64), expected (tokens, kv_heads, head_dim)",
        "q=k, k=q": "k: got shape (4, 64), expected (tokens, kv_heads, head_dim); q and k look swapped: the order is "
        "attention(q, k, v)",
        "v=v[1:]": "v: got shape (9, 2, 64), expected k's tokens and heads: (10, 2, v_head_dim), "
        + shapes(v=(9, 2, 64)),
        "q=q[:, :32]": f"q: got head_dim 32, expected k's 64, {shapes(q=(4, 32))}",
        "q=q[None][:0]": "q: got shape (0, 4, 64), expected at least one row",
        "q=q[:3]": f"q_heads: got 3, expected a multiple of kv_heads = 2, {shapes(q=(3, 64))}",
        "k=k.swapaxes(0, 1), v=v.swapaxes(0, 1)": SWAPPED,
        "sinks=np.zeros(3, 'f')": "sinks: got shape (3,), expected (4,), a logit per query head",
        "alibi=np.zeros(3, 'f')": "alibi: got shape (3,), expected (4,), a slope per query head",
    },
    ArgumentError: {
        "q=np.stack([q] * 30)": EARLY.format(30, 10, 20),
        "k=k[:0], v=v[:0]": EARLY.format(1, 0, 1),
        "q=np.ones((4, 600), 'f'), k=np.ones((10, 2, 600), 'f')": "AttnShape.head_dim: got 600, "
        "expected an int from 1 to 576",
        **{f"window={x}": f"window: got {x}, expected an int from 1 to 4611686018427387904" for x in (0, 1 << 63)},
        "window=2.5": "window: got 2.5, expected an int",
        "softcap='high'": "softcap: got 'high', expected a number from 2**-40 to 2**60, or None for no cap",
        "scale='abc'": "scale: got 'abc', " + MAGNITUDE,
        "scale=[1]": "scale: got [1], " + MAGNITUDE,
        "scale=np.array([1, 2])": "scale: got array([1, 2]), expected a single number, a " + MAGNITUDE[11:],
        "num_splits=0": "num_splits: got 0, expected an int of at least 1",
        "split_size=-1": "split_size: got -1, expected an int of at least 1",
        "num_splits=1, split_size=1": "num_splits, split_size: got 1, 1, expected at most one of the two",
    },
    DTypeError: {
        "q=q.astype(np.float64)": "q: got dtype float64, expected float32, float16 or bfloat16",
        "k=k.astype(np.int8)": "k: got dtype int8, expected float32, float16 or bfloat16",
        "v=v.astype(np.float16)": "v: got dtype float16, expected k's float32",
        "sinks=np.zeros(4, int)": "sinks: got dtype int64, expected float32, float16, float64 or bfloat16",
        "q=q.tolist()": "q: got dtype float64, expected float32, float16 or bfloat16",
    },
    ValueRangeError: {
        "q=np.full_like(q, 2.0**55), k=np.full_like(k, 2.0**55)": TOO_LARGE,
        **{
            f"softcap=float('{x}')": f"softcap: got {x}, expected a number from 2**-40 to 2**60, or None for no cap"
            for x in ("0", "nan")
        },
        "sinks=np.full(4, np.inf)": "sinks[0]: got inf, expected a finite value of at most 2**60",
        "alibi=np.full(4, np.nan)": "alibi: got a NaN, an infinity or a magnitude beyond 2**60, expected none",
        **{
            f"scale=np.float64('{x}')": f"scale: got {float(x):g}, {MAGNITUDE}"
            for x in ("0", "-0.0", "1e-40", "1e39", "nan", "-inf")
        },
        **{
            f"{name}=put({name}, {at}, {value})": f"{name}{[*at]}: got {text}, expected a finite value of at most 2**60"
            for name, at, value, text in (
                *(("q", (1, 3), "np.nan", "nan"), ("k", (9, 1, 63), "np.inf", "inf")),
                *(("v", (0, 0, 0), "-np.inf", "-inf"), ("k", (2, 0, 5), "2.0**61", "2.30584e+18")),
            )
        },
    },
}


@pytest.mark.parametrize(
    ("error", "change", "message"), [(error, *case) for error, cases in CASES.items() for case in cases.items()]
)
def test_bad_arguments(device, error, change, message):
    with pytest.raises(error) as caught:
        za.attention(**arguments(change), device=device)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, za.ZincAttnError)


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ("q=q.T", "q looks like (head_dim, q_heads): pass q.swapaxes(0, 1)"),
        ("q=q[:, None]", "q looks like (q_heads, q_len, head_dim): pass q.swapaxes(0, 1)"),
        ("v=v.swapaxes(0, 1)", "v looks like (kv_heads, tokens, v_head_dim): pass v.swapaxes(0, 1)"),
        ("k=k.swapaxes(1, 2)", "k looks like (tokens, head_dim, kv_heads): pass k.swapaxes(1, 2)"),
        (
            "k=k[None], v=v[None]",
            "k looks like (1, tokens, kv_heads, head_dim) and v like (1, tokens, kv_heads, v_head_dim): pass k[0] and "
            "v[0]",
        ),
        (
            "q=q[None, :, None], k=k.swapaxes(0, 1)[None], v=v.swapaxes(0, 1)[None]",
            "q looks like (1, q_heads, q_len, head_dim), k like (1, kv_heads, tokens, head_dim) and v like (1, "
            "kv_heads, tokens, v_head_dim): pass q[0].swapaxes(0, 1), k[0].swapaxes(0, 1) and v[0].swapaxes(0, 1)",
        ),
    ],
)
def test_swapped_axes_are_named(device, change, advice):
    """The refusal says which axes to swap, and the call that does it has the bits of the one that was meant."""
    changed = arguments(change)
    with pytest.raises(ShapeError) as caught:
        za.attention(**changed, device=device)
    said, _, advised = str(caught.value).partition("; ")
    assert advised == advice and "got" in said and "expected" in said
    mended = changed | {
        text[0]: eval(text, {}, changed) for text in re.split(", (?=[kv])| and ", advice.partition("pass ")[2])
    }
    out = za.attention(**mended, device=device)
    assert np.array_equal(out.reshape(4, 64), za.attention(**arrays(), device=device))


@pytest.mark.of_drivers
def test_arrays_and_tensors_of_every_dtype(device):
    """And a tensor that NumPy cannot view."""
    torch, given = pytest.importorskip("torch"), arrays().values()
    for dtype in (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16):
        narrow = [x.astype(dtype) for x in given]
        wide = [x.astype(np.float32) for x in narrow]
        tensors = [torch.from_numpy(x).to(getattr(torch, dtype.name)) for x in wide]
        want = za.attention(*wide, device=device)
        assert all(np.array_equal(za.attention(*one, device=device), want) for one in (narrow, tensors))
    with pytest.raises(ArgumentError, match=r"^k: got a Tensor"):
        za.attention(wide[0], tensors[1].to(torch.float8_e4m3fn), wide[2], device=device)


FAR, NEAR, CAP = 2.0**43, 2.0**20, 2.0**-40  # k's values; q's are twice as large: dot products of 2**90 and 2**44
SLOPED = "mask, mask_slopes: got magnitudes of up to "
PRODUCTS = (  # of k, options, the mask's value, and what is refused
    (FAR, {}, None, None),
    (FAR, {"scale": 42.0, "softcap": 7.0}, 2.0**60, None),
    (FAR, {"scale": -44.0}, None, "q, k: got max|q| = 1.75922e+13"),
    (FAR, {"scale": 42.0, "alibi": 2.0**60}, None, None),
    (FAR, {"scale": 128 / 3, "alibi": 2.0**60}, 2.0**60, "q, k: got max|q| = 1.75922e+13"),
    (NEAR, {"softcap": CAP, "scale": 2.0**12}, None, None),
    (NEAR, {"softcap": CAP, "scale": 2.0**13}, None, "q, k: got max|q| = 2.09715e+06"),
    (NEAR, {"mask_slopes": 2.0**45, "softcap": CAP, "alibi": -(2.0**60)}, -(2.0**50), None),
    (NEAR, {"mask_slopes": 2.0**51}, -(2.0**50), f"{SLOPED}1.1259e+15 and 2.2518e+15"),
    (NEAR, {"mask_slopes": -(2.0**46), "sinks": 2.0**60}, -(2.0**49.5), SLOPED),
    (2.0**-41, {"scale": 2.0**126, "mask_slopes": 2.0**-60}, 2.0**60, None),  # such a k counts as 0
)


@pytest.mark.parametrize("arithmetic", ("canonical", "fused"))
@pytest.mark.parametrize(("size", "options", "added", "refused"), PRODUCTS)
def test_products_of_scores_have_one_bound(device, size, options, added, refused, arithmetic):
    """Where factors meet, both oracles and a call refuse them alike, or agree; no key is taken for a hidden one."""
    q, k = np.full((1, 1, 8), 2 * size, np.float32), np.full((9, 1, 8), size, np.float32)
    k[4], v = 0, np.linspace(1, 9, 9 * 8, dtype=np.float32).reshape(9, 1, 8)
    per_head = {name: np.float32([options[name]]) for name in ("alibi", "sinks", "mask_slopes") if name in options}
    options = options | per_head | {"mask": None if added is None else np.full((1, 9), added, np.float32)}
    calls = (
        lambda: za.reference.attention(q, k, v, **options),
        lambda: za.reference.emulate(q, k, v, arithmetic=arithmetic, **options),
        lambda: za.attention(q, k, v, device, return_lse=True, arithmetic=arithmetic, **options),
    )
    if refused is not None:
        for call in calls:
            with pytest.raises(ValueRangeError, match=f"^{re.escape(refused)}"):
                call()
        return
    (_, lse), want, found = (call() for call in calls)
    same(found, want)
    assert np.allclose(found[1], lse, rtol=1e-5) and np.all((found[0] >= 1) & (found[0] <= 9))


@pytest.mark.of_drivers
def test_buffers_that_the_device_has_no_room_for(device, monkeypatch):
    runtime, name, limit = device.runtime, device.info.name, device.info.max_buffer_bytes
    heaps = libvulkan.Vulkan.heaps
    monkeypatch.setattr(libvulkan.Vulkan, "heaps", lambda *args: [heap._replace(free=4096) for heap in heaps(*args)])
    runtime.buffer(1024, Use.SCRATCH).close()
    free = "has 4,096 free; close other buffers or programs, or ask for less"
    most = f"takes at most {limit:,} in one storage buffer; use a shorter context or a smaller dtype"
    cases = {1 << 20: (errors.DeviceMemoryError, free)}
    cases |= dict.fromkeys((1 << 40, limit // 4 * 4 + 4), (errors.LimitError, most))
    for nbytes, (error, text) in cases.items():
        with pytest.raises(error) as caught:
            runtime.buffer(nbytes, Use.SCRATCH)
        assert str(caught.value) == f"buffer: {nbytes:,} bytes are needed, {name} {text}"
    monkeypatch.setattr(libvulkan.Vulkan, "heaps", lambda *_, **__: [])  # a device that says it has no memory
    assert {device.memory_bytes for device in za.list_devices() if not device.native} == {0}
    with pytest.raises(errors.DeviceMemoryError, match="has 0 free"):
        za.KVCache(device, za.AttnShape(1, 1, 64), 1, 256)
    monkeypatch.undo()
    za.attention(**arrays(), device=device)


def test_no_such_runtime():
    with pytest.raises(ArgumentError, match="runtime: got 'metal', expected one of kompute, vulkan"):
        za.Device.open(runtime="metal")
    with pytest.raises(ArgumentError, match="expected an open one; names are for"):
        za.Device("vulkan")


def test_no_driver_is_an_error_and_not_a_crash():
    code = "import zinc_attn as za\ntry: za.Device.open()\nexcept za.errors.NoVulkanError as e: print('refused:', e)"
    no_driver = dict.fromkeys(("VK_ICD_FILENAMES", "VK_DRIVER_FILES"), "/none.json") | {"VK_ADD_DRIVER_FILES": ""}
    command = [sys.executable, "-c", code]
    no_driver |= {"PATH": "", "CXX": "", "ZINC_ATTN_DEVICE": ""}  # and no compiler for native code
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **no_driver})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused:") and "install" in done.stdout


def test_missing_spirv_says_how_to_build_it(device, monkeypatch, tmp_path):
    monkeypatch.setattr(device_module, "SPIRV", tmp_path)
    with (
        za.Device.open(device.info.index, runtime=device.runtime.name) as fresh,
        pytest.raises(errors.KernelError, match="build_shaders"),
    ):
        za.attention(**arrays(), device=fresh)
