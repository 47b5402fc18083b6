"""scripts/llama random: the shapes of known models, and numbers of the size that their layers keep."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

quants = pytest.importorskip("gguf.quants")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lib"))
import llama_random  # noqa: E402


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *(("qwen3.6-35b-a3b", 34.66e9), ("qwen3-30b-a3b", 30.53e9)),
        *(("llama-3.1-8b", 8_030_261_248), ("tinyllama-1.1b", 1_100_048_384)),
    ],
)
def test_a_model_has_the_parameters_of_its_card(name, parameters):
    model = llama_random.MODELS[name]
    result = sum(math.prod(shape) for _, shape, _ in llama_random.tensors(model, model.layers))
    assert result == pytest.approx(parameters, rel=1e-3)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_weights_keep_the_size_of_what_they_multiply(kind, rng):
    quantization = llama_random.Kind[kind]
    bytes_ = llama_random.values(rng, "blk.0.ffn_up.weight", (64, 2048), quantization)
    weights = quants.dequantize(bytes_, quantization)
    assert weights.shape == (64, 2048) and abs(weights.mean()) < 0.1 / np.sqrt(2048)
    assert 0.5 < weights.std() * np.sqrt(2048) < 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "got nothing, expected NAME LAYERS FILE"),
        ("qwen3.6-35b-a3b 3 x", "got 3 layers, expected 4 to 40"),
        ("llama-3.1-8b 33 x", "got 33 layers, expected 1 to 32"),
        ("llama-3.1-8b 1 /", "/: cannot be written: it is a directory"),
    ],
)
def test_what_is_refused(line, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["random", *line.split()])
    with pytest.raises(SystemExit, match=f"^random: {said}"):
        llama_random.main()
