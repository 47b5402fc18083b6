"""Programs of several ranks: a script that each of them runs, and what it says in a file of its own."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def mpiexec() -> str | None:
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


NO_MPI = importlib.util.find_spec("mpi4py") is None or mpiexec() is None
needs_mpi = pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")

START = """
import sys, time, numpy as np, zinc_attn as za
from mpi4py import MPI
from zinc_attn import reference
comm, shape = MPI.COMM_WORLD, za.AttnShape(6, 2, 64)
second = comm.rank == 1
k, v = (np.random.default_rng(i).standard_normal((3000, 2, 64)).astype(np.float16) for i in (1, 2))
q = np.random.default_rng(3).standard_normal((6, 64)).astype(np.float32)
file = open(f"{sys.argv[1]}/{comm.rank}.txt", "w")

def make(nodes, timeout_s, layers=1):
    device = za.Device.open()
    return za.ShardedKVCache([device], shape, layers, nodes * 512, comm=comm, weights=[1.0], timeout_s=timeout_s)

def right(sequence, rows, out=None):  # of the script's attn, or an output of it
    got, want = attn(q, sequence, 0) if out is None else out, reference.emulate(q, k[rows], v[rows])[0]
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))

def said(call):
    try:
        call()
    except (za.ZincAttnError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "done"
"""


def run_ranks(folder: Path, script: str, ranks: int = 2, *more: str) -> tuple[list[list[str]], str]:
    """What each rank of ``script`` says, in lines, and what is on stderr."""
    (folder / "rank.py").write_text(START + script)
    command = [str(mpiexec()), "-n", str(ranks), sys.executable, str(folder / "rank.py"), str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return [(folder / f"{rank}.txt").read_text().splitlines() for rank in range(ranks)], done.stderr
