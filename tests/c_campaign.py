"""The C library at length, made to run under the sanitizers: ``c_campaign.py LIBRARY DEVICE N COUNTS``.

The cases of ``c_cases``, FEW of them where COUNTS is not all. Then N random calls, most of them right and many wrong: K
and V lie in memory that this program sees, in tiles and in rows, so after every call that gives results the oracle is
asked about what is there. A call that must fail gives false and a text; one that may fail gives either. Then functions
of Vulkan fail as ``c_failures`` says, in the first call of each or in all. Prints how many calls there were of each
kind and code.
"""

from __future__ import annotations

import ctypes as c
import sys
from collections import Counter
from typing import Any

import numpy as np
from c_cases import CASES, FEW, check_case
from c_failures import HEADS, LAYERS, RESULTS, SHAPE, VALUES, WrongAnswer, failures
from c_host import CODES, CachePlaces, Data, Options, Place, Places, Room, declared
from engine import Engine, Owner, address, call_of

import zinc_attn as za

PAGES = 48
# Tokens of a page, bytes from a row to the next (0: tiles), rows from a token to the next and from a KV head
KINDS = ((1, 0, 0, 0), (1, 72, 0, 0), (1, 64, 1, LAYERS * PAGES), (4, 64, 3, 1))
FLAGS = "softcap", "alibi", "mask_slopes"
HUGE = (0, 1, 2, 7, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 24) + 1)


class Caller:
    """The library on an engine's device, and what may be done next."""

    def __init__(self, loaded: c.CDLL, info: Any, kind: tuple[int, ...], seed: int) -> None:
        self.rng, self.counts = np.random.default_rng(seed), Counter[str]()
        self.owner = Owner(info, 8 << 20)
        self.page_size, stride, *steps = kind
        self.options = Options(4, HEADS, 16, 0, False, 1, 0, 0, self.page_size, stride, stride)
        self.engine = Engine(loaded, self.owner, self.options, LAYERS, PAGES, steps=(steps[0], steps[1]))
        self.c, self.prepared, self.recorded = self.engine.c, None, {}
        self.contiguous = not any(steps)
        token, head = steps if any(steps) else (HEADS, 1)
        row, size = stride or 64, (LAYERS, PAGES, self.page_size, HEADS, 16)
        apart = [n * row for n in (PAGES * self.page_size * token, self.page_size * token, token, head)]
        places = self.engine.cache_places
        self.k, self.v = (
            np.lib.stride_tricks.as_strided(self.owner.words[at.offset // 4 :].view(np.float32), size, (*apart, 4))
            for at in (places.k, places.v)
        )
        self.k[:], self.v[:] = self.rng.standard_normal((2, *size), np.float32)
        self.places, self.words = self.engine.places(SHAPE, 8, 8)

    def chance(self, one_in: int) -> bool:
        return not self.rng.integers(one_in)

    def said(self, what: str, ok: Any, must_fail: bool = False) -> bool:
        """Count a call; whether it succeeded."""
        code = "ok" if ok else CODES[self.c.za_error_code()]
        self.counts[f"{what} {code}"] += 1
        if (must_fail and ok) or (not ok and (code == "ok" or not self.engine.error)):
            raise WrongAnswer(f"{what}: {code}, {self.engine.error}")
        return bool(ok)

    # --- calls -----------------------------------------------------------------------------------------------

    def requests(self, masks: bool = True) -> tuple[list[dict[str, Any]], bool]:
        """Requests, and whether one of them is wrong."""
        made: list[dict[str, Any]] = []
        wrong, pages = False, self.rng.permutation(PAGES).tolist()
        for _ in range(self.rng.integers(0, 4)):
            tokens = int(self.rng.integers(0, len(pages) * self.page_size // 2 + 1))
            used = -(-tokens // self.page_size)
            table, pages = pages[:used], pages[used:]
            new, q_len = int(self.rng.integers(0, min(tokens, 2) + 1)), int(self.rng.integers(0, 3))
            one = {"tokens": tokens, "page_table": table, "new_rows": new, "q_len": q_len, "noncausal": self.chance(3)}
            if masks and q_len and self.chance(2):
                one["mask"] = self.rng.standard_normal((q_len, int(self.rng.integers(0, tokens + 1))), np.float32)
                one["mask"][self.rng.random(one["mask"].shape) < 0.3] = -np.inf
            if self.chance(12):
                wrong, name = True, self.rng.choice(["tokens", "new_rows", "table"])
                if name == "table":
                    one["page_table"], one["tokens"] = [PAGES + int(self.rng.integers(5))], 1
                    one["new_rows"], one["mask"] = 0, None
                else:
                    one[name] = (1 << 24) + 1 if name == "tokens" else tokens + 1
            made.append(one)
        return made, wrong

    @staticmethod
    def masked(requests: Any) -> bool:
        return any(one.get("mask") is not None and one["mask"].size for one in requests)

    def loose(self, requests: Any, options: dict[str, Any]) -> bool:
        """Whether there are slopes of masks, and no mask, which is refused."""
        rows = any(one["q_len"] for one in requests)
        return "mask_slopes" in options and rows and not self.masked(requests)

    def options_of(self, requests: Any) -> dict[str, Any]:
        """The FLAGS, of which kernels are compiled, together or not at all; ``c_cases`` has each alone."""
        slopes = self.rng.random(4, np.float32)
        every = {"window": 5, "splits": 3, "sinks": slopes}
        some = {name: value for name, value in every.items() if self.chance(4)}
        flags = dict(zip(FLAGS, (3.0, slopes, slopes), strict=True)) if self.chance(4) else {}
        if not self.masked(requests) and not self.chance(8):
            flags.pop("mask_slopes", None)
        return some | flags

    def expect(self, requests: Any, options: Any, layer: int, q: Any, got: Any, rows: Any, what: str) -> None:
        """That new rows are in the cache, and results those of the oracle."""
        at = new = 0
        given = {name: value for name, value in options.items() if name != "splits"}
        for one in requests:
            table, n, r = one["page_table"], one["new_rows"], one["q_len"]
            k, v = (x[layer, table].reshape(-1, HEADS, 16)[: one["tokens"]] for x in (self.k, self.v))
            there = np.concatenate([k[len(k) - n :], v[len(v) - n :]], axis=2).reshape(-1)
            if not np.array_equal(there, rows[new * VALUES : (new + n) * VALUES]):
                raise WrongAnswer(f"{what}: rows")
            if r:
                mask = one.get("mask")
                mask = None if mask is None or not mask.size else mask
                want = za.reference.emulate(q[at : at + r], k, v, causal=not one["noncausal"], mask=mask, **given)
                for a, b in zip(got, want, strict=True):
                    if not np.array_equal(a[at : at + r].view(np.uint32), b.view(np.uint32)):
                        raise WrongAnswer(f"{what}: {one} {options}")
            at, new = at + r, new + n

    def inputs(self, requests: Any) -> tuple[Any, Any]:
        """q (rows, 4, 16) and the values of new rows, K and V of each KV head."""
        rows, new = (sum(one[name] % (1 << 20) for one in requests) for name in ("q_len", "new_rows"))
        return self.rng.standard_normal((rows, 4, 16), np.float32), self.rng.standard_normal(new * VALUES, np.float32)

    def fill(self, q: Any, rows: Any) -> None:
        """Write both to the places, which have room for 8 of each."""
        if len(q) <= 8 and rows.size <= 8 * VALUES:
            part = self.engine.info.row_words // 2  # words of K, or of V, of a new row
            words = self.words[0][: rows.size // 16 * part].reshape(-1, 2, part)
            words[:, :, :16] = rows.reshape(-1, 2, 16).view(np.uint32)
            self.words[1][: q.size] = q.reshape(-1).view(np.uint32)

    def run(self) -> None:
        requests, wrong = self.requests()
        options, (q, rows) = self.options_of(requests), self.inputs(requests)
        layer, data = int(self.rng.integers(LAYERS)), Data()
        k, v = (np.ascontiguousarray(x) for x in rows.reshape(-1, HEADS, 2, 16).transpose(2, 0, 1, 3))
        out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
        data.k, data.v, data.q, data.out, data.lse = map(address, (k, v, q, out, lse))
        must_fail = wrong or self.loose(requests, options)
        if self.chance(15):
            layer, must_fail = LAYERS, True
        if len(q) and self.chance(15):
            q.reshape(-1)[0], must_fail = np.nan, True
        if len(q) and self.chance(15):
            data.out, must_fail = None, True
        call = call_of(requests, **options)
        if self.said("run", self.c.za_run(self.engine.cache, layer, c.byref(call), c.byref(data)), must_fail):
            self.expect(requests, options, layer, q, (out, lse), rows, "run")

    def broken(self, places: Any) -> Any:
        """Places of which one is wrong."""
        copy = Places.from_buffer_copy(places)
        place = getattr(copy, self.rng.choice(["q", "out"]))
        how = int(self.rng.integers(5))
        if how == 0:
            place.buffer = None
        elif how == 1:
            place.offset += 2
        elif how == 2:
            place.size = 3
        elif how == 3:
            place.offset = int(self.rng.choice([1 << 40, (1 << 64) - 256]))
        else:
            copy.out = copy.q
        return copy

    def run_at(self) -> None:
        requests, wrong = self.requests()
        options, (q, rows) = self.options_of(requests), self.inputs(requests)
        layer, places = int(self.rng.integers(LAYERS)), self.places
        wrong = wrong or self.loose(requests, options)
        if len(q) and self.chance(6):
            places, wrong = self.broken(places), True
        self.fill(q, rows)
        call = call_of(requests, **options)
        if self.said("run_at", self.c.za_run_at(self.engine.cache, layer, c.byref(call), c.byref(places)), wrong):
            self.expect(requests, options, layer, q, self.results(len(q)), rows, "run_at")

    def results(self, rows: int) -> tuple[Any, Any]:
        out, lse = (words.view(np.float32) for words in self.words[2:])
        return out[: rows * VALUES].reshape(rows, 4, 16), lse[: rows * 4].reshape(rows, 4)

    # --- recorded calls --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        most = PAGES * self.page_size
        numbers = [2, 3, 8, 8, most, 0, most, True, *[self.chance(3)] * 3]
        wrong = self.chance(3)
        if wrong:
            numbers[int(self.rng.choice([0, 1, 2, 3, 4, 6]))] = int(self.rng.choice(HUGE))
        made = self.c.za_prepare(self.engine.attn, c.byref(Room(*numbers)))
        if self.said("prepare", made) and wrong:
            self.c.za_prepared_free(c.c_void_p(made))
        elif made:
            self.c.za_prepared_free(self.prepared)
            self.prepared, self.recorded, self.room = c.c_void_p(made), {}, numbers

    def record(self) -> None:
        if not self.prepared:
            return
        slot, layer, places = int(self.rng.integers(2)), int(self.rng.integers(LAYERS)), self.places
        wrong = self.chance(4)
        command, submit = self.owner.commands()
        if wrong:
            places = self.broken(places)
        elif self.chance(4):
            slot, wrong = 2, True
        elif self.chance(3) and slot in self.recorded:
            self.said("reset", self.c.za_reset(self.prepared, slot))
            self.recorded.pop(slot)
        given = slot, c.c_void_p(self.owner.number(command)), self.engine.cache, layer, c.byref(places)
        ok = self.said("record", self.c.za_record(self.prepared, *given), wrong)
        self.owner.end(command)
        if ok:
            self.recorded[slot] = layer, submit

    def step(self) -> None:
        if not self.recorded:
            return
        slot, (requests, wrong) = int(self.rng.choice(list(self.recorded))), self.requests()
        options, (q, rows) = self.options_of(requests), self.inputs(requests)
        options.pop("splits", None)
        if not self.chance(8):  # what the room says
            slopes = self.rng.random(4, np.float32)
            there = (FLAGS if self.masked(requests) else FLAGS[:2]) if all(self.room[8:]) else ()
            options = {name: value for name, value in options.items() if name not in FLAGS}
            options |= {name: 3.0 if name == "softcap" else slopes for name in there}
        mismatch = [name in options for name in FLAGS[:2]] != self.room[8:10]
        slopes = "mask_slopes" in options
        mismatch |= (slopes or self.masked(requests)) and slopes != self.room[10]
        mismatch |= self.loose(requests, options)
        call = call_of(requests, **options)
        if not self.said("step", self.c.za_step(self.prepared, slot, c.byref(call)), wrong or mismatch):
            return
        layer, submit = self.recorded[slot]
        self.fill(q, rows)
        self.owner.submit(submit)
        self.expect(requests, options, layer, q, self.results(len(q)), rows, "step")

    # --- objects ---------------------------------------------------------------------------------------------

    def cache(self) -> None:
        layers, pages = (int(x) for x in self.rng.choice([*HUGE, 3, 4], 2))
        if self.chance(2):
            made = self.c.za_cache_make(self.engine.attn, layers, pages, None, None)
        else:
            offset, size = int(self.rng.choice([0, 4, 256, 1 << 50])), int(self.rng.choice([0, 256, 4096]))
            at = Place(self.owner.buffer, offset, size)
            steps = (int(x) for x in self.rng.choice([0, 0, 1, 2, 1 << 31], 2))
            given = CachePlaces(layers, pages, at, self.places.q, None, None, *steps)
            made = self.c.za_cache_from(self.engine.attn, c.byref(given))
        if self.said("cache", made):
            self.said("copy", self.c.za_copy_page(c.c_void_p(made), 0, pages - 1))  # of no rows that lie apart
            self.c.za_cache_free(c.c_void_p(made))

    def copy(self) -> None:
        source, target = (int(x) for x in self.rng.integers(0, PAGES + 4, 2))
        before = self.k[:, min(source, PAGES - 1)].copy()
        wrong = max(source, target) >= PAGES or not self.contiguous
        ok = self.said("copy", self.c.za_copy_page(self.engine.cache, source, target), wrong)
        if ok and not np.array_equal(self.k[:, target], before):
            raise WrongAnswer("copy")

    def open(self) -> None:
        options = Options.from_buffer_copy(self.options)
        names = "q_heads head_dim dtype v_dtype arithmetic page_size k_stride v_stride"
        name = str(self.rng.choice(names.split()))
        setattr(options, name, int(self.rng.choice([0, 3, 99, 128, 1 << 30])))
        made = self.c.za_open(self.engine.device, c.byref(options))
        if self.said("open", made):
            self.c.za_close(c.c_void_p(made))

    def close(self) -> None:
        self.c.za_prepared_free(self.prepared)
        self.engine.close()
        self.owner.close()


# --- random calls --------------------------------------------------------------------------------------------

WEIGHTS = {"run": 8, "run_at": 8, "step": 12, "record": 2, "prepare": 1, "cache": 2, "copy": 1, "open": 0.2}


def random_calls(loaded: c.CDLL, info: Any, n: int) -> Counter[str]:
    found, weights = Counter[str](), np.array([*WEIGHTS.values()])
    for seed, kind in enumerate(KINDS):
        caller = Caller(loaded, info, kind, seed)
        while sum(caller.counts.values()) < n / len(KINDS):
            getattr(caller, caller.rng.choice([*WEIGHTS], p=weights / weights.sum()))()
        caller.close()
        found += caller.counts
    if missing := [name for name in ("run", "run_at", "step", "record", "prepare") if not found[f"{name} ok"]]:
        raise WrongAnswer(f"never made: {missing}")
    return found


def main() -> None:
    library, name, n, counts = sys.argv[1:]
    loaded, info = declared(c.CDLL(library)), next(one for one in za.list_devices() if name in one.name)
    for title in CASES if counts == "all" else FEW[:1]:
        try:
            check_case(loaded, info, CASES[title])
        except BaseException as error:
            raise WrongAnswer(title) from error
    found = random_calls(loaded, info, int(n))
    found += failures(loaded, info, dict.fromkeys(RESULTS) if counts == "all" else {-2: (1,)})
    print(sum(found.values()), "calls:", ", ".join(f"{k} {n}" for k, n in sorted(found.items())))


if __name__ == "__main__":
    main()
