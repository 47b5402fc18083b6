"""The exported operation outside this package: the C library's program on every driver."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from c_host import LIBRARY, NATIVE, PAGE, ROOT, SANITIZE, SHIM, SOURCES, compiled, digest, needs_compiler, page_words
from support import open_device, same

import zinc_attn as za
from zinc_attn.kernels import declarations as kernels
from zinc_attn.tools import export
from zinc_attn.tools.export.files import sealed

SMALL = "1/1/64", "65", "65", "1"  # compiles fast; a page that is copied
ONE_DISPATCHER = True

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
        done = compiled(program, [*SOURCES, SHIM], *flags)
        if done.returncode == 0:
            return program
    pytest.fail(done.stderr)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """SMALL's kernels, and arguments with which the program runs on the default device."""
    folder = tmp_path_factory.mktemp("small")
    export.export(folder / "kernels", [za.AttnShape.parse(SMALL[0])], page_size=128)
    with open_device("default", "vulkan") as opened:
        on = "-d", opened.info.name
    return SimpleNamespace(on=on, kernels=folder / "kernels", out=folder / "out", rest=(*SMALL, folder / "out"))


def run(program, *args):
    """The program's run, its stderr without what the sanitizers say of drivers, which lose some memory."""
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "LSAN_OPTIONS": "exitcode=0"}
    done = subprocess.run([str(program), *map(str, args)], capture_output=True, text=True, env=env)
    done.stderr, _, report = done.stderr.partition("\n==")
    assert "AddressSanitizer" not in report, report
    assert not re.search(r"#1 0x\w+ in \w+ \S*native/", report), report  # memory that the program itself allocated
    done.stderr = f"{done.stderr.rstrip()}\n".lstrip()
    return done


def file_digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@pytest.mark.one_driver
def test_the_digest_is_the_oracle_s(embed, any_device, tmp_path):
    """Several layers, rows and forks."""
    name, shape, *numbers = any_device.info.name, "9/3/64", 150, 64, 4
    export.export(tmp_path, [za.AttnShape.parse(shape)], page_size=128)
    done = run(embed, "-d", name, tmp_path, shape, *numbers, tmp_path / "out")
    assert done.returncode == 0 and done.stdout.startswith(name), done.stderr
    assert file_digest(tmp_path / "out") == digest.digest(shape, *numbers)


def test_the_run_of_the_page(embed, small, tmp_path):
    """The commands of docs/c-hosts.md, and what they print of the calls that it explains."""
    arguments = re.search(r"digest\.py (.*)", PAGE.read_text())[1].split()
    assert f"embed -w 1 build/tiny {' '.join(arguments)} build/out" in PAGE.read_text()
    export.export(tmp_path, [za.AttnShape.parse(arguments[0])], page_size=64)
    shown = {}
    for step in (1, 3, 4):  # between the device's line and the run's
        done = run(embed, *small.on, "-w", step, tmp_path, *arguments, tmp_path / "out")
        assert file_digest(tmp_path / "out") == digest.digest(arguments[0], *map(int, arguments[1:])), done.stderr
        shown[step] = re.split(r"^layer .*\n", done.stdout.partition("\n")[2].rpartition("\n1")[0], flags=re.M)
    assert file_digest(tmp_path / "out") in PAGE.read_text()
    words = {step: [re.sub(r" *\d+:", "", one).split() for one in parts] for step, parts in shown.items()}
    assert [int(word, 0) for word in words[1][2]] == page_words("A call in words").tolist()
    assert [shown[step][0] for step in (1, 3, 4)] == ["", "copy of page 9 to page 8\n", ""]
    assert [words[3][2][-3:], words[4][1][-3:]] == [["11", "10", "8"], ["11", "10", "9"]]


def test_the_first_program_of_the_page(embed, tmp_path):
    """Written, compiled, linked in three ways and run as docs/c-hosts.md says, on the machine's best device."""
    page = PAGE.read_text()
    (tmp_path / "first.c").write_text(re.search(r"```c\n(.*?)```", page, flags=re.S)[1])
    for folder in (NATIVE, ROOT / "examples"):
        (tmp_path / folder.name).symlink_to(folder)
    export.export(tmp_path / "build" / "tiny", [za.AttnShape(4, 2, 64)], page_size=64)
    (tmp_path / "build" / "native").symlink_to(embed.parent)
    lines = ["set -e", *re.findall(r"^(?:cc|c\+\+|export|cmake --install) .*", page, flags=re.M)]
    done = subprocess.run("\n".join(lines), shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and re.findall(r"^1 0$", done.stdout, flags=re.M) == ["1 0"] * 3
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
    source = ROOT / "examples" / {"engine": "host_engine.c", "engine_cpp": "host_engine.cpp"}[name]
    assert hashlib.sha256(done.stdout).hexdigest() in source.read_text()
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


ROWS = "its formulas make rows of {} and 64 dimensions and tokens of {} words, expected {} words; export it again"
NO_SIZES = (
    "it has no sizes for shape 1/1/64, f16, tiles; give a page_size, or export it with --shape 1/1/64 --dtype f16"
)
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
        (("quantities", "head_chunks", "expression"), "0", "its formulas make no sense to this library; export it"),
        (("quantities", "k_values", "expression"), "1", ROWS.format(64, 33, 64)),
        (("quantities", "k_dim", "expression"), "56", ROWS.format(56, 60, 60)),
        (("shapes", 0, "latent"), True, NO_SIZES),
        (("shapes", 0, "v_head_dim"), 32, NO_SIZES),
    ),
)
def test_a_manifest_that_does_not_fit_is_refused(checked, small, copy, place, value, message):
    folder, data = copy
    *way, last = (place,) if isinstance(place, str) else place
    functools.reduce(operator.getitem, way, data)[last] = value
    (folder / "manifest.json").write_bytes(sealed(json.dumps(data).encode()))
    assert message in refused(checked, *small.on, folder, *small.rest)


def test_changed_files_are_refused(checked, small, copy):
    folder, data = copy
    module, path = folder / "copy.spv", folder / "manifest.json"  # which the program does not run
    words, text = module.read_bytes(), path.read_bytes()
    for file, changed, message in (
        (module, words[:-1] + b"\1", f"copy.spv: got {len(words)} bytes of SHA-256 "),
        (module, None, "copy.spv: cannot be read: No such file or directory; give a whole folder of "),
        (path, text.replace(b'"binding": 1', b'"binding": 2', 1), "got manifest_sha256 " + data["manifest_sha256"]),
        (path, json.dumps({**data, "manifest_sha256": "0"}).encode(), "it has no manifest_sha256; export it again"),
        (path, json.dumps({**data, "manifest_sha256": None}).encode(), "it has no manifest_sha256; export it again"),
    ):
        file.write_bytes(changed) if changed else file.unlink()
        assert message in refused(checked, *small.on, folder, *small.rest)
        module.write_bytes(words)


def test_arguments_that_are_no_good_are_refused(checked, small, tmp_path):
    shape, *rest = SMALL
    for on, folder, given, message in (
        (small.on, tmp_path / "none", small.rest, "cannot be read: No such file"),
        (("-d", "no such device"), small.kernels, small.rest, "matches 'no such device'; the devices are "),
        (small.on, small.kernels, ("1/1/128", *rest, small.out), "it has no sizes for shape 1/1/128, f16"),
        (small.on, small.kernels, (*SMALL, tmp_path), f"{tmp_path}: cannot be written"),
        (small.on, small.kernels, ("1/1", *rest, small.out), "usage: embed "),
        ((*small.on, "-w", "x"), small.kernels, small.rest, "usage: embed "),
        (small.on, small.kernels, (shape, "65", "0", "1", small.out), "usage: embed "),
        (small.on, small.kernels, (shape, "1048577", "9", "1", small.out), "usage: embed "),
        (small.on, small.kernels, SMALL, "usage: embed "),
    ):
        assert message in refused(checked, *on, folder, *given)


def test_no_driver_is_refused(checked, small, tmp_path, monkeypatch):
    monkeypatch.setenv("VK_DRIVER_FILES", str(tmp_path / "none.json"))
    monkeypatch.setenv("VK_ICD_FILENAMES", str(tmp_path / "none.json"))
    monkeypatch.delenv("VK_ADD_DRIVER_FILES", raising=False)
    assert "no Vulkan d" in refused(checked, *small.on, small.kernels, *small.rest)


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
    assert (said.returncode, said.stderr) == (0, ""), said.stderr
    lines = said.stdout.splitlines()
    assert lines[0] == "good" and len(lines) == 1 + len(damaged)
    assert sum(line != "good" for line in lines) > 100


# --- what no driver here does ---------------------------------------------------------------------------------


def test_subgroups_of_32_are_asked_for_where_they_are_offered(checked, small, monkeypatch):
    """And only the size: nothing rests on full subgroups."""
    monkeypatch.setenv("EMBED_WAVE32", "1")
    done = run(checked, *small.on, small.kernels, *small.rest)
    assert done.returncode == 0, done.stderr
    lines, (shape, *rest) = done.stdout.splitlines(), SMALL
    assert lines[0] == "device: subgroupSizeControl 1, computeFullSubgroups 0"
    assert lines[2].endswith("subgroups of 32 requested")
    assert [lines[1], *lines[3:6]] == ["pipeline: requiredSubgroupSize 32, flags 0"] * 4
    assert file_digest(small.out) == digest.digest(shape, *map(int, rest))
