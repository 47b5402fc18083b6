"""Cases of the C library: shapes, types, places of K and V, and options, each a run of steps in two layers.

``check_case`` makes some of the steps in a recorded command buffer of an engine's, some by calls between the engine's
buffers and some from host memory, and asks the oracle about each. All that the library computes goes through here.
"""

from __future__ import annotations

import copy
import ctypes as c
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from c_host import DTYPES, NARROW, Data, Options, Room
from engine import Engine, Owner, address, call_of
from support import has_int8_units, same

import zinc_attn as za
from zinc_attn.cache.rows import encode, stored, stored_scales
from zinc_attn.cache.strided import from_rows
from zinc_attn.canonical.constants import BIASES
from zinc_attn.canonical.integer import rounded
from zinc_attn.limits import BLOCK
from zinc_attn.planning.arithmetic import EXACT
from zinc_attn.shapes import TILES, row_strides
from zinc_attn.storage import storage_types

LAYERS, TOKENS, SLOTS = 2, 640, 2
ROWS, NEW_ROWS, MASK_KEYS = 4, 20, 5  # the room of a recorded step
SLOPES = np.exp2(-1.0 - np.arange(16)).astype(np.float32)


class Case(NamedTuple):
    """options: of the oracle; True stands for numbers of the heads. gap: None for tiles, or bytes between rows; steps:
    rows from a token to the next and from a KV head; apart: lse does not lie behind out."""

    shape: str
    dtype: str
    page_size: int
    options: dict[str, Any] = {}  # noqa: RUF012
    gap: int | None = None
    steps: tuple[int, int] = (0, 0)
    apart: bool = False


HEADS_FIRST = 1, LAYERS * TOKENS
EVERYTHING = {"alibi": True, "window": 100, "softcap": 3.0, "sinks": True, "mask_slopes": True}
FEW = "filled up", "heads first"  # where compilers are slow
# Run with --full alone: test_c_host.py holds the rows and constants of their types to the package's, whose kernels
# test_grid.py runs.
OF_OTHER_TYPES = "blocks", "latent bytes", "odd blocks"
CASES = {  # each type at least once in tiles and once in rows, of sizes that are filled up and of others
    "plain": Case("9/3/64", "f16", 16),
    "cells": Case("4/2/64", "f16", 1, {"mask_slopes": True}),
    "filled up": Case("4/2/72/40", "f32", 16, {"window": 70, "softcap": 5.0}),
    "latent": Case("6/2/96/64/latent", "q8_0", 16, {"sinks": True}, apart=True),  # an odd number of blocks
    "fused": Case("4/2/64", "bf16", 16, {"arithmetic": "fused"}, apart=True),
    "everything": Case("6/2/96", "fp8_e4m3/q5_1", 32, EVERYTHING),
    "blocks": Case("6/2/96/64", "q5_0/q4_1", 32),
    "wide": Case("6/3/64/160", "f32/q8_0", 32, {"alibi": True}),
    "odd blocks": Case("6/2/70/40", "q4_0/iq4_nl", 32),
    "latent bytes": Case("6/2/77/65/latent", "fp8_e4m3", 32, apart=True),
    "rows": Case("4/2/65/67", "f16", 1, {"mask_slopes": True, "alibi": True}, gap=0, apart=True),
    "heads first": Case("4/2/96/32", "q4_0/q8_0", 1, {"mask_slopes": True}, gap=0, steps=HEADS_FIRST),
    "rows of 40": Case("6/3/40/96", "q5_1/iq4_nl", 16, {"window": 33}, gap=2, apart=True),
    "rows of blocks": Case("4/2/64/128", "q4_1/q5_0", 1, gap=0),
    "rows of bytes": Case("4/2/72/65", "fp8_e4m3", 1, gap=10, steps=HEADS_FIRST, apart=True),
    "latent rows": Case("4/2/70/66/latent", "bf16", 1, {"softcap": 4.0}, gap=0, apart=True),
    # With matrix units they attend two rows together, but for recorded steps.
    "integer": Case("16/2/72/40", "q8_0/q4_0", 32, {"arithmetic": "integer", "sinks": True}, apart=True),
    "integer rows": Case("8/1/64/96", "q5_0/iq4_nl", 1, {"arithmetic": "integer", "mask_slopes": True}, gap=0),
    "fused rows": Case("4/2/40", "f32/f16", 4, {"arithmetic": "fused"}, gap=4, steps=(3, 1)),
}


class Sequence:
    """What a sequence of the engine has: its page table, and K and V of its tokens by layer, as stored."""

    def __init__(self, shape: za.AttnShape) -> None:
        self.table: list[int] = []
        sizes = shape.head_dim, shape.v_head_dim
        self.layers = [[np.zeros((0, shape.kv_heads, size), np.float32) for size in sizes] for _ in range(LAYERS)]
        sizes = (-(-size // BLOCK) for size in sizes)
        blocks = {f"{x}_scales": np.zeros((0, shape.kv_heads, n), np.float16) for x, n in zip("kv", sizes, strict=True)}
        self.scales = [blocks.copy() for _ in range(LAYERS)]  # of blocks, for arithmetic "integer"

    def __len__(self) -> int:
        return len(self.layers[0][0])

    def first(self, tokens: int) -> Sequence:
        """Of the first tokens, with the same table."""
        copied = copy.copy(self)
        copied.layers = [[x[:tokens] for x in rows] for rows in self.layers]
        copied.scales = [{name: x[:tokens] for name, x in blocks.items()} for blocks in self.scales]
        return copied


class Values(NamedTuple):
    """What a step gives a layer: the words of its new rows, q, k and v as za_run takes them, and the oracle's out and
    lse, None where there is no query row."""

    words: Any
    q: Any
    k: Any
    v: Any
    want: Any


class Run:
    """Steps of several sequences in all layers, and what the oracle says of them."""

    def __init__(self, case: Case, page_size: int, rng: np.random.Generator) -> None:
        self.shape, self.kinds = za.AttnShape.parse(case.shape), storage_types(case.dtype)
        self.dtype, self.page_size, self.rng = case.dtype, page_size, rng
        self.strides = TILES
        if case.gap is not None:
            k, v = row_strides(self.shape, case.dtype)
            self.strides = k + case.gap, v + case.gap
        self.free = rng.permutation(TOKENS // page_size).tolist()
        heads = SLOPES[: self.shape.q_heads]
        self.options = {name: heads if value is True else value for name, value in case.options.items()}
        scales = rng.uniform(0.02, 0.2, (1, 2, self.shape.kv_heads)).astype(np.float32)
        if self.shape.latent:
            scales[:, 1] = scales[:, 0]
        self.scales = np.tile(scales, (LAYERS, 1, 1)) if any(kind.head_scale for kind in self.kinds) else None

    def values(self, sequence: Sequence, new: int, q_len: int, options: dict[str, Any]) -> Iterator[Values]:
        """By layer; the sequence has the new rows from then on."""
        shape, sizes = self.shape, (self.shape.head_dim, self.shape.v_head_dim)
        integer = options.get("arithmetic") == "integer"
        for layer in range(LAYERS):
            q = self.rng.standard_normal((q_len, shape.q_heads, shape.head_dim), np.float32)
            if integer:  # numbers in the middle of two that q is rounded to, and one that counts as 0
                whole, unit = rounded(q, -1)
                q[..., 1::2] = ((whole + np.float32(0.5)) * unit)[..., 1::2]
                q[..., :1] = np.float32(2.0**-70)
            scales = None if self.scales is None else self.scales[layer]
            k, v = (
                self.rng.standard_normal((new, shape.kv_heads, size), np.float32).astype(
                    NARROW.get(kind.name, np.float32)
                )
                for size, kind in zip(sizes, self.kinds, strict=True)
            )
            v = k[..., : shape.v_head_dim] if shape.latent else v
            words = np.zeros(0, np.uint32)
            if new:
                rows = stored(k, v, self.dtype, latent=shape.latent, scales=scales)
                both = zip(sequence.layers[layer], rows, strict=True)
                sequence.layers[layer] = [np.concatenate([old, added.astype(np.float32)]) for old, added in both]
                words = encode(k, v, shape, self.dtype, scales)
                if integer:
                    for name, x in stored_scales(k, v, self.dtype).items():
                        sequence.scales[layer][name] = np.concatenate([sequence.scales[layer][name], x])
                if self.strides != TILES:
                    words = from_rows(words, shape, self.dtype, self.strides)
            scoring = options | (sequence.scales[layer] if integer else {})
            want = za.reference.emulate(q, *sequence.layers[layer], **scoring) if q_len else None
            yield Values(words.reshape(-1), q, k, v, want)

    def step(self, parts: list[tuple[Any, ...]]) -> tuple[Any, list[Values]]:
        """(struct za_call, its values by layer) of parts (sequence, new rows, query rows, mask, not causal)."""
        requests, layers = [], [[] for _ in range(LAYERS)]
        for sequence, new, q_len, *more in parts:
            mask, noncausal = (*more, None, False)[:2] if len(more) != 1 else (more[0], False)
            while len(sequence.table) * self.page_size < len(sequence) + new:
                sequence.table.append(self.free.pop())
            fields = {"tokens": len(sequence) + new, "new_rows": new, "q_len": q_len, "noncausal": noncausal}
            requests.append({**fields, "mask": mask, "page_table": sequence.table})
            options = {**self.options, "mask": mask, "causal": not noncausal}
            for layer, values in enumerate(self.values(sequence, new, q_len, options)):
                layers[layer].append(values)
        whole = []
        for values in layers:
            *arrays, wants = zip(*values, strict=True)
            results = [np.concatenate(pieces) for pieces in zip(*filter(None, wants), strict=True)]
            whole.append(Values(*map(np.concatenate, arrays), results))
        left_out = {"arithmetic"} | ({"mask_slopes"} if all(request["mask"] is None for request in requests) else set())
        options = {name: value for name, value in self.options.items() if name not in left_out}
        return call_of(requests, **options), whole


def fill(words: Any, layer: Values) -> None:
    """Copy new rows and q to the begin of places."""
    words[0][: layer.words.size], words[1][: len(layer.q)] = layer.words, layer.q


def steps_of(run: Run) -> Iterator[list[tuple[Any, ...]]]:
    """A prompt, a second sequence, a row before the first token, decode steps of both, alone, on one table, with masks
    and rows that are not causal, and a chunk that no recorded step has room for, whose rows are many to copy and of
    which one sees nothing."""
    a, b, rng = Sequence(run.shape), Sequence(run.shape), run.rng
    yield [(a, 5, 3)]
    yield [(a, 1, 1), (b, 3, 2)]
    yield [(b, 5, 0)]
    yield [(Sequence(run.shape), 1, 3)]
    for n in (55, 1, 60):  # to the end of a leaf, over it, and far on
        for begin in range(0, n, NEW_ROWS):
            yield [(a, min(n - begin, NEW_ROWS), 1), (b, 0, 1)]
    mask = rng.standard_normal((2, MASK_KEYS), np.float32)
    mask[1, 2] = -np.inf
    yield [(a, 2, 2, mask), (b, 1, 2, None, True)]
    yield [(b, 0, 1)]
    wide = np.where(rng.random((17, 79)) < 0.3, np.float32(-np.inf), rng.standard_normal((17, 79), np.float32))
    wide[3] = -np.inf
    yield [(b, 70, 17, wide, True)]
    yield [(a, 0, 2), (b, 1, 1)]
    yield [(a, 0, 2), (a.first(20), 0, 1)]


class Checked:
    """The library with an engine's device and memory for a case, with a call recorded in each slot."""

    def __init__(self, loaded: c.CDLL, info: Any, case: Case, run: Run) -> None:
        self.run, shape = run, run.shape
        types = [DTYPES.index(kind.name) for kind in run.kinds]
        sizes = shape.q_heads, shape.kv_heads, shape.head_dim, shape.v_head_dim, shape.latent
        operands = EXACT.index(case.options.get("arithmetic", "canonical")), case.page_size
        strides = run.strides[0], 0 if shape.latent else run.strides[1]
        options = Options(*sizes, *types, *operands, *strides)
        self.owner = Owner(info, 8 << 20)
        scales = None if run.scales is None else [run.scales[:, i] for i in range(2)]
        if scales is not None:
            scales = [x if kind.head_scale else None for x, kind in zip(scales, run.kinds, strict=True)]
            scales[1] = None if shape.latent else scales[1]
        self.engine = Engine(loaded, self.owner, options, LAYERS, TOKENS // case.page_size, scales, steps=case.steps)
        self.c = self.engine.c
        self.shared = 0  # items of several rows, over all calls but recorded ones
        self.flags = [name in case.options for name in ("sinks", "softcap", *BIASES, "mask_slopes")]
        room = Room(SLOTS, 2, ROWS, NEW_ROWS, 256, 0, MASK_KEYS, *self.flags)
        self.prepared = c.c_void_p(self.c.za_prepare(self.engine.attn, c.byref(room)))
        assert self.prepared, self.engine.error
        self.places = [self.engine.places(shape, ROWS, NEW_ROWS, case.apart) for _ in range(LAYERS)]
        self.large = [self.engine.places(shape, 17, 70, case.apart)] * LAYERS
        self.recordings = [self.owner.commands() for _ in range(SLOTS)]
        for slot, (command, _) in enumerate(self.recordings):
            for layer, (places, _) in enumerate(self.places):
                arguments = slot, c.c_void_p(self.owner.number(command)), self.engine.cache, layer, c.byref(places)
                assert self.c.za_record(self.prepared, *arguments), self.engine.error
            self.owner.end(command)

    def step(self, number: int, call: Any, layers: list[Values]) -> None:
        """In the command buffer of each slot by turns; every second step is one."""
        slot = number // 2 % SLOTS
        for (_, words), layer in zip(self.places, layers, strict=True):
            fill(words, layer)
        assert self.c.za_step(self.prepared, slot, c.byref(call)), self.engine.error
        self.owner.submit(self.recordings[slot][1])
        for (_, words), layer in zip(self.places, layers, strict=True):
            got, n = words[2:], len(layer.q)
            same([x[:n] for x in got], layer.want or [x[:0] for x in got], number)
            if not self.flags[0]:  # what further rows of the room have, which see no key
                assert not np.any(got[0][n:]) and np.all(got[1][n:] == -np.inf)

    def run_at(self, number: int, call: Any, layers: list[Values], large: bool = False) -> None:
        """Between buffers of the engine's."""
        for layer, ((places, words), inputs) in enumerate(
            zip(self.large if large else self.places, layers, strict=True)
        ):
            fill(words, inputs)
            assert self.c.za_run_at(self.engine.cache, layer, c.byref(call), c.byref(places)), self.engine.error
            self.shared += self.c.za_trace(self.engine.attn).shared
            if n := len(inputs.q):  # lse lies behind the room's rows, so that it is copied
                same([x[:n] for x in words[2:]], inputs.want, (number, layer))

    def run_host(self, number: int, call: Any, layers: list[Values]) -> None:
        """From host memory."""
        shape = self.run.shape
        for layer, inputs in enumerate(layers):
            out = np.empty((len(inputs.q), shape.q_heads, shape.v_head_dim), np.float32)
            lse = np.empty(out.shape[:2], np.float32)
            arrays = [np.ascontiguousarray(x) for x in (inputs.k, inputs.v, inputs.q)]
            data = Data(*map(address, arrays[:2]), False, *map(address, (arrays[2], out, lse)))
            data.v = None if shape.latent else data.v
            assert self.c.za_run(self.engine.cache, layer, c.byref(call), c.byref(data)), self.engine.error
            same((out, lse), inputs.want or (out, lse), (number, layer))
            self.shared += self.c.za_trace(self.engine.attn).shared

    def close(self) -> None:
        self.c.za_prepared_free(self.prepared)
        self.engine.close()
        self.owner.close()


def check_case(loaded: c.CDLL, info: Any, case: Case, seed: int = 0) -> None:
    """Every step of a case has the oracle's bits."""
    run = Run(case, case.page_size, np.random.default_rng(seed))
    checked = Checked(loaded, info, case, run)
    for number, parts in enumerate(steps_of(run)):
        call, layers = run.step(parts)
        large = any(new > NEW_ROWS or q_len > ROWS for _, new, q_len, *_ in parts)
        if large:
            checked.run_at(number, call, layers, large)
        ways = [checked.run_host] if large else [checked.step, checked.run_host, checked.step, checked.run_at]
        ways[number % len(ways)](number, call, layers)
    units = case.options.get("arithmetic") == "integer" and has_int8_units(info)
    assert bool(checked.shared) == (units and os.environ.get("ZINC_ATTN_UNITS") == "1")
    checked.close()
