"""The attention function of "zinc", what it refuses by name, and its form for keys and values without a ZincCache."""

import functools
import warnings
from typing import Any, Final

import numpy as np

from ...canonical.arguments import check_scale, check_softcap, check_window
from ...canonical.state import F32
from ...checks import check_bool, check_float
from ...decode.one_shot import attention
from ...errors import DTypeError, ShapeError, UnsupportedError
from . import masks
from .boundary import untraced
from .groups import AttentionOptions
from .masks import MaskPattern, mask_pattern
from .rows import ZincRows
from .tensors import DTYPES, NAME, dense_tensor, host_array
from .upstream import torch

# Arguments by which models and transformers' own batching ask an attention function for another attention or result.
# All other unknown arguments are those of the model's forward, which every layer gets.
REFUSED: Final = frozenset(
    (
        *("block_indices", "head_mask", "indices", "output_attentions", "position_bias", "sinks"),
        *("cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q"),  # packed texts
        *("block_table", "cache", "read_index", "write_index"),  # pages of generate_batch
    )
)
_NO_CACHE: Final = (
    f"attention {NAME!r} runs without a ZincCache, so every step uploads all keys and values again; pass "
    "cache=ZincCache(model.config, max_cache_len)"
)


@untraced
def attention_forward(  # noqa: PLR0913 - transformers decides on the parameters
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    is_causal: bool | None = None,
    alibi: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """The attention function of "zinc": causal attention of new rows, from a ZincCache or over all of key and value.

    query: (batch, q_heads, q_len, head_dim); key: (batch, kv_heads, tokens, head_dim); value: (batch, kv_heads, tokens,
    v_head_dim); float32, float16 or bfloat16; attention_mask: None, or 2-D (batch, tokens), or (batch, heads, q_len, n)
    of the last n tokens in place of the causal rule: bool, True where the row sees the key, or of a float dtype, added
    to the scores; batch, heads and q_len may be 1, and heads may not differ. sliding_window: how many keys a row sees
    at most, its own included; softcap: of the scores; s_aux: attention sinks, raw logits (q_heads,); alibi: slopes
    (q_heads,), by which scores become score - slope * distance.
    Returns (batch, q_len, q_heads, v_head_dim) of query's dtype, and None for the weights. Rows at padding columns, and
    rows from which a 4-D mask hides every key, are 0.
    UnsupportedError names a request of the model that this function does not serve; ShapeError, DTypeError and the
    package's other errors are raised as by ``zinc_attn.attention``.
    """
    _refuse_arguments(module, dropout, is_causal, kwargs)
    _check_tensors(module, query, key, value)
    heads = _per_head("s_aux", s_aux), _per_head("alibi", alibi)
    options = AttentionOptions(
        check_scale(scaling, query.shape[-1]), check_window(sliding_window), check_softcap(softcap), *heads
    )
    pattern = mask_pattern(attention_mask)
    if isinstance(key, ZincRows):
        out = key.layer.attend(module, query, key, value, pattern, options)
    else:
        out = _attend_uploaded(query, key, value, pattern, options)
    return torch.from_numpy(out).to(query.device, query.dtype), None


def _per_head(name: str, x: Any) -> F32 | None:
    """A number per query head as float32 (q_heads,), or None."""
    if x is None:
        return None
    numbers: F32 = dense_tensor(name, x).detach().to("cpu", torch.float32).reshape(-1).numpy().copy()
    return numbers


def _check_tensors(module: Any, query: Any, key: Any, value: Any) -> None:
    """Refuse arguments that are no tensors of four axes and a known dtype, or that require a gradient.

    Refuse another batch of keys, and values of other tokens, too.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if dense_tensor(name, x).ndim != 4 or 0 in x.shape:
            raise ShapeError(f"{name}: got shape {tuple(x.shape)}, expected (batch, heads, tokens, head_dim)")
        if x.dtype not in DTYPES:
            raise DTypeError(f"{name}: got dtype {x.dtype}, expected float32, float16 or bfloat16")
        if torch.is_grad_enabled() and x.requires_grad:
            where = type(module).__name__
            raise UnsupportedError(f"{where}: got tensors that require a gradient, expected none; use torch.no_grad()")
    if key.shape[0] != query.shape[0]:
        raise ShapeError(f"key: got a batch of {key.shape[0]}, expected query's {query.shape[0]}")
    if value.shape[:3] != key.shape[:3]:
        expected = f"{tuple(key.shape[:3])} as key's first axes"
        raise ShapeError(f"value: got shape {tuple(value.shape)}, expected {expected}, and any v_head_dim")


def _refuse_arguments(module: Any, dropout: float, is_causal: bool | None, others: dict[str, Any]) -> None:
    """Refuse by name an argument that would change the attention and that this function would have to ignore."""
    where = type(module).__name__
    dropout = check_float("dropout", dropout)
    if is_causal is not None:
        is_causal = check_bool("is_causal", is_causal)
    if dropout:
        raise UnsupportedError(f"{where}: got dropout = {dropout:g}, expected 0; call model.eval()")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedError(
            f"{where}: got is_causal = False, expected causal attention; give that part of the model another "
            "attn_implementation, for example {'text_config': 'zinc', 'vision_config': 'sdpa'}"
        )
    for name, value in others.items():
        if name in REFUSED and value is not None and value is not False:
            raise UnsupportedError(
                f"{where}: got {name}, which attention {NAME!r} does not do; expected a call without it; use "
                'attn_implementation="eager" for this model'
            )


@functools.cache
def _warn_once() -> None:
    warnings.warn(_NO_CACHE, stacklevel=1)


def _attend_uploaded(query: Any, key: Any, value: Any, pattern: MaskPattern, options: AttentionOptions) -> F32:
    """Upload all keys and values for this one call, and attend them: (batch, q_len, q_heads, v_head_dim)."""
    dtype = torch.promote_types(key.dtype, value.dtype)  # torch.autocast leaves rotated keys in float32, and no values
    q, k, v = map(host_array, (query, key.to(dtype), value.to(dtype)))
    batch, keys, q_len = len(k), k.shape[1], q.shape[1]
    if keys > q_len:  # another cache holds the tokens before
        _warn_once()
    arguments = dict(vars(options))
    if q_len > keys:
        raise ShapeError(f"key: got {keys} tokens for {q_len} query rows, expected at least as many")
    kept, dense = pattern.kept, None
    if kept is not None and kept.shape != (batch, keys):
        raise ShapeError(f"attention_mask: got shape {kept.shape}, expected ({batch}, {keys})")
    masks.check_window(pattern, kept, options.window, keys)
    if pattern.dense is not None:
        dense = pattern.dense.expanded(batch, q_len, keys).of_rows(kept, options.window)
        arguments |= {"causal": dense.causal, "allow_empty": True}
    out = np.zeros((*q.shape[:3], v.shape[3]), np.float32)
    for i in range(batch):
        columns = np.ones(keys, np.bool_) if kept is None else kept[i]
        rows = columns[keys - q_len :]  # the queries are the last columns
        if rows.any():
            mask = None if dense is None else dense.masks[i]
            out[i, rows] = attention(q[i, rows], k[i, columns], v[i, columns], mask=mask, **arguments)
    return out
