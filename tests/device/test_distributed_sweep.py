"""zinc-attn sweep --distributed: rows of several ranks, what they refuse alike, and a wrong bit on one of them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi import mpiexec, needs_mpi

import zinc_attn as za
from zinc_attn.cli import app as cli
from zinc_attn.cli.sweep import measure
from zinc_attn.distributed.nodes import deal
from zinc_attn.errors import ArgumentError
from zinc_attn.tools.measure import CallSpec, sweep

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
    "other seed": "import sys; from zinc_attn import cli; sys.exit(cli.main([*sys.argv[1:], '--seed', '7']))",
    "ended": "raise SystemExit(2)",
    "silent": """
import sys, time
from zinc_attn import reference
from zinc_attn.cli import app as cli
reference.emulate = lambda *_: time.sleep(60)
sys.exit(cli.main())
""",
    "no room": """
import sys, zinc_attn as za
from zinc_attn.cli import app as cli
whole = za.KVCache
def small(device, shape, layers, tokens, *rest, **named):
    if tokens > 512:
        raise za.errors.LimitError("injected")
    return whole(device, shape, layers, tokens, *rest, **named)
za.ShardedKVCache.make_shard = staticmethod(small)
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
        others = nodes - int(np.sum(deal(nodes, [1.0] * ranks) == 0))
        assert (row["ranks"], row["layout"], row["num_splits"]) == (ranks, "nodes", nodes)
        assert row["formula_bytes"] == others * 2 * 6 * 66 * 4
        assert bool(row["formula_bytes"]) == (ranks > 1)
        assert 0 <= row["received_bytes"] - row["formula_bytes"] <= 1024 * (ranks - 1)
        assert row["median_us"] > 0
    assert "written: " in (tmp_path / "0").read_text()
    assert not any((tmp_path / str(rank)).read_text() for rank in range(1, ranks)), "rank 0 alone speaks"


@needs_mpi
@pytest.mark.parametrize(
    ("programs", "says"),
    (
        (("cli", "other seed"), ["rank 1 is set up as ", "rank 1 is set up as "]),
        (("cli", "no device"), ["rank 1 failed: DeviceNotFoundError: ", "device: no Vulkan device matches 'none'"]),
        (("cli", "ended"), ["waited 4 s for all ranks to start; one ended before", ""]),
        (
            ("cli", "cli", "silent"),
            ["rank [01] waited 4 s for the 2 other ranks; MPI cannot tell which of them is lost"] * 2 + [""],
        ),
    ),
)
def test_distributed_sweep_that_cannot_be(tmp_path: Path, programs: tuple[str, ...], says: list[str]) -> None:
    done = distributed(tmp_path, programs, "--timeout", "4")
    # MPI_Abort kills a silent rank (9), and mpiexec may tell of that in place of the others' status
    assert done.returncode in ((2, 9) if "silent" in programs else (2,)), done
    for rank, text in enumerate(says):
        said = (tmp_path / str(rank)).read_text()
        assert bool(re.search(f"zinc-attn: error: {text}", said)) == bool(text), (rank, said)
        assert text or "zinc-attn: error" not in said, (rank, said)
    assert not (tmp_path / "out").exists()


@needs_mpi
def test_what_one_rank_has_no_room_for_is_refused(tmp_path: Path) -> None:
    done = distributed(tmp_path, ("cli", "no room"), "--json", "--contexts", "512,2k,1k")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["context"], r["status"], r["error"]) for r in rows] == [
        (512, "ok", None),
        (2048, "refused", "rank 0: rank 1 failed: LimitError: injected"),
        (1024, "ok", None),
    ], done


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
    assert cli.main(["sweep", "--shape", "6/2/64", "--timeout", "3"]) == 2
    assert capsys.readouterr().err == "zinc-attn: error: timeout: got 3 without --distributed, expected both\n"


@pytest.mark.parametrize("more", (["--batch", "2"], ["--splits", "auto"], ["--contiguous"]))
def test_what_distributed_does_not_take(more: list[str]) -> None:
    args = cli.build_parser().parse_args([*SWEEP, *more])
    with pytest.raises(ArgumentError, match=rf"^{more[0][2:]}: got {more[0]} with --distributed, expected neither"):
        measure(args, SimpleNamespace(rank=0, size=1))


@pytest.mark.parametrize("given", ({"batch": 2}, {"page_size": None}))
def test_what_a_distributed_sweep_does_not_take(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(given))}: got .* for a distributed sweep"):
        sweep(
            None,
            CallSpec(za.AttnShape(6, 2, 64), 1, (64,), **given),
            ranks=SimpleNamespace(agree=lambda *_: None),
        )
