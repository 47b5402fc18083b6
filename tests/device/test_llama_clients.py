"""Runtimes that people have, with the back end: none of them is a build of this clone's, and none is built for it.

scripts/test --llama runs these tests too. A client that cannot be had here is skipped by name.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from llama_programs import BIN, MODEL, OURS, ROOT, run, serving

from zinc_attn.runtime.cpu.building import LEVELS

pytestmark = pytest.mark.llama
CACHE = Path(os.environ.get("ZINC_ATTN_CACHE", ROOT / ".cache"))
NODE = "node-llama-cpp@3.22.1"  # ggml 0.25.1, whose libraries have names of their own
SESSIONS = """
import {getLlama} from "node-llama-cpp";
const llama = await getLlama({gpu: false, build: "never", skipDownload: true, logLevel: "warn", maxThreads: 1});
const model = await llama.loadModel({modelPath: process.argv[2], gpuLayers: "max"});
const context = await model.createContext({sequences: 4, contextSize: 512, flashAttention: true, threads: 1});
const answer = async (prompt) => {
  const tokens = [];
  for await (const token of context.getSequence().evaluate(model.tokenize(prompt), {temperature: 0}))
    if (tokens.push(token) == 8) break;
  return tokens;
};
console.log(JSON.stringify(await Promise.all(JSON.parse(process.argv[3]).map(answer))));
process.exit(0);
"""
PYTHON = """
import itertools, json, sys
from llama_cpp import Llama
from zinc_attn.integrations import llama_cpp
llama_cpp.load()
model = Llama(sys.argv[1], n_gpu_layers=-1, flash_attn=True, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
prompts = [model.tokenize(prompt.encode()) for prompt in json.loads(sys.argv[2])]
print(json.dumps([[*itertools.islice(model.generate(prompt, temp=0), 8)] for prompt in prompts]))
"""
PROMPTS = ("Once upon a time", "The capital of France is", "def fibonacci(n):", "Once upon a time")


@pytest.fixture(scope="session")
def answers():
    """Eight greedy tokens of each prompt, by llama-server of the clone's llama.cpp."""
    with serving(MODEL) as post:
        return asked(post)


def asked(post):
    options = {"n_predict": 8, "temperature": 0, "return_tokens": True}
    return [post("/completion", prompt=prompt, **options)["tokens"] for prompt in PROMPTS]


@pytest.fixture(scope="session")
def sid():
    """A root file system of Debian sid with its llama.cpp, the back end and the model: 400 MB, fetched once."""
    if shutil.which("debootstrap") is None or os.geteuid():
        pytest.skip("debootstrap is not installed, or this is not root")
    root = CACHE / "sid"
    if not (root / "usr" / "bin" / "llama-server").exists():
        archives = run("apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages").stdout.split()
        archive = next((site for site in archives if site.rstrip("/").endswith("/debian")), "")
        done = run("debootstrap", "--variant=minbase", "--include=llama.cpp,libvulkan1", "sid", root, archive)
        if done.returncode:
            shutil.rmtree(root, ignore_errors=True)
            pytest.skip(f"debootstrap cannot make Debian sid from {archive!r}: {done.stdout[-200:]}")
    for file in (MODEL, *OURS.glob("*.so")):
        shutil.copy(file, root / "srv")
    return root


@pytest.fixture(scope="session")
def node():
    """A folder with node-llama-cpp and its programs for this system, without those for graphics cards."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder, version = CACHE / "node", NODE.partition("@")[2]
    command = ["npm", "install", "--prefix", folder, "--no-fund", "--no-audit", "--ignore-scripts", "--omit=optional"]
    if not (folder / "node_modules" / "@node-llama-cpp" / "linux-x64").is_dir():
        done = run(*command, NODE, f"@node-llama-cpp/linux-x64@{version}")
        if done.returncode:
            pytest.skip(f"npm cannot fetch {NODE}: {done.stderr[-200:]}")
    (folder / "sessions.mjs").write_text(SESSIONS)
    return folder


def test_four_sessions_of_node_have_the_tokens_of_llama_server(node, answers):
    own_libraries = {"LD_LIBRARY_PATH": ""}  # its libraries have names that those of the clone's llama.cpp have, too
    done = run("node", "sessions.mjs", MODEL, json.dumps(PROMPTS), folder=node, **own_libraries)
    assert done.returncode == 0 and json.loads(done.stdout) == answers, done.stdout + done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if line.startswith("ggml-zinc")]
    assert len(said) == 2 and said[1].endswith("the promise holds"), said


def test_llama_cpp_python_has_the_tokens_of_llama_server(answers):
    command, told = (sys.executable, "-c", PYTHON, MODEL, json.dumps(PROMPTS)), {"LLAMA_CPP_LIB_PATH": str(BIN)}
    done = run(*command, **told, PYTHONPATH=str(ROOT))
    assert done.returncode == 0 and json.loads(done.stdout) == answers, done.stdout + done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if line.startswith("ggml-zinc")]
    assert len(said) == 2 and said[1].endswith("the promise holds"), said


def test_debians_llama_server_has_the_tokens_of_this_one(sid, answers):
    """Another version of ggml, another C library and another Vulkan loader, with the back end as it was built here."""
    mounts = f"mount -t proc proc {sid}/proc && mount --bind /dev {sid}/dev"
    settings = ("env", "GGML_BACKEND_PATH=/srv/libggml-zinc.so", "ZINC_ATTN_DEVICE=cpu")
    program = ("unshare", "--mount", "sh", "-c", f'{mounts} && exec chroot {sid} "$@"', "sh", *settings, "llama-server")
    with serving(f"/srv/{MODEL.name}", program=program) as post:
        assert asked(post) == answers


def test_the_wheel_runs_a_program_of_llama_cpp(tmp_path):
    """``zinc-attn llama`` of the unpacked wheel, in an environment that names no library."""
    done = run(ROOT / "scripts" / "wheel", tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("zinc_attn-*-py3-none-manylinux_2_*_x86_64.whl")
    assert wheel.stat().st_size < 8e6
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    libraries = tmp_path / "site" / "zinc_attn" / "libraries"
    assert {path.name for path in libraries.iterdir()} == {"libggml-zinc.so", *LEVELS}
    assert ctypes.CDLL(str(libraries / "libzinc_cpu.so")).zinc_cpu_fault() == 0  # no difference from the oracle's sums
    command = [sys.executable, "-m", "zinc_attn.cli", "llama", BIN / "llama-bench", "--list-devices"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0 and "ZINC0: " in done.stdout, done.stdout + done.stderr
    assert done.stderr.startswith(f"zinc-attn: GGML_BACKEND_PATH={tmp_path / 'site'}")
