"""Random operations on caches of a device, held against lists of rows in NumPy and ``reference.emulate``, bit for bit.

An operation is a method of ``Machine`` that WEIGHTS names: an append, a call on one sequence or on a batch, a fork, a
cut, a tree's path, a file, with Kompute a recorded step and so on. Any of them may be made to fail once in the runtime,
or be cut short by an interrupt before an opcode, twice in a row too. Whatever happens, each sequence holds afterwards
the rows from before the operation or those from behind it, in all sequences of a batch alike; no page is lost, and all
results have the oracle's bits.

A default run makes about 1,000 operations on the processor and 500 on each dispatcher, always the same ones; --full
makes 20,000 random ones per driver. ZINC_ATTN_FUZZ_SECONDS=3600 runs random ones for that long on each driver that -k
selects (SwiftShader among them).
"""

import functools
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from cache_rows import Twin, done_or_not_done, new_q
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from interrupts import Fault, Interrupter, files
from page_tables import check_counts
from support import CPU_NATIVE, DRIVERS, FULL, RUNTIMES, open_device

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.cache import rows
from zinc_attn.cache.pages import CapacityError, StepError
from zinc_attn.cache.sequence_pages import SequencePages
from zinc_attn.cache.transaction import Transaction

SECONDS = float(os.environ.get("ZINC_ATTN_FUZZ_SECONDS", "0"))
EVERY_DRIVER = FULL or SECONDS > 0
SHAPE, LAYERS, MOST = za.AttnShape(6, 2, 64), 2, 6  # MOST: sequences of a cache
CAPACITY, PROMPT = 1024, 520  # tokens of a cache, and of its first sequence: a node that forks share
WHERE = files("cache", "decode", "planning", "runtime/vulkan", "runtime/kompute")
KINDS = [("f16", 1, "tiles"), ("f32", 64, "tiles"), ("bf16", 256, "NHD"), ("q8_0", 2, "NHD")]
if EVERY_DRIVER:
    KINDS += [("f16", 256, "NHD"), ("f32", 16, "NHD"), ("bf16", 4, "tiles"), ("q8_0", 64, "tiles")]
SINKS = np.array([0.5, -1.5, 3.0, 0.0, -8.0, 1.0], np.float32)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_splits": 3, "cascade": True},
    {"split_size": 100, "cascade": False, "window": [None, 70]},
    {"cascade": True, "sinks": [SINKS, None]},
    {"num_splits": 2, "softcap": 2.0, "arithmetic": "fused", "sinks": [SINKS, -SINKS]},
]
INJECTED = "injected"

WEIGHTS = {
    **{"step": 6, "batch": 4, "append": 2, "attend": 3, "fork": 3, "keep": 3, "truncate": 2, "retract": 2},
    **{"partial": 2, "recorded": 2, "through_a_file": 4, "free": 1, "begin": 1, "another_attention": 1, "reopen": 0.5},
}


@dataclass(eq=False)
class World:
    """A cache, its Attentions with the number of their options, and its sequences."""

    cache: Any
    dtype: str
    attns: list[tuple[Any, int]] = field(default_factory=list)
    models: list[Twin] = field(default_factory=list)


class Cut(Exception):
    """The operation was failed or interrupted by the test; what it did is seen from the lengths."""


class Machine:
    """Up to two caches on ``device``; ``done`` counts the operations by their outcome, ``draw`` chooses of one."""

    device: ClassVar[Any]
    manager: ClassVar[Any]  # of the device where it is a host's own, for recorded steps; or None
    done: ClassVar[Counter[str]]

    draw: np.random.Generator
    kept: BaseException | None = None  # an interrupt

    def __init__(self, kind: int) -> None:
        self.worlds: list[World] = []
        self.serial = 0
        self.folder = Path(tempfile.mkdtemp())
        self.open(kind)

    def close(self) -> None:
        for world in self.worlds:
            world.cache.close()
        shutil.rmtree(self.folder)

    def operate(self, number: int) -> None:
        """An operation by its number, 0 for none; it ends where a fault cuts it short."""
        if number:
            self.draw = np.random.default_rng(number)
            weights = np.array([*WEIGHTS.values()])
            with suppress(Cut):
                getattr(self, self.draw.choice([*WEIGHTS], p=weights / weights.sum()))()
            self.books()

    # --- helpers ------------------------------------------------------------------------------------------

    def picks(self, count: int) -> list[int]:
        found: list[int] = self.draw.integers(0, 12, count).tolist()
        return found

    def below(self, end: int) -> int:
        return int(self.draw.integers(end))

    def count(self) -> int:
        """Of rows."""
        return (1, 1 + self.below(40), 60 + self.below(141))[self.below(3)]

    def fault(self) -> Any:
        """None; the n-th run of the runtime fails, before or after it; an interrupt before an opcode; and a second."""
        kinds = [
            *[None] * 6,
            *(("run", n, bool(self.below(2))) for n in (0, self.below(4))),
            *(("opcode", self.below(end)) for end in (100, 300, 1000, 3000, 10000)),
            *(("opcode", self.below(end), 1 + self.below(60)) for end in (300, 3000)),
        ]
        return kinds[self.below(len(kinds))]

    def open(self, kind):
        dtype, page_size, kv_layout = KINDS[kind % len(KINDS)]
        order = np.random.default_rng(kind).permutation(CAPACITY // page_size)
        options = {"page_order": order, "kv_layout": kv_layout}
        cache = za.KVCache(self.device, SHAPE, LAYERS, CAPACITY, dtype, page_size, MOST, **options)
        self.worlds.append(World(cache, dtype))
        for option in (kind % len(OPTIONS), (kind + 1) % len(OPTIONS)):
            self.worlds[-1].attns.append((za.Attention(cache, **OPTIONS[option]), option))
        self.start(self.worlds[-1]).append(PROMPT)

    def start(self, world: World) -> Twin:
        """A new sequence."""
        self.serial += 1
        world.models.append(Twin(world.attns[0][0], self.serial))
        return world.models[-1]

    def world(self, pick: int) -> World:
        return self.worlds[pick % len(self.worlds)]

    def model(self, world: World, pick: int) -> Twin:
        return world.models[pick % len(world.models)] if world.models else self.start(world)

    def attempt(self, name: str, call: Callable[[], Any], fault: Any, *expected: type[Exception]) -> Any:
        """What ``call`` returns, or the error where it is one of ``expected``. Cut: the test made it fail."""
        runtime = self.device.runtime
        interrupter = Interrupter(WHERE)
        kind, *moment = fault or (None,)
        if kind == "opcode":
            interrupter = Interrupter(WHERE, moment[0], *(moment[0] + more for more in moment[1:]))
        if kind == "run":
            failing = Fault(errors.DeviceMemoryError, moment[1])
            failing.at(moment[0])
            for name_of in ("run", "start"):
                setattr(runtime, name_of, failing.wrap(getattr(runtime, name_of)))
        try:
            result = interrupter.run(call) if interrupter.numbers else call()
            self.done[name] += 1
            return result
        except expected as error:
            self.done[f"{name}: {type(error).__name__}"] += 1
            return error.with_traceback(None)  # whose frames hold sequences
        except errors.DeviceMemoryError as error:
            assert str(error) == INJECTED
            self.done[f"{name}: failed"] += 1
            self.settle()
            raise Cut from None
        except KeyboardInterrupt as error:
            assert interrupter.raised
            self.done[f"{name}: interrupted"] += 1
            # as sys.last_exc keeps its frames, and what they hold: of these, a sequence that nobody else has
            self.kept = error if name not in ("fork", "load", "new") and self.below(3) == 0 else None
            self.settle()
            raise Cut from None
        finally:
            vars(runtime).pop("run", None)
            vars(runtime).pop("start", None)

    def settle(self) -> None:
        """What an interrupt left is completed or given back, as a cache's next call does."""
        for world in self.worlds:
            with world.cache.lock:
                world.cache.settle()

    @staticmethod
    def legal(model: Twin, layer: int | None, n: int) -> bool:
        lengths = model.sequence.lengths
        low, high = min(lengths), max(lengths)
        return low == high or (layer is not None and lengths[layer] == low and n == high - low)

    @staticmethod
    def need(models: list[Twin], layer: int, n: int) -> int:
        """Pages that a legal call takes: all that write to a page copy it, but for one where nobody else holds it."""
        cache = models[0].cache
        size, held = cache.pool.page_size, [sequence.pages.table for sequence in cache.sequences]
        need, writers = 0, Counter[int]()
        for model in models:
            lengths, pages = model.sequence.lengths, model.sequence.pages.table
            need += -(-(lengths[layer] + n) // size) - len(pages)
            if lengths[layer] % size and len(set(lengths)) == 1:
                writers[pages[-1]] += 1
        return need + sum(count - (sum(page in one for one in held) == count) for page, count in writers.items())

    def grow(
        self,
        name: str,
        models: list[Twin],
        layer: int | None,
        n: int,
        q_len: int,
        call: Callable[[Any, Any, Any], Any],
        fault: Any,
        option: int = -1,
    ) -> Any:
        """``call`` appends rows to a layer of each of ``models``, or to all layers of one, and has the oracle's bits.

        call: of q, k and v of each model or layer, which are returned; None where it was refused or cut short. option:
        its outs and lses are compared.
        """
        legal, pool = all(self.legal(model, layer, n) for model in models), models[0].sequence.pages.pool
        spare = pool.free_pages - self.need(models, layer or 0, n) if legal else 0
        full, others, filler = spare < 0, Transaction(), SequencePages(pool, 1)
        if spare > 0 and self.below(2):  # so that the call finds not a page more than it needs
            others.reserve(filler, 0, spare * pool.page_size)
        before = [list(model.held) for model in models]
        try:
            with done_or_not_done(models):
                layers = range(LAYERS) if layer is None else [layer]
                new = [model.new(i, n, q_len) for model in models for i in layers]
                columns = [list(column) for column in zip(*new, strict=True)]
                outcome = self.attempt(name, lambda: call(*columns), fault, CapacityError, StepError)
        except Cut:
            return None
        finally:
            others.rollback()
        if isinstance(outcome, Exception):
            assert not legal if isinstance(outcome, StepError) else full
            for model, held in zip(models, before, strict=True):
                model.held = held
            return None
        assert legal and not full
        for model, q, *got in zip(models, columns[0], *outcome, strict=True) if option >= 0 else ():
            self.check(model, layer, q, got, option)
        return columns

    @staticmethod
    def check(model: Twin, layer: int, q: Any, got: Any, option: int) -> None:
        told = ("window", "softcap", "sinks", "arithmetic")
        model.scoring = {name: value for name, value in OPTIONS[option].items() if name in told}
        model.check(layer, q, got, option)

    # --- operations ---------------------------------------------------------------------------------------

    def begin(self):
        world, fault = self.world(self.below(12)), self.fault()
        full = len(world.models) >= MOST
        self.serial += 1
        result = self.attempt("new", lambda: Twin(world.attns[0][0], self.serial), fault, errors.LimitError)
        assert full == isinstance(result, errors.LimitError)
        if not full:
            world.models.append(result)

    def append(self):
        (pick, which), layer, n, fault = self.picks(2), self.below(LAYERS), self.count(), self.fault()
        world = self.world(pick)
        model = self.model(world, which)
        behind = max(model.sequence.lengths) - model.sequence.lengths[layer]
        self.grow("append", [model], layer, behind if behind and n % 8 else n, 0, self.appends(model, layer), fault)

    @staticmethod
    def appends(model: Twin, layer: int) -> Callable[..., None]:
        return lambda _, k, v: model.cache.append(model.sequence, layer, *k, *v)

    def step(self):
        """Rows for every layer, the fault at one of them: the ordinary decode step, or a chunk of a prompt."""
        (pick, which, attn), n, q_len, fault = self.picks(3), self.count(), (1, 1, 2, 5)[self.below(4)], self.fault()
        world = self.world(pick)
        model, (called, option) = self.model(world, which), world.attns[attn % len(world.attns)]
        lengths = model.sequence.lengths
        for layer in sorted(range(LAYERS), key=lambda i: (i + pick) % LAYERS):
            count = max(lengths) - lengths[layer] if min(lengths) < max(lengths) else n
            if not count:
                continue

            def call(q: Any, k: Any, v: Any, layer: int = layer) -> Any:
                fields = {"k": k[0], "v": v[0], "return_lse": True, "allow_empty": True}
                if which % 2:
                    return [[x] for x in called.submit(q[0], model.sequence, layer, **fields).result()]
                return [[x] for x in called(q[0], model.sequence, layer, **fields)]

            self.grow("step", [model], layer, count, count if q_len == 5 else q_len, call, fault, option)
            fault = None

    def batch(self):
        """Some sequences, or one with those that share its last page, all of them or not."""
        (pick, which, attn), layer, n = self.picks(3), self.below(LAYERS), (1, 1, 3, 30)[self.below(4)]
        fault = self.fault()
        world = self.world(pick)
        called, option = world.attns[attn % len(world.attns)]
        models = world.models[which % max(len(world.models), 1) :] + world.models[: which % max(len(world.models), 1)]
        if which % 3 and models:
            if which % 3 == 2 and len(models) < MOST and len(set(models[0].sequence.lengths)) == 1:
                models.append(models[0].fork())
                world.models.append(models[-1])
            last = models[0].sequence.pages.table[-1:]
            models = [model for model in models if set(last) <= set(model.sequence.pages.table)]
        models = [model for model in models if self.legal(model, layer, n)][: 1 + pick % 6]
        if models:
            seqs, given = [model.sequence for model in models], {"return_lse": True, "allow_empty": True}
            call = lambda q, k, v: called(q, seqs, layer, k=k, v=v, **given)  # noqa: E731
            self.grow("batch", models, layer, n, 1 + pick % 2, call, fault, option)

    def attend(self):
        (pick, attn), layer, q_len, fault = self.picks(2), self.below(LAYERS), 1 + self.below(5), self.fault()
        world = self.world(pick)
        called, option = world.attns[attn % len(world.attns)]
        models = world.models[pick % 3 :] or [self.model(world, 0)]
        q, seqs = [new_q(self.draw, q_len, SHAPE) for _ in models], [model.sequence for model in models]
        blind, allowed = any(q_len > seq.lengths[layer] for seq in seqs), bool(pick % 2)
        outs = [np.full(one.shape, 7, np.float32) for one in q] if attn % 2 else None
        call = functools.partial(called, q, seqs, layer, return_lse=True, out=outs, allow_empty=allowed)
        outcome = self.attempt("attend", call, fault, errors.ArgumentError)
        assert isinstance(outcome, errors.ArgumentError) == (blind and not allowed)
        if isinstance(outcome, errors.ArgumentError):
            assert all(np.all(out == 7) for out in outs or [])
            return
        for model, one, *got in zip(models, q, *outcome, strict=True):
            self.check(model, layer, one, got, option)

    def partial(self):
        (pick, which, attn), n, layer, fault = self.picks(3), self.count(), self.below(LAYERS), self.fault()
        world = self.world(pick)
        model, (called, option) = self.model(world, which), world.attns[attn % len(world.attns)]

        def call(q: Any, k: Any, v: Any) -> Any:
            return [[x] for x in za.fold([called.partial(*q, model.sequence, layer, *k, *v)])]

        self.grow("partial", [model], layer, n, 1 + n % 3, call, fault, option)

    def fork(self):
        (pick, which), fault = self.picks(2), self.fault()
        world = self.world(pick)
        model = self.model(world, which)
        outcome = self.attempt("fork", model.sequence.fork, fault, StepError, errors.LimitError)
        if isinstance(outcome, StepError):
            assert len(set(model.sequence.lengths)) > 1
        elif isinstance(outcome, errors.LimitError):
            assert len(world.models) >= MOST
        else:
            world.models.append(model.other(outcome))

    def recorded(self):
        """Both layers recorded in a sequence of the host's, and some steps, the fault in one of them."""
        (pick, which, attn), steps, fault = self.picks(3), 1 + self.below(3), self.fault()
        if self.manager is None:
            return
        import kp

        world = self.world(pick)
        model, (called, option) = self.model(world, which), world.attns[attn % len(world.attns)]
        q = self.manager.tensor_t(np.zeros(6 * 64, np.float32))
        new = [self.manager.tensor_t(np.zeros(world.cache.layout.row_words, np.uint32)) for _ in range(LAYERS)]
        sequence = self.manager.sequence()
        sequence.record(kp.OpTensorSyncDevice([q, *new]))
        first, *later = calls = [called.record(sequence, q, model.sequence, i, new[i]) for i in range(LAYERS)]
        for index in range(steps):
            cause = fault if index == which % steps else None

            def call(queries: Any, ks: Any, vs: Any, cause: Any = cause) -> None:
                q.data()[:] = queries[0].reshape(-1)
                for tensor, *pair in zip(new, ks, vs, strict=True):
                    k, v = (rows.stored_values("k", x, world.dtype)[0] for x in pair)
                    words = world.cache.layout.to_device(rows.encode(k, v, SHAPE, world.dtype))
                    tensor.data()[:] = words.reshape(-1)
                with first.step(*later):
                    sequence.eval()
                    if cause and cause[0] == "run":
                        raise errors.DeviceMemoryError(INJECTED)

            if given := self.grow("recorded", [model], None, 1, 1, call, cause):
                for layer, recorded_call in enumerate(calls):
                    out, lse = np.split(recorded_call.out.data().view(np.float32), [6 * 64])
                    got = out.reshape(1, 6, 64), lse[:6].reshape(1, 6)
                    self.check(model, layer, given[0][0], got, option)
        for recorded_call in calls:
            recorded_call.close()

    def shrink(self, name: str, model: Twin, call: Callable[[], object], fault: Any, *expected: Any) -> Any:
        before = list(model.held)
        try:
            with done_or_not_done([model]):
                outcome = self.attempt(name, call, fault, *expected)
        except Cut:
            return None
        if isinstance(outcome, Exception):
            model.held = before
        return outcome

    def truncate(self):
        (pick, which), n, fault = self.picks(2), self.below(701), self.fault()
        model = self.model(self.world(pick), which)
        least = min(model.sequence.lengths)
        n = n if n <= least else max(least - n % 5, 0)
        self.shrink("truncate", model, lambda: model.truncate(n), fault)

    def keep(self):
        """Tokens of all layers, and some of these and of those before them."""
        (pick, which), tree, last, fault = self.picks(2), self.count(), self.below(91), self.fault()
        share = (0.1, 0.5, 1)[self.below(3)]
        world = self.world(pick)
        model = self.model(world, which)
        for layer in range(LAYERS if len(set(model.sequence.lengths)) == 1 else 0):
            self.grow("tree", [model], layer, tree, 0, self.appends(model, layer), None)
        n, apart = min(model.sequence.lengths), len(set(model.sequence.lengths)) > 1
        last, pool = min(last, n), model.sequence.pages.pool
        kept = np.flatnonzero(self.draw.random(last) < share)
        moved = kept[kept != np.arange(len(kept))]
        end = n - last + len(kept)
        need = pool.pages_for(end) - (end - len(moved)) // pool.page_size if len(moved) else 0
        full = not apart and need > pool.free_pages
        result = self.shrink("keep", model, lambda: model.keep(kept, last), fault, StepError, CapacityError)
        if fault is None:
            assert isinstance(result, StepError) == apart and isinstance(result, CapacityError) == full

    def retract(self):
        (pick, which), layer, n, fault = self.picks(2), self.below(LAYERS), self.below(21), self.fault()
        model = self.model(self.world(pick), which)
        n = max(model.sequence.lengths[layer] - n, 0)

        def call() -> None:
            model.held[layer] = tuple(x[:n] for x in model.held[layer])
            model.sequence.retract(layer, n)

        self.shrink("retract", model, call, fault, StepError)

    def free(self):
        (pick, which), drop, fault = self.picks(2), self.below(2), self.fault()
        world = self.world(pick)
        model = self.model(world, which)
        if drop:
            self.done["drop"] += 1
        else:
            try:
                self.attempt("free", model.sequence.free, fault)
            except Cut:
                if not model.sequence.pages.closed:
                    return
        world.models.remove(model)
        if drop and pick % 2:  # before anything else looks at the books
            del model
            self.start(world)

    def through_a_file(self):
        (pick, which, other), fault = self.picks(3), self.fault()
        world, target = self.world(pick), self.world(other)
        model, path = self.model(world, which), self.folder / "sequence"
        apart = len(set(model.sequence.lengths)) > 1  # in the middle of a step
        cause, refusal = None if other % 2 else fault, (StepError,) if apart else ()
        if isinstance(self.attempt("save", lambda: model.sequence.save(path), cause, *refusal), Exception):
            return
        assert not apart
        expected = [CapacityError, errors.LimitError]
        expected += [errors.ArgumentError] * (world.dtype != target.dtype)
        result = self.attempt("load", lambda: target.cache.load(path), fault if other % 2 else None, *expected)
        if isinstance(result, Exception):
            return
        assert world.dtype == target.dtype
        target.models.append(model.other(result, target.attns[0][0]))

    def reopen(self):
        """A second cache, or the older one closed and another in its place."""
        if len(self.worlds) == 2:
            old = self.worlds.pop(0)
            old.cache.close()
            result = self.attempt("closed", old.cache.new_sequence, None, errors.ClosedError)
            assert isinstance(result, errors.ClosedError)
        self.open(self.below(12))

    def another_attention(self):
        """An Attention closed, to be used again, and perhaps replaced by one with other options."""
        (pick, attn, option), fault = self.picks(3), self.fault()
        world = self.world(pick)
        at = attn % len(world.attns)
        self.attempt("close attention", world.attns[at][0].close, fault)
        if option % 2:
            option %= len(OPTIONS)
            world.attns[at] = za.Attention(world.cache, **OPTIONS[option]), option

    # --- what always holds --------------------------------------------------------------------------------

    def books(self) -> None:
        self.settle()
        self.kept = None
        for world in self.worlds:
            with ThreadPoolExecutor(1) as thread:  # another thread gets the lock
                assert thread.submit(world.cache.lock.acquire, timeout=10).result()
                thread.submit(world.cache.lock.release).result()
            live = [model.sequence for model in world.models]
            assert set(world.cache.sequences) == set(live)
            check_counts(world.cache.pool, [sequence.pages for sequence in live])
            pages = {page for sequence in live for page in sequence.pages.table}
            assert world.cache.pool.num_pages - world.cache.pool.free_pages == len(pages)
            for model in world.models:
                assert model.sequence.lengths == tuple(len(k) for k, _ in model.held)


def fuzz(device: Any, manager: Any, examples: int, steps: int, derandomize: bool) -> Counter[str]:
    """Run the machine on a device; the operations by their outcome."""
    machine_class = type("OnThisDevice", (Machine,), {"device": device, "manager": manager, "done": Counter()})

    @settings(
        max_examples=examples,
        derandomize=derandomize,
        deadline=None,
        database=None,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(numbers=st.lists(st.integers(0, 2**64 - 1), min_size=steps, max_size=steps))
    def run(numbers: list[int]) -> None:
        with closing(machine_class(numbers[0] % 12)) as machine:
            for number in numbers[1:]:
                machine.operate(number)

    run()
    done: Counter[str] = machine_class.done
    return done


@contextmanager
def hosted(driver: str, runtime: str) -> Iterator[tuple[za.Device, Any]]:
    """A device, and with Kompute the host's manager that it is on."""
    with open_device(driver, runtime) as device:
        if runtime != "kompute":
            yield device, None
            return
        import kp

        manager = kp.Manager(device.info.index)
        with za.Device.from_kompute(manager, device.info.index) as own:
            yield own, manager


RUN_ON = [*(DRIVERS if EVERY_DRIVER else DRIVERS[: len(RUNTIMES)]), CPU_NATIVE]


@pytest.mark.parametrize("driver", RUN_ON, ids="-".join)
def test_random_operations_hold_what_lists_hold(driver: tuple[str, str]) -> None:
    examples = 200 if FULL else 10 if driver == CPU_NATIVE else 5
    with hosted(*driver) as (device, manager):
        done = fuzz(device, manager, examples, 100, derandomize=not EVERY_DRIVER)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            done += fuzz(device, manager, 50, 100, derandomize=False)
            print(f"{'-'.join(driver)}: {done.total():,} operations, {dict(done)}", flush=True)
        outcomes = {name.partition(": ")[2] for name in done}
        assert done.total() > 60 * examples and outcomes >= {"failed", "interrupted", "StepError", "CapacityError"}
        made = {"step", "batch", "append", "attend", "partial", "fork", "keep", "truncate", "retract", "free", "drop"}
        made |= {"new", "save", "load", "close attention"} | ({"recorded"} if driver[1] == "kompute" else set())
        assert made <= set(done), done
