"""One sharded cache over ranks of MPI: the bits of one device, and an error on every rank where they differ."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zinc_attn.distributed.ranks import LOST_STATUS

NATIVE = True


def mpiexec() -> str | None:
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


NO_MPI = importlib.util.find_spec("mpi4py") is None or mpiexec() is None
pytestmark = pytest.mark.skipif(NO_MPI, reason="mpi4py with an MPI is not here: scripts/test installs it")

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

def says(call):  # and the lengths of the script's sequences then
    text = "done"
    try:
        call()
    except (za.ZincAttnError, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {error}"
    print([*map(len, seqs)], text, file=file, flush=True)
"""


def run_ranks(folder: Path, script: str, ranks: int = 2, *more: str) -> tuple[list[list[str]], str]:
    """The lines that each rank of ``script`` prints, and its stderr."""
    (folder / "rank.py").write_text(START + script)
    command = [str(mpiexec()), "-n", str(ranks), sys.executable, str(folder / "rank.py"), str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return [(folder / f"{rank}.txt").read_text().splitlines() for rank in range(ranks)], done.stderr


EQUAL = """
cache = make(8, 5)
attn, seq = za.ShardedAttention(cache), cache.new_sequence()
for at, n in ((0, 2500), (2500, 1), (2501, 499)):
    right(seq, np.arange(at + n), attn(q, seq, 0, k[at:at + n], v[at:at + n]))
assert attn.sent_bytes == sum(
    4 * 6 * 66 * int(np.sum(cache.owners[: -(-n // 512)] == comm.rank)) for n in (2500, 2501, 3000)
)
print("equal", file=file)
file.close()
"""


def test_ranks_have_the_bits_of_one_device(tmp_path: Path) -> None:
    said, stderr = run_ranks(tmp_path, EQUAL, 4)
    assert said == [["equal"]] * 4, stderr


EDGES = """
cache = make(16, 30)
attn, seq = za.ShardedAttention(cache), cache.new_sequence()
seqs = [seq]

def failing(*_):
    raise za.errors.DeviceLostError("injected")

def interrupted(*_):
    raise KeyboardInterrupt

says(lambda: make(8, 30, 1 + second))

# one rank fails, and the other has appended nothing either
cache.append(seq, 0, k[:600], v[:600])
says(lambda: cache.append(seq, 0, k[600:700, :, :8] if second else k[600:700], v[600:700]))
whole = cache.shards[comm.rank].append
cache.shards[comm.rank].append = failing if second else whole
says(lambda: cache.append(seq, 0, k[600:1600], v[600:1600]))
cache.shards[comm.rank].append = whole
right(seq, np.arange(600))

# other arguments, another call, another length
says(lambda: cache.append(seq, 0, k[600:1600], (v + second)[600:1600]))
says(lambda: attn(q + second, seq, 0, k[600:1600], v[600:1600]))
says(lambda: (cache.append if second else lambda *a: attn(q, *a))(seq, 0, k[600:1600], v[600:1600]))
if second:
    seq.truncate(500)
says(lambda: attn(q, seq, 0, k[600:1600], v[600:1600]))
seq.truncate(500)
right(seq, np.arange(500))

says(lambda: attn([q] * (1 + second), [seq] * (1 + second), 0))
says(lambda: cache.append(seq, 0, k[500:510 + second], v[500:510 + second]))

# one rank fails after the exchange: the other knows with its next call
fold = attn.fold
attn.fold = failing if second else fold
says(lambda: attn(q, seq, 0, k[500:700], v[500:700]))
attn.fold = fold
if not second:
    says(lambda: attn(q, seq, 0, k[700:701], v[700:701]))
seq.truncate(500)
right(seq, np.arange(500))

# forks and batches, with the states of a batch in one exchange
twin, other, exchanges = seq.fork(), cache.new_sequence(), cache.ranks.exchanges
slices = [slice(500, 510), slice(600, 1700), slice(0, 30)]
outs = attn([q] * 3, [seq, twin, other], 0, [k[s] for s in slices], [v[s] for s in slices])
assert cache.ranks.exchanges == exchanges + 1
rows = [np.r_[0:510], np.r_[0:500, 600:1700], np.r_[0:30]]
for sequence, one, out in zip((seq, twin, other), rows, outs):
    right(sequence, one, out)
    right(sequence, one)

# of a fork some rows stay, and go to nodes of the other rank
says(lambda: twin.keep(range(10 + second, 100), 1150))
twin.keep(range(200, 1140), 1150)
rows[1] = np.r_[rows[1][:450], rows[1][650:1590]]
right(twin, rows[1])
right(seq, rows[0])

# a rank may collect a sequence before the other does, and the deal stays one
kept = [twin] if second else []
del twin, sequence
right(seq, rows[0])
kept.clear()
right(seq, rows[0])
more = [cache.new_sequence() for _ in range(12)]
for sequence in more:
    cache.append(sequence, 0, k[:5], v[:5])
print(cache.allocator.used.tolist(), file=file)

# an interrupt within an exchange ends them
if second:
    cache.ranks.on_wait = interrupted
says(lambda: cache.append(seq, 0, k[:5], v[:5]))
says(lambda: cache.append(seq, 0, k[:5], v[:5]))
file.close()
"""


def test_ranks_that_differ_notice(tmp_path: Path) -> None:
    """One run, in which the ranks go on behind each error."""
    said, stderr = run_ranks(tmp_path, EDGES)

    def differ(text: str) -> list[str]:
        return [f"RankError: rank 1{text}"] * 2

    alike = "; make the same calls with the same arguments on every rank$"
    where = r"sequence 0 \(600 tokens, 1,000 new\)"
    late = r"\(after the exchange of attend at layer 0, sequence 0 \(500 tokens, 200 new\), which the "
    lost = "a rank was lost, or left, before; start all of them again"
    expected = (
        ((0, 0), differ(" is set up as 6/2/64 layers=2 capacity=4096 f16")),
        ((600, 600), ["RankError: rank 1 failed: ShapeError: k: got shape ", "ShapeError: k: got shape "]),
        ((600, 600), ["RankError: rank 1 failed: DeviceLostError: injected$", "DeviceLostError: injected$"]),
        ((600, 600), differ(f" was given other rows than rank 0 for {where}{alike}")),
        ((600, 600), differ(f": other q or mask, or other options of scores, than rank 0 for {where}{alike}")),
        ((600, 600), differ(f" is in append, rank 0 in attend{alike}")),
        ((600, 500), differ(r" has sequence 0 at length 500 in layer 0, rank 0 at 600; truncate\(500\) or free")),
        ((500, 500), differ(f" was given a batch of 2, rank 0 one of 1{alike}")),
        ((500, 500), differ(f" was given k, v of length 11 for sequence 0, rank 0 of 10{alike}")),
        ((700, 500), ["done$", "DeviceLostError: injected$"]),
        ((700,), [rf"RankError: rank 1 failed: DeviceLostError: injected {late}other ranks have done\)$"]),
        ((510, 510), differ(r" was given other rows than rank 0 for sequence 1 \(1,600 tokens, 0 new\)" + alike)),
        ((510, 510), ["RankError: rank 1 gave an exchange up: KeyboardInterrupt$", "KeyboardInterrupt: $"]),
        ((510, 510), [f"RankError: rank 0: {lost}", f"RankError: rank 1: {lost}"]),
    )
    for rank, lines in enumerate(said):
        mine = [(lengths[rank], texts[rank]) for lengths, texts in expected if rank < len(texts)]
        assert len(lines) == len(mine) + 1, (lines, stderr)
        assert lines.pop(-3) == "[7, 7]"
        for line, (length, text) in zip(lines, mine, strict=True):
            assert re.match(rf"\[{length}\] {text}", line), (rank, line, text)


FULL_RANK = """
cache = make(2, 30)
attn = za.ShardedAttention(cache)
seqs = [cache.new_sequence() for _ in range(5)]
for seq in seqs[:4]:
    cache.append(seq, 0, k[:200], v[:200])  # a page of 256 each

# rank 0 is full, and every rank evicts the same
says(lambda: cache.append(seqs[4], 0, k[:1], v[:1]))
says(lambda: attn([q] * 2, [seqs[3], seqs[4]], 0, [k[:1]] * 2, [v[:1]] * 2))
seqs[2].free()
del seqs[2]
says(lambda: attn(q, seqs[3], 0, k[:1], v[:1]))
right(seqs[2], np.arange(200))

# a fork, then a new sequence, on one rank only
for seq in seqs:
    seq.truncate(0)
for seq in seqs[:2]:
    cache.append(seq, 0, k[:100], v[:100])
twin = seqs[0].fork() if second else None
says(lambda: cache.append(seqs[2], 0, k[:100], v[:100]))
if second:
    twin.free()
mine = cache.new_sequence()
says(lambda: cache.append(mine, 0, k[:1], v[:1]))
file.close()
"""


def test_a_full_rank_is_full_for_all(tmp_path: Path) -> None:
    said, stderr = run_ranks(tmp_path, FULL_RANK)
    full = r"shard 0 of 2: got 1 of the {} new tokens, .* 0 of its 2 pages of 256 tokens are free, .* larger cache$"
    counts = r"; sequences made: {} on rank 1, {} on rank 0; call new_sequence\(\) and fork\(\) alike on every rank$"
    nodes = r"RankError: rank 1 has the nodes of sequence 3 \(0 tokens, 100 new\) on other ranks than rank 0"
    before, after = "200, 200, 200, 200, 0", "100, 100, 0, 0"
    expected = (  # lengths, what rank 0 says, and rank 1 where it says something else
        (before, "CapacityError: " + full.format(1), "CapacityError: rank 0: " + full.format(1)),
        (before, "CapacityError: " + full.format(2), "CapacityError: rank 0: " + full.format(2)),
        ("200, 200, 200, 1", "done$"),
        (after, nodes + counts.format(6, 5)),
        (after, "RankError: rank 1 was given sequence 6, rank 0 sequence 5" + counts.format(7, 6)),
    )
    for rank, lines in enumerate(said):
        assert len(lines) == len(expected), (lines, stderr)
        for line, (lengths, *texts) in zip(lines, expected, strict=True):
            assert re.match(rf"\[{lengths}\] {texts[min(rank, len(texts) - 1)]}", line), (rank, line)


LEAVE = """
mode, begin, took = sys.argv[2], time.monotonic(), []

def work():
    global begin
    with make(16, 30) as cache:
        attn, seq = za.ShardedAttention(cache), cache.new_sequence()
        for at in range(3):
            begin = time.monotonic()
            if mode == "own" and second and at == 1:
                raise ValueError("of its own")
            if mode == "late" and at == 1:
                cache.ranks.timeout_s = 2  # from here on no rank starts or compiles
                time.sleep(3 * second)
                begin = time.monotonic()
            bad = mode == "in a call" and second and at == 1
            attn(q[:3] if bad else q, seq, 0, k[at:at + 1], v[at:at + 1])

try:
    work()
except (za.ZincAttnError, ValueError) as error:
    print(f"{type(error).__name__}: {error}", file=file)
print(time.monotonic() - begin, file=file)
file.close()
"""


@pytest.mark.parametrize(
    ("mode", "ranks", "expected"),
    (
        ("own", 3, ["RankError: rank 1 failed: ValueError: of its own", "ValueError: of its own"] * 2),
        ("in a call", 3, ["RankError: rank 1 failed: ShapeError: q: got ", "ShapeError: q: got shape (3, 64)"] * 2),
        ("late", 2, ["RankError: rank 0 waited 2 s for rank 1; it is lost, late, or in no call; look at"] * 2),
    ),
)
def test_a_rank_that_leaves_ends_all(tmp_path: Path, mode: str, ranks: int, expected: list[str]) -> None:
    """At once, in none of the 30 s; a late one ends as soon as it comes."""
    said, stderr = run_ranks(tmp_path, LEAVE, ranks, mode)
    for rank, (line, seconds) in enumerate(said):
        assert line.startswith(expected[rank % 2]), (line, stderr)
        assert float(seconds) < 3 + 2 * (mode == "late" and rank == 0), (rank, seconds)


KILLED = """
import os, signal
with make(16, 30) as cache:
    attn, seq = za.ShardedAttention(cache), cache.new_sequence()
    attn(q, seq, 0, k[:1000], v[:1000])
    cache.ranks.timeout_s = 2  # from here on no rank starts or compiles
    os.kill(os.getpid(), signal.SIGUSR1)  # mpiexec's note of a lost rank ends none
    if second:
        os.kill(os.getpid(), signal.SIGKILL)
    attn(q, seq, 0, k[1000:1001], v[1000:1001])
"""
# what mpiexec watches lives until all ranks have ended, so that it neither ends one nor takes note of the killed one
WATCHED = """
folder=$1; shift
"$@" 2> "$folder/$PMI_RANK.err"
echo $? > "$folder/$PMI_RANK.status"
while [ $(ls "$folder"/*.status | wc -l) -lt 3 ]; do sleep 0.1; done
"""


def test_ranks_outlive_a_killed_one_and_end_by_themselves(tmp_path: Path) -> None:
    """Nobody cleans up behind a rank that got SIGKILL; MPI's finalization would wait for it without end."""
    script = tmp_path / "rank.py"
    script.write_text(START + KILLED)
    ranks = ["sh", "-c", WATCHED, "sh", str(tmp_path), sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(
        [str(mpiexec()), "-disable-auto-cleanup", "-n", "3", *ranks], capture_output=True, text=True, timeout=60
    )
    errors = [(tmp_path / f"{rank}.err").read_text() for rank in range(3)]
    statuses = [int((tmp_path / f"{rank}.status").read_text()) for rank in range(3)]
    assert statuses == [LOST_STATUS, 128 + 9, LOST_STATUS], (done, errors)
    for text in errors[0], errors[2]:
        assert re.search(r"RankError: rank [02] waited 2 s for the 2 other ranks; MPI cannot tell which", text), text
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists()]
    assert not any(bytes(script) in line for line in running), "a process is left"
