"""The C++ program of examples/kompute_cpp, with Kompute as it is published: it compiles, and has the oracle's bits."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from objects import linked
from support import system_drivers

import zinc_attn as za
from zinc_attn import export

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("ZINC_ATTN_CACHE") or ROOT / ".cache")
OPERATIONS = ("OpAlgoDispatch", "OpMemoryBarrier", "OpTensorSyncDevice", "OpTensorSyncLocal")
KOMPUTE = ("Algorithm", "Manager", *OPERATIONS, "Sequence", "Tensor")
TOKENS = 515  # two nodes


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """The program, compiled with Kompute's sources as one file: vulkan.hpp takes a compiler seconds."""
    sources = sorted(CACHE.glob("wheels/kp-*/src"), key=lambda path: path.stat().st_mtime)
    if not sources or shutil.which("g++") is None:
        pytest.skip("needs g++ and Kompute's sources, which scripts/build_kp.sh leaves in .cache")
    folder = tmp_path_factory.mktemp("host")
    files = [*(sources[-1] / f"{name}.cpp" for name in KOMPUTE), ROOT / "examples/kompute_cpp/host.cpp"]
    (folder / "all.cpp").write_text("".join(f'#include "{path}"\n' for path in files))
    flags = ["-std=c++17", "-DKOMPUTE_OPT_LOG_LEVEL_DISABLED=1", "-DKOMPUTE_DISABLE_VK_DEBUG_LAYERS=1"]
    flags += [f"-I{sources[-1]}", f"-I{sources[-1]}/include"]
    done = linked(folder / "host", [(["g++", *flags], folder / "all.cpp")], ["g++", "-lvulkan", "-lfmt"])
    assert done.returncode == 0, done.stderr
    return folder / "host"


def value(tensor: int, shape: tuple[int, ...]) -> np.ndarray:
    """The program's numbers (tokens, heads, dims) of a tensor."""
    token, at = np.ogrid[: shape[0], : shape[1] * shape[2]]
    word = ((tensor * 977 + token) * 4096 + at) * 2654435761 % 2**32
    return (((word >> 24) - 128) / 64).astype(np.float32).reshape(shape)


def test_the_program_has_the_oracles_bits(host, tmp_path):
    export.export(tmp_path)
    command = [host, tmp_path, str(TOKENS)]
    output = subprocess.run(command, capture_output=True, check=True, timeout=300, env=system_drivers()).stdout
    words = np.frombuffer(output, np.uint32).reshape(TOKENS, 4 * 64 + 4)
    q, k, v = value(0, (TOKENS, 4, 64)), value(1, (TOKENS, 2, 64)), value(2, (TOKENS, 2, 64))
    want, lse = za.reference.emulate(q, k, v)  # row i sees the tokens up to i
    assert np.array_equal(words[:, : 4 * 64], want.reshape(TOKENS, -1).view(np.uint32))
    assert np.array_equal(words[:, 4 * 64 :], lse.view(np.uint32))
