"""MPI ranks that exchange bytes, each with a time limit, and what becomes of a rank that fails or is lost."""

import atexit
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from threading import Event, Thread, current_thread, main_thread
from typing import Any, Final

import numpy as np

from ..cache.pages import CapacityError
from ..canonical.partial import PartialState
from ..checks import check_float, shown
from ..errors import ArgumentError, ZincAttnError
from .descriptors import CallDescriptor, differences

TIMEOUT_S: Final = 60.0  # how long a rank waits for the others in an exchange
FINE, FAILED, FULL, LEFT = b"\0", b"\1", b"\2", b"\3"  # the first byte of a rank's part of an exchange
NOTE_BYTES: Final = 512  # of the note by which a rank tells the others why it gives an exchange up
GRACE_S: Final = 5.0  # between the error of a rank and the end of all ranks, so that the others can print theirs
LOST_STATUS: Final = 2  # exit status of a process that cannot finalize MPI because a rank is lost


class RankError(ZincAttnError):
    """Another rank failed, was lost, or is set up otherwise; the message says which one and what happened."""


class RemoteCapacityError(RankError):
    """A shard of another rank is full. Calls of a ShardedKVCache raise it as a CapacityError."""


def check_timeout(seconds: Any) -> float:
    """Return how many seconds, above 0, a rank waits for others, or raise ArgumentError."""
    checked = check_float("timeout_s", seconds, "seconds above 0")
    if checked <= 0:
        raise ArgumentError(f"timeout_s: got {shown(seconds)}, expected seconds above 0")
    return checked


def _outlive_others() -> None:
    """Ignore SIGUSR1, which MPICH's mpiexec -disable-auto-cleanup sends to the ranks that outlive a killed rank.

    A surviving rank can then report the loss by its RankError. A handler that the program has installed stays.
    """
    usr1 = getattr(signal, "SIGUSR1", None)
    if usr1 is not None and current_thread() is main_thread() and signal.getsignal(usr1) == signal.SIG_DFL:
        signal.signal(usr1, lambda *_: None)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Ranks:
    """The ranks of an mpi4py communicator. They exchange bytes with a time limit; a rank that fails tells the others.

    comm: the communicator, which is duplicated; timeout_s: seconds that a wait for the others takes at most.
    lost: whether a rank gave an exchange up, or left by an error, so that no exchange can follow; exchanges: how many
    were made so far, failed ones included; on_wait: called before each wait for the others; tests put an observer
    there, or a function that raises as an interrupt would.
    """

    def __init__(self, comm: Any, timeout_s: float = TIMEOUT_S) -> None:
        if not all(hasattr(comm, name) for name in ("Idup", "Iallgatherv", "Iprobe")):
            raise ArgumentError(f"comm: got {shown(comm)}, expected an mpi4py communicator, such as MPI.COMM_WORLD")
        self.timeout_s, self.lost = check_timeout(timeout_s), False
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self.exchanges = 0
        self.on_wait: Callable[[], None] = lambda: None
        self._late: list[Any] = []  # requests that were given up; MPI may still write the memory that they hold
        self._ending: Event | None = None  # made when a rank is lost, and set at exit; see ``_guard_exit``
        _outlive_others()
        self._comm, request = comm.Idup()
        self._wait(request, lambda: None)

    def agree(self, setup: str, weight: float) -> list[float]:
        """Return the weights of all ranks. RankError unless all of them have the same ``setup``."""
        setups = [data.decode().rsplit(" ", 1) for data in self.exchange(f"{setup} {weight!r}".encode())]
        for rank, (theirs, _) in enumerate(setups):
            if theirs != setups[0][0]:
                raise RankError(f"rank {rank} is set up as {theirs}, rank 0 as {setups[0][0]}; expected the same")
        return [float(weight) for _, weight in setups]

    def exchange(self, data: bytes, call: CallDescriptor | None = None) -> list[bytes]:
        """Return the ``data`` of every rank, by rank.

        RankError where a rank failed, is in another ``call`` (on every rank), or did not answer in time, now or before.
        """
        described = (call or CallDescriptor()).to_bytes()
        answers = [answer.split(b"\n", 1) for answer in self._gather(FINE + described + b"\n" + data)]
        calls = [CallDescriptor.from_bytes(text) for text, _ in answers]
        for rank, theirs in enumerate(calls):
            for text in differences(rank, theirs, calls[0]):
                raise RankError(text)
        return [payload for _, payload in answers]

    def fail(self, error: BaseException, done: str = "") -> None:
        """Answer the exchange that the others are in with ``error``.

        Where the exchange of this call is over already, ``done`` describes the call, and the others get the error in
        their next exchange, for which this rank waits ``timeout_s`` at most.
        """
        if not self.lost:
            late = f" (after the exchange of {done}, which the other ranks have done)" if done else ""
            with suppress(RankError):  # the caller raises this rank's own error
                self._gather(FAILED + f"{_named(error)}{late}".encode())

    def leave(self, error: BaseException) -> None:
        """``fail`` for a rank that makes no further exchange. The others make none either, unless all ranks leave."""
        if not self.lost:
            with suppress(RankError):  # the caller raises this rank's own error
                self._gather(LEFT + _named(error).encode())

    def full(self, error: CapacityError) -> None:
        """Answer the exchange that the others are in with ``error``, so that all of them raise a CapacityError.

        RankError where that is impossible because one of them failed, or is lost.
        """
        with suppress(RemoteCapacityError):  # the caller raises this rank's own error
            self._gather(FULL + str(error).encode())

    def _gather(self, data: bytes) -> list[bytes]:
        if self.lost:
            raise RankError(f"rank {self.rank}: a rank was lost, or left, before; start all of them again")
        self.exchanges += 1
        try:
            answers = self._transfer(data)
        except BaseException as error:  # an interrupt, too, as the others are in the midst of the exchange
            if not self.lost:
                gave_up = f"rank {self.rank} gave an exchange up: {_named(error)}"
                self._give_up(str(error) if isinstance(error, RankError) else gave_up)
            raise
        left = [answer[:1] == LEFT for answer in answers]
        self.lost = any(left) and not all(left)
        for rank, answer in enumerate(answers):
            if answer[:1] in (FAILED, LEFT):
                raise RankError(f"rank {rank} failed: {answer[1:].decode()}")
        for rank, answer in enumerate(answers):
            if answer[:1] == FULL:
                raise RemoteCapacityError(f"rank {rank}: {answer[1:].decode()}")
        return [answer[1:] for answer in answers]

    def _transfer(self, data: bytes) -> list[bytes]:
        """Send ``data`` to every rank, and return what every rank sent, by rank: first the sizes, then the bytes."""
        sizes = np.zeros(self.size, np.int64)
        self._wait(self._comm.Iallgather(np.array([len(data)], np.int64), sizes))
        starts = np.cumsum(sizes) - sizes
        received = np.empty(int(sizes.sum()), np.uint8)
        self._wait(self._comm.Iallgatherv(np.frombuffer(data, np.uint8), (received, (sizes, starts))))
        return [received[a : a + n].tobytes() for a, n in zip(starts, sizes, strict=True)]

    def _wait(self, request: Any, listen: Callable[[], None] | None = None) -> None:
        """Wait for ``request``. RankError: it is not done in time, after which the communicator is of no use."""
        deadline = time.monotonic() + self.timeout_s
        pause = 0.0
        self._late.append(request)
        self.on_wait()
        while not request.Test():
            (listen or self._listen)()
            if time.monotonic() > deadline:
                others = f"rank {1 - self.rank}" if self.size == 2 else f"the {self.size - 1} other ranks"
                late = "it is lost" if self.size == 2 else "MPI cannot tell which of them is lost"
                raise RankError(
                    f"rank {self.rank} waited {self.timeout_s:g} s for {others}; {late}, late, or in no call; look at "
                    "the output of all ranks, and start all of them again, with a larger timeout_s if one was late"
                )
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)
        self._late.remove(request)

    def _give_up(self, why: str) -> None:
        """Make no further exchange. Tell the others, so that a rank which enters this exchange later does not wait."""
        self.lost = True
        self._guard_exit()
        note = np.frombuffer(why.encode()[:NOTE_BYTES].ljust(NOTE_BYTES), np.uint8)
        for rank in range(self.size):
            if rank != self.rank:
                with suppress(RuntimeError):  # mpi4py's, of a rank that is gone; this rank's own error is raised
                    self._late.append(self._comm.Isend(note, rank))

    def _listen(self) -> None:
        """Raise RankError with the note of a rank that gave up. Ranks send each other nothing else but these notes."""
        if self._comm.Iprobe():
            note = np.empty(NOTE_BYTES, np.uint8)
            self._comm.Recv(note)
            self.lost = True
            self._guard_exit()
            raise RankError(note.tobytes().decode(errors="replace").rstrip())

    def _guard_exit(self) -> None:
        """At exit, end this process with ``LOST_STATUS`` if MPI's finalization waits for a rank that is gone."""
        if self._ending is not None:
            return
        self._ending = ending = Event()
        grace = min(self.timeout_s, GRACE_S)

        def guard() -> None:
            ending.wait()
            time.sleep(grace)
            os._exit(LOST_STATUS)

        Thread(target=guard, daemon=True).start()  # now, as an interpreter that is ending starts no thread
        atexit.register(_finalize, ending)  # runs before the handlers that were registered when MPI was started


def _finalize(ending: Event) -> None:
    """Finalize MPI while Python still runs, so that the thread that waits for ``ending`` can end the process."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    ending.set()
    if not MPI.Is_finalized():
        ctypes.CDLL(MPI.__file__).MPI_Finalize()  # unlike MPI.Finalize, without the interpreter lock


def pack_states(states: Seq[PartialState]) -> bytes:
    """The partial states of a batch as bytes: the size of each, int64, then the bytes of each."""
    data = [state.to_bytes() for state in states]
    return b"".join([np.array([len(part) for part in data], "<i8").tobytes(), *data])


def unpack_states(data: bytes, count: int) -> list[PartialState]:
    """The inverse of ``pack_states`` for ``count`` states."""
    ends = 8 * count + np.cumsum(np.frombuffer(data, "<i8", count))
    starts = [8 * count, *ends[:-1]]
    return [PartialState.from_bytes(data[a:b]) for a, b in zip(starts, ends, strict=bool(count))]
