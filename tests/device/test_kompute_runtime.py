"""The Kompute dispatcher: which kp it takes, and a host's manager, sequences and tensors."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import open_device

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.runtime.device import default_runtime

kp: Any = pytest.importorskip("kp", reason="kp is not installed: scripts/build_kp.sh builds it")
SHAPE = za.AttnShape(4, 2, 64)


@pytest.fixture(scope="module")
def index():
    with open_device("default", "vulkan") as device:
        return device.info.index


def recorded(manager, device, sequence=None, dtype=np.float32):
    """A cache, a host's sequence with a call on it, and the call."""
    cache = za.KVCache(device, SHAPE, 1, 64)
    seq = cache.new_sequence()
    cache.append(seq, 0, *np.ones((2, 5, 2, 64), np.float16))
    q = manager.tensor_t(np.ones(4 * 64, dtype))
    if sequence is None:
        sequence = manager.sequence()
        sequence.record(kp.OpTensorSyncDevice([q]))
    return cache, seq, sequence, za.Attention(cache).record(sequence, q, seq, 0)


def test_importing_kp_leaves_the_programs_logging_alone():
    program = "import logging, kp; assert not logging.getLogger().handlers"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("module", "text"),
    (
        (SimpleNamespace(), "ignores Vulkan's errors, .*, and has no kp.zinc_attn; build kp with scripts/build_kp.sh"),
        (SimpleNamespace(zinc_attn=SimpleNamespace(version=0)), "has version 0 of kp.zinc_attn, expected 2; build kp"),
        (None, "needs the package kp, which is not installed; build it with scripts/build_kp.sh"),
    ),
    ids=("stock", "other version", "none"),
)
def test_another_kp_is_refused_where_it_is_asked_for(monkeypatch, module, text):
    monkeypatch.delenv("ZINC_ATTN_RUNTIME", raising=False)
    assert default_runtime() == "kompute"
    monkeypatch.setitem(sys.modules, "kp", module)
    assert default_runtime() == "vulkan"
    with pytest.raises(errors.RuntimeUnavailableError, match=f"^runtime 'kompute'.* {text}.* or use runtime='vulkan'$"):
        za.Device.open(runtime="kompute")
    with pytest.raises(errors.RuntimeUnavailableError):
        za.Device.from_kompute(None)
    with za.Device.open() as device:
        assert device.runtime.name == "vulkan"


def test_the_managers_device_is_found(index):
    manager = kp.Manager(index)
    with za.Device.from_kompute(manager) as device:
        assert device.info.index == index and device.info.matrix.fragment is None
    others = [device.index for device in za.list_devices() if device.index != index and not device.native]
    for other in others:
        with pytest.raises(errors.DeviceNotFoundError, match=f"^index: got {other}, .*, but the manager's device is "):
            za.Device.from_kompute(manager, other)
    with pytest.raises(errors.DeviceNotFoundError, match="no Vulkan device matches"):
        za.Device.from_kompute(manager, 99)


def test_a_sequence_is_evaluated_in_its_step_alone(index):
    manager = kp.Manager(index)
    with za.Device.from_kompute(manager) as device:
        cache, _, sequence, call = recorded(manager, device)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"evaluate it inside `with call.step\(\):`"):
                sequence.eval()
            with call.step():
                sequence.eval()
            assert np.all(call.out.data().view(np.float32)[: 4 * 64] == 1.0)
        with pytest.raises(RuntimeError, match=r"before call.close\(\)$"), call.step():
            call.close()
            sequence.eval()
        with pytest.raises(RuntimeError, match=r"before call.close\(\)$"):
            sequence.eval()
        sequence.clear()
        with pytest.raises(RuntimeError, match=r"without operations$"):
            sequence.eval()
        cache.close()


def test_a_tensor_that_its_host_destroyed(index):
    manager = kp.Manager(index)
    with za.Device.from_kompute(manager) as device:
        cache, _, _, call = recorded(manager, device)
        call.out.destroy()
        with pytest.raises(errors.ClosedError, match=r"^out: the kp.Tensor was destroyed"), call.step():
            pytest.fail("the step began")
        cache.close()


def test_what_is_of_another_manager_or_gone_is_refused(index):
    manager, other = kp.Manager(index), kp.Manager(index)
    with za.Device.from_kompute(manager) as device, za.Device.open(index, runtime="kompute") as other_device:
        gone = manager.sequence()
        gone.destroy()
        evaluated = manager.sequence()
        evaluated.eval(kp.OpTensorSyncDevice([manager.tensor_t(np.ones(4, np.float32))]))
        refused = (
            (other.sequence(), "of another kp.Manager or queue, or one that was destroyed"),
            (gone, "of another kp.Manager or queue, or one that was destroyed"),
            (evaluated, "that was evaluated, and cannot take more"),
            (manager.sequence(0, 2), "with timestamps, of which a call's operations take more than it has"),
        )
        for sequence, text in refused:
            with pytest.raises(
                errors.ArgumentError, match=f"^sequence: got a kp.Sequence {text}; expected a new one of"
            ):
                recorded(manager, device, sequence)
        for dtype, nbytes in ((np.float64, 2048), (bool, 256)):
            with pytest.raises(errors.ArgumentError, match=f"^q: got a kp.Tensor of 256 elements in {nbytes} bytes, "):
                recorded(manager, device, dtype=dtype)
        with pytest.raises(errors.ArgumentError, match=r"^q: got a kp.Tensor of another kp.Manager, or one that was "):
            recorded(other, device, manager.sequence())
        with pytest.raises(errors.RuntimeUnavailableError, match=r"^record: .*, expected a Device.from_kompute$"):
            recorded(manager, other_device)


GONE = """
import sys
import numpy as np
sys.path.insert(0, {tests!r})
import kp, zinc_attn as za
from zinc_attn.errors import ClosedError
from test_kompute_runtime import recorded

def refused(call):
    try:
        call()
    except ClosedError as error:
        assert "kp.Manager" in str(error), error
    else:
        raise AssertionError(call)

manager = kp.Manager({index})
device = za.Device.from_kompute(manager)
cache, seq, sequence, call = recorded(manager, device)
with call.step():
    sequence.eval()
manager.destroy()
for one in (lambda: za.Attention(cache)(np.ones((4, 64), np.float32), seq, 0), device.runtime.start):
    refused(one)
refused(lambda: za.Device.from_kompute(manager))
for one in {order}:
    one.close()
print("done")
"""


@pytest.mark.parametrize("order", ("(call, cache, device)", "(device, call, cache)", "()"))
def test_a_manager_that_its_host_destroyed(index, order):
    """Typed errors, and no crash at the end of the process."""
    program = GONE.format(tests=os.path.dirname(__file__), index=index, order=order)
    path = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
