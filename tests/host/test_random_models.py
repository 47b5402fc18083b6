"""scripts/llama random: the shapes are those of the models that docs/llama.md names."""

import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="pip install gguf")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lib"))
import llama_random

PARAMETERS = {  # of the models' cards
    "qwen3.6-35b-a3b": 34.66e9,
    "qwen3-30b-a3b": 30.53e9,
    "qwen3-8b": 8.19e9,
    "llama-3.1-8b": 8_030_261_248,
    "tinyllama-1.1b": 1_100_048_384,
}


@pytest.mark.parametrize("name", llama_random.MODELS)
def test_a_model_has_the_parameters_of_its_card(name):
    model = llama_random.MODELS[name]
    result = sum(math.prod(shape) for _, shape, _ in llama_random.tensors(model, model.layers))
    assert result == pytest.approx(PARAMETERS[name], rel=1e-3)
