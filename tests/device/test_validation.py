"""The device tests once under the Khronos validation layer with synchronization validation: silent."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import FULL
from validated import CALLS, LEFT, NOT_THESE, SETTINGS, needs_layer

HERE = Path(__file__).parent


def run_under_validation(tmp_path, *args):
    settings, log = tmp_path / "vk_layer_settings.txt", tmp_path / "validation.log"
    settings.write_text(SETTINGS.format(log=log))
    env = {**os.environ, "VK_INSTANCE_LAYERS": "VK_LAYER_KHRONOS_validation", "VK_LAYER_SETTINGS_PATH": str(settings)}
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, cwd=HERE.parents[1])
    return done, log.read_text() if log.exists() else ""


@needs_layer
def test_the_device_tests_are_silent_under_validation(request, tmp_path):
    """And they pass there; those that the other processes of this run leave out are among them."""
    files = sorted(p.name for p in HERE.glob("test_*.py") if p.name != Path(__file__).name)
    chosen = [f"{HERE}/{name}" for name in (files if FULL else CALLS)]
    words = " and ".join(f"not {word}" for word in NOT_THESE)
    done, log = run_under_validation(tmp_path, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", words, *chosen)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20
    assert log == "" and "VUID" not in done.stdout + done.stderr, log[:4000]
    ran = set(re.findall(r"^(\S.*?) (?:PASSED|SKIPPED)", done.stdout, re.MULTILINE))
    assert set(request.config.stash.get(LEFT, [])) <= ran


RACE = """
import numpy as np, zinc_attn as za
from zinc_attn.kernels import declarations as kernels
for binding in (*kernels.KERNELS[0].bindings, *kernels.MERGE.bindings):
    object.__setattr__(binding, "access", "read")  # hides the writes that the second pass must wait for
rng = np.random.default_rng(0)
k = rng.standard_normal((1100, 2, 64), dtype=np.float32)
with za.Device.open(runtime={runtime!r}) as device:
    za.attention(k[0].repeat(2, axis=0), k, k, device=device)
"""


@needs_layer
@pytest.mark.parametrize("runtime", ("kompute", "vulkan"))
def test_validation_sees_a_race_when_there_is_one(tmp_path, runtime):
    """The check can fail: without the ordering between the passes the layer reports a hazard."""
    done, log = run_under_validation(tmp_path, "-c", RACE.format(runtime=runtime))
    assert done.returncode == 0, done.stderr
    assert "READ_AFTER_WRITE" in log
