"""Generation and validation without a device: refusals, prompt chunks, text streaming, the float64 reference."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zinc_attn import reference
from zinc_attn.cli import app as cli
from zinc_attn.cli.arguments import parse_numbers
from zinc_attn.dtypes import EXPECTED
from zinc_attn.errors import ArgumentError
from zinc_attn.tools import generate
from zinc_attn.tools.generate import Settings, stream_text, trace
from zinc_attn.tools.generate.checks import chunk_sizes
from zinc_attn.tools.generate.validation import blockwise_attention
from zinc_attn.tools.harness.split_spec import parse_split_specs

# --- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: got 0, expected an int of at least 1"),
        ({"prefill_chunk": 0}, "prefill_chunk: got 0, expected an int of at least 1"),
        ({"num_splits": 0}, "num_splits: got 0, expected an int of at least 1"),
        ({"seed": 1 << 64}, f"seed: got {1 << 64}, expected an int from 0 to {(1 << 64) - 1}"),
        ({"temperature": -0.5}, "temperature: got -0.5, expected a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature: got nan, expected a finite number of at least 0"),
        ({"num_splits": 2, "split_size": 64}, "num_splits, split_size: got both, expected at most one"),
        ({"page_size": 8}, "page_size: got 8, expected an int of at least 16"),
        ({"dtype": "f8"}, f"dtype: got 'f8', expected {EXPECTED}"),
    ],
)
def test_settings_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Settings(**changes)
    assert str(error.value) == message


def test_tokens_of_the_cache() -> None:
    assert Settings(max_new_tokens=5).tokens(10) == 14  # the last one never enters it
    assert Settings(max_new_tokens=5, capacity=14).tokens(10) == 14
    with pytest.raises(ArgumentError) as error:
        Settings(max_new_tokens=5, capacity=13).tokens(10)
    assert str(error.value) == "capacity: got 13, expected at least 14 for 10 prompt tokens and 5 new ones"


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1,-2", "1.5"])
def test_prompt_ids_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"^prompt_ids: got '.*', expected token ids such as 1,2,3$"):
        parse_numbers("prompt_ids", text, "token ids such as 1,2,3")


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            None,
            "model: got '{0}', expected a folder with config.json and *.safetensors, or a GGUF file; nothing is "
            "downloaded",
        ),
        ({"config__json": "[]"}, "model: {0}/config.json has no model_type, expected a Hugging Face config.json"),
        (
            {"config__json": '{"model_type": "llama"}', "pytorch_model__bin": ""},
            "model: {0} has pytorch_model.bin, expected safetensors files (*.safetensors)",
        ),
        (
            {"config__json": '{"model_type": "llama"}'},
            "model: {0} has no weights, expected safetensors files (*.safetensors)",
        ),
    ],
)
@pytest.mark.parametrize("command", ["generate --prompt-ids 1", "validate"])
def test_checkpoints_refused(
    command: str, files: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m" if files is None else folder(tmp_path / "m", **files)
    assert cli.main([*command.split(), "--model", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"zinc-attn: error: {message.format(path)}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "8"], "contexts: got 8, expected an int of at least 16"),
        (["--contexts", "1x"], "contexts: got '1x', expected numbers of keys"),
        (["--splits", "two"], "splits: got 'two', expected auto"),
        (["--seed", "-1"], "seed: got -1, expected an int of at least 0"),
        ([], "none.json: cannot be read: No such file or directory; expected a Hugging Face config.json"),
    ],
)
def test_validate_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "--config", "none.json", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"zinc-attn: error: {message}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--model", "m"],
        ["generate", "--prompt", "a"],
        ["generate", "--model", "m", "--prompt", "a", "--prompt-ids", "1"],
        ["generate", "--model", "m", "--prompt", "a", "--splits", "2", "--seed", "x"],
        ["generate", "--model", "m", "--prompt", "a", "--dtype", "f8"],
        ["validate"],
        ["validate", "--model", "m", "--config", "c"],
    ],
)
def test_arguments_that_do_not_parse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    assert capsys.readouterr().err.startswith(f"zinc-attn {arguments[0]}: error: ")


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_without_transformers(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path / "m", config__json='{"model_type": "llama"}', model__safetensors="")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "zinc_attn.integrations.transformers", raising=False)
    monkeypatch.delattr(sys.modules.get("zinc_attn.integrations", sys), "transformers", raising=False)
    assert cli.main(["validate", "--model", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("zinc-attn: error: zinc_attn.integrations.transformers: ")
    assert "pip install torch 'zinc-attn[transformers]'" in error


def test_the_commands_need_no_transformers_to_show_their_help() -> None:
    """Neither torch nor transformers is imported before a function needs it."""
    for file in Path(generate.__file__).parent.glob("*.py"):
        lines = file.read_text().splitlines()
        assert not [line for line in lines if line.startswith(("import torch", "from transformers"))], file


def test_default_layouts_and_the_example() -> None:
    assert parse_split_specs(generate.LAYOUTS)[0].label == "1"
    example = Path(__file__).parents[2] / "examples" / "qwen3.6-style-tiny.json"
    config = json.loads(example.read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (16, 2, 256)
    assert config["max_position_embeddings"] >= 131072


# --- pieces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "size", "sizes", "label"),
    [
        (10, None, [10], "all"),
        (10, 7, [7, 3], "7"),
        (3, 1, [1, 1, 1], "1"),
        (128, 64, [64, 64], "64"),
        (256 + 70, 1, [64, 6, *[1] * 256], "1 (the last 256, by 64 before)"),
    ],
)
def test_chunks(tokens: int, size: int | None, sizes: list[int], label: str) -> None:
    assert chunk_sizes(tokens, size) == (sizes, label)


class Bytes:
    """A tokenizer whose ids are bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", ["plain text", "ä €𝄞 end", "海は広い", "a\nb", "€"])
def test_text_streams_in_whole_characters(text: str) -> None:
    pytest.importorskip("transformers", reason="pip install 'zinc-attn[transformers]'")
    pieces: list[str] = []
    put, end = stream_text(Bytes(), pieces.append)
    for byte in text.encode():
        put(byte)
    assert "\ufffd" not in "".join(pieces) and text.startswith("".join(pieces))
    assert len([piece for piece in pieces if piece]) >= text.count(" ") + text.count("\n")
    end()
    assert "".join(pieces) == text


def test_text_that_ends_inside_a_character() -> None:
    pytest.importorskip("transformers", reason="pip install 'zinc-attn[transformers]'")
    pieces: list[str] = []
    put, end = stream_text(Bytes(), pieces.append)
    for byte in "a €".encode()[:-1]:
        put(byte)
    assert "".join(pieces) == "a "
    end()
    assert "".join(pieces) == "a \ufffd"


def blocks(k: Any, v: Any, size: int) -> Iterator[tuple[Any, Any]]:
    for at in range(0, len(k), size):
        yield k[at : at + size], v[at : at + size]


@pytest.mark.parametrize("size", [1000, 128, 7])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 20}, {"softcap": 2.0}, {"sinks": True}, {"window": 300, "softcap": 5.0, "sinks": True}],
)
def test_blockwise_reference_is_the_reference(size: int, options: dict[str, Any], rng: np.random.Generator) -> None:
    n, tokens, shape = 5, 400, (4, 2, 16)
    q = rng.standard_normal((n, shape[0], shape[2]), np.float32)
    k, v = rng.standard_normal((2, tokens, shape[1], shape[2]), np.float32)
    given = {**options, **({"sinks": rng.standard_normal(4).astype(np.float32)} if "sinks" in options else {})}
    want, _ = reference.attention(q, k, v, scale=0.3, **given)
    got = blockwise_attention(q, blocks(k, v, size), tokens, 0.3, **given)
    assert np.abs(got - want).max() < 1e-14


# --- whose difference --------------------------------------------------------------------------------------


class Logits:
    """What first_difference asks of a tensor."""

    def __init__(self, x: float) -> None:
        self.x = np.array([x], np.float32)

    def numpy(self) -> Any:
        return self.x


def steps(change: Callable[[list[Any]], None] = lambda found: None) -> list[trace.Step]:
    found: list[Any] = [[[[layer, b"in", b"out"] for layer in (3, 7)], 1.0] for _ in range(2)]
    change(found)
    return [trace.Step([trace.Call(*call) for call in calls], Logits(x)) for calls, x in found]


def test_differences_are_put_down_to_their_side() -> None:
    assert trace.first_difference(steps(), steps()) is None

    def output(found: list[Any]) -> None:
        found[1][0][1][2] = b"other"
        found[1][1] = 2.0

    def inputs(found: list[Any]) -> None:
        found[1][0][0][1:] = b"other", b"other"

    def logits(found: list[Any]) -> None:
        found[0][1] = -1.0

    def shorter(found: list[Any]) -> None:
        del found[0][0][1]

    moved = "differ after equal attention: the model's own arithmetic moved"
    expected = [
        (output, trace.OURS, "step 1, layer 7: outputs differ on equal q, k and v"),
        (inputs, trace.HOST, f"step 1, layer 3: q, k or v {moved}"),
        (logits, trace.HOST, f"step 0: logits {moved}"),
        (shorter, trace.HOST, "step 0: another number of attention calls"),
    ]
    for change, status, text in expected:
        assert trace.first_difference(steps(change), steps()) == trace.Difference(status, text)
