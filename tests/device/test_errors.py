"""Every refusal is a typed error with a message that says what was given and what was expected; none is a crash."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.runtime import device as device_module
from zinc_attn.runtime import loader as libvulkan
from zinc_attn.runtime.protocol import Use

pytestmark = pytest.mark.both_dispatchers


def arrays(tokens=10, q_heads=4, kv_heads=2, head_dim=64, dtype=np.float32):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((q_heads, head_dim)).astype(np.float32)
    k, v = (rng.standard_normal((tokens, kv_heads, head_dim)).astype(dtype) for _ in range(2))
    return q, k, v


def with_value(name, index, value):
    q, k, v = arrays()
    chosen = {"q": q, "k": k, "v": v}
    chosen[name][index] = value
    return chosen


CASES = [
    (
        lambda q, k, v: (q[0], k, v),
        {},
        errors.ShapeError,
        "q: got shape (64,), expected (q_heads, head_dim) or (q_len, q_heads, head_dim)",
    ),
    (
        lambda q, k, v: (q, k[0], v),
        {},
        errors.ShapeError,
        "k: got shape (2, 64), expected (tokens, kv_heads, head_dim)",
    ),
    (
        lambda q, k, v: (q, k, v[1:]),
        {},
        errors.ShapeError,
        "v: got shape (9, 2, 64), expected k's tokens and heads: (10, 2, v_head_dim), where q is (q_heads, head_dim) = "
        "(4, 64), k is (tokens, kv_heads, head_dim) = (10, 2, 64) and v is (tokens, kv_heads, v_head_dim) = (9, 2, 64)",
    ),
    (
        lambda q, k, v: (q[:, :32], k, v),
        {},
        errors.ShapeError,
        "q: got head_dim 32, expected k's 64, where q is (q_heads, head_dim) = (4, 32), k is (tokens, kv_heads, "
        "head_dim) = (10, 2, 64) and v is (tokens, kv_heads, v_head_dim) = (10, 2, 64)",
    ),
    (
        lambda q, k, v: (q[None][:0], k, v),
        {},
        errors.ShapeError,
        "q: got shape (0, 4, 64), expected at least one row",
    ),
    (
        lambda q, k, v: (q[:3], k, v),
        {},
        errors.ShapeError,
        "q_heads: got 3, expected a multiple of kv_heads = 2, where q is (q_heads, head_dim) = (3, 64), k is (tokens, "
        "kv_heads, head_dim) = (10, 2, 64) and v is (tokens, kv_heads, v_head_dim) = (10, 2, 64)",
    ),
    (
        lambda q, k, v: (q, k.swapaxes(0, 1), v.swapaxes(0, 1)),  # as torch's scaled_dot_product_attention has them
        {},
        errors.ShapeError,
        "q_heads: got 4, expected a multiple of kv_heads = 10, where q is (q_heads, head_dim) = (4, 64), k is (tokens, "
        "kv_heads, head_dim) = (2, 10, 64) and v is (tokens, kv_heads, v_head_dim) = (2, 10, 64); k looks like "
        "(kv_heads, tokens, head_dim) and v like (kv_heads, tokens, v_head_dim): pass k.swapaxes(0, 1) and "
        "v.swapaxes(0, 1)",
    ),
    (
        lambda q, k, v: (
            np.ones((4, 600), np.float32),
            np.ones((9, 2, 600), np.float32),
            np.ones((9, 2, 64), np.float32),
        ),
        {},
        errors.ArgumentError,
        "AttnShape.head_dim: got 600, expected an int from 1 to 576",
    ),
    (
        lambda q, k, v: (q.astype(np.float64), k, v),
        {},
        errors.DTypeError,
        "q: got dtype float64, expected float32, float16 or bfloat16",
    ),
    (
        lambda q, k, v: (q, k.astype(np.int8), v),
        {},
        errors.DTypeError,
        "k: got dtype int8, expected float32, float16 or bfloat16",
    ),
    (
        lambda q, k, v: (q, k, v.astype(np.float16)),
        {},
        errors.DTypeError,
        "v: got dtype float16, expected k's float32",
    ),
    (
        lambda q, k, v: (q, k, v),
        {"num_splits": 0},
        errors.ArgumentError,
        "num_splits: got 0, expected an int from 1 to 262144",
    ),
    (
        lambda q, k, v: (q, k, v),
        {"split_size": -1},
        errors.ArgumentError,
        "split_size: got -1, expected an int of at least 1",
    ),
    (
        lambda q, k, v: (q, k, v),
        {"num_splits": 1, "split_size": 1},
        errors.ArgumentError,
        "num_splits, split_size: got 1, 1, expected at most one of the two",
    ),
    *(
        (
            lambda q, k, v: (q, k, v),
            {"scale": scale},
            errors.ValueRangeError,
            f"scale: got {scale:g}, expected a magnitude from 2**-126 to 2**126, or None for 1 / sqrt(head_dim)",
        )
        for scale in (0, -0.0, 1e-40, float("nan"), -float("inf"))
    ),
]


@pytest.mark.parametrize(("change", "options", "error", "message"), CASES, ids=[c[3][:40] for c in CASES])
def test_bad_arguments(device, change, options, error, message):
    with pytest.raises(error) as caught:
        za.attention(*change(*arrays()), device=device, **options)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, za.ZincAttnError)


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (lambda q, k, v: (q.T, k, v), "q looks like (head_dim, q_heads): pass q.swapaxes(0, 1)"),
        (lambda q, k, v: (q[:, None], k, v), "q looks like (q_heads, q_len, head_dim): pass q.swapaxes(0, 1)"),
        (
            lambda q, k, v: (q, k, v.swapaxes(0, 1)),
            "v looks like (kv_heads, tokens, v_head_dim): pass v.swapaxes(0, 1)",
        ),
        (lambda q, k, v: (q, k.swapaxes(1, 2), v), "k looks like (tokens, head_dim, kv_heads): pass k.swapaxes(1, 2)"),
        (
            lambda q, k, v: (q, k[None], v[None]),
            "k looks like (1, tokens, kv_heads, head_dim) and v like (1, tokens, kv_heads, v_head_dim): pass k[0] and "
            "v[0]",
        ),
        (
            lambda q, k, v: (q[None, :, None], k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None]),
            "q looks like (1, q_heads, q_len, head_dim), k like (1, kv_heads, tokens, head_dim) and v like (1, "
            "kv_heads, tokens, v_head_dim): pass q[0].swapaxes(0, 1), k[0].swapaxes(0, 1) and v[0].swapaxes(0, 1)",
        ),
    ],
)
def test_swapped_axes_are_named(device, change, advice):
    """The refusal says which axes to swap, and the call that does it has the bits of the one that was meant."""
    given = change(*arrays())
    with pytest.raises(errors.ShapeError) as caught:
        za.attention(*given, device=device)
    said, _, advised = str(caught.value).partition("; ")
    assert advised == advice and "got" in said and "expected" in said
    mended = dict(zip("qkv", given, strict=True))
    mended |= {text[0]: eval(text, {}, mended) for text in re.split(", (?=[kv])| and ", advice.partition("pass ")[2])}
    out = za.attention(**mended, device=device)
    assert np.array_equal(out.reshape(4, 64), za.attention(*arrays(), device=device))


@pytest.mark.parametrize(
    ("name", "index", "value", "shown"),
    [
        ("q", (1, 3), np.nan, "nan"),
        ("k", (9, 1, 63), np.inf, "inf"),
        ("v", (0, 0, 0), -np.inf, "-inf"),
        ("k", (2, 0, 5), 2.0**61, "2.30584e+18"),
    ],
)
def test_values_that_are_no_numbers(device, name, index, value, shown):
    with np.errstate(invalid="ignore"), pytest.raises(errors.ValueRangeError) as caught:
        za.attention(**with_value(name, index, value), device=device)
    at = ", ".join(map(str, index))
    assert str(caught.value) == f"{name}[{at}]: got {shown}, expected a finite value of at most 2**60"


def test_scores_that_could_overflow(device):
    q, k, v = arrays()
    with pytest.raises(
        errors.ValueRangeError, match=r"expected max\|q\| \* max\|k\| \* head_dim \* scale of at most 2\*\*96"
    ):
        za.attention(q * np.float32(2.0**55), k * np.float32(2.0**55), v, device=device)


def test_large_but_legal_values_are_finite(device):
    q, k, v = arrays()
    q, k = q * np.float32(2.0**40), k * np.float32(2.0**40)
    want_out, want_lse = za.reference.emulate(q, k, v)
    out, lse = za.attention(q, k, v, device=device, return_lse=True)
    assert np.array_equal(out.view(np.uint32), want_out.view(np.uint32)) and np.array_equal(lse, want_lse)
    assert np.all(np.isfinite(out)) and np.all(np.isfinite(lse))


def test_a_buffer_beyond_the_device_limit_is_refused_with_the_limit(device):
    limit = device.info.max_buffer_bytes
    with pytest.raises(errors.LimitError, match=f"{limit:,}"):
        device.runtime.buffer(limit // 4 * 4 + 4, Use.DATA)


def test_memory_that_is_not_there_is_refused(device, monkeypatch):
    real = libvulkan.Vulkan.heaps
    monkeypatch.setattr(libvulkan.Vulkan, "heaps", lambda *args: [heap._replace(free=1000) for heap in real(*args)])
    with pytest.raises(errors.DeviceMemoryError, match="1,000"):
        device.runtime.buffer(4096, Use.SCRATCH)


def test_after_close(device):
    other = za.Device.open(device.info.index, runtime=device.runtime.name)
    other.close()
    other.close()
    with pytest.raises(errors.ClosedError, match="after close"):
        za.attention(*arrays(), device=other)


def test_in_a_forked_child(device):
    pid = os.fork()
    if pid == 0:
        try:
            za.attention(*arrays(), device=device)
        except errors.ForkedProcessError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    za.attention(*arrays(), device=device)


def test_no_such_device_or_runtime():
    with pytest.raises(errors.DeviceNotFoundError, match="no-such-card"):
        za.Device.open("no-such-card")
    with pytest.raises(errors.DeviceNotFoundError, match="99"):
        za.Device.open(99)
    with pytest.raises(errors.ArgumentError, match="runtime: got 'metal', expected one of kompute, vulkan"):
        za.Device.open(runtime="metal")
    with pytest.raises(errors.ArgumentError, match="expected an open one; names are for"):
        za.Device("vulkan")


def run_python(code, **env):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env})


@pytest.mark.parametrize("runtime", ("kompute", "vulkan"))
def test_no_driver_is_an_error_and_not_a_crash(runtime, tmp_path):
    nowhere = str(tmp_path / "none.json")
    code = (
        f"import zinc_attn as za\ntry: za.Device.open(runtime={runtime!r})\n"
        "except za.errors.NoVulkanError as e: print('refused:', e)"
    )
    done = run_python(code, VK_ICD_FILENAMES=nowhere, VK_DRIVER_FILES=nowhere, VK_ADD_DRIVER_FILES="")
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout and "install" in done.stdout


def test_without_kp_the_message_says_how_to_get_it():
    code = (
        "import sys; sys.modules['kp'] = None\nimport zinc_attn as za\n"
        "try: za.Device.open(runtime='kompute')\nexcept za.errors.RuntimeUnavailableError as e: print(e)"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert "scripts/build_kp.sh" in done.stdout and "runtime='vulkan'" in done.stdout


def test_missing_spirv_says_how_to_build_it(device, monkeypatch, tmp_path):
    monkeypatch.setattr(device_module, "SPIRV", tmp_path)
    with (
        za.Device.open(device.info.index, runtime=device.runtime.name) as fresh,
        pytest.raises(errors.KernelError, match="build_shaders"),
    ):
        za.attention(*arrays(), device=fresh)
