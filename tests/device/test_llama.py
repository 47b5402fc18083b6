"""llama.cpp with the back end of native/ggml: its own tests, the oracle's bits, one model's logits, refusals.

scripts/test --llama builds llama.cpp and the back end first, and runs these tests; no other run has them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import row_bytes

from zinc_attn.cache.rows import stored
from zinc_attn.reference import emulate

pytestmark = pytest.mark.llama
ROOT = Path(__file__).parents[2]
LLAMA = Path(os.environ.get("ZINC_ATTN_LLAMA", "."))
OURS = Path(os.environ.get("ZINC_ATTN_GGML", "."))
BIN = LLAMA / "plain" / "bin"
MODEL = Path(os.environ.get("ZINC_ATTN_MODELS", ".")) / "SmolLM2-135M-Instruct.Q4_1.gguf"
LOAD = (sys.executable, ROOT / "scripts" / "lib" / "llama_load.py", BIN / "llama-server", MODEL)


def run(*command, library=OURS / "libggml-zinc.so", text=None, folder=None, **environment):
    """A program of llama.cpp with the back end."""
    environment = {**os.environ, "GGML_BACKEND_PATH": str(library), **environment}
    told = [*map(str, command)]
    return subprocess.run(told, capture_output=True, text=True, env=environment, input=text, cwd=folder)


# --- ggml's own judge ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "chosen", "count"),
    [
        ("SET_ROWS", r"type_dst=(f32|f16|bf16|q8_0|q[45]_[01]|iq4_nl),", 271),
        ("FLASH_ATTN_EXT", r"kv=113,nb=(1|3),.*max_bias=8.*type_K=q", 60),
        ("FLASH_ATTN_EXT", r"hsk=(40|65),.*nb=3,", 56),
        ("FLASH_ATTN_EXT", r"hsk=(192|576),.*kv=113,nb=1,", 25),
    ],
)
def test_backend_ops(operation, chosen, count):
    done = run(BIN / "test-backend-ops", "test", "-b", "ZINC0", "-o", operation, "-p", chosen)
    passed = re.search(r"(\d+)/(\d+) tests passed", done.stdout)
    assert done.returncode == 0 and passed, done.stdout[-2000:]
    assert passed[1] == passed[2] and int(passed[1]) >= count, passed[0]


# --- the oracle's bits -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """The program that runs FLASH_ATTN_EXT over given bytes."""
    built = tmp_path_factory.mktemp("llama") / "ggml_case"
    include = (f"-I{LLAMA}/src/ggml/include", f"-L{BIN}", f"-Wl,-rpath,{BIN}")
    source = ROOT / "tests" / "device" / "ggml_case.cpp"
    subprocess.run(["c++", "-std=c++17", "-O1", source, "-o", built, *include, "-lggml", "-lggml-base"], check=True)
    return built


def slopes(heads, max_bias):
    """ggml's, of ALiBi."""
    whole = 2 ** int(np.log2(heads))
    steps = np.float32(2) ** (np.float32([-max_bias, -max_bias / 2]) / np.float32(whole))
    of_heads = [steps[0] ** np.float32(h + 1) for h in range(whole)]
    return np.float32(of_heads + [steps[1] ** np.float32(2 * h + 1) for h in range(heads - whole)])


def line_of(file, case):
    """ggml_case's line of a case."""
    c = SimpleNamespace(**case)
    numbers = (*c.sizes, *c.heads, c.streams, c.cells, c.rows, int(bool(c.mask)), int(c.sinks), c.max_bias, c.cap)
    scale = float(np.float32(1 / np.sqrt(c.sizes[0])))
    return " ".join(map(str, ("ZINC0", file, *numbers, scale, *c.kinds, c.layout, int(c.latent))))


def one_case(program, folder, rng, *, checked, **case):
    """The device's results and the oracle's of the checked rows, (streams, rows, q_heads, v_dims)."""
    (k_dims, v_dims), (kv_heads, group), kinds, latent = (case[name] for name in ("sizes", "heads", "kinds", "latent"))
    streams, cells, rows, mask, sinks = (case[name] for name in ("streams", "cells", "rows", "mask", "sinks"))
    scale, file, room = float(np.float32(1 / np.sqrt(k_dims))), folder / "case", 2 * cells
    q = rng.standard_normal((streams, rows, kv_heads * group, k_dims), dtype=np.float32)
    k, v = (rng.standard_normal((streams, room, kv_heads, dims), dtype=np.float32) for dims in (k_dims, v_dims))
    bias = np.zeros((streams, rows, cells), np.float16)
    if mask == "float":
        bias[:] = rng.standard_normal(bias.shape)
    hidden = rng.random(bias.shape) < 0.3
    if mask == "causal":
        hidden[:] = np.arange(cells) > np.arange(cells - rows, cells)[:, None]
    bias[hidden] = -np.inf
    sink = rng.standard_normal(kv_heads * group, dtype=np.float32)

    def laid(x, kind):  # the bytes of (streams, cells, heads, dims), or heads first
        rows = np.ascontiguousarray(x.swapaxes(1, 2) if case["layout"] == "heads" else x)
        return row_bytes(rows.reshape(1, -1, x.shape[-1]), kind).tobytes()

    parts = [q.tobytes(), laid(k, kinds[0]), b"" if latent else laid(v, kinds[1])]
    file.write_bytes(b"".join([*parts, bias.tobytes() if mask else b"", sink.tobytes() if sinks else b""]))
    done = run(program, text=line_of(file, case))
    assert done.stdout.split() == ["done"], done.stdout + done.stderr
    found = np.fromfile(f"{file}.out", np.float32).reshape(streams, rows, kv_heads * group, v_dims)
    order = (3 + 7 * np.arange(cells)) % cells if case["layout"] == "written" else np.arange(cells)
    wanted = np.empty_like(found[:, checked])
    for s, row in np.ndindex(streams, len(wanted[0])):
        of_row = range(rows)[checked][row]
        seen = order[~hidden[s, of_row, order]] if mask else order
        added = bias[s, of_row, seen].astype(np.float32)[None] if mask == "float" else None
        options = {"scale": scale, "softcap": case["cap"] or None, "sinks": sink if sinks else None, "mask": added}
        by_mask = {"mask_slopes": slopes(kv_heads * group, case["max_bias"])} if case["max_bias"] else {}
        kept = stored(k[s, seen], k[s, seen, :, :v_dims] if latent else v[s, seen], "/".join(kinds), True, latent)
        wanted[s, row] = emulate(q[s, of_row], *kept, causal=False, **options, **by_mask)[0]
    return found[:, checked], wanted


CASES = {
    "decode": {"rows": 1, "cells": 700},
    "prompt": {"rows": 33, "cells": 100},
    "streams": {"streams": 3, "rows": 5},
    "float mask": {"mask": "float", "rows": 4},
    "no mask": {"mask": None, "rows": 3},
    "sinks": {"sinks": True, "rows": 3},
    "softcap": {"cap": 8.0, "rows": 3},
    "heads first": {"layout": "heads", "rows": 3, "sinks": True},
    "head size 256": {"sizes": (256, 256), "heads": (2, 8), "rows": 2},
    "sizes apart": {"sizes": (192, 128), "heads": (2, 2), "rows": 2},
    "latent": {"sizes": (576, 512), "heads": (1, 16), "latent": True, "rows": 2},
    "one KV head": {"heads": (1, 7), "rows": 9, "mask": "float"},
    "ALiBi": {"heads": (2, 3), "rows": 3, "mask": "float", "max_bias": 8.0},
    "head size 40": {"sizes": (40, 40), "rows": 2},
    "head sizes 65 and 72": {"sizes": (65, 72), "rows": 2, "layout": "heads"},
    "written in an order of its own": {"layout": "written", "rows": 3, "cells": 130},
    # two submissions, of 120 rows and of 10: the states of all are more than a storage buffer of 128 MiB
    "prompt in pieces": {
        "sizes": (512, 512),
        "heads": (1, 32),
        "cells": 1024,
        "rows": 130,
        "mask": "causal",
        "checked": slice(118, 122),
    },
}
KINDS = ("f16/f16", "f32/f32", "bf16/bf16", "q8_0/q8_0", "q5_1/q4_0", "q5_0/iq4_nl", "q4_1/f16")
TYPES = {"decode": KINDS, "heads first": KINDS, "head size 40": KINDS[:3], "head sizes 65 and 72": KINDS[:3]}


TYPES |= {"prompt in pieces": KINDS[:1], "written in an order of its own": KINDS[:1]}
PLAIN = {"sizes": (64, 64), "heads": (3, 3), "streams": 1, "cells": 150, "rows": 1, "mask": "shown", "sinks": False}
PLAIN |= {"cap": 0, "layout": "cells", "latent": False, "max_bias": 0, "checked": slice(None)}


@pytest.mark.parametrize(
    ("name", "kinds"), [(name, kinds) for name in CASES for kinds in TYPES.get(name, ("f16/f16", "q8_0/q8_0"))]
)
def test_bits_are_the_oracles(cases, tmp_path, rng, name, kinds):
    found, wanted = one_case(cases, tmp_path, rng, kinds=kinds.split("/"), **{**PLAIN, **CASES[name]})
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize(
    "given",
    [
        {"layout": "one"},
        {"layout": "short"},
        {"layout": "still"},
        {"cap": -1},
        {"max_bias": -1},
        {"cells": 2**24 + 1, "sizes": (1, 1), "heads": (1, 1)},
        {"cells": 40_000, "sizes": (576, 512), "heads": (1, 128), "latent": True},  # a row's states: 184 MB
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_declined(cases, tmp_path, given):
    line = line_of(tmp_path / "case", {**PLAIN, "rows": 2, **given, "kinds": ("f16", "f16")})
    assert run(cases, text=line).stdout.split() == ["declined"]


def test_a_plan_is_of_one_operation(tmp_path):
    ours = ROOT / "native" / "ggml"
    sources = (ROOT / "tests" / "device" / "ggml_plan.cpp", ours / "plan.cpp", ours / "lists.cpp", ours / "cells.cpp")
    include = (f"-I{ours}", f"-I{ROOT}/native/include", f"-I{LLAMA}/src/ggml/include", f"-I{LLAMA}/src/ggml/src")
    run("c++", "-std=c++17", *sources, "-o", tmp_path / "plan", *include, f"-L{BIN}", "-lggml-base")
    done = run(tmp_path / "plan")
    assert done.stdout == "done\n", done.stdout + done.stderr


# --- a model ---------------------------------------------------------------------------------------------------------


def test_the_logits_do_not_depend_on_how_the_prompt_came(tmp_path):
    table = run(OURS / "digests", MODEL, "f16", 130)
    assert table.returncode == 0, table.stdout + table.stderr


def test_one_prompt_has_one_answer_under_load():
    done = run(*LOAD, 20)
    assert done.returncode == 0 and re.search(r"^zinc_attn +1 answer,", done.stdout, re.M), done.stdout + done.stderr


@pytest.mark.parametrize("program", ["test-state-restore-fragmented", "test-save-load-state"])
def test_states(program, tmp_path):
    here = ("--device", "ZINC0", "-ngl", "99", "-fa", "on", "-t", "1")  # more threads would wait for each other
    done = run(BIN / program, "-m", MODEL, *here, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("-ngl 99 -fa on", ""),
        ("-ngl 99 -fa off", "flash attention is off, expected -fa on"),
        ("-ngl 0 -fa on", "the KV cache is not on ZINC0: -ngl 99, and no --no-kv-offload"),
        ("-ngl 99 -fa on -nkvo 1", "the KV cache is not on ZINC0: -ngl 99, and no --no-kv-offload"),
    ],
)
def test_what_runs_where_is_said_in_a_line(told, reason):
    few = ("-p", "2", "-n", "0", "-r", "1", "-t", "1", "--no-warmup")
    done = run(BIN / "llama-bench", "-m", MODEL, "-dev", "ZINC0", *few, *told.split())
    said = [line.removeprefix("ggml-zinc: ") for line in done.stderr.splitlines() if line.startswith("ggml-zinc")]
    assert done.returncode == 0 and re.match("ZINC0 is .*: the KV cache and attention of --device ZINC0", said[0])
    assert said[1:] == ([f"attention is left to another device and its bits: {reason}"] if reason else [])


# --- refusals --------------------------------------------------------------------------------------------------------


def built(folder, *options):
    """The back end, built otherwise than scripts/llama does."""
    source = ("-S", ROOT / "native" / "ggml", f"-DLLAMA={LLAMA / 'src'}", f"-DLLAMA_BUILD={LLAMA / 'plain'}")
    run("cmake", "-B", folder, *source, *options)
    run("cmake", "--build", folder, "--target", "ggml-zinc")
    return folder / "libggml-zinc.so"


def test_another_version_of_ggml_is_refused_by_name(tmp_path):
    library = built(tmp_path, "-DGGML_VERSION=0.25.2")
    done = run(BIN / "test-backend-ops", "support", "-b", "ZINC0", library=library)
    assert "ggml-zinc: built for ggml 0.25.2, got ggml 0.25.3; build it for that version" in done.stderr


def test_a_lost_device_and_short_memory_fail_the_call_with_their_reason(tmp_path):
    shim = tmp_path / "shim.o"
    run("cc", "-std=c11", "-fPIC", "-c", ROOT / "tests" / "device" / "embed_shim.c", "-o", shim)
    library = built(tmp_path, f"-DCMAKE_MODULE_LINKER_FLAGS=-Wl,--wrap=vkGetInstanceProcAddr {shim}")
    for fault, reason in (("vkQueueSubmit:40:-4", "the device was lost"), ("vkAllocateMemory:6+:-2", "out of device")):
        done = run(OURS / "digests", MODEL, "f16", 130, "ubatch 512", library=library, EMBED_FAIL=fault)
        assert done.returncode == 1 and reason in done.stderr


def test_without_a_device_the_reason_is_said_and_llama_goes_on():
    done = run(BIN / "test-backend-ops", "support", "-b", "ZINC0", ZINC_ATTN_DEVICE="none such")
    assert "ggml-zinc: no device: " in done.stderr and "'none such'" in done.stderr


SCRIPT = ROOT / "scripts" / "llama"


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ((SCRIPT, "llama-serve"), "got llama-serve, expected model, digests, load, python or one of: "),
        ((SCRIPT, "llama-server", "-m", "no.gguf"), "-m: got no.gguf, expected a file"),
        (("env", "ZINC_ATTN_DEVICE=nix", SCRIPT, "digests", MODEL), "no device: no Vulkan device matches 'nix'"),
        ((SCRIPT, "digests"), "digests: got no model, expected a model's file"),
        ((SCRIPT, "load", "no.gguf"), "load: got no.gguf, expected a model's file"),
        ((OURS / "digests", MODEL, "f16", "12"), "got type f16 and 12 tokens, expected a type of ggml's"),
        ((*LOAD, "x"), "REQUESTS: got x, expected a number from 1 on"),
    ],
)
def test_wrong_arguments_are_errors_of_a_line(told, text):
    done = run(*told)
    assert done.returncode and len(done.stderr.splitlines()) == 1 and text in done.stderr
