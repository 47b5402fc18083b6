"""``zinc-attn perplexity`` on small random models: its numbers, that it finds a cost, and what it refuses."""

import math

import pytest
from commands import records, refusal, run
from support import FULL
from tiny_models import TEXT, byte_tokenizer, config_file, saved
from zinc_models import hf, torch, transformers

from zinc_attn.errors import UnsupportedError
from zinc_attn.tools import generate

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = ("f32", "f16", "bf16", "q8_0")
# llama's cost is measured in every dtype, that of models with other kernels in float32 and in one other
COSTS = {"llama": DTYPES, "gemma2": ("f32", "f16"), "qwen3_5_moe_text": ("f32", "bf16"), "deepseek_v3": ("f32", "q8_0")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints with a tokenizer, by model type, and text.txt."""
    root = tmp_path_factory.mktemp("perplexity")
    for kind in COSTS:
        saved(root / kind, kind)
    (root / "text.txt").write_text(TEXT * 20, encoding="utf-8")
    return root


def perplexity(folder, options, model="llama"):
    """The words of the command."""
    return "perplexity --runtime vulkan --model", folder / model, "--text", folder / "text.txt", options


@pytest.mark.parametrize("model", COSTS)
def test_the_cost_of_each_dtype(model, folder, capsys):
    """Eager's number is that of the model's own loss, f32's is eager's, and a narrower cache costs more."""
    dtypes = DTYPES if FULL else COSTS[model]
    found = records(capsys, *perplexity(folder, f"--context 300 --json --dtype {','.join(dtypes)}", model))
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
    assert records(capsys, *perplexity(folder, "--context 200 --dtype f32 --json"))[1]["kl"] > 1e-6


def test_table(folder, capsys):
    """Of the text that is in the package."""
    assert run("perplexity --runtime vulkan --model", folder / "llama", "--context 130 --dtype 'f16, q8_0'") == 0
    shown = capsys.readouterr().out
    assert f"llama in float32: the first 130 tokens of {generate.TEXT.name}" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert [row[0] for row in rows if row[:1] and row[0] in ("eager", *DTYPES)] == ["eager", "f16", "q8_0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--context 1000", "text: got 340 tokens, expected at least context = 1,000; "),
        ("", "text: got 340 tokens, expected at least context = 1,024; give a longer text or a smaller context"),
        ("--context 2000 --text {}/long.txt", "context: got 2,000 tokens, expected at most max_position_"),
    ],
)
def test_refused(arguments, message, folder, capsys):
    (folder / "long.txt").write_text(TEXT * 130, encoding="utf-8")
    assert refusal(capsys, *perplexity(folder, arguments.format(folder))).startswith(message)


def test_adapted_models_are_refused(tmp_path, device):
    """Their own attention cannot be selected again."""
    model = generate.build_model(config_file(tmp_path / "bloom.json", "bloom"))
    with pytest.raises(UnsupportedError, match="got bloom of type bloom, whose attention is adapted, expected"):
        generate.measure_perplexity(model, device, [1, 2, 3], ["f16"], generate.Settings())
