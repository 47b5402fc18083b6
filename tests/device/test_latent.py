"""ZincCache(latent=True): multi-head latent attention in its absorbed form, in small random-weight models.

The absorbed form sums in another order than eager attention and than the expanded form, so values are compared within
BOUND, and greedy tokens are eager's while eager's best logit leads by more than it. test_transformers.py compares bits
where only the split layout or the page size varies: the model's and the absorption's own sums are then the same.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import zinc_models
from tiny_models import UNTIED, prompt
from zinc_models import STEPS, equal, generate, hf, in_chunks, loaded, model_of, padded, torch, transformers

import zinc_attn as za
from zinc_attn import errors

BOUND = 4e-5  # of logits of order 5, float32 through two layers; 0.84e-5 is the largest deviation that was measured
MODELS = {  # the shape of a model's layers, and that of the expanded form
    "deepseek_v2": ("4/1/58/44/latent", "4/4/54/36"),
    "deepseek_v3": ("4/1/96/32/latent", "4/4/192/128"),
    "glm4_moe_lite": ("4/1/96/32/latent", "4/4/256"),
    "mistral4": ("4/1/96/32/latent", "4/4/128"),
    "kimi_linear": ("4/1/96/32/latent", "4/4/192/128"),  # and a linear-attention layer
}
ARCHITECTURES = pytest.mark.parametrize("name", MODELS)
ONE_DISPATCHER = True
pytestmark = pytest.mark.usefixtures("models_may_attend")


def cache_of(model: Any, device: za.Device, **options: Any) -> hf.ZincCache:
    return zinc_models.cache_of(model, device, **{"latent": True, "capacity": 128, **options})


def check_tokens(want: Any, got: Any) -> None:
    """The same tokens, and near logits, in every row; only a lead within BOUND could go either way."""
    best = want[1].topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 2 * BOUND, "the prompt leads to a tie; take another seed"
    assert torch.equal(want[0], got[0])
    assert (want[1] - got[1]).abs().max() <= BOUND


# --- values ------------------------------------------------------------------------------------------------


@ARCHITECTURES
def test_logits_are_eager_attentions_in_chunks(name: str, device: za.Device) -> None:
    """A prompt in chunks, then single tokens."""
    ids = prompt(75)
    want, model = model_of(name, "eager")(ids).logits, model_of(name)
    with cache_of(model, device) as cache:
        assert (in_chunks(model, ids, cache, 0, 30, 37, 70, 71, 72) - want).abs().max() <= BOUND


@ARCHITECTURES
def test_greedy_tokens_are_eager_attentions(name: str, device: za.Device) -> None:
    ids = prompt(40)
    want = generate(model_of(name, "eager"), ids)
    assert len(want[0].unique()) > 4, "a text that repeats itself tests little"
    model = model_of(name)
    with cache_of(model, device) as cache:
        check_tokens(want, generate(model, ids, past_key_values=cache))
        assert cache.get_seq_length() == ids.shape[1] + STEPS - 1


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"])
def test_a_layers_output_is_near_float64s(name: str, device: za.Device) -> None:
    """The attention function on rows of one's own, against the expanded form in float64.

    1.7e-7 is the largest relative L2 error that was measured, 1.4 ulps; a wrong scale, head or row is far beyond 1e-6.
    The scale is not that of either head size.
    """
    model, n, scale = model_of(name), 50, 0.031
    attn = model.model.layers[0].self_attn
    rank, rotated, nope = attn.kv_lora_rank, attn.qk_rope_head_dim, attn.qk_nope_head_dim
    rng = torch.Generator().manual_seed(8)
    c, r = (torch.randn(1, 1, n, size, generator=rng) for size in (rank, rotated))
    q = torch.randn(1, 4, n, nope + rotated, generator=rng)
    with cache_of(model, device) as cache:
        k, v = attn.expand_kv(*cache.update(c, r, 0))
        got = hf.attention_forward(attn, q, k, v, None, scaling=scale)[0]
    weight = attn.kv_b_proj.weight.double().view(4, -1, rank)
    wide_k, wide_v = torch.einsum("bxnr,hdr->bhnd", c.double(), weight).split([nope, attn.v_head_dim], dim=-1)
    wide_k = torch.cat((wide_k, r.double().expand(-1, 4, -1, -1)), dim=-1)
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    weights = (q.double() @ wide_k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    want = (weights @ wide_v).transpose(1, 2)
    assert got.shape == want.shape and got.dtype == torch.float32
    assert (got - want).norm() <= 1e-6 * want.norm()


def test_left_padded_batches(device: za.Device) -> None:
    batch = padded(40, 28, 9)
    want, model = generate(model_of("deepseek_v3", "eager"), **batch, max_new_tokens=16), model_of("deepseek_v3")
    with cache_of(model, device, max_batch=3) as cache:
        check_tokens(want, generate(model, **batch, past_key_values=cache, max_new_tokens=16))


@pytest.mark.parametrize(("dtype", "bound"), [("f16", 1e-3), ("bf16", 8e-3), ("q8_0", 2.4e-2)])
def test_narrow_caches(dtype: str, bound: float, device: za.Device) -> None:
    """Each bound is three times the relative L2 deviation that was measured, 3.5e-4, 2.5e-3 and 7.9e-3."""
    ids = prompt(40)
    want, model = model_of("deepseek_v3", "eager")(ids).logits, model_of("deepseek_v3")
    with cache_of(model, device, dtype=dtype) as cache:
        got = model(ids, past_key_values=cache).logits
        assert cache.caches[0].dtype == dtype
    assert 0 < (got - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 3e-3), (torch.bfloat16, 2.5e-2)])
def test_half_precision_models(dtype: Any, bound: float, autocast: bool, device: za.Device) -> None:
    """Near the same weights in float32, from which eager attention in ``dtype`` deviates by 1.3e-3 and 1.0e-2, and this
    by 1.1e-3 and 8.8e-3, relative L2. torch.autocast, which would narrow the absorption's products, leaves them as they
    are.
    """
    model, ids = model_of("deepseek_v3", dtype=dtype), prompt(40)
    with cache_of(model, device) as cache, torch.autocast("cpu", dtype, enabled=autocast):
        got = model(ids, past_key_values=cache).logits
        assert got.dtype == dtype
        assert cache.caches[0].dtype == {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    wide = copy.deepcopy(model).float()
    wide.set_attn_implementation("eager")
    want = wide(ids).logits
    assert (got - want).norm() <= bound * want.norm()


# --- bits --------------------------------------------------------------------------------------------------


def test_crop_fork_reset_and_prepare(device: za.Device) -> None:
    """What is left gives the bits of a cache that has seen nothing else."""
    model, ids, other = model_of("deepseek_v3"), prompt(40), prompt(12, seed=4)

    def run(tokens: Any, held: hf.ZincCache) -> Any:
        return model(tokens, past_key_values=held).logits

    with cache_of(model, device, max_batch=2) as cache:
        begin = run(ids, cache)
        cache.prepare()
        want = run(other, cache)
        cache.crop(-12)
        twin = cache.fork()
        run(ids[:, :9], cache)
        assert equal(run(other, twin), want)
        cache.reset()
        assert equal(run(ids, cache), begin)


# --- memory ------------------------------------------------------------------------------------------------


@ARCHITECTURES
def test_memory_is_that_of_the_compressed_rows(name: str, device: za.Device) -> None:
    latent, expanded = MODELS[name]
    sizes = []
    for on, text in ((True, latent), (False, expanded)):
        with cache_of(loaded(name), device, latent=on) as cache:
            (shape,) = {layer.shape for layer in cache.layers if isinstance(layer, hf.ZincLayer)}
            assert str(shape) == text
            cache.allocate(torch.float32)
            (held,) = cache.caches
            assert held.nbytes == 128 * held.num_layers * shape.kv_bytes_per_token("f32")
            sizes.append(held.nbytes)
    assert sizes[0] * 6 < sizes[1]


def test_deepseek_v3_has_576_values_per_token() -> None:
    config = transformers.DeepseekV3Config()
    latent, expanded = (hf.ZincCache(config, 64, latent=on).layers[0].shape for on in (True, False))
    assert str(latent) == "128/1/576/512/latent" and latent.kv_bytes_per_token("f16") == 2 * 576
    assert str(expanded) == "128/128/192/128" and expanded.kv_bytes_per_token("f16") == 2 * 128 * (192 + 128)


# --- what is told, and what is refused ---------------------------------------------------------------------


def test_observers_see_the_absorbed_form(device: za.Device) -> None:
    model, ids, calls = model_of("deepseek_v3"), prompt(9), []
    with cache_of(model, device) as cache:
        cache.observer = calls.append
        model(ids, past_key_values=cache)
    assert [call.layer for call in calls] == [0, 1]
    assert calls[0].query.shape == (1, 4, 9, 96) and calls[0].out.shape == (1, 9, 4, 32)
    k, v = calls[0].new
    assert k.shape == (1, 1, 9, 96) and v is None


def test_rows_without_a_forward(device: za.Device) -> None:
    """append() takes k alone."""
    model, ids, calls = model_of("deepseek_v3"), prompt(9), {}
    with cache_of(model, device) as cache, cache_of(model, device) as filled:
        cache.observer = lambda call: calls.setdefault(call.layer, call)
        model(ids[:, :8], past_key_values=cache)
        filled.append(lambda layer: (calls[layer.index].new[0][0].transpose(0, 1).numpy(), None), torch.float32)
        want, got = (model(ids[:, 8:], past_key_values=one).logits for one in (cache, filled))
    assert equal(got, want)


def test_configs_that_are_refused() -> None:
    llama = transformers.LlamaConfig(**UNTIED)
    with pytest.raises(errors.UnsupportedError, match=r"latent: got True for LlamaConfig, .* without latent=True"):
        hf.ZincCache(llama, 64, latent=True)
    with pytest.raises(errors.ArgumentError, match="latent: got 1"):
        hf.ZincCache(llama, 64, latent=1)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match="dtype: got q8_0/f16 for the latent shape"):
        hf.ZincCache(loaded("deepseek_v2").config, 64, latent=True, dtype="q8_0/f16")
    hf.ZincCache(loaded("deepseek_v2").config, 64, latent=True, dtype="q8_0").close()


def test_expanded_rows_are_refused(device: za.Device) -> None:
    """Releases of transformers that expand before the cache, and a model that does not expand after it."""
    model = model_of("deepseek_v3")
    attn = model.model.layers[0].self_attn
    with cache_of(model, device) as cache:
        q, wide = torch.ones(1, 4, 3, 192), torch.ones(1, 4, 3, 128)
        with pytest.raises(errors.ShapeError, match=r"expected the compressed rows \(batch, 1, .* without latent=True"):
            cache.update(q, wide, 0)
        rows = cache.update(torch.ones(1, 1, 3, 32), torch.ones(1, 1, 3, 64), 0)
        text = r"key of layer 0: got shape \(1, 1, 3, 32\), expected \(batch, 4, "
        with pytest.raises(errors.ShapeError, match=text):
            hf.attention_forward(attn, q, *rows, None)
        k, v = attn.expand_kv(*rows)
        with pytest.raises(errors.ShapeError, match=r"query of layer 0: .*\(1, 4, 3, 96\), expected \(1, 4, 3, 192\)"):
            hf.attention_forward(attn, q[..., :96], k, v, None)
        cache.crop(0)
        with pytest.raises(za.StepError, match=r"got rows of an earlier update\(\)"):
            hf.attention_forward(attn, q, k, v, None)


class Adapted(torch.nn.Linear):
    """A layer with more than its weight."""


def replaced(kind: Any, before: Any = None, **options: Any) -> Any:
    """A projection with the weight of another one, without its hooks. before: what is done with it first."""

    def change(old: Any) -> Any:
        new = kind(old.in_features, old.out_features, **{"bias": False, **options})
        new.weight = old.weight
        if before:
            before(new, old)
        return new

    return change


PLAIN = torch.nn.Linear


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (replaced(Adapted), r"a Adapted with a weight of shape \(1024, 32\) and torch.float32"),
        (replaced(PLAIN, bias=True), "a Linear with .* and a bias"),
        (replaced(PLAIN, lambda new, old: new.register_forward_hook(lambda *x: x[2])), "a Linear with .* and hooks"),
        (
            replaced(PLAIN, lambda new, old: new.register_forward_pre_hook(lambda *x: x[1])),
            "a Linear with .* and hooks",
        ),
        (replaced(PLAIN, lambda new, old: setattr(new, "forward", old.forward)), "a Linear with .* and hooks"),
        (torch.nn.Sequential, "a Sequential"),
    ],
)
def test_projections_that_are_refused(change: Any, text: str, device: za.Device) -> None:
    """Without an effect on the cache: the same call works once the projection is a plain one."""
    model, ids = model_of("deepseek_v3"), prompt(9)
    attn = model.model.layers[1].self_attn
    plain = attn.kv_b_proj
    with cache_of(model, device) as cache:
        want = model(ids, past_key_values=cache).logits
        cache.reset()
        try:
            attn.kv_b_proj = change(plain)
            with pytest.raises(errors.UnsupportedError, match=f"layer 1: got {text}.* without latent=True"):
                model(ids, past_key_values=cache)
        finally:
            attn.kv_b_proj = plain
        assert cache.get_seq_length() == 0
        assert equal(model(ids, past_key_values=cache).logits, want)


def linear(weight: Any) -> Any:
    """A torch.nn.Linear around a weight that needs no gradient."""
    made = torch.nn.Linear(1, 1, bias=False)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    return made


@pytest.mark.parametrize(
    ("projection", "text"),
    [
        (None, "no module as kv_b_proj of Module"),
        (linear(torch.ones(1024, 32).to(torch.float8_e4m3fn)), r"shape \(1024, 32\) and torch.float8_e4m3fn"),
        (linear(torch.ones(1024, 32, device="meta")), r"shape \(1024, 32\) and torch.float32"),
        (linear(torch.ones(1024, 33)), r"shape \(1024, 33\) .* of shape \(1024, 32\)"),
    ],
)
def test_weights_that_are_refused(projection: Any, text: str, device: za.Device) -> None:
    """Those that are missing, quantized, elsewhere or of another shape."""
    attn, module = loaded("deepseek_v3").model.layers[0].self_attn, torch.nn.Module()
    module.kv_b_proj = projection
    with cache_of(loaded("deepseek_v3"), device) as cache:
        k, v = attn.expand_kv(*cache.update(torch.ones(1, 1, 3, 32), torch.ones(1, 1, 3, 64), 0))
        with pytest.raises(errors.UnsupportedError, match=f"layer 0: got .*{text}"):
            hf.attention_forward(module, torch.ones(1, 4, 3, 192), k, v, None)
