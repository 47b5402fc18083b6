"""A sequence on several devices or ranks: the bits of one device, and an error where that cannot be."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import differing, open_device

import zinc_attn as za
from zinc_attn import cli, reference, rows, sharded
from zinc_attn.errors import ArgumentError, DeviceMemoryError, ZincAttnError

SHAPE = za.AttnShape(6, 2, 64)


@pytest.fixture(scope="module", params=("two runtimes", "two drivers", "three"))
def devices(request: pytest.FixtureRequest) -> Iterator[list[za.Device]]:
    names = {
        "two runtimes": (("default", "vulkan"), ("default", "kompute")),
        "two drivers": (("default", "vulkan"), ("swiftshader", "vulkan")),
        "three": (("swiftshader", "vulkan"), ("default", "vulkan"), ("default", "kompute")),
    }
    found = [open_device(*name) for name in names[request.param]]
    yield found
    for device in found:
        device.close()


@pytest.mark.parametrize("some", ({}, {"window": 900, "sinks": np.linspace(-2, 5, 6, dtype=np.float32)}))
@pytest.mark.parametrize("dtype", ("f16", "q8_0"))
def test_the_bits_of_one_device(devices: list[za.Device], dtype: str, some: dict[str, Any]) -> None:
    rng = np.random.default_rng(len(devices))
    k, v = (rng.standard_normal((3700, 2, 64)).astype(np.float16) for _ in "kv")
    exact = rows.stored(k, v, dtype)
    weights = [3.0, 1.0, 2.0][: len(devices)]
    with za.ShardedKVCache(devices, SHAPE, 2, 4096, dtype, 64, weights=weights) as cache:
        attn, seq, at = za.ShardedAttention(cache, **some), cache.new_sequence(), 0
        for n in (1, 510, 1, 1, 1500, 1, 37, 1649):
            for layer in range(2):
                q = rng.standard_normal((min(n, 20), 6, 64)).astype(np.float32)
                got = attn(q, seq, layer, k[at : at + n], v[at : at + n], return_lse=True)
                want = reference.emulate(q, exact[0][: at + n], exact[1][: at + n], **some)
                assert not differing(got[0], want[0]) and not differing(got[1], want[1]), (at, n)
            at += n
        assert len(seq) == at
        counts = [len(one) for one in seq.shards.values()]
        assert sum(counts) == at and all(counts)
        seq.truncate(1111)
        q = rng.standard_normal((6, 64)).astype(np.float32)
        want = reference.emulate(q, exact[0][:1111], exact[1][:1111], **some)
        assert not differing(attn(q, seq, 1), want[0])


def test_dealing_keeps_the_shares() -> None:
    owners = sharded.deal(1000, [3.0, 1.0, 4.0])
    for n in range(1, 1000, 37):
        counts = np.bincount(owners[:n], minlength=3)
        assert np.all(np.abs(counts - n * np.array([3, 1, 4]) / 8) <= 1.5)
    for bad in ([], [1.0, 0.0], [float("nan")]):
        with pytest.raises(ArgumentError, match=r"^weights: got "):
            sharded.deal(5, bad)


def test_a_failing_device_leaves_the_cache_as_it_was(devices: list[za.Device], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((2000, 2, 64)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((6, 64)).astype(np.float32)
    with za.ShardedKVCache(devices, SHAPE, 1, 4096, "f32", weights=[1.0] * len(devices)) as cache:
        attn, seq = za.ShardedAttention(cache), cache.new_sequence()
        before = attn(q, seq, 0, k[:700], v[:700])
        runtime = devices[-1].runtime

        def lost(*_: Any) -> None:
            raise za.errors.DeviceLostError("injected")

        with monkeypatch.context() as patch:
            patch.setattr(runtime, "run", lost)
            with pytest.raises(za.errors.DeviceLostError):
                attn(q, seq, 0, k[700:], v[700:])
        assert len(seq) == 700 and sum(len(one) for one in seq.shards.values()) == 700
        assert not differing(attn(q, seq, 0), before)
        assert not differing(attn(q, seq, 0, k[700:], v[700:]), reference.emulate(q, k, v)[0])


@pytest.mark.parametrize("call", ("append", "attend"))
def test_an_interrupt_leaves_the_cache_as_it_was(device: za.Device, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """It comes to the thread that waits for the shards, which have their rows by then."""
    k = np.random.default_rng(1).standard_normal((1100, 2, 64)).astype(np.float32)
    q = np.ones((6, 64), np.float32)
    with za.ShardedKVCache([device, device], SHAPE, 2, 4096, "f32", weights=[1.0, 1.0]) as cache:
        attn, seq, together = za.ShardedAttention(cache), cache.new_sequence(), cache.together

        def interrupted(one: Any) -> None:
            together(one)
            raise KeyboardInterrupt

        for layer in range(2):
            cache.append(seq, layer, k[:700], k[:700])
        for layer in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(cache, "together", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    if call == "append":
                        cache.append(seq, layer, k[700:], k[700:])
                    else:
                        attn(q, seq, layer, k[700:], k[700:])
            assert [sum(one.lengths[layer] for one in seq.shards.values()), seq.lengths[layer]] == [700, 700]
            got = attn(q, seq, layer, k[700:], k[700:])
            assert not differing(got, reference.emulate(q, k, k)[0])


def test_rows_of_any_number_share_the_folds_buffers(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    k = rng.standard_normal((1100, 2, 64)).astype(np.float32)
    sinks = rng.standard_normal(6).astype(np.float32)
    with za.KVCache(device, SHAPE, 1, 2048, "f32") as cache:
        attn, seq, fold = za.Attention(cache, sinks=sinks), cache.new_sequence(), sharded.Fold(device, SHAPE)
        cache.append(seq, 0, k, k)
        made: list[int] = []
        buffer = device.runtime.buffer
        monkeypatch.setattr(device.runtime, "buffer", lambda *a, **o: (made.append(1), buffer(*a, **o))[1])
        for most in (1 << 20, 7):  # partial states of one submission
            monkeypatch.setattr(sharded, "SCRATCH_BYTES", most * 4 * 6 * 66)
            for n in (22, 32, 27, 30):
                q = rng.standard_normal((n, 6, 64)).astype(np.float32)
                state = attn.partial(q, seq, 0)
                before = len(made)
                got, want = fold([state]), reference.emulate(q, k, k, sinks=sinks)
                assert not differing(got[0], want[0]) and not differing(got[1], want[1]), (most, n)
                assert n == 22 or most == 7 or len(made) == before
        fold.close()


def test_refusals(device: za.Device) -> None:
    with pytest.raises(ArgumentError, match=r"^devices: got "):
        za.ShardedKVCache([], SHAPE, 1, 100)
    with pytest.raises(ArgumentError, match=r"^weights: got 2, expected one per device \(1\)"):
        za.ShardedKVCache([device], SHAPE, 1, 100, weights=[1, 2])
    with pytest.raises(ArgumentError, match=r"^page_size: got 1024"):
        za.ShardedKVCache([device], SHAPE, 1, 100, page_size=1024)
    with pytest.raises((DeviceMemoryError, za.errors.LimitError)):
        za.ShardedKVCache([device], za.AttnShape(64, 64, 512), 1000, 1 << 24, "f32")
    with za.ShardedKVCache([device], SHAPE, 1, 600) as cache:
        attn, seq = za.ShardedAttention(cache), cache.new_sequence()
        q, k = np.ones((6, 64), np.float32), np.ones((1100, 2, 64), np.float16)
        with pytest.raises(ArgumentError, match=r"^k: 1100 tokens, expected at most capacity = 1024"):
            attn(q, seq, 0, k, k)
        with pytest.raises(ArgumentError, match=r"^seq: got Sequence, expected a ShardedSequence of this cache"):
            attn(q, seq.shards[0], 0)
        nan = k.copy()
        nan[600, 1, 3] = np.nan
        for keys, values, text in (
            (nan, k, r"^k\[600, 1, 3\]: got nan"),  # as the caller counts, not as the shard does
            (k, k[:-1], r"^v: got shape \(1099, 2, 64\), expected k's "),
            (k[:0], k[:0], r"^k: got shape \(0, 2, 64\), expected at least one token"),
            (k[..., :8], k, r"^k: got shape \(1100, 2, 8\), expected "),
            (k[0, 0, 0], k, r"^k: got shape \(\), expected "),
        ):
            for give in (cache.append, lambda s, layer, a, b: attn(q, s, layer, a, b)):
                with pytest.raises(ZincAttnError, match=text):
                    give(seq, 0, keys, values)
        assert seq.lengths == [0]


RANK = """
import sys, time, numpy as np, zinc_attn as za
from mpi4py import MPI
from zinc_attn import reference
mode, comm = sys.argv[1], MPI.COMM_WORLD
shape = za.AttnShape(6, 2, 64)
k, v = (np.random.default_rng(i).standard_normal((3000, 2, 64)).astype(np.float16) for i in (1, 2))
q = np.random.default_rng(3).standard_normal((6, 64)).astype(np.float32)
layers = 2 if mode == "mismatch" and comm.rank == 1 else 1
try:
    cache = za.ShardedKVCache([za.Device.open(0)], shape, layers, 4096, comm=comm, weights=[1.0], timeout_s=5)
    attn, seq = za.ShardedAttention(cache), cache.new_sequence()
    for at, n in ((0, 2500), (2500, 1), (2501, 499)):
        if mode == "error" and comm.rank == 1 and at == 2500:
            q = q[:3]
        if mode == "silent" and comm.rank == 1 and at == 2500:
            time.sleep(8)
            sys.exit(0)
        out = attn(q, seq, 0, k[at:at + n], v[at:at + n])
        assert np.array_equal(out.view(np.uint32), reference.emulate(q, k[:at + n], v[:at + n])[0].view(np.uint32))
    assert attn.sent_bytes == sum(
        4 * 6 * 66 * int(np.sum(cache.owners[: -(-n // 512)] == comm.rank)) for n in (2500, 2501, 3000)
    )
    said = "equal"
except za.ZincAttnError as error:
    said = f"{type(error).__name__} {error}"
with open(f"{sys.argv[2]}/{comm.rank}.txt", "w") as file:  # the ranks share one stdout, where lines can mix
    file.write(said)
"""


def mpiexec() -> str | None:
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


NO_MPI = importlib.util.find_spec("mpi4py") is None or mpiexec() is None


@pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")
@pytest.mark.parametrize(
    ("ranks", "mode", "expected"),
    (
        (2, "equal", ["equal"] * 2),
        (4, "equal", ["equal"] * 4),
        (2, "mismatch", ["RankError rank 1 is set up as 6/2/64 layers=2"] * 2),
        (3, "error", ["RankError rank 1 failed: ShapeError"] * 2 + ["ShapeError q: got shape (3, 64)"]),
        (2, "silent", ["RankError rank 0 waited 5 s for the 1 other ranks"]),
    ),
)
def test_ranks(tmp_path: Path, ranks: int, mode: str, expected: list[str]) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [str(mpiexec()), "-n", str(ranks), sys.executable, str(script), mode, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = sorted(file.read_text() for file in tmp_path.glob("*.txt"))
    assert len(lines) == len(expected), done
    for line, start in zip(lines, sorted(expected), strict=True):
        assert line.startswith(start), (line, done.stderr)


# --- zinc-attn sweep --distributed --------------------------------------------------------------------------

SWEEP = ("sweep", "--distributed", "--shape", "6/2/64", "--contexts", "1k,1500", "--q-len", "2", "--repeats", "2")
PROGRAMS = {
    "cli": "import sys; from zinc_attn import cli; sys.exit(cli.main())",
    "no device": "import sys; from zinc_attn import cli; sys.exit(cli.main([*sys.argv[1:], '--device', 'none']))",
    "other seed": "import sys; from zinc_attn import cli; sys.exit(cli.main([*sys.argv[1:], '--seed', '7']))",
    "ended": "raise SystemExit(2)",
    "silent": """
import sys, time
from zinc_attn import cli, sweep
sweep._oracle = lambda *_: time.sleep(60)
sys.exit(cli.main())
""",
    "wrong bit": """
import sys
from zinc_attn import cli, sweep
oracle = sweep._oracle
def wrong(*arguments):
    expected = oracle(*arguments)
    expected.out.view('u4')[1, 3, 5] ^= 1
    return expected
sweep._oracle = wrong
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


@pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")
@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_distributed_sweep(tmp_path: Path, ranks: int) -> None:
    done = distributed(tmp_path, ("cli",) * ranks, "--json")
    assert done.returncode == 0, (done, [file.read_text() for file in tmp_path.glob("[0-9]")])
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [json.loads(line) for line in (tmp_path / "out" / "sweep.jsonl").read_text().splitlines()] == rows
    assert [(r["context"], r["status"], r["verified"], r["repeats"]) for r in rows] == [
        (1024, "ok", "bits", 2),
        (1500, "ok", "bits", 2),
    ]
    for row in rows:
        nodes = -(-row["context"] // 512)
        others = nodes - int(np.sum(sharded.deal(nodes, [1.0] * ranks) == 0))
        assert (row["ranks"], row["layout"], row["num_splits"]) == (ranks, "nodes", nodes)
        assert row["formula_bytes"] == others * 2 * 6 * 66 * 4
        assert 0 <= row["received_bytes"] - row["formula_bytes"] <= 1024 * (ranks - 1)
        assert row["median_us"] > 0
    assert "written: " in (tmp_path / "0").read_text()
    assert not any((tmp_path / str(rank)).read_text() for rank in range(1, ranks)), "rank 0 alone speaks"


@pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")
@pytest.mark.parametrize(
    ("programs", "says"),
    (
        (("cli", "other seed"), ["rank 1 is set up as ", "rank 1 is set up as "]),
        (("cli", "no device"), ["rank 1 failed: DeviceNotFoundError: ", "device: no Vulkan device matches 'none'"]),
        (("cli", "ended"), ["waited 4 s for all ranks to start; one ended before", ""]),
        (("cli", "cli", "silent"), ["rank 0 waited 4 s for the 2 other", "rank 1 waited 4 s for the 2 other", ""]),
    ),
)
def test_distributed_sweep_that_cannot_be(tmp_path: Path, programs: tuple[str, ...], says: list[str]) -> None:
    done = distributed(tmp_path, programs, "--timeout", "4")
    # MPI_Abort kills a silent rank (9), and mpiexec may tell of that in place of the others' status
    assert done.returncode in ((2, 9) if "silent" in programs else (2,)), done
    for rank, text in enumerate(says):
        said = (tmp_path / str(rank)).read_text()
        assert f"zinc-attn: error: {text}" in said if text else "zinc-attn: error" not in said, (rank, said)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")
def test_a_wrong_bit_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    done = distributed(tmp_path, ("cli", "wrong bit"))
    assert done.returncode == 1, done
    assert done.stdout.count("FAILED: rank 1: out[0, 1, 3, 5]: got ") == 2


def test_distributed_needs_mpi4py(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sharded.importlib.util, "find_spec", lambda _: None)
    assert cli.main(list(SWEEP)) == 2
    assert capsys.readouterr().err.startswith(
        "zinc-attn: error: several ranks need mpi4py and an MPI: pip install 'zinc-attn[mpi]', and MPICH or Open MPI"
    )
    assert cli.main(["sweep", "--shape", "6/2/64", "--timeout", "3"]) == 2
    assert capsys.readouterr().err == "zinc-attn: error: timeout: got 3 without --distributed, expected both\n"


@pytest.mark.parametrize("more", (["--batch", "2"], ["--splits", "auto"], ["--contiguous"]))
def test_what_distributed_does_not_take(more: list[str]) -> None:
    class One:
        rank, size = 0, 1

    args = cli.build_parser().parse_args([*SWEEP, *more])
    with pytest.raises(ArgumentError, match=rf"^{more[0][2:]}: got {more[0]} with --distributed, expected neither"):
        cli.measure(args, One())
