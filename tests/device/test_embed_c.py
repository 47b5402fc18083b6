"""The exported operation outside this package: the C library's program on every driver."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import operator
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from c_host import (
    EMBED,
    LIBRARY,
    NATIVE,
    PAGE,
    ROOT,
    SANITIZE,
    SHIM,
    SOURCES,
    WRAP,
    compiled,
    make_case,
    needs_compiler,
    page_words,
)
from support import DRIVERS, FULL, open_device, same

import zinc_attn as za
from zinc_attn.kernels import declarations as kernels
from zinc_attn.tools import export
from zinc_attn.tools.export.files import sealed

Step, Values, Case = make_case.Step, make_case.Values, make_case.Case

SHAPE = za.AttnShape(20, 2, 80)  # two chunks of heads per KV head, and lanes without a slice of the values
SMALL = za.AttnShape(1, 1, 64)  # compiles fast
CONTEXTS = (0, 1, 63, 64, 65, 1000, 8192)
SHORT = (1, 65, "run")
SPLITS = (0, 1, 7)  # 0: the split rule
MASKS = ((None, None, False), (130, None, True), (3000, 2.0, True), (None, 30.0, False))  # window, softcap, sinks
# ALiBi, not causal, masks that are not of the whole context, and all that there is; test_c_library.py has each alone
SOME = {"alibi": True, "causal": False, "masks": 0.4}
EVERYTHING = {"alibi": True, "masks": 0.4, "window": 100, "softcap": 3.0, "sinks": True}
# (sequence, new rows, query rows): a prompt in chunks of which some rows are attended, or none; a fork at the end of a
# page, which looks, and both grow; then a fork of the fork within a page, and both grow
RUN = ((0, 70, 9), (0, 57, 0), (0, 1, 1), (1, 0, 2), (0, 1, 1), (1, 1, 1), (1, 99, 5), (2, 2, 2), (1, 1, 1))

CALLED = {  # functions that give a VkResult, by how often a run of SMALL calls them at least
    1: "vkEnumerateInstanceVersion vkCreateInstance vkEnumeratePhysicalDevices vkCreateDevice vkCreateCommandPool "
    "vkResetDescriptorPool vkAllocateCommandBuffers vkCreateFence",
    2: "vkCreateDescriptorPool",
    4: "vkCreateDescriptorSetLayout vkCreatePipelineLayout vkBeginCommandBuffer vkEndCommandBuffer vkQueueSubmit "
    "vkWaitForFences vkCreateShaderModule vkCreateComputePipelines",
    6: "vkMapMemory",
    7: "vkAllocateDescriptorSets",
    9: "vkCreateBuffer vkAllocateMemory vkBindBufferMemory",
}
FALLIBLE = {name: count for count, names in CALLED.items() for name in names.split()}

pytestmark = needs_compiler


@pytest.fixture(scope="session")
def embed(tmp_path_factory):
    """The program as CMake makes it, without a warning."""
    folder = tmp_path_factory.mktemp("embed")
    for command in (["-S", str(NATIVE), "-B", str(folder)], ["--build", str(folder), "-j2"]):
        done = subprocess.run(["cmake", *command], capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
    return folder / "embed"


@pytest.fixture(scope="session")
def checked(tmp_path_factory):
    """The program with a shim before libvulkan, see embed_shim.c, and the sanitizers where the compiler has them.

    Vulkan layers lose memory of their own.
    """
    program = tmp_path_factory.mktemp("checked") / "embed"
    for flags in ([] if "VK_INSTANCE_LAYERS" in os.environ else SANITIZE, []):
        done = compiled(program, [*SOURCES, SHIM], *flags, *WRAP)
        if done.returncode == 0:
            return program
    pytest.fail(done.stderr)


def contexts(rng, shape):
    """The cases of the digests and their names: one row of each length, mask and number of splits; then a run."""
    q = rng.standard_normal((1, shape.q_heads, shape.head_dim), dtype=np.float32)
    q[0, 0, :3] = -0.0, 2.0**-41, -(2.0**-149)  # counts as 0
    k, v = rng.standard_normal((2, max(CONTEXTS), shape.kv_heads, shape.head_dim)).astype(np.float16)
    k[5:9] *= np.float16(60)  # awkward: large scores, subnormals, zeros of either sign
    v[::3, 0, :4] = np.float16(6e-8), np.float16(-6e-8), np.float16(-0.0), np.float16(65504)
    sinks = rng.standard_normal(shape.q_heads, dtype=np.float32)
    options = [{"window": w, "softcap": cap, "sinks": sinks if some else None} for w, cap, some in MASKS]
    for n, mask, splits in itertools.product(CONTEXTS, range(len(MASKS)), SPLITS):
        last = max(n - 1, 0)
        values = [[Values(q[:0], k[:last], v[:last])], [Values(q, k[last:n], v[last:n])]]
        yield (n, mask), Case(shape, "f16", 1, [Step(0, last, 0), Step(0, n - last, 1)], values, splits, options[mask])
    for mask in (0, 1):
        yield ("run", mask), Case.drawn(rng, shape, "f16", 3, [Step(*s) for s in RUN], options=options[mask])


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """SMALL's kernels, and a case with two sequences: a call, a copied page, and another call."""
    folder = tmp_path_factory.mktemp("small")
    export.export(folder / "kernels", [SMALL], page_size=128)
    case = Case.drawn(np.random.default_rng(7), SMALL, "f16", 1, [Step(0, 65, 1), Step(1, 1, 1)])
    case.write(folder / "case")
    with open_device("default", "vulkan") as opened:
        on = "-d", opened.info.name
    digest = make_case.digest(case)
    return SimpleNamespace(on=on, kernels=folder / "kernels", case=folder / "case", digest=digest)


def run(program, *args):
    """The program's run, its stderr without what the sanitizers say of drivers, which lose some memory."""
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "LSAN_OPTIONS": "exitcode=0"}
    done = subprocess.run([str(program), *map(str, args)], capture_output=True, text=True, env=env)
    done.stderr, _, report = done.stderr.partition("\n==")
    assert "AddressSanitizer" not in report, report
    assert not re.search(r"#1 0x\w+ in \w+ \S*native/", report), report  # memory that the program itself allocated
    done.stderr = f"{done.stderr.rstrip()}\n".lstrip()
    return done


def biased(rng, shape, dtype, **options):
    """RUN in three layers with options of BITS; masks: of which part of the keys."""
    steps, sequences, masks = [Step(*s) for s in RUN], [], {}
    for i, step in enumerate(steps):
        if step.sequence == len(sequences):
            sequences.append(sequences[-1] if sequences else 0)
        sequences[step.sequence] += step.new_rows
        size = step.q_len, int(sequences[step.sequence] * options.get("masks", 0))
        if i % 3 != 2 and all(size):
            masks[i] = np.where(rng.random(size) < 0.3, np.float32(-np.inf), rng.standard_normal(size, np.float32))
    given = {name: options.get(name) for name in ("window", "softcap")} | {"causal": options.get("causal", True)}
    given |= {"alibi": make_case.slopes(shape.q_heads) if "alibi" in options else None}
    given |= {"sinks": rng.standard_normal(shape.q_heads, np.float32) if "sinks" in options else None}
    return Case.drawn(rng, shape, dtype, 3, steps, options=given, masks=masks)


def file_digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


ON_VULKAN = [driver for driver in DRIVERS if driver[1] == "vulkan"]


@pytest.mark.parametrize("any_device", ON_VULKAN, indirect=True, ids="-".join)
def test_digests_are_the_oracle_s(embed, any_device, tmp_path):
    """Every context and layout, both builds of pass 1, several layers, rows and forks, in one process."""
    name = any_device.info.name
    slow = "SwiftShader" in name and not FULL  # it keeps no compiled code
    shape = SMALL if slow else SHAPE
    export.export(tmp_path / "kernels", [shape], page_size=128)
    paths, digests, of_mask = [], [], {}
    for key, case in contexts(np.random.default_rng(5), shape):
        if not slow or (key[0] in SHORT and key[1] in (0, 2)):  # with no option, and with all
            paths.append(tmp_path / f"case{len(paths)}")
            case.write(paths[-1])
            digests.append(of_mask[key] if key in of_mask else make_case.digest(case))
            of_mask[key] = digests[-1]  # which the splits do not change
    done = run(embed, "-d", name, tmp_path / "kernels", *paths)
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.startswith(name)
    assert [line.split("  ")[0] for line in lines] == [f"{path}.out" for path in paths]
    assert [file_digest(f"{path}.out") for path in paths] == digests
    assert {line.rsplit(" ", 1)[1] for line in lines} == {"single", "loop"}


BITS = [  # each type at least once, K and V apart, sizes that the cache fills up, latent shapes, and biases
    ("6/2/64", "f16", [SOME, EVERYTHING]),
    ("6/2/96", "f32", [{}]),
    ("6/2/96", "bf16", [{}]),
    ("6/2/96/64/latent", "q8_0", [{}]),  # three blocks: the last word of scales is half filled
    ("6/2/96", "fp8_e4m3/q5_1", [EVERYTHING]),
    ("6/2/96/64", "q5_0/q4_1", [{}]),
    ("6/3/64/160", "f32/q8_0", [{}]),
    ("6/2/70/40", "q4_0/iq4_nl", [{}]),
    ("6/2/77/65/latent", "fp8_e4m3", [{}]),
]


# SwiftShader compiles everything anew in each process; these shapes and types have its bits in Python's tests
@pytest.mark.parametrize("any_device", ON_VULKAN if FULL else ON_VULKAN[:1], indirect=True, ids="-".join)
@pytest.mark.parametrize(("shape", "dtype", "biases"), BITS)
def test_storage_types_sizes_and_biases_have_the_oracle_s_bits(
    checked, any_device, rng, tmp_path, shape, dtype, biases
):
    """Three layers in one pair of buffers, under the sanitizers."""
    shape = za.AttnShape.parse(shape)
    export.export(tmp_path, [shape], dtype=dtype, page_size=32)
    cases = {tmp_path / f"case{i}": biased(rng, shape, dtype, **options) for i, options in enumerate(biases)}
    for path, case in cases.items():
        case.write(path)
    done = run(checked, "-d", any_device.info.name, tmp_path, *cases)
    assert done.returncode == 0, done.stderr
    for path, case in cases.items():
        assert file_digest(f"{path}.out") == make_case.digest(case), path


def run_made(embed, small, folder, shape, *switches):
    """What the program says of the steps of a case by make_case.py, whose digest it has."""
    made = [sys.executable, str(EMBED / "make_case.py"), str(folder / "case"), *switches]
    digest = subprocess.run(made, capture_output=True, text=True, check=True).stdout.split()[0]
    export.export(folder, [shape], page_size=64)
    done = run(embed, *small.on, "-w", folder, folder / "case")
    assert done.returncode == 0 and file_digest(folder / "case.out") == digest, done.stderr
    return done.stdout


@pytest.mark.parametrize("switches", (["--tree", "5", "--alibi"], ["--noncausal"]))
def test_make_case_has_a_switch_for_each_of_them(embed, small, tmp_path, switches):
    """A tree of tokens a step, ALiBi, rows that are not causal, and V of its own size."""
    shape = za.AttnShape(4, 2, 64, 32)
    run_made(embed, small, tmp_path, shape, "--shape", str(shape), "--prompt", "70", *switches)


def test_the_run_of_the_page(embed, small, tmp_path):
    """The commands of docs/c-hosts.md, and what they print of the calls that it explains."""
    command = re.search(r"make_case\.py build/case (.*)", PAGE.read_text())[1].split()
    said = run_made(embed, small, tmp_path, za.AttnShape(4, 2, 64), *command)
    lines = [line.partition(":") for line in said.splitlines()]
    steps = [name for name, _, _ in lines]
    words = [[int(word, 0) for word in rest.split()] if name[:4] == "laye" else [] for name, _, rest in lines]
    first, third, fourth = (steps.index(f"step {i}") for i in (1, 3, 4))
    assert words[first + 2] == page_words("A call in words").tolist()
    assert steps[third + 1] == "copy of page 9 to page 8"
    assert steps[fourth + 1] == "layer 0"  # no copy
    assert [words[third + 2][-3:], words[fourth + 1][-3:]] == [[11, 10, 8], [11, 10, 9]]


def test_the_first_program_of_the_page(embed, tmp_path):
    """Written, compiled, linked and run as docs/c-hosts.md says, on the machine's best device."""
    page = PAGE.read_text()
    (tmp_path / "first.c").write_text(re.search(r"```c\n(.*?)```", page, flags=re.S)[1])
    (tmp_path / "native").symlink_to(NATIVE)
    line = re.search(r"^cc .*", page, flags=re.M)[0].replace("build/native", str(embed.parent))
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    export.export(tmp_path / "build" / "tiny", [za.AttnShape(4, 2, 64)], page_size=64)
    done = subprocess.run([tmp_path / "first"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 0\n", "")
    (tmp_path / "build" / "tiny" / "manifest.json").unlink()
    done = subprocess.run([tmp_path / "first"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("build/tiny/manifest.json: ")


# --- the engines of examples/, with the installed library ----------------------------------------------------

PROJECT = """\
cmake_minimum_required(VERSION 3.18)
project(engine LANGUAGES CXX)
find_package(zinc_attn 1 REQUIRED)
add_executable(engine_cpp {source})
set_target_properties(engine_cpp PROPERTIES CXX_STANDARD 20)
target_link_libraries(engine_cpp PRIVATE zinc_attn::static)
"""


@pytest.fixture(scope="module")
def engines(embed, tmp_path_factory):
    """host_engine.c with the shared library by pkg-config, host_engine.cpp with the static one by find_package, and the
    kernels for both."""
    if not shutil.which("g++") or not shutil.which("pkg-config"):
        pytest.skip("there is no C++ compiler, or no pkg-config")
    folder = tmp_path_factory.mktemp("engines")
    prefix = folder / "prefix"
    (folder / "CMakeLists.txt").write_text(PROJECT.format(source=ROOT / "examples" / "host_engine.cpp"))
    flags = "-std=c11 -Wall -Wextra -Werror -pedantic"
    for command in (
        f"cmake --install {embed.parent} --prefix {prefix}",
        f"cc {flags} {ROOT}/examples/host_engine.c -o engine $(pkg-config --cflags --libs zinc_attn)",
        f"cmake -S . -B . -DCMAKE_PREFIX_PATH={prefix} && cmake --build .",
    ):
        env = {**os.environ, "PKG_CONFIG_PATH": str(next(prefix.rglob("pkgconfig"), prefix))}
        done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, env=env)
        assert done.returncode == 0 and not done.stderr, done.stderr
    export.export(folder / "kernels", [za.AttnShape(4, 2, 64)], dtype="f32", page_size=16)
    return folder


def floats_of(engines, name, *arguments):
    """What an engine writes to stdout."""
    library = next((engines / "prefix").rglob("libzinc_attn.so")).parent
    env = {**os.environ, "LD_LIBRARY_PATH": str(library)}
    done = subprocess.run([engines / name, "kernels", *arguments], cwd=engines, capture_output=True, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    return np.frombuffer(done.stdout, np.float32)


def test_an_engine_keeps_its_tokens_on_the_device(engines):
    """Three layers and some tokens without a readback: the last output has the oracle's bits."""
    i, rows = np.arange(256), [([], []) for _ in range(3)]
    x = (((i * 37 + 11) % 61 - 30) / 16).astype(np.float32).reshape(4, 64)
    for _ in range(70):
        for k, v in rows:
            k.append(x[:2])
            v.append(x[2:])
            x, _ = za.reference.emulate(x, np.array(k), np.array(v))
    same([floats_of(engines, "engine", "70").reshape(4, 64)], [x])


def test_an_engine_in_cpp_attends_several_sequences(engines):
    """One call between its buffers."""
    i, j = np.arange(61 * 256, dtype=np.float32), np.arange(3 * 256, dtype=np.float32)
    rows = (i * 29 % 97 / 32 - np.float32(1.5)).reshape(61, 2, 2, 64)
    q = (j * 31 % 89 / 32 - np.float32(1.5)).reshape(3, 1, 4, 64)
    parts = [
        za.reference.emulate(one, x[:, :, 0], x[:, :, 1]) for one, x in zip(q, np.split(rows, (1, 21)), strict=True)
    ]
    want = np.concatenate([np.concatenate([out for out, _ in parts]).ravel(), *(lse.ravel() for _, lse in parts)])
    same([floats_of(engines, "engine_cpp")], [want])


# --- files that are no good: refused with a line that says why, under the sanitizers -------------------------


def refused(program, *args):
    """The line on stderr."""
    done = run(program, *args)
    assert (done.returncode, done.stdout.count("\n") <= 1) == (2, True), done
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("embed: "), done.stderr
    return done.stderr


@pytest.fixture
def copy(small, tmp_path):
    """A copy of the exported kernels that a test may damage, and its manifest."""
    folder = tmp_path / "kernels"
    shutil.copytree(small.kernels, folder)
    return folder, json.loads((folder / "manifest.json").read_text())


ROWS = "got {} words of values and 0 and 0 of scales in a row of K and V, {} in a token, expected {} for f16 in {} dim"
NO_SIZES = "it has no sizes for shape 1/1/64, f16; export it with --shape 1/1/64 --dtype f16"
LEAF_END = ("work", "item", "fields", list(kernels.ITEM).index("leaf_end"), "name")


@pytest.mark.parametrize(
    "place,value,message",
    (
        ("version", 3, "got version 3, expected 8; export it with the zinc-attn that this library was written for"),
        ("format", "other", "got format other, expected zinc_attn export"),
        ("shapes", [], NO_SIZES),
        ("kernels", [], "it has no kernel primitives"),
        ("primitives", {}, "it has no primitives; export it again"),
        (("primitives", "results", 300), 1, "the driver computes result 300 of the kernel primitives as 0x"),
        ("work", {}, "it has no sizes of the work buffer's records; export it again"),
        (LEAF_END, "another", "record item has no field leaf_end; export it again"),
        ("constants", {}, "it has no KEYS_PER_LEAF; export it again"),
        (("shapes", 0, "sizes", "head_chunks"), 0, "it has no complete entry for the shape; export it again"),
        (("shapes", 0, "sizes", "k_values"), 1, ROWS.format("1 and 32", 64, "32, 32, 0, 0 and 64", "64 and 64")),
        (("shapes", 0, "sizes", "k_dim"), 80, ROWS.format("32 and 32", 64, "40, 32, 0, 0 and 72", "80 and 64")),
        (("shapes", 0, "latent"), True, NO_SIZES),
        (("shapes", 0, "v_head_dim"), 32, NO_SIZES),
    ),
)
def test_a_manifest_that_does_not_fit_is_refused(checked, small, copy, place, value, message):
    folder, data = copy
    *way, last = (place,) if isinstance(place, str) else place
    functools.reduce(operator.getitem, way, data)[last] = value
    (folder / "manifest.json").write_bytes(sealed(json.dumps(data).encode()))
    assert message in refused(checked, *small.on, folder, small.case)


def test_changed_files_are_refused(checked, small, copy):
    folder, data = copy
    module, path = folder / "append.spv", folder / "manifest.json"
    words, text = module.read_bytes(), path.read_bytes()
    for file, changed, message in (
        (module, words[:-1] + b"\1", "append.spv: got SHA-256 "),
        (module, None, "append.spv: cannot be read: No such file"),
        (path, text.replace(b'"binding": 1', b'"binding": 2', 1), "got manifest_sha256 " + data["manifest_sha256"]),
        (path, json.dumps({**data, "manifest_sha256": "0"}).encode(), "it has no manifest_sha256; export it again"),
        (path, json.dumps({**data, "manifest_sha256": None}).encode(), "it has no manifest_sha256; export it again"),
    ):
        file.write_bytes(changed) if changed else file.unlink()
        assert message in refused(checked, *small.on, folder, small.case)
        module.write_bytes(words)


def test_a_case_that_is_no_good_is_refused(checked, small, tmp_path):
    good, path = small.case.read_bytes(), tmp_path / "case"
    step, q = 84, 84 + 2 * 16  # where the steps begin, and the values, of two steps without masks
    shape, size = "shape 1/1/64/64 and 2 steps", len(good)

    def words(*values):
        return struct.pack(f"<{len(values)}I", *values)

    def changed(at, data, text=good):
        return text[:at] + data + text[at + len(data) :]

    for data, message in (
        (good[:-1], f"got {size - 1} bytes, expected {size} for {shape}"),
        (good + b"\0\0", f"got {size + 2} bytes, expected"),
        *((good[:short], "not a file of make_case.py") for short in (0, 7, 83)),
        (good[:98], "got 98 bytes, which end within the steps"),
        (changed(8, words(9)), "got version 9, expected 4"),
        # heads, head sizes, types, layers, steps
        *((changed(at, words(0xFFFFFFFF)), "beyond what it may have") for at in (12, 16, 20, 24, 32, 36, 40, 44)),
        (changed(step, words(1)), "step 0: got sequence 1, 65 new rows, 1 query rows and a mask of 0 keys"),
        (changed(step + 20, words(0xFFFFFFFF)), "step 1: got sequence 1, 4294967295 new rows"),
        (changed(step + 12, words(0xFFFFFFFF)), "and a mask of 4294967295 keys, expected at most"),
        (changed(step + 12, words(9)), f"got {size} bytes, expected {size + 4 * 9} for {shape}"),
        (changed(q, struct.pack("<f", np.nan)), "q[0]: got nan, expected at most"),
    ):
        path.write_bytes(data)
        assert message in refused(checked, *small.on, small.kernels, path)
    assert "its shape or dtype is not that of the first case" in refused_later(checked, small, path)
    for on, folder, case, message in (
        (small.on, small.kernels, tmp_path / "none", "cannot be read: No such file"),
        (small.on, tmp_path / "none", small.case, "cannot be read"),
        (("-d", "no such device"), small.kernels, small.case, "no Vulkan device of"),
    ):
        assert message in refused(checked, *on, folder, case)
    path.write_bytes(good)
    (tmp_path / "case.out").unlink()
    (tmp_path / "case.out").mkdir()
    assert "case.out: cannot be written" in refused(checked, *small.on, small.kernels, path)
    assert run(checked).returncode == 2


def refused_later(program, small, path):
    """What is said of a second case that has another head size."""
    other = Case.drawn(np.random.default_rng(1), za.AttnShape(1, 1, 128), "f16", 1, [Step(0, 1, 1)])
    other.write(path)
    done = run(program, *small.on, small.kernels, small.case, path)
    assert done.returncode == 2 and file_digest(f"{small.case}.out") == small.digest
    return done.stderr


def test_no_driver_is_refused(checked, small, tmp_path, monkeypatch):
    monkeypatch.setenv("VK_DRIVER_FILES", str(tmp_path / "none.json"))
    monkeypatch.setenv("VK_ICD_FILENAMES", str(tmp_path / "none.json"))
    monkeypatch.delenv("VK_ADD_DRIVER_FILES", raising=False)
    assert "no Vulkan d" in refused(checked, *small.on, small.kernels, small.case)


def test_a_damaged_manifest_never_crashes_it(small, tmp_path, rng):
    """Cut anywhere, or with bytes changed, it is refused, or what it says still fits; under a checksum that fits."""
    reader = tmp_path / "reader"
    sources = [*LIBRARY, ROOT / "tests" / "device" / "manifest_reader.c"]
    done = compiled(reader, sources, *SANITIZE)
    if done.returncode:
        done = compiled(reader, sources)
    assert done.returncode == 0, done.stderr

    def seal(data):
        at = data.find(b'"manifest_sha256": "')
        whole = at >= 0 and data[at + 84 : at + 85] == b'"'
        return sealed(bytes(data)) if whole else data

    text = (small.kernels / "manifest.json").read_bytes()
    less = json.dumps({k: v for k, v in json.loads(text).items() if k not in ("kernels", "quantities")}).encode()
    damaged = [seal(less[:cut]) for cut in rng.integers(0, len(less), 60)]
    for _ in range(200):
        data = bytearray(less)
        for at in rng.integers(0, len(data), 3):
            data[at] = b'"{}[]:,\\u0-9e.\x01\xff'[rng.integers(0, 16)]
        damaged.append(seal(data))
    damaged += [b"[" * 100000, b'{"a":' * 100000, b'"\\ud800\\u', b"1e999", b"-", b"nan", b'"\\u0000"']
    folders = [tmp_path / str(i) for i in range(len(damaged))]
    for folder, data in zip(folders, damaged, strict=True):
        folder.mkdir()
        (folder / "manifest.json").write_bytes(data)
    said = run(reader, small.kernels, *folders)
    assert (said.returncode, said.stderr) == (0, "\n".lstrip()), said.stderr
    lines = said.stdout.splitlines()
    assert lines[0] == "good" and len(lines) == 1 + len(damaged)
    assert sum(line != "good" for line in lines) > 100


# --- what no driver here does ---------------------------------------------------------------------------------


def test_every_call_that_can_fail_is_in_the_table():
    called = {f"vk{name}" for name in re.findall(r"\bX\((\w+)\)", (NATIVE / "src" / "device.h").read_text())}
    called |= {"vkEnumerateInstanceVersion", "vkCreateInstance"}
    void = re.compile(
        "vk(Get|Destroy|Free|Cmd|Update)|vkEnumerateDeviceExtensionProperties|vk(Device|Queue)WaitIdle|vkResetFences|vkname$"
    )
    assert {name for name in called if not void.match(name)} == set(FALLIBLE)


@pytest.mark.parametrize("name", FALLIBLE)
def test_a_call_that_fails_is_refused(checked, small, monkeypatch, name):
    """The first and the last call of a run: one line with the reason, everything freed, nothing crashes.

    With --full every call, with more results, and all calls from one on.
    """
    counts = range(1, FALLIBLE[name] + 1) if FULL else {1, FALLIBLE[name]}
    for count, result, on in itertools.product(
        counts, (-2, -1, -4, -13) if FULL else (-2,), ("", "+") if FULL else ("",)
    ):
        monkeypatch.setenv("EMBED_FAIL", f"{name}:{count}{on}:{result}")
        assert f"(VkResult {result})" in refused(checked, *small.on, small.kernels, small.case)


@pytest.mark.parametrize(
    "failure,message",
    (
        ("vkQueueSubmit:2:-1", r"embed: vkQueueSubmit: out of host memory .*\(VkResult -1\)\n"),
        ("vkQueueSubmit:2:-4", r"embed: vkQueueSubmit: the device was lost.*\(VkResult -4\)\n"),
        ("vkQueueSubmit:2:-13", r"embed: vkQueueSubmit: unexpected.*\(VkResult -13\)\n"),
        (  # behind those of the float functions' check
            "vkAllocateMemory:3:-2",
            r"embed: .*k: [\d,]+ bytes are needed: out of device memory .*; use a shorter context or free(?s:.*)",
        ),
    ),
)
def test_the_reason_is_named(checked, small, monkeypatch, failure, message):
    monkeypatch.setenv("EMBED_FAIL", failure)
    assert re.fullmatch(message, refused(checked, *small.on, small.kernels, small.case))


def test_subgroups_of_32_are_asked_for_where_they_are_offered(checked, small, monkeypatch):
    """And only the size: nothing rests on full subgroups. No call of the run fails."""
    monkeypatch.setenv("EMBED_WAVE32", "1")
    monkeypatch.setenv("EMBED_FAIL", "vkQueueSubmit:5:-2")  # a run submits four times
    done = run(checked, *small.on, small.kernels, small.case)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "device: subgroupSizeControl 1, computeFullSubgroups 0"
    assert lines[2].endswith("subgroups of 32 requested")
    assert [lines[1], *lines[3:6]] == ["pipeline: requiredSubgroupSize 32, flags 0"] * 4
    assert file_digest(f"{small.case}.out") == small.digest
