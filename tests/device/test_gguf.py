"""GGUF files through transformers' loader: the same model as from safetensors, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TEXT, byte_tokenizer, config_file, write_gguf

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="pip install 'zinc-attn[transformers]'")
pytest.importorskip("gguf", reason="pip install 'zinc-attn[gguf]'")

from zinc_attn.cli import app as cli  # noqa: E402
from zinc_attn.tools import generate  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return generate.build_model(config_file(tmp_path_factory.mktemp("config") / "llama.json"), seed=7).model


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


def run(*arguments: Any) -> int:
    return cli.main([*map(str, arguments), "--runtime", "vulkan"])


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command said, behind notes of the device."""
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("zinc-attn: error: ") for line in lines) == 1 and "Traceback" not in lines
    return lines[-1].removeprefix("zinc-attn: error: ")


# --- the same model ----------------------------------------------------------------------------------------


def test_the_model_and_the_tokenizer_are_those_that_were_written(model: Any, file: Path) -> None:
    for path in (file, file.parent):
        loaded = generate.load_model(path)
        assert loaded.name == "tiny" and loaded.model.config._attn_implementation == "zinc"
        state = loaded.model.state_dict()
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
    got, want = generate.load_tokenizer(file), byte_tokenizer()
    assert got is not None and got(TEXT)["input_ids"] == want(TEXT)["input_ids"]
    assert got.decode(got(TEXT)["input_ids"]) == TEXT


def test_the_header_is_parsed_once_and_the_tensors_are_told(
    model: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    read, told = [], list[tuple[str, int, int]]()
    right = gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda *arguments: read.append(arguments) or right(*arguments))
    own = gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map
    generate.load_checkpoint(file, progress=lambda *step: told.append(step))
    weights = len(model.state_dict()) - 1  # the embedding is tied
    assert len(read) == 1 and own == (gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map)
    unpacked = [step[1:] for step in told if step[0] == "unpacking tiny.gguf"]
    assert unpacked == [(done, len(unpacked)) for done in range(len(unpacked))] and len(unpacked) >= weights
    assert told[0] == ("reading tiny.gguf", 0, 0) and told[-1][0] == "reading the tokenizer of tiny.gguf"


def test_text_is_that_of_the_safetensors_files(
    model: Any, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.save_pretrained(tmp_path / "folder")
    byte_tokenizer().save_pretrained(tmp_path / "folder")
    shutil.copy(file, tmp_path / "folder")  # safetensors files come first
    records = []
    for path in (file, tmp_path / "folder"):
        assert run("generate", "--model", path, "--prompt", TEXT, "--max-new-tokens", 12, "--json") == 0
        captured = capsys.readouterr()
        records.append(json.loads(captured.out))
        assert "GGUF" not in captured.err  # no progress bar of the loader
    assert records[0]["text"] == records[1]["text"] and records[0]["ids"] == records[1]["ids"]
    assert [one["model"] for one in records] == ["tiny", "folder"]


def test_validate(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", "--model", file, "--contexts", "100", "--splits", "3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "pass"


# --- refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "mammoth"}, "has architecture 'mammoth', which transformers "),
        ({"architecture": "t5"}, "got model_type 't5', expected a causal language model"),
        ({"split__count": 3}, "is one of the 3 parts of a checkpoint, expected a whole one; join them with "),
        (
            {"llama__rope__scaling__type": "yarn"},
            "got scaled rotary positions (llama.rope.scaling.type = yarn), which ",
        ),
        ({"llama__rope__scaling__factor": 4.0}, "got scaled rotary positions (llama.rope.scaling.factor = 4), which "),
        ({"rope_freqs__weight": np.ones(32, np.float32)}, "got scaled rotary positions (rope_freqs.weight), which "),
    ],
)
def test_files_refused(
    fields: dict[str, Any], message: str, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "other.gguf", model, **fields)
    assert run("generate", "--model", path, "--prompt-ids", "1") == 2
    error = error_of(capsys)
    assert error.startswith("model: ") and str(path) in error and message in error


def test_scaling_that_is_none_is_taken(model: Any, tmp_path: Path) -> None:
    fields = {"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 1.0}
    assert generate.load_model(write_gguf(tmp_path / "a.gguf", model, **fields)).name == "a"


@pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.2, 0.6, 0.999])
def test_truncated(part: float, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = file.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: max(4, int(part * len(data)))])
    assert run("generate", "--model", path, "--prompt", "text") == 2
    size = path.stat().st_size
    assert error_of(capsys) == (
        f"model: {path} is truncated or damaged: got {size:,} bytes that are no whole GGUF file; expected a complete "
        "one, so copy or download it again"
    )


def test_a_file_that_lacks_weights(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "short.gguf", model, layers=3)
    assert run("validate", "--model", path) == 2
    assert "it lacks 9 weights of LlamaForCausalLM, the first model.layers.2." in error_of(capsys)


def test_paths_refused(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.gguf"
    other.write_text("this is text")
    none = tmp_path / "none.gguf"
    for path, message in (
        (none, f"model: got '{none}', which is no file, expected a GGUF file or a folder"),
        (other, f"model: {other} does not begin with the letters GGUF, expected a GGUF file"),
    ):
        assert run("generate", "--model", path, "--prompt", "text") == 2
        assert error_of(capsys) == message
    shutil.copy(file, tmp_path)
    assert run("generate", "--model", tmp_path, "--prompt", "text") == 2
    assert error_of(capsys) == (
        f"model: {tmp_path} has 2 GGUF files, expected the path of one of them: other.gguf, tiny.gguf"
    )


def test_without_a_tokenizer(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "bare.gguf", model, tokenizer=False)
    assert run("generate", "--model", path, "--prompt-ids", "1,2", "--max-new-tokens", 2) == 0
    for arguments, name in ((["generate", "--prompt", "a"], "prompt"), (["generate", "--chat"], "chat")):
        capsys.readouterr()
        assert run(*arguments, "--model", path) == 2
        assert error_of(capsys).startswith(f"{name}: {path} has no tokenizer, expected ")


@pytest.mark.parametrize("missing", [["gguf"], ["accelerate"], ["gguf", "accelerate"]])
def test_without_the_packages(
    missing: list[str], file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    for command in (["generate", "--prompt", "a"], ["generate", "--chat"], ["validate"], ["perplexity"]):
        assert run(*command, "--model", file) == 2
        assert error_of(capsys) == (
            f"model: {file} is a GGUF file, which needs {' and '.join(missing)}: pip install 'zinc-attn[gguf]'"
        )


def test_with_a_broken_package(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "gguf", types.ModuleType("gguf"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "here")
    assert run("generate", "--prompt", "a", "--model", file) == 2
    needs = "which needs gguf: module 'gguf' has no attribute 'GGUFReader'"
    assert error_of(capsys).startswith(f"model: {file} is a GGUF file, {needs}")
