"""Torch and transformers around attention "zinc": arguments, autocast, compiling, and tracing."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from hostile import closing, walk
from support import FULL
from tiny_models import UNTIED, prompt
from zinc_models import attend, cache_of, equal, generate, hf, model_of, padded, torch, transformers

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.integrations.transformers.attention import REFUSED

NATIVE = True
ONE_DISPATCHER = True
pytestmark = [
    pytest.mark.usefixtures("models_may_attend"),
    pytest.mark.filterwarnings("ignore:attention 'zinc' runs without a ZincCache"),
]

# --- arguments -----------------------------------------------------------------------------------------------

# Arguments that transformers names where it calls attention or defines it, and that change nothing of "zinc"
NEUTRAL = {"deterministic", "position_ids"}
CALL = re.compile(r"(?:attention_interface|attention_fn)\((.*?)\n +\)", flags=re.S)
DEFINITION = re.compile(r"^def (?:\w*attention_forward)\((.*?)\*\*kwargs", flags=re.M | re.S)


def test_every_argument_of_transformers_is_served_refused_or_known_to_be_neutral() -> None:
    """So a release that brings another one is seen, although a model's call lets unknown ones pass."""
    root, names = Path(transformers.__file__).parent, set[str]()
    for path in (*root.glob("models/*/modeling_*.py"), *root.glob("integrations/*_attention.py")):
        text = path.read_text()
        for call in CALL.findall(text):
            names |= set(re.findall(r"^ +(\w+)=", call, flags=re.M))
        for definition in DEFINITION.findall(text):
            names |= set(re.findall(r"^ +(\w+):", definition, flags=re.M))
    served = set(inspect.signature(hf.attention_forward).parameters)
    other_names = {"query_states", "key_states", "value_states"}
    assert {"s_aux", "position_bias", "block_indices", "cu_seq_lens_q"} <= names
    assert names - served - REFUSED - other_names == NEUTRAL


def test_what_does_not_change_attention_passes(device: za.Device) -> None:
    model, ids = model_of("llama"), prompt(9)
    q = torch.ones(1, 4, 9, 64), torch.ones(1, 2, 9, 64), torch.ones(1, 2, 9, 64)
    assert equal(attend(*q), attend(*q, position_ids=ids, tokenizer=object(), head_mask=None, indices=False))
    with cache_of(model, device) as cache:
        generate(model, ids, cache=cache, max_new_tokens=4)
        with pytest.raises(errors.ArgumentError, match=r"got 9 tokens, with a cache that has 12.*reset\(\) the"):
            generate(model, ids, cache=cache, max_new_tokens=4)  # transformers would run the last six again
    for name in REFUSED:
        with pytest.raises(errors.UnsupportedError, match=f"got {name}, which attention 'zinc' does not do"):
            attend(*q, **{name: torch.ones(1)})


def test_hostile_arguments(device: za.Device) -> None:
    """As test_hostile_arguments.py gives them to all that needs no model."""
    config = transformers.LlamaConfig(
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=64, hidden_size=128, vocab_size=9
    )
    with hf.ZincCache(config, 64, device=device, max_batch=2) as cache:
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="zinc")
        model(torch.ones((1, 3), dtype=torch.int64), cache=cache)
        x, two = torch.ones((1, 2, 1, 64)), {"batch_size": 1, "q_length": 1, "kv_length": 1}
        qkv = {"module": None, "query": x, "key": x, "value": x, "attention_mask": None, "scaling": 0.5}
        table: list[tuple[Any, dict[str, Any]]] = [
            (hf.attention_mask, {**two, "attention_mask": torch.ones((1, 1))}),
            (closing(hf.ZincCache), {"config": config, "max_cache_len": 64, "device": device}),
            (cache.allocate, {"dtype": torch.float16}),
            (cache.set_layout, {"num_splits": 1}),
            (cache.crop, {"tokens_to_remove": 0}),
            (cache.reorder_cache, {"beam_idx": [0]}),
            (cache.batch_repeat_interleave, {"repeats": 1}),
            (cache.batch_select_indices, {"indices": [0]}),
            (cache.layers[0].update, {"key_states": x, "value_states": x}),
            *[(hf.attention_forward, qkv)] * FULL,  # which takes as long as all others together
        ]
        for call in table:
            assert walk(lambda call=call: call) == [], call[0]  # type: ignore[misc]
        for value in (-1.0, 0.5, float("nan"), 2):
            with pytest.raises(errors.ValueRangeError, match=r"^attention_mask\[0, 0\]: got .*, expected 0"):
                hf.attention_mask(1, 1, 1, attention_mask=torch.tensor([[value]]))
        with pytest.raises(errors.ArgumentError, match=r"^beam_idx: got .*0\.5.*, expected an int"):
            cache.reorder_cache(torch.tensor([0.5]))


def test_a_model_that_computes_with_keys_itself_is_told_so(device: za.Device) -> None:
    """Not to select what is selected. Without a ZincCache it runs; test_dense_masks.py has models that slice masks."""
    torch.manual_seed(5)
    model, ids = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**UNTIED)).eval(), prompt(9)
    want = model(ids, use_cache=False).logits
    for name, text in (
        ("eager", r"register\(\), and select it with"),
        ("zinc", "this model's attention computes"),
    ):
        model.set_attn_implementation(name)
        with cache_of(model, device) as cache, pytest.raises(errors.UnsupportedError, match=text):
            model(ids, cache=cache)
    assert (model(ids, use_cache=False).logits - want).abs().max() < 1e-4


# --- autocast ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "youtu"])
def test_autocast_is_eagers(name: str, dtype: Any, device: za.Device) -> None:
    """Whose queries and keys may be float32 where the values are narrower, with a cache of ours or without."""
    ids, results = prompt(40), []
    with torch.autocast("cpu", dtype=dtype):
        want, model = model_of(name, "eager")(ids).logits, model_of(name)
        results.append(model(ids).logits)
        for latent in (False, True)[: 1 + (name == "youtu")]:
            with cache_of(model, device, latent=latent) as cache:
                model(ids[:, :39], cache=cache)
                results.append(model(ids[:, 39:], cache=cache).logits)
    exact = model_of(name, "eager")(ids).logits
    bound = 2 * (want.float() - exact).abs().max()
    assert bound > 0 and all((got.float() - exact[:, -got.shape[1] :]).abs().max() <= bound for got in results)


# --- tracing -------------------------------------------------------------------------------------------------


def test_a_compiled_model_has_the_bits_of_the_model(device: za.Device) -> None:
    """torch's graphs end where attention begins, also for a padded batch; a failed call is rolled back."""
    torch._dynamo.reset()
    model, given, failing = model_of("llama"), padded(12, 7), list[int]()
    ids, mask = given["ids"], torch.cat([given["attention_mask"], torch.ones(2, 2, dtype=torch.long)], dim=1)

    @torch.compiler.disable
    def hook(*_: Any) -> None:
        if failing:
            raise KeyboardInterrupt

    handle = model.lm_head.register_forward_hook(hook)
    with cache_of(model, device, max_batch=2) as cache, cache_of(model, device, max_batch=2) as other:
        compiled = torch.compile(model, backend="eager")
        for new, columns in ((ids, 12), (ids[:, :1], 13), (ids[:, 1:2], 14)):
            call = {"input_ids": new, "attention_mask": mask[:, :columns]}
            want = model(**call, cache=other).logits
            failing.append(1)
            with pytest.raises(KeyboardInterrupt):
                compiled(**call, cache=cache)
            failing.clear()
            assert equal(compiled(**call, cache=cache).logits, want)
        assert cache.get_seq_length() == 14
    handle.remove()


class Logits(torch.nn.Module):
    """A model, as the tracers take it: tensors in, a tensor out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Any) -> Any:
        return self.model(ids, use_cache=False).logits


def under_fake_tensors(model: Any, ids: Any) -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model(*ids)


TRACERS = {
    "torch.jit.trace": torch.jit.trace,
    "torch.export": torch.export.export,
    "a tracer's mode": under_fake_tensors,
    "torch.compile": lambda model, ids: torch.compile(model, backend="eager", fullgraph=True)(*ids),
}


@pytest.mark.filterwarnings("ignore")  # of torch.jit, deprecated
@pytest.mark.parametrize("within", TRACERS)
def test_tracers_that_would_keep_a_constant_are_refused(within: str) -> None:
    text = rf"{within}.*Use torch\.compile without fullgraph=True, or export and trace.*sdpa"
    with pytest.raises((errors.UnsupportedError, torch._dynamo.exc.Unsupported), match=text):  # torch's own quotes it
        TRACERS[within](Logits(model_of("llama")), (prompt(9),))
