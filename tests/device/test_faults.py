"""After any error of the driver every later result is right or a typed error; faults.py tells the stories."""

import importlib.util
import itertools
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import faults
import pytest
from faults import Fault
from support import FULL, RUNTIMES

if not sys.platform.startswith("linux") or not list(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json")):
    pytest.skip("the stories are told on lavapipe under Linux", allow_module_level=True)

SAMPLED = 6  # stories per dispatcher without --full


def needs(runtime):
    if runtime == "kompute" and importlib.util.find_spec("kp") is None:
        pytest.skip("kp is not installed: scripts/build_kp.sh builds it")


# (function, result): how a story ends in which the twentieth such call fails
TABLE = {
    ("vkWaitForFences", -1): "one call failed",
    ("vkWaitForFences", -2): "one call failed",
    ("vkWaitForFences", -13): "one call failed",
    ("vkWaitForFences", -4): "device lost",
    ("vkResetFences", -1): "one call failed",
    ("vkQueueSubmit", -2): "one call failed",
    ("vkQueueSubmit", -4): "device lost",
}
# the fence says that all has ended, but neither wait for it works any more
NO_WAIT = [Fault("vkWaitForFences", 20, -13, True)]
NO_WAIT += [Fault(name, 1, -1, False, True) for name in ("vkQueueWaitIdle", "vkDeviceWaitIdle")]
# the queue is idle, but its fence can be had neither unsignalled nor new
NO_FENCE = [Fault("vkResetFences", 20, -1, False, True), Fault("vkCreateFence", 2, -1, False, True)]


KNOWN = {
    **{
        (Fault(name, 20, result, carry),): ended
        for (name, result), ended in TABLE.items()
        for carry in ((False, True) if FULL else (False,))
    },
    **{tuple(NO_WAIT): "device lost", tuple(NO_FENCE): "device lost"},
}


@pytest.fixture(scope="module", params=RUNTIMES)
def known(request):
    """A dispatcher, how often the undisturbed story calls each function, and the outcomes under the known faults."""
    needs(request.param)
    return request.param, *faults.told(faults.shim(), request.param, [*KNOWN])


def test_the_known_faults(known):
    assert dict(zip(KNOWN, known[2], strict=True)) == KNOWN


def test_every_fault(known):
    runtime, counts, _ = known
    every = faults.all_faults(counts)
    chosen = every if FULL else random.Random(5).sample(every, SAMPLED)
    outcomes = faults.told(faults.shim(), runtime, chosen)[1]
    print(Counter(outcomes))
    assert not [pair for pair in zip(chosen, outcomes, strict=True) if pair[1] not in faults.GOOD]
    assert outcomes.count("not reached") < len(outcomes) / 4


# --- forked children ---------------------------------------------------------------------------------------

WORLD = """
import gc, multiprocessing, os, sys, warnings
import numpy as np
import zinc_attn as za
from zinc_attn.errors import DeviceMemoryError, ForkedProcessError
warnings.simplefilter("ignore", DeprecationWarning)  # fork beside the driver's threads is the point
q, (k, v) = np.ones((2, 64), np.float32), np.ones((2, 20, 1, 64), np.float16)
want = za.reference.emulate(q, k, v)[0]

def world(runtime):
    device = za.Device.open("cpu" if runtime == "cpu" else 0, runtime=runtime)
    cache = za.KVCache(device, za.AttnShape(2, 1, 64), 1, 64, "f16", 16)
    return device, cache, za.Attention(cache), cache.new_sequence()

def right(attn, seq, rows=None):
    out = attn(q, seq, 0, **(rows or {}))
    assert np.array_equal(out.view(np.uint32), want.view(np.uint32))

def work(how):  # in a child
    if how == "call":
        alone = lambda: za.attention(q, k, v, device=device)
        for call in (alone, lambda: attn(q, seq, 0), lambda: cache.append(seq, 0, k, v), device.runtime.start):
            try:
                call()
            except ForkedProcessError:
                continue
            raise AssertionError(call)
    elif how == "drop":
        for name in ("attn", "seq", "cache", "device"):
            globals().pop(name)
        gc.collect()
    elif how == "close":
        device.close()
    elif how == "open":
        with world(sys.argv[1])[0] as own:
            again = za.KVCache(own, za.AttnShape(2, 1, 64), 1, 64, "f16", 16)
            right(za.Attention(again), again.new_sequence(), {"k": k, "v": v})
    return how

device, cache, attn, seq = world(sys.argv[1])
right(attn, seq, {"k": k, "v": v})
"""

FORKS = """
for how in ("call", "drop", "close", "open", "nothing"):
    if not (child := os.fork()):
        work(how)
        if how == "open":
            os._exit(7)  # lavapipe's own exit handler joins threads that fork() did not copy, and crashes
        sys.exit(7)
    assert (status := os.waitpid(child, 0)[1]) == 7 << 8, (how, status)
context = multiprocessing.get_context("fork")
for how in ("call", "drop", "open"):
    process = context.Process(target=work, args=(how,))
    process.start()
    process.join(60)
    assert process.exitcode == 0, how
with context.Pool(2) as pool:
    assert pool.map(work, ["call", "nothing", "call"]) == ["call", "nothing", "call"]
right(attn, seq)
device.close()
print("done")
"""


# --- little address space, and small files -----------------------------------------------------------------

LITTLE = """
import resource
from pathlib import Path
from zinc_attn.runtime.refusals import COMPILE_HEADROOM, FILE_HEADROOM, MEMORY_HEADROOM
from zinc_attn.runtime.protocol import Use

def limit(room):
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + room, resource.RLIM_INFINITY))

def refused(call, text):
    try:
        call()
    except DeviceMemoryError as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)

def little_memory(text):
    for use in Use:  # memory of lavapipe lies in a file without a name, which cannot grow beyond the limit on files
        device.runtime.buffer(1 << 20, use).close()
        refused(lambda: device.runtime.buffer(100 << 20, use), text)
    right(attn, seq)

right(attn, seq)
limit(64 << 20)
little_memory("RLIMIT_AS")  # recorded and compiled before
refused(lambda: za.KVCache(device, za.AttnShape(2, 1, 64), 4, 1 << 17), "RLIMIT_AS")  # in several buffers
refused(lambda: za.Device.open(0, runtime=sys.argv[1]), "RLIMIT_AS")
other = np.ones((2, 128), np.float32), *np.ones((2, 9, 1, 128), np.float16)
refused(lambda: za.attention(*other, device=device), "RLIMIT_AS")
limit(COMPILE_HEADROOM + (64 << 20))
out = za.attention(q, k, v, device=device)
assert np.array_equal(out.view(np.uint32), want.view(np.uint32))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_HEADROOM + (60 << 20), resource.RLIM_INFINITY))
little_memory("RLIMIT_FSIZE")
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
refused(lambda: za.Device.open(0, runtime=sys.argv[1]), "RLIMIT_FSIZE")
refused(lambda: za.KVCache(device, za.AttnShape(2, 1, 64), 1, 64), "RLIMIT_FSIZE")
right(attn, seq)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

for room in (0, 40, 100, 126, 200):  # MiB; 128 in two buffers are made and used, or refused
    limit(MEMORY_HEADROOM + (room << 20))
    try:
        with za.KVCache(device, za.AttnShape(2, 1, 64), 1, 1 << 19, "f16", 16) as large:
            right(za.Attention(large), large.new_sequence(), {"k": k, "v": v})
    except DeviceMemoryError:
        assert room < 128
    else:
        assert room > 128
device.close()
print("done")
"""


@pytest.mark.parametrize(
    ("runtime", "story"),
    [*itertools.product(RUNTIMES, ("FORKS", "LITTLE")), ("cpu", "FORKS")],
)
def test_a_process_comes_to_its_end(runtime, story):
    """With lavapipe alone, or the processor; a process that hangs fails."""
    needs(runtime)
    environment = {**faults.environment(faults.shim()), "LD_PRELOAD": ""}
    if runtime == "cpu":  # which is compiled already
        del environment["ZINC_ATTN_CACHE_DIR"]
    command = [sys.executable, "-c", WORLD + globals()[story], runtime]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
