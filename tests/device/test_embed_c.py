"""The C library built by CMake: the programs of examples/ and of docs/c-hosts.md."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from c_host import EMBED, NATIVE, PAGE, ROOT, STRICT, digest, needs_compiler, page_words
from support import open_device, system_drivers

from zinc_attn.kernels.declarations import HEAD_WORDS

ONE_DISPATCHER = True
# Nothing here runs the processor's kernels, whose optimization takes longer than all else that CMake builds.
UNOPTIMIZED = "-DCMAKE_CXX_COMPILE_OBJECT=<CMAKE_CXX_COMPILER> <DEFINES> <INCLUDES> <FLAGS> -O0 -o <OBJECT> -c <SOURCE>"

pytestmark = needs_compiler


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder in which CMake builds the library, without a warning, and the program with it."""
    folder = tmp_path_factory.mktemp("native")
    told = f"-DPython3_EXECUTABLE={sys.executable}", f"-DZINC_ATTN_ROOT={ROOT}", UNOPTIMIZED
    program = [*STRICT, str(EMBED / "main.c"), "-o", str(folder / "embed"), str(folder / "libzinc_attn.a")]
    for command in (
        ["cmake", "-S", str(NATIVE), "-B", str(folder), *told],
        ["cmake", "--build", str(folder), "-j2"],
        ["cc", *program, "-lvulkan", "-lm"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
    return folder


@pytest.fixture(scope="session")
def on():
    """Arguments with which the program runs on the default device."""
    with open_device("default", "vulkan") as opened:
        return "-d", opened.info.name


def run(program, *args):
    return subprocess.run([str(program), *map(str, args)], capture_output=True, text=True)


def file_digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@pytest.mark.one_driver
@pytest.mark.of_drivers
def test_the_digest_is_the_oracle_s(built, any_device, tmp_path):
    """Several layers, rows and forks."""
    name, shape, *numbers = any_device.info.name, "9/3/64", 150, 64, 4
    done = run(built / "embed", "-d", name, shape, *numbers, tmp_path / "out")
    assert done.returncode == 0 and done.stdout.startswith(name), done.stderr
    assert file_digest(tmp_path / "out") == digest.digest(shape, *numbers)


def test_the_run_of_the_page(built, on, tmp_path):
    """The commands of docs/c-hosts.md, and what they print of the calls that it explains."""
    arguments = re.search(r"digest\.py (.*)", PAGE.read_text())[1].split()
    assert f"embed -w 1 {' '.join(arguments)} build/out" in PAGE.read_text()
    shown = {}
    for step in (1, 3, 4):  # between the device's line and the run's
        done = run(built / "embed", *on, "-w", step, *arguments, tmp_path / "out")
        assert file_digest(tmp_path / "out") == digest.digest(arguments[0], *map(int, arguments[1:])), done.stderr
        shown[step] = re.split(r"^layer .*\n", done.stdout.partition("\n")[2].rpartition("\n1")[0], flags=re.M)
    assert file_digest(tmp_path / "out") in PAGE.read_text()
    words = {step: [re.sub(r" *\d+:", "", part).split() for part in parts] for step, parts in shown.items()}
    assert [int(word, 0) for word in words[1][2]] == page_words("A call in words").tolist()
    assert [shown[step][0] for step in (1, 3, 4)] == ["", "copy of page 9 to page 8\n", ""]
    heads = HEAD_WORDS * int(arguments[0].split("/")[0])  # whose records lie after the page table
    tables = [words[step][part][-heads - 3 : -heads] for step, part in ((3, 2), (4, 1))]
    assert tables == [["11", "10", "8"], ["11", "10", "9"]]


PROJECT = """\
cmake_minimum_required(VERSION 3.18)
project(engine LANGUAGES CXX)
find_package(zinc_attn 1 REQUIRED)
add_executable(engine examples/host_engine.cpp)
set_target_properties(engine PROPERTIES CXX_STANDARD 20)
target_link_libraries(engine PRIVATE zinc_attn::static)
"""
CMAKE = (
    'cmake -B project -DCMAKE_PREFIX_PATH="$PWD/build/prefix"',
    "cmake --build project",
    "project/engine | sha256sum",
)


def test_the_programs_of_the_page(built, tmp_path):
    """Written, compiled, linked in each way and run as docs/c-hosts.md says, on the machine's best device."""
    if not shutil.which("g++") or not shutil.which("pkg-config"):
        pytest.skip("there is no C++ compiler, or no pkg-config")
    page = PAGE.read_text()
    (tmp_path / "first.c").write_text(re.search(r"```c\n(.*?)```", page, flags=re.S)[1])
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    for folder in (NATIVE, ROOT / "examples"):
        (tmp_path / folder.name).symlink_to(folder)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "native").symlink_to(built)
    lines = re.findall(r"^(?:cc |c\+\+ |export |cmake --install |\./).*", page, flags=re.M)
    script, env = "\n".join(["set -e", *lines, *CMAKE]), system_drivers()
    done = subprocess.run(script, shell=True, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "") and re.findall(r"^1 0$", done.stdout, flags=re.M) == ["1 0"] * 3
    digests = re.findall(r"^(\w{64})  -$", done.stdout, flags=re.M)
    for digest_of, name in zip(digests, ("host_engine.c", "host_engine.cpp", "host_engine.cpp"), strict=True):
        assert digest_of in (ROOT / "examples" / name).read_text(), name


def test_no_driver_is_refused(built, tmp_path, monkeypatch):
    monkeypatch.setenv("VK_DRIVER_FILES", str(tmp_path / "none.json"))
    monkeypatch.setenv("VK_ICD_FILENAMES", str(tmp_path / "none.json"))
    monkeypatch.delenv("VK_ADD_DRIVER_FILES", raising=False)
    done = run(built / "embed", "1/1/64", "65", "65", "1", tmp_path / "out")
    assert done.returncode == 2 and re.fullmatch(r"embed: .*no Vulkan d.*\n", done.stderr), done.stderr
