"""The exported operation outside this package: examples/embed_c on every driver, and the manifest's index maps."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import DRIVERS

import zinc_attn as za
from zinc_attn.cache import rows
from zinc_attn.decode.scoring import Scoring
from zinc_attn.decode.workspace import SharedTensors, Tensors, Workspace
from zinc_attn.kernels import declarations as kernels
from zinc_attn.kernels.records import WorkBuffer
from zinc_attn.limits import DTYPE_BYTES
from zinc_attn.planning.call import RecordingKey
from zinc_attn.runtime.protocol import Dispatch, Use
from zinc_attn.tools import export
from zinc_attn.tools.export import describe, evaluate, evaluate_all, formulas, meanings
from zinc_attn.tools.export.files import sealed

EXAMPLE = Path(__file__).parents[2] / "examples" / "embed_c"
SHAPE = za.AttnShape(20, 2, 80)  # two chunks of heads per KV head, and lanes without a slice of the values
CONTEXTS = (0, 1, 63, 64, 65, 1000, 8192)
SPLITS = (0, 1, 7)  # 0: the split rule
MASKS = (  # window, softcap, sinks
    (None, None, False),
    (130, None, True),
    (3000, 2.0, True),
    (None, 30.0, False),
)
COMPILER = shutil.which(os.environ.get("CC", "cc"))

SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined"]
FALLIBLE = {  # functions that give a VkResult: how often one case calls them at least
    "vkEnumerateInstanceVersion": 1,
    "vkCreateInstance": 1,
    "vkEnumeratePhysicalDevices": 1,
    "vkCreateDevice": 1,
    "vkCreateCommandPool": 1,
    "vkAllocateCommandBuffers": 1,
    "vkCreateFence": 1,
    "vkCreateBuffer": 7,
    "vkAllocateMemory": 7,
    "vkBindBufferMemory": 7,
    "vkMapMemory": 4,
    "vkCreateShaderModule": 3,
    "vkCreateDescriptorSetLayout": 3,
    "vkCreatePipelineLayout": 3,
    "vkCreateComputePipelines": 3,
    "vkCreateDescriptorPool": 1,
    "vkAllocateDescriptorSets": 3,
    "vkBeginCommandBuffer": 2,
    "vkEndCommandBuffer": 2,
    "vkQueueSubmit": 2,
    "vkWaitForFences": 2,
    "vkResetFences": 2,
}
SHIMMED = (*FALLIBLE, "vkGetPhysicalDeviceProperties2", "vkGetPhysicalDeviceFeatures2")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler (package gcc)")


def _make_case():
    spec = importlib.util.spec_from_file_location("make_case", EXAMPLE / "make_case.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_case = _make_case()


def build(folder, *arguments):
    sources = sorted(map(str, EXAMPLE.glob("*.c")))
    strict = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    command = [COMPILER, *strict, *arguments, "-o", str(folder / "embed"), *sources, "-lvulkan", "-lm"]
    return subprocess.run(command, capture_output=True, text=True), folder / "embed"


@pytest.fixture(scope="session")
def embed(tmp_path_factory):
    """The program, compiled without a warning."""
    done, program = build(tmp_path_factory.mktemp("embed"), "-O2")
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="session")
def checked(tmp_path_factory, embed):
    """The program with the compiler's sanitizers, where it has them: for files that are no good."""
    done, program = build(tmp_path_factory.mktemp("checked"), *SANITIZE)
    return program if done.returncode == 0 else embed


@pytest.fixture(scope="session")
def shimmed(tmp_path_factory):
    """The program with a shim before libvulkan, see embed_shim.c; with the sanitizers, where they are there."""
    shim = Path(__file__).with_name("embed_shim.c")
    wrap = [f"-Wl,--wrap={name}" for name in SHIMMED]
    for flags in (SANITIZE, []):
        done, program = build(tmp_path_factory.mktemp("shimmed"), *flags, *wrap, str(shim))
        if done.returncode == 0:
            return program
    pytest.fail(done.stderr)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """The exported kernels; case files by (tokens, mask, splits), and the oracle's digests by (tokens, mask)."""
    folder = tmp_path_factory.mktemp("inputs")
    export.export(folder / "kernels", [SHAPE], page_size=128)
    rng = np.random.default_rng(5)
    q = rng.standard_normal((SHAPE.q_heads, SHAPE.head_dim), dtype=np.float32)
    q[0, :3] = -0.0, 2.0**-41, -(2.0**-149)  # counts as 0
    k, v = rng.standard_normal((2, max(CONTEXTS), SHAPE.kv_heads, SHAPE.head_dim)).astype(np.float16)
    k[5:9] *= np.float16(60)  # awkward: large scores, subnormals, zeros of either sign
    v[::3, 0, :4] = np.float16(6e-8), np.float16(-6e-8), np.float16(-0.0), np.float16(65504)
    sinks = rng.standard_normal(SHAPE.q_heads, dtype=np.float32)
    cases, digests = {}, {}
    for n, (mask, (window, softcap, some)) in itertools.product(CONTEXTS, enumerate(MASKS)):
        options = {"window": window, "softcap": softcap, "sinks": sinks if some else None}
        digests[n, mask] = make_case.digest(*za.reference.emulate(q, k[:n], v[:n], **options))
        for splits in SPLITS:
            cases[n, mask, splits] = folder / f"case{n}.{mask}.{splits}"
            make_case.write_case(cases[n, mask, splits], q, k[:n], v[:n], splits, **options)
    return SimpleNamespace(folder=folder, kernels=folder / "kernels", cases=cases, digests=digests, qkv=(q, k, v))


def run(program, *args, leaks=False):
    env = {**os.environ, "ASAN_OPTIONS": f"detect_leaks={int(leaks)}"}
    return subprocess.run([str(program), *map(str, args)], capture_output=True, text=True, env=env)


@needs_compiler
@pytest.mark.parametrize("any_device", [(d, r) for d, r in DRIVERS if r == "vulkan"], indirect=True, ids="-".join)
def test_digests_are_python_s_and_the_oracle_s(embed, inputs, any_device):
    """Every context and layout, both builds of pass 1, appended, attended and merged by C."""
    name = any_device.info.name
    q, k, v = inputs.qkv
    out, lse = za.attention(q, k[:1000], v[:1000], device=any_device, return_lse=True)
    done = run(embed, "-d", name, inputs.kernels, *inputs.cases.values())
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.startswith(name)
    found = {tuple(line.split("  ")[:2]): line.rsplit(" ", 1)[1] for line in lines}
    assert list(found) == [(inputs.digests[n, mask], str(path)) for (n, mask, _), path in inputs.cases.items()]
    assert set(found.values()) == {"single", "loop"}
    assert make_case.digest(out, lse) == inputs.digests[1000, 0]


# --- files that are no good: refused with a line that says why, under the sanitizers -------------------------


def refused(program, *args, leaks=False):
    """The line on stderr. ``leaks`` looks for lost memory too, where no driver is loaded: they lose some."""
    done = run(program, *args, leaks=leaks)
    assert (done.returncode, done.stdout.count("\n") <= 1) == (2, True), done
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("embed: "), done.stderr
    return done.stderr


@pytest.fixture
def copy(inputs, tmp_path):
    """A copy of the exported kernels that a test may damage, and its manifest."""
    folder = tmp_path / "kernels"
    shutil.copytree(inputs.kernels, folder)
    return folder, json.loads((folder / "manifest.json").read_text())


@needs_compiler
@pytest.mark.parametrize(
    "change,message",
    (
        ({"version": 1}, "got version 1, expected 2; export it with the zinc-attn that this program was written for"),
        ({"format": "other"}, "got format other, expected zinc_attn export"),
        ({"shapes": []}, "it has no sizes for shape 20/2/80, f16; export it with --shape 20/2/80 --dtype f16"),
        ({"kernels": []}, "it has no kernel append"),
        ({"work": {}}, "it has no sizes of the work buffer's records; export it again"),
        ({"constants": {}}, "it has no KEYS_PER_LEAF; export it again"),
    ),
)
def test_a_manifest_that_does_not_fit_is_refused(checked, inputs, copy, change, message):
    folder, data = copy
    (folder / "manifest.json").write_bytes(sealed(json.dumps({**data, **change}).encode()))
    assert message in refused(checked, folder, inputs.cases[65, 0, 0])


@needs_compiler
def test_a_field_that_is_not_there_is_refused(checked, inputs, copy):
    folder, data = copy
    data["work"]["item"]["fields"] = [f for f in data["work"]["item"]["fields"] if f["name"] != "leaf_end"]
    (folder / "manifest.json").write_bytes(sealed(json.dumps(data).encode()))
    assert "record item has no field leaf_end; export it again" in refused(checked, folder, inputs.cases[65, 0, 0])


@needs_compiler
def test_a_changed_manifest_is_refused(checked, inputs, copy):
    folder, data = copy
    path = folder / "manifest.json"
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"binding": 1', b'"binding": 2', 1))
    assert "got manifest_sha256 " + data["manifest_sha256"] in refused(checked, folder, inputs.cases[65, 0, 0])
    for without in (json.dumps({**data, "manifest_sha256": "0"}), json.dumps({**data, "manifest_sha256": None})):
        path.write_text(without)
        assert "it has no manifest_sha256; export it again" in refused(checked, folder, inputs.cases[65, 0, 0])
    path.write_bytes(text)


@needs_compiler
def test_a_module_with_another_checksum_is_refused(checked, inputs, copy):
    folder, _ = copy
    module = folder / "append.spv"
    module.write_bytes(module.read_bytes()[:-1] + b"\1")
    assert "append.spv: got SHA-256 " in refused(checked, folder, inputs.cases[65, 0, 0])
    module.unlink()
    assert "append.spv: cannot be read: No such file" in refused(checked, folder, inputs.cases[65, 0, 0])


@needs_compiler
def test_a_case_that_is_no_good_is_refused(checked, inputs, tmp_path):
    good = inputs.cases[65, 0, 0].read_bytes()
    path = tmp_path / "case"

    def message(data):
        path.write_bytes(data)
        return refused(checked, inputs.kernels, path, leaks=True)

    assert f"got {len(good) - 1} bytes, expected {len(good)} for shape 20/2/80 and 65 tokens" in message(good[:-1])
    assert f"got {len(good) + 2} bytes, expected" in message(good + b"\0\0")
    for size in (0, 7, 55, 56, 57):
        assert "not a file of make_case.py" in message(good[:size]) or size >= 56
    assert "got version 9, expected 1" in message(good[:8] + struct.pack("<I", 9) + good[12:])
    assert "beyond what the kernels take" in message(good[:12] + b"\xff" * 16 + good[28:])
    assert "q[0]: got nan, expected at most" in message(good[:56] + struct.pack("<f", np.nan) + good[60:])
    assert "v[10399]: got an infinity or NaN" in message(good[:-2] + struct.pack("<e", np.inf))
    assert "whose scores may overflow" in message(good[:40] + struct.pack("<d", 1e30) + good[48:])
    assert "got softcap -1, expected" in message(good[:48] + struct.pack("<d", -1) + good[56:])
    masked = inputs.cases[65, 1, 0].read_bytes()
    at = 56 + 4 * SHAPE.q_heads * SHAPE.head_dim
    assert "sinks[1]: got inf" in message(masked[: at + 4] + struct.pack("<f", np.inf) + masked[at + 8 :])
    assert "cannot be read: No such file" in refused(checked, inputs.kernels, tmp_path / "none")
    assert "cannot be read" in refused(checked, tmp_path / "none", path)
    assert "no Vulkan device of" in refused(checked, "-d", "no such device", inputs.kernels, inputs.cases[0, 0, 0])
    assert run(checked).returncode == 2


@needs_compiler
def test_no_driver_is_refused(checked, inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("VK_DRIVER_FILES", str(tmp_path / "none.json"))
    monkeypatch.setenv("VK_ICD_FILENAMES", str(tmp_path / "none.json"))
    monkeypatch.delenv("VK_ADD_DRIVER_FILES", raising=False)
    assert "no Vulkan d" in refused(checked, inputs.kernels, inputs.cases[0, 0, 0])


@needs_compiler
def test_a_damaged_manifest_never_crashes_it(checked, inputs, tmp_path, rng):
    """Cut anywhere, or with bytes changed, it is refused, or what it says still fits; under a checksum that fits."""

    def seal(data):
        at = data.find(b'"manifest_sha256": "')
        whole = at >= 0 and data[at + 84 : at + 85] == b'"'
        return sealed(bytes(data)) if whole else data

    text = (inputs.kernels / "manifest.json").read_bytes()
    path, case = tmp_path / "manifest.json", tmp_path / "case"
    case.write_bytes(b"no case")  # so that no damaged manifest gets as far as a device
    small = json.dumps({k: v for k, v in json.loads(text).items() if k not in ("kernels", "quantities")}).encode()
    for cut in rng.integers(0, len(small), 40):
        path.write_bytes(seal(small[:cut]))
        refused(checked, tmp_path, case, leaks=True)
    for _ in range(60):
        data = bytearray(small)
        for at in rng.integers(0, len(data), 3):
            data[at] = b'"{}[]:,\\u0-9e.\x01\xff'[rng.integers(0, 16)]
        path.write_bytes(seal(data))
        refused(checked, tmp_path, case, leaks=True)
    for data in (b"[" * 100000, b'{"a":' * 100000, b'"\\ud800\\u', b"1e999", b"-", b"nan", b'"\\u0000"'):
        path.write_bytes(data)
        refused(checked, tmp_path, case, leaks=True)


# --- what no driver here does ---------------------------------------------------------------------------------


def test_every_call_that_can_fail_is_in_the_table():
    """Each VkResult is looked at, and has its test below."""
    text = (EXAMPLE / "gpu.c").read_text() + (EXAMPLE / "embed.c").read_text()
    called = set(re.findall(r"\b(vk[A-Z]\w+)\(", text))
    void = re.compile("vk(Get|Destroy|Free|Cmd|Update)|vkEnumerateDeviceExtensionProperties|vkDeviceWaitIdle")
    assert {name for name in called if not void.match(name)} == set(FALLIBLE)


@needs_compiler
@pytest.mark.parametrize("name", FALLIBLE)
def test_a_call_that_fails_is_refused(shimmed, inputs, monkeypatch, name):
    """The first and the last call of a case: one line with the reason, everything freed, nothing crashes."""
    for count in {1, FALLIBLE[name]}:
        monkeypatch.setenv("EMBED_FAIL", f"{name}:{count}:-2")
        assert "out of device memory (VkResult -2)" in refused(shimmed, inputs.kernels, inputs.cases[65, 0, 0])


@needs_compiler
@pytest.mark.parametrize(
    "result,reason", ((-1, "out of host memory"), (-4, "the device was lost"), (-13, "unexpected"))
)
def test_the_reason_is_named(shimmed, inputs, monkeypatch, result, reason):
    monkeypatch.setenv("EMBED_FAIL", f"vkQueueSubmit:2:{result}")
    message = refused(shimmed, inputs.kernels, inputs.cases[65, 0, 0])
    assert message.startswith(f"embed: vkQueueSubmit: {reason}") and message.endswith(f"(VkResult {result})\n")
    monkeypatch.setenv("EMBED_FAIL", f"vkQueueSubmit:3:{result}")  # a case submits twice
    assert run(shimmed, inputs.kernels, inputs.cases[65, 0, 0]).returncode == 0


@needs_compiler
def test_memory_that_is_not_there(shimmed, inputs, monkeypatch):
    monkeypatch.setenv("EMBED_FAIL", "vkAllocateMemory:4:-2")
    message = refused(shimmed, inputs.kernels, inputs.cases[65, 0, 0])
    assert re.search(r"k: [\d,]+ bytes are needed: out of device memory .*; use a shorter context or free", message)


@needs_compiler
def test_subgroups_of_32_are_asked_for_where_they_are_offered(shimmed, inputs, monkeypatch):
    """And only the size: nothing rests on full subgroups."""
    monkeypatch.setenv("EMBED_WAVE32", "1")
    done = run(shimmed, inputs.kernels, inputs.cases[65, 0, 0])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "device: subgroupSizeControl 1, computeFullSubgroups 0"
    assert lines[1].endswith("subgroups of 32 requested")
    assert lines[2:5] == ["pipeline: requiredSubgroupSize 32, flags 0"] * 3
    assert lines[5].startswith(inputs.digests[65, 0])
