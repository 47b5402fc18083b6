"""llama_kit.py NAME LAYERS [quick|record]: a random model's logits and its tokens per second, as JSON lines.

It lies in the kit beside llama.cpp's programs and back ends. The logits must be those of expected.json,
by the split rule, with one split and without matrix units; speeds are zinc_attn's beside ggml-vulkan's, in turns.
"record" prints the digests for expected.json. Exit status 1: other logits; 3: a program failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import llama_bench
import llama_random

HERE: Final = Path(__file__).parent
CONTEXTS: Final = "0", "1500"  # of the digests: the first tokens alone, and three nodes of keys
WAYS: Final = {"split rule": {}, "one split": {"ZINC_ATTN_SPLITS": "1"}, "no matrix units": {"ZINC_ATTN_UNITS": "0"}}
ZINC: Final = HERE / "back_ends" / "libggml-zinc.so"
BACK_ENDS: Final = {"zinc_attn": ("ZINC0", ZINC), "ggml-vulkan": ("Vulkan0", ZINC.with_name("libggml-vulkan.so"))}
ROUNDS: Final = 2
TESTS: Final = "-p", "512", "-n", "32", "-d", "0,4096,8192", "-r", "5"
QUICK_TESTS: Final = "-p", "16", "-n", "2", "-r", "1"


def digests(file: Path, way: dict[str, str]) -> dict[str, str]:
    """Of the logits of two steps, by how many tokens are before them."""
    environment = os.environ | {"GGML_BACKEND_PATH": str(ZINC)} | way
    command = [HERE / "depth", file, "f16", "1", *CONTEXTS]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        raise llama_bench.FailedError(f"depth ended with exit status {ran.returncode}")
    return {line.split()[0]: line.split()[1] for line in ran.stdout.splitlines()}


def check(name: str, file: Path) -> bool:
    """Whether all ways have the recorded digests; prints a case, and the digest of all."""
    wanted = json.loads((HERE / "expected.json").read_text())[name]
    got = {way: digests(file, variables) for way, variables in WAYS.items()}
    faults = [
        {"variation": f"{way}, {context} tokens before", "text": f"logits: got {digest}, expected {wanted[context]}"}
        for way, by_context in got.items()
        for context, digest in by_context.items()
        if digest != wanted[context]
    ]
    say(case=f"llama.cpp {name}", status="FAIL" if faults else "pass", faults=faults)
    say(run=sha256(json.dumps(got["split rule"], sort_keys=True).encode()).hexdigest())
    return not faults


def measure(name: str, file: Path, tests: tuple[str, ...]) -> None:
    """A line for each test of each back end and round; ggml-vulkan may be absent or fail, which a line says."""
    back_ends = {key: value for key, value in BACK_ENDS.items() if value[1].exists()}
    for absent in BACK_ENDS.keys() - back_ends.keys():
        say(model=name, left_out=f"{absent} is not in this kit")
    for turn in range(1, ROUNDS + 1):
        for back_end, (device, library) in list(back_ends.items()):
            try:
                speeds = llama_bench.speeds(str(HERE / "llama-bench"), str(file), device, library, tests)
            except llama_bench.FailedError as error:
                if library == ZINC:
                    raise
                print(error, file=sys.stderr)
                say(model=name, left_out=f"{back_end}: {str(error).splitlines()[0]}")
                del back_ends[back_end]
                continue
            for test, tokens_s in speeds.items():
                say(model=name, test=test, back_end=back_end, round=turn, tokens_s=tokens_s)


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def main() -> int:
    name, layers, *mode = sys.argv[1:]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("LD_LIBRARY_PATH"))))
    with tempfile.TemporaryDirectory(dir=os.environ.get("ZINC_ATTN_CACHE_DIR")) as folder:
        file = Path(folder) / "model.gguf"
        llama_random.write(llama_random.MODELS[name], name, int(layers), file)
        name = f"{name} {layers}"
        try:
            if mode == ["record"]:
                say(**{name: digests(file, {})})
                return 0
            right = check(name, file)
            measure(name, file, QUICK_TESTS if mode else TESTS)
            return 0 if right else 1
        except llama_bench.FailedError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 3


if __name__ == "__main__":
    sys.exit(main())
