"""Torch and transformers around attention "zinc": arguments, autocast, compiling, and tracing."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from hostile import Make, closing, walk
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
    stop = {"tokenizer": tiny_models.byte_tokenizer(), "stop_strings": ["never"], "max_new_tokens": 4}
    with cache_of(model, device) as cache:
        tokens, _ = generate(model, ids, cache=cache, **stop)
        assert torch.equal(tokens, generate(model, ids, max_new_tokens=4)[0])
        with pytest.raises(errors.ArgumentError, match=r"got 9 tokens, with a cache that has 12.*reset\(\) the"):
            generate(model, ids, cache=cache, max_new_tokens=4)  # transformers would run the last six again
    losses = [
        model_of("llama", name)(ids, labels=ids, shift_labels=ids, ignore_index=3).loss for name in ("zinc", "eager")
    ]
    assert abs(losses[0] - losses[1]) < 1e-4
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
        table: dict[str, Make] = {
            "attention_forward": lambda: (
                hf.attention_forward,
                {"module": None, "query": x, "key": x, "value": x, "attention_mask": None, "scaling": 0.5},
            ),
            "attention_mask": lambda: (hf.attention_mask, {**two, "attention_mask": torch.ones((1, 1))}),
            "ZincCache": lambda: (closing(hf.ZincCache), {"config": config, "max_cache_len": 64, "device": device}),
            "allocate": lambda: (cache.allocate, {"dtype": torch.float16}),
            "set_layout": lambda: (cache.set_layout, {"num_splits": 1}),
            "crop": lambda: (cache.crop, {"tokens_to_remove": 0}),
            "reorder_cache": lambda: (cache.reorder_cache, {"beam_idx": [0]}),
            "batch_repeat_interleave": lambda: (cache.batch_repeat_interleave, {"repeats": 1}),
            "batch_select_indices": lambda: (cache.batch_select_indices, {"indices": [0]}),
            "update": lambda: (cache.layers[0].update, {"key_states": x, "value_states": x}),
        }
        if not FULL:  # it takes as long as all others together
            del table["attention_forward"]
        assert {name: wrong for name, make in table.items() if (wrong := walk(make))} == {}
        for value in (-1.0, 0.5, float("nan"), 2):
            with pytest.raises(errors.ValueRangeError, match=r"^attention_mask\[0, 0\]: got .*, expected 0"):
                hf.attention_mask(1, 1, 1, attention_mask=torch.tensor([[value]]))
        with pytest.raises(errors.ShapeError, match=r"^attention_mask: got shape \(2, 1\), expected \(1, 1\)"):
            hf.attention_mask(1, 1, 1, attention_mask=torch.ones((2, 1)))
        with pytest.raises(errors.ArgumentError, match=r"^beam_idx: got .*0\.5.*, expected an int"):
            cache.reorder_cache(torch.tensor([0.5]))


@pytest.mark.parametrize(
    ("name", "without"), [("DiffLlama", None), ("Doge", "got a model that computes with its mask")]
)
def test_a_model_that_computes_with_keys_itself_is_told_so(name: str, without: str | None, device: za.Device) -> None:
    """Not to select what is selected. Without a ZincCache it runs, unless it needs a mask of four axes, too."""
    kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(5)
    model, ids = kind(kind.config_class(**UNTIED)).eval(), prompt(9)
    want = model(ids, use_cache=False).logits
    for selected, text in (
        (False, r"register\(\), and select it with"),
        (True, r"this model's attention computes with"),
    ):
        model.set_attn_implementation("zinc" if selected else "eager")
        with cache_of(model, device) as cache, pytest.raises(errors.UnsupportedError, match=text):
            model(ids, cache=cache)
    if without is None:
        assert (model(ids, use_cache=False).logits - want).abs().max() < 1e-4
        return
    with pytest.raises(errors.UnsupportedError, match=without):
        model(ids, use_cache=False)


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


COMPILED = [
    ("llama", False),
    *[("sharing gemma4", False), ("small deepseek_v3", False), ("small deepseek_v3", True)] * FULL,
]


@pytest.mark.parametrize(("name", "latent"), COMPILED)
def test_a_compiled_model_has_the_bits_of_the_model(name: str, latent: bool, device: za.Device) -> None:
    """torch's graphs end where attention begins, also for a padded batch; a failed call is rolled back."""
    torch._dynamo.reset()
    model, given, failing = model_of(name), padded(12, 7), list[int]()
    ids, mask = given["ids"], torch.cat([given["attention_mask"], torch.ones(2, 2, dtype=torch.long)], dim=1)

    @torch.compiler.disable
    def hook(*_: Any) -> None:
        if failing:
            raise KeyboardInterrupt

    handle = model.lm_head.register_forward_hook(hook)
    options = {"max_batch": 2, "latent": latent}
    with cache_of(model, device, **options) as cache, cache_of(model, device, **options) as other:
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


@pytest.mark.filterwarnings("ignore")  # of torch.jit, deprecated
@pytest.mark.parametrize("within", ["torch.jit.trace", "torch.export", "a tracer's mode", "torch.compile"])
def test_tracers_that_would_keep_a_constant_are_refused(within: str) -> None:
    model, ids = Logits(model_of("llama")), (prompt(9),)

    def under_fake_tensors() -> None:
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            model(*ids)

    trace, error = {
        "torch.jit.trace": (lambda: torch.jit.trace(model, ids), errors.UnsupportedError),
        "torch.export": (lambda: torch.export.export(model, ids), errors.UnsupportedError),
        "a tracer's mode": (under_fake_tensors, errors.UnsupportedError),
        "torch.compile": (  # torch's own error quotes the reason
            lambda: torch.compile(model, backend="eager", fullgraph=True)(*ids),
            torch._dynamo.exc.Unsupported,
        ),
    }[within]
    with pytest.raises(error, match=rf"{within}.*Use torch\.compile without fullgraph=True, or export and trace.*sdpa"):
        trace()
