"""Generation and validation without a device: refusals and text streaming."""

import json
import sys
from pathlib import Path

import pytest
from commands import refusal

from zinc_attn.tools import generate
from zinc_attn.tools.generate import stream_text
from zinc_attn.tools.harness.split_spec import VARIED_LAYOUTS, parse_split_specs


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_without_transformers(package, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "zinc_attn.integrations.transformers", raising=False)
    monkeypatch.delattr(sys.modules.get("zinc_attn.integrations", sys), "transformers", raising=False)
    said = refusal(capsys, "validate --model", tmp_path)
    assert said.startswith("zinc_attn.integrations.transformers: ")
    assert "pip install torch 'zinc-attn[transformers]'" in said


def test_the_commands_need_no_transformers_to_show_their_help():
    """Neither torch nor transformers is imported before a function needs it."""
    for file in Path(generate.__file__).parent.glob("*.py"):
        lines = file.read_text().splitlines()
        assert not [line for line in lines if line.startswith(("import torch", "from transformers"))], file


def test_default_layouts_and_the_example():
    assert parse_split_specs(VARIED_LAYOUTS)[0].label == "1"
    example = Path(__file__).parents[2] / "examples" / "qwen3.6-style-tiny.json"
    config = json.loads(example.read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (16, 2, 256)
    assert config["max_position_embeddings"] >= 131072


class Bytes:
    """A tokenizer whose ids are bytes."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return bytes(ids if isinstance(ids, list) else [ids]).decode(errors="replace")


@pytest.mark.parametrize("text", ["plain text", "ä €𝄞 end", "海は広い", "a\nb", "€", "a \ufffd"])
def test_text_streams_in_whole_characters(text):
    """The last one stands for a text that ends inside a character."""
    pytest.importorskip("transformers", reason="pip install 'zinc-attn[transformers]'")
    pieces: list[str] = []
    put, end = stream_text(Bytes(), pieces.append)
    for byte in text.encode() if text[-1] != "\ufffd" else "a €".encode()[:-1]:
        put(byte)
    assert "\ufffd" not in "".join(pieces) and text.startswith("".join(pieces))
    assert len([piece for piece in pieces if piece]) >= text.count(" ") + text.count("\n")
    end()
    assert "".join(pieces) == text
