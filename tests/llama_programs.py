"""Programs of llama.cpp with the back end, as scripts/test --llama has built both."""

import json
import os
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
LLAMA = Path(os.environ.get("ZINC_ATTN_LLAMA", "."))
OURS = Path(os.environ.get("ZINC_ATTN_GGML", "."))
BIN = LLAMA / "plain" / "bin"
MODEL = Path(os.environ.get("ZINC_ATTN_MODELS", ".")) / "SmolLM2-135M-Instruct.Q4_1.gguf"
sys.path.insert(0, str(ROOT / "scripts" / "lib"))
import llama_random  # noqa: E402, F401
from llama_load import SERVER, server  # noqa: E402


def run(*command, library=OURS / "libggml-zinc.so", folder=None, **environment):
    """A program of llama.cpp with the back end."""
    environment = {**os.environ, "GGML_BACKEND_PATH": str(library), **environment}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, cwd=folder)


@contextmanager
def serving(model, *options, program=(BIN / "llama-server",)):
    """A function that posts to a llama-server with the back end."""
    environment = {"GGML_BACKEND_PATH": str(OURS / "libggml-zinc.so"), **os.environ}
    here = ("-m", model, "--device", "ZINC0", "-ngl", "99", *SERVER)

    def post(path, **body):
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)

    with server(*program, *here, *map(str, options), env=environment) as port:
        yield post
