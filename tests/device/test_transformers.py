"""attn_implementation="zinc" and ZincCache in small random-weight models of real architectures.

Bits are compared where both sides get the same q, k, v: a model's matrix products may round differently when the
prompt is cut differently. Against transformers' eager attention, whose sums have another order, a model's greedy
tokens must agree while eager's best logit leads by more than MARGIN; the first smaller lead may go either way, and
what follows a different choice is another text.
"""

import copy
from typing import Any

import pytest
from support import FULL
from tiny_models import prompt
from zinc_models import (
    ALIBI,
    MODELS,
    SIMILAR,
    STEPS,
    attend,
    cache_of,
    equal,
    generate,
    hf,
    in_chunks,
    loaded,
    model_of,
    padded,
    torch,
    transformers,
)

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.integrations.transformers import adapters
from zinc_attn.integrations.transformers import attention as zinc_attention

NATIVE = True
MARGIN = 1e-4  # of logits of order 1, float32 through a few layers
ONE_DISPATCHER = True
pytestmark = [
    pytest.mark.usefixtures("models_may_attend"),
    pytest.mark.filterwarnings("ignore:attention 'zinc' runs without a ZincCache"),
]


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


# Recurrent layers of transformers' own round otherwise in other chunks.
RECURRENT = [name for name, (_, config) in MODELS.items() if {"linear_key_head_dim", "mamba_d_ssm"} & {*config}]
OTHERS = "llama gpt_oss gemma3 gemma4 deepseek_v2 deepseek_v3 glm4_moe_lite mistral4 mimo_v2 llama4"
SHARING = ["sharing gemma3n", "sharing gemma4"]  # the last layers attend the rows of earlier ones, appended once
WHOLE = [*MODELS] if FULL else [*RECURRENT, *OTHERS.split()]  # the logits of the rest are compared in chunks


@pytest.mark.parametrize("name", [*WHOLE, *SHARING, *ALIBI])
def test_texts_are_eager_attentions(name: str, device: za.Device) -> None:
    """Of a left-padded batch, beyond the window, where there is one; also with transformers' own DynamicCache."""
    batch, new = padded(40, 28, 9), 32
    want, model = generate(model_of(name, "eager"), **batch, max_new_tokens=new), model_of(name)
    assert len(want[0].unique()) > 8, "a text that repeats itself tests little"
    with cache_of(model, device, max_batch=3) as cache:
        assert agree(want, generate(model, **batch, cache=cache, max_new_tokens=new), name) >= 48
        assert cache.get_seq_length() == 40 + new - 1
        assert name not in SHARING or sum(one.num_layers for one in cache.caches) == 2
        assert all([len(row) for row in rows] == [n + new - 1 for n in (40, 28, 9)] for rows in cache.sequences)
    got = generate(model, **batch, max_new_tokens=2)
    assert agree((want[0][:, :2], want[1]), got, name) >= 3


@pytest.mark.filterwarnings("error")
def test_decoding_without_a_cache_of_ours_warns_once(device: za.Device) -> None:
    zinc_attention._warn_once.cache_clear()
    model, ids = model_of("llama"), prompt(10)
    with cache_of(model, device) as cache:
        generate(model, ids, cache=cache, max_new_tokens=2)
    generate(model, ids, max_new_tokens=1)  # no step after the prompt, whose keys are uploaded once in any case
    with pytest.warns(UserWarning) as caught:
        generate(model, ids, max_new_tokens=4)
    assert [str(warning.message) for warning in caught] == [
        "attention 'zinc' runs without a ZincCache, so every step uploads all keys and values again; pass "
        "cache=ZincCache(model.config, max_cache_len)"
    ]


AS_ONE = [(name, False) for name in (MODELS if FULL else ("llama", "gpt_oss", "qwen3_5_moe", "small gemma2"))]


@pytest.mark.parametrize(("name", "latent"), [*AS_ONE, ("deepseek_v2", True), ("deepseek_v3", True)])
def test_logits_have_the_same_bits_at_every_layout(name: str, latent: bool, device: za.Device) -> None:
    """After more than a node; expanded and, of rows of its own, absorbed, also for every size of pages.

    llama's cache has arithmetic "fused", whose bits are not the canonical ones.
    """
    ids, model, results = prompt(510), model_of(name), []
    arithmetic = "fused" if name == "llama" else "canonical"
    sizes = ({"page_size": 16}, {"page_size": 256}) if latent else ()
    for layout in ({"num_splits": 1}, {"num_splits": 2}, {}, *sizes):
        with cache_of(model, device, latent=latent, arithmetic=arithmetic, capacity=520, **layout) as cache:
            results.append(generate(model, ids, cache=cache, max_new_tokens=8)[1])
    assert all(equal(results[0], result) for result in results[1:])
    if arithmetic == "fused":
        with cache_of(model, device) as cache, cache_of(model, device, arithmetic=arithmetic) as fused:
            assert not equal(*(model(prompt(70), cache=held).logits for held in (cache, fused)))


LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "kimi_linear")
IN_CHUNKS = [name for name in (*MODELS, *SIMILAR, *ALIBI) if name not in RECURRENT]


@pytest.mark.parametrize(("name", "latent"), [*((one, False) for one in IN_CHUNKS), *((one, True) for one in LATENT)])
def test_logits_are_eager_attentions_in_chunks(name: str, latent: bool, device: za.Device) -> None:
    """A prompt in chunks, then single tokens, and the whole prompt without a cache of ours.

    A wrong scale, window, sink, head or row is far beyond either bound. The largest deviation that was measured of
    compressed rows, which are attended in the absorbed form, is 0.84e-5.
    """
    ids, bound = prompt(75), 4e-5 if latent else MARGIN
    want, model = model_of(name, "eager")(ids).logits, model_of(name)
    with cache_of(model, device, latent=latent) as cache:
        result = [in_chunks(model, ids, cache, 0, 30, 37, 70, 71, 72)]
    for got in result if latent else (*result, model(ids).logits):
        assert (got - want).abs().max() <= bound


def test_compressed_rows_may_only_be_expanded(device: za.Device) -> None:
    """Token by token, into the shapes of the config."""
    model, ids = model_of("deepseek_v3"), prompt(9)
    with cache_of(model, device) as cache:
        layer, attn = cache.layers[0], model.model.layers[0].self_attn
        small = torch.randn(1, 1, 9, 32), torch.randn(1, 1, 9, 64)
        kv, rotated = cache.update(*small, 0)
        assert isinstance(kv, hf.CompressedRows) and kv.layer is layer and layer.pending is None
        with pytest.raises(errors.UnsupportedError, match=r"was called on the rows that update\(\) returned"):
            torch.softmax(kv, -1).sum()
        q, shape = torch.ones(1, 4, 9, 192), r"key of layer 0: got shape \(1, 1, 9, 32\), expected \(batch, 4, "
        with pytest.raises(errors.ShapeError, match=shape):
            attend(q, kv, rotated)
        k, v = attn.expand_kv(kv, rotated)
        shape = r"value of layer 0: got .*192\), expected \(1, 4, 9, 128\), key's wi"
        with pytest.raises(errors.ShapeError, match=shape):
            attend(q, k, k)
        want = attend(q, *attn.expand_kv(*small))
        assert equal(attend(q, k, v), want)
        cache.crop(0)
        k, v = cache.update(k.plain(), v.plain(), 0)  # releases of transformers that expand before the cache
        assert equal(attend(q, k, v), want)
        cache.reset()
        model.set_attn_implementation("eager")
        with pytest.raises(errors.UnsupportedError, match="matmul was called"):
            model(ids, cache=cache)


BEAMS = ("llama", "gemma2", "qwen3_5", "falcon_h1", "deepseek_v2", "mimo_v2")


@pytest.mark.parametrize(("name", "latent"), [*((name, False) for name in BEAMS), ("deepseek_v2", True)])
def test_beam_search(name: str, latent: bool, device: za.Device) -> None:
    options = {**padded(30, 11), "num_beams": 3, "max_new_tokens": 12}
    want, model = generate(model_of(name, "eager"), **options)[0], model_of(name)
    with cache_of(model, device, max_batch=6, latent=latent) as cache:
        assert torch.equal(generate(model, cache=cache, **options)[0], want)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3", "lfm2"])
def test_assisted_generation_gives_the_same_tokens(name: str, device: za.Device) -> None:
    """By prompt lookup: drafts of several rows, of which the cache drops those that were wrong."""
    ids, model = prompt(12).repeat(1, 4), model_of(name)
    with cache_of(model, device) as cache:
        want = generate(model, ids, cache=cache)
        cache.reset()
        got = generate(model, ids, cache=cache, prompt_lookup_num_tokens=4)
        assert agree(want, got) >= STEPS // 2
        cache.reset()  # and with a draft model, here the model itself
        got = generate(model, ids, cache=cache, assistant_model=copy.deepcopy(model), max_new_tokens=16)
        assert agree((want[0][:, :16], want[1]), got) >= 8


def test_a_prepared_cache_records_nothing_while_it_decodes(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("gpt_oss"), prompt(20, batch=2)
    with cache_of(model, device, max_batch=2) as cache:
        with pytest.raises(za.StepError, match=r"^prepare: got a cache without tokens"):
            cache.prepare()
        model(ids, cache=cache)
        cache.prepare()
        monkeypatch.setattr(device.runtime, "record", lambda *args: pytest.fail("recorded in a step"))
        for step in range(60):  # over the end of a leaf
            logits = model(prompt(1, batch=2, seed=step), cache=cache).logits
        assert torch.isfinite(logits).all() and cache.get_seq_length() == 80


# --- multi-head latent attention in its absorbed form -------------------------------------------------------------

NARROW = [  # of the model and of the cache, whether under torch.autocast, and the bound
    (torch.float32, "f16", False, 1e-3),
    (torch.float32, "bf16", False, 8e-3),
    (torch.float32, "q8_0", False, 2.4e-2),
    *((torch.float16, None, autocast, 3e-3) for autocast in (False, True)),
    *((torch.bfloat16, None, autocast, 2.5e-2) for autocast in (False, True)),
]


@pytest.mark.parametrize(("dtype", "stored", "autocast", "bound"), NARROW)
def test_narrow_caches_and_models(dtype, stored, autocast, bound, device):
    """Near the same weights in float32: each bound is two to three times the relative L2 deviation that was measured.

    That of the caches is 3.5e-4, 2.5e-3 and 7.9e-3; that of the models 1.1e-3 and 8.8e-3, where eager attention is off
    by 1.3e-3 and 1.0e-2. torch.autocast, which would narrow the absorption's products, leaves them as they are.
    """
    model, ids = model_of("deepseek_v3", dtype=dtype), prompt(40)
    with (
        cache_of(model, device, latent=True, dtype=stored) as cache,
        torch.autocast("cpu", dtype if autocast else torch.bfloat16, enabled=autocast),
    ):
        got = model(ids, cache=cache).logits
        assert got.dtype == dtype
        assert cache.caches[0].dtype == (stored or {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype])
    wide = copy.deepcopy(model).float()
    wide.set_attn_implementation("eager")
    want = wide(ids).logits
    assert 0 < (got - want).norm() <= bound * want.norm()


def test_deepseek_v3_has_576_values_per_token() -> None:
    config = transformers.DeepseekV3Config()
    latent, expanded = (hf.ZincCache(config, 64, latent=on).layers[0].shape for on in (True, False))
    assert str(latent) == "128/1/576/512/latent" and latent.kv_bytes_per_token("f16") == 2 * 576
    assert str(expanded) == "128/128/192/128" and expanded.kv_bytes_per_token("f16") == 2 * 128 * (192 + 128)


def test_expanded_rows_are_refused(device: za.Device) -> None:
    """Of releases of transformers that expand before the cache."""
    model = model_of("deepseek_v3")
    attn = model.model.layers[0].self_attn
    with cache_of(model, device, latent=True) as cache:
        q, wide = torch.ones(1, 4, 3, 192), torch.ones(1, 4, 3, 128)
        with pytest.raises(errors.ShapeError, match=r"expected the compressed rows \(batch, 1, .* without latent=True"):
            cache.update(q, wide, 0)
        k, v = attn.expand_kv(*cache.update(torch.ones(1, 1, 3, 32), torch.ones(1, 1, 3, 64), 0))
        with pytest.raises(errors.ShapeError, match=r"query of layer 0: .*\(1, 4, 3, 96\), expected \(1, 4, 3, 192\)"):
            hf.attention_forward(attn, q[..., :96], k, v, None)


Adapted = type("Adapted", (torch.nn.Linear,), {})  # a layer with more than its weight


def linear(weight: Any, kind: Any = torch.nn.Linear, hook: str = "", **options: Any) -> Any:
    """A linear layer around a weight; hook: what registers one, or "forward" for a forward of the layer's own."""
    layer = kind(1, 1, **{"bias": False, **options})
    layer.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    if hook == "forward":
        layer.forward = layer.forward
    elif hook:
        getattr(layer, hook)(lambda *x: x[-1])
    return layer


OF_ITS_SHAPE = r"with a weight of shape \(1024, 32\) and torch"
PROJECTIONS = (  # what is in the place of a projection of this weight, and how the error describes it
    (lambda weight: None, "no module as kv_b_proj of "),
    (lambda weight: linear(weight, Adapted), rf"a Adapted {OF_ITS_SHAPE}\.float32"),
    (lambda weight: linear(weight, bias=True), "a Linear with .* and a bias"),
    *((lambda weight, hook=hook: linear(weight, hook=hook), "a Linear with .* and hooks")
      for hook in ("register_forward_hook", "register_forward_pre_hook", "forward")),
    (lambda weight: linear(weight.to(torch.float8_e4m3fn)), rf"a Linear {OF_ITS_SHAPE}\.float8_e4m3fn"),
    (lambda weight: linear(weight.to("meta")), rf"a Linear {OF_ITS_SHAPE}\.float32"),
    (lambda weight: linear(weight[:, 1:]), r"a Linear with a weight of shape \(1024, 31\) .* of shape \(1024, 32\)"),
)  # fmt: skip


@pytest.mark.parametrize(("change", "text"), PROJECTIONS)
def test_projections_that_are_refused(change: Any, text: str, device: za.Device) -> None:
    """Without an effect on the cache: the same call works with a plain one."""
    attn, other = loaded("deepseek_v3").model.layers[0].self_attn, torch.nn.Module()
    other.kv_b_proj = change(attn.kv_b_proj.weight)
    q = torch.ones(1, 4, 3, 192)
    with cache_of(loaded("deepseek_v3"), device, latent=True) as cache:
        k, v = attn.expand_kv(*cache.update(torch.ones(1, 1, 3, 32), torch.ones(1, 1, 3, 64), 0))
        with pytest.raises(errors.UnsupportedError, match=f"layer 0: got {text}.* without latent=True"):
            hf.attention_forward(other, q, k, v, None)
        assert cache.get_seq_length() == 0
        hf.attention_forward(attn, q, k, v, None)
        assert cache.layers[0].get_seq_length() == 3


# --- adapt(): BLOOM, MPT and Falcon, whose attention transformers hard-codes ----------------------------------------


def test_slopes_are_the_models():
    """Falcon rounds the paper's, 2**(-k / 4) for 32 heads, to bfloat16."""
    module = loaded("falcon of 32 heads", adapted=True).transformer.h[0].self_attention
    paper = torch.exp2(-torch.arange(1, 33) / 4)
    assert torch.equal(module.forward.args[1], paper.bfloat16().float())


def test_padding_behind_tokens(device):
    """BLOOM counts tokens, as this does; MPT counts columns."""
    ids, mask = prompt(20), torch.ones(1, 20, dtype=torch.long)
    mask[0, 7:11] = 0
    want, model = model_of("bloom", "eager")(ids, attention_mask=mask).logits, model_of("bloom")
    with cache_of(model, device) as held:
        got = model(ids, attention_mask=mask, cache=held).logits
    live = mask[0].bool()
    assert (got - want)[:, live].abs().max() <= MARGIN
    model = model_of("mpt")
    with (
        cache_of(model, device) as held,
        pytest.raises(errors.UnsupportedError, match="which MPT's ALiBi counts as posi"),
    ):
        model(ids, attention_mask=mask, cache=held)


def test_4d_masks_of_mpt(device):
    """MptModel turns a mask that is added into one that is True where a key is hidden."""
    ids, mask = prompt(20), torch.ones(1, 1, 20, 20).tril()
    mask[..., 12:, 3:9] = 0
    mask = torch.zeros(mask.shape).masked_fill(mask == 0, torch.finfo(torch.float32).min)
    want, model = model_of("mpt", "eager")(ids, attention_mask=mask).logits, model_of("mpt")
    with cache_of(model, device) as held:
        got = model(ids, attention_mask=mask, cache=held).logits
        assert (got - want).abs().max() <= MARGIN
        held.reset()
        with pytest.raises(errors.UnsupportedError, match="shows a row a key after its position"):
            model(ids, attention_mask=torch.zeros_like(mask), cache=held)


def test_adapting_twice_and_copies():
    model = copy.deepcopy(model_of("bloom"))
    first = model.transformer.h[0].self_attention
    assert first.forward.args[0] is first
    before = first.forward
    hf.adapt(model)
    assert first.forward is before


def test_what_adapt_refuses(monkeypatch):
    with pytest.raises(errors.ArgumentError, match="model: got int, expected a transformers model"):
        hf.adapt(3)
    hooked, odd, exact = (copy.deepcopy(model_of("bloom", "eager")) for _ in range(3))
    hooked.transformer.h[1].self_attention.forward = lambda *args, **kwargs: None
    odd.transformer.build_alibi_tensor = lambda mask, heads, dtype: torch.arange(8.0).square().expand(heads, 1, 8)
    for block in exact.transformer.h:
        block.self_attention.pretraining_tp, block.self_attention.slow_but_exact = 2, True
    for model, text in (
        (loaded("llama"), "got LlamaForCausalLM, expected a model with BLOOM's, MPT's or F"),
        (hooked, "with another forward than transformers' own"),
        (odd, "got BloomModel with a bias that is not linear in the key's position"),
        (exact, "got slow_but_exact with pretraining_tp above 1"),
    ):
        with pytest.raises(errors.UnsupportedError, match=text):
            hf.adapt(model)
        assert model.config._attn_implementation != "zinc"
    monkeypatch.setattr(adapters.transformers, "__version__", "5.25.0.dev0")
    with pytest.raises(errors.UnsupportedError, match=r"got transformers 5\.25\.0\.dev0, expected 5\.24, whose"):
        hf.adapt(model_of("mpt", "eager"))


def test_training_and_weights_are_refused():
    model = model_of("bloom")
    with pytest.raises(errors.UnsupportedError, match="BloomAttention: got output_attentions, which"):
        model(prompt(5), output_attentions=True)
    with torch.enable_grad(), pytest.raises(errors.UnsupportedError, match="require a gradient"):
        model(prompt(5))
