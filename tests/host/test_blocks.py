"""Block types and fp8_e4m3: ggml's bytes, ours, and the way between them."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from zinc_attn import errors
from zinc_attn.cache import blocks, encoded, rows
from zinc_attn.cache.head_scales import check_head_scales
from zinc_attn.shapes import AttnShape
from zinc_attn.storage import GROWTH, IQ4_NL, STORAGE

MASKED = Path(__file__).parents[2] / "shaders" / "attend/storage.glsl"

BLOCK_TYPES = [name for name, kind in STORAGE.items() if kind.halves]
SHAPE = AttnShape(4, 2, 96, 64)


def values(n: int = 6000) -> NDArray[np.float32]:
    """(n, 32) blocks: of many sizes, zero, constant, of both signs, with ties, of scales that float16 rounds to 0."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((n, 32)).astype(np.float32)
    x[: n // 4] *= np.exp2(rng.integers(-20, 12, (n // 4, 1))).astype(np.float32)
    x[n // 4 : n // 2] = rng.integers(-127, 128, (n // 2 - n // 4, 32))
    x[:8] = np.array([0, 1, -1, 2.0**-30, -(2.0**-39), 6e4, -6e4, 0.1], np.float32)[:, None]
    x[8] = np.tile([0.5, -0.5], 16)
    x[9] = np.eye(32)[5] * 5
    return x


@pytest.mark.parametrize("name", [name for name in BLOCK_TYPES if name != "iq4_nl"])
def test_equal_rows_give_the_bytes_of_ggml(name):
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    x, kind = values(), STORAGE[name]
    q, halves = blocks.quantize(x, kind)
    want = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(encoded.to_blocks(q, halves, kind), want)
    check_decoding(gguf, name, q, halves)


def check_decoding(gguf: Any, name: str, q: Any, halves: Any) -> None:
    """gguf decodes our blocks to the same bits as we do."""
    kind = STORAGE[name]
    decoded = gguf.quants.dequantize(encoded.to_blocks(q, halves, kind), gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(blocks.dequantize(q, halves, kind).view(np.uint32), decoded.view(np.uint32))


def test_iq4_nl():
    """Against the procedure one value after the other, and ggml's bytes against gguf's decoding of them."""
    x, kind = values(300), STORAGE["iq4_nl"]
    q, halves = blocks.quantize(x, kind)
    table = np.array(IQ4_NL, np.float32)
    for index, block in enumerate(x):
        extreme = block[np.argmax(np.abs(block))]
        if extreme == 0:
            assert halves[index, 0] == 0
            continue
        inverse = np.float32(1) / (extreme / table[0])
        over = under = np.float32(0)
        for i, value in enumerate(block):
            scaled = value * inverse
            distance = np.abs(table.astype(np.float64) - scaled)
            code = np.flatnonzero(distance == distance.min())[-1]
            assert q[index, i] == code
            weight = value * value
            over = over + weight * table[code] * value
            under = under + weight * table[code] * table[code]
        assert halves[index, 0] == np.float16(over / under)
    check_decoding(pytest.importorskip("gguf", reason="pip install gguf"), "iq4_nl", q, halves)


def test_zeros_of_either_sign():
    """Zeros of either sign make one block, the first of equal minima counts, and other rows do not change a row."""
    zeros = np.zeros((1, 32), np.float32)
    for name in ("q4_0", "q5_0", "iq4_nl", "q8_0"):
        results = [blocks.quantize(x, STORAGE[name]) for x in (zeros, -zeros)]
        assert results[0][0].tobytes() == results[1][0].tobytes() and results[0][1].tobytes() == results[1][1].tobytes()
    mixed = np.where(np.arange(32) == 0, 0.0, np.where(np.arange(32) % 2, 1.0, -0.0)).astype(np.float32)[None]
    for name in ("q4_1", "q5_1"):
        assert blocks.quantize(mixed, STORAGE[name])[1][0, 1].tobytes() == bytes(2)
    alone, beside = np.full((2, 1, 32), -0.0, np.float32), np.full((2, 1, 32), -0.0, np.float32)
    beside[1] = 2.0**-50
    for name in STORAGE:
        first = [rows.stored_values("k", x, name, True)[0][0].tobytes() for x in (alone, beside)]
        assert first[0] == first[1], name


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_stored_magnitudes_are_bounded(name):
    """By the largest one that ``stored_values`` tells, so that scores stay finite."""
    x = values()
    decoded = blocks.dequantize(*blocks.quantize(x, STORAGE[name]), STORAGE[name])
    normal = np.abs(x).max(axis=1) > 1e-2  # smaller scales are subnormal float16 numbers
    assert np.all(np.abs(decoded).max(axis=1)[normal] <= GROWTH * np.abs(x).max(axis=1)[normal])
    most = np.float32(STORAGE[name].most)
    for block in (np.full((1, 32), most), np.full((1, 32), -most), np.where(np.arange(32) % 2, most, -most)[None]):
        assert np.all(np.isfinite(blocks.quantize(block.astype(np.float32), STORAGE[name])[1]))
        rows.stored_values("k", block.astype(np.float32)[None], name)
    with pytest.raises(errors.ValueRangeError, match=rf"k\[0, 0, 0\]: got .*, a cache of {name} takes at most"):
        rows.stored_values("k", np.full((1, 1, 32), 1.01 * most, np.float32), name)


def test_fp8_is_within_its_bounds():
    x = np.array([[[448.0, -448.0, 2.0**-9, 2.0**-10, 1.0625, -0.0]]], np.float32)
    shape = AttnShape(1, 1, 6)
    k, v = rows.stored(x, -x, "fp8_e4m3")
    assert np.array_equal(k[0, 0], [448, -448, 2.0**-9, 0, 1, 0]) and np.array_equal(v, -k)  # ties to even
    scales = np.array([[2.0**-20], [3.0]], np.float32)
    k, v = rows.stored(x * 2.0**-20, x * 3, "fp8_e4m3", scales=scales)
    assert np.array_equal(v[0, 0], [1344, -1344, 3 * 2.0**-9, 0, 3, 0])
    with pytest.raises(errors.ValueRangeError, match=r"v: got a magnitude of 449 in KV head 0, a fp8_e4m3 .* v_scale"):
        rows.stored_values("v", np.full((1, 1, 6), 449, np.float32), "fp8_e4m3")
    assert rows.row_format(shape, "fp8_e4m3").k_scales == 0


def block_of(name: str, **changes: Any) -> dict[str, Any]:
    """Encoded k and v of SHAPE, all bytes 1, with changes."""
    k, v = (np.ones((3, 2, STORAGE[name].row_bytes(dims)), np.uint8) for dims in (96, 64))
    return {"k": k, "v": v} | changes


def rows_of(name: str, k: Any, v: Any) -> tuple[NDArray[np.uint32], float]:
    return encoded.encoded_rows(encoded.check_encoded(k, v, SHAPE, name), SHAPE, name, None)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"k": np.ones((3, 2, 53), np.uint8)}, errors.ShapeError, r"k: got shape \(3, 2, 53\), .*\(3, 2, 54\)"),
        ({"v": np.ones((2, 2, 36), np.uint8)}, errors.ShapeError, r"v: got shape \(2, 2, 36\)"),
        ({"v": np.ones((3, 2, 36))}, errors.DTypeError, "v: got dtype float64, expected uint8"),
        ({"v": None}, errors.ArgumentError, "v: got None, expected the bytes of V's rows"),
        ({"k": np.uint8(3)}, errors.ShapeError, r"k: got shape \(\), expected \(tokens"),
    ],
)
def test_encoded_rows_that_do_not_fit(changes, error, text):
    assert rows_of("q5_1", **block_of("q5_1"))[1].k > 0
    with pytest.raises(error, match=text):
        rows_of("q4_0", **block_of("q4_0", **changes))
    with pytest.raises(errors.ArgumentError, match="k: got encoded rows of 40 values, expected a multiple of 32"):
        encoded.check_encoded(np.ones((1, 1, 36), np.uint8), np.ones((1, 1, 36)), AttnShape(1, 1, 40), "q4_0")


HALVES = (b"\0\x7e", b"\0\x7c", b"\0\xfc")  # NaN and infinities: a scale, or a minimum where a block has one
FLOATS = {"f16": b"\0\x7e", "f32": b"\0\0\x80\x7f", "bf16": b"\x80\xff", "fp8_e4m3": b"\xff"}


@pytest.mark.parametrize("piece", (encoded.PIECE, 1))
@pytest.mark.parametrize(("name", "value"), [*product(BLOCK_TYPES, HALVES), *FLOATS.items()])
def test_rows_that_are_no_numbers(monkeypatch, name, value, piece):
    """Their place is counted from the first piece."""
    monkeypatch.setattr(encoded, "PIECE", piece)
    kind, offset, where = STORAGE[name], 0, r"\[2, 1, 0\]: got"
    if kind.halves:  # the last one of the second block
        offset = kind.block_bytes + 2 * (kind.halves - 1)
        where = ": got a scale .* not finite in token 2, KV head 1, block 1"
    elif kind.head_scale:
        where = ": got an fp8_e4m3 NaN in token 2, KV head 1, value 0"
    for which in "kv":
        arguments = block_of(name)
        words = rows_of(name, **arguments)[0]
        assert np.array_equal(words[0], words[2])
        arguments[which][2, 1, offset : offset + len(value)] = [*value]
        with pytest.raises(errors.ValueRangeError, match=f"^{which}{where}"):
            rows_of(name, **arguments)


@pytest.mark.parametrize(
    ("dtype", "k_scale", "v_scale", "error", "text"),
    [
        ("f16", 1.0, None, errors.ArgumentError, "k_scale: got one for f16, expected None"),
        ("fp8_e4m3/q8_0", 0.5, 0.5, errors.ArgumentError, "v_scale: got one for q8_0"),
        ("fp8_e4m3", [1, 2, 3], None, errors.ShapeError, r"k_scale: got shape \(3,\), .* \(2,\), \(4, 1\) or \(4, 2\)"),
        ("fp8_e4m3", 0.0, None, errors.ValueRangeError, "k_scale: got 0, expected a scale from"),
        ("fp8_e4m3", 1.0, float("nan"), errors.ValueRangeError, "v_scale: got nan, expected a scale from"),
        ("fp8_e4m3", [[1.0, 1e300], [1, 1], [1, 1], [1, 1]], None, errors.ValueRangeError, r"k_scale\[0, 1\]: got 1e"),
        ("fp8_e4m3", "1", None, errors.ArgumentError, "k_scale: got dtype <U1, expected numbers"),
    ],
)
def test_head_scales_that_are_refused(dtype, k_scale, v_scale, error, text):
    with pytest.raises(error, match=text):
        check_head_scales(dtype, SHAPE, 4, k_scale, v_scale)
    with pytest.raises(errors.ArgumentError, match="v_scale: got one for a latent shape, expected None"):
        check_head_scales("fp8_e4m3", AttnShape(4, 2, 96, 64, latent=True), 1, 0.5, 0.5)


def test_a_gpus_polynomial_rounds_to_the_table():
    """Each of its multiply-adds fused or not: the entries of iq4_nl, with room to the middle of two numbers."""
    text = MASKED.read_text()
    lines = [re.findall(f"float {name} = (.*);", text)[0] for name in ("y", "cubic", "entry")]
    factor, *terms, magic, last = (np.float32(x) for line in lines for x in re.findall(r"-?\d+\.\d+", line))
    assert (magic, last) == (12582912.0, 127.0)
    y = np.arange(16, dtype=np.float32) * factor
    assert np.abs(np.polyval([1, *terms, -last], y.astype(np.float64)) - IQ4_NL).max() < 0.45
    for fused in product((False, True), repeat=3):
        value = y + terms[0]
        for once, term in zip(fused, (*terms[1:], magic - last), strict=True):
            exact_product = value.astype(np.float64) * y
            kept = exact_product if once else exact_product.astype(np.float32)
            value = (kept.astype(np.float64) + term).astype(np.float32)
        assert np.array_equal(value - magic, np.array(IQ4_NL, np.float32))
