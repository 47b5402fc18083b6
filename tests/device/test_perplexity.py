"""``zinc-attn perplexity`` on small random models: its numbers, that it finds a cost, and what it refuses."""

from __future__ import annotations

import json
import math

import pytest
from support import FULL
from tiny_models import TEXT, byte_tokenizer, config_file

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="pip install 'zinc-attn[transformers]'")

from zinc_attn.cli import app as cli  # noqa: E402
from zinc_attn.dtypes import EXPECTED  # noqa: E402
from zinc_attn.errors import UnsupportedError  # noqa: E402
from zinc_attn.integrations import transformers as hf  # noqa: E402
from zinc_attn.tools import generate  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = ("f32", "f16", "bf16", "q8_0")
# llama's cost is measured in every dtype, that of models with other kernels in float32 and in one other
COSTS = {"llama": DTYPES, "gemma2": ("f32", "f16"), "qwen3_5_moe_text": ("f32", "bf16"), "deepseek_v3": ("f32", "q8_0")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints with a tokenizer, by model type, and text.txt."""
    root = tmp_path_factory.mktemp("perplexity")
    for kind in COSTS:
        generate.build_model(config_file(root / f"{kind}.json", kind), seed=7).model.save_pretrained(root / kind)
        byte_tokenizer().save_pretrained(root / kind)
    (root / "text.txt").write_text(TEXT * 20, encoding="utf-8")
    return root


def run(folder, *arguments, model="llama"):
    command = ["perplexity", "--model", folder / model, "--text", folder / "text.txt", "--runtime", "vulkan"]
    return cli.main([*map(str, command), *map(str, arguments)])


@pytest.mark.parametrize("model", COSTS)
def test_the_cost_of_each_dtype(model, folder, capsys):
    """Eager's number is that of the model's own loss, f32's is eager's, and a narrower cache costs more."""
    dtypes = DTYPES if FULL else COSTS[model]
    assert run(folder, "--context", 300, "--json", "--dtype", ",".join(dtypes), model=model) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["cache"] for one in found] == ["eager", *dtypes]
    assert all((one["context"], one["text"], one["model"]) == (300, "text.txt", model) for one in found)
    ids = torch.tensor([byte_tokenizer()(TEXT * 20)["input_ids"][:300]])
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        loss = load(folder / model, dtype=torch.float32, attn_implementation="eager")(ids, labels=ids).loss
    eager, f32, *narrow = found
    kl = {one["cache"]: one["kl"] for one in found}
    assert math.isclose(eager["perplexity"], math.exp(float(loss)), rel_tol=1e-4) and eager["kl"] is None
    assert math.isclose(f32["perplexity"], eager["perplexity"], rel_tol=1e-5)
    assert 0 <= f32["kl"] < 1e-9 and f32["same_best"] == 1.0
    assert all(f32["kl"] < one["kl"] < 1e-2 and 0.9 < one["same_best"] <= 1.0 for one in narrow)
    if len(dtypes) == len(DTYPES):
        assert kl["f16"] < min(kl["bf16"], kl["q8_0"])


def test_a_wrong_attention_costs(folder, monkeypatch, capsys):
    right = hf.ZincCache.attend
    monkeypatch.setattr(hf.ZincCache, "attend", lambda *arguments: right(*arguments) * 1.01)
    assert run(folder, "--context", 200, "--dtype", "f32", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[1])["kl"] > 1e-6


def test_table(folder, capsys):
    assert run(folder, "--context", 130, "--dtype", "f16, q8_0") == 0
    shown = capsys.readouterr().out
    assert "llama in float32: the first 130 tokens of text.txt" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert [row[0] for row in rows if row[:1] and row[0] in ("eager", *DTYPES)] == ["eager", "f16", "q8_0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", 1000], "text: got 340 tokens, expected at least context = 1,000; "),
        ([], "text: got 340 tokens, expected at least context = 1,024; give a longer text"),
        (["--context", 1], "context: got 1, expected an int of at least 2"),
        (["--context", 2000, "--text", "{0}/long.txt"], "context: got 2,000 tokens, expected at most max_position_"),
        (["--dtype", "f16,f8"], f"dtype: got 'f8', expected {EXPECTED}"),
    ],
)
def test_refused(arguments, message, folder, capsys):
    (folder / "long.txt").write_text(TEXT * 130, encoding="utf-8")
    assert run(folder, *(str(one).format(folder) for one in arguments)) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(error) == 1 and error[0].startswith(f"zinc-attn: error: {message.format(folder)}")


def test_adapted_models_are_refused(tmp_path, device):
    """Their own attention cannot be selected again."""
    model = generate.build_model(config_file(tmp_path / "bloom.json", "bloom"))
    with pytest.raises(UnsupportedError, match="got bloom of type bloom, whose attention is adapted, expected"):
        generate.measure_perplexity(model, device, [1, 2, 3], ["f16"], generate.Settings())


def test_a_text_is_in_the_package():
    """The whole first chapter, which is enough for the default context of any tokenizer of words' pieces."""
    text = generate.TEXT.read_text(encoding="utf-8")
    assert text.startswith("It is a truth universally acknowledged, that a single man in possession of a good fortune")
    assert (
        text.endswith("to get her daughters married; its solace was visiting and news.\n") and len(text.split()) == 847
    )
