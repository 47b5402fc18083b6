"""GGUF files through transformers' loader: the same model as from safetensors, and what is refused."""

import sys

import numpy as np
import pytest
from commands import refusal, run
from tiny_models import TEXT, byte_tokenizer, config_file, write_gguf
from zinc_models import torch

pytest.importorskip("gguf", reason="pip install 'zinc-attn[gguf]'")

from zinc_attn.tools import generate

pytestmark = pytest.mark.usefixtures("one_thread")


GENERATE = "generate --runtime vulkan --model"
SCALED = "got scaled rotary positions"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return generate.build_model(config_file(tmp_path_factory.mktemp("config") / "llama.json"), seed=7).model


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


def test_the_model_and_the_tokenizer_are_those_that_were_written(model, file):
    loaded = generate.load_model(file)
    assert loaded.name == "tiny" and loaded.model.config._attn_implementation == "zinc"
    state = loaded.model.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
    got, want = generate.load_tokenizer(file), byte_tokenizer()
    assert got is not None and got(TEXT)["input_ids"] == want(TEXT)["input_ids"]
    assert got.decode(got(TEXT)["input_ids"]) == TEXT


def test_the_header_is_parsed_once(file, monkeypatch):
    import gguf

    read, right = [], gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda *arguments: read.append(arguments) or right(*arguments))
    own = gguf.GGUFReader, gguf.get_tensor_name_map
    generate.load_checkpoint(file)
    assert len(read) == 1 and own == (gguf.GGUFReader, gguf.get_tensor_name_map)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "mammoth"}, "GGUF model with architecture mammoth is not supported"),
        ({"layers": 3}, "it lacks 9 weights of LlamaForCausalLM, the first model.layers.2."),
        ({"split__count": 3}, "is one of the 3 parts of a checkpoint, expected a whole one; join them with "),
        ({"llama__rope__scaling__type": "yarn"}, f"{SCALED} (llama.rope.scaling.type = yarn), which "),
        ({"llama__rope__scaling__factor": 4.0}, f"{SCALED} (llama.rope.scaling.factor = 4), which "),
        ({"rope_freqs__weight": np.ones(32, np.float32)}, f"{SCALED} (rope_freqs.weight), which "),
    ],
)
def test_files_refused(fields, message, model, tmp_path, capsys):
    path = write_gguf(tmp_path / "other.gguf", model, **fields)
    error = refusal(capsys, GENERATE, path, "--prompt-ids 1")
    assert error.startswith("model: ") and str(path) in error and message in error


def test_scaling_that_is_none_is_taken(model, tmp_path):
    fields = {"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 1.0}
    assert generate.load_model(write_gguf(tmp_path / "a.gguf", model, **fields)).name == "a"


@pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.2, 0.6, 0.999])
def test_truncated(part, file, tmp_path, capsys):
    data = file.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: max(4, int(part * len(data)))])
    said = f"model: {path} is no whole GGUF file, expected one, so copy or download it again: "
    assert refusal(capsys, GENERATE, path, "--prompt text").startswith(said)


def test_without_a_tokenizer(model, tmp_path, capsys):
    path = write_gguf(tmp_path / "bare.gguf", model, tokenizer=False)
    assert run(GENERATE, path, "--prompt-ids 1,2 --max-new-tokens 2") == 0
    capsys.readouterr()
    for option, name in (("--prompt a", "prompt"), ("--chat", "chat")):
        assert refusal(capsys, GENERATE, path, option).startswith(f"{name}: {path} has no tokenizer, expected ")


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
@pytest.mark.parametrize("command", ["generate --prompt a", "generate --chat", "validate", "perplexity"])
def test_without_the_packages(missing, command, file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    said = f"model: {file} is a GGUF file, which needs other packages (pip install 'zinc-attn[gguf]'): "
    assert refusal(capsys, command, "--model", file).startswith(f"{said}import of {missing} halted")
