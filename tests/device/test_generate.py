"""``zinc-attn generate`` and ``validate`` on small random checkpoints, through the command line."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import FULL
from tiny_models import BASE, TEXT, byte_tokenizer, config_file

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="pip install 'zinc-attn[transformers]'")

import zinc_attn as za  # noqa: E402
from zinc_attn.cli import app as cli  # noqa: E402
from zinc_attn.integrations import transformers as hf  # noqa: E402
from zinc_attn.tools import generate  # noqa: E402
from zinc_attn.tools.generate import checkpoints as checkpoints_module  # noqa: E402
from zinc_attn.tools.generate import checks, generation  # noqa: E402
from zinc_attn.tools.generate.hf_model import quiet  # noqa: E402

RUN = ("--runtime", "vulkan")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of random checkpoints by model type, without a tokenizer."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def make(kind: str) -> Path:
        host = generate.build_model(config_file(root / f"{kind}.json", kind), seed=7)
        with quiet():  # its progress bar would be among what a command says
            host.model.save_pretrained(root / kind)
        return root / kind

    return make


@pytest.fixture(scope="module")
def with_tokenizer(checkpoints: Callable[[str], Path]) -> Path:
    """A checkpoint with a byte-level tokenizer of its 300 ids."""
    path = checkpoints("llama").parent / "text"
    shutil.copytree(checkpoints("llama"), path)
    byte_tokenizer().save_pretrained(path)
    return path


def run(*arguments: Any) -> int:
    return cli.main([*map(str, arguments), *RUN])


@pytest.fixture
def vulkan() -> Iterator[za.Device]:
    with za.Device.open(runtime="vulkan") as device:
        yield device


def ids_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


# --- generate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_moe_text", "gemma2", "deepseek_v3", "mimo_v2_flash"])
def test_ids_are_those_of_transformers_generate(
    kind: str, checkpoints: Callable[[str], Path], vulkan: za.Device, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = [int(i) for i in np.random.default_rng(0).integers(1, 300, 30)]
    text = ",".join(map(str, prompt))
    assert run("generate", "--model", checkpoints(kind), "--prompt-ids", text, "--max-new-tokens", 12, "--json") == 0
    got = ids_of(capsys)
    hf.register()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints(kind), attn_implementation="zinc").eval()
    with hf.ZincCache(model.config, 64, device=vulkan) as held, torch.no_grad():
        options = {"max_new_tokens": 12, "do_sample": False, "past_key_values": held}
        want = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
    assert got["ids"] == want.tolist()
    assert (got["stopped"], got["text"], got["prompt_tokens"], got["new_tokens"]) == ("length", None, 30, 12)
    assert got["settings"]["dtype"] == ("bf16" if "qwen" in kind else "f32")
    assert 0 < got["attention_share"] < 1 and got["decode_tokens_s"] > 0 and got["prefill_tokens_s"] > 0


def test_text_streams(with_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("generate", "--model", with_tokenizer, "--prompt", TEXT, "--max-new-tokens", 12)
    assert run(*options, "--prefill-chunk", 7, "--page-size", 16, "--splits", 3, "--capacity", 200) == 0
    shown = capsys.readouterr()
    assert run(*options, "--json") == 0
    record = ids_of(capsys)
    tokenizer = generate.load_tokenizer(with_tokenizer)
    assert record["text"] == tokenizer.decode(record["ids"])
    assert shown.out == f"{record['text']}\n"
    assert "prefill  " in shown.err and " tokens/s, median " in shown.err and "; attention " in shown.err


def test_nothing_is_downloaded(
    with_tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **kwargs: tried.append(arguments) or [])
    assert run("generate", "--model", with_tokenizer, "--prompt", "the sea", "--max-new-tokens", 2) == 0
    assert run("generate", "--model", "owner/name", "--prompt", "the sea") == 2
    assert not tried and "nothing is downloaded" in capsys.readouterr().err


def test_temperature_draws_by_the_seed(
    checkpoints: Callable[[str], Path], vulkan: za.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_token_ids(new: int, dtype: str, checkpoints: Callable[[str], Path], capsys: Any) -> None:
    """One new token has no decode rate; types of K and V may differ."""
    options = ("--prompt-ids", "5", "--max-new-tokens", new, "--dtype", dtype)
    assert run("generate", "--model", checkpoints("llama"), *options) == 0
    shown = capsys.readouterr()
    assert all(one.isdecimal() for one in shown.out.strip().split(",")) and shown.out.count(",") == new - 1
    assert "token ids in, token ids out" in shown.err and "prefill  1 token in" in shown.err
    assert f"cache {dtype}\n" in shown.err and ("decode" in shown.err) == (new > 1)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "gemma2", "qwen3_5_moe_text"])
@pytest.mark.parametrize(("prompt", "chunk"), [(3, None), (200, None), (200, 90)])
def test_the_warm_up_runs_every_program(
    kind: str,
    prompt: int,
    chunk: int | None,
    checkpoints: Callable[[str], Path],
    vulkan: za.Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device makes each program once, on its first use."""
    programs: dict[str, set[Any]] = {"before": set(), "timed": set()}
    phase, make, warm_up = ["timed"], vulkan.runtime.kernel, generation.warm_up

    def kernel(decl: Any, spirv: bytes, spec: Any) -> Any:
        programs[phase[0]].add((decl.name, tuple(spec)))
        return make(decl, spirv, spec)

    def before(*arguments: Any) -> float:
        phase[0] = "before"
        seconds = warm_up(*arguments)
        phase[0] = "timed"
        return seconds

    monkeypatch.setattr(vulkan.runtime, "kernel", kernel)
    monkeypatch.setattr(generation, "warm_up", before)
    settings = generate.Settings(max_new_tokens=70, prefill_chunk=chunk)
    host, ids = generate.load_model(checkpoints(kind)), [1 + i % 299 for i in range(prompt)]
    made = generate.generate_ids(host, vulkan, ids, settings, warm=nullcontext())
    assert made.warm_up_s > 0 and len(made.ids) == 70
    assert len(programs["before"]) >= 3 and not programs["timed"]


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_selfcheck(kind: str, checkpoints: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ",".join(str(1 + i * 7 % 299) for i in range(70))
    options = ("--max-new-tokens", 4, "--selfcheck", "--dtype", "f16")
    assert run("generate", "--model", checkpoints(kind), "--prompt-ids", prompt, *options) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    rows = [line for line in lines if line[:1] in (["layout"], ["page"], ["chunks"])]
    assert [row[:2] for row in rows if row[0] == "layout"] == [["layout", x] for x in checks.CHECK_LAYOUTS]
    assert [row[2] for row in rows if row[0] == "page"] == ["16", "64", "256"]
    assert [row[1] for row in rows if row[0] == "chunks"] == ["1", "7", "64", "all"]
    assert all(row[-1] == "equal" for row in rows) and "DIFFERENT" not in shown


def spoil(monkeypatch: pytest.MonkeyPatch, when: Callable[[Any], bool]) -> None:
    """Flip the last bit of one output element of layer 1 in caches that ``when`` chooses."""
    right = hf.ZincCache.attend

    def attend(self: Any, layer: Any, *rest: Any) -> Any:
        out = right(self, layer, *rest).copy()
        if layer.index == 1 and when(self):
            out.reshape(-1).view(np.uint32)[-1] ^= 1
        return out

    monkeypatch.setattr(hf.ZincCache, "attend", attend)


def test_selfcheck_finds_a_wrong_bit(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, lambda one: one.page_size == 16)
    options = ("--prompt-ids", "1,2,3", "--max-new-tokens", 2, "--selfcheck", "--json")
    assert run("generate", "--model", checkpoints("llama"), *options) == 1
    checks = {(one["kind"], one["value"]): one for one in ids_of(capsys)["selfcheck"]}
    assert checks["page size", "16"]["status"] == "DIFFERENT"
    assert checks["page size", "16"]["text"] == "step 0, layer 1: outputs differ on equal q, k and v"
    assert [one["status"] for key, one in checks.items() if key != ("page size", "16")] == ["equal"] * (len(checks) - 1)


def test_selfcheck_does_not_take_the_blame_for_the_host(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = generate.HFModel.logits
    monkeypatch.setattr(
        generate.HFModel, "logits", lambda self, ids, held: right(self, ids, held) + float(held.page_size == 64)
    )
    options = ("--prompt-ids", "1,2,3", "--max-new-tokens", 2, "--selfcheck")
    assert run("generate", "--model", checkpoints("llama"), *options) == 0
    shown = capsys.readouterr().out
    assert "page size 64: step 0: logits differ after equal attention: the model's own arithmetic moved" in shown


# --- refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "foobar"}, "got model_type 'foobar', which transformers "),
        ({"model_type": "vit"}, "got model_type 'vit', expected a causal language model"),
        ({"head_dim": 640}, "head_dim: got 640, expected an int from 1 to 576"),
        (
            {"model_type": "deepseek_v32", "kv_lora_rank": 16, "layer_types": ["indexed_attention"] * 2},
            "layer 0 is of type 'indexed_attention', expected one of full_attention, ",
        ),
        ({"intermediate_size": 100}, "it has 6 weights of other shapes than its config says, the first model."),
        ({"num_hidden_layers": 3}, "it lacks 9 weights of LlamaForCausalLM, the first model.layers.2."),
        ({}, ""),  # a safetensors file that is cut off
    ],
)
def test_models_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, checkpoints: Callable[[str], Path], capsys: Any
) -> None:
    path = tmp_path / "m"
    shutil.copytree(checkpoints("llama"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    if not changes:
        (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:1000])
    assert run("generate", "--model", path, "--prompt-ids", "1") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"zinc-attn: error: model: cannot load {path}: ") and message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "text"], "prompt: {} has no tokenizer, expected --prompt-ids, for example 1,2,3"),
        (["--prompt-ids", "1,300"], "prompt: got 300, expected an int from 0 to 299"),
        (
            ["--prompt-ids", "1,2", "--capacity", "8", "--max-new-tokens", "8"],
            "capacity: got 8, expected at least 9 for 2 prompt tokens and 8 new ones",
        ),
        (
            ["--prompt-ids", "1", "--max-new-tokens", "1024"],
            "prompt, max_new_tokens: got 1,025 tokens, expected at most max_position_embeddings = 1,024 of llama",
        ),
        (["--prompt-ids", "1", "--page-size", "48"], "page_size: got 48, expected "),
        (["--prompt-ids", "1", "--device", "none such"], "device: no Vulkan device matches 'none such'; "),
    ],
)
def test_generate_refused(
    arguments: list[str], message: str, checkpoints: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoints("llama")
    assert run("generate", "--model", path, *arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("zinc-attn: error: ")]
    assert len(lines) == 1 and lines[0].startswith(f"zinc-attn: error: {message.format(path)}")


def test_what_a_model_raises_is_one_line(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any, **kwargs: Any) -> Any:
        raise RuntimeError("strides\n of something")

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", broken)
    assert run("generate", "--model", checkpoints("llama"), "--prompt-ids", "1") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        "zinc-attn: error: model: a forward of LlamaForCausalLM failed: RuntimeError: strides of something"
    )


def test_models_with_alibi_are_adapted(
    checkpoints: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text is the model's own, at every layout and page size; what needs its own attention refuses it."""
    path = checkpoints("bloom")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        want = model.generate(torch.arange(1, 31)[None], max_new_tokens=8, do_sample=False)[0, 30:].tolist()
    asked = ("--prompt-ids", ",".join(map(str, range(1, 31))), "--max-new-tokens", 8)
    assert run("generate", "--model", path, *asked, "--selfcheck") == 0
    assert [int(x) for x in re.findall(r"\d+", capsys.readouterr().out.splitlines()[0])] == want
    assert run("validate", "--model", path, "--contexts", 32) == 2
    assert "validate: got bloom of type bloom, whose attention is adapted, expected" in capsys.readouterr().err


# --- validate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "contexts", "page"),
    [
        ("llama", "f32", "16,17,300", 16),
        ("qwen3_5_moe_text", "bf16", "1000", 256),
        ("qwen3_5_moe_text", "q8_0", "300", 64),
        ("gpt_oss", "f16", "300", 64),
        ("gemma2", "f32", "300", 128),
        ("gemma4_text", "f32", "300", 64),
        ("deepseek_v3", "f32", "300", 64),
        ("deepseek_v3", "q8_0", "300", 64),
        ("mimo_v2_flash", "f16", "300", 64),
    ],
)
def test_validate(
    kind: str, dtype: str, contexts: str, page: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Windows, sinks, softcap, linear-attention layers and V of another size; pages that are full, and not."""
    file = config_file(tmp_path / f"{kind}.json", kind)
    options = ("--contexts", contexts, "--splits", "3,auto,size:100", "--page-size", page, "--dtype", dtype)
    assert run("validate", "--config", file, *options, "--json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["context"] for one in found] == [int(x) for x in contexts.split(",")]
    for one in found:
        assert (one["status"], one["dtype"], one["model"]) == ("pass", dtype, kind)
        got = [(row["layout"], row["status"]) for row in one["layouts"]]
        assert got == [("1", "baseline"), ("3", "equal"), ("auto", "equal"), ("size:100", "equal")]
        assert [layer["layer"] for layer in one["layers"]] == ([1] if "qwen" in kind else [0, 1])
        assert all(0 < layer["relative_l2"] < 1e-6 for layer in one["layers"])
        assert all(row["attention_ms"] < row["step_ms"] for row in one["layouts"])


def test_the_example_is_built() -> None:
    path = Path(__file__).parents[2] / "examples" / "qwen3.6-style-tiny.json"
    host, again, other = (generate.build_model(path, seed) for seed in (0, 0, 1))
    assert host.describe() == "2 attention layers 16/2/256 and 6 others"
    weights = [one.model.lm_head.weight for one in (host, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_validate_a_checkpoint_as_a_table(
    checkpoints: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--contexts", "128,256", "--splits", "auto")
    assert run("validate", "--model", checkpoints("llama"), *options) == 0
    shown = capsys.readouterr().out
    assert "llama: 2 attention layers 4/2/64; cache f32" in shown
    rows = [line.split() for line in shown.splitlines() if line.strip()[:3] in ("128", "256")]
    assert [row[:4] for row in rows[:4]] == [
        ["128", "1", "1", "baseline"],
        ["128", "auto", rows[1][2], "equal"],
        ["256", "1", "1", "baseline"],
        ["256", "auto", rows[3][2], "equal"],
    ]
    assert shown.count("(at most 5e-06), the worst of 2 layers") == 2


def test_default_contexts_end_at_the_models_maximum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for most in (300, 8300):
        file = config_file(tmp_path / f"{most}.json", max_position_embeddings=most)
        assert run("validate", "--config", file, "--splits", "2", "--json") == 0
        found = [json.loads(line)["context"] for line in capsys.readouterr().out.splitlines()]
        assert found == [300] if most == 300 else [8192, 8300]


def test_validate_finds_a_wrong_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    layouts: list[int | None] = []
    choose = hf.ZincCache.set_layout
    monkeypatch.setattr(hf.ZincCache, "set_layout", lambda self, *one: layouts.append(one[0]) or choose(self, *one))
    spoil(monkeypatch, lambda _: layouts[-1] == 8)
    file = config_file(tmp_path / "c.json")
    assert run("validate", "--config", file, "--contexts", "100", "--splits", "2,8,auto") == 1
    shown = capsys.readouterr().out
    assert "100 keys, layout 8: DIFFERENT: step 0, layer 1: out[0, 3, 63]: got " in shown
    assert shown.count("DIFFERENT") == 2 and shown.count(" equal  ") == 2


def test_validate_finds_an_error_that_every_layout_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here keys that were stored wrong."""
    right, wrong = hf.ZincCache.append, np.float32(1 + 2**-12)
    monkeypatch.setattr(
        hf.ZincCache, "append", lambda self, x, dtype: right(self, lambda one: [y * wrong for y in x(one)], dtype)
    )
    file = config_file(tmp_path / "c.json")
    assert run("validate", "--config", file, "--contexts", "100", "--splits", "2", "--dtype", "f32") == 3
    shown = capsys.readouterr().out
    assert "FAIL, expected at most 5e-06" in shown and "DIFFERENT" not in shown


def test_validate_refuses_what_there_is_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path / "c.json", max_position_embeddings=1 << 24)
    assert run("validate", "--config", file, "--contexts", "16m,64", "--splits", "2", "--dtype", "f32") == 2
    shown = capsys.readouterr().out
    assert "16,777,216 keys: refused: " in shown and "64 keys against float64" in shown
    assert run("validate", "--config", config_file(tmp_path / "d.json"), "--contexts", "2k") == 2
    assert "contexts: got 2,048 tokens, expected at most max_position_embeddings = 1,024" in capsys.readouterr().err
    monkeypatch.setattr(checkpoints_module, "check_memory", _no_room)
    assert run("validate", "--config", file) == 2
    assert "no room for random weights" in capsys.readouterr().err


def _no_room(nbytes: int, what: str) -> None:
    raise za.errors.DeviceMemoryError(f"no room for {what}, {nbytes} bytes")


# --- what they ask of a ZincCache --------------------------------------------------------------------------


def test_rows_appended_without_a_forward(vulkan: za.Device, rng: np.random.Generator) -> None:
    """Forks share them, another layout gives the same bits, and a batch is refused."""
    config = transformers.LlamaConfig(**BASE)
    k, v = rng.standard_normal((2, 2, 50, 2, 64), np.float32)
    with hf.ZincCache(config, 128, device=vulkan, page_size=16) as held:
        held.append(lambda layer: (k[layer.index, :30], v[layer.index, :30]), torch.float32)
        held.append(lambda layer: (k[layer.index, 30:], v[layer.index, 30:]), torch.float32)
        assert held.get_seq_length() == 50 and [len(one) for row in held.sequences for one in row] == [50]
        q, key, value = (torch.randn(1, heads, 1, 64) for heads in (4, 2, 2))
        found, seen = [], list[hf.AttendedCall]()
        held.observer = seen.append
        for layout in ({}, {"num_splits": 3}, {"split_size": 16}):
            held.set_layout(**layout)
            twin = held.fork()
            rows = twin.update(key, value, 0)
            found.append(hf.attention_forward(torch.nn.Module(), q, *rows, None)[0])
            twin.reset()
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        for call, out in zip(seen, found, strict=True):
            assert call.layer == 0 and call.query is q and call.new[0] is key and call.seconds > 0
            assert np.array_equal(call.out, out.numpy())
        both = [np.concatenate([x[0], y[0].transpose(0, 1).numpy()]) for x, y in ((k, key), (v, value))]
        assert np.array_equal(found[0][0, 0].numpy(), za.reference.emulate(q[0, :, 0].numpy(), *both)[0])
        held.reset()
        held.append(lambda layer: (k[layer.index, :30], v[layer.index, :30]), torch.float32)
    with hf.ZincCache(config, 32, device=vulkan, page_size=16, max_batch=2) as held:
        two = torch.randn(2, 2, 4, 64)
        for layer in range(2):
            hf.attention_forward(torch.nn.Module(), torch.randn(2, 4, 4, 64), *held.update(two, two, layer), None)
        with pytest.raises(za.errors.ArgumentError, match="append: got a cache of 2 batch rows"):
            held.append(lambda layer: (k[0], v[0]), torch.float32)
