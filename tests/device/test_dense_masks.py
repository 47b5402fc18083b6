"""Masks (batch, heads, rows, keys): prefixes, trees, biases and packed texts, with a ZincCache and without.

A bool mask is compared with sdpa's attention and a float one with eager's, which adds it; BOUND is that of
test_transformers.py. Where a mask says no more than the causal rule, the bits are those of a call without one.
"""

from typing import Any

import numpy as np
import pytest
from tiny_models import prompt
from zinc_models import attend, cache_of, equal, hf, model_of, torch, transformers

import zinc_attn as za
from zinc_attn import errors
from zinc_attn.integrations.transformers.dense_masks import DenseMask

NATIVE = True
BOUND = 1e-4
N = 45  # tokens of a text
RNG = np.random.default_rng(4)
LOWEST = torch.finfo(torch.float32).min
ONE_DISPATCHER = True
pytestmark = [
    pytest.mark.usefixtures("models_may_attend"),
    pytest.mark.filterwarnings("ignore:attention 'zinc' runs without a ZincCache"),
]


def causal(rows: int, keys: int, window: int | None = None) -> Any:
    """(1, 1, rows, keys) of the last rows."""
    distance = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    return ((distance >= 0) & (distance < (window or keys)))[None, None]


def prefix(rows: int) -> Any:
    """The first 20 tokens see each other, also those behind them."""
    mask = causal(rows, rows)
    mask[..., :20, :20] = True
    return mask


def tree(rows: int, keys: int) -> Any:
    """The last rows are tokens of a tree, which see their ancestors and all keys before the tree."""
    parent = [None, 0, 0, 1, 2][:rows]
    mask = torch.ones(rows, keys, dtype=torch.bool)
    mask[:, keys - rows :] = torch.eye(rows, dtype=torch.bool)
    for row, above in enumerate(parent):
        if above is not None:
            mask[row, keys - rows :] |= mask[above, keys - rows :]
    return mask[None, None]


def bias(mask: Any, fill: float = LOWEST) -> Any:
    """A number for each key that a row sees, and ``fill`` for the others."""
    values = torch.from_numpy(RNG.standard_normal(tuple(mask.shape)).astype(np.float32))
    return torch.where(mask, values, torch.full((), fill))


MASKS = {
    "tree": (torch.cat([causal(N - 5, N), tree(5, N)], dim=2), "sdpa"),
    "bias": (bias(causal(N, N)), "eager"),
    "bias of a prefix": (bias(prefix(N), -torch.inf), "eager"),
    "window": (causal(N, N, 16), "sdpa"),
    "of two batch rows": (torch.cat([prefix(N), causal(N, N)]), "sdpa"),
    "half precision": (torch.zeros(1, 4, N, N, dtype=torch.bfloat16).masked_fill(~prefix(N), -3.3895e38), "eager"),
}


CASES = [
    *((name, "llama", False) for name in MASKS),
    *(("bias of a prefix", "small deepseek_v3", latent) for latent in (False, True)),
]


@pytest.mark.parametrize(("name", "kind", "latent"), CASES)
def test_logits_are_those_of_transformers(name: str, kind: str, latent: bool, device: za.Device) -> None:
    """The prompt in one call, then the tokens of a tree, then one token without a mask."""
    mask, other = MASKS[name]
    ids = prompt(N, len(mask))
    then = prompt(5, len(mask), seed=7)
    more = tree(5, N + 5)
    given = torch.zeros(more.shape).masked_fill(~more, LOWEST) if other == "eager" else more

    def run(model: Any, held: Any) -> list[Any]:
        steps = (ids, mask), (then, given.expand(len(mask), -1, -1, -1)), (then[:, :1], None)
        return [model(x, attention_mask=m, cache=held).logits for x, m in steps]

    want = run(model_of(kind, other), transformers.DynamicCache())
    model = model_of(kind)
    with cache_of(model, device, max_batch=2, latent=latent) as held:
        got = run(model, held)
    for parts in (got, run(model, transformers.DynamicCache())):
        assert all((a - b).abs().max() <= BOUND for a, b in zip(parts, want, strict=True))


def test_causal_masks_take_no_mask_buffer(device: za.Device) -> None:
    """The device gets none, and the bits are those of no mask; those of a tree's own tokens are of the whole mask."""
    for mask in (causal(5, 9), torch.zeros(1, 1, 5, 9).masked_fill(~causal(5, 9), LOWEST)):
        results = DenseMask.of(mask).expanded(2, 5, 9).of_rows(None, None)
        assert results.causal and results.masks == [None, None]
    results = DenseMask.of(causal(5, 9, 3)).expanded(1, 5, 9).of_rows(None, 3)
    assert results.causal and results.masks == [None]
    tail = DenseMask.of(tree(5, 60)).expanded(1, 5, 60).of_rows(None, None)
    assert tail.causal and tail.masks[0] is not None and tail.masks[0].shape == (5, 4)  # from the first that hides
    ids, model, whole = prompt(N), model_of("llama"), tree(5, N)
    edges = (0, 30), (30, 31), (31, 40), (40, N)
    ways = [None, None, None, whole], [*(causal(end - at, end) for at, end in edges[:3]), whole[..., -5:]]
    results = []
    for masks in ways:
        with cache_of(model, device) as held:
            calls = zip(edges, masks, strict=True)
            parts = [model(ids[:, at:end], attention_mask=mask, cache=held) for (at, end), mask in calls]
        results.append(torch.cat([part.logits for part in parts], dim=1))
    assert equal(*results)


def test_padding_of_a_4d_mask_is_not_stored(device: za.Device) -> None:
    """A token that no row sees, and that sees none, is padding, as in the 2-D mask that the next call has."""
    ids, model = prompt(20, 2), model_of("llama")
    flat = torch.ones(2, 21, dtype=torch.long)
    flat[1, :6] = 0
    mask = causal(20, 20) & flat[:, None, None, :20].bool()
    with cache_of(model, device, max_batch=2) as plain, cache_of(model, device, max_batch=2) as held:
        want = model(ids, attention_mask=flat[:, :20], cache=plain).logits
        got = model(ids, attention_mask=mask, cache=held).logits
        assert equal(got, want) and [len(sequence) for sequence in held.sequences[0]] == [20, 14]
        more = {"attention_mask": flat}
        want, got = (model(ids[:, :1], cache=one, **more).logits for one in (plain, held))
        assert equal(got, want)
        text = "batch row 1 sees a token that is padding in the 2-D mask, or that no row saw when the cache was given"
        with pytest.raises(errors.UnsupportedError, match=text):
            model(ids[:, :1], attention_mask=torch.ones(1, 1, 1, 22), cache=held)
        model(ids[:, :1], attention_mask=torch.ones(1, 1, 1, 5, dtype=torch.bool), cache=held)


def rows_of(n: int, batch: int = 1, heads: int = 4) -> tuple[Any, Any, Any]:
    rng = torch.Generator().manual_seed(5)
    q, *kv = (torch.randn(batch, size, n, 64, generator=rng) for size in (heads, 2, 2))
    return q, kv[0], kv[1]


def both_ways(device: za.Device, q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, Any]:
    """The output with a cache and without one."""
    with cache_of(model_of("llama"), device, max_batch=2) as held:
        return attend(q, *held.update(k, v, 0), mask), attend(q, k, v, mask)


def test_rows_that_see_no_key_are_0(device: za.Device) -> None:
    q, k, v = rows_of(9)
    mask = causal(9, 9)
    mask[..., 4, :] = False
    whole = attend(q, k, v, None)
    for out in both_ways(device, q, k, v, mask):
        assert not out[:, 4].any() and equal(out[:, 5:], whole[:, 5:])


def test_windows_and_masks(device: za.Device) -> None:
    """A layer's window holds besides its mask, which has to hide what the window does."""
    ids = prompt(N)
    near = torch.arange(N)[:, None] - torch.arange(N) < 24
    masks = {"full_attention": prefix(N), "sliding_attention": prefix(N) & near}
    added = {kind: torch.zeros(mask.shape).masked_fill(~mask, LOWEST) for kind, mask in masks.items()}
    want = model_of("small gemma2", "eager")(ids, attention_mask=added).logits
    model = model_of("small gemma2")
    with cache_of(model, device) as held:
        got = model(ids, attention_mask=masks, cache=held).logits
        assert (got - want).abs().max() <= BOUND
        held.reset()
        text = "batch row 0 sees a key that a layer's sliding_window of 24 "
        with pytest.raises(errors.UnsupportedError, match=text):
            model(ids, attention_mask=masks["full_attention"], cache=held)


@pytest.mark.parametrize("kind", ["blocks", "chunks", "bidirectional"])
def test_patterns_of_transformers(kind: str, device: za.Device) -> None:
    """Blocks that see each other, of the second batch row alone; with padding in front of it."""
    m = transformers.masking_utils
    blocks = torch.tensor([[-1] * 12, [-1] * 5 + [0] * 4 + [-1] * 3])
    pattern = {
        "blocks": m.or_masks(m.causal_mask_function, m.blockwise_overlay(blocks)),
        "chunks": m.chunked_causal_mask_function(5, torch.tensor([0, 2])),
        "bidirectional": m.bidirectional_mask_function,
    }[kind]
    flat = torch.ones(2, 12, dtype=torch.bool)
    flat[1, :2] = False
    want = m.sdpa_mask(2, 12, 12, mask_function=pattern, attention_mask=flat, allow_is_causal_skip=False)
    mask = hf.attention_mask(2, 12, 12, mask_function=pattern, attention_mask=flat)
    assert torch.equal(mask, want) and mask.zinc.dense.of_rows(None, None).causal == (kind == "chunks")
    q, k, v = rows_of(12, 2)
    spread = (x.repeat_interleave(2, dim=1) for x in (k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(q, *spread, attn_mask=want).transpose(1, 2)
    exact[~flat] = 0  # padding, which may see tokens in transformers
    for out in both_ways(device, q, k, v, mask):
        assert (out - exact).abs().max() < 1e-6


def test_packed_texts(device: za.Device) -> None:
    """Position ids that begin again make transformers separate the texts."""
    ids, positions = prompt(20), torch.cat([torch.arange(12), torch.arange(8)])[None]
    want = model_of("llama", "eager")(ids, position_ids=positions, use_cache=False).logits
    got = model_of("llama")(ids, position_ids=positions, use_cache=False).logits
    assert (got - want).abs().max() <= BOUND


def test_masks_that_are_sliced_in_another_way_are_ordinary_tensors() -> None:
    mask = hf.attention_mask(2, 4, 9, 5)
    assert mask[:, :, -1:, :] is mask and mask[:, :, 0:, :] is mask
    assert not hasattr(mask[:, :5], "zinc") and not hasattr(mask & mask, "zinc") and not hasattr(mask.float(), "zinc")
    with pytest.raises(errors.UnsupportedError, match="computes with its mask of four axes"):
        mask[:, :, :-1, :]
    dense = hf.attention_mask(2, 4, 4, mask_function=transformers.masking_utils.bidirectional_mask_function)
    assert dense[:, :, -1:, :].shape == (2, 1, 1, 4) and not hasattr(dense[:, :, -1:, :], "zinc")


def with_value(value: float) -> Any:
    mask = causal(3, 3).float()
    mask[0, 0, 1, 1] = value
    return mask


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "heads": (causal(3, 3) & torch.arange(4)[:, None, None].bool(), errors.UnsupportedError, "heads"),
    "dtype": (causal(3, 3).long(), errors.DTypeError, "got a 4-D mask of torch.int64, expected bool, float32"),
    "NaN": (with_value(torch.nan), errors.ValueRangeError, "got a NaN, "),
    "infinity": (with_value(torch.inf), errors.ValueRangeError, "got a NaN, "),
    "magnitude": (with_value(-1e30), errors.ValueRangeError, "or a magnitude beyond 2"),
    "rows": (causal(2, 3), errors.ShapeError, r"1 batch rows, 2 rows and 3 keys, expected 1, 3 and 3, or the last of"),
    "keys": (causal(3, 4), errors.ShapeError, "3 rows and 4 keys"),
    "few keys": (causal(3, 3)[..., 1:], errors.ShapeError, "at least the 3 new ones"),
    "batch": (causal(3, 3).expand(2, 1, 3, 3), errors.ShapeError, "2 batch rows"),
    "axes": (causal(3, 3)[0], errors.ShapeError, r"got shape \(1, 3, 3\), expected none, \(batch, tokens\) or \(bat"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_are_refused(name: str, device: za.Device) -> None:
    (q, *keys), (mask, error, text) = rows_of(3), REFUSED[name]
    with cache_of(model_of("llama"), device) as held:
        for k, v in (keys, held.update(*keys, 0)):
            with pytest.raises(error, match=text):
                attend(q, k, v, mask)
        assert held.get_seq_length() == 0
