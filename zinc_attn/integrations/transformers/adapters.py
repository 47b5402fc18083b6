"""``adapt()``: BLOOM, MPT and Falcon, whose attention transformers hard-codes, attend through "zinc".

Each module's forward is replaced on the module itself. The new forward computes, with the module's own weights, the
same as the tested release of transformers, except for the attention. ALiBi slopes are read off the tensor that the
model's own code builds. All three models add a bias that is slope * position of the key up to a constant per row,
which softmax ignores, so it is the slope * -distance of this package for every key that a row sees.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...errors import ArgumentError, UnsupportedError
from .attention import attention_forward
from .masks import mask_pattern
from .registration import register
from .tensors import ADAPTED
from .upstream import PreTrainedModel, release, torch, transformers

_RELEASE: Final = (5, 24)  # of transformers, whose modules have been compared
_POSITIONS: Final = 8  # for which a model's ALiBi tensor is built to see whether it is linear


@dataclass(frozen=True)
class _Family:
    """The models of one file of transformers.

    bias: returns the bias (heads, ``_POSITIONS``) that a model builds for one row, or None where it has none. forward:
    is called in place of the module's, with the module, the slopes and the module's arguments, which it names as the
    attention class's forward does, in the same order.
    """

    name: str
    bias: Callable[[Any], Any]
    forward: Callable[..., tuple[Any, None]]

    @property
    def source(self) -> str:
        """The module of transformers that defines ``name``Attention, and ``name``Model, which builds the bias."""
        return f"transformers.models.{self.name.lower()}.modeling_{self.name.lower()}"


def adapt(model: Any) -> None:
    """Let a BLOOM, MPT or Falcon model attend through "zinc", with a ZincCache or without; a second call does nothing.

    Their classes in transformers compute attention themselves and take no attn_implementation. This replaces the
    forward of each attention module of ``model``, and nothing outside the model except what ``register()`` does. To
    have the model's own attention back, load the model again.
    UnsupportedError: another model, a release of transformers that was not tested, or modules that are not those of
    transformers, for example because an adapter or a hook has changed them.
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(f"model: got {type(model).__name__}, expected a transformers model")
    families = {f"{entry.name}Attention": entry for entry in _FAMILIES}
    modules = [module for module in model.modules() if type(module).__name__ in families]
    if not modules:
        raise UnsupportedError(
            f"adapt: got {type(model).__name__}, expected a model with BLOOM's, MPT's or Falcon's attention; select "
            'attention "zinc" of other models with attn_implementation="zinc"'
        )
    family = families[type(modules[0]).__name__]
    owners = [module for module in model.modules() if type(module).__name__ == f"{family.name}Model"]
    if release() != _RELEASE:
        known = f"{_RELEASE[0]}.{_RELEASE[1]}, whose attention modules are known"
        raise UnsupportedError(f"adapt: got transformers {transformers.__version__}, expected {known}")
    if len(owners) != 1:
        raise UnsupportedError(f"adapt: got {len(owners)} modules {family.name}Model, expected one")
    if model.config._attn_implementation == ADAPTED:
        return
    for module in modules:
        _check_module(module, family)
    slopes = _slopes(family.bias(owners[0]), type(owners[0]).__name__)
    register()
    for module in modules:
        module.forward = functools.partial(family.forward, module, slopes)
    model.config._attn_implementation = ADAPTED  # transformers asks for masks by this name


def _check_module(module: Any, family: _Family) -> None:
    """Refuse a module with another computation than transformers' class of this name."""
    kind = type(module)
    names = [name for name in inspect.signature(kind.forward).parameters if name not in ("self", "kwargs")]
    known = [x for x in inspect.signature(family.forward).parameters if x not in ("module", "slopes", "kwargs")]
    if kind.__module__ != family.source or names != known or "forward" in vars(module):
        raise UnsupportedError(
            f"adapt: got {kind.__module__}.{kind.__name__} with another forward than transformers' own, expected "
            "modules that nothing has replaced or hooked; adapt the model before adding anything to it"
        )
    if getattr(module, "pretraining_tp", 1) > 1 and getattr(module, "slow_but_exact", False):
        raise UnsupportedError("adapt: got slow_but_exact with pretraining_tp above 1, expected slow_but_exact=False")


def _slopes(bias: Any, model: str) -> Any:
    """The slopes (heads,) of a bias (heads, positions), float32, or None. UnsupportedError: it is not linear.

    They are read next to the position whose bias is 0: there no product is rounded; Falcon rounds others to bfloat16.
    """
    if bias is None:
        return None
    values = bias.double().cpu().numpy()
    origin = 0 if np.all(values[:, 0] == 0) else values.shape[1] - 1
    slopes = values[:, 1] if origin == 0 else -values[:, -2]
    linear = slopes[:, None] * (np.arange(values.shape[1]) - origin)
    if not np.allclose(values, linear, rtol=2.0**-8, atol=0.0):
        raise UnsupportedError(
            f"adapt: got {model} with a bias that is not linear in the key's position, expected ALiBi's"
        )
    return torch.from_numpy(slopes.astype(np.float32))


def _attended(
    module: Any, rows: Sequence[Any], past: Any, mask: Any, *, dropout: float, scaling: float, **options: Any
) -> Any:
    """The attention of a module's new rows (query, key, value), heads side by side: (batch, q_len, q_heads * head_dim).

    past: the cache, or None; dropout: the rate while training, which attention "zinc" refuses unless it is 0.
    """
    query, key, value = rows
    if past is not None:
        key, value = past.update(key, value, module.layer_idx)
    rate = dropout if module.training else 0.0
    out, _ = attention_forward(module, query, key, value, mask, dropout=rate, scaling=scaling, **options)
    return out.flatten(2)


def _bloom_bias(model: Any) -> Any:
    return model.build_alibi_tensor(torch.ones(1, _POSITIONS), model.num_heads, torch.float32)[:, 0]


def _bloom(  # noqa: PLR0913 - BloomAttention.forward's parameters
    module: Any,
    slopes: Any,
    hidden_states: Any,
    residual: Any,
    alibi: Any,
    attention_mask: Any,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Any, None]:
    new = module._reshape(module.query_key_value(hidden_states))
    options = {"dropout": module.attention_dropout.p, "scaling": module.inv_norm_factor, "alibi": slopes * module.beta}
    out = _attended(module, new, layer_past, attention_mask, output_attentions=output_attentions, **options)
    out = module.dense(out)
    out = torch.nn.functional.dropout(out, p=module.hidden_dropout, training=module.training)
    return residual + out, None


def _mpt(
    module: Any,
    slopes: Any,
    hidden_states: Any,
    position_bias: Any,
    cache: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = (*hidden_states.shape[:2], module.n_heads, module.head_dim)
    new = [x.reshape(heads).transpose(1, 2) for x in qkv.chunk(3, dim=2)]
    if attention_mask is not None and not hasattr(attention_mask, "zinc"):
        attention_mask = ~attention_mask  # MptModel reads a 4-D mask as not 0 where a key is hidden
        rows, keys = attention_mask.shape[-2:]
        if attention_mask.triu(keys - rows + 1).any():
            raise UnsupportedError(
                "attention_mask: shows a row a key after its position, to which MPT's ALiBi adds, expected a mask "
                "that hides later keys; from such keys this package subtracts, as FlashAttention does"
            )
    kept = mask_pattern(attention_mask).kept
    if kept is not None and np.any(np.diff(kept.astype(np.int8), axis=1) < 0):
        raise UnsupportedError(
            "attention_mask: got padding after a token, which MPT's ALiBi counts as positions, expected padding in "
            'front of the tokens; use padding_side="left"'
        )
    rates = {"dropout": module.attn_dropout_p, "scaling": module.softmax_scale}
    return module.out_proj(_attended(module, new, cache, attention_mask, **rates, alibi=slopes)), None


def _falcon_bias(model: Any) -> Any:
    if not model.use_alibi:
        return None
    build = inspect.getmodule(type(model)).build_alibi_tensor  # type: ignore[union-attr]
    return build(torch.ones(1, _POSITIONS, dtype=torch.long), model.num_heads, torch.float32)[:, 0]


def _falcon(  # noqa: PLR0913 - FalconAttention.forward's parameters
    module: Any,
    slopes: Any,
    hidden_states: Any,
    alibi: Any,
    attention_mask: Any,
    position_ids: Any = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    qkv = module.query_key_value(hidden_states)
    if module.new_decoder_architecture:  # FalconAttention._split_heads would repeat K and V for every query head
        groups = qkv.view(*qkv.shape[:2], module.num_kv_heads, -1, module.head_dim)
        query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    else:
        query, key, value = module._split_heads(qkv)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if slopes is None:
        rotate = inspect.getmodule(type(module)).apply_rotary_pos_emb  # type: ignore[union-attr]
        query, key = rotate(query, key, *position_embeddings)
    options = {"dropout": module.attention_dropout.p, "scaling": module.inv_norm_factor}
    options["alibi"] = None if slopes is None else slopes * module.inv_norm_factor  # Falcon scales its bias, too
    new = query, key, value
    out = _attended(module, new, layer_past, attention_mask, output_attentions=output_attentions, **options)
    return module.dense(out), None


_FAMILIES: Final = (
    _Family("Bloom", _bloom_bias, _bloom),
    _Family("Mpt", lambda model: model.build_mpt_alibi_tensor(model.num_heads, _POSITIONS)[:, 0], _mpt),
    _Family("Falcon", _falcon_bias, _falcon),
)
