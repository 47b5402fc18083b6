"""Ctrl-C between any two bytecodes: a KeyboardInterrupt before the n-th opcode that runs in chosen files.

CPython looks for signals where a function begins, where a C function returns, and at jumps backwards. Left out are
opcodes where none arrives and an exception would do harm:

- with which a ``with`` statement enters what a function returned: a file that it opened would be dropped. Behind a C
  function a signal can arrive, but what that made has no effect before ``__enter__``, or ends it when it is dropped.
- with which a ``with`` statement leaves its block normally, up to the call of ``__exit__``, that of a lock included.
- with which a handler begins and ends: the exception that is handled would leak.
"""

import dis
import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import zinc_attn

T = TypeVar("T")

PACKAGE = Path(zinc_attn.__file__).parent
_LEAVING = ("SWAP", "ROT_TWO", "POP_BLOCK", "LOAD_CONST", "DUP_TOP", "PRECALL", "NOP")
_ENTERING = ("BEFORE_WITH", "SETUP_WITH")
_HANDLING = ("PUSH_EXC_INFO", "WITH_EXCEPT_START", "POP_EXCEPT", "RERAISE", "NOP", "JUMP_FORWARD")


def files(*names: str) -> frozenset[str]:
    """The paths of modules of the package, as code objects name them; a folder stands for all modules in it."""
    paths = [
        path
        for name in names
        for path in ((PACKAGE / name).rglob("*.py") if (PACKAGE / name).is_dir() else [PACKAGE / name])
    ]
    assert paths and all(path.exists() for path in paths), names
    return frozenset(map(str, paths))


@cache
def _deferred(code: CodeType) -> frozenset[int]:
    """The offsets of the opcodes of ``code`` at which no signal can arrive and a lock or a file would be lost."""
    ops = list(dis.get_instructions(code))
    offsets: set[int] = set()
    for index, op in enumerate(ops):
        if op.opname in _ENTERING:
            offsets.add(op.offset)
        if op.opname in _HANDLING:
            offsets.add(op.offset)
            if ops[index - 1].opname == "COPY":
                offsets.add(ops[index - 1].offset)
        if op.opname not in ("CALL", "CALL_FUNCTION"):
            continue
        begin = index
        while begin and ops[begin - 1].opname in _LEAVING:
            begin -= 1
        nothing = [
            o for o in ops[begin:index] if (o.opname == "LOAD_CONST" and o.argval is None) or o.opname == "DUP_TOP"
        ]
        if len(nothing) >= 3:
            offsets.update(instruction.offset for instruction in ops[begin : index + 1])
    return frozenset(offsets)


class Interrupter:
    """Raises KeyboardInterrupt before the opcodes whose numbers are given, counted from 0 over the frames of ``where``.

    A trace function that raises is removed by the interpreter; a profile function then sets it again at the next call
    or return, so a second interrupt hits what runs after the first one.
    """

    def __init__(self, where: Collection[str], *arguments: int) -> None:
        self.where, self.numbers, self.seen, self.raised = where, sorted(arguments), 0, list[str]()

    def _local(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and frame.f_lasti not in _deferred(frame.f_code):
            self.seen += 1
            if self.numbers and self.seen > self.numbers[0]:
                self.numbers.pop(0)
                self.raised.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
                raise KeyboardInterrupt
        return self._local

    def _outer(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self.where:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._local

    def _again(self, frame: FrameType | None, event: str, arg: Any) -> None:
        if self.raised and self.numbers and sys.gettrace() is None:
            while frame is not None:
                if frame.f_code.co_filename in self.where:
                    frame.f_trace_opcodes, frame.f_trace_lines = True, False
                    frame.f_trace = self._local
                frame = frame.f_back
            sys.settrace(self._outer)

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Around what is to be interrupted."""
        old = sys.gettrace(), sys.getprofile()
        sys.setprofile(self._again if len(self.numbers) > 1 else None)
        sys.settrace(self._outer)
        try:
            yield
        finally:
            self.numbers.clear()  # first: the profile function sets the trace function again where more is to come
            sys.setprofile(old[1])
            sys.settrace(old[0])

    def run(self, call: Callable[[], T]) -> T:
        """``call`` under interrupts; KeyboardInterrupt where one came through."""
        with self.armed():
            return call()


class Fault:
    """Raises ``error`` at the n-th call of the runtime's methods, before or after it is made."""

    def __init__(self, error: type[BaseException], after: bool) -> None:
        self.error, self.after, self.left, self.hit = error, after, -1, False

    def wrap(self, method: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            due = self.left == 0
            self.left -= 1
            result = None if due and not self.after else method(*args, **kwargs)
            if due:
                self.hit = True
                raise self.error("injected")
            return result

        return wrapped

    def at(self, n: int) -> None:
        self.left, self.hit = n, False


def opcodes(call: Callable[[], object], where: Collection[str]) -> int:
    """How many opcodes ``call`` runs in ``where``."""
    counter = Interrupter(where)
    counter.run(call)
    return counter.seen


def moments(count: int, budget: int, seed: int) -> list[tuple[int, ...]]:
    """When to interrupt a call of ``count`` opcodes: before each of them, or ``budget`` of them, and pairs besides."""
    rng = random.Random(seed)
    ones = range(count) if count <= budget else sorted(rng.sample(range(count), budget))
    pairs = ((n, n + 1 + int(rng.expovariate(1 / 40))) for n in rng.sample(range(count), min(count, budget) // 3))
    return [*((n,) for n in ones), *pairs]
