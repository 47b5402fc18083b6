"""Partial states that cannot be folded or read. Their bits are in test_fuzz.py, test_sharded.py and in check."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from cache_rows import filled

import zinc_attn as za
from zinc_attn import reference
from zinc_attn.canonical import constants
from zinc_attn.canonical.partial import PartialState, PartialStateError

NATIVE = True


def test_what_cannot_be_folded(device: za.Device) -> None:
    shape, rng = za.AttnShape(2, 1, 64), np.random.default_rng(3)
    k = rng.standard_normal((1500, 1, 64)).astype(np.float32)
    q, mask = rng.standard_normal((2, 64)).astype(np.float32), np.ones((1, 9), bool)
    with filled(device, shape, k, k, "f32") as (cache, seq):
        attn = za.Attention(cache)
        a, b, c = (attn.partial(q, seq, 0, within=(i, i + 1)) for i in range(3))
        options = {"window": 1500}, {"scale": 0.5}, {"sinks": q[:, 0]}, {"alibi": q[:, 0]}, {"arithmetic": "fused"}
        foreign = [za.Attention(cache, **option).partial(q, seq, 0, within=(2, 3)) for option in options]
        foreign += [attn.partial(2 * q, seq, 0, within=(2, 3)), attn.partial(q, seq, 0, within=(2, 3), mask=mask)]
        for parts, text in (
            ([], "partial states: got none"),
            ([a, c], r"partial states: node 1 is missing \(1 in all\), expected every node from 0 to 2"),
            ([c], r"partial states: node 0 is missing \(2 in all\)"),
            ([attn.partial(q, seq, 0, within=(1, 1))], r"partial states: node 0 is missing \(3 in all\)"),
            ([replace(a, span=(0, 1 << 15))], r"partial states: node 1 is missing \(32767 in all\)"),
            ([a, b, c, b], "partial states: got node 1 more than once"),
            *(([a, b, other], "partial states: got parts of different calls") for other in foreign),
        ):
            with pytest.raises(PartialStateError, match=f"^{text}"):
                za.fold(parts)
        bad_m, bad_l = (np.nan, 0.5, 2.0**98, constants.EMPTY_M), (np.inf, -1.0, 0.0, 0.5, 2000.0)
        for name, value in (*product("m", bad_m), *product("l", bad_l), *product("o", (np.nan, -np.inf, -(2.0**71)))):
            array = getattr(a, name).copy()
            array.flat[-1] = value
            wrong, text = replace(a, **{name: array}), rf"^partial state: got (an )?({name} |l that does not fit its m)"
            for take in (lambda x: PartialState.from_bytes(x.to_bytes()), lambda x: za.fold([x, b, c])):
                with pytest.raises(PartialStateError, match=text):
                    take(wrong)
        for parts, given in ((a, "one PartialState"), ([a, 1], "PartialState, int"), ([], "none")):
            with pytest.raises(PartialStateError, match=rf"^partial states: got {given}, expected a list"):
                za.fold(parts)
        for within in (3, (1,), (2, 1), (-1, 2), ("a", 2)):
            with pytest.raises(za.errors.ArgumentError, match=r"^within"):
                attn.partial(q, seq, 0, within=within)
        assert reference.gather([c, a, b]).nodes.tolist() == [0, 1, 2]


def small_state(**changes: Any) -> PartialState:
    """Of two query rows and heads over nodes 3 and 5 of the nodes 3 to 5: no kernel and no device."""
    rng = np.random.default_rng(5)
    m = rng.integers(-9, 9, (2, 2, 2)).astype(np.float32)
    total, o = (rng.uniform(1, 500, shape).astype(np.float32) for shape in ((2, 2, 2), (2, 2, 2, 3)))
    m[0, 0], total[0, 0], o[0, 0] = constants.EMPTY_M, 0, 0
    sinks = np.array([-1.5, 3], np.float32)
    return replace(PartialState(np.array([3, 5]), m, total, o, (3, 6), "a call", sinks), **changes)


def test_no_damaged_byte_is_accepted() -> None:
    """Every byte, changed in each bit and to white space; and lengths that do not fit."""
    state = small_state()
    data = state.to_bytes()
    back = PartialState.from_bytes(bytearray(data))
    assert back.to_bytes() == data and (back.span, back.call) == (state.span, state.call)
    for index, byte in enumerate(data):
        for other in {byte ^ 1 << bit for bit in range(8)} | set(b" \n\t0"):
            if other != byte:
                with pytest.raises(PartialStateError, match=r"^partial state: got "):
                    PartialState.from_bytes(data[:index] + bytes([other]) + data[index + 1 :])
    for wrong in (b"", data[:7], data[:8], data[:-1], data + b"\0", data * 2, b"\xff" * 8 + data[8:], "text", None):
        with pytest.raises(PartialStateError, match=r"^partial state: got "):
            PartialState.from_bytes(wrong)  # type: ignore[arg-type]


def test_other_readers_of_safetensors_find_the_arrays() -> None:
    state = small_state()
    tensors = pytest.importorskip("safetensors.numpy").load(state.to_bytes())
    assert tensors.keys() == {"nodes", "m", "l", "o", "sinks"}
    assert all(np.array_equal(array, getattr(state, name)) for name, array in tensors.items())


@pytest.mark.parametrize(
    ("changes", "text"),
    (
        ({"nodes": np.array([-1, 5])}, r"nodes \[-1, 5\], expected ascending numbers from 3 to 5$"),
        ({"nodes": np.array([3, 2**40])}, r"nodes \[3, 1099511627776\], expected ascending"),
        ({"span": (3, 2**40)}, r"span \(3, 1099511627776\), expected \(first, end\), at most 32768 nodes$"),
        ({"span": (3, 10**30)}, r"[\d,]+ bytes that do not hold one \(got '10+', expected a number of at most 19"),
        ({"span": (6, 3)}, r"span \(6, 3\), expected"),
        ({"sinks": np.array([np.nan, 0], np.float32)}, r"sinks \[nan, 0.0\], expected at most 2\*\*61$"),
        ({"sinks": np.array([0, -np.inf], np.float32)}, r"sinks \[0.0, -inf\], expected"),
        ({"sinks": np.zeros(3, np.float32)}, r"sinks \(3,\), expected \(2,\), one per head$"),
        ({x: small_state().__dict__[x][:0] for x in "mlo"}, r"o \(0, 2, 2, 3\), expected at least one query row"),
        ({x: small_state().__dict__[x][:, :, :0] for x in "mlo"} | {"sinks": None}, r"o \(2, 2, 0, 3\), expected at"),
        ({"call": "a\ncall"}, r"call 'a\\ncall', expected a printable text$"),
    ),
)
def test_what_no_call_makes_is_refused_where_it_is_read(changes: dict[str, Any], text: str) -> None:
    """Under a checksum that fits."""
    with pytest.raises(PartialStateError, match=rf"^partial state: got {text}"):
        PartialState.from_bytes(small_state(**changes).to_bytes())


def tensor(shape: bytes, offsets: bytes = b"0,0") -> bytes:
    return b'{"m":{"dtype":"F32","shape":[' + shape + b'],"data_offsets":[' + offsets + b"]}}"


HEADERS = (
    (b"[" * 200_000, "nested too deeply"),
    (tensor(b"9" * 5000), "the number 9999"),
    (tensor(b"1e3"), "the number 1e3"),
    (tensor(b"true", b"0,4"), "tensor m with another entry"),
    (tensor(b"0", b"4,0"), "tensor m with another entry"),
    (tensor(b"2", b"8,16"), "tensor m at byte 8, expected it at 0"),
    (b'{"m":1,"m":1}', "more than once"),
    (b'{"__metadata__":{"format":1}}', "__metadata__ of another form"),
    (b"[]", "of type list, expected an object"),
    (b"\xff\xfe{}", "not JSON of this kind"),
)


@pytest.mark.parametrize(("header", "text"), HEADERS)
def test_headers_that_crash_parsers(header: bytes, text: str) -> None:
    with pytest.raises(PartialStateError, match=text):
        PartialState.from_bytes(len(header).to_bytes(8, "little") + header)
