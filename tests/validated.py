"""The tests that run under the Khronos validation layer, in one process, which ``test_validation.py`` starts.

They run there and nowhere else: where that test is among those of a run, the others leave them to it. The layer hands
each call on to the driver as it is, so what they assert is what they assert without it.
"""

import os
from pathlib import Path

import pytest
from support import FULL

LAYERS = [
    Path(d) / "vulkan/explicit_layer.d/VkLayer_khronos_validation.json"
    for d in ("/usr/share", "/usr/local/share", "/etc")
]
RUNS_THEM = "tests/device/test_validation.py::test_the_device_tests_are_silent_under_validation"
# What the layer looks at is the calls, which are the same for every value, length and driver. So one call of each kind
# goes under it, on one of the dispatchers, which record the same commands; with --full every test does.
CALLS = (
    "test_bias.py::test_of_one_call[default-vulkan]",
    "test_c_engine.py::test_a_case_has_the_oracle_s_bits[default-vulkan-plain]",
    "test_c_engine.py::test_a_case_has_the_oracle_s_bits[default-vulkan-heads first]",
    "test_c_library.py::test_a_copied_page_is_the_page_in_every_layer[vulkan]",
    "test_c_engine.py::test_a_call_that_failed_leaves_commands_for_the_next",
    "test_cache_memory.py::test_steady_decode_records_nothing",
    "test_check_graph.py::test_the_oracles_bits[default-vulkan-q4_K]",
    "test_cascade.py::test_the_bits_of_the_batch_without_it[default-vulkan-9/3/64-f16]",
    "test_device_encoding.py::test_a_prompt_is_encoded_on_the_device_and_a_token_by_the_host[vulkan-q8_0/q5_1]",
    "test_errors.py::test_buffers_that_the_device_has_no_room_for",
    "test_ggml.py::test_bits_are_the_oracle_s[vulkan-no mask, several nodes]",
    "test_ggml.py::test_a_graph_has_the_oracle_s_bits_fused_or_not[vulkan-a dense layer]",
    "test_grid.py::test_bits_of_every_layout[default-kompute-9/3/64-f16-1000]",
    "test_grid.py::test_the_oracles_bits[vulkan-2/1/80/65/latent q4_1 113 rows=32 sinks+alibi+mask=f16+noncausal]",
    "test_kompute_cpp.py",
    "test_kompute_runtime.py",
    "test_outputs.py::test_a_batch_and_a_prompt_of_several_submissions[vulkan]",
    "test_persist.py::test_a_loaded_sequence_has_the_bits_of_the_saved_one[vulkan-f16]",
    "test_record.py",
    "test_sharded.py::test_the_bits_of_one_device[two runtimes-q8_0-some0]",
    "test_storage.py::test_encoded_rows_on_a_driver[vulkan]",
    "test_storage.py::test_scales_are_a_heads_and_a_layers[vulkan]",
    "test_submit.py",
    "test_pipeline_cache.py",
    "test_vulkan_failures.py",
    "test_vulkan_runtime.py",
)
# Tests that the layer cannot be under, or would take minutes for, by a word of their names.
NOT_THESE = ("slip", "subnormal", "131072", "fork", "opening_and_closing", "swiftshader", "ranks", "distributed")
LEFT: pytest.StashKey[list[str]] = pytest.StashKey()  # the ids of the tests that this run leaves to that process
SETTINGS = """\
khronos_validation.enables = VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT
khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG
khronos_validation.report_flags = error,warn
khronos_validation.log_filename = {log}
"""


def layer_is_missing() -> bool:
    """Whether the layer is not installed, or on already."""
    return not any(path.exists() for path in LAYERS) or "VK_INSTANCE_LAYERS" in os.environ


needs_layer = pytest.mark.skipif(
    layer_is_missing(),
    reason="the Khronos validation layer is not installed (package vulkan-validationlayers), or is on already",
)


def is_validated(nodeid: str) -> bool:
    """Whether the test is one of CALLS."""
    path, _, name = nodeid.partition("::")
    call = f"{path.rpartition('/')[2]}::{name}"
    chosen = any(call == listed or call.startswith((f"{listed}::", f"{listed}[")) for listed in CALLS)
    return chosen and not any(word in name.lower() for word in NOT_THESE)


def leave_to_the_layer(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the process under the layer runs, if it is run."""
    if FULL or layer_is_missing() or not any(item.nodeid == RUNS_THEM for item in items):
        return
    left = [item for item in items if is_validated(item.nodeid)]
    config.stash[LEFT] = [item.nodeid for item in left]
    items[:] = [item for item in items if not is_validated(item.nodeid)]
    config.hook.pytest_deselected(items=left)
