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
    MODELS,
    SIMILAR,
    STEPS,
    attend,
    cache_of,
    equal,
    generate,
    hf,
    in_chunks,
    model_of,
    padded,
    torch,
)

import zinc_attn as za
from zinc_attn import errors
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
WHOLE = list(MODELS) if FULL else [*RECURRENT, *OTHERS.split()]  # the logits of the rest are compared in chunks


@pytest.mark.parametrize("name", WHOLE)
def test_texts_are_eager_attentions(name: str, device: za.Device) -> None:
    """Of a left-padded batch, beyond the window, where there is one; also with transformers' own DynamicCache."""
    batch, new = padded(40, 28, 9), 32
    want, model = generate(model_of(name, "eager"), **batch, max_new_tokens=new), model_of(name)
    assert len(want[0][0].unique()) > 4, "a text that repeats itself tests little"
    with cache_of(model, device, max_batch=3) as cache:
        assert agree(want, generate(model, **batch, cache=cache, max_new_tokens=new), name) >= 48
        assert cache.get_seq_length() == 40 + new - 1
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
    (warning,) = caught
    assert str(warning.message) == (
        "attention 'zinc' runs without a ZincCache, so every step uploads all keys and values again; pass "
        "cache=ZincCache(model.config, max_cache_len)"
    )


AS_ONE = [(name, False) for name in (MODELS if FULL else ("llama", "gpt_oss", "qwen3_5_moe", "small gemma2"))]


@pytest.mark.parametrize(("name", "latent"), [*AS_ONE, ("deepseek_v2", True), ("deepseek_v3", True)])
def test_logits_have_the_same_bits_at_every_layout(name: str, latent: bool, device: za.Device) -> None:
    """Behind more than a node; expanded and, of rows of its own, absorbed, also for every size of pages."""
    ids, model, results = prompt(510), model_of(name), []
    arithmetic = "fused" if name == "llama" else "canonical"
    sizes = ({"page_size": 16}, {"page_size": 256}) if latent else ()
    for layout in ({"num_splits": 1}, {"num_splits": 2}, {}, *sizes):
        with cache_of(model, device, latent=latent, arithmetic=arithmetic, capacity=520, **layout) as cache:
            results.append(generate(model, ids, cache=cache, max_new_tokens=8)[1])
    assert all(equal(results[0], result) for result in results[1:])


LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "kimi_linear")
IN_CHUNKS = [name for name in (*MODELS, *SIMILAR) if name not in RECURRENT]


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
    """Token by token, into the shapes of the config; rows of an earlier update are refused as others are."""
    model, ids = model_of("deepseek_v3"), prompt(9)
    with cache_of(model, device) as cache:
        layer, attn = cache.layers[0], model.model.layers[0].self_attn
        small = torch.randn(1, 1, 9, 32), torch.randn(1, 1, 9, 64)
        kv, rotated = cache.update(*small, 0)
        assert isinstance(kv, hf.CompressedRows) and kv.layer is layer and layer.pending is None
        for compute in (lambda x: x + 1, lambda x: x.mean(dim=2), lambda x: torch.softmax(x, -1), lambda x: x.float()):
            with pytest.raises(errors.UnsupportedError, match=r"was called on the rows that update\(\) returned"):
                compute(kv).sum()
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
        with pytest.raises(za.StepError, match=r"got rows of an earlier update\(\)"):
            attend(q, k, v)
        k, v = cache.update(k.plain(), v.plain(), 0)  # releases of transformers that expand before the cache
        assert equal(attend(q, k, v), want)
        cache.reset()
        model.set_attn_implementation("eager")
        with pytest.raises(errors.UnsupportedError, match="matmul was called"):
            model(ids, cache=cache)


@pytest.mark.parametrize("name", ["sharing gemma3n", "sharing gemma4"])
def test_layers_that_share_keys_and_values(name: str, device: za.Device) -> None:
    """The last layers attend the rows of earlier ones, which are appended once.

    generate needs the last token's logits only, so transformers slices Gemma 4's mask before these layers.
    """
    ids, few = prompt(40), {"max_new_tokens": 16}
    want, model = generate(model_of(name, "eager"), ids, **few), model_of(name)
    with cache_of(model, device) as cache:
        assert agree(want, generate(model, ids, cache=cache, **few)) >= 8
        assert sum(one.num_layers for one in cache.caches) == 2
    assert agree(want, generate(model, ids, **few)) >= 8


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
