"""attn_implementation="zinc" and ZincCache on q, k, v of one's own: bits, padding, crops, capacity, and refusals."""

import copy
import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support import FULL
from tiny_models import UNTIED, prompt
from zinc_models import attend, cache_of, equal, hf, loaded, model_of, torch, transformers

import zinc_attn as za
from zinc_attn import errors, reference
from zinc_attn.cache import rows

NATIVE = True
ONE_DISPATCHER = True
pytestmark = pytest.mark.usefixtures("models_may_attend")


class Layer:
    """What a model's attention modules do with a cache, on inputs of one's own: (layers, batch, heads, n, dim)."""

    def __init__(self, device: za.Device, tokens: int, batch: int = 1, **options: Any) -> None:
        self.dtype = options.pop("torch_dtype", torch.float32)
        self.config = transformers.LlamaConfig(**UNTIED)
        self.cache = hf.ZincCache(self.config, 256, device=device, page_size=64, max_batch=batch, **options)
        rng = torch.Generator().manual_seed(5)
        q, kv = (2, batch, 4, tokens, 64), (2, batch, 2, tokens, 64)
        self.q, self.k, self.v = (torch.randn(s, generator=rng).to(self.dtype) for s in (q, kv, kv))

    def step(
        self, begin: int, end: int, mask: Any = None, batch: slice = slice(None), layers: int = 2, **kwargs: Any
    ) -> Any:
        """Rows [begin, end) through the layers: (layers, batch, n, q_heads, head_dim)."""
        if mask is not None:
            mask = self.mask(mask, end - begin, kwargs.get("sliding_window"))
        q, k, v = (x[:, batch, :, begin:end] for x in (self.q, self.k, self.v))
        return torch.stack([attend(q[i], *self.cache.update(k[i], v[i], i), mask, **kwargs) for i in range(layers)])

    @staticmethod
    def mask(tokens: Any, n: int, window: int | None) -> Any:
        """What a model makes of a 2-D mask (batch, columns)."""
        m = transformers.masking_utils
        pattern = m.sliding_window_causal_mask_function(window) if window else m.causal_mask_function
        columns = tokens.shape[1]
        return hf.attention_mask(len(tokens), n, columns, columns - n, mask_function=pattern, attention_mask=tokens)


STORED = (
    *((torch.float32, None, "f32"), (torch.float16, None, "f16"), (torch.bfloat16, None, "bf16")),
    *((torch.float32, "f16", "f16"), (torch.float32, "bf16", "bf16"), (torch.bfloat16, "f16", "f16")),
    (torch.bfloat16, "q8_0", "q8_0"),
)


@pytest.mark.parametrize(("torch_dtype", "dtype", "stored"), STORED)
def test_outputs_are_the_oracles_in_the_querys_dtype(
    device: za.Device, torch_dtype: Any, dtype: str | None, stored: str
) -> None:
    layer = Layer(device, 40, torch_dtype=torch_dtype, dtype=dtype)
    with layer.cache:
        got = torch.cat([layer.step(0, 39), layer.step(39, 40)], dim=2)
        assert layer.cache.caches[0].dtype == stored
    assert got.dtype == torch_dtype
    narrow = {"f16": torch.float16, "bf16": torch.bfloat16}.get(stored, torch.float32)
    for index in range(2):
        k, v = (x[index, 0].to(narrow).transpose(0, 1) for x in (layer.k, layer.v))
        k, v = (x.numpy() if stored == "f16" else x.float().numpy() for x in (k, v))
        q = layer.q[index, 0].transpose(0, 1).float().numpy()
        want, _ = reference.emulate(q, *rows.stored(k, v, stored))
        assert torch.equal(got[index, 0], torch.from_numpy(want).to(torch_dtype))


def whole(layer: Layer, mask: Any = None, **kwargs: Any) -> Any:
    """All rows without a cache of ours: keys and values as they are."""
    return torch.stack([attend(layer.q[at], layer.k[at], layer.v[at], mask, **kwargs) for at in range(2)])


def left_padded(tokens: int, *pads: int) -> Any:
    """A 2-D mask of as many batch rows."""
    return (torch.arange(tokens) >= torch.tensor(pads)[:, None]).long()


def test_padding_in_front_never_shows(device: za.Device) -> None:
    """Rows of a left-padded batch have the bits that they have alone; padding rows are 0."""
    tokens, pads = 60, (0, 13, 41)
    batch = Layer(device, tokens, batch=3)
    got = whole(batch, left_padded(tokens, *pads))
    for i, pad in enumerate(pads):
        alone = (x[1, i : i + 1, :, pad:] for x in (batch.q, batch.k, batch.v))
        assert equal(got[1, i, pad:], attend(*alone)[0])
        assert not got[:, i, :pad].any()


@pytest.mark.parametrize("pads", ((0, 0, 0, 0), (0, 13, 41, 2)))
@pytest.mark.parametrize("seed", range(40 if FULL else 6))
def test_what_happens_between_steps_leaves_the_bits_of_the_tokens(device: za.Device, pads: Any, seed: int) -> None:
    """Crops, also into the padding, rows reordered, selected and repeated, forks, resets, and forwards that stopped
    between layers, in random order."""
    layer, rng, tokens = Layer(device, 80, batch=4), np.random.default_rng([seed, *pads]), 0
    mask, first, origin = left_padded(80, *pads), layer.cache, list(range(4))
    inputs = layer.q, layer.k, layer.v, whole(layer, mask)
    with first:
        for action in rng.permutation(["crop", "crop", "order", "select", "fork", "reset", "stop", "none"]).tolist():
            cache, rows = layer.cache, len(origin)
            if action == "crop":
                cut = int(rng.integers(tokens + 1))
                cache.crop(-cut)
                tokens -= cut
            elif action == "order" and tokens:
                order = rng.integers(0, rows, rows).tolist()
                cache.reorder_cache(torch.tensor(order))
                origin = [origin[i] for i in order]
            elif action == "select" and tokens:
                kept = [int(rng.integers(rows))]
                cache.batch_select_indices(kept)
                cache.batch_repeat_interleave(2)
                origin = [origin[i] for i in kept * 2]
            elif action == "fork":
                layer.cache = copy.deepcopy(cache)
                cache.reset()  # frees what the twin does not share
            elif action == "stop" and 0 < tokens < 80:
                layer.step(tokens, tokens + 1, mask[origin, : tokens + 1], layers=1)
                with pytest.raises(za.StepError, match=r"a forward stopped between layers; crop\(0\)"):
                    layer.step(tokens, tokens + 1, mask[origin, : tokens + 1])
                cache.crop(0)
            elif action == "reset":
                cache.reset()
                tokens = 0
                assert cache.get_seq_length() == 0 and cache.batch_size == -1
                pool = cache.caches[0].pool if cache.caches else None
                assert pool is None or pool.free_pages == pool.num_pages
            layer.q, layer.k, layer.v, want = (x[:, origin] for x in inputs)
            end = min(tokens + int(rng.integers(1, 30)), 80)
            if tokens < end:
                assert equal(layer.step(tokens, end, mask[origin, :end]), want[:, :, tokens:end]), (action, tokens, end)
            tokens = end
            assert layer.cache.get_seq_length() == tokens


def test_options_of_a_layer_are_those_of_its_call(device: za.Device) -> None:
    """Each layer has its own; a call with others is as good, and one that is refused changes nothing."""
    layer = Layer(device, 40)
    first: dict[str, Any] = {"s_aux": torch.ones(4), "sliding_window": 9}
    other: dict[str, Any] = {"s_aux": torch.arange(4.0), "scaling": 0.5}
    with layer.cache:
        layer.step(0, 20, **first)
        layer.step(20, 30, **first)
        with pytest.raises(errors.ShapeError, match="sinks"):
            layer.step(30, 31, s_aux=torch.ones(3))
        assert equal(layer.step(30, 35, **first), whole(layer, **first)[:, :, 30:35])
        assert equal(layer.step(35, 38, **other), whole(layer, **other)[:, :, 35:38])
        other["s_aux"] += 1  # as when weights are loaded
        assert equal(layer.step(38, 40, **other), whole(layer, **other)[:, :, 38:])


def qkv(q_len: int = 3, keys: int = 3, head_dim: int = 64, dtype: Any = torch.float32) -> list[Any]:
    return [torch.ones(1, heads, n, head_dim, dtype=dtype) for heads, n in ((4, q_len), (2, keys), (2, keys))]


def test_the_package_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, zinc_attn; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_integration_names_the_packages_that_it_needs() -> None:
    code = "import sys; sys.modules['torch'] = None; import zinc_attn.integrations.transformers"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.splitlines()[-1]
    assert said.startswith("zinc_attn.errors.RuntimeUnavailableError: zinc_attn.integrations.transformers: ")
    assert said.endswith("pip install torch 'zinc-attn[transformers]'")


def test_an_older_release_of_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers makes its module a second time when a model is loaded; the package keeps the first."""
    monkeypatch.setitem(sys.modules, "transformers", hf.upstream.transformers)
    monkeypatch.setattr(hf.upstream.transformers, "__version__", "5.23.2")
    with pytest.raises(ImportError, match=r"^got transformers 5\.23\.2$"):  # of which the package makes its error
        importlib.reload(hf.upstream)


def zinc_cache(*length: Any, head_dim: int = 64, **options: Any) -> hf.ZincCache:
    return hf.ZincCache(transformers.LlamaConfig(**UNTIED | {"head_dim": head_dim}), *length, **options)


def selected(name: str, attn_implementation: str | None = None, **changes: Any) -> None:
    """Select "zinc" for a model while it is built, or for one that is there."""
    kind = getattr(transformers, name + ("ForConditionalGeneration" if name == "T5" else "ForCausalLM"))
    with torch.device("meta"):
        kind._from_config(kind.config_class(**changes), attn_implementation=attn_implementation)
        kind(kind.config_class(**changes)).set_attn_implementation("zinc")


def mask_of(config: Any) -> Any:
    """A mask for a model that would add it to its own scores."""
    return hf.attention_mask(1, 3, 3, config=config())


GRADIENT = torch.ones(1, 4, 3, 64, requires_grad=True)
WRONG: tuple[tuple[Callable[[], Any], type[Exception], str], ...] = (
    *((lambda given=given: attend(*qkv(), **given), za.ZincAttnError, text) for given, text in (
        ({"dropout": 0.1}, r"got dropout = 0\.1, expected 0"),
        ({"is_causal": False}, "got is_causal = False"),
        ({"scaling": torch.ones(2)}, r"scale: got tensor\(\[1., 1.\]\), expected a single number, a magnitude"),
    )),
    (lambda: attend(GRADIENT, *qkv()[1:]), errors.UnsupportedError, "require a gradient"),
    (lambda: attend(*qkv()[:2], torch.ones(1, 2, 2, 64)), errors.ShapeError,
     r"value: got shape \(1, 2, 2, 64\), expected \(1, 2, 3\) as key's first axes, and any v_head_dim"),
    (lambda: attend(*qkv(dtype=torch.float64)), errors.DTypeError, "float64"),
    (lambda: attend(*qkv(5, 3)), errors.ShapeError, "3 tokens for 5 query"),
    (lambda: zinc_cache(64, head_dim=640), errors.ArgumentError, "head_dim: got 640, expected an int from 1 to 576"),
    (zinc_cache, errors.ArgumentError, "max_cache_len: got none"),
    (lambda: zinc_cache(9, capacity=9), errors.ArgumentError, "max_cache_len: got both it and capacity"),
    (lambda: zinc_cache(64, latent=True), errors.UnsupportedError,
     r"latent: got True for LlamaConfig, .* without latent=True"),
    (lambda: hf.ZincCache(loaded("deepseek_v2").config, 64, latent=True, dtype="q8_0/f16"), errors.ArgumentError,
     "dtype: got q8_0/f16 for the latent shape"),
    (lambda: hf.ZincCache("llama", 64), errors.ArgumentError, "config: got str"),
    *((lambda kind=kind: hf.ZincCache(kind(), 64), errors.UnsupportedError, f"config: got {text}") for kind, text in (
        (transformers.BartConfig, 'bart, whose cross-attention .*; use attn_implementation="eager" without'),
        (transformers.MllamaTextConfig, "mllama_text_model, whose cross-attention .*; call it without a ZincCache"),
    )),
    *((lambda model=model, change=change: selected(model, **change), errors.UnsupportedError,
       f"attn_implementation: got 'zinc' for {text}") for model, change, text in (
        ("Falcon", {"num_hidden_layers": 1}, r"a model of type falcon, .* call adapt\(model\)"),
        ("GPTNeo", {"num_layers": 1, "attention_types": [[["global"], 1]]}, 'a model of type gpt_neo, .* use "eager"'),
        ("TrOCR", {"decoder_layers": 1}, 'a model of type trocr, .* use "eager"'),
        ("T5", {"num_layers": 1}, 't5, an encoder-decoder.*; use attn_implementation="eager"'),
    ) for change in (change, {**change, "attn_implementation": "zinc"})),
    (lambda: mask_of(transformers.MptConfig), errors.UnsupportedError, r"type mpt, which .* call adapt\(model\)"),
    (lambda: mask_of(transformers.XGLMConfig), errors.UnsupportedError, 'type xglm, which computes .* use "eager"'),
)  # fmt: skip


@pytest.mark.parametrize(("make", "error", "match"), WRONG)
def test_wrong_arguments(make: Callable[[], Any], error: type[Exception], match: str) -> None:
    with torch.enable_grad(), pytest.raises(error, match=match):
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
    with pytest.raises(errors.UnsupportedError, match="got None for a layer whose mask has a window of 2"):
        attend(*qkv(5, 5), hf.attention_mask(1, 5, 5, mask_function=m.sliding_window_causal_mask_function(2)))
    attend(*qkv(), scaling=torch.tensor(0.125), softcap=torch.tensor(3.0, dtype=torch.bfloat16))


def test_rows_of_the_cache_reach_no_other_attention(device: za.Device) -> None:
    model, ids = model_of("llama", "eager"), prompt(9)
    with cache_of(model, device) as cache:
        with pytest.raises(errors.UnsupportedError, match="was called on the rows that update"):
            model(ids, cache=cache)
        layer, rows_of_k = cache.layers[0], torch.ones(1, 2, 9, 64)
        k, v = cache.update(rows_of_k, rows_of_k, 0)
        with pytest.raises(errors.UnsupportedError, match="ZincCache: to was called"):
            k.to(torch.float16)
        with pytest.raises(errors.UnsupportedError, match="ZincCache: matmul was called"):
            torch.matmul(torch.ones(1, 4, 9, 64), k)
        assert k.to("cpu").layer is layer and v.contiguous().shape == v.shape
        for replace in (lambda: cache.update(rows_of_k, rows_of_k, 0), lambda: cache.crop(0)):
            k, v = cache.update(rows_of_k, rows_of_k, 0)
            replace()
            with pytest.raises(za.StepError, match=r"got rows of an earlier update\(\)"):
                attend(torch.ones(1, 4, 9, 64), k, v)
        model.set_attn_implementation("zinc")
        model(ids, cache=cache)  # nothing was appended before
        assert cache.sequences[0][0].lengths == (9, 9)


def test_batches_and_masks_that_do_not_fit(device: za.Device) -> None:
    layer, mask = Layer(device, 40, batch=2), left_padded(10, 0, 4)
    gap = torch.cat([mask, torch.zeros(2, 1), torch.ones(2, 2)], dim=1)
    wide = Layer(device, 4, batch=2)
    wide.cache.max_batch = 1
    with layer.cache as cache:
        layer.step(0, 10, mask)
        for call, error, text in (
            (lambda: layer.step(10, 11), errors.UnsupportedError, "got another padding for tokens that the cache has"),
            (lambda: layer.step(10, 13, gap, sliding_window=8), errors.UnsupportedError,
             "row 0 has padding between its tokens"),
            (lambda: layer.step(10, 11, batch=slice(0, 1)), errors.ShapeError, "got 1 rows, expected the 2"),
            (lambda: cache.reorder_cache(torch.tensor([0, 2])), errors.ArgumentError, "beam_idx: got 2"),
            (lambda: cache.batch_repeat_interleave(2), errors.ArgumentError,
             "got 4 rows, expected 1 to max_batch = 2"),
            (lambda: cache.layers[0].crop(-1), errors.UnsupportedError, r"call ZincCache\.crop"),
            (lambda: cache.crop(1), errors.ArgumentError, "tokens_to_remove: got"),
            (lambda: cache.crop(-14), errors.ArgumentError, "tokens_to_remove: got"),
            (lambda: wide.step(0, 4), errors.ArgumentError, r"got 2 rows .* at most max_batch = 1"),
        ):  # fmt: skip
            with pytest.raises(error, match=text):
                call()
        layer.step(10, 13, gap)
        assert [len(sequence) for sequence in cache.sequences[0]] == [12, 8]
        cache.crop(-13)  # an empty cache takes any batch
        assert equal(layer.step(0, 10, batch=slice(0, 1)), whole(layer)[:, :1, :10])
    with pytest.raises(errors.ClosedError, match="ZincCache: used after close"):
        layer.step(13, 14)


def test_capacity_is_what_was_asked_for(device: za.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a batch row, whatever the pages and the KVCaches behind it hold."""
    layer = Layer(device, 60, batch=2)
    layer.cache = cache = hf.ZincCache(layer.config, capacity=50, device=device, page_size=32, max_batch=2)
    assert repr(cache) == "ZincCache(0 of 50 tokens, 0 of 2 batch rows, 2 layers)"
    mask = left_padded(50, 0, 20)
    with cache:
        layer.step(0, 50, mask)
        assert cache.capacity == cache.layers[0].get_max_length() == 50 < cache.caches[0].capacity
        with pytest.raises(za.CapacityError) as caught:
            layer.step(50, 51, torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], dim=1))
        assert str(caught.value) == (
            "ZincCache: got 1 new tokens for a batch row of 50, expected at most 0 (max_cache_len = 50 tokens per "
            "batch row); make the ZincCache with a larger max_cache_len, or crop() or reset() it"
        )
        cache.reset()
        mask[0, :5] = 0  # columns of padding are no tokens
        layer.step(0, 50, mask)
        layer.step(50, 55, torch.cat([mask, torch.ones(2, 5, dtype=torch.int64)], dim=1))
        cache.reset()
        layer.step(0, 50)
        layer.cache = cache.fork()
        layer.cache.crop(-50)
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
        refuses = Mock(side_effect=error("injected"))
        monkeypatch.setattr("zinc_attn.integrations.transformers.groups.KVCache", refuses)
        with pytest.raises(error, match=asked.format(1, "what the device has room for: injected$")):
            hf.ZincCache(layer.config, 5_000_000, device=device).allocate(torch.float16)
