"""attn_implementation="zinc" and ZincCache in small random-weight models of real architectures.

Bits are compared where both sides get the same q, k, v: a model's matrix products may round differently when the
prompt is cut differently. Against transformers' eager attention, whose sums have another order, a model's greedy
tokens must agree while eager's best logit leads by more than MARGIN; the first smaller lead may go either way, and
what follows a different choice is another text.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="pip install 'zinc-attn[transformers]'")

from support import FULL  # noqa: E402
from tiny_models import UNTIED as BASE  # noqa: E402
from tiny_models import prompt  # noqa: E402

import zinc_attn as za  # noqa: E402
from zinc_attn import errors, reference  # noqa: E402
from zinc_attn.cache import rows  # noqa: E402
from zinc_attn.integrations import transformers as hf  # noqa: E402
from zinc_attn.integrations.transformers import attention as zinc_attention  # noqa: E402

STEPS = 64
MARGIN = 1e-4  # of logits of order 1, float32 through a few layers
ULP = 2.0**-23
NEW = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": None, "eos_token_id": None}
ONE = pytest.mark.parametrize("device", ["vulkan"], indirect=True)  # a dispatcher makes no difference beyond device/
UNCACHED = pytest.mark.filterwarnings("ignore:attention 'zinc' runs without a ZincCache")

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
WINDOWS = {"num_hidden_layers": 3, "sliding_window": 24}
ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention"]
PER_LAYER_INPUT = {"vocab_size_per_layer_input": 199, "hidden_size_per_layer_input": 0}
ABSENT = object()  # takes a key of BASE out of a config
NO_SHARING = {**PER_LAYER_INPUT, "num_kv_shared_layers": 0}
DENSE_FIRST = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
LATENT_MOE = {**LATENT, **DENSE_FIRST, "n_group": 1, "topk_group": 1, "head_dim": ABSENT}
# model class, its config beyond BASE
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 128}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", MOE),
    "qwen3_next": ("Qwen3NextForCausalLM", {**HYBRID, **MOE, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("Qwen3_5ForCausalLM", HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {**HYBRID, **MOE, "shared_expert_intermediate_size": 32}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {**WINDOWS, "layer_types": ALTERNATE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **WINDOWS,
            "layer_types": ALTERNATE,
            "head_dim": 256,
            "query_pre_attn_scalar": 100,
            "attn_logit_softcapping": 3.0,
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", {**WINDOWS, "layer_types": ALTERNATE, "head_dim": 256}),
    "gemma4": (  # layers of two shapes
        "Gemma4ForCausalLM",
        {**WINDOWS, "layer_types": [*ALTERNATE[:2], "full_attention"], "global_head_dim": 128, **NO_SHARING},
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {**LATENT_MOE, "q_lora_rank": None, "first_k_dense_replace": 1, "qk_nope_head_dim": 40, "qk_rope_head_dim": 16}
        | {"v_head_dim": 36},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**LATENT_MOE, "first_k_dense_replace": 1}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {**LATENT_MOE, "qk_nope_head_dim": 192, "v_head_dim": 256}),
    "mistral4": ("Mistral4ForCausalLM", {**LATENT_MOE, "qk_nope_head_dim": 64, "first_k_dense_replace": 1}),
    "mimo_v2": (  # K of 192 and V of 128, twice as many KV heads in layers with a window
        "MiMoV2FlashForCausalLM",
        {**WINDOWS, **DENSE_FIRST, "layer_types": ALTERNATE, "head_dim": 192, "v_head_dim": 128},
    ),
    "llama_40": ("LlamaForCausalLM", {"head_dim": 40}),
    "llama_72": ("LlamaForCausalLM", {"head_dim": 72}),
    "llama_100": ("LlamaForCausalLM", {"head_dim": 100}),
    "llama_mqa": ("LlamaForCausalLM", {"num_attention_heads": 32, "num_key_value_heads": 1}),
}
# of which one test is enough, since they attend as one of the others does
SIMILAR: dict[str, tuple[str, dict[str, Any]]] = {
    "youtu": ("YoutuForCausalLM", {**LATENT, "head_dim": ABSENT}),
    "minicpm3": ("MiniCPM3ForCausalLM", {**LATENT, "head_dim": ABSENT}),
    "axk1": ("AXK1ForCausalLM", LATENT_MOE),
    "longcat_flash": (  # two attentions in each of num_layers layers
        "LongcatFlashForCausalLM",
        {**LATENT_MOE, "num_hidden_layers": ABSENT, "num_layers": 1, "moe_topk": 2, "ffn_hidden_size": 64}
        | {"expert_ffn_hidden_size": 32, "zero_expert_num": 1},
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        {**LATENT_MOE, "layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 16}
        | {"num_experts": 4},
    ),
}
ARCHITECTURES = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    hf.register()
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@cache
def loaded(name: str, dtype: Any = torch.float32) -> Any:
    kind, changes = {**MODELS, **SIMILAR}[name]
    given = {key: value for key, value in {**BASE, **changes}.items() if value is not ABSENT}
    made = getattr(transformers, kind)
    if any(key.startswith(("num_experts", "num_local_experts")) for key in given):
        given["experts_implementation"] = "eager"
    torch.manual_seed(11)
    model = made(made.config_class(**given)).eval()
    for layer in model.model.layers:
        if getattr(attn := getattr(layer, "self_attn", None), "sinks", None) is not None:
            torch.nn.init.normal_(attn.sinks, std=2.0)
    return model.to(dtype)


def model_of(name: str, attn: str = "zinc", dtype: Any = torch.float32) -> Any:
    model = loaded(name, dtype)
    model.set_attn_implementation(attn)
    return model


def cache_of(model: Any, device: za.Device, **options: Any) -> hf.ZincCache:
    return hf.ZincCache(model.config, options.pop("capacity", 256), device=device, page_size=64, **options)


def generate(model: Any, ids: Any, **options: Any) -> Any:
    """Tokens (batch, new) and logits (batch, new, vocab)."""
    got = model.generate(ids, return_dict_in_generate=True, output_logits=True, **{**NEW, **options})
    return got.sequences[:, ids.shape[1] :], torch.stack(got.logits, dim=1)


def agree(want: Any, got: Any, label: str = "") -> int:
    """Steps that agree before a legitimate tie: all of them, nearly always."""
    (tokens, logits), (others, _) = want, got
    assert tokens.shape == others.shape
    steps = 0
    for row in range(len(tokens)):
        for step in range(tokens.shape[1]):
            if tokens[row, step] != others[row, step]:
                first, second = logits[row, step].topk(2).values.tolist()
                assert first - second <= MARGIN, f"{label} row {row} step {step}: margin {first - second:g}"
                break
            steps += 1
    return steps


def bits(x: Any) -> Any:
    return x.contiguous().view(torch.int32)


# --- architectures -----------------------------------------------------------------------------------------


@UNCACHED
@ONE
@ARCHITECTURES
def test_tokens_are_eager_attentions(name: str, device: za.Device) -> None:
    """Beyond the window, where there is one; with the cache, and with transformers' own DynamicCache."""
    ids = prompt(40)
    want = generate(model_of(name, "eager"), ids)
    assert len(want[0].unique()) > 4, "a text that repeats itself tests little"
    model = model_of(name)
    with cache_of(model, device) as cache:
        assert agree(want, generate(model, ids, past_key_values=cache), name) >= STEPS // 2
        assert cache.get_seq_length() == ids.shape[1] + STEPS - 1
        assert {len(one) for row in cache.sequences for one in row} == {cache.get_seq_length()}
    few = {"max_new_tokens": 4}
    assert agree(generate(model_of(name, "eager"), ids, **few), generate(model_of(name), ids, **few), name) >= 2


@ONE
def test_decoding_without_a_cache_of_ours_warns_once(device: za.Device) -> None:
    zinc_attention._warn_once.cache_clear()
    model, ids = model_of("llama"), prompt(10)
    with cache_of(model, device) as cache:
        generate(model, ids, past_key_values=cache, max_new_tokens=2)
    generate(model, ids, max_new_tokens=1)  # no step after the prompt, whose keys are uploaded once in any case
    with pytest.warns(UserWarning) as caught:
        generate(model, ids, max_new_tokens=4)
    (warning,) = caught
    assert str(warning.message) == (
        "attention 'zinc' runs without a ZincCache, so every step uploads all keys and values again: on lavapipe, a "
        "decode step with 64 to 32,768 keys took up to 8 times as long as with one; pass "
        "past_key_values=ZincCache(model.config, max_cache_len)"
    )


@ONE
@ARCHITECTURES
def test_layers_are_eager_attentions(name: str, device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's output against the model's own eager function, on the same q, k, v.

    A score's error is at most a few ulps of the sum of its |q * k|, which is the relative error of a weight.
    """
    model = model_of(name)
    seen: dict[int, list[Any]] = {}
    worst = []  # error / bound

    def both(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        layer = module.layer_idx
        new = key.layer.pending or (key.plain(), value.plain())  # a model with latent attention has expanded them
        seen[layer] = [new] if layer not in seen else [*seen[layer], new]
        k, v = (torch.cat([pair[i] for pair in seen[layer]], dim=2) for i in (0, 1))
        at = torch.arange(k.shape[2])
        rows_at = at[-query.shape[2] :, None]
        window = kwargs.get("sliding_window") or 10**6
        bias = torch.zeros(1, 1, len(rows_at), len(at))
        bias.masked_fill_((at > rows_at) | (at <= rows_at - window), -torch.inf)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        want = eager(module, query, k, v, bias, **kwargs)[0]
        out = hf.attention_forward(module, query, key, value, mask, **kwargs)
        assert out[0].shape == want.shape and out[0].dtype == query.dtype
        scores = query.abs() @ k.abs().repeat_interleave(query.shape[1] // k.shape[1], 1).transpose(2, 3)
        bound = ULP * (4 + scores.max() * kwargs["scaling"]) * v.abs().max()
        worst.append(((out[0] - want).abs().max() / bound).item())
        return out

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "zinc", both)
    ids = prompt(48)
    with cache_of(model, device) as cache:
        for begin, end in ((0, 40), (40, 41), (41, 48)):
            model(ids[:, begin:end], past_key_values=cache)
    assert len(worst) == 3 * len(seen) > 0
    assert max(worst) < 1


@ONE
@pytest.mark.parametrize("name", MODELS if FULL else ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mimo_v2"])
def test_logits_have_the_same_bits_at_every_layout(name: str, device: za.Device) -> None:
    ids = prompt(90)
    found = []
    for layout in ({"num_splits": 1}, {"num_splits": 8}, {}):
        model = model_of(name)
        with cache_of(model, device, **layout) as cache:
            found.append(generate(model, ids, past_key_values=cache, max_new_tokens=8)[1])
    assert torch.equal(bits(found[0]), bits(found[1]))
    assert torch.equal(bits(found[0]), bits(found[2]))


SHAPES = {
    "deepseek_v2": ["4/4/56/36"] * 2,
    "deepseek_v3": ["4/4/192/128"] * 2,
    "glm4_moe_lite": ["4/4/256"] * 2,
    "mistral4": ["4/4/128"] * 2,
    "mimo_v2": ["4/4/192/128", "4/2/192/128", "4/4/192/128"],
    "llama_mqa": ["32/1/64"] * 2,
}


@ONE
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_come_from_the_config(name: str, device: za.Device) -> None:
    with cache_of(loaded(name), device) as cache:
        assert [str(layer.shape) for layer in cache.layers] == SHAPES[name]
        assert len(cache._groups) == len(set(SHAPES[name]))


@UNCACHED
@ONE
@pytest.mark.parametrize("name", [*SHAPES, "llama_40", "llama_72", "llama_100", *SIMILAR])
def test_logits_are_eager_attentions_in_chunks(name: str, device: za.Device) -> None:
    """A prompt in chunks, then single tokens, and the whole prompt without a cache of ours."""
    ids, model = prompt(75), model_of(name, "eager")
    want = model(ids).logits
    model = model_of(name)
    with cache_of(model, device) as cache:
        edges = (0, 30, 37, 70, 71, 72, 75)
        parts = [model(ids[:, at:end], past_key_values=cache).logits for at, end in pairwise(edges)]
    for got in (torch.cat(parts, dim=1), model(ids).logits):
        assert (got - want).abs().max() <= MARGIN


@ONE
def test_compressed_rows_may_only_be_expanded(device: za.Device) -> None:
    """Token by token, into the shapes of the config; rows of an earlier update are refused as others are."""
    model, ids = model_of("deepseek_v3"), prompt(9)
    with cache_of(model, device) as cache:
        layer, attn = cache.layers[0], model.model.layers[0].self_attn
        small = torch.randn(1, 1, 9, 32), torch.randn(1, 1, 9, 64)
        kv, rotated = cache.update(*small, 0)
        assert isinstance(kv, hf.CompressedRows) and kv.layer is layer and layer.pending is None
        for compute in (
            lambda: kv + 1,
            lambda: kv.mean(dim=2),
            lambda: torch.softmax(kv, -1),
            lambda: kv.float().sum(),
        ):
            with pytest.raises(errors.UnsupportedError, match=r"was called on the rows that update\(\) returned"):
                compute()
        q = torch.ones(1, 4, 9, 192)
        with pytest.raises(
            errors.ShapeError, match=r"key of layer 0: got shape \(1, 1, 9, 32\), expected \(batch, 4, "
        ):
            attend(q, kv, rotated)
        k, v = attn.expand_kv(kv, rotated)
        with pytest.raises(
            errors.ShapeError, match=r"value of layer 0: got .*192\), expected \(1, 4, 9, 128\), key's wi"
        ):
            attend(q, k, k)
        want = attend(q, *attn.expand_kv(*small))
        assert torch.equal(bits(attend(q, k, v)), bits(want))
        cache.crop(0)
        with pytest.raises(za.StepError, match=r"got rows of an earlier update\(\)"):
            attend(q, k, v)
        k, v = cache.update(k.plain(), v.plain(), 0)  # releases of transformers that expand before the cache
        assert torch.equal(bits(attend(q, k, v)), bits(want))
        cache.reset()
        model.set_attn_implementation("eager")
        with pytest.raises(errors.UnsupportedError, match="matmul was called"):
            model(ids, past_key_values=cache)


@ONE
def test_layers_that_share_keys_and_values(device: za.Device) -> None:
    """The last layers attend the rows of earlier ones, which are appended once."""
    config = transformers.Gemma3nTextConfig(
        **{
            **BASE,
            **WINDOWS,
            **PER_LAYER_INPUT,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "activation_sparsity_pattern": None,
        }
    )
    torch.manual_seed(1)
    model, ids = transformers.Gemma3nForCausalLM(config).eval(), prompt(40)
    model.set_attn_implementation("eager")
    want = generate(model, ids, max_new_tokens=16)
    model.set_attn_implementation("zinc")
    with cache_of(model, device) as cache:
        assert agree(want, generate(model, ids, past_key_values=cache, max_new_tokens=16)) >= 8
        assert cache.caches[0].num_layers == 2


def test_both_dispatchers_give_the_same_logits(device: za.Device) -> None:
    model, ids = model_of("llama"), prompt(40)
    with cache_of(model, device) as cache:
        got = generate(model, ids, past_key_values=cache, max_new_tokens=4)
    assert agree(generate(model_of("llama", "eager"), ids, max_new_tokens=4), got) == 4


def attend(q: Any, k: Any, v: Any, mask: Any = None, **kwargs: Any) -> Any:
    """The attention function's output for a module that says nothing of itself."""
    return hf.attention_forward(torch.nn.Module(), q, k, v, mask, **kwargs)[0]


# --- bits, on given q, k, v --------------------------------------------------------------------------------


class Layer:
    """What a model's attention modules do with a cache, on inputs of one's own: (layers, batch, heads, n, dim)."""

    def __init__(self, device: za.Device, tokens: int, batch: int = 1, **options: Any) -> None:
        self.dtype = options.pop("torch_dtype", torch.float32)
        self.config = transformers.LlamaConfig(**BASE)
        self.cache = hf.ZincCache(self.config, 256, device=device, page_size=64, max_batch=batch, **options)
        rng = torch.Generator().manual_seed(5)
        q, kv = (2, batch, 4, tokens, 64), (2, batch, 2, tokens, 64)
        self.q, self.k, self.v = (torch.randn(s, generator=rng).to(self.dtype) for s in (q, kv, kv))

    def step(self, begin: int, end: int, mask: Any = None, batch: slice = slice(None), **kwargs: Any) -> Any:
        """Rows [begin, end) through both layers: (layers, batch, n, q_heads, head_dim)."""
        outs = []
        if mask is not None:
            mask = self.mask(mask, end - begin, kwargs.get("sliding_window"))
        for layer in range(2):
            q, k, v = (x[layer, batch, :, begin:end] for x in (self.q, self.k, self.v))
            k, v = self.cache.update(k, v, layer)
            outs.append(attend(q, k, v, mask, **kwargs))
        return torch.stack(outs)

    @staticmethod
    def mask(tokens: Any, n: int, window: int | None) -> Any:
        """What a model makes of a 2-D mask (batch, columns)."""
        m = transformers.masking_utils
        pattern = m.sliding_window_causal_mask_function(window) if window else m.causal_mask_function
        columns = tokens.shape[1]
        return hf.attention_mask(len(tokens), n, columns, columns - n, mask_function=pattern, attention_mask=tokens)


@ONE
@pytest.mark.parametrize("kwargs", [{}, {"sliding_window": 20, "softcap": 4.0, "s_aux": torch.arange(4.0)}])
def test_chunks_of_the_prompt_never_show(device: za.Device, kwargs: Any) -> None:
    tokens, found = 100, []
    for chunk in (1, 7, 64, tokens):
        layer = Layer(device, tokens)
        with layer.cache:
            parts = [layer.step(at, min(at + chunk, tokens), **kwargs) for at in range(0, tokens, chunk)]
        found.append(torch.cat(parts, dim=2))
    assert all(torch.equal(bits(found[0]), bits(one)) for one in found[1:])


@ONE
@pytest.mark.parametrize(
    ("torch_dtype", "dtype", "stored"),
    [
        (torch.float32, None, "f32"),
        (torch.float16, None, "f16"),
        (torch.bfloat16, None, "bf16"),
        (torch.bfloat16, "q8_0", "q8_0"),
        (torch.float32, "f16", "f16"),
        (torch.float32, "bf16", "bf16"),
        (torch.bfloat16, "f16", "f16"),
    ],
)
def test_outputs_are_the_oracles_in_the_querys_dtype(
    device: za.Device, torch_dtype: Any, dtype: str | None, stored: str
) -> None:
    layer = Layer(device, 40, torch_dtype=torch_dtype, dtype=dtype)
    with layer.cache:
        got = torch.cat([layer.step(0, 39), layer.step(39, 40)], dim=2)
        assert layer.cache.caches[0].dtype == stored
    assert got.dtype == torch_dtype
    narrow = {"f16": torch.float16, "bf16": torch.bfloat16}.get(stored, torch.float32)
    for at in range(2):
        k, v = (x[at, 0].to(narrow).transpose(0, 1) for x in (layer.k, layer.v))
        k, v = (x.numpy() if stored == "f16" else x.float().numpy() for x in (k, v))
        q = layer.q[at, 0].transpose(0, 1).float().numpy()
        want, _ = reference.emulate(q, *rows.stored(k, v, stored))
        assert torch.equal(got[at, 0], torch.from_numpy(want).to(torch_dtype))


def whole(layer: Layer, mask: Any = None, **kwargs: Any) -> Any:
    """All rows without a cache of ours: keys and values as they are."""
    outs = []
    for at in range(2):
        outs.append(attend(layer.q[at], layer.k[at], layer.v[at], mask, **kwargs))
    return torch.stack(outs)


@ONE
def test_padding_in_front_never_shows(device: za.Device) -> None:
    """Rows of a left-padded batch have the bits that they have alone; padding rows are 0."""
    tokens, pads = 60, (0, 13, 41)
    batch = Layer(device, tokens, batch=3)
    mask = torch.ones(3, tokens, dtype=torch.long)
    for i, pad in enumerate(pads):
        mask[i, :pad] = 0
    with batch.cache:
        steps = ((0, 30), (30, 55), (55, 56), (56, 60))
        got = torch.cat([batch.step(begin, end, mask[:, :end]) for begin, end in steps], dim=2)
        assert [len(one) for one in batch.cache.sequences[0]] == [tokens - pad for pad in pads]
        assert batch.cache.get_seq_length() == tokens and batch.cache.get_mask_sizes(3, 0) == (tokens + 3, 0)
    assert torch.equal(bits(got), bits(whole(batch, mask)))
    for i, pad in enumerate(pads):
        alone = Layer(device, tokens, batch=3)
        alone.cache = hf.ZincCache(alone.config, 64, device=device)
        with alone.cache:
            want = alone.step(pad, tokens, batch=slice(i, i + 1))[:, 0]
        assert torch.equal(bits(got[:, i, pad:]), bits(want))
        assert not got[:, i, :pad].any()


@ONE
def test_padded_rows_are_cropped_and_reordered(device: za.Device) -> None:
    """Also into the padding."""
    layer = Layer(device, 60, batch=3)
    mask = torch.ones(3, 60)
    for i, pad in enumerate((0, 13, 41)):
        mask[i, :pad] = 0
    order = [2, 0, 2]
    with layer.cache as cache:
        layer.step(0, 50, mask[:, :50])
        cache.crop(-20)
        assert [len(one) for one in cache.sequences[0]] == [30, 17, 0]
        want = whole(layer, mask)
        assert torch.equal(bits(layer.step(30, 45, mask[:, :45])), bits(want[:, :, 30:45]))
        cache.reorder_cache(torch.tensor(order))
        layer.q, layer.k, layer.v, mask = (*(x[:, order] for x in (layer.q, layer.k, layer.v)), mask[order])
        assert torch.equal(bits(layer.step(45, 60, mask)), bits(want[:, order, 45:]))
        cache.crop(-60)
        assert torch.equal(bits(layer.step(0, 60)), bits(whole(layer)))


@ONE
def test_crop_reset_reorder_and_fork_give_the_bits_of_the_tokens_that_are_left(device: za.Device) -> None:
    layer = Layer(device, 80, batch=4)
    cache = layer.cache
    want = whole(layer)
    with cache:
        assert torch.equal(bits(layer.step(0, 50)), bits(want[:, :, :50]))
        cache.crop(-20)
        assert cache.get_seq_length() == 30
        assert torch.equal(bits(layer.step(30, 60)), bits(want[:, :, 30:60]))
        cache.crop(0)
        # rows 1, 1, 3, 0: then what each of them was goes on
        cache.reorder_cache(torch.tensor([1, 1, 3, 0]))
        picked = [1, 1, 3, 0]
        layer.q, layer.k, layer.v = (x[:, picked] for x in (layer.q, layer.k, layer.v))
        twin = copy.deepcopy(cache)
        assert torch.equal(bits(layer.step(60, 70)), bits(want[:, picked, 60:70]))
        layer.cache = twin
        assert twin.get_seq_length() == 60
        assert torch.equal(bits(layer.step(60, 80)), bits(want[:, picked, 60:80]))
        twin.reset()
        layer.cache = cache
        cache.batch_select_indices([2])
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 2
        again = [2, 2]
        layer.q, layer.k, layer.v = (x[:, again] for x in (layer.q, layer.k, layer.v))
        assert torch.equal(bits(layer.step(70, 80)), bits(want[:, [3, 3], 70:80]))
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.batch_size == -1
        pages = cache.caches[0].pool
        assert pages.free_pages == pages.num_pages
        assert torch.equal(bits(layer.step(0, 80)), bits(want[:, [3, 3]]))


# --- generation --------------------------------------------------------------------------------------------


@ONE
def test_options_of_a_layer_are_those_of_its_call(device: za.Device) -> None:
    """Each layer has its own; a call with others is as good, and one that is refused changes nothing."""
    layer = Layer(device, 40)
    first: dict[str, Any] = {"s_aux": torch.ones(4), "sliding_window": 9}
    other: dict[str, Any] = {"s_aux": torch.arange(4.0), "scaling": 0.5}
    with layer.cache as cache:
        layer.step(0, 20, **first)
        used = [calls.attention for calls in cache._groups[cache.layers[0].shape].calls.values()]
        layer.step(20, 30, **first)
        assert used == [calls.attention for calls in cache._groups[cache.layers[0].shape].calls.values()]
        with pytest.raises(errors.ShapeError, match="sinks"):
            layer.step(30, 31, s_aux=torch.ones(3))
        assert torch.equal(bits(layer.step(30, 35, **first)), bits(whole(layer, **first)[:, :, 30:35]))
        assert torch.equal(bits(layer.step(35, 38, **other)), bits(whole(layer, **other)[:, :, 35:38]))
        other["s_aux"] += 1  # as when weights are loaded
        assert torch.equal(bits(layer.step(38, 40, **other)), bits(whole(layer, **other)[:, :, 38:]))


def padded(lengths: tuple[int, ...]) -> dict[str, Any]:
    n = max(lengths)
    ids, mask = prompt(n, len(lengths)), torch.ones(len(lengths), n, dtype=torch.long)
    for i, length in enumerate(lengths):
        ids[i, : n - length], mask[i, : n - length] = 0, 0
    return {"ids": ids, "attention_mask": mask}


@UNCACHED
@ONE
@pytest.mark.parametrize(
    "name",
    ["llama", "qwen3_5", "gpt_oss", "gemma3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "mimo_v2"],
)
def test_left_padded_batches(name: str, device: za.Device) -> None:
    batch = padded((40, 28, 9))
    want = generate(model_of(name, "eager"), **batch, max_new_tokens=16)
    model = model_of(name)
    with cache_of(model, device, max_batch=3) as cache:
        assert agree(want, generate(model, **batch, past_key_values=cache, max_new_tokens=16), name) >= 24
    got = generate(model, **batch, max_new_tokens=2)
    assert agree((want[0][:, :2], want[1]), got, name) >= 3


@ONE
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_5", "deepseek_v2", "mimo_v2"])
def test_beam_search(name: str, device: za.Device) -> None:
    options = {**padded((30, 11)), "num_beams": 3, "max_new_tokens": 12}
    want = generate(model_of(name, "eager"), **options)[0]
    model = model_of(name)
    with cache_of(model, device, max_batch=6) as cache:
        assert torch.equal(generate(model, past_key_values=cache, **options)[0], want)


@UNCACHED
@ONE
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_assisted_generation_gives_the_same_tokens(name: str, device: za.Device) -> None:
    """By prompt lookup: drafts of several rows, of which the cache drops those that were wrong."""
    ids = prompt(12).repeat(1, 4)
    model = model_of(name)
    with cache_of(model, device) as cache:
        want = generate(model, ids, past_key_values=cache)
        cache.reset()
        got = generate(model, ids, past_key_values=cache, prompt_lookup_num_tokens=4)
        assert agree(want, got) >= STEPS // 2
        # and with a draft model, here the model itself
        cache.reset()
        got = generate(model, ids, past_key_values=cache, assistant_model=copy.deepcopy(model), max_new_tokens=16)
        assert agree((want[0][:, :16], want[1]), got) >= 8


@ONE
def test_a_conversation_goes_on_in_the_same_cache(device: za.Device) -> None:
    """The next turn runs only the tokens that the cache does not have."""
    model, ids = model_of("qwen3"), prompt(20)
    with cache_of(model, device) as cache:
        first = model.generate(ids, past_key_values=cache, **{**NEW, "max_new_tokens": 8})
        longer = torch.cat([first, prompt(5, seed=4)], dim=1)
        got = generate(model, longer, past_key_values=cache, max_new_tokens=8)
    assert agree(generate(model_of("qwen3", "eager"), longer, max_new_tokens=8), got) == 8


@ONE
def test_a_prepared_cache_records_nothing_while_it_decodes(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("gpt_oss"), prompt(20, batch=2)
    with cache_of(model, device, max_batch=2) as cache:
        with pytest.raises(za.StepError, match=r"^prepare: got a cache without tokens"):
            cache.prepare()
        model(ids, past_key_values=cache)
        cache.prepare()
        monkeypatch.setattr(device.runtime, "record", lambda *args: pytest.fail("recorded in a step"))
        for step in range(60):  # over the end of a leaf
            logits = model(prompt(1, batch=2, seed=step), past_key_values=cache).logits
        assert torch.isfinite(logits).all() and cache.get_seq_length() == 80


@ONE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3", *["gemma2", "mimo_v2"] * FULL])
def test_half_precision_models(name: str, dtype: Any, device: za.Device) -> None:
    model, ids = model_of(name, dtype=dtype), prompt(40)
    with cache_of(model, device) as cache:
        got = model(ids, past_key_values=cache).logits
        assert got.dtype == dtype and bool(got.isfinite().all())
        assert cache.caches[0].dtype == {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    want = model_of(name)(ids).logits
    assert (got - want).norm() < 0.1 * want.norm()


# --- refusals ----------------------------------------------------------------------------------------------


def qkv(q_len: int = 3, keys: int = 3, head_dim: int = 64, dtype: Any = torch.float32) -> tuple[Any, Any, Any]:
    return (
        torch.ones(1, 4, q_len, head_dim, dtype=dtype),
        torch.ones(1, 2, keys, head_dim, dtype=dtype),
        torch.ones(1, 2, keys, head_dim, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"dropout": 0.1}, r"got dropout = 0\.1, expected 0"),
        ({"is_causal": False}, "got is_causal = False"),
        ({"position_bias": torch.ones(1)}, "got position_bias, which"),
        ({"head_mask": torch.ones(4)}, "got head_mask, which"),
        ({"output_attentions": True}, "got output_attentions, which"),
        ({"cu_seq_lens_q": torch.ones(2)}, "got cu_seq_lens_q, which"),
        ({"query": torch.ones(1, 4, 3, 64, requires_grad=True)}, "require a gradient"),
    ],
)
def test_what_is_not_supported_is_named(kwargs: dict[str, Any], match: str) -> None:
    q, k, v = qkv()
    given = {"query": q, "key": k, "value": v, "attention_mask": None, **kwargs}
    with torch.enable_grad(), pytest.raises(errors.UnsupportedError, match=match):
        hf.attention_forward(torch.nn.Module(), **given)


def test_without_the_packages_the_import_says_so() -> None:
    code = "import sys; sys.modules['transformers'] = None; import zinc_attn.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "RuntimeUnavailableError" in done.stderr and "pip install torch 'zinc-attn[transformers]'" in done.stderr
    code = "import sys, zinc_attn; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_harmless_arguments_pass(device: za.Device) -> None:
    attend(*qkv(), position_ids=torch.arange(3), use_cache=True, head_mask=None)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: attend(*qkv(head_dim=577)), errors.ArgumentError, "head_dim: got 577, expected an int from 1 to 576"),
        (
            lambda: attend(*qkv()[:2], torch.ones(1, 2, 2, 64)),
            errors.ShapeError,
            r"value: got shape \(1, 2, 2, 64\), expected \(1, 2, 3\) as key's first axes, and any v_head_dim",
        ),
        (lambda: attend(*qkv(dtype=torch.float64)), errors.DTypeError, "float64"),
        (lambda: attend(*qkv(5, 3)), errors.ShapeError, "3 tokens for 5 query"),
        (
            lambda: hf.ZincCache(transformers.LlamaConfig(**{**BASE, "head_dim": 640}), 64),
            errors.ArgumentError,
            "head_dim: got 640, expected an int from 1 to 576",
        ),
        (
            lambda: hf.ZincCache(transformers.LlamaConfig(**BASE), 64, dtype="int4"),
            errors.ArgumentError,
            "dtype: got 'int4'",
        ),
        (lambda: hf.ZincCache(transformers.LlamaConfig(**BASE), 0), errors.ArgumentError, "max_cache_len: got 0"),
        (lambda: hf.ZincCache(transformers.LlamaConfig(**BASE)), errors.ArgumentError, "max_cache_len: got none"),
        (
            lambda: hf.ZincCache(transformers.LlamaConfig(**BASE), 9, capacity=9),
            errors.ArgumentError,
            "max_cache_len: got both it and capacity",
        ),
        (
            lambda: hf.ZincCache(transformers.LlamaConfig(**BASE), 64, page_size=24),
            errors.ArgumentError,
            "page_size: got 24",
        ),
        (
            lambda: hf.ZincCache(transformers.LlamaConfig(**BASE), 64, dtype="q8_0/q9"),
            errors.ArgumentError,
            "dtype: got 'q8_0/q9'",
        ),
        (
            lambda: hf.ZincCache(transformers.LlamaConfig(**BASE), 64, num_splits=0),
            errors.ArgumentError,
            "num_splits: got 0",
        ),
        (lambda: hf.ZincCache("llama", 64), errors.ArgumentError, "config: got str"),
        (
            lambda: hf.ZincCache(
                transformers.Llama4TextConfig(num_hidden_layers=2, layer_types=["chunked_attention"] * 2), 64
            ),
            errors.UnsupportedError,
            "layer 0 is of type 'chunked_attention'",
        ),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_patterns_that_are_causal_are_found() -> None:
    m = transformers.masking_utils
    window, causal = m.sliding_window_causal_mask_function(3), m.causal_mask_function
    for pattern, want in ((causal, None), (window, 3), (m.and_masks(causal, window), 3), (m.or_masks(causal), None)):
        mask = hf.attention_mask(2, 4, 9, 5, mask_function=pattern)
        assert tuple(mask.shape) == (2, 9) and mask.zinc.window == want
    with pytest.raises(errors.ShapeError, match=r"got shape \(1, 4\), expected \(1, 9\)"):
        hf.attention_mask(1, 4, 9, 5, attention_mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(errors.UnsupportedError, match="not a static one"):
        hf.attention_mask(1, 4, 64, 0)


@ONE
def test_a_window_that_only_the_mask_has_is_refused(device: za.Device) -> None:
    mask = hf.attention_mask(1, 5, 5, mask_function=transformers.masking_utils.sliding_window_causal_mask_function(2))
    with pytest.raises(errors.UnsupportedError, match="got None for a layer whose mask has a window of 2"):
        attend(*qkv(5, 5), mask)


@ONE
def test_rows_of_the_cache_reach_no_other_attention(device: za.Device) -> None:
    model, ids = model_of("llama", "eager"), prompt(9)
    with cache_of(model, device) as cache:
        with pytest.raises(errors.UnsupportedError, match="was called on the rows that update"):
            model(ids, past_key_values=cache)
        layer = cache.layers[0]
        k, v = cache.update(torch.ones(1, 2, 9, 64), torch.ones(1, 2, 9, 64), 0)
        with pytest.raises(errors.UnsupportedError, match="ZincCache: to was called"):
            k.to(torch.float16)
        with pytest.raises(errors.UnsupportedError, match="ZincCache: matmul was called"):
            torch.matmul(torch.ones(1, 4, 9, 64), k)
        assert k.to("cpu").layer is layer and v.contiguous().shape == v.shape
        for replace in (
            lambda: cache.update(torch.ones(1, 2, 9, 64), torch.ones(1, 2, 9, 64), 0),
            lambda: cache.crop(0),
        ):
            k, v = cache.update(torch.ones(1, 2, 9, 64), torch.ones(1, 2, 9, 64), 0)
            replace()
            with pytest.raises(za.StepError, match=r"got rows of an earlier update\(\)"):
                attend(torch.ones(1, 4, 9, 64), k, v)
        model.set_attn_implementation("zinc")
        model(ids, past_key_values=cache)  # nothing was appended before
        assert cache.sequences[0][0].lengths == (9, 9)


@ONE
def test_batches_and_masks_that_do_not_fit(device: za.Device) -> None:
    layer = Layer(device, 40, batch=2)
    with layer.cache as cache:
        mask = torch.ones(2, 10)
        mask[1, :4] = 0
        layer.step(0, 10, mask)
        with pytest.raises(errors.UnsupportedError, match="got another padding for tokens that the cache has seen"):
            layer.step(10, 11)
        gap = torch.cat([mask, torch.zeros(2, 1), torch.ones(2, 2)], dim=1)
        with pytest.raises(errors.UnsupportedError, match="row 0 has padding between its tokens"):
            layer.step(10, 13, gap, sliding_window=8)
        layer.step(10, 13, gap)
        assert [len(one) for one in cache.sequences[0]] == [12, 8]
        with pytest.raises(errors.ShapeError, match="got 1 rows, expected the 2"):
            layer.step(13, 14, batch=slice(0, 1))
        with pytest.raises(errors.ArgumentError, match="beam_idx: got 2"):
            cache.reorder_cache(torch.tensor([0, 2]))
        with pytest.raises(errors.ArgumentError, match="got 4 rows, expected 1 to max_batch = 2"):
            cache.batch_repeat_interleave(2)
        with pytest.raises(errors.UnsupportedError, match=r"call ZincCache\.crop"):
            cache.layers[0].crop(-1)
        for wrong in (1, -14):
            with pytest.raises(errors.ArgumentError, match="tokens_to_remove: got"):
                cache.crop(wrong)
    with pytest.raises(errors.ClosedError, match="ZincCache: used after close"):
        layer.step(13, 14)
    wide = Layer(device, 4, batch=2)
    wide.cache.max_batch = 1
    with pytest.raises(errors.ArgumentError, match=r"got 2 rows .* at most max_batch = 1"):
        wide.step(0, 4)


@ONE
def test_capacity_is_what_was_asked_for(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a batch row, whatever the pages and the KVCaches behind it hold."""
    layer = Layer(device, 60, batch=2)
    layer.cache = cache = hf.ZincCache(layer.config, capacity=50, device=device, page_size=32, max_batch=2)
    assert repr(cache) == "ZincCache(0 of 50 tokens, 0 of 2 batch rows, 2 layers)"
    mask = torch.ones(2, 50, dtype=torch.int64)
    mask[1, :20] = 0
    with cache:
        layer.step(0, 50, mask)
        assert cache.capacity == cache.layers[0].get_max_length() == 50 < cache.caches[0].capacity
        with pytest.raises(za.CapacityError, match=r"^ZincCache: got 1 new tokens for a batch row of 50, expected at "):
            layer.step(50, 51, torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], dim=1))
        cache.reset()
        mask[0, :5] = 0  # columns of padding are no tokens
        layer.step(0, 50, mask)
        layer.step(50, 55, torch.cat([mask, torch.ones(2, 5, dtype=torch.int64)], dim=1))
        cache.reset()
        layer.step(0, 50)
        twin = cache.fork()
        twin.crop(-50)
        layer.cache = twin
        with pytest.raises(za.CapacityError) as caught:
            layer.step(0, 40)
        assert str(caught.value) == (
            "ZincCache: this cache and its forks have memory for max_batch = 2 rows of max_cache_len = 50 tokens "
            "together, which is full; reset() forks, or make the ZincCache with a larger max_batch"
        )
        cache.reset()
        layer.step(0, 40)
    asked = "^max_cache_len, max_batch: got 5,000,000 tokens for each of {} batch rows, expected {}"
    with pytest.raises(errors.LimitError, match=asked.format(4, "at most 16,777,216 tokens together, in whole pages$")):
        hf.ZincCache(layer.config, 5_000_000, device=device, max_batch=4)
    for error in (errors.LimitError, errors.DeviceMemoryError):

        def refuses(*_: Any, kind: type[Exception] = error, **__: Any) -> Any:
            raise kind("injected")

        monkeypatch.setattr("zinc_attn.integrations.transformers.groups.KVCache", refuses)
        with pytest.raises(error, match=asked.format(1, "what the device has room for: injected$")):
            hf.ZincCache(layer.config, 5_000_000, device=device).allocate(torch.float16)


@ONE
def test_a_forward_that_stopped_is_cropped(device: za.Device) -> None:
    layer = Layer(device, 40)
    want = whole(layer)
    with layer.cache as cache:
        layer.step(0, 20)
        k, v = cache.update(layer.k[0, :, :, 20:30], layer.v[0, :, :, 20:30], 0)
        attend(layer.q[0, :, :, 20:30], k, v)
        with pytest.raises(za.StepError, match=r"a forward stopped between layers; crop\(0\)"):
            layer.step(20, 30)
        cache.crop(0)
        assert torch.equal(bits(layer.step(20, 40)), bits(want[:, :, 20:40]))
        beyond = (
            "ZincCache: got 217 new tokens for a batch row of 40, expected at most 216 (max_cache_len = 256 tokens per "
            "batch row); make the ZincCache with a larger max_cache_len, or crop() or reset() it"
        )
        with pytest.raises(za.CapacityError) as caught:
            cache.layers[0].pending = None
            big = torch.ones(1, 2, 217, 64)
            k, v = cache.update(big, big, 0)
            attend(torch.ones(1, 4, 217, 64), k, v)
        assert str(caught.value) == beyond
        assert cache.get_seq_length() == 40
        cache.crop(-40)
        cache.max_batch = 2
        two = Layer(device, 8, batch=2)
        two.cache = cache  # an empty cache takes any batch
        assert torch.equal(bits(two.step(0, 8)), bits(whole(two)))


class Broken(Exception):
    """Raised in a model's forward by a test."""


@contextmanager
def failing(module: Any, error: BaseException, *, behind: bool, after: int = 0) -> Iterator[None]:
    """``module`` raises ``error``, in front of its forward or behind it, once, when it ran ``after`` times."""
    calls = []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == after + 1:
            raise error

    handle = (module.register_forward_hook if behind else module.register_forward_pre_hook)(hook)
    try:
        yield
    finally:
        handle.remove()
    assert len(calls) > after, "the module never ran"


@ONE
@pytest.mark.parametrize("name", ("llama", "qwen3_5", "gemma4", "deepseek_v2"))
def test_a_forward_that_failed_anywhere_can_be_made_again(name: str, device: za.Device) -> None:
    """Every module of the model in turn, in front of it and behind it, in a decode step and in a prompt's chunk."""
    model, ids = model_of(name), prompt(230)
    ran: dict[str, Any] = {}

    def note(module: Any, *_: Any) -> None:
        ran.setdefault(where_is[module], module)

    where_is = {module: where for where, module in model.named_modules()}
    handles = [module.register_forward_pre_hook(note) for module in where_is]
    with cache_of(model, device) as cache:
        model(ids[:, :8], past_key_values=cache)
    for handle in handles:
        handle.remove()
    names = [where for where in ran if not re.search(r"layers\.[12]\.", where)]
    assert {"", "lm_head", "model.norm", "model.embed_tokens", "model.layers.0"} <= set(names), names
    with cache_of(model, device) as cache, cache_of(model, device) as undisturbed:
        at = 0
        for i, where in enumerate(names):
            for behind in (False, True):
                step = ids[:, at : at + (3 if i % 4 == 0 else 1)]
                want = model(step, past_key_values=undisturbed).logits
                error: BaseException = KeyboardInterrupt() if i % 2 else Broken(where)
                with failing(ran[where], error, behind=behind), pytest.raises(type(error)):
                    model(step, past_key_values=cache)
                assert cache.get_seq_length() == at, (where, behind)
                assert {n for row in cache.sequences for one in row for n in one.lengths} <= {at}
                assert torch.equal(bits(model(step, past_key_values=cache).logits), bits(want)), (where, behind)
                at += step.shape[1]


@ONE
@pytest.mark.parametrize("name", ("llama", "qwen3_5"))
def test_a_generate_that_failed_can_be_made_again(name: str, device: za.Device) -> None:
    """In the model, or behind it, in the first forward or a later one, in the first turn and the second; padded."""
    model, few = model_of(name), {"max_new_tokens": 5}

    def processor(after: int, error: BaseException) -> Any:
        def process(input_ids: Any, scores: Any) -> Any:
            calls.append(1)
            if len(calls) == after + 1:
                raise error
            return scores

        calls: list[int] = []
        return transformers.LogitsProcessorList([process])

    def turn(ids: Any, **options: Any) -> Any:
        return generate(model, ids, attention_mask=mask[:, : ids.shape[1]], **few, **options)

    ids = prompt(40, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with cache_of(model, device, max_batch=2) as cache, cache_of(model, device, max_batch=2) as undisturbed:
        for at in (9, 30):
            want = turn(ids[:, :at], past_key_values=undisturbed)
            begin = cache.get_seq_length()
            for after in (0, 3):
                for error in (Broken("behind the model"), KeyboardInterrupt()):
                    with pytest.raises(type(error)):
                        turn(ids[:, :at], past_key_values=cache, logits_processor=processor(after, error))
                    assert cache.get_seq_length() == begin
                for module in (model.lm_head, model.model.layers[-1].mlp, model.model.norm):
                    with failing(module, Broken(), behind=True, after=after), pytest.raises(Broken):
                        turn(ids[:, :at], past_key_values=cache)
                    assert cache.get_seq_length() == begin
            got = turn(ids[:, :at], past_key_values=cache)
            assert torch.equal(got[0], want[0]) and torch.equal(bits(got[1]), bits(want[1]))
            assert cache.get_seq_length() == undisturbed.get_seq_length()
            assert [len(one) for one in cache.sequences[0]] == [len(one) for one in undisturbed.sequences[0]]
            ids[:, at : at + 5] = want[0]


@ONE
def test_a_step_that_lost_tokens_from_before_it_says_so(device: za.Device) -> None:
    model, ids = model_of("llama"), prompt(12, batch=2)
    with cache_of(model, device, max_batch=2) as cache:
        want = model(ids, past_key_values=cache).logits
        for lose in (lambda: cache.crop(-2), lambda: cache.reorder_cache(torch.tensor([1, 0]))):
            with pytest.raises(Broken), cache.step():
                lose()
                raise Broken
            with pytest.raises(za.StepError, match=r"had cropped or reordered the 12 tokens .*; reset\(\) the cache"):
                model(ids[:, :1], past_key_values=cache)
            cache.reset()
            assert torch.equal(bits(model(ids, past_key_values=cache).logits), bits(want))
        beams = {"num_beams": 2, "max_new_tokens": 6}
        cache.reset()
        tokens = generate(model, ids[:1], past_key_values=cache, **beams)[0]
        cache.reset()
        with failing(model.lm_head, Broken(), behind=True, after=4), pytest.raises(Broken):
            generate(model, ids[:1], past_key_values=cache, **beams)
        assert cache.get_seq_length() == 0 and cache.batch_size == -1
        assert torch.equal(generate(model, ids[:1], past_key_values=cache, **beams)[0], tokens)


@ONE
def test_a_recurrent_state_is_not_rolled_back(device: za.Device) -> None:
    model, ids = model_of("qwen3_5"), prompt(12)
    with cache_of(model, device) as cache:
        want = model(ids, past_key_values=cache).logits
        twin = cache.fork()
        with pytest.raises(
            errors.UnsupportedError, match=r"got 12 tokens to be cut to 10 .* keeps no past; expected no cut"
        ):
            cache.crop(-2)
        assert cache.get_seq_length() == 12
        first = model(ids, past_key_values=cache).logits
        assert torch.equal(bits(model(ids, past_key_values=twin).logits), bits(first))
        cache.reset()
        assert torch.equal(bits(model(ids, past_key_values=cache).logits), bits(want))
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            generate(model, ids, past_key_values=cache, prompt_lookup_num_tokens=4)
