"""``zinc-attn generate`` and ``validate`` on small random checkpoints, through the command line."""

import functools
import hashlib
import io
import json
import re
import shutil
import socket
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import records, refusal, run
from support import FULL
from tiny_models import TEXT, config_file, saved
from zinc_models import hf, torch, transformers

import zinc_attn as za
from zinc_attn.cli import generate as generate_command
from zinc_attn.tools import generate

GENERATE, VALIDATE = "generate --runtime vulkan --model", "validate --runtime vulkan"
INDEXED = {"model_type": "deepseek_v32", "kv_lora_rank": 16, "layer_types": ["indexed_attention"] * 2}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of random checkpoints by model type, without a tokenizer."""
    root = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda kind: saved(root / kind, kind, tokenizer=False))


@pytest.fixture(scope="module")
def with_tokenizer(checkpoints):
    """A checkpoint with a byte-level tokenizer of its 300 ids."""
    return saved(checkpoints("llama").parent / "text")


@pytest.fixture
def vulkan():
    with za.Device.open(runtime="vulkan") as device:
        yield device


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_moe_text", "gemma2", "deepseek_v3", "mimo_v2_flash", "bloom"])
def test_ids_are_those_of_transformers_generate(kind, checkpoints, vulkan, capsys):
    prompt = [int(i) for i in np.random.default_rng(0).integers(1, 300, 30)]
    ids = f"--prompt-ids {','.join(map(str, prompt))}"
    (got,) = records(capsys, GENERATE, checkpoints(kind), ids, "--max-new-tokens 12 --json")
    hf.register()
    own = "eager" if kind == "bloom" else "zinc"  # BLOOM's is compared with its own attention, since it is adapted
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints(kind), attn_implementation=own).eval()
    with hf.ZincCache(model.config, 64, device=vulkan) as held, torch.no_grad():
        options = {"max_new_tokens": 12, "do_sample": False} | ({"cache": held} if own == "zinc" else {})
        want = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
    assert got["ids"] == want.tolist()
    assert (got["stopped"], got["text"], got["prompt_tokens"], got["new_tokens"]) == ("length", None, 30, 12)
    assert got["settings"]["dtype"] == ("bf16" if "qwen" in kind else "f32")
    assert 0 < got["attention_share"] < 1 and got["decode_tokens_s"] > 0 and got["prefill_tokens_s"] > 0


def test_text_streams(with_tokenizer, capsys):
    options = (GENERATE, with_tokenizer, f"--prompt '{TEXT}' --max-new-tokens 12")
    assert run(*options, "--prefill-chunk 7 --page-size 16 --splits 3 --capacity 200") == 0
    shown = capsys.readouterr()
    (record,) = records(capsys, *options, "--json")
    tokenizer = generate.load_tokenizer(with_tokenizer)
    assert record["text"] == tokenizer.decode(record["ids"])
    assert shown.out == f"{record['text']}\n"
    assert "prefill  " in shown.err and " tokens/s, median " in shown.err and "; attention " in shown.err


def test_a_pipe_gets_every_token_as_it_comes(checkpoints, monkeypatch):
    """Nothing waits in a buffer, and the progress of the prompt ends before the first token."""
    raw, order, generate_ids = io.BytesIO(), list[Any](), generate.generate_ids

    @contextmanager
    def progress(what="starting"):
        order.append(what)
        yield lambda *step: None
        order.append("end")

    def watched(model, device, prompt, settings, on_token):
        def token(number):
            on_token(number)
            order.append(raw.getvalue().decode().endswith(str(number)))

        return generate_ids(model, device, prompt, settings, token)

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw))
    monkeypatch.setattr(generate_command, "progress_bar", progress)
    monkeypatch.setattr(generate, "generate_ids", watched)
    assert run(GENERATE, checkpoints("llama"), "--prompt-ids 5,6 --max-new-tokens 3") == 0
    assert order == ["reading a prompt of 2 tokens", "end", True, True, True]


def test_nothing_is_downloaded(with_tokenizer, monkeypatch, capsys):
    tried = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **kwargs: tried.append(arguments) or [])
    assert run(GENERATE, with_tokenizer, "--prompt 'the sea' --max-new-tokens 2") == 0
    capsys.readouterr()
    assert "nothing is downloaded" in refusal(capsys, GENERATE, "owner/name --prompt 'the sea'") and not tried


def test_temperature_draws_by_the_seed(checkpoints, vulkan, monkeypatch):
    host, found = generate.load_model(checkpoints("llama")), []
    for temperature, seed in ((0.0, 1), (1.5, 1), (1.5, 1), (1.5, 2)):
        settings = generate.Settings(max_new_tokens=16, temperature=temperature, seed=seed)
        found.append(generate.generate_ids(host, vulkan, [1, 2, 3], settings).ids)
    greedy, one, again, other = found
    assert one == again and one not in (greedy, other)
    monkeypatch.setattr(host.model.generation_config, "eos_token_id", [299, greedy[3]])
    made = generate.generate_ids(host, vulkan, [1, 2, 3], generate.Settings(max_new_tokens=16))
    assert made.ids == greedy[: greedy.index(greedy[3]) + 1] and made.stopped == "eos"


@pytest.mark.parametrize(("new", "dtype"), [(1, "f32"), (2, "f16/q8_0"), *[(2, "q8_0/f16")] * FULL])
def test_token_ids(new, dtype, checkpoints, capsys):
    """One new token has no decode rate, and the last never enters the cache; types of K and V may differ."""
    options = f"--prompt-ids 5 --max-new-tokens {new} --dtype {dtype} --capacity {new}"
    assert run(GENERATE, checkpoints("llama"), options) == 0
    shown = capsys.readouterr()
    assert all(one.isdecimal() for one in shown.out.strip().split(",")) and shown.out.count(",") == new - 1
    assert "prefill  1 token in" in shown.err and re.search(r"\ndigest   [0-9a-f]{32} of ", shown.err)
    assert f"cache {dtype}\n" in shown.err and ("decode" in shown.err) == (new > 1)


@pytest.mark.parametrize(
    ("kind", "prompt", "chunk"),
    [("llama", 3, None), *((kind, 200, 90) for kind in ("gpt_oss", "gemma2", "qwen3_5_moe_text"))],
)
def test_no_step_compiles_anything(kind, prompt, chunk, checkpoints, vulkan, monkeypatch):
    """A device makes each program once, on its first use."""
    programs, made_before, make = [], [], vulkan.runtime.kernel  # made_before: each token

    def kernel(decl, spirv, spec):
        programs.append(decl.name)
        return make(decl, spirv, spec)

    monkeypatch.setattr(vulkan.runtime, "kernel", kernel)
    settings = generate.Settings(max_new_tokens=70, prefill_chunk=chunk)
    host, ids = generate.load_model(checkpoints(kind)), [1 + i % 299 for i in range(prompt)]
    generate.generate_ids(host, vulkan, ids, settings, lambda token: made_before.append(len(programs)))
    assert len(made_before) == 70 and set(made_before) == {len(programs)} and len(programs) >= 3


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_the_digest_is_that_of_every_layout_and_page_size(kind, checkpoints, vulkan, monkeypatch):
    """It covers the token ids and every bit of the logits that chose them."""
    host, right, seen = generate.load_model(checkpoints(kind)), generate.HFModel.logits, list[Any]()

    def logits(self, *given):
        seen.append(right(self, *given))
        return seen[-1]

    monkeypatch.setattr(generate.HFModel, "logits", logits)
    prompt, same = [1 + i * 7 % 299 for i in range(70)], {"max_new_tokens": 4, "dtype": "f16"}
    made = generate.generate_ids(host, vulkan, prompt, generate.Settings(**same))
    parts = [x.numpy().tobytes() + token.to_bytes(8, "little") for x, token in zip(seen, made.ids, strict=True)]
    assert made.digest == hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()
    for other in ({"num_splits": 1}, {"num_splits": 8}, {"split_size": 256}, {"page_size": 16}, {"page_size": 64}):
        assert generate.generate_ids(host, vulkan, prompt, generate.Settings(**same, **other)).digest == made.digest
    spoil(monkeypatch, lambda one: one.page_size == 16)
    wrong = generate.generate_ids(host, vulkan, prompt, generate.Settings(**same, page_size=16))
    assert wrong.digest != made.digest


def spoil(monkeypatch, when):
    """Flip the last bit of one output element of layer 1 in caches that ``when`` chooses."""
    right = hf.ZincCache.attend

    def attend(self, layer, *rest):
        out = right(self, layer, *rest).copy()
        if layer.index == 1 and when(self):
            out.reshape(-1).view(np.uint32)[-1] ^= 1
        return out

    monkeypatch.setattr(hf.ZincCache, "attend", attend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "foobar"}, "The checkpoint you are trying to load has model type `foobar` but "),
        ({"model_type": "vit"}, "configuration_vit.ViTConfig'> for this kind of AutoModel: AutoModelForCausalLM. "),
        ({"head_dim": 640}, "head_dim: got 640, expected an int from 1 to 576"),
        (INDEXED, "layer 0 is of type 'indexed_attention', expected one of full_attention, "),
        ({"intermediate_size": 100}, "it has 6 weights of other shapes than its config says, the first model."),
        ({"num_hidden_layers": 3}, "it lacks 9 weights of LlamaForCausalLM, the first model.layers.2."),
        ({}, ""),  # a safetensors file that is cut off
    ],
)
def test_models_refused(changes, message, tmp_path, checkpoints, capsys):
    path = Path(shutil.copytree(checkpoints("llama"), tmp_path / "m"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    if not changes:
        (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:1000])
    said = refusal(capsys, GENERATE, path, "--prompt-ids 1")
    assert said.startswith(f"model: cannot load {path}: ") and message in said


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_without_transformers(package, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "zinc_attn.integrations.transformers", raising=False)
    monkeypatch.delattr(sys.modules.get("zinc_attn.integrations", sys), "transformers", raising=False)
    said = refusal(capsys, "validate --model", tmp_path)
    assert said.startswith("zinc_attn.integrations.transformers: ")
    assert "pip install torch 'zinc-attn[transformers]'" in said


TOO_LONG = "got 1,025 tokens, expected at most max_position_embeddings = 1,024 of llama"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompt text", "prompt: {} has no tokenizer, expected --prompt-ids, for example 1,2,3"),
        ("--prompt-ids 1,300", "prompt: got 300, expected an int from 0 to 299"),
        ("--prompt-ids 1,2 --capacity 8 --max-new-tokens 8", "capacity: got 8, expected an int of at least 9"),
        ("--prompt-ids 1 --max-new-tokens 1024", f"prompt, max_new_tokens: {TOO_LONG}"),
        ("--prompt-ids 1 --page-size 48", "page_size: got 48, expected "),
        ("--prompt-ids 1 --device 'none such'", "device: no Vulkan device matches 'none such'; "),
    ],
)
def test_generate_refused(arguments, message, checkpoints, capsys):
    path = checkpoints("llama")
    assert refusal(capsys, GENERATE, path, arguments).startswith(message.format(path))


def test_what_a_model_raises_is_one_line(checkpoints, monkeypatch, capsys):
    def broken(*arguments, **kwargs):
        raise RuntimeError("strides\n of something")

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", broken)
    said = refusal(capsys, GENERATE, checkpoints("llama"), "--prompt-ids 1")
    assert said == "model: a forward of LlamaForCausalLM failed: strides of something"


@pytest.fixture
def findings(tmp_path, capsys):
    """The status, and what ``validate --json`` says of a random model of a type, at 100 tokens unless told."""

    def validated(options, kind="llama", **config):
        where = "" if "--contexts" in options or config else "--contexts 100"
        status = run(
            VALIDATE, "--json --config", config_file(tmp_path / f"{kind}.json", kind, **config), where, options
        )
        return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return validated


@pytest.mark.parametrize(
    ("kind", "dtype", "contexts", "page"),
    [
        ("llama", "f32", "16,17,300", 16),
        ("qwen3_5_moe_text", "bf16", "1000", 256),
        ("gpt_oss", "f16", "300", 64),
        ("gemma2", "f32", "300", 128),
        ("gemma4_text", "f32", "300", 64),
        ("deepseek_v3", "q8_0", "300", 64),
        ("mimo_v2_flash", "f16", "300", 64),
        ("bloom", "f16", "300", 64),
    ],
)
def test_validate(kind, dtype, contexts, page, findings):
    """Windows, sinks, softcap, ALiBi, linear-attention layers, V of another size; pages that are full, and not."""
    options = f"--contexts {contexts} --splits 1,3,auto,size:100 --page-size {page} --dtype {dtype}"
    status, found = findings(options, kind=kind)
    layers = "1 layers" if "qwen" in kind else "2 layers"
    want = [("3", "equal", ""), ("auto", "equal", ""), ("size:100", "equal", ""), ("oracle", "equal", layers)]
    got = [(one["context"], one["what"], one["status"], one["text"]) for one in found]
    assert got == [(int(context), *row) for context in contexts.split(",") for row in want] and status == 0
    assert all((one["dtype"], one["model"]) == (dtype, kind) for one in found)


def test_the_example_is_built():
    path = Path(__file__).parents[2] / "examples" / "qwen3.6-style-tiny.json"
    weights = [generate.build_model(path, seed).model.lm_head.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_validate_a_checkpoint_as_a_table(checkpoints, capsys):
    assert run(VALIDATE, "--model", checkpoints("llama"), "--contexts 128,256 --splits auto") == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if line.endswith(" equal")]
    assert rows == [[context, what, "equal"] for context in ("128", "256") for what in ("auto", "oracle")]
    assert "llama; cache f32" in shown and "256 keys, oracle: equal: 2 layers" in shown


def test_default_contexts_end_at_the_models_maximum(findings, monkeypatch):
    monkeypatch.setattr(generate, "CONTEXTS", "100,200,400,500")
    status, found = findings("--splits 2", max_position_embeddings=300)
    assert status == 0 and [one["context"] for one in found] == [100, 100, 200, 200, 300, 300]


@pytest.fixture
def layouts(monkeypatch):
    """The numbers of splits that a cache was told to attend with, so far."""
    found: list[int | None] = []
    choose = hf.ZincCache.set_layout
    monkeypatch.setattr(hf.ZincCache, "set_layout", lambda self, *one: found.append(one[0]) or choose(self, *one))
    return found


@pytest.mark.parametrize(
    ("splits", "differing"),
    [(8, ["8"]), (1, ["2", "8", "auto", "oracle"])],  # the oracle says who is right
)
def test_validate_finds_a_wrong_bit(splits, differing, layouts, findings, monkeypatch):
    spoil(monkeypatch, lambda _: layouts[-1] == splits)
    status, found = findings("--splits 2,8,auto")
    assert status == 1 and [one["what"] for one in found] == ["2", "8", "auto", "oracle"]
    for one in found:
        at = "layer 1: out[0, 3, 63]: got " if one["what"] == "oracle" else "step 0, layer 1: out[0, 3, 63]: got "
        wrong = one["what"] in differing
        assert (one["status"], one["text"].startswith(at)) == (("DIFFERENT", True) if wrong else ("equal", False))


def test_validate_finds_an_error_that_every_layout_has(findings, monkeypatch):
    """Here keys that were stored wrong."""
    right, wrong = hf.ZincCache.append, np.float32(1 + 2**-12)
    monkeypatch.setattr(
        hf.ZincCache, "append", lambda self, x, dtype: right(self, lambda one: [y * wrong for y in x(one)], dtype)
    )
    status, found = findings("--splits 2 --dtype f32")
    assert status == 1 and [one["status"] for one in found] == ["equal", "DIFFERENT"] and "ulp" in found[1]["text"]


@pytest.mark.parametrize(
    ("module", "where"), [("LlamaForCausalLM", "step 0: logits"), ("LlamaMLP", "step 0, layer 1: q, k or v")]
)
def test_validate_does_not_take_the_blame_for_the_host(module, where, layouts, findings, monkeypatch):
    layer = getattr(transformers.models.llama.modeling_llama, module)
    right = layer.forward

    @functools.wraps(right)
    def forward(*given, **options):
        made = right(*given, **options)
        if layouts[-1] == 8:
            (made.logits if module == "LlamaForCausalLM" else made).mul_(1.5)
        return made

    monkeypatch.setattr(layer, "forward", forward)
    status, found = findings("--splits 2,8")
    assert status == 3 and [one["status"] for one in found] == ["equal", "host differs", "equal"]
    assert found[1]["text"] == f"{where} differ after equal attention: the model's own arithmetic moved"


def test_validate_refuses_what_there_is_no_room_for(findings):
    status, found = findings("--contexts 16m,64 --splits 2 --dtype f32", max_position_embeddings=1 << 24)
    assert status == 2 and [one["status"] for one in found] == ["refused", "equal", "equal"]
    assert found[0]["context"] == 1 << 24 and found[0]["text"].startswith("max_cache_len")
