"""The device tests once under the Khronos validation layer with synchronization validation: silent."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import FULL

HERE = Path(__file__).parent
LAYERS = [
    Path(d) / "vulkan/explicit_layer.d/VkLayer_khronos_validation.json"
    for d in ("/usr/share", "/usr/local/share", "/etc")
]
# What the layer looks at is the calls, which are the same for every value, length and driver. So one call of each kind
# goes under it, on each dispatcher, and with --full every test.
CALLS = (
    "test_bias.py::test_rows_that_share_keys_have_masks_and_positions_of_their_own[kompute-alibi]",
    "test_bias.py::test_rows_that_share_keys_have_masks_and_positions_of_their_own[vulkan-alibi]",
    "test_bits.py::test_several_rows_with_a_causal_limit",
    "test_bits.py::test_bits_equal_the_oracle[default-kompute-9/3/64-f16-1000]",
    "test_bits.py::test_bits_equal_the_oracle[default-vulkan-9/3/64-f16-1000]",
    "test_cache.py::test_bits_on_every_way_to_a_context[default-kompute-256]",
    "test_cache.py::test_bits_on_every_way_to_a_context[default-vulkan-256]",
    "test_cache.py::test_steady_decode_records_nothing",
    "test_cache_edges.py::test_steady_decode_of_a_batch_in_several_blocks",
    "test_cascade.py::test_the_bits_of_the_batch_without_it[default-kompute-9/3/64-f16]",
    "test_cascade.py::test_the_bits_of_the_batch_without_it[default-vulkan-9/3/64-f16]",
    "test_device_encoding.py::test_a_prompt_is_encoded_on_the_device_and_a_token_by_the_host[kompute-q8_0/q5_1]",
    "test_device_encoding.py::test_a_prompt_is_encoded_on_the_device_and_a_token_by_the_host[vulkan-q8_0/q5_1]",
    "test_embed_c.py::test_digests_are_python_s_and_the_oracle_s[default-vulkan]",
    "test_errors.py",
    "test_grid.py::test_the_oracles_bits[vulkan-2/1/80/65/latent-q4_1-random-alibi-sinks-113x32]",
    "test_partial.py::test_shards_of_a_sequence",
    "test_persist.py::test_a_loaded_sequence_has_the_bits_of_the_saved_one[kompute-f16]",
    "test_persist.py::test_a_loaded_sequence_has_the_bits_of_the_saved_one[vulkan-f16]",
    "test_record.py",
    "test_scoring.py::test_layers_of_a_cache_score_differently[vulkan-256]",
    "test_sharded.py::test_the_bits_of_one_device[two runtimes-f16-some0]",
    "test_storage.py::test_encoded_rows_are_attended_as_their_values[vulkan-q5_1/iq4_nl]",
    "test_storage.py::test_scales_are_a_heads_and_a_layers[kompute]",
    "test_submit.py",
    "test_vulkan_runtime.py",
)
SETTINGS = """\
khronos_validation.enables = VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT
khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG
khronos_validation.report_flags = error,warn
khronos_validation.log_filename = {log}
"""


def run_under_validation(tmp_path, *args):
    settings, log = tmp_path / "vk_layer_settings.txt", tmp_path / "validation.log"
    settings.write_text(SETTINGS.format(log=log))
    env = {
        **os.environ,
        "VK_INSTANCE_LAYERS": "VK_LAYER_KHRONOS_validation",
        "VK_LAYER_SETTINGS_PATH": str(settings),
    }
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env)
    return done, log.read_text() if log.exists() else ""


needs_layer = pytest.mark.skipif(
    not any(p.exists() for p in LAYERS) or "VK_INSTANCE_LAYERS" in os.environ,
    reason="the Khronos validation layer is not installed (package vulkan-validationlayers), or is on already",
)


@needs_layer
def test_the_device_tests_are_silent_under_validation(tmp_path):
    files = sorted(p.name for p in HERE.glob("test_*.py") if p.name != Path(__file__).name)
    chosen = [f"{HERE}/{name}" for name in (files if FULL else CALLS)]
    command = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not subnormal and not 131072 and not fork and not opening_and_closing and not swiftshader "
        "and not ranks and not distributed",
        *chosen,
    )
    done, log = run_under_validation(tmp_path, *command)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20
    assert log == "" and "VUID" not in done.stdout + done.stderr, log[:4000]


RACE = """
import numpy as np, zinc_attn as za
from zinc_attn.kernels import declarations as kernels
for binding in (*kernels.KERNELS[0].bindings, *kernels.MERGE.bindings):
    object.__setattr__(binding, "access", "read")  # hides the writes that the second pass must wait for
rng = np.random.default_rng(0)
k = rng.standard_normal((300, 2, 64), dtype=np.float32)
with za.Device.open(runtime={runtime!r}) as device:
    za.attention(k[0].repeat(2, axis=0), k, k, device=device)
"""


NO_WORK = """
import zinc_attn as za
with za.Device.open(runtime={runtime!r}) as device:
    device.runtime.empty_submit()
    recording = device.runtime.record([])
    for _ in range(2):
        device.runtime.empty_submit()
        device.runtime.run(recording)
"""


@needs_layer
@pytest.mark.parametrize("runtime", ("kompute", "vulkan"))
def test_submissions_without_work_are_valid(tmp_path, runtime):
    done, log = run_under_validation(tmp_path, "-c", NO_WORK.format(runtime=runtime))
    assert done.returncode == 0, done.stderr
    assert log == "", log[:4000]


@needs_layer
@pytest.mark.parametrize("runtime", ("kompute", "vulkan"))
def test_validation_sees_a_race_when_there_is_one(tmp_path, runtime):
    """The check can fail: without the ordering between the passes the layer reports a hazard."""
    done, log = run_under_validation(tmp_path, "-c", RACE.format(runtime=runtime))
    assert done.returncode == 0, done.stderr
    assert "READ_AFTER_WRITE" in log
