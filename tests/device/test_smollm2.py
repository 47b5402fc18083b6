"""SmolLM2-135M-Instruct, a real checkpoint, on real text. ``scripts/test --models`` fetches it and runs this file."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from zinc_models import hf, torch

pytest.importorskip("gguf", reason="pip install 'zinc-attn[gguf]'")

from zinc_attn.cli import app as cli
from zinc_attn.tools import generate

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).parents[2]
STORY = "Tell me a long story about a ship, a storm and a lighthouse."


@pytest.fixture(scope="module")
def file():
    folder = os.environ.get("ZINC_ATTN_MODELS")
    assert folder, "ZINC_ATTN_MODELS: not set, expected the folder of the checkpoint; run scripts/test --models"
    return Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def model(file):
    return generate.load_model(file)


@pytest.fixture(scope="module")
def tokenizer(file):
    return generate.load_tokenizer(file)


def run(*arguments):
    return cli.main([*map(str, arguments), "--runtime", "vulkan"])


def prompt_of(tokenizer, text):
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def test_greedy_text_is_that_of_eager_attention(model, tokenizer, device):
    """Plain, with prompt lookup, and with a model of its first ten layers as the assistant."""
    prompt = prompt_of(tokenizer, STORY)
    greedy = {"max_new_tokens": 220, "do_sample": False}
    ids = torch.tensor([prompt])
    small = copy.deepcopy(model.model)
    small.model.layers = small.model.layers[:10]
    small.config.num_hidden_layers = 10
    small.set_attn_implementation("eager")
    with torch.no_grad(), model.eager_attention():
        want = model.model.generate(ids, **greedy)[0, len(prompt) :].tolist()
    assert len(want) >= 200
    settings = generate.Settings(max_new_tokens=220)
    assert generate.generate_ids(model, device, prompt, settings).ids == want
    for options in ({}, {"prompt_lookup_num_tokens": 8}, {"assistant_model": small}):
        with hf.ZincCache(model.model.config, 1024, device=device) as cache, torch.no_grad():
            got = model.model.generate(ids, cache=cache, **greedy, **options)
        assert got[0, len(prompt) :].tolist() == want, options


def test_the_own_runtime(file):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, ROOT / "examples" / "own_runtime.py", file, "210"]
    ran = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("210 tokens, equal to those of transformers' eager attention\n")


def test_perplexity(file, capsys):
    """The table of docs/transformers.md: rounding on the CPU may change the last digits, and no more."""
    assert run("perplexity", "--model", file, "--dtype", "f32,f16,bf16,q8_0", "--json") == 0
    eager, *found = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert abs(eager["perplexity"] / 17.9897 - 1) < 1e-4 and eager["context"] == 1024
    bounds = {"f32": (1e-6, 1e-10), "f16": (1e-4, 1e-6), "bf16": (1e-3, 1e-4), "q8_0": (3e-3, 1e-3)}
    for one in found:
        change, kl = bounds[one["cache"]]
        assert abs(one["perplexity"] / eager["perplexity"] - 1) < change and 0 <= one["kl"] < kl, one
        assert one["same_best"] > 0.98
