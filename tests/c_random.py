"""Random calls of the C library, most of them right and many wrong: ``c_random.py LIBRARY MANIFEST DEVICE SEED N``.

K and V lie in memory that this program sees, in pages of one token, so after every call that gives results the oracle
is asked about what is there. A call that must fail gives false and a text; one that may fail gives either. Prints how
many calls there were of each kind and code. Made to run under the sanitizers.
"""

from __future__ import annotations

import ctypes as c
import sys
from collections import Counter
from typing import Any

import numpy as np
from c_host import CODES, CachePlaces, Data, Options, Place, Places, Room
from engine import Engine, Owner, address, call_of

import zinc_attn as za

SHAPE, LAYERS, PAGES = za.AttnShape(2, 1, 16), 2, 48
HUGE = (0, 1, 2, 7, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 24) + 1)


class WrongAnswer(Exception):
    """A result that is not the oracle's, or a failure where there is none."""


class Caller:
    """The library on an engine's device, and what may be done next."""

    def __init__(self, library: str, manifest: str, name: str, seed: int) -> None:
        self.rng, self.counts = np.random.default_rng(seed), Counter[str]()
        info = next(one for one in za.list_devices() if name in one.name)
        self.owner = Owner(info, 8 << 20)
        self.options = Options(manifest.encode(), 2, 1, 16, 0, False, 1, 0)
        self.engine = Engine(c.CDLL(library), self.owner, self.options, LAYERS, PAGES)
        self.c, self.prepared, self.recorded = self.engine.c, None, {}
        places = self.engine.cache_places
        self.k, self.v = (
            self.owner.words[at.offset // 4 : (at.offset + at.size) // 4].view(np.float32).reshape(LAYERS, PAGES, 1, 16)
            for at in (places.k, places.v)
        )
        self.k[:], self.v[:] = self.rng.standard_normal((2, *self.k.shape), np.float32)
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
            tokens = int(self.rng.integers(0, len(pages) // 2 + 1))
            table, pages = pages[:tokens], pages[tokens:]
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

    def options_of(self) -> dict[str, Any]:
        slopes = self.rng.random(2, np.float32)
        every = {"window": 5, "softcap": 3.0, "sinks": slopes, "alibi": slopes, "splits": 3}
        return {name: value for name, value in every.items() if self.chance(4)}

    def expect(self, requests: Any, options: Any, layer: int, q: Any, got: Any, rows: Any, what: str) -> None:
        """That new rows are in the cache, and results those of the oracle."""
        at = new = 0
        given = {name: value for name, value in options.items() if name != "splits"}
        for one in requests:
            table, n, r = one["page_table"], one["new_rows"], one["q_len"]
            k, v = self.k[layer, table], self.v[layer, table]
            there = np.concatenate([k[len(k) - n :], v[len(v) - n :]], axis=2).reshape(-1)
            if not np.array_equal(there, rows[new * 32 : (new + n) * 32]):
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
        """q (rows, 2, 16) and the words of new rows as floats."""
        rows, new = (sum(one[name] % (1 << 20) for one in requests) for name in ("q_len", "new_rows"))
        return self.rng.standard_normal((rows, 2, 16), np.float32), self.rng.standard_normal(new * 32, np.float32)

    def run(self) -> None:
        requests, wrong = self.requests()
        options, (q, rows) = self.options_of(), self.inputs(requests)
        layer, data = int(self.rng.integers(LAYERS)), Data()
        k, v = (np.ascontiguousarray(x) for x in rows.reshape(-1, 2, 16).transpose(1, 0, 2))
        out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
        data.k, data.v, data.q, data.out, data.lse = map(address, (k, v, q, out, lse))
        must_fail = wrong
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
        options, (q, rows) = self.options_of(), self.inputs(requests)
        layer, places = int(self.rng.integers(LAYERS)), self.places
        if len(q) and self.chance(6):
            places, wrong = self.broken(places), True
        if len(q) <= 8 and rows.size <= 8 * 32:
            self.words[0][: rows.size], self.words[1][: q.size] = rows.view(np.uint32), q.reshape(-1).view(np.uint32)
        call = call_of(requests, **options)
        if self.said("run_at", self.c.za_run_at(self.engine.cache, layer, c.byref(call), c.byref(places)), wrong):
            self.expect(requests, options, layer, q, self.results(len(q)), rows, "run_at")

    def results(self, rows: int) -> tuple[Any, Any]:
        out, lse = (words.view(np.float32) for words in self.words[2:])
        return out[: rows * 32].reshape(rows, 2, 16), lse[: rows * 2].reshape(rows, 2)

    # --- recorded calls --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        numbers = [2, 3, 8, 8, PAGES, 0, PAGES, True, self.chance(3), self.chance(3)]
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
        slot = int(self.rng.choice(list(self.recorded)))
        requests, wrong = self.requests()
        options, (q, rows) = self.options_of(), self.inputs(requests)
        options.pop("splits", None)
        if not self.chance(8):  # what the room says
            given = {"softcap": (self.room[8], 3.0), "alibi": (self.room[9], self.rng.random(2, np.float32))}
            options = {name: value for name, value in options.items() if name not in given}
            options |= {name: value for name, (there, value) in given.items() if there}
        _, alibi, _, softcap = (name in options for name in ("sinks", "alibi", "window", "softcap"))
        mismatch = (softcap, alibi) != (self.room[8], self.room[9])
        call = call_of(requests, **options)
        if not self.said("step", self.c.za_step(self.prepared, slot, c.byref(call)), wrong or mismatch):
            return
        layer, submit = self.recorded[slot]
        self.words[0][: rows.size], self.words[1][: q.size] = rows.view(np.uint32), q.reshape(-1).view(np.uint32)
        self.owner.submit(submit)
        self.expect(requests, options, layer, q, self.results(len(q)), rows, "step")

    # --- objects ---------------------------------------------------------------------------------------------

    def cache(self) -> None:
        layers, pages = (int(x) for x in self.rng.choice([*HUGE, 3, 4], 2))
        if self.chance(2):
            made = self.c.za_cache_make(self.engine.attn, layers, pages, None, None)
        else:
            at = Place(
                self.owner.buffer, int(self.rng.choice([0, 4, 256, 1 << 50])), int(self.rng.choice([0, 256, 4096]))
            )
            made = self.c.za_cache_from(self.engine.attn, c.byref(CachePlaces(layers, pages, at, self.places.q)))
        if self.said("cache", made):
            self.said("copy", self.c.za_copy_page(c.c_void_p(made), 0, pages - 1))
            self.c.za_cache_free(c.c_void_p(made))

    def copy(self) -> None:
        source, target = (int(x) for x in self.rng.integers(0, PAGES + 4, 2))
        before = self.k[:, min(source, PAGES - 1)].copy()
        ok = self.said("copy", self.c.za_copy_page(self.engine.cache, source, target), max(source, target) >= PAGES)
        if ok and not np.array_equal(self.k[:, target], before):
            raise WrongAnswer("copy")

    def open(self) -> None:
        options = Options.from_buffer_copy(self.options)
        name = str(self.rng.choice(["q_heads", "head_dim", "dtype", "v_dtype", "arithmetic", "manifest"]))
        setattr(options, name, None if name == "manifest" else int(self.rng.choice([0, 3, 99, 1 << 30])))
        made = self.c.za_open(self.engine.device, c.byref(options))
        if self.said("open", made):
            self.c.za_close(c.c_void_p(made))

    def device(self) -> None:
        name = str(self.rng.choice(["instance", "physical", "device", "queue", "get_proc", "family"]))
        host = self.owner.host(**{name: 77 if name == "family" else None})
        self.said("device_from", self.c.za_device_from(c.byref(host)), True)

    def close(self) -> None:
        self.c.za_prepared_free(self.prepared)
        self.engine.close()
        self.owner.close()


def main() -> None:
    library, manifest, name, seed, count = sys.argv[1:]
    caller = Caller(library, manifest, name, int(seed))
    kinds = {
        "run": 8,
        "run_at": 8,
        "step": 12,
        "record": 2,
        "prepare": 1,
        "cache": 2,
        "copy": 1,
        "open": 0.2,
        "device": 0.5,
    }
    weights = np.array([*kinds.values()], float)
    while sum(caller.counts.values()) < int(count):
        getattr(caller, caller.rng.choice([*kinds], p=weights / weights.sum()))()
    caller.close()
    print(sum(caller.counts.values()), "calls:", ", ".join(f"{k} {n}" for k, n in sorted(caller.counts.items())))


if __name__ == "__main__":
    main()
