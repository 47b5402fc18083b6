"""adapt(): small random BLOOM, MPT and Falcon models, whose attention transformers hard-codes, with a ZincCache.

The logits are compared with those of the model's own attention within BOUND, and greedy tokens must be the same while
its best logit leads by more than that. Falcon's is sdpa: its eager attention adds ALiBi twice, once in the mask
(transformers 5.24), and the two differ by 1.4 in logits of order 10.
"""

import copy
from functools import cache
from typing import Any

import pytest
import zinc_models
from tiny_models import UNTIED, prompt
from zinc_models import in_chunks, padded, torch, transformers

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.integrations import transformers as hf
from zinc_attn.integrations.transformers import adapters

NATIVE = True
BOUND = 1e-4  # of logits of order 10, float32 through two layers; 1.8e-5 is the largest deviation that was measured
ONE_DISPATCHER = True
pytestmark = pytest.mark.filterwarnings("ignore:attention 'zinc' runs without a ZincCache")
KEYS = "vocab_size", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings"
BASE = {key: UNTIED[key] for key in KEYS}
MPT = {"n_layers": 2, "n_heads": 6, "d_model": 240, "max_seq_len": 256}
ROTARY = {"new_decoder_architecture": True, "num_kv_heads": 2}  # without ALiBi
FALCON = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
# model class, its config beyond BASE, the shape of its layers, its own attention
MODELS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "bloom": ("BloomForCausalLM", {"n_layer": 2, "n_head": 4, "hidden_size": 256}, "4/4/64", "eager"),
    "bloom of 6 heads": ("BloomForCausalLM", {"n_layer": 2, "n_head": 6, "hidden_size": 240}, "6/6/40", "eager"),
    "mpt": ("MptForCausalLM", {**MPT, "attn_config": {"clip_qkv": 2.0}}, "6/6/40", "eager"),
    "falcon": ("FalconForCausalLM", {**FALCON, "alibi": True, "multi_query": False}, "4/4/64", "sdpa"),
    "falcon_mqa": ("FalconForCausalLM", {**FALCON, "alibi": True}, "4/1/64", "sdpa"),
    "falcon_rotary": ("FalconForCausalLM", {**FALCON, **ROTARY}, "4/2/64", "sdpa"),
}
ARCHITECTURES = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def _quiet(one_thread):
    with torch.no_grad():
        yield


def new_model(name: str, **others: Any) -> Any:
    kind, changes, _, attn = MODELS[name]
    model = getattr(transformers, kind)
    config = model.config_class(**{**BASE, **copy.deepcopy(changes), **others})
    config._attn_implementation = attn
    torch.manual_seed(11)
    return model(config).eval()


unadapted = cache(new_model)


@cache
def adapted(name: str) -> Any:
    model = new_model(name)
    hf.adapt(model)
    return model


def cache_of(model: Any, device: za.Device, **options: Any) -> hf.ZincCache:
    return zinc_models.cache_of(model, device, capacity=128, **options)


@ARCHITECTURES
def test_logits_are_the_models_own_in_chunks(name, device):
    """A prompt in chunks, then single tokens; and the whole prompt without a cache of ours."""
    ids, model = prompt(75), adapted(name)
    want = unadapted(name)(ids).logits
    with cache_of(model, device) as held:
        assert {str(layer.shape) for layer in held.layers} == {MODELS[name][2]}
        parts = in_chunks(model, ids, held, 0, 30, 37, 70, 71, 72)
    for got in (parts, model(ids).logits):
        assert (got - want).abs().max() <= BOUND


@ARCHITECTURES
def test_text_of_a_padded_batch_is_the_models_own(name, device):
    options = {**padded(40, 28, 9), "max_new_tokens": 24, "use_cache": True}
    want, model = zinc_models.generate(unadapted(name), **options), adapted(name)
    assert len(want[0].unique()) > 12, "a text that repeats itself tests little"
    with cache_of(model, device, max_batch=3) as held:
        got = zinc_models.generate(model, cache=held, **options)
    best = want[1].topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 2 * BOUND, "the prompt leads to a tie; take another seed"
    assert torch.equal(got[0], want[0]) and (got[1] - want[1]).abs().max() <= BOUND


def test_slopes_are_the_models():
    """Falcon rounds them to bfloat16, as the paper's for 32 heads, 2**(-k / 4), are not."""
    model = new_model("falcon", num_attention_heads=32)
    hf.adapt(model)
    slopes = model.transformer.h[0].self_attention.forward.args[1]
    paper = torch.exp2(-torch.arange(1, 33) / 4)
    assert torch.equal(slopes, paper.bfloat16().float()) and not torch.equal(slopes, paper)
    for name, want in (("bloom", [2, 4, 6, 8]), ("mpt", [2, 4, 6, 8, 1, 3]), ("bloom of 6 heads", [2, 4, 6, 8, 1, 3])):
        model = adapted(name)
        (module,) = (one for one in model.modules() if getattr(one, "layer_idx", None) == 0)
        assert torch.equal(module.forward.args[1], torch.exp2(-torch.tensor(want).float())), name


def test_padding_behind_tokens(device):
    """BLOOM counts tokens, as this does; MPT counts columns."""
    ids, mask = prompt(20), torch.ones(1, 20, dtype=torch.long)
    mask[0, 7:11] = 0
    want, model = unadapted("bloom")(ids, attention_mask=mask).logits, adapted("bloom")
    with cache_of(model, device) as held:
        got = model(ids, attention_mask=mask, cache=held).logits
    live = mask[0].bool()
    assert (got - want)[:, live].abs().max() <= BOUND
    model = adapted("mpt")
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
    want, model = unadapted("mpt")(ids, attention_mask=mask).logits, adapted("mpt")
    with cache_of(model, device) as held:
        got = model(ids, attention_mask=mask, cache=held).logits
        assert (got - want).abs().max() <= BOUND
        held.reset()
        with pytest.raises(errors.UnsupportedError, match="shows a row a key after its position"):
            model(ids, attention_mask=torch.zeros_like(mask), cache=held)


def test_adapting_twice_and_copies():
    model = copy.deepcopy(adapted("bloom"))
    first = model.transformer.h[0].self_attention
    assert first.forward.args[0] is first
    before = first.forward
    hf.adapt(model)
    assert first.forward is before


def test_models_that_compute_their_attention_themselves_are_refused():
    """Selected by name, "zinc" would be a mask that these models add to their own scores."""
    hf.register()
    xglm = transformers.XGLMConfig(**BASE, d_model=32, ffn_dim=32, num_layers=1, attention_heads=2)
    for model, text in (
        (new_model("bloom"), r"bloom, which .* call adapt\(model\)"),
        (new_model("mpt"), r"mpt, which .* call adapt\(model\)"),
        (transformers.XGLMForCausalLM(xglm), 'xglm, which computes .* use "eager"'),
    ):
        model.config._attn_implementation = "zinc"
        with pytest.raises(errors.UnsupportedError, match=f"got 'zinc' for a model of type {text}"):
            model(prompt(5))


def test_what_adapt_refuses(monkeypatch):
    with pytest.raises(errors.ArgumentError, match="model: got int, expected a transformers model"):
        hf.adapt(3)
    hooked = new_model("bloom")
    hooked.transformer.h[1].self_attention.forward = lambda *args, **kwargs: None
    odd = new_model("bloom")
    odd.transformer.build_alibi_tensor = lambda mask, heads, dtype: torch.arange(8.0).square().expand(heads, 1, 8)
    exact = new_model("bloom")
    for block in exact.transformer.h:
        block.self_attention.pretraining_tp, block.self_attention.slow_but_exact = 2, True
    for model, text in (
        (zinc_models.loaded("llama"), "got LlamaForCausalLM, expected a model with BLOOM's, MPT's or F"),
        (hooked, "with another forward than transformers' own"),
        (odd, "got BloomModel with a bias that is not linear in the key's position"),
        (exact, "got slow_but_exact with pretraining_tp above 1"),
    ):
        with pytest.raises(errors.UnsupportedError, match=text):
            hf.adapt(model)
        assert model.config._attn_implementation != "zinc"
    for version in ("5.23.1", "5.25.0.dev0", "6.0", "unknown"):
        monkeypatch.setattr(adapters.transformers, "__version__", version)
        with pytest.raises(errors.UnsupportedError, match=f"got transformers {version}, expected 5.24, whose"):
            hf.adapt(new_model("mpt"))


def test_training_and_weights_are_refused():
    model = new_model("bloom")
    hf.adapt(model)
    with pytest.raises(errors.UnsupportedError, match="BloomAttention: got output_attentions, which"):
        model(prompt(5), output_attentions=True)
    with torch.enable_grad(), pytest.raises(errors.UnsupportedError, match="require a gradient"):
        model(prompt(5))
