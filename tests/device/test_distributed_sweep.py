"""zinc-attn sweep --distributed: rows of several ranks, what they refuse alike, and a wrong bit on one of them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mpi import mpiexec, needs_mpi

from zinc_attn.cli import app as cli
from zinc_attn.cli.sweep import sweep
from zinc_attn.errors import ArgumentError

SWEEP = ("sweep", "--distributed", "--shape", "6/2/64", "--contexts", "1k,1500", "--rows", "2", "--repeats", "2")
PROGRAMS = {
    "cli": "import sys; from zinc_attn import cli; sys.exit(cli.main())",
    "steady memory": """
import sys
from zinc_attn.cli import app as cli
from zinc_attn.distributed import cache
cache.memory_budget = lambda device: (1 << 30, 1 << 30)
sys.exit(cli.main())
""",
    "no device": "import sys; from zinc_attn import cli; sys.exit(cli.main([*sys.argv[1:], '--device', 'none']))",
    "one row": "import sys; from zinc_attn import cli; sys.exit(cli.main([*sys.argv[1:], '--rows', '1']))",
    "no room": """
import sys, zinc_attn as za
from zinc_attn.cli import app as cli
whole = za.KVCache
def small(device, shape, layers, tokens, *rest, **named):
    if tokens > 512:
        raise za.errors.LimitError("injected")
    return whole(device, shape, layers, tokens, *rest, **named)
za.ShardedKVCache.make_shard = staticmethod(small)
from zinc_attn.distributed import cache
cache.memory_budget = lambda device: (1 << 30, 1 << 30)
sys.exit(cli.main())
""",
    "wrong bit": """
import sys
from zinc_attn import reference
from zinc_attn.cli import app as cli
emulate = reference.emulate
def wrong(q, k, v):  # one KV head, with its three query heads
    out, lse = emulate(q, k, v)
    out.view('u4')[1, 2, 5] ^= 1
    return out, lse
reference.emulate = wrong
sys.exit(cli.main())
""",
}


def distributed(folder: Path, programs: tuple[str, ...], *more: str) -> subprocess.CompletedProcess[str]:
    """``zinc-attn sweep --distributed`` of as many ranks; stderr of rank i goes to the file i, for lines can mix."""
    command = [str(mpiexec())]
    for rank, name in enumerate(programs):
        shell = ["sh", "-c", f'exec 2> "{folder}/{rank}"; exec "$@"', "sh"]
        command += [":"] * (rank > 0) + ["-n", "1", *shell, sys.executable, "-c", PROGRAMS[name]]
        command += [*SWEEP, "--runtime", "vulkan", "--out", str(folder / "out"), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@needs_mpi
@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_distributed_sweep(tmp_path: Path, ranks: int) -> None:
    done = distributed(tmp_path, ("steady memory",) * ranks, "--json")
    assert done.returncode == 0, (done, [file.read_text() for file in tmp_path.glob("[0-9]")])
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [json.loads(line) for line in (tmp_path / "out" / "sweep.jsonl").read_text().splitlines()] == rows
    assert [(r["context"], r["status"], r["verified"], r["repeats"]) for r in rows] == [
        (1024, "ok", "bits", 2),
        (1500, "ok", "bits", 2),
    ]
    for row in rows:
        nodes = -(-row["context"] // 512)
        assert (row["ranks"], row["layout"], row["num_splits"]) == (ranks, "nodes", nodes)
        assert row["median_us"] > 0
    assert "written: " in (tmp_path / "0").read_text()
    assert not any((tmp_path / str(rank)).read_text() for rank in range(1, ranks)), "rank 0 alone speaks"


@needs_mpi
@pytest.mark.parametrize(
    ("programs", "says"),
    (
        (("cli", "one row"), ["rank 1 is set up as ", "rank 1 is set up as "]),
        (("no room", "steady memory"), ["injected", "rank 0 failed: LimitError: injected"]),
        (("cli", "no device"), ["rank 1 failed: DeviceNotFoundError: ", "device: no Vulkan device matches 'none'"]),
    ),
)
def test_distributed_sweep_that_cannot_be(tmp_path: Path, programs: tuple[str, ...], says: list[str]) -> None:
    done = distributed(tmp_path, programs, "--timeout", "4")
    assert done.returncode == 2, done
    for rank, text in enumerate(says):
        said = (tmp_path / str(rank)).read_text()
        assert bool(re.search(f"zinc-attn: error: {text}", said)) == bool(text), (rank, said)
        assert text or "zinc-attn: error" not in said, (rank, said)
    assert not (tmp_path / "out").exists()


@needs_mpi
def test_a_wrong_bit_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    done = distributed(tmp_path, ("cli", "wrong bit"))
    assert done.returncode == 1, done
    assert done.stdout.count("FAILED: rank 1: out[0, 1, 2, 5]: got ") == 2


def test_distributed_needs_mpi4py(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert cli.main(list(SWEEP)) == 2
    assert capsys.readouterr().err.startswith(
        "zinc-attn: error: several ranks need mpi4py and an MPI: pip install 'zinc-attn[mpi]', and MPICH or Open MPI"
    )


@pytest.mark.parametrize("more", (["--batch", "2"], ["--splits", "auto"]))
def test_what_distributed_does_not_take(more: list[str], tmp_path: Path) -> None:
    args = cli.build_parser().parse_args([*SWEEP, *more, "--out", str(tmp_path)])
    with pytest.raises(ArgumentError, match=r"^distributed: got --batch or --splits, expected one sequence"):
        sweep(args, SimpleNamespace(rank=0, size=1))
