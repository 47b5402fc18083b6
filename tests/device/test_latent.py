"""ZincCache(latent=True): multi-head latent attention in its absorbed form, in small random-weight models.

The absorbed form sums in another order than eager attention and than the expanded form. test_transformers.py compares
its logits with eager's within a bound, and bits where only the split layout or the page size varies: the model's and
the absorption's own sums are then the same.
"""

import copy
from typing import Any

import pytest
import zinc_models
from tiny_models import UNTIED, prompt
from zinc_models import hf, loaded, model_of, torch, transformers

import zinc_attn as za
from zinc_attn import errors

NATIVE = True
SHAPES = {  # of a model's layers in the expanded form, and in the absorbed one
    "deepseek_v2": ("4/4/54/36", "4/1/58/44/latent"),
    "deepseek_v3": ("4/4/192/128", "4/1/96/32/latent"),
    "glm4_moe_lite": ("4/4/256", "4/1/96/32/latent"),
    "mistral4": ("4/4/128", "4/1/96/32/latent"),
    "kimi_linear": ("4/4/192/128", "4/1/96/32/latent"),  # and a linear-attention layer
    "llama_mqa": ("32/1/64",),
}
ONE_DISPATCHER = True
pytestmark = pytest.mark.usefixtures("models_may_attend")


def cache_of(model: Any, device: za.Device, **options: Any) -> hf.ZincCache:
    return zinc_models.cache_of(model, device, **{"latent": True, "capacity": 128, **options})


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
        cache_of(model, device, dtype=stored) as cache,
        torch.autocast("cpu", dtype if autocast else torch.bfloat16, enabled=autocast),
    ):
        got = model(ids, cache=cache).logits
        assert got.dtype == dtype
        assert cache.caches[0].dtype == (stored or {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype])
    wide = copy.deepcopy(model).float()
    wide.set_attn_implementation("eager")
    want = wide(ids).logits
    assert 0 < (got - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("name", SHAPES)
def test_memory_is_that_of_the_configs_shapes(name: str, device: za.Device) -> None:
    sizes = []
    for latent, text in enumerate(SHAPES[name]):
        with cache_of(loaded(name), device, latent=bool(latent)) as cache:
            (shape,) = {layer.shape for layer in cache.layers if isinstance(layer, hf.ZincLayer)}
            assert str(shape) == text
            cache.allocate(torch.float32)
            (held,) = cache.caches
            assert held.nbytes == 128 * held.num_layers * shape.kv_bytes_per_token("f32")
            sizes.append(held.nbytes)
    assert len(sizes) == 1 or sizes[1] * 6 < sizes[0]


def test_deepseek_v3_has_576_values_per_token() -> None:
    config = transformers.DeepseekV3Config()
    latent, expanded = (hf.ZincCache(config, 64, latent=on).layers[0].shape for on in (True, False))
    assert str(latent) == "128/1/576/512/latent" and latent.kv_bytes_per_token("f16") == 2 * 576
    assert str(expanded) == "128/128/192/128" and expanded.kv_bytes_per_token("f16") == 2 * 128 * (192 + 128)


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
    """Of releases of transformers that expand before the cache; test_transformers.py has rows that are not expanded."""
    model = model_of("deepseek_v3")
    attn = model.model.layers[0].self_attn
    with cache_of(model, device) as cache:
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
    (lambda weight: torch.nn.Sequential(linear(weight)), "a Sequential"),
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
    with cache_of(loaded("deepseek_v3"), device) as cache:
        k, v = attn.expand_kv(*cache.update(torch.ones(1, 1, 3, 32), torch.ones(1, 1, 3, 64), 0))
        with pytest.raises(errors.UnsupportedError, match=f"layer 0: got {text}.* without latent=True"):
            hf.attention_forward(other, q, k, v, None)
        assert cache.get_seq_length() == 0
        hf.attention_forward(attn, q, k, v, None)
        assert cache.layers[0].get_seq_length() == 3
